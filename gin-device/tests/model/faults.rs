// SPDX-License-Identifier: MIT OR Apache-2.0
//! Models of the values of faults.

use super::{Reached, explore, models};
use gin_device::internal::fault::{Log, SLOT_WORDS};
use gin_device::sys::Word;
use gin_device::sys::loom::{Arena, Loom};
use loom::thread;
use std::sync::Arc;

/// Returns a log of `slots` slots and, behind its words, one word more.
fn log(slots: u64) -> (Arc<Arena>, Log<Loom>) {
    let arena = Arc::new(Arena::new(vec![0; (SLOT_WORDS * (slots + 1) + 1) as usize]));
    let first = arena.word(0);
    (arena, Log { first, slot_mask: slots - 1 })
}

models! {
    fn a_fault_has_its_own_values_or_none() {
        let overwritten = Reached::new("another fault took the slot");
        let mark = overwritten.clone();
        explore(3, move || {
            let (_arena, log) = log(1);
            let fail = move |seed: u64| {
                let values = [seed, seed + 1, seed + 2, seed + 3];
                let ticket = log.store(values);
                let found = log.load(ticket);
                assert!(found.is_none_or(|found| found == values), "{found:?} of {values:?}");
                (ticket, values, found)
            };
            let other = thread::spawn(move || fail(10));
            let mine = fail(20);
            let other = other.join().unwrap();
            // Of the two one is in the slot now, whole.
            let last = [mine, other].map(|(ticket, values, _)| log.load(ticket).inspect(|found| assert_eq!(*found, values)));
            assert!(last.iter().flatten().count() <= 1);
            if mine.2.is_none() || other.2.is_none() {
                mark.mark();
            }
        });
        overwritten.check();
    }

    fn a_thread_that_is_given_a_fault_finds_its_values() {
        let given = Reached::new("the fault was given in time");
        let mark = given.clone();
        explore(3, move || {
            let (arena, log) = log(2);
            let mail = arena.word(3 * SLOT_WORDS as usize);
            let maker = thread::spawn(move || mail.store_relaxed_gpu(log.store([1, 2, 3, 4])));
            let ticket = mail.load_relaxed_gpu();
            if ticket != 0
                && let Some(values) = log.load(ticket)
            {
                assert_eq!(values, [1, 2, 3, 4]);
                mark.mark();
            }
            maker.join().unwrap();
        });
        given.check();
    }
}
