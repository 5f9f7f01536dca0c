// SPDX-License-Identifier: MIT OR Apache-2.0
//! A trial of gin in a job of NCCL, with a rank for each GPU.

use crate::journal::Outcome;
use crate::raw::enter;
use gin_boot::TcpConfig;
use gin_gpu::cuda::CudaStream;
use gin_gpu::{Devices, KernelArg, LaunchConfig};
use gin_host::comm::{Requirements, WindowFlags};
use gin_host::nccl::{NcclComm, NcclError};
use gin_host::world::{Rank, WorldConfig, join};
use gpu_tests_kernels::{pass_len, value};
use libloading::Library;
use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

/// NCCL's library.
const LIBRARY: &str = "libnccl.so.2";
/// `ncclDataType_t`, `ncclRedOp_t`: sums of 64-bit numbers.
const UINT64: c_int = 5;
const SUM: c_int = 0;
/// The values that a rank passes on, and the bytes of both windows.
const ELEMENTS: u64 = 4096;
const DATA: u64 = 8 * pass_len(ELEMENTS);
const BYTES: u64 = DATA + 8 * ELEMENTS;
const ROUNDS: u64 = 5;
const DEADLINE: gin_abi::Deadline = gin_abi::Deadline::after_ms(6000);
const PATIENCE: Duration = Duration::from_secs(20);

/// The functions of NCCL that the program calls. The library stays open: its threads run on after an error.
struct Nccl(ManuallyDrop<Library>);

impl Nccl {
    /// Calls a function with a pointer and up to five numbers or pointers.
    fn call<const N: usize>(&self, name: &str, arguments: [usize; N]) -> Result<(), String> {
        let at = |index: usize| arguments.get(index).copied().unwrap_or(0);
        type Function = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize, usize) -> c_int;
        // Safety: the functions take integers and pointers, each in a register or a place of 8 bytes; further ones are
        // ignored. The callers pass what nccl.h declares.
        let result = unsafe {
            let function = self.0.get::<Function>(name).map_err(|error| format!("{name}: {error}"))?;
            function(at(0), at(1), at(2), at(3), at(4), at(5), at(6))
        };
        if result == 0 { Ok(()) } else { Err(format!("{name} returned {result}")) }
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Opens NCCL, or returns the reason why there is none.
fn open() -> Result<Nccl, String> {
    // Safety: NCCL's initialisers do nothing that the program does.
    let library = unsafe { Library::new(LIBRARY) }.map_err(|error| format!("{LIBRARY}: {error}"))?;
    Ok(Nccl(ManuallyDrop::new(library)))
}

/// Returns whether the trial can run; the error says why not.
///
/// # Errors
/// gin cannot use the library: it is absent or too old.
pub fn find() -> Result<(), String> {
    // gin looks at the library before the communicator.
    // Safety: it refuses the null one.
    match unsafe { NcclComm::new(ptr::null_mut()) } {
        Err(NcclError::Null) => Ok(()),
        other => other.map(drop).map_err(text),
    }
}

/// Checks that ranks of `ncclCommInitAll` become ranks of gin, and that memory of `ncclMemAlloc` in a window of NCCL
/// becomes a window of gin whose kernels and NCCL's all-reduce take turns.
///
/// # Errors
/// Returns the failures.
pub fn meets(gpus: &[usize], devices: Devices) -> Outcome {
    let nccl = open()?;
    let mut comms = vec![0usize; gpus.len()];
    let list: Vec<c_int> = gpus.iter().map(|gpu| *gpu as c_int).collect();
    nccl.call(
        "ncclCommInitAll",
        [comms.as_mut_ptr().expose_provenance(), list.len(), list.as_ptr().expose_provenance()],
    )?;
    let outcomes: Vec<Outcome> = std::thread::scope(|scope| {
        let (nccl, devices, comms) = (&nccl, &devices, &comms);
        let ranks: Vec<_> =
            (0..gpus.len()).map(|rank| scope.spawn(move || rank_of(nccl, devices, gpus, rank, comms[rank]))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|_| Err("a rank panicked".to_owned()))).collect()
    });
    // Also after a failure: the trials that follow use the GPUs.
    let end = if outcomes.iter().all(Result::is_ok) { "ncclCommDestroy" } else { "ncclCommAbort" };
    let ended = comms.into_iter().try_for_each(|comm| nccl.call(end, [comm]));
    outcomes.into_iter().collect::<Outcome>()?;
    ended
}

