// SPDX-License-Identifier: MIT OR Apache-2.0
//! The metadata of rows in a layout, in memory of the program.

use crate::layout::{EXPERT_MAJOR_PADDED, FLAT, NONE};
use crate::params::load;
use crate::{PermutedRows, ReceivedRows};
use gin_device::bytemuck::{Pod, Zeroable};
use gin_device::prelude::*;
use gin_device::sys::data::{store_weak_u32, store_weak_u64};

/// The memory into which [`metadata`] stores: a parameter of the kernel. An address of 0 stores nothing.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[bytemuck(crate = "gin_device::bytemuck")]
pub struct MetadataParams {
    /// The address of words: in a rank-major layout `topk` experts of each row, -1 for an expert of another rank.
    pub experts: u64,
    /// The address of words: in a rank-major layout `topk` weights of each row, 0 where the expert is -1; in an
    /// expert-major one the weight of each row.
    pub weights: u64,
    /// The address of the scales of each row.
    pub scales: u64,
    /// The address of a word for each row: the number of its token at the source.
    pub tokens: u64,
    /// The address of words: in a rank-major layout the number of rows from each source, in an expert-major one the
    /// number of rows of each expert of this rank.
    pub counts: u64,
    /// The address of words: in a packed or fixed layout the first row of each expert's zone.
    pub offsets: u64,
    /// The address of words: in a packed or fixed layout the number of rows of each expert's zone, with gaps.
    pub zones: u64,
    /// The address of a word: the number of rows with gaps.
    pub total: u64,
    /// The number that is added to an expert of this rank.
    pub first_expert: u32,
    /// 1 if `experts` are words of 64 bits, else 0.
    pub is_wide: u32,
}

#[inline(always)]
fn store(address: u64, index: u64, value: u32) {
    // Safety: the promise of the kernel's caller: a word of the memory.
    unsafe { store_weak_u32((address + 4 * index) as usize as *mut u32, value) };
}

/// Stores the metadata of rows at their places in a layout. Rows without a place have none. All threads of the grid
/// call, which has whole warps.
///
/// # Safety
/// - As [`permute::count`](crate::permute::count()), after the rows have their places. The memory has words for all
///   places of the layout, and scales are whole words.
#[inline(always)]
pub unsafe fn metadata(to: &PermutedRows, into: &MetadataParams) {
    let (received, slot, k) = (&to.received, to.received.slot(), gin_device::coop::lane());
    let (blocks, sizes) = (grid_dim().count() as u32, slot.sizes);
    store_counts(to, into);
    let is_flat = to.kind == FLAT;
    for number in 0..sizes.ranks {
        let source = received.source(number);
        let mut row = Block.rank() / WARP_SIZE * blocks + block_in_grid();
        while row < source.count {
            let (meta, places) = (source.meta(slot, row), to.row_map_of(source.index + row));
            // Safety of all loads: the metadata of a received row, and the places of it or of its ids here.
            let word = |index: u32| unsafe { load(meta + 4 * u64::from(index)) };
            let place_of = |k: u32| unsafe { load(places + 4 * u64::from(k)) };
            let expert = if k < sizes.topk { word(1 + k) as i32 } else { -1 };
            let weight = if expert >= 0 { word(1 + sizes.topk + k) } else { 0 };
            // The lanes of an expert-major layout have a place each, or none.
            let place = if is_flat && k < sizes.topk {
                place_of(0)
            } else if !is_flat && expert >= 0 {
                place_of(k)
            } else {
                NONE
            };
            if place < to.capacity {
                let at = if is_flat { u64::from(place) * u64::from(sizes.topk) + u64::from(k) } else { place.into() };
                if into.weights != 0 {
                    store(into.weights, at, weight);
                }
                if into.experts != 0 && is_flat {
                    let id = if expert >= 0 { expert + into.first_expert as i32 } else { -1 };
                    if into.is_wide != 0 {
                        // Safety: the caller's promise.
                        unsafe { store_weak_u64((into.experts + 8 * at) as usize as *mut u64, i64::from(id) as u64) };
                    } else {
                        store(into.experts, at, id as u32);
                    }
                }
                if into.tokens != 0 && (!is_flat || k == 0) {
                    store(into.tokens, place.into(), word(0));
                }
            }
            let has_place = place < to.capacity && (!is_flat || k == 0);
            if into.scales != 0 {
                // Safety: the caller's promise.
                unsafe { store_scales(received, into.scales, meta, has_place, place) };
            }
            row += Block.size() / WARP_SIZE * blocks;
        }
    }
}

/// Stores the scales of a row at the places of the lanes that have one. All lanes of a warp call.
///
/// # Safety
/// - `meta` is the address of a received row's metadata.
#[inline(always)]
unsafe fn store_scales(received: &ReceivedRows, scales: u64, meta: u64, has_place: bool, place: u32) {
    let sizes = &received.slot().sizes;
    let words = sizes.scale_bytes / 4;
    let mut lanes = Warp.ballot(has_place);
    while lanes != 0 {
        let place = Warp.shuffle(place, lanes.trailing_zeros());
        lanes &= lanes - 1;
        let mut index = gin_device::coop::lane();
        while index < words {
            // Safety: the caller's promise.
            let scale = unsafe { load(meta + u64::from(sizes.scales_at() + 4 * index)) };
            store(scales, u64::from(place) * u64::from(words) + u64::from(index), scale);
            index += WARP_SIZE;
        }
    }
}

/// Stores the numbers of rows: from each source or of each expert, of its zone, and of all.
#[inline(always)]
fn store_counts(to: &PermutedRows, into: &MetadataParams) {
    let (received, ranks) = (&to.received, to.received.ranks());
    let numbers = if to.kind == FLAT { ranks } else { to.experts };
    let mut number = Block.rank() * grid_dim().count() as u32 + block_in_grid();
    while number < numbers {
        let rows = match to.kind {
            FLAT => received.count(number),
            EXPERT_MAJOR_PADDED => (0..ranks).map(|source| to.count_from(number, source)).sum(),
            _ => to.count(number),
        };
        if into.counts != 0 {
            store(into.counts, number.into(), rows);
        }
        // The expert after the last one has the total as its first row.
        let (first, end) = (to.offset(number), to.offset(number + 1));
        if into.offsets != 0 {
            store(into.offsets, number.into(), first);
        }
        if into.zones != 0 {
            store(into.zones, number.into(), end - first);
        }
        if into.total != 0 && number == 0 {
            store(into.total, 0, to.total());
        }
        number += Block.size() * grid_dim().count() as u32;
    }
}
