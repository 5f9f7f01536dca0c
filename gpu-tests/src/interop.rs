// SPDX-License-Identifier: MIT OR Apache-2.0
//! Trials of a program that calls the driver itself, like a program written with `cust` or in C++, and shares its
//! streams, memory and modules with gin; and of launches in clusters. [`share`] is also an example of such a program.

use crate::gpus::hardware_text;
use crate::journal::Outcome;
use crate::raw::{SHARED, enter, load, new_stream, ok, wait};
use cudarc::driver::sys::{
    self, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemAllocationProp_st__bindgen_ty_1, CUmemAllocationType, CUmemLocation, CUmemLocationType, CUmodule,
};
use gin_gpu::Devices;
use gin_gpu::cuda::raw::{raw_function, raw_module};
use gin_gpu::cuda::{CudaDevice, CudaStream};
use gin_gpu::{Device, GpuError, Memory, MemoryKind};
use gin_gpu::{KernelArg, LaunchConfig};
use gin_host::comm::Window;
use gin_host::comm::{CommError, Requirements, WindowFlags};
use gin_host::world::{Rank, WorldConfig, launch};
use gpu_tests_kernels::{pass_len, value};
use std::time::Duration;

/// Deadline of waits in the kernel.
const DEADLINE: gin_abi::Deadline = gin_abi::Deadline::after_ms(6000);

/// Longest wait of the program for its stream. It is longer than the kernel's waits.
const PATIENCE: Duration = Duration::from_secs(8);

/// The kernel.
const KERNEL: &str = "hardware_pass";

/// Number of values that a rank passes on.
const ELEMENTS: u64 = 4096;

/// Bytes of the window that receives values, and of it together with the window that supplies them.
const DATA: u64 = 8 * pass_len(ELEMENTS);
const BYTES: u64 = DATA + 8 * ELEMENTS;

/// Bytes of one mapped chunk of memory.
const CHUNK: u64 = 2 << 20;

/// Bytes before the windows, in memory that is not mapped in chunks.
const BEFORE: u64 = 256;

/// The origin of a program's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// `cuMemAlloc`.
    Alloc,
    /// `cuMemAllocAsync`, from the GPU's own pool, which is opened to the other GPUs.
    Pool,
    /// `cuMemCreate` and `cuMemMap`, in two chunks; the windows span both. Open to all GPUs.
    Map,
    /// As `Map`, but open to its own GPU only.
    MapForOne,
    /// `cuMemHostAlloc`.
    Pinned,
    /// `cuMemHostRegister`, of the program's own pages.
    Registered,
}

/// Memory that the program itself allocated.
#[derive(Clone, Copy, Debug)]
struct Foreign {
    kind: Kind,
    start: u64,
    ordinal: usize,
}

fn pointer<T>(address: u64) -> *mut T {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

fn location(ordinal: usize) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: ordinal as i32 }
}

/// Describes read and write access of these GPUs.
fn access(ordinals: &[usize]) -> Vec<CUmemAccessDesc> {
    let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    ordinals.iter().map(|&ordinal| CUmemAccessDesc { location: location(ordinal), flags }).collect()
}

/// Returns the GPUs among `gpus`, without `owner`, that reach memory of GPU `owner`.
fn neighbours(gpus: &[usize], owner: usize) -> Result<Vec<usize>, GpuError> {
    let mut found = Vec::new();
    for &ordinal in gpus.iter().filter(|ordinal| **ordinal != owner) {
        let mut can = 0;
        // Safety: writes an integer.
        let code = unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, ordinal as i32, owner as i32) };
        ok("check whether GPUs reach each other", code)?;
        if can != 0 {
            found.push(ordinal);
        }
    }
    Ok(found)
}

/// Returns the layout of whole pages, with space before and after the windows.
fn pages() -> std::alloc::Layout {
    const PAGE: usize = 4096;
    std::alloc::Layout::from_size_align((BEFORE + BYTES) as usize + PAGE, PAGE)
        .unwrap_or(std::alloc::Layout::new::<u64>())
}

