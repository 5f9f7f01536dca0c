// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads doorbells and executes entries.
//!
//! Entries of a queue pair begin in order, each after a doorbell has announced it, and complete in order. A READ or an
//! atomic may be outstanding while later entries execute; a fence waits for it. Queue pairs take turns, in an order
//! drawn from the seed if there is one.
//!
//! # Why the engine is at least as strict as a NIC
//!
//! The engine judges programs that will drive NICs, so it may allow nothing that a NIC forbids, and must make visible
//! what a NIC may do. Because:
//!
//! - *Announcements.* A NIC reads the doorbell record, and entries up to the doorbell's end, at any time after the
//!   doorbell. `ring` refuses a record that is behind the doorbell or past the queue, a doorbell past the queue, and
//!   entries over ones that have not completed. A release that is too weak shows in the models of `gin-device` and not
//!   here, because the engine's CPU is stricter than a GPU.
//! - *Entries.* The engine reads an entry as late as it can, when it begins. An entry that was overwritten too early
//!   has another index, which `Entry::read` refuses, as it refuses reserved bits that are set and segments of a wrong
//!   size.
//! - *Effects arrive late.* READs, atomics and WRITEs take a number of steps drawn up to `Options::delay`, so answers
//!   of different queue pairs come in any order. Within one queue pair the order is the one that RC guarantees.
//! - *A completion does not make payload visible.* Bytes of a WRITE or a READ may be held back after their completion
//!   (`held`) until something that a NIC guarantees to push them does so.
//! - *A completion comes last.* Its words are stored after a release that covers the effects, the word with the owner
//!   bit after another one, and an overrun of the queue is a violation, not a wait.
//! - *Fences.* Every fence mode but the local one waits for outstanding READs and atomics. A READ or an atomic does not
//!   begin if the queue pair has as many outstanding as it may.
//! - *Rights.* Keys, bounds and access rights are checked for every entry when it executes, with the syndrome that a
//!   NIC reports. After an error the queue pair flushes what follows.
//!
//! The engine is less strict in one point: it executes one action at a time, so it shows interleavings of entries and
//! not of the bytes of one entry. A program must not depend on either.

mod requests;

use self::requests::{answered, carry_out, local_range, request};
use crate::faults::{FaultKind, Mistake, Switch, Violation, ViolationKind, vendor};
use crate::held::{Held, Reason};
use crate::memory::Memory;
use crate::tables::{Answer, CompletionQueue, Flight, QueuePair, Region, Stage, WINDOW};
use gin_abi::mlx5::be::Be32;
use gin_abi::mlx5::command::QpState;
use gin_abi::mlx5::cqe::{self, Completion, Syndrome, Tail};
use gin_abi::mlx5::doorbell::Doorbell;
use gin_abi::mlx5::wqe::{Entry, EntryError, SLOT_BYTES, SLOT_SEGMENTS, Segment, Slot, Work, opcode};

/// The tables that the engine works on. All of them may change between two steps.
#[derive(Debug)]
pub struct Tables<'a> {
    /// Queue pairs, by number.
    pub queues: &'a mut [QueuePair],
    /// One bit per queue pair, by number, set if the queue pair may have work. Only the engine uses them. Code that
    /// adds queue pairs adds as many bits, zero at first.
    pub busy: &'a mut [u64],
    /// Completion queues, by number.
    pub completions: &'a mut [CompletionQueue],
    /// Regions, by key without its low 8 bits.
    pub regions: &'a mut [Region],
    /// Faults to inject. The engine switches off faults that have occurred.
    pub faults: &'a mut [Switch],
}

/// Options of an engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// Largest number of steps from the beginning of a READ, an atomic or a WRITE to its answer. The number is drawn
    /// for each.
    pub delay: u64,
    /// Seed of the order of queue pairs and of delays. With 0, queue pairs take turns and every delay is the longest.
    pub seed: u64,
    /// True if entries of queue pairs that are not core-direct masters may not wait for completion queues.
    pub wait_needs_master: bool,
    /// True if a doorbell may ring before its record is stored. The engine then keeps the doorbell until the record has
    /// caught up. Device code of DOCA GPUNetIO rings, stores the record and rings again.
    pub early_doorbells: bool,
    /// True if unused bytes of entries may hold anything: signature, immediate, and reserved bytes of segments. Device
    /// code of DOCA GPUNetIO leaves them undefined.
    pub ignore_reserved: bool,
    /// True if a DUMP waits for outstanding READs of its queue pair also without a fence. NCCL posts such a DUMP behind
    /// READs and takes its completion for the visibility of their data.
    pub dump_waits_for_reads: bool,
    /// A NIC that receives everything late.
    pub slow: Option<Slow>,
    /// The mistake that the engine makes.
    pub mistake: Mistake,
}

