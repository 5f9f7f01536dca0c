// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensors that cross the border by DLPack, without a copy.
//!
//! The structures are as in DLPack 1.1. An owner hands out a capsule. The consumer renames the capsule, owns its tensor
//! from then on, and calls the deleter once.

mod torch;

use crate::dtype::{DType, DlType};
use crate::ep::View;
use crate::guard::check_process;
use crate::window::Window;
use gin_gpu::{Device, DeviceKind, Keep, MemorySlice};
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

const CPU: i32 = 1;
const CUDA: i32 = 2;
const CUDA_HOST: i32 = 3;

const PLAIN: &CStr = c"dltensor";
const PLAIN_USED: &CStr = c"used_dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
const VERSIONED_USED: &CStr = c"used_dltensor_versioned";

const READ_ONLY: u64 = 1;

/// The stream of a consumer that wants no order from the producer.
const UNORDERED: i64 = -1;

/// Returns whether the reader of a tensor wants to find what earlier kernels write. The argument is that of
/// `__dlpack__`.
pub(crate) fn is_ordered(stream: Option<&Bound<'_, PyAny>>) -> bool {
    stream.is_none_or(|stream| stream.extract::<i64>().ok() != Some(UNORDERED))
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DlDevice {
    kind: i32,
    id: i32,
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: DlDevice,
    ndim: i32,
    dtype: DlType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Managed {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Version {
    major: u32,
    minor: u32,
}

#[repr(C)]
struct ManagedVersioned {
    version: Version,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    flags: u64,
    tensor: DlTensor,
}

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

/// Returns the name of a DLPack device.
fn device_name(DlDevice { kind, id }: DlDevice) -> String {
    match kind {
        CPU => "cpu".to_owned(),
        CUDA => format!("cuda:{id}"),
        CUDA_HOST => "pinned host memory".to_owned(),
        other => format!("DLPack device {other}:{id}"),
    }
}

/// Returns the DLPack device of tensors that kernels of `device` reach.
pub(crate) fn dlpack_device(device: &dyn Device) -> (i32, i32) {
    #[cfg(feature = "cuda")]
    if let Some(gpu) = gin_gpu::cuda::CudaDevice::of(device) {
        return (CUDA, gpu.ordinal() as i32);
    }
    debug_assert_eq!(device.kind(), DeviceKind::Virtual);
    (CPU, 0)
}

/// Returns the numbers of elements between neighbours of a contiguous tensor.
fn contiguous(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for dimension in (1..shape.len()).rev() {
        strides[dimension - 1] = strides[dimension] * shape[dimension].max(1);
    }
    strides
}

/// Returns the number of elements of a shape, if it is one.
pub(crate) fn elements(shape: &[i64]) -> Option<u64> {
    shape.iter().try_fold(1_u64, |product, &extent| product.checked_mul(u64::try_from(extent).ok()?))
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

/// The owner of memory that was handed out. Shape and strides are beside each other.
struct Handed {
    _keep: Keep,
    extents: Vec<i64>,
}

/// Memory of gin that is a tensor by DLPack.
#[derive(derive_more::Debug)]
pub(crate) struct Region {
    /// The owner of the memory.
    #[debug(skip)]
    keep: Keep,
    place: (i32, i32),
    address: u64,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<i64>,
    strides: Vec<i64>,
}

impl Region {
    /// Makes a contiguous tensor of the first bytes of `memory`, which `keep` keeps alive.
    pub(crate) fn new(keep: Keep, memory: &MemorySlice, dtype: DType, shape: Vec<i64>) -> Self {
        let place = dlpack_device(&**memory.memory().device());
        Self { keep, place, address: memory.address(), dtype, strides: contiguous(&shape), shape }
    }

    /// Moves it by bytes, and sets the numbers of elements between neighbours.
    pub(crate) fn at(mut self, offset: u64, strides: Vec<i64>) -> Self {
        self.address += offset;
        self.strides = strides;
        self
    }

    /// Returns the DLPack device: its type and its number.
    pub(crate) fn place(&self) -> (i32, i32) {
        self.place
    }

    /// Hands it out as a capsule, with the options of `__dlpack__`.
    pub(crate) fn hand_out<'py>(
        &self,
        py: Python<'py>,
        max_version: Option<(u32, u32)>,
        wanted: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if copy == Some(true) {
            return Err(PyBufferError::new_err("the tensor is memory that kernels use; copy the tensor instead"));
        }
        if let Some((kind, id)) = wanted.filter(|&wanted| wanted != self.place) {
            let name = |(kind, id)| device_name(DlDevice { kind, id });
            let (there, wanted) = (name(self.place), name((kind, id)));
            return Err(PyBufferError::new_err(format!(
                "the memory is on {there}, not on {wanted}: copy the tensor there"
            )));
        }
        let extents = [&self.shape[..], &self.strides].concat();
        let mut handed = Box::new(Handed { _keep: self.keep.clone(), extents });
        let (extents, (kind, id)) = (handed.extents.as_mut_ptr(), self.place);
        let tensor = DlTensor {
            data: std::ptr::with_exposed_provenance_mut(self.address as usize),
            device: DlDevice { kind, id },
            ndim: self.shape.len() as i32,
            dtype: self.dtype.dlpack(),
            shape: extents,
            // Safety: the strides follow the shape.
            strides: unsafe { extents.add(self.shape.len()) },
            byte_offset: 0,
        };
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        capsule(py, tensor, handed, versioned)
    }
}

/// Makes a capsule: of DLPack 1 if `versioned`, else of before.
fn capsule(py: Python<'_>, tensor: DlTensor, handed: Box<Handed>, versioned: bool) -> PyResult<Bound<'_, PyAny>> {
    let context = Box::into_raw(handed).cast::<c_void>();
    let (pointer, name, end): (*mut c_void, &CStr, ffi::PyCapsule_Destructor) = if versioned {
        let (version, deleter) = (Version { major: 1, minor: 1 }, Some(delete_versioned as unsafe extern "C" fn(_)));
        let managed = Box::new(ManagedVersioned { version, context, deleter, flags: 0, tensor });
        (Box::into_raw(managed).cast(), VERSIONED, end_versioned)
    } else {
        let managed = Box::new(Managed { tensor, context, deleter: Some(delete_plain) });
        (Box::into_raw(managed).cast(), PLAIN, end_plain)
    };
    // Safety: the pointer is not null, the name is static, and the destructor fits the pointer.
    let capsule = unsafe { ffi::PyCapsule_New(pointer, name.as_ptr(), Some(end)) };
    // Safety: a new reference, or null with an exception.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
}

/// # Safety
/// - The context is that of a tensor that was handed out, once.
unsafe fn drop_handed(context: *mut c_void) {
    // Safety: the caller's promise.
    let handed = unsafe { Box::from_raw(context.cast::<Handed>()) };
    if check_process().is_err() {
        // The device may be unusable in a fork.
        std::mem::forget(handed);
    }
}

unsafe extern "C" fn delete_plain(managed: *mut Managed) {
    // Safety: the consumer calls this once, with the tensor that was handed out.
    unsafe { drop_handed(Box::from_raw(managed).context) }
}

unsafe extern "C" fn delete_versioned(managed: *mut ManagedVersioned) {
    // Safety: as above.
    unsafe { drop_handed(Box::from_raw(managed).context) }
}

/// Deletes the tensor of a capsule that nobody has taken.
unsafe extern "C" fn end_plain(capsule: *mut ffi::PyObject) {
    // Safety: the interpreter calls this once, with a capsule that has the pointer if it still has the name.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, PLAIN.as_ptr()) != 0 {
            delete_plain(ffi::PyCapsule_GetPointer(capsule, PLAIN.as_ptr()).cast());
        }
    }
}

/// Deletes the tensor of a capsule that nobody has taken.
unsafe extern "C" fn end_versioned(capsule: *mut ffi::PyObject) {
    // Safety: as above.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) != 0 {
            delete_versioned(ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr()).cast());
        }
    }
}
