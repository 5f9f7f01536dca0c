// SPDX-License-Identifier: MIT OR Apache-2.0
//! The tables, driven as NCCL drives them, over virtual GPUs whose lanes work late and in any order.

mod common;
mod gdaki;
mod limits;
mod processes;

use common::gpus::{Engine, LANES, gpus, work_at_once};
use common::{Comm, Put, Registered, init, logged, until};
use gin_nccl::abi::{FLAG_NEVER_RESET, PTR_HOST, Properties};
use gin_nccl::gpus::Place;
use gin_nccl::ncclRmaPlugin_v14;
use std::alloc::{GlobalAlloc, Layout, System};
use std::any::Any;
use std::cell::Cell;
use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts the allocations of a thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// Safety: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // Safety: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // Safety: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Stores to a word of GPU memory as a kernel does.
fn word(all: &Registered, rank: usize, index: u64) -> &AtomicU64 {
    let address = all.memory[rank].address() + index * 8;
    // Safety: the memory exists, and all accesses are atomic.
    unsafe { AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(address as usize)) }
}

#[test]
fn the_properties_make_nccl_take_the_proxy_with_queues_of_a_power_of_two() {
    let (mut count, mut properties) = (0, MaybeUninit::<Properties>::uninit());
    // Safety: the table's functions, with valid pointers.
    let (properties, name) = unsafe {
        assert_eq!((ncclRmaPlugin_v14.start.devices)(&raw mut count), 0);
        assert_eq!((ncclRmaPlugin_v14.control.get_properties)(0, properties.as_mut_ptr()), 0);
        let properties = properties.assume_init();
        (properties, CStr::from_ptr(properties.name))
    };
    assert_eq!((count, properties.net_device_type), (1, 2));
    assert!((32 * properties.max_recvs).cast_unsigned().is_power_of_two());
    assert_eq!(properties.ptr_support, 7, "a window of several allocations needs DMA-BUF");
    assert!(properties.pci_path.is_null());
    assert_eq!(name, c"gin", "no interface of a network may have this name");
    assert_eq!((properties.rail_id, properties.plane_id), (-1, -1));
}

#[test]
fn initialisations_and_ends_in_any_number_leave_communicators_alone() {
    Engine::start(1);
    let comm = Comm::new(2);
    assert_eq!(init(), 0);
    for _ in 0..5 {
        // Safety: NCCL passes any context.
        assert_eq!(unsafe { (ncclRmaPlugin_v14.completion.finalize)(null_mut()) }, 0);
    }
    let table = comm.register(64, FLAG_NEVER_RESET);
    let request = comm.post(0, 1, &Put::signal(table.handles[0], 3, None));
    comm.wait(0, request);
    assert_eq!(table.word(1, 3), 1);
    comm.end(&[&table]);
}

#[test]
fn a_signal_comes_after_the_bytes_of_its_put_and_of_all_earlier_puts() {
    Engine::start(2);
    for share in [1, 2] {
        puts_come_before_their_signal(Comm::shared(2, share));
    }
}

fn puts_come_before_their_signal(comm: Comm) {
    let (window, table) = comm.register_with_table(1 << 20);
    for round in 1..=200u64 {
        // The last of a few puts has the signal, and the sizes take both lanes.
        for (slot, bytes) in [(0, 300 << 10), (1, 8), (2, 64)] {
            let offset = slot * (320 << 10);
            window.memory[0].write(offset + bytes - 8, &[round]).unwrap();
            let part = (window.handles[0], offset);
            let put = Put::new(part, part, bytes);
            comm.post(0, 1, &if slot == 2 { put.and(table.handles[0], 1, None) } else { put });
        }
        until("the signal rises", || word(&table, 1, 1).load(Ordering::Acquire) == round);
        for (slot, bytes) in [(0, 300 << 10), (1, 8), (2, 64)] {
            assert_eq!(window.word(1, (slot * (320 << 10) + bytes - 8) / 8), round, "slot {slot} of round {round}");
        }
    }
    comm.end(&[&window, &table]);
}

