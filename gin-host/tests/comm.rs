// SPDX-License-Identifier: MIT OR Apache-2.0
//! The life cycle of communicators and windows, and every wrong use of them.

mod common;

use common::{Poster, config, errors, network, peer, put, ranks, strong, with_comm};
use gin_abi::{BackendKind, Descriptor, FaultKind, Transfer};
use gin_boot::{Bootstrap, BootstrapError, InProcess, LossCause};
use gin_device::internal::status::WaitError;
use gin_gpu::virt::VirtualDevice;
use gin_gpu::{Device, Memory, MemoryKind};
use gin_host::comm::{
    Backend, CommConfig, CommError, CommState, Communicator, MAX_QUEUE_DEPTH, NicChoice, Requirements, WindowFlags,
    probe_backends,
};
use gin_host::proxy::progress::Pool;
use gin_net::peer::PeerNetwork;
use gin_nic::NicConfig;
use gin_testkit::{Delay, FailOnDemand, FailSwitch, Failure, WeakOnly};
use std::sync::Arc;
use std::time::Duration;

/// Returns the error of `initialise` on a single rank.
fn refused(requirements: &Requirements, config: &CommConfig) -> CommError {
    let results = ranks(1, |bootstrap, device| {
        let comm = Communicator::new(bootstrap, device, config.clone());
        let outcome = comm.initialise(requirements);
        assert_eq!(comm.state(), CommState::Uninitialised, "a refused communicator can be tried again");
        comm.initialise(&Requirements::default()).map_err(|_| ()).ok();
        outcome
    });
    errors(results).remove(0)
}

#[test]
fn requirements_past_a_limit_are_refused_with_the_number_and_the_limit() {
    let basis = Requirements::default();
    let cases = [
        (basis.contexts(0), 0, 256),
        (basis.contexts(257), 257, 256),
        (basis.queue_depth(0), 0, u64::from(MAX_QUEUE_DEPTH)),
        (basis.queue_depth(1 << 21), 1 << 21, 1 << 20),
        (basis.signals((1 << 24) + 1), (1 << 24) + 1, 1 << 24),
        (basis.counters((1 << 24) + 1), (1 << 24) + 1, 1 << 24),
        (basis.signals(1 << 24).world_barriers(3), (1 << 24) + 3, 1 << 24),
        (basis.signals(0).world_barriers(u32::MAX), u64::from(u32::MAX), 1 << 24),
        (basis.max_outstanding_per_peer(0), 0, 1 << 20),
        (basis.max_outstanding_per_peer((1 << 20) + 1), (1 << 20) + 1, 1 << 20),
        (basis.max_message(0), 0, 1 << 30),
        (basis.max_message((1 << 30) + 1), (1 << 30) + 1, 1 << 30),
        (basis.windows(0), 0, 1 << 16),
        (basis.windows((1 << 16) + 1), (1 << 16) + 1, 1 << 16),
    ];
    for (requirements, expected, max) in cases {
        let CommError::Limit { asked, limit, .. } = refused(&requirements, &config(peer())) else {
            panic!("not a limit")
        };
        assert_eq!((asked, limit), (expected, max));
    }
    let depth = refused(&basis.queue_depth(24), &config(peer()));
    assert_eq!(depth, CommError::NotPowerOfTwo { what: "queue_depth", asked: 24 });
    let text = refused(&basis.contexts(300), &config(peer())).to_string();
    assert_eq!(text, "300 contexts were asked for; there can be 1 to 256");
}

#[test]
fn the_most_contexts_and_the_least_queue_work() {
    let requirements = Requirements::default().contexts(256).queue_depth(1).signals(1).counters(0);
    with_comm(2, &config(peer()), &requirements, |comm| {
        let poster = Poster::new(comm);
        for context in [0, 64, 255] {
            let request = common::request(1 - comm.rank(), Transfer::Nothing);
            poster.post(context, Descriptor { signal: strong(0, 1), ..request }).unwrap();
            poster.wait_signal(context, 0, 1).unwrap();
        }
        comm.destroy().unwrap();
    });
}

