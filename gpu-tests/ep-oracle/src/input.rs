// SPDX-License-Identifier: MIT OR Apache-2.0
//! Inputs from a keyed hash: the same key gives the same bytes everywhere.

use crate::{Batch, Shape, narrow};

/// How tokens choose experts.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Routing {
    /// Different experts, all alike.
    Uniform,
    /// Different experts, expert `e` with weight `1 / (e + 1)`.
    Zipf,
    /// As `Uniform`, and every fourth id or so is -1.
    Holes,
    /// All ids are -1.
    None,
    /// Every id is this expert, again and again.
    One(u32),
    /// Experts of the token's own rank, which may repeat.
    Local,
    /// Any experts, which may repeat.
    Repeats,
    /// As `Uniform`, but this rank's experts are never chosen.
    Without(u32),
    /// The first ten tokens as `Uniform`, all others to the same experts, the first ones.
    Skewed,
}

/// The tokens of [`Routing::Skewed`] that choose their experts.
const FREE: usize = 10;

/// Returns a word that depends on all bits of the key and the numbers.
fn hash(key: u64, numbers: [u64; 3]) -> u64 {
    // The finaliser of SplitMix64 (Steele, Lea, Flood 2014) after each number.
    numbers.into_iter().fold(key ^ 0x9e37_79b9_7f4a_7c15, |state, number| {
        let mut word = state.wrapping_add(number).wrapping_add(0x9e37_79b9_7f4a_7c15);
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    })
}

/// Returns one candidate for an id of a token.
fn candidate(routing: Routing, shape: &Shape, rank: usize, word: u64) -> i32 {
    let (experts, local) = (shape.experts as u64, shape.local());
    match routing {
        Routing::None => -1,
        Routing::One(expert) => expert as i32,
        Routing::Local => {
            let first = rank * local;
            let last = (first + local).min(shape.experts);
            if first >= last { -1 } else { (first as u64 + word % (last - first) as u64) as i32 }
        }
        Routing::Zipf => {
            let sum: f64 = (1..=shape.experts).map(|e| 1.0 / e as f64).sum();
            let mut left = (word >> 11) as f64 / (1u64 << 53) as f64 * sum;
            (0..shape.experts)
                .find(|&expert| {
                    left -= 1.0 / (expert + 1) as f64;
                    left < 0.0
                })
                .unwrap_or(shape.experts - 1) as i32
        }
        Routing::Uniform | Routing::Holes | Routing::Repeats | Routing::Without(_) | Routing::Skewed => {
            (word % experts) as i32
        }
    }
}

/// Returns whether an id may follow the ones that the token has.
fn allowed(routing: Routing, shape: &Shape, chosen: &[i32], id: i32) -> bool {
    match routing {
        Routing::Uniform | Routing::Zipf | Routing::Holes | Routing::Skewed => !chosen.contains(&id),
        Routing::Without(rank) => {
            !chosen.contains(&id) && shape.place(id).is_some_and(|(owner, _)| owner != rank as usize)
        }
        Routing::None | Routing::One(_) | Routing::Local | Routing::Repeats => true,
    }
}

/// Returns the tokens of a rank.
///
/// The elements are whole numbers of at most 8 bits, so BF16 has them exactly. The first three tell rank and token, if
/// a row has as many. Weights are odd multiples of 1/64. FP32 has such sums exactly, so their order does not show.
pub fn batch(shape: &Shape, routing: Routing, key: u64, rank: usize, tokens: usize) -> Batch {
    let (mut rows, mut experts, mut weights) = (Vec::new(), Vec::new(), Vec::new());
    for token in 0..tokens {
        for column in 0..shape.hidden {
            let value = match column {
                0 => rank as i64,
                1 => (token % 256) as i64,
                2 => (token / 256) as i64,
                _ => (hash(key, [rank as u64, token as u64, column as u64]) % 511) as i64 - 255,
            };
            rows.push(narrow(value as f32));
        }
        let first = experts.len();
        for k in 0..shape.topk {
            let word = |attempt: u64| hash(!key, [rank as u64, token as u64, (k as u64) << 32 | attempt]);
            let hole = routing == Routing::Holes && word(u64::from(u32::MAX)).is_multiple_of(4);
            let mut found = (0..256).map(|attempt| candidate(routing, shape, rank, word(attempt)));
            // There may be no other expert left.
            let id = if routing == Routing::Skewed && token >= FREE {
                k as i32
            } else {
                found.find(|&id| allowed(routing, shape, &experts[first..], id)).unwrap_or(-1)
            };
            experts.push(if hole { -1 } else { id });
            weights.push((2 * (word(1 << 20) % 64) + 1) as f32 / 64.0);
        }
    }
    Batch { rows, experts, weights }
}
