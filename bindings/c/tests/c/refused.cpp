// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Calls that do not compile, one for each value of `CASE`, and the same call with the right types for 0.

#include "gin.hpp"
#include "gin_device.cuh"

void kernel(gin::Comm, gin::Window<float>, uint64_t) {}

void launch(const gin::Stream& stream, const gin::Communicator& comm, const gin::HostWindow<float>& floats,
            const gin::HostWindow<double>& doubles) {
    auto made = gin::Kernel::of<kernel>("kernel");
    gin_shape_t shape = gin::cooperative(1, 1);
    (void)doubles;
#if CASE == 0
    stream.launch(made, shape, comm.device(), floats.device(), 8);
#elif CASE == 1
    stream.launch(made, shape, comm.device(), doubles.device(), 8);
#elif CASE == 2
    stream.launch(made, shape, comm.device(), floats.device());
#elif CASE == 3
    gin::Window<float> window(doubles.device());
#endif
}
