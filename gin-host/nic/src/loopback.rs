// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks that a NIC does what kernels need, by queue pairs from the NIC to itself that the calling thread drives.
//!
//! [`check`] brings up queue pairs of one NIC, each connected to one without rings on the same NIC. All memory is in
//! this process. It posts the entries that `gin_device::backend::gdaki` posts, in the same form: a ring with as many
//! completions as entries, a completion for one entry in 16, record and doorbell after the entries. The NIC must reach
//! itself, which communicators do not require.

#[doc(hidden)]
pub mod checks;

pub use checks::{Check, Failed, check, names};

use super::device::RegisteredSlice;
use super::drain::syndrome;
use super::error::{DeviceQueueError, NicError, NicPeer};
use super::hca::Access;
use super::layout::{QueuePlace, QueueSpec, Role};
use super::open::Nic;
use super::queues::{DeviceQueues, Expired, QueueInfo};
use gin_abi::mlx5::be::Be32;
use gin_abi::mlx5::cqe::{self, Completion, CompletionError, Outcome, TAIL_WORD};
use gin_abi::mlx5::doorbell::{Doorbell, Record};
use gin_abi::mlx5::wqe::{Flags, Post, QueueNumber, SLOT_BYTES, Segment};
use gin_gpu::virt::VirtualDevice;
use gin_gpu::{Device, DeviceKind, Memory, MemoryKind, MemorySlice};
use std::collections::VecDeque;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

/// The slots of the send queue, and of its completion queue.
const DEPTH: u64 = 64;
/// An entry requests a completion if its index + 1 is a multiple of this.
const INTERVAL: u64 = 16;
/// The bytes of each of the two registered ranges.
const BYTES: u64 = 1 << 16;

const SPECS: [QueueSpec; 2] = [
    QueueSpec { role: Role::Sender, depth: DEPTH as u32, completions: DEPTH as u32, collapsed: false },
    QueueSpec { role: Role::Responder, depth: 0, completions: 0, collapsed: false },
];

/// A queue pair that is connected to another one of the same NIC.
#[doc(hidden)]
pub struct Loopback {
    /// Ranges with the access of windows, where writes become visible in any order.
    pub payload: Arc<RegisteredSlice>,
    /// Ranges with the access of signals, where writes become visible after all earlier writes.
    pub words: Arc<RegisteredSlice>,
    info: QueueInfo,
    place: QueuePlace,
    posted: u64,
    rung: u64,
    /// The index below which all entries are complete.
    completed: u64,
    /// The number of consumed completions.
    consumer_index: u64,
    /// The entries whose requested completion is not consumed yet.
    asked: VecDeque<u64>,
    until: Deadline,
    queues: DeviceQueues,
}

/// The deadline of a check.
#[derive(Clone, Copy)]
#[doc(hidden)]
pub struct Deadline {
    at: Instant,
    after: Duration,
}

impl Deadline {
    pub fn new(after: Duration) -> Self {
        Self { at: Instant::now() + after, after }
    }

    pub fn passed(&self) -> bool {
        Instant::now() >= self.at
    }
}

impl Loopback {
    pub fn new(nic: &Arc<Nic>, until: Deadline) -> Result<Self, DeviceQueueError> {
        let expired: Expired<'_> = &|| until.passed();
        let device: Arc<dyn Device> = VirtualDevice::memory_only(0);
        let register = |access| -> Result<_, DeviceQueueError> {
            let memory = Memory::new(&device, MemoryKind::Pinned, BYTES)?;
            Ok(Arc::new(RegisteredSlice::new(nic, memory.whole(), access)?))
        };
        let (payload, words) = (register(Access::PAYLOAD)?, register(Access::SIGNALS)?);
        let queues = DeviceQueues::new(nic, &device, &SPECS, expired)?;
        let itself = NicPeer { rank: 0, host: "itself".to_owned(), port: nic.config.port };
        for (index, other) in [(0, 1), (1, 0)] {
            if let Some(address) = queues.address(other) {
                queues.connect(index, &itself, &address, expired)?;
            }
        }
        let sender = queues.infos().next().and_then(|info| Some((*info, info.place?)));
        let Some((info, place)) = sender else {
            return Err(NicError::NotCapable { nic: nic.name.clone(), what: "rings" }.into());
        };
        Ok(Self {
            payload,
            words,
            info,
            place,
            posted: 0,
            rung: 0,
            completed: 0,
            consumer_index: 0,
            asked: VecDeque::new(),
            until,
            queues,
        })
    }

