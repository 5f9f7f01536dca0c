// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory behind a communicator's handle.
//!
//! Words that a CPU thread writes or reads are in pinned host memory. Words that kernels poll or add to are in device
//! memory. Words of different writers are on different cache lines.

use super::Requirements;
use crate::proxy::{ContextPart, Counters, trace};
use bytemuck::{Pod, Zeroable};
use gin_abi::descriptor::WORDS;
use gin_abi::handle::{
    CAP_COMPLETION_IS_ARRIVAL, CAP_STRONG_SIGNALS, CAP_VA_SIGNALS, ENGINE_CPU, ENGINE_GPU, ENGINE_NIC, NEAR_WORDS,
    QUEUE_NEAR,
};
use gin_abi::print::{PrintRing, RING_OFFSET, SLOT_WORDS};
use gin_abi::{ABI_VERSION, BackendKind, CommHandle, ContextData, SignalTarget, StatusBlock, WindowData};
use gin_device::exec::watch;
use gin_device::internal::print::Ring;
use gin_device::internal::queue::Queue;
use gin_device::internal::status::Status;
use gin_device::internal::{host_word, mailbox};
use gin_device::sys::{Global, GlobalWord};
use gin_gpu::{Device, GpuError, Memory, MemoryKind, MemorySlice};
use gin_net::{Capabilities, LocalSignals};
use std::mem::offset_of;
use std::sync::Arc;

/// Cache lines are 64 bytes on CPUs and 128 on GPUs.
const LINE: u64 = 128;

/// Assigns places in one allocation, in order.
#[derive(Debug, Default)]
struct Layout {
    /// The address of the allocation.
    base: u64,
    /// The number of bytes so far.
    end: u64,
}

impl Layout {
    fn at(memory: &Memory) -> Self {
        Self { base: memory.address(), end: 0 }
    }

    /// Returns the address of `bytes` bytes on separate cache lines.
    fn place(&mut self, bytes: u64) -> u64 {
        let start = self.end;
        self.end = (start + bytes).next_multiple_of(LINE);
        self.base + start
    }

    fn words(&mut self, count: u64) -> u64 {
        self.place(count * 8)
    }
}

/// Returns the initial words beside `count` words in pinned memory whose initial value is `first`.
fn beside(first: u64, count: usize) -> Vec<u64> {
    let mut words = vec![0; count * NEAR_WORDS as usize];
    words.chunks_exact_mut(NEAR_WORDS as usize).for_each(|near| near[host_word::LAST as usize] = first);
    words
}

/// Returns the value if the condition holds, else 0.
pub(super) fn when(condition: bool, value: u32) -> u32 {
    if condition { value } else { 0 }
}

/// The addresses of all words in pinned memory and in device memory.
#[derive(Debug)]
struct Places {
    /// The sizes of the communicator, and the words that all contexts share.
    handle: CommHandle,
    contexts: Vec<ContextData>,
    print: PrintRing,
    /// As many zeros as there are ranks.
    zeros: u64,
    /// The words of the mailbox in device memory.
    mailbox: u64,
}

