// SPDX-License-Identifier: MIT OR Apache-2.0
//! The proxy's check of every request. Kernels check too, but an invalid or late request must not reach the network.

use gin_abi::{Descriptor, Fault, FaultKind, FaultSubject, Operation, SignalTarget, Transfer};
use gin_gpu::Memory;
use gin_net::Capabilities;
use std::sync::Arc;

/// A registered window, as the proxy knows it.
#[derive(Clone, Debug)]
pub(crate) struct WindowInfo {
    /// The length in bytes of each part, by world rank.
    pub(crate) lengths: Vec<u64>,
    /// Peers may raise signals at words of the window.
    pub(crate) signals: bool,
    /// The words of this rank's part that CPU threads raise.
    pub(crate) plane: Option<Arc<Memory>>,
}

/// The limits that requests are checked against.
#[derive(Debug)]
pub(crate) struct Limits {
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    /// The number of signals of a context, including those of barriers.
    pub(crate) signals: u32,
    pub(crate) counters: u32,
    pub(crate) capabilities: Capabilities,
    pub(crate) windows: Vec<Option<WindowInfo>>,
}

/// Returns the operation of a request.
pub(crate) fn operation(request: &Descriptor) -> Operation {
    match request.transfer {
        Transfer::Put { .. } => Operation::Put,
        Transfer::PutValue { .. } => Operation::PutValue,
        Transfer::Get { .. } => Operation::Get,
        Transfer::Nothing if request.is_quiet() => Operation::Quiet,
        Transfer::Nothing => Operation::Signal,
    }
}

impl Limits {
    /// Checks a request of context `context`.
    ///
    /// # Errors
    /// The fault of the first violation, with the expected and seen values.
    pub(crate) fn check(&self, context: u32, request: &Descriptor) -> Result<(), Fault> {
        let fault = |kind, subject, expected, seen| {
            let fault = Fault::new(kind, operation(request)).with_context(context).with_peer(request.peer);
            fault.with_values(subject, expected, seen)
        };
        let at = |window, offset| FaultSubject::Window { id: window, offset };
        if request.peer >= self.ranks {
            return Err(fault(
                FaultKind::UnknownRank,
                FaultSubject::None,
                u64::from(self.ranks),
                u64::from(request.peer),
            ));
        }
        let range = |window: u32, rank: u32, offset: u64, bytes: u64| {
            let subject = at(window, offset);
            let Some(info) = self.windows.get(window as usize).and_then(Option::as_ref) else {
                return Err(fault(FaultKind::UnknownWindow, subject, 0, u64::from(window)));
            };
            let length = info.lengths[rank as usize];
            // Neither term has more than 63 bits.
            let end = offset.saturating_add(bytes);
            if end > length {
                return Err(fault(FaultKind::OutOfRange, subject, length, end));
            }
            Ok(info)
        };
        match request.transfer {
            Transfer::Put { source, destination, bytes } => {
                range(source.window, self.rank, source.offset, bytes)?;
                range(destination.window, request.peer, destination.offset, bytes)?;
            }
            Transfer::Get { source, destination, bytes } => {
                range(source.window, request.peer, source.offset, bytes)?;
                range(destination.window, self.rank, destination.offset, bytes)?;
            }
            Transfer::PutValue { width_log2, destination, .. } => {
                let width = 1u64 << width_log2;
                if !destination.offset.is_multiple_of(width) {
                    return Err(fault(
                        FaultKind::Misaligned,
                        at(destination.window, destination.offset),
                        width,
                        destination.offset,
                    ));
                }
                range(destination.window, request.peer, destination.offset, width)?;
            }
            Transfer::Nothing => {}
        }
        if let Some(signal) = request.signal {
            if signal.strong && !self.capabilities.strong_signals {
                return Err(fault(FaultKind::NoStrongSignals, FaultSubject::None, 0, 0));
            }
            match signal.target {
                SignalTarget::Id(id) => {
                    if id >= self.signals {
                        return Err(fault(
                            FaultKind::UnknownSignal,
                            FaultSubject::Signal(id),
                            u64::from(self.signals),
                            u64::from(id),
                        ));
                    }
                }
                SignalTarget::Address { window, offset } => {
                    let info = range(window, request.peer, offset, 8)?;
                    if !self.capabilities.va_signals || !info.signals {
                        return Err(fault(FaultKind::NoVaSignals, at(window, offset), 0, u64::from(window)));
                    }
                    if !offset.is_multiple_of(8) {
                        return Err(fault(FaultKind::Misaligned, at(window, offset), 8, offset));
                    }
                }
            }
        }
        if let Some(counter) = request.counter
            && counter >= self.counters
        {
            return Err(fault(
                FaultKind::UnknownCounter,
                FaultSubject::Counter(counter),
                u64::from(self.counters),
                u64::from(counter),
            ));
        }
        Ok(())
    }
}
