// SPDX-License-Identifier: MIT OR Apache-2.0

//! With the feature `cuda`, compiles the kernels of the workloads and the engine of software NICs to PTX, and writes
//! the tables `ptx.rs` and `engine.rs` to `OUT_DIR`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    {
        use gin_build::KernelBuilder;
        // The workloads find their back end at run time.
        KernelBuilder::new("gin-kernels").features(["gdaki-any"]).figures(false).embed("ptx");
        KernelBuilder::new("gin-host/soft-nic").figures(false).embed("engine");
    }
}
