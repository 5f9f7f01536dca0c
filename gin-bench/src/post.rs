// SPDX-License-Identifier: MIT OR Apache-2.0
//! The cost of issuing a put over the proxy, without waiting for its completion.

use super::crowd::{self, Crowd};
use super::driver::processors;
use super::lab::{Figure, Lab, Shape, median};
use super::nowhere::{Gate, Nowhere};
use super::table::{Goal, Row, Table};
use super::{Bench, end};
use crate::Failure;
use gin_abi::Deadline;
use gin_bench_kernels::post::BYTES;
use gin_gpu::GpuError;
use gin_gpu::{Memory, MemoryKind};
use gin_host::comm::{CommError, Communicator, Requirements, Routes, Window, WindowFlags};
use gin_host::world::Rank;
use std::sync::Arc;

/// Number of ranks. Rank 0 posts to all ranks in turn.
const RANKS: u32 = 8;

/// NCCL's time of issuing a put, in nanoseconds. The source is `docs/benchmarks.md`.
#[derive(Clone, Copy, Debug)]
struct Nccl {
    /// NCCL 2.28.9 with the consumer index in host memory.
    old: f64,
    /// NCCL 2.32.3 with the consumer index in host memory.
    new: f64,
    /// NCCL 2.32.3 with the consumer index in GPU memory.
    new_near: f64,
    /// The goal for gin, as a fraction of `new`.
    goal: Option<f64>,
}

/// Returns the crowds, and NCCL's figures for them.
fn crowds(real: bool, all: u32) -> [(Crowd, Nccl); 6] {
    let nccl = |old, new, new_near, goal| Nccl { old, new, new_near, goal };
    let figures = [
        nccl(2224.0, 2112.0, 1079.0, Some(0.4)),
        nccl(71.6, 73.2, 42.0, Some(0.4)),
        nccl(72.9, 74.6, 42.4, Some(0.4)),
        nccl(35.9, 36.1, 11.8, None),
        nccl(1091.0, 1041.0, 14.1, Some(0.1)),
        nccl(34.2, 33.0, 10.1, Some(0.1)),
    ];
    let crowds = crowd::crowds(real, all, [4096, 2048, 2048, 512, 1024, 64]);
    std::array::from_fn(|index| (crowds[index], figures[index]))
}

/// The releases before each post: description, gin's kernel and the bare kernel.
const KINDS: [(&str, &str, &str); 4] = [
    ("nothing to release", "bench_post_nothing", "bare_post_nothing"),
    ("16 bytes written, not released", "bench_post_unreleased", "bare_post_unreleased"),
    ("16 bytes written, released to the GPU", "bench_post_gpu", "bare_post_gpu"),
    ("16 bytes written, released to the system", "bench_post_system", "bare_post_system"),
];

/// The posting rank and its tools.
struct Poster<'a> {
    bench: &'a Bench,
    lab: Lab<'a>,
    comm: &'a Communicator,
    window: Window<u64>,
    gate: &'a Gate,
    depth: u64,
    /// The ring of the bare kernels: slots, the index of the next slot to claim, and data.
    slots: Arc<Memory>,
    claim: Arc<Memory>,
    data: Arc<Memory>,
}

impl Poster<'_> {
    /// Returns gin's time of issuing a put, in nanoseconds, and the number of requests that did not arrive correctly.
    fn puts(&self, crowd: &Crowd, kernel: &'static str) -> Result<Figure, CommError> {
        let handle = self.comm.device()?;
        let shape = Shape { kernel, blocks: crowd.blocks, threads: crowd.threads, waits: false };
        let (before, others) = self.gate.accepted();
        let mut times = Vec::new();
        for _ in 0..=self.bench.launches {
            let figure =
                self.lab.timed(shape, Some(self.comm), &[&handle, &self.window, &crowd.posts, &crowd.peers])?;
            times.push(figure.ns / crowd.all() as f64);
            // The proxy empties the queue only now.
            self.gate.set(true);
            let deadline = Deadline::after_ns(self.bench.limit_ns());
            let flush = Shape { waits: true, ..Shape::one("bench_flush", 1) };
            self.lab.launch(flush, Some(self.comm), &[&handle, &deadline])?;
            self.gate.set(false);
        }
        // The first launch warms up.
        let ns = median(times.split_off(1));
        let (after, others_after) = self.gate.accepted();
        let launched = crowd.all() * (self.bench.launches as u64 + 1);
        let wrong = (after - before).abs_diff(launched) + (others_after - others);
        Ok(Figure { ns, wrong })
    }

    /// Returns the bare kernel's time of a post, in nanoseconds.
    fn bare(&self, crowd: &Crowd, kernel: &'static str) -> Result<f64, CommError> {
        let pointer = |memory: &Memory| std::ptr::without_provenance_mut::<u64>(memory.address() as usize);
        let (slots, claim, data) = (pointer(&self.slots), pointer(&self.claim), pointer(&self.data));
        let shape = Shape { kernel, blocks: crowd.blocks, threads: crowd.threads, waits: false };
        let mut times = Vec::new();
        for _ in 0..=self.bench.launches {
            let figure = self.lab.timed(shape, None, &[&slots, &claim, &(self.depth - 1), &data, &crowd.posts])?;
            times.push(figure.ns / crowd.all() as f64);
        }
        Ok(median(times.split_off(1)))
    }
}

