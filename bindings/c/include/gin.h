// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The host library of gin; docs/c.md is the page for users. cbindgen made this file from bindings/c/src: do not edit it.
//
// Every function returns a gin_status_t, except gin_last_error, gin_status_name, gin_version and gin_abi. After an error
// gin_last_error() returns the text, for the calling thread. An output is written only on success. Each handle is
// checked: a null, closed or foreign one is GIN_ERROR_HANDLE. A pointer is checked for null and alignment, and for nothing
// more; it must stay valid during the call.
//
// Any thread may call any function. While a call on a communicator waits for other ranks, other calls on it return
// GIN_ERROR_BUSY, except abort, check, fault and progress. A collective call is one that all ranks make together.
//
// No panic and no exception leaves the library. It installs no signal handler, except for virtual GPUs: that of SIGSEGV
// explains an overflow of a kernel's stack, and passes other faults on to the handler of the program; that of SIGQUIT
// prints what waits, and is not installed if the program handles or ignores the signal. In the child of a fork every call
// returns GIN_ERROR_FORK.

#pragma once

#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

/// The defaults of a `gin_config_t`.
#define GIN_CONFIG_INIT { sizeof(gin_config_t), GIN_ABI_VERSION, 0, -1, 0, 0, 0, 300000, GIN_FOREVER, 0, 0, 0, NULL, NULL }

/// The defaults of a `gin_requirements_t`.
#define GIN_REQUIREMENTS_INIT { sizeof(gin_requirements_t), 1, 16, 16, 256, 0, 0, 0, 64, 1024 }

/// The defaults of a `gin_ep_config_t`: 128 tokens, one slot, BF16, a deadline of a second. `experts`, `hidden` and
/// `topk` have none.
#define GIN_EP_CONFIG_INIT { sizeof(gin_ep_config_t), 0, 0, 0, 128, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1000 }

/// No memory.
#define GIN_MEMORY_NULL { NULL, 0 }

/// The defaults of a `gin_ep_tokens_t`: no token, ids of 32 bits.
#define GIN_EP_TOKENS_INIT \
    { sizeof(gin_ep_tokens_t), 0, 32, 0, GIN_MEMORY_NULL, GIN_MEMORY_NULL, GIN_MEMORY_NULL, GIN_MEMORY_NULL, \
      GIN_MEMORY_NULL, GIN_NULL }

/// The defaults of a `gin_ep_combine_t`: the received rows, sums from zero.
#define GIN_EP_COMBINE_INIT \
    { sizeof(gin_ep_combine_t), 0, GIN_MEMORY_NULL, GIN_MEMORY_NULL, GIN_MEMORY_NULL, GIN_MEMORY_NULL, GIN_NULL, 0, 0 }

/// The defaults of a `gin_ep_experts_t`: products return to the ranks of their tokens.
#define GIN_EP_EXPERTS_INIT \
    { sizeof(gin_ep_experts_t), 0, GIN_NULL, GIN_MEMORY_NULL, GIN_MEMORY_NULL, GIN_MEMORY_NULL }

/// The defaults of a `gin_ep_permuted_into_t`: the memory of gin.
#define GIN_EP_PERMUTED_INTO_INIT \
    { sizeof(gin_ep_permuted_into_t), 0, GIN_MEMORY_NULL, GIN_MEMORY_NULL, GIN_MEMORY_NULL, GIN_MEMORY_NULL }

/// The defaults of a `gin_ep_metadata_t`: nothing is stored.
#define GIN_EP_METADATA_INIT \
    { sizeof(gin_ep_metadata_t), 0, 32, 0, GIN_MEMORY_NULL, GIN_MEMORY_NULL, GIN_MEMORY_NULL, GIN_MEMORY_NULL, \
      GIN_MEMORY_NULL, GIN_MEMORY_NULL, GIN_MEMORY_NULL, GIN_MEMORY_NULL }

/// A null handle of any type.
#define GIN_NULL { 0 }

/// Returns the status of `call` from the calling function, if it is an error.
#define GIN_TRY(call) \
    do { \
        gin_status_t gin_try_status = (call); \
        if (gin_try_status != GIN_OK) return gin_try_status; \
    } while (0)


// The version of the layouts that header, library and kernels share.
#define GIN_ABI_VERSION 14

// The bytes of a unique id, with the zero at its end.
#define GIN_UNIQUE_ID_BYTES 256

// Bytes of names in `gin_fault_t`.
#define GIN_FAULT_TEXT_BYTES 512

// `gin_fault_t::context` and `gin_fault_t::peer` if there is none.
#define GIN_NONE 4294967295

// No time limit, in milliseconds.
#define GIN_FOREVER 4294967295

// `gin_config_t::progress_threads` if the program carries out requests of kernels, by `gin_comm_progress`.
#define GIN_PROGRESS_MANUAL 4294967295

// Peers may raise signals at words of the window.
#define GIN_WINDOW_SIGNALS 1

// The outcome of a call.
enum gin_status_t
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // Success.
  GIN_OK = 0,
  // An argument is null, misaligned, or past its limit, or ranks disagree about it.
  GIN_ERROR_ARGUMENT = 1,
  // A handle is null, closed, of another kind, or of another process.
  GIN_ERROR_HANDLE = 2,
  // The state of the object does not allow the call.
  GIN_ERROR_STATE = 3,
  // Another call on the object, a kernel or a request is under way.
  GIN_ERROR_BUSY = 4,
  // The communicator was aborted, or has a fault: `gin_comm_fault` describes it.
  GIN_ERROR_ENDED = 5,
  // A time limit passed.
  GIN_ERROR_TIMEOUT = 6,
  // No launcher started this process.
  GIN_ERROR_NO_JOB = 7,
  // The ranks could not meet, or one was lost.
  GIN_ERROR_BOOTSTRAP = 8,
  // The device or its driver reports an error.
  GIN_ERROR_DEVICE = 9,
  // The network or a NIC reports an error.
  GIN_ERROR_NETWORK = 10,
  // There is not enough memory.
  GIN_ERROR_MEMORY = 11,
  // Program, library and kernel were built with different versions of the shared layouts.
  GIN_ERROR_ABI = 12,
  // Nothing has this name.
  GIN_ERROR_NOT_FOUND = 13,
  // Another rank failed in a collective call.
  GIN_ERROR_OTHER_RANK = 14,
  // This process is the child of a fork.
  GIN_ERROR_FORK = 15,
  // An error in gin itself.
  GIN_ERROR_INTERNAL = 16,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum gin_status_t gin_status_t;
#else
typedef uint32_t gin_status_t;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// The way that operations of kernels take to the network.
enum gin_backend_t
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // GDAKI if the GPUs of all ranks can drive a NIC, else the proxy.
  GIN_BACKEND_AUTO = 0,
  // Threads of the host carry out the requests of kernels.
  GIN_BACKEND_PROXY = 1,
  // GDAKI: kernels drive NICs.
  GIN_BACKEND_GDAKI = 2,
  // The same with software NICs, for tests: the ranks of `gin_job_local`, on virtual GPUs.
  GIN_BACKEND_GDAKI_SOFT = 3,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum gin_backend_t gin_backend_t;
#else
typedef uint32_t gin_backend_t;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// The devices of a job.
enum gin_device_kind_t
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // GPUs if the machine has any, else virtual GPUs.
  GIN_DEVICE_AUTO = 0,
  // Virtual GPUs, which run on the CPU.
  GIN_DEVICE_VIRTUAL = 1,
  // NVIDIA GPUs.
  GIN_DEVICE_CUDA = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum gin_device_kind_t gin_device_kind_t;
#else
typedef uint32_t gin_device_kind_t;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// The cause of a report of the kernels.
enum gin_ep_code_t
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // A rank did not send or return its rows in time. The group continues without it.
  GIN_EP_SILENT = 1,
  // An id is not less than the number of experts. The token was dropped.
  GIN_EP_UNKNOWN_EXPERT = 2,
  // A number in device memory is past the tokens of the group, or negative. The other tokens were dropped.
  GIN_EP_TOO_MANY_TOKENS = 3,
  // The communicator was aborted, or has a fault.
  GIN_EP_STOPPED = 4,
  // A layout has more rows than room. The other rows have no place.
  GIN_EP_TOO_MANY_ROWS = 5,
  // Rows could not be posted to the network in time. The group continues without the rank.
  GIN_EP_UNSENT = 6,
  // A rank receives more rows than `max_rows`. The other rows were not sent.
  GIN_EP_FULL = 7,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum gin_ep_code_t gin_ep_code_t;
