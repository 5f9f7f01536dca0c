// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The kernel of ep.c, in C++ for the virtual GPU: expert `e` multiplies a row by `e + 1`.

#include "gin.hpp"
#include "gin_ep.cuh"

static void experts(gin::ep::ReceivedRows received, uint32_t first_expert, uint32_t hidden) {
    for (uint32_t source = 0; source < received.ranks; source++) {
        for (uint32_t row = gin::block_in_grid(); row < received.count(source); row += gin::blocks_of_grid()) {
            float factor = 0;
            for (uint32_t k = 0; k < received.topk; k++) {
                // The expert's number on this rank; -1: it is on another, or there is none.
                int32_t expert = received.expert(source, row, k);
                if (expert >= 0) {
                    factor += received.weight(source, row, k) * float(first_expert + uint32_t(expert) + 1);
                }
            }
            float* elements = received.row<float>(source, row);
            for (uint32_t i = gin::thread_in_block(); i < hidden; i += gin::threads_of_block()) elements[i] *= factor;
        }
    }
}

// Makes the kernel, which the caller closes.
extern "C" gin_status_t make_experts(gin_kernel_t* kernel) try {
    *kernel = gin::Kernel::of<experts>("experts").release();
    return GIN_OK;
} catch (const gin::Error& error) {
    return error.status();
}
