// SPDX-License-Identifier: MIT OR Apache-2.0
//! What runs on the GPUs of this process, and what waits until nothing does.
//!
//! The driver accepts kernels that cannot be resident together, and then one of them never starts; so launches are added
//! up here. And it waits for running kernels when memory is freed or a module unloaded, while those kernels may wait for
//! whoever called: so such calls are put off until no kernel runs, and are never made by a progress thread, which only
//! drops things into the list.

use super::context::{Context, lock};
use super::driver::{BesideCaptures, check, describe};
use super::lane::Lane;
use super::pages;
use crate::flat::Place;
use crate::shared::HostPages;
use crate::{GpuError, Resident};
use cudarc::driver::sys::{self, CUevent, CUmodule, CUresult, CUstream};
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// Most kernels that one GPU runs at a time.
const MOST_KERNELS: usize = 128;

/// No device object.
const NOBODY: u64 = 0;

/// How long a kernel that stays is waited for when it was asked to park.
const PARKING: Duration = Duration::from_millis(100);

/// How long a launch waits for a kernel that stays to run again.
const COMING_BACK: Duration = Duration::from_secs(2);

/// Most failures of frees that are remembered.
const MOST_FAILURES: usize = 16;

/// A kernel that was launched.
#[derive(Debug)]
struct Running {
    ordinal: usize,
    /// Which device object launched it.
    owner: u64,
    ended: CUevent,
    blocks: u64,
    /// Blocks of its shape that one processor holds.
    per_processor: u64,
}

/// Something to free once no kernel runs.
#[derive(Debug)]
pub(super) enum Grave {
    /// Device memory.
    Device(Arc<Context>, u64),
    /// Pinned memory.
    Pinned(Arc<Context>, u64),
    /// A stream.
    Stream(Arc<Context>, CUstream),
    /// An event.
    Event(Arc<Context>, CUevent),
    /// A module.
    Module(Arc<Context>, CUmodule),
    /// A lane that may still copy.
    Lane(Lane),
    /// Memory that is mapped at a place.
    Placed(Arc<Context>, Place),
    /// Memory that is mapped at addresses of its own: first byte, and bytes.
    Alone(Arc<Context>, u64, u64),
    /// Pinned memory in a file.
    PinnedFile(Arc<Context>, HostPages),
    /// Addresses where nothing is mapped any more.
    Addresses(Arc<Context>, u64, u64),
    /// A page of I/O memory, by its address in this process.
    Pages(Arc<Context>, u64),
}

// Safety: handles of the driver's, which any thread may use.
unsafe impl Send for Grave {}

/// A kernel that stays until it is asked to park.
#[derive(Debug)]
struct Stays {
    /// The device object that launches it, and nothing else.
    owner: u64,
    resident: Weak<dyn Resident>,
    /// GPU and shape of its last launch.
    room: Option<(usize, u64, u64)>,
}

#[derive(Debug, Default)]
struct State {
    running: Vec<Running>,
    stays: Vec<Stays>,
    /// Number of those who want kernels that stay to be parked.
    holds: u32,
    /// By GPU: most local memory of a thread that a launch has asked for.
    local: BTreeMap<usize, u32>,
    graves: Vec<Grave>,
    failures: Vec<GpuError>,
}

// Safety: handles of the driver's, which any thread may use.
unsafe impl Send for State {}

static STATE: Mutex<Option<State>> = Mutex::new(None);

fn with<T>(work: impl FnOnce(&mut State) -> T) -> T {
    let mut state = lock(&STATE);
    let state = state.get_or_insert_default();
    if state.running.is_empty() && state.graves.is_empty() {
        // Nothing to ask the driver.
        return work(state);
    }
    let _beside = BesideCaptures::begin();
    work(state)
}

/// How many blocks of a shape a GPU holds when nothing else runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Fit {
    /// Blocks that one processor holds.
    pub(super) per_processor: u64,
    /// Blocks of a cluster; 1 if there are none.
    pub(super) cluster: u64,
    /// Clusters that the GPU holds.
    pub(super) clusters: u64,
}

