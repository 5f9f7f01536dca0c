// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The groups of threads of gin_device.cuh, which includes this. `any` is a sync that returns whether a thread brings
// true.

#pragma once

namespace gin {

#if defined(__CUDACC__)
GIN_FN uint32_t thread_in_block() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
GIN_FN uint32_t threads_of_block() { return blockDim.x * blockDim.y * blockDim.z; }
GIN_FN uint32_t block_in_grid() { return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z); }
GIN_FN uint32_t blocks_of_grid() { return gridDim.x * gridDim.y * gridDim.z; }
#else
GIN_FN uint32_t thread_in_block() {
    gin_position_t p = gin_virtual_position();
    return p.thread_index[0] + p.block_dim[0] * (p.thread_index[1] + p.block_dim[1] * p.thread_index[2]);
}
GIN_FN uint32_t threads_of_block() {
    gin_position_t p = gin_virtual_position();
    return p.block_dim[0] * p.block_dim[1] * p.block_dim[2];
}
GIN_FN uint32_t block_in_grid() {
    gin_position_t p = gin_virtual_position();
    return p.block_index[0] + p.grid_dim[0] * (p.block_index[1] + p.grid_dim[1] * p.block_index[2]);
}
GIN_FN uint32_t blocks_of_grid() {
    gin_position_t p = gin_virtual_position();
    return p.grid_dim[0] * p.grid_dim[1] * p.grid_dim[2];
}
#endif

/// The calling thread.
struct CoopThread {
    GIN_FN uint32_t thread_rank() const { return 0; }
    GIN_FN uint32_t size() const { return 1; }
    GIN_FN void sync() const {}
    GIN_FN bool any(bool bit) const { return bit; }
    GIN_FN uint64_t word() const { return 0; }
    GIN_FN bool exists() const { return true; }
};

namespace detail {
/// What the groups of lanes of a warp have in common.
template <class Group>
struct LaneGroup {
#if defined(__CUDA_ARCH__)
    GIN_FN void sync() const { __syncwarp(static_cast<const Group*>(this)->mask_here()); }
#else
    GIN_FN void sync() const { (void)gin_coop_sync(static_cast<const Group*>(this)->word()); }
#endif
#if defined(__CUDACC__)
    GIN_FN bool any(bool bit) const {
        sync();
        return __any_sync(static_cast<const Group*>(this)->mask_here(), bit) != 0;
    }
#else
    GIN_FN bool any(bool bit) const { return gin_virtual_any(static_cast<const Group*>(this)->word(), bit) != 0; }
#endif
    GIN_FN bool exists() const { return true; }
};

GIN_FN uint64_t lanes_word(uint32_t mask) { return 3 | static_cast<uint64_t>(mask) << 32; }
}  // namespace detail

/// The lanes of the warp that the block has.
struct CoopWarp : detail::LaneGroup<CoopWarp> {
    GIN_FN uint32_t thread_rank() const { return thread_in_block() % 32; }
    GIN_FN uint32_t size() const {
        uint32_t first = thread_in_block() / 32 * 32, threads = threads_of_block();
        return threads - first < 32 ? threads - first : 32;
    }
    GIN_FN uint64_t word() const { return 1; }
    /// Returns all lanes: those that do not exist count as ended.
    GIN_FN uint32_t mask_here() const { return UINT32_MAX; }
};

/// `N` neighbouring lanes of a warp, of which the first is a multiple of `N`: 2, 4, 8, 16 or 32. All of them are
/// threads of the block.
template <uint32_t N>
struct CoopTile : detail::LaneGroup<CoopTile<N>> {
    static_assert(N >= 2 && N <= 32 && (N & (N - 1)) == 0, "a tile has 2, 4, 8, 16 or 32 lanes");
    GIN_FN uint32_t thread_rank() const { return thread_in_block() % N; }
    GIN_FN uint32_t size() const { return N; }
    GIN_FN uint32_t mask_here() const { return (UINT32_MAX >> (32 - N)) << (thread_in_block() % 32 / N * N); }
    GIN_FN uint64_t word() const { return detail::lanes_word(mask_here()); }
};

/// The lanes of a mask, all of which call.
struct CoopLanes : detail::LaneGroup<CoopLanes> {
    uint32_t mask;
    GIN_FN CoopLanes(uint32_t lanes) : mask(lanes) {}
    GIN_FN uint32_t thread_rank() const { return lanes_of(mask & ((1u << thread_in_block() % 32) - 1)); }
    GIN_FN uint32_t size() const { return lanes_of(mask); }
    GIN_FN uint64_t word() const { return detail::lanes_word(mask); }
    GIN_FN uint32_t mask_here() const { return mask; }

private:
#if defined(__CUDACC__)
    GIN_FN static uint32_t lanes_of(uint32_t mask) { return static_cast<uint32_t>(__popc(static_cast<int>(mask))); }
#else
    GIN_FN static uint32_t lanes_of(uint32_t mask) { return static_cast<uint32_t>(__builtin_popcount(mask)); }
#endif
};

/// All threads of the block, which may have up to three dimensions.
struct CoopCta {
    GIN_FN uint32_t thread_rank() const { return thread_in_block(); }
    GIN_FN uint32_t size() const { return threads_of_block(); }
#if defined(__CUDA_ARCH__)
    GIN_FN void sync() const { __syncthreads(); }
#else
    GIN_FN void sync() const { (void)gin_coop_sync(word()); }
#endif
#if defined(__CUDACC__)
    GIN_FN bool any(bool bit) const { return __syncthreads_or(bit) != 0; }
#else
    GIN_FN bool any(bool bit) const { return gin_virtual_any(word(), bit) != 0; }
#endif
    GIN_FN uint64_t word() const { return 2; }
    GIN_FN bool exists() const { return true; }
};

/// Neighbouring whole warps, with a named barrier, 1 to 15, of their own. Every call by a span that is not in the block
/// fails.
struct CoopWarpSpan {
    uint32_t warp0, warps, barrier;
    GIN_FN uint32_t thread_rank() const { return thread_in_block() - 32 * warp0; }
    GIN_FN uint32_t size() const { return 32 * warps; }
    GIN_FN Fault sync() const {
        if (!exists()) return Fault(FaultKind::BadDescriptor);
#if defined(__CUDA_ARCH__)
        asm volatile("barrier.sync.aligned %0, %1;" : : "r"(barrier), "r"(size()) : "memory");
        return Fault();
#else
        return Fault(gin_coop_sync(word()));
#endif
    }
#if defined(__CUDACC__)
    /// For a span that exists.
    GIN_FN bool any(bool bit) const {
        uint32_t found;
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; barrier.red.or.pred.aligned p, %1, %2, p; "
                     "selp.u32 %0, 1, 0, p; }"
                     : "=r"(found) : "r"(barrier), "r"(size()), "r"(uint32_t{bit}) : "memory");
        return found != 0;
    }
#else
    GIN_FN bool any(bool bit) const { return gin_virtual_any(word(), bit) != 0; }
#endif
    GIN_FN uint64_t word() const {
        return 4 | static_cast<uint64_t>(barrier & 255) << 8 | static_cast<uint64_t>(warp0 & 0xffff) << 32 |
               static_cast<uint64_t>(warps & 0xffff) << 48;
    }
    GIN_FN bool exists() const {
        uint64_t last = 32 * (static_cast<uint64_t>(warp0) + warps);
        return warps != 0 && last <= threads_of_block() && barrier - 1 < 15;
    }
};

}  // namespace gin
