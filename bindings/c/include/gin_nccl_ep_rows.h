// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A part of gin_nccl_ep.h, which includes it: the calls that move rows, and those of masks.

#pragma once

/// Counts the rows of a routing before its dispatch, by an exchange of small rows; high throughput only.
static inline ncclResult_t ginNcclCount(struct ncclEpHandle* handle, const ncclEpLayoutInfo_t* info,
                                        gin_stream_t stream) {
    struct ncclEpGroup* group = handle->group;
    ginNcclComm* comm = group->comm;
    size_t local = group->local;
    int is_flat = handle->layout == NCCL_EP_LAYOUT_FLAT;
    gin_memory_t expert_counters, offsets, total;
    ginNcclShape of_experts = ginNcclShapeOf(ncclInt32, 1, local, 0, 0), of_one = ginNcclShapeOf(ncclInt32, 1, 1, 0, 0);
    GIN_NCCL_TRY(ginNcclTensor(comm, "expert_counters", info->expert_counters, 0, of_experts, &expert_counters));
    GIN_NCCL_TRY(ginNcclTensor(comm, "expert_offsets", info->expert_offsets, 0, of_experts, &offsets));
    GIN_NCCL_TRY(ginNcclTensor(comm, "recv_total_counter", info->recv_total_counter, 0, of_one, &total));
    if (info->src_rank_counters != NULL || (is_flat && offsets.data != NULL))
        return ginNcclFail(comm, ncclInvalidUsage,
                           "src_rank_counters is for NCCL_EP_LAYOUT_RANK_MAJOR, expert_offsets for "
                           "NCCL_EP_LAYOUT_EXPERT_MAJOR: leave it null");
    if (expert_counters.data == NULL && offsets.data == NULL && total.data == NULL) return ncclSuccess;
    gin_ep_config_t config = ginNcclConfig(handle);
    config.element = GIN_EP_OPAQUE, config.hidden = 8, config.row_bytes = 16, config.combine_at_source = 0;
    gin_ep_tokens_t tokens = ginNcclTokens(handle);
    // One exchange for each layout that has some of the numbers.
    for (int of_rows = 0; of_rows < 2; of_rows++) {
        gin_ep_metadata_t into = GIN_EP_METADATA_INIT;
        ginNcclEngine* engine = NULL;
        if (of_rows ? !is_flat || total.data == NULL : is_flat && expert_counters.data == NULL) continue;
        if (of_rows) {
            into.total = total;
        } else {
            into.offsets = offsets;
            if (is_flat) into.counts = expert_counters;
            if (!is_flat) into.zones = expert_counters, into.total = total;
        }
        if (group->routing.id == 0)
            GIN_NCCL_TRY(ginNcclCall(comm, gin_window_alloc(comm->comm, 16 * (uint64_t)config.tokens, 0,
                                                            &group->routing)));
        GIN_NCCL_TRY(ginNcclCall(comm, gin_window_memory(group->routing, &tokens.rows.data, &tokens.rows.bytes)));
        GIN_NCCL_TRY(ginNcclEngineFor(group, &config, of_rows ? GIN_EP_FLAT : GIN_EP_EXPERT_MAJOR_PACKED,
                                      of_rows ? 1 : handle->align, &engine));
        GIN_NCCL_TRY(ginNcclSend(group, engine, stream, &tokens, engine->places, 0));
        gin_status_t status = gin_ep_store_metadata(engine->slot, stream, engine->places, &into);
        ncclResult_t result = ginNcclCall(comm, status);
        (void)gin_ep_release(engine->slot);
        if (result != ncclSuccess) return result;
    }
    return ncclSuccess;
}

