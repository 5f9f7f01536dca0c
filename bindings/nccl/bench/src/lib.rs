// SPDX-License-Identifier: MIT OR Apache-2.0
//! The figures of `gin bench nccl`: the kernels of `gin_nccl_kernels::timed` over NCCL and over gin's proxy.
//!
//! Two ranks are threads of this process, on two GPUs or on one. Both sides run the same launches.
#![warn(unreachable_pub)]

use gin_gpu::{Device, Function, KernelArg, LaunchConfig, Memory, MemoryKind, Plain, Stream};
use gin_host::comm::{Communicator, DeviceComm, Requirements, Routes, Window, WindowFlags};
use gin_host::world::{Rank, WorldConfig, launch};
use gin_nccl_kernels::timed::{END, MARKS, Puts, SIGNALS, START, Trips, WRONG};
use serde::Serialize;
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// A result with an error that a thread can pass on.
pub type Fallible<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// Number of ranks.
pub const RANKS: u32 = 2;
/// The kernels.
pub const KERNELS: [&str; 3] = ["signal_and_back", "put_and_back", "puts_then_answer"];
/// Words of a put that the other rank answers: 64 bytes.
const WORDS: u64 = 8;

/// The launches of both sides.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Number of repeats of each figure.
    pub repeats: usize,
    /// Rounds of a launch that are not timed.
    pub warm: u64,
    /// Timed rounds of a launch.
    pub timed: u64,
    /// Rounds of the launch whose words are checked.
    pub checked: u64,
    /// Large puts of a launch, at least [`slots`](Self::slots).
    pub puts: u64,
    /// Places that the large puts take in turn.
    pub slots: u64,
    /// Words of a large put.
    pub words: usize,
    /// Limit of a wait.
    pub limit: Duration,
}

impl Plan {
    /// Returns the plan for GPUs: 900 round trips in a launch, and large puts of 4 MiB.
    pub fn new(repeats: usize, limit: Duration) -> Self {
        Self { repeats, warm: 100, timed: 900, checked: 200, puts: 200, slots: 8, words: 1 << 19, limit }
    }

    /// Returns the number of words of a window.
    pub fn window(&self) -> usize {
        self.slots as usize * self.words
    }

    fn limit_ns(&self) -> u64 {
        u64::try_from(self.limit.as_nanos()).unwrap_or(u64::MAX)
    }
}

/// The figures of one side.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Figures {
    /// Microseconds of a signal and a signal back, one value for each repeat.
    pub signal_us: Vec<f64>,
    /// Microseconds of a put of 64 bytes with a signal, and the same back.
    pub put_us: Vec<f64>,
    /// GB/s of puts of 4 MiB, each with a signal.
    pub puts_gbs: Vec<f64>,
    /// Number of wrong words.
    pub wrong: u64,
}

impl Figures {
    /// Returns the times of rank 0 with the wrong words of both ranks.
    #[must_use]
    pub fn with(mut self, other: &Self) -> Self {
        self.wrong += other.wrong;
        self
    }
}

/// A barrier of both ranks before each launch, and before a side frees memory that the other rank's requests use.
///
/// It is neither NCCL's nor gin's: while a kernel of a rank waits, no call of a library may wait for that kernel.
#[derive(Debug)]
pub struct Barrier {
    came: AtomicU64,
    limit: Duration,
}

impl Barrier {
    /// Makes a barrier whose ranks wait at most `limit` for each other.
    pub fn new(limit: Duration) -> Self {
        Self { came: AtomicU64::new(0), limit }
    }

    /// Waits until the other rank has come as often.
    ///
    /// # Errors
    /// The other rank has not come within the limit.
    pub fn wait(&self) -> Fallible<()> {
        let all = (self.came.fetch_add(1, Ordering::AcqRel) / u64::from(RANKS) + 1) * u64::from(RANKS);
        let start = Instant::now();
        while self.came.load(Ordering::Acquire) < all {
            if start.elapsed() > self.limit {
                return Err(format!("the other rank has not come within {:?}", self.limit).into());
            }
            thread::sleep(Duration::from_micros(20));
        }
        Ok(())
    }
}

/// One rank of a side: its communicator, and windows with [`Plan::window`] words.
pub trait Side {
    /// Launches a kernel of one thread, and waits for its end.
    ///
    /// # Errors
    /// An error of the device, or a fault that the kernel has reported.
    fn launch(&self, kernel: &'static str, arguments: &[&dyn KernelArg]) -> Fallible<()>;

    /// Returns the communicator, the window to which ranks put, and the window with the words to put.
    fn parameters(&self) -> [&dyn KernelArg; 3];

    /// Writes the first words to put.
    ///
    /// # Errors
    /// An error of the device.
    fn write(&self, words: &[u64]) -> Fallible<()>;

    /// Reads the first words that were put here.
    ///
    /// # Errors
    /// An error of the device.
    fn read(&self, words: &mut [u64]) -> Fallible<()>;
}

/// A rank that measures.
struct Lab<'a> {
    side: &'a dyn Side,
    rank: u32,
    plan: Plan,
    barrier: &'a Barrier,
    marks: Arc<Memory>,
    /// Rounds of all launches so far.
    rounds: u64,
    /// Launches of large puts so far.
    launches: u64,
}

