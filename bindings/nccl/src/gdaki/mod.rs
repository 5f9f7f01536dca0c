// SPDX-License-Identifier: MIT OR Apache-2.0
//! A GIN plugin of NCCL: kernels drive queue pairs of software NICs (GDAKI) instead of passing requests to a thread.
//!
//! NCCL loads the library by `NCCL_GIN_PLUGIN` and takes the table [`ncclGinPlugin_v14`]. NVIDIA's device code is
//! compiled into the program. It writes the entries of an mlx5 NIC and rings doorbells. So a program checks gin's
//! software NIC against code that drives real ones. It is slow: use the RMA plugin for speed.
//!
//! | module | holds |
//! | --- | --- |
//! | [`abi`] | the types of NCCL's headers |
//! | `layout` | the structures that device code reads in GPU memory |
//! | `table` | the functions of the table |
//! | `group` | how the ranks find each other, and the network that they share |
//! | `coll` | a communicator of a rank, and its registered memory |
//! | `context` | queue pairs, signals and counters |
//! | `progress` | steps of the engine |
//!
//! # The path of a put with signal
//! A kernel writes a WRITE and a FETCH_ADD to a ring in pinned memory, and a doorbell. NCCL's progress thread calls
//! `ginProgress`, which steps the engine of all NICs of the communicator. The engine copies the bytes from GPU to GPU
//! through the CPU, adds to the signal in the receiver's memory, and writes the completions that the kernel polls.

pub mod abi;
mod coll;
mod context;
mod group;
mod layout;
mod progress;
mod table;

pub use table::ncclGinPlugin_v14;
