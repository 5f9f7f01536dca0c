// SPDX-License-Identifier: MIT OR Apache-2.0
//! Completes the entries that kernels have posted, after the kernels have ended.
//!
//! A kernel may leave entries for which it did not wait: some request no completion, some were never announced. So the
//! host posts one more entry behind them that only completes, announces all entries, and consumes completions up to
//! that entry's. It leaves the words of the queue pair as the next kernel expects them.

use super::doorbells::HostBell;
use super::hca::HcaError;
use super::open::Nic;
use super::queues::Expired;
use gin_abi::gdaki::{CLAIM_SHIFT, QueuePairData};
use gin_abi::mlx5::be::Be32;
use gin_abi::mlx5::cqe::{self, Completion, Failure, Tail};
use gin_abi::mlx5::doorbell::{Doorbell, Record};
use gin_abi::mlx5::wqe::{self, Entry, Flags, Post, QueueNumber, SLOT_BYTES, Slot};
use gin_device::internal::pair::TAG_SHIFT;
use gin_gpu::rt;
use gin_gpu::{GpuError, MemorySlice};
use std::mem::offset_of;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Returns the counter that entry `index` raises, by its tag.
pub const fn tagged(tag: u64, index: u64) -> Option<u64> {
    if tag >> TAG_SHIFT == (index + 1) & (u64::MAX >> TAG_SHIFT) { Some(tag & ((1 << TAG_SHIFT) - 1)) } else { None }
}

/// The failure of a queue pair.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DrainError {
    /// An error of the device.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// The doorbell cannot be rung.
    #[error(transparent)]
    Nic(#[from] HcaError),
    /// An entry failed, and the queue pair is broken.
    #[error(
        "entry {index} (operation {operation:#x}) of context {context} to rank {peer} failed: {}",
        syndrome(failure)
    )]
    Failed {
        /// The context.
        context: u32,
        /// The world rank of the peer.
        peer: u32,
        /// The index of the entry.
        index: u64,
        /// Its opcode, one of [`wqe::opcode`].
        operation: u32,
        /// The error of the NIC.
        failure: Failure,
    },
    /// An entry was claimed and never written, so later entries can never be announced.
    #[error("entry {index} of context {context} to rank {peer} was never written")]
    Hole {
        /// The context.
        context: u32,
        /// The world rank of the peer.
        peer: u32,
        /// The index of the entry.
        index: u64,
    },
    /// The NIC violated its protocol.
    #[error("completions of context {context} to rank {peer} make no sense")]
    Senseless {
        /// The context.
        context: u32,
        /// The world rank of the peer.
        peer: u32,
    },
}

/// Returns the error of an entry, for people.
pub(super) fn syndrome(failure: &Failure) -> String {
    let text = cqe::Syndrome::from_code(failure.syndrome).map_or("unknown syndrome", cqe::Syndrome::text);
    format!("{text} (syndrome {:#x}, vendor's {:#x})", failure.syndrome, failure.vendor)
}

/// A queue pair that no kernel uses, with the addresses by which the host accesses it.
#[derive(Debug)]
pub struct IdleQueue {
    pub context: u32,
    pub peer: u32,
    /// A copy of its words.
    pub data: QueuePairData,
    /// The words.
    pub home: MemorySlice,
    /// The send queue.
    pub ring: MemorySlice,
    /// The completion queue.
    pub completions: MemorySlice,
    /// The doorbell record.
    pub record: MemorySlice,
    /// The place where the host rings.
    pub(crate) doorbell: HostBell,
    /// The tags, a word for each slot.
    pub tags: MemorySlice,
    /// The NIC.
    pub nic: Arc<Nic>,
    /// The counters; `None` if there are none.
    pub counters: Option<MemorySlice>,
    /// The host has posted its entry.
    pub closed: bool,
}

impl IdleQueue {
    /// Returns the number of incomplete entries.
    pub fn left(&self) -> u64 {
        self.data.producer_index() - self.data.completion_index
    }

    pub fn slot(&self, index: u64) -> u64 {
        index & ((1 << self.data.depth_log2) - 1)
    }

    pub fn number(&self) -> QueueNumber {
        bytemuck::cast(self.data.number)
    }

    pub fn keep(&self, offset: usize, value: u64) -> Result<(), GpuError> {
        self.home.write(offset as u64, &[value])
    }

    /// Notes that the entries below `end` are claimed and published.
    pub fn claim(&mut self, end: u64) -> Result<(), GpuError> {
        self.data.claims = end << CLAIM_SHIFT;
        self.keep(offset_of!(QueuePairData, claims), self.data.claims)
    }

    /// Checks that all claimed entries were written.
    fn check(&self) -> Result<(), DrainError> {
        for index in self.data.rung.max(self.data.completion_index)..self.data.producer_index() {
            let mut slot: [Slot; 1] = [Slot::default()];
            self.ring.read(self.slot(index) * SLOT_BYTES, &mut slot)?;
            if Entry::read(&slot[0], index, self.number().get()).is_err() {
                return Err(DrainError::Hole { context: self.context, peer: self.peer, index });
            }
        }
        Ok(())
    }

