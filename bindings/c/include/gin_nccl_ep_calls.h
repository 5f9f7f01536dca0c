// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A part of gin_nccl_ep.h, which includes it: the calls.

#pragma once

/// The streams of CUDA that a group remembers.
#define GIN_NCCL_STREAMS 8

/// A group of gin with one slot, for dispatches of one shape. A handle has it from its dispatch to its combine.
typedef struct ginNcclEngine {
    // The shape: all members of two engines are compared.
    gin_ep_config_t config;
    uint32_t layout, align;
    gin_ep_group_t group;
    gin_ep_slot_t slot;
    /// The layout without rows.
    gin_ep_permuted_t places;
    struct ncclEpHandle* user;
    struct ginNcclEngine* next;
} ginNcclEngine;

struct ncclEpGroup {
    ginNcclComm* comm;
    ncclEpGroupConfig_t config;
    /// The experts of a rank.
    uint32_t local;
    uint32_t deadline_ms;
    /// 1 after a rank was silent, until `ncclEpErrorClear`.
    int error;
    ginNcclEngine* engines;
    struct {
        cudaStream_t cuda;
        gin_stream_t stream;
    } streams[GIN_NCCL_STREAMS];
    uint32_t used_streams;
    /// Rows of zeros that carry the ids of a routing.
    gin_window_t routing;
};

struct ncclEpHandle {
    struct ncclEpGroup* group;
    ncclEpLayout_t layout;
    uint32_t align;
    /// 0 until it is known.
    uint32_t topk;
    gin_memory_t ids;
    uint32_t id_bits, tokens;
    ncclEpExpertIdKind_t id_kind;
    /// 1 after `ncclEpUpdateHandle`.
    int is_routed;
    /// The engine of the dispatch that was not combined; null if there is none.
    ginNcclEngine* engine;
    /// The layout in the program's memory.
    gin_ep_permuted_t permuted;
    /// 1 from a dispatch with `send_only` to `ncclEpComplete`.
    int is_staged;
    /// The stream of the dispatch.
    gin_stream_t stream;
    gin_ep_metadata_t metadata;
};

static inline int ginNcclIsHighThroughput(const struct ncclEpGroup* group) {
    return group->config.algorithm == NCCL_EP_ALGO_HIGH_THROUGHPUT;
}

static inline ncclResult_t ncclEpGetVersion(int* version) {
    if (version == NULL) return ncclInvalidArgument;
    *version = NCCL_EP_VERSION_CODE;
    return ncclSuccess;
}

/// Allocates a descriptor, without memory for data. `ncclEpTensorDestroy` frees it.
static inline ncclResult_t ncclEpTensorAlloc(ncclEpTensor_t** tensor, unsigned int ndim, ncclDataType_t datatype,
                                             const size_t* sizes, const ncclEpTensorAllocConfig_t* config) {
    (void)config;
    if (tensor == NULL || sizes == NULL || ndim == 0 || ginNcclBytes(datatype) == 0) return ncclInvalidArgument;
    ncclEpTensor_t* made = (ncclEpTensor_t*)calloc(1, sizeof(ncclEpTensor_t) + ndim * sizeof(size_t));
    if (made == NULL) return ncclSystemError;
    made->size = (unsigned int)sizeof(ncclEpTensor_t);
    made->magic = NCCL_EP_TENSOR_MAGIC;
    made->ndim = ndim;
    made->datatype = datatype;
    made->sizes = (size_t*)(void*)(made + 1);
    memcpy(made->sizes, sizes, ndim * sizeof(size_t));
    *tensor = made;
    return ncclSuccess;
}

/// Frees a descriptor of `ncclEpTensorAlloc`; null is one, too.
static inline ncclResult_t ncclEpTensorDestroy(ncclEpTensor_t* tensor) {
    free(tensor);
    return ncclSuccess;
}

