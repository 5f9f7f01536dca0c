// SPDX-License-Identifier: MIT OR Apache-2.0
//! Error values that travel between kernel and host.

use crate::codes::codes;
use bytemuck::{Pod, Zeroable};

codes! {
    /// The kind of a fault.
    FaultKind: u32 as u32 {
        /// The deadline of this wait passed. Only the caller learns of it; the communicator stays usable.
        Timeout = 1, "deadline passed";
        /// The host called `abort`.
        Aborted = 2, "communicator was aborted";
        /// The peer is known to be lost.
        PeerLost = 3, "peer is lost";
        /// The network reported an error for an operation.
        Network = 4, "network failed an operation";
        /// A post gave up after it had claimed a slot. It leaves a hole in the queue that cannot be filled.
        QueueBroken = 5, "queue has a hole: a post gave up after its claim";
        /// The team or the communicator has no such rank (`expected` is the number of ranks).
        UnknownRank = 6, "no such rank";
        /// A rank that is not a member of the team.
        NotInTeam = 7, "rank is not in the team";
        /// A range that reaches past the end of the window. `expected` is the window's length in bytes. `seen` is the
        /// offset of the first byte past the end of the range, or `u64::MAX` if that overflows.
        OutOfRange = 8, "range reaches past the end of the window";
        /// An offset or address that is not a multiple of the alignment of the type or operation.
        Misaligned = 9, "offset is not aligned";
        /// Source and destination of a transfer differ in length.
        LengthMismatch = 10, "source and destination differ in length";
        /// A signal id past the number of signals that the communicator requested.
        UnknownSignal = 11, "no such signal";
        /// A counter id past the number of counters that the communicator requested.
        UnknownCounter = 12, "no such counter";
        /// A context id past the number of contexts that the communicator requested.
        UnknownContext = 13, "no such context";
        /// A window that is not, or no longer, registered.
        UnknownWindow = 14, "window is not registered";
        /// A barrier index past the number of barriers that the communicator requested.
        UnknownBarrier = 15, "no such barrier";
        /// The network has no signals that cover all earlier puts.
        NoStrongSignals = 16, "network has no strong signals";
        /// The network or the window does not support signals at window addresses.
        NoVaSignals = 17, "no signals at addresses of this window: register it with the flag `signals`";
        /// A width in bits that is 0 or more than the word has.
        BadWidth = 18, "width in bits is out of range";
        /// The barrier ended with a fault before and cannot be used again.
        BarrierBroken = 19, "barrier ended with a fault before";
        /// The proxy could not decode a descriptor.
        BadDescriptor = 20, "malformed descriptor";
        /// The kernel has no code for the communicator's back end.
        NoBackend = 21, "kernel was built without this communicator's back end";
        /// Kernel and host disagree about the shared layouts.
        AbiMismatch = 22, "kernel and host were built with different versions of the shared layouts";
        /// A kernel reported its own error (`seen` is the kernel's number for it).
        Reported = 23, "reported by the kernel";
        /// A peer cannot be reached by loads and stores.
        NotReachable = 24, "peer is not reachable by loads and stores";
        /// A fault that another rank reported.
        Elsewhere = 25, "another rank failed";
        /// The communicator was created without a network connection to this peer.
        NotConnected = 26, "communicator has no connection to the peer";
    }
}

codes! {
    /// The operation in which a fault occurred.
    Operation: u32 as u32 {
        /// No particular operation.
        None = 0, "nothing";
        /// A put from a window.
        Put = 1, "put";
        /// A put of an immediate value.
        PutValue = 2, "put_value";
        /// A get.
        Get = 3, "get";
        /// A signal without payload.
        Signal = 4, "signal";
        /// A flush, or the wait for a flush token.
        Flush = 5, "flush";
        /// A wait for, or a read of, a signal.
        WaitSignal = 6, "wait_signal";
        /// A wait for, or a read of, a counter.
        WaitCounter = 7, "wait_counter";
        /// A barrier.
        Barrier = 8, "barrier";
        /// A conversion of ranks, windows or pointers.
        Address = 9, "address";
        /// A reset of a signal or counter.
        Reset = 10, "reset";
    }
}

/// Value of [`Fault::context`] and [`Fault::peer`] where there is none.
pub const NONE: u32 = u32::MAX;

