// SPDX-License-Identifier: MIT OR Apache-2.0
//! The figures of a communicator.

use super::{CommError, Communicator, PeerStats, Stats};

impl Communicator {
    /// Figures of each context since the communicator was made, of all peers together. They can be read at any time,
    /// also while kernels run; each is then a number that was right once, and two may be of different times.
    ///
    /// Where kernels drive a NIC, only what its queue pairs tell: see [`peer_stats`](Self::peer_stats).
    ///
    /// # Errors
    /// As [`device`](Self::device).
    pub fn stats(&self) -> Result<Vec<Stats>, CommError> {
        self.with_up("read figures", |live| {
            let mut all: Vec<Stats> = live.stats.iter().map(|counters| counters.read()).collect();
            if let Some(gdaki) = &live.gdaki {
                for row in gdaki.stats()? {
                    let stats = &mut all[row.context as usize];
                    *stats = *stats + row.stats;
                }
            }
            Ok(all)
        })?
    }

    /// Returns the same by context and peer, for the peers that requests were posted to, in that order.
    ///
    /// Requests that name no rank of the communicator are in [`stats`](Self::stats) alone. Loads and stores are not
    /// counted, because kernels would have to count them. Where kernels drive a NIC, the figures `accepted` and
    /// `posted` count entries of its queue, of which one operation may take several. Then `finished` and `completions`
    /// count entries known to be complete, and the other figures are 0.
    ///
    /// # Errors
    /// As [`device`](Self::device).
    pub fn peer_stats(&self) -> Result<Vec<PeerStats>, CommError> {
        self.with_up("read figures", |live| {
            let counted = (0..).zip(&live.stats).flat_map(|(context, counters)| counters.peers(context));
            let mut all: Vec<PeerStats> = counted.collect();
            if let Some(gdaki) = &live.gdaki {
                all.extend(gdaki.stats()?);
                all.sort_by_key(|row| (row.context, row.peer));
            }
            Ok(all)
        })?
    }
}
