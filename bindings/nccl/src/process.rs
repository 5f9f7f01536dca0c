// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks in other processes of the host.
//!
//! Each rank has a board: pinned memory in a file, which the processes of all ranks map.
//!
//! | part | holds | writer |
//! | --- | --- | --- |
//! | header | the end of the communicator, the rank's buffer, the next block of entries | the rank |
//! | entries | the regions of the rank, with the files of their memory | the rank |
//! | inboxes | a ring of signals for each sender | sender and rank |
//!
//! A process maps the memory of the other ones when it registers its own, and then copies to it and from it itself.
//! Signals go through the inboxes (`inbox`).
//!
//! The keys of boards go through NCCL's bootstrap, which is not encrypted. A process of another user gets no memory by
//! them ([`gin_gpu::share`]).

use crate::abi::SYSTEM_ERROR;
use crate::contact::{Contact, PATIENCE};
use crate::failure::Failure;
use crate::gpus::{Machine, Place};
use crate::inbox::{self, Ring};
use crate::page::{GONE, Gone, Page};
use crate::region::{Region, Segment};
use gin_gpu::share::{life, offer, take};
use gin_gpu::{Device, GpuError, Memory, MemoryKind, lock};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// The words of a block of entries: a header, and the entries.
const BLOCK: u64 = HEADER + ENTRIES * ENTRY;
const HEADER: u64 = 16;
const ENTRIES: u64 = 255;
const ENTRY: u64 = 16;

/// The words of a header: 1 once the communicator has ended; the numbers of the memory of the buffer and of the next
/// block, or 0 without one.
const CLOSED: u64 = 0;
const BUFFER: u64 = 1;
const NEXT: u64 = 2;

/// The words of an entry: its state, the bytes of the region, the offset of the region in its first file, the number of
/// files; then the number and the bytes of each file's memory.
const STATE: u64 = 0;
const BYTES: u64 = 1;
const FIRST: u64 = 2;
const COUNT: u64 = 3;
const FILES: u64 = 4;

/// The maximum number of files of a region.
const MAX_FILES: usize = ((ENTRY - FILES) / 2) as usize;

/// The states of an entry, after 0 and before [`GONE`]: memory that GPUs reach, memory that only the CPU of its rank
/// reaches.
const REACHED: u64 = 1;
const VALUES: u64 = 2;

/// The maximum number of ranks of a communicator of several processes: a board has an inbox for each.
pub(crate) const MAX_SENDERS: usize = 64;

/// The bytes of a rank's buffer on its GPU, for copies of the previous rank to itself, and at its end for the first
/// copy of each rank.
pub(crate) const BUFFER_BYTES: u64 = 2 << 20;
pub(crate) const SCRATCH_BYTES: u64 = 8 << 10;

