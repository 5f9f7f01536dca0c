// SPDX-License-Identifier: MIT OR Apache-2.0
//! Operations that post a request: put, put_value, get, signal.
//!
//! Each is a builder that costs nothing: after inlining, a put is straight code with its constants folded in.

mod by_stores;
mod check;
mod options;
mod value;

pub(crate) use by_stores::Raises;
pub use value::Value;

use super::{Core, Gin, Scope};
use crate::backend::Backend;
use crate::coop::{Coop, lead};
use crate::signal::{CounterId, SignalAction};
use crate::status::WaitError;
use crate::sys::data::{store_weak_u8, store_weak_u16, store_weak_u32, store_weak_u64};
use crate::team::Rank;
use crate::window::WindowRange;
use by_stores::move_bytes;
use bytemuck::Pod;
use check::{Both, NoRanges, One, Posted};
use gin_abi::{Deadline, Descriptor, Fault, FaultKind, Operation, Transfer, WindowOffset};
use options::Options;

/// How a post goes: whether by loads and stores. Known when compiling for a back end that is named.
#[inline(always)]
fn takes_lsa<B: Backend>(gin: &Gin<B>, peer: Rank, options: &Options) -> bool {
    gin.takes_lsa(peer) && !options.all_routes
}

#[inline(always)]
fn post<B: Backend>(
    core: &Core,
    peer: Rank,
    transfer: Transfer,
    options: &Options,
    operation: Operation,
) -> Result<(), WaitError> {
    // Stores at a peer need a release to the system.
    let required = if options.all_routes { Scope::System } else { options.required };
    B::release(core, options.given, required);
    let request = Descriptor {
        peer: peer.world(),
        transfer,
        signal: options.signal.as_ref().map(SignalAction::remote),
        counter: options.counter.map(|counter| counter.0),
        more: options.more,
    };
    B::post(core, &request, operation, options.deadline)
}

/// The fault of a post that was right and ended early.
#[inline(always)]
fn ended(core: &Core, peer: Rank, operation: Operation, stop: WaitError) -> Fault {
    core.status().explain(stop, core.fault(FaultKind::Timeout, operation).peer(peer.world()))
}