#else
typedef uint32_t gin_ep_code_t;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// The elements of rows.
enum gin_ep_element_t
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // BF16, there and back.
  GIN_EP_BF16 = 0,
  // IEEE's binary16, there and back.
  GIN_EP_F16 = 1,
  // FP32, there and back.
  GIN_EP_F32 = 2,
  // BF16, which the dispatch quantises to FP8 (E4M3) with an FP32 scale for each 128 elements. Returned rows are
  // BF16.
  GIN_EP_E4M3_F32 = 3,
  // The same with FP32 scales that are powers of two.
  GIN_EP_E4M3_F32_POWERS = 4,
  // The same powers of two as UE8M0, one byte each.
  GIN_EP_E4M3_UE8M0 = 5,
  // Rows of `row_bytes` bytes, which are copied, with scales of `scale_bytes` bytes. Returned rows are BF16.
  GIN_EP_OPAQUE = 6,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum gin_ep_element_t gin_ep_element_t;
#else
typedef uint32_t gin_ep_element_t;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// A layout of received rows.
enum gin_ep_layout_t
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // Rank-major: one row for each received row, by source and token, without gaps.
  GIN_EP_FLAT = 0,
  // `[expert][source][token]`: one row for each id whose expert is on this rank, in zones with room for all tokens.
  GIN_EP_EXPERT_MAJOR_PADDED = 1,
  // Zones of experts, one row for each id, by source, token and position of the id. A zone begins at a multiple of
  // `align` rows; zeros fill the gaps.
  GIN_EP_EXPERT_MAJOR_PACKED = 2,
  // The places of packed rows without gaps, and for each place its received row. No row is copied.
  GIN_EP_EXPERT_MAJOR_INDICES = 3,
  // `[expert][row]`: one row for each id whose expert is on this rank, without gaps, by source, token and position
  // of the id. The zone of an expert has room for all rows that a rank may receive. Scales are columns.
  GIN_EP_EXPERT_MAJOR_FIXED = 4,
  // `[source][row]`: one row for each received row, by token, in zones with room for all tokens of a rank.
  GIN_EP_RANK_MAJOR_PADDED = 5,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum gin_ep_layout_t gin_ep_layout_t;
#else
typedef uint32_t gin_ep_layout_t;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// The network between ranks that do not reach each other by loads and stores.
enum gin_network_t
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // Copies within a host.
  GIN_NETWORK_PEER = 0,
  // RDMA NICs, through libibverbs.
  GIN_NETWORK_VERBS = 1,
  // Any provider of libfabric, such as TCP.
  GIN_NETWORK_FABRIC = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum gin_network_t gin_network_t;
#else
typedef uint32_t gin_network_t;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// The configuration of a job. `GIN_CONFIG_INIT` has the defaults.
typedef struct gin_config_t {
  // `sizeof(gin_config_t)`.
  uint32_t size;
  // `GIN_ABI_VERSION` of the header.
  uint32_t abi;
  // A `gin_device_kind_t`.
  uint32_t device;
  // The number of the GPU; -1 for the rank's place on its host, modulo the number of GPUs.
  int32_t gpu;
  // A `gin_network_t`.
  uint32_t network;
  // The ranks of an LSA team; 0 for the largest number that is possible.
  uint32_t lsa_size;
  // 1 if all operations take the network, also to peers of the LSA team.
  uint32_t network_only;
  // The time in milliseconds that all ranks have to join.
  uint32_t joining_ms;
  // The time in milliseconds for which a collective call waits for ranks that are alive.
  uint32_t collective_ms;
  // The number of threads that carry out requests of kernels, for all communicators of the job in this process; at
  // most 256. 0 for a thread of its own for each communicator. `GIN_PROGRESS_MANUAL` for none: the program calls
  // `gin_comm_progress`.
  uint32_t progress_threads;
  // A `gin_backend_t`.
  uint32_t backend;
  // 1 if communicators outlive the loss of a rank: waits for it end by their deadlines, all others go on.
  uint32_t survive_losses;
  // The address at which this rank listens, as text; null for that of the default route.
  const char *address;
  // The NIC that kernels drive, by its name; null for the first that serves the rank's GPU. If it does not, GDAKI is
  // not available.
  const char *nic;
} gin_config_t;

// The name of a job that is not described by a launcher. Rank 0 makes it; it contains the job's secret.
typedef struct gin_unique_id_t {
  // Text that ends with a zero.
  char text[GIN_UNIQUE_ID_BYTES];
} gin_unique_id_t;

// One rank of a job.
typedef struct gin_job_t {
  // The number; 0 is null.
  uint64_t id;
} gin_job_t;

// Gathers `bytes` bytes of each rank, by rank, into `all`. Returns 0 on success. All ranks call it together.
typedef int32_t (*gin_all_gather_t)(void *user, const void *own, uintptr_t bytes, void *all);

// The size of a communicator. All ranks pass the same values. `GIN_REQUIREMENTS_INIT` has the defaults.
typedef struct gin_requirements_t {
  // `sizeof(gin_requirements_t)`.
  uint32_t size;
  // The number of contexts, 1 to 256.
  uint32_t contexts;
  // The number of signals of a context.
  uint32_t signals;
  // The number of counters of a context.
  uint32_t counters;
  // The number of requests in the queue of a context: a power of two.
  uint32_t queue_depth;
  // The number of barriers over all ranks.
  uint32_t world_barriers;
  // The number of barriers over the ranks with the same place in their LSA teams.
  uint32_t rail_barriers;
  // The number of barriers over the LSA team.
  uint32_t lsa_barriers;
  // The maximum number of windows registered at the same time.
  uint32_t windows;
  // The maximum number of unfinished requests of one context to one peer.
  uint32_t max_outstanding_per_peer;
} gin_requirements_t;

// One rank's member of a communicator.
typedef struct gin_comm_t {
  // The number; 0 is null.
  uint64_t id;
} gin_comm_t;

// Communicator handle: a kernel parameter, passed by value.
//
// The device API wraps it as `gin_device::Comm`.
typedef struct gin_device_comm_t {
  // `crate::ABI_VERSION` of the host that created it.
  uint32_t abi;
  // A `BackendKind`.
  uint32_t backend;
  // World rank of this rank.
  uint32_t rank;
  // Number of ranks in the world.
  uint32_t ranks;
  // This rank's rank in the LSA team, which holds the ranks that reach each other by loads and stores.
  uint32_t lsa_rank;
  // Size of the LSA team; divides `ranks`.
  uint32_t lsa_size;
  // Number of contexts.
  uint32_t contexts;
  // Number of signals per context that a user may name. Higher ids belong to barriers.
  uint32_t signals;
  // Number of counters per context.
  uint32_t counters;
  // Number of entries of the window table.
  uint32_t windows;
  // `CAP_*` bits.
  uint32_t capabilities;
  // `ENGINE_*` bits: the words that each signal has.
  uint32_t engines;
  // Number of barriers over the world team. Their signals start at id `signals`.
  uint32_t world_barriers;
  // Number of barriers over the rail team. Their signals follow those of the world team.
  uint32_t rail_barriers;
  // Number of barriers over the LSA team. Their signals follow those of the rail team.
  uint32_t lsa_barriers;
  // 1 if a reported fault must stop the kernel at once (`trap`), for debugging; else 0.
  uint32_t trap_on_fault;
  // `contexts` if `backend` is the proxy, else 0. One comparison checks both a context's number and its back end.
  uint32_t proxy_contexts;
  // `signals` if `capabilities` has `CAP_STRONG_SIGNALS`, else 0. One comparison checks a strong signal.
  uint32_t strong_signals;
  // World rank of the first member of the LSA team.
  uint32_t lsa_first;
  // Number of ranks from `lsa_first` on that operations reach by loads and stores: `lsa_size`, or 0 if the
  // communicator has no such route. One comparison selects the route to a peer.
  uint32_t lsa_reach;
  // Table of `ContextData`, `contexts` long, in GPU memory.
  uint64_t context_table;
  // Table of `WindowData`, `windows` long, in GPU memory.
  uint64_t window_table;
  // `StatusBlock` in pinned host memory. Only the host writes it.
  uint64_t host_status;
  // `StatusBlock` in pinned host memory. Only this rank's kernels write it, once.
  uint64_t kernel_status;
  // `StatusBlock` in GPU memory: the copy of `kernel_status` that kernels poll. Its word is 0 for none, 1 while a
  // thread writes the record, 2 once the record is valid.
  uint64_t kernel_status_copy;
  // One word per barrier (world, rail, LSA, in the order of their signals) in GPU memory: the epoch. Its top bit
  // says that the barrier is broken.
  uint64_t barrier_state;
  // For each context, `ranks` addresses: the address of a rank's `signal_gpu` of that context, 0 if that rank cannot
  // be reached. In GPU memory; 0 if no rank can be reached. The table is here, not in `ContextData`, so that a
  // signal raised by loads and stores finds its word in one memory access.
  uint64_t peer_signals;
  // Table of `QueuePairData`(crate::gdaki::QueuePairData), `ranks` for each context, in GPU memory; 0 unless
  // kernels drive a NIC.
  uint64_t queue_pairs;
  // Keys of windows, in GPU memory; 0 unless kernels drive a NIC. For each window: `ranks` remote keys of the ranks'
  // parts, then the local key of this rank's part. Each key is in the lower half of its word, big-endian, as entries
  // hold it. The upper half is the address of the part's first byte in its region, less than a host page.
  uint64_t window_keys;
  // `contexts` if kernels drive a NIC, else 0.
  uint32_t gdaki_contexts;
  // Zero.
  uint32_t reserved;
  // Address of a copy of this handle, in GPU memory. Functions that a kernel calls take it instead of the handle.
  uint64_t copy;
} gin_device_comm_t;

