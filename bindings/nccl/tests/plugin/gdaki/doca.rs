// SPDX-License-Identifier: MIT OR Apache-2.0
//! The role of NVIDIA's device code, on the CPU. NCCL 2.30.7 compiles that code into kernels. The steps and their order
//! are the same, for queue pairs that all threads of a GPU share.
//!
//! If there is a checkout of NCCL, its own code makes the calls instead (`nvidia`).
//!
//! Structures are read at their offsets, not through types of the plugin. Bytes that the device code leaves undefined
//! hold a pattern.

use super::nvidia::{Call, Code};
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

const NOP: u32 = 0x00;
const WRITE: u32 = 0x08;
const WAIT: u32 = 0x0f;
const READ: u32 = 0x10;
const FETCH_ADD: u32 = 0x12;
const DUMP: u32 = 0x23;
/// The opcode of a completion of a failed entry.
const FAILED: u8 = 13;
/// The content of undefined bytes.
const UNDEFINED: u8 = 0xa5;

fn at<T>(address: u64) -> *mut T {
    assert_ne!(address, 0);
    std::ptr::with_exposed_provenance_mut(address as usize)
}

/// Returns a word that exists as long as the test.
pub(crate) fn word(address: u64) -> &'static AtomicU64 {
    // Safety: memory of the test or of the plugin's contexts, which the test keeps; all accesses are atomic.
    unsafe { AtomicU64::from_ptr(at(address)) }
}

fn half(address: u64) -> &'static AtomicU32 {
    // Safety: as above.
    unsafe { AtomicU32::from_ptr(at(address)) }
}

pub(crate) fn load(address: u64) -> u64 {
    word(address).load(Ordering::Relaxed)
}

pub(crate) fn load_half(address: u64) -> u32 {
    half(address).load(Ordering::Relaxed)
}

/// Spins for 20 s at most.
fn spin(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(20), "not within 20 s: {what}");
        std::thread::yield_now();
    }
}

/// An error completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Failed;

/// The announcement of entries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ring {
    /// As DOCA: doorbell, record, doorbell.
    Whole,
    /// Stops behind the first doorbell.
    FirstOnly,
    /// Rings no doorbell: `ncclGinOptFlagsAggregateRequests`.
    Not,
}

/// A remote or local range of an entry: address, and key as it is in GPU memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) address: u64,
    pub(crate) key: u32,
    /// The address of the window; 0 in a table.
    pub(crate) window: u64,
}

/// `doca_gpu_dev_verbs_qp`, by its address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Queue(pub(crate) u64);

impl Queue {
    pub(crate) fn number(self) -> u32 {
        load_half(self.0 + 24)
    }

    pub(crate) fn depth(self) -> u64 {
        // Safety: as for words.
        unsafe { AtomicU16::from_ptr(at(self.0 + 60)) }.load(Ordering::Relaxed).into()
    }

    fn slot(self, index: u64) -> u64 {
        // Safety: as for words.
        let mask = unsafe { AtomicU16::from_ptr(at(self.0 + 62)) }.load(Ordering::Relaxed);
        load(self.0 + 64) + (index & u64::from(mask)) * 64
    }

    fn completion_queue(self) -> u32 {
        load_half(self.0 + 160 + 8)
    }

    /// `doca_gpu_dev_verbs_poll_one_cq_at`. Returns `None` while there is no completion.
    pub(crate) fn poll(self, index: u64) -> Option<Result<(), Failed>> {
        let queue = self.0 + 160;
        let (ring, count, skipped) = (load(queue), u64::from(load_half(queue + 12)), load(queue + 40));
        let consumed = word(queue + 24);
        let seen = consumed.load(Ordering::Relaxed);
        if index < seen {
            return Some(Ok(()));
        }
        if index >= seen + count {
            return None;
        }
        let number = index + skipped;
        // The last byte alone: the NIC writes it last.
        // Safety: as for words. The engine stores whole words, which have a byte's value at once.
        let last = unsafe { AtomicU8::from_ptr(at(ring + (number & (count - 1)) * 64 + 63)) }.load(Ordering::Relaxed);
        if (last & 1 != 0) != (number & count != 0) {
            return None;
        }
        if last >> 4 == FAILED {
            return Some(Err(Failed));
        }
        fence(Ordering::Acquire);
        consumed.fetch_max(index + 1, Ordering::Relaxed);
        Some(Ok(()))
    }

