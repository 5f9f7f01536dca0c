// SPDX-License-Identifier: MIT OR Apache-2.0
//! Windows whose parts lie at fixed distances: the ranks of an LSA team share a range of addresses, and agree on a place
//! in it for each window.

use super::life::Live;
use super::reach;
use super::wire::{Reader, Writer, garbled};
use super::{CommError, Communicator};
use gin_gpu::flat::{FlatRange, first_fit};
use gin_gpu::{Device, Memory, MemoryKind};
use std::ops::Range;
use std::sync::Arc;

/// The range of a team: `None` if its devices have ordinary memory only, or why there is none.
pub(super) type Flat = Result<Option<Arc<FlatRange>>, CommError>;

/// What a rank tells the others of its range.
const NONE: u64 = 0;
const KEY: u64 = 1;
const REFUSED: u64 = 2;
const STRIDE: u64 = 3;

/// What a rank has before it meets the others: the range, on the first rank of a team; across processes each rank has its
/// own.
pub(super) fn offer(device: &dyn Device, rank: u32, lsa_size: u32, across: bool) -> Flat {
    if across || rank.is_multiple_of(lsa_size) { Ok(FlatRange::reserve(device, lsa_size)?) } else { Ok(None) }
}

/// What a rank was told of another one's range.
#[derive(Debug)]
pub(super) enum Told {
    /// The range, of this process.
    Range(Flat),
    /// Bytes from one slot to the next in a range of another process.
    Stride(u64),
}

impl Told {
    /// What rank `own` of a team has once it was told this by rank `rank` of the same team. Ranks of one process share the
    /// range of their first.
    pub(super) fn join(self, flat: Flat, rank: u32, is_first: bool, across: bool) -> Flat {
        match self {
            Self::Range(range) if is_first && !across => range,
            Self::Range(_) if !across => flat,
            // It has none, or says why.
            Self::Range(range) => flat.and(range),
            Self::Stride(theirs) => match flat {
                Ok(Some(range)) if range.stride() != theirs => {
                    let own = range.stride();
                    let reason =
                        format!("it has reserved {theirs} bytes of addresses for a rank's windows, this rank {own}");
                    Err(CommError::OtherRank { rank, reason })
                }
                flat => flat,
            },
        }
    }
}

/// Appends what [`take`] reads.
pub(super) fn write(message: &mut Writer, flat: &Flat, across: bool) {
    match flat {
        Ok(None) => message.word(NONE).bytes(&[]),
        Ok(Some(range)) if across => message.word(STRIDE).bytes(&range.stride().to_le_bytes()),
        Ok(Some(range)) => message.word(KEY).bytes(&reach::offer_range(range).0),
        Err(error) => message.word(REFUSED).bytes(error.to_string().as_bytes()),
    };
}

/// What `rank` has.
pub(super) fn take(rank: u32, message: &mut Reader<'_>) -> Option<Told> {
    let (kind, bytes) = (message.word()?, message.bytes()?);
    match kind {
        NONE => Some(Told::Range(Ok(None))),
        KEY => Some(Told::Range(reach::take_range(rank, bytes).map(Some))),
        STRIDE => Some(Told::Stride(u64::from_le_bytes(bytes.try_into().ok()?))),
        REFUSED => {
            let reason = String::from_utf8_lossy(bytes).into_owned();
            Some(Told::Range(Err(CommError::OtherRank { rank, reason })))
        }
        _ => None,
    }
}

/// What a rank says before a window's memory is made.
#[derive(Debug, PartialEq, Eq)]
struct Wish {
    bytes: u64,
    granularity: u64,
    /// What is taken of its slot.
    taken: Vec<Range<u64>>,
}

impl Wish {
    fn write(&self) -> Vec<u8> {
        let mut message = Writer::default();
        message.word(self.bytes).word(self.granularity);
        for taken in &self.taken {
            message.word(taken.start).word(taken.end);
        }
        message.0
    }

    fn read(message: &[u8]) -> Option<Self> {
        let mut reader = Reader(message);
        let (bytes, granularity) = (reader.word()?, reader.word()?);
        let mut taken = Vec::new();
        while !reader.0.is_empty() {
            taken.push(reader.word()?..reader.word()?);
        }
        Some(Self { bytes, granularity, taken })
    }
}

/// Where the longest part of a window of a team has room: the same on all ranks, as all know the same wishes.
fn place(wishes: Vec<Wish>, stride: u64) -> Result<u64, CommError> {
    let granularity = wishes.iter().map(|wish| wish.granularity).max().unwrap_or(1);
    let bytes = wishes.iter().map(|wish| wish.bytes).max().unwrap_or(0);
    let taken = wishes.into_iter().flat_map(|wish| wish.taken).collect();
    first_fit(taken, bytes, granularity, stride).map_err(|longest| CommError::NoPlace { bytes, longest, stride })
}

