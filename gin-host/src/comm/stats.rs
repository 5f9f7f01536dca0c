// SPDX-License-Identifier: MIT OR Apache-2.0
//! The statistics of a communicator.

use super::{CommError, Communicator, PeerStats, Stats};

impl Communicator {
    /// Returns the statistics of each context since the communicator was created, summed over all peers.
    ///
    /// Programs may call this at any time, also while kernels run. Each number was right at some moment of the call;
    /// two numbers may be of different moments. With device-driven NIC queue pairs, the statistics contain only the
    /// numbers that the queue pairs provide: see [`peer_stats`](Self::peer_stats).
    ///
    /// # Errors
    /// As [`device`](Self::device).
    pub fn stats(&self) -> Result<Vec<Stats>, CommError> {
        self.with_up("read statistics", |live| {
            let mut all: Vec<Stats> = live.stats.iter().map(|counters| counters.read()).collect();
            for row in live.gdaki_stats()? {
                let stats = &mut all[row.context as usize];
                *stats = *stats + row.stats;
            }
            Ok(all)
        })?
    }

    /// Returns the statistics of each context and peer that requests were posted to, ordered by context, then peer.
    ///
    /// - Requests that name no rank of the communicator are in [`stats`](Self::stats) alone.
    /// - Loads and stores are not counted, because kernels would have to count them.
    /// - With device-driven NIC queue pairs, `accepted` and `posted` count work-queue entries, of which one operation
    ///   may take several. `finished` and `completions` count entries known to be complete. The other numbers are 0.
    ///
    /// # Errors
    /// As [`device`](Self::device).
    pub fn peer_stats(&self) -> Result<Vec<PeerStats>, CommError> {
        self.with_up("read statistics", |live| {
            let mut all = live.gdaki_stats()?;
            all.extend((0..).zip(&live.stats).flat_map(|(context, counters)| counters.peers(context)));
            all.sort_by_key(|row| (row.context, row.peer));
            Ok(all)
        })?
    }
}
