// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Received rows of expert parallelism for kernels in CUDA C++17, and in C++17 on the virtual GPU. docs/c.md is the page
// for users.

#pragma once

#include "gin_device.cuh"

namespace gin {
namespace ep {

/// The rows that a rank has received in a dispatch: a parameter of kernels between receive and combine.
/// `gin_ep_received_device` returns its bytes.
struct ReceivedRows : gin_device_ep_received_t {
    ReceivedRows() = default;
    GIN_BOTH ReceivedRows(const gin_device_ep_received_t& handle) : gin_device_ep_received_t(handle) {}

    /// Returns the number of rows from rank `source`; 0 if there is no such rank.
    GIN_FN uint32_t count(uint32_t source) const {
        return source < ranks ? uint32_t(*at<uint64_t>(last(counts) + 8 * uint64_t(source))) : 0;
    }
    /// Returns the number of the first row from a source in the region that all sources share; 0 if each has a region.
    GIN_FN uint32_t offset(uint32_t source) const {
        return offsets != 0 && source < ranks ? uint32_t(*at<uint64_t>(offsets + 8 * uint64_t(source))) : 0;
    }
    /// Returns the address of a row, which is aligned to 16 bytes. `row` is less than `count(source)`. The kernel may
    /// overwrite the row.
    template <class T = uint8_t>
    GIN_FN T* row(uint32_t source, uint32_t row) const {
        uint64_t index = uint64_t(offset(source)) + row;
        return at<T>(last(rows) + source * source_bytes + index * row_pitch);
    }
    /// Returns the address of the scales of a row, which is aligned to 16 bytes. `row` is less than `count(source)`.
    template <class T = uint8_t>
    GIN_FN const T* scales(uint32_t source, uint32_t row) const {
        return at<T>(metadata_of(source, row) + scales_at);
    }
    /// Returns the number of a row's token at its source; `GIN_NONE` if there is no such row.
    GIN_FN uint32_t token(uint32_t source, uint32_t row) const { return word(source, row, 0); }
    /// Returns the number on this rank of the expert of id `k`; -1 if it is on another rank, or none, or if there is no
    /// such row or id.
    GIN_FN int32_t expert(uint32_t source, uint32_t row, uint32_t k) const {
        return k < topk ? int32_t(word(source, row, 1 + k)) : -1;
    }
    /// Returns the weight of id `k`; 0 where `expert` is -1.
    GIN_FN float weight(uint32_t source, uint32_t row, uint32_t k) const {
        return expert(source, row, k) < 0 ? 0.0f : *at<float>(metadata_of(source, row) + 4 * (1 + topk + k));
    }

private:
    template <class T>
    GIN_FN static T* at(uint64_t address) {
        return reinterpret_cast<T*>(address);
    }
    // The buffer of the last dispatch. An index that varies would put the addresses into local memory.
    GIN_FN uint64_t last(const uint64_t (&buffers)[2]) const {
        return *at<uint64_t>(last_use) & 1 ? buffers[1] : buffers[0];
    }
    GIN_FN uint64_t metadata_of(uint32_t source, uint32_t row) const {
        uint64_t index = uint64_t(offset(source)) + row;
        return last(metadata) + source * source_metadata_bytes + index * metadata_pitch;
    }
    GIN_FN uint32_t word(uint32_t source, uint32_t row, uint32_t number) const {
        return row < count(source) ? *at<uint32_t>(metadata_of(source, row) + 4 * number) : GIN_NONE;
    }
};

/// A word of `source_info`: where a row of a layout comes from.
struct SourceInfo {
    uint32_t word;
    /// Returns whether the place has no row. In a padded layout the counts say that instead.
    GIN_FN bool is_gap() const { return word == 0xffffffffu; }
    GIN_FN uint32_t source() const { return word >> 21; }
    GIN_FN uint32_t row() const { return word >> 5 & 0xffffu; }
    GIN_FN uint32_t k() const { return word & 31u; }
};

}  // namespace ep
}  // namespace gin
