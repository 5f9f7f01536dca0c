// SPDX-License-Identifier: MIT OR Apache-2.0
//! `gin bench`.

use super::args::{BenchArgs, BenchWhat};
use super::{End, Failure, Format, sass};
use crate::workload::{RunDevice, choose_one};
use gin_bench::{Bench, Measurement, bootstrap};
use std::io::Write;
use std::time::Duration;

/// Runs the chosen measurements and prints their tables.
///
/// # Errors
/// Refuses a device that is not available; returns the error of the writer.
pub(crate) fn run(arguments: &BenchArgs, out: &mut impl Write) -> Result<End, Failure> {
    let json = arguments.json || arguments.format == Format::Json;
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
    let bench = Bench {
        gpus: match device {
            RunDevice::Virtual => None,
            RunDevice::Cuda(gpus) => Some(gpus.for_bench()),
        },
        launches: arguments.repeats as usize,
        limit: Duration::from_millis(arguments.deadline_ms),
        most_bytes: arguments.most_bytes,
    };
    let right = gin_bench::run(&bench, measurement, json, out)?;
    if let (Some(note), false) = (note, json) {
        writeln!(out, "{note}.")?;
    }
    Ok(if right { End::Right } else { End::Wrong })
}
