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
        /// The team or the communicator has no such rank (`expected` is the number of ranks, 0 if it is not known).
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
        /// The barrier ended with a fault before and cannot be used again, or two sessions used it at the same time.
        /// Then `expected` is the number of rounds that this session knows of, and `seen` is the number that it found.
        BarrierBroken = 19, "barrier is broken";
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
        /// A send of a small message.
        Send = 11, "send";
        /// A receive of a small message.
        Receive = 12, "receive";
        /// A wait until puts have arrived.
        Quiet = 13, "quiet";
    }
}

/// Value of [`Fault::context`] and [`Fault::peer`] where there is none.
pub const NONE: u32 = u32::MAX;

/// The object of a fault, besides its context and peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
#[non_exhaustive]
pub enum FaultSubject {
    /// Nothing more.
    #[default]
    None,
    /// The signal with this id.
    Signal(u32),
    /// The counter with this id.
    Counter(u32),
    /// The barrier with this index.
    Barrier(u32),
    /// A range or a word of a window.
    Window {
        /// The id of the window.
        id: u32,
        /// The offset of the first byte of the range or word.
        offset: u64,
    },
}

impl FaultSubject {
    /// Returns the form stored in memory.
    #[inline(always)]
    pub const fn to_words(self) -> [u64; 2] {
        let (code, id, offset) = match self {
            Self::None => (0, 0, 0),
            Self::Signal(id) => (1, id, 0),
            Self::Counter(id) => (2, id, 0),
            Self::Barrier(index) => (3, index, 0),
            Self::Window { id, offset } => (4, id, offset),
        };
        [code | (id as u64) << 32, offset]
    }

    /// Returns the form stored in memory of a wait that a deadline ended. The place of the offset holds the deadline,
    /// in nanoseconds, unless there is an offset.
    #[inline(always)]
    pub const fn to_words_within(self, deadline: crate::Deadline) -> [u64; 2] {
        let [word, offset] = self.to_words();
        [word, if let Self::Window { .. } = self { offset } else { deadline.ns() }]
    }

    /// Decodes the form stored in memory. An unknown code becomes [`FaultSubject::None`].
    #[inline(always)]
    pub const fn read([word, offset]: [u64; 2]) -> Self {
        let id = (word >> 32) as u32;
        match word as u32 {
            1 => Self::Signal(id),
            2 => Self::Counter(id),
            3 => Self::Barrier(id),
            4 => Self::Window { id, offset },
            _ => Self::None,
        }
    }
}

/// Words of a fault in memory.
pub const WORDS: usize = 6;

/// A [`Fault`] in the form stored in shared memory.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug, PartialEq, Eq)]
pub struct FaultRecord {
    /// The words.
    pub words: [u64; WORDS],
}

const _: () = assert!(size_of::<FaultRecord>() == 48);

#[cfg(not(target_arch = "nvptx64"))]
pub use cpu::Fault;

/// The form of a fault on CPUs. On a GPU a fault has one word: `gin-device` defines it.
#[cfg(not(target_arch = "nvptx64"))]
mod cpu {
    use super::{FaultKind, FaultSubject, NONE, Operation, WORDS};
    use crate::Deadline;
    use core::hash::{Hash, Hasher};
    use core::panic::Location;

    /// A fault: its kind, where it occurred, what it concerns, the expected value and the value seen.
    ///
    /// This is the error of every device call, and of every host call that learns of a device's fault. It is `Copy`.
    ///
    /// ```
    /// use gin_abi::{Fault, FaultKind, Operation, FaultSubject};
    ///
    /// let fault = Fault::new(FaultKind::Timeout, Operation::WaitSignal).with_context(0).with_peer(3);
    /// let fault = fault.with_values(FaultSubject::Signal(7), 5, 4);
    /// assert_eq!(fault.kind(), FaultKind::Timeout);
    /// let text = "deadline passed in wait_signal, context 0, rank 3, signal 7: it is 4 and should have reached 5";
    /// assert_eq!(fault.to_string(), text);
    /// assert_eq!(Fault::from_words(fault.to_words()), Some(fault));
    /// ```
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
    #[must_use]
    pub struct Fault {
        kind: FaultKind,
        operation: Operation,
        context: u32,
        peer: u32,
        subject: FaultSubject,
        expected: u64,
        seen: u64,
        /// In nanoseconds; 0 if it is not known.
        deadline_ns: u64,
        place: Place,
    }

    /// The place of a call in the source. Faults that differ only in their places are equal.
    #[derive(Clone, Copy, Debug)]
    struct Place(Option<&'static Location<'static>>);

    impl PartialEq for Place {
        fn eq(&self, _: &Self) -> bool {
            true
        }
    }

    impl Eq for Place {}

    impl Hash for Place {
        fn hash<H: Hasher>(&self, _: &mut H) {}
    }

    impl Fault {
        /// Returns a fault of this kind in this operation, with no context or peer.
        pub const fn new(kind: FaultKind, operation: Operation) -> Self {
            let (subject, place) = (FaultSubject::None, Place(None));
            Self { kind, context: NONE, peer: NONE, operation, subject, expected: 0, seen: 0, deadline_ns: 0, place }
        }

        /// Sets the kind.
        pub const fn with_kind(mut self, kind: FaultKind) -> Self {
            self.kind = kind;
            self
        }

