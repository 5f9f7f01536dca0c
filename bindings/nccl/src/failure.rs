// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors.

use crate::abi::{CUDA_ERROR, INVALID_ARGUMENT};
use gin_gpu::GpuError;
use std::ffi::c_int;

/// An error: NCCL's code, and a text for the log.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: c_int,
    pub(crate) text: String,
}

impl Failure {
    pub(crate) fn new(code: c_int, text: impl Into<String>) -> Self {
        Self { code, text: text.into() }
    }

    pub(crate) fn argument(text: impl Into<String>) -> Self {
        Self::new(INVALID_ARGUMENT, text)
    }

    pub(crate) fn cuda(error: GpuError) -> Self {
        Self::new(CUDA_ERROR, error.to_string())
    }
}
