// SPDX-License-Identifier: MIT OR Apache-2.0
//! Models of the mailbox.

use super::{Cell, Reached, explore, models};
use gin_abi::Deadline;
use gin_device::internal::host_word;
use gin_device::internal::mailbox::{Entry, PINNED, SIGNALS, Sender, Value, WANTED, pinned_words};
use gin_device::internal::signal_words::{Words, raise};
use gin_device::internal::status::Status;
use gin_device::sys::loom::{Arena, Loom, LoomWord};
use gin_device::sys::{Memory, Word};
use loom::thread::{self, JoinHandle};
use std::sync::Arc;

/// Number of signals, of values that senders bring, and of cells of plain memory.
const COUNT: usize = 3;

/// A mailbox, signals with a word for it and one for CPU threads, and values.
struct World {
    sender: Sender<Loom>,
    signals: Vec<Words<Loom>>,
    values: Vec<LoomWord>,
    cells: Vec<Cell>,
    status: Status<Loom>,
    _arena: Arena,
}

impl World {
    /// Makes a world whose kernels know that a sender wants the mailbox open.
    fn new() -> Arc<Self> {
        let world = Self::unknown(false);
        world.signals[0].mailbox.expect("there is one").at(WANTED).store_relaxed_gpu(1);
        world
    }

    /// Makes a world whose kernels do not know that yet. `gpu`: its signals have a word that GPUs raise, too.
    fn unknown(gpu: bool) -> Arc<Self> {
        const STATUS_WORDS: usize = 8;
        let pinned = pinned_words::<Loom>() as usize;
        let near = pinned + SIGNALS as usize;
        let signals = near + COUNT * host_word::WORDS as usize;
        let (values, gpus, status) = (signals + COUNT, signals + 2 * COUNT, signals + 3 * COUNT);
        let arena = Arena::new(std::iter::repeat_n(0, status + 3 * STATUS_WORDS));
        let (mailbox, first) = (arena.word(pinned), arena.word(near));
        mailbox.at(PINNED).store_relaxed_gpu(arena.word(0).address());
        let words = |index: usize| Words {
            gpu: gpu.then(|| arena.word(gpus + index)),
            nic: None,
            cpu: Some(arena.word(signals + index)),
            near: first.at(index as u64 * host_word::WORDS),
            mailbox: Some(mailbox),
        };
        let sender = Sender::<Loom> { pinned: arena.word(0) };
        sender.want();
        let block = |index| arena.word(status + index * STATUS_WORDS);
        Arc::new(Self {
            sender,
            signals: (0..COUNT).map(words).collect(),
            values: (0..COUNT).map(|index| arena.word(values + index)).collect(),
            cells: (0..COUNT).map(|_| Cell::new()).collect(),
            status: Status { host: block(0), kernel: block(1), copy: block(2) },
            _arena: arena,
        })
    }

    /// Runs a thread of the model in this world.
    fn spawn(self: &Arc<Self>, run: impl FnOnce(&Self) + 'static) -> JoinHandle<()> {
        let world = self.clone();
        thread::spawn(move || run(&world))
    }

    /// Returns the entry that stores `index + 1` to value `index` and adds 1 to signal `signal`.
    fn entry(&self, index: usize, signal: usize) -> Entry {
        let value = Value { address: self.values[index].address(), value: index as u64 + 1, width_log2: 3 };
        Entry { value: Some(value), signal: Some((signal as u64, 1)) }
    }

    /// Stores and raises as a sender does without a mailbox.
    fn carry(&self, index: usize, signal: usize) {
        self.values[index].store_relaxed_gpu(index as u64 + 1);
        raise(self.signals[signal].cpu.expect("the signal has this word"), 1);
    }

    /// Brings value `index`, with signal `signal`, as a sender does; a copy that came before filled cell `index`.
    fn bring(&self, index: usize, signal: usize, ways: &Ways) {
        self.cells[index].write(1);
        let Some(entry) = self.sender.post(&self.entry(index, signal)) else {
            return self.carry(index, signal);
        };
        loop {
            match self.sender.is_taken(entry) {
                (true, _) => {
                    ways.taken.mark();
                    assert_eq!(self.values[index].load_relaxed_gpu() % 10, index as u64 + 1);
                    return;
                }
                (false, true) => {}
                (false, false) => match self.sender.take_back(std::iter::once(entry)) {
                    Some(taken) if taken > entry => return,
                    Some(_) => {
                        ways.back.mark();
                        return self.carry(index, signal);
                    }
                    None => {}
                },
            }
            Loom::pause(0);
        }
    }

    /// Posts value `index`, with signal `signal`, once the mailbox is open.
    fn post(&self, index: usize, signal: usize) {
        self.cells[index].write(1);
        while self.sender.post(&self.entry(index, signal)).is_none() {
            Loom::pause(0);
        }
    }

    /// Waits for signal `signal` and checks what it covers.
    fn wait(&self, signal: usize, index: usize) {
        let words = &self.signals[signal];
        assert_eq!(words.wait(&self.status, 1, 64, Deadline::NONE, || {}), Ok(1));
        self.cells[index].read();
        assert_eq!(self.values[index].load_relaxed_gpu(), index as u64 + 1, "value {index}");
        // A store of the kernel's own afterwards stays.
        self.values[index].store_relaxed_gpu(index as u64 + 11);
    }

    /// Waits once, without success if nothing has come.
    fn look(&self, signal: usize) {
        let _ = self.signals[signal].wait(&self.status, 1, 64, Deadline::after_ns(0), || {});
    }

    fn check(&self, signal: usize, index: usize) {
        assert_eq!(self.signals[signal].read(64), 1, "signal {signal}");
        assert_eq!(self.values[index].load_relaxed_gpu(), index as u64 + 11, "value {index}");
    }
}

