// SPDX-License-Identifier: MIT OR Apache-2.0
//! The objects of software NICs and their uses of each other.

use super::SoftConfig;
use super::firmware::{Answer, Reason};
use super::memory::HostMemory;
use super::place::{DOORBELLS, EnginePlace};
use super::table::Table;
use gin_nic::hca::{Access, Extent, Handle, HcaError};
use gin_soft_hca::faults::Switch;
use gin_soft_hca::held::{Held, Item, Usage};
use gin_soft_hca::kernel;
use gin_soft_hca::tables::{CompletionQueue, QueuePair, Region, Rights};
use gin_soft_hca::{Engine, Fault, Options, Progress, Tables};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// The bytes of a page of memory, and of a doorbell page.
pub(super) const PAGE: u64 = 4096;
/// The index of the doorbell's word in a doorbell page: at byte 0x800, as on a NIC.
pub(super) const DOORBELL_WORD: usize = 0x100;
/// The number of the event queue that completion queues name.
pub(super) const EVENT_QUEUE: u32 = 5;
/// The most ranges that the engine holds back, and the most bytes of them.
const HELD: usize = 256;
const STAGE_BYTES: usize = 1 << 20;

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

/// An object, by its number among the objects of its kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Object {
    pub(super) kind: Kind,
    pub(super) device: u32,
    pub(super) number: u32,
}

impl Object {
    /// Checks that the object is of this kind.
    pub(super) fn check_kind(self, kind: Kind) -> Answer<()> {
        Reason::WrongObject.refuse_if(self.kind != kind)
    }
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

/// An object with users, which cannot be destroyed before them.
pub(super) struct Owned<T> {
    pub(super) device: u32,
    pub(super) users: u32,
    pub(super) what: T,
}

/// Memory for rings and records.
pub(super) struct RingMemory {
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) written: bool,
}

/// The objects that a queue pair, a completion queue or a region uses. Number 0 is no object.
#[derive(Clone, Debug, Default)]
pub(super) struct Uses {
    pub(super) umems: Vec<u32>,
    pub(super) uar: u32,
    pub(super) completions: Vec<u32>,
    pub(super) domain: Option<u32>,
}

impl Uses {
    /// Returns the use of a protection domain alone.
    fn of_domain(domain: u32) -> Self {
        Self { domain: Some(domain), ..Self::default() }
    }
}

/// Numbered objects. Number 0 is never used.
pub(super) type Slots<T> = Vec<Option<Owned<T>>>;

pub(super) struct HcaState {
    pub(super) devices: Vec<SoftConfig>,
    /// The objects by handle.
    pub(super) objects: BTreeMap<u64, Object>,
    pub(super) domains: Slots<()>,
    pub(super) umems: Slots<RingMemory>,
    pub(super) uars: Slots<Doorbell>,
    pub(super) queues: Table<QueuePair>,
    /// The options of the engine.
    pub(super) busy: Table<u64>,
    pub(super) queue_uses: Vec<Uses>,
    pub(super) completions: Table<CompletionQueue>,
    pub(super) completion_uses: Vec<(Uses, u32)>,
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
    _stage: Box<[AtomicU64]>,
    pub(super) memory: HostMemory,
    pub(super) place: EnginePlace,
    serial: u64,
}

impl HcaState {
    pub(super) fn new(options: Options) -> Self {
        let stage: Box<[AtomicU64]> = (0..STAGE_BYTES / 8).map(|_| AtomicU64::new(0)).collect();
        Self {
            devices: Vec::new(),
            objects: BTreeMap::new(),
            domains: vec![None],
            umems: vec![None],
            uars: vec![None],
            queues: Table::Own(vec![QueuePair::default()]),
            busy: Table::Own(vec![0]),
            queue_uses: vec![Uses::default()],
            completions: Table::Own(vec![CompletionQueue::default()]),
            completion_uses: vec![Default::default()],
            regions: Table::Own(vec![Region::default()]),
            faults: Table::Own(Vec::new()),
            items: Table::Own(vec![Item::ROOM; HELD]),
            core: Table::Own(vec![kernel::KernelState { engine: Engine::new(options), usage: Usage::default() }]),
            owners: Table::Own(vec![0]),
            stage: stage.as_ptr() as u64,
            _stage: stage,
            memory: HostMemory::default(),
            place: EnginePlace::Process,
            serial: 0,
        }
    }

