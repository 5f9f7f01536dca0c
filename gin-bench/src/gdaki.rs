// SPDX-License-Identifier: MIT OR Apache-2.0
//! The cost of issuing a put with device-driven queue pairs.
//!
//! The measurement uses no NIC. The rings are in GPU memory, as with a NIC, and are long enough for a launch; the
//! doorbell is in pinned host memory. Nothing reads them before the launch has ended. Then the host checks every entry,
//! doorbell record and doorbell.

use super::crowd::{self, Crowd};
use super::driver::processors;
use super::lab::{Figure, Lab, Shape, median};
use super::table::{Goal, Row, Table};
use super::{Bench, end};
use crate::Failure;
use bytemuck::Zeroable;
use gin_abi::gdaki::{DOORBELL_GPU, DOORBELL_SYSTEM, MOST_DEPTH_LOG2, QueuePairData, busy_marks};
use gin_abi::mlx5::be::Be32;
use gin_abi::mlx5::doorbell::Doorbell;
use gin_abi::mlx5::wqe::{Entry, QueueNumber, SLOT_BYTES, Slot};
use gin_abi::{BackendKind, CommHandle};
use gin_bench_kernels::post::BYTES;
use gin_gpu::GpuError;
use gin_gpu::{Memory, MemoryKind};
use gin_host::comm::{CommError, Communicator, Requirements, Routes, Window, WindowFlags};
use gin_host::world::Rank;
use std::mem::offset_of;
use std::sync::Arc;

/// Number of ranks. Rank 0 posts to all ranks in turn.
const RANKS: u32 = 8;

/// NCCL's figures for a crowd: the time of issuing a put in nanoseconds, with 2.28.9 and with 2.32.3, and the goal for
/// gin as a fraction of the second. The source is `docs/benchmarks.md`.
type Nccl = (f64, f64, Option<f64>);

/// Returns the crowds, and NCCL's figures for them.
fn crowds(real: bool, all: u32) -> [(Crowd, Nccl); 6] {
    let figures = [
        (2731.0, 3179.0, Some(0.5)),
        (2762.0, 3166.0, Some(0.05)),
        (424.0, 450.0, None),
        (175.0, 176.0, None),
        (140.0, 138.0, Some(0.2)),
        (253.0, 205.0, Some(0.2)),
    ];
    let crowds = crowd::crowds(real, all, [4096, 256, 512, 256, 512, 16]);
    std::array::from_fn(|index| (crowds[index], figures[index]))
}

/// Queue pairs without a NIC, and the memory that they use.
struct Pairs {
    table: Arc<Memory>,
    ring: Arc<Memory>,
    words: Arc<Memory>,
    completions: Arc<Memory>,
    records: Arc<Memory>,
    doorbells: Arc<Memory>,
    keys: Arc<Memory>,
    depth_log2: u32,
}

/// The scopes of the release before a doorbell: the title of each table, and the value in the queue pairs.
const RELEASES: [(&str, u16); 2] = [
    ("Issue of a GDAKI put of 64 bytes with signal, released to the system", DOORBELL_SYSTEM),
    ("Issue of a GDAKI put of 64 bytes with signal, released to the GPU", DOORBELL_GPU),
];

impl Pairs {
    fn new(lab: &Lab<'_>, depth_log2: u32, windows: u32) -> Result<Self, CommError> {
        let ranks = u64::from(RANKS);
        let slots = ranks << depth_log2;
        let (device, pinned) = (MemoryKind::Device, MemoryKind::Pinned);
        Ok(Self {
            table: lab.memory(device, ranks * size_of::<QueuePairData>() as u64 / 8 + 1)?,
            ring: lab.memory(device, slots * SLOT_BYTES / 8)?,
            words: lab.memory(device, 2 * slots)?,
            completions: lab.memory(device, slots * SLOT_BYTES / 8)?,
            records: lab.memory(device, ranks * 8)?,
            doorbells: lab.memory(pinned, ranks * 8)?,
            keys: lab.memory(device, u64::from(windows) * (ranks + 1))?,
            depth_log2,
        })
    }

