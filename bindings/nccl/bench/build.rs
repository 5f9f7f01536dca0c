// SPDX-License-Identifier: MIT OR Apache-2.0

//! With the feature `nccl`, compiles the kernels for gin and, linked with NCCL's device functions, for NCCL. Writes the
//! tables `gin.rs` and `nccl.rs` to `OUT_DIR`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "nccl")]
    {
        use gin_build::{Arch, KernelBuilder};
        KernelBuilder::new("../kernels").figures(false).embed("gin");
        // NCCL's bitcode is code for sm_90.
        KernelBuilder::new("../kernels").features(["nccl"]).arch(Arch::Sm90).nccl(true).figures(false).embed("nccl");
    }
}