impl<B: Backend> Gin<B> {
    /// Writes `source`, a range of the caller's own part of a window, to `destination` on `peer`.
    ///
    /// The two ranges have the same length in bytes, which may be 0, and do not overlap. Nothing is posted before
    /// [`issue`](Put::issue). Puts are not ordered among themselves.
    #[inline(always)]
    pub fn put<T: Pod>(&self, peer: Rank, destination: WindowRange<T>, source: WindowRange<T>) -> Put<'_, B, T> {
        Put { gin: self, peer, destination, source, options: Options::new() }
    }

    /// Writes a value of 1, 2, 4 or 8 bytes to `destination`, one element, on `peer`.
    ///
    /// The element's offset must be a multiple of its size. Nothing is posted before [`issue`](PutValue::issue).
    #[inline(always)]
    pub fn put_value<T: Value>(&self, peer: Rank, destination: WindowRange<T>, value: T) -> PutValue<'_, B> {
        let width_log2 = const { size_of::<T>().trailing_zeros() };
        let (destination, value) = (destination.as_bytes(), value.to_word());
        PutValue { gin: self, peer, destination, value, width_log2, options: Options::new() }
    }

    /// Reads `source` on `peer` into `destination`, a range of the caller's own part of a window.
    ///
    /// The two ranges have the same length in bytes, which may be 0, and do not overlap. What it brings is visible
    /// after a [`flush`](Gin::flush), the [`wait`](Gin::wait) for a token, or a barrier with a get fence; also after a
    /// wait for its counter. Nothing is posted before [`issue`](Get::issue).
    #[inline(always)]
    pub fn get<T: Pod>(&self, peer: Rank, destination: WindowRange<T>, source: WindowRange<T>) -> Get<'_, B, T> {
        Get { gin: self, peer, destination, source, options: Options::new() }
    }

    /// Raises a signal of `peer`.
    ///
    /// Nothing is posted before [`issue`](SignalPost::issue).
    #[inline(always)]
    pub fn signal(&self, peer: Rank, action: SignalAction) -> SignalPost<'_, B> {
        SignalPost { gin: self, peer, options: Options { signal: Some(action), ..Options::new() } }
    }

    /// Raises a signal of `peer` after all earlier puts to it of this context have arrived, whichever route they took.
    ///
    /// It goes over the network, as a strong signal whatever `action` says, so it comes after the puts that went there.
    /// Every post releases earlier writes, stores to the peer included, so it comes after those too. Only the
    /// receiver's wait for the signal waits for them. Nothing is posted before [`issue`](SignalPost::issue).
    ///
    /// With [`released`](SignalPost::released) the caller promises that it has released its own puts by loads and
    /// stores, and the puts of threads that it synchronised with.
    #[inline(always)]
    pub fn signal_all_routes(&self, peer: Rank, mut action: SignalAction) -> SignalPost<'_, B> {
        action.strong = true;
        SignalPost { gin: self, peer, options: Options { signal: Some(action), all_routes: true, ..Options::new() } }
    }

    /// For barriers: looks up a signal whose id is past those of the user, at a peer that takes loads and stores.
    #[inline(always)]
    pub(crate) fn find_internal(&self, peer: Rank, action: SignalAction) -> Result<Raises, Fault> {
        let (core, options) = (self.core(), &Options { signal: Some(action), internal: true, ..Options::new() });
        Posted { core, peer, options, operation: Operation::Barrier, lsa: true }.check(&NoRanges)?;
        Ok(Raises::of(core, peer, options))
    }

    /// For barriers: raises a signal whose id is past the user's ids. The caller has released to the system.
    #[inline(always)]
    pub(crate) fn raise_internal(
        &self,
        peer: Rank,
        action: SignalAction,
        all_routes: bool,
        deadline: Deadline,
    ) -> Result<(), Fault> {
        let (core, operation) = (self.core(), Operation::Barrier);
        let options = Options {
            signal: Some(action),
            internal: true,
            given: Scope::System,
            all_routes,
            deadline,
            ..Options::new()
        };
        let lsa = takes_lsa(self, peer, &options);
        Posted { core, peer, options: &options, operation, lsa }.check(&NoRanges)?;
        if lsa {
            Raises::of(core, peer, &options).publish(options.given);
            return Ok(());
        }
        let posted = post::<B>(core, peer, Transfer::Nothing, &options, operation);
        posted.map_err(|stop| ended(core, peer, operation, stop))
    }
}

