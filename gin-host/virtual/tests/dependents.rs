// SPDX-License-Identifier: MIT OR Apache-2.0
//! Grids that may start before the grid before them on their stream has ended.

mod common;

use common::{assert_documented, seeded_worlds, sync, worlds};
use gin_device::exec::watch::{self, Event};
use gin_device::sys::{GlobalWord, Word, let_dependents_start, wait_for_predecessor};
use gin_virtual::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Words that grids share.
type Words = Arc<[AtomicU64; 4]>;

fn word(words: &Words, index: usize) -> GlobalWord {
    // Safety: each grid keeps the words alive.
    unsafe { GlobalWord::new(words[index].as_ptr() as u64) }
}

/// Lets the next grid start in the middle, and stores 1 to word 0 at its end.
fn first(words: &Words) -> Grid {
    let words = words.clone();
    Grid::new("first", 2, 32, move || {
        let_dependents_start();
        for _ in 0..8 {
            word(&words, 1).load_relaxed_gpu();
        }
        sync();
        word(&words, 0).store_relaxed_gpu(1);
    })
}

/// Adds the value of word 0 before and after the wait to words 2 and 3.
fn second(words: &Words) -> Grid {
    let words = words.clone();
    let look = move || {
        let early = word(&words, 0).load_relaxed_gpu();
        wait_for_predecessor();
        word(&words, 2).add_relaxed_gpu(early);
        word(&words, 3).add_relaxed_gpu(word(&words, 0).load_relaxed_gpu());
    };
    Grid::new("second", 2, 32, look).dependent()
}

fn run(world: &World, grids: Vec<Grid>) -> Result<Result<(), LaunchError>, WorldError> {
    let gpu = world.device(DeviceConfig::default());
    let host = move || -> Result<(), LaunchError> {
        let tickets = grids.into_iter().map(|grid| gpu.launch(StreamId(0), grid)).collect::<Result<Vec<_>, _>>()?;
        tickets.iter().map(LaunchTicket::wait).fold(Ok(()), Result::and)
    };
    Ok(world.run(vec![host])?.remove(0))
}

#[test]
fn a_dependent_grid_may_see_old_values_before_it_waits_and_never_afterwards() {
    let (mut old, mut new) = (0, 0);
    for world in worlds() {
        let words = Words::default();
        run(&world, vec![first(&words), second(&words)]).unwrap().unwrap();
        match words[2].load(Ordering::Relaxed) {
            64 => new += 1,
            _ => old += 1,
        }
        assert_eq!(words[3].load(Ordering::Relaxed), 64);
    }
    assert!(old > 0 && new > 0, "{old} worlds with an old value, {new} with new ones only");
}

#[test]
fn without_the_trigger_a_dependent_grid_starts_when_all_blocks_have_ended() {
    for world in worlds() {
        let words = Words::default();
        let silent = {
            let words = words.clone();
            Grid::new("silent", 2, 32, move || word(&words, 0).store_relaxed_gpu(1))
        };
        run(&world, vec![silent, second(&words)]).unwrap().unwrap();
        assert_eq!(words[2].load(Ordering::Relaxed), 64);
    }
}

#[test]
fn a_grid_that_is_not_dependent_starts_after_the_end() {
    for world in worlds() {
        let words = Words::default();
        let second = Grid { dependent: false, ..second(&words) };
        run(&world, vec![first(&words), second]).unwrap().unwrap();
        assert_eq!(words[2].load(Ordering::Relaxed), 64);
    }
}

/// At most two grids run at a time, so each of a long chain sees the values of all before it.
#[test]
fn a_chain_of_dependent_grids_counts_without_atomic_operations() {
    for world in worlds() {
        let words = Words::default();
        let link = |_| {
            let words = words.clone();
            let body = move || {
                wait_for_predecessor();
                let seen = word(&words, 0).load_relaxed_gpu();
                let_dependents_start();
                word(&words, 1).load_relaxed_gpu();
                word(&words, 0).store_relaxed_gpu(seen + 1);
            };
            Grid::new("link", 1, 1, body).dependent()
        };
        run(&world, (0..20).map(link).collect()).unwrap().unwrap();
        assert_eq!(words[0].load(Ordering::Relaxed), 20);
    }
}

#[test]
fn a_thread_that_ends_without_the_wait_fails_its_grid_in_every_world() {
    let message = "it ended without a call of `wait_for_predecessor`, and its grid was launched as dependent";
    assert_documented(message);
    for world in worlds() {
        let words = Words::default();
        let grid = Grid::new("hasty", 1, 32, || ()).dependent();
        let error = run(&world, vec![first(&words), grid]).unwrap().unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, LaunchError::Misuse { .. }), "{text}");
        assert!(text.contains("grid `hasty`") && text.contains(message), "{text}");
    }
}

#[test]
fn a_grid_waits_in_vain_for_one_that_never_ends_and_the_report_says_so() {
    let words = Words::default();
    let endless = {
        let words = words.clone();
        Grid::new("endless", 1, 1, move || {
            let_dependents_start();
            while word(&words, 0).load_relaxed_gpu() == 0 {
                gin_device::sys::pause(100);
            }
        })
    };
    let mut told = false;
    for seed in 0..20 {
        let mut config = SeededConfig::new(seed);
        config.stall_steps = 20_000;
        let world = World::seeded(config);
        let error = run(&world, vec![endless.clone(), second(&words)]).unwrap_err().to_string();
        told |= error.contains("waiting for the grid before it on its stream at");
    }
    assert!(told, "no report names the wait");
}

/// A window of one word, written by the first grid after its trigger and read by the second, before or after its wait.
fn race(world: &World, waits_first: bool) -> Option<Box<Race>> {
    let memory: Arc<AtomicU64> = Arc::default();
    let address = memory.as_ptr() as u64;
    let write = Grid::new("writer", 1, 1, move || {
        let_dependents_start();
        watch::event(Event::Data { address, bytes: 8, writes: true });
    });
    let read = Grid::new("reader", 1, 1, move || {
        if waits_first {
            wait_for_predecessor();
        }
        watch::event(Event::Data { address, bytes: 8, writes: false });
        if !waits_first {
            wait_for_predecessor();
        }
    });
    let gpu = world.device(DeviceConfig::default());
    let host = move || -> Result<(), LaunchError> {
        watch::event(Event::Window { address, bytes: 8, window: 0, rank: 0, table: 0 });
        let first = gpu.launch(StreamId(0), write)?;
        gpu.launch(StreamId(0), read.dependent())?.wait()?;
        first.wait()
    };
    let outcome = world.run(vec![host]);
    drop(memory);
    match outcome {
        Ok(results) => {
            assert_eq!(results, [Ok(())]);
            None
        }
        Err(WorldError::Race(race)) => Some(race),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn the_detector_finds_a_read_before_the_wait_whenever_the_grid_starts() {
    for seed in 0..20 {
        let world = || World::seeded(SeededConfig::new(seed).races(true));
        let found = race(&world(), false).unwrap_or_else(|| panic!("seed {seed}: no race"));
        assert!(found.to_string().contains("grid `reader`"), "{found}");
        assert_eq!(race(&world(), true), None, "seed {seed}");
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let logs = || {
        let run_one = |world: &World| {
            let words = Words::default();
            run(world, vec![first(&words), second(&words), second(&words)]).unwrap().unwrap();
            world.event_log().to_string()
        };
        seeded_worlds(3).iter().map(run_one).collect::<Vec<_>>()
    };
    assert_eq!(logs(), logs());
}
