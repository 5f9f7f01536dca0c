// SPDX-License-Identifier: MIT OR Apache-2.0
//! Round trips of kernels that drive software NICs, by the engine that executes the NICs' entries.

use super::Bench;
use super::figure::Figure;
use super::lab::Lab;
use super::proxy::pings;
use super::table::{Row, Table};
use crate::Failure;
use gin_gpu::MemoryKind;
use gin_host::comm::Routes;
use gin_host::world::{Rank, SoftNics};
use gin_soft_nic::Options;
use gin_soft_nic_host::SoftEngine;

const RANKS: u32 = 2;

/// The engines that execute the entries of software NICs, and their names.
const ENGINES: [(SoftEngine, &str); 3] = [
    (SoftEngine::Process, "NICs stepped by the virtual world"),
    (SoftEngine::Thread, "NICs by a CPU thread that copies through the GPU"),
    (SoftEngine::Kernel, "NICs by a kernel on one SM"),
];

/// Measures round trips: a put of a value with a signal, and the same back.
pub(super) fn round_trips(bench: &Bench) -> Result<Vec<Table>, Failure> {
    let rounds = bench.long_rounds();
    let measure = |rank: &Rank| pings(&Lab::new(rank)?, "bench_gdaki_ping", &rounds, &[MemoryKind::Device], false);
    let mut rows = Vec::new();
    for (engine, text) in ENGINES.into_iter().filter(|(engine, _)| bench.is_real() == (*engine != SoftEngine::Process))
    {
        let mut config = bench.world(RANKS)?;
        config.comm.routes = Routes::Network;
        let nics = match &config.devices {
            None => SoftNics::new(Options::default()),
            Some(devices) => SoftNics::placed(Options::default(), engine, &devices.device(0, RANKS)?)?,
        };
        let ranks = bench.on_ranks(config.soft_nics(&nics), measure)?;
        if let Some(failure) = nics.fabric().failure() {
            return Err(format!("the NICs' engine failed: {failure}").into());
        }
        let violations = nics.fabric().violations().1;
        let wrong = ranks.iter().flatten().filter_map(|trips| trips.wrong).sum::<u64>() + violations;
        let Some([first, ..]) = ranks.first().map(Vec::as_slice) else {
            return Err("a rank returned no figures".into());
        };
        let figure = Figure { wrong: Some(wrong), ..first.times(1e-3) };
        rows.push(Row::new(format!("put_value with signal and back, {text}"), figure, "us"));
    }
    Ok(vec![bench.table("GDAKI round trip over software NICs", RANKS, rows)])
}
