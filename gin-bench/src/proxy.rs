// SPDX-License-Identifier: MIT OR Apache-2.0
//! Round trips over the proxy, and bare trips from a GPU to a CPU thread and back without it.

use super::driver::Engine;
use super::lab::{Figure, Lab, Rounds, Shape};
use super::table::{Goal, Row, Table};
use super::{Bench, end};
use crate::Failure;
use gin_boot::rt;
use gin_device::sys::{GlobalWord, Word};
use gin_gpu::GpuError;
use gin_gpu::{Memory, MemoryKind};
use gin_host::comm::{CommError, Requirements, Routes, WindowFlags};
use gin_host::proxy::Turn;
use gin_host::proxy::progress::Step;
use gin_host::world::Rank;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

const RANKS: u32 = 2;

/// A way by which a CPU thread answers a kernel: it moves 8 bytes, then signals the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    /// The thread moves nothing and signals by a store to pinned memory.
    Notify,
    /// The thread stores value and signal to pinned memory.
    Store,
    /// A copy to GPU memory; once its event is complete, a store to pinned memory.
    CopyEvent,
    /// A copy to GPU memory, then a second copy.
    CopyCopy,
    /// A copy to GPU memory, then a stream memory operation on GPU memory.
    CopyValue,
    /// A copy to GPU memory, then a stream memory operation on pinned memory.
    CopyValuePinned,
    /// A stream memory operation on GPU memory; once its event is complete, a store to pinned memory.
    ValueEvent,
    /// Two stream memory operations on GPU memory.
    ValueValue,
    /// Two stream memory operations on GPU memory, by one call.
    Values,
    /// A stream memory operation on GPU memory, then one on pinned memory, by one call.
    ValuesPinned,
}

impl Way {
    /// All ways that move the value to GPU memory.
    const TO_GPU: [Self; 8] = [
        Self::CopyEvent,
        Self::CopyCopy,
        Self::CopyValue,
        Self::CopyValuePinned,
        Self::ValueEvent,
        Self::ValueValue,
        Self::Values,
        Self::ValuesPinned,
    ];

    fn text(self) -> &'static str {
        match self {
            Self::Notify => "nothing, signalled by a store to pinned memory",
            Self::Store => "8 bytes in pinned memory, signalled by a store there",
            Self::CopyEvent => "cuMemcpyAsync, event polled, signalled by a store to pinned memory",
            Self::CopyCopy => "cuMemcpyAsync, signalled by another one",
            Self::CopyValue => "cuMemcpyAsync, signalled by cuStreamWriteValue64",
            Self::CopyValuePinned => "cuMemcpyAsync, signalled by cuStreamWriteValue64 to pinned memory",
            Self::ValueEvent => "cuStreamWriteValue64, event polled, signalled by a store to pinned memory",
            Self::ValueValue => "cuStreamWriteValue64, signalled by another one",
            Self::Values => "cuStreamBatchMemOp of two values",
            Self::ValuesPinned => "cuStreamBatchMemOp of two values, signalled in pinned memory",
        }
    }

    /// Returns the kind of memory of the moved value; `None` if the way moves none.
    fn payload(self) -> Option<MemoryKind> {
        match self {
            Self::Notify => None,
            Self::Store => Some(MemoryKind::Pinned),
            _ => Some(MemoryKind::Device),
        }
    }

    /// Returns the kind of memory of the signal.
    fn answer(self) -> MemoryKind {
        match self {
            Self::CopyCopy | Self::CopyValue | Self::ValueValue | Self::Values => MemoryKind::Device,
            _ => MemoryKind::Pinned,
        }
    }
}

/// The state of the answering CPU thread.
struct Answers {
    way: Way,
    engine: Option<Engine>,
    ask: Arc<Memory>,
    answer: Arc<Memory>,
    payload: Arc<Memory>,
    /// The pinned source of copies.
    source: Arc<Memory>,
    /// The round that the thread waits for.
    next: u64,
    /// The thread waits for the event of the started operation.
    under_way: bool,
    /// The context of the engine is current on the thread.
    entered: bool,
    stop: Arc<AtomicBool>,
    failure: Arc<Mutex<Option<GpuError>>>,
}

/// Returns the word at the start of `memory`.
fn word(memory: &Memory) -> GlobalWord {
    // Safety: the word is aligned, and the memory outlives its users here. They access it atomically, or by copies that
    // overlap with no other access.
    unsafe { GlobalWord::new(memory.address()) }
}

