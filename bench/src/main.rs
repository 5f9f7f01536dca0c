// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command `gin-bench`, which `gin bench` runs.

mod sass;

use clap::{Parser, ValueEnum};
use gin_bench::{Bench, Earlier, Form, Measurement, Outcome, Output, Unsuited, bootstrap};
use gin_cli::{
    DeviceChoice, End, Failure, Format, MAX_MS, Refused, RunDevice, ThisJob, Verbosity, choose_one, join, size, within,
};
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

fn main() -> ExitCode {
    gin_cli::exit("gin bench", begin())
}

/// Parses the arguments and measures.
fn begin() -> Result<End, Failure> {
    let arguments: Arguments = match gin_cli::parse()? {
        Ok(arguments) => arguments,
        Err(end) => return Ok(end),
    };
    gin_cli::start_log(arguments.verbosity)?;
    run(&arguments, &mut io::stdout())
}

/// The measurement.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum What {
    /// All of lsa, proxy, post, gdaki, ep, layouts, matmul and launch.
    All,
    /// Loads and stores between GPUs: round trip, barrier, put by size, put in both directions.
    Lsa,
    /// Round trips over the proxy, and completions of puts at their senders.
    Proxy,
    /// The cost of issuing a put over the proxy.
    Post,
    /// The cost of issuing a put with device-driven queue pairs. Uses no NIC.
    Gdaki,
    /// Dispatch and combine of expert parallelism, beside the same rows without routing.
    Ep,
    /// Dispatch and combine of expert-major layouts and with `max_rows`, beside the rank-major dispatch.
    Layouts,
    /// Products of matrices that send and receive, beside the same in two launches.
    Matmul,
    /// Small kernels in a row that use each other's results: in order, and as dependents.
    Launch,
    /// Kernels in C++ beside the same in Rust, between two ranks. Requires --module; `all` leaves it out.
    Capi,
    /// NCCL's network beside gin's proxy, by the same kernels on the same GPUs. Requires NCCL and the program
    /// gin-nccl-bench, which `make nccl-bench` builds; `all` leaves it out.
    Nccl,
    /// The cost of joining and of collective operations over TCP, simulated on this machine. Uses no GPU.
    Bootstrap,
    /// Instructions and registers of the probe kernels, beside NCCL's. Requires the CUDA tools, but no GPU.
    Sass,
}

/// Measure the cost of operations, each compared with its lower bound on this machine.
#[derive(Parser, Debug)]
#[command(
    name = "gin-bench",
    bin_name = "gin bench",
    version,
    after_help = "Between processes: gin launch -n 2 -- gin bench lsa, and the same for proxy."
)]
struct Arguments {
    /// The measurement.
    #[arg(value_enum, default_value_t = What::All)]
    what: What,
    /// Kind of device, as of `gin run`. Virtual GPUs only show that the benchmark works [default: auto].
    #[arg(long, value_parser = DeviceChoice::parser())]
    device: Option<DeviceChoice>,
    /// Number of repeats of each figure; gin reports the median, and half the range of the others as noise [default:
    /// 9].
    #[arg(long, value_parser = within::<u32>(1..=1000))]
    repeats: Option<u32>,
    /// Print all figures and all that is known of them, instead of one table of the main ones.
    #[arg(long)]
    all: bool,
    /// Compare with an earlier run, whose output by --format json the file holds. A difference counts if it exceeds the
    /// noise.
    #[arg(long, value_name = "FILE")]
    compare: Option<PathBuf>,
    /// Write a plot of latency and bandwidth by size to this file, as SVG.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Largest put by loads and stores. Accepts the units KiB, MiB and GiB [default: 1GiB].
    #[arg(long, value_parser = size::parse)]
    max_bytes: Option<u64>,
    /// The kernels in C++ for `capi`: a cubin of bench/kernels/capi.cu, which `make gpu-bundle` makes.
    #[arg(long, value_name = "FILE.cubin")]
    module: Option<PathBuf>,
    /// Milliseconds until a wait ends with an error [default: 10000].
    #[arg(long, value_parser = within::<u64>(1..=MAX_MS))]
    deadline_ms: Option<u64>,
    /// Maximum number of ranks in the simulated jobs of `bootstrap` [default: 1024].
    #[arg(long, value_parser = within::<u32>(2..=16384))]
    max_ranks: Option<u32>,
    /// Output format of the figures. JSON is one object for each table, with everything.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
    #[command(flatten)]
    verbosity: Verbosity,
}

/// Repeats of a figure, and milliseconds until a wait ends, without the options.
const REPEATS: u32 = 9;
const DEADLINE_MS: u64 = 10_000;

/// Refuses the first option that the measurement ignores.
fn refuse_ignored(arguments: &Arguments) -> Result<(), Refused> {
    use What::{All, Bootstrap, Capi, Ep, Gdaki, Launch, Layouts, Lsa, Matmul, Nccl, Post, Proxy};
    let json = arguments.format == Format::Json;
    let on_gpus = (
        &[Lsa, Proxy, Post, Gdaki, Ep, Layouts, Matmul, Launch, Capi, Nccl, All][..],
        "lsa, proxy, post, gdaki, ep, layouts, matmul, launch, capi, nccl and all",
    );
    let by_size = (&[Lsa, All][..], "lsa and all");
    let plotted = (&[Lsa, Ep, All][..], "lsa, ep and all");
    let options = [
        ("--device", arguments.device.is_some(), on_gpus),
        ("--repeats", arguments.repeats.is_some(), on_gpus),
        ("--deadline-ms", arguments.deadline_ms.is_some(), on_gpus),
        ("--all", arguments.all, on_gpus),
        ("--compare", arguments.compare.is_some(), on_gpus),
        ("--plot", arguments.plot.is_some(), plotted),
        ("--max-bytes", arguments.max_bytes.is_some(), by_size),
        ("--module", arguments.module.is_some(), (&[Capi][..], "capi")),
        ("--max-ranks", arguments.max_ranks.is_some(), (&[Bootstrap][..], "bootstrap")),
        (
            "--format json",
            json,
            (
                &[Lsa, Proxy, Post, Gdaki, Ep, Layouts, Matmul, Launch, Capi, Nccl, All, Bootstrap][..],
                "measurements of time",
            ),
        ),
    ];
    for (option, given, (measurements, names)) in options {
        if given && !measurements.contains(&arguments.what) {
            let plural = if measurements.len() > 1 { "have" } else { "has" };
            return Err(Refused(format!("{option}: only {names} {plural} this option; leave it out")));
        }
    }
    if json && arguments.all {
        return Err(Refused("--all: --format json always has everything; leave one of the two out".to_owned()));
    }
    Ok(())
}

