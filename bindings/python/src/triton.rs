// SPDX-License-Identifier: MIT OR Apache-2.0
//! The device functions that `gincomm.triton` has Triton link into its kernels.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

#[cfg(feature = "cuda")]
#[expect(unreachable_pub, reason = "gin-build writes the table for every crate")]
mod device {
    include!(concat!(env!("OUT_DIR"), "/triton.rs"));
}

/// The functions as LLVM's IR, by architecture.
#[cfg(feature = "cuda")]
const IR: &[(&str, &[u8])] = device::IR;
#[cfg(not(feature = "cuda"))]
const IR: &[(&str, &[u8])] = &[];

/// Returns the device functions: pairs of architecture and LLVM's IR as text.
#[pyfunction]
pub(crate) fn _device_ir(py: Python<'_>) -> Vec<(&'static str, Bound<'_, PyBytes>)> {
    IR.iter().map(|(arch, text)| (*arch, PyBytes::new(py, text))).collect()
}
