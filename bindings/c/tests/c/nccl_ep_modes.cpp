// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A program for NCCL EP, by gin_nccl_ep.h: quantised rows, high throughput, masks and refusals. Its arguments are those
// of nccl_ep.

#include "nccl_ep.hpp"

/// Returns the value of FP8 (E4M3).
static float from_e4m3(uint8_t bits) {
    int exponent = bits >> 3 & 15, mantissa = bits & 7;
    float magnitude = exponent == 0 ? std::ldexp(float(mantissa), -9) : std::ldexp(float(8 + mantissa), exponent - 10);
    return bits & 0x80 ? -magnitude : magnitude;
}

/// Combines results of expert-major zones in low latency, and compares the sums.
static void combine_zones(Rank& r, ncclEpHandle_t handle, const Batch& batch, Tensor<uint16_t>& results,
                          Tensor<float>& weights) {
    Tensor<uint16_t> sums(ncclBfloat16, {batch.count, HIDDEN});
    ncclEpCombineInputs_t in = NCCL_EP_COMBINE_INPUTS_INIT;
    ncclEpCombineOutputs_t out = NCCL_EP_COMBINE_OUTPUTS_INIT;
    in.tokens = &results, out.tokens = &sums, out.topk_weights = &weights;
    OK(r.comm, ncclEpCombine(handle, &in, &out, nullptr, r.stream));
    r.stream.synchronize();
    check_sums(batch, sums.read());
}

/// Returns the results of the experts at the places of fixed zones. `check(place, row)` compares a received row.
template <class Check>
static std::vector<uint16_t> fixed_results(Rank& r, const std::vector<Batch>& batches, Check check) {
    std::vector<uint16_t> results(r.local * r.ranks * ROOM * HIDDEN);
    for (uint32_t local = 0; local < r.local; local++) {
        std::vector<Row> rows = rows_of(batches, r, local);
        for (uint32_t i = 0; i < rows.size(); i++) {
            size_t place = size_t(local) * r.ranks * ROOM + i;
            check(place, rows[i]);
            for (uint32_t column = 0; column < HIDDEN; column++) {
                float value = batches[rows[i].source].at(rows[i].token, column);
                results[place * HIDDEN + column] = bf16(expert(r.rank * r.local + local, value));
            }
        }
    }
    return results;
}

// BF16 rows that the dispatch quantises, with scales that are rounded in the second round.
static void quantised(Rank& r) {
    ncclEpGroup_t group = group_of(r, NCCL_EP_ALGO_LOW_LATENCY);
    for (uint32_t round = 30; round < 32; round++) {
        std::vector<Batch> batches = all_batches(r, round);
        Given given(batches[r.rank]);
        Tensor<uint8_t> received(ncclFloat8e4m3, {r.local, r.ranks * ROOM, HIDDEN});
        Tensor<float> scales(ncclFloat32, {r.local, r.ranks * ROOM, HIDDEN / 128});
        Tensor<int32_t> counts(ncclInt32, {r.local});
        ncclEpHandle_t handle;
        OK(r.comm, ncclEpCreateHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, &given.wide, nullptr, nullptr, r.stream));
        ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
        ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
        ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
        ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
        in.tokens = &given.rows, out.tokens = &received, out.scales = &scales, info.expert_counters = &counts;
        config.quant_recipe = NCCL_EP_DISP_QUANT_DS_FP8E3M4, config.round_scales = round == 31;
        OK(r.comm, ncclEpDispatch(handle, &in, &out, &info, &config, r.stream));
        r.stream.synchronize();
        check_counts(r, batches, counts.read());
        std::vector<uint8_t> bytes = received.read();
        std::vector<float> factors = scales.read();
        std::vector<uint16_t> made = fixed_results(r, batches, [&](size_t place, Row row) {
            float greatest = 0;
            for (uint32_t i = 0; i < HIDDEN; i++)
                greatest = std::max(greatest, std::fabs(batches[row.source].at(row.token, i)));
            int exponent;
            if (round == 31) HOLDS(std::frexp(factors[place], &exponent) == 0.5f);
            if (round == 30) HOLDS(std::fabs(factors[place] - std::max(greatest, 1e-4f) / 448) < 1e-7f);
            for (uint32_t i = 0; i < HIDDEN; i++)
                // An element has 4 significant bits.
                HOLDS(std::fabs(from_e4m3(bytes[place * HIDDEN + i]) * factors[place] -
                                batches[row.source].at(row.token, i)) <= greatest / 16);
        });
        Tensor<uint16_t> results(ncclBfloat16, {r.local, r.ranks * ROOM, HIDDEN}, made);
        combine_zones(r, handle, given.batch, results, given.weights);
        OK(r.comm, ncclEpHandleDestroy(handle));
    }
    OK(r.comm, ncclEpGroupDestroy(group));
}

