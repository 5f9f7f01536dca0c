// SPDX-License-Identifier: MIT OR Apache-2.0
//! What can be made to go wrong, and what the engine found wrong with its user.

use gin_abi::mlx5::cqe::Syndrome;

/// Something to go wrong once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fault {
    /// The NIC, or `None` for any.
    pub device: Option<u32>,
    /// The queue pair, or `None` for whichever is first.
    pub queue: Option<u32>,
    /// The entry, counted from 0 since the queue pair began. With no queue named, the requests of the NIC that come before
    /// it: entries that reach the peer, but a FETCH_ADD behind a WRITE, which is its signal.
    pub entry: u64,
    /// What happens to it.
    pub kind: FaultKind,
}

/// Stands for any NIC or queue pair in a [`Switch`].
const ANY: u32 = u32::MAX;

/// A place for a [`Fault`], as the engine has it.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Switch {
    on: bool,
    device: u32,
    queue: u32,
    entry: u64,
    kind: FaultKind,
}

impl Switch {
    /// Nothing goes wrong.
    pub const OFF: Self = Self { on: false, device: ANY, queue: ANY, entry: 0, kind: FaultKind::Drop };

    /// This goes wrong.
    pub fn on(fault: Fault) -> Self {
        let Fault { device, queue, entry, kind } = fault;
        Self { on: true, device: device.unwrap_or(ANY), queue: queue.unwrap_or(ANY), entry, kind }
    }

    /// Whether it is still to go wrong.
    pub const fn is_on(&self) -> bool {
        self.on
    }

    /// What happens to entry `index` of a queue pair; the switch is off then. `request`: the entry is one that counts
    /// where no queue pair is named, and moves more than a signal.
    pub(crate) fn take(&mut self, device: u32, queue: u32, index: u64, request: Option<bool>) -> Option<FaultKind> {
        if !self.on || (self.device != ANY && self.device != device) {
            return None;
        }
        let request = request.is_some_and(|moves| moves || self.kind != FaultKind::Stall);
        let counted = self.queue == ANY;
        let hit = if counted { request && self.entry == 0 } else { self.queue == queue && self.entry == index };
        if hit {
            self.on = false;
            return Some(self.kind);
        }
        if counted && request {
            self.entry -= 1;
        }
        None
    }
}

/// What happens to an entry.
#[repr(C, u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultKind {
    /// It never reaches the peer; the sender learns that there was no answer.
    Drop,
    /// It takes effect at the peer, but the sender learns that there was no answer.
    LoseAnswer,
    /// Its answer comes so many steps later.
    Delay(u64),
    /// It fails at once, for this reason.
    Fail(Syndrome),
    /// It never begins, nor does what comes behind it. Where no queue pair is named, signals do not count.
    Stall,
}

/// Something that the engine does wrong all the time, to prove that its users' tests notice.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Mistake {
    /// Nothing.
    #[default]
    None,
    /// DUMPs bring nothing into view.
    IgnoreDumps,
    /// Words that must come behind earlier writes do not.
    RelaxAll,
    /// Atomics add twice.
    AddTwice,
    /// Writes of more than 8 bytes never land.
    LoseWrites,
}

impl Mistake {
    /// All but none.
    pub const ALL: [Self; 4] = [Self::IgnoreDumps, Self::RelaxAll, Self::AddTwice, Self::LoseWrites];
}

/// Vendor's part of a syndrome, of errors that the engine raises where hardware would not.
pub mod vendor {
    /// As a fault switch says.
    pub const SWITCH: u8 = 0xf0;
    /// See [`Violation`](super::Violation).
    pub const VIOLATION: u8 = 0xf1;
}

/// Something that the user of the engine did wrong, and that hardware would let pass, or answer in no defined way.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Violation {
    /// What.
    pub kind: ViolationKind,
    /// The queue pair, or the completion queue of [`ViolationKind::Overrun`].
    pub queue: u32,
    /// What it should have been, or the limit.
    pub expected: u64,
    /// What it was.
    pub seen: u64,
}

/// What was wrong.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum ViolationKind {
    /// A doorbell for a queue pair that is not there, or is of another NIC.
    UnknownQueue,
    /// A doorbell for a queue pair that does not send.
    NotReady,
    /// A doorbell announced fewer entries than one before, or more than the queue holds: 16 bits do not tell these apart.
    DoorbellRange,
    /// The doorbell record went backwards, or past what the queue holds.
    RecordRange,
    /// A doorbell announced entries that its record does not have.
    DoorbellBeforeRecord,
    /// An entry was posted over one that is not complete.
    Overwritten,
    /// A slot that was announced holds no entry that can be executed; `seen` is the number of an
    /// [`EntryError`](gin_abi::mlx5::wqe::EntryError), in the order of its declaration.
    BadEntry,
    /// A completion queue without room, where overruns are not ignored.
    Overrun,
    /// An entry waits for a completion queue, but its queue pair is no core-direct master.
    NotMaster,
}
