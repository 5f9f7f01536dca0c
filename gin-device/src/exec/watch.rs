// SPDX-License-Identifier: MIT OR Apache-2.0
//! The accesses that an executor with a detector of data races watches.
//!
//! Until an executor [turns it on](turn_on), each call here costs one load of a flag.

use super::{Ordering, WATCHED, executor};
use core::panic::Location;
use gin_abi::{Descriptor, RemoteSignal, SignalTarget, Transfer};

/// The way of a post: a strong signal covers the earlier puts that go the same way by the same route.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Way {
    /// Address of the poster's table of contexts, which identifies its communicator.
    pub table: u64,
    /// The context.
    pub context: u32,
    /// World rank of the peer.
    pub peer: u32,
}

/// The signal words of one rank that one engine raises: each at `address` and a multiple of `stride`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Signals {
    /// Address of the rank's table of contexts.
    pub table: u64,
    /// The rank.
    pub rank: u32,
    /// The context, for signals with ids.
    pub context: u32,
    /// The signal of the first word. The next word is that of the next id, or of the next 8 bytes of a window.
    pub first: SignalTarget,
    /// Address of the first word.
    pub address: u64,
    /// Bytes from word to word.
    pub stride: u64,
    /// Number of words.
    pub count: u64,
}

/// An event of the calling thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// An access to a shared word, atomic.
    Word {
        /// Address of the word.
        address: u64,
        /// It returns the word.
        reads: bool,
        /// It changes the word.
        writes: bool,
        /// The change is atomic, so that it continues the releases before it.
        continues: bool,
        /// The operand of an atomic change; 0 for other accesses.
        operand: u64,
        /// It acquires.
        acquire: bool,
        /// It releases.
        release: bool,
    },
    /// An acquire fence.
    Acquire,
    /// A release fence.
    Release,
    /// An access to bytes that is no atomic.
    Data {
        /// Address of the first byte.
        address: u64,
        /// Number of bytes.
        bytes: u64,
        /// It stores.
        writes: bool,
    },
    /// An atomic change of bytes that are no shared word.
    Reduction {
        /// Address of the first byte.
        address: u64,
        /// Number of bytes.
        bytes: u64,
    },
    /// A proxy, a NIC or a copy engine copies bytes.
    Copy {
        /// Address of the destination.
        to: u64,
        /// Address of the source.
        from: u64,
        /// Number of bytes.
        bytes: u64,
    },
    /// A proxy or a NIC stores the bytes of a value.
    Store {
        /// Address of the destination.
        to: u64,
        /// The value.
        value: u64,
        /// Number of bytes.
        bytes: u64,
    },
    /// A kernel posts a request to the network.
    Post {
        /// Address of the range in the poster's own part of a window, or the value of a put of a value.
        own: u64,
        /// The way of the request.
        way: Way,
        /// The request.
        transfer: Transfer,
        /// The signal that follows it.
        signal: Option<RemoteSignal>,
        /// The signal covers the puts of both routes.
        all_routes: bool,
    },
    /// The back end did not take the last post of the calling thread.
    Refused,
    /// A call begins to wait until puts have arrived, or, if `done`, has found that those which the calling thread knew
    /// then have arrived.
    Quiet {
        /// Address of the table of contexts of the caller's communicator.
        table: u64,
        /// The context.
        context: u32,
        /// It covers all other contexts, not this one.
        others: bool,
        /// World ranks of the peers: the first, and the one past the last.
        peers: (u32, u32),
        /// The call has succeeded.
        done: bool,
    },
    /// The calling thread's stores to these bytes, until its call ends, are those of a put by loads and stores.
    Stores {
        /// The way of the put.
        way: Way,
        /// Address of the first byte.
        address: u64,
        /// Number of bytes.
        bytes: u64,
        /// The put raises a weak signal.
        weak: bool,
    },
    /// The calling thread changes this word next, to raise a signal by loads and stores.
    Raise {
        /// The way of the signal.
        way: Way,
        /// Address of the word.
        word: u64,
        /// The signal is strong.
        strong: bool,
        /// Address and length of the put that raises it; a length of 0 for none.
        put: (u64, u64),
    },
    /// A communicator begins. Its number is the same on all ranks.
    Communicator {
        /// Address of this rank's table of contexts.
        table: u64,
        /// The number.
        number: u64,
    },
    /// Other engines than kernels of peers raise signals at these words from now on.
    Signals(Signals),
    /// The bytes are those of a window from now on.
    Window {
        /// Address of the first byte.
        address: u64,
        /// Number of bytes.
        bytes: u64,
        /// Number of the window.
        window: u32,
        /// The rank whose part it is.
        rank: u32,
        /// Address of the rank's table of contexts.
        table: u64,
    },
    /// No window has these bytes any more.
    Forget {
        /// Address of the first byte.
        address: u64,
        /// Number of bytes.
        bytes: u64,
    },
    /// A call of the device API begins. Its accesses are those of the place that calls it.
    Enter {
        /// Several threads may store the same to the same bytes.
        alike: bool,
    },
    /// The call ends.
    Leave,
}