/// The steps of all lanes in any order, with a look at the receiver's memory after each.
#[test]
fn a_signal_covers_all_earlier_puts_after_every_step_of_any_lane() {
    let engine = Engine::start(3);
    for share in [1, 2] {
        signals_cover_puts_after_every_step(&engine, Comm::shared(2, share));
    }
}

fn signals_cover_puts_after_every_step(engine: &Engine, comm: Comm) {
    const OPERATIONS: u64 = 12;
    let mut words = vec![vec![0u64; 16]; 2];
    let host = comm.register_host(&mut words);
    for seed in 0..200 {
        let mut random = oorandom::Rand64::new(seed);
        let (window, table) = comm.register_with_table(OPERATIONS << 19);
        engine.hold(true);
        let (mut puts, mut covered, mut requests) = (Vec::new(), vec![0], Vec::new());
        let check = |puts: &[u64], covered: &[usize]| {
            let raised = word(&table, 1, 2).load(Ordering::Acquire) as usize;
            for offset in &puts[..covered[raised]] {
                assert_eq!(window.word(1, offset / 8), offset + 1, "seed {seed}: signal {raised} came too early");
            }
        };
        for operation in 0..OPERATIONS {
            let kind = random.rand_range(0..5);
            let (bytes, from) = match kind {
                0 => (0, window.handles[0]),
                1 => (8, host[0]),
                2 => (64, window.handles[0]),
                _ => (300 << 10, window.handles[0]),
            };
            let offset = (operation << 19) + (bytes.max(8) - 8);
            let mut put = Put::new((from, operation << 19), (window.handles[0], operation << 19), bytes);
            if kind == 1 {
                words[0][operation as usize] = offset + 1;
                put.from.1 = operation * 8;
            } else if kind > 1 {
                window.memory[0].write(offset, &[offset + 1]).unwrap();
            }
            if kind > 0 {
                puts.push(offset);
            }
            if kind == 0 || random.rand_range(0..2) == 0 {
                put = put.and(table.handles[0], 2, None);
                covered.push(puts.len());
            }
            requests.push(comm.post(0, 1, &put));
            for _ in 0..random.rand_range(0..6) {
                engine.step_held(&mut random);
                check(&puts, &covered);
            }
        }
        while engine.step_held(&mut random) {
            check(&puts, &covered);
        }
        assert!(requests.iter().all(|&request| comm.is_done(0, request)));
        assert_eq!(table.word(1, 2), covered.len() as u64 - 1);
        engine.hold(false);
    }
}

#[test]
fn a_signal_that_follows_nothing_does_not_overtake_the_signal_of_another_sender() {
    let engine = Engine::start(4);
    let comm = Comm::new(3);
    for seed in 0..50 {
        let mut random = oorandom::Rand64::new(seed);
        let (window, table) = comm.register_with_table(64);
        engine.hold(true);
        let part = (window.handles[0], 0);
        let mut last = 0;
        comm.post(0, 1, &Put::new(part, part, 64).and(table.handles[0], 5, Some(10)));
        comm.post(2, 1, &Put::signal(table.handles[2], 5, None));
        comm.post(1, 1, &Put::signal(table.handles[1], 5, None));
        while engine.step_held(&mut random) {
            let now = table.word(1, 5);
            assert!(now >= last, "seed {seed}: {now} after {last}");
            last = now;
        }
        assert_eq!(last, 12);
        engine.hold(false);
    }
}

