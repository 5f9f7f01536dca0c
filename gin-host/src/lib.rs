// SPDX-License-Identifier: MIT OR Apache-2.0
//! Host side of gin: communicators, the proxy, and jobs of several ranks.
//!
//! | module | holds |
//! | --- | --- |
//! | [`world`] | runs one function per rank, each with a device and a bootstrap |
//! | [`comm`] | communicators and windows |
//! | [`proxy`] | executes the requests that kernels post |
#![warn(missing_docs, unreachable_pub)]

pub mod comm;
pub mod proxy;
pub mod world;

pub use gin_boot::{self as boot, UniqueId, rt};
pub use gin_gpu::{self as gpu, GpuError, KernelArg, LaunchConfig, placement};
pub use gin_net as net;
/// NICs that kernels drive.
pub mod nic {
    pub use gin_nic::*;
    pub use gin_soft_hca_host::{self as soft, SoftConfig, SoftEngine, SoftFabric, SoftHca};
}
pub use comm::{CommConfig, CommError, Communicator, DeviceComm, Requirements, Window, WindowFlags};
pub use world::{Rank, WorldConfig, launch};
