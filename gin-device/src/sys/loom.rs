// SPDX-License-Identifier: MIT OR Apache-2.0
//! The word operations under the model checker loom, and the switches of the mutation tests.
//!
//! loom models orderings, but neither scopes, nor load buffering, nor DMA. For these the docs of a protocol have the
//! argument, and tests check its PTX. Time does not pass here, so deadlines other than 0 never pass.
//!
//! # Control dependencies
//! loom, like the language's own model, orders two stores to one word only if one happens before the other. Hardware
//! has one more order: a store that depends on a branch on a loaded value comes after that load. The queue's slots (see
//! `queue`) and the records of doorbells (see `backend::gdaki`) rely on it. So these stores are exchanges here: each
//! comes after all stores made so far. An exchange also hands on what the store before it released, which a store does
//! not. Doorbells are stores, so that a model shows whether each hands on what it announces.
//!
//! # Loads before stores
//! loom remembers only the last access to each word. So a thread's own load of a word hides an earlier load by another
//! thread from the next store, and loom never tries the run in which that store comes first. Therefore a wake-up
//! without a waiter precedes every load: loom tries all orders of wake-ups, and they order no memory.
//!
//! # Waiting
//! Two polling threads could run in turn for ever while the third thread, which they wait for, is never scheduled. loom
//! would explore such runs without end. So once threads have paused [`IDLE_PAUSES`] times without a change of any word,
//! the run continues with fair scheduling and is explored no further, because one more poll changes nothing.

use super::{Memory, Word};
use core::cell::{Cell, OnceCell, RefCell};
use core::panic::Location;
use core::sync::atomic::AtomicU32;
use loom::sync::Condvar;
use loom::sync::atomic::{AtomicU64, Ordering, fence};

extern crate std;
use std::boxed::Box;
use std::collections::BTreeMap;
use std::string::String;
use std::sync::{Mutex, PoisonError};
use std::vec;
use std::vec::Vec;

/// The change of a mutation test.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Mutation {
    /// Makes the operation at this place (file, line) relaxed, or removes a fence there.
    Weaken {
        /// The file, as in `Location`.
        file: String,
        /// The line in the file.
        line: u32,
    },
    /// Swaps the two halves of the `ordered!` of this name.
    Swap(String),
}

static MUTATION: Mutex<Option<Mutation>> = Mutex::new(None);
static HITS: AtomicU32 = AtomicU32::new(0);

/// Sets the mutation of this process, or none.
pub fn mutate(mutation: Option<Mutation>) {
    *MUTATION.lock().unwrap_or_else(PoisonError::into_inner) = mutation;
    HITS.store(0, core::sync::atomic::Ordering::Relaxed);
}

/// Returns how often the mutated place was passed since [`mutate`].
pub fn hits() -> u32 {
    HITS.load(core::sync::atomic::Ordering::Relaxed)
}

/// Returns whether there is a mutation.
pub fn mutated() -> bool {
    MUTATION.lock().unwrap_or_else(PoisonError::into_inner).is_some()
}

/// Returns whether this is the mutated place. If so, counts the pass.
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

/// Number of pauses without a change after which a run is explored no further: two for each of three threads, because a
/// thread's first pause may follow old values.
pub const IDLE_PAUSES: u32 = 6;

std::thread_local! {
    /// The pauses since the last change in this run. All threads of a model run on one OS thread.
    static IDLE: Cell<u32> = const { Cell::new(0) };
    /// The sum of all words, now and at the last pause.
    static STATE: Cell<[u64; 2]> = const { Cell::new([0; 2]) };
}

