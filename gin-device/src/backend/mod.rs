// SPDX-License-Identifier: MIT OR Apache-2.0
//! Back ends: who carries out what the front end asks.
//!
//! A back end is chosen when the kernel is compiled (`Gin<Proxy>`) or when it runs (`Gin<Any>`, the default); either way
//! every operation is there.

mod proxy;

pub use proxy::Proxy;

use crate::comm::Comm;
use crate::gin::Core;
use crate::status::Stop;
use gin_abi::{Deadline, Descriptor, Operation};

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Proxy {}
    impl Sealed for super::Any {}
}

/// What the front end needs of a back end. Arguments have been checked, and that the back end serves the communicator.
pub trait Backend: sealed::Sealed + Copy {
    /// Whether operations take loads and stores where they can: a named back end does not.
    #[doc(hidden)]
    const LSA: bool;

    /// Whether the communicator has a context of this number and it is this back end's.
    #[doc(hidden)]
    fn serves(comm: &Comm, context: u32) -> bool;

    /// Posts one request of the calling thread; `operation` is what the user called. The payload has been released.
    ///
    /// # Errors
    /// [`Stop::Deadline`] if there was no room in time; nothing was posted then. [`Stop::Fault`] if the communicator has
    /// one, which may be that of this very post, when it gave up after its claim.
    #[doc(hidden)]
    fn post(core: &Core, request: &Descriptor, operation: Operation, deadline: Deadline) -> Result<(), Stop>;

    /// The place in the order of posts that the next one will get.
    #[doc(hidden)]
    fn position(core: &Core) -> u64;

    /// Waits until all posts before `position` are finished, those to `peer` only if one is named. Orders as the core
    /// says.
    ///
    /// # Errors
    /// [`Stop`] if the wait ended early or one of the posts failed.
    #[doc(hidden)]
    fn wait(core: &Core, peer: Option<u32>, position: u64, deadline: Deadline) -> Result<(), Stop>;
}

/// Whichever back end the communicator has; to peers of the LSA team, loads and stores.
#[derive(Clone, Copy, Debug)]
pub struct Any;

impl Backend for Any {
    const LSA: bool = true;

    #[inline(always)]
    fn serves(comm: &Comm, context: u32) -> bool {
        Proxy::serves(comm, context)
    }

    #[inline(always)]
    fn post(core: &Core, request: &Descriptor, operation: Operation, deadline: Deadline) -> Result<(), Stop> {
        Proxy::post(core, request, operation, deadline)
    }

    #[inline(always)]
    fn position(core: &Core) -> u64 {
        Proxy::position(core)
    }

    #[inline(always)]
    fn wait(core: &Core, peer: Option<u32>, position: u64, deadline: Deadline) -> Result<(), Stop> {
        Proxy::wait(core, peer, position, deadline)
    }
}
