// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks that a NIC does what kernels need, by queue pairs from the NIC to itself that the calling thread drives.
//!
//! [`check`] brings up queue pairs of one NIC, each connected to one without rings on the same NIC. All memory is in
//! this process. It posts the entries that `gin_device::backend::gdaki` posts, in the same form: a ring with as many
//! completions as entries, a completion for one entry in 16, record and doorbell after the entries. The NIC must reach
//! itself, which communicators do not require.

#[doc(hidden)]
pub mod checks;

pub use checks::{CHECKS, Check, Failed, check};

use super::error::{NicError, NicPeer};
use super::hca::{Access, Extent};
use super::layout::{Layout, PAGE, QueueSpec, Role};
use super::open::{Nic, RegisteredMemory};
use super::queues::{Expired, QueueInfo, QueueSet};
use gin_abi::mlx5::be::Be32;
use gin_abi::mlx5::cqe::{self, Completion, CompletionError, INVALID_BYTE, Outcome, Syndrome, TAIL_WORD};
use gin_abi::mlx5::doorbell::{Doorbell, Record};
use gin_abi::mlx5::wqe::{Flags, Local, Post, QueueNumber, Remote, SLOT_BYTES, Segment};
use std::collections::VecDeque;
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

/// Returns the bytes of a page of the host, or of rings if that is more.
fn page() -> u64 {
    PAGE.max(rustix::param::page_size() as u64)
}

/// Memory of this process that begins at a page.
#[doc(hidden)]
pub struct Pages {
    words: Box<[AtomicU64]>,
    first: usize,
    bytes: u64,
}

impl Pages {
    fn new(bytes: u64) -> Self {
        let page = page();
        let words: Box<[AtomicU64]> = (0..(bytes + page) / 8).map(|_| AtomicU64::new(0)).collect();
        let address = words.as_ptr() as u64;
        let first = ((address.next_multiple_of(page) - address) / 8) as usize;
        Self { words, first, bytes }
    }

    fn address(&self) -> u64 {
        (&raw const self.words[self.first]) as u64
    }

    /// Returns the word at a byte offset that is a multiple of 8.
    pub fn word(&self, offset: u64) -> &AtomicU64 {
        debug_assert!(offset.is_multiple_of(8) && offset < self.bytes);
        &self.words[self.first + (offset / 8) as usize]
    }

    fn bytes(&self, offset: u64, bytes: u64) -> &[AtomicU8] {
        let words = &self.words[self.first..];
        // Safety: bytes of words that exist as long as `self`. All concurrent accesses are atomic.
        let all = unsafe { std::slice::from_raw_parts(words.as_ptr().cast::<AtomicU8>(), size_of_val(words)) };
        &all[offset as usize..(offset + bytes) as usize]
    }
}

/// Objects of the NIC, and the memory that the NIC uses while they exist.
struct Held {
    set: Option<QueueSet>,
    regions: Vec<RegisteredMemory>,
    memory: Option<Pages>,
    nic: Arc<Nic>,
}

impl Drop for Held {
    fn drop(&mut self) {
        let before = self.nic.owner.failures();
        self.set = None;
        self.regions.clear();
        if self.nic.owner.failures() != before {
            // The NIC may write to the memory of an object that was not destroyed, as long as the process lives.
            std::mem::forget(self.memory.take());
        }
    }
}

/// A registered range. Entries name offsets in it.
#[derive(Clone, Copy)]
#[doc(hidden)]
pub struct Area {
    /// Its offset in the memory.
    at: u64,
    local: Be32,
    remote: Be32,
}

impl Area {
    pub fn remote(&self, offset: u64) -> Remote {
        Remote { address: offset, key: self.remote }
    }

    pub fn local(&self, offset: u64, bytes: u64) -> Local {
        Local { address: offset, key: self.local, bytes: bytes as u32 }
    }
}

