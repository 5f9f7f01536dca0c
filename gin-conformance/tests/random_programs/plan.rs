// SPDX-License-Identifier: MIT OR Apache-2.0
//! Random plans: what is drawn, and shrunk.

use gin_conformance::host::{Net, SetupBackend};
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
    Put {
        bytes: u64,
        from: u64,
        skew: u64,
    },
    Value {
        bytes: u64,
        skew: u64,
        value: u64,
    },
    Get {
        bytes: u64,
        from: u64,
        skew: u64,
    },
    /// A get that is flushed, or waited for by a token, and compared at once.
    Fetch {
        bytes: u64,
        from: u64,
        skew: u64,
        token: bool,
    },
    Raise,
    Flush,
    Token,
    /// A put whose source changes as soon as the group's own counter says that it may.
    Reuse {
        bytes: u64,
        from: u64,
        skew: u64,
    },
    /// The group's puts are flushed, or waited for by tokens, and their source changes at once.
    Refill {
        tokens: bool,
    },
}

/// One operation of some group, or of all groups of a rank. `rank`, `group`, `peer` and `context` are taken modulo what
/// there is.
#[derive(Clone, Copy, Debug)]
pub struct Post {
    pub rank: u32,
    pub group: Option<u32>,
    pub peer: u32,
    pub context: u32,
    pub what: What,
    pub raise: Raise,
    /// Bit `group % 32` says whether the group's operation raises.
    pub raises: u32,
    pub counter: Option<u32>,
    /// Bit `group % 32` says whether more follows in the group.
    pub more: u32,
}

/// How a group learns that its operations of a context are done.
#[derive(Clone, Copy, Debug)]
pub enum Completion {
    Flush,
    Tokens,
    /// By counters, if each of them has one.
    Counters,
}

/// How a group sends what it holds back, where nothing else of the round does.
#[derive(Clone, Copy, Debug)]
pub enum Sends {
    Post,
    Flush,
    Token,
}

/// All groups of the first block of a rank put to the next rank at once, all but one of them with more; the peer
/// answers that one in another context, and the block waits for the answer. For plans of several contexts; all are
/// taken modulo what there is.
#[derive(Clone, Copy, Debug)]
pub struct Relay {
    pub rank: u32,
    pub context: u32,
    pub group: u32,
}

/// All ranks issue, wait for what they are to get, and compare.
#[derive(Clone, Debug)]
pub struct Round {
    pub relay: Option<Relay>,
    pub posts: Vec<Post>,
    pub sends: Sends,
    /// This group of each block, modulo what there is, sends what its block holds back and signals what its block has
    /// put, after a barrier of the block. Each group does so for itself if `None`.
    pub leader: Option<u32>,
    pub completion: Completion,
    /// Signals and counters are reset at the end.
    pub resets: bool,
}

/// Everything that is drawn.
#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub backend: SetupBackend,
    pub net: Net,
    /// Contexts are used by one block only, where there is only one.
    pub by_block: bool,
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
        3 => moved.clone().prop_map(|(bytes, from, skew)| What::Get { bytes, from, skew }),
        2 => moved.clone().prop_map(|(bytes, from, skew)| What::Reuse { bytes, from, skew }),
        2 => (moved, any::<bool>())
            .prop_map(|((bytes, from, skew), token)| What::Fetch { bytes, from, skew, token }),
        2 => Just(What::Raise),
        1 => Just(What::Flush),
        1 => Just(What::Token),
        2 => any::<bool>().prop_map(|tokens| What::Refill { tokens }),
    ]
}

/// Which of the lanes of a warp: none, all, all but the last, any.
fn lanes() -> impl Strategy<Value = u32> {
    prop_oneof![Just(0), Just(u32::MAX), Just(u32::MAX >> 1), any::<u32>()]
}

fn post(group: impl Strategy<Value = Option<u32>>) -> impl Strategy<Value = Post> {
    let place = (0..4u32, group, 0..4u32, 0..3u32);
    let counter = prop::option::weighted(0.6, 0..IDS);
    (place, what(), raise(), lanes(), counter, lanes()).prop_map(
        |((rank, group, peer, context), what, raise, silent, counter, more)| Post {
            rank,
            group,
            peer,
            context,
            what,
            raise,
            raises: !silent,
            counter,
            more,
        },
    )
}

fn round(posts: impl Strategy<Value = Vec<Post>>) -> impl Strategy<Value = Round> {
    let completion = prop_oneof![Just(Completion::Flush), Just(Completion::Tokens), Just(Completion::Counters)];
    let sends = prop_oneof![Just(Sends::Post), Just(Sends::Flush), Just(Sends::Token)];
    let relay = (0..4u32, 0..3u32, prop_oneof![Just(31), 0..64u32]).prop_map(|(rank, context, group)| Relay {
        rank,
        context,
        group,
    });
    let ending = (sends, prop::option::of(0..64u32), completion, prop::bool::weighted(0.3));
    (prop::option::weighted(0.25, relay), posts, ending).prop_map(
        |(relay, posts, (sends, leader, completion, resets))| Round { relay, posts, sends, leader, completion, resets },
    )
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

/// Groups: their kind, blocks, and groups a block.
type Groups = (CoopKind, u32, u32);

fn plans_of(
    ranks: impl Strategy<Value = u32>,
    groups: impl Strategy<Value = Groups>,
    (depths_log2, messages): (std::ops::Range<u32>, std::ops::Range<u64>),
    rounds: impl Strategy<Value = Vec<Round>>,
) -> impl Strategy<Value = Plan> {
    let backend = prop_oneof![Just(SetupBackend::Proxy), Just(SetupBackend::Gdaki)];
    let queues = (1..4u32, depths_log2, prop_oneof![1..4u32, Just(64)], prop_oneof![Just(1 << 30), messages]);
    let first = prop_oneof![Just(0u64), Just((1 << 32) - 5), Just((1 << 63) - 5)];
    let way = (any::<u64>(), backend, net(), any::<bool>());
    (way, ranks, groups, queues, first, rounds).prop_map(
        |(
            (seed, backend, net, by_block),
            ranks,
            (coop, blocks, per_block),
            (contexts, depth, outstanding, message),
            first_index,
            rounds,
        )| Plan {
            seed,
            backend,
            net,
            by_block,
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

/// Few groups of any kind, each with operations of its own.
pub fn plans() -> impl Strategy<Value = Plan> {
    let groups = (prop::sample::select(CoopKind::ALL.to_vec()), 1..3u32, 1..3u32);
    let posts = prop::collection::vec(post((0..8u32).prop_map(Some)), 0..24);
    plans_of(2..5u32, groups, (1..7, 1..100), prop::collection::vec(round(posts), 1..4))
}

/// Threads of several warps, or many small groups: most operations are issued by all of them at once.
pub fn crowds() -> impl Strategy<Value = Plan> {
    let coop = prop_oneof![
        4 => Just((CoopKind::Thread, 64)),
        2 => Just((CoopKind::Thread, 32)),
        1 => Just((CoopKind::ThreadNamed, 64)),
        1 => Just((CoopKind::Tile, 8)),
        1 => Just((CoopKind::Lanes, 2)),
    ];
    let groups = (coop, 1..3u32).prop_map(|((coop, per_block), blocks)| (coop, blocks, per_block));
    let posts = prop::collection::vec(post(prop::option::weighted(0.5, 0..128u32)), 0..12);
    // Short queues, but none in which one operation of each would take seconds.
    plans_of(Just(2), groups, (3..7, 60..100), prop::collection::vec(round(posts), 1..3))
}
