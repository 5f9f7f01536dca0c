// SPDX-License-Identifier: MIT OR Apache-2.0
//! The tensors of a dispatch and of a combine, checked.

use super::config::words;
use super::permuted::Permuted;
use super::state::GroupCore;
use crate::dtype::DType;
use crate::guard::Guarded;
use crate::tensor::Tensor;
use gin_ep::{Ids, Number, Rows, Terms};
use gin_gpu::MemorySlice;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::sync::Arc;

/// The extent of a dimension, and its meaning.
#[derive(Clone, Copy)]
enum Extent {
    Is(u64, &'static str),
    AtLeast(u64, &'static str),
}

impl std::fmt::Display for Extent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Is(wanted, meaning) => write!(f, "{wanted} ({meaning})"),
            Self::AtLeast(least, meaning) => write!(f, "at least {least} ({meaning})"),
        }
    }
}

/// Takes a tensor of one of these types, any if there are none, and checks its shape.
fn take(
    value: &Bound<'_, PyAny>,
    core: &GroupCore,
    what: &str,
    dtypes: &[DType],
    extents: impl Fn(DType) -> PyResult<Vec<Extent>>,
) -> PyResult<(MemorySlice, Vec<i64>, DType)> {
    let tensor = core.tensor(value, what, dtypes)?;
    let (dtype, shape) = (tensor.dtype, tensor.shape.clone());
    let extents = extents(dtype)?;
    if extents.len() != shape.len() {
        let (s, number) = (if extents.len() == 1 { "" } else { "s" }, extents.len());
        let wanted: Vec<String> = extents.iter().map(ToString::to_string).collect();
        let wanted = if wanted.is_empty() { String::new() } else { format!(": {}", wanted.join(", ")) };
        let text = format!("{what} has the shape {shape:?}, and must have {number} dimension{s}{wanted}");
        return Err(PyValueError::new_err(text));
    }
    for (dimension, (extent, &found)) in extents.iter().zip(&shape).enumerate() {
        let fits = match *extent {
            Extent::Is(wanted, _) => found as u64 == wanted,
            Extent::AtLeast(least, _) => found as u64 >= least,
        };
        if !fits {
            return Err(PyValueError::new_err(format!(
                "{what} has the shape {shape:?}: dimension {dimension} is {found}, and must be {extent}"
            )));
        }
    }
    Ok((core.memory(value.py(), tensor)?, shape, dtype))
}

/// The routing of tokens, counted once for several dispatches of the same ids. `Slot.plan` makes it.
#[pyclass(frozen, module = "gincomm.ep")]
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) plan: Guarded<gin_ep::Plan>,
    pub(crate) max: u64,
}

/// The tokens of a rank's dispatch.
#[pyclass(frozen, get_all, module = "gincomm.ep")]
#[derive(Debug)]
pub(crate) struct Tokens {
    rows: Py<PyAny>,
    ids: Py<PyAny>,
    count: Option<Py<PyAny>>,
    weights: Option<Py<PyAny>>,
    scales: Option<Py<PyAny>>,
    planned: Option<Py<Plan>>,
}

#[pymethods]
impl Tokens {
    #[new]
    #[pyo3(signature = (rows, ids, count=None, *, weights=None, scales=None, planned=None))]
    fn new(
        rows: Py<PyAny>,
        ids: Py<PyAny>,
        count: Option<Py<PyAny>>,
        weights: Option<Py<PyAny>>,
        scales: Option<Py<PyAny>>,
        planned: Option<Py<Plan>>,
    ) -> Self {
        Self { rows, ids, count, weights, scales, planned }
    }
}

#[derive(Debug)]
enum Count {
    Is(u32),
    At(MemorySlice),
}

/// The memory of tokens.
#[derive(Debug)]
pub(crate) struct Given {
    rows: MemorySlice,
    ids: MemorySlice,
    wide: bool,
    count: Count,
    weights: Option<MemorySlice>,
    scales: Option<MemorySlice>,
    plan: Option<Arc<gin_ep::Plan>>,
    /// The maximum number of tokens of the dispatch.
    pub(crate) max: u64,
}