        /// Sets the context.
        pub const fn with_context(mut self, context: u32) -> Self {
            self.context = context;
            self
        }

        /// Sets the peer to this world rank.
        pub const fn with_peer(mut self, peer: u32) -> Self {
            self.peer = peer;
            self
        }

        /// Sets what it concerns, the expected value and the value seen.
        pub const fn with_values(mut self, subject: FaultSubject, expected: u64, seen: u64) -> Self {
            self.subject = subject;
            self.expected = expected;
            self.seen = seen;
            self
        }

        /// Sets the last four words of the form stored in memory.
        pub const fn with_words(self, [subject, rest, expected, seen]: [u64; 4]) -> Self {
            let subject = FaultSubject::read([subject, rest]);
            let deadline_ns = if matches!(subject, FaultSubject::Window { .. }) { 0 } else { rest };
            Self { deadline_ns, ..self.with_values(subject, expected, seen) }
        }

        /// Sets the deadline that passed. A fault in memory keeps it unless it concerns a window.
        pub const fn with_deadline(mut self, deadline: Deadline) -> Self {
            self.deadline_ns = deadline.ns();
            self
        }

        /// Sets the place of the failed call in the source. A fault in memory does not keep it.
        pub const fn with_place(mut self, place: &'static Location<'static>) -> Self {
            self.place = Place(Some(place));
            self
        }

        /// Returns the kind.
        pub const fn kind(&self) -> FaultKind {
            self.kind
        }

        /// Returns the operation that failed.
        pub const fn operation(&self) -> Operation {
            self.operation
        }

        /// Returns the context, or [`NONE`].
        pub const fn context(&self) -> u32 {
            self.context
        }

        /// Returns the world rank of the peer, or [`NONE`].
        pub const fn peer(&self) -> u32 {
            self.peer
        }

        /// Returns what it concerns.
        pub const fn subject(&self) -> FaultSubject {
            self.subject
        }

        /// Returns the value waited for, or the limit exceeded.
        pub const fn expected(&self) -> u64 {
            self.expected
        }

        /// Returns the value found instead.
        pub const fn seen(&self) -> u64 {
            self.seen
        }

        /// Returns the deadline that passed, if it is known.
        pub const fn deadline(&self) -> Option<Deadline> {
            if self.deadline_ns == 0 { None } else { Some(Deadline::after_ns(self.deadline_ns)) }
        }

        /// Returns the place of the failed call in the source of the kernel: known on the rank whose virtual GPU ran
        /// it, and on ranks of the same process.
        pub const fn place(&self) -> Option<&'static Location<'static>> {
            self.place.0
        }

        /// Returns the form stored in memory.
        pub const fn to_words(self) -> [u64; WORDS] {
            let [subject, offset] = self.subject.to_words_within(Deadline::after_ns(self.deadline_ns));
            let codes = self.kind as u64 | (self.operation as u64) << 32;
            let place = self.context as u64 | (self.peer as u64) << 32;
            [codes, place, subject, offset, self.expected, self.seen]
        }

        /// Decodes the form stored in memory. An unknown kind becomes [`FaultKind::AbiMismatch`], an unknown operation
        /// [`Operation::None`].
        pub const fn read(words: [u64; WORDS]) -> Self {
            let kind = match FaultKind::from_code(words[0] as u32) {
                Some(kind) => kind,
                None => FaultKind::AbiMismatch,
            };
            let operation = match Operation::from_code((words[0] >> 32) as u32) {
                Some(operation) => operation,
                None => Operation::None,
            };
            let [_, place, subject, rest, expected, seen] = words;
            let fault = Self::new(kind, operation).with_context(place as u32).with_peer((place >> 32) as u32);
            fault.with_words([subject, rest, expected, seen])
        }

        /// Decodes the form stored in memory, or returns `None` if the code of its kind or operation is unknown.
        pub const fn from_words(words: [u64; WORDS]) -> Option<Self> {
            match (FaultKind::from_code(words[0] as u32), Operation::from_code((words[0] >> 32) as u32)) {
                (Some(_), Some(_)) => Some(Self::read(words)),
                _ => None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUBJECTS: [FaultSubject; 5] = [
        FaultSubject::None,
        FaultSubject::Signal(u32::MAX),
        FaultSubject::Counter(5),
        FaultSubject::Barrier(0),
        FaultSubject::Window { id: 9, offset: u64::MAX },
    ];

    #[test]
    fn every_fault_survives_the_way_through_memory() {
        for &kind in FaultKind::ALL {
            for &operation in Operation::ALL {
                for subject in SUBJECTS {
                    let fault = Fault::new(kind, operation).with_context(3).with_peer(9);
                    let mut fault = fault.with_values(subject, u64::MAX, 7);
                    if !matches!(subject, FaultSubject::Window { .. }) {
                        fault = fault.with_deadline(crate::Deadline::after_us(5));
                    }
                    assert_eq!(Fault::from_words(fault.to_words()), Some(fault));
                    assert_eq!(Fault::read(fault.to_words()), fault);
                }
            }
        }
    }

    #[test]
    fn zeroed_memory_is_no_fault() {
        assert_eq!(Fault::from_words([0; WORDS]), None);
        assert_eq!(Fault::read([0; WORDS]).kind(), FaultKind::AbiMismatch);
    }
}
