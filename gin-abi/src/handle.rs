// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a kernel gets by value, and the tables behind it.
//!
//! Addresses are device addresses in `u64`. Where a word lies matters: words that a GPU polls or adds to lie in that
//! GPU's memory, words that a CPU thread writes lie in pinned host memory, because no word is raised by two kinds of
//! engine (GPU, NIC and CPU atomics on one word are not atomic to each other).

use crate::fault::FaultRecord;
use bytemuck::{Pod, Zeroable};

/// Engine bit: GPUs raise the word with native peer atomics; the word lies in the owner's GPU memory.
pub const ENGINE_GPU: u32 = 1;
/// Engine bit: the one NIC of the context raises the word; it lies in the owner's GPU memory.
pub const ENGINE_NIC: u32 = 2;
/// Engine bit: CPU threads raise the word by `fetch_add`; it lies in the owner's pinned host memory.
pub const ENGINE_CPU: u32 = 4;

/// Capability bit: the network gives signals that cover all earlier puts of the same context to the same peer.
pub const CAP_STRONG_SIGNALS: u32 = 1;
/// Capability bit: the network gives signals at window addresses.
pub const CAP_VA_SIGNALS: u32 = 2;
/// Capability bit: windows have an address that stores to all ranks of the LSA team at once (multimem, NVLink SHARP).
///
/// No host sets it yet. A multicast object needs a GPU of its own for each rank and switches that are set up for it, and
/// that such a store is visible at every rank before a signal that follows it has not been shown.
pub const CAP_MULTIMEM: u32 = 4;

/// Words in GPU memory beside a word in host memory that many threads wait for: what was seen, whether somebody looks,
/// one that is free for other use, whether somebody wants to know, what a wait ended with; the rest is free.
pub const NEAR_WORDS: u64 = 8;
/// Bytes from the index of the next slot to the words beside `taken`, which many threads poll: a cache line.
pub const QUEUE_NEAR: u64 = 128;

/// Who serves the posts of a communicator.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum BackendKind {
    /// A CPU thread takes descriptors from a queue and posts them to a network.
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
    /// [`crate::ABI_VERSION`] of the host that made it.
    pub abi: u32,
    /// A [`BackendKind`].
    pub backend: u32,
    /// Own world rank.
    pub rank: u32,
    /// Number of ranks in the world.
    pub ranks: u32,
    /// Own rank in the LSA team: the ranks that reach each other by loads and stores.
    pub lsa_rank: u32,
    /// Size of the LSA team; divides `ranks`.
    pub lsa_size: u32,
    /// Number of contexts.
    pub contexts: u32,
    /// Number of signals a user may name, per context; the ids above belong to barriers.
    pub signals: u32,
    /// Number of counters per context.
    pub counters: u32,
    /// Number of entries of the window table.
    pub windows: u32,
    /// `CAP_*` bits.
    pub capabilities: u32,
    /// `ENGINE_*` bits: which words a signal has.
    pub engines: u32,
    /// Number of barriers over the world team; their signals start at `signals`.
    pub world_barriers: u32,
    /// Number of barriers over the rail team; their signals follow those of the world.
    pub rail_barriers: u32,
    /// Number of barriers over the LSA team; their signals follow those of the rail.
    pub lsa_barriers: u32,
    /// 1 if a reported fault must stop the kernel at once (`trap`), for debugging; else 0.
    pub trap_on_fault: u32,
    /// `contexts` if `backend` is the proxy, else 0: one comparison checks a context's number and who serves it.
    pub proxy_contexts: u32,
    /// `signals` if `capabilities` has `CAP_STRONG_SIGNALS`, else 0: one comparison checks a strong signal.
    pub strong_signals: u32,
    /// World rank of the first member of the LSA team.
    pub lsa_first: u32,
    /// Ranks from `lsa_first` on that operations reach by loads and stores: `lsa_size`, or 0 if the communicator has no
    /// such route. One comparison tells the route to a peer.
    pub lsa_reach: u32,
    /// Table of [`ContextData`], `contexts` long, in GPU memory.
    pub context_table: u64,
    /// Table of [`WindowData`], `windows` long, in GPU memory.
    pub window_table: u64,
    /// [`StatusBlock`] in pinned host memory, written by the host only.
    pub host_status: u64,
    /// [`StatusBlock`] in pinned host memory, written by this rank's kernels only, once.
    pub kernel_status: u64,
    /// [`StatusBlock`] in GPU memory: the copy of `kernel_status` that kernels poll. Word: 0 none, 1 being written, 2
    /// valid.
    pub kernel_status_copy: u64,
    /// One word per barrier (world, rail, LSA, in the order of their signals) in GPU memory: the epoch; its top bit
    /// says that the barrier is broken.
    pub barrier_state: u64,
    /// For each context `ranks` addresses: where a rank's `signal_gpu` of that context lies, 0 where it cannot be reached;
    /// GPU memory. 0 if no rank can. Here, and not in [`ContextData`], so that raising a signal by loads and stores takes
    /// one trip to memory to find it.
    pub peer_signals: u64,
    /// Table of [`QueuePairData`](crate::gdaki::QueuePairData), for each context `ranks`, in GPU memory; 0 unless kernels
    /// drive a NIC.
    pub queue_pairs: u64,
    /// Keys of windows, in GPU memory, each in the lower half of a word of its own, big-endian as it lies in entries: for
    /// each window `ranks` keys of the ranks' parts for remote access, then that of the own part for local access. The upper
    /// half is the address of the part's first byte in its region, less than a page of the host. 0 unless kernels drive a
    /// NIC.
    pub window_keys: u64,
    /// `contexts` if kernels drive a NIC, else 0.
    pub gdaki_contexts: u32,
    /// Zero.
    pub reserved: u32,
}

