// SPDX-License-Identifier: MIT OR Apache-2.0
//! Small messages between two ranks, by loads and stores, with the flag in the data.
//!
//! A put with a signal pays for a fence between them, about a microsecond over NVLink. A message has none: each word of
//! 8 bytes has 4 bytes of the message and the message's number. So every word says by itself that it has arrived. That
//! takes twice the bytes, and suits messages up to [`MAX_BYTES`].
//!
//! [`Outbox`] sends to one peer, [`Inbox`] receives from one. Both use a window of words that all ranks register with
//! [`words`] words, all 0 at first.
//!
//! ```
//! # use gin_device::prelude::*;
//! # use gin_device::inbox::{Inbox, Outbox};
//! # fn exchange(comm: &Comm, mail: Window<u64>, heads: Window<[f32; 16]>, limit: Deadline) -> Result<(), Fault> {
//! // `heads` has two messages: one to send, one to receive.
//! let mut right = Outbox::new(comm, mail, comm.lsa().right())?;
//! let mut left = Inbox::new(comm, mail, comm.lsa().left())?;
//! right.send(&Warp, heads.at(0), limit)?;
//! left.receive(&Warp, heads.at(1), limit)?;
//! # Ok(())
//! # }
//! ```
//!
//! # Order
//! Messages from one rank to another arrive in the order of their sends. They order nothing else: a message that has
//! arrived says nothing about other writes of its sender. For that there are [signals](crate::gin#ordering).
//!
//! # Room
//! A peer's part of the window has room for [`SLOTS`] messages. The receiver gives slots back, half of them at a time,
//! at the beginning of a receive. So a send waits only if half of the slots or more hold messages that were not
//! received.
//!
//! # Layout
//! The window of each rank has a block of words for each rank: 8 words of state, then the slots.
//!
//! | word | holds | writer |
//! | --- | --- | --- |
//! | 0 | the number of messages to that rank whose slots were given back | that rank |
//! | 1 | the number of messages to that rank | this rank |
//! | 2 | the number of messages received from that rank | this rank |
//! | 8 and on | the slots: messages from that rank | that rank |
//!
//! # Why it is right
//! *A message is whole.* A word of 8 bytes is stored and loaded as one. The receiver takes 4 bytes only from a word
//! with the number of the awaited message. The same slot's message before has a number that is smaller by [`SLOTS`],
//! and numbers repeat after 2^32 messages.
//!
//! *No message is overwritten.* The receiver makes a release fence after its loads and before it gives slots back. The
//! sender makes an acquire fence after it has seen that, and before it stores to them. All threads of the coop have met
//! between their own accesses and these fences.

use crate::comm::Comm;
use crate::coop::Coop;
use crate::fault::{self, Fault, Unmet};
use crate::gin::is_time_to_look;
use crate::status::{Shared, Status, WaitError};
use crate::sys::data::{load_weak_u32, store_weak_u32};
use crate::sys::{Global, GlobalWord, Memory, Word, narrow, stay};
use crate::team::Rank;
use crate::window::{Window, WindowRange};
use bytemuck::Pod;
use core::marker::PhantomData;
use gin_abi::{Deadline, FaultKind, FaultSubject, Operation};

/// Number of messages from one rank for which a rank has room.
pub const SLOTS: u64 = 16;
/// Size of the largest message, in bytes. A larger one is faster as a put with a signal.
pub const MAX_BYTES: usize = 4096;

/// Words of state before the slots of a rank.
const STATE: u64 = 8;
/// Indices of the words of state.
const CREDIT: u64 = 0;
const SENT: u64 = 1;
const RECEIVED: u64 = 2;

/// Returns the number of words of 8 bytes of a window for messages of type `T` among `ranks` ranks.
///
/// `T` has a multiple of 4 bytes, 4 to [`MAX_BYTES`] of them, and an alignment of 4 or more; another type does not
/// compile.
#[must_use]
pub const fn words<T: Pod>(ranks: u32) -> usize {
    ranks as usize * block::<T>() as usize
}

