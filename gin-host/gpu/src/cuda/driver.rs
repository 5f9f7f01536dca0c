// SPDX-License-Identifier: MIT OR Apache-2.0
//! Loads the driver, and reports its errors.

use crate::GpuError;
use cudarc::driver::result::DriverError;
use cudarc::driver::sys::{self, CUevent_flags, CUresult, CUstreamCaptureMode};
use std::ffi::CStr;
use std::sync::OnceLock;

/// The oldest driver with every call used here: that of CUDA 12.8.
const OLDEST: i32 = 12_080;

/// A handle of the driver: `CUcontext`, `CUstream`, `CUmodule` or `CUfunction`.
pub type RawHandle = *mut core::ffi::c_void;

/// Checks the code that a call returned.
pub(super) fn check(context: &'static str, code: CUresult) -> Result<(), GpuError> {
    code.result().map_err(|failure| error(context, failure))
}

/// Returns the value that a call of the driver writes.
pub(super) fn written<T>(
    context: &'static str,
    initial: T,
    call: impl FnOnce(*mut T) -> CUresult,
) -> Result<T, GpuError> {
    let mut value = initial;
    check(context, call(&raw mut value)).map(|()| value)
}

/// Returns the handle that a call of the driver writes.
pub(super) fn handle<T>(context: &'static str, call: impl FnOnce(*mut *mut T) -> CUresult) -> Result<*mut T, GpuError> {
    written(context, std::ptr::null_mut(), call)
}

/// Returns whether work is done, from the code of a query.
pub(super) fn is_done(context: &'static str, code: CUresult) -> Result<bool, GpuError> {
    match code {
        CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        code => check(context, code).map(|()| true),
    }
}

/// Makes an event that measures the time, or none. The context must be current.
pub(super) fn new_event(flags: CUevent_flags) -> Result<sys::CUevent, GpuError> {
    // Safety: writes one pointer.
    handle("make an event", |event| unsafe { sys::cuEventCreate(event, flags as u32) })
}

/// Returns the error of a call that failed.
pub(super) fn error(context: &'static str, failure: DriverError) -> GpuError {
    GpuError::Driver { context, reason: describe(failure) }
}

/// Returns the meaning of an error code.
pub(super) fn describe(failure: DriverError) -> String {
    let name = failure.error_name().map_or("unknown error".into(), CStr::to_string_lossy);
    let meaning = failure.error_string().map_or("".into(), CStr::to_string_lossy);
    format!("{name} ({}): {meaning}", failure.0 as u32)
}

/// Returns a version as people write it.
pub(super) fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// Returns the error of a driver that shows no GPU.
pub(super) fn no_device(version: i32) -> GpuError {
    let visible = std::env::var_os("CUDA_VISIBLE_DEVICES").map(|value| value.to_string_lossy().into_owned());
    GpuError::NoDevice { driver: version_text(version), visible }
}

/// Starts the driver once. Returns the newest CUDA version that it supports.
pub(super) fn start() -> Result<i32, GpuError> {
    static STARTED: OnceLock<Result<i32, GpuError>> = OnceLock::new();
    STARTED
        .get_or_init(|| {
            let none = |reason: String| GpuError::NoDriver { reason };
            // Safety: loads a library whose initialisers are those of the driver.
            if !unsafe { sys::is_culib_present() } {
                return Err(none("there is no libcuda".to_owned()));
            }
            // Safety: writes one integer.
            let version = written("ask for the driver's version", 0, |to| unsafe { sys::cuDriverGetVersion(to) })?;
            if version < OLDEST {
                return Err(GpuError::DriverTooOld { found: version_text(version), needed: version_text(OLDEST) });
            }
            // Safety: takes no pointers.
            match unsafe { sys::cuInit(0) } {
                CUresult::CUDA_SUCCESS => Ok(version),
                CUresult::CUDA_ERROR_NO_DEVICE => Err(no_device(version)),
                code => Err(none(describe(DriverError(code)))),
            }
        })
        .clone()
}

/// Returns whether launches into a stream are being captured.
pub(super) fn is_capturing(stream: sys::CUstream) -> Result<bool, GpuError> {
    let none = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // Safety: writes one value of the enumeration; the stream is alive.
    let ask = |status| unsafe { sys::cuStreamIsCapturing(stream, status) };
    written("ask whether a stream is captured", none, ask).map(|status| status != none)
}

/// While this is alive, calls of this thread are not refused because a stream is captured somewhere in the process.
///
/// The driver refuses queries of events and allocations during a capture, because they can be mistakes there. Here they
/// never depend on captured work.
#[derive(Debug)]
pub(super) struct BesideCaptures(Option<CUstreamCaptureMode>);

impl BesideCaptures {
    pub(super) fn begin() -> Self {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // Safety: reads and writes one value of the enumeration.
        let code = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
        Self((code == CUresult::CUDA_SUCCESS).then_some(mode))
    }
}

impl Drop for BesideCaptures {
    fn drop(&mut self) {
        if let Some(mut mode) = self.0 {
            // Safety: as above. It does not fail for a mode that the driver has returned.
            let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
        }
    }
}