// A fault that ended a communicator.
typedef struct gin_fault_t {
  // The rank that found it.
  uint32_t rank;
  // The kind: see the table of faults in the guide.
  uint32_t kind;
  // The operation.
  uint32_t operation;
  // The context; `GIN_NONE` if there is none.
  uint32_t context;
  // The peer; `GIN_NONE` if there is none.
  uint32_t peer;
  // The kind of its subject: 0 nothing more, 1 a signal, 2 a counter, 3 a barrier, 4 a place in a window.
  uint32_t subject;
  // The id of that.
  uint32_t id;
  // Zero.
  uint32_t reserved;
  // The offset in the window.
  uint64_t offset;
  // The value waited for, or the limit exceeded.
  uint64_t expected;
  // The value found instead.
  uint64_t seen;
  // All of it as text that ends with a zero, cut if it is longer.
  char text[GIN_FAULT_TEXT_BYTES];
} gin_fault_t;

// The statistics of a context since its communicator was created, summed over all peers.
typedef struct gin_stats_t {
  // The requests accepted from the queue.
  uint64_t accepted;
  // The finished requests, including failed ones.
  uint64_t finished;
  // The failed requests.
  uint64_t failed;
  // The puts from a window.
  uint64_t puts;
  // The puts of a value.
  uint64_t values;
  // The gets.
  uint64_t gets;
  // The bytes of puts and values.
  uint64_t put_bytes;
  // The bytes of gets.
  uint64_t get_bytes;
  // The signals sent, with a put or alone.
  uint64_t signals;
  // The messages posted to the network.
  uint64_t posted;
  // The messages that the network has completed.
  uint64_t completions;
  // The requests that held up the queue.
  uint64_t stalls;
  // The messages for which the network first had no room.
  uint64_t retries;
  // The maximum number of requests that were unfinished at a time.
  uint64_t deepest;
} gin_stats_t;

// One rank's part of a window.
typedef struct gin_window_t {
  // The number; 0 is null.
  uint64_t id;
} gin_window_t;

// Window handle: a kernel parameter, passed by value.
//
// The device API wraps it as `gin_device::Window<T>`.
typedef struct gin_device_window_t {
  // Address of this rank's memory.
  uint64_t base;
  // Length of this rank's memory in bytes.
  uint64_t own_length;
  // Length in bytes that every rank registered at least; 0 is always valid. Kernels look up ranges past it in the
  // table.
  uint64_t least_length;
  // Address of the window's `WindowData`.
  uint64_t data;
  // Index in the window table, which descriptors carry.
  uint32_t id;
  // `WINDOW_*` bits.
  uint32_t flags;
  // Distance between the parts of neighbouring ranks of the LSA team, in units of `1 << STRIDE_SHIFT` bytes. The
  // part of rank `p` starts at `base + ((p - rank) * stride << STRIDE_SHIFT)`, in wrapping arithmetic. 0 if the
  // parts have unrelated addresses, which the table holds.
  uint32_t stride;
  // World rank of this rank.
  uint32_t rank;
  // World rank of the first member of the LSA team.
  uint32_t lsa_first;
  // Number of ranks from `lsa_first` on whose parts have that distance: the LSA team's size, or 0 if `stride` is 0.
  uint32_t lsa_reach;
} gin_device_window_t;

// A stream.
typedef struct gin_stream_t {
  // The number; 0 is null.
  uint64_t id;
} gin_stream_t;

// Memory of the program on the rank's device: of the GPU, or pinned; on a virtual GPU any memory of the process. A
// null address is no memory.
typedef struct gin_memory_t {
  // The address.
  void *data;
  // The length in bytes.
  uint64_t bytes;
} gin_memory_t;

// Kernels that were loaded together.
typedef struct gin_module_t {
  // The number; 0 is null.
  uint64_t id;
} gin_module_t;

// A kernel.
typedef struct gin_kernel_t {
  // The number; 0 is null.
  uint64_t id;
} gin_kernel_t;

// A kernel in C, which the virtual GPU calls as each thread. `params[i]` points to argument `i` of the launch.
typedef void (*gin_kernel_fn_t)(const void *const *params);

// The shape of a launch.
typedef struct gin_shape_t {
  // The blocks in each direction.
  uint32_t grid[3];
  // The threads of a block in each direction.
  uint32_t block[3];
  // The bytes of dynamic shared memory of a block.
  uint32_t dynamic_shared;
  // 1 to refuse the launch unless all blocks can be resident at once. Blocks that wait for each other, or for other
  // ranks, need that.
  uint32_t cooperative;
} gin_shape_t;

// One argument of a launch.
typedef struct gin_arg_t {
  // The value.
  const void *data;
  // Its size in bytes.
  uintptr_t bytes;
} gin_arg_t;

// Captured work of a stream, which runs each time it is launched.
typedef struct gin_graph_t {
  // The number; 0 is null.
  uint64_t id;
} gin_graph_t;

// The sizes of a group. All ranks pass the same values. `GIN_EP_CONFIG_INIT` has the defaults.
typedef struct gin_ep_config_t {
  // `sizeof(gin_ep_config_t)`.
  uint32_t size;
  // The number of experts of all ranks, 1 to 65536. Each rank has `ceil(experts / ranks)` of them, in order.
  uint32_t experts;
  // The number of elements of a row.
  uint32_t hidden;
  // The number of ids of a token, 1 to 32.
  uint32_t topk;
  // The maximum number of tokens of a rank's dispatch, 1 to 65536.
  uint32_t tokens;
  // The number of slots, 1 to 64. Each has separate memory and at most its part of the GPU.
  uint32_t slots;
  // A `gin_ep_element_t`.
  uint32_t element;
  // The bytes of a row of `GIN_EP_OPAQUE`; 0 for other elements.
  uint32_t row_bytes;
  // The bytes of the scales of such a row; 0 if it has none.
  uint32_t scale_bytes;
  // 1 if one row returns for each id, which the source multiplies by weights and adds up; 0 if one row returns for
  // each rank.
  uint32_t combine_at_source;
  // 1 if the returned row of each rank has FP32 elements, in place of BF16.
  uint32_t combine_f32;
  // The rows of the one region that all sources share; 0 if each source has a region for `tokens` rows.
  uint32_t max_rows;
  // The maximum number of SMs that a kernel takes; 0 for all.
  uint32_t sms;
  // The number of blocks of a kernel; 0 for as many as have work and are resident at once.
  uint32_t grid;
  // The threads of a block, a multiple of 32; 0 for the default.
  uint32_t threads;
  // The time in milliseconds that a rank waits for another before it continues without it. `GIN_FOREVER` for no
  // limit but an abort or a fault.
  uint32_t deadline_ms;
} gin_ep_config_t;

