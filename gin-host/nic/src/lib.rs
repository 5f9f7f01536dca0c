// SPDX-License-Identifier: MIT OR Apache-2.0
//! The bring-up of device-driven NICs.
//!
//! [`Nic::open`] queries a NIC's capabilities and refuses a NIC that lacks one. [`DeviceQueues::new`] creates the queue
//! pairs of a context in one slab of memory of a device. Ranks exchange their [`Address`]es, and
//! [`DeviceQueues::connect`] makes each queue pair ready. The error of a failed step names the NIC, the step and the
//! peer, and no object remains.
//!
//! Kernels ring doorbells if their device can map the NIC's doorbell pages. Otherwise, or on request ([`Doorbells`]), a
//! [`DoorbellRelay`] rings for them. [`probe`] returns the NICs of this host that can serve GPUs, and the reasons why
//! others cannot.
//!
//! | module | holds |
//! | --- | --- |
//! | [`loopback`] | a check that a NIC does what kernels need |
//! | [`hca`] | the trait of NICs: the calls that the bring-up makes |
//! | [`mlx5`] | ConnectX NICs, through libibverbs and libmlx5 |
//!
//! It has not brought up a real NIC yet.
#![warn(unreachable_pub)]

mod address;
mod device;
mod device_queue_pairs;
mod doorbells;
#[doc(hidden)]
pub mod drain;
mod error;
pub mod hca;
#[doc(hidden)]
pub mod layout;
pub mod loopback;
pub mod mlx5;
mod open;
mod owned;
mod probe;
mod queues;
mod reach;
mod relay;

pub use address::Address;
pub use device::{RegisteredExtent, RegisteredSlice};
pub use device_queue_pairs::{DeviceQueuePairs, Shape, Target};
pub use doorbells::{DoorbellRelease, DoorbellSource, Doorbells};
pub use drain::DrainError;
pub use error::{DeviceQueueError, FileRefusal, NicError, NicPeer, Step};
pub use hca::{Hca, HcaError};
pub use layout::{DEPTHS, Layout, QueuePlace, QueueSpec, Role};
pub use mlx5::{Absent, Mlx5};
pub use open::{Nic, NicCapabilities, NicConfig, OwnGid};
pub use probe::{Found, Refusal, probe};
pub use queues::{DeviceQueues, Expired, QueueInfo};
pub use relay::{DoorbellRelay, RelayLine};
