// SPDX-License-Identifier: MIT OR Apache-2.0
//! A barrier of all ranks, by NCCL's signals.

use crate::gin::{Gin, lead};
use crate::shims::{self, Backend};
use gin_device::barrier::{BarrierTeam, Fence};
use gin_device::coop::Coop;
use gin_device::gin::{Order, Scope};
use gin_device::sys::{Global, Memory};
use gin_device::{Deadline, Fault, FaultKind, FaultSubject, Operation};

/// Bits of an arrival's count. NCCL counts in the low half of a signal's shadow.
const BITS: u32 = 32;

/// One use, or several, of a barrier of all ranks by a coop.
///
/// All ranks use the same barrier number, context and fences, in the same order; so do blocks in C++ that meet this one
/// by `ncclGinBarrierSession` with `ncclTeamTagWorld`. Signals and counts are NCCL's, so the two kinds meet. The waits
/// are loops over reads, because NCCL's wait of that barrier has no end in 2.30.
///
/// A barrier that ended with a fault, a deadline included, is broken: the session refuses every later use, and the
/// communicator's barrier must not be used again.
// In this order, because `Result` stores a fault in place of the first 8 bytes. In place of the communicator's
// address it would put the communicator on the stack.
#[repr(C)]
#[derive(Debug)]
pub struct BarrierSession<'a, B: Backend> {
    first_signal: u32,
    index: u32,
    /// A copy: a reference would put it on the stack.
    gin: Gin<'a, B>,
    failed: bool,
}

impl<'a, B: Backend> BarrierSession<'a, B> {
    /// Returns a session of barrier `index` of the world team, for operations of `gin`'s context.
    ///
    /// # Errors
    /// [`FaultKind::UnknownBarrier`] with the number of barriers, which is 0 for other teams;
    /// [`FaultKind::UnknownContext`].
    #[inline(always)]
    pub fn new(gin: &Gin<'a, B>, team: BarrierTeam, index: u32) -> Result<Self, Fault> {
        gin.check(Operation::Barrier)?;
        let handle = gin.comm().handle();
        let barriers = if matches!(team, BarrierTeam::World) { handle.barriers } else { 0 };
        if index >= barriers {
            let fault = gin.fault(FaultKind::UnknownBarrier, Operation::Barrier);
            return Err(fault.with_values(FaultSubject::Barrier(index), barriers as u64, index as u64));
        }
        // Safety: the host made the communicator.
        let first = unsafe { shims::gin_nccl_world_barrier(gin.comm().dev_comm()) };
        Ok(Self { gin: *gin, first_signal: first + index * handle.ranks, index, failed: false })
    }

    /// Arrives and waits for all ranks.
    ///
    /// Ordering: release before, acquire after, at system scope. With [`Fence::Put`], puts of other ranks to this rank,
    /// issued in this context before they arrived, are visible. With [`Fence::Get`] it flushes, which ends as
    /// [`Gin::flush`].
    ///
    /// # Errors
    /// [`FaultKind::Timeout`] with the counts expected and seen and the peer; [`FaultKind::BarrierBroken`] after an
    /// earlier fault; the fault or abort that ended the wait.
    #[inline(always)]
    pub fn sync(&mut self, coop: &impl Coop, fence: Fence, deadline: Deadline) -> Result<(), Fault> {
        if self.failed {
            let fault = self.gin.fault(FaultKind::BarrierBroken, Operation::Barrier);
            return Err(fault.with_values(FaultSubject::Barrier(self.index), 0, 0));
        }
        let met = lead!(coop, self.meet(fence, deadline));
        self.failed = met.is_err();
        met
    }

    /// Meets all ranks as NCCL's session does: raises this rank's signal at each peer, and counts the peer's arrival in
    /// the shadow of the signal that the peer raises here. The own rank takes part if puts must be visible, because a
    /// put to the own rank has no other order.
    #[inline(always)]
    fn meet(&self, fence: Fence, deadline: Deadline) -> Result<(), Fault> {
        let world = self.gin.comm().world();
        let others = world.size() - 1;
        let members = if matches!(fence, Fence::Put | Fence::PutGet) { others + 1 } else { others };
        let start = if deadline.is_none() { 0 } else { Global::clock_ns() };
        let mut step = 1;
        while step <= members {
            let peer = world.after(step);
            let mine = self.first_signal + world.rank();
            // The first signal's release is enough: nothing is written in between.
            let given = if step == 1 { Scope::Thread } else { Scope::System };
            self.gin.raise(peer, mine, 1, given, Scope::System, 0);
            step += 1;
        }
        let mut step = 1;
        while step <= members {
            let peer = world.after(step);
            let id = self.first_signal + peer.world();
            let shadow = self.gin.shadow(id).cast::<u32>();
            // Safety: one thread of the rank uses the barrier at a time, and nobody else writes its shadows.
            let round = unsafe {
                let round = shadow.read_volatile().wrapping_add(1);
                shadow.write_volatile(round);
                round
            };
            let left = match deadline.is_none() {
                true => deadline,
                false => Deadline::after_ns(deadline.ns().saturating_sub(Global::clock_ns().wrapping_sub(start))),
            };
            let value = || self.gin.signal_value(id, BITS, Order::Relaxed);
            let subject = FaultSubject::Barrier(self.index);
            let met = self.gin.wait(value, round as u64, BITS, left, Order::Relaxed, Operation::Barrier, subject);
            if let Err(fault) = met {
                return Err(fault.with_peer(peer.world()));
            }
            step += 1;
        }
        Global::fence_acquire_sys();
        if matches!(fence, Fence::Get | Fence::PutGet) { self.gin.flush_here() } else { Ok(()) }
    }
}
