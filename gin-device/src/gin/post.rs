// SPDX-License-Identifier: MIT OR Apache-2.0
//! Operations that post a request: put, put_value, get, signal.
//!
//! Each is a builder that costs nothing: after inlining, a put is straight code with its constants folded in.

use super::{Core, Gin, Scope, release};
use crate::backend::Backend;
use crate::coop::{Coop, lead};
use crate::signal::{CounterId, Signal, SignalAction, VaSignal};
use crate::status::Stop;
use crate::sys::Global;
use crate::team::Rank;
use crate::window::{WindowRange, bytes_on};
use bytemuck::Pod;
use gin_abi::handle::{CAP_STRONG_SIGNALS, CAP_VA_SIGNALS, WINDOW_SIGNALS};
use gin_abi::{Deadline, Descriptor, Fault, FaultKind, Operation, Transfer};

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

/// What all posts have besides what they move.
#[derive(Clone, Copy, Debug)]
struct Options {
    signal: Option<SignalAction>,
    counter: Option<CounterId>,
    given: Scope,
    required: Scope,
    more: bool,
    /// A barrier's: its signals have ids past those of the user, and it has looked at what the network can.
    internal: bool,
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
            deadline: Deadline::NONE,
        }
    }
}

/// Whether context, signal and counter are right. [`examine`] says what is not.
///
/// Without branches, so that a post that is right passes one.
#[inline(always)]
fn is_right(core: &Core, peer: Rank, options: &Options) -> bool {
    let comm = core.comm();
    let signal = match options.signal {
        None => true,
        Some(action) => match action.signal {
            Signal::Id(_) if options.internal => true,
            Signal::Id(id) => id < if action.strong { comm.strong_signals() } else { comm.signals() },
            Signal::Va(va) => {
                is_strong_enough(core, &action)
                    & takes_va_signals(core, &va)
                    & va.offset.is_multiple_of(8)
                    & va.fits_on(peer)
            }
        },
    };
    let counter = match options.counter {
        None => true,
        Some(counter) => counter.0 < comm.counters(),
    };
    core.usable() & signal & counter
}

#[inline(always)]
fn is_strong_enough(core: &Core, action: &SignalAction) -> bool {
    !action.strong | (core.comm().capabilities() & CAP_STRONG_SIGNALS != 0)
}

#[inline(always)]
fn takes_va_signals(core: &Core, va: &VaSignal) -> bool {
    (core.comm().capabilities() & CAP_VA_SIGNALS != 0) & (va.window.flags & WINDOW_SIGNALS != 0)
}

/// What is wrong with context, signal or counter.
#[inline(always)]
fn examine(core: &Core, peer: Rank, options: &Options, operation: Operation) -> Result<(), Fault> {
    core.check(operation)?;
    let comm = core.comm();
    let fault = |kind| core.fault(kind, operation).peer(peer.world());
    if let Some(action) = options.signal {
        if !is_strong_enough(core, &action) {
            return Err(fault(FaultKind::NoStrongSignals));
        }
        match action.signal {
            Signal::Id(id) => {
                if id >= comm.signals() {
                    return Err(fault(FaultKind::UnknownSignal).values(comm.signals() as u64, id as u64));
                }
            }
            Signal::Va(va) => {
                if !takes_va_signals(core, &va) {
                    return Err(fault(FaultKind::NoVaSignals));
                }
                if !va.offset.is_multiple_of(8) {
                    return Err(fault(FaultKind::Misaligned).values(8, va.offset));
                }
                if !va.fits_on(peer) {
                    return Err(fault(FaultKind::OutOfRange).values(bytes_on(&va.window, peer), va.end()));
                }
            }
        }
    }
    if let Some(counter) = options.counter
        && counter.0 >= comm.counters()
    {
        return Err(fault(FaultKind::UnknownCounter).values(comm.counters() as u64, counter.0 as u64));
    }
    Ok(())
}

