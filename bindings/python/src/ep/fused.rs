// SPDX-License-Identifier: MIT OR Apache-2.0
//! The parameters of a kernel of the program that contains a dispatch and its combine.

use super::state::SlotCore;
use super::tokens::{Given, Sums};
use crate::guard::Guarded;
use crate::member::Member;
use crate::region::Users;
use gin_ep_kernels as kernels;
use gin_gpu::{Argument, KernelArg, MemorySlice};
use pyo3::prelude::*;
use pyo3::types::PyIterator;
use std::sync::Arc;

/// The parameters, with their names, and what they need.
#[derive(Debug)]
pub(crate) struct Parameters {
    all: [(&'static str, Argument); 5],
    shared: u32,
    _arena: MemorySlice,
}

impl Parameters {
    pub(crate) fn of(fused: gin_ep::Fused<'_>) -> Self {
        let all = [
            ("comm", fused.comm.argument()),
            ("arena", fused.arena.argument()),
            ("slot", Argument::of::<kernels::SlotParams>(fused.slot)),
            ("tokens", Argument::of::<kernels::TokenParams>(fused.tokens)),
            ("sums", Argument::of::<kernels::Sums>(fused.sums)),
        ];
        Self { all, shared: fused.shared, _arena: fused.arena.memory().clone() }
    }
}

/// The parameters of a kernel that contains a dispatch and its combine. `Slot.fuse` makes it. It iterates over them.
#[pyclass(frozen, module = "gincomm.ep")]
#[derive(Debug)]
pub(crate) struct Fused {
    pub(crate) slot: Guarded<SlotCore>,
    pub(crate) turn: u64,
    pub(crate) needs: Guarded<Needs>,
}

/// The parameters, and what a kernel with them needs.
#[derive(Debug)]
pub(crate) struct Needs {
    pub(crate) parameters: Parameters,
    pub(crate) member: Arc<Member>,
    pub(crate) users: Arc<Users>,
    /// The memory behind the parameters.
    pub(crate) _memory: (Given, Sums),
}

/// One of the parameters.
#[pyclass(frozen, module = "gincomm.ep")]
#[derive(Debug)]
pub(crate) struct Parameter {
    fused: Py<Fused>,
    place: usize,
}

impl Fused {
    fn parameter(this: &Bound<'_, Self>, place: usize) -> Parameter {
        Parameter { fused: this.clone().unbind(), place }
    }
}

#[pymethods]
impl Fused {
    /// Returns the parameter `Comm`.
    #[getter]
    fn comm(this: &Bound<'_, Self>) -> Parameter {
        Self::parameter(this, 0)
    }

    /// Returns the memory of the group, the parameter `Window<u64>`.
    #[getter]
    fn arena(this: &Bound<'_, Self>) -> Parameter {
        Self::parameter(this, 1)
    }

    /// Returns the parameter `gin_ep_kernels::SlotParams`.
    #[getter]
    fn slot(this: &Bound<'_, Self>) -> Parameter {
        Self::parameter(this, 2)
    }

    /// Returns the parameter `gin_ep_kernels::TokenParams`.
    #[getter]
    fn tokens(this: &Bound<'_, Self>) -> Parameter {
        Self::parameter(this, 3)
    }

    /// Returns the parameter `gin_ep_kernels::Sums`.
    #[getter]
    fn sums(this: &Bound<'_, Self>) -> Parameter {
        Self::parameter(this, 4)
    }

    /// Returns the bytes of dynamic shared memory that the dispatch needs.
    #[getter]
    fn shared(&self) -> PyResult<u32> {
        Ok(self.needs.get()?.parameters.shared)
    }

    /// Returns the five parameters, in the order in which `dispatch` and `combine` take them.
    fn __iter__<'py>(this: &Bound<'py, Self>) -> PyResult<Bound<'py, PyIterator>> {
        let all = [0, 1, 2, 3, 4].map(|place| Self::parameter(this, place));
        all.into_pyobject(this.py())?.try_iter()
    }
}

#[pymethods]
impl Parameter {
    fn __repr__(&self) -> PyResult<String> {
        Ok(format!("<gincomm.ep.Parameter `{}`>", self.fused.get().needs.get()?.parameters.all[self.place].0))
    }
}

/// A parameter as an argument of a launch.
pub(crate) struct Part {
    pub(crate) name: &'static str,
    pub(crate) argument: Argument,
    /// The object that keeps its memory.
    pub(crate) owner: Py<PyAny>,
    pub(crate) member: Arc<Member>,
    pub(crate) users: Arc<Users>,
}

impl Part {
    /// Returns the argument for a value, if that is a parameter.
    pub(crate) fn of(value: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        let Ok(parameter) = value.cast::<Parameter>() else { return Ok(None) };
        let Parameter { fused, place } = parameter.get();
        let Fused { slot, turn, needs } = fused.get();
        slot.get()?.check_fused(*turn)?;
        let Needs { parameters, member, users, .. } = &**needs.get()?;
        member.check_usable("launch a kernel")?;
        let (name, argument) = parameters.all[*place].clone();
        let owner = fused.clone_ref(value.py()).into_any();
        Ok(Some(Self { name, argument, owner, member: member.clone(), users: users.clone() }))
    }
}
