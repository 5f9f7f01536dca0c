// SPDX-License-Identifier: MIT OR Apache-2.0
//! Operations that post a request: put, get, put_value, signal.

use crate::gin::{Gin, lead};
use crate::shims::{self, AGGREGATE, Backend};
use crate::window::WindowRange;
use bytemuck::Pod;
use core::ffi::c_void;
use gin_device::coop::Coop;
use gin_device::gin::{Scope, Value};
use gin_device::internal::order::release;
use gin_device::signal::{CounterId, SignalAction};
use gin_device::sys::Global;
use gin_device::team::Rank;
use gin_device::{Fault, FaultKind, FaultSubject, Operation};

/// A request that is not posted yet: its kind, its target and its options.
#[derive(Clone, Copy, Debug)]
#[must_use = "nothing is posted before `issue`"]
pub struct Post<'a, B: Backend, R> {
    gin: &'a Gin<'a, B>,
    peer: Rank,
    request: R,
    signal: Option<SignalAction>,
    counter: Option<CounterId>,
    given: Scope,
    required: Scope,
    options: u32,
}

/// The bytes of a put.
#[derive(Clone, Copy, Debug)]
pub struct Move<T> {
    to: WindowRange<T>,
    from: WindowRange<T>,
}

/// The bytes of a get.
#[derive(Clone, Copy, Debug)]
pub struct Fetch<T> {
    there: WindowRange<T>,
    here: WindowRange<T>,
}

/// The value of a put.
#[derive(Clone, Copy, Debug)]
pub struct OneValue<T> {
    to: WindowRange<T>,
    word: u64,
}

/// No bytes.
#[derive(Clone, Copy, Debug)]
pub struct Raise;

/// A request that moves bytes, so that a signal can be bound to it.
pub trait Arrives {}
impl<T> Arrives for Move<T> {}
impl<T> Arrives for OneValue<T> {}

/// A kind of request.
pub trait Request: Copy {
    #[doc(hidden)]
    fn post<B: Backend>(post: &Post<'_, B, Self>, signal: Option<(u32, u64)>) -> Result<(), Fault>;
    #[doc(hidden)]
    const OPERATION: Operation;
}

impl<'a, B: Backend> Gin<'a, B> {
    /// Writes `source`, a range of the caller's own part of a window, to `destination` on `peer`.
    ///
    /// The two ranges have the same length in bytes and do not overlap. Nothing is posted before
    /// [`issue`](Post::issue). Puts are not ordered among themselves.
    #[inline(always)]
    pub fn put<T: Pod>(
        &'a self,
        peer: Rank,
        destination: WindowRange<T>,
        source: WindowRange<T>,
    ) -> Post<'a, B, Move<T>> {
        self.request(peer, Move { to: destination, from: source }, None)
    }

    /// Reads `source` on `peer` into `destination`, a range of the caller's own part of a window.
    ///
    /// The two ranges have the same length in bytes and do not overlap. Nothing is posted before
    /// [`issue`](Post::issue). The data is visible after a [`flush`](Gin::flush), or a barrier with a get fence.
    #[inline(always)]
    pub fn get<T: Pod>(
        &'a self,
        peer: Rank,
        destination: WindowRange<T>,
        source: WindowRange<T>,
    ) -> Post<'a, B, Fetch<T>> {
        self.request(peer, Fetch { there: source, here: destination }, None)
    }

    /// Writes a value of 1, 2, 4 or 8 bytes to `destination`, one element, on `peer`.
    ///
    /// Nothing is posted before [`issue`](Post::issue).
    #[inline(always)]
    pub fn put_value<T: Value>(
        &'a self,
        peer: Rank,
        destination: WindowRange<T>,
        value: T,
    ) -> Post<'a, B, OneValue<T>> {
        self.request(peer, OneValue { to: destination, word: value.to_word() }, None)
    }

    /// Raises a signal of `peer`. Nothing is posted before [`issue`](Post::issue).
    #[inline(always)]
    pub fn signal(&'a self, peer: Rank, action: SignalAction) -> Post<'a, B, Raise> {
        self.request(peer, Raise, Some(action))
    }

    #[inline(always)]
    fn request<R: Request>(&'a self, peer: Rank, request: R, signal: Option<SignalAction>) -> Post<'a, B, R> {
        let (given, required) = (Scope::Thread, Scope::System);
        Post { gin: self, peer, request, signal, counter: None, given, required, options: 0 }
    }
}

impl<B: Backend, R: Arrives> Post<'_, B, R> {
    /// Raises a signal of the peer once the data has arrived.
    #[inline(always)]
    pub fn signal(mut self, action: SignalAction) -> Self {
        self.signal = Some(action);
        self
    }
}

