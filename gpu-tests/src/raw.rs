// SPDX-License-Identifier: MIT OR Apache-2.0
//! Trials that call the driver themselves: graphs and modules.

use crate::gpus::hardware_text;
use crate::hardware::{Exchanges, Place, reload as reload_on};
use crate::journal::Outcome;
use cudarc::driver::sys::{self, CUcontext, CUfunction, CUmodule, CUresult, CUstream};
use gin_gpu::Devices;
use gin_gpu::GpuError;
use gin_gpu::KernelArg;
use gin_gpu::Plain;
use gin_gpu::cuda::{CudaDevice, take_failures};
use gin_host::comm::CommError;
use gin_host::world::{WorldConfig, launch};
use std::ffi::CString;
use std::time::{Duration, Instant};

/// Pinned memory that every GPU sees at the address that the CPU uses.
pub(crate) const SHARED: u32 = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;

pub(crate) fn ok(context: &'static str, code: CUresult) -> Result<(), GpuError> {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(GpuError::Driver { context, reason: format!("{code:?}") }) }
}

/// Makes a GPU's primary context, the one that gin uses, current on this thread.
pub(crate) fn enter(ordinal: usize) -> Result<CUcontext, GpuError> {
    let (mut device, mut context) = (0, std::ptr::null_mut());
    // Safety: writes an integer and a pointer. It is kept until the process ends, as gin keeps it.
    unsafe {
        ok("open a GPU", sys::cuDeviceGet(&raw mut device, ordinal as i32))?;
        ok("open a context", sys::cuDevicePrimaryCtxRetain(&raw mut context, device))?;
        ok("enter a context", sys::cuCtxSetCurrent(context))?;
    }
    Ok(context)
}

pub(crate) fn new_stream() -> Result<CUstream, GpuError> {
    let mut stream = std::ptr::null_mut();
    let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
    // Safety: writes a pointer.
    ok("make a stream", unsafe { sys::cuStreamCreate(&raw mut stream, flags) })?;
    Ok(stream)
}

/// Whether all that was put on a stream is done.
pub(crate) fn is_done(stream: CUstream) -> Result<bool, GpuError> {
    // Safety: the stream is alive.
    match unsafe { sys::cuStreamQuery(stream) } {
        CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        code => ok("ask a stream", code).map(|()| true),
    }
}

/// Waits for a stream, by asking it again and again.
pub(crate) fn wait(stream: CUstream, limit: Duration) -> Result<(), GpuError> {
    let start = Instant::now();
    while !is_done(stream)? {
        if start.elapsed() > limit {
            return Err(GpuError::Kernel { kernel: "of a raw stream".into(), reason: format!("it ran for {limit:?}") });
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    Ok(())
}

/// A module and a kernel of it, loaded.
pub(crate) fn load(text: &str, name: &str) -> Result<(CUmodule, CUfunction), GpuError> {
    let no_zeros = |_| GpuError::Driver { context: "load a module", reason: "a zero byte".into() };
    let (text, name) = (CString::new(text).map_err(no_zeros)?, CString::new(name).map_err(no_zeros)?);
    let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
    // Safety: both texts end with 0; writes two pointers.
    unsafe {
        ok("load a module", sys::cuModuleLoadData(&raw mut module, text.as_ptr().cast()))?;
        ok("find a kernel", sys::cuModuleGetFunction(&raw mut function, module, name.as_ptr()))?;
        ok("load a kernel", sys::cuFuncLoad(function))?;
    }
    Ok((module, function))
}

/// Loads a module again and again between kernels of it that communicate.
///
/// # Errors
/// What was wrong.
pub fn reload(gpus: &[usize], devices: Devices) -> Outcome {
    take_failures();
    // GPUs of one machine are alike here: the text is that of the first.
    reload_on(&Place::real(devices, gpus.len()), hardware_text(gpus[0])?)?;
    match take_failures().as_slice() {
        [] => Ok(()),
        failures => Err(format!("freeing failed: {failures:?}")),
    }
}

/// Captures a kernel that communicates into a graph and launches that three times, after naps longer than the deadline
/// of the kernel's waits.
///
/// # Errors
/// What was wrong.
pub fn graph(gpus: &[usize], devices: Devices) -> Outcome {
    const LAUNCHES: u64 = 3;
    const ROUNDS: u64 = 100;
    let deadline = gin_abi::Deadline::after_ms(1500);
    let nap = Duration::from_millis(2000);
    let ranks = gpus.len().max(2) as u32;
    let mut config = WorldConfig::threads(ranks);
    config.devices = Some(devices);
    config.collective_timeout = Some(Duration::from_secs(20));
    if gpus.len() > 1 {
        config.comm.lsa_size = Some(1);
    }
    let results = launch(config, |rank| -> Result<Vec<String>, CommError> {
        let exchanges = Exchanges::new(&rank, 1, 1, 16, ROUNDS)?;
        let ordinal = rank.device().downcast::<CudaDevice>().map_or(0, CudaDevice::ordinal);
        enter(ordinal)?;
        let text = hardware_text(ordinal).map_err(|reason| GpuError::Driver { context: "find kernels", reason })?;
        let (module, function) = load(text, "hardware_exchange")?;
        let stream = new_stream()?;
        let arguments = [
            exchanges.comm.device()?.argument(),
            exchanges.inbox.argument(),
            exchanges.outbox.argument(),
            Plain(exchanges.plan(0)).argument(),
            deadline.argument(),
        ];
        let mut values: Vec<*mut core::ffi::c_void> =
            arguments.iter().map(|argument| argument.as_ptr().cast_mut().cast()).collect();
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        // Safety: handles that were just made; the kernel takes these five values, which the capture copies.
        unsafe {
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            ok("begin a capture", sys::cuStreamBeginCapture_v2(stream, mode))?;
            let null = std::ptr::null_mut();
            let launched = sys::cuLaunchKernel(function, 1, 1, 1, 128, 1, 1, 0, stream, values.as_mut_ptr(), null);
            ok("end a capture", sys::cuStreamEndCapture(stream, &raw mut graph))?;
            ok("capture a launch", launched)?;
            ok("make a graph", sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0))?;
            // What the first launch would do else, while the kernel of another rank runs.
            ok("upload a graph", sys::cuGraphUpload(executable, stream))?;
        }
        wait(stream, Duration::from_secs(5))?;
        for number in 0..LAUNCHES {
            if number > 0 {
                std::thread::sleep(nap);
            }
            rank.barrier()?;
            // Safety: the graph is whole, and what its kernel uses is alive.
            ok("launch a graph", unsafe { sys::cuGraphLaunch(executable, stream) })?;
            wait(stream, Duration::from_secs(8))?;
            rank.barrier()?;
        }
        let told = exchanges.tell(&rank, LAUNCHES * ROUNDS)?;
        exchanges.comm.destroy()?;
        // No kernel runs on any rank, so nothing of this waits.
        rank.barrier()?;
        // Safety: nobody uses the handles any more.
        unsafe {
            ok("end a graph", sys::cuGraphExecDestroy(executable))?;
            ok("end a graph", sys::cuGraphDestroy(graph))?;
            ok("end a stream", sys::cuStreamDestroy_v2(stream))?;
            ok("unload a module", sys::cuModuleUnload(module))?;
        }
        Ok(told)
    });
    let wrong: Vec<String> = results.map_err(|error| error.to_string())?.into_iter().flatten().collect();
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
}
