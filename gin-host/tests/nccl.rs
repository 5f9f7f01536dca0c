// SPDX-License-Identifier: MIT OR Apache-2.0
//! Jobs and windows from communicators of NCCL, on virtual GPUs: [`nccl_stand_in`] takes NCCL's place, and ranks are
//! threads. `gpu-tests` has NCCL itself.

use gin_abi::Deadline;
use gin_device::prelude::*;
use gin_gpu::virt::VirtualDevice;
use gin_gpu::{Device, LaunchConfig};
use gin_host::boot::{TcpBootstrap, TcpConfig};
use gin_host::comm::{CommError, Requirements, WindowFlags};
use gin_host::launch::{Rank, WorldConfig, join};
use gin_host::nccl::{NcclComm, NcclError};
use gin_testkit::nccl_stand_in;
use libloading::Library;
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

const RANKS: u32 = 2;
const WORDS: usize = 100;
const LONG: Duration = Duration::from_secs(60);

/// Puts the first word of its part into the right neighbour's second word, and waits for the left neighbour's.
///
/// # Safety
/// - The window has two words on each rank.
#[kernel]
pub unsafe fn nccl_test_pass(comm: Comm, words: gin_device::Window<u64>, deadline: Deadline) {
    let gin = Gin::new(&comm, ContextId::new(0)).route(Route::Lsa);
    let put = gin.put(comm.world().right(), words.range(1, 1), words.range(0, 1));
    let sent = put.signal(SignalId::new(0).inc()).issue(&Thread);
    if let Err(fault) = sent.and_then(|()| gin.wait_signal(&Thread, SignalId::new(0), 1, deadline)) {
        comm.report(fault);
    }
}

/// The library and a job of ranks in it.
struct StandIn {
    library: Library,
    path: PathBuf,
    job: *mut c_void,
}

// Safety: the library locks what its threads share.
unsafe impl Sync for StandIn {}

impl StandIn {
    fn new(version: u32) -> Result<Self, String> {
        let path = nccl_stand_in(Path::new(env!("CARGO_TARGET_TMPDIR")), version)?;
        // Safety: the library has no initialisers.
        let library = unsafe { Library::new(&path) }.map_err(|error| error.to_string())?;
        let mut made = Self { library, path, job: ptr::null_mut() };
        made.job = made.call("stand_in_job", RANKS as usize as *mut c_void, 0);
        Ok(made)
    }

    fn call(&self, name: &str, first: *mut c_void, second: u32) -> *mut c_void {
        type Function = unsafe extern "C" fn(*mut c_void, u32) -> *mut c_void;
        // Safety: the functions of the stand-in take a pointer, or a number in its place, and an optional number.
        unsafe { self.library.get::<Function>(name).expect("the stand-in has it")(first, second) }
    }

    fn comm(&self, rank: u32) -> Result<NcclComm, NcclError> {
        let comm = self.call("stand_in_comm", self.job, rank);
        // Safety: a communicator of the library, which frees none.
        unsafe { NcclComm::with_library(comm, &self.path.to_string_lossy()) }
    }
}

fn ensure(holds: bool, why: impl FnOnce() -> String) -> Result<(), Failed> {
    if holds { Ok(()) } else { Err(why().into()) }
}

fn config() -> TcpConfig {
    TcpConfig::default().address(Some([127, 0, 0, 1].into())).joining(LONG).collective_timeout(Some(LONG))
}

fn device() -> Arc<dyn Device> {
    VirtualDevice::memory_only(0)
}

/// Runs `body` on a thread for each rank; returns the results by rank.
fn each<T: Send>(body: impl Fn(u32) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let body = &body;
        let ranks: Vec<_> = (0..RANKS).map(|rank| scope.spawn(move || body(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("the rank does not panic")).collect()
    })
}

fn on_rank(rank: &Rank, nccl: &NcclComm, window: *mut c_void, words: &[u64]) -> Result<(), CommError> {
    let comm = rank.communicator(&Requirements::default())?;
    // Safety: the window has these words, which stay until the ranks have ended.
    let memory = unsafe { nccl.window_memory(window, size_of_val(words) as u64, rank.device()) };
    let memory = memory.expect("the window has memory");
    assert_eq!(memory.address(), words.as_ptr().expose_provenance() as u64, "the memory is NCCL's");
    let window = comm.register::<u64>(&memory, WindowFlags::NONE)?;
    let stream = rank.stream()?;
    let deadline = Deadline::after_ms(30_000);
    // Safety: the window has the words, and lives until the kernel has ended.
    unsafe { nccl_test_pass::launch(&*stream, LaunchConfig::new(1, 1), &comm.device()?, &window, deadline) }?;
    stream.synchronize()?;
    comm.check("go on")?;
    let left = (comm.rank() + RANKS - 1) % RANKS;
    assert_eq!(window.read_all()?[..2], [1000 + u64::from(comm.rank()), 1000 + u64::from(left)]);
    comm.destroy()
}

