// SPDX-License-Identifier: MIT OR Apache-2.0
//! The state of a run that other threads observe while it runs: progress, and statistics.

use gin_host::comm::{Communicator, PeerStats, Stats};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Rank, context and peer.
pub(crate) type Place = (u32, u32, u32);

/// The state of the ranks of this process.
#[derive(Debug, Default)]
pub(crate) struct Watch(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Launches of the lowest rank that ended, and requests that one rank posts in each.
    launches: u64,
    operations: f64,
    /// The ranks whose kernels run, or have run in a launch that is not counted yet.
    running: BTreeMap<u32, Rank>,
    /// The statistics of the communicators that have ended.
    sums: BTreeMap<Place, Stats>,
}

#[derive(Debug)]
enum Rank {
    Running(Arc<Communicator>),
    /// The kernel has ended, and this is what it left.
    Ended(Vec<PeerStats>),
}

impl Rank {
    fn rows(&self) -> Vec<PeerStats> {
        match self {
            // An error means that the communicator is busy or ends: the next look has more.
            Self::Running(comm) => comm.peer_stats().unwrap_or_default(),
            Self::Ended(rows) => rows.clone(),
        }
    }
}

impl Watch {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a run begins in which a rank posts this many requests per launch.
    pub(super) fn begin(&self, operations: f64) {
        self.state().operations = operations;
    }

    /// Notes that the kernel of a rank starts. Observers call the communicator until [`end`](Self::end), so meanwhile
    /// no other thread may call it.
    pub(super) fn start(&self, rank: u32, comm: &Arc<Communicator>) {
        self.state().running.insert(rank, Rank::Running(comm.clone()));
    }

    /// Notes that the kernel of a rank has ended, also by a fault.
    pub(super) fn end(&self, rank: u32) {
        let mut state = self.state();
        if let Some(running) = state.running.get_mut(&rank) {
            *running = Rank::Ended(running.rows());
        }
    }

    /// Adds the final statistics of a launch of a rank.
    pub(super) fn count(&self, rank: u32, rows: &[PeerStats]) {
        let mut state = self.state();
        state.running.remove(&rank);
        for row in rows {
            let sum = state.sums.entry((rank, row.context, row.peer)).or_default();
            *sum = *sum + row.stats;
        }
    }

    /// Counts a launch as ended.
    pub(super) fn launched(&self) {
        self.state().launches += 1;
    }

    /// Returns the number of launches that ended, and of the present one the part that is done, as far as requests show
    /// it: loads and stores do not.
    pub(crate) fn launches(&self) -> f64 {
        let state = self.state();
        let rows = state.running.values().next().map(Rank::rows).unwrap_or_default();
        let finished: u64 = rows.iter().map(|row| row.stats.finished).sum();
        state.launches as f64 + (finished as f64 / state.operations.max(1.0)).min(1.0)
    }

    /// Returns the statistics of all ranks of this process since the start.
    pub(crate) fn stats(&self) -> BTreeMap<Place, Stats> {
        let state = self.state();
        let mut all = state.sums.clone();
        for (&rank, running) in &state.running {
            for row in running.rows() {
                let sum = all.entry((rank, row.context, row.peer)).or_default();
                *sum = *sum + row.stats;
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_count_the_part_that_requests_show_and_statistics_add_up() {
        let watch = Watch::default();
        let row = |finished| {
            let mut stats = Stats::default();
            (stats.accepted, stats.finished) = (finished, finished);
            PeerStats { context: 1, peer: 2, stats }
        };
        watch.begin(8.0);
        assert_eq!((watch.launches(), watch.stats().len()), (0.0, 0));
        watch.state().running.insert(0, Rank::Ended(vec![row(2)]));
        assert_eq!(watch.launches(), 0.25);
        watch.count(0, &[row(6)]);
        watch.launched();
        watch.state().running.insert(0, Rank::Ended(vec![row(99)]));
        assert_eq!(watch.launches(), 2.0);
        assert_eq!(watch.stats()[&(0, 1, 2)].finished, 105);
    }
}
