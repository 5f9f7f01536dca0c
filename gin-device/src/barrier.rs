// SPDX-License-Identifier: MIT OR Apache-2.0
//! Barriers over a team, built on signals.
//!
//! Arrivals take the routes of the session's `Gin`. To an LSA peer, the caller's GPU raises the peer's word; to another
//! peer, the back end sends a request. So a barrier of the LSA team needs neither proxy nor NIC. [`CombinedBarrier`]
//! meets all ranks by such a barrier and one step over the network.
//!
//! A barrier has one signal for each member of its team. To arrive over the network, a rank raises its own signal at
//! every member; to wait, it waits for every member's signal at itself. If all arrivals take loads and stores, each
//! word has one writer, so a rank stores the number of the round instead, and the others wait for that number
//! (`epoch`). The shadows of the signals count the rounds. They are in the rank's own memory, so a barrier continues
//! from kernel to kernel. The threads of the coop share the members.
//!
//! ```
//! # use gin_device::prelude::*;
//! # fn meet(gin: &Gin, deadline: Deadline) -> Result<(), Fault> {
//! let mut barrier = BarrierSession::new(gin, BarrierTeam::World, 0)?;
//! barrier.sync(&Block, Fence::Put, deadline)?;
//! # Ok(())
//! # }
//! ```
//!
//! # Order
//! `arrive` releases earlier writes of the coop's threads to the system. `wait` acquires the writes that the other
//! ranks released. The [`Fence`] names the operations under way that the barrier waits for.
//!
//! | fence | after the barrier |
//! | --- | --- |
//! | [`Fence::Put`] | the puts of others to this rank are visible |
//! | [`Fence::Get`] | the caller's gets have arrived, and the sources of its puts may be reused |
//!
//! With a put fence the arrivals are strong signals; a session over all contexts raises one in each context. With
//! [`all_routes`](BarrierSession::all_routes) it also covers puts that took another route than the arrival.

use crate::backend::Backend;
use crate::coop::Coop;
use crate::epoch;
use crate::fault::{self, Fault};
use crate::gin::{Gin, is_time_to_look, look_around, signal_tables};
use crate::host_word::LAST;
use crate::order::{Scope, release};
use crate::signal::{ContextId, SignalAction, SignalId};
use crate::status::Shared;
use crate::sys::{Global, GlobalWord, Word, stay, stay_word};
use crate::team::Team;
use gin_abi::handle::CAP_STRONG_SIGNALS;
use gin_abi::{Deadline, FaultKind, FaultSubject, Operation, SIGNAL_BITS};

/// The team of ranks that meet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BarrierTeam {
    /// All ranks.
    World,
    /// The ranks with the caller's place in their LSA teams.
    Rail,
    /// The ranks of the caller's LSA team.
    Lsa,
}

/// The operations that a barrier waits for besides the other ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fence {
    /// Nothing.
    None,
    /// Puts of other ranks to this rank, issued before those arrived, are visible.
    Put,
    /// The caller's gets have arrived.
    Get,
    /// Both.
    PutGet,
}

impl Fence {
    #[inline(always)]
    const fn puts(self) -> bool {
        matches!(self, Fence::Put | Fence::PutGet)
    }

    #[inline(always)]
    const fn gets(self) -> bool {
        matches!(self, Fence::Get | Fence::PutGet)
    }
}

