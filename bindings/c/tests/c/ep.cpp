// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Expert parallelism of two and three ranks, with experts in C++:
//
//   ep [CASE]      on virtual GPUs; all cases without one

#include "ep.hpp"

using gin::ep::ReceivedRows;

/// Replaces each received row, of `from(row, column)`, by the sum of its experts here, in its place or at `to`.
template <class From, class T>
static void experts(const ReceivedRows& received, uint32_t first_expert, From from, T* to, uint32_t tokens,
                    T (*narrow)(float)) {
    for (uint32_t source = 0; source < received.ranks; source++)
        for (uint32_t row = gin::block_in_grid(); row < received.count(source); row += gin::blocks_of_grid())
            for (uint32_t column = gin::thread_in_block(); column < HIDDEN; column += gin::threads_of_block()) {
                float sum = 0, value = from(source, row, column);
                for (uint32_t k = 0; k < received.topk; k++) {
                    int32_t number = received.expert(source, row, k);
                    if (number < 0) continue;
                    float result = expert(first_expert + uint32_t(number), value);
                    sum = std::fma(received.weight(source, row, k), result, sum);
                }
                T* place = to ? to + (uint64_t(source) * tokens + row) * HIDDEN : received.template row<T>(source, row);
                place[column] = narrow(sum);
            }
}

static float same(float value) { return value; }

static void experts_bf16(ReceivedRows received, uint32_t first_expert, uint16_t* to, uint32_t tokens) {
    auto from = [&](uint32_t source, uint32_t row, uint32_t column) {
        return Bf16::widen(received.row<uint16_t>(source, row)[column]);
    };
    experts<decltype(from), uint16_t>(received, first_expert, from, to, tokens, Bf16::narrow);
}
static void experts_f32(ReceivedRows received, uint32_t first_expert, float* to, uint32_t tokens) {
    auto from = [&](uint32_t source, uint32_t row, uint32_t column) { return received.row<float>(source, row)[column]; };
    experts<decltype(from), float>(received, first_expert, from, to, tokens, same);
}
// FP8 with one scale for the 128 elements of a row: FP32, or the exponent of a power of two. Results are BF16, in other
// memory.
static void experts_e4m3(ReceivedRows received, uint32_t first_expert, uint16_t* to, uint32_t tokens, uint32_t element) {
    auto from = [&](uint32_t source, uint32_t row, uint32_t column) {
        float scale = element == GIN_EP_E4M3_UE8M0 ? std::ldexp(1.0f, int(received.scales(source, row)[0]) - 127)
                                                   : received.scales<float>(source, row)[0];
        return e4m3_value(received.row(source, row)[column]) * scale;
    };
    experts<decltype(from), uint16_t>(received, first_expert, from, to, tokens, Bf16::narrow);
}
// FP32 results of BF16 rows.
static void experts_wide(ReceivedRows received, uint32_t first_expert, float* to, uint32_t tokens) {
    auto from = [&](uint32_t source, uint32_t row, uint32_t column) {
        return Bf16::widen(received.row<uint16_t>(source, row)[column]);
    };
    experts<decltype(from), float>(received, first_expert, from, to, tokens, same);
}
// Rows of a layout: each row's expert multiplies it.
static void experts_of_layout(ReceivedRows received, uint32_t first_expert, gin_ep_permuted_memory_t layout) {
    const uint32_t* info = static_cast<const uint32_t*>(layout.source_info.data);
    uint32_t rows = *static_cast<const uint32_t*>(layout.counts.data);
    for (uint32_t place = gin::block_in_grid(); place < rows; place += gin::blocks_of_grid()) {
        gin::ep::SourceInfo from{info[place]};
        if (from.is_gap()) continue;
        int32_t number = received.expert(from.source(), from.row(), from.k());
        uint16_t* row = static_cast<uint16_t*>(layout.rows.data) + uint64_t(place) * HIDDEN;
        for (uint32_t column = gin::thread_in_block(); column < HIDDEN; column += gin::threads_of_block())
            row[column] = Bf16::narrow(expert(first_expert + uint32_t(number), Bf16::widen(row[column])));
    }
}

constexpr gin_shape_t SHAPE{{3, 1, 1}, {32, 1, 1}, 0, 0};

/// What a rank of each case has.
struct Rank {
    const gin::Job& job;
    uint32_t rank = job.rank(), ranks = job.ranks(), first_expert = rank * experts_of_rank(ranks);
    gin::Communicator comm{job};
    gin::Stream stream{job};