    /// `doca_gpu_dev_verbs_wait`.
    pub(crate) fn wait(self, index: u64) -> Result<(), Failed> {
        let mut outcome = None;
        spin(&format!("completion {index} of queue pair {}", self.number()), || {
            outcome = self.poll(index);
            outcome.is_some()
        });
        outcome.unwrap()
    }

    /// `doca_gpu_dev_verbs_reserve_wq_slots`. Errors of earlier entries are ignored, as there.
    fn reserve(self, count: u64) -> u64 {
        let first = word(self.0).fetch_add(count, Ordering::Relaxed);
        let last = first + count - 1;
        if last >= self.depth() {
            let _ = self.wait(last - self.depth());
        }
        first
    }

    fn control(self, index: u64, operation: u32, segments: u32, immediate: Option<u32>) -> [u8; 16] {
        let mut bytes = [UNDEFINED; 16];
        bytes[..4].copy_from_slice(&((index as u32 & 0xffff) << 8 | operation).to_be_bytes());
        bytes[4..8].copy_from_slice(&load_half(self.0 + 32 + 4 * u64::from(segments)).to_ne_bytes());
        // A completion, and no fence.
        bytes[11] = 8;
        if let Some(immediate) = immediate {
            bytes[12..].copy_from_slice(&immediate.to_be_bytes());
        }
        bytes
    }

    fn store(self, index: u64, segments: &[[u8; 16]]) {
        for (segment, to) in segments.iter().zip((self.slot(index)..).step_by(16)) {
            for (part, to) in segment.chunks_exact(8).zip((to..).step_by(8)) {
                word(to).store(u64::from_ne_bytes(part.try_into().unwrap()), Ordering::Relaxed);
            }
        }
    }

    fn nop(self, index: u64) {
        self.store(index, &[self.control(index, NOP, 1, None)]);
    }

    fn write(self, index: u64, to: Place, from: Place, bytes: u32) {
        self.store(index, &[self.control(index, WRITE, 3, Some(0)), remote(to), data(from, bytes)]);
    }

    fn read(self, index: u64, from: Place, to: Place, bytes: u32) {
        self.store(index, &[self.control(index, READ, 3, None), remote(from), data(to, bytes)]);
    }

    /// Stores a header, and then the data by stores of 4 bytes or one smaller store. The rest of the segment is what an
    /// earlier entry has left.
    fn write_inline(self, index: u64, to: Place, value: &[u8]) {
        self.store(index, &[self.control(index, WRITE, 3, None), remote(to)]);
        let slot = self.slot(index) + 32;
        half(slot).store((0x8000_0000 | value.len() as u32).to_be(), Ordering::Relaxed);
        if value.len() < 4 {
            for (byte, to) in value.iter().zip(slot + 4..) {
                // Safety: as for words.
                unsafe { AtomicU8::from_ptr(at(to)) }.store(*byte, Ordering::Relaxed);
            }
        }
        for (part, to) in value.chunks_exact(4).zip((slot + 4..).step_by(4)) {
            half(to).store(u32::from_ne_bytes(part.try_into().unwrap()), Ordering::Relaxed);
        }
    }

    fn fetch_add(self, index: u64, to: Place, amount: u64, old: Place) {
        let mut atomic = [0; 16];
        atomic[..8].copy_from_slice(&amount.to_be_bytes());
        // The word to compare with gets the amount, too.
        atomic[8..].copy_from_slice(&amount.to_be_bytes());
        self.store(index, &[self.control(index, FETCH_ADD, 4, None), remote(to), atomic, data(old, 8)]);
    }