/// A NIC to which all requests are delayed.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slow {
    /// The NIC.
    pub device: u32,
    /// Delay after the doorbell that found the queue pair without work, in units of [`Engine::set_time`].
    pub late: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            delay: 0,
            seed: 0,
            wait_needs_master: true,
            early_doorbells: false,
            ignore_reserved: false,
            dump_waits_for_reads: false,
            slow: None,
            mistake: Mistake::None,
        }
    }
}

/// The result of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Progress {
    /// The engine did something.
    Moved,
    /// The engine did nothing, but time passed for a pending answer.
    Waiting,
    /// There is nothing to do until a doorbell rings or a completion of another queue arrives.
    Idle,
}

/// The engine's state beside the tables. It has the layout of C, as they do.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Engine {
    delay: u64,
    seed: u64,
    /// Names a NIC that does not exist if none is slow.
    slow: Slow,
    random: u64,
    now: u64,
    time: u64,
    turn: u64,
    violations: u64,
    /// Valid if `violations` is not 0.
    first: Violation,
    mistake: Mistake,
    wait_needs_master: bool,
    early_doorbells: bool,
    ignore_reserved: bool,
    dump_waits_for_reads: bool,
}

/// The reason why an operation fails: the sender's syndrome, and whether its peer breaks as well.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Refusal {
    syndrome: Syndrome,
    peer_breaks: bool,
}

const NO_ANSWER: Refusal = Refusal { syndrome: Syndrome::RetryExceeded, peer_breaks: false };

impl Engine {
    /// Creates an engine.
    pub fn new(options: Options) -> Self {
        let Options { delay, seed, slow, mistake, .. } = options;
        Self {
            delay,
            seed,
            slow: slow.unwrap_or(Slow { device: u32::MAX, late: 0 }),
            random: seed,
            now: 0,
            time: 0,
            turn: 0,
            violations: 0,
            first: Violation { kind: ViolationKind::UnknownQueue, queue: 0, expected: 0, seen: 0 },
            mistake,
            wait_needs_master: options.wait_needs_master,
            early_doorbells: options.early_doorbells,
            ignore_reserved: options.ignore_reserved,
            dump_waits_for_reads: options.dump_waits_for_reads,
        }
    }

    /// Sets the time, for delays.
    pub const fn set_time(&mut self, time: u64) {
        self.time = time;
    }

    /// Returns the user's first violation, and the number of violations.
    pub const fn violations(&self) -> (Option<Violation>, u64) {
        (if self.violations == 0 { None } else { Some(self.first) }, self.violations)
    }

    fn violate(&mut self, kind: ViolationKind, queue: u32, expected: u64, seen: u64) {
        if self.violations == 0 {
            self.first = Violation { kind, queue, expected, seen };
        }
        self.violations += 1;
    }

    /// Returns a number below `limit`.
    fn draw(&mut self, limit: u64) -> u64 {
        // Marsaglia's xorshift; good enough to mix turns.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % limit.max(1)
    }

    /// Handles a doorbell of the NIC `device` with this word. A word that announces nothing new is not a mistake.
    pub fn ring(&mut self, tables: &mut Tables<'_>, memory: &mut impl Memory, device: u32, word: u64) {
        let Doorbell { end, queue: number } = Doorbell::read(word);
        let known = tables.queues.get_mut(number as usize).filter(|queue| queue.live && queue.device == device);
        let Some(queue) = known else {
            return self.violate(ViolationKind::UnknownQueue, number, 0, u64::from(end));
        };
        if !matches!(queue.state, QpState::ReadyToSend | QpState::Error) {
            return self.violate(ViolationKind::NotReady, number, QpState::ReadyToSend.code(), queue.state.code());
        }
        let new = ahead(queue.posted, end);
        self.announce(tables, memory, number, new);
    }