/// Gives the handle the ids of its tokens, which stay in the program's memory until the combine has run. In high
/// throughput `layout_info` gets numbers of rows, and the call is collective.
static inline ncclResult_t ncclEpUpdateHandle(ncclEpHandle_t handle, const ncclEpTensor_t* topk_idx,
                                              const ncclEpLayoutInfo_t* layout_info, cudaStream_t stream) {
    if (handle == NULL) return ncclInvalidArgument;
    struct ncclEpGroup* group = handle->group;
    ginNcclComm* comm = group->comm;
    ncclEpLayoutInfo_t info;
    gin_memory_t ids;
    gin_stream_t of_gin;
    GIN_NCCL_TRY(ginNcclTake(comm, "layout_info", layout_info, NCCL_EP_LAYOUT_INFO_V1_SIZE, &info, sizeof(info),
                             NCCL_EP_MAGIC));
    if (layout_info != NULL && !ginNcclIsHighThroughput(group))
        return ginNcclFail(comm, ncclInvalidUsage,
                           "layout_info is for high throughput here: pass it to ncclEpDispatch");
    size_t topk = handle->topk != 0 ? handle->topk : GIN_NCCL_ANY;
    GIN_NCCL_TRY(ginNcclTensor(comm, "topk_idx", topk_idx, 1, ginNcclShapeOf(-1, 2, GIN_NCCL_ANY, topk, 0), &ids));
    if (topk_idx->datatype != ncclInt32 && topk_idx->datatype != ncclInt64)
        return ginNcclFail(comm, ncclInvalidArgument, "topk_idx is neither ncclInt32 nor ncclInt64");
    if (topk_idx->sizes[0] > group->config.max_dispatch_tokens_per_rank || topk_idx->sizes[1] < 1 ||
        topk_idx->sizes[1] > 32)
        return ginNcclFail(comm, ncclInvalidArgument,
                           "topk_idx has %zu tokens of %zu ids: at most %u tokens of 1 to 32 ids are possible",
                           topk_idx->sizes[0], topk_idx->sizes[1], group->config.max_dispatch_tokens_per_rank);
    handle->topk = (uint32_t)topk_idx->sizes[1];
    handle->tokens = (uint32_t)topk_idx->sizes[0];
    handle->ids = ids;
    handle->id_bits = topk_idx->datatype == ncclInt64 ? 64 : 32;
    handle->id_kind = info.recv_topk_idx_kind;
    handle->is_routed = 1;
    if (layout_info == NULL) return ncclSuccess;
    GIN_NCCL_TRY(ginNcclStreamOf(group, stream, &of_gin));
    return ginNcclCount(handle, &info, of_gin);
}

/// Makes a handle and gives it the ids of its tokens.
static inline ncclResult_t ncclEpCreateHandle(ncclEpHandle_t* handle, ncclEpGroup_t ep_group, ncclEpLayout_t layout,
                                              const ncclEpTensor_t* topk_idx, const ncclEpLayoutInfo_t* layout_info,
                                              const ncclEpHandleConfig_t* config, cudaStream_t stream) {
    if (handle != NULL) *handle = NULL;
    if (handle == NULL || ep_group == NULL || topk_idx == NULL || topk_idx->ndim != 2 || topk_idx->sizes == NULL)
        return ncclInvalidArgument;
    int topk = topk_idx->sizes[1] <= 32 ? (int)topk_idx->sizes[1] : 33;
    ncclEpHandle_t made = NULL;
    GIN_NCCL_TRY(ncclEpInitHandle(&made, ep_group, layout, config, topk, NULL));
    ncclResult_t result = ncclEpUpdateHandle(made, topk_idx, layout_info, stream);
    if (result == ncclSuccess)
        *handle = made;
    else
        (void)ncclEpHandleDestroy(made);
    return result;
}