    fn wait_for(self, index: u64, queue: Queue, completion: u64) {
        let mut wait = [UNDEFINED; 16];
        wait[8..12].copy_from_slice(&(completion as u32).to_be_bytes());
        wait[12..].copy_from_slice(&queue.completion_queue().to_be_bytes());
        self.store(index, &[self.control(index, WAIT, 2, None), wait]);
    }

    fn dump(self, index: u64, from: Place) {
        self.store(index, &[self.control(index, DUMP, 2, None), data(from, 1)]);
    }

    /// `doca_gpu_dev_verbs_mark_wqes_ready`.
    fn mark_ready(self, first: u64, end: u64) {
        fence(Ordering::Release);
        spin("earlier entries are ready", || {
            word(self.0 + 8).compare_exchange(first, end, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        });
        fence(Ordering::Acquire);
    }

    fn lock(self) {
        // Safety: as for words.
        let lock = unsafe { AtomicI32::from_ptr(at(self.0 + 56)) };
        spin("the lock", || lock.compare_exchange(0, 1, Ordering::Relaxed, Ordering::Relaxed).is_ok());
        fence(Ordering::Acquire);
    }

    fn unlock(self) {
        // Safety: as for words.
        unsafe { AtomicI32::from_ptr(at(self.0 + 56)) }.store(0, Ordering::Release);
    }

    fn ring(self, end: u64) {
        let high = u64::from(load_half(self.0 + 32)) << 32;
        let value = u64::from(((end << 8) as u32).to_be()) | high;
        word(load(self.0 + 80)).store(value, Ordering::Relaxed);
    }

    pub(crate) fn record(self, end: u64) {
        half(load(self.0 + 72)).store((end as u32 & 0xffff).to_be(), Ordering::Relaxed);
    }

    /// Announces entries that were posted with [`Ring::Not`].
    pub(crate) fn announce(self, end: u64) {
        Self::submit([(self, end)], Ring::Whole);
    }

    /// `doca_gpu_dev_verbs_submit_db`, for one queue pair or for two at a time.
    fn submit<const N: usize>(all: [(Self, u64); N], how: Ring) {
        if how == Ring::Not {
            return;
        }
        let is_new = all.map(|(queue, end)| {
            queue.lock();
            let new = word(queue.0 + 16).fetch_max(end, Ordering::AcqRel) < end;
            if new {
                queue.ring(end);
            }
            new
        });
        for ((queue, end), is_new) in all.into_iter().zip(is_new) {
            if is_new && how == Ring::Whole {
                queue.record(end);
                fence(Ordering::Release);
                queue.ring(end);
            }
            queue.unlock();
        }
    }
}

fn remote(place: Place) -> [u8; 16] {
    let mut bytes = [UNDEFINED; 16];
    bytes[..8].copy_from_slice(&place.address.to_be_bytes());
    bytes[8..12].copy_from_slice(&place.key.to_ne_bytes());
    bytes
}

fn data(place: Place, count: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&count.to_be_bytes());
    bytes[4..8].copy_from_slice(&place.key.to_ne_bytes());
    bytes[8..].copy_from_slice(&place.address.to_be_bytes());
    bytes
}

/// `ncclGinGdakiMemHandle`, by its address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window(pub(crate) u64);

impl Window {
    pub(crate) fn remote(self, peer: usize, offset: u64) -> Place {
        Place { address: offset, key: load_half(load(self.0) + 4 * peer as u64), window: self.0 }
    }

    pub(crate) fn local(self, offset: u64) -> Place {
        Place { address: offset, key: load_half(self.0 + 8), window: self.0 }
    }
}

/// `ncclGinGdakiGPUContext`, by its address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Context {
    pub(crate) address: u64,
    pub(crate) rank: usize,
    /// The address of context 0, the number of this one, and the number of ranks.
    pub(crate) job: (u64, u64, usize),
    /// NVIDIA's code, if it makes the calls.
    pub(crate) code: Option<&'static Code>,
}