    /// Announces the next `new` entries of a queue pair, if its record includes them. Returns false if the doorbell
    /// waits for the record.
    fn announce(&mut self, tables: &mut Tables<'_>, memory: &mut impl Memory, number: u32, new: u64) -> bool {
        let Some(queue) = tables.queues.get_mut(number as usize) else { return false };
        let size = 1u64 << queue.log_size;
        let end = queue.posted + new;
        // Read the record first: its store came before the doorbell's.
        memory.fence_acquire();
        let record = Be32::from_memory(memory.load_u32(queue.record)).get();
        let recorded = ahead(queue.recorded, record as u16);
        let is_early = queue.recorded + recorded < end;
        let broken = if new > size {
            Some((ViolationKind::DoorbellRange, queue.posted, end & 0xffff))
        } else if record > 0xffff || recorded > size {
            Some((ViolationKind::RecordRange, queue.recorded, u64::from(record)))
        } else if is_early && !self.early_doorbells {
            Some((ViolationKind::DoorbellBeforeRecord, end, queue.recorded + recorded))
        } else if end > queue.finished + size {
            Some((ViolationKind::Overwritten, queue.finished + size, end))
        } else {
            None
        };
        if is_early && broken.is_none() {
            queue.early = queue.early.max(end);
            mark(tables.busy, number as usize);
            return false;
        }
        if broken.is_some() || queue.early <= end {
            queue.early = 0;
        }
        if let Some((kind, expected, seen)) = broken {
            queue.state = QpState::Error;
            // A thread that waits for these entries then learns that they were flushed.
            if end <= queue.finished + size {
                queue.posted = end;
            }
            mark(tables.busy, number as usize);
            self.violate(kind, number, expected, seen);
            return true;
        }
        if queue.started == queue.posted {
            queue.rung_at = self.time;
        }
        queue.posted = end;
        queue.recorded += recorded;
        mark(tables.busy, number as usize);
        true
    }

    /// Returns true if the next request of the queue pair is still delayed.
    fn is_late(&self, queue: &QueuePair) -> bool {
        self.slow.device == queue.peer_device && self.time < queue.rung_at.saturating_add(self.slow.late)
    }

    /// Executes one action.
    pub fn step(&mut self, tables: &mut Tables<'_>, held: &mut Held<'_>, memory: &mut impl Memory) -> Progress {
        self.now += 1;
        let count = tables.queues.len();
        let first = if self.seed == 0 { self.turn as usize } else { self.draw(count as u64) as usize };
        let mut waiting = false;
        // From `first` to the last queue pair, then from the start to `first`.
        for (from, to) in [(first.min(count), count), (0, first.min(count))] {
            let mut next = from;
            while let Some(number) = next_marked(tables.busy, next).filter(|&number| number < to) {
                next = number + 1;
                match self.advance(number, tables, held, memory) {
                    Progress::Moved => {
                        self.turn = next as u64;
                        return Progress::Moved;
                    }
                    Progress::Waiting => waiting = true,
                    Progress::Idle => {
                        let is_done =
                            |queue: &QueuePair| !queue.live || (queue.finished == queue.posted && queue.early == 0);
                        if tables.queues.get(number).is_none_or(is_done) {
                            unmark(tables.busy, number);
                        }
                    }
                }
            }
        }
        if waiting { Progress::Waiting } else { Progress::Idle }
    }

    /// Executes one action of a queue pair: the oldest that is possible.
    fn advance(
        &mut self,
        number: usize,
        tables: &mut Tables<'_>,
        held: &mut Held<'_>,
        memory: &mut impl Memory,
    ) -> Progress {
        let Some(queue) = tables.queues.get_mut(number).filter(|queue| queue.live) else { return Progress::Idle };
        let new = queue.early.saturating_sub(queue.posted);
        if new > 0 && self.announce(tables, memory, number as u32, new) {
            return Progress::Moved;
        }
        let Some(queue) = tables.queues.get_mut(number) else { return Progress::Idle };
        let (finished, started) = (queue.finished, queue.started);
        if finished < started {
            let flight = *queue.flight(finished);
            match flight.stage {
                Stage::Pending { .. } => {}
                _ => return self.retire(number, flight, tables, memory),
            }
        }
        // Answers arrive in the order of the requests.
        let mut waiting = false;
        for index in finished..started {
            if let Stage::Pending { due, answer } = queue.flight(index).stage {
                if due <= self.now {
                    let stage = answered(number as u32, answer, tables, held, memory);
                    if let Some(queue) = tables.queues.get_mut(number) {
                        queue.flight(index).stage = stage;
                    }
                    return Progress::Moved;
                }
                waiting = due != u64::MAX;
                break;
            }
        }
        let begun = match queue.state {
            QpState::ReadyToSend => self.begin(number, tables, held, memory),
            QpState::Error => flush(queue, memory),
            _ => false,
        };
        match (begun, waiting) {
            (true, _) => Progress::Moved,
            (false, true) => Progress::Waiting,
            (false, false) => Progress::Idle,
        }
    }

