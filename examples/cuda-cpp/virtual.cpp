// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The kernels of the example on virtual GPUs: any C++17 compiler, no GPU.

#include "check.hpp"
#include "kernels.cuh"

#include <cstdlib>
#include <cstring>

int main(int count, char** words) {
    gin_config_t config = gin::default_config();
    config.device = GIN_DEVICE_VIRTUAL;
    // `network`: all operations take the proxy. `caller`: and waits of this program carry them out. `gdaki`: kernels
    // drive software NICs.
    bool manual = count > 2 && std::strcmp(words[2], "manual") == 0;
    bool gdaki = count > 2 && std::strcmp(words[2], "gdaki") == 0;
    config.network_only = manual || gdaki || (count > 2 && std::strcmp(words[2], "network") == 0);
    if (gdaki) config.backend = GIN_BACKEND_GDAKI_SOFT;
    if (manual) config.progress_threads = GIN_PROGRESS_MANUAL;
    return run(count > 1 ? uint32_t(std::atoi(words[1])) : 4, config, [](const gin::Job& job) {
        gin::Kernel kernels[] = {gin::Kernel::of<all_to_all>("all_to_all"), gin::Kernel::of<ring_sum>("ring_sum")};
        gin::Stream stream(job);
        both(job, [&](const char* name, uint32_t blocks, const auto& comm, const auto& to, const auto& from) {
            const gin::Kernel& kernel = kernels[std::strcmp(name, "ring_sum") == 0];
            stream.launch(kernel, gin::cooperative(blocks, THREADS), comm.device(), to.device(), from.device(), ELEMENTS,
                          gin::Deadline::after_ms(20000));
            stream.synchronize();
        });
    });
}
