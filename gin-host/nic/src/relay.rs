// SPDX-License-Identifier: MIT OR Apache-2.0
//! Doorbells that the host rings for a GPU.
//!
//! If a GPU cannot map doorbell pages, its kernels store doorbells to words in pinned memory, one for each queue pair,
//! and a thread of the host rings the NIC's doorbells. A kernel does the same in both cases: it makes entries and
//! record visible to the whole system, in this order, then stores one [word](gin_abi::mlx5::doorbell::Doorbell::word).
//! The relay may skip words, because a doorbell announces all entries up to its index.

use super::open::Nic;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// A word, and the doorbell that it stands for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RelayLine {
    /// The address of the word that the GPU stores to; zero at first.
    pub from: u64,
    /// The address of the doorbell.
    pub to: u64,
}

/// Rings doorbells for a GPU.
#[derive(Debug)]
pub struct DoorbellRelay {
    lines: Vec<(RelayLine, u64)>,
    nic: Arc<Nic>,
}

impl DoorbellRelay {
    /// Makes a relay for these queue pairs of a NIC.
    ///
    /// # Safety
    /// - While the relay is used, each `from` is the address of an aligned word that is mapped in this process, and
    ///   each `to` is a doorbell of the NIC whose page exists.
    /// - Only one GPU writes `from`, with whole words. No other code rings `to`.
    pub unsafe fn new(nic: &Arc<Nic>, lines: impl IntoIterator<Item = RelayLine>) -> Self {
        Self { lines: lines.into_iter().map(|line| (line, 0)).collect(), nic: nic.clone() }
    }

    /// Rings the doorbells of the words that changed since the last call. Returns whether one changed.
    pub fn step(&mut self) -> bool {
        let mut any = false;
        for (line, last) in &mut self.lines {
            // Safety: the promise of `new`. Acquire: the GPU's earlier writes are visible before the doorbell rings.
            let word = unsafe { AtomicU64::from_ptr(line.from as usize as *mut u64) }.load(Ordering::Acquire);
            if word == *last {
                continue;
            }
            any = true;
            // Safety: the promise of `new`.
            let rung = unsafe { self.nic.owner.hca.ring(line.to, word) };
            // Other calls report a NIC that cannot be rung. Until then the relay tries again.
            if rung.is_ok() {
                *last = word;
            }
        }
        if any {
            // The mapping may combine stores. The fence sends them now.
            fence(Ordering::SeqCst);
        }
        any
    }
}
