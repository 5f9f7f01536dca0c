// SPDX-License-Identifier: MIT OR Apache-2.0
//! The structures of NCCL 2.30.7's headers that the host passes or reads. `tests/layout.rs` compares them with the
//! headers.

use std::ffi::c_void;
use std::mem::size_of;

pub const MAGIC: u32 = 0xcafe_beef;
pub const UNDEFINED: i32 = i32::MIN;
/// `NCCL_GIN_CONNECTION_FULL`.
pub const CONNECTION_FULL: i32 = 1;
/// `NCCL_WIN_COLL_SYMMETRIC`.
pub const WINDOW_SYMMETRIC: i32 = 1;

/// `NCCL_WIN_REQUIRED_ALIGNMENT`, in bytes.
pub const ALIGNMENT: u64 = 4096;

/// `ncclDevCommRequirements`.
#[repr(C)]
#[derive(Debug)]
pub struct DevCommRequirements {
    pub size: usize,
    pub magic: u32,
    pub version: u32,
    pub resources: *mut c_void,
    pub teams: *mut c_void,
    pub lsa_multimem: bool,
    pub barriers: i32,
    pub lsa_barriers: i32,
    pub rail_gin_barriers: i32,
    pub lsa_ll_blocks: i32,
    pub lsa_ll_slots: i32,
    pub gin_force_enable: bool,
    pub gin_contexts: i32,
    pub gin_signals: i32,
    pub gin_counters: i32,
    pub gin_connection: i32,
    pub gin_exclusive_contexts: bool,
    pub gin_queue_depth: i32,
    pub gin_traffic_class: i32,
    pub world_gin_barriers: i32,
    pub gin_strong_signals: bool,
    pub gin_va_signals: bool,
}

/// `ncclCommProperties`.
#[repr(C)]
#[derive(Debug)]
pub struct CommProperties {
    pub size: usize,
    pub magic: u32,
    pub version: u32,
    pub rank: i32,
    pub ranks: i32,
    pub cuda_device: i32,
    pub nvml_device: i32,
    pub device_api: bool,
    pub multimem: bool,
    pub gin_type: i32,
    pub lsa_teams: i32,
    pub host_rma: bool,
    pub railed_gin_type: i32,
}

/// `ncclDevComm`, as words. Only the fields below are read or written.
pub type DevComm = [u64; 30];

/// Offsets of 32-bit fields of `ncclDevComm`, in bytes.
pub mod field {
    pub const MAGIC: usize = 0;
    pub const VERSION: usize = 4;
    pub const RANK: usize = 8;
    pub const RANKS: usize = 12;
    pub const LSA_RANK: usize = 20;
    pub const LSA_SIZE: usize = 24;
    pub const SIGNALS: usize = 184;
    pub const COUNTERS: usize = 188;
    pub const CONTEXTS: usize = 200;
    /// Index of the word with the address of the flag that ends NCCL's waits. NCCL leaves it null in the communicators
    /// of programs.
    pub const ABORT_FLAG_WORD: usize = 208 / 8;
}

/// Returns a 32-bit field of a communicator.
pub fn read(dev_comm: &DevComm, offset: usize) -> u32 {
    let word = dev_comm[offset / 8];
    (word >> (8 * (offset % 8))) as u32
}

const _: () = assert!(size_of::<DevComm>() <= gin_nccl_device::handle::DEV_COMM_BYTES);
