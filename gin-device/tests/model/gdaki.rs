// SPDX-License-Identifier: MIT OR Apache-2.0
//! Models of a queue pair: threads of a GPU, and a NIC that reads entries up to the doorbell and no further.

pub mod alone;
pub mod contention;

use super::{Cell, Reached, await_word, explore, fault, models};
use gin_abi::gdaki::{QueuePairData, busy_marks};
use gin_abi::mlx5::be::Be32;
use gin_abi::mlx5::cqe::{INVALID_BYTE, SYNDROME_WORD, TAIL_WORD, Tail, opcode as outcome};
use gin_abi::mlx5::doorbell::Doorbell;
use gin_abi::mlx5::wqe::{self, Flags, Local, QueueNumber, Segment};
use gin_abi::{COUNTER_BITS, Deadline};
use gin_device::gin::{Order, Sharing};
use gin_device::internal::pair::{Claim, Ended, Entries, Posters, QueuePair, Rare, Written, finish, place};
use gin_device::internal::signal_words::Words;
use gin_device::internal::status::{Status, WaitError};
use gin_device::sys::loom::{Arena, Loom, LoomWord};
use gin_device::sys::{Memory, Word};
use loom::cell::UnsafeCell;
use loom::thread;
use std::sync::Arc;

const NUMBER: QueueNumber = QueueNumber::new(0x0001_2345);
/// The bit that marks entries that may be under way.
const BUSY: u64 = 4;

/// A queue pair, its NIC's side, and plain memory.
struct World {
    pair: QueuePair<Loom>,
    cells: Vec<Cell>,
    counter: Words<Loom>,
    /// Number of threads that have finished.
    over: LoomWord,
    // The handles point into the arena.
    _arena: Arena,
}

/// The state of the NIC.
struct Nic<'a> {
    world: &'a World,
    /// Number of entries executed.
    executed: u64,
    /// Number of completions written.
    completed: u64,
    /// Index of the entry that fails.
    fails: Option<u64>,
    /// The cell that a READ fills.
    reads: Option<usize>,
    /// The cell of a READ whose data is not in view yet.
    hidden: Option<usize>,
    /// The cells of the executed WRITEs.
    cells: Vec<usize>,
}

/// The parameters of a thread's post.
#[derive(Clone, Copy)]
struct Posting {
    count: u32,
    sharing: Sharing,
    more: bool,
    deadline: Deadline,
}

/// A thread that posts without others of its warp.
struct OneThread {
    count: u32,
    claims: u64,
}

impl Posters for OneThread {
    fn claim(&self) -> Claim {
        Claim { index: place(self.claims), claims: self.claims }
    }

    type Group = ();

    fn all(&self, bit: bool) -> bool {
        bit
    }

    fn group(&self, _: bool) {}

    fn written(&self, more: bool) -> Option<Written> {
        Some(Written { first: place(self.claims), count: self.count, more })
    }

    fn published(&self) {}
}

/// Returns the head of a WRITE.
fn write(post: wqe::Post) -> Segment {
    let local = Local { address: 0, key: Be32::new(0), bytes: 8 };
    wqe::write(post, wqe::Remote { address: 0, key: Be32::new(0) }, local)[0]
}

impl Rare for World {
    fn take(&self) -> bool {
        self.pair.take()
    }

    fn ring_on(&self, claims: u64, end: u32) {
        self.pair.ring_on(claims, end);
    }

    fn end(&self, deadline: Deadline) -> Option<WaitError> {
        self.pair.status.end(0, deadline)
    }
}

impl World {
    fn new(depth_log2: u32, interval_log2: u32, cells: usize) -> Arc<Self> {
        Self::releasing(depth_log2, interval_log2, cells, false)
    }

