// SPDX-License-Identifier: MIT OR Apache-2.0
//! The output of a rank after combine.

use crate::{Batch, Kind, RankRow, Shape, narrow, widen};

/// The experts of a test: each multiplies a row and adds a number of its own, so that a row at the wrong expert shows.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Experts;

impl Experts {
    /// Returns an element of the row that expert `expert` of all makes of an element.
    pub fn apply(self, expert: usize, element: u16) -> u16 {
        narrow(widen(element).mul_add(1.0 + (expert % 5) as f32 / 8.0, (expert % 29) as f32))
    }
}

/// Returns the row that the receiving rank makes of a row: the sum over its experts in the order of the token's ids,
/// weighted, by `fma` in FP32, rounded once.
pub fn reduced(shape: &Shape, receiver: usize, row: &RankRow, experts: Experts) -> Vec<u16> {
    reduced_f32(shape, receiver, row, experts).into_iter().map(narrow).collect()
}

/// Returns the same without the rounding.
pub fn reduced_f32(shape: &Shape, receiver: usize, row: &RankRow, experts: Experts) -> Vec<f32> {
    let element = |&element: &u16| {
        let mut sum = 0.0f32;
        for (&local, &weight) in row.experts.iter().zip(&row.weights) {
            if let Ok(local) = usize::try_from(local) {
                sum = weight.mul_add(widen(experts.apply(receiver * shape.local() + local, element)), sum);
            }
        }
        sum
    };
    row.row.iter().map(element).collect()
}

/// Returns the rows of a rank after a combine with one row for each rank: their sum in FP32 in the order in which the
/// token's ids name the ranks first, from 0, rounded once. Ranks of `silent` take no part.
pub fn per_rank(shape: &Shape, batch: &Batch, silent: &[usize], experts: Experts) -> Vec<u16> {
    per_rank_of(shape, batch, &|_, rank| !silent.contains(&rank), experts)
}

/// Returns the same, if of the rows of tokens at ranks these take part: token, rank.
pub fn per_rank_of(
    shape: &Shape,
    batch: &Batch,
    takes_part: &dyn Fn(usize, usize) -> bool,
    experts: Experts,
) -> Vec<u16> {
    per_rank_by(shape, batch, takes_part, |rank, row| {
        reduced(shape, rank, row, experts).into_iter().map(widen).collect()
    })
}

/// Returns the same as [`per_rank`], if the returned rows are FP32: each is the [`reduced`] one without its
/// rounding, so that only the sum is rounded.
pub fn per_rank_f32(shape: &Shape, batch: &Batch, silent: &[usize], experts: Experts) -> Vec<u16> {
    let takes_part = |_, rank| !silent.contains(&rank);
    per_rank_by(shape, batch, takes_part, |rank, row| reduced_f32(shape, rank, row, experts))
}

/// Returns the sums of what `made` makes at a rank of a row.
fn per_rank_by(
    shape: &Shape,
    batch: &Batch,
    takes_part: impl Fn(usize, usize) -> bool,
    made: impl Fn(usize, &RankRow) -> Vec<f32>,
) -> Vec<u16> {
    let mut all = Vec::new();
    for token in 0..batch.tokens(shape) {
        let places = batch.places(shape, token);
        let mut ranks: Vec<usize> = Vec::new();
        for &(_, rank, ..) in &places {
            if !ranks.contains(&rank) && takes_part(token, rank) {
                ranks.push(rank);
            }
        }
        let mut sums = vec![0.0f32; shape.hidden];
        for rank in ranks {
            let (mut ids, mut weights) = (vec![-1; shape.topk], vec![0.0; shape.topk]);
            for &(k, owner, local, weight) in &places {
                if owner == rank {
                    (ids[k], weights[k]) = (local as i32, weight);
                }
            }
            let row = batch.row(shape, token).to_vec();
            let row = made(rank, &RankRow { source: 0, token, experts: ids, weights, row });
            sums.iter_mut().zip(row).for_each(|(sum, element)| *sum += element);
        }
        all.extend(sums.into_iter().map(narrow));
    }
    all
}

/// Returns the rows of a rank after a combine with one row for each id: their weighted sum in the order of the ids, by
/// `fma` in FP32 from 0, rounded once. Ranks of `silent` take no part.
pub fn combine_at_source(shape: &Shape, batch: &Batch, silent: &[usize], experts: Experts) -> Vec<u16> {
    combine_at_source_from(shape, batch, silent, experts, &|_, _| 0.0)
}