    gin_ep_config_t config() const {
        gin_ep_config_t config = gin::ep::config(EXPERTS, HIDDEN, TOPK);
        config.tokens = ROOM;
        // A busy machine may stop a thread for seconds.
        config.deadline_ms = 60000;
        return config;
    }
    void done(gin::ep::Slot& slot, gin::ep::Group& group) {
        stream.synchronize();
        std::optional<gin_ep_report_t> report = group.status();
        if (report) throw std::runtime_error(report->text);
        slot.close();
        group.destroy();
    }
    void end() {
        comm.check_fault();
        comm.destroy();
    }
};

/// Tokens in memory.
template <class T>
struct Given {
    Elements<T> rows{ROOM * HIDDEN};
    Elements<int32_t> ids{ROOM * TOPK};
    Elements<float> weights{ROOM * TOPK};
    uint32_t count = 0;

    void set(const Batch& batch, const std::vector<T>& values) {
        rows = values, ids = batch.ids, weights = batch.weights, count = batch.count;
    }
    gin_ep_tokens_t tokens() {
        gin_ep_tokens_t tokens = gin::ep::tokens();
        tokens.count = count, tokens.rows = rows.memory(), tokens.ids = ids.memory();
        tokens.weights = weights.memory();
        return tokens;
    }
};

/// Compares sums with what they must be.
template <class T, class Expected>
static void check_sums(const Batch& batch, Elements<T>& output, Expected expected) {
    for (uint32_t i = 0; i < batch.count * HIDDEN; i++) {
        T wanted = expected(i / HIDDEN, i % HIDDEN);
        if (std::memcmp(&output.data()[i], &wanted, sizeof(T)) != 0)
            throw std::runtime_error("wrong sum of token " + std::to_string(i / HIDDEN));
    }
}

static void bf16_rows(Rank& r) {
    gin::ep::Group group(r.comm, r.config());
    gin::ep::Slot slot(group, 0);
    auto kernel = gin::Kernel::of<experts_bf16>("experts_bf16");
    for (uint64_t round = 0; round < 6; round++) {
        Batch batch(r.rank, round);
        Given<uint16_t> given;
        Elements<uint16_t> output(ROOM * HIDDEN), elsewhere(r.ranks * ROOM * HIDDEN);
        given.set(batch, batch.bf16());
        if (round % 2 == 0) {
            slot.dispatch(r.stream, given.tokens());
            slot.receive(r.stream);
        } else {
            slot.exchange(r.stream, given.tokens());
        }
        r.stream.synchronize();
        std::vector<uint64_t> counts = slot.counts();
        uint64_t two[2] = {0, 77};
        std::size_t count;
        gin::check(gin_ep_received_counts(slot.raw(), two, 1, &count));
        HOLDS(counts.size() == r.ranks && count == r.ranks && two[0] == counts[0] && two[1] == 77);
        for (uint32_t source = 0; source < r.ranks; source++)
            HOLDS(counts[source] == rows_for(Batch(source, round), r.ranks, r.rank));
        gin_ep_combine_t combine = gin::ep::combine(output.memory());
        uint16_t* to = nullptr;
        if (round % 3 == 1) combine.rows = elsewhere.memory(), to = elsewhere.data();
        r.stream.launch(kernel, SHAPE, slot.received(), r.first_expert, to, ROOM);
        slot.combine(r.stream, combine);
        r.stream.synchronize();
        check_sums(batch, output, [&](uint32_t token, uint32_t column) {
            auto round = [](float value) { return Bf16::widen(Bf16::narrow(value)); };
            auto value = [&](uint32_t row, uint32_t column) { return batch.rows[row * HIDDEN + column]; };
            return Bf16::narrow(sum_over_ranks(batch, r.ranks, token, column, round, value));
        });
    }
    r.done(slot, group);
}