/// Rows and scales of bytes, which arrive as they were sent.
struct Bytes {
    Tensor<uint8_t> rows, scales;

    Bytes(uint32_t rank, uint32_t count)
        : rows(ncclFloat8e4m3, {count, HIDDEN}, make(rank, count, 0, HIDDEN)),
          scales(ncclUint8, {count, 16}, make(rank, count, 200, 16)) {}

    /// Checks what arrived at a place.
    static void check(const std::vector<uint8_t>& rows, const std::vector<uint8_t>& scales, size_t place, uint32_t source,
                      uint32_t token) {
        for (uint32_t i = 0; i < HIDDEN; i++) HOLDS(rows[place * HIDDEN + i] == byte(source, token, i));
        for (uint32_t i = 0; i < 16; i++) HOLDS(scales[place * 16 + i] == byte(source, token, 200 + i));
    }

   private:
    static uint8_t byte(uint32_t rank, uint32_t token, uint32_t i) { return uint8_t(rank * 31 + token * 7 + i); }

    static std::vector<uint8_t> make(uint32_t rank, uint32_t count, uint32_t first, uint32_t columns) {
        std::vector<uint8_t> made;
        for (uint32_t token = 0; token < count; token++)
            for (uint32_t i = 0; i < columns; i++) made.push_back(byte(rank, token, first + i));
        return made;
    }
};

static void forwarded(Rank& r) {
    ncclEpGroup_t group = group_of(r, NCCL_EP_ALGO_LOW_LATENCY);
    std::vector<Batch> batches = all_batches(r, 33);
    Given given(batches[r.rank]);
    Bytes sent(r.rank, given.batch.count);
    Tensor<uint8_t> received(ncclFloat8e4m3, {r.local, r.ranks * ROOM, HIDDEN});
    Tensor<uint8_t> scales(ncclUint8, {r.local, r.ranks * ROOM, 16});
    Tensor<int32_t> counts(ncclInt32, {r.local});
    ncclEpHandle_t handle;
    OK(r.comm, ncclEpCreateHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, &given.wide, nullptr, nullptr, r.stream));
    ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
    ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
    ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
    in.tokens = &sent.rows, in.scales = &sent.scales, out.tokens = &received, out.scales = &scales;
    info.expert_counters = &counts, config.quant_recipe = NCCL_EP_DISP_QUANT_FWD;
    OK(r.comm, ncclEpDispatch(handle, &in, &out, &info, &config, r.stream));
    r.stream.synchronize();
    check_counts(r, batches, counts.read());
    std::vector<uint8_t> bytes = received.read(), found = scales.read();
    std::vector<uint16_t> made = fixed_results(r, batches, [&](size_t place, Row row) {
        Bytes::check(bytes, found, place, row.source, row.token);
    });
    Tensor<uint16_t> results(ncclBfloat16, {r.local, r.ranks * ROOM, HIDDEN}, made);
    combine_zones(r, handle, given.batch, results, given.weights);
    OK(r.comm, ncclEpHandleDestroy(handle));
    OK(r.comm, ncclEpGroupDestroy(group));
}

/// Combines results of high throughput, which the program has weighted, and compares the sums.
static void combine_rows(Rank& r, ncclEpHandle_t handle, const Batch& batch, Tensor<uint16_t>& results) {
    Tensor<uint16_t> sums(ncclBfloat16, {batch.count, HIDDEN});
    ncclEpCombineInputs_t in = NCCL_EP_COMBINE_INPUTS_INIT;
    ncclEpCombineOutputs_t out = NCCL_EP_COMBINE_OUTPUTS_INIT;
    in.tokens = &results, out.tokens = &sums;
    OK(r.comm, ncclEpCombine(handle, &in, &out, nullptr, r.stream));
    r.stream.synchronize();
    check_sums(batch, sums.read());
}