/// Sets the elements of a dispatch, and the type of its output rows.
static inline ncclResult_t ginNcclElements(struct ncclEpHandle* handle, const ncclEpDispatchInputs_t* inputs,
                                           const ncclEpDispatchConfig_t* given, gin_ep_config_t* config, int* type,
                                           size_t* scales) {
    ginNcclComm* comm = handle->group->comm;
    const ncclEpTensor_t* tokens = inputs->tokens;
    size_t bytes = ginNcclBytes(tokens->datatype) * tokens->sizes[1];
    config->hidden = (uint32_t)tokens->sizes[1];
    *type = (int)tokens->datatype;
    *scales = 0;
    if (given->quant_recipe == NCCL_EP_DISP_QUANT_FWD) {
        if (inputs->scales == NULL || inputs->scales->ndim != 2 || inputs->scales->sizes == NULL)
            return ginNcclFail(comm, ncclInvalidArgument,
                               "inputs.scales is needed by NCCL_EP_DISP_QUANT_FWD, [tokens][scales]");
        if (*type == 12) config->hidden *= 2;
        *scales = inputs->scales->sizes[1];
        config->element = GIN_EP_OPAQUE;
        config->row_bytes = (uint32_t)bytes;
        config->scale_bytes = (uint32_t)(*scales * ginNcclBytes(inputs->scales->datatype));
        bytes += config->scale_bytes;
    } else if (given->quant_recipe == NCCL_EP_DISP_QUANT_DS_FP8E3M4) {
        if (ginNcclIsHighThroughput(handle->group) || *type != ncclBfloat16 || tokens->sizes[1] % 128 != 0)
            return ginNcclFail(comm, ncclInvalidUsage,
                               "NCCL_EP_DISP_QUANT_DS_FP8E3M4 is for low latency, BF16 and a multiple of 128 elements");
        config->element = given->round_scales != 0 ? GIN_EP_E4M3_F32_POWERS : GIN_EP_E4M3_F32;
        *scales = tokens->sizes[1] / 128;
        bytes = tokens->sizes[1] + 4 * *scales;
        *type = -1;
    } else if (*type == ncclBfloat16 || *type == ncclFloat16 || *type == ncclFloat32) {
        config->element = *type == ncclBfloat16 ? GIN_EP_BF16 : *type == ncclFloat16 ? GIN_EP_F16 : GIN_EP_F32;
    } else {
        return ginNcclFail(comm, ncclInvalidArgument,
                           "inputs.tokens has data type %d: ncclBfloat16, ncclFloat16 or ncclFloat32, or "
                           "NCCL_EP_DISP_QUANT_FWD",
                           *type);
    }
    if (given->quant_recipe != NCCL_EP_DISP_QUANT_FWD && inputs->scales != NULL)
        return ginNcclFail(comm, ncclInvalidArgument, "inputs.scales is for NCCL_EP_DISP_QUANT_FWD: leave it null");
    if (handle->group->config.max_token_bytes != 0 && bytes > handle->group->config.max_token_bytes)
        return ginNcclFail(comm, ncclInvalidArgument,
                           "a row has %zu bytes with its scales; config.max_token_bytes is %u", bytes,
                           handle->group->config.max_token_bytes);
    return ncclSuccess;
}

/// Returns the shape of an output with `last` elements for each place of the handle's layout; 0 for one without a last
/// dimension.
static inline ginNcclShape ginNcclOutput(const struct ncclEpHandle* handle, int type, size_t last) {
    const struct ncclEpGroup* group = handle->group;
    size_t ranks = group->comm->ranks, tokens = group->config.max_dispatch_tokens_per_rank;
    if (ginNcclIsHighThroughput(group)) return ginNcclShapeOf(type, last == 0 ? 1 : 2, GIN_NCCL_ANY, last, 0);
    if (handle->layout == NCCL_EP_LAYOUT_RANK_MAJOR) return ginNcclShapeOf(type, 3, ranks, tokens, last);
    return ginNcclShapeOf(type, 3, group->local, ranks * tokens, last);
}

