// SPDX-License-Identifier: MIT OR Apache-2.0
//! Faults, as kernels see them.
//!
//! On a CPU a fault is a plain value. On a GPU that would take eight registers wherever a call can fail, so there a
//! fault is one word, which is not zero:
//!
//! | bits | field |
//! | --- | --- |
//! | 0 to 5 | kind |
//! | 6 to 9 | operation |
//! | 10 to 18 | context, all ones if none |
//! | 19 to 43 | peer, all ones if none |
//! | 44 to 63 | ticket of its values in the [`Log`], 0 if it has none |
//!
//! A function stores the values (what the fault concerns, the expected value and the value seen) in the module's log,
//! where the fault is made. `report` and `to_words` read them back.

use crate::sys::{Memory, Word};
#[cfg(not(target_arch = "nvptx64"))]
pub use gin_abi::Fault;
use gin_abi::{FaultKind, FaultSubject, Operation};
#[cfg(target_arch = "nvptx64")]
pub use gpu::Fault;

/// A field of a fault's word: its lowest bit and its number of bits.
#[derive(Clone, Copy)]
struct Field(u32, u32);

const KIND: Field = Field(0, 6);
const OPERATION: Field = Field(6, 4);
const CONTEXT: Field = Field(10, 9);
const PEER: Field = Field(19, 25);
const TICKET: Field = Field(44, 20);

const _: () = {
    // All ones stands for none.
    assert!(gin_abi::MAX_CONTEXTS < 1 << CONTEXT.1 && gin_abi::MAX_RANKS < 1 << PEER.1);
    assert!(gin_abi::FaultKind::ALL.len() < 1 << KIND.1 && gin_abi::Operation::ALL.len() <= 1 << OPERATION.1);
};

#[cfg_attr(not(any(target_arch = "nvptx64", test)), expect(dead_code, reason = "only faults on a GPU are packed"))]
impl Field {
    #[inline(always)]
    const fn mask(self) -> u64 {
        ((1 << self.1) - 1) << self.0
    }

    #[inline(always)]
    const fn read(self, word: u64) -> u64 {
        (word & self.mask()) >> self.0
    }

    /// Returns `word` with this value in the field. A value that is too large becomes all ones.
    #[inline(always)]
    const fn write(self, word: u64, value: u32) -> u64 {
        let max = (1 << self.1) - 1;
        let value = if value > max { max } else { value };
        word & !self.mask() | (value as u64) << self.0
    }

    /// Returns the value, or [`gin_abi::fault::NONE`] for all ones.
    #[inline(always)]
    const fn number(self, word: u64) -> u32 {
        if word & self.mask() == self.mask() { gin_abi::fault::NONE } else { self.read(word) as u32 }
    }
}

/// Values of faults in shared memory. Old ones are overwritten.
///
/// | words | hold |
/// | --- | --- |
/// | 0 | the number of faults that had values |
/// | 8 to 15 | slot 0: the ticket of its fault, then the four values; three are unused |
/// | 16 to 23 | slot 1, and so on |
///
/// A slot is written like a sequence lock: the writer marks it, stores the values, then the ticket with release. A
/// reader that finds the same ticket before and after its reads has the values of that fault. Nobody waits: a writer
/// that finds another at work in its slot, a whole round of slots ago, leaves its fault without values.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Log<M: Memory> {
    /// The first word. All are 0 at first.
    pub first: M::Word,
    /// Number of slots, less one; the number is a power of two.
    pub slot_mask: u64,
}

/// Words of a slot.
pub const SLOT_WORDS: u64 = 8;

/// Stands for the ticket of a slot while its values are stored. Tickets are odd.
const WRITING: u64 = 2;

impl<M: Memory> Log<M> {
    #[inline(always)]
    fn slot(&self, ticket: u64) -> M::Word {
        self.first.at(SLOT_WORDS * (1 + ((ticket >> 1) & self.slot_mask)))
    }

    /// Stores the values of a fault and returns their ticket.
    #[inline(always)]
    pub fn store(&self, values: [u64; 4]) -> u64 {
        let ticket = TICKET.read((2 * self.first.add_relaxed_gpu(1) + 1) << TICKET.0);
        let slot = self.slot(ticket);
        let before = slot.load_relaxed_gpu();
        if before != WRITING && slot.cas_relaxed_gpu(before, WRITING) == before {
            // The stores come after the values of the fault before, and after its ticket has gone for every reader.
            M::fence_acquire_gpu();
            M::fence_release_gpu();
            slot.at(1).store_relaxed_gpu(values[0]);
            slot.at(2).store_relaxed_gpu(values[1]);
            slot.at(3).store_relaxed_gpu(values[2]);
            slot.at(4).store_relaxed_gpu(values[3]);
            slot.store_release_gpu(ticket);
        }
        ticket
    }

