// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels that run on the GPUs of this process.
//!
//! The driver accepts kernels that cannot be resident together; one of them then never starts. So this module adds up
//! the launches and refuses a launch that does not fit. It also detects when no kernel runs, which is when [deferred
//! frees](super::deferred) are carried out.
//!
//! # Why the kernels that are admitted can be resident together
//!
//! Claim: when a cooperative kernel is admitted, all its blocks have places beside every block of this process that may
//! run at the same time and wait. Because:
//!
//! 1. *Nothing that runs is forgotten.* A launch is in `State::running` from before the driver has it until its event,
//!    or its stream, says that it has ended (`reap`). A stream has one entry for all its launches.
//! 2. *A stream counts with the largest that it may run at a time.* Its kernels run one after another, except that a
//!    dependent kernel may run beside the kernel before it, and beside no earlier one: that is a `Pair`. `shapes` keeps
//!    each pair that has not been seen to end, and the largest sum counts.
//! 3. *Streams that may meet are added.* Two streams are in one group if launches of both may run at the same time
//!    (`meets`); no launch of a group runs beside one of another group, so `room` takes the largest group. Launches
//!    that precede the new one by the order of streams and events (`Before`) have ended when it starts, and do not
//!    count.
//! 4. *A block counts at least as much as it takes:* as many places of an SM as its share of the SM needs, rounded up,
//!    and each of these places may be of another cluster.
//! 5. *Two launches do not use the same room.* The decision and the launch are under the write lock of the GPU's state.
//!    A launch under the read lock (`repeated`) has a shape that its stream's entry counts already, and meets only
//!    streams that it is known to meet; a cooperative one takes this way only if no other stream runs.
//! 6. *Resident kernels that are parked will run again*, so `room` counts them (`away`).
//!
//! Not covered: launches of other libraries and processes; graphs, for which there must be room when they are captured,
//! but which are not counted when they run; and kernels that wait without being cooperative.

use super::context::Context;
use super::deferred;
use super::driver::{BesideCaptures, check, error, is_capturing, new_event};
use crate::GpuError;
use crate::resident::Resident;
use cudarc::driver::sys::{self, CUevent, CUresult, CUstream};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};
use std::time::Duration;

/// The maximum number of kernels that one GPU runs at a time. A later one starts when one of them ends.
const MAX_KERNELS: usize = 128;

/// The pause of a launch that waits for resident kernels.
const NAP: Duration = Duration::from_micros(20);

/// Blocks of a kernel, and how many of them one SM holds.
pub(super) type Blocks = (u64, u64);

/// A kernel, and the one before it on the stream if both may run at the same time, else [`NONE`].
type Pair = [Blocks; 2];

/// No kernel.
const NONE: Blocks = (0, 1);

/// The launches on a stream that have not ended, as far as known. They run one after another. Only a dependent kernel
/// may run beside the one before it. It never runs beside an earlier one, because `let_dependents_start` of
/// `gin_device::sys` waits for that.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) ordinal: usize,
    /// The device object that launched them.
    pub(super) owner: u64,
    /// The number of the stream.
    stream: u64,
    /// The number of the last launch on it.
    last: AtomicU64,
    /// Recorded after the launches, unless `asks` is set.
    ended: Option<CUevent>,
    /// The stream itself, to ask whether the launches have ended.
    asks: Option<CUstream>,
    /// Their shapes, each once.
    shapes: Vec<Pair>,
    /// The place of the last launch among the shapes.
    newest: AtomicUsize,
    /// The numbers of the streams of whose launches one may run at the same time as one of these.
    meets: BTreeSet<u64>,
}

/// Launches that come before others by the order of streams and events: for each stream, by its number, the number of
/// its last such launch.
pub(super) type Before = BTreeMap<u64, u64>;

/// A kernel that runs until it is asked to park.
#[derive(Debug)]
pub(super) struct Stays {
    /// The device object that launches it and nothing else.
    pub(super) owner: u64,
    pub(super) resident: Weak<dyn Resident>,
    /// The GPU and the shape of its last launch.
    pub(super) room: Option<(usize, u64, u64)>,
}

/// The kernels of one GPU; of several, if the process has more than [`STATES`]. Ranks of different GPUs launch without
/// waiting for each other.
#[derive(Debug)]
pub(super) struct State {
    pub(super) running: Vec<Running>,
    /// The resident kernels.
    pub(super) residents: Vec<Stays>,
    /// By GPU: the maximum of local memory of a thread that a launch beside resident kernels has needed.
    pub(super) local: BTreeMap<usize, u32>,
    /// The number of [`Hold`](super::resident::Hold)s.
    pub(super) holds: u32,
}

