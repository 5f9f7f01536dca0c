// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels of a mixture of experts beside dispatch and combine, which are `gin-ep`'s: a gate, and experts.
//!
//! The gate chooses for each token the experts with the greatest scores. After the dispatch each expert applies a
//! transform of its own to the rows that arrived, and the rank adds up what its experts made of a row, weighted.

use gin_device::prelude::*;
use gin_ep_kernels::{ReceivedRows, fma};

/// Returns the score of an expert for a token of a rank in the data set `set`: a multiple of 1/64, from 1/64 to 1.
///
/// There are few values, so several experts of a token have the same score.
#[inline(always)]
#[must_use]
pub const fn score(rank: u32, token: u32, expert: u32, set: u32) -> f32 {
    let word = (rank as u64) << 48 ^ (set as u64) << 40 ^ (token as u64) << 20 ^ expert as u64;
    // Fibonacci hashing, twice, so that all bits of the token count.
    let word = (word ^ word >> 23).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ word >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((word >> 58) + 1) as f32 / 64.0
}

/// Returns what expert `expert` of all makes of an element: it multiplies, and adds a number of its own.
#[inline(always)]
fn expert_of(expert: u32, element: f32) -> Bf16 {
    Bf16::from_f32(fma(element, 1.0 + (expert % 5) as f32 / 8.0, (expert % 29) as f32))
}

/// Chooses the `topk` experts with the greatest scores for each token, the lower number first where scores are equal.
/// Stores their ids in this order, and as weights the scores divided by their sum. If there are fewer experts, the
/// last ids are -1 and have the weight 0.
///
/// A warp chooses for a token: lanes look through the scores once for each id. Scores are not negative and not NaN.
///
/// # Safety
/// - `scores` has `tokens * experts` elements; `ids` and `weights` have `tokens * topk`, in memory of this device.
/// - Blocks have whole warps, and `topk` is at most 32.
#[kernel(launch_bounds(512))]
pub unsafe fn moe_gate(scores: *const f32, ids: *mut i32, weights: *mut f32, tokens: u32, experts: u32, topk: u32) {
    let warps = Block.size() / WARP_SIZE;
    let mut token = block_in_grid() * warps + Block.rank() / WARP_SIZE;
    while token < tokens {
        let row = token as usize * experts as usize;
        // The last choice. A score and, below it, the complement of the expert's number: the next choice is the
        // greatest of those below.
        let mut last = u64::MAX;
        let (mut id, mut mine, mut sum) = (-1, 0.0, 0.0f32);
        for k in 0..topk {
            let mut best = 0u64;
            let mut expert = lane();
            while expert < experts {
                // Safety: guaranteed by the kernel's caller.
                let score = unsafe { scores.add(row + expert as usize).read() };
                let key = (score.to_bits() as u64) << 32 | !expert as u64;
                if key < last && key > best {
                    best = key;
                }
                expert += WARP_SIZE;
            }
            let score = Warp.reduce_max((best >> 32) as u32);
            let complement = Warp.reduce_max(if (best >> 32) as u32 == score { best as u32 } else { 0 });
            last = (score as u64) << 32 | complement as u64;
            // 0 is the key of no expert: there are fewer than 2^32 - 1.
            if last != 0 {
                sum += f32::from_bits(score);
                if lane() == k {
                    (id, mine) = (!complement as i32, f32::from_bits(score));
                }
            }
        }
        if lane() < topk {
            let place = token as usize * topk as usize + lane() as usize;
            // Safety: guaranteed by the kernel's caller, here and below.
            unsafe { ids.add(place).write(id) };
            unsafe { weights.add(place).write(if sum > 0.0 { mine / sum } else { 0.0 }) };
        }
        token += grid_dim().count() * warps;
    }
}

/// Replaces each received row of BF16 by the sum of what its experts on this rank make of it, each times its weight,
/// in the order of the token's ids, by `fma` in FP32, rounded once. A block takes a row.
///
/// # Safety
/// - It runs between the receive and the combine of a slot whose rows have `hidden` elements. `local` is the number of
///   experts of a rank.
#[kernel(launch_bounds(512))]
pub unsafe fn moe_experts(received: ReceivedRows, rank: u32, local: u32, hidden: u32) {
    for source in 0..received.ranks() {
        let mut row = block_in_grid();
        while row < received.count(source) {
            let elements = received.row(source, row).cast::<u16>();
            for column in Block.stripe(hidden as usize) {
                // Safety: an element of the row, which this thread has for itself.
                let element = unsafe { elements.add(column) };
                // Safety: as above.
                let value = Bf16::from_bits(unsafe { element.read() }).to_f32();
                let mut sum = 0.0f32;
                for k in 0..received.topk() {
                    let expert = received.expert(source, row, k);
                    if expert >= 0 {
                        let made = expert_of(rank * local + expert as u32, value).to_f32();
                        sum = fma(received.weight(source, row, k), made, sum);
                    }
                }
                // Safety: as above.
                unsafe { element.write(Bf16::from_f32(sum).to_bits()) };
            }
            row += grid_dim().count();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_depend_on_all_their_numbers_and_repeat_within_a_token() {
        let all =
            |rank, token, set| -> [f32; 64] { core::array::from_fn(|expert| score(rank, token, expert as u32, set)) };
        let base = all(0, 0, 0);
        assert!(base.iter().all(|score| (1.0 / 64.0..=1.0).contains(score)));
        for (rank, token, set) in [(1, 0, 0), (0, 1, 0), (0, 65_535, 0), (0, 0, 1), (63, 0, 0)] {
            assert_ne!(all(rank, token, set), base);
        }
        let mut bits = base.map(f32::to_bits);
        bits.sort_unstable();
        assert!(bits.windows(2).any(|two| two[0] == two[1]));
        assert_ne!(bits[0], bits[63]);
    }
}
