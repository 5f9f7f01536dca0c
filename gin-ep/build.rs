// SPDX-License-Identifier: MIT OR Apache-2.0

//! With the feature `cuda`, compiles the kernels to PTX and writes the table `ptx.rs` to `OUT_DIR`.
//! `GIN_ARCHS` names the architectures; the default is `sm_80` and `sm_90`.

#[cfg(feature = "cuda")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    use gin_build::{Arch, KernelBuilder};

    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=GIN_ARCHS");
    let archs = std::env::var("GIN_ARCHS").unwrap_or_else(|_| "sm_80,sm_90".to_owned());
    let archs = archs.split(',').map(str::trim).map(str::parse).collect::<Result<Vec<Arch>, _>>()?;
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    let builder = KernelBuilder::new("kernels").archs(archs).figures(false).copy_to(&out);
    builder.build()?.write_table(&out.join("ptx.rs"))?;
    Ok(())
}

#[cfg(not(feature = "cuda"))]
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}
