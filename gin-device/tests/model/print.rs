// SPDX-License-Identifier: MIT OR Apache-2.0
//! Models of the ring of lines that kernels print.

use super::{Reached, Setup, World, explore, models};
use gin_device::internal::print::Ring;
use gin_device::sys::loom::{Arena, Loom};
use gin_device::sys::{Memory, Word};
use loom::thread;
use std::sync::Arc;

/// A ring of two slots, whose contents are the two cells of a world.
struct Lines {
    ring: Ring<Loom>,
    world: Arc<World>,
    _arena: Arena,
}

const SLOTS: u64 = 2;
const WORDS: usize = (SLOTS * gin_abi::print::SLOT_WORDS) as usize;

impl Lines {
    fn new() -> Arc<Self> {
        let arena = Arena::new(vec![0; WORDS + 4]);
        let word = |index| arena.word(WORDS + index);
        let ring = Ring {
            slots: arena.word(0),
            taken: word(0),
            mask: SLOTS - 1,
            tickets: word(1),
            head: word(2),
            dropped: word(3),
        };
        let world = World::new(Setup { cells: SLOTS as usize, ..Setup::default() });
        Arc::new(Self { ring, world, _arena: arena })
    }

    fn print(&self, value: u64) -> Option<u64> {
        let index = self.ring.claim()?;
        self.world.cells[(index % SLOTS) as usize].write(value);
        self.ring.publish(index);
        Some(index)
    }

    /// Takes line `index` and returns its value.
    fn take(&self, index: u64) -> u64 {
        while !self.ring.is_whole(index) {
            Loom::pause(0);
        }
        let value = self.world.cells[(index % SLOTS) as usize].read();
        self.ring.take(index + 1);
        value
    }
}

models! {
    fn the_host_reads_whole_lines_in_the_order_of_their_indices_and_each_thread_prints_in_its_order() {
        explore(3, || {
            let lines = Lines::new();
            let printer = {
                let lines = lines.clone();
                thread::spawn(move || {
                    for value in [10, 11] {
                        assert!(lines.print(value).is_some(), "there is room");
                    }
                })
            };
            assert_eq!([lines.take(0), lines.take(1)], [10, 11]);
            printer.join().unwrap();
        });
    }

    fn a_slot_is_written_again_only_after_the_host_has_read_it_and_a_full_ring_drops_and_counts() {
        let both = Reached::new("both threads find a slot");
        let none = Reached::new("both lines are dropped");
        let marks = [none.clone(), both.clone()];
        explore(3, move || {
            let lines = Lines::new();
            for value in [1, 2] {
                lines.print(value);
            }
            let printers = [3, 4].map(|value| {
                let lines = lines.clone();
                thread::spawn(move || lines.print(value))
            });
            assert_eq!([lines.take(0), lines.take(1)], [1, 2]);
            let found = printers.map(|printer| printer.join().unwrap());
            let count = found.iter().flatten().count() as u64;
            assert_eq!(lines.ring.dropped.load_relaxed_gpu(), 2 - count);
            // The printed lines have no gaps, and each is printed once.
            let mut values: Vec<_> = (2..2 + count).map(|index| lines.take(index)).collect();
            values.sort_unstable();
            let expected: Vec<_> =
                [3, 4].into_iter().zip(found).filter_map(|(value, index)| index.map(|_| value)).collect();
            assert_eq!(values, expected);
            match count {
                0 => marks[0].mark(),
                2 => marks[1].mark(),
                _ => {}
            }
        });
        both.check();
        none.check();
    }
}
