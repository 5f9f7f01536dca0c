use gin_build::{Arch, KernelBuilder};

fn main() {
    // Links NCCL's device functions. If something is missing, the build says how to install it.
    KernelBuilder::new("kernels").features(["nccl"]).arch(Arch::Sm90).nccl(true).embed("ptx");
}
