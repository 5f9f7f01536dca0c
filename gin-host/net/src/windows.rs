// SPDX-License-Identifier: MIT OR Apache-2.0
//! The table of windows of a network that registers memory: this rank's parts, and the parts that peers published.

use crate::{Key, LocalWindow, NetError};
use gin_abi::{RemoteSignal, SignalTarget};
use std::collections::BTreeMap;

/// A rank's part of a window, from its key.
pub(crate) trait Part {
    fn bytes(&self) -> u64;

    /// Returns whether the part has signals at its addresses.
    fn has_signals(&self) -> bool;
}

/// Windows by id. `R` is the registration of this rank's part, `P` a rank's part.
#[derive(Debug)]
pub(crate) struct WindowTable<R, P> {
    pub(crate) rank: u32,
    /// Number of signals per context, by rank.
    pub(crate) signals: Vec<u32>,
    table: BTreeMap<u32, RegisteredWindow<R, P>>,
}

#[derive(Debug)]
struct RegisteredWindow<R, P> {
    // Before the memory: dropped in this order.
    registration: R,
    memory: LocalWindow,
    /// Number of outstanding operations that use it.
    uses: u64,
    is_closed: bool,
    /// By rank; empty until connected.
    parts: Vec<P>,
}

impl<R, P: Part> WindowTable<R, P> {
    pub(crate) fn new(rank: u32) -> Self {
        Self { rank, signals: Vec::new(), table: BTreeMap::new() }
    }

    /// Adds a window. Keeps its memory, and drops the memory after the registration.
    pub(crate) fn insert(&mut self, window: &LocalWindow, registration: R) {
        let (memory, parts) = (window.clone(), Vec::new());
        self.table.insert(window.id, RegisteredWindow { registration, memory, uses: 0, is_closed: false, parts });
    }

    /// Stores the parts that all ranks published. `read` decodes the key of a rank.
    pub(crate) fn connect(
        &mut self,
        window: u32,
        keys: &[Key],
        read: impl Fn(u32, &Key) -> Result<P, NetError>,
    ) -> Result<(), NetError> {
        let parts = keys.iter().zip(0..).map(|(key, rank)| read(rank, key)).collect::<Result<_, _>>()?;
        let unknown = NetError::UnknownWindow { window, rank: self.rank };
        self.table.get_mut(&window).ok_or(unknown)?.parts = parts;
        Ok(())
    }

    /// Refuses further requests of this rank for the window. Once no operation of this rank uses it, removes the
    /// window, so that the network refuses peers too, and returns true.
    pub(crate) fn close(&mut self, window: u32) -> bool {
        let Some(entry) = self.table.get_mut(&window) else { return true };
        entry.is_closed = true;
        let unused = entry.uses == 0;
        if unused {
            self.table.remove(&window);
        }
        unused
    }

    /// Counts an operation that uses this rank's part.
    pub(crate) fn enter(&mut self, window: u32) {
        if let Some(entry) = self.table.get_mut(&window) {
            entry.uses += 1;
        }
    }

    /// Ends the use of an operation.
    pub(crate) fn leave(&mut self, window: u32) {
        if let Some(entry) = self.table.get_mut(&window) {
            entry.uses = entry.uses.saturating_sub(1);
        }
    }

    fn open(&self, window: u32, rank: u32) -> Result<&RegisteredWindow<R, P>, NetError> {
        let entry = self.table.get(&window);
        entry.filter(|entry| !entry.is_closed).ok_or(NetError::UnknownWindow { window, rank })
    }

    /// Returns the registrations of this rank's parts, with their memory.
    pub(crate) fn registrations(&self) -> impl Iterator<Item = (&R, &LocalWindow)> {
        self.table.values().map(|entry| (&entry.registration, &entry.memory))
    }

    /// Returns the registrations of this rank's parts.
    pub(crate) fn registrations_mut(&mut self) -> impl Iterator<Item = &mut R> {
        self.table.values_mut().map(|entry| &mut entry.registration)
    }

    /// Returns the registration of this rank's part, and the address of a range of it.
    pub(crate) fn own(&self, window: u32, offset: u64, bytes: u64) -> Result<(&R, u64), NetError> {
        let entry = self.open(window, self.rank)?;
        let memory = &entry.memory.memory;
        NetError::check_range(window, self.rank, offset, bytes, memory.bytes())?;
        Ok((&entry.registration, memory.address() + offset))
    }

