// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sums of the rows that experts of this rank made of a received row.

use crate::combine::{Unit, load_local};
use crate::element::Element;
use crate::format::store_unit;
use crate::layout::FLAT;
use crate::params::load;
use crate::{PermutedRows, UNIT};
use gin_device::prelude::*;

/// Adds up, for each received row, the rows of an expert-major layout that belong to it, each times its weight: in the
/// order of the ids, by `fma` in FP32 from 0, rounded once. Rows without a place are no terms. The sums replace the
/// received rows. All threads of the grid call; blocks have whole warps.
///
/// # Safety
/// - In the order of the stream, after the kernels of the layout `to`, and before the combine. `rows` is the address of
///   rows of the element's local type in its places, a multiple of 16. A received row has room for
///   [`Sizes::combine_bytes`](crate::Sizes::combine_bytes), and nothing else uses it.
#[inline(always)]
pub unsafe fn reduce<E: Element>(to: &PermutedRows, rows: u64) {
    let (received, sizes, k) = (&to.received, to.received.slot().sizes, gin_device::coop::lane());
    if to.kind == FLAT {
        return;
    }
    let (pairs, bytes) = (sizes.combine_bytes / 16, u64::from(sizes.combine_bytes / 16 * E::LOCAL));
    let units = pairs.div_ceil(UNIT);
    let step = Block.size() / WARP_SIZE * grid_dim().count() as u32;
    let mut unit = Block.rank() / WARP_SIZE * grid_dim().count() as u32 + block_in_grid();
    let slot = received.slot();
    for source in 0..sizes.ranks {
        let source = received.source(source);
        let count = source.count;
        while unit < count * units {
            let (row, pair) = (unit / units, unit % units * UNIT + k);
            unit += step;
            // Each lane has the place and the weight of an id.
            let ids = source.meta(slot, row) + 4;
            let (mut place, mut weight) = (u32::MAX, 0.0);
            // Safety: the metadata of a received row, its places, and rows of the layout.
            unsafe {
                if k < sizes.topk && load(ids + 4 * u64::from(k)) as i32 >= 0 {
                    place = load(to.row_map_of(source.index + row) + 4 * u64::from(k));
                    weight = f32::from_bits(load(ids + 4 * u64::from(sizes.topk + k)));
                }
                let (mut terms, mut sum) = (Warp.ballot(place < to.capacity), Unit::<E>::new());
                while terms != 0 {
                    let term = terms.trailing_zeros();
                    terms &= terms - 1;
                    let from = rows + u64::from(Warp.shuffle(place, term)) * bytes;
                    sum.add_local(Warp.shuffle(weight, term), &load_local::<E>(from, pair, pairs));
                }
                store_unit(source.row(slot, row), pair, pairs, &sum.round());
            }
        }
        unit -= count * units;
    }
}
