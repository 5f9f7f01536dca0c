// SPDX-License-Identifier: MIT OR Apache-2.0
//! Lanes of a warp that post to the same queue pair together.

use super::pair::{Claim, Posters, QueuePair, Written, place};
use crate::coop;
use crate::order::Sharing;
use crate::sys::Global;

/// Lanes of a warp that post as many entries to the same queue pair.
#[derive(Clone, Copy)]
pub(super) struct Group {
    pub(super) mask: u32,
    /// Number of entries of each lane.
    pub(super) count: u32,
    /// Number of entries of the lanes before the calling lane.
    pub(super) before: u32,
    /// The calling lane is the highest. It claims and publishes for all: it knows the number of all entries, those
    /// before it and its own.
    pub(super) leads: bool,
}

impl Group {
    /// No lane.
    pub(super) const NONE: Self = Self { mask: 0, count: 0, before: 0, leads: false };

    #[inline(always)]
    pub(super) fn of(mask: u32, count: u32) -> Self {
        let below = coop::lanes_below();
        Self { mask, count, before: (mask & below).count_ones() * count, leads: mask >> 1 <= below }
    }
}

/// Lanes that post together. Those of one [`Group`] post to the same queue pair.
pub(super) struct Callers<'a> {
    pub(super) pair: &'a QueuePair<Global>,
    pub(super) sharing: Sharing,
    pub(super) group: Group,
    /// All lanes that are here together.
    pub(super) here: u32,
    /// The claims word before the claim of a lane that posts alone.
    pub(super) claims: Option<u64>,
    /// The calling lane's first index, once claimed.
    pub(super) index: u32,
}

impl Posters for Callers<'_> {
    type Group = Group;

    #[inline(always)]
    fn claim(&self) -> Claim {
        if let Some(claims) = self.claims {
            return Claim { index: place(claims), claims };
        }
        let Group { mask, count, before, leads } = self.group;
        let claims = self.pair.claim(leads, before + count, self.sharing);
        let first = coop::leader_shuffle_narrow(self.here, place(claims), 31 - mask.leading_zeros());
        Claim { index: first.wrapping_add(before), claims }
    }

    #[inline(always)]
    fn all(&self, bit: bool) -> bool {
        coop::ballot_here(self.here, !bit) & self.group.mask == 0
    }

    #[inline(always)]
    fn group(&self, together: bool) -> Group {
        if together { self.group } else { Group { mask: coop::own_lane(), before: 0, leads: true, ..self.group } }
    }

    #[inline(always)]
    fn written(&self, more: bool) -> Option<Written> {
        let Group { mask, count, before, leads } = self.group;
        coop::sync_here(mask);
        // One lane without `more` sends the entries of all.
        let more = more & !coop::any_here(mask, !more);
        leads.then_some(Written { first: self.index.wrapping_sub(before), count: before + count, more })
    }

    #[inline(always)]
    fn published(&self) {
        coop::sync_here(self.group.mask);
    }
}
