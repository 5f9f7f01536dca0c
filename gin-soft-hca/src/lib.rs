// SPDX-License-Identifier: MIT OR Apache-2.0
//! Engine of a software mlx5 NIC: executes the work-queue entries that a ConnectX would, from the same rings, doorbells
//! and doorbell records, and writes the same completions.
//!
//! It is `no_std` and has neither allocations nor threads: whoever runs it gives it [`Tables`] and a [`Memory`], and calls
//! [`Engine::step`]. So one source runs on a CPU thread, is stepped by a scheduler, or is a kernel that stays. The commands
//! that make the objects in the tables are `gin_host::nic`'s part.
//!
//! | module | holds |
//! | --- | --- |
//! | [`memory`] | how the engine reaches memory |
//! | [`tables`] | queue pairs, completion queues and memory regions, as the engine sees them |
//! | [`engine`] | takes doorbells and executes entries |
//! | [`held`] | what has been written but is not in view yet |
//! | [`faults`] | what can be made to go wrong, and what the engine found wrong with its user |
//! | [`kernel`] | the engine as a kernel |
//!
//! # Stricter than hardware
//! What a real NIC lets pass, or does only sometimes, is refused or done always here, so that a program that relies on it
//! is noticed:
//!
//! - A doorbell that goes backwards, that announces more than the queue holds, or that comes before its record is a
//!   [violation](faults::Violation) and breaks the queue pair, as does an entry with reserved bytes that are not zero.
//! - Data of a READ comes into view only by a DUMP of the same queue pair that was executed after the READ was complete
//!   (so it has [`FENCE`](gin_abi::mlx5::wqe::Flags::FENCE), or was posted after the completion was seen). Data of a WRITE
//!   to a region with relaxed ordering comes into view only by a later write of the same queue pair to a region without.
//!   Both may happen earlier when there is no room to hold more.
//! - A READ takes its data when it is answered, which may be after later entries without a fence have been executed.
//! - An entry may wait for a completion queue only if its queue pair was made a core-direct master
//!   ([`Options::wait_needs_master`](engine::Options::wait_needs_master)).
//!
//! # Not there
//! Receive queues, other kinds of service than reliable connections, entries of more than 64 bytes, BlueFlame, events, time
//! stamps, and packets: a message is carried out as a whole.
#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]
#![warn(missing_docs, unreachable_pub)]

pub mod engine;
pub mod faults;
pub mod held;
pub mod kernel;
pub mod memory;
pub mod tables;

pub use engine::{Engine, Options, Progress, Tables};
pub use faults::{Fault, FaultKind, Mistake, Violation, ViolationKind};
pub use memory::Memory;
