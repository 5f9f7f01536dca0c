// SPDX-License-Identifier: MIT OR Apache-2.0
//! The arguments of the command.

use super::exit;
use super::report::Format;
use super::run_args::{Demo, Run, Verbosity};
use super::values::{MAX_MS, negative, within};
use super::{End, Refused};
use crate::size;
use clap::builder::StyledStr;
use clap::error::ErrorKind;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use std::ffi::OsString;
use std::path::PathBuf;

/// The order in which a rank sends to the others.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum Order {
    /// The rank after this one, the one after that, and so on.
    Next,
    /// Node by node; in each first the rank at the same place, then the ones after it.
    Place,
}

/// GPU-initiated networking in Rust: workloads, benchmarks, and a description of this machine.
#[derive(Parser, Debug)]
#[command(name = "gin", version, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Write a project into a new folder: a kernel crate, a program, a test for virtual and real GPUs, and a workflow.
    New(NewArgs),
    /// Run one workload and check its results against a plain computation on the host.
    Run(Run),
    /// Run a workload, and write a trace of its requests, proxy steps and kernels, which Perfetto shows.
    Trace(TraceArgs),
    /// Run all workloads on the virtual GPU and on the real GPUs of this machine, and print one table.
    Demo(Demo),
    /// Run a program as the ranks of one job on this host. If one rank fails, end all of them.
    Launch(LaunchArgs),
    /// Show devices, back ends (with the reason if one is unavailable), limits and versions.
    Info(InfoArgs),
    /// Measure the cost of operations, each compared with its lower bound on this machine: runs the command gin-bench.
    #[command(disable_help_flag = true)]
    Bench {
        /// The arguments of gin-bench; --help lists them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
        arguments: Vec<OsString>,
    },
    /// Estimate a workload on up to 4096 ranks by a simulation: its time, what limits it, and memory.
    Model(ModelArgs),
    /// Check a ConnectX NIC from the host: connects queue pairs to themselves and posts the entries that kernels write.
    /// Prints a report that you can paste into an issue.
    NicCheck(NicCheck),
    /// Print the completions of this command for a shell. For bash: source <(gin completions bash).
    Completions {
        /// The shell.
        #[arg(value_enum)]
        shell: Shell,
    },
    /// Print a man page, of this command or of a subcommand. To read it: man -l <(gin man run).
    Man {
        /// The subcommand.
        subcommand: Option<String>,
    },
}

#[derive(Args, Clone, Debug)]
pub(crate) struct NewArgs {
    /// The folder. Its last part is the name of the project: lower-case letters, digits, - and _.
    #[arg(value_name = "NAME")]
    pub folder: PathBuf,
    /// The checkout of gin that the project depends on [default: the one that this command was built from; for a
    /// command from crates.io, the crates of its version].
    #[arg(long, value_name = "DIR", conflicts_with = "git")]
    pub path: Option<PathBuf>,
    /// The git repository of gin that the project depends on, instead of a checkout.
    #[arg(long, value_name = "URL")]
    pub git: Option<String>,
    /// Write a project whose kernels call NCCL's own device functions, on communicators of NCCL.
    #[arg(long)]
    pub nccl: bool,
}

#[derive(Args, Debug)]
#[command(
    after_help = "https://ui.perfetto.dev opens the file. A rank that is a process writes its own: trace.0.json and so on."
)]
pub(crate) struct TraceArgs {
    /// The file of the trace.
    #[arg(short, long, value_name = "FILE", default_value = "trace.json")]
    pub output: PathBuf,
    #[command(subcommand)]
    pub command: Traced,
}

/// The commands that can be traced.
#[derive(Subcommand, Debug)]
pub(crate) enum Traced {
    /// Run one workload and check its results against a plain computation on the host.
    Run(Run),
}

#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Each rank gets the variables GIN_RANK, GIN_RANKS, GIN_LOCAL_RANK, GIN_LOCAL_RANKS and GIN_UNIQUE_ID. \
                        gin launch prints a rank's output with the rank's number before each line; it prints JSON objects \
                        on rank 0's standard output without the number. It forwards SIGINT, SIGTERM, SIGHUP, SIGQUIT, \
                        SIGUSR1 and SIGUSR2 to the ranks."
)]
pub(crate) struct LaunchArgs {
    /// Number of ranks.
    #[arg(short = 'n', long, value_parser = within::<u32>(1..=1024))]
    pub ranks: u32,
    /// Milliseconds between asking the ranks to end (by SIGTERM or a forwarded signal) and killing them.
    #[arg(long, default_value_t = 10_000, value_parser = within::<u64>(0..=MAX_MS))]
    pub grace_ms: u64,
    /// A rank whose end, for any reason, neither ends the other ranks nor counts as a failure. Can be repeated.
    #[arg(long, value_name = "RANK", value_parser = within::<u32>(0..=1023))]
    pub may_lose: Vec<u32>,
    /// Start a new process, with GIN_JOIN=1, in the place of each rank of --may-lose that fails. If that fails too, it
    /// counts as a failure. Not for rank 0, at whose address new processes find the job.
    #[arg(long, requires = "may_lose")]
    pub replace: bool,
    #[command(flatten)]
    pub verbosity: Verbosity,
    /// The program and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    pub program: Vec<OsString>,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct InfoArgs {
    /// Output format.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub format: Format,
}

