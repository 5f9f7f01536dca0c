// SPDX-License-Identifier: MIT OR Apache-2.0
//! `gin model`: what a workload costs on more ranks than there are, by a simulation.

mod engine;
mod flow;
mod measured;
mod parameters;
mod print;

use crate::cli::{End, Failure, ModelArgs, ModelWorkload, Order, Refused};
use flow::{Flow, Path, Simulated, Topology};
use gin_host::comm::{ConnectionType, Footprint, Requirements};
use measured::Compared;
use parameters::{DEFAULTS, Parameters, transfer};
use serde::Serialize;
use std::io::Write;

/// The numbers of ranks of a table, up to the maximum.
const RANKS: [u32; 10] = [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096];

/// The tokens of each rank, and how they are routed.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Tokens {
    tokens: u64,
    experts: u64,
    ids: u64,
    row_bytes: u64,
}

impl Tokens {
    /// Returns the shape of all measurements: 256 experts, 8 ids, rows of 7168 BF16.
    fn of(tokens: u64) -> Self {
        Self { tokens, experts: 256, ids: 8, row_bytes: 2 * 7168 }
    }

    /// Returns the expected bytes from one rank to another one: a token goes to each rank that has one of its experts,
    /// once. Each id is another expert, all with the same probability. There is at least one expert for each rank.
    fn bytes_to_a_peer(&self, ranks: usize) -> f64 {
        let experts = self.experts.max(ranks as u64) as f64;
        let own = experts / ranks as f64;
        let none: f64 =
            (0..self.ids).map(|id| ((experts - own - id as f64) / (experts - id as f64)).max(0.0)).product();
        (1.0 - none) * (self.tokens * self.row_bytes) as f64
    }
}

/// A workload and its size.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Work {
    /// Each rank sends bytes to each other one.
    Alltoall {
        bytes: u64,
    },
    Dispatch(Tokens),
    Combine(Tokens),
}

impl Work {
    fn of(arguments: &ModelArgs) -> Self {
        let ModelArgs { tokens, experts, ids, row_bytes, bytes, .. } = *arguments;
        let tokens = Tokens { tokens, experts, ids: ids.min(experts), row_bytes };
        match arguments.workload {
            ModelWorkload::Alltoall => Self::Alltoall { bytes },
            ModelWorkload::Dispatch => Self::Dispatch(tokens),
            ModelWorkload::Combine => Self::Combine(tokens),
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Alltoall { bytes } => format!("alltoall of {}", crate::size::show(*bytes)),
            Self::Dispatch(tokens) => format!("dispatch of {} tokens", tokens.tokens),
            Self::Combine(tokens) => format!("combine of {} tokens", tokens.tokens),
        }
    }

    fn bytes_to_a_peer(&self, ranks: usize) -> f64 {
        match self {
            Self::Alltoall { bytes } => *bytes as f64,
            Self::Dispatch(tokens) | Self::Combine(tokens) => tokens.bytes_to_a_peer(ranks),
        }
    }

    /// Returns the flow. A dispatch makes two puts for each remote rank, a combine and an all-to-all one.
    fn flow(
        &self,
        ranks: usize,
        node: usize,
        path: Path,
        (topology, order): (Topology, Order),
        contexts: usize,
    ) -> Flow {
        let node = node.min(ranks);
        let alltoall = matches!(self, Self::Alltoall { .. });
        let puts = if matches!(self, Self::Dispatch(_)) { 2 } else { 1 };
        // The puts of a dispatch or a combine use one context.
        let contexts = if alltoall { contexts } else { 1 };
        let bytes = self.bytes_to_a_peer(ranks);
        Flow { ranks, node, path, topology, order, contexts, bytes, puts, one_by_one: alltoall }
    }

    /// Returns the time of a simulated flow in microseconds, with the parts that no message has.
    fn us(&self, flow: &Flow, simulated: &Simulated, parameters: &Parameters) -> f64 {
        let (base, checked) = match (self, flow.path) {
            (Self::Alltoall { bytes }, Path::Copies) => (&parameters.alltoall_copies_base_ns, *bytes),
            (Self::Alltoall { bytes }, _) => (&parameters.alltoall_base_ns, *bytes),
            (Self::Dispatch(_), _) => (&parameters.dispatch_base_ns, 0),
            (Self::Combine(_), _) => (&parameters.combine_base_ns, 0),
        };
        let checked = transfer(checked as f64 * (flow.ranks - 1) as f64, &parameters.alltoall_check_gb_s);
        base.value / 1e3 + (simulated.end + checked) as f64 / 1e6
    }
}

/// The model's figures for one way.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
struct Way {
    us: f64,
    /// Puts of each rank over the network.
    puts: usize,
    busiest: flow::Kind,
    /// The part of the time for which the busiest server was held.
    held: f64,
}

/// The bytes of a communicator on each rank.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
struct Needs {
    pinned: u64,
    device: u64,
}

impl From<Footprint> for Needs {
    fn from(footprint: Footprint) -> Self {
        Self { pinned: footprint.pinned, device: footprint.device }
    }
}

/// The figures for a number of ranks.
#[derive(Clone, PartialEq, Debug, Serialize)]
struct Row {
    ranks: u32,
    bytes_to_a_peer: f64,
    proxy: Way,
    gdaki: Way,
    /// GDAKI if all blocks post.
    gdaki_grid: Way,
    /// The same in rails.
    proxy_rails: Way,
    gdaki_rails: Way,
    gdaki_grid_rails: Way,
    proxy_memory: Needs,
    gdaki_memory: Needs,
    /// GDAKI with connections along rails only.
    gdaki_rails_memory: Needs,
}

