// SPDX-License-Identifier: MIT OR Apache-2.0
//! The detector of races: shared memory, barriers, words, launches.

mod common;

use gin_device::exec::watch::{self, Event};
use gin_device::prelude::*;
use gin_device::sys::{Global, GlobalWord, Memory as _, Word};
use gin_virtual::{
    Actor, DeviceConfig, Grid, LaunchError, Race, RaceMemory, RaceOperation, SeededConfig, StreamId, World, WorldError,
};
use std::sync::Arc;

shared! { static CELLS: [u64; 64]; }

/// Stores to an element of shared memory, as its types do.
#[track_caller]
fn store(index: u32) {
    let cell = CELLS.as_mut_ptr().cast::<u64>().wrapping_add(index as usize);
    watch::write(cell);
    // Safety: in range. The tests have races on purpose, but threads of a seeded world run one at a time.
    unsafe { cell.write_volatile(1) }
}

/// Loads an element of shared memory.
#[track_caller]
fn load(index: u32) {
    let cell = CELLS.as_mut_ptr().cast::<u64>().wrapping_add(index as usize);
    watch::read(cell);
    // Safety: as above.
    let _ = unsafe { cell.read_volatile() };
}

/// Runs grids of one block of 64 threads one after the other on two streams; returns the race, if there is one.
fn race_of(seed: u64, grids: Vec<(u32, Box<dyn Fn() + Send + Sync>)>) -> Option<Box<Race>> {
    let world = World::seeded(SeededConfig::new(seed).races(true));
    let gpu = world.device(DeviceConfig::default());
    let host = move || -> Result<(), LaunchError> {
        let mut tickets = Vec::new();
        for (stream, body) in grids {
            tickets.push(gpu.launch(StreamId(stream), Grid::new("racy", 1, 64, body))?);
        }
        tickets.iter().try_for_each(|ticket| ticket.wait())
    };
    match world.run(vec![host]) {
        Ok(results) => {
            assert_eq!(results, [Ok(())]);
            None
        }
        Err(WorldError::Race(race)) => Some(race),
        Err(error) => panic!("{error}"),
    }
}

fn one(seed: u64, body: impl Fn() + Send + Sync + 'static) -> Option<Box<Race>> {
    race_of(seed, vec![(0, Box::new(body))])
}

#[test]
fn shared_memory_without_a_barrier_between_is_found_with_both_lines() {
    let body = |syncs: bool| {
        move || {
            let me = thread_in_block();
            store(me);
            if syncs {
                Block.sync();
            }
            load((me + 1) % 64);
        }
    };
    for seed in 0..10 {
        assert_eq!(one(seed, body(true)), None);
        let race = one(seed, body(false)).unwrap_or_else(|| panic!("seed {seed}: no race"));
        let Race { memory, offset, first, second } = &*race;
        assert_eq!(*memory, RaceMemory::Shared { rank: 0, block: 0, dynamic: false });
        let mut found = [(first.operation, first.site.line()), (second.operation, second.site.line())];
        found.sort_by_key(|(_, line)| *line);
        let here = |text: &str| {
            (1..).zip(include_str!("races.rs").lines()).find(|(_, line)| line.trim() == text).map(|(at, _)| at)
        };
        let expected = [
            (RaceOperation::Write, here("store(me);").unwrap()),
            (RaceOperation::Read, here("load((me + 1) % 64);").unwrap()),
        ];
        assert_eq!(found, expected);
        let thread = |actor: &Actor| match actor {
            Actor::Thread { thread, .. } => *thread,
            other => panic!("{other}"),
        };
        let (writer, reader) = match first.operation {
            RaceOperation::Write => (thread(&first.actor), thread(&second.actor)),
            _ => (thread(&second.actor), thread(&first.actor)),
        };
        assert_eq!((writer, u64::from(writer) * 8), ((reader + 1) % 64, *offset));
        let text = race.to_string();
        let (_, missing) = text.rsplit_once(": ").unwrap();
        let docs = include_str!("../../../docs/kernels.md").split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(
            docs.contains(missing) && include_str!("../../../gin-device/src/misuse.rs").contains(missing),
            "{text}"
        );
    }
}

