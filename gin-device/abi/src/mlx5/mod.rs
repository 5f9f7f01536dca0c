// SPDX-License-Identifier: MIT OR Apache-2.0
//! Formats that an mlx5 NIC (ConnectX) and its driver exchange in memory.
//!
//! | module | holds |
//! | --- | --- |
//! | [`be`] | big-endian numbers that cannot be mixed up with native ones |
//! | [`wqe`] | work-queue entries: what a GPU writes, and how a device reads it |
//! | [`cqe`] | completion-queue entries |
//! | [`doorbell`] | the doorbell word and the doorbell record |
//! | [`bits`] | fields of command mailboxes: one table row defines a field's place, its setter and its getter |
//! | [`mailbox`] | the tables of those fields |
//! | [`command`] | numbers used in mailboxes: opcodes, states, statuses of commands |
//!
//! The modules that kernels use ([`be`], [`wqe`], [`cqe`], [`doorbell`]) have no branches, no panics and no formatting.
//! They take and return whole 8-byte words as memory holds them. [`bits`] and [`mailbox`] are for hosts and not
//! compiled for kernels.
//!
//! The tests compare offsets, widths and numbers with two independent sources, rdma-core's `infiniband/mlx5dv.h` and
//! Linux' `mlx5_ifc.h`, and list the fields that neither has. No real NIC has executed these encodings yet.

pub mod be;
#[cfg(not(target_arch = "nvptx64"))]
pub mod bits;
pub mod command;
pub mod cqe;
pub mod doorbell;
#[cfg(not(target_arch = "nvptx64"))]
pub mod mailbox;
pub mod wqe;

// Entries are built as native words that hold the bytes of memory.
const _: () = assert!(cfg!(target_endian = "little"), "GPUs and the hosts that they are in are little-endian");
