// SPDX-License-Identifier: MIT OR Apache-2.0
//! Faults in words.

use crate::fault::{Fault, FaultKind, FaultSubject, NONE, Operation};
use core::fmt;

impl Fault {
    /// Returns the operation in words, and what it concerns.
    ///
    /// ```
    /// use gin_abi::{Fault, FaultKind, Operation, FaultSubject};
    ///
    /// let fault = Fault::new(FaultKind::Timeout, Operation::WaitSignal).with_values(FaultSubject::Signal(3), 1, 0);
    /// assert_eq!(fault.with_context(0).call().to_string(), "wait_signal, context 0, signal 3");
    /// ```
    pub fn call(&self) -> impl fmt::Display + '_ {
        fmt::from_fn(|f| {
            write!(f, "{}", self.operation())?;
            if self.context() != NONE {
                write!(f, ", context {}", self.context())?;
            }
            if self.peer() != NONE {
                write!(f, ", rank {}", self.peer())?;
            }
            write!(f, "{}", self.subject())
        })
    }

    /// Returns the values in words: what was found, what was expected, where the limit can be changed, and the place of
    /// the call if it is known. Begins with a colon; empty if the kind says it all.
    ///
    /// ```
    /// use gin_abi::{Deadline, Fault, FaultKind, Operation, FaultSubject};
    ///
    /// let fault = Fault::new(FaultKind::Timeout, Operation::WaitSignal).with_values(FaultSubject::Signal(3), 1, 0);
    /// let text = ": it is 0 and should have reached 1 within 20 ms";
    /// assert_eq!(fault.with_deadline(Deadline::after_ms(20)).detail().to_string(), text);
    /// ```
    pub fn detail(&self) -> impl fmt::Display + '_ {
        fmt::from_fn(|f| {
            if self.has_detail() {
                f.write_str(": ")?;
                self.write_values(f)?;
            }
            match self.place() {
                Some(place) => write!(f, ", at {place}"),
                None => Ok(()),
            }
        })
    }

    fn has_detail(&self) -> bool {
        match self.kind() {
            _ if self.lacks_values() => false,
            FaultKind::Timeout | FaultKind::NotReachable | FaultKind::Reported | FaultKind::BarrierBroken => true,
            FaultKind::UnknownSignal | FaultKind::UnknownCounter | FaultKind::UnknownBarrier => true,
            FaultKind::PeerLost => matches!(self.seen(), 1..=3),
            FaultKind::Elsewhere => self.kind_elsewhere().is_some(),
            _ => self.expected() != 0 || self.seen() != 0,
        }
    }

    /// Returns whether the values are not known. Checks that the header of C++ inlines have none, and a GPU keeps those
    /// of its last faults only. The text would otherwise have a zero for each.
    fn lacks_values(&self) -> bool {
        let has_values = match self.kind() {
            FaultKind::UnknownSignal | FaultKind::UnknownCounter | FaultKind::UnknownBarrier => true,
            FaultKind::Timeout => {
                matches!(self.operation(), Operation::WaitSignal | Operation::WaitCounter | Operation::Flush)
            }
            _ => false,
        };
        has_values && self.subject() == FaultSubject::None && (self.expected(), self.seen()) == (0, 0)
    }

    /// Returns the kind of a fault that another rank reported; `gin_boot::board` stores its code.
    fn kind_elsewhere(&self) -> Option<FaultKind> {
        FaultKind::from_code(u32::try_from(self.expected()).ok()?)
    }

    fn write_values(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (expected, seen) = (self.expected(), self.seen());
        match self.kind() {
            FaultKind::Timeout => {
                self.write_timeout(f)?;
                match self.deadline() {
                    Some(deadline) => write!(f, " within {deadline}"),
                    None => Ok(()),
                }
            }
            FaultKind::OutOfRange if seen == u64::MAX => {
                write!(f, "the window has {expected} bytes there, and the end of the range overflows")
            }
            FaultKind::OutOfRange => match self.subject() {
                FaultSubject::Window { offset, .. } => {
                    write!(f, "the window has {expected} bytes there, and the range is bytes {offset} to {seen}")
                }
                _ => write!(f, "the window has {expected} bytes there, and the range ends at byte {seen}"),
            },
            FaultKind::Misaligned => write!(f, "byte {seen} is not a multiple of {expected}"),
            FaultKind::LengthMismatch => write!(f, "the two have {expected} and {seen} bytes"),
            FaultKind::BadWidth => write!(f, "{seen} bits were given, and there are 1 to {expected}"),
            FaultKind::UnknownSignal => requested(f, "signals", expected),
            FaultKind::UnknownCounter => requested(f, "counters", expected),
            FaultKind::UnknownContext => requested(f, "contexts", expected),
            FaultKind::UnknownBarrier => requested(f, "world_barriers`, `rail_barriers` or `lsa_barriers", expected),
            FaultKind::UnknownRank if expected == 0 => write!(f, "{seen} was given, and the team has fewer ranks"),
            FaultKind::UnknownRank => write!(f, "{seen} was given, and the team has {expected} ranks"),
            FaultKind::NotReachable => f.write_str("it is outside the LSA team; use the network, or widen the team"),
            FaultKind::PeerLost => match seen {
                1 => f.write_str("its connection was closed"),
                2 => write!(f, "it was silent for {expected} ms"),
                _ => f.write_str("its connection failed"),
            },
            FaultKind::Reported => write!(f, "the kernel's code is {seen}"),
            FaultKind::BarrierBroken if expected == seen => f.write_str("it ended with a fault before"),
            FaultKind::BarrierBroken => write!(
                f,
                "two sessions used it at the same time: this one expected round {expected} and found round {seen}; give \
                 each stream a barrier of its own"
            ),
            FaultKind::Elsewhere => match self.kind_elsewhere() {
                Some(kind) => write!(f, "{kind}"),
                None => Ok(()),
            },
            _ => write!(f, "expected {expected}, saw {seen}"),
        }
    }

    fn write_timeout(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (expected, seen) = (self.expected(), self.seen());
        match (self.operation(), self.subject()) {
            (Operation::WaitSignal | Operation::WaitCounter, _) => {
                write!(f, "it is {seen} and should have reached {expected}")
            }
            (Operation::Barrier, FaultSubject::None) if expected == 0 => {
                f.write_str("a phase of an mbarrier was not complete")
            }
            (Operation::Barrier, FaultSubject::None) => write!(f, "{seen} of {expected} blocks arrived"),
            (Operation::Barrier, _) => write!(f, "its count of arrivals is {seen} and should have reached {expected}"),
            (Operation::Flush, _) => write!(f, "not all operations up to number {expected} were complete"),
            (Operation::Quiet, _) => f.write_str("not all earlier puts had arrived"),
            (Operation::Send, _) => {
                write!(f, "message {expected} found no room, after the receiver gave back the slots of {seen}")
            }
            (Operation::Receive, _) => {
                write!(f, "message {expected} did not arrive: its slot holds message {seen} (both modulo 2^32)")
            }
            _ => f.write_str("the queue of the context had no room"),
        }
    }
}

