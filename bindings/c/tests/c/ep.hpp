// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Tokens of tests of expert parallelism, and the sums that they must have, computed without gin.

#pragma once

#include "gin_ep.cuh"
#include "gin_ep.hpp"
#include "ranks.hpp"

#include <cmath>
#include <cstring>

/// Throws the line of a condition that does not hold.
#define HOLDS(condition)                                                                                  \
    do {                                                                                                  \
        if (!(condition)) throw std::runtime_error(std::to_string(__LINE__) + ": " #condition);           \
    } while (0)

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

/// BF16: to the nearest, ties to even.
struct Bf16 {
    static uint16_t narrow(float value) {
        uint32_t bits = bits_of(value);
        return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    static float widen(uint16_t bits) { return float_of(uint32_t(bits) << 16); }
};

/// Returns the nearest FP8 (E4M3), ties to even; the value is at most 448.
inline uint8_t e4m3_of(float value) {
    int exponent;
    float magnitude = std::fabs(value);
    (void)std::frexp(magnitude, &exponent);
    // Four significant bits; below 2^-6 steps of 2^-9.
    int step = std::max(exponent - 4, -9);
    float rounded = std::nearbyint(std::ldexp(magnitude, -step));
    float result = std::ldexp(rounded, step);
    uint8_t sign = std::signbit(value) ? 0x80 : 0;
    if (result < 0.015625f) return uint8_t(sign | uint8_t(std::ldexp(result, 9)));
    float fraction = std::frexp(result, &exponent);
    return uint8_t(sign | uint8_t((exponent + 6) << 3) | uint8_t(std::ldexp(fraction, 4) - 8));
}
inline float e4m3_value(uint8_t bits) {
    int exponent = bits >> 3 & 15, mantissa = bits & 7;
    float magnitude = exponent == 0 ? std::ldexp(float(mantissa), -9) : std::ldexp(float(8 + mantissa), exponent - 10);
    return bits & 0x80 ? -magnitude : magnitude;
}

/// xorshift64*.
struct Random {
    uint64_t state;
    uint64_t next() {
        state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
        return state * 0x2545f4914f6cdd1d;
    }
    uint64_t below(uint64_t end) { return next() % end; }
    /// A number of 7 significant bits, between -4 and 4.
    float number() { return float(int(below(256)) - 128) / 32; }
};

constexpr uint32_t HIDDEN = 128, TOPK = 3, EXPERTS = 5, ROOM = 9;

/// The tokens of a rank.
struct Batch {
    uint32_t count;
    std::vector<float> rows;
    std::vector<int32_t> ids;
    std::vector<float> weights;

    /// Makes the tokens that rank `rank` has in a round.
    Batch(uint32_t rank, uint64_t round) {
        Random random{round * 64 + rank + 1};
        for (int i = 0; i < 8; i++) (void)random.next();
        count = uint32_t(random.below(ROOM + 1));
        for (uint32_t i = 0; i < count * HIDDEN; i++) rows.push_back(random.number());
        for (uint32_t i = 0; i < count * TOPK; i++) {
            ids.push_back(random.below(5) == 0 ? -1 : int32_t(random.below(EXPERTS)));
            weights.push_back(float(1 + random.below(15)) / 8);
        }
    }
    std::vector<uint16_t> bf16() const {
        std::vector<uint16_t> narrow;
        for (float value : rows) narrow.push_back(Bf16::narrow(value));
        return narrow;
    }
};

/// The number of experts of a rank.
inline uint32_t experts_of_rank(uint32_t ranks) { return (EXPERTS + ranks - 1) / ranks; }

/// The result of an expert, of all ranks, for a value.
inline float expert(uint32_t number, float value) { return value * float(number + 1); }

/// The same, rounded to BF16.
inline float rounded_expert(uint32_t number, float value) { return Bf16::widen(Bf16::narrow(expert(number, value))); }

/// Returns whether an expert of a token is on a rank.
inline bool is_for(const Batch& batch, uint32_t ranks, uint32_t token, uint32_t rank) {
    for (uint32_t k = 0; k < TOPK; k++) {
        int32_t id = batch.ids[token * TOPK + k];
        if (id >= 0 && uint32_t(id) / experts_of_rank(ranks) == rank) return true;
    }
    return false;
}
/// Returns the number of ranks that have experts of a token.
inline uint32_t ranks_of(const Batch& batch, uint32_t ranks, uint32_t token) {
    uint32_t count = 0;
    for (uint32_t rank = 0; rank < ranks; rank++) count += is_for(batch, ranks, token, rank);
    return count;
}
/// Returns the number of rows that a rank receives of these tokens.
inline uint64_t rows_for(const Batch& batch, uint32_t ranks, uint32_t rank) {
    uint64_t rows = 0;
    for (uint32_t token = 0; token < batch.count; token++) rows += is_for(batch, ranks, token, rank);
    return rows;
}

/// Memory of elements at a multiple of 16 bytes.
template <class T>
struct Elements {
    std::vector<T> storage;
    std::size_t count;
    explicit Elements(std::size_t count) : storage(count + 16 / sizeof(T)), count(count) {}
    explicit Elements(const std::vector<T>& values) : Elements(values.size()) { *this = values; }
    Elements& operator=(const std::vector<T>& values) {
        HOLDS(values.size() <= count);
        std::copy(values.begin(), values.end(), data());
        return *this;
    }
    Elements(const Elements&) = delete;
    T* data() {
        uintptr_t address = reinterpret_cast<uintptr_t>(storage.data());
        return storage.data() + (16 - address % 16) % 16 / sizeof(T);
    }
    gin_memory_t memory() { return gin::ep::memory(data(), count); }
};

/// Returns the sum of a column over the ranks of a token, each of which rounds its row to an element, before the final
/// rounding. `value(row, column)` is the value that the ranks receive, `result` the result of an expert.
template <class Narrow, class Value>
float sum_over_ranks(const Batch& batch, uint32_t ranks, uint32_t token, uint32_t column, Narrow narrow, Value value,
                     float (*result)(uint32_t, float) = expert) {
    uint32_t local = experts_of_rank(ranks);
    std::vector<uint32_t> order;
    for (uint32_t k = 0; k < TOPK; k++) {
        int32_t id = batch.ids[token * TOPK + k];
        bool is_new = id >= 0;
        for (uint32_t rank : order) is_new = is_new && rank != uint32_t(id) / local;
        if (is_new) order.push_back(uint32_t(id) / local);
    }
    float sum = 0;
    for (uint32_t rank : order) {
        float row = 0;
        for (uint32_t k = 0; k < TOPK; k++) {
            int32_t id = batch.ids[token * TOPK + k];
            if (id >= 0 && uint32_t(id) / local == rank)
                row = std::fma(batch.weights[token * TOPK + k], result(uint32_t(id), value(token, column)), row);
        }
        sum += narrow(row);
    }
    return sum;
}