    /// Completes the oldest operation of a queue pair.
    fn retire(&mut self, number: usize, flight: Flight, tables: &mut Tables<'_>, memory: &mut impl Memory) -> Progress {
        let Some(queue) = tables.queues.get_mut(number) else { return Progress::Idle };
        let index = queue.finished;
        queue.finished += 1;
        let failure = match flight.stage {
            Stage::Failed { syndrome, vendor } => {
                queue.state = QpState::Error;
                // Operations begun after it are flushed, whatever their effect at the peer.
                for later in index + 1..queue.started {
                    queue.flight(later).stage = Stage::Flushed;
                }
                Some((syndrome, vendor))
            }
            Stage::Flushed => Some((Syndrome::Flushed, 0)),
            _ => None,
        };
        let bytes = if let Stage::Done { bytes } = flight.stage { bytes } else { 0 };
        if failure.is_some() || flight.completion {
            let completions = queue.completions;
            self.complete(tables, memory, completions, |number_there, log_size| {
                let tail = |opcode| Tail::new(opcode, flight.operation, number as u32, index, number_there, log_size);
                match failure {
                    None => Completion::good(tail(cqe::opcode::REQUEST), bytes),
                    Some((syndrome, vendor)) => Completion::error(tail(cqe::opcode::REQUEST_ERROR), syndrome, vendor),
                }
            });
        }
        Progress::Moved
    }

    /// Writes a completion.
    fn complete(
        &mut self,
        tables: &mut Tables<'_>,
        memory: &mut impl Memory,
        number: u32,
        make: impl FnOnce(u64, u32) -> Completion,
    ) {
        // A completion queue in use by a queue pair cannot be destroyed.
        let Some(queue) = tables.completions.get_mut(number as usize).filter(|queue| queue.live) else { return };
        if queue.record != 0 {
            let consumed = u64::from(Be32::from_memory(memory.load_u32(queue.record)).get());
            let full = queue.produced.wrapping_sub(consumed) & 0xff_ffff;
            if full >= 1 << queue.log_size {
                return self.violate(ViolationKind::Overrun, number, 1 << queue.log_size, full);
            }
        }
        let completion = make(queue.produced, queue.log_size);
        let slot = if queue.collapsed { 0 } else { queue.produced & ((1 << queue.log_size) - 1) };
        let at = queue.ring + slot * cqe::BYTES;
        let (tail, words) = (completion.words[cqe::TAIL_WORD], completion.words.iter().take(cqe::TAIL_WORD));
        // All effects of the operation come before its completion.
        memory.fence_release();
        for (index, word) in words.enumerate() {
            memory.store_u64(at + 8 * index as u64, *word);
        }
        memory.fence_release();
        memory.store_u64(at + 8 * cqe::TAIL_WORD as u64, tail);
        queue.produced += 1;
    }