// The same in high throughput.
static void forwarded_flat(Rank& r) {
    ncclEpGroup_t group = group_of(r, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    std::vector<Batch> batches = all_batches(r, 45);
    Given given(batches[r.rank]);
    Bytes sent(r.rank, given.batch.count);
    size_t room = r.ranks * ROOM;
    Tensor<uint8_t> received(ncclFloat8e4m3, {room, HIDDEN}), scales(ncclUint8, {room, 16});
    Tensor<float> weights(ncclFloat32, {room, TOPK});
    Tensor<uint16_t> results(ncclBfloat16, {room, HIDDEN});
    ncclEpHandle_t handle;
    OK(r.comm, ncclEpCreateHandle(&handle, group, NCCL_EP_LAYOUT_FLAT, &given.narrow, nullptr, nullptr, r.stream));
    ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
    ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
    in.tokens = &sent.rows, in.scales = &sent.scales, in.topk_weights = &given.weights;
    out.tokens = &received, out.scales = &scales, out.topk_weights = &weights;
    config.quant_recipe = NCCL_EP_DISP_QUANT_FWD;
    OK(r.comm, ncclEpDispatch(handle, &in, &out, nullptr, &config, r.stream));
    r.stream.synchronize();
    std::vector<uint8_t> bytes = received.read(), found = scales.read();
    std::vector<float> factors = weights.read();
    std::vector<uint16_t> made(room * HIDDEN);
    size_t place = 0;
    for (uint32_t source = 0; source < r.ranks; source++)
        for (uint32_t token : tokens_from(batches[source], r)) {
            Bytes::check(bytes, found, place, source, token);
            for (uint32_t i = 0; i < HIDDEN; i++) {
                float sum = 0;
                for (uint32_t k = 0; k < TOPK; k++) {
                    int64_t id = batches[source].ids[token * TOPK + k];
                    if (r.is_here(id)) sum += factors[place * TOPK + k] * expert(uint32_t(id), batches[source].at(token, i));
                }
                made[place * HIDDEN + i] = bf16(sum);
            }
            place++;
        }
    results.fill(made);
    combine_rows(r, handle, given.batch, results);
    OK(r.comm, ncclEpHandleDestroy(handle));
    OK(r.comm, ncclEpGroupDestroy(group));
}

// FP32 rows by rank, which the experts leave as they are: a token gets its row once for each of its ranks.
static void f32_rows(Rank& r) {
    ncclEpGroup_t group = group_of(r, NCCL_EP_ALGO_LOW_LATENCY);
    std::vector<Batch> batches = all_batches(r, 36);
    Given given(batches[r.rank]);
    Tensor<float> rows(ncclFloat32, {given.batch.count, HIDDEN}, given.batch.rows);
    Tensor<float> received(ncclFloat32, {r.ranks, ROOM, HIDDEN}), sums(ncclFloat32, {given.batch.count, HIDDEN});
    ncclEpHandle_t handle;
    OK(r.comm, ncclEpCreateHandle(&handle, group, NCCL_EP_LAYOUT_RANK_MAJOR, &given.wide, nullptr, nullptr, r.stream));
    ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
    ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    in.tokens = &rows, in.topk_weights = &given.weights, out.tokens = &received;
    OK(r.comm, ncclEpDispatch(handle, &in, &out, nullptr, nullptr, r.stream));
    ncclEpCombineInputs_t from = NCCL_EP_COMBINE_INPUTS_INIT;
    ncclEpCombineOutputs_t to = NCCL_EP_COMBINE_OUTPUTS_INIT;
    from.tokens = &received, to.tokens = &sums;
    OK(r.comm, ncclEpCombine(handle, &from, &to, nullptr, r.stream));
    r.stream.synchronize();
    std::vector<float> found = sums.read();
    for (uint32_t i = 0; i < given.batch.count * HIDDEN; i++) {
        std::vector<bool> is_for(r.ranks);
        for (uint32_t k = 0; k < TOPK; k++) {
            int64_t id = given.batch.ids[i / HIDDEN * TOPK + k];
            if (id >= 0) is_for[size_t(id) / r.local] = true;
        }
        HOLDS(found[i] == float(std::count(is_for.begin(), is_for.end(), true)) * given.batch.rows[i]);
    }
    OK(r.comm, ncclEpHandleDestroy(handle));
    OK(r.comm, ncclEpGroupDestroy(group));
}

// The number of rows is known before the outputs are allocated, in the even rounds.
static void flat(Rank& r) {
    ncclEpGroup_t group = group_of(r, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    ncclEpHandle_t handle;
    OK(r.comm, ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_FLAT, nullptr, -1, nullptr));
    for (uint32_t round = 40; round < 44; round++) {
        std::vector<Batch> batches = all_batches(r, round);
        Given given(batches[r.rank]);
        std::vector<size_t> firsts;
        size_t expected = 0;
        for (const Batch& batch : batches) {
            firsts.push_back(expected);
            expected += tokens_from(batch, r).size();
        }
        Tensor<int32_t> counts(ncclInt32, {r.local}), total(ncclInt32, {1});
        ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
        info.expert_counters = &counts, info.recv_total_counter = &total;
        info.recv_topk_idx_kind = NCCL_EP_EXPERT_ID_GLOBAL;
        OK(r.comm, ncclEpUpdateHandle(handle, &given.wide, round % 2 == 0 ? &info : nullptr, r.stream));
        r.stream.synchronize();
        size_t rows = r.ranks * ROOM + 3;
        if (round % 2 == 0) {
            check_counts(r, batches, counts.read());
            rows = size_t(total.read()[0]);
            HOLDS(rows == expected);
            // A layout has room for one row at least.
            if (rows == 0) rows = 1;
        }
        Tensor<uint16_t> received(ncclBfloat16, {rows, HIDDEN}), results(ncclBfloat16, {rows, HIDDEN});
        Tensor<float> weights(ncclFloat32, {rows, TOPK});
        Tensor<int64_t> ids(ncclInt64, {rows, TOPK});
        ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
        ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
        in.tokens = &given.rows, in.topk_weights = &given.weights;
        out.tokens = &received, out.topk_weights = &weights, out.topk_idx = &ids;
        OK(r.comm, ncclEpDispatch(handle, &in, &out, nullptr, nullptr, r.stream));
        r.stream.synchronize();
        auto place = [&](uint32_t source, uint32_t row) { return firsts[source] + row; };
        results.fill(results_of_ranks(r, batches, received.read(), ids.read(), weights.read(),
                                      round % 2 == 0 ? r.rank * r.local : 0, place));
        combine_rows(r, handle, given.batch, results);
    }
    OK(r.comm, ncclEpHandleDestroy(handle));
    OK(r.comm, ncclEpGroupDestroy(group));
}

static void packed(Rank& r) {
    ncclEpGroup_t group = group_of(r, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    for (uint32_t round = 50; round < 54; round++) {
        std::vector<Batch> batches = all_batches(r, round);
        Given given(batches[r.rank]);
        ncclEpHandleConfig_t config = NCCL_EP_HANDLE_CONFIG_INIT;
        uint32_t align = round % 2 == 0 ? 4 : 1;
        config.dispatch_output_per_expert_alignment = align;
        Tensor<int32_t> counts(ncclInt32, {r.local}), offsets(ncclInt32, {r.local}), total(ncclInt32, {1});
        ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
        info.expert_counters = &counts, info.expert_offsets = &offsets, info.recv_total_counter = &total;
        ncclEpHandle_t handle;
        OK(r.comm, ncclEpCreateHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, &given.narrow, &info, &config, r.stream));
        r.stream.synchronize();
        std::vector<int32_t> padded = counts.read(), starts = offsets.read();
        std::vector<uint32_t> firsts;
        size_t rows = 0;
        for (uint32_t local = 0; local < r.local; local++) {
            size_t zone = (rows_of(batches, r, local).size() + align - 1) / align * align;
            HOLDS(padded[local] == int32_t(zone) && starts[local] == int32_t(rows));
            firsts.push_back(uint32_t(rows));
            rows += zone;
        }
        HOLDS(total.read()[0] == int32_t(rows));
        if (rows == 0) rows = 1;
        Tensor<uint16_t> received(ncclBfloat16, {rows, HIDDEN}), results(ncclBfloat16, {rows, HIDDEN});
        Tensor<float> weights(ncclFloat32, {rows});
        ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
        ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
        in.tokens = &given.rows, in.topk_weights = &given.weights;
        out.tokens = &received, out.topk_weights = &weights;
        OK(r.comm, ncclEpDispatch(handle, &in, &out, nullptr, nullptr, r.stream));
        r.stream.synchronize();
        std::vector<float> found = weights.read();
        for (uint32_t local = 0; local < r.local; local++) {
            std::vector<Row> of_zone = rows_of(batches, r, local);
            for (uint32_t i = 0; i < of_zone.size(); i++)
                HOLDS(found[firsts[local] + i] == batches[of_zone[i].source].weights[of_zone[i].token * TOPK + of_zone[i].k]);
        }
        results.fill(results_of_zones(r, batches, received.read(), firsts, true));
        combine_rows(r, handle, given.batch, results);
        OK(r.comm, ncclEpHandleDestroy(handle));
    }
    OK(r.comm, ncclEpGroupDestroy(group));
}

/// Checks that a call is refused with a result and a text.
static void refuses(Rank& r, ncclResult_t expected, ncclResult_t found, const char* text) {
    if (found != expected || std::strstr(ncclGetLastError(r.comm), text) == nullptr)
        throw std::runtime_error(std::string(text) + ": " + std::to_string(int(found)) + ", " + ncclGetLastError(r.comm));
}

static void refused_groups(Rank& r) {
    ncclEpGroup_t group;
    ncclEpGroupConfig_t config = r.config(NCCL_EP_ALGO_LOW_LATENCY);
    auto with = [&](auto change, ncclResult_t result, const char* text) {
        ncclEpGroupConfig_t wrong = config;
        change(wrong);
        refuses(r, result, ncclEpCreateGroup(&group, r.comm, &wrong), text);
        HOLDS(group == nullptr);
    };
    with([](auto& c) { c.magic = 0; }, ncclInvalidArgument, "NCCL_EP_..._INIT");
    with([](auto& c) { c.size = 40; }, ncclInvalidArgument, "size 40");
    with([](auto& c) { c.zero_copy = NCCL_EP_ZERO_COPY_ON; }, ncclInvalidUsage, "takes no windows");
    with([](auto& c) { c.max_dispatch_tokens_per_rank = 0; }, ncclInvalidUsage, "max_dispatch_tokens_per_rank");
    with([](auto& c) { c.num_experts = 0; }, ncclInvalidUsage, "num_experts");
    with([](auto& c) { c.enable_mask = 1, c.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT; }, ncclInvalidUsage, "enable_mask");
    uint64_t foreign[8] = {};
    HOLDS(ncclEpCreateGroup(&group, reinterpret_cast<ncclComm_t>(foreign), &config) == ncclInvalidArgument);
    // A struct of version 1 has fewer members.
    config.size = NCCL_EP_GROUP_CONFIG_V1_SIZE, config.zero_copy = NCCL_EP_ZERO_COPY_ON;
    OK(r.comm, ncclEpCreateGroup(&group, r.comm, &config));
    int number = 0;
    refuses(r, ncclInvalidUsage, ncclEpGetAsyncError(group, &number), "enable_mask is 0");
    OK(r.comm, ncclEpGroupDestroy(group));
}

static void refusals(Rank& r) {
    refused_groups(r);
    ncclEpGroup_t group = group_of(r, NCCL_EP_ALGO_LOW_LATENCY);
    ncclEpHandle_t handle;
    refuses(r, ncclInvalidUsage, ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_FLAT, nullptr, TOPK, nullptr), "layout is 3");
    refuses(r, ncclInvalidUsage, ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_UNSET, nullptr, TOPK, nullptr), "layout is 0");
    refuses(r, ncclInvalidArgument, ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_RANK_MAJOR, nullptr, 33, nullptr), "num_topk");
    size_t bytes = 1;
    OK(r.comm, ncclEpHandleMemSize(group, NCCL_EP_LAYOUT_EXPERT_MAJOR, nullptr, &bytes, TOPK));
    HOLDS(bytes == 0);
    OK(r.comm, ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, nullptr, TOPK, nullptr));
    Given given(Batch(1, 1));
    Tensor<int32_t> other(ncclInt32, {ROOM, TOPK + 1}), many(ncclInt32, {ROOM + 1, TOPK}), counts(ncclInt32, {r.local});
    Tensor<uint16_t> received(ncclBfloat16, {r.local, r.ranks * ROOM, HIDDEN});
    Tensor<uint16_t> sums(ncclBfloat16, {ROOM, HIDDEN}), small(ncclBfloat16, {r.local, r.ranks * ROOM, HIDDEN - 8});
    ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
    ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
    in.tokens = &given.rows, out.tokens = &received, info.expert_counters = &counts;
    auto dispatch = [&](const ncclEpDispatchConfig_t* config) {
        return ncclEpDispatch(handle, &in, &out, &info, config, r.stream);
    };
    refuses(r, ncclInvalidUsage, dispatch(nullptr), "call ncclEpUpdateHandle");
    refuses(r, ncclInvalidArgument, ncclEpUpdateHandle(handle, &other, nullptr, r.stream), "dimension 1 of topk_idx is 4; 3");
    refuses(r, ncclInvalidArgument, ncclEpUpdateHandle(handle, &many, nullptr, r.stream), "at most 6 tokens");
    refuses(r, ncclInvalidUsage, ncclEpUpdateHandle(handle, &given.narrow, &info, r.stream), "layout_info");
    refuses(r, ncclInvalidArgument, ncclEpUpdateHandle(handle, &given.weights, nullptr, r.stream), "ncclInt32");
    OK(r.comm, ncclEpUpdateHandle(handle, &given.narrow, nullptr, r.stream));
    ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
    config.pass_direction = NCCL_EP_BWD_PASS;
    refuses(r, ncclInvalidUsage, dispatch(&config), "pass_direction");
    config = NCCL_EP_DISPATCH_CONFIG_INIT, config.quant_recipe = NCCL_EP_DISP_QUANT_FWD;
    refuses(r, ncclInvalidArgument, dispatch(&config), "inputs.scales is needed");
    out.tokens = &small;
    refuses(r, ncclInvalidArgument, dispatch(nullptr), "dimension 2 of outputs.tokens is 120; 128");
    out.tokens = nullptr;
    refuses(r, ncclInvalidArgument, dispatch(nullptr), "outputs.tokens is null");
    out.tokens = &received, info.expert_counters = nullptr;
    refuses(r, ncclInvalidArgument, dispatch(nullptr), "layout_info.expert_counters is null");
    info.expert_counters = &counts, in.scales = &given.weights;
    refuses(r, ncclInvalidArgument, dispatch(nullptr), "inputs.scales is for");
    in.scales = nullptr;
    ncclEpTensor_t windowed = *&given.rows, bare = windowed;
    windowed.win_hdl = reinterpret_cast<ncclWindow_t>(&bare), bare.magic = 0;
    in.tokens = &windowed;
    refuses(r, ncclInvalidUsage, dispatch(nullptr), "in a window");
    in.tokens = &bare;
    refuses(r, ncclInvalidArgument, dispatch(nullptr), "NCCL_EP_TENSOR_INIT");
    in.tokens = &given.rows;
    ncclEpCombineInputs_t from = NCCL_EP_COMBINE_INPUTS_INIT;
    ncclEpCombineOutputs_t to = NCCL_EP_COMBINE_OUTPUTS_INIT;
    ncclEpCombineConfig_t combine = NCCL_EP_COMBINE_CONFIG_INIT;
    from.tokens = &received, to.tokens = &sums, to.topk_weights = &given.weights;
    refuses(r, ncclInvalidUsage, ncclEpCombine(handle, &from, &to, nullptr, r.stream), "no received dispatch");
    combine.quant_recipe = NCCL_EP_COMB_QUANT_NVFP4;
    refuses(r, ncclInvalidUsage, ncclEpCombine(handle, &from, &to, &combine, r.stream), "quant_recipe");
    combine = NCCL_EP_COMBINE_CONFIG_INIT, combine.pass_direction = NCCL_EP_BWD_PASS;
    refuses(r, ncclInvalidUsage, ncclEpCombine(handle, &from, &to, &combine, r.stream), "NCCL_EP_BWD_PASS");
    OK(r.comm, dispatch(nullptr));
    out.tokens = &small;
    refuses(r, ncclInvalidArgument, dispatch(nullptr), "outputs.tokens is 120");
    // The refused calls leave the dispatch as it was.
    out.tokens = &received, to.topk_weights = nullptr;
    refuses(r, ncclInvalidArgument, ncclEpCombine(handle, &from, &to, nullptr, r.stream), "outputs.topk_weights is null");
    to.topk_weights = &given.weights;
    OK(r.comm, ncclEpCombine(handle, &from, &to, nullptr, r.stream));
    refuses(r, ncclInvalidUsage, ncclEpCombine(handle, &from, &to, nullptr, r.stream), "a dispatch has one combine");
    r.stream.synchronize();
    OK(r.comm, ncclEpHandleDestroy(handle));
    OK(r.comm, ncclEpGroupDestroy(group));
    ncclEpTensor_t* made = nullptr;
    size_t sizes[2] = {3, 5};
    HOLDS(ncclEpTensorAlloc(&made, 0, ncclInt32, sizes, nullptr) == ncclInvalidArgument);
    OK(r.comm, ncclEpTensorAlloc(&made, 2, ncclInt32, sizes, nullptr));
    HOLDS(made->sizes != sizes && made->sizes[1] == 5 && made->magic == NCCL_EP_TENSOR_MAGIC);
    OK(r.comm, ncclEpTensorDestroy(made));
    OK(r.comm, ncclEpTensorDestroy(nullptr));
}

