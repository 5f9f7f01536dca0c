// SPDX-License-Identifier: MIT OR Apache-2.0
//! `gin info`: devices, back ends, limits and versions.

mod fabric;
mod rdma;
mod text;

use crate::cli::{Failure, Format};
use gin_abi::BackendKind;
use gin_host::comm::{MAX_MESSAGE, MAX_OUTSTANDING, MAX_QUEUE_DEPTH, probe_backends};
use serde::Serialize;
use std::io::Write;

/// The description of this machine and of this command.
#[derive(Debug, Serialize)]
struct Info {
    version: &'static str,
    abi_version: u32,
    cuda: Cuda,
    back_ends: Vec<BackEnd>,
    multimem: &'static str,
    rdma: rdma::Rdma,
    fabric: fabric::Fabric,
    /// The architectures for which this command has PTX, with the bytes of the text.
    images: Vec<Image>,
    /// The kernels that run on virtual GPUs.
    kernels: Vec<&'static str>,
    limits: Vec<Limit>,
}

/// The NVIDIA GPUs.
#[derive(Debug, Default, Serialize)]
struct Cuda {
    /// The reason why there is none.
    none: Option<String>,
    /// The CUDA version of the driver.
    driver: Option<String>,
    kernel_module: Option<String>,
    gpus: Vec<Gpu>,
}

#[derive(Debug, Serialize)]
struct Gpu {
    number: usize,
    name: String,
    /// The architecture, such as `sm_90`.
    arch: String,
    sms: u32,
    memory_bytes: u64,
    pci_address: String,
    numa_node: Option<u32>,
    /// The CPUs of progress threads, or the error of the variable that chooses them.
    progress_threads: String,
    /// The reason why gin's kernels cannot run on it.
    unusable: Option<String>,
}

#[derive(Debug, Serialize)]
struct BackEnd {
    name: String,
    /// The reason why it is not available.
    refusal: Option<String>,
    /// The findings about each NIC, in words.
    nics: Vec<String>,
    /// The engine that rings doorbells, for each NIC that could serve a GPU, and each GPU.
    doorbells: Vec<Doorbell>,
}

#[derive(Debug, Serialize)]
struct Doorbell {
    nic: String,
    gpu: usize,
    rung_by: Result<String, String>,
}

#[derive(Debug, Serialize)]
struct Image {
    arch: &'static str,
    form: &'static str,
    bytes: usize,
}

#[derive(Debug, Serialize)]
struct Limit {
    what: &'static str,
    limit: u64,
}

/// Prints devices, back ends, limits and versions.
///
/// # Errors
/// Returns the error of the writer.
pub(crate) fn print(format: Format, out: &mut impl Write) -> Result<(), Failure> {
    let info = Info::new()?;
    match format {
        Format::Table => Ok(text::print(&info, out)?),
        Format::Json => {
            serde_json::to_writer(&mut *out, &info)?;
            Ok(writeln!(out)?)
        }
    }
}

impl Info {
    fn new() -> Result<Self, Failure> {
        let mut kernels: Vec<&str> = gin_device::kernel::KERNELS.iter().map(|kernel| kernel.name).collect();
        kernels.sort_unstable();
        let back_end = |probe: gin_host::comm::BackendProbe| BackEnd {
            name: format!("{:?}", probe.backend).to_lowercase(),
            refusal: probe.refusal,
            nics: probe.nics,
            doorbells: if probe.backend == BackendKind::Gdaki { doorbells() } else { Vec::new() },
        };
        #[cfg(feature = "cuda")]
        let image = |&(arch, image): &(&'static str, &[u8])| Image {
            arch,
            form: if image.starts_with(b"\x7fELF") { "machine code" } else { "PTX" },
            bytes: image.len(),
        };
        #[cfg(feature = "cuda")]
        let images = crate::ptx::PTX.iter().map(image).collect();
        #[cfg(not(feature = "cuda"))]
        let images = Vec::new();
        Ok(Self {
            version: env!("CARGO_PKG_VERSION"),
            abi_version: gin_abi::ABI_VERSION,
            cuda: cuda()?,
            back_ends: probe_backends().into_iter().map(back_end).collect(),
            multimem: "off: multicast objects are not set up yet",
            rdma: rdma::Rdma::find(),
            fabric: fabric::Fabric::find(),
            images,
            kernels,
            limits: limits(),
        })
    }
}

