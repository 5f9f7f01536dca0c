// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command `gin`.

mod bench;
mod cli;
mod launch;
mod log;
mod nic_check;
mod workload;

use cli::{End, Failure, Refused};
use std::io;
use std::process::ExitCode;

fn main() -> ExitCode {
    let end = log::start().and_then(|()| cli::run()).unwrap_or_else(|error| told(&error));
    ExitCode::from(match end {
        End::Right => 0,
        End::Wrong => 1,
        End::Refused => 2,
        End::Code(code) => code,
    })
}

/// Prints what went wrong, and says how to end for it.
fn told(error: &Failure) -> End {
    // The reader of the output has seen enough of it.
    let unread = |error: &io::Error| error.kind() == io::ErrorKind::BrokenPipe;
    if !error.downcast_ref::<io::Error>().is_some_and(unread) {
        eprintln!("gin: {error}");
    }
    if error.is::<Refused>() { End::Refused } else { End::Wrong }
}