// The ranks of a communicator, with the memory for rows of tokens.
typedef struct gin_ep_group_t {
  // The number; 0 is null.
  uint64_t id;
} gin_ep_group_t;

// An error of a group's kernels. Group and communicator continue.
typedef struct gin_ep_report_t {
  // The slot.
  uint32_t slot;
  // A `gin_ep_code_t`.
  uint32_t code;
  // The rank that it concerns; `GIN_NONE` if there is none.
  uint32_t rank;
  // Zero.
  uint32_t reserved;
  // The id of the unknown expert, or the expert of a full zone; else 0.
  uint64_t expert;
  // The value that the kernel saw.
  uint64_t seen;
  // The value that it expected, or the limit.
  uint64_t limit;
  // All of it as text that ends with a zero.
  char text[GIN_FAULT_TEXT_BYTES];
} gin_ep_report_t;

// Room for one dispatch at a time. The slots of a group are independent.
typedef struct gin_ep_slot_t {
  // The number; 0 is null.
  uint64_t id;
} gin_ep_slot_t;

// The routing of tokens, counted once for several dispatches of the same ids.
typedef struct gin_ep_plan_t {
  // The number; 0 is null.
  uint64_t id;
} gin_ep_plan_t;

// The tokens of a rank's dispatch. `GIN_EP_TOKENS_INIT` has the defaults.
//
// The kernels use the memory, so it stays valid and unchanged until the dispatch and its combine have run.
typedef struct gin_ep_tokens_t {
  // `sizeof(gin_ep_tokens_t)`.
  uint32_t size;
  // The number of tokens; 0 if `count_at` or `plan` has it.
  uint32_t count;
  // The bits of an id: 32 or 64.
  uint32_t id_bits;
  // Zero.
  uint32_t reserved;
  // A row for each token: elements of the group, or BF16 if the dispatch quantises. Aligned to 16 bytes.
  struct gin_memory_t rows;
  // `topk` signed ids for each token. A negative id selects no expert.
  struct gin_memory_t ids;
  // An FP32 weight for each id, which the receiving ranks get with the rows; null if all are 1.
  struct gin_memory_t weights;
  // The scales of rows of `GIN_EP_OPAQUE`; null if the group's rows have none.
  struct gin_memory_t scales;
  // A word of 32 bits with the number of tokens, which the kernels read; null if `count` has the number.
  struct gin_memory_t count_at;
  // A plan of the same ids, with its number of tokens; null for none.
  struct gin_ep_plan_t plan;
} gin_ep_tokens_t;

// Memory for received rows in a layout.
typedef struct gin_ep_permuted_t {
  // The number; 0 is null.
  uint64_t id;
} gin_ep_permuted_t;

// Memory of the program for the metadata of rows in a layout. Words have 32 bits. `GIN_EP_METADATA_INIT` has the
// defaults: all null, which stores nothing.
typedef struct gin_ep_metadata_t {
  // `sizeof(gin_ep_metadata_t)`.
  uint32_t size;
  // The number of this rank's first expert in `experts`.
  uint32_t first_expert;
  // The bits of a word of `experts`: 32 or 64.
  uint32_t id_bits;
  // Zero.
  uint32_t reserved;
  // `[row][topk]` of a rank-major layout: the numbers of the row's experts, -1 for an expert of another rank.
  struct gin_memory_t experts;
  // The FP32 weights: `[row][topk]` of a rank-major layout, with 0 where the expert is -1; `[row]` of an
  // expert-major one.
  struct gin_memory_t weights;
  // `[row][scale]`. The bytes of a row's scales are a multiple of 4.
  struct gin_memory_t scales;
  // `[row]`: the number of the row's token at its source.
  struct gin_memory_t tokens;
  // The number of rows from each source in a rank-major layout, of each expert of this rank in an expert-major one.
  struct gin_memory_t counts;
  // The number of the first row of each expert's zone, in a packed or fixed layout.
  struct gin_memory_t offsets;
  // The number of rows of each expert's zone with gaps, in a packed or fixed layout.
  struct gin_memory_t zones;
  // The number of rows with gaps: one word.
  struct gin_memory_t total;
} gin_ep_metadata_t;

// The rows that a combine returns, and their sums. `GIN_EP_COMBINE_INIT` has the defaults.
//
// | `permuted` | `rows` | returned rows |
// | --- | --- | --- |
// | null | null | the received rows, which the experts have replaced; with `returned`, the products that have returned |
// | null | memory | rows in the places of the received rows, one for each id with `combine_at_source` |
// | layout | null | the rows of the layout, which the experts have replaced |
// | layout | memory | a row in the place of each row of the layout |
typedef struct gin_ep_combine_t {
  // `sizeof(gin_ep_combine_t)`.
  uint32_t size;
  // 1 to add to the present value of the output.
  uint32_t accumulate;
  // The sums: a row for each token. Aligned to 16 bytes.
  struct gin_memory_t output;
  // An FP32 weight for each id, by which the rows of a group with `combine_at_source` are multiplied; null for sums
  // without weights.
  struct gin_memory_t weights;
  // A row for each token, from which its sum starts; null for zeros. Aligned to 16 bytes.
  struct gin_memory_t bias;
  // Memory of the returned rows, as in the table. Aligned to 16 bytes.
  struct gin_memory_t rows;
  // The layout of the returned rows, as in the table.
  struct gin_ep_permuted_t permuted;
  // 1 if products have returned by `gin_ep_multiply` or `gin_ep_receive_multiply`, else 0.
  uint32_t returned;
  // Zero.
  uint32_t reserved;
} gin_ep_combine_t;

// Received rows of a slot: a parameter of kernels, passed by value. `gin_ep.cuh` has functions that read it.
//
// Each address is of device memory. Rows and metadata have two buffers: calls alternate, and a captured one keeps its
// buffer.
typedef struct gin_device_ep_received_t {
  // Address of a word of 64 bits. Its lowest bit is the number of the last dispatch's buffer.
  uint64_t last_use;
  // Address of the number of rows from each source: words of 64 bits, for each buffer.
  uint64_t counts[2];
  // Address of the first row from source 0, for each buffer.
  uint64_t rows[2];
  // Address of the first row's metadata: its token, `topk` experts, `topk` weights, scales. For each buffer.
  uint64_t metadata[2];
  // Address of words of 64 bits, whose lower half is the number of the first row from each source. 0 if each
  // source has a region.
  uint64_t offsets;
  // Bytes from the region of a source to the next one; 0 if all sources share a region.
  uint64_t source_bytes;
  // Bytes from the metadata of a source to the next one; 0 if all sources share a region.
  uint64_t source_metadata_bytes;
  // Bytes from a row to the next one.
  uint32_t row_pitch;
  // Bytes from the metadata of a row to the next one.
  uint32_t metadata_pitch;
  // Offset of the scales in the metadata of a row.
  uint32_t scales_at;
  // The number of ids of a token.
  uint32_t topk;
  // The number of ranks.
  uint32_t ranks;
  // Zero.
  uint32_t reserved;
} gin_device_ep_received_t;

// Memory of the program in which kernels store a layout, in place of gin's memory. `GIN_EP_PERMUTED_INTO_INIT` has the
// defaults: all null, which keeps gin's memory.
typedef struct gin_ep_permuted_into_t {
  // `sizeof(gin_ep_permuted_into_t)`.
  uint32_t size;
  // Zero.
  uint32_t reserved;
  // The rows, aligned to 16 bytes.
  struct gin_memory_t rows;
  // The scales of fixed zones, aligned to 4 bytes.
  struct gin_memory_t scales;
  // The tokens of fixed zones, aligned to 4 bytes.
  struct gin_memory_t tokens;
  // The counts, aligned to 8 bytes.
  struct gin_memory_t counts;
} gin_ep_permuted_into_t;

// The memory of received rows in a layout. Kernels of the program use it after the call that fills it, in the order of
// the stream.
typedef struct gin_ep_permuted_memory_t {
  // `capacity` rows; null if rows are not copied, or the layout has no memory for them.
  struct gin_memory_t rows;
  // `[expert][word][row]` of fixed zones: word `w` of 4 bytes of a row's scales; null if there are none.
  struct gin_memory_t scales;
  // A word of 32 bits for each row of fixed zones: the number of the row's token at its source; null if there is
  // none.
  struct gin_memory_t tokens;
  // A word of 32 bits for each row: `source << 21 | row << 5 | k`, the source, the received row and the position of
  // its id; all ones for a gap. In a padded or fixed layout only rows below the counts have it.
  struct gin_memory_t source_info;
  // The words of 32 bits that `gin_ep_permuted_counts` copies.
  struct gin_memory_t counts;
  // The maximum number of rows.
  uint32_t capacity;
  // The bytes of a row.
  uint32_t row_bytes;
} gin_ep_permuted_memory_t;

