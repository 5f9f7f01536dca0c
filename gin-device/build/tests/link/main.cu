// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A CUDA C++ program that calls a device function written in Rust.

#include <cstdint>
#include <cstdio>

extern "C" __device__ uint64_t bare_add(uint64_t value, uint64_t* word);

__global__ void call(uint64_t* words) { words[1] = bare_add(5, words); }

int main() {
    uint64_t host[2] = {2, 0};
    uint64_t* words = nullptr;
    if (cudaMalloc(&words, sizeof host) != cudaSuccess) {
        std::puts("no GPU");
        return 2;
    }
    cudaMemcpy(words, host, sizeof host, cudaMemcpyHostToDevice);
    call<<<1, 1>>>(words);
    if (cudaMemcpy(host, words, sizeof host, cudaMemcpyDeviceToHost) != cudaSuccess) {
        std::puts(cudaGetErrorString(cudaGetLastError()));
        return 1;
    }
    std::printf("%llu %llu\n", static_cast<unsigned long long>(host[0]), static_cast<unsigned long long>(host[1]));
    return host[0] == 7 && host[1] == 21 ? 0 : 1;
}
