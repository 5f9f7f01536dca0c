// SPDX-License-Identifier: MIT OR Apache-2.0
//! Posts that are checked once and issued many times.

use super::by_stores::Raises;
use super::request::{OneValue, Request, width_log2};
use super::{Post, Value};
use crate::backend::Backend;
use crate::coop::{Coop, lead};
use crate::fault::{self, Fault, Unmet};
use crate::order::Scope;
use gin_abi::{FaultKind, Operation};

/// A post that was checked, with the addresses that it needs: [`Post::prepare`] makes it. It may be issued any number
/// of times, as long as its windows are registered.
#[derive(Clone, Copy, Debug)]
#[must_use = "nothing is posted before `issue`"]
pub struct Prepared<'a, B: Backend, R> {
    post: Post<'a, B, R>,
    /// It takes loads and stores.
    lsa: bool,
    raises: Raises,
    /// For loads and stores: the destination's address, the source's address, and the number of bytes.
    ways: (u64, u64, u64),
}

impl<'a, B: Backend, R: Request> Prepared<'a, B, R> {
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub(super) fn of(post: Post<'a, B, R>) -> Result<Self, Fault> {
        let lsa = post.takes_lsa();
        post.check(lsa)?;
        let (raises, ways) =
            if lsa { (post.raises(), post.request.ways(post.peer)) } else { (Raises::none(&post.options), (0, 0, 0)) };
        Ok(Self { post, lsa, raises, ways })
    }

    /// Posts the request once more, as [`Post::issue`] does, without its checks. All threads of `coop` call.
    ///
    /// Ordering: as [`Post::issue`]. A put or get by loads and stores that raises nothing does not let the threads meet
    /// after it. So a series of small puts and one [`signal`](crate::gin::Gin::signal) behind them release once.
    ///
    /// # Errors
    /// The same in all threads; never by loads and stores. Nothing was posted, except after
    /// [`FaultKind::QueueBroken`].
    ///
    /// | fault | cause |
    /// | --- | --- |
    /// | [`FaultKind::NotConnected`] | the kernel drives the NIC itself and has no connection to the peer |
    /// | [`FaultKind::Timeout`] | the queue had no room in time |
    /// | [`FaultKind::QueueBroken`] | the deadline passed after a slot was claimed; the communicator ends |
    /// | the communicator's fault or abort | it ended the wait for room |
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn issue(&self, coop: &impl Coop) -> Result<(), Fault> {
        called!(here);
        if !self.lsa {
            return lead!(coop, self.post.post());
        }
        let options = &self.post.options;
        coop.sync();
        #[cfg(not(target_arch = "nvptx64"))]
        self.post.told(self.raises, self.ways.0, coop.elect());
        if R::BY_ALL {
            // Safety: the check found the ranges in range, and the peer reached.
            unsafe { self.post.request.store(coop, self.ways) };
            if options.signal.is_none() & options.counter.is_none() {
                return Ok(());
            }
            // All threads have stored before one of them raises.
            coop.sync();
        }
        if coop.elect() {
            if !R::BY_ALL {
                // Safety: as above.
                unsafe { self.post.request.store(&crate::coop::Thread, self.ways) };
            }
            self.raises.publish(coop, if R::STORES { Scope::Thread } else { options.given });
        }
        // A thread returns only once the post is made.
        coop.sync();
        Ok(())
    }
}

impl<B: Backend> Prepared<'_, B, OneValue> {
    /// Returns the same post of another value.
    ///
    /// # Errors
    /// [`FaultKind::LengthMismatch`] if the value has another size than the prepared one.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn value<T: Value>(mut self, value: T) -> Result<Self, Fault> {
        let OneValue { there, width_log2: width, .. } = &self.post.request;
        let core = self.post.gin.core();
        let place = core.fault(FaultKind::LengthMismatch, Operation::PutValue).with_peer(self.post.peer.world());
        fault::check!(place, |judge| {
            judge.condition(const { width_log2::<T>() } == *width, || {
                Unmet::new(FaultKind::LengthMismatch).of(there.subject()).values(1 << *width, size_of::<T>() as u64)
            });
        })?;
        self.post.request.value = value.to_word();
        Ok(self)
    }
}
