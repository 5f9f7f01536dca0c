// SPDX-License-Identifier: MIT OR Apache-2.0
//! Communicators without progress threads, whose program carries out the requests of kernels.

use gin_abi::{BackendKind, Deadline, FaultKind};
use gin_device::prelude::*;
use gin_gpu::{LaunchConfig, Stream};
use gin_host::comm::{CommError, CommState, Communicator, Requirements, Window, WindowFlags};
use gin_host::proxy::progress::ManualProgress;
use gin_host::world::{Rank, SoftNics, WorldConfig, launch};
use gin_soft_nic::Options;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Sends a value to the right neighbour by the proxy, and waits for the one of the left neighbour.
///
/// # Safety
/// - One thread of each rank, in the same rounds from 1 on.
#[kernel]
pub unsafe fn caller_test_pass(comm: Comm, words: gin_device::Window<u64>, round: u64, deadline: Deadline) {
    let gin = Gin::new(&comm, ContextId::new(0)).route(Route::Network);
    let value = 100 * round + u64::from(comm.world().rank());
    let put = gin.put_value(comm.world().right(), words.at(round as usize), value).signal(SignalId::new(0).inc());
    let outcome = put.issue(&Thread).and_then(|()| gin.wait_signal(&Thread, SignalId::new(0), round, deadline));
    if let Err(fault) = outcome {
        comm.report(fault);
    }
}

/// As [`caller_test_pass`], by the route and back end that the communicator has.
///
/// # Safety
/// - As there.
#[kernel]
pub unsafe fn caller_test_pass_near(comm: Comm, words: gin_device::Window<u64>, deadline: Deadline) {
    let gin = Gin::new(&comm, ContextId::new(0));
    let put = gin.put_value(comm.world().right(), words.at(0), 7 + u64::from(comm.world().rank()));
    let outcome = put.signal(SignalId::new(0).inc()).issue(&Thread);
    if let Err(fault) = outcome.and_then(|()| gin.wait_signal(&Thread, SignalId::new(0), 1, deadline)) {
        comm.report(fault);
    }
}

const LONG: Deadline = Deadline::after_ms(30_000);

/// A rank without progress threads.
struct Caller {
    rank: Rank,
    comm: Communicator,
    window: Window<u64>,
    stream: Arc<dyn Stream>,
}

impl Caller {
    fn new(rank: Rank) -> Result<Self, CommError> {
        let config = rank.comm_config().clone().progress(Arc::new(ManualProgress::default()));
        let comm = Communicator::new(rank.bootstrap().clone(), rank.device().clone(), config);
        comm.initialise(&Requirements::default())?;
        let (window, stream) = (comm.alloc_window(4, WindowFlags::NONE)?, rank.stream()?);
        Ok(Self { rank, comm, window, stream })
    }

    fn start(&self, round: u64, deadline: Deadline) -> Result<(), CommError> {
        let device = self.comm.device()?;
        // Safety: as the kernel says; the window lives until the communicator ends.
        Ok(unsafe {
            caller_test_pass::launch(&*self.stream, LaunchConfig::new(1, 1), &device, &self.window, round, deadline)
        }?)
    }