/// Dispatches and combines a round with masks; `masked` is the mask that the other ranks then have.
static void masked_round(Rank& r, ncclEpGroup_t group, uint32_t round, bool is_silent) {
    Given given(Batch(r.rank, round));
    Tensor<uint16_t> received(ncclBfloat16, {r.local, r.ranks * ROOM, HIDDEN});
    Tensor<uint16_t> sums(ncclBfloat16, {given.batch.count, HIDDEN});
    Tensor<int32_t> counts(ncclInt32, {r.local}), mask(ncclInt32, {r.ranks});
    ncclEpHandle_t handle;
    OK(r.comm, ncclEpCreateHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, &given.wide, nullptr, nullptr, r.stream));
    ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
    ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
    in.tokens = &given.rows, out.tokens = &received, info.expert_counters = &counts;
    ncclEpCombineInputs_t from = NCCL_EP_COMBINE_INPUTS_INIT;
    ncclEpCombineOutputs_t to = NCCL_EP_COMBINE_OUTPUTS_INIT;
    from.tokens = &received, to.tokens = &sums, to.topk_weights = &given.weights;
    if (!is_silent) {
        OK(r.comm, ncclEpDispatch(handle, &in, &out, &info, nullptr, r.stream));
        OK(r.comm, ncclEpCombine(handle, &from, &to, nullptr, r.stream));
        r.stream.synchronize();
    }
    OK(r.comm, ncclEpHandleDestroy(handle));
}