    /// Begins the next entry of a queue pair, if possible.
    fn begin(&mut self, number: usize, tables: &mut Tables<'_>, held: &mut Held<'_>, memory: &mut impl Memory) -> bool {
        let Some(queue) = tables.queues.get_mut(number) else { return false };
        if queue.started == queue.posted
            || queue.started - queue.finished >= WINDOW as u64
            || queue.stalled
            || self.is_late(queue)
        {
            return false;
        }
        let index = queue.started;
        let mut slot = load_slot(queue, index, memory);
        if self.ignore_reserved {
            clear_reserved(&mut slot);
        }
        let entry = match Entry::read(&slot, index, number as u32) {
            Ok(entry) => entry,
            Err(error) => {
                let failed = Stage::Failed { syndrome: Syndrome::LocalOperation, vendor: vendor::VIOLATION };
                start(queue, Flight { operation: operation(&slot), completion: true, stage: failed });
                // In the order of the declaration.
                let seen = match error {
                    EntryError::Index => 0,
                    EntryError::Queue => 1,
                    EntryError::Operation => 2,
                    EntryError::Segments => 3,
                    EntryError::Reserved => 4,
                };
                self.violate(ViolationKind::BadEntry, number as u32, index, seen);
                return true;
            }
        };
        let is_read = |flight: &Flight| {
            matches!(flight.stage, Stage::Pending { answer: Answer::Data { .. } | Answer::Old { .. }, .. })
        };
        let mut reads = 0;
        for earlier in queue.finished..index {
            let flight = queue.flight(earlier);
            reads += u32::from(is_read(flight));
            // A peer drops requests that follow one that it has not accepted.
            if let Stage::Pending { answer: Answer::Refused { vendor: 0, .. }, .. } = flight.stage {
                return false;
            }
        }
        let reading = matches!(entry.work, Work::Read { .. } | Work::FetchAdd { .. });
        let dumps = self.dump_waits_for_reads && matches!(entry.work, Work::Dump { .. });
        // All fence modes except the local one wait. Local operations finish when they begin.
        if ((entry.flags.fence() > 1 || dumps) && reads > 0) || (reading && reads >= queue.reads) {
            return false;
        }
        if let Work::Wait { queue: awaited, index: completion } = entry.work {
            let master = queue.master || !self.wait_needs_master;
            let device = queue.device;
            let known = tables.completions.get(awaited as usize).filter(|queue| queue.live && queue.device == device);
            match known {
                Some(known) if master => {
                    let produced = known.produced.wrapping_sub(u64::from(completion) + 1) & 0xff_ffff;
                    if produced > 0x7f_ffff {
                        return false;
                    }
                }
                _ => {
                    if !master {
                        self.violate(ViolationKind::NotMaster, number as u32, 1, 0);
                    }
                    let failed = Stage::Failed { syndrome: Syndrome::LocalOperation, vendor: 0 };
                    start(queue, Flight { operation: operation(&slot), completion: true, stage: failed });
                    return true;
                }
            }
        }
        // A signal belongs to its put.
        let is_signal = matches!(entry.work, Work::FetchAdd { .. })
            && index > 0
            && queue.flight(index - 1).operation == opcode::WRITE;
        let is_local = matches!(entry.work, Work::Nop | Work::Wait { .. } | Work::Dump { .. });
        let moves = !matches!(entry.work, Work::FetchAdd { .. });
        let (device, request) = (queue.device, (!is_signal && !is_local).then_some(moves));
        let mut switches = tables.faults.iter_mut();
        let fault = switches.find_map(|switch| switch.take(device, number as u32, index, request));
        if fault == Some(FaultKind::Stall) {
            queue.stalled = true;
            return false;
        }
        let (stage, peer_breaks) = self.execute(number as u32, fault, entry.work, tables, held, memory);
        let Some(queue) = tables.queues.get_mut(number) else { return false };
        start(queue, Flight { operation: operation(&slot), completion: entry.flags.completion(), stage });
        if peer_breaks {
            let peer = queue.peer as usize;
            if let Some(peer) = tables.queues.get_mut(peer) {
                peer.state = QpState::Error;
            }
        }
        true
    }

