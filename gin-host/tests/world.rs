// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernels on the virtual GPU, from launch to result, in seeded worlds and on threads.

use gin_abi::{Deadline, FaultKind};
use gin_boot::rt;
use gin_device::prelude::*;
use gin_gpu::LaunchConfig;
use gin_host::comm::{CommError, CommState, Requirements, Routes, WindowFlags};
use gin_host::world::{LaunchError, WorldConfig, WorldMode, launch, launch_logged};
use gin_net::peer::PeerNetwork;
use gin_net::staged::{Staged, Staging};
use gin_net::{Endpoint, Network};
use gin_testkit::{Delay, FailOnDemand, FailSwitch, Failure, Reorder, Sabotage, Trickle, Withhold};
use gin_virtual::{EventLog, LogMode, Schedule};
use std::panic::AssertUnwindSafe;
use std::time::Duration;

/// Passes a vector on to the right neighbour in rounds; the neighbour checks it. Counts wrong elements.
///
/// Signal 0 counts vectors that arrived. Signal 1, which the receiver resets each time, is the right neighbour's report
/// that it has checked. Counter 0 counts vectors that have left. `wrong` receives the number of wrong elements,
/// including those of gets.
///
/// # Safety
/// - One block, resident. `wrong` is a word of device memory that is 0.
#[kernel]
pub unsafe fn host_test_pass_on(
    comm: Comm,
    to: gin_device::Window<u64>,
    from: gin_device::Window<u64>,
    wrong: *mut u64,
    rounds: u64,
    deadline: Deadline,
) {
    // These tests concern the proxy and its networks.
    let gin = Gin::new(&comm, ContextId::new(0)).route(Route::Network);
    let world = comm.world();
    let len = from.len() / 2;
    let (came, looked, left) = (SignalId::new(0), SignalId::new(1), CounterId::new(0));
    let element = |rank: u32, round: u64, i: usize| round << 32 | u64::from(rank) << 16 | i as u64;
    let mut errors = 0u64;
    let mut exchange = || -> Result<(), Fault> {
        for i in Block.stripe(len) {
            to.write(len + i, element(world.rank(), 0, i));
        }
        for round in 1..=rounds {
            for i in Block.stripe(len) {
                from.write(i, element(world.rank(), round, i));
            }
            gin.put(world.right(), to.range(0, len), from.range(0, len))
                .signal(came.inc())
                .counter(left)
                .issue(&Block)?;
            gin.wait_counter(&Block, left, round, deadline)?;
            // The source may be reused, so the vector must have been read by now.
            for i in Block.stripe(len) {
                from.write(i, u64::MAX);
            }
            gin.wait_signal(&Block, came, round, deadline)?;
            for i in Block.stripe(len) {
                errors += u64::from(to.read(i) != element(world.left().world(), round, i));
            }
            // Exactly one vector arrived.
            errors += u64::from(gin.read_signal(came)? != round);
            Block.sync();
            // The left neighbour had filled its second half before it sent.
            for i in Block.stripe(len) {
                from.write(len + i, 0);
            }
            gin.get(world.left(), from.range(len, len), to.range(len, len)).issue(&Block)?;
            gin.flush(&Block, deadline)?;
            for i in Block.stripe(len) {
                errors += u64::from(from.read(len + i) != element(world.left().world(), 0, i));
            }
            // No rank writes into this rank's vector before this rank has checked it.
            gin.signal(world.left(), looked.inc()).issue(&Block)?;
            gin.wait_signal(&Block, looked, 1, deadline)?;
            Block.sync();
            if Block.rank() == 0 {
                gin.reset_signal(looked)?;
            }
            Block.sync();
        }
        gin.flush(&Block, deadline)
    };
    let outcome = exchange();
    if errors > 0 {
        // Safety: the caller keeps the kernel's conditions. Another thread's count may be lost, but not all.
        unsafe { wrong.write(errors) };
    }
    if let Err(fault) = outcome {
        comm.report(fault);
    }
}

/// Waits for a signal that is never raised.
///
/// # Safety
/// - None.
#[kernel]
pub unsafe fn host_test_wait(comm: Comm, deadline: Deadline) {
    let gin = Gin::new(&comm, ContextId::new(0));
    if let Err(fault) = gin.wait_signal(&Block, SignalId::new(3), 1, deadline) {
        comm.report(fault);
    }
}