/// Each rank puts to all, itself included, and raises a word of its own there and one that all share.
#[test]
fn words_that_several_ranks_raise_end_at_the_sum_and_never_fall() {
    const ROUNDS: u64 = 300;
    // The last two have several ranks on a GPU.
    for (seed, share) in [(0, 1), (1, 1), (2, 1), (3, 3), (4, 2)] {
        Engine::start(seed);
        let all = Comm::shared(3, share);
        let windows = (all.register(64 << 10, 0), all.register(256, FLAG_NEVER_RESET));
        let (comm, (window, table)) = (&all, (&windows.0, &windows.1));
        std::thread::scope(|scope| {
            for rank in 0..3 {
                scope.spawn(move || {
                    let mut random = oorandom::Rand32::new(seed * 3 + rank as u64);
                    let (from, to) = (window.handles[rank], window.handles[rank]);
                    let mut requests = Vec::new();
                    for round in 1..=ROUNDS {
                        for peer in 0..3 {
                            let slot = 4096 * (1 + rank as u64) + (round % 512) * 8;
                            window.memory[rank].write(slot, &[round]).unwrap();
                            let bytes = if random.rand_range(0..4) == 0 { 0 } else { 8 };
                            let put = Put::new((from, slot), (to, slot), bytes);
                            requests.push(comm.post(rank, peer, &put.and(table.handles[rank], rank as u64, None)));
                            let shared = Put::signal(table.handles[rank], 7, Some(round));
                            requests.push(comm.post(rank, peer, &shared));
                        }
                        if random.rand_range(0..8) == 0 {
                            requests.drain(..).for_each(|request| comm.wait(rank, request));
                        }
                    }
                    requests.drain(..).for_each(|request| comm.wait(rank, request));
                });
            }
            for rank in 0..3 {
                scope.spawn(move || {
                    let (mut last, total) = (0, 3 * ROUNDS * (ROUNDS + 1) / 2);
                    until("all have raised the shared word", || {
                        let now = word(table, rank, 7).load(Ordering::Acquire);
                        assert!(now >= last && now <= total, "{now} after {last}, of {total}");
                        last = now;
                        now == total
                    });
                });
            }
        });
        for rank in 0..3 {
            for sender in 0..3 {
                assert_eq!(table.word(rank, sender), ROUNDS);
            }
        }
        all.end(&[&windows.0, &windows.1]);
    }
}

#[test]
fn a_word_that_kernels_reset_is_added_to() {
    Engine::start(5);
    let comm = Comm::new(2);
    // A window of the program, and a table of contexts that reset their signals.
    let window = comm.register(64, 0);
    for expected in [3, 6] {
        let request = comm.post(0, 1, &Put::signal(window.handles[0], 2, Some(3)));
        comm.wait(0, request);
        assert_eq!(window.word(1, 2), expected);
    }
    word(&window, 1, 2).store(0, Ordering::SeqCst);
    let request = comm.post(0, 1, &Put::signal(window.handles[0], 2, None));
    comm.wait(0, request);
    assert_eq!(window.word(1, 2), 1);
    comm.end(&[&window]);
}

#[test]
fn an_increment_adds_one_whatever_its_value() {
    Engine::start(6);
    let comm = Comm::new(2);
    let table = comm.register(64, FLAG_NEVER_RESET);
    // The driver of these tests passes 99 with an increment.
    for (add, expected) in [(None, 1), (Some(5), 6), (None, 7), (Some(0), 7)] {
        let request = comm.post(1, 0, &Put::signal(table.handles[1], 0, add));
        comm.wait(1, request);
        assert_eq!(table.word(0, 0), expected);
    }
    comm.end(&[&table]);
}

#[test]
fn a_get_is_done_when_its_bytes_are_there_and_a_flush_at_once() {
    let engine = Engine::start(7);
    let comm = Comm::new(2);
    let window = comm.register(1 << 20, 0);
    engine.hold(true);
    window.memory[1].write(0, &[5u64]).unwrap();
    let request = comm.get(0, 1, (window.handles[0], 0), (window.handles[0], 8), 8);
    let mut flush = std::ptr::dangling_mut();
    // Safety: the table's functions, with valid pointers.
    let code =
        unsafe { (ncclRmaPlugin_v14.completion.iflush)(comm.contexts[0], 0, window.handles[0], 1, &raw mut flush) };
    assert_eq!((code, flush), (0, null_mut()));
    assert!(comm.is_done(0, flush) && !comm.is_done(0, request));
    engine.hold(false);
    comm.wait(0, request);
    assert_eq!(window.word(0, 1), 5);
    comm.end(&[&window]);
}

