// SPDX-License-Identifier: MIT OR Apache-2.0
//! The state of one collective at one rank.
//!
//! Each edge of the tree carries two streams. Up goes a subtree's stream, when the whole subtree has given its bytes.
//! Down comes the stream of all ranks, from rank 0; a rank forwards its chunks as they arrive. So a short collective
//! costs each edge one message up and one down, however many ranks there are.
//!
//! A stream holds the bytes of consecutive ranks, each after their length. A stream without bytes stands for ranks that
//! all give nothing. So a barrier is a collective whose messages have heads only.

use crate::message::CHUNK;
use crate::message::Violation;
use crate::tree::{EDGES, PARENT, TreePlace};
use std::collections::BTreeSet;
use std::sync::Arc;

/// The maximum number of bytes that one rank gives to one collective.
pub(super) const MAX_BYTES: usize = 1 << 30;

/// The maximum number of bytes that encode the length of a rank's bytes.
const LENGTH: usize = 5;

/// The bytes that have arrived along one edge.
#[derive(Debug, Default)]
struct Stream {
    bytes: Vec<u8>,
    whole: bool,
}

impl Stream {
    /// Adds a chunk of the bytes of `ranks` ranks.
    fn take(&mut self, ranks: usize, last: bool, chunk: &[u8]) -> Result<(), Violation> {
        if self.whole {
            return Err("it gives twice to one collective");
        }
        if self.bytes.len() + chunk.len() > ranks.saturating_mul(MAX_BYTES + LENGTH) {
            return Err("it gives more to a collective than it may");
        }
        self.bytes.extend_from_slice(chunk);
        if last && !self.bytes.is_empty() && split(&self.bytes, ranks).is_none() {
            return Err("it gives bytes that are not the bytes of its ranks");
        }
        self.whole = last;
        Ok(())
    }
}

/// Returns the bytes of each of `ranks` ranks; `None` if the stream is malformed.
fn split(stream: &[u8], ranks: usize) -> Option<Vec<&[u8]>> {
    if stream.is_empty() {
        return Some(vec![&[]; ranks]);
    }
    // Each rank has one byte or more, so no stream makes this rank reserve more memory than it has.
    let mut parts = Vec::with_capacity(ranks.min(stream.len()));
    let mut rest = stream;
    for _ in 0..ranks {
        let (length, after) = postcard::take_from_bytes::<u32>(rest).ok()?;
        let length = usize::try_from(length).ok().filter(|&length| length <= MAX_BYTES)?;
        let part;
        (part, rest) = after.split_at_checked(length)?;
        parts.push(part);
    }
    rest.is_empty().then_some(parts)
}

/// Joins streams of consecutive ranks, each with its number of ranks.
fn join(streams: &[(&[u8], usize)]) -> Vec<u8> {
    if streams.iter().all(|(bytes, _)| bytes.is_empty()) {
        return Vec::new();
    }
    let mut all = Vec::new();
    for &(bytes, ranks) in streams {
        all.extend_from_slice(bytes);
        if bytes.is_empty() {
            // Lengths of 0.
            all.resize(all.len() + ranks, 0);
        }
    }
    all
}

/// Returns the chunks of a stream, one or more, and whether each is the last one.
pub(super) fn chunks(stream: &[u8]) -> impl Iterator<Item = (bool, Arc<[u8]>)> {
    let count = stream.len().div_ceil(CHUNK).max(1);
    (0..count).map(move |index| {
        let end = stream.len().min((index + 1) * CHUNK);
        (index + 1 == count, stream[index * CHUNK..end].into())
    })
}

/// A collective at one rank.
#[derive(Debug, Default)]
pub(super) struct Collective {
    /// The stream of this rank alone, from the time when it gives its bytes until its subtree is complete.
    own: Option<Vec<u8>>,
    /// From the parent: the stream of all ranks. From a child: the stream of its subtree.
    streams: [Stream; EDGES],
    /// The whole subtree has given.
    complete: bool,
    /// The caller has given up. This rank still relays.
    pub(super) abandoned: bool,
    /// This rank has told the others that it waits.
    pub(super) announced: bool,
    /// The ranks that told that they wait.
    pub(super) waiting: BTreeSet<u32>,
}

/// The next step after a subtree is complete.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum Next {
    /// The rank sends this stream to its parent.
    Up(Vec<u8>),
    /// At rank 0: the collective is complete, and the rank sends this stream to its children.
    Down(Arc<[u8]>),
}

