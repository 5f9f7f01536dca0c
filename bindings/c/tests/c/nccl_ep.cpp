// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A program for NCCL EP, by gin_nccl_ep.h, of one, two and four ranks:
//
//   nccl_ep [RANKS...] [network]   ranks that are threads; all numbers of ranks without one
//   nccl_ep FILE                   one rank of processes, by GIN_RANK and GIN_RANKS, which meet by an id in the file
//
// It runs on GPUs if CUDA's headers were found, else on virtual GPUs.

#include "nccl_ep.hpp"

static std::vector<uint32_t> fixed_zones(const Rank& r) {
    std::vector<uint32_t> firsts;
    for (uint32_t local = 0; local < r.local; local++) firsts.push_back(local * r.ranks * ROOM);
    return firsts;
}

/// A dispatch and a combine of low latency by expert, in two parts.
struct ByExpert {
    Rank& r;
    std::vector<Batch> batches;
    Given given;
    Tensor<uint16_t> received, results, sums;
    Tensor<int32_t> counts;
    ncclEpHandle_t handle = nullptr;

    ByExpert(Rank& r, uint32_t round)
        : r(r),
          batches(all_batches(r, round)),
          given(batches[r.rank]),
          received(ncclBfloat16, {r.local, r.ranks * ROOM, HIDDEN}),
          results(ncclBfloat16, {r.local, r.ranks * ROOM, HIDDEN}),
          sums(ncclBfloat16, {given.batch.count, HIDDEN}),
          counts(ncclInt32, {r.local}) {}

    void dispatch(ncclEpHandle_t of, bool is_staged, bool is_completed = true) {
        handle = of;
        ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
        ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
        ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
        ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
        in.tokens = &given.rows, out.tokens = &received, info.expert_counters = &counts;
        config.send_only = is_staged;
        OK(r.comm, ncclEpDispatch(handle, &in, &out, &info, &config, r.stream));
        if (is_completed) OK(r.comm, ncclEpComplete(handle, nullptr, r.stream));
    }
    void combine() {
        r.stream.synchronize();
        check_counts(r, batches, counts.read());
        results.fill(results_of_zones(r, batches, received.read(), fixed_zones(r), false));
        ncclEpCombineInputs_t in = NCCL_EP_COMBINE_INPUTS_INIT;
        ncclEpCombineOutputs_t out = NCCL_EP_COMBINE_OUTPUTS_INIT;
        in.tokens = &results, out.tokens = &sums, out.topk_weights = &given.weights;
        OK(r.comm, ncclEpCombine(handle, &in, &out, nullptr, r.stream));
        OK(r.comm, ncclEpComplete(handle, nullptr, r.stream));
        r.stream.synchronize();
        check_sums(given.batch, sums.read());
    }
};

static void by_expert(Rank& r) {
    ncclEpGroup_t group = group_of(r, NCCL_EP_ALGO_LOW_LATENCY);
    ncclEpHandle_t kept;
    OK(r.comm, ncclEpInitHandle(&kept, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, nullptr, TOPK, nullptr));
    for (uint32_t round = 0; round < 7; round++) {
        ByExpert one(r, round);
        ncclEpHandle_t handle = kept;
        if (round % 2 == 0) OK(r.comm, ncclEpUpdateHandle(handle, &one.given.narrow, nullptr, r.stream));
        if (round % 2 == 1)
            OK(r.comm, ncclEpCreateHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, &one.given.wide, nullptr, nullptr,
                                          r.stream));
        one.dispatch(handle, round >= 4);
        one.combine();
        if (round % 2 == 1) OK(r.comm, ncclEpHandleDestroy(handle));
    }
    OK(r.comm, ncclEpHandleDestroy(kept));
    OK(r.comm, ncclEpGroupDestroy(group));
}

/// Dispatches of two handles at the same time, combined in the order of their dispatches; then dispatches that are not
/// combined, or not even completed.
static void two_handles(Rank& r) {
    ncclEpGroup_t group = group_of(r, NCCL_EP_ALGO_LOW_LATENCY);
    ByExpert first(r, 10), second(r, 11);
    ncclEpHandle_t handles[2];
    OK(r.comm, ncclEpCreateHandle(&handles[0], group, NCCL_EP_LAYOUT_EXPERT_MAJOR, &first.given.wide, nullptr, nullptr, r.stream));
    OK(r.comm, ncclEpCreateHandle(&handles[1], group, NCCL_EP_LAYOUT_EXPERT_MAJOR, &second.given.wide, nullptr, nullptr, r.stream));
    first.dispatch(handles[0], false);
    second.dispatch(handles[1], false);
    first.combine();
    second.combine();
    first.dispatch(handles[0], false);
    first.dispatch(handles[0], true, false);
    first.dispatch(handles[0], true);
    first.combine();
    second.dispatch(handles[1], true, false);
    for (ncclEpHandle_t handle : handles) OK(r.comm, ncclEpHandleDestroy(handle));
    OK(r.comm, ncclEpGroupDestroy(group));
}

