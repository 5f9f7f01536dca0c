// SPDX-License-Identifier: MIT OR Apache-2.0
//! Models of products that send and receive: parts of rows, flags, slots, turns of blocks.

use super::{Cell, Setup, World, explore, models};
use gin_abi::Deadline;
use gin_device::sys::loom::{Arena, Loom, LoomWord};
use gin_ep_kernels::internal::{Turns, WORDS, count, flag, raise, slot, wait};
use loom::thread;
use std::sync::Arc;

/// Waits for a flag as long as it takes.
fn arrives(world: &World, flag: LoomWord, epoch: u64) {
    wait::<Loom>(&world.status, Deadline::NONE, flag, epoch).expect("nothing ends the wait");
}

/// The part of the window of one rank, with one peer: two slots of rows, and their flag.
struct Part {
    rows: [Cell; 2],
    arena: Arena,
}

/// Runs `launches` launches of a rank. `of` maps an epoch to the slot.
fn rank(world: &World, parts: &[Part; 2], me: usize, launches: u64, of: fn(u64) -> u64) {
    let (here, there) = (&parts[me], &parts[1 - me]);
    for epoch in 1..=launches {
        let slot = of(epoch) as usize;
        there.rows[slot].write(10 * epoch + me as u64);
        raise::<Loom>(there.arena.word(0), epoch, 0);
        arrives(world, here.arena.word(0), epoch);
        assert_eq!(here.rows[slot].read(), 10 * epoch + (1 - me) as u64, "a row of another launch");
    }
}

/// Runs two ranks.
pub fn ranks(launches: u64, of: fn(u64) -> u64) {
    let world = World::new(Setup::default());
    let part = || Part { rows: [Cell::new(), Cell::new()], arena: Arena::new([flag(0, 0)]) };
    let parts = Arc::new([part(), part()]);
    let other = {
        let (world, parts) = (world.clone(), parts.clone());
        thread::spawn(move || rank(&world, &parts, 1, launches, of))
    };
    rank(&world, &parts, 0, launches, of);
    other.join().unwrap();
}

models! {
    fn a_receiver_sees_the_rows_of_all_parts_of_a_tile_after_its_flag() {
        explore(2, || {
            let world = World::new(Setup { cells: 2, ..Setup::default() });
            let arena = Arc::new(Arena::new([0, flag(0, 0)]));
            let blocks = [0, 1].map(|number| {
                let (world, arena) = (world.clone(), arena.clone());
                thread::spawn(move || {
                    world.cells[number].write(7 + number as u64);
                    if count::<Loom>(arena.word(0), 4, 8) {
                        raise::<Loom>(arena.word(1), 1, 0);
                    }
                })
            });
            arrives(&world, arena.word(1), 1);
            assert_eq!([0, 1].map(|number| world.cells[number].read()), [7, 8]);
            for block in blocks {
                block.join().unwrap();
            }
        });
    }

    fn rows_of_two_slots_with_one_flag_are_not_overwritten_too_early() {
        explore(2, || ranks(3, slot));
    }

    fn each_tile_is_taken_once_in_each_of_two_launches() {
        explore(2, || {
            let arena = Arc::new(Arena::new([0; WORDS as usize]));
            for launch in 1..=2 {
                let block = move |arena: &Arena| {
                    let turns = Turns::<Loom>::new(arena.word(0));
                    assert_eq!(turns.ended() + 1, launch);
                    let mut tiles = 0;
                    while turns.take_tile() < 3 {
                        tiles += 1;
                    }
                    let mut parts = 0;
                    while turns.take_part() < 2 {
                        parts += 1;
                    }
                    turns.leave(2, launch);
                    (tiles, parts)
                };
                let other = {
                    let arena = arena.clone();
                    thread::spawn(move || block(&arena))
                };
                let mine = block(&arena);
                let other = other.join().unwrap();
                assert_eq!((mine.0 + other.0, mine.1 + other.1), (3, 2), "launch {launch}");
            }
        });
    }
}
