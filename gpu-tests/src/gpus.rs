// SPDX-License-Identifier: MIT OR Apache-2.0
//! The GPUs of this machine.

use gin_gpu::Devices;
use std::time::Duration;

/// Time limit of a kernel. After it the rank aborts the communicator, and the kernel ends.
pub const KERNEL_LIMIT: Duration = Duration::from_secs(8);

/// The GPUs of a machine.
#[derive(Clone, Debug)]
pub struct Gpus {
    /// Number of GPUs.
    pub count: usize,
    /// Description of the GPUs and the driver.
    pub text: String,
}

/// The suite's kernels as PTX: architecture (`sm_90`, ...) and text.
#[cfg(feature = "cuda")]
pub mod ptx {
    include!(concat!(env!("OUT_DIR"), "/ptx.rs"));
}

/// These tests' own kernels as PTX.
#[cfg(feature = "cuda")]
pub mod hardware_ptx {
    include!(concat!(env!("OUT_DIR"), "/hardware.rs"));
}

/// The kernels that gin ships as PTX.
#[cfg(feature = "cuda")]
pub mod shipped_ptx {
    include!(concat!(env!("OUT_DIR"), "/shipped.rs"));
}

/// The engine of software NICs as PTX.
#[cfg(feature = "cuda")]
pub mod engine_ptx {
    include!(concat!(env!("OUT_DIR"), "/engine.rs"));
}

/// Returns the text of these tests' own kernels for a GPU.
///
/// # Errors
/// If there is none for this GPU.
#[cfg(feature = "cuda")]
pub fn hardware_text(ordinal: usize) -> Result<&'static str, String> {
    let capability = gin_gpu::cuda::CudaDevice::new(ordinal, &[]).map_err(|error| error.to_string())?.capability();
    let version = |arch: &str| arch.strip_prefix("sm_").and_then(|number| number.parse::<u32>().ok());
    let texts =
        hardware_ptx::PTX.iter().filter_map(|(arch, image)| Some((version(arch)?, str::from_utf8(image).ok()?)));
    let fits = texts.filter(|(version, _)| *version <= capability);
    fits.max_by_key(|(version, _)| *version).map(|(_, text)| text).ok_or(format!("no kernels for sm_{capability}"))
}

/// Finds the GPUs of this machine.
///
/// # Errors
/// If there are none; the text says why.
#[cfg(feature = "cuda")]
pub fn find() -> Result<Gpus, String> {
    use gin_gpu::Device;
    use gin_gpu::cuda::{CudaDevice, device_count, driver_version};

    let look = || -> Result<Gpus, gin_gpu::GpuError> {
        let mut text = format!("driver of CUDA {}", driver_version()?);
        let count = device_count()?;
        for ordinal in 0..count {
            let device = CudaDevice::new(ordinal, &[])?;
            let (capability, sms) = (device.capability(), device.sms());
            text.push_str(&format!("; {}: sm_{capability}, {sms} SMs", device.name()));
        }
        Ok(Gpus { count, text })
    };
    look().map_err(|error| error.to_string())
}

/// Finds the GPUs of this machine.
///
/// # Errors
/// Always: the tests were built without the feature `cuda`.
#[cfg(not(feature = "cuda"))]
pub fn find() -> Result<Gpus, String> {
    Err("the tests were built without the feature `cuda`".to_owned())
}

/// Creates devices for ranks that share these GPUs, and loads the kernels of the conformance suite.
///
/// # Errors
/// Returns the driver's error.
#[cfg(feature = "cuda")]
pub fn devices(gpus: &[usize]) -> Result<Devices, String> {
    use gin_gpu::cuda::{self, CudaDevice};
    use gin_gpu::{Device, ModuleSource};

    let make = || -> Result<Devices, gin_gpu::GpuError> {
        let kernels = [ptx::PTX, hardware_ptx::PTX, shipped_ptx::PTX, engine_ptx::PTX, gin_ep::PTX];
        let devices = cuda::devices(gpus, &kernels, Some(KERNEL_LIMIT))?;
        for &ordinal in gpus {
            CudaDevice::new(ordinal, &kernels)?.load(ModuleSource::Linked)?;
        }
        Ok(devices)
    };
    make().map_err(|error| error.to_string())
}

/// Returns whether this process can still use the GPUs. After a failed kernel it cannot.
#[cfg(feature = "cuda")]
pub fn work(gpus: &[usize]) -> bool {
    use gin_gpu::cuda::CudaDevice;
    use gin_gpu::{Device, MemoryKind};

    gpus.iter().all(|&ordinal| {
        CudaDevice::new(ordinal, &[]).is_ok_and(|device| device.allocate(MemoryKind::Device, 1).is_ok())
    })
}

/// Returns true, as there are no GPUs.
#[cfg(not(feature = "cuda"))]
pub fn work(_gpus: &[usize]) -> bool {
    false
}

/// Creates devices for ranks that share these GPUs.
///
/// # Errors
/// Always: the tests were built without the feature `cuda`.
#[cfg(not(feature = "cuda"))]
pub fn devices(_gpus: &[usize]) -> Result<Devices, String> {
    Err("the tests were built without the feature `cuda`".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_driver_says_so_and_makes_no_devices() {
        match find() {
            Ok(gpus) => assert!(gpus.count > 0, "{gpus:?}"),
            Err(reason) => {
                // There is no driver, it is too old, or it shows no GPU.
                assert!(reason.contains("CUDA driver") || !cfg!(feature = "cuda"), "{reason}");
                assert_eq!(devices(&[0]).map(|devices| devices.name().to_owned()), Err(reason));
            }
        }
    }
}
