// SPDX-License-Identifier: MIT OR Apache-2.0
//! A trial of memory that a GPU and a NIC share.

use crate::journal::Outcome;
use crate::raw::ok;
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use gin_gpu::Devices;
use gin_gpu::GpuError;
use gin_gpu::cuda::CudaDevice;
use gin_gpu::{Device, Memory, MemoryKind};
use std::sync::Arc;

/// Returns whether the driver says that it exports GPU memory as files.
fn gives_files(ordinal: usize) -> Result<bool, GpuError> {
    let (mut device, mut value) = (0, 0);
    // Safety: writes two integers.
    unsafe {
        ok("open a GPU", sys::cuDeviceGet(&raw mut device, ordinal as i32))?;
        let which = Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED;
        ok("read whether memory is exported as files", sys::cuDeviceGetAttribute(&raw mut value, which, device))?;
    }
    Ok(value != 0)
}

/// A page of host memory.
#[repr(align(65536))]
struct Page([u8; 65536]);

/// Checks that GPU memory is exported as a file with the stated offset, in agreement with the driver's claim. Also
/// checks that a host page that belongs to no NIC is mapped, or refused with the reason, and that a second attempt
/// gives the same result.
///
/// # Errors
/// Returns the failures.
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
                        wrong.push(format!("{what}: exported as a file, though the driver says that it exports none"))
                    }
                    Ok(file) => {
                        let is_there = std::path::Path::new(&format!("/proc/self/fd/{}", file.number())).exists();
                        let page = rustix::param::page_size() as u64;
                        if !is_there || file.offset() >= page || file.offset() != (memory.address() + first) % page {
                            wrong.push(format!("{what}: the file exists: {is_there}, offset {}", file.offset()));
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
            // Safety: whole pages, which live as long as the `Arc`.
            .map(|_| unsafe { device.map_pages(address, 65536, page.clone()) }.err().map(|error| error.to_string()))
            .collect();
        println!("GPU {ordinal}: a page of ordinary memory: {}", tries[0].as_deref().unwrap_or("mapped"));
        if tries[0] != tries[1] {
            wrong.push(format!("GPU {ordinal}: two attempts to map a page differ: {tries:?}"));
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
}