/// The signal of a put.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Signal {
    /// A word of the context's table, by its number.
    Indexed(u64),
    /// A word of a window.
    At(Window, u64),
}

/// The options of a put.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extra {
    pub(crate) signal: Option<(Signal, u64)>,
    pub(crate) counter: Option<u64>,
    pub(crate) ring: Ring,
}

impl Default for Extra {
    fn default() -> Self {
        Self { signal: None, counter: None, ring: Ring::Whole }
    }
}

impl Extra {
    pub(crate) fn signal(index: u64, amount: u64) -> Self {
        Self { signal: Some((Signal::Indexed(index), amount)), ..Self::default() }
    }

    pub(crate) fn counter(index: u64) -> Self {
        Self { counter: Some(index), ..Self::default() }
    }
}

impl Context {
    /// Returns the context for calls that NVIDIA's code would not make, and whose failures it would not see.
    pub(crate) fn played(self) -> Self {
        Self { code: None, ..self }
    }

    /// Returns the arguments of a call without a window.
    fn call(self, peer: usize, extra: Extra) -> Call {
        let (handle, context, ranks) = self.job;
        let mut call = Call {
            handle,
            rank: self.rank as i32,
            ranks: ranks as i32,
            context: context as i32,
            peer: peer as i32,
            to_window: 0,
            from_window: 0,
            to: 0,
            from: 0,
            bytes: 0,
            signal_type: 0,
            signal: 0,
            signal_window: 0,
            signal_offset: 0,
            amount: 0,
            has_counter: extra.counter.is_some().into(),
            counter: extra.counter.unwrap_or_default() as u32,
            // `ncclGinOptFlagsAggregateRequests`.
            flags: if extra.ring == Ring::Not { 2 } else { 0 },
            value: 0,
        };
        match extra.signal {
            Some((Signal::Indexed(index), amount)) => {
                (call.signal_type, call.signal, call.amount) = (2, index as u32, amount);
            }
            Some((Signal::At(window, offset), amount)) => {
                (call.signal_type, call.signal_window, call.signal_offset, call.amount) = (1, window.0, offset, amount);
            }
            None => {}
        }
        call
    }

