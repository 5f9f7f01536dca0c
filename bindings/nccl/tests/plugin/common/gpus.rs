// SPDX-License-Identifier: MIT OR Apache-2.0
//! Virtual GPUs whose lanes work late, on a thread of their own, in an order that no lane knows of another.

use gin_gpu::copier::Ticket;
use gin_gpu::flat::FlatRange;
use gin_gpu::lane::{Lane, Mark, Value};
use gin_gpu::virt::VirtualDevice;
use gin_gpu::{Device, GpuError, Memory, MemoryKind, lock};
use gin_nccl::gpus::{Gpus, Place, use_gpus};
use std::any::Any;
use std::cell::Cell;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

/// The number of GPUs. Each test has some of its own. The last one has no peer access to the others.
pub(crate) const GPUS: usize = 256;

thread_local! {
    /// The GPU that the thread has chosen.
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
    /// Lanes that are made on this thread work late, not at once.
    static LATE: Cell<bool> = const { Cell::new(true) };
    /// Lanes that are made on this thread belong to this group of queues.
    static ENGINE: Cell<usize> = const { Cell::new(0) };
}

pub(crate) fn choose(gpu: Option<usize>) {
    CURRENT.set(gpu);
}

pub(crate) fn current() -> Option<usize> {
    CURRENT.get()
}

/// Has lanes that are made on this thread from now on work at once.
pub(crate) fn work_at_once() {
    LATE.set(false);
}

/// Returns the first of `count` GPUs that no other test uses.
pub(crate) fn own_gpus(count: usize) -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let first = NEXT.fetch_add(count, Ordering::Relaxed);
    assert!(first + count < GPUS);
    first
}

/// The bytes from which on a copy takes longer than other work.
const LONG: u64 = 64 << 10;

/// The number of lanes that were made so far.
pub(crate) static LANES: AtomicUsize = AtomicUsize::new(0);

/// The work of a lane.
#[derive(Debug)]
enum Work {
    Copy { to: u64, from: u64, bytes: u64 },
    Store { to: u64, bytes: Vec<u8> },
    Add { word: u64, amount: u64 },
    Wait { mark: u64, ticket: Ticket },
    Finish { values: Vec<Value>, end: Ticket },
}

#[derive(Debug)]
struct Queue {
    work: Mutex<VecDeque<Work>>,
    reached: Arc<AtomicU64>,
    fault: Mutex<Option<Fault>>,
}

/// The fault of the next call of a lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    /// The call returns an error.
    Error,
    /// The call panics.
    Panic,
    /// Work that was started has failed, and no end is reached any more.
    Broken,
}

/// The lanes of the ranks of one test, and the thread that does their work.
#[derive(Debug)]
pub(crate) struct Engine {
    queues: Mutex<Vec<Arc<Queue>>>,
    is_held: Mutex<bool>,
}

static ENGINES: Mutex<Vec<Arc<Engine>>> = Mutex::new(Vec::new());

fn engine(number: usize) -> Arc<Engine> {
    lock(&ENGINES)[number].clone()
}

impl Engine {
    /// Makes the engine of lanes that are made on this thread from now on.
    pub(crate) fn start(seed: u64) -> Arc<Self> {
        let engine = Arc::new(Self { queues: Mutex::default(), is_held: Mutex::new(false) });
        let mut all = lock(&ENGINES);
        ENGINE.set(all.len());
        all.push(engine.clone());
        let running = engine.clone();
        std::thread::spawn(move || {
            let mut random = oorandom::Rand64::new(seed.into());
            loop {
                if !running.step(&mut random) {
                    std::thread::sleep(std::time::Duration::from_micros(50));
                }
            }
        });
        engine
    }

    /// Holds all work back, or lets it go on.
    pub(crate) fn hold(&self, held: bool) {
        *lock(&self.is_held) = held;
    }

    /// Lets the next calls of all lanes have a fault.
    pub(crate) fn fault(&self, fault: Option<Fault>) {
        lock(&self.queues).iter().for_each(|queue| *lock(&queue.fault) = fault);
    }

