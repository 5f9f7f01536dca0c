// SPDX-License-Identifier: MIT OR Apache-2.0
//! A NIC that sends to itself, driven by this thread: whether a NIC does what kernels will ask of it.
//!
//! [`check`] brings queue pairs of one NIC up, each connected to one without rings on the same NIC, with everything in
//! memory of this process, and posts the entries that `gin_device::backend::gdaki` posts, in the same form: a ring of
//! as many completions as entries, a completion for one entry in 16, record and doorbell behind the entries. It needs a
//! NIC that reaches itself, which communicators do not.

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

/// Slots of the send queue, and of its completion queue.
const DEPTH: u64 = 64;
/// An entry asks for a completion if its index + 1 is a multiple of this.
const INTERVAL: u64 = 16;
/// Bytes of each of the two registered ranges.
const BYTES: u64 = 1 << 16;

const SPECS: [QueueSpec; 2] = [
    QueueSpec { role: Role::Sender, depth: DEPTH as u32, completions: DEPTH as u32, collapsed: false },
    QueueSpec { role: Role::Responder, depth: 0, completions: 0, collapsed: false },
];

/// Bytes of a page, of the host's or of rings if these are larger.
fn page() -> u64 {
    PAGE.max(rustix::param::page_size() as u64)
}

/// Memory of this process that begins a page.
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

    /// The word at a byte offset that is a multiple of 8.
    pub fn word(&self, offset: u64) -> &AtomicU64 {
        debug_assert!(offset.is_multiple_of(8) && offset < self.bytes);
        &self.words[self.first + (offset / 8) as usize]
    }

    fn bytes(&self, offset: u64, bytes: u64) -> &[AtomicU8] {
        let words = &self.words[self.first..];
        // Safety: bytes of words that are there as long as `self`; all that uses them while others do is atomic.
        let all = unsafe { std::slice::from_raw_parts(words.as_ptr().cast::<AtomicU8>(), size_of_val(words)) };
        &all[offset as usize..(offset + bytes) as usize]
    }
}

/// Objects, and the memory that the NIC uses while they are there.
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
            // An object that did not end may let the NIC write for as long as the process lives.
            std::mem::forget(self.memory.take());
        }
    }
}

/// A registered range. What entries name is an offset in it.
#[derive(Clone, Copy)]
#[doc(hidden)]
pub struct Area {
    /// Where it lies in the memory.
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

/// A queue pair that is connected to another of the same NIC.
#[doc(hidden)]
pub struct Loopback {
    /// Ranges as windows have them, where writes come into view in any order.
    pub payload: Area,
    /// As signals have them: in order behind everything.
    pub words: Area,
    info: QueueInfo,
    /// Offsets of ring, completions and record.
    ring: u64,
    completions: u64,
    record: u64,
    posted: u64,
    rung: u64,
    /// All entries below are complete.
    completed: u64,
    /// Completions taken.
    consumer_index: u64,
    /// Entries that asked for a completion which is not taken.
    asked: VecDeque<u64>,
    until: Deadline,
    held: Held,
}

/// When a check is over.
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
        // An area is registered under address 0, so it begins a page.
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
            // Safety: `held` ends the region before it frees the memory, and expects what the NIC does to it.
            let region = unsafe { nic.register(&extent(at, BYTES), 0, access) }?;
            let keys = (Be32::new(region.local_key), Be32::new(region.remote_key));
            held.regions.push(region);
            Ok::<_, NicError>(Area { at, local: keys.0, remote: keys.1 })
        };
        let payload = area(areas, Access::PAYLOAD)?;
        let words = area(areas + BYTES.next_multiple_of(page()), Access::SIGNALS)?;
        // Safety: laid out and filled for these specs; `held` ends the set before it frees the memory.
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

    /// Writes an entry, once there is room. The NIC does not know of it before [`ring`](Self::ring).
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

    /// Announces all entries: entries, record and doorbell, each visible before the next.
    pub fn ring(&mut self) {
        if self.rung == self.posted {
            return;
        }
        self.rung = self.posted;
        let record = Record { receive: Be32::new(0), send: Record::send(self.posted) };
        self.memory().word(self.record).store(bytemuck::cast(record), Ordering::Release);
        fence(Ordering::SeqCst);
        let word = Doorbell::word(self.posted, QueueNumber::new(self.info.queue));
        // Safety: the page is there as long as the queue pair is, and this thread alone rings for it.
        unsafe { AtomicU64::from_ptr(self.info.doorbell as usize as *mut u64) }.store(word, Ordering::Release);
        // A page may be mapped so that stores are gathered; they leave now.
        fence(Ordering::SeqCst);
    }

    /// The next completion, if it is there.
    pub fn poll(&mut self) -> Option<Result<Outcome, u8>> {
        let at = self.completions + self.consumer_index % DEPTH * cqe::BYTES;
        let load = |word: usize| self.memory().word(at + 8 * word as u64).load(Ordering::Acquire);
        // The last word is written last, so it is read first.
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

    /// Waits until something is so, or the time is over.
    fn wait(&self, done: impl Fn() -> bool) {
        while !done() && !self.until.passed() {
            std::thread::yield_now();
        }
    }

    /// How long was waited, and what the queue pair says.
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

    /// A completion has to be that of the next entry that asked for one.
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

    /// Waits for the next completion, which has to be a good one.
    pub fn good(&mut self) -> Result<(), Box<Failed>> {
        let expected = self.next_good();
        let outcome = self.completion(&|| expected.clone())?;
        self.judge(&outcome)
    }

    /// Takes the next completion if it is there; it has to be a good one.
    pub fn attend(&mut self) -> Result<(), Box<Failed>> {
        match self.poll() {
            None => Ok(()),
            Some(Ok(outcome)) => self.judge(&outcome),
            Some(Err(code)) => {
                Err(Box::new(Failed { expected: self.next_good(), seen: format!("a completion with code {code:#x}") }))
            }
        }
    }

    /// Announces all entries, and waits for all completions that were asked for.
    pub fn finish(&mut self) -> Result<(), Box<Failed>> {
        self.ring();
        while !self.asked.is_empty() {
            self.good()?;
        }
        Ok(())
    }

    /// The state of the sender (0) or of the responder (1), or why it is not known.
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

/// A completion, in words.
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