/// Makes all later calls of this module reach the executor.
pub fn turn_on() {
    WATCHED.store(true, Ordering::Relaxed);
}

#[inline(always)]
fn is_on() -> bool {
    WATCHED.load(Ordering::Relaxed)
}

#[cold]
#[inline(never)]
fn pass(event: Event, site: &'static Location<'static>) {
    if let Some(executor) = executor() {
        (executor.watch)(event, site);
    }
}

/// Reports an event of the calling thread.
#[inline(always)]
#[track_caller]
pub fn event(event: Event) {
    if is_on() {
        pass(event, Location::caller());
    }
}

/// The kind of an access to a shared word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// A load.
    Load,
    /// A store.
    Store,
    /// An atomic change by this operand that returns what was there.
    Change(u64),
    /// An atomic change by this operand that returns nothing.
    Reduce(u64),
}

/// Reports an access to a shared word, after it was made, without a switch point between.
#[inline(always)]
#[track_caller]
pub fn word<T>(address: *const T, access: Access, order: Ordering) {
    #[cold]
    #[inline(never)]
    fn pass_word(address: u64, access: Access, order: Ordering, site: &'static Location<'static>) {
        let (acquire, release) = (matches!(order, Ordering::Acquire), matches!(order, Ordering::Release));
        let (reads, writes) = (!matches!(access, Access::Store | Access::Reduce(_)), !matches!(access, Access::Load));
        let operand = if let Access::Change(operand) | Access::Reduce(operand) = access { operand } else { 0 };
        let continues = matches!(access, Access::Change(_) | Access::Reduce(_));
        pass(Event::Word { address, reads, writes, continues, operand, acquire, release }, site);
    }
    if is_on() {
        pass_word(address.addr() as u64, access, order, Location::caller());
    }
}

/// Reports a fence.
#[inline(always)]
#[track_caller]
pub fn fence(order: Ordering) {
    if !matches!(order, Ordering::Release) {
        event(Event::Acquire);
    }
    if !matches!(order, Ordering::Acquire) {
        event(Event::Release);
    }
}

/// Reports an access to data. The event is built outside of the code of a kernel, to keep that short.
#[cold]
#[inline(never)]
fn pass_data(address: u64, bytes: u64, writes: bool, site: &'static Location<'static>) {
    pass(Event::Data { address, bytes, writes }, site);
}

/// Reports a load of a value that is no atomic.
#[inline(always)]
#[track_caller]
pub fn read<T>(address: *const T) {
    if is_on() {
        pass_data(address.addr() as u64, size_of::<T>() as u64, false, Location::caller());
    }
}

/// Reports a store of a value that is no atomic.
#[inline(always)]
#[track_caller]
pub fn write<T>(address: *const T) {
    if is_on() {
        pass_data(address.addr() as u64, size_of::<T>() as u64, true, Location::caller());
    }
}

/// Reports an atomic change of a value that is no shared word.
#[inline(always)]
#[track_caller]
pub fn reduction<T>(address: *const T) {
    event(Event::Reduction { address: address.addr() as u64, bytes: size_of::<T>() as u64 });
}

/// Reports a post. The parameters are as for [`Event::Post`].
#[inline(always)]
#[track_caller]
pub fn posted(own: u64, way: Way, request: &Descriptor, all_routes: bool) {
    event(Event::Post { own, way, transfer: request.transfer, signal: request.signal, all_routes });
}

/// A call of the device API, until dropped.
#[derive(Debug)]
pub struct Call(bool);

impl Call {
    /// Begins a call. Its accesses are those of the caller's caller.
    #[inline(always)]
    #[track_caller]
    pub fn here() -> Self {
        Self::begin(false, Location::caller())
    }

    /// Does the same, for a call in which several threads may store the same to the same bytes.
    #[inline(always)]
    #[track_caller]
    pub fn alike() -> Self {
        Self::begin(true, Location::caller())
    }

    #[inline(always)]
    fn begin(alike: bool, site: &'static Location<'static>) -> Self {
        let on = is_on();
        if on {
            pass(Event::Enter { alike }, site);
        }
        Self(on)
    }
}

impl Drop for Call {
    #[inline(always)]
    #[track_caller]
    fn drop(&mut self) {
        if self.0 {
            pass(Event::Leave, Location::caller());
        }
    }
}