    /// Takes the copies that are held back, as pairs of the destination and the length, and does none of them.
    pub(crate) fn discard(&self) -> Vec<(u64, u64)> {
        let mut copies = Vec::new();
        for queue in lock(&self.queues).iter() {
            for work in std::mem::take(&mut *lock(&queue.work)) {
                match work {
                    Work::Copy { to, bytes, .. } => copies.push((to, bytes)),
                    Work::Finish { end, .. } => queue.reached.store(end, Ordering::SeqCst),
                    _ => {}
                }
            }
        }
        copies
    }

    /// Does a step of one lane, unless the work is held back. Returns whether there was one.
    fn step(&self, random: &mut oorandom::Rand64) -> bool {
        let held = lock(&self.is_held);
        let long = random.rand_range(0..16) == 0;
        !*held && self.step_of(random, long)
    }

    /// Does a step of a lane that `random` chooses. Returns whether there was one.
    pub(crate) fn step_held(&self, random: &mut oorandom::Rand64) -> bool {
        self.step_of(random, true)
    }

    /// Does a step of a lane; a long copy only if it is `long`.
    fn step_of(&self, random: &mut oorandom::Rand64, long: bool) -> bool {
        let queues = lock(&self.queues).clone();
        if queues.is_empty() {
            return false;
        }
        let first = random.rand_range(0..queues.len() as u64) as usize;
        (0..queues.len()).any(|at| {
            let queue = &queues[(first + at) % queues.len()];
            let mut work = lock(&queue.work);
            let may = match work.front() {
                None => false,
                _ if *lock(&queue.fault) == Some(Fault::Broken) => false,
                Some(Work::Wait { mark, ticket }) => {
                    // Safety: words of marks stay as long as work waits for them.
                    let mark = unsafe { AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(*mark as usize)) };
                    // As GPUs compare.
                    mark.load(Ordering::SeqCst).wrapping_sub(*ticket).cast_signed() >= 0
                }
                Some(Work::Copy { bytes, .. }) => long || *bytes < LONG,
                Some(_) => true,
            };
            if may && let Some(work) = work.pop_front() {
                queue.carry_out(work);
            }
            may
        })
    }
}

impl Queue {
    fn carry_out(&self, work: Work) {
        let device = VirtualDevice::memory_only(0);
        let mut lane = device.lane().unwrap();
        // Safety: as the caller of the lane promised.
        unsafe {
            match work {
                Work::Copy { to, from, bytes } => lane.copy(to, from, bytes).unwrap(),
                Work::Store { to, bytes } => lane.store(to, &bytes).unwrap(),
                Work::Add { word, amount } => lane.add(word, amount).unwrap(),
                Work::Wait { .. } => {}
                Work::Finish { values, end } => {
                    lane.finish(&values).unwrap();
                    self.reached.store(end, Ordering::SeqCst);
                }
            }
        }
    }
}

/// A lane whose work an engine does.
#[derive(Debug)]
struct LateLane {
    queue: Arc<Queue>,
    mark: Arc<Mark>,
    last: Ticket,
}

/// The words of marks, which stay.
static MARKS: Mutex<Vec<Arc<AtomicU64>>> = Mutex::new(Vec::new());

impl LateLane {
    fn new() -> Self {
        let reached = Arc::new(AtomicU64::new(0));
        let address = reached.as_ptr().expose_provenance() as u64;
        lock(&MARKS).push(reached.clone());
        // Safety: the word is in the value that keeps it, and only grows.
        let mark = Arc::new(unsafe { Mark::new(address, reached.clone()) });
        let queue = Arc::new(Queue { work: Mutex::default(), reached, fault: Mutex::default() });
        lock(&engine(ENGINE.get()).queues).push(queue.clone());
        Self { queue, mark, last: 0 }
    }

