// SPDX-License-Identifier: MIT OR Apache-2.0
//! Posts to a communicator's queue pairs through its tables, as its kernels do.

use gin_abi::gdaki::{CLAIM_SHIFT, QueuePairData};
use gin_abi::handle::NEAR_WORDS;
use gin_abi::mlx5::be::Be32;
use gin_abi::mlx5::doorbell::{Doorbell, Record};
use gin_abi::mlx5::wqe::{self, Flags, Local, Post, QueueNumber, Remote, SLOT_BYTES, Segment};
use gin_abi::{CommHandle, ContextData, WindowHandle};
use gin_boot::rt;
use gin_host::comm::Communicator;
use std::sync::atomic::{AtomicU64, Ordering};

/// Returns a word in memory of a virtual GPU.
pub fn word(address: u64) -> &'static AtomicU64 {
    assert!(address != 0 && address.is_multiple_of(8));
    // Safety: the address is in a table of the communicator, which outlives the test's body.
    unsafe { AtomicU64::from_ptr(address as usize as *mut u64) }
}

/// A kernel's handle, and the tables behind it.
#[derive(Clone, Copy)]
pub struct Hand {
    pub handle: CommHandle,
}

impl Hand {
    pub fn new(comm: &Communicator) -> Self {
        Self { handle: comm.device().unwrap().handle() }
    }

    pub fn context(&self, context: u32) -> ContextData {
        assert!(context < self.handle.contexts);
        // Safety: the table has an entry for each context.
        unsafe { *(self.handle.context_table as usize as *const ContextData).add(context as usize) }
    }

    fn pair_address(&self, context: u32, peer: u32) -> u64 {
        assert!(context < self.handle.gdaki_contexts && peer < self.handle.ranks);
        let index = context * self.handle.ranks + peer;
        self.handle.queue_pairs + u64::from(index) * size_of::<QueuePairData>() as u64
    }

    pub fn pair(&self, context: u32, peer: u32) -> QueuePairData {
        // Safety: the table has an entry for each context and rank.
        unsafe { *(self.pair_address(context, peer) as usize as *const QueuePairData) }
    }

    fn keep(&self, context: u32, peer: u32, offset: usize, value: u64) {
        word(self.pair_address(context, peer) + offset as u64).store(value, Ordering::Relaxed);
    }

    /// Returns the address of a window's first byte and its key: of the part of `rank`, or of the own part for local
    /// access.
    fn part(&self, window: &WindowHandle, rank: u32) -> (u64, Be32) {
        let index = u64::from(window.id) * (u64::from(self.handle.ranks) + 1) + u64::from(rank);
        let key = word(self.handle.window_keys + 8 * index).load(Ordering::Relaxed);
        (key >> 32, Be32::from_memory(key as u32))
    }

    pub fn remote_key(&self, window: &WindowHandle, rank: u32) -> u32 {
        self.part(window, rank).1.get()
    }

    pub fn local_key(&self, window: &WindowHandle) -> u32 {
        self.part(window, self.handle.ranks).1.get()
    }

    /// Writes an entry without announcing it.
    pub fn post<const N: usize>(
        &self,
        context: u32,
        peer: u32,
        counter: Option<u64>,
        entry: impl Fn(Post) -> [Segment; N],
    ) {
        let pair = self.pair(context, peer);
        let (index, slot) = (pair.producer_index(), pair.producer_index() & ((1 << pair.depth_log2) - 1));
        let flags = if (index + 1) % (1 << pair.interval_log2) == 0 { Flags::COMPLETION } else { Flags::NONE };
        let queue: QueueNumber = bytemuck::cast(pair.number);
        for (number, value) in entry(Post { index, queue, flags }).iter().flat_map(|segment| segment.words).enumerate()
        {
            word(pair.ring + slot * SLOT_BYTES + 8 * number as u64).store(value, Ordering::Relaxed);
        }
        assert_eq!(pair.claims, index << CLAIM_SHIFT, "all earlier entries are published");
        if let Some(counter) = counter {
            word(pair.tags + 8 * slot).store((index + 1) << 24 | counter, Ordering::Relaxed);
            self.keep(context, peer, std::mem::offset_of!(QueuePairData, tagged), index + 1);
        }
        self.keep(context, peer, std::mem::offset_of!(QueuePairData, claims), (index + 1) << CLAIM_SHIFT);
        word(pair.busy).fetch_or(pair.marks, Ordering::Relaxed);
    }

    /// Announces all entries.
    pub fn ring(&self, context: u32, peer: u32) {
        let pair = self.pair(context, peer);
        let record = Record { receive: Be32::new(0), send: Record::send(pair.producer_index()) };
        word(pair.record).store(bytemuck::cast(record), Ordering::Release);
        word(pair.doorbell)
            .store(Doorbell::word(pair.producer_index(), bytemuck::cast(pair.number)), Ordering::Release);
        self.keep(context, peer, std::mem::offset_of!(QueuePairData, rung), pair.producer_index());
    }

    /// Copies between windows.
    pub fn put(
        &self,
        (context, peer): (u32, u32),
        to: (&WindowHandle, u64),
        from: (&WindowHandle, u64),
        bytes: u32,
        counter: Option<u64>,
    ) {
        let (there, here) = (self.part(to.0, peer), self.part(from.0, self.handle.ranks));
        let remote = Remote { address: there.0 + to.1, key: there.1 };
        let local = Local { address: here.0 + from.1, key: here.1, bytes };
        self.post(context, peer, counter, |post| wqe::write(post, remote, local));
    }

    fn sink(&self, context: u32, peer: u32) -> Local {
        Local { address: 0, key: Be32::from_memory(self.pair(context, peer).sink_key), bytes: 8 }
    }

    /// Raises a signal.
    pub fn signal(&self, context: u32, peer: u32, id: u64, amount: u64) {
        let pair = self.pair(context, peer);
        let remote = Remote { address: pair.signals + 8 * id, key: Be32::from_memory(pair.signal_key) };
        let old = self.sink(context, peer);
        self.post(context, peer, None, |post| wqe::fetch_add(post, remote, amount, old));
    }

    /// Raises a signal at a window's address.
    pub fn signal_at(&self, context: u32, peer: u32, window: &WindowHandle, offset: u64, amount: u64) {
        let (first, key) = self.part(window, peer);
        let remote = Remote { address: first + offset, key };
        let old = self.sink(context, peer);
        self.post(context, peer, None, |post| wqe::fetch_add(post, remote, amount, old));
    }

    /// Returns the value of an own signal, as the NIC has raised it.
    pub fn raised(&self, context: u32, id: u64) -> u64 {
        word(self.context(context).signal_nic + 8 * id).load(Ordering::Acquire)
    }

    /// Waits until a signal is at least `least`.
    pub fn wait(&self, context: u32, id: u64, least: u64) {
        rt::wait_until(|| self.raised(context, id) >= least);
    }

    pub fn counter(&self, context: u32, id: u64) -> u64 {
        word(self.context(context).counters_gpu + 8 * id).load(Ordering::Acquire)
    }

    /// Returns the value of a signal at a window's address.
    pub fn value_at(&self, window: &WindowHandle, offset: u64) -> u64 {
        // Safety: the table entry of a registered window.
        let data = unsafe { &*(window.data as usize as *const gin_abi::WindowData) };
        let base = word(data.va_near + NEAR_WORDS * offset + 8 * gin_device::internal::host_word::SPARE)
            .load(Ordering::Relaxed);
        word(data.base + offset).load(Ordering::Acquire).wrapping_sub(base)
    }
}
