// SPDX-License-Identifier: MIT OR Apache-2.0
//! The methods of groups.

use super::config::GroupConfig;
use super::slot::Slot;
use super::state::{Group, GroupCore, SlotCore, gone};
use crate::comm::Communicator;
use crate::error::{OrRaise, StateError};
use crate::guard::Guarded;
use gin_boot::lock;
use gin_ep_kernels::Code;
use gin_gpu::{Memory, MemoryKind};
use pyo3::prelude::*;
use std::sync::{Arc, Mutex};

/// An error of a group's kernels. Group and communicator go on.
#[pyclass(frozen, eq, get_all, module = "gincomm.ep")]
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Report {
    slot: u32,
    code: String,
    rank: Option<u32>,
    expert: Option<u64>,
    seen: u64,
    limit: u64,
    text: String,
}

#[pymethods]
impl Report {
    fn __str__(&self) -> &str {
        &self.text
    }

    fn __repr__(&self) -> String {
        format!("<gincomm.ep.Report: {}>", self.text)
    }
}

#[pymethods]
impl Group {
    /// Allocates the memory of a group. Collective: all ranks pass the same configuration. With `keeps_tensors=False`
    /// slots do not keep the tensors of their calls: the program keeps each until the kernels that use it have ended.
    #[new]
    #[pyo3(signature = (comm, config, *, keeps_tensors=true))]
    fn new(py: Python<'_>, comm: &Bound<'_, Communicator>, config: GroupConfig, keeps_tensors: bool) -> PyResult<Self> {
        let member = comm.get().member()?;
        member.check_usable("make a group")?;
        let core = GroupCore::wait(member, py, || {
            let group = gin_ep::Group::new(&member.comm, &config.inner)?;
            let none = Memory::new(member.comm.gpu(), MemoryKind::Device, 16)?;
            Ok(GroupCore {
                element: config.element,
                back: config.back(),
                sizes: group.sizes(),
                group,
                member: member.clone(),
                slots: Mutex::default(),
                known: Mutex::default(),
                none,
                keeps_tensors,
            })
        })?;
        Ok(Self(Mutex::new(Some(Guarded::new(Arc::new(core))))))
    }

    /// Lends a slot. Its dispatches and combines follow each other; other slots are independent.
    fn slot(&self, py: Python<'_>, slot: u32) -> PyResult<Slot> {
        let core = self.core()?;
        let made = py.detach(|| SlotCore::new(&core, slot)).or_raise(py)?;
        let mut slots = lock(&core.slots);
        slots.retain(|slot| slot.strong_count() > 0);
        slots.push(Arc::downgrade(&made));
        Ok(Slot::new(made))
    }

    /// Returns whether `Slot.exchange_into` puts rows into an expert-major layout in the kernel of the dispatch. For
    /// other ranks such a call is the same as `Slot.exchange`.
    #[getter]
    fn expands(&self) -> PyResult<bool> {
        Ok(self.core()?.group.expands())
    }

    /// Returns the number of blocks of a launch.
    #[getter]
    fn blocks(&self) -> PyResult<u64> {
        Ok(self.core()?.group.blocks())
    }

    /// Returns the first error of the kernels since the last call; None if there is none. The slots' streams are done.
    fn status(&self, py: Python<'_>) -> PyResult<Option<Report>> {
        let core = self.core()?;
        let report = py.detach(|| core.group.status()).or_raise(py)?;
        Ok(report.map(|report| Report {
            slot: report.slot,
            code: format!("{:?}", report.code),
            rank: matches!(report.code, Code::Silent | Code::Unsent | Code::Full).then_some(report.rank),
            expert: (report.code == Code::UnknownExpert).then_some(report.expert),
            seen: report.seen,
            limit: report.limit,
            text: report.to_string(),
        }))
    }

    /// Returns the ranks that a slot goes on without.
    fn masked(&self, py: Python<'_>, slot: u32) -> PyResult<Vec<u32>> {
        let core = self.core()?;
        let bits = py.detach(|| core.group.masked(slot)).or_raise(py)?;
        Ok((0..64).filter(|rank| bits >> rank & 1 == 1).collect())
    }

    /// Lets all ranks take part again, in all slots. Collective. No kernel of the group runs on any rank. Releases
    /// received rows.
    fn readmit(&self, py: Python<'_>) -> PyResult<()> {
        let core = self.core()?;
        let slots = py.detach(|| core.take_slots("readmit ranks"))?;
        let outcome = GroupCore::wait(&core.member, py, || core.group.readmit());
        py.detach(|| slots.iter().try_for_each(|slot| slot.lend_again(&core)))?;
        outcome
    }

    /// Frees the memory. Collective. Releases received rows, and ends the slots.
    fn destroy(&self, py: Python<'_>) -> PyResult<()> {
        let core = self.core()?;
        let member = core.member.clone();
        let _ending = member.ending()?;
        py.detach(|| core.take_slots("destroy the group").map(drop))?;
        let Some(last) = lock(&self.0).take() else { return Err(gone()) };
        drop(core);
        let core = match last.into_last() {
            Ok(core) => core,
            Err(last) => {
                *lock(&self.0) = Some(last);
                return Err(StateError::new_err("cannot destroy the group: another thread uses it"));
            }
        };
        GroupCore::wait(&member, py, || core.group.destroy())
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    /// Destroys the group, unless an exception goes on.
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        if kind.is_none() && lock(&self.0).is_some() {
            self.destroy(py)?;
        }
        Ok(false)
    }

    fn __repr__(&self) -> PyResult<String> {
        match lock(&self.0).as_ref() {
            None => Ok("<gincomm.ep.Group: destroyed>".to_owned()),
            Some(core) => Ok(format!("<gincomm.ep.Group: {} ranks, {} experts>", core.sizes.ranks, core.sizes.experts)),
        }
    }
}