    /// Returns the values of the fault with this ticket, or `None` if they were overwritten.
    #[inline(always)]
    pub fn load(&self, ticket: u64) -> Option<[u64; 4]> {
        let slot = self.slot(ticket);
        if slot.load_relaxed_gpu() != ticket {
            return None;
        }
        M::fence_acquire_gpu();
        let values = [
            slot.at(1).load_relaxed_gpu(),
            slot.at(2).load_relaxed_gpu(),
            slot.at(3).load_relaxed_gpu(),
            slot.at(4).load_relaxed_gpu(),
        ];
        M::fence_acquire_gpu();
        (slot.load_relaxed_gpu() == ticket).then_some(values)
    }
}

/// A condition that is not met, without the place.
#[derive(Clone, Copy, Debug)]
pub struct Unmet {
    kind: FaultKind,
    /// The words of what it concerns, which need no distinction of cases where two conditions meet.
    subject: [u64; 2],
    expected: u64,
    seen: u64,
}

impl Unmet {
    #[inline(always)]
    pub(crate) fn new(kind: FaultKind) -> Self {
        Self { kind, subject: FaultSubject::None.to_words(), expected: 0, seen: 0 }
    }

    /// Sets what it concerns.
    #[inline(always)]
    pub(crate) fn of(mut self, subject: FaultSubject) -> Self {
        self.subject = subject.to_words();
        self
    }

    /// Sets the expected value and the value seen.
    #[inline(always)]
    pub(crate) fn values(mut self, expected: u64, seen: u64) -> Self {
        (self.expected, self.seen) = (expected, seen);
        self
    }

    /// Returns the fault with operation, context and peer of `place`.
    #[inline(always)]
    pub(crate) fn on(self, place: Fault) -> Fault {
        let [subject, rest] = self.subject;
        place.with_kind(self.kind).with_words([subject, rest, self.expected, self.seen])
    }
}

/// A visitor of conditions, so that they are written once.
///
/// The first visit joins them without branches, so that a correct call passes one branch. The second finds the fault of
/// an incorrect one.
#[derive(Debug)]
pub struct Judge {
    finding: bool,
    /// First visit: a condition is not met. Second visit: `unmet` is the first of these.
    failed: bool,
    /// Not an `Option`, whose fields would have no value at first: such registers stay live round a kernel's loops.
    unmet: Unmet,
}

impl Judge {
    /// Returns the judge of the first visit, or of the second if it is `finding` the fault.
    #[inline(always)]
    pub(crate) fn new(finding: bool) -> Self {
        // The second visit finds no fault only if the host changed a table in between.
        Self { finding, failed: false, unmet: Unmet::new(FaultKind::BadDescriptor) }
    }

    /// Returns whether a condition is not met.
    #[inline(always)]
    pub(crate) fn has_failed(&self) -> bool {
        self.failed
    }

    /// Returns the first condition that is not met, after the second visit.
    #[inline(always)]
    pub(crate) fn unmet(&self) -> Unmet {
        self.unmet
    }

    /// Visits the last condition, of which the second visit finds that it is not met if all others are. So that visit
    /// does not compute `met` again.
    #[inline(always)]
    pub(crate) fn last_condition(&mut self, met: bool, unmet: impl FnOnce() -> Unmet) {
        self.condition(!self.finding & met, unmet);
    }

    /// Visits one condition. `unmet` says what to report if `met` is false.
    #[inline(always)]
    pub(crate) fn condition(&mut self, met: bool, unmet: impl FnOnce() -> Unmet) {
        if !self.finding {
            self.failed |= !met;
        } else if !met && !self.failed {
            (self.failed, self.unmet) = (true, unmet());
        }
    }
}

/// Visits conditions and returns `Ok`, or the fault of the first that is not met, with operation, context and peer of
/// `$place`.
///
/// Not a function of a closure: LLVM makes a function of a large closure that is called twice, and a call needs a
/// stack.
macro_rules! check {
    ($place:expr, |$judge:ident| $visit:block) => {{
        let mut $judge = $crate::fault::Judge::new(false);
        $visit
        if $judge.has_failed() {
            let mut $judge = $crate::fault::Judge::new(true);
            $visit
            Err($judge.unmet().on($place))
        } else {
            Ok(())
        }
    }};
}
pub(crate) use check;