/// Refuses what gin does not have, by its name.
static inline ncclResult_t ginNcclCheckConfig(ginNcclComm* comm, const ncclEpGroupConfig_t* config) {
    const char* text = NULL;
    if (config->algorithm != NCCL_EP_ALGO_LOW_LATENCY && config->algorithm != NCCL_EP_ALGO_HIGH_THROUGHPUT)
        text = "config.algorithm is neither NCCL_EP_ALGO_LOW_LATENCY nor NCCL_EP_ALGO_HIGH_THROUGHPUT";
    if (config->zero_copy == NCCL_EP_ZERO_COPY_ON)
        text = "config.zero_copy is NCCL_EP_ZERO_COPY_ON: gin takes no windows; use NCCL_EP_ZERO_COPY_AUTO";
    if (config->enable_mask != 0 && config->algorithm == NCCL_EP_ALGO_HIGH_THROUGHPUT)
        text = "config.enable_mask is for NCCL_EP_ALGO_LOW_LATENCY: leave it 0";
    if (config->max_dispatch_tokens_per_rank == 0)
        text = "config.max_dispatch_tokens_per_rank is 0: set the maximum number of tokens of a rank";
    if (config->num_experts == 0 || config->num_experts % comm->ranks != 0)
        text = "config.num_experts is not a multiple of the number of ranks";
    return text == NULL ? ncclSuccess : ginNcclFail(comm, ncclInvalidUsage, "%s", text);
}

/// Makes a group of the communicator's ranks. The first dispatch of each shape allocates gin's memory, collectively.
static inline ncclResult_t ncclEpCreateGroup(ncclEpGroup_t* ep_group, ncclComm_t comm,
                                             const ncclEpGroupConfig_t* config) {
    ginNcclComm* of_gin = ginNcclOf(comm);
    if (ep_group != NULL) *ep_group = NULL;
    // A communicator of NCCL, or none: there is no place for a text.
    if (of_gin == NULL || ep_group == NULL || config == NULL) return ncclInvalidArgument;
    ncclEpGroupConfig_t given;
    GIN_NCCL_TRY(ginNcclTake(of_gin, "config", config, NCCL_EP_GROUP_CONFIG_V1_SIZE, &given, sizeof(given),
                             NCCL_EP_MAGIC));
    GIN_NCCL_TRY(ginNcclCheckConfig(of_gin, &given));
    struct ncclEpGroup* made = (struct ncclEpGroup*)calloc(1, sizeof(struct ncclEpGroup));
    if (made == NULL) return ginNcclFail(of_gin, ncclSystemError, "there is no memory for a group");
    made->comm = of_gin;
    made->config = given;
    made->local = given.num_experts / of_gin->ranks;
    // As NCCL EP, 100 s if there is no other time.
    uint64_t ms = given.timeout_ns == 0 ? 100000 : given.timeout_ns / 1000000;
    made->deadline_ms = ms == 0 ? 1 : ms >= GIN_FOREVER ? GIN_FOREVER - 1 : (uint32_t)ms;
    *ep_group = made;
    return ncclSuccess;
}

/// Returns gin's stream for a stream of the program.
static inline ncclResult_t ginNcclStreamOf(struct ncclEpGroup* group, cudaStream_t cuda, gin_stream_t* stream) {
    if (group->comm->device == GIN_DEVICE_VIRTUAL) {
        stream->id = (uint64_t)(uintptr_t)(void*)cuda;
        return ncclSuccess;
    }
    for (uint32_t i = 0; i < GIN_NCCL_STREAMS; i++) {
        if (group->streams[i].stream.id != 0 && group->streams[i].cuda == cuda) {
            *stream = group->streams[i].stream;
            return ncclSuccess;
        }
    }
    GIN_NCCL_TRY(ginNcclCall(group->comm, gin_stream_from_cuda(group->comm->job, (void*)cuda, stream)));
    uint32_t at = group->used_streams++ % GIN_NCCL_STREAMS;
    if (group->streams[at].stream.id != 0) (void)gin_stream_close(group->streams[at].stream);
    group->streams[at].cuda = cuda;
    group->streams[at].stream = *stream;
    return ncclSuccess;
}