/// Writes the requested number of signals, counters and so on, by the name of the field.
fn requested(f: &mut fmt::Formatter<'_>, field: &str, count: u64) -> fmt::Result {
    match count {
        0 => write!(f, "`Requirements` have no `{field}`"),
        1 => write!(f, "`Requirements` have 1 of `{field}`, with number 0"),
        _ => write!(f, "`Requirements` have {count} of `{field}`, with numbers 0 to {}", count - 1),
    }
}

/// Names the operation, what it concerns, what was found and expected, and the place of the call if it is known.
impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {}{}", self.kind(), self.call(), self.detail())
    }
}

impl core::error::Error for Fault {}

/// Writes nothing for [`FaultSubject::None`]; begins with a comma otherwise.
impl fmt::Display for FaultSubject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => Ok(()),
            Self::Signal(id) => write!(f, ", signal {id}"),
            Self::Counter(id) => write!(f, ", counter {id}"),
            Self::Barrier(index) => write!(f, ", barrier {index}"),
            Self::Window { id, offset } => write!(f, ", window {id} at byte {offset}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    extern crate alloc;

    #[test]
    fn a_fault_without_values_names_none() {
        for (kind, operation, text) in [
            (FaultKind::Timeout, Operation::WaitSignal, "deadline passed in wait_signal, context 0"),
            (FaultKind::Timeout, Operation::WaitCounter, "deadline passed in wait_counter, context 0"),
            (FaultKind::Timeout, Operation::Flush, "deadline passed in flush, context 0"),
            (FaultKind::UnknownSignal, Operation::Put, "no such signal in put, context 0"),
            (FaultKind::UnknownCounter, Operation::Put, "no such counter in put, context 0"),
            (FaultKind::UnknownRank, Operation::Put, "no such rank in put, context 0"),
            (FaultKind::OutOfRange, Operation::Put, "range reaches past the end of the window in put, context 0"),
        ] {
            assert_eq!(Fault::new(kind, operation).with_context(0).to_string(), text);
        }
    }

    #[test]
    fn a_broken_barrier_says_what_broke_it() {
        let fault = Fault::new(FaultKind::BarrierBroken, Operation::Barrier).with_context(0).with_peer(1);
        let text = "barrier is broken in barrier, context 0, rank 1: it ended with a fault before";
        assert_eq!(fault.to_string(), text);
        let text = "barrier is broken in barrier, context 0, rank 1, barrier 0: two sessions used it at the same time: this \
                    one expected round 0 and found round 1; give each stream a barrier of its own";
        assert_eq!(fault.with_values(FaultSubject::Barrier(0), 0, 1).to_string(), text);
        let text = "barrier is broken in barrier, context 0, rank 1, barrier 0: it ended with a fault before";
        assert_eq!(fault.with_values(FaultSubject::Barrier(0), 3, 3).to_string(), text);
    }
}
