// SPDX-License-Identifier: MIT OR Apache-2.0
//! The proxy, driven by descriptors that the test posts as a kernel would.

mod common;

use common::{Poster, config, get, network, peer, put, request, strong, weak, with_comm};
use gin_abi::descriptor::{RemoteSignal, SignalTarget, Transfer, WindowOffset};
use gin_abi::{Deadline, Descriptor, Fault, FaultKind, FaultSubject, Operation};
use gin_device::gin::Order;
use gin_device::internal::status::WaitError;
use gin_gpu::copier::{Copier, Ticket};
use gin_gpu::{GpuError, Memory};
use gin_host::comm::{CommConfig, Communicator, Requirements, WindowFlags};
use gin_net::peer::PeerNetwork;
use gin_net::{Endpoint, Network};
use gin_testkit::{Delay, FailOnDemand, FailSwitch, Failure, LateCopies, Reorder, Trickle, WeakOnly, Withhold};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

fn byte(rank: u32, index: usize) -> u8 {
    (rank as usize * 31 + index * 7 + 1) as u8
}

/// Every rank puts `bytes` bytes to every rank with a strong signal and a counter, waits, and compares.
fn exchange(comm: &Communicator, bytes: usize) {
    let (rank, ranks) = (comm.rank(), comm.ranks());
    let poster = Poster::new(comm);
    let outbox = comm.alloc_window::<u8>(bytes, WindowFlags::NONE).unwrap();
    let inbox = comm.alloc_window::<u8>(bytes * ranks as usize, WindowFlags::NONE).unwrap();
    outbox.write(0, &(0..bytes).map(|index| byte(rank, index)).collect::<Vec<u8>>()).unwrap();
    for to in 0..ranks {
        let request = put(to, (inbox.id(), u64::from(rank) * bytes as u64), (outbox.id(), 0), bytes as u64);
        poster.post(0, Descriptor { signal: strong(0, 1), counter: Some(0), ..request }).unwrap();
    }
    poster.wait_signal(0, 0, u64::from(ranks)).unwrap();
    poster.wait_counter(0, 0, u64::from(ranks)).unwrap();
    for from in 0..ranks {
        let start = from as usize * bytes;
        let got = inbox.read_range(start..start + bytes).unwrap();
        assert_eq!(got, (0..bytes).map(|index| byte(from, index)).collect::<Vec<u8>>(), "rank {rank} from {from}");
    }
    poster.flush(0).unwrap();
    comm.deregister(&inbox).unwrap();
    comm.deregister(&outbox).unwrap();
}

fn exchange_over(make: impl Fn(&Endpoint) -> Box<dyn Network> + Send + Sync + 'static) {
    let config = config(network(make));
    for (max_message, queue_depth) in [(1 << 20, 4), (7, 1)] {
        let requirements = Requirements::default().max_message(max_message).queue_depth(queue_depth);
        with_comm(3, &config, &requirements, |comm| {
            for bytes in [0, 3, 28, 200] {
                exchange(comm, bytes);
                // The next exchange counts from zero again, with other windows.
                comm_barrier(comm);
                reset(comm);
                comm_barrier(comm);
            }
            comm.destroy().unwrap();
        });
    }
}

/// Copies late, and counts the values.
#[derive(Debug)]
struct Counted(LateCopies, Arc<AtomicU64>);

impl Copier for Counted {
    unsafe fn copy(&mut self, to: (&Memory, u64), from: (&Memory, u64), bytes: u64) -> Result<Ticket, GpuError> {
        // Safety: the caller's promise.
        unsafe { self.0.copy(to, from, bytes) }
    }

    unsafe fn store(&mut self, to: (&Memory, u64), value: u64, bytes: u64) -> Result<Ticket, GpuError> {
        self.1.fetch_add(1, Ordering::Relaxed);
        // Safety: the caller's promise.
        unsafe { self.0.store(to, value, bytes) }
    }

    fn is_done(&mut self, ticket: Ticket) -> Result<bool, GpuError> {
        self.0.is_done(ticket)
    }
}

