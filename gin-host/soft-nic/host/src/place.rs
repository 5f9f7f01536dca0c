// SPDX-License-Identifier: MIT OR Apache-2.0
//! The place of the engine of software NICs, if its users are real GPUs.

use super::kernel::KernelEngine;
use super::objects::{DOORBELLS, HcaState, STAGE_BYTES};
use super::{HcaError, no_engine};
use gin_gpu::{Device, GpuError, Memory, MemoryKind};
use gin_soft_nic::kernel::Residence;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

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
const FAULTS: usize = 64;

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
            let mut kernel = KernelEngine::new(device, &stage, &doorbells).map_err(no_engine)?;
            self.pin(device).map_err(no_engine)?;
            // Loads the kernel now, so that its room is known.
            kernel.launch(self.tables()?)?;
            self.kernel = Some(kernel);
        }
        self.stage = stage.address();
        self._stage = Box::new(stage);
        self.doorbells = Some(doorbells);
        self.memory.device = Some(device.clone());
        Ok(())
    }

    /// Moves the tables to pinned memory, from which the kernel copies them.
    fn pin(&mut self, device: &Arc<dyn Device>) -> Result<(), GpuError> {
        self.queues.pin(device, QUEUES)?;
        self.busy.pin(device, QUEUES / 64)?;
        self.completions.pin(device, QUEUES)?;
        self.regions.pin(device, REGIONS)?;
        self.faults.pin(device, FAULTS)?;
        self.items.pin(device, 0)?;
        self.core.pin(device, 0)?;
        self.owners.pin(device, DOORBELLS)
    }

    /// Returns the places of the pinned tables.
    fn tables(&self) -> Result<Residence, HcaError> {
        Ok(Residence {
            queues: self.queues.place()?,
            busy: self.busy.place()?,
            completions: self.completions.place()?,
            regions: self.regions.place()?,
            faults: self.faults.place()?,
            items: self.items.place()?,
            state: self.core.place()?,
            owners: self.owners.place()?,
            ..Residence::default()
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
            kernel.tend(now_ns, || self.tables());
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
