// SPDX-License-Identifier: MIT OR Apache-2.0
//! Groups, their configuration and status.

use super::enter;
use super::state::{Core, Known};
use super::types::{gin_ep_config_t, gin_ep_element_t, gin_ep_group_t, gin_ep_report_t};
use crate::comm::Comm;
use crate::status::{Failure, call, check_size, fill, input, output};
use crate::table;
use crate::types::gin_status_t::GIN_ERROR_HANDLE;
use crate::types::{GIN_FAULT_TEXT_BYTES, GIN_FOREVER, GIN_NONE, gin_comm_t, gin_status_t};
use gin_abi::Deadline;
use gin_ep::{Code, Element, GroupConfig, Report, Scales};
use gin_host::comm::CommState;
use std::sync::{Arc, Mutex};

/// One rank's part of a group.
pub(crate) struct Group {
    pub(crate) core: Arc<Core>,
    slots: u32,
    /// `None` after its end.
    inner: Mutex<Option<gin_ep::Group>>,
}

impl table::Handled for Group {
    const KIND: table::Kind = table::Kind::EpGroup;
}

impl Group {
    /// Makes a call on the group.
    pub(crate) fn with<T>(&self, work: impl FnOnce(&gin_ep::Group) -> Result<T, Failure>) -> Result<T, Failure> {
        work(enter(&self.inner, "group")?.as_ref().ok_or_else(ended)?)
    }

    /// Refuses a number that no slot has.
    pub(crate) fn check_slot(&self, slot: u32) -> Result<(), Failure> {
        if slot < self.slots {
            return Ok(());
        }
        let text = format!("slot is {slot}: the group has {}, from 0 on; configure more by `slots`", self.slots);
        Err(Failure::argument(text))
    }

    /// Refuses a call on all slots while a slot is open.
    fn check_closed(&self, group: &gin_ep::Group) -> Result<(), Failure> {
        // A slot that can be lent is not open.
        Ok((0..self.slots).try_for_each(|slot| group.slot(slot).map(drop))?)
    }
}

fn ended() -> Failure {
    Failure::new(GIN_ERROR_HANDLE, "the group is closed by another thread")
}

fn element(config: &gin_ep_config_t) -> Result<Element, Failure> {
    let is_opaque = config.element == gin_ep_element_t::GIN_EP_OPAQUE as u32;
    for (name, bytes) in [("row_bytes", config.row_bytes), ("scale_bytes", config.scale_bytes)] {
        if bytes != 0 && !is_opaque {
            let text = format!("config.{name} is {bytes}: leave it 0, or use GIN_EP_OPAQUE");
            return Err(Failure::argument(text));
        }
    }
    Ok(match config.element {
        0 => Element::Bf16,
        1 => Element::F16,
        2 => Element::F32,
        3 => Element::E4m3(Scales::F32),
        4 => Element::E4m3(Scales::F32Powers),
        5 => Element::E4m3(Scales::Ue8m0),
        6 => Element::Opaque { row_bytes: config.row_bytes, scale_bytes: config.scale_bytes },
        other => return Err(Failure::argument(format!("config.element is {other}: there are 0 to 6"))),
    })
}

fn config(given: &gin_ep_config_t) -> Result<GroupConfig, Failure> {
    check_size::<gin_ep_config_t>(given.size, "config", "GIN_EP_CONFIG_INIT")?;
    let mut config = GroupConfig::new(given.experts, given.hidden, given.topk).tokens(given.tokens).slots(given.slots);
    config = config.element(element(given)?);
    config = config.deadline(match given.deadline_ms {
        GIN_FOREVER => Deadline::NONE,
        ms => Deadline::after_ms(ms.into()),
    });
    if given.combine_at_source != 0 {
        config = config.combine_at_source();
    }
    if given.combine_f32 != 0 {
        config = config.combine_f32();
    }
    macro_rules! set {
        ($($name:ident),*) => { $( if given.$name != 0 { config = config.$name(given.$name); } )* };
    }
    set!(max_rows, sms, grid, threads);
    Ok(config)
}

/// Returns the bytes that a group takes on each of `ranks` ranks, if loads and stores reach the `lsa_size` ranks of its
/// LSA team; `lsa_size` is 0 if they reach all ranks. Allocates nothing.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_ep_footprint(
    config: *const gin_ep_config_t,
    ranks: u32,
    lsa_size: u32,
    bytes: *mut u64,
) -> gin_status_t {
    call("gin_ep_footprint", || {
        let (config, bytes) = (self::config(input(config, "config")?)?, output(bytes, "bytes")?);
        bytes.write(match lsa_size {
            0 => config.footprint(ranks)?,
            near => config.network_footprint(ranks, near)?,
        });
        Ok(())
    })
}