static void f32_rows(Rank& r) {
    gin_ep_config_t config = r.config();
    config.element = GIN_EP_F32;
    gin::ep::Group group(r.comm, config);
    gin::ep::Slot slot(group, 0);
    auto kernel = gin::Kernel::of<experts_f32>("experts_f32");
    float* in_place = nullptr;
    Batch batch(r.rank, 20);
    Given<float> given;
    given.set(batch, batch.rows);
    Elements<float> output(ROOM * HIDDEN), bias(ROOM * HIDDEN);
    Elements<int64_t> wide(std::vector<int64_t>(batch.ids.begin(), batch.ids.end()));
    for (uint32_t i = 0; i < batch.count * HIDDEN; i++) output.data()[i] = 0.25f, bias.data()[i] = 1.5f;
    gin_ep_tokens_t tokens = given.tokens();
    tokens.ids = wide.memory(), tokens.id_bits = 64;
    slot.exchange(r.stream, tokens);
    r.stream.launch(kernel, SHAPE, slot.received(), r.first_expert, in_place, ROOM);
    gin_ep_combine_t combine = gin::ep::combine(output.memory());
    combine.bias = bias.memory(), combine.accumulate = 1;
    slot.combine(r.stream, combine);
    r.stream.synchronize();
    check_sums(batch, output, [&](uint32_t token, uint32_t column) {
        auto value = [&](uint32_t row, uint32_t column) { return batch.rows[row * HIDDEN + column]; };
        // All terms are multiples of 2^-11 below 2^12, so their order changes no bit.
        return 1.75f + sum_over_ranks(batch, r.ranks, token, column, same, value);
    });
    r.done(slot, group);
}

/// Returns the bits of a small whole number as binary16.
static uint16_t f16_of(int value) {
    int exponent, magnitude = std::abs(value);
    if (magnitude == 0) return 0;
    float fraction = std::frexp(float(magnitude), &exponent);
    return uint16_t((value < 0 ? 0x8000 : 0) | (exponent + 14) << 10 | (int(std::ldexp(fraction, 11)) - 1024));
}

// The experts leave the rows as they are, so a token gets its row once for each of its ranks.
static void f16_rows(Rank& r) {
    gin_ep_config_t config = r.config();
    config.element = GIN_EP_F16;
    gin::ep::Group group(r.comm, config);
    gin::ep::Slot slot(group, 0);
    Batch batch(r.rank, 30);
    std::vector<uint16_t> rows;
    auto whole = [&](uint32_t token, uint32_t column) { return int(batch.rows[token * HIDDEN + column] * 32); };
    for (uint32_t i = 0; i < batch.count * HIDDEN; i++) rows.push_back(f16_of(whole(i / HIDDEN, i % HIDDEN)));
    Given<uint16_t> given;
    given.set(batch, rows);
    Elements<uint16_t> output(ROOM * HIDDEN);
    slot.exchange(r.stream, given.tokens());
    slot.combine(r.stream, gin::ep::combine(output.memory()));
    r.stream.synchronize();
    check_sums(batch, output, [&](uint32_t token, uint32_t column) {
        return f16_of(int(ranks_of(batch, r.ranks, token)) * whole(token, column));
    });
    r.done(slot, group);
}

// Returns the scale of a row whose greatest magnitude this is.
static float scale_of(float greatest, uint32_t element) {
    float scale = std::max(greatest, 1e-4f) / 448;
    if (element == GIN_EP_E4M3_F32) return scale;
    // Rounded up to a power of two.
    int exponent;
    float fraction = std::frexp(scale, &exponent);
    return std::ldexp(1.0f, fraction == 0.5f ? exponent - 1 : exponent);
}

static void e4m3_rows_of(Rank& r, gin_ep_element_t element) {
    gin_ep_config_t config = r.config();
    config.element = element;
    gin::ep::Group group(r.comm, config);
    gin::ep::Slot slot(group, 0);
    auto kernel = gin::Kernel::of<experts_e4m3>("experts_e4m3");
    Batch batch(r.rank, 40 + element);
    // A row of zeros, and rows of other magnitudes.
    for (uint32_t i = 0; i < batch.count * HIDDEN; i++) batch.rows[i] *= std::ldexp(1.0f, int(i / HIDDEN) * 3 - 9);
    if (batch.count > 1) std::fill(batch.rows.begin(), batch.rows.begin() + HIDDEN, 0.0f);
    Given<uint16_t> given;
    given.set(batch, batch.bf16());
    Elements<uint16_t> output(ROOM * HIDDEN), elsewhere(r.ranks * ROOM * HIDDEN);
    slot.exchange(r.stream, given.tokens());
    r.stream.launch(kernel, SHAPE, slot.received(), r.first_expert, elsewhere.data(), ROOM, uint32_t(element));
    gin_ep_combine_t combine = gin::ep::combine(output.memory());
    combine.rows = elsewhere.memory();
    slot.combine(r.stream, combine);
    r.stream.synchronize();
    check_sums(batch, output, [&](uint32_t token, uint32_t column) {
        float greatest = 0;
        for (uint32_t i = 0; i < HIDDEN; i++) greatest = std::max(greatest, std::fabs(batch.rows[token * HIDDEN + i]));
        float scale = scale_of(greatest, element);
        float factor = element == GIN_EP_E4M3_F32 ? 448 / std::max(greatest, 1e-4f) : 1 / scale;
        auto value = [&](uint32_t row, uint32_t column) {
            return e4m3_value(e4m3_of(batch.rows[row * HIDDEN + column] * factor)) * scale;
        };
        auto round = [](float value) { return Bf16::widen(Bf16::narrow(value)); };
        return Bf16::narrow(sum_over_ranks(batch, r.ranks, token, column, round, value));
    });
    r.done(slot, group);
}

