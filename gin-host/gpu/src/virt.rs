// SPDX-License-Identifier: MIT OR Apache-2.0
//! The virtual GPU as a device.
//!
//! Its memory is memory of this process. So every virtual GPU reaches every other one, and the CPU reaches all. It runs
//! the kernels that are linked into the program. A stream runs its work in order; work of different streams runs
//! concurrently.

mod lane;

use super::error::{CallError, check_memory_cgroup, out_of_host_memory, out_of_memory};
use super::flat::{FlatPlace, RawAddresses};
use super::launch::unknown;
use super::shared::{HostPages, check_file, new_file, page};
use super::{
    Allocation, Argument, Device, DeviceKind, Event, Function, GpuError, Graph, Keep, LaunchConfig, Limits,
    MappedPages, Memory, MemoryFile, MemoryKind, MemorySharing, Module, ModuleSource, NicAccess, Parameter, RawMemory,
    SharedFile, Stream,
};
use crate::copy::copy_shared;
use crate::{WAIT_IN_CAPTURE, lock};
use gin_boot::rt::{self, VirtualWorld};
use gin_device::exec::watch::{self, Event as Watched};
use gin_device::kernel::{KERNELS, KernelEntry};
use gin_virtual::{Grid, LaunchError, LaunchTicket, StreamId, VirtualGpu};
use rustix::io::Errno;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::collections::BTreeSet;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// The alignment of allocations: that of CUDA.
const ALIGN: usize = 256;

/// The bytes of a slot of reserved addresses that are tried first. Many communicators fit into 128 TiB of addresses,
/// and no machine has as much memory as a slot.
const LARGEST: u64 = 64 << 30;

/// The limits of the virtual GPU: those of CUDA GPUs.
const LIMITS: Limits = Limits { dynamic_shared: gin_virtual::SHARED_LIMIT as u32, ..Limits::CUDA };

/// The alignment that `malloc` gives. The standard library's allocator gets zeroed memory of this alignment from
/// `calloc`, which leaves fresh pages untouched; for a larger alignment it writes every byte.
const MALLOC_ALIGN: usize = 16;

/// Memory of this process.
#[derive(Debug)]
struct VirtualMemory {
    /// The start of the allocation, which is longer than the device memory.
    start: NonNull<u8>,
    layout: Layout,
}

impl VirtualMemory {
    /// Returns the address of the device memory, the first multiple of [`ALIGN`] of the allocation.
    fn address(&self) -> u64 {
        (self.start.as_ptr().expose_provenance() as u64).next_multiple_of(ALIGN as u64)
    }
}

// Safety: it is an address, and its users agree on the accesses to the memory.
unsafe impl Send for VirtualMemory {}
// Safety: as above.
unsafe impl Sync for VirtualMemory {}

impl RawMemory for VirtualMemory {}

