// SPDX-License-Identifier: MIT OR Apache-2.0
//! The position of a thread of the virtual GPU, for kernels in C and C++.

use gin_device::prelude::{block_dim, block_index, grid_dim, thread_index};

/// The indices and extents of a thread, as CUDA's built-in variables.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Position {
    /// `threadIdx`.
    pub thread_index: [u32; 3],
    /// `blockDim`.
    pub block_dim: [u32; 3],
    /// `blockIdx`.
    pub block_index: [u32; 3],
    /// `gridDim`.
    pub grid_dim: [u32; 3],
}

/// Returns the position of the calling thread of a kernel on the virtual GPU.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn gin_virtual_position() -> Position {
    let [thread_index, block_dim, block_index, grid_dim] =
        [thread_index(), block_dim(), block_index(), grid_dim()].map(|dim| [dim.x, dim.y, dim.z]);
    Position { thread_index, block_dim, block_index, grid_dim }
}