    fn releasing(depth_log2: u32, interval_log2: u32, cells: usize, releases_to_gpu: bool) -> Arc<Self> {
        let depth = 1usize << depth_log2;
        let words = size_of::<QueuePairData>() / 8;
        let ring = words;
        let completions = ring + 8 * depth;
        let tags = completions + 8 * depth;
        let record = tags + depth;
        let (doorbell, busy, counters, near) = (record + 1, record + 2, record + 3, record + 4);
        let (over, status) = (near + 8, near + 9);
        let invalid = u64::from_ne_bytes([INVALID_BYTE; 8]);
        let values = (0..status + 24).map(|index| match index {
            _ if (completions..tags).contains(&index) => invalid,
            _ => 0,
        });
        let arena = Arena::new(values);
        let block = |index: usize| arena.word(status + 8 * index);
        let status = Status { host: block(0), kernel: block(1), copy: block(2) };
        let pair = QueuePair {
            connected: true,
            words: arena.word(0),
            ring: arena.word(ring),
            tags: arena.word(tags),
            completions: arena.word(completions),
            record: arena.word(record),
            doorbell: arena.word(doorbell),
            busy: arena.word(busy),
            marks: busy_marks(2),
            counters: arena.word(counters),
            number: NUMBER,
            depth_log2,
            interval_log2,
            releases_to_gpu,
            status,
        };
        let counter =
            Words { gpu: Some(arena.word(counters)), nic: None, cpu: None, near: arena.word(near), mailbox: None };
        let cells = (0..cells).map(|_| Cell(UnsafeCell::new(0))).collect();
        Arc::new(Self { pair, cells, counter, over: arena.word(over), _arena: arena })
    }

    /// Writes cell `cell` and posts an entry that names it.
    fn post_as(&self, cell: usize, sharing: Sharing, more: bool, deadline: Deadline) -> Result<(), WaitError> {
        self.cells[cell].write(cell as u64 + 100);
        let posting = Posting { count: 1, sharing, more, deadline };
        let fill = |index| self.write_entry(index, cell, Flags::NONE);
        self.post_filled(posting, fill)
    }

    fn post_filled(&self, posting: Posting, fill: impl Fn(u32)) -> Result<(), WaitError> {
        let Posting { count, sharing, more, deadline } = posting;
        let none = Entries { index: 0, count: 0 };
        let posted = if sharing == Sharing::Thread {
            let wait = || (self.wait_for_room(none, count, deadline), self.pair);
            self.pair.claim_alone(count, wait, |pair, index| {
                fill(index);
                pair.publish_alone(index, count, more);
            })
        } else {
            let claims = if deadline.is_none() {
                Ok(self.pair.claim(true, count, sharing))
            } else {
                self.wait_for_room(none, count, deadline)
            };
            claims.and_then(|claims| {
                let poster = OneThread { count, claims };
                let wait = |own| (self.wait_for_room(own, count, Deadline::NONE).map(drop), self.pair);
                self.pair.claim_slots(count, &poster, wait, |pair, slots| {
                    fill(slots.index);
                    pair.publish(slots.leads, &poster, more, self);
                })
            })
        };
        posted.map_err(|stop| self.stopped(stop))
    }

    fn wait_for_room(&self, own: Entries, wanted: u32, deadline: Deadline) -> Result<u64, Ended> {
        self.pair.wait_for_room(own, wanted, deadline, self)
    }

    /// Returns the error of a call that ended early. Reports the fault of a failed entry.
    fn stopped(&self, stop: Ended) -> WaitError {
        stop.unwrap_or_else(|| {
            self.pair.status.report(fault(self.pair.failure().1));
            while self.pair.status.check().is_ok() {
                Loom::pause(0);
            }
            WaitError::Fault
        })
    }

    /// Takes completions.
    fn take(&self) {
        if !self.pair.take() {
            self.stopped(None);
        }
    }

    fn post(&self, cell: usize) {
        self.post_as(cell, Sharing::Gpu, false, Deadline::NONE).unwrap();
    }

    /// Writes a WRITE whose second segment names the cell.
    fn write_entry(&self, index: u32, cell: usize, flags: Flags) {
        let tag = cell as u64 + 1;
        self.pair.store(index, [write(self.pair.head(index, flags)), Segment { words: [tag, !tag] }]);
    }

    fn dump(&self, index: u32, flags: Flags) {
        let sink = Local { address: 0, key: Be32::new(0), bytes: 8 };
        self.pair.store(index, wqe::dump(self.pair.head(index, flags), sink));
    }

    /// Ensures that a completion covers the entries below `position`.
    fn cover(&self, position: u64) {
        self.pair.cover(position, &|index, flags| self.dump(index, flags), self);
    }

    fn wait(&self, position: u64) -> Result<(), WaitError> {
        let waited = self.pair.wait(position, Deadline::NONE, |index, flags| self.dump(index, flags), self);
        finish(waited.map_err(|stop| self.stopped(stop)), &self.pair.status, Order::Acquire)
    }

    fn finish(&self) {
        self.over.add_release_sys(1);
    }

    fn nic(&self) -> Nic<'_> {
        Nic { world: self, executed: 0, completed: 0, fails: None, reads: None, hidden: None, cells: Vec::new() }
    }
}