    fn number(rank: u64) -> QueueNumber {
        QueueNumber::new(0x100 + rank as u32)
    }

    /// Resets the queue pairs to their initial state.
    fn reset(&self, doorbell_scope: u16) -> Result<(), GpuError> {
        let depth = 1u64 << self.depth_log2;
        let pair = |rank: u64| QueuePairData {
            ring: self.ring.address() + rank * depth * SLOT_BYTES,
            tokens: self.words.address() + rank * depth * 16,
            tags: self.words.address() + rank * depth * 16 + depth * 8,
            completions: self.completions.address() + rank * depth * SLOT_BYTES,
            record: self.records.address() + rank * 64,
            doorbell: self.doorbells.address() + rank * 64,
            number: Self::number(rank).memory(),
            depth_log2: self.depth_log2,
            interval_log2: 4.min(self.depth_log2 - 1) as u16,
            doorbell_scope,
            most_bytes: 1 << 30,
            signal_key: Be32::new(0x1000 + rank as u32).memory(),
            sink_key: Be32::new(0x2000).memory(),
            signals: 0,
            // The word after the table.
            busy: self.table.address() + u64::from(RANKS) * size_of::<QueuePairData>() as u64,
            marks: busy_marks(rank as u32),
            ..QueuePairData::zeroed()
        };
        let pairs: Vec<QueuePairData> = (0..u64::from(RANKS)).map(pair).collect();
        self.table.write(0, &pairs)?;
        let mut words = vec![0u64; 2 * depth as usize];
        words[0] = 1;
        for rank in 0..u64::from(RANKS) {
            self.words.write(rank * depth * 16, &words)?;
            self.doorbells.write(rank * 64, &[0u64])?;
        }
        Ok(())
    }

    /// Returns the number of wrong entries, records and doorbells after a launch of `posts` puts with signals.
    fn wrong(&self, posts: u64) -> Result<u64, GpuError> {
        let depth = 1u64 << self.depth_log2;
        let (mut wrong, mut entries) = (0, 0);
        for rank in 0..u64::from(RANKS) {
            let word = |name: usize| -> Result<u64, GpuError> {
                let mut word = [0u64];
                self.table.read(rank * size_of::<QueuePairData>() as u64 + name as u64, &mut word)?;
                Ok(word[0])
            };
            let (producer_index, rung) =
                (word(offset_of!(QueuePairData, producer_index))?, word(offset_of!(QueuePairData, rung))?);
            entries += producer_index;
            let mut doorbell = [0u64];
            self.doorbells.read(rank * 64, &mut doorbell)?;
            let rings = if producer_index == 0 { 0 } else { Doorbell::word(producer_index, Self::number(rank)) };
            wrong += u64::from(rung != producer_index) + u64::from(doorbell[0] != rings);
            let mut slots = vec![Slot::default(); producer_index as usize];
            self.ring.read(rank * depth * SLOT_BYTES, &mut slots)?;
            let number = Self::number(rank).get();
            wrong +=
                (0..).zip(&slots).filter(|(index, slot)| Entry::read(slot, *index, number).is_err()).count() as u64;
        }
        Ok(wrong + entries.abs_diff(2 * posts))
    }

    /// Returns the handle of a communicator whose kernels use these queue pairs.
    fn handle(&self, comm: &Communicator) -> Result<CommHandle, CommError> {
        Ok(CommHandle {
            backend: BackendKind::Gdaki as u32,
            proxy_contexts: 0,
            gdaki_contexts: 1,
            queue_pairs: self.table.address(),
            window_keys: self.keys.address(),
            ..comm.device()?.handle()
        })
    }
}

