// SPDX-License-Identifier: MIT OR Apache-2.0
//! The state of a communicator, and the part of it that outlives its calls.

use super::print::Printer;
use super::resources::Resources;
use super::window::Names;
use crate::proxy::progress::ManualProgress;
use gin_abi::{BackendKind, Fault, FaultKind, Operation};
use gin_boot::board::{Board, Notice};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock, Weak};

/// A communicator's place in its life cycle.
///
/// ```
/// use gin_host::comm::CommState;
///
/// assert_eq!(CommState::Uninitialised.to_string(), "not initialised");
/// ```
#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, derive_more::Display)]
#[display(rename_all = "lowercase")]
pub enum CommState {
    /// Created, but not initialised.
    #[display("not initialised")]
    Uninitialised = 0,
    /// Inside `initialise`.
    #[display("being initialised")]
    Initialising = 1,
    /// In use.
    Active = 2,
    /// Aborted by this rank or another one, or ended by a fault. It can only be destroyed.
    Aborted = 3,
    /// Destroyed: it holds no resources.
    Destroyed = 4,
}

impl CommState {
    const ALL: [Self; 5] = [Self::Uninitialised, Self::Initialising, Self::Active, Self::Aborted, Self::Destroyed];
}

/// The part of a communicator that outlives its calls. It suffices to abort the communicator and to query faults.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) rank: u32,
    state: AtomicU8,
    /// The names of windows, by id.
    pub(super) names: Arc<Names>,
    /// Set when the communicator becomes active.
    pub(super) active: OnceLock<Active>,
}

/// The parts of an active communicator that concern faults.
#[derive(Debug)]
pub(super) struct Active {
    pub(super) board: Arc<Board>,
    /// The owner of the status words that this rank's kernels report faults to.
    pub(super) resources: Weak<Resources>,
    /// The lines of this rank's kernels, in the memory of `resources`.
    pub(super) printer: Option<Arc<Printer>>,
    pub(super) backend: BackendKind,
    /// The network of its proxy, or the kind of NIC that its kernels drive.
    pub(super) network: &'static str,
    /// Ranks of an LSA team.
    pub(super) lsa_size: u32,
    /// `Some` if the program steps the proxy.
    pub(super) caller: Option<ManualProgress>,
}

impl Shared {
    pub(super) fn new(rank: u32) -> Arc<Self> {
        let state = AtomicU8::new(CommState::Uninitialised as u8);
        Arc::new(Self { rank, state, names: Arc::default(), active: OnceLock::new() })
    }

    pub(super) fn state(&self) -> CommState {
        let state = CommState::ALL[usize::from(self.state.load(Ordering::Acquire))];
        if state == CommState::Active && self.fault().is_some() { CommState::Aborted } else { state }
    }

    pub(super) fn set(&self, state: CommState) {
        self.state.store(state as u8, Ordering::Release);
    }

    pub(super) fn fault(&self) -> Option<Notice> {
        let Active { board, resources, .. } = self.active.get()?;
        if board.count() == 0
            && let Some(resources) = resources.upgrade()
            && let Some(fault) = resources.status().reported()
        {
            // The proxy finds this fault too. A caller that asks after its kernel has ended need not wait for that.
            return Some(board.post_and_look(self.rank, fault));
        }
        board.first()
    }

    /// Prints the lines of kernels that have ended.
    pub(super) fn print_lines(&self) {
        if let Some(Active { printer: Some(printer), resources, .. }) = self.active.get()
            && let Some(resources) = resources.upgrade()
        {
            printer.finish(|| resources.dropped_lines().ok());
        }
    }

    /// Ends the communicator on all ranks, with the cause in words for people, if it is known.
    pub(super) fn abort(&self, cause: &str) {
        if let Some(active) = self.active.get() {
            active.board.post_because(self.rank, Fault::new(FaultKind::Aborted, Operation::None), cause);
            // Nobody else may tell this rank's kernels.
            active.caller.as_ref().map(ManualProgress::step);
        }
    }
}

/// Aborts a communicator from any thread.
#[derive(Clone, Debug)]
pub struct AbortHandle(pub(super) Arc<Shared>);

impl AbortHandle {
    /// Ends every wait of the communicator on every rank. A rank notices when its proxy next looks, within the proxy's
    /// sleep (50 us). Has no effect on a communicator that is not active.
    pub fn abort(&self) {
        self.0.abort("");
    }

    /// Returns the rank whose fault or abort ended the communicator.
    pub(crate) fn ended_by(&self) -> Option<u32> {
        self.0.fault().map(|notice| notice.rank)
    }
}
