// SPDX-License-Identifier: MIT OR Apache-2.0

//! With the feature `cuda`, compiles to PTX the kernels of the conformance suite, the kernels of these tests, the
//! kernels that gin ships, and the engine of software NICs. Writes tables of them, `ptx.rs`, `hardware.rs`,
//! `shipped.rs` and `engine.rs`, to `OUT_DIR`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    embed();
}

#[cfg(feature = "cuda")]
fn embed() {
    use gin_build::{KernelBuilder, UsePtxas};

    let archs = if std::env::var_os("GIN_ARCHS").is_some() { Vec::new() } else { archs_here() };
    // Only these tests' own kernels become machine code, for the trial that loads some. The rest would only cost
    // minutes, since the driver compiles the PTX. A test of gin-conformance assembles its PTX.
    for (kernels, table, ptxas) in [
        ("conformance", "ptx", UsePtxas::No),
        ("kernels", "hardware", UsePtxas::IfFound),
        ("../gin-kernels", "shipped", UsePtxas::No),
        ("../gin-host/soft-nic", "engine", UsePtxas::No),
    ] {
        KernelBuilder::new(kernels).archs(archs.clone()).ptxas(ptxas).embed(table);
    }
}

/// Returns the architectures of this machine's GPUs, by `nvidia-smi`; if there is no GPU, the architectures on which
/// gin was tested.
#[cfg(feature = "cuda")]
fn archs_here() -> Vec<gin_build::Arch> {
    use gin_build::Arch;

    let asked =
        std::process::Command::new("nvidia-smi").args(["--query-gpu=compute_cap", "--format=csv,noheader"]).output();
    let text = asked.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let mut archs: Vec<Arch> = text
        .lines()
        .filter_map(|line| line.trim().split('.').next()?.parse::<u32>().ok())
        .map(|major| match major {
            ..=8 => Arch::Sm80,
            9 => Arch::Sm90,
            10.. => Arch::Sm100,
        })
        .collect();
    archs.dedup();
    if archs.is_empty() { vec![Arch::Sm90] } else { archs }
}