/// Sends `rounds` values between two ranks, there and back if `waits`, and returns how many a copier moved.
fn values_by_copier(rounds: u64, waits: bool) -> u64 {
    let count = Arc::new(AtomicU64::new(0));
    let counter = count.clone();
    let network = network(move |endpoint| {
        let copier = Box::new(Counted(LateCopies::new(endpoint), counter.clone()));
        Box::new(PeerNetwork::with_copier(endpoint, copier))
    });
    with_comm(2, &config(network), &Requirements::default(), |comm| {
        let (poster, window) = (Poster::new(comm), comm.alloc_window::<u64>(1, WindowFlags::NONE).unwrap());
        let destination = WindowOffset { window: window.id(), offset: 0 };
        for round in 1..=rounds {
            let transfer = Transfer::PutValue { value: round, width_log2: 3, destination };
            let post = || {
                let value = Descriptor { signal: strong(0, 1), ..request(1 - comm.rank(), transfer) };
                poster.post(0, value).unwrap();
            };
            let wait = || poster.wait_signal(0, 0, round).unwrap();
            let check = || assert_eq!(window.read_range(0..1).unwrap(), [round]);
            if !waits {
                post();
                poster.flush(0).unwrap();
                comm_barrier(comm);
                check();
                comm_barrier(comm);
            } else if comm.rank() == 0 {
                post();
                wait();
                check();
            } else {
                wait();
                // Once this rank has posted, the other one may send the next value.
                check();
                post();
            }
        }
        comm_barrier(comm);
        assert_eq!(poster.signal(0, 0), rounds);
        comm.destroy().unwrap();
    });
    count.load(Ordering::Relaxed)
}

#[test]
fn a_kernel_that_waits_takes_values_from_its_mailbox_and_a_copier_moves_the_others() {
    let rounds = 100;
    assert_eq!(values_by_copier(rounds, false), 2 * rounds, "values for kernels that do not wait");
    let copied = values_by_copier(rounds, true);
    assert!(copied < rounds, "a copier moved {copied} of {} values for kernels that wait", 2 * rounds);
}

fn comm_barrier(comm: &Communicator) {
    comm.bootstrap().barrier().unwrap();
}

/// Resets signal 0 and counter 0 of context 0.
fn reset(comm: &Communicator) {
    Poster::new(comm).reset(0, 0);
}

#[test]
fn puts_arrive_before_their_signals_over_every_network() {
    exchange_over(|endpoint| Box::new(PeerNetwork::new(endpoint)));
    exchange_over(|endpoint| Box::new(Reorder::new(PeerNetwork::new(endpoint), endpoint)));
    exchange_over(|endpoint| Box::new(Delay::new(PeerNetwork::new(endpoint), endpoint, Duration::from_micros(200))));
    exchange_over(|endpoint| Box::new(Withhold::new(PeerNetwork::new(endpoint), endpoint.rank)));
    exchange_over(|endpoint| Box::new(Trickle::new(PeerNetwork::new(endpoint), 1)));
    exchange_over(|endpoint| {
        let below = Withhold::new(Trickle::new(PeerNetwork::new(endpoint), 2), endpoint.rank);
        Box::new(Reorder::new(Delay::new(below, endpoint, Duration::from_micros(50)), endpoint))
    });
}

#[test]
fn a_weak_signal_covers_all_messages_of_its_put_where_there_are_no_strong_ones() {
    let config = config(network(|endpoint| {
        Box::new(WeakOnly::new(Reorder::new(PeerNetwork::new(endpoint), endpoint), false, false))
    }));
    let requirements = Requirements::default().max_message(5);
    with_comm(2, &config, &requirements, |comm| {
        let poster = Poster::new(comm);
        let window = comm.alloc_window::<u8>(512, WindowFlags::NONE).unwrap();
        let rank = comm.rank();
        for round in 1..=20u64 {
            let mine: Vec<u8> = (0..256).map(|index| byte(rank + round as u32, index)).collect();
            window.write(0, &mine).unwrap();
            let request = put(1 - rank, (window.id(), 256), (window.id(), 0), 256);
            poster.post(0, Descriptor { signal: weak(0, 1), ..request }).unwrap();
            poster.wait_signal(0, 0, round).unwrap();
            let theirs: Vec<u8> = (0..256).map(|index| byte(1 - rank + round as u32, index)).collect();
            assert_eq!(window.read_range(256..512).unwrap(), theirs);
            poster.flush(0).unwrap();
            // No rank overwrites memory that the other has yet to read.
            comm_barrier(comm);
        }
    });
}