/// Returns a word's part of the sum.
fn part(cell: *const Cell64, value: u64) -> u64 {
    let mixed = (value ^ (cell.addr() as u64)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

/// Returns whether stores of this name are control-dependent: several threads store to the same words, each after a
/// branch that orders its store behind the others. See the module's docs.
fn depends(operation: &str) -> bool {
    operation == "store_relaxed_sys"
}

/// Returns the new value of a read-modify-write of this name.
fn stored(operation: &str, before: u64, value: u64) -> u64 {
    match operation {
        "fetch_max" => before.max(value),
        "fetch_or" => before | value,
        "fetch_and" => before & value,
        _ => before.wrapping_add(value),
    }
}

/// A word, and the wake-up that reveals its loads to loom's search. loom knows neither before its first use.
#[derive(Debug)]
struct Cell64 {
    value: OnceCell<AtomicU64>,
    loads: OnceCell<Condvar>,
    /// The last stored value, for [`STATE`].
    last: Cell<u64>,
    is_used: Cell<bool>,
    spares: *const Spares,
}

// Safety: all threads of a model run on one OS thread, one at a time.
unsafe impl Sync for Cell64 {}
// Safety: as above.
unsafe impl Send for Cell64 {}

/// Atomics with the value 0.
#[derive(Debug)]
struct Spares(RefCell<Vec<AtomicU64>>);

// Safety: as above.
unsafe impl Sync for Spares {}

/// Number of words that one run may be the first to use.
const SPARES: usize = 16;

/// The words of one model run. It must live (in an `Arc`, for example) as long as handles are used.
///
/// Each atomic costs loom time at each fence, and models use few of their words. So an arena begins with atomics only
/// for the words that earlier runs of the search have used, and with a few for others: one that its first user made
/// would be unknown to threads that are not ordered behind it.
#[derive(Debug)]
pub struct Arena {
    words: Vec<Cell64>,
    // The words point here.
    _spares: Box<Spares>,
}

std::thread_local! {
    /// The words that runs of this search have used, by the number of words of their arena.
    static USED: RefCell<BTreeMap<usize, Vec<bool>>> = const { RefCell::new(BTreeMap::new()) };
}

/// Begins a search.
pub fn begin() {
    USED.take();
}

impl Arena {
    /// Returns an arena with these initial values.
    pub fn new(values: impl IntoIterator<Item = u64>) -> Self {
        IDLE.set(0);
        STATE.set([0; 2]);
        let values: Vec<_> = values.into_iter().collect();
        let used = USED.with_borrow(|used| used.get(&values.len()).cloned());
        let spares = if used.is_some() { SPARES } else { 0 };
        let spares = Box::new(Spares(RefCell::new((0..spares).map(|_| AtomicU64::new(0)).collect())));
        let word = |(index, value)| {
            let is_used = value != 0 || used.as_ref().is_none_or(|used| used[index]);
            let atomic = is_used.then(|| OnceCell::from(AtomicU64::new(value)));
            Cell64 {
                value: atomic.unwrap_or_default(),
                loads: OnceCell::new(),
                last: Cell::new(value),
                is_used: Cell::new(false),
                spares: &raw const *spares,
            }
        };
        Self { words: values.into_iter().enumerate().map(word).collect(), _spares: spares }
    }

    /// Returns the handle to word `index`.
    pub fn word(&self, index: usize) -> LoomWord {
        LoomWord(&self.words[index])
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        USED.with_borrow_mut(|all| {
            let used = all.entry(self.words.len()).or_insert_with(|| vec![false; self.words.len()]);
            used.iter_mut().zip(&self.words).for_each(|(used, word)| *used |= word.is_used.get());
        });
    }
}

/// A word under loom.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LoomWord(*const Cell64);

// Safety: the handle is the address of a loom atomic, which threads of a model may share.
unsafe impl Send for LoomWord {}
// Safety: as above.
unsafe impl Sync for LoomWord {}

impl LoomWord {
    /// Returns its address, for [`Memory::word`].
    pub fn address(self) -> u64 {
        self.0.expose_provenance() as u64
    }

    /// Returns the atomic, for a store.
    fn change<'a>(self) -> &'a AtomicU64 {
        let cell = self.cell();
        cell.is_used.set(true);
        cell.value.get_or_init(|| {
            // Safety: the arena lives, and the spares with it.
            let spare = unsafe { &*cell.spares }.0.borrow_mut().pop();
            spare.unwrap_or_else(|| {
                std::eprintln!("a run uses more than {SPARES} words that no earlier one has used");
                // A panic would look like the failure of a model.
                std::process::abort()
            })
        })
    }

    /// Notes the stored value.
    fn changed(self, value: u64) {
        let before = self.cell().last.replace(value);
        let [now, paused] = STATE.get();
        STATE.set([now.wrapping_sub(part(self.0, before)).wrapping_add(part(self.0, value)), paused]);
    }

    /// Returns the atomic, for a load.
    fn look<'a>(self) -> &'a AtomicU64 {
        self.cell().loads.get_or_init(Condvar::new).notify_one();
        self.change()
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
    ([$($word:tt)*] [$($fence:tt)*] red $name:ident $ordering:ident $op:ident; $($rest:tt)*) => {
        implement_traits! { [$($word)*
            #[track_caller]
            fn $name(self, value: u64) {
                let before = self.change().$op(value, ordering(Ordering::$ordering));
                self.changed(stored(stringify!($op), before, value));
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

            // Exchanges whose results are not used: see the module's docs on control dependencies.
            fn store_pair_relaxed_sys(self, low: u64, high: u64) {
                self.change().swap(low, Ordering::Relaxed);
                self.changed(low);
                self.at(1).change().swap(high, Ordering::Relaxed);
                self.at(1).changed(high);
            }

            fn at(self, index: u64) -> Self {
                // Stays in the arena's array, as the trait requires.
                Self(self.0.wrapping_add(index as usize))
            }
        }

        impl Memory for Loom {
            type Word = LoomWord;

            // Every poll yields. Otherwise the checker would follow one thread for ever.
            const POLLS_PER_CHECK: u32 = 1;

            const POLLS_PER_ATTEND: u32 = 1;

            const LOOK_NS: u64 = 0;

            const MAILBOX_LOG2: u32 = 1;

            $($fence)*

            unsafe fn word(address: u64) -> LoomWord {
                LoomWord(core::ptr::with_exposed_provenance(address as usize))
            }

            unsafe fn store_value(address: u64, value: u64, _: u32) {
                // Safety: the caller's promise.
                let word = unsafe { Self::word(address) };
                word.change().store(value, Ordering::Relaxed);
                word.changed(value);
            }

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
