// SPDX-License-Identifier: MIT OR Apache-2.0
//! Slots, and a dispatch from its start to its end.

use super::config::{Element, words};
use super::fused::{Fused, Needs, Parameters};
use super::permuted::Permuted;
use super::state::{GroupCore, SlotCore};
use super::tokens::{Combine, Given, Plan, Sums, Tokens};
use crate::dtype::DType;
use crate::error::{OrRaise, StateError};
use crate::guard::{Guarded, check_process};
use crate::member::Member;
use crate::region::{Region, Users, View};
use crate::work::{Stream, Work, check_device};
use gin_ep::{DispatchId, EpError};
use gin_ep_kernels as kernels;
use gin_ep_kernels::{Sizes, SlotOffsets};
use gin_gpu::{Argument, KernelArg, MemorySlice};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::sync::Arc;

/// Returns a stream for kernels of a slot, which the caller launches next.
fn usable<'s>(stream: &'s Stream, core: &GroupCore, users: &Users) -> PyResult<&'s Arc<Work>> {
    let (work, own) = (stream.work()?, core.member.comm.gpu());
    core.member.check_usable("use the slot")?;
    check_device("the group", &**own, &*work.stream.device())?;
    users.add(&work.stream);
    Ok(work)
}

/// A slot: one dispatch at a time. `Group.slot` makes it.
#[pyclass(frozen, module = "gincomm.ep")]
#[derive(Debug)]
pub(crate) struct Slot(Guarded<SlotCore>);

impl Slot {
    pub(crate) fn new(core: Arc<SlotCore>) -> Self {
        Self(Guarded::new(core))
    }

    /// Begins a dispatch by a call.
    fn start(
        &self,
        py: Python<'_>,
        stream: &Stream,
        tokens: &Tokens,
        call: impl FnOnce(&mut gin_ep::Slot, &Arc<dyn gin_gpu::Stream>, &gin_ep::Tokens<'_>) -> Result<DispatchId, EpError>
        + Send,
    ) -> PyResult<DispatchId> {
        let slot = self.0.get()?;
        let mut inner = slot.enter()?;
        let (core, own) = slot.lent(&mut inner)?;
        let work = usable(stream, &core, &slot.users)?;
        let given = Given::take(py, tokens, &core)?;
        let _launching = core.member.launching()?;
        let id = py.detach(|| call(own, &work.stream, &given.tokens())).or_raise(py)?;
        inner.turn += 1;
        inner.max = given.max;
        Ok(id)
    }
}

#[pymethods]
impl Slot {
    /// Returns its number in the group.
    #[getter]
    fn number(&self) -> PyResult<u32> {
        Ok(self.0.get()?.number)
    }

    /// Sends the rows. They are read in the order of the stream; the call returns at once.
    fn dispatch(&self, py: Python<'_>, stream: &Bound<'_, Stream>, tokens: &Bound<'_, Tokens>) -> PyResult<Sent> {
        let id = self.start(py, stream.get(), tokens.get(), |slot, stream, tokens| {
            Ok(slot.dispatch(stream, tokens)?.detach())
        })?;
        Ok(Sent { slot: Guarded::new((*self.0).clone()), id })
    }

    /// Sends the rows and waits for the rows of all ranks, in one kernel.
    fn exchange(&self, py: Python<'_>, stream: &Bound<'_, Stream>, tokens: &Bound<'_, Tokens>) -> PyResult<Received> {
        let id = self.start(py, stream.get(), tokens.get(), |slot, stream, tokens| {
            Ok(slot.exchange(stream, tokens)?.detach())
        })?;
        Ok(Received { slot: Guarded::new((*self.0).clone()), id })
    }