macro_rules! builder {
    (signal) => {
        /// Raises a signal of the peer once this has arrived.
        #[inline(always)]
        pub fn signal(mut self, action: SignalAction) -> Self {
            self.options.signal = Some(action);
            self
        }
    };
    (counter) => {
        /// Raises an own counter by one once the source may be reused (a get: once the data is visible).
        #[inline(always)]
        pub fn counter(mut self, counter: CounterId) -> Self {
            self.options.counter = Some(counter);
            self
        }
    };
    (common) => {
        /// Says how far the memory that this depends on has been released by the caller already; none by default.
        ///
        /// At or past the [`required`](Self::required) scope no fence is made: about 0.6 us less on an H200.
        #[inline(always)]
        pub fn released(mut self, given: Scope) -> Self {
            self.options.given = given;
            self
        }

        /// Says how far it needs to be released: to the system by default, which is always right.
        ///
        /// [`Scope::Gpu`] is enough when all of it lies in this GPU's memory and is read through its L2 cache (by a
        /// copy engine or a NIC).
        #[inline(always)]
        pub fn required(mut self, required: Scope) -> Self {
            self.options.required = required;
            self
        }

        /// Announces that another post of this context to this peer follows soon. This post may be held back until
        /// then, so that one doorbell announces both.
        ///
        /// A held-back post is sent when
        /// - the context next posts to that peer without `more` (of lanes that post together, one without sends all),
        ///   or
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

        /// How long to wait for room in the queue; no limit by default. Loads and stores need no room.
        #[inline(always)]
        pub fn deadline(mut self, deadline: Deadline) -> Self {
            self.options.deadline = deadline;
            self
        }
    };
    (led) => {
        /// Posts it. All threads of `coop` call; one posts.
        ///
        /// Ordering: what the threads of the coop wrote before is released first, at the required scope.
        ///
        /// # Errors
        /// The same in all threads: what is wrong with the arguments (nothing was posted); [`FaultKind::NotConnected`]
        /// if a kernel that drives the NIC itself has no connection to the peer (nothing was posted);
        /// [`FaultKind::Timeout`] if the queue had no room in time (nothing was posted); [`FaultKind::QueueBroken`] if
        /// the deadline passed after a slot was claimed, which ends the communicator; the fault or abort that ended the
        /// wait for room.
        #[inline(always)]
        pub fn issue(self, coop: &impl Coop) -> Result<(), Fault> {
            lead!(coop, self.post())
        }
    };
    (shared) => {
        /// Posts it, or, to a peer that loads and stores reach, does it: all threads of `coop` call, with the same
        /// arguments, and share the bytes.
        ///
        /// Ordering: what the threads of the coop wrote before is released first, at the required scope.
        ///
        /// # Errors
        /// The same in all threads: what is wrong with the arguments, [`FaultKind::NotReachable`] for a route that was
        /// forced included, or [`FaultKind::NotConnected`] if a kernel that drives the NIC itself has no connection to
        /// the peer (nothing was posted); [`FaultKind::Timeout`] if the queue had no room in time (nothing was posted);
        /// [`FaultKind::QueueBroken`] if the deadline passed after a slot was claimed, which ends the communicator; the
        /// fault or abort that ended the wait for room.
        #[inline(always)]
        pub fn issue(self, coop: &impl Coop) -> Result<(), Fault> {
            if takes_lsa(self.gin, self.peer, &self.options) {
                return self.move_here(coop);
            }
            lead!(coop, self.post())
        }
    };
}

/// A put, not yet posted.
#[derive(Clone, Copy, Debug)]
#[must_use = "nothing is posted before `issue`"]
pub struct Put<'a, B: Backend, T> {
    gin: &'a Gin<B>,
    peer: Rank,
    destination: WindowRange<T>,
    source: WindowRange<T>,
    options: Options,
}

impl<B: Backend, T: Pod> Put<'_, B, T> {
    builder!(signal);
    builder!(counter);
    builder!(common);
    builder!(shared);

    #[inline(always)]
    fn check(&self, lsa: bool) -> Result<(), Fault> {
        let Self { gin, peer, destination, source, options } = self;
        let posted = Posted { core: gin.core(), peer: *peer, options, operation: Operation::Put, lsa };
        posted.check(&Both { there: destination, here: source })
    }

    /// Stores to the peer.
    #[inline(always)]
    fn move_here(self, coop: &impl Coop) -> Result<(), Fault> {
        let places = || (self.destination.address_on(self.peer), self.source.address(), self.source.place().1);
        // Safety: `check` finds it in range on both sides, and the peer reached.
        unsafe { move_bytes(self.gin.core(), self.peer, &self.options, coop, self.check(true), places) }
    }

    #[inline(always)]
    fn post(self) -> Result<(), Fault> {
        let (core, operation) = (self.gin.core(), Operation::Put);
        self.check(false)?;
        let transfer = Transfer::Put {
            source: WindowOffset { window: self.source.window_id(), offset: self.source.place().0 },
            destination: WindowOffset { window: self.destination.window_id(), offset: self.destination.place().0 },
            bytes: self.source.place().1,
        };
        let posted = post::<B>(core, self.peer, transfer, &self.options, operation);
        posted.map_err(|stop| ended(core, self.peer, operation, stop))
    }
}

/// A get, not yet posted.
#[derive(Clone, Copy, Debug)]
#[must_use = "nothing is posted before `issue`"]
pub struct Get<'a, B: Backend, T> {
    gin: &'a Gin<B>,
    peer: Rank,
    destination: WindowRange<T>,
    source: WindowRange<T>,
    options: Options,
}

