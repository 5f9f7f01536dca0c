// SPDX-License-Identifier: MIT OR Apache-2.0

//! With the feature `cuda`, compiles the kernels of the conformance suite to PTX and writes `ptx.rs`, a table of them, to
//! `OUT_DIR`.

fn main() {
    #[cfg(feature = "cuda")]
    if let Err(error) = embed() {
        // One line of output is one message of cargo's.
        for line in error.to_string().lines().filter(|line| !line.is_empty()) {
            println!("cargo::error={line}");
        }
    }
    #[cfg(not(feature = "cuda"))]
    println!("cargo::rerun-if-changed=build.rs");
}

/// Architectures of the GPUs that the tests run on.
#[cfg(feature = "cuda")]
const ARCHS: &str = "sm_80,sm_90";

#[cfg(feature = "cuda")]
fn embed() -> Result<(), Box<dyn std::error::Error>> {
    use gin_build::{Arch, KernelBuilder};

    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=GIN_ARCHS");
    let archs = std::env::var("GIN_ARCHS").unwrap_or_else(|_| ARCHS.to_owned());
    let archs = archs.split(',').map(str::trim).map(str::parse).collect::<Result<Vec<Arch>, _>>()?;
    let out = std::path::PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    KernelBuilder::new("../gin-conformance").archs(archs).copy_to(&out).build()?.write_table(&out.join("ptx.rs"))?;
    Ok(())
}
