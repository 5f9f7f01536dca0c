// SPDX-License-Identifier: MIT OR Apache-2.0
//! A virtual GPU that runs grids of threads on the CPU, by a schedule drawn from a seed or in real time.
//!
//! A [`World`] holds virtual GPUs, one *host function* for each rank, and *services* (proxies, say). Grids have blocks
//! of up to 1024 threads in warps of 32, with barriers, shuffles, votes and shared memory. Each thread is a coroutine
//! with its own stack. Inside it, every question that `gin-device` asks its executor is answered for that thread.
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
//! | OS threads | the caller of [`World::run`] | one for each host function, service and device |
//! | clock | virtual: advances with each access, jumps when all coroutines nap | real |
//! | choice of the next coroutine | drawn from the seed, by a [`Schedule`] | the operating system; inside a device as in a seeded world |
//! | same seed, same run | yes, byte for byte ([`World::event_log`]) | no |
//! | deadlock | [`WorldError::NoProgress`] names every waiter and its place | a stuck block fails; without progress for `stall_report` all waiters are printed; `grid_limit` ends a grid |
//!
//! Host code is the same in both modes if it waits with [`block_on`] and [`sleep_ns`] and reads [`clock_ns`]. In a
//! seeded world these let other coroutines run. Any other blocking call (a channel, a lock held across a wait, a join)
//! stops the whole world. After ten seconds the watchdog names the caller and ends the process.
//!
//! # Where switches happen
//!
//! A switch can happen at each access to a shared word (`gin_device::exec::switch_point`), where the schedule decides.
//! It also happens at pauses, barriers, exchanges, reads of the clock and all waits. Code between two such places runs
//! as one step. Races on plain memory without such accesses are therefore not explored.
//!
//! # Failures that are reported instead of hanging
//!
//! - A barrier or an exchange that can never complete: an exited thread or lane, different counts or masks, or all
//!   threads of the block waiting for each other. The grid ends with [`LaunchError::Misuse`] or [`LaunchError::Stuck`],
//!   which names every waiting thread of the block and its place in the source.
//! - A thread that panics or traps: its grid ends with [`LaunchError::Panicked`] or [`LaunchError::Trapped`]. The other
//!   threads of the grid are unwound; other grids continue.
//! - Blocks that wait for room while the resident ones wait for them, and any other lack of progress in a seeded world:
//!   [`WorldError::NoProgress`]. It names every waiter, the blocks that never began, and the residency limit.
//! - A lack of progress in real time, such as a wait without a deadline for a signal that never comes: after
//!   [`ThreadsConfig::stall_report`], all waiters and their places are printed once on standard error, and the world
//!   goes on. SIGQUIT prints them too, in both modes, and then ends the process. A program that handles or ignores
//!   SIGQUIT keeps its own action. Threads of a grid that wait at the same place take one line.
//! - A data race in windows or shared memory, in a seeded world: [`WorldError::Race`]. It names both accesses, their
//!   threads and places, and what would have ordered them; see [`SeededConfig::races`].
//! - A failed grid whose result no ticket read: [`WorldError::UnseenFailure`].
//! - A coroutine that overflows its stack: a handler of SIGSEGV names rank, grid, block, thread and the setting that
//!   enlarges the stack on standard error, and aborts the process. It names a device thread that uses a null pointer,
//!   too. All faults but overflows go to the handler before it.
//! - A coroutine that never yields: the watchdog names it on standard error and aborts the process.
//!
//! # Differences from a GPU
//!
//! - In a seeded world memory is sequentially consistent between switch points. Memory orders that are too weak show as
//!   data races only; loom and reading the PTX show more. In the threads mode, accesses of different devices have the
//!   CPU's memory order.
//! - Lanes of a warp do not run in lockstep. `active_mask` returns a random part of the lanes that reach one place
//!   within 2 us, so code that aggregates over it meets groups of all sizes.
//! - A whole-block barrier with exited threads, which hardware tolerates, is an error here. So is an exchange whose
//!   mask names an exited lane. A mask may name lanes that a partial last warp lacks, as on a GPU.
//! - Barriers with a count count whole warps: a partial last warp counts 32 when all its threads have arrived.
//! - Static shared memory is zeroed; dynamic shared memory is filled with `0xcd`.
//! - Bulk copies read and write at moments drawn from the seed, and from shared memory what the last fence of any
//!   thread of the block showed. A missing fence after reads of shared memory, or for global memory, is not found. For
//!   the detector of races the thread that starts a copy makes its accesses.
//! - A thread has 1 MiB of stack by default ([`DeviceConfig::stack_bytes`]), which is enough for kernels compiled
//!   without optimisation, and a guard page behind it.
//! - Pauses have no place in the source. A polling thread is reported with the last barrier, exchange or active mask
//!   that it called.
//!
//! # Cost
//!
//! `cargo run -p gin-virtual --example costs` prints these figures (the workspace's `dev` profile optimises). They were
//! measured on 2026-11-21 on a 2-core x86-64 machine with little other load. `cargo bench -p gin-virtual` runs the same
//! as benchmarks.
//!
//! | operation | cost | per second |
//! | --- | --- | --- |
//! | a thread, from start to end, on a reused stack | 200 ns | 5 million |
//! | a thread, from start to end, on a new stack | 7.4 us | 140,000 |
//! | a switch among 32 threads | 65 to 73 ns | 14 to 15 million |
//! | a switch among 1,024 threads | 69 to 90 ns | 11 to 14 million |
//! | a switch among 16,384 threads | 99 to 119 ns | 8 to 10 million |
//! | a switch point, most of which pass without a switch | 4 ns | 250 million |
//! | an arrival at a block barrier, 8 blocks of 256 threads, switches included | 146 ns | 6.9 million |
//! | a lane in a warp exchange, 8 warps, switches included | 132 ns | 7.6 million |
//!
//! The ranges cover the schedules. A resident thread takes 4.2 KB of memory if it uses one page of its stack, and 1 MiB
//! of address space. Up to 8,192 stacks of each size are kept for later grids. Since Linux 6.13 thousands of stacks
//! share a mapping. Before, each takes two of the usual 65,530 (`vm.max_map_count`), so a process can have about 32,000
//! resident threads. Blocks beyond that end their grid with [`LaunchError::OutOfStacks`]; a smaller
//! [`DeviceConfig::resident_blocks`] avoids it.
//!
//! Under a load of 6 on the same machine, all figures were 1.3 times as long, under a load of 12 twice.
#![warn(unreachable_pub)]