/// All ranks synchronize in one session of a barrier. Then rank 0 arrives in another session of the same barrier, and
/// once more in the first. If `meets` is 0, the other ranks do not come to the second session, which breaks the
/// barrier. If `gets` is not 0, arrival and wait are two steps. Stores the fault codes of these two, 0 for no fault.
///
/// # Safety
/// - One block, resident. `codes` is two words of device memory.
#[kernel]
pub unsafe fn host_test_two_sessions(comm: Comm, codes: *mut u64, meets: u32, gets: u32, deadline: Deadline) {
    let gin = Gin::new(&comm, ContextId::new(0));
    let fence = if gets != 0 { Fence::Get } else { Fence::None };
    let meet = || -> Result<(), Fault> {
        let mut first = BarrierSession::new(&gin, BarrierTeam::World, 0)?;
        first.sync(&Block, fence, Deadline::NONE)?;
        let mut second = BarrierSession::new(&gin, BarrierTeam::World, 0)?;
        if comm.world().rank() != 0 {
            return if meets != 0 { second.sync(&Block, fence, deadline) } else { Ok(()) };
        }
        let outcomes = [second.sync(&Block, fence, deadline), first.sync(&Block, fence, deadline)];
        for (index, outcome) in outcomes.into_iter().enumerate() {
            // Safety: the caller keeps the kernel's conditions. All threads store the same value.
            unsafe { codes.add(index).write(outcome.map_or_else(|fault| u64::from(fault.kind().code()), |()| 0)) };
        }
        Ok(())
    };
    if let Err(fault) = meet() {
        comm.report(fault);
    }
}

/// Puts `bytes` bytes to the right neighbour, by a `Gin` that chooses the route or by one that names the proxy. If no
/// request was posted, a flush and a token end at once.
///
/// # Safety
/// - One block, resident.
#[kernel]
pub unsafe fn host_test_route(comm: Comm, bytes: gin_device::Window<u8>, number: u64, names_proxy: u32, nothing: u32) {
    let (peer, number, context) = (comm.world().right(), number as usize, ContextId::new(0));
    let put = || -> Result<(), Fault> {
        if names_proxy != 0 {
            let gin = Gin::<Proxy>::with_backend(&comm, context);
            gin.put(peer, bytes.range(0, number), bytes.range(bytes.len() / 2, number)).issue(&Block)?;
            return gin.flush(&Block, Deadline::after_ms(5_000));
        }
        let gin = Gin::new(&comm, context);
        gin.put(peer, bytes.range(0, number), bytes.range(bytes.len() / 2, number)).issue(&Block)?;
        let deadline = if nothing != 0 { Deadline::after_ns(0) } else { Deadline::after_ms(5_000) };
        gin.wait(&Block, gin.flush_async(peer)?, deadline)?;
        gin.flush(&Block, deadline)
    };
    if let Err(fault) = put() {
        comm.report(fault);
    }
}

/// Returns the fault codes of rank 0 after [`host_test_two_sessions`].
fn two_sessions(routes: Routes, meets: bool, gets: bool, deadline: Deadline) -> Vec<u64> {
    let config = WorldConfig::seeded(2, 5).routes(routes);
    let codes = launch(config, |rank| -> Result<Vec<u64>, CommError> {
        let comm = rank.communicator(&Requirements::default().world_barriers(1))?;
        let codes = comm.alloc_window::<u64>(2, WindowFlags::NONE)?;
        let stream = rank.stream()?;
        let (kernel, handle) = (rank.kernel("host_test_two_sessions")?, comm.device()?);
        let word = codes.memory().address() as usize as *mut u64;
        let (meets, gets) = (u32::from(meets), u32::from(gets));
        // Safety: one block, resident. Communicator and window live until the kernel has ended.
        unsafe {
            stream.launch(&kernel, LaunchConfig::new(1, 33), &[&handle, &word, &meets, &gets, &deadline])?;
        }
        stream.synchronize()?;

        assert_eq!(comm.fault(), None);
        let found = codes.read_all()?;
        comm.destroy()?;
        Ok(found)
    });
    codes.unwrap().swap_remove(0)
}