static void e4m3_rows(Rank& r) {
    for (gin_ep_element_t element : {GIN_EP_E4M3_F32, GIN_EP_E4M3_F32_POWERS, GIN_EP_E4M3_UE8M0}) e4m3_rows_of(r, element);
}

// Rows of bytes with scales arrive as they were sent.
static void check_opaque(ReceivedRows received, uint32_t rank, uint32_t* wrong, uint16_t* to) {
    for (uint32_t source = 0; source < received.ranks; source++) {
        *wrong += received.count(source) != rows_for(Batch(source, 50), received.ranks, rank);
        for (uint32_t row = 0; row < received.count(source); row++) {
            uint32_t token = received.token(source, row);
            for (uint32_t i = 0; i < 48; i++) *wrong += received.row(source, row)[i] != uint8_t(token * 3 + i + source);
            for (uint32_t i = 0; i < 5; i++) *wrong += received.scales(source, row)[i] != uint8_t(token * 7 + i + source);
            for (uint32_t i = 0; i < HIDDEN; i++) to[(source * ROOM + row) * HIDDEN + i] = Bf16::narrow(1);
        }
        *wrong += received.token(source, received.count(source)) != GIN_NONE || received.expert(source, 0, TOPK) != -1;
    }
    *wrong += received.count(received.ranks) != 0;
}

static void opaque_rows(Rank& r) {
    gin_ep_config_t config = r.config();
    config.element = GIN_EP_OPAQUE, config.row_bytes = 48, config.scale_bytes = 5;
    gin::ep::Group group(r.comm, config);
    gin::ep::Slot slot(group, 0);
    Batch batch(r.rank, 50);
    Given<uint8_t> given;
    std::vector<uint8_t> rows, scales;
    for (uint32_t i = 0; i < batch.count * 48; i++) rows.push_back(uint8_t(i / 48 * 3 + i % 48 + r.rank));
    for (uint32_t i = 0; i < batch.count * 5; i++) scales.push_back(uint8_t(i / 5 * 7 + i % 5 + r.rank));
    given.set(batch, rows);
    Elements<uint8_t> of_scales(scales);
    Elements<uint16_t> output(ROOM * HIDDEN), elsewhere(r.ranks * ROOM * HIDDEN);
    gin_ep_tokens_t tokens = given.tokens();
    tokens.scales = of_scales.memory();
    if (batch.count == 0) tokens.scales = given.rows.memory();
    uint32_t wrong = 0;
    uint32_t* out = &wrong;
    slot.exchange(r.stream, tokens);
    auto kernel = gin::Kernel::of<check_opaque>("check_opaque");
    r.stream.launch(kernel, gin_shape_t{{1, 1, 1}, {1, 1, 1}, 0, 0}, slot.received(), r.rank, out,
                    elsewhere.data());
    gin_ep_combine_t combine = gin::ep::combine(output.memory());
    combine.rows = elsewhere.memory();
    slot.combine(r.stream, combine);
    r.stream.synchronize();
    HOLDS(wrong == 0);
    // Each rank returned a row of ones.
    check_sums(batch, output, [&](uint32_t token, uint32_t) {
        return Bf16::narrow(float(ranks_of(batch, r.ranks, token)));
    });
    r.done(slot, group);
}