/// Takes the memory of received rows and their metadata.
static inline ncclResult_t ginNcclOutputs(struct ncclEpHandle* handle, const ncclEpDispatchOutputs_t* outputs,
                                          const ncclEpLayoutInfo_t* info, int type, size_t hidden, size_t scales,
                                          gin_memory_t* rows, gin_ep_metadata_t* metadata) {
    struct ncclEpGroup* group = handle->group;
    ginNcclComm* comm = group->comm;
    gin_ep_metadata_t into = GIN_EP_METADATA_INIT;
    int is_expert_major = handle->layout == NCCL_EP_LAYOUT_EXPERT_MAJOR, is_low = !ginNcclIsHighThroughput(group);
    ginNcclShape of_rows = ginNcclOutput(handle, type, hidden);
    if (type < 0) of_rows.width = 1;
    GIN_NCCL_TRY(ginNcclTensor(comm, "outputs.tokens", outputs->tokens, 1, of_rows, rows));
    ginNcclShape of_scales = ginNcclOutput(handle, -1, scales);
    GIN_NCCL_TRY(ginNcclTensor(comm, "outputs.scales", outputs->scales, scales != 0, of_scales, &into.scales));
    if (scales == 0 && outputs->scales != NULL)
        return ginNcclFail(comm, ncclInvalidArgument, "outputs.scales is for rows with scales: leave it null");
    if (is_expert_major && (outputs->topk_idx != NULL || (is_low && outputs->topk_weights != NULL)))
        return ginNcclFail(comm, ncclInvalidArgument,
                           "NCCL_EP_LAYOUT_EXPERT_MAJOR has no such output: leave outputs.topk_idx "
                           "null, and in low latency outputs.topk_weights");
    ginNcclShape of_ids = ginNcclOutput(handle, -1, is_expert_major ? 0 : handle->topk), of_weights = of_ids;
    of_weights.type = ncclFloat32;
    GIN_NCCL_TRY(ginNcclTensor(comm, "outputs.topk_weights", outputs->topk_weights, 0, of_weights, &into.weights));
    GIN_NCCL_TRY(ginNcclTensor(comm, "outputs.topk_idx", outputs->topk_idx, 0, of_ids, &into.experts));
    if (outputs->topk_idx != NULL && outputs->topk_idx->datatype == ncclInt64) into.id_bits = 64;
    if (outputs->topk_idx != NULL && outputs->topk_idx->datatype != ncclInt32 && into.id_bits != 64)
        return ginNcclFail(comm, ncclInvalidArgument, "outputs.topk_idx is neither ncclInt32 nor ncclInt64");
    // In high throughput the numbers were stored with the ids.
    if (!is_low && info->expert_counters != NULL)
        return ginNcclFail(comm, ncclInvalidUsage,
                           "layout_info is for low latency here: pass it to ncclEpUpdateHandle");
    size_t numbers = is_expert_major ? group->local : comm->ranks;
    const ncclEpTensor_t* counts = is_expert_major ? info->expert_counters : info->src_rank_counters;
    const char* name = is_expert_major ? "layout_info.expert_counters" : "layout_info.src_rank_counters";
    ginNcclShape of_numbers = ginNcclShapeOf(ncclInt32, 1, numbers, 0, 0);
    GIN_NCCL_TRY(ginNcclTensor(comm, name, counts, is_low && is_expert_major, of_numbers, &into.counts));
    ncclEpExpertIdKind_t kind = is_low ? info->recv_topk_idx_kind : handle->id_kind;
    if (kind == NCCL_EP_EXPERT_ID_GLOBAL) into.first_expert = comm->rank * group->local;
    *metadata = into;
    return ncclSuccess;
}

static inline int ginNcclHasMetadata(const gin_ep_metadata_t* into) {
    return into->experts.data != NULL || into->weights.data != NULL || into->scales.data != NULL ||
           into->counts.data != NULL;
}

/// Puts the handle's layout into the program's memory.
static inline ncclResult_t ginNcclPlace(struct ncclEpHandle* handle, const ginNcclEngine* engine, gin_memory_t rows,
                                        size_t capacity) {
    ginNcclComm* comm = handle->group->comm;
    gin_ep_permuted_into_t into = GIN_EP_PERMUTED_INTO_INIT;
    gin_ep_permuted_t smaller = GIN_NULL;
    into.rows = rows;
    if (!ginNcclIsHighThroughput(handle->group))
        return ginNcclCall(comm, gin_ep_permuted_with_memory(engine->places, &into, &handle->permuted));
    // More rows than can arrive need no places.
    gin_ep_permuted_memory_t of_places;
    GIN_NCCL_TRY(ginNcclCall(comm, gin_ep_permuted_memory(engine->places, &of_places)));
    uint32_t most = capacity < of_places.capacity ? (uint32_t)capacity : of_places.capacity;
    GIN_NCCL_TRY(ginNcclCall(comm, gin_ep_permuted_with_capacity(engine->places, most, &smaller)));
    ncclResult_t result = ginNcclCall(comm, gin_ep_permuted_with_memory(smaller, &into, &handle->permuted));
    (void)gin_ep_permuted_close(smaller);
    return result;
}