#[test]
fn an_arrival_orders_what_was_before_it_and_nothing_after_it() {
    let body = |stores_late: bool| {
        move || {
            // Safety: both warps come once.
            let Some(full) = (unsafe { Arrivals::new(1, 2) }) else { return };
            if thread_in_block() < 32 {
                if !stores_late {
                    store(thread_in_block());
                }
                full.arrive();
                if stores_late {
                    store(thread_in_block());
                }
            } else {
                full.wait();
                load(thread_in_block() - 32);
            }
        }
    };
    for seed in 0..10 {
        assert_eq!(one(seed, body(false)), None);
        assert!(one(seed, body(true)).is_some(), "seed {seed}");
    }
}

#[test]
fn accesses_through_the_types_of_shared_memory_are_found_with_the_lines_of_their_calls() {
    for seed in 0..10 {
        let (add, read) = (line!() + 2, line!() + 4);
        let race = one(seed, || {
            CELLS.array().add(7, 1);
            if thread_in_block() == 40 {
                let _ = CELLS.array().read(7);
            }
        });
        let race = race.unwrap_or_else(|| panic!("seed {seed}: no race"));
        let mut found = [&race.first, &race.second].map(|access| (access.site.file(), access.site.line()));
        found.sort_by_key(|(_, line)| *line);
        assert_eq!(found, [add, read].map(|line| (file!(), line)), "{race}");
        // Additions alone are atomic, and a barrier orders the rest.
        let race = one(seed, || {
            CELLS.array().add(7, 1);
            Block.sync();
            let _ = CELLS.array().read(7);
        });
        assert_eq!(race, None);
    }
}

#[test]
fn a_barrier_of_a_warp_orders_its_lanes_only() {
    for seed in 0..10 {
        let race = one(seed, || {
            let me = thread_in_block();
            store(me);
            Warp.sync();
            load(me ^ 1);
        });
        assert_eq!(race, None);
        let race = one(seed, || {
            let me = thread_in_block();
            store(me);
            Warp.sync();
            load(me ^ 32);
        });
        assert!(race.is_some(), "seed {seed}");
    }
}