// The last rank is silent for a round; the others learn that, and all go on.
static void masks(Rank& r) {
    if (r.ranks == 1) return;
    ncclEpGroup_t group;
    ncclEpGroupConfig_t config = r.config(NCCL_EP_ALGO_LOW_LATENCY);
    config.enable_mask = 1, config.timeout_ns = 2000000000u;
    OK(r.comm, ncclEpCreateGroup(&group, r.comm, &config));
    bool is_last = r.rank == r.ranks - 1;
    Tensor<int32_t> mask(ncclInt32, {r.ranks});
    std::vector<int32_t> all(r.ranks, 1), without_last = all;
    without_last.back() = 0;
    auto check = [&](int error, const std::vector<int32_t>& expected) {
        int found = -1;
        OK(r.comm, ncclEpGetAsyncError(group, &found));
        HOLDS(found == error);
        OK(r.comm, ncclEpMaskQuery(group, static_cast<int*>((&mask)->data), r.stream));
        HOLDS(mask.read() == expected);
    };
    masked_round(r, group, 61, false);
    check(0, all);
    masked_round(r, group, 62, is_last);
    check(!is_last, is_last ? all : without_last);
    if (!is_last) {
        OK(r.comm, ncclEpMaskUpdate(group, without_last.data(), r.stream));
        refuses(r, ncclInvalidUsage, ncclEpMaskUpdate(group, all.data(), r.stream), "ncclEpMaskClean");
        // The others go on without the last rank.
        masked_round(r, group, 63, false);
        check(1, without_last);
    }
    OK(r.comm, ginNcclCall(ginNcclOf(r.comm), gin_job_barrier(ginNcclOf(r.comm)->job)));
    OK(r.comm, ncclEpMaskClean(group, r.stream));
    check(!is_last, all);
    OK(r.comm, ncclEpErrorClear(group));
    masked_round(r, group, 64, false);
    check(0, all);
    OK(r.comm, ncclEpGroupDestroy(group));
}

