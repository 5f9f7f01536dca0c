// SPDX-License-Identifier: MIT OR Apache-2.0
//! The device functions of gin for CUDA C++ and C: one `extern "C"` function for each operation.
//!
//! `gin_device.cuh` wraps them in classes; programs include that. On a GPU they are `.visible .func` of a PTX module,
//! which `nvcc -rdc=true` or nvJitLink links. On a CPU the library `libgin` has the same functions, so kernels in C and
//! C++ run on the virtual GPU too.
//!
//! | argument | is |
//! | --- | --- |
//! | `comm` | [`CommHandle::copy`](gin_abi::CommHandle::copy), the address of the communicator's handle |
//! | `coop` | the threads that call together: see [`AnyCoop`] |
//! | `options` | the bits of [`options`] |
//! | `peer` | a world rank, or a rank that its team does not have, with bit 31 |
//! | a window | [`WindowHandle::data`](gin_abi::WindowHandle::data), the address of its entry in the window table |
//! | an offset, `bytes` | bytes of a window |
//! | `signal_window`, `signal` | 0 and an id, or a window and an offset |
//! | `deadline` | nanoseconds, `u64::MAX` for none |
//!
//! Each function returns a fault in one word, 0 if there is none: its kind in bits 0 to 5, its operation in bits 6 to
//! 9, its context in bits 10 to 18, its peer in bits 19 to 43, and the ticket of its values above. Functions that
//! return a value too return both, as [`Value`].
//!
//! With the feature `triton` the crate exports functions for kernels of Triton instead.
//!
//! # Safety
//! All functions are unsafe: `comm` is the copy of a handle that the host made, whose communicator lives, and all
//! threads of the coop call with the same arguments.
#![no_std]
#![warn(unreachable_pub)]

mod coop;
#[cfg(not(target_arch = "nvptx64"))]
pub mod cpu;
mod ops;
pub mod options;
mod reads;
#[cfg(feature = "triton")]
mod triton;
mod word;

pub use coop::AnyCoop;
pub use ops::*;
pub use reads::*;
#[cfg(feature = "triton")]
pub use triton::*;

/// A value and a fault. The value counts only if the fault is 0.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Value {
    /// The value.
    pub value: u64,
    /// The fault, 0 if there is none.
    pub fault: u64,
}

/// The shadow of a signal before a wait, the distance to its new value, and a fault.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Followed {
    /// The shadow before the wait.
    pub before: u64,
    /// The distance to its value after the wait.
    pub delta: u64,
    /// The fault, 0 if there is none.
    pub fault: u64,
}

/// Returns the version of the shared layouts that this module was compiled with.
#[cfg_attr(not(feature = "triton"), unsafe(no_mangle))]
pub extern "C" fn gin_device_abi() -> u32 {
    gin_abi::ABI_VERSION
}
