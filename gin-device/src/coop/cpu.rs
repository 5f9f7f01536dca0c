// SPDX-License-Identifier: MIT OR Apache-2.0
//! Indices and collectives on a CPU, by the executor.

use super::value::{Fold, Source};
use super::{Dim, WARP_SIZE};
use crate::exec::{BarrierCall, Dim3, ExchangeCall, Position, Reduction, executor};
use core::panic::Location;

#[inline(always)]
fn position() -> Position {
    executor().map_or(Position::ALONE, |executor| (executor.position)())
}

#[inline(always)]
fn dim(from: Dim3) -> Dim {
    Dim { x: from.x, y: from.y, z: from.z }
}

/// Returns the index of the calling thread in its block.
#[inline(always)]
pub fn thread_index() -> Dim {
    dim(position().thread)
}

/// Returns the number of threads per block, in each dimension.
#[inline(always)]
pub fn block_dim() -> Dim {
    dim(position().block_dim)
}

/// Returns the index of the calling thread's block in the grid.
#[inline(always)]
pub fn block_index() -> Dim {
    dim(position().block)
}

/// Returns the number of blocks per grid, in each dimension.
#[inline(always)]
pub fn grid_dim() -> Dim {
    dim(position().grid_dim)
}

#[inline(always)]
pub(super) fn lane() -> u32 {
    super::thread_in_block() % WARP_SIZE
}

/// Returns the lanes of the warp below the calling thread's lane.
#[inline(always)]
pub(crate) fn lanes_below() -> u32 {
    (1 << lane()) - 1
}

/// Returns the bit of the calling thread's lane.
#[inline(always)]
pub(crate) fn own_lane() -> u32 {
    lanes_until() & !lanes_below()
}

/// Returns the lanes of the warp up to the calling thread's lane.
#[inline(always)]
pub(crate) fn lanes_until() -> u32 {
    lanes_below() << 1 | 1
}

/// Returns the values of the lanes of `mask`, by lane. Does not order memory among them, like a vote or shuffle of PTX.
#[track_caller]
fn exchange(mask: u32, value: u64) -> [u64; 32] {
    exchange_by(mask, value, false)
}

/// Does the same. If it `orders` memory, it is a `bar.warp.sync` followed by the exchange.
#[track_caller]
fn exchange_by(mask: u32, value: u64, orders: bool) -> [u64; 32] {
    let mut values = [0; 32];
    match executor() {
        Some(executor) => {
            (executor.exchange)(ExchangeCall { mask, value, orders, site: Location::caller() }, &mut values);
        }
        None => values[0] = value,
    }
    values
}

#[track_caller]
fn barrier(id: u32, threads: u32, reduction: Reduction, predicate: bool) -> u32 {
    let (waits, site) = (true, Location::caller());
    match executor() {
        Some(executor) => (executor.barrier)(BarrierCall { id, threads, reduction, predicate, waits, site }),
        None => predicate as u32,
    }
}

#[track_caller]
pub(super) fn arrive_named(id: u32, threads: u32) {
    let (reduction, site) = (Reduction::None, Location::caller());
    if let Some(executor) = executor() {
        (executor.barrier)(BarrierCall { id, threads, reduction, predicate: false, waits: false, site });
    }
}

/// Lets reports name the caller's place.
#[track_caller]
pub(super) fn note_place() {
    // Outside a closure, which would have another caller.
    let site = Location::caller();
    if let Some(executor) = executor() {
        (executor.note_place)(site);
    }
}

#[track_caller]
pub(super) fn sync_lanes(mask: u32) {
    exchange_by(mask, 0, true);
}

#[track_caller]
pub(super) fn vote_any(mask: u32, bit: bool) -> bool {
    lanes_where(mask, &exchange_by(mask, bit as u64, true), |bit| bit != 0) != 0
}

/// Returns the lanes of `mask` of whose values `holds` is true.
fn lanes_where(mask: u32, values: &[u64; 32], holds: impl Fn(u64) -> bool) -> u32 {
    (0..WARP_SIZE).filter(|lane| mask >> lane & 1 != 0 && holds(values[*lane as usize])).map(|lane| 1 << lane).sum()
}

#[track_caller]
pub(super) fn shuffle(mask: u32, value: u64, from: u32) -> u64 {
    exchange_by(mask, value, true)[(from % WARP_SIZE) as usize]
}

#[track_caller]
pub(super) fn sync_block() {
    barrier(0, 0, Reduction::None, false);
}

