// SPDX-License-Identifier: MIT OR Apache-2.0
//! Models of dispatch and combine of expert parallelism: rows, flags, buffers, blocks that stay.

use super::{Cell, Reached, Setup, World, explore, models};
use gin_abi::Deadline;
use gin_device::internal::status::WaitError;
use gin_device::sys::Word;
use gin_device::sys::loom::{Arena, Loom, LoomWord};
use gin_ep_kernels::internal::{
    IN_PLACE, Launch, PUSHED, agree, count, decide, flag, is_occupied, is_over, last_use, raise, report, wait,
    wait_for, wait_or_follow, wait_together,
};
use loom::thread;
use std::sync::Arc;

/// Waits for a flag as long as it takes. Returns its number of rows.
fn arrives(world: &World, flag: LoomWord, epoch: u64) -> u32 {
    wait::<Loom>(&world.status, Deadline::NONE, flag, epoch).expect("nothing ends the wait")
}

/// The part of the arena of one rank, with one peer: two buffers of a row and its flag, two of a returned row, its
/// flag.
struct Part {
    rows: [Cell; 2],
    returned: [Cell; 2],
    arena: Arena,
}

impl Part {
    fn new(epoch: u64) -> Self {
        let cells = || [Cell::new(), Cell::new()];
        Self { rows: cells(), returned: cells(), arena: Arena::new([flag(epoch, 0); 3]) }
    }

    fn sent(&self, buffer: u64) -> LoomWord {
        self.arena.word(buffer as usize)
    }

    fn came_back(&self) -> LoomWord {
        self.arena.word(2)
    }
}

/// How a rank returns rows.
#[derive(Clone, Copy, PartialEq)]
pub enum Back {
    /// It does not.
    Not,
    /// It stores them to their source.
    Pushed,
    /// Their source loads them.
    InPlace,
}

/// Dispatches of each rank, one block each.
#[derive(Clone, Copy)]
pub struct Dispatches {
    /// The epoch of the first one.
    pub first: u64,
    pub number: u64,
    /// How a dispatch, of this number, returns rows.
    pub back: fn(u64) -> Back,
    /// The buffer of a dispatch.
    pub buffer: fn(u64) -> u64,
    /// The rule by which a dispatch waits for the other rank before it stores a row: [`is_occupied`].
    pub waits: fn(u64, u64) -> bool,
}

impl Dispatches {
    /// Three dispatches.
    pub fn new(back: fn(u64) -> Back, buffer: fn(u64) -> u64) -> Self {
        Self { first: 1, number: 3, back, buffer, waits: is_occupied }
    }
}

/// Returns two buffers in turn.
fn in_turn(number: u64) -> u64 {
    number & 1
}

fn one_buffer(_: u64) -> u64 {
    0
}

/// Runs dispatches of a rank.
fn rank(world: &World, parts: &[Part; 2], me: usize, of: Dispatches) {
    let (here, there) = (&parts[me], &parts[1 - me]);
    // No dispatch was made, and so none in buffer 0 that was not combined.
    let mut last = 0;
    for number in 0..of.number {
        let (epoch, buffer, back) = (of.first.wrapping_add(number), (of.buffer)(number), (of.back)(number));
        if (of.waits)(last, buffer) {
            let before = epoch.wrapping_sub(1);
            raise::<Loom>(there.came_back(), before, PUSHED);
            arrives(world, here.came_back(), before);
        }
        last = last_use(buffer, back != Back::Not);
        there.rows[buffer as usize].write(10 * number + me as u64);
        raise::<Loom>(there.sent(buffer), epoch, number as u32 + 1);
        assert_eq!(arrives(world, here.sent(buffer), epoch), number as u32 + 1, "a number of another dispatch");
        let row = here.rows[buffer as usize].read();
        assert_eq!(row, 10 * number + (1 - me) as u64, "a row of another dispatch");
        let mine = 10 * number + me as u64 + 5;
        match back {
            Back::Not => {}
            Back::Pushed => {
                there.returned[buffer as usize].write(row + 5);
                raise::<Loom>(there.came_back(), epoch, PUSHED);
                assert_eq!(arrives(world, here.came_back(), epoch), PUSHED);
                assert_eq!(here.returned[buffer as usize].read(), mine, "a row of another combine");
            }
            Back::InPlace => {
                here.rows[buffer as usize].write(row + 5);
                raise::<Loom>(there.came_back(), epoch, IN_PLACE);
                assert_eq!(arrives(world, here.came_back(), epoch), IN_PLACE);
                assert_eq!(there.rows[buffer as usize].read(), mine, "a row of another combine");
            }
        }
    }
}

