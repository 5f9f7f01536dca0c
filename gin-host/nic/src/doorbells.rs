// SPDX-License-Identifier: MIT OR Apache-2.0
//! The engine that rings doorbells: kernels if their device can store to the NIC's doorbell pages, else the host.

use super::error::{DeviceQueueError, NicError, Step};
use super::hca::{Hca, Uar};
use super::open::{Nic, failed};
use super::owned::Owned;
use gin_abi::gdaki::{DOORBELL_GPU, DOORBELL_SYSTEM};
use gin_gpu::{Device, GpuError, Keep, MappedPages, Memory, MemoryKind};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

/// The requested engine that rings the doorbells of device-driven queue pairs.
///
/// ```
/// assert_eq!(gin_nic::Doorbells::default(), gin_nic::Doorbells::Automatic);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub enum Doorbells {
    /// Kernels, if their device can map the NIC's doorbell pages; else the host. [`DoorbellSource`] names the actual
    /// engine.
    #[default]
    Automatic,
    /// Kernels. Bring-up fails if their device cannot map the pages.
    Gpu,
    /// The progress thread. Kernels store doorbells to pinned memory, and the thread rings them.
    Host,
}

/// The scope to which kernels release, before they ring a doorbell, the memory that the NIC will read: the entries, and
/// the payload that they name.
///
/// ```
/// assert_eq!(gin_nic::DoorbellRelease::default(), gin_nic::DoorbellRelease::System);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
#[repr(u16)]
pub enum DoorbellRelease {
    /// The system, as the memory model of PTX requires if a device other than the GPU reads.
    #[default]
    System = DOORBELL_SYSTEM,
    /// The GPU only: then its writes are in its L2 cache. That suffices only if the NIC reads through that cache, as a
    /// NIC on PCIe does that reads this GPU's own memory. No document promises that the cache has the writes before the
    /// doorbell arrives; NCCL's kernels rely on it.
    ///
    /// Rings must be in memory of the GPU: bring-up refuses pinned memory.
    Gpu = DOORBELL_GPU,
}

impl DoorbellRelease {
    /// Checks that the scope covers rings in memory of this kind.
    ///
    /// # Errors
    /// [`NicError::Unreleased`].
    pub(super) fn check(self, nic: &Nic, rings: MemoryKind) -> Result<(), NicError> {
        match (self, rings) {
            (Self::Gpu, MemoryKind::Pinned) => Err(NicError::Unreleased { nic: nic.name.clone() }),
            _ => Ok(()),
        }
    }
}

/// The engine that rings the doorbells of a communicator.
///
/// ```
/// assert_eq!(gin_nic::DoorbellSource::Kernels.to_string(), "kernels");
/// ```
#[derive(Clone, PartialEq, Eq, Debug, derive_more::Display)]
pub enum DoorbellSource {
    /// The communicator's kernels.
    #[display("kernels")]
    Kernels,
    /// The progress thread, because it was requested ([`Doorbells::Host`]), or because the device cannot map the
    /// doorbell pages, with the reason.
    #[display("the host{}", _0.as_ref().map_or(", as it was asked for".to_owned(), |reason| format!(": {reason}")))]
    Host(Option<GpuError>),
}

/// A doorbell page of a NIC, mapped into this process.
#[derive(Clone, Debug)]
pub(super) struct DoorbellPage {
    /// The address of its doorbells.
    pub(super) doorbell: u64,
    /// Keeps the page mapped.
    pub(super) object: Arc<Owned>,
}

/// Doorbell pages, mapped into a device.
#[derive(Debug)]
pub(super) struct Pages {
    /// The pages by address in this process; none if kernels and host find doorbells at the same addresses.
    pages: BTreeMap<u64, MappedPages>,
}

