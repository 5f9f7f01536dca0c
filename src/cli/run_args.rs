// SPDX-License-Identifier: MIT OR Apache-2.0
//! The arguments of `gin run` and `gin demo`.

use super::Refused;
use super::report::Format;
use super::values::{MAX_MS, parse_address, within};
use crate::size;
use clap::builder::{PossibleValue, StringValueParser, TypedValueParser};
use clap::{Arg, ArgAction, Args, Command, ValueEnum};
use std::ffi::OsStr;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

/// The maximum numbers of blocks of a grid and of threads of a block: the limits of CUDA.
const MAX_BLOCKS: u64 = gin_gpu::Limits::CUDA.grid[0] as u64;
const MAX_THREADS: u64 = gin_gpu::Limits::CUDA.threads_per_block as u64;

/// How much the command says on standard error.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct Verbosity {
    /// Say more on standard error: events, and progress also without a terminal. Twice: events for debugging; three
    /// times: all. `GIN_LOG` chooses other events.
    #[arg(short, long, action = ArgAction::Count, conflicts_with = "quiet")]
    pub verbose: u8,
    /// Print results and errors only: no progress, and no notes.
    #[arg(short, long)]
    pub quiet: bool,
}

/// The workload.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Workload {
    /// Ring all-reduce of a vector of f32 per rank, out of place and fused: a rank adds what arrives and passes it on.
    Ring,
    /// All-to-all: every rank puts a block of bytes to every rank, itself included.
    Alltoall,
    /// 2-D stencil whose kernel exchanges its borders each step.
    Halo,
    /// Mixture of experts: a gate chooses experts for each token of a rank, and the tokens' rows go to them and back.
    Moe,
}

impl Workload {
    /// Returns its name on the command line.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::Alltoall => "alltoall",
            Self::Halo => "halo",
            Self::Moe => "moe",
        }
    }
}

/// The option `--device`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DeviceChoice {
    /// The virtual GPU: kernels run on this machine's CPU.
    Virtual,
    /// NVIDIA GPUs with these numbers, each once; all GPUs if there are no numbers.
    Cuda(Vec<usize>),
    /// NVIDIA GPUs if the machine has any, else the virtual GPU.
    Auto,
}

impl DeviceChoice {
    /// Returns the parser of the option, which shells ask for its values.
    pub fn parser() -> impl TypedValueParser<Value = Self> {
        DeviceParser
    }
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = match (text, text.strip_prefix("cuda:")) {
            ("virtual", _) => return Ok(Self::Virtual),
            ("auto", _) => return Ok(Self::Auto),
            ("cuda", _) => return Ok(Self::Cuda(Vec::new())),
            (_, Some(numbers)) => numbers,
            _ => return Err("devices are virtual, cuda, cuda:0,2 (GPUs by number) and auto".to_owned()),
        };
        let number =
            |number: &str| number.parse().map_err(|_| format!("`{number}` is no number of a GPU; use cuda:0,2"));
        let numbers: Vec<usize> = numbers.split(',').map(number).collect::<Result<_, _>>()?;
        match (1..numbers.len()).find(|&place| numbers[..place].contains(&numbers[place])) {
            Some(twice) => {
                Err(format!("GPU {} occurs twice; ranks share GPUs if there are more ranks", numbers[twice]))
            }
            None => Ok(Self::Cuda(numbers)),
        }
    }
}

/// The parser of `--device`.
#[derive(Clone, Copy)]
struct DeviceParser;

impl TypedValueParser for DeviceParser {
    type Value = DeviceChoice;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<DeviceChoice, clap::Error> {
        StringValueParser::new().try_map(|text| text.parse::<DeviceChoice>()).parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let values = [
            ("virtual", "The virtual GPU: kernels run on this machine's CPU"),
            ("cuda", "NVIDIA GPUs: all, or those with the numbers of `cuda:0,2`"),
            ("auto", "NVIDIA GPUs if the machine has any, else the virtual GPU"),
        ];
        Some(Box::new(values.into_iter().map(|(name, help)| PossibleValue::new(name).help(help))))
    }
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

/// The option `--network`: the network of the proxy, or the NICs of kernels.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Network {
    /// Copies by the CPU, between ranks of one host.
    Peer,
    /// RDMA NICs through libibverbs, within a host and between hosts.
    Verbs,
    /// libfabric, within a host and between hosts: the provider `tcp`, unless `GIN_FABRIC_PROVIDER` names another.
    Fabric,
    /// Software NICs in this process, which kernels drive. Without it, virtual GPUs drive such NICs too.
    Software,
    /// `verbs` if the ranks of the job are on several hosts, or `fabric` if they have no RDMA NICs; else `peer`.
    Auto,
}

/// The option `--route`: how operations reach their peers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Route {
    /// Over the network to all peers.
    Network,
    /// By loads and stores if these reach the peer (over NVLink, or within a GPU), else over the network.
    Auto,
    /// By loads and stores to all peers. Refused if they do not reach all.
    Lsa,
}

