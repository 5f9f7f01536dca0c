// SPDX-License-Identifier: MIT OR Apache-2.0

//! With the feature `cuda`, compiles the kernels to PTX and writes the table `ptx.rs` to `OUT_DIR`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    // Products have kernels with the instructions of H100 and H200.
    gin_build::KernelBuilder::dependency("gin_ep_kernels").also(gin_build::Arch::Sm90a).figures(false).embed("ptx");
}
