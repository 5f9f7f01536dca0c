// SPDX-License-Identifier: MIT OR Apache-2.0
//! Operations on memory of LSA peers.

use super::{Script, Step, done, team, window};
use crate::op::{Op, Reduction};
use gin_device::prelude::*;

/// The message of `Code::Send`. Its words are no multiple of the threads of a group.
pub type Message = [u64; 25];

#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[cfg_attr(not(target_arch = "nvptx64"), inline(never))]
pub(super) fn mail<C: Coop>(comm: &Comm, script: &Script, coop: &C, op: &Op, sends: bool) -> Step {
    let peer = team(comm, op).member(op.peer)?;
    // Safety: the table's handles are those of registered windows.
    let mail = unsafe { Window::<u64>::from_handle(*window(script, op.window).handle()) };
    let count = if op.bytes == 0 { 1 } else { op.bytes as usize };
    let message = window(script, op.source_window).range_as::<Message>(op.source_offset, count)?;
    let deadline = Deadline::after_ns(op.deadline);
    // Each operation goes on where the one before it ended.
    if sends {
        Outbox::new(comm, mail, peer)?.send(coop, message, deadline)?;
    } else {
        Inbox::new(comm, mail, peer)?.receive(coop, message, deadline)?;
    }
    done()
}

/// Reduces into memory of an LSA peer. One thread of the group executes it.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[cfg_attr(not(target_arch = "nvptx64"), inline(never))]
pub(super) fn reduce<C: Coop>(comm: &Comm, script: &Script, coop: &C, op: &Op) -> Step {
    let there = window(script, op.window);
    let peer = team(comm, op).member(op.peer)?;
    let (index, value) = ((op.offset / op.bytes.max(1)) as usize, op.value);
    let Some(reduction) = Reduction::from_code(op.amount as u32) else { return done() };
    // Safety: the table's handles are those of registered windows, and the script keeps to aligned addresses.
    let handle = *there.handle();
    let (words, halves, floats) = unsafe {
        (
            Window::<u64>::from_handle(handle).peer(peer)?,
            Window::<u32>::from_handle(handle).peer(peer)?,
            Window::<f32>::from_handle(handle).peer(peer)?,
        )
    };
    coop.sync();
    if coop.elect() {
        match (reduction, op.bytes) {
            (Reduction::Add, 8) => words.red_add_relaxed_sys(index, value),
            (Reduction::And, 8) => words.red_and_relaxed_sys(index, value),
            (Reduction::Or, 8) => words.red_or_relaxed_sys(index, value),
            (Reduction::Min, 8) => words.red_min_relaxed_sys(index, value),
            (Reduction::Max, 8) => words.red_max_relaxed_sys(index, value),
            (Reduction::AddFloat, _) => floats.red_add_relaxed_sys(index, f32::from_bits(value as u32)),
            (Reduction::Add, _) => halves.red_add_relaxed_sys(index, value as u32),
            (Reduction::And, _) => halves.red_and_relaxed_sys(index, value as u32),
            (Reduction::Or, _) => halves.red_or_relaxed_sys(index, value as u32),
            (Reduction::Min, _) => halves.red_min_relaxed_sys(index, value as u32),
            (Reduction::Max, _) => halves.red_max_relaxed_sys(index, value as u32),
        }
    }
    coop.sync();
    done()
}

/// Carries out a fetching atomic on memory of an LSA peer. One thread of the group executes it.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[cfg_attr(not(target_arch = "nvptx64"), inline(never))]
pub(super) fn fetch<C: Coop>(comm: &Comm, script: &Script, coop: &C, op: &Op, swaps: bool) -> Step {
    let peer = team(comm, op).member(op.peer)?;
    // Safety: the table's handles are those of registered windows, and the script keeps to aligned addresses.
    let words = unsafe { Window::<u64>::from_handle(*window(script, op.window).handle()) }.peer(peer)?;
    let index = (op.offset / 8) as usize;
    coop.sync();
    let before = match (coop.elect(), swaps) {
        (false, _) => 0,
        (true, false) => words.fetch_add_relaxed_sys(index, op.value),
        (true, true) => words.compare_swap_relaxed_sys(index, op.amount, op.value),
    };
    coop.sync();
    Ok((before, 0))
}
