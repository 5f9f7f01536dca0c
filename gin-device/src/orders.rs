// SPDX-License-Identifier: MIT OR Apache-2.0
//! Orders of one thread to other warps of its block.
//!
//! A thread that serves a NIC cannot meet its block at a barrier, because the other lanes of its warp are elsewhere.
//! Instead it gives orders through words in GPU memory. Whole warps of the block, the helpers, poll these words and
//! carry the orders out. One order is under way at a time: its giver waits until all helpers have carried it out.

use crate::sys::{Memory, Word};

/// Number of words of [`Orders`].
pub const WORDS: u64 = 5;

/// Orders to copy bytes, in [`WORDS`] words.
#[derive(Clone, Copy, Debug)]
pub struct Orders<M: Memory> {
    /// Number of the last order. Its three words were written before.
    number: M::Word,
    to: M::Word,
    from: M::Word,
    bytes: M::Word,
    /// Number of times that a helper has carried out an order.
    completed: M::Word,
}

/// A copy: its destination, its source and its length. The users of [`Orders`] may give 0 bytes a meaning of their own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Order {
    /// Address of the first byte that is written.
    pub to: u64,
    /// Address of the first byte that is read.
    pub from: u64,
    /// Number of bytes.
    pub bytes: u64,
}

impl<M: Memory> Orders<M> {
    /// Returns the orders in [`WORDS`] adjacent words from `first` on. The words are 0 at first.
    #[inline(always)]
    pub fn new(first: M::Word) -> Self {
        Self { number: first, to: first.at(1), from: first.at(2), bytes: first.at(3), completed: first.at(4) }
    }

    /// Gives order `number`, counted from 1. All earlier orders were carried out.
    ///
    /// Ordering: all that the giver has written or acquired happens before the helpers' accesses.
    #[inline(always)]
    pub fn give(&self, number: u64, order: Order) {
        self.to.store_relaxed_gpu(order.to);
        self.from.store_relaxed_gpu(order.from);
        self.bytes.store_relaxed_gpu(order.bytes);
        M::fence_release_gpu();
        self.number.store_relaxed_gpu(number);
    }

    /// Waits until each of `helpers` helpers has carried out `number` orders. All of them must be polling: nothing else
    /// ends this wait.
    ///
    /// Ordering: the helpers' accesses happen before what follows.
    #[inline(always)]
    pub fn wait(&self, number: u64, helpers: u64) {
        while self.completed.load_relaxed_gpu() != number * helpers {
            M::pause(0);
        }
        M::fence_acquire_gpu();
    }

    /// Returns whether an order after order `number` was given; [`read`](Self::read) returns it.
    ///
    /// Ordering: if so, the giver's earlier accesses happen before what follows.
    #[inline(always)]
    pub fn is_given(&self, number: u64) -> bool {
        if self.number.load_relaxed_gpu() == number {
            return false;
        }
        M::fence_acquire_gpu();
        true
    }

    /// Returns the last order. The calling helper has seen it and not carried it out.
    #[inline(always)]
    pub fn read(&self) -> Order {
        let (to, from) = (self.to.load_relaxed_gpu(), self.from.load_relaxed_gpu());
        Order { to, from, bytes: self.bytes.load_relaxed_gpu() }
    }

    /// Reports that a helper has carried out the order. One thread of the helper calls, after all of its threads have
    /// met.
    ///
    /// Ordering: the helper's accesses happen before what the giver does after its wait, for other GPUs and the host
    /// too.
    #[inline(always)]
    pub fn carried_out(&self) {
        M::fence_release_sys();
        self.completed.red_add_relaxed_gpu(1);
    }

    /// Sets the words to 0 again. No helper polls them any more.
    #[inline(always)]
    pub fn clear(&self) {
        self.number.store_relaxed_gpu(0);
        self.completed.store_relaxed_gpu(0);
    }
}
