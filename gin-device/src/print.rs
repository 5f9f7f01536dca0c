// SPDX-License-Identifier: MIT OR Apache-2.0
//! Lines that kernels print, for debugging.
//!
//! ```
//! use gin_device::prelude::*;
//!
//! #[kernel]
//! pub unsafe fn sum(comm: Comm, words: Window<f32>) {
//!     if Block.elect() {
//!         gin_println!(comm, "first of {}: {:.3}, flags {:#x}", words.len(), words.read(0), 0xc0_u32);
//!     }
//! }
//! ```
//!
//! The host prints `rank 0, block 3, thread 0: first of 1000: 0.500, flags 0xc0` on standard output, while the kernel
//! runs or at the latest when the program next calls `Communicator::check` or `destroy`. The lines of a thread appear
//! in their order; nothing orders lines of two threads.
//!
//! | text | prints |
//! | --- | --- |
//! | `{}`, `{name}` | an integer of 8 to 64 bits, a float, `bool`, `char`, a raw pointer, the first 16 bytes of a `&str` |
//! | `{:x}`, `{:#x}` | an integer, float (its bits) or pointer in hexadecimal digits |
//! | `{:.2}` | a float with that many decimals, 0 to 9 |
//! | `{{`, `}}` | a brace |
//!
//! A line has up to 7 arguments and 96 bytes of text.
//!
//! A print never waits. A line that finds the communicator's ring full is dropped; the next line that is printed tells
//! how many were. The ring has room for `Requirements::print_lines` lines.
//!
//! A line costs two trips to the GPU's L2 cache, one to host memory, and fences, so leave none in code that is
//! measured. The feature `println-off` of `gin-device` removes all of them: `gin_println!` then makes no code and does
//! not evaluate its arguments. A kernel crate passes it on: `quiet = ["gin-device/println-off"]`.

use crate::comm::Comm;
use crate::coop::{block_in_grid, thread_in_block};
use crate::sys::{Global, GlobalWord, Memory, Word};
use core::mem::offset_of;
use gin_abi::print::{ARGUMENT_WORDS, ARGUMENTS, PrintRing, RING_OFFSET, SLOT_WORDS, TEXT, codes};

/// True if `gin_println!` prints.
#[doc(hidden)]
pub const ENABLED: bool = !cfg!(feature = "println-off");

/// The words of a ring.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Ring<M: Memory> {
    /// First word of the slots.
    pub slots: M::Word,
    /// The number of lines that the host has taken.
    pub taken: M::Word,
    /// The number of slots, less one.
    pub mask: u64,
    /// Lines that found room, and for a moment lines that did not.
    pub tickets: M::Word,
    /// Index of the next line.
    pub head: M::Word,
    /// Lines that found no room.
    pub dropped: M::Word,
}

impl<M: Memory> Ring<M> {
    /// Returns the first word of the slot with this index.
    #[inline(always)]
    pub fn slot(&self, index: u64) -> M::Word {
        self.slots.at(SLOT_WORDS * (index & self.mask))
    }

    /// Claims the slot of a line; `None` if the ring is full. For kernels. Never waits.
    ///
    /// The slot is free: the k-th claim that succeeds, from 0, had a ticket of at least k, so it saw that the host had
    /// taken more than k - slots lines. A claim whose index is k comes after it, or is it: of the k + 1 claims with
    /// indices up to k, one was at least the k-th to get a ticket. The fences carry what that claim saw, through
    /// `head`, to this one. So the stores to the slot come after the host's loads of the line before.
    #[inline(always)]
    pub fn claim(&self) -> Option<u64> {
        let ticket = self.tickets.add_relaxed_gpu(1);
        // Signed: the host may have taken the lines of later tickets already.
        if ticket.wrapping_sub(self.taken.load_relaxed_sys()) as i64 > self.mask as i64 {
            self.tickets.add_relaxed_gpu(1_u64.wrapping_neg());
            self.dropped.add_relaxed_gpu(1);
            return None;
        }
        M::fence_acquire_sys();
        M::fence_release_gpu();
        let index = self.head.add_relaxed_gpu(1);
        M::fence_acquire_gpu();
        Some(index)
    }

    /// Announces that the line with this index is whole. For kernels.
    #[inline(always)]
    pub fn publish(&self, index: u64) {
        self.slot(index).store_release_sys(index.wrapping_add(1));
    }

    /// Returns whether the line with this index is whole. For the host.
    pub fn is_whole(&self, index: u64) -> bool {
        let whole = self.slot(index).load_relaxed_sys() == index.wrapping_add(1);
        if whole {
            M::fence_acquire_sys();
        }
        whole
    }

    /// Gives back the slots of all lines below `index`. For the host, which has read them.
    pub fn take(&self, index: u64) {
        self.taken.store_release_sys(index);
    }
}

/// A line that is being written.
#[doc(hidden)]
#[derive(Debug)]
pub struct Line {
    ring: u64,
    index: u64,
    slot: GlobalWord,
}

impl Line {
    /// Begins a line with these kinds of arguments; `None` if it is dropped.
    #[inline(always)]
    #[must_use]
    pub fn begin(comm: &Comm, kinds: u64) -> Option<Self> {
        let ring = comm.handle().kernel_status_copy + RING_OFFSET;
        let index = outlined::claim(ring);
        let index = index.checked_sub(1)?;
        let slot = outlined::ring(ring).slot(index);
        slot.at(1).store_relaxed_sys(u64::from(block_in_grid()) | u64::from(thread_in_block()) << 32);
        slot.at(2).store_relaxed_sys(kinds);
        Some(Self { ring, index, slot })
    }

