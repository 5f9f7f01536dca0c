// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory of several devices at fixed distances: one range of addresses, cut into slots of equal length, one for each
//! rank.
//!
//! One rank of a team reserves the range once, and all ranks share it. Each rank maps its own memory into its own slot,
//! once, so that the devices of all ranks reach it. Bytes at the same offset of two slots are a multiple of the stride
//! apart. No memory has two addresses in a process, so a kernel's ordinary fences order all accesses to it.
//!
//! The ranks find an offset that is free on all of them together ([`first_fit`]). A [`FlatPlace`] stays taken until the
//! memory there is unmapped, which may be later than its drop.

use super::{Device, DeviceKind, GpuError, MemorySharing, lock};
use gin_abi::handle::STRIDE_SHIFT;
use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// The fewest bytes of a slot.
const SMALLEST: u64 = 1 << STRIDE_SHIFT;

/// Addresses that a device has reserved. Dropping them releases them.
#[derive(Debug)]
pub struct RawAddresses {
    /// The kind of the devices whose memory can be there.
    kind: DeviceKind,
    /// The first address.
    start: u64,
    /// The bytes of a slot: a power of two, and a multiple of 4 GiB (`1 << STRIDE_SHIFT`).
    stride: u64,
    _owner: Box<dyn Any + Send + Sync>,
}

impl RawAddresses {
    /// Reserves addresses for `slots` slots of at most `largest` bytes, of memory of devices of this kind. `reserve`
    /// gets the number of bytes, and returns the first address and the owner of the addresses, or the reason for which
    /// there are none. Then fewer are tried.
    ///
    /// # Errors
    /// [`GpuError::Addresses`].
    pub(crate) fn reserve<O: Any + Send + Sync>(
        kind: DeviceKind,
        slots: u32,
        largest: u64,
        reserve: impl Fn(u64) -> Result<(u64, O), String>,
    ) -> Result<Self, GpuError> {
        let mut stride = largest;
        loop {
            match reserve(u64::from(slots.max(1)).saturating_mul(stride)) {
                Ok((start, owner)) => return Ok(Self { kind, start, stride, _owner: Box::new(owner) }),
                Err(_) if stride > SMALLEST => stride /= 2,
                Err(reason) => return Err(GpuError::Addresses { slots, least: SMALLEST, reason }),
            }
        }
    }
}

/// A range of addresses, cut into slots.
#[derive(Debug)]
pub struct FlatRange {
    raw: RawAddresses,
    /// The taken parts of each slot, as offsets.
    slots: Vec<Mutex<Vec<Range<u64>>>>,
}

impl FlatRange {
    /// Reserves a range of `slots` slots; `None` if the device has ordinary memory only.
    ///
    /// ```
    /// use gin_gpu::flat::FlatRange;
    /// use gin_gpu::virt::VirtualDevice;
    ///
    /// let range = FlatRange::reserve(&*VirtualDevice::memory_only(0), 2)?.expect("virtual GPUs have such memory");
    /// let place = range.take(1, 4096, 8192)?;
    /// assert_eq!(range.taken(1), [4096..12288]);
    /// drop(place);
    /// assert!(range.taken(1).is_empty());
    /// # Ok::<(), gin_gpu::GpuError>(())
    /// ```
    ///
    /// # Errors
    /// [`GpuError::Addresses`] if there are too few addresses.
    pub fn reserve(device: &dyn Device, slots: u32) -> Result<Option<Arc<Self>>, GpuError> {
        let reserve = |sharing: &dyn MemorySharing| sharing.reserve_addresses(slots);
        let Some(raw) = device.sharing().map(reserve).transpose()?.flatten() else {
            return Ok(None);
        };
        let slots = (0..slots).map(|_| Mutex::default()).collect();
        Ok(Some(Arc::new(Self { raw, slots })))
    }

    /// Returns the bytes from one slot to the next: a power of two, and a multiple of 4 GiB.
    pub fn stride(&self) -> u64 {
        self.raw.stride
    }

    /// Returns the stride in the unit of window handles.
    #[doc(hidden)]
    pub fn handle_stride(&self) -> u32 {
        u32::try_from(self.stride() >> STRIDE_SHIFT).unwrap_or(0)
    }

    /// Returns the offset of an address in a slot; `None` if the address is not in this slot.
    #[doc(hidden)]
    pub fn offset(&self, slot: u32, address: u64) -> Option<u64> {
        let start = u64::from(slot) * self.stride() + self.raw.start;
        let in_range = (slot as usize) < self.slots.len();
        address.checked_sub(start).filter(|offset| in_range && *offset < self.stride())
    }