/// Maps two chunks of a GPU's memory one after the other.
fn map(ordinal: usize, open_to: &[usize]) -> Result<u64, GpuError> {
    let properties = CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: location(ordinal),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    };
    let mut start = 0;
    // Safety: writes an integer.
    ok("reserve", unsafe { sys::cuMemAddressReserve(&raw mut start, 2 * CHUNK as usize, 0, 0, 0) })?;
    for chunk in 0..2 {
        let mut handle = 0;
        // Safety: writes an integer. Maps fresh memory to addresses reserved for it; the mapping keeps the memory.
        unsafe {
            ok("create", sys::cuMemCreate(&raw mut handle, CHUNK as usize, &raw const properties, 0))?;
            ok("map", sys::cuMemMap(start + chunk * CHUNK, CHUNK as usize, 0, handle, 0))?;
            ok("release", sys::cuMemRelease(handle))?;
        }
    }
    let access = access(open_to);
    // Safety: `access` has as many entries as the call is given, and the mappings are whole.
    ok("open", unsafe { sys::cuMemSetAccess(start, 2 * CHUNK as usize, access.as_ptr(), access.len()) })?;
    Ok(start)
}

impl Foreign {
    /// Allocates memory of GPU `ordinal`, whose context is current.
    fn new(kind: Kind, gpus: &[usize], ordinal: usize) -> Result<Self, GpuError> {
        let bytes = (BEFORE + BYTES) as usize;
        let (mut start, mut host) = (0, std::ptr::null_mut());
        // Safety: each call writes one handle or address, and memory is used as it was allocated.
        unsafe {
            match kind {
                Kind::Alloc => ok("allocate", sys::cuMemAlloc_v2(&raw mut start, bytes))?,
                Kind::Pool => {
                    let mut pool = std::ptr::null_mut();
                    ok("find a pool", sys::cuDeviceGetDefaultMemPool(&raw mut pool, ordinal as i32))?;
                    let access = access(&neighbours(gpus, ordinal)?);
                    if !access.is_empty() {
                        ok("open a pool", sys::cuMemPoolSetAccess(pool, access.as_ptr(), access.len()))?;
                    }
                    let stream = new_stream()?;
                    ok("allocate", sys::cuMemAllocAsync(&raw mut start, bytes, stream))?;
                    wait(stream, PATIENCE)?;
                    ok("destroy a stream", sys::cuStreamDestroy_v2(stream))?;
                }
                Kind::Map => {
                    let mut open_to = neighbours(gpus, ordinal)?;
                    open_to.push(ordinal);
                    start = map(ordinal, &open_to)?;
                }
                Kind::MapForOne => start = map(ordinal, &[ordinal])?,
                Kind::Pinned => {
                    ok("allocate pinned memory", sys::cuMemHostAlloc(&raw mut host, bytes, SHARED))?;
                    start = host.expose_provenance() as u64;
                }
                Kind::Registered => {
                    let place = std::alloc::alloc_zeroed(pages());
                    start = place.expose_provenance() as u64;
                    let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
                    ok("register", sys::cuMemHostRegister_v2(place.cast(), pages().size(), flags))?;
                }
            }
        }
        Ok(Self { kind, start, ordinal })
    }

    /// Returns the address of the windows. In memory of two chunks, the second half of the first window is in the
    /// second chunk.
    fn windows(&self) -> u64 {
        match self.kind {
            Kind::Map | Kind::MapForOne => self.start + CHUNK - DATA / 2,
            _ => self.start + BEFORE,
        }
    }

