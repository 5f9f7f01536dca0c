// SPDX-License-Identifier: MIT OR Apache-2.0
//! The subcommands, and runs of workloads as one process or as one rank of a job.

mod info;
pub(crate) mod job;
mod progress;

use crate::cli::{
    self, Cli, Command, End, Failure, Format, Options, Printer, Refused, Run, TraceArgs, Traced, Verbosity,
};
use crate::cli::{Workload, parse, plot};
use crate::metrics;
use crate::trace::{Recorder, TraceFile};
use crate::workload::{Plans, Watch};
use job::{Loss, ThisJob};
use progress::Progress;
use std::ffi::OsString;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process;
use std::sync::Arc;

/// Parses the arguments and runs the subcommand.
///
/// # Errors
/// Returns the error of the subcommand.
pub(crate) fn run() -> Result<End, Failure> {
    let cli = match parse::<Cli>()? {
        Ok(cli) => cli,
        Err(end) => return Ok(end),
    };
    let recorder = matches!(cli.command, Command::Trace(_)).then(Recorder::default);
    crate::log::start(cli.command.verbosity(), recorder.clone())?;
    match cli.command {
        Command::Run(run) => run_one(&run, None),
        Command::Trace(TraceArgs { output, command: Traced::Run(run) }) => {
            run_one(&run, recorder.as_ref().map(|recorder| (recorder, output.as_path())))
        }
        Command::Demo(demo) => {
            let workloads = [Workload::Ring, Workload::Alltoall, Workload::Halo, Workload::Moe];
            let plans = Plans::resolve(&workloads, &demo.options, true, None)?;
            run_plans(&plans, &Printed::of(&demo.options, demo.format), None, &mut io::stdout())
        }
        Command::New(arguments) => crate::new::run(&arguments, &mut io::stdout()),
        Command::Launch(arguments) => crate::launch::run(&arguments),
        Command::Info(arguments) => info::print(arguments.format, &mut io::stdout()).map(|()| End::Right),
        Command::NicCheck(arguments) => crate::nic_check::run(&arguments, &mut io::stdout()),
        Command::Bench { arguments } => bench(&arguments),
        Command::Model(arguments) => crate::model::run(&arguments, &mut io::stdout()),
        Command::Completions { shell } => {
            // A closed output is an error here and a panic in clap_complete, so this writes to memory first.
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut cli::command::<Cli>(), "gin", &mut text);
            io::stdout().write_all(&text)?;
            Ok(End::Right)
        }
        Command::Man { subcommand } => man(subcommand.as_deref(), &mut io::stdout()),
    }
}

/// Becomes the command `gin-bench`, which is beside this one or in a folder of `PATH`.
///
/// # Errors
/// Refuses if there is none; returns the error of the system if it cannot be started.
fn bench(arguments: &[OsString]) -> Result<End, Failure> {
    let program = std::env::current_exe()?.with_file_name("gin-bench");
    let program = if program.exists() { program } else { "gin-bench".into() };
    let error = process::Command::new(&program).args(arguments).exec();
    if error.kind() != io::ErrorKind::NotFound {
        return Err(format!("{}: {error}", program.display()).into());
    }
    let text = "gin bench: there is no command gin-bench in the folder of gin or in PATH; in a checkout build it by \
                `cargo build --release -p gin-bench`";
    Err(Refused(text.to_owned()).into())
}

/// Prints the man page of the command, or of a subcommand.
fn man(subcommand: Option<&str>, out: &mut impl Write) -> Result<End, Failure> {
    let mut command = cli::command::<Cli>();
    command.build();
    let page = match subcommand {
        None => command,
        Some(name) => {
            let names = || command.get_subcommands().map(clap::Command::get_name).collect::<Vec<_>>().join(", ");
            match command.find_subcommand(name) {
                Some(found) => found.clone(),
                None => return Err(Refused(format!("gin man {name}: the subcommands are {}", names())).into()),
            }
        }
    };
    clap_mangen::Man::new(page).render(out)?;
    Ok(End::Right)
}

