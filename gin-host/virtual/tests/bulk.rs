// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bulk copies: a protocol that waits and fences as it must moves the right bytes in every schedule, and each mistake
//! in it is wrong bytes for some seed.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use common::*;
use gin_device::coop::{Block, Coop};
use gin_device::exec::watch::{self, Event};
use gin_device::shared;
use gin_device::shared::dynamic_array;
use gin_device::sys::bulk::{self, Mbarrier};
use gin_device::sys::data::load_relaxed_sys_u64;
use gin_device::sys::{self, Global, GlobalWord, Memory, Word};
use gin_virtual::*;

shared! { static FULL: [u64; 2]; }

/// Threads of a block.
const THREADS: u32 = 64;
/// Units of 16 bytes of a stage.
const UNITS: usize = 96;
/// Chunks of a stream.
const CHUNKS: usize = 7;
/// Nanoseconds after which a wait gives up.
const LIMIT_NS: u64 = 2_000_000;
/// The bits that threads change in each unit on its way.
const CHANGE: u128 = 0x1111_2222_3333_4444_5555_6666_7777_8888;
/// Seeds among which one must show a mistake.
const SEEDS: u64 = 24;

/// The mistakes of [`send`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mistake {
    None,
    /// The mbarrier does not expect the bytes.
    NoExpect,
    /// Nobody waits for the mbarrier.
    NoPhaseWait,
    /// All wait for the phase before.
    WrongParity,
    /// No thread fences between its stores and the copy of them.
    NoProxyFence,
    /// Only the thread that starts the copy fences, before the others have met it.
    OneProxyFence,
    /// The copy starts before the other threads have stored.
    NoBarrier,
    /// The source of a copy is overwritten without a wait.
    NoReadWait,
    /// The flag is raised when the sources are read.
    OnlyReadWait,
    /// The flag is raised without a wait.
    NoWriteWait,
    /// The groups are not ended, so that no wait is for them.
    NoCommit,
    /// A copy overwrites stores that no fence has shown.
    UnfencedStores,
    /// The block ends at once.
    NoEnd,
}

const MISTAKES: [Mistake; 12] = [
    Mistake::NoExpect,
    Mistake::NoPhaseWait,
    Mistake::WrongParity,
    Mistake::NoProxyFence,
    Mistake::OneProxyFence,
    Mistake::NoBarrier,
    Mistake::NoReadWait,
    Mistake::OnlyReadWait,
    Mistake::NoWriteWait,
    Mistake::NoCommit,
    Mistake::UnfencedStores,
    Mistake::NoEnd,
];

/// Global memory of one run.
struct GlobalMemory {
    from: Vec<u128>,
    to: Vec<u128>,
    flag: u64,
}

/// The addresses of a [`GlobalMemory`].
#[derive(Clone, Copy)]
struct Places {
    from: u64,
    to: u64,
    flag: GlobalWord,
}

fn value(unit: usize) -> u128 {
    (unit as u128 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835)
}

/// Waits until a phase is complete. Returns false if the limit passed first.
fn wait(barrier: Mbarrier, parity: u32) -> bool {
    let start = sys::clock_ns();
    while !barrier.try_wait(parity) {
        if sys::clock_ns() - start > LIMIT_NS {
            return false;
        }
        pause(50);
    }
    true
}