/// The ways of an entry that some run must take.
#[derive(Clone)]
struct Ways {
    taken: Reached,
    back: Reached,
}

impl Ways {
    fn new() -> Self {
        Self { taken: Reached::new("an entry that a kernel takes"), back: Reached::new("an entry that is taken back") }
    }
}

models! {
    fn an_entry_has_one_effect_whether_a_kernel_takes_it_or_its_sender_takes_it_back() {
        let ways = Ways::new();
        let all = ways.clone();
        explore(3, move || {
            let (world, ways) = (World::new(), all.clone());
            let sender = world.spawn(move |world| world.bring(0, 0, &ways));
            world.look(1);
            world.wait(0, 0);
            sender.join().unwrap();
            world.check(0, 0);
        });
        ways.taken.check();
        ways.back.check();
    }

    fn a_waiting_kernel_learns_that_a_sender_wants_the_mailbox_open_and_sees_what_it_takes() {
        explore(2, || {
            let world = World::unknown(false);
            let sender = world.spawn(|world| world.post(0, 0));
            world.wait(0, 0);
            sender.join().unwrap();
            world.check(0, 0);
        });
    }

    fn a_signal_that_gpus_raise_too_counts_what_the_mailbox_brings_once() {
        explore(2, || {
            let world = World::unknown(true);
            let sender = world.spawn(|world| world.post(0, 0));
            let other = world.spawn(|world| {
                    world.cells[1].write(1);
                    raise(world.signals[0].gpu.expect("the signal has this word"), 1);
                });
            let words = &world.signals[0];
            assert_eq!(words.wait(&world.status, 2, 64, Deadline::NONE, || {}), Ok(2));
            world.cells[0].read();
            world.cells[1].read();
            sender.join().unwrap();
            other.join().unwrap();
        });
    }

    fn a_kernel_sees_what_another_one_took_that_keeps_the_mailbox_open() {
        explore(1, || {
            let world = World::new();
            let sender = world.spawn(|world| world.post(0, 0));
            let other = world.spawn(|world| {
                    let words = &world.signals[1];
                    assert_eq!(words.wait(&world.status, 1, 64, Deadline::NONE, || {}), Ok(1));
                });
            world.wait(0, 0);
            raise(world.signals[1].cpu.expect("the signal has this word"), 1);
            sender.join().unwrap();
            other.join().unwrap();
            world.check(0, 0);
        });
    }

    fn an_entry_is_taken_back_once_though_kernels_come_and_go() {
        let ways = Ways::new();
        let all = ways.clone();
        explore(2, move || {
            let (world, ways) = (World::new(), all.clone());
            let sender = world.spawn(move |world| world.bring(0, 0, &ways));
            let other = world.spawn(|world| world.look(1));
            world.wait(0, 0);
            sender.join().unwrap();
            other.join().unwrap();
            world.check(0, 0);
        });
        ways.taken.check();
        ways.back.check();
    }

    fn a_thread_that_finds_another_sender_taking_back_closes_with_the_number_of_entries_taken() {
        let ways = Ways::new();
        let all = ways.clone();
        explore(1, move || {
            let (world, ways) = (World::new(), all.clone());
            let sender = world.spawn(move |world| world.bring(0, 0, &ways));
            let other = world.spawn(|world| {
                    // It has no entries.
                    let _ = world.sender.take_back(std::iter::empty());
                });
            let kernel = world.spawn(|world| world.look(1));
            world.wait(0, 0);
            [sender, other, kernel].into_iter().for_each(|thread| thread.join().unwrap());
            world.check(0, 0);
        });
        ways.taken.check();
        ways.back.check();
    }

    fn entries_come_in_order_and_no_slot_is_used_before_it_was_read() {
        explore(2, || {
            let world = World::new();
            let sender = world.spawn(|world| {
                    for index in 0..COUNT {
                        world.cells[index].write(1);
                        // Only the last one has a signal, which covers all of them.
                        let entry = world.entry(index, 0);
                        let entry = if index + 1 == COUNT { entry } else { Entry { signal: None, ..entry } };
                        while world.sender.post(&entry).is_none() {
                            Loom::pause(0);
                        }
                    }
                });
            let words = &world.signals[0];
            words.wait(&world.status, 1, 64, Deadline::NONE, || {}).expect("nothing stops the wait");
            for index in 0..COUNT {
                world.cells[index].read();
                assert_eq!(world.values[index].load_relaxed_gpu(), index as u64 + 1, "value {index}");
            }
            sender.join().unwrap();
        });
    }

    fn two_senders_share_a_mailbox() {
        explore(2, || {
            let world = World::new();
            let senders = [0, 1].map(|index| world.spawn(move |world| world.post(index, 0)));
            let words = &world.signals[0];
            words.wait(&world.status, 2, 64, Deadline::NONE, || {}).expect("nothing stops the wait");
            for index in 0..2 {
                world.cells[index].read();
                assert_eq!(world.values[index].load_relaxed_gpu(), index as u64 + 1, "value {index}");
            }
            senders.into_iter().for_each(|sender| sender.join().unwrap());
        });
    }

    fn a_kernel_takes_what_another_one_waits_for_and_continues_where_that_one_stopped() {
        explore(1, || {
            let world = World::new();
            let sender = world.spawn(|world| (0..2).for_each(|index| world.post(index, index)));
            let other = world.spawn(|world| world.wait(0, 0));
            world.wait(1, 1);
            other.join().unwrap();
            sender.join().unwrap();
            world.check(0, 0);
            world.check(1, 1);
        });
    }
}
