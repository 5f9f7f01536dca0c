// SPDX-License-Identifier: MIT OR Apache-2.0
//! A trial of each driver call beside a kernel that does not end.

use crate::gpus::hardware_text;
use crate::journal::Outcome;
use crate::raw::{SHARED, enter, is_done, load, new_stream, ok, wait};
use cudarc::driver::sys::{self, CUcontext, CUfunction, CUstream};
use gin_gpu::Devices;
use gin_gpu::GpuError;
use gin_gpu::cuda::CudaDevice;
use std::fmt::Write as _;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Time after which a call counts as waiting for the kernel.
const PATIENCE: Duration = Duration::from_millis(250);

/// Time after which a spinner ends by itself.
const SPIN_LIMIT_NS: u64 = 4_000_000_000;

/// The context, stream and memory that a call uses beside a spinner.
#[derive(Clone, Copy)]
struct Lab {
    ordinal: usize,
    context: CUcontext,
    /// Another GPU and its context, if there is one.
    other: Option<CUcontext>,
    text: &'static str,
    /// A stream without other work.
    stream: CUstream,
    /// The spinner's kernel.
    spin: CUfunction,
    /// Four words that the host and all GPUs reach. The last two end a kernel of one block at once.
    words: u64,
    /// Two allocations of device memory.
    device: [u64; 2],
    /// Memory of the other GPU.
    remote: u64,
}

// Safety: the fields are handles of the driver, which any thread may use.
unsafe impl Send for Lab {}

/// Flags of the events that gin creates.
const NO_TIMING: u32 = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;

/// Bytes of the lab's memory, and of its copies.
const BYTES: usize = 64 << 10;

/// A call, and its preparation before the spinner runs, which returns one word for the call.
struct Call {
    name: &'static str,
    /// Set if the call must return, because gin makes it while kernels run: beside one block, and beside a kernel that
    /// fills the GPU.
    must_return: [bool; 2],
    prepare: fn(&Lab) -> Result<u64, GpuError>,
    call: fn(&Lab, u64) -> Result<(), GpuError>,
    /// Reverses the preparation and the call, when nothing runs.
    clean: fn(&Lab, u64) -> Result<(), GpuError>,
}

const NEVER: [bool; 2] = [false, false];
const BOTH: [bool; 2] = [true, true];

fn none(_: &Lab) -> Result<u64, GpuError> {
    Ok(0)
}

fn keep(_: &Lab, _: u64) -> Result<(), GpuError> {
    Ok(())
}

fn stream_of(word: u64) -> CUstream {
    std::ptr::with_exposed_provenance_mut(word as usize)
}

fn word_of<T>(pointer: *mut T) -> u64 {
    pointer.expose_provenance() as u64
}

fn prepare_stream(_: &Lab) -> Result<u64, GpuError> {
    new_stream().map(word_of)
}

fn end_stream(_: &Lab, word: u64) -> Result<(), GpuError> {
    // Safety: created by `prepare_stream`, destroyed once.
    ok("destroy a stream", unsafe { sys::cuStreamDestroy_v2(stream_of(word)) })
}

fn prepare_event(_: &Lab) -> Result<u64, GpuError> {
    let mut event = std::ptr::null_mut();
    // Safety: writes a pointer.
    ok("create an event", unsafe { sys::cuEventCreate(&raw mut event, NO_TIMING) })?;
    Ok(word_of(event))
}

fn event_of(word: u64) -> sys::CUevent {
    std::ptr::with_exposed_provenance_mut(word as usize)
}

fn end_event(_: &Lab, word: u64) -> Result<(), GpuError> {
    // Safety: created by `prepare_event`, destroyed once.
    ok("destroy an event", unsafe { sys::cuEventDestroy_v2(event_of(word)) })
}

fn prepare_memory(_: &Lab) -> Result<u64, GpuError> {
    let mut address = 0;
    // Safety: writes an integer.
    ok("allocate", unsafe { sys::cuMemAlloc_v2(&raw mut address, BYTES) }).map(|()| address)
}

fn free_memory(_: &Lab, word: u64) -> Result<(), GpuError> {
    // Safety: allocated by `prepare_memory`, freed once.
    ok("free", unsafe { sys::cuMemFree_v2(word) })
}