impl State {
    const fn new() -> Self {
        Self { running: Vec::new(), residents: Vec::new(), local: BTreeMap::new(), holds: 0 }
    }
}

// Safety: handles of the driver, which any thread may use.
unsafe impl Send for State {}
// Safety: as above.
unsafe impl Sync for State {}

/// A launch that repeats one only reads, so that ranks that share a GPU do not wait for each other.
static STATES: [RwLock<State>; 16] = [const { RwLock::new(State::new()) }; 16];

/// Returns the state of GPU `ordinal`, locked.
fn state(ordinal: usize) -> RwLockWriteGuard<'static, State> {
    write(&STATES[ordinal % STATES.len()])
}

fn write(state: &'static RwLock<State>) -> RwLockWriteGuard<'static, State> {
    state.write().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the state of GPU `ordinal` for launches that change nothing in it.
fn read(ordinal: usize) -> RwLockReadGuard<'static, State> {
    STATES[ordinal % STATES.len()].read().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `work` on the state of GPU `ordinal`.
pub(super) fn with<T>(ordinal: usize, work: impl FnOnce(&mut State) -> T) -> T {
    let mut state = state(ordinal);
    if state.running.is_empty() {
        // No query of the driver is needed.
        return work(&mut state);
    }
    let _beside = BesideCaptures::begin();
    work(&mut state)
}

/// Runs `work` on the states of all GPUs, one after another.
pub(super) fn with_each(mut work: impl FnMut(&mut State)) {
    (0..STATES.len()).for_each(|state| with(state, &mut work));
}

/// The blocks of a shape that a GPU holds when no other kernel runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Fit {
    /// The blocks that one SM holds.
    pub(super) per_sm: u64,
    /// The blocks of a cluster; 1 without clusters.
    pub(super) cluster: u64,
    /// The clusters that the GPU holds.
    pub(super) clusters: u64,
}

/// The room that a kernel needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub(super) blocks: u64,
    pub(super) fit: Fit,
    /// All blocks must be resident at once.
    pub(super) cooperative: bool,
    /// It may run beside the kernel before it.
    pub(super) dependent: bool,
    /// The bytes of local memory of a thread.
    pub(super) local: u32,
}

impl Launch<'_> {
    /// Returns whether all blocks of a kernel must be resident at once.
    pub(super) fn is_cooperative(&self) -> bool {
        self.kernels.iter().any(|kernel| kernel.cooperative)
    }

    /// Returns the maximum number of bytes of local memory of a thread.
    pub(super) fn local(&self) -> u32 {
        self.kernels.iter().map(|kernel| kernel.local).max().unwrap_or(0)
    }
}

/// A launch that will follow.
#[derive(Debug)]
pub(super) struct Launch<'a> {
    pub(super) context: &'a Arc<Context>,
    pub(super) owner: u64,
    pub(super) stream: CUstream,
    /// The number of the stream.
    pub(super) number: u64,
    /// The launches that it follows, its own stream's included.
    pub(super) before: &'a Before,
    /// Its kernels, which run one after another.
    pub(super) kernels: &'a [Wanted],
    /// It becomes part of a graph, and runs when the graph is launched, which is not seen here.
    pub(super) captured: bool,
    /// No event is recorded behind it. The stream is asked instead, or an event is recorded later by [`mark`].
    pub(super) unmarked: bool,
    /// The stream was idle since the last launch, or is due to be asked: a shape that it no longer runs is forgotten.
    pub(super) trims: bool,
}

/// Returns the clusters that streams may take from others, wherever their blocks are. Each running block takes a whole
/// number of places of one SM, at most as many as its share of the SM needs. Each place may be of another
/// cluster. `running`: for each stream the pairs that it may run, one at a time.
fn taken<'a>(running: impl Iterator<Item = &'a [Pair]>, fit: Fit) -> u64 {
    let taken = |pair: &Pair| {
        let each = |&(blocks, per_sm): &Blocks| blocks.saturating_mul(fit.per_sm.div_ceil(per_sm.max(1)));
        pair.iter().map(each).fold(0, u64::saturating_add).min(fit.clusters)
    };
    running.map(|shapes| shapes.iter().map(taken).max().unwrap_or(0)).fold(0, u64::saturating_add)
}

