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
pub(crate) use args::{
    Backend, DeviceChoice, LaunchArgs, Mode, Network, NewArgs, NicCheck, Options, Route, Sizes, SoftLink, Workload,
};
pub(crate) use report::{Format, Report};

use self::job::{Loss, ThisJob};
use crate::workload::Plans;
use args::{Cli, Command};
use clap::Parser;
use clap::error::ErrorKind;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::error::Error;
use std::fmt;
use std::io::{self, IsTerminal, Write};

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
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            error.print()?;
            let asked = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
            return Ok(if asked { End::Right } else { End::Refused });
        }
    };
    match cli.command {
        Command::Run(run) => match (job::join()?, Loss::of(&run)) {
            (None, None) => {
                let plans = Plans::resolve(&[run.workload], &run.options, false, None)?;
                run_plans(&plans, run.format, None, &mut io::stdout())
            }
            (None, Some(loss)) => job::launch_with_loss(loss, run.options.ranks()),
            (Some(job), loss) => {
                let plans = Plans::resolve(&[run.workload], &run.options, false, Some(job.process))?;
                let run_all = |plans: &Plans, job: &ThisJob| run_plans(plans, run.format, Some(job), &mut io::stdout());
                match loss {
                    None => run_all(&plans, &job),
                    Some(loss) => job::run_with_loss((loss, run.shrink), &plans, &job, run_all),
                }
            }
        },
        Command::Demo(demo) => {
            let workloads = [Workload::Ring, Workload::Alltoall, Workload::Halo];
            run_plans(&Plans::resolve(&workloads, &demo.options, true, None)?, demo.format, None, &mut io::stdout())
        }
        Command::New(arguments) => crate::new::run(&arguments, &mut io::stdout()),
        Command::Launch(arguments) => crate::launch::run(&arguments),
        Command::Info => info::print(&mut io::stdout()).map(|()| End::Right),
        Command::NicCheck(arguments) => crate::nic_check::run(&arguments, &mut io::stdout()),
        Command::Bench(arguments) => bench::run(&arguments, &mut io::stdout()),
    }
}

/// Runs the plans and prints the results. With a `job` this process is one rank of it, and only the first rank prints.
pub(crate) fn run_plans(
    plans: &Plans,
    format: Format,
    job: Option<&ThisJob>,
    out: &mut impl Write,
) -> Result<End, Failure> {
    let total = plans.all.iter().map(|plan| u64::from(plan.sizes.repeats)).sum();
    let prints = job.is_none_or(ThisJob::prints);
    let progress = if prints && io::stderr().is_terminal() {
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
        bar.with_style(ProgressStyle::with_template("{msg} [{bar:30}] {pos}/{len} launches, {elapsed}")?)
    } else {
        ProgressBar::hidden()
    };
    let (mut reports, mut failure) = (Vec::new(), None);
    for plan in &plans.all {
        progress.set_message(format!("{}, {}", plan.workload.name(), plan.device.name()));
        match crate::workload::run(plan, job.map(|job| &job.bootstrap), &|| progress.inc(1)) {
            Ok(report) => reports.push(report),
            Err(error) => {
                failure = Some(error);
                break;
            }
        }
    }
    progress.finish_and_clear();
    // Prints the results from before a failure, too.
    if prints && !reports.is_empty() {
        report::print(&reports, format, plans.note.as_deref(), out)?;
    }
    match failure {
        Some(error) => Err(error),
        None if reports.iter().all(|report| report.verified) => Ok(End::Right),
        None => Ok(End::Wrong),
    }
}