    /// Returns the values that have arrived, as the program itself reads them. No kernel runs.
    fn values(&self) -> Result<Vec<u64>, GpuError> {
        let mut values = vec![0u64; pass_len(ELEMENTS) as usize];
        let (to, bytes) = (values.as_mut_ptr(), DATA as usize);
        // Safety: both sides have `bytes` bytes.
        unsafe {
            if matches!(self.kind, Kind::Pinned | Kind::Registered) {
                std::ptr::copy_nonoverlapping(pointer::<u64>(self.windows()), to, bytes / 8);
            } else {
                ok("read memory", sys::cuMemcpyDtoH_v2(to.cast(), self.windows(), bytes))?;
            }
        }
        Ok(values)
    }

    /// Frees the memory. That succeeds only once, so no other code has freed it.
    fn free(self) -> Result<(), GpuError> {
        let start = self.start;
        enter(self.ordinal)?;
        // Safety: allocated by `new`, freed once; no kernel runs.
        unsafe {
            match self.kind {
                // Includes stream-ordered memory, whose work is complete.
                Kind::Alloc | Kind::Pool => ok("free", sys::cuMemFree_v2(start)),
                Kind::Map | Kind::MapForOne => {
                    ok("unmap", sys::cuMemUnmap(start, 2 * CHUNK as usize))?;
                    ok("free addresses", sys::cuMemAddressFree(start, 2 * CHUNK as usize))
                }
                Kind::Pinned => ok("free pinned memory", sys::cuMemFreeHost(pointer(start))),
                Kind::Registered => {
                    ok("unregister", sys::cuMemHostUnregister(pointer(start)))?;
                    std::alloc::dealloc(pointer(start), pages());
                    Ok(())
                }
            }
        }
    }
}

fn world(devices: &Devices, gpus: &[usize], lsa_size: Option<u32>) -> WorldConfig {
    let mut config = WorldConfig::threads(gpus.len().max(2) as u32);
    config.devices = Some(devices.clone());
    config.collective_timeout = Some(Duration::from_secs(20));
    config.comm.lsa_size = lsa_size;
    config
}

fn no_gpu() -> GpuError {
    GpuError::Driver { context: "find the GPU of a rank", reason: "the rank has none".into() }
}

fn no_text(reason: String) -> GpuError {
    GpuError::Driver { context: "find kernels", reason }
}

/// Describes a wrong value among the values that arrived. Each half must hold the left neighbour's values.
fn wrong_values(rank: &Rank, what: &str, round: u64, seen: &[u64]) -> Option<String> {
    let (me, ranks) = (rank.rank(), rank.ranks());
    let expected = |index: usize| value((me + ranks - 1) % ranks, me, round, index as u64 % ELEMENTS);
    let first = seen.iter().enumerate().find(|(index, seen)| **seen != expected(*index));
    first.map(|(index, seen)| format!("rank {me}, {what}: value {index} is {seen:#x}, not {:#x}", expected(index)))
}

/// A program creates context, stream, module and memory with its own driver calls, with each kind of memory in turn.
/// gin imports them, registers the memory as windows and launches on the stream. The program waits, reads and frees by
/// itself. Runs by loads and stores, and by the network.
///
/// # Errors
/// Returns the failures.
pub fn share(gpus: &[usize], devices: Devices) -> Outcome {
    gin_gpu::cuda::take_failures();
    for lsa_size in [None, Some(1)] {
        let results = launch(world(&devices, gpus, lsa_size), |rank| shared(&rank, gpus));
        let wrong: Vec<String> = results.map_err(|error| error.to_string())?.into_iter().flatten().collect();
        if !wrong.is_empty() {
            return Err(format!("LSA teams of {lsa_size:?}: {}", wrong.join("\n")));
        }
    }
    let mut one = world(&devices, gpus, None);
    one.ranks = 1;
    let wrong = launch(one, |rank| elsewhere(&rank, gpus)).map_err(|error| error.to_string())?.concat();
    if !wrong.is_empty() {
        return Err(wrong.join("\n"));
    }
    match gin_gpu::cuda::take_failures().as_slice() {
        [] => Ok(()),
        failures => Err(format!("freeing failed: {failures:?}")),
    }
}

