// SPDX-License-Identifier: MIT OR Apache-2.0
//! Operations that post a request: put, put_value, get, signal.
//!
//! Each call returns a [`Post`], a builder that costs nothing: after inlining, a put is straight code with its
//! constants folded in.
//!
//! | file | holds |
//! | --- | --- |
//! | `request` | the kinds of request: a move of bytes, a value, a raise |
//! | `options` | the options that every kind takes |
//! | `check` | the conditions that a post must meet |
//! | `by_stores` | posts by loads and stores |
//! | `prepared` | posts that are checked once and issued many times |
//! | `value` | the values that fit into a request |

mod by_stores;
mod check;
mod options;
mod prepared;
mod request;
mod value;

pub use prepared::Prepared;
pub use value::Value;

use super::Gin;
use crate::backend::Backend;
use crate::coop::{Coop, Warp};
use crate::fault::{self, Fault, Unmet};
use crate::order::Scope;
use crate::signal::{CounterId, Signal, SignalAction};
use crate::sys::GlobalWord;
use crate::team::Rank;
use crate::window::WindowRange;
use by_stores::Raises;
use bytemuck::Pod;
use check::Posted;
use gin_abi::{Deadline, Descriptor, FaultKind, Operation};
use options::Options;
use request::{Arrives, Move, OneValue, Raise, Request};

/// A request that is not posted yet: its kind, its target and its options.
///
/// [`Gin::put`], [`Gin::put_value`], [`Gin::get`] and [`Gin::signal`] make one; [`issue`](Post::issue) posts it.
#[derive(Clone, Copy, Debug)]
#[must_use = "nothing is posted before `issue`"]
pub struct Post<'a, B: Backend, R> {
    gin: &'a Gin<B>,
    peer: Rank,
    request: R,
    options: Options,
}

/// A put that is not posted yet.
pub type Put<'a, B, T> = Post<'a, B, Move<T, true>>;
/// A get that is not posted yet.
pub type Get<'a, B, T> = Post<'a, B, Move<T, false>>;
/// A put of a value that is not posted yet.
pub type PutValue<'a, B> = Post<'a, B, OneValue>;
/// A signal that is not posted yet.
pub type SignalPost<'a, B> = Post<'a, B, Raise>;

impl<B: Backend> Gin<B> {
    /// Writes `source`, a range of the caller's own part of a window, to `destination` on `peer`.
    ///
    /// The two ranges have the same length in bytes, which may be 0, and do not overlap. Nothing is posted before
    /// [`issue`](Post::issue). Puts are not ordered among themselves.
    #[inline(always)]
    pub fn put<T: Pod>(&self, peer: Rank, destination: WindowRange<T>, source: WindowRange<T>) -> Put<'_, B, T> {
        self.request(peer, Move { there: destination, here: source }, Options::new())
    }

    /// Writes a value of 1, 2, 4 or 8 bytes to `destination`, one element, on `peer`.
    ///
    /// The element's offset must be a multiple of its size. Nothing is posted before [`issue`](Post::issue).
    #[inline(always)]
    pub fn put_value<T: Value>(&self, peer: Rank, destination: WindowRange<T>, value: T) -> PutValue<'_, B> {
        self.request(peer, OneValue::new(destination, value), Options::new())
    }

    /// Reads `source` on `peer` into `destination`, a range of the caller's own part of a window.
    ///
    /// The two ranges have the same length in bytes, which may be 0, and do not overlap. Nothing is posted before
    /// [`issue`](Post::issue).
    ///
    /// The data is visible after a [`flush`](Gin::flush), the [`wait`](Gin::wait) for a token, a barrier with a get
    /// fence, or a wait for the get's counter.
    #[inline(always)]
    pub fn get<T: Pod>(&self, peer: Rank, destination: WindowRange<T>, source: WindowRange<T>) -> Get<'_, B, T> {
        self.request(peer, Move { there: source, here: destination }, Options::new())
    }

    /// Raises a signal of `peer`.
    ///
    /// Nothing is posted before [`issue`](Post::issue).
    #[inline(always)]
    pub fn signal(&self, peer: Rank, action: SignalAction) -> SignalPost<'_, B> {
        let options = Options { signal: Some(action), ..Options::new() };
        self.request(peer, Raise { operation: Operation::Signal }, options)
    }

    /// Raises a signal of `peer` after all earlier puts to it of this context have arrived, whichever route they took.
    ///
    /// The signal takes the network, as a strong signal whatever `action` says, so it follows the puts that took the
    /// network. Every post releases earlier writes, stores to the peer included, so the signal follows those too. Only
    /// the receiver's wait for the signal waits for them. Nothing is posted before [`issue`](Post::issue).
    ///
    /// With [`released`](Post::released) the caller promises that it has released its own puts by loads and stores, and
    /// the puts of threads that it synchronised with.
    #[inline(always)]
    pub fn signal_all_routes(&self, peer: Rank, mut action: SignalAction) -> SignalPost<'_, B> {
        action.strong = true;
        let options = Options { signal: Some(action), all_routes: true, ..Options::new() };
        self.request(peer, Raise { operation: Operation::Signal }, options)
    }

    #[inline(always)]
    fn request<R: Request>(&self, peer: Rank, request: R, options: Options) -> Post<'_, B, R> {
        Post { gin: self, peer, request, options }
    }

    /// Returns, for barriers, the word at `peer` of a signal whose id is past the user's ids.
    ///
    /// # Errors
    /// [`FaultKind::NotReachable`] if loads and stores do not reach the peer; the fault of an unusable context.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub(crate) fn peer_word(&self, peer: Rank, id: u32) -> Result<GlobalWord, Fault> {
        let core = self.core();
        let place = core.fault(FaultKind::NotReachable, Operation::Barrier).with_peer(peer.world());
        fault::check!(place, |judge| {
            core.judge(&mut judge);
            judge.condition(core.comm().lsa_reaches(peer), || Unmet::new(FaultKind::NotReachable));
        })?;
        Ok(by_stores::peer_word(core, peer, Signal::Id(id)))
    }

    /// Raises, for barriers, a signal whose id is past the user's ids. The caller has released to the system.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub(crate) fn raise_internal(
        &self,
        peer: Rank,
        action: SignalAction,
        all_routes: bool,
        deadline: Deadline,
    ) -> Result<(), Fault> {
        let (signal, given) = (Some(action), Scope::System);
        let options = Options { signal, internal: true, given, all_routes, deadline, ..Options::new() };
        self.request(peer, Raise { operation: Operation::Barrier }, options).by_one_thread(&Warp, || given)
    }
}

