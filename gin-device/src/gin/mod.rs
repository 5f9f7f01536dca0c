// SPDX-License-Identifier: MIT OR Apache-2.0
//! The front end: a context of a communicator and its operations.
//!
//! | call | does | order |
//! | --- | --- | --- |
//! | [`put`](Gin::put) | writes the caller's memory into the peer's | none among puts; a signal may be bound to it |
//! | [`put_value`](Gin::put_value) | writes 1, 2, 4 or 8 bytes from registers | as put |
//! | [`get`](Gin::get) | reads the peer's memory into the caller's | visible after `flush` |
//! | [`signal`](Gin::signal) | raises a word at the peer | strong: after all earlier puts to that peer; weak: none |
//! | [`signal_all_routes`](Gin::signal_all_routes) | the same | after all earlier puts to that peer, of either route |
//! | [`signal_all_contexts`](Gin::signal_all_contexts) | the same, once the puts of other contexts have arrived | after all earlier puts to that peer, of any context and route |
//! | [`flush`](Gin::flush) | waits for all earlier operations | sources may be reused, gets are visible |
//! | [`flush_async`](Gin::flush_async), [`wait`](Gin::wait) | the same for one peer, in two steps | the same |
//! | [`quiet`](Gin::quiet), [`quiet_all`](Gin::quiet_all) | wait for all earlier puts, to one peer or to all | puts have arrived |
//! | [`wait_signal`](Gin::wait_signal), [`read_signal`](Gin::read_signal) | wait for and read the caller's signals | acquire |
//! | [`wait_counter`](Gin::wait_counter), [`read_counter`](Gin::read_counter) | wait for and read the caller's counters | acquire |
//!
//! # Ordering
//! - The receiver sees a *strong* signal only after every earlier put and signal of the same context and route to the
//!   same peer has arrived. *Earlier* means happens-before at GPU scope (program order, barriers, atomics).
//! - The receiver sees a *weak* signal only after the put that it is bound to.
//! - A counter reports that the source of its operation may be reused. It reports neither other operations nor arrival.
//! - A flush reports the same of all earlier operations of the context, and that the data of gets is visible. It does
//!   not report the arrival of puts; [`quiet`](Gin::quiet) does.
//! - Nothing orders two contexts but a wait for arrival: [`signal_all_contexts`](Gin::signal_all_contexts) waits.
//!
//! # Routes
//! An operation of a `Gin` without a named back end takes one of two routes. To peers of the LSA team it takes loads
//! and stores by the calling threads. To others it takes the network, through the back end. The route depends on
//! context and peer alone, never on sizes. [`route`](Gin::route) forces either route; `Gin<Proxy>` knows the network
//! only.
//!
//! - The order above holds on each route: a strong signal covers earlier puts of its own route. A kernel that has used
//!   both routes to one peer raises by [`signal_all_routes`](Gin::signal_all_routes), which covers the puts of both.
//! - With loads and stores, when `issue` returns, a put has left its source, and a get is visible to the threads of its
//!   coop. Counters count as on the network; flushes and tokens have nothing to wait for.
//! - Loads and stores are carried out in every state of the communicator. After an abort a wait reports it, though
//!   perhaps only after some dozens of waits that found their conditions met.
//! - Signals, counters and barriers do not depend on the route: a wait sees raises of both.
//!
//! # Errors
//! Every call that can wait or be misused returns `Result<_, Fault>`, the same in all threads of its coop. A deadline
//! ends only the call that has it; abort and detected faults end every wait of the communicator on every rank.

mod completion;
mod post;
mod quiet;
mod signals;

pub(crate) use completion::{is_time_to_look, look_around};
pub(crate) use signals::signal_tables;

pub use completion::FlushToken;
pub use post::{Get, Post, Prepared, Put, PutValue, SignalPost, Value};
pub use signals::PreparedWait;

pub use crate::order::{Order, Route, Scope, Sharing};

use crate::backend::{Any, Backend};
use crate::comm::Comm;
use crate::context::Core;
use crate::signal::ContextId;
use crate::team::Rank;
use core::marker::PhantomData;

/// One context of a communicator.
///
/// `B` is the back end. [`Any`] finds it at run time; a named back end is compiled in alone.
#[derive(Clone, Copy, Debug)]
pub struct Gin<B: Backend = Any> {
    core: Core,
    backend: PhantomData<B>,
}

impl Gin<Any> {
    /// Returns the context with this number, for any thread of the GPU. Its operations find the back end at run time.
    ///
    /// If the communicator has no context of this number, every operation returns
    /// [`FaultKind::UnknownContext`](gin_abi::FaultKind::UnknownContext).
    #[inline(always)]
    #[must_use]
    pub fn new(comm: &Comm, context: ContextId) -> Self {
        Self::with_backend(comm, context)
    }

    /// Returns the same context, whose operations take this route. The default is [`Route::Auto`].
    ///
    /// All routes share signals and counters, but a strong signal covers only the puts of its route: see
    /// [the module's docs](self#routes).
    #[inline(always)]
    #[must_use]
    pub fn route(mut self, route: Route) -> Self {
        self.core.route = route;
        self
    }
}

impl<B: Backend> Gin<B> {
    /// Returns the context with this number for a named back end: `Gin::<Proxy>::with_backend(..)`.
    ///
    /// On a communicator with another back end its operations return
    /// [`FaultKind::NoBackend`](gin_abi::FaultKind::NoBackend).
    #[inline(always)]
    #[must_use]
    pub fn with_backend(comm: &Comm, context: ContextId) -> Self {
        let usable = B::serves(comm, context.0);
        let (sharing, order, route) = (Sharing::Gpu, Order::Acquire, Route::Auto);
        let core = Core { comm: *comm, context: context.0, usable, sharing, order, route };
        Self { core, backend: PhantomData }
    }

    /// Returns the same context for fewer threads. The caller promises that only these use it at the same time.
    #[inline(always)]
    #[must_use]
    pub fn shared_by(mut self, sharing: Sharing) -> Self {
        self.core.sharing = sharing;
        self
    }

    /// Returns the same context, whose waits, reads and flushes have this order. The default is [`Order::Acquire`].
    /// Barriers always acquire.
    ///
    /// ```
    /// # use gin_device::prelude::*;
    /// # fn wait(gin: &Gin, deadline: Deadline) -> Result<(), Fault> {
    /// let relaxed = gin.ordered(Order::Relaxed);
    /// relaxed.wait_signal(&Block, SignalId::new(0), 1, deadline)?;
    /// gin.wait_signal(&Block, SignalId::new(1), 1, deadline)?; // makes visible the puts that both signals cover
    /// # Ok(())
    /// # }
    /// ```
    #[inline(always)]
    #[must_use]
    pub fn ordered(mut self, order: Order) -> Self {
        self.core.order = order;
        self
    }

    /// Returns another context with the same route, for any thread of the GPU, whose waits acquire.
    #[inline(always)]
    pub(crate) fn in_context(&self, context: ContextId) -> Self {
        let mut other = Self::with_backend(&self.core.comm, context);
        other.core.route = self.core.route;
        other
    }

    /// Returns the communicator.
    #[inline(always)]
    #[must_use]
    pub fn comm(&self) -> &Comm {
        &self.core.comm
    }

    /// Returns the number of the context.
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