/// Returns the number by which other processes ask for memory.
fn token(memory: &Arc<Memory>) -> u64 {
    offer(memory).0[16..24].iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

/// The board of a rank, which other processes map.
#[derive(Debug)]
pub(crate) struct Board {
    device: Arc<dyn Device>,
    /// The first one also has the inboxes.
    blocks: Mutex<Vec<Page>>,
    first: Page,
    /// The number of the board's memory and the secret of this process.
    pub(crate) key: [u8; 24],
    _buffer: Arc<Memory>,
}

impl Board {
    pub(crate) fn new(device: Arc<dyn Device>) -> Result<Self, String> {
        let text = |error: GpuError| error.to_string();
        let first = Page::new(&device, BLOCK + MAX_SENDERS as u64 * inbox::WORDS).map_err(text)?;
        let buffer = Memory::shared(&device, MemoryKind::Device, BUFFER_BYTES).map_err(text)?;
        first.store(BUFFER, token(&buffer));
        let key = offer(&first.0).0.split_off(16);
        let key = key.try_into().map_err(|_| "this process has no socket to share memory by".to_owned())?;
        Ok(Self { device, blocks: Mutex::new(vec![first.clone()]), first, key, _buffer: buffer })
    }

    /// Shows a region to the other processes.
    pub(crate) fn enter(&self, number: usize, region: &Region) -> Result<(), GpuError> {
        let (block, entry) = place(number);
        let mut blocks = lock(&self.blocks);
        while blocks.len() <= block {
            let next = Page::new(&self.device, BLOCK)?;
            if let Some(last) = blocks.last() {
                last.store(NEXT, token(&next.0));
            }
            blocks.push(next);
        }
        let page = &blocks[block];
        page.store(entry + BYTES, region.bytes);
        page.store(entry + COUNT, region.memory.len() as u64);
        if let (Some(segment), Some(file)) = (region.segments.first(), region.memory.first()) {
            page.store(entry + FIRST, segment.address - file.address());
        }
        for (memory, at) in region.memory.iter().zip((entry + FILES..).step_by(2)) {
            page.store(at, token(memory));
            page.store(at + 1, memory.bytes());
        }
        page.store(entry + STATE, if region.place == Place::Cpu { VALUES } else { REACHED });
        Ok(())
    }

    /// Tells the other processes that a region is gone.
    pub(crate) fn leave(&self, number: usize) {
        let (block, entry) = place(number);
        if let Some(page) = lock(&self.blocks).get(block) {
            page.store(entry + STATE, GONE);
        }
    }

    /// Tells the other processes that the communicator has ended, so the end of this process is no loss.
    pub(crate) fn close(&self) {
        self.first.store(CLOSED, 1);
    }

    /// Returns the ring of the signals of a sender.
    pub(crate) fn ring(&self, sender: usize) -> Ring {
        Ring::new(&self.first, BLOCK, sender)
    }
}

/// Returns the block and the first word of an entry.
fn place(number: usize) -> (usize, u64) {
    let number = number as u64;
    ((number / ENTRIES) as usize, HEADER + number % ENTRIES * ENTRY)
}

/// A rank of another process.
#[derive(Debug)]
pub(crate) struct Remote {
    pub(crate) rank: usize,
    machine: &'static Machine,
    gpu: usize,
    device: Arc<dyn Device>,
    process: [u8; 16],
    secret: [u8; 16],
    first: Page,
    blocks: Mutex<Vec<Page>>,
    /// Memory of its GPU.
    pub(crate) buffer: Arc<Memory>,
    is_lost: AtomicBool,
}

impl Remote {
    /// Reaches a rank from a GPU of this process.
    pub(crate) fn new(machine: &'static Machine, gpu: usize, rank: usize, contact: &Contact) -> Result<Self, Failure> {
        let refuse = |text: String| {
            let text = format!("rank {rank} is in another process: {text}; or set NCCL_RMA_PLUGIN=none");
            Failure::new(SYSTEM_ERROR, text)
        };
        let Some(key) = contact.key else {
            return Err(refuse("it cannot share memory, and NCCL's log of that process says why".to_owned()));
        };
        let device = machine.gpus.device(gpu).map_err(Failure::cuda)?;
        let whole = [&contact.process[..], &key].concat();
        let first = take(rank as u32, &whole, &device, |_| Ok(None)).map_err(|error| refuse(error.reason))?;
        let sharing = device.sharing();
        if !sharing.is_some_and(|sharing| sharing.reaches_elsewhere(device.kind(), &contact.identity)) {
            let text = format!(
                "this process does not see its GPU, or GPU {gpu} of this process does not reach it by NVLink; let each \
                 process see all GPUs (CUDA_VISIBLE_DEVICES), and use GPUs with NVLink (nvidia-smi topo -p2p n)"
            );
            return Err(refuse(text));
        }
        let secret = std::array::from_fn(|index| key[8 + index]);
        let (buffer, first) = (first.clone(), Page(first));
        let mut remote = Self {
            rank,
            machine,
            gpu,
            device,
            process: contact.process,
            secret,
            blocks: Mutex::new(vec![first.clone()]),
            buffer,
            is_lost: AtomicBool::new(false),
            first,
        };
        remote.buffer = remote.take(remote.first.load(BUFFER))?;
        Ok(remote)
    }

    /// Maps memory of the rank.
    fn take(&self, token: u64) -> Result<Arc<Memory>, Failure> {
        let key = [&self.process[..], &token.to_le_bytes(), &self.secret].concat();
        let taken = take(self.rank as u32, &key, &self.device, |_| Ok(None));
        let memory = taken.map_err(|error| {
            let text = format!("memory of rank {} cannot be mapped: {}", self.rank, error.reason);
            Failure::new(SYSTEM_ERROR, text)
        })?;
        if memory.kind() == MemoryKind::Device {
            // Another rank of this process may have mapped it, for its GPU.
            // Safety: mapped as long as `memory` exists.
            unsafe { self.machine.gpus.reach(self.gpu, memory.address(), memory.bytes()) }.map_err(Failure::cuda)?;
        }
        Ok(memory)
    }

    /// Returns region `number` of the rank, mapped here. If the rank is still registering, waits for it.
    pub(crate) fn region(&self, number: usize) -> Result<Arc<Region>, Failure> {
        let start = Instant::now();
        loop {
            if let Some(region) = self.look(number)? {
                return Ok(Arc::new(region));
            }
            if let (true, process) = life::has_ended(&self.process) {
                return Err(self.ended(process));
            }
            if start.elapsed() > PATIENCE {
                let text = format!("rank {} has not registered region {number} after {PATIENCE:?}", self.rank);
                return Err(Failure::new(SYSTEM_ERROR, text));
            }
            std::thread::yield_now();
        }
    }

    fn look(&self, number: usize) -> Result<Option<Region>, Failure> {
        let (block, entry) = place(number);
        let mut blocks = lock(&self.blocks);
        while blocks.len() <= block {
            let next = blocks.last().map_or(0, |last| last.load(NEXT));
            if next == 0 {
                return Ok(None);
            }
            blocks.push(Page(self.take(next)?));
        }
        let page = blocks[block].clone();
        drop(blocks);
        let place = match page.load(entry + STATE) {
            0 => return Ok(None),
            REACHED => Place::Elsewhere,
            VALUES => Place::Cpu,
            _ => {
                return Err(Failure::argument(format!("rank {} has deregistered region {number}", self.rank)));
            }
        };
        let (bytes, mut first) = (page.load(entry + BYTES), page.load(entry + FIRST));
        let count = page.load(entry + COUNT).min(MAX_FILES as u64);
        let (mut segments, mut memory, mut left) = (Vec::new(), Vec::new(), bytes);
        for at in (entry + FILES..).step_by(2).take(count as usize) {
            let mapped = self.take(page.load(at))?;
            let bytes = page.load(at + 1).min(mapped.bytes()).saturating_sub(first).min(left);
            segments.push(Segment { address: mapped.address() + first, bytes });
            memory.push(mapped);
            (first, left) = (0, left - bytes);
        }
        if count > 0 && left > 0 {
            let text = format!("rank {} has put {left} of {bytes} bytes of region {number} in no file", self.rank);
            return Err(Failure::new(SYSTEM_ERROR, text));
        }
        let (segments, gone) = (segments.into(), Gone::There(page, entry + STATE));
        Ok(Some(Region { rank: self.rank, bytes, place, segments, words: None, gone, memory }))
    }

    fn ended(&self, process: Option<i32>) -> Failure {
        let process = process.map_or_else(String::new, |number| format!(", {number},"));
        let text = format!("the process of rank {}{process} has ended before the communicator", self.rank);
        Failure::new(SYSTEM_ERROR, text)
    }

    /// Checks that the rank is alive, or has ended the communicator. Returns the first error only.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        match life::has_ended(&self.process) {
            // The header is read after the end, because the process may have closed it just before.
            (true, process) if self.first.load(CLOSED) == 0 && !self.is_lost.swap(true, Ordering::Relaxed) => {
                Err(self.ended(process))
            }
            _ => Ok(()),
        }
    }

    /// Checks that the rank is not known as lost.
    pub(crate) fn check_known(&self) -> Result<(), Failure> {
        if self.is_lost.load(Ordering::Relaxed) { Err(self.ended(None)) } else { Ok(()) }
    }

    /// Returns whether its process has ended.
    pub(crate) fn has_ended(&self) -> bool {
        life::has_ended(&self.process).0
    }

    /// Returns the ring of the signals of rank `sender`, this one.
    pub(crate) fn ring(&self, sender: usize) -> Ring {
        Ring::new(&self.first, BLOCK, sender)
    }
}

/// Exports a region to other processes as files.
///
/// # Errors
/// The reason for which no other process can map it.
pub(crate) fn files(machine: &Machine, gpu: usize, address: u64, bytes: u64) -> Result<Vec<Arc<Memory>>, String> {
    // Safety: the caller of `register` keeps the memory, and this GPU reaches it.
    let files = unsafe { machine.gpus.files(gpu, address, bytes) }.map_err(|error| error.to_string())?;
    if files.len() > MAX_FILES {
        return Err(format!("it has {} allocations; the limit is {MAX_FILES}", files.len()));
    }
    Ok(files)
}
