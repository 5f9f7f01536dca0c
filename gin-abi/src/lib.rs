// SPDX-License-Identifier: MIT OR Apache-2.0
//! Plain-old-data that the device side and the host side of gin share.
//!
//! Everything here is `repr(C)`, has no padding and no pointers (addresses are `u64`), and its layout is asserted at
//! compile time: a kernel compiled today reads what a host built today writes, and [`ABI_VERSION`] says when that
//! stops being true.
//!
//! | module | holds |
//! | --- | --- |
//! | [`handle`] | what a kernel gets by value: communicator and window handles, and the tables behind them |
//! | [`descriptor`] | the 64-byte request that a kernel posts to the proxy |
//! | [`deadline`] | how long a wait may last |
//! | [`fault`] | error values that travel between kernel and host |
//! | [`gdaki`] | queue pairs that kernels drive themselves |
//! | [`mlx5`] | what an mlx5 NIC and its driver exchange: work-queue entries, completions, doorbells, command mailboxes |
#![no_std]
#![warn(missing_docs, unreachable_pub)]

pub mod deadline;
pub mod descriptor;
pub mod fault;
pub mod gdaki;
pub mod handle;
pub mod mlx5;

pub use deadline::Deadline;
pub use descriptor::{Descriptor, DescriptorError, RemoteSignal, SignalTarget, Transfer, WindowOffset};
pub use fault::{Fault, FaultKind, FaultRecord, Operation};
pub use handle::{BackendKind, CommHandle, ContextData, StatusBlock, WindowData, WindowHandle};

/// Version of every layout in this crate.
///
/// A kernel module carries the version that it was compiled with (the symbol [`ABI_SYMBOL`]); loading one of another
/// version is refused. Raised by every change of a layout here.
pub const ABI_VERSION: u32 = 7;

/// Name of the 32-bit variable in a kernel module that holds its [`ABI_VERSION`].
pub const ABI_SYMBOL: &str = "gin_abi_version";

/// The most contexts one communicator may have.
pub const MAX_CONTEXTS: u32 = 256;

/// The most ranks one communicator may have: the descriptor carries 24 bits of rank.
pub const MAX_RANKS: u32 = 1 << 24;

/// The most signals, and the most counters, one context may have: the descriptor carries 24 bits of either id.
pub const MAX_IDS: u32 = 1 << 24;

/// The most windows one communicator may have registered at a time.
pub const MAX_WINDOWS: u32 = 1 << 16;

/// Width of a counter in bits; a counter's value is taken modulo 2^56.
pub const COUNTER_BITS: u32 = 56;

/// Width of a signal in bits.
pub const SIGNAL_BITS: u32 = 64;

/// `mask(bits)` keeps the low `bits` bits, 1 to 64.
#[inline(always)]
pub const fn mask(bits: u32) -> u64 {
    u64::MAX >> ((64 - bits) & 63)
}

/// Whether `a` is at or before `b` on a circle of 2^`bits` values.
///
/// This is `((b - a) & mask) <= (mask >> 1)`: `b` may lead by at most `2^(bits - 1) - 1`.
///
/// ```
/// assert!(gin_abi::rolling_le(u64::MAX, 3, 64)); // 3 comes after the wrap
/// assert!(!gin_abi::rolling_le(5, 3, 64));
/// assert!(gin_abi::rolling_le(250, 4, 8));
/// ```
#[inline(always)]
pub const fn rolling_le(a: u64, b: u64, bits: u32) -> bool {
    let mask = mask(bits);
    (b.wrapping_sub(a) & mask) <= (mask >> 1)
}
