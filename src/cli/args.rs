// SPDX-License-Identifier: MIT OR Apache-2.0
//! The arguments of the command.

use super::report::Format;
use clap::{Args, Parser, Subcommand, ValueEnum};
use gin_bench::size;
use std::ffi::OsString;
use std::path::PathBuf;

/// GPU-initiated networking in Rust: workloads, benchmarks, and a description of this machine.
#[derive(Parser, Debug)]
#[command(
    name = "gin",
    version,
    arg_required_else_help = true,
    after_help = "Exit status: 0 if all results were right, 1 if a result was wrong or a run failed, 2 if the arguments \
                  are invalid."
)]
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
    /// Run all workloads on the virtual GPU and on the real GPUs of this machine, and print one table.
    Demo(Demo),
    /// Run a program as the ranks of one job on this host. If one rank fails, end all of them.
    Launch(LaunchArgs),
    /// Show devices, back ends (with the reason if one is unavailable), limits and versions.
    Info,
    /// Measure the cost of operations, each compared with its lower bound on this machine.
    Bench(BenchArgs),
    /// Check a ConnectX NIC from the host: connects queue pairs to themselves and posts the entries that kernels write.
    /// Prints a report that you can paste into an issue.
    NicCheck(NicCheck),
}

#[derive(Args, Clone, Debug)]
pub(crate) struct NewArgs {
    /// The folder. Its last part is the name of the project: lower-case letters, digits, - and _.
    #[arg(value_name = "NAME")]
    pub folder: PathBuf,
    /// The checkout of gin that the project depends on [default: the one that this command was built from].
    #[arg(long, value_name = "DIR", conflicts_with = "git")]
    pub path: Option<PathBuf>,
    /// The git repository of gin that the project depends on, instead of a checkout.
    #[arg(long, value_name = "URL")]
    pub git: Option<String>,
}

#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Each rank gets the variables GIN_RANK, GIN_RANKS, GIN_LOCAL_RANK, GIN_LOCAL_RANKS and GIN_UNIQUE_ID. \
                        gin launch prints a rank's output with the rank's number before each line; it prints JSON objects \
                        on rank 0's standard output without the number. It forwards SIGINT, SIGTERM, SIGHUP, SIGQUIT, \
                        SIGUSR1 and SIGUSR2 to the ranks.\n\n\
                        Exit status: 0 if all ranks ended with 0, otherwise the status of the first rank that failed (128 \
                        plus the signal's number if a signal ended it); 127 if the program does not exist, 126 if it \
                        cannot be started; 2 if the arguments are invalid."
)]
pub(crate) struct LaunchArgs {
    /// Number of ranks.
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub ranks: u32,
    /// Milliseconds between asking the ranks to end (by SIGTERM or a forwarded signal) and killing them.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(0..=3_600_000))]
    pub grace_ms: u64,
    /// A rank whose end, for any reason, neither ends the other ranks nor counts as a failure. Can be repeated.
    #[arg(long, value_name = "RANK")]
    pub may_lose: Vec<u32>,
    /// The program and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    pub program: Vec<OsString>,
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
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..))]
    pub port: u8,
    /// Index of the port's GID [default: the first RoCE v2 GID with an IPv4 address, else the first RoCE v2 GID; 0 on
    /// InfiniBand].
    #[arg(long, value_name = "INDEX")]
    pub gid: Option<u32>,
    /// Milliseconds until an unfinished check fails.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..=3_600_000))]
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
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub json: bool,
    /// Index, from 0 over all checks, of the request that the software NIC fails. Proves that a check notices failures.
    #[arg(long, hide = true, requires = "soft")]
    pub fault_at: Option<u64>,
}

/// The measurement.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum BenchWhat {
    /// All of lsa, proxy, post and gdaki.
    All,
    /// Loads and stores between GPUs: round trip, barrier, put by size, put in both directions.
    Lsa,
    /// Round trips over the proxy.
    Proxy,
    /// The cost of issuing a put over the proxy.
    Post,
    /// The cost of issuing a put with device-driven queue pairs. Uses no NIC.
    Gdaki,
    /// The cost of joining and of collective operations over TCP, simulated on this machine. Uses no GPU.
    Bootstrap,
    /// Instructions and registers of the probe kernels, beside NCCL's. Requires the CUDA tools, but no GPU.
    Sass,
}