/// Streams all chunks from global to shared memory, changes them there and sends them on to global memory; then raises
/// the flag. Two stages take turns.
fn send(places: Places, mistake: Mistake) {
    let full = FULL.array();
    let [even, odd] = [Mbarrier::at(&full, 0), Mbarrier::at(&full, 1)];
    let stages = dynamic_array::<u128>(0, 2 * UNITS);
    let bytes = (16 * UNITS) as u32;
    let leads = Block.elect();
    if leads {
        // Safety: nobody uses the words yet.
        unsafe {
            even.init(1);
            odd.init(1);
        }
    }
    if mistake == Mistake::UnfencedStores {
        Block.stripe(stages.len()).for_each(|unit| stages.write(unit, 0));
    }
    sync();
    let stage = |chunk: usize| stages.address_of(chunk % 2 * UNITS);
    let barrier = |chunk: usize| if chunk.is_multiple_of(2) { even } else { odd };
    let load = |chunk: usize| {
        let from = places.from + u64::from(bytes) * chunk as u64;
        // Safety: the stage is free, or there is a mistake on purpose.
        unsafe {
            match mistake {
                Mistake::NoExpect => barrier(chunk).arrive(),
                _ => barrier(chunk).arrive_expect_tx(bytes),
            }
            bulk::copy_to_shared(stage(chunk), from, bytes, barrier(chunk));
        }
    };
    if leads {
        load(0);
    }
    for chunk in 0..CHUNKS {
        if leads && chunk + 1 < CHUNKS {
            if mistake != Mistake::NoReadWait {
                bulk::wait_group_read::<0>();
            }
            load(chunk + 1);
        }
        let parity = (chunk / 2 % 2) as u32;
        let parity = if mistake == Mistake::WrongParity { 1 - parity } else { parity };
        if mistake != Mistake::NoPhaseWait && !wait(barrier(chunk), parity) {
            return;
        }
        for unit in Block.stripe(UNITS) {
            let at = chunk % 2 * UNITS + unit;
            stages.write(at, stages.read(at) ^ CHANGE);
        }
        if mistake != Mistake::NoProxyFence && (leads || mistake != Mistake::OneProxyFence) {
            bulk::fence_proxy_async_shared();
        }
        if mistake != Mistake::NoBarrier {
            sync();
        }
        if leads {
            // Safety: the bytes of the stage and of the chunk.
            unsafe { bulk::copy_to_global(places.to + u64::from(bytes) * chunk as u64, stage(chunk), bytes) };
            if mistake != Mistake::NoCommit {
                bulk::commit_group();
            }
        }
    }
    if leads && mistake != Mistake::NoEnd {
        match mistake {
            Mistake::OnlyReadWait => bulk::wait_group_read::<0>(),
            Mistake::NoWriteWait => {}
            _ => bulk::wait_group::<0>(),
        }
    }
    if leads {
        places.flag.store_release_sys(1);
        // The block stays until all copies are over, so that its end completes none of them.
        if !matches!(mistake, Mistake::NoEnd | Mistake::NoCommit) {
            bulk::wait_group::<0>();
        }
    }
}

/// Waits for the flag and counts the units that differ.
fn receive(places: Places) -> u64 {
    let start = sys::clock_ns();
    while places.flag.load_relaxed_sys() != 1 {
        if sys::clock_ns() - start > 4 * LIMIT_NS {
            return 1;
        }
        pause(50);
    }
    Global::fence_acquire_sys();
    let mut wrong = 0;
    for unit in 0..CHUNKS * UNITS {
        let word = |half: u64| {
            let address = (places.to + 16 * unit as u64 + 8 * half) as usize;
            // Safety: in the memory of the run.
            u128::from(unsafe { load_relaxed_sys_u64(std::ptr::with_exposed_provenance(address)) })
        };
        wrong += u64::from(word(1) << 64 | word(0) != value(unit) ^ CHANGE);
    }
    wrong
}

/// Runs a sender and a receiver. Returns the number of wrong units, or the error of the grid.
fn wrong_units(world: &World, mistake: Mistake) -> Result<u64, LaunchError> {
    outcome(world, mistake).unwrap()
}

/// Does the same, or returns the error of the world.
fn outcome(world: &World, mistake: Mistake) -> Result<Result<u64, LaunchError>, WorldError> {
    let from: Vec<u128> = (0..CHUNKS * UNITS).map(value).collect();
    let mut memory = Box::new(GlobalMemory { to: vec![0; from.len()], from, flag: 0 });
    let places = Places {
        from: memory.from.as_ptr().expose_provenance() as u64,
        to: memory.to.as_mut_ptr().expose_provenance() as u64,
        // Safety: the memory outlives the grid, which `run_grid` waits for.
        flag: unsafe { GlobalWord::new((&raw mut memory.flag).expose_provenance() as u64) },
    };
    let wrong = Arc::new(AtomicU64::new(0));
    let sum = wrong.clone();
    let body = move || match block() {
        0 => send(places, mistake),
        _ if thread() == 0 => {
            sum.fetch_add(receive(places), SeqCst);
        }
        _ => {}
    };
    let grid = Grid::new("stream", 2, THREADS, body).dynamic_shared(32 * UNITS);
    let gpu = world.device(DeviceConfig::default());
    let host = || {
        for (window, address) in (0..).zip([places.from, places.to]) {
            watch::event(Event::Window { address, bytes: 16 * (CHUNKS * UNITS) as u64, window, rank: 0, table: 0 });
        }
        gpu.launch(StreamId(0), grid.clone())?.wait()
    };
    let result = world.run(vec![host])?.remove(0);
    drop(memory);
    Ok(result.map(|()| wrong.load(SeqCst)))
}