mod actor;
mod config;
mod end;
mod engine;
mod error;
mod grid;
mod hooks;
mod host;
mod inbox;
mod lock;
mod log;
mod overflow;
mod race;
mod races;
mod refusal;
mod service;
mod shared;
mod stack;
mod threads;
mod watchdog;
mod world;

pub use actor::Actor;
pub use config::{DeviceConfig, LogMode, Schedule, SeededConfig, ThreadsConfig};
pub use error::{LaunchError, NotStarted, WaitKind, WaitReport, Waiter, WorldError};
pub use gin_device::exec::Dim3;
pub use grid::{BLOCK_THREADS_LIMIT, Grid, LaunchTicket, StreamId};
pub use hooks::{executor, install, peek_clock_ns};
pub use host::{
    block_on, block_on_at, block_on_for, clock_ns, in_world, is_simulated, maybe_switch, name_window, sleep_ns,
    yield_now,
};
pub use log::EventLog;
pub use race::{Race, RaceAccess, RaceMemory, RaceOperation};
pub use refusal::{explain_refusal, memory_cgroup, usual_setting};
pub use service::{Pace, ServiceHandle, ServiceStep};
pub use shared::{SHARED_LIMIT, STATIC_SHARED_LIMIT};
pub use world::{VirtualGpu, World};
