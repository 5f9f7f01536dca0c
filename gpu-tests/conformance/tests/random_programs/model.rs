// SPDX-License-Identifier: MIT OR Apache-2.0
//! The compiler of a plan: its programs, and by plain arithmetic the final content of memory, signals and counters.
//!
//! Each round of a group has these steps.
//!
//! 1. It refills its part of the source window.
//! 2. It issues the operations of the plan.
//! 3. It sends the posts that it holds back.
//! 4. It waits until its operations are complete, and compares the bytes that it got.
//! 5. It waits until each signal of its rank has the sum of all raises, reads it, and compares the puts that the signal
//!    covers.
//! 6. It reports to all groups of all ranks that it has finished, and waits until all have.
//!
//! A group issues and sends everything before it waits for others, so no group waits in vain. Every put is covered by
//! its own signal, or by a later strong signal of its group, context and peer. If the plan has none, the compiler adds
//! one: in the group, or in one group of its block for all.
//!
//! An operation with `more` is held back. The group's next post without `more` to that peer sends it, or its next flush
//! or token, or the wait for its counter. If there is none of these, the compiler adds one. In plans of one context it
//! adds none: every wait is in that context, and the report at the end of a round is without `more`.

use crate::plan::{Action, Completion, IDS, MAX_BYTES, MAX_SKEW, Plan, Post, Raise, Relay, Round, Sends};
use gin_conformance::op::{NONE, Op, pattern};
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
/// Bytes of a slot. No two operations of a round write to the same slot.
const SLOT: u64 = MAX_BYTES + MAX_SKEW + 1;
/// The signal, of context 0, by which groups report that they have finished a round.
const THROUGH: u32 = IDS;
/// The signal of relays.
const RELAYED: u32 = IDS + 1;

/// The bytes of a window at the end.
type Memory = Vec<u8>;

/// A plan's scenario and its expected results.
pub struct Compiled {
    pub scenario: Scenario,
    /// Rank, group and index of each reading operation, and the value that it must read.
    values: Vec<(u32, u32, usize, u64)>,
    /// For each rank, all windows but the last.
    windows: Vec<Vec<Memory>>,
}

struct Compiler<'a> {
    plan: &'a Plan,
    groups: u32,
    /// Number of slots of each sending group at each rank, and of a group's gets.
    slots: u64,
    /// Every `stride`th group waits for signals and counters and compares the puts.
    stride: u32,
    /// Pattern of each group's part of the source window.
    sources: BTreeMap<(u32, u32), u64>,
    /// Number of fills of the source window so far.
    filled: u64,
    programs: BTreeMap<(u32, u32), Vec<Op>>,
    values: Vec<(u32, u32, usize, u64)>,
    windows: Vec<Vec<Memory>>,
    /// Values by rank, context and id. Words of the window have context [`NO_CONTEXT`].
    signals: BTreeMap<(u32, u32, u32), u64>,
    counters: BTreeMap<(u32, u32, u32), u64>,
    through: u64,
}

const NO_CONTEXT: u32 = u32::MAX;

/// A part of a window that must hold a pattern from one of the pattern's bytes on.
struct Expected {
    group: u32,
    check: Op,
}

/// Returns the seed of the window that a rank offers to gets.
fn offer_seed(rank: u32) -> u64 {
    900_000 + u64::from(rank)
}

/// Returns the value of a seed. Its bytes are the first of that pattern, so that groups compare them like others.
fn value_word(seed: u64) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|index| pattern(seed, index as u64)))
}