impl Places {
    fn new(
        requirements: &Requirements,
        (ranks, lsa_size): (u32, u32),
        engines: u32,
        pinned: &mut Layout,
        near: &mut Layout,
    ) -> Self {
        let (contexts, counters) = (u64::from(requirements.contexts), u64::from(requirements.counters));
        let (all_signals, peers) = (requirements.all_signals(ranks, lsa_size), u64::from(ranks));
        let handle = CommHandle {
            abi: ABI_VERSION,
            ranks,
            lsa_size,
            contexts: requirements.contexts,
            signals: requirements.signals,
            counters: requirements.counters,
            windows: requirements.windows,
            engines,
            world_barriers: requirements.world_barriers,
            rail_barriers: requirements.rail_barriers,
            lsa_barriers: requirements.lsa_barriers,
            lsa_reach: when(engines & ENGINE_GPU != 0, lsa_size),
            host_status: pinned.place(size_of::<StatusBlock>() as u64),
            kernel_status: pinned.place(size_of::<StatusBlock>() as u64),
            kernel_status_copy: near.place((size_of::<StatusBlock>() + size_of::<PrintRing>()) as u64),
            context_table: near.place(contexts * size_of::<ContextData>() as u64),
            window_table: near.place(u64::from(requirements.windows) * size_of::<WindowData>() as u64),
            peer_signals: if engines & ENGINE_GPU != 0 { near.words(contexts * peers) } else { 0 },
            barrier_state: near.words(requirements.barriers()),
            copy: near.place(size_of::<CommHandle>() as u64),
            ..CommHandle::zeroed()
        };
        let mailbox = near.words(mailbox::SIGNALS + NEAR_WORDS * all_signals * contexts);
        let signal_near = mailbox + 8 * mailbox::SIGNALS;
        // Kernels that consume a NIC's completions raise counters, too.
        let own_counters = engines & (ENGINE_GPU | ENGINE_NIC) != 0;
        let context = |number| ContextData {
            slots: pinned.words(u64::from(requirements.queue_depth) * WORDS as u64),
            consumer_index: pinned.words(1),
            completion_index: pinned.words(1),
            oldest_incomplete: pinned.words(peers),
            counters: pinned.words(counters),
            producer_index: near.place(QUEUE_NEAR + (2 + peers) * NEAR_WORDS * 8),
            depth_log2: requirements.queue_depth.trailing_zeros() as u16,
            timed: u16::from(trace::is_recorded()),
            depth_mask: requirements.queue_depth - 1,
            signal_near: signal_near + NEAR_WORDS * all_signals * 8 * number,
            signal_shadow: near.words(all_signals),
            counter_near: near.words(NEAR_WORDS * counters),
            counters_gpu: if own_counters { near.words(counters) } else { 0 },
            ..ContextData::zeroed()
        };
        let contexts = (0..contexts).map(context).collect();
        let lines = u64::from(requirements.print_lines);
        let print = PrintRing {
            slots: if lines != 0 { pinned.words(lines * SLOT_WORDS) } else { 0 },
            taken: pinned.words(1),
            mask: lines.saturating_sub(1),
            ..PrintRing::zeroed()
        };
        Self { handle, contexts, print, zeros: near.words(peers), mailbox }
    }
}

/// All memory of a communicator on one rank, and the layout of that memory.
#[derive(Debug)]
pub(crate) struct Resources {
    pinned: Arc<Memory>,
    device: Arc<Memory>,
    /// `None` if CPU threads raise no words.
    signals: Option<Arc<Memory>>,
    /// The signal words that the NIC raises; `None` if it raises none.
    pub(crate) signals_nic: Option<Arc<Memory>>,
    /// The signal words that GPUs raise; `None` if they raise none.
    pub(crate) signals_gpu: Option<Arc<Memory>>,
    /// The offset of the mailbox behind the signal words that CPU threads raise; `None` if there is none.
    mailbox: Option<u64>,
    /// The signal words of LSA peers that kernels of this rank raise.
    peers: Vec<Arc<Memory>>,
    places: Places,
    /// The number of signals of a context, including those of barriers.
    all_signals: u64,
}

/// The sizes of the allocations of a communicator, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Sizes {
    /// Words and queues in pinned memory, without signals.
    pub(super) pinned: u64,
    /// Words and tables in device memory, without signals.
    pub(super) device: u64,
    /// The signal words of an engine in device memory.
    pub(super) signals: u64,
    /// The signal words of CPU threads, and the mailbox.
    pub(super) pinned_signals: u64,
    /// The offset of the mailbox behind these words; `None` if there is none.
    mailbox: Option<u64>,
}

impl Resources {
    /// Allocates the memory and fills the words that do not depend on other ranks. `engines`: the `ENGINE_*` bits of
    /// the engines that raise words. `has_mailbox`: the network hands values to kernels. `across`: each rank is a
    /// separate process.
    pub(crate) fn new(
        device: &Arc<dyn Device>,
        requirements: &Requirements,
        (ranks, lsa_size): (u32, u32),
        engines: u32,
        has_mailbox: bool,
        across: bool,
    ) -> Result<Self, GpuError> {
        let sizes = Self::sizes(requirements, (ranks, lsa_size), engines, has_mailbox);
        let pinned = Memory::new(device, MemoryKind::Pinned, sizes.pinned)?;
        let near = Memory::new(device, MemoryKind::Device, sizes.device)?;
        let (mut at_pinned, mut at_near) = (Layout::at(&pinned), Layout::at(&near));
        let mut places = Places::new(requirements, (ranks, lsa_size), engines, &mut at_pinned, &mut at_near);
        let all_signals = requirements.all_signals(ranks, lsa_size);
        let signal_words = |engine, kind, bytes| {
            (engines & engine != 0).then(|| Memory::for_ranks(device, kind, bytes, across)).transpose()
        };
        let mailbox = sizes.mailbox;
        let signals = signal_words(ENGINE_CPU, MemoryKind::Pinned, sizes.pinned_signals)?;
        let signals_nic = signal_words(ENGINE_NIC, MemoryKind::Device, sizes.signals)?;
        let signals_gpu = signal_words(ENGINE_GPU, MemoryKind::Device, sizes.signals)?;
        for (context, data) in (0..).zip(&mut places.contexts) {
            data.signal_cpu = signals_of(&signals, context, all_signals);
            data.signal_nic = signals_of(&signals_nic, context, all_signals);
            data.signal_gpu = signals_of(&signals_gpu, context, all_signals);
            data.mailbox = if mailbox.is_some() { places.mailbox } else { 0 };
        }
        if let (Some(signals), Some(start)) = (&signals, mailbox) {
            write(&near, places.mailbox + 8 * mailbox::PINNED, &[signals.address() + start])?;
        }
        let peers = Vec::new();
        let resources =
            Self { pinned, device: near, signals, signals_nic, signals_gpu, mailbox, peers, places, all_signals };
        resources.initialise(requirements)?;
        Ok(resources)
    }

