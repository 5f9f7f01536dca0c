// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernels in C++ beside the same kernels in Rust: round trips, and the cost of issuing an operation.

use super::figure::Figure;
use super::lab::{Lab, Play, Shape};
use super::table::{Goal, Kind, Row, Table};
use super::{Bench, end};
use crate::{Failure, Unsuited};
use gin_bench_kernels::PING_WORDS;
use gin_gpu::{KernelArg, Module, ModuleSource};
use gin_host::comm::{CommError, Requirements, Routes, WindowFlags};
use gin_host::world::Rank;
use std::cell::Cell;

const RANKS: u32 = 2;

/// The largest ratio of C++ to Rust for operations that inline.
const GOAL: f64 = 1.1;

/// A kernel in both languages, its threads, its text, and whether its operations inline in C++.
type Twin = (&'static str, u32, &'static str, bool);

/// Round trips, issues and calls by loads and stores.
const STORES: [Twin; 13] = [
    ("bench_lsa_ping_thread", 32, "put of 64B with signal and back, a thread", true),
    ("bench_lsa_ping_warp", 32, "put of 64B with signal and back, a warp", true),
    ("bench_issue_put_thread", 1, "issue of a put of 64B with signal, a thread", true),
    ("bench_issue_put_warp", 32, "issue of a put of 64B with signal, a warp", true),
    ("bench_issue_value", 1, "issue of a value of 8B with signal, a thread", true),
    ("bench_issue_signal", 1, "issue of a signal, a thread", true),
    ("bench_read_signal", 1, "read of a signal, a thread", true),
    ("bench_read_counter", 1, "read of a counter, a thread", true),
    ("bench_call_get", 1, "get of 64B, a thread", false),
    ("bench_call_flush", 1, "flush with nothing under way, a thread", false),
    ("bench_call_follow", 1, "own signal, and wait that moves its shadow, a thread", false),
    ("bench_call_reset", 1, "reset of a counter, a thread", false),
    ("bench_call_barrier", 1, "barrier of two ranks, a thread", false),
];

/// The same over the proxy. All are calls.
const PROXY: [Twin; 2] = [
    ("bench_proxy_ping", 1, "value of 8B with signal and back over the proxy, a thread", false),
    ("bench_issue_proxy", 1, "issue of a put of 64B with signal over the proxy, a thread", false),
];

/// Loads the kernels in C++.
type Load<'a> = &'a (dyn Fn(&Rank) -> Result<Box<dyn Module>, CommError> + Sync);

/// Measures twins; in each repeat the languages take turns. Returns rows of nanoseconds.
fn measure(bench: &Bench, load: Load<'_>, routes: Routes, twins: &[Twin]) -> Result<Vec<Row>, Failure> {
    let rounds = bench.rounds();
    let depth = bench.pick(8192, 64);
    let play = |rank: &Rank| -> Result<Vec<Figure>, CommError> {
        let lab = Lab::new(rank)?;
        let module = load(rank)?;
        // Room for all posts of a launch, so that no post waits for the proxy.
        let requirements = Requirements::default().signals(2).counters(1).world_barriers(1).queue_depth(depth);
        let comm = rank.communicator(&requirements)?;
        let window = comm.alloc_window::<u64>(PING_WORDS, WindowFlags::NONE)?;
        let handle = comm.device()?;
        let arguments: [&dyn KernelArg; 2] = [&handle, &window];
        // All posts raise the same signal; a kernel that reads or calls does not.
        let (raised, other) = (Cell::new(0), Cell::new(0));
        let plays: Vec<Play<'_>> = twins
            .iter()
            .flat_map(|&(kernel, threads, ..)| [Some(&*module), None].map(|module| (kernel, threads, module)))
            .map(|(kernel, threads, module)| Play {
                shape: Shape::one(kernel, threads),
                comm: Some(&comm),
                arguments: &arguments,
                before: if ["bench_read", "bench_call"].iter().any(|name| kernel.starts_with(name)) {
                    &other
                } else {
                    &raised
                },
                module,
            })
            .collect();
        let figures = lab.play(&plays, &rounds, true)?;
        end(rank, &comm)?;
        Ok(figures)
    };
    let mut config = bench.world(RANKS)?;
    config.comm.routes = routes;
    let figures = super::lsa::together(bench.on_ranks(config, play)?);
    let row = |(twin, figures): (&Twin, &[Figure])| {
        let &(_, _, what, inlines) = twin;
        let goal = (bench.is_real() && inlines).then_some(Goal::AtMost(GOAL));
        let row = Row::new(format!("C++: {what}"), figures[0], "ns").main(true);
        row.beside(Kind::Other, "the same in Rust", figures[1], goal, None)
    };
    Ok(twins.iter().zip(figures.chunks(2)).map(row).collect())
}

fn tables(bench: &Bench, load: Load<'_>) -> Result<Vec<Table>, Failure> {
    let mut rows = measure(bench, load, Routes::Automatic, &STORES)?;
    rows.extend(measure(bench, load, Routes::Network, &PROXY)?);
    let mut table = bench.table("C++ beside Rust", RANKS, rows);
    table.notes.push(
        "By loads and stores, put, value, signal, reads and the first 32 polls of a wait inline in C++; get, flush, the \
         wait that moves a shadow, reset and barrier are calls, as are all operations over the proxy"
            .to_owned(),
    );
    Ok(vec![table])
}

/// Measures the kernels in C++ of the module file beside those in Rust.
pub(super) fn twins(bench: &Bench) -> Result<Vec<Table>, Failure> {
    let Some(module) = &bench.module else {
        let reason = "capi: there is no module with the kernels in C++: name one by --module";
        return Err(Unsuited(reason.to_owned()).into());
    };
    if !bench.is_real() {
        let reason = "capi: the kernels in C++ are for NVIDIA GPUs; there are only virtual ones";
        return Err(Unsuited(reason.to_owned()).into());
    }
    tables(bench, &|rank| Ok(rank.device().load(ModuleSource::Cubin(module))?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use gin_testkit::Sabotage;
    use std::time::Duration;

    #[test]
    fn twins_run_with_the_arguments_of_the_kernels_and_lost_values_are_found() {
        for (sabotage, right) in [(Sabotage::None, true), (Sabotage::LosePut, false)] {
            let limit = Duration::from_secs(60);
            let bench = Bench { gpus: None, job: None, launches: 1, limit, max_bytes: 1 << 16, module: None, sabotage };
            // A virtual GPU has no C++ kernels here: those in Rust stand for them.
            let tables = tables(&bench, &|rank| Ok(rank.device().load(ModuleSource::Linked)?)).unwrap();
            assert_eq!(tables[0].rows.len(), STORES.len() + PROXY.len());
            assert_eq!(tables[0].rows.iter().all(Row::is_right), right, "{sabotage:?}");
        }
    }

    #[test]
    fn without_a_module_or_a_gpu_it_says_so() {
        for (module, reason) in [(None, "--module"), (Some(Vec::new()), "virtual")] {
            let (limit, sabotage) = (Duration::from_secs(1), Sabotage::None);
            let bench = Bench { gpus: None, job: None, launches: 1, limit, max_bytes: 64, module, sabotage };
            assert!(twins(&bench).unwrap_err().to_string().contains(reason));
        }
    }
}