fn shape(plan: &Plan) -> Scenario {
    let scenario = Scenario::new(plan.ranks).coop(plan.coop);
    let per_block = match plan.coop {
        CoopKind::Block | CoopKind::BlockNamed => 1,
        _ => plan.per_block,
    };
    let scenario = scenario.shape(plan.blocks, plan.coop.threads() * per_block);
    let groups = scenario.groups();
    scenario.require(|requirements| {
        requirements.contexts = plan.contexts;
        requirements.signals = IDS + 2;
        // The last counters are the groups' own.
        requirements.counters = IDS + groups;
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
        let everybody = (0..plan.ranks).flat_map(|rank| (0..groups).map(move |group| (rank, group)));
        let max = |round: &Round| everybody.clone().map(|who| posts(plan, groups, round, who).count()).max();
        // One more for the relay.
        let slots = plan.rounds.iter().filter_map(max).max().unwrap_or(0) as u64 + 1;
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
            stride: groups.div_ceil(8),
            sources: BTreeMap::new(),
            filled: 0,
            programs: BTreeMap::new(),
            values: Vec::new(),
            windows: (0..plan.ranks).map(|_| memory()).collect(),
            signals: BTreeMap::new(),
            counters: BTreeMap::new(),
            through: 0,
        };
        compiler.begin();
        plan.rounds.iter().for_each(|round| compiler.round(round));
        compiler.end();
        let Compiler { programs, values, windows, .. } = compiler;
        for ((rank, group), program) in programs {
            scenario = scenario.on_group(rank, group, program);
        }
        Self { scenario, values, windows }
    }

    /// Checks that the outcome matches the model.
    ///
    /// # Errors
    /// Returns the first difference.
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
                        "{WRONG_BYTES} at the end: rank {rank}, window {window}, byte {at}: expected {:?}, got {:?}",
                        expected.get(at),
                        seen.get(at)
                    ));
                }
            }
        }
        Ok(())
    }

    /// Returns the programs as text.
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
        let sharing = u32::from(self.plan.by_block && self.plan.blocks == 1);
        self.programs.entry((rank, group)).or_default().push(op.sharing(sharing));
    }

    /// Adds a read whose value the model knows.
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

    /// Synchronizes all groups of all ranks. If there are many groups, the first of each block reports and waits for
    /// its block.
    fn meet(&mut self) {
        let (many, per_block) = (self.stride > 1, self.groups / self.plan.blocks);
        let tells = |group| !many || group % per_block == 0;
        self.through += self.everybody().filter(|&(_, group)| tells(group)).count() as u64;
        for (rank, group) in self.everybody() {
            if many {
                self.push(rank, group, Op::block_sync());
            }
            if tells(group) {
                for peer in 0..self.plan.ranks {
                    self.push(rank, group, Op::raise(peer, THROUGH).weak());
                }
                self.push(rank, group, Op::wait_signal(THROUGH, self.through));
            }
            if many {
                self.push(rank, group, Op::block_sync());
            }
        }
    }

    fn begin(&mut self) {
        for rank in 0..self.plan.ranks {
            self.push(rank, 0, Op::fill(OFFER, 0, STRIPE, offer_seed(rank)));
            self.write(rank, OFFER, 0, STRIPE, offer_seed(rank), 0);
        }
        self.meet();
    }

    /// Fills a group's part of the source window with a new pattern.
    fn fill(&mut self, (rank, group): (u32, u32)) {
        self.filled += 1;
        let (at, seed) = (u64::from(group) * STRIPE, self.filled);
        self.sources.insert((rank, group), seed);
        self.push(rank, group, Op::fill(SOURCE, at, STRIPE, seed));
        self.write(rank, SOURCE, at, STRIPE, seed, 0);
    }

    fn round(&mut self, round: &Round) {
        self.everybody().for_each(|who| self.fill(who));
        // The bytes that each rank must hold at the end of the round, and the group that compares them.
        let mut expected: BTreeMap<u32, Vec<Expected>> = BTreeMap::new();
        // Counters cover the operations of all groups of a rank, so all operations are issued first.
        let mut issued: BTreeMap<_, _> = self.everybody().map(|who| (who, Issued::default())).collect();
        if let Some(relay) = round.relay {
            self.relay(relay, &mut expected, &mut issued);
        }
        issued.iter_mut().for_each(|(who, issued)| self.issue(round, *who, &mut expected, issued));
        self.send(round, &issued);
        for ((rank, group), issued) in issued {
            self.complete(rank, group, round.completion, &issued);
        }
        let stride = self.stride;
        for (rank, group) in self.everybody().filter(|(_, group)| group % stride == 0) {
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
            for expected in expected.get(&rank).into_iter().flatten().filter(|expected| expected.group == group) {
                self.push(rank, group, expected.check);
            }
        }
        self.meet();
        if round.resets {
            self.reset();
        }
    }

    /// Resets signals and counters in one group of each rank, then synchronizes.
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

    /// Reads all signals and counters at the end, when a superfluous or late raise would show.
    fn end(&mut self) {
        for (key, value) in self.signals.clone() {
            self.read(key.0, 0, of_signal(key, Op::read_signal(0)), value);
        }
        for ((rank, context, counter), value) in self.counters.clone() {
            self.read(rank, 0, Op::read_counter(counter).context(context), value);
        }
    }

    /// Adds a relay. Only the operation without `more`, the only one that signals, causes the answer.
    fn relay(
        &mut self,
        relay: Relay,
        expected: &mut BTreeMap<u32, Vec<Expected>>,
        issued: &mut BTreeMap<(u32, u32), Issued>,
    ) {
        let contexts = self.plan.contexts;
        if contexts == 1 {
            return;
        }
        let (rank, context) = (relay.rank % self.plan.ranks, relay.context % contexts);
        let (peer, back, block) =
            ((rank + 1) % self.plan.ranks, (context + 1) % contexts, self.groups / self.plan.blocks);
        for group in 0..block {
            self.filled += 1;
            let (at, seed) = ((u64::from(rank * self.groups + group + 1) * self.slots - 1) * SLOT, self.filled);
            self.write(peer, ARRIVAL, at, 8, seed, 0);
            self.expect(expected, peer, Op::check(ARRIVAL, at, 8, seed));
            let put = Op::put_value(peer, 8, value_word(seed)).to(ARRIVAL, at).context(context);
            if group == relay.group % block {
                self.push(rank, group, put.signal(RELAYED));
            } else {
                self.push(rank, group, put.more());
                let issued = issued.entry((rank, group)).or_default();
                issued.bare.insert((context, peer));
                issued.held.insert((context, peer), false);
            }
        }
        let mut relayed = |rank, context| {
            let value = self.signals.entry((rank, context, RELAYED)).or_default();
            *value += 1;
            Op::wait_signal(RELAYED, *value).context(context)
        };
        let (there, here) = (relayed(peer, context), relayed(rank, back));
        self.push(peer, 0, there);
        self.push(peer, 0, Op::raise(rank, RELAYED).context(back));
        self.push(rank, 0, here);
        (0..block).for_each(|group| self.push(rank, group, Op::block_sync()));
    }

    /// Issues a group's operations of the round, and records what the group must learn at their completion.
    fn issue(
        &mut self,
        round: &Round,
        (rank, group): (u32, u32),
        expected: &mut BTreeMap<u32, Vec<Expected>>,
        issued: &mut Issued,
    ) {
        // Slots in use at each peer, and by gets.
        let (mut puts, mut gets) = (BTreeMap::<u32, u64>::new(), 0);
        let bit = 1 << (group % 32);
        let posts: Vec<Post> = posts(self.plan, self.groups, round, (rank, group)).copied().collect();
        for post in posts {
            let (peer, context) = (post.peer % self.plan.ranks, post.context % self.plan.contexts);
            // The slots of a group at each rank, to which it alone writes.
            let part = u64::from(rank * self.groups + group) * self.slots * SLOT;
            let stripe = u64::from(group) * STRIPE;
            let op = match post.action {
                Action::Put { bytes, from, skew } | Action::Reuse { bytes, from, skew } => {
                    if let Action::Reuse { .. } = post.action {
                        self.finish_reads(rank, group, false, issued);
                    }
                    let at = part + next(puts.entry(peer).or_default()) * SLOT + skew;
                    let seed = self.sources[&(rank, group)];
                    self.write(peer, ARRIVAL, at, bytes, seed, from);
                    self.expect(expected, peer, Op::check_from(ARRIVAL, at, bytes, seed, from));
                    issued.reads.entry(context).or_default().insert(peer);
                    Op::put(peer, bytes).from(SOURCE, stripe + from).to(ARRIVAL, at)
                }
                Action::Value { bytes, skew, value } => {
                    let at = part + next(puts.entry(peer).or_default()) * SLOT + skew;
                    self.write(peer, ARRIVAL, at, bytes, value, 0);
                    self.expect(expected, peer, Op::check(ARRIVAL, at, bytes, value));
                    Op::put_value(peer, bytes, value_word(value)).to(ARRIVAL, at)
                }
                Action::Get { bytes, from, skew } | Action::Fetch { bytes, from, skew, .. } => {
                    let at = (u64::from(group) * self.slots + next(&mut gets)) * SLOT + skew;
                    self.write(rank, FETCHED, at, bytes, offer_seed(peer), from);
                    issued.checks.push(Op::check_from(FETCHED, at, bytes, offer_seed(peer), from));
                    Op::get(peer, bytes).from(OFFER, from).to(FETCHED, at)
                }
                Action::Raise => Op::raise(peer, NONE),
                Action::Flush => {
                    self.flush(rank, group, context, issued);
                    continue;
                }
                Action::Token => {
                    self.token(rank, group, context, peer, issued);
                    continue;
                }
                Action::Refill { tokens } => {
                    self.finish_reads(rank, group, tokens, issued);
                    self.fill((rank, group));
                    continue;
                }
            };
            let is_get = matches!(post.action, Action::Get { .. } | Action::Fetch { .. });
            let raise = if is_get || post.raises & bit == 0 { Raise::Nothing } else { post.raise };
            if matches!((post.action, raise), (Action::Raise, Raise::Nothing)) {
                continue;
            }
            let more = post.more & bit != 0;
            let own = if let Action::Reuse { .. } = post.action { Some(IDS + group) } else { None };
            let counter = own.or(post.counter);
            let mut op = Op { more: u32::from(more), ..op.context(context) };
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
                    issued.bare.remove(&(context, peer));
                }
                Some(false) => op = op.weak(),
                None if !is_get => {
                    issued.bare.insert((context, peer));
                }
                None => {}
            }
            if more {
                issued.held.insert((context, peer), counter.is_some());
            } else {
                issued.held.remove(&(context, peer));
            }
            if let Some(counter) = counter {
                *self.counters.entry((rank, context, counter)).or_default() += 1;
                issued.counters.entry(context).or_default().insert(counter);
                op = op.counter(counter);
            }
            if !matches!(post.action, Action::Raise) {
                issued.peers.entry(context).or_default().insert(peer);
                if counter.is_none() {
                    issued.uncounted.insert(context);
                }
            }
            self.push(rank, group, op);
            if let Some(counter) = own {
                let value = self.counters[&(rank, context, counter)];
                self.push(rank, group, Op::wait_counter(counter, value).context(context));
                issued.held.remove(&(context, peer));
                issued.reads.clear();
                self.fill((rank, group));
            }
            if let Action::Fetch { token, .. } = post.action {
                if token {
                    self.token(rank, group, context, peer, issued);
                } else {
                    self.flush(rank, group, context, issued);
                }
                issued.checks.pop().into_iter().for_each(|check| self.push(rank, group, check));
            }
        }
    }

    /// Waits until no put of the group reads its source any more.
    fn finish_reads(&mut self, rank: u32, group: u32, tokens: bool, issued: &mut Issued) {
        for (context, peers) in std::mem::take(&mut issued.reads) {
            if tokens {
                peers.into_iter().for_each(|peer| self.token(rank, group, context, peer, issued));
            } else {
                self.flush(rank, group, context, issued);
            }
        }
    }

    /// Flushes a context, which sends its posts that are held back.
    fn flush(&mut self, rank: u32, group: u32, context: u32, issued: &mut Issued) {
        self.push(rank, group, Op::flush().context(context));
        issued.held.retain(|&(other, _), _| other != context);
    }

    /// Waits by a token for the requests to a peer, which sends the requests that are held back.
    fn token(&mut self, rank: u32, group: u32, context: u32, peer: u32, issued: &mut Issued) {
        self.push(rank, group, Op::flush_async(peer).context(context));
        self.push(rank, group, Op::wait_token().context(context));
        issued.held.remove(&(context, peer));
    }

    /// Covers puts and sends the posts that are held back: in each group, or in one group of each block for the whole
    /// block.
    fn send(&mut self, round: &Round, issued: &BTreeMap<(u32, u32), Issued>) {
        let Some(leader) = round.leader else {
            for (&(rank, group), issued) in issued {
                let waited = |(&place, &counted): (&(u32, u32), &bool)| {
                    (!issued.is_waited_for(round.completion, place, counted)).then_some(place)
                };
                self.send_by(rank, group, round.sends, &issued.bare, issued.held.iter().filter_map(waited).collect());
            }
            return;
        };
        let (mut bare, mut held) = (BTreeMap::<_, BTreeSet<_>>::new(), BTreeMap::<_, BTreeSet<_>>::new());
        let per_block = self.groups / self.plan.blocks;
        for (&(rank, group), issued) in issued {
            self.push(rank, group, Op::block_sync());
            let by = (rank, group / per_block * per_block + leader % per_block);
            bare.entry(by).or_default().extend(&issued.bare);
            held.entry(by).or_default().extend(issued.held.keys().copied());
        }
        for ((rank, group), bare) in bare {
            self.send_by(rank, group, round.sends, &bare, held.remove(&(rank, group)).unwrap_or_default());
        }
    }

    fn send_by(
        &mut self,
        rank: u32,
        group: u32,
        sends: Sends,
        bare: &BTreeSet<(u32, u32)>,
        mut held: BTreeSet<(u32, u32)>,
    ) {
        for &(context, peer) in bare {
            held.remove(&(context, peer));
            *self.signals.entry((peer, context, 0)).or_default() += 1;
            self.push(rank, group, Op::raise(peer, 0).context(context));
        }
        if self.plan.contexts == 1 {
            return;
        }
        let mut nothing = Issued::default();
        for (context, peer) in held {
            match sends {
                Sends::Post => {
                    *self.signals.entry((peer, context, 0)).or_default() += 1;
                    self.push(rank, group, Op::raise(peer, 0).weak().context(context));
                }
                Sends::Flush => self.flush(rank, group, context, &mut nothing),
                Sends::Token => self.token(rank, group, context, peer, &mut nothing),
            }
        }
    }

    /// Assigns a comparison to some group of the rank, which makes it after the signals.
    fn expect(&self, expected: &mut BTreeMap<u32, Vec<Expected>>, rank: u32, check: Op) {
        let all = expected.entry(rank).or_default();
        let group = all.len() as u32 % self.groups.div_ceil(self.stride) * self.stride;
        all.push(Expected { group, check });
    }

    /// Waits until the group's operations are complete, and compares the bytes that it got.
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