/// Repeats a launch after the program has made no context, or that of another GPU, the current one: on a stream of gin,
/// and on the default stream, which is that of the current context.
fn elsewhere(rank: &Rank, gpus: &[usize]) -> Result<Vec<String>, CommError> {
    let device = CudaDevice::of(&**rank.device()).ok_or_else(no_gpu)?;
    // The stop word, which is set, and the count of blocks.
    let words = Memory::new(rank.device(), MemoryKind::Device, 16)?;
    words.write(0, &[1u64, 0])?;
    // Safety: the default stream lives as long as its context.
    let default = unsafe { device.stream_from_raw(std::ptr::null_mut())? };
    let (kernel, streams) = (rank.kernel("hardware_spin")?, [rank.stream()?, default]);
    let (stop, started) = (words.address() as usize as *mut u64, (words.address() + 8) as usize as *mut u64);
    let arguments: [&dyn KernelArg; 3] = [&stop, &started, &0u64];
    let others: Vec<_> = gpus.iter().copied().filter(|gpu| *gpu != device.ordinal()).map(Some).chain([None]).collect();
    let mut launches = 0u64;
    for stream in &streams {
        // Safety: two words, which live until the kernels have ended.
        let once = || unsafe { stream.launch(&kernel, LaunchConfig::new(1, 32), &arguments) };
        for &other in &others {
            once()?;
            match other {
                Some(gpu) => {
                    enter(gpu)?;
                }
                // Safety: takes no pointer.
                None => ok("leave a context", unsafe { sys::cuCtxSetCurrent(std::ptr::null_mut()) })?,
            }
            once()?;
            launches += 2;
        }
        stream.synchronize()?;
    }
    let mut count = [0u64];
    words.read(8, &mut count)?;
    Ok(if count == [launches] { Vec::new() } else { vec![format!("{} of {launches} kernels ran", count[0])] })
}