// Without masks the dispatch after a silent rank is refused, with the rank's number, and the one after that works.
static void silent(Rank& r) {
    if (r.ranks == 1) return;
    ncclEpGroup_t group;
    ncclEpGroupConfig_t config = r.config(NCCL_EP_ALGO_LOW_LATENCY);
    config.timeout_ns = 1000000000u;
    OK(r.comm, ncclEpCreateGroup(&group, r.comm, &config));
    bool is_last = r.rank == r.ranks - 1;
    masked_round(r, group, 66, false);
    masked_round(r, group, 67, is_last);
    if (!is_last) {
        Given given(Batch(r.rank, 68));
        Tensor<uint16_t> received(ncclBfloat16, {r.local, r.ranks * ROOM, HIDDEN});
        Tensor<int32_t> counts(ncclInt32, {r.local});
        ncclEpHandle_t handle;
        OK(r.comm, ncclEpCreateHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, &given.wide, nullptr, nullptr, r.stream));
        ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
        ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
        ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
        in.tokens = &given.rows, out.tokens = &received, info.expert_counters = &counts;
        std::string name = "rank " + std::to_string(r.ranks - 1);
        refuses(r, ncclRemoteError, ncclEpDispatch(handle, &in, &out, &info, nullptr, r.stream), name.c_str());
        OK(r.comm, ncclEpDispatch(handle, &in, &out, &info, nullptr, r.stream));
        r.stream.synchronize();
        OK(r.comm, ncclEpHandleDestroy(handle));
    }
    OK(r.comm, ncclEpGroupDestroy(group));
}

