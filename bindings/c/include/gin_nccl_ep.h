// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The interface of NCCL EP (API version 2) over gin.h, for C99 and C++17. A program includes this header in place of
// nccl_ep.h, and links libgin. docs/nccl_ep.md is the page for users: what a program changes, and all differences.
//
// Include CUDA's and NCCL's headers before this one, if the program uses them. Without nccl.h this header also has the
// calls of NCCL that make a communicator. All functions are static: no state is shared between source files but
// through the objects that the program passes.

#pragma once

#include "gin.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#if !defined(CUDART_VERSION) && !defined(GIN_NCCL_EP_NO_CUDA) && defined(__has_include)
#if __has_include(<cuda_runtime_api.h>)
#include <cuda_runtime_api.h>
#endif
#endif
#ifndef CUDART_VERSION
/// A stream of CUDA; on virtual GPUs a stream of gin, which `ginNcclStream` converts.
typedef struct CUstream_st* cudaStream_t;
/// The result of functions for memory, which gin does not call.
typedef int cudaError_t;
#endif

#ifndef NCCL_MAJOR
#define NCCL_UNIQUE_ID_BYTES GIN_UNIQUE_ID_BYTES

/// The outcome of a call. `ncclGetLastError` has the text of an error.
typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7
} ncclResult_t;

/// The types of elements, by NCCL's numbers.
typedef enum {
    ncclInt8 = 0,
    ncclChar = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclInt = 2,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclUint64 = 5,
    ncclFloat16 = 6,
    ncclHalf = 6,
    ncclFloat32 = 7,
    ncclFloat = 7,
    ncclFloat64 = 8,
    ncclDouble = 8,
    ncclBfloat16 = 9,
    ncclFloat8e4m3 = 10,
    ncclFloat8e5m2 = 11
} ncclDataType_t;

