// SPDX-License-Identifier: MIT OR Apache-2.0
//! NCCL's own device functions for kernels in Rust, with the names, types and meanings of `gin-device`.
//!
//! `gin_build::KernelBuilder::nccl` links a kernel crate with NCCL's device library as LLVM bitcode and inlines it. A
//! kernel then runs on a communicator of NCCL: `gin-nccl-host` makes its parameters of an `ncclComm_t`.
//!
//! ```
//! use gin_device::kernel;
//! use gin_nccl_device::prelude::*;
//!
//! /// Puts `len` elements to the right neighbour and waits for the left neighbour's elements.
//! ///
//! /// # Safety
//! /// - One block, launched once on every rank of a communicator with a signal.
//! #[kernel]
//! pub unsafe fn pass_on(comm: Comm, to: Window<f32>, from: Window<f32>, len: usize, deadline: Deadline) {
//!     let gin = Gin::new(&comm, ContextId::new(0));
//!     let exchange = || -> Result<(), Fault> {
//!         gin.put(comm.world().right(), to.range(0, len), from.range(0, len))
//!             .signal(SignalId::new(0).inc())
//!             .issue(&Block)?;
//!         gin.wait_signal(&Block, SignalId::new(0), 1, deadline)
//!     };
//!     if let Err(fault) = exchange() {
//!         comm.report(fault);
//!     }
//! }
//! ```
//!
//! On a CPU the prelude has the types of `gin-device` itself. So the same kernel is checked by the compiler without
//! NCCL, and runs on the virtual GPU through gin's back ends. Only on a GPU it calls NCCL.
//!
//! # Differences to `gin-device`
//! | | here |
//! | --- | --- |
//! | routes | NCCL's network for each put and signal, also to peers of the LSA team; a kernel stores to [`Window::peer_ptr`](nccl::Window::peer_ptr) itself |
//! | [`Any`](gin_device::backend::Any) | selects NCCL's proxy or GDAKI at run time; `Proxy` or `Gdaki` halves the code |
//! | wait for room in a queue | ends by the host's abort only: NCCL has no deadline there |
//! | `flush` | takes no deadline: it ends when the operations are complete, or by the host's abort; so its call does not compile for both |
//! | strong and weak signals | NCCL 2.30's functions take no strength; its RC networks, and gin's plugin, raise signals in the order of a context and peer |
//! | `get` | has no counter: a `flush` or a barrier with a get fence makes its data visible |
//! | signals at addresses, `quiet`, tokens, inboxes, `gin_println!` | none: not among the functions of NCCL 2.30's bitcode |
//! | barriers | `BarrierTeam::World` |
//! | faults of the network | NCCL's host library has them: `ncclCommGetAsyncError` |
#![no_std]
#![warn(unreachable_pub)]

mod barrier;
mod comm;
mod gin;
pub mod handle;
mod post;
mod shims;
mod window;

/// The types that call NCCL. The [`prelude`] has them on a GPU. A program for CPUs that calls their operations does not
/// link.
pub mod nccl {
    pub use crate::barrier::BarrierSession;
    pub use crate::comm::Comm;
    pub use crate::gin::Gin;
    pub use crate::post::{Arrives, Fetch, Move, OneValue, Post, Raise, Request};
    pub use crate::shims::Backend;
    pub use crate::window::{Window, WindowRange};
}

/// The names that a kernel needs: `use gin_nccl_device::prelude::*;`.
///
/// The types of thread groups, ranks, teams, signals and faults come from `gin-device`. The kernel crate depends on
/// `gin-device` too, because `#[kernel]` names it.
pub mod prelude {
    #[cfg(target_arch = "nvptx64")]
    pub use crate::nccl::{BarrierSession, Comm, Gin, Window, WindowRange};
    pub use gin_device::backend::{Any, Gdaki, Proxy};
    pub use gin_device::barrier::{BarrierTeam, Fence};
    pub use gin_device::coop::{
        Block, Coop, Dim, Lanes, Thread, Tile, WARP_SIZE, Warp, WarpSpan, block_dim, block_in_grid, block_index,
        grid_dim, lane, thread_in_block, thread_index,
    };
    pub use gin_device::gin::{Order, Scope, Sharing};
    pub use gin_device::signal::{ContextId, CounterId, CounterView, SignalAction, SignalId, SignalView};
    pub use gin_device::team::{Rank, Team};
    #[cfg(not(target_arch = "nvptx64"))]
    pub use gin_device::{Comm, Gin, Window, barrier::BarrierSession, window::WindowRange};
    pub use gin_device::{Deadline, Fault, FaultKind, FaultSubject, Operation, kernel, shared};
}
