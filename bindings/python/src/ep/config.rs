// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sizes, elements and layouts.

use crate::deadline::Deadline;
use crate::dtype::DType;
use crate::error::OrRaise;
use gin_ep::Scales;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// The elements of rows.
#[pyclass(frozen, eq, from_py_object, module = "gincomm.ep")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Element(pub(crate) gin_ep::Element);

#[pymethods]
impl Element {
    /// BF16, there and back.
    #[classattr]
    const BF16: Self = Self(gin_ep::Element::Bf16);

    /// IEEE's binary16, there and back.
    #[classattr]
    const F16: Self = Self(gin_ep::Element::F16);

    /// FP32, there and back.
    #[classattr]
    const F32: Self = Self(gin_ep::Element::F32);

    /// BF16, which the dispatch makes FP8 with FP32 scales of 128 elements. The returned rows are BF16.
    #[classattr]
    const E4M3_F32: Self = Self(gin_ep::Element::E4m3(Scales::F32));

    /// The same with FP32 scales that are powers of two.
    #[classattr]
    const E4M3_F32_POWERS: Self = Self(gin_ep::Element::E4m3(Scales::F32Powers));

    /// The same powers of two, one byte each.
    #[classattr]
    const E4M3_UE8M0: Self = Self(gin_ep::Element::E4m3(Scales::Ue8m0));

    /// Returns elements of any bytes, which are copied, with scales of any bytes. The returned rows are BF16.
    #[staticmethod]
    #[pyo3(signature = (row_bytes, scale_bytes=0))]
    fn opaque(row_bytes: u32, scale_bytes: u32) -> Self {
        Self(gin_ep::Element::Opaque { row_bytes, scale_bytes })
    }

    fn __repr__(&self) -> String {
        format!("<gincomm.ep.Element: {:?}>", self.0)
    }
}

impl Element {
    /// Returns the types that rows of a dispatch may have, the usual one first; empty if any. Words of 16 bits stand
    /// for elements that NumPy does not know.
    pub(crate) fn sent(self) -> &'static [DType] {
        match self.0 {
            gin_ep::Element::Bf16 | gin_ep::Element::E4m3(_) => &[DType::Bfloat16, DType::Uint16],
            gin_ep::Element::F16 => &[DType::Float16, DType::Uint16],
            gin_ep::Element::F32 => &[DType::Float32],
            gin_ep::Element::Opaque { .. } => &[],
        }
    }

    /// Returns the usual type of received rows.
    pub(crate) fn received(self) -> DType {
        match self.0 {
            gin_ep::Element::Bf16 => DType::Bfloat16,
            gin_ep::Element::F16 => DType::Float16,
            gin_ep::Element::F32 => DType::Float32,
            gin_ep::Element::E4m3(_) => DType::Float8E4m3,
            gin_ep::Element::Opaque { .. } => DType::Uint8,
        }
    }

    /// Returns the usual type of received scales.
    pub(crate) fn scales(self) -> DType {
        match self.0 {
            gin_ep::Element::E4m3(Scales::F32 | Scales::F32Powers) => DType::Float32,
            _ => DType::Uint8,
        }
    }

    /// Returns the types of sums, and of returned rows unless `combine_f32` makes them FP32.
    pub(crate) fn back(self) -> &'static [DType] {
        match self.0 {
            gin_ep::Element::F16 => &[DType::Float16, DType::Uint16],
            gin_ep::Element::F32 => &[DType::Float32],
            _ => &[DType::Bfloat16, DType::Uint16],
        }
    }

    /// Returns the bytes of a row of a dispatch: the same as of a received row, or of BF16 if the dispatch makes FP8.
    pub(crate) fn sent_bytes(self, row_bytes: u32) -> u64 {
        u64::from(row_bytes) * if matches!(self.0, gin_ep::Element::E4m3(_)) { 2 } else { 1 }
    }
}

/// A layout of received rows.
#[pyclass(frozen, eq, from_py_object, module = "gincomm.ep")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Layout(pub(crate) gin_ep::Layout);

#[pymethods]
impl Layout {
    /// One row for each received one, rank-major: by source and token, without gaps.
    #[classattr]
    const FLAT: Self = Self(gin_ep::Layout::Flat);

    /// `[expert][source][token]`: one row for each id, in zones with room for all tokens.
    #[classattr]
    const EXPERT_MAJOR_PADDED: Self = Self(gin_ep::Layout::ExpertMajorPadded);

    /// The places of packed rows without gaps, and for each of them the received row: nothing is copied.
    #[classattr]
    const EXPERT_MAJOR_INDICES: Self = Self(gin_ep::Layout::ExpertMajorIndices);

