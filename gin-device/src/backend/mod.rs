// SPDX-License-Identifier: MIT OR Apache-2.0
//! Back ends: they carry out the operations of the front end.
//!
//! A back end is chosen when the kernel is compiled (`Gin<Proxy>`) or when it runs (`Gin<Any>`, the default); either
//! way every operation is there.

pub mod gdaki;
mod proxy;

pub use gdaki::Gdaki;
pub use proxy::Proxy;

use crate::comm::Comm;
use crate::context::Core;
use crate::order::{Scope, release};
use crate::status::WaitError;
use crate::sys::Global;
use gin_abi::{Deadline, Descriptor, Operation};

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Proxy {}
    impl Sealed for super::Gdaki {}
    impl Sealed for super::Any {}
}

/// The operations that the front end needs of a back end. Arguments have been checked, and that the back end serves the
/// communicator.
pub trait Backend: sealed::Sealed + Copy {
    /// Operations take loads and stores where they can; a named back end does not.
    #[doc(hidden)]
    const LSA: bool;

    /// Returns whether the communicator has a context of this number and it is this back end's.
    #[doc(hidden)]
    fn serves(comm: &Comm, context: u32) -> bool;

    /// Releases what a post refers to, which the caller has released as far as `given`, as far as `required`.
    #[doc(hidden)]
    #[inline(always)]
    fn release(_core: &Core, given: Scope, required: Scope) {
        release::<Global>(given, required);
    }

    /// Posts one request of the calling thread; `operation` is what the user called. The payload has been released.
    ///
    /// # Errors
    /// [`WaitError::Deadline`] if there was no room in time; nothing was posted then. [`WaitError::Fault`] if the
    /// communicator has one, which may be that of this very post, when it gave up after its claim.
    #[doc(hidden)]
    fn post(core: &Core, request: &Descriptor, operation: Operation, deadline: Deadline) -> Result<(), WaitError>;

    /// The place in the order of posts that the next one, to `peer` if one is named, will get.
    #[doc(hidden)]
    fn position(core: &Core, peer: Option<u32>) -> u64;

    /// Waits until all posts before `position` are finished, those to `peer` only if one is named, which must be the
    /// one that was named for the position. Orders as the core says.
    ///
    /// # Errors
    /// [`Stop`] if the wait ended early or one of the posts failed.
    #[doc(hidden)]
    fn wait(core: &Core, peer: Option<u32>, position: u64, deadline: Deadline) -> Result<(), WaitError>;

    /// Waits for signals and counters call this now and then: it does all work that these need.
    #[doc(hidden)]
    #[inline(always)]
    fn attend(_core: &Core) {}
}

/// Whichever back end the communicator has; to peers of the LSA team, loads and stores.
///
/// In kernels for GPUs it knows [`Gdaki`] only with the crate's feature `gdaki-any`, as each of its operations is long:
/// a kernel without it tells [`FaultKind::NoBackend`](gin_abi::FaultKind::NoBackend) on a communicator of that back
/// end, and `Gin<Gdaki>` is always there.
#[derive(Clone, Copy, Debug)]
pub struct Any;

impl Backend for Any {
    const LSA: bool = true;

    #[inline(always)]
    fn serves(comm: &Comm, context: u32) -> bool {
        Proxy::serves(comm, context) || (ANY_KNOWS_GDAKI && Gdaki::serves(comm, context))
    }

    #[inline(always)]
    fn release(core: &Core, given: Scope, required: Scope) {
        if !drives_nic(core) {
            Proxy::release(core, given, required);
        }
    }

    #[inline(always)]
    fn post(core: &Core, request: &Descriptor, operation: Operation, deadline: Deadline) -> Result<(), WaitError> {
        if drives_nic(core) {
            outlined::post(core, request, operation, deadline)
        } else {
            Proxy::post(core, request, operation, deadline)
        }
    }

    #[inline(always)]
    fn position(core: &Core, peer: Option<u32>) -> u64 {
        if drives_nic(core) { outlined::position(core, peer) } else { Proxy::position(core, peer) }
    }

    #[inline(always)]
    fn wait(core: &Core, peer: Option<u32>, position: u64, deadline: Deadline) -> Result<(), WaitError> {
        if drives_nic(core) {
            outlined::wait(core, peer, position, deadline)
        } else {
            Proxy::wait(core, peer, position, deadline)
        }
    }

    #[inline(always)]
    fn attend(core: &Core) {
        if drives_nic(core) {
            outlined::attend(core);
        }
    }
}

/// The operations of [`Gdaki`] as functions, for [`Any`]: each is long, and is there once this way and not at each call
/// beside that of the proxy. `gin-build` lets a kernel call these and no others.
mod outlined {
    use super::{Backend, Core, Deadline, Descriptor, Gdaki, Operation, WaitError};

    #[inline(never)]
    pub(super) fn post(
        core: &Core,
        request: &Descriptor,
        operation: Operation,
        deadline: Deadline,
    ) -> Result<(), WaitError> {
        Gdaki::post(core, request, operation, deadline)
    }

    #[inline(never)]
    pub(super) fn position(core: &Core, peer: Option<u32>) -> u64 {
        Gdaki::position(core, peer)
    }

    #[inline(never)]
    pub(super) fn wait(core: &Core, peer: Option<u32>, position: u64, deadline: Deadline) -> Result<(), WaitError> {
        Gdaki::wait(core, peer, position, deadline)
    }

    #[inline(never)]
    pub(super) fn attend(core: &Core) {
        Gdaki::attend(core);
    }
}

/// [`Any`] has the code of [`Gdaki`].
const ANY_KNOWS_GDAKI: bool = cfg!(any(not(target_arch = "nvptx64"), feature = "gdaki-any"));

/// Returns whether kernels drive the NIC themselves, for a context that is served.
#[inline(always)]
fn drives_nic(core: &Core) -> bool {
    ANY_KNOWS_GDAKI && core.comm().gdaki_contexts() != 0
}
