// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensors of torch without a DLPack capsule, which takes Python several microseconds to make.

use super::Tensor;
use crate::dlpack::{CPU, CUDA, elements};
use crate::dtype::DType;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};

/// `torch.Tensor`, and torch's dtypes.
struct Torch {
    tensor: Py<PyType>,
    dtypes: Vec<(Py<PyAny>, DType)>,
}

/// Returns torch, once the program has imported it.
fn torch(py: Python<'_>) -> Option<&Torch> {
    static TORCH: PyOnceLock<Torch> = PyOnceLock::new();
    if let Some(torch) = TORCH.get(py) {
        return Some(torch);
    }
    let modules = py.import("sys").ok()?.getattr("modules").ok()?;
    let module = modules.cast::<PyDict>().ok()?.get_item("torch").ok()??;
    let tensor = module.getattr("Tensor").ok()?.cast_into::<PyType>().ok()?.unbind();
    let of = |dtype: DType| Some((module.getattr(dtype.name()).ok()?.unbind(), dtype));
    let dtypes = DType::ALL.iter().copied().filter_map(of).collect();
    Some(TORCH.get_or_init(py, || Torch { tensor, dtypes }))
}

/// Returns what a plain, contiguous tensor of torch is, if it is on the device of a rank, of one of these types, of any
/// if there are none. Returns nothing for all other values: DLPack takes or refuses them.
pub(super) fn borrow(value: &Bound<'_, PyAny>, place: (i32, i32), dtypes: &[DType]) -> Option<Tensor> {
    let py = value.py();
    let torch = torch(py)?;
    // Subclasses may have no memory.
    if !value.get_type().is(&torch.tensor) {
        return None;
    }
    let is = |name| value.getattr(name).and_then(|flag| flag.extract::<bool>()).ok();
    let near = match place {
        (CPU, _) => is(intern!(py, "is_cpu"))?,
        (CUDA, id) => {
            is(intern!(py, "is_cuda"))?
                && value.call_method0(intern!(py, "get_device")).ok()?.extract::<i32>().ok()? == id
        }
        _ => false,
    };
    if !near || is(intern!(py, "requires_grad"))? {
        return None;
    }
    let found = value.getattr(intern!(py, "dtype")).ok()?;
    let dtype = torch.dtypes.iter().find(|(dtype, _)| found.is(dtype))?.1;
    if !(dtypes.is_empty() || dtypes.contains(&dtype)) {
        return None;
    }
    if !value.call_method0(intern!(py, "is_contiguous")).ok()?.extract::<bool>().ok()? {
        return None;
    }
    let address: u64 = value.call_method0(intern!(py, "data_ptr")).ok()?.extract().ok()?;
    let shape: Vec<i64> = value.getattr(intern!(py, "shape")).ok()?.extract().ok()?;
    let bytes = elements(&shape)?.saturating_mul(dtype.bytes());
    if (address == 0 && bytes > 0) || !address.is_multiple_of(dtype.bytes()) {
        return None;
    }
    Some(Tensor { taken: None, address, bytes, dtype, shape })
}
