/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * gin_nccl_ep.h in C99: the structs have the sizes and initialisers of NCCL EP, and one rank gets its sum. It runs on a
 * virtual GPU. */

#define GIN_NCCL_EP_NO_CUDA
#include "gin_nccl_ep.h"

#define TRY(call) \
    do { \
        ncclResult_t of_call = (call); \
        if (of_call != ncclSuccess) { \
            printf(#call ": %s: %s\n", ncclGetErrorString(of_call), ncclGetLastError(comm)); \
            return 1; \
        } \
    } while (0)

/* The sizes that NCCL EP freezes for its API version 2. */
static int wrong_sizes(void) {
    return (sizeof(ncclEpTensor_t) != 48) | (sizeof(ncclEpTensorAllocConfig_t) != 8) << 1 |
           (sizeof(ncclEpGroupConfig_t) != 112) << 2 | (sizeof(ncclEpLayoutInfo_t) != 48) << 3 |
           (sizeof(ncclEpDispatchInputs_t) != 32) << 4 | (sizeof(ncclEpDispatchOutputs_t) != 40) << 5 |
           (sizeof(ncclEpCombineInputs_t) != 32) << 6 | (sizeof(ncclEpCombineOutputs_t) != 24) << 7 |
           (sizeof(ncclEpHandleConfig_t) != 16) << 8 | (sizeof(ncclEpDispatchConfig_t) != 24) << 9 |
           (sizeof(ncclEpCombineConfig_t) != 20) << 10 | (sizeof(ncclEpCompleteConfig_t) != 8) << 11 |
           (offsetof(ncclEpGroupConfig_t, alloc) != 56) << 12 | (offsetof(ncclEpGroupConfig_t, timeout_ns) != 88) << 13;
}

int main(void) {
    static uint16_t rows[128], received[128], sums[128];
    static int32_t ids[1], counts[1];
    static float weights[1];
    size_t of_rows[2] = {1, 128}, of_ids[2] = {1, 1}, of_received[3] = {1, 1, 128}, of_counts[1] = {1};
    gin_config_t config = GIN_CONFIG_INIT;
    ncclComm_t comm = NULL;
    gin_job_t job;
    gin_stream_t stream;
    ncclEpGroup_t group = NULL;
    ncclEpHandle_t handle = NULL;
    int version = 0, ranks = 0, rank = -1;
    ncclEpGroupConfig_t sizes = NCCL_EP_GROUP_CONFIG_INIT;
    ncclEpTensor_t tokens = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2, .datatype = ncclBfloat16, .data = rows, .sizes = of_rows};
    ncclEpTensor_t routing = NCCL_EP_TENSOR_INIT, output = NCCL_EP_TENSOR_INIT, result = NCCL_EP_TENSOR_INIT;
    ncclEpTensor_t factors = NCCL_EP_TENSOR_INIT, numbers = NCCL_EP_TENSOR_INIT;
    ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
    ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
    ncclEpCombineInputs_t from;
    ncclEpCombineOutputs_t to = NCCL_EP_COMBINE_OUTPUTS_INIT;
    if (wrong_sizes() != 0) {
        printf("sizes %x\n", (unsigned int)wrong_sizes());
        return 1;
    }
    config.device = GIN_DEVICE_VIRTUAL;
    if (gin_job_local(&config, 1, &job) != GIN_OK || gin_stream_create(job, &stream) != GIN_OK) return 1;
    TRY(ginNcclCommInit(&comm, job, NULL));
    TRY(ncclEpGetVersion(&version));
    TRY(ncclCommCount(comm, &ranks));
    TRY(ncclCommUserRank(comm, &rank));
    if (version != NCCL_EP_VERSION_CODE || ranks != 1 || rank != 0) return 1;
    sizes.algorithm = NCCL_EP_ALGO_LOW_LATENCY;
    sizes.num_experts = 1;
    sizes.max_dispatch_tokens_per_rank = 1;
    TRY(ncclEpCreateGroup(&group, comm, &sizes));
    routing.ndim = 2, routing.datatype = ncclInt32, routing.data = ids, routing.sizes = of_ids;
    output.ndim = 3, output.datatype = ncclBfloat16, output.data = received, output.sizes = of_received;
    result.ndim = 2, result.datatype = ncclBfloat16, result.data = sums, result.sizes = of_rows;
    factors.ndim = 2, factors.datatype = ncclFloat32, factors.data = weights, factors.sizes = of_ids;
    numbers.ndim = 1, numbers.datatype = ncclInt32, numbers.data = counts, numbers.sizes = of_counts;
    for (int i = 0; i < 128; i++) rows[i] = 0x3f80; /* 1 */
    weights[0] = 0.5f;
    TRY(ncclEpCreateHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, &routing, NULL, NULL, ginNcclStream(stream)));
    in.tokens = &tokens, out.tokens = &output, info.expert_counters = &numbers;
    TRY(ncclEpDispatch(handle, &in, &out, &info, NULL, ginNcclStream(stream)));
    from = NCCL_EP_COMBINE_INPUTS_INIT;
    from.tokens = &output, to.tokens = &result, to.topk_weights = &factors;
    TRY(ncclEpCombine(handle, &from, &to, NULL, ginNcclStream(stream)));
    if (gin_stream_synchronize(stream) != GIN_OK || counts[0] != 1 || sums[0] != 0x3f00 || sums[127] != 0x3f00) return 1;
    TRY(ncclEpHandleDestroy(handle));
    TRY(ncclEpGroupDestroy(group));
    (void)gin_stream_close(stream);
    if (ginNcclCommFree(comm) != ncclSuccess || gin_job_close(job) != GIN_OK) return 1;
    printf("passed\n");
    return 0;
}
