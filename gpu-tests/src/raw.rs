// SPDX-License-Identifier: MIT OR Apache-2.0
//! Trials that call the driver themselves: graphs and modules.

use crate::gpus::{hardware_ptx, hardware_text};
use crate::hardware::{Exchanges, reload as reload_on};
use crate::journal::Outcome;
use crate::testbed::Testbed;
use cudarc::driver::sys::{self, CUcontext, CUfunction, CUmodule, CUresult, CUstream};
use gin_gpu::cuda::{CudaDevice, take_failures};
use gin_gpu::{Device, Devices, GpuError, KernelArg, ModuleSource, Plain};
use gin_host::comm::CommError;
use gin_host::world::{WorldConfig, launch};
use std::ffi::CString;
use std::time::{Duration, Instant};

/// Flags of pinned memory that every GPU sees at the CPU's address.
pub(crate) const SHARED: u32 = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;

pub(crate) fn ok(context: &'static str, code: CUresult) -> Result<(), GpuError> {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(GpuError::Driver { context, reason: format!("{code:?}") }) }
}

/// Makes a GPU's primary context, which gin uses, current on this thread.
pub(crate) fn enter(ordinal: usize) -> Result<CUcontext, GpuError> {
    let (mut device, mut context) = (0, std::ptr::null_mut());
    // Safety: writes an integer and a pointer. The context is kept until the process ends, as gin keeps it.
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
    ok("create a stream", unsafe { sys::cuStreamCreate(&raw mut stream, flags) })?;
    Ok(stream)
}

/// Returns whether all work on a stream is complete.
pub(crate) fn is_done(stream: CUstream) -> Result<bool, GpuError> {
    // Safety: the stream is alive.
    match unsafe { sys::cuStreamQuery(stream) } {
        CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        code => ok("query a stream", code).map(|()| true),
    }
}

/// Waits for a stream by repeated queries.
pub(crate) fn wait(stream: CUstream, limit: Duration) -> Result<(), GpuError> {
    let start = Instant::now();
    while !is_done(stream)? {
        if start.elapsed() > limit {
            return Err(GpuError::Kernel {
                kernel: "of a raw stream".into(),
                reason: format!("it has not ended after {limit:?}"),
            });
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    Ok(())
}

/// Loads a module and finds a kernel in it.
pub(crate) fn load(text: &str, name: &str) -> Result<(CUmodule, CUfunction), GpuError> {
    let no_zeros =
        |_| GpuError::Driver { context: "load a module", reason: "the text or the name contains a zero byte".into() };
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

/// Loads a module again and again, between communicating kernels from it.
///
/// # Errors
/// Returns the failures.
pub fn reload(gpus: &[usize], devices: Devices) -> Outcome {
    take_failures();
    // All GPUs of one machine are alike here, so the text is that of the first.
    reload_on(&Testbed::real(devices, gpus.len()), hardware_text(gpus[0])?)?;
    match take_failures().as_slice() {
        [] => Ok(()),
        failures => Err(format!("freeing failed: {failures:?}")),
    }
}

/// Loads kernels whose machine code the driver refuses: the driver compiles their PTX, if there is some.
///
/// # Errors
/// Returns the failures.
pub fn refused_code(gpus: &[usize], _: Devices) -> Outcome {
    // The bytes of an ELF header that hold the architecture.
    const FLAGS: std::ops::Range<usize> = 48..52;
    let text = |error: GpuError| error.to_string();
    let capability = CudaDevice::new(gpus[0], &[]).map_err(text)?.capability();
    let arch: &'static str = format!("sm_{capability}").leak();
    let is_code = |(of, image): &&(&str, &[u8])| *of == arch && image.starts_with(b"\x7fELF");
    let Some((_, code)) = hardware_ptx::PTX.iter().find(is_code) else {
        return Err(format!("there is no machine code for {arch}: the build has not found ptxas"));
    };
    let mut wrong = code.to_vec();
    wrong[FLAGS].fill(0);
    let [code, wrong]: [(&str, &[u8]); 2] = [(arch, code), (arch, wrong.leak())];
    let ptx = (arch, hardware_text(gpus[0])?.as_bytes());
    for (images, loads) in [([code, wrong], true), ([wrong, ptx], true), ([wrong, wrong], false)] {
        let device = CudaDevice::new(gpus[0], &[Vec::leak(images.to_vec())]).map_err(text)?;
        match (device.load(ModuleSource::Linked), loads) {
            (Ok(module), true) => drop(module.function("hardware_exchange").map_err(text)?),
            (Err(GpuError::Module { .. }), false) => {}
            (result, _) => return Err(format!("{:?}, and loads: {loads}", result.map(|module| module.names()))),
        }
    }
    Ok(())
}

/// Captures a communicating kernel into a graph and launches the graph three times, after naps longer than the deadline
/// of the kernel's waits.
///
/// # Errors
/// Returns the failures.
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
        // Safety: the handles were just created. The kernel takes these five values, and the capture copies them.
        unsafe {
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            ok("begin a capture", sys::cuStreamBeginCapture_v2(stream, mode))?;
            let null = std::ptr::null_mut();
            let launched = sys::cuLaunchKernel(function, 1, 1, 1, 128, 1, 1, 0, stream, values.as_mut_ptr(), null);
            ok("end a capture", sys::cuStreamEndCapture(stream, &raw mut graph))?;
            ok("capture a launch", launched)?;
            ok("create a graph", sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0))?;
            // Otherwise the first launch would upload the graph, while the kernel of another rank runs.
            ok("upload a graph", sys::cuGraphUpload(executable, stream))?;
        }
        wait(stream, Duration::from_secs(5))?;
        for number in 0..LAUNCHES {
            if number > 0 {
                std::thread::sleep(nap);
            }
            rank.barrier()?;
            // Safety: the graph is complete, and the memory that its kernel uses is alive.
            ok("launch a graph", unsafe { sys::cuGraphLaunch(executable, stream) })?;
            wait(stream, Duration::from_secs(8))?;
            rank.barrier()?;
        }
        let report = exchanges.report(&rank, LAUNCHES * ROUNDS)?;
        exchanges.comm.destroy()?;
        // No kernel runs on any rank, so none of these calls waits.
        rank.barrier()?;
        // Safety: the handles are no longer in use.
        unsafe {
            ok("destroy a graph", sys::cuGraphExecDestroy(executable))?;
            ok("destroy a graph", sys::cuGraphDestroy(graph))?;
            ok("destroy a stream", sys::cuStreamDestroy_v2(stream))?;
            ok("unload a module", sys::cuModuleUnload(module))?;
        }
        Ok(report)
    });
    let wrong: Vec<String> = results.map_err(|error| error.to_string())?.into_iter().flatten().collect();
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
}