#[test]
fn a_barrier_that_broke_in_one_session_is_refused_in_another_that_was_there_before() {
    for routes in [Routes::Automatic, Routes::Network] {
        let expected = [FaultKind::Timeout, FaultKind::BarrierBroken].map(|kind| u64::from(kind.code()));
        assert_eq!(two_sessions(routes, false, false, Deadline::after_us(50)), expected, "{routes:?}");
    }
}

#[test]
fn a_session_finds_that_another_one_of_its_barrier_has_met() {
    for gets in [false, true] {
        let expected = [0, u64::from(FaultKind::BarrierBroken.code())];
        let found = two_sessions(Routes::Automatic, true, gets, Deadline::after_ms(5_000));
        assert_eq!(found, expected, "in two steps: {gets}");
    }
}

/// Result of the rounds on each rank: the number of wrong elements, or the fault.
type Ended = Result<u64, FaultKind>;

fn pass_on(config: WorldConfig, deadline: Deadline) -> (Vec<Ended>, EventLog) {
    let (outcome, log) = launch_logged(config, |rank| -> Result<Ended, CommError> {
        let comm = rank.communicator(&Requirements::default().queue_depth(2).max_message(96))?;
        let (to, from) =
            (comm.alloc_window::<u64>(80, WindowFlags::NONE)?, comm.alloc_window::<u64>(80, WindowFlags::NONE)?);
        let wrong = comm.alloc_window::<u64>(1, WindowFlags::NONE)?;
        let stream = rank.stream()?;
        let (kernel, handle) = (rank.kernel("host_test_pass_on")?, comm.device()?);
        let word = wrong.memory().address() as usize as *mut u64;
        // Safety: one block, resident. Communicator and windows live until the kernel has ended.
        unsafe {
            stream.launch(&kernel, LaunchConfig::new(1, 33), &[&handle, &to, &from, &word, &4u64, &deadline])?;
        }
        stream.synchronize()?;
        let wrong = wrong.read_all()?[0];
        // A fault of another rank may still be on its way.
        rank.barrier()?;
        rt::wait_until({
            let mut looks = 0;
            let comm = &comm;
            move || {
                looks += 1;
                comm.fault().is_some() || looks > 50
            }
        });
        let ended = comm.fault().map_or(Ok(wrong), |notice| Err(notice.fault.kind()));
        comm.destroy()?;
        Ok(ended)
    });
    (outcome.unwrap_or_else(|error| panic!("{error}")), log)
}

const LONG: Deadline = Deadline::after_ms(20_000);

type Make = fn(&Endpoint) -> Box<dyn Network>;

/// Returns a seeded world for messages in parts on a network that reorders them. The race detector knows the parts of a
/// message by their order, so it takes some for parts of an earlier one.
fn reordered_parts(ranks: u32, seed: u64, network: Make) -> WorldConfig {
    WorldConfig::seeded(ranks, seed).network(network).races(false)
}

fn networks() -> Vec<(&'static str, Make)> {
    vec![
        ("peer", |endpoint| Box::new(PeerNetwork::new(endpoint))),
        ("reorder", |endpoint| Box::new(Reorder::new(PeerNetwork::new(endpoint), endpoint))),
        ("delay", |endpoint| Box::new(Delay::new(PeerNetwork::new(endpoint), endpoint, Duration::from_micros(30)))),
        ("withhold", |endpoint| Box::new(Withhold::new(PeerNetwork::new(endpoint), endpoint.rank))),
        ("all", |endpoint| {
            let below = Trickle::new(Delay::new(PeerNetwork::new(endpoint), endpoint, Duration::from_micros(5)), 3);
            Box::new(Reorder::new(Withhold::new(below, endpoint.rank), endpoint))
        }),
        ("staged", |endpoint| {
            let below = Reorder::new(Withhold::new(PeerNetwork::new(endpoint), endpoint.rank), endpoint);
            Box::new(Staged::new(below, endpoint.rank, Staging::Always("a test requires it")))
        }),
    ]
}

#[test]
fn kernels_exchange_over_every_network_and_schedule() {
    for (name, make) in networks() {
        for schedule in Schedule::PLAIN {
            for seed in 0..3 {
                let config = reordered_parts(3, seed, make).schedule(schedule);
                let (ended, _) = pass_on(config, LONG);
                assert_eq!(ended, [Ok(0); 3], "{name}, {schedule:?}, seed {seed}");
            }
        }
        let (ended, _) = pass_on(WorldConfig::threads(3).network(make), LONG);
        assert_eq!(ended, [Ok(0); 3], "{name}, threads");
    }
}