impl Nic<'_> {
    /// Executes the announced entries. Returns whether there was one.
    fn step(&mut self) -> bool {
        let pair = &self.world.pair;
        let word = pair.doorbell.load_relaxed_sys();
        let end = Doorbell::read(word).end;
        let new = u64::from(end.wrapping_sub(self.executed as u16));
        if word == 0 || new == 0 {
            return false;
        }
        Loom::fence_acquire_sys();
        assert!(new <= 1 << pair.depth_log2, "the doorbell goes back, or past the queue");
        let record = u64::from(Be32::from_memory((pair.record.load_relaxed_sys() >> 32) as u32).get());
        assert!((record as u16).wrapping_sub(end) <= 1 << pair.depth_log2, "the doorbell rang before its record");
        for _ in 0..new {
            self.execute();
        }
        true
    }

    fn execute(&mut self) {
        let (pair, index) = (&self.world.pair, self.executed);
        let slot = pair.ring.at(8 * (index & ((1 << pair.depth_log2) - 1)));
        let word = |number| slot.at(number).load_relaxed_sys();
        let head = [word(0), word(1)];
        let flags = Flags((head[1] >> 24) as u8);
        let is = |segment: Segment| segment.words == head;
        let post = wqe::Post { index, queue: NUMBER, flags };
        if is(write(post)) {
            let tag = word(2);
            assert_eq!(word(3), !tag, "entry {index} is torn");
            let cell = tag as usize - 1;
            assert_eq!(self.world.cells[cell].read(), cell as u64 + 100, "the payload of entry {index}");
            self.hidden = self.hidden.or(self.reads.take());
            self.cells.push(cell);
        } else if is(wqe::dump(post, Local { address: 0, key: Be32::new(0), bytes: 8 })[0]) {
            assert!(flags.fence() > 1, "a dump waits for the reads before it");
            if let Some(cell) = self.hidden.take() {
                self.world.cells[cell].write(7);
            }
        } else {
            assert!(is(wqe::nop(post)[0]), "entry {index} is stale");
        }
        if self.fails == Some(index) {
            self.complete(outcome::REQUEST_ERROR);
        } else if flags.completion() {
            self.complete(outcome::REQUEST);
        }
        self.executed += 1;
    }

    fn complete(&mut self, outcome: u8) {
        let pair = &self.world.pair;
        let at = pair.completions.at(8 * (self.completed & ((1 << pair.depth_log2) - 1)));
        let tail = Tail::new(outcome, 0, NUMBER.get(), self.executed, self.completed, pair.depth_log2);
        at.at(SYNDROME_WORD as u64).store_relaxed_sys(1);
        at.at(TAIL_WORD as u64).store_release_sys(tail.0);
        self.completed += 1;
    }

    /// Serves until `threads` threads have finished.
    fn serve(&mut self, threads: u64) {
        while self.world.over.load_acquire_sys() < threads {
            if !self.step() {
                Loom::pause(0);
            }
        }
        while self.step() {}
    }
}