const _: () = assert!(size_of::<CommHandle>() == 160 && align_of::<CommHandle>() == 8);

/// Something that ended the normal course of a communicator, or not yet.
///
/// `word` is stored last, with release; a reader that finds it non-zero acquires and reads `record`. Aligned for stores
/// of two words at a time.
#[repr(C, align(16))]
#[derive(Clone, Copy, Pod, Zeroable, Debug, PartialEq, Eq)]
pub struct StatusBlock {
    /// 0 while all is well.
    pub word: u64,
    /// In the copy that kernels poll, what they know of the host's block: 1 if it has a record, else the even time of
    /// their last look at it, in nanoseconds. Zero elsewhere.
    pub host: u64,
    /// What happened.
    pub record: FaultRecord,
}

const _: () = assert!(size_of::<StatusBlock>() == 48);

/// Queue, signals and counters of one context of one rank.
///
/// Kernels read it two words at a time; words that are needed together are pairs.
#[repr(C, align(16))]
#[derive(Clone, Copy, Pod, Zeroable, Debug, PartialEq, Eq)]
pub struct ContextData {
    /// Index of the next slot to claim, in GPU memory. [`QUEUE_NEAR`] bytes further on follow the words beside `taken`,
    /// then those beside `done`, then those beside each `oldest`: [`NEAR_WORDS`] words each.
    pub claim: u64,
    /// Number of slots that the consumer has emptied; pinned host memory, written by the consumer.
    pub taken: u64,
    /// Slots: `1 << depth_log2` descriptors of [`crate::descriptor::WORDS`] words; pinned host memory.
    pub slots: u64,
    /// log2 of the number of slots; at most 31.
    pub depth_log2: u32,
    /// Number of slots, less one.
    pub depth_mask: u32,
    /// Per peer: index of the oldest unfinished request, `u64::MAX` if none; pinned host memory, written by the
    /// consumer.
    pub oldest: u64,
    /// All requests below this index are complete; pinned host memory, written by the consumer.
    pub done: u64,
    /// Counter words that CPU threads raise: pinned host memory.
    pub counters: u64,
    /// Beside each counter: [`NEAR_WORDS`] words, of which the third is its baseline; GPU memory.
    pub counter_near: u64,
    /// Signal words raised by GPUs: one per signal, GPU memory; 0 if there are none.
    pub signal_gpu: u64,
    /// Signal words raised by the NIC: one per signal, GPU memory; 0 if there are none.
    pub signal_nic: u64,
    /// Signal words raised by CPU threads: one per signal, pinned host memory; 0 if there are none.
    pub signal_cpu: u64,
    /// Beside each signal: [`NEAR_WORDS`] words, of which the third is its baseline, the sum of its words at the last
    /// reset; GPU memory.
    pub signal_near: u64,
    /// Shadow of each signal; GPU memory.
    pub signal_shadow: u64,
    /// Counter words that this rank's own kernels raise: GPU memory; 0 if there are none.
    pub counters_gpu: u64,
    /// Where kernels drive a NIC: words with the [marks](crate::gdaki::busy_marks) of the peers that may have entries under
    /// way; GPU memory. Else 0.
    pub busy: u64,
    /// Zero: one context is one cache line.
    pub reserved: u64,
}

