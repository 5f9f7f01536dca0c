// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels that run on the GPUs of this process.
//!
//! The driver accepts kernels that cannot be resident together; one of them then never starts. So this module adds up
//! the launches and refuses a launch that does not fit. It also detects when no kernel runs, which is when [deferred
//! frees](super::deferred) are carried out.

use super::context::Context;
use super::deferred::{Resource, free};
use super::driver::{BesideCaptures, check, error, new_event};
use super::resident::Stays;
use crate::{GpuError, lock};
use cudarc::driver::sys::{self, CUevent, CUresult, CUstream};
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// The most kernels that one GPU runs at a time: as many as it has streams for.
const MOST_KERNELS: usize = 128;

/// The most failures of frees that are kept.
const MOST_FAILURES: usize = 16;

/// The pause of a launch that waits for resident kernels.
const NAP: Duration = Duration::from_micros(20);

/// The launches on a stream that have not ended, as far as known. They run one after another.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) ordinal: usize,
    /// The device object that launched them.
    pub(super) owner: u64,
    /// The number of the stream.
    stream: u64,
    /// The number of the last launch on it.
    last: u64,
    /// It is recorded after each launch.
    ended: CUevent,
    /// Their shapes, each once: blocks, and the blocks of that shape that one processor holds.
    shapes: Vec<(u64, u64)>,
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
}

/// Returns the clusters that streams may take from others, wherever their blocks are. Each running block takes a whole
/// number of places of one processor, at most as many as its share of the processor needs. Each place may be of another
/// cluster. `running`: for each stream the shapes that it may run, one at a time: blocks, and how many one processor
/// holds.
fn taken<'a>(running: impl Iterator<Item = &'a [(u64, u64)]>, fit: Fit) -> u64 {
    let taken = |&(blocks, per_processor): &(u64, u64)| {
        let each = fit.per_processor.div_ceil(per_processor.max(1));
        blocks.saturating_mul(each).min(fit.clusters)
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
            // Safety: the event is alive as long as it is in the list.
            let busy = unsafe { sys::cuEventQuery(running.ended) } == CUresult::CUDA_ERROR_NOT_READY;
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
        let shape = (kernel.blocks, kernel.fit.per_processor);
        let place = (launch.context.ordinal, launch.owner, launch.number);
        !launch.captured
            && !kernel.cooperative
            && self.residents.is_empty()
            && self.repeats(place, launch.before, shape)
    }

    /// Returns whether the stream at `place` (GPU, owner, stream) has one entry, which a launch of this shape after
    /// `before` would leave as it is, and nothing runs beside it.
    fn repeats(&self, place: (usize, u64, u64), before: &Before, shape: (u64, u64)) -> bool {
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
        let away: Vec<(u64, u64)> = self.away(ordinal, asks).collect();
        let all = running.saturating_add(taken(away.chunks(1), fit));
        fit.clusters.saturating_sub(all).saturating_mul(fit.cluster)
    }

    /// Returns the streams of a GPU with kernels that may run at the same time as a launch after `before`.
    fn beside(&self, ordinal: usize, before: &Before) -> impl Iterator<Item = &Running> {
        let is_before = |running: &Running| before.get(&running.stream).is_some_and(|last| *last >= running.last);
        self.running.iter().filter(move |running| running.ordinal == ordinal && !is_before(running))
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

/// Launches by `start` if there is room. No free is carried out meanwhile.
pub(super) fn launch(launch: &Launch<'_>, start: impl FnOnce() -> CUresult) -> Result<(), GpuError> {
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
            Some(()) => return Ok(()),
            None => std::thread::sleep(NAP),
        }
    }
}