/// Returns the number of words of a message: one for each 4 bytes.
const fn units<T: Pod>() -> u64 {
    const {
        assert!(align_of::<T>() >= 4, "a message is aligned to 4 bytes or more");
        assert!(size_of::<T>() != 0 && size_of::<T>() <= MAX_BYTES, "a message has 4 to 4096 bytes");
    }
    size_of::<T>() as u64 / 4
}

/// Returns the number of words of a rank's block.
const fn block<T: Pod>() -> u64 {
    STATE + SLOTS * units::<T>()
}

/// The slots of one direction, and the word that gives them back.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Ring<M: Memory> {
    /// The first word of the first slot, at the receiver.
    pub slots: M::Word,
    /// The number of messages whose slots were given back, at the sender.
    pub credit: M::Word,
    /// Number of slots.
    pub count: u64,
    /// Number of words of a slot.
    pub units: u64,
}

impl<M: Memory> Ring<M> {
    #[inline(always)]
    fn word(&self, number: u64, unit: u64) -> M::Word {
        self.slots.at(number % self.count * self.units + unit)
    }

    /// Stores 4 bytes of message `number`, which has [room](Self::has_room).
    #[inline(always)]
    pub fn store(&self, number: u64, unit: u64, data: u32) {
        self.word(number, unit).store_relaxed_sys(u64::from(data) | number << 32);
    }

    /// Loads a word of message `number`: 4 bytes, and the low 32 bits of the number of the message that they are of.
    #[inline(always)]
    pub fn load(&self, number: u64, unit: u64) -> (u32, u32) {
        let word = self.word(number, unit).load_relaxed_sys();
        (word as u32, (word >> 32) as u32)
    }

    /// Polls a word of message `number` a short time. Returns 4 bytes, and 0 if they are of that message.
    ///
    /// In a slot, words of earlier messages are before this message's words on the circle of 2^64 values.
    #[inline(always)]
    pub fn spin(&self, number: u64, unit: u64) -> (u32, u32) {
        let word = self.word(number, unit);
        let past = word.spin(word.load_relaxed_sys(), number << 32, M::POLLS_PER_CHECK);
        (past as u32, narrow((past >> 32) as u32))
    }

    /// Returns whether message `number` has a slot, if those of `credit` messages were given back.
    #[inline(always)]
    pub fn has_room(&self, number: u64, credit: u64) -> bool {
        number.wrapping_sub(credit) <= self.count
    }

    /// Waits until message `number` has a slot. Returns the number of messages whose slots were given back.
    ///
    /// # Errors
    /// The reason why the wait ended early, and that number.
    #[inline(always)]
    pub fn await_room(&self, number: u64, status: &Status<M>, deadline: Deadline) -> Result<u64, (WaitError, u64)> {
        let mut credit = 0;
        let waited = status.poll(deadline, || {
            credit = self.credit.load_relaxed_sys();
            self.has_room(number, credit)
        });
        waited.map_err(|stop| (stop, credit))?;
        M::fence_acquire_sys();
        Ok(credit)
    }

    /// Gives back the slots of the first `received` messages. The threads that loaded them have met the caller.
    #[inline(always)]
    pub fn give_back(&self, received: u64) {
        M::fence_release_sys();
        self.credit.store_relaxed_sys(received);
    }
}

/// One direction between this rank and a peer.
#[derive(Clone, Copy, Debug)]
struct Way<T> {
    comm: Comm,
    peer: Rank,
    window: u32,
    ring: Ring<Global>,
    /// The number of messages, in this rank's memory.
    count: GlobalWord,
    message: PhantomData<*const T>,
}