const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<ContextData>() == 128);
    // The first words of the pairs.
    assert!(offset_of!(ContextData, claim).is_multiple_of(16) && offset_of!(ContextData, slots).is_multiple_of(16));
    assert!(offset_of!(ContextData, oldest).is_multiple_of(16) && offset_of!(ContextData, counters).is_multiple_of(16));
    assert!(offset_of!(ContextData, signal_gpu).is_multiple_of(16));
    assert!(offset_of!(ContextData, signal_cpu).is_multiple_of(16));
};

/// What is known of one registered window on one rank.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug, PartialEq, Eq)]
pub struct WindowData {
    /// 1 while registered, else 0.
    pub active: u32,
    /// `WINDOW_*` bits.
    pub flags: u32,
    /// Address of the own memory.
    pub base: u64,
    /// Own length in bytes.
    pub length: u64,
    /// Per world rank: length in bytes; GPU memory.
    pub lengths: u64,
    /// Per world rank: device address of that rank's memory, 0 where it cannot be reached; GPU memory. 0 if no other
    /// rank can.
    pub peers: u64,
    /// Plane of signal words raised by GPUs, one for each 8 bytes of the window; 0 if there is none.
    pub va_gpu: u64,
    /// Plane of signal words raised by CPU threads, one for each 8 bytes of the window, pinned host memory; 0 if there
    /// is none.
    pub va_cpu: u64,
    /// Plane of what lies beside signals, [`NEAR_WORDS`] words for each 8 bytes of the window, of which the third is the
    /// baseline; GPU memory. 0 if the window takes no signals.
    pub va_near: u64,
    /// Per world rank: device address of that rank's `va_gpu`; GPU memory. 0 if there is none.
    pub peer_va_gpu: u64,
    /// [`WindowHandle::stride`].
    pub stride: u32,
    /// Zero.
    pub reserved: u32,
}

const _: () = assert!(size_of::<WindowData>() == 80);

/// log2 of the unit of [`WindowHandle::stride`]: 4 GiB. The lower half of an address is the same on all ranks then, and a
/// peer's address takes one multiply-add of 32 bits.
pub const STRIDE_SHIFT: u32 = 32;

/// Window flag: words in the window may be raised by signals, so it has side planes of words.
pub const WINDOW_SIGNALS: u32 = 1;

/// Window handle: a kernel parameter, passed by value.
///
/// The device API wraps it as `gin_device::Window<T>`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug, PartialEq, Eq)]
pub struct WindowHandle {
    /// Address of the own memory.
    pub base: u64,
    /// Own length in bytes.
    pub own_length: u64,
    /// Length in bytes that every rank registered at least; 0 is always right. What reaches past it is looked up in the
    /// table.
    pub least_length: u64,
    /// Address of the window's [`WindowData`].
    pub data: u64,
    /// Index in the window table; what descriptors carry.
    pub id: u32,
    /// `WINDOW_*` bits.
    pub flags: u32,
    /// Distance of the parts of neighbouring ranks of the LSA team, in units of `1 << STRIDE_SHIFT` bytes: the part of
    /// rank `p` starts at `base + ((p - rank) * stride << STRIDE_SHIFT)`, in wrapping arithmetic. 0 if the parts lie
    /// anywhere: their addresses are in the table.
    pub stride: u32,
    /// Own world rank.
    pub rank: u32,
    /// World rank of the first member of the LSA team.
    pub lsa_first: u32,
    /// Ranks from `lsa_first` on whose parts lie at that distance: the LSA team's size; 0 if `stride` is.
    pub lsa_reach: u32,
}

const _: () = assert!(size_of::<WindowHandle>() == 56);