/// The operations that a group has issued in a round, by context: peers of puts and gets, and counters.
#[derive(Default)]
struct Issued {
    peers: BTreeMap<u32, BTreeSet<u32>>,
    counters: BTreeMap<u32, BTreeSet<u32>>,
    /// Contexts with a put or get that has no counter.
    uncounted: BTreeSet<u32>,
    /// Comparisons of the bytes that gets bring.
    checks: Vec<Op>,
    /// Peers of the puts that read the group's source.
    reads: BTreeMap<u32, BTreeSet<u32>>,
    /// Contexts and peers with puts that no strong signal covers yet.
    bare: BTreeSet<(u32, u32)>,
    /// Contexts and peers whose last operation has `more`, and whether it has a counter.
    held: BTreeMap<(u32, u32), bool>,
}

impl Issued {
    /// Returns whether the group's waits for completion send the posts to a peer that are held back.
    fn is_waited_for(&self, completion: Completion, (context, peer): (u32, u32), counted: bool) -> bool {
        self.peers.get(&context).is_some_and(|peers| match completion {
            Completion::Tokens => peers.contains(&peer),
            Completion::Counters => self.uncounted.contains(&context) || counted,
            Completion::Flush => true,
        })
    }
}

/// Returns the operations of a group in a round.
fn posts<'a>(
    plan: &'a Plan,
    groups: u32,
    round: &'a Round,
    (rank, group): (u32, u32),
) -> impl Iterator<Item = &'a Post> + use<'a> {
    round
        .posts
        .iter()
        .filter(move |post| post.rank % plan.ranks == rank && post.group.is_none_or(|number| number % groups == group))
}

fn next(count: &mut u64) -> u64 {
    *count += 1;
    *count - 1
}

/// Returns the operation on this signal.
fn of_signal((_, context, id): (u32, u32, u32), op: Op) -> Op {
    if context == NO_CONTEXT { op.at_address(WORDS, 8 * u64::from(id)) } else { op.signal(id).context(context) }
}