impl Drop for VirtualMemory {
    fn drop(&mut self) {
        let address = self.start.as_ptr().addr() as u64;
        watch::event(Watched::Forget { address, bytes: self.layout.size() as u64 });
        // Safety: allocated with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

/// Memory of the program, which the device never frees. It drops its owner, if the program has passed one.
#[derive(derive_more::Debug)]
struct ForeignMemory {
    #[debug(skip)]
    _keep: Option<Keep>,
}

impl RawMemory for ForeignMemory {
    fn is_owner(&self) -> bool {
        self._keep.is_some()
    }
}

/// Makes host code of a virtual world wait and read the time by that world. Every device calls it when it is made.
pub fn install() {
    // Clocks and pauses of device code also work on the host, where no kernel runs.
    gin_virtual::install();
    rt::install(VirtualWorld {
        is_inside: gin_virtual::in_world,
        block_on: |waited, condition| {
            match waited {
                rt::Waited::At(site) => gin_virtual::block_on_at(site, condition),
                rt::Waited::For(what) => gin_virtual::block_on_for(what, condition),
            };
        },
        clock_ns: gin_virtual::clock_ns,
    });
}

/// A virtual GPU.
#[derive(Debug)]
pub struct VirtualDevice {
    index: u32,
    /// `None` for a device that has memory and runs no kernels.
    engine: Option<VirtualGpu>,
    running: Mutex<Vec<(StreamId, LaunchTicket)>>,
    streams: AtomicU32,
    this: Weak<Self>,
}

impl VirtualDevice {
    /// Makes a device whose kernels `engine` runs.
    pub fn new(engine: VirtualGpu) -> Arc<Self> {
        Self::with(engine.index(), Some(engine))
    }

    /// Makes a device that has memory but runs no kernels, for code that needs none.
    ///
    /// ```
    /// use gin_gpu::{Device, DeviceKind};
    /// assert_eq!(gin_gpu::virt::VirtualDevice::memory_only(0).kind(), DeviceKind::Virtual);
    /// ```
    pub fn memory_only(index: u32) -> Arc<Self> {
        Self::with(index, None)
    }

    fn with(index: u32, engine: Option<VirtualGpu>) -> Arc<Self> {
        install();
        Arc::new_cyclic(|this| Self {
            index,
            engine,
            running: Mutex::new(Vec::new()),
            streams: AtomicU32::new(0),
            this: this.clone(),
        })
    }

    /// Uses memory of the program. This device never frees it.
    ///
    /// # Safety
    /// - The `bytes` bytes at `address` are valid for reads and writes. They stay so until the returned value, the
    ///   windows in which it is registered, and communicators that have had such windows are gone on all ranks.
    /// - Meanwhile the program accesses them only as it may access memory of a window.
    ///
    /// # Errors
    /// [`GpuError::Foreign`] if there are no bytes.
    pub unsafe fn import_memory(&self, address: u64, bytes: u64) -> Result<Arc<Memory>, GpuError> {
        self.import_foreign(address, bytes, None)
    }

    /// Does the same as [`import_memory`](Self::import_memory) for memory that exists as long as `keep`. The last user
    /// of the memory among the ranks of this process drops `keep`, on its own thread.
    ///
    /// # Safety
    /// - The `bytes` bytes at `address` are valid for reads and writes while `keep` exists.
    /// - Meanwhile the program accesses them only as it may access memory of a window.
    ///
    /// # Errors
    /// As there. Then `keep` is dropped.
    pub unsafe fn import_kept(&self, address: u64, bytes: u64, keep: Keep) -> Result<Arc<Memory>, GpuError> {
        self.import_foreign(address, bytes, Some(keep))
    }

    fn import_foreign(&self, address: u64, bytes: u64, keep: Option<Keep>) -> Result<Arc<Memory>, GpuError> {
        if address == 0 || bytes == 0 {
            let reason = "it has no bytes".to_owned();
            return Err(GpuError::Foreign { address, bytes, device: self.name(), reason });
        }
        let device: Arc<dyn Device> =
            self.this.upgrade().ok_or_else(|| self.unsupported("take memory while it is dropped"))?;
        let allocation = Allocation::new(address, None, ForeignMemory { _keep: keep });
        Ok(Memory::with(allocation, &device, MemoryKind::Device, bytes))
    }

    fn unsupported(&self, what: &'static str) -> GpuError {
        GpuError::Unsupported { device: self.name(), what }
    }
}

fn failed(kernel: &str, error: &LaunchError) -> GpuError {
    GpuError::Kernel { kernel: kernel.to_owned(), reason: error.to_string() }
}

impl Device for VirtualDevice {
    fn name(&self) -> String {
        format!("virtual GPU {}", self.index)
    }

    fn kind(&self) -> DeviceKind {
        DeviceKind::Virtual
    }

    fn limits(&self) -> Limits {
        LIMITS
    }

    fn allocate(&self, kind: MemoryKind, bytes: u64) -> Result<Allocation, GpuError> {
        let refuse = out_of_memory(kind, bytes);
        let size = usize::try_from(bytes).ok().and_then(|size| size.max(1).checked_add(ALIGN - MALLOC_ALIGN));
        let layout = size.and_then(|size| Layout::from_size_align(size, MALLOC_ALIGN).ok());
        let layout = layout.ok_or_else(|| refuse("it is more than an address space"))?;
        check_memory_cgroup(kind, bytes)?;
        // Safety: the layout's size is not 0.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })
            .ok_or(CallError { call: "calloc", errno: Errno::NOMEM })
            .map_err(out_of_host_memory(kind, bytes))?;
        let memory = VirtualMemory { start, layout };
        Ok(Allocation::new(memory.address(), None, memory))
    }

    fn sharing(&self) -> Option<&dyn MemorySharing> {
        Some(self)
    }

    fn nic_access(&self) -> Option<&dyn NicAccess> {
        Some(self)
    }

    unsafe fn copy_in(&self, destination: u64, source: &[u8]) -> Result<(), GpuError> {
        watch::event(Watched::Data { address: destination, bytes: source.len() as u64, writes: true });
        // Safety: the caller's promise.
        unsafe { copy_shared(destination, source.as_ptr().expose_provenance() as u64, source.len() as u64) };
        Ok(())
    }

    unsafe fn copy_out(&self, destination: &mut [u8], source: u64) -> Result<(), GpuError> {
        let bytes = destination.len() as u64;
        watch::event(Watched::Data { address: source, bytes, writes: false });
        // Safety: the caller's promise.
        unsafe { copy_shared(destination.as_mut_ptr().expose_provenance() as u64, source, bytes) };
        Ok(())
    }

    fn load(&self, source: ModuleSource<'_>) -> Result<Box<dyn Module>, GpuError> {
        match source {
            ModuleSource::Linked => Ok(Box::new(Linked)),
            ModuleSource::Ptx(_) | ModuleSource::Cubin(_) => {
                Err(self.unsupported("run PTX or machine code: it runs kernels that are linked into the program"))
            }
        }
    }

    fn stream(&self) -> Result<Arc<dyn Stream>, GpuError> {
        let device = self.this.upgrade().ok_or_else(|| self.unsupported("make a stream while it is dropped"))?;
        let id = StreamId(self.streams.fetch_add(1, Ordering::Relaxed));
        Ok(Arc::new(VirtualStream {
            device,
            id,
            tickets: Mutex::default(),
            gates: Mutex::default(),
            captured: Mutex::default(),
        }))
    }

    fn stream_with_priority(&self, _priority: i32) -> Result<Arc<dyn Stream>, GpuError> {
        self.stream()
    }

    fn reaches(&self, other: &dyn Device) -> bool {
        other.kind() == DeviceKind::Virtual
    }

    fn resident_blocks(&self, _function: &Function, _config: &LaunchConfig) -> Result<u64, GpuError> {
        Ok(self.engine.as_ref().map_or(0, |engine| engine.config().resident_blocks.into()))
    }

    fn allows_dependent(&self, _function: &Function) -> bool {
        true
    }

    fn running(&self) -> usize {
        let mut running = lock(&self.running);
        running.retain(|(_, ticket)| !ticket.is_done());
        running.iter().map(|(stream, _)| stream.0).collect::<BTreeSet<_>>().len()
    }

    fn lane(&self) -> Result<Box<dyn crate::lane::Lane>, GpuError> {
        Ok(Box::new(lane::VirtualLane::new(self)))
    }

    fn is_stepped(&self) -> bool {
        true
    }
}

impl MemorySharing for VirtualDevice {
    fn reserve_addresses(&self, slots: u32) -> Result<Option<RawAddresses>, GpuError> {
        let reserve = |bytes| {
            let pages = HostPages::reserve(bytes).map_err(|error| error.explain(bytes))?;
            Ok((pages.start, pages))
        };
        RawAddresses::reserve(DeviceKind::Virtual, slots, LARGEST, reserve).map(Some)
    }

    fn granularity(&self) -> u64 {
        page()
    }

    fn allocate_at(&self, place: FlatPlace, shared: bool) -> Result<Allocation, GpuError> {
        check_memory_cgroup(MemoryKind::Device, place.bytes())?;
        let file = shared.then(|| new_file(place.bytes())).transpose();
        let file = file.map_err(out_of_host_memory(MemoryKind::Device, place.bytes()))?;
        let pages = HostPages::at(place, file.as_ref())?;
        Ok(Allocation::new(pages.start, file, pages))
    }

    fn allocate_shared(&self, kind: MemoryKind, bytes: u64) -> Result<Allocation, GpuError> {
        let (pages, file) = HostPages::allocate(kind, bytes)?;
        Ok(Allocation::new(pages.start, Some(file), pages))
    }

    fn import(&self, file: SharedFile, place: Option<FlatPlace>) -> Result<Allocation, GpuError> {
        let SharedFile { file, bytes, .. } = file;
        let refuse = |reason| GpuError::Foreign { address: 0, bytes, device: self.name(), reason };
        let length = check_file(&file, bytes).map_err(refuse)?;
        let pages = match place {
            Some(place) if place.bytes() != length => {
                return Err(GpuError::OutOfRange { offset: 0, end: length, length: place.bytes() });
            }
            Some(place) => HostPages::at(place, Some(&file))?,
            None => HostPages::of_file(&file, length).map_err(|error| refuse(error.explain(length)))?,
        };
        // The file is closed, as there may be many, and is for its owner to give.
        Ok(Allocation::new(pages.start, None, pages))
    }

    fn reaches_elsewhere(&self, kind: DeviceKind, _identity: &[u8]) -> bool {
        kind == DeviceKind::Virtual
    }

    fn identity(&self) -> Vec<u8> {
        Vec::new()
    }
}

impl NicAccess for VirtualDevice {
    unsafe fn map_pages(&self, first: u64, _bytes: u64, keep: Keep) -> Result<MappedPages, GpuError> {
        Ok(MappedPages::new(first, keep))
    }

    fn export(&self, _address: u64, _bytes: u64) -> Result<MemoryFile, GpuError> {
        Err(self.unsupported("give its memory as a DMA-BUF file"))
    }
}

/// The kernels that are linked into this program.
#[derive(Debug)]
struct Linked;

impl Module for Linked {
    fn function(&self, name: &str) -> Result<Function, GpuError> {
        let mut found = KERNELS.iter().filter(|entry| entry.name == name);
        let Some(entry) = found.next() else {
            return Err(unknown(name, KERNELS.iter().map(|entry| entry.name)));
        };
        let mut modules: Vec<String> = found.map(|other| other.module.to_owned()).collect();
        if !modules.is_empty() {
            modules.insert(0, entry.module.to_owned());
            return Err(GpuError::AmbiguousKernel { name: name.to_owned(), modules });
        }
        Ok(function(entry))
    }

    fn names(&self) -> Vec<String> {
        KERNELS.iter().map(|entry| entry.name.to_owned()).collect()
    }
}

/// Returns the function of a kernel that is linked into this program.
pub fn function(entry: &'static KernelEntry) -> Function {
    let parameter = |parameter: &gin_device::kernel::KernelParam| Parameter {
        name: parameter.name.to_owned(),
        type_name: parameter.type_name.to_owned(),
        type_id: Some(parameter.type_id),
        size: parameter.size,
    };
    Function {
        name: entry.name.to_owned(),
        parameters: entry.params.iter().map(parameter).collect(),
        max_threads: entry.launch_bounds.map(|(threads, _)| threads),
        abi: entry.abi,
        handle: Arc::new(entry),
    }
}

#[derive(Debug)]
struct VirtualStream {
    device: Arc<VirtualDevice>,
    id: StreamId,
    /// Work whose result was not read yet.
    tickets: Mutex<Vec<LaunchTicket>>,
    /// The launches for which later work must wait.
    gates: Mutex<Vec<LaunchTicket>>,
    /// The work of a capture, while there is one.
    captured: Mutex<Option<Vec<Grid>>>,
}

/// Grids of a device, in order.
#[derive(Debug)]
struct VirtualGraph {
    device: u32,
    grids: Vec<Grid>,
}

impl Graph for VirtualGraph {}

impl VirtualStream {
    fn launch_grid(&self, grid: Grid) -> Result<LaunchTicket, GpuError> {
        let gates = std::mem::take(&mut *lock(&self.gates));
        rt::wait_until_named("an event of another stream", || gates.iter().all(LaunchTicket::is_done));
        let engine = self.device.engine.as_ref().ok_or_else(|| self.device.unsupported("run kernels"))?;
        let name = grid.name.clone();
        let ticket = engine.launch(self.id, grid).map_err(|error| failed(&name, &error))?;
        let mut running = lock(&self.device.running);
        running.retain(|(_, ticket)| !ticket.is_done());
        running.push((self.id, ticket.clone()));
        drop(running);
        lock(&self.tickets).push(ticket.clone());
        Ok(ticket)
    }

    /// Launches a grid, or adds it to a capture.
    fn submit(&self, grid: Grid) -> Result<(), GpuError> {
        if let Some(captured) = &mut *lock(&self.captured) {
            captured.push(grid);
            return Ok(());
        }
        self.launch_grid(grid).map(drop)
    }

    /// Refuses what cannot become part of a graph.
    fn not_captured(&self, what: &'static str) -> Result<(), GpuError> {
        if lock(&self.captured).is_some() { Err(self.device.unsupported(what)) } else { Ok(()) }
    }

    /// Returns the result of the work that is done: the first failure, if there is one.
    fn outcome(&self) -> Result<(), GpuError> {
        let mut outcome = Ok(());
        lock(&self.tickets).retain(|ticket| match ticket.result() {
            None => true,
            Some(Ok(())) => false,
            Some(Err(error)) => {
                if outcome.is_ok() {
                    outcome = Err(failed(ticket.name(), &error));
                }
                false
            }
        });
        outcome
    }

    fn is_done(&self) -> bool {
        // A wait for an event is work too, also if no launch follows it.
        [&self.tickets, &self.gates].into_iter().all(|work| lock(work).iter().all(LaunchTicket::is_done))
    }
}

impl Stream for VirtualStream {
    fn device(&self) -> Arc<dyn Device> {
        self.device.clone()
    }

    unsafe fn enqueue(
        &self,
        function: &Function,
        config: LaunchConfig,
        arguments: Vec<Argument>,
    ) -> Result<(), GpuError> {
        let Some(&entry) = function.handle.downcast_ref::<&'static KernelEntry>() else {
            return Err(self.device.unsupported("run a kernel that was loaded for another kind of device"));
        };
        let grid = Grid {
            name: entry.name.into(),
            grid_dim: config.grid,
            block_dim: config.block,
            dynamic_shared: config.dynamic_shared as usize,
            cooperative: config.cooperative,
            dependent: config.dependent,
            body: Arc::new(move || {
                let pointers: Vec<*const u8> = arguments.iter().map(Argument::as_ptr).collect();
                // Safety: the caller promised that these are the parameters that the kernel takes.
                unsafe { (entry.call)(pointers.as_ptr()) }
            }),
        };
        if config.cooperative {
            let (blocks, resident) = (config.blocks(), self.device.resident_blocks(function, &config)?);
            if blocks > resident {
                return Err(GpuError::NotResident { blocks, resident, device: self.device.name() });
            }
        }
        self.submit(grid)
    }

    fn begin_capture(&self) -> Result<(), GpuError> {
        self.not_captured("capture a stream twice at a time")?;
        *lock(&self.captured) = Some(Vec::new());
        Ok(())
    }

    fn end_capture(&self) -> Result<Box<dyn Graph>, GpuError> {
        let Some(grids) = lock(&self.captured).take() else {
            return Err(self.device.unsupported("end a graph that was not begun"));
        };
        Ok(Box::new(VirtualGraph { device: self.device.index, grids }))
    }

    unsafe fn replay(&self, graph: &dyn Graph) -> Result<(), GpuError> {
        let graph = (graph as &dyn Any).downcast_ref::<VirtualGraph>();
        let Some(graph) = graph.filter(|graph| graph.device == self.device.index) else {
            return Err(self.device.unsupported("launch a graph of another device"));
        };
        graph.grids.iter().try_for_each(|grid| self.submit(grid.clone()))
    }

    unsafe fn copy(&self, destination: u64, source: u64, bytes: u64) -> Result<(), GpuError> {
        let body = move || {
            watch::event(Watched::Copy { to: destination, from: source, bytes });
            // Safety: the caller's promise.
            unsafe { copy_shared(destination, source, bytes) }
        };
        self.submit(Grid::new("copy", 1, 1, body))
    }

    fn record(&self) -> Result<Box<dyn Event>, GpuError> {
        self.not_captured("record an event in a capture")?;
        let time = Arc::new(AtomicU64::new(0));
        let stamp = time.clone();
        let ticket =
            self.launch_grid(Grid::new("event", 1, 1, move || stamp.store(rt::clock_ns(), Ordering::Release)))?;
        Ok(Box::new(VirtualEvent { ticket, time }))
    }

    fn wait_for(&self, event: &dyn Event) -> Result<(), GpuError> {
        self.not_captured("wait for an event in a capture")?;
        match (event as &dyn Any).downcast_ref::<VirtualEvent>() {
            Some(event) => {
                lock(&self.gates).push(event.ticket.clone());
                Ok(())
            }
            None => Err(self.device.unsupported("wait for an event of another kind of device")),
        }
    }

    fn is_capturing(&self) -> Result<bool, GpuError> {
        Ok(lock(&self.captured).is_some())
    }

    fn is_idle(&self) -> Result<bool, GpuError> {
        let done = self.is_done();
        self.outcome()?;
        Ok(done)
    }

    fn synchronize(&self) -> Result<(), GpuError> {
        self.not_captured(WAIT_IN_CAPTURE)?;
        rt::wait_until_named("the work of its stream", || self.is_done());
        self.outcome()
    }
}

/// A grid of one thread, at this point of the stream.
#[derive(Debug)]
struct VirtualEvent {
    ticket: LaunchTicket,
    time: Arc<AtomicU64>,
}

impl Event for VirtualEvent {
    fn is_done(&self) -> Result<bool, GpuError> {
        Ok(self.ticket.is_done())
    }

    fn since(&self, earlier: &dyn Event) -> Option<u64> {
        let earlier = (earlier as &dyn Any).downcast_ref::<Self>()?;
        if !self.ticket.is_done() || !earlier.ticket.is_done() {
            return None;
        }
        Some(self.time.load(Ordering::Acquire).saturating_sub(earlier.time.load(Ordering::Acquire)))
    }
}
