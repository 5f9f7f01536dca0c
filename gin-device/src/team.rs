// SPDX-License-Identifier: MIT OR Apache-2.0
//! Teams of ranks.
//!
//! A team is an arithmetic sequence of world ranks.
//!
//! | team | ranks |
//! | --- | --- |
//! | world | all |
//! | LSA | the ranks that reach each other by loads and stores: one host, or one NVLink domain |
//! | rail | the ranks with the same place in their LSA teams, which usually share a network rail |
//!
//! Operations take a [`Rank`], which is always a valid world rank. So a rank of one team cannot be taken for a rank of
//! another team: a rank outside a team is refused, not mapped to a wrong one.

use crate::fault::{self, Fault};
use gin_abi::{FaultKind, FaultSubject, Operation};

/// A world rank that exists in its communicator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rank(u32);

impl Rank {
    /// Returns the rank with this number.
    ///
    /// # Safety
    /// - Every communicator that it is used with has more than `rank` ranks.
    #[inline(always)]
    #[must_use]
    pub const unsafe fn new_unchecked(rank: u32) -> Self {
        Self(rank)
    }

    /// Returns its number in the world.
    #[inline(always)]
    #[must_use]
    pub const fn world(self) -> u32 {
        self.0
    }
}

/// The `size` ranks `first, first + stride, ...`, the caller's own among them.
///
/// ```
/// # use bytemuck::Zeroable;
/// # use gin_abi::CommHandle;
/// # use gin_device::prelude::*;
/// # let handle = CommHandle { ranks: 12, rank: 6, lsa_size: 4, lsa_rank: 2, ..CommHandle::zeroed() };
/// # // Safety: only the handle's own numbers are read.
/// # let comm = unsafe { Comm::from_handle(handle) };
/// // Rank 6 of 12, in LSA teams of 4.
/// let (world, lsa, rail) = (comm.world(), comm.lsa(), comm.rail());
/// assert_eq!((world.rank(), lsa.rank(), rail.rank()), (6, 2, 1));
/// assert_eq!((lsa.left().world(), lsa.right().world(), rail.right().world()), (5, 7, 10));
/// // The member of an LSA team that is outside the rail team is refused.
/// assert_eq!(rail.rank_of(lsa.right()).unwrap_err().kind(), FaultKind::NotInTeam);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Team {
    first: u32,
    stride: u32,
    size: u32,
    rank: u32,
}

impl Team {
    /// Returns the ranks `first, first + stride, ...`, of which the caller is number `rank`. For the back ends of other
    /// crates; the ranks exist.
    #[doc(hidden)]
    #[inline(always)]
    #[must_use]
    pub const fn new(first: u32, stride: u32, size: u32, rank: u32) -> Self {
        Self { first, stride, size, rank }
    }

    /// Returns the number of members.
    #[inline(always)]
    #[must_use]
    pub const fn size(&self) -> u32 {
        self.size
    }

    /// Returns the caller's rank in the team.
    #[inline(always)]
    #[must_use]
    pub const fn rank(&self) -> u32 {
        self.rank
    }

    /// Returns the caller's world rank.
    #[inline(always)]
    #[must_use]
    pub const fn me(&self) -> Rank {
        Rank(self.first + self.rank * self.stride)
    }