    /// Sends the rows, waits for the rows of all ranks, and puts them into another layout as they arrive. All ranks
    /// call it. Returns what `exchange` and then `permute` return, with thousands of tokens earlier.
    fn exchange_into(
        &self,
        py: Python<'_>,
        stream: &Bound<'_, Stream>,
        tokens: &Bound<'_, Tokens>,
        to: &Bound<'_, Permuted>,
    ) -> PyResult<(Received, PermutedRows)> {
        let (users, to, mut permuted) = (to.get().users().clone(), to.get().get()?, None);
        users.add(&stream.get().work()?.stream);
        let id = self.start(py, stream.get(), tokens.get(), |slot, stream, tokens| {
            let (received, view) = slot.exchange_into(stream, tokens, to)?;
            permuted = Some(view);
            Ok(received.detach())
        })?;
        let view = permuted.ok_or_else(|| StateError::new_err("the call returned no rows"))?;
        let slot = || Guarded::new((*self.0).clone());
        let (to, users) = (Guarded::new(to.clone()), Guarded::new(users));
        let permuted = PermutedRows { slot: slot(), id, to, users, view };
        Ok((Received { slot: slot(), id }, permuted))
    }

    /// Counts the tokens for each rank once, for dispatches of the same ids. Not in a capture: it allocates memory.
    fn plan(&self, py: Python<'_>, stream: &Bound<'_, Stream>, tokens: &Bound<'_, Tokens>) -> PyResult<Plan> {
        let slot = self.0.get()?;
        let mut inner = slot.enter()?;
        let (core, own) = slot.lent(&mut inner)?;
        let work = usable(stream.get(), &core, &slot.users)?;
        if work.stream.is_capturing().or_raise(py)? {
            let text = "a plan allocates memory, which a capture does not allow: make it before";
            return Err(StateError::new_err(text));
        }
        let given = Given::take(py, tokens.get(), &core)?;
        let _launching = core.member.launching()?;
        let plan = py.detach(|| own.plan(&work.stream, &given.tokens()));
        Ok(Plan { plan: Guarded::new(Arc::new(plan.or_raise(py)?)), max: given.max })
    }

    /// Returns the parameters of a kernel of the program that contains a dispatch and its combine, for launches on the
    /// stream. The rows are as in `Received.combine`.
    #[pyo3(signature = (stream, tokens, combine, rows=None))]
    fn fuse(
        &self,
        py: Python<'_>,
        stream: &Bound<'_, Stream>,
        tokens: &Bound<'_, Tokens>,
        combine: &Bound<'_, Combine>,
        rows: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Fused> {
        let slot = self.0.get()?;
        let mut inner = slot.enter()?;
        let (core, own) = slot.lent(&mut inner)?;
        let work = usable(stream.get(), &core, &slot.users)?;
        let given = Given::take(py, tokens.get(), &core)?;
        let sums = Sums::take(py, combine.get(), rows, &core, given.max)?;
        let _launching = core.member.launching()?;
        let parameters =
            py.detach(|| own.fuse(&work.stream, &given.tokens(), sums.rows(), &sums.combine()).map(Parameters::of));
        let parameters = parameters.or_raise(py)?;
        inner.turn += 1;
        let needs =
            Needs { parameters, member: core.member.clone(), users: slot.users.clone(), _memory: (given, sums) };
        Ok(Fused { slot: Guarded::new(slot.clone()), turn: inner.turn, needs: Guarded::new(Arc::new(needs)) })
    }

    fn __repr__(&self) -> PyResult<String> {
        Ok(format!("<gincomm.ep.Slot {}>", self.0.get()?.number))
    }
}

/// A dispatch that was sent. Until it is received, the slot takes no other.
#[pyclass(frozen, module = "gincomm.ep")]
#[derive(Debug)]
pub(crate) struct Sent {
    slot: Guarded<SlotCore>,
    id: DispatchId,
}

#[pymethods]
impl Sent {
    /// Waits, in the order of the stream, for the rows of all ranks. The call returns at once.
    fn receive(&self, py: Python<'_>, stream: &Bound<'_, Stream>) -> PyResult<Received> {
        let slot = self.slot.get()?;
        let mut inner = slot.enter()?;
        let again = || StateError::new_err("the dispatch was received before");
        let (core, own) = slot.lent(&mut inner).map_err(|_| again())?;
        let sent = own.sent(self.id).map_err(|_| again())?;
        let work = usable(stream.get(), &core, &slot.users)?;
        let _launching = core.member.launching()?;
        py.detach(|| sent.receive(&work.stream).map(drop)).or_raise(py)?;
        Ok(Received { slot: Guarded::new(slot.clone()), id: self.id })
    }
}

/// A dispatch that was received. Dropping it releases the rows.
#[pyclass(frozen, module = "gincomm.ep")]
#[derive(Debug)]
pub(crate) struct Received {
    slot: Guarded<SlotCore>,
    id: DispatchId,
}

impl Drop for Received {
    fn drop(&mut self) {
        if check_process().is_ok() {
            // It may be over, or another thread calls the slot, and then it is over soon.
            let _ = self.slot.release(self.id);
        }
    }
}

/// Returns the shape of all places of received rows, and the numbers of elements between neighbours, if a row begins
/// `bytes` bytes after the one before: `[source][row]`, or `[row]` if all sources share a region.
fn by_row(sizes: &Sizes, bytes: u32, dtype: DType) -> (Vec<i64>, Vec<i64>) {
    let each = i64::from(bytes) / dtype.bytes() as i64;
    if sizes.is_shared() {
        return (vec![sizes.max_rows.into()], vec![each]);
    }
    (vec![sizes.ranks.into(), sizes.tokens.into()], vec![each * i64::from(sizes.tokens), each])
}

impl Received {
    /// Makes a tensor of received rows or their metadata.
    fn view(&self, make: impl FnOnce(&GroupCore, &MemorySlice, &SlotOffsets) -> PyResult<Region>) -> PyResult<View> {
        let slot = self.slot.get()?;
        let mut inner = slot.enter()?;
        let (core, received) = inner.received(self.id, "viewed")?;
        let (arena, offsets) = received.offsets();
        make(&core, arena, &offsets).map(|region| View::new(region, &slot.users))
    }