#[test]
fn gets_are_there_after_a_flush_also_when_withheld() {
    for make in [
        (|endpoint: &Endpoint| -> Box<dyn Network> { Box::new(PeerNetwork::new(endpoint)) })
            as fn(&Endpoint) -> Box<dyn Network>,
        |endpoint| Box::new(Withhold::new(PeerNetwork::new(endpoint), endpoint.rank)),
        |endpoint| Box::new(Reorder::new(PeerNetwork::new(endpoint), endpoint)),
    ] {
        let config = config(network(make));
        let requirements = Requirements::default().max_message(33);
        with_comm(2, &config, &requirements, |comm| {
            let poster = Poster::new(comm);
            let window = comm.alloc_window::<u8>(300, WindowFlags::NONE).unwrap();
            window.write(0, &(0..100).map(|index| byte(comm.rank(), index)).collect::<Vec<u8>>()).unwrap();
            comm_barrier(comm);
            let other = 1 - comm.rank();
            let request = get(other, (window.id(), 100), (window.id(), 0), 100);
            poster.post(0, Descriptor { counter: Some(3), ..request }).unwrap();
            poster.flush(0).unwrap();
            let theirs: Vec<u8> = (0..100).map(|index| byte(other, index)).collect();
            assert_eq!(window.read_range(100..200).unwrap(), theirs);
            assert_eq!(poster.counter(0, 3), 1);
            poster.post(0, get(other, (window.id(), 200), (window.id(), 0), 100)).unwrap();
            poster.flush_peer(0, other).unwrap();
            assert_eq!(window.read_range(200..300).unwrap(), theirs);
            comm_barrier(comm);
        });
    }
}

#[test]
fn values_of_all_widths_and_signals_at_addresses_arrive() {
    for withheld in [false, true] {
        let config = config(network(move |endpoint| {
            if withheld {
                Box::new(Withhold::new(PeerNetwork::new(endpoint), endpoint.rank))
            } else {
                Box::new(PeerNetwork::new(endpoint))
            }
        }));
        with_comm(2, &config, &Requirements::default(), |comm| {
            let poster = Poster::new(comm);
            let window = comm.alloc_window::<u64>(8, WindowFlags::SIGNALS).unwrap();
            let other = 1 - comm.rank();
            let value = 0xfedc_ba98_7654_3210u64;
            for width_log2 in 0..4u32 {
                let transfer = Transfer::PutValue {
                    value: value & (u64::MAX >> (64 - (8 << width_log2))),
                    width_log2,
                    destination: WindowOffset { window: window.id(), offset: u64::from(width_log2) * 8 },
                };
                poster.post(0, request(other, transfer)).unwrap();
            }
            let target = SignalTarget::Address { window: window.id(), offset: 40 };
            let signal = Some(RemoteSignal { target, amount: 5, strong: true });
            poster.post(0, Descriptor { signal, ..request(other, Transfer::Nothing) }).unwrap();
            poster.wait_va(&window, 40, 5).unwrap();
            let expected = [0x10, 0x3210, 0x7654_3210, value, 0, 0, 0, 0];
            assert_eq!(window.read_all().unwrap(), expected, "the word of a signal is not in the window");
            poster.flush(0).unwrap();
            comm_barrier(comm);
        });
    }
}

/// Returns the faults of rank 0 and rank 1 after rank 0 posted `request`, with windows of 64 and 32 bytes.
fn fault_of(request: impl Fn(u32) -> Descriptor + Sync, config: &CommConfig) -> Vec<(Fault, u32, Fault)> {
    with_comm(2, config, &Requirements::default().signals(4).counters(2), |comm| {
        let poster = Poster::new(comm);
        let bytes = if comm.rank() == 0 { 64 } else { 32 };
        let window = comm.alloc_window::<u8>(bytes, WindowFlags::NONE).unwrap();
        if comm.rank() == 0 {
            poster.post(0, request(window.id())).unwrap();
        }
        assert_eq!(poster.wait_signal(0, 3, 1), Err(WaitError::Fault), "no fault arrived");
        let seen = poster.status().cause();
        let notice = comm.fault().unwrap();
        (seen, notice.rank, notice.fault)
    })
}

