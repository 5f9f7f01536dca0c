// SPDX-License-Identifier: MIT OR Apache-2.0
//! The word operations under the model checker loom, and the switches of the mutation tests.
//!
//! loom knows orderings but no scopes, no load buffering and no DMA: what it cannot see is argued in the docs of the
//! protocol and checked in its PTX. Time does not pass here, so deadlines other than 0 are never over.
//!
//! # Control dependencies
//! loom, as the language's own model, orders two stores to one word only when one happens before the other. Hardware
//! knows one order more: a store that depends on a branch on a loaded value comes after that load. The queue's slots
//! rely on it (see `queue`), and doorbells (see `backend::gdaki`), so these stores are exchanges here: they take their
//! place after the stores that were made so far, and as they are relaxed they order nothing else.
//!
//! # Loads before stores
//! loom remembers one access for each word, the last. A thread's own load of a word thereby hides an earlier load by
//! another thread from the store that comes next, and the run in which the store comes first is never tried. So every
//! load is preceded by a wake-up that wakes nobody: of those, loom tries all orders, and they order no memory.
//!
//! # Waiting
//! Two threads that poll could do so in turn for ever while a third, that they wait for, is never scheduled; loom would
//! explore that without end. A run in which threads have paused [`IDLE_PAUSES`] times and found all words as they were
//! at the pause before is therefore carried on fairly but explored no further: polling once more changes nothing.

use super::{Memory, Word};
use core::cell::Cell;
use core::panic::Location;
use core::sync::atomic::AtomicU32;
use loom::sync::Condvar;
use loom::sync::atomic::{AtomicU64, Ordering, fence};

extern crate std;
use std::string::String;
use std::sync::{Mutex, PoisonError};
use std::vec::Vec;

/// The change of a mutation test.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Mutation {
    /// The operation at this place (file, line) becomes relaxed; a fence becomes nothing.
    Weaken {
        /// File as `Location` gives it.
        file: String,
        /// Line in it.
        line: u32,
    },
    /// The two halves of the `ordered!` of this name change places.
    Swap(String),
}

static MUTATION: Mutex<Option<Mutation>> = Mutex::new(None);
static HITS: AtomicU32 = AtomicU32::new(0);

/// Sets the mutation of this process, or none.
pub fn mutate(mutation: Option<Mutation>) {
    *MUTATION.lock().unwrap_or_else(PoisonError::into_inner) = mutation;
    HITS.store(0, core::sync::atomic::Ordering::Relaxed);
}

/// How often the mutated place was passed since [`mutate`].
pub fn hits() -> u32 {
    HITS.load(core::sync::atomic::Ordering::Relaxed)
}

/// Returns whether there is a mutation.
pub fn mutated() -> bool {
    MUTATION.lock().unwrap_or_else(PoisonError::into_inner).is_some()
}

/// Returns whether this is the mutated place; if so, counts that it was passed.
fn passed(is_it: impl FnOnce(&Mutation) -> bool) -> bool {
    let it = MUTATION.lock().unwrap_or_else(PoisonError::into_inner).as_ref().is_some_and(is_it);
    if it {
        HITS.fetch_add(1, core::sync::atomic::Ordering::Relaxed);
    }
    it
}

#[track_caller]
fn weakened() -> bool {
    let place = Location::caller();
    passed(
        |mutation| matches!(mutation, Mutation::Weaken { file, line } if place.line() == *line && place.file().ends_with(file.as_str())),
    )
}

#[track_caller]
fn ordering(written: Ordering) -> Ordering {
    if written != Ordering::Relaxed && weakened() { Ordering::Relaxed } else { written }
}

/// Pauses without a change in between after which a run is explored no further: two for each of three threads, the
/// first of which may have seen old values.
pub const IDLE_PAUSES: u32 = 6;

std::thread_local! {
    /// Pauses since something changed in this run; all threads of a model run on one thread of the system.
    static IDLE: Cell<u32> = const { Cell::new(0) };
    /// The sum of all words, now and at the last pause.
    static STATE: Cell<[u64; 2]> = const { Cell::new([0; 2]) };
}

