// SPDX-License-Identifier: MIT OR Apache-2.0
//! Models of messages with the flag in the data.

use super::{Reached, Setup, World, explore, fault, models};
use gin_abi::Deadline;
use gin_device::inbox::Ring;
use gin_device::sys::Word;
use gin_device::sys::loom::Loom;
use loom::thread;
use std::sync::Arc;

const SLOTS: u64 = 2;
const UNITS: u64 = 2;
/// Number of messages before the model begins. The second one of the model has a number whose low 32 bits are 0.
const BEFORE: u64 = (1 << 32) - 2;

/// Returns a world, and the ring of a sender that has sent `BEFORE` messages, all received. Cell `i` stands for the
/// bytes that the receiver loads of message `i` of the model.
fn ring(cells: usize) -> (Arc<World>, Ring<Loom>) {
    let stale = |number: u64| Some(number << 32);
    // The words of slot 0, those of slot 1, the word that gives slots back, and an unused one.
    let signals =
        vec![[stale(BEFORE), stale(BEFORE), stale(BEFORE - 1), None], [stale(BEFORE - 1), Some(BEFORE), None, None]];
    let world = World::new(Setup { signals, cells, ..Setup::default() });
    let first = world.signals[0].gpu.expect("the signal has this word");
    let ring = Ring { slots: first, credit: first.at(SLOTS * UNITS), count: SLOTS, units: UNITS };
    (world, ring)
}

fn data(number: u64, unit: u64) -> u32 {
    (10 * number + unit) as u32
}

models! {
    fn messages_are_whole_and_no_slot_is_used_before_it_was_given_back() {
        let waited = Reached::new("a send without room");
        let mark = waited.clone();
        explore(2, move || {
            let (world, ring) = ring(4);
            let sender = {
                let (world, mark) = (world.clone(), mark.clone());
                thread::spawn(move || {
                    let mut credit = BEFORE;
                    for number in BEFORE + 1..=BEFORE + 4 {
                        if !ring.has_room(number, credit) {
                            mark.mark();
                            credit = ring.await_room(number, &world.status, Deadline::NONE).unwrap();
                        }
                        if let Some(before) = (number - BEFORE).checked_sub(SLOTS + 1) {
                            world.cells[before as usize].write(number);
                        }
                        for unit in 0..UNITS {
                            ring.store(number, unit, data(number, unit));
                        }
                    }
                })
            };
            for number in BEFORE + 1..=BEFORE + 4 {
                for unit in 0..UNITS {
                    let mut word = (0, 0);
                    let arrived = || {
                        word = ring.load(number, unit);
                        word.1 == number as u32
                    };
                    world.status.poll(Deadline::NONE, arrived).unwrap();
                    assert_eq!(word.0, data(number, unit), "message {number}");
                }
                world.cells[(number - BEFORE - 1) as usize].read();
                ring.give_back(number);
            }
            sender.join().unwrap();
        });
        waited.check();
    }

    fn a_wait_for_room_ends_with_the_fault_that_is_posted_meanwhile() {
        explore(3, || {
            let (world, ring) = ring(0);
            let host = {
                let world = world.clone();
                thread::spawn(move || world.status.post(fault(3)))
            };
            let waited = ring.await_room(BEFORE + SLOTS + 1, &world.status, Deadline::NONE);
            assert_eq!(world.fault_of(waited.map_err(|(stop, _)| stop)), fault(3));
            host.join().unwrap();
        });
    }
}