/// The name of a job: gin's, which has more bytes than NCCL's.
typedef struct {
    char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

/// A communicator of gin, with its job.
typedef struct ginNcclComm* ncclComm_t;
/// A window of NCCL: null, because gin has none.
typedef struct ginNcclWindow* ncclWindow_t;
#endif

/// Two packed elements of 4 bits in a byte.
#ifndef ncclFloat4x2
#define ncclFloat4x2 ((ncclDataType_t)12)
#endif

// The version of the interface.
#define NCCL_EP_MAJOR 0
#define NCCL_EP_MINOR 1
#define NCCL_EP_PATCH 0
#define NCCL_EP_VERSION_CODE (NCCL_EP_MAJOR * 10000 + NCCL_EP_MINOR * 100 + NCCL_EP_PATCH)
#define NCCL_EP_API_VERSION 2
#define NCCL_EP_MAGIC 0xC00FFFEEu
#define NCCL_EP_TENSOR_MAGIC 0xCAFECAFEu

/// Lets gin choose a value.
#define NCCL_EP_AUTO 0

/// The modes.
typedef enum { NCCL_EP_ALGO_LOW_LATENCY = 0, NCCL_EP_ALGO_HIGH_THROUGHPUT = 1 } ncclEpAlgorithm_t;
/// What a dispatch does with rows past `max_recv_tokens_per_rank`; high throughput only.
typedef enum { NCCL_EP_OVERFLOW_AUTO = 0, NCCL_EP_OVERFLOW_TRAP = 1, NCCL_EP_OVERFLOW_DROP = 2 } ncclEpOverflowPolicy_t;
/// The layouts of received rows: `docs/nccl_ep.md` has their shapes.
typedef enum {
    NCCL_EP_LAYOUT_UNSET = 0,
    NCCL_EP_LAYOUT_EXPERT_MAJOR = 1,
    NCCL_EP_LAYOUT_RANK_MAJOR = 2,
    NCCL_EP_LAYOUT_FLAT = 3
} ncclEpLayout_t;
/// The direction of a pass of training.
typedef enum { NCCL_EP_FWD_PASS = 0, NCCL_EP_BWD_PASS = 1 } ncclEpPassDir_t;
/// The use of windows; gin refuses `ON`.
typedef enum { NCCL_EP_ZERO_COPY_AUTO = 0, NCCL_EP_ZERO_COPY_OFF = 1, NCCL_EP_ZERO_COPY_ON = 2 } ncclEpZeroCopyMode_t;
/// The numbers of experts in received ids: of this rank (`AUTO`, `LOCAL`), or of all ranks.
typedef enum {
    NCCL_EP_EXPERT_ID_AUTO = 0,
    NCCL_EP_EXPERT_ID_LOCAL = 1,
    NCCL_EP_EXPERT_ID_GLOBAL = 2
} ncclEpExpertIdKind_t;
/// How a dispatch quantises: not; rows with scales of the program; BF16 to E4M3 with an FP32 scale for 128 elements.
typedef enum {
    NCCL_EP_DISP_QUANT_NONE = 0,
    NCCL_EP_DISP_QUANT_FWD = 1,
    NCCL_EP_DISP_QUANT_DS_FP8E3M4 = 2
} ncclEpDispQuant_t;
/// How a combine quantises; gin refuses `NVFP4`.
typedef enum { NCCL_EP_COMB_QUANT_NONE = 0, NCCL_EP_COMB_QUANT_NVFP4 = 1 } ncclEpCombQuant_t;

/// Memory of the program with a shape. `sizes` has `ndim` lengths; memory and lengths belong to the program.
typedef struct ncclEpTensor {
    unsigned int size, magic;
    unsigned int ndim;
    ncclDataType_t datatype;
    void* data;
    ncclWindow_t win_hdl;
    uint64_t win_offset;
    size_t* sizes;
} ncclEpTensor_t;

/// Nothing yet.
typedef struct {
    unsigned int size, magic;
} ncclEpTensorAllocConfig_t;

typedef cudaError_t (*ncclEpAllocFn_t)(void** ptr, size_t size, void* context);
typedef cudaError_t (*ncclEpFreeFn_t)(void* ptr, void* context);
/// Functions for memory. gin does not call them.
typedef struct {
    ncclEpAllocFn_t alloc_fn;
    ncclEpFreeFn_t free_fn;
    void* context;
} ncclEpAllocConfig_t;

/// The sizes of a group. All ranks pass the same values.
typedef struct {
    unsigned int size, magic, version;
    ncclEpAlgorithm_t algorithm;
    unsigned int num_experts;
    /// The maximum number of tokens of a rank's dispatch.
    unsigned int max_dispatch_tokens_per_rank;
    /// The maximum number of rows that a rank receives; high throughput only. `NCCL_EP_AUTO` for the outputs' lengths.
    unsigned int max_recv_tokens_per_rank;
    /// The maximum number of bytes of a row with its scales.
    unsigned int max_token_bytes;
    // No effect: gin's memory follows the sizes of calls, and gin posts through the queue pairs of its communicator.
    unsigned long int rdma_buffer_size;
    unsigned int num_qp_per_rank;
    unsigned int num_channels;
    /// The maximum number of SMs that a kernel takes.
    unsigned int max_num_sms;
    ncclEpAllocConfig_t alloc;
    /// Not 0 if the program continues without silent ranks, and reads `ncclEpGetAsyncError`.
    unsigned int enable_mask;
    /// How long a rank waits for another one, in nanoseconds; 0 for 100 s.
    uint64_t timeout_ns;
    ncclEpZeroCopyMode_t zero_copy;
    ncclEpOverflowPolicy_t overflow_policy;
    /// The maximum number of ids of a token; 0 for no check.
    unsigned int num_topk;
    unsigned char padding_v2[4];
} ncclEpGroupConfig_t;

/// Memory for numbers of rows, of 32 bits.
typedef struct {
    unsigned int size, magic;
    /// `[local experts]`: rows of each expert; padded in high throughput with `EXPERT_MAJOR`.
    ncclEpTensor_t* expert_counters;
    /// `[ranks]`: rows from each rank; low latency with `RANK_MAJOR`.
    ncclEpTensor_t* src_rank_counters;
    /// `[local experts]`: the first row of each expert; high throughput with `EXPERT_MAJOR`.
    ncclEpTensor_t* expert_offsets;
    /// `[1]`: all rows, with gaps; high throughput.
    ncclEpTensor_t* recv_total_counter;
    ncclEpExpertIdKind_t recv_topk_idx_kind;
    unsigned char padding_v2[4];
} ncclEpLayoutInfo_t;

/// The tokens of a dispatch: `[tokens][hidden]`, `[tokens][topk]`, `[tokens][scales]`.
typedef struct {
    unsigned int size, magic;
    ncclEpTensor_t* tokens;
    ncclEpTensor_t* topk_weights;
    ncclEpTensor_t* scales;
} ncclEpDispatchInputs_t;

/// The received rows, in the shapes of the layout.
typedef struct {
    unsigned int size, magic;
    ncclEpTensor_t* tokens;
    ncclEpTensor_t* topk_weights;
    ncclEpTensor_t* scales;
    ncclEpTensor_t* topk_idx;
} ncclEpDispatchOutputs_t;

/// The experts' results, in the shape of the received rows.
typedef struct {
    unsigned int size, magic;
    ncclEpTensor_t* tokens;
    ncclEpTensor_t* topk_weights;
    ncclEpTensor_t* scales;
} ncclEpCombineInputs_t;

/// The sums, `[tokens][hidden]`; and, in low latency with `EXPERT_MAJOR`, the weights by which rows are multiplied.
typedef struct {
    unsigned int size, magic;
    ncclEpTensor_t* tokens;
    ncclEpTensor_t* topk_weights;
} ncclEpCombineOutputs_t;

/// The zones of experts begin at multiples of this number of rows, a power of two; 0 or 1 for no gaps.
typedef struct {
    unsigned int size, magic;
    size_t dispatch_output_per_expert_alignment;
} ncclEpHandleConfig_t;

/// With `send_only` a dispatch only sends, and `ncclEpComplete` receives. `round_scales` makes scales powers of two.
typedef struct {
    unsigned int size, magic;
    unsigned int send_only;
    unsigned int round_scales;
    ncclEpPassDir_t pass_direction;
    ncclEpDispQuant_t quant_recipe;
} ncclEpDispatchConfig_t;

/// `send_only` has no effect: a combine sends and receives.
typedef struct {
    unsigned int size, magic;
    unsigned int send_only;
    ncclEpPassDir_t pass_direction;
    ncclEpCombQuant_t quant_recipe;
} ncclEpCombineConfig_t;

/// Nothing yet.
typedef struct ncclEpCompleteConfig {
    unsigned int size, magic;
} ncclEpCompleteConfig_t;

/// The ranks of a communicator, for expert parallelism.
typedef struct ncclEpGroup* ncclEpGroup_t;
/// The routing of tokens, and a dispatch of them.
typedef struct ncclEpHandle* ncclEpHandle_t;

// The defaults of each struct.
#ifdef __cplusplus
template <class T>
inline T ginNcclEpInit(unsigned int magic) {
    T made{};
    made.size = (unsigned int)sizeof(T), made.magic = magic;
    return made;
}
inline ncclEpGroupConfig_t ginNcclEpGroupConfig() {
    ncclEpGroupConfig_t made = ginNcclEpInit<ncclEpGroupConfig_t>(NCCL_EP_MAGIC);
    made.version = NCCL_EP_API_VERSION;
    return made;
}
#define NCCL_EP_STRUCT_INIT(type_, magic_) (ginNcclEpInit<type_>(magic_))
#define NCCL_EP_GROUP_CONFIG_INIT (ginNcclEpGroupConfig())
#else
#define NCCL_EP_STRUCT_INIT(type_, magic_) ((type_){.size = (unsigned int)sizeof(type_), .magic = (magic_)})
#define NCCL_EP_GROUP_CONFIG_INIT \
    ((ncclEpGroupConfig_t){.size = (unsigned int)sizeof(ncclEpGroupConfig_t), \
                           .magic = NCCL_EP_MAGIC, \
                           .version = NCCL_EP_API_VERSION})
#endif
#define NCCL_EP_TENSOR_INIT_INLINE .size = (unsigned int)sizeof(ncclEpTensor_t), .magic = NCCL_EP_TENSOR_MAGIC
#define NCCL_EP_TENSOR_INIT NCCL_EP_STRUCT_INIT(ncclEpTensor_t, NCCL_EP_TENSOR_MAGIC)
#define NCCL_EP_TENSOR_ALLOC_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpTensorAllocConfig_t, NCCL_EP_MAGIC)
#define NCCL_EP_LAYOUT_INFO_INIT NCCL_EP_STRUCT_INIT(ncclEpLayoutInfo_t, NCCL_EP_MAGIC)
#define NCCL_EP_DISPATCH_INPUTS_INIT NCCL_EP_STRUCT_INIT(ncclEpDispatchInputs_t, NCCL_EP_MAGIC)
#define NCCL_EP_DISPATCH_OUTPUTS_INIT NCCL_EP_STRUCT_INIT(ncclEpDispatchOutputs_t, NCCL_EP_MAGIC)
#define NCCL_EP_COMBINE_INPUTS_INIT NCCL_EP_STRUCT_INIT(ncclEpCombineInputs_t, NCCL_EP_MAGIC)
#define NCCL_EP_COMBINE_OUTPUTS_INIT NCCL_EP_STRUCT_INIT(ncclEpCombineOutputs_t, NCCL_EP_MAGIC)
#define NCCL_EP_HANDLE_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpHandleConfig_t, NCCL_EP_MAGIC)
#define NCCL_EP_DISPATCH_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpDispatchConfig_t, NCCL_EP_MAGIC)
#define NCCL_EP_COMBINE_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpCombineConfig_t, NCCL_EP_MAGIC)
#define NCCL_EP_COMPLETE_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpCompleteConfig_t, NCCL_EP_MAGIC)

// The sizes of version 1 of each struct, which every later version begins with.
#define NCCL_EP_TENSOR_V1_SIZE 48u
#define NCCL_EP_TENSOR_ALLOC_CONFIG_V1_SIZE 8u
#define NCCL_EP_GROUP_CONFIG_V1_SIZE 96u
#define NCCL_EP_LAYOUT_INFO_V1_SIZE 40u
#define NCCL_EP_DISPATCH_INPUTS_V1_SIZE 32u
#define NCCL_EP_DISPATCH_OUTPUTS_V1_SIZE 40u
#define NCCL_EP_COMBINE_INPUTS_V1_SIZE 24u
#define NCCL_EP_COMBINE_OUTPUTS_V1_SIZE 24u
#define NCCL_EP_HANDLE_CONFIG_V1_SIZE 16u
#define NCCL_EP_DISPATCH_CONFIG_V1_SIZE 20u
#define NCCL_EP_COMBINE_CONFIG_V1_SIZE 16u
#define NCCL_EP_COMPLETE_CONFIG_V1_SIZE 8u

#include "gin_nccl_comm.h"
#include "gin_nccl_ep_calls.h"