fn limits() -> Vec<Limit> {
    use crate::workload::limits::{MAX_RANKS_SEEDED, MAX_RANKS_THREADS};
    let limits: [(&str, u64); 12] = [
        ("ranks a communicator", u64::from(gin_abi::MAX_RANKS)),
        ("ranks of `gin run`, mode seeded", u64::from(MAX_RANKS_SEEDED)),
        ("ranks of `gin run`, mode threads", u64::from(MAX_RANKS_THREADS)),
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
    limits.into_iter().map(|(what, limit)| Limit { what, limit }).collect()
}

/// Returns the GPUs, or why there are none.
#[cfg(feature = "cuda")]
fn cuda() -> Result<Cuda, Failure> {
    use gin_gpu::cuda::{driver_version, gpus, kernel_module_version};
    use gin_gpu::placement::{Placement, show_cpus};
    let found = match gpus() {
        Ok(found) => found,
        Err(error) => return Ok(Cuda { none: Some(error.to_string()), ..Cuda::default() }),
    };
    let gpu = |gpu: gin_gpu::cuda::GpuInfo| {
        let near = gpu.locality();
        // `gin info` shows the error of an invalid variable; a run fails with it.
        let progress_threads = match Placement::Automatic.choose(&near) {
            Ok(chosen) => {
                let cpus = chosen.cpus.map_or("anywhere".to_owned(), |cpus| format!("on CPUs {}", show_cpus(&cpus)));
                format!("{cpus} ({})", chosen.reason)
            }
            Err(error) => error.to_string(),
        };
        Gpu {
            number: gpu.ordinal,
            arch: format!("sm_{}", gpu.capability),
            sms: gpu.sms,
            memory_bytes: gpu.memory,
            numa_node: near.numa_node,
            progress_threads,
            unusable: gpu.check(crate::ptx::PTX).err().map(|error| error.to_string()),
            pci_address: gpu.pci_address,
            name: gpu.name,
        }
    };
    Ok(Cuda {
        none: None,
        driver: Some(driver_version()?.to_string()),
        kernel_module: kernel_module_version(),
        gpus: found.into_iter().map(gpu).collect(),
    })
}

/// Returns why this build has no GPUs.
#[cfg(not(feature = "cuda"))]
#[expect(clippy::unnecessary_wraps, reason = "builds with GPUs ask the driver")]
fn cuda() -> Result<Cuda, Failure> {
    Ok(Cuda { none: Some("built without the feature `cuda`".to_owned()), ..Cuda::default() })
}

/// Finds the engine that rings doorbells: for each GPU and each NIC that could serve it, maps a page.
fn doorbells() -> Vec<Doorbell> {
    #[cfg(not(feature = "cuda"))]
    return Vec::new();
    #[cfg(feature = "cuda")]
    {
        let nics = gin_nic::probe(&gin_nic::mlx5::Libraries::default(), &gin_nic::NicConfig::default());
        let nics: Vec<_> = nics.into_iter().flatten().filter_map(|found| found.nic.ok()).collect();
        // Without a GPU there is none; the section on devices says why.
        let gpus: Vec<_> = gin_gpu::cuda::gpus().into_iter().flatten().map(|gpu| gpu.ordinal).collect();
        let rung_by = |nic: &gin_nic::Nic, gpu| -> Result<String, Failure> {
            Ok(nic.doorbell_source(&*gin_gpu::cuda::CudaDevice::new(gpu, &[])?)?.to_string())
        };
        let doorbell = |nic: &gin_nic::Nic, gpu| {
            let rung_by = rung_by(nic, gpu).map_err(|error| error.to_string());
            Doorbell { nic: nic.name.clone(), gpu, rung_by }
        };
        nics.iter().flat_map(|nic| gpus.iter().map(move |&gpu| doorbell(nic, gpu))).collect()
    }
}
