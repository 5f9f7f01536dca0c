// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the tests on real GPUs are made of.
//!
//! | module | holds |
//! | --- | --- |
//! | `calls` | a trial of what each driver call does beside a kernel, with the feature `cuda` |
//! | [`gpus`] | the GPUs there are, or why there are none |
//! | [`hardware`] | trials of what only hardware shows |
//! | `interop` | trials of programs that call the driver themselves beside gin, with the feature `cuda` |
//! | `raw` | trials that call the driver themselves, with the feature `cuda` |
//! | `parking` | a trial of what happens while software NICs have a kernel, with the feature `cuda` |
//! | [`journal`] | results of earlier runs, so that a run goes on where one was ended |
//! | `sharing` | a trial of what a GPU shares with a NIC, with the feature `cuda` |
//! | [`watchdog`] | ends the process when a trial gets no further |
#![warn(unreachable_pub)]

#[cfg(feature = "cuda")]
pub mod calls;
pub mod gpus;
pub mod hardware;
#[cfg(feature = "cuda")]
pub mod interop;
pub mod journal;
#[cfg(feature = "cuda")]
pub mod parking;
#[cfg(feature = "cuda")]
pub mod raw;
#[cfg(feature = "cuda")]
pub mod sharing;
pub mod watchdog;