/// Sends the handle's tokens to the ranks of their experts, and puts the received rows into the outputs. The first
/// dispatch of a shape is collective on the host, and not part of a capture.
static inline ncclResult_t ncclEpDispatch(ncclEpHandle_t handle, const ncclEpDispatchInputs_t* inputs,
                                          const ncclEpDispatchOutputs_t* outputs, const ncclEpLayoutInfo_t* layout_info,
                                          const ncclEpDispatchConfig_t* config, cudaStream_t stream) {
    if (handle == NULL || inputs == NULL || outputs == NULL) return ncclInvalidArgument;
    struct ncclEpGroup* group = handle->group;
    ginNcclComm* comm = group->comm;
    ncclEpDispatchInputs_t in;
    ncclEpDispatchOutputs_t out;
    ncclEpLayoutInfo_t info;
    ncclEpDispatchConfig_t given;
    GIN_NCCL_TRY(ginNcclTake(comm, "inputs", inputs, NCCL_EP_DISPATCH_INPUTS_V1_SIZE, &in, sizeof(in), NCCL_EP_MAGIC));
    GIN_NCCL_TRY(ginNcclTake(comm, "outputs", outputs, NCCL_EP_DISPATCH_OUTPUTS_V1_SIZE, &out, sizeof(out),
                             NCCL_EP_MAGIC));
    GIN_NCCL_TRY(ginNcclTake(comm, "layout_info", layout_info, NCCL_EP_LAYOUT_INFO_V1_SIZE, &info, sizeof(info),
                             NCCL_EP_MAGIC));
    GIN_NCCL_TRY(ginNcclTake(comm, "config", config, NCCL_EP_DISPATCH_CONFIG_V1_SIZE, &given, sizeof(given),
                             NCCL_EP_MAGIC));
    if (!handle->is_routed)
        return ginNcclFail(comm, ncclInvalidUsage, "the handle has no ids: call ncclEpUpdateHandle");
    int is_high = ginNcclIsHighThroughput(group), is_backward = given.pass_direction == NCCL_EP_BWD_PASS;
    if (is_high && given.send_only != 0)
        return ginNcclFail(comm, ncclInvalidUsage, "config.send_only is for low latency: leave it 0");
    if (!is_high && is_backward)
        return ginNcclFail(comm, ncclInvalidUsage,
                           "config.pass_direction is for high throughput: leave it NCCL_EP_FWD_PASS");
    gin_stream_t of_gin;
    gin_memory_t rows;
    gin_ep_metadata_t metadata;
    gin_ep_tokens_t tokens = ginNcclTokens(handle);
    gin_ep_config_t wanted = ginNcclConfig(handle);
    ginNcclEngine* engine = NULL;
    int type = -1, has_weights = handle->layout != NCCL_EP_LAYOUT_EXPERT_MAJOR || is_high;
    size_t scales = 0;
    GIN_NCCL_TRY(ginNcclTensor(comm, "inputs.tokens", in.tokens, 1,
                               ginNcclShapeOf(-1, 2, handle->tokens, GIN_NCCL_ANY, 0), &tokens.rows));
    GIN_NCCL_TRY(ginNcclTensor(comm, "inputs.topk_weights", in.topk_weights, has_weights && !is_backward,
                               ginNcclShapeOf(ncclFloat32, 2, handle->tokens, handle->topk, 0), &tokens.weights));
    GIN_NCCL_TRY(ginNcclElements(handle, &in, &given, &wanted, &type, &scales));
    GIN_NCCL_TRY(ginNcclTensor(comm, "inputs.scales", in.scales, 0, ginNcclShapeOf(-1, 2, handle->tokens, scales, 0),
                               &tokens.scales));
    GIN_NCCL_TRY(ginNcclOutputs(handle, &out, &info, type, in.tokens->sizes[1], scales, &rows, &metadata));
    GIN_NCCL_TRY(ginNcclStreamOf(group, stream, &of_gin));
    // A refused call has left the last dispatch as it was.
    ginNcclEnd(handle);
    handle->metadata = metadata;
    GIN_NCCL_TRY(ginNcclEngineFor(group, &wanted, ginNcclLayout(handle), handle->align, &engine));
    GIN_NCCL_TRY(ginNcclPlace(handle, engine, rows, out.tokens->sizes[0]));
    GIN_NCCL_TRY(ginNcclSend(group, engine, of_gin, &tokens, handle->permuted, given.send_only != 0));
    handle->engine = engine;
    engine->user = handle;
    handle->is_staged = given.send_only != 0;
    handle->stream = of_gin;
    if (handle->is_staged || !ginNcclHasMetadata(&handle->metadata)) return ncclSuccess;
    return ginNcclCall(comm, gin_ep_store_metadata(engine->slot, of_gin, handle->permuted, &handle->metadata));
}

