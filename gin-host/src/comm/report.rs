// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reports of faults, for people.

use super::state::Active;
use super::{Communicator, Notice, Routes};
use gin_abi::{BackendKind, Fault, FaultSubject, Operation};
use gin_boot::on_host;
use std::fmt;

/// The fault that ended a communicator, with the rank and host that found it, the peer and back end that it concerns,
/// and its cause.
///
/// ```
/// use gin_host::comm::{CommError, FaultReport, Requirements};
/// use gin_host::world::{WorldConfig, launch};
///
/// let reports = launch(WorldConfig::seeded(1, 7), |rank| -> Result<Option<FaultReport>, CommError> {
///     let comm = rank.communicator(&Requirements::default())?;
///     comm.abort()?;
///     let report = comm.fault_report();
///     comm.destroy()?;
///     Ok(report)
/// });
/// let report = reports.unwrap().remove(0).unwrap();
/// assert!(report.to_string().starts_with("communicator was aborted"), "{report}");
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct FaultReport {
    /// The world rank that found the fault, or called abort.
    pub rank: u32,
    /// The name of that rank's host.
    pub host: String,
    /// The fault of that rank.
    pub fault: Fault,
    /// The name of the peer's host, if the fault names a peer.
    pub peer_host: Option<String>,
    /// The name of the window that the fault concerns, if this rank gave it one.
    pub window: Option<String>,
    /// The back end with its network or NIC, and whether loads and stores reach the peer too.
    pub back_end: String,
    /// The known cause, in words: the reason of the network, or how a rank was lost.
    pub cause: Option<String>,
}

impl fmt::Display for FaultReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, host, fault, peer_host, window, back_end, cause } = self;
        match (peer_host, cause) {
            (Some(peer), Some(cause)) if cause.starts_with("is lost") => {
                let lost = format!("rank {}{} {cause}", fault.peer(), on_host(peer));
                return write!(f, "{lost} (reported by rank {rank}{}; {back_end})", on_host(host));
            }
            _ => write!(f, "{}", fault.kind())?,
        }
        if fault.operation() != Operation::None {
            write!(f, " in {}", fault.operation())?;
        }
        if fault.context() != gin_abi::fault::NONE {
            write!(f, ", context {}", fault.context())?;
        }
        if let Some(peer) = peer_host {
            write!(f, ", rank {}{}", fault.peer(), on_host(peer))?;
        }
        match (fault.subject(), window) {
            (FaultSubject::Window { id, offset }, Some(name)) => {
                write!(f, ", window {id} (`{name}`) at byte {offset}")?
            }
            (subject, _) => write!(f, "{subject}")?,
        }
        match (cause, fault.place()) {
            (Some(cause), Some(place)) => write!(f, ": {cause}, at {place}")?,
            (Some(cause), None) => write!(f, ": {cause}")?,
            (None, _) => write!(f, "{}", fault.detail())?,
        }
        write!(f, " (reported by rank {rank}{}; {back_end})", on_host(host))
    }
}

impl Communicator {
    /// Returns the fault that ended the communicator with hosts, back end and cause, all of which its text names.
    /// `None` if no fault is known.
    ///
    /// A program that only decides by the fault needs no more than [`fault`](Self::fault).
    pub fn fault_report(&self) -> Option<FaultReport> {
        self.shared.fault().map(|notice| self.report(notice))
    }

    /// Returns a report with everything known about a fault.
    pub(super) fn report(&self, Notice { rank, fault }: Notice) -> FaultReport {
        let concerned = (fault.peer() < self.ranks()).then_some(fault.peer());
        let active = self.shared.active.get();
        let back_end = active.map_or("no back end".to_owned(), |active| {
            let Active { backend, network, lsa_size, .. } = active;
            let near = |peer| self.config.routes == Routes::Automatic && peer / lsa_size == self.rank() / lsa_size;
            let lsa = if *lsa_size > 1 && concerned.is_none_or(near) { ", loads and stores" } else { "" };
            match backend {
                BackendKind::Gdaki => format!("back end GDAKI over {network}{lsa}"),
                _ => format!("back end proxy over {network}{lsa}"),
            }
        });
        let cause = active.and_then(|active| active.board.cause(rank)).map(str::to_owned);
        FaultReport {
            rank,
            host: self.bootstrap.host(rank),
            fault,
            window: match fault.subject() {
                FaultSubject::Window { id, .. } => self.shared.names.get(id),
                _ => None,
            },
            peer_host: concerned.map(|peer| self.bootstrap.host(peer)),
            back_end,
            cause,
        }
    }
}