    /// Returns the taken parts of a slot, as offsets; none if there is no such slot.
    pub fn taken(&self, slot: u32) -> Vec<Range<u64>> {
        self.slots.get(slot as usize).map_or_else(Vec::new, |taken| lock(taken).clone())
    }

    /// Takes `bytes` bytes of a slot, from `offset` on.
    ///
    /// # Errors
    /// [`GpuError::OutOfRange`] if the slot does not have them, [`GpuError::AddressesTaken`] if some are taken.
    pub fn take(self: &Arc<Self>, slot: u32, offset: u64, bytes: u64) -> Result<FlatPlace, GpuError> {
        let end = offset.saturating_add(bytes);
        let taken = self.slots.get(slot as usize).filter(|_| end <= self.stride());
        let mut taken = lock(taken.ok_or(GpuError::OutOfRange { offset, end, length: self.stride() })?);
        if taken.iter().any(|other| offset < other.end && other.start < end) {
            return Err(GpuError::AddressesTaken { offset, end, slot });
        }
        taken.push(offset..end);
        Ok(FlatPlace { range: self.clone(), slot, offset, bytes })
    }
}

/// A taken part of a slot. It is free again when this is dropped. It is forgotten, and so stays taken for ever, if its
/// memory could not be unmapped.
#[derive(Debug)]
pub struct FlatPlace {
    range: Arc<FlatRange>,
    slot: u32,
    offset: u64,
    bytes: u64,
}

impl FlatPlace {
    /// Returns the address of its first byte.
    pub fn address(&self) -> u64 {
        self.range.raw.start + u64::from(self.slot) * self.range.stride() + self.offset
    }

    /// Returns its length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns whether memory of `device` can be there.
    pub(super) fn fits(&self, device: &dyn Device) -> bool {
        let granularity = device.granularity();
        let whole = |bytes: u64| bytes.is_multiple_of(granularity);
        self.range.raw.kind == device.kind() && whole(self.offset) && whole(self.bytes)
    }
}

impl Drop for FlatPlace {
    fn drop(&mut self) {
        lock(&self.range.slots[self.slot as usize]).retain(|taken| taken.start != self.offset);
    }
}

/// Returns the least offset, a multiple of `granularity`, from which on `bytes` bytes are free in all slots of `stride`
/// bytes. The first argument: the taken parts of all slots, in any order.
///
/// ```
/// use gin_gpu::flat::first_fit;
/// assert_eq!(first_fit(vec![0..16, 32..48], 16, 16, 64), Ok(16));
/// assert_eq!(first_fit(vec![0..16, 32..48], 32, 16, 64), Err(16));
/// ```
///
/// # Errors
/// The length in bytes of the longest part that is free in all slots and starts at a multiple of `granularity`.
pub fn first_fit(mut taken: Vec<Range<u64>>, bytes: u64, granularity: u64, stride: u64) -> Result<u64, u64> {
    let granularity = granularity.max(1);
    taken.retain(|range| !range.is_empty());
    taken.sort_by_key(|range| range.start);
    let (mut at, mut longest) = (0u64, 0);
    for range in taken.iter().chain([&(stride..stride)]) {
        let free = range.start.min(stride).saturating_sub(at);
        if bytes <= free {
            return Ok(at);
        }
        longest = free.max(longest);
        let Some(next) = range.end.max(at).checked_next_multiple_of(granularity) else { break };
        at = next;
    }
    Err(longest)
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "what is taken is a list of ranges")]
mod tests {
    use super::*;
    use crate::virt::VirtualDevice;
    use crate::{Memory, MemoryKind};
    use proptest::prelude::*;

    const STRIDE: u64 = 1 << 20;

    #[test]
    fn the_first_gap_that_is_long_enough_on_all_ranks_is_found() {
        for (taken, bytes, expected) in [
            (vec![], 10, Ok(0)),
            (vec![], STRIDE, Ok(0)),
            (vec![], STRIDE + 1, Err(STRIDE)),
            (vec![0..0x3000], 0x1000, Ok(0x3000)),
            // Two ranks, where one has a gap and the other has none.
            (vec![0..0x1000, 0x3000..0x4000, 0x1000..0x2000], 0x1000, Ok(0x2000)),
            (vec![0..0x1000, 0x3000..0x4000, 0x1000..0x2000], 0x1001, Ok(0x4000)),
            // One lies within the other.
            (vec![0..0x5000, 0x1000..0x2000], 1, Ok(0x5000)),
            // Ends that are no multiples of the granularity.
            (vec![0..0x1001], 0x1000, Ok(0x2000)),
            (vec![0x800..STRIDE], 0x800, Ok(0)),
            (vec![0x800..STRIDE], 0x801, Err(0x800)),
            (vec![0..STRIDE - 0xfff], 1, Err(0)),
            (vec![0..STRIDE], 0, Ok(0)),
            (vec![0..u64::MAX], 1, Err(0)),
            (vec![0x1000..0x1000], STRIDE, Ok(0)),
            (vec![0..1], u64::MAX, Err(STRIDE - 0x1000)),
        ] {
            assert_eq!(first_fit(taken.clone(), bytes, 0x1000, STRIDE), expected, "{bytes:#x} bytes beside {taken:x?}");
        }
    }

