// SPDX-License-Identifier: MIT OR Apache-2.0
//! Expert parallelism: dispatch and combine of tokens among ranks, as kernels in Rust.
//!
//! Every rank has some of a model's experts and some of the tokens. [`Slot::dispatch`] sends each token's row to the
//! ranks that have its experts, [`Received`] has the rows that arrived, and [`Received::combine`] returns one row for
//! each of them and adds them up.
//!
//! | type | is |
//! | --- | --- |
//! | [`GroupConfig`] | sizes, and the memory that they take |
//! | [`Group`] | the ranks of a communicator, with the memory for rows |
//! | [`Slot`] | room for one dispatch at a time; slots are independent |
//! | [`Tokens`], [`Plan`] | the tokens of a dispatch; their routing, which several dispatches may share |
//! | [`Sent`], [`Received`] | a dispatch that was sent, and one that was received |
//! | [`DispatchId`] | a dispatch for a program that cannot store a borrow of its slot |
//! | [`Permuted`] | memory for received rows in another layout: flat, expert-major |
//! | [`Combine`] | the sums that a combine makes of the returned rows |
//! | [`GroupedMatmul`] | products of the experts' rows, which return to their sources meanwhile |
//! | [`OverlappedMatmul`] | the same of the received rows themselves, from when the first of them are there |
//! | [`Matmul`] | products of matrices that send and receive meanwhile: all-gather before, reduce-scatter after |
//! | [`Report`] | an error of the kernels, as a value |
//!
//! `docs/ep.md` describes use, layout, routes, protocol, memory and limits.
#![warn(unreachable_pub)]

mod combine;
mod config;
mod config_exchange;
mod dispatch;
mod error;
mod group;
mod grouped;
mod keep_alive;
mod layout;
mod matmul;
mod metadata;
mod multiplier;
mod overlapped;
mod received;
mod slot;
mod tokens;

pub use combine::{Combine, Rows, Terms};
pub use config::{Element, GroupConfig, Scales};
pub use error::{EpError, Report};
pub use gin_ep_kernels::Code;
pub use group::Group;
pub use grouped::{Experts, GroupedMatmul, Products};
pub use layout::{Layout, Permuted, PermutedMemory, View};
pub use matmul::{Matmul, MatmulConfig, Operands, Part};
pub use metadata::MetadataMemory;
#[doc(hidden)]
pub use multiplier::Instructions;
pub use overlapped::{OverlappedMatmul, Weights};
pub use received::{Received, ReceivedRow, Sent};
pub use slot::{DispatchId, Fused, Slot};
pub use tokens::{Ids, Number, Plan, Tokens};

#[cfg(feature = "cuda")]
include!(concat!(env!("OUT_DIR"), "/ptx.rs"));

/// The kernels as PTX: none, so only virtual GPUs run them.
#[cfg(not(feature = "cuda"))]
pub static PTX: &[(&str, &[u8])] = &[];

/// The program in `docs/ep.md`, which runs as an example.
#[cfg(doctest)]
#[doc = include_str!("../../docs/ep.md")]
pub struct Documented;
