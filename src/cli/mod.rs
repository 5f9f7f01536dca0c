// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command line: arguments, exit status and output.

mod args;
mod exit;
mod report;
mod run_args;
mod values;

#[cfg(test)]
pub(crate) use args::default_options;
pub use args::parse;
pub(crate) use args::{Cli, Command, TraceArgs, Traced, command};
pub(crate) use args::{LaunchArgs, ModelArgs, ModelWorkload, NewArgs, NicCheck, Order, SoftLink};
pub use exit::End;
pub use report::Format;
pub(crate) use report::{Figures, Printer, Report, plot, time};
pub(crate) use run_args::{Backend, Beside, Mode, Network, Options, Route, Run, SizeArgs, Sizes, Workload};
pub use run_args::{DeviceChoice, Verbosity};
#[cfg(test)]
pub(crate) use values::parse_address;
pub use values::{MAX_MS, within};

use std::error::Error;
use std::fmt;

/// The error of a failed run.
pub type Failure = Box<dyn Error>;

/// The error for invalid arguments. The text names the argument, the reason and a valid alternative.
#[derive(Debug)]
pub struct Refused(pub String);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Refused {}
