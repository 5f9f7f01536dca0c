// SPDX-License-Identifier: MIT OR Apache-2.0
//! Device API of gin. A kernel calls it to write into other ranks' memory, raise their signals and wait for its own.
//!
//! A kernel names a context of its communicator ([`Gin`]), ranges of windows ([`Window`]) and the group of threads that
//! makes the call together (a [coop]). Then it posts: `put`, `put_value`, `get`, `signal`. The same source compiles to
//! PTX, or to ordinary Rust that runs on the virtual GPU of `gin-virtual`.
//!
//! ```
//! use gin_device::prelude::*;
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
//! | module | holds |
//! | --- | --- |
//! | [`prelude`] | the names that a kernel needs, in one `use` |
//! | [`gin`] | contexts: put, get, signal, flush, wait; its docs have the order of operations |
//! | [`window`], [`team`], [`comm`] | memory of ranks, ranks, and the properties of a communicator |
//! | [`signal`] | names of signals and counters, and the operations on them |
//! | [`coop`] | groups of threads: from one thread to a block |
//! | [`barrier`], [`grid`] | barriers over ranks, and over the blocks of a grid |
//! | [`lsa`] | loads, stores and reductions on memory of peers over NVLink |
//! | [`inbox`] | small messages over NVLink, with the flag in the data |
//! | [`mod@shared`] | static and dynamic shared memory: loads, stores, atomics |
//! | [`float`] | numbers of 8 and 16 bits |
//! | [`backend`] | the back ends, which carry out requests |
//! | [`sys`] | every instruction of the memory model: PTX, CPU atomics, model checker |
//! | `queue`, `signal_words`, `status`, `orders` | private: the protocols between kernels and CPU threads, both halves, generic over the memory |
//! | `exec`, `kernel` | on a CPU only: the interface to the virtual GPU, the kernels of the program |
//!
//! # Rules
//! - Nothing orders two puts, or two contexts. A strong signal covers all earlier puts of its context and route to its
//!   peer; see [`gin`](gin#ordering).
//! - Every call that can wait, or be misused, returns `Result<_, Fault>`, the same in all threads of its coop. A wait
//!   ends by its deadline, by an abort of the host, or by a fault anywhere in the communicator.
//! - Offsets, ids and ranks are checked when an operation is issued. A call that skips a check is `unsafe` and lists
//!   its conditions.
//! - All blocks of a grid whose blocks wait for each other must be resident.
//!
//! # Limits
//! - There are two back ends. With the [proxy](backend::Proxy), posts become requests of 64 bytes that a CPU thread
//!   carries out. With [GDAKI](backend::gdaki), the kernel drives an mlx5 NIC; `docs/hardware.md` lists the tested
//!   NICs. Operations to peers of the LSA team take loads and stores instead ([`gin`](gin#routes)).
//! - GPUs need compute capability 8.0 or later. `docs/hardware.md` lists the tested GPUs.
//! - Signals and counters only grow. They have no operation that sets or subtracts.
#![cfg_attr(
    target_arch = "nvptx64",
    feature(abi_unadjusted, asm_experimental_arch, link_llvm_intrinsics, stdarch_nvptx)
)]
#![cfg_attr(target_arch = "nvptx64", allow(internal_features))]
#![no_std]
#![warn(unreachable_pub)]

// The macros name this crate, also where they expand inside it.
extern crate self as gin_device;
#[cfg(test)]
extern crate std;

/// Runs two blocks in this order. `M` is the memory. The model tests swap the blocks of one name.
macro_rules! ordered {
    ($name:literal : $first:block then $second:block) => {
        if <M as $crate::sys::Memory>::swapped($name) {
            $second
            $first
        } else {
            $first
            $second
        }
    };
}

/// Calls a function of [`exec::watch`] on a CPU. On a GPU it is nothing.
macro_rules! watch {
    ($($call:tt)*) => {
        #[cfg(not(target_arch = "nvptx64"))]
        $crate::exec::watch::$($call)*;
    };
}

/// Gives accesses and posts from here to the end of the block the place of the function's caller, on a CPU.
macro_rules! called {
    ($how:ident) => {
        #[cfg(not(target_arch = "nvptx64"))]
        let _call = $crate::exec::watch::Call::$how();
    };
}

/// Announces to an executor on a CPU that the calling thread waits from here to the end of the block, and the timeout
/// that it would report, if it is known.
macro_rules! waits {
    ($timeout:expr) => {
        #[cfg(not(target_arch = "nvptx64"))]
        let _waits = $crate::exec::Waits::begin($timeout);
    };
}

