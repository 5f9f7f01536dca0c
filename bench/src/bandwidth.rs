// SPDX-License-Identifier: MIT OR Apache-2.0
//! The bandwidth of puts by loads and stores, of bare copy loops, and of the copy engine.

use super::driver::{Engine, ordinal, sms};
use super::figure::Figure;
use super::lab::{Lab, Shape};
use super::table::{Goal, Kind, Row, Table};
use super::{Bench, end};
use crate::Failure;
use gin_bench_kernels::{FLAG_WORDS, Transfers};
use gin_cli::size;
use gin_gpu::GpuError;
use gin_gpu::{KernelArg, MemoryKind, Plain};
use gin_host::comm::DeviceComm;
use gin_host::comm::{CommError, Communicator, Requirements, Window, WindowFlags};
use gin_host::world::Rank;
use serde::{Deserialize, Serialize};

pub(super) const RANKS: u32 = 2;

/// The size of a put to which the goals apply, in bytes.
const GOAL_BYTES: u64 = 256 << 20;

/// The size from which puts in turns are measured in one direction too, in bytes.
const TURNS_BYTES: u64 = 1 << 20;

/// The kernel of puts, one part for each block.
const PUT: &str = "bench_lsa_put";

/// The kernel of puts in chunks that blocks take in turns.
const TURNS: &str = "bench_lsa_put_turns";

/// The kernels of both directions at once: puts, and bare loops that stride together or over parts of their own.
const BOTH_WAYS: [&str; 4] = [PUT, TURNS, STRIDE, PARTS];
const STRIDE: &str = "bare_copy_4";
const PARTS: &str = "bare_copy_4_parts";

/// The kernels of bare copy loops, and the maximum number of threads per block of each.
const LOOPS: [(&str, u32); 5] =
    [("bare_copy_1", 1024), ("bare_copy_2", 1024), (STRIDE, 1024), ("bare_copy_8", 512), ("bare_copy_4_strong", 1024)];

/// A way to move bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Way {
    pub(super) shape: Shape,
    /// Each put has a signal; otherwise only the last one. Bare loops have none.
    pub(super) signals: bool,
}

/// A way to move bytes, and its bandwidth in GB/s.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Speed {
    kernel: String,
    blocks: u32,
    threads: u32,
    signals: bool,
    rate: Figure,
}

impl Speed {
    /// Returns the bandwidth of `way`, by the nanoseconds of each repeat.
    fn new(way: Way, bytes: u64, repeats: &[f64]) -> Self {
        let Way { shape: Shape { kernel, blocks, threads, .. }, signals } = way;
        Self { kernel: kernel.to_owned(), blocks, threads, signals, rate: rate(bytes, repeats) }
    }

    /// Returns the blocks and threads as text.
    fn shape(&self) -> String {
        format!("{} x {} threads", self.blocks, self.threads)
    }

    /// Returns the kernel, its blocks and threads as text.
    fn text(&self) -> String {
        format!("{}, {}", self.kernel, self.shape())
    }
}

/// Returns whether the kernel puts and raises signals.
fn is_put(kernel: &str) -> bool {
    [PUT, TURNS].contains(&kernel)
}

/// Returns a bandwidth in GB/s by the nanoseconds of each repeat.
pub(super) fn rate(bytes: u64, repeats: &[f64]) -> Figure {
    let rates: Vec<f64> = repeats.iter().map(|ns| bytes as f64 / ns.max(1.0)).collect();
    Figure::new(&rates, None)
}

/// The measurement of one size.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Sized {
    bytes: u64,
    /// Puts and bare loops.
    speeds: Vec<Speed>,
    engine: Option<Figure>,
    /// Number of wrong words after the fastest way of each [kind](KINDS), and after a copy by the engine.
    wrong: [u64; KINDS.len() + 1],
}

impl Sized {
    fn best(&self, kind: Of) -> Option<&Speed> {
        best(&self.speeds, kind)
    }

