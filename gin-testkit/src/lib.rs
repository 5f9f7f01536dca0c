// SPDX-License-Identifier: MIT OR Apache-2.0
//! Networks and NICs for tests, each over any other. They do what the contract allows and most networks do not do.
//!
//! | network | does |
//! | --- | --- |
//! | [`Delay`] | delays requests, and keeps the order of each context and peer |
//! | [`Reorder`] | reorders everything that the contract does not order |
//! | [`Withhold`] | withholds arrived bytes from the GPU until they are made visible, as a NIC may |
//! | [`FailOnDemand`] | fails the requests that a switch selects |
//! | [`WeakOnly`] | reports no strong signals, or no signals at window addresses |
//! | [`SlowPeer`] | delays requests to one peer |
//! | [`Trickle`] | accepts few requests at a time |
//!
//! All choices come from a seed. [`Sabotage`] makes deliberate mistakes, [`FailingHca`] is a NIC of which one call
//! fails, and [`LateCopies`] copies as a GPU does, some time after it was asked.

#![warn(unreachable_pub)]

mod copies;
mod delay;
mod fail;
mod hca;
mod limits;
mod reorder;
mod sabotage;
mod slow;
mod withhold;

pub use copies::LateCopies;
pub use delay::Delay;
pub use fail::{FailOnDemand, FailSwitch, Failure};
pub use hca::FailingHca;
pub use limits::{Trickle, WeakOnly};
pub use reorder::Reorder;
pub use sabotage::Sabotage;
pub use slow::SlowPeer;
pub use withhold::Withhold;

/// Implements the calls of [`Network`](gin_net::Network) that a wrapper passes on unchanged.
macro_rules! pass_on {
    () => {
        pass_on!(but make_visible);

        fn make_visible(&mut self) -> Result<(), gin_net::NetError> {
            self.inner.make_visible()
        }
    };
    (but make_visible) => {
        fn register_signals(&mut self, signals: &gin_net::LocalSignals) -> Result<gin_net::Key, gin_net::NetError> {
            self.inner.register_signals(signals)
        }

        fn connect_signals(&mut self, keys: &[gin_net::Key]) -> Result<(), gin_net::NetError> {
            self.inner.connect_signals(keys)
        }

        fn register(&mut self, window: &gin_net::LocalWindow) -> Result<gin_net::Key, gin_net::NetError> {
            self.inner.register(window)
        }

        fn fetch(&self) -> Option<gin_net::Fetch> {
            self.inner.fetch()
        }

        fn connect(&mut self, window: u32, keys: &[gin_net::Key]) -> Result<(), gin_net::NetError> {
            self.inner.connect(window, keys)
        }

        fn deregister(&mut self, window: u32) -> bool {
            self.inner.deregister(window)
        }

        fn carries_notices(&self) -> bool {
            self.inner.carries_notices()
        }
    };
}
use pass_on;
