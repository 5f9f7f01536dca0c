// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The kernel of put.c, in C++ for the virtual GPU: each rank passes its elements on to the next one.

#include "gin.hpp"
#include "gin_device.cuh"

static void pass(gin::Comm comm, gin::Window<float> recv, gin::Window<float> send, uint64_t bytes) {
    gin::CoopCta cta;
    gin::Gin<> net(comm, 0, gin::Deadline::after_ms(5000));
    gin::Team world = comm.world();
    gin::Fault fault = net.put(world, world.after(1), recv, 0, send, 0, bytes, gin::StrongSignalInc{0}, gin::None{}, cta);
    if (!fault) fault = net.waitSignal(cta, 0, 1);
    comm.report(fault);
}

// Makes the kernel, which the caller closes.
extern "C" gin_status_t make_pass(gin_kernel_t* kernel) try {
    *kernel = gin::Kernel::of<pass>("pass").release();
    return GIN_OK;
} catch (const gin::Error& error) {
    return error.status();
}
