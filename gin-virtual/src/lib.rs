// SPDX-License-Identifier: MIT OR Apache-2.0
//! A virtual GPU: runs grids of threads on the CPU, by a schedule drawn from a seed or in real time.
//!
//! A [`World`] holds virtual GPUs, one *host function* for each rank and *services* (proxies, say). Grids have blocks of
//! up to 1024 threads in warps of 32, with barriers, shuffles, votes and shared memory; each thread is a coroutine with
//! a stack of its own, and inside it everything that `gin-device` asks its executor answers for that thread.
//!
//! ```
//! use std::sync::Arc;
//! use std::sync::atomic::{AtomicU64, Ordering};
//! use gin_device::coop::{Block, Coop};
//! use gin_virtual::{DeviceConfig, Grid, SeededConfig, StreamId, World};
//!
//! let world = World::seeded(SeededConfig::new(7));
//! let gpu = world.device(DeviceConfig::default());
//! let sum = Arc::new(AtomicU64::new(0));
//!
//! let host = || {
//!     let sum = sum.clone();
//!     let grid = Grid::new("sum", 2, 64, move || {
//!         sum.fetch_add(1, Ordering::Relaxed);
//!         Block.sync();
//!     });
//!     gpu.launch(StreamId(0), grid)?.wait()
//! };
//! let results = world.run(vec![host])?;
//! assert_eq!(results, [Ok(())]);
//! assert_eq!(sum.load(Ordering::Relaxed), 128);
//! # Ok::<(), gin_virtual::WorldError>(())
//! ```
//!
//! # Two modes
//!
//! | | [`World::seeded`] | [`World::threads`] |
//! | --- | --- | --- |
//! | OS threads | the one that calls [`World::run`] | one for each host function, service and device |
//! | clock | virtual: advances with each access, jumps when all nap | real |
//! | who runs next | drawn from the seed, by a [`Policy`] | the operating system; inside a device as in a seeded world |
//! | same seed, same run | yes, byte for byte ([`World::event_log`]) | no |
//! | nobody can get further | [`WorldError::NoProgress`] names who waits where | only what a block shows by itself, or `grid_limit` |
//!
//! Host code is the same in both if it waits with [`block_on`] and [`sleep_ns`] and reads [`clock_ns`]. In a seeded
//! world these hand the processor to others; any other blocking call (a channel, a lock that is held across a wait, a
//! join) stops the whole world, and the watchdog ends the process after ten seconds, naming who did it.
//!
//! # Where switches happen
//!
//! At accesses to shared words (`gin_device::exec::switch_point`), each with a decision of the schedule; at pauses,
//! barriers, exchanges, reads of the clock and whatever waits. Code between two of these runs as one step, so plain
//! memory that threads share without them is not explored.
//!
//! # What is reported instead of hanging
//!
//! - A barrier or an exchange that can never be completed (an exited thread or lane, different counts or masks, all
//!   threads of the block waiting for each other): the grid ends with [`LaunchError::Misuse`] or
//!   [`LaunchError::Stuck`], naming every waiting thread of the block and the place in its source.
//! - A thread that panics or traps: its grid ends with [`LaunchError::Panicked`] or [`LaunchError::Trapped`]; the
//!   other threads of the grid are unwound, other grids go on.
//! - Blocks that wait for room while the resident ones wait for them, and anything else that gets no further in a
//!   seeded world: [`WorldError::NoProgress`], which names everyone, and the blocks that never began with the
//!   residency limit.
//! - A failed grid that nobody asked about: [`WorldError::UnseenFailure`].
//! - A coroutine that never yields: the watchdog names it on standard error and aborts the process.
//!
//! # Differences from a GPU
//!
//! - Memory is sequentially consistent between switch points in a seeded world: orders that are too weak are found by
//!   loom and by reading PTX, not here. In the threads mode different devices have the CPU's own order.
//! - Lanes of a warp do not run in lockstep; `active_mask` gives a random part of the lanes that come to one place
//!   within 2 us, so code that aggregates over it meets groups of all sizes.
//! - A whole-block barrier with threads that have exited, which hardware forgives, is an error here. So is an exchange
//!   whose mask names an exited lane. Lanes that a partial last warp lacks may be named, as on a GPU.
//! - Barriers with a count count whole warps: a partial last warp counts 32 when all its threads have arrived.
//! - Static shared memory is zeroed, dynamic shared memory is filled with `0xcd`.
//! - A thread has 64 KiB of stack with a guard page behind it; a thread that overflows it ends the process by a signal.
//! - Pauses have no place in the source: a thread that polls is reported with the last barrier, exchange or active mask
//!   that it called.
//!
//! # What it costs
//!
//! Printed by `cargo run -p gin-virtual --example costs` (the workspace's `dev` profile optimises); measured on 2026-11-21 on a 2-core x86-64 machine
//! that did little else. `cargo bench -p gin-virtual` has the same as benchmarks.
//!
//! | what | cost | a second |
//! | --- | --- | --- |
//! | a thread, from its start to its end, on a stack that was used before | 200 ns | 5 million |
//! | the same on a new stack | 7.4 us | 140,000 |
//! | a switch among 32 threads | 65 to 73 ns | 14 to 15 million |
//! | a switch among 1,024 threads | 69 to 90 ns | 11 to 14 million |
//! | a switch among 16,384 threads | 99 to 119 ns | 8 to 10 million |
//! | a switch point, most of which are passed without a switch | 4 ns | 250 million |
//! | an arrival at a block barrier, 8 blocks of 256 threads, switches included | 146 ns | 6.9 million |
//! | a lane in a warp exchange, 8 warps, switches included | 132 ns | 7.6 million |
//!
//! The ranges are those of the policies. A resident thread takes 4.2 KB of memory if it uses one page of its stack,
//! beside 68 KiB of address space. Stacks are kept for later grids, up to 8,192 of each size. A process can have about
//! 32,000 threads resident under Linux's usual 65,530 mappings (`vm.max_map_count`), since each takes two; blocks beyond
//! that end their grid with [`LaunchError::OutOfStacks`], which a smaller [`DeviceConfig::resident_blocks`] avoids.
//! With a load of 6 on the same machine all of this took 1.3 times as long, with a load of 12 twice.
#![warn(missing_docs, unreachable_pub)]

mod config;
mod engine;
mod error;
mod grid;
mod hooks;
mod host;
mod inbox;
mod log;
mod service;
mod shared;
mod stack;
mod threads;
mod watchdog;
mod world;

pub use config::{DeviceConfig, LogMode, Policy, SeededConfig, ThreadsConfig};
pub use error::{LaunchError, NotStarted, WaitKind, WaitReport, Waiter, Who, WorldError};
pub use gin_device::exec::Dim3;
pub use grid::{BLOCK_THREADS_LIMIT, Grid, LaunchTicket, SHARED_LIMIT, StreamId};
pub use hooks::{executor, install};
pub use host::{block_on, block_on_at, clock_ns, in_world, is_simulated, maybe_switch, sleep_ns, yield_now};
pub use log::EventLog;
pub use service::{ServiceHandle, ServiceStep};
pub use world::{VirtualGpu, World};