impl<B: Backend, T: Pod> Get<'_, B, T> {
    builder!(counter);
    builder!(common);
    builder!(shared);

    #[inline(always)]
    fn check(&self, lsa: bool) -> Result<(), Fault> {
        let Self { gin, peer, destination, source, options } = self;
        let posted = Posted { core: gin.core(), peer: *peer, options, operation: Operation::Get, lsa };
        posted.check(&Both { there: source, here: destination })
    }

    /// Loads from the peer.
    #[inline(always)]
    fn move_here(self, coop: &impl Coop) -> Result<(), Fault> {
        let places = || (self.destination.address(), self.source.address_on(self.peer), self.source.place().1);
        // Safety: `check` finds it in range on both sides, and the peer reached.
        unsafe { move_bytes(self.gin.core(), self.peer, &self.options, coop, self.check(true), places) }
    }

    #[inline(always)]
    fn post(self) -> Result<(), Fault> {
        let (core, operation) = (self.gin.core(), Operation::Get);
        self.check(false)?;
        let transfer = Transfer::Get {
            source: WindowOffset { window: self.source.window_id(), offset: self.source.place().0 },
            destination: WindowOffset { window: self.destination.window_id(), offset: self.destination.place().0 },
            bytes: self.source.place().1,
        };
        let posted = post::<B>(core, self.peer, transfer, &self.options, operation);
        posted.map_err(|stop| ended(core, self.peer, operation, stop))
    }
}

/// A put of a value, not yet posted.
#[derive(Clone, Copy, Debug)]
#[must_use = "nothing is posted before `issue`"]
pub struct PutValue<'a, B: Backend> {
    gin: &'a Gin<B>,
    peer: Rank,
    destination: WindowRange<u8>,
    value: u64,
    width_log2: u32,
    options: Options,
}

impl<B: Backend> PutValue<'_, B> {
    builder!(signal);
    builder!(counter);
    builder!(common);
    builder!(led);

    #[inline(always)]
    fn post(self) -> Result<(), Fault> {
        let (core, operation) = (self.gin.core(), Operation::PutValue);
        let width = 1u64 << self.width_log2;
        let lsa = takes_lsa(self.gin, self.peer, &self.options);
        let posted = Posted { core, peer: self.peer, options: &self.options, operation, lsa };
        posted.check(&One { there: &self.destination, width })?;
        if lsa {
            let raises = Raises::of(core, self.peer, &self.options);
            let (to, value) = (self.destination.address_on(self.peer) as usize, self.value);
            // Safety: in range, aligned, and the peer is reached.
            unsafe {
                match width {
                    1 => store_weak_u8(to as *mut u8, value as u8),
                    2 => store_weak_u16(to as *mut u16, value as u16),
                    4 => store_weak_u32(to as *mut u32, value as u32),
                    _ => store_weak_u64(to as *mut u64, value),
                }
            }
            raises.publish(Scope::Thread);
            return Ok(());
        }
        let transfer = Transfer::PutValue {
            value: self.value,
            width_log2: self.width_log2,
            destination: WindowOffset { window: self.destination.window_id(), offset: self.destination.place().0 },
        };
        let posted = post::<B>(core, self.peer, transfer, &self.options, operation);
        posted.map_err(|stop| ended(core, self.peer, operation, stop))
    }
}

/// A signal, not yet posted.
#[derive(Clone, Copy, Debug)]
#[must_use = "nothing is posted before `issue`"]
pub struct SignalPost<'a, B: Backend> {
    gin: &'a Gin<B>,
    peer: Rank,
    options: Options,
}

impl<B: Backend> SignalPost<'_, B> {
    builder!(counter);
    builder!(common);
    builder!(led);

    #[inline(always)]
    fn post(self) -> Result<(), Fault> {
        let Self { gin, peer, options } = &self;
        let (core, peer, operation) = (gin.core(), *peer, Operation::Signal);
        let lsa = takes_lsa(gin, peer, options);
        Posted { core, peer, options, operation, lsa }.check(&NoRanges)?;
        if lsa {
            Raises::of(core, peer, options).publish(options.given);
            return Ok(());
        }
        let posted = post::<B>(core, peer, Transfer::Nothing, options, operation);
        posted.map_err(|stop| ended(core, peer, operation, stop))
    }
}
