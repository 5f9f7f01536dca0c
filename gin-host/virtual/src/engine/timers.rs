// SPDX-License-Identifier: MIT OR Apache-2.0
//! Timers of an engine, ordered by time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::TaskKey;

#[derive(Clone, Copy)]
pub(super) enum Alarm {
    /// Wakes a coroutine that naps.
    Task(TaskKey),
    /// Releases the lanes of a warp that asked for the active mask.
    Gathering { block: u32, block_serial: u64, warp: u32, serial: u64 },
    /// Carries on a bulk copy.
    Bulk { block: u32, block_serial: u64, serial: u64 },
}

struct TimerEntry {
    at: u64,
    /// Order among alarms of one time.
    order: u64,
    alarm: Alarm,
}

impl PartialEq for TimerEntry {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}

impl Eq for TimerEntry {}

impl PartialOrd for TimerEntry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for TimerEntry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

#[derive(Default)]
pub(super) struct Timers {
    heap: BinaryHeap<Reverse<TimerEntry>>,
    order: u64,
}

impl Timers {
    pub(super) fn add(&mut self, at: u64, alarm: Alarm) {
        self.order += 1;
        self.heap.push(Reverse(TimerEntry { at, order: self.order, alarm }));
    }

    pub(super) fn next(&self) -> Option<u64> {
        self.heap.peek().map(|Reverse(entry)| entry.at)
    }

    /// Removes the next alarm that is due, and returns it with its time.
    pub(super) fn due(&mut self, now: u64) -> Option<(u64, Alarm)> {
        if self.next()? > now {
            return None;
        }
        self.heap.pop().map(|Reverse(entry)| (entry.at, entry.alarm))
    }
}
