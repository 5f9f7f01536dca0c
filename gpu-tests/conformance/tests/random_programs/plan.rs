// SPDX-License-Identifier: MIT OR Apache-2.0
//! Random plans: the parts that are drawn and shrunk.

use gin_conformance::host::{Net, SetupBackend};
use gin_conformance::scenario::CoopKind;
use proptest::prelude::*;

/// Number of signals, words of signals and counters that operations raise. It is small, so that several operations
/// raise the same.
pub const IDS: u32 = 3;
/// Maximum number of bytes that a put or a get moves, and the largest shift of its position within its slot.
pub const MAX_BYTES: u64 = 240;
pub const MAX_SKEW: u64 = 15;

/// The signal that an operation raises at the peer.
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

/// The effect of an operation.
#[derive(Clone, Copy, Debug)]
pub enum Action {
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
    /// A get that is compared at once, after a flush or a token.
    Fetch {
        bytes: u64,
        from: u64,
        skew: u64,
        token: bool,
    },
    Raise,
    Flush,
    Token,
    /// A put whose source changes as soon as the group's own counter allows it.
    Reuse {
        bytes: u64,
        from: u64,
        skew: u64,
    },
    /// A flush, or tokens, for the group's puts, whose source changes at once.
    Refill {
        tokens: bool,
    },
}

/// One operation of some group, or of all groups of a rank. `rank`, `group`, `peer` and `context` are taken modulo the
/// number of each.
#[derive(Clone, Copy, Debug)]
pub struct Post {
    pub rank: u32,
    pub group: Option<u32>,
    pub peer: u32,
    pub context: u32,
    pub action: Action,
    pub raise: Raise,
    /// Bit `group % 32` is set if the group's operation raises a signal.
    pub raises: u32,
    pub counter: Option<u32>,
    /// Bit `group % 32` is set if the group's operation has `more`.
    pub more: u32,
}

/// The way in which a group waits for completion of its operations in a context.
#[derive(Clone, Copy, Debug)]
pub enum Completion {
    Flush,
    Tokens,
    /// By counters, if each operation has one.
    Counters,
}

/// The way in which a group sends the posts that it holds back, if no other operation of the round does.
#[derive(Clone, Copy, Debug)]
pub enum Sends {
    Post,
    Flush,
    Token,
}

/// All groups of the first block of a rank put to the next rank at once, all but one of them with `more`. The peer
/// answers that one in another context, and the block waits for the answer. For plans of several contexts. All fields
/// are taken modulo the number of each.
#[derive(Clone, Copy, Debug)]
pub struct Relay {
    pub rank: u32,
    pub context: u32,
    pub group: u32,
}

/// One round: all ranks issue, wait for the data that they get, and compare.
#[derive(Clone, Debug)]
pub struct Round {
    pub relay: Option<Relay>,
    pub posts: Vec<Post>,
    pub sends: Sends,
    /// The group of each block, modulo their number, that sends the block's posts that are held back and signals the
    /// block's puts, after a barrier of the block. With `None` each group does so for itself.
    pub leader: Option<u32>,
    pub completion: Completion,
    /// Set if signals and counters are reset at the end.
    pub resets: bool,
}

/// Everything that is drawn.
#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub backend: SetupBackend,
    pub net: Net,
    /// Set to make one block share each context, if the plan has one block.
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

fn action() -> impl Strategy<Value = Action> {
    let moved = (prop_oneof![Just(0), 1..20u64, 20..=MAX_BYTES], 0..256u64, 0..=MAX_SKEW);
    prop_oneof![
        6 => moved.clone().prop_map(|(bytes, from, skew)| Action::Put { bytes, from, skew }),
        3 => (0..4u32, 0..2u64, any::<u64>())
            .prop_map(|(width, skew, value)| Action::Value { bytes: 1 << width, skew: 8 * skew, value }),
        3 => moved.clone().prop_map(|(bytes, from, skew)| Action::Get { bytes, from, skew }),
        2 => moved.clone().prop_map(|(bytes, from, skew)| Action::Reuse { bytes, from, skew }),
        2 => (moved, any::<bool>())
            .prop_map(|((bytes, from, skew), token)| Action::Fetch { bytes, from, skew, token }),
        2 => Just(Action::Raise),
        1 => Just(Action::Flush),
        1 => Just(Action::Token),
        2 => any::<bool>().prop_map(|tokens| Action::Refill { tokens }),
    ]
}

/// Draws lanes of a warp: none, all, all but the last, any.
fn lanes() -> impl Strategy<Value = u32> {
    prop_oneof![Just(0), Just(u32::MAX), Just(u32::MAX >> 1), any::<u32>()]
}

fn post(group: impl Strategy<Value = Option<u32>>) -> impl Strategy<Value = Post> {
    let place = (0..4u32, group, 0..4u32, 0..3u32);
    let counter = prop::option::weighted(0.6, 0..IDS);
    (place, action(), raise(), lanes(), counter, lanes()).prop_map(
        |((rank, group, peer, context), action, raise, silent, counter, more)| Post {
            rank,
            group,
            peer,
            context,
            action,
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

/// Kind of groups, number of blocks, and number of groups in a block.
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

/// Draws plans of few groups of any kind, each with its own operations.
pub fn plans() -> impl Strategy<Value = Plan> {
    let groups = (prop::sample::select(CoopKind::ALL.to_vec()), 1..3u32, 1..3u32);
    let posts = prop::collection::vec(post((0..8u32).prop_map(Some)), 0..24);
    plans_of(2..5u32, groups, (1..7, 1..100), prop::collection::vec(round(posts), 1..4))
}

/// Draws plans with threads of several warps, or many small groups. All of them issue most operations at once.
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
    // Short queues, but none in which one operation of each thread would take seconds.
    plans_of(Just(2), groups, (3..7, 60..100), prop::collection::vec(round(posts), 1..3))
}