/// Returns the bytes of a handle's memory that the program may pass: none, because gin has it.
static inline ncclResult_t ncclEpHandleMemSize(ncclEpGroup_t ep_group, ncclEpLayout_t layout,
                                               const ncclEpHandleConfig_t* config, size_t* size_out, int num_topk) {
    (void)layout, (void)config, (void)num_topk;
    if (ep_group == NULL || size_out == NULL) return ncclInvalidArgument;
    *size_out = 0;
    return ncclSuccess;
}

/// Makes a handle for dispatches in a layout. Not collective. `handle_mem` has no effect.
static inline ncclResult_t ncclEpInitHandle(ncclEpHandle_t* handle, ncclEpGroup_t ep_group, ncclEpLayout_t layout,
                                            const ncclEpHandleConfig_t* config, int num_topk,
                                            const ncclEpTensor_t* handle_mem) {
    (void)handle_mem;
    if (handle != NULL) *handle = NULL;
    if (handle == NULL || ep_group == NULL) return ncclInvalidArgument;
    ginNcclComm* comm = ep_group->comm;
    ncclEpHandleConfig_t given;
    GIN_NCCL_TRY(ginNcclTake(comm, "config", config, NCCL_EP_HANDLE_CONFIG_V1_SIZE, &given, sizeof(given),
                             NCCL_EP_MAGIC));
    ncclEpLayout_t other = ginNcclIsHighThroughput(ep_group) ? NCCL_EP_LAYOUT_FLAT : NCCL_EP_LAYOUT_RANK_MAJOR;
    if (layout != NCCL_EP_LAYOUT_EXPERT_MAJOR && layout != other)
        return ginNcclFail(comm, ncclInvalidUsage,
                           "layout is %d: low latency has NCCL_EP_LAYOUT_EXPERT_MAJOR and NCCL_EP_LAYOUT_RANK_MAJOR, "
                           "high throughput NCCL_EP_LAYOUT_EXPERT_MAJOR and NCCL_EP_LAYOUT_FLAT", (int)layout);
    size_t align = given.dispatch_output_per_expert_alignment;
    if (align > 65536 || (align & (align - 1)) != 0)
        return ginNcclFail(comm, ncclInvalidArgument,
                           "dispatch_output_per_expert_alignment is %zu: a power of two, at most 65536, is needed",
                           align);
    unsigned int max = ep_group->config.num_topk != 0 ? ep_group->config.num_topk : 32;
    if (num_topk > (int)max || (num_topk < 1 && !ginNcclIsHighThroughput(ep_group)))
        return ginNcclFail(comm, ncclInvalidArgument, "num_topk is %d: 1 to %u are possible", num_topk, max);
    struct ncclEpHandle* made = (struct ncclEpHandle*)calloc(1, sizeof(struct ncclEpHandle));
    if (made == NULL) return ginNcclFail(comm, ncclSystemError, "there is no memory for a handle");
    made->group = ep_group;
    made->layout = layout;
    made->align = align > 1 ? (uint32_t)align : 1;
    made->topk = num_topk > 0 ? (uint32_t)num_topk : 0;
    *handle = made;
    return ncclSuccess;
}

/// Ends the handle's dispatch, if it was not combined.
static inline void ginNcclEnd(struct ncclEpHandle* handle) {
    if (handle->permuted.id != 0) (void)gin_ep_permuted_close(handle->permuted);
    handle->permuted.id = 0;
    if (handle->engine == NULL) return;
    // A slot takes no other dispatch before this one is received.
    if (handle->is_staged) (void)gin_ep_receive(handle->engine->slot, handle->stream);
    handle->is_staged = 0;
    (void)gin_ep_release(handle->engine->slot);
    handle->engine->user = NULL;
    handle->engine = NULL;
}

/// Ends the handle, and its dispatch.
static inline ncclResult_t ncclEpHandleDestroy(ncclEpHandle_t handle) {
    if (handle == NULL) return ncclInvalidArgument;
    ginNcclEnd(handle);
    free(handle);
    return ncclSuccess;
}