/// Receives a dispatch with `send_only`. After any other call it does nothing.
static inline ncclResult_t ncclEpComplete(ncclEpHandle_t handle, const ncclEpCompleteConfig_t* config,
                                          cudaStream_t stream) {
    if (handle == NULL) return ncclInvalidArgument;
    ginNcclComm* comm = handle->group->comm;
    ncclEpCompleteConfig_t given;
    gin_stream_t of_gin;
    GIN_NCCL_TRY(ginNcclTake(comm, "config", config, NCCL_EP_COMPLETE_CONFIG_V1_SIZE, &given, sizeof(given),
                             NCCL_EP_MAGIC));
    if (!handle->is_staged) return ncclSuccess;
    GIN_NCCL_TRY(ginNcclStreamOf(handle->group, stream, &of_gin));
    gin_ep_slot_t slot = handle->engine->slot;
    GIN_NCCL_TRY(ginNcclCall(comm, gin_ep_receive(slot, of_gin)));
    handle->is_staged = 0;
    GIN_NCCL_TRY(ginNcclCall(comm, gin_ep_permute(slot, of_gin, handle->permuted)));
    if (!ginNcclHasMetadata(&handle->metadata)) return ncclSuccess;
    return ginNcclCall(comm, gin_ep_store_metadata(slot, of_gin, handle->permuted, &handle->metadata));
}

