// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A kernel of experts. A test compiles it; nothing runs it.

#include "gin_ep.cuh"

extern "C" GIN_KERNEL void experts(gin::ep::ReceivedRows received, const uint32_t* source_info, uint32_t hidden) {
    for (uint32_t source = 0; source < received.ranks; source++) {
        for (uint32_t row = gin::block_in_grid(); row < received.count(source); row += gin::blocks_of_grid()) {
            float factor = received.scales<float>(source, row)[0] + float(received.token(source, row));
            for (uint32_t k = 0; k < received.topk; k++) {
                if (received.expert(source, row, k) >= 0) factor += received.weight(source, row, k);
            }
            float* elements = received.row<float>(source, row);
            for (uint32_t i = gin::thread_in_block(); i < hidden; i += gin::threads_of_block()) elements[i] *= factor;
        }
    }
    gin::ep::SourceInfo from{source_info[gin::block_in_grid()]};
    if (!from.is_gap()) *received.row<uint32_t>(from.source(), from.row()) = from.k();
}