    /// Returns the wrong words of a kind.
    fn wrong(&self, kind: Of) -> u64 {
        self.wrong[kind as usize]
    }
}

/// A kind of ways to move bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Of {
    /// Puts with a signal each, one part for each block.
    Signals,
    /// Puts with one signal at the end.
    OneSignal,
    /// Puts in chunks that blocks take in turns.
    Turns,
    /// Bare loops.
    Bare,
}

/// All kinds, in their order.
const KINDS: [Of; 4] = [Of::Signals, Of::OneSignal, Of::Turns, Of::Bare];

impl Of {
    fn has(self, kernel: &str, signals: bool) -> bool {
        match self {
            Self::Signals => kernel == PUT && signals,
            Self::OneSignal => kernel == PUT && !signals,
            Self::Turns => kernel == TURNS,
            Self::Bare => !is_put(kernel),
        }
    }
}

/// Returns the fastest way of a kind.
fn best(speeds: &[Speed], kind: Of) -> Option<&Speed> {
    fastest(speeds.iter().filter(|speed| kind.has(&speed.kernel, speed.signals)))
}

fn fastest<'s>(speeds: impl Iterator<Item = &'s Speed>) -> Option<&'s Speed> {
    speeds.max_by(|one, other| one.rate.value.total_cmp(&other.rate.value))
}

/// One of the two ranks.
pub(super) struct Side<'a> {
    pub(super) bench: &'a Bench,
    pub(super) lab: Lab<'a>,
    comm: &'a Communicator,
    handle: DeviceComm,
    pub(super) to: Window<u64>,
    pub(super) from: Window<u64>,
    /// The flags by which kernels of both directions begin together, and the number of such launches so far.
    flags: Window<u64>,
    starts: u64,
    /// Number of the other rank's GPU, and the address of its part of `to`.
    destination: (usize, u64),
    engine: Option<Engine>,
    /// Number of blocks that fill the GPU.
    pub(super) max: u32,
    /// Number of signal raises posted so far. As many must arrive.
    raises: u64,
}

impl<'a> Side<'a> {
    /// Allocates windows of `to` words to write to and `from` words to read from.
    pub(super) fn new(
        bench: &'a Bench,
        rank: &'a Rank,
        comm: &'a Communicator,
        (to, from): (usize, usize),
    ) -> Result<Self, CommError> {
        let to = comm.alloc_window::<u64>(to, WindowFlags::NONE)?;
        let from = comm.alloc_window::<u64>(from, WindowFlags::NONE)?;
        let device = &**rank.device();
        let own = [ordinal(device).unwrap_or(0) as u64, to.memory().address()];
        let all = rank.bootstrap().all_gather(bytemuck::cast_slice(&own))?;
        let peer = all.get(1 - rank.rank() as usize).and_then(|bytes| bytes.split_first_chunk::<8>());
        let (number, address) = peer
            .and_then(|(number, rest)| Some((u64::from_le_bytes(*number), u64::from_le_bytes(*rest.first_chunk()?))))
            .unwrap_or_default();
        Ok(Self {
            bench,
            lab: Lab::new(rank)?,
            comm,
            handle: comm.device()?,
            to,
            from,
            flags: comm.alloc_window::<u64>(FLAG_WORDS, WindowFlags::NONE)?,
            starts: 0,
            destination: (number as usize, address),
            // The address of another process's memory means nothing to the driver.
            engine: if bench.is_one_process() { Engine::of(device)? } else { None },
            max: sms(device).unwrap_or(4),
            raises: 0,
        })
    }

    fn sends(&self) -> bool {
        self.lab.rank.rank() == 0
    }

