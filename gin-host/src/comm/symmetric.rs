// SPDX-License-Identifier: MIT OR Apache-2.0
//! Windows whose parts are at fixed distances. The ranks of an LSA team share a range of addresses, and agree on a
//! place in it for each window.

use super::CommError;
use gin_abi::CommHandle;
use gin_gpu::flat::{FlatRange, first_fit};
use gin_gpu::registry::Registry;
use gin_gpu::{Device, Memory, MemoryKind};
use gin_net::Key;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::Arc;

/// The ranges of addresses of this process's teams, as long as they are reserved.
static RANGES: Registry<FlatRange> = Registry::new();

/// The range of a team: `None` if its devices have ordinary memory only, or the error of the reservation.
pub(super) type Flat = Result<Option<Arc<FlatRange>>, CommError>;

/// A rank's message about its range.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Offered {
    /// The rank has no range.
    None,
    /// The key of the range in its process.
    Key(Vec<u8>),
    /// The reason why the rank has no range.
    Refused(String),
    /// The bytes from one slot to the next; the ranks are separate processes.
    Stride(u64),
}

impl Offered {
    /// Returns the message about a range.
    pub(super) fn new(flat: &Flat, across: bool) -> Self {
        match flat {
            Ok(None) => Self::None,
            Ok(Some(range)) if across => Self::Stride(range.stride()),
            Ok(Some(range)) => Self::Key(RANGES.publish(range).0),
            Err(error) => Self::Refused(error.to_string()),
        }
    }

    /// Returns the range of a rank that has reserved `flat`, given this message of rank `rank` of the same team. Ranks
    /// of one process share the range of their first.
    pub(super) fn join(self, flat: Flat, rank: u32, is_first: bool, across: bool) -> Flat {
        let range = match self {
            Self::None => Ok(None),
            Self::Key(key) => match RANGES.find(rank, &Key(key)) {
                Ok(range) => Ok(Some(range)),
                Err(error) => Err(CommError::OtherRank { rank, reason: error.to_string() }),
            },
            Self::Refused(reason) => Err(CommError::OtherRank { rank, reason }),
            Self::Stride(theirs) => match &flat {
                Ok(Some(range)) if range.stride() != theirs => {
                    let own = range.stride();
                    let reason =
                        format!("it has reserved {theirs} bytes of addresses for a rank's windows, this rank {own}");
                    Err(CommError::OtherRank { rank, reason })
                }
                _ => return flat,
            },
        };
        match (across, is_first) {
            // The rank has no range, or the reason.
            (true, _) => flat.and(range),
            (false, true) => range,
            (false, false) => flat,
        }
    }
}

/// Reserves the range on the first rank of a team, before the ranks exchange messages. Across processes each rank
/// reserves a range.
pub(super) fn offer(device: &dyn Device, rank: u32, lsa_size: u32, across: bool) -> Flat {
    if across || rank.is_multiple_of(lsa_size) { Ok(FlatRange::reserve(device, lsa_size)?) } else { Ok(None) }
}

/// A rank's message before a window's memory is allocated.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Wish {
    bytes: u64,
    granularity: u64,
    /// The used parts of its slot.
    taken: Vec<Range<u64>>,
}

/// Returns the offset at which the longest part of a team's window fits. It is the same on all ranks, because all ranks
/// know the same wishes.
fn place(wishes: Vec<Wish>, stride: u64) -> Result<u64, CommError> {
    let granularity = wishes.iter().map(|wish| wish.granularity).max().unwrap_or(1);
    let bytes = wishes.iter().map(|wish| wish.bytes).max().unwrap_or(0);
    let taken = wishes.into_iter().flat_map(|wish| wish.taken).collect();
    first_fit(taken, bytes, granularity, stride).map_err(|longest| CommError::NoPlace { bytes, longest, stride })
}

/// This rank's part of a window, before its allocation.
pub(super) struct OwnPart<'a> {
    pub(super) device: &'a Arc<dyn Device>,
    pub(super) flat: &'a Flat,
    pub(super) handle: CommHandle,
    pub(super) bytes: u64,
    /// The ranks are separate processes.
    pub(super) across: bool,
}

