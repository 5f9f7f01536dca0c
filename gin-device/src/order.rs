// SPDX-License-Identifier: MIT OR Apache-2.0
//! Terms of ordering, sharing and routing that the front end and the back ends share.

use crate::sys::{Memory, Word};

/// The scope of a release of memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Scope {
    /// The calling thread only: nothing was released.
    Thread,
    /// The threads of the block.
    Block,
    /// The threads of the GPU, and engines that read GPU memory through its L2 cache.
    Gpu,
    /// The whole system: other GPUs, CPUs, NICs.
    System,
}

/// The threads that use a context at the same time, through one value of `Gin` or several. A narrower set is cheaper.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sharing {
    /// All threads of the GPU.
    Gpu,
    /// The threads of one block.
    Block,
    /// One thread.
    Thread,
}

/// The route of operations to a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Route {
    /// Loads and stores to peers of the LSA team, the network to others.
    Auto,
    /// Loads and stores. An operation to a peer that they do not reach is refused
    /// ([`FaultKind::NotReachable`](gin_abi::FaultKind::NotReachable)).
    Lsa,
    /// The network, to every peer.
    Network,
}

/// The memory that a wait, a read or a flush makes visible.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// None yet. The payload may be read after a later wait of order [`Acquire`](Order::Acquire), or after a fence of
    /// the kernel's own. A kernel that waits for several signals thereby pays for one fence.
    ///
    /// A flush of this order can return `Ok` although a request has failed. The next call that acquires reports it.
    Relaxed,
    /// All memory that the signal, the counter or the finished operations cover, at system scope.
    Acquire,
}

/// Releases the writes of this thread, and of threads that it synchronised with, to `required`. Makes no fence if the
/// caller has released them at least as far, to `given`.
#[doc(hidden)]
#[inline(always)]
pub fn release<M: Memory>(given: Scope, required: Scope) {
    if given >= required {
        return;
    }
    match required {
        Scope::System => M::fence_release_sys(),
        Scope::Gpu => M::fence_release_gpu(),
        // The coop's barrier orders memory within a block.
        Scope::Block | Scope::Thread => {}
    }
}

/// Adds `count` to the producer index if `leads` and returns the index before. Otherwise returns 0.
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