// Returned rows of FP32: only the sum over ranks is rounded.
static void wide_rows(Rank& r) {
    gin_ep_config_t config = r.config();
    config.combine_f32 = 1;
    gin::ep::Group group(r.comm, config);
    gin::ep::Slot slot(group, 0);
    auto kernel = gin::Kernel::of<experts_wide>("experts_wide");
    Batch batch(r.rank, 60);
    Given<uint16_t> given;
    given.set(batch, batch.bf16());
    Elements<uint16_t> output(ROOM * HIDDEN);
    Elements<float> elsewhere(r.ranks * ROOM * HIDDEN);
    slot.exchange(r.stream, given.tokens());
    r.stream.launch(kernel, SHAPE, slot.received(), r.first_expert, elsewhere.data(), ROOM);
    gin_ep_combine_t combine = gin::ep::combine(output.memory());
    combine.rows = elsewhere.memory();
    slot.combine(r.stream, combine);
    r.stream.synchronize();
    check_sums(batch, output, [&](uint32_t token, uint32_t column) {
        auto value = [&](uint32_t row, uint32_t column) { return batch.rows[row * HIDDEN + column]; };
        return Bf16::narrow(sum_over_ranks(batch, r.ranks, token, column, same, value));
    });
    r.done(slot, group);
}

/// Returns the number of ids of all ranks that choose an expert.
static uint32_t ids_of(uint32_t ranks, uint64_t round, uint32_t expert) {
    uint32_t ids = 0;
    for (uint32_t rank = 0; rank < ranks; rank++)
        for (int32_t id : Batch(rank, round).ids) ids += id == int32_t(expert);
    return ids;
}

// Rows of experts in a layout, returned for each id and added up by weight, or without weights.
static void layouts(Rank& r) {
    gin_ep_config_t config = r.config();
    config.combine_at_source = 1;
    gin::ep::Group group(r.comm, config);
    gin::ep::Slot slot(group, 0);
    auto kernel = gin::Kernel::of<experts_of_layout>("experts_of_layout");
    uint32_t local = experts_of_rank(r.ranks);
    constexpr uint32_t ALIGN = 4;
    gin::ep::Permuted packed(group, GIN_EP_EXPERT_MAJOR_PACKED, r.ranks * ROOM * TOPK + local * ALIGN, ALIGN);
    gin::ep::Permuted padded(group, GIN_EP_EXPERT_MAJOR_PADDED);
    gin::ep::Permuted indices(group, GIN_EP_EXPERT_MAJOR_INDICES, r.ranks * ROOM * TOPK);
    HOLDS(padded.memory().capacity == local * r.ranks * ROOM && padded.memory().row_bytes == 2 * HIDDEN);
    HOLDS(indices.memory().rows.data == nullptr && packed.memory().rows.data != nullptr);
    for (uint64_t round = 70; round < 74; round++) {
        Batch batch(r.rank, round);
        Given<uint16_t> given;
        given.set(batch, batch.bf16());
        Elements<uint16_t> output(ROOM * HIDDEN);
        if (round % 2 == 0) {
            slot.exchange(r.stream, given.tokens());
            slot.permute(r.stream, packed);
        } else {
            slot.exchange_into(r.stream, given.tokens(), packed);
        }
        slot.permute(r.stream, padded);
        slot.permute(r.stream, indices);
        r.stream.launch(kernel, SHAPE, slot.received(), r.first_expert, packed.memory());
        gin_ep_combine_t combine = gin::ep::combine(output.memory());
        bool is_weighted = round < 72;
        if (is_weighted) combine.weights = given.weights.memory();
        combine.permuted = packed.raw();
        slot.combine(r.stream, combine);
        r.stream.synchronize();
        check_sums(batch, output, [&](uint32_t token, uint32_t column) {
            float sum = 0;
            for (uint32_t k = 0; k < TOPK; k++) {
                int32_t id = batch.ids[token * TOPK + k];
                if (id < 0) continue;
                float row = rounded_expert(uint32_t(id), batch.rows[token * HIDDEN + column]);
                sum = is_weighted ? std::fma(batch.weights[token * TOPK + k], row, sum) : sum + row;
            }
            return Bf16::narrow(sum);
        });
        std::vector<uint32_t> counts = packed.counts(), of_padded = padded.counts(), of_indices = indices.counts();
        HOLDS(counts.size() == 1 + 2 * local && of_padded.size() == 1 + local * r.ranks);
        HOLDS(of_indices.size() == 1 + 2 * local);
        for (uint32_t e = 0; e < local; e++) {
            uint32_t ids = ids_of(r.ranks, round, r.first_expert + e), of_sources = 0;
            for (uint32_t source = 0; source < r.ranks; source++) of_sources += of_padded[1 + e * r.ranks + source];
            HOLDS(counts[1 + e] == ids && of_sources == ids && of_indices[1 + e] == ids);
            HOLDS(counts[1 + local + e] % ALIGN == 0);
        }
    }
    r.done(slot, group);
}

