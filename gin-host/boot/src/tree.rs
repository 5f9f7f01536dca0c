// SPDX-License-Identifier: MIT OR Apache-2.0
//! The tree along which ranks send messages.
//!
//! A rank's subtree is an interval of ranks that begins with the rank itself. The ranks after it are halved between its
//! two children. So the tree of n ranks is log2(n) deep, no rank has more than three neighbours, and ranks of one host
//! are mostly close in the tree. A comparison of numbers decides whether a rank is below another one.

use std::ops::Range;

/// The maximum number of neighbours of a rank: its parent and two children.
pub(super) const EDGES: usize = 3;

/// The number of the edge to the parent. The edges to children follow.
pub(super) const PARENT: usize = 0;

/// The position of a rank in the tree.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct TreePlace {
    /// `None` for rank 0.
    pub(super) parent: Option<u32>,
    /// The rank and the ranks below it.
    pub(super) subtree: Range<u32>,
}

/// Returns the intervals of the two children of the rank with this interval; they may be empty.
fn children(subtree: &Range<u32>) -> [Range<u32>; 2] {
    let first = subtree.start + 1;
    let middle = first + (subtree.end - first).div_ceil(2);
    [first..middle, middle..subtree.end]
}

impl TreePlace {
    /// Returns the position of `rank`, which must be less than `ranks`.
    pub(super) fn of(rank: u32, ranks: u32) -> Self {
        let mut place = Self { parent: None, subtree: 0..ranks };
        while place.subtree.start < rank {
            let [left, right] = children(&place.subtree);
            place =
                Self { parent: Some(place.subtree.start), subtree: if left.contains(&rank) { left } else { right } };
        }
        place
    }

    /// Returns the ranks of each child's subtree; empty without the child.
    pub(super) fn children(&self) -> [Range<u32>; 2] {
        children(&self.subtree)
    }

    /// Returns the rank at the other end of each edge.
    pub(super) fn neighbours(&self) -> [Option<u32>; EDGES] {
        let [left, right] = self.children().map(|range| (!range.is_empty()).then_some(range.start));
        [self.parent, left, right]
    }

    /// Returns the edge that leads to `rank`; `None` for the rank itself.
    pub(super) fn towards(&self, rank: u32) -> Option<usize> {
        if rank == self.subtree.start {
            return None;
        }
        let [left, right] = self.children();
        Some(if left.contains(&rank) {
            PARENT + 1
        } else if right.contains(&rank) {
            PARENT + 2
        } else {
            PARENT
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: [u32; 9] = [1, 2, 3, 4, 7, 8, 33, 100, 1024];

    #[test]
    fn both_ends_of_an_edge_know_each_other_and_all_ranks_hang_together() {
        for ranks in SIZES {
            let mut edges = 0;
            for rank in 0..ranks {
                let place = TreePlace::of(rank, ranks);
                assert_eq!(place.subtree.start, rank);
                for (edge, other) in place.neighbours().into_iter().enumerate() {
                    let Some(other) = other else { continue };
                    edges += 1;
                    assert_eq!(place.towards(other), Some(edge));
                    assert!(
                        TreePlace::of(other, ranks).neighbours().contains(&Some(rank)),
                        "{rank} {other} of {ranks}"
                    );
                }
                assert_eq!(place.towards(rank), None);
            }
            assert_eq!(edges, 2 * (ranks - 1), "a tree of {ranks}");
        }
    }

    #[test]
    fn the_tree_is_as_deep_as_a_binary_tree_has_to_be() {
        for (ranks, depth) in [(1, 0), (2, 1), (3, 1), (8, 3), (1024, 10), (1 << 24, 24)] {
            let deepest = |rank| {
                let (mut place, mut depth) = (TreePlace::of(rank, ranks), 0);
                while let Some(parent) = place.parent {
                    (place, depth) = (TreePlace::of(parent, ranks), depth + 1);
                }
                depth
            };
            let max = [0, 1, ranks / 2, ranks - 1].into_iter().filter(|&rank| rank < ranks).map(deepest).max();
            assert!(max.is_some_and(|max| max <= depth), "{ranks}: {max:?}");
        }
    }
}
