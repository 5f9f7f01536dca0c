// SPDX-License-Identifier: MIT OR Apache-2.0
//! The cost of issuing a put with device-driven queue pairs.
//!
//! The measurement uses no NIC. The rings are in GPU memory, as with a NIC, and are long enough for a launch; the
//! doorbell is in pinned host memory. Nothing reads them before the launch has ended. Then the host checks every entry,
//! doorbell record and doorbell.

use super::crowd::{self, Crowd, Posts};
use super::driver::sms;
use super::figure::Figure;
use super::lab::Lab;
use super::table::{Goal, Kind, Row, Table};
use super::{Bench, end};
use crate::Failure;
use bytemuck::Zeroable;
use gin_abi::gdaki::{DOORBELL_GPU, DOORBELL_SYSTEM, MAX_DEPTH_LOG2, QueuePairData, busy_marks, claimed};
use gin_abi::mlx5::be::Be32;
use gin_abi::mlx5::doorbell::Doorbell;
use gin_abi::mlx5::wqe::{Entry, QueueNumber, SLOT_BYTES, Slot};
use gin_abi::{BackendKind, CommHandle};
use gin_bench_kernels::nccl;
use gin_bench_kernels::post::BYTES;
use gin_gpu::GpuError;
use gin_gpu::{KernelArg, Memory, MemoryKind};
use gin_host::comm::{CommError, Communicator, Requirements, Routes, Window, WindowFlags};
use gin_host::world::Rank;
use std::mem::offset_of;
use std::sync::Arc;

/// Number of ranks. Rank 0 posts to all ranks in turn.
const RANKS: u32 = 8;

/// The threads that post.
struct Posters {
    crowd: Crowd,
    /// They are one thread, the only one that uses the context.
    alone: bool,
    /// The goals for gin, for a release to the system and to the GPU: fractions of the time of NCCL's memory
    /// operations.
    goals: [Option<f64>; 2],
    /// The short table has them, for these releases.
    main: [bool; 2],
}

impl Posters {
    fn text(&self) -> String {
        format!("put, {}{}", self.crowd.text(), if self.alone { ", alone" } else { "" })
    }
}

/// Returns all posters: one thread alone, then the crowds.
fn posters(real: bool, all: u32) -> [Posters; 7] {
    let shapes = [
        (true, [Some(0.8), Some(0.5)], [true, true]),
        (false, [Some(0.8), Some(0.5)], [true, true]),
        (false, [Some(0.05), Some(0.05)], [false, false]),
        (false, [None, None], [false, false]),
        (false, [None, None], [false, false]),
        (false, [Some(0.1), Some(0.1)], [true, true]),
        (false, [Some(0.2), Some(0.2)], [false, false]),
    ];
    let crowds = crowd::crowds(real, all, [4096, 256, 512, 256, 512, 16]);
    std::array::from_fn(|index| {
        let (alone, goals, main) = shapes[index];
        Posters { crowd: crowds[index.saturating_sub(1)], alone, goals, main }
    })
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
    /// The state of these queue pairs as NCCL has it: see [`Self::nccl_words`].
    nccl: Arc<Memory>,
    /// A word for each thread.
    times: Arc<Memory>,
    depth_log2: u32,
    /// Address of the copy of the communicator's handle.
    comm: u64,
}

/// The scopes of the release before a doorbell: the title of each table, and the value in the queue pairs.
const RELEASES: [(&str, u16); 2] = [
    ("Issue of a GDAKI put, released to the system", DOORBELL_SYSTEM),
    ("Issue of a GDAKI put, released to the GPU", DOORBELL_GPU),
];