models! {
    fn entries_of_several_threads_are_announced_whole_and_none_is_forgotten() {
        explore(2, || {
            let world = World::new(2, 1, 2);
            let poster = |cell: usize| {
                let world = world.clone();
                thread::spawn(move || {
                    world.post(cell);
                    world.finish();
                })
            };
            let (one, two) = (poster(0), poster(1));
            let mut nic = world.nic();
            nic.serve(2);
            one.join().unwrap();
            two.join().unwrap();
            assert_eq!(nic.executed, 2);
            assert_ne!(world.pair.busy.load_relaxed_gpu() & BUSY, 0);
        });
    }

    fn a_thread_that_posts_behind_another_need_not_wait_for_it() {
        explore(2, || {
            let world = World::new(2, 1, 3);
            let slow = {
                let world = world.clone();
                thread::spawn(move || {
                    world.post(0);
                    world.finish();
                })
            };
            world.post(1);
            world.post(2);
            slow.join().unwrap();
            // The last thread to publish has announced all entries.
            let mut nic = world.nic();
            nic.step();
            assert_eq!(nic.executed, 3);
        });
    }

    fn no_slot_is_overwritten_before_the_nic_has_completed_it() {
        for (preemptions, depth_log2, interval_log2, count, to_gpu) in
            [(2, 1, 0, 4, false), (1, 1, 0, 4, true), (1, 2, 1, 6, false)]
        {
            explore(preemptions, move || {
                let world = World::releasing(depth_log2, interval_log2, count, to_gpu);
                let poster = {
                    let world = world.clone();
                    thread::spawn(move || {
                        for cell in 0..count {
                            let sharing = if cell % 2 == 0 { Sharing::Gpu } else { Sharing::Thread };
                            world.post_as(cell, sharing, false, Deadline::NONE).unwrap();
                        }
                        world.finish();
                    })
                };
                let mut nic = world.nic();
                nic.serve(1);
                poster.join().unwrap();
                assert_eq!(nic.executed, count as u64);
            });
        }
    }

    fn two_threads_share_a_full_queue() {
        explore(1, || {
            let world = World::new(1, 0, 3);
            let poster = |cells: std::ops::Range<usize>| {
                let world = world.clone();
                thread::spawn(move || {
                    for cell in cells {
                        world.post(cell);
                    }
                    world.finish();
                })
            };
            let (one, two) = (poster(0..2), poster(2..3));
            let mut nic = world.nic();
            nic.serve(2);
            one.join().unwrap();
            two.join().unwrap();
            assert_eq!(nic.executed, 3);
        });
    }

    fn a_post_without_room_in_time_leaves_the_queue_as_it_was() {
        for sharing in [Sharing::Gpu, Sharing::Thread] {
            explore(2, move || {
                let world = World::new(1, 0, 3);
                for cell in 0..2 {
                    world.post_as(cell, sharing, false, Deadline::NONE).unwrap();
                }
                let late = {
                    let world = world.clone();
                    thread::spawn(move || {
                        let posted = world.post_as(2, sharing, false, Deadline::after_ns(0));
                        assert!(matches!(posted, Ok(()) | Err(WaitError::Deadline)));
                        world.finish();
                        posted.is_ok()
                    })
                };
                let mut nic = world.nic();
                nic.serve(1);
                let posted = late.join().unwrap();
                assert_eq!(nic.executed, 2 + u64::from(posted));
                assert_eq!(world.pair.position(), nic.executed);
            });
        }
    }

    fn a_wait_rings_for_held_back_entries() {
        for sharing in [Sharing::Gpu, Sharing::Thread] {
            explore(2, move || {
                let world = World::new(2, 1, 2);
                let waiter = {
                    let world = world.clone();
                    thread::spawn(move || {
                        world.post_as(0, sharing, true, Deadline::NONE).unwrap();
                        world.post_as(1, sharing, true, Deadline::NONE).unwrap();
                        world.wait(world.pair.position()).unwrap();
                        // The source of the first post may be reused.
                        world.cells[0].write(200);
                        world.finish();
                    })
                };
                let mut nic = world.nic();
                nic.serve(1);
                waiter.join().unwrap();
            });
        }
    }

    fn a_post_or_a_wait_rings_for_entries_that_others_hold_back() {
        explore(2, || {
            let world = World::new(2, 1, 2);
            let holder = {
                let world = world.clone();
                thread::spawn(move || {
                    world.post_as(0, Sharing::Gpu, true, Deadline::NONE).unwrap();
                    world.finish();
                })
            };
            world.post(1);
            holder.join().unwrap();
            world.pair.attend(&*world);
            let mut nic = world.nic();
            nic.step();
            assert_eq!(nic.executed, 2);
        });
    }

    fn one_entry_covers_all_waits() {
        explore(2, || {
            let world = World::new(2, 1, 1);
            world.post(0);
            let other = {
                let world = world.clone();
                thread::spawn(move || world.cover(1))
            };
            world.cover(1);
            other.join().unwrap();
            assert_eq!(world.pair.position(), 2, "one NOP for both");
            let mut nic = world.nic();
            nic.step();
            assert_eq!((nic.executed, nic.completed), (2, 1));
            world.wait(1).unwrap();
            world.cells[0].write(200);
        });
    }

    fn after_a_wait_the_data_of_reads_is_in_view() {
        explore(2, || {
            let world = World::new(2, 1, 2);
            let getter = {
                let world = world.clone();
                thread::spawn(move || {
                    let posting =
                        Posting { count: 1, sharing: Sharing::Gpu, more: false, deadline: Deadline::NONE };
                    let fill = |index| {
                        world.write_entry(index, 0, Flags::NONE);
                        world.pair.note_read(index);
                    };
                    world.cells[0].write(100);
                    world.post_filled(posting, fill).unwrap();
                    world.wait(world.pair.position()).unwrap();
                    assert_eq!(world.cells[1].read(), 7, "the data of the read");
                    world.finish();
                })
            };
            let mut nic = world.nic();
            nic.reads = Some(1);
            nic.serve(1);
            getter.join().unwrap();
        });
    }

    fn a_counter_is_raised_once_by_the_taker_of_the_completion_and_covers_the_data() {
        explore(1, || {
            let world = World::new(2, 1, 2);
            let poster = {
                let world = world.clone();
                thread::spawn(move || {
                    let posting =
                        Posting { count: 2, sharing: Sharing::Gpu, more: false, deadline: Deadline::NONE };
                    let fill = |index| {
                        world.write_entry(index, 0, Flags::NONE);
                        world.dump(index + 1, Flags::COMPLETION.and(Flags::FENCE));
                        world.pair.note_dump(index + 1);
                        world.pair.note_read(index);
                        world.pair.tag(index + 1, 0);
                    };
                    world.cells[0].write(100);
                    world.post_filled(posting, fill).unwrap();
                    let attend = || assert!(world.pair.attend(&*world));
                    let status = &world.pair.status;
                    let waited = world.counter.wait(status, 1, COUNTER_BITS, Deadline::NONE, attend);
                    assert_eq!(waited, Ok(1));
                    assert_eq!(world.cells[1].read(), 7, "the data of the read");
                    world.finish();
                })
            };
            let other = {
                let world = world.clone();
                thread::spawn(move || {
                    world.pair.attend(&*world);
                    world.finish();
                })
            };
            let mut nic = world.nic();
            nic.reads = Some(1);
            nic.serve(2);
            poster.join().unwrap();
            other.join().unwrap();
            assert_eq!(world.counter.value(COUNTER_BITS), 1);
        });
    }

    fn a_failed_entry_ends_every_wait_with_its_fault() {
        explore(1, || {
            let world = World::new(2, 1, 2);
            let waiter = |cell: usize| {
                let world = world.clone();
                thread::spawn(move || {
                    world.post(cell);
                    assert_eq!(world.wait(world.pair.position()), Err(WaitError::Fault));
                    assert_eq!(world.pair.status.cause(), fault(1));
                    world.finish();
                })
            };
            let one = waiter(0);
            let mut nic = world.nic();
            nic.fails = Some(0);
            nic.serve(1);
            one.join().unwrap();
        });
    }

    fn a_wait_succeeds_though_another_thread_takes_the_completion() {
        explore(2, || {
            let world = World::new(2, 0, 1);
            world.post(0);
            let taker = {
                let world = world.clone();
                thread::spawn(move || {
                    world.take();
                    world.finish();
                })
            };
            let waiter = {
                let world = world.clone();
                thread::spawn(move || {
                    world.wait(1).unwrap();
                    // The NIC has read the cell.
                    world.cells[0].write(200);
                    world.finish();
                })
            };
            let mut nic = world.nic();
            nic.serve(2);
            taker.join().unwrap();
            waiter.join().unwrap();
        });
    }

    fn entries_under_way_are_never_unmarked() {
        let rested = Reached::new("mark cleared");
        let mark = rested.clone();
        explore(2, move || {
            let world = World::new(2, 0, 2);
            world.post(0);
            let mut nic = world.nic();
            nic.step();
            let rester = {
                let (world, mark) = (world.clone(), mark.clone());
                thread::spawn(move || {
                    world.take();
                    world.pair.rest();
                    if world.pair.busy.load_relaxed_gpu() & BUSY == 0 {
                        mark.mark();
                    }
                })
            };
            world.post(1);
            rester.join().unwrap();
            assert_ne!(world.pair.busy.load_relaxed_gpu() & BUSY, 0, "an entry is under way");
        });
        rested.check();
    }

    fn a_wait_covers_posts_of_threads_that_it_synchronised_with() {
        explore(2, || {
            let world = World::new(2, 1, 1);
            let posted = world.pair.status.kernel.at(1);
            let poster = {
                let world = world.clone();
                thread::spawn(move || {
                    world.post(0);
                    world.pair.status.kernel.at(1).store_release_gpu(1);
                    world.finish();
                })
            };
            let waiter = {
                let world = world.clone();
                thread::spawn(move || {
                    await_word(posted);
                    world.wait(world.pair.position()).unwrap();
                    world.cells[0].write(200);
                    world.finish();
                })
            };
            let mut nic = world.nic();
            nic.serve(2);
            poster.join().unwrap();
            waiter.join().unwrap();
            assert!(nic.executed >= 1);
        });
    }
}
