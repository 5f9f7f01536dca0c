// SPDX-License-Identifier: MIT OR Apache-2.0
//! The objects of software NICs and their uses of each other.

use super::SoftConfig;
#[cfg(doc)]
use super::SoftEngine;
use super::kernel::KernelEngine;
use super::memory::HostMemory;
use super::reason::{Answer, Reason};
use super::table::Table;
use gin_device::exec::watch;
use gin_gpu::Memory;
use gin_nic::hca::{Access, Extent, Handle, HcaError};
use gin_soft_nic::faults::Switch;
use gin_soft_nic::held::{Held, Item, Usage};
use gin_soft_nic::kernel;
use gin_soft_nic::tables::{CompletionQueue, QueuePair, Region, Rights};
use gin_soft_nic::{Engine, Fault, Options, Progress, Tables};
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The bytes of a page of memory, and of a doorbell page.
pub(super) const PAGE: u64 = 4096;
/// The index of the doorbell's word in a doorbell page: at byte 0x800, as on a NIC.
pub(super) const DOORBELL_WORD: usize = 0x100;
/// The number of the event queue that completion queues name.
pub(super) const EVENT_QUEUE: u32 = 5;
/// The maximum number of ranges that the engine holds back, and the maximum number of bytes of them.
const HELD: usize = 256;
/// The maximum number of doorbells outside of pages of this process.
pub(super) const DOORBELLS: usize = 2048;
pub(super) const STAGE_BYTES: u64 = 1 << 20;

/// The kind of an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Domain,
    Region,
    Umem,
    Uar,
    Completions,
    Queue,
}

/// An object's kind, and its number among the objects of its kind.
pub(super) type Name = (Kind, u32);

/// An object of a NIC.
#[derive(Debug)]
pub(super) struct Object {
    pub(super) name: Name,
    pub(super) device: u32,
    /// The objects that cannot be destroyed before it.
    pub(super) uses: Vec<Name>,
}

/// A doorbell page.
#[repr(align(4096))]
pub(super) struct Page(pub(super) [AtomicU64; PAGE as usize / 8]);

/// The place of a doorbell.
pub(super) struct Doorbell {
    address: u64,
    /// The page, if it is in this process.
    _page: Option<Box<Page>>,
}

/// Memory for rings and records.
pub(super) struct RingMemory {
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) written: bool,
}

/// Numbered objects. Number 0 is never used.
pub(super) type Slots<T> = Vec<Option<T>>;

pub(super) struct HcaState {
    /// The kernel of [`SoftEngine::Kernel`]. Dropped first, because it parks before its tables are freed.
    pub(super) kernel: Option<KernelEngine>,
    /// The words of doorbells, unless doorbells are in pages of this process.
    pub(super) doorbells: Option<Arc<Memory>>,
    pub(super) devices: Vec<SoftConfig>,
    /// The objects by handle.
    pub(super) objects: BTreeMap<u64, Object>,
    pub(super) domains: Slots<()>,
    pub(super) umems: Slots<RingMemory>,
    pub(super) uars: Slots<Doorbell>,
    pub(super) queues: Table<QueuePair>,
    /// The options of the engine.
    pub(super) busy: Table<u64>,
    pub(super) completions: Table<CompletionQueue>,
    pub(super) regions: Table<Region>,
    pub(super) faults: Table<Switch>,
    /// Room for writes that have completed but are not visible yet.
    pub(super) items: Table<Item>,
    /// One element: the engine, and the amount held back.
    pub(super) core: Table<kernel::KernelState>,
    /// The NIC of each doorbell, by the doorbell's number.
    pub(super) owners: Table<u64>,
    /// The address of the staging area for held ranges.
    pub(super) stage: u64,
    /// The staging area: words of this process for an engine of [`SoftEngine::Process`], memory of a device otherwise.
    pub(super) _stage: Box<dyn Any + Send>,
    pub(super) memory: HostMemory,
    serial: u64,
}

