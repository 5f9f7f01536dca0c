// SPDX-License-Identifier: MIT OR Apache-2.0
//! Log messages of the command on standard error. The variable `GIN_LOG` selects them.

use crate::cli::{Failure, Refused};
use std::io::{self, IsTerminal};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::{self, format::FmtSpan};
use tracing_subscriber::prelude::*;

/// The default filter: errors, and the progress of joining, which a user waits for. It leaves
/// faults out because these end the command, which prints them itself.
const DEFAULT: &str = "error,gin_boot=info";

/// Starts logging.
///
/// # Errors
/// Returns [`Refused`] if `GIN_LOG` is no valid filter.
pub(crate) fn start() -> Result<(), Failure> {
    let given = std::env::var("GIN_LOG").ok().filter(|text| !text.trim().is_empty());
    let filter: Targets = given.as_deref().unwrap_or(DEFAULT).parse().map_err(|error| {
        let text = given.as_deref().unwrap_or_default();
        Refused(format!(
            "GIN_LOG={text}: {error}; levels are error, warn, info, debug, trace, also as gin_host::comm=debug"
        ))
    })?;
    let lines = fmt::layer().with_writer(io::stderr).with_ansi(io::stderr().is_terminal()).without_time();
    // A message at the end of each span gives its duration.
    tracing_subscriber::registry().with(lines.with_span_events(FmtSpan::CLOSE).with_filter(filter)).try_init()?;
    Ok(())
}
