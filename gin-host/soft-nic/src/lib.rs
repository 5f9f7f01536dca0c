// SPDX-License-Identifier: MIT OR Apache-2.0
//! The engine of a software mlx5 NIC. It executes the work-queue entries that a ConnectX would, from the same rings,
//! doorbells and doorbell records, and writes the same completions.
//!
//! It is `no_std` and has neither allocations nor threads. Its runner passes [`Tables`] and a [`Memory`] and calls
//! [`Engine::step`]. So one source runs on a CPU thread, is stepped by a scheduler, or is a resident kernel. The
//! commands that create the objects in the tables belong to the command side, a host crate.
//!
//! | module | holds |
//! | --- | --- |
//! | [`memory`] | the engine's access to memory |
//! | [`tables`] | queue pairs, completion queues and memory regions, as the engine sees them |
//! | [`engine`] | reads doorbells and executes entries |
//! | [`held`] | writes that have completed but are not visible yet |
//! | [`faults`] | faults to inject, and violations by the engine's user |
//! | [`kernel`] | the engine as a kernel |
//!
//! # Stricter than hardware
//! The engine always refuses what a real NIC ignores, and always does what a real NIC does only sometimes. A program
//! that relies on such behaviour is thus noticed:
//!
//! - A doorbell that goes backwards, that announces more than the queue holds, or that precedes its record is a
//!   [violation](faults::Violation) and breaks the queue pair. So does an entry with reserved bytes that are not zero.
//! - Data of a READ becomes visible only by a DUMP of the same queue pair that executes after the READ has completed.
//!   The DUMP has [`FENCE`](gin_abi::mlx5::wqe::Flags::FENCE), or was posted after the completion was seen. Data of a
//!   WRITE to a region with relaxed ordering becomes visible only by a later write of the same queue pair to a region
//!   without. Both may happen earlier if there is no room to hold more.
//! - A READ takes its data when it is answered. Later entries without a fence may have executed before.
//! - An entry may wait for a completion queue only if its queue pair was created as a core-direct master
//!   ([`Options::wait_needs_master`](engine::Options::wait_needs_master)).
//!
//! Some [`Options`] allow what NVIDIA's own device code does and these rules refuse: doorbells before
//! their records, undefined reserved bytes, and DUMPs without a fence behind READs.
//!
//! # Not supported
//! Receive queues, service types other than reliable connections, entries of more than 64 bytes, BlueFlame, events,
//! time stamps, and packets: a message executes as a whole.
#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]
#![warn(unreachable_pub)]

pub mod engine;
pub mod faults;
pub mod held;
pub mod kernel;
pub mod memory;
pub mod tables;

pub use engine::{Engine, Options, Progress, Tables};
pub use faults::{Fault, FaultKind, Mistake, Violation, ViolationKind};
pub use memory::Memory;