fn prepare_pinned(_: &Lab) -> Result<u64, GpuError> {
    let mut start = std::ptr::null_mut();
    // Safety: writes a pointer.
    ok("allocate pinned memory", unsafe { sys::cuMemHostAlloc(&raw mut start, BYTES, SHARED) })?;
    Ok(word_of(start))
}

fn free_pinned(_: &Lab, word: u64) -> Result<(), GpuError> {
    // Safety: allocated by `prepare_pinned`, freed once.
    ok("free pinned memory", unsafe { sys::cuMemFreeHost(std::ptr::with_exposed_provenance_mut(word as usize)) })
}

/// Allocates whole pages of the host's own memory.
fn prepare_pages(_: &Lab) -> Result<u64, GpuError> {
    // Safety: the size is not 0.
    Ok(word_of(unsafe { std::alloc::alloc_zeroed(pages()) }))
}

/// Whole pages.
#[repr(align(4096))]
struct Pages(#[expect(dead_code, reason = "the driver takes its address")] [u8; BYTES]);

fn pages() -> std::alloc::Layout {
    std::alloc::Layout::new::<Pages>()
}

fn register(_: &Lab, word: u64) -> Result<(), GpuError> {
    let start = std::ptr::with_exposed_provenance_mut(word as usize);
    // Safety: pages that are alive.
    ok("register memory", unsafe { sys::cuMemHostRegister_v2(start, BYTES, 0) })
}

fn unregister(_: &Lab, word: u64) -> Result<(), GpuError> {
    let start = std::ptr::with_exposed_provenance_mut(word as usize);
    // Safety: pages that are registered.
    ok("unregister memory", unsafe { sys::cuMemHostUnregister(start) })
}

fn free_pages(_: &Lab, word: u64) -> Result<(), GpuError> {
    // Safety: allocated by `prepare_pages`, freed once.
    unsafe { std::alloc::dealloc(std::ptr::with_exposed_provenance_mut(word as usize), pages()) };
    Ok(())
}

fn load_module(lab: &Lab) -> Result<u64, GpuError> {
    load(lab.text, "hardware_flood").map(|(module, _)| word_of(module))
}

fn unload(_: &Lab, word: u64) -> Result<(), GpuError> {
    // Safety: loaded, unloaded once.
    ok("unload a module", unsafe { sys::cuModuleUnload(std::ptr::with_exposed_provenance_mut(word as usize)) })
}

/// Launches a kernel of one block on the lab's stream; it ends at once.
fn launch_small(lab: &Lab) -> Result<(), GpuError> {
    let (mut stop, mut started, mut limit) = (lab.words + 16, lab.words + 24, 0u64);
    let mut values = [(&raw mut stop).cast(), (&raw mut started).cast(), (&raw mut limit).cast()];
    let null = std::ptr::null_mut();
    // Safety: the kernel takes these three values.
    ok("launch a kernel", unsafe {
        sys::cuLaunchKernel(lab.spin, 1, 1, 1, 32, 1, 1, 0, lab.stream, values.as_mut_ptr(), null)
    })
}

/// Waits until the lab's stream is complete. The limit is longer than a spinner's, so the wait ends.
fn finish(lab: &Lab) -> Result<(), GpuError> {
    wait(lab.stream, Duration::from_secs(8))
}

fn copy(lab: &Lab, to: u64, from: u64) -> Result<(), GpuError> {
    // Safety: both ranges have `BYTES` bytes.
    ok("copy", unsafe { sys::cuMemcpyAsync(to, from, BYTES, lab.stream) })?;
    finish(lab)
}

fn properties(lab: &Lab) -> sys::CUmemAllocationProp {
    // Safety: plain data, for which zeros are the defaults.
    let mut properties: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = lab.ordinal as i32;
    properties
}

/// Bytes of an allocation by the virtual-memory calls: a multiple of every granularity in use.
const VIRTUAL_BYTES: usize = 2 << 20;

fn map(lab: &Lab, address: u64) -> Result<(), GpuError> {
    let mut handle = 0;
    let properties = properties(lab);
    let access = sys::CUmemAccessDesc {
        location: properties.location,
        flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    // Safety: the range is reserved. The handle is released at once, since the mapping keeps the memory.
    unsafe {
        ok("create memory", sys::cuMemCreate(&raw mut handle, VIRTUAL_BYTES, &raw const properties, 0))?;
        ok("map memory", sys::cuMemMap(address, VIRTUAL_BYTES, 0, handle, 0))?;
        ok("allow access", sys::cuMemSetAccess(address, VIRTUAL_BYTES, &raw const access, 1))?;
        ok("release memory", sys::cuMemRelease(handle))
    }
}

fn reserve(_: &Lab) -> Result<u64, GpuError> {
    let mut address = 0;
    // Safety: writes an integer.
    ok("reserve", unsafe { sys::cuMemAddressReserve(&raw mut address, VIRTUAL_BYTES, 0, 0, 0) }).map(|()| address)
}

fn mapped(lab: &Lab) -> Result<u64, GpuError> {
    let address = reserve(lab)?;
    map(lab, address)?;
    Ok(address)
}

fn unmap(_: &Lab, address: u64) -> Result<(), GpuError> {
    // Safety: mapped, and nothing uses it.
    ok("unmap memory", unsafe { sys::cuMemUnmap(address, VIRTUAL_BYTES) })
}

fn unreserve(_: &Lab, address: u64) -> Result<(), GpuError> {
    // Safety: reserved, and nothing is mapped there.
    ok("free a range", unsafe { sys::cuMemAddressFree(address, VIRTUAL_BYTES) })
}

fn unmap_all(lab: &Lab, address: u64) -> Result<(), GpuError> {
    unmap(lab, address)?;
    unreserve(lab, address)
}

/// Every call that gin makes, and some that it avoids.
const CALLS: &[Call] = &[
    Call {
        name: "cuCtxSetCurrent",
        must_return: BOTH,
        prepare: none,
        // Safety: the context lives as long as the process.
        call: |lab, _| ok("enter", unsafe { sys::cuCtxSetCurrent(lab.context) }),
        clean: keep,
    },
    Call {
        name: "cuDeviceGetAttribute",
        must_return: BOTH,
        prepare: none,
        call: |lab, _| {
            let mut value = 0;
            let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
            // Safety: writes an integer.
            ok("read a device attribute", unsafe {
                sys::cuDeviceGetAttribute(&raw mut value, attribute, lab.ordinal as i32)
            })
        },
        clean: keep,
    },
    Call {
        name: "cuMemGetInfo",
        must_return: NEVER,
        prepare: none,
        call: |_, _| {
            let (mut free, mut total) = (0, 0);
            // Safety: writes two integers.
            ok("read the free memory", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })
        },
        clean: keep,
    },
    Call {
        name: "cuMemAlloc",
        must_return: BOTH,
        prepare: none,
        // Memory that calls allocate is freed at the end of the process.
        call: |lab, _| prepare_memory(lab).map(|_| ()),
        clean: keep,
    },
    Call { name: "cuMemFree", must_return: NEVER, prepare: prepare_memory, call: free_memory, clean: keep },
    Call {
        name: "cuMemHostAlloc",
        must_return: BOTH,
        prepare: none,
        call: |lab, _| prepare_pinned(lab).map(|_| ()),
        clean: keep,
    },
    Call { name: "cuMemFreeHost", must_return: NEVER, prepare: prepare_pinned, call: free_pinned, clean: keep },
    Call {
        name: "cuMemHostRegister",
        must_return: NEVER,
        prepare: prepare_pages,
        call: register,
        clean: |lab, word| unregister(lab, word).and_then(|()| free_pages(lab, word)),
    },
    Call {
        name: "cuMemHostUnregister",
        must_return: NEVER,
        prepare: |lab| prepare_pages(lab).and_then(|word| register(lab, word).map(|()| word)),
        call: unregister,
        clean: free_pages,
    },
    Call {
        name: "cuMemAddressReserve",
        must_return: NEVER,
        prepare: none,
        call: |lab, _| reserve(lab).map(|_| ()),
        clean: keep,
    },
    Call {
        name: "cuMemCreate, Map, SetAccess, Release",
        must_return: NEVER,
        prepare: reserve,
        call: map,
        clean: unmap_all,
    },
    Call { name: "cuMemUnmap", must_return: NEVER, prepare: mapped, call: unmap, clean: unreserve },
    Call { name: "cuMemAddressFree", must_return: NEVER, prepare: reserve, call: unreserve, clean: keep },
    Call {
        name: "cuStreamCreate",
        must_return: BOTH,
        prepare: none,
        call: |_, _| new_stream().map(|_| ()),
        clean: keep,
    },
    Call { name: "cuStreamDestroy", must_return: NEVER, prepare: prepare_stream, call: end_stream, clean: keep },
    Call {
        name: "cuStreamQuery",
        must_return: BOTH,
        prepare: none,
        call: |lab, _| is_done(lab.stream).map(|_| ()),
        clean: keep,
    },
    Call {
        name: "cuStreamSynchronize of an idle stream",
        must_return: NEVER,
        prepare: none,
        // Safety: the stream is alive.
        call: |lab, _| ok("wait for a stream", unsafe { sys::cuStreamSynchronize(lab.stream) }),
        clean: keep,
    },
    Call {
        name: "cuEventCreate",
        must_return: BOTH,
        prepare: none,
        call: |lab, _| prepare_event(lab).map(|_| ()),
        clean: keep,
    },
    Call {
        name: "cuEventRecord",
        must_return: BOTH,
        prepare: prepare_event,
        // Safety: both are alive.
        call: |lab, word| ok("record an event", unsafe { sys::cuEventRecord(event_of(word), lab.stream) }),
        clean: end_event,
    },
    Call {
        name: "cuEventQuery",
        must_return: BOTH,
        prepare: prepare_event,
        // Safety: the event is alive.
        call: |_, word| ok("query an event", unsafe { sys::cuEventQuery(event_of(word)) }),
        clean: end_event,
    },
    Call { name: "cuEventDestroy", must_return: BOTH, prepare: prepare_event, call: end_event, clean: keep },
    Call {
        name: "cuStreamWaitEvent",
        must_return: BOTH,
        prepare: prepare_event,
        // Safety: both are alive.
        call: |lab, word| ok("wait for an event", unsafe { sys::cuStreamWaitEvent(lab.stream, event_of(word), 0) }),
        clean: end_event,
    },
    Call {
        name: "cuThreadExchangeStreamCaptureMode",
        must_return: BOTH,
        prepare: none,
        call: |_, _| {
            let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
            // Safety: reads and writes one value of the enumeration.
            ok("exchange the capture mode", unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) })
        },
        clean: keep,
    },
    Call {
        name: "cuStreamIsCapturing",
        must_return: BOTH,
        prepare: none,
        call: |lab, _| {
            let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
            // Safety: writes one value of the enumeration; the stream is alive.
            ok("query the capture status", unsafe { sys::cuStreamIsCapturing(lab.stream, &raw mut status) })
        },
        clean: keep,
    },
    Call {
        name: "cuPointerGetAttribute",
        must_return: NEVER,
        prepare: none,
        call: |lab, _| {
            let (mut kind, attribute) = (0u64, sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
            // Safety: writes at most the size of `kind`.
            ok("read a pointer's attribute", unsafe {
                sys::cuPointerGetAttribute((&raw mut kind).cast(), attribute, lab.device[0])
            })
        },
        clean: keep,
    },
    Call {
        name: "cuOccupancyMaxActiveBlocksPerMultiprocessor",
        must_return: BOTH,
        prepare: none,
        call: |lab, _| {
            let mut blocks = 0;
            // Safety: writes an integer; the kernel's module is loaded.
            ok("count resident blocks", unsafe {
                sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(&raw mut blocks, lab.spin, 128, 0)
            })
        },
        clean: keep,
    },
    Call {
        name: "cuLaunchKernel, the call alone",
        must_return: BOTH,
        prepare: none,
        call: |lab, _| launch_small(lab),
        clean: |lab, _| finish(lab),
    },
    Call {
        name: "cuLaunchKernel, until the kernel has ended",
        must_return: [true, false],
        prepare: none,
        call: |lab, _| launch_small(lab).and_then(|()| finish(lab)),
        clean: keep,
    },
    Call {
        name: "cuModuleLoadData, cuFuncLoad",
        must_return: NEVER,
        prepare: none,
        call: |lab, _| load_module(lab).map(|_| ()),
        clean: keep,
    },
    Call { name: "cuModuleUnload", must_return: NEVER, prepare: load_module, call: unload, clean: keep },
    Call {
        name: "cuMemcpyAsync, host to GPU, until done",
        must_return: BOTH,
        prepare: prepare_pinned,
        call: |lab, word| copy(lab, lab.device[0], word),
        clean: free_pinned,
    },
    Call {
        name: "cuMemcpyAsync, GPU to host, until done",
        must_return: BOTH,
        prepare: prepare_pinned,
        call: |lab, word| copy(lab, word, lab.device[0]),
        clean: free_pinned,
    },
    Call {
        name: "cuMemcpyAsync within the GPU, until done",
        must_return: NEVER,
        prepare: none,
        call: |lab, _| copy(lab, lab.device[1], lab.device[0]),
        clean: keep,
    },
    Call {
        name: "cuMemcpyPeerAsync, until done",
        must_return: BOTH,
        prepare: none,
        call: |lab, _| {
            // Omitted with one GPU.
            let Some(other) = lab.other else { return Ok(()) };
            let (to, from) = (lab.remote, lab.device[0]);
            // Safety: both ranges have `BYTES` bytes.
            let code = unsafe { sys::cuMemcpyPeerAsync(to, other, from, lab.context, BYTES, lab.stream) };
            ok("copy", code).and_then(|()| finish(lab))
        },
        clean: keep,
    },
    Call {
        name: "cuMemsetD8Async, until done",
        must_return: NEVER,
        prepare: none,
        call: |lab, _| {
            // Safety: the range has `BYTES` bytes.
            ok("set", unsafe { sys::cuMemsetD8Async(lab.device[0], 1, BYTES, lab.stream) })?;
            finish(lab)
        },
        clean: keep,
    },
    Call {
        name: "cuStreamWriteValue64, until done",
        must_return: NEVER,
        prepare: none,
        call: |lab, _| {
            // Safety: a word of device memory.
            ok("write", unsafe { sys::cuStreamWriteValue64_v2(lab.stream, lab.device[0], 7, 0) })?;
            finish(lab)
        },
        clean: keep,
    },
];