    /// Makes a tensor of the metadata, from a byte on: the places of [`by_row`], and `inner` elements in each.
    fn metadata(&self, first: u32, dtype: DType, inner: Option<u32>) -> PyResult<View> {
        self.view(|core, arena, offsets| {
            let (mut shape, mut strides) = by_row(&core.sizes, core.sizes.meta_bytes, dtype);
            if let Some(inner) = inner {
                shape.push(inner.into());
                strides.push(1);
            }
            let offset = offsets.meta(0) + u64::from(first);
            Ok(Region::new(arena.memory().clone(), arena, dtype, shape).at(offset, strides))
        })
    }

    /// Returns sizes, element, and the usual type of returned rows.
    fn sizes(&self) -> PyResult<(Sizes, Element, DType)> {
        let mut inner = self.slot.get()?.enter()?;
        let (core, _) = inner.received(self.id, "viewed")?;
        Ok((core.sizes, core.element, core.back[0]))
    }
}

#[pymethods]
impl Received {
    /// Returns the rows: `[source][row][element]`. Those below `counts` were received. With `max_rows` all sources
    /// share `[row][element]`, where the rows of a source begin at its number of `offsets`.
    #[pyo3(signature = (dtype=None))]
    fn rows(&self, dtype: Option<&Bound<'_, PyAny>>) -> PyResult<View> {
        let named = dtype.map(DType::named).transpose()?;
        self.view(|core, arena, offsets| {
            let (dtype, sizes) = (named.unwrap_or(core.element.received()), &core.sizes);
            let elements = words("a row", sizes.row_bytes, dtype)?;
            let (mut shape, mut strides) = by_row(sizes, sizes.pitch, dtype);
            shape.push(elements);
            strides.push(1);
            Ok(Region::new(arena.memory().clone(), arena, dtype, shape).at(offsets.rows(0), strides))
        })
    }

