// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a plan comes to: its programs, and what memory, signals and counters must be, by plain arithmetic.
//!
//! A round of a group: it fills its part of the source window anew; issues what was drawn; learns that its operations
//! are done and compares what it got; waits until each signal of its rank has the value that all raises together give,
//! reads it, and compares the puts that were made to it; then tells all groups of all ranks that it is through, and waits
//! until all are. Nobody waits before it has issued everything, so none waits in vain. Every put is covered by its own
//! signal or by a later strong one of its group, context and peer; where none was drawn, one is added.

use crate::plan::{Completion, IDS, MOST_BYTES, MOST_SKEW, Plan, Post, Raise, Round, What};
use gin_conformance::op::{Op, pattern};
use gin_conformance::scenario::{CoopKind, Outcome, Scenario, WRONG_BYTES, WindowSpec};
use std::collections::{BTreeMap, BTreeSet};

/// Windows: sources of puts, destinations of puts, sources of gets, destinations of gets, words of signals.
const WINDOWS: [u32; 5] = [SOURCE, ARRIVAL, OFFER, FETCHED, WORDS];
const SOURCE: u32 = 0;
const ARRIVAL: u32 = 1;
const OFFER: u32 = 2;
const FETCHED: u32 = 3;
const WORDS: u32 = 4;

/// Bytes of a group's part of the source window, and of the window that gets read.
const STRIPE: u64 = 512;
/// Bytes of a slot: no two operations of a round write to the same.
const SLOT: u64 = MOST_BYTES + MOST_SKEW + 1;
/// The signal, of context 0, by which groups say that they are through.
const THROUGH: u32 = IDS;

/// A window's bytes at the end.
type Memory = Vec<u8>;

/// What is to be run, and what is to come of it.
pub struct Compiled {
    pub scenario: Scenario,
    /// Rank, group, index of the operation, and the value that it reads.
    values: Vec<(u32, u32, usize, u64)>,
    /// For each rank, the windows but the last.
    windows: Vec<Vec<Memory>>,
}

struct Compiler<'a> {
    plan: &'a Plan,
    groups: u32,
    /// Slots of each sending group at each rank, and of gets.
    slots: u64,
    programs: BTreeMap<(u32, u32), Vec<Op>>,
    values: Vec<(u32, u32, usize, u64)>,
    windows: Vec<Vec<Memory>>,
    /// By rank, context and id; words of the window have context [`u32::MAX`].
    signals: BTreeMap<(u32, u32, u32), u64>,
    counters: BTreeMap<(u32, u32, u32), u64>,
    through: u64,
}

const NO_CONTEXT: u32 = u32::MAX;

/// A part of a window that must hold a pattern from one of its bytes on.
struct Held {
    group: u32,
    check: Op,
}

/// The seed of what a group puts in a round.
fn source_seed(round: usize, rank: u32, group: u32) -> u64 {
    1 + (round as u64) * 1000 + u64::from(rank) * 100 + u64::from(group)
}

/// The seed of what a rank offers to gets.
fn offer_seed(rank: u32) -> u64 {
    900_000 + u64::from(rank)
}

/// The seed of a value: its bytes are the first of that pattern, so that a group can compare them like others.
fn value_word(seed: u64) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|index| pattern(seed, index as u64)))
}

fn shape(plan: &Plan) -> Scenario {
    let scenario = Scenario::new(plan.ranks).coop(plan.coop);
    let per_block = if matches!(plan.coop, CoopKind::Block | CoopKind::BlockNamed) { 1 } else { plan.per_block };
    let threads = plan.coop.threads() * per_block;
    scenario.shape(plan.blocks, threads).require(|requirements| {
        requirements.contexts = plan.contexts;
        requirements.signals = IDS + 1;
        requirements.counters = IDS;
        requirements.queue_depth = plan.queue_depth;
        requirements.max_outstanding_per_peer = plan.max_outstanding_per_peer;
        requirements.max_message = plan.max_message;
        requirements.first_index = plan.first_index;
    })
}

