// SPDX-License-Identifier: MIT OR Apache-2.0
//! The expected results of the workloads, computed plainly on the host.

use gin_kernels::halo;

/// Returns the cells of all ranks after `steps` steps, sorted by rank, then by row.
pub(crate) fn halo_cells(ranks: u32, rows: usize, columns: usize, steps: u64) -> Vec<f32> {
    let cells = rows * columns;
    let mut now: Vec<f32> = (0..ranks).flat_map(|rank| (0..cells).map(move |cell| halo::input(rank, cell))).collect();
    let height = rows * ranks as usize;
    let mut next = vec![0.0; now.len()];
    for _ in 0..steps {
        for row in 0..height {
            for column in 0..columns {
                let at = |row: usize, column: usize| now[row % height * columns + column % columns];
                next[row * columns + column] = halo::stencil(
                    at(row + height - 1, column),
                    at(row + 1, column),
                    at(row, column + columns - 1),
                    at(row, column + 1),
                );
            }
        }
        std::mem::swap(&mut now, &mut next);
    }
    now
}

/// Returns ids and weights of the `topk` experts of each token with the greatest scores, `experts` for each token: the
/// lower id first where scores are equal, and as weights the scores divided by their sum.
pub(crate) fn moe_gate(scores: &[f32], experts: usize, topk: usize) -> (Vec<i32>, Vec<f32>) {
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    for scores in scores.chunks(experts) {
        let mut order: Vec<usize> = (0..experts).collect();
        // The sort is stable.
        order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
        order.truncate(topk);
        let sum = order.iter().fold(0.0, |sum, &expert| sum + scores[expert]);
        ids.extend((0..topk).map(|k| order.get(k).map_or(-1, |&expert| expert as i32)));
        weights.extend((0..topk).map(|k| order.get(k).map_or(0.0, |&expert| scores[expert] / sum)));
    }
    (ids, weights)
}

/// Returns the rows and columns of a grid of `cells` cells: as square as the number allows, never wider than high.
pub(crate) fn halo_shape(cells: usize) -> (usize, usize) {
    let mut columns = cells.isqrt().max(1);
    while !cells.is_multiple_of(columns) {
        columns -= 1;
    }
    (cells / columns, columns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stencil_of_means_keeps_the_sum() {
        let (rows, columns) = halo_shape(24);
        let sum = |cells: &[f32]| cells.iter().map(|cell| f64::from(*cell)).sum::<f64>();
        let (start, end) = (halo_cells(3, rows, columns, 0), halo_cells(3, rows, columns, 5));
        assert!((sum(&start) - sum(&end)).abs() < 1e-3);
        assert_ne!(start, end);
    }

    #[test]
    fn the_gate_takes_the_greatest_scores_and_of_equal_ones_the_lower_expert() {
        let (ids, weights) = moe_gate(&[0.25, 0.75, 0.5, 0.75, 1.0, 0.0, 0.0, 0.0], 4, 3);
        assert_eq!(ids, [1, 3, 2, 0, 1, 2]);
        assert_eq!(weights, [0.375, 0.375, 0.25, 1.0, 0.0, 0.0]);
        assert_eq!(moe_gate(&[0.5, 0.5], 2, 3), (vec![0, 1, -1], vec![0.5, 0.5, 0.0]));
    }

    #[test]
    fn shapes_use_every_cell() {
        for cells in 1..200 {
            let (rows, columns) = halo_shape(cells);
            assert_eq!(rows * columns, cells);
            assert!(columns <= rows);
        }
    }
}