#[test]
fn values_of_the_host_may_change_as_soon_as_the_call_returns() {
    let engine = Engine::start(8);
    let comm = Comm::new(2);
    let (window, table) = comm.register_with_table(256);
    let mut words = vec![vec![0u64; 8]; 2];
    let host = comm.register_host(&mut words);
    engine.hold(true);
    let value = 0x1122_3344_5566_7788;
    // Every size, and addresses at which a value is written whole, in halves, and by a copy.
    let mut expected = vec![0u8; 256];
    let mut requests = Vec::new();
    for (index, bytes) in (0..24u64).map(|index| (index, index % 8 + 1)) {
        words[0][3] = value + index;
        let to = index * 8 + [0, 4, index % 4][index as usize / 8];
        let put = Put::new((host[0], 24), (window.handles[0], to), bytes);
        requests.push(comm.post(0, 1, &if index % 2 == 0 { put.and(table.handles[0], 0, None) } else { put }));
        expected[to as usize..(to + bytes) as usize].copy_from_slice(&words[0][3].to_le_bytes()[..bytes as usize]);
        words[0][3] = u64::MAX;
    }
    engine.hold(false);
    requests.into_iter().for_each(|request| comm.wait(0, request));
    let mut found = vec![0u8; 256];
    window.memory[1].read(0, &mut found).unwrap();
    assert_eq!((found, table.word(1, 0)), (expected, 12));
    // More than a value, and host memory as a destination, are refused.
    let (code, _) = comm.put(0, 1, &Put::new((host[0], 0), (window.handles[0], 0), 16));
    assert!(code != 0 && logged(&["rank 0", "to rank 1", "the limit is 8 bytes"]));
    let (code, _) = comm.put(0, 1, &Put::new((window.handles[0], 0), (host[0], 0), 8));
    assert!(code != 0 && logged(&["rank 0", "rank 1 has registered memory that GPUs do not reach"]));
    comm.deregister_all(&host);
    comm.end(&[&window, &table]);
}

#[test]
fn windows_in_host_memory_that_gpus_reach_take_puts_and_signals() {
    Engine::start(9);
    let comm = Comm::new(2);
    let window = comm.register(64, 0);
    // An allocation of the host begins at a multiple of 16, which these GPUs reach.
    let mut words = vec![vec![0u64; 8]; 2];
    let keep: Arc<dyn Any + Send + Sync> = Arc::new(());
    for words in &mut words {
        gpus().place(words.as_mut_ptr().expose_provenance() as u64, 64, Place::Host, &keep);
    }
    let host = comm.register_host(&mut words);
    window.memory[0].write(0, &[1u64, 2, 3]).unwrap();
    let put = Put::new((window.handles[0], 0), (host[0], 8), 24).and(host[0], 0, Some(4));
    let request = comm.post(0, 1, &put);
    comm.wait(0, request);
    let read = |index: usize| {
        // Safety: the words exist; the plugin's GPUs have written them.
        unsafe { words[1].as_ptr().add(index).read_volatile() }
    };
    assert_eq!([read(0), read(1), read(2), read(3), read(4)], [4, 1, 2, 3, 0]);
    comm.deregister_all(&host);
    comm.end(&[&window]);
}

#[test]
fn host_memory_that_gpus_do_not_reach_is_registered_as_a_source_of_values() {
    Engine::start(25);
    let comm = Comm::new(2);
    let window = comm.register(64, 0);
    let (mut words, keep) = (vec![3u64; 8], Arc::new(()) as Arc<dyn Any + Send + Sync>);
    // Not a multiple of 16, which the GPUs of these tests would reach.
    let address = (words.as_mut_ptr().expose_provenance() as u64).next_multiple_of(16) + 8;
    gpus().place(address, 32, Place::Host, &keep);
    let handles: Vec<_> = (0..2).map(|rank| comm.register_at(rank, address, 32, PTR_HOST, 0)).collect();
    assert!(logged(&["rank 0: requests can take values from it only", "multiples of 16 only"]));
    let (own, to) = ((handles[0], 8), (window.handles[0], 0));
    comm.wait(0, comm.post(0, 1, &Put::new(own, to, 8)));
    assert_eq!(window.word(1, 0), 3);
    assert_ne!(comm.put(0, 1, &Put::new(to, own, 8)).0, 0);
    assert_ne!(comm.put(0, 1, &Put::signal(handles[0], 0, None)).0, 0);
    comm.end(&[&window]);
}

