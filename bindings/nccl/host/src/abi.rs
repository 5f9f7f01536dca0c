// SPDX-License-Identifier: MIT OR Apache-2.0
//! The structures of NCCL 2.30.7's headers that the host passes or reads.

use std::ffi::c_void;
use std::mem::{offset_of, size_of};

pub(crate) const MAGIC: u32 = 0xcafe_beef;
pub(crate) const UNDEFINED: i32 = i32::MIN;
/// `NCCL_GIN_CONNECTION_FULL`.
pub(crate) const CONNECTION_FULL: i32 = 1;
/// `NCCL_WIN_COLL_SYMMETRIC`.
pub(crate) const WINDOW_SYMMETRIC: i32 = 1;

/// `ncclDevCommRequirements`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct DevCommRequirements {
    pub(crate) size: usize,
    pub(crate) magic: u32,
    pub(crate) version: u32,
    pub(crate) resources: *mut c_void,
    pub(crate) teams: *mut c_void,
    pub(crate) lsa_multimem: bool,
    pub(crate) barriers: i32,
    pub(crate) lsa_barriers: i32,
    pub(crate) rail_gin_barriers: i32,
    pub(crate) lsa_ll_blocks: i32,
    pub(crate) lsa_ll_slots: i32,
    pub(crate) gin_force_enable: bool,
    pub(crate) gin_contexts: i32,
    pub(crate) gin_signals: i32,
    pub(crate) gin_counters: i32,
    pub(crate) gin_connection: i32,
    pub(crate) gin_exclusive_contexts: bool,
    pub(crate) gin_queue_depth: i32,
    pub(crate) gin_traffic_class: i32,
    pub(crate) world_gin_barriers: i32,
    pub(crate) gin_strong_signals: bool,
    pub(crate) gin_va_signals: bool,
}

/// `ncclCommProperties`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct CommProperties {
    pub(crate) size: usize,
    pub(crate) magic: u32,
    pub(crate) version: u32,
    pub(crate) rank: i32,
    pub(crate) ranks: i32,
    pub(crate) cuda_device: i32,
    pub(crate) nvml_device: i32,
    pub(crate) device_api: bool,
    pub(crate) multimem: bool,
    pub(crate) gin_type: i32,
    pub(crate) lsa_teams: i32,
    pub(crate) host_rma: bool,
    pub(crate) railed_gin_type: i32,
}

/// `ncclDevComm`, as words. Only the fields below are read or written.
pub(crate) type DevComm = [u64; 30];

/// Offsets of 32-bit fields of `ncclDevComm`, in bytes.
pub(crate) mod field {
    pub(crate) const MAGIC: usize = 0;
    pub(crate) const VERSION: usize = 4;
    pub(crate) const RANK: usize = 8;
    pub(crate) const RANKS: usize = 12;
    pub(crate) const LSA_RANK: usize = 20;
    pub(crate) const LSA_SIZE: usize = 24;
    pub(crate) const SIGNALS: usize = 184;
    pub(crate) const COUNTERS: usize = 188;
    pub(crate) const CONTEXTS: usize = 200;
    /// Index of the word with the address of the flag that ends NCCL's waits. NCCL leaves it null in the communicators
    /// of programs.
    pub(crate) const ABORT_FLAG_WORD: usize = 208 / 8;
}

/// Returns a 32-bit field of a communicator.
pub(crate) fn read(dev_comm: &DevComm, offset: usize) -> u32 {
    let word = dev_comm[offset / 8];
    (word >> (8 * (offset % 8))) as u32
}

// As g++ has them with NCCL's headers: `tests/layout.rs` compares.
const _: () = {
    assert!(size_of::<DevCommRequirements>() == 96 && size_of::<CommProperties>() == 56);
    assert!(offset_of!(DevCommRequirements, barriers) == 36 && offset_of!(DevCommRequirements, gin_contexts) == 60);
    assert!(offset_of!(DevCommRequirements, gin_connection) == 72);
    assert!(offset_of!(DevCommRequirements, world_gin_barriers) == 88);
    assert!(offset_of!(DevCommRequirements, gin_va_signals) == 93);
    assert!(offset_of!(CommProperties, gin_type) == 36 && offset_of!(CommProperties, railed_gin_type) == 48);
    assert!(size_of::<DevComm>() == 240 && size_of::<DevComm>() <= gin_nccl_device::handle::DEV_COMM_BYTES);
};