/// Runs the chosen measurements and prints their tables. As one rank of a job, measures between processes.
///
/// # Errors
/// Refuses a device that is not available, and a file of earlier figures that is none; returns the error of the writer.
fn run(arguments: &Arguments, out: &mut impl Write) -> Result<End, Failure> {
    let json = arguments.format == Format::Json;
    refuse_ignored(arguments)?;
    let measurement = match arguments.what {
        What::All => Measurement::All,
        What::Lsa => Measurement::Lsa,
        What::Proxy => Measurement::Proxy,
        What::Post => Measurement::Post,
        What::Gdaki => Measurement::Gdaki,
        What::Ep => Measurement::Ep,
        What::Layouts => Measurement::Layouts,
        What::Matmul => Measurement::Matmul,
        What::Launch => Measurement::Launch,
        What::Capi => Measurement::Capi,
        What::Nccl => Measurement::Nccl,
        What::Bootstrap => {
            return bootstrap::run(arguments.max_ranks.unwrap_or(1024), json, out).map(|()| End::Right);
        }
        What::Sass => return sass::print(out).map(|()| End::Right),
    };
    let module = match (&arguments.module, measurement) {
        (Some(file), _) => Some(std::fs::read(file).map_err(|error| {
            Refused(format!("--module: cannot read {}: {error}; `make gpu-bundle` makes the cubin", file.display()))
        })?),
        (None, Measurement::Capi) => {
            let text = "capi: the kernels in C++ are missing; `make gpu-bundle` makes a cubin of them for --module";
            return Err(Refused(text.to_owned()).into());
        }
        (None, _) => None,
    };
    let (device, note) = choose_one(arguments.device.as_ref().unwrap_or(&DeviceChoice::Auto))?;
    let only_gpus = match measurement {
        Measurement::Capi => Some("capi: its kernels in C++ are for NVIDIA GPUs"),
        Measurement::Nccl => Some("nccl: NCCL is for NVIDIA GPUs"),
        _ => None,
    };
    if let (Some(why), RunDevice::Virtual) = (only_gpus, &device) {
        return Err(Refused(format!("{why}; there are only virtual ones")).into());
    }
    let job = join()?;
    let prints = job.as_ref().is_none_or(ThisJob::prints);
    let form = match (json, arguments.all) {
        (true, _) => Form::Json,
        (false, true) => Form::All,
        (false, false) => Form::Short,
    };
    let output = Output {
        form,
        // Only the process that prints needs the files, which may be on its host only.
        earlier: match arguments.compare.as_deref().filter(|_| prints) {
            Some(file) => {
                Some(Earlier::read(file, device.name()).map_err(|error| Refused(format!("--compare: {error}")))?)
            }
            None => None,
        },
        plot: arguments.plot.clone().filter(|_| prints),
    };
    let bench = Bench {
        gpus: match (device, &job) {
            (RunDevice::Virtual, _) => None,
            (RunDevice::Cuda(gpus), None) => Some(gpus_of(&gpus)),
            (RunDevice::Cuda(gpus), Some(ThisJob { process, .. })) => {
                Some(gpus_of(&gpus.of_process(process.local_rank, process.local_ranks)))
            }
        },
        job: job.map(|job| job.bootstrap),
        launches: arguments.repeats.unwrap_or(REPEATS) as usize,
        limit: Duration::from_millis(arguments.deadline_ms.unwrap_or(DEADLINE_MS)),
        max_bytes: arguments.max_bytes.unwrap_or(1 << 30),
        module,
    };
    let outcome = match prints {
        true => gin_bench::run(&bench, measurement, &output, out),
        false => gin_bench::run(&bench, measurement, &output, &mut io::sink()),
    };
    let outcome = outcome.map_err(|error| match error.downcast::<Unsuited>() {
        Ok(unsuited) => Refused(unsuited.to_string()).into(),
        Err(error) => error,
    })?;
    if let (Some(note), true, false) = (note, prints, json || arguments.verbosity.quiet) {
        writeln!(out, "{note}.")?;
    }
    Ok(match outcome {
        Outcome::Right => End::Right,
        Outcome::Wrong => End::Wrong,
        Outcome::Failed => End::Failed,
    })
}

/// Returns the GPUs as measurements take them, with the engine of software NICs.
fn gpus_of(gpus: &gin_cli::Gpus) -> gin_bench::Gpus {
    #[cfg(feature = "cuda")]
    let engine = gin_cli::ptx::SOFT_NIC_PTX;
    #[cfg(not(feature = "cuda"))]
    let engine = &[];
    gin_bench::Gpus { names: gpus.names().to_vec(), ordinals: gpus.numbers().to_vec(), own: gpus.own(), engine }
}
