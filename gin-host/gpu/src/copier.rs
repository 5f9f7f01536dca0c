// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies that a progress thread starts and queries, without waiting.

use super::{GpuError, Memory};
use std::fmt;

/// The number of a copy, or of several copies that end together. Numbers ascend, and copies end in this order.
pub type Ticket = u64;

/// Copies in order, for a device whose memory the CPU does not reach. No method waits for a kernel or for a copy.
pub trait Copier: Send + fmt::Debug {
    /// Starts copying `bytes` bytes from address `from.1` in memory `from.0` to `to.1` in `to.0`, at the latest when
    /// [`is_done`](Self::is_done) is called. Copies that start together have no order among themselves.
    ///
    /// # Safety
    /// - Both ranges are in their allocations, which stay alive until the copy is done.
    ///
    /// # Errors
    /// [`GpuError::Unsupported`] for memory that the copier does not reach, or an error of the driver.
    unsafe fn copy(&mut self, to: (&Memory, u64), from: (&Memory, u64), bytes: u64) -> Result<Ticket, GpuError>;

    /// Starts writing the low `bytes` bytes of `value`, at most 8, to address `to.1` in memory `to.0`.
    ///
    /// # Safety
    /// - As [`copy`](Self::copy).
    ///
    /// # Errors
    /// As [`copy`](Self::copy).
    unsafe fn store(&mut self, to: (&Memory, u64), value: u64, bytes: u64) -> Result<Ticket, GpuError>;

    /// Returns whether a copy is done. Kernels that acquire a word raised from now on then see it.
    ///
    /// # Errors
    /// An error of the driver; the copy is never done then.
    fn is_done(&mut self, ticket: Ticket) -> Result<bool, GpuError>;
}
