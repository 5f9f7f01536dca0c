// SPDX-License-Identifier: MIT OR Apache-2.0
//! Registers memory with a NIC: by its address or, for GPU memory, as a file that drivers share (DMA-BUF).
//!
//! Registration of GPU memory first tries a file, which needs support by GPU, kernel and the NIC's library, but no
//! module beside the drivers. Then it tries the address, which needs the GPU driver's peer-memory module
//! (nvidia-peermem).

use super::error::{FileRefusal, NicError, Step};
use super::hca::{DmaBuf, Extent, HcaError};
use super::open::{Nic, failed};
use gin_gpu::{Device, DeviceKind, MemoryKind, MemorySlice};

/// Returns whether this kind of memory is in a GPU.
fn is_in_gpu(device: DeviceKind, kind: MemoryKind) -> bool {
    device == DeviceKind::Cuda && kind == MemoryKind::Device
}

impl Nic {
    /// Checks that the NIC may reach this kind of memory of this device.
    ///
    /// # Errors
    /// [`NicError::Memory`].
    pub fn check_reach(&self, device: &dyn Device, kind: MemoryKind) -> Result<(), NicError> {
        if !is_in_gpu(device.kind(), kind) || self.owner.hca.reaches(device) {
            return Ok(());
        }
        Err(NicError::Memory { nic: self.name.clone(), kind: kind.to_string(), device: device.name() })
    }

    /// Registers memory by `take`: as a file if that works, else by its address. Closes the file afterwards.
    ///
    /// # Errors
    /// [`NicError::Step`], or [`NicError::Unreached`] with the errors of both ways.
    pub(super) fn take_memory<T>(
        &self,
        step: Step,
        slice: &MemorySlice,
        take: impl Fn(&Extent) -> Result<T, HcaError>,
    ) -> Result<T, NicError> {
        let device = slice.memory().device();
        let extent = Extent { address: slice.address(), bytes: slice.bytes(), dma_buf: None };
        if !is_in_gpu(device.kind(), slice.memory().kind()) {
            return take(&extent).map_err(failed(&self.name, step, None));
        }
        let as_file = device.export(extent.address, extent.bytes).map_err(FileRefusal::Device).and_then(|file| {
            let dma_buf = Some(DmaBuf { file: file.number(), offset: file.offset() });
            take(&Extent { dma_buf, ..extent }).map_err(FileRefusal::Nic)
        });
        let by_file = match as_file {
            Ok(taken) => return Ok(taken),
            Err(refusal) => refusal,
        };
        take(&extent).map_err(|by_address| {
            let (nic, device) = (self.name.clone(), device.name());
            NicError::Unreached { nic, step, device, by_file: Box::new(by_file), by_address }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_device_memory_of_real_gpus_lies_in_one() {
        assert!(is_in_gpu(DeviceKind::Cuda, MemoryKind::Device));
        assert!(!is_in_gpu(DeviceKind::Cuda, MemoryKind::Pinned), "host memory");
        assert!(!is_in_gpu(DeviceKind::Virtual, MemoryKind::Device), "memory of this process");
    }
}
