// SPDX-License-Identifier: MIT OR Apache-2.0
//! Doorbells that the host rings for a GPU.
//!
//! Where a GPU cannot map doorbell pages, it stores its doorbells to words in pinned memory, one for each queue pair, and
//! a thread of the host passes them on. A kernel does the same in either case: entries and record first, each visible to
//! the whole system before the next, then one store of the [word](gin_abi::mlx5::doorbell::Doorbell::word). Words in
//! between may be skipped: a doorbell announces all entries up to its index.

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
    /// - `from` are addresses of aligned words that stay mapped in this process, and `to` doorbells of the NIC whose pages
    ///   are there, while the relay is used.
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

#[cfg(test)]
mod tests {
    use super::super::hca::Hca;
    use super::super::open::NicConfig;
    use super::super::soft::{SoftConfig, SoftFabric};
    use super::super::testing::FailingHca;
    use super::*;

    #[test]
    fn each_new_word_is_passed_on_once_and_to_its_own_doorbell() {
        let words: Vec<AtomicU64> = (0..4).map(|_| AtomicU64::new(0)).collect();
        let address = |index: usize| (&raw const words[index]) as u64;
        let lines = [RelayLine { from: address(0), to: address(2) }, RelayLine { from: address(1), to: address(3) }];
        let hca = SoftFabric::default().add(SoftConfig::ethernet(0));
        let nic = Nic::open(Arc::new(hca), NicConfig::default()).unwrap();
        // Safety: the words outlive the relay; this NIC's doorbells are words of the process.
        let mut relay = unsafe { DoorbellRelay::new(&nic, lines) };
        let seen = |index: usize| words[index].swap(0, Ordering::Relaxed);
        assert!(!relay.step(), "nothing was stored yet");
        words[1].store(7, Ordering::Relaxed);
        assert!(relay.step());
        assert_eq!((seen(2), seen(3)), (0, 7));
        assert!(!relay.step());
        assert_eq!((seen(2), seen(3)), (0, 0));
        words[0].store(1, Ordering::Relaxed);
        words[1].store(8, Ordering::Relaxed);
        assert!(relay.step());
        assert_eq!((seen(2), seen(3)), (1, 8));
    }

    #[test]
    fn a_nic_that_cannot_be_rung_is_rung_again() {
        let hca: Arc<dyn Hca> = Arc::new(SoftFabric::default().add(SoftConfig::ethernet(0)));
        let uar = hca.allocate_uar().unwrap();
        let deaf = FailingHca::at_doorbells(hca.clone(), 2);
        let nic = Nic::open(Arc::new(deaf), NicConfig::default()).unwrap();
        let from = AtomicU64::new(9);
        let line = RelayLine { from: (&raw const from) as u64, to: uar.doorbell };
        // Safety: word and page outlive the relay.
        let mut relay = unsafe { DoorbellRelay::new(&nic, [line]) };
        // Safety: a word of the page.
        let seen = || unsafe { AtomicU64::from_ptr(uar.doorbell as usize as *mut u64) }.load(Ordering::Relaxed);
        for rung in [0, 0, 9] {
            assert!(relay.step());
            assert_eq!(seen(), rung);
        }
        assert!(!relay.step(), "it was rung");
        drop(relay);
        hca.free_uar(uar.handle).unwrap();
    }
}
