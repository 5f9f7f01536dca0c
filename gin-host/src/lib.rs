// SPDX-License-Identifier: MIT OR Apache-2.0
//! Host side of gin: devices, communicators, windows, the proxy and its networks.
//!
//! | module | holds |
//! | --- | --- |
//! | [`boot`] | how the processes of a job meet |
//! | [`world`] | runs one function per rank, each with a device and a way to meet the others |
//! | [`comm`] | communicators and windows |
//! | [`gpu`] | devices, streams, kernels and launches |
//! | [`proxy`] | carries out what kernels post |
//! | [`net`] | what moves bytes between ranks |
//! | [`nic`] | NICs that a GPU drives by itself |
//! | [`placement`] | which processors progress threads run on |
#![warn(missing_docs, unreachable_pub)]

pub mod boot;
pub mod comm;
mod copy;
pub mod gpu;
mod ibverbs;
pub mod net;
pub mod nic;
pub mod placement;
pub mod proxy;
pub mod rt;
mod share;
mod wire;
pub mod world;

pub use boot::UniqueId;
pub use comm::{CommConfig, CommError, Communicator, DeviceComm, Requirements, Window, WindowFlags};
pub use gpu::{GpuError, KernelArg, LaunchConfig};
pub use world::{Rank, WorldConfig, launch};