/// Returns a word's part of the sum.
fn part(cell: *const Cell64, value: u64) -> u64 {
    let mixed = (value ^ (cell.addr() as u64)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

/// Returns whether stores of this name go to words that several threads store to, each after a branch that makes it the
/// next one: doorbells and their records. See the module's docs.
fn depends(operation: &str) -> bool {
    matches!(operation, "store_mmio" | "store_relaxed_sys")
}

/// Returns the value that an exchange of this name leaves.
fn stored(operation: &str, before: u64, value: u64) -> u64 {
    match operation {
        "fetch_max" => before.max(value),
        "fetch_or" => before | value,
        "fetch_and" => before & value,
        _ => before.wrapping_add(value),
    }
}

/// A word, and what makes its loads known to loom's search.
#[derive(Debug)]
struct Cell64 {
    value: AtomicU64,
    loads: Condvar,
    /// The last stored value, for [`STATE`].
    last: Cell<u64>,
}

// Safety: all threads of a model run on one thread of the system, one at a time.
unsafe impl Sync for Cell64 {}

/// Words of one model run; keep it alive (in an `Arc`, say) for as long as handles are used.
#[derive(Debug)]
pub struct Arena(Vec<Cell64>);

impl Arena {
    /// An arena with these initial values.
    pub fn new(values: impl IntoIterator<Item = u64>) -> Self {
        IDLE.set(0);
        STATE.set([0; 2]);
        let cell = |value| Cell64 { value: AtomicU64::new(value), loads: Condvar::new(), last: Cell::new(value) };
        Self(values.into_iter().map(cell).collect())
    }

    /// Handle to word `index`.
    pub fn word(&self, index: usize) -> LoomWord {
        LoomWord(&self.0[index])
    }
}

/// A word under loom.
#[derive(Clone, Copy, Debug)]
pub struct LoomWord(*const Cell64);

// Safety: the handle is the address of a loom atomic, which may be shared among the threads of a model.
unsafe impl Send for LoomWord {}
// Safety: as above.
unsafe impl Sync for LoomWord {}

impl LoomWord {
    /// The atomic, for a store.
    fn change<'a>(self) -> &'a AtomicU64 {
        &self.cell().value
    }

    /// Notes what was stored.
    fn changed(self, value: u64) {
        let before = self.cell().last.replace(value);
        let [now, paused] = STATE.get();
        STATE.set([now.wrapping_sub(part(self.0, before)).wrapping_add(part(self.0, value)), paused]);
    }

    /// The atomic, for a load.
    fn look<'a>(self) -> &'a AtomicU64 {
        let cell = self.cell();
        cell.loads.notify_one();
        &cell.value
    }

    fn cell<'a>(self) -> &'a Cell64 {
        // Safety: `Arena` docs: the arena outlives the handles' use.
        unsafe { &*self.0 }
    }
}

/// The memory of a loom model.
#[derive(Clone, Copy, Debug)]
pub struct Loom;

macro_rules! implement {
    ($(
        $shape:ident $name:ident $ptx:literal $($fallback:literal)? $ordering:ident $($op:ident)? $doc:literal;
    )*) => { implement_traits! { [] [] $($shape $name $ordering $($op)?;)* } };
}

macro_rules! implement_traits {
    ([$($word:tt)*] [$($fence:tt)*] load $name:ident $ordering:ident; $($rest:tt)*) => {
        implement_traits! { [$($word)*
            #[track_caller]
            fn $name(self) -> u64 { self.look().load(ordering(Ordering::$ordering)) }
        ] [$($fence)*] $($rest)* }
    };
    ([$($word:tt)*] [$($fence:tt)*] store $name:ident $ordering:ident; $($rest:tt)*) => {
        implement_traits! { [$($word)*
            #[track_caller]
            fn $name(self, value: u64) {
                let ordering = ordering(Ordering::$ordering);
                if depends(stringify!($name)) {
                    self.change().swap(value, ordering);
                } else {
                    self.change().store(value, ordering);
                }
                self.changed(value);
            }
        ] [$($fence)*] $($rest)* }
    };
    ([$($word:tt)*] [$($fence:tt)*] rmw $name:ident $ordering:ident $op:ident; $($rest:tt)*) => {
        implement_traits! { [$($word)*
            #[track_caller]
            fn $name(self, value: u64) -> u64 {
                let before = self.change().$op(value, ordering(Ordering::$ordering));
                self.changed(stored(stringify!($op), before, value));
                before
            }
        ] [$($fence)*] $($rest)* }
    };
    ([$($word:tt)*] [$($fence:tt)*] cas $name:ident $ordering:ident; $($rest:tt)*) => {
        implement_traits! { [$($word)*
            #[track_caller]
            fn $name(self, expected: u64, new: u64) -> u64 {
                match self.change().compare_exchange(expected, new, ordering(Ordering::$ordering), Ordering::Relaxed) {
                    Ok(seen) => {
                        self.changed(new);
                        seen
                    }
                    Err(seen) => seen,
                }
            }
        ] [$($fence)*] $($rest)* }
    };
    ([$($word:tt)*] [$($fence:tt)*] fence $name:ident $ordering:ident; $($rest:tt)*) => {
        implement_traits! { [$($word)*] [$($fence)*
            #[track_caller]
            fn $name() {
                if !weakened() {
                    fence(Ordering::$ordering);
                }
            }
        ] $($rest)* }
    };
    ([$($word:tt)*] [$($fence:tt)*]) => {
        impl Word for LoomWord {
            $($word)*

            // Exchanges, whose result nobody reads: see the module's docs on control dependencies.
            fn store_pair_relaxed_sys(self, low: u64, high: u64) {
                self.change().swap(low, Ordering::Relaxed);
                self.changed(low);
                self.at(1).change().swap(high, Ordering::Relaxed);
                self.at(1).changed(high);
            }

            fn at(self, index: u64) -> Self {
                // Stays in the arena's array, as the trait asks.
                Self(self.0.wrapping_add(index as usize))
            }
        }

        impl Memory for Loom {
            type Word = LoomWord;

            // Every poll yields, or the checker would follow one thread for ever.
            const POLLS_PER_CHECK: u32 = 1;

            const POLLS_PER_ATTEND: u32 = 1;

            const LOOK_NS: u64 = 0;

            $($fence)*

            fn pause(_: u32) {
                let [now, paused] = STATE.get();
                STATE.set([now; 2]);
                IDLE.set(if now == paused { IDLE.get() + 1 } else { 1 });
                if IDLE.get() > IDLE_PAUSES {
                    loom::skip_branch();
                }
                loom::thread::yield_now();
            }

            fn clock_ns() -> u64 {
                0
            }

            fn swapped(name: &str) -> bool {
                passed(|mutation| matches!(mutation, Mutation::Swap(other) if other == name))
            }
        }
    };
}

word_operations!(implement);
