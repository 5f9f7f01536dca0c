// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Two kernels that communicate, for GPUs and for the virtual GPU: an all-to-all with signals, and a ring with puts and
// counters that adds up what passes.

#pragma once

#include "gin_device.cuh"

#if defined(__CUDACC__)
#define KERNEL extern "C" __global__ void
#else
#define KERNEL inline void
#endif

/// Sends `elements` elements to each rank, and waits for those of all ranks. Rank `p` gets the elements from
/// `p * elements` on, and finds those of rank `r` at `r * elements`.
///
/// Each block sends a part of every message, and has its own signal and barrier. The windows have `elements` elements for
/// each rank.
KERNEL all_to_all(gin::Comm comm, gin::Window<float> recv, gin::Window<float> send, uint64_t elements,
                  gin::Deadline deadline) {
    gin::CoopCta cta;
    gin::Gin<> net(comm, 0, deadline);
    gin::Team world = comm.world();
    uint32_t block = gin::block_in_grid(), blocks = gin::blocks_of_grid();
    uint64_t first = elements * block / blocks, count = elements * (block + 1) / blocks - first;

    // Read before the barrier: after it, peers raise the signal.
    gin::Result<uint64_t> before = net.readSignal(block);
    gin::Fault fault = before.fault;
    // No rank may write to a peer that is not here yet.
    if (!fault) fault = net.barrier(cta, gin::BarrierTeam::World, block, gin::Fence::None);
    for (uint32_t step = 0; !fault && step < world.nRanks; step++) {
        uint32_t peer = world.after(step);
        fault = net.put(world, peer, gin::SymPtr<float>{recv, world.rank * elements + first},
                        gin::SymPtr<float>{send, peer * elements + first}, count, gin::StrongSignalInc{block},
                        gin::None{}, cta);
    }
    if (!fault) fault = net.waitSignal(cta, block, before.value + world.nRanks);
    if (!fault) fault = net.flush(cta);
    comm.report(fault);
}

/// Passes the blocks of all ranks round the ring, and adds them up: `sums[i]` becomes the sum of element `i` of all ranks'
/// blocks. `data` has a block of `elements` elements for each rank; the own one is filled. One block of threads.
KERNEL ring_sum(gin::Comm comm, gin::Window<float> data, gin::Window<float> sums, uint64_t elements,
                gin::Deadline deadline) {
    gin::CoopCta cta;
    gin::Gin<> net(comm, 0, deadline);
    gin::Team world = comm.world();
    uint32_t right = world.after(1);

    gin::Result<uint64_t> arrived = net.readSignal(0), left = net.readCounter(0);
    gin::Fault fault = arrived ? left.fault : arrived.fault;
    if (!fault) fault = net.barrier(cta, gin::BarrierTeam::World, 0, gin::Fence::None);
    for (uint32_t step = 0; !fault && step < world.nRanks; step++) {
        // The block that arrived in the last step; at first the own one.
        uint64_t from = world.after(world.nRanks - step) * elements;
        bool last = step + 1 == world.nRanks;
        if (!last) {
            gin::SymPtr<float> block{data, from};
            fault = net.put(world, right, block, block, elements, gin::StrongSignalInc{0}, gin::CounterInc{0}, cta);
        }
        // Computes while the block travels.
        for (uint64_t i = cta.thread_rank(); i < elements; i += cta.size()) {
            *sums.localPointer(i) += *data.localPointer(from + i);
        }
        if (!fault && !last) fault = net.waitSignal(cta, 0, arrived.value + step + 1);
    }
    // The sources of all puts may be reused.
    if (!fault) fault = net.waitCounter(cta, 0, left.value + world.nRanks - 1);
    comm.report(fault);
}
