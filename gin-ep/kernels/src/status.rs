// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors of a group's kernels, as values that the host reads.

use crate::params::{CLAIMED, SlotParams};
use crate::protocol;
use gin_device::prelude::*;
use gin_device::sys::{Global, GlobalWord, Word};

/// Number of words of the status block: code, rank, expert, seen, limit; the rest is unused.
pub const STATUS_WORDS: u64 = 8;

/// The cause of an entry.
#[repr(u64)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Code {
    /// A rank did not send or return its rows in time. `rank` is its number, `seen` the epoch of its flag, `limit` the
    /// awaited one.
    Silent = 1,
    /// An id is not less than the number of experts. `seen` is the token, `expert` its greatest id, `limit` that
    /// number.
    UnknownExpert = 2,
    /// There are more tokens than the group has room for. `seen` is their number, `limit` the room. Or the word that
    /// says their number is negative: then `seen` is that word.
    TooManyTokens = 3,
    /// The communicator was aborted, or has a fault.
    Stopped = 4,
    /// A layout, or a zone of a padded one, has more rows than there is room for. `seen` is their number, `limit` the
    /// room; `expert` and `rank` are those of the zone.
    TooManyRows = 5,
    /// Rows for a rank could not be posted to the network: there is no connection, or the queue had no room in time.
    /// `rank` is its number, `seen` the epoch. The group goes on without the rank.
    Unsent = 6,
    /// A rank receives more rows than its region has room for, which all sources share. `rank` is its number, `limit`
    /// the room. On that rank `seen` is the number of rows, with those kept for silent ranks; on a source it is the
    /// number after its last row. The rows past the end are not sent.
    Full = 7,
}

impl Code {
    /// Returns the code of a status word.
    #[must_use]
    pub const fn from_word(word: u64) -> Option<Self> {
        match word {
            1 => Some(Self::Silent),
            2 => Some(Self::UnknownExpert),
            3 => Some(Self::TooManyTokens),
            4 => Some(Self::Stopped),
            5 => Some(Self::TooManyRows),
            6 => Some(Self::Unsent),
            7 => Some(Self::Full),
            _ => None,
        }
    }
}

/// Reports an error. The first one stays until the host has read it.
#[inline(always)]
pub(crate) fn report(arena: u64, slot: &SlotParams, code: Code, rank: u32, expert: u64, seen: u64, limit: u64) {
    // Safety: words of the arena and of the status block, which the host made; all accesses are atomic.
    let (claimed, status) = unsafe { (GlobalWord::new(arena + slot.word(CLAIMED)), GlobalWord::new(slot.status)) };
    protocol::report::<Global>(claimed, status, code as u64, [rank.into(), expert, seen, limit]);
}

/// Returns the words of a report: code, rank, expert, seen, limit; `None` if there is none. For the host, also while
/// kernels run: then the code is right, and the others are when the kernel that reports has ended.
///
/// # Safety
/// - `status` is the address of a slot's status block, which is alive.
#[must_use]
pub unsafe fn reported(status: u64) -> Option<(Code, [u64; 4])> {
    // Safety: the caller's promise; kernels use the words by atomic operations, too.
    let first = unsafe { GlobalWord::new(status) };
    let code = Code::from_word(first.load_relaxed_sys())?;
    Some((code, [1, 2, 3, 4].map(|index| first.at(index).load_relaxed_sys())))
}

/// Returns what a kernel needs to poll: the communicator's status.
#[inline(always)]
pub(crate) fn of(comm: &Comm) -> gin_device::internal::status::Status<Global> {
    let handle = comm.handle();
    // Safety: the communicator's own words.
    unsafe {
        gin_device::internal::status::Status {
            host: GlobalWord::new(handle.host_status),
            kernel: GlobalWord::new(handle.kernel_status),
            copy: GlobalWord::new(handle.kernel_status_copy),
        }
    }
}
