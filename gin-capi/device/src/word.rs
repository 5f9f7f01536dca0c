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

/// On a CPU a fault has more than a word holds: what it concerns and its values are lost between the call and
/// `gin_report`.
#[cfg(not(target_arch = "nvptx64"))]
mod form {
    use gin_abi::{FaultKind, Operation};
    use gin_device::Fault;

    const NO_CONTEXT: u64 = (1 << 9) - 1;
    const NO_PEER: u64 = (1 << 25) - 1;

    pub(crate) fn word(fault: Fault) -> u64 {
        let context = u64::from(fault.context()).min(NO_CONTEXT);
        let peer = u64::from(fault.peer()).min(NO_PEER);
        fault.kind() as u64 | (fault.operation() as u64) << 6 | context << 10 | peer << 19
    }

    pub(crate) fn fault(word: u64) -> Fault {
        let kind = FaultKind::from_code((word & 63) as u32).unwrap_or(FaultKind::AbiMismatch);
        let operation = Operation::from_code((word >> 6 & 15) as u32).unwrap_or(Operation::None);
        let fault = Fault::new(kind, operation);
        let fault = match word >> 10 & NO_CONTEXT {
            NO_CONTEXT => fault,
            context => fault.with_context(context as u32),
        };
        match word >> 19 & NO_PEER {
            NO_PEER => fault,
            peer => fault.with_peer(peer as u32),
        }
    }
}

pub(crate) use form::{fault, word};