/// One use, or several, of a barrier by a coop.
///
/// All ranks of the team use the same barrier number, contexts and fences, in the same order. A session belongs to the
/// coop that made it; all threads of the coop make the same calls.
///
/// All uses of a barrier number are alike: the same route or named back end, and with or without
/// [`all_routes`](Self::all_routes). Arrivals are counted, and an arrival on another route than the previous one could
/// overtake it.
///
/// A barrier number has one live session at a time, because a session remembers the number of rounds. A session that
/// finds that another one has met ends with [`FaultKind::BarrierBroken`].
///
/// A barrier that ended with a fault, a deadline included, is broken, because the progress of the other ranks is
/// unknown. It refuses every later use, in this session or another.
#[derive(Debug)]
pub struct BarrierSession<B: Backend> {
    /// A copy: a reference would put it on the stack.
    gin: Gin<B>,
    team: Team,
    first_signal: u32,
    broken: GlobalWord,
    index: u32,
    all_contexts: bool,
    all_routes: bool,
    /// Some arrival, which may be the caller's own, takes the network.
    by_network: bool,
    /// The fence of a successful arrival, until the wait.
    arrived: Option<Fence>,
    /// The scope to which the caller releases before it arrives.
    given: Scope,
    /// The first use has found the barrier not broken, and the words of all members.
    resolved: bool,
    /// The barrier ended with a fault in this session.
    failed: bool,
    /// The number of threads with which a coop can [meet](Self::meet) all members; [`u32::MAX`] if none can.
    meets_by: u32,
    /// The calling thread's first member, if no arrival takes the network. To find its words again would take two trips
    /// to L2, one after the other, because a wait that acquired has emptied the L1.
    near: Near,
}

/// The words of a member that the calling thread meets by loads and stores, and the number of their rounds.
///
/// The shadow counts the rounds that this rank has completed, or, while it waits in [`meet`](BarrierSession::meet), the
/// present one too.
///
/// Not in an `Option`, whose words would have no value at first: such registers stay live round a kernel's loops.
#[derive(Clone, Copy, Debug)]
struct Near {
    /// The member's place among the others; [`u32::MAX`] if this is no member.
    place: u32,
    /// The word at the member that only this rank writes.
    there: GlobalWord,
    /// The word of this rank that only the member writes.
    here: GlobalWord,
    /// The number of rounds so far, in this rank's memory.
    shadow: GlobalWord,
    /// The value of `shadow`.
    met: u64,
    /// The epoch of the last of these rounds.
    epoch: u64,
}

impl Near {
    #[inline(always)]
    fn none() -> Self {
        // Safety: nothing accesses the words.
        let word = unsafe { GlobalWord::new(0) };
        Self { place: u32::MAX, there: word, here: word, shadow: word, met: 0, epoch: 0 }
    }

    /// Counts `rounds` more rounds, modulo 2^64.
    #[inline(always)]
    fn count(&mut self, rounds: u64) {
        (self.met, self.epoch) = (self.met.wrapping_add(rounds), self.epoch.wrapping_add(rounds));
    }

    /// Returns the difference between a shadow and its epoch: the sum of the signal's words that nothing raises.
    #[inline(always)]
    fn rest(&self) -> u64 {
        self.met.wrapping_sub(self.epoch)
    }
}

/// Returns the fault of a barrier that the team does not have: it has `count`.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
fn unknown<B: Backend>(gin: &Gin<B>, index: u32, count: u32) -> Fault {
    let fault = gin.core().fault(FaultKind::UnknownBarrier, Operation::Barrier);
    fault.with_values(FaultSubject::Barrier(index), count as u64, index as u64)
}

impl<B: Backend> BarrierSession<B> {
    /// Returns a session of barrier `index` of the team, for operations of `gin`'s context.
    ///
    /// # Errors
    /// [`FaultKind::UnknownBarrier`] with the number of barriers, [`FaultKind::UnknownContext`].
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn new(gin: &Gin<B>, team: BarrierTeam, index: u32) -> Result<Self, Fault> {
        gin.core().check(Operation::Barrier)?;
        let handle = gin.comm().handle();
        let (world, rail) = (handle.world_barriers, handle.rail_barriers);
        let rail_size = handle.ranks / handle.lsa_size;
        let after_world = handle.signals + world * handle.ranks;
        let (members, count, first_signal, before) = match team {
            BarrierTeam::World => (gin.comm().world(), world, handle.signals, 0),
            BarrierTeam::Rail => (gin.comm().rail(), rail, after_world, world),
            BarrierTeam::Lsa => (gin.comm().lsa(), handle.lsa_barriers, after_world + rail * rail_size, world + rail),
        };
        if index >= count {
            return Err(unknown(gin, index, count));
        }
        Ok(Self {
            gin: *gin,
            index,
            team: members,
            first_signal: first_signal + index * members.size(),
            // Safety: there is a word for each barrier, and the index was checked.
            broken: unsafe { GlobalWord::new(handle.barrier_state + 8 * u64::from(before + index)) },
            all_contexts: false,
            all_routes: false,
            by_network: Self::goes_by_network(gin, team, &members),
            arrived: None,
            given: Scope::Thread,
            resolved: false,
            failed: false,
            meets_by: u32::MAX,
            near: Near::none(),
        })
    }