impl Pages {
    /// Maps each page once.
    fn map<'a>(
        nic: &Nic,
        device: &dyn Device,
        doorbells: impl Iterator<Item = &'a DoorbellPage>,
    ) -> Result<Self, GpuError> {
        let size = rustix::param::page_size() as u64;
        let mut pages = BTreeMap::new();
        if nic.owner.hca.doorbells_are_memory() {
            return Ok(Self { pages });
        }
        for DoorbellPage { doorbell, object } in doorbells {
            let page = doorbell - doorbell % size;
            if let Entry::Vacant(entry) = pages.entry(page) {
                let keep: Keep = object.clone();
                // Safety: a page of the host, which is mapped as long as the object exists.
                entry.insert(unsafe { device.map_pages(page, size, keep) }?);
            }
        }
        Ok(Self { pages })
    }

    /// Returns the address at which kernels store the doorbell that this process has at `doorbell`.
    fn address(&self, doorbell: u64) -> u64 {
        let offset = doorbell % rustix::param::page_size() as u64;
        self.pages.get(&(doorbell - offset)).map_or(doorbell, |page| page.address() + offset)
    }
}

/// The place where the host rings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum HostBell {
    /// The NIC's doorbell, by its address in this process.
    Nic(u64),
    /// The word in pinned memory from which the relay rings.
    Word(u64),
}

/// The place where kernels store doorbells.
#[derive(Debug)]
pub(super) enum Bells {
    /// The NIC's pages.
    Pages(Pages),
    /// Words in pinned memory, one for each queue pair, with the reason why not pages unless the host was requested.
    Relayed(Arc<Memory>, Option<GpuError>),
}

impl Bells {
    /// Maps the doorbell pages, or allocates a doorbell for each of `queues` queue pairs.
    ///
    /// # Errors
    /// [`NicError::Doorbells`] if kernels were requested and cannot ring; an error of the device.
    pub(super) fn new<'a>(
        nic: &Nic,
        device: &Arc<dyn Device>,
        (pages, queues): (impl Iterator<Item = &'a DoorbellPage>, u64),
        asked: Doorbells,
    ) -> Result<Self, DeviceQueueError> {
        let refusal = if asked == Doorbells::Host {
            None
        } else {
            match Pages::map(nic, &**device, pages) {
                Ok(pages) => return Ok(Self::Pages(pages)),
                Err(reason) if asked == Doorbells::Gpu => {
                    let (nic, device, reason) = (nic.name.clone(), device.name(), Box::new(reason));
                    return Err(NicError::Doorbells { nic, device, reason }.into());
                }
                Err(reason) => Some(reason),
            }
        };
        Ok(Self::Relayed(Memory::new(device, MemoryKind::Pinned, queues * 8)?, refusal))
    }

    /// Returns the address at which kernels store the doorbell of queue pair number `index`, which this process has at
    /// `doorbell`.
    pub(super) fn address(&self, index: u64, doorbell: u64) -> u64 {
        match self {
            Self::Pages(pages) => pages.address(doorbell),
            Self::Relayed(words, _) => words.address() + 8 * index,
        }
    }

    /// Returns the place where the host rings this doorbell while no kernel runs.
    pub(super) fn host(&self, index: u64, doorbell: u64) -> HostBell {
        match self {
            Self::Pages(_) => HostBell::Nic(doorbell),
            // The relay may not have rung for the kernels' last stores yet. This store replaces them.
            Self::Relayed(..) => HostBell::Word(self.address(index, doorbell)),
        }
    }

    pub(super) fn doorbell_source(&self) -> DoorbellSource {
        match self {
            Self::Pages(_) => DoorbellSource::Kernels,
            Self::Relayed(_, reason) => DoorbellSource::Host(reason.clone()),
        }
    }
}

impl Nic {
    /// Allocates a doorbell page.
    pub(super) fn doorbell_page(&self) -> Result<(Uar, DoorbellPage), NicError> {
        let uar = self.owner.hca.allocate_uar().map_err(failed(&self.name, Step::DoorbellPage, None))?;
        let object = Arc::new(self.owner.own(uar.handle, Hca::free_uar));
        Ok((uar, DoorbellPage { doorbell: uar.doorbell, object }))
    }

    /// Returns the engine that would ring this NIC's doorbells for a device. Allocates a doorbell page, tries to map
    /// it, and frees both.
    ///
    /// # Errors
    /// An error of the NIC.
    pub fn doorbell_source(&self, device: &dyn Device) -> Result<DoorbellSource, NicError> {
        let (_, page) = self.doorbell_page()?;
        Ok(match Pages::map(self, device, [&page].into_iter()) {
            Ok(_) => DoorbellSource::Kernels,
            Err(reason) => DoorbellSource::Host(Some(reason)),
        })
    }
}
