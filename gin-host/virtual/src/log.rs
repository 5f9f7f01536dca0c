// SPDX-License-Identifier: MIT OR Apache-2.0
//! The event log of a seeded run: logical events, never an address or real time.

use std::fmt;

use crate::config::LogMode;

/// Kinds of events.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Event {
    Resume = 1,
    Jump = 2,
    Barrier = 3,
    Exchange = 4,
    ActiveMask = 5,
    BlockStart = 6,
    ThreadEnd = 7,
    GridStart = 8,
    GridEnd = 9,
    HostEnd = 10,
    ServiceEnd = 11,
}

const NAMES: [&str; 12] = [
    "?",
    "resume",
    "clock jumps",
    "barrier complete",
    "exchange complete",
    "active mask",
    "block starts",
    "thread ends",
    "grid starts",
    "grid ends",
    "host ends",
    "service ends",
];

/// A logical name in one word: kind (2 bits), rank (10), launch (18), block (24), thread (10).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Code(pub(crate) u64);

impl Code {
    pub(crate) const fn host(rank: u32) -> Code {
        Code(1 << 62 | (rank as u64 & 0x3ff) << 52)
    }

    pub(crate) const fn service(index: u32) -> Code {
        Code(2 << 62 | index as u64 & 0xff_ffff)
    }

    pub(crate) const fn thread(rank: u32, launch: u32, block: u64, thread: u32) -> Code {
        let (rank, launch) = (rank as u64 & 0x3ff, launch as u64 & 0x3_ffff);
        Code(3 << 62 | rank << 52 | launch << 34 | (block & 0xff_ffff) << 10 | thread as u64 & 0x3ff)
    }

    pub(crate) fn grid(self) -> Code {
        Code(self.0 & !0x3_ffff_ffff)
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = self.0;
        let rank = word >> 52 & 0x3ff;
        match word >> 62 {
            1 => write!(f, "host {rank}"),
            2 => write!(f, "service {}", word & 0xff_ffff),
            3 => write!(
                f,
                "rank {rank} launch {} block {} thread {}",
                word >> 34 & 0x3_ffff,
                word >> 10 & 0xff_ffff,
                word & 0x3ff
            ),
            _ => f.write_str("world"),
        }
    }
}

/// The events of a seeded world so far.
///
/// Two runs of the same program with the same seed have equal logs.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct EventLog {
    events: Vec<[u64; 3]>,
    hash: u64,
    count: u64,
}

impl EventLog {
    /// Returns the number of events; counted with [`LogMode::Hash`] and [`LogMode::Full`].
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns a hash of all events; computed with [`LogMode::Hash`] and [`LogMode::Full`].
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// Returns all events, 24 bytes each, little-endian; empty unless the mode is [`LogMode::Full`].
    pub fn to_bytes(&self) -> Vec<u8> {
        self.events.iter().flatten().flat_map(|word| word.to_le_bytes()).collect()
    }

    pub(crate) fn push(&mut self, mode: LogMode, event: Event, code: Code, now: u64, detail: u64) {
        if mode == LogMode::Off {
            return;
        }
        let words = [(event as u64) << 56 | detail & ((1 << 56) - 1), code.0, now];
        for word in words {
            // The multiplier of splitmix64; any odd constant with mixed bits works.
            self.hash = (self.hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        }
        self.count += 1;
        if mode == LogMode::Full {
            self.events.push(words);
        }
    }
}

/// Prints one line per event: virtual nanoseconds, coroutine, event, detail.
impl fmt::Display for EventLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for [what, code, now] in &self.events {
            let name = NAMES.get((what >> 56) as usize).copied().unwrap_or("?");
            writeln!(f, "{now} {}: {name} {}", Code(*code), what & ((1 << 56) - 1))?;
        }
        Ok(())
    }
}

impl fmt::Debug for EventLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventLog").field("count", &self.count).field("hash", &self.hash).finish_non_exhaustive()
    }
}
