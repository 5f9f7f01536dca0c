// SPDX-License-Identifier: MIT OR Apache-2.0
//! Handles that a kernel receives by value, and the tables behind them.
//!
//! Addresses are device addresses in `u64`. The location of a word matters. Words that a GPU polls or adds to are in
//! that GPU's memory. Words that a CPU thread writes are in pinned host memory. No word is raised by two kinds of
//! engine, because GPU, NIC and CPU atomics on one word are not atomic to each other.

use crate::fault::FaultRecord;
use bytemuck::{Pod, Zeroable};

/// Engine bit: GPUs raise the word with native peer atomics. The word is in the owner's GPU memory.
pub const ENGINE_GPU: u32 = 1;
/// Engine bit: the one NIC of the context raises the word. The word is in the owner's GPU memory.
pub const ENGINE_NIC: u32 = 2;
/// Engine bit: CPU threads raise the word with `fetch_add`. The word is in the owner's pinned host memory.
pub const ENGINE_CPU: u32 = 4;

/// Capability bit: the network offers signals that cover all earlier puts of the same context to the same peer.
pub const CAP_STRONG_SIGNALS: u32 = 1;
/// Capability bit: the network offers signals at window addresses.
pub const CAP_VA_SIGNALS: u32 = 2;
/// Capability bit: windows have an address that stores to all ranks of the LSA team at once (multimem, NVLink SHARP).
///
/// No host sets it yet, for two reasons. A multicast object needs a separate GPU for each rank, and switches configured
/// for it. Nothing has shown yet that such a store is visible at every rank before a signal that follows it.
pub const CAP_MULTIMEM: u32 = 4;
/// Capability bit: a complete put has arrived at its peer, so that a flush waits for arrival. Without it, arrival takes
/// a further request: `Descriptor::quiet` with a proxy, an atomic with device-driven NIC queue pairs.
pub const CAP_COMPLETION_IS_ARRIVAL: u32 = 8;

/// Number of words in GPU memory that accompany a word in host memory which many threads wait for.
///
/// In order: the value last seen, whether a thread is polling, a word free for other use, whether a thread wants to
/// know, the result that ended a wait, the raises taken from a mailbox. The rest is free.
pub const NEAR_WORDS: u64 = 8;
/// Byte offset from the producer index to the words that accompany `consumer_index`, which many threads poll: one cache
/// line.
pub const QUEUE_NEAR: u64 = 128;

/// The engine that serves the posts of a communicator.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum BackendKind {
    /// A CPU thread reads descriptors from a queue and posts them to a network.
    Proxy = 1,
    /// The GPU writes the NIC's work-queue entries itself.
    Gdaki = 2,
}

/// Communicator handle: a kernel parameter, passed by value.
///
/// The device API wraps it as `gin_device::Comm`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug, PartialEq, Eq)]
pub struct CommHandle {
    /// [`crate::ABI_VERSION`] of the host that created it.
    pub abi: u32,
    /// A [`BackendKind`].
    pub backend: u32,
    /// World rank of this rank.
    pub rank: u32,
    /// Number of ranks in the world.
    pub ranks: u32,
    /// This rank's rank in the LSA team, which holds the ranks that reach each other by loads and stores.
    pub lsa_rank: u32,
    /// Size of the LSA team; divides `ranks`.
    pub lsa_size: u32,
    /// Number of contexts.
    pub contexts: u32,
    /// Number of signals per context that a user may name. Higher ids belong to barriers.
    pub signals: u32,
    /// Number of counters per context.
    pub counters: u32,
    /// Number of entries of the window table.
    pub windows: u32,
    /// `CAP_*` bits.
    pub capabilities: u32,
    /// `ENGINE_*` bits: the words that each signal has.
    pub engines: u32,
    /// Number of barriers over the world team. Their signals start at id `signals`.
    pub world_barriers: u32,
    /// Number of barriers over the rail team. Their signals follow those of the world team.
    pub rail_barriers: u32,
    /// Number of barriers over the LSA team. Their signals follow those of the rail team.
    pub lsa_barriers: u32,
    /// 1 if a reported fault must stop the kernel at once (`trap`), for debugging; else 0.
    pub trap_on_fault: u32,
    /// `contexts` if `backend` is the proxy, else 0. One comparison checks both a context's number and its back end.
    pub proxy_contexts: u32,
    /// `signals` if `capabilities` has `CAP_STRONG_SIGNALS`, else 0. One comparison checks a strong signal.
    pub strong_signals: u32,
    /// World rank of the first member of the LSA team.
    pub lsa_first: u32,
    /// Number of ranks from `lsa_first` on that operations reach by loads and stores: `lsa_size`, or 0 if the
    /// communicator has no such route. One comparison selects the route to a peer.
    pub lsa_reach: u32,
    /// Table of [`ContextData`], `contexts` long, in GPU memory.
    pub context_table: u64,
    /// Table of [`WindowData`], `windows` long, in GPU memory.
    pub window_table: u64,
    /// [`StatusBlock`] in pinned host memory. Only the host writes it.
    pub host_status: u64,
    /// [`StatusBlock`] in pinned host memory. Only this rank's kernels write it, once.
    pub kernel_status: u64,
    /// [`StatusBlock`] in GPU memory: the copy of `kernel_status` that kernels poll. Its word is 0 for none, 1 while a
    /// thread writes the record, 2 once the record is valid.
    pub kernel_status_copy: u64,
    /// One word per barrier (world, rail, LSA, in the order of their signals) in GPU memory: the epoch. Its top bit
    /// says that the barrier is broken.
    pub barrier_state: u64,
    /// For each context, `ranks` addresses: the address of a rank's `signal_gpu` of that context, 0 if that rank cannot
    /// be reached. In GPU memory; 0 if no rank can be reached. The table is here, not in [`ContextData`], so that a
    /// signal raised by loads and stores finds its word in one memory access.
    pub peer_signals: u64,
    /// Table of [`QueuePairData`](crate::gdaki::QueuePairData), `ranks` for each context, in GPU memory; 0 unless
    /// kernels drive a NIC.
    pub queue_pairs: u64,
    /// Keys of windows, in GPU memory; 0 unless kernels drive a NIC. For each window: `ranks` remote keys of the ranks'
    /// parts, then the local key of this rank's part. Each key is in the lower half of its word, big-endian, as entries
    /// hold it. The upper half is the address of the part's first byte in its region, less than a host page.
    pub window_keys: u64,
    /// `contexts` if kernels drive a NIC, else 0.
    pub gdaki_contexts: u32,
    /// Zero.
    pub reserved: u32,
    /// Address of a copy of this handle, in GPU memory. Functions that a kernel calls take it instead of the handle.
    pub copy: u64,
}