// The kernel of products of rows in a layout.
typedef struct gin_ep_grouped_t {
  // The number; 0 is null.
  uint64_t id;
} gin_ep_grouped_t;

// The factors of the experts' products. `GIN_EP_EXPERTS_INIT` has the defaults.
typedef struct gin_ep_experts_t {
  // `sizeof(gin_ep_experts_t)`.
  uint32_t size;
  // Zero.
  uint32_t reserved;
  // The layout of the rows: packed, expert-major, or indices.
  struct gin_ep_permuted_t permuted;
  // BF16 rows of inner elements, in the places of the layout. Aligned to 16 bytes.
  struct gin_memory_t rows;
  // BF16 weights of a linear layer for each expert of this rank: a row of inner elements for each element of a
  // product. Aligned to 16 bytes.
  struct gin_memory_t weights;
  // Memory for the products, in the places of the layout; null if they return to the ranks of their tokens. Aligned
  // to 16 bytes.
  struct gin_memory_t products;
} gin_ep_experts_t;

// The kernel of products of rows as they arrive.
typedef struct gin_ep_overlapped_t {
  // The number; 0 is null.
  uint64_t id;
} gin_ep_overlapped_t;

// A registered window, as one rank sees it.
typedef struct gin_device_window_entry_t {
  // 1 while registered, else 0.
  uint32_t active;
  // `WINDOW_*` bits.
  uint32_t flags;
  // Address of this rank's memory.
  uint64_t base;
  // Length of this rank's memory in bytes.
  uint64_t length;
  // Address of one word per world rank: its length in bytes; GPU memory.
  uint64_t lengths;
  // Address of one word per world rank: the device address of its memory, 0 if it cannot be reached; GPU memory. 0
  // if no other rank can be reached.
  uint64_t peers;
  // Plane of signal words that GPUs raise, one for each 8 bytes of the window; 0 if there is none.
  uint64_t va_gpu;
  // Plane of signal words that CPU threads raise, one for each 8 bytes of the window; pinned host memory; 0 if there
  // is none.
  uint64_t va_cpu;
  // Plane of the words that accompany signals: `NEAR_WORDS` words for each 8 bytes of the window, of which the
  // third is the baseline; GPU memory. 0 if the window takes no signals.
  uint64_t va_near;
  // Address of one word per world rank: the device address of its `va_gpu`; GPU memory. 0 if there is none.
  uint64_t peer_va_gpu;
  // `WindowHandle::stride`.
  uint32_t stride;
  // Zero.
  uint32_t reserved;
} gin_device_window_entry_t;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Returns the text of the last error of the calling thread; empty if it had none. The text belongs to gin, and lives
// until the thread's next call of gin that fails.
const char *gin_last_error(void);

// Returns the name of a status code, such as `GIN_ERROR_HANDLE`. The text lives for ever.
const char *gin_status_name(uint32_t status);

// Returns the version of the library, such as `0.1.0`. The text lives for ever.
const char *gin_version(void);

// Returns the library's version of the layouts that header, library and kernels share.
uint32_t gin_abi(void);

// Returns an error if a header, or device functions, have another version of the shared layouts than the library.
//
// Pass `GIN_ABI_VERSION`. Functions that take a `gin_config_t` check it too.
gin_status_t gin_check_abi(uint32_t abi);

// Makes the id of a new job, and listens for its ranks. The same process then joins as rank 0.
//
// Give the id to the other ranks by a way that keeps it secret: a process that knows it can join. Not collective.
gin_status_t gin_unique_id_create(const struct gin_config_t *config,
                                  struct gin_unique_id_t *id);

// Joins a job by its id, as one rank of `ranks`, each of which is a process. Waits for all ranks.
//
// The caller owns the handle, and closes it with `gin_job_close`.
gin_status_t gin_job_join(const struct gin_config_t *config,
                          const struct gin_unique_id_t *id,
                          uint32_t rank,
                          uint32_t ranks,
                          struct gin_job_t *job);

// Joins a running job as one of the ranks that its ranks name in `gin_job_grow`; `ranks` is the number after that.
// Waits for that call and for all ranks. `id` is that of `gin_job_id`, or of the first job as long as its rank 0 is a
// rank. A process with variables of a launcher joins by `gin_job_from_env` with `GIN_JOIN=1`.
//
// The caller owns the handle, and closes it with `gin_job_close`.
gin_status_t gin_job_join_running(const struct gin_config_t *config,
                                  const struct gin_unique_id_t *id,
                                  uint32_t rank,
                                  uint32_t ranks,
                                  struct gin_job_t *job);

// Joins the job for which a launcher started this process: `gin launch`, torchrun, Open MPI or Slurm. Waits for all
// ranks. Without a launcher it is `GIN_ERROR_NO_JOB`.
//
// The caller owns the handle, and closes it with `gin_job_close`.
gin_status_t gin_job_from_env(const struct gin_config_t *config,
                              struct gin_job_t *job);

// Makes a job over the caller's own exchange of messages, such as MPI's all-gather or a store of torch. Waits for all
// ranks.
//
// gin calls `all_gather` once, on the calling thread, to hand out the id that rank 0 makes; all further messages take
// gin's own encrypted connections. So gin finds lost ranks as in any other job.
//
// The caller owns the handle, and closes it with `gin_job_close`.
//
// The caller ensures: `all_gather` does as its type says, and does not unwind.
gin_status_t gin_job_over(const struct gin_config_t *config,
                          uint32_t rank,
                          uint32_t ranks,
                          gin_all_gather_t all_gather,
                          void *user,
                          struct gin_job_t *job);

// Makes a job of `ranks` ranks that are threads of this process, and writes one handle for each to `jobs`. Each thread
// then uses its own: collective calls wait for the other threads.
//
// The caller owns the handles, and closes each with `gin_job_close`.
//
// The caller ensures: `jobs` has space for `ranks` handles.
gin_status_t gin_job_local(const struct gin_config_t *config,
                           uint32_t ranks,
                           struct gin_job_t *jobs);

// Returns the rank, and the number of ranks. Either output may be null.
gin_status_t gin_job_rank(struct gin_job_t job, uint32_t *rank, uint32_t *ranks);

// Returns the kind of the rank's device: `GIN_DEVICE_VIRTUAL` or `GIN_DEVICE_CUDA`.
gin_status_t gin_job_device(struct gin_job_t job, uint32_t *kind);

// Waits for all ranks of the job. Collective.
gin_status_t gin_job_barrier(struct gin_job_t job);

// Gathers `bytes` bytes of each rank, by rank, into `all`. All ranks pass the same length. Collective.
//
// The caller ensures: `own` has `bytes` bytes, and `all` has that many for each rank.
gin_status_t gin_job_all_gather(struct gin_job_t job, const void *own, uintptr_t bytes, void *all);

// Ends every collective call of the job, on all ranks, with an error. Does not wait.
gin_status_t gin_job_abort(struct gin_job_t job);

// Writes the first `capacity` ranks that are known to be lost to `ranks`, and their number to `count`.
//
// The caller ensures: `ranks` has space for `capacity` numbers, and may be null if that is 0.
gin_status_t gin_job_lost(struct gin_job_t job, uint32_t *ranks, uintptr_t capacity, uintptr_t *count);

// Makes a job of the ranks that remain without the `count` lost ranks, in the same order; the new ranks count from 0.
// All remaining ranks call it with the same ranks, which each of them learned from `gin_job_lost` and agreed on, or
// knows from elsewhere. Waits for them, at most `joining_ms` milliseconds.
//
// The new job has communicators and windows of its own: release the old ones, and close the old job. Where the ranks
// are threads of one process, it is `GIN_ERROR_BOOTSTRAP`: they end together.
//
// The caller owns the handle, and closes it with `gin_job_close`.
//
// The caller ensures: `lost` has `count` numbers.
gin_status_t gin_job_without(struct gin_job_t job,
                             const uint32_t *lost,
                             uintptr_t count,
                             uint32_t joining_ms,
                             struct gin_job_t *remaining);

