// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the tests on real GPUs are made of.
//!
//! | module | holds |
//! | --- | --- |
//! | [`gpus`] | the GPUs there are, or why there are none |
//! | [`hardware`] | trials of what only hardware shows |
//! | `raw` | trials that call the driver themselves, with the feature `cuda` |
//! | [`journal`] | results of earlier runs, so that a run goes on where one was ended |
//! | [`watchdog`] | ends the process when a trial gets no further |
#![warn(missing_docs, unreachable_pub)]

pub mod gpus;
pub mod hardware;
pub mod journal;
#[cfg(feature = "cuda")]
pub mod raw;
pub mod watchdog;