const _: () = assert!(size_of::<CommHandle>() == 168 && align_of::<CommHandle>() == 8);

/// An event that ended the normal course of a communicator, if there was one.
///
/// The writer stores `word` last, with release. A reader that finds it non-zero acquires and reads `record`. Aligned
/// for stores of two words at a time.
#[repr(C, align(16))]
#[derive(Clone, Copy, Pod, Zeroable, Debug, PartialEq, Eq)]
pub struct StatusBlock {
    /// 0 while the communicator is healthy.
    pub word: u64,
    /// In the copy that kernels poll: 1 if the host's block has a record, else the time of the kernels' last look at
    /// it, an even number of nanoseconds. Zero in every other block.
    pub host: u64,
    /// The fault.
    pub record: FaultRecord,
}

const _: () = assert!(size_of::<StatusBlock>() == 64);

/// Queue, signals and counters of one context of one rank.
///
/// Kernels read it two words at a time. Words that are needed together form pairs.
#[repr(C, align(16))]
#[derive(Clone, Copy, Pod, Zeroable, Debug, PartialEq, Eq)]
pub struct ContextData {
    /// Address of the producer index, the index of the next slot to claim; GPU memory. [`QUEUE_NEAR`] bytes further on
    /// follow the words that accompany `consumer_index`, then those of `completion_index`, then those of each
    /// `oldest_incomplete`: [`NEAR_WORDS`] words each.
    pub producer_index: u64,
    /// Address of the consumer index, the number of slots that the consumer has emptied; pinned host memory, written by
    /// the consumer.
    pub consumer_index: u64,
    /// Address of the slots: `1 << depth_log2` descriptors of [`crate::descriptor::WORDS`] words; pinned host memory.
    pub slots: u64,
    /// log2 of the number of slots; at most 31.
    pub depth_log2: u16,
    /// 1 if posts note the time in their [descriptor](crate::descriptor::with_time), else 0.
    pub timed: u16,
    /// Number of slots, less one.
    pub depth_mask: u32,
    /// Address of one word per peer: the oldest incomplete request, `u64::MAX` if none; pinned host memory, written by
    /// the consumer.
    pub oldest_incomplete: u64,
    /// Address of the completion index: all requests below it are complete; pinned host memory, written by the
    /// consumer.
    pub completion_index: u64,
    /// Address of the counter words that CPU threads raise; pinned host memory.
    pub counters: u64,
    /// Address of [`NEAR_WORDS`] words per counter, of which the third is its baseline; GPU memory.
    pub counter_near: u64,
    /// Address of the signal words that GPUs raise: one per signal, GPU memory; 0 if there are none.
    pub signal_gpu: u64,
    /// Address of the signal words that the NIC raises: one per signal, GPU memory; 0 if there are none.
    pub signal_nic: u64,
    /// Address of the signal words that CPU threads raise: one per signal, pinned host memory; 0 if there are none.
    pub signal_cpu: u64,
    /// Address of [`NEAR_WORDS`] words per signal; GPU memory. The third is the signal's baseline, the sum of its words
    /// at the last reset.
    pub signal_near: u64,
    /// Address of the shadow of each signal; GPU memory.
    pub signal_shadow: u64,
    /// Address of the counter words that this rank's kernels raise; GPU memory; 0 if there are none.
    pub counters_gpu: u64,
    /// Address of the words with the [marks](crate::gdaki::busy_marks) of peers that may have outstanding entries; GPU
    /// memory; 0 unless kernels drive a NIC.
    pub busy: u64,
    /// Address of the words of the rank's mailbox, the same in all contexts; GPU memory; 0 if there is none. By it CPU
    /// threads hand values and signals to waiting kernels, which store and raise them. The first context's words at
    /// `signal_near` are 128 bytes further on, and those of the other contexts follow.
    pub mailbox: u64,
}