#[derive(Args, Clone, Debug)]
#[command(after_help = "Between processes: gin launch -n 2 -- gin bench lsa, and the same for proxy.")]
pub(crate) struct BenchArgs {
    /// The measurement.
    #[arg(value_enum, default_value_t = BenchWhat::All)]
    pub what: BenchWhat,
    /// Kind of device. Virtual GPUs only show that the benchmark works.
    #[arg(long, value_enum, default_value_t = DeviceChoice::Auto)]
    pub device: DeviceChoice,
    /// Number of repeats of each figure; gin reports the median, and half the range of the others as noise.
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeats: u32,
    /// Print all figures and all that is known of them, instead of one table of the main ones.
    #[arg(long)]
    pub all: bool,
    /// Compare with an earlier run, whose output by --json the file holds. A difference counts if it exceeds the noise.
    #[arg(long, value_name = "FILE")]
    pub compare: Option<PathBuf>,
    /// Write a plot of latency and bandwidth by size to this file, as SVG.
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
    /// Largest put by loads and stores. Accepts the units KiB, MiB and GiB.
    #[arg(long, default_value = "1GiB", value_parser = size::parse)]
    pub most_bytes: u64,
    /// Milliseconds until a wait ends with an error.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..=3_600_000))]
    pub deadline_ms: u64,
    /// Maximum number of ranks in the simulated jobs of `bootstrap`.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(2..=16384))]
    pub most_ranks: u32,
    /// Output format of the figures.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub format: Format,
    /// Same as --format json: prints one object for each table.
    #[arg(long, conflicts_with = "format")]
    pub json: bool,
}

/// The workload.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Workload {
    /// Ring all-reduce of a vector of f32 per rank, fused: each rank adds the received chunk and passes the sum on.
    Ring,
    /// All-to-all: every rank puts a block to every rank, signals, and folds the received blocks into a checksum.
    Alltoall,
    /// 2-D stencil whose kernel exchanges its borders each step.
    Halo,
}

impl Workload {
    /// Returns its name on the command line.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::Alltoall => "alltoall",
            Self::Halo => "halo",
        }
    }
}

/// The option `--device`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum DeviceChoice {
    /// The virtual GPU: kernels run on this machine's CPU.
    Virtual,
    /// NVIDIA GPUs.
    Cuda,
    /// NVIDIA GPUs if the machine has any, else the virtual GPU.
    Auto,
}

/// The option `--backend`: the engine that executes the operations of kernels.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Backend {
    /// A CPU thread and a network.
    Proxy,
    /// The GPU drives the NIC (device-driven queue pairs).
    Gdaki,
    /// The best available back end.
    Auto,
}

/// The option `--network`: the network of the proxy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Network {
    /// Copies by the CPU, between ranks of one host.
    Peer,
    /// RDMA NICs through libibverbs, within a host and between hosts.
    Verbs,
    /// `verbs` if the ranks of the job are on several hosts, else `peer`.
    Auto,
}

/// The option `--route`: how operations reach their peers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Route {
    /// Over the network to all peers.
    Network,
    /// By loads and stores if these reach the peer (over NVLink, or within a GPU), else over the network.
    Auto,
}

/// The option `--mode`: how the virtual GPU runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Mode {
    /// On operating system threads, in real time.
    Threads,
    /// On one thread, in virtual time. The same seed gives the same run.
    Seeded,
}

/// The amount of work of a run.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// Bytes: for alltoall the block per peer (1 or more), for ring each rank's vector and for halo each rank's grid
    /// (both a multiple of 4). Accepts the units KiB, MiB and GiB.
    #[arg(long, default_value = "16KiB", value_parser = size::parse)]
    pub bytes: u64,
    /// Number of contexts of the communicator.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub contexts: u32,
    /// Number of blocks of each rank's grid.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    pub blocks: u32,
    /// Number of threads of each block.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub threads: u32,
    /// Number of iterations, rounds or steps in one launch.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=u64::from(u32::MAX)))]
    pub iters: u64,
    /// Number of launches; the median time is shown.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub repeats: u32,
}