/// A queue pair that is connected to another one of the same NIC.
#[doc(hidden)]
pub struct Loopback {
    /// Ranges with the access of windows, where writes become visible in any order.
    pub payload: Area,
    /// Ranges with the access of signals, where writes become visible after all earlier writes.
    pub words: Area,
    info: QueueInfo,
    /// The offsets of ring, completions and record.
    ring: u64,
    completions: u64,
    record: u64,
    posted: u64,
    rung: u64,
    /// The index below which all entries are complete.
    completed: u64,
    /// The number of consumed completions.
    consumer_index: u64,
    /// The entries whose requested completion is not consumed yet.
    asked: VecDeque<u64>,
    until: Deadline,
    held: Held,
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
    pub fn new(nic: &Arc<Nic>, until: Deadline) -> Result<Self, NicError> {
        let expired: Expired<'_> = &|| until.passed();
        let layout = Layout::of(&SPECS)?;
        // A range is registered with address 0, so it begins at a page.
        let areas = layout.bytes.next_multiple_of(page());
        let memory = Pages::new(areas + 2 * BYTES.next_multiple_of(page()));
        for ring in layout.completion_rings() {
            for byte in memory.bytes(ring.start, ring.end - ring.start) {
                byte.store(INVALID_BYTE, Ordering::Relaxed);
            }
        }
        let address = memory.address();
        let mut held = Held { set: None, regions: Vec::new(), memory: Some(memory), nic: Arc::clone(nic) };
        let extent = |at: u64, bytes| Extent { address: address + at, bytes, dma_buf: None };
        let mut area = |at, access| {
            // Safety: `held` deregisters the region before it frees the memory, and expects the NIC's accesses.
            let region = unsafe { nic.register(&extent(at, BYTES), 0, access) }?;
            let keys = (Be32::new(region.local_key), Be32::new(region.remote_key));
            held.regions.push(region);
            Ok::<_, NicError>(Area { at, local: keys.0, remote: keys.1 })
        };
        let payload = area(areas, Access::PAYLOAD)?;
        let words = area(areas + BYTES.next_multiple_of(page()), Access::SIGNALS)?;
        // Safety: laid out and filled for these specs. `held` destroys the set before it frees the memory.
        let set = held.set.insert(unsafe { QueueSet::new(nic, &extent(0, layout.bytes), &SPECS, expired) }?);
        let itself = NicPeer { rank: 0, host: "itself".to_owned(), port: nic.config.port };
        for (index, other) in [(0, 1), (1, 0)] {
            if let Some(address) = set.address(other) {
                set.connect(index, &itself, &address, expired)?;
            }
        }
        let sender = set.infos().next().and_then(|info| Some((*info, info.place?)));
        let Some((info, place)) = sender else {
            return Err(NicError::NotCapable { nic: nic.name().to_owned(), what: "rings" });
        };
        Ok(Self {
            payload,
            words,
            info,
            ring: place.ring,
            completions: place.completions,
            record: place.record,
            posted: 0,
            rung: 0,
            completed: 0,
            consumer_index: 0,
            asked: VecDeque::new(),
            until,
            held,
        })
    }

    fn memory(&self) -> &Pages {
        match &self.held.memory {
            Some(memory) => memory,
            None => unreachable!("memory is taken in the destructor only"),
        }
    }

    fn bytes(&self, area: Area, offset: u64, bytes: u64) -> &[AtomicU8] {
        self.memory().bytes(area.at + offset, bytes)
    }

    pub fn word(&self, area: Area, offset: u64) -> &AtomicU64 {
        self.memory().word(area.at + offset)
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
        let slot = self.ring + index % DEPTH * SLOT_BYTES;
        for (at, word) in entry.iter().flat_map(|segment| segment.words).enumerate() {
            self.memory().word(slot + 8 * at as u64).store(word, Ordering::Relaxed);
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
        self.memory().word(self.record).store(bytemuck::cast(record), Ordering::Release);
        fence(Ordering::SeqCst);
        let word = Doorbell::word(self.posted, QueueNumber::new(self.info.queue));
        // Safety: the page exists as long as the queue pair, and only this thread rings for it.
        unsafe { AtomicU64::from_ptr(self.info.doorbell as usize as *mut u64) }.store(word, Ordering::Release);
        // The mapping may combine stores. The fence sends them now.
        fence(Ordering::SeqCst);
    }

    /// Returns the next completion if it has arrived.
    pub fn poll(&mut self) -> Option<Result<Outcome, u8>> {
        let at = self.completions + self.consumer_index % DEPTH * cqe::BYTES;
        let load = |word: usize| self.memory().word(at + 8 * word as u64).load(Ordering::Acquire);
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
        match &self.held.set {
            Some(set) => set.state(index).map_err(|error| error.to_string()),
            None => unreachable!("queue pairs end in the destructor only"),
        }
    }
}

fn is_of(outcome: &Outcome, queue: u32, index: u64) -> bool {
    outcome.queue == queue && outcome.index == index as u16
}

/// Returns a completion in words.
fn show(outcome: &Outcome) -> String {
    let Outcome { queue, index, .. } = outcome;
    let result = match outcome.result {
        Ok(_) => "success".to_owned(),
        Err(failure) => {
            let text = Syndrome::from_code(failure.syndrome).map_or("unknown", Syndrome::text);
            format!("error: {text} (syndrome {:#x}, vendor's {:#x})", failure.syndrome, failure.vendor)
        }
    };
    format!("queue pair {queue:#x}: completion of entry {index} (16 bits): {result}")
}