    /// Returns whether some arrival takes the network.
    #[inline(always)]
    fn goes_by_network(gin: &Gin<B>, team: BarrierTeam, members: &Team) -> bool {
        // A forced route refuses a member that it does not reach.
        if B::LSA && gin.core().forces_lsa() {
            return false;
        }
        let reach = gin.comm().lsa_reach();
        let outside = match team {
            BarrierTeam::World => reach < members.size(),
            // A rail has one member of each LSA team.
            BarrierTeam::Rail => reach == 0 || members.size() > 1,
            BarrierTeam::Lsa => reach == 0,
        };
        !gin.takes_lsa(members.me()) || outside
    }

    /// Returns the same barrier with put fences that cover puts of both [routes](crate::gin#routes), for kernels that
    /// force a route. All of its arrivals take the network.
    #[inline(always)]
    #[must_use]
    pub fn all_routes(mut self) -> Self {
        (self.all_routes, self.by_network) = (true, true);
        self
    }

    /// Returns the same barrier with fences that cover the operations of all contexts of the communicator.
    #[inline(always)]
    #[must_use]
    pub fn all_contexts(mut self) -> Self {
        self.all_contexts = true;
        self
    }

    /// Returns the same barrier for a caller that releases to `scope` before each arrival: its own writes, and those of
    /// the threads that it synchronised with. With [`Scope::System`] an arrival makes no fence.
    #[inline(always)]
    #[must_use]
    pub fn released(mut self, scope: Scope) -> Self {
        self.given = scope;
        self
    }

    #[inline(always)]
    fn contexts(&self) -> core::ops::Range<u32> {
        let own = self.gin.context().0;
        if self.all_contexts { 0..self.gin.comm().contexts() } else { own..own + 1 }
    }

    /// Returns the number of (context, member) pairs. A signal in each context is needed only to cover its puts.
    #[inline(always)]
    fn pairs(&self, fence: Fence) -> usize {
        let contexts = self.contexts();
        let signalled = if fence.puts() { contexts.end - contexts.start } else { 1 };
        signalled as usize * self.team.size() as usize
    }

    /// Returns context and rank in the team of pair `pair`; the next member first, the caller itself last.
    #[inline(always)]
    fn pair(&self, pair: usize) -> (Gin<B>, u32) {
        let size = self.team.size();
        // Avoids a division, which takes as long as a trip to L2: most sessions are over one context.
        let (past, step) =
            if (pair as u32) < size { (0, pair as u32) } else { (pair as u32 / size, pair as u32 % size) };
        let left = size - 1 - self.team.rank();
        let member = if step < left { self.team.rank() + 1 + step } else { step - left };
        (self.gin.in_context(ContextId(self.contexts().start + past)), member)
    }