/// The result of a call beside a spinner.
#[derive(Clone, Debug)]
enum Seen {
    Returned(Duration),
    Waited,
    Failed(String),
}

impl std::fmt::Display for Seen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Returned(time) => write!(f, "{:.3} ms", time.as_secs_f64() * 1e3),
            Self::Waited => write!(f, "waited"),
            Self::Failed(reason) => write!(f, "failed: {reason}"),
        }
    }
}

/// Makes a call while `blocks` blocks spin.
fn beside(lab: &Lab, blocks: u32, call: &'static Call) -> Result<Seen, GpuError> {
    let word = (call.prepare)(lab)?;
    let stop = std::ptr::with_exposed_provenance_mut::<u64>(lab.words as usize);
    // Safety: pinned words, which kernels also read and write, by single accesses.
    let (read, write) = (
        |index| unsafe { stop.add(index).read_volatile() },
        |index, value| unsafe { stop.add(index).write_volatile(value) },
    );
    write(0, 0);
    write(1, 0);
    let stream = new_stream()?;
    let (mut first, mut second, mut limit) = (lab.words, lab.words + 8, SPIN_LIMIT_NS);
    let mut values = [(&raw mut first).cast(), (&raw mut second).cast(), (&raw mut limit).cast()];
    let null = std::ptr::null_mut();
    // Safety: the kernel takes these three values.
    ok("launch a spinner", unsafe {
        sys::cuLaunchKernel(lab.spin, blocks, 1, 1, 1024, 1, 1, 0, stream, values.as_mut_ptr(), null)
    })?;
    let start = Instant::now();
    while read(1) < u64::from(blocks) && start.elapsed() < Duration::from_secs(2) {
        std::thread::yield_now();
    }
    let running = read(1) == u64::from(blocks);
    let (to, from) = channel();
    let own = *lab;
    let thread = std::thread::spawn(move || {
        // The closure takes the whole lab, not its handles one by one, since only the lab is `Send`.
        let own = own;
        let start = Instant::now();
        let outcome = enter_again(&own).and_then(|()| (call.call)(&own, word));
        // After `PATIENCE` nothing receives this.
        let _ = to.send((start.elapsed(), outcome.clone()));
        outcome
    });
    let seen = match from.recv_timeout(PATIENCE) {
        Ok((time, Ok(()))) => Seen::Returned(time),
        Ok((_, Err(error))) => Seen::Failed(error.to_string()),
        Err(_) => Seen::Waited,
    };
    // A spinner that ended by itself proves nothing.
    let ended = is_done(stream)?;
    write(0, 1);
    let outcome = thread
        .join()
        .map_err(|_| GpuError::Driver { context: "make a call", reason: "the call's thread panicked".into() })?;
    wait(stream, Duration::from_secs(8))?;
    // Safety: the stream is idle.
    ok("destroy a stream", unsafe { sys::cuStreamDestroy_v2(stream) })?;
    if !running || ended {
        let reason = format!("the spinner did not run all of its {blocks} blocks during {}", call.name);
        return Err(GpuError::Driver { context: "run a spinner", reason });
    }
    if outcome.is_ok() {
        (call.clean)(lab, word)?;
    }
    Ok(seen)
}

