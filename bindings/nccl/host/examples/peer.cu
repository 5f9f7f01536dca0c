// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The kernels of gin-nccl-kernels in CUDA C++, by NCCL's own API. Ranks of both kinds meet in one job: see nccl_ring.rs.

#include <nccl.h>
#include <nccl_device.h>

// Returns the value of word `index` that rank `from` sends in a round.
__device__ uint64_t word(int from, uint64_t round, size_t index) {
    return (uint64_t)from << 48 | round << 24 | index;
}

// Keeps the first wrong word as its index plus 1.
__device__ void report(unsigned long long* wrong, size_t index) { atomicCAS(wrong, 0ull, (unsigned long long)index + 1); }

extern "C" __global__ void cpp_ring(ncclDevComm comm, ncclWindow_t receive, ncclWindow_t send, uint64_t* received,
                                    uint64_t* sent, size_t len, uint64_t rounds, unsigned long long* wrong) {
    ncclGin gin(comm, 0);
    ncclTeam world = ncclTeamWorld(comm);
    int left = (world.rank + world.nRanks - 1) % world.nRanks, right = (world.rank + 1) % world.nRanks;
    ncclCoopCta block;
    for (uint64_t round = 1; round <= rounds; round++) {
        gin.waitSignal(block, 1, round - 1);
        gin.waitCounter(block, 0, round - 1);
        for (size_t i = threadIdx.x; i < len; i += blockDim.x) sent[i] = word(world.rank, round, i);
        gin.put(world, right, receive, 0, send, 0, len * sizeof(uint64_t), ncclGin_StrongSignalAdd{0, 1},
                ncclGin_WeakCounterInc{0}, block, ncclGin_None(), cuda::thread_scope_thread, cuda::thread_scope_system);
        gin.waitSignal(block, 0, round);
        for (size_t i = threadIdx.x; i < len; i += blockDim.x)
            if (received[i] != word(left, round, i)) report(wrong, i);
        gin.signal(world, left, ncclGin_StrongSignalAdd{1, 1}, block, ncclGin_None(), cuda::thread_scope_thread,
                   cuda::thread_scope_system);
    }
    gin.waitSignal(block, 1, rounds);
}

extern "C" __global__ void cpp_fetch(ncclDevComm comm, ncclWindow_t receive, ncclWindow_t send, uint64_t* received,
                                     uint64_t* sent, size_t len, uint64_t rounds, unsigned long long* wrong) {
    ncclGin gin(comm, 0);
    ncclTeam world = ncclTeamWorld(comm);
    int left = (world.rank + world.nRanks - 1) % world.nRanks;
    ncclCoopCta block;
    ncclGinBarrierSession<ncclCoopCta> barrier(block, gin, ncclTeamTagWorld(), 0);
    for (uint64_t round = 1; round <= rounds; round++) {
        for (size_t i = threadIdx.x; i < len; i += blockDim.x) sent[i] = word(world.rank, round, i);
        barrier.sync(block, cuda::memory_order_acq_rel, ncclGinFenceLevel::None);
        gin.get(world, left, send, 0, receive, 0, len * sizeof(uint64_t), block);
        barrier.sync(block, cuda::memory_order_acq_rel, ncclGinFenceLevel::Get);
        for (size_t i = threadIdx.x; i < len; i += blockDim.x)
            if (received[i] != word(left, round, i)) report(wrong, i);
        barrier.sync(block, cuda::memory_order_acq_rel, ncclGinFenceLevel::None);
    }
}

extern "C" __global__ void cpp_all_to_all(ncclDevComm comm, ncclWindow_t window, uint64_t* words, uint64_t rounds,
                                          unsigned long long* wrong) {
    ncclGin gin(comm, 0);
    ncclTeam world = ncclTeamWorld(comm);
    ncclCoopCta block;
    ncclGinBarrierSession<ncclCoopCta> barrier(block, gin, ncclTeamTagWorld(), 0);
    for (uint64_t round = 1; round <= rounds; round++) {
        size_t half = (round & 1) * world.nRanks;
        for (int step = 0; step < world.nRanks; step++)
            gin.putValue(world, (world.rank + step) % world.nRanks, window, (half + world.rank) * sizeof(uint64_t),
                         word(world.rank, round, 0), ncclGin_None(), block);
        barrier.sync(block, cuda::memory_order_acq_rel, ncclGinFenceLevel::Put);
        for (int from = threadIdx.x; from < world.nRanks; from += blockDim.x)
            if (words[half + from] != word(from, round, 0)) report(wrong, from);
        __syncthreads();
    }
}

// For the table of instructions: nccl_ring.rs does not run them.
extern "C" __global__ void ref_put_signal(ncclDevComm comm, ncclWindow_t to, ncclWindow_t from, int peer, size_t len) {
    ncclGin gin(comm, 0);
    gin.put(ncclTeamWorld(comm), peer, to, 0, from, 0, len * 8, ncclGin_StrongSignalAdd{0, 1}, ncclGin_None(),
            ncclCoopThread(), ncclGin_None(), cuda::thread_scope_thread, cuda::thread_scope_system);
}

extern "C" __global__ void ref_wait_signal(ncclDevComm comm, uint64_t least) {
    ncclGin gin(comm, 0);
    gin.waitSignal(ncclCoopThread(), 0, least);
}
