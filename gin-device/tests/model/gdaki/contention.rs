// SPDX-License-Identifier: MIT OR Apache-2.0
//! Models of a queue pair under contention. The NIC executes while threads post, hold back, flush and rest, and while
//! lanes of a warp post together.

use super::{BUSY, Posting, World};
use crate::model::{Reached, explore, models};
use gin_abi::Deadline;
use gin_abi::mlx5::doorbell::Doorbell;
use gin_abi::mlx5::wqe::Flags;
use gin_device::gin::{Order, Sharing};
use gin_device::internal::pair::{Claim, Posters, Written, finish, place};
use gin_device::sys::loom::Loom;
use gin_device::sys::{Memory, Word};
use loom::sync::{Condvar, Mutex};
use loom::thread;
use std::sync::Arc;

/// Number of lanes of a group in these models: the smallest with a lane in the middle.
const LANES: usize = 3;

/// A vote among the lanes of a group.
#[derive(Default)]
struct Ballot {
    round: Mutex<Round>,
    over: Condvar,
}

#[derive(Default)]
struct Round {
    number: u64,
    arrived: usize,
    votes: u32,
    result: u32,
}

impl Ballot {
    fn cast(&self, lane: usize, bit: bool) -> u32 {
        let mut round = self.round.lock().unwrap();
        round.votes |= u32::from(bit) << lane;
        round.arrived += 1;
        let number = round.number;
        if round.arrived == LANES {
            *round = Round { number: number + 1, arrived: 0, votes: 0, result: round.votes };
            self.over.notify_all();
        } else {
            while round.number == number {
                round = self.over.wait(round).unwrap();
            }
        }
        round.result
    }
}

const GPU: Posting = Posting { count: 1, sharing: Sharing::Gpu, more: false, deadline: Deadline::NONE };

/// A lane of a group, which has claimed a slot for each lane.
struct Lane<'a> {
    lane: usize,
    /// The claims word before.
    claims: u64,
    ballot: &'a Ballot,
    /// The lanes publish together.
    together: bool,
}

impl Posters for Lane<'_> {
    type Group = bool;

    fn claim(&self) -> Claim {
        let leads = self.lane == LANES - 1;
        Claim { index: place(self.claims) + self.lane as u32, claims: if leads { self.claims } else { 0 } }
    }

    fn all(&self, bit: bool) -> bool {
        self.ballot.cast(self.lane, !bit) == 0
    }

    fn group(&self, together: bool) -> bool {
        together
    }

    fn written(&self, more: bool) -> Option<Written> {
        if !self.together {
            return Some(Written { first: place(self.claims) + self.lane as u32, count: 1, more });
        }
        let all = self.ballot.cast(self.lane, !more) == 0;
        let entries = Written { first: place(self.claims), count: LANES as u32, more: all };
        (self.lane == LANES - 1).then_some(entries)
    }

    fn published(&self) {
        if self.together {
            self.ballot.cast(self.lane, true);
        }
    }
}

impl World {
    /// Posts cell `lane` as one lane of a group, as the back end does, at the index that the group claimed for it.
    fn post_lane(&self, lane: usize, claims: u64, ballot: &Ballot) {
        self.cells[lane].write(lane as u64 + 100);
        let poster = Lane { lane, claims, ballot, together: true };
        let wait = |own| (self.wait_for_room(own, 1, Deadline::NONE).map(drop), self.pair);
        let posted = self.pair.claim_slots(1, &poster, wait, |pair, slots| {
            let announced = Doorbell::read(self.pair.doorbell.load_relaxed_sys()).end;
            assert!(u32::from(announced) <= slots.index, "an entry was announced before it was written");
            self.write_entry(slots.index, lane, Flags::NONE);
            pair.publish(slots.leads, &Lane { together: slots.group, ..poster }, false, self);
        });
        posted.unwrap();
        assert!(self.is_marked(), "a flush of lane {lane} would miss this queue pair");
    }

    /// Claims a slot for each lane of a group, and lets them post.
    fn post_lanes(self: &Arc<Self>) {
        let claims = self.pair.claim(true, LANES as u32, Sharing::Gpu);
        let ballot = Arc::new(Ballot::default());
        let lanes: [_; LANES] = std::array::from_fn(|lane| {
            let (world, ballot) = (self.clone(), ballot.clone());
            thread::spawn(move || world.post_lane(lane, claims, &ballot))
        });
        for lane in lanes {
            lane.join().unwrap();
        }
    }

    fn hold(&self, cell: usize) {
        self.post_as(cell, Sharing::Gpu, true, Deadline::NONE).unwrap();
    }

