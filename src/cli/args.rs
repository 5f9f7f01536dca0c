// SPDX-License-Identifier: MIT OR Apache-2.0
//! Arguments of the command.

use super::report::Format;
use super::size;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::ffi::OsString;

/// GPU-initiated networking in Rust: workloads, benchmarks and what this machine has.
#[derive(Parser, Debug)]
#[command(
    name = "gin",
    version,
    arg_required_else_help = true,
    after_help = "Exit status: 0 if all results were right, 1 if one was wrong or a run failed, 2 if the arguments cannot \
                  be taken."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Run one workload and check its results against a plain computation on the host.
    Run(Run),
    /// Run all workloads on what this machine has, virtual GPUs and real ones, and print one table.
    Demo(Demo),
    /// Run a program as the ranks of one job on this host, and end all of them when one fails.
    Launch(LaunchArgs),
    /// Show devices, back ends (and why others are not to be had), limits and versions.
    Info,
    /// Measure the cost of operations, each beside its floor on this machine.
    Bench(BenchArgs),
    /// Check a ConnectX NIC from the host: queue pairs that send to themselves, and the entries that kernels write.
    /// Prints a report that can be pasted into an issue.
    NicCheck(NicCheck),
}

#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Each rank gets GIN_RANK, GIN_RANKS, GIN_LOCAL_RANK, GIN_LOCAL_RANKS and GIN_UNIQUE_ID, and prints with \
                        its rank before each line; lines of rank 0's standard output that are objects in JSON go through as \
                        they are. SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 are passed on.\n\n\
                        Exit status: 0 if all ranks ended with 0, else that of the first that failed (128 and its number \
                        for a signal); 127 if there is no such program, 126 if it cannot be started; 2 if the arguments \
                        cannot be taken."
)]
pub(crate) struct LaunchArgs {
    /// Number of ranks.
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub ranks: u32,
    /// Milliseconds between asking ranks to end (SIGTERM, or a signal that was passed on) and killing them.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(0..=3_600_000))]
    pub grace_ms: u64,
    /// A rank whose end, however it comes, does not end the others, and is no failure. Can be given several times.
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
    /// The NIC, as `ibv_devices` names it [default: the first that can serve GPUs].
    #[arg(long, value_name = "NAME")]
    pub nic: Option<String>,
    /// Its port, from 1.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..))]
    pub port: u8,
    /// Index of its GID [default: the first of RoCE v2 for an IPv4 address, else the first of v2; on InfiniBand 0].
    #[arg(long, value_name = "INDEX")]
    pub gid: Option<u32>,
    /// Milliseconds after which a check has failed.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..=3_600_000))]
    pub deadline_ms: u64,
    /// Check a software NIC of this process instead, no hardware: on Ethernet unless told otherwise.
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
    /// The request of all checks, from 0, that fails on the software NIC, for proving that failures are noticed.
    #[arg(long, hide = true, requires = "soft")]
    pub fault_at: Option<u64>,
}

/// The measurement.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum BenchWhat {
    /// All of lsa, proxy, post and gdaki.
    All,
    /// Loads and stores between GPUs: round trip, barrier, put by size.
    Lsa,
    /// Round trips over the proxy.
    Proxy,
    /// The cost of issuing a put over the proxy.
    Post,
    /// The cost of issuing a put where the kernel drives the NIC. No NIC takes part.
    Gdaki,
    /// The cost of joining and of collective operations over TCP, simulated on this machine. No GPU takes part.
    Bootstrap,
    /// Instructions and registers of the probe kernels, next to NCCL's. Needs the tools of CUDA, no GPU.
    Sass,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct BenchArgs {
    /// The measurement.
    #[arg(value_enum, default_value_t = BenchWhat::All)]
    pub what: BenchWhat,
    /// Kind of device. Virtual GPUs only show that it works.
    #[arg(long, value_enum, default_value_t = DeviceChoice::Auto)]
    pub device: DeviceChoice,
    /// Launches, of which the median counts.
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeats: u32,
    /// Largest put by loads and stores. Takes KiB, MiB, GiB.
    #[arg(long, default_value = "1GiB", value_parser = size::parse)]
    pub most_bytes: u64,
    /// Milliseconds after which a wait ends with an error.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..=3_600_000))]
    pub deadline_ms: u64,
    /// Most ranks of the simulated jobs of `bootstrap`.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(2..=16384))]
    pub most_ranks: u32,
    /// How to print the figures.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub format: Format,
    /// The same as --format json: one object for each table.
    #[arg(long, conflicts_with = "format")]
    pub json: bool,
}

impl BenchArgs {
    /// How to print.
    pub(crate) fn format(&self) -> Format {
        if self.json { Format::Json } else { self.format }
    }
}

/// The workload.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Workload {
    /// Ring all-reduce of a vector of f32 per rank, fused: add what came, pass it on.
    Ring,
    /// Every rank puts a block to every other, signals, and folds what arrives into a checksum.
    Alltoall,
    /// 2-D stencil whose kernel exchanges its borders each step.
    Halo,
}

