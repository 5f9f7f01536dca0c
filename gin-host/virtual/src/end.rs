// SPDX-License-Identifier: MIT OR Apache-2.0
//! The end of a world of OS threads, and its threads that wait.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::actor::Actor;
use crate::engine::Failure;
use crate::error::Waiter;
use crate::lock::lock;

/// The end of a world of OS threads, once it was requested, and its cause.
#[derive(Default)]
pub(crate) struct WorldEnd {
    flag: AtomicBool,
    failure: Mutex<Option<Failure>>,
    /// Host functions and services that have waited for a while.
    waiting: Mutex<Vec<Waiter>>,
    /// Number of their waits that have ended.
    waits: AtomicU64,
}

impl WorldEnd {
    pub(crate) fn is_ended(&self) -> bool {
        self.flag.load(Ordering::Acquire)
    }

    pub(crate) fn end(&self, failure: Option<Failure>) {
        let mut slot = lock(&self.failure);
        if slot.is_none() {
            *slot = failure;
        }
        self.flag.store(true, Ordering::Release);
    }

    /// Records that an OS thread of the world waits.
    pub(crate) fn wait_begins(&self, waiter: Waiter) {
        lock(&self.waiting).push(waiter);
    }

    pub(crate) fn wait_ends(&self, actor: &Actor) {
        lock(&self.waiting).retain(|waiter| waiter.actor != *actor);
        self.waits.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the OS threads that have waited for a while, and the number of such waits that have ended.
    pub(crate) fn waiting(&self) -> (Vec<Waiter>, u64) {
        (lock(&self.waiting).clone(), self.waits.load(Ordering::Relaxed))
    }

    /// Withdraws the request to end and returns its cause.
    pub(crate) fn reset(&self) -> Option<Failure> {
        let failure = lock(&self.failure).take();
        self.flag.store(false, Ordering::Release);
        failure
    }
}