/// Measures one side, as one rank. Both ranks call.
///
/// # Errors
/// An error of the device, a fault, or a rank that does not come.
pub fn measure(
    side: &dyn Side,
    device: &Arc<dyn Device>,
    rank: u32,
    plan: Plan,
    barrier: &Barrier,
) -> Fallible<Figures> {
    let marks = Memory::new(device, MemoryKind::Device, 8 * MARKS as u64)?;
    let mut lab = Lab { side, rank, plan, barrier, marks, rounds: 0, launches: 0 };
    let mut figures = Figures::default();
    let Plan { repeats, warm, timed, checked, .. } = plan;
    lab.trips(None, 0, checked)?;
    figures.wrong += lab.trips(Some(1), 0, checked)?[WRONG];
    figures.wrong += lab.puts()?.1;
    for _ in 0..repeats {
        let us = |marks: [u64; MARKS]| marks[END].saturating_sub(marks[START]) as f64 / timed as f64 / 1e3;
        figures.signal_us.push(us(lab.trips(None, warm, timed)?));
        figures.put_us.push(us(lab.trips(Some(0), warm, timed)?));
        let (rate, wrong) = lab.puts()?;
        figures.puts_gbs.push(rate);
        figures.wrong += wrong;
    }
    barrier.wait()?;
    Ok(figures)
}

impl Lab<'_> {
    fn launch(&self, kernel: &'static str, arguments: &[&dyn KernelArg]) -> Fallible<[u64; MARKS]> {
        let mut marks = [0u64; MARKS];
        self.marks.write(0, &marks)?;
        let out = std::ptr::without_provenance_mut::<u64>(self.marks.address() as usize);
        let arguments: Vec<_> = arguments.iter().copied().chain([&out as &dyn KernelArg]).collect();
        self.barrier.wait()?;
        self.side.launch(kernel, &arguments)?;
        self.marks.read(0, &mut marks)?;
        Ok(marks)
    }

    /// Plays round trips: of signals, or of puts whose words are checked or not.
    fn trips(&mut self, put_checks: Option<u64>, warm: u64, timed: u64) -> Fallible<[u64; MARKS]> {
        let [comm, to, from] = self.side.parameters();
        let (before, len, limit_ns) = (self.rounds, WORDS, self.plan.limit_ns());
        let trips = Plain(Trips { before, warm, timed, len, checks: put_checks.unwrap_or(0), limit_ns });
        self.rounds += warm + timed;
        match put_checks {
            None => self.launch(KERNELS[0], &[comm, &trips]),
            Some(_) => self.launch(KERNELS[1], &[comm, to, from, &trips]),
        }
    }

    /// Moves the large puts. Returns their GB/s, and the number of words that are wrong here.
    fn puts(&mut self) -> Fallible<(f64, u64)> {
        let Plan { puts, slots, words, .. } = self.plan;
        let (len, limit_ns) = (words as u64, self.plan.limit_ns());
        let row = Puts { puts, len, slots, launches: self.launches, before: self.launches * puts, limit_ns };
        self.launches += 1;
        let sent: Vec<u64> = (0..self.plan.window() as u64).map(|index| self.launches << 32 | index).collect();
        if self.rank == 0 {
            self.side.write(&sent)?;
        }
        let [comm, to, from] = self.side.parameters();
        let marks = self.launch(KERNELS[2], &[comm, to, from, &Plain(row)])?;
        let mut wrong = 0;
        if self.rank != 0 {
            let mut found = vec![0; sent.len()];
            self.side.read(&mut found)?;
            wrong = found.iter().zip(&sent).filter(|(found, sent)| found != sent).count() as u64;
        }
        let bytes = 8 * len * puts;
        Ok((bytes as f64 / marks[END].saturating_sub(marks[START]).max(1) as f64, wrong))
    }
}

/// A rank of gin, whose puts and signals go through the proxy.
struct OverGin<'a> {
    comm: &'a Communicator,
    handle: DeviceComm,
    to: Window<u64>,
    from: Window<u64>,
    functions: Vec<Function>,
    stream: Arc<dyn Stream>,
}

impl Side for OverGin<'_> {
    fn launch(&self, kernel: &'static str, arguments: &[&dyn KernelArg]) -> Fallible<()> {
        let index = KERNELS.iter().position(|&name| name == kernel).ok_or("no such kernel")?;
        // Safety: the kernel's parameters, on both ranks; the windows live until the stream is synchronised.
        unsafe { self.stream.launch(&self.functions[index], LaunchConfig::new(1, 1).cooperative(), arguments)? };
        self.stream.synchronize()?;
        Ok(self.comm.check(kernel)?)
    }

    fn parameters(&self) -> [&dyn KernelArg; 3] {
        [&self.handle, &self.to, &self.from]
    }

    fn write(&self, words: &[u64]) -> Fallible<()> {
        Ok(self.from.write(0, words)?)
    }

    fn read(&self, words: &mut [u64]) -> Fallible<()> {
        Ok(self.to.read(0, words)?)
    }
}

/// Measures gin's proxy in a world of two ranks.
///
/// # Errors
/// As [`measure`].
pub fn over_gin(config: WorldConfig, plan: Plan) -> Fallible<Figures> {
    let barrier = Barrier::new(plan.limit);
    let on_rank = |rank: &Rank| -> Fallible<Figures> {
        let comm = rank.communicator(&Requirements::default().signals(SIGNALS))?;
        let window = || comm.alloc_window::<u64>(plan.window(), WindowFlags::NONE);
        // All kernels are loaded now, because a later load would wait for kernels that run.
        let functions = KERNELS.iter().map(|name| rank.kernel(name)).collect::<Result<_, _>>()?;
        let (handle, stream) = (comm.device()?, rank.stream()?);
        let side = OverGin { comm: &comm, handle, to: window()?, from: window()?, functions, stream };
        let figures = measure(&side, rank.device(), rank.rank(), plan, &barrier)?;
        drop(side);
        comm.destroy()?;
        Ok(figures)
    };
    let figures = launch(config.routes(Routes::Network), |rank| on_rank(&rank).map_err(|error| error.to_string()))?;
    let [first, second] = &figures[..] else { return Err("the world does not have 2 ranks".into()) };
    Ok(first.clone().with(second))
}
