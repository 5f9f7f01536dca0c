// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory behind a communicator's handle.
//!
//! Words that a CPU thread writes or reads are in pinned host memory. Words that kernels poll or add to are in device
//! memory. Words of different writers are on different cache lines.

use super::Requirements;
use crate::proxy::{ContextPart, Counters};
use bytemuck::Zeroable;
use gin_abi::descriptor::WORDS;
use gin_abi::handle::{CAP_STRONG_SIGNALS, ENGINE_CPU, ENGINE_GPU, ENGINE_NIC, NEAR_WORDS, QUEUE_NEAR};
use gin_abi::{ABI_VERSION, BackendKind, CommHandle, ContextData, StatusBlock, WindowData};
use gin_device::internal::host_word;
use gin_device::internal::queue::Queue;
use gin_device::internal::status::Status;
use gin_device::sys::{Global, GlobalWord};
use gin_gpu::{Device, GpuError, Memory, MemoryKind, MemorySlice};
use gin_net::LocalSignals;
use std::sync::Arc;

/// Cache lines are 64 bytes on CPUs and 128 on GPUs.
const LINE: u64 = 128;

/// Assigns places in one allocation, in order.
#[derive(Debug, Default)]
struct Layout {
    end: u64,
}

impl Layout {
    /// Returns the offset of `bytes` bytes on separate cache lines.
    fn place(&mut self, bytes: u64) -> u64 {
        let start = self.end;
        self.end = (start + bytes).next_multiple_of(LINE);
        start
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

/// The engines that raise words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Engines {
    /// GPUs, by loads and stores.
    pub(crate) gpu: bool,
    /// The NIC.
    pub(crate) nic: bool,
    /// CPU threads.
    pub(crate) cpu: bool,
}

impl Engines {
    /// Returns the `ENGINE_*` bits.
    fn bits(self) -> u32 {
        let bit = |there: bool, bit| if there { bit } else { 0 };
        bit(self.gpu, ENGINE_GPU) | bit(self.nic, ENGINE_NIC) | bit(self.cpu, ENGINE_CPU)
    }
}

/// The offsets of one context: first those in pinned memory, then those in device memory.
#[derive(Debug)]
struct ContextPlaces {
    slots: u64,
    consumer_index: u64,
    completion_index: u64,
    oldest_incomplete: u64,
    counters: u64,
    producer_index: u64,
    signal_near: u64,
    shadow: u64,
    counter_near: u64,
    counters_gpu: u64,
}

/// Offsets of what all contexts share: in pinned memory, then in the device.
#[derive(Debug)]
struct SharedPlaces {
    host_status: u64,
    kernel_status: u64,
    status_copy: u64,
    context_table: u64,
    window_table: u64,
    peer_signals: u64,
    zeros: u64,
    barrier_state: u64,
}

/// All memory of a communicator on one rank, and the layout of that memory.
#[derive(Debug)]
pub(crate) struct Resources {
    pinned: Arc<Memory>,
    device: Arc<Memory>,
    /// `None` if CPU threads raise no words.
    signals: Option<Arc<Memory>>,
    /// `None` if the NIC raises no words.
    signals_nic: Option<Arc<Memory>>,
    /// `None` if GPUs raise no words.
    signals_gpu: Option<Arc<Memory>>,
    /// The signal words of LSA peers that kernels of this rank raise.
    peers: Vec<Arc<Memory>>,
    contexts: Vec<ContextPlaces>,
    engines: Engines,
    all_signals: u64,
    counters: u64,
    shared: SharedPlaces,
    ranks: u64,
    depth_log2: u32,
    first_index: u64,
}

impl Resources {
    /// Allocates the memory and fills the words that do not depend on other ranks. `across`: each rank is a separate
    /// process.
    pub(crate) fn new(
        device: &Arc<dyn Device>,
        requirements: &Requirements,
        ranks: u32,
        lsa_size: u32,
        engines: Engines,
        across: bool,
    ) -> Result<Self, GpuError> {
        let all_signals = requirements.all_signals(ranks, lsa_size);
        let (counters, depth) = (u64::from(requirements.counters), u64::from(requirements.queue_depth));
        let contexts = u64::from(requirements.contexts);
        let ranks = u64::from(ranks);
        // Kernels that consume a NIC's completions raise counters, too.
        let own_counters = engines.gpu || engines.nic;
        let (mut pinned, mut near) = (Layout::default(), Layout::default());
        let shared = SharedPlaces {
            host_status: pinned.place(size_of::<StatusBlock>() as u64),
            kernel_status: pinned.place(size_of::<StatusBlock>() as u64),
            status_copy: near.place(size_of::<StatusBlock>() as u64),
            context_table: near.place(contexts * size_of::<ContextData>() as u64),
            window_table: near.place(u64::from(requirements.windows) * size_of::<WindowData>() as u64),
            peer_signals: near.words(contexts * ranks),
            zeros: near.words(ranks),
            barrier_state: near.words(requirements.barriers()),
        };
        let places: Vec<ContextPlaces> = (0..contexts)
            .map(|_| ContextPlaces {
                slots: pinned.words(depth * WORDS as u64),
                consumer_index: pinned.words(1),
                completion_index: pinned.words(1),
                oldest_incomplete: pinned.words(ranks),
                counters: pinned.words(counters),
                producer_index: near.place(QUEUE_NEAR + (2 + ranks) * NEAR_WORDS * 8),
                signal_near: near.words(NEAR_WORDS * all_signals),
                shadow: near.words(all_signals),
                counter_near: near.words(NEAR_WORDS * counters),
                counters_gpu: near.words(if own_counters { counters } else { 0 }),
            })
            .collect();
        let words = contexts * all_signals * 8;
        let signal_words =
            |there: bool, kind| there.then(|| Memory::for_ranks(device, kind, words, across)).transpose();
        let resources = Self {
            pinned: Memory::new(device, MemoryKind::Pinned, pinned.end)?,
            device: Memory::new(device, MemoryKind::Device, near.end)?,
            signals: signal_words(engines.cpu, MemoryKind::Pinned)?,
            signals_nic: signal_words(engines.nic, MemoryKind::Device)?,
            signals_gpu: signal_words(engines.gpu, MemoryKind::Device)?,
            peers: Vec::new(),
            contexts: places,
            engines,
            all_signals,
            counters,
            shared,
            ranks,
            depth_log2: requirements.queue_depth.trailing_zeros(),
            first_index: requirements.first_index,
        };
        resources.initialise(requirements)?;
        Ok(resources)
    }