    /// Writes an entry once there is room. [`ring`](Self::ring) announces it to the NIC.
    pub fn post<const N: usize>(
        &mut self,
        flags: Flags,
        entry: impl FnOnce(Post) -> [Segment; N],
    ) -> Result<u64, Box<Failed>> {
        while self.posted - self.completed >= DEPTH {
            self.good()?;
        }
        let index = self.posted;
        let covered = (index + 1).is_multiple_of(INTERVAL);
        let flags = if covered { flags.and(Flags::COMPLETION) } else { flags };
        let entry = entry(Post { index, queue: QueueNumber::new(self.info.queue), flags });
        let slot = self.place.ring + index % DEPTH * SLOT_BYTES;
        for (at, content) in entry.iter().flat_map(|segment| segment.words).enumerate() {
            word_at(&self.queues.slab, slot + 8 * at as u64).store(content, Ordering::Relaxed);
        }
        if flags.completion() {
            self.asked.push_back(index);
        }
        self.posted += 1;
        Ok(index)
    }

    /// Announces all entries: entries, record and doorbell become visible in this order.
    pub fn ring(&mut self) {
        if self.rung == self.posted {
            return;
        }
        self.rung = self.posted;
        let record = Record { receive: Be32::new(0), send: Record::send(self.posted) };
        word_at(&self.queues.slab, self.place.record).store(bytemuck::cast(record), Ordering::Release);
        fence(Ordering::SeqCst);
        let doorbell = Doorbell::word(self.posted, QueueNumber::new(self.info.queue));
        // Safety: the page exists as long as the queue pair, and only this thread rings for it.
        unsafe { AtomicU64::from_ptr(self.info.doorbell as usize as *mut u64) }.store(doorbell, Ordering::Release);
        // The mapping may combine stores. The fence sends them now.
        fence(Ordering::SeqCst);
    }

    /// Returns the next completion if it has arrived.
    pub fn poll(&mut self) -> Option<Result<Outcome, u8>> {
        let at = self.place.completions + self.consumer_index % DEPTH * cqe::BYTES;
        let load = |index: usize| word_at(&self.queues.slab, at + 8 * index as u64).load(Ordering::Acquire);
        // The NIC writes the last word last, so this reads it first.
        let tail = load(TAIL_WORD);
        let mut words: [u64; 8] = std::array::from_fn(load);
        words[TAIL_WORD] = tail;
        let found = match (Completion { words }).read(self.consumer_index, self.info.log_completions) {
            Err(CompletionError::NotYet) => return None,
            Err(CompletionError::Opcode(code)) => Err(code),
            Ok(outcome) => Ok(outcome),
        };
        self.consumer_index += 1;
        Some(found)
    }

    /// Waits for the next completion.
    pub fn completion(&mut self, expected: &dyn Fn() -> String) -> Result<Outcome, Box<Failed>> {
        self.ring();
        let fail = |seen| Box::new(Failed { expected: expected(), seen });
        loop {
            match self.poll() {
                Some(Ok(outcome)) => return Ok(outcome),
                Some(Err(code)) => return Err(fail(format!("a completion with code {code:#x}"))),
                None if self.until.passed() => return Err(fail(format!("nothing, {}", self.late()))),
                None => std::thread::yield_now(),
            }
        }
    }

    /// Waits until `done` returns true, or the deadline has passed.
    fn wait(&self, done: impl Fn() -> bool) {
        while !done() && !self.until.passed() {
            std::thread::yield_now();
        }
    }