/// Returns the experts' results to the ranks of their tokens, and stores the sums. Ends the dispatch.
static inline ncclResult_t ncclEpCombine(ncclEpHandle_t handle, const ncclEpCombineInputs_t* inputs,
                                         const ncclEpCombineOutputs_t* outputs, const ncclEpCombineConfig_t* config,
                                         cudaStream_t stream) {
    if (handle == NULL || inputs == NULL || outputs == NULL) return ncclInvalidArgument;
    struct ncclEpGroup* group = handle->group;
    ginNcclComm* comm = group->comm;
    ncclEpCombineInputs_t in;
    ncclEpCombineOutputs_t out;
    ncclEpCombineConfig_t given;
    gin_stream_t of_gin;
    gin_ep_combine_t sums = GIN_EP_COMBINE_INIT;
    GIN_NCCL_TRY(ginNcclTake(comm, "inputs", inputs, NCCL_EP_COMBINE_INPUTS_V1_SIZE, &in, sizeof(in), NCCL_EP_MAGIC));
    GIN_NCCL_TRY(ginNcclTake(comm, "outputs", outputs, NCCL_EP_COMBINE_OUTPUTS_V1_SIZE, &out, sizeof(out),
                             NCCL_EP_MAGIC));
    GIN_NCCL_TRY(ginNcclTake(comm, "config", config, NCCL_EP_COMBINE_CONFIG_V1_SIZE, &given, sizeof(given),
                             NCCL_EP_MAGIC));
    if (given.quant_recipe != NCCL_EP_COMB_QUANT_NONE || in.scales != NULL)
        return ginNcclFail(comm, ncclInvalidUsage,
                           "config.quant_recipe is not NCCL_EP_COMB_QUANT_NONE: gin returns rows as they are");
    if (given.pass_direction == NCCL_EP_BWD_PASS || in.topk_weights != NULL)
        return ginNcclFail(comm, ncclInvalidUsage, "NCCL_EP_BWD_PASS returns weights, which gin's combine does not");
    if (handle->engine == NULL || handle->is_staged)
        return ginNcclFail(comm, ncclInvalidUsage,
                           "the handle has no received dispatch: call ncclEpDispatch, and ncclEpComplete after "
                           "config.send_only; a dispatch has one combine");
    int is_low = !ginNcclIsHighThroughput(group), weighs = is_low && handle->layout == NCCL_EP_LAYOUT_EXPERT_MAJOR;
    const gin_ep_config_t* made = &handle->engine->config;
    // Rows that travel as bytes, or quantised, return as BF16.
    int type = made->element == GIN_EP_F16 ? ncclFloat16 : made->element == GIN_EP_F32 ? ncclFloat32 : ncclBfloat16;
    GIN_NCCL_TRY(ginNcclTensor(comm, "inputs.tokens", in.tokens, 1, ginNcclOutput(handle, type, made->hidden),
                               &sums.rows));
    GIN_NCCL_TRY(ginNcclTensor(comm, "outputs.tokens", out.tokens, 1,
                               ginNcclShapeOf(type, 2, handle->tokens, made->hidden, 0), &sums.output));
    if (!weighs && out.topk_weights != NULL)
        return ginNcclFail(comm, ncclInvalidUsage, "outputs.topk_weights has the factors of low latency with "
                           "NCCL_EP_LAYOUT_EXPERT_MAJOR: leave it null");
    GIN_NCCL_TRY(ginNcclTensor(comm, "outputs.topk_weights", out.topk_weights, weighs,
                               ginNcclShapeOf(ncclFloat32, 2, handle->tokens, handle->topk, 0), &sums.weights));
    GIN_NCCL_TRY(ginNcclStreamOf(group, stream, &of_gin));
    sums.permuted = handle->permuted;
    gin_status_t status = gin_ep_combine(handle->engine->slot, of_gin, &sums);
    ncclResult_t result = ginNcclCall(comm, status);
    ginNcclEnd(handle);
    return result;
}

static inline ncclResult_t ginNcclNeedsMask(const struct ncclEpGroup* group) {
    return group->config.enable_mask != 0
               ? ncclSuccess
               : ginNcclFail(group->comm, ncclInvalidUsage, "config.enable_mask is 0: set it to use masks");
}

/// Returns 1 in `error_out` if a rank was silent since the last `ncclEpErrorClear`, else 0. The streams of all calls
/// are done.
static inline ncclResult_t ncclEpGetAsyncError(ncclEpGroup_t ep_group, int* error_out) {
    if (ep_group == NULL || error_out == NULL) return ncclInvalidArgument;
    GIN_NCCL_TRY(ginNcclNeedsMask(ep_group));
    for (ginNcclEngine* engine = ep_group->engines; engine != NULL; engine = engine->next)
        GIN_NCCL_TRY(ginNcclRead(ep_group, engine));
    *error_out = ep_group->error;
    return ncclSuccess;
}

static inline ncclResult_t ncclEpErrorClear(ncclEpGroup_t ep_group) {
    if (ep_group == NULL) return ncclInvalidArgument;
    GIN_NCCL_TRY(ginNcclNeedsMask(ep_group));
    ep_group->error = 0;
    return ncclSuccess;
}