    /// Attends until this many entries are announced, as a wait for another event does.
    fn attend_until(&self, entries: u16) {
        while Doorbell::read(self.pair.doorbell.load_relaxed_sys()).end < entries {
            self.pair.attend(self);
            Loom::pause(0);
        }
    }

    /// Returns whether a flush of all peers checks this queue pair.
    fn is_marked(&self) -> bool {
        self.pair.busy.load_relaxed_gpu() & BUSY != 0
    }
}

/// The work of a thread of a model.
type Part = Box<dyn FnOnce(&World) + Send>;

fn spawn<const N: usize>(world: &Arc<World>, parts: [Part; N]) -> [thread::JoinHandle<()>; N] {
    parts.map(|part| {
        let world = world.clone();
        thread::spawn(move || {
            part(&world);
            world.finish();
        })
    })
}

/// Runs each part on a thread of its own beside a NIC, until the NIC has executed this many entries. The NIC learns of
/// entries by the doorbell alone; the end of a thread does not announce any.
fn beside_a_nic<const N: usize>(world: &Arc<World>, entries: u64, parts: [Part; N]) {
    let threads = spawn(world, parts);
    let mut nic = world.nic();
    while nic.executed < entries {
        if !nic.step() {
            Loom::pause(0);
        }
    }
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(nic.executed, entries);
}

