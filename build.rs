// SPDX-License-Identifier: MIT OR Apache-2.0

//! Sets `cfg(packaged)` outside a checkout. With the feature `cuda`, compiles the kernels of the workloads and the
//! engine of software NICs to PTX, and writes the tables `ptx.rs` and `engine.rs` to `OUT_DIR`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // `gin new` depends on gin by path in a checkout, and by version where cargo has unpacked this crate alone.
    println!("cargo::rustc-check-cfg=cfg(packaged)");
    if !std::path::Path::new("gin-device/Cargo.toml").is_file() {
        println!("cargo::rustc-cfg=packaged");
    }
    #[cfg(feature = "cuda")]
    {
        use gin_build::KernelBuilder;
        // The workloads find their back end at run time.
        KernelBuilder::dependency("gin_kernels").features(["gdaki-any"]).figures(false).embed("ptx");
        KernelBuilder::dependency("gin_soft_nic").figures(false).embed("engine");
    }
}
