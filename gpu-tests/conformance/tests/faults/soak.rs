// SPDX-License-Identifier: MIT OR Apache-2.0
//! Random operations for a long time: memory, descriptors and threads of no process grow.

use crate::{Failure, Group};
use std::fs;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Interval between samples of a process.
const EVERY: Duration = Duration::from_millis(500);
/// Number of rows in the table.
const ROWS: u32 = 20;
/// Memory growth that is allowed from the second quarter to the last, because allocators vary in what they keep.
const SLACK_KIB: u64 = 4096;

/// Descriptors and threads that exist for a moment, which a sample may miss. A communicator that left one behind would
/// soon add more.
const PASSING: u64 = 2;

/// The resources of a process.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Sample {
    rss_kib: u64,
    descriptors: u64,
    threads: u64,
}

impl Sample {
    fn of(pid: u32) -> Option<Self> {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let field = |name: &str| -> Option<u64> {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse().ok()
        };
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count() as u64;
        Some(Self { rss_kib: field("VmRSS:")?, descriptors, threads: field("Threads:")? })
    }

    fn max(self, other: Self) -> Self {
        Self {
            rss_kib: self.rss_kib.max(other.rss_kib),
            descriptors: self.descriptors.max(other.descriptors),
            threads: self.threads.max(other.threads),
        }
    }
}

/// Returns the most of each resource that a process had within a part of the time.
fn max(samples: &[Vec<Sample>], rank: usize) -> Sample {
    samples.iter().map(|all| all[rank]).fold(Sample::default(), Sample::max)
}

/// Returns the median of a process's memory.
fn median_rss(samples: &[Vec<Sample>], rank: usize) -> u64 {
    let mut all: Vec<u64> = samples.iter().map(|all| all[rank].rss_kib).collect();
    all.sort_unstable();
    all[all.len() / 2]
}

fn soak(time: Duration, seed: u64) -> Result<(), Failure> {
    let mut group = Group::start()?;
    group.job(seed, Duration::from_secs(10), "plain auto plain")?;
    let begun = Instant::now();
    let mut samples: Vec<Vec<Sample>> = Vec::new();
    let mut row = 0;
    println!("{:>8}  most of any process: {:>10} {:>12} {:>8}", "s", "RSS KiB", "descriptors", "threads");
    while begun.elapsed() < time {
        std::thread::sleep(EVERY);
        let all = group.0.iter().map(|process| Sample::of(process.child.id()));
        samples.push(all.collect::<Option<_>>().ok_or("a process has ended")?);
        if begun.elapsed() >= time * row / ROWS {
            row += 1;
            let Sample { rss_kib, descriptors, threads } =
                samples.last().into_iter().flatten().copied().fold(Sample::default(), Sample::max);
            let at = begun.elapsed().as_secs_f64();
            println!("{at:>8.1}  {:>20} {rss_kib:>10} {descriptors:>12} {threads:>8}", "");
        }
    }
    group.0[0].tell("enough");
    let launches = group.hear("done", &[])?;
    println!("{} launches on each rank in {:.0} s", launches[0], begun.elapsed().as_secs_f64());
    let quarter = samples.len() / 4;
    let (early, late) = (&samples[quarter..2 * quarter], &samples[3 * quarter..]);
    for rank in 0..group.0.len() {
        let (before, after) = (max(early, rank), max(late, rank));
        let (rss_before, rss_after) = (median_rss(early, rank), median_rss(late, rank));
        println!("rank {rank}: RSS {rss_before} to {rss_after} KiB, at most {before:?}, then {after:?}");
        if after.descriptors > before.descriptors + PASSING || after.threads > before.threads + PASSING {
            return Err(format!("rank {rank} has more descriptors or threads than before"));
        }
        if rss_after > rss_before + SLACK_KIB {
            return Err(format!("the memory of rank {rank} has grown"));
        }
    }
    group.hear("idle", &[]).map(drop)
}

/// Runs the soak for this time, at least some seconds.
pub fn run(time: Duration, seed: u64) -> ExitCode {
    println!("GIN_SEED={seed}");
    match soak(time.max(Duration::from_secs(8)), seed) {
        Ok(()) => {
            println!("flat");
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("FAILED: {error}");
            ExitCode::FAILURE
        }
    }
}
