// SPDX-License-Identifier: MIT OR Apache-2.0
//! Parts of the tests on real GPUs.
//!
//! | module | holds |
//! | --- | --- |
//! | `calls` | a trial of each driver call beside a kernel, with the feature `cuda` |
//! | [`ep`] | trials of expert parallelism |
//! | [`gpus`] | the GPUs of this machine, or the reason why there are none |
//! | [`hardware`] | trials of effects that only hardware shows |
//! | `interop` | trials of programs that call the driver themselves beside gin, with the feature `cuda` |
//! | `nccl` | a trial of gin in a job of NCCL, with the feature `cuda` |
//! | [`printing`] | a trial of the lines that kernels print |
//! | `raw` | trials that call the driver themselves, with the feature `cuda` |
//! | `parking` | a trial beside the resident kernel of software NICs, with the feature `cuda` |
//! | [`matmul`] | trials of products that send and receive meanwhile |
//! | [`journal`] | results of earlier runs, so that a run continues where one was ended |
//! | [`places`] | trials on several sets of GPUs at a time |
//! | [`primitives`] | trials of warp operations, shared memory, conversions and a histogram |
//! | `sharing` | a trial of memory that a GPU and a NIC share, with the feature `cuda` |
//! | [`testbed`] | the devices on which trials run |
//! | [`watchdog`] | ends the process when a trial hangs |
#![warn(unreachable_pub)]

#[cfg(feature = "cuda")]
pub mod calls;
pub mod ep;
pub mod gpus;
pub mod hardware;
#[cfg(feature = "cuda")]
pub mod interop;
pub mod journal;
pub mod matmul;
#[cfg(feature = "cuda")]
pub mod nccl;
#[cfg(feature = "cuda")]
pub mod parking;
pub mod places;
pub mod primitives;
pub mod printing;
#[cfg(feature = "cuda")]
pub mod raw;
#[cfg(feature = "cuda")]
pub mod sharing;
pub mod testbed;
pub mod watchdog;