    fn initialise(&self, requirements: &Requirements) -> Result<(), GpuError> {
        let all_signals = self.all_signals as usize;
        for (context, places) in self.contexts.iter().enumerate() {
            let mut queue = self.queue(places);
            // The CPU cannot store to words in device memory, so it fills words of its own and copies them.
            let (mut claim, mut near) = ([0u64], vec![0u64; ((2 + self.ranks) * NEAR_WORDS) as usize]);
            // Safety: local words that live until the end of this block.
            let word = |words: &mut [u64]| unsafe { GlobalWord::new(words.as_mut_ptr().addr() as u64) };
            (queue.producer_index, queue.near) = (word(&mut claim), word(&mut near));
            queue.initialise(self.first_index, self.ranks);
            self.device.write(places.producer_index, &claim)?;
            self.device.write(places.producer_index + QUEUE_NEAR, &near)?;
            if requirements.first_counter != 0 {
                let (counters, first) = (requirements.counters as usize, requirements.first_counter);
                let words = vec![first; counters];
                if self.engines.cpu {
                    self.pinned.write(places.counters, &words)?;
                    self.device.write(places.counter_near, &beside(first, counters))?;
                } else {
                    self.device.write(places.counters_gpu, &words)?;
                }
            }
            if requirements.first_signal != 0 {
                let first = vec![requirements.first_signal; all_signals];
                let offset = (context * all_signals * 8) as u64;
                // One word for each signal.
                if let Some(signals) = self.signals.as_ref().or(self.signals_nic.as_ref()) {
                    signals.write(offset, &first)?;
                }
                self.device.write(places.signal_near, &beside(requirements.first_signal, all_signals))?;
                self.device.write(places.shadow, &first)?;
            }
        }
        Ok(())
    }

    fn pinned_word(&self, offset: u64) -> GlobalWord {
        // Safety: an aligned offset in an allocation that is pinned and lives as long as `self`, which every holder of
        // the word keeps alive; its words are used by atomic accesses only.
        unsafe { GlobalWord::new(self.pinned.address() + offset) }
    }

