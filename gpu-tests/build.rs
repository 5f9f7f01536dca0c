// SPDX-License-Identifier: MIT OR Apache-2.0

//! With the feature `cuda`, compiles to PTX the kernels of the conformance suite, the kernels of these tests, the
//! kernels that gin ships, and the engine of software NICs. Writes tables of them, `ptx.rs`, `hardware.rs`,
//! `shipped.rs` and `engine.rs`, to `OUT_DIR`.

fn main() {
    #[cfg(feature = "cuda")]
    if let Err(error) = embed() {
        // Cargo reads one message per line.
        for line in error.to_string().lines().filter(|line| !line.is_empty()) {
            println!("cargo::error={line}");
        }
    }
    #[cfg(not(feature = "cuda"))]
    println!("cargo::rerun-if-changed=build.rs");
}

#[cfg(feature = "cuda")]
fn embed() -> Result<(), Box<dyn std::error::Error>> {
    use gin_build::{Arch, KernelBuilder, UsePtxas};

    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=GIN_ARCHS");
    let archs = match std::env::var("GIN_ARCHS") {
        Ok(named) => named.split(',').map(str::trim).map(str::parse).collect::<Result<Vec<Arch>, _>>()?,
        Err(_) => archs_here(),
    };
    let out = std::path::PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    // Only these tests' own kernels become machine code, for the trial that loads some. The rest would only cost
    // minutes, since the driver compiles the PTX. A test of gin-conformance assembles its PTX.
    let tables = [
        ("conformance", "ptx", UsePtxas::No),
        ("kernels", "hardware", UsePtxas::IfFound),
        ("../gin-kernels", "shipped", UsePtxas::No),
        ("../gin-host/soft-nic", "engine", UsePtxas::No),
    ];
    for (kernels, table, ptxas) in tables {
        let place = out.join(table);
        std::fs::create_dir_all(&place)?;
        let builder = KernelBuilder::new(kernels).archs(archs.clone()).ptxas(ptxas);
        builder.copy_to(&place).build()?.write_table(&out.join(table).with_extension("rs"))?;
    }
    Ok(())
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