impl Pairs {
    fn new(lab: &Lab<'_>, depth_log2: u32, windows: u32, threads: u32, comm: u64) -> Result<Self, CommError> {
        let ranks = u64::from(RANKS);
        let slots = ranks << depth_log2;
        let (device, pinned) = (MemoryKind::Device, MemoryKind::Pinned);
        Ok(Self {
            table: lab.memory(device, ranks * size_of::<QueuePairData>() as u64 / 8 + 1)?,
            ring: lab.memory(device, slots * SLOT_BYTES / 8)?,
            words: lab.memory(device, slots)?,
            completions: lab.memory(device, slots * SLOT_BYTES / 8)?,
            records: lab.memory(device, ranks * 8)?,
            doorbells: lab.memory(pinned, ranks * 8)?,
            keys: lab.memory(device, u64::from(windows) * (ranks + 1))?,
            nccl: lab.memory(device, (nccl::PAIR * RANKS as usize + nccl::CONTEXT + 3 * RANKS as usize) as u64)?,
            times: lab.memory(device, u64::from(threads))?,
            depth_log2,
            comm,
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
            comm: self.comm,
            tags: self.words.address() + rank * depth * 8,
            completions: self.completions.address() + rank * depth * SLOT_BYTES,
            record: self.records.address() + rank * 64,
            doorbell: self.doorbells.address() + rank * 64,
            number: Self::number(rank).memory(),
            depth_log2: self.depth_log2,
            interval_log2: 4.min(self.depth_log2 - 1) as u16,
            doorbell_scope,
            max_bytes: 1 << 30,
            signal_key: Be32::new(0x1000 + rank as u32).memory(),
            sink_key: Be32::new(0x2000).memory(),
            signals: 0,
            // The word after the table.
            busy: self.table.address() + u64::from(RANKS) * size_of::<QueuePairData>() as u64,
            marks: busy_marks(rank as u32),
            peer: rank as u32,
            ..QueuePairData::zeroed()
        };
        let pairs: Vec<QueuePairData> = (0..u64::from(RANKS)).map(pair).collect();
        self.table.write(0, &pairs)?;
        let words = vec![0u64; depth as usize];
        for rank in 0..u64::from(RANKS) {
            self.words.write(rank * depth * 8, &words)?;
            self.doorbells.write(rank * 64, &[0u64])?;
        }
        Ok(())
    }

    /// Returns the words of NCCL's state at first: the queue pairs, the context, the window, keys of signals and keys
    /// of windows.
    fn nccl_words(&self) -> Vec<u64> {
        let (ranks, base) = (RANKS as usize, self.nccl.address());
        let at = |index: usize| base + 8 * index as u64;
        let context = nccl::PAIR * ranks;
        let window = context + nccl::CONTEXT;
        let (signal_keys, keys) = (window + ranks, window + 2 * ranks);
        let mut words = vec![0; keys + ranks];
        for rank in 0..ranks {
            let (pair, rank) = (nccl::PAIR * rank, rank as u64);
            words[pair + nccl::NUMBER] = u64::from(Self::number(rank).memory());
            words[pair + nccl::DEPTH] = 1 << self.depth_log2;
            words[pair + nccl::RING] = self.ring.address() + (rank << self.depth_log2) * SLOT_BYTES;
            words[pair + nccl::RECORD] = self.records.address() + rank * 64;
            words[pair + nccl::DOORBELL] = self.doorbells.address() + rank * 64;
            words[signal_keys + rank as usize] = u64::from(Be32::new(0x1000 + rank as u32).memory());
            words[keys + rank as usize] = u64::from(Be32::new(0x3000 + rank as u32).memory());
        }
        words[context + nccl::PAIRS] = base;
        words[context + nccl::SIGNAL_KEYS] = at(signal_keys);
        words[context + nccl::SINK_KEY] = u64::from(Be32::new(0x2000).memory());
        words[context + nccl::WINDOW] = at(window);
        words[window] = at(keys);
        words[window + 1] = u64::from(Be32::new(0x4000).memory());
        words
    }

    /// Returns the number of wrong entries below `end` in the ring of `rank`.
    fn wrong_entries(&self, rank: u64, end: u64) -> Result<u64, GpuError> {
        let mut slots = vec![Slot::default(); end as usize];
        self.ring.read((rank << self.depth_log2) * SLOT_BYTES, &mut slots)?;
        let number = Self::number(rank).get();
        Ok((0..).zip(&slots).filter(|(index, slot)| Entry::read(slot, *index, number).is_err()).count() as u64)
    }

    /// Returns 1 if the doorbell of `rank` does not announce all entries below `end`.
    fn wrong_bell(&self, rank: u64, end: u64) -> Result<u64, GpuError> {
        let mut doorbell = [0u64];
        self.doorbells.read(rank * 64, &mut doorbell)?;
        let rings = if end == 0 { 0 } else { Doorbell::word(end, Self::number(rank)) };
        Ok(u64::from(doorbell[0] != rings))
    }

    /// Returns the number of wrong entries, records and doorbells after a launch of `posts` puts with signals.
    fn wrong(&self, posts: u64) -> Result<u64, GpuError> {
        let (mut wrong, mut entries) = (0, 0);
        for rank in 0..u64::from(RANKS) {
            let word = |name: usize| -> Result<u64, GpuError> {
                let mut word = [0u64];
                self.table.read(rank * size_of::<QueuePairData>() as u64 + name as u64, &mut word)?;
                Ok(word[0])
            };
            // Nothing completes, so this is less than 2^39.
            let producer_index = claimed(word(offset_of!(QueuePairData, claims))?, 0);
            let rung = word(offset_of!(QueuePairData, rung))?;
            entries += producer_index;
            wrong += u64::from(rung != producer_index);
            wrong += self.wrong_bell(rank, producer_index)? + self.wrong_entries(rank, producer_index)?;
        }
        Ok(wrong + entries.abs_diff(2 * posts))
    }

    /// Returns the same after a launch of NCCL's memory operations, or of the bare ones, of which one thread's ring.
    fn wrong_without_gin(&self, posts: u64, bells: bool, ordered: bool) -> Result<u64, GpuError> {
        let (mut wrong, mut entries) = (0, 0);
        for rank in 0..RANKS as usize {
            let mut pair = [0u64; nccl::PAIR];
            self.nccl.read((8 * nccl::PAIR * rank) as u64, &mut pair)?;
            let (rank, end) = (rank as u64, pair[nccl::RESERVED]);
            entries += end;
            wrong += self.wrong_entries(rank, end)?;
            if bells {
                wrong += self.wrong_bell(rank, end)?;
            }
            if ordered {
                wrong += u64::from([pair[nccl::READY], pair[nccl::ANNOUNCED], pair[nccl::LOCK]] != [end, end, 0]);
            }
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
    let depth_log2 = bench.pick(MAX_DEPTH_LOG2, 8);
    let mut config = bench.world(RANKS)?;
    config.comm.routes = Routes::Network;
    let measure = |rank: &Rank| -> Result<Vec<Vec<Figure>>, CommError> {
        let posters = posters(bench.is_real(), sms(&**rank.device()).unwrap_or(4));
        let requirements = Requirements::default().signals(1).counters(0).windows(1);
        let comm = rank.communicator(&requirements)?;
        let threads = posters.iter().map(|posters| posters.crowd.members()).max().unwrap_or(1);
        let window = comm.alloc_window::<u64>(threads as usize * BYTES / 8, WindowFlags::NONE)?;
        let mut figures = Vec::new();
        if rank.rank() == 0 {
            let lab = Lab::new(rank)?;
            let pairs = Pairs::new(&lab, depth_log2, requirements.windows, threads, comm.device()?.handle().copy)?;
            for (_, release) in RELEASES {
                for posters in &posters {
                    figures.push(puts(bench, &lab, &comm, &pairs, &window, (posters, release))?);
                }
            }
        }
        end(rank, &comm)?;
        Ok(figures)
    };
    let measure = |rank: &Rank| measure(rank).map(|figures| (figures, sms(&**rank.device())));
    let ranks = bench.on_ranks(config, measure)?;
    let Some((figures, sms)) = ranks.into_iter().next() else { return Err("no rank returned figures".into()) };
    let posters = posters(bench.is_real(), sms.unwrap_or(4));
    let mut tables = Vec::new();
    let all = posters.len();
    for (which, (title, _)) in RELEASES.into_iter().enumerate() {
        let mut rows = Vec::new();
        for (index, posters) in posters.iter().enumerate() {
            let [put, nccl, bare] = figures[which * all + index][..] else { continue };
            let goal = posters.goals[which].filter(|_| bench.is_real()).map(Goal::AtMost);
            let floor = if posters.crowd.members() == 1 { "bare" } else { "bare, nobody rings" };
            let row = Row::new(posters.text(), put, "ns").main(posters.main[which]);
            let row = row.beside(Kind::Nccl, "NCCL's operations", nccl, goal, None);
            rows.push(row.beside(Kind::Floor, floor, bare, None, None));
        }
        let mut table = bench.table(title, RANKS, rows);
        table.notes.push("No NIC takes part; the host checks each entry and doorbell afterwards".to_owned());
        // Sharing does not matter: only rank 0 runs kernels.
        table.notes.retain(|note| !note.starts_with("Ranks share"));
        tables.push(table);
    }
    Ok(tables)
}

/// Returns the times of issuing a put by gin, by NCCL's memory operations and by the bare ones, in nanoseconds. They
/// take turns, and the wrong entries, records and doorbells of each are counted.
fn puts(
    bench: &Bench,
    lab: &Lab<'_>,
    comm: &Communicator,
    pairs: &Pairs,
    window: &Window<u64>,
    (posters, release): (&Posters, u16),
) -> Result<Vec<Figure>, CommError> {
    let crowd = &posters.crowd;
    let handle = pairs.handle(comm)?;
    let start = pairs.nccl_words();
    let context = pairs.nccl.address() + 8 * (nccl::PAIR * RANKS as usize) as u64;
    let context = std::ptr::without_provenance_mut::<u64>(context as usize);
    let (data, limit) = (std::ptr::without_provenance_mut::<u64>(window.memory().address() as usize), bench.limit_ns());
    let rings = match (crowd.members(), release) {
        (1, DOORBELL_SYSTEM) => 2u32,
        (1, _) => 1,
        _ => 0,
    };
    let gin: [&dyn KernelArg; 4] = [&handle, window, &crowd.posts, &crowd.peers];
    let theirs: [&dyn KernelArg; 5] = [&context, &data, &crowd.posts, &crowd.peers, &limit];
    let how = rings | u32::from(posters.alone) << 2;
    let bare: [&dyn KernelArg; 5] = [&context, &data, &crowd.posts, &crowd.peers, &how];
    let mut posts: [Posts; 3] = Default::default();
    let mut wrong = [0; 3];
    // The first repeat warms up.
    for repeat in 0..=bench.launches {
        let mut launch = |which: usize, kernel, comm, arguments: &[&dyn KernelArg]| {
            pairs.reset(release)?;
            pairs.nccl.write(0, &start)?;
            posts[which].launch(lab, (kernel, crowd), comm, arguments, &pairs.times, repeat > 0)
        };
        launch(0, if posters.alone { "bench_gdaki_alone" } else { "bench_gdaki" }, Some(comm), &gin)?;
        wrong[0] += pairs.wrong(crowd.all())?;
        launch(1, "nccl_gdaki", None, &theirs)?;
        wrong[1] += pairs.wrong_without_gin(crowd.all(), true, true)?;
        launch(2, "bare_gdaki", None, &bare)?;
        wrong[2] += pairs.wrong_without_gin(crowd.all(), rings != 0, false)?;
    }
    let [gin, theirs, bare] = &posts;
    Ok(vec![gin.figure(Some(wrong.iter().sum())), theirs.figure(Some(wrong[1])), bare.figure(Some(wrong[2]))])
}

#[cfg(test)]
mod tests {
    use super::*;
    use gin_testkit::Sabotage;
    use std::time::Duration;

    #[test]
    fn wrong_entries_doorbells_and_counts_are_found() {
        let limit = Duration::from_secs(60);
        let sabotage = Sabotage::None;
        let bench = Bench { gpus: None, job: None, launches: 1, limit, max_bytes: 1 << 16, module: None, sabotage };
        let found = bench.on_ranks(bench.world(1).unwrap(), |rank| {
            let lab = Lab::new(rank)?;
            let Posters { crowd, .. } = posters(false, 4)[0];
            let pairs = Pairs::new(&lab, 8, 1, crowd.members(), 0)?;
            pairs.reset(DOORBELL_GPU)?;
            pairs.nccl.write(0, &pairs.nccl_words())?;
            let data = lab.memory(MemoryKind::Device, (BYTES / 8) as u64)?;
            let pointer = |address: u64| std::ptr::without_provenance_mut::<u64>(address as usize);
            let context = pointer(pairs.nccl.address() + 8 * (nccl::PAIR * RANKS as usize) as u64);
            let (data, limit) = (pointer(data.address()), bench.limit_ns());
            let arguments: [&dyn KernelArg; 5] = [&context, &data, &crowd.posts, &crowd.peers, &limit];
            Posts::default().launch(&lab, ("nccl_gdaki", &crowd), None, &arguments, &pairs.times, true)?;
            let wrong = |posts: u64| pairs.wrong_without_gin(posts, true, true);
            let mut found = vec![wrong(crowd.all())?, wrong(crowd.all() + 1)?];
            pairs.nccl.write(8 * nccl::LOCK as u64, &[1u64])?;
            found.push(wrong(crowd.all())?);
            pairs.ring.write(SLOT_BYTES, &[Slot::default()])?;
            found.push(wrong(crowd.all())?);
            pairs.doorbells.write(0, &[0u64])?;
            found.push(wrong(crowd.all())?);
            Ok(found)
        });
        assert_eq!(found.unwrap(), [[0, 2, 1, 2, 3]]);
    }

    #[test]
    fn a_launch_of_every_crowd_fits_into_the_rings() {
        for (real, all, depth) in [(true, 132, 1 << MAX_DEPTH_LOG2), (false, 4, 1 << 8)] {
            for Posters { crowd, .. } in posters(real, all) {
                // Neighbouring threads begin with different peers, so each peer gets about the same number of posts.
                let max = (crowd.all() / u64::from(crowd.peers) + u64::from(crowd.members())) * 2;
                assert!(max <= depth, "{crowd:?}");
            }
        }
    }
}
