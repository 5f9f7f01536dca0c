// SPDX-License-Identifier: MIT OR Apache-2.0
//! The rows that a rank receives.

use crate::{Batch, Shape};

/// A row in a layout with one row for each token that has an expert on the rank.
#[derive(Clone, PartialEq, Debug)]
pub struct RankRow {
    /// The rank that sent it.
    pub source: usize,
    /// The token's number there.
    pub token: usize,
    /// For each of the token's ids the expert's number on the receiving rank, or -1 if it is elsewhere or none.
    pub experts: Vec<i32>,
    /// The weights of those ids; 0 where `experts` is -1.
    pub weights: Vec<f32>,
    /// The row's elements.
    pub row: Vec<u16>,
}

/// A row in a layout with one row for each id.
#[derive(Clone, PartialEq, Debug)]
pub struct ExpertRow {
    /// The rank that sent it.
    pub source: usize,
    /// The token's number there.
    pub token: usize,
    /// The position of the id among those of the token.
    pub k: usize,
    /// Its weight.
    pub weight: f32,
    /// The row's elements.
    pub row: Vec<u16>,
}

/// The rows of one expert in a packed layout.
#[derive(Clone, PartialEq, Debug)]
pub struct Zone {
    /// The number of the zone's first row.
    pub first: usize,
    /// Number of rows with the zeroed ones at the end.
    pub padded: usize,
    /// The rows, by source, token and position.
    pub rows: Vec<ExpertRow>,
}

/// Returns the rows that rank `receiver` has from each source, in the order of its tokens.
pub fn rank_major(shape: &Shape, batches: &[Batch], receiver: usize) -> Vec<Vec<RankRow>> {
    let from = |(source, batch): (usize, &Batch)| {
        let row = |token: usize| {
            let (mut experts, mut weights) = (vec![-1; shape.topk], vec![0.0; shape.topk]);
            for (k, rank, local, weight) in batch.places(shape, token) {
                if rank == receiver {
                    (experts[k], weights[k]) = (local as i32, weight);
                }
            }
            let row = batch.row(shape, token).to_vec();
            experts.iter().any(|&expert| expert >= 0).then_some(RankRow { source, token, experts, weights, row })
        };
        (0..batch.tokens(shape)).filter_map(row).collect()
    };
    batches.iter().enumerate().map(from).collect()
}

/// Returns the rows of [`rank_major`] that lie before place `max`, if all lie one after the other.
pub fn limited(shape: &Shape, batches: &[Batch], receiver: usize, max: usize) -> Vec<Vec<RankRow>> {
    let mut left = max;
    let mut rows = rank_major(shape, batches, receiver);
    for of_source in &mut rows {
        of_source.truncate(left);
        left -= of_source.len();
    }
    rows
}

/// Returns the rows of [`rank_major`], one after the other without gaps.
pub fn flat(shape: &Shape, batches: &[Batch], receiver: usize) -> Vec<RankRow> {
    rank_major(shape, batches, receiver).into_iter().flatten().collect()
}

/// Returns the zones of the experts of rank `receiver`. The number of rows of each is rounded up to a multiple of
/// `align`.
pub fn expert_major(shape: &Shape, batches: &[Batch], receiver: usize, align: usize) -> Vec<Zone> {
    let mut first = 0;
    let mut zones = Vec::new();
    for expert in 0..shape.local() {
        let mut rows = Vec::new();
        for (source, batch) in batches.iter().enumerate() {
            for token in 0..batch.tokens(shape) {
                for (k, rank, local, weight) in batch.places(shape, token) {
                    if (rank, local) == (receiver, expert) {
                        rows.push(ExpertRow { source, token, k, weight, row: batch.row(shape, token).to_vec() });
                    }
                }
            }
        }
        let padded = rows.len().next_multiple_of(align);
        zones.push(Zone { first, padded, rows });
        first += padded;
    }
    zones
}

/// Returns the zones of the experts of rank `receiver`, if each has room for `room` rows and nothing fills it up. Rows
/// past the room have no place.
pub fn fixed(shape: &Shape, batches: &[Batch], receiver: usize, room: usize) -> Vec<Zone> {
    let zones = expert_major(shape, batches, receiver, 1).into_iter().enumerate();
    zones.map(|(expert, zone)| Zone { first: expert * room, ..zone }).collect()
}

impl Zone {
    /// Returns for each source the number of its first row in the zone, and of its rows.
    pub fn ranges(&self, ranks: usize) -> Vec<(usize, usize)> {
        let count = |source: usize| self.rows.iter().filter(|row| row.source == source).count();
        (0..ranks).map(|source| ((0..source).map(count).sum(), count(source))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Routing, batch};

    #[test]
    fn every_layout_has_every_row_once() {
        for (ranks, experts, topk) in [(1, 1, 1), (2, 8, 2), (3, 257, 8), (7, 60, 32), (4, 2, 3)] {
            let shape = Shape { ranks, experts, topk, hidden: 8 };
            for routing in [Routing::Uniform, Routing::Zipf, Routing::Holes, Routing::Repeats, Routing::Local] {
                let batches: Vec<Batch> =
                    (0..ranks).map(|rank| batch(&shape, routing, 5, rank, [0, 1, 37][rank % 3])).collect();
                let ids: usize = batches.iter().flat_map(|batch| &batch.experts).filter(|&&id| id >= 0).count();
                let zones = (0..ranks).flat_map(|rank| expert_major(&shape, &batches, rank, 4));
                let zones: Vec<Zone> = zones.collect();
                assert_eq!(zones.iter().map(|zone| zone.rows.len()).sum::<usize>(), ids, "{shape:?} {routing:?}");
                for rank in 0..ranks {
                    let all = flat(&shape, &batches, rank);
                    for max in [0, 1, all.len() / 2, all.len(), usize::MAX] {
                        let first: Vec<_> = limited(&shape, &batches, rank, max).into_iter().flatten().collect();
                        assert_eq!(first, all[..max.min(all.len())], "{shape:?} {routing:?}");
                    }
                }
                assert!(zones.iter().all(|zone| zone.first % 4 == 0 && zone.padded - zone.rows.len() < 4));
                let rows = (0..ranks).flat_map(|rank| flat(&shape, &batches, rank));
                let kept: usize = rows.map(|row| row.experts.iter().filter(|&&expert| expert >= 0).count()).sum();
                assert_eq!(kept, ids, "{shape:?} {routing:?}");
            }
        }
    }

    #[test]
    fn a_token_with_an_unknown_expert_is_dropped() {
        let shape = Shape { ranks: 2, experts: 4, topk: 2, hidden: 1 };
        let batch = Batch { rows: vec![1, 2], experts: vec![0, 4, 3, -1], weights: vec![1.0; 4] };
        let received = |rank| flat(&shape, &[batch.clone(), batch.clone()], rank);
        assert!(received(0).is_empty());
        let [first, second] = &received(1)[..] else { panic!("one row of each rank") };
        assert_eq!((first.token, &first.experts, second.source), (1, &vec![1, -1], 1));
    }
}
