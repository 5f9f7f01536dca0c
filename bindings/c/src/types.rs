// SPDX-License-Identifier: MIT OR Apache-2.0
//! The types of the header, under their names in C.
#![allow(non_camel_case_types)]

use std::ffi::{c_char, c_void};

/// The version of the layouts that header, library and kernels share.
pub const GIN_ABI_VERSION: u32 = 14;
const _: () = assert!(GIN_ABI_VERSION == gin_abi::ABI_VERSION);

/// The bytes of a unique id, with the zero at its end.
pub const GIN_UNIQUE_ID_BYTES: usize = 256;

/// Bytes of names in `gin_fault_t`.
pub const GIN_FAULT_TEXT_BYTES: usize = 512;

/// `gin_fault_t::context` and `gin_fault_t::peer` if there is none.
pub const GIN_NONE: u32 = 0xffff_ffff;

/// No time limit, in milliseconds.
pub const GIN_FOREVER: u32 = 0xffff_ffff;

/// `gin_config_t::progress_threads` if the program carries out requests of kernels, by `gin_comm_progress`.
pub const GIN_PROGRESS_MANUAL: u32 = 0xffff_ffff;

/// The outcome of a call.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum gin_status_t {
    /// Success.
    GIN_OK = 0,
    /// An argument is null, misaligned, or past its limit, or ranks disagree about it.
    GIN_ERROR_ARGUMENT = 1,
    /// A handle is null, closed, of another kind, or of another process.
    GIN_ERROR_HANDLE = 2,
    /// The state of the object does not allow the call.
    GIN_ERROR_STATE = 3,
    /// Another call on the object, a kernel or a request is under way.
    GIN_ERROR_BUSY = 4,
    /// The communicator was aborted, or has a fault: `gin_comm_fault` describes it.
    GIN_ERROR_ENDED = 5,
    /// A time limit passed.
    GIN_ERROR_TIMEOUT = 6,
    /// No launcher started this process.
    GIN_ERROR_NO_JOB = 7,
    /// The ranks could not meet, or one was lost.
    GIN_ERROR_BOOTSTRAP = 8,
    /// The device or its driver reports an error.
    GIN_ERROR_DEVICE = 9,
    /// The network or a NIC reports an error.
    GIN_ERROR_NETWORK = 10,
    /// There is not enough memory.
    GIN_ERROR_MEMORY = 11,
    /// Program, library and kernel were built with different versions of the shared layouts.
    GIN_ERROR_ABI = 12,
    /// Nothing has this name.
    GIN_ERROR_NOT_FOUND = 13,
    /// Another rank failed in a collective call.
    GIN_ERROR_OTHER_RANK = 14,
    /// This process is the child of a fork.
    GIN_ERROR_FORK = 15,
    /// An error in gin itself.
    GIN_ERROR_INTERNAL = 16,
}

/// One rank of a job.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct gin_job_t {
    /// The number; 0 is null.
    pub id: u64,
}

/// One rank's member of a communicator.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct gin_comm_t {
    /// The number; 0 is null.
    pub id: u64,
}

/// One rank's part of a window.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct gin_window_t {
    /// The number; 0 is null.
    pub id: u64,
}

/// A stream.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct gin_stream_t {
    /// The number; 0 is null.
    pub id: u64,
}

/// Kernels that were loaded together.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct gin_module_t {
    /// The number; 0 is null.
    pub id: u64,
}

/// Captured work of a stream, which runs each time it is launched.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct gin_graph_t {
    /// The number; 0 is null.
    pub id: u64,
}

/// A kernel.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct gin_kernel_t {
    /// The number; 0 is null.
    pub id: u64,
}

/// The devices of a job.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum gin_device_kind_t {
    /// GPUs if the machine has any, else virtual GPUs.
    GIN_DEVICE_AUTO = 0,
    /// Virtual GPUs, which run on the CPU.
    GIN_DEVICE_VIRTUAL = 1,
    /// NVIDIA GPUs.
    GIN_DEVICE_CUDA = 2,
}

/// The network between ranks that do not reach each other by loads and stores.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum gin_network_t {
    /// Copies within a host.
    GIN_NETWORK_PEER = 0,
    /// RDMA NICs, through libibverbs.
    GIN_NETWORK_VERBS = 1,
    /// Any provider of libfabric, such as TCP.
    GIN_NETWORK_FABRIC = 2,
}

/// The way that operations of kernels take to the network.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum gin_backend_t {
    /// GDAKI if the GPUs of all ranks can drive a NIC, else the proxy.
    GIN_BACKEND_AUTO = 0,
    /// Threads of the host carry out the requests of kernels.
    GIN_BACKEND_PROXY = 1,
    /// GDAKI: kernels drive NICs.
    GIN_BACKEND_GDAKI = 2,
    /// The same with software NICs, for tests: the ranks of `gin_job_local`, on virtual GPUs.
    GIN_BACKEND_GDAKI_SOFT = 3,
}

