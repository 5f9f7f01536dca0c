// SPDX-License-Identifier: MIT OR Apache-2.0
//! The place of the engine of software NICs, if its users are real GPUs.

use super::objects::{HcaState, STAGE_BYTES};
use super::{HcaError, no_engine};
use gin_device::internal::orders;
use gin_gpu::resident::Resident;
use gin_gpu::rt;
use gin_gpu::{Device, DeviceKind, Function, GpuError, LaunchConfig, Memory, MemoryKind, ModuleSource, Plain, Stream};
use gin_soft_nic::kernel::{Residence, THREADS};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// The place of the engine of software NICs: CPU threads or a GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub enum SoftEngine {
    /// A CPU thread over memory of this process, for virtual GPUs.
    #[default]
    Process,
    /// A CPU thread for real GPUs. Rings and doorbells are in pinned memory, and the engine copies memory that the CPU
    /// does not reach through a GPU. An atomic is a copy, an addition and a copy, so no GPU may raise a word that a NIC
    /// raises.
    Thread,
    /// A kernel on one SM of a GPU, over all memory that this GPU reaches. It parks for every command, and is
    /// launched again after a time without commands.
    Kernel,
}

/// The maximum number of objects of a kind if the engine is a kernel.
const QUEUES: usize = 2048;
const REGIONS: usize = 4096;
pub(super) const DOORBELLS: usize = 2048;
const FAULTS: usize = 64;
/// The threads of the kernel on a virtual GPU.
const VIRTUAL_THREADS: u32 = 96;
/// The host's word for the kernel.
const PARK: u64 = 1;
/// The nanoseconds without a command after which the kernel is launched again.
const PAUSE_NS: u64 = 100_000;
/// The time limit of the kernel to park.
const PARK_LIMIT: Duration = Duration::from_secs(10);

/// The means by which the host asks the kernel to park.
#[derive(Debug)]
pub(super) struct Bell {
    word: Arc<Memory>,
    /// The number of holders that keep the kernel parked.
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
    /// The time of the first step after the last command; `None` until that step.
    used_ns: Option<u64>,
    broken: Option<String>,
}

impl HcaState {
    /// Moves the engine to another place. After an error it stays where it was.
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
            // Loads the kernel now, so that its room is known.
            kernel.launch(self)?;
            self.kernel = Some(kernel);
        }
        self.stage = stage.address();
        self._stage = Box::new(stage);
        self.doorbells = Some(doorbells);
        self.memory.device = Some(device.clone());
        Ok(())
    }

    /// Moves the tables to pinned memory, from which the kernel copies them.
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
            // The threads of a virtual GPU take turns, so more of them would show no more.
            threads: if device.kind() == DeviceKind::Virtual { VIRTUAL_THREADS } else { THREADS },
            stream: device.stream()?,
            bell,
            order: Memory::new(device, MemoryKind::Device, 8 * orders::WORDS)?,
            seen: Memory::new(device, MemoryKind::Device, doorbells.bytes())?,
            doorbells: doorbells.clone(),
            stage: stage.clone(),
            is_launched: false,
            used_ns: None,
            broken: None,
        })
    }

    /// Returns the reason why the engine has stopped; `None` while it works.
    pub(super) fn broken(&self) -> Option<String> {
        let kernel = self.kernel.as_ref().and_then(|kernel| kernel.broken.clone());
        kernel.or_else(|| self.memory.failure.as_ref().map(ToString::to_string))
    }

    /// Launches the kernel again, if there is one and enough time has passed.
    pub(super) fn tend(&mut self, now_ns: u64) {
        if let Some(mut kernel) = self.kernel.take() {
            kernel.tend(self, now_ns);
            self.kernel = Some(kernel);
        }
    }

    /// Rings a doorbell from the host.
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
        // Safety: a word of a page, or of pinned memory, which exists as long as the doorbell.
        unsafe { AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(doorbell as usize)) }
            .store(word, Ordering::Release);
        Ok(())
    }

    /// Clears a doorbell for a new owner.
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
    /// Launches the kernel, unless the device keeps it parked.
    fn launch(&mut self, state: &HcaState) -> Result<(), HcaError> {
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
        // Safety: the tables are pinned and long enough, and the host does not use them until the kernel has ended. The
        // callers that registered memory in them promised its validity, and the devices reach it.
        let launched =
            unsafe { self.stream.launch(&self.function, LaunchConfig::new(1, self.threads), &[&Plain(residence)]) };
        match launched {
            Ok(()) => self.is_launched = true,
            Err(GpuError::Parked { .. }) => {}
            Err(error) => return Err(no_engine(error)),
        }
        Ok(())
    }

    /// Stops the engine for ever, and frees its room on the device.
    fn fail(&mut self, reason: String) {
        if self.broken.is_none() {
            self.bell.holds.fetch_add(1, Ordering::Relaxed);
            self.broken = Some(reason);
        }
    }

    /// Returns whether the kernel has ended, and notes a failure.
    pub(super) fn look(&mut self) -> bool {
        let idle = self.stream.is_idle().unwrap_or_else(|error| {
            self.fail(error.to_string());
            true
        });
        self.is_launched &= !idle;
        idle
    }

    /// Parks the kernel for a command, so that the host can use the tables.
    pub(super) fn park(&mut self) {
        self.used_ns = None;
        if self.is_launched {
            self.bell.store(PARK);
            let until_ns = rt::clock_ns().saturating_add(PARK_LIMIT.as_nanos() as u64);
            rt::wait_until_named("the engine of its NICs", || self.look() || rt::clock_ns() > until_ns);
            if self.is_launched {
                self.fail(format!("its kernel has not parked within {PARK_LIMIT:?}"));
            }
        }
    }

    fn tend(&mut self, state: &HcaState, now_ns: u64) {
        if self.is_launched && !self.look() {
            return;
        }
        // The step of another thread may be later than `now_ns`, and one outside a virtual world has another clock.
        let has_paused = now_ns.abs_diff(*self.used_ns.get_or_insert(now_ns)) >= PAUSE_NS;
        if self.broken.is_none()
            && self.bell.keeps_room()
            && has_paused
            && let Err(error) = self.launch(state)
        {
            self.fail(error.to_string());
        }
    }
}

impl Drop for KernelEngine {
    fn drop(&mut self) {
        self.park();
    }
}

/// Keeps the kernel of software NICs parked until it is dropped. Meanwhile its SMs are free, calls that wait
/// until no kernel runs can proceed, and the NICs execute no entries. They handle doorbells of that time afterwards.
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