    /// Returns NVIDIA's code if it can make a call with these options.
    fn code_for(self, extra: Extra) -> Option<&'static Code> {
        self.code.filter(|_| extra.ring != Ring::FirstOnly)
    }

    /// Returns the index of the last entry that one thread has posted.
    fn last(self, peer: usize) -> u64 {
        load(self.queue(peer).0) - 1
    }

    pub(crate) fn queue(self, peer: usize) -> Queue {
        Queue(load(self.address) + 296 * peer as u64)
    }

    pub(crate) fn companion(self, peer: usize) -> Queue {
        Queue(load(self.address + 8) + 296 * peer as u64)
    }

    fn sink(self) -> Place {
        Place { address: 0, key: load_half(self.address + 64), window: 0 }
    }

    /// The table of counters is at offset 16, of signals at 40.
    fn table_word(self, table: u64, rank: usize, index: u64) -> Place {
        let offset = u64::from(load_half(self.address + table + 20));
        let key = load_half(load(self.address + table + 8) + 4 * rank as u64);
        Place { address: 8 * (index + offset), key, window: 0 }
    }

    pub(crate) fn signal_word(self, index: u64) -> &'static AtomicU64 {
        word(load(self.address + 40) + 8 * index)
    }

    pub(crate) fn counter_word(self, index: u64) -> &'static AtomicU64 {
        word(load(self.address + 16) + 8 * index)
    }

    fn place_of(self, peer: usize, signal: Signal) -> Place {
        match signal {
            Signal::Indexed(index) => self.table_word(40, peer, index),
            Signal::At(window, offset) => window.remote(peer, offset),
        }
    }

    /// Posts entries of a put by `first`, which gets the index of the first of `count` slots.
    fn post(self, peer: usize, count: u64, extra: Extra, first: impl FnOnce(Queue, u64)) -> u64 {
        let queue = self.queue(peer);
        let total = count + u64::from(extra.signal.is_some());
        let index = queue.reserve(total);
        first(queue, index);
        if let Some((signal, amount)) = extra.signal {
            queue.fetch_add(index + count, self.place_of(peer, signal), amount, self.sink());
        }
        let end = index + total;
        queue.mark_ready(index, end);
        let Some(counter) = extra.counter else {
            Queue::submit([(queue, end)], extra.ring);
            return end - 1;
        };
        let companion = self.companion(peer);
        let second = companion.reserve(2);
        companion.wait_for(second, queue, end - 1);
        companion.fetch_add(second + 1, self.table_word(16, self.rank, counter), 1, self.sink());
        companion.mark_ready(second, second + 2);
        Queue::submit([(queue, end), (companion, second + 2)], extra.ring);
        end - 1
    }

    /// `ncclGin::put`. Returns the index of its last entry.
    pub(crate) fn put(self, peer: usize, to: Place, from: Place, bytes: u32, extra: Extra) -> u64 {
        if let Some(code) = self.code_for(extra) {
            let call = Call {
                to_window: to.window,
                from_window: from.window,
                to: to.address,
                from: from.address,
                bytes: bytes.into(),
                ..self.call(peer, extra)
            };
            call.run(code.put);
            return self.last(peer);
        }
        self.post(peer, 1, extra, |queue, index| match bytes {
            0 => queue.nop(index),
            bytes => queue.write(index, to, from, bytes),
        })
    }

    /// `ncclGin::putValue`.
    pub(crate) fn put_value(self, peer: usize, to: Place, value: &[u8], extra: Extra) -> u64 {
        if let Some(code) = self.code_for(extra) {
            let bytes = value.len() as u64;
            let value = value.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte));
            Call { to_window: to.window, to: to.address, bytes, value, ..self.call(peer, extra) }.run(code.put_value);
            return self.last(peer);
        }
        self.post(peer, 1, extra, |queue, index| queue.write_inline(index, to, value))
    }

    /// `ncclGin::signal`.
    pub(crate) fn signal(self, peer: usize, extra: Extra) -> u64 {
        if let Some(code) = self.code_for(extra) {
            self.call(peer, extra).run(code.put);
            return self.last(peer);
        }
        self.post(peer, 0, extra, |_, _| {})
    }

    /// `ncclGin::get`.
    pub(crate) fn get(self, peer: usize, from: Place, to: Place, bytes: u32, ring: Ring) {
        let extra = Extra { ring, ..Extra::default() };
        if let Some(code) = self.code_for(extra) {
            let call = Call {
                to_window: to.window,
                from_window: from.window,
                to: to.address,
                from: from.address,
                bytes: bytes.into(),
                ..self.call(peer, extra)
            };
            return call.run(code.get);
        }
        let index = self.post(peer, 1, extra, |queue, index| queue.read(index, from, to, bytes));
        word(load(self.address + 72) + 8 * peer as u64).fetch_max(index + 1, Ordering::Relaxed);
    }

    /// `ncclGin::flushAsync` and `wait`. NVIDIA's code sees no failure.
    pub(crate) fn flush(self, peer: usize) -> Result<(), Failed> {
        if let Some(code) = self.code {
            self.call(peer, Extra::default()).run(code.flush);
            return Ok(());
        }
        let queue = self.queue(peer);
        let [issued, visible] = [72, 80].map(|at| word(load(self.address + at) + 8 * peer as u64));
        let end = if issued.load(Ordering::Relaxed) > visible.load(Ordering::Relaxed) {
            let sink = self.sink();
            let index = self.post(peer, 1, Extra::default(), |queue, index| queue.dump(index, sink));
            visible.fetch_max(index + 1, Ordering::Relaxed);
            index + 1
        } else {
            word(queue.0).load(Ordering::Relaxed)
        };
        if end == 0 { Ok(()) } else { queue.wait(end - 1) }
    }
}
