// SPDX-License-Identifier: MIT OR Apache-2.0
//! The engine that rings doorbells: kernels, where their device can store to the NIC's doorbell pages, else the host.

use super::device::{DeviceQueueError, DeviceQueues};
use super::error::NicError;
use super::open::Nic;
use super::owned::Owned;
use gin_abi::gdaki::{DOORBELL_GPU, DOORBELL_SYSTEM};
use gin_gpu::{Device, GpuError, Keep, MappedPages, Memory, MemoryKind};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::sync::Arc;

/// The requested engine for the doorbells of device-driven queue pairs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub enum Doorbells {
    /// Kernels, if the NIC's doorbell pages can be mapped into their device; else the host. [`Ringer`] says which.
    #[default]
    Automatic,
    /// Kernels; that pages cannot be mapped is an error.
    Gpu,
    /// The progress thread: kernels store doorbells to pinned memory, and it passes them on.
    Host,
}

/// How far kernels release what a NIC is to read, before they ring its doorbell: the entries, and the payload that they
/// name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub enum DoorbellRelease {
    /// To the system, as the memory model of PTX asks for where a device reads that is no thread of the GPU.
    #[default]
    System,
    /// To the GPU only: what it has written is in its L2 cache then. That is right only if the NIC reads it through
    /// that cache, as one on PCIe does that reads this GPU's own memory. No document promises that the cache has it
    /// before the doorbell arrives; NCCL's kernels rely on it.
    ///
    /// Rings must lie in memory of the GPU: pinned memory is refused.
    Gpu,
}

impl DoorbellRelease {
    /// As kernels read it.
    pub(super) fn code(self) -> u16 {
        match self {
            Self::System => DOORBELL_SYSTEM,
            Self::Gpu => DOORBELL_GPU,
        }
    }

    /// Makes sure that it covers rings in memory of this kind.
    ///
    /// # Errors
    /// [`NicError::Unreleased`].
    pub(super) fn check(self, nic: &Nic, rings: MemoryKind) -> Result<(), NicError> {
        match (self, rings) {
            (Self::Gpu, MemoryKind::Pinned) => Err(NicError::Unreleased { nic: nic.name().to_owned() }),
            _ => Ok(()),
        }
    }
}

/// The engine that rings the doorbells of a communicator.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Ringer {
    /// Its kernels.
    Kernels,
    /// The progress thread: because it was asked for ([`Doorbells::Host`]), or because the doorbell pages cannot be
    /// mapped into the device, with the reason.
    Host(Option<GpuError>),
}

impl fmt::Display for Ringer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kernels => f.write_str("kernels"),
            Self::Host(None) => f.write_str("the host, as it was asked for"),
            Self::Host(Some(reason)) => write!(f, "the host: {reason}"),
        }
    }
}

/// A doorbell page of a NIC, as this process has it mapped.
#[derive(Clone, Debug)]
pub(super) struct DoorbellPage {
    /// Where its doorbells are stored.
    pub(super) doorbell: u64,
    /// The page is mapped as long as this is there.
    pub(super) object: Arc<Owned>,
}

/// Doorbell pages, mapped into a device.
#[derive(Debug)]
pub(super) struct Pages {
    /// By address in this process; none if kernels find doorbells where the host does anyway.
    pages: BTreeMap<u64, Box<dyn MappedPages>>,
    size: u64,
}

impl Pages {
    /// Maps each page once.
    fn map(nic: &Nic, device: &dyn Device, doorbells: impl Iterator<Item = DoorbellPage>) -> Result<Self, GpuError> {
        let size = rustix::param::page_size() as u64;
        let mut pages = BTreeMap::new();
        if nic.owner.hca.doorbells_are_memory() {
            return Ok(Self { pages, size });
        }
        for DoorbellPage { doorbell, object } in doorbells {
            let page = doorbell - doorbell % size;
            if let Entry::Vacant(entry) = pages.entry(page) {
                let keep: Keep = object;
                // Safety: a page of the host, which is mapped as long as the object is there.
                entry.insert(unsafe { device.map_pages(page, size, keep) }?);
            }
        }
        Ok(Self { pages, size })
    }

    /// Where kernels store the doorbell that this process has at `doorbell`.
    fn address(&self, doorbell: u64) -> u64 {
        let offset = doorbell % self.size;
        self.pages.get(&(doorbell - offset)).map_or(doorbell, |page| page.address() + offset)
    }
}

/// Where the host rings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum HostBell {
    /// At the NIC's doorbell, by its address in this process.
    Nic(u64),
    /// At the word in pinned memory that is passed on to it.
    Word(u64),
}

/// Where kernels store doorbells.
#[derive(Debug)]
pub(super) enum Bells {
    /// To the NIC's pages.
    Pages(Pages),
    /// To words in pinned memory, one for each queue pair; and why not to pages, if that was not asked for.
    Relayed(Arc<Memory>, Option<GpuError>),
}

impl Bells {
    /// Makes the doorbells of the queue pairs of these sets.
    ///
    /// # Errors
    /// [`NicError::Doorbells`] if kernels are to ring and cannot; what the device reports.
    pub(super) fn new(
        nic: &Nic,
        device: &Arc<dyn Device>,
        (sets, queues): (&[DeviceQueues], u64),
        asked: Doorbells,
    ) -> Result<Self, DeviceQueueError> {
        let refusal = if asked == Doorbells::Host {
            None
        } else {
            match Pages::map(nic, &**device, sets.iter().flat_map(|set| set.doorbell_pages())) {
                Ok(pages) => return Ok(Self::Pages(pages)),
                Err(reason) if asked == Doorbells::Gpu => return Err(nic.unmapped(&**device, reason).into()),
                Err(reason) => Some(reason),
            }
        };
        Ok(Self::Relayed(Memory::new(device, MemoryKind::Pinned, queues * 8)?, refusal))
    }

    /// Where kernels store the doorbell of queue pair number `index`, which this process has at `doorbell`.
    pub(super) fn address(&self, index: u64, doorbell: u64) -> u64 {
        match self {
            Self::Pages(pages) => pages.address(doorbell),
            Self::Relayed(words, _) => words.address() + 8 * index,
        }
    }

    /// Where the host rings it, while no kernel runs.
    pub(super) fn host(&self, index: u64, doorbell: u64) -> HostBell {
        match self {
            Self::Pages(_) => HostBell::Nic(doorbell),
            // Kernels' last stores may not have been passed on yet: this takes their place.
            Self::Relayed(..) => HostBell::Word(self.address(index, doorbell)),
        }
    }

    pub(super) fn ringer(&self) -> Ringer {
        match self {
            Self::Pages(_) => Ringer::Kernels,
            Self::Relayed(_, reason) => Ringer::Host(reason.clone()),
        }
    }
}

impl Nic {
    fn unmapped(&self, device: &dyn Device, reason: GpuError) -> NicError {
        NicError::Doorbells { nic: self.name().to_owned(), device: device.name(), reason: Box::new(reason) }
    }

    /// Returns the engine that would ring this NIC's doorbells for a device: makes a doorbell page, tries to map it,
    /// and frees both.
    ///
    /// # Errors
    /// An error of the NIC.
    pub fn ringer(&self, device: &dyn Device) -> Result<Ringer, NicError> {
        let (_, page) = self.doorbell_page()?;
        Ok(match Pages::map(self, device, [page].into_iter()) {
            Ok(_) => Ringer::Kernels,
            Err(reason) => Ringer::Host(Some(reason)),
        })
    }
}