#[test]
fn a_stream_that_waits_and_fences_moves_the_right_bytes_in_every_schedule() {
    for world in worlds() {
        assert_eq!(wrong_units(&world, Mistake::None), Ok(0), "{world:?}");
    }
    for seed in 0..4 * SEEDS {
        assert_eq!(wrong_units(&World::seeded(SeededConfig::new(seed)), Mistake::None), Ok(0), "seed {seed}");
    }
}

#[test]
fn a_stream_that_waits_and_fences_has_no_race() {
    for seed in 0..SEEDS {
        let world = World::seeded(SeededConfig::new(seed).races(true));
        assert_eq!(wrong_units(&world, Mistake::None), Ok(0), "seed {seed}");
    }
}

#[test]
fn a_copy_that_starts_before_other_threads_have_stored_is_a_race() {
    let world = World::seeded(SeededConfig::new(1).races(true));
    let Err(WorldError::Race(race)) = outcome(&world, Mistake::NoBarrier) else { panic!("no race") };
    assert!(matches!(race.memory, RaceMemory::Shared { dynamic: true, .. }), "{race}");
    assert!(race.to_string().contains("tests/bulk.rs"), "{race}");
}

#[test]
fn each_mistake_in_a_stream_is_wrong_bytes_for_some_seed() {
    for mistake in MISTAKES {
        let shows = |seed| wrong_units(&World::seeded(SeededConfig::new(seed).races(false)), mistake) != Ok(0);
        let first = (0..SEEDS).find(|seed| shows(*seed));
        assert!(first.is_some(), "{mistake:?} shows for none of {SEEDS} seeds");
        println!("{mistake:?}: seed {first:?}, {} of {SEEDS}", (0..SEEDS).filter(|seed| shows(*seed)).count());
    }
}

#[test]
fn the_same_seed_copies_at_the_same_moments() {
    let log = |seed| {
        let world = World::seeded(SeededConfig::new(seed).log(LogMode::Hash));
        assert_eq!(wrong_units(&world, Mistake::None), Ok(0));
        world.event_log().hash()
    };
    assert_eq!(log(5), log(5));
    assert_ne!(log(5), log(6));
}

#[test]
fn a_copy_from_outside_of_shared_memory_ends_the_grid() {
    let world = World::seeded(SeededConfig::new(1));
    let grid = Grid::new("outside", 1, 1, || {
        let own = dynamic_array::<u128>(0, 4);
        // Safety: refused.
        unsafe { bulk::copy_to_global(0x1000, own.address_of(3), 32) };
    });
    let error = run_grid(&world, DeviceConfig::default(), &grid.dynamic_shared(64)).unwrap_err();
    assert!(error.to_string().contains("the block has no 32 bytes of shared memory at"), "{error}");
}

#[test]
fn bytes_that_no_initialised_mbarrier_expects_end_the_grid() {
    let world = World::seeded(SeededConfig::new(1));
    let memory = vec![0_u128; 4];
    let from = memory.as_ptr().expose_provenance() as u64;
    let grid = Grid::new("unknown", 1, 1, move || {
        let stage = dynamic_array::<u128>(0, 4);
        // Safety: refused when the bytes have come.
        unsafe { bulk::copy_to_shared(stage.address(), from, 64, Mbarrier::at(&FULL.array(), 0)) };
        pause(LIMIT_NS as u32);
    });
    let error = run_grid(&world, DeviceConfig::default(), &grid.dynamic_shared(64)).unwrap_err();
    assert!(error.to_string().contains("an mbarrier is used that is not initialised"), "{error}");
    drop(memory);
}