/// Returns a fault of this kind in this operation. On a CPU it has the place of the caller.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub(crate) const fn new(kind: FaultKind, operation: Operation) -> Fault {
    let fault = Fault::new(kind, operation);
    #[cfg(not(target_arch = "nvptx64"))]
    let fault = fault.with_place(core::panic::Location::caller());
    fault
}

/// Returns the outcome of a call. On a CPU its fault has the place of the caller.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub(crate) fn here<T>(outcome: Result<T, Fault>) -> Result<T, Fault> {
    #[cfg(not(target_arch = "nvptx64"))]
    let outcome = match outcome {
        Err(fault) => Err(fault.with_place(core::panic::Location::caller())),
        ok => ok,
    };
    outcome
}

/// Number of words by which threads pass a fault to each other.
#[cfg(not(target_arch = "nvptx64"))]
pub const PASSED: usize = gin_abi::fault::WORDS;
/// Number of words by which threads pass a fault to each other.
#[cfg(target_arch = "nvptx64")]
pub const PASSED: usize = 1;

/// Returns the words that pass a fault to another thread of the grid.
#[inline(always)]
pub fn pass(fault: Fault) -> [u64; PASSED] {
    #[cfg(not(target_arch = "nvptx64"))]
    return fault.to_words();
    #[cfg(target_arch = "nvptx64")]
    return [fault.to_word()];
}

/// Returns the fault of the words of [`pass`].
#[inline(always)]
pub fn passed(words: [u64; PASSED]) -> Fault {
    #[cfg(not(target_arch = "nvptx64"))]
    return Fault::read(words);
    #[cfg(target_arch = "nvptx64")]
    return Fault::from_word(words[0]);
}

#[cfg(target_arch = "nvptx64")]
mod gpu {
    use super::{CONTEXT, KIND, Log, OPERATION, PEER, SLOT_WORDS, TICKET};
    use crate::sys::{Global, GlobalWord};
    use core::cell::UnsafeCell;
    use core::num::NonZeroU64;
    use gin_abi::fault::WORDS;
    use gin_abi::{FaultKind, FaultSubject, Operation};

    /// Number of slots. If all threads of a GPU fail at once, the values of the reported fault are still there.
    const SLOTS: u64 = 4096;
    const LENGTH: usize = (SLOT_WORDS * (SLOTS + 1)) as usize;

    #[repr(C, align(64))]
    struct Words(UnsafeCell<[u64; LENGTH]>);

    // Safety: only `Log` accesses the words, through `sys`.
    unsafe impl Sync for Words {}

    static LOG: Words = Words(UnsafeCell::new([0; LENGTH]));

    #[inline(always)]
    fn log() -> Log<Global> {
        // Safety: the words live as long as the module.
        Log { first: unsafe { GlobalWord::new(LOG.0.get() as usize as u64) }, slot_mask: SLOTS - 1 }
    }

    mod outlined {
        use super::{TICKET, log};

        /// Stores the values of the fault `word` and returns it with their ticket.
        #[cold]
        #[inline(never)]
        pub(super) fn store(word: u64, subject: u64, offset: u64, expected: u64, seen: u64) -> u64 {
            word & !TICKET.mask() | log().store([subject, offset, expected, seen]) << TICKET.0
        }
    }

    /// A fault: its kind, where it occurred, what it concerns, the expected value and the value seen.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    #[must_use]
    #[repr(transparent)]
    pub struct Fault(NonZeroU64);

    impl Fault {
        #[inline(always)]
        const fn of(word: u64) -> Self {
            match NonZeroU64::new(word) {
                Some(word) => Self(word),
                None => Self::new(FaultKind::AbiMismatch, Operation::None),
            }
        }

        /// Returns a fault of this kind in this operation, with no context or peer.
        #[inline(always)]
        pub const fn new(kind: FaultKind, operation: Operation) -> Self {
            let word = OPERATION.write(kind as u64, operation as u32) | CONTEXT.mask() | PEER.mask();
            // Safety: the code of a kind is not 0.
            Self(unsafe { NonZeroU64::new_unchecked(word) })
        }

        /// Sets the kind.
        #[inline(always)]
        pub const fn with_kind(self, kind: FaultKind) -> Self {
            Self::of(KIND.write(self.0.get(), kind as u32))
        }

        /// Sets the context.
        #[inline(always)]
        pub const fn with_context(self, context: u32) -> Self {
            Self::of(CONTEXT.write(self.0.get(), context))
        }

        /// Sets the peer to this world rank.
        #[inline(always)]
        pub const fn with_peer(self, peer: u32) -> Self {
            Self::of(PEER.write(self.0.get(), peer))
        }