/// What is wrong with the ranges of a transfer that is not right.
#[inline(always)]
fn examine_ranges<T: Pod>(
    core: &Core,
    peer: Rank,
    there: &WindowRange<T>,
    here: &WindowRange<T>,
    operation: Operation,
) -> Fault {
    let fault = |kind| core.fault(kind, operation).peer(peer.world());
    if there.bytes() != here.bytes() {
        fault(FaultKind::LengthMismatch).values(there.bytes(), here.bytes())
    } else if !there.fits_on(peer) {
        fault(FaultKind::OutOfRange).values(there.length_on(peer), there.end())
    } else {
        fault(FaultKind::OutOfRange).values(here.own_length(), here.end())
    }
}

#[inline(always)]
fn post<B: Backend>(
    core: &Core,
    peer: Rank,
    transfer: Transfer,
    options: &Options,
    operation: Operation,
) -> Result<(), Stop> {
    release::<Global>(options.given, options.required);
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
fn ended(core: &Core, peer: Rank, operation: Operation, stop: Stop) -> Fault {
    core.status().explain(stop, core.fault(FaultKind::Timeout, operation).peer(peer.world()))
}

impl<B: Backend> Gin<B> {
    /// Writes `source`, a range of the caller's own part of a window, to `destination` on `peer`.
    ///
    /// The two ranges have the same length in bytes, which may be 0. Nothing is posted before
    /// [`issue`](Put::issue). Puts are not ordered among themselves.
    #[inline(always)]
    pub fn put<T: Pod>(&self, peer: Rank, destination: WindowRange<T>, source: WindowRange<T>) -> Put<'_, B, T> {
        Put { gin: self, peer, destination, source, options: Options::new() }
    }

    /// Writes a value of 1, 2, 4 or 8 bytes to `destination`, one element, on `peer`.
    ///
    /// The element's offset must be a multiple of its size. Nothing is posted before [`issue`](PutValue::issue).
    #[inline(always)]
    pub fn put_value<T: Value>(&self, peer: Rank, destination: WindowRange<T>, value: T) -> PutValue<'_, B, T> {
        PutValue { gin: self, peer, destination, value, options: Options::new() }
    }

    /// Reads `source` on `peer` into `destination`, a range of the caller's own part of a window.
    ///
    /// The two ranges have the same length in bytes, which may be 0. What it brings is visible after a
    /// [`flush`](Gin::flush), the [`wait`](Gin::wait) for a token, or a barrier with a get fence; also after a wait for
    /// its counter. Nothing is posted before [`issue`](Get::issue).
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

    /// For barriers: raises a signal whose id is past those of the user.
    #[inline(always)]
    pub(crate) fn raise_internal(&self, peer: Rank, action: SignalAction, deadline: Deadline) -> Result<(), Fault> {
        let options =
            Options { signal: Some(action), internal: true, given: Scope::System, deadline, ..Options::new() };
        if !is_right(self.core(), peer, &options) {
            return examine(self.core(), peer, &options, Operation::Barrier);
        }
        let posted = post::<B>(self.core(), peer, Transfer::Nothing, &options, Operation::Barrier);
        posted.map_err(|stop| ended(self.core(), peer, Operation::Barrier, stop))
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

        /// Hints that more requests follow soon, so that the network may send them together. The last one, or a flush,
        /// ends it; nothing is held back for ever.
        #[inline(always)]
        pub fn more(mut self) -> Self {
            self.options.more = true;
            self
        }

        /// How long to wait for room in the queue; no limit by default.
        #[inline(always)]
        pub fn deadline(mut self, deadline: Deadline) -> Self {
            self.options.deadline = deadline;
            self
        }

        /// Posts it. All threads of `coop` call; one posts.
        ///
        /// Ordering: what the threads of the coop wrote before is released first, at the required scope.
        ///
        /// # Errors
        /// The same in all threads: what is wrong with the arguments (nothing was posted);
        /// [`FaultKind::Timeout`] if the queue had no room in time (nothing was posted);
        /// [`FaultKind::QueueBroken`] if the deadline passed after a slot was claimed, which ends the communicator;
        /// the fault or abort that ended the wait for room.
        #[inline(always)]
        pub fn issue(self, coop: &impl Coop) -> Result<(), Fault> {
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

    #[inline(always)]
    fn post(self) -> Result<(), Fault> {
        let (core, operation) = (self.gin.core(), Operation::Put);
        let right = is_right(core, self.peer, &self.options)
            & (self.destination.place().1 == self.source.place().1)
            & self.destination.fits_on(self.peer)
            & self.source.fits_own();
        if !right {
            examine(core, self.peer, &self.options, operation)?;
            return Err(examine_ranges(core, self.peer, &self.destination, &self.source, operation));
        }
        let transfer = Transfer::Put {
            source_window: self.source.window_id(),
            source_offset: self.source.place().0,
            destination_window: self.destination.window_id(),
            destination_offset: self.destination.place().0,
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

    #[inline(always)]
    fn post(self) -> Result<(), Fault> {
        let (core, operation) = (self.gin.core(), Operation::Get);
        let right = is_right(core, self.peer, &self.options)
            & (self.destination.place().1 == self.source.place().1)
            & self.source.fits_on(self.peer)
            & self.destination.fits_own();
        if !right {
            examine(core, self.peer, &self.options, operation)?;
            return Err(examine_ranges(core, self.peer, &self.source, &self.destination, operation));
        }
        let transfer = Transfer::Get {
            source_window: self.source.window_id(),
            source_offset: self.source.place().0,
            destination_window: self.destination.window_id(),
            destination_offset: self.destination.place().0,
            bytes: self.source.place().1,
        };
        let posted = post::<B>(core, self.peer, transfer, &self.options, operation);
        posted.map_err(|stop| ended(core, self.peer, operation, stop))
    }
}

/// A put of a value, not yet posted.
#[derive(Clone, Copy, Debug)]
#[must_use = "nothing is posted before `issue`"]
pub struct PutValue<'a, B: Backend, T> {
    gin: &'a Gin<B>,
    peer: Rank,
    destination: WindowRange<T>,
    value: T,
    options: Options,
}

impl<B: Backend, T: Value> PutValue<'_, B, T> {
    builder!(signal);
    builder!(counter);
    builder!(common);

    #[inline(always)]
    fn post(self) -> Result<(), Fault> {
        let (core, operation) = (self.gin.core(), Operation::PutValue);
        let width = const { size_of::<T>() as u64 };
        let (offset, bytes) = self.destination.place();
        let right = is_right(core, self.peer, &self.options)
            & (bytes == width)
            & offset.is_multiple_of(width)
            & self.destination.fits_on(self.peer);
        if !right {
            examine(core, self.peer, &self.options, operation)?;
            let fault = |kind| core.fault(kind, operation).peer(self.peer.world());
            return Err(if bytes != width {
                fault(FaultKind::LengthMismatch).values(width, self.destination.bytes())
            } else if !offset.is_multiple_of(width) {
                fault(FaultKind::Misaligned).values(width, self.destination.offset())
            } else {
                fault(FaultKind::OutOfRange).values(self.destination.length_on(self.peer), self.destination.end())
            });
        }
        let transfer = Transfer::PutValue {
            value: self.value.to_word(),
            width_log2: const { size_of::<T>().trailing_zeros() },
            destination_window: self.destination.window_id(),
            destination_offset: self.destination.place().0,
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

    #[inline(always)]
    fn post(self) -> Result<(), Fault> {
        let core = self.gin.core();
        if !is_right(core, self.peer, &self.options) {
            return examine(core, self.peer, &self.options, Operation::Signal);
        }
        let posted = post::<B>(core, self.peer, Transfer::Nothing, &self.options, Operation::Signal);
        posted.map_err(|stop| ended(core, self.peer, Operation::Signal, stop))
    }
}
