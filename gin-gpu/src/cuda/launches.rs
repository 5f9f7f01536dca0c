// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels that run on the GPUs of this process.
//!
//! The driver accepts kernels that cannot be resident together; one of them then never starts. So this module adds up
//! the launches and refuses a launch that does not fit. It also detects when no kernel runs, which is when [deferred
//! frees](super::deferred) are carried out.

use super::context::Context;
use super::deferred::{Resource, free};
use super::driver::{BesideCaptures, check, error, new_event};
use super::raw::is_capturing;
use super::resident::Stays;
use crate::{GpuError, lock};
use cudarc::driver::sys::{self, CUevent, CUresult, CUstream};
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// The most kernels that one GPU runs at a time: as many as it has streams for.
const MOST_KERNELS: usize = 128;

/// The most failures of frees that are kept.
const MOST_FAILURES: usize = 16;

/// The pause of a launch that waits for resident kernels.
const NAP: Duration = Duration::from_micros(20);

/// Blocks of a kernel, and how many of them one processor holds.
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
    last: u64,
    /// It is recorded after each launch, unless `asks` is set.
    ended: CUevent,
    /// The stream itself, to ask whether the launches have ended. An event between two kernels would keep a dependent
    /// one from starting early.
    asks: Option<CUstream>,
    /// Their shapes, each once.
    shapes: Vec<Pair>,
    /// The last launch.
    newest: Blocks,
    /// The numbers of the streams of whose launches one may run at the same time as one of these.
    meets: BTreeSet<u64>,
}

/// Launches that come before others by the order of streams and events: for each stream, by its number, the number of
/// its last such launch.
pub(super) type Before = BTreeMap<u64, u64>;

/// The kernels of one GPU; of several, if the process has more than [`STATES`]. Ranks of different GPUs launch without
/// waiting for each other.
#[derive(Debug)]
pub(super) struct State {
    pub(super) running: Vec<Running>,
    /// The resident kernels.
    pub(super) residents: Vec<Stays>,
    /// By GPU: the most local memory of a thread that a launch beside resident kernels has needed.
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

/// The frees that wait until no kernel runs on any GPU, and their errors.
#[derive(Debug)]
struct Deferred {
    resources: Vec<(Arc<Context>, Resource)>,
    failures: Vec<GpuError>,
}

// Safety: as above.
unsafe impl Send for Deferred {}

static STATES: [Mutex<State>; 16] = [const { Mutex::new(State::new()) }; 16];

/// Locked after the states.
static DEFERRED: Mutex<Deferred> = Mutex::new(Deferred { resources: Vec::new(), failures: Vec::new() });

/// Returns the state of GPU `ordinal`, locked.
fn state(ordinal: usize) -> MutexGuard<'static, State> {
    lock(&STATES[ordinal % STATES.len()])
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
    /// The blocks that one processor holds.
    pub(super) per_processor: u64,
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

    /// Returns the most bytes of local memory of a thread.
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
    /// Its stream has dependent kernels, so no event is recorded behind it.
    pub(super) unmarked: bool,
}

