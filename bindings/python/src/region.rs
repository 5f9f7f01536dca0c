// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory of gin that is a tensor of the program by DLPack.

use crate::dlpack::{
    DlDevice, DlTensor, Managed, ManagedVersioned, PLAIN, VERSIONED, Version, contiguous, device_name, dlpack_device,
    is_ordered,
};
use crate::dtype::DType;
use crate::error::OrRaise;
use crate::guard::{Guarded, check_process, wait_until};
use gin_boot::lock;
use gin_gpu::{DeviceKind, GpuError, Keep, MemorySlice};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::ffi::{CStr, c_void};
use std::sync::{Arc, Mutex};

/// The streams of kernels that use memory which is a tensor on the CPU: that of a virtual GPU. The consumer of such a
/// tensor has no stream, and reads at once.
#[derive(Debug, Default)]
pub(crate) struct Users(Mutex<Vec<Arc<dyn gin_gpu::Stream>>>);

impl Users {
    /// Adds the stream of a kernel that the caller launches next.
    pub(crate) fn add(&self, stream: &Arc<dyn gin_gpu::Stream>) {
        let mut streams = lock(&self.0);
        if stream.device().kind() == DeviceKind::Virtual && !streams.iter().any(|known| Arc::ptr_eq(known, stream)) {
            streams.retain(|known| !matches!(known.is_idle(), Ok(true)));
            streams.push(stream.clone());
        }
    }

    /// Waits for the kernels that were launched until now on these streams. Kernels of a graph are none of them.
    pub(crate) fn wait(&self, py: Python<'_>) -> PyResult<()> {
        let streams = lock(&self.0).clone();
        for stream in streams {
            let idle = |stream: &dyn gin_gpu::Stream| Ok::<_, GpuError>(stream.is_capturing()? || stream.is_idle()?);
            if idle(&*stream).or_raise(py)? {
                continue;
            }
            let mark = stream.record().or_raise(py)?;
            wait_until(py, None, || mark.is_done())?;
        }
        Ok(())
    }
}

/// Memory of a group or permuted rows, a tensor by DLPack.
#[pyclass(frozen, module = "gincomm.ep")]
#[derive(Debug)]
pub(crate) struct View {
    region: Guarded<Region>,
    users: Guarded<Users>,
}

impl View {
    pub(crate) fn new(region: Region, users: &Arc<Users>) -> Self {
        Self { region: Guarded::new(Arc::new(region)), users: Guarded::new(users.clone()) }
    }
}

#[pymethods]
impl View {
    /// Returns the type of the elements, as NumPy and torch name it.
    #[getter]
    fn dtype(&self) -> PyResult<&'static str> {
        Ok(self.region.get()?.dtype.name())
    }

    /// Returns the shape.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.region.get()?.shape)
    }

    /// Returns a DLPack capsule. NumPy and torch call it in `from_dlpack`. On a virtual GPU it waits for the kernels
    /// that use the memory, because tensors of CPUs have no streams.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        // On GPUs the program orders kernels and tensors.
        if is_ordered(stream.as_ref()) {
            self.users.get()?.wait(py)?;
        }
        self.region.get()?.hand_out(py, max_version, dl_device, copy)
    }

    /// Returns the DLPack device: its type and its number.
    fn __dlpack_device__(&self) -> PyResult<(i32, i32)> {
        Ok(self.region.get()?.place())
    }

    fn __repr__(&self) -> PyResult<String> {
        let region = self.region.get()?;
        Ok(format!("<gincomm.ep.View: {:?} of {}>", region.shape, region.dtype.name()))
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