/// The configuration of a job. `GIN_CONFIG_INIT` has the defaults.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gin_config_t {
    /// `sizeof(gin_config_t)`.
    pub size: u32,
    /// `GIN_ABI_VERSION` of the header.
    pub abi: u32,
    /// A `gin_device_kind_t`.
    pub device: u32,
    /// The number of the GPU; -1 for the rank's place on its host, modulo the number of GPUs.
    pub gpu: i32,
    /// A `gin_network_t`.
    pub network: u32,
    /// The ranks of an LSA team; 0 for the largest number that is possible.
    pub lsa_size: u32,
    /// 1 if all operations take the network, also to peers of the LSA team.
    pub network_only: u32,
    /// The time in milliseconds that all ranks have to join.
    pub joining_ms: u32,
    /// The time in milliseconds for which a collective call waits for ranks that are alive.
    pub collective_ms: u32,
    /// The number of threads that carry out requests of kernels, for all communicators of the job in this process; at
    /// most 256. 0 for a thread of its own for each communicator. `GIN_PROGRESS_MANUAL` for none: the program calls
    /// `gin_comm_progress`.
    pub progress_threads: u32,
    /// A `gin_backend_t`.
    pub backend: u32,
    /// 1 if communicators outlive the loss of a rank: waits for it end by their deadlines, all others go on.
    pub survive_losses: u32,
    /// The address at which this rank listens, as text; null for that of the default route.
    pub address: *const c_char,
    /// The NIC that kernels drive, by its name; null for the first that serves the rank's GPU. If it does not, GDAKI is
    /// not available.
    pub nic: *const c_char,
}

/// The name of a job that is not described by a launcher. Rank 0 makes it; it contains the job's secret.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gin_unique_id_t {
    /// Text that ends with a zero.
    pub text: [c_char; GIN_UNIQUE_ID_BYTES],
}

/// Gathers `bytes` bytes of each rank, by rank, into `all`. Returns 0 on success. All ranks call it together.
pub type gin_all_gather_t =
    Option<unsafe extern "C" fn(user: *mut c_void, own: *const c_void, bytes: usize, all: *mut c_void) -> i32>;

/// The size of a communicator. All ranks pass the same values. `GIN_REQUIREMENTS_INIT` has the defaults.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gin_requirements_t {
    /// `sizeof(gin_requirements_t)`.
    pub size: u32,
    /// The number of contexts, 1 to 256.
    pub contexts: u32,
    /// The number of signals of a context.
    pub signals: u32,
    /// The number of counters of a context.
    pub counters: u32,
    /// The number of requests in the queue of a context: a power of two.
    pub queue_depth: u32,
    /// The number of barriers over all ranks.
    pub world_barriers: u32,
    /// The number of barriers over the ranks with the same place in their LSA teams.
    pub rail_barriers: u32,
    /// The number of barriers over the LSA team.
    pub lsa_barriers: u32,
    /// The maximum number of windows registered at the same time.
    pub windows: u32,
    /// The maximum number of unfinished requests of one context to one peer.
    pub max_outstanding_per_peer: u32,
}

/// A fault that ended a communicator.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gin_fault_t {
    /// The rank that found it.
    pub rank: u32,
    /// The kind: see the table of faults in the guide.
    pub kind: u32,
    /// The operation.
    pub operation: u32,
    /// The context; `GIN_NONE` if there is none.
    pub context: u32,
    /// The peer; `GIN_NONE` if there is none.
    pub peer: u32,
    /// The kind of its subject: 0 nothing more, 1 a signal, 2 a counter, 3 a barrier, 4 a place in a window.
    pub subject: u32,
    /// The id of that.
    pub id: u32,
    /// Zero.
    pub reserved: u32,
    /// The offset in the window.
    pub offset: u64,
    /// The value waited for, or the limit exceeded.
    pub expected: u64,
    /// The value found instead.
    pub seen: u64,
    /// All of it as text that ends with a zero, cut if it is longer.
    pub text: [c_char; GIN_FAULT_TEXT_BYTES],
}

/// The statistics of a context since its communicator was created, summed over all peers.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct gin_stats_t {
    /// The requests accepted from the queue.
    pub accepted: u64,
    /// The finished requests, including failed ones.
    pub finished: u64,
    /// The failed requests.
    pub failed: u64,
    /// The puts from a window.
    pub puts: u64,
    /// The puts of a value.
    pub values: u64,
    /// The gets.
    pub gets: u64,
    /// The bytes of puts and values.
    pub put_bytes: u64,
    /// The bytes of gets.
    pub get_bytes: u64,
    /// The signals sent, with a put or alone.
    pub signals: u64,
    /// The messages posted to the network.
    pub posted: u64,
    /// The messages that the network has completed.
    pub completions: u64,
    /// The requests that held up the queue.
    pub stalls: u64,
    /// The messages for which the network first had no room.
    pub retries: u64,
    /// The maximum number of requests that were unfinished at a time.
    pub deepest: u64,
}

/// The shape of a launch.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gin_shape_t {
    /// The blocks in each direction.
    pub grid: [u32; 3],
    /// The threads of a block in each direction.
    pub block: [u32; 3],
    /// The bytes of dynamic shared memory of a block.
    pub dynamic_shared: u32,
    /// 1 to refuse the launch unless all blocks can be resident at once. Blocks that wait for each other, or for other
    /// ranks, need that.
    pub cooperative: u32,
}

/// One argument of a launch.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gin_arg_t {
    /// The value.
    pub data: *const c_void,
    /// Its size in bytes.
    pub bytes: usize,
}

/// A kernel in C, which the virtual GPU calls as each thread. `params[i]` points to argument `i` of the launch.
pub type gin_kernel_fn_t = Option<unsafe extern "C-unwind" fn(params: *const *const c_void)>;
