// SPDX-License-Identifier: MIT OR Apache-2.0
//! The report of a data race.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use crate::actor::Actor;

/// Memory in which races are looked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RaceMemory {
    /// A rank's part of a window.
    Window {
        /// Number of the window.
        window: u32,
        /// The rank.
        rank: u32,
        /// The name, if the rank gave it one, and the bytes of an element.
        name: Option<(Arc<str>, u64)>,
    },
    /// Static shared memory of a block.
    Shared {
        /// Device of the block.
        rank: u32,
        /// Linear index of the block.
        block: u64,
        /// The dynamic part, not a declaration.
        dynamic: bool,
    },
}

impl fmt::Display for RaceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RaceMemory::Window { window, rank, name: None } => write!(f, "window {window} of rank {rank}"),
            RaceMemory::Window { window, rank, name: Some((name, _)) } => {
                write!(f, "window {window} (`{name}`) of rank {rank}")
            }
            RaceMemory::Shared { rank, block, dynamic } => {
                let kind = if *dynamic { "dynamic" } else { "static" };
                write!(f, "{kind} shared memory of rank {rank}, block {block}")
            }
        }
    }
}

/// The operation that an access belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RaceOperation {
    /// A plain load.
    Read,
    /// A plain store.
    Write,
    /// A load of a shared word.
    AtomicRead,
    /// A store to a shared word, or an atomic change.
    AtomicWrite,
    /// The read of a put's source.
    PutRead,
    /// The write of a put's destination.
    PutWrite,
    /// The read of a get's source.
    GetRead,
    /// The write of a get's destination.
    GetWrite,
    /// The read of a copy that a proxy, a NIC or a stream makes.
    CopyRead,
    /// The write of such a copy.
    CopyWrite,
}

impl RaceOperation {
    fn text(self) -> &'static str {
        match self {
            RaceOperation::Read => "read",
            RaceOperation::Write => "write",
            RaceOperation::AtomicRead => "atomic read",
            RaceOperation::AtomicWrite => "atomic write",
            RaceOperation::PutRead => "read of its source by a put",
            RaceOperation::PutWrite => "write of its destination by a put",
            RaceOperation::GetRead => "read of its source by a get",
            RaceOperation::GetWrite => "write of its destination by a get",
            RaceOperation::CopyRead => "read by a copy",
            RaceOperation::CopyWrite => "write by a copy",
        }
    }

    fn writes(self) -> bool {
        use RaceOperation::{AtomicWrite, CopyWrite, GetWrite, PutWrite, Write};
        matches!(self, Write | AtomicWrite | PutWrite | GetWrite | CopyWrite)
    }
}

/// One of the two accesses of a race.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RaceAccess {
    /// The operation.
    pub operation: RaceOperation,
    /// The thread that made the access. For puts and gets over the network, the thread that posted it.
    pub actor: Actor,
    /// The place of the access, or of the post.
    pub site: &'static Location<'static>,
    /// The service that carried out the post, if one did.
    pub by: Option<Actor>,
}

impl fmt::Display for RaceAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RaceAccess { operation, actor, site, by } = self;
        write!(f, "{} at {site} by {actor}", operation.text())?;
        by.as_ref().map_or(Ok(()), |by| write!(f, ", carried out by {by}"))
    }
}

/// Two accesses to the same bytes that nothing orders, of which one writes and one is no atomic.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Race {
    /// The memory.
    pub memory: RaceMemory,
    /// Offset in bytes of the first byte of both accesses.
    pub offset: u64,
    /// The access that came first in this run.
    pub first: RaceAccess,
    /// The other one.
    pub second: RaceAccess,
}

impl Race {
    /// Returns what would have ordered the two accesses.
    fn missing(&self) -> &'static str {
        use RaceOperation::{GetWrite, PutRead, PutWrite};
        let (first, second) = (self.first.operation, self.second.operation);
        let is = |operation| first == operation || second == operation;
        let host = [&self.first, &self.second].into_iter().any(|access| matches!(access.actor, Actor::Host { .. }));
        if matches!(self.memory, RaceMemory::Shared { .. }) {
            "no barrier of the threads is between them; call `sync` of the coop"
        } else if host {
            "the host did not wait for the kernel; synchronise the stream before it uses the window"
        } else if is(PutRead) {
            "no wait for the put's counter and no flush is between them; the source may change only after one of these"
        } else if first.writes() && second.writes() {
            "no signal that covers the first, followed by a wait, is between them; nor a counter, flush or barrier"
        } else if is(PutWrite) {
            "no wait for a signal that covers the put is between them, by the reading thread or one that it met at a \
             barrier; attach the signal to the put, or post a strong signal after it in its context and route, and wait \
             for that signal before the read"
        } else if is(GetWrite) {
            "no wait for the get's counter and no flush is between them"
        } else {
            "no barrier, no wait for a signal and no other acquire is between them"
        }
    }
}

impl fmt::Display for Race {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Race { memory, offset, first, second } = self;
        write!(f, "data race in {memory}, byte {offset}")?;
        if let RaceMemory::Window { name: Some((_, bytes)), .. } = memory {
            write!(f, " (element {})", offset / bytes)?;
        }
        write!(f, ": {first}; and {second}: {}", self.missing())
    }
}
