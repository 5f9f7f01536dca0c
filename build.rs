// SPDX-License-Identifier: MIT OR Apache-2.0

//! With the feature `cuda`, compiles the kernels of `gin-kernels`, the kernels that `gin bench` times and the engine of
//! software NICs to PTX. Writes `ptx.rs`, `bench.rs` and `engine.rs`, tables of them, to `OUT_DIR`. Without the feature
//! it does nothing.

fn main() {
    #[cfg(feature = "cuda")]
    if let Err(error) = embed() {
        // One line of output is one message of cargo's.
        for line in error.to_string().lines().filter(|line| !line.is_empty()) {
            println!("cargo::error={line}");
        }
        println!(
            "cargo::error=Everything but real GPUs builds without these kernels: cargo build --no-default-features"
        );
    }
    #[cfg(not(feature = "cuda"))]
    println!("cargo::rerun-if-changed=build.rs");
}

/// Architectures that the kernels are shipped for; the driver compiles the nearest one below for any other GPU.
#[cfg(feature = "cuda")]
const ARCHS: &str = "sm_80,sm_90,sm_100";

#[cfg(feature = "cuda")]
fn embed() -> Result<(), Box<dyn std::error::Error>> {
    use gin_build::{Arch, KernelBuilder};

    println!("cargo::rerun-if-changed=build.rs");
    // Speeds builds up on a machine with one kind of GPU, where kernels change often.
    println!("cargo::rerun-if-env-changed=GIN_ARCHS");
    let archs = std::env::var("GIN_ARCHS").unwrap_or_else(|_| ARCHS.to_owned());
    let archs = archs.split(',').map(str::trim).map(str::parse).collect::<Result<Vec<Arch>, _>>()?;
    let out = std::path::PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    for (kernels, table) in [("gin-kernels", "ptx"), ("gin-kernels/bench", "bench"), ("gin-soft-hca", "engine")] {
        let place = out.join(table);
        std::fs::create_dir_all(&place)?;
        let builder = KernelBuilder::new(kernels).archs(archs.clone()).copy_to(&place);
        builder.build()?.write_table(&place.with_extension("rs"))?;
    }
    Ok(())
}
