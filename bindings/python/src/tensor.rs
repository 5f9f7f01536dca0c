// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensors of the program by DLPack, without a copy.

mod torch;

use crate::dlpack::{
    CUDA, CUDA_HOST, DlDevice, DlTensor, Managed, ManagedVersioned, PLAIN, PLAIN_USED, READ_ONLY, UNORDERED, VERSIONED,
    VERSIONED_USED, contiguous, device_name, dlpack_device, elements,
};
use crate::dtype::DType;
use crate::guard::check_process;
use crate::region::View;
use crate::window::Window;
use gin_gpu::Device;
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::ptr::NonNull;

/// A tensor that this process has taken over from its owner.
enum Taken {
    Plain(NonNull<Managed>),
    Versioned(NonNull<ManagedVersioned>),
}

/// A contiguous tensor of the program.
pub(crate) struct Tensor {
    /// Keeps the memory alive; `None` if the program does that.
    taken: Option<Taken>,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<i64>,
}

// Safety: DLPack allows any thread to call the deleter, and nothing else is done with the tensor.
unsafe impl Send for Tensor {}
// Safety: as above.
unsafe impl Sync for Tensor {}

impl Drop for Taken {
    fn drop(&mut self) {
        // The owner's library may be as unusable in a fork as gin is.
        if check_process().is_err() {
            return;
        }
        // Safety: the tensor was taken over, and its deleter is called once.
        unsafe {
            match self {
                Self::Plain(tensor) => {
                    if let Some(delete) = tensor.as_ref().deleter {
                        delete(tensor.as_ptr());
                    }
                }
                Self::Versioned(tensor) => {
                    if let Some(delete) = tensor.as_ref().deleter {
                        delete(tensor.as_ptr());
                    }
                }
            }
        }
    }
}

impl Taken {
    /// Takes over the tensor of a capsule.
    fn of(capsule: &Bound<'_, PyAny>) -> PyResult<Self> {
        let raw = capsule.as_ptr();
        for (name, used, versioned) in [(VERSIONED, VERSIONED_USED, true), (PLAIN, PLAIN_USED, false)] {
            // Safety: asks for the type and the name of an object that is alive.
            if unsafe { ffi::PyCapsule_IsValid(raw, name.as_ptr()) } == 0 {
                continue;
            }
            // Safety: the capsule has this name, and so a pointer to such a structure. Its new name is static.
            let pointer = unsafe {
                let pointer = ffi::PyCapsule_GetPointer(raw, name.as_ptr());
                if ffi::PyCapsule_SetName(raw, used.as_ptr()) != 0 {
                    return Err(PyErr::fetch(capsule.py()));
                }
                pointer
            };
            let taken = if versioned {
                NonNull::new(pointer.cast()).map(Self::Versioned)
            } else {
                NonNull::new(pointer.cast()).map(Self::Plain)
            };
            return taken.ok_or_else(|| PyBufferError::new_err("the DLPack capsule has no tensor"));
        }
        Err(PyBufferError::new_err("`__dlpack__` has returned no DLPack capsule, or one that was used already"))
    }

    fn tensor(&self) -> PyResult<&DlTensor> {
        match self {
            // Safety: it lives as long as this.
            Self::Plain(tensor) => Ok(unsafe { &tensor.as_ref().tensor }),
            Self::Versioned(tensor) => {
                // Safety: as above. The first fields have the same places in all versions.
                let tensor = unsafe { tensor.as_ref() };
                if tensor.version.major != 1 {
                    let text = format!("the tensor has version {} of DLPack; gin knows 1", tensor.version.major);
                    return Err(PyBufferError::new_err(text));
                }
                if tensor.flags & READ_ONLY != 0 {
                    return Err(PyValueError::new_err("the tensor is read-only, and kernels would write to it"));
                }
                Ok(&tensor.tensor)
            }
        }
    }
}

impl Tensor {
    /// Returns whether a value offers its memory by DLPack.
    pub(crate) fn is_offered_by(value: &Bound<'_, PyAny>) -> bool {
        value.hasattr("__dlpack__").unwrap_or(false)
    }

