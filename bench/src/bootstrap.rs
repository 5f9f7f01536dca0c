// SPDX-License-Identifier: MIT OR Apache-2.0
//! The cost of joining and of collective operations over TCP, by the number of ranks. The ranks are tasks of one
//! thread.

use crate::Failure;
use gin_boot::{Simulated, Step, simulate};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::Serialize;
use std::io::Write;
use std::time::Duration;

/// The numbers of ranks to simulate, up to the requested maximum.
const RANKS: [u32; 11] = [2, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384];

/// Bytes that each rank contributes: about as many as for the creation of a communicator.
const BYTES: usize = 256;

const BARRIERS: u32 = 11;

#[derive(Serialize)]
struct Row {
    ranks: u32,
    join_ms: f64,
    join_bytes_rank_0: u64,
    join_bytes_mean: u64,
    barrier_ms: f64,
    barrier_bytes_rank_0: u64,
    barrier_bytes_max: u64,
    gather_ms: f64,
    gather_bytes_rank_0: u64,
    gather_bytes_max: u64,
    door_ms: f64,
}

impl Row {
    fn new(ranks: u32, measured: &Simulated) -> Self {
        let ms = |time: Duration| (time.as_secs_f64() * 1e5).round() / 100.0;
        let Simulated { join, barrier, gather, door, .. } = measured;
        let Step { rank_0: barrier_bytes_rank_0, max: barrier_bytes_max, .. } = *barrier;
        let Step { rank_0: gather_bytes_rank_0, max: gather_bytes_max, .. } = *gather;
        Self {
            ranks,
            join_ms: ms(join.time),
            join_bytes_rank_0: join.rank_0,
            join_bytes_mean: join.mean,
            barrier_ms: ms(barrier.time),
            barrier_bytes_rank_0,
            barrier_bytes_max,
            gather_ms: ms(gather.time),
            gather_bytes_rank_0,
            gather_bytes_max,
            door_ms: ms(*door),
        }
    }
}

/// Runs the simulations and prints each row as soon as it is complete.
///
/// # Errors
/// Returns the error of the bootstrap, and the error of the writer.
pub fn run(max_ranks: u32, json: bool, out: &mut impl Write) -> Result<(), Failure> {
    // Four file descriptors per rank exceed the default limit of a process, so this raises the limit to its maximum.
    // The maximum nearly always suffices; otherwise the error of the simulation says so.
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    if !json {
        writeln!(
            out,
            "bootstrap over TCP: ranks as tasks of one thread, over the loopback; B: bytes sent and received; \
             each rank contributes {BYTES}"
        )?;
        writeln!(
            out,
            "{:>6} {:>10} {:>10} {:>10} | {:>10} {:>10} {:>10} | {:>10} {:>10} {:>10} | {:>10}",
            "ranks",
            "join ms",
            "rank 0 B",
            "mean B",
            "barrier ms",
            "rank 0 B",
            "max B",
            "gather ms",
            "rank 0 B",
            "max B",
            "door ms"
        )?;
    }
    for ranks in RANKS.into_iter().filter(|&ranks| ranks <= max_ranks) {
        let row = Row::new(ranks, &simulate(ranks, BARRIERS, BYTES)?);
        if json {
            writeln!(out, "{}", serde_json::to_string(&row)?)?;
            continue;
        }
        writeln!(
            out,
            "{:>6} {:>10.2} {:>10} {:>10} | {:>10.2} {:>10} {:>10} | {:>10.2} {:>10} {:>10} | {:>10.2}",
            row.ranks,
            row.join_ms,
            row.join_bytes_rank_0,
            row.join_bytes_mean,
            row.barrier_ms,
            row.barrier_bytes_rank_0,
            row.barrier_bytes_max,
            row.gather_ms,
            row.gather_bytes_rank_0,
            row.gather_bytes_max,
            row.door_ms,
        )?;
    }
    Ok(())
}