/// Measures posts of all crowds, for each kind of release.
pub(super) fn posts(bench: &Bench) -> Result<Vec<Table>, Failure> {
    let gate = Arc::new(Gate::default());
    let depth = bench.pick(1 << 20, 256);
    let mut config = bench.world(RANKS)?;
    config.comm.routes = Routes::Network;
    let shared = gate.clone();
    let config = config.network(move |endpoint| Box::new(Nowhere::new(endpoint, &shared)));
    let measure = |rank: &Rank| -> Result<Vec<Vec<(Figure, f64)>>, CommError> {
        let crowds = crowds(bench.is_real(), processors(&**rank.device()).unwrap_or(4));
        let requirements = Requirements::default().signals(1).counters(0).windows(1);
        // The proxy accepts this number of requests per peer while the gate is closed: few, yet enough to drain the
        // queue quickly.
        let requirements = requirements.queue_depth(depth).max_outstanding_per_peer(64);
        let comm = rank.communicator(&requirements)?;
        let words = crowds.iter().map(|(crowd, _)| crowd.members()).max().unwrap_or(1) as usize * BYTES / 8;
        let window = comm.alloc_window::<u64>(words, WindowFlags::NONE)?;
        let mut figures = Vec::new();
        if rank.rank() == 0 {
            let lab = Lab::new(rank)?;
            let slots = lab.memory(MemoryKind::Pinned, u64::from(depth) * BYTES as u64 / 8)?;
            let (claim, data) = (lab.memory(MemoryKind::Device, 1)?, lab.memory(MemoryKind::Device, words as u64)?);
            let depth = u64::from(depth);
            let poster = Poster { bench, lab, comm: &comm, window, gate: &gate, depth, slots, claim, data };
            for (crowd, _) in &crowds {
                if crowd.all() > depth {
                    let reason = format!("{} posts exceed the {depth} slots of the queue", crowd.all());
                    return Err(GpuError::Kernel { kernel: KINDS[0].1.to_owned(), reason }.into());
                }
                let kinds =
                    KINDS.iter().map(|(_, puts, bare)| Ok((poster.puts(crowd, puts)?, poster.bare(crowd, bare)?)));
                figures.push(kinds.collect::<Result<Vec<_>, CommError>>()?);
            }
        }
        gate.set(true);
        end(rank, &comm)?;
        Ok(figures)
    };
    let measure = |rank: &Rank| measure(rank).map(|figures| (figures, processors(&**rank.device())));
    let ranks = bench.on_ranks(config, measure)?;
    let Some((figures, processors)) = ranks.into_iter().next() else { return Err("no rank returned figures".into()) };
    let crowds = crowds(bench.is_real(), processors.unwrap_or(4));
    let mut tables = Vec::new();
    for (kind, (what, _, _)) in KINDS.iter().enumerate() {
        let row = |((crowd, nccl), figures): (&(Crowd, Nccl), &Vec<(Figure, f64)>)| {
            let (put, bare) = figures[kind];
            let row = Row::new(format!("put, {}", crowd.text()), put.ns, "ns", Some(put.wrong));
            let row = row.beside("bare", bare, bench.is_real().then_some(Goal::AtMost(1.3)), None);
            if !bench.is_real() {
                return row;
            }
            let Nccl { old, new, new_near, goal } = *nccl;
            row.beside("NCCL 2.32.3, index in host memory", new, goal.map(Goal::AtMost), None)
                .beside("NCCL 2.28.9, index in host memory", old, None, None)
                .beside("NCCL 2.32.3, index in GPU memory", new_near, None, None)
        };
        let rows = crowds.iter().zip(&figures).map(row).collect();
        let mut table = bench.table("Issue of a proxy put of 64 bytes with signal", RANKS, rows);
        table
            .notes
            .insert(0, format!("Before each post: {what}. The proxy accepts no post before the launch has ended"));
        // Sharing does not matter: only rank 0 runs kernels.
        table.notes.retain(|note| !note.starts_with("Ranks share"));
        tables.push(table);
    }
    Ok(tables)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_of_every_crowd_fits_into_the_queue() {
        for (crowd, _) in crowds(true, 132) {
            assert!(crowd.all() <= 1 << 20, "{crowd:?}");
        }
        for (crowd, _) in crowds(false, 4) {
            assert!(crowd.all() <= 256, "{crowd:?}");
        }
    }
}
