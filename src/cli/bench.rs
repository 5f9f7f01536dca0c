// SPDX-License-Identifier: MIT OR Apache-2.0
//! `gin bench`.

use super::args::{BenchArgs, BenchWhat};
use super::job::{ThisJob, join};
use super::{DeviceChoice, End, Failure, Format, Refused, sass};
use crate::workload::{RunDevice, choose_one};
use gin_bench::{Bench, Earlier, Form, Measurement, Outcome, Output, Unsuited, bootstrap};
use std::io::{self, Write};
use std::time::Duration;

/// Repeats of a figure, and milliseconds until a wait ends, without the options.
const REPEATS: u32 = 9;
const DEADLINE_MS: u64 = 10_000;

/// Refuses the first option that the measurement ignores.
fn refuse_ignored(arguments: &BenchArgs) -> Result<(), Refused> {
    use BenchWhat::{All, Bootstrap, Capi, Ep, Gdaki, Launch, Lsa, Matmul, Post, Proxy};
    let json = arguments.format == Format::Json;
    let on_gpus = (
        &[Lsa, Proxy, Post, Gdaki, Ep, Matmul, Launch, Capi, All][..],
        "lsa, proxy, post, gdaki, ep, matmul, launch, capi and all",
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
        ("--most-bytes", arguments.most_bytes.is_some(), by_size),
        ("--module", arguments.module.is_some(), (&[Capi][..], "capi")),
        ("--most-ranks", arguments.most_ranks.is_some(), (&[Bootstrap][..], "bootstrap")),
        (
            "--format json",
            json,
            (&[Lsa, Proxy, Post, Gdaki, Ep, Matmul, Launch, Capi, All, Bootstrap][..], "measurements of time"),
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
pub(crate) fn run(arguments: &BenchArgs, out: &mut impl Write) -> Result<End, Failure> {
    let json = arguments.format == Format::Json;
    refuse_ignored(arguments)?;
    let measurement = match arguments.what {
        BenchWhat::All => Measurement::All,
        BenchWhat::Lsa => Measurement::Lsa,
        BenchWhat::Proxy => Measurement::Proxy,
        BenchWhat::Post => Measurement::Post,
        BenchWhat::Gdaki => Measurement::Gdaki,
        BenchWhat::Ep => Measurement::Ep,
        BenchWhat::Matmul => Measurement::Matmul,
        BenchWhat::Launch => Measurement::Launch,
        BenchWhat::Capi => Measurement::Capi,
        BenchWhat::Bootstrap => {
            return bootstrap::run(arguments.most_ranks.unwrap_or(1024), json, out).map(|()| End::Right);
        }
        BenchWhat::Sass => return sass::print(out).map(|()| End::Right),
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
    if let (Measurement::Capi, RunDevice::Virtual) = (measurement, &device) {
        return Err(
            Refused("capi: its kernels in C++ are for NVIDIA GPUs; there are only virtual ones".to_owned()).into()
        );
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
            (RunDevice::Cuda(gpus), None) => Some(gpus.for_bench()),
            (RunDevice::Cuda(gpus), Some(ThisJob { process, .. })) => {
                Some(gpus.of_process(process.local_rank, process.local_ranks).for_bench())
            }
        },
        job: job.map(|job| job.bootstrap),
        launches: arguments.repeats.unwrap_or(REPEATS) as usize,
        limit: Duration::from_millis(arguments.deadline_ms.unwrap_or(DEADLINE_MS)),
        most_bytes: arguments.most_bytes.unwrap_or(1 << 30),
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