/// A launch that is about to happen.
#[derive(Debug)]
pub(super) struct Launch<'a> {
    pub(super) context: &'a Arc<Context>,
    pub(super) owner: u64,
    pub(super) stream: CUstream,
    pub(super) blocks: u64,
    pub(super) fit: Fit,
    /// All blocks must be resident at once.
    pub(super) cooperative: bool,
    /// Bytes of local memory that a thread takes.
    pub(super) local: u32,
    /// It becomes part of a graph, and runs when that is launched, which is not seen here.
    pub(super) captured: bool,
}

/// Blocks that fit beside what runs, wherever its blocks are: each of them takes a whole number of places from one
/// processor, at most as many as its share of the processor needs, and each place may be of another cluster. `running`:
/// blocks, and how many of their shape one processor holds.
fn room(running: impl Iterator<Item = (u64, u64)>, fit: Fit) -> u64 {
    let taken = running.map(|(blocks, per_processor)| {
        let each = fit.per_processor.div_ceil(per_processor.max(1));
        blocks.saturating_mul(each).min(fit.clusters)
    });
    fit.clusters.saturating_sub(taken.fold(0, u64::saturating_add)).saturating_mul(fit.cluster)
}

impl State {
    /// Forgets kernels that have ended. A kernel that failed has ended.
    fn reap(&mut self) {
        self.running.retain(|running| {
            // Safety: the event is alive as long as it is in the list.
            let busy = unsafe { sys::cuEventQuery(running.ended) } == CUresult::CUDA_ERROR_NOT_READY;
            if !busy {
                // Safety: as above; it is in the list no more.
                unsafe { sys::cuEventDestroy_v2(running.ended) };
            }
            busy
        });
    }

    /// Blocks that fit on GPU `ordinal` beside what runs, but for what `asks` has launched, and what will run again.
    fn room(&self, ordinal: usize, fit: Fit, asks: u64) -> u64 {
        let running = self.running.iter().filter(|running| running.ordinal == ordinal);
        let running = running.map(|running| (running.blocks, running.per_processor));
        room(running.chain(self.away(ordinal, asks)), fit)
    }

    /// Shapes of the kernels that stay on GPU `ordinal`, but for what `asks` launches, and are to run and do not.
    fn away(&self, ordinal: usize, asks: u64) -> impl Iterator<Item = (u64, u64)> {
        let away = self.stays.iter().filter(move |stays| {
            let runs = self.running.iter().any(|running| running.owner == stays.owner);
            stays.owner != asks && !runs && stays.resident.upgrade().is_some_and(|resident| resident.keeps_room())
        });
        let there = away.filter_map(|stays| stays.room).filter(move |(there, ..)| *there == ordinal);
        there.map(|(_, blocks, per_processor)| (blocks, per_processor))
    }

    /// Whether no kernel runs. Kernels that stay are asked to park if no other runs.
    fn is_quiet(&mut self) -> bool {
        self.reap();
        let stays = |running: &Running| self.stays.iter().any(|stays| stays.owner == running.owner);
        let all_stay = self.running.iter().all(stays);
        all_stay && self.park(|_| true)
    }

    /// Asks kernels that stay, of those GPUs, to park. Whether they have.
    fn park(&mut self, of: impl Fn(usize) -> bool) -> bool {
        self.stays.retain(|stays| stays.resident.strong_count() > 0);
        let start = Instant::now();
        loop {
            self.reap();
            let running = self.running.iter().filter(|running| of(running.ordinal));
            let owners: Vec<u64> = running.map(|running| running.owner).collect();
            let mut any = false;
            // Again and again, as its owner may be about to launch it.
            for stays in self.stays.iter().filter(|stays| owners.contains(&stays.owner)) {
                if let Some(resident) = stays.resident.upgrade() {
                    resident.ask_to_park();
                    any = true;
                }
            }
            if !any || start.elapsed() > PARKING {
                return !any;
            }
            std::thread::yield_now();
        }
    }

    /// Makes sure that a launch which needs more local memory than any before does not wait for a kernel that stays.
    fn make_way(&mut self, launch: &Launch<'_>) -> Result<(), GpuError> {
        let ordinal = launch.context.ordinal;
        let known = self.local.get(&ordinal).copied().unwrap_or(0);
        if launch.local > known && !self.park(|gpu| gpu == ordinal) {
            let reason = format!(
                "it needs {} bytes of local memory a thread, more than any before it, and a kernel that stays has not \
                 parked within {PARKING:?}",
                launch.local
            );
            return Err(GpuError::Driver { context: "launch a kernel", reason });
        }
        self.local.insert(ordinal, known.max(launch.local));
        Ok(())
    }

