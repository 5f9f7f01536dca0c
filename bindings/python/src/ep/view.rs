// SPDX-License-Identifier: MIT OR Apache-2.0
//! Received rows and permuted rows as tensors.

use super::config::{Element, Layout};
use super::group::Group;
use crate::dtype::DType;
use crate::error::{OrRaise, StateError};
use crate::guard::{Guarded, check_process};
use crate::stream::Users;
use crate::tensor::{Region, is_ordered};
use gin_gpu::MemorySlice;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::sync::Arc;

/// Returns the number of elements in bytes.
pub(crate) fn words(what: &str, bytes: u32, dtype: DType) -> PyResult<i64> {
    let size = dtype.bytes() as u32;
    if bytes.is_multiple_of(size) {
        return Ok((bytes / size).into());
    }
    let text = format!("{what}: {bytes} bytes are no multiple of the {size} bytes of {}", dtype.name());
    Err(PyValueError::new_err(text))
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

/// Memory for received rows in a layout.
#[pyclass(frozen, module = "gincomm.ep")]
#[derive(Debug)]
pub(crate) struct Permuted {
    inner: Guarded<gin_ep::Permuted>,
    users: Guarded<Users>,
    element: Element,
    row_bytes: u32,
}

impl Permuted {
    pub(crate) fn get(&self) -> PyResult<&Arc<gin_ep::Permuted>> {
        self.inner.get()
    }

    pub(crate) fn users(&self) -> &Arc<Users> {
        &self.users
    }

    fn view(&self, memory: &MemorySlice, dtype: DType, shape: Vec<i64>) -> View {
        // The rest of the slice's place is its offset.
        View::new(Region::new(memory.memory().clone(), memory, dtype, shape), &self.users)
    }
}

#[pymethods]
impl Permuted {
    /// Allocates memory for at most `rows` rows; a padded layout has a row for each token of each rank and expert.
    #[new]
    #[pyo3(signature = (group, layout, rows=None))]
    fn new(py: Python<'_>, group: &Bound<'_, Group>, layout: &Bound<'_, Layout>, rows: Option<u32>) -> PyResult<Self> {
        let (core, layout) = (group.get().core()?, layout.get().0);
        let rows = match (rows, layout) {
            (Some(rows), _) => rows,
            (None, gin_ep::Layout::ExpertMajorPadded) => 0,
            _ => {
                return Err(PyValueError::new_err(
                    "pass the maximum number of rows of the layout: only EXPERT_MAJOR_PADDED knows them",
                ));
            }
        };
        let inner = py.detach(|| gin_ep::Permuted::new(&core.group, layout, rows)).or_raise(py)?;
        let (inner, users) = (Guarded::new(Arc::new(inner)), Guarded::new(Arc::default()));
        Ok(Self { inner, users, element: core.element, row_bytes: core.sizes.row_bytes })
    }

    /// Returns the maximum number of rows.
    #[getter]
    fn capacity(&self) -> PyResult<u32> {
        Ok(self.get()?.capacity())
    }

    /// Returns the rows: `[row][element]`.
    #[pyo3(signature = (dtype=None))]
    fn rows(&self, dtype: Option<&Bound<'_, PyAny>>) -> PyResult<View> {
        let permuted = self.get()?;
        let dtype = dtype.map(DType::named).transpose()?.unwrap_or(self.element.received());
        let elements = words("a row", self.row_bytes, dtype)?;
        let rows = permuted.rows();
        let rows = rows.ok_or_else(|| {
            StateError::new_err("the layout has no rows of its own: they stay where they were received")
        })?;
        Ok(self.view(rows, dtype, vec![permuted.capacity().into(), elements]))
    }

    /// Returns the words that `fetch_counts` copies.
    fn counts(&self) -> PyResult<View> {
        let counts = self.get()?.counts();
        Ok(self.view(counts, DType::Int32, vec![(counts.bytes() / 4) as i64]))
    }

    /// Returns a word for each row: `source << 21 | row << 5 | k`, or -1 for a gap.
    fn source_info(&self) -> PyResult<View> {
        let permuted = self.get()?;
        Ok(self.view(permuted.source_info(), DType::Int32, vec![permuted.capacity().into()]))
    }

    /// Copies the number of rows with gaps, then for each expert of this rank the number of its rows, from each source
    /// if the layout is padded, then for each expert the number of its first row, if it is packed. A flat layout has
    /// the first only. The stream is done; on a virtual GPU the call waits for it.
    fn fetch_counts(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        check_process()?;
        let permuted = self.get()?;
        self.users.wait(py)?;
        py.detach(|| permuted.fetch_counts()).or_raise(py)
    }
}