// Makes a job with processes that join as the `count` ranks `joining`: in the place of lost ranks, or as new ranks,
// whose numbers follow. All other ranks call it with the same numbers, at a point of their choosing, and the new
// processes `gin_job_join_running`. Waits for all of them, at most `joining_ms` milliseconds. The ranks of this job
// keep their numbers.
//
// This job goes on until it is closed, also after an error. Memory of the program can be registered with communicators
// of the new job; after a loss, release the old communicator first. Where the ranks are threads of one process, it is
// `GIN_ERROR_BOOTSTRAP`.
//
// The caller owns the handle, and closes it with `gin_job_close`.
//
// The caller ensures: `joining` has `count` numbers.
gin_status_t gin_job_grow(struct gin_job_t job,
                          const uint32_t *joining,
                          uintptr_t count,
                          uint32_t joining_ms,
                          struct gin_job_t *next);

// Writes the id with which processes can join the job while it runs. Not collective.
gin_status_t gin_job_id(struct gin_job_t job, struct gin_unique_id_t *id);

// Closes the handle. Communicators of the job stay usable; the rank leaves the job when the last of them is closed
// too.
gin_status_t gin_job_close(struct gin_job_t job);

// Creates a communicator of all ranks of the job. Collective: all ranks pass the same requirements.
//
// gin's own threads carry out the requests of kernels from now on; the program calls nothing for that, unless
// `progress_threads` of the job's configuration is `GIN_PROGRESS_MANUAL`.
//
// The caller owns the handle. It ends the communicator with `gin_comm_destroy`, or with `gin_comm_release`.
gin_status_t gin_comm_create(struct gin_job_t job,
                             const struct gin_requirements_t *requirements,
                             struct gin_comm_t *comm);

// Returns the bytes that pass the communicator to a kernel. They are valid until the communicator ends.
//
// A kernel takes them by value: as `gin_device_comm_t` in C++, as `Comm` in Rust. The program launches it by its own
// runtime, or by `gin_launch`.
gin_status_t gin_comm_device(struct gin_comm_t comm,
                             struct gin_device_comm_t *device);

// Returns an error with the fault if one has ended the communicator. Programs call this after a kernel has run. Prints
// the lines of these kernels, too. Does not wait.
gin_status_t gin_comm_check(struct gin_comm_t comm);

// Returns the fault that ended the communicator. `found` is 1 if there is one; else 0, and `fault` is not written.
// Does not wait.
gin_status_t gin_comm_fault(struct gin_comm_t comm,
                            uint32_t *found,
                            struct gin_fault_t *fault);

// Ends every wait of the communicator, on all ranks. A rank notices within about 50 us. Does not wait. A second call
// has no effect.
gin_status_t gin_comm_abort(struct gin_comm_t comm);

// Carries out the requests of kernels that are ready, if `progress_threads` of the job's configuration is
// `GIN_PROGRESS_MANUAL`; else there is nothing to do. `worked`, unless it is null, is 1 if there was anything to
// do, else 0. Does not wait for other ranks. It does so for all communicators of the same handle of a job.
//
// Calls of gin that wait do the same meanwhile, for the communicators that their thread has called before. While no
// thread makes such a call, requests of this rank stay in their queues, and its kernels do not learn of faults of
// other ranks.
gin_status_t gin_comm_progress(struct gin_comm_t comm,
                               uint32_t *worked);

// Returns the statistics of a context, also while kernels run.
gin_status_t gin_comm_stats(struct gin_comm_t comm, uint32_t context, struct gin_stats_t *stats);

// Ends the communicator in an orderly way, and closes the handle. Collective, unless a fault or an abort has ended the
// communicator. Waits for unfinished requests; refuses while a kernel runs. After an error the handle stays open.
//
// The handles of its windows stay open, and can only be closed.
gin_status_t gin_comm_destroy(struct gin_comm_t comm);

// Closes the handle. If the communicator is active, aborts it first: waits end on all ranks. Not collective.
gin_status_t gin_comm_release(struct gin_comm_t comm);

// Allocates `bytes` bytes of device memory on this rank, zeroed, and registers them as its part of a window.
// Collective; ranks may pass different lengths, including 0.
//
// gin owns the memory. The caller owns the handle, and closes it with `gin_window_close`.
gin_status_t gin_window_alloc(struct gin_comm_t comm,
                              uint64_t bytes,
                              uint32_t flags,
                              struct gin_window_t *window);

// Registers memory of the caller as this rank's part of a window. Collective; ranks may pass different lengths.
//
// The memory stays the caller's. On a GPU it is device memory of the rank's GPU, from any allocator of the driver, or
// pinned host memory; on a virtual GPU it is any memory of the process. If ranks of the host are other processes, it
// is in one allocation of `ncclMemAlloc`, or of `cuMemCreate` with file descriptors. The caller owns the handle, and
// closes it with `gin_window_close`. The memory stays valid until the window is closed on all ranks and no kernel uses it;
// meanwhile the program accesses it only as it may access memory of a window.
gin_status_t gin_window_register(struct gin_comm_t comm,
                                 void *memory,
                                 uint64_t bytes,
                                 uint32_t flags,
                                 struct gin_window_t *window);

// Returns the bytes that pass the window to a kernel. They are valid until the window is closed.
//
// A kernel takes them by value: as `gin_device_window_t` in C++, as `Window<T>` in Rust.
gin_status_t gin_window_device(struct gin_window_t window, struct gin_device_window_t *device);

// Returns the device address and the length in bytes of this rank's part. Either output may be null.
gin_status_t gin_window_memory(struct gin_window_t window, void **memory, uint64_t *bytes);

// Copies `bytes` bytes of the program to this rank's part, from byte `offset` on. No kernel may use them meanwhile.
//
// The caller ensures: `from` has `bytes` bytes.
gin_status_t gin_window_write(struct gin_window_t window,
                              uint64_t offset,
                              const void *from,
                              uint64_t bytes);

// Copies `bytes` bytes of this rank's part, from byte `offset` on, to the program. No kernel may use them meanwhile.
//
// The caller ensures: `to` has `bytes` bytes.
gin_status_t gin_window_read(struct gin_window_t window,
                             uint64_t offset,
                             void *to,
                             uint64_t bytes);

// Deregisters the window, and closes the handle. Collective while the communicator is active: waits for requests that
// use it, and refuses while a kernel runs. After an error of an active communicator the handle stays open.
gin_status_t gin_window_close(struct gin_window_t window);

// Closes the handle. If the communicator is active, aborts it first: waits end on all ranks. Not collective: a rank
// calls it if an error keeps it from the calls that the other ranks make.
gin_status_t gin_window_release(struct gin_window_t window);

// Makes a stream of the rank's device. The caller closes the handle with `gin_stream_close`.
gin_status_t gin_stream_create(struct gin_job_t job, struct gin_stream_t *stream);

// Uses a stream of the program, a `cudaStream_t` or `CUstream` of the rank's GPU. gin does not destroy it. The caller
// closes the handle with `gin_stream_close`. The stream lives until the handle is closed and the work put on it is done.
gin_status_t gin_stream_from_cuda(struct gin_job_t job,
                                  void *cuda,
                                  struct gin_stream_t *stream);

// Waits until all work of the stream is done. An error of a kernel is reported once.
gin_status_t gin_stream_synchronize(struct gin_stream_t stream);

// Waits until all work of the stream is done, then copies `to.bytes` bytes of the program to memory of the stream's
// device.
//
// The caller ensures: `from` has `to.bytes` bytes, and no other code uses the memory of `to` during the call.
gin_status_t gin_stream_write(struct gin_stream_t stream,
                              const struct gin_memory_t *to,
                              const void *from);

// Closes the handle. Work of the stream goes on.
gin_status_t gin_stream_close(struct gin_stream_t stream);

// Loads kernels: PTX text or a cubin of `bytes` bytes; or, if `image` is null, the Rust kernels that are linked into
// the program, which the virtual GPU runs. The caller closes the handle with `gin_module_close`.
//
// The caller ensures: `image` has `bytes` bytes.
gin_status_t gin_module_load(struct gin_job_t job,
                             const void *image,
                             uintptr_t bytes,
                             struct gin_module_t *module);