    /// What is free now and still to be dropped, which is the caller's to do, as that may put off more.
    fn bury(&mut self) -> Vec<Box<dyn Any>> {
        let mut rests = Vec::new();
        if self.graves.is_empty() || !self.is_quiet() {
            return rests;
        }
        let copying = |grave: &Grave| matches!(grave, Grave::Lane(lane) if lane.is_idle() == Ok(false));
        if self.graves.iter().any(copying) {
            // Its copies may use what lies in the other graves.
            return rests;
        }
        for grave in std::mem::take(&mut self.graves) {
            match free(grave) {
                Ok(rest) => rests.extend(rest),
                Err(error) if self.failures.len() < MOST_FAILURES => self.failures.push(error),
                Err(_) => {}
            }
        }
        rests
    }
}

/// Frees it. What comes back is free then, and still to be dropped.
fn free(grave: Grave) -> Result<Option<Box<dyn Any>>, GpuError> {
    let (Grave::Device(context, _)
    | Grave::Pinned(context, _)
    | Grave::Stream(context, _)
    | Grave::Event(context, _)
    | Grave::Module(context, _)
    | Grave::Placed(context, _)
    | Grave::Alone(context, ..)
    | Grave::PinnedFile(context, _)
    | Grave::Addresses(context, ..)
    | Grave::Pages(context, _)) = &grave
    else {
        if let Grave::Lane(lane) = grave {
            lane.give_back();
        }
        return Ok(None);
    };
    let entered = context.enter();
    if let Grave::Pages(_, first) = &grave {
        return entered.and_then(|()| pages::end(*first));
    }
    // Safety: each handle came from the driver and is in one grave only; nobody uses it any more.
    let freed = entered.and_then(|()| unsafe {
        match &grave {
            Grave::Device(_, address) => check("free device memory", sys::cuMemFree_v2(*address)),
            Grave::Pinned(_, address) => {
                check("free pinned memory", sys::cuMemFreeHost(*address as usize as *mut core::ffi::c_void))
            }
            Grave::Stream(_, stream) => check("end a stream", sys::cuStreamDestroy_v2(*stream)),
            Grave::Event(_, event) => check("end an event", sys::cuEventDestroy_v2(*event)),
            Grave::Module(_, module) => check("unload a module", sys::cuModuleUnload(*module)),
            Grave::Placed(_, place) => {
                check("unmap device memory", sys::cuMemUnmap(place.address(), place.bytes() as usize))
            }
            Grave::Alone(_, start, bytes) => check("unmap device memory", sys::cuMemUnmap(*start, *bytes as usize))
                .and_then(|()| check("give back addresses", sys::cuMemAddressFree(*start, *bytes as usize))),
            Grave::PinnedFile(_, pages) => {
                let start = std::ptr::with_exposed_provenance_mut(pages.start() as usize);
                check("give back pinned memory", sys::cuMemHostUnregister(start))
            }
            Grave::Addresses(_, start, bytes) => {
                check("give back addresses", sys::cuMemAddressFree(*start, *bytes as usize))
            }
            Grave::Lane(_) | Grave::Pages(..) => Ok(()),
        }
    });
    match (grave, freed) {
        (Grave::Placed(_, place), Ok(())) => Ok(Some(Box::new(place))),
        (Grave::Placed(_, place), Err(error)) => {
            // The memory is still mapped: nobody gets this place again.
            place.leak();
            Err(error)
        }
        (Grave::PinnedFile(_, pages), Err(error)) => {
            // GPUs may reach the pages still: they stay mapped.
            std::mem::forget(pages);
            Err(error)
        }
        (_, freed) => freed.map(|()| None),
    }
}

/// Has it freed later.
pub(super) fn put_off(grave: Grave) {
    with(|state| state.graves.push(grave));
}

/// Frees what was put off, if no kernel runs.
pub(super) fn bury() {
    drop(with(State::bury));
}

/// What went wrong when things were freed, and forgets it.
pub(super) fn failures() -> Vec<GpuError> {
    with(|state| std::mem::take(&mut state.failures))
}

/// What this device object launches from now on stays until it is asked to park.
pub(super) fn keep_resident(owner: u64, resident: Weak<dyn Resident>) {
    with(|state| state.stays.push(Stays { owner, resident, room: None }));
}

