// SPDX-License-Identifier: MIT OR Apache-2.0
//! Round trips over the proxy, and bare trips from a GPU to a CPU thread and back without it.

use super::driver::{Engine, ordinal};
use super::figure::{Figure, median};
use super::lab::{Lab, Play, Rounds, Shape};
use super::table::{Goal, Kind, Row, Table};
use super::{Bench, end};
use crate::Failure;
use gin_boot::rt;
use gin_device::sys::{GlobalWord, Word};
use gin_gpu::GpuError;
use gin_gpu::{KernelArg, Memory, MemoryKind};
use gin_host::comm::{CommError, Requirements, Routes, WindowFlags};
use gin_host::proxy::Turn;
use gin_host::proxy::progress::Step;
use gin_host::world::Rank;
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

pub(super) const RANKS: u32 = 2;

/// A way by which a CPU thread carries what a kernel asks for to the kernel of the other rank: it moves 8 bytes, then
/// signals that kernel. Copies and stream memory operations are of a stream of the receiver's GPU, if not said
/// otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    /// The thread moves nothing and signals by a store to pinned memory.
    Notify,
    /// The thread stores value and signal to pinned memory.
    Store,
    /// The thread stores the value twice to pinned memory; the receiving kernel stores it to GPU memory.
    Mailbox,
    /// A copy to GPU memory by a stream of the sender's GPU; once its event is complete, a store to pinned memory.
    SenderCopyEvent,
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
    const TO_GPU: [Self; 10] = [
        Self::Mailbox,
        Self::SenderCopyEvent,
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
            Self::Mailbox => "8 bytes in pinned memory, which the receiver stores to GPU memory",
            Self::SenderCopyEvent => {
                "cuMemcpyAsync of the sender's GPU, event polled, signalled by a store to pinned memory"
            }
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

    /// Returns whether the way needs the driver.
    fn needs_engine(self) -> bool {
        !matches!(self, Self::Notify | Self::Store | Self::Mailbox)
    }
}

