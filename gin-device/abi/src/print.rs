// SPDX-License-Identifier: MIT OR Apache-2.0
//! Lines that kernels print: the words by which kernels and host find their ring, and the form of a line.
//!
//! A slot has one line:
//!
//! | words | hold |
//! | --- | --- |
//! | 0 | 1 + the line's index, once the line is whole |
//! | 1 | the block's number in its grid (lower half), the thread's number in its block (upper half) |
//! | 2 | the number of arguments (bits 0 to 7), and a [kind](codes) of 8 bits for each argument from bit 8 on |
//! | 3 | the lines dropped so far |
//! | 4 to 15 | the text, padded by zero bytes; a byte below 32 stands for an argument: [`PLAIN`], [`HEX`] and so on |
//! | 16 to 31 | the arguments, two words each |

use bytemuck::{Pod, Zeroable};

/// Byte offset from [`CommHandle::kernel_status_copy`](crate::CommHandle::kernel_status_copy) to the [`PrintRing`].
pub const RING_OFFSET: u64 = size_of::<crate::StatusBlock>() as u64;

/// Words of a slot.
pub const SLOT_WORDS: u64 = 32;
/// First word of a slot's text.
pub const TEXT: u64 = 4;
/// Largest number of bytes of the text of a line, without its arguments.
pub const TEXT_BYTES: usize = 96;
/// First word of a slot's arguments.
pub const ARGUMENTS: u64 = TEXT + TEXT_BYTES as u64 / 8;
/// Largest number of arguments of a line.
pub const MAX_ARGUMENTS: usize = 7;
/// Words of an argument.
pub const ARGUMENT_WORDS: u64 = 2;

const _: () = {
    assert!(ARGUMENTS + ARGUMENT_WORDS * (MAX_ARGUMENTS as u64) <= SLOT_WORDS);
    // Each argument has a kind in word 2.
    assert!(8 * (MAX_ARGUMENTS + 1) <= u64::BITS as usize);
};

/// Byte of a text that stands for the next argument: `{}`.
pub const PLAIN: u8 = 1;
/// Byte of a text that stands for the next argument in hexadecimal digits: `{:x}`.
pub const HEX: u8 = 2;
/// Byte of a text that stands for the next argument in hexadecimal digits behind `0x`: `{:#x}`.
pub const PREFIXED_HEX: u8 = 3;
/// Byte of a text that stands for the next argument without decimals: `{:.0}`. One decimal more for each byte further,
/// up to [`MAX_DECIMALS`].
pub const DECIMALS: u8 = 11;
/// Largest number of decimals.
pub const MAX_DECIMALS: u8 = 9;

const _: () = assert!(DECIMALS > b'\n' && DECIMALS + MAX_DECIMALS < b' ');

/// Where kernels find the ring of the communicator's lines; in GPU memory.
///
/// A kernel raises `tickets` first, and takes it back if the ring is full. Then it raises `head`, so that the ring has
/// an index for each line and no gaps.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug, PartialEq, Eq)]
pub struct PrintRing {
    /// Address of the slots; pinned host memory. 0 if the communicator has no ring.
    pub slots: u64,
    /// Address of the number of lines that the host has taken; pinned host memory.
    pub taken: u64,
    /// Number of slots, a power of two, less one.
    pub mask: u64,
    /// Lines that found room, and for a moment lines that did not.
    pub tickets: u64,
    /// Index of the next line.
    pub head: u64,
    /// Lines that found no room.
    pub dropped: u64,
}

const _: () = assert!(size_of::<PrintRing>() == 48);

/// Kinds of arguments.
pub mod codes {
    /// An unsigned integer.
    pub const UNSIGNED: u64 = 1;
    /// A signed integer of 64 bits, extended; plus 1 for 32 bits, 2 for 16 bits, 3 for 8 bits.
    pub const SIGNED: u64 = 2;
    /// The bits of an `f32`.
    pub const F32: u64 = 6;
    /// The bits of an `f64`.
    pub const F64: u64 = 7;
    /// `false` or `true`.
    pub const BOOL: u64 = 8;
    /// A `char`.
    pub const CHAR: u64 = 9;
    /// An address.
    pub const ADDRESS: u64 = 10;
    /// The first 16 bytes of a text, padded by zero bytes.
    pub const TEXT: u64 = 11;
}