// Returns the kernel of this name. The caller closes the handle with `gin_kernel_close`.
gin_status_t gin_module_kernel(struct gin_module_t module, const char *name, struct gin_kernel_t *kernel);

// Closes the handle. Kernels of the module stay usable.
gin_status_t gin_module_close(struct gin_module_t module);

// Makes a kernel of a function of the program. Only the virtual GPU runs it: it calls the function as each thread of
// the grid. `sizes` are the sizes in bytes of its `count` parameters. The caller closes the handle with
// `gin_kernel_close`.
//
// The function calls the device functions of gin, which this library has for CPUs too; it must not wait in another
// way. The function has these parameters, and lives as long as the handle and its launches.
gin_status_t gin_kernel_of_function(gin_kernel_fn_t function,
                                    const char *name,
                                    const uintptr_t *sizes,
                                    uintptr_t count,
                                    struct gin_kernel_t *kernel);

// Closes the handle. Launches go on.
gin_status_t gin_kernel_close(struct gin_kernel_t kernel);

// Refuses bytes for kernels that are no communicator of this process: it is closed, or of another process. A program
// that launches kernels itself may call this before.
gin_status_t gin_device_comm_check(const struct gin_device_comm_t *device);

// Refuses bytes for kernels that are no window of this process: it is closed, or of another process.
gin_status_t gin_device_window_check(const struct gin_device_window_t *device);

// Launches a kernel on a stream. Does not wait. Checks the number and sizes of the arguments, communicators and
// windows among those of a Rust kernel, and the limits of kernel and device.
//
// The caller ensures: each argument is a value of its parameter's type. The kernel's own conditions hold until
// it has ended, and communicators and windows among the arguments live until then.
gin_status_t gin_launch(struct gin_stream_t stream,
                        struct gin_kernel_t kernel,
                        const struct gin_shape_t *shape,
                        const struct gin_arg_t *arguments,
                        uintptr_t count);

// Begins a graph: until `gin_stream_end_capture`, launches on the stream become part of it and do not run.
//
// On a GPU the program may as well capture a stream by the calls of CUDA.
gin_status_t gin_stream_begin_capture(struct gin_stream_t stream);

// Ends a graph. The caller closes the handle with `gin_graph_close`.
gin_status_t gin_stream_end_capture(struct gin_stream_t stream, struct gin_graph_t *graph);

// Launches a graph, in the order of the stream. The stream is of the device on which the graph was captured. Does not
// wait.
//
// The caller ensures: the memory and the objects of the captured calls live until the graph has run.
gin_status_t gin_graph_launch(struct gin_graph_t graph,
                              struct gin_stream_t stream);

// Closes the handle. Launches go on.
gin_status_t gin_graph_close(struct gin_graph_t graph);

// Returns the bytes that a group takes on each of `ranks` ranks, if loads and stores reach the `lsa_size` ranks of its
// LSA team; `lsa_size` is 0 if they reach all ranks. Allocates nothing.
gin_status_t gin_ep_footprint(const struct gin_ep_config_t *config,
                              uint32_t ranks,
                              uint32_t lsa_size,
                              uint64_t *bytes);

// Allocates the memory of a group. Collective: all ranks pass the same configuration.
//
// The caller owns the handle. It ends the group with `gin_ep_group_destroy`, or with `gin_ep_group_release`.
gin_status_t gin_ep_group_create(struct gin_comm_t comm,
                                 const struct gin_ep_config_t *config,
                                 struct gin_ep_group_t *group);

// Returns the first error of the kernels since the last call. `found` is 1 if there is one; else 0, and `report` is
// not written. The streams of the slots are done. While an error is unread, calls that begin a dispatch of its slot
// return `GIN_ERROR_STATE`. Does not wait.
gin_status_t gin_ep_group_status(struct gin_ep_group_t group,
                                 uint32_t *found,
                                 struct gin_ep_report_t *report);

// Returns the ranks that a slot continues without, as bits: bit `r` for rank `r`. The stream of the slot is done.
gin_status_t gin_ep_group_masked(struct gin_ep_group_t group,
                                 uint32_t slot,
                                 uint64_t *ranks);

// Lets all ranks take part again, in all slots. Collective. No kernel of the group runs on any rank, and no slot is
// open.
gin_status_t gin_ep_group_readmit(struct gin_ep_group_t group);

// Frees the memory, and closes the handle. Collective, unless the communicator has ended. Waits for this rank's
// kernels of the group. Refuses while a slot is open; then the handle stays open.
//
// After another error the handle is closed, and the communicator keeps the memory until its end. If nobody has read an
// error of the kernels, the call returns it as `GIN_ERROR_STATE`, and the memory is freed.
gin_status_t gin_ep_group_destroy(struct gin_ep_group_t group);

// Closes the handle, and leaves the memory to the communicator. Not collective. Waits for this rank's kernels of the
// group, unless a slot is open: its handle stays open, and the slot waits when it is closed.
gin_status_t gin_ep_group_release(struct gin_ep_group_t group);

// Opens a slot of the group, by its number. A slot can be open once. The caller closes the handle with
// `gin_ep_slot_close`.
//
// Calls of a slot take one stream, or streams that events order, and one thread makes them at a time. They launch
// kernels and do not wait.
gin_status_t gin_ep_slot_create(struct gin_ep_group_t group,
                                uint32_t number,
                                struct gin_ep_slot_t *slot);

// Sends the rows of the tokens to the ranks of their experts, in the order of the stream. `gin_ep_receive` follows.
// Work between the two calls overlaps with the transfer.
//
// The caller ensures: the memory of the tokens is as `gin_ep_tokens_t` says.
gin_status_t gin_ep_dispatch(struct gin_ep_slot_t slot,
                             struct gin_stream_t stream,
                             const struct gin_ep_tokens_t *tokens);

// Waits, in the order of the stream, for the rows of all ranks. After an error of the device the dispatch has ended.
gin_status_t gin_ep_receive(struct gin_ep_slot_t slot,
                            struct gin_stream_t stream);

// Does the work of `gin_ep_dispatch` and `gin_ep_receive` in one kernel, which takes less time.
//
// The caller ensures: the memory of the tokens is as `gin_ep_tokens_t` says.
gin_status_t gin_ep_exchange(struct gin_ep_slot_t slot,
                             struct gin_stream_t stream,
                             const struct gin_ep_tokens_t *tokens);

// Does the work of `gin_ep_exchange` and `gin_ep_permute` in less time. All ranks call it for the same dispatch, each
// with any layout. Refused if loads and stores do not reach all ranks.
//
// The caller ensures: the memory of the tokens is as `gin_ep_tokens_t` says.
gin_status_t gin_ep_exchange_into(struct gin_ep_slot_t slot,
                                  struct gin_stream_t stream,
                                  const struct gin_ep_tokens_t *tokens,
                                  struct gin_ep_permuted_t permuted);

// Copies the received rows into another layout, in the order of the stream.
gin_status_t gin_ep_permute(struct gin_ep_slot_t slot,
                            struct gin_stream_t stream,
                            struct gin_ep_permuted_t permuted);

// Stores the metadata of rows in memory of the program, at their places in a layout, in the order of the stream. The
// rows were put into the layout before, by `gin_ep_permute` or `gin_ep_exchange_into`. Places without a row keep their
// bytes.
//
// The caller ensures: the memory of `into` stays valid until the kernels have ended, and no other code uses it
// until then.
gin_status_t gin_ep_store_metadata(struct gin_ep_slot_t slot,
                                   struct gin_stream_t stream,
                                   struct gin_ep_permuted_t permuted,
                                   const struct gin_ep_metadata_t *into);

// Adds up, for each received row, the rows of its experts in an expert-major layout, each times its weight, in FP32
// and rounded once. The sums replace the received rows, and `gin_ep_combine` returns them. The experts' rows are those
// of the layout, or in `rows`, which may be null, in the same places.
//
// The caller ensures: the memory of `rows` stays valid and unchanged until the sums are made.
gin_status_t gin_ep_reduce(struct gin_ep_slot_t slot,
                           struct gin_stream_t stream,
                           struct gin_ep_permuted_t permuted,
                           const struct gin_memory_t *rows);

