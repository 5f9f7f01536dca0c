// SPDX-License-Identifier: MIT OR Apache-2.0
//! Operations that post a request: put, put_value, get, signal.
//!
//! Each is a builder that costs nothing: after inlining, a put is straight code with its constants folded in.

use super::{Core, Gin, Scope};
use crate::backend::Backend;
use crate::coop::{Coop, lead};
use crate::lsa::{copy, publish};
use crate::signal::{CounterId, Signal, SignalAction, VaSignal};
use crate::status::WaitError;
use crate::sys::data::{store_weak_u8, store_weak_u16, store_weak_u32, store_weak_u64};
use crate::sys::{self, Global, GlobalWord};
use crate::team::Rank;
use crate::window::{WindowRange, bytes_on};
use bytemuck::Pod;
use gin_abi::handle::{CAP_STRONG_SIGNALS, CAP_VA_SIGNALS, WINDOW_SIGNALS};
use gin_abi::{Deadline, Descriptor, Fault, FaultKind, Operation, Transfer, WindowData, WindowOffset};

mod sealed {
    pub trait Sealed {}
}

/// A value that fits into a request: an integer or float of 1, 2, 4 or 8 bytes.
pub trait Value: Pod + sealed::Sealed {
    /// Its bytes, in the low bits.
    #[doc(hidden)]
    fn to_word(self) -> u64;
}

macro_rules! values {
    ($($ty:ty as $bits:ty),*) => { $(
        impl sealed::Sealed for $ty {}
        impl Value for $ty {
            #[inline(always)]
            fn to_word(self) -> u64 {
                <$bits>::from_le_bytes(self.to_le_bytes()) as u64
            }
        }
    )* };
}

values!(
    u8 as u8, i8 as u8, u16 as u16, i16 as u16, u32 as u32, i32 as u32, u64 as u64, i64 as u64, f32 as u32, f64 as u64
);

/// The options of all posts besides the transfer.
#[derive(Clone, Copy, Debug)]
struct Options {
    signal: Option<SignalAction>,
    counter: Option<CounterId>,
    given: Scope,
    required: Scope,
    more: bool,
    /// A barrier's: its signals have ids past those of the user, and it has looked at what the network can.
    internal: bool,
    /// Covers puts of both routes.
    all_routes: bool,
    deadline: Deadline,
}

impl Options {
    /// A function, because a constant would lie in memory.
    #[inline(always)]
    fn new() -> Self {
        Self {
            signal: None,
            counter: None,
            given: Scope::Thread,
            required: Scope::System,
            more: false,
            internal: false,
            all_routes: false,
            deadline: Deadline::NONE,
        }
    }
}

/// How a post goes: whether by loads and stores. Known when compiling for a back end that is named.
#[inline(always)]
fn takes_lsa<B: Backend>(gin: &Gin<B>, peer: Rank, options: &Options) -> bool {
    gin.takes_lsa(peer) && !options.all_routes
}

/// Looks at the conditions of a post, which are written down once: [`Right`] joins them without branches, so that a
/// post that is right passes one; [`Found`] says what is wrong.
trait Judge {
    /// `fault` says what is wrong if `met` is false.
    fn condition(&mut self, met: bool, fault: impl FnOnce() -> Fault);
}

/// True while all conditions are met.
struct Right(bool);

impl Judge for Right {
    #[inline(always)]
    fn condition(&mut self, met: bool, _: impl FnOnce() -> Fault) {
        self.0 &= met;
    }
}

/// The first condition that is not met.
struct Found(Option<Fault>);

impl Judge for Found {
    #[inline(always)]
    fn condition(&mut self, met: bool, fault: impl FnOnce() -> Fault) {
        if !met && self.0.is_none() {
            self.0 = Some(fault());
        }
    }
}

/// The target and the options of a post: context, route, signal and counter.
#[derive(Clone, Copy)]
struct Posted<'a> {
    core: &'a Core,
    peer: Rank,
    options: &'a Options,
    operation: Operation,
    lsa: bool,
}

