// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A kernel in CUDA C++ that calls a device function of a user's crate, and gin's own by the header.

#include "gin_device.cuh"

extern "C" __device__ uint64_t own_shift(const gin::Comm* comm, const gin::Window<uint64_t>* words, uint64_t value,
                                         uint64_t deadline_ns);

extern "C" __global__ void shift(gin::Comm comm, gin::Window<uint64_t> words, uint64_t* out) {
    gin::Deadline deadline = gin::Deadline::after_ms(100);
    *out = own_shift(&comm, &words, comm.rank(), deadline.ns);
    comm.report(gin::Gin<>(comm, 0, deadline).flush(gin::CoopThread{}));
}

int main() { return 0; }
