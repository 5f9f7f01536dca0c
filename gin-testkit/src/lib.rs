// SPDX-License-Identifier: MIT OR Apache-2.0
//! Networks for tests, each over any other: they do what the contract allows and a kind network does not.
//!
//! | network | does |
//! | --- | --- |
//! | [`Delay`] | carries requests out late, in the order of each context and peer |
//! | [`Reorder`] | reorders whatever is not ordered by the contract |
//! | [`Withhold`] | keeps what arrives out of the GPU's view until it is made visible, as a NIC may |
//! | [`FailOnDemand`] | fails the requests that a switch names |
//! | [`WeakOnly`] | says that it has no strong signals or none at window addresses |
//! | [`SlowPeer`] | carries requests to one peer out late |
//! | [`Trickle`] | takes few requests at a time |
//!
//! All their choices come from a seed, and nothing is done twice.

#![warn(unreachable_pub)]

mod delay;
mod fail;
mod hca;
mod limits;
mod reorder;
mod sabotage;
mod slow;
mod withhold;

pub use delay::Delay;
pub use fail::{FailOnDemand, FailSwitch, Failure};
pub use hca::FailingHca;
pub use limits::{Trickle, WeakOnly};
pub use reorder::Reorder;
pub use sabotage::Sabotage;
pub use slow::SlowPeer;
pub use withhold::Withhold;

/// Implements the calls of [`Network`](gin_net::Network) that a wrapper passes on as they are.
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
