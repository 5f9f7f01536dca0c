// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory for received rows in another layout.

use super::config::{Element, Layout, words};
use super::state::Group;
use crate::dtype::DType;
use crate::error::{OrRaise, StateError};
use crate::guard::{Guarded, check_process};
use crate::region::{Region, Users, View};
use gin_ep_kernels::Sizes;
use gin_gpu::MemorySlice;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::sync::Arc;

/// Memory for received rows in a layout.
#[pyclass(frozen, module = "gincomm.ep")]
#[derive(Debug)]
pub(crate) struct Permuted {
    inner: Guarded<gin_ep::Permuted>,
    users: Guarded<Users>,
    element: Element,
    sizes: Sizes,
}

impl Permuted {
    fn make(inner: gin_ep::Permuted, element: Element, sizes: Sizes) -> Self {
        Self { inner: Guarded::new(Arc::new(inner)), users: Guarded::new(Arc::default()), element, sizes }
    }

    /// Returns the maximum number of rows that a program passed.
    fn room(layout: gin_ep::Layout, rows: Option<u32>) -> PyResult<u32> {
        match (rows, layout) {
            (Some(rows), _) => Ok(rows),
            (None, gin_ep::Layout::ExpertMajorPadded | gin_ep::Layout::ExpertMajorFixed) => Ok(0),
            _ => Err(PyValueError::new_err(
                "pass the maximum number of rows of the layout: only EXPERT_MAJOR_PADDED and EXPERT_MAJOR_FIXED know it",
            )),
        }
    }

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
    /// Allocates memory for at most `rows` rows; a padded or fixed layout has room for all rows that may arrive.
    #[new]
    #[pyo3(signature = (group, layout, rows=None))]
    fn new(py: Python<'_>, group: &Bound<'_, Group>, layout: &Bound<'_, Layout>, rows: Option<u32>) -> PyResult<Self> {
        let (core, layout) = (group.get().core()?, layout.get().0);
        let rows = Self::room(layout, rows)?;
        let inner = py.detach(|| gin_ep::Permuted::new(&core.group, layout, rows)).or_raise(py)?;
        Ok(Self::make(inner, core.element, core.sizes))
    }

    /// Allocates memory for counts, places and source infos alone. Kernels copy no row, unless `with_memory` adds
    /// memory.
    #[staticmethod]
    #[pyo3(signature = (group, layout, rows=None))]
    fn without_rows(
        py: Python<'_>,
        group: &Bound<'_, Group>,
        layout: &Bound<'_, Layout>,
        rows: Option<u32>,
    ) -> PyResult<Self> {
        let (core, layout) = (group.get().core()?, layout.get().0);
        let rows = Self::room(layout, rows)?;
        let inner = py.detach(|| gin_ep::Permuted::without_rows(&core.group, layout, rows)).or_raise(py)?;
        Ok(Self::make(inner, core.element, core.sizes))
    }

    /// Returns the same flat or packed layout for at most `rows` rows. The places of rows are in memory that both
    /// share.
    fn with_capacity(&self, py: Python<'_>, rows: u32) -> PyResult<Self> {
        Ok(Self::make(self.get()?.with_capacity(rows).or_raise(py)?, self.element, self.sizes))
    }

    /// Returns the same layout in tensors of the program, in place of memory of this value. The places of rows are in
    /// memory that both share.
    #[pyo3(signature = (group, *, rows=None, scales=None, tokens=None, counts=None))]
    fn with_memory(
        &self,
        group: &Bound<'_, Group>,
        rows: Option<&Bound<'_, PyAny>>,
        scales: Option<&Bound<'_, PyAny>>,
        tokens: Option<&Bound<'_, PyAny>>,
        counts: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let (py, core) = (group.py(), group.get().core()?);
        let take = |value: Option<&Bound<'_, PyAny>>, what: &str, dtypes: &[DType]| -> PyResult<Option<MemorySlice>> {
            Ok(core.optional(value, what, dtypes)?.unzip().0)
        };
        let (rows, scales) = (take(rows, "the tensor of rows", &[])?, take(scales, "the tensor of scales", &[])?);
        let words = [DType::Int32, DType::Uint32];
        let (tokens, counts) =
            (take(tokens, "the tensor of tokens", &words)?, take(counts, "the tensor of counts", &words)?);
        let memory = gin_ep::PermutedMemory {
            rows: rows.as_ref(),
            scales: scales.as_ref(),
            tokens: tokens.as_ref(),
            counts: counts.as_ref(),
        };
        Ok(Self::make(self.get()?.with_memory(&memory).or_raise(py)?, self.element, self.sizes))
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
        let elements = words("a row", self.sizes.row_bytes, dtype)?;
        let rows = permuted.rows();
        let rows = rows.ok_or_else(|| {
            StateError::new_err("the layout has no rows of its own: they stay where they were received")
        })?;
        Ok(self.view(rows, dtype, vec![permuted.capacity().into(), elements]))
    }

    /// Returns the scales of the rows of a fixed layout: `[expert][word][row]`, where a row's scales are words of 4
    /// bytes.
    fn scales(&self) -> PyResult<View> {
        let (permuted, sizes) = (self.get()?, &self.sizes);
        let scales = permuted.scales();
        let scales = scales.ok_or_else(|| {
            StateError::new_err("the layout has no scales: use EXPERT_MAJOR_FIXED and an element with scales, and rows")
        })?;
        let dtype = if self.element.scales() == DType::Float32 { DType::Float32 } else { DType::Int32 };
        let shape = [sizes.local(), sizes.scale_bytes / 4, permuted.capacity() / sizes.local()];
        Ok(self.view(scales, dtype, shape.map(i64::from).to_vec()))
    }

    /// Returns the number of each row's token at its source, in a fixed layout.
    fn tokens(&self) -> PyResult<View> {
        let permuted = self.get()?;
        let tokens = permuted.tokens();
        let tokens = tokens.ok_or_else(|| {
            StateError::new_err("the layout has no tokens: use EXPERT_MAJOR_FIXED with rows, or Received.tokens")
        })?;
        Ok(self.view(tokens, DType::Int32, vec![permuted.capacity().into()]))
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
    /// if the layout is padded, then for each expert the number of its first row, if it is packed or fixed. A flat
    /// layout has the first only. In a fixed layout of `n` experts, pairs follow from word `2 + 2 * n` on: for each
    /// expert and source the number of its rows, and the number of its first row in the zone. The stream is done; on a
    /// virtual GPU the call waits for it.
    fn fetch_counts(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        check_process()?;
        let permuted = self.get()?;
        self.users.wait(py)?;
        py.detach(|| permuted.fetch_counts()).or_raise(py)
    }
}