/// Divides streams into groups, so that no launch of a group runs at the same time as one of another group. `meets`
/// returns whether launches of two streams may run at the same time.
fn groups<T>(streams: impl Iterator<Item = T>, meets: impl Fn(&T, &T) -> bool) -> Vec<Vec<T>> {
    let mut groups: Vec<Vec<T>> = Vec::new();
    for stream in streams {
        let joins = |group: &mut Vec<T>| group.iter().any(|other| meets(&stream, other));
        let mut joined: Vec<T> = groups.extract_if(.., joins).flatten().collect();
        joined.push(stream);
        groups.push(joined);
    }
    groups
}

impl State {
    /// Forgets kernels that have ended. A kernel that failed has ended.
    pub(super) fn reap(&mut self) {
        self.running.retain(|running| {
            let code = match running.asks {
                // Its earlier launches are not part of the graph, but the driver answers only afterwards.
                Some(stream) if is_capturing(stream) == Ok(true) => CUresult::CUDA_ERROR_NOT_READY,
                // Safety: the stream is alive, because its owner calls `mark` before it ends.
                Some(stream) => unsafe { sys::cuStreamQuery(stream) },
                // Safety: the event is alive as long as it is in the list.
                None => running.ended.map_or(CUresult::CUDA_SUCCESS, |ended| unsafe { sys::cuEventQuery(ended) }),
            };
            let busy = code == CUresult::CUDA_ERROR_NOT_READY;
            if let (false, Some(ended)) = (busy, running.ended) {
                // Safety: as above; the event is in the list no more.
                unsafe { sys::cuEventDestroy_v2(ended) };
            }
            busy
        });
    }

    /// Returns the entry of the launch's stream, and the place of the last kernel's shape in it, if the launch would
    /// leave both as they are. It needs no room that is not counted already, and no queries for ended kernels.
    fn repeated(&self, launch: &Launch<'_>) -> Option<(&Running, usize)> {
        let place = (launch.context.ordinal, launch.owner, launch.number);
        let own = self.running.iter().find(|own| (own.ordinal, own.owner, own.stream) == place)?;
        if launch.captured || !self.residents.is_empty() || own.asks.is_some() != launch.unmarked {
            return None;
        }
        let mut beside = self.beside(place.0, launch.before).peekable();
        // A cooperative one waits for no kernel that it would be counted beside, which may have ended.
        let is_alone = beside.peek().is_none();
        let is_room = |kernel: &Wanted| {
            !kernel.cooperative || is_alone && kernel.blocks <= kernel.fit.clusters.saturating_mul(kernel.fit.cluster)
        };
        let may = launch.kernels.iter().all(|kernel| !kernel.dependent && is_room(kernel));
        (may && own.meets_all(beside)).then(|| own.repeats(launch.kernels, launch.trims)).flatten().map(|at| (own, at))
    }

    /// Returns how many blocks fit on GPU `ordinal` beside the running kernels, except the ones `before` them, and
    /// beside the parked resident kernels, which will run again. Resident kernels that `asks` launches do not count.
    fn room(&self, ordinal: usize, fit: Fit, before: &Before, asks: Option<u64>) -> u64 {
        let groups = self.groups(ordinal, before);
        let group = |group: &Vec<&Running>| taken(group.iter().map(|running| running.shapes.as_slice()), fit);
        let running = groups.iter().map(group).max().unwrap_or(0);
        let away: Vec<Pair> = self.away(ordinal, asks).map(|blocks| [blocks, NONE]).collect();
        let all = running.saturating_add(taken(away.chunks(1), fit));
        fit.clusters.saturating_sub(all).saturating_mul(fit.cluster)
    }

    /// Returns the streams of a GPU with kernels that may run at the same time as a launch after `before`, in groups:
    /// no launch of a group runs at the same time as one of another.
    fn groups(&self, ordinal: usize, before: &Before) -> Vec<Vec<&Running>> {
        groups(self.beside(ordinal, before), |one, other| one.meets.contains(&other.stream))
    }

    /// Returns the maximum number of streams of a GPU whose kernels may run at the same time as a launch after
    /// `before`.
    fn max_beside(&self, ordinal: usize, before: &Before) -> usize {
        self.groups(ordinal, before).iter().map(Vec::len).max().unwrap_or(0)
    }

    /// Returns the streams of a GPU with kernels that may run at the same time as a launch after `before`.
    fn beside(&self, ordinal: usize, before: &Before) -> impl Iterator<Item = &Running> {
        let is_before = |running: &Running| {
            let last = running.last.load(Ordering::Relaxed);
            before.get(&running.stream).is_some_and(|known| *known >= last)
        };
        self.running.iter().filter(move |running| running.ordinal == ordinal && !is_before(running))
    }