/// Runs one workload, also as one rank of a job, and writes a trace if there is a recorder and a file.
fn run_one(run: &Run, trace: Option<(&Recorder, &Path)>) -> Result<End, Failure> {
    let sizes = run.sweep()?;
    if run.options.verbosity.quiet && run.metrics.is_some_and(|address| address.port() == 0) {
        return Err(
            Refused("--metrics: with -q nobody learns the port that the system chooses; name one".to_owned()).into()
        );
    }
    let recorder = trace.map(|(recorder, _)| recorder);
    let printed = Printed { plot: run.plot.as_deref(), recorder, ..Printed::of(&run.options, run.format) };
    let plans = |process| {
        Ok::<_, Refused>(
            Plans::resolve(&[run.workload], &run.options, false, process)?.sweep(&sizes).beside(run.beside),
        )
    };
    let run_all = |plans: &Plans, job: Option<&ThisJob>| run_plans(plans, &printed, job, &mut io::stdout());
    let job = job::join()?;
    let rank = job.as_ref().map(|job| job.bootstrap.rank());
    // A file that cannot be written ends the command before the run.
    let file = trace.map(|(_, path)| TraceFile::open(path, rank)).transpose()?;
    let loss = Loss::of(run);
    if let (Some(address), true) = (run.metrics, job.is_some() || loss.is_none()) {
        let local_rank = job.as_ref().map_or(0, |job| job.process.local_rank);
        let address = metrics::serve(metrics::address_of(address, local_rank)?, printed.watch.clone())?;
        if !run.options.verbosity.quiet {
            eprintln!("gin: metrics at http://{address}/metrics");
        }
    }
    let outcome = match (job, loss) {
        (None, None) => run_all(&plans(None)?, None),
        (None, Some(loss)) => job::launch_with_loss(loss, run.options.ranks(), run.options.verbosity),
        (Some(job), None) => run_all(&plans(Some(job.process))?, Some(&job)),
        (Some(job), Some(loss)) => {
            let run_all = |plans: &Plans, job: &ThisJob| run_all(plans, Some(job));
            job::run_with_loss(loss, &plans(Some(job.process))?, &job, run_all)
        }
    };
    // A run that failed has a trace, too.
    if let (Some(recorder), Some(file)) = (recorder, file) {
        recorder.write(file, run.options.verbosity.quiet)?;
    }
    outcome
}

/// The output of runs.
#[derive(Clone, Debug)]
pub(crate) struct Printed<'a> {
    format: Format,
    verbosity: Verbosity,
    /// The file for a plot of the results by size.
    plot: Option<&'a Path>,
    /// The recorder of a trace.
    recorder: Option<&'a Recorder>,
    /// The state of the runs, for progress and metrics.
    watch: Arc<Watch>,
}

impl Printed<'_> {
    /// Returns the output without a plot.
    pub(crate) fn of(options: &Options, format: Format) -> Self {
        Self { format, verbosity: options.verbosity, plot: None, recorder: None, watch: Arc::default() }
    }
}

/// Runs the plans and prints each result when its run has ended. With a `job` this process is one rank of it, and only
/// the first rank prints.
///
/// # Errors
/// Refuses what no plan may be, before the first one runs; returns the error of a run, the file or the writer.
pub(crate) fn run_plans(
    plans: &Plans,
    printed: &Printed,
    job: Option<&ThisJob>,
    out: &mut impl Write,
) -> Result<End, Failure> {
    plans.all.iter().try_for_each(crate::workload::check)?;
    let total = plans.all.iter().map(|plan| u64::from(plan.sizes.repeats)).sum();
    let prints = job.is_none_or(ThisJob::prints);
    let verbosity = if prints { printed.verbosity } else { Verbosity { quiet: true, verbose: 0 } };
    // A job that loses a rank has several runs.
    let (watch, before) = (printed.watch.clone(), printed.watch.launches().floor());
    let progress = Progress::start(verbosity, (total, "launches"), move || watch.launches() - before)?;
    let note = plans.note.as_deref().filter(|_| !printed.verbosity.quiet);
    let mut printer = Printer::new(printed.format, note, out);
    let (mut verified, mut failure) = (true, None);
    for plan in &plans.all {
        progress.name(format!("{}, {}", plan.workload.name(), plan.device.name()));
        if let Some(recorder) = printed.recorder {
            recorder.begin_run(plan.clock());
        }
        match crate::workload::run(plan, job.map(|job| &job.bootstrap), &printed.watch) {
            Ok(report) => {
                verified &= report.verified != Some(false);
                if prints {
                    progress.beside(|| printer.add(report))?;
                }
            }
            Err(error) => {
                failure = Some(error);
                break;
            }
        }
    }
    drop(progress);
    // The results from before a failure have an end, too.
    let reports = printer.end()?;
    if let Some(path) = printed.plot {
        plot(&reports, path)?;
    }
    match failure {
        Some(error) => Err(error),
        None if verified => Ok(End::Right),
        None => Ok(End::Wrong),
    }
}