impl Collective {
    /// Returns whether this rank has given its bytes.
    pub(super) fn has_given(&self) -> bool {
        self.own.is_some() || self.complete
    }

    /// Returns whether this rank has the bytes of all ranks.
    pub(super) fn is_whole(&self) -> bool {
        self.streams[PARENT].whole
    }

    /// Returns whether the subtree of this rank is complete, and this rank does not have the bytes of all.
    pub(super) fn waits_for_others(&self) -> bool {
        self.complete && !self.is_whole()
    }

    /// Returns whether the subtree at the other end of an edge to a child is complete.
    pub(super) fn has_subtree(&self, edge: usize) -> bool {
        edge != PARENT && self.streams[edge].whole
    }

    /// Takes this rank's bytes.
    pub(super) fn give(&mut self, bytes: &[u8], place: &TreePlace) -> Option<Next> {
        let head = if bytes.is_empty() { Vec::new() } else { crate::wire::encode(&(bytes.len() as u32)) };
        self.own = Some([&head, bytes].concat());
        self.advance(place)
    }

    /// Takes a chunk of the stream of a child's subtree.
    pub(super) fn take_up(
        &mut self,
        edge: usize,
        last: bool,
        chunk: &[u8],
        place: &TreePlace,
    ) -> Result<Option<Next>, Violation> {
        let ranks = place.children()[edge - 1].len();
        self.streams[edge].take(ranks, last, chunk)?;
        Ok(self.advance(place))
    }

    /// Takes a chunk of the stream of all ranks.
    pub(super) fn take_down(&mut self, last: bool, chunk: &[u8], ranks: u32) -> Result<(), Violation> {
        if !self.complete {
            return Err("it ends a collective for which this rank has not given its bytes");
        }
        self.streams[PARENT].take(ranks as usize, last, chunk)
    }

    /// Returns the next step if the subtree of this rank has just become complete.
    fn advance(&mut self, place: &TreePlace) -> Option<Next> {
        let children = place.children();
        let whole = |(stream, range): (&Stream, &std::ops::Range<u32>)| stream.whole || range.is_empty();
        let ready = !self.complete && self.streams[PARENT + 1..].iter().zip(&children).all(whole);
        let own = if ready { self.own.take()? } else { return None };
        let [_, left, right] = &self.streams;
        let stream = join(&[(&own, 1), (&left.bytes, children[0].len()), (&right.bytes, children[1].len())]);
        // Only the flags of the children are still of use.
        for child in &mut self.streams[PARENT + 1..] {
            child.bytes = Vec::new();
        }
        self.complete = true;
        if place.parent.is_some() {
            return Some(Next::Up(stream));
        }
        let all: Arc<[u8]> = stream.as_slice().into();
        self.streams[PARENT] = Stream { bytes: stream, whole: true };
        Some(Next::Down(all))
    }

    /// Returns the bytes of all ranks.
    pub(super) fn into_gathered(self, ranks: u32) -> Gathered {
        let [all, ..] = self.streams;
        Gathered { stream: all.bytes, ranks: ranks as usize }
    }

    /// Returns the ranks that have not given their bytes as far as this rank knows.
    pub(super) fn missing(&self, place: &TreePlace, ranks: u32) -> Vec<u32> {
        let given = |rank: u32| match place.towards(rank) {
            None => self.has_given(),
            Some(edge) => self.has_subtree(edge) || self.waiting.contains(&rank),
        };
        (0..ranks).filter(|&rank| !given(rank)).collect()
    }
}

/// The bytes of all ranks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Gathered {
    stream: Vec<u8>,
    ranks: usize,
}

impl Gathered {
    /// Returns whether no rank has given a byte.
    pub(super) fn is_empty(&self) -> bool {
        self.stream.is_empty()
    }

