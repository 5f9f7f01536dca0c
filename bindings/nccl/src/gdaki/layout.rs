// SPDX-License-Identifier: MIT OR Apache-2.0
//! The structures that NVIDIA's device code reads in GPU memory: `ncclGinGdakiGPUContext` and `ncclGinGdakiMemHandle`
//! of NCCL 2.30, and `doca_gpu_dev_verbs_qp` of DOCA GPUNetIO 2.0. NCCL 2.30.5 to 2.32.3 have the same offsets.
//!
//! Keys and numbers of queue pairs are big-endian where entries have them, so that a kernel copies them.

use bytemuck::{Pod, Zeroable};
use gin_abi::mlx5::be::Be32;
use gin_abi::mlx5::cqe;
use gin_abi::mlx5::doorbell::SEND_OFFSET;
use gin_abi::mlx5::wqe::QueueNumber;
use gin_nic::{QueueInfo, QueuePlace};
use std::mem::offset_of;

/// `DOCA_GPUNETIO_VERBS_NIC_HANDLER_GPU_SM_DB`: kernels ring doorbells, and store records.
const KERNELS_RING: u32 = 2;
/// `DOCA_GPUNETIO_VERBS_MEM_TYPE_GPU`: device code asserts it. The kernel of a GPU reaches pinned memory by the same
/// instructions.
const GPU_MEMORY: u32 = 2;

/// `ncclGinGdakiGlobalGPUBufferTable`: the signals or the counters of a context.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub(super) struct Words {
    /// The address of the context's first word.
    pub(super) buffer: u64,
    /// The address of the ranks' keys.
    pub(super) keys: u64,
    /// The own key for local access.
    pub(super) local_key: Be32,
    /// The number of the context's first word in the region of the keys.
    pub(super) offset: u32,
}

/// `ncclGinGdakiGPUContext`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub(super) struct GpuContext {
    /// The address of the queue pairs, by peer.
    pub(super) queues: u64,
    /// The address of the queue pairs that raise counters, by peer; 0 without counters.
    pub(super) companions: u64,
    pub(super) counters: Words,
    pub(super) signals: Words,
    /// The key of 8 bytes for old values of atomics.
    pub(super) sink_key: Be32,
    /// Read since NCCL 2.32: gets need a DUMP before their data is visible.
    dumps: u32,
    /// The address of the number behind the last get, by peer.
    pub(super) last_issued_get: u64,
    /// The address of the number behind the last visible get, by peer.
    pub(super) last_visible_get: u64,
}

impl GpuContext {
    /// Returns a context without any memory.
    pub(super) fn new() -> Self {
        Self { dumps: 1, ..Self::default() }
    }

    /// Returns the bytes of the layout of this version of the back end; `None` for an unknown version.
    pub(super) fn bytes(version: i32) -> Option<usize> {
        match version {
            // NCCL 2.30.3 and 2.30.4: without gets.
            1 => Some(offset_of!(Self, last_issued_get)),
            2 => Some(size_of::<Self>()),
            _ => None,
        }
    }
}

/// `ncclGinGdakiMemHandle`: a window.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub(super) struct Window {
    /// The address of the ranks' keys.
    pub(super) keys: u64,
    /// The own key for local access.
    pub(super) local_key: Be32,
    _reserved: u32,
}

impl Window {
    pub(super) fn new(keys: u64, local_key: u32) -> Self {
        Self { keys, local_key: Be32::new(local_key), ..Self::default() }
    }
}

/// `doca_gpu_dev_verbs_cq`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct Completions {
    ring: u64,
    number: u32,
    count: u32,
    record: u64,
    consumed: u64,
    mask: u32,
    entry_bytes: u8,
    _reserved: [u8; 3],
    skipped: u64,
    memory: u32,
    _unused: [u32; 3],
}

/// `doca_gpu_dev_verbs_qp`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub(super) struct QueuePair {
    reserved_index: u64,
    ready_index: u64,
    announced_index: u64,
    number: u32,
    shifted: u32,
    /// In the form of entries; with 0 to 5 segments.
    in_entries: [Be32; 6],
    lock: u32,
    count: u16,
    mask: u16,
    ring: u64,
    record: u64,
    doorbell: u64,
    _reserved: [u64; 9],
    completions: Completions,
    _unused: [u64; 8],
    handler: u32,
    memory: u32,
}

impl QueuePair {
    /// Describes a queue pair whose rings are in the slab at this address.
    pub(super) fn new(info: &QueueInfo, place: &QueuePlace, slab: u64) -> Self {
        let (depth, completions) = (1u32 << info.log_depth, 1u32 << info.log_completions);
        let number = QueueNumber::new(info.queue);
        Self {
            number: info.queue,
            shifted: info.queue << 8,
            in_entries: std::array::from_fn(|segments| number.with_segments(segments as u32)),
            // At most 2^15: 16 bits hold them.
            count: depth as u16,
            mask: (depth - 1) as u16,
            ring: slab + place.ring,
            record: slab + place.record + SEND_OFFSET,
            doorbell: info.doorbell,
            completions: Completions {
                ring: slab + place.completions,
                number: info.completion_queue,
                count: completions,
                record: slab + place.completion_record,
                mask: completions - 1,
                entry_bytes: cqe::BYTES as u8,
                memory: GPU_MEMORY,
                ..Completions::default()
            },
            handler: KERNELS_RING,
            memory: GPU_MEMORY,
            ..Self::default()
        }
    }
}

const _: () = {
    assert!(size_of::<Words>() == 24 && offset_of!(Words, local_key) == 16 && offset_of!(Words, offset) == 20);
    assert!(size_of::<GpuContext>() == 88 && offset_of!(GpuContext, counters) == 16);
    assert!(offset_of!(GpuContext, signals) == 40 && offset_of!(GpuContext, sink_key) == 64);
    assert!(offset_of!(GpuContext, dumps) == 68);
    assert!(offset_of!(GpuContext, last_issued_get) == 72 && offset_of!(GpuContext, last_visible_get) == 80);
    assert!(size_of::<Window>() == 16 && offset_of!(Window, local_key) == 8);
    assert!(size_of::<Completions>() == 64 && offset_of!(Completions, record) == 16);
    assert!(offset_of!(Completions, consumed) == 24 && offset_of!(Completions, mask) == 32);
    assert!(offset_of!(Completions, entry_bytes) == 36 && offset_of!(Completions, skipped) == 40);
    assert!(offset_of!(Completions, memory) == 48);
    assert!(size_of::<QueuePair>() == 296 && offset_of!(QueuePair, number) == 24);
    assert!(offset_of!(QueuePair, in_entries) == 32 && offset_of!(QueuePair, lock) == 56);
    assert!(offset_of!(QueuePair, count) == 60 && offset_of!(QueuePair, mask) == 62);
    assert!(offset_of!(QueuePair, ring) == 64 && offset_of!(QueuePair, record) == 72);
    assert!(offset_of!(QueuePair, doorbell) == 80 && offset_of!(QueuePair, completions) == 160);
    assert!(offset_of!(QueuePair, handler) == 288 && offset_of!(QueuePair, memory) == 292);
};
