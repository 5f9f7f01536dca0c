// SPDX-License-Identifier: MIT OR Apache-2.0
//! Words of ordering and sharing, which front end and back ends have in common.

use crate::sys::{Memory, Word};

/// How far a release of memory reaches.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Scope {
    /// The calling thread only: nothing was released.
    Thread,
    /// The threads of the block.
    Block,
    /// The threads of the GPU, and engines that read GPU memory through its L2 cache.
    Gpu,
    /// Everything: other GPUs, CPUs, NICs.
    System,
}

/// The threads that use a context at the same time, through this value or another one. Narrower is cheaper.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sharing {
    /// All threads of the GPU.
    Gpu,
    /// The threads of one block.
    Block,
    /// One thread.
    Thread,
}

/// How operations get to a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Route {
    /// By loads and stores to peers of the LSA team, over the network to others.
    Auto,
    /// By loads and stores. Operations to peers that these do not reach are refused
    /// ([`FaultKind::NotReachable`](crate::FaultKind::NotReachable)).
    Lsa,
    /// Over the network, to every peer.
    Network,
}

/// The memory that a wait, a read or a flush makes visible.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// Nothing yet: the payload may be read after a later wait of order [`Acquire`](Order::Acquire), or after a fence
    /// of the kernel's own. For kernels that look at several signals and pay for one fence.
    ///
    /// A flush of this order can return `Ok` although a request has failed; the next call that acquires tells.
    Relaxed,
    /// All that the signal, the counter or the finished operations cover, at system scope.
    Acquire,
}

/// Releases the writes of this thread, and of threads that it synchronised with, unless the caller has done so.
#[doc(hidden)]
#[inline(always)]
pub fn release<M: Memory>(given: Scope, required: Scope) {
    if given >= required {
        return;
    }
    match required {
        Scope::System => M::fence_release_sys(),
        Scope::Gpu => M::fence_release_gpu(),
        // Order within a block comes with the coop's barrier.
        Scope::Block | Scope::Thread => {}
    }
}

/// Adds `count` to the producer index if `leads`, and returns the index before; 0 otherwise.
#[inline(always)]
pub(crate) fn claim<W: Word>(producer_index: W, leads: bool, count: u64, sharing: Sharing) -> u64 {
    match sharing {
        Sharing::Gpu => producer_index.add_relaxed_gpu_if(leads, count),
        Sharing::Block if leads => producer_index.add_relaxed_cta(count),
        Sharing::Thread if leads => {
            let first = producer_index.load_relaxed_gpu();
            producer_index.store_relaxed_gpu(first.wrapping_add(count));
            first
        }
        Sharing::Block | Sharing::Thread => 0,
    }
}