    /// Returns the shapes to try for `bytes` bytes.
    fn shapes(&self, kernel: &'static str, max_threads: u32, bytes: u64) -> Vec<Shape> {
        let mut counts: Vec<u32> = [1, 4, 8, 16, 32, 64].into_iter().filter(|&count| count < self.max).collect();
        counts.push(self.max);
        // Leaves out shapes that only take time: blocks with few bytes each, and few blocks for many bytes.
        counts.retain(|&count| count == 1 || bytes / u64::from(count) >= 1 << 10);
        counts.retain(|&count| bytes < 16 << 20 || count >= 8 || count == self.max);
        let threads: &[u32] = match (self.bench.is_real(), bytes > 4 << 10) {
            (true, true) => &[256, 512, 1024],
            (true, false) => &[32, 64, 256],
            (false, _) => &[32],
        };
        let threads = threads.iter().copied().filter(|&threads| threads <= max_threads);
        let shape =
            |threads| counts.iter().map(move |&blocks| Shape { kernel, blocks, threads, waits: false, shared: 0 });
        threads.flat_map(shape).collect()
    }

    /// Returns the ways to try for `bytes` bytes.
    fn ways(&self, bytes: u64) -> Vec<Way> {
        let puts = self.shapes(PUT, 512, bytes);
        let puts = [true, false].into_iter().flat_map(|signals| puts.iter().map(move |&shape| Way { shape, signals }));
        let is_large = bytes >= self.bench.pick(TURNS_BYTES, 1 << 10);
        let turns = if is_large { self.shapes(TURNS, 512, bytes) } else { Vec::new() };
        let turns = turns.into_iter().map(|shape| Way { shape, signals: true });
        let bare = LOOPS.into_iter().flat_map(|(kernel, max_threads)| self.shapes(kernel, max_threads, bytes));
        puts.chain(turns).chain(bare.map(|shape| Way { shape, signals: false })).collect()
    }

    /// Moves `bytes` bytes `times` times and returns the mean time of a transfer, in nanoseconds. Kernels that wait
    /// begin together with the other rank's.
    pub(super) fn move_by(&mut self, way: Way, bytes: u64, times: u64) -> Result<f64, CommError> {
        let Way { shape, signals } = way;
        self.starts += u64::from(shape.waits);
        let transfers = Plain(Transfers {
            len: bytes / 8,
            times,
            each: u64::from(signals),
            together: if shape.waits { self.starts } else { 0 },
            limit_ns: self.bench.limit_ns(),
        });
        let arguments: [&dyn KernelArg; 5] = [&self.handle, &self.to, &self.from, &self.flags, &transfers];
        let launched = self.lab.timed(shape, Some(self.comm), &arguments)?;
        if is_put(shape.kernel) {
            self.raises += u64::from(shape.blocks) * if signals { times } else { 1 };
        }
        Ok(launched.ns / times as f64)
    }

    pub(super) fn repeats(&self) -> usize {
        self.bench.launches.min(5)
    }

    /// Returns the number of transfers in one launch, large enough to time short transfers.
    pub(super) fn times(&self, bytes: u64) -> u64 {
        self.bench.pick(((64 << 20) / bytes).clamp(1, 2000), 2)
    }

    /// Returns a shape that fills the GPU.
    fn whole(&self, kernel: &'static str) -> Shape {
        Shape { kernel, blocks: self.max, threads: self.bench.pick(1024, 32), waits: false, shared: 0 }
    }

    pub(super) fn fill(&self, window: &Window<u64>, words: u64, seed: u64) -> Result<(), CommError> {
        let shape = self.whole("bench_fill");
        let address = std::ptr::without_provenance_mut::<u64>(window.memory().address() as usize);
        self.lab.launch(shape, None, &[&address, &(words as usize), &seed])
    }

    /// Returns the number of wrong words in the own part of `to`, from word `start` on.
    pub(super) fn wrong(&self, start: u64, words: u64, seed: u64) -> Result<u64, CommError> {
        let shape = self.whole("bench_check");
        let address = std::ptr::without_provenance::<u64>((self.to.memory().address() + 8 * start) as usize);
        Ok(self.lab.timed(shape, None, &[&address, &(words as usize), &seed])?.wrong)
    }