impl Compiled {
    pub fn new(plan: &Plan) -> Self {
        let mut scenario = shape(plan);
        let groups = scenario.groups();
        let slots = plan.rounds.iter().map(|round| round.posts.len() as u64).max().unwrap_or(0).max(1);
        let senders = u64::from(plan.ranks * groups);
        let sizes = [u64::from(groups) * STRIPE, senders * slots * SLOT, STRIPE, u64::from(groups) * slots * SLOT];
        let sizes = sizes.into_iter().chain([8 * u64::from(IDS)]);
        for (window, bytes) in WINDOWS.into_iter().zip(sizes.clone()) {
            let spec = WindowSpec { bytes: vec![bytes; plan.ranks as usize], signals: window == WORDS, offset: 16 };
            scenario = scenario.window(window as usize, spec);
        }
        let memory = || sizes.clone().take(4).map(|bytes| vec![0u8; bytes as usize]).collect();
        let mut compiler = Compiler {
            plan,
            groups,
            slots,
            programs: BTreeMap::new(),
            values: Vec::new(),
            windows: (0..plan.ranks).map(|_| memory()).collect(),
            signals: BTreeMap::new(),
            counters: BTreeMap::new(),
            through: 0,
        };
        compiler.begin();
        for (number, round) in plan.rounds.iter().enumerate() {
            compiler.round(number, round);
        }
        compiler.end();
        let Compiler { programs, values, windows, .. } = compiler;
        for ((rank, group), program) in programs {
            scenario = scenario.on_group(rank, group, program);
        }
        Self { scenario, values, windows }
    }

    /// Everything is as the model has it.
    ///
    /// # Errors
    /// The first that is not.
    pub fn check(&self, outcome: &Outcome) -> Result<(), String> {
        outcome.check_ok(&self.scenario)?;
        for &(rank, group, index, value) in &self.values {
            outcome.check_value(&self.scenario, rank, group, index, value)?;
        }
        for (rank, windows) in self.windows.iter().enumerate() {
            for (window, expected) in windows.iter().enumerate() {
                let seen = &outcome.windows[rank][window];
                if let Some(at) = (0..expected.len()).find(|at| seen.get(*at) != expected.get(*at)) {
                    return Err(format!(
                        "{WRONG_BYTES} at the end: rank {rank}, window {window}, byte {at}: {:?} expected, got {:?}",
                        expected.get(at),
                        seen.get(at)
                    ));
                }
            }
        }
        Ok(())
    }

    /// The programs in words.
    pub fn listing(&self) -> String {
        let mut text = String::new();
        for (rank, programs) in self.scenario.programs.iter().enumerate() {
            for (group, program) in programs {
                text += &format!("rank {rank}, group {group}:\n");
                for (index, op) in program.iter().enumerate() {
                    let code = gin_conformance::op::Code::from_code(op.code);
                    text += &format!("  {index}: {code:?} {op:?}\n");
                }
            }
        }
        text
    }
}

