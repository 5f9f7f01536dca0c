// SPDX-License-Identifier: MIT OR Apache-2.0
//! The engine as a resident kernel.

use super::{HcaError, no_engine};
use gin_device::internal::orders;
use gin_gpu::resident::Resident;
use gin_gpu::rt;
use gin_gpu::{Device, DeviceKind, Function, GpuError, LaunchConfig, Memory, MemoryKind, ModuleSource, Plain, Stream};
use gin_soft_nic::kernel::{Residence, THREADS};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

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
    pub(super) seen: Arc<Memory>,
    pub(super) doorbells: Arc<Memory>,
    stage: Arc<Memory>,
    is_launched: bool,
    /// The time of the first step after the last command; `None` until that step.
    used_ns: Option<u64>,
    pub(super) broken: Option<String>,
}

impl KernelEngine {
    pub(super) fn new(
        device: &Arc<dyn Device>,
        stage: &Arc<Memory>,
        doorbells: &Arc<Memory>,
    ) -> Result<Self, GpuError> {
        let function = device.load(ModuleSource::Linked)?.function("soft_hca")?;
        let bell = Arc::new(Bell { word: Memory::new(device, MemoryKind::Pinned, 8)?, holds: AtomicU32::new(0) });
        let resident: Arc<dyn Resident> = bell.clone();
        device.keep_resident(Arc::downgrade(&resident));
        Ok(Self {
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

    /// Launches the kernel over these tables, unless the device keeps it parked.
    pub(super) fn launch(&mut self, tables: Residence) -> Result<(), HcaError> {
        let residence = Residence {
            doorbells: self.doorbells.address(),
            seen: self.seen.address(),
            stage: self.stage.address(),
            stage_bytes: self.stage.bytes(),
            order: self.order.address(),
            park: self.bell.word.address(),
            ..tables
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

    /// Launches the kernel again, if enough time has passed.
    pub(super) fn tend(&mut self, now_ns: u64, tables: impl FnOnce() -> Result<Residence, HcaError>) {
        if self.is_launched && !self.look() {
            return;
        }
        // The step of another thread may be later than `now_ns`, and one outside a virtual world has another clock.
        let has_paused = now_ns.abs_diff(*self.used_ns.get_or_insert(now_ns)) >= PAUSE_NS;
        if self.broken.is_none()
            && self.bell.keeps_room()
            && has_paused
            && let Err(error) = tables().and_then(|tables| self.launch(tables))
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
