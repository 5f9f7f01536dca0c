// SPDX-License-Identifier: MIT OR Apache-2.0

//! With the feature `cuda`, compiles the linked kernels to PTX, and the device functions of `gincomm.triton` to LLVM's
//! IR. Writes the tables `shipped.rs`, `examples.rs` and `triton.rs` to `OUT_DIR`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    for (kernels, table) in [("../../gin-kernels", "shipped"), ("../../examples/kernels", "examples")] {
        // Other builds assemble these kernels. Here that would only cost time, since the driver compiles the PTX.
        gin_build::KernelBuilder::new(kernels).figures(false).ptxas(gin_build::UsePtxas::No).embed(table);
    }
    #[cfg(feature = "cuda")]
    gin_build::KernelBuilder::new("../c/device")
        .features(["triton"])
        .figures(false)
        .ptxas(gin_build::UsePtxas::No)
        .ir(true)
        .embed("triton");
}