/// Runs two ranks.
pub fn ranks(of: Dispatches) {
    let world = World::new(Setup::default());
    let parts = Arc::new([Part::new(of.first.wrapping_sub(1)), Part::new(of.first.wrapping_sub(1))]);
    let other = {
        let (world, parts) = (world.clone(), parts.clone());
        thread::spawn(move || rank(&world, &parts, 1, of))
    };
    rank(&world, &parts, 0, of);
    other.join().unwrap();
}

/// Runs two dispatches to one place in the region of a receiver, which two sources share: the first source has it in
/// the first dispatch, the second one in the next. `asked` is the number of sources whose numbers the receiver awaits
/// before it gives the place away.
pub fn shared(asked: usize) {
    /// Flags: what each source announces, what each is granted, rows that were sent, rows that are in place.
    const TOLD: usize = 0;
    const GRANTED: usize = 2;
    const SENT: usize = 4;
    const BACK: usize = 5;
    let world = World::new(Setup { cells: 1, ..Setup::default() });
    let flags = Arc::new(Arena::new([0; 6]));
    let first = {
        let (world, flags) = (world.clone(), flags.clone());
        thread::spawn(move || {
            raise::<Loom>(flags.word(TOLD), 1, 1);
            assert_eq!(arrives(&world, flags.word(GRANTED), 1), 0);
            world.cells[0].write(7);
            raise::<Loom>(flags.word(SENT), 1, 1);
            arrives(&world, flags.word(BACK), 1);
            assert_eq!(world.cells[0].read(), 8, "another row");
            raise::<Loom>(flags.word(TOLD), 2, 0);
        })
    };
    let second = {
        let (world, flags) = (world.clone(), flags.clone());
        thread::spawn(move || {
            raise::<Loom>(flags.word(TOLD + 1), 2, 1);
            assert_eq!(arrives(&world, flags.word(GRANTED + 1), 2), 0);
            world.cells[0].write(9);
            raise::<Loom>(flags.word(SENT), 2, 1);
        })
    };
    assert_eq!(arrives(&world, flags.word(TOLD), 1), 1);
    raise::<Loom>(flags.word(GRANTED), 1, 0);
    assert_eq!(arrives(&world, flags.word(SENT), 1), 1);
    assert_eq!(world.cells[0].read(), 7);
    world.cells[0].write(8);
    raise::<Loom>(flags.word(BACK), 1, IN_PLACE);
    for source in (0..2).rev().take(asked) {
        arrives(&world, flags.word(TOLD + source), 2);
    }
    raise::<Loom>(flags.word(GRANTED + 1), 2, 0);
    assert_eq!(arrives(&world, flags.word(SENT), 2), 1);
    assert_eq!(world.cells[0].read(), 9);
    first.join().unwrap();
    second.join().unwrap();
}

/// The words of a launch.
fn launch(arena: &Arena) -> Launch<Loom> {
    Launch::new(arena.word(0))
}