    /// Returns the sizes of the allocations. The arguments are as of [`new`](Self::new). Signal words are allocated
    /// only for engines that raise words.
    pub(super) fn sizes(
        requirements: &Requirements,
        (ranks, lsa_size): (u32, u32),
        engines: u32,
        has_mailbox: bool,
    ) -> Sizes {
        let (mut pinned, mut near) = (Layout::default(), Layout::default());
        Places::new(requirements, (ranks, lsa_size), engines, &mut pinned, &mut near);
        let signals = u64::from(requirements.contexts) * requirements.all_signals(ranks, lsa_size) * 8;
        let mailbox = (has_mailbox && engines & ENGINE_CPU != 0).then(|| signals.next_multiple_of(LINE));
        let pinned_signals = mailbox.map_or(signals, |start| start + mailbox::pinned_words::<Global>() * 8);
        // A quiet by a NIC accesses the first word, even if there are no signals.
        Sizes { pinned: pinned.end, device: near.end, signals: signals.max(8), pinned_signals, mailbox }
    }

    /// Returns all memory of this rank.
    #[cfg(test)]
    pub(super) fn memory(&self) -> impl Iterator<Item = &Arc<Memory>> {
        let signals = [&self.signals, &self.signals_nic, &self.signals_gpu].into_iter().flatten();
        [&self.pinned, &self.device].into_iter().chain(signals)
    }

    fn initialise(&self, requirements: &Requirements) -> Result<(), GpuError> {
        write(&self.device, self.print_ring(), &[self.places.print])?;
        let (ranks, all_signals) = (u64::from(self.places.handle.ranks), self.all_signals as usize);
        for (context, data) in self.places.contexts.iter().enumerate() {
            let mut queue = self.queue(data);
            // The CPU cannot store to words in device memory, so it fills words of its own and copies them.
            let (mut claim, mut near) = ([0u64], vec![0u64; ((2 + ranks) * NEAR_WORDS) as usize]);
            // Safety: local words that live until the end of this block.
            let word = |words: &mut [u64]| unsafe { GlobalWord::new(words.as_mut_ptr().addr() as u64) };
            (queue.producer_index, queue.near) = (word(&mut claim), word(&mut near));
            queue.initialise(requirements.first_index, ranks);
            write(&self.device, data.producer_index, &claim)?;
            write(&self.device, data.producer_index + QUEUE_NEAR, &near)?;
            if requirements.first_counter != 0 {
                let (counters, first) = (requirements.counters as usize, requirements.first_counter);
                let words = vec![first; counters];
                if self.signals.is_some() {
                    write(&self.pinned, data.counters, &words)?;
                    write(&self.device, data.counter_near, &beside(first, counters))?;
                } else {
                    write(&self.device, data.counters_gpu, &words)?;
                }
            }
            if requirements.first_signal != 0 {
                let first = vec![requirements.first_signal; all_signals];
                let offset = (context * all_signals * 8) as u64;
                // One word for each signal.
                if let Some(signals) = self.signals.as_ref().or(self.signals_nic.as_ref()) {
                    signals.write(offset, &first)?;
                }
                write(&self.device, data.signal_near, &beside(requirements.first_signal, all_signals))?;
                write(&self.device, data.signal_shadow, &first)?;
            }
        }
        Ok(())
    }