    fn push(&self, work: Work) -> Result<(), GpuError> {
        let fault = *lock(&self.queue.fault);
        match fault {
            Some(Fault::Error) => {
                Err(GpuError::Unsupported { device: "virtual GPU".to_owned(), what: "work after a fault" })
            }
            Some(Fault::Panic) => panic!("a fault of the test"),
            _ => {
                lock(&self.queue.work).push_back(work);
                Ok(())
            }
        }
    }
}

impl Lane for LateLane {
    fn mark(&self) -> &Arc<Mark> {
        &self.mark
    }

    unsafe fn copy(&mut self, to: u64, from: u64, bytes: u64) -> Result<(), GpuError> {
        let (to_place, from_place) = (gpus().find(to), gpus().find(from));
        assert!(to_place != from_place || to_place == Place::Host, "this copy would need a free SM");
        self.push(Work::Copy { to, from, bytes })
    }

    unsafe fn store(&mut self, to: u64, bytes: &[u8]) -> Result<(), GpuError> {
        self.push(Work::Store { to, bytes: bytes.to_vec() })
    }

    unsafe fn add(&mut self, word: u64, amount: u64) -> Result<(), GpuError> {
        self.push(Work::Add { word, amount })
    }

    fn wait(&mut self, mark: &Mark, ticket: Ticket) -> Result<(), GpuError> {
        self.push(Work::Wait { mark: mark.address(), ticket })
    }

    unsafe fn finish(&mut self, values: &[Value]) -> Result<Ticket, GpuError> {
        let end = self.last + 1;
        self.push(Work::Finish { values: values.to_vec(), end })?;
        self.last = end;
        Ok(end)
    }

    fn check(&self) -> Result<(), GpuError> {
        match *lock(&self.queue.fault) {
            Some(Fault::Broken) => Err(GpuError::Unsupported { device: "virtual GPU".to_owned(), what: "go on" }),
            _ => Ok(()),
        }
    }
}

/// The GPUs, and the memory that NCCL or the program has on each.
#[derive(Debug)]
pub(crate) struct VirtualGpus {
    devices: Vec<Arc<dyn Device>>,
    known: Mutex<Vec<Known>>,
}

/// Memory whose place is known. Other memory has its addresses once its owner is gone.
#[derive(Debug)]
struct Known {
    range: Range<u64>,
    place: Place,
    owner: Weak<dyn Any + Send + Sync>,
}

static ALL: OnceLock<Arc<VirtualGpus>> = OnceLock::new();

/// Returns the GPUs of this process, which the plugin uses.
pub(crate) fn gpus() -> &'static Arc<VirtualGpus> {
    ALL.get_or_init(|| {
        let devices = (0..GPUS as u32).map(|gpu| VirtualDevice::memory_only(gpu) as Arc<dyn Device>).collect();
        let gpus = Arc::new(VirtualGpus { devices, known: Mutex::default() });
        assert!(use_gpus(Box::new(Shared(gpus.clone()))));
        gpus
    })
}

impl VirtualGpus {
    /// Allocates memory of a GPU as NCCL or the program does; `shared`: so that other processes can map it.
    pub(crate) fn allocate(&self, gpu: usize, bytes: u64, shared: bool) -> Arc<Memory> {
        self.know(gpu, Memory::for_ranks(&self.devices[gpu], MemoryKind::Device, bytes, shared).unwrap())
    }

    /// Allocates two parts with consecutive addresses, of `bytes` bytes each, that other processes can map.
    pub(crate) fn allocate_two(&self, gpu: usize, bytes: u64) -> [Arc<Memory>; 2] {
        let device = &self.devices[gpu];
        let range = FlatRange::reserve(&**device, 1).unwrap().unwrap();
        [0, bytes].map(|offset| {
            let place = range.take(0, offset, bytes).unwrap();
            self.know(gpu, Memory::placed(device, place, bytes, true).unwrap())
        })
    }

    fn know(&self, gpu: usize, memory: Arc<Memory>) -> Arc<Memory> {
        let keep = memory.clone() as Arc<dyn Any + Send + Sync>;
        self.place(memory.address(), memory.bytes(), Place::Gpu(gpu), &keep);
        memory
    }