const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<ContextData>() == 128);
    // The first word of each pair is 16-byte aligned.
    assert!(
        offset_of!(ContextData, producer_index).is_multiple_of(16) && offset_of!(ContextData, slots).is_multiple_of(16)
    );
    assert!(
        offset_of!(ContextData, oldest_incomplete).is_multiple_of(16)
            && offset_of!(ContextData, counters).is_multiple_of(16)
    );
    assert!(offset_of!(ContextData, signal_gpu).is_multiple_of(16));
    assert!(offset_of!(ContextData, signal_cpu).is_multiple_of(16));
};

/// A registered window, as one rank sees it.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug, PartialEq, Eq)]
pub struct WindowData {
    /// 1 while registered, else 0.
    pub active: u32,
    /// `WINDOW_*` bits.
    pub flags: u32,
    /// Address of this rank's memory.
    pub base: u64,
    /// Length of this rank's memory in bytes.
    pub length: u64,
    /// Address of one word per world rank: its length in bytes; GPU memory.
    pub lengths: u64,
    /// Address of one word per world rank: the device address of its memory, 0 if it cannot be reached; GPU memory. 0
    /// if no other rank can be reached.
    pub peers: u64,
    /// Plane of signal words that GPUs raise, one for each 8 bytes of the window; 0 if there is none.
    pub va_gpu: u64,
    /// Plane of signal words that CPU threads raise, one for each 8 bytes of the window; pinned host memory; 0 if there
    /// is none.
    pub va_cpu: u64,
    /// Plane of the words that accompany signals: [`NEAR_WORDS`] words for each 8 bytes of the window, of which the
    /// third is the baseline; GPU memory. 0 if the window takes no signals.
    pub va_near: u64,
    /// Address of one word per world rank: the device address of its `va_gpu`; GPU memory. 0 if there is none.
    pub peer_va_gpu: u64,
    /// [`WindowHandle::stride`].
    pub stride: u32,
    /// Zero.
    pub reserved: u32,
}

const _: () = assert!(size_of::<WindowData>() == 80);

/// log2 of the unit of [`WindowHandle::stride`]: 4 GiB. All ranks then share the lower half of an address, and a 32-bit
/// multiply-add yields a peer's address.
pub const STRIDE_SHIFT: u32 = 32;

/// Window flag: signals may raise words in the window, so it has side planes of words.
pub const WINDOW_SIGNALS: u32 = 1;

/// Window handle: a kernel parameter, passed by value.
///
/// The device API wraps it as `gin_device::Window<T>`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug, PartialEq, Eq)]
pub struct WindowHandle {
    /// Address of this rank's memory.
    pub base: u64,
    /// Length of this rank's memory in bytes.
    pub own_length: u64,
    /// Length in bytes that every rank registered at least; 0 is always valid. Kernels look up ranges past it in the
    /// table.
    pub least_length: u64,
    /// Address of the window's [`WindowData`].
    pub data: u64,
    /// Index in the window table, which descriptors carry.
    pub id: u32,
    /// `WINDOW_*` bits.
    pub flags: u32,
    /// Distance between the parts of neighbouring ranks of the LSA team, in units of `1 << STRIDE_SHIFT` bytes. The
    /// part of rank `p` starts at `base + ((p - rank) * stride << STRIDE_SHIFT)`, in wrapping arithmetic. 0 if the
    /// parts have unrelated addresses, which the table holds.
    pub stride: u32,
    /// World rank of this rank.
    pub rank: u32,
    /// World rank of the first member of the LSA team.
    pub lsa_first: u32,
    /// Number of ranks from `lsa_first` on whose parts have that distance: the LSA team's size, or 0 if `stride` is 0.
    pub lsa_reach: u32,
}

const _: () = assert!(size_of::<WindowHandle>() == 56);