impl HcaState {
    pub(super) fn new(options: Options) -> Self {
        let stage: Box<[AtomicU64]> = (0..STAGE_BYTES / 8).map(|_| AtomicU64::new(0)).collect();
        Self {
            kernel: None,
            doorbells: None,
            devices: Vec::new(),
            objects: BTreeMap::new(),
            domains: vec![None],
            umems: vec![None],
            uars: vec![None],
            queues: Table::Own(vec![QueuePair::default()]),
            busy: Table::Own(vec![0]),
            completions: Table::Own(vec![CompletionQueue::default()]),
            regions: Table::Own(vec![Region::default()]),
            faults: Table::Own(Vec::new()),
            items: Table::Own(vec![Item::ROOM; HELD]),
            core: Table::Own(vec![kernel::KernelState { engine: Engine::new(options), usage: Usage::default() }]),
            owners: Table::Own(vec![0]),
            stage: stage.as_ptr() as u64,
            _stage: Box::new(stage),
            memory: HostMemory::default(),
            serial: 0,
        }
    }

    /// Looks at the doorbells. Returns whether one rang.
    pub(super) fn look_at_doorbells(&mut self) -> bool {
        let mut rang = false;
        for number in 0..self.uars.len() {
            let Some(uar) = &self.uars[number] else { continue };
            // Safety: the word exists as long as the doorbell.
            let word = unsafe { AtomicU64::from_ptr(uar.address as usize as *mut u64) };
            if word.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let (device, word) = (self.owners[number] as u32, word.swap(0, Ordering::Acquire));
            watch::word(uar.address as *const u64, watch::Access::Load, Ordering::Acquire);
            rang = true;
            self.with_engine(|engine, tables, _, memory| engine.ring(tables, memory, device, word));
        }
        rang
    }

    /// Looks at the doorbells and takes one step, at this time.
    pub(super) fn step(&mut self, now_ns: u64) -> Progress {
        // First, because the delay of a slow NIC begins at the doorbell.
        self.core[0].engine.set_time(now_ns);
        let rang = self.look_at_doorbells();
        if self.memory.failure.is_some() {
            return if rang { Progress::Moved } else { Progress::Idle };
        }
        match self.with_engine(|engine, tables, held, memory| engine.step(tables, held, memory)) {
            Progress::Idle if rang => Progress::Moved,
            progress => progress,
        }
    }

    /// Makes the held writes to this range of memory visible.
    pub(super) fn settle(&mut self, first: u64, bytes: u64) {
        self.with_engine(|_, _, held, memory| held.settle(memory, first, bytes));
    }

    fn with_engine<T>(
        &mut self,
        work: impl FnOnce(&mut Engine, &mut Tables<'_>, &mut Held<'_>, &mut HostMemory) -> T,
    ) -> T {
        let mut tables = Tables {
            queues: &mut self.queues,
            busy: &mut self.busy,
            completions: &mut self.completions,
            regions: &mut self.regions,
            faults: &mut self.faults,
        };
        let lock = self.core.as_ptr();
        let core = &mut self.core[0];
        let mut held = Held::new(&mut self.items, &mut core.usage, self.stage, STAGE_BYTES);
        // The lock of the fabric orders the threads that step the engine, as a word would.
        watch::word(lock, watch::Access::Load, Ordering::Acquire);
        let done = work(&mut core.engine, &mut tables, &mut held, &mut self.memory);
        watch::word(lock, watch::Access::Store, Ordering::Release);
        done
    }

    /// Injects a fault once.
    ///
    /// # Errors
    /// [`Reason::Full`] if there is no room for another pending fault.
    pub(super) fn inject(&mut self, fault: Fault) -> Answer<()> {
        let fault = Switch::on(fault);
        let Some(free) = self.faults.iter_mut().find(|switch| !switch.is_on()) else { return self.faults.push(fault) };
        *free = fault;
        Ok(())
    }

    /// Adds a queue pair. Returns its number.
    pub(super) fn add_queue(&mut self, queue: QueuePair) -> Answer<u32> {
        let number = put(&mut self.queues, |queue| !queue.live, queue)?;
        while self.busy.len() * 64 < self.queues.len() {
            self.busy.push(0)?;
        }
        Ok(number)
    }

    /// Adds a doorbell. Returns its number and its address.
    pub(super) fn add_doorbell(&mut self, device: u32) -> Answer<(u32, u64)> {
        let number = first_free(&self.uars, Option::is_none);
        let doorbell = match &self.doorbells {
            Some(words) => {
                Reason::Full.refuse_if(number >= DOORBELLS)?;
                self.clear_doorbell(number).map_err(|_| Reason::Engine)?;
                Doorbell { address: words.address() + 8 * number as u64, _page: None }
            }
            None => {
                let page = Box::new(Page([const { AtomicU64::new(0) }; PAGE as usize / 8]));
                Doorbell { address: (&raw const page.0[DOORBELL_WORD]) as u64, _page: Some(page) }
            }
        };
        while self.owners.len() <= number {
            self.owners.push(0)?;
        }
        self.owners[number] = device.into();
        let address = doorbell.address;
        Ok((add(&mut self.uars, doorbell), address))
    }

