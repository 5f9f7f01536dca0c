// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Posts in a loop, and waits. Tables of peers exist only if loads and stores reach them, so a table may be read only behind that
// condition: a test looks for such reads before the loop, in the PTX. The second post must not take the condition for true.

#include "gin_device.cuh"

extern "C" __global__ void many_puts(gin::Comm comm, gin::Window<float> to, gin::Window<float> from, uint32_t rounds) {
    gin::Gin<> net(comm, 0, gin::Deadline::none());
    gin::Team world = comm.world();
    gin::Fault fault;
    for (uint32_t i = 0; !fault && i < rounds; i++) {
        fault = net.put(world, 1, to, 0, from, 16, 16, gin::StrongSignalInc{0}, gin::CounterInc{0});
        if (!fault) fault = net.put(world, 2, to, 0, from, 16, 16, gin::StrongSignalInc{0}, gin::CounterInc{0});
    }
    comm.report(fault);
}

extern "C" __global__ void one_wait(gin::Comm comm, uint64_t least) {
    comm.report(gin::Gin<>(comm, 0, gin::Deadline::none()).waitSignal(gin::CoopThread{}, 0, least));
}

extern "C" __global__ void one_count(gin::Comm comm, uint64_t least) {
    comm.report(gin::Gin<>(comm, 0, gin::Deadline::none()).waitCounter(gin::CoopThread{}, 0, least));
}
