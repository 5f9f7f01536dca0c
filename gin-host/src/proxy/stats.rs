// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a proxy has done.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Figures of one context, kept by its proxy.
        #[derive(Debug, Default)]
        pub(crate) struct Counters { $(pub(crate) $name: AtomicU64),* }

        /// Figures of one context since its communicator was made.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        pub struct ContextStats { $($(#[$doc])* pub $name: u64),* }

        impl Counters {
            pub(crate) fn read(&self) -> ContextStats {
                ContextStats { $($name: self.$name.load(Ordering::Relaxed)),* }
            }
        }

        impl std::ops::Add for ContextStats {
            type Output = Self;

            fn add(self, other: Self) -> Self {
                Self { $($name: self.$name + other.$name),* }
            }
        }
    };
}

counters! {
    /// Requests taken from the queue.
    taken,
    /// Requests finished, failed ones included.
    finished,
    /// Requests that failed.
    failed,
    /// Requests handed to the network; a long put is several.
    posted,
    /// Bytes handed to the network in puts.
    put_bytes,
    /// Bytes asked for in gets.
    get_bytes,
    /// Signals sent.
    signals,
    /// Times that a request to a peer with a full list held up the queue. Each request counts once.
    stalls,
}

/// Adds to a counter that only this thread writes.
pub(crate) fn add(counter: &AtomicU64, amount: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
}