    pub(super) fn config(&self, device: u32) -> &SoftConfig {
        &self.devices[device as usize]
    }

    /// Returns the object of a handle, if it belongs to this device.
    pub(super) fn find(&self, handle: Handle, device: u32) -> Result<&Object, HcaError> {
        let found = self.objects.get(&handle.0).filter(|object| object.device == device);
        found.ok_or(HcaError::NoObject(handle))
    }

    /// Returns whether the device has an object of this name.
    pub(super) fn has(&self, device: u32, name: Name) -> bool {
        self.objects.values().any(|object| object.device == device && object.name == name)
    }

    /// Returns a handle for a new object.
    pub(super) fn keep(&mut self, object: Object) -> Handle {
        self.serial += 1;
        self.objects.insert(self.serial, object);
        Handle(self.serial)
    }

    /// Destroys an object of this kind that no other object uses.
    pub(super) fn end(&mut self, handle: Handle, kind: Kind) -> Answer<()> {
        let named = self.objects.get(&handle.0).map(|object| object.name);
        let name = named.filter(|name| name.0 == kind).ok_or(Reason::WrongObject)?;
        Reason::InUse.refuse_if(self.objects.values().any(|user| user.uses.contains(&name)))?;
        let number = name.1 as usize;
        match kind {
            Kind::Domain => self.domains[number] = None,
            Kind::Region => {
                // Makes held writes to the region visible before its memory may be freed.
                let Region { memory, bytes, .. } = self.regions[number];
                self.settle(memory, bytes);
                self.regions[number].live = false;
            }
            Kind::Umem => self.umems[number] = None,
            Kind::Uar => self.uars[number] = None,
            Kind::Completions => self.completions[number].live = false,
            Kind::Queue => self.queues[number].live = false,
        }
        self.objects.remove(&handle.0);
        Ok(())
    }

    /// Checks that the device may have one more object.
    pub(super) fn check_room(&self, device: u32) -> Answer<()> {
        let count = self.objects.values().filter(|object| object.device == device).count();
        Reason::Full.refuse_if(count >= self.config(device).objects)
    }

    pub(super) fn add_region(
        &mut self,
        device: u32,
        (kind, domain): Name,
        memory: &Extent,
        start: u64,
        access: Access,
    ) -> Answer<u32> {
        self.check_room(device)?;
        Reason::WrongObject.refuse_if(kind != Kind::Domain)?;
        // The verbs require that.
        let writes = access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
        Reason::Access.refuse_if(writes && !access.contains(Access::LOCAL_WRITE))?;
        let number = put(&mut self.regions, |region| !region.live, Region::default())?;
        // The low bits differ between uses of a slot, so that a stale key is noticed.
        let key = number << 8 | (self.serial as u32 & 0xff);
        self.regions[number as usize] = Region {
            live: true,
            key,
            device,
            domain,
            start,
            memory: memory.address,
            bytes: memory.bytes,
            rights: Rights {
                local_write: access.contains(Access::LOCAL_WRITE),
                remote_read: access.contains(Access::REMOTE_READ),
                remote_write: access.contains(Access::REMOTE_WRITE),
                remote_atomic: access.contains(Access::REMOTE_ATOMIC),
            },
            relaxed: access.contains(Access::RELAXED_ORDERING),
        };
        Ok(key)
    }
}

/// Returns the first free slot except 0, or the number after the last slot.
fn first_free<T>(places: &[T], is_free: impl Fn(&T) -> bool) -> usize {
    places.iter().skip(1).position(is_free).map_or(places.len(), |free| free + 1)
}

/// Puts an element into the first free slot. Returns its number.
pub(super) fn put<T: Copy>(table: &mut Table<T>, is_free: impl Fn(&T) -> bool, element: T) -> Answer<u32> {
    let number = first_free(table, is_free);
    if number == table.len() {
        table.push(element)?;
    } else {
        table[number] = element;
    }
    Ok(number as u32)
}

/// Puts an object into the first free slot. Returns its number.
pub(super) fn add<T>(slots: &mut Slots<T>, object: T) -> u32 {
    let number = first_free(slots, Option::is_none);
    if number == slots.len() {
        slots.push(None);
    }
    slots[number] = Some(object);
    number as u32
}