/// Returns gin's layout for a handle's.
static inline uint32_t ginNcclLayout(const struct ncclEpHandle* handle) {
    if (handle->layout == NCCL_EP_LAYOUT_RANK_MAJOR) return GIN_EP_RANK_MAJOR_PADDED;
    if (handle->layout == NCCL_EP_LAYOUT_FLAT) return GIN_EP_FLAT;
    return ginNcclIsHighThroughput(handle->group) ? GIN_EP_EXPERT_MAJOR_PACKED : GIN_EP_EXPERT_MAJOR_FIXED;
}

/// Allocates an engine. Collective.
static inline ncclResult_t ginNcclMakeEngine(struct ncclEpGroup* group, const gin_ep_config_t* config, uint32_t layout,
                                             uint32_t align, ginNcclEngine** engine) {
    ginNcclEngine* made = (ginNcclEngine*)calloc(1, sizeof(ginNcclEngine));
    if (made == NULL) return ginNcclFail(group->comm, ncclSystemError, "there is no memory for a group");
    made->config = *config;
    made->layout = layout;
    made->align = align;
    uint64_t rows = (uint64_t)group->comm->ranks * config->tokens;
    if (layout == GIN_EP_EXPERT_MAJOR_PACKED) rows = rows * config->topk + (uint64_t)group->local * (align - 1);
    uint32_t most = rows > UINT32_MAX ? UINT32_MAX : (uint32_t)rows;
    gin_status_t status = gin_ep_group_create(group->comm->comm, config, &made->group);
    if (status == GIN_OK) status = gin_ep_slot_create(made->group, 0, &made->slot);
    if (status == GIN_OK)
        status = gin_ep_permuted_create_without_rows(made->group, layout, most,
                                                     layout == GIN_EP_EXPERT_MAJOR_PACKED ? align : 0, &made->places);
    if (status != GIN_OK) {
        ncclResult_t result = ginNcclCall(group->comm, status);
        if (made->slot.id != 0) (void)gin_ep_slot_close(made->slot);
        if (made->group.id != 0) (void)gin_ep_group_release(made->group);
        free(made);
        return result;
    }
    made->next = group->engines;
    group->engines = made;
    *engine = made;
    return ncclSuccess;
}

/// Returns an engine of a shape that no dispatch has. If there is none, all ranks make one: ranks make the same calls
/// in the same order, so they find the same.
static inline ncclResult_t ginNcclEngineFor(struct ncclEpGroup* group, const gin_ep_config_t* config, uint32_t layout,
                                            uint32_t align, ginNcclEngine** engine) {
    for (ginNcclEngine* one = group->engines; one != NULL; one = one->next) {
        if (one->user == NULL && one->layout == layout && one->align == align &&
            memcmp(&one->config, config, sizeof(*config)) == 0) {
            *engine = one;
            return ncclSuccess;
        }
    }
    return ginNcclMakeEngine(group, config, layout, align, engine);
}

/// Returns the configuration of an engine for rows of bytes, without the members of its elements.
static inline gin_ep_config_t ginNcclConfig(const struct ncclEpHandle* handle) {
    const struct ncclEpGroup* group = handle->group;
    gin_ep_config_t config = GIN_EP_CONFIG_INIT;
    config.experts = group->config.num_experts;
    config.topk = handle->topk;
    config.tokens = group->config.max_dispatch_tokens_per_rank;
    config.sms = group->config.max_num_sms;
    config.deadline_ms = group->deadline_ms;
    config.combine_at_source = handle->layout == NCCL_EP_LAYOUT_EXPERT_MAJOR;
    return config;
}

/// Reads an error of the kernels. Silent ranks are no error with `enable_mask`, and dropped rows with
/// `NCCL_EP_OVERFLOW_DROP`. The streams of the engine are done.
static inline ncclResult_t ginNcclRead(struct ncclEpGroup* group, ginNcclEngine* engine) {
    uint32_t found = 0;
    gin_ep_report_t report;
    GIN_NCCL_TRY(ginNcclCall(group->comm, gin_ep_group_status(engine->group, &found, &report)));
    if (found == 0) return ncclSuccess;
    int is_silent = report.code == GIN_EP_SILENT || report.code == GIN_EP_UNSENT;
    if (is_silent) group->error = 1;
    if (is_silent && group->config.enable_mask != 0) return ncclSuccess;
    if (report.code == GIN_EP_TOO_MANY_ROWS && group->config.overflow_policy == NCCL_EP_OVERFLOW_DROP)
        return ncclSuccess;
    return ginNcclFail(group->comm, is_silent || report.code == GIN_EP_STOPPED ? ncclRemoteError : ncclInvalidUsage,
                       "%s", report.text);
}