// An output has too few rows: the next dispatch is refused, or continues with `NCCL_EP_OVERFLOW_DROP`.
static void overflow(Rank& r) {
    for (ncclEpOverflowPolicy_t policy : {NCCL_EP_OVERFLOW_AUTO, NCCL_EP_OVERFLOW_DROP}) {
        ncclEpGroup_t group;
        ncclEpGroupConfig_t config = r.config(NCCL_EP_ALGO_HIGH_THROUGHPUT);
        config.overflow_policy = policy;
        OK(r.comm, ncclEpCreateGroup(&group, r.comm, &config));
        // Each rank has two tokens, for the first expert of each of two ranks.
        std::vector<int32_t> ids(2 * TOPK, -1);
        for (uint32_t token = 0; token < 2; token++) {
            ids[token * TOPK] = int32_t(r.rank * r.local);
            ids[token * TOPK + 1] = int32_t((r.rank + 1) % r.ranks * r.local);
        }
        Tensor<int32_t> routing(ncclInt32, {2, TOPK}, ids);
        Tensor<uint16_t> rows(ncclBfloat16, {2, HIDDEN}), received(ncclBfloat16, {1, HIDDEN});
        Tensor<float> weights(ncclFloat32, {2, TOPK});
        ncclEpHandle_t handle;
        OK(r.comm, ncclEpCreateHandle(&handle, group, NCCL_EP_LAYOUT_FLAT, &routing, nullptr, nullptr, r.stream));
        ncclEpDispatchInputs_t in = NCCL_EP_DISPATCH_INPUTS_INIT;
        ncclEpDispatchOutputs_t out = NCCL_EP_DISPATCH_OUTPUTS_INIT;
        in.tokens = &rows, in.topk_weights = &weights, out.tokens = &received;
        OK(r.comm, ncclEpDispatch(handle, &in, &out, nullptr, nullptr, r.stream));
        r.stream.synchronize();
        if (policy == NCCL_EP_OVERFLOW_AUTO)
            refuses(r, ncclInvalidUsage, ncclEpDispatch(handle, &in, &out, nullptr, nullptr, r.stream), "rows");
        OK(r.comm, ncclEpDispatch(handle, &in, &out, nullptr, nullptr, r.stream));
        r.stream.synchronize();
        OK(r.comm, ncclEpHandleDestroy(handle));
        ncclResult_t end = ncclEpGroupDestroy(group);
        // The last dispatch has rows without a place, too.
        HOLDS(end == (policy == NCCL_EP_OVERFLOW_AUTO ? ncclInvalidUsage : ncclSuccess));
    }
}

int main(int count, char** words) {
    return run_all({{"quantised", quantised}, {"forwarded", forwarded}, {"forwarded flat", forwarded_flat},
                    {"f32", f32_rows}, {"flat", flat}, {"packed", packed}, {"refusals", refusals}, {"masks", masks},
                    {"silent", silent}, {"overflow", overflow}},
                   count, words);
}