fn shared(rank: &Rank, gpus: &[usize]) -> Result<Vec<String>, CommError> {
    let device = CudaDevice::of(&**rank.device()).ok_or_else(no_gpu)?;
    let ordinal = device.ordinal();
    let mut wrong = Vec::new();
    // The program's own handles.
    let context = enter(ordinal)?;
    let (module, _) = load(hardware_text(ordinal).map_err(no_text)?, KERNEL)?;
    let stream = new_stream()?;
    // Handles shared with gin.
    //
    // Safety: both handles live until the end of this function, when gin no longer uses them.
    let (kernels, queue) = unsafe { (device.module_from_raw(module.cast())?, device.stream_from_raw(stream.cast())?) };
    let kernel = kernels.function(KERNEL)?;
    // gin returns the handles that it was given; a function may have several handles.
    let mut home = std::ptr::null_mut();
    if let Some(function) = raw_function(&kernel) {
        // Safety: writes a pointer; the function's module is loaded.
        ok("find a function's module", unsafe { sys::cuFuncGetModule(&raw mut home, function.cast()) })?;
    }
    for (what, seen, expected) in [
        ("context", Some(device.raw_context()), context.cast()),
        ("stream", CudaStream::of(&*queue).map(CudaStream::raw), stream.cast()),
        ("the function's module", Some(home.cast()), module.cast()),
        ("module", raw_module(&kernel), module.cast()),
    ] {
        if seen != Some(expected) {
            wrong.push(format!("{what}: expected {expected:?}, got {seen:?}"));
        }
    }
    let (mut least, mut greatest) = (0, 0);
    // Safety: writes two integers.
    ok("ask for priorities", unsafe { sys::cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest) })?;
    for (asked, expected) in [(0, 0), (i32::MAX, least), (greatest, greatest), (i32::MIN, greatest)] {
        let made = device.stream_with_priority(asked)?;
        let raw = CudaStream::of(&*made).map_or(std::ptr::null_mut(), CudaStream::raw);
        let mut seen = i32::MAX;
        // Safety: writes an integer; the stream is alive.
        ok("ask for a priority", unsafe { sys::cuStreamGetPriority(raw.cast(), &raw mut seen) })?;
        if seen != expected {
            wrong.push(format!("a stream of priority {asked}: the driver says {seen}, not {expected}"));
        }
    }
    let comm = rank.communicator(&Requirements::default().signals(1))?;
    let kinds = [Kind::Alloc, Kind::Pool, Kind::Map, Kind::Pinned, Kind::Registered];
    for (kind, round) in kinds.into_iter().zip(1u64..) {
        let foreign = Foreign::new(kind, gpus, ordinal)?;
        // Safety: freed below, when windows and memory are released on all ranks; only kernels use it until then.
        let memory = unsafe { device.import_memory(foreign.windows(), BYTES)? };
        let data: Window<u64> = comm.register(&memory.slice(0..DATA)?, WindowFlags::NONE)?;
        let source: Window<u64> = comm.register(&memory.slice(DATA..BYTES)?, WindowFlags::NONE)?;
        rank.barrier()?;
        let arguments: [&dyn KernelArg; 6] = [&comm.device()?, &data, &source, &ELEMENTS, &round, &DEADLINE];
        // Safety: windows and numbers are as the kernel requires, and live until it has ended on all ranks.
        unsafe { queue.launch(&kernel, LaunchConfig::new(1, 256).cooperative(), &arguments)? };
        enter(ordinal)?;
        wait(stream, PATIENCE)?;
        rank.barrier()?;
        let seen = foreign.values()?;
        wrong.extend(wrong_values(rank, &format!("{kind:?}"), round, &seen));
        if data.read_all()? != seen {
            wrong.push(format!("rank {}, {kind:?}: gin reads other values than the program", rank.rank()));
        }
        if let Some(notice) = comm.fault() {
            wrong.push(format!("{kind:?}: fault of rank {}: {}", notice.rank, notice.fault));
        }
        if data.stride().is_some() {
            wrong.push(format!("{kind:?}: the program's memory has a stride"));
        }
        rank.barrier()?;
        comm.deregister(&data)?;
        comm.deregister(&source)?;
        drop((data, source, memory));
        // Now every rank has released the memory.
        rank.barrier()?;
        foreign.free()?;
    }
    comm.destroy()?;
    drop((kernel, kernels, queue));
    rank.barrier()?;
    enter(ordinal)?;
    // Safety: created above, destroyed once; nothing runs.
    unsafe {
        ok("destroy a stream", sys::cuStreamDestroy_v2(stream))?;
        ok("unload a module", sys::cuModuleUnload(module))?;
    }
    Ok(wrong)
}

/// Calls that were not refused, or for another reason than expected.
struct Refusals(Vec<String>);

impl Refusals {
    fn expect<T>(&mut self, what: &str, outcome: Result<T, GpuError>, words: &[&str]) {
        match outcome {
            Ok(_) => self.0.push(format!("{what}: not refused")),
            Err(error) => {
                let text = error.to_string();
                if words.iter().all(|word| !text.contains(word)) {
                    self.0.push(format!("{what}: expected one of {words:?} in: {text}"));
                }
            }
        }
    }
}

/// A module without `gin-device`.
const STRANGER: &str = ".version 7.8\n.target sm_80\n.address_size 64\n.visible .entry stranger() { ret; }\n";

/// Checks that gin refuses memory, streams and modules that it cannot use.
///
/// # Errors
/// Returns the calls that were not refused, or for another reason.
pub fn refused(gpus: &[usize], _devices: Devices) -> Outcome {
    match refusals(gpus) {
        Ok(wrong) if wrong.is_empty() => Ok(()),
        Ok(wrong) => Err(wrong.join("\n")),
        Err(error) => Err(error.to_string()),
    }
}

