// SPDX-License-Identifier: MIT OR Apache-2.0
//! What software NICs own, and who uses what.

use super::firmware::{Reason, Refusal};
use super::{ProcessMemory, SoftConfig};
use crate::nic::hca::{Access, Extent, Handle, HcaError};
use gin_abi::mlx5::command::Status;
use gin_soft_hca::held::{Held, Item};
use gin_soft_hca::tables::{CompletionQueue, Queue, Region, Rights};
use gin_soft_hca::{Engine, Fault, Options, Progress, Tables};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Pages of memory, and doorbell pages.
pub(super) const PAGE: u64 = 4096;
/// Index of the word of a doorbell page that doorbells are stored to; at byte 0x800, as on a NIC.
pub(super) const DOORBELL_WORD: usize = 0x100;
/// The event queue that completion queues have to name.
pub(super) const EVENT_QUEUE: u32 = 5;
/// Ranges that may be held back, and bytes of them.
const HELD: usize = 256;
const STAGE_BYTES: usize = 1 << 20;

/// Written by a NIC, not in view yet.
type HeldBytes = Held<Box<[Option<Item>]>>;

/// What an object is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Domain,
    Region,
    Umem,
    Uar,
    Completions,
    Queue,
}

/// An object, by its number among those of its kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Object {
    pub(super) kind: Kind,
    pub(super) device: u32,
    pub(super) number: u32,
}

/// A doorbell page.
#[repr(align(4096))]
pub(super) struct Page(pub(super) [AtomicU64; PAGE as usize / 8]);

/// Something with users, that cannot go before them.
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

/// What a queue pair or a completion queue uses.
#[derive(Clone, Debug, Default)]
pub(super) struct Uses {
    pub(super) umems: Vec<u32>,
    pub(super) uar: u32,
    pub(super) completions: Vec<u32>,
    pub(super) domain: Option<u32>,
}

/// Numbered things; number 0 is never given.
pub(super) type Slots<T> = Vec<Option<Owned<T>>>;

pub(super) struct State {
    pub(super) devices: Vec<SoftConfig>,
    /// By handle.
    pub(super) objects: BTreeMap<u64, Object>,
    pub(super) domains: Slots<()>,
    pub(super) umems: Slots<RingMemory>,
    pub(super) uars: Slots<Box<Page>>,
    pub(super) queues: Vec<Queue>,
    pub(super) queue_uses: Vec<Uses>,
    pub(super) completions: Vec<CompletionQueue>,
    pub(super) completion_uses: Vec<(Uses, u32)>,
    regions: Vec<Region>,
    pub(super) faults: Vec<Option<Fault>>,
    pub(super) engine: Engine,
    held: HeldBytes,
    _stage: Box<[AtomicU64]>,
    serial: u64,
}

impl State {
    pub(super) fn new(options: Options) -> Self {
        let stage: Box<[AtomicU64]> = (0..STAGE_BYTES / 8).map(|_| AtomicU64::new(0)).collect();
        Self {
            devices: Vec::new(),
            objects: BTreeMap::new(),
            domains: vec![None],
            umems: vec![None],
            uars: vec![None],
            queues: vec![Queue::default()],
            queue_uses: vec![Uses::default()],
            completions: vec![CompletionQueue::default()],
            completion_uses: vec![Default::default()],
            regions: vec![Region::default()],
            faults: Vec::new(),
            engine: Engine::new(options),
            held: Held::new(vec![None; HELD].into(), stage.as_ptr() as u64, STAGE_BYTES as u64),
            _stage: stage,
            serial: 0,
        }
    }

    /// Whether a doorbell rang.
    pub(super) fn look_at_doorbells(&mut self) -> bool {
        let mut rang = false;
        for number in 0..self.uars.len() {
            let Some(uar) = &self.uars[number] else { continue };
            let word = &uar.what.0[DOORBELL_WORD];
            if word.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let (device, word) = (uar.device, word.swap(0, Ordering::Acquire));
            rang = true;
            let (engine, mut tables, _) = self.parts();
            engine.ring(&mut tables, &mut ProcessMemory, device, word);
        }
        rang
    }

    /// Does one thing, at this time.
    pub(super) fn step(&mut self, now_ns: u64) -> Progress {
        let (engine, mut tables, held) = self.parts();
        engine.tell_time(now_ns);
        engine.step(&mut tables, held, &mut ProcessMemory)
    }

    pub(super) fn deliver(&mut self) {
        self.held.settle(&mut ProcessMemory, 0, u64::MAX);
    }

