// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command `gin`, and what the command `gin-bench` shares with it. Programs of users have no use for this crate.

mod cli;
mod command;
mod launch;
mod log;
mod metrics;
mod model;
mod new;
mod nic_check;
pub mod plot;
pub mod size;
mod trace;
mod workload;

/// The shipped kernels for GPUs: a table of architecture (`sm_90`, ...) and PTX or machine code.
#[cfg(feature = "cuda")]
pub mod ptx {
    include!(concat!(env!("OUT_DIR"), "/ptx.rs"));

    mod engine {
        include!(concat!(env!("OUT_DIR"), "/engine.rs"));
    }

    /// The engine of software NICs: a table of the same form.
    pub use engine::PTX as SOFT_NIC_PTX;
}

pub use cli::{DeviceChoice, End, Failure, Format, MAX_MS, Refused, Verbosity, parse, within};
pub use command::job::{ThisJob, join};
pub use workload::{Gpus, Process, RunDevice, choose_one};

use std::io;
use std::process::ExitCode;

/// Runs the command `gin` with the arguments of this process.
pub fn main() -> ExitCode {
    exit("gin", command::run())
}

/// Starts the log messages of a command on standard error.
///
/// # Errors
/// Returns [`Refused`] if `GIN_LOG` is no valid filter.
pub fn start_log(verbosity: Verbosity) -> Result<(), Failure> {
    log::start(verbosity, None)
}

/// Returns the exit status of a command. Prints its error, if it failed.
pub fn exit(command: &str, outcome: Result<End, Failure>) -> ExitCode {
    ExitCode::from(outcome.unwrap_or_else(|error| print_failure(command, &error)).status())
}

/// Prints the error of a failed run and returns the matching end.
fn print_failure(command: &str, error: &Failure) -> End {
    // A broken pipe is silent: the reader of the output has closed it on purpose.
    let is_broken_pipe = |error: &io::Error| error.kind() == io::ErrorKind::BrokenPipe;
    if !error.downcast_ref::<io::Error>().is_some_and(is_broken_pipe) {
        eprintln!("{command}: {error}");
    }
    if error.is::<Refused>() { End::Refused } else { End::Failed }
}