/// Keeps kernels that stay from running.
#[derive(Debug)]
pub(super) struct Hold(());

impl Hold {
    /// Until this is dropped. Kernels that have not parked in time run on.
    pub(super) fn new() -> Self {
        with(|state| {
            state.holds += 1;
            state.park(|_| true);
        });
        Self(())
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        with(|state| state.holds -= 1);
    }
}

/// Number of kernels that a device object launched and that have not ended.
pub(super) fn running(owner: u64) -> usize {
    with(|state| {
        state.reap();
        state.running.iter().filter(|running| running.owner == owner).count()
    })
}

/// Blocks of a shape that fit beside what runs now.
pub(super) fn free_blocks(context: &Context, fit: Fit) -> u64 {
    with(|state| {
        state.reap();
        state.room(context.ordinal, fit, NOBODY)
    })
}

/// Launches by `start` if there is room. Nothing is freed meanwhile.
///
/// A cooperative launch waits until the kernels that stay on its GPU run: blocks are spread over all processors that are
/// free, and would leave no whole one to a kernel that comes later.
pub(super) fn launch(launch: &Launch<'_>, start: impl FnOnce() -> CUresult) -> Result<(), GpuError> {
    let (begun, mut start) = (Instant::now(), Some(start));
    loop {
        let done = with(|state| {
            state.reap();
            if launch.cooperative && state.away(launch.context.ordinal, launch.owner).next().is_some() {
                return (begun.elapsed() > COMING_BACK).then(|| {
                    let reason = format!("a kernel that stays has not come back within {COMING_BACK:?}");
                    Err(GpuError::Driver { context: "launch a kernel", reason })
                });
            }
            start.take().map(|start| launch_in(state, launch, start))
        });
        match done {
            Some(done) => return done,
            None => std::thread::sleep(Duration::from_micros(20)),
        }
    }
}

fn launch_in(state: &mut State, launch: &Launch<'_>, start: impl FnOnce() -> CUresult) -> Result<(), GpuError> {
    let context = launch.context;
    if launch.cooperative {
        let resident = state.room(context.ordinal, launch.fit, launch.owner);
        if launch.blocks > resident {
            return Err(GpuError::NotResident { blocks: launch.blocks, resident, device: context.full_name() });
        }
        let beside = state.running.iter().filter(|running| running.ordinal == context.ordinal).count();
        if beside >= MOST_KERNELS {
            return Err(GpuError::LaunchLimit {
                what: "a number of kernels at a time",
                asked: beside as u64 + 1,
                limit: MOST_KERNELS as u64,
                whose: context.full_name(),
            });
        }
    }
    if state.holds > 0 && state.stays.iter().any(|stays| stays.owner == launch.owner) {
        return Err(GpuError::Parked { device: context.full_name() });
    }
    state.make_way(launch)?;
    context.enter()?;
    if launch.captured {
        // An event recorded now would be part of the graph too, and never say when a kernel ends.
        return check("launch a kernel into a graph", start());
    }
    let mut ended = std::ptr::null_mut();
    let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
    // Safety: writes one pointer.
    check("make an event", unsafe { sys::cuEventCreate(&raw mut ended, flags) })?;
    // Safety: both handles are alive.
    let code = match start() {
        CUresult::CUDA_SUCCESS => unsafe { sys::cuEventRecord(ended, launch.stream) },
        code => code,
    };
    if code != CUresult::CUDA_SUCCESS {
        // Safety: the event is nobody else's.
        unsafe { sys::cuEventDestroy_v2(ended) };
        return Err(GpuError::Driver { context: "launch a kernel", reason: describe(code) });
    }
    let &Launch { owner, blocks, fit: Fit { per_processor, .. }, .. } = launch;
    if let Some(stays) = state.stays.iter_mut().find(|stays| stays.owner == owner) {
        stays.room = Some((context.ordinal, blocks, per_processor));
    }
    state.running.push(Running { ordinal: context.ordinal, owner, ended, blocks, per_processor });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_runs_takes_the_most_room_that_it_may() {
        let fit = |per_processor, cluster, clusters| Fit { per_processor, cluster, clusters };
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
            assert_eq!(room(running.iter().copied(), fit), expected, "{running:?}, {fit:?}");
        }
    }
}