/// The option `--beside`: the library that runs in turns with the workload, to compare with.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Beside {
    /// NCCL: `ncclAllReduce` for ring, `ncclSend` and `ncclRecv` for alltoall.
    Nccl,
}

/// The option `--mode`: how the virtual GPU runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Mode {
    /// On operating system threads, in real time.
    Threads,
    /// On one thread, in virtual time. The same seed gives the same run.
    Seeded,
}

/// The amount of work of a run, as far as the arguments say it.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct SizeArgs {
    /// Bytes: for alltoall the block per peer (1 or more), for ring each rank's vector and for halo each rank's grid
    /// (both a multiple of 4), for moe the rows of each rank's tokens (a multiple of 1024, or of 16 for one token).
    /// Accepts the units KiB, MiB and GiB.
    #[arg(long, default_value = "16KiB", value_parser = size::parse)]
    pub bytes: u64,
    /// Number of contexts of the communicator [default: 1; on GPUs over the network up to 4, by size].
    #[arg(long, value_parser = within::<u32>(1..=u64::from(gin_abi::MAX_CONTEXTS)))]
    pub contexts: Option<u32>,
    /// Number of blocks of each rank's grid [default: 2; on GPUs by workload, route and size].
    #[arg(long, value_parser = within::<u32>(1..=MAX_BLOCKS))]
    pub blocks: Option<u32>,
    /// Number of threads of each block [default: 64; on GPUs 256 or 512].
    #[arg(long, value_parser = within::<u32>(1..=MAX_THREADS))]
    pub threads: Option<u32>,
    /// Number of timed iterations, rounds or steps in one launch [default: 10; on GPUs 20 to 1000, by size].
    #[arg(short = 'n', long, value_parser = within::<u64>(1..=u64::from(u32::MAX)))]
    pub iters: Option<u64>,
    /// Number of iterations, rounds or steps before the timed ones; for ring and alltoall each is checked.
    #[arg(short = 'w', long, default_value_t = 1, value_parser = within::<u64>(0..=u64::from(u32::MAX)))]
    pub warmup: u64,
    /// Check the results (1) or not (0). Data is made before the timed part and checked after it.
    #[arg(short = 'c', long, default_value_t = 1, value_parser = within::<u8>(0..=1))]
    pub check: u8,
    /// Number of launches, each with a new communicator; the median time is shown.
    #[arg(long, default_value_t = 3, value_parser = within::<u32>(1..=100_000))]
    pub repeats: u32,
}

/// The amount of work of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// As `--bytes`.
    pub bytes: u64,
    /// Number of contexts of the communicator.
    pub contexts: u32,
    /// Number of blocks of each rank's grid.
    pub blocks: u32,
    /// Number of threads of each block.
    pub threads: u32,
    /// Number of timed iterations in one launch.
    pub iters: u64,
    /// Number of iterations before them.
    pub warmup: u64,
    /// The results are checked.
    pub check: bool,
    /// Number of launches.
    pub repeats: u32,
}

