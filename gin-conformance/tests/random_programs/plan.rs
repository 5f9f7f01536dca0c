// SPDX-License-Identifier: MIT OR Apache-2.0
//! Random plans: what is drawn, and shrunk.

use gin_conformance::host::Net;
use gin_conformance::scenario::CoopKind;
use proptest::prelude::*;

/// Signals, words of signals and counters that operations raise; small, so that several raise the same.
pub const IDS: u32 = 3;
/// Most bytes that a put or a get moves, and how far its place may be moved within its slot.
pub const MOST_BYTES: u64 = 240;
pub const MOST_SKEW: u64 = 15;

/// What an operation raises at the peer.
#[derive(Clone, Copy, Debug)]
pub enum Raise {
    Nothing,
    /// A signal by its id.
    Id {
        id: u32,
        amount: u64,
        weak: bool,
    },
    /// A word of the window of signals.
    Word {
        word: u32,
        amount: u64,
        weak: bool,
    },
}

/// What an operation moves.
#[derive(Clone, Copy, Debug)]
pub enum What {
    Put { bytes: u64, from: u64, skew: u64 },
    Value { bytes: u64, skew: u64, value: u64 },
    Get { bytes: u64, from: u64, skew: u64 },
    Raise,
    Flush,
    Token,
}

/// One operation of some group. `rank`, `group`, `peer` and `context` are taken modulo what there is.
#[derive(Clone, Copy, Debug)]
pub struct Post {
    pub rank: u32,
    pub group: u32,
    pub peer: u32,
    pub context: u32,
    pub what: What,
    pub raise: Raise,
    pub counter: Option<u32>,
    pub more: bool,
}

/// How a group learns that its operations of a context are done.
#[derive(Clone, Copy, Debug)]
pub enum Completion {
    Flush,
    Tokens,
    /// By counters, if each of them has one.
    Counters,
}

/// All ranks issue, wait for what they are to get, and compare.
#[derive(Clone, Debug)]
pub struct Round {
    pub posts: Vec<Post>,
    pub completion: Completion,
    /// Signals and counters are reset at the end.
    pub resets: bool,
}

/// Everything that is drawn.
#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub net: Net,
    pub ranks: u32,
    pub coop: CoopKind,
    pub blocks: u32,
    pub per_block: u32,
    pub contexts: u32,
    pub queue_depth: u32,
    pub max_outstanding_per_peer: u32,
    pub max_message: u64,
    pub first_index: u64,
    pub rounds: Vec<Round>,
}

fn raise() -> impl Strategy<Value = Raise> {
    let amount = prop_oneof![Just(1u64), 1..5000u64];
    prop_oneof![
        2 => Just(Raise::Nothing),
        3 => (0..IDS, amount.clone(), any::<bool>()).prop_map(|(id, amount, weak)| Raise::Id { id, amount, weak }),
        1 => (0..IDS, amount, any::<bool>()).prop_map(|(word, amount, weak)| Raise::Word { word, amount, weak }),
    ]
}

fn what() -> impl Strategy<Value = What> {
    let moved = (prop_oneof![Just(0), 1..20u64, 20..=MOST_BYTES], 0..256u64, 0..=MOST_SKEW);
    prop_oneof![
        6 => moved.clone().prop_map(|(bytes, from, skew)| What::Put { bytes, from, skew }),
        3 => (0..4u32, 0..2u64, any::<u64>())
            .prop_map(|(width, skew, value)| What::Value { bytes: 1 << width, skew: 8 * skew, value }),
        3 => moved.prop_map(|(bytes, from, skew)| What::Get { bytes, from, skew }),
        2 => Just(What::Raise),
        1 => Just(What::Flush),
        1 => Just(What::Token),
    ]
}

fn post() -> impl Strategy<Value = Post> {
    let place = (0..4u32, 0..8u32, 0..4u32, 0..3u32);
    let counter = prop::option::weighted(0.6, 0..IDS);
    (place, what(), raise(), counter, any::<bool>()).prop_map(
        |((rank, group, peer, context), what, raise, counter, more)| Post {
            rank,
            group,
            peer,
            context,
            what,
            raise,
            counter,
            more,
        },
    )
}

fn round() -> impl Strategy<Value = Round> {
    let completion = prop_oneof![Just(Completion::Flush), Just(Completion::Tokens), Just(Completion::Counters)];
    (prop::collection::vec(post(), 0..24), completion, prop::bool::weighted(0.3))
        .prop_map(|(posts, completion, resets)| Round { posts, completion, resets })
}

fn net() -> impl Strategy<Value = Net> {
    prop_oneof![
        Just(Net::Plain),
        (100..40_000u64).prop_map(|ns| Net::Delay { ns }),
        Just(Net::Reorder),
        Just(Net::Withhold),
        Just(Net::Worst),
    ]
}

/// All plans.
pub fn plans() -> impl Strategy<Value = Plan> {
    let groups = (prop::sample::select(CoopKind::ALL.to_vec()), 1..3u32, 1..3u32);
    let queues = (1..4u32, 1..5u32, prop_oneof![1..4u32, Just(64)], prop_oneof![Just(1 << 30), 1..100u64]);
    let first = prop_oneof![Just(0u64), Just((1 << 32) - 5), Just((1 << 63) - 5)];
    (any::<u64>(), net(), 2..5u32, groups, queues, first, prop::collection::vec(round(), 1..4)).prop_map(
        |(
            seed,
            net,
            ranks,
            (coop, blocks, per_block),
            (contexts, depth, outstanding, message),
            first_index,
            rounds,
        )| Plan {
            seed,
            net,
            ranks,
            coop,
            blocks,
            per_block,
            contexts,
            queue_depth: 1 << depth,
            max_outstanding_per_peer: outstanding,
            max_message: message,
            first_index,
            rounds,
        },
    )
}