    fn word(&self, address: u64) -> GlobalWord {
        // Safety: an aligned address in an allocation that lives as long as `self`, which every holder of the word
        // keeps alive; its words are used by atomic accesses only. The CPU itself uses a word in device memory only
        // where it reaches device memory.
        unsafe { GlobalWord::new(address) }
    }

    fn queue(&self, data: &ContextData) -> Queue<Global, WORDS> {
        Queue {
            slots: self.word(data.slots),
            producer_index: self.word(data.producer_index),
            near: self.word(data.producer_index + QUEUE_NEAR),
            consumer_index: self.word(data.consumer_index),
            completion_index: self.word(data.completion_index),
            oldest_incomplete: self.word(data.oldest_incomplete),
            depth_log2: data.depth_log2.into(),
            depth_mask: data.depth_mask,
        }
    }

    /// Returns the status blocks that host and kernels of this rank use.
    pub(crate) fn status(&self) -> Status<Global> {
        let CommHandle { host_status, kernel_status, kernel_status_copy, .. } = self.places.handle;
        Status { host: self.word(host_status), kernel: self.word(kernel_status), copy: self.word(kernel_status_copy) }
    }

    /// Returns the address of the ring of lines.
    fn print_ring(&self) -> u64 {
        self.places.handle.kernel_status_copy + RING_OFFSET
    }

    /// Returns the ring of lines of kernels, if the communicator has one. The host uses its words in pinned memory
    /// only.
    pub(crate) fn lines(&self) -> Option<Ring<Global>> {
        let PrintRing { slots, taken, mask, .. } = self.places.print;
        let count = |offset: usize| self.word(self.print_ring() + offset as u64);
        (slots != 0).then(|| Ring {
            slots: self.word(slots),
            taken: self.word(taken),
            mask,
            tickets: count(offset_of!(PrintRing, tickets)),
            head: count(offset_of!(PrintRing, head)),
            dropped: count(offset_of!(PrintRing, dropped)),
        })
    }

    /// Returns the number of lines that kernels dropped.
    pub(crate) fn dropped_lines(&self) -> Result<u64, GpuError> {
        let (mut dropped, offset) = ([0u64], offset_of!(PrintRing, dropped) as u64);
        self.device.read(self.print_ring() + offset - self.device.address(), &mut dropped)?;
        Ok(dropped[0])
    }

    /// Returns the signal words that CPU threads raise, if they raise any.
    pub(crate) fn local_signals(&self) -> Option<LocalSignals> {
        Some(LocalSignals {
            memory: self.signals.clone()?,
            nic: self.signals_nic.clone(),
            contexts: self.places.handle.contexts,
            per_context: self.all_signals as u32,
            mailbox: self.mailbox,
        })
    }

    /// Returns the bytes of the signal words of one context.
    pub(crate) fn signal_bytes(&self) -> u64 {
        self.all_signals * 8
    }

    /// Returns for each context the counter words that its own kernels raise, if there are any.
    pub(crate) fn counters_gpu(&self) -> Result<Vec<Option<MemorySlice>>, GpuError> {
        let bytes = u64::from(self.places.handle.counters) * 8;
        let words = |data: &ContextData| {
            let start = data.counters_gpu - self.device.address();
            (bytes != 0).then(|| self.device.slice(start..start + bytes)).transpose()
        };
        self.places.contexts.iter().map(words).collect()
    }

    /// Returns the words of each context that the proxy needs.
    pub(crate) fn context_parts(&self, stats: &[Arc<Counters>]) -> Vec<ContextPart> {
        let parts = self.places.contexts.iter().zip(stats).map(|(data, stats)| ContextPart {
            queue: self.queue(data),
            timed: data.timed != 0,
            counters: self.word(data.counters),
            signals: self.signals.is_some().then(|| self.word(data.signal_cpu)),
            stats: stats.clone(),
        });
        parts.collect()
    }

    /// Makes the signal words of this rank known to the detector of data races. `number` is that of the communicator,
    /// the same on all ranks.
    pub(crate) fn watch(&self, number: u64, rank: u32) {
        let table = self.places.handle.context_table;
        watch::event(watch::Event::Communicator { table, number });
        for (context, data) in (0..).zip(&self.places.contexts) {
            let mail = data.signal_near + 8 * host_word::MAIL;
            // Kernels of this rank raise the words beside a mailbox; all others are raised by CPU threads or a NIC.
            let near = if data.mailbox != 0 { mail } else { 0 };
            for (address, stride) in [(data.signal_cpu, 8), (data.signal_nic, 8), (near, 8 * NEAR_WORDS)] {
                if address != 0 {
                    let (first, count) = (SignalTarget::Id(0), self.all_signals);
                    let signals = watch::Signals { table, rank, context, first, address, stride, count };
                    watch::event(watch::Event::Signals(signals));
                }
            }
        }
    }

