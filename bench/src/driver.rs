// SPDX-License-Identifier: MIT OR Apache-2.0
//! Operations of the CUDA driver that need no kernel: copies and stream memory operations.

use cudarc::driver::sys::{
    self, CUcontext, CUevent, CUresult, CUstream, CUstreamBatchMemOpParams,
    CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st as WriteValue,
    CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st__bindgen_ty_1 as Value, CUstreamBatchMemOpType,
};
use gin_gpu::Device;
use gin_gpu::GpuError;
use gin_gpu::cuda::CudaDevice;
use std::time::{Duration, Instant};

fn ok(context: &'static str, code: CUresult) -> Result<(), GpuError> {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(GpuError::Driver { context, reason: format!("{code:?}") }) }
}

/// Returns the number of SMs of a GPU; `None` for a device that is no GPU.
pub(super) fn sms(device: &dyn Device) -> Option<u32> {
    device.downcast::<CudaDevice>().map(CudaDevice::sms)
}

/// Returns the compute capability of a GPU, times 10; `None` for a device that is no GPU.
pub(super) fn capability(device: &dyn Device) -> Option<u32> {
    device.downcast::<CudaDevice>().map(CudaDevice::capability)
}

/// Returns the number of a GPU; `None` for a device that is no GPU.
pub(super) fn ordinal(device: &dyn Device) -> Option<usize> {
    device.downcast::<CudaDevice>().map(CudaDevice::ordinal)
}

/// A stream of a GPU, and its events.
#[derive(Debug)]
pub(super) struct Engine {
    context: CUcontext,
    stream: CUstream,
    /// An event without timing.
    mark: CUevent,
    /// The start and end event of timed copies.
    between: [CUevent; 2],
}

// Safety: any thread may use these handles of the driver.
unsafe impl Send for Engine {}

/// Returns the primary context of a GPU, which gin uses, and retains it until the process ends.
fn context_of(ordinal: usize) -> Result<CUcontext, GpuError> {
    let (mut device, mut context) = (0, std::ptr::null_mut());
    // Safety: the calls write an integer and a pointer; nobody releases the context.
    unsafe {
        ok("open a GPU", sys::cuDeviceGet(&raw mut device, ordinal as i32))?;
        ok("open a context", sys::cuDevicePrimaryCtxRetain(&raw mut context, device))?;
    }
    Ok(context)
}

impl Engine {
    /// Returns an engine for a device; `None` if the device is no GPU.
    ///
    /// # Errors
    /// Returns the error of the driver, as all functions of the engine do.
    pub(super) fn of(device: &dyn Device) -> Result<Option<Self>, GpuError> {
        ordinal(device).map_or(Ok(None), |number| Self::of_number(device, number))
    }