    /// Lets the sender move data by `act` and the receiver count the wrong words. Returns 0 at the sender. Collective.
    fn check(
        &mut self,
        bytes: u64,
        seed: u64,
        act: impl FnOnce(&mut Self) -> Result<(), CommError>,
    ) -> Result<u64, CommError> {
        let words = bytes / 8;
        if self.sends() {
            self.fill(&self.from, words, seed)?;
        } else {
            // Other values, so that missing words show.
            self.fill(&self.to, words, !seed)?;
        }
        self.lab.rank.barrier()?;
        if self.sends() {
            act(self)?;
        }
        self.lab.rank.barrier()?;
        if self.sends() { Ok(0) } else { self.wrong(0, words, seed) }
    }

    /// Returns the time of a copy by the copy engine, in nanoseconds; `None` without an engine.
    fn engine(&self, bytes: u64, times: u64) -> Result<Option<f64>, GpuError> {
        let Some(engine) = &self.engine else { return Ok(None) };
        engine.enter()?;
        let (from, limit) = (self.from.memory().address(), self.bench.limit * 2);
        // Safety: the sender's and the receiver's window are alive and have at least `bytes` bytes.
        let ns = unsafe { engine.time_copies(self.destination, from, bytes as usize, times, limit)? };
        Ok(Some(ns))
    }

    /// Measures and checks one size. In each repeat all ways take turns.
    fn measure(&mut self, bytes: u64) -> Result<Sized, CommError> {
        let (mut speeds, mut engine) = (Vec::new(), None);
        let ways = self.ways(bytes);
        if self.sends() {
            let times = self.times(bytes);
            let mut repeats = vec![Vec::new(); ways.len()];
            let mut copies = Vec::new();
            for &way in &ways {
                self.move_by(way, bytes, 1)?;
            }
            for _ in 0..self.repeats() {
                for (&way, repeats) in ways.iter().zip(&mut repeats) {
                    repeats.push(self.move_by(way, bytes, times)?);
                }
                copies.extend(self.engine(bytes, times)?);
            }
            speeds = ways.iter().zip(&repeats).map(|(&way, repeats)| Speed::new(way, bytes, repeats)).collect();
            engine = (!copies.is_empty()).then(|| rate(bytes, &copies));
        }
        // The sender repeats its fastest ways for the check; the receiver has measured none and only checks.
        let fastest = |kind| {
            let speed = best(&speeds, kind)?;
            let same =
                |way: &&Way| Speed::new(**way, bytes, &[1.0]).text() == speed.text() && way.signals == speed.signals;
            ways.iter().find(same).copied()
        };
        let mut wrong = [0; KINDS.len() + 1];
        for (number, kind) in KINDS.into_iter().enumerate() {
            if !ways.iter().any(|way| kind.has(way.shape.kernel, way.signals)) {
                continue;
            }
            let way = fastest(kind);
            wrong[number] = self.check(bytes, bytes ^ (number as u64 + 1), |side| match way {
                Some(way) => side.move_by(way, bytes, 1).map(drop),
                None => Ok(()),
            })?;
        }
        if self.engine.is_some() {
            wrong[KINDS.len()] =
                self.check(bytes, bytes ^ (KINDS.len() as u64 + 1), |side| Ok(side.engine(bytes, 1).map(drop)?))?;
        }
        Ok(Sized { bytes, speeds, engine, wrong })
    }

    /// Returns how many raises are missing at the receiver, or were too many.
    fn missing(&self) -> Result<u64, CommError> {
        let all = self.lab.rank.bootstrap().all_gather(&self.raises.to_le_bytes())?;
        let other = all.get(1 - self.lab.rank.rank() as usize);
        let sent = other.and_then(|bytes| bytes.first_chunk()).map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let seen = self.lab.memory(MemoryKind::Device, 1)?;
        let out = std::ptr::without_provenance_mut::<u64>(seen.address() as usize);
        self.lab.launch(
            Shape { waits: false, ..Shape::one("bench_signal", 1) },
            Some(self.comm),
            &[&self.handle, &out],
        )?;
        let mut value = [0u64];
        seen.read(0, &mut value)?;
        Ok(value[0].abs_diff(sent))
    }
}