/// A fault: its kind, where it occurred, the expected value and the value seen.
///
/// This is the error of every device call, and of every host call that learns of a device's fault. It is `Copy` and has
/// 32 bytes.
///
/// ```
/// use gin_abi::{Fault, FaultKind, Operation};
///
/// let fault = Fault::new(FaultKind::Timeout, Operation::WaitSignal).context(0).peer(3).values(5, 4);
/// assert_eq!(fault.to_string(), "deadline passed in wait_signal, context 0, rank 3 (expected 5, saw 4)");
/// assert_eq!(Fault::from_words(fault.to_words()), Some(fault));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[must_use]
pub struct Fault {
    /// The kind.
    pub kind: FaultKind,
    /// The context, or [`NONE`].
    pub context: u32,
    /// World rank of the peer, or [`NONE`].
    pub peer: u32,
    /// The operation that failed.
    pub operation: Operation,
    /// The value waited for, or the limit exceeded.
    pub expected: u64,
    /// The value found instead.
    pub seen: u64,
}

impl Fault {
    /// Returns a fault of this kind in this operation, with no context or peer.
    #[inline(always)]
    pub const fn new(kind: FaultKind, operation: Operation) -> Self {
        Self { kind, context: NONE, peer: NONE, operation, expected: 0, seen: 0 }
    }

    /// Sets the context.
    #[inline(always)]
    pub const fn context(mut self, context: u32) -> Self {
        self.context = context;
        self
    }

    /// Sets the peer to this world rank.
    #[inline(always)]
    pub const fn peer(mut self, peer: u32) -> Self {
        self.peer = peer;
        self
    }

    /// Sets the expected value and the value seen.
    #[inline(always)]
    pub const fn values(mut self, expected: u64, seen: u64) -> Self {
        self.expected = expected;
        self.seen = seen;
        self
    }

    /// Returns the form stored in memory.
    #[inline(always)]
    pub const fn to_words(self) -> [u64; 4] {
        [
            self.kind as u64 | (self.operation as u64) << 32,
            self.context as u64 | (self.peer as u64) << 32,
            self.expected,
            self.seen,
        ]
    }

    /// Decodes the form stored in memory. An unknown kind becomes [`FaultKind::AbiMismatch`], an unknown operation
    /// [`Operation::None`].
    #[inline(always)]
    pub const fn read(words: [u64; 4]) -> Self {
        let kind = match FaultKind::from_code(words[0] as u32) {
            Some(kind) => kind,
            None => FaultKind::AbiMismatch,
        };
        let operation = match Operation::from_code((words[0] >> 32) as u32) {
            Some(operation) => operation,
            None => Operation::None,
        };
        Self::of(kind, operation, words)
    }

    /// Decodes the form stored in memory, or returns `None` if a code is unknown.
    #[inline]
    pub const fn from_words(words: [u64; 4]) -> Option<Self> {
        let (Some(kind), Some(operation)) =
            (FaultKind::from_code(words[0] as u32), Operation::from_code((words[0] >> 32) as u32))
        else {
            return None;
        };
        Some(Self::of(kind, operation, words))
    }

    /// Takes all fields but the codes from `words`.
    #[inline(always)]
    const fn of(kind: FaultKind, operation: Operation, words: [u64; 4]) -> Self {
        let [_, place, expected, seen] = words;
        Self { kind, context: place as u32, peer: (place >> 32) as u32, operation, expected, seen }
    }
}

#[cfg(not(target_arch = "nvptx64"))]
impl core::fmt::Display for Fault {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} in {}", self.kind, self.operation)?;
        if self.context != NONE {
            write!(f, ", context {}", self.context)?;
        }
        if self.peer != NONE {
            write!(f, ", rank {}", self.peer)?;
        }
        write!(f, " (expected {}, saw {})", self.expected, self.seen)
    }
}

#[cfg(not(target_arch = "nvptx64"))]
impl core::error::Error for Fault {}

/// A [`Fault`] in the form stored in shared memory: [`Fault::to_words`].
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug, PartialEq, Eq)]
pub struct FaultRecord {
    /// The four words.
    pub words: [u64; 4],
}

const _: () = assert!(size_of::<FaultRecord>() == 32);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_survives_the_way_through_memory() {
        for &kind in FaultKind::ALL {
            for &operation in Operation::ALL {
                let fault = Fault::new(kind, operation).context(3).peer(9).values(u64::MAX, 7);
                assert_eq!(Fault::from_words(fault.to_words()), Some(fault));
                assert_eq!(Fault::read(fault.to_words()), fault);
            }
        }
    }

    #[test]
    fn zeroed_memory_is_no_fault() {
        assert_eq!(Fault::from_words([0; 4]), None);
        assert_eq!(Fault::read([0; 4]).kind, FaultKind::AbiMismatch);
    }
}