    /// Returns the bytes of each rank, by rank.
    pub(super) fn parts(&self) -> Vec<Vec<u8>> {
        // A stream that is whole was split before.
        split(&self.stream, self.ranks).unwrap_or_default().into_iter().map(<[u8]>::to_vec).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: [&[u8]; 4] = [b"", b"one", &[7; 200], b""];

    /// Returns the stream of one rank.
    fn stream(bytes: &[u8]) -> Vec<u8> {
        let alone = TreePlace::of(0, 1);
        match Collective::default().give(bytes, &alone) {
            Some(Next::Down(all)) => all.to_vec(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn joined_streams_split_into_the_bytes_of_their_ranks() {
        let streams: Vec<_> = BYTES.iter().map(|bytes| stream(bytes)).collect();
        let joined = join(&streams.iter().map(|stream| (&stream[..], 1)).collect::<Vec<_>>());
        assert_eq!(split(&joined, 4), Some(BYTES.to_vec()));
        // Ranks that give nothing, next to one that gives something.
        let joined = join(&[(&[], 3), (&stream(b"four"), 1)]);
        assert_eq!(split(&joined, 4), Some(vec![&b""[..], b"", b"", b"four"]));
        assert_eq!(join(&[(&[], 3), (&[], 1)]), b"");
        assert_eq!(split(b"", 3), Some(vec![&b""[..]; 3]));
    }

    #[test]
    fn streams_that_are_cut_too_long_or_of_other_ranks_are_refused() {
        let joined = join(&[(&stream(b"one"), 1), (&stream(b"two"), 1)]);
        for length in 1..joined.len() {
            assert_eq!(split(&joined[..length], 2), None, "{length} bytes");
        }
        assert_eq!(split(&joined, 1), None);
        assert_eq!(split(&joined, 3), None);
        assert_eq!(split(&[0xff; 9], 2), None);
        // A length past the limit, which the stream does not have either.
        let huge = postcard::to_stdvec(&u32::MAX).unwrap();
        assert_eq!(split(&huge, 1), None);
    }

    #[test]
    fn a_subtree_goes_up_once_and_only_when_all_of_it_has_given() {
        // Rank 1 of 6 has the children 2 and 3.
        let place = TreePlace::of(1, 6);
        assert_eq!(place.neighbours(), [Some(0), Some(2), Some(3)]);
        for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2], [2, 0, 1]] {
            let mut collective = Collective::default();
            let mut sent = Vec::new();
            for (step, from) in order.into_iter().enumerate() {
                let next = match from {
                    0 => collective.give(b"own", &place),
                    edge => collective.take_up(edge, true, &stream(&[edge as u8]), &place).unwrap(),
                };
                assert_eq!(next.is_some(), step == 2, "{order:?}");
                assert_eq!(collective.waits_for_others(), step == 2);
                sent.extend(next);
            }
            let Some(Next::Up(up)) = sent.pop() else { panic!("{sent:?}") };
            assert_eq!(split(&up, 3), Some(vec![&b"own"[..], &[1], &[2]]));
            assert_eq!(collective.take_up(1, true, &stream(b"1"), &place), Err("it gives twice to one collective"));
        }
    }

    #[test]
    fn the_stream_of_all_ranks_comes_after_this_rank_has_given_and_in_chunks() {
        let place = TreePlace::of(1, 2);
        let all = join(&[(&stream(&[1; 3 * CHUNK]), 1), (&stream(b"own"), 1)]);
        let mut collective = Collective::default();
        assert!(collective.take_down(true, &all, 2).is_err());
        assert!(matches!(collective.give(b"own", &place), Some(Next::Up(_))));
        assert_eq!(chunks(&all).count(), 4);
        for (last, chunk) in chunks(&all) {
            assert!(!collective.is_whole());
            collective.take_down(last, &chunk, 2).unwrap();
        }
        assert!(collective.is_whole());
        assert_eq!(collective.into_gathered(2).parts(), [vec![1; 3 * CHUNK], b"own".to_vec()]);
        assert_eq!(chunks(b"").collect::<Vec<_>>(), [(true, [].into())]);
    }

    #[test]
    fn ranks_of_complete_subtrees_and_ranks_that_wait_are_not_missing() {
        let place = TreePlace::of(1, 8);
        let mut collective = Collective::default();
        assert_eq!(collective.missing(&place, 8), [0, 1, 2, 3, 4, 5, 6, 7]);
        let left = place.children()[0].clone();
        collective.take_up(1, true, &[], &place).unwrap();
        collective.waiting.insert(6);
        collective.give(b"", &place);
        let missing: Vec<u32> = (0..8).filter(|rank| !left.contains(rank) && ![1, 6].contains(rank)).collect();
        assert_eq!(collective.missing(&place, 8), missing);
    }
}