#[test]
fn lsa_teams_that_do_not_divide_the_ranks_are_refused() {
    for lsa_size in [0, 2, 4] {
        let config = config(peer()).lsa_size(Some(lsa_size));
        let results = ranks(3, |bootstrap, device| {
            Communicator::new(bootstrap, device, config.clone()).initialise(&Requirements::default())
        });
        for error in errors(results) {
            assert_eq!(error, CommError::LsaSize { lsa_size, ranks: 3 });
        }
    }
}

#[test]
fn a_job_without_ranks_is_refused() {
    assert_eq!(InProcess::job(0).unwrap_err(), BootstrapError::Ranks { ranks: 0, limit: 1 << 24 });
    assert!(InProcess::job(u32::MAX).is_err());
}

#[test]
fn ranks_that_ask_for_different_values_learn_the_value_and_the_rank() {
    let results = ranks(3, |bootstrap, device| {
        let signals = if bootstrap.rank() == 2 { 9 } else { 8 };
        let comm = Communicator::new(bootstrap, device, config(peer()));
        comm.initialise(&Requirements::default().signals(signals))
    });
    let expected = |rank, theirs, own| CommError::Disagreement { what: "signals", rank, theirs, own };
    assert_eq!(errors(results), [expected(2, 9, 8), expected(2, 9, 8), expected(0, 8, 9)]);
}

#[test]
fn a_failure_of_one_rank_is_reported_to_all() {
    let results = ranks(2, |bootstrap, device| {
        let contexts = if bootstrap.rank() == 1 { 999 } else { 1 };
        let comm = Communicator::new(bootstrap, device, config(peer()));
        comm.initialise(&Requirements::default().contexts(contexts))
    });
    let errors = errors(results);
    let CommError::OtherRank { rank: 1, reason } = &errors[0] else { panic!("{errors:?}") };
    assert!(reason.contains("999"), "{reason}");
    assert!(matches!(errors[1], CommError::Limit { asked: 999, .. }));
}

#[test]
fn the_gdaki_back_end_is_refused_with_the_reason_and_auto_takes_the_proxy() {
    let device = VirtualDevice::memory_only(0);
    assert!(Backend::Auto.choose(&*device, &NicChoice::default()).unwrap().is_none());
    let probed = probe_backends();
    assert!(probed.iter().any(|probe| probe.backend == BackendKind::Proxy && probe.refusal.is_none()));
    let gdaki = probed.iter().find(|probe| probe.backend == BackendKind::Gdaki).unwrap();
    // A host with a NIC gets GDAKI.
    let Some(why) = &gdaki.refusal else { return };
    let CommError::Backend { backend, reason } =
        refused(&Requirements::default(), &config(peer()).backend(Backend::Gdaki))
    else {
        panic!("not refused")
    };
    assert_eq!((backend, &reason), (BackendKind::Gdaki, why));
    assert!(reason.contains("mlx5"), "{reason}");
    let named = NicChoice::Named("no_such_nic".to_owned(), NicConfig::default());
    let CommError::Backend { reason, .. } =
        refused(&Requirements::default(), &config(peer()).backend(Backend::Gdaki).nic(named))
    else {
        panic!("not refused")
    };
    assert!(reason.starts_with("NIC no_such_nic: "), "{reason}");
}

#[test]
fn a_network_that_lacks_what_is_required_is_refused_with_its_name() {
    let config = config(network(|endpoint| Box::new(WeakOnly::new(PeerNetwork::new(endpoint), false, false))));
    let strong = refused(&Requirements::default().strong_signals(true), &config);
    assert_eq!(strong, CommError::Capability { network: "peer", what: "strong signals" });
    let va = refused(&Requirements::default().va_signals(true), &config);
    assert_eq!(va, CommError::Capability { network: "peer", what: "signals at window addresses" });
}

