// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The kernels of the example on NVIDIA GPUs, linked with libgin_device.a when the program is built. The program launches
// them by the CUDA runtime, on its own streams.

#include "check.hpp"
#include "kernels.cuh"

#include <cstdlib>
#include <cstring>

inline void cuda(cudaError_t error) {
    if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

int main(int count, char** words) {
    int gpus = 0;
    if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) {
        std::fprintf(stderr, "this program needs an NVIDIA GPU; `virtual` runs the same kernels without\n");
        return 1;
    }
    gin_config_t config = gin::default_config();
    config.device = GIN_DEVICE_CUDA;
    // `network`: all operations take the proxy. `caller`: and this program carries them out.
    bool manual = count > 2 && std::strcmp(words[2], "manual") == 0;
    config.network_only = manual || (count > 2 && std::strcmp(words[2], "network") == 0);
    if (manual) config.progress_threads = GIN_PROGRESS_MANUAL;
    return run(count > 1 ? uint32_t(std::atoi(words[1])) : uint32_t(gpus), config, [gpus, manual](const gin::Job& job) {
        // As gin places ranks that are threads.
        cuda(cudaSetDevice(int(job.rank()) % gpus));
        cudaStream_t stream;
        cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        both(job, [&](const char* name, uint32_t blocks, const auto& comm, const auto& to, const auto& from) {
            auto kernel = std::strcmp(name, "ring_sum") == 0 ? ring_sum : all_to_all;
            gin::Comm device = comm.device();
            gin::Window<float> first = to.device(), second = from.device();
            uint64_t elements = ELEMENTS;
            gin::Deadline deadline = gin::Deadline::after_ms(6000);
            void* arguments[] = {&device, &first, &second, &elements, &deadline};
            // Blocks that wait for other ranks are resident together.
            cuda(cudaLaunchCooperativeKernel(reinterpret_cast<void*>(kernel), blocks, THREADS, arguments, 0, stream));
            while (manual && cudaStreamQuery(stream) == cudaErrorNotReady) comm.progress();
            cuda(cudaStreamSynchronize(stream));
        });
        cuda(cudaStreamDestroy(stream));
    });
}