    /// Stores word `number` of the text.
    #[inline(always)]
    pub fn text(&self, number: u64, word: u64) {
        self.slot.at(TEXT + number).store_relaxed_sys(word);
    }

    /// Stores argument `number`.
    #[inline(always)]
    pub fn argument(&self, number: u64, value: impl Print) {
        let at = ARGUMENTS + ARGUMENT_WORDS * number;
        let [low, high] = value.words();
        self.slot.at(at).store_relaxed_sys(low);
        self.slot.at(at + 1).store_relaxed_sys(high);
    }

    /// Lets the host print the line.
    #[inline(always)]
    pub fn end(self) {
        outlined::end(self.ring, self.index);
    }
}

/// Code that a kernel has once and calls.
mod outlined {
    use super::*;

    /// Returns the ring whose [`PrintRing`] is at this address; it exists.
    #[inline(always)]
    pub(super) fn ring(address: u64) -> Ring<Global> {
        let field = |offset: usize| (address + offset as u64) as usize as *const u64;
        // Safety: the host that made the communicator's handle keeps the words valid. The first three are constant.
        unsafe {
            let pair = crate::sys::read_pair(field(offset_of!(PrintRing, slots)));
            Ring {
                slots: GlobalWord::new(pair.0),
                taken: GlobalWord::new(pair.1),
                mask: crate::sys::read_word(field(offset_of!(PrintRing, mask))),
                tickets: GlobalWord::new(address + offset_of!(PrintRing, tickets) as u64),
                head: GlobalWord::new(address + offset_of!(PrintRing, head) as u64),
                dropped: GlobalWord::new(address + offset_of!(PrintRing, dropped) as u64),
            }
        }
    }

    /// Claims a slot, and stores the lines dropped so far. Returns 1 + the index, or 0 if there is no slot.
    #[cold]
    #[cfg_attr(target_arch = "nvptx64", inline(never))]
    pub(super) fn claim(address: u64) -> u64 {
        // Safety: as in `ring`.
        if unsafe { crate::sys::read_word(address as usize as *const u64) } == 0 {
            return 0;
        }
        let ring = ring(address);
        match ring.claim() {
            None => 0,
            Some(index) => {
                ring.slot(index).at(3).store_relaxed_sys(ring.dropped.load_relaxed_gpu());
                index + 1
            }
        }
    }

    /// Publishes the line with this index.
    #[cold]
    #[cfg_attr(target_arch = "nvptx64", inline(never))]
    pub(super) fn end(address: u64, index: u64) {
        ring(address).publish(index);
    }
}

/// A value that `gin_println!` prints.
#[diagnostic::on_unimplemented(
    message = "`gin_println!` cannot print `{Self}`",
    note = "it prints integers of up to 64 bits, `f32`, `f64`, `bool`, `char`, raw pointers and `&str`"
)]
pub trait Print: Copy {
    /// Its code in [`gin_abi::print::codes`].
    const KIND: u64;

    /// Returns it as two words.
    fn words(self) -> [u64; 2];
}

/// Returns the kind of an argument.
#[doc(hidden)]
#[inline(always)]
pub const fn kind<T: Print>(_: &T) -> u64 {
    T::KIND
}

macro_rules! print {
    ($($ty:ty: $kind:expr, |$value:ident| $word:expr;)*) => {$(
        impl Print for $ty {
            const KIND: u64 = $kind;

            #[inline(always)]
            fn words(self) -> [u64; 2] {
                let $value = self;
                [$word, 0]
            }
        }
    )*};
}

print! {
    u8: codes::UNSIGNED, |value| u64::from(value);
    u16: codes::UNSIGNED, |value| u64::from(value);
    u32: codes::UNSIGNED, |value| u64::from(value);
    u64: codes::UNSIGNED, |value| value;
    usize: codes::UNSIGNED, |value| value as u64;
    i64: codes::SIGNED, |value| value as u64;
    isize: codes::SIGNED, |value| value as u64;
    i32: codes::SIGNED + 1, |value| value as u64;
    i16: codes::SIGNED + 2, |value| value as u64;
    i8: codes::SIGNED + 3, |value| value as u64;
    f32: codes::F32, |value| u64::from(value.to_bits());
    f64: codes::F64, |value| value.to_bits();
    bool: codes::BOOL, |value| u64::from(value);
    char: codes::CHAR, |value| u64::from(u32::from(value));
}

impl<T> Print for *const T {
    const KIND: u64 = codes::ADDRESS;

    #[inline(always)]
    fn words(self) -> [u64; 2] {
        [self.addr() as u64, 0]
    }
}

impl<T> Print for *mut T {
    const KIND: u64 = codes::ADDRESS;

    #[inline(always)]
    fn words(self) -> [u64; 2] {
        [self.addr() as u64, 0]
    }
}

impl Print for &str {
    const KIND: u64 = codes::TEXT;

    #[inline(always)]
    fn words(self) -> [u64; 2] {
        let bytes = self.as_bytes();
        // Two words, not an array with a changing index, which LLVM would put on the stack.
        let word = |first: usize| {
            let (mut word, mut at) = (0, first);
            while at < bytes.len() && at < first + 8 {
                // Safety: in range.
                word |= u64::from(unsafe { *bytes.get_unchecked(at) }) << (8 * (at - first));
                at += 1;
            }
            word
        };
        [word(0), word(8)]
    }
}