impl Communicator {
    /// Memory for this rank's part of a window, at the same place as those of the other ranks of its team, if their devices
    /// can do that. Collective; what comes after the ranks have met is in the inner result.
    pub(super) fn window_memory(&self, live: &Live, bytes: u64) -> Result<Result<Arc<Memory>, CommError>, CommError> {
        const CALL: &str = "allocate a window";
        let slot = self.rank() % live.lsa_size;
        let wish = live.flat.as_ref().map_err(CommError::clone).map(|range| {
            // Across processes there is room only where nothing is mapped of other ranks either.
            let slots = if self.is_across() { 0..live.lsa_size } else { slot..slot + 1 };
            let taken = range.iter().flat_map(|range| slots.clone().flat_map(|slot| range.taken(slot))).collect();
            // A part without bytes has an address all the same.
            Wish { bytes: bytes.max(1), granularity: self.device.granularity(), taken }.write()
        });
        let all = self.agree(live, CALL, wish)?;
        Ok(self.place_memory(live, bytes, slot, &all))
    }

    fn place_memory(&self, live: &Live, bytes: u64, slot: u32, all: &[Vec<u8>]) -> Result<Arc<Memory>, CommError> {
        let Ok(Some(range)) = &live.flat else {
            return Ok(Memory::for_ranks(&self.device, MemoryKind::Device, bytes, self.is_across())?);
        };
        let first = self.rank() - slot;
        let team = (first..first + live.lsa_size).map(|rank| {
            let message = all.get(rank as usize).map(Vec::as_slice);
            message.and_then(Wish::read).ok_or_else(|| garbled(rank))
        });
        let offset = place(team.collect::<Result<_, _>>()?, range.stride())?;
        // As long a part as any rank's has room there, and slots end at multiples of every granularity.
        let room = bytes.max(1).next_multiple_of(self.device.granularity());
        Ok(Memory::placed_for_ranks(&self.device, range.take(slot, offset, room)?, bytes, self.is_across())?)
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "what is taken is a list of ranges")]
mod tests {
    use super::*;

    fn wish(bytes: u64, taken: &[Range<u64>]) -> Wish {
        Wish { bytes, granularity: 16, taken: taken.to_vec() }
    }

    #[test]
    fn what_a_rank_wishes_is_read_as_it_was_written() {
        for wish in [wish(7, &[]), wish(u64::MAX, &[0..5, 16..32])] {
            let mut message = wish.write();
            assert_eq!(Wish::read(&message), Some(wish));
            message.pop();
            assert_eq!(Wish::read(&message), None);
        }
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

    /// What is read of a message with this.
    fn told(flat: &Flat, across: bool) -> Told {
        let mut message = Writer::default();
        write(&mut message, flat, across);
        assert!(take(4, &mut Reader(&message.0[1..])).is_none());
        take(4, &mut Reader(&message.0)).unwrap()
    }

    #[test]
    fn a_range_that_was_refused_is_told_with_the_rank_and_the_reason() {
        let error = CommError::ProxyGone;
        let refused = CommError::OtherRank { rank: 4, reason: error.to_string() };
        for across in [false, true] {
            let Told::Range(Err(told)) = told(&Err(error.clone()), across) else { panic!("it is refused") };
            assert_eq!(told, refused);
        }
        assert!(matches!(told(&Ok(None), false), Told::Range(Ok(None))));
        assert!(take(4, &mut Reader(&[9; 16])).is_none());
    }

    #[test]
    fn across_processes_each_rank_has_a_range_and_all_are_alike() {
        let device = gin_gpu::virt::VirtualDevice::memory_only(0);
        let range = || offer(&*device, 1, 2, true);
        let own = range().unwrap().unwrap();
        let Told::Stride(stride) = told(&range(), true) else { panic!("it is another process's") };
        assert_eq!(stride, own.stride());
        let joined = Told::Stride(stride).join(Ok(Some(own.clone())), 4, true, true).unwrap().unwrap();
        assert!(Arc::ptr_eq(&joined, &own));
        let error = Told::Stride(2 * stride).join(Ok(Some(own.clone())), 4, false, true).unwrap_err();
        assert!(matches!(&error, CommError::OtherRank { rank: 4, reason } if reason.contains("reserved")), "{error}");
        // One rank without a range, and none has one.
        assert!(matches!(Told::Range(Ok(None)).join(Ok(Some(own.clone())), 4, false, true), Ok(None)));
        assert!(Told::Range(Err(CommError::ProxyGone)).join(Ok(Some(own)), 4, false, true).is_err());
        assert!(Told::Stride(stride).join(Err(CommError::ProxyGone), 4, false, true).is_err());
    }

    #[test]
    fn ranks_of_one_process_share_the_range_of_their_first() {
        let device = gin_gpu::virt::VirtualDevice::memory_only(0);
        let own = offer(&*device, 0, 2, false).unwrap().unwrap();
        assert!(offer(&*device, 1, 2, false).unwrap().is_none());
        let joined = told(&Ok(Some(own.clone())), false).join(Ok(None), 0, true, false);
        assert!(Arc::ptr_eq(&joined.unwrap().unwrap(), &own));
        let joined = told(&Ok(None), false).join(Ok(Some(own.clone())), 1, false, false);
        assert!(Arc::ptr_eq(&joined.unwrap().unwrap(), &own));
    }
}
