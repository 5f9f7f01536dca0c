// SPDX-License-Identifier: MIT OR Apache-2.0
//! The layout of rings and doorbell records in their slab.
//!
//! All rings of a set of queue pairs share one allocation, which is registered once. A ring begins at a page, a record
//! at a cache line.

use super::error::NicError;
use gin_abi::mlx5::cqe;
use gin_abi::mlx5::wqe::SLOT_BYTES;
use std::ops::Range;

/// The alignment of rings: the firmware's page of 4 KiB.
pub const PAGE: u64 = 4096;
/// The alignment of doorbell records.
const LINE: u64 = 64;
/// The minimum and maximum numbers of slots of a send queue. A full queue must fit into the 16 bits of an index, with a
/// bit to spare.
pub const DEPTHS: Range<u64> = 2..(1 << 15) + 1;
/// The slots of the completion queue that queue pairs without a send queue name and never use.
pub(super) const UNUSED_COMPLETIONS: u64 = 64;

/// The purpose of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Role {
    /// Posts and answers requests.
    Sender,
    /// Posts and answers requests. Its entries may wait for completion queues of other queue pairs.
    Master,
    /// Answers requests. It has no rings and no doorbell page.
    Responder,
}

/// The specification of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueueSpec {
    /// Its purpose.
    pub role: Role,
    /// The slots of its send queue, a power of two in [`DEPTHS`]; ignored for a responder.
    pub depth: u32,
    /// The slots of its completion queue, a power of two.
    pub completions: u32,
    /// All its completions go to slot 0.
    pub collapsed: bool,
}

/// The offsets of one queue pair's rings in the slab.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueuePlace {
    /// The send queue.
    pub ring: u64,
    /// The completion queue.
    pub completions: u64,
    /// The doorbell record of the queue pair.
    pub record: u64,
    /// The doorbell record of the completion queue.
    pub completion_record: u64,
}

/// The layout of a slab.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Layout {
    /// The places by queue pair; `None` for responders.
    pub places: Vec<Option<QueuePlace>>,
    /// The ring and the record of the completion queue that responders share, if there are any.
    pub unused: Option<(u64, u64)>,
    /// The length of the slab in bytes.
    pub bytes: u64,
    /// The ranges of the slab to fill with [`INVALID_BYTE`](cqe::INVALID_BYTE) before the queue pairs are created. All
    /// other bytes are zero.
    pub completion_rings: Vec<Range<u64>>,
}

impl Layout {
    /// Returns the bytes to allocate for a slab that begins at a page: allocations begin at a multiple of 256.
    pub fn allocation(&self) -> u64 {
        self.bytes + PAGE
    }

    /// Lays a slab out for these queue pairs.
    ///
    /// # Errors
    /// [`NicError::NotPowerOfTwo`], [`NicError::Limit`].
    pub fn of(specs: &[QueueSpec]) -> Result<Self, NicError> {
        let mut end = 0;
        let mut rings = Vec::new();
        let mut take = |bytes: u64, align: u64| {
            let at = u64::next_multiple_of(end, align);
            end = at + bytes;
            at
        };
        let mut places = Vec::new();
        for spec in specs {
            if spec.role == Role::Responder {
                places.push(None);
                continue;
            }
            check("the depth of a send queue", spec.depth.into())?;
            check("the depth of a completion queue", spec.completions.into())?;
            let (ring, completions) =
                (take(u64::from(spec.depth) * SLOT_BYTES, PAGE), take(u64::from(spec.completions) * cqe::BYTES, PAGE));
            rings.push(completions..completions + u64::from(spec.completions) * cqe::BYTES);
            places.push(Some(QueuePlace { ring, completions, record: 0, completion_record: 0 }));
        }
        let responders = specs.iter().any(|spec| spec.role == Role::Responder);
        let unused_ring = responders.then(|| take(UNUSED_COMPLETIONS * cqe::BYTES, PAGE));
        if let Some(ring) = unused_ring {
            rings.push(ring..ring + UNUSED_COMPLETIONS * cqe::BYTES);
        }
        for place in places.iter_mut().flatten() {
            (place.record, place.completion_record) = (take(8, LINE), take(8, LINE));
        }
        let unused = unused_ring.map(|ring| (ring, take(8, LINE)));
        let bytes = end.next_multiple_of(PAGE);
        Ok(Self { places, unused, bytes, completion_rings: rings })
    }
}

fn check(what: &'static str, asked: u64) -> Result<(), NicError> {
    if asked.is_power_of_two() && DEPTHS.contains(&asked) {
        Ok(())
    } else if asked.is_power_of_two() {
        let limit = if asked < DEPTHS.start { DEPTHS.start } else { DEPTHS.end - 1 };
        Err(NicError::Limit { nic: "a queue pair".to_owned(), what: "slots", asked, limit })
    } else {
        Err(NicError::NotPowerOfTwo { what, asked })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn spec() -> impl Strategy<Value = QueueSpec> {
        let role = prop_oneof![Just(Role::Sender), Just(Role::Master), Just(Role::Responder)];
        (role, 1u32..10, 1u32..10).prop_map(|(role, depth, completions)| QueueSpec {
            role,
            depth: 1 << depth,
            completions: 1 << completions,
            collapsed: false,
        })
    }

    proptest! {
        #[test]
        fn rings_and_records_lie_in_the_slab_and_do_not_overlap(specs in proptest::collection::vec(spec(), 0..20)) {
            let layout = Layout::of(&specs).unwrap();
            let mut ranges: Vec<Range<u64>> = Vec::new();
            for (spec, place) in specs.iter().zip(&layout.places) {
                prop_assert_eq!(place.is_none(), spec.role == Role::Responder);
                let Some(place) = place else { continue };
                ranges.push(place.ring..place.ring + u64::from(spec.depth) * SLOT_BYTES);
                ranges.push(place.completions..place.completions + u64::from(spec.completions) * cqe::BYTES);
                prop_assert!(place.ring.is_multiple_of(PAGE) && place.completions.is_multiple_of(PAGE));
                for record in [place.record, place.completion_record] {
                    prop_assert!(record.is_multiple_of(LINE));
                    ranges.push(record..record + 8);
                }
            }
            if let Some((ring, record)) = layout.unused {
                ranges.push(ring..ring + UNUSED_COMPLETIONS * cqe::BYTES);
                ranges.push(record..record + 8);
            }
            ranges.sort_by_key(|range| range.start);
            prop_assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start));
            prop_assert!(ranges.iter().all(|range| range.end <= layout.bytes));
            prop_assert!(layout.completion_rings.iter().all(|ring| ranges.contains(ring)));
        }
    }

    #[test]
    fn depths_that_there_cannot_be_are_refused() {
        let of =
            |depth, completions| Layout::of(&[QueueSpec { role: Role::Sender, depth, completions, collapsed: false }]);
        assert!(of(1 << 15, 2).is_ok());
        assert!(matches!(of(100, 128), Err(NicError::NotPowerOfTwo { asked: 100, .. })));
        assert!(matches!(of(128, 0), Err(NicError::NotPowerOfTwo { asked: 0, .. })));
        assert!(matches!(of(1 << 16, 128), Err(NicError::Limit { asked: 65536, limit: 32768, .. })));
        assert!(matches!(of(1, 128), Err(NicError::Limit { asked: 1, limit: 2, .. })));
    }
}