    /// Returns a rank's part, which contains this range.
    pub(crate) fn of(&self, window: u32, rank: u32, offset: u64, bytes: u64) -> Result<&P, NetError> {
        let part = self.open(window, rank)?.parts.get(rank as usize);
        let part = part.ok_or(NetError::UnknownWindow { window, rank })?;
        NetError::check_range(window, rank, offset, bytes, part.bytes())?;
        Ok(part)
    }

    /// Checks that the rank has this signal.
    pub(crate) fn check_signal(&self, rank: u32, signal: &RemoteSignal) -> Result<(), NetError> {
        let has = match signal.target {
            SignalTarget::Id(id) => self.signals.get(rank as usize).is_some_and(|count| id < *count),
            SignalTarget::Address { window, offset } => {
                self.of(window, rank, offset, 8)?.has_signals() && offset.is_multiple_of(8)
            }
        };
        if has { Ok(()) } else { Err(NetError::UnknownSignal { rank, signal: signal.target }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gin_gpu::virt::VirtualDevice;
    use gin_gpu::{Device, Memory, MemoryKind};
    use std::sync::Arc;

    struct Bytes(u64);

    impl Part for Bytes {
        fn bytes(&self) -> u64 {
            self.0
        }

        fn has_signals(&self) -> bool {
            self.0 > 64
        }
    }

    /// Returns the table of rank 1 with window 5, whose parts have 64 and 128 bytes, and the address of the own part.
    fn table() -> (WindowTable<&'static str, Bytes>, u64) {
        let device: Arc<dyn Device> = VirtualDevice::memory_only(0);
        let memory = Memory::new(&device, MemoryKind::Device, 128).unwrap();
        let mut table = WindowTable::new(1);
        table.signals = vec![3, 4];
        table.insert(&LocalWindow { id: 5, memory: memory.whole(), plane: None, nic: false }, "region");
        let keys = [Key(vec![64]), Key(vec![128])];
        table.connect(5, &keys, |_, key| Ok(Bytes(key.0[0].into()))).unwrap();
        (table, memory.address())
    }

    #[test]
    fn ranges_are_checked_against_the_part_of_their_rank() {
        let (table, address) = table();
        assert_eq!(table.own(5, 28, 100), Ok((&"region", address + 28)));
        assert_eq!(table.own(5, 29, 100), Err(NetError::OutOfRange { window: 5, rank: 1, end: 129, length: 128 }));
        assert!(table.of(5, 0, 0, 64).is_ok_and(|part| part.0 == 64));
        let past = table.of(5, 0, 1, 64).err();
        assert_eq!(past, Some(NetError::OutOfRange { window: 5, rank: 0, end: 65, length: 64 }));
        assert_eq!(table.of(5, 2, 0, 0).err(), Some(NetError::UnknownWindow { window: 5, rank: 2 }));
    }

    #[test]
    fn a_signal_is_one_of_its_rank_or_an_aligned_word_of_a_part_with_signals() {
        let (table, _) = table();
        let check = |rank, target| table.check_signal(rank, &RemoteSignal { target, amount: 1, strong: true }).is_ok();
        let at = |offset| SignalTarget::Address { window: 5, offset };
        assert_eq!([2, 3].map(|id| check(0, SignalTarget::Id(id))), [true, false]);
        assert_eq!([3, 4].map(|id| check(1, SignalTarget::Id(id))), [true, false]);
        assert!(!check(2, SignalTarget::Id(0)));
        assert_eq!([0, 4, 120, 128].map(|offset| check(1, at(offset))), [true, false, true, false]);
        assert!(!check(0, at(0)), "the part has no signals");
    }

    #[test]
    fn a_closed_window_refuses_requests_and_stays_registered_until_its_last_use_ends() {
        let (mut table, _) = table();
        table.enter(5);
        assert!(!table.close(5));
        let unknown = |rank| NetError::UnknownWindow { window: 5, rank };
        assert_eq!((table.own(5, 0, 1), table.of(5, 0, 0, 1).err()), (Err(unknown(1)), Some(unknown(0))));
        assert_eq!(table.registrations().count(), 1);
        table.leave(5);
        assert!(table.close(5));
        assert_eq!(table.registrations().count(), 0);
    }
}
