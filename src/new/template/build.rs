use gin_build::{Arch, KernelBuilder};
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    KernelBuilder::new("kernels").arch(Arch::Sm90).copy_to(&out).build()?.write_table(&out.join("ptx.rs"))?;
    Ok(())
}
