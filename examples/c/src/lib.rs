// SPDX-License-Identifier: MIT OR Apache-2.0
//! The functions of `gin.h` and the kernels of a Rust crate in one shared library, so that a C program launches them on
//! virtual GPUs by name.

pub use gin_capi as gin;
/// The kernels: a crate that nobody names is not linked.
pub use gin_examples_kernels as kernels;