fn enter_again(lab: &Lab) -> Result<(), GpuError> {
    // Safety: the context lives as long as the process.
    ok("enter a context", unsafe { sys::cuCtxSetCurrent(lab.context) })
}

/// Makes each driver call that gin uses beside a spinner of one block and beside one that fills the GPU. Prints a
/// table, and writes it to `driver-calls-N.txt` in `$OUT` if that is set. Calls that gin makes while kernels run must
/// return.
///
/// # Errors
/// Returns the calls that waited though they must not, with the whole table.
pub fn calls(gpus: &[usize], _devices: Devices) -> Outcome {
    let text = |error: GpuError| error.to_string();
    let (table, wrong) = measure(gpus).map_err(text)?;
    println!("{table}");
    if let Some(out) = std::env::var_os("OUT") {
        let path = std::path::Path::new(&out).join(format!("driver-calls-{}.txt", gpus.len()));
        std::fs::write(&path, &table).map_err(|error| format!("{}: {error}\n{table}", path.display()))?;
    }
    if wrong.is_empty() { Ok(()) } else { Err(format!("{}\n{table}", wrong.join("\n"))) }
}

fn measure(gpus: &[usize]) -> Result<(String, Vec<String>), GpuError> {
    let ordinal = gpus[0];
    let text = hardware_text(ordinal).map_err(|reason| GpuError::Driver { context: "find kernels", reason })?;
    let device = CudaDevice::new(ordinal, &[])?;
    let (other, remote) = match gpus.get(1) {
        Some(&ordinal) => {
            let context = enter(ordinal)?;
            let mut remote = 0;
            // Safety: writes an integer.
            ok("allocate", unsafe { sys::cuMemAlloc_v2(&raw mut remote, BYTES) })?;
            (Some(context), remote)
        }
        None => (None, 0),
    };
    let context = enter(ordinal)?;
    let (_module, spin) = load(text, "hardware_spin")?;
    let mut words = std::ptr::null_mut();
    // Safety: writes a pointer; portable and mapped, so every GPU sees it at this address.
    ok("allocate pinned memory", unsafe { sys::cuMemHostAlloc(&raw mut words, 64, SHARED) })?;
    let mut memory = [0; 2];
    for address in &mut memory {
        // Safety: writes an integer.
        ok("allocate", unsafe { sys::cuMemAlloc_v2(address, BYTES) })?;
    }
    let stream = new_stream()?;
    let lab = Lab { ordinal, context, other, text, stream, spin, words: word_of(words), device: memory, remote };
    let mut blocks = 0;
    // Safety: writes an integer; the kernel's module is loaded.
    ok("count the blocks that fit", unsafe {
        sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(&raw mut blocks, spin, 1024, 0)
    })?;
    let full = blocks as u32 * device.sms();
    // The first call may load code, which is not measured here.
    launch_small(&lab)?;
    finish(&lab)?;

    let mut table = format!(
        "driver calls while kernels run: time until they returned, or waited (longer than {} ms)\n{:46} {:>14} {:>18}\n",
        PATIENCE.as_millis(),
        "call",
        "beside 1 block",
        format!("beside {full} blocks")
    );
    let mut wrong = Vec::new();
    for call in CALLS {
        let seen = [beside(&lab, 1, call)?, beside(&lab, full, call)?];
        // Writing to a string does not fail.
        let _ = writeln!(table, "{:46} {:>14} {:>18}", call.name, seen[0].to_string(), seen[1].to_string());
        for (seen, (must, blocks)) in seen.iter().zip(call.must_return.iter().zip([1, full])) {
            if *must && !matches!(seen, Seen::Returned(_)) {
                wrong.push(format!("{} beside {blocks} blocks: {seen}", call.name));
            }
        }
    }
    Ok((table, wrong))
}
