// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where the engine of software NICs runs, if its users are real GPUs.

use super::objects::{STAGE_BYTES, State};
use super::{HcaError, no_engine};
use gin_device::internal::orders;
use gin_gpu::resident::Resident;
use gin_gpu::rt;
use gin_gpu::{Device, DeviceKind, Function, GpuError, LaunchConfig, Memory, MemoryKind, ModuleSource, Plain, Stream};
use gin_soft_hca::kernel::{Residence, THREADS};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The processor of the engine of software NICs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub enum SoftEngine {
    /// A CPU thread, over memory of this process: for virtual GPUs.
    #[default]
    Process,
    /// A CPU thread, for real GPUs: rings and doorbells lie in pinned memory, and it copies through a GPU what the CPU
    /// does not reach. An atomic is a copy, an addition and a copy, so no GPU may raise a word that a NIC raises.
    Thread,
    /// A kernel on one processor of a GPU, over all memory that this GPU reaches. It is launched when the NICs have
    /// been left alone for a moment, and parks for every command.
    Kernel,
}

/// Most objects of a kind that a kernel takes.
const QUEUES: usize = 2048;
const REGIONS: usize = 4096;
pub(super) const DOORBELLS: usize = 2048;
const FAULTS: usize = 64;
/// Threads of the kernel on a virtual GPU.
const VIRTUAL_THREADS: u32 = 96;
/// The host's word for the kernel.
const PARK: u64 = 1;
/// How long nobody must have sent a command before the kernel goes on.
const PAUSE: Duration = Duration::from_micros(100);
/// How long the kernel may take to park.
const PARK_LIMIT: Duration = Duration::from_secs(10);

/// How to ask the kernel to park.
#[derive(Debug)]
pub(super) struct Bell {
    word: Arc<Memory>,
    /// Number of holders that keep it parked.
    holds: AtomicU32,
}

impl Bell {
    fn store(&self, value: u64) {
        // Safety: a word of pinned memory, which the kernel loads.
        unsafe { AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(self.word.address() as usize)) }
            .store(value, Ordering::Relaxed);
    }
}

impl Resident for Bell {
    fn ask_to_park(&self) {
        self.store(PARK);
    }

    fn keeps_room(&self) -> bool {
        self.holds.load(Ordering::Relaxed) == 0
    }
}

/// The engine as a kernel.
#[derive(Debug)]
pub(super) struct KernelEngine {
    function: Function,
    threads: u32,
    stream: Arc<dyn Stream>,
    bell: Arc<Bell>,
    order: Arc<Memory>,
    seen: Arc<Memory>,
    doorbells: Arc<Memory>,
    stage: Arc<Memory>,
    is_launched: bool,
    /// When the tables were last wanted.
    used: Instant,
    broken: Option<String>,
}

impl State {
    /// Has the engine run there from now on. After an error it runs where it did.
    ///
    /// # Errors
    /// An error of the device; [`HcaError::Engine`] if there are objects already.
    pub(super) fn place(&mut self, engine: SoftEngine, device: &Arc<dyn Device>) -> Result<(), HcaError> {
        if !self.objects.is_empty() || self.memory.device.is_some() {
            return Err(no_engine("it has a place already, or there are objects that would have to move"));
        }
        let kind = match engine {
            SoftEngine::Process => return Ok(()),
            SoftEngine::Thread => MemoryKind::Pinned,
            SoftEngine::Kernel => MemoryKind::Device,
        };
        let new = |bytes| Memory::new(device, kind, bytes).map_err(no_engine);
        let (stage, doorbells) = (new(STAGE_BYTES)?, new(8 * DOORBELLS as u64)?);
        if engine == SoftEngine::Kernel {
            let mut kernel = self.make_kernel(device, &stage, &doorbells).map_err(no_engine)?;
            // So that its room is known.
            kernel.launch(self)?;
            self.kernel = Some(kernel);
        }
        self.stage = stage.address();
        self._placed_stage = Some(stage);
        self.doorbells = Some(doorbells);
        self.memory.device = Some(device.clone());
        Ok(())
    }

    /// Moves the tables to where a kernel finds them.
    fn make_kernel(
        &mut self,
        device: &Arc<dyn Device>,
        stage: &Arc<Memory>,
        doorbells: &Arc<Memory>,
    ) -> Result<KernelEngine, GpuError> {
        let function = device.load(ModuleSource::Linked)?.function("soft_hca")?;
        self.queues.pin(device, QUEUES)?;
        self.busy.pin(device, QUEUES / 64)?;
        self.completions.pin(device, QUEUES)?;
        self.regions.pin(device, REGIONS)?;
        self.faults.pin(device, FAULTS)?;
        self.items.pin(device, 0)?;
        self.core.pin(device, 0)?;
        self.owners.pin(device, DOORBELLS)?;
        let bell = Arc::new(Bell { word: Memory::new(device, MemoryKind::Pinned, 8)?, holds: AtomicU32::new(0) });
        let resident: Arc<dyn Resident> = bell.clone();
        gin_gpu::resident::keep(&**device, Arc::downgrade(&resident));
        Ok(KernelEngine {
            function,
            // A virtual GPU's threads take turns: a few show all that there is to see.
            threads: if device.kind() == DeviceKind::Virtual { VIRTUAL_THREADS } else { THREADS },
            stream: device.stream()?,
            bell,
            order: Memory::new(device, MemoryKind::Device, 8 * orders::WORDS)?,
            seen: Memory::new(device, MemoryKind::Device, doorbells.bytes())?,
            doorbells: doorbells.clone(),
            stage: stage.clone(),
            is_launched: false,
            used: Instant::now(),
            broken: None,
        })
    }