#[test]
fn each_call_in_a_wrong_state_says_so() {
    ranks(1, |bootstrap, device| {
        let comm = Communicator::new(bootstrap, device, config(peer()));
        let state = |error: CommError| match error {
            CommError::State { state, .. } => state,
            other => panic!("{other:?}"),
        };
        let window = || comm.alloc_window::<u8>(8, WindowFlags::NONE).map(drop);
        assert_eq!(comm.state(), CommState::Uninitialised);
        assert_eq!(state(comm.device().unwrap_err()), CommState::Uninitialised);
        assert_eq!(state(comm.abort().unwrap_err()), CommState::Uninitialised);
        assert_eq!(state(window().unwrap_err()), CommState::Uninitialised);
        assert_eq!(state(comm.stats().unwrap_err()), CommState::Uninitialised);
        comm.initialise(&Requirements::default()).unwrap();
        assert_eq!(comm.state(), CommState::Active);
        assert_eq!(state(comm.initialise(&Requirements::default()).unwrap_err()), CommState::Active);
        assert_eq!(comm.backend().unwrap(), BackendKind::Proxy);
        comm.destroy().unwrap();
        assert_eq!(comm.state(), CommState::Destroyed);
        for error in [
            comm.destroy().unwrap_err(),
            comm.initialise(&Requirements::default()).unwrap_err(),
            comm.abort().unwrap_err(),
            comm.device().unwrap_err(),
            window().unwrap_err(),
        ] {
            assert!(error.to_string().ends_with("the communicator is destroyed"), "{error}");
        }
    });
}

#[test]
fn abort_ends_every_wait_on_every_rank_and_every_collective_call() {
    with_comm(3, &config(peer()), &Requirements::default(), |comm| {
        let poster = Poster::new(comm);
        match comm.rank() {
            0 => comm.abort().unwrap(),
            1 => {
                // Timing decides between refusal and interruption.
                let error = comm.alloc_window::<u8>(8, WindowFlags::NONE).unwrap_err();
                assert!(matches!(error, CommError::Ended { rank: 0, .. }), "{error:?}");
            }
            _ => {}
        }
        assert_eq!(poster.wait_signal(0, 0, 1), Err(WaitError::Fault), "no abort arrived");
        let fault = poster.status().cause();
        assert_eq!(fault.kind(), FaultKind::Aborted);
        assert_eq!(comm.state(), CommState::Aborted);
        assert_eq!(comm.fault().map(|notice| (notice.rank, notice.fault.kind())), Some((0, FaultKind::Aborted)));
        comm.abort().unwrap();
        comm.destroy().unwrap();
        assert_eq!(comm.state(), CommState::Destroyed);
    });
}

#[test]
fn after_an_abort_the_ranks_can_make_a_new_communicator() {
    ranks(2, |bootstrap, device| {
        for _ in 0..3 {
            let comm = Communicator::new(bootstrap.clone(), device.clone(), config(peer()));
            comm.initialise(&Requirements::default()).unwrap();
            let poster = Poster::new(&comm);
            if bootstrap.rank() == 0 {
                // The other rank is in a collective call that this rank never makes.
                comm.abort_handle().abort();
            } else {
                comm.alloc_window::<u8>(8, WindowFlags::NONE).unwrap_err();
            }
            assert!(poster.wait_signal(0, 0, 1).is_err());
        }
    });
}

#[test]
fn a_communicator_that_is_dropped_is_aborted_and_leaves_nobody_waiting() {
    with_one_dropped(&config(peer()));
    with_one_dropped(&config(peer()).progress(Arc::new(Pool::new(2).unwrap())));
}

fn with_one_dropped(config: &CommConfig) {
    ranks(3, |bootstrap, device| {
        let comm = Communicator::new(bootstrap.clone(), device, config.clone());
        comm.initialise(&Requirements::default()).unwrap();
        // A clone that goes first ends nothing.
        drop(comm.clone());
        assert_eq!(comm.state(), CommState::Active);
        bootstrap.barrier().unwrap();
        let poster = Poster::new(&comm);
        if bootstrap.rank() != 1 {
            assert_eq!(poster.wait_signal(0, 0, 1), Err(WaitError::Fault), "no abort arrived");
            let fault = poster.status().cause();
            assert_eq!(fault.kind(), FaultKind::Aborted);
            assert_eq!(comm.fault().map(|notice| notice.rank), Some(1));
            let report = comm.fault_report().unwrap().to_string();
            let reason = "communicator was aborted: rank 1 dropped it without `destroy`: its function failed or returned \
                          early (reported by rank 1";
            assert!(report.starts_with(reason), "{report}");
        }
    });
}