impl Compiler<'_> {
    fn everybody(&self) -> impl Iterator<Item = (u32, u32)> + use<> {
        let groups = self.groups;
        (0..self.plan.ranks).flat_map(move |rank| (0..groups).map(move |group| (rank, group)))
    }

    fn push(&mut self, rank: u32, group: u32, op: Op) {
        self.programs.entry((rank, group)).or_default().push(op);
    }

    /// Reads a value that the model knows.
    fn read(&mut self, rank: u32, group: u32, op: Op, value: u64) {
        let index = self.programs.get(&(rank, group)).map_or(0, Vec::len);
        self.values.push((rank, group, index, value));
        self.push(rank, group, op);
    }

    /// Writes a pattern to the model's memory.
    fn write(&mut self, rank: u32, window: u32, offset: u64, bytes: u64, seed: u64, from: u64) {
        let memory = &mut self.windows[rank as usize][window as usize];
        for index in 0..bytes {
            memory[(offset + index) as usize] = pattern(seed, from + index);
        }
    }

    /// All groups of all ranks have come here before any goes on.
    fn meet(&mut self) {
        self.through += u64::from(self.plan.ranks * self.groups);
        for (rank, group) in self.everybody() {
            for peer in 0..self.plan.ranks {
                self.push(rank, group, Op::raise(peer, THROUGH).weak());
            }
            self.push(rank, group, Op::wait_signal(THROUGH, self.through));
        }
    }

    fn begin(&mut self) {
        for rank in 0..self.plan.ranks {
            self.push(rank, 0, Op::fill(OFFER, 0, STRIPE, offer_seed(rank)));
            self.write(rank, OFFER, 0, STRIPE, offer_seed(rank), 0);
        }
        self.meet();
    }

    fn round(&mut self, number: usize, round: &Round) {
        for (rank, group) in self.everybody() {
            let (at, seed) = (u64::from(group) * STRIPE, source_seed(number, rank, group));
            self.push(rank, group, Op::fill(SOURCE, at, STRIPE, seed));
            self.write(rank, SOURCE, at, STRIPE, seed, 0);
        }
        // What each rank must hold at the end of the round, and who compares it.
        let mut held: BTreeMap<u32, Vec<Held>> = BTreeMap::new();
        // Counters cover the operations of all groups of a rank, so all are issued first.
        let issued: Vec<_> = self.everybody().map(|who| (who, self.issue(number, round, who, &mut held))).collect();
        for ((rank, group), issued) in issued {
            self.complete(rank, group, round.completion, &issued);
        }
        for (rank, group) in self.everybody() {
            let values: Vec<_> = self.signals.iter().filter(|(key, _)| key.0 == rank).map(|(k, v)| (*k, *v)).collect();
            for (key, value) in &values {
                self.push(rank, group, of_signal(*key, Op::wait_signal(0, *value)));
            }
            for (key, value) in values {
                self.read(rank, group, of_signal(key, Op::read_signal(0)), value);
            }
            let values: Vec<_> = self.counters.iter().filter(|(key, _)| key.0 == rank).map(|(k, v)| (*k, *v)).collect();
            for ((_, context, counter), value) in values {
                self.push(rank, group, Op::wait_counter(counter, value).context(context));
                self.read(rank, group, Op::read_counter(counter).context(context), value);
            }
            for held in held.get(&rank).into_iter().flatten().filter(|held| held.group == group) {
                self.push(rank, group, held.check);
            }
        }
        self.meet();
        if round.resets {
            self.reset();
        }
    }

    /// One group of each rank resets, and then all know that it is done.
    fn reset(&mut self) {
        for key in std::mem::take(&mut self.signals).into_keys() {
            self.push(key.0, 0, of_signal(key, Op::reset_signal(0)));
            self.signals.insert(key, 0);
        }
        for (rank, context, counter) in std::mem::take(&mut self.counters).into_keys() {
            let op = Op { counter, ..Op::new(gin_conformance::op::Code::ResetCounter) };
            self.push(rank, 0, op.context(context));
            self.counters.insert((rank, context, counter), 0);
        }
        self.meet();
    }

    /// After all is over nothing has been raised twice or late.
    fn end(&mut self) {
        for (key, value) in self.signals.clone() {
            self.read(key.0, 0, of_signal(key, Op::read_signal(0)), value);
        }
        for ((rank, context, counter), value) in self.counters.clone() {
            self.read(rank, 0, Op::read_counter(counter).context(context), value);
        }
    }

    /// Issues a group's operations of the round. What it must know when they are done is returned.
    fn issue(
        &mut self,
        number: usize,
        round: &Round,
        (rank, group): (u32, u32),
        held: &mut BTreeMap<u32, Vec<Held>>,
    ) -> Issued {
        let mut issued = Issued::default();
        // Contexts and peers with puts that no strong signal has covered.
        let mut bare = BTreeSet::new();
        // Slots taken at each peer, and by gets.
        let (mut puts, mut gets) = (BTreeMap::<u32, u64>::new(), 0);
        let mine = |post: &&Post| post.rank % self.plan.ranks == rank && post.group % self.groups == group;
        let posts: Vec<Post> = round.posts.iter().filter(mine).copied().collect();
        for post in posts {
            let (peer, context) = (post.peer % self.plan.ranks, post.context % self.plan.contexts);
            // The part of a group at each rank that it alone writes to.
            let part = u64::from(rank * self.groups + group) * self.slots * SLOT;
            let op = match post.what {
                What::Put { bytes, from, skew } => {
                    let at = part + next(puts.entry(peer).or_default()) * SLOT + skew;
                    let (stripe, seed) = (u64::from(group) * STRIPE, source_seed(number, rank, group));
                    self.write(peer, ARRIVAL, at, bytes, seed, from);
                    self.hold(held, peer, Op::check_from(ARRIVAL, at, bytes, seed, from));
                    Op::put(peer, bytes).from(SOURCE, stripe + from).to(ARRIVAL, at)
                }
                What::Value { bytes, skew, value } => {
                    let at = part + next(puts.entry(peer).or_default()) * SLOT + skew;
                    self.write(peer, ARRIVAL, at, bytes, value, 0);
                    self.hold(held, peer, Op::check(ARRIVAL, at, bytes, value));
                    Op::put_value(peer, bytes, value_word(value)).to(ARRIVAL, at)
                }
                What::Get { bytes, from, skew } => {
                    let at = (u64::from(group) * self.slots + next(&mut gets)) * SLOT + skew;
                    self.write(rank, FETCHED, at, bytes, offer_seed(peer), from);
                    issued.checks.push(Op::check_from(FETCHED, at, bytes, offer_seed(peer), from));
                    Op::get(peer, bytes).from(OFFER, from).to(FETCHED, at)
                }
                What::Raise => Op::raise(peer, gin_conformance::op::NONE),
                What::Flush => {
                    self.push(rank, group, Op::flush().context(context));
                    continue;
                }
                What::Token => {
                    self.push(rank, group, Op::flush_async(peer).context(context));
                    self.push(rank, group, Op::wait_token().context(context));
                    continue;
                }
            };
            let is_get = matches!(post.what, What::Get { .. });
            let raise = if is_get { Raise::Nothing } else { post.raise };
            if matches!((post.what, raise), (What::Raise, Raise::Nothing)) {
                continue;
            }
            let mut op = Op { more: u32::from(post.more), ..op.context(context) };
            let strong = match raise {
                Raise::Nothing => None,
                Raise::Id { id, amount, weak } => {
                    *self.signals.entry((peer, context, id)).or_default() += amount;
                    op = op.signal(id).add(amount);
                    Some(!weak)
                }
                Raise::Word { word, amount, weak } => {
                    *self.signals.entry((peer, NO_CONTEXT, word)).or_default() += amount;
                    op = op.at_address(WORDS, 8 * u64::from(word)).add(amount);
                    Some(!weak)
                }
            };
            match strong {
                Some(true) => {
                    bare.remove(&(context, peer));
                }
                Some(false) => op = op.weak(),
                None if !is_get => {
                    bare.insert((context, peer));
                }
                None => {}
            }
            if let Some(counter) = post.counter {
                *self.counters.entry((rank, context, counter)).or_default() += 1;
                op = op.counter(counter);
            }
            if !matches!(post.what, What::Raise) {
                issued.peers.entry(context).or_default().insert(peer);
                match post.counter {
                    Some(counter) => issued.counters.entry(context).or_default().insert(counter),
                    None => issued.uncounted.insert(context),
                };
            }
            self.push(rank, group, op);
        }
        for (context, peer) in bare {
            *self.signals.entry((peer, context, 0)).or_default() += 1;
            self.push(rank, group, Op::raise(peer, 0).context(context));
        }
        issued
    }

    /// Some group of the rank compares this when it has seen the signals.
    fn hold(&self, held: &mut BTreeMap<u32, Vec<Held>>, rank: u32, check: Op) {
        let all = held.entry(rank).or_default();
        let group = all.len() as u32 % self.groups;
        all.push(Held { group, check });
    }

    /// The group learns that its operations are done, and compares what it got.
    fn complete(&mut self, rank: u32, group: u32, how: Completion, issued: &Issued) {
        for (&context, peers) in &issued.peers {
            match how {
                Completion::Tokens => {
                    for &peer in peers {
                        self.push(rank, group, Op::flush_async(peer).context(context));
                        self.push(rank, group, Op::wait_token().context(context));
                    }
                }
                Completion::Counters if !issued.uncounted.contains(&context) => {
                    for &counter in &issued.counters[&context] {
                        let value = self.counters[&(rank, context, counter)];
                        self.push(rank, group, Op::wait_counter(counter, value).context(context));
                    }
                }
                Completion::Flush | Completion::Counters => self.push(rank, group, Op::flush().context(context)),
            }
        }
        for check in &issued.checks {
            self.push(rank, group, *check);
        }
    }
}

/// What a group has issued in a round, by context: peers and counters of puts and gets.
#[derive(Default)]
struct Issued {
    peers: BTreeMap<u32, BTreeSet<u32>>,
    counters: BTreeMap<u32, BTreeSet<u32>>,
    /// Contexts with a put or get that has no counter.
    uncounted: BTreeSet<u32>,
    /// What its gets have brought.
    checks: Vec<Op>,
}

fn next(count: &mut u64) -> u64 {
    *count += 1;
    *count - 1
}

/// The operation on this signal.
fn of_signal((_, context, id): (u32, u32, u32), op: Op) -> Op {
    if context == NO_CONTEXT { op.at_address(WORDS, 8 * u64::from(id)) } else { op.signal(id).context(context) }
}