#[test]
fn votes_shuffles_matches_and_reductions_of_lanes_pass_on_values_but_order_no_memory() {
    type Call = (&'static str, fn(u32));
    let calls: [Call; 6] = [
        ("any", |lane| assert!(Warp.any(lane == 0))),
        ("ballot", |lane| assert_eq!(Warp.ballot(lane == 0), 1)),
        ("shuffle", |lane| assert_eq!(Warp.shuffle(lane, 0), 0)),
        ("shuffle_xor", |lane| assert_eq!(Warp.shuffle_xor(lane, 1), lane ^ 1)),
        ("match_any", |lane| assert_eq!(Warp.match_any(lane), 1 << lane)),
        ("reduce_add", |lane| assert_eq!(Warp.reduce_add(lane), 31 * 16)),
    ];
    let body = |call: fn(u32), syncs: bool| {
        move || {
            let lane = thread_in_block();
            if lane >= 32 {
                return;
            }
            if lane == 0 {
                store(5);
            }
            // The other lanes know that the first one has stored, but have no order with the store.
            call(lane);
            if syncs {
                Warp.sync();
            }
            if lane == 7 {
                load(5);
            }
        }
    };
    for (seed, (name, call)) in (0..3).flat_map(|seed| calls.map(|call| (seed, call))) {
        assert!(one(seed, body(call, false)).is_some(), "{name} alone, seed {seed}");
        assert_eq!(one(seed, body(call, true)), None, "{name} and a sync, seed {seed}");
    }
    // Calls that imply a sync order memory too.
    for seed in 0..3 {
        let race = one(seed, || {
            store(thread_in_block());
            assert!(Warp.sync_or(thread_in_block().is_multiple_of(32)));
            load(thread_in_block() ^ 1);
        });
        assert_eq!(race, None, "sync_or, seed {seed}");
    }
}

/// Memory that is watched as a window.
struct Watched(Vec<u64>);

impl Watched {
    fn new() -> Arc<Self> {
        Arc::new(Watched(vec![0; 16]))
    }

    /// Declares the memory. A thread of the world calls.
    fn declare(&self) {
        watch::event(Event::Window { address: self.0.as_ptr() as u64, bytes: 128, window: 4, rank: 1, table: 0 });
    }

    fn write(&self, index: usize) {
        watch::write(&raw const self.0[index]);
    }

    fn read(&self, index: usize) {
        watch::read(&raw const self.0[index]);
    }

    fn word(&self, index: usize) -> GlobalWord {
        // Safety: a word of a vector that lives as long as the world; all accesses are atomic.
        unsafe { GlobalWord::new(&raw const self.0[index] as u64) }
    }
}

/// Runs two grids of one thread that matters each, on two streams. The second begins when it likes.
fn two(
    seed: u64,
    first: impl Fn(&Watched) + Send + Sync + 'static,
    second: impl Fn(&Watched) + Send + Sync + 'static,
) -> Option<Box<Race>> {
    let memory = Watched::new();
    let world = World::seeded(SeededConfig::new(seed).races(true));
    let gpu = world.device(DeviceConfig::default());
    let host = move || -> Result<(), LaunchError> {
        memory.declare();
        let other = memory.clone();
        let first = gpu.launch(StreamId(0), Grid::new("first", 1, 1, move || first(&memory)))?;
        let second = gpu.launch(StreamId(1), Grid::new("second", 1, 1, move || second(&other)))?;
        first.wait()?;
        second.wait()
    };
    match world.run(vec![host]) {
        Ok(_) => None,
        Err(WorldError::Race(race)) => Some(race),
        Err(error) => panic!("{error}"),
    }
}

fn wait(word: GlobalWord) {
    while word.load_relaxed_sys() == 0 {
        Global::pause(64);
    }
}

#[test]
fn a_release_and_an_acquire_order_two_threads_and_each_is_needed() {
    for seed in 0..10 {
        let write = |release: bool| {
            move |memory: &Watched| {
                memory.write(3);
                if release {
                    Global::fence_release_sys();
                }
                memory.word(0).store_relaxed_sys(1);
            }
        };
        let read = |acquire: bool| {
            move |memory: &Watched| {
                wait(memory.word(0));
                if acquire {
                    Global::fence_acquire_sys();
                }
                memory.read(3);
            }
        };
        assert_eq!(two(seed, write(true), read(true)), None);
        for (release, acquire) in [(true, false), (false, true), (false, false)] {
            let race = two(seed, write(release), read(acquire)).unwrap_or_else(|| panic!("{release} {acquire}"));
            assert_eq!((race.offset, race.memory.to_string()), (24, "window 4 of rank 1".to_owned()));
        }
    }
}

#[test]
fn what_comes_after_a_release_is_not_covered_by_it() {
    for seed in 0..10 {
        let race = two(
            seed,
            |memory| {
                memory.word(0).store_release_sys(1);
                memory.write(3);
                memory.word(1).store_relaxed_sys(1);
            },
            |memory| {
                wait(memory.word(1));
                let _ = memory.word(0).load_acquire_sys();
                memory.read(3);
            },
        );
        assert!(race.is_some(), "seed {seed}");
    }
}

#[test]
fn a_word_that_two_threads_raise_covers_both() {
    for seed in 0..10 {
        let raise = |index: usize| {
            move |memory: &Watched| {
                memory.write(index);
                memory.word(0).add_release_sys(1);
                while memory.word(0).load_relaxed_sys() != 2 {
                    Global::pause(64);
                }
                Global::fence_acquire_sys();
                memory.read(7 - index);
            }
        };
        assert_eq!(two(seed, raise(3), raise(4)), None, "seed {seed}");
    }
}

#[test]
fn a_plain_access_beside_an_atomic_one_is_a_race_and_two_atomics_are_none() {
    for seed in 0..5 {
        assert!(two(seed, |memory| memory.word(2).store_relaxed_sys(1), |memory| memory.read(2)).is_some());
        assert!(
            two(
                seed,
                |memory| memory.write(2),
                |memory| {
                    let _ = memory.word(2).load_relaxed_sys();
                }
            )
            .is_some()
        );
        let add = |memory: &Watched| {
            let _ = memory.word(2).add_relaxed_gpu(1);
        };
        assert_eq!(two(seed, add, add), None);
    }
}

#[test]
fn grids_of_a_stream_are_ordered_and_memory_that_is_forgotten_is_not_watched() {
    for seed in 0..5 {
        let memory = Watched::new();
        let world = World::seeded(SeededConfig::new(seed).races(true));
        let gpu = world.device(DeviceConfig::default());
        let host = move || {
            memory.declare();
            for stream in [0, 0, 1] {
                if stream == 1 {
                    watch::event(Event::Forget { address: memory.0.as_ptr() as u64, bytes: 8 });
                }
                let memory = memory.clone();
                gpu.launch(StreamId(stream), Grid::new("write", 1, 1, move || memory.write(1)))?;
            }
            Ok::<_, LaunchError>(())
        };
        assert_eq!(world.run(vec![host]).unwrap(), [Ok(())], "seed {seed}");
    }
}
