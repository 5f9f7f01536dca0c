// SPDX-License-Identifier: MIT OR Apache-2.0
//! gin for programs in C and C++: the library `libgin`.
//!
//! `include/gin.h` declares its functions, `include/gin.hpp` wraps them for C++, and `include/gin_device.cuh` is the
//! device API. `docs/c.md` is the page for users.
//!
//! | module | holds |
//! | --- | --- |
//! | [`types`] | the types of the header |
//! | [`status`] | status codes, the text of the last error |
//! | [`job`] | jobs: how ranks meet, and their devices |
//! | [`comm`] | communicators, their faults and statistics |
//! | [`window`] | windows |
//! | [`launch`] | streams, modules, kernels, launches |
//! | [`graph`] | captures of streams, graphs |
//! | [`ep`] | expert parallelism |
//! | `table` | private: the objects behind handles |
//!
//! # Rules of every function
//! - It returns a [`gin_status_t`](types::gin_status_t), except `gin_last_error`, `gin_status_name`, `gin_version` and
//!   `gin_abi`. After an error `gin_last_error` returns the text, for the calling thread. An output is written only on
//!   success.
//! - It checks each handle: a null, closed or foreign handle is `GIN_ERROR_HANDLE`. A pointer that must not be null is
//!   checked for null and alignment, and for nothing more.
//! - Any thread may call it, also several at a time. Exceptions are calls on one communicator: while one waits for
//!   other ranks, another returns `GIN_ERROR_BUSY`; only abort, check, fault and progress are always possible.
//! - No panic and no exception leaves it. It installs no signal handler, except for virtual GPUs: that of SIGSEGV
//!   explains an overflow of a kernel's stack, and passes other faults on; that of SIGQUIT prints what waits, and is
//!   not installed if the program handles or ignores the signal.
//! - In the child of a fork it returns `GIN_ERROR_FORK`.
//!
//! # Safety
//! Functions that take pointers are unsafe: each is null where the function allows that, or valid for the described
//! access during the call.
#![warn(unreachable_pub)]

pub mod comm;
pub mod ep;
pub mod graph;
pub mod job;
pub mod launch;
pub mod status;
mod table;
pub mod types;
pub mod window;

/// The device functions, for kernels in C and C++ on the virtual GPU.
pub use gin_capi_device as device;
