// SPDX-License-Identifier: MIT OR Apache-2.0
//! gin: GPU-initiated networking in Rust.
//!
//! This is the facade over the crates of the workspace:
//!
//! | module | for |
//! | --- | --- |
//! | [`device`] | kernels: what they call |
//! | [`host`] | programs: devices, communicators, windows, launches |
//! | [`kernels`] | kernels that ship |
//! | `build` | build scripts: kernel crates to PTX (feature `cuda`) |
//!
//! The command `gin` runs the workloads on what a machine has; see the README.
#![warn(missing_docs, unreachable_pub)]

pub use gin_boot::UniqueId;
#[cfg(feature = "cuda")]
pub use gin_build as build;
pub use gin_device as device;
pub use gin_host as host;

pub use gin_kernels as kernels;

/// The kernels of [`kernels`] as PTX: architecture (`sm_90`, ...) and text.
#[cfg(feature = "cuda")]
pub mod ptx {
    include!(concat!(env!("OUT_DIR"), "/ptx.rs"));

    mod bench {
        include!(concat!(env!("OUT_DIR"), "/bench.rs"));
    }

    mod engine {
        include!(concat!(env!("OUT_DIR"), "/engine.rs"));
    }

    /// The engine of software NICs, in the same form.
    pub use engine::PTX as ENGINE;

    /// Those that `gin bench` times, in the same form.
    #[doc(hidden)]
    pub use bench::PTX as BENCH;
}
