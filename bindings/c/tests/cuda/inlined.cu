// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Operations that are calls for nvcc. clang inlines them from gin's bitcode.

#include "gin_device.cuh"

extern "C" __global__ void put_and_wait(gin::Comm comm, gin::Window<float> to, gin::Window<float> from,
                                        uint64_t bytes) {
    gin::CoopCta cta;
    gin::Gin<gin::Proxy> net(comm, 0, gin::Deadline::after_ms(5));
    gin::Fault fault = net.put(comm.world(), 1, to, 0, from, 0, bytes, gin::StrongSignalInc{0},
                               gin::CounterInc{0}, cta);
    if (!fault) fault = net.waitSignal(cta, 0, 1);
    if (!fault) fault = net.flush(cta);
    comm.report(fault);
}

// Code of the header.
extern "C" __global__ void read_signal(gin::Comm comm, uint64_t* out) {
    gin::Gin<> net(comm, 0, gin::Deadline::none(), gin::Sharing::Gpu, gin::Route::Lsa);
    *out = net.readSignal(0).value;
}
