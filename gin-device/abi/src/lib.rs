// SPDX-License-Identifier: MIT OR Apache-2.0
//! Plain-old-data shared by the device side and the host side of gin.
//!
//! Every type that crosses memory is `repr(C)`, has no padding and no pointers (addresses are `u64`). Its layout is
//! asserted at compile time, so a kernel compiled today reads what a host built today writes. [`ABI_VERSION`] changes
//! when that stops being true.
//!
//! | module | holds |
//! | --- | --- |
//! | [`handle`] | communicator and window handles, which a kernel receives by value, and the tables behind them |
//! | [`descriptor`] | the 64-byte request that a kernel posts to the proxy |
//! | [`deadline`] | the time limit of a wait |
//! | [`fault`] | error values that travel between kernel and host |
//! | [`gdaki`] | device-driven NIC queue pairs |
//! | [`mlx5`] | formats of an mlx5 NIC: work-queue entries, completions, doorbells, command mailboxes |
//! | [`print`] | lines that kernels print |
#![no_std]
#![warn(unreachable_pub)]

mod codes;
pub mod deadline;
pub mod descriptor;
pub mod fault;
#[cfg(not(target_arch = "nvptx64"))]
mod fault_text;
pub mod gdaki;
pub mod handle;
pub mod mlx5;
pub mod print;

pub use deadline::Deadline;
pub use descriptor::{Descriptor, DescriptorError, RemoteSignal, SignalTarget, Transfer, WindowOffset};
#[cfg(not(target_arch = "nvptx64"))]
pub use fault::Fault;
pub use fault::{FaultKind, FaultRecord, FaultSubject, Operation};
pub use handle::{BackendKind, CommHandle, ContextData, StatusBlock, WindowData, WindowHandle};

/// Version of every layout in this crate.
///
/// A kernel module carries the version it was compiled with (the symbol [`ABI_SYMBOL`]). The host refuses to load a
/// module of another version. Every change of a layout here raises this number.
pub const ABI_VERSION: u32 = 14;

/// Name of the variable in a kernel module whose first word is its [`ABI_VERSION`]. It has as many words as the number,
/// so that nvlink refuses modules of different versions.
pub const ABI_SYMBOL: &str = "gin_abi_version";

/// Largest number of contexts of one communicator.
pub const MAX_CONTEXTS: u32 = 256;

/// Largest number of ranks of one communicator: the descriptor carries 24 bits of rank.
pub const MAX_RANKS: u32 = 1 << 24;

/// Largest number of signals, and of counters, of one context: the descriptor carries 24 bits of either id.
pub const MAX_IDS: u32 = 1 << 24;

/// Largest number of windows that one communicator may have registered at a time.
pub const MAX_WINDOWS: u32 = 1 << 16;

/// Width of a counter in bits; a counter's value is taken modulo 2^56.
pub const COUNTER_BITS: u32 = 56;

/// Width of a signal in bits.
pub const SIGNAL_BITS: u32 = 64;

/// Makes `Debug` of error types show what `Display` shows: an error that leaves `main` is printed with `Debug`.
///
/// ```
/// struct Missing(&'static str);
///
/// impl core::fmt::Display for Missing {
///     fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
///         write!(f, "{} is missing", self.0)
///     }
/// }
///
/// gin_abi::debug_as_display!(Missing);
/// assert_eq!(format!("{:?}", Missing("the key")), "the key is missing");
/// ```
#[macro_export]
macro_rules! debug_as_display {
    ($error:ident<$cause:ident>) => {
        impl<$cause: ::core::fmt::Display> ::core::fmt::Debug for $error<$cause> {
            fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                ::core::fmt::Display::fmt(self, f)
            }
        }
    };
    ($($error:ty),*) => { $(
        impl ::core::fmt::Debug for $error {
            fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                ::core::fmt::Display::fmt(self, f)
            }
        }
    )* };
}

/// Returns a mask of the low `bits` bits, 1 to 64.
///
/// ```
/// assert_eq!(gin_abi::mask(56), 0x00ff_ffff_ffff_ffff);
/// ```
#[inline(always)]
pub const fn mask(bits: u32) -> u64 {
    u64::MAX >> ((64 - bits) & 63)
}

/// Returns true if `a` is at or before `b` on a circle of 2^`bits` values.
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