fn refusals(gpus: &[usize]) -> Result<Vec<String>, GpuError> {
    let ordinal = gpus[0];
    let device = CudaDevice::new(ordinal, &[])?;
    enter(ordinal)?;
    let mut refusals = Refusals(Vec::new());
    // Safety: refused memory is not used; accepted memory is dropped at once.
    let import = |address, bytes| unsafe { device.import_memory(address, bytes) };
    let past = ["not all in one allocation", "one kind of memory", "does not know", "cuMem"];

    refusals.expect("nothing", import(0, 8), &["no bytes"]);
    let own = vec![0u64; 512];
    refusals.expect("memory of the heap", import(own.as_ptr().addr() as u64, 4096), &["pinned"]);
    for kind in [Kind::Alloc, Kind::Pinned] {
        let memory = Foreign::new(kind, gpus, ordinal)?;
        let name = |what: &str| format!("{what} of {kind:?}");
        refusals.expect(&name("no bytes"), import(memory.start, 0), &["no bytes"]);
        refusals.expect(&name("too many bytes"), import(memory.start, 1 << 40), &past);
        refusals.expect(&name("bytes up to the last address"), import(memory.start, u64::MAX), &["last address"]);
        match import(memory.start, BEFORE + BYTES) {
            Ok(whole) if whole.address() == memory.start && whole.bytes() == BEFORE + BYTES => {}
            other => refusals.0.push(format!("all bytes of {kind:?}: {other:?}")),
        }
        enter(ordinal)?;
        memory.free()?;
    }
    // The page after the second chunk is not part of its reservation.
    let mapped = Foreign::new(Kind::Map, gpus, ordinal)?;
    refusals.expect("bytes past what is mapped", import(mapped.start, 2 * CHUNK + 1), &past);
    enter(ordinal)?;
    mapped.free()?;

    let mut managed = 0;
    let global = sys::CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL as u32;
    // Safety: writes an integer.
    ok("allocate managed memory", unsafe { sys::cuMemAllocManaged(&raw mut managed, BYTES as usize, global) })?;
    refusals.expect("managed memory", import(managed, BYTES), &["managed"]);
    // Safety: allocated above.
    ok("free managed memory", unsafe { sys::cuMemFree_v2(managed) })?;

    // Safety: the call is refused.
    let stream = unsafe { device.stream_from_raw(std::ptr::without_provenance_mut(2)) };
    refusals.expect("the default stream of a thread", stream, &["default stream"]);
    // Safety: the call is refused.
    refusals.expect("no module", unsafe { device.module_from_raw(std::ptr::null_mut()) }, &["there is none"]);
    let (stranger, _): (CUmodule, _) = load(STRANGER, "stranger")?;
    // Safety: the module is loaded.
    let outcome = unsafe { device.module_from_raw(stranger.cast()) };
    refusals.expect("a module without gin-device", outcome, &["gin_abi_version"]);
    // Safety: loaded above, unloaded once: the refused call has not unloaded it.
    ok("unload a module", unsafe { sys::cuModuleUnload(stranger) })?;

    if let Some(&other) = gpus.get(1) {
        enter(other)?;
        let remote = Foreign::new(Kind::Alloc, gpus, other)?;
        let stream = new_stream()?;
        refusals.expect("memory of another GPU", import(remote.start, BYTES), &[&format!("in GPU {other}")]);
        // Safety: the stream is alive.
        refusals.expect("a stream of another GPU", unsafe { device.stream_from_raw(stream.cast()) }, &["context"]);
        enter(other)?;
        // Safety: created above, destroyed once.
        ok("destroy a stream", unsafe { sys::cuStreamDestroy_v2(stream) })?;
        remote.free()?;
    }
    Ok(refusals.0)
}

