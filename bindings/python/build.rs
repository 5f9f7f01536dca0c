// SPDX-License-Identifier: MIT OR Apache-2.0

//! With the feature `cuda`, compiles the linked kernels to PTX, and writes the tables `shipped.rs` and `examples.rs` to
//! `OUT_DIR`. `GIN_ARCHS` names the architectures; the default is `sm_90`.

#[cfg(feature = "cuda")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    use gin_build::{Arch, KernelBuilder, UsePtxas};

    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=GIN_ARCHS");
    let archs = std::env::var("GIN_ARCHS").unwrap_or_else(|_| "sm_90".to_owned());
    let archs = archs.split(',').map(str::trim).map(str::parse).collect::<Result<Vec<Arch>, _>>()?;
    let out = std::path::PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    for (kernels, table) in [("../../gin-kernels", "shipped"), ("../../examples/kernels", "examples")] {
        let folder = out.join(table);
        std::fs::create_dir_all(&folder)?;
        // Other builds assemble these kernels. Here that would only cost time, since the driver compiles the PTX.
        let builder = KernelBuilder::new(kernels).archs(archs.clone()).figures(false).ptxas(UsePtxas::No);
        builder.copy_to(&folder).build()?.write_table(&folder.with_extension("rs"))?;
    }
    Ok(())
}

#[cfg(not(feature = "cuda"))]
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}