pub mod backend;
pub mod barrier;
pub mod comm;
mod context;
pub mod coop;
mod epoch;
#[cfg(not(target_arch = "nvptx64"))]
#[doc(hidden)]
pub mod exec;
mod fault;
pub mod float;
pub mod gin;
pub mod grid;
mod host_word;
pub mod inbox;
#[cfg(not(target_arch = "nvptx64"))]
pub mod kernel;
pub mod lsa;
mod mailbox;
mod near_words;
// Examples that must not compile, for doctests alone.
#[cfg(doctest)]
pub mod misuse;
mod order;
mod orders;
pub mod print;
mod queue;
pub mod shared;
pub mod signal;
mod signal_words;
mod status;
pub mod sys;
pub mod team;
pub mod window;

pub use bytemuck;
pub use comm::Comm;
pub use fault::Fault;
pub use gin::Gin;
pub use gin_abi::{Deadline, FaultKind, FaultSubject, Operation};
pub use gin_macros::{gin_println, kernel, shared};
pub use window::Window;

/// The names that a kernel needs: `use gin_device::prelude::*;`.
///
/// A kernel crate needs no other dependency. Elements of windows and parameters may be structs of its own:
///
/// ```
/// use gin_device::prelude::*;
///
/// #[repr(C)]
/// #[derive(Clone, Copy, Pod, Zeroable)]
/// #[bytemuck(crate = "gin_device::bytemuck")]
/// struct Particle {
///     place: [f32; 3],
///     mass: f32,
/// }
///
/// shared! { static TILE: [Particle; 64]; }
///
/// /// Returns the mass of particle `i`.
/// fn mass(particles: Window<Particle>, i: usize) -> f32 {
///     particles.read(i).mass
/// }
/// ```
pub mod prelude {
    pub use crate::backend::{Any, Backend, Gdaki, Proxy};
    pub use crate::barrier::{BarrierSession, BarrierTeam, CombinedBarrier, Fence};
    pub use crate::comm::Comm;
    pub use crate::coop::{
        Arrivals, Block, Coop, Dim, LaneCoop, LaneInteger, LaneValue, Lanes, Thread, Tile, WARP_SIZE, Warp, WarpSpan,
    };
    pub use crate::coop::{block_dim, block_in_grid, block_index, grid_dim, lane, thread_in_block, thread_index};
    pub use crate::fault::Fault;
    pub use crate::float::{Bf16, E4m3, E5m2, F16, Ue8m0};
    pub use crate::gin::{FlushToken, Gin, Order, Route, Scope, Sharing};
    pub use crate::gin_println;
    pub use crate::grid::GridBarrier;
    pub use crate::inbox::{Inbox, Outbox};
    pub use crate::kernel;
    pub use crate::lsa::PeerWindow;
    pub use crate::shared;
    pub use crate::shared::SharedArray;
    pub use crate::signal::{ContextId, CounterId, CounterView, SignalAction, SignalId, SignalView, VaSignal};
    pub use crate::team::{Rank, Team};
    pub use crate::window::{SymPtr, Window, WindowRange};
    pub use bytemuck::{Pod, Zeroable};
    pub use gin_abi::{Deadline, FaultKind, FaultSubject, Operation};
}

/// The protocols between kernels, CPU threads and NICs, for gin's own crates. They may change in every version.
#[doc(hidden)]
pub mod internal {
    pub use crate::sys::stay;

    pub mod epoch {
        pub use crate::epoch::*;
    }
    pub mod fault {
        pub use crate::fault::*;
    }
    pub mod host_word {
        pub use crate::host_word::*;
    }
    pub mod mailbox {
        pub use crate::mailbox::*;
    }
    pub mod order {
        pub use crate::order::*;
    }
    pub mod orders {
        pub use crate::orders::*;
    }
    pub mod pair {
        pub use crate::backend::gdaki::pair::*;
    }
    pub mod print {
        pub use crate::print::{Ring, kind};
    }
    pub mod queue {
        pub use crate::queue::*;
    }
    pub mod signal_words {
        pub use crate::signal_words::*;
    }
    pub mod status {
        pub use crate::status::*;
    }
}

/// Items for code that the macros generate.
#[doc(hidden)]
pub mod __private {
    pub use gin_abi::ABI_VERSION;
    #[cfg(not(target_arch = "nvptx64"))]
    pub use linkme;
}

/// The version of the shared layouts that this module was compiled with. The host checks it when it loads the module.
/// The variable has as many words as the number, because nvlink refuses modules whose variables differ in size.
#[cfg(target_arch = "nvptx64")]
#[unsafe(no_mangle)]
#[used]
pub static gin_abi_version: [u32; gin_abi::ABI_VERSION as usize] =
    [gin_abi::ABI_VERSION; gin_abi::ABI_VERSION as usize];

#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    sys::trap()
}
