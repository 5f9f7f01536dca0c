// SPDX-License-Identifier: MIT OR Apache-2.0
//! Groups and their slots, as their classes use them.

use super::config::Element;
use crate::comm::memory;
use crate::dtype::DType;
use crate::error::{OrRaise, StateError};
use crate::guard::{Guarded, check_process, interruptible};
use crate::member::Member;
use crate::region::Users;
use crate::tensor::Tensor;
use gin_boot::lock;
use gin_ep::{DispatchId, EpError};
use gin_ep_kernels::Sizes;
use gin_gpu::{Memory, MemorySlice};
use pyo3::prelude::*;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// A group, which its slots share.
#[derive(Debug)]
pub(crate) struct GroupCore {
    pub(crate) group: gin_ep::Group,
    /// Lets nobody end the communicator while the group launches.
    pub(crate) member: Arc<Member>,
    pub(crate) element: Element,
    /// The types that returned rows may have.
    pub(crate) back: &'static [DType],
    pub(crate) sizes: Sizes,
    pub(super) slots: Mutex<Vec<Weak<SlotCore>>>,
    /// The memory of tensors that a slot may still keep. The same tensor is the same memory, so slots keep it once.
    pub(super) known: Mutex<Vec<Weak<Memory>>>,
    /// Stands for tensors without elements.
    pub(super) none: Arc<Memory>,
    /// Slots keep the tensors of their calls.
    pub(super) keeps_tensors: bool,
}

impl GroupCore {
    /// Takes a tensor that kernels of the group can use, as [`Tensor::take`] does.
    pub(crate) fn tensor(&self, value: &Bound<'_, PyAny>, what: &str, dtypes: &[DType]) -> PyResult<Tensor> {
        let take = if self.keeps_tensors { Tensor::take } else { Tensor::borrow };
        take(value, &**self.member.comm.gpu(), what, dtypes)
    }

    /// Returns the memory and the type of a tensor, if there is one.
    pub(crate) fn optional(
        &self,
        value: Option<&Bound<'_, PyAny>>,
        what: &str,
        dtypes: &[DType],
    ) -> PyResult<Option<(MemorySlice, DType)>> {
        let Some(value) = value else { return Ok(None) };
        let tensor = self.tensor(value, what, dtypes)?;
        let dtype = tensor.dtype;
        Ok(Some((self.memory(value.py(), tensor)?, dtype)))
    }

    /// Makes memory of a tensor. The memory keeps it, unless the program keeps the tensors of its calls.
    pub(crate) fn memory(&self, py: Python<'_>, tensor: Tensor) -> PyResult<MemorySlice> {
        if tensor.bytes == 0 {
            return self.none.slice(0..0).or_raise(py);
        }
        let gpu = self.member.comm.gpu();
        if !self.keeps_tensors {
            return Ok(tensor.lent_to(gpu).or_raise(py)?.whole());
        }
        let mut known = lock(&self.known);
        let same = |memory: &Arc<Memory>| (memory.address(), memory.bytes()) == (tensor.address, tensor.bytes);
        if let Some(memory) = known.iter().filter_map(Weak::upgrade).find(same) {
            return Ok(memory.whole());
        }
        let made = memory(gpu, tensor).or_raise(py)?;
        known.retain(|memory| memory.strong_count() > 0);
        known.push(Arc::downgrade(&made));
        Ok(made.whole())
    }

    /// Waits for other ranks in a collective call, which a signal ends by an abort of the communicator and the job.
    pub(super) fn wait<T: Send>(
        member: &Member,
        py: Python<'_>,
        work: impl FnOnce() -> Result<T, EpError> + Send,
    ) -> PyResult<T> {
        let (handle, bootstrap) = (member.comm.abort_handle(), member.comm.bootstrap());
        let end = || {
            handle.abort();
            bootstrap.abort();
        };
        interruptible(py, end, work)?.or_raise(py)
    }

    /// Takes the slots from all their objects, if all dispatches were received.
    pub(super) fn take_slots(&self, call: &str) -> PyResult<Vec<Arc<SlotCore>>> {
        let slots: Vec<_> = lock(&self.slots).iter().filter_map(Weak::upgrade).collect();
        for slot in &slots {
            slot.check_received(call)?;
        }
        for slot in &slots {
            slot.take()?;
        }
        Ok(slots)
    }
}

pub(super) fn gone() -> PyErr {
    StateError::new_err("the group is destroyed")
}

/// The ranks of a communicator, with the memory for rows of tokens.
#[pyclass(frozen, module = "gincomm.ep")]
#[derive(Debug)]
pub(crate) struct Group(pub(super) Mutex<Option<Guarded<GroupCore>>>);

