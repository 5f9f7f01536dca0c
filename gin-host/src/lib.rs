// SPDX-License-Identifier: MIT OR Apache-2.0
//! GPU-initiated networking in Rust: the crate for host programs.
//!
//! A kernel crate depends on `gin-device`; the program that launches its kernels depends on this crate.
//!
//! | module | holds |
//! | --- | --- |
//! | [`launch`](mod@launch) | jobs: one function per rank |
//! | [`comm`] | communicators, windows, faults |
//! | [`device`] | devices, memory, streams, launches |
//! | [`boot`] | the bootstrap: how processes become the ranks of a job |
//! | [`net`] | networks and NICs, for programs that replace the defaults |
//! | [`nccl`] | jobs and windows from a communicator of NCCL |
//!
//! ```
//! use gin_host::prelude::*;
//!
//! // Two ranks on virtual GPUs share a window; no GPU is needed.
//! let lengths = launch(WorldConfig::seeded(2, 7), |rank| -> Result<usize, CommError> {
//!     let comm = rank.communicator(&Requirements::default())?;
//!     let window = comm.alloc_window::<f32>(64, WindowFlags::NONE)?;
//!     comm.destroy()?;
//!     Ok(window.len())
//! })?;
//! assert_eq!(lengths, [64, 64]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `docs/versions.md` states the rules for changes between versions. `docs/public-items.txt` lists the public items of
//! this crate, and a test compares the list with the crate. Modules that the documentation does not show are for gin's
//! other crates.
#![warn(unreachable_pub)]

pub mod comm;
pub mod nccl;
#[doc(hidden)]
pub mod proxy;
#[doc(hidden)]
pub mod world;

/// Jobs: one function per rank, as threads of this process or as one rank of a job of processes.
pub mod launch {
    pub use crate::world::{LaunchError, Rank, Schedule, SoftNics, WorldConfig, WorldMode, join, launch};
    pub use gin_gpu::placement::{Placement, PlacementError};
}

/// Devices: memory, streams, kernels and launches.
pub mod device {
    pub use gin_gpu::{
        Device, DeviceKind, Devices, EmbeddedModules, Event, Function, GpuError, KernelArg, LaunchConfig, Memory,
        MemoryKind, MemorySlice, Module, ModuleSource, Stream,
    };

    /// NVIDIA GPUs, and handles shared with other users of the CUDA driver.
    #[cfg(feature = "gpu")]
    pub mod cuda {
        pub use gin_gpu::cuda::{CudaDevice, CudaStream, device_count, raw};
    }
}

/// The bootstrap: how processes become the ranks of a job.
pub mod boot {
    pub use gin_boot::{
        Bootstrap, BootstrapError, InProcess, Job, JobError, LossCause, Rendezvous, TcpBootstrap, TcpConfig, UniqueId,
    };
}

/// Networks that proxies use, with all that an implementation of [`Network`](net::Network) takes, and NICs that kernels
/// drive.
pub mod net {
    pub use gin_abi::{RemoteSignal, SignalTarget, Transfer, WindowOffset};
    pub use gin_net::fabric::{Fabric, FabricConfig, NoFabric};
    pub use gin_net::verbs::{NoRdmaDevice, PortName, Ports, VerbsConfig};
    pub use gin_net::{
        BetweenHosts, Capabilities, Endpoint, Event, Fetch, Key, KeyError, LocalSignals, LocalWindow, NetError,
        Network, NetworkFactory, Notice, NoticeArrival, Raises, Request, SignalArrival, between_hosts,
    };
    pub use gin_nic::{DoorbellRelease, DoorbellSource, Doorbells, NicConfig};
}

/// The names that most programs use. `gin_device::prelude` has none of them, so one file can import both.
pub mod prelude {
    pub use crate::boot::{Bootstrap, Job};
    pub use crate::comm::{CommError, Communicator, Requirements, WindowFlags};
    pub use crate::device::{GpuError, LaunchConfig, Memory, MemoryKind, Stream};
    pub use crate::launch::{WorldConfig, launch};
}
