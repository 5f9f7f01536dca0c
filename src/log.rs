// SPDX-License-Identifier: MIT OR Apache-2.0
//! Log messages of the command on standard error. The variable `GIN_LOG` selects them, else `-v` and `-q`.

use crate::cli::{Failure, Refused, Verbosity};
use crate::trace::Recorder;
use gin_host::proxy::trace::TARGET;
use std::io;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::{self, format::FmtSpan};
use tracing_subscriber::prelude::*;

/// The default filter: errors, and the progress of joining, which a user waits for. It leaves
/// faults out because these end the command, which prints them itself.
const DEFAULT: &str = "error,gin_boot=info";

/// Returns the filter without `GIN_LOG`.
fn default(verbosity: Verbosity) -> &'static str {
    match verbosity {
        Verbosity { quiet: true, .. } => "error",
        Verbosity { verbose: 0, .. } => DEFAULT,
        Verbosity { verbose: 1, .. } => "info",
        Verbosity { verbose: 2, .. } => "debug",
        Verbosity { .. } => "trace",
    }
}

/// Starts logging, and recording for a trace if there is a recorder.
///
/// # Errors
/// Returns [`Refused`] if `GIN_LOG` is no valid filter.
pub(crate) fn start(verbosity: Verbosity, recorder: Option<Recorder>) -> Result<(), Failure> {
    let given = std::env::var("GIN_LOG").ok().filter(|text| !text.trim().is_empty());
    let filter: Targets = given.as_deref().unwrap_or(default(verbosity)).parse().map_err(|error| {
        let text = given.as_deref().unwrap_or_default();
        Refused(format!(
            "GIN_LOG={text}: {error}; levels are error, warn, info, debug, trace, also as gin_host::comm=debug"
        ))
    })?;
    // Each request and each step, also of proxies without work: nobody could read them as lines.
    let filter = filter.with_target(TARGET, LevelFilter::OFF);
    let recorded = Targets::new().with_target(TARGET, LevelFilter::TRACE);
    // Colours are a feature of the crate that the command does without; a build for debugging panics if asked for them.
    let lines = fmt::layer().with_writer(io::stderr).with_ansi(false).without_time();
    // A message at the end of each span gives its duration.
    let lines = lines.with_span_events(FmtSpan::CLOSE).with_filter(filter);
    tracing_subscriber::registry()
        .with(lines)
        .with(recorder.map(|recorder| recorder.with_filter(recorded)))
        .try_init()?;
    Ok(())
}