impl Posted<'_> {
    #[inline(always)]
    fn fault(&self, kind: FaultKind) -> Fault {
        self.core.fault(kind, self.operation).peer(self.peer.world())
    }

    /// Returns the first violation of the post, or else of `ranges`.
    #[inline(always)]
    fn check(&self, ranges: &impl Ranges) -> Result<(), Fault> {
        let mut right = Right(true);
        self.judge(&mut right);
        ranges.judge(self, &mut right);
        if right.0 {
            return Ok(());
        }
        let mut found = Found(None);
        self.judge(&mut found);
        ranges.judge(self, &mut found);
        // Nothing is found only if a table of the host's changed in between.
        Err(found.0.unwrap_or(self.fault(FaultKind::BadDescriptor)))
    }

    #[inline(always)]
    fn judge(&self, judge: &mut impl Judge) {
        let Self { core, peer, options, lsa, .. } = *self;
        let (comm, fault) = (core.comm(), |kind| self.fault(kind));
        judge.condition(core.usable(), || core.unusable(self.operation));
        judge.condition(!lsa || comm.lsa_reaches(peer), || fault(FaultKind::NotReachable));
        if let Some(action) = options.signal {
            // Loads and stores have strong signals, whatever the network has.
            let strong = action.strong & !lsa;
            let has_strong = || comm.capabilities() & CAP_STRONG_SIGNALS != 0;
            match action.signal {
                Signal::Id(_) if options.internal => {}
                // There are as many strong signals as signals, or none.
                Signal::Id(id) => {
                    judge.condition(id < if strong { comm.strong_signals() } else { comm.signals() }, || {
                        if strong && !has_strong() {
                            fault(FaultKind::NoStrongSignals)
                        } else {
                            fault(FaultKind::UnknownSignal).values(comm.signals() as u64, id as u64)
                        }
                    });
                }
                Signal::Va(va) => {
                    judge.condition(!strong | has_strong(), || fault(FaultKind::NoStrongSignals));
                    judge.condition(takes_va_signals(core, &va, lsa), || fault(FaultKind::NoVaSignals));
                    judge.condition(va.offset.is_multiple_of(8), || fault(FaultKind::Misaligned).values(8, va.offset));
                    judge.condition(va.fits_on(peer), || {
                        fault(FaultKind::OutOfRange).values(bytes_on(&va.window, peer), va.end())
                    });
                }
            }
        }
        if let Some(counter) = options.counter {
            judge.condition(counter.0 < comm.counters(), || {
                fault(FaultKind::UnknownCounter).values(comm.counters() as u64, counter.0 as u64)
            });
        }
    }
}

#[inline(always)]
fn takes_va_signals(core: &Core, va: &VaSignal, lsa: bool) -> bool {
    (lsa | (core.comm().capabilities() & CAP_VA_SIGNALS != 0)) & (va.window.flags & WINDOW_SIGNALS != 0)
}

/// The ranges of a post.
trait Ranges {
    fn judge(&self, posted: &Posted<'_>, judge: &mut impl Judge);
}

/// A post without ranges.
struct NoRanges;

impl Ranges for NoRanges {
    #[inline(always)]
    fn judge(&self, _: &Posted<'_>, _: &mut impl Judge) {}
}

/// The ranges of a transfer, at the peer and in the caller's own part.
struct Both<'a, T> {
    there: &'a WindowRange<T>,
    here: &'a WindowRange<T>,
}

impl<T: Pod> Ranges for Both<'_, T> {
    #[inline(always)]
    fn judge(&self, posted: &Posted<'_>, judge: &mut impl Judge) {
        let (Self { there, here }, peer, fault) = (self, posted.peer, |kind| posted.fault(kind));
        judge.condition(there.place().1 == here.place().1, || {
            fault(FaultKind::LengthMismatch).values(there.bytes(), here.bytes())
        });
        judge
            .condition(there.fits_on(peer), || fault(FaultKind::OutOfRange).values(there.length_on(peer), there.end()));
        judge.condition(here.fits_own(), || fault(FaultKind::OutOfRange).values(here.own_length(), here.end()));
    }
}

