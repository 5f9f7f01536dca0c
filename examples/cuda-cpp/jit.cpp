// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The kernels of the example on NVIDIA GPUs, linked with gin's PTX by nvJitLink while the program runs:
//
//   jit KERNELS.cubin gin_device.sm_90.ptx [ranks | link]
//
// `link` links and runs nothing, without a GPU. KERNELS.cubin is kernels.cu, by `nvcc -arch=sm_90 -rdc=true -cubin`.

#include "check.hpp"

#include <nvJitLink.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

namespace {

std::vector<char> contents(const char* path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error(std::string("cannot read ") + path);
    return {std::istreambuf_iterator<char>(file), {}};
}

void linked(nvJitLinkHandle linker, nvJitLinkResult result, const char* what) {
    if (result == NVJITLINK_SUCCESS) return;
    size_t bytes = 0;
    std::string log;
    if (nvJitLinkGetErrorLogSize(linker, &bytes) == NVJITLINK_SUCCESS && bytes > 1) {
        log.resize(bytes);
        nvJitLinkGetErrorLog(linker, log.data());
    }
    throw std::runtime_error(std::string(what) + " failed: " + log);
}

/// Links the program's kernels with gin's device functions.
std::vector<char> link(const std::vector<char>& kernels, std::vector<char> gin) {
    const char* options[] = {"-arch=sm_90"};
    nvJitLinkHandle linker;
    if (nvJitLinkCreate(&linker, 1, options) != NVJITLINK_SUCCESS) throw std::runtime_error("no linker");
    gin.push_back(0);
    linked(linker, nvJitLinkAddData(linker, NVJITLINK_INPUT_CUBIN, kernels.data(), kernels.size(), "kernels"),
           "adding the kernels");
    linked(linker, nvJitLinkAddData(linker, NVJITLINK_INPUT_PTX, gin.data(), gin.size(), "gin"), "adding gin's PTX");
    linked(linker, nvJitLinkComplete(linker), "linking");
    size_t bytes = 0;
    linked(linker, nvJitLinkGetLinkedCubinSize(linker, &bytes), "reading the size");
    std::vector<char> image(bytes);
    linked(linker, nvJitLinkGetLinkedCubin(linker, image.data()), "reading the result");
    nvJitLinkDestroy(&linker);
    return image;
}

}  // namespace

int main(int count, char** words) try {
    if (count < 3) {
        std::fprintf(stderr, "usage: jit KERNELS.cubin gin_device.sm_90.ptx [ranks | link]\n");
        return 2;
    }
    std::vector<char> image = link(contents(words[1]), contents(words[2]));
    if (count > 3 && std::strcmp(words[3], "link") == 0) {
        std::printf("linked: %zu bytes\n", image.size());
        return 0;
    }
    gin_config_t config = gin::default_config();
    config.device = GIN_DEVICE_CUDA;
    return run(count > 3 ? uint32_t(std::atoi(words[3])) : 1, config, [&image](const gin::Job& job) {
        gin::Module module(job, image.data(), image.size());
        gin::Kernel kernels[] = {module.kernel("all_to_all"), module.kernel("ring_sum")};
        gin::Stream stream(job);
        both(job, [&](const char* name, uint32_t blocks, const auto& comm, const auto& to, const auto& from) {
            const gin::Kernel& kernel = kernels[std::strcmp(name, "ring_sum") == 0];
            uint64_t deadline_ns = 6000000000;
            stream.launch(kernel, gin::cooperative(blocks, THREADS), comm.device(), to.device(), from.device(), ELEMENTS,
                          deadline_ns);
            stream.synchronize();
        });
    });
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