fn sizes(bench: &Bench) -> Vec<u64> {
    if !bench.is_real() {
        return vec![1 << 6, 1 << 10, 1 << 12];
    }
    let powers = (6..=30).step_by(2).map(|power| 1u64 << power);
    powers.filter(|&bytes| bytes <= bench.max_bytes).collect()
}

/// Returns the row of the raises that did not arrive.
fn missing(missing: u64) -> Row {
    Row::new("missing raises of the signal", Figure::new(&[missing as f64], Some(missing)), "")
}

/// Measures puts by size. A second table shows the shapes of the size with goals and of the largest size.
pub(super) fn puts(bench: &Bench) -> Result<Vec<Table>, Failure> {
    let sizes = sizes(bench);
    let Some(&largest) = sizes.last() else { return Ok(Vec::new()) };
    let body = |rank: &Rank| -> Result<(Vec<Sized>, u64), CommError> {
        let comm = rank.communicator(&Requirements::default().signals(1).counters(0))?;
        // Data moves in one direction, so each side needs one large window only.
        let words = (largest / 8) as usize;
        let mut side = Side::new(bench, rank, &comm, if rank.rank() == 0 { (2, words) } else { (words, 2) })?;
        let measured = sizes.iter().map(|&bytes| side.measure(bytes)).collect::<Result<Vec<_>, _>>()?;
        let missing = side.missing()?;
        end(rank, &comm)?;
        Ok((measured, missing))
    };
    let mut ranks = bench.on_ranks(bench.world(RANKS)?, body)?;
    let (Some((received, lost)), Some((sent, _))) = (ranks.pop(), ranks.pop()) else {
        return Err("a rank returned no figures".into());
    };
    let mut rows = Vec::new();
    let mut shapes = Vec::new();
    for (sent, received) in sent.into_iter().zip(received) {
        let Some(bare) = sent.best(Of::Bare) else { continue };
        let bytes = sent.bytes;
        let goals = bench.counts(RANKS);
        let row = |kind: Of, what: String, curve: &str, goal: Option<f64>, main: &[u64]| {
            let put = sent.best(kind)?;
            let wrong = received.wrong(kind) + received.wrong(Of::Bare) + received.wrong[KINDS.len()];
            let goal = goal.filter(|_| goals).map(Goal::AtLeast);
            let row = Row::new(what, Figure { wrong: Some(wrong), ..put.rate }, "GB/s")
                .detail(put.shape())
                .main(main.contains(&bytes))
                .point(curve, bytes)
                .beside(Kind::Floor, "best bare copy loop, released once", bare.rate, goal, None)
                .by(bare.text());
            let wish = (goals && bytes == GOAL_BYTES).then_some(Goal::AtLeast(0.95));
            Some(match sent.engine {
                Some(engine) => row.beside(Kind::Other, "cuMemcpyPeerAsync", engine, None, wish),
                None => row,
            })
        };
        let each = (bytes == GOAL_BYTES).then_some(0.98);
        let once = if bytes == GOAL_BYTES { Some(0.98) } else { (bytes >= 1 << 10).then_some(0.8) };
        let (shown, few) = ([1 << 6, 1 << 10, 1 << 16, 1 << 20, GOAL_BYTES], [1 << 6, 1 << 10, 1 << 16]);
        let size = size::show(bytes);
        let signals = format!("put of {size}, each with a signal");
        rows.extend(row(Of::Signals, signals, "put, each with a signal", each, &shown));
        let turns = format!("put of {size} in chunks that blocks take in turns");
        rows.extend(row(Of::Turns, turns, "put in turns", each, &[GOAL_BYTES]));
        rows.extend(row(
            Of::OneSignal,
            format!("prepared puts of {size}, one signal at the end"),
            "puts, one signal",
            once,
            &few,
        ));
        if bytes == GOAL_BYTES || bytes == largest {
            shapes.extend(by_shape(&sent));
        }
    }
    rows.push(missing(lost));
    let mut sizes = bench.table("LSA put by size", RANKS, rows);
    // Seen for bare loops, too: 1148 GB/s both ways over links of 900 GB/s (docs/log/2026-11-26.md).
    sizes
        .notes
        .push("Stores to the same bytes may merge on their way: a rate above that of the links is none".to_owned());
    Ok(vec![sizes, bench.table("LSA put by blocks", RANKS, shapes)])
}