        /// Sets what it concerns, the expected value and the value seen.
        #[inline(always)]
        pub fn with_values(self, subject: FaultSubject, expected: u64, seen: u64) -> Self {
            let [word, offset] = subject.to_words();
            Self::of(outlined::store(self.0.get(), word, offset, expected, seen))
        }

        /// Sets the words of what it concerns, the expected value and the value seen.
        #[inline(always)]
        pub(crate) fn with_words(self, [subject, rest, expected, seen]: [u64; 4]) -> Self {
            Self::of(outlined::store(self.0.get(), subject, rest, expected, seen))
        }

        #[inline(always)]
        fn values(self) -> [u64; 4] {
            let ticket = TICKET.read(self.0.get());
            if ticket == 0 { [0; 4] } else { log().load(ticket).unwrap_or([0; 4]) }
        }

        /// Returns the kind.
        #[inline(always)]
        pub const fn kind(&self) -> FaultKind {
            match FaultKind::from_code(KIND.read(self.0.get()) as u32) {
                Some(kind) => kind,
                None => FaultKind::AbiMismatch,
            }
        }

        /// Returns the operation that failed.
        #[inline(always)]
        pub const fn operation(&self) -> Operation {
            match Operation::from_code(OPERATION.read(self.0.get()) as u32) {
                Some(operation) => operation,
                None => Operation::None,
            }
        }

        /// Returns the context, or [`NONE`](gin_abi::fault::NONE).
        #[inline(always)]
        pub const fn context(&self) -> u32 {
            CONTEXT.number(self.0.get())
        }

        /// Returns the world rank of the peer, or [`NONE`](gin_abi::fault::NONE).
        #[inline(always)]
        pub const fn peer(&self) -> u32 {
            PEER.number(self.0.get())
        }

        /// Returns what it concerns.
        #[inline(always)]
        pub fn subject(&self) -> FaultSubject {
            let [word, offset, ..] = self.values();
            FaultSubject::read([word, offset])
        }

        /// Returns the value waited for, or the limit exceeded.
        #[inline(always)]
        pub fn expected(&self) -> u64 {
            self.values()[2]
        }

        /// Returns the value found instead.
        #[inline(always)]
        pub fn seen(&self) -> u64 {
            self.values()[3]
        }

        /// Returns the form stored in memory.
        #[inline(always)]
        pub fn to_words(self) -> [u64; WORDS] {
            let [subject, offset, expected, seen] = self.values();
            let word = self.0.get();
            let codes = KIND.read(word) | OPERATION.read(word) << 32;
            let place = self.context() as u64 | (self.peer() as u64) << 32;
            [codes, place, subject, offset, expected, seen]
        }

        /// Decodes the form stored in memory.
        #[inline(always)]
        pub fn read(words: [u64; WORDS]) -> Self {
            let word = KIND.write(0, words[0] as u32);
            let word = OPERATION.write(word, (words[0] >> 32) as u32);
            let word = CONTEXT.write(word, words[1] as u32);
            let word = PEER.write(word, (words[1] >> 32) as u32);
            Self::of(outlined::store(word, words[2], words[3], words[4], words[5]))
        }

        /// Returns the word, to pass it to another thread of the grid.
        #[inline(always)]
        pub(crate) const fn to_word(self) -> u64 {
            self.0.get()
        }

        /// Returns the fault of a word of [`to_word`](Self::to_word).
        #[inline(always)]
        pub(crate) const fn from_word(word: u64) -> Self {
            Self::of(word)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_keep_their_values_and_each_others() {
        let fields = [KIND, OPERATION, CONTEXT, PEER, TICKET];
        assert_eq!(fields.iter().map(|field| field.mask()).fold(0, |all, mask| all | mask), u64::MAX);
        assert_eq!(fields.iter().map(|field| field.mask().count_ones()).sum::<u32>(), 64, "no bit is in two fields");
        for (index, field) in fields.iter().enumerate() {
            let word = field.write(u64::MAX, index as u32);
            assert_eq!(field.read(word), index as u64);
            assert_eq!(word | field.mask(), u64::MAX);
        }
    }

    #[test]
    fn numbers_that_do_not_fit_are_none() {
        assert_eq!(CONTEXT.number(CONTEXT.write(0, gin_abi::MAX_CONTEXTS - 1)), gin_abi::MAX_CONTEXTS - 1);
        assert_eq!(CONTEXT.number(CONTEXT.write(0, 511)), gin_abi::fault::NONE);
        assert_eq!(PEER.number(PEER.write(0, gin_abi::MAX_RANKS - 1)), gin_abi::MAX_RANKS - 1);
        assert_eq!(PEER.number(PEER.write(0, u32::MAX)), gin_abi::fault::NONE);
    }
}
