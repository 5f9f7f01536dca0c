// SPDX-License-Identifier: MIT OR Apache-2.0
//! Waits for earlier posts.

use super::pair::Ended;
use super::{Called, Link};
use crate::context::Core;
use crate::status::WaitError;
use crate::sys::{self, Global, GlobalWord, Word};
use gin_abi::Deadline;
use gin_abi::gdaki::BUSY_RANKS;

impl Link {
    /// Returns the position of the next post. If a wait for it will need a completion, posts the entry for that now, so
    /// that it precedes later posts.
    #[inline(always)]
    pub(super) fn position(&self) -> u64 {
        let pair = self.pair();
        // Nothing is under way to a peer without a connection.
        if !pair.connected {
            return 0;
        }
        let position = pair.position();
        pair.cover(position, &|index, flags| self.dump(&pair, index, flags), &Called(self.data));
        position
    }

    #[inline(always)]
    pub(super) fn wait(&self, position: u64, deadline: Deadline) -> Result<(), Ended> {
        let pair = self.pair();
        if !pair.connected {
            return Ok(());
        }
        pair.wait(position, deadline, |index, flags| self.dump(&pair, index, flags), &Called(self.data))?;
        pair.rest();
        Ok(())
    }
}

/// Waits for all earlier posts to all peers.
#[inline(always)]
#[expect(
    clippy::result_large_err,
    reason = "registers hold the link; behind the loop its report keeps few values live"
)]
pub(super) fn wait_all(core: &Core, deadline: Deadline) -> Result<(), WaitError> {
    let deadline = crate::status::Shared::start::<Global>(deadline);
    let prepared: Result<(), ()> = each_busy(core, |link| {
        link.position();
        Ok(())
    });
    prepared.unwrap_or(());
    let waited = each_busy(core, |link| {
        let waited = link.wait(link.pair().position(), deadline.left::<Global>());
        waited.map_err(|stop| (link, stop))
    });
    waited.map_err(|(link, stop)| link.stopped(stop))
}

/// Calls `body` for each peer that may have entries under way.
#[inline(always)]
pub(super) fn each_busy<E>(core: &Core, mut body: impl FnMut(Link) -> Result<(), E>) -> Result<(), E> {
    // Safety: the front end checked the context; the host keeps its data valid.
    let busy = unsafe { GlobalWord::new(sys::read_word(&raw const (*core.data()).busy)) };
    let ranks = sys::narrow(core.comm().handle().ranks);
    let mut first = 0;
    while first < ranks {
        let mut bits = busy.at((first / BUSY_RANKS) as u64).load_relaxed_gpu() as u32;
        while bits != 0 {
            body(Link::of(core, first + bits.trailing_zeros()))?;
            bits &= bits - 1;
        }
        first += BUSY_RANKS;
    }
    Ok(())
}