impl<B: Backend, T> Post<'_, B, Move<T>> {
    /// Raises a counter of the caller by one once the source may be reused.
    #[inline(always)]
    pub fn counter(mut self, counter: CounterId) -> Self {
        self.counter = Some(counter);
        self
    }
}

impl<B: Backend, R: Request> Post<'_, B, R> {
    /// Declares the scope to which the caller has already released the memory that the post depends on; none by
    /// default.
    #[inline(always)]
    pub fn released(mut self, given: Scope) -> Self {
        self.given = given;
        self
    }

    /// Sets the scope to which that memory must be released; the system by default, which is always correct.
    #[inline(always)]
    pub fn required(mut self, required: Scope) -> Self {
        self.required = required;
        self
    }

    /// Announces that another post of this context to this peer follows soon: NCCL's `AggregateRequests`.
    #[inline(always)]
    pub fn more(mut self) -> Self {
        self.options |= AGGREGATE;
        self
    }

    /// Posts the request. All threads of `coop` call, with the same arguments; one thread posts.
    ///
    /// If the queue is full it waits for room, until the host aborts the communicator: NCCL has no deadline there.
    ///
    /// Ordering: earlier writes of the coop's threads are released first, at the required scope.
    ///
    /// # Errors
    /// The fault of a wrong argument, the same in all threads. Nothing was posted then.
    #[inline(always)]
    pub fn issue(self, coop: &impl Coop) -> Result<(), Fault> {
        lead!(coop, self.here())
    }

    #[inline(always)]
    fn here(&self) -> Result<(), Fault> {
        self.gin.check(R::OPERATION)?;
        let handle = self.gin.comm().handle();
        let mut signal = None;
        if let Some(action) = self.signal {
            let Some((id, amount)) = action.id_and_amount() else {
                return Err(self.fault(FaultKind::NoVaSignals));
            };
            if id >= handle.signals {
                let fault = self.fault(FaultKind::UnknownSignal);
                return Err(fault.with_values(FaultSubject::Signal(id), handle.signals as u64, id as u64));
            }
            signal = Some((id, amount));
        }
        if let Some(id) = self.counter.map(CounterId::id)
            && id >= handle.counters
        {
            let fault = self.fault(FaultKind::UnknownCounter);
            return Err(fault.with_values(FaultSubject::Counter(id), handle.counters as u64, id as u64));
        }
        R::post(self, signal)
    }

    #[inline(always)]
    fn fault(&self, kind: FaultKind) -> Fault {
        self.gin.fault(kind, R::OPERATION).with_peer(self.peer.world())
    }

    #[inline(always)]
    fn comm(&self) -> *const c_void {
        self.gin.comm().dev_comm()
    }

    /// Checks that a range is in its window.
    #[inline(always)]
    fn check_range<T: Pod>(&self, range: &WindowRange<T>) -> Result<(), Fault> {
        if range.fits {
            return Ok(());
        }
        Err(self.fault(FaultKind::OutOfRange).with_values(FaultSubject::None, range.limit(), range.end()))
    }

    /// Checks the ranges of destination and source.
    #[inline(always)]
    fn check_ranges<T: Pod>(&self, to: &WindowRange<T>, from: &WindowRange<T>) -> Result<(), Fault> {
        self.check_range(to)?;
        self.check_range(from)?;
        if to.bytes == from.bytes {
            return Ok(());
        }
        Err(self.fault(FaultKind::LengthMismatch).with_values(FaultSubject::None, to.bytes, from.bytes))
    }
}

