// SPDX-License-Identifier: MIT OR Apache-2.0
//! Dispatch and combine of expert parallelism, as device functions and as kernels.
//!
//! Each rank has tokens: rows of bytes, and for each row the ids of its experts. Dispatch sends each row once to every
//! rank that has one of its experts. Combine adds up one row for each of those: the source loads it, or the expert's
//! rank has stored it to the source.
//!
//! ```text
//!            rank 0                        rank 1
//!   rows     t0  t1  t2                    t0  t1
//!             |   |\  |                     |   |
//!   arena    rows[0]: t0 t1                rows[0]: t1 t2         from rank 0, in the order of its tokens
//!            rows[1]: t1                   rows[1]: t0            from rank 1
//!             |   |                         |   |
//!            experts, in place, from where sources load, or into other memory
//!             |   |                         |   |
//!   arena    returned[0]: t0 t1 --         returned[0]: -- t1     from rank 0, by token
//!            returned[1]: -- t1 t2         returned[1]: t0 --     from rank 1
//!             |                             |
//!   output   t0  t1  t2                    t0  t1                 the sum over ranks
//! ```
//!
//! | module | holds |
//! | --- | --- |
//! | `dispatch`, `routes`, `params` | stores of rows and flags; their places; the regions of the arena |
//! | `received`, `reduce`, `combine` | rows for the experts; sums at the expert's rank; sums at the source |
//! | `expand`, `expert_major`, `permute`, `reserve` | other layouts: by one kernel, places, by several kernels, shared regions |
//! | `metadata` | tokens, ids, weights and scales of rows in a layout, in memory of the program |
//! | `format`, `element` | copied rows and FP8; types of sums |
//! | `network` | ranks that loads and stores do not reach |
//! | `protocol` | the words by which blocks and ranks agree |
//! | `matmul` | products that send and receive |
//! | `kernels`, `status` | the kernels; their errors |
//!
//! # Protocol
//! All ranks share a window, the *arena*. A rank stores into its own region of another rank's part, then one flag.
//! There are two buffers, so that a dispatch may begin while others still read the one before. The host gives a
//! dispatch its buffer: calls alternate, and a captured one keeps its buffer.
//!
//! *No row is overwritten too early.* If dispatch `e - 1` used the other buffer, dispatch `e` follows, on its
//! stream, the receive of `e - 1`, which saw the flag of every rank. Each rank raised that flag after its own
//! combine or release of all older dispatches, by the order of its stream. If `e - 1` used the same buffer and was
//! combined, each rank had given up the rows before it raised the flag for the returned ones, which the combine
//! saw. If it was released, dispatch `e` first makes up for these flags. The flag of a dispatch covers the returned
//! rows: a rank returns rows of `e` after it received dispatch `e`, so after the sender's combine `e - 1`, and
//! there are two buffers of these too. Rows that stay in place are in a region that their source alone sends to,
//! and it loads them before it sends again.
//!
//! *One resident block suffices.* The first block that runs announces rows in place; no block waits for others of its
//! grid. Otherwise a block sends its share of the rows without a wait. It waits only if all blocks of
//! its grid have started, so that every share has been taken by a block that runs; otherwise it ends. What remains is
//! taken in units, so that it does not matter which blocks stayed. The last block that starts sees that all have.
//!
//! *The order of rows is that of tokens.* A row's place is the number of earlier tokens for the same rank. Each block
//! counts them for itself, so the same routing gives the same bytes in every grid and schedule.
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch, core_float_math))]
#![no_std]
#![warn(unreachable_pub)]

// On a CPU its `f32` has `mul_add`.
#[cfg(not(target_arch = "nvptx64"))]
extern crate std;

mod arena;
mod combine;
mod dispatch;
mod element;
mod expand;
mod expert_major;
mod format;
#[cfg(feature = "kernels")]
mod kernels;
mod layout;
pub mod matmul;
mod metadata;
mod network;
mod params;
pub mod permute;
mod protocol;
mod received;
mod reduce;
mod reserve;
mod routes;
mod status;

pub use combine::{ACCUMULATE, RETURNED, Sums, combine, combine_over};
pub use dispatch::{RECEIVE, SEND, dispatch, dispatch_over, dispatch_shared, send_metadata, send_rows};
pub use element::{Element, Wide, fma};
pub use expand::{dispatch_into, expands};
pub use expert_major::part_counts;
pub use format::{Bytes, Format, Quantized, SCALED};
#[cfg(feature = "kernels")]
pub use kernels::{
    ep_combine_bf16, ep_combine_bf16_gdaki, ep_combine_bf16_proxy, ep_combine_f16, ep_combine_f16_gdaki,
    ep_combine_f16_proxy, ep_combine_f32, ep_combine_f32_gdaki, ep_combine_f32_proxy, ep_combine_wide,
    ep_combine_wide_gdaki, ep_combine_wide_proxy, ep_dispatch, ep_dispatch_e4m3, ep_dispatch_e4m3_gdaki,
    ep_dispatch_e4m3_proxy, ep_dispatch_gdaki, ep_dispatch_into, ep_dispatch_into_e4m3, ep_dispatch_proxy,
    ep_dispatch_shared, ep_dispatch_shared_e4m3, ep_permute_arriving, ep_permute_assign, ep_permute_copy,
    ep_permute_count, ep_permute_details, ep_permute_metadata, ep_plan, ep_reduce_bf16, ep_reduce_f16, ep_reduce_f32,
    ep_reduce_wide, ep_reserve, ep_send_metadata, ep_send_rows, ep_send_rows_e4m3,
};
pub use layout::PermutedRows;
pub use metadata::{MetadataParams, metadata};
pub use network::Network;
pub use params::{
    CLAIMED_WORD, COUNT_IN_DISPATCH, Divisor, EPOCH_WORD, EXPONENTS, MASKED_WORD, POWERS, Sizes, SlotOffsets,
    SlotParams, TokenParams, UNSENT_WORD, WIDE_IDS, reset,
};
pub use received::ReceivedRows;
pub use reduce::reduce;
pub use reserve::reserve;
pub use routes::plan;
pub use status::{Code, STATUS_WORDS, reported};

/// Parts for the models of the protocol, and for tests.
#[doc(hidden)]
pub mod internal {
    pub use crate::format::scale_and_factor;
    pub use crate::matmul::tile_scheduler::{Lists, TileScheduler, WORDS, look};
    pub use crate::protocol::*;
}

/// Pairs of words (16 bytes) of a row that a warp moves at a time.
pub const UNIT: u32 = 128;

/// Pairs of words of a sum that a warp makes at a time, where there are more sums than warps. Registers hold as many of
/// two rows.
pub const LARGE_UNIT: u32 = 224;

/// The maximum number of threads of a block of these kernels.
pub const MAX_THREADS: u32 = 512;

/// The maximum number of threads of a block of other kernels. They post to a network, dispatch into a layout,
/// reserve places in a dispatch, send rows alone, or copy rows as they arrive. The last two share SMs, the others take
/// more registers.
pub const MAX_NETWORK_THREADS: u32 = 256;