impl Given {
    /// Takes the tensors of a dispatch.
    pub(crate) fn take(py: Python<'_>, tokens: &Tokens, core: &GroupCore) -> PyResult<Self> {
        let (sizes, element) = (&core.sizes, core.element);
        let room = u64::from(sizes.tokens);
        let count = match tokens.count.as_ref().map(|count| count.bind(py)) {
            None => {
                // A value without a shape is refused below.
                let shape = tokens.rows.bind(py).getattr("shape");
                let first = shape.and_then(|shape| shape.get_item(0)?.extract::<u64>());
                Count::Is(u32::try_from(first.unwrap_or(0)).unwrap_or(u32::MAX))
            }
            Some(count) if Tensor::is_offered_by(count) => {
                let scalar = |_| Ok(Vec::new());
                let one = |_| Ok(vec![Extent::Is(1, "one number")]);
                let what = "tokens.count";
                let words = [DType::Int32, DType::Uint32];
                let memory =
                    take(count, core, what, &words, scalar).or_else(|_| take(count, core, what, &words, one))?.0;
                Count::At(memory)
            }
            Some(count) => Count::Is(count.extract().map_err(|_| {
                let shown = count.repr().map_or_else(|_| "?".to_owned(), |text| text.to_string());
                let limit = "the number of tokens, 0 to 4294967295, or a tensor of one int32";
                PyValueError::new_err(format!("tokens.count is {shown}, and must be {limit}"))
            })?),
        };
        let plan = tokens.planned.as_ref().map(|plan| plan.get());
        let max = match (plan, &count) {
            (Some(plan), _) => plan.max,
            (None, Count::Is(count)) => (*count).into(),
            (None, Count::At(_)) => room,
        };
        let row_bytes = element.sent_bytes(sizes.row_bytes) as u32;
        let rows = |dtype| {
            Ok(vec![
                Extent::AtLeast(max, "the tokens"),
                Extent::Is(words("a row of the group", row_bytes, dtype)? as u64, "the elements of a row"),
            ])
        };
        let by_id = |_| {
            Ok(vec![Extent::AtLeast(max, "the tokens"), Extent::Is(sizes.topk.into(), "the group's ids of a token")])
        };
        let (rows, ..) = take(tokens.rows.bind(py), core, "tokens.rows", element.sent(), rows)?;
        let (ids, _, id) = take(tokens.ids.bind(py), core, "tokens.ids", &[DType::Int32, DType::Int64], by_id)?;
        let weights = tokens.weights.as_ref().map(|weights| {
            take(weights.bind(py), core, "tokens.weights", &[DType::Float32], by_id).map(|(memory, ..)| memory)
        });
        let scales = tokens.scales.as_ref().map(|scales| {
            let extents = |dtype| {
                let each = words("the scales of a row", sizes.scale_bytes, dtype)? as u64;
                Ok(vec![Extent::AtLeast(max, "the tokens"), Extent::Is(each, "the scales of a row")])
            };
            take(scales.bind(py), core, "tokens.scales", &[], extents).map(|(memory, ..)| memory)
        });
        let (weights, scales) = (weights.transpose()?, scales.transpose()?);
        let plan = plan.map(|plan| plan.plan.get().cloned()).transpose()?;
        Ok(Self { rows, ids, wide: id == DType::Int64, count, weights, scales, plan, max })
    }

    /// Returns the tokens.
    pub(crate) fn tokens(&self) -> gin_ep::Tokens<'_> {
        let count = match &self.count {
            Count::Is(count) => Number::Is(*count),
            Count::At(memory) => Number::At(memory),
        };
        gin_ep::Tokens::new(&self.rows, Ids::new(&self.ids, self.wide), count)
            .weights(&self.weights)
            .scales(&self.scales)
            .planned(self.plan.as_deref())
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Reduced,
    Weighted,
    Plain,
}

/// The sums of a combine, in FP32, rounded once.
#[pyclass(frozen, module = "gincomm.ep")]
#[derive(Debug)]
pub(crate) struct Combine {
    kind: Kind,
    output: Py<PyAny>,
    weights: Option<Py<PyAny>>,
    bias: Option<Py<PyAny>>,
    accumulate: bool,
}

#[pymethods]
impl Combine {
    /// Adds up the rows of a token's ranks. The receiving ranks have multiplied by weights.
    #[staticmethod]
    #[pyo3(signature = (output, *, bias=None, accumulate=false))]
    fn reduced(output: Py<PyAny>, bias: Option<Py<PyAny>>, accumulate: bool) -> Self {
        Self { kind: Kind::Reduced, output, weights: None, bias, accumulate }
    }

    /// Adds up the rows of a token's ids, each multiplied by its weight, in a group with `combine_at_source`.
    #[staticmethod]
    #[pyo3(signature = (weights, output, *, bias=None, accumulate=false))]
    fn weighted(weights: Py<PyAny>, output: Py<PyAny>, bias: Option<Py<PyAny>>, accumulate: bool) -> Self {
        Self { kind: Kind::Weighted, output, weights: Some(weights), bias, accumulate }
    }

