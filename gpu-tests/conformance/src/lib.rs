// SPDX-License-Identifier: MIT OR Apache-2.0
//! Conformance suite of gin.
//!
//! A case is data: a list of operations ([`op::Op`]) for each group of threads of each rank. A kernel ([`script`])
//! executes the list through the public device API and logs each thread's result. The host compares logs and memory
//! with what the API promises. So one list of cases runs on every device, back end and network, and random programs can
//! be compared with a model.
#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]
#![warn(unreachable_pub)]

#[cfg(not(target_arch = "nvptx64"))]
extern crate std;

#[cfg(not(target_arch = "nvptx64"))]
pub mod cases;
#[cfg(not(target_arch = "nvptx64"))]
pub mod host;
pub mod op;
#[cfg(not(target_arch = "nvptx64"))]
pub mod processes;
#[cfg(not(target_arch = "nvptx64"))]
pub mod saboteurs;
#[cfg(not(target_arch = "nvptx64"))]
pub mod scenario;
pub mod script;
#[cfg(not(target_arch = "nvptx64"))]
pub mod serve;
