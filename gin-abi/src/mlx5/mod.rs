// SPDX-License-Identifier: MIT OR Apache-2.0
//! What an mlx5 NIC (ConnectX) and its driver exchange in memory.
//!
//! | module | holds |
//! | --- | --- |
//! | [`be`] | big-endian numbers that cannot be mixed up with native ones |
//! | [`wqe`] | work-queue entries: what a GPU writes, and how a device reads it |
//! | [`cqe`] | completion-queue entries |
//! | [`doorbell`] | the doorbell word and the doorbell record |
//! | [`bits`] | fields of command mailboxes: one place says where each lies, and both setter and getter come from it |
//! | [`mailbox`] | the tables of those fields |
//! | [`command`] | the numbers that go into them: commands, states, how a command ended |
//!
//! What kernels use ([`be`], [`wqe`], [`cqe`], [`doorbell`]) has no branches, no panics and no formatting; it gives and
//! takes whole 8-byte words as they lie in memory. [`bits`] and [`mailbox`] are for hosts and not there in
//! kernels.
//!
//! The tests compare offsets, widths and numbers with two independent sources, rdma-core's `infiniband/mlx5dv.h` and Linux'
//! `mlx5_ifc.h`, and list what neither has. No real NIC has run what is encoded here yet.

pub mod be;
#[cfg(not(target_arch = "nvptx64"))]
pub mod bits;
pub mod command;
pub mod cqe;
pub mod doorbell;
#[cfg(not(target_arch = "nvptx64"))]
pub mod mailbox;
pub mod wqe;

// Entries are made as native words that hold the bytes of memory.
const _: () = assert!(cfg!(target_endian = "little"), "GPUs and the hosts that they are in are little-endian");