// Returns a row for each received row to its source, and stores the sums of the rows that return to this rank, one for
// each of its tokens, in the order of the stream. A token without experts gets zeros, or bias and present output.
//
// Ends the dispatch, also with an error of the rows, the sums or the device. Only a refused handle, pointer or `size`
// leaves the dispatch as it was.
//
// The caller ensures: the memory of `combine` stays valid until the kernels have ended, and no other code uses
// it until then.
gin_status_t gin_ep_combine(struct gin_ep_slot_t slot,
                            struct gin_stream_t stream,
                            const struct gin_ep_combine_t *combine);

// Ends a received dispatch without a combine.
gin_status_t gin_ep_release(struct gin_ep_slot_t slot);

// Returns the bytes that pass the received rows to a kernel. They are the same for all dispatches of the slot, also in
// a graph, and valid until the group ends. The dispatch was received.
//
// Kernels use the rows after the receive and before the combine, in the order of the stream, and may overwrite them.
// `gin_ep.cuh` has functions for kernels in C++.
gin_status_t gin_ep_received_device(struct gin_ep_slot_t slot,
                                    struct gin_device_ep_received_t *device);

// Copies the number of rows from each of the first `capacity` sources to `counts`, and writes the number of sources to
// `count`. The stream is done, and the dispatch was received.
//
// The caller ensures: `counts` has space for `capacity` numbers, and may be null if that is 0.
gin_status_t gin_ep_received_counts(struct gin_ep_slot_t slot,
                                    uint64_t *counts,
                                    uintptr_t capacity,
                                    uintptr_t *count);

// Closes the slot. Waits for its kernels. Releases received rows. If a dispatch was not received, the slot takes no
// other one until all ranks call `gin_ep_group_readmit`.
gin_status_t gin_ep_slot_close(struct gin_ep_slot_t slot);

// Allocates memory for at most `rows` received rows in a layout, a `gin_ep_layout_t`. A padded or fixed layout has
// room for all rows that may arrive, whatever `rows` is. Packed zones begin at multiples of `align` rows, a power of
// two; `align` is 0 for other layouts. Not collective.
//
// If more rows arrive, the first ones have places, and the status has `GIN_EP_TOO_MANY_ROWS`. The caller closes the
// handle with `gin_ep_permuted_close`.
gin_status_t gin_ep_permuted_create(struct gin_ep_group_t group,
                                    uint32_t layout,
                                    uint32_t rows,
                                    uint32_t align,
                                    struct gin_ep_permuted_t *permuted);

// Allocates memory as `gin_ep_permuted_create`, but for rows, scales and tokens: kernels store counts, source infos
// and the places of rows, and copy no row, unless `gin_ep_permuted_with_memory` adds memory. Not collective.
//
// The caller closes the handle with `gin_ep_permuted_close`.
gin_status_t gin_ep_permuted_create_without_rows(struct gin_ep_group_t group,
                                                 uint32_t layout,
                                                 uint32_t rows,
                                                 uint32_t align,
                                                 struct gin_ep_permuted_t *permuted);

// Returns the same layout in memory of the program, by a handle of its own. The places of rows are in memory that both
// share, so a combine takes either, after the dispatch into any of them. Allocates nothing on the device.
//
// The caller closes the handle with `gin_ep_permuted_close`.
//
// The caller ensures: the memory stays valid as long as the handle is open, and until the kernels of its slots
// that use it have ended.
gin_status_t gin_ep_permuted_with_memory(struct gin_ep_permuted_t permuted,
                                         const struct gin_ep_permuted_into_t *into,
                                         struct gin_ep_permuted_t *same);

// Returns the same layout for at most `rows` rows, by a handle of its own, so that memory of the program may have as
// few. Refused for a padded or fixed layout. Allocates nothing on the device.
//
// The caller closes the handle with `gin_ep_permuted_close`.
gin_status_t gin_ep_permuted_with_capacity(struct gin_ep_permuted_t permuted,
                                           uint32_t rows,
                                           struct gin_ep_permuted_t *same);

// Returns the memory of the layout, for kernels. It is valid until the handle is closed.
gin_status_t gin_ep_permuted_memory(struct gin_ep_permuted_t permuted,
                                    struct gin_ep_permuted_memory_t *memory);

// Copies the first `capacity` counts of the layout to `counts`, and writes the number of all counts to `count`. The
// stream that filled the layout is done.
//
// The first count is the number of rows with gaps. Expert-major layouts have then the number of rows of each expert of
// this rank, if padded from each source; packed and fixed layouts and indices have then the number of each expert's
// first row. A rank-major padded layout has after the first count the number of rows from each source. Fixed zones
// have more counts, as `docs/ep.md` says.
//
// The caller ensures: `counts` has space for `capacity` numbers, and may be null if that is 0.
gin_status_t gin_ep_permuted_counts(struct gin_ep_permuted_t permuted,
                                    uint32_t *counts,
                                    uintptr_t capacity,
                                    uintptr_t *count);

// Closes the handle. Slots keep the memory until their kernels that use it have ended.
gin_status_t gin_ep_permuted_close(struct gin_ep_permuted_t permuted);

// Counts the tokens for each rank once, for dispatches of the same ids. Such a dispatch does not count, and does not
// report dropped tokens. Not in a capture, because it allocates memory.
//
// The caller closes the handle with `gin_ep_plan_close`.
//
// The caller ensures: the memory of the tokens is as `gin_ep_tokens_t` says.
gin_status_t gin_ep_plan_create(struct gin_ep_slot_t slot,
                                struct gin_stream_t stream,
                                const struct gin_ep_tokens_t *tokens,
                                struct gin_ep_plan_t *plan);

// Closes the handle. Slots keep the memory until their kernels that use it have ended.
gin_status_t gin_ep_plan_close(struct gin_ep_plan_t plan);

// Prepares products of rows of `depth` elements, a multiple of 8, by at most `blocks` blocks; 0 for as many as run at
// the same time. The group has `combine_at_source`, and BF16 return. Not collective. Refused if loads and stores do
// not reach all ranks.
//
// The caller closes the handle with `gin_ep_grouped_close`.
gin_status_t gin_ep_grouped_create(struct gin_ep_group_t group,
                                   uint32_t depth,
                                   uint32_t blocks,
                                   struct gin_ep_grouped_t *grouped);

// Closes the handle. Slots keep the memory until their kernels that use it have ended.
gin_status_t gin_ep_grouped_close(struct gin_ep_grouped_t grouped);

// Multiplies the rows of each expert by its weights, in the order of the stream. The rows were put into the layout
// before. Products return to the ranks of their tokens, and `gin_ep_combine` with `returned` follows; or they are
// stored in `products`, in the places of the rows, and the combine takes layout and memory. Both give the same bits.
//
// The caller ensures: the memory of `experts` stays valid until the kernels have ended, and unchanged.
gin_status_t gin_ep_multiply(struct gin_ep_slot_t slot,
                             struct gin_stream_t stream,
                             struct gin_ep_grouped_t grouped,
                             const struct gin_ep_experts_t *experts);

// Prepares products of the received rows themselves, by at most `blocks` blocks; 0 for as many as run at the same
// time. The group has `combine_at_source`, and BF16 rows. Not collective. Refused if loads and stores do not reach all
// ranks.
//
// The caller closes the handle with `gin_ep_overlapped_close`.
gin_status_t gin_ep_overlapped_create(struct gin_ep_group_t group,
                                      uint32_t blocks,
                                      struct gin_ep_overlapped_t *overlapped);

// Closes the handle. Slots keep the memory until their kernels that use it have ended.
gin_status_t gin_ep_overlapped_close(struct gin_ep_overlapped_t overlapped);

// Waits, in the order of the stream, for the rows of all ranks after `gin_ep_dispatch`, and multiplies the rows of
// each expert by its weights as they arrive. Products return to the ranks of their tokens as they are done, so
// `gin_ep_combine` with `returned` follows. The bits are the same as by `gin_ep_receive`, `gin_ep_permute` and
// `gin_ep_multiply`. `weights` has, for each expert of this rank, a row of inner elements for each element of a
// product.
//
// If gin refuses the weights, the rows are received and given up.
//
// The caller ensures: the memory of `weights` stays valid until the kernels have ended, and unchanged.
gin_status_t gin_ep_receive_multiply(struct gin_ep_slot_t slot,
                                     struct gin_stream_t stream,
                                     struct gin_ep_overlapped_t overlapped,
                                     const struct gin_memory_t *weights);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus
