// SPDX-License-Identifier: MIT OR Apache-2.0
//! Back ends, which carry out the operations of the front end over the network.
//!
//! A kernel names its back end when it is compiled (`Gin<Proxy>`), or finds it when it runs (`Gin<Any>`, the default).
//! All have the same operations.

pub mod gdaki;
mod proxy;

pub use gdaki::Gdaki;
pub use proxy::Proxy;

use crate::comm::Comm;
use crate::context::Core;
use crate::fault::Fault;
use crate::order::{Scope, release};
use crate::status::WaitError;
use crate::sys::Global;
use gin_abi::{Deadline, Descriptor, FaultKind, FaultSubject, Operation};

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Proxy {}
    impl Sealed for super::Gdaki {}
    impl Sealed for super::Any {}
}

/// The operations of a back end. The front end has checked the arguments, and that the back end serves the
/// communicator.
pub trait Backend: sealed::Sealed + Copy {
    /// Operations take loads and stores to peers that these reach. False for a named back end.
    #[doc(hidden)]
    const LSA: bool;

    /// Returns whether the communicator has a context of this number and this back end serves it.
    #[doc(hidden)]
    fn serves(comm: &Comm, context: u32) -> bool;

    /// Releases the memory that a post refers to, to `required`. The caller has released it to `given`.
    #[doc(hidden)]
    #[inline(always)]
    fn release(_core: &Core, given: Scope, required: Scope) {
        release::<Global>(given, required);
    }

    /// Why a post ended early.
    #[doc(hidden)]
    type Ended: Into<WaitError>;

    /// Posts one request of the calling thread. `operation` is the user's call. The payload is released.
    ///
    /// # Errors
    /// [`WaitError::Deadline`] if there was no room in time: nothing was posted. [`WaitError::Fault`] if the
    /// communicator has a fault, which may be this post's own if it gave up after it claimed a slot.
    /// [`WaitError::NotConnected`] if there is no connection to the peer. [`explain`](Self::explain) makes the fault.
    #[doc(hidden)]
    fn post(core: &Core, request: &Descriptor, operation: Operation, deadline: Deadline) -> Result<(), Self::Ended>;

    /// Returns the fault of a post to `peer` that ended early.
    #[doc(hidden)]
    #[inline(always)]
    fn explain(core: &Core, peer: u32, stop: Self::Ended, operation: Operation, deadline: Deadline) -> Fault {
        let timeout = core.fault(FaultKind::Timeout, operation).with_peer(peer);
        core.status().explain(stop.into(), timeout, FaultSubject::None, deadline, 0, 0)
    }

    /// Returns the position of the next post among all posts, or among the posts to `peer` if it is named.
    #[doc(hidden)]
    fn position(core: &Core, peer: Option<u32>) -> u64;

    /// Waits until all posts before `position` are complete, or only the posts to `peer` if it is named. `peer` must be
    /// the same as for the [`position`](Self::position). Acquires in the core's order.
    ///
    /// # Errors
    /// [`WaitError`] if the wait ended early or one of the posts failed.
    #[doc(hidden)]
    fn wait(core: &Core, peer: Option<u32>, position: u64, deadline: Deadline) -> Result<(), WaitError>;

    /// Returns the request whose completion confirms that all earlier puts of the context to `peer` have arrived, for
    /// networks where completion is not arrival.
    #[doc(hidden)]
    #[inline(always)]
    fn confirmation(_core: &Core, peer: u32) -> Descriptor {
        Descriptor::quiet(peer)
    }

    /// Does the work of the back end that waits for signals and counters depend on. They call this now and then.
    #[doc(hidden)]
    #[inline(always)]
    fn attend(_core: &Core) {}
}

/// The communicator's back end, found at run time; loads and stores to peers of the LSA team.
///
/// In kernels for GPUs it knows [`Gdaki`] only with the crate's feature `gdaki-any`, because the code of that back end
/// is long. A post is two calls then: one finds slots before the request takes registers, the other one calls nothing.
/// Without the feature, an operation on a communicator of that back end returns
/// [`FaultKind::NoBackend`]. `Gin<Gdaki>` needs no feature.
#[derive(Clone, Copy, Debug)]
pub struct Any;

impl Backend for Any {
    const LSA: bool = true;
    type Ended = WaitError;

    #[inline(always)]
    fn serves(comm: &Comm, context: u32) -> bool {
        (!GDAKI_ALONE && Proxy::serves(comm, context)) || (ANY_KNOWS_GDAKI && Gdaki::serves(comm, context))
    }

    #[inline(always)]
    fn release(core: &Core, given: Scope, required: Scope) {
        if !drives_nic(core) {
            Proxy::release(core, given, required);
        }
    }

    #[inline(always)]
    fn post(core: &Core, request: &Descriptor, operation: Operation, deadline: Deadline) -> Result<(), WaitError> {
        if GDAKI_ALONE {
            Gdaki::post(core, request, operation, deadline).map_err(WaitError::from)
        } else if drives_nic(core) {
            let (copy, place, count) = (core.comm().handle().copy, core.place(), gdaki::entries(request));
            if count == 0 {
                return Ok(());
            }
            let (mut chunk, mut deadline) = (0, deadline);
            loop {
                let slots = outlined::claim(copy, place, request.peer, count, deadline);
                if let Some(stop) = gdaki::Claimed(slots).stop() {
                    return Err(stop);
                }
                let [a, b, c, d, e, f, g, h] = request.encode();
                if outlined::fill(copy, place, slots, chunk, a, b, c, d, e, f, g, h) {
                    return Ok(());
                }
                // A post that has begun must be finished.
                (chunk, deadline) = (chunk + 1, Deadline::NONE);
            }
        } else {
            Proxy::post(core, request, operation, deadline)
        }
    }

    #[inline(always)]
    fn position(core: &Core, peer: Option<u32>) -> u64 {
        if GDAKI_ALONE {
            Gdaki::position(core, peer)
        } else if drives_nic(core) {
            outlined::position(core.comm().handle().copy, core.place(), peer)
        } else {
            Proxy::position(core, peer)
        }
    }

    #[inline(always)]
    fn wait(core: &Core, peer: Option<u32>, position: u64, deadline: Deadline) -> Result<(), WaitError> {
        if GDAKI_ALONE {
            Gdaki::wait(core, peer, position, deadline)
        } else if drives_nic(core) {
            match outlined::wait(core.comm().handle().copy, core.place(), peer, position, deadline) {
                None => Ok(()),
                Some(stop) => Err(stop),
            }
        } else {
            Proxy::wait(core, peer, position, deadline)
        }
    }

    #[inline(always)]
    fn confirmation(core: &Core, peer: u32) -> Descriptor {
        if drives_nic(core) { Gdaki::confirmation(core, peer) } else { Proxy::confirmation(core, peer) }
    }

    #[inline(always)]
    fn attend(core: &Core) {
        if GDAKI_ALONE {
            Gdaki::attend(core);
        } else if drives_nic(core) {
            outlined::attend(core.comm().handle().copy, core.place());
        }
    }
}

/// The operations of [`Gdaki`] as functions, for [`Any`]. Their code is long; as functions a kernel has it once, not at
/// each call. `gin-build` lets a kernel call these functions and no others. Arguments are words, because a structure
/// would be passed on the stack: `copy` is that of the handle, `place` that of [`Core::place`].
mod outlined {
    use super::{Backend, Core, Deadline, Descriptor, Gdaki, WaitError, gdaki};

    /// Claims slots, before the request takes registers.
    #[inline(never)]
    pub(super) fn claim(copy: u64, place: u64, peer: u32, count: u32, deadline: Deadline) -> u64 {
        // Safety: `Any` passes the copy of its communicator's handle.
        let core = unsafe { Core::at(copy, place) };
        gdaki::claim(&core, peer, count, deadline).0
    }

    /// Writes the entries of a chunk and publishes them. Returns whether it is the last. Calls nothing.
    #[inline(never)]
    #[expect(clippy::too_many_arguments, reason = "see above")]
    pub(super) fn fill(
        copy: u64,
        place: u64,
        slots: u64,
        chunk: u32,
        a: u64,
        b: u64,
        c: u64,
        d: u64,
        e: u64,
        f: u64,
        g: u64,
        h: u64,
    ) -> bool {
        // Safety: as above.
        let core = unsafe { Core::at(copy, place) };
        gdaki::fill(&core, gdaki::Claimed(slots), chunk, &Descriptor::read(&[a, b, c, d, e, f, g, h]))
    }

    #[inline(never)]
    pub(super) fn position(copy: u64, place: u64, peer: Option<u32>) -> u64 {
        // Safety: as above.
        let core = unsafe { Core::at(copy, place) };
        Gdaki::position(&core, peer)
    }

    #[inline(never)]
    pub(super) fn wait(
        copy: u64,
        place: u64,
        peer: Option<u32>,
        position: u64,
        deadline: Deadline,
    ) -> Option<WaitError> {
        // Safety: as above.
        let core = unsafe { Core::at(copy, place) };
        Gdaki::wait(&core, peer, position, deadline).err()
    }

    #[inline(never)]
    pub(super) fn attend(copy: u64, place: u64) {
        // Safety: as above.
        let core = unsafe { Core::at(copy, place) };
        Gdaki::attend(&core);
    }
}

/// [`Any`] has the code of [`Gdaki`].
const ANY_KNOWS_GDAKI: bool = cfg!(any(not(target_arch = "nvptx64"), feature = "gdaki-any")) || GDAKI_ALONE;

/// [`Any`] has no other code than that of [`Gdaki`], so that a test can compare a choice with its larger half.
const GDAKI_ALONE: bool = cfg!(all(target_arch = "nvptx64", feature = "gdaki-alone"));

/// Returns whether kernels drive the NIC of a context that is served.
#[inline(always)]
fn drives_nic(core: &Core) -> bool {
    GDAKI_ALONE || ANY_KNOWS_GDAKI && core.comm().gdaki_contexts() != 0
}