#[test]
fn a_rank_puts_to_itself_with_other_gpus_and_without() {
    const WORDS: u64 = 5 << 16;
    for ranks in [1, 2] {
        Engine::start(26);
        let comm = Comm::new(ranks);
        let (window, table) = comm.register_with_table(WORDS * 16);
        let sent: Vec<u64> = (0..WORDS).collect();
        window.memory[0].write(0, &sent).unwrap();
        let (handle, half) = (window.handles[0], WORDS * 8);
        // Long and short ones, one after another, on both lanes and through their buffers.
        for (first, words) in [(0, WORDS - 9), (WORDS - 9, 8), (WORDS - 1, 1)] {
            let put = Put::new((handle, first * 8), (handle, half + first * 8), words * 8);
            comm.post(0, 0, &put.and(table.handles[0], 0, None));
        }
        until("all signals rise", || word(&table, 0, 0).load(Ordering::Acquire) == 3);
        let mut found = vec![0u64; WORDS as usize];
        window.memory[0].read(half, &mut found).unwrap();
        assert!(found == sent, "{ranks} ranks");
        comm.end(&[&window, &table]);
    }
}

#[test]
fn there_is_always_room_for_another_request() {
    let engine = Engine::start(10);
    let comm = Comm::new(2);
    let (window, table) = comm.register_with_table(64);
    engine.hold(true);
    let part = (window.handles[0], 0);
    let put = Put::new(part, part, 8).and(table.handles[0], 0, None);
    // Far more than the queues of NCCL hold, in both contexts.
    let requests: Vec<_> = (0..20_000).map(|index| comm.post(0, 1, &Put { context: index % 2, ..put })).collect();
    assert!(!requests.iter().any(|&request| comm.is_done(0, request)));
    engine.hold(false);
    // In any order, and more than once.
    for request in requests.iter().rev().chain(&requests) {
        comm.wait(0, *request);
    }
    assert_eq!(table.word(1, 0), 20_000);
    comm.end(&[&window, &table]);
}

#[test]
fn a_request_allocates_nothing_and_makes_no_lane() {
    work_at_once();
    let comm = Comm::new(2);
    let (window, table) = comm.register_with_table(1 << 20);
    let mut words = vec![vec![0u64; 8]; 2];
    let host = comm.register_host(&mut words);
    let part = (window.handles[0], 0);
    let operations = |peer: usize| {
        for bytes in [8, 64, 300 << 10] {
            let put = Put::new(part, part, bytes);
            comm.wait(0, comm.post(0, peer, &put));
            comm.wait(0, comm.post(0, peer, &put.and(table.handles[0], 0, None)));
            comm.wait(0, comm.post(0, peer, &put.and(window.handles[0], 0, None)));
            comm.wait(0, comm.get(0, peer, part, part, bytes));
        }
        comm.wait(0, comm.post(0, peer, &Put::signal(table.handles[0], 1, None)));
        comm.wait(0, comm.post(0, peer, &Put::new((host[0], 0), part, 8).and(table.handles[0], 0, Some(2))));
        assert_eq!(comm.progress(0), 0);
    };
    // The first requests find the regions of the peers, and wait for nobody.
    (0..2).for_each(operations);
    let before = (ALLOCATIONS.get(), LANES.load(Ordering::Relaxed));
    for _ in 0..50 {
        (0..2).for_each(operations);
    }
    assert_eq!(ALLOCATIONS.get(), before.0);
    comm.deregister_all(&host);
    comm.end(&[&window, &table]);
}