#[test]
fn a_rank_that_leaves_is_named_to_the_ranks_that_wait_for_it() {
    let results = ranks(2, |bootstrap, _| if bootstrap.rank() == 0 { bootstrap.barrier() } else { Ok(()) });
    assert!(matches!(results[0], Err(BootstrapError::Lost { rank: 1, cause: LossCause::Left, .. })), "{results:?}");
    let results = ranks(3, |bootstrap, _| {
        if bootstrap.rank() == 2 {
            bootstrap.abort();
            return Ok(());
        }
        bootstrap.barrier()
    });
    assert_eq!(results[..2], [Err(BootstrapError::Aborted { rank: 2 }), Err(BootstrapError::Aborted { rank: 2 })]);
    let mut job = InProcess::job(2).unwrap();
    let (absent, waiting) = (job.pop().unwrap(), job.pop().unwrap().with_timeout(Duration::from_millis(5)));
    let outcome = waiting.barrier();
    assert!(matches!(&outcome, Err(BootstrapError::Timeout { missing, .. }) if *missing == [1]), "{outcome:?}");
    drop(absent);
}

#[test]
fn windows_may_have_another_length_on_each_rank() {
    with_comm(3, &config(peer()), &Requirements::default(), |comm| {
        let rank = comm.rank();
        let window = comm.alloc_window::<u32>(rank as usize * 10, WindowFlags::NONE).unwrap();
        assert_eq!((window.len(), window.is_empty()), (rank as usize * 10, rank == 0));
        assert_eq!([0, 1, 2, 3].map(|other| window.len_on(other)), [Some(0), Some(10), Some(20), None]);
        assert_eq!((window.handle().own_length, window.handle().least_length), (u64::from(rank) * 40, 0));
        let equal = comm.alloc_window::<u32>(7, WindowFlags::NONE).unwrap();
        assert_eq!((equal.handle().own_length, equal.handle().least_length), (28, 28));
        assert_eq!((window.id(), equal.id()), (0, 1));
        comm.deregister(&window).unwrap();
        let again = comm.alloc_window::<u32>(7, WindowFlags::NONE).unwrap();
        assert_eq!(again.id(), 0, "ids are reused");
        assert_eq!(comm.deregister(&window).unwrap_err(), CommError::WindowGone { window: 0 });
    });
}

#[test]
fn a_window_in_the_middle_of_an_allocation_has_its_own_offsets() {
    with_comm(2, &config(peer()), &Requirements::default(), |comm| {
        let memory = Memory::new(comm.gpu(), MemoryKind::Device, 256).unwrap();
        let window = comm.register::<u8>(&memory.slice(64..128).unwrap(), WindowFlags::NONE).unwrap();
        let poster = Poster::new(comm);
        window.write(0, &[comm.rank() as u8 + 1; 8]).unwrap();
        let request = put(1 - comm.rank(), (window.id(), 56), (window.id(), 0), 8);
        poster.post(0, Descriptor { signal: strong(0, 1), ..request }).unwrap();
        poster.wait_signal(0, 0, 1).unwrap();
        poster.flush(0).unwrap();
        let mut all = [0u8; 256];
        memory.read(0, &mut all).unwrap();
        let mut expected = [0u8; 256];
        expected[64..72].fill(comm.rank() as u8 + 1);
        expected[120..128].fill(2 - comm.rank() as u8);
        assert_eq!(all, expected);
        comm.bootstrap().barrier().unwrap();
    });
}

#[test]
fn windows_that_the_program_drops_stay_registered_and_the_limit_says_so() {
    with_comm(1, &config(peer()), &Requirements::default().windows(2), |comm| {
        for _ in 0..2 {
            drop(comm.alloc_window::<u8>(64, WindowFlags::NONE).unwrap());
        }
        let text = comm.alloc_window::<u8>(64, WindowFlags::NONE).unwrap_err().to_string();
        assert!(text.starts_with("3 windows were asked for; there can be 1 to 2: a window that"), "{text}");
        assert!(text.contains("deregister it on all ranks") && text.contains("request more `windows`"), "{text}");
    });
}