    /// Returns for each context the index of the next request.
    pub(crate) fn claims(&self) -> Result<Vec<u64>, GpuError> {
        let claim = |data: &ContextData| {
            let mut claim = [0u64];
            self.device.read(data.producer_index - self.device.address(), &mut claim).map(|()| claim[0])
        };
        self.places.contexts.iter().map(claim).collect()
    }

    /// Fills the tables that kernels read. `peer_signals`: each rank's signal words that GPUs raise, if this rank
    /// reaches them. `busy`: returns for each context the address of the words that mark peers with unfinished entries,
    /// or 0.
    pub(crate) fn fill_tables(
        &mut self,
        peer_signals: Vec<Option<Arc<Memory>>>,
        busy: impl Fn(u32) -> u64,
    ) -> Result<(), GpuError> {
        for (context, data) in (0..).zip(&mut self.places.contexts) {
            data.busy = busy(context);
        }
        write(&self.device, self.places.handle.context_table, &self.places.contexts)?;
        if self.signals_gpu.is_some() {
            let (all_signals, contexts) = (self.all_signals, u64::from(self.places.handle.contexts));
            let of_peers = |context| peer_signals.iter().map(move |peer| signals_of(peer, context, all_signals));
            let addresses: Vec<u64> = (0..contexts).flat_map(of_peers).collect();
            write(&self.device, self.places.handle.peer_signals, &addresses)?;
        }
        self.peers = peer_signals.into_iter().flatten().collect();
        Ok(())
    }

    /// Returns the handle that kernels get.
    pub(crate) fn handle(
        &self,
        backend: BackendKind,
        rank: u32,
        network: &Capabilities,
        trap_on_fault: bool,
    ) -> CommHandle {
        let CommHandle { contexts, signals, lsa_size, .. } = self.places.handle;
        CommHandle {
            backend: backend as u32,
            rank,
            lsa_rank: rank % lsa_size,
            capabilities: when(network.strong_signals, CAP_STRONG_SIGNALS)
                | when(network.va_signals, CAP_VA_SIGNALS)
                | when(network.completes_on_arrival(), CAP_COMPLETION_IS_ARRIVAL),
            trap_on_fault: u32::from(trap_on_fault),
            proxy_contexts: when(backend == BackendKind::Proxy, contexts),
            strong_signals: when(network.strong_signals, signals),
            lsa_first: rank - rank % lsa_size,
            ..self.places.handle
        }
    }

    /// Returns the address of the copy of the handle, for functions of kernels.
    pub(crate) fn copy(&self) -> u64 {
        self.places.handle.copy
    }

    /// Fills that copy.
    pub(crate) fn fill_copy(&self, handle: CommHandle) -> Result<(), GpuError> {
        write(&self.device, handle.copy, &[handle])
    }

    /// Returns the address of the table entry of a window.
    pub(crate) fn window_data(&self, id: u32) -> u64 {
        self.places.handle.window_table + u64::from(id) * size_of::<WindowData>() as u64
    }

    /// Fills the table entry of a window.
    pub(crate) fn set_window(&self, id: u32, data: WindowData) -> Result<(), GpuError> {
        write(&self.device, self.window_data(id), &[data])
    }

    /// Clears the table entry of a window, so that a kernel with an old handle finds lengths of 0 and no peers.
    pub(crate) fn clear_window(&self, id: u32) -> Result<(), GpuError> {
        let zeros = self.places.zeros;
        self.set_window(id, WindowData { lengths: zeros, peers: zeros, ..WindowData::zeroed() })
    }
}

/// Writes values to an address in `memory`.
fn write<T: Pod>(memory: &Memory, address: u64, values: &[T]) -> Result<(), GpuError> {
    memory.write(address - memory.address(), values)
}

/// Returns the address of the words of a context among signal words; 0 if there are none.
fn signals_of(memory: &Option<Arc<Memory>>, context: u64, per_context: u64) -> u64 {
    memory.as_ref().map_or(0, |memory| memory.address() + context * per_context * 8)
}
