// SPDX-License-Identifier: MIT OR Apache-2.0
//! The bandwidth of puts by loads and stores, of bare copy loops, and of the copy engine.

use super::driver::{Engine, ordinal, processors};
use super::lab::{Lab, Shape, median};
use super::table::{Goal, Row, Table};
use super::{Bench, end};
use crate::{Failure, size};
use gin_gpu::GpuError;
use gin_gpu::MemoryKind;
use gin_host::DeviceComm;
use gin_host::comm::{CommError, Communicator, Requirements, Window, WindowFlags};
use gin_host::world::Rank;

const RANKS: u32 = 2;

/// The size of a put to which the goals apply, in bytes.
const GOAL_BYTES: u64 = 256 << 20;

/// The kernels of bare copy loops, and the maximum number of threads per block of each.
const LOOPS: [(&str, u32); 5] = [
    ("bare_copy_1", 1024),
    ("bare_copy_2", 1024),
    ("bare_copy_4", 1024),
    ("bare_copy_8", 512),
    ("bare_copy_4_strong", 1024),
];

/// The shape of a kernel, and its bandwidth in GB/s.
#[derive(Clone, Copy, Debug)]
struct Speed {
    shape: Shape,
    rate: f64,
}

/// The measurement of one put size. All bandwidths are in GB/s.
#[derive(Clone, Debug)]
struct Sized {
    bytes: u64,
    puts: Vec<Speed>,
    bare: Vec<Speed>,
    engine: Option<f64>,
    /// Number of wrong words after a put, a bare copy and a copy by the copy engine.
    wrong: [u64; 3],
}

fn best(speeds: &[Speed]) -> Option<Speed> {
    speeds.iter().copied().max_by(|one, other| one.rate.total_cmp(&other.rate))
}

/// Returns the blocks and threads as text.
fn shape_text(speed: Speed) -> String {
    format!("{} x {} threads", speed.shape.blocks, speed.shape.threads)
}

/// One of the two ranks: rank 0 sends and rank 1 receives.
struct Side<'a> {
    bench: &'a Bench,
    lab: Lab<'a>,
    comm: &'a Communicator,
    handle: DeviceComm,
    to: Window<u64>,
    from: Window<u64>,
    /// Number of the receiver's GPU, and the address of its part of `to`.
    destination: (usize, u64),
    engine: Option<Engine>,
    /// Number of blocks that fill the GPU.
    most: u32,
    /// Number of signal raises posted so far. As many must arrive.
    raises: u64,
}