static void by_rank(Rank& r) {
    ncclEpGroup_t group = group_of(r, NCCL_EP_ALGO_LOW_LATENCY);
    for (uint32_t round = 20; round < 24; round++) {
        std::vector<Batch> batches = all_batches(r, round);
        Given given(batches[r.rank]);
        Tensor<uint16_t> received(ncclBfloat16, {r.ranks, ROOM, HIDDEN}), results(ncclBfloat16, {r.ranks, ROOM, HIDDEN});
        Tensor<uint16_t> sums(ncclBfloat16, {given.batch.count, HIDDEN});
        Tensor<float> weights(ncclFloat32, {r.ranks, ROOM, TOPK});
        Tensor<int32_t> ids(ncclInt32, {r.ranks, ROOM, TOPK}), counts(ncclInt32, {r.ranks});
        ncclEpHandle_t handle;
        OK(r.comm, ncclEpCreateHandle(&handle, group, NCCL_EP_LAYOUT_RANK_MAJOR, &given.narrow, nullptr, nullptr, r.stream));
        ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
        ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
        ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
        ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
        in.tokens = &given.rows, in.topk_weights = &given.weights;
        out.tokens = &received, out.topk_weights = &weights, out.topk_idx = &ids;
        info.src_rank_counters = &counts;
        bool is_global = round % 2 == 1;
        if (is_global) info.recv_topk_idx_kind = NCCL_EP_EXPERT_ID_GLOBAL;
        config.send_only = round == 22;
        OK(r.comm, ncclEpDispatch(handle, &in, &out, &info, &config, r.stream));
        OK(r.comm, ncclEpComplete(handle, nullptr, r.stream));
        r.stream.synchronize();
        std::vector<int32_t> found = counts.read(), narrow = ids.read();
        for (uint32_t source = 0; source < r.ranks; source++)
            HOLDS(found[source] == int32_t(tokens_from(batches[source], r).size()));
        auto place = [](uint32_t source, uint32_t row) { return size_t(source) * ROOM + row; };
        std::vector<int64_t> wide(narrow.begin(), narrow.end());
        results.fill(results_of_ranks(r, batches, received.read(), wide, weights.read(),
                                      is_global ? r.rank * r.local : 0, place));
        ncclEpCombineInputs_t from = NCCL_EP_COMBINE_INPUTS_INIT;
        ncclEpCombineOutputs_t to = NCCL_EP_COMBINE_OUTPUTS_INIT;
        from.tokens = &results, to.tokens = &sums;
        OK(r.comm, ncclEpCombine(handle, &from, &to, nullptr, r.stream));
        r.stream.synchronize();
        check_sums(given.batch, sums.read());
        OK(r.comm, ncclEpHandleDestroy(handle));
    }
    OK(r.comm, ncclEpGroupDestroy(group));
}

/// After the first dispatch of a shape a capture records a dispatch and a combine, whose experts return their rows. The
/// graph runs again with other rows.
static void graph(Rank& r) {
    ncclEpGroup_t group = group_of(r, NCCL_EP_ALGO_LOW_LATENCY);
    ByExpert first(r, 70), one(r, 71);
    ncclEpHandle_t handle;
    OK(r.comm, ncclEpCreateHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, &first.given.wide, nullptr, nullptr, r.stream));
    first.dispatch(handle, false);
    first.combine();
    std::function<void()> run = r.stream.capture([&] {
        OK(r.comm, ncclEpUpdateHandle(handle, &one.given.wide, nullptr, r.stream));
        one.dispatch(handle, false);
        ncclEpCombineInputs_t in = NCCL_EP_COMBINE_INPUTS_INIT;
        ncclEpCombineOutputs_t out = NCCL_EP_COMBINE_OUTPUTS_INIT;
        in.tokens = &one.received, out.tokens = &one.sums, out.topk_weights = &one.given.weights;
        OK(r.comm, ncclEpCombine(handle, &in, &out, nullptr, r.stream));
    });
    for (float factor : {1.0f, -2.0f}) {
        std::vector<float> rows = one.given.batch.rows;
        for (float& value : rows) value *= factor;
        one.given.rows.fill(halves(rows));
        run();
        r.stream.synchronize();
        check_counts(r, one.batches, one.counts.read());
        std::vector<uint16_t> found = one.sums.read();
        for (uint32_t i = 0; i < one.given.batch.count * HIDDEN; i++) {
            float sum = 0;
            for (uint32_t k = 0; k < TOPK; k++) {
                uint32_t at = i / HIDDEN * TOPK + k;
                if (one.given.batch.ids[at] >= 0) sum += one.given.batch.weights[at] * rows[i];
            }
            HOLDS(from_bf16(found[i]) == sum);
        }
    }
    OK(r.comm, ncclEpHandleDestroy(handle));
    OK(r.comm, ncclEpGroupDestroy(group));
}

int main(int count, char** words) {
    return run_all({{"by expert", by_expert}, {"two handles", two_handles}, {"by rank", by_rank}, {"graph", graph}}, count, words);
}
