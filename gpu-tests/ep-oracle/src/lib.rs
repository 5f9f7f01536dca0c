// SPDX-License-Identifier: MIT OR Apache-2.0
//! The results of dispatch and combine, in plain Rust.
//!
//! It depends on nothing of gin, so that it can judge gin. All results are exact: a test compares bits.
//!
//! | item | is |
//! | --- | --- |
//! | [`Shape`] | ranks, experts and sizes |
//! | [`Batch`] | the tokens of one rank: rows, experts, weights |
//! | [`Routing`] | distributions of tokens over experts, from a keyed hash |
//! | [`rank_major`], [`limited`], [`flat`], [`expert_major`], [`fixed`] | what a rank receives |
//! | [`per_rank`], [`per_rank_of`], [`per_rank_f32`], [`combine_at_source`], [`combine_at_source_from`] | what a rank has after combine |
//! | [`identity`] | the same without experts, of elements of any [`Kind`] |
//! | [`quantized`] | a row as FP8 with scales |
//!
//! Rows are BF16, as bits, if nothing else is said.
#![warn(unreachable_pub)]

mod combine;
mod input;
mod layout;
mod matmul;
mod number;

pub use combine::{
    Experts, combine_at_source, combine_at_source_from, identity, per_rank, per_rank_f32, per_rank_of, reduced,
    reduced_f32,
};
pub use input::{Routing, batch};
pub use layout::{ExpertRow, RankRow, Zone, expert_major, fixed, flat, limited, rank_major};
pub use matmul::{Scaled, factor, product, scaled_factor, scaled_product, sum};
pub use number::{Kind, SCALED, narrow, quantized, widen};

/// The sizes that all ranks agree on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Number of ranks.
    pub ranks: usize,
    /// Number of experts of all ranks together.
    pub experts: usize,
    /// Number of experts of a token, some of which may be none.
    pub topk: usize,
    /// Number of elements of a row.
    pub hidden: usize,
}

impl Shape {
    /// Returns the number of experts of a rank. The last ranks have fewer if `experts` is not a multiple of `ranks`.
    pub fn local(&self) -> usize {
        self.experts.div_ceil(self.ranks)
    }

    /// Returns the rank of an expert and its number there; `None` for -1 and for an id that does not exist.
    pub fn place(&self, expert: i32) -> Option<(usize, usize)> {
        let expert = usize::try_from(expert).ok().filter(|&expert| expert < self.experts)?;
        Some((expert / self.local(), expert % self.local()))
    }
}

/// The tokens of one rank.
#[derive(Clone, PartialEq, Debug)]
pub struct Batch {
    /// The rows, one after the other.
    pub rows: Vec<u16>,
    /// `topk` experts of each token; -1 is none. An id of an expert that does not exist drops its token.
    pub experts: Vec<i32>,
    /// `topk` weights of each token.
    pub weights: Vec<f32>,
}

impl Batch {
    /// Returns the number of tokens.
    pub fn tokens(&self, shape: &Shape) -> usize {
        self.experts.len() / shape.topk
    }

    /// Returns the row of a token.
    pub fn row(&self, shape: &Shape, token: usize) -> &[u16] {
        &self.rows[token * shape.hidden..][..shape.hidden]
    }

    /// Returns rank, number and weight of the experts of a token, in the order of its ids, with their position. A
    /// dropped token has none.
    pub fn places(&self, shape: &Shape, token: usize) -> Vec<(usize, usize, usize, f32)> {
        let range = token * shape.topk..(token + 1) * shape.topk;
        let ids = &self.experts[range.clone()];
        if ids.iter().any(|&id| id >= 0 && shape.place(id).is_none()) {
            return Vec::new();
        }
        let all = ids.iter().zip(&self.weights[range]).enumerate();
        all.filter_map(|(k, (&id, &weight))| shape.place(id).map(|(rank, local)| (k, rank, local, weight))).collect()
    }
}