    /// Takes a tensor of one of these types, of any if there are none, that kernels of `device` can use. `what` names
    /// it in errors.
    pub(crate) fn take(value: &Bound<'_, PyAny>, device: &dyn Device, what: &str, dtypes: &[DType]) -> PyResult<Self> {
        let py = value.py();
        if !Self::is_offered_by(value) {
            let text = format!("{what} is a `{}`, which has no `__dlpack__`: pass a tensor", value.get_type().name()?);
            return Err(PyTypeError::new_err(text));
        }
        let (kind, id) = value.call_method0("__dlpack_device__")?.extract::<(i32, i32)>()?;
        let (own_kind, own_id) = dlpack_device(device);
        // All devices reach pinned memory, which has no number of its own.
        let near = (kind, id) == (own_kind, own_id) || kind == CUDA_HOST;
        if !near {
            let (found, wanted) = (DlDevice { kind, id }, DlDevice { kind: own_kind, id: own_id });
            let text = format!(
                "{what} is on {}; the rank's kernels run on {}, which takes tensors on {}",
                device_name(found),
                device.name(),
                device_name(wanted)
            );
            return Err(PyValueError::new_err(text));
        }
        let options = PyDict::new(py);
        if kind == CUDA || value.is_instance_of::<Window>() || value.is_instance_of::<View>() {
            // The producer does not wait for other streams: the program orders its streams.
            options.set_item("stream", UNORDERED)?;
        }
        options.set_item("max_version", (1, 1))?;
        let capsule = match value.call_method("__dlpack__", (), Some(&options)) {
            // It implements DLPack of before version 1.
            Err(error) if error.is_instance_of::<PyTypeError>(py) => {
                options.del_item("max_version")?;
                value.call_method("__dlpack__", (), Some(&options))?
            }
            outcome => outcome.map_err(|error| Self::refused(py, error, what))?,
        };
        Self::read(Taken::of(&capsule)?, what, dtypes)
    }

    /// Does the same for a tensor that the program keeps until kernels no longer use it.
    pub(crate) fn borrow(
        value: &Bound<'_, PyAny>,
        device: &dyn Device,
        what: &str,
        dtypes: &[DType],
    ) -> PyResult<Self> {
        match torch::borrow(value, dlpack_device(device), dtypes) {
            Some(tensor) => Ok(tensor),
            None => Self::take(value, device, what, dtypes),
        }
    }

    /// Returns whether torch itself has told where the tensor is.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_of_torch(&self) -> bool {
        self.taken.is_none()
    }

    /// Names the tensor in the error of an owner that does not hand it out.
    fn refused(py: Python<'_>, error: PyErr, what: &str) -> PyErr {
        if !error.is_instance_of::<PyBufferError>(py) {
            return error;
        }
        let named = PyBufferError::new_err(format!("{what}: {}", error.value(py)));
        named.set_cause(py, Some(error));
        named
    }

    fn read(taken: Taken, what: &str, dtypes: &[DType]) -> PyResult<Self> {
        let tensor = taken.tensor()?;
        let takes = if dtypes.is_empty() { DType::ALL } else { dtypes };
        let dtype = DType::of_dlpack(tensor.dtype).filter(|dtype| takes.contains(dtype)).ok_or_else(|| {
            let names: Vec<&str> = takes.iter().map(|dtype| dtype.name()).collect();
            let (taker, names) = (
                if dtypes.is_empty() { "gin" } else { "the group" },
                names.join(if names.len() < 4 { " or " } else { ", " }),
            );
            PyTypeError::new_err(format!("{what} has elements of {}; {taker} takes {names}", tensor.dtype.name()))
        })?;
        let count = usize::try_from(tensor.ndim).unwrap_or(0);
        let values = |pointer: *const i64| match (count, pointer.is_null()) {
            (0, _) | (_, true) => Vec::new(),
            // Safety: the arrays have as many values as the tensor has dimensions.
            _ => unsafe { std::slice::from_raw_parts(pointer, count) }.to_vec(),
        };
        let (shape, strides) = (values(tensor.shape), values(tensor.strides));
        let length =
            elements(&shape).ok_or_else(|| PyValueError::new_err(format!("{what} has the shape {shape:?}")))?;
        // The stride of an extent of 1 has no meaning, nor do any if there are no elements.
        let differs = |((&extent, &found), &wanted): ((&i64, &i64), &i64)| extent > 1 && found != wanted;
        if length > 0 && shape.iter().zip(&strides).zip(&contiguous(&shape)).any(differs) {
            let text =
                format!("{what} is not contiguous (shape {shape:?}, strides {strides:?}): pass a contiguous copy");
            return Err(PyValueError::new_err(text));
        }
        let address = (tensor.data.expose_provenance() as u64).wrapping_add(tensor.byte_offset);
        let bytes = length.saturating_mul(dtype.bytes());
        if address == 0 && bytes > 0 {
            let text = format!(
                "{what} has no memory, as fake tensors have while torch.compile traces: `gincomm.torch` has calls that it \
                 can trace"
            );
            return Err(PyValueError::new_err(text));
        }
        if !address.is_multiple_of(dtype.bytes()) {
            return Err(PyValueError::new_err(format!("{what} is not aligned to its elements: pass a copy")));
        }
        Ok(Self { taken: Some(taken), address, bytes, dtype, shape })
    }
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let versioned = matches!(self.taken, Some(Taken::Versioned(_)));
        f.debug_struct("Tensor").field("address", &self.address).field("versioned", &versioned).finish_non_exhaustive()
    }
}