    proptest! {
        /// Ranks allocate together, and each frees its parts in its own time. A rank always gets a place that is free
        /// on all ranks; a request is refused only if there is no such place.
        #[test]
        fn ranks_that_free_at_different_times_never_share_a_place(
            steps in proptest::collection::vec((0u64..24, 0usize..3, 0usize..8), 1..60),
        ) {
            const UNITS: u64 = 64;
            let mut ranks: [Vec<Range<u64>>; 3] = Default::default();
            for (bytes, rank, index) in steps {
                let own = &mut ranks[rank];
                if bytes == 0 {
                    if index < own.len() {
                        own.remove(index);
                    }
                    continue;
                }
                let bytes = bytes * 4;
                let all: Vec<_> = ranks.iter().flatten().cloned().collect();
                let is_free = |start: u64| {
                    start + bytes <= 4 * UNITS && all.iter().all(|taken| start + bytes <= taken.start || taken.end <= start)
                };
                let expected = (0..UNITS).map(|unit| 4 * unit).find(|start| is_free(*start));
                match first_fit(all.clone(), bytes, 4, 4 * UNITS) {
                    Ok(offset) => {
                        prop_assert_eq!(Some(offset), expected);
                        // Ranks may ask for less than the longest part.
                        for (rank, own) in (0..).zip(&mut ranks) {
                            own.push(offset..offset + bytes - 2 * rank.min(bytes / 2 - 1));
                        }
                    }
                    Err(longest) => prop_assert!(expected.is_none() && longest < bytes),
                }
            }
        }
    }

    #[test]
    fn a_place_is_taken_until_its_memory_is_gone_and_fresh_again_then() {
        let device: Arc<dyn Device> = VirtualDevice::memory_only(0);
        let range = FlatRange::reserve(&*device, 3).unwrap().unwrap();
        let unit = device.granularity();
        assert!(range.stride().is_power_of_two() && range.stride() >= 1 << 32);
        let memory = |slot, offset, bytes| {
            let place = range.take(slot, offset, bytes)?;
            Memory::placed(&device, place, bytes, false)
        };
        let (first, second) = (memory(0, unit, 3 * unit).unwrap(), memory(2, unit, unit).unwrap());
        assert_eq!(second.address() - first.address(), 2 * range.stride());
        assert_eq!(first.kind(), MemoryKind::Device);
        first.write(3 * unit - 8, &[7u64]).unwrap();
        assert_eq!(range.taken(0), [unit..4 * unit]);
        let refused = memory(0, 2 * unit, unit).unwrap_err();
        assert_eq!(refused, GpuError::AddressesTaken { offset: 2 * unit, end: 3 * unit, slot: 0 });
        assert!(memory(1, 2 * unit, unit).is_ok(), "slots are taken one by one");
        for (offset, bytes) in [(8 * unit + 1, unit), (8 * unit, unit + 1)] {
            assert!(matches!(memory(0, offset, bytes), Err(GpuError::Unsupported { .. })), "{offset} {bytes}");
        }
        assert!(matches!(
            Memory::placed(&device, range.take(1, 0, unit).unwrap(), unit + 1, false),
            Err(GpuError::OutOfRange { .. })
        ));
        for (slot, offset, bytes) in [(3, 0, 1), (0, range.stride(), 1), (0, 8, u64::MAX)] {
            assert!(matches!(memory(slot, offset, bytes), Err(GpuError::OutOfRange { .. })), "{slot} {offset} {bytes}");
        }
        drop(first);
        assert_eq!(range.taken(0), []);
        let again = memory(0, unit, 3 * unit).unwrap();
        let mut word = [1u64];
        again.read(3 * unit - 8, &mut word).unwrap();
        assert_eq!(word, [0], "memory is zero at first, also where other memory was");
    }
}