/// The workload of a model.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum ModelWorkload {
    /// Each rank sends --bytes to each other rank.
    Alltoall,
    /// Dispatch of --tokens tokens of each rank to experts.
    Dispatch,
    /// Combine of the same tokens.
    Combine,
}

#[derive(Args, Clone, Debug)]
#[command(after_help = "docs/scale.md describes the model, its errors and its assumptions.")]
pub(crate) struct ModelArgs {
    /// The workload.
    #[arg(value_enum, default_value_t = ModelWorkload::Dispatch)]
    pub workload: ModelWorkload,
    /// Bytes for each peer in an all-to-all. Accepts the units KiB, MiB and GiB.
    #[arg(long, default_value = "4KiB", value_parser = size::parse)]
    pub bytes: u64,
    /// Tokens of each rank.
    #[arg(long, default_value_t = 128, value_parser = within::<u64>(1..=65_536))]
    pub tokens: u64,
    /// Experts of all ranks; with more ranks than experts the model has one expert for each rank.
    #[arg(long, default_value_t = 256, value_parser = within::<u64>(1..=65_536))]
    pub experts: u64,
    /// Experts of each token.
    #[arg(long, default_value_t = 8, value_parser = within::<u64>(1..=32))]
    pub ids: u64,
    /// Bytes of a token's row: 7168 BF16 by default.
    #[arg(long, default_value_t = 14_336, value_parser = within::<u64>(16..=65_536))]
    pub row_bytes: u64,
    /// Ranks of a node, which reach each other by loads and stores and have a NIC each.
    #[arg(long, default_value_t = 8, value_parser = within::<u32>(1..=256))]
    pub node: u32,
    /// Contexts of the communicator. A thread of each posts the puts of an all-to-all; dispatch and combine use one.
    #[arg(long, default_value_t = 1, value_parser = within::<u32>(1..=256))]
    pub contexts: u32,
    /// The order in which a rank sends to the others.
    #[arg(long, value_enum, default_value_t = Order::Next)]
    pub order: Order,
    /// Largest number of ranks.
    #[arg(long, default_value_t = 4096, value_parser = within::<u32>(8..=4096))]
    pub max_ranks: u32,
    /// A JSON file of rates and latencies, as --print-parameters prints it [default: gin's own measurements].
    #[arg(long, value_name = "FILE")]
    pub parameters: Option<PathBuf>,
    /// Output of `gin bench --format json`, whose figures replace parameters.
    #[arg(long, value_name = "FILE")]
    pub bench: Option<PathBuf>,
    /// Print the parameters and their sources instead.
    #[arg(long)]
    pub print_parameters: bool,
    /// Compare the model with recorded measurements of 2 and 4 GPUs instead.
    #[arg(long, conflicts_with = "print_parameters")]
    pub measured: bool,
    /// Write a plot of time and memory by ranks to this file, as SVG.
    #[arg(long, value_name = "FILE.svg", conflicts_with_all = ["print_parameters", "measured"])]
    pub plot: Option<PathBuf>,
    /// Output format.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub format: Format,
}

/// The network of a software NIC.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum SoftLink {
    /// RoCE v2.
    Ethernet,
    /// InfiniBand.
    Infiniband,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct NicCheck {
    /// The NIC, by its name in `ibv_devices` [default: the first NIC that can serve GPUs].
    #[arg(long, value_name = "NAME")]
    pub nic: Option<String>,
    /// The port of the NIC, from 1.
    #[arg(long, default_value_t = 1, value_parser = within::<u8>(1..=255))]
    pub port: u8,
    /// Index of the port's GID [default: the first RoCE v2 GID with an IPv4 address, else the first RoCE v2 GID; 0 on
    /// InfiniBand].
    #[arg(long, value_name = "INDEX", value_parser = within::<u32>(0..=u64::from(u32::MAX)))]
    pub gid: Option<u32>,
    /// Milliseconds until an unfinished check fails.
    #[arg(long, default_value_t = 10_000, value_parser = within::<u64>(1..=MAX_MS))]
    pub deadline_ms: u64,
    /// Check a software NIC of this process instead of hardware [default link: ethernet].
    #[arg(
        long,
        value_enum,
        value_name = "LINK",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "ethernet",
        conflicts_with = "nic"
    )]
    pub soft: Option<SoftLink>,
    /// Output format of the report.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub format: Format,
    /// Index, from 0 over all checks, of the request that the software NIC fails. Proves that a check notices failures.
    #[arg(long, hide = true, requires = "soft", value_parser = within::<u64>(0..=u64::MAX))]
    pub fault_at: Option<u64>,
}