impl<T: Pod> Way<T> {
    /// Finds the words of the direction to `peer` if `sends`, else from it.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn new(comm: &Comm, window: Window<u64>, peer: Rank, sends: bool) -> Result<Self, Fault> {
        let (operation, world) = (if sends { Operation::Send } else { Operation::Receive }, comm.world());
        let whole = window.range(0, words::<T>(world.size()));
        fault::check!(fault::new(FaultKind::OutOfRange, operation).with_peer(peer.world()), |judge| {
            let unmet = |length| Unmet::new(FaultKind::OutOfRange).of(whole.subject()).values(length, whole.end());
            judge.condition(whole.fits_own(), || unmet(whole.own_length()));
            judge.condition(whole.fits_on(peer), || unmet(whole.length_on(peer)));
        })?;
        let here = window.local_ptr().wrapping_add(peer.world() as usize * block::<T>() as usize);
        let there = window.peer_ptr(peer)?.wrapping_add(world.rank() as usize * block::<T>() as usize);
        let (sender, receiver) = if sends { (here, there) } else { (there, here) };
        // Safety: the ranges were checked, and the peer is reached. Only gin accesses the words.
        let word = |block: *mut u64, index: u64| unsafe { GlobalWord::new(block as usize as u64 + 8 * index) };
        let ring =
            Ring { slots: word(receiver, STATE), credit: word(sender, CREDIT), count: SLOTS, units: units::<T>() };
        let count = word(here, if sends { SENT } else { RECEIVED });
        Ok(Self { comm: *comm, peer, window: window.handle().id, ring, count, message: PhantomData })
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn place(&self, operation: Operation) -> Fault {
        fault::new(FaultKind::Timeout, operation).with_peer(self.peer.world())
    }

    /// Checks the memory of one message.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn check(&self, message: &WindowRange<T>, operation: Operation) -> Result<(), Fault> {
        fault::check!(self.place(operation), |judge| {
            let unmet = |kind| Unmet::new(kind).of(message.subject());
            judge.condition(message.place().1 == size_of::<T>() as u64, || {
                unmet(FaultKind::LengthMismatch).values(size_of::<T>() as u64, message.bytes())
            });
            judge.condition(message.fits_own(), || {
                unmet(FaultKind::OutOfRange).values(message.own_length(), message.end())
            });
        })
    }

    /// Returns the fault of a wait that ended early. It concerns this rank's block for the peer.
    #[inline(always)]
    fn ended(&self, stop: WaitError, operation: Operation, expected: u64, seen: u64) -> Fault {
        // A fault of a window has no room for the deadline.
        let subject = FaultSubject::Window { id: self.window, offset: 8 * block::<T>() * u64::from(self.peer.world()) };
        self.comm.status().explain(stop, self.place(operation), subject, Deadline::NONE, expected, seen)
    }
}

/// Messages of type `T` to one peer, by one coop.
///
/// All threads of the coop make the same calls. A window and a peer have one live outbox at a time, because it
/// remembers the number of messages. The next one, in this kernel or a later one, goes on where it ended.
#[derive(Debug)]
pub struct Outbox<T> {
    way: Way<T>,
    sent: u64,
    /// The number of messages whose slots were given back, as far as known.
    credit: u64,
}

impl<T: Pod> Outbox<T> {
    /// Returns the outbox to `peer` of a window of [`words`] words. Every calling thread makes it.
    ///
    /// # Errors
    /// [`FaultKind::OutOfRange`] if the window is too short here or at the peer; [`FaultKind::NotReachable`] if the
    /// peer is outside the LSA team.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn new(comm: &Comm, window: Window<u64>, peer: Rank) -> Result<Self, Fault> {
        let way = Way::new(comm, window, peer, true)?;
        let sent = way.count.load_relaxed_gpu();
        // None that is known: the first send looks, in one thread, so that all threads know the same.
        Ok(Self { way, sent, credit: sent.wrapping_sub(SLOTS) })
    }

    /// Sends one message. All threads of `coop` call. When the call returns, the source may be reused.
    ///
    /// Ordering: the message has what the threads of the coop wrote before; see [order](crate::inbox#order).
    ///
    /// # Errors
    /// The same in all threads; nothing was sent, and the outbox can be used again.
    ///
    /// | fault | cause |
    /// | --- | --- |
    /// | [`FaultKind::LengthMismatch`] | `message` is not one element |
    /// | [`FaultKind::OutOfRange`] | it reaches past the end of the caller's own part |
    /// | [`FaultKind::Timeout`] | there was no [room](crate::inbox#room) in time; with the number of messages, and of those whose slots were given back |
    /// | the communicator's fault or abort | it ended the wait for room |
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn send(&mut self, coop: &impl Coop, message: WindowRange<T>, deadline: Deadline) -> Result<(), Fault> {
        called!(here);
        let (way, number) = (&self.way, self.sent.wrapping_add(1));
        coop.sync();
        // The same in all threads.
        way.check(&message, Operation::Send)?;
        if !way.ring.has_room(number, self.credit) {
            let mut credit = self.credit;
            let mine = if coop.elect() {
                match way.ring.await_room(number, &way.comm.status(), deadline) {
                    Ok(seen) => {
                        credit = seen;
                        Ok(())
                    }
                    Err((stop, seen)) => Err(way.ended(stop, Operation::Send, number, seen)),
                }
            } else {
                Ok(())
            };
            fault::here(coop.agree(mine))?;
            self.credit = coop.broadcast(credit, 0);
        }
        // Numbers of 32 bits take half the instructions.
        let (mut unit, units, step) = (coop.rank(), units::<T>() as u32, coop.size());
        let send = |unit: u32| {
            let source = (message.address() + 4 * u64::from(unit)) as usize as *const u32;
            // Safety: the range was checked, and `T` is aligned to 4 bytes. The coop has met, and has acquired what
            // others wrote there.
            way.ring.store(number, u64::from(unit), unsafe { load_weak_u32(source) });
        };
        if units <= step {
            // Small messages, without a loop.
            if unit < units {
                send(unit);
            }
        } else {
            while unit < units {
                send(unit);
                unit += step;
            }
        }
        self.sent = number;
        if coop.elect() {
            way.count.store_relaxed_gpu(number);
        }
        // All threads have loaded.
        coop.sync();
        Ok(())
    }
}