impl Group {
    pub(crate) fn core(&self) -> PyResult<Arc<GroupCore>> {
        check_process()?;
        let core = lock(&self.0).as_ref().map(|core| (**core).clone()).ok_or_else(gone)?;
        core.member.check_usable("use the group")?;
        Ok(core)
    }
}

/// A slot of `gin-ep` and its group.
#[derive(Debug)]
struct Lent {
    core: Arc<GroupCore>,
    slot: gin_ep::Slot,
}

#[derive(Debug)]
pub(super) struct Inner {
    /// `None` after the group has taken the slot.
    lent: Option<Lent>,
    /// The number of dispatches and of calls of `fuse` by this object, by which parameters know that they are the last.
    pub(super) turn: u64,
    /// The maximum number of tokens of the last dispatch.
    pub(super) max: u64,
}

/// A slot, which the objects of its dispatches share.
#[derive(Debug)]
pub(crate) struct SlotCore {
    pub(super) number: u32,
    inner: Mutex<Inner>,
    pub(super) users: Arc<Users>,
}

impl SlotCore {
    pub(crate) fn new(core: &Arc<GroupCore>, number: u32) -> Result<Arc<Self>, EpError> {
        let inner = Inner { lent: Some(Lent::new(core, number)?), turn: 0, max: 0 };
        Ok(Arc::new(Self { number, inner: Mutex::new(inner), users: Arc::default() }))
    }

    pub(super) fn enter(&self) -> PyResult<MutexGuard<'_, Inner>> {
        let busy = || StateError::new_err(format!("another thread calls slot {} at the same time", self.number));
        self.inner.try_lock().map_err(|_| busy())
    }

    /// Returns the group and the slot.
    pub(super) fn lent<'i>(&self, inner: &'i mut Inner) -> PyResult<(Arc<GroupCore>, &'i mut gin_ep::Slot)> {
        let ended = || StateError::new_err(format!("slot {} has ended with its group", self.number));
        inner.lent.as_mut().map(|Lent { core, slot }| (core.clone(), slot)).ok_or_else(ended)
    }

    /// Checks that every dispatch was received.
    pub(crate) fn check_received(&self, call: &str) -> PyResult<()> {
        let inner = self.enter()?;
        let idle = inner.lent.as_ref().map_or(Ok(()), |lent| lent.slot.check_idle());
        if matches!(idle, Err(EpError::NotReceived { .. })) {
            let text = format!("cannot {call}: the last dispatch of slot {} was not received", self.number);
            return Err(StateError::new_err(text));
        }
        Ok(())
    }

    /// Ends the slot: releases received rows, and waits for its kernels.
    pub(crate) fn take(&self) -> PyResult<()> {
        let taken = self.enter()?.lent.take();
        drop(taken);
        Ok(())
    }

    /// Lends the slot again after [`take`](Self::take).
    pub(crate) fn lend_again(&self, core: &Arc<GroupCore>) -> PyResult<()> {
        let lent = Lent::new(core, self.number);
        let lent = Python::attach(|py| lent.or_raise(py))?;
        self.enter()?.lent = Some(lent);
        Ok(())
    }

    /// Checks that the slot has begun nothing since the `fuse` of this number.
    pub(crate) fn check_fused(&self, turn: u64) -> PyResult<()> {
        let mut inner = self.enter()?;
        let last = inner.turn;
        let idle = self.lent(&mut inner)?.1.check_idle();
        Python::attach(|py| idle.or_raise(py))?;
        if last == turn {
            return Ok(());
        }
        let text = format!("slot {} was used since `fuse`, so its parameters are old: call `fuse` again", self.number);
        Err(StateError::new_err(text))
    }

    /// Ends a dispatch that was received, if it is the last one.
    pub(super) fn release(&self, id: DispatchId) -> PyResult<()> {
        self.enter()?.received(id, "released")?.1.release();
        Ok(())
    }
}

impl Lent {
    /// Borrows a slot.
    fn new(core: &Arc<GroupCore>, number: u32) -> Result<Self, EpError> {
        Ok(Self { core: core.clone(), slot: core.group.slot(number)? })
    }
}

impl Inner {
    /// Returns a dispatch that was received and is not over, and its group.
    pub(super) fn received(&mut self, id: DispatchId, call: &str) -> PyResult<(Arc<GroupCore>, gin_ep::Received<'_>)> {
        let over = || StateError::new_err(format!("the dispatch cannot be {call}: it was combined or released before"));
        let Lent { core, slot } = self.lent.as_mut().ok_or_else(over)?;
        match slot.received(id) {
            Ok(received) => Ok((core.clone(), received)),
            Err(EpError::Ended { .. }) => Err(over()),
            Err(error) => Python::attach(|py| Err(error).or_raise(py)),
        }
    }
}