/// Returns the clusters that streams may take from others, wherever their blocks are. Each running block takes a whole
/// number of places of one processor, at most as many as its share of the processor needs. Each place may be of another
/// cluster. `running`: for each stream the pairs that it may run, one at a time.
fn taken<'a>(running: impl Iterator<Item = &'a [Pair]>, fit: Fit) -> u64 {
    let taken = |pair: &Pair| {
        let each =
            |&(blocks, per_processor): &Blocks| blocks.saturating_mul(fit.per_processor.div_ceil(per_processor.max(1)));
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
                None => unsafe { sys::cuEventQuery(running.ended) },
            };
            let busy = code == CUresult::CUDA_ERROR_NOT_READY;
            if !busy {
                // Safety: as above; the event is in the list no more.
                unsafe { sys::cuEventDestroy_v2(running.ended) };
            }
            busy
        });
    }

    /// Returns whether a launch may come without queries for kernels that have ended, because these would not change
    /// the sums. This is so if no room is counted for the launch, no kernels of other streams may run beside it, and
    /// the entry of its stream would be replaced by an equal one.
    fn needs_no_reap(&self, launch: &Launch<'_>) -> bool {
        let [kernel] = launch.kernels else { return false };
        let shape = [(kernel.blocks, kernel.fit.per_processor), NONE];
        let place = (launch.context.ordinal, launch.owner, launch.number);
        !launch.captured
            && !kernel.cooperative
            && !kernel.dependent
            && self.residents.is_empty()
            && self.repeats(place, launch.before, shape)
    }

    /// Returns whether the stream at `place` (GPU, owner, stream) has one entry, which a launch of this shape after
    /// `before` would leave as it is, and nothing runs beside it.
    fn repeats(&self, place: (usize, u64, u64), before: &Before, shape: Pair) -> bool {
        let is_equal = |own: &Running| {
            (own.ordinal, own.owner, own.stream) == place && own.shapes == [shape] && own.meets.is_empty()
        };
        self.beside(place.0, before).next().is_none() && self.running.iter().any(is_equal)
    }

    /// Returns how many blocks fit on GPU `ordinal` beside the running kernels, except the ones `before` them, and
    /// beside the parked resident kernels, which will run again. Resident kernels that `asks` launches do not count.
    fn room(&self, ordinal: usize, fit: Fit, before: &Before, asks: Option<u64>) -> u64 {
        let meets = |one: &&Running, other: &&Running| one.meets.contains(&other.stream);
        let groups = groups(self.beside(ordinal, before), meets);
        let group = |group: &Vec<&Running>| taken(group.iter().map(|running| running.shapes.as_slice()), fit);
        let running = groups.iter().map(group).max().unwrap_or(0);
        let away: Vec<Pair> = self.away(ordinal, asks).map(|blocks| [blocks, NONE]).collect();
        let all = running.saturating_add(taken(away.chunks(1), fit));
        fit.clusters.saturating_sub(all).saturating_mul(fit.cluster)
    }

    /// Returns the streams of a GPU with kernels that may run at the same time as a launch after `before`.
    fn beside(&self, ordinal: usize, before: &Before) -> impl Iterator<Item = &Running> {
        let is_before = |running: &Running| before.get(&running.stream).is_some_and(|last| *last >= running.last);
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

/// Defers a free until no kernel runs.
pub(super) fn defer(context: &Arc<Context>, resource: Resource) {
    lock(&DEFERRED).resources.push((context.clone(), resource));
}

/// Carries out deferred frees, if no kernel runs on any GPU.
pub(super) fn free_deferred() {
    let mut rests: Vec<Box<dyn Any>> = Vec::new();
    if lock(&DEFERRED).resources.is_empty() {
        return;
    }
    {
        // No launch until the frees are done.
        let mut states: Vec<_> = STATES.iter().map(lock).collect();
        let _beside = BesideCaptures::begin();
        if !states.iter_mut().all(|state| state.is_quiet()) {
            return;
        }
        let mut deferred = lock(&DEFERRED);
        let is_copying = deferred.resources.iter().any(|(_, resource)| match resource {
            Resource::Lane(lane) => lane.is_idle() == Ok(false),
            _ => false,
        });
        if is_copying {
            // Its copies may use memory whose free is deferred too.
            return;
        }
        let resources = std::mem::take(&mut deferred.resources);
        drop(deferred);
        for (context, resource) in resources {
            match free(&context, resource) {
                Ok(rest) => rests.push(rest),
                Err(error) => {
                    let failures = &mut lock(&DEFERRED).failures;
                    if failures.len() < MOST_FAILURES {
                        failures.push(error);
                    }
                }
            }
        }
    }
    // Without the locks, because that may defer more.
    drop(rests);
}

/// Returns the errors of freeing memory, streams and modules since the last call.
pub fn take_failures() -> Vec<GpuError> {
    std::mem::take(&mut lock(&DEFERRED).failures)
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

/// Records the end of a stream's launches, as far as that is not done yet, before the stream ends or is captured.
pub(super) fn mark(context: &Context, number: u64) -> Result<(), GpuError> {
    context.enter()?;
    with(context.ordinal, |state| {
        let mut own = state.running.iter_mut().filter(|running| running.stream == number);
        own.try_for_each(|running| match running.asks.take() {
            // Safety: both are alive.
            Some(stream) => check("record an event", unsafe { sys::cuEventRecord(running.ended, stream) }),
            None => Ok(()),
        })
    })
}

/// Launches by `start` if there is room. No free is carried out meanwhile. Passes whether a dependent kernel may run
/// beside the one before it to `start`, and returns that.
pub(super) fn launch(launch: &Launch<'_>, start: impl FnOnce(bool) -> CUresult) -> Result<bool, GpuError> {
    let (mut start, mut since) = (Some(start), None);
    loop {
        let done = {
            let mut state = state(launch.context.ordinal);
            let reaps = !state.needs_no_reap(launch);
            let _beside = (reaps && !state.running.is_empty()).then(BesideCaptures::begin);
            if reaps {
                state.reap();
            }
            if state.must_wait(launch, &mut since)? {
                None
            } else {
                start.take().map(|start| launch_in(&mut state, launch, start)).transpose()?
            }
        };
        match done {
            Some(overlaps) => return Ok(overlaps),
            None => std::thread::sleep(NAP),
        }
    }
}

fn launch_in(state: &mut State, launch: &Launch<'_>, start: impl FnOnce(bool) -> CUresult) -> Result<bool, GpuError> {
    let (context, overlaps) = (launch.context, state.overlaps(launch));
    for kernel in launch.kernels.iter().filter(|kernel| kernel.cooperative) {
        let resident = state.room(context.ordinal, kernel.fit, launch.before, Some(launch.owner));
        if kernel.blocks > resident {
            return Err(GpuError::NotResident { blocks: kernel.blocks, resident, device: context.full_name() });
        }
    }
    if launch.is_cooperative() {
        let beside = state.beside(context.ordinal, launch.before).count();
        if beside >= MOST_KERNELS {
            return Err(GpuError::LaunchLimit {
                what: "a number of streams with kernels at a time",
                asked: beside as u64 + 1,
                limit: MOST_KERNELS as u64,
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
    let ended = match known {
        Some(at) => state.running[at].ended,
        None => new_event(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)?,
    };
    let recorded = start(overlaps).result().and_then(|()| match launch.unmarked {
        true => Ok(()),
        // Safety: both handles are alive.
        false => unsafe { sys::cuEventRecord(ended, launch.stream) }.result(),
    });
    if let Err(failure) = recorded {
        if known.is_none() {
            // Safety: no other code has the event.
            unsafe { sys::cuEventDestroy_v2(ended) };
        }
        return Err(error("launch a kernel", failure));
    }
    let resident = state.residents.iter_mut().find(|stays| stays.owner == owner);
    if let (Some(stays), Some(kernel)) = (resident, launch.kernels.first()) {
        stays.room = Some((context.ordinal, kernel.blocks, kernel.fit.per_processor));
    }
    let last = launch.before.get(&number).copied().unwrap_or(0);
    let at = known.unwrap_or_else(|| {
        state.running.push(Running {
            ordinal: context.ordinal,
            owner,
            stream: number,
            last,
            ended,
            asks: None,
            shapes: Vec::new(),
            newest: NONE,
            meets: BTreeSet::new(),
        });
        state.running.len() - 1
    });
    let others: BTreeSet<u64> = state.beside(context.ordinal, launch.before).map(|running| running.stream).collect();
    for running in &mut state.running {
        if running.stream != number && others.contains(&running.stream) {
            running.meets.insert(number);
        }
    }
    let running = &mut state.running[at];
    running.meets.extend(others.iter().filter(|&&other| other != number));
    running.last = last;
    running.asks = launch.unmarked.then_some(launch.stream);
    running.follow(launch.kernels, overlaps);
    Ok(overlaps)
}

impl Running {
    /// Adds kernels, which follow the newest one; the first may run beside it if it is dependent and `overlaps`.
    fn follow(&mut self, kernels: &[Wanted], overlaps: bool) {
        for (at, kernel) in kernels.iter().enumerate() {
            let blocks = (kernel.blocks, kernel.fit.per_processor);
            // Within a graph the capture has decided it.
            let is_beside = kernel.dependent && (overlaps || at > 0);
            let pair = [blocks, if is_beside { self.newest } else { NONE }];
            if !self.shapes.contains(&pair) {
                self.shapes.push(pair);
            }
            self.newest = blocks;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_runs_takes_the_most_room_that_it_may() {
        let fit = |per_processor, cluster, clusters| Fit { per_processor, cluster, clusters };
        let room = |running: &[&[Blocks]], fit: Fit| {
            let pairs = |stream: &&[Blocks]| stream.iter().map(|&blocks| [blocks, NONE]).collect::<Vec<_>>();
            let running: Vec<Vec<Pair>> = running.iter().map(pairs).collect();
            let taken = taken(running.iter().map(Vec::as_slice), fit);
            fit.clusters.saturating_sub(taken).saturating_mul(fit.cluster)
        };
        for (running, fit, expected) in [
            // 132 processors.
            (&[][..], fit(2, 1, 264), 264),
            (&[(4, 2)], fit(2, 1, 264), 260),
            // One block that fills a processor takes both places of it.
            (&[(4, 1)], fit(2, 1, 264), 256),
            (&[(4, 32)], fit(2, 1, 264), 260),
            (&[(1000, 1), (1000, 1)], fit(2, 1, 264), 0),
            (&[(u64::MAX, 1), (u64::MAX, 1)], fit(2, 1, 264), 0),
            // Each of them may be in the way of another cluster.
            (&[], fit(1, 4, 32), 128),
            (&[(3, 1)], fit(1, 4, 32), 116),
            (&[(40, 1)], fit(1, 4, 32), 0),
            (&[(2, 1)], fit(0, 1, 0), 0),
        ] {
            let each: Vec<&[Blocks]> = running.chunks(1).collect();
            assert_eq!(room(&each, fit), expected, "{running:?}, {fit:?}");
        }
        // Those of one stream run one after another.
        assert_eq!(room(&[&[(100, 2), (4, 1)]], fit(2, 1, 264)), 164);
    }

    fn entry(stream: u64, last: u64, shapes: &[Blocks]) -> Running {
        Running {
            ordinal: 0,
            owner: 1,
            stream,
            last,
            ended: std::ptr::null_mut(),
            asks: None,
            shapes: shapes.iter().map(|&blocks| [blocks, NONE]).collect(),
            newest: NONE,
            meets: BTreeSet::new(),
        }
    }

    #[test]
    fn a_dependent_kernel_takes_room_beside_the_one_before_it_and_no_other() {
        let fit = Fit { per_processor: 2, cluster: 1, clusters: 264 };
        let kernel = |blocks, dependent| Wanted { blocks, fit, cooperative: false, dependent, local: 0 };
        let takes = |launches: &[(Wanted, bool)]| {
            let mut running = entry(7, 0, &[]);
            launches.iter().for_each(|(kernel, overlaps)| running.follow(&[*kernel], *overlaps));
            taken([running.shapes.as_slice()].into_iter(), fit)
        };
        let (large, small, next) = (kernel(40, false), kernel(10, false), kernel(20, true));
        assert_eq!(takes(&[(next, true)]), 20, "nothing is before it");
        assert_eq!(takes(&[(large, false), (next, true)]), 60);
        assert_eq!(takes(&[(large, false), (next, false)]), 40, "it was launched in order");
        assert_eq!(takes(&[(large, false), (small, false), (next, true)]), 40, "30 for the last two");
        assert_eq!(takes(&[(large, false), (next, true), (next, true), (next, true)]), 60);
        assert_eq!(takes(&[(kernel(200, false), false), (kernel(200, true), true)]), 264, "all that there is");
        // The kernels of a graph: the first follows what is before the graph, which has ended.
        let mut graph = entry(7, 0, &[]);
        graph.follow(&[large], false);
        graph.follow(&[next, small, next], false);
        assert_eq!(graph.shapes, [[(40, 2), NONE], [(20, 2), NONE], [(10, 2), NONE], [(20, 2), (10, 2)]]);
    }

    #[test]
    fn only_a_launch_that_repeats_the_last_one_alone_needs_no_query() {
        let repeated = |blocks| [blocks, NONE];
        let mut state = State::new();
        let own = Before::from([(7, 3)]);
        assert!(!state.repeats((0, 1, 7), &own, repeated((4, 2))), "the first launch");
        state.running.push(entry(7, 2, &[(4, 2)]));
        assert!(state.repeats((0, 1, 7), &own, repeated((4, 2))));
        assert!(!state.repeats((0, 1, 7), &own, repeated((5, 2))), "another shape");
        assert!(!state.repeats((0, 2, 7), &own, repeated((4, 2))), "another owner");
        // A stream that may run beside it, on the same GPU or on another one.
        state.running.push(Running { ordinal: 16, ..entry(8, 5, &[(1, 1)]) });
        assert!(state.repeats((0, 1, 7), &own, repeated((4, 2))));
        state.running[1].ordinal = 0;
        assert!(!state.repeats((0, 1, 7), &own, repeated((4, 2))), "another stream");
        assert!(!state.repeats((0, 1, 7), &Before::from([(7, 3), (8, 4)]), repeated((4, 2))), "a later launch of it");
        let ordered = Before::from([(7, 3), (8, 5)]);
        assert!(state.repeats((0, 1, 7), &ordered, repeated((4, 2))));
        state.running[0].meets.insert(8);
        assert!(!state.repeats((0, 1, 7), &ordered, repeated((4, 2))), "it has met another stream");
        state.running[0] = entry(7, 2, &[(4, 2), (9, 1)]);
        assert!(!state.repeats((0, 1, 7), &own, repeated((4, 2))), "the stream ran a larger kernel");
    }

    #[test]
    fn streams_that_meet_directly_or_through_others_are_one_group() {
        let of = |pairs: &[(u32, u32)]| {
            let meets = |&a: &u32, &b: &u32| pairs.contains(&(a, b)) || pairs.contains(&(b, a));
            let mut groups = groups(1..=5, meets);
            groups.iter_mut().for_each(|group| group.sort());
            groups.sort();
            groups
        };
        assert_eq!(of(&[]), [[1], [2], [3], [4], [5]]);
        assert_eq!(of(&[(1, 3), (2, 5)]), [vec![1, 3], vec![2, 5], vec![4]]);
        // The last one joins groups that were apart.
        assert_eq!(of(&[(1, 5), (2, 5), (3, 4)]), [vec![1, 2, 5], vec![3, 4]]);
    }
}