models! {
    fn lanes_announce_the_entries_that_they_have_written_and_no_others() {
        explore(1, || {
            let world = World::new(2, 0, LANES + 1);
            // A full queue whose completions no thread has taken: each lane may find room, or not yet.
            for _ in 0..4 {
                world.post(LANES);
            }
            let mut nic = world.nic();
            nic.step();
            world.post_lanes();
            nic.step();
            assert_eq!(nic.executed, 4 + LANES as u64, "an entry was not announced");
        });
    }

    fn each_lane_finds_the_mark_that_one_of_them_has_made() {
        explore(1, || World::new(2, 0, LANES).post_lanes());
    }

    fn several_flushes_post_one_entry_that_asks_for_a_completion() {
        explore(1, || {
            let world = World::new(3, 3, 1);
            world.post(0);
            let flushes: [_; 3] = std::array::from_fn(|_| {
                let world = world.clone();
                thread::spawn(move || world.cover(1))
            });
            for flush in flushes {
                flush.join().unwrap();
            }
            assert_eq!(world.pair.position(), 2, "the post, and one entry for all");
        });
    }

    fn a_flush_checks_a_queue_pair_to_which_its_thread_has_posted() {
        let rested = Reached::new("mark cleared");
        let mark = rested.clone();
        explore(1, move || {
            let world = World::new(2, 0, 2);
            world.post(0);
            let mut nic = world.nic();
            nic.step();
            let rester = |mark: Option<Reached>| {
                let world = world.clone();
                thread::spawn(move || {
                    world.take();
                    world.pair.rest();
                    if let (Some(mark), false) = (mark, world.is_marked()) {
                        mark.mark();
                    }
                })
            };
            let resters = [rester(Some(mark.clone())), rester(None)];
            world.post(1);
            // The words that a flush of this thread checks before it waits.
            let seen = world.is_marked();
            assert!(seen || world.pair.completion_index() >= 2, "a flush of the poster would miss this queue pair");
            for rester in resters {
                rester.join().unwrap();
            }
            assert!(world.is_marked(), "an entry is under way");
        });
        rested.check();
    }

    fn a_flush_that_finds_no_mark_comes_after_the_reads_of_its_sources() {
        let unmarked = Reached::new("no mark");
        let reached = unmarked.clone();
        explore(2, move || {
            let world = World::new(2, 0, 1);
            world.post(0);
            let rester = {
                let world = world.clone();
                thread::spawn(move || {
                    world.nic().step();
                    world.take();
                    world.pair.rest();
                })
            };
            // A flush of all peers.
            if !world.is_marked() {
                finish(Ok(()), &world.pair.status, Order::Acquire).unwrap();
                // The NIC has read it.
                world.cells[0].write(1);
                reached.mark();
            }
            rester.join().unwrap();
        });
        unmarked.check();
    }

    fn a_flush_that_finds_no_mark_has_the_data_of_its_gets() {
        let unmarked = Reached::new("no mark");
        let reached = unmarked.clone();
        explore(2, move || {
            let world = World::new(2, 0, 2);
            world.cells[0].write(100);
            let read = |index| {
                world.write_entry(index, 0, Flags::NONE);
                world.pair.note_read(index);
            };
            world.post_filled(GPU, read).unwrap();
            let other = {
                let world = world.clone();
                thread::spawn(move || {
                    let mut nic = world.nic();
                    nic.reads = Some(1);
                    nic.step();
                    // All entries are complete, but the data is hidden until a DUMP.
                    world.take();
                    world.pair.rest();
                    world.cover(1);
                    nic.step();
                    world.take();
                    world.pair.rest();
                })
            };
            if !world.is_marked() {
                finish(Ok(()), &world.pair.status, Order::Acquire).unwrap();
                assert_eq!(world.cells[1].read(), 7, "the data of the get");
                reached.mark();
            }
            other.join().unwrap();
        });
        unmarked.check();
    }

    fn a_doorbell_announces_the_entries_of_one_that_it_replaces() {
        explore(2, || {
            let world = World::new(2, 1, 2);
            let posters: [_; 2] = std::array::from_fn(|cell| {
                let world = world.clone();
                thread::spawn(move || world.post(cell))
            });
            // The NIC need not have seen the first doorbell, which would hand its entry on.
            while Doorbell::read(world.pair.doorbell.load_relaxed_sys()).end != 2 {
                Loom::pause(0);
            }
            world.nic().step();
            posters.into_iter().for_each(|poster| poster.join().unwrap());
        });
    }

    fn held_back_entries_are_whole_when_the_next_post_rings_for_them() {
        explore(2, || {
            let world = World::new(2, 1, 2);
            let poster = |world: &World| {
                world.post(1);
                world.attend_until(2);
            };
            beside_a_nic(&world, 2, [Box::new(|world| world.hold(0)), Box::new(poster)]);
        });
    }

    fn held_back_entries_are_whole_when_a_wait_rings_for_them() {
        explore(2, || {
            let world = World::new(2, 1, 1);
            beside_a_nic(&world, 1, [Box::new(|world| world.hold(0)), Box::new(|world| world.attend_until(1))]);
        });
    }

    fn held_back_entries_of_several_threads_are_whole() {
        explore(1, || {
            let world = World::new(2, 2, 2);
            beside_a_nic(&world, 2, [
                Box::new(|world| world.hold(0)),
                Box::new(|world| world.hold(1)),
                Box::new(|world| world.attend_until(2)),
            ]);
        });
    }

    fn a_flush_waits_for_the_dump_of_another() {
        explore(1, || {
            let world = World::new(2, 1, 3);
            // A READ, whose data is hidden until a DUMP.
            let read = |world: &World, index, cell| {
                world.write_entry(index, cell, Flags::NONE);
                world.pair.note_read(index);
            };
            world.cells[0].write(100);
            world.post_filled(GPU, |index| read(&world, index, 0)).unwrap();
            let threads = spawn(&world, [
                Box::new(|world: &World| {
                    world.wait(1).unwrap();
                    assert_eq!(world.cells[2].read(), 7, "the data of the read");
                }),
                Box::new(move |world: &World| {
                    // A get with a counter: its DUMP, entry 2, asks for a completion, though the interval does not.
                    world.cells[1].write(101);
                    let fill = |index| {
                        read(world, index, 1);
                        world.dump(index + 1, Flags::COMPLETION.and(Flags::FENCE));
                        world.pair.note_dump(index + 1);
                    };
                    world.post_filled(Posting { count: 2, ..GPU }, fill).unwrap();
                }),
            ]);
            let mut nic = world.nic();
            nic.reads = Some(2);
            nic.serve(2);
            for thread in threads {
                thread.join().unwrap();
            }
        });
    }

    fn two_posters_ring_for_each_other_while_the_nic_runs() {
        explore(3, || {
            let world = World::new(2, 1, 2);
            beside_a_nic(&world, 2, [Box::new(|world| world.post(0)), Box::new(|world| world.post(1))]);
        });
    }

    fn a_doorbell_left_to_a_thread_that_holds_its_entries_back_rings() {
        explore(3, || {
            let world = World::new(2, 1, 3);
            let threads = spawn(&world, [
                Box::new(|world: &World| world.post(0)),
                Box::new(|world: &World| {
                    world.hold(1);
                    world.hold(2);
                }),
            ]);
            let mut nic = world.nic();
            while !nic.cells.contains(&0) {
                if !nic.step() {
                    Loom::pause(0);
                }
            }
            for thread in threads {
                thread.join().unwrap();
            }
        });
    }

    fn threads_whose_entries_have_no_room_ring_for_those_before_them() {
        // A post of two entries straddles the end of the queue.
        explore(1, || {
            let world = World::new(1, 0, 2);
            let part = |count, cell: usize| -> Part {
                Box::new(move |world: &World| {
                    world.cells[cell].write(cell as u64 + 100);
                    let fill = |index| (index..index + count).for_each(|at| world.write_entry(at, cell, Flags::NONE));
                    world.post_filled(Posting { count, ..GPU }, fill).unwrap();
                })
            };
            beside_a_nic(&world, 3, [part(1, 0), part(2, 1)]);
        });
    }
}