/// Returns a row for each shape of a put of one size, compared with the bare loops of the same shape.
fn by_shape(sized: &Sized) -> Vec<Row> {
    let row = |put: &Speed| {
        let alike = |bare: &&Speed| !is_put(&bare.kernel) && (bare.blocks, bare.threads) == (put.blocks, put.threads);
        let row = Row::new(format!("put of {}, {}", size::show(sized.bytes), put.shape()), put.rate, "GB/s");
        let bare = sized.speeds.iter().filter(alike);
        bare.fold(row, |row, bare| row.beside(Kind::Floor, bare.kernel.as_str(), bare.rate, None, None))
    };
    sized.speeds.iter().filter(|speed| speed.kernel == PUT && speed.signals).map(row).collect()
}

/// The times of one size in both directions at one rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Exchanged {
    /// Nanoseconds by way and repeat.
    ways: Vec<Vec<f64>>,
    /// Nanoseconds of the copy engine by repeat.
    engine: Vec<f64>,
    wrong: u64,
}

impl Side<'_> {
    /// Returns the ways to try in both directions at once. The ranks' grids are resident together.
    fn exchanges(&self) -> Vec<Way> {
        let sharing = RANKS as usize > self.bench.gpus(RANKS);
        let max = if sharing { self.max / 2 } else { self.max };
        let counts = [max / 8, max / 4, max / 2, max].map(|blocks| blocks.max(1));
        let threads = self.bench.pick(512, 32);
        let shape = move |kernel, blocks| Shape { kernel, blocks, threads, waits: true, shared: 0 };
        let way = |kernel| move |blocks| Way { shape: shape(kernel, blocks), signals: true };
        BOTH_WAYS.into_iter().flat_map(|kernel| counts.into_iter().map(way(kernel))).collect()
    }

    /// Measures and checks one size in both directions at once.
    fn exchange(&mut self, bytes: u64) -> Result<Exchanged, CommError> {
        let (ways, words, times) = (self.exchanges(), bytes / 8, self.times(bytes));
        let (own, other) = (u64::from(self.lab.rank.rank()), u64::from(1 - self.lab.rank.rank()));
        let mut all = Exchanged { ways: vec![Vec::new(); ways.len()], engine: Vec::new(), wrong: 0 };
        // The shape with the maximum number of blocks of each kernel.
        for (number, kernel) in (0u64..).zip(BOTH_WAYS) {
            let Some(&way) = ways.iter().rfind(|way| way.shape.kernel == kernel) else { continue };
            let seed = bytes ^ (number << 40);
            self.fill(&self.from, words, seed + own)?;
            self.fill(&self.to, words, !(seed + other))?;
            self.lab.rank.barrier()?;
            self.move_by(way, bytes, 1)?;
            self.lab.rank.barrier()?;
            all.wrong += self.wrong(0, words, seed + other)?;
        }
        for _ in 0..self.repeats() {
            for (&way, repeats) in ways.iter().zip(&mut all.ways) {
                self.lab.rank.barrier()?;
                repeats.push(self.move_by(way, bytes, times)?);
            }
            self.lab.rank.barrier()?;
            all.engine.extend(self.engine(bytes, times)?);
        }
        self.lab.rank.barrier()?;
        Ok(all)
    }
}