    /// Returns an engine for another GPU; `None` if `device` is no GPU.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub(super) fn of_number(device: &dyn Device, ordinal: usize) -> Result<Option<Self>, GpuError> {
        if self::ordinal(device).is_none() {
            return Ok(None);
        }
        let context = context_of(ordinal)?;
        let (mut stream, mut events) = (std::ptr::null_mut(), [std::ptr::null_mut(); 3]);
        let no_time = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        let flags = [no_time, sys::CUevent_flags::CU_EVENT_DEFAULT as u32, sys::CUevent_flags::CU_EVENT_DEFAULT as u32];
        // Safety: the context is alive; the calls write pointers.
        unsafe {
            ok("enter a context", sys::cuCtxSetCurrent(context))?;
            let waits_for_none = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            ok("make a stream", sys::cuStreamCreate(&raw mut stream, waits_for_none))?;
            for (event, flags) in events.iter_mut().zip(flags) {
                ok("make an event", sys::cuEventCreate(&raw mut *event, flags))?;
            }
        }
        Ok(Some(Self { context, stream, mark: events[0], between: [events[1], events[2]] }))
    }

    /// Makes the GPU's context current on the calling thread, which may then use the engine.
    pub(super) fn enter(&self) -> Result<(), GpuError> {
        // Safety: the context is alive.
        ok("enter a context", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    /// Starts a copy between host and GPU.
    ///
    /// # Safety
    /// - Both ranges are valid until the copy is complete.
    pub(super) unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), GpuError> {
        // Safety: the caller's promise.
        ok("copy", unsafe { sys::cuMemcpyAsync(to, from, bytes, self.stream) })
    }

    /// Starts copies of `bytes` bytes each, in one call if `at_once`, else in a call for each.
    ///
    /// # Safety
    /// - All ranges are valid until the copies are complete.
    pub(super) unsafe fn copies(
        &self,
        to: &mut [u64],
        from: &mut [u64],
        bytes: usize,
        at_once: bool,
    ) -> Result<(), GpuError> {
        if !at_once {
            // Safety: the caller's promise.
            return to.iter().zip(&*from).try_for_each(|(&to, &from)| unsafe { self.copy(to, from, bytes) });
        }
        let count = to.len().min(from.len());
        let nowhere = sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
        let mut attributes = sys::CUmemcpyAttributes {
            srcAccessOrder: sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: nowhere,
            dstLocHint: nowhere,
            flags: 0,
        };
        let (mut sizes, mut first) = (vec![bytes; count], 0usize);
        // Safety: the arrays have `count` elements, and one attribute; the memory is valid by the caller's promise.
        ok("copy in a batch", unsafe {
            sys::cuMemcpyBatchAsync_v2(
                to.as_mut_ptr(),
                from.as_mut_ptr(),
                sizes.as_mut_ptr(),
                count,
                &raw mut attributes,
                &raw mut first,
                1,
                self.stream,
            )
        })
    }

    /// Starts writing a word.
    ///
    /// # Safety
    /// - The word is valid until the write is complete.
    pub(super) unsafe fn value(&self, to: u64, value: u64) -> Result<(), GpuError> {
        // Safety: the caller's promise.
        ok("write a value in a stream", unsafe { sys::cuStreamWriteValue64_v2(self.stream, to, value, 0) })
    }

    /// Starts writing two words, the second after the first, by one call.
    ///
    /// # Safety
    /// - As [`value`](Self::value).
    pub(super) unsafe fn values(&self, to: [u64; 2], value: u64) -> Result<(), GpuError> {
        let mut operations = to.map(|address| {
            // The padding initialises all bytes of the union.
            let mut operation = CUstreamBatchMemOpParams { pad: [0; 6] };
            operation.writeValue = WriteValue {
                operation: CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_64,
                address,
                __bindgen_anon_1: Value { value64: value },
                flags: 0,
                alias: 0,
            };
            operation
        });
        // Safety: the array has two operations; the words are valid by the caller's promise.
        ok("write values in a stream", unsafe {
            sys::cuStreamBatchMemOp_v2(self.stream, 2, operations.as_mut_ptr(), 0)
        })
    }

    /// Records an event after the started operations.
    pub(super) fn mark(&self) -> Result<(), GpuError> {
        // Safety: event and stream are alive.
        ok("record an event", unsafe { sys::cuEventRecord(self.mark, self.stream) })
    }

    /// Returns whether all operations before the last [`mark`](Self::mark) are complete.
    pub(super) fn is_done(&self) -> Result<bool, GpuError> {
        // Safety: the event is alive.
        match unsafe { sys::cuEventQuery(self.mark) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => ok("query an event", code).map(|()| true),
        }
    }

    /// Polls until all started operations are complete.
    pub(super) fn finish(&self, limit: Duration) -> Result<(), GpuError> {
        self.mark()?;
        let start = Instant::now();
        while !self.is_done()? {
            if start.elapsed() > limit {
                let reason = format!("copies were not complete after {limit:?}");
                return Err(GpuError::Driver { context: "wait for a stream", reason });
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Returns the mean time of `times` consecutive copies from this GPU to another one, in nanoseconds. One copy
    /// before them is not timed.
    ///
    /// # Safety
    /// - Both ranges are valid, and nothing else uses them during the copies.
    pub(super) unsafe fn time_copies(
        &self,
        to: (usize, u64),
        from: u64,
        bytes: usize,
        times: u64,
        limit: Duration,
    ) -> Result<f64, GpuError> {
        let context = context_of(to.0)?;
        let mut milliseconds = 0f32;
        for time in 0..=times {
            // Safety: the caller's promise; contexts, stream and events are alive.
            unsafe {
                ok("copy", sys::cuMemcpyPeerAsync(to.1, context, from, self.context, bytes, self.stream))?;
                if time == 0 {
                    ok("record an event", sys::cuEventRecord(self.between[0], self.stream))?;
                }
            }
        }
        // Safety: as above.
        ok("record an event", unsafe { sys::cuEventRecord(self.between[1], self.stream) })?;
        self.finish(limit)?;
        let [start, end] = self.between;
        // Safety: the call writes a number; both events are complete.
        ok("read the time between events", unsafe { sys::cuEventElapsedTime_v2(&raw mut milliseconds, start, end) })?;
        Ok(f64::from(milliseconds) * 1e6 / times as f64)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // The stream is empty. If a call fails here, the driver cleans up when the process ends.
        // Safety: the engine owns these handles and nothing uses them any more.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.context);
            let _ = sys::cuStreamDestroy_v2(self.stream);
            for event in [self.mark, self.between[0], self.between[1]] {
                let _ = sys::cuEventDestroy_v2(event);
            }
        }
    }
}
