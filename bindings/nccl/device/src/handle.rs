// SPDX-License-Identifier: MIT OR Apache-2.0
//! The layouts that host and kernels share.

/// Version of these layouts, in words of the variable `gin_nccl_layout` of a module.
pub const LAYOUT_VERSION: u32 = 1;

/// Largest size of NCCL's `ncclDevComm` that fits, in bytes. Versions 2.30.4 to 2.32.3 have 240 or 248.
pub const DEV_COMM_BYTES: usize = 256;

/// A communicator, as the parameter of a kernel.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug)]
pub struct CommHandle {
    /// NCCL's `ncclDevComm`, in the layout of the bitcode that the kernel was linked with.
    pub dev_comm: [u64; DEV_COMM_BYTES / 8],
    /// Address of the host's status block in pinned memory: 8 words.
    pub host_status: u64,
    /// Address of the kernels' status block in pinned memory: 8 words.
    pub kernel_status: u64,
    /// Address of the copy of the kernels' status block in GPU memory: 8 words.
    pub kernel_status_copy: u64,
    /// Number of the rank.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// Number of the rank in its LSA team.
    pub lsa_rank: u32,
    /// Number of ranks of the LSA team.
    pub lsa_size: u32,
    /// Number of contexts.
    pub contexts: u32,
    /// Number of signals of each context.
    pub signals: u32,
    /// Number of counters of each context.
    pub counters: u32,
    /// Number of barriers of all ranks.
    pub barriers: u32,
    /// `1 << ncclGinType_t`: NCCL's back end that serves the communicator; 0 if none does.
    pub backend: u32,
    /// 0.
    pub reserved: u32,
}

/// A window, as the parameter of a kernel. All ranks have registered the same length.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WindowHandle {
    /// NCCL's `ncclWindow_t`: an address in GPU memory.
    pub window: u64,
    /// Address of the rank's own part.
    pub base: u64,
    /// Length of each rank's part in bytes.
    pub bytes: u64,
    /// World rank of the first rank of the LSA team.
    pub lsa_first: u32,
    /// Number of ranks of the LSA team.
    pub lsa_size: u32,
}

const _: () = assert!(size_of::<CommHandle>() == DEV_COMM_BYTES + 64 && size_of::<WindowHandle>() == 32);