    /// Parks the kernel, if there is one, so that the tables can be used.
    pub(super) fn park(&mut self) {
        if let Some(kernel) = &mut self.kernel {
            kernel.park();
        }
    }

    /// Why the engine does nothing any more.
    pub(super) fn broken(&self) -> Option<String> {
        let kernel = self.kernel.as_ref().and_then(|kernel| kernel.broken.clone());
        kernel.or_else(|| self.memory.failure.as_ref().map(ToString::to_string))
    }

    /// Launches the kernel again, if there is one and it is time.
    pub(super) fn tend(&mut self) {
        if let Some(mut kernel) = self.kernel.take() {
            kernel.tend(self);
            self.kernel = Some(kernel);
        }
    }

    /// Returns whether the engine reaches memory of this GPU.
    pub(super) fn reaches(&self, gpu: &dyn Device) -> bool {
        self.memory.device.as_ref().is_some_and(|device| device.reaches(gpu))
    }

    /// Where rings and records have to lie that GPUs fill.
    pub(super) fn ring_memory(&self) -> MemoryKind {
        self.doorbells.as_ref().map_or(MemoryKind::Device, |doorbells| doorbells.kind())
    }

    /// Rings from the host.
    ///
    /// # Errors
    /// An error of the device.
    pub(super) fn store_doorbell(&self, doorbell: u64, word: u64) -> Result<(), HcaError> {
        if let Some(KernelEngine { doorbells, .. }) = &self.kernel {
            let at = doorbell.wrapping_sub(doorbells.address());
            if at < doorbells.bytes() {
                return doorbells.write(at, &[word]).map_err(no_engine);
            }
        }
        // Safety: a word of a page, or of pinned memory, that is there as long as the doorbell.
        unsafe { AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(doorbell as usize)) }
            .store(word, Ordering::Release);
        Ok(())
    }

    /// Clears a doorbell that gets a new owner.
    ///
    /// # Errors
    /// An error of the device.
    pub(super) fn clear_doorbell(&self, number: usize) -> Result<(), GpuError> {
        let seen = self.kernel.as_ref().map(|kernel| &kernel.seen);
        let mut words = self.doorbells.iter().chain(seen);
        words.try_for_each(|words| words.write(8 * number as u64, &[0u64]))
    }
}

impl KernelEngine {
    /// Launches it, unless the device keeps it parked.
    fn launch(&mut self, state: &State) -> Result<(), HcaError> {
        let residence = Residence {
            queues: state.queues.place()?,
            busy: state.busy.place()?,
            completions: state.completions.place()?,
            regions: state.regions.place()?,
            faults: state.faults.place()?,
            items: state.items.place()?,
            state: state.core.place()?,
            owners: state.owners.place()?,
            doorbells: self.doorbells.address(),
            seen: self.seen.address(),
            stage: self.stage.address(),
            stage_bytes: STAGE_BYTES,
            order: self.order.address(),
            park: self.bell.word.address(),
        };
        self.bell.store(0);
        // Safety: the tables are pinned and long enough, and nobody touches them until the kernel has ended; what they
        // name was registered with that promise, and devices were asked whether they reach it.
        let launched =
            unsafe { self.stream.launch(&self.function, LaunchConfig::new(1, self.threads), &[&Plain(residence)]) };
        match launched {
            Ok(()) => self.is_launched = true,
            Err(GpuError::Parked { .. }) => {}
            Err(error) => return Err(no_engine(error)),
        }
        Ok(())
    }

    /// It does nothing any more, and needs no room.
    fn fail(&mut self, reason: String) {
        if self.broken.is_none() {
            self.bell.holds.fetch_add(1, Ordering::Relaxed);
            self.broken = Some(reason);
        }
    }

    fn look(&mut self) -> bool {
        let idle = self.stream.is_idle().unwrap_or_else(|error| {
            self.fail(error.to_string());
            true
        });
        self.is_launched &= !idle;
        idle
    }

    fn park(&mut self) {
        if self.is_launched {
            self.bell.store(PARK);
            let start = Instant::now();
            rt::wait_until(|| self.look() || start.elapsed() > PARK_LIMIT);
            if self.is_launched {
                self.fail(format!("its kernel has not parked within {PARK_LIMIT:?}"));
            }
        }
        self.used = Instant::now();
    }

    fn tend(&mut self, state: &State) {
        if self.is_launched && !self.look() {
            return;
        }
        let may_run = self.broken.is_none() && self.bell.keeps_room() && self.used.elapsed() >= PAUSE;
        if may_run && let Err(error) = self.launch(state) {
            self.fail(error.to_string());
        }
    }
}

impl Drop for KernelEngine {
    fn drop(&mut self) {
        self.park();
    }
}

/// Keeps the kernel of software NICs parked: processors that it took are free, and what waits until nothing runs can
/// happen. Until this is dropped, NICs execute nothing; doorbells that ring meanwhile are seen afterwards.
#[derive(Debug)]
pub struct Parked {
    bell: Option<Arc<Bell>>,
}

impl Parked {
    pub(super) fn new(kernel: Option<&KernelEngine>) -> Self {
        let bell = kernel.map(|kernel| kernel.bell.clone());
        if let Some(bell) = &bell {
            bell.holds.fetch_add(1, Ordering::Relaxed);
        }
        Self { bell }
    }
}

impl Drop for Parked {
    fn drop(&mut self) {
        if let Some(bell) = &self.bell {
            bell.holds.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