impl<B: Backend, R: Arrives> Post<'_, B, R> {
    /// Raises a signal of the peer once the data has arrived.
    #[inline(always)]
    pub fn signal(mut self, action: SignalAction) -> Self {
        self.options.signal = Some(action);
        self
    }
}

impl<'a, B: Backend, R: Request> Post<'a, B, R> {
    /// Raises a counter of the caller by one once the source may be reused (a get: once the data is visible).
    #[inline(always)]
    pub fn counter(mut self, counter: CounterId) -> Self {
        self.options.counter = Some(counter);
        self
    }

    /// Declares the scope to which the caller has already released the memory that the post depends on; none by
    /// default.
    ///
    /// If it is at least the [`required`](Self::required) scope, the post makes no fence, which saves about 0.6 us on
    /// an H200.
    #[inline(always)]
    pub fn released(mut self, given: Scope) -> Self {
        self.options.given = given;
        self
    }

    /// Sets the scope to which that memory must be released; the system by default, which is always correct.
    ///
    /// [`Scope::Gpu`] is enough if all of the memory is in this GPU and is read through its L2 cache (by a copy engine
    /// or a NIC).
    #[inline(always)]
    pub fn required(mut self, required: Scope) -> Self {
        self.options.required = required;
        self
    }

    /// Announces that another post of this context to this peer follows soon. This post may be held back until then, so
    /// that one doorbell announces both.
    ///
    /// A held-back post is sent when
    /// - the context next posts to that peer without `more` (of lanes that post together, one without sends all), or
    /// - a thread flushes the context or waits for one of its tokens, or
    /// - a thread waits on the context for a signal, a counter or a barrier, as long as its wait lasts.
    ///
    /// Neither a wait on another context nor the end of the kernel sends it; the host sends it when window or
    /// communicator end. The proxy holds nothing back.
    #[inline(always)]
    pub fn more(mut self) -> Self {
        self.options.more = true;
        self
    }

    /// Limits the wait for room in the queue; no limit by default. Loads and stores need no room.
    #[inline(always)]
    pub fn deadline(mut self, deadline: Deadline) -> Self {
        self.options.deadline = deadline;
        self
    }

    /// Posts the request. All threads of `coop` call, with the same arguments.
    ///
    /// | route | put, get | put_value, signal |
    /// | --- | --- | --- |
    /// | network | one thread posts | one thread posts |
    /// | loads and stores | all threads share the bytes | one thread stores |
    ///
    /// Ordering: earlier writes of the coop's threads are released first, at the required scope.
    ///
    /// # Errors
    /// The same in all threads. Nothing was posted, except after [`FaultKind::QueueBroken`].
    ///
    /// | fault | cause |
    /// | --- | --- |
    /// | that of the argument | an argument is wrong |
    /// | [`FaultKind::NotReachable`] | the route is forced to loads and stores, which do not reach the peer |
    /// | [`FaultKind::NotConnected`] | the kernel drives the NIC itself and has no connection to the peer |
    /// | [`FaultKind::Timeout`] | the queue had no room in time |
    /// | [`FaultKind::QueueBroken`] | the deadline passed after a slot was claimed; the communicator ends |
    /// | the communicator's fault or abort | it ended the wait for room |
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn issue(self, coop: &impl Coop) -> Result<(), Fault> {
        called!(here);
        R::issue(&self, coop)
    }