    /// Returns whether a dependent kernel may run beside the one before it. Its waiting blocks hold places, so it may
    /// not if kernels of other streams or ranks could need these.
    fn overlaps(&self, launch: &Launch<'_>) -> bool {
        launch.kernels.iter().any(|kernel| kernel.dependent)
            && self.residents.is_empty()
            && launch.context.users.load(Ordering::Relaxed) < 2
            && (launch.captured || self.beside(launch.context.ordinal, launch.before).next().is_none())
    }

    /// Returns whether no kernel runs. If only resident kernels run, asks them to park.
    fn is_quiet(&mut self) -> bool {
        self.reap();
        self.running.iter().all(|running| self.is_resident(running.owner)) && self.park(|_| true)
    }
}

/// Carries out deferred frees, if no kernel runs on any GPU.
pub(super) fn free_deferred() {
    if deferred::is_empty() {
        return;
    }
    let rests = {
        // No launch until the frees are done.
        let mut states: Vec<_> = STATES.iter().map(write).collect();
        let _beside = BesideCaptures::begin();
        if !states.iter_mut().all(|state| state.is_quiet()) {
            return;
        }
        deferred::free_all()
    };
    // Without the locks, because that may defer more.
    drop(rests);
}

/// Returns the number of streams with kernels that a device object of GPU `ordinal` launched and that have not ended.
pub(super) fn running(ordinal: usize, owner: u64) -> usize {
    with(ordinal, |state| {
        state.reap();
        state.running.iter().filter(|running| running.owner == owner).count()
    })
}

/// Returns the blocks of a shape that fit beside the running kernels.
pub(super) fn free_blocks(context: &Context, fit: Fit) -> u64 {
    with(context.ordinal, |state| {
        state.reap();
        state.room(context.ordinal, fit, &Before::new(), None)
    })
}

/// Records the end of a stream's launches, as far as that is not done yet. So it does before the stream ends, is
/// captured, or gets other work, which would delay the answer of the stream.
pub(super) fn mark(context: &Context, number: u64) -> Result<(), GpuError> {
    context.enter()?;
    with(context.ordinal, |state| {
        let mut own = state.running.iter_mut().filter(|running| running.stream == number);
        own.try_for_each(|running| {
            let Some(stream) = running.asks else { return Ok(()) };
            let ended = running.event()?;
            // Safety: both are alive.
            check("record an event", unsafe { sys::cuEventRecord(ended, stream) })?;
            running.asks = None;
            Ok(())
        })
    })
}

/// Launches by `start` if there is room. No free is carried out meanwhile. Passes whether a dependent kernel may run
/// beside the one before it to `start`, and returns that. Only one thread launches on a stream at a time.
pub(super) fn launch(launch: &Launch<'_>, start: impl Fn(bool) -> CUresult) -> Result<bool, GpuError> {
    let ordinal = launch.context.ordinal;
    if let Some((own, shape)) = read(ordinal).repeated(launch) {
        launch.start(own.ended, || start(false))?;
        own.newest.store(shape, Ordering::Relaxed);
        own.last.store(launch.last(), Ordering::Relaxed);
        return Ok(false);
    }
    let mut since = None;
    loop {
        {
            let mut state = state(ordinal);
            let _beside = (!state.running.is_empty()).then(BesideCaptures::begin);
            state.reap();
            if !state.must_wait(launch, &mut since)? {
                return launch_in(&mut state, launch, start);
            }
        }
        std::thread::sleep(NAP);
    }
}

impl Launch<'_> {
    /// Returns the number of the launch on its stream.
    fn last(&self) -> u64 {
        self.before.get(&self.number).copied().unwrap_or(0)
    }

    /// Launches, and records `ended` behind it, unless it is unmarked.
    fn start(&self, ended: Option<CUevent>, start: impl Fn() -> CUresult) -> Result<(), GpuError> {
        let launched = self.context.call(start).result().and_then(|()| match ended.filter(|_| !self.unmarked) {
            // Safety: both handles are alive.
            Some(ended) => self.context.call(|| unsafe { sys::cuEventRecord(ended, self.stream) }).result(),
            None => Ok(()),
        });
        launched.map_err(|failure| error("launch a kernel", failure))
    }
}