    fn device_word(&self, offset: u64) -> GlobalWord {
        // Safety: as above; the CPU itself uses such a word only where it reaches device memory.
        unsafe { GlobalWord::new(self.device.address() + offset) }
    }

    fn queue(&self, places: &ContextPlaces) -> Queue<Global, WORDS> {
        Queue {
            slots: self.pinned_word(places.slots),
            producer_index: self.device_word(places.producer_index),
            near: self.device_word(places.producer_index + QUEUE_NEAR),
            consumer_index: self.pinned_word(places.consumer_index),
            completion_index: self.pinned_word(places.completion_index),
            oldest_incomplete: self.pinned_word(places.oldest_incomplete),
            depth_log2: self.depth_log2,
            depth_mask: (1 << self.depth_log2) - 1,
        }
    }

    /// Returns the status blocks that host and kernels of this rank use.
    pub(crate) fn status(&self) -> Status<Global> {
        Status {
            host: self.pinned_word(self.shared.host_status),
            kernel: self.pinned_word(self.shared.kernel_status),
            copy: self.device_word(self.shared.status_copy),
        }
    }

    /// Returns the signal words that CPU threads raise, if they raise any.
    pub(crate) fn local_signals(&self) -> Option<LocalSignals> {
        Some(LocalSignals {
            memory: self.signals.clone()?,
            nic: self.signals_nic.clone(),
            contexts: self.contexts.len() as u32,
            per_context: self.all_signals as u32,
        })
    }

    /// Returns the signal words that the NIC raises, if it raises any.
    pub(crate) fn signals_nic(&self) -> Option<&Arc<Memory>> {
        self.signals_nic.as_ref()
    }

    /// Returns the bytes of the signal words of one context.
    pub(crate) fn signal_bytes(&self) -> u64 {
        self.all_signals * 8
    }

    /// Returns for each context the counter words that its own kernels raise, if there are any.
    pub(crate) fn counters_gpu(&self) -> Result<Vec<Option<MemorySlice>>, GpuError> {
        let words = |places: &ContextPlaces| {
            let (start, bytes) = (places.counters_gpu, self.counters * 8);
            (bytes != 0).then(|| self.device.slice(start..start + bytes)).transpose()
        };
        self.contexts.iter().map(words).collect()
    }

    /// Returns the signal words that GPUs raise, if they raise any.
    pub(crate) fn signals_gpu(&self) -> Option<&Arc<Memory>> {
        self.signals_gpu.as_ref()
    }

    /// Returns the words of each context that the proxy needs. `bases`: with the baselines of signals, which only a CPU
    /// that reaches device memory may access.
    pub(crate) fn context_parts(
        &self,
        stats: &[Arc<Counters>],
        #[cfg(feature = "reset-by-store")] bases: bool,
    ) -> Vec<ContextPart> {
        let parts = self.contexts.iter().zip(stats).enumerate().map(|(context, (places, stats))| {
            let first = |memory: &Arc<Memory>| memory.address() + context as u64 * self.all_signals * 8;
            ContextPart {
                queue: self.queue(places),
                counters: self.pinned_word(places.counters),
                // Safety: the first word of this context in an allocation that is pinned and lives as long as `self`.
                signals: self.signals.as_ref().map(|memory| unsafe { GlobalWord::new(first(memory)) }),
                #[cfg(feature = "reset-by-store")]
                signal_near: bases.then(|| self.device_word(places.signal_near)),
                stats: stats.clone(),
            }
        });
        parts.collect()
    }

    /// Returns for each context the index of the next request.
    pub(crate) fn claims(&self) -> Result<Vec<u64>, GpuError> {
        let claim = |places: &ContextPlaces| {
            let mut claim = [0u64];
            self.device.read(places.producer_index, &mut claim).map(|()| claim[0])
        };
        self.contexts.iter().map(claim).collect()
    }

