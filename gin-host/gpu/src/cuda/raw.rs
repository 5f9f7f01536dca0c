// SPDX-License-Identifier: MIT OR Apache-2.0
//! Exchanges handles of the driver with a program that calls the driver itself, or through `cust` or C++.
//!
//! | is | out | in |
//! | --- | --- | --- |
//! | `CUcontext` | [`CudaDevice::raw_context`] | always the GPU's primary one |
//! | `CUstream` | [`CudaStream::raw`] | [`CudaDevice::stream_from_raw`] |
//! | `CUdeviceptr`, host memory | [`Memory::address`] | [`CudaDevice::import_memory`] |
//! | `CUmodule` | [`raw_module`] | [`CudaDevice::module_from_raw`] |
//! | `CUfunction` | [`raw_function`] | through its module |
//!
//! Handles are untyped pointers here, so that they fit the bindings of every program. A handle that the program passes
//! in stays the program's: gin does not free it. A handle that gin passes out stays gin's: it is valid while the object
//! lives from which it came.
//!
//! Kernels that the program launches by itself are not in [`Device::running`], nor in the sum against which cooperative
//! launches are checked.

pub use super::driver::RawHandle;
use super::driver::describe;
use super::import::{assume, import};
use super::module::{Handle, Image, Images};
use super::stream::CudaStream;
use super::{CudaDevice, Device, GpuError, Module, Stream};
use crate::{Function, Keep, Memory, MemoryKind};
use cudarc::driver::sys;
use std::sync::Arc;

/// `CU_STREAM_LEGACY`: the default stream of the current context, as 0.
const DEFAULT: usize = 1;

/// `CU_STREAM_PER_THREAD`: the default stream of the calling thread.
const OF_THREAD: usize = 2;

/// Returns the driver's handle of a kernel, a `CUfunction`; `None` for a kernel that is not of a GPU. It is valid while
/// the function's module is loaded, which `function` ensures.
pub fn raw_function(function: &Function) -> Option<RawHandle> {
    Some(function.handle.downcast_ref::<Handle>()?.raw().cast())
}

/// Returns the module of a kernel, a `CUmodule`; otherwise as [`raw_function`].
pub fn raw_module(function: &Function) -> Option<RawHandle> {
    Some(function.handle.downcast_ref::<Handle>()?.image.raw.cast())
}

impl CudaDevice {
    /// Returns the GPU behind a device, if it is one.
    pub fn of(device: &dyn Device) -> Option<&Self> {
        device.downcast()
    }

    /// Returns its context, a `CUcontext`: the GPU's primary one, which lives until the process ends.
    pub fn raw_context(&self) -> RawHandle {
        self.context.raw.cast()
    }

    fn refuse(&self, what: &'static str, reason: String) -> GpuError {
        GpuError::ForeignHandle { what, device: self.name(), reason }
    }

    /// Uses a stream of the program, a `CUstream`. gin does not destroy it.
    ///
    /// Launches pass the same checks as on gin's own streams, and are counted. Launches into a stream that is being
    /// captured pass them too: see [`CudaStream`].
    ///
    /// The context's default stream (0) and the program's blocking streams wait for each other; gin's streams wait for
    /// neither. Ranks of a process that share a GPU need a stream each: on one stream, the kernel of a rank starts
    /// after the kernel of another one, which may wait for it.
    ///
    /// # Safety
    /// - The stream is alive. It stays so until the returned value is gone and the work that was put on it is done.
    ///
    /// # Errors
    /// [`GpuError::ForeignHandle`] for the default stream of a thread, and for a stream of another context than the
    /// GPU's primary one.
    pub unsafe fn stream_from_raw(&self, stream: RawHandle) -> Result<Arc<dyn Stream>, GpuError> {
        const WHAT: &str = "stream";
        let stream = if stream.addr() == DEFAULT { std::ptr::null_mut() } else { stream };
        if stream.addr() == OF_THREAD {
            let reason = "it is the default stream of a thread, which is another one on each thread of gin";
            return Err(self.refuse(WHAT, reason.to_owned()));
        }
        self.context.enter()?;
        let mut context = std::ptr::null_mut();
        // Safety: writes one pointer; the stream is alive.
        let asked = unsafe { sys::cuStreamGetCtx(stream.cast(), &raw mut context) }.result();
        asked.map_err(|failure| self.refuse(WHAT, describe(failure)))?;
        if context != self.context.raw {
            let reason = "it is of another context than the GPU's primary one (cuDevicePrimaryCtxRetain)";
            return Err(self.refuse(WHAT, reason.to_owned()));
        }
        Ok(Arc::new(CudaStream::foreign(self.shared()?, stream.cast())))
    }

