// SPDX-License-Identifier: MIT OR Apache-2.0
//! NICs that a GPU drives by itself: what brings their queue pairs up.
//!
//! [`Nic::open`] asks a NIC what it can do and refuses one that is not enough. [`QueueSet::new`] makes the queue pairs
//! of a context in one slab of memory ([`DeviceQueues::new`] allocates it in a device), ranks exchange their
//! [`Address`]es, and [`QueueSet::connect`] makes each ready. Every step that fails says which NIC, which step and
//! which peer; whatever was made until then is ended.
//!
//! Kernels ring doorbells themselves where the NIC's doorbell pages can be mapped into their device; where they cannot,
//! or that is asked for ([`Doorbells`]), a [`DoorbellRelay`] does it for them. [`probe`] says which NICs of this host
//! can serve GPUs, and of each other one why not.
//!
//! | module | holds |
//! | --- | --- |
//! | [`loopback`] | whether a NIC does what kernels will ask of it |
//! | [`hca`] | what the bring-up needs of a NIC, behind one trait |
//! | [`mlx5`] | ConnectX NICs, through libibverbs and libmlx5 |
//!
//! No real NIC has been brought up by this yet.
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
pub use device::{DeviceQueueError, DeviceQueues, RegisteredSlice};
pub use device_queue_pairs::{DeviceQueuePairs, Shape, Target};
pub use doorbells::{DoorbellRelease, Doorbells, Ringer};
pub use drain::DrainError;
pub use error::{FileRefusal, NicError, NicPeer, Step};
pub use hca::{Hca, HcaError};
pub use layout::{DEPTHS, Layout, QueuePlace, QueueSpec, Role};
pub use mlx5::{Absent, Mlx5};
pub use open::{Nic, NicCapabilities, NicConfig, OwnGid, RegisteredMemory};
pub use probe::{Found, Refusal, probe};
pub use queues::{Expired, QueueInfo, QueueSet};
pub use relay::{DoorbellRelay, RelayLine};
