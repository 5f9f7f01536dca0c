// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The names of CUDA that gin_device.cuh uses, for clang without the headers of CUDA.

#pragma once

#define __CUDACC__ 1
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __global__ __attribute__((global))
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))

struct cuda_extents {
    unsigned x, y, z;
};

#define CUDA_EXTENTS(of) \
    (cuda_extents{static_cast<unsigned>(__nvvm_read_ptx_sreg_##of##_x()), \
                  static_cast<unsigned>(__nvvm_read_ptx_sreg_##of##_y()), \
                  static_cast<unsigned>(__nvvm_read_ptx_sreg_##of##_z())})
#define threadIdx CUDA_EXTENTS(tid)
#define blockIdx CUDA_EXTENTS(ctaid)
#define blockDim CUDA_EXTENTS(ntid)
#define gridDim CUDA_EXTENTS(nctaid)

#define __popc(value) __builtin_popcount(value)
#define __syncthreads() __nvvm_bar_sync(0)
#define __syncthreads_or(bit) __nvvm_bar0_or(bit)
#define __any_sync(mask, bit) __nvvm_vote_any_sync(mask, bit)
#define __syncwarp(mask) __nvvm_bar_warp_sync(mask)
