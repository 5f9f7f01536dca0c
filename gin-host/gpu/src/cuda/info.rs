// SPDX-License-Identifier: MIT OR Apache-2.0
//! Describes the GPUs of this machine. It makes no context, so it takes none of their memory.

use super::driver::{check, no_device, start, written};
use super::embedded::{choose, no_image};
use crate::placement::Locality;
use crate::{EmbeddedModules, GpuError};
use cudarc::driver::sys::{self, CUdevice, CUdevice_attribute as Attribute};
use std::ffi::CStr;

/// A GPU, as the driver describes it.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct GpuInfo {
    /// The number, from 0.
    pub ordinal: usize,
    /// The name.
    pub name: String,
    /// The compute capability times 10: 90 for sm_90.
    pub capability: u32,
    /// The number of its SMs.
    pub sms: u32,
    /// The memory in bytes.
    pub memory: u64,
    /// The address on the PCI bus, such as `0000:18:00.0`.
    pub pci_address: String,
}

impl GpuInfo {
    /// Returns the locality of the GPU.
    pub fn locality(&self) -> Locality {
        Locality::of_pci(&self.pci_address)
    }

    /// Checks that these kernels can be loaded on it: some of them are for its architecture, or for an older one.
    ///
    /// # Errors
    /// [`GpuError::Module`], with its architecture and the architectures of the kernels.
    pub fn check(&self, kernels: EmbeddedModules) -> Result<(), GpuError> {
        if choose(kernels, self.capability).is_empty() {
            return Err(no_image(kernels, format!("{} (GPU {})", self.name, self.ordinal), self.capability));
        }
        Ok(())
    }
}

/// Returns the number of GPUs that this process can use, at least one.
///
/// ```
/// match gin_gpu::cuda::device_count() {
///     Ok(gpus) => assert!(gpus > 0),
///     Err(error) => println!("no GPU: {error}"),
/// }
/// ```
///
/// # Errors
/// [`GpuError::NoDriver`], [`GpuError::DriverTooOld`], [`GpuError::NoDevice`].
pub fn device_count() -> Result<usize, GpuError> {
    let version = start()?;
    // Safety: writes one integer.
    let count = written("count the GPUs", 0, |count| unsafe { sys::cuDeviceGetCount(count) })?;
    if count > 0 { Ok(count as usize) } else { Err(no_device(version)) }
}

/// Returns the GPUs that this process can use, at least one, by number.
///
/// # Errors
/// [`GpuError::NoDriver`], [`GpuError::DriverTooOld`], [`GpuError::NoDevice`], or an error of the driver.
pub fn gpus() -> Result<Vec<GpuInfo>, GpuError> {
    (0..device_count()?).map(describe).collect()
}

/// Returns the version of the driver's kernel module, such as `580.159.04`, if the system shows it.
pub fn kernel_module_version() -> Option<String> {
    let text = std::fs::read_to_string("/sys/module/nvidia/version").ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// Returns the driver's number of a GPU.
pub(super) fn device(ordinal: usize) -> Result<CUdevice, GpuError> {
    // Safety: writes one integer.
    written("open a GPU", 0, |device| unsafe { sys::cuDeviceGet(device, ordinal as i32) })
}

/// Returns the name of a GPU.
pub(super) fn name(device: CUdevice) -> Result<String, GpuError> {
    // Safety: writes at most the given number of bytes and ends them with 0.
    text("ask for a GPU's name", |to, length| unsafe { sys::cuDeviceGetName(to, length, device) })
}

/// Returns a property of a GPU.
pub(super) fn attribute(device: CUdevice, attribute: Attribute) -> Result<u32, GpuError> {
    // Safety: writes one integer.
    let ask = |value| unsafe { sys::cuDeviceGetAttribute(value, attribute, device) };
    written("ask for a property of a GPU", 0, ask).map(|value| value as u32)
}

/// Returns the compute capability of a GPU, times 10.
pub(super) fn capability(device: CUdevice) -> Result<u32, GpuError> {
    let major = attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    Ok(major * 10 + attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?)
}

/// Returns whether a GPU reaches memory of another one.
pub(super) fn reaches(device: CUdevice, other: CUdevice) -> Result<bool, GpuError> {
    // Safety: writes one integer.
    let ask = |can| unsafe { sys::cuDeviceCanAccessPeer(can, device, other) };
    written("ask whether GPUs reach each other", 0, ask).map(|can| can != 0)
}

/// Returns whether a GPU that reaches memory of another one also has atomics on it.
pub(super) fn has_atomics(device: CUdevice, other: CUdevice) -> Result<bool, GpuError> {
    let which = sys::CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
    // Safety: writes one integer.
    let ask = |atomics| unsafe { sys::cuDeviceGetP2PAttribute(atomics, which, device, other) };
    written("ask whether a GPU has atomics on the memory of another one", 0, ask).map(|atomics| atomics != 0)
}

/// Returns a text of at most 127 bytes that a call writes.
fn text(
    context: &'static str,
    call: impl FnOnce(*mut core::ffi::c_char, i32) -> sys::CUresult,
) -> Result<String, GpuError> {
    let mut text = [0; 128];
    // One byte is kept back, so the text ends with 0 whatever the call writes.
    check(context, call(text.as_mut_ptr(), text.len() as i32 - 1))?;
    // Safety: the last byte is 0.
    Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
}

/// Returns the address of a GPU on the PCI bus.
pub(super) fn pci_address(ordinal: usize) -> Result<String, GpuError> {
    let device = device(ordinal)?;
    // Safety: writes at most the given number of bytes and ends them with 0.
    text("ask where a GPU is", |to, length| unsafe { sys::cuDeviceGetPCIBusId(to, length, device) })
}

fn describe(ordinal: usize) -> Result<GpuInfo, GpuError> {
    let device = device(ordinal)?;
    // Safety: writes one integer.
    let memory = written("ask for a GPU's memory", 0, |bytes| unsafe { sys::cuDeviceTotalMem_v2(bytes, device) })?;
    Ok(GpuInfo {
        ordinal,
        name: name(device)?,
        capability: capability(device)?,
        sms: attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        memory: memory as u64,
        pci_address: pci_address(ordinal)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_fit_a_gpu_of_their_architecture_and_newer_ones() {
        let gpu = |capability| GpuInfo {
            ordinal: 3,
            name: "Some GPU".to_owned(),
            capability,
            sms: 1,
            memory: 1,
            pci_address: String::new(),
        };
        const KERNELS: EmbeddedModules = &[("sm_90", b"text")];
        assert_eq!(gpu(90).check(KERNELS), Ok(()));
        assert_eq!(gpu(100).check(KERNELS), Ok(()));
        let error = gpu(80).check(KERNELS).unwrap_err().to_string();
        assert!(error.contains("Some GPU (GPU 3)") && error.contains("sm_90") && error.contains("sm_80"), "{error}");
    }

    #[test]
    fn a_text_that_fills_its_place_still_ends() {
        let full = text("test", |to, length| {
            // Safety: the buffer has these bytes.
            unsafe { std::slice::from_raw_parts_mut(to.cast::<u8>(), length as usize) }.fill(b'x');
            sys::CUresult::CUDA_SUCCESS
        });
        assert_eq!(full.unwrap().len(), 127);
    }
}
