// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command `gin`.

mod cli;
mod launch;
mod log;
mod metrics;
mod new;
mod nic_check;
mod trace;
mod workload;

/// The shipped kernels for GPUs: a table of architecture (`sm_90`, ...) and PTX or machine code.
#[cfg(feature = "cuda")]
mod ptx {
    include!(concat!(env!("OUT_DIR"), "/ptx.rs"));

    mod engine {
        include!(concat!(env!("OUT_DIR"), "/engine.rs"));
    }

    /// The engine of software NICs: a table of the same form.
    pub(crate) use engine::PTX as ENGINE;
}

use cli::{End, Failure, Refused};
use std::io;
use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(cli::run().unwrap_or_else(|error| print_failure(&error)).status())
}

/// Prints the error of a failed run and returns the matching end.
fn print_failure(error: &Failure) -> End {
    // A broken pipe is silent: the reader of the output has closed it on purpose.
    let is_broken_pipe = |error: &io::Error| error.kind() == io::ErrorKind::BrokenPipe;
    if !error.downcast_ref::<io::Error>().is_some_and(is_broken_pipe) {
        eprintln!("gin: {error}");
    }
    if error.is::<Refused>() { End::Refused } else { End::Failed }
}
