// SPDX-License-Identifier: MIT OR Apache-2.0
//! Faults in one word.

use gin_device::Fault;

/// Returns the word of a fault; 0 if there is none.
#[inline(always)]
pub(crate) fn of(outcome: Result<(), Fault>) -> u64 {
    match outcome {
        Ok(()) => 0,
        Err(fault) => word(fault),
    }
}

#[cfg(target_arch = "nvptx64")]
mod form {
    use gin_device::Fault;
    use gin_device::internal::fault::{pass, passed};

    #[inline(always)]
    pub(crate) fn word(fault: Fault) -> u64 {
        pass(fault)[0]
    }

    #[inline(always)]
    pub(crate) fn fault(word: u64) -> Fault {
        passed([word])
    }
}

/// On a CPU a fault is larger than a word. The word has the ticket of its values, as on a GPU.
#[cfg(not(target_arch = "nvptx64"))]
mod form {
    extern crate std;

    use gin_abi::{FaultKind, Operation};
    use gin_device::Fault;
    use std::sync::{Mutex, PoisonError};

    const NO_CONTEXT: u64 = (1 << 9) - 1;
    const NO_PEER: u64 = (1 << 25) - 1;
    /// Lowest bit of the ticket, which the bits above it hold. 0 stands for no values.
    const TICKET: u32 = 44;
    /// Number of faults whose values are kept, as on a GPU.
    const SLOTS: usize = 4096;

    /// The values of the last faults. Code of kernels holds the lock, and reaches no point there at which a scheduler
    /// could switch.
    struct Log {
        last: u64,
        /// The ticket of a fault and its values, at the place of the ticket.
        slots: [(u64, [u64; 4]); SLOTS],
    }

    static LOG: Mutex<Log> = Mutex::new(Log { last: 0, slots: [(0, [0; 4]); SLOTS] });

    fn store(values: [u64; 4]) -> u64 {
        let mut log = LOG.lock().unwrap_or_else(PoisonError::into_inner);
        log.last = (log.last % (u64::MAX >> TICKET)) + 1;
        let ticket = log.last;
        log.slots[ticket as usize % SLOTS] = (ticket, values);
        ticket
    }

    fn load(ticket: u64) -> Option<[u64; 4]> {
        let log = LOG.lock().unwrap_or_else(PoisonError::into_inner);
        let (of, values) = log.slots[ticket as usize % SLOTS];
        (ticket != 0 && of == ticket).then_some(values)
    }

    pub(crate) fn word(fault: Fault) -> u64 {
        let context = u64::from(fault.context()).min(NO_CONTEXT);
        let peer = u64::from(fault.peer()).min(NO_PEER);
        let [_, _, values @ ..] = fault.to_words();
        let ticket = if values == [0; 4] { 0 } else { store(values) };
        fault.kind() as u64 | (fault.operation() as u64) << 6 | context << 10 | peer << 19 | ticket << TICKET
    }

    pub(crate) fn fault(word: u64) -> Fault {
        let kind = FaultKind::from_code((word & 63) as u32).unwrap_or(FaultKind::AbiMismatch);
        let operation = Operation::from_code((word >> 6 & 15) as u32).unwrap_or(Operation::None);
        let fault = Fault::new(kind, operation);
        let fault = match word >> 10 & NO_CONTEXT {
            NO_CONTEXT => fault,
            context => fault.with_context(context as u32),
        };
        let fault = match word >> 19 & NO_PEER {
            NO_PEER => fault,
            peer => fault.with_peer(peer as u32),
        };
        load(word >> TICKET).map_or(fault, |values| fault.with_words(values))
    }
}

pub(crate) use form::{fault, word};
