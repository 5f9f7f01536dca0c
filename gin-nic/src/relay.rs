// SPDX-License-Identifier: MIT OR Apache-2.0
//! Doorbells that the host rings for a GPU.
//!
//! Where a GPU cannot map doorbell pages, it stores its doorbells to words in pinned memory, one for each queue pair,
//! and a thread of the host passes them on. A kernel does the same in either case: entries and record first, each
//! visible to the whole system before the next, then one store of the [word](gin_abi::mlx5::doorbell::Doorbell::word).
//! Words in between may be skipped: a doorbell announces all entries up to its index.

use super::open::Nic;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// A word, and where it is passed on to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RelayLine {
    /// Address of the word that the GPU stores to; zero at first.
    pub from: u64,
    /// Address of the doorbell.
    pub to: u64,
}

/// Passes doorbells on.
#[derive(Debug)]
pub struct DoorbellRelay {
    lines: Vec<(RelayLine, u64)>,
    nic: Arc<Nic>,
}

impl DoorbellRelay {
    /// For these queue pairs of a NIC.
    ///
    /// # Safety
    /// - `from` are addresses of aligned words that stay mapped in this process, and `to` doorbells of the NIC whose
    ///   pages are there, while the relay is used.
    /// - `from` is written by one GPU only, with whole words; nobody else rings `to`.
    pub unsafe fn new(nic: &Arc<Nic>, lines: impl IntoIterator<Item = RelayLine>) -> Self {
        Self { lines: lines.into_iter().map(|line| (line, 0)).collect(), nic: nic.clone() }
    }

    /// Passes on what was stored since the last call. Returns whether there was anything.
    pub fn step(&mut self) -> bool {
        let mut any = false;
        for (line, last) in &mut self.lines {
            // Safety: the promise of `new`. Acquire: what the GPU wrote before is there before the doorbell rings.
            let word = unsafe { AtomicU64::from_ptr(line.from as usize as *mut u64) }.load(Ordering::Acquire);
            if word == *last {
                continue;
            }
            any = true;
            // Safety: the promise of `new`.
            let rung = unsafe { self.nic.ring(line.to, word) };
            // A NIC that cannot be rung says so elsewhere; until then it is rung again and again.
            if rung.is_ok() {
                *last = word;
            }
        }
        if any {
            // A page may be mapped so that stores are gathered; they leave now.
            fence(Ordering::SeqCst);
        }
        any
    }
}
