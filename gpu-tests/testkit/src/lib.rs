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
//! fails, and [`LateCopies`] copies as a GPU does, some time after it was asked. [`libfabric_double`] is a libfabric
//! with providers that keep no more than they promise, [`nccl_stand_in`] a NCCL whose ranks are threads.
//! [`in_rotation`] runs a third of long suites by turns.

#![warn(unreachable_pub)]

mod compiled;
mod copies;
mod fail;
mod hca;
mod limits;
mod rotation;
mod sabotage;
mod slow;

pub use compiled::{PROVIDERS, PROVIDERS_FOR_GPUS, libfabric_double, nccl_stand_in};
pub use copies::LateCopies;
pub use fail::{FailOnDemand, FailSwitch, Failure};
pub use gin_net::worst::{Delay, Reorder, Trickle, Withhold};
pub use hca::FailingHca;
pub use limits::WeakOnly;
pub use rotation::{in_rotation, number_from_env, rotation};
pub use sabotage::Sabotage;
pub use slow::SlowPeer;