impl<'a> OwnPart<'a> {
    /// Returns the message to the other ranks, or the reason why this rank has no range.
    pub(super) fn wish(&self) -> Result<Wish, &'a CommError> {
        let CommHandle { lsa_rank: slot, lsa_size, .. } = self.handle;
        self.flat.as_ref().map(|range| {
            // Across processes this rank's slots of other ranks must be free at the offset, too.
            let slots = if self.across { 0..lsa_size } else { slot..slot + 1 };
            let taken = range.iter().flat_map(|range| slots.clone().flat_map(|slot| range.taken(slot))).collect();
            // A part without bytes has an address, too.
            Wish { bytes: self.bytes.max(1), granularity: self.device.granularity(), taken }
        })
    }

    /// Allocates memory at the same offset in this rank's slot as the other ranks of its team, if their devices support
    /// that. `all` are the messages of all ranks.
    pub(super) fn memory(&self, all: Vec<Wish>) -> Result<Arc<Memory>, CommError> {
        let &Self { device, bytes, across, .. } = self;
        let Ok(Some(range)) = self.flat else {
            return Ok(Memory::for_ranks(device, MemoryKind::Device, bytes, across)?);
        };
        let CommHandle { lsa_rank: slot, lsa_first, lsa_size, .. } = self.handle;
        let team = all.into_iter().skip(lsa_first as usize).take(lsa_size as usize);
        let offset = place(team.collect(), range.stride())?;
        // The longest part of all ranks fits there, and slots end at multiples of every granularity.
        let room = bytes.max(1).next_multiple_of(device.granularity());
        Ok(Memory::placed(device, range.take(slot, offset, room)?, bytes, across)?)
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "what is taken is a list of ranges")]
mod tests {
    use super::*;
    use gin_boot::wire::{decode, encode};

    fn wish(bytes: u64, taken: &[Range<u64>]) -> Wish {
        Wish { bytes, granularity: 16, taken: taken.to_vec() }
    }

    #[test]
    fn the_longest_part_gets_a_place_that_is_free_on_all_ranks() {
        let wishes = || vec![wish(1, &[0..16]), wish(40, &[32..48]), wish(16, &[])];
        assert_eq!(place(wishes(), 96), Ok(48));
        let coarse = Wish { granularity: 64, ..wish(1, &[]) };
        assert_eq!(place(wishes().into_iter().chain([coarse]).collect(), 128), Ok(64));
        let error = place(wishes(), 80).unwrap_err();
        assert_eq!(error, CommError::NoPlace { bytes: 40, longest: 32, stride: 80 });
        assert!(error.to_string().contains("40 bytes") && error.to_string().contains("32"), "{error}");
    }

    /// Returns the message about a range, as another rank reads it.
    fn sent(flat: &Flat, across: bool) -> Offered {
        decode(&encode(&Offered::new(flat, across))).unwrap()
    }

    #[test]
    fn a_refused_range_is_reported_with_the_rank_and_the_reason() {
        let error = CommError::ProxyGone;
        let refused = CommError::OtherRank { rank: 4, reason: error.to_string() };
        for across in [false, true] {
            let joined = sent(&Err(error.clone()), across).join(Ok(None), 4, true, across);
            assert_eq!(joined.unwrap_err(), refused);
        }
        assert!(matches!(sent(&Ok(None), false), Offered::None));
        assert!(decode::<Offered>(&[9; 16]).is_none());
    }

    #[test]
    fn across_processes_each_rank_has_a_range_and_all_are_alike() {
        let device = gin_gpu::virt::VirtualDevice::memory_only(0);
        let range = || offer(&*device, 1, 2, true);
        let own = range().unwrap().unwrap();
        let Offered::Stride(stride) = sent(&range(), true) else { panic!("it is another process's") };
        assert_eq!(stride, own.stride());
        let joined = Offered::Stride(stride).join(Ok(Some(own.clone())), 4, true, true).unwrap().unwrap();
        assert!(Arc::ptr_eq(&joined, &own));
        let error = Offered::Stride(2 * stride).join(Ok(Some(own.clone())), 4, false, true).unwrap_err();
        assert!(matches!(&error, CommError::OtherRank { rank: 4, reason } if reason.contains("reserved")), "{error}");
        // One rank without a range, and none has one.
        assert!(matches!(Offered::None.join(Ok(Some(own.clone())), 4, false, true), Ok(None)));
        assert!(Offered::Refused("no addresses".to_owned()).join(Ok(Some(own)), 4, false, true).is_err());
        assert!(Offered::Stride(stride).join(Err(CommError::ProxyGone), 4, false, true).is_err());
    }

    #[test]
    fn ranks_of_one_process_share_the_range_of_their_first() {
        let device = gin_gpu::virt::VirtualDevice::memory_only(0);
        let own = offer(&*device, 0, 2, false).unwrap().unwrap();
        assert!(offer(&*device, 1, 2, false).unwrap().is_none());
        let joined = sent(&Ok(Some(own.clone())), false).join(Ok(None), 0, true, false);
        assert!(Arc::ptr_eq(&joined.unwrap().unwrap(), &own));
        let joined = sent(&Ok(None), false).join(Ok(Some(own.clone())), 1, false, false);
        assert!(Arc::ptr_eq(&joined.unwrap().unwrap(), &own));
    }
}