/// Returns the same, if the sums start from these values: of token, column.
pub fn combine_at_source_from(
    shape: &Shape,
    batch: &Batch,
    silent: &[usize],
    experts: Experts,
    start: &dyn Fn(usize, usize) -> f32,
) -> Vec<u16> {
    let mut all = Vec::new();
    for token in 0..batch.tokens(shape) {
        let places = batch.places(shape, token);
        for (column, &element) in batch.row(shape, token).iter().enumerate() {
            let mut sum = start(token, column);
            for &(_, rank, local, weight) in places.iter().filter(|(_, rank, ..)| !silent.contains(rank)) {
                sum = weight.mul_add(widen(experts.apply(rank * shape.local() + local, element)), sum);
            }
            all.push(narrow(sum));
        }
    }
    all
}

/// Returns the bytes of a rank's rows after a combine without experts, which adds up the rows as they were sent: one
/// for each rank of a token, or one for each id, times its weight. `start` has the values from which the sums start.
pub fn identity(
    shape: &Shape,
    batch: &Batch,
    kind: Kind,
    weighted: bool,
    start: &dyn Fn(usize, usize) -> f32,
) -> Vec<u8> {
    let mut all = Vec::new();
    for token in 0..batch.tokens(shape) {
        let places = batch.places(shape, token);
        for (column, &element) in batch.row(shape, token).iter().enumerate() {
            let (mut sum, mut ranks) = (start(token, column), Vec::new());
            for &(_, rank, _, weight) in &places {
                if weighted {
                    sum = weight.mul_add(widen(element), sum);
                } else if !ranks.contains(&rank) {
                    ranks.push(rank);
                    sum += widen(element);
                }
            }
            kind.push(sum, &mut all);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Routing, batch, rank_major};

    #[test]
    fn a_token_without_experts_is_zero_and_a_silent_rank_takes_no_part() {
        let shape = Shape { ranks: 2, experts: 4, topk: 2, hidden: 4 };
        let none = batch(&shape, Routing::None, 1, 0, 3);
        assert!(
            per_rank(&shape, &none, &[], Experts)
                .iter()
                .chain(&combine_at_source(&shape, &none, &[], Experts))
                .all(|&x| x == 0)
        );
        let remote = batch(&shape, Routing::Without(0), 1, 0, 3);
        assert!(per_rank(&shape, &remote, &[1], Experts).iter().all(|&x| x == 0));
        assert!(per_rank(&shape, &remote, &[], Experts).iter().any(|&x| x != 0));
    }

    #[test]
    fn rows_of_fp32_are_rounded_once_and_those_of_bf16_twice() {
        let shape = Shape { ranks: 2, experts: 4, topk: 3, hidden: 1 };
        // Experts 0 and 1 are on rank 0, expert 2 is on rank 1. They make 3, 4.375 and 5.75 of 3.
        let made = |expert, value: f32| widen(Experts.apply(expert, narrow(value)));
        assert_eq!([made(0, 3.0), made(1, 3.0), made(2, 3.0)], [3.0, 4.375, 5.75]);
        let one = Batch { rows: vec![narrow(3.0)], experts: vec![0, 1, 2], weights: vec![1.0, 31.0, 0.125] };
        let (experts, weights) = (vec![0, 1, -1], vec![1.0, 31.0, 0.0]);
        let first = RankRow { source: 0, token: 0, experts, weights, row: one.rows.clone() };
        // From 128 on, BF16 are integers. Rank 0 makes 3 + 31 * 4.375, rank 1 makes 0.71875.
        assert_eq!(reduced_f32(&shape, 0, &first, Experts), [138.625]);
        assert_eq!(reduced(&shape, 0, &first, Experts), [narrow(139.0)]);
        // 139.71875 and 139.34375, rounded.
        assert_eq!(per_rank(&shape, &one, &[], Experts), [narrow(140.0)]);
        assert_eq!(per_rank_f32(&shape, &one, &[], Experts), [narrow(139.0)]);
    }

    #[test]
    fn the_sum_over_ranks_is_of_the_rows_that_they_received() {
        let shape = Shape { ranks: 3, experts: 9, topk: 4, hidden: 8 };
        let batches: Vec<Batch> = (0..3).map(|rank| batch(&shape, Routing::Repeats, 3, rank, 20)).collect();
        for (source, batch) in batches.iter().enumerate() {
            let mut sums = vec![0.0f64; 20 * shape.hidden];
            for receiver in 0..3 {
                for row in &rank_major(&shape, &batches, receiver)[source] {
                    let made = reduced(&shape, receiver, row, Experts);
                    let sums = &mut sums[row.token * shape.hidden..];
                    sums.iter_mut().zip(made).for_each(|(sum, element)| *sum += f64::from(widen(element)));
                }
            }
            let combined = per_rank(&shape, batch, &[], Experts);
            for (sum, found) in sums.into_iter().zip(combined) {
                assert!((sum - f64::from(widen(found))).abs() <= sum.abs() / 128.0, "{sum} {found}");
            }
        }
    }
}
