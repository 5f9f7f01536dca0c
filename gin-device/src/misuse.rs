// SPDX-License-Identifier: MIT OR Apache-2.0
//! Mistakes: the texts of mistakes that show when a kernel runs, and examples of mistakes that the types forbid, which
//! must not compile.
//!
//! # When a kernel runs
//!
//! The list of traps in `docs/kernels.md` has the remedies. Tests make each mistake and compare the text.
//!
//! | mistake | text on the virtual GPU |
//! | --- | --- |
//! | a wait that nothing meets | `deadline passed in wait_signal, context 0, signal 3: it is 0 and should have reached 1 within 20 ms, at src/lib.rs:17:9` |
//! | the same without a deadline | `no progress: ...`, and each waiter: `waiting in wait_signal, context 0, signal 3: it is 0 and should reach 1 (last seen at src/lib.rs:17:9)` |
//! | a number that was not requested | ``no such signal in signal, context 0, rank 1, signal 99: `Requirements` have 16 of `signals`, with numbers 0 to 15`` |
//! | a range past the end | ``range reaches past the end of the window in put, context 0, rank 1, window 0 (`halo`) at byte 16: the window has 40 bytes there, and the range is bytes 16 to 48`` |
//! | an index past the end | `index 10 is past the end of window 0, which has 10 elements here, at src/lib.rs:17:9` |
//! | a thread that leaves early | `barrier 0 needs the whole block of 64 threads, 1 of them have exited` |
//! | a loop that polls plain memory | `has not yielded for 10s (seed 1): it loops without touching shared words, pausing or waiting. Ending the process.` |
//! | a large array on the stack | `overflowed its stack of 1048576 bytes (seed 1)` |
//! | a panic | ``rank 0, grid `said_mistake` (launch 1), block 0, thread 0 panicked: index out of bounds: the len is 4 but the index is 4, at src/lib.rs:17:9`` |
//! | two kernels of one name | ``2 kernels are named `said_twice`: `` and the modules |
//! | a read without a wait, `GIN_RACES=1` | `data race in window 0 of rank 1, byte 40: `, both accesses, and `no wait for a signal that covers the put is between them, by the reading thread or one that it met at a barrier; attach the signal to the put, or post a strong signal after it in its context and route, and wait for that signal before the read` |
//! | a source that changes too early, `GIN_RACES=1` | the same, and `no wait for the put's counter and no flush is between them; the source may change only after one of these` |
//! | shared memory without a barrier, `GIN_RACES=1` | `data race in static shared memory of rank 0, block 0, byte 56: `, both accesses, and ``no barrier of the threads is between them; call `sync` of the coop`` |
//!
//! These show when the kernel is built:
//!
//! | mistake | text |
//! | --- | --- |
//! | a reference as a parameter | ``a kernel cannot take references: the compiler would assume that no one else writes to the memory; take a `Window` or a raw pointer`` |
//! | atomics of `core` | `an atomic without ordering and scope (core::sync::atomic)`, with file, line and kernel |
//! | an array or struct by value that is indexed | ``sm_90: `indexes_by_value`: 32 registers, 128 bytes of stack, no spills`` |
//!
//! Faults have the same text on a GPU, without the place.
//!
//! # When it is compiled
//!
//! Every example differs in one place from this correct kernel:
//!
//! ```
//! use gin_device::prelude::*;
//!
//! #[kernel]
//! pub unsafe fn exchange(comm: Comm, floats: Window<f32>, words: Window<u64>, deadline: Deadline) {
//!     let gin = Gin::new(&comm, ContextId::new(0));
//!     let steps = || -> Result<(), Fault> {
//!         let peer = comm.world().member(1)?;
//!         gin.put(peer, floats.range(0, 4), floats.range(4, 4)).signal(SignalId::new(0).inc()).issue(&Block)?;
//!         gin.put_value(peer, words.at(0), 7u64).issue(&Block)?;
//!         gin.wait_signal(&Block, SignalId::new(0), 1, deadline)?;
//!         let mut barrier = BarrierSession::new(&gin, BarrierTeam::World, 0)?;
//!         barrier.sync(&Block, Fence::Put, deadline)
//!     };
//!     if let Err(fault) = steps() {
//!         comm.report(fault);
//!     }
//! }
//! ```
//!
//! A rank is not a number, so a rank of one team cannot be taken for a rank of another team.
//!
//! ```compile_fail,E0308
//! # use gin_device::prelude::*;
//! unsafe fn f(gin: &Gin, floats: Window<f32>) {
//!     let _ = gin.put(1, floats.range(0, 4), floats.range(4, 4)).issue(&Block);
//! }
//! ```
//!
//! Source and destination have the same type.
//!
//! ```compile_fail,E0308
//! # use gin_device::prelude::*;
//! unsafe fn f(gin: &Gin, peer: Rank, floats: Window<f32>, words: Window<u64>) {
//!     let _ = gin.put(peer, floats.range(0, 4), words.range(0, 4)).issue(&Block);
//! }
//! ```
//!
//! A value is an integer or a float of at most 8 bytes.
//!
//! ```compile_fail,E0277
//! # use gin_device::prelude::*;
//! unsafe fn f(gin: &Gin, peer: Rank, wide: Window<u128>) {
//!     let _ = gin.put_value(peer, wide.at(0), 7u128).issue(&Block);
//! }
//! ```
//!
//! A get has no signal: nothing arrives at the peer.
//!
//! ```compile_fail,E0599
//! # use gin_device::prelude::*;
//! unsafe fn f(gin: &Gin, peer: Rank, floats: Window<f32>) {
//!     let _ = gin.get(peer, floats.range(0, 4), floats.range(4, 4)).signal(SignalId::new(0).inc()).issue(&Block);
//! }
//! ```
//!
//! A counter is not a signal.
//!
//! ```compile_fail,E0277
//! # use gin_device::prelude::*;
//! unsafe fn f(gin: &Gin, deadline: Deadline) {
//!     let _ = gin.wait_signal(&Block, CounterId::new(0), 1, deadline);
//! }
//! ```
//!
//! Nothing is posted before `issue`, and faults must not be dropped.
//!
//! ```compile_fail
//! # #![deny(unused_must_use)]
//! # use gin_device::prelude::*;
//! unsafe fn f(gin: &Gin, peer: Rank, floats: Window<f32>) {
//!     gin.put(peer, floats.range(0, 4), floats.range(4, 4));
//! }
//! ```
//!
//! ```compile_fail
//! # #![deny(unused_must_use)]
//! # use gin_device::prelude::*;
//! unsafe fn f(gin: &Gin, peer: Rank, floats: Window<f32>) {
//!     gin.put(peer, floats.range(0, 4), floats.range(4, 4)).issue(&Block);
//! }
//! ```
//!
//! A barrier session cannot be copied, because two copies would not share their arrivals.
//!
//! ```compile_fail,E0382
//! # use gin_device::prelude::*;
//! unsafe fn f(gin: &Gin, deadline: Deadline) -> Result<(), Fault> {
//!     let mut barrier = BarrierSession::new(gin, BarrierTeam::World, 0)?;
//!     let mut other = barrier;
//!     barrier.sync(&Block, Fence::Put, deadline)?;
//!     other.sync(&Block, Fence::Put, deadline)
//! }
//! ```
//!
//! A kernel takes neither references nor slices, returns nothing and is unsafe to call.
//!
//! ```compile_fail
//! # use gin_device::prelude::*;
//! #[kernel]
//! pub unsafe fn k(comm: Comm, data: &[f32]) {}
//! ```
//!
//! ```compile_fail
//! # use gin_device::prelude::*;
//! #[kernel]
//! pub fn k(comm: Comm) {}
//! ```
//!
//! ```compile_fail
//! # use gin_device::prelude::*;
//! #[kernel]
//! pub unsafe fn k(comm: Comm) -> u32 { 0 }
//! ```
//!
//! A launch passes the kernel's parameters, in their number, order and types.
//!
//! ```
//! # use gin_device::{kernel::LaunchStream, prelude::*};
//! # /// # Safety
//! # /// - None.
//! #[kernel]
//! pub unsafe fn fill(words: *mut f32, len: usize, value: f32) {}
//! unsafe fn f<S: LaunchStream>(stream: &S, shape: S::Config, words: *mut f32) -> Result<(), S::Error> {
//!     unsafe { fill::launch(stream, shape, words, 4, 2.0) }
//! }
//! ```
//!
//! ```compile_fail,E0061
//! # use gin_device::{kernel::LaunchStream, prelude::*};
//! # #[kernel]
//! # pub unsafe fn fill(words: *mut f32, len: usize, value: f32) {}
//! unsafe fn f<S: LaunchStream>(stream: &S, shape: S::Config, words: *mut f32) -> Result<(), S::Error> {
//!     unsafe { fill::launch(stream, shape, words, 4) } // no value
//! }
//! ```
//!
//! ```compile_fail,E0277
//! # use gin_device::{kernel::LaunchStream, prelude::*};
//! # #[kernel]
//! # pub unsafe fn fill(words: *mut f32, len: usize, value: f32) {}
//! unsafe fn f<S: LaunchStream>(stream: &S, shape: S::Config, words: *mut f32) -> Result<(), S::Error> {
//!     unsafe { fill::launch(stream, shape, words, 2.0, 4) } // length and value change places
//! }
//! ```
//!
//! ```compile_fail,E0277
//! # use gin_device::{kernel::LaunchStream, prelude::*};
//! # #[kernel]
//! # pub unsafe fn add(sums: Window<f32>) {}
//! unsafe fn f<S: LaunchStream>(stream: &S, shape: S::Config, sums: Window<u32>) -> Result<(), S::Error> {
//!     unsafe { add::launch(stream, shape, sums) } // a window of other elements
//! }
//! ```
//!
//! A parameter is `Copy` and aligned to 16 bytes at most.
//!
//! ```compile_fail,E0277
//! # use gin_device::prelude::*;
//! struct Heavy(u32);
//! #[kernel]
//! pub unsafe fn k(comm: Comm, heavy: Heavy) {}
//! ```
//!
//! ```compile_fail,E0080
//! # use gin_device::prelude::*;
//! #[derive(Clone, Copy)]
//! #[repr(align(32))]
//! struct Wide(u32);
//! #[kernel]
//! pub unsafe fn k(comm: Comm, wide: Wide) {}
//! ```
