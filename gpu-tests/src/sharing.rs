// SPDX-License-Identifier: MIT OR Apache-2.0
//! A trial of what a GPU shares with a NIC.

use crate::journal::Outcome;
use crate::raw::ok;
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use gin_gpu::Devices;
use gin_gpu::GpuError;
use gin_gpu::cuda::CudaDevice;
use gin_gpu::{Device, Memory, MemoryKind};
use std::sync::Arc;

/// Whether the driver says that it gives memory of a GPU as files.
fn gives_files(ordinal: usize) -> Result<bool, GpuError> {
    let (mut device, mut value) = (0, 0);
    // Safety: writes two integers.
    unsafe {
        ok("open a GPU", sys::cuDeviceGet(&raw mut device, ordinal as i32))?;
        let which = Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED;
        ok("ask for files", sys::cuDeviceGetAttribute(&raw mut value, which, device))?;
    }
    Ok(value != 0)
}

/// A page of the host.
#[repr(align(65536))]
struct Page([u8; 65536]);

/// Memory of a GPU is a file in which it lies where it is said, as the driver claims or not; and a page of the host
/// that is no NIC's is stored to, or refused with the reason, and either way as often as one likes.
///
/// # Errors
/// What was wrong.
pub fn shares(gpus: &[usize], _: Devices) -> Outcome {
    let mut wrong = Vec::new();
    for &ordinal in gpus {
        let of = |error: GpuError| format!("GPU {ordinal}: {error}");
        let device: Arc<dyn Device> = CudaDevice::new(ordinal, &[]).map_err(of)?;
        let gives = gives_files(ordinal).map_err(of)?;
        for bytes in [1, 4096, (3 << 20) + 1] {
            let memory = Memory::new(&device, MemoryKind::Device, bytes).map_err(of)?;
            for (first, count) in [(0, bytes), (bytes / 3, bytes - bytes / 3), (bytes - 1, 1)] {
                let what = format!("GPU {ordinal}: {count} bytes from {first} of {bytes}");
                match device.export(memory.address() + first, count) {
                    Ok(_) if !gives => {
                        wrong.push(format!("{what}: a file, though the driver says that there are none"))
                    }
                    Ok(file) => {
                        let is_there = std::path::Path::new(&format!("/proc/self/fd/{}", file.number())).exists();
                        let page = rustix::param::page_size() as u64;
                        if !is_there || file.offset() >= page || file.offset() != (memory.address() + first) % page {
                            wrong.push(format!("{what}: the file is there: {is_there}, offset {}", file.offset()));
                        }
                    }
                    Err(error) if gives => wrong.push(format!("{what}: {error}")),
                    Err(_) => {}
                }
            }
        }
        println!("GPU {ordinal}: files: {gives}");
        let page = Arc::new(Page([0; 65536]));
        let address = (&raw const page.0) as u64;
        let tries: Vec<Option<String>> = (0..2)
            // Safety: whole pages, which are there as long as the Arc.
            .map(|_| unsafe { device.map_pages(address, 65536, page.clone()) }.err().map(|error| error.to_string()))
            .collect();
        println!("GPU {ordinal}: a page of ordinary memory: {}", tries[0].as_deref().unwrap_or("stored to"));
        if tries[0] != tries[1] {
            wrong.push(format!("GPU {ordinal}: a page is mapped once and not again: {tries:?}"));
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
}
