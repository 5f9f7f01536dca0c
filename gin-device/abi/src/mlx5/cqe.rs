// SPDX-License-Identifier: MIT OR Apache-2.0
//! Completion-queue entries.
//!
//! Completions have 64 bytes each and form a ring whose size is a power of two. gin's completion queues hold
//! completions of requesters only. Their bytes, with big-endian numbers:
//!
//! | bytes | success | error |
//! | --- | --- | --- |
//! | 44..48 | length in bytes, of a read or an atomic | - |
//! | 48..56 | time stamp, 0 without a clock | 54: vendor's syndrome, 55: [`Syndrome`] |
//! | 56..60 | operation of the entry (8 bits), queue pair (24 bits) | the same |
//! | 60..62 | index of the entry, low 16 bits | the same |
//! | 62 | signature | the same |
//! | 63 | [`opcode`] (4 bits), format (2), solicited (1), owner (1) | the same |
//!
//! The owner bit of completion i of a ring of 2^n is bit n of i. It flips from round to round, so no slot needs
//! clearing. Software fills a ring with [`INVALID_BYTE`] before its first round. The last 8 bytes, a [`Tail`], describe
//! a successful completion fully, and a NIC writes them last.
//!
//! A *collapsed* queue receives every completion in slot 0. The owner bit still follows the queue's size.
//!
//! ```
//! use gin_abi::mlx5::cqe::{Completion, CompletionError, Tail, opcode};
//!
//! let completion = Completion::good(Tail::new(opcode::REQUEST, 0x10, 42, 7, 0, 4), 64);
//! let outcome = completion.read(0, 4).unwrap();
//! assert_eq!((outcome.queue, outcome.index, outcome.result), (42, 7, Ok(64)));
//! assert_eq!(completion.read(16, 4), Err(CompletionError::NotYet)); // the next round of the ring
//! ```

use super::be::Be32;
use crate::codes::codes;
use bytemuck::{Pod, Zeroable};

/// Size of a completion in bytes.
pub const BYTES: u64 = 64;

/// Value of every byte of a ring before its first round: an invalid opcode and the owner of the previous round.
pub const INVALID_BYTE: u8 = 0xf1;

/// Opcodes of completions.
pub mod opcode {
    /// An entry of the send queue completed.
    pub const REQUEST: u8 = 0;
    /// An entry of the send queue failed.
    pub const REQUEST_ERROR: u8 = 13;
    /// An operation of the receive queue failed.
    pub const RESPONSE_ERROR: u8 = 14;
    /// The slot was never written.
    pub const INVALID: u8 = 15;
}

codes! {
    /// The cause of an entry's failure.
    Syndrome: u8 as u8 {
        /// The message is longer than the queue pair may send, or a buffer is too short.
        LocalLength = 0x01, "invalid length of the message";
        /// The entry has an invalid operation, number of segments, index or queue pair.
        LocalOperation = 0x02, "invalid entry";
        /// A local key is unknown, or its region does not contain the range or does not allow the access.
        LocalProtection = 0x04, "invalid local key or range";
        /// An earlier entry failed, so this one was never executed.
        Flushed = 0x05, "flushed behind a failed entry";
        /// Binding a memory window failed.
        WindowBind = 0x06, "memory window not bound";
        /// The peer's response is invalid.
        BadResponse = 0x10, "invalid response";
        /// The response could not be written to local memory.
        LocalAccess = 0x11, "response not writable to local memory";
        /// The peer refused the request for its operation, length or alignment.
        RemoteInvalidRequest = 0x12, "request refused by the peer";
        /// The peer's key is unknown, or its region does not contain the range or does not allow the access.
        RemoteAccess = 0x13, "invalid remote key or range";
        /// The peer could not finish the request.
        RemoteOperation = 0x14, "peer could not finish the request";
        /// The peer did not answer after all retries.
        RetryExceeded = 0x15, "no answer from the peer";
        /// The peer was not ready after all retries.
        NotReadyExceeded = 0x16, "peer was never ready";
        /// The peer aborted the request.
        RemoteAborted = 0x22, "aborted by the peer";
    }
}