/// Measures posts of all crowds, for each scope of the release.
pub(super) fn posts(bench: &Bench) -> Result<Vec<Table>, Failure> {
    let depth_log2 = bench.pick(MOST_DEPTH_LOG2, 8);
    let mut config = bench.world(RANKS)?;
    config.comm.routes = Routes::Network;
    let measure = |rank: &Rank| -> Result<Vec<Figure>, CommError> {
        let crowds = crowds(bench.is_real(), processors(&**rank.device()).unwrap_or(4));
        let requirements = Requirements::default().signals(1).counters(0).windows(1);
        let comm = rank.communicator(&requirements)?;
        let words = crowds.iter().map(|(crowd, _)| crowd.members()).max().unwrap_or(1) as usize * BYTES / 8;
        let window = comm.alloc_window::<u64>(words, WindowFlags::NONE)?;
        let mut figures = Vec::new();
        if rank.rank() == 0 {
            let lab = Lab::new(rank)?;
            let pairs = Pairs::new(&lab, depth_log2, requirements.windows)?;
            for (_, release) in RELEASES {
                for (crowd, _) in &crowds {
                    figures.push(puts(bench, &lab, &comm, &pairs, &window, (crowd, release))?);
                }
            }
        }
        end(rank, &comm)?;
        Ok(figures)
    };
    let measure = |rank: &Rank| measure(rank).map(|figures| (figures, processors(&**rank.device())));
    let ranks = bench.on_ranks(config, measure)?;
    let Some((figures, processors)) = ranks.into_iter().next() else { return Err("no rank returned figures".into()) };
    let row = |((crowd, nccl), figure): ((Crowd, Nccl), Figure)| {
        let row = Row::new(format!("put, {}", crowd.text()), figure.ns, "ns", Some(figure.wrong));
        if !bench.is_real() {
            return row;
        }
        let (old, new, goal) = nccl;
        let row = row.beside("NCCL 2.32.3, GDAKI", new, goal.map(Goal::AtMost), None);
        row.beside("NCCL 2.28.9, GDAKI", old, None, None)
    };
    let crowds = crowds(bench.is_real(), processors.unwrap_or(4));
    let table = |((title, _), figures): ((&'static str, u16), &[Figure])| {
        let rows = crowds.iter().copied().zip(figures.iter().copied()).map(row).collect();
        let mut table = bench.table(title, RANKS, rows);
        table.notes.insert(0, "Uses no NIC; the host checks each entry and doorbell afterwards".to_owned());
        // Sharing does not matter: only rank 0 runs kernels.
        table.notes.retain(|note| !note.starts_with("Ranks share"));
        table
    };
    Ok(RELEASES.into_iter().zip(figures.chunks(crowds.len())).map(table).collect())
}

/// Returns the time of issuing a put, in nanoseconds, and the number of wrong entries, records and doorbells.
fn puts(
    bench: &Bench,
    lab: &Lab<'_>,
    comm: &Communicator,
    pairs: &Pairs,
    window: &Window<u64>,
    (crowd, release): (&Crowd, u16),
) -> Result<Figure, CommError> {
    let handle = pairs.handle(comm)?;
    let shape = Shape { kernel: "bench_gdaki", blocks: crowd.blocks, threads: crowd.threads, waits: false };
    let (mut times, mut wrong) = (Vec::new(), 0);
    for _ in 0..=bench.launches {
        pairs.reset(release)?;
        let figure = lab.timed(shape, Some(comm), &[&handle, window, &crowd.posts, &crowd.peers])?;
        times.push(figure.ns / crowd.all() as f64);
        wrong += pairs.wrong(crowd.all())?;
    }
    // The first launch warms up.
    Ok(Figure { ns: median(times.split_off(1)), wrong })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_of_every_crowd_fits_into_the_rings() {
        for (real, all, depth) in [(true, 132, 1 << MOST_DEPTH_LOG2), (false, 4, 1 << 8)] {
            for (crowd, _) in crowds(real, all) {
                // Neighbouring threads begin with different peers, so each peer gets about the same number of posts.
                let most = (crowd.all() / u64::from(crowd.peers) + u64::from(crowd.members())) * 2;
                assert!(most <= depth, "{crowd:?}");
            }
        }
    }
}
