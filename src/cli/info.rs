// SPDX-License-Identifier: MIT OR Apache-2.0
//! `gin info`: devices, back ends, limits and versions.

mod rdma;

use super::Failure;
use gin_abi::BackendKind;
use gin_host::comm::{MAX_MESSAGE, MAX_OUTSTANDING, MAX_QUEUE_DEPTH, probe_backends};
#[cfg(feature = "cuda")]
use gin_nic::{NicConfig, probe};
use std::io::Write;

/// Prints devices, back ends, limits and versions.
///
/// # Errors
/// Returns the error of the writer.
pub(crate) fn print(out: &mut impl Write) -> Result<(), Failure> {
    writeln!(out, "gin {}, shared layouts version {}", env!("CARGO_PKG_VERSION"), gin_abi::ABI_VERSION)?;
    writeln!(out, "\ndevices")?;
    writeln!(out, "  virtual: this machine's CPU")?;
    print_gpus(out)?;
    writeln!(out, "\nback ends")?;
    for probe in probe_backends() {
        let name = format!("{:?}", probe.backend).to_lowercase();
        writeln!(out, "  {name}: {}", probe.refusal.as_deref().unwrap_or("available"))?;
        for nic in &probe.nics {
            writeln!(out, "    {nic}")?;
        }
        if probe.backend == BackendKind::Gdaki {
            print_ringers(out)?;
            writeln!(out, "    virtual GPUs: drive software NICs, with `--backend gdaki`")?;
            writeln!(out, "    `gin nic-check` checks a NIC of this machine, `gin nic-check --soft` a software NIC")?;
        }
    }
    writeln!(out, "  multimem (NVLink SHARP): off: multicast objects are not set up yet")?;
    rdma::print(out)?;
    writeln!(out, "\nkernels")?;
    #[cfg(feature = "cuda")]
    for (arch, text) in gin::ptx::PTX {
        writeln!(out, "  PTX for {arch}: {} bytes", text.len())?;
    }
    #[cfg(not(feature = "cuda"))]
    writeln!(out, "  no PTX: built without the feature `cuda`")?;
    let mut names: Vec<&str> = gin_device::kernel::KERNELS.iter().map(|kernel| kernel.name).collect();
    names.sort_unstable();
    writeln!(out, "  linked for the virtual GPU: {}", names.join(", "))?;
    writeln!(out, "\nlimits")?;
    let limits: [(&str, u64); 12] = [
        ("ranks a communicator", u64::from(gin_abi::MAX_RANKS)),
        ("ranks of `gin run`, mode seeded", u64::from(crate::workload::limits::MOST_RANKS_SEEDED)),
        ("ranks of `gin run`, mode threads", u64::from(crate::workload::limits::MOST_RANKS_THREADS)),
        ("contexts a communicator", u64::from(gin_abi::MAX_CONTEXTS)),
        ("signals or counters a context, those of barriers included", u64::from(gin_abi::MAX_IDS)),
        ("windows registered at a time", u64::from(gin_abi::MAX_WINDOWS)),
        ("descriptors a queue (a power of two)", u64::from(MAX_QUEUE_DEPTH)),
        ("outstanding requests a peer and context", u64::from(MAX_OUTSTANDING)),
        ("bytes of one message (longer transfers are cut)", MAX_MESSAGE),
        ("bits of a signal", u64::from(gin_abi::SIGNAL_BITS)),
        ("bits of a counter", u64::from(gin_abi::COUNTER_BITS)),
        ("threads a block", u64::from(gin_gpu::Limits::CUDA.threads_per_block)),
    ];
    for (what, limit) in limits {
        writeln!(out, "  {what}: {limit}")?;
    }
    Ok(())
}

/// Prints the GPUs, or why there are none.
#[cfg(feature = "cuda")]
fn print_gpus(out: &mut impl Write) -> Result<(), Failure> {
    use gin_gpu::cuda::{driver_version, gpus, kernel_module_version};
    use gin_gpu::placement::{Placement, show_cpus};
    let found = match gpus() {
        Ok(found) => found,
        Err(error) => {
            writeln!(out, "  cuda: none: {error}")?;
            return Ok(());
        }
    };
    let module = kernel_module_version().map_or(String::new(), |version| format!(", {version}"));
    writeln!(out, "  cuda: driver of CUDA {}{module}", driver_version()?)?;
    for gpu in found {
        let near = gpu.locality();
        let node = near.numa_node.map_or("unknown".to_owned(), |node| node.to_string());
        writeln!(
            out,
            "    GPU {}: {}, sm_{}, {} processors, {} MiB, PCI {}, NUMA node {node}",
            gpu.ordinal,
            gpu.name,
            gpu.capability,
            gpu.processors,
            gpu.memory >> 20,
            gpu.pci_address,
        )?;
        // `gin info` shows the error of an invalid variable; a run fails with it.
        let threads = match Placement::Automatic.choose(&near) {
            Ok(chosen) => {
                let cpus = chosen.cpus.map_or("anywhere".to_owned(), |cpus| format!("on CPUs {}", show_cpus(&cpus)));
                format!("{cpus} ({})", chosen.reason)
            }
            Err(error) => error.to_string(),
        };
        writeln!(out, "      progress threads: {threads}")?;
        if let Err(error) = gpu.check(gin::ptx::PTX) {
            writeln!(out, "      {error}")?;
        }
    }
    Ok(())
}

/// Prints the engine that rings doorbells. For each GPU and each NIC that could serve it, maps a page and prints the
/// result.
fn print_ringers(out: &mut impl Write) -> Result<(), Failure> {
    let text = "rung by kernels where the driver maps the NIC's pages, else by the host (relay)";
    writeln!(out, "    doorbells of GPUs: {text}")?;
    #[cfg(feature = "cuda")]
    for nic in probe(&gin_nic::mlx5::Libraries::default(), &NicConfig::default())
        .into_iter()
        .flatten()
        .filter_map(|found| found.nic.ok())
    {
        // Without a GPU this prints no line; the section on devices says why there is none.
        for gpu in gin_gpu::cuda::gpus().into_iter().flatten() {
            let asked = gin_gpu::cuda::CudaDevice::new(gpu.ordinal, &[])
                .map_err(Failure::from)
                .and_then(|device| Ok(nic.ringer(&*device)?));
            let answer = asked.map_or_else(|error| format!("unknown: {error}"), |ringer| format!("rung by {ringer}"));
            writeln!(out, "      {} by GPU {}: {answer}", nic.name, gpu.ordinal)?;
        }
    }
    Ok(())
}

/// Prints that this build supports no GPUs.
#[cfg(not(feature = "cuda"))]
fn print_gpus(out: &mut impl Write) -> Result<(), Failure> {
    Ok(writeln!(out, "  cuda: none: built without the feature `cuda`")?)
}