/// Options that all workloads share.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Devices.
    #[arg(long, default_value = "auto", value_parser = DeviceChoice::parser())]
    pub device: DeviceChoice,
    /// Number of ranks. Each rank has a virtual GPU of this process or a real GPU. Ranks share real GPUs if there are
    /// fewer GPUs than ranks [default: 4; in a job its number of ranks].
    #[arg(short = 'g', long, value_parser = within::<u32>(1..=u64::from(gin_abi::MAX_RANKS)))]
    pub ranks: Option<u32>,
    /// Back end.
    #[arg(long, value_enum, default_value_t = Backend::Auto)]
    pub backend: Backend,
    /// The network, for operations that do not use loads and stores.
    #[arg(long, value_enum, default_value_t = Network::Auto)]
    pub network: Network,
    /// How operations reach their peers [default: network; the demo runs both].
    #[arg(long, value_enum)]
    pub route: Option<Route>,
    #[command(flatten)]
    pub sizes: SizeArgs,
    /// Seed of the virtual GPU's schedule [default: 1].
    #[arg(long, value_parser = within::<u64>(0..=u64::MAX))]
    pub seed: Option<u64>,
    /// How the virtual GPU runs [default: seeded; threads over verbs and fabric, and if the ranks are processes].
    #[arg(long, value_enum)]
    pub mode: Option<Mode>,
    /// Maximum number of resident blocks of a virtual GPU. gin refuses a workload that needs more. A real GPU has its
    /// own limit.
    #[arg(long, value_parser = within::<u32>(1..=MAX_BLOCKS))]
    pub resident_blocks: Option<u32>,
    /// Milliseconds until a wait in a kernel ends with an error.
    #[arg(long, default_value_t = 60_000, value_parser = within::<u64>(0..=MAX_MS))]
    pub deadline_ms: u64,
    /// Print the statistics of the communicators by rank, context and peer, summed over all launches.
    #[arg(long)]
    pub stats: bool,
    #[command(flatten)]
    pub verbosity: Verbosity,
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
    /// Smallest size of a sweep, in place of --bytes. Prints one row for each size.
    #[arg(
        short = 'b',
        long,
        value_name = "BYTES",
        value_parser = size::parse,
        requires = "max_bytes",
        conflicts_with_all = ["bytes", "lost"]
    )]
    pub min_bytes: Option<u64>,
    /// Largest size of the sweep.
    #[arg(short = 'e', long, value_name = "BYTES", value_parser = size::parse, requires = "min_bytes")]
    pub max_bytes: Option<u64>,
    /// Factor from each size of the sweep to the next [default: 2].
    #[arg(short = 'f', long, value_name = "FACTOR", value_parser = within::<u64>(2..=1024), requires = "max_bytes")]
    pub step_factor: Option<u64>,
    /// Run the same collective by another library in turns with the workload, and print its time and the ratio. NCCL's
    /// library is opened at run time.
    #[arg(long, value_enum, conflicts_with = "lost")]
    pub beside: Option<Beside>,
    /// Write a plot of latency and bandwidth of the sweep to this file, as SVG.
    #[arg(long, value_name = "FILE.svg", requires = "max_bytes")]
    pub plot: Option<PathBuf>,
    /// Serve metrics in the text format of Prometheus at this address while the run lasts: http://ADDR/metrics. ADDR is
    /// a port of the loopback interface, or an address with a port. The ranks of a job have consecutive ports.
    #[arg(long, value_name = "ADDR", value_parser = parse_address)]
    pub metrics: Option<SocketAddr>,
    /// Kill this rank's process during an extra, longer launch, and print how the other ranks learn of the loss. The
    /// ranks are then processes; this command starts them if no launcher did.
    #[arg(long, value_name = "RANK", group = "lost", value_parser = within::<u32>(0..=u64::from(gin_abi::MAX_RANKS) - 1))]
    pub kill_rank: Option<u32>,
    /// Like --kill-rank, but stop the process and let it continue after the other ranks have gone on.
    #[arg(long, value_name = "RANK", group = "lost", value_parser = within::<u32>(0..=u64::from(gin_abi::MAX_RANKS) - 1))]
    pub stop_rank: Option<u32>,
    /// Continue without the killed or stopped rank: the other ranks form a new job with new communicators and windows.
    #[arg(long, requires = "lost")]
    pub shrink: bool,
    /// Continue with a new process in the place of the killed rank, which is not rank 0. This command starts it; under
    /// another launcher start it by hand, with the variables of the killed rank and GIN_JOIN=1.
    #[arg(long, requires = "kill_rank", conflicts_with_all = ["shrink", "stop_rank"])]
    pub replace: bool,
    /// Output format of the result.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub format: Format,
}

impl Run {
    /// Returns the sizes of the sweep; none if the run has one size.
    ///
    /// # Errors
    /// Refuses a range without sizes, and a plot of one size.
    pub(crate) fn sweep(&self) -> Result<Vec<u64>, Refused> {
        let (Some(first), Some(last)) = (self.min_bytes, self.max_bytes) else { return Ok(Vec::new()) };
        let refuse = |text: String| Err(Refused(text));
        if first == 0 || first > last {
            return refuse(format!("-b {first} -e {last}: a sweep goes from 1 byte or more up to as many or more"));
        }
        let factor = self.step_factor.unwrap_or(2);
        let next = |bytes: &u64| bytes.checked_mul(factor).filter(|&bytes| bytes <= last);
        let sizes: Vec<u64> = std::iter::successors(Some(first), next).collect();
        if sizes.len() < 2 && self.plot.is_some() {
            return refuse(format!("--plot: the sweep has one size, {first} bytes; use a larger -e or a smaller -f"));
        }
        Ok(sizes)
    }
}

#[derive(Args, Debug)]
pub(crate) struct Demo {
    #[command(flatten)]
    pub options: Options,
    /// Output format of the results.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub format: Format,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_kinds_or_gpus_by_number_each_once() {
        let cuda = |numbers: &[usize]| Ok(DeviceChoice::Cuda(numbers.to_vec()));
        assert_eq!("cuda".parse(), cuda(&[]));
        assert_eq!("cuda:0,2".parse(), cuda(&[0, 2]));
        assert_eq!("cuda:3".parse(), cuda(&[3]));
        for (text, reason) in [
            ("cuda:", "no number"),
            ("cuda:0,", "no number"),
            ("cuda:-1", "`-1` is no number"),
            ("cuda:1,0,1", "GPU 1 occurs twice"),
            ("cuda0", "virtual, cuda"),
        ] {
            let refusal = text.parse::<DeviceChoice>().unwrap_err();
            assert!(refusal.contains(reason), "{text}: {refusal}");
        }
    }
}
