// SPDX-License-Identifier: MIT OR Apache-2.0
//! `gin bench`.

use super::args::{BenchArgs, BenchWhat};
use super::job::{ThisJob, join};
use super::{End, Failure, Format, Refused, sass};
use crate::workload::{RunDevice, choose_one};
use gin_bench::{Bench, Earlier, Form, Measurement, Output, bootstrap};
use std::io::{self, Write};
use std::time::Duration;

/// Returns the first given option of the measurements on GPUs.
fn of_gpus(arguments: &BenchArgs) -> Option<&'static str> {
    let given =
        [(arguments.all, "--all"), (arguments.compare.is_some(), "--compare"), (arguments.plot.is_some(), "--plot")];
    given.into_iter().find_map(|(given, name)| given.then_some(name))
}

/// Runs the chosen measurements and prints their tables. As one rank of a job, measures between processes.
///
/// # Errors
/// Refuses a device that is not available, and a file of earlier figures that is none; returns the error of the writer.
pub(crate) fn run(arguments: &BenchArgs, out: &mut impl Write) -> Result<End, Failure> {
    let json = arguments.json || arguments.format == Format::Json;
    if let (BenchWhat::Bootstrap | BenchWhat::Sass, Some(option)) = (arguments.what, of_gpus(arguments)) {
        return Err(Refused(format!("{option}: only lsa, proxy, post, gdaki and all have this option")).into());
    }
    let measurement = match arguments.what {
        BenchWhat::All => Measurement::All,
        BenchWhat::Lsa => Measurement::Lsa,
        BenchWhat::Proxy => Measurement::Proxy,
        BenchWhat::Post => Measurement::Post,
        BenchWhat::Gdaki => Measurement::Gdaki,
        BenchWhat::Bootstrap => return bootstrap::run(arguments.most_ranks, json, out).map(|()| End::Right),
        BenchWhat::Sass => return sass::print(out).map(|()| End::Right),
    };
    let (device, note) = choose_one(arguments.device)?;
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
        launches: arguments.repeats as usize,
        limit: Duration::from_millis(arguments.deadline_ms),
        most_bytes: arguments.most_bytes,
    };
    if !prints {
        let right = gin_bench::run(&bench, measurement, &output, &mut io::sink())?;
        return Ok(if right { End::Right } else { End::Wrong });
    }
    let right = gin_bench::run(&bench, measurement, &output, out)?;
    if let (Some(note), false) = (note, json) {
        writeln!(out, "{note}.")?;
    }
    Ok(if right { End::Right } else { End::Wrong })
}
