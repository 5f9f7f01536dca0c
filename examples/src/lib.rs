// SPDX-License-Identifier: MIT OR Apache-2.0
//! Examples of gin. Each module is a program that launches the kernels of the same name in `examples/kernels`, and
//! checks the result against a plain computation.
//!
//! `cargo run -p gin-examples` lists them, `cargo run -p gin-examples NAME` runs one: on the GPUs of the machine, or on
//! virtual GPUs.
#![warn(unreachable_pub)]

pub mod all_gather_v;
pub mod all_to_all_v;
pub mod coops;
pub mod credits;
pub mod halo;
pub mod hello_put;
pub mod histogram;
pub mod ordering;
pub mod own_stream;
pub mod ping_pong;
pub mod processes;
pub mod ring_all_reduce;
pub mod ring_round;
pub mod seeds;

use gin_host::device::{GpuError, ModuleSource};
use gin_host::launch::WorldConfig;
use std::error::Error;
use std::fmt::Debug;

#[cfg(feature = "cuda")]
include!(concat!(env!("OUT_DIR"), "/ptx.rs"));

/// The kernels as PTX: none, so only virtual GPUs run them.
#[cfg(not(feature = "cuda"))]
pub static PTX: &[(&str, &[u8])] = &[];

/// One example.
#[derive(Clone, Copy, Debug)]
pub struct Example {
    /// The name of its module.
    pub name: &'static str,
    /// One line that says what it does.
    pub about: &'static str,
    /// The numbers of ranks with which it is tested; the first one is the default.
    pub ranks: &'static [u32],
    /// Runs it, and returns a line about the verified result.
    pub run: fn(WorldConfig) -> Result<String, Box<dyn Error>>,
}

macro_rules! examples {
    ($($name:ident, $ranks:expr, $about:literal;)*) => {
        [$(Example { name: stringify!($name), about: $about, ranks: &$ranks, run: $name::run }),*]
    };
}

/// All examples, simple ones first.
pub const ALL: [Example; 14] = examples! {
    hello_put, [2, 4], "every rank puts a text into its neighbour's memory";
    ping_pong, [2, 4], "two ranks put a number to each other in turn";
    ordering, [2, 4], "a strong signal behind many puts, weak signals, a get with a flush";
    coops, [2, 4], "puts by a block, by warps with a context each, and prepared puts";
    credits, [2, 4], "a stream of messages through a few slots";
    ring_round, [4, 2], "the README's kernel: rounds of a ring";
    all_gather_v, [4, 2], "all-gather of parts of different lengths";
    histogram, [2, 4], "a histogram over the keys of all ranks";
    ring_all_reduce, [4, 2], "all-reduce round a ring";
    halo, [4, 2], "a stencil with ghost cells";
    all_to_all_v, [4, 2], "all-to-all with different lengths";
    seeds, [2], "finds a mistake on purpose by its seed, on virtual GPUs";
    processes, [2], "ranks that are processes, under `gin launch`";
    own_stream, [2], "a stream and memory of the program's own CUDA calls; needs a GPU";
};

/// The reason why an example did not run. It has not passed then.
#[derive(Debug)]
pub struct Skipped(pub String);

impl std::fmt::Display for Skipped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Skipped {}

// ANCHOR: loaded
/// Loads the kernels on the GPUs of a job before its ranks begin. Otherwise each rank's first launch does, and the
/// driver compiles PTX for seconds while the kernels of other ranks wait already, and their deadlines run.
///
/// # Errors
/// An error of the driver.
pub fn loaded(config: WorldConfig) -> Result<WorldConfig, GpuError> {
    if let Some(devices) = &config.devices {
        for rank in 0..config.ranks {
            // Loaded kernels belong to the GPU and stay: ranks that share it load them once.
            devices.device(rank, config.ranks)?.load(ModuleSource::Linked)?;
        }
    }
    Ok(config)
}
// ANCHOR_END: loaded

/// Compares a result with the expected one.
fn expect<T: PartialEq + Debug>(what: &str, found: &T, expected: &T) -> Result<(), Box<dyn Error>> {
    if found == expected {
        return Ok(());
    }
    Err(format!("{what}: expected {expected:?}, found {found:?}").into())
}