impl Command {
    /// Returns how much the command says; commands without the options print results and errors.
    pub(crate) fn verbosity(&self) -> Verbosity {
        match self {
            Self::Run(run) | Self::Trace(TraceArgs { command: Traced::Run(run), .. }) => run.options.verbosity,
            Self::Demo(demo) => demo.options.verbosity,
            Self::Launch(launch) => launch.verbosity,
            Self::New(_)
            | Self::Info(_)
            | Self::Bench { .. }
            | Self::Model(_)
            | Self::NicCheck(_)
            | Self::Completions { .. }
            | Self::Man { .. } => Verbosity::default(),
        }
    }
}

/// Returns the description of the command, which also completions and man pages are made from.
pub(crate) fn command<P: CommandFactory>() -> clap::Command {
    fn complete(command: clap::Command) -> clap::Command {
        let list = match command.get_after_help() {
            Some(text) => format!("{text}\n\n{}", exit::list()),
            None => exit::list(),
        };
        // A negative number is a value, so that the error names the option and its range.
        let takes_value = |arg: &clap::Arg| !arg.is_positional() && arg.get_action().takes_values();
        let command = command.after_help(StyledStr::from(list)).mut_subcommands(complete);
        command.mut_args(|arg| if takes_value(&arg) { arg.allow_negative_numbers(true) } else { arg })
    }
    complete(P::command())
}

/// Parses the arguments of this process. If they ask for a help, or are invalid, prints the text and returns the
/// outcome.
///
/// # Errors
/// Refuses a negative value where no option takes one; returns the error of the writer.
pub fn parse<P: CommandFactory + FromArgMatches>() -> Result<Result<P, End>, super::Failure> {
    let error = match command::<P>().try_get_matches().and_then(|matches| P::from_arg_matches(&matches)) {
        Ok(arguments) => return Ok(Ok(arguments)),
        Err(error) => error,
    };
    let words = std::env::args_os().skip(1).filter_map(|word| word.into_string().ok());
    if let (ErrorKind::UnknownArgument, Some(word)) = (error.kind(), negative(words)) {
        return Err(Refused(format!("`{word}`: no option takes a negative value; see --help")).into());
    }
    error.print()?;
    let asked = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
    Ok(Err(if asked { End::Right } else { End::Refused }))
}

/// Returns the options of a run without arguments.
#[cfg(test)]
pub(crate) fn default_options() -> super::run_args::Options {
    let Command::Run(run) = Cli::parse_from(["gin", "run", "ring"]).command else { panic!("another command") };
    run.options
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_are_consistent() {
        command::<Cli>().debug_assert();
    }

    #[test]
    fn values_outside_their_limits_are_refused_with_the_option_and_the_range() {
        let error = |args: &[&str]| {
            let words = ["gin", "run", "ring"].iter().chain(args);
            command::<Cli>().try_get_matches_from(words).map(|_| ()).unwrap_err().to_string()
        };
        for (option, value, range) in [
            ("--ranks", "0", "1..=16777216"),
            ("--ranks", "-3", "1..=16777216"),
            ("--threads", "2048", "1..=1024"),
            ("--blocks", "4294967295", "1..=2147483647"),
            ("--contexts", "-1", "1..=256"),
            ("--iters", "4294967296", "1..=4294967295"),
            ("--seed", "-1", "0..=18446744073709551615"),
            ("--deadline-ms", "3600001", "0..=3600000"),
        ] {
            let text = error(&[option, value]);
            assert!(text.contains(option) && text.contains(&format!("{value} is not in {range}")), "{text}");
        }
        assert!(error(&["--bytes", "12 parsecs"]).contains("parsecs"));
        assert!(error(&["--bytes", "-1"]).contains("a size is not negative"));
        assert!(error(&["--device", "abacus"]).contains("virtual, cuda"));
    }
}