fn launch_in(state: &mut State, launch: &Launch<'_>, start: impl Fn(bool) -> CUresult) -> Result<bool, GpuError> {
    let (context, overlaps) = (launch.context, state.overlaps(launch));
    for kernel in launch.kernels.iter().filter(|kernel| kernel.cooperative) {
        let resident = state.room(context.ordinal, kernel.fit, launch.before, Some(launch.owner));
        if kernel.blocks > resident {
            return Err(GpuError::NotResident { blocks: kernel.blocks, resident, device: context.full_name() });
        }
    }
    if launch.is_cooperative() {
        // The others may wait for this one, which starts only when fewer run. Nothing tells gin which kernels wait, so
        // programs must see to it where none is cooperative.
        let beside = state.max_beside(context.ordinal, launch.before);
        if beside >= MAX_KERNELS {
            return Err(GpuError::LaunchLimit {
                what: "a number of streams with kernels at a time",
                asked: beside as u64 + 1,
                limit: MAX_KERNELS as u64,
                whose: context.full_name(),
            });
        }
    }
    state.make_way(launch)?;
    context.enter()?;
    if launch.captured {
        // An event recorded now would be part of the graph too, and never show the end of a kernel.
        return check("launch a kernel into a graph", start(overlaps)).map(|()| overlaps);
    }
    let &Launch { owner, number, .. } = launch;
    let same = |running: &Running| (running.ordinal, running.owner, running.stream) == (context.ordinal, owner, number);
    let known = state.running.iter().position(same);
    // Without a launch it has no shape, and its event was not recorded: the next query forgets it.
    let at = known.unwrap_or_else(|| {
        state.running.push(Running {
            ordinal: context.ordinal,
            owner,
            stream: number,
            last: AtomicU64::new(launch.last()),
            ended: None,
            asks: None,
            shapes: Vec::new(),
            newest: AtomicUsize::new(0),
            meets: BTreeSet::new(),
        });
        state.running.len() - 1
    });
    let ended = if launch.unmarked { None } else { Some(state.running[at].event()?) };
    launch.start(ended, || start(overlaps))?;
    let resident = state.residents.iter_mut().find(|stays| stays.owner == owner);
    if let (Some(stays), Some(kernel)) = (resident, launch.kernels.first()) {
        stays.room = Some((context.ordinal, kernel.blocks, kernel.fit.per_sm));
    }
    let others: BTreeSet<u64> = state.beside(context.ordinal, launch.before).map(|running| running.stream).collect();
    for running in &mut state.running {
        if running.stream != number && others.contains(&running.stream) {
            running.meets.insert(number);
        }
    }
    let running = &mut state.running[at];
    running.meets.extend(others.iter().filter(|&&other| other != number));
    running.last = AtomicU64::new(launch.last());
    running.asks = launch.unmarked.then_some(launch.stream);
    running.follow(launch.kernels, overlaps);
    Ok(overlaps)
}

impl Running {
    /// Returns whether all launches beside it are known to meet its own.
    fn meets_all<'a>(&self, mut beside: impl Iterator<Item = &'a Self>) -> bool {
        beside.all(|other| self.meets.contains(&other.stream) && other.meets.contains(&self.stream))
    }

    /// Returns the place of the last kernel's shape, if the shapes of all are known. A launch that `trims` wants no
    /// others to be there.
    fn repeats(&self, kernels: &[Wanted], trims: bool) -> Option<usize> {
        let mut last = None;
        for kernel in kernels {
            let shape = [(kernel.blocks, kernel.fit.per_sm), NONE];
            last = Some(self.shapes.iter().position(|known| *known == shape)?);
        }
        last.filter(|_| !trims || self.shapes.len() == 1)
    }

    /// Returns its event, which it makes at the first call. The context must be current.
    fn event(&mut self) -> Result<CUevent, GpuError> {
        if let Some(ended) = self.ended {
            return Ok(ended);
        }
        let made = new_event(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)?;
        self.ended = Some(made);
        Ok(made)
    }

    /// Adds kernels, which follow the newest one; the first may run beside it if it is dependent and `overlaps`.
    fn follow(&mut self, kernels: &[Wanted], overlaps: bool) {
        for (at, kernel) in kernels.iter().enumerate() {
            let blocks = (kernel.blocks, kernel.fit.per_sm);
            // Within a graph the capture has decided it.
            let is_beside = kernel.dependent && (overlaps || at > 0);
            let newest = self.shapes.get(self.newest.load(Ordering::Relaxed)).map_or(NONE, |[blocks, _]| *blocks);
            let pair = [blocks, if is_beside { newest } else { NONE }];
            let at = self.shapes.iter().position(|known| *known == pair).unwrap_or_else(|| {
                self.shapes.push(pair);
                self.shapes.len() - 1
            });
            self.newest = AtomicUsize::new(at);
        }
    }
}

#[cfg(test)]
mod tests;