/// Measures puts in both directions at once.
pub(super) fn exchanges(bench: &Bench) -> Result<Vec<Table>, Failure> {
    let sizes: &[u64] = bench.pick(&[1 << 12, 1 << 16, 1 << 20, 1 << 24, GOAL_BYTES], &[1 << 10, 1 << 12]);
    let sizes: Vec<u64> = sizes.iter().copied().filter(|&bytes| bytes <= bench.max_bytes).collect();
    let Some(&largest) = sizes.last() else { return Ok(Vec::new()) };
    type Measured = (Vec<Exchanged>, Vec<(String, u32, u32)>, u64);
    let body = |rank: &Rank| -> Result<Measured, CommError> {
        let comm = rank.communicator(&Requirements::default().signals(1).counters(0))?;
        let words = (largest / 8) as usize;
        let mut side = Side::new(bench, rank, &comm, (words, words))?;
        // All ranks have loaded their kernels before any kernel waits.
        rank.barrier()?;
        let measured = sizes.iter().map(|&bytes| side.exchange(bytes)).collect::<Result<Vec<_>, _>>()?;
        rank.barrier()?;
        let missing = side.missing()?;
        let ways = side
            .exchanges()
            .into_iter()
            .map(|Way { shape, .. }| (shape.kernel.to_owned(), shape.blocks, shape.threads));
        let ways = ways.collect();
        end(rank, &comm)?;
        Ok((measured, ways, missing))
    };
    let ranks = bench.on_ranks(bench.world(RANKS)?, body)?;
    let [(first, ways, lost), (second, _, also_lost)] = &ranks[..] else {
        return Err("a rank returned no figures".into());
    };
    // A transfer in both directions has ended when the slower one has.
    let together = |one: &[f64], other: &[f64], bytes: u64| {
        let slower: Vec<f64> = one.iter().zip(other).map(|(one, other)| one.max(*other)).collect();
        rate(2 * bytes, &slower)
    };
    let mut rows = Vec::new();
    for (index, &bytes) in sizes.iter().enumerate() {
        let (one, other) = (&first[index], &second[index]);
        let speed = |(way, (kernel, blocks, threads)): (usize, &(String, u32, u32))| Speed {
            kernel: kernel.clone(),
            blocks: *blocks,
            threads: *threads,
            signals: is_put(kernel),
            rate: together(&one.ways[way], &other.ways[way], bytes),
        };
        let speeds: Vec<Speed> = ways.iter().enumerate().map(speed).collect();
        let (Some(put), Some(bare)) = (best(&speeds, Of::Turns), best(&speeds, Of::Bare)) else { continue };
        let figure = Figure { wrong: Some(one.wrong + other.wrong), ..put.rate };
        let goal = (bench.counts(RANKS) && bytes == GOAL_BYTES).then_some(Goal::AtLeast(0.98));
        let mut row = Row::new(format!("put of {}, both ways at once", size::show(bytes)), figure, "GB/s")
            .detail(put.shape())
            .main(bytes == 1 << 12 || bytes == GOAL_BYTES)
            .point("put, both ways at once", bytes)
            .beside(Kind::Floor, "best bare copy loop, both ways", bare.rate, goal, None)
            .by(bare.text());
        for (what, kernel) in [("puts, a part for each block", PUT), ("bare copy loop, a part for each block", PARTS)] {
            if let Some(speed) = fastest(speeds.iter().filter(|speed| speed.kernel == kernel)) {
                row = row.beside(Kind::Other, what, speed.rate, None, None).by(speed.shape());
            }
        }
        if !one.engine.is_empty() {
            let engine = together(&one.engine, &other.engine, bytes);
            row = row.beside(Kind::Other, "cuMemcpyPeerAsync, both ways", engine, None, None);
        }
        rows.push(row);
    }
    rows.push(missing(lost + also_lost));
    Ok(vec![bench.table("LSA put both ways", RANKS, rows)])
}