    /// Checks the post and finds the addresses that it needs, so that it can be issued many times. Each thread of the
    /// coop that will issue it prepares it, with the same arguments. Nothing is posted yet.
    ///
    /// ```
    /// # use gin_device::prelude::*;
    /// # fn pass(gin: &Gin, peer: Rank, to: Window<f32>, from: Window<f32>, deadline: Deadline) -> Result<(), Fault> {
    /// let arrived = SignalId::new(0);
    /// let put = gin.put(peer, to.range(0, 64), from.range(0, 64)).signal(arrived.inc()).prepare()?;
    /// let arrival = gin.prepare_wait(arrived)?;
    /// for round in 1..=1000 {
    ///     put.issue(&Warp)?;
    ///     arrival.wait(&Warp, round, deadline)?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Those of [`issue`](Self::issue) for a wrong argument.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn prepare(self) -> Result<Prepared<'a, B, R>, Fault> {
        Prepared::of(self)
    }

    /// Returns whether the post takes loads and stores. Constant for a named back end.
    #[inline(always)]
    fn takes_lsa(&self) -> bool {
        self.gin.takes_lsa(self.peer) && !self.options.all_routes
    }

    /// Checks the post for a route: loads and stores if `lsa`, else the network. Returns the fault of the first unmet
    /// condition: of target and options first, then of the request.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn check(&self, lsa: bool) -> Result<(), Fault> {
        let Self { gin, peer, request, options } = self;
        let (core, operation) = (gin.core(), request.operation());
        let posted = Posted { core, peer: *peer, options, lsa };
        fault::check!(core.fault(FaultKind::BadDescriptor, operation).with_peer(peer.world()), |judge| {
            posted.judge(&mut judge);
            request.judge(&posted, &mut judge);
        })
    }

    #[inline(always)]
    fn raises(&self) -> Raises {
        Raises::of(self.gin.core(), self.peer, &self.options)
    }

    /// Carries out the post in the calling thread, for `coop`, by either route. For loads and stores, `store` stores
    /// the data, if there is any, and returns the scope to which it is released.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn by_one_thread(&self, coop: &impl Coop, store: impl FnOnce() -> Scope) -> Result<(), Fault> {
        let lsa = self.takes_lsa();
        self.check(lsa)?;
        if lsa {
            let raises = self.raises();
            #[cfg(not(target_arch = "nvptx64"))]
            self.told(raises, self.request.ways(self.peer).0, true);
            raises.publish(coop, store());
            return Ok(());
        }
        self.post()
    }

    /// Reports to an executor that the calling thread stores the data of this put to `to`, if it is a put, and that it
    /// raises the signal, if it `raises`.
    #[cfg(not(target_arch = "nvptx64"))]
    fn told(&self, words: Raises, to: u64, raises: bool) {
        let puts = matches!(self.request.operation(), Operation::Put | Operation::PutValue);
        let put = puts.then(|| (to, self.request.transfer().bytes()));
        by_stores::told(self.gin.core().way(self.peer), &self.options, put, raises.then_some(words));
    }

    /// Checks the request and posts it to the back end, in the calling thread.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub(in crate::gin) fn over_network(&self) -> Result<(), Fault> {
        self.check(false)?;
        self.post()
    }

    /// Posts a request that was checked to the back end.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn post(&self) -> Result<(), Fault> {
        let (core, options, operation) = (self.gin.core(), &self.options, self.request.operation());
        // Stores at a peer need a release to the system.
        let required = if options.all_routes { Scope::System } else { options.required };
        B::release(core, options.given, required);
        let descriptor = Descriptor {
            peer: self.peer.world(),
            transfer: self.request.transfer(),
            signal: options.signal.as_ref().map(SignalAction::remote),
            counter: options.counter.map(|counter| counter.0),
            more: options.more,
        };
        watch!(posted(self.request.own(), core.way(self.peer), &descriptor, options.all_routes));
        B::post(core, &descriptor, operation, options.deadline).map_err(|stop| {
            watch!(event(crate::exec::watch::Event::Refused));
            B::explain(core, descriptor.peer, stop, operation, options.deadline)
        })
    }
}