impl<'a> Side<'a> {
    fn new(bench: &'a Bench, rank: &'a Rank, comm: &'a Communicator, words: usize) -> Result<Self, CommError> {
        let sends = rank.rank() == 0;
        // Data moves in one direction, so each side needs one large window only.
        let to = comm.alloc_window::<u64>(if sends { 2 } else { words }, WindowFlags::NONE)?;
        let from = comm.alloc_window::<u64>(if sends { words } else { 2 }, WindowFlags::NONE)?;
        let device = &**rank.device();
        let own = [ordinal(device).unwrap_or(0) as u64, to.memory().address()];
        let all = rank.bootstrap().all_gather(bytemuck::cast_slice(&own))?;
        let peer = all.get(1).and_then(|bytes| bytes.split_first_chunk::<8>());
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
            destination: (number as usize, address),
            engine: if sends { Engine::of(device)? } else { None },
            most: processors(device).unwrap_or(4),
            raises: 0,
        })
    }

    fn sends(&self) -> bool {
        self.lab.rank.rank() == 0
    }

    /// Returns the shapes to try for `bytes` bytes.
    fn shapes(&self, kernel: &'static str, most_threads: u32, bytes: u64) -> Vec<Shape> {
        let mut counts: Vec<u32> = [1, 4, 8, 16, 32, 64].into_iter().filter(|&count| count < self.most).collect();
        counts.push(self.most);
        // Leaves out shapes that only take time: blocks with few bytes each, and few blocks for many bytes.
        counts.retain(|&count| count == 1 || bytes / u64::from(count) >= 1 << 10);
        counts.retain(|&count| bytes < 16 << 20 || count >= 8 || count == self.most);
        let threads: &[u32] = if self.bench.is_real() { &[256, 512, 1024] } else { &[32] };
        let threads = threads.iter().copied().filter(|&threads| threads <= most_threads);
        let shape = |threads| counts.iter().map(move |&blocks| Shape { kernel, blocks, threads, waits: false });
        threads.flat_map(shape).collect()
    }

    /// Moves `bytes` bytes `times` times and returns the mean time of a transfer, in nanoseconds.
    fn move_by(&mut self, shape: Shape, bytes: u64, times: u64) -> Result<f64, CommError> {
        let (len, put) = ((bytes / 8) as usize, shape.kernel == "bench_lsa_put");
        let figure = self.lab.timed(shape, Some(self.comm), &[&self.handle, &self.to, &self.from, &len, &times])?;
        if put {
            self.raises += u64::from(shape.blocks) * times;
        }
        Ok(figure.ns / times as f64)
    }

    /// Measures the bandwidth of a shape, in GB/s.
    fn rate(&mut self, shape: Shape, bytes: u64) -> Result<Speed, CommError> {
        let times = self.times(bytes);
        self.move_by(shape, bytes, 1)?;
        let launches = self.bench.launches.min(5);
        let each = (0..launches).map(|_| self.move_by(shape, bytes, times)).collect::<Result<Vec<_>, _>>()?;
        Ok(Speed { shape, rate: bytes as f64 / median(each).max(1.0) })
    }

    /// Returns the number of transfers in one launch, large enough to time short transfers.
    fn times(&self, bytes: u64) -> u64 {
        self.bench.pick(((64 << 20) / bytes).clamp(1, 200), 2)
    }

    /// Returns a shape that fills the GPU.
    fn whole(&self, kernel: &'static str) -> Shape {
        Shape { kernel, blocks: self.most, threads: self.bench.pick(1024, 32), waits: false }
    }

    fn fill(&self, window: &Window<u64>, words: u64, seed: u64) -> Result<(), CommError> {
        let shape = self.whole("bench_fill");
        let address = std::ptr::without_provenance_mut::<u64>(window.memory().address() as usize);
        self.lab.launch(shape, None, &[&address, &(words as usize), &seed])
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
        if self.sends() {
            return Ok(0);
        }
        let shape = self.whole("bench_check");
        let address = std::ptr::without_provenance::<u64>(self.to.memory().address() as usize);
        Ok(self.lab.timed(shape, None, &[&address, &(words as usize), &seed])?.wrong)
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

    /// Measures and checks one put size.
    fn measure(&mut self, bytes: u64) -> Result<Sized, CommError> {
        let (mut puts, mut bare, mut engine) = (Vec::new(), Vec::new(), None);
        if self.sends() {
            for shape in self.shapes("bench_lsa_put", 512, bytes) {
                puts.push(self.rate(shape, bytes)?);
            }
            for (kernel, most_threads) in LOOPS {
                for shape in self.shapes(kernel, most_threads, bytes) {
                    bare.push(self.rate(shape, bytes)?);
                }
            }
            engine = self.engine(bytes, self.times(bytes))?.map(|ns| bytes as f64 / ns.max(1.0));
        }
        // The sender repeats its fastest shape for the check; the receiver has no shapes and only checks.
        let put = best(&puts).map(|speed| speed.shape);
        let copy = best(&bare).map(|speed| speed.shape);
        let wrong = [
            self.check(bytes, bytes ^ 1, |side| match put {
                Some(shape) => side.move_by(shape, bytes, 1).map(drop),
                None => Ok(()),
            })?,
            self.check(bytes, bytes ^ 2, |side| match copy {
                Some(shape) => side.move_by(shape, bytes, 1).map(drop),
                None => Ok(()),
            })?,
            if self.bench.is_real() {
                self.check(bytes, bytes ^ 3, |side| Ok(side.engine(bytes, 1).map(drop)?))?
            } else {
                0
            },
        ];
        Ok(Sized { bytes, puts, bare, engine, wrong })
    }

    /// Returns how many raises are missing at the receiver, or were too many.
    fn missing(&self) -> Result<u64, CommError> {
        let all = self.lab.rank.bootstrap().all_gather(&self.raises.to_le_bytes())?;
        let sent = all.first().and_then(|bytes| bytes.first_chunk()).map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let seen = self.lab.memory(MemoryKind::Device, 1)?;
        let out = std::ptr::without_provenance_mut::<u64>(seen.address() as usize);
        self.lab.launch(
            Shape { waits: false, ..Shape::one("bench_signal", 1) },
            Some(self.comm),
            &[&self.handle, &out],
        )?;
        let mut value = [0u64];
        seen.read(0, &mut value)?;
        Ok(if self.sends() { 0 } else { value[0].abs_diff(sent) })
    }
}