/// Where a value of this many bytes goes.
struct One<'a> {
    there: &'a WindowRange<u8>,
    width: u64,
}

impl Ranges for One<'_> {
    #[inline(always)]
    fn judge(&self, posted: &Posted<'_>, judge: &mut impl Judge) {
        let (&Self { there, width }, fault) = (self, |kind| posted.fault(kind));
        let (offset, bytes) = there.place();
        judge.condition(bytes == width, || fault(FaultKind::LengthMismatch).values(width, there.bytes()));
        judge.condition(offset.is_multiple_of(width), || fault(FaultKind::Misaligned).values(width, there.offset()));
        judge.condition(there.fits_on(posted.peer), || {
            fault(FaultKind::OutOfRange).values(there.length_on(posted.peer), there.end())
        });
    }
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

/// The word of the peer's signal that GPUs raise, of a post that is right.
#[inline(always)]
fn peer_word(core: &Core, peer: Rank, signal: Signal) -> GlobalWord {
    // Safety: the context and the signal were checked, and that loads and stores reach the peer; then there are words
    // for GPUs, at every peer that they reach, and tables of them.
    unsafe {
        match signal {
            Signal::Id(id) => GlobalWord::new(sys::read_word(core.peer_signals(peer)) + 8 * id as u64),
            Signal::Va(va) => {
                let window = va.window.data as usize as *const WindowData;
                let planes = sys::read_word(&raw const (*window).peer_va_gpu) as usize as *const u64;
                GlobalWord::new(sys::read_word(planes.wrapping_add(peer.world() as usize)) + va.offset)
            }
        }
    }
}

/// The words that a post by loads and stores raises.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Raises {
    signal: Option<(GlobalWord, u64)>,
    counter: Option<GlobalWord>,
}

impl Raises {
    /// Looks up the words, of a post that is right.
    ///
    /// A trip to L2 each, as a wait that acquired has emptied the L1. So this stands before what the post waits for
    /// anyway, and in all threads: behind a branch the trip would come on top.
    #[inline(always)]
    fn of(core: &Core, peer: Rank, options: &Options) -> Self {
        let counter = |counter: CounterId| {
            // Safety: the counter was checked; where there are words for GPUs, counters have some too.
            unsafe { GlobalWord::new(sys::read_word(&raw const (*core.data()).counters_gpu) + 8 * counter.0 as u64) }
        };
        Self {
            signal: options.signal.map(|action| (peer_word(core, peer, action.signal), action.amount)),
            counter: options.counter.map(counter),
        }
    }

    /// Raises them; one thread does. `given`: how far what they cover was released.
    #[inline(always)]
    pub(crate) fn publish(self, given: Scope) {
        publish::<Global>(given, self.signal, self.counter);
    }
}

/// Carries out a put or get by loads and stores, if it was found right; all threads of `coop` call. `places`: addresses
/// to and from, number of bytes.
///
/// # Safety
/// - If it is right the places are valid. What overlaps or races gives unknown bytes.
#[inline(always)]
unsafe fn move_bytes(
    core: &Core,
    peer: Rank,
    options: &Options,
    coop: &impl Coop,
    checked: Result<(), Fault>,
    places: impl FnOnce() -> (u64, u64, u64),
) -> Result<(), Fault> {
    let raises = if checked.is_ok() { Some(Raises::of(core, peer, options)) } else { None };
    coop.sync();
    if checked.is_ok() {
        let (to, from, bytes) = places();
        // Safety: the caller's promise.
        unsafe { copy(coop, to, from, bytes) };
    }
    // All have stored before one raises, and before any of them reads.
    coop.agree(checked)?;
    if let (true, Some(raises)) = (coop.elect(), raises) {
        raises.publish(Scope::Thread);
    }
    Ok(())
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