    /// Waits without doing the work of gin's waits.
    fn is_idle_within(&self, limit: Duration) -> Result<bool, CommError> {
        let start = Instant::now();
        while !self.stream.is_idle()? {
            if start.elapsed() > limit {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(true)
    }

    fn received(&self, round: usize) -> Result<u64, CommError> {
        Ok(self.window.read_all()?[round])
    }
}

fn ranks(body: impl Fn(Caller) -> Result<(), CommError> + Sync) {
    ranks_of(WorldConfig::threads(2), body);
}

fn ranks_of(world: WorldConfig, body: impl Fn(Caller) -> Result<(), CommError> + Sync) {
    launch(world, |rank| body(Caller::new(rank)?)).expect("the ranks succeed");
}

#[test]
fn requests_wait_for_the_program_which_carries_them_out_by_progress_or_in_waits() {
    ranks(|caller| {
        let left = u64::from(1 - caller.comm.rank());
        caller.start(1, LONG)?;
        // The kernel may end by then, when the other rank has carried out its request.
        caller.is_idle_within(Duration::from_millis(100))?;
        let accepted = || Ok::<_, CommError>(caller.comm.stats()?[0].accepted);
        assert_eq!(accepted()?, 0, "something else carried the request out");
        let start = Instant::now();
        while accepted()? == 0 || !caller.stream.is_idle()? {
            caller.comm.progress()?;
            assert!(start.elapsed() < Duration::from_secs(30), "the kernel waits");
        }
        assert_eq!(caller.received(1)?, 100 + left);

        // The wait for a stream.
        caller.start(2, LONG)?;
        caller.stream.synchronize()?;
        assert_eq!(caller.received(2)?, 200 + left);

        // Rank 0 waits in a collective call, in which rank 1 takes part after its kernel, which needs rank 0.
        caller.start(3, LONG)?;
        if caller.comm.rank() == 1 {
            caller.stream.synchronize()?;
        }
        let second = caller.comm.alloc_window::<u64>(1, WindowFlags::NONE)?;
        caller.stream.synchronize()?;
        assert_eq!(caller.received(3)?, 300 + left);
        caller.comm.check("go on")?;
        caller.comm.deregister(&second)?;
        caller.comm.destroy()?;
        assert!(matches!(caller.comm.progress(), Err(CommError::State { state: CommState::Destroyed, .. })));
        Ok(())
    });
}

#[test]
fn kernels_end_by_their_deadlines_if_the_program_does_nothing() {
    ranks(|caller| {
        caller.start(1, Deadline::after_ms(50))?;
        assert!(caller.is_idle_within(Duration::from_secs(30))?, "the kernel waits");
        let kind = caller.comm.fault().map(|notice| notice.fault.kind());
        assert_eq!(kind, Some(FaultKind::Timeout));
        caller.comm.destroy()
    });
}

#[test]
fn loads_and_stores_and_nics_of_kernels_need_no_progress() {
    let nics = SoftNics::new(Options::default());
    let by_nics = WorldConfig::threads(2).lsa_size(1).soft_nics(&nics);
    for (world, backend) in [(WorldConfig::threads(2), BackendKind::Proxy), (by_nics, BackendKind::Gdaki)] {
        ranks_of(world, |caller| {
            assert_eq!(caller.comm.backend()?, backend);
            let device = caller.comm.device()?;
            // Safety: one thread of each rank; the window lives until the communicator ends.
            unsafe {
                caller_test_pass_near::launch(&*caller.stream, LaunchConfig::new(1, 1), &device, &caller.window, LONG)?;
            }
            assert!(caller.is_idle_within(Duration::from_secs(20))?, "{backend:?}: the kernel waits");
            assert_eq!((caller.received(0)?, caller.comm.fault()), (8 - u64::from(caller.comm.rank()), None));
            caller.comm.destroy()
        });
    }
}

#[test]
fn an_abort_from_another_thread_ends_kernels_of_a_program_that_does_nothing() {
    ranks(|caller| {
        caller.start(2, Deadline::NONE)?; // nobody raises the signal twice
        let abort = caller.comm.abort_handle();
        let aborter = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            abort.abort();
        });
        assert!(caller.is_idle_within(Duration::from_secs(30))?, "the kernel waits");
        assert!(aborter.join().is_ok());
        let kind = caller.comm.fault().map(|notice| notice.fault.kind());
        assert_eq!(kind, Some(FaultKind::Aborted));
        caller.comm.destroy()
    });
}

#[test]
fn a_communicator_that_is_dropped_ends_its_work_and_the_waits_of_others() {
    ranks(|caller| {
        if caller.comm.rank() == 0 {
            caller.rank.bootstrap().barrier()?;
            return Ok(());
        }
        caller.start(2, Deadline::NONE)?;
        caller.rank.bootstrap().barrier()?;
        caller.stream.synchronize()?;
        assert_eq!(caller.comm.fault().map(|notice| notice.rank), Some(0));
        caller.comm.destroy()
    });
}