    fn execute(
        &mut self,
        number: u32,
        fault: Option<FaultKind>,
        work: Work,
        tables: &mut Tables<'_>,
        held: &mut Held<'_>,
        memory: &mut impl Memory,
    ) -> (Stage, bool) {
        if let Some(FaultKind::Fail(syndrome)) = fault {
            return (Stage::Failed { syndrome, vendor: vendor::SWITCH }, false);
        }
        let local = match work {
            Work::Nop | Work::Wait { .. } => Some(Ok(())),
            Work::Dump { from, bytes } => Some(local_range(tables, number, from, bytes, false).map(|_| {
                if self.mistake != Mistake::IgnoreDumps {
                    held.release_of(memory, Reason::Read(number));
                }
            })),
            _ => None,
        };
        if let Some(done) = local {
            let stage = match done {
                Ok(()) => Stage::Done { bytes: 0 },
                Err(syndrome) => Stage::Failed { syndrome, vendor: 0 },
            };
            return (stage, false);
        }
        let answer = match fault {
            Some(FaultKind::Drop) => request(tables, number, work).and(Err(NO_ANSWER)),
            _ => {
                request(tables, number, work).and_then(|()| carry_out(tables, number, work, self.mistake, held, memory))
            }
        };
        let (answer, peer_breaks) = match (answer, fault) {
            (Ok(_), Some(FaultKind::LoseAnswer)) => {
                (Answer::Refused { syndrome: Syndrome::RetryExceeded, vendor: vendor::SWITCH }, false)
            }
            (Ok(answer), _) => (answer, false),
            (Err(refusal), _) => (Answer::Refused { syndrome: refusal.syndrome, vendor: 0 }, refusal.peer_breaks),
        };
        let mut delay = if self.seed == 0 { self.delay } else { self.draw(self.delay + 1) };
        if let Some(FaultKind::Delay(steps)) = fault {
            delay = steps;
        }
        let endless = tables.queues.get(number as usize).is_some_and(|queue| queue.ack_timeout == 0);
        let unanswered = matches!(answer, Answer::Refused { syndrome: Syndrome::RetryExceeded, .. });
        let due = if endless && unanswered { u64::MAX } else { self.now.saturating_add(delay) };
        (Stage::Pending { due, answer }, peer_breaks)
    }
}

/// Returns the number of entries from an index on to the next one with these low 16 bits.
fn ahead(from: u64, to: u16) -> u64 {
    u64::from(to.wrapping_sub(from as u16))
}

fn mark(busy: &mut [u64], number: usize) {
    if let Some(word) = busy.get_mut(number / 64) {
        *word |= 1 << (number % 64);
    }
}

fn unmark(busy: &mut [u64], number: usize) {
    if let Some(word) = busy.get_mut(number / 64) {
        *word &= !(1 << (number % 64));
    }
}

/// Returns the first marked number from `from` on.
fn next_marked(busy: &[u64], from: usize) -> Option<usize> {
    let mut mask = u64::MAX << (from % 64);
    for (index, word) in busy.iter().enumerate().skip(from / 64) {
        let left = word & mask;
        if left != 0 {
            return Some(64 * index + left.trailing_zeros() as usize);
        }
        mask = u64::MAX;
    }
    None
}

/// Clears the reserved bytes of an entry.
fn clear_reserved(slot: &mut Slot) {
    // All of the second half of the control segment but the flags.
    slot[0].words[1] &= 0xff << 24;
    match operation(slot) {
        opcode::WRITE | opcode::READ => slot[1].words[1] &= 0xffff_ffff,
        opcode::FETCH_ADD => {
            slot[1].words[1] &= 0xffff_ffff;
            // The word to compare with, which an addition does not use.
            slot[2].words[1] = 0;
        }
        opcode::WAIT => slot[1].words[0] = 0,
        _ => {}
    }
}

fn operation(slot: &Slot) -> u32 {
    (slot[0].words[0] >> 24) as u32 & 0xff
}

fn start(queue: &mut QueuePair, flight: Flight) {
    let index = queue.started;
    *queue.flight(index) = flight;
    queue.started += 1;
}

fn load_slot(queue: &QueuePair, index: u64, memory: &mut impl Memory) -> Slot {
    let at = queue.ring + (index & ((1 << queue.log_size) - 1)) * SLOT_BYTES;
    let mut slot = [Segment::default(); SLOT_SEGMENTS];
    for (number, segment) in slot.iter_mut().enumerate() {
        for (half, word) in segment.words.iter_mut().enumerate() {
            *word = memory.load_u64(at + 16 * number as u64 + 8 * half as u64);
        }
    }
    slot
}

/// Flushes the posted and outstanding entries of a broken queue pair.
fn flush(queue: &mut QueuePair, memory: &mut impl Memory) -> bool {
    for index in queue.finished..queue.started {
        if let Stage::Pending { .. } = queue.flight(index).stage {
            queue.flight(index).stage = Stage::Flushed;
            return true;
        }
    }
    if queue.started == queue.posted || queue.started - queue.finished >= WINDOW as u64 {
        return false;
    }
    let slot = load_slot(queue, queue.started, memory);
    start(queue, Flight { operation: operation(&slot), completion: true, stage: Stage::Flushed });
    true
}