#[test]
fn lsa_teams_of_any_size_and_shared_progress_threads_change_nothing() {
    for lsa_size in [1, 2, 4] {
        let (ended, _) = pass_on(WorldConfig::seeded(4, 9).lsa_size(lsa_size), LONG);
        assert_eq!(ended, [Ok(0); 4], "{lsa_size}");
    }
    let mut config = WorldConfig::threads(4);
    config.progress_threads = Some(1);
    assert_eq!(pass_on(config, LONG).0, [Ok(0); 4]);
}

#[test]
fn the_route_depends_on_peer_and_back_end_and_never_on_the_size() {
    const SIZES: [u64; 5] = [0, 1, 8, 4097, 1 << 16];
    // Routes of the communicator, size of the LSA teams, the kernel names the proxy, all puts are requests.
    for (routes, lsa_size, names_proxy, by_network) in [
        (Routes::Automatic, 2, false, false),
        (Routes::Automatic, 2, true, true),
        (Routes::Automatic, 1, false, true),
        (Routes::Network, 2, false, true),
    ] {
        let config = WorldConfig::seeded(2, 5).routes(routes).lsa_size(lsa_size);
        let outcome = launch(config, |rank| -> Result<(), CommError> {
            let comm = rank.communicator(&Requirements::default())?;
            let window = comm.alloc_window::<u8>(2 << 16, WindowFlags::NONE)?;
            let (stream, kernel, handle) = (rank.stream()?, rank.kernel("host_test_route")?, comm.device()?);
            let (names_proxy, nothing) = (u32::from(names_proxy), u32::from(!by_network));
            for bytes in SIZES {
                // Safety: one block, resident. Communicator and window live until the kernel has ended.
                unsafe {
                    let arguments: [&dyn gin_gpu::KernelArg; 5] = [&handle, &window, &bytes, &names_proxy, &nothing];
                    stream.launch(&kernel, LaunchConfig::new(1, 33), &arguments)?;
                }
                stream.synchronize()?;
            }
            assert_eq!(comm.fault(), None);
            let expected = if by_network { SIZES.len() as u64 } else { 0 };
            assert_eq!(comm.stats()?[0].accepted, expected, "{routes:?}, teams of {lsa_size}, proxy: {names_proxy}");
            comm.destroy()
        });
        outcome.unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn the_same_seed_gives_the_same_run_and_another_one_another() {
    let run = |seed| {
        let mut config = reordered_parts(2, seed, |endpoint| {
            let below = Withhold::new(
                Delay::new(PeerNetwork::new(endpoint), endpoint, Duration::from_micros(9)),
                endpoint.rank,
            );
            Box::new(Reorder::new(below, endpoint))
        });
        if let WorldMode::Seeded(seeded) = &mut config.mode {
            seeded.log = LogMode::Full;
        }
        pass_on(config, LONG).1
    };
    let first = run(4);
    assert!(first.count() > 1000, "{} events", first.count());
    assert!(first == run(4), "two runs of one seed differ");
    assert!(first != run(5), "two seeds give the same run");
}

#[test]
fn every_mistake_of_a_proxy_shows() {
    let plain: Make = |endpoint| Box::new(PeerNetwork::new(endpoint));
    let slow: Make = |endpoint| Box::new(Delay::new(PeerNetwork::new(endpoint), endpoint, Duration::from_micros(30)));
    let withheld: Make = |endpoint| Box::new(Withhold::new(PeerNetwork::new(endpoint), endpoint.rank));
    let ended = |make: Make, sabotage: Sabotage, seed| {
        // The kernel notices, not the race detector.
        let config = sabotage.apply(WorldConfig::seeded(3, seed).races(false).network(make));
        pass_on(config, Deadline::after_ms(5)).0
    };
    for sabotage in Sabotage::ALL {
        let make = match sabotage {
            Sabotage::DropMakeVisible => withheld,
            Sabotage::CompleteEarly => slow,
            _ => plain,
        };
        assert_eq!(ended(make, Sabotage::None, 0), [Ok(0); 3], "without a mistake");
        let found = (0..60).any(|seed| ended(make, sabotage, seed) != [Ok(0); 3]);
        assert!(found, "{sabotage:?} was not noticed");
    }
}

#[test]
fn an_error_of_one_rank_ends_the_job_and_is_reported() {
    for config in [WorldConfig::seeded(3, 1), WorldConfig::threads(3)] {
        let outcome = launch(config, |rank| -> Result<(), CommError> {
            if rank.rank() == 1 {
                return Err(CommError::ProxyGone);
            }
            rank.barrier()
        });
        let Err(LaunchError::Rank { rank, error }) = outcome else { panic!("{outcome:?}") };
        assert_eq!((rank, error), (1, CommError::ProxyGone));
    }
    let none = launch(WorldConfig::seeded(0, 1), |_| -> Result<(), CommError> { Ok(()) });
    assert!(matches!(none, Err(LaunchError::Bootstrap(_))), "{none:?}");
}

#[test]
fn an_error_of_one_rank_ends_the_kernels_of_the_others() {
    for config in [WorldConfig::seeded(2, 1), WorldConfig::threads(2)] {
        let outcome = launch(config, |rank| -> Result<(), CommError> {
            let comm = rank.communicator(&Requirements::default())?;
            if rank.rank() == 1 {
                return Err(CommError::ProxyGone);
            }
            let stream = rank.stream()?;
            // Safety: the kernel has no requirements, and the communicator lives until it has ended.
            unsafe {
                let kernel = rank.kernel("host_test_wait")?;
                stream.launch(&kernel, LaunchConfig::new(1, 32), &[&comm.device()?, &Deadline::NONE])?;
            }
            stream.synchronize()?;
            assert_eq!(comm.state(), CommState::Aborted);
            Ok(())
        });
        assert!(matches!(outcome, Err(LaunchError::Rank { rank: 1, error: CommError::ProxyGone })), "{outcome:?}");
    }
}

#[test]
fn the_error_of_the_rank_that_ended_the_communicator_is_reported_also_if_others_return_first() {
    let configs = (0..8).map(|seed| WorldConfig::seeded(3, seed)).chain([WorldConfig::threads(3)]);
    for (config, destroys) in configs.flat_map(|config| [(config.clone(), false), (config, true)]) {
        let outcome = launch(config, |rank| -> Result<(), CommError> {
            let comm = rank.communicator(&Requirements::default())?;
            if rank.rank() == 1 {
                drop(comm);
                // Not before another rank has returned.
                rank.barrier().unwrap_err();
                return Err(CommError::ProxyGone);
            }
            rt::wait_until(|| comm.fault().is_some());
            let outcome = comm.check("go on");
            if destroys {
                comm.destroy()?;
            }
            outcome
        });
        assert!(matches!(outcome, Err(LaunchError::Rank { rank: 1, error: CommError::ProxyGone })), "{outcome:?}");
    }
}

#[test]
fn a_panic_of_one_rank_ends_the_job() {
    for config in [WorldConfig::seeded(2, 1), WorldConfig::threads(2)] {
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| {
            launch(config, |rank| -> Result<(), CommError> {
                let comm = rank.communicator(&Requirements::default())?;
                let _window = comm.alloc_window::<u8>(8, WindowFlags::NONE)?;
                assert_ne!(rank.rank(), 1, "requested by a test");
                rank.barrier()
            })
        }));
        let payload = outcome.unwrap_err();
        let text = payload.downcast_ref::<String>().map(String::as_str).unwrap_or_default();
        assert!(text.contains("requested by a test"), "{text}");
    }
}

