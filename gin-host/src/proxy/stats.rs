// SPDX-License-Identifier: MIT OR Apache-2.0
//! The figures of a communicator, by context and peer.
//!
//! The proxy counts always: one thread writes each word, by a load and a store, and nobody waits for anybody.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Figures of one context and peer, kept by the proxy.
        #[derive(Debug, Default)]
        pub(crate) struct Row {
            $(pub(crate) $name: AtomicU64,)*
            deepest: AtomicU64,
        }

        /// Figures since the communicator was made. [`Communicator::peer_stats`](crate::comm::Communicator::peer_stats)
        /// has the figures of queues that kernels drive themselves.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        #[non_exhaustive]
        pub struct Stats {
            $($(#[$doc])* pub $name: u64,)*
            /// Most requests that were under way at a time. Of a sum it is the largest part.
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
            /// Name and value of each figure.
            pub fn named(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)* ("deepest", self.deepest)]
            }
        }
    };
}

counters! {
    /// Requests accepted from the queue.
    accepted,
    /// Requests finished, failed ones included.
    finished,
    /// Requests that failed.
    failed,
    /// Puts from a window.
    puts,
    /// Puts of a value.
    values,
    /// Gets.
    gets,
    /// Bytes of puts and values.
    put_bytes,
    /// Bytes of gets.
    get_bytes,
    /// Signals sent, with a put or alone.
    signals,
    /// Messages handed to the network; a long put is several.
    posted,
    /// Messages that the network has completed, failed ones included.
    completions,
    /// Times that a request to a peer with a full list held up the queue. Each request counts once.
    stalls,
    /// Times that the network had no room for a message and was offered it again. Each message counts once.
    retries,
}

impl Stats {
    /// Requests that are under way.
    pub fn under_way(&self) -> u64 {
        // The two are read one after the other.
        self.accepted.saturating_sub(self.finished)
    }
}

impl std::iter::Sum for Stats {
    fn sum<I: Iterator<Item = Self>>(figures: I) -> Self {
        figures.fold(Self::default(), std::ops::Add::add)
    }
}

/// Figures of one context and peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PeerStats {
    /// Context.
    pub context: u32,
    /// World rank of the peer.
    pub peer: u32,
    /// Its figures.
    pub stats: Stats,
}

/// Figures of one context, kept by its proxy.
#[derive(Debug)]
pub(crate) struct Counters {
    /// By peer, from the first request on; the last is for requests that name none.
    rows: Box<[OnceLock<Box<Row>>]>,
    deepest: AtomicU64,
}

impl Counters {
    pub(crate) fn new(ranks: u32) -> Self {
        Self { rows: (0..=ranks).map(|_| OnceLock::new()).collect(), deepest: AtomicU64::new(0) }
    }

    /// The figures to add to for a peer.
    pub(crate) fn of(&self, peer: Option<u32>) -> &Row {
        let nobody = self.rows.len() - 1;
        let place = peer.map_or(nobody, |peer| (peer as usize).min(nobody));
        self.rows[place].get_or_init(Box::default)
    }

    /// Notes how many requests are under way: to the peer, and in all.
    pub(crate) fn depth(&self, peer: u32, of_peer: u64, of_all: u64) {
        most(&self.of(Some(peer)).deepest, of_peer);
        most(&self.deepest, of_all);
    }

    /// All of the context.
    pub(crate) fn read(&self) -> Stats {
        let sum: Stats = self.rows.iter().filter_map(OnceLock::get).map(|row| row.read()).sum();
        Stats { deepest: self.deepest.load(Ordering::Relaxed), ..sum }
    }

    /// Those of the peers that something was posted to.
    pub(crate) fn peers(&self, context: u32) -> impl Iterator<Item = PeerStats> {
        let peers = &self.rows[..self.rows.len() - 1];
        (0..).zip(peers).filter_map(move |(peer, row)| Some(PeerStats { context, peer, stats: row.get()?.read() }))
    }
}

/// Adds to a counter that only this thread writes.
pub(crate) fn add(counter: &AtomicU64, amount: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
}

/// Raises a counter that only this thread writes, if it is less.
fn most(counter: &AtomicU64, value: u64) {
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
