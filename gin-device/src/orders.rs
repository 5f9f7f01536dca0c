// SPDX-License-Identifier: MIT OR Apache-2.0
//! Orders of one thread to other warps of its block.
//!
//! A thread that is in the midst of something cannot meet the block at a barrier, as the lanes of its own warp are
//! elsewhere. So it gives orders by words in memory of the GPU, and whole warps that have nothing else to do look for
//! them. One order is under way at a time; its giver waits until all helpers have carried it out.

use crate::sys::{Memory, Word};

/// Words that [`Orders`] lie in.
pub const WORDS: u64 = 5;

/// Orders to copy, in [`WORDS`] words.
#[derive(Clone, Copy, Debug)]
pub struct Orders<M: Memory> {
    /// Number of the last order; its three words were written before.
    number: M::Word,
    to: M::Word,
    from: M::Word,
    bytes: M::Word,
    /// How many times a helper has carried out an order.
    done: M::Word,
}

/// Where a copy goes, where it comes from, and how long it is. What 0 bytes stand for is for its users to say.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Order {
    /// Address of the first byte that is written.
    pub to: u64,
    /// Address of the first byte that is read.
    pub from: u64,
    /// Bytes.
    pub bytes: u64,
}

impl<M: Memory> Orders<M> {
    /// In [`WORDS`] adjacent words, all 0 at first.
    #[inline(always)]
    pub fn new(first: M::Word) -> Self {
        Self { number: first, to: first.at(1), from: first.at(2), bytes: first.at(3), done: first.at(4) }
    }

    /// Gives order `number`, counted from 1. All earlier ones were carried out.
    ///
    /// Ordering: what the giver has done or acquired comes before what the helpers do.
    #[inline(always)]
    pub fn give(&self, number: u64, order: Order) {
        self.to.store_relaxed_gpu(order.to);
        self.from.store_relaxed_gpu(order.from);
        self.bytes.store_relaxed_gpu(order.bytes);
        M::fence_release_gpu();
        self.number.store_relaxed_gpu(number);
    }

    /// Waits until each of `helpers` helpers has carried out `number` orders. They must be there and at it: this wait
    /// has no other end.
    ///
    /// Ordering: what the helpers did comes before what follows.
    #[inline(always)]
    pub fn wait(&self, number: u64, helpers: u64) {
        while self.done.load_relaxed_gpu() != number * helpers {
            M::pause(0);
        }
        M::fence_acquire_gpu();
    }

    /// Returns whether an order after number `number` was given; [`read`](Self::read) says which.
    ///
    /// Ordering: if so, what its giver did before comes before what follows.
    #[inline(always)]
    pub fn is_given(&self, number: u64) -> bool {
        if self.number.load_relaxed_gpu() == number {
            return false;
        }
        M::fence_acquire_gpu();
        true
    }

    /// The order that was given last, for a helper that has seen it and not carried it out.
    #[inline(always)]
    pub fn read(&self) -> Order {
        let (to, from) = (self.to.load_relaxed_gpu(), self.from.load_relaxed_gpu());
        Order { to, from, bytes: self.bytes.load_relaxed_gpu() }
    }

    /// Says that a helper has carried out the order: one thread of it, after all of them have met.
    ///
    /// Ordering: what they did comes before what its giver does after its wait, for other GPUs and the host too.
    #[inline(always)]
    pub fn carried_out(&self) {
        M::fence_release_sys();
        self.done.add_relaxed_gpu(1);
    }

    /// As at first. No helper looks any more.
    #[inline(always)]
    pub fn clear(&self) {
        self.number.store_relaxed_gpu(0);
        self.done.store_relaxed_gpu(0);
    }
}