    /// Returns the time waited, and the state of the queue pair.
    pub fn late(&self) -> String {
        let state = self.state(0).map_or_else(|seen| seen, |state| state.text().to_owned());
        let (after, completed, posted) = (self.until.after.as_millis(), self.completed, self.posted);
        format!("after {after} ms; {completed} of {posted} entries are complete, state of the queue pair: {state}")
    }

    /// Returns the expected next completion.
    pub fn next_good(&self) -> String {
        let queue = self.info.queue;
        match self.asked.front() {
            Some(index) => format!("queue pair {queue:#x}: completion of entry {index}"),
            None => format!("queue pair {queue:#x}: no completion"),
        }
    }

    /// Checks that a completion is that of the next entry that requested one.
    pub fn judge(&mut self, outcome: &Outcome) -> Result<(), Box<Failed>> {
        match self.asked.front().copied() {
            Some(index) if is_of(outcome, self.info.queue, index) && outcome.result.is_ok() => {
                self.asked.pop_front();
                self.completed = index + 1;
                Ok(())
            }
            _ => Err(Box::new(Failed { expected: self.next_good(), seen: show(outcome) })),
        }
    }

    /// Waits for the next completion, and checks that it is without error.
    pub fn good(&mut self) -> Result<(), Box<Failed>> {
        let expected = self.next_good();
        let outcome = self.completion(&|| expected.clone())?;
        self.judge(&outcome)
    }

    /// Consumes the next completion if it has arrived, and checks that it is without error.
    pub fn attend(&mut self) -> Result<(), Box<Failed>> {
        match self.poll() {
            None => Ok(()),
            Some(Ok(outcome)) => self.judge(&outcome),
            Some(Err(code)) => {
                Err(Box::new(Failed { expected: self.next_good(), seen: format!("a completion with code {code:#x}") }))
            }
        }
    }

    /// Announces all entries, and waits for all requested completions.
    pub fn finish(&mut self) -> Result<(), Box<Failed>> {
        self.ring();
        while !self.asked.is_empty() {
            self.good()?;
        }
        Ok(())
    }

    /// Returns the state of the sender (0) or of the responder (1), or the reason why it is unknown.
    pub fn state(&self, index: usize) -> Result<gin_abi::mlx5::command::QpState, String> {
        self.queues.state(index).map_err(|error| error.to_string())
    }
}

/// Returns the address of bytes of memory of this process.
fn address(slice: &MemorySlice, offset: u64, bytes: u64) -> usize {
    assert!(slice.memory().device().kind() == DeviceKind::Virtual && offset + bytes <= slice.bytes());
    (slice.address() + offset) as usize
}

fn bytes_at(area: &RegisteredSlice, offset: u64, bytes: u64) -> &[AtomicU8] {
    let first = ptr::with_exposed_provenance(address(&area.slice, offset, bytes));
    // Safety: memory of this process that the area keeps. All concurrent accesses are atomic.
    unsafe { std::slice::from_raw_parts(first, bytes as usize) }
}

/// Returns the word at a byte offset that is a multiple of 8.
#[doc(hidden)]
pub fn word_at(slice: &MemorySlice, offset: u64) -> &AtomicU64 {
    assert!(offset.is_multiple_of(8));
    // Safety: an aligned word of memory of this process that the slice keeps. All accesses are atomic.
    unsafe { AtomicU64::from_ptr(ptr::with_exposed_provenance_mut(address(slice, offset, 8))) }
}

fn is_of(outcome: &Outcome, queue: u32, index: u64) -> bool {
    outcome.queue == queue && outcome.index == index as u16
}

/// Returns a completion in words.
fn show(outcome: &Outcome) -> String {
    let Outcome { queue, index, .. } = outcome;
    let result = match outcome.result {
        Ok(_) => "success".to_owned(),
        Err(failure) => format!("error: {}", syndrome(&failure)),
    };
    format!("queue pair {queue:#x}: completion of entry {index} (16 bits): {result}")
}
