// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command line: arguments, progress and output.

mod args;
mod bench;
mod info;
mod job;
mod report;
mod sass;

#[cfg(test)]
pub(crate) use args::default_options;
pub(crate) use args::{Backend, DeviceChoice, LaunchArgs, Mode, Network, NicCheck, Options, Route, SoftLink, Workload};
pub(crate) use report::{Format, Report};

use self::job::{Loss, ThisJob};
use args::{Cli, Command};
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{CommandFactory, FromArgMatches};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::error::Error;
use std::fmt;
use std::io::{self, IsTerminal};

/// The error of a failed run.
pub(crate) type Failure = Box<dyn Error>;

/// The error for invalid arguments. The text names the argument, the reason and a valid alternative.
#[derive(Debug)]
pub(crate) struct Refused(pub(crate) String);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Refused {}

/// The outcome of the command. Each outcome has its own exit status.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum End {
    /// All results were right.
    Right,
    /// A result was wrong and was printed, or a run failed.
    Wrong,
    /// The arguments were invalid.
    Refused,
    /// A launched program failed with this status.
    Code(u8),
}

/// Parses the arguments and runs the subcommand.
///
/// # Errors
/// Returns the error of the subcommand.
pub(crate) fn run() -> Result<End, Failure> {
    let parsed = Cli::command().try_get_matches().and_then(|matches| {
        let run = matches.subcommand().filter(|(name, _)| *name == "run");
        let given = run.is_some_and(|(_, run)| run.value_source("ranks") == Some(ValueSource::CommandLine));
        Cli::from_arg_matches(&matches).map(|cli| (cli, given))
    });
    let (cli, ranks_given) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => {
            error.print()?;
            let asked = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
            return Ok(if asked { End::Right } else { End::Refused });
        }
    };
    match cli.command {
        Command::Run(run) => match job::join()? {
            None => match Loss::of(&run) {
                None => run_workloads(&[run.workload], &run.options, false, run.format, None),
                Some(loss) => job::launch_with_loss(loss, run.options.ranks),
            },
            Some(job) => {
                let options = job::fit(&run.options, job.bootstrap.ranks(), ranks_given)?;
                let options = job::joined(options, job.is_on_one_host())?;
                let as_rank = |options: &Options, job: &ThisJob| {
                    run_workloads(&[run.workload], options, false, run.format, Some(job))
                };
                match Loss::of(&run) {
                    None => as_rank(&options, &job),
                    Some(loss) => job::run_with_loss((loss, run.shrink), &options, &job, as_rank),
                }
            }
        },
        Command::Demo(demo) => {
            run_workloads(&[Workload::Ring, Workload::Alltoall, Workload::Halo], &demo.options, true, demo.format, None)
        }
        Command::Launch(arguments) => crate::launch::run(&arguments),
        Command::Info => info::print(&mut io::stdout()).map(|()| End::Right),
        Command::NicCheck(arguments) => crate::nic_check::run(&arguments, &mut io::stdout()),
        Command::Bench(arguments) => bench::run(&arguments, &mut io::stdout()),
    }
}

/// Runs workloads and prints their results. With `every` it runs them on every available kind of device and by every
/// route. With a `job` this process is one rank of it, and only rank 0 prints.
fn run_workloads(
    workloads: &[Workload],
    options: &Options,
    every: bool,
    format: Format,
    job: Option<&ThisJob>,
) -> Result<End, Failure> {
    let mut devices = crate::workload::run_devices(options, every)?;
    let options = &if job.is_some() { job::on_threads(options) } else { options.clone() };
    if let Some(job) = job {
        devices.all =
            devices.all.into_iter().map(|device| device.of_process(job.local_rank, job.local_ranks)).collect();
    }
    let routes = match options.route {
        None if every => vec![Route::Network, Route::Auto],
        _ => vec![options.route()],
    };
    let total = (devices.all.len() * routes.len() * workloads.len()) as u64 * u64::from(options.repeats);
    let prints = job.is_none_or(ThisJob::prints);
    let progress = if prints && io::stderr().is_terminal() {
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
        bar.with_style(ProgressStyle::with_template("{msg} [{bar:30}] {pos}/{len} launches, {elapsed}")?)
    } else {
        ProgressBar::hidden()
    };
    let (mut reports, mut failure) = (Vec::new(), None);
    let devices_and_routes = devices.all.iter().flat_map(|device| routes.iter().map(move |route| (device, *route)));
    'all: for (device, route) in devices_and_routes {
        let options = Options { route: Some(route), ..options.clone() };
        for workload in workloads {
            progress.set_message(format!("{}, {}", workload.name(), device.name()));
            let bootstrap = job.map(|job| &job.bootstrap);
            match crate::workload::run(*workload, device, &options, bootstrap, &|| progress.inc(1)) {
                Ok(report) => reports.push(report),
                Err(error) => {
                    failure = Some(error);
                    break 'all;
                }
            }
        }
    }
    progress.finish_and_clear();
    // Prints the results from before a failure, too.
    if prints && !reports.is_empty() {
        report::print(&reports, format, devices.note.as_deref(), &mut io::stdout().lock())?;
    }
    match failure {
        Some(error) => Err(error),
        None if reports.iter().all(|report| report.verified) => Ok(End::Right),
        None => Ok(End::Wrong),
    }
}