/// A completion in its memory form.
#[repr(C, align(64))]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
pub struct Completion {
    /// Words, as native loads return them.
    pub words: [u64; 8],
}

const _: () = assert!(size_of::<Completion>() as u64 == BYTES && align_of::<Completion>() as u64 == BYTES);

/// Index of the word with the [`Tail`].
pub const TAIL_WORD: usize = 7;
/// Index of the word with the syndromes.
pub const SYNDROME_WORD: usize = 6;

/// The last 8 bytes of a completion.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
pub struct Tail(pub u64);

impl Tail {
    /// Creates the tail of the completion with this `number`, in a ring of 2^`log_size`, for entry `index` of `queue`.
    #[inline(always)]
    pub const fn new(opcode: u8, operation: u32, queue: u32, index: u64, number: u64, log_size: u32) -> Self {
        let head = Be32::new(operation << 24 | queue & 0xff_ffff).memory() as u64;
        let last = ((opcode as u32) << 4 | owner(number, log_size)) as u64;
        Self(head | ((index as u16).to_be() as u64) << 32 | last << 56)
    }

    /// Returns the opcode, of [`opcode`].
    #[inline(always)]
    pub const fn opcode(self) -> u8 {
        (self.0 >> 60) as u8
    }

    /// Returns the owner bit.
    #[inline(always)]
    pub const fn owner(self) -> u32 {
        (self.0 >> 56 & 1) as u32
    }

    /// Returns the low 16 bits of the index of the entry.
    #[inline(always)]
    pub const fn index(self) -> u16 {
        u16::from_be((self.0 >> 32) as u16)
    }

    /// Returns the queue pair.
    #[inline(always)]
    pub const fn queue(self) -> u32 {
        Be32::from_memory(self.0 as u32).get() & 0xff_ffff
    }

    /// Returns the operation of the entry.
    #[inline(always)]
    pub const fn operation(self) -> u32 {
        Be32::from_memory(self.0 as u32).get() >> 24
    }

    /// Returns true if the slot that this was loaded from holds completion number `number` of a ring of 2^`log_size`.
    #[inline(always)]
    pub const fn is_in_place(self, number: u64, log_size: u32) -> bool {
        (self.owner() == owner(number, log_size)) & (self.opcode() != opcode::INVALID)
    }
}

/// Returns the owner bit of completion number `number` of a ring of 2^`log_size`.
///
/// ```
/// use gin_abi::mlx5::cqe::owner;
/// assert_eq!([15, 16, 31, 32].map(|number| owner(number, 4)), [0, 1, 1, 0]);
/// ```
#[inline(always)]
pub const fn owner(number: u64, log_size: u32) -> u32 {
    (number >> (log_size & 63)) as u32 & 1
}

impl Completion {
    /// Creates the completion of a successful entry. `bytes` is the length of the data that a read or an atomic
    /// returned.
    pub const fn good(tail: Tail, bytes: u32) -> Self {
        let mut words = [0; 8];
        words[5] = (Be32::new(bytes).memory() as u64) << 32;
        words[TAIL_WORD] = tail.0;
        Self { words }
    }

    /// Creates the completion of a failed entry.
    pub const fn error(tail: Tail, syndrome: Syndrome, vendor: u8) -> Self {
        let mut words = [0; 8];
        words[SYNDROME_WORD] = (syndrome.code() as u64) << 56 | (vendor as u64) << 48;
        words[TAIL_WORD] = tail.0;
        Self { words }
    }

    /// Returns the last 8 bytes.
    #[inline(always)]
    pub const fn tail(&self) -> Tail {
        Tail(self.words[TAIL_WORD])
    }

    /// Returns the number of bytes that a read or an atomic returned.
    #[inline(always)]
    pub const fn bytes(&self) -> u32 {
        Be32::from_memory((self.words[5] >> 32) as u32).get()
    }

    /// Returns the code of the [`Syndrome`] and the vendor's syndrome of a failed entry.
    #[inline(always)]
    pub const fn syndromes(&self) -> (u8, u8) {
        ((self.words[SYNDROME_WORD] >> 56) as u8, (self.words[SYNDROME_WORD] >> 48) as u8)
    }
}

