// SPDX-License-Identifier: MIT OR Apache-2.0
//! The statistics of a communicator, by context and peer.
//!
//! The proxy always counts. One thread writes each word, by a load and a store, so no thread waits for another.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// The counters of one context and peer, which the proxy updates.
        #[derive(Debug, Default)]
        pub(crate) struct Row {
            $(pub(crate) $name: AtomicU64,)*
            deepest: AtomicU64,
        }

        /// Statistics since the communicator was created.
        /// [`Communicator::peer_stats`](crate::comm::Communicator::peer_stats) says which of them device-driven queue
        /// pairs provide.
        ///
        /// ```
        /// let stats = gin_host::comm::Stats::default();
        /// assert!(stats.named().iter().all(|(_, value)| *value == 0));
        /// ```
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        #[non_exhaustive]
        pub struct Stats {
            $($(#[$doc])* pub $name: u64,)*
            /// The maximum number of requests that were unfinished at a time. In a sum it is the maximum of the parts.
            pub deepest: u64,
        }

        impl Row {
            fn read(&self) -> Stats {
                Stats {
                    $($name: self.$name.load(Ordering::Relaxed),)*
                    deepest: self.deepest.load(Ordering::Relaxed),
                }
            }
        }

        impl std::ops::Add for Stats {
            type Output = Self;

            fn add(self, other: Self) -> Self {
                Self {
                    $($name: self.$name + other.$name,)*
                    deepest: self.deepest.max(other.deepest),
                }
            }
        }

        impl Stats {
            /// Returns the name and the value of each number.
            pub fn named(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)* ("deepest", self.deepest)]
            }
        }
    };
}

counters! {
    /// The requests accepted from the queue.
    accepted,
    /// The finished requests, including failed ones.
    finished,
    /// The failed requests.
    failed,
    /// The puts from a window.
    puts,
    /// The puts of a value.
    values,
    /// The gets.
    gets,
    /// The bytes of puts and values.
    put_bytes,
    /// The bytes of gets.
    get_bytes,
    /// The signals sent, with a put or alone.
    signals,
    /// The messages posted to the network. A long put is several messages.
    posted,
    /// The messages that the network has completed, including failed ones.
    completions,
    /// The requests that held up the queue because their peer had its maximum number of unfinished requests.
    stalls,
    /// The messages for which the network first had no room.
    retries,
}

impl Stats {
    /// Returns the number of unfinished requests.
    pub fn under_way(&self) -> u64 {
        // The two numbers are read one after the other.
        self.accepted.saturating_sub(self.finished)
    }
}

impl std::iter::Sum for Stats {
    fn sum<I: Iterator<Item = Self>>(figures: I) -> Self {
        figures.fold(Self::default(), std::ops::Add::add)
    }
}

/// Statistics of one context and peer.
///
/// ```
/// use gin_host::comm::{CommError, PeerStats, Requirements};
/// use gin_host::world::{WorldConfig, launch};
///
/// let rows = launch(WorldConfig::seeded(1, 7), |rank| -> Result<Vec<PeerStats>, CommError> {
///     let comm = rank.communicator(&Requirements::default())?;
///     let rows = comm.peer_stats()?;
///     comm.destroy()?;
///     Ok(rows)
/// });
/// assert_eq!(rows.unwrap(), [[]]); // no request was posted
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PeerStats {
    /// The context.
    pub context: u32,
    /// The world rank of the peer.
    pub peer: u32,
    /// The statistics.
    pub stats: Stats,
}

/// The counters of one context, which its proxy updates.
#[derive(Debug)]
pub(crate) struct Counters {
    /// By peer, from the peer's first request on. The last entry is for requests that name no rank.
    rows: Box<[OnceLock<Box<Row>>]>,
    deepest: AtomicU64,
}

impl Counters {
    pub(crate) fn new(ranks: u32) -> Self {
        Self { rows: (0..=ranks).map(|_| OnceLock::new()).collect(), deepest: AtomicU64::new(0) }
    }

    /// Returns the counters of a peer.
    pub(crate) fn of(&self, peer: Option<u32>) -> &Row {
        let nobody = self.rows.len() - 1;
        let place = peer.map_or(nobody, |peer| (peer as usize).min(nobody));
        self.rows[place].get_or_init(Box::default)
    }

    /// Records the number of unfinished requests: to the peer, and in total.
    pub(crate) fn depth(&self, peer: u32, of_peer: u64, of_all: u64) {
        max(&self.of(Some(peer)).deepest, of_peer);
        max(&self.deepest, of_all);
    }

    /// Returns the sum over all peers.
    pub(crate) fn read(&self) -> Stats {
        let sum: Stats = self.rows.iter().filter_map(OnceLock::get).map(|row| row.read()).sum();
        Stats { deepest: self.deepest.load(Ordering::Relaxed), ..sum }
    }

    /// Returns the statistics of the peers that requests were posted to.
    pub(crate) fn peers(&self, context: u32) -> impl Iterator<Item = PeerStats> {
        let peers = &self.rows[..self.rows.len() - 1];
        (0..).zip(peers).filter_map(move |(peer, row)| Some(PeerStats { context, peer, stats: row.get()?.read() }))
    }
}

/// Adds to a counter that only this thread writes.
pub(crate) fn add(counter: &AtomicU64, amount: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
}

/// Raises a counter that only this thread writes to at least a value.
fn max(counter: &AtomicU64, value: u64) {
    if value > counter.load(Ordering::Relaxed) {
        counter.store(value, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_a_context_are_the_sum_over_its_peers_and_over_what_names_none() {
        let counters = Counters::new(3);
        assert_eq!(counters.peers(7).count(), 0);
        for peer in [Some(0), Some(2), Some(2), None, Some(99)] {
            add(&counters.of(peer).accepted, 1);
        }
        add(&counters.of(Some(2)).finished, 1);
        counters.depth(2, 2, 5);
        counters.depth(0, 1, 4);
        let all = counters.read();
        assert_eq!((all.accepted, all.finished, all.under_way(), all.deepest), (5, 1, 4, 5));
        let peers: Vec<_> = counters.peers(7).map(|row| (row.context, row.peer, row.stats.accepted)).collect();
        assert_eq!(peers, [(7, 0, 1), (7, 2, 2)]);
        let deepest: Vec<_> = counters.peers(7).map(|row| row.stats.deepest).collect();
        assert_eq!(deepest, [1, 2]);
        let sum: Stats = counters.peers(7).map(|row| row.stats).sum();
        assert_eq!((sum.accepted, sum.deepest), (3, 2));
    }
}
