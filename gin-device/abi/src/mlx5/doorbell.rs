// SPDX-License-Identifier: MIT OR Apache-2.0
//! The doorbell word and the doorbell record.
//!
//! A poster takes three steps. It writes its entries, then the [`Record`] in memory, which the NIC uses when it
//! recovers. Then it stores the [`word`](Doorbell::word) to a doorbell page. Each step must be visible to the NIC
//! before the next.
//!
//! ```
//! use gin_abi::mlx5::doorbell::{Doorbell, Record};
//! use gin_abi::mlx5::wqe::QueueNumber;
//!
//! let word = Doorbell::word(0x1_0005, QueueNumber::new(42));
//! assert_eq!(Doorbell::read(word), Doorbell { end: 5, queue: 42 });
//! assert_eq!(Record::send(0x1_0005).get(), 5);
//! ```

use super::be::Be32;
use super::wqe::QueueNumber;
use bytemuck::{Pod, Zeroable};

/// The pair of words that a queue pair, or a completion queue, keeps in memory for its NIC.
///
/// `#[repr(C)]`, 8 bytes, 8-byte aligned.
#[repr(C, align(8))]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
pub struct Record {
    /// Of a queue pair: the number of entries posted to the receive queue, which gin's queue pairs do not have. Of a
    /// completion queue: the consumer index, 24 bits; unused where overruns are ignored.
    pub receive: Be32,
    /// Of a queue pair: index past the last entry posted to the send queue, low 16 bits ([`Record::send`]). Of a
    /// completion queue: the word that arms it for an event.
    pub send: Be32,
}

/// Byte offset of [`Record::send`].
pub const SEND_OFFSET: u64 = 4;

const _: () = assert!(size_of::<Record>() == 8 && align_of::<Record>() == 8);
const _: () = assert!(core::mem::offset_of!(Record, send) as u64 == SEND_OFFSET);

impl Record {
    /// Returns the word, stored at [`SEND_OFFSET`], that announces every entry below `end`.
    #[inline(always)]
    pub const fn send(end: u64) -> Be32 {
        Be32::new(end as u32 & 0xffff)
    }
}

/// The value stored to a doorbell page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Doorbell {
    /// Low 16 bits of the index past the last posted entry.
    pub end: u16,
    /// The queue pair, 24 bits.
    pub queue: u32,
}

impl Doorbell {
    /// Returns the 8 bytes that announce every entry below `end`, written by a single store. In big-endian form: 8 zero
    /// bits, 16 bits of the index, 8 zero bits, 24 bits of the queue pair's number, 8 zero bits.
    #[inline(always)]
    pub const fn word(end: u64, queue: QueueNumber) -> u64 {
        Be32::new((end as u32 & 0xffff) << 8).memory() as u64 | (queue.with_segments(0).memory() as u64) << 32
    }

    /// Decodes the word as a device reads it. Bits beside index and number are ignored, as a ConnectX ignores them: a
    /// poster that copies the first 8 bytes of an entry's control segment has other values there.
    #[inline(always)]
    pub const fn read(word: u64) -> Self {
        let (low, high) = (Be32::from_memory(word as u32).get(), Be32::from_memory((word >> 32) as u32).get());
        Self { end: (low >> 8) as u16, queue: high >> 8 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_a_doorbell_says_is_read(end: u64, queue in 0..1u32 << 24) {
            let word = Doorbell::word(end, QueueNumber::new(queue));
            prop_assert_eq!(Doorbell::read(word), Doorbell { end: end as u16, queue });
            let bytes = word.to_le_bytes();
            prop_assert_eq!([bytes[0], bytes[3], bytes[7]], [0; 3], "reserved bytes are zero");
            prop_assert_eq!(Record::send(end).get(), end as u32 & 0xffff);
        }
    }
}