// All sources share a region; the number of tokens is on the device; a plan serves two dispatches.
// Fixed zones in memory of the program, with tokens and weights of rows, which return as they are.
static void fixed_zones(Rank& r) {
    gin_ep_config_t config = r.config();
    config.combine_at_source = 1;
    gin::ep::Group group(r.comm, config);
    gin::ep::Slot slot(group, 0);
    uint32_t local = experts_of_rank(r.ranks), room = r.ranks * ROOM;
    auto places = gin::ep::Permuted::without_rows(group, GIN_EP_EXPERT_MAJOR_FIXED);
    HOLDS(places.memory().rows.data == nullptr && places.memory().capacity == local * room);
    Elements<uint16_t> rows(local * room * HIDDEN), output(ROOM * HIDDEN);
    Elements<uint32_t> tokens(local * room), counts(local);
    Elements<float> weights(local * room);
    gin_ep_permuted_into_t into = gin::ep::permuted_into();
    into.rows = rows.memory(), into.tokens = tokens.memory();
    gin::ep::Permuted fixed = places.with_memory(into);
    HOLDS(fixed.memory().rows.data == rows.data() && fixed.memory().tokens.data == tokens.data());
    for (uint64_t round = 76; round < 79; round++) {
        Batch batch(r.rank, round);
        Given<uint16_t> given;
        given.set(batch, batch.bf16());
        gin_ep_metadata_t metadata = gin::ep::metadata();
        metadata.weights = weights.memory(), metadata.counts = counts.memory();
        slot.exchange_into(r.stream, given.tokens(), fixed);
        slot.store_metadata(r.stream, fixed, metadata);
        gin_ep_combine_t combine = gin::ep::combine(output.memory());
        combine.weights = given.weights.memory(), combine.permuted = fixed.raw();
        slot.combine(r.stream, combine);
        r.stream.synchronize();
        for (uint32_t number = 0; number < local; number++) {
            uint32_t place = number * room;
            for (uint32_t source = 0; source < r.ranks; source++) {
                Batch from(source, round);
                for (uint32_t i = 0; i < from.count * TOPK; i++) {
                    if (from.ids[i] != int32_t(r.first_expert + number) || place == (number + 1) * room) continue;
                    HOLDS(tokens.data()[place] == i / TOPK && weights.data()[place] == from.weights[i]);
                    HOLDS(rows.data()[place * HIDDEN] == Bf16::narrow(from.rows[i / TOPK * HIDDEN]));
                    place++;
                }
            }
            HOLDS(counts.data()[number] == place - number * room && fixed.counts()[1 + number] == counts.data()[number]);
        }
        check_sums(batch, output, [&](uint32_t token, uint32_t column) {
            float sum = 0;
            for (uint32_t k = 0; k < TOPK; k++)
                if (batch.ids[token * TOPK + k] >= 0)
                    sum = std::fma(batch.weights[token * TOPK + k], batch.rows[token * HIDDEN + column], sum);
            return Bf16::narrow(sum);
        });
    }
    r.done(slot, group);
}

