// SPDX-License-Identifier: MIT OR Apache-2.0
//! Models of products that send and receive: parts of rows, flags, buffers, the tile scheduler.

use super::{Cell, Reached, Setup, World, explore, models};
use gin_abi::Deadline;
use gin_device::sys::Memory;
use gin_device::sys::loom::{Arena, Loom, LoomWord};
use gin_ep_kernels::internal::{Lists, TileScheduler, WORDS, count, flag, look, raise, wait};
use loom::thread;
use std::sync::Arc;

/// Waits for a flag as long as it takes.
fn arrives(world: &World, flag: LoomWord, epoch: u64) {
    wait::<Loom>(&world.status, Deadline::NONE, flag, epoch).expect("nothing ends the wait");
}

/// The part of the window of one rank, with one peer: two buffers of rows, and their flag.
struct Part {
    rows: [Cell; 2],
    arena: Arena,
}

/// Runs `launches` launches of a rank. `of` maps an epoch to the buffer.
fn rank(world: &World, parts: &[Part; 2], me: usize, launches: u64, of: fn(u64) -> u64) {
    let (here, there) = (&parts[me], &parts[1 - me]);
    for epoch in 1..=launches {
        let buffer = of(epoch) as usize;
        there.rows[buffer].write(10 * epoch + me as u64);
        raise::<Loom>(there.arena.word(0), epoch, 0);
        arrives(world, here.arena.word(0), epoch);
        assert_eq!(here.rows[buffer].read(), 10 * epoch + (1 - me) as u64, "a row of another launch");
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

/// Looks at a flag until it is raised.
fn looks(flag: LoomWord, epoch: u64) {
    while look::<Loom>(flag, epoch).is_none() {
        Loom::pause(0);
    }
}

/// The words of a launch whose blocks list rows, of one source.
const LISTS: usize = WORDS as usize + Lists::<Loom>::words(1) as usize;

/// Returns these words.
fn lists(arena: &Arena) -> (TileScheduler<Loom>, Lists<Loom>) {
    (TileScheduler::new(arena.word(0)), Lists::new(arena.word(WORDS as usize)))
}

/// Takes units until all `units` are taken, and writes a cell for each.
fn list(world: &World, (scheduler, lists): &(TileScheduler<Loom>, Lists<Loom>), units: u64, launch: u64) {
    loop {
        let unit = lists.take(0);
        if unit >= units {
            return;
        }
        world.cells[1 + unit as usize].write(10 * launch + unit);
        lists.finish(true, units, 1, scheduler, launch);
    }
}

models! {
    fn blocks_that_list_rows_see_those_of_the_source_and_the_lists_of_each_other() {
        explore(2, || {
            let world = World::new(Setup { cells: 3, ..Setup::default() });
            let arena = Arc::new(Arena::new([0; LISTS + 1]));
            // The source raises its flag; the block that hears it tells the others.
            let source = {
                let (world, arena) = (world.clone(), arena.clone());
                thread::spawn(move || {
                    world.cells[0].write(7);
                    raise::<Loom>(arena.word(LISTS), 5, 0);
                })
            };
            let block = |world: &World, arena: &Arena| {
                let words = lists(arena);
                if words.1.hears() {
                    looks(arena.word(LISTS), 5);
                    raise::<Loom>(words.1.heard(0), 1, 0);
                }
                looks(words.1.heard(0), 1);
                assert_eq!(world.cells[0].read(), 7, "the source's rows");
                list(world, &words, 2, 1);
                for flag in [words.1.own_ready, words.1.all_ready] {
                    arrives(world, flag, 1);
                    assert_eq!([1, 2].map(|cell| world.cells[cell].read()), [10, 11], "the lists");
                }
            };
            let other = {
                let (world, arena) = (world.clone(), arena.clone());
                thread::spawn(move || block(&world, &arena))
            };
            block(&world, &arena);
            source.join().unwrap();
            other.join().unwrap();
        });
    }

    fn each_tile_is_taken_once_before_or_after_all_rows_are_there_in_each_of_two_launches() {
        let reached = [Reached::new("a tile is taken before"), Reached::new("all tiles are taken after")];
        let marks = reached.clone();
        explore(2, move || {
            let world = World::new(Setup { cells: 2, ..Setup::default() });
            let arena = Arc::new(Arena::new([0; LISTS]));
            for launch in 1..=2 {
                let block = move |world: &World, arena: &Arena| {
                    let words = lists(arena);
                    // One block takes tiles early, and the other lists rows at once.
                    let heard = u64::from(words.1.hears());
                    let mut before = 0;
                    while heard == 0 && words.0.take_open_part().is_some_and(|part| part < 2) {
                        before += 1;
                    }
                    list(world, &words, 1, launch);
                    let taken = wait::<Loom>(&world.status, Deadline::NONE, words.1.all_ready, launch);
                    let taken = u64::from(taken.expect("nothing ends the wait")).min(2);
                    let mut after = 0;
                    while words.0.take_tile() < 2 - taken {
                        after += 1;
                    }
                    words.0.leave(2, launch, || words.1.clear(1));
                    (heard, before, after, taken)
                };
                let other = {
                    let (world, arena) = (world.clone(), arena.clone());
                    thread::spawn(move || block(&world, &arena))
                };
                let mine = block(&world, &arena);
                let other = other.join().unwrap();
                assert_eq!(mine.0 + other.0, 1, "one block hears");
                assert_eq!((mine.1 + other.1, mine.3), (mine.3, other.3), "tiles before, launch {launch}");
                assert_eq!(mine.2 + other.2, 2 - mine.3, "tiles after, launch {launch}");
                marks[usize::from(mine.3 == 0)].mark();
            }
        });
        reached.iter().for_each(Reached::check);
    }

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
        explore(2, || ranks(3, |epoch| epoch & 1));
    }

    fn each_tile_is_taken_once_in_each_of_two_launches() {
        explore(2, || {
            let arena = Arc::new(Arena::new([0; WORDS as usize]));
            for launch in 1..=2 {
                let block = move |arena: &Arena| {
                    let scheduler = TileScheduler::<Loom>::new(arena.word(0));
                    assert_eq!(scheduler.ended() + 1, launch);
                    let mut tiles = 0;
                    while scheduler.take_tile() < 3 {
                        tiles += 1;
                    }
                    let mut parts = 0;
                    while scheduler.take_part() < 2 {
                        parts += 1;
                    }
                    scheduler.leave(2, launch, || ());
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