/// Allocates the memory of a group. Collective: all ranks pass the same configuration.
///
/// The caller owns the handle. It ends the group with `gin_ep_group_destroy`, or with `gin_ep_group_release`.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_ep_group_create(
    comm: gin_comm_t,
    config: *const gin_ep_config_t,
    group: *mut gin_ep_group_t,
) -> gin_status_t {
    call("gin_ep_group_create", || {
        let (comm, out) = (table::get::<Comm>(comm.id)?, output(group, "group")?);
        let given = input(config, "config")?;
        let inner = gin_ep::Group::new(&comm.inner, &self::config(given)?)?;
        let known = Known::new(comm.inner.gpu())?;
        let core = Core { comm, sizes: inner.sizes(), combine_at_source: given.combine_at_source != 0, known };
        let group = Group { core: Arc::new(core), slots: given.slots, inner: Mutex::new(Some(inner)) };
        out.write(gin_ep_group_t { id: table::insert(Arc::new(group))? });
        Ok(())
    })
}

/// Returns the first error of the kernels since the last call. `found` is 1 if there is one; else 0, and `report` is
/// not written. The streams of the slots are done. While an error is unread, calls that begin a dispatch of its slot
/// return `GIN_ERROR_STATE`. Does not wait.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_ep_group_status(
    group: gin_ep_group_t,
    found: *mut u32,
    report: *mut gin_ep_report_t,
) -> gin_status_t {
    call("gin_ep_group_status", || {
        let (group, found, out) = (table::get::<Group>(group.id)?, output(found, "found")?, output(report, "report")?);
        let report = group.with(|group| Ok(group.status()?))?;
        found.write(report.is_some().into());
        if let Some(report) = report {
            out.write(in_c(&report));
        }
        Ok(())
    })
}

fn in_c(report: &Report) -> gin_ep_report_t {
    let &Report { slot, code, rank, expert, seen, limit } = report;
    let names_rank = matches!(code, Code::Silent | Code::Unsent | Code::Full);
    let mut of_c = gin_ep_report_t {
        slot,
        code: code as u32,
        rank: if names_rank { rank } else { GIN_NONE },
        reserved: 0,
        expert: if matches!(code, Code::UnknownExpert | Code::TooManyRows) { expert } else { 0 },
        seen,
        limit,
        text: [0; GIN_FAULT_TEXT_BYTES],
    };
    fill(&mut of_c.text, &report.to_string());
    of_c
}

/// Returns the ranks that a slot continues without, as bits: bit `r` for rank `r`. The stream of the slot is done.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_ep_group_masked(group: gin_ep_group_t, slot: u32, ranks: *mut u64) -> gin_status_t {
    call("gin_ep_group_masked", || {
        let (group, ranks) = (table::get::<Group>(group.id)?, output(ranks, "ranks")?);
        group.check_slot(slot)?;
        ranks.write(group.with(|group| Ok(group.masked(slot)?))?);
        Ok(())
    })
}

/// Lets all ranks take part again, in all slots. Collective. No kernel of the group runs on any rank, and no slot is
/// open.
#[unsafe(no_mangle)]
pub extern "C" fn gin_ep_group_readmit(group: gin_ep_group_t) -> gin_status_t {
    call("gin_ep_group_readmit", || {
        let found = table::get::<Group>(group.id)?;
        let _launching = found.core.comm.launching()?;
        found.with(|group| Ok(group.readmit()?))
    })
}

/// Frees the memory, and closes the handle. Collective, unless the communicator has ended. Waits for this rank's
/// kernels of the group. Refuses while a slot is open; then the handle stays open.
///
/// After another error the handle is closed, and the communicator keeps the memory until its end. If nobody has read an
/// error of the kernels, the call returns it as `GIN_ERROR_STATE`, and the memory is freed.
#[unsafe(no_mangle)]
pub extern "C" fn gin_ep_group_destroy(group: gin_ep_group_t) -> gin_status_t {
    call("gin_ep_group_destroy", || {
        let found = table::get::<Group>(group.id)?;
        let mut inner = enter(&found.inner, "group")?;
        found.check_closed(inner.as_ref().ok_or_else(ended)?)?;
        let last = inner.take();
        table::remove::<Group>(group.id)?;
        match last {
            Some(last) if found.core.comm.inner.state() == CommState::Active => Ok(last.destroy()?),
            _ => Ok(()),
        }
    })
}

/// Closes the handle, and leaves the memory to the communicator. Not collective. Waits for this rank's kernels of the
/// group, unless a slot is open: its handle stays open, and the slot waits when it is closed.
#[unsafe(no_mangle)]
pub extern "C" fn gin_ep_group_release(group: gin_ep_group_t) -> gin_status_t {
    call("gin_ep_group_release", || {
        let found = table::get::<Group>(group.id)?;
        let last = enter(&found.inner, "group")?.take();
        table::remove::<Group>(group.id)?;
        drop(last);
        Ok(())
    })
}
