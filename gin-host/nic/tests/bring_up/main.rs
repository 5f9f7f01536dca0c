// SPDX-License-Identifier: MIT OR Apache-2.0
//! Queue pairs, brought up on software NICs.

mod device;
mod drain;
mod loopback;
mod queues;
mod relay;