    /// Looks at the doorbells. Returns whether one rang.
    pub(super) fn look_at_doorbells(&mut self) -> bool {
        let mut rang = false;
        for number in 0..self.uars.len() {
            let Some(uar) = &self.uars[number] else { continue };
            // Safety: the word exists as long as the doorbell.
            let word = unsafe { AtomicU64::from_ptr(uar.what.address as usize as *mut u64) };
            if word.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let (device, word) = (uar.device, word.swap(0, Ordering::Acquire));
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

    pub(super) fn deliver(&mut self) {
        self.settle(0, u64::MAX);
    }

    /// Makes the held writes to this range of memory visible.
    fn settle(&mut self, first: u64, bytes: u64) {
        self.with_engine(|_, _, held, memory| held.settle(memory, first, bytes));
    }

    fn with_engine<T>(
        &mut self,
        work: impl FnOnce(&mut Engine, &mut Tables<'_>, &mut Held<'_>, &mut HostMemory) -> T,
    ) -> T {
        let stage_bytes = self.stage_bytes();
        let mut tables = Tables {
            queues: &mut self.queues,
            busy: &mut self.busy,
            completions: &mut self.completions,
            regions: &mut self.regions,
            faults: &mut self.faults,
        };
        let core = &mut self.core[0];
        let mut held = Held::new(&mut self.items, &mut core.usage, self.stage, stage_bytes);
        work(&mut core.engine, &mut tables, &mut held, &mut self.memory)
    }

    pub(super) fn engine(&self) -> &Engine {
        &self.core[0].engine
    }

    pub(super) fn stage_bytes(&self) -> u64 {
        STAGE_BYTES as u64
    }

    /// Injects a fault once.
    ///
    /// # Errors
    /// [`Reason::Full`] if there is no room for another pending fault.
    pub(super) fn inject(&mut self, fault: Fault) -> Answer<()> {
        match self.faults.iter_mut().find(|switch| !switch.is_on()) {
            Some(free) => {
                *free = Switch::on(fault);
                Ok(())
            }
            None => self.faults.push(Switch::on(fault)),
        }
    }

    /// Adds a queue pair. Returns its number.
    pub(super) fn add_queue(&mut self, queue: QueuePair, uses: Uses) -> Answer<u32> {
        let number = free_slot(&mut self.queues, |queue| !queue.live, queue)?;
        if self.queue_uses.len() <= number {
            self.queue_uses.push(uses);
        } else {
            self.queue_uses[number] = uses;
        }
        while self.busy.len() * 64 < self.queues.len() {
            self.busy.push(0)?;
        }
        Ok(number as u32)
    }

    /// Adds a completion queue. Returns its number.
    pub(super) fn add_completions(&mut self, queue: CompletionQueue, uses: Uses) -> Answer<u32> {
        let number = free_slot(&mut self.completions, |queue| !queue.live, queue)?;
        if self.completion_uses.len() <= number {
            self.completion_uses.push((uses, 0));
        } else {
            self.completion_uses[number] = (uses, 0);
        }
        Ok(number as u32)
    }

    /// Adds a doorbell. Returns its number.
    pub(super) fn add_doorbell(&mut self, device: u32) -> Answer<u32> {
        let number = add(&mut self.uars, Owned { device, users: 0, what: Doorbell { address: 0, _page: None } });
        let placed = match self.place.doorbell(number) {
            Some(_) if number as usize >= DOORBELLS => Err(Reason::Full),
            Some(address) => Ok(Doorbell { address, _page: None }),
            None => {
                let page = Box::new(Page([const { AtomicU64::new(0) }; PAGE as usize / 8]));
                Ok(Doorbell { address: (&raw const page.0[DOORBELL_WORD]) as u64, _page: Some(page) })
            }
        };
        let cleared = self.clear_doorbell(number).map_err(|_| Reason::Engine);
        match cleared.and(placed) {
            Ok(doorbell) => {
                if let Some(Some(uar)) = self.uars.get_mut(number as usize) {
                    uar.what = doorbell;
                }
            }
            Err(refusal) => {
                self.uars[number as usize] = None;
                return Err(refusal);
            }
        }
        while self.owners.len() <= number as usize {
            self.owners.push(0)?;
        }
        self.owners[number as usize] = device.into();
        Ok(number)
    }

    pub(super) fn config(&self, device: u32) -> &SoftConfig {
        &self.devices[device as usize]
    }

    /// Returns the object of a handle, if it belongs to this device.
    pub(super) fn find(&self, handle: Handle, device: u32) -> Result<Object, HcaError> {
        let found = self.objects.get(&handle.0).copied().filter(|object| object.device == device);
        found.ok_or(HcaError::NoObject(handle))
    }

    /// Returns a handle for a new object.
    pub(super) fn keep(&mut self, object: Object) -> Handle {
        self.serial += 1;
        self.objects.insert(self.serial, object);
        Handle(self.serial)
    }

    /// Checks that the device may have one more object.
    pub(super) fn check_room(&self, device: u32) -> Answer<()> {
        let count = self.objects.values().filter(|object| object.device == device).count();
        Reason::Full.refuse_if(count >= self.config(device).objects)
    }

    pub(super) fn add_domain(&mut self, device: u32) -> Answer<u32> {
        self.check_room(device)?;
        Ok(add(&mut self.domains, Owned { device, users: 0, what: () }))
    }

    pub(super) fn remove_domain(&mut self, object: Object) -> Answer<()> {
        object.check_kind(Kind::Domain)?;
        remove(&mut self.domains, object.number)
    }

    pub(super) fn add_region(&mut self, domain: Object, memory: &Extent, start: u64, access: Access) -> Answer<u32> {
        self.check_room(domain.device)?;
        domain.check_kind(Kind::Domain)?;
        // The verbs require that.
        Reason::Access.refuse_if((access.remote_write || access.remote_atomic) && !access.local_write)?;
        let number = free_slot(&mut self.regions, |region| !region.live, Region::default())?;
        // The low bits differ between uses of a slot, so that a stale key is noticed.
        let key = (number as u32) << 8 | (self.serial as u32 & 0xff);
        self.regions[number] = Region {
            live: true,
            key,
            device: domain.device,
            domain: domain.number,
            start,
            memory: memory.address,
            bytes: memory.bytes,
            rights: Rights {
                local_write: access.local_write,
                remote_read: access.remote_read,
                remote_write: access.remote_write,
                remote_atomic: access.remote_atomic,
            },
            relaxed: access.relaxed_ordering,
        };
        self.count(&Uses::of_domain(domain.number), true);
        Ok(key)
    }

    pub(super) fn remove_region(&mut self, object: Object) -> Answer<()> {
        object.check_kind(Kind::Region)?;
        // Makes held writes to the region visible before its memory may be freed.
        let region = self.regions[object.number as usize];
        self.settle(region.memory, region.bytes);
        self.regions[object.number as usize].live = false;
        self.count(&Uses::of_domain(region.domain), false);
        Ok(())
    }

    pub(super) fn trim_umem(&mut self, number: u32, bytes: u64) {
        if let Some(Some(umem)) = self.umems.get_mut(number as usize) {
            umem.what.bytes = umem.what.bytes.min(bytes);
        }
    }

    /// Returns the address of a doorbell.
    pub(super) fn doorbell(&self, number: u32) -> Option<u64> {
        self.uars.get(number as usize)?.as_ref().map(|uar| uar.what.address)
    }

    /// Adds a user to, or removes one from, all objects that `uses` names.
    pub(super) fn count(&mut self, uses: &Uses, more: bool) {
        let count = |users: &mut u32| *users = if more { *users + 1 } else { *users - 1 };
        for &umem in &uses.umems {
            if let Some(Some(umem)) = self.umems.get_mut(umem as usize) {
                count(&mut umem.users);
            }
        }
        if let Some(Some(uar)) = self.uars.get_mut(uses.uar as usize) {
            count(&mut uar.users);
        }
        for &queue in &uses.completions {
            count(&mut self.completion_uses[queue as usize].1);
        }
        if let Some(Some(domain)) = uses.domain.and_then(|domain| self.domains.get_mut(domain as usize)) {
            count(&mut domain.users);
        }
    }
}

/// Puts an element into the first free slot except 0, or after the last slot. Returns its number.
fn free_slot<T: Copy>(table: &mut Table<T>, is_free: impl Fn(&T) -> bool, element: T) -> Answer<usize> {
    match table.iter().skip(1).position(is_free) {
        Some(free) => {
            table[free + 1] = element;
            Ok(free + 1)
        }
        None => table.push(element).map(|()| table.len() - 1),
    }
}

/// Puts an object into the first free slot. Returns its number.
pub(super) fn add<T>(slots: &mut Slots<T>, thing: Owned<T>) -> u32 {
    match slots.iter().skip(1).position(Option::is_none) {
        Some(free) => {
            slots[free + 1] = Some(thing);
            free as u32 + 1
        }
        None => {
            slots.push(Some(thing));
            slots.len() as u32 - 1
        }
    }
}

/// Removes an object that no other uses.
pub(super) fn remove<T>(slots: &mut Slots<T>, number: u32) -> Answer<()> {
    match slots.get_mut(number as usize) {
        Some(Some(thing)) if thing.users > 0 => Err(Reason::InUse),
        Some(slot @ Some(_)) => {
            *slot = None;
            Ok(())
        }
        _ => Err(Reason::WrongObject),
    }
}