    fn parts(&mut self) -> (&mut Engine, Tables<'_>, &mut HeldBytes) {
        let tables = Tables {
            queues: &mut self.queues,
            completions: &mut self.completions,
            regions: &mut self.regions,
            faults: &mut self.faults,
        };
        (&mut self.engine, tables, &mut self.held)
    }

    pub(super) fn config(&self, device: u32) -> &SoftConfig {
        &self.devices[device as usize]
    }

    /// The object of this device.
    pub(super) fn find(&self, handle: Handle, device: u32) -> Result<Object, HcaError> {
        let found = self.objects.get(&handle.0).copied().filter(|object| object.device == device);
        found.ok_or(HcaError::NoObject(handle))
    }

    /// A handle for a new object.
    pub(super) fn keep(&mut self, object: Object) -> Handle {
        self.serial += 1;
        self.objects.insert(self.serial, object);
        Handle(self.serial)
    }

    /// Whether the device may have one more object.
    pub(super) fn check_room(&self, device: u32) -> Result<(), Refusal> {
        let count = self.objects.values().filter(|object| object.device == device).count();
        if count < self.config(device).objects { Ok(()) } else { Err(Reason::Full.refuse(Status::NoResources)) }
    }

    pub(super) fn add_domain(&mut self, device: u32) -> Result<u32, Refusal> {
        self.check_room(device)?;
        Ok(add(&mut self.domains, Owned { device, users: 0, what: () }))
    }

    pub(super) fn remove_domain(&mut self, object: Object) -> Result<(), Refusal> {
        if object.kind != Kind::Domain {
            return Err(Reason::WrongObject.refuse(Status::BadResource));
        }
        remove(&mut self.domains, object.number)
    }

    pub(super) fn add_region(
        &mut self,
        domain: Object,
        memory: &Extent,
        start: u64,
        access: Access,
    ) -> Result<u32, Refusal> {
        self.check_room(domain.device)?;
        if domain.kind != Kind::Domain {
            return Err(Reason::WrongObject.refuse(Status::BadResource));
        }
        // As the verbs demand.
        if (access.remote_write || access.remote_atomic) && !access.local_write {
            return Err(Reason::Access.refuse(Status::BadParameter));
        }
        let number = match self.regions.iter().skip(1).position(|region| !region.live) {
            Some(free) => free + 1,
            None => {
                self.regions.push(Region::default());
                self.regions.len() - 1
            }
        };
        // The low bits differ from use to use of a slot, so that a stale key is noticed.
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
        use_one(&mut self.domains, domain.number);
        Ok(key)
    }

    pub(super) fn remove_region(&mut self, object: Object) -> Result<(), Refusal> {
        if object.kind != Kind::Region {
            return Err(Reason::WrongObject.refuse(Status::BadResource));
        }
        // What is on its way into the region arrives before the memory may go.
        let region = self.regions[object.number as usize];
        self.held.settle(&mut ProcessMemory, region.memory, region.bytes);
        self.regions[object.number as usize].live = false;
        release(&mut self.domains, region.domain);
        Ok(())
    }

    pub(super) fn trim_umem(&mut self, number: u32, bytes: u64) {
        if let Some(Some(umem)) = self.umems.get_mut(number as usize) {
            umem.what.bytes = umem.what.bytes.min(bytes);
        }
    }

    pub(super) fn page(&self, number: u32) -> Option<&Page> {
        self.uars.get(number as usize)?.as_ref().map(|uar| &*uar.what)
    }

    /// Counts, or counts off, the users of everything that `uses` names.
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

/// Puts a thing into the first free place.
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

/// Takes a thing out that nobody uses.
pub(super) fn remove<T>(slots: &mut Slots<T>, number: u32) -> Result<(), Refusal> {
    let Some(slot) = slots.get_mut(number as usize) else {
        return Err(Reason::WrongObject.refuse(Status::BadResource));
    };
    match slot {
        Some(thing) if thing.users > 0 => Err(Reason::InUse.refuse(Status::ResourceBusy)),
        Some(_) => {
            *slot = None;
            Ok(())
        }
        None => Err(Reason::WrongObject.refuse(Status::BadResource)),
    }
}

fn use_one<T>(slots: &mut Slots<T>, number: u32) {
    if let Some(Some(thing)) = slots.get_mut(number as usize) {
        thing.users += 1;
    }
}

fn release<T>(slots: &mut Slots<T>, number: u32) {
    if let Some(Some(thing)) = slots.get_mut(number as usize) {
        thing.users -= 1;
    }
}
