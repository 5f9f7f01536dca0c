// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernels of the examples. The programs that launch them have the same names, in `examples/src` or `examples/python`.
//!
//! Each module's docs have a picture of the data flow.
#![no_std]
#![warn(unreachable_pub)]

pub mod all_gather_v;
pub mod all_to_all;
pub mod all_to_all_v;
pub mod coops;
pub mod credits;
pub mod experts;
pub mod halo;
pub mod hello_put;
pub mod histogram;
pub mod ordering;
pub mod ping_pong;
pub mod ring_all_reduce;
pub mod ring_round;
pub mod seeds;