    /// Returns the member with rank `rank` in the team.
    ///
    /// # Errors
    /// [`FaultKind::UnknownRank`] if the team has no such member.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn member(&self, rank: u32) -> Result<Rank, Fault> {
        if rank < self.size {
            Ok(Rank(self.first + rank * self.stride))
        } else {
            let fault = fault::new(FaultKind::UnknownRank, Operation::Address).with_peer(rank);
            Err(fault.with_values(FaultSubject::None, self.size as u64, rank as u64))
        }
    }

    /// Returns the member `distance` ranks after the caller, round the team.
    #[inline(always)]
    #[must_use]
    pub const fn after(&self, distance: u32) -> Rank {
        let rank = (self.rank as u64 + distance as u64) % self.size as u64;
        Rank(self.first + rank as u32 * self.stride)
    }

    /// Returns the next member, round the team; the caller itself if it is alone.
    #[inline(always)]
    #[must_use]
    pub const fn right(&self) -> Rank {
        let next = if self.rank + 1 == self.size { 0 } else { self.rank + 1 };
        Rank(self.first + next * self.stride)
    }

    /// Returns the previous member, round the team; the caller itself if it is alone.
    #[inline(always)]
    #[must_use]
    pub const fn left(&self) -> Rank {
        let before = if self.rank == 0 { self.size - 1 } else { self.rank - 1 };
        Rank(self.first + before * self.stride)
    }

    /// Returns the rank in the team of a world rank.
    ///
    /// # Errors
    /// [`FaultKind::NotInTeam`] if it is no member.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn rank_of(&self, rank: Rank) -> Result<u32, Fault> {
        if let Some(place) = self.place_of(rank) {
            return Ok(place);
        }
        let fault = fault::new(FaultKind::NotInTeam, Operation::Address).with_peer(rank.0);
        Err(fault.with_values(FaultSubject::None, self.size as u64, rank.0 as u64))
    }

    /// Returns whether a world rank is a member.
    #[inline(always)]
    #[must_use]
    pub const fn contains(&self, rank: Rank) -> bool {
        self.place_of(rank).is_some()
    }

    #[inline(always)]
    const fn place_of(&self, rank: Rank) -> Option<u32> {
        if rank.0 >= self.first {
            let distance = rank.0 - self.first;
            let place = distance / self.stride;
            if distance == place * self.stride && place < self.size {
                return Some(place);
            }
        }
        None
    }

    /// Returns the caller's part of the team, which is cut into runs of `size` neighbouring members.
    ///
    /// # Errors
    /// [`FaultKind::UnknownRank`] if `size` is 0 or does not divide the team's size.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn inner(&self, size: u32) -> Result<Team, Fault> {
        if size == 0 || !self.size.is_multiple_of(size) {
            return Err(Self::indivisible(self.size, size));
        }
        let rank = self.rank % size;
        Ok(Team { first: self.first + (self.rank - rank) * self.stride, stride: self.stride, size, rank })
    }

    /// Returns the members with the caller's place in their runs of `size` neighbours.
    ///
    /// # Errors
    /// As [`inner`](Self::inner).
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn outer(&self, size: u32) -> Result<Team, Fault> {
        if size == 0 || !self.size.is_multiple_of(size) {
            return Err(Self::indivisible(self.size, size));
        }
        Ok(Team {
            first: self.first + self.rank % size * self.stride,
            stride: self.stride * size,
            size: self.size / size,
            rank: self.rank / size,
        })
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn indivisible(size: u32, part: u32) -> Fault {
        fault::new(FaultKind::UnknownRank, Operation::Address).with_values(FaultSubject::None, size as u64, part as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_convert_both_ways_and_others_are_refused() {
        // World of 12, LSA teams of 4, seen from rank 6.
        let (world, lsa, rail) = (Team::new(0, 1, 12, 6), Team::new(4, 1, 4, 2), Team::new(2, 4, 3, 1));
        for team in [world, lsa, rail] {
            assert_eq!(team.me(), Rank(6));
            for place in 0..team.size() {
                let member = team.member(place).unwrap();
                assert_eq!(team.rank_of(member), Ok(place));
            }
            assert_eq!(team.member(team.size()).unwrap_err().kind(), FaultKind::UnknownRank);
            assert_eq!(team.member(u32::MAX).unwrap_err().kind(), FaultKind::UnknownRank);
            let members = (0..12).filter(|rank| team.contains(Rank(*rank))).count();
            assert_eq!(members, team.size() as usize);
        }
        assert_eq!(rail.rank_of(Rank(3)).unwrap_err().kind(), FaultKind::NotInTeam);
        assert_eq!(lsa.rank_of(Rank(8)).unwrap_err().kind(), FaultKind::NotInTeam);
        assert_eq!((lsa.left(), lsa.right(), rail.right()), (Rank(5), Rank(7), Rank(10)));
        assert_eq!((Team::new(0, 1, 1, 0).left(), Team::new(0, 1, 1, 0).right()), (Rank(0), Rank(0)));
    }

    #[test]
    fn parts_of_a_team_are_the_lsa_and_rail_teams_of_the_world() {
        let world = Team::new(0, 1, 12, 6);
        assert_eq!(world.inner(4), Ok(Team::new(4, 1, 4, 2)));
        assert_eq!(world.outer(4), Ok(Team::new(2, 4, 3, 1)));
        assert!(world.inner(5).is_err() && world.outer(0).is_err());
    }

    #[test]
    fn going_round_a_team_does_not_overflow() {
        let team = Team::new(0, 1, 5, 4);
        assert_eq!(team.after(1), Rank(0));
        assert_eq!(team.after(u32::MAX), Rank(((4 + u32::MAX as u64) % 5) as u32));
    }
}
