// SPDX-License-Identifier: MIT OR Apache-2.0
//! The unfinished requests of one context: in order of the queue, and by peer.

use std::collections::VecDeque;

/// The index of an unfinished request in the proxy's table.
pub(crate) type Slot = u32;

/// The unfinished requests of one context.
#[derive(Debug)]
pub(crate) struct Lists {
    /// The index of the request of the first entry of `finished`. All requests below it are finished.
    pub(super) completion_index: u64,
    /// True for each finished request, from `completion_index` on.
    finished: VecDeque<bool>,
    peers: Vec<PeerList>,
}

#[derive(Debug, Default)]
struct PeerList {
    /// The indices of requests to this peer, ascending. The first is unfinished.
    indices: VecDeque<u64>,
    /// The number of unfinished requests.
    unfinished: usize,
    /// The requests with messages to post, in order.
    to_post: VecDeque<Slot>,
    /// The requests that wait until all requests before them are finished, with their indices, in order.
    behind: VecDeque<(u64, Slot)>,
}

impl Lists {
    /// Makes the lists of a queue whose first index is `first`.
    pub(crate) fn new(first: u64, ranks: u32) -> Self {
        let peers = (0..ranks).map(|_| PeerList::default()).collect();
        Self { completion_index: first, finished: VecDeque::new(), peers }
    }

    /// Returns the number of requests from the oldest unfinished one on.
    pub(crate) fn depth(&self) -> usize {
        self.finished.len()
    }

    /// Returns the number of unfinished requests to `peer`.
    pub(crate) fn unfinished(&self, peer: u32) -> usize {
        self.peers[peer as usize].unfinished
    }

    /// Adds the request with the next index. `peer` is `None` if the request names no rank of the communicator.
    pub(crate) fn add(&mut self, index: u64, peer: Option<u32>) {
        debug_assert_eq!(index, self.completion_index.wrapping_add(self.finished.len() as u64));
        self.finished.push_back(false);
        if let Some(peer) = peer {
            let list = &mut self.peers[peer as usize];
            list.indices.push_back(index);
            list.unfinished += 1;
        }
    }

    /// Marks a request finished.
    pub(crate) fn finish(&mut self, index: u64, peer: Option<u32>) {
        self.finished[index.wrapping_sub(self.completion_index) as usize] = true;
        if let Some(peer) = peer {
            let list = &mut self.peers[peer as usize];
            list.unfinished -= 1;
            // All requests below `completion_index` are finished.
            while let Some(&oldest) = list.indices.front()
                && self.finished[oldest.wrapping_sub(self.completion_index) as usize]
            {
                list.indices.pop_front();
            }
        }
        while self.finished.front() == Some(&true) {
            self.finished.pop_front();
            self.completion_index = self.completion_index.wrapping_add(1);
        }
    }

    /// Returns the index of the oldest unfinished request to `peer`.
    pub(crate) fn oldest_incomplete(&self, peer: u32) -> Option<u64> {
        self.peers[peer as usize].indices.front().copied()
    }

    /// Holds a request to `peer` back until all requests to that peer before it are finished.
    pub(crate) fn hold(&mut self, peer: u32, index: u64, slot: Slot) {
        self.peers[peer as usize].behind.push_back((index, slot));
    }

    /// Returns a held request to `peer` that is now the oldest unfinished one, and holds it no longer.
    pub(crate) fn release(&mut self, peer: u32) -> Option<Slot> {
        let PeerList { indices, behind, .. } = &mut self.peers[peer as usize];
        let (_, slot) = *behind.front().filter(|(index, _)| indices.front() == Some(index))?;
        behind.pop_front();
        Some(slot)
    }

    /// Returns the requests to `peer` with messages to post.
    pub(crate) fn unposted(&mut self, peer: u32) -> &mut VecDeque<Slot> {
        &mut self.peers[peer as usize].to_post
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn oldest_incomplete_and_completion_index_are_the_minima_of_what_is_unfinished(
            first in prop_oneof![Just(0u64), Just(u64::from(u32::MAX) - 3), Just((1 << 63) - 3)],
            peers in proptest::collection::vec(proptest::option::of(0u32..3), 1..40),
            order in proptest::collection::vec(any::<prop::sample::Index>(), 40),
        ) {
            let mut lists = Lists::new(first, 3);
            let mut unfinished: Vec<(u64, Option<u32>)> = Vec::new();
            for (index, &peer) in (first..).zip(&peers) {
                lists.add(index, peer);
                unfinished.push((index, peer));
            }
            let end = first + peers.len() as u64;
            for choice in order {
                if unfinished.is_empty() {
                    break;
                }
                let (index, peer) = unfinished.remove(choice.index(unfinished.len()));
                lists.finish(index, peer);
                prop_assert_eq!(lists.completion_index, unfinished.iter().map(|u| u.0).min().unwrap_or(end));
                for rank in 0..3 {
                    let mine = || unfinished.iter().filter(|u| u.1 == Some(rank));
                    prop_assert_eq!(lists.oldest_incomplete(rank), mine().map(|u| u.0).min());
                    prop_assert_eq!(lists.unfinished(rank), mine().count());
                }
            }
        }
    }
}