fn rank_of(nccl: &Nccl, devices: &Devices, gpus: &[usize], rank: usize, raw: usize) -> Outcome {
    enter(gpus[rank]).map_err(text)?;
    let device = devices.device(rank as u32, gpus.len() as u32).map_err(text)?;
    // Safety: the communicator lives until all ranks have ended.
    let comm = unsafe { NcclComm::new(ptr::with_exposed_provenance_mut(raw)) }.map_err(text)?;
    let config = TcpConfig::default().address(Some([127, 0, 0, 1].into())).joining(PATIENCE);
    let job = comm.join(&device, config.collective_timeout(Some(PATIENCE))).map_err(text)?;
    let (mut memory, mut window) = (0usize, 0usize);
    nccl.call("ncclMemAlloc", [(&raw mut memory).expose_provenance(), BYTES as usize])?;
    nccl.call("ncclCommWindowRegister", [raw, memory, BYTES as usize, (&raw mut window).expose_provenance(), 0])?;
    let mut world = WorldConfig::threads(gpus.len() as u32);
    world.devices = Some(devices.clone());
    let ran = join(world, Arc::new(job), |rank| on_rank(nccl, &rank, &comm, (raw, window)));
    ran.map_err(text)?;
    nccl.call("ncclCommWindowDeregister", [raw, window])?;
    nccl.call("ncclMemFree", [memory])
}

fn on_rank(nccl: &Nccl, rank: &Rank, comm: &NcclComm, (raw, window): (usize, usize)) -> Result<(), String> {
    let gin = rank.communicator(&Requirements::default()).map_err(text)?;
    let window: *mut c_void = ptr::with_exposed_provenance_mut(window);
    // Safety: the window has these bytes, and stays until the communicator is destroyed.
    let whole = unsafe { comm.window_memory(window, BYTES, rank.device()) }.map_err(text)?;
    let (first, end) = (whole.offset(), whole.offset() + BYTES);
    let part = |from, to| whole.memory().slice(from..to).map_err(text);
    let register = |part| gin.register::<u64>(&part, WindowFlags::NONE).map_err(text);
    let (data, source) = (register(part(first, first + DATA)?)?, register(part(first + DATA, end)?)?);
    let stream = rank.stream().map_err(text)?;
    let queue = CudaStream::of(&*stream).ok_or("the stream is not a GPU's")?.raw().expose_provenance();
    let kernel = rank.kernel("hardware_pass").map_err(text)?;
    let handle = gin.device().map_err(text)?;
    let (me, ranks) = (rank.rank(), rank.ranks());
    let passed = |from: u32, round, index| value(from, (from + 1) % ranks, round, index);
    for round in 1..=ROUNDS {
        let arguments: [&dyn KernelArg; 6] = [&handle, &data, &source, &ELEMENTS, &round, &DEADLINE];
        // Safety: as the kernel says; the windows live until the stream is done.
        let launched = unsafe { stream.launch(&kernel, LaunchConfig::new(1, 256), &arguments) };
        launched.map_err(text)?;
        stream.synchronize().map_err(text)?;
        // Neighbours still read `source`, which the all-reduce changes.
        rank.barrier().map_err(text)?;
        gin.check("go on").map_err(text)?;
        let seen = data.read_all().map_err(text)?;
        let wrong =
            (0..).zip(&seen).find(|(at, seen)| **seen != passed((me + ranks - 1) % ranks, round, at % ELEMENTS));
        if let Some((at, seen)) = wrong {
            return Err(format!("rank {me}, round {round}: value {at} of {} is {seen:#x}", data.len()));
        }
        let address = (source.memory().address()) as usize;
        nccl.call("ncclAllReduce", [address, address, ELEMENTS as usize, UINT64 as usize, SUM as usize, raw, queue])?;
        stream.synchronize().map_err(text)?;
        let sums = source.read_all().map_err(text)?;
        let sum = |at| (0..ranks).fold(0u64, |sum, from| sum.wrapping_add(passed(from, round, at)));
        if let Some((at, seen)) = (0..).zip(&sums).find(|(at, seen)| **seen != sum(*at)) {
            return Err(format!("rank {me}, round {round}: sum {at} is {seen:#x}, not {:#x}", sum(at)));
        }
    }
    gin.destroy().map_err(text)
}