/// Memory that is mapped for its own GPU only cannot be a window of an LSA team of several GPUs, but can be a window if
/// teams are single ranks.
///
/// # Errors
/// Returns the failures.
pub fn unreached(gpus: &[usize], devices: Devices) -> Outcome {
    for (lsa_size, refused) in [(None, gpus.len() > 1), (Some(1), false)] {
        let results = launch(world(&devices, gpus, lsa_size), |rank| -> Result<Vec<String>, CommError> {
            let device = CudaDevice::of(&**rank.device()).ok_or_else(no_gpu)?;
            let comm = rank.communicator(&Requirements::default())?;
            enter(device.ordinal())?;
            let foreign = Foreign::new(Kind::MapForOne, gpus, device.ordinal())?;
            // Safety: freed below, when windows and memory are released on all ranks.
            let memory = unsafe { device.import_memory(foreign.windows(), BYTES)? };
            let outcome = comm.register::<u64>(&memory.whole(), WindowFlags::NONE);
            let text = outcome.as_ref().err().map(ToString::to_string);
            let mut wrong = Vec::new();
            match &text {
                Some(text) if !refused || !text.contains("Access") => {
                    wrong.push(format!("rank {}: {text}", rank.rank()));
                }
                None if refused => wrong.push(format!("rank {}: the window was not refused", rank.rank())),
                _ => {}
            }
            // The communicator is still usable.
            let window = comm.alloc_window::<u64>(8, WindowFlags::NONE)?;
            comm.deregister(&window)?;
            drop(window);
            comm.destroy()?;
            drop((outcome, memory, comm));
            rank.barrier()?;
            foreign.free()?;
            Ok(wrong)
        });
        let wrong: Vec<String> = results.map_err(|error| error.to_string())?.into_iter().flatten().collect();
        if !wrong.is_empty() {
            return Err(format!("LSA teams of {lsa_size:?}: {}", wrong.join("\n")));
        }
    }
    Ok(())
}

/// Launches on a stream that the program captures. The kernel runs when the graph is launched, and not before.
///
/// # Errors
/// Returns the failures.
pub fn captured(gpus: &[usize], devices: Devices) -> Outcome {
    let results = launch(world(&devices, gpus, None), |rank| captured_on(&rank));
    let wrong: Vec<String> = results.map_err(|error| error.to_string())?.into_iter().flatten().collect();
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
}

fn captured_on(rank: &Rank) -> Result<Vec<String>, CommError> {
    let device = CudaDevice::of(&**rank.device()).ok_or_else(no_gpu)?;
    let mut wrong = Vec::new();
    let kernel = rank.kernel(KERNEL)?;
    let comm = rank.communicator(&Requirements::default().signals(1))?;
    let data: Window<u64> = comm.alloc_window(pass_len(ELEMENTS) as usize, WindowFlags::NONE)?;
    let source: Window<u64> = comm.alloc_window(ELEMENTS as usize, WindowFlags::NONE)?;
    enter(device.ordinal())?;
    let stream = new_stream()?;
    // Safety: the stream is destroyed below, when gin no longer uses it.
    let queue = unsafe { device.stream_from_raw(stream.cast())? };
    let arguments: [&dyn KernelArg; 6] = [&comm.device()?, &data, &source, &ELEMENTS, &1u64, &DEADLINE];
    let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
    // Safety: the handles were just created. Windows and numbers are as the kernel requires, and outlive it.
    unsafe {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        ok("begin a capture", sys::cuStreamBeginCapture_v2(stream, mode))?;
        let launched = queue.launch(&kernel, LaunchConfig::new(1, 256).cooperative(), &arguments);
        ok("end a capture", sys::cuStreamEndCapture(stream, &raw mut graph))?;
        launched?;
        let mut nodes = 0;
        ok("count nodes", sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &raw mut nodes))?;
        if nodes != 1 {
            wrong.push(format!("rank {}: the graph has {nodes} nodes, expected only the kernel", rank.rank()));
        }
        ok("create a graph", sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0))?;
        ok("upload a graph", sys::cuGraphUpload(executable, stream))?;
    }
    wait(stream, PATIENCE)?;
    if device.running() != 0 {
        wrong.push(format!("rank {}: {} kernels run before the graph is launched", rank.rank(), device.running()));
    }
    if data.read_all()?.iter().any(|value| *value != 0) {
        wrong.push(format!("rank {}: values arrived before the graph was launched", rank.rank()));
    }
    rank.barrier()?;
    // Safety: the graph is complete, and the memory that its kernel uses is alive.
    ok("launch a graph", unsafe { sys::cuGraphLaunch(executable, stream) })?;
    wait(stream, PATIENCE)?;
    rank.barrier()?;
    wrong.extend(wrong_values(rank, "graph", 1, &data.read_all()?));
    if let Some(notice) = comm.fault() {
        wrong.push(format!("fault of rank {}: {}", notice.rank, notice.fault));
    }
    rank.barrier()?;
    comm.destroy()?;
    drop(queue);
    rank.barrier()?;
    enter(device.ordinal())?;
    // Safety: created above, destroyed once; nothing runs on any rank.
    unsafe {
        ok("destroy a graph", sys::cuGraphExecDestroy(executable))?;
        ok("destroy a graph", sys::cuGraphDestroy(graph))?;
        ok("destroy a stream", sys::cuStreamDestroy_v2(stream))?;
    }
    Ok(wrong)
}

