// SPDX-License-Identifier: MIT OR Apache-2.0
//! Words that count the rounds of a barrier between two ranks.
//!
//! A barrier whose arrivals take loads and stores has a word for each member at each rank. Only that member writes it,
//! so an arrival is no addition: it stores the number of the round, the *epoch*. A store is not answered, while the
//! next fence of a thread would wait for the answer to an atomic.
//!
//! # Why it is right
//! *No epoch is missed.* The writer stores growing numbers, and a reader compares by "at least" on the circle of 2^64
//! values. So a later epoch also ends the wait for an earlier one. A writer is at most one round ahead: it arrives at
//! the next one only after this reader has arrived at the present one.
//!
//! *The writes before an arrival are visible.* The writer releases to the system before it stores. The reader makes an
//! acquire fence after it has read the epoch, or a later one.

use crate::status::{Status, WaitError};
use crate::sys::{Memory, NAP_NS, Word};
use gin_abi::Deadline;

/// Stores the epoch at a peer. The caller has released to the system, and nothing else writes the word.
#[inline(always)]
pub fn arrive<W: Word>(word: W, epoch: u64) {
    word.store_relaxed_sys(epoch);
}

/// Polls a short time and returns whether `word`, in which the caller has just seen `first`, has `epoch` or a later
/// one. Relaxed, as [`wait`].
#[inline(always)]
pub fn spin<M: Memory>(word: M::Word, first: u64, epoch: u64) -> bool {
    word.spin(first, epoch, M::POLLS_PER_CHECK) as i64 >= 0
}

/// Waits until `word` has `epoch` or a later one. Calls `attend` now and then, and ends with [`WaitError::Fault`] if
/// it returns false. Relaxed: [`acquire`] follows, once for all members.
///
/// # Errors
/// [`WaitError`] if the wait ended early, and the epoch at that time.
#[inline(always)]
pub fn wait<M: Memory>(
    word: M::Word,
    epoch: u64,
    status: &Status<M>,
    deadline: Deadline,
    mut attend: impl FnMut() -> bool,
) -> Result<(), (WaitError, u64)> {
    // Most arrivals come soon: the first polls look at nothing else.
    if spin::<M>(word, word.load_relaxed_sys(), epoch) {
        return Ok(());
    }
    waits!(None);
    let start = if deadline.is_none() { 0 } else { M::clock_ns() };
    loop {
        let goes_on = attend();
        let end = status.end(start, deadline);
        let past = word.spin(word.load_relaxed_sys(), epoch, M::POLLS_PER_CHECK);
        if past as i64 >= 0 {
            return Ok(());
        }
        // A stop counts only if the polls after it were in vain.
        if let Some(end) = end {
            return Err((end, epoch.wrapping_add(past)));
        }
        if !goes_on {
            return Err((WaitError::Fault, epoch.wrapping_add(past)));
        }
        M::pause(NAP_NS);
    }
}

/// Ends the waits for all members: makes visible what they released before they arrived.
#[inline(always)]
pub fn acquire<M: Memory>() {
    M::fence_acquire_sys();
}