    /// Returns the memory of the rows, if all sources share it: `[row][element]`, for each row the longer one of a row
    /// there and a row back; `None` otherwise.
    #[pyo3(signature = (dtype=None))]
    fn region(&self, dtype: Option<&Bound<'_, PyAny>>) -> PyResult<Option<View>> {
        let (sizes, _, back) = self.sizes()?;
        if !sizes.is_shared() {
            return Ok(None);
        }
        let dtype = dtype.map(DType::named).transpose()?.unwrap_or(back);
        self.view(|_, arena, offsets| {
            let shape = vec![sizes.max_rows.into(), words("a row", sizes.pitch, dtype)?];
            let strides = vec![shape[1], 1];
            Ok(Region::new(arena.memory().clone(), arena, dtype, shape).at(offsets.rows(0), strides))
        })
        .map(Some)
    }

    /// Returns the number of the first row of each source, if all sources share a region.
    fn offsets(&self) -> PyResult<View> {
        self.view(|core, arena, offsets| {
            let words = offsets.offset(0).ok_or_else(|| {
                PyValueError::new_err("each source has rows of its own, from row 0 on, in a group without `max_rows`")
            })?;
            let region = Region::new(arena.memory().clone(), arena, DType::Int32, vec![core.sizes.ranks.into()]);
            // The upper halves of the words have the number of the dispatch.
            Ok(region.at(words, vec![2]))
        })
    }

    /// Returns the number of rows from each source.
    fn counts(&self) -> PyResult<View> {
        self.view(|core, arena, offsets| {
            let region = Region::new(arena.memory().clone(), arena, DType::Int64, vec![core.sizes.ranks.into()]);
            Ok(region.at(offsets.got(0), vec![1]))
        })
    }

    /// Returns the number of each row's token at its source: `[source][row]`.
    fn tokens(&self) -> PyResult<View> {
        self.metadata(0, DType::Int32, None)
    }

    /// Returns the number on this rank of each id's expert, or -1: `[source][row][id]`.
    fn experts(&self) -> PyResult<View> {
        let topk = self.sizes()?.0.topk;
        self.metadata(4, DType::Int32, Some(topk))
    }

    /// Returns the weight of each id: `[source][row][id]`. It has no meaning where the expert is -1.
    fn weights(&self) -> PyResult<View> {
        let topk = self.sizes()?.0.topk;
        self.metadata(4 + 4 * topk, DType::Float32, Some(topk))
    }

    /// Returns the scales of each row: `[source][row][element]`.
    #[pyo3(signature = (dtype=None))]
    fn scales(&self, dtype: Option<&Bound<'_, PyAny>>) -> PyResult<View> {
        let (sizes, element, _) = self.sizes()?;
        if sizes.scale_bytes == 0 {
            return Err(PyValueError::new_err("the rows of the group have no scales"));
        }
        let dtype = dtype.map(DType::named).transpose()?.unwrap_or(element.scales());
        let elements = words("the scales of a row", sizes.scale_bytes, dtype)? as u32;
        self.metadata(sizes.scales_at(), dtype, Some(elements))
    }

    /// Puts the rows into another layout, in the order of the stream. Returns the parameter of kernels.
    fn permute(&self, py: Python<'_>, stream: &Bound<'_, Stream>, to: &Bound<'_, Permuted>) -> PyResult<PermutedRows> {
        let mut inner = self.slot.get()?.enter()?;
        let (core, mut received) = inner.received(self.id, "permuted")?;
        let (work, users, to) =
            (usable(stream.get(), &core, &self.slot.users)?, to.get().users().clone(), to.get().get()?);
        users.add(&work.stream);
        let _launching = core.member.launching()?;
        let view = py.detach(|| received.permute(&work.stream, to)).or_raise(py)?;
        let slot = Guarded::new((*self.slot).clone());
        Ok(PermutedRows { slot, id: self.id, to: Guarded::new(to.clone()), users: Guarded::new(users), view })
    }