/// Messages of type `T` from one peer, by one coop.
///
/// All threads of the coop make the same calls. A window and a peer have one live inbox at a time; see [`Outbox`].
#[derive(Debug)]
pub struct Inbox<T> {
    way: Way<T>,
    received: u64,
    /// The number of messages whose slots this inbox has given back.
    given: u64,
}

impl<T: Pod> Inbox<T> {
    /// Returns the inbox of messages from `peer` in a window of [`words`] words. Every calling thread makes it.
    ///
    /// # Errors
    /// As [`Outbox::new`].
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn new(comm: &Comm, window: Window<u64>, peer: Rank) -> Result<Self, Fault> {
        let way = Way::new(comm, window, peer, false)?;
        let received = way.count.load_relaxed_gpu();
        // It may have been given back or not; once more does no harm.
        Ok(Self { way, received, given: received.wrapping_sub(SLOTS / 2) })
    }

    /// Receives the next message into the caller's own part of a window. All threads of `coop` call, and all poll, each
    /// its own words.
    ///
    /// Ordering: the threads of the coop see the message; see [order](crate::inbox#order).
    ///
    /// # Errors
    /// The same in all threads; no message was taken, and the inbox can be used again. The bytes of `message` are
    /// unknown.
    ///
    /// | fault | cause |
    /// | --- | --- |
    /// | [`FaultKind::LengthMismatch`] | `message` is not one element |
    /// | [`FaultKind::OutOfRange`] | it reaches past the end of the caller's own part |
    /// | [`FaultKind::Timeout`] | the message did not arrive in time; with the low 32 bits of its number, and of the one in its slot |
    /// | the communicator's fault or abort | it ended the wait |
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn receive(&mut self, coop: &impl Coop, message: WindowRange<T>, deadline: Deadline) -> Result<(), Fault> {
        called!(alike);
        let (way, number) = (&self.way, self.received.wrapping_add(1));
        coop.sync();
        // The same in all threads.
        way.check(&message, Operation::Receive)?;
        if self.received.wrapping_sub(self.given) >= SLOTS / 2 {
            // Before the wait, which takes longer than the fence.
            if coop.elect() {
                way.ring.give_back(self.received);
            }
            self.given = self.received;
        }
        // Before the threads meet, so that each of them may make the next inbox, and before the polls, whose trip this
        // overlaps. If no message is taken, the count goes back.
        if coop.elect() {
            way.count.store_relaxed_gpu(number);
        }
        let due = stay(u32::from(coop.elect() & is_time_to_look())) != 0;
        let came = self.take(coop, &message, number);
        if !coop.sync_or(!came | due) {
            self.received = number;
            return Ok(());
        }
        self.wait(coop, &message, deadline)
    }