#[test]
fn memory_that_cannot_be_a_window_is_refused_with_the_reason() {
    with_comm(1, &config(peer()), &Requirements::default().windows(2), |comm| {
        let memory = Memory::new(comm.gpu(), MemoryKind::Device, 256).unwrap();
        let slice = |from, to| memory.slice(from..to).unwrap();
        let first = comm.register::<u32>(&slice(0, 128), WindowFlags::NONE).unwrap();
        let address = memory.address();
        assert_eq!(
            comm.register::<u8>(&slice(0, 128), WindowFlags::NONE).unwrap_err(),
            CommError::AlreadyRegistered { address, end: address + 128, window: first.id() },
        );
        assert!(matches!(
            comm.register::<u8>(&slice(127, 129), WindowFlags::NONE),
            Err(CommError::AlreadyRegistered { window: 0, .. })
        ));
        assert_eq!(
            comm.register::<u32>(&slice(130, 140), WindowFlags::NONE).unwrap_err(),
            CommError::Misaligned { address: address + 130, align: 4 },
        );
        assert_eq!(
            comm.register::<u8>(&slice(132, 140), WindowFlags::SIGNALS).unwrap_err(),
            CommError::Misaligned { address: address + 132, align: 8 },
        );
        let other: Arc<dyn Device> = VirtualDevice::memory_only(9);
        let foreign = Memory::new(&other, MemoryKind::Device, 8).unwrap();
        assert!(matches!(
            comm.register::<u8>(&foreign.whole(), WindowFlags::NONE),
            Err(CommError::NotRegistrable { .. })
        ));
        let second = comm.register::<u8>(&slice(128, 256), WindowFlags::NONE).unwrap();
        assert_eq!(
            comm.alloc_window::<u8>(1, WindowFlags::NONE).unwrap_err(),
            CommError::Limit { what: "windows", asked: 3, least: 1, limit: 2 },
        );
        assert!(matches!(
            comm.alloc_window::<u64>(usize::MAX, WindowFlags::NONE),
            Err(CommError::NoPlace { bytes: u64::MAX, .. })
        ));
        assert_eq!(
            second.write(120, &[0; 9]).unwrap_err(),
            CommError::OutOfRange { start: 120, end: 129, length: 128 },
        );
        assert!(matches!(second.read_range(5..usize::MAX), Err(CommError::OutOfRange { .. })));
        // Memory can be registered again once its window is deregistered.
        comm.deregister(&first).unwrap();
        comm.register::<u8>(&slice(0, 128), WindowFlags::NONE).unwrap();
    });
}

#[test]
fn ranks_that_register_different_windows_learn_so() {
    let results = with_comm(2, &config(peer()), &Requirements::default(), |comm| {
        let flags = if comm.rank() == 0 { WindowFlags::SIGNALS } else { WindowFlags::NONE };
        let outcome = comm.alloc_window::<u64>(8, flags).map(drop);
        // The communicator is still usable.
        let window = comm.alloc_window::<u64>(8, WindowFlags::NONE).unwrap();
        assert_eq!(window.id(), 0);
        comm.bootstrap().barrier().unwrap();
        outcome
    });
    assert_eq!(
        errors(results),
        [
            CommError::Disagreement { what: "window flags", rank: 1, theirs: 0, own: 1 },
            CommError::Disagreement { what: "window flags", rank: 0, theirs: 1, own: 0 },
        ],
    );
}

#[test]
fn ranks_in_different_collective_calls_learn_so() {
    let results = with_comm(2, &config(peer()), &Requirements::default(), |comm| {
        let window = comm.alloc_window::<u8>(8, WindowFlags::NONE).unwrap();
        let outcome = if comm.rank() == 0 {
            comm.deregister(&window)
        } else {
            comm.alloc_window::<u8>(8, WindowFlags::NONE).map(drop)
        };
        comm.bootstrap().barrier().unwrap();
        outcome
    });
    assert!(results.iter().all(|result| matches!(result, Err(CommError::OutOfStep { .. }))), "{results:?}");
}

#[test]
fn a_request_to_a_window_that_was_deregistered_is_a_fault_and_moves_nothing() {
    let results = with_comm(2, &config(peer()), &Requirements::default(), |comm| {
        let memory = Memory::new(comm.gpu(), MemoryKind::Device, 64).unwrap();
        let window = comm.register::<u8>(&memory.whole(), WindowFlags::NONE).unwrap();
        let poster = Poster::new(comm);
        window.write(0, &[7; 32]).unwrap();
        comm.deregister(&window).unwrap();
        if comm.rank() == 0 {
            poster.post(0, put(1, (window.id(), 32), (window.id(), 0), 8)).unwrap();
        }
        assert_eq!(poster.wait_signal(0, 0, 1), Err(WaitError::Fault), "no fault arrived");
        let fault = poster.status().cause();
        let mut all = [0u8; 64];
        memory.read(0, &mut all).unwrap();
        assert_eq!(all[32..], [0; 32]);
        fault
    });
    assert_eq!((results[0].kind(), results[1].kind()), (FaultKind::UnknownWindow, FaultKind::Elsewhere));
}