    /// Stores the metadata of rows in tensors of the program, at their places in a layout into which the rows were put.
    #[pyo3(signature = (stream, of, *, experts=None, weights=None, scales=None, tokens=None))]
    fn store_metadata(
        &self,
        stream: &Bound<'_, Stream>,
        of: &Bound<'_, Permuted>,
        experts: Option<&Bound<'_, PyAny>>,
        weights: Option<&Bound<'_, PyAny>>,
        scales: Option<&Bound<'_, PyAny>>,
        tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (py, of) = (stream.py(), of.get());
        let mut inner = self.slot.get()?.enter()?;
        let (core, mut received) = inner.received(self.id, "viewed")?;
        let work = usable(stream.get(), &core, &self.slot.users)?;
        of.users().add(&work.stream);
        let words = [DType::Int32, DType::Uint32];
        let wide = [DType::Int32, DType::Int64];
        let (experts, id) = core.optional(experts, "the tensor of experts", &wide)?.unzip();
        let weights = core.optional(weights, "the tensor of weights", &[DType::Float32])?.unzip().0;
        let scales = core.optional(scales, "the tensor of scales", &[])?.unzip().0;
        let tokens = core.optional(tokens, "the tensor of tokens", &words)?.unzip().0;
        let into = gin_ep::MetadataMemory {
            experts: experts.as_ref(),
            weights: weights.as_ref(),
            scales: scales.as_ref(),
            tokens: tokens.as_ref(),
            is_wide: id == Some(DType::Int64),
            ..Default::default()
        };
        let (of, _launching) = (of.get()?, core.member.launching()?);
        py.detach(|| received.store_metadata(&work.stream, of, &into)).or_raise(py)
    }

    /// Returns rows for each received one, and stores the sums of the returned rows, one for each of this rank's
    /// tokens. The rows are the received ones, or in a tensor, in permuted rows, or in a pair of both.
    #[pyo3(signature = (stream, combine, rows=None))]
    fn combine(
        &self,
        py: Python<'_>,
        stream: &Bound<'_, Stream>,
        combine: &Bound<'_, Combine>,
        rows: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let mut inner = self.slot.get()?.enter()?;
        let max = inner.max;
        let (core, received) = inner.received(self.id, "combined")?;
        let work = usable(stream.get(), &core, &self.slot.users)?;
        let sums = Sums::take(py, combine.get(), rows, &core, max)?;
        let _launching = core.member.launching()?;
        py.detach(|| received.combine(&work.stream, sums.rows(), &sums.combine())).or_raise(py)
    }

    /// Gives the rows up without a combine.
    fn release(&self) -> PyResult<()> {
        self.slot.get()?.release(self.id)
    }
}

/// Received rows in another layout, a parameter of kernels. `Received.permute` makes it.
#[pyclass(frozen, module = "gincomm.ep")]
#[derive(Debug)]
pub(crate) struct PermutedRows {
    slot: Guarded<SlotCore>,
    id: DispatchId,
    to: Guarded<gin_ep::Permuted>,
    users: Guarded<Users>,
    view: gin_ep::View<kernels::PermutedRows>,
}

/// Received rows as an argument of a launch.
pub(crate) struct Rows {
    pub(crate) argument: Argument,
    pub(crate) memory: Vec<MemorySlice>,
    pub(crate) member: Arc<Member>,
    pub(crate) users: Vec<Arc<Users>>,
}

impl Rows {
    /// Returns the argument for a value, if that is one of the types of received rows.
    pub(crate) fn of(value: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        let (slot, id, permuted) = if let Ok(received) = value.cast::<Received>() {
            (&received.get().slot, received.get().id, None)
        } else if let Ok(permuted) = value.cast::<PermutedRows>() {
            (&permuted.get().slot, permuted.get().id, Some(permuted.get()))
        } else {
            return Ok(None);
        };
        let mut inner = slot.get()?.enter()?;
        let (core, received) = inner.received(id, "passed to a kernel")?;
        core.member.check_usable("launch a kernel")?;
        let (mut memory, mut users) = (vec![received.offsets().0.clone()], vec![slot.users.clone()]);
        let argument = match permuted {
            None => received.view().argument(),
            Some(permuted) => {
                let to = permuted.to.get()?;
                users.push((*permuted.users).clone());
                memory.extend(to.rows().into_iter().chain([to.source_info(), to.counts()]).cloned());
                permuted.view.argument()
            }
        };
        Ok(Some(Self { argument, memory, member: core.member.clone(), users }))
    }
}