/// Frees an engine, and returns the first error.
static inline ncclResult_t ginNcclFreeEngine(struct ncclEpGroup* group, ginNcclEngine* engine) {
    (void)gin_ep_permuted_close(engine->places);
    // Waits for the kernels, so that all errors can be read.
    (void)gin_ep_slot_close(engine->slot);
    ncclResult_t result = ginNcclRead(group, engine);
    ncclResult_t ended = ginNcclCall(group->comm, gin_ep_group_destroy(engine->group));
    free(engine);
    return result == ncclSuccess ? ended : result;
}

/// Ends the group and frees gin's memory. Collective. The program has destroyed all handles. After an error of gin the
/// group is freed, too, and the first error is returned.
static inline ncclResult_t ncclEpGroupDestroy(ncclEpGroup_t ep_group) {
    if (ep_group == NULL) return ncclInvalidArgument;
    ncclResult_t result = ncclSuccess;
    while (ep_group->engines != NULL) {
        ginNcclEngine* engine = ep_group->engines;
        ep_group->engines = engine->next;
        ncclResult_t one = ginNcclFreeEngine(ep_group, engine);
        result = result == ncclSuccess ? one : result;
    }
    if (ep_group->routing.id != 0) {
        ncclResult_t one = ginNcclCall(ep_group->comm, gin_window_close(ep_group->routing));
        result = result == ncclSuccess ? one : result;
    }
    for (uint32_t i = 0; i < GIN_NCCL_STREAMS; i++)
        if (ep_group->streams[i].stream.id != 0) (void)gin_stream_close(ep_group->streams[i].stream);
    free(ep_group);
    return result;
}

/// Returns the tokens of a handle.
static inline gin_ep_tokens_t ginNcclTokens(const struct ncclEpHandle* handle) {
    gin_ep_tokens_t tokens = GIN_EP_TOKENS_INIT;
    tokens.count = handle->tokens;
    tokens.ids = handle->ids;
    tokens.id_bits = handle->id_bits;
    return tokens;
}

/// Begins a dispatch: sends alone, or exchanges the rows and puts them into a layout.
static inline gin_status_t ginNcclBegin(const ginNcclComm* comm, const ginNcclEngine* engine, gin_stream_t stream,
                                        const gin_ep_tokens_t* tokens, gin_ep_permuted_t to, int is_staged) {
    if (is_staged) return gin_ep_dispatch(engine->slot, stream, tokens);
    if (comm->is_near) return gin_ep_exchange_into(engine->slot, stream, tokens, to);
    GIN_TRY(gin_ep_exchange(engine->slot, stream, tokens));
    return gin_ep_permute(engine->slot, stream, to);
}

/// Does the same. If an error of an earlier call is unread, waits for the stream, reads the error, and continues if it
/// allows that.
static inline ncclResult_t ginNcclSend(struct ncclEpGroup* group, ginNcclEngine* engine, gin_stream_t stream,
                                       const gin_ep_tokens_t* tokens, gin_ep_permuted_t to, int is_staged) {
    gin_status_t status = ginNcclBegin(group->comm, engine, stream, tokens, to, is_staged);
    if (status != GIN_ERROR_STATE) return ginNcclCall(group->comm, status);
    ncclResult_t refused = ginNcclCall(group->comm, status);
    // No kernel of the engine runs while its error is read.
    GIN_NCCL_TRY(ginNcclCall(group->comm, gin_stream_synchronize(stream)));
    GIN_NCCL_TRY(ginNcclRead(group, engine));
    status = ginNcclBegin(group->comm, engine, stream, tokens, to, is_staged);
    return status == GIN_ERROR_STATE ? refused : ginNcclCall(group->comm, status);
}

#include "gin_nccl_ep_rows.h"
