// SPDX-License-Identifier: MIT OR Apache-2.0
//! Host side of gin: communicators, the proxy, and jobs of several ranks.
//!
//! | module | holds |
//! | --- | --- |
//! | [`world`] | runs one function per rank, each with a device and a bootstrap |
//! | [`comm`] | communicators and windows |
//! | [`proxy`] | executes the requests that kernels post |
#![warn(unreachable_pub)]

pub mod comm;
pub mod proxy;
pub mod world;

pub use comm::{CommConfig, CommError, Communicator, DeviceComm, Requirements, Window, WindowFlags};
pub use world::{Rank, WorldConfig, launch};