    /// Fills the tables that kernels read. `peer_signals`: each rank's signal words that GPUs raise, if this rank
    /// reaches them. `busy`: returns for each context the address of the words that mark peers with unfinished entries,
    /// or 0.
    pub(crate) fn fill_tables(
        &mut self,
        peer_signals: Vec<Option<Arc<Memory>>>,
        busy: impl Fn(u32) -> u64,
    ) -> Result<(), GpuError> {
        let (pinned, near) = (self.pinned.address(), self.device.address());
        let own_gpu = self.signals_gpu.as_ref().map_or(0, |memory| memory.address());
        for (context, places) in (0u64..).zip(&self.contexts) {
            let words = context * self.all_signals * 8;
            let own = |memory: &Option<Arc<Memory>>| memory.as_ref().map_or(0, |memory| memory.address() + words);
            let table = self.shared.peer_signals + context * self.ranks * 8;
            if own_gpu != 0 {
                let address = |peer: &Option<Arc<Memory>>| peer.as_ref().map_or(0, |memory| memory.address() + words);
                let addresses: Vec<u64> = peer_signals.iter().map(address).collect();
                self.device.write(table, &addresses)?;
            }
            let data = ContextData {
                slots: pinned + places.slots,
                producer_index: near + places.producer_index,
                consumer_index: pinned + places.consumer_index,
                completion_index: pinned + places.completion_index,
                oldest_incomplete: pinned + places.oldest_incomplete,
                depth_log2: self.depth_log2,
                depth_mask: (1 << self.depth_log2) - 1,
                signal_gpu: own(&self.signals_gpu),
                signal_nic: own(&self.signals_nic),
                signal_cpu: own(&self.signals),
                signal_near: near + places.signal_near,
                signal_shadow: near + places.shadow,
                counters: pinned + places.counters,
                counter_near: near + places.counter_near,
                counters_gpu: if self.engines.gpu || self.engines.nic { near + places.counters_gpu } else { 0 },
                busy: busy(context as u32),
                reserved: 0,
            };
            self.device.write(self.shared.context_table + context * size_of::<ContextData>() as u64, &[data])?;
        }
        self.peers = peer_signals.into_iter().flatten().collect();
        Ok(())
    }

    /// Returns the handle that kernels get.
    pub(crate) fn handle(
        &self,
        requirements: &Requirements,
        backend: BackendKind,
        rank: u32,
        lsa_size: u32,
        capabilities: u32,
        trap_on_fault: bool,
    ) -> CommHandle {
        let (pinned, near) = (self.pinned.address(), self.device.address());
        CommHandle {
            abi: ABI_VERSION,
            backend: backend as u32,
            rank,
            ranks: self.ranks as u32,
            lsa_rank: rank % lsa_size,
            lsa_size,
            contexts: requirements.contexts,
            signals: requirements.signals,
            counters: requirements.counters,
            windows: requirements.windows,
            capabilities,
            engines: self.engines.bits(),
            world_barriers: requirements.world_barriers,
            rail_barriers: requirements.rail_barriers,
            lsa_barriers: requirements.lsa_barriers,
            trap_on_fault: u32::from(trap_on_fault),
            proxy_contexts: if backend == BackendKind::Proxy { requirements.contexts } else { 0 },
            strong_signals: if capabilities & CAP_STRONG_SIGNALS != 0 { requirements.signals } else { 0 },
            lsa_first: rank - rank % lsa_size,
            lsa_reach: if self.signals_gpu.is_some() { lsa_size } else { 0 },
            context_table: near + self.shared.context_table,
            window_table: near + self.shared.window_table,
            host_status: pinned + self.shared.host_status,
            kernel_status: pinned + self.shared.kernel_status,
            kernel_status_copy: near + self.shared.status_copy,
            barrier_state: near + self.shared.barrier_state,
            peer_signals: if self.signals_gpu.is_some() { near + self.shared.peer_signals } else { 0 },
            ..CommHandle::zeroed()
        }
    }

    /// Returns the address of the table entry of a window.
    pub(crate) fn window_data(&self, id: u32) -> u64 {
        self.device.address() + self.window_entry(id)
    }

    fn window_entry(&self, id: u32) -> u64 {
        self.shared.window_table + u64::from(id) * size_of::<WindowData>() as u64
    }

    /// Fills the table entry of a window.
    pub(crate) fn set_window(&self, id: u32, data: WindowData) -> Result<(), GpuError> {
        self.device.write(self.window_entry(id), &[data])
    }

    /// Clears the table entry of a window, so that a kernel with an old handle finds lengths of 0 and no peers.
    pub(crate) fn clear_window(&self, id: u32) -> Result<(), GpuError> {
        let zeros = self.device.address() + self.shared.zeros;
        self.set_window(id, WindowData { lengths: zeros, peers: zeros, ..WindowData::zeroed() })
    }
}