impl Workload {
    /// Its name on the command line.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::Alltoall => "alltoall",
            Self::Halo => "halo",
        }
    }
}

/// Where to run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum DeviceChoice {
    /// The virtual GPU: kernels run on this machine's CPU.
    Virtual,
    /// NVIDIA GPUs.
    Cuda,
    /// NVIDIA GPUs where there are any, else the virtual GPU.
    Auto,
}

/// The engine that serves the kernels' posts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Backend {
    /// A CPU thread and a network.
    Proxy,
    /// The GPU drives the NIC.
    Gdaki,
    /// The best that there is.
    Auto,
}

/// The network for operations that proxies serve and loads and stores do not.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Network {
    /// Copies by the host, between ranks of one host.
    Peer,
    /// RDMA NICs, through libibverbs, also between hosts.
    Verbs,
    /// `verbs` in a job with ranks on several hosts, else `peer`.
    Auto,
}

/// How operations get to their peers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Route {
    /// Over the network, to all of them.
    Network,
    /// By loads and stores where these reach the peer (over NVLink, or within a GPU), else over the network.
    Auto,
}

/// How the virtual GPU runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Mode {
    /// On threads of the operating system, in real time.
    Threads,
    /// On one thread, in virtual time; the same seed gives the same run.
    Seeded,
}

/// Options that all workloads share.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Kind of device.
    #[arg(long, value_enum, default_value_t = DeviceChoice::Auto)]
    pub device: DeviceChoice,
    /// Number of ranks: each is a virtual GPU of this process, or one of the GPUs, which ranks share if there are
    /// fewer.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    pub ranks: u32,
    /// Bytes: per peer for alltoall (any number from 1), the vector of each rank for ring and the grid of each rank for
    /// halo (multiples of 4). Takes KiB, MiB, GiB.
    #[arg(long, default_value = "16KiB", value_parser = size::parse)]
    pub bytes: u64,
    /// Back end.
    #[arg(long, value_enum, default_value_t = Backend::Auto)]
    pub backend: Backend,
    /// The network for operations that proxies serve and loads and stores do not.
    #[arg(long, value_enum, default_value_t = Network::Auto)]
    pub network: Network,
    /// How operations get to their peers [default: network; the demo shows both].
    #[arg(long, value_enum)]
    pub route: Option<Route>,
    /// Contexts of the communicator.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub contexts: u32,
    /// Blocks of each rank's grid.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    pub blocks: u32,
    /// Threads of each block.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub threads: u32,
    /// Iterations, rounds or steps, all in one launch.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=u64::from(u32::MAX)))]
    pub iters: u64,
    /// Launches, of which the median time is shown.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub repeats: u32,
    /// Seed of the virtual GPU's schedule [default: 1].
    #[arg(long)]
    pub seed: Option<u64>,
    /// How the virtual GPU runs [default: seeded; threads over RDMA NICs, and where ranks are processes].
    #[arg(long, value_enum)]
    pub mode: Option<Mode>,
    /// Most blocks that are resident on a virtual GPU at a time; a workload that needs more is refused. A real GPU has
    /// its own figure.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub resident_blocks: Option<u32>,
    /// Milliseconds after which a wait in a kernel ends with an error.
    #[arg(long, default_value_t = 60_000)]
    pub deadline_ms: u64,
    /// Print what the communicators counted, by rank, context and peer, before they ended; over all launches.
    #[arg(long)]
    pub stats: bool,
}

impl Options {
    /// How the virtual GPU runs.
    pub(crate) fn mode(&self) -> Mode {
        // A NIC keeps no virtual time.
        self.mode.unwrap_or(if self.network == Network::Verbs { Mode::Threads } else { Mode::Seeded })
    }

    /// How operations get to their peers.
    pub(crate) fn route(&self) -> Route {
        self.route.unwrap_or(Route::Network)
    }

    /// Seed of its schedule.
    pub(crate) fn seed(&self) -> u64 {
        self.seed.unwrap_or(1)
    }
}

#[derive(Args, Debug)]
pub(crate) struct Run {
    /// The workload.
    #[arg(value_enum)]
    pub workload: Workload,
    #[command(flatten)]
    pub options: Options,
    /// Have this rank's process killed during a launch that follows the others, and see what the rest learn of it.
    /// Ranks are processes then, which this command launches unless a launcher has.
    #[arg(long, value_name = "RANK", group = "lost")]
    pub kill_rank: Option<u32>,
    /// The same, but the process is only stopped, until the others have gone on; then it continues where it was.
    #[arg(long, value_name = "RANK", group = "lost")]
    pub stop_rank: Option<u32>,
    /// Go on without the rank that was killed or stopped: a job of the others, with communicators and windows of its
    /// own.
    #[arg(long, requires = "lost")]
    pub shrink: bool,
    /// How to print the result.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub format: Format,
}

#[derive(Args, Debug)]
pub(crate) struct Demo {
    #[command(flatten)]
    pub options: Options,
    /// How to print the results.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub format: Format,
}

/// The options of a run that names none.
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
