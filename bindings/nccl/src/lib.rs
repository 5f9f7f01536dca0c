// SPDX-License-Identifier: MIT OR Apache-2.0
//! An RMA plugin of NCCL: its GPU-initiated networking (GIN) on a machine without a NIC.
//!
//! NCCL loads the library by `NCCL_RMA_PLUGIN` and takes one of the tables [`ncclRmaPlugin_v14`] (NCCL 2.30.7),
//! [`ncclRmaPlugin_v15`] (2.31) and [`ncclRmaPlugin_v16`] (2.32). A thread of NCCL takes the requests of kernels from
//! its queues and calls the table for each. The ranks of a communicator are threads of one process or of several
//! processes of a host.
//!
//! | module | holds |
//! | --- | --- |
//! | [`abi`] | the types of NCCL's headers |
//! | `table` | the functions of the tables: checks of pointers, panics and errors to codes |
//! | [`gpus`] | the GPUs: CUDA, or the virtual ones of a test |
//! | `contact` | the handle of a rank |
//! | `group` | how the ranks of a communicator find each other |
//! | `process` | ranks in other processes: boards, and mappings of their memory |
//! | `page` | words that several processes share |
//! | `inbox` | signals of other processes |
//! | `region` | registered memory, and the counts behind signals |
//! | `pair` | the lanes from a rank to a peer |
//! | `transfer` | puts, gets and signals |
//! | `failure`, `log` | errors, and NCCL's log |
//! | [`gdaki`] | another plugin in the same library, whose kernels drive software NICs |
//!
//! # The path of a put with signal
//! Each pair of ranks has lanes ([`gin_gpu::lane`]), streams of their GPUs. A put is one copy on a lane; then the lane
//! writes the signal's new value and the number of this end. No thread waits between them, and NCCL's question
//! whether the request is done is one load from host memory.
//!
//! A lane writes values, and cannot add. So the plugin counts what it has added to each word of a signal table, which
//! NCCL registers as never reset, and writes the sum. Writes of one word have one order: a lane waits on its GPU for
//! the write of another lane that is still in flight (`region::Words`). Other words may change by kernels, so a kernel
//! of one thread adds to these.
//!
//! A signal that follows nothing takes a lane of the receiver's GPU, whose write reaches its own memory sooner.
#![warn(unreachable_pub)]

pub mod abi;
mod contact;
mod failure;
pub mod gdaki;
#[doc(hidden)]
pub mod gpus;
mod group;
mod inbox;
mod log;
mod page;
mod pair;
mod process;
mod region;
mod table;
mod transfer;

pub use gdaki::ncclGinPlugin_v14;
pub use table::{ncclRmaPlugin_v14, ncclRmaPlugin_v15, ncclRmaPlugin_v16};