/// A decoded completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// The queue pair.
    pub queue: u32,
    /// Low 16 bits of the index of the entry.
    pub index: u16,
    /// Operation of the entry.
    pub operation: u32,
    /// Number of bytes read, or the failure.
    pub result: Result<u32, Failure>,
}

/// The cause of an entry's failure, as codes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Failure {
    /// Code of a [`Syndrome`], if it is known.
    pub syndrome: u8,
    /// The vendor's syndrome.
    pub vendor: u8,
}

/// The reason why 64 bytes are not a completion of a send queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CompletionError {
    /// The slot holds no completion, or one of the previous round.
    NotYet,
    /// An opcode that send queues do not produce.
    Opcode(u8),
}

impl Completion {
    /// Decodes completion number `number` of a ring of 2^`log_size`.
    ///
    /// # Errors
    /// Fails if the slot does not hold that completion yet, or if its opcode is not one of a send queue.
    #[inline]
    pub const fn read(&self, number: u64, log_size: u32) -> Result<Outcome, CompletionError> {
        let tail = self.tail();
        if !tail.is_in_place(number, log_size) {
            return Err(CompletionError::NotYet);
        }
        let result = match tail.opcode() {
            opcode::REQUEST => Ok(self.bytes()),
            opcode::REQUEST_ERROR => {
                let (syndrome, vendor) = self.syndromes();
                Err(Failure { syndrome, vendor })
            }
            other => return Err(CompletionError::Opcode(other)),
        };
        Ok(Outcome { queue: tail.queue(), index: tail.index(), operation: tail.operation(), result })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_written_is_read(
            operation in 0u32..256, queue in 0..1u32 << 24, index: u64, number: u64, log_size in 0u32..24, bytes: u32,
            vendor: u8, at in 0..Syndrome::ALL.len(),
        ) {
            let syndrome = Syndrome::ALL[at];
            let tail = |opcode| Tail::new(opcode, operation, queue, index, number, log_size);
            let outcome = |result| Ok(Outcome { queue, index: index as u16, operation, result });
            let good = Completion::good(tail(opcode::REQUEST), bytes);
            prop_assert_eq!(good.read(number, log_size), outcome(Ok(bytes)));
            let bad = Completion::error(tail(opcode::REQUEST_ERROR), syndrome, vendor);
            prop_assert_eq!(bad.read(number, log_size), outcome(Err(Failure { syndrome: syndrome.code(), vendor })));
            for completion in [good, bad] {
                let round = 1u64 << log_size;
                prop_assert_eq!(completion.read(number.wrapping_add(round), log_size), Err(CompletionError::NotYet));
                prop_assert!(completion.read(number.wrapping_add(2 * round), log_size).is_ok());
            }
        }

        #[test]
        fn no_bytes_make_the_reader_panic_or_be_a_completion_of_both_rounds(
            words: [u64; 8], number: u64, log_size in 0u32..24,
        ) {
            let completion = Completion { words };
            let rounds = [number, number ^ 1 << log_size].map(|number| completion.read(number, log_size));
            prop_assert!(rounds.contains(&Err(CompletionError::NotYet)));
            if let Some(Ok(outcome)) = rounds.iter().find(|read| read.is_ok()) {
                prop_assert_eq!(outcome.queue >> 24, 0);
            }
        }
    }

    #[test]
    fn a_ring_that_was_never_written_holds_no_completion() {
        let fresh = Completion { words: [u64::from_le_bytes([INVALID_BYTE; 8]); 8] };
        for number in [0, 1, 127, 128, 255] {
            assert_eq!(fresh.read(number, 7), Err(CompletionError::NotYet));
        }
    }

    #[test]
    fn every_syndrome_has_its_code_and_no_other() {
        for &syndrome in Syndrome::ALL {
            assert_eq!(Syndrome::from_code(syndrome.code()), Some(syndrome));
        }
        assert_eq!((0..=255).filter_map(Syndrome::from_code).count(), Syndrome::ALL.len());
    }
}