    /// Takes this thread's part of message `number`, if it comes soon. Looks at nothing else.
    #[inline(always)]
    fn take(&self, coop: &impl Coop, message: &WindowRange<T>, number: u64) -> bool {
        let (ring, low) = (&self.way.ring, number as u32);
        let (mut unit, units, step) = (coop.rank(), units::<T>() as u32, coop.size());
        let to = |unit: u32| (message.address() + 4 * u64::from(unit)) as usize as *mut u32;
        let mut came = true;
        if units <= step {
            // Small messages, without a loop.
            if unit < units {
                let word = ring.spin(number, u64::from(unit));
                // Safety: the range was checked, and `T` is aligned to 4 bytes.
                unsafe { store_weak_u32(to(unit), word.0) };
                came = word.1 == 0;
            }
            return came;
        }
        // The words after the first one have mostly come with it: their loads overlap.
        while unit + 3 * step < units {
            let first = ring.spin(number, u64::from(unit));
            let second = ring.load(number, u64::from(unit + step));
            let third = ring.load(number, u64::from(unit + 2 * step));
            let fourth = ring.load(number, u64::from(unit + 3 * step));
            if (first.1 | (second.1 ^ low) | (third.1 ^ low) | (fourth.1 ^ low)) != 0 {
                // One by one below.
                break;
            }
            // Safety: the range was checked, and `T` is aligned to 4 bytes.
            unsafe {
                store_weak_u32(to(unit), first.0);
                store_weak_u32(to(unit + step), second.0);
                store_weak_u32(to(unit + 2 * step), third.0);
                store_weak_u32(to(unit + 3 * step), fourth.0);
            }
            unit += 4 * step;
        }
        while came && unit < units {
            let word = ring.spin(number, u64::from(unit));
            // Safety: as above.
            unsafe { store_weak_u32(to(unit), word.0) };
            came = word.1 == 0;
            unit += step;
        }
        came
    }

    /// Waits for the next message, which did not come soon or after which the status is due, and takes it. All threads
    /// of `coop` call.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn wait(&mut self, coop: &impl Coop, message: &WindowRange<T>, deadline: Deadline) -> Result<(), Fault> {
        let (way, number) = (&self.way, self.received.wrapping_add(1));
        let (status, deadline) = (way.comm.status(), Shared::start::<Global>(deadline));
        let (units, step) = (units::<T>(), coop.size() as u64);
        let mut mine = if coop.elect() { status.check().map_err(|stop| (stop, 0)) } else { Ok(()) };
        let mut unit = coop.rank() as u64;
        while unit < units && mine.is_ok() {
            // Four words under way; past the end, the last one again.
            let at = |ahead: u64| (unit + ahead * step).min(units - 1);
            let (low, several) = (number as u32, unit + step < units);
            // Not an array, which LLVM would put on the stack.
            let (mut first, mut second, mut third, mut fourth) = ((0, 0), (0, 0), (0, 0), (0, 0));
            let mut test = || {
                first = way.ring.load(number, at(0));
                let mut late = first.1 ^ low;
                if several {
                    second = way.ring.load(number, at(1));
                    third = way.ring.load(number, at(2));
                    fourth = way.ring.load(number, at(3));
                    late |= (second.1 ^ low) | (third.1 ^ low) | (fourth.1 ^ low);
                }
                late == 0
            };
            if !test() {
                mine = status.poll(deadline.left::<Global>(), test).map_err(|stop| (stop, first.1));
            }
            let to = |ahead| (message.address() + 4 * at(ahead)) as usize as *mut u32;
            // Safety: the range was checked, and `T` is aligned to 4 bytes.
            unsafe {
                store_weak_u32(to(0), first.0);
                if several {
                    store_weak_u32(to(1), second.0);
                    store_weak_u32(to(2), third.0);
                    store_weak_u32(to(3), fourth.0);
                }
            }
            unit += 4 * step;
        }
        let expected = u64::from(number as u32);
        let mine = mine.map_err(|(stop, seen)| way.ended(stop, Operation::Receive, expected, seen.into()));
        let outcome = fault::here(coop.agree(mine));
        if outcome.is_ok() {
            self.received = number;
        } else {
            if coop.elect() {
                way.count.store_relaxed_gpu(self.received);
            }
            coop.sync();
        }
        outcome
    }
}
