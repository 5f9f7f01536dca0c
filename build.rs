// SPDX-License-Identifier: MIT OR Apache-2.0

//! Compiles kernels to PTX if the feature `cuda` is on: the kernels of `gin-kernels` and the engine of software NICs.
//! Writes the tables `ptx.rs` and `engine.rs` to `OUT_DIR`. Without the feature it compiles nothing.

fn main() {
    #[cfg(feature = "cuda")]
    if let Err(error) = embed() {
        // Cargo shows each line of output as a separate message.
        for line in error.to_string().lines().filter(|line| !line.is_empty()) {
            println!("cargo::error={line}");
        }
        println!(
            "cargo::error=Only real GPUs need these kernels; build without them: \
             cargo build --no-default-features"
        );
    }
    #[cfg(not(feature = "cuda"))]
    println!("cargo::rerun-if-changed=build.rs");
}

/// The architectures of the shipped PTX. For any other GPU, the driver compiles the PTX of the nearest lower
/// architecture.
#[cfg(feature = "cuda")]
const ARCHS: &str = "sm_80,sm_90,sm_100";

#[cfg(feature = "cuda")]
fn embed() -> Result<(), Box<dyn std::error::Error>> {
    use gin_build::{Arch, KernelBuilder};

    println!("cargo::rerun-if-changed=build.rs");
    // The variable shortens builds on a machine with one kind of GPU.
    println!("cargo::rerun-if-env-changed=GIN_ARCHS");
    let archs = std::env::var("GIN_ARCHS").unwrap_or_else(|_| ARCHS.to_owned());
    let archs = archs.split(',').map(str::trim).map(str::parse).collect::<Result<Vec<Arch>, _>>()?;
    let out = std::path::PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    for (kernels, table) in [("gin-kernels", "ptx"), ("gin-host/soft-nic", "engine")] {
        let folder = out.join(table);
        std::fs::create_dir_all(&folder)?;
        let builder = KernelBuilder::new(kernels).archs(archs.clone()).figures(false).copy_to(&folder);
        // The workloads find their back end at run time.
        let features = if kernels == "gin-kernels" { &["gdaki-any"][..] } else { &[] };
        builder.features(features.iter().copied()).build()?.write_table(&folder.with_extension("rs"))?;
    }
    Ok(())
}