    /// Announces all posted entries, and posts the last entry if there is room.
    pub fn begin(&mut self) -> Result<(), DrainError> {
        self.check()?;
        // A kernel that was stopped may have left its mark here.
        self.claim(self.data.producer_index())?;
        self.close()?;
        if self.data.rung < self.data.producer_index() { self.announce() } else { Ok(()) }
    }

    /// Posts an entry that completes after all others, if there is room and it is still needed.
    fn close(&mut self) -> Result<(), DrainError> {
        let (index, depth) = (self.data.producer_index(), 1 << self.data.depth_log2);
        if self.closed || self.left() == 0 || self.left() >= depth {
            return Ok(());
        }
        let entry = wqe::nop(Post { index, queue: self.number(), flags: Flags::COMPLETION });
        self.ring.write(self.slot(index) * SLOT_BYTES, &entry)?;
        self.claim(index + 1)?;
        (self.data.covered, self.closed) = (index + 1, true);
        self.keep(offset_of!(QueuePairData, covered), index + 1)?;
        self.announce()
    }

    /// Announces all posted entries to the NIC.
    pub fn announce(&mut self) -> Result<(), DrainError> {
        let end = self.data.producer_index();
        self.record.write(0, &[Record { receive: Be32::new(0), send: Record::send(end) }])?;
        let word = Doorbell::word(end, self.number());
        match self.doorbell {
            // Safety: the doorbell exists as long as the queue pair.
            HostBell::Nic(doorbell) => unsafe { self.nic.owner.hca.ring(doorbell, word) }?,
            // Safety: so does the word, which is in pinned memory.
            HostBell::Word(address) => {
                unsafe { AtomicU64::from_ptr(address as usize as *mut u64) }.store(word, Ordering::Release)
            }
        }
        // The mapping may combine stores. The fence sends this one now.
        fence(Ordering::SeqCst);
        self.data.rung = end;
        Ok(self.keep(offset_of!(QueuePairData, rung), end)?)
    }

    /// Consumes the available completions. Returns whether all entries are complete.
    pub fn poll(&mut self) -> Result<bool, DrainError> {
        let log_depth = self.data.depth_log2;
        loop {
            let at = self.slot(self.data.cq_consumer_index) * cqe::BYTES;
            let mut tail = [0u64];
            self.completions.read(at + 8 * cqe::TAIL_WORD as u64, &mut tail)?;
            if !Tail(tail[0]).is_in_place(self.data.cq_consumer_index, log_depth) {
                break;
            }
            fence(Ordering::Acquire);
            let mut completion = [Completion { words: [0; 8] }];
            self.completions.read(at, &mut completion)?;
            self.take(&completion[0])?;
        }
        self.close()?;
        Ok(self.left() == 0)
    }

    fn take(&mut self, completion: &Completion) -> Result<(), DrainError> {
        let (context, peer) = (self.context, self.peer);
        let senseless = DrainError::Senseless { context, peer };
        let outcome =
            completion.read(self.data.cq_consumer_index, self.data.depth_log2).map_err(|_| senseless.clone())?;
        // Completions arrive in the order of their entries, so this is the first entry with that number from
        // `completion_index` on.
        let index =
            self.data.completion_index + u64::from(outcome.index.wrapping_sub(self.data.completion_index as u16));
        if index >= self.data.producer_index() {
            return Err(senseless);
        }
        if let Err(failure) = outcome.result {
            return Err(DrainError::Failed { context, peer, index, operation: outcome.operation, failure });
        }
        self.raise(index + 1)?;
        (self.data.cq_consumer_index, self.data.completion_index) = (self.data.cq_consumer_index + 1, index + 1);
        self.keep(offset_of!(QueuePairData, cq_consumer_index), self.data.cq_consumer_index)?;
        Ok(self.keep(offset_of!(QueuePairData, completion_index), self.data.completion_index)?)
    }

    /// Raises the counters of the entries from `completion_index` to `end`.
    fn raise(&self, end: u64) -> Result<(), DrainError> {
        let Some(counters) = &self.counters else { return Ok(()) };
        for index in self.data.completion_index..end.min(self.data.tagged) {
            let mut tag = [0u64];
            self.tags.read(8 * self.slot(index), &mut tag)?;
            let Some(counter) = tagged(tag[0], index).filter(|&counter| counter < self.data.counter_count) else {
                continue;
            };
            let mut word = [0u64];
            counters.read(8 * counter, &mut word)?;
            counters.write(8 * counter, &[word[0].wrapping_add(1)])?;
        }
        Ok(())
    }
}

/// Waits until all entries of these queue pairs are complete. Returns the number of incomplete entries once `expired`
/// returns true.
///
/// # Errors
/// The first [`DrainError`], without a further wait.
pub fn drain(mut queues: Vec<IdleQueue>, expired: Expired<'_>) -> Result<u64, DrainError> {
    queues.iter_mut().try_for_each(IdleQueue::begin)?;
    let mut failed = None;
    rt::wait_until_named("its NICs", || {
        queues.retain_mut(|queue| match queue.poll() {
            Ok(complete) => !complete,
            Err(error) => {
                failed.get_or_insert(error);
                false
            }
        });
        queues.is_empty() || failed.is_some() || expired()
    });
    failed.map_or_else(|| Ok(queues.iter().map(IdleQueue::left).sum()), Err)
}
