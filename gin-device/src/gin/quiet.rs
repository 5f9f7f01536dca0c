// SPDX-License-Identifier: MIT OR Apache-2.0
//! Waits until puts have arrived at their peers.
//!
//! | network | a complete put | so `quiet` |
//! | --- | --- | --- |
//! | with [`CAP_COMPLETION_IS_ARRIVAL`] | has arrived | waits for completion, as a flush does |
//! | without it | has reached the peer's NIC, but perhaps not its memory | posts one more request, and waits for its completion |
//!
//! The further request is the back end's [`confirmation`](Backend::confirmation).

use super::Gin;
use crate::backend::Backend;
use crate::coop::{Coop, lead};
use crate::fault::Fault;
use crate::order::{Order, Scope, release};
use crate::signal::SignalAction;
use crate::status::{Shared, WaitError};
use crate::sys::Global;
use crate::team::Rank;
use core::ops::Range;
use gin_abi::handle::CAP_COMPLETION_IS_ARRIVAL;
use gin_abi::{Deadline, FaultKind, FaultSubject, Operation};

/// The contexts whose puts a call covers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Contexts {
    Own,
    Others,
}

impl<B: Backend> Gin<B> {
    /// Waits until all earlier puts of this context to `peer` have arrived, whichever route they took. Gets and signals
    /// to the peer are complete, too.
    ///
    /// All threads of `coop` call. Puts of other threads count if they happen before. A thread of the peer can read the
    /// data of these puts after it has synchronised with the caller by any means: a signal of any context and route, a
    /// word that both access, the host.
    ///
    /// Cost: a flush of one peer, and a release fence to the system. With RDMA, where a completion is not an arrival,
    /// also one request to the peer and its answer.
    ///
    /// Ordering: acquire and release, at system scope, whatever [`ordered`](Self::ordered) says.
    ///
    /// # Errors
    /// [`FaultKind::Timeout`] if they have not arrived in time; the fault of a failed operation; the fault or abort
    /// that ended the wait; [`FaultKind::UnknownContext`].
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn quiet(&self, coop: &impl Coop, peer: Rank, deadline: Deadline) -> Result<(), Fault> {
        lead!(coop, self.quiet_here(Contexts::Own, Some(peer.world()), deadline))
    }

    /// Does the same as [`quiet`](Self::quiet) for all peers.
    ///
    /// Cost: a flush, and a release fence to the system. With RDMA, also one request to each rank and its answer; the
    /// requests are in flight together.
    ///
    /// # Errors
    /// As [`quiet`](Self::quiet).
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn quiet_all(&self, coop: &impl Coop, deadline: Deadline) -> Result<(), Fault> {
        lead!(coop, self.quiet_here(Contexts::Own, None, deadline))
    }

    /// Raises a signal of `peer` after all earlier puts of this rank to `peer` have arrived, whichever context and
    /// route they took.
    ///
    /// All threads of `coop` call. Puts of other threads count if they happen before. The call first waits as
    /// [`quiet`](Self::quiet) of every other context does, then posts as
    /// [`signal_all_routes`](Self::signal_all_routes) does. With one context it only posts. No thread may use another
    /// context with a narrower [`shared_by`](Self::shared_by) at the same time.
    ///
    /// # Errors
    /// Those of [`quiet`](Self::quiet) and of [`Post::issue`](super::Post::issue). The signal was not posted.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn signal_all_contexts(
        &self,
        coop: &impl Coop,
        peer: Rank,
        action: SignalAction,
        deadline: Deadline,
    ) -> Result<(), Fault> {
        called!(here);
        let raise = || {
            let deadline = Shared::start::<Global>(deadline);
            self.quiet_here(Contexts::Others, Some(peer.world()), deadline.whole())?;
            self.signal_all_routes(peer, action).deadline(deadline.left::<Global>()).over_network()
        };
        lead!(coop, raise())
    }

    /// Waits until the earlier puts of `contexts` to `peer`, or to all ranks, have arrived.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn quiet_here(&self, contexts: Contexts, peer: Option<u32>, deadline: Deadline) -> Result<(), Fault> {
        self.core().check(Operation::Quiet)?;
        let deadline = Shared::start::<Global>(deadline);
        waits!(Some(self.core().fault(FaultKind::Timeout, Operation::Quiet)));
        let ranks = match peer {
            Some(peer) => peer..peer + 1,
            None => 0..self.comm().handle().ranks,
        };
        watch!(event(self.quiets(contexts, &ranks, false)));
        if self.comm().capabilities() & CAP_COMPLETION_IS_ARRIVAL == 0 {
            // All are posted before one of them is awaited, so that they are in flight together.
            self.each_context(contexts, |gin| ranks.clone().try_for_each(|peer| gin.confirm(peer, deadline)))?;
        }
        self.each_context(contexts, |gin| {
            let position = B::position(gin.core(), peer);
            B::wait(gin.core(), peer, position, deadline.left::<Global>())
                .map_err(|stop| gin.not_quiet(peer, stop, deadline.whole()))
        })?;
        watch!(event(self.quiets(contexts, &ranks, true)));
        // Puts by loads and stores arrive before everything that this thread releases or raises from now on.
        release::<Global>(Scope::Thread, Scope::System);
        Ok(())
    }

    /// Calls `body` for each of the contexts, with waits that acquire.
    #[inline(always)]
    fn each_context(&self, contexts: Contexts, body: impl Fn(&Self) -> Result<(), Fault>) -> Result<(), Fault> {
        if contexts == Contexts::Own {
            return body(&self.ordered(Order::Acquire));
        }
        let mut number = 0;
        while number < self.comm().contexts() {
            if number != self.context().0 {
                body(&self.in_context(crate::signal::ContextId(number)))?;
            }
            number += 1;
        }
        Ok(())
    }

    /// Posts the request whose completion confirms that earlier puts to `peer` have arrived. A peer without a
    /// connection has got no puts.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn confirm(&self, peer: u32, deadline: Shared) -> Result<(), Fault> {
        let request = B::confirmation(self.core(), peer);
        match B::post(self.core(), &request, Operation::Quiet, deadline.left::<Global>()).map_err(Into::into) {
            Ok(()) | Err(WaitError::NotConnected) => Ok(()),
            Err(stop) => Err(self.not_quiet(Some(peer), stop, deadline.whole())),
        }
    }

    /// Returns the fault of a call that ended early.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn not_quiet(&self, peer: Option<u32>, stop: WaitError, deadline: Deadline) -> Fault {
        let timeout = self.core().fault(FaultKind::Timeout, Operation::Quiet);
        let timeout = timeout.with_peer(peer.unwrap_or(gin_abi::fault::NONE));
        self.core().status().explain(stop, timeout, FaultSubject::None, deadline, 0, 0)
    }

    /// Returns the event by which an executor learns that puts have arrived.
    #[cfg(not(target_arch = "nvptx64"))]
    fn quiets(&self, contexts: Contexts, peers: &Range<u32>, done: bool) -> crate::exec::watch::Event {
        let (table, own) = (self.comm().handle().context_table, self.context().0);
        let others = contexts == Contexts::Others;
        crate::exec::watch::Event::Quiet { table, context: own, others, peers: (peers.start, peers.end), done }
    }
}
