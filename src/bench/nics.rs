// SPDX-License-Identifier: MIT OR Apache-2.0
//! Round trips of kernels that drive software NICs, by what executes the NICs' entries.

use super::lab::{Figure, Lab, Rounds, Shape};
use super::table::{Row, Table};
use super::{Bench, end};
use crate::cli::Failure;
use gin_host::comm::{CommError, Requirements, Routes, WindowFlags};
use gin_host::gpu::MemoryKind;
use gin_host::nic::SoftEngine;
use gin_host::world::{Rank, SoftNics};
use gin_soft_hca::Options;

const RANKS: u32 = 2;

/// What executes entries, and what it is called.
const ENGINES: [(SoftEngine, &str); 3] = [
    (SoftEngine::Process, "NICs stepped by the virtual world"),
    (SoftEngine::Thread, "NICs by a CPU thread that copies through the GPU"),
    (SoftEngine::Kernel, "NICs by a kernel on one processor"),
];

/// Puts of a value with a signal, and the same back.
pub(super) fn round_trips(bench: &Bench) -> Result<Vec<Table>, Failure> {
    let rounds = Rounds {
        launches: bench.launches.min(bench.pick(5, 1)),
        warm: bench.pick(50, 1),
        timed: bench.pick(1000, 3),
        checked: bench.pick(200, 3),
        ..bench.rounds()
    };
    let measure = |rank: &Rank| -> Result<[Figure; 2], CommError> {
        let lab = Lab::new(rank)?;
        let comm = rank.communicator(&Requirements { signals: 1, counters: 0, ..Requirements::default() })?;
        let handle = comm.device()?;
        let near = comm.alloc_window::<u64>(1, WindowFlags::NONE)?;
        let far = comm.register::<u64>(&lab.memory(MemoryKind::Pinned, 1)?.whole(), WindowFlags::NONE)?;
        let mut signals = 0;
        let mut play = |window| {
            let shape = Shape::one("bench_gdaki_ping", 1);
            lab.play(shape, Some(&comm), &[&handle, window], &rounds, &mut signals, true)
        };
        let trips = [play(&near)?, play(&far)?];
        end(rank, &comm)?;
        Ok(trips)
    };
    let mut rows = Vec::new();
    for (engine, text) in ENGINES.into_iter().filter(|(engine, _)| bench.is_real() == (*engine != SoftEngine::Process))
    {
        let mut config = bench.world(RANKS)?;
        config.routes = Routes::Network;
        let nics = match &config.devices {
            None => SoftNics::new(Options::default()),
            Some(devices) => SoftNics::placed(Options::default(), engine, &devices.device(0, RANKS)?)?,
        };
        let ranks = bench.on_ranks(config.soft_nics(&nics), measure)?;
        let violations = nics.fabric().violations().1;
        for (which, memory) in [(0, "GPU"), (1, "pinned")] {
            let wrong = ranks.iter().map(|trips| trips[which].wrong).sum::<u64>() + violations;
            let Some(first) = ranks.first() else { return Err("a rank brought no figures".into()) };
            let text = format!("put_value with signal and back, {memory} memory, {text}");
            rows.push(Row::new(text, first[which].ns / 1e3, "us", Some(wrong)));
        }
    }
    Ok(vec![bench.table("GDAKI round trip over software NICs", RANKS, rows)])
}