    /// Checks that the barrier is not broken. All threads of `coop` call and meet.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn usable(&self, coop: &impl Coop) -> Result<(), Fault> {
        let broken = self.broken.load_relaxed_gpu() != 0;
        let fault = self.gin.core().fault(FaultKind::BarrierBroken, Operation::Barrier);
        fault::here(coop.agree(if broken { Err(fault) } else { Ok(()) }))
    }

    /// Returns the signal that this rank raises at the others.
    #[inline(always)]
    fn arrival(&self) -> SignalAction {
        SignalId::new(self.first_signal + self.team.rank()).inc()
    }

    /// Returns the number of other members. A rank does not meet itself by loads and stores.
    #[inline(always)]
    fn others(&self) -> u32 {
        self.team.size() - 1
    }

    /// Finds the words of the other member number `place`. No arrival takes the network.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn find(&self, place: u32) -> Result<Near, Fault> {
        let next = self.team.rank() + 1 + place;
        let member = if next < self.team.size() { next } else { next - self.team.size() };
        let there = self.gin.peer_word(self.team.member(member)?, self.first_signal + self.team.rank())?;
        let (words, shadow) = signal_tables(self.gin.core(), self.first_signal + member);
        // All arrivals of one barrier take the same route, so only GPUs raise its signals: the other words keep their
        // initial values.
        let (met, rest) = (shadow.load_relaxed_gpu(), words.near.at(LAST).load_relaxed_gpu());
        let epoch = met.wrapping_sub(rest);
        Ok(Near { place, there, here: words.gpu.unwrap_or(words.near), shadow, met, epoch })
    }

    /// Returns the words of a member, remembered or found again: they were found at the first use.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn known(&self, place: u32) -> Near {
        if place == self.near.place { self.near } else { self.find(place).unwrap_or(Near::none()) }
    }

    /// Finds the words of all other members. All threads of `coop` call, at the first use.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn resolve(&mut self, coop: &impl Coop) -> Result<(), Fault> {
        let mut outcome = Ok(());
        for place in coop.stripe(self.others() as usize) {
            match self.find(place as u32) {
                Ok(near) if self.near.place == u32::MAX => self.near = near,
                Ok(_) => {}
                Err(fault) => {
                    outcome = Err(fault);
                    break;
                }
            }
        }
        if self.broken.load_relaxed_gpu() != 0 {
            outcome = Err(self.gin.core().fault(FaultKind::BarrierBroken, Operation::Barrier));
        }
        let outcome = fault::here(coop.agree(outcome));
        self.resolved = outcome.is_ok();
        self.meets_by = if outcome.is_ok() { self.others() } else { u32::MAX };
        outcome
    }

    /// Does [`arrive`](Self::arrive) by stores. Later uses than the first make no vote.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn arrive_near(&mut self, coop: &impl Coop, fence: Fence) -> Result<(), Fault> {
        if self.failed {
            return Err(self.gin.core().fault(FaultKind::BarrierBroken, Operation::Barrier));
        }
        if self.resolved {
            coop.sync();
        } else {
            self.resolve(coop)?;
        }
        let mut released = false;
        for place in coop.stripe(self.others() as usize) {
            let near = self.known(place as u32);
            if !released {
                release::<Global>(self.given, Scope::System);
                released = true;
            }
            epoch::arrive(near.there, near.epoch.wrapping_add(1));
        }
        self.arrived = Some(fence);
        Ok(())
    }

    /// Waits for all other members, by loads. Every thread of the coop calls. After a [`meet`](Self::meet) in vain,
    /// which has counted the round, `found` has the value of the shadow before.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn wait_near(&mut self, coop: &impl Coop, deadline: Shared, found: Option<u64>) -> Result<(), Fault> {
        let core = self.gin.core();
        let status = core.status();
        let (mut outcome, mut waited) = (Ok(()), false);
        let left = u64::from(found.is_none());
        for place in coop.stripe(self.others() as usize) {
            let near = self.known(place as u32);
            // The loads overlap the wait. They find another session that used the barrier meanwhile.
            let met = found.unwrap_or_else(|| near.shadow.load_relaxed_gpu());
            let (before, next) = (near.met.wrapping_sub(1 - left), near.epoch.wrapping_add(left));
            let broken = self.broken.load_relaxed_gpu();
            waits!(Some(core.fault(FaultKind::Timeout, Operation::Barrier).with_values(
                FaultSubject::Barrier(self.index),
                next,
                0
            )));
            let met_here = epoch::wait::<Global>(near.here, next, &status, deadline.left::<Global>(), || {
                B::attend(core);
                broken == 0
            });
            waited = true;
            let looked = look_around::<B>(core, found.is_some());
            let looked = looked.map_err(|stop| (stop, next));
            let peer = self.team.member((self.team.rank() + 1 + place as u32) % self.team.size());
            let fault = core.fault(FaultKind::Timeout, Operation::Barrier);
            let fault = fault.with_peer(peer.map_or(gin_abi::fault::NONE, |rank| rank.world()));
            if (met, broken) != (before, 0) {
                let fault = fault.with_kind(FaultKind::BarrierBroken);
                outcome = Err(fault.with_values(FaultSubject::Barrier(self.index), before, met));
                break;
            }
            if let Err((stop, seen)) = met_here.and(looked) {
                let (expected, seen) = (next.wrapping_add(near.rest()), seen.wrapping_add(near.rest()));
                let subject = FaultSubject::Barrier(self.index);
                outcome = Err(status.explain(stop, fault, subject, deadline.whole(), expected, seen));
                break;
            }
            near.shadow.store_relaxed_gpu(met.wrapping_add(1));
        }
        if waited {
            epoch::acquire::<Global>();
        }
        self.near.count(left);
        outcome
    }

    /// Signals to all members that this rank has arrived. All threads of `coop` call.
    ///
    /// Ordering: earlier writes of the coop's threads are released, at system scope.
    ///
    /// # Errors
    /// The same in all threads: [`FaultKind::BarrierBroken`]; [`FaultKind::NoStrongSignals`] if the fence covers puts
    /// and the network has no strong signals; the fault of a post, which breaks the barrier.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn arrive(&mut self, coop: &impl Coop, fence: Fence, deadline: Deadline) -> Result<(), Fault> {
        if !self.by_network {
            return self.arrive_near(coop, fence);
        }
        self.usable(coop)?;
        let strong = self.gin.comm().handle().capabilities & CAP_STRONG_SIGNALS != 0;
        if fence.puts() && !strong {
            return Err(self.gin.core().fault(FaultKind::NoStrongSignals, Operation::Barrier));
        }
        let mut outcome = Ok(());
        let mut released = false;
        let deadline = Shared::start::<Global>(deadline);
        for pair in coop.stripe(self.pairs(fence)) {
            if !released {
                release::<Global>(self.given, Scope::System);
                released = true;
            }
            let (gin, member) = self.pair(pair);
            // Strong if possible: a weak arrival could overtake the strong arrival at the previous barrier.
            let action = if strong { self.arrival() } else { self.arrival().weak() };
            let peer = self.team.member(member);
            outcome =
                peer.and_then(|peer| gin.raise_internal(peer, action, self.all_routes, deadline.left::<Global>()));
            if outcome.is_err() {
                break;
            }
        }
        let outcome = self.finish(coop, outcome);
        self.arrived = outcome.is_ok().then_some(fence);
        outcome
    }

    /// Waits until all members have arrived. All threads of `coop` call, after [`arrive`](Self::arrive).
    ///
    /// Ordering: acquire, at system scope, in all threads of the coop.
    ///
    /// # Errors
    /// The same in all threads: [`FaultKind::Timeout`] with the first member found missing; the fault or abort that
    /// ended the wait; [`FaultKind::BarrierBroken`] if the barrier is broken or this session has not
    /// arrived.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn wait(&mut self, coop: &impl Coop, deadline: Deadline) -> Result<(), Fault> {
        self.wait_on(coop, deadline, None)
    }

    /// Does [`wait`](Self::wait). If a [`meet`](Self::meet) was in vain, `found` has its value of the shadow, and the
    /// wait reads the host's status; otherwise it does that rarely.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn wait_on(&mut self, coop: &impl Coop, deadline: Deadline, found: Option<u64>) -> Result<(), Fault> {
        // A successful arrival found the barrier not broken.
        let Some(fence) = self.arrived.take() else {
            return Err(self.gin.core().fault(FaultKind::BarrierBroken, Operation::Barrier));
        };
        // Only this rare way reads the limit.
        let deadline = Shared::start::<Global>(Deadline::after_ns(stay_word(deadline.ns())));
        let mut outcome = if self.by_network {
            self.wait_network(coop, fence, deadline)
        } else {
            self.wait_near(coop, deadline, found)
        };
        if outcome.is_ok() && fence.gets() {
            for context in coop.stripe(self.contexts().len()) {
                let gin = self.gin.in_context(ContextId(self.contexts().start + context as u32));
                outcome = gin.flush_here(deadline.left::<Global>());
                if outcome.is_err() {
                    break;
                }
            }
        }
        self.finish(coop, outcome)
    }

    /// Waits for all members, whose arrivals are counted.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn wait_network(&self, coop: &impl Coop, fence: Fence, deadline: Shared) -> Result<(), Fault> {
        for pair in coop.stripe(self.pairs(fence)) {
            let (gin, member) = self.pair(pair);
            let (words, shadow) = signal_tables(gin.core(), self.first_signal + member);
            let expected = shadow.load_relaxed_gpu().wrapping_add(1);
            shadow.store_relaxed_gpu(expected);
            let status = self.gin.core().status();
            waits!(Some(gin.core().fault(FaultKind::Timeout, Operation::Barrier).with_values(
                FaultSubject::Barrier(self.index),
                expected,
                0
            )));
            let waited =
                words.wait(&status, expected, SIGNAL_BITS, deadline.left::<Global>(), || B::attend(self.gin.core()));
            let looked = look_around::<B>(self.gin.core(), false).map_err(|stop| (stop, expected));
            if let Err((stop, seen)) = waited.and(looked) {
                let peer = self.team.member(member).map_or(gin_abi::fault::NONE, |rank| rank.world());
                let timeout = gin.core().fault(FaultKind::Timeout, Operation::Barrier).with_peer(peer);
                let subject = FaultSubject::Barrier(self.index);
                return Err(status.explain(stop, timeout, subject, deadline.whole(), expected, seen));
            }
        }
        Ok(())
    }

    /// Makes this session that of an earlier [`arrive`](Self::arrive) with this fence, so that it can wait. For the
    /// functions of C, which keep no session between two calls. All threads of `coop` call.
    ///
    /// # Errors
    /// The same in all threads: [`FaultKind::BarrierBroken`].
    #[doc(hidden)]
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn resume(&mut self, coop: &impl Coop, fence: Fence) -> Result<(), Fault> {
        if self.by_network { self.usable(coop) } else { self.resolve(coop) }?;
        self.arrived = Some(fence);
        Ok(())
    }

    /// Calls [`arrive`](Self::arrive), then [`wait`](Self::wait); each may last as long as `deadline`.
    ///
    /// # Errors
    /// As these two.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn sync(&mut self, coop: &impl Coop, fence: Fence, deadline: Deadline) -> Result<(), Fault> {
        let mut found = None;
        // The same in all threads.
        if fence.gets() | (self.meets_by > coop.size()) {
            self.arrive(coop, fence, deadline)?;
        } else {
            match self.meet(coop) {
                Ok(()) => return Ok(()),
                Err(shadow) => (found, self.arrived) = (Some(shadow), Some(fence)),
            }
        }
        self.wait_on(coop, deadline, found)
    }

    /// Arrives by stores, and waits a short time, by one member or none for each thread. Later uses than the first
    /// call. All threads of `coop` call and meet.
    ///
    /// It does what [`arrive_near`](Self::arrive_near) and [`wait_near`](Self::wait_near) do, with nothing between
    /// fence and store, or between the poll that succeeds and the one vote: what else there is to do overlaps the trip.
    ///
    /// # Errors
    /// The value that the shadow had, if not all members were met: the caller waits on.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn meet(&mut self, coop: &impl Coop) -> Result<(), u64> {
        coop.sync();
        let (mut late, mut shadow) = (false, 0);
        // False also in a coop that has not made the session.
        if coop.rank() == self.near.place {
            self.near.count(1);
            let near = &self.near;
            release::<Global>(self.given, Scope::System);
            epoch::arrive(near.there, near.epoch);
            let first = near.here.load_relaxed_sys();
            shadow = near.shadow.load_relaxed_gpu();
            let broken = self.broken.load_relaxed_gpu();
            near.shadow.store_relaxed_gpu(near.met);
            let fails = (shadow.wrapping_add(1) != near.met) | (broken != 0) | is_time_to_look();
            // Compared before the polls, not after them.
            let fails = stay(u32::from(fails)) != 0;
            late = fails | !epoch::spin::<Global>(near.here, first, near.epoch);
            epoch::acquire::<Global>();
        }
        if !coop.sync_or(late) {
            return Ok(());
        }
        Err(shadow)
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn finish(&mut self, coop: &impl Coop, outcome: Result<(), Fault>) -> Result<(), Fault> {
        let outcome = fault::here(coop.agree(outcome));
        if outcome.is_err() {
            (self.failed, self.meets_by) = (true, u32::MAX);
            if coop.elect() {
                self.broken.store_relaxed_gpu(1);
            }
        }
        outcome
    }
}