    /// Adds up the rows of a token's ids, in a group with `combine_at_source`.
    #[staticmethod]
    #[pyo3(signature = (output, *, bias=None, accumulate=false))]
    fn plain(output: Py<PyAny>, bias: Option<Py<PyAny>>, accumulate: bool) -> Self {
        Self { kind: Kind::Plain, output, weights: None, bias, accumulate }
    }
}

/// The returned rows.
#[derive(Debug)]
enum Back {
    InPlace,
    At(MemorySlice),
    Permuted(Arc<gin_ep::Permuted>),
    PermutedAt(Arc<gin_ep::Permuted>, MemorySlice),
}

/// The memory of a combine.
#[derive(Debug)]
pub(crate) struct Sums {
    kind: Kind,
    output: MemorySlice,
    weights: Option<MemorySlice>,
    bias: Option<MemorySlice>,
    accumulate: bool,
    back: Back,
}

impl Sums {
    /// Takes the tensors of a combine after a dispatch of at most `max` tokens.
    pub(crate) fn take(
        py: Python<'_>,
        combine: &Combine,
        rows: Option<&Bound<'_, PyAny>>,
        core: &GroupCore,
        max: u64,
    ) -> PyResult<Self> {
        let sizes = &core.sizes;
        let elements = words("a returned row", sizes.combine_bytes, core.back[0])? as u64;
        let of = |dtypes, value: &Bound<'_, PyAny>, what: &str, number: u64, meaning: &'static str| {
            let extents = |_| Ok(vec![Extent::AtLeast(number, meaning), Extent::Is(elements, "the elements of a row")]);
            take(value, core, what, dtypes, extents).map(|(memory, ..)| memory)
        };
        let sums = |value: &Bound<'_, PyAny>, what: &str| of(core.element.back(), value, what, max, "the tokens");
        let back =
            |value: &Bound<'_, PyAny>, number, meaning| of(core.back, value, "the tensor of rows", number, meaning);
        let output = sums(combine.output.bind(py), "the output")?;
        let bias = combine.bias.as_ref().map(|bias| sums(bias.bind(py), "the bias")).transpose()?;
        let weights = combine.weights.as_ref().map(|weights| {
            let topk = Extent::Is(sizes.topk.into(), "the group's ids of a token");
            let extents = |_| Ok(vec![Extent::AtLeast(max, "the tokens"), topk]);
            take(weights.bind(py), core, "the tensor of weights", &[DType::Float32], extents).map(|(memory, ..)| memory)
        });
        let permuted = |value: &Bound<'_, PyAny>| -> PyResult<_> { value.cast::<Permuted>()?.get().get().cloned() };
        let back = match rows {
            None => Back::InPlace,
            Some(value) if value.is_instance_of::<Permuted>() => Back::Permuted(permuted(value)?),
            Some(value) if value.is_instance_of::<PyTuple>() => {
                let (to, tensor): (Bound<'_, PyAny>, Bound<'_, PyAny>) = value.extract()?;
                let to = permuted(&to)?;
                let rows = back(&tensor, to.capacity().into(), "the permuted rows")?;
                Back::PermutedAt(to, rows)
            }
            Some(value) => Back::At({
                let meaning = match (sizes.is_shared(), sizes.combine_rows) {
                    (true, _) => "the rows of `max_rows`",
                    (false, 1) => "a row for each rank and each of the group's tokens",
                    _ => "a row for each rank, each of the group's tokens and each id",
                };
                back(value, sizes.combine_room(), meaning)
            }?),
        };
        Ok(Self {
            kind: combine.kind,
            output,
            weights: weights.transpose()?,
            bias,
            accumulate: combine.accumulate,
            back,
        })
    }

    pub(crate) fn rows(&self) -> Rows<'_> {
        match &self.back {
            Back::InPlace => Rows::InPlace,
            Back::At(memory) => Rows::At(memory),
            Back::Permuted(to) => Rows::Permuted(to),
            Back::PermutedAt(to, memory) => Rows::PermutedAt(to, memory),
        }
    }

    pub(crate) fn combine(&self) -> gin_ep::Combine<'_> {
        let terms: Terms<'_> = match (self.kind, &self.weights) {
            (Kind::Weighted, Some(weights)) => gin_ep::Combine::weighted(weights),
            (Kind::Reduced, _) => gin_ep::Combine::reduced(),
            _ => gin_ep::Combine::plain(),
        };
        let combine = terms.into(&self.output).bias(&self.bias);
        if self.accumulate { combine.accumulate() } else { combine }
    }
}
