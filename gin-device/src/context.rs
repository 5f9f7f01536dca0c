// SPDX-License-Identifier: MIT OR Apache-2.0
//! A context of a communicator, as back ends see it.

use crate::comm::Comm;
use crate::fault::{self, Fault, Judge, Unmet};
use crate::order::{Order, Route, Sharing};
use crate::status::Status;
use crate::sys::{self, Global};
use crate::team::Rank;
use gin_abi::{ContextData, FaultKind, Operation};

/// The state of a [`Gin`](crate::gin::Gin), as back ends see it.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Core {
    pub(crate) comm: Comm,
    pub(crate) context: u32,
    /// The context exists, and the back end is the communicator's.
    pub(crate) usable: bool,
    pub(crate) sharing: Sharing,
    pub(crate) order: Order,
    pub(crate) route: Route,
}

impl Core {
    /// Returns context, sharing and order in one word, for functions that a kernel calls.
    #[inline(always)]
    pub(crate) fn place(&self) -> u64 {
        self.context as u64 | (self.sharing as u64) << 32 | (self.order as u64) << 40
    }

    /// Returns the state of a usable context from the address of the handle's copy and a [`place`](Self::place).
    ///
    /// # Safety
    /// - As for [`Comm::copied`].
    #[inline(always)]
    pub(crate) unsafe fn at(copy: u64, place: u64) -> Self {
        let sharing = match place >> 32 & 0xff {
            0 => Sharing::Gpu,
            1 => Sharing::Block,
            _ => Sharing::Thread,
        };
        let order = if place >> 40 == 0 { Order::Relaxed } else { Order::Acquire };
        // Safety: the caller's promise.
        let comm = unsafe { Comm::copied(copy) };
        Self { comm, context: place as u32, usable: true, sharing, order, route: Route::Auto }
    }

    #[inline(always)]
    pub(crate) fn context(&self) -> u32 {
        self.context
    }

    #[inline(always)]
    pub(crate) fn sharing(&self) -> Sharing {
        self.sharing
    }

    #[inline(always)]
    pub(crate) fn order(&self) -> Order {
        self.order
    }

    /// Returns whether operations take loads and stores or are refused.
    #[inline(always)]
    pub(crate) fn forces_lsa(&self) -> bool {
        self.route == Route::Lsa
    }

    #[inline(always)]
    pub(crate) fn data(&self) -> *const ContextData {
        self.comm.context_data(self.context)
    }

    /// Returns the table entry with the address, on `peer`, of the context's signal words that GPUs raise. Loads and
    /// stores reach `peer`.
    #[inline(always)]
    pub(crate) fn peer_signals(&self, peer: Rank) -> *const u64 {
        let handle = self.comm.handle();
        let index = sys::narrow(self.context).wrapping_mul(sys::narrow(handle.ranks)).wrapping_add(peer.world());
        (handle.peer_signals as usize as *const u64).wrapping_add(index as usize)
    }

    /// Returns the way of a post to a peer, for the detector of data races.
    #[cfg(not(target_arch = "nvptx64"))]
    #[inline(always)]
    pub(crate) fn way(&self, peer: Rank) -> crate::exec::watch::Way {
        let (table, context, peer) = (self.comm.handle().context_table, self.context, peer.world());
        crate::exec::watch::Way { table, context, peer }
    }

    #[inline(always)]
    pub(crate) fn status(&self) -> Status<Global> {
        self.comm.status()
    }

    #[inline(always)]
    pub(crate) fn comm(&self) -> &Comm {
        &self.comm
    }

    /// Returns a fault of this context.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub(crate) fn fault(&self, kind: FaultKind, operation: Operation) -> Fault {
        fault::new(kind, operation).with_context(sys::stay(self.context))
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub(crate) fn check(&self, operation: Operation) -> Result<(), Fault> {
        fault::check!(self.fault(FaultKind::BadDescriptor, operation), |judge| { self.judge(&mut judge) })
    }

    /// Passes the condition that the context is usable to `judge`.
    #[inline(always)]
    pub(crate) fn judge(&self, judge: &mut Judge) {
        judge.condition(self.usable, || {
            let (contexts, backend) = (self.comm.contexts(), self.comm.backend());
            if self.context < contexts {
                Unmet::new(FaultKind::NoBackend).values(0, backend as u64)
            } else {
                Unmet::new(FaultKind::UnknownContext).values(contexts as u64, self.context as u64)
            }
        });
    }
}
