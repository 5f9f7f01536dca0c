// SPDX-License-Identifier: MIT OR Apache-2.0
//! Faults to inject, and violations by the engine's user.

use gin_abi::mlx5::cqe::Syndrome;

/// A fault to inject once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fault {
    /// The NIC, or `None` for any.
    pub device: Option<u32>,
    /// The queue pair, or `None` for the first that matches.
    pub queue: Option<u32>,
    /// The entry, counted from 0 since the queue pair began. If no queue pair is named: the number of the NIC's
    /// requests before it. Requests are entries that reach the peer, except a FETCH_ADD behind a WRITE, which is its
    /// signal.
    pub entry: u64,
    /// The effect on the entry.
    pub kind: FaultKind,
}

/// Value for any NIC or queue pair in a [`Switch`].
const ANY: u32 = u32::MAX;

/// A slot for a [`Fault`], in the engine's form.
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
    /// A switch without a fault.
    pub const OFF: Self = Self { on: false, device: ANY, queue: ANY, entry: 0, kind: FaultKind::Drop };

    /// Creates a switch that injects this fault.
    pub fn on(fault: Fault) -> Self {
        let Fault { device, queue, entry, kind } = fault;
        Self { on: true, device: device.unwrap_or(ANY), queue: queue.unwrap_or(ANY), entry, kind }
    }

    /// Returns true if the fault has not occurred yet.
    pub const fn is_on(&self) -> bool {
        self.on
    }

    /// Returns the fault of entry `index` of a queue pair, and switches it off. `request` is `Some` if the entry counts
    /// where no queue pair is named, and true if it moves more than a signal.
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

/// The effect of a fault on an entry.
#[repr(C, u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultKind {
    /// The entry never reaches the peer. The sender receives no answer.
    Drop,
    /// The entry takes effect at the peer, but the sender receives no answer.
    LoseAnswer,
    /// The answer arrives this many steps later.
    Delay(u64),
    /// The entry fails at once with this syndrome.
    Fail(Syndrome),
    /// The entry never begins, and neither do later ones. If no queue pair is named, signals do not count.
    Stall,
}

/// A mistake that the engine makes all the time, to prove that the tests of its users notice.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Mistake {
    /// No mistake.
    #[default]
    None,
    /// DUMPs make no data visible.
    IgnoreDumps,
    /// Words that must follow earlier writes overtake them.
    RelaxAll,
    /// Atomics add twice.
    AddTwice,
    /// Writes of more than 8 bytes never take effect.
    LoseWrites,
}

impl Mistake {
    /// All mistakes.
    pub const ALL: [Self; 4] = [Self::IgnoreDumps, Self::RelaxAll, Self::AddTwice, Self::LoseWrites];
}

/// Vendor syndromes of errors that the engine raises where hardware would not.
pub mod vendor {
    /// The error comes from a fault switch.
    pub const SWITCH: u8 = 0xf0;
    /// The error comes from a [`Violation`](super::Violation).
    pub const VIOLATION: u8 = 0xf1;
}

/// A mistake of the engine's user that hardware would ignore or handle in an undefined way.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Violation {
    /// The kind.
    pub kind: ViolationKind,
    /// The queue pair, or the completion queue of [`ViolationKind::Overrun`].
    pub queue: u32,
    /// The expected value or the limit.
    pub expected: u64,
    /// The value found.
    pub seen: u64,
}

/// The kind of a violation.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum ViolationKind {
    /// A doorbell names a queue pair that does not exist, or of another NIC.
    UnknownQueue,
    /// A doorbell names a queue pair that does not send.
    NotReady,
    /// A doorbell announced fewer entries than an earlier one, or more than the queue holds. 16 bits do not distinguish
    /// the two.
    DoorbellRange,
    /// The doorbell record went backwards, or past the capacity of the queue.
    RecordRange,
    /// A doorbell announced entries that its record does not include.
    DoorbellBeforeRecord,
    /// An entry was posted over one that is not complete.
    Overwritten,
    /// An announced slot holds no executable entry. `seen` is the number of an
    /// [`EntryError`](gin_abi::mlx5::wqe::EntryError), in the order of its declaration.
    BadEntry,
    /// A completion queue has no room, and overruns are not ignored.
    Overrun,
    /// An entry waits for a completion queue, but its queue pair is not a core-direct master.
    NotMaster,
}
