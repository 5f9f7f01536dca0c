// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The kernels alone, for a program that links them with gin while it runs: `nvcc -arch=sm_90 -rdc=true -cubin`.

#include "kernels.cuh"