fn launch_in(state: &mut State, launch: &Launch<'_>, start: impl FnOnce() -> CUresult) -> Result<(), GpuError> {
    let context = launch.context;
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
        return check("launch a kernel into a graph", start());
    }
    let &Launch { owner, number, .. } = launch;
    let same = |running: &Running| (running.ordinal, running.owner, running.stream) == (context.ordinal, owner, number);
    let known = state.running.iter().position(same);
    let ended = match known {
        Some(at) => state.running[at].ended,
        None => new_event(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)?,
    };
    // Safety: both handles are alive.
    let recorded = start().result().and_then(|()| unsafe { sys::cuEventRecord(ended, launch.stream) }.result());
    if let Err(failure) = recorded {
        if known.is_none() {
            // Safety: no other code has the event.
            unsafe { sys::cuEventDestroy_v2(ended) };
        }
        return Err(error("launch a kernel", failure));
    }
    let shapes = launch.kernels.iter().map(|kernel| (kernel.blocks, kernel.fit.per_processor));
    let resident = state.residents.iter_mut().find(|stays| stays.owner == owner);
    if let (Some(stays), Some((blocks, per_processor))) = (resident, shapes.clone().next()) {
        stays.room = Some((context.ordinal, blocks, per_processor));
    }
    let last = launch.before.get(&number).copied().unwrap_or(0);
    let at = known.unwrap_or_else(|| {
        state.running.push(Running {
            ordinal: context.ordinal,
            owner,
            stream: number,
            last,
            ended,
            shapes: Vec::new(),
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
    for shape in shapes {
        if !running.shapes.contains(&shape) {
            running.shapes.push(shape);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_runs_takes_the_most_room_that_it_may() {
        let fit = |per_processor, cluster, clusters| Fit { per_processor, cluster, clusters };
        let room = |running: &[&[(u64, u64)]], fit: Fit| {
            fit.clusters.saturating_sub(taken(running.iter().copied(), fit)).saturating_mul(fit.cluster)
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
            let each: Vec<&[(u64, u64)]> = running.chunks(1).collect();
            assert_eq!(room(&each, fit), expected, "{running:?}, {fit:?}");
        }
        // Those of one stream run one after another.
        assert_eq!(room(&[&[(100, 2), (4, 1)]], fit(2, 1, 264)), 164);
    }

    #[test]
    fn only_a_launch_that_repeats_the_last_one_alone_needs_no_query() {
        let entry = |stream, last, shapes: &[(u64, u64)]| Running {
            ordinal: 0,
            owner: 1,
            stream,
            last,
            ended: std::ptr::null_mut(),
            shapes: shapes.to_vec(),
            meets: BTreeSet::new(),
        };
        let mut state = State::new();
        let own = Before::from([(7, 3)]);
        assert!(!state.repeats((0, 1, 7), &own, (4, 2)), "the first launch");
        state.running.push(entry(7, 2, &[(4, 2)]));
        assert!(state.repeats((0, 1, 7), &own, (4, 2)));
        assert!(!state.repeats((0, 1, 7), &own, (5, 2)), "another shape");
        assert!(!state.repeats((0, 2, 7), &own, (4, 2)), "another owner");
        // A stream that may run beside it, on the same GPU or on another one.
        state.running.push(Running { ordinal: 16, ..entry(8, 5, &[(1, 1)]) });
        assert!(state.repeats((0, 1, 7), &own, (4, 2)));
        state.running[1].ordinal = 0;
        assert!(!state.repeats((0, 1, 7), &own, (4, 2)), "another stream");
        assert!(!state.repeats((0, 1, 7), &Before::from([(7, 3), (8, 4)]), (4, 2)), "a later launch of it");
        let ordered = Before::from([(7, 3), (8, 5)]);
        assert!(state.repeats((0, 1, 7), &ordered, (4, 2)));
        state.running[0].meets.insert(8);
        assert!(!state.repeats((0, 1, 7), &ordered, (4, 2)), "it has met another stream");
        state.running[0] = entry(7, 2, &[(4, 2), (9, 1)]);
        assert!(!state.repeats((0, 1, 7), &own, (4, 2)), "the stream ran a larger kernel");
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
