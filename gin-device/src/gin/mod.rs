// SPDX-License-Identifier: MIT OR Apache-2.0
//! The front end: one context of a communicator, and everything that a kernel can ask of it.
//!
//! | call | does | its order |
//! | --- | --- | --- |
//! | [`put`](Gin::put) | writes own memory into the peer's | none among puts; a signal may be bound to it |
//! | [`put_value`](Gin::put_value) | writes 1, 2, 4 or 8 bytes from registers | as put |
//! | [`get`](Gin::get) | reads the peer's memory into the own | visible after `flush` |
//! | [`signal`](Gin::signal) | raises a word at the peer | strong: after all earlier puts to that peer; weak: none |
//! | [`signal_all_routes`](Gin::signal_all_routes) | the same | after all earlier puts to that peer, of either route |
//! | [`flush`](Gin::flush) | waits for all earlier operations | sources may be reused, gets are visible |
//! | [`flush_async`](Gin::flush_async), [`wait`](Gin::wait) | the same for one peer, in two steps | the same |
//! | [`wait_signal`](Gin::wait_signal), [`read_signal`](Gin::read_signal) | look at own signals | acquire |
//! | [`wait_counter`](Gin::wait_counter), [`read_counter`](Gin::read_counter) | look at own counters | acquire |
//!
//! # Ordering
//! - A *strong* signal is seen only after every earlier put and signal of the same context and route to the same peer
//!   has arrived; *earlier* is happens-before at GPU scope (program order, barriers, atomics). A *weak* one only after
//!   the put that it is bound to.
//! - A counter says that the source of its operation may be reused. It says nothing about other operations or about
//!   arrival.
//! - A flush says the same of all earlier operations of the context, and that what gets brought is visible. It says
//!   nothing about arrival of puts.
//! - Nothing orders two contexts.
//!
//! # Routes
//! An operation of a `Gin` without a named back end takes one of two routes: loads and stores by the calling threads to
//! peers of the LSA team, and the network, by way of the back end, to all others. Which one depends on context and peer
//! alone, never on sizes. [`route`](Gin::route) forces either; `Gin<Proxy>` knows the network only.
//!
//! - The order above holds on each route: a strong signal covers earlier puts of its own route. A kernel that has used
//!   both for one peer raises by [`signal_all_routes`](Gin::signal_all_routes), which covers the puts of either.
//! - By loads and stores a put has left its source, and a get is visible to the threads of its coop, when `issue`
//!   returns. Counters count all the same; flushes and tokens have nothing to wait for.
//! - They are carried out whatever the communicator's state. After an abort a wait tells, though perhaps only after
//!   some dozens of them that found their conditions met.
//! - Signals, counters and barriers do not depend on the route: a wait sees raises of both.
//!
//! # Errors
//! Every call that can wait or be misused returns `Result<_, Fault>`, the same in all threads of its coop. A deadline
//! ends only the call that has it; abort and detected faults end every wait of the communicator on every rank.

mod completion;
mod post;
mod signals;

pub(crate) use completion::look_around;
pub(crate) use signals::signal_tables;

pub use completion::FlushToken;
pub(crate) use post::Raises;
pub use post::{Get, Post, Put, PutValue, SignalPost, Value};

pub use crate::order::{Order, Route, Scope, Sharing};

use crate::backend::{Any, Backend};
use crate::comm::Comm;
use crate::context::Core;
use crate::signal::ContextId;
use crate::team::Rank;
use core::marker::PhantomData;

/// One context of a communicator.
///
/// `B` is the back end: [`Any`] finds it at run time, a named one is compiled in alone.
#[derive(Clone, Copy, Debug)]
pub struct Gin<B: Backend = Any> {
    core: Core,
    backend: PhantomData<B>,
}

impl Gin<Any> {
    /// The context with this number, used by any thread of the GPU; its back end is found at run time.
    ///
    /// Each call reports a number that the communicator does not have, as [`FaultKind::UnknownContext`].
    #[inline(always)]
    #[must_use]
    pub fn new(comm: &Comm, context: ContextId) -> Self {
        Self::with_backend(comm, context)
    }

    /// The same context, whose operations take this route; [`Route::Auto`] if nothing is said.
    ///
    /// Signals and counters are the same on all routes; what covers what is not: see [the module's docs](self#routes).
    #[inline(always)]
    #[must_use]
    pub fn route(mut self, route: Route) -> Self {
        self.core.route = route;
        self
    }
}

impl<B: Backend> Gin<B> {
    /// The same as [`new`](Gin::new), for a back end that is named: `Gin::<Proxy>::with_backend(..)`.
    ///
    /// On a communicator with another back end its calls return [`FaultKind::NoBackend`].
    #[inline(always)]
    #[must_use]
    pub fn with_backend(comm: &Comm, context: ContextId) -> Self {
        let usable = B::serves(comm, context.0);
        let (sharing, order, route) = (Sharing::Gpu, Order::Acquire, Route::Auto);
        let core = Core { comm: *comm, context: context.0, usable, sharing, order, route };
        Self { core, backend: PhantomData }
    }

    /// The same context for fewer threads: a promise that only these use it at the same time.
    #[inline(always)]
    #[must_use]
    pub fn shared_by(mut self, sharing: Sharing) -> Self {
        self.core.sharing = sharing;
        self
    }

    /// The same context, whose waits, reads and flushes have this order; [`Order::Acquire`] if nothing is said.
    /// Barriers always acquire.
    ///
    /// ```ignore
    /// let relaxed = gin.ordered(Order::Relaxed);
    /// relaxed.wait_signal(&Block, SignalId::new(0), 1, deadline)?;
    /// gin.wait_signal(&Block, SignalId::new(1), 1, deadline)?; // makes visible what both cover
    /// ```
    #[inline(always)]
    #[must_use]
    pub fn ordered(mut self, order: Order) -> Self {
        self.core.order = order;
        self
    }

    /// Another context, used alike, but by any thread of the GPU and with waits that acquire.
    #[inline(always)]
    pub(crate) fn in_context(&self, context: ContextId) -> Self {
        let mut other = Self::with_backend(&self.core.comm, context);
        other.core.route = self.core.route;
        other
    }

    /// The communicator.
    #[inline(always)]
    #[must_use]
    pub fn comm(&self) -> &Comm {
        &self.core.comm
    }

    /// The number of the context.
    #[inline(always)]
    #[must_use]
    pub fn context(&self) -> ContextId {
        ContextId(self.core.context)
    }

    /// Returns whether an operation to `peer` takes loads and stores.
    #[inline(always)]
    pub(crate) fn takes_lsa(&self, peer: Rank) -> bool {
        B::LSA
            && match self.core.route {
                Route::Auto => self.core.comm.lsa_reaches(peer),
                Route::Lsa => true,
                Route::Network => false,
            }
    }

    #[inline(always)]
    pub(crate) fn core(&self) -> &Core {
        &self.core
    }
}
