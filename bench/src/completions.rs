// SPDX-License-Identifier: MIT OR Apache-2.0
//! Waits after a put over the proxy: a flush, a quiet, a signal of all contexts.

use super::figure::Figure;
use super::lab::{Lab, Play, Shape};
use super::proxy::{RANKS, both};
use super::table::{Kind, Row, Table};
use super::{Bench, end};
use crate::Failure;
use gin_gpu::KernelArg;
use gin_host::comm::{CommError, Requirements, Routes, WindowFlags};
use gin_host::world::Rank;
use std::cell::Cell;

/// Number of contexts. A signal of all contexts waits for all but one of them.
const CONTEXTS: u32 = 4;

/// The kernels, of which the first is what the others are compared with, and what each does.
const KERNELS: [(&str, &str); 3] = [
    ("bench_proxy_flush", "put_value and flush"),
    ("bench_proxy_quiet", "put_value and quiet"),
    ("bench_proxy_all_contexts", "put_value and signal_all_contexts, 4 contexts"),
];

/// Measures rounds of a put of 8 bytes to GPU memory and its completion at the sender. Both ranks put at the same time.
pub(super) fn completions(bench: &Bench) -> Result<Vec<Table>, Failure> {
    let rounds = bench.long_rounds();
    let measure = |rank: &Rank| -> Result<Vec<Figure>, CommError> {
        let lab = Lab::new(rank)?;
        let comm = rank.communicator(&Requirements::default().contexts(CONTEXTS).signals(1).counters(0))?;
        let window = comm.alloc_window::<u64>(1, WindowFlags::NONE)?;
        let (handle, before) = (comm.device()?, Cell::new(0));
        let arguments: [&dyn KernelArg; 2] = [&handle, &window];
        // All ranks have loaded their kernels before any kernel waits.
        rank.barrier()?;
        let plays = KERNELS.map(|(kernel, _)| Play {
            shape: Shape::one(kernel, 1),
            comm: Some(&comm),
            arguments: &arguments,
            before: &before,
            module: None,
        });
        let figures = lab.play(&plays, &rounds, true)?;
        drop(window);
        end(rank, &comm)?;
        Ok(figures)
    };
    let mut config = bench.world(RANKS)?;
    config.comm.routes = Routes::Network;
    let ranks = bench.on_ranks(config, measure)?;
    let [first, second] = &ranks[..] else { return Err("a rank returned no figures".into()) };
    let of = |kernel: usize| both(&first[kernel..=kernel], &second[kernel..=kernel]);
    let row = |(kernel, (_, what)): (usize, &(&str, &str))| {
        let row = Row::new(*what, of(kernel), "us").main(true);
        if kernel == 0 { row } else { row.beside(Kind::Other, KERNELS[0].1, of(0), None, None) }
    };
    let rows = KERNELS.iter().enumerate().map(row).collect();
    Ok(vec![bench.table("Completion of a put over the proxy", RANKS, rows)])
}