#[test]
fn a_request_that_is_wrong_is_a_fault_on_all_ranks_that_says_what_was_wrong() {
    let config = config(peer());
    type Case = (&'static str, fn(u32) -> Descriptor, FaultKind, Operation, u64, u64);
    let cases: &[Case] = &[
        ("peer", |w| put(2, (w, 0), (w, 0), 8), FaultKind::UnknownRank, Operation::Put, 2, 2),
        ("destination", |w| put(1, (w, 25), (w, 0), 8), FaultKind::OutOfRange, Operation::Put, 32, 33),
        ("source", |w| put(1, (w, 0), (w, 57), 8), FaultKind::OutOfRange, Operation::Put, 64, 65),
        (
            "overflow",
            |w| put(1, (w, (1 << 63) - 1), (w, 0), 8),
            FaultKind::OutOfRange,
            Operation::Put,
            32,
            (1 << 63) + 7,
        ),
        ("length", |w| put(1, (w, 8), (w, 0), (1 << 63) - 1), FaultKind::OutOfRange, Operation::Put, 64, (1 << 63) - 1),
        ("get", |w| get(1, (w, 0), (w, 30), 3), FaultKind::OutOfRange, Operation::Get, 32, 33),
        ("get here", |w| get(1, (w, 62), (w, 0), 3), FaultKind::OutOfRange, Operation::Get, 64, 65),
        ("window", |w| put(1, (w + 1, 0), (w, 0), 8), FaultKind::UnknownWindow, Operation::Put, 0, 1),
        ("far window", |w| put(1, (w, 0), (0xff_ffff, 0), 8), FaultKind::UnknownWindow, Operation::Put, 0, 0xff_ffff),
        (
            "signal",
            |w| Descriptor { signal: strong(4, 1), ..put(1, (w, 0), (w, 0), 8) },
            FaultKind::UnknownSignal,
            Operation::Put,
            4,
            4,
        ),
        (
            "counter",
            |w| Descriptor { counter: Some(2), ..put(1, (w, 0), (w, 0), 8) },
            FaultKind::UnknownCounter,
            Operation::Put,
            2,
            2,
        ),
        (
            "signal of a window without",
            |w| Descriptor {
                signal: Some(RemoteSignal {
                    target: SignalTarget::Address { window: w, offset: 0 },
                    amount: 1,
                    strong: true,
                }),
                ..request(1, Transfer::Nothing)
            },
            FaultKind::NoVaSignals,
            Operation::Signal,
            0,
            0,
        ),
        (
            "value",
            |w| {
                let transfer =
                    Transfer::PutValue { value: 1, width_log2: 3, destination: WindowOffset { window: w, offset: 12 } };
                request(1, transfer)
            },
            FaultKind::Misaligned,
            Operation::PutValue,
            8,
            12,
        ),
    ];
    for &(name, make, kind, operation, expected, seen) in cases {
        let results = fault_of(make, &config);
        let (own, finder, fault) = results[0];
        assert_eq!(
            (own.kind(), own.operation(), own.expected(), own.seen()),
            (kind, operation, expected, seen),
            "{name}"
        );
        assert_eq!((own.context(), finder, fault), (0, 0, own), "{name}");
        let (notice, finder, fault) = results[1];
        assert_eq!(
            (notice.kind(), notice.peer(), notice.expected()),
            (FaultKind::Elsewhere, 0, u64::from(kind.code())),
            "{name}"
        );
        assert_eq!((finder, fault), (0, own), "{name}");
    }
}

#[test]
fn words_that_are_no_descriptor_are_a_fault() {
    let results = with_comm(2, &config(peer()), &Requirements::default(), |comm| {
        let poster = Poster::new(comm);
        if comm.rank() == 1 {
            poster.post_words(0, [15 << 1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
            assert!(poster.flush(0).is_err());
        }
        assert_eq!(poster.wait_signal(0, 0, 1), Err(WaitError::Fault), "no fault arrived");
        poster.status().cause()
    });
    assert_eq!((results[1].kind(), results[1].context()), (FaultKind::BadDescriptor, 0));
    assert_eq!((results[0].kind(), results[0].peer()), (FaultKind::Elsewhere, 1));
}

#[test]
fn a_request_that_the_network_fails_raises_no_counter_and_ends_every_wait() {
    for (failure, kind) in [(Failure::Status(9), FaultKind::Network), (Failure::PeerLost, FaultKind::PeerLost)] {
        let switch = FailSwitch::new();
        let shared = switch.clone();
        let config = config(network(move |endpoint| {
            let inner = PeerNetwork::new(endpoint);
            if endpoint.rank == 0 { Box::new(FailOnDemand::new(inner, shared.clone())) } else { Box::new(inner) }
        }));
        let results = with_comm(3, &config, &Requirements::default(), |comm| {
            let poster = Poster::new(comm);
            let window = comm.alloc_window::<u8>(64, WindowFlags::NONE).unwrap();
            if comm.rank() == 0 {
                switch.fail_after(2, failure);
                for index in 0..5 {
                    let request = put(1, (window.id(), 8 * index), (window.id(), 8 * index), 8);
                    // Once the fault is known, no further post must succeed.
                    let _ = poster.post(0, Descriptor { counter: Some(0), signal: strong(1, 1), ..request });
                    if index == 1 {
                        poster.flush(0).unwrap();
                        assert_eq!(poster.counter(0, 0), 2);
                    }
                }
                assert!(matches!(poster.flush(0), Err(WaitError::Fault)));
                assert_eq!(poster.counter(0, 0), 2);
            }
            assert_eq!(poster.wait_signal(0, 0, 1), Err(WaitError::Fault), "no fault arrived");
            let seen = poster.status().cause();
            (seen, poster.signal(0, 1))
        });
        assert_eq!((results[0].0.kind(), results[0].0.peer()), (kind, 1));
        // Every rank but the lost one reports the loss as such.
        let third = if kind == FaultKind::PeerLost { (kind, 1) } else { (FaultKind::Elsewhere, 0) };
        for ((notice, _), expected) in results[1..].iter().zip([(FaultKind::Elsewhere, 0), third]) {
            assert_eq!((notice.kind(), notice.peer()), expected);
        }
        assert_eq!(results[1].1, 2, "the failed request, or a later one, raised its signal");
    }
}

#[test]
fn a_peer_whose_list_is_full_holds_up_the_queue_and_is_counted() {
    let switch = FailSwitch::new();
    let shared = switch.clone();
    let config =
        config(network(move |endpoint| Box::new(FailOnDemand::new(PeerNetwork::new(endpoint), shared.clone()))));
    let requirements = Requirements::default().max_outstanding_per_peer(2).queue_depth(8);
    with_comm(2, &config, &requirements, |comm| {
        let poster = Poster::new(comm);
        let window = comm.alloc_window::<u8>(64, WindowFlags::NONE).unwrap();
        if comm.rank() == 0 {
            switch.fail_peer(1, Failure::Silence);
            let to = |peer| Descriptor { counter: Some(peer), ..put(peer, (window.id(), 0), (window.id(), 0), 8) };
            for peer in [1, 0, 1, 0] {
                poster.post(0, to(peer)).unwrap();
            }
            // A silent peer delays no other peer, and a flush of another peer ends.
            poster.wait_counter(0, 0, 2).unwrap();
            poster.flush_peer(0, 0).unwrap();
            for peer in [1, 0] {
                poster.post(0, to(peer)).unwrap();
            }
            let producer = poster.producer(0);
            let outcome = producer.wait_peer(0, producer.position(), Deadline::after_ms(50), Order::Acquire);
            assert_eq!(
                outcome,
                Err(WaitError::Deadline),
                "the list of rank 1 is full, so the proxy reads no later request"
            );
            let stats = comm.stats().unwrap()[0];
            assert_eq!((stats.stalls, stats.accepted, stats.finished), (1, 4, 2));
            comm.abort().unwrap();
        }
        assert_eq!(poster.wait_signal(0, 0, 1), Err(WaitError::Fault), "no abort arrived");
        let seen = poster.status().cause();
        assert_eq!(seen.kind(), FaultKind::Aborted);
        comm.destroy().unwrap();
    });
}

#[test]
fn queues_whose_indices_start_near_a_wrap_work() {
    let config = config(peer());
    for first_index in [u64::from(u32::MAX) - 2, (1 << 63) - 2] {
        for offset in 0..8 {
            for queue_depth in [2, 4, 8] {
                let first_index = first_index + offset;
                let requirements = Requirements::default().first_index(first_index).queue_depth(queue_depth);
                with_comm(1, &config, &requirements, |comm| {
                    let poster = Poster::new(comm);
                    for round in 1..=20 {
                        let request = request(0, Transfer::Nothing);
                        poster.post(0, Descriptor { signal: strong(0, 1), counter: Some(0), ..request }).unwrap();
                        poster.flush(0).unwrap();
                        assert_eq!((poster.signal(0, 0), poster.counter(0, 0)), (round, round));
                    }
                });
            }
        }
    }
}

#[test]
fn contexts_do_not_share_signals_or_counters() {
    let requirements = Requirements::default().contexts(5).signals(3).counters(2);
    with_comm(2, &config(peer()), &requirements, |comm| {
        let poster = Poster::new(comm);
        for context in 0..5 {
            let request = request(1 - comm.rank(), Transfer::Nothing);
            let signal = strong(2, u64::from(context) + 1);
            poster.post(context, Descriptor { signal, counter: Some(1), ..request }).unwrap();
        }
        for context in 0..5 {
            poster.wait_signal(context, 2, u64::from(context) + 1).unwrap();
            poster.flush(context).unwrap();
            assert_eq!(poster.signal(context, 2), u64::from(context) + 1);
            assert_eq!((poster.counter(context, 1), poster.counter(context, 0), poster.signal(context, 1)), (1, 0, 0));
        }
        let stats = comm.stats().unwrap();
        assert_eq!(stats.len(), 5);
        for stats in stats {
            assert_eq!((stats.accepted, stats.finished, stats.failed, stats.signals), (1, 1, 0, 1));
        }
        comm_barrier(comm);
    });
}

#[test]
fn figures_are_kept_by_context_and_peer() {
    // The network accepts one message at a time, and none at every second call, so all but the first of a put are
    // offered again.
    let config = config(network(|endpoint| Box::new(Trickle::new(PeerNetwork::new(endpoint), 1))));
    let requirements = Requirements::default().contexts(2).signals(1).counters(1).max_message(5);
    with_comm(3, &config, &requirements, |comm| {
        let poster = Poster::new(comm);
        let window = comm.alloc_window::<u8>(64, WindowFlags::NONE).unwrap();
        assert_eq!(comm.peer_stats().unwrap(), []);
        if comm.rank() == 1 {
            let place = |offset| (window.id(), offset);
            for _ in 0..2 {
                poster.post(0, Descriptor { signal: strong(0, 1), ..put(2, place(0), place(32), 20) }).unwrap();
            }
            poster.post(0, get(0, place(0), place(32), 7)).unwrap();
            let (window, offset) = place(8);
            let value = Transfer::PutValue { destination: WindowOffset { window, offset }, width_log2: 3, value: 5 };
            poster.post(1, Descriptor { counter: Some(0), ..request(2, value) }).unwrap();
            for context in [0, 1] {
                poster.flush(context).unwrap();
            }
            let stats = comm.peer_stats().unwrap();
            let places: Vec<_> = stats.iter().map(|row| (row.context, row.peer)).collect();
            assert_eq!(places, [(0, 0), (0, 2), (1, 2)]);
            let [got, put, value] = [0, 1, 2].map(|place: usize| stats[place].stats);
            assert_eq!((got.gets, got.get_bytes, got.puts, got.put_bytes, got.signals, got.posted), (1, 7, 0, 0, 0, 2));
            assert_eq!((put.puts, put.put_bytes, put.values, put.signals, put.posted), (2, 40, 0, 2, 8));
            assert_eq!((value.values, value.put_bytes, value.puts, value.signals, value.posted), (1, 8, 0, 0, 1));
            assert!(put.retries >= 4 && put.retries <= put.posted, "{put:?}");
            assert!((1..=2).contains(&put.deepest), "{put:?}");
            for row in [got, put, value] {
                assert_eq!((row.accepted, row.under_way(), row.failed), (row.puts + row.gets + row.values, 0, 0));
                assert_eq!(row.completions, row.posted);
            }
            let contexts = comm.stats().unwrap();
            assert_eq!((contexts[0].accepted, contexts[0].posted, contexts[1]), (3, 10, value));
        }
        comm_barrier(comm);
    });
}

#[test]
fn a_fault_that_a_kernel_reports_reaches_all_ranks_and_the_host() {
    let results = with_comm(3, &config(peer()), &Requirements::default(), |comm| {
        let poster = Poster::new(comm);
        let fault = Fault::new(FaultKind::Reported, Operation::None).with_values(FaultSubject::None, 0, 77);
        if comm.rank() == 2 {
            poster.status().report(fault);
        }
        assert_eq!(poster.wait_signal(0, 0, 1), Err(WaitError::Fault), "no fault arrived");
        let seen = poster.status().cause();
        while comm.fault().is_none() {
            std::thread::yield_now();
        }
        assert_eq!(comm.fault().map(|notice| (notice.rank, notice.fault)), Some((2, fault)));
        seen
    });
    assert_eq!((results[2].kind(), results[2].seen()), (FaultKind::Reported, 77));
    for notice in &results[..2] {
        assert_eq!((notice.kind(), notice.peer(), notice.seen()), (FaultKind::Elsewhere, 2, 77));
    }
}