impl Answers {
    /// Starts the answer to round `round`. Ways with an event complete in [`poll`](Self::poll), the others need no
    /// wait.
    fn answer(&mut self, round: u64) -> Result<(), GpuError> {
        let (to, signal, source) = (self.payload.address(), self.answer.address(), self.source.address());
        let engine = match (&self.engine, self.way) {
            (_, Way::Notify) => {
                word(&self.answer).store_release_sys(round);
                return Ok(());
            }
            (_, Way::Store) => {
                word(&self.payload).store_relaxed_sys(round);
                word(&self.answer).store_release_sys(round);
                return Ok(());
            }
            (Some(engine), _) => engine,
            (None, _) => return Err(GpuError::Driver { context: "copy", reason: "the device is no GPU".into() }),
        };
        word(&self.source).store_release_sys(round);
        // Safety: `self` keeps the memory of these words alive; started operations complete before the engine ends.
        unsafe {
            match self.way {
                Way::Notify | Way::Store => {}
                Way::CopyEvent => engine.copy(to, source, 8)?,
                Way::CopyCopy => {
                    engine.copy(to, source, 8)?;
                    engine.copy(signal, source, 8)?;
                }
                Way::CopyValue | Way::CopyValuePinned => {
                    engine.copy(to, source, 8)?;
                    engine.value(signal, round)?;
                }
                Way::ValueEvent => engine.value(to, round)?,
                Way::ValueValue => {
                    engine.value(to, round)?;
                    engine.value(signal, round)?;
                }
                Way::Values | Way::ValuesPinned => engine.values([to, signal], round)?,
            }
        }
        if matches!(self.way, Way::CopyEvent | Way::ValueEvent) {
            engine.mark()?;
            self.under_way = true;
        }
        Ok(())
    }

    /// Checks once for a request or for the event of the started operation.
    fn poll(&mut self) -> Result<(), GpuError> {
        if let (false, Some(engine)) = (self.entered, &self.engine) {
            engine.enter()?;
            self.entered = true;
        }
        if let (true, Some(engine)) = (self.under_way, &self.engine) {
            if engine.is_done()? {
                self.under_way = false;
                word(&self.answer).store_release_sys(self.next);
                self.next += 1;
            }
        } else if word(&self.ask).load_acquire_sys() >= self.next {
            self.answer(self.next)?;
            if !self.under_way {
                self.next += 1;
            }
        }
        Ok(())
    }
}

impl Step for Answers {
    fn step(&mut self) -> Turn {
        for _ in 0..64 {
            if let Err(error) = self.poll() {
                self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                return Turn::Finished;
            }
        }
        if self.stop.load(Ordering::Acquire) { Turn::Finished } else { Turn::Worked }
    }

    fn broke(&mut self) {}
}

/// Measures trips that a CPU thread answers by `way`. The thread runs on the CPUs of progress threads.
fn trips(lab: &Lab<'_>, way: Way, rounds: &Rounds) -> Result<Figure, CommError> {
    let payload_kind = way.payload().unwrap_or(MemoryKind::Pinned);
    let (ask, source) = (lab.memory(MemoryKind::Pinned, 16)?, lab.memory(MemoryKind::Pinned, 16)?);
    let (answer, payload) = (lab.memory(way.answer(), 16)?, lab.memory(payload_kind, 16)?);
    let needs_engine = !matches!(way, Way::Notify | Way::Store);
    let engine = if needs_engine { Engine::of(&**lab.rank.device())? } else { None };
    let (stop, failure) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(None)));
    let mut answers = Answers {
        way,
        engine,
        ask: ask.clone(),
        answer: answer.clone(),
        payload: payload.clone(),
        source,
        next: 1,
        under_way: false,
        entered: false,
        stop: stop.clone(),
        failure: failure.clone(),
    };
    if needs_engine {
        // Tries the way once without a kernel: a kernel would wait in vain if this machine does not support the way.
        answers.answer(0)?;
        if let Some(engine) = &answers.engine {
            engine.finish(std::time::Duration::from_nanos(rounds.limit_ns))?;
        }
        answers.under_way = false;
    }
    let progress = &lab.rank.comm_config().progress;
    let running = progress
        .start("gin-bench", Box::new(answers))
        .map_err(|error| GpuError::Driver { context: "start a thread", reason: error.to_string() })?;
    let pointer = |memory: &Memory| std::ptr::without_provenance_mut::<u64>(memory.address() as usize);
    let carried = if way.payload().is_some() { pointer(&payload) } else { std::ptr::null_mut() };
    let mut before = 0;
    let arguments = (pointer(&ask), pointer(&answer), carried);
    let figure = lab.play(
        Shape::one("bare_trips", 1),
        None,
        &[&arguments.0, &arguments.1, &arguments.2],
        rounds,
        &mut before,
        false,
    );
    stop.store(true, Ordering::Release);
    rt::wait_until(|| running.is_finished());
    running.join();
    match failure.lock().unwrap_or_else(PoisonError::into_inner).take() {
        Some(error) => Err(error.into()),
        None => figure,
    }
}