models! {
    fn a_receiver_sees_the_rows_of_all_blocks_of_a_source_after_its_flag() {
        explore(2, || {
            let world = World::new(Setup { cells: 2, ..Setup::default() });
            let arena = Arc::new(Arena::new([0; 4]));
            let block = |world: &World, arena: &Arena, number: usize| {
                let launch = launch(arena);
                launch.start();
                world.cells[number].write(7 + number as u64);
                if launch.finish_without_wait(2) {
                    raise::<Loom>(arena.word(3), 1, 2);
                }
            };
            let blocks = [0, 1].map(|number| {
                let (world, arena) = (world.clone(), arena.clone());
                thread::spawn(move || block(&world, &arena, number))
            });
            assert_eq!(arrives(&world, arena.word(3), 1), 2);
            assert_eq!([0, 1].map(|number| world.cells[number].read()), [7, 8]);
            for block in blocks {
                block.join().unwrap();
            }
        });
    }

    fn a_receiver_sees_the_rows_of_all_blocks_of_a_section_after_its_flag() {
        explore(2, || {
            let world = World::new(Setup { cells: 4, ..Setup::default() });
            // For each section the number of blocks that have sent it, then the flag.
            let arena = Arc::new(Arena::new([0; 3]));
            let block = |world: &World, arena: &Arena, number: usize| {
                for section in 0..2 {
                    world.cells[2 * section + number].write(7 + section as u64);
                    if count::<Loom>(arena.word(section), 1, 2) {
                        raise::<Loom>(arena.word(2), 1, section as u32 + 1);
                    }
                }
            };
            let blocks = [0, 1].map(|number| {
                let (world, arena) = (world.clone(), arena.clone());
                thread::spawn(move || block(&world, &arena, number))
            });
            for section in 0..2 {
                let waited = wait_for::<Loom>(&world.status, Deadline::NONE, arena.word(2), 1, section as u32 + 1);
                assert!(waited.is_ok(), "nothing ends the wait");
                let rows = [0, 1].map(|number| world.cells[2 * section + number].read());
                assert_eq!(rows, [7 + section as u64; 2]);
            }
            for block in blocks {
                block.join().unwrap();
            }
        });
    }

    fn no_row_of_a_dispatch_is_overwritten_before_its_receiver_is_done() {
        explore(2, || ranks(Dispatches::new(|_| Back::Not, in_turn)));
    }

    fn no_row_of_a_released_dispatch_is_overwritten_by_the_next_one_in_its_buffer() {
        explore(2, || ranks(Dispatches::new(|_| Back::Not, one_buffer)));
    }

    fn no_row_of_a_combined_dispatch_is_overwritten_by_the_next_one_in_its_buffer() {
        explore(1, || ranks(Dispatches::new(|_| Back::Pushed, one_buffer)));
        explore(1, || ranks(Dispatches::new(|_| Back::InPlace, one_buffer)));
    }

    fn released_and_combined_dispatches_follow_each_other_in_any_buffers() {
        let back = |number| [Back::InPlace, Back::Not, Back::Pushed][number as usize % 3];
        explore(1, move || ranks(Dispatches { number: 4, ..Dispatches::new(back, |number| number / 2 % 2) }));
        explore(1, move || ranks(Dispatches { number: 4, ..Dispatches::new(back, |number| number.div_ceil(2) % 2) }));
    }

    fn no_returned_row_is_overwritten_before_its_receiver_is_done() {
        explore(1, || ranks(Dispatches::new(|_| Back::Pushed, in_turn)));
    }

    fn no_row_in_place_is_overwritten_before_its_source_has_loaded_it() {
        explore(1, || ranks(Dispatches::new(|_| Back::InPlace, in_turn)));
    }

    fn no_row_of_a_shared_region_is_overwritten_before_its_source_has_loaded_it() {
        explore(1, || shared(2));
    }

    fn the_places_of_a_silent_rank_are_given_away_when_it_has_come() {
        let seen = [Reached::new("it has not come"), Reached::new("it has")];
        let marks = seen.clone();
        explore(2, move || {
            let world = World::new(Setup { cells: 2, ..Setup::default() });
            let announced = Arc::new(Arena::new([flag(1, 1)]));
            let silent = {
                let (world, announced) = (world.clone(), announced.clone());
                thread::spawn(move || {
                    world.cells[0].write(7);
                    world.cells[1].read();
                    raise::<Loom>(announced.word(0), 2, 0);
                })
            };
            let is_over = is_over::<Loom>(announced.word(0), 1);
            if is_over {
                world.cells[0].write(8);
                world.cells[1].write(8);
            }
            silent.join().unwrap();
            marks[usize::from(is_over)].mark();
        });
        seen.iter().for_each(Reached::check);
    }

    fn whichever_block_is_the_first_announces_rows_in_place_so_that_blocks_may_run_one_by_one() {
        explore(2, || {
            let world = World::new(Setup { cells: 2, ..Setup::default() });
            // Three words of each rank's launch, then the flag for its rows.
            let arena = Arc::new(Arena::new([0; 8]));
            let block = |world: &World, arena: &Arena, rank: usize| {
                if Launch::<Loom>::new(arena.word(4 * rank)).start() == 0 {
                    raise::<Loom>(arena.word(4 * rank + 3), 1, IN_PLACE);
                }
                assert_eq!(arrives(world, arena.word(4 * (1 - rank) + 3), 1), IN_PLACE);
                assert_eq!(world.cells[1 - rank].read(), 7);
            };
            let other = {
                let (world, arena) = (world.clone(), arena.clone());
                thread::spawn(move || {
                    world.cells[1].write(7);
                    // One block may be resident.
                    block(&world, &arena, 1);
                    block(&world, &arena, 1);
                })
            };
            // An earlier kernel of the stream.
            world.cells[0].write(7);
            let second = {
                let (world, arena) = (world.clone(), arena.clone());
                thread::spawn(move || block(&world, &arena, 0))
            };
            block(&world, &arena, 0);
            second.join().unwrap();
            other.join().unwrap();
        });
    }

    fn a_block_that_gave_up_and_was_overruled_sees_the_rows() {
        let seen = [Reached::new("the rank did not take part"), Reached::new("it did")];
        let marks = seen.clone();
        explore(2, move || {
            let world = World::new(Setup { cells: 1, ..Setup::default() });
            // The flag and the verdict.
            let arena = Arc::new(Arena::new([0; 2]));
            let source = {
                let (world, arena) = (world.clone(), arena.clone());
                thread::spawn(move || {
                    world.cells[0].write(7);
                    raise::<Loom>(arena.word(0), 1, IN_PLACE);
                })
            };
            let block = |world: &World, arena: &Arena| {
                let (flag, verdict) = (arena.word(0), arena.word(1));
                let waited = wait_together::<Loom>(&world.status, Deadline::after_ns(0), flag, verdict, 1, 0);
                if waited.is_ok() {
                    assert_eq!(world.cells[0].read(), 7);
                }
                waited.is_ok()
            };
            let other = {
                let (world, arena) = (world.clone(), arena.clone());
                thread::spawn(move || block(&world, &arena))
            };
            let took_part = block(&world, &arena);
            assert_eq!(took_part, other.join().unwrap());
            source.join().unwrap();
            marks[usize::from(took_part)].mark();
        });
        seen.iter().for_each(Reached::check);
    }

    fn a_block_that_follows_has_the_number_of_rows_of_the_deciding_one_and_sees_the_rows() {
        let seen = [Reached::new("the rank did not take part"), Reached::new("it did")];
        let marks = seen.clone();
        explore(2, move || {
            let world = World::new(Setup { cells: 1, ..Setup::default() });
            // The flag, the last decision, and the number of rows.
            let arena = Arc::new(Arena::new([0; 3]));
            let source = {
                let (world, arena) = (world.clone(), arena.clone());
                thread::spawn(move || {
                    world.cells[0].write(7);
                    raise::<Loom>(arena.word(0), 1, 1);
                })
            };
            let other = {
                let (world, arena) = (world.clone(), arena.clone());
                thread::spawn(move || {
                    let decision = (arena.word(1), arena.word(2));
                    let rows =
                        wait_or_follow::<Loom>(&world.status, Deadline::after_ns(0), arena.word(0), decision, 1, 0);
                    if rows > 0 {
                        assert_eq!(world.cells[0].read(), 7);
                    }
                    rows
                })
            };
            let waited = wait::<Loom>(&world.status, Deadline::after_ns(0), arena.word(0), 1);
            let rows = waited.unwrap_or(0);
            arena.word(2).store_relaxed_gpu(rows.into());
            decide::<Loom>(arena.word(1), 1);
            assert_eq!(rows, other.join().unwrap());
            source.join().unwrap();
            marks[rows as usize].mark();
        });
        seen.iter().for_each(Reached::check);
    }

    fn dispatches_go_on_where_the_epoch_wraps() {
        for first in [u64::MAX, (1 << 63) - 1, (1 << 32) - 1, (1 << 31) - 1] {
            explore(1, move || ranks(Dispatches { first, ..Dispatches::new(|_| Back::Not, in_turn) }));
            explore(1, move || ranks(Dispatches { first, ..Dispatches::new(|_| Back::Not, one_buffer) }));
        }
    }

    fn a_block_stays_only_if_all_have_started_and_one_stays_to_take_the_rest() {
        let seen = [Reached::new("one block stays"), Reached::new("both stay")];
        let marks = seen.clone();
        explore(3, move || {
            let arena = Arc::new(Arena::new([0; 3]));
            let started = Arc::new([Cell::new(), Cell::new()]);
            let block = |arena: &Arena, started: &[Cell; 2], number: usize| {
                let launch = launch(arena);
                launch.start();
                started[number].write(1);
                let sent = launch.finish(2);
                if sent.is_last {
                    // It raises the flags, for the rows of both.
                    assert_eq!([0, 1].map(|number| started[number].read()), [1, 1]);
                }
                let mut units = 0;
                while sent.may_wait && launch.take() < 3 {
                    units += 1;
                }
                (sent.may_wait, units)
            };
            let other = {
                let (arena, started) = (arena.clone(), started.clone());
                thread::spawn(move || block(&arena, &started, 1))
            };
            let mine = block(&arena, &started, 0);
            let other = other.join().unwrap();
            assert_eq!(mine.1 + other.1, 3, "each unit is taken once");
            marks[usize::from(mine.0 && other.0)].mark();
        });
        seen.iter().for_each(Reached::check);
    }

    fn blocks_agree_whether_a_rank_took_part_also_where_the_epoch_wraps() {
        let seen = [Reached::new("it did not"), Reached::new("it did")];
        let marks = seen.clone();
        explore(3, move || {
            for epoch in [7, 1 << 63] {
                let verdict = Arc::new(Arena::new([(epoch - 1) << 1]));
                let other = {
                    let verdict = verdict.clone();
                    thread::spawn(move || agree::<Loom>(verdict.word(0), epoch, true))
                };
                let mine = agree::<Loom>(verdict.word(0), epoch, false);
                assert_eq!(mine, other.join().unwrap());
                assert_eq!(agree::<Loom>(verdict.word(0), epoch, !mine), mine, "a late block decides anew");
                marks[usize::from(mine)].mark();
            }
        });
        seen.iter().for_each(Reached::check);
    }

    fn a_wait_for_a_silent_rank_ends_and_names_its_last_flag() {
        explore(1, || {
            let world = World::new(Setup::default());
            let arena = Arena::new([flag(4, 7)]);
            let waited = wait::<Loom>(&world.status, Deadline::after_ns(0), arena.word(0), 5);
            assert_eq!(waited, Err((WaitError::Deadline, 4)));
        });
    }

    fn of_two_reports_one_is_written_as_a_whole() {
        explore(2, || {
            let arena = Arc::new(Arena::new([0; 6]));
            let write = |arena: &Arena, code: u64| {
                report::<Loom>(arena.word(0), arena.word(1), code, [10 * code, 10 * code + 1, 10 * code + 2, 10 * code + 3]);
            };
            let other = {
                let arena = arena.clone();
                thread::spawn(move || write(&arena, 1))
            };
            write(&arena, 2);
            other.join().unwrap();
            let code = arena.word(1).load_relaxed_sys();
            let words = [2, 3, 4, 5].map(|index| arena.word(index).load_relaxed_sys());
            assert_eq!(words, [0, 1, 2, 3].map(|offset| 10 * code + offset));
        });
    }
}