/// Returns the figures of one way.
fn way(work: &Work, parameters: &Parameters, flow: &Flow) -> Way {
    let simulated = flow.simulate(parameters);
    let (busiest, held) = simulated.busiest;
    Way { us: work.us(flow, &simulated, parameters), puts: simulated.network_puts, busiest, held }
}

fn row(work: &Work, parameters: &Parameters, ranks: u32, arguments: &ModelArgs) -> Result<Row, Failure> {
    let (count, node) = (ranks as usize, arguments.node as usize);
    let ways = |path, topology| {
        way(work, parameters, &work.flow(count, node, path, (topology, arguments.order), arguments.contexts as usize))
    };
    let requirements = Requirements::default().contexts(arguments.contexts);
    let lsa_size = arguments.node.min(ranks);
    let rails = requirements.connections(ConnectionType::Rail);
    Ok(Row {
        ranks,
        bytes_to_a_peer: work.bytes_to_a_peer(count),
        proxy: ways(Path::Proxy, Topology::Full),
        gdaki: ways(Path::Gdaki, Topology::Full),
        gdaki_grid: ways(Path::GdakiGrid, Topology::Full),
        proxy_rails: ways(Path::Proxy, Topology::Rails),
        gdaki_rails: ways(Path::Gdaki, Topology::Rails),
        gdaki_grid_rails: ways(Path::GdakiGrid, Topology::Rails),
        proxy_memory: Footprint::proxy(&requirements, ranks, lsa_size)?.into(),
        gdaki_memory: Footprint::gdaki(&requirements, ranks, lsa_size)?.into(),
        gdaki_rails_memory: Footprint::gdaki(&rails, ranks, lsa_size)?.into(),
    })
}

/// Compares the model with recorded measurements.
fn compare(parameters: &Parameters) -> Vec<Compared> {
    let compare = |one: measured::Measured| {
        let node = if one.path == Path::Copies { 1 } else { one.ranks };
        let flow = one.work.flow(one.ranks, node, one.path, (Topology::Full, Order::Next), 1);
        let model_us = one.work.us(&flow, &flow.simulate(parameters), parameters);
        let way = if one.path == Path::Copies { ", network of copies" } else { "" };
        Compared {
            what: format!("{}{way}", one.work.name()),
            ranks: one.ranks,
            measured_us: one.us,
            model_us,
            error_percent: (model_us / one.us - 1.0) * 100.0,
            fitted: one.fitted,
            source: one.source,
        }
    };
    measured::all().into_iter().map(compare).collect()
}

/// Runs `gin model`.
///
/// # Errors
/// Refuses a bad file of parameters or figures; returns the error of the plot's file and of the writer.
pub(crate) fn run(arguments: &ModelArgs, out: &mut impl Write) -> Result<End, Failure> {
    if arguments.print_parameters {
        out.write_all(DEFAULTS.as_bytes())?;
        return Ok(End::Right);
    }
    let mut parameters = match &arguments.parameters {
        Some(path) => Parameters::read(path)?,
        None => Parameters::parse("the defaults", DEFAULTS)?,
    };
    if let Some(path) = &arguments.bench {
        let replaced = parameters.take_bench(path)?;
        eprintln!("gin: from {}: {}", path.display(), replaced.join(", "));
    }
    if arguments.measured {
        print::measured(&compare(&parameters), arguments.format, out)?;
        return Ok(End::Right);
    }
    let work = Work::of(arguments);
    let ranks: Vec<u32> = RANKS.into_iter().filter(|&ranks| ranks <= arguments.max_ranks).collect();
    if let Some(&ranks) = ranks.iter().find(|&&ranks| !ranks.is_multiple_of(arguments.node.min(ranks))) {
        let node = arguments.node;
        return Err(Refused(format!("--node {node}: {ranks} ranks are not whole nodes; use 1, 2, 4 or 8")).into());
    }
    let rows = ranks.iter().map(|&ranks| row(&work, &parameters, ranks, arguments));
    let rows = rows.collect::<Result<Vec<_>, _>>()?;
    print::rows(&work, &parameters, &rows, arguments, out)?;
    if let Some(path) = &arguments.plot {
        print::plot(path, &work, &rows)?;
    }
    Ok(End::Right)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_goes_once_to_each_rank_that_has_one_of_its_experts() {
        let one = Tokens { tokens: 1, experts: 4, ids: 2, row_bytes: 100 };
        // Of the 6 pairs of 4 experts, 1 has no expert of the other half, and 3 have no expert of one rank of 4.
        assert!((one.bytes_to_a_peer(2) - 100.0 * 5.0 / 6.0).abs() < 1e-9);
        assert!((one.bytes_to_a_peer(4) - 100.0 * 3.0 / 6.0).abs() < 1e-9);
        // More ranks than experts: as many experts as ranks.
        assert!((one.bytes_to_a_peer(100) - 100.0 * 2.0 / 100.0).abs() < 1e-9);
    }

    #[test]
    fn the_model_meets_the_rows_that_it_was_fitted_to_and_keeps_its_errors_on_others() {
        let parameters = Parameters::parse("defaults", DEFAULTS).unwrap();
        for one in compare(&parameters) {
            let bound = match one.fitted {
                true => 0.5,
                false if one.what.ends_with("copies") => 63.0,
                false => 17.0,
            };
            assert!(one.error_percent.abs() <= bound, "{one:?}");
        }
    }
}