/// The figures of one rank: those of the bare ways, or their errors, and round trips with windows in GPU memory and in
/// pinned memory.
struct Measured {
    bare: Vec<(Way, Result<Figure, String>)>,
    trips: Vec<Figure>,
}

/// Measures round trips of `kernel` between two ranks, with a window in each of the kinds of memory.
pub(super) fn pings(
    lab: &Lab<'_>,
    kernel: &'static str,
    rounds: &Rounds,
    windows: &[MemoryKind],
) -> Result<Vec<Figure>, CommError> {
    let comm = lab.rank.communicator(&Requirements::default().signals(1).counters(0))?;
    let handle = comm.device()?;
    let window = |kind: &MemoryKind| match kind {
        MemoryKind::Device => comm.alloc_window::<u64>(1, WindowFlags::NONE),
        kind => comm.register::<u64>(&lab.memory(*kind, 1)?.whole(), WindowFlags::NONE),
    };
    let windows = windows.iter().map(window).collect::<Result<Vec<_>, _>>()?;
    let mut signals = 0;
    let mut play =
        |window| lab.play(Shape::one(kernel, 1), Some(&comm), &[&handle, window], rounds, &mut signals, true);
    let trips = windows.iter().map(|window| play(window)).collect::<Result<_, _>>()?;
    end(lab.rank, &comm)?;
    Ok(trips)
}

/// Measures round trips: a put of a value with a signal, and the same back.
pub(super) fn round_trips(bench: &Bench) -> Result<Vec<Table>, Failure> {
    let rounds = bench.long_rounds();
    let measure = |rank: &Rank| -> Result<Measured, CommError> {
        let lab = Lab::new(rank)?;
        // All ranks have loaded their kernels before any kernel waits.
        rank.barrier()?;
        let mut bare = Vec::new();
        if rank.rank() == 0 {
            let ways = [Way::Notify, Way::Store].into_iter().chain(Way::TO_GPU.into_iter().filter(|_| bench.is_real()));
            bare = ways.map(|way| (way, trips(&lab, way, &rounds).map_err(|error| error.to_string()))).collect();
        }
        rank.barrier()?;
        let trips = pings(&lab, "bench_proxy_ping", &rounds, &[MemoryKind::Device, MemoryKind::Pinned])?;
        Ok(Measured { bare, trips })
    };
    let mut config = bench.world(RANKS)?;
    config.comm.routes = Routes::Network;
    let ranks = bench.on_ranks(config, measure)?;
    let Some(first) = ranks.first() else { return Err("a rank returned no figures".into()) };
    let wrong = |which: usize| Some(ranks.iter().map(|rank| rank.trips[which].wrong).sum());
    let us = |figure: Figure| figure.ns / 1e3;
    let of = |way: Way| {
        // A way is unusable if values arrived after their signal.
        let is_right = |figure: &&Figure| figure.wrong == 0;
        first
            .bare
            .iter()
            .find_map(|(other, figure)| figure.as_ref().ok().filter(is_right).filter(|_| *other == way))
            .copied()
    };
    let cheapest = Way::TO_GPU.into_iter().filter_map(|way| Some((way, of(way)?)));
    let cheapest = cheapest.min_by(|one, other| one.1.ns.total_cmp(&other.1.ns));
    let goal = |bound| bench.counts(RANKS).then_some(Goal::AtMost(bound));
    let mut in_gpu = Row::new("put_value with signal and back, GPU memory", us(first.trips[0]), "us", wrong(0));
    if let Some((way, figure)) = cheapest {
        in_gpu = in_gpu.beside(format!("two bare trips: {}", way.text()), 2.0 * us(figure), goal(1.2), None);
    }
    let mut in_pinned = Row::new("put_value with signal and back, pinned memory", us(first.trips[1]), "us", wrong(1));
    if let Some(figure) = of(Way::Notify) {
        in_pinned =
            in_pinned.beside(format!("two bare trips: {}", Way::Notify.text()), 2.0 * us(figure), goal(1.5), None);
    }
    if let Some(figure) = of(Way::Store) {
        in_pinned = in_pinned.beside(format!("two bare trips: {}", Way::Store.text()), 2.0 * us(figure), None, None);
    }
    let mut table = bench.table("Proxy round trip", RANKS, vec![in_gpu, in_pinned]);
    for (way, figure) in &first.bare {
        match figure {
            Ok(figure) if figure.wrong == 0 => {
                table.rows.push(Row::new(format!("bare trip: {}", way.text()), us(*figure), "us", Some(0)));
            }
            Ok(figure) => {
                let (wrong, of) = (figure.wrong, rounds.checked);
                table
                    .notes
                    .push(format!("Unusable: {}: {wrong} of {of} values arrived after their signal", way.text()));
            }
            Err(error) => table.notes.push(format!("Not measured: {}: {error}", way.text())),
        }
    }
    Ok(vec![table])
}