/// Options that all workloads share.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Kind of device.
    #[arg(long, value_enum, default_value_t = DeviceChoice::Auto)]
    pub device: DeviceChoice,
    /// Number of ranks. Each rank has a virtual GPU of this process or a real GPU. Ranks share real GPUs if there are
    /// fewer GPUs than ranks [default: 4; in a job its number of ranks].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub ranks: Option<u32>,
    /// Back end.
    #[arg(long, value_enum, default_value_t = Backend::Auto)]
    pub backend: Backend,
    /// The network of the proxy, for operations that do not use loads and stores.
    #[arg(long, value_enum, default_value_t = Network::Auto)]
    pub network: Network,
    /// How operations reach their peers [default: network; the demo runs both].
    #[arg(long, value_enum)]
    pub route: Option<Route>,
    #[command(flatten)]
    pub sizes: Sizes,
    /// Seed of the virtual GPU's schedule [default: 1].
    #[arg(long)]
    pub seed: Option<u64>,
    /// How the virtual GPU runs [default: seeded; threads if the network is verbs or the ranks are processes].
    #[arg(long, value_enum)]
    pub mode: Option<Mode>,
    /// Maximum number of resident blocks of a virtual GPU. gin refuses a workload that needs more. A real GPU has its
    /// own limit.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub resident_blocks: Option<u32>,
    /// Milliseconds until a wait in a kernel ends with an error.
    #[arg(long, default_value_t = 60_000)]
    pub deadline_ms: u64,
    /// Print the statistics of the communicators by rank, context and peer, summed over all launches.
    #[arg(long)]
    pub stats: bool,
}

impl Options {
    /// Returns the number of ranks without a job.
    pub(crate) fn ranks(&self) -> u32 {
        self.ranks.unwrap_or(4)
    }
}

#[derive(Args, Debug)]
pub(crate) struct Run {
    /// The workload.
    #[arg(value_enum)]
    pub workload: Workload,
    #[command(flatten)]
    pub options: Options,
    /// Kill this rank's process during an extra, longer launch, and print how the other ranks learn of the loss. The
    /// ranks are then processes; this command starts them if no launcher did.
    #[arg(long, value_name = "RANK", group = "lost")]
    pub kill_rank: Option<u32>,
    /// Like --kill-rank, but stop the process and let it continue after the other ranks have gone on.
    #[arg(long, value_name = "RANK", group = "lost")]
    pub stop_rank: Option<u32>,
    /// Continue without the killed or stopped rank: the other ranks form a new job with new communicators and windows.
    #[arg(long, requires = "lost")]
    pub shrink: bool,
    /// Output format of the result.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub format: Format,
}

#[derive(Args, Debug)]
pub(crate) struct Demo {
    #[command(flatten)]
    pub options: Options,
    /// Output format of the results.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub format: Format,
}

/// Returns the options of a run without arguments.
#[cfg(test)]
pub(crate) fn default_options() -> Options {
    let Command::Run(run) = Cli::parse_from(["gin", "run", "ring"]).command else { panic!("another command") };
    run.options
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_arguments_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn zero_ranks_and_sizes_that_are_none_are_refused_with_the_reason() {
        let error = |args: &[&str]| {
            Cli::try_parse_from(["gin", "run", "ring"].iter().chain(args)).map(|_| ()).unwrap_err().to_string()
        };
        assert!(error(&["--ranks", "0"]).contains("not in 1.."));
        assert!(error(&["--threads", "0"]).contains("not in 1.."));
        assert!(error(&["--bytes", "12 parsecs"]).contains("parsecs"));
        assert!(error(&["--device", "abacus"]).contains("possible values"));
        assert!(error(&["--iters", "4294967296"]).contains("1..=4294967295"));
    }
}
