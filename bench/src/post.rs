// SPDX-License-Identifier: MIT OR Apache-2.0
//! The cost of issuing a put over the proxy, without waiting for its completion.

use super::crowd::{self, Crowd, Posts};
use super::driver::sms;
use super::figure::Figure;
use super::lab::{Lab, Shape};
use super::nowhere::{Gate, Nowhere};
use super::table::{Goal, Kind, Row, Table};
use super::{Bench, end};
use crate::Failure;
use gin_abi::Deadline;
use gin_bench_kernels::nccl::{DESCRIPTOR, Rings};
use gin_bench_kernels::post::BYTES;
use gin_gpu::GpuError;
use gin_gpu::{KernelArg, Memory, MemoryKind, Plain};
use gin_host::comm::{CommError, Communicator, Requirements, Routes, Window, WindowFlags};
use gin_host::world::Rank;
use std::sync::Arc;

/// Number of ranks. Rank 0 posts to all ranks in turn.
const RANKS: u32 = 8;

/// Returns the crowds. The goal for gin is a fraction of the time of NCCL's memory operations.
fn crowds(real: bool, all: u32) -> [(Crowd, Option<f64>); 6] {
    let goals = [Some(0.4), Some(0.4), Some(0.4), None, Some(0.1), Some(0.1)];
    let crowds = crowd::crowds(real, all, [4096, 2048, 2048, 512, 1024, 64]);
    std::array::from_fn(|index| (crowds[index], goals[index]))
}

/// The releases before each post: description, gin's kernel, the bare kernel, and whether NCCL fences.
const KINDS: [(&str, &str, &str, u64); 4] = [
    ("nothing to release", "bench_post_nothing", "bare_post_nothing", 0),
    ("16 bytes written, not released", "bench_post_unreleased", "bare_post_unreleased", 0),
    ("16 bytes written, released to the GPU", "bench_post_gpu", "bare_post_gpu", 1),
    ("16 bytes written, released to the system", "bench_post_system", "bare_post_system", 1),
];

/// The posting rank and its tools.
struct Poster<'a> {
    bench: &'a Bench,
    lab: Lab<'a>,
    comm: &'a Communicator,
    window: Window<u64>,
    gate: &'a Gate,
    depth: u64,
    /// A word for each thread.
    times: Arc<Memory>,
    /// The ring of the bare kernels, or NCCL's rings: slots, the indices of the next slots to claim, and data.
    slots: Arc<Memory>,
    claims: Arc<Memory>,
    data: Arc<Memory>,
    /// Consumer indices of NCCL's rings, in pinned and in GPU memory, always 0.
    consumers: [Arc<Memory>; 2],
}

fn pointer(memory: &Memory) -> *mut u64 {
    std::ptr::without_provenance_mut(memory.address() as usize)
}