/// The state of the CPU thread that serves the kernel of one rank.
struct Answers {
    way: Way,
    engine: Option<Engine>,
    ask: Arc<Memory>,
    /// The addresses of the other rank's signal and value.
    answer: u64,
    payload: u64,
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

/// Returns the word at `address`, which is the start of some rank's memory.
pub(super) fn word(address: u64) -> GlobalWord {
    // Safety: the word is aligned, and the ranks keep the memory until all threads that use it have ended. They access
    // it atomically, or by copies that overlap with no other access.
    unsafe { GlobalWord::new(address) }
}

impl Answers {
    /// Starts the answer to round `round`. Ways with an event complete in [`poll`](Self::poll), the others need no
    /// wait.
    fn answer(&mut self, round: u64) -> Result<(), GpuError> {
        let (to, signal, source) = (self.payload, self.answer, self.source.address());
        let engine = match (&self.engine, self.way) {
            (_, Way::Notify) => {
                word(signal).store_release_sys(round);
                return Ok(());
            }
            (_, Way::Store) => {
                word(to).store_relaxed_sys(round);
                word(signal).store_release_sys(round);
                return Ok(());
            }
            (_, Way::Mailbox) => {
                // Each word tells the round, so they need no order.
                word(signal).store_relaxed_sys(round);
                word(signal).at(1).store_relaxed_sys(round);
                return Ok(());
            }
            (Some(engine), _) => engine,
            (None, _) => return Err(GpuError::Driver { context: "copy", reason: "the device is no GPU".into() }),
        };
        word(source).store_release_sys(round);
        // Safety: the ranks keep the memory of these words alive; started operations complete before the engine ends.
        unsafe {
            match self.way {
                Way::Notify | Way::Store | Way::Mailbox => {}
                Way::SenderCopyEvent | Way::CopyEvent => engine.copy(to, source, 8)?,
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
        if matches!(self.way, Way::SenderCopyEvent | Way::CopyEvent | Way::ValueEvent) {
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
                word(self.answer).store_release_sys(self.next);
                self.next += 1;
            }
        } else if word(self.ask.address()).load_acquire_sys() >= self.next {
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

/// Measures round trips between the kernels of two ranks. A CPU thread for each rank carries what its kernel asks for
/// to the other rank by `way`. The threads run on the CPUs of progress threads. Collective.
///
/// # Errors
/// Returns the reason if the way is not usable, at both ranks.
fn trips(lab: &Lab<'_>, way: Way, rounds: &Rounds) -> Result<Result<Figure, String>, CommError> {
    let payload_kind = way.payload().unwrap_or(MemoryKind::Pinned);
    let (ask, source) = (lab.memory(MemoryKind::Pinned, 16)?, lab.memory(MemoryKind::Pinned, 16)?);
    let (answer, payload) = (lab.memory(way.answer(), 16)?, lab.memory(payload_kind, 16)?);
    let (bootstrap, device) = (lab.rank.bootstrap(), &**lab.rank.device());
    let own = [answer.address(), payload.address(), ordinal(device).unwrap_or(0) as u64];
    let all = bootstrap.all_gather(bytemuck::cast_slice(&own))?;
    let [signal, value, number]: [u64; 3] = bytemuck::pod_read_unaligned(&all[1 - lab.rank.rank() as usize]);
    let (stop, failure) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(None)));
    let prepare = || -> Result<Answers, GpuError> {
        let engine = match (way.needs_engine(), way) {
            (false, _) => None,
            (true, Way::SenderCopyEvent) => Engine::of(device)?,
            (true, _) => Engine::of_number(device, number as usize)?,
        };
        let mut answers = Answers {
            way,
            engine,
            ask: ask.clone(),
            answer: signal,
            payload: value,
            source,
            next: 1,
            under_way: false,
            entered: false,
            stop: stop.clone(),
            failure: failure.clone(),
        };
        // Tries the way once without a kernel: a kernel would wait in vain if this machine does not support the way.
        answers.answer(0)?;
        if let Some(engine) = &answers.engine {
            engine.finish(std::time::Duration::from_nanos(rounds.limit_ns))?;
        }
        answers.under_way = false;
        Ok(answers)
    };
    let prepared = prepare();
    // Both ranks go on, or none.
    let all = bootstrap.all_gather(&[u8::from(prepared.is_ok())])?;
    let answers = match prepared {
        Err(error) => return Ok(Err(error.to_string())),
        Ok(_) if all.iter().any(|right| *right != [1]) => return Ok(Err("the other rank cannot do it".to_owned())),
        Ok(answers) => answers,
    };
    let progress = &lab.rank.comm_config().progress;
    let running = progress
        .start("gin-bench", Box::new(answers))
        .map_err(|error| GpuError::Driver { context: "start a thread", reason: error.to_string() })?;
    let pointer = |memory: &Memory| std::ptr::without_provenance_mut::<u64>(memory.address() as usize);
    let carried = if way.payload().is_some() { pointer(&payload) } else { std::ptr::null_mut() };
    let (ask, answer) = (pointer(&ask), pointer(&answer));
    let (mailbox, first) = (u32::from(way == Way::Mailbox), u32::from(lab.rank.rank() == 0));
    let arguments: [&dyn KernelArg; 5] = [&ask, &answer, &carried, &mailbox, &first];
    let before = Cell::new(0);
    let play =
        Play { shape: Shape::one("bare_trips", 1), comm: None, arguments: &arguments, before: &before, module: None };
    let figures = lab.play(&[play], rounds, true);
    // The other rank's kernel waits for this rank's thread until here.
    lab.rank.barrier()?;
    stop.store(true, Ordering::Release);
    rt::wait_until_named("the end of a thread", || running.is_finished());
    running.join();
    // The other rank's thread uses this rank's memory until here.
    lab.rank.barrier()?;
    if let Some(error) = failure.lock().unwrap_or_else(PoisonError::into_inner).take() {
        return Ok(Err(error.to_string()));
    }
    Ok(figures.map(|figures| figures[0]).map_err(|error| error.to_string()))
}

/// The figures of one rank, by repeat: those of the bare ways, or their errors, and round trips with windows in GPU
/// memory and in pinned memory.
#[derive(Serialize, Deserialize)]
struct Measured {
    bare: Vec<Vec<Result<Figure, String>>>,
    trips: Vec<Vec<Figure>>,
}

/// Measures round trips of `kernel` between two ranks, with a window in each of the kinds of memory, which processes
/// share if `shared`.
pub(super) fn pings(
    lab: &Lab<'_>,
    kernel: &'static str,
    rounds: &Rounds,
    windows: &[MemoryKind],
    shared: bool,
) -> Result<Vec<Figure>, CommError> {
    // A communicator for each: once a value has gone to GPU memory, kernels open the mailbox in every wait.
    let mut comms = Vec::new();
    for kind in windows {
        let comm = lab.rank.communicator(&Requirements::default().signals(1).counters(0))?;
        let window = match kind {
            MemoryKind::Device => comm.alloc_window::<u64>(1, WindowFlags::NONE)?,
            kind => {
                let memory = Memory::for_ranks(lab.rank.device(), *kind, 8, shared)?;
                comm.register::<u64>(&memory.whole(), WindowFlags::NONE)?
            }
        };
        comms.push((comm.device()?, window, Cell::new(0), comm));
    }
    let arguments: Vec<[&dyn KernelArg; 2]> =
        comms.iter().map(|(handle, window, ..)| [handle as _, window as _]).collect();
    let plays: Vec<Play<'_>> = comms
        .iter()
        .zip(&arguments)
        .map(|((_, _, before, comm), arguments)| Play {
            shape: Shape::one(kernel, 1),
            comm: Some(comm),
            arguments,
            before,
            module: None,
        })
        .collect();
    let trips = lab.play(&plays, rounds, true)?;
    for (_, window, _, comm) in comms {
        drop(window);
        end(lab.rank, &comm)?;
    }
    Ok(trips)
}

/// Returns the figure of all repeats, each of which was measured by itself.
fn all_repeats(repeats: &[Figure]) -> Figure {
    let values = |of: fn(&Figure) -> Option<f64>| repeats.iter().filter_map(of).collect::<Vec<_>>();
    let middle = |values: Vec<f64>| (!values.is_empty()).then(|| median(&values));
    Figure {
        p50: middle(values(|figure| figure.p50)),
        p99: middle(values(|figure| figure.p99)),
        ..Figure::new(&values(|figure| Some(figure.value)), repeats.iter().map(|figure| figure.wrong).sum())
    }
}

/// Returns the times of rank 0 in microseconds, and the wrong values of both ranks.
pub(super) fn both(first: &[Figure], second: &[Figure]) -> Figure {
    let (one, other) = (all_repeats(first).times(1e-3), all_repeats(second));
    Figure { wrong: one.wrong.zip(other.wrong).map(|(one, other)| one + other), ..one }
}

/// Measures round trips: a put of a value with a signal, and the same back.
pub(super) fn round_trips(bench: &Bench) -> Result<Vec<Table>, Failure> {
    // Bare ways and gin take turns: each repeat measures all of them.
    let rounds = bench.long_rounds();
    let (repeats, rounds) = (rounds.launches, Rounds { launches: 1, ..rounds });
    let ways: Vec<Way> = match (bench.is_one_process(), bench.is_real()) {
        (true, true) => [Way::Notify, Way::Store].into_iter().chain(Way::TO_GPU).collect(),
        (true, false) => vec![Way::Notify, Way::Store, Way::Mailbox],
        (false, _) => Vec::new(),
    };
    let measure = |rank: &Rank| -> Result<Measured, CommError> {
        let lab = Lab::new(rank)?;
        let mut all = Measured { bare: vec![Vec::new(); ways.len()], trips: vec![Vec::new(); 2] };
        // All ranks have loaded their kernels before any kernel waits.
        rank.barrier()?;
        for _ in 0..repeats {
            for (&way, bare) in ways.iter().zip(&mut all.bare) {
                bare.push(trips(&lab, way, &rounds)?);
            }
            let kinds = [MemoryKind::Device, MemoryKind::Pinned];
            let trips = pings(&lab, "bench_proxy_ping", &rounds, &kinds, !bench.is_one_process())?;
            for (all, one) in all.trips.iter_mut().zip(trips) {
                all.push(one);
            }
        }
        Ok(all)
    };
    let mut config = bench.world(RANKS)?;
    config.comm.routes = Routes::Network;
    let ranks = bench.on_ranks(config, measure)?;
    let [first, second] = &ranks[..] else { return Err("a rank returned no figures".into()) };
    let whole = |repeats: &[Result<Figure, String>]| repeats.iter().cloned().collect::<Result<Vec<_>, _>>();
    let bare: Vec<(Way, Result<Figure, String>)> = (ways.iter().zip(first.bare.iter().zip(&second.bare)))
        .map(|(&way, (one, other))| (way, whole(one).and_then(|one| Ok(both(&one, &whole(other)?)))))
        .collect();
    let of = |way: Way| {
        // A way is unusable if values arrived after their signal.
        let is_right = |figure: &&Figure| figure.wrong == Some(0);
        bare.iter().find_map(|(other, figure)| figure.as_ref().ok().filter(is_right).filter(|_| *other == way)).copied()
    };
    let by_driver = Way::TO_GPU.into_iter().filter(|way| way.needs_engine()).filter_map(|way| Some((way, of(way)?)));
    let by_driver = by_driver.min_by(|one, other| one.1.value.total_cmp(&other.1.value));
    let goal = |bound| bench.counts(RANKS).then_some(Goal::AtMost(bound));
    let trips = |which: usize| both(&first.trips[which], &second.trips[which]);
    let mut in_gpu = Row::new("put_value with signal and back, GPU memory", trips(0), "us").main(true);
    if let Some((way, figure)) = by_driver {
        let what = "bare round trip, best way of the driver";
        in_gpu = in_gpu.beside(Kind::Floor, what, figure, goal(1.2), None).by(way.text());
    }
    if let Some(figure) = of(Way::Mailbox) {
        // Virtual GPUs have no driver.
        let kind = if by_driver.is_some() { Kind::Other } else { Kind::Floor };
        in_gpu = in_gpu.beside(kind, format!("bare round trip: {}", Way::Mailbox.text()), figure, None, None);
    }
    let mut in_pinned = Row::new("put_value with signal and back, host memory", trips(1), "us").main(true);
    for (way, kind, goal) in [(Way::Notify, Kind::Floor, goal(1.3)), (Way::Store, Kind::Other, None)] {
        if let Some(figure) = of(way) {
            in_pinned = in_pinned.beside(kind, format!("bare round trip: {}", way.text()), figure, goal, None);
        }
    }
    let mut table = bench.table("Proxy round trip", RANKS, vec![in_gpu, in_pinned]);
    if !bench.is_one_process() {
        table.notes.push("The floors of the proxy are measured in one process only".to_owned());
    }
    for (way, figure) in &bare {
        match figure {
            Ok(figure) if figure.wrong == Some(0) => {
                table.rows.push(Row::new(format!("bare round trip: {}", way.text()), *figure, "us"));
            }
            Ok(figure) => {
                let (wrong, of) = (figure.wrong.unwrap_or(0), 2 * repeats as u64 * rounds.checked);
                table
                    .notes
                    .push(format!("Unusable: {}: {wrong} of {of} values arrived after their signal", way.text()));
            }
            Err(error) => table.notes.push(format!("Not measured: {}: {error}", way.text())),
        }
    }
    Ok(vec![table])
}