    /// `[expert][row]`: one row for each id, without gaps, in zones with room for all rows that a rank may receive. It
    /// also has the rows' tokens, and scales as columns.
    #[classattr]
    const EXPERT_MAJOR_FIXED: Self = Self(gin_ep::Layout::ExpertMajorFixed);

    /// Zones of experts, one row for each id. The first row of a zone is a multiple of `align`; zeros fill the gaps.
    #[staticmethod]
    #[pyo3(signature = (align=1))]
    fn expert_major_packed(align: u32) -> Self {
        Self(gin_ep::Layout::ExpertMajorPacked { align })
    }

    fn __repr__(&self) -> String {
        format!("<gincomm.ep.Layout: {:?}>", self.0)
    }
}

/// Sizes of a group. All ranks pass the same.
///
/// - experts: number of experts of all ranks; each rank has `ceil(experts / ranks)` of them, in order.
/// - hidden: number of elements of a row.
/// - topk: number of ids of a token.
/// - tokens: the maximum number of tokens of a rank's dispatch.
/// - slots: number of slots, each with separate memory.
/// - element: the elements of rows; by default `Element.BF16`.
/// - combine_at_source: one row comes back for each id, not for each rank; the source multiplies and adds them.
/// - combine_f32: the returned row for each rank has FP32 elements in place of BF16.
/// - max_rows: all sources share a region of a receiver, which has room for this many rows. By default each source has
///   a region for `tokens` rows.
/// - sms: the maximum number of SMs that a kernel takes, which is its maximum number of blocks; by default all.
/// - grid: the number of blocks of a kernel, also if not all fit on the GPU at once; by default as many as have work
///   and fit. It changes times, not results.
/// - threads: the threads of a block: a multiple of 32, at most 512, or 256 if a rank is reached over a network. By
///   default the most, and 256 if `tokens` is at most 256 and `sms` is not set.
/// - deadline: how long a rank waits for another one before it goes on without it; by default `gincomm.Deadline(1)`.
#[pyclass(frozen, eq, from_py_object, module = "gincomm.ep")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct GroupConfig {
    pub(crate) inner: gin_ep::GroupConfig,
    pub(crate) element: Element,
    pub(crate) combine_f32: bool,
}

#[pymethods]
impl GroupConfig {
    #[new]
    #[pyo3(signature = (
        experts, hidden, topk, *, tokens=128, slots=1, element=None, combine_at_source=false, combine_f32=false, max_rows=None,
        sms=None, grid=None, threads=None, deadline=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "they have names in Python")]
    fn new(
        experts: u32,
        hidden: u32,
        topk: u32,
        tokens: u32,
        slots: u32,
        element: Option<Element>,
        combine_at_source: bool,
        combine_f32: bool,
        max_rows: Option<u32>,
        sms: Option<u32>,
        grid: Option<u32>,
        threads: Option<u32>,
        deadline: Option<Deadline>,
    ) -> Self {
        let element = element.unwrap_or(Element::BF16);
        let mut inner = gin_ep::GroupConfig::new(experts, hidden, topk).tokens(tokens).slots(slots).element(element.0);
        macro_rules! set {
            ($($name:ident),*) => { $( if let Some(value) = $name { inner = inner.$name(value); } )* };
        }
        let deadline = deadline.map(|deadline| deadline.0);
        set!(max_rows, sms, grid, threads, deadline);
        if combine_at_source {
            inner = inner.combine_at_source();
        }
        if combine_f32 {
            inner = inner.combine_f32();
        }
        Self { inner, element, combine_f32 }
    }

    /// Returns the bytes that a group takes on each of `ranks` ranks. Allocates nothing.
    fn footprint(&self, py: Python<'_>, ranks: u32) -> PyResult<u64> {
        self.inner.footprint(ranks).or_raise(py)
    }

    fn __repr__(&self) -> String {
        format!("<gincomm.ep.GroupConfig: {}>", self.inner)
    }
}

impl GroupConfig {
    /// Returns the types that returned rows may have.
    pub(crate) fn back(&self) -> &'static [DType] {
        if self.combine_f32 { &[DType::Float32] } else { self.element.back() }
    }
}

/// Returns the number of elements in bytes.
pub(crate) fn words(what: &str, bytes: u32, dtype: DType) -> PyResult<i64> {
    let size = dtype.bytes() as u32;
    if bytes.is_multiple_of(size) {
        return Ok((bytes / size).into());
    }
    let text = format!("{what}: {bytes} bytes are no multiple of the {size} bytes of {}", dtype.name());
    Err(PyValueError::new_err(text))
}