impl Poster<'_> {
    /// Launches gin's puts, then lets the proxy empty the queue.
    fn puts(&self, crowd: &Crowd, kernel: &'static str, counts: bool, times: &mut Posts) -> Result<(), CommError> {
        let handle = self.comm.device()?;
        let arguments: [&dyn KernelArg; 4] = [&handle, &self.window, &crowd.posts, &crowd.peers];
        times.launch(&self.lab, (kernel, crowd), Some(self.comm), &arguments, &self.times, counts)?;
        self.gate.set(true);
        let deadline = Deadline::after_ns(self.bench.limit_ns());
        let flush = Shape { waits: true, ..Shape::one("bench_flush", 1) };
        self.lab.launch(flush, Some(self.comm), &[&handle, &deadline])?;
        self.gate.set(false);
        Ok(())
    }

    /// Launches the bare kernel.
    fn bare(&self, crowd: &Crowd, kernel: &'static str, counts: bool, times: &mut Posts) -> Result<(), CommError> {
        let (slots, claim, data) = (pointer(&self.slots), pointer(&self.claims), pointer(&self.data));
        let arguments: [&dyn KernelArg; 5] = [&slots, &claim, &(self.depth - 1), &data, &crowd.posts];
        times.launch(&self.lab, (kernel, crowd), None, &arguments, &self.times, counts)
    }

    /// Launches NCCL's memory operations and returns the number of wrong slots.
    fn nccl(
        &self,
        crowd: &Crowd,
        (fenced, consumers): (u64, &Memory),
        repeat: usize,
        times: &mut Posts,
    ) -> Result<u64, CommError> {
        self.claims.write(0, &[0u64; RANKS as usize])?;
        let slots = self.depth / u64::from(crowd.peers);
        let stamp = repeat as u64 + 1;
        let rings = Plain(Rings {
            slots: self.slots.address(),
            producers: self.claims.address(),
            consumers: consumers.address(),
            mask: slots - 1,
            stamp,
            fenced,
            limit_ns: self.bench.limit_ns(),
        });
        let data = pointer(&self.data);
        let arguments: [&dyn KernelArg; 4] = [&rings, &data, &crowd.posts, &crowd.peers];
        times.launch(&self.lab, ("nccl_post", crowd), None, &arguments, &self.times, repeat > 0)?;
        // Reading all slots takes longer than the launches.
        if repeat < self.bench.launches {
            return Ok(0);
        }
        let mut claimed = [0u64; RANKS as usize];
        self.claims.read(0, &mut claimed)?;
        let mut wrong = claimed.iter().sum::<u64>().abs_diff(crowd.all());
        for (peer, &claimed) in (0u64..).zip(&claimed[..crowd.peers as usize]) {
            let mut words = vec![[0u64; 2]; claimed.min(slots) as usize * DESCRIPTOR / 2];
            self.slots.read(peer * slots * 8 * DESCRIPTOR as u64, &mut words)?;
            let filled = |(index, pairs): &(u64, &[[u64; 2]])| {
                pairs.iter().any(|pair| *pair != [index << 1 | 1, stamp << 1 | 1])
            };
            wrong += (0u64..).zip(words.chunks(DESCRIPTOR / 2)).filter(filled).count() as u64;
        }
        Ok(wrong)
    }

    /// Measures a crowd, for one kind of release: gin, the floor, and NCCL's memory operations with consumer indices in
    /// host and in GPU memory. They take turns.
    fn measure(&self, crowd: &Crowd, kind: usize) -> Result<Vec<Figure>, CommError> {
        let (_, puts, bare, fenced) = KINDS[kind];
        let (before, others) = self.gate.accepted();
        let [mut gin, mut floor, mut far, mut near]: [Posts; 4] = Default::default();
        let mut wrong = [0; 2];
        // The first repeat warms up.
        for repeat in 0..=self.bench.launches {
            self.puts(crowd, puts, repeat > 0, &mut gin)?;
            self.bare(crowd, bare, repeat > 0, &mut floor)?;
            wrong[0] += self.nccl(crowd, (fenced, &self.consumers[0]), repeat, &mut far)?;
            wrong[1] += self.nccl(crowd, (fenced, &self.consumers[1]), repeat, &mut near)?;
        }
        let (after, others_after) = self.gate.accepted();
        let launched = crowd.all() * (self.bench.launches as u64 + 1);
        let lost = (after - before).abs_diff(launched) + (others_after - others);
        Ok(vec![
            gin.figure(Some(lost + wrong.iter().sum::<u64>())),
            floor.figure(None),
            far.figure(Some(wrong[0])),
            near.figure(Some(wrong[1])),
        ])
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
    // The figures by crowd and kind.
    let measure = |rank: &Rank| -> Result<Vec<Vec<Vec<Figure>>>, CommError> {
        let crowds = crowds(bench.is_real(), sms(&**rank.device()).unwrap_or(4));
        let requirements = Requirements::default().signals(1).counters(0).windows(1);
        // The proxy accepts this number of requests per peer while the gate is closed: few, yet enough to drain the
        // queue quickly.
        let requirements = requirements.queue_depth(depth).max_outstanding_per_peer(64);
        let comm = rank.communicator(&requirements)?;
        let threads = crowds.iter().map(|(crowd, _)| crowd.members()).max().unwrap_or(1);
        let words = threads as usize * BYTES / 8;
        let window = comm.alloc_window::<u64>(words, WindowFlags::NONE)?;
        let mut figures = Vec::new();
        if rank.rank() == 0 {
            let lab = Lab::new(rank)?;
            let (device, pinned, ranks) = (MemoryKind::Device, MemoryKind::Pinned, u64::from(RANKS));
            let depth = u64::from(depth);
            let poster = Poster {
                times: lab.memory(device, u64::from(threads))?,
                slots: lab.memory(pinned, depth * DESCRIPTOR as u64)?,
                claims: lab.memory(device, ranks)?,
                data: lab.memory(device, words as u64)?,
                consumers: [lab.memory(pinned, ranks)?, lab.memory(device, ranks)?],
                bench,
                lab,
                comm: &comm,
                window,
                gate: &gate,
                depth,
            };
            for (crowd, _) in &crowds {
                if crowd.all() > depth {
                    let reason = format!("{} posts exceed the {depth} slots of the queue", crowd.all());
                    return Err(GpuError::Kernel { kernel: KINDS[0].1.to_owned(), reason }.into());
                }
                let kinds = (0..KINDS.len()).map(|kind| poster.measure(crowd, kind));
                figures.push(kinds.collect::<Result<Vec<_>, CommError>>()?);
            }
        }
        gate.set(true);
        end(rank, &comm)?;
        Ok(figures)
    };
    let measure = |rank: &Rank| measure(rank).map(|figures| (figures, sms(&**rank.device())));
    let ranks = bench.on_ranks(config, measure)?;
    let Some((figures, sms)) = ranks.into_iter().next() else { return Err("no rank returned figures".into()) };
    let crowds = crowds(bench.is_real(), sms.unwrap_or(4));
    let mut tables = Vec::new();
    for (kind, (what, ..)) in KINDS.iter().enumerate() {
        let row = |(index, (crowd, goal)): (usize, &(Crowd, Option<f64>))| {
            let [put, bare, far, near] = figures[index][kind][..] else { return None };
            let goal = goal.filter(|_| bench.is_real()).map(Goal::AtMost);
            // One thread, one warp, and the whole GPU.
            let main = (kind == 0 || kind == 3) && [0, 1, 5].contains(&index);
            let row = Row::new(format!("put, {}", crowd.text()), put, "ns")
                .main(main)
                .beside(Kind::Floor, "bare", bare, bench.is_real().then_some(Goal::AtMost(1.3)), None)
                .beside(Kind::Nccl, "NCCL's operations, index in host memory", far, goal, None)
                .beside(Kind::Other, "NCCL's operations, index in GPU memory", near, None, None);
            Some(row)
        };
        let rows = crowds.iter().enumerate().filter_map(row).collect();
        let mut table = bench.table(format!("Issue of a proxy put, {what}"), RANKS, rows);
        table.notes.push("The proxy accepts no post before the launch has ended".to_owned());
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
        for (real, depth) in [(true, 1 << 20), (false, 256)] {
            for (crowd, _) in crowds(real, 132) {
                // Neighbouring threads begin with different peers, and NCCL has a ring for each.
                let mut rings = vec![0; crowd.peers as usize];
                for post in (0..u64::from(crowd.members())).flat_map(|thread| thread..thread + crowd.posts) {
                    rings[(post % u64::from(crowd.peers)) as usize] += 1;
                }
                let room = depth / u64::from(crowd.peers);
                assert!(crowd.all() <= depth && rings.iter().all(|&posts| posts <= room), "{crowd:?}: {rings:?}");
            }
        }
    }
}