/// A barrier over all ranks in two steps: the LSA team meets, then the rail.
///
/// Once its LSA team has met, a rank's arrival at the rail stands for that team. So when the rail has met, all ranks
/// have met. Each rank makes `lsa_size + ranks / lsa_size` arrivals instead of `ranks`, and only those of the rail take
/// the network.
///
/// With a put fence there is one step instead: only a signal of its sender covers a put over the network, so the ranks
/// meet as [`BarrierTeam::World`], each arrival on its peer's route.
///
/// A combined barrier uses barrier number `index` of all three teams. All ranks use the same number, contexts and
/// fences, in the same order. A step that ended with a fault breaks the barrier of its team, which then refuses every
/// later use.
#[derive(Debug)]
pub struct CombinedBarrier<B: Backend> {
    gin: Gin<B>,
    index: u32,
    all_contexts: bool,
}

impl<B: Backend> CombinedBarrier<B> {
    /// Returns the barrier with number `index` of each team, for operations of `gin`'s context.
    ///
    /// # Errors
    /// [`FaultKind::UnknownBarrier`] with the number of barriers that each team has, [`FaultKind::UnknownContext`].
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn new(gin: &Gin<B>, index: u32) -> Result<Self, Fault> {
        gin.core().check(Operation::Barrier)?;
        let handle = gin.comm().handle();
        let count = handle.world_barriers.min(handle.lsa_barriers).min(handle.rail_barriers);
        if index >= count {
            return Err(unknown(gin, index, count));
        }
        Ok(Self { gin: *gin, index, all_contexts: false })
    }

    /// Returns the same barrier with fences that cover the operations of all contexts of the communicator.
    #[inline(always)]
    #[must_use]
    pub fn all_contexts(mut self) -> Self {
        self.all_contexts = true;
        self
    }

    /// Waits for all ranks. All threads of `coop` call. Each arrival and each wait may last as long as `deadline`.
    ///
    /// Ordering: as [`BarrierSession`]. Earlier writes of a rank are visible to all ranks afterwards, also in other
    /// teams, because each step acquires and the next step releases.
    ///
    /// # Errors
    /// As [`BarrierSession::sync`].
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn sync(&mut self, coop: &impl Coop, fence: Fence, deadline: Deadline) -> Result<(), Fault> {
        let mut team = if fence.puts() { BarrierTeam::World } else { BarrierTeam::Lsa };
        // A loop, so that the kernel has the code of a step once.
        loop {
            let mut session = BarrierSession::new(&self.gin, team, self.index)?;
            session.all_contexts = self.all_contexts;
            session.sync(coop, if team == BarrierTeam::Lsa { Fence::None } else { fence }, deadline)?;
            if team != BarrierTeam::Lsa {
                return Ok(());
            }
            team = BarrierTeam::Rail;
        }
    }
}