/// Launches in clusters: all blocks run, and a cooperative launch of one cluster more than fits is refused.
///
/// # Errors
/// Returns the failures.
pub fn clusters(gpus: &[usize], devices: Devices) -> Outcome {
    const CLUSTER: u32 = 4;
    let mut config = world(&devices, gpus, None);
    config.ranks = 1;
    let results = launch(config, |rank| -> Result<Vec<String>, CommError> {
        let device = CudaDevice::of(&**rank.device()).ok_or_else(no_gpu)?;
        let mut wrong = Vec::new();
        if device.limits().cluster_blocks < CLUSTER {
            // Clusters need sm_90: older GPUs have nothing to test.
            return Ok(wrong);
        }
        // The stop word, which is set, and the count of blocks.
        let words = Memory::new(rank.device(), MemoryKind::Device, 16)?;
        words.write(0, &[1u64, 0])?;
        let (kernel, stream) = (rank.kernel("hardware_spin")?, rank.stream()?);
        let (stop, started) = (words.address() as usize as *mut u64, (words.address() + 8) as usize as *mut u64);
        let arguments: [&dyn KernelArg; 3] = [&stop, &started, &0u64];
        let shape = |blocks| LaunchConfig::new(blocks, 32).cluster(CLUSTER).cooperative();
        let resident = device.resident_blocks(&kernel, &shape(CLUSTER))?;
        if resident == 0 || !resident.is_multiple_of(u64::from(CLUSTER)) {
            wrong.push(format!("gin reports that {resident} blocks in clusters of {CLUSTER} fit"));
        }
        let max = u32::try_from(resident).unwrap_or(u32::MAX - CLUSTER);
        for blocks in [2 * CLUSTER, max] {
            words.write(8, &[0u64])?;
            // Safety: two words, which live until the kernel has ended.
            unsafe { stream.launch(&kernel, shape(blocks), &arguments)? };
            stream.synchronize()?;
            let mut count = [0u64];
            words.read(8, &mut count)?;
            if count != [u64::from(blocks)] {
                wrong.push(format!("{} of {blocks} blocks ran", count[0]));
            }
        }
        // Safety: as above; the launch is refused.
        match unsafe { stream.launch(&kernel, shape(max + CLUSTER), &arguments) } {
            Err(GpuError::NotResident { .. }) => {}
            other => {
                wrong.push(format!("one cluster more than the {resident} blocks that fit was not refused: {other:?}"))
            }
        }
        Ok(wrong)
    });
    let wrong: Vec<String> = results.map_err(|error| error.to_string())?.into_iter().flatten().collect();
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
}