// Experts that multiply by matrices: element `c` of a product is a factor times element `c + id` of the row. Products
// return to their tokens, stay here, or are made as rows arrive, with the same bits.
static void products(Rank& r) {
    gin_ep_config_t config = r.config();
    // The virtual GPU multiplies slowly.
    constexpr uint32_t WIDTH = 16;
    config.combine_at_source = 1, config.hidden = WIDTH;
    gin::ep::Group group(r.comm, config);
    gin::ep::Slot slot(group, 0);
    uint32_t local = experts_of_rank(r.ranks), places = r.ranks * ROOM * TOPK;
    gin::ep::Permuted packed(group, GIN_EP_EXPERT_MAJOR_PACKED, places, 1);
    gin::ep::Grouped grouped(group, WIDTH, 1);
    gin::ep::Overlapped overlapped(group, 1);
    Elements<uint16_t> weights(local * WIDTH * WIDTH), made(places * WIDTH), output(ROOM * WIDTH);
    for (uint32_t number = 0; number < local; number++)
        for (uint32_t column = 0; column < WIDTH; column++) {
            uint32_t id = r.first_expert + number, at = (column + id) % WIDTH;
            weights.data()[(number * WIDTH + column) * WIDTH + at] = Bf16::narrow(expert(id, 1));
        }
    for (uint64_t round = 86; round < 89; round++) {
        Batch batch(r.rank, round);
        Given<uint16_t> given;
        std::vector<uint16_t> rows;
        for (uint32_t i = 0; i < batch.count * WIDTH; i++)
            rows.push_back(Bf16::narrow(batch.rows[i / WIDTH * HIDDEN + i % WIDTH]));
        given.set(batch, rows);
        gin_ep_combine_t combine = gin::ep::combine(output.memory());
        combine.weights = given.weights.memory();
        if (round == 88) {
            slot.dispatch(r.stream, given.tokens());
            slot.receive_multiply(r.stream, overlapped, weights.memory());
            combine.returned = 1;
        } else {
            slot.exchange_into(r.stream, given.tokens(), packed);
            gin_ep_experts_t factors = gin::ep::experts(packed, packed.memory().rows, weights.memory());
            if (round == 86) combine.returned = 1;
            if (round == 87) factors.products = combine.rows = made.memory(), combine.permuted = packed.raw();
            slot.multiply(r.stream, grouped, factors);
        }
        slot.combine(r.stream, combine);
        r.stream.synchronize();
        for (uint32_t i = 0; i < batch.count * WIDTH; i++) {
            float sum = 0;
            uint32_t token = i / WIDTH, column = i % WIDTH;
            for (uint32_t k = 0; k < TOPK; k++) {
                int32_t id = batch.ids[token * TOPK + k];
                if (id < 0) continue;
                float value = batch.rows[token * HIDDEN + (column + uint32_t(id)) % WIDTH];
                sum = std::fma(batch.weights[token * TOPK + k], rounded_expert(uint32_t(id), value), sum);
            }
            HOLDS(output.data()[i] == Bf16::narrow(sum));
        }
    }
    r.done(slot, group);
}

static void shared_region(Rank& r) {
    gin_ep_config_t config = r.config();
    config.max_rows = r.ranks * ROOM, config.slots = 2;
    HOLDS(gin::ep::footprint(config, r.ranks) < 2 * gin::ep::footprint(r.config(), r.ranks));
    gin::ep::Group group(r.comm, config);
    gin::ep::Slot slot(group, 1);
    auto kernel = gin::Kernel::of<experts_bf16>("experts_bf16");
    uint16_t* in_place = nullptr;
    gin::ep::Permuted flat(group, GIN_EP_FLAT, r.ranks * ROOM);
    HOLDS(flat.memory().rows.data == nullptr);
    Batch batch(r.rank, 80);
    Given<uint16_t> given;
    Elements<uint32_t> count(std::vector<uint32_t>{batch.count});
    given.set(batch, batch.bf16());
    gin_ep_tokens_t tokens = given.tokens();
    tokens.count = 0, tokens.count_at = count.memory();
    gin::ep::Plan plan = slot.plan(r.stream, tokens);
    for (int time = 0; time < 3; time++) {
        Elements<uint16_t> output(ROOM * HIDDEN);
        if (time > 0) tokens.count_at = GIN_MEMORY_NULL, tokens.plan = plan.raw();
        slot.exchange(r.stream, tokens);
        slot.permute(r.stream, flat);
        r.stream.launch(kernel, SHAPE, slot.received(), r.first_expert, in_place, ROOM);
        gin_ep_combine_t combine = gin::ep::combine(output.memory());
        if (time == 1) combine.permuted = flat.raw();
        slot.combine(r.stream, combine);
        r.stream.synchronize();
        check_sums(batch, output, [&](uint32_t token, uint32_t column) {
            auto round = [](float value) { return Bf16::widen(Bf16::narrow(value)); };
            auto value = [&](uint32_t row, uint32_t column) { return batch.rows[row * HIDDEN + column]; };
            return Bf16::narrow(sum_over_ranks(batch, r.ranks, token, column, round, value));
        });
    }
    // The experts' results in an expert-major layout are added up here, and the sums return.
    gin::ep::Permuted packed(group, GIN_EP_EXPERT_MAJOR_PACKED, r.ranks * ROOM * TOPK, 1);
    auto of_layout = gin::Kernel::of<experts_of_layout>("experts_of_layout");
    Elements<uint16_t> output(ROOM * HIDDEN);
    slot.exchange_into(r.stream, tokens, packed);
    r.stream.launch(of_layout, SHAPE, slot.received(), r.first_expert, packed.memory());
    slot.reduce(r.stream, packed);
    slot.combine(r.stream, gin::ep::combine(output.memory()));
    r.stream.synchronize();
    check_sums(batch, output, [&](uint32_t token, uint32_t column) {
        auto round = [](float value) { return Bf16::widen(Bf16::narrow(value)); };
        auto value = [&](uint32_t row, uint32_t column) { return batch.rows[row * HIDDEN + column]; };
        return Bf16::narrow(sum_over_ranks(batch, r.ranks, token, column, round, value, rounded_expert));
    });
    plan = gin::ep::Plan();
    r.done(slot, group);
}

