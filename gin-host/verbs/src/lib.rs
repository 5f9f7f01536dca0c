// SPDX-License-Identifier: MIT OR Apache-2.0
//! libibverbs, libmlx5, libfabric and libnccl, opened at run time, so that programs start without them.
//!
//! | module | holds |
//! | --- | --- |
//! | [`verbs`] | structures, constants and functions of `infiniband/verbs.h` |
//! | [`mlx5dv`] | structures, constants and functions of `infiniband/mlx5dv.h` |
//! | [`fabric`] | structures, constants and functions of libfabric's `rdma/*.h` |
//! | [`nccl`] | functions of NCCL's `nccl.h` |
//! | `device` | the list of RDMA devices ([`DeviceList`]) and an open one ([`OpenDevice`]) |
//! | `error` | why a library cannot be used ([`LoadError`]) and why a call failed ([`CallError`]) |
//!
//! Structures have Rust names; their docs give the C names. Fields, functions and constants keep the header's names. A
//! structure that callers allocate is declared whole, or has room for what later versions append; of other structures
//! the beginning is declared. The test `headers` compares offsets, sizes and numbers with the headers of
//! rdma-core and libfabric.
#![warn(unreachable_pub)]

mod device;
mod error;
pub mod fabric;
mod library;
pub mod mlx5dv;
pub mod nccl;
pub mod verbs;

pub use device::{DeviceList, OpenDevice};
pub use error::{CallError, LoadError, check, explain, non_null};
pub use mlx5dv::Mlx5dv;
pub use verbs::{Access, Link, Verbs};