#[test]
fn a_fault_of_one_ranks_kernel_is_known_on_every_rank() {
    let outcome = launch(WorldConfig::seeded(3, 1), |rank| -> Result<(FaultKind, u32), CommError> {
        let comm = rank.communicator(&Requirements::default())?;
        let stream = rank.stream()?;
        let deadline = if rank.rank() == 2 { Deadline::after_us(50) } else { Deadline::NONE };
        // Safety: the kernel has no requirements, and the communicator lives until it has ended.
        unsafe {
            let kernel = rank.kernel("host_test_wait")?;
            stream.launch(&kernel, LaunchConfig::new(2, 64), &[&comm.device()?, &deadline])?;
        }
        stream.synchronize()?;
        rt::wait_until(|| comm.fault().is_some());
        let notice = comm.fault().map(|notice| (notice.fault.kind(), notice.rank));
        comm.destroy()?;
        Ok(notice.unwrap_or((FaultKind::Aborted, 9)))
    });
    assert_eq!(outcome.unwrap_or_default(), [(FaultKind::Timeout, 2); 3]);
}

#[test]
fn windows_and_communicators_stay_while_kernels_run() {
    let outcome = launch(WorldConfig::seeded(2, 3), |rank| -> Result<(), CommError> {
        let comm = rank.communicator(&Requirements::default())?;
        let window = comm.alloc_window::<u8>(8, WindowFlags::NONE)?;
        let stream = rank.stream()?;
        if rank.rank() == 0 {
            // Safety: the kernel has no requirements, and the communicator lives until it has ended.
            unsafe {
                let kernel = rank.kernel("host_test_wait")?;
                stream.launch(&kernel, LaunchConfig::new(1, 1), &[&comm.device()?, &Deadline::NONE])?;
            }
        }
        for error in [comm.deregister(&window).unwrap_err(), comm.destroy().unwrap_err()] {
            match (rank.rank(), error) {
                (0, CommError::KernelsRunning { rank: 0, streams: 1, .. })
                | (1, CommError::OtherRank { rank: 0, .. }) => {}
                (_, other) => panic!("{other:?}"),
            }
        }
        assert_eq!(comm.state(), CommState::Active);
        rank.barrier()?;
        comm.abort()?;
        stream.synchronize()?;
        comm.destroy()
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn a_communicator_dropped_while_its_kernel_waits_ends_the_kernel() {
    for config in [WorldConfig::seeded(2, 3), WorldConfig::threads(2)] {
        let outcome = launch(config, |rank| -> Result<(), CommError> {
            let comm = rank.communicator(&Requirements::default())?;
            let stream = rank.stream()?;
            // Safety: the kernel has no requirements, and the tables of a dropped communicator stay while kernels run.
            unsafe {
                let kernel = rank.kernel("host_test_wait")?;
                stream.launch(&kernel, LaunchConfig::new(1, 40), &[&comm.device()?, &Deadline::NONE])?;
            }
            drop(comm);
            Ok(stream.synchronize()?)
        });
        outcome.unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn a_silent_network_ends_in_a_timeout_that_names_the_operation() {
    let switch = FailSwitch::new();
    switch.fail_peer(1, Failure::Silence);
    let config = WorldConfig::seeded(2, 3)
        .network(move |endpoint| Box::new(FailOnDemand::new(PeerNetwork::new(endpoint), switch.clone())));
    let (ended, _) = pass_on(config, Deadline::after_us(500));
    assert_eq!(ended, [Err(FaultKind::Timeout); 2]);
}

#[test]
fn the_report_of_a_kernel_is_known_as_soon_as_it_has_ended() {
    for seed in 0..20 {
        let outcome = launch(WorldConfig::seeded(1, seed), |rank| -> Result<(), CommError> {
            let comm = rank.communicator(&Requirements::default())?;
            let stream = rank.stream()?;
            // Safety: the kernel has no requirements, and the communicator lives until it has ended.
            unsafe {
                let kernel = rank.kernel("host_test_wait")?;
                stream.launch(&kernel, LaunchConfig::new(1, 32), &[&comm.device()?, &Deadline::after_us(5)])?;
            }
            stream.synchronize()?;
            assert_eq!(comm.fault().map(|notice| (notice.rank, notice.fault.kind())), Some((0, FaultKind::Timeout)));
            comm.destroy()
        });
        outcome.unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn an_error_that_leaves_main_shows_the_text_of_its_cause() {
    let outcome = launch(WorldConfig::seeded(1, 7), |rank| -> Result<(), CommError> {
        rank.kernel("host_test_pass_off")?;
        Ok(())
    });
    let error = outcome.unwrap_err();
    let text = format!("{error:?}");
    assert!(
        text.starts_with("rank 0: no kernel is named `host_test_pass_off`; there is `host_test_pass_on`"),
        "{text}"
    );
    assert_eq!(text, error.to_string());
}