fn sizes(bench: &Bench) -> Vec<u64> {
    if !bench.is_real() {
        return vec![1 << 10, 1 << 12];
    }
    let powers = (10..=30).step_by(2).map(|power| 1u64 << power);
    powers.filter(|&bytes| bytes <= bench.most_bytes).collect()
}

/// Measures puts by size. A second table shows the shapes of the size with goals and of the largest size.
pub(super) fn puts(bench: &Bench) -> Result<Vec<Table>, Failure> {
    let sizes = sizes(bench);
    let Some(&largest) = sizes.last() else { return Ok(Vec::new()) };
    let body = |rank: &Rank| -> Result<(Vec<Sized>, u64), CommError> {
        let comm = rank.communicator(&Requirements::default().signals(1).counters(0))?;
        let mut side = Side::new(bench, rank, &comm, (largest / 8) as usize)?;
        let measured = sizes.iter().map(|&bytes| side.measure(bytes)).collect::<Result<Vec<_>, _>>()?;
        let missing = side.missing()?;
        end(rank, &comm)?;
        Ok((measured, missing))
    };
    let mut ranks = bench.on_ranks(bench.world(RANKS)?, body)?;
    let (Some((received, missing)), Some((sent, _))) = (ranks.pop(), ranks.pop()) else {
        return Err("a rank returned no figures".into());
    };
    let mut rows = Vec::new();
    let mut shapes = Vec::new();
    for (sent, received) in sent.into_iter().zip(received) {
        let (Some(put), Some(bare)) = (best(&sent.puts), best(&sent.bare)) else { continue };
        let bytes = sent.bytes;
        let goals = bench.counts(RANKS) && bytes == GOAL_BYTES;
        let what = format!("put of {}, {}", size::show(bytes), shape_text(put));
        let beside = format!("{}, {}", bare.shape.kernel, shape_text(bare));
        let goal = goals.then_some(Goal::AtLeast(0.98));
        let mut row =
            Row::new(what, put.rate, "GB/s", Some(received.wrong.iter().sum())).beside(beside, bare.rate, goal, None);
        if let Some(engine) = sent.engine {
            row = row.beside("cuMemcpyPeerAsync", engine, None, goals.then_some(Goal::AtLeast(0.95)));
        }
        rows.push(row);
        if bytes == GOAL_BYTES || bytes == largest {
            shapes.extend(by_shape(&sent));
        }
    }
    let mut table = bench.table("LSA put by size", RANKS, rows);
    table.rows.push(Row::new("missing raises of the signal", missing as f64, "", Some(missing)));
    Ok(vec![table, bench.table("LSA put by blocks", RANKS, shapes)])
}

/// Returns a row for each shape of a put of one size, compared with the bare loops of the same shape.
fn by_shape(sized: &Sized) -> Vec<Row> {
    let row = |put: &Speed| {
        let alike = |bare: &&Speed| bare.shape.blocks == put.shape.blocks && bare.shape.threads == put.shape.threads;
        let row = Row::new(format!("put of {}, {}", size::show(sized.bytes), shape_text(*put)), put.rate, "GB/s", None);
        sized.bare.iter().filter(alike).fold(row, |row, bare| row.beside(bare.shape.kernel, bare.rate, None, None))
    };
    sized.puts.iter().map(row).collect()
}