    /// Returns the place of memory.
    fn find(&self, address: u64) -> Place {
        let known = lock(&self.known);
        let mut found = known.iter().filter(|memory| memory.range.contains(&address));
        let found = found.find(|memory| memory.owner.strong_count() > 0);
        found.map_or(Place::Cpu, |memory| memory.place)
    }

    /// Notes the place of memory that exists as long as `keep`.
    pub(crate) fn place(&self, address: u64, bytes: u64, place: Place, keep: &Arc<dyn Any + Send + Sync>) {
        let mut known = lock(&self.known);
        known.retain(|memory| memory.owner.strong_count() > 0);
        known.push(Known { range: address..address + bytes, place, owner: Arc::downgrade(keep) });
    }
}

#[derive(Debug)]
struct Shared(Arc<VirtualGpus>);

/// Makes another GPU the current one, as calls of the driver do.
fn disturb(gpu: usize) {
    CURRENT.set(Some(gpu));
}

struct Restore(Option<usize>);

impl Drop for Restore {
    fn drop(&mut self) {
        CURRENT.set(self.0);
    }
}

impl Gpus for Shared {
    fn current(&self) -> Result<Option<usize>, GpuError> {
        Ok(CURRENT.get())
    }

    fn place(&self, address: u64) -> Result<Place, GpuError> {
        Ok(self.0.find(address))
    }

    unsafe fn reach(&self, gpu: usize, address: u64, bytes: u64) -> Result<(), GpuError> {
        disturb(gpu);
        if address.is_multiple_of(16) {
            return Ok(());
        }
        let reason = "these GPUs reach host memory at multiples of 16 only".to_owned();
        Err(GpuError::Foreign { address, bytes, device: format!("virtual GPU {gpu}"), reason })
    }

    unsafe fn files(&self, gpu: usize, address: u64, bytes: u64) -> Result<Vec<Arc<Memory>>, GpuError> {
        disturb(gpu);
        let refuse = |at| {
            let (device, reason) = (format!("virtual GPU {gpu}"), "it is in no file".to_owned());
            GpuError::Foreign { address: at, bytes, device, reason }
        };
        let (mut at, mut files) = (address, Vec::new());
        while at < address + bytes {
            let known = lock(&self.0.known);
            let mut owners = known.iter().filter(|memory| memory.range.contains(&at));
            let memory = owners.find_map(|memory| memory.owner.upgrade()?.downcast::<Memory>().ok());
            let memory = memory.filter(|memory| memory.file().is_some()).ok_or_else(|| refuse(at))?;
            at = memory.address() + memory.bytes();
            files.push(memory);
        }
        Ok(files)
    }

    fn device(&self, gpu: usize) -> Result<Arc<dyn Device>, GpuError> {
        Ok(self.0.devices[gpu].clone())
    }

    fn copies_reach(&self, from: usize, to: usize) -> Result<bool, GpuError> {
        Ok(from == to || (from != GPUS - 1 && to != GPUS - 1))
    }

    fn memory(&self, gpu: usize, kind: MemoryKind, bytes: u64) -> Result<Arc<Memory>, GpuError> {
        disturb(gpu);
        if kind == MemoryKind::Device {
            return Ok(self.0.allocate(gpu, bytes, false));
        }
        let memory = Memory::new(&self.0.devices[gpu], kind, bytes)?;
        self.0.place(memory.address(), bytes, Place::Host, &(memory.clone() as Arc<dyn Any + Send + Sync>));
        Ok(memory)
    }

    fn lane(&self, gpu: usize) -> Result<Box<dyn Lane>, GpuError> {
        disturb(gpu);
        LANES.fetch_add(1, Ordering::Relaxed);
        if LATE.get() { Ok(Box::new(LateLane::new())) } else { self.0.devices[gpu].lane() }
    }

    fn free_dropped(&self) {}

    fn keep_current(&self) -> Result<Box<dyn Any>, GpuError> {
        Ok(Box::new(Restore(CURRENT.get())))
    }
}