/// Returns the ranks that the group continues without, as bits. The streams of all calls are done.
static inline ncclResult_t ginNcclMasked(struct ncclEpGroup* group, uint64_t* masked) {
    GIN_NCCL_TRY(ginNcclNeedsMask(group));
    *masked = 0;
    for (ginNcclEngine* engine = group->engines; engine != NULL; engine = engine->next) {
        uint64_t of_engine = 0;
        GIN_NCCL_TRY(ginNcclCall(group->comm, gin_ep_group_masked(engine->group, 0, &of_engine)));
        *masked |= of_engine;
    }
    return ncclSuccess;
}

/// Copies a word for each rank to device memory: 1 for a rank that takes part, 0 for one that was silent. Waits for the
/// stream.
static inline ncclResult_t ncclEpMaskQuery(ncclEpGroup_t ep_group, int* mask_status, cudaStream_t stream) {
    int words[64];
    uint64_t masked = 0;
    gin_stream_t of_gin;
    if (ep_group == NULL || mask_status == NULL) return ncclInvalidArgument;
    ginNcclComm* comm = ep_group->comm;
    GIN_NCCL_TRY(ginNcclStreamOf(ep_group, stream, &of_gin));
    GIN_NCCL_TRY(ginNcclCall(comm, gin_stream_synchronize(of_gin)));
    GIN_NCCL_TRY(ginNcclMasked(ep_group, &masked));
    // A group has at most 64 ranks.
    for (uint32_t rank = 0; rank < comm->ranks && rank < 64; rank++) words[rank] = (masked >> rank & 1) == 0;
    gin_memory_t to = GIN_MEMORY_NULL;
    to.data = mask_status;
    to.bytes = 4 * (uint64_t)comm->ranks;
    return ginNcclCall(comm, gin_stream_write(of_gin, &to, words));
}

/// Accepts the present mask alone: gin masks silent ranks, and no others.
static inline ncclResult_t ncclEpMaskUpdate(ncclEpGroup_t ep_group, const int* mask, cudaStream_t stream) {
    uint64_t masked = 0;
    gin_stream_t of_gin;
    if (ep_group == NULL || mask == NULL) return ncclInvalidArgument;
    GIN_NCCL_TRY(ginNcclStreamOf(ep_group, stream, &of_gin));
    GIN_NCCL_TRY(ginNcclCall(ep_group->comm, gin_stream_synchronize(of_gin)));
    GIN_NCCL_TRY(ginNcclMasked(ep_group, &masked));
    for (uint32_t rank = 0; rank < ep_group->comm->ranks; rank++)
        if ((mask[rank] != 0) == (masked >> rank & 1))
            return ginNcclFail(ep_group->comm, ncclInvalidUsage,
                               "ncclEpMaskUpdate would change rank %u: gin masks silent ranks alone, and "
                               "ncclEpMaskClean admits all", rank);
    return ncclSuccess;
}

/// Lets all ranks take part again. Collective; waits for the stream. No handle has a dispatch that was not combined.
static inline ncclResult_t ncclEpMaskClean(ncclEpGroup_t ep_group, cudaStream_t stream) {
    gin_stream_t of_gin;
    if (ep_group == NULL) return ncclInvalidArgument;
    ginNcclComm* comm = ep_group->comm;
    GIN_NCCL_TRY(ginNcclNeedsMask(ep_group));
    GIN_NCCL_TRY(ginNcclStreamOf(ep_group, stream, &of_gin));
    GIN_NCCL_TRY(ginNcclCall(comm, gin_stream_synchronize(of_gin)));
    for (ginNcclEngine* engine = ep_group->engines; engine != NULL; engine = engine->next) {
        if (engine->user != NULL) ginNcclEnd(engine->user);
        GIN_NCCL_TRY(ginNcclRead(ep_group, engine));
        GIN_NCCL_TRY(ginNcclCall(comm, gin_ep_slot_close(engine->slot)));
        GIN_NCCL_TRY(ginNcclCall(comm, gin_ep_group_readmit(engine->group)));
        GIN_NCCL_TRY(ginNcclCall(comm, gin_ep_slot_create(engine->group, 0, &engine->slot)));
    }
    return ncclSuccess;
}