#[test]
fn deregistration_and_destruction_wait_for_requests_under_way() {
    let config = config(network(|endpoint| {
        Box::new(Delay::new(PeerNetwork::new(endpoint), endpoint, Duration::from_millis(20)))
    }));
    for destroy in [false, true] {
        with_comm(2, &config, &Requirements::default(), |comm| {
            let memory = Memory::new(comm.gpu(), MemoryKind::Device, 64).unwrap();
            let window = comm.register::<u8>(&memory.whole(), WindowFlags::NONE).unwrap();
            window.write(0, &[comm.rank() as u8 + 1; 8]).unwrap();
            let poster = Poster::new(comm);
            poster.post(0, put(1 - comm.rank(), (window.id(), 8), (window.id(), 0), 8)).unwrap();
            if destroy {
                comm.destroy().unwrap();
            } else {
                comm.deregister(&window).unwrap();
            }
            let mut all = [0u8; 16];
            memory.read(0, &mut all).unwrap();
            assert_eq!(all[8..], [2 - comm.rank() as u8; 8]);
        });
    }
}

#[test]
fn deregistration_that_would_wait_for_ever_is_refused_with_the_figures() {
    let switch = FailSwitch::new();
    let shared = switch.clone();
    let network = network(move |endpoint| Box::new(FailOnDemand::new(PeerNetwork::new(endpoint), shared.clone())));
    let config = config(network).drain(Duration::from_millis(20));
    let results = with_comm(2, &config, &Requirements::default(), |comm| {
        let window = comm.alloc_window::<u8>(64, WindowFlags::NONE).unwrap();
        let poster = Poster::new(comm);
        if comm.rank() == 1 {
            switch.fail_peer(0, Failure::Silence);
            poster.post(0, put(0, (window.id(), 8), (window.id(), 0), 8)).unwrap();
        }
        let outcome = comm.deregister(&window);
        assert_eq!(comm.state(), CommState::Active);
        comm.bootstrap().barrier().unwrap();
        outcome
    });
    let errors = errors(results);
    let expected = CommError::InFlight { call: "deregister a window", rank: 1, requests: 1, waited_ms: 20 };
    assert_eq!(errors[1], expected);
    assert_eq!(errors[0], CommError::OtherRank { rank: 1, reason: expected.to_string() });
}

#[test]
fn two_communicators_of_the_same_ranks_do_not_see_each_other() {
    ranks(2, |bootstrap, device| {
        let make = || {
            let comm = Communicator::new(bootstrap.clone(), device.clone(), config(peer()));
            comm.initialise(&Requirements::default()).unwrap();
            comm
        };
        let (first, second) = (make(), make());
        let (mine, other) = (Poster::new(&first), Poster::new(&second));
        let signal = Descriptor { signal: strong(0, 1), ..common::request(1 - first.rank(), Transfer::Nothing) };
        mine.post(0, signal).unwrap();
        mine.wait_signal(0, 0, 1).unwrap();
        assert_eq!(other.signal(0, 0), 0);
        bootstrap.barrier().unwrap();
        first.abort().unwrap();
        other.post(0, signal).unwrap();
        other.wait_signal(0, 0, 1).unwrap();
        assert_eq!(second.state(), CommState::Active);
        second.destroy().unwrap();
    });
}

#[test]
fn proxies_that_share_threads_serve_all_ranks() {
    let config = config(peer()).progress(Arc::new(Pool::new(1).unwrap()));
    with_comm(4, &config, &Requirements::default(), |comm| {
        let poster = Poster::new(comm);
        for round in 1..=50 {
            let right = (comm.rank() + 1) % 4;
            poster.post(0, Descriptor { signal: strong(0, 1), ..common::request(right, Transfer::Nothing) }).unwrap();
            poster.wait_signal(0, 0, round).unwrap();
        }
        comm.destroy().unwrap();
    });
}