fn puts() -> Result<(), Failed> {
    let stand_in = StandIn::new(23007)?;
    let outcomes = each(|number| -> Result<(), String> {
        let nccl = stand_in.comm(number).map_err(|error| error.to_string())?;
        assert_eq!((nccl.rank(), nccl.ranks()), (number, RANKS));
        let job: TcpBootstrap = nccl.join(&device(), config()).map_err(|error| error.to_string())?;
        let mut words = vec![1000 + u64::from(number); WORDS];
        let window = stand_in.call("stand_in_window", words.as_mut_ptr().cast(), 0);
        let window = window.expose_provenance();
        let ran = join(WorldConfig::threads(RANKS), Arc::new(job), |rank| {
            on_rank(&rank, &nccl, ptr::with_exposed_provenance_mut(window), &words)
        });
        ran.map_err(|error| error.to_string())
    });
    ensure(outcomes.iter().all(Result::is_ok), || format!("{outcomes:?}"))
}

fn versions() -> Result<(), Failed> {
    // Safety: it is refused.
    let absent = unsafe { NcclComm::with_library(ptr::null_mut(), "libnccl-of-nobody.so") };
    let text = absent.err().map(|error| error.to_string()).unwrap_or_default();
    ensure(text.starts_with("libnccl-of-nobody.so cannot be opened ("), || text.clone())?;
    ensure(text.ends_with("install NCCL 2.29 or later (PyPI: nvidia-nccl-cu13)"), || text.clone())?;
    let old = StandIn::new(22809)?;
    let text = old.comm(0).err().map(|error| error.to_string()).unwrap_or_default();
    ensure(text.contains(" is NCCL 2.28.9; gin needs 2.29 or later"), || text.clone())?;
    let text = StandIn::new(2708)?.comm(0).err().map(|error| error.to_string()).unwrap_or_default();
    ensure(text.contains(" is NCCL 2.7.8; "), || text.clone())?;
    ensure(StandIn::new(22900)?.comm(0).is_ok(), || "2.29.0 is refused".to_owned())?;
    // Safety: as above.
    let null = unsafe { NcclComm::with_library(ptr::null_mut(), &StandIn::new(23007)?.path.to_string_lossy()) };
    ensure(matches!(null, Err(NcclError::Null)), || format!("{null:?}"))
}

fn failures() -> Result<(), Failed> {
    // Rank 0 does not take part.
    let alone = StandIn::new(23007)?;
    let begin = Instant::now();
    let error = alone.comm(1)?.join(&device(), config().joining(Duration::from_millis(200))).err();
    ensure(matches!(error, Some(NcclError::Silent { .. })), || format!("{error:?}"))?;
    ensure(begin.elapsed() < LONG, || format!("it took {:?}", begin.elapsed()))?;
    // Rank 0 is lost.
    alone.call("stand_in_fail", alone.job, 0);
    let text = alone.comm(1)?.join(&device(), config()).err().map(|error| error.to_string()).unwrap_or_default();
    ensure(
        text.starts_with("ncclBroadcast failed: remote process exited") && text.ends_with("rank 0 is gone"),
        || text.clone(),
    )?;
    // Rank 0 cannot listen: no machine has this address.
    let deaf = StandIn::new(23007)?;
    let errors = each(|rank| {
        let address = if rank == 0 { [192, 0, 2, 1] } else { [127, 0, 0, 1] };
        let comm = deaf.comm(rank).expect("the stand-in makes it");
        comm.join(&device(), config().address(Some(address.into()))).err()
    });
    ensure(matches!(errors[..], [Some(NcclError::Bootstrap(_)), Some(NcclError::NoId)]), || format!("{errors:?}"))?;
    // Safety: it is refused.
    let window = unsafe { deaf.comm(0)?.window_memory(ptr::null_mut(), 8, &device()) };
    let text = window.err().map(|error| error.to_string()).unwrap_or_default();
    ensure(text.starts_with("ncclWinGetUserPtr failed: ") && text.contains("the window is null"), || text.clone())
}

type Body = fn() -> Result<(), Failed>;

const TRIALS: [(&str, Body); 3] = [
    ("ranks_of_nccl_meet_and_put_by_loads_and_stores_into_its_windows", puts),
    ("an_absent_or_old_library_and_a_null_communicator_are_refused_with_the_cure", versions),
    ("a_rank_that_is_missing_lost_or_deaf_is_an_error_in_time", failures),
];

fn main() -> ExitCode {
    let has_compiler = nccl_stand_in(Path::new(env!("CARGO_TARGET_TMPDIR")), 23007);
    let trial = |(name, body): (&'static str, Body)| {
        let reason = has_compiler.as_ref().err().cloned();
        Trial::ignorable_test(name, move || match reason {
            Some(reason) => Ok(Completion::ignored_with(reason)),
            None => body().map(|()| Completion::Completed),
        })
    };
    libtest_mimic::run(&Arguments::from_args(), TRIALS.into_iter().map(trial).collect()).exit_code()
}