// A graph runs again with other rows and another number of tokens.
static void graph(Rank& r) {
    gin::ep::Group group(r.comm, r.config());
    gin::ep::Slot slot(group, 0);
    auto kernel = gin::Kernel::of<experts_bf16>("experts_bf16");
    uint16_t* in_place = nullptr;
    Given<uint16_t> given;
    Elements<uint32_t> count(1);
    Elements<uint16_t> output(ROOM * HIDDEN);
    gin_ep_tokens_t tokens = given.tokens();
    tokens.count = 0, tokens.count_at = count.memory();
    gin::Graph graph = r.stream.capture([&] {
        slot.exchange(r.stream, tokens);
        r.stream.launch(kernel, SHAPE, slot.received(), r.first_expert, in_place, ROOM);
        slot.combine(r.stream, gin::ep::combine(output.memory()));
        gin_ep_plan_t plan;
        HOLDS(gin_ep_plan_create(slot.raw(), r.stream.raw(), &tokens, &plan) == GIN_ERROR_STATE);
    });
    for (uint64_t round = 90; round < 95; round++) {
        Batch batch(r.rank, round);
        given.set(batch, batch.bf16());
        count.data()[0] = batch.count;
        r.stream.launch(graph);
        r.stream.synchronize();
        check_sums(batch, output, [&](uint32_t token, uint32_t column) {
            auto round = [](float value) { return Bf16::widen(Bf16::narrow(value)); };
            auto value = [&](uint32_t row, uint32_t column) { return batch.rows[row * HIDDEN + column]; };
            return Bf16::narrow(sum_over_ranks(batch, r.ranks, token, column, round, value));
        });
    }
    r.done(slot, group);
}

// A capture whose work throws leaves the stream as it was.
static void thrown_capture(Rank& r) {
    struct Thrown {};
    bool caught = false;
    try {
        (void)r.stream.capture([] { throw Thrown{}; });
    } catch (const Thrown&) {
        caught = true;
    }
    HOLDS(caught);
    r.stream.synchronize();
    gin_graph_t graph;
    HOLDS(gin_stream_end_capture(r.stream.raw(), &graph) == GIN_ERROR_DEVICE);
}

struct Case {
    const char* name;
    void (*body)(Rank&);
    // Also with ranks that only the network reaches.
    bool has_network;
};
constexpr Case CASES[] = {
    {"bf16", bf16_rows, true},      {"f32", f32_rows, false},  {"f16", f16_rows, false},
    {"e4m3", e4m3_rows, true},      {"opaque", opaque_rows, true}, {"wide", wide_rows, true},
    {"layouts", layouts, false},    {"fixed", fixed_zones, false}, {"products", products, false},
    {"shared", shared_region, false}, {"graph", graph, true},
    {"capture", thrown_capture, false},
};

static int run(const Case& one, uint32_t ranks, const char* route, const gin_config_t& config) {
    int failed = on_ranks(ranks, config, [&](const gin::Job& job) {
        Rank rank{job};
        one.body(rank);
        rank.end();
    });
    if (failed) std::printf("failed: %s with %u ranks, %s\n", one.name, ranks, route);
    return failed;
}

int main(int count, char** words) try {
    int failed = 0;
    for (const Case& one : CASES) {
        if (count > 1 && std::strcmp(words[1], one.name) != 0) continue;
        gin_config_t config = gin::default_config();
        config.device = GIN_DEVICE_VIRTUAL;
        for (uint32_t ranks : {2, 3}) failed |= run(one, ranks, "loads and stores", config);
        config.lsa_size = 1;
        if (one.has_network) failed |= run(one, 3, "proxy", config);
        config.progress_threads = GIN_PROGRESS_MANUAL;
        if (one.has_network) failed |= run(one, 2, "proxy without threads", config);
        config.progress_threads = 0;
        config.backend = GIN_BACKEND_GDAKI_SOFT;
        if (one.has_network) failed |= run(one, 2, "GDAKI", config);
    }
    std::printf("%s\n", failed ? "failed" : "passed");
    return failed;
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
