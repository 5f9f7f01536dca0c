// SPDX-License-Identifier: MIT OR Apache-2.0
// CUDA's device functions for a CPU, as far as NVIDIA's device code for queue pairs needs them, and the primitives of
// DOCA GPUNetIO that are PTX there. GPU threads are threads of the process, each a warp of one.
#pragma once

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#define __device__
#define __forceinline__ inline
#define __CUDA_ARCH__ 900
#define NVCC_PRAGMA_UNROLL(count)
#define NVCC_PRAGMA_UNROLL_DISABLED

using std::max;
using std::min;

namespace cuda {
enum thread_scope { thread_scope_system, thread_scope_device, thread_scope_block, thread_scope_thread };
using std::memory_order;
inline constexpr memory_order memory_order_relaxed = std::memory_order_relaxed;
inline constexpr memory_order memory_order_acquire = std::memory_order_acquire;
inline constexpr memory_order memory_order_release = std::memory_order_release;

template <typename T, thread_scope = thread_scope_system>
struct atomic_ref {
    T &value;
    explicit atomic_ref(T &value) : value(value) {}
    T load(memory_order order) const { return std::atomic_ref<T>(value).load(order); }
    void store(T next, memory_order order) const { std::atomic_ref<T>(value).store(next, order); }
    T fetch_add(T amount, memory_order order) const { return std::atomic_ref<T>(value).fetch_add(amount, order); }
    T fetch_max(T other, memory_order order) const {
        std::atomic_ref<T> all(value);
        T old = all.load(std::memory_order_relaxed);
        while (old < other && !all.compare_exchange_weak(old, other, order, std::memory_order_relaxed)) {}
        return old;
    }
};
} // namespace cuda

template <typename T>
inline T __ldg(const T *at) {
    return __atomic_load_n(at, __ATOMIC_RELAXED);
}

template <typename T>
inline T atomicCAS(T *at, T expected, T next) {
    if (!__atomic_compare_exchange_n(at, &expected, next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        std::this_thread::yield();
    return expected;
}

template <typename T>
inline T atomicCAS_block(T *at, T expected, T next) {
    return atomicCAS(at, expected, next);
}

inline unsigned __activemask() { return 1; }
inline unsigned __reduce_max_sync(unsigned, unsigned value) { return value; }
inline void __syncwarp(unsigned = 1) {}
template <typename T>
inline T __shfl_sync(unsigned, T value, int, int = 32) {
    return value;
}

// The primitives of `doca_gpunetio_dev_verbs_common.cuh`, whose place this header takes.
#define DOCA_GPUNETIO_DEV_VERBS_COMMON_H
#include "doca_gpunetio/common/doca_gpunetio_verbs_def.h"
// A CPU's compiler binds no references to fields of packed structures. These have the same offsets without.
#define __packed__
#include "doca_gpunetio/common/doca_gpunetio_verbs_dev.h"
#undef __packed__
static_assert(sizeof(doca_gpu_dev_verbs_qp) == 296 && sizeof(doca_gpu_dev_verbs_cq) == 64);
static_assert(sizeof(doca_gpunetio_ib_mlx5_wqe_ctrl_seg) == 16 && sizeof(doca_gpunetio_ib_mlx5_wqe_data_seg) == 16);

inline unsigned doca_gpu_dev_verbs_get_lane_id() { return 0; }
inline uint16_t doca_gpu_dev_verbs_bswap16(uint16_t value) { return __builtin_bswap16(value); }
inline uint32_t doca_gpu_dev_verbs_bswap32(uint32_t value) { return __builtin_bswap32(value); }
inline uint64_t doca_gpu_dev_verbs_bswap64(uint64_t value) { return __builtin_bswap64(value); }

template <doca_gpu_dev_verbs_sync_scope scope>
inline void doca_gpu_dev_verbs_fence_acquire() {
    if (scope != DOCA_GPUNETIO_VERBS_SYNC_SCOPE_THREAD) std::atomic_thread_fence(std::memory_order_acquire);
}

template <doca_gpu_dev_verbs_sync_scope scope>
inline void doca_gpu_dev_verbs_fence_release() {
    if (scope != DOCA_GPUNETIO_VERBS_SYNC_SCOPE_THREAD) std::atomic_thread_fence(std::memory_order_release);
}

template <typename T, doca_gpu_dev_verbs_resource_sharing_mode mode, bool acquires = false>
inline T doca_gpu_dev_verbs_atomic_max(T *at, T value) {
    return cuda::atomic_ref<T>(*at).fetch_max(value, acquires ? std::memory_order_acquire : std::memory_order_relaxed);
}

template <typename T, doca_gpu_dev_verbs_resource_sharing_mode mode>
inline T doca_gpu_dev_verbs_atomic_add(T *at, T value) {
    return cuda::atomic_ref<T>(*at).fetch_add(value, std::memory_order_relaxed);
}

template <typename T, doca_gpu_dev_verbs_resource_sharing_mode mode>
inline T doca_gpu_dev_verbs_atomic_read(T *at) {
    return cuda::atomic_ref<T>(*at).load(std::memory_order_relaxed);
}

template <doca_gpu_dev_verbs_resource_sharing_mode mode>
inline void doca_gpu_dev_verbs_lock(int *lock) {
    while (atomicCAS(lock, 0, 1) != 0) {}
    std::atomic_thread_fence(std::memory_order_acquire);
}

template <doca_gpu_dev_verbs_resource_sharing_mode mode>
inline void doca_gpu_dev_verbs_unlock(int *lock) {
    std::atomic_ref<int>(*lock).store(0, std::memory_order_release);
}

inline uint8_t doca_gpu_dev_verbs_load_relaxed_sys_global(uint8_t *at) {
    // The loops of device code only spin.
    std::this_thread::yield();
    return __ldg(at);
}
inline uint32_t doca_gpu_dev_verbs_load_relaxed_sys_global(uint32_t *at) { return __ldg(at); }

template <doca_gpu_dev_verbs_resource_sharing_mode mode>
inline uint64_t doca_gpu_dev_verbs_load_relaxed(uint64_t *at) {
    return __ldg(at);
}

inline void doca_gpu_dev_verbs_memcpy_data(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }

inline uint64_t doca_gpu_dev_verbs_div_ceil_aligned_pow2(uint64_t value, unsigned shift) {
    return (value >> shift) + ((value & ((uint64_t(1) << shift) - 1)) != 0);
}
inline uint32_t doca_gpu_dev_verbs_div_ceil_aligned_pow2_32bits(uint64_t value, int shift) {
    return uint32_t(doca_gpu_dev_verbs_div_ceil_aligned_pow2(value, unsigned(shift)));
}

// The statements of the other headers that are PTX there.
inline void gin_store_segment(uint64_t *to, const uint64_t *from) {
    __atomic_store_n(to, from[0], __ATOMIC_RELAXED);
    __atomic_store_n(to + 1, from[1], __ATOMIC_RELAXED);
}