    /// Uses memory of the program: device memory of this GPU, or pinned host memory. gin does not copy, clear or free
    /// it.
    ///
    /// Device memory may come from `cuMemAlloc`, `cuMemAllocAsync` or `cuMemMap`; the last may consist of several parts
    /// that follow each other. If ranks will reach the memory by loads and stores, their GPUs must have access to it;
    /// registration checks that. Memory from `cuMemAlloc` is accessible. Memory of a pool or of a mapping is accessible
    /// if the program has said so (`cuMemPoolSetAccess`, `cuMemSetAccess`).
    ///
    /// # Safety
    /// - The memory stays allocated and mapped, its host memory pinned and its pool alive. It stays so until the
    ///   returned value, the windows in which it is registered, and communicators that have had such windows are gone
    ///   on all ranks, and no kernel runs that uses them.
    /// - Meanwhile the program accesses it only as it may access memory of a window.
    ///
    /// # Errors
    /// [`GpuError::Foreign`] with the reason: no bytes; memory of another GPU or context; bytes outside an allocation;
    /// managed memory; host memory that is not pinned, or has another address on the GPU.
    pub unsafe fn import_memory(&self, address: u64, bytes: u64) -> Result<Arc<Memory>, GpuError> {
        self.import_foreign(address, bytes, None)
    }

    /// Does the same as [`import_memory`](Self::import_memory) for memory that exists as long as `keep`. The last user
    /// of the memory among the ranks of this process drops `keep`, on its own thread.
    ///
    /// # Safety
    /// - The memory stays allocated and mapped, its host memory pinned and its pool alive, while `keep` exists.
    /// - Meanwhile the program accesses it only as it may access memory of a window.
    ///
    /// # Errors
    /// As there. Then `keep` is dropped.
    pub unsafe fn import_kept(&self, address: u64, bytes: u64, keep: Keep) -> Result<Arc<Memory>, GpuError> {
        self.import_foreign(address, bytes, Some(keep))
    }

    /// Does the same as [`import_memory`](Self::import_memory) for device memory, and trusts the program: the driver is
    /// asked only when the memory becomes a window. This takes nanoseconds, where the questions take microseconds.
    ///
    /// # Safety
    /// - As there; and the bytes are device memory of this GPU, in one allocation of its primary context or mapped one
    ///   after another, not managed memory.
    ///
    /// # Errors
    /// [`GpuError::Unsupported`] while the device is dropped.
    pub unsafe fn assume_memory(&self, address: u64, bytes: u64) -> Result<Arc<Memory>, GpuError> {
        let device: Arc<dyn Device> = self.shared()?;
        Ok(Memory::with(assume(&self.context, address, bytes), &device, MemoryKind::Device, bytes))
    }

    fn import_foreign(&self, address: u64, bytes: u64, keep: Option<Keep>) -> Result<Arc<Memory>, GpuError> {
        let (raw, kind) = import(&self.context, address, bytes, keep)?;
        let device: Arc<dyn Device> = self.shared()?;
        Ok(Memory::with(raw, &device, kind, bytes))
    }

    /// Uses kernels of a module, a `CUmodule`, that the program has loaded in the GPU's primary context. gin does not
    /// unload it.
    ///
    /// All its functions are loaded now. Each is allowed as much dynamic shared memory as the GPU has, as for modules
    /// that gin loads.
    ///
    /// # Safety
    /// - The module is loaded. It stays so until the returned value and functions of it are gone and none of its
    ///   kernels runs.
    ///
    /// # Errors
    /// [`GpuError::Module`] if it was not built with gin-device, [`GpuError::AbiMismatch`], or an error of the driver.
    pub unsafe fn module_from_raw(&self, module: RawHandle) -> Result<Box<dyn Module>, GpuError> {
        if module.is_null() {
            return Err(self.refuse("module", "there is none".to_owned()));
        }
        // Safety: the caller's promise.
        Ok(Box::new(Images(vec![Arc::new(unsafe { Image::foreign(&self.context, module.cast())? })])))
    }

    pub(super) fn shared(&self) -> Result<Arc<Self>, GpuError> {
        self.this.upgrade().ok_or_else(|| self.context.unsupported("be used while it is dropped"))
    }
}