#[track_caller]
pub(super) fn sync_block_or(bit: bool) -> bool {
    barrier(0, 0, Reduction::Or, bit) != 0
}

#[track_caller]
pub(super) fn sync_named(id: u32, threads: u32) {
    barrier(id, threads, Reduction::None, false);
}

#[track_caller]
pub(super) fn sync_named_or(id: u32, threads: u32, bit: bool) -> bool {
    barrier(id, threads, Reduction::Or, bit) != 0
}

/// Returns lanes that are here together, the caller's among them. Only GPUs need `SITE`.
#[track_caller]
pub(crate) fn active_mask<const SITE: u32>() -> u32 {
    // Outside the closure, which would have another caller.
    let site = Location::caller();
    executor().map_or(1, |executor| (executor.active_mask)(site))
}

/// Returns the lanes of `mask`, which are here together, that bring the caller's `value`.
#[track_caller]
pub(crate) fn alike(mask: u32, value: u64) -> u32 {
    lanes_where(mask, &exchange(mask, value), |other| other == value)
}

/// Returns the value of lane `from` of the lanes of `mask`, which are here together. Does not order memory.
#[track_caller]
pub(crate) fn leader_shuffle(mask: u32, value: u64, from: u32) -> u64 {
    exchange(mask, value)[(from % WARP_SIZE) as usize]
}

/// Does the same for 32 bits.
#[track_caller]
pub(crate) fn leader_shuffle_narrow(mask: u32, value: u32, from: u32) -> u32 {
    leader_shuffle(mask, value as u64, from) as u32
}

/// Returns whether any of the lanes of `mask`, which are here together, brings `true`. Does not order memory.
#[track_caller]
pub(crate) fn any_here(mask: u32, bit: bool) -> bool {
    ballot_here(mask, bit) != 0
}

/// Returns the lanes of `mask`, which are here together, that bring `true`.
#[track_caller]
pub(crate) fn ballot_here(mask: u32, bit: bool) -> u32 {
    lanes_where(mask, &exchange(mask, bit as u64), |bit| bit != 0)
}

/// Returns whether all of the lanes of `mask` bring `true`.
#[track_caller]
pub(super) fn all_here(mask: u32, bit: bool) -> bool {
    ballot_here(mask, bit) == mask
}

/// Returns the value of a lane in the caller's segment of `width` lanes, as `shfl.sync` does; the caller's own value if
/// that lane is not in `mask`.
#[track_caller]
pub(super) fn shuffle_from(mask: u32, bits: u64, _wide: bool, source: Source, by: u32, width: u32) -> u64 {
    let (own, by) = (lane(), by % WARP_SIZE);
    let first = own & !(width - 1);
    let last = first + width - 1;
    let from = match source {
        Source::Lane => first + by % width,
        Source::Up if own >= first + by => own - by,
        Source::Down if own + by <= last => own + by,
        Source::Xor if own ^ by <= last => own ^ by,
        _ => own,
    };
    let values = exchange(mask, bits);
    if mask >> from & 1 != 0 { values[from as usize] } else { bits }
}

/// Returns the lanes of `mask` that bring the caller's value.
#[track_caller]
pub(super) fn match_any(mask: u32, bits: u64, _wide: bool) -> u32 {
    alike(mask, bits)
}

/// Returns whether the lanes of `mask` bring the same value.
#[track_caller]
pub(super) fn match_all(mask: u32, bits: u64, _wide: bool) -> bool {
    alike(mask, bits) == mask
}

/// Returns the reduction of the values of the lanes of `mask`.
#[track_caller]
pub(super) fn reduce(mask: u32, fold: Fold, signed: bool, word: u32) -> u32 {
    let values = exchange(mask, word as u64);
    let lanes = (0..WARP_SIZE).filter(|lane| mask >> lane & 1 != 0).map(|lane| values[lane as usize] as u32);
    let all = lanes.reduce(|a, b| match (fold, signed) {
        (Fold::Add, _) => a.wrapping_add(b),
        (Fold::Min, false) => a.min(b),
        (Fold::Max, false) => a.max(b),
        (Fold::Min, true) => (a as i32).min(b as i32) as u32,
        (Fold::Max, true) => (a as i32).max(b as i32) as u32,
        (Fold::And, _) => a & b,
        (Fold::Or, _) => a | b,
        (Fold::Xor, _) => a ^ b,
    });
    all.unwrap_or(word)
}

/// Waits for the lanes of `mask`, which are here together. Orders memory among them.
#[track_caller]
pub(crate) fn sync_here(mask: u32) {
    sync_lanes(mask);
}