impl<T: Pod> Request for Move<T> {
    const OPERATION: Operation = Operation::Put;

    #[inline(always)]
    fn post<B: Backend>(post: &Post<'_, B, Self>, signal: Option<(u32, u64)>) -> Result<(), Fault> {
        let Move { to, from } = &post.request;
        post.check_ranges(to, from)?;
        let (id, amount) = signal.unwrap_or((0, 0));
        // Safety: the host made communicator and windows; arguments were checked, and the back end is compiled in.
        unsafe {
            shims::gin_nccl_put(
                post.comm(),
                post.gin.context().id(),
                B::MASK,
                post.gin.sharing(),
                post.peer.world(),
                to.window.nccl(),
                to.offset,
                from.window.nccl(),
                from.offset,
                to.bytes,
                signal.is_some(),
                id,
                amount,
                post.counter.is_some(),
                post.counter.map_or(0, CounterId::id),
                shims::scope(post.given),
                shims::scope(post.required),
                post.options,
            );
        }
        Ok(())
    }
}

impl<T: Pod> Request for Fetch<T> {
    const OPERATION: Operation = Operation::Get;

    #[inline(always)]
    fn post<B: Backend>(post: &Post<'_, B, Self>, _: Option<(u32, u64)>) -> Result<(), Fault> {
        let Fetch { there, here } = &post.request;
        post.check_ranges(here, there)?;
        // NCCL's get releases nothing. Without it, an earlier write to the destination could end after the get's.
        release::<Global>(post.given, post.required);
        // Safety: as above.
        unsafe {
            shims::gin_nccl_get(
                post.comm(),
                post.gin.context().id(),
                B::MASK,
                post.gin.sharing(),
                post.peer.world(),
                there.window.nccl(),
                there.offset,
                here.window.nccl(),
                here.offset,
                here.bytes,
                post.options,
            );
        }
        Ok(())
    }
}

impl<T: Value> Request for OneValue<T> {
    const OPERATION: Operation = Operation::PutValue;

    #[inline(always)]
    fn post<B: Backend>(post: &Post<'_, B, Self>, signal: Option<(u32, u64)>) -> Result<(), Fault> {
        let OneValue { to, word } = &post.request;
        post.check_range(to)?;
        if to.bytes != size_of::<T>() as u64 {
            let fault = post.fault(FaultKind::LengthMismatch);
            return Err(fault.with_values(FaultSubject::None, size_of::<T>() as u64, to.bytes));
        }
        let (id, amount) = signal.unwrap_or((0, 0));
        // Safety: as above.
        unsafe {
            shims::gin_nccl_put_value(
                post.comm(),
                post.gin.context().id(),
                B::MASK,
                post.gin.sharing(),
                post.peer.world(),
                to.window.nccl(),
                to.offset,
                *word,
                to.bytes,
                signal.is_some(),
                id,
                amount,
                shims::scope(post.given),
                shims::scope(post.required),
                post.options,
            );
        }
        Ok(())
    }
}

impl Request for Raise {
    const OPERATION: Operation = Operation::Signal;

    #[inline(always)]
    fn post<B: Backend>(post: &Post<'_, B, Self>, signal: Option<(u32, u64)>) -> Result<(), Fault> {
        let Some((id, amount)) = signal else { return Err(post.fault(FaultKind::UnknownSignal)) };
        post.gin.raise(post.peer, id, amount, post.given, post.required, post.options);
        Ok(())
    }
}

impl<B: Backend> Gin<'_, B> {
    /// Raises a signal that was checked, or a barrier's.
    #[inline(always)]
    pub(crate) fn raise(&self, peer: Rank, id: u32, amount: u64, given: Scope, required: Scope, options: u32) {
        // Safety: as above.
        unsafe {
            shims::gin_nccl_signal(
                self.comm().dev_comm(),
                self.context().id(),
                B::MASK,
                self.sharing(),
                peer.world(),
                id,
                amount,
                shims::scope(given),
                shims::scope(required),
                options,
            );
        }
    }
}
