// SPDX-License-Identifier: MIT OR Apache-2.0
//! Networks: they move bytes between windows of ranks and raise signals, behind one trait.
//!
//! A [`Network`] is the endpoint of one rank. The proxy posts [`Request`]s in batches and polls [`Event`]s. A network
//! describes its features as data ([`Capabilities`]). Networks do not know the layout of a kernel's request, and the
//! proxy does not know queue pairs.
//!
//! | module | holds |
//! | --- | --- |
//! | [`peer`] | copies between windows that this process can reach |
//! | [`verbs`] | any RDMA NIC, through libibverbs |
//! | [`fabric`] | any network that libfabric has a provider for, such as TCP |
//! | [`staged`] | staging through host memory, for memory that another network does not reach |
//! | [`worst`] | the worst network that the guarantees allow, for tests of kernels on virtual GPUs |
//!
//! # Guarantees
//! - A request is complete once its source may be reused and, for a get, its data has arrived. Completions are in any
//!   order.
//! - The signal of a request is raised after its own put has arrived. A strong signal is also raised after all earlier
//!   puts and signals of the same context to the same peer, in the order of [`Network::post`]. Nothing else is ordered.
//! - With [`needs_make_visible`](Capabilities::needs_make_visible), "has arrived" means that a later call of
//!   [`Network::make_visible`] at the receiver makes the data visible to the receiver's GPU.
//! - A [quiet](Request::is_quiet) covers the puts of its context to its peer that completed before it was posted. It is
//!   complete once their data is visible to the receiver's GPU. It needs no call at the receiver but [`Network::poll`].
//!   Where [completion is arrival](Capabilities::completes_on_arrival), nobody posts it.
//! - A failed request raises no signal and completes with an error. Then all later requests of the same context and
//!   peer with a strong signal fail too, so that no signal covers data that did not arrive.
#![warn(unreachable_pub)]

/// Implements the calls of [`Network`](crate::Network) that a wrapper passes on unchanged.
#[doc(hidden)]
#[macro_export]
macro_rules! pass_on {
    () => {
        $crate::pass_on!(but make_visible);

        fn make_visible(&mut self) -> Result<(), $crate::NetError> {
            self.inner.make_visible()
        }
    };
    (but make_visible) => {
        fn register_signals(&mut self, signals: &$crate::LocalSignals) -> Result<$crate::Key, $crate::NetError> {
            self.inner.register_signals(signals)
        }

        fn connect_signals(&mut self, keys: &[$crate::Key]) -> Result<(), $crate::NetError> {
            self.inner.connect_signals(keys)
        }

        fn register(&mut self, window: &$crate::LocalWindow) -> Result<$crate::Key, $crate::NetError> {
            self.inner.register(window)
        }

        fn fetch(&self) -> Option<$crate::Fetch> {
            self.inner.fetch()
        }

        fn connect(&mut self, window: u32, keys: &[$crate::Key]) -> Result<(), $crate::NetError> {
            self.inner.connect(window, keys)
        }

        fn deregister(&mut self, window: u32) -> bool {
            self.inner.deregister(window)
        }

        fn carries_notices(&self) -> bool {
            self.inner.carries_notices()
        }
    };
}

pub mod fabric;
mod hosts;
mod message;
#[doc(hidden)]
pub mod nothing;
pub mod peer;
pub mod staged;
pub mod verbs;
mod windows;
pub mod worst;

pub use gin_gpu::registry::{Key, KeyError};
pub use hosts::{BetweenHosts, between_hosts};

use gin_abi::{Fault, FaultKind, RemoteSignal, SignalTarget, Transfer};
use gin_gpu::{Device, Memory, MemorySlice};
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// The engine that adds to a signal's word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Raises {
    /// The sender's CPU, at the receiver's word in host memory.
    Sender,
    /// The receiver's proxy, when it gets a [`SignalArrival`].
    Receiver,
    /// A NIC of the receiver, at words in its device's memory ([`LocalSignals::nic`]), or its proxy as above. Each rank
    /// chooses and tells the others.
    Nic,
}

/// The features of a network.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capabilities {
    /// The name, for people.
    pub name: &'static str,
    /// The network has strong signals.
    pub strong_signals: bool,
    /// The network has signals at window addresses.
    pub va_signals: bool,
    /// The maximum number of bytes of one request. The proxy splits longer ones.
    pub max_message: u64,
    /// A completed put has arrived at its peer, so that a later request finds it there.
    pub completion_is_arrival: bool,
    /// The engine that adds to a signal's word.
    pub raises: Raises,
    /// The receiver's GPU sees payload only after [`Network::make_visible`].
    pub needs_make_visible: bool,
    /// Senders hand small values to waiting kernels of the receiver, by the mailbox of [`LocalSignals`].
    pub mailbox: bool,
}

impl Capabilities {
    /// Returns whether the receiver's GPU sees the data of a put once the put is complete.
    pub fn completes_on_arrival(&self) -> bool {
        self.completion_is_arrival && !self.needs_make_visible
    }
}

/// A request to move bytes, raise a signal, or both.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// The id that its completion names. Unique among unfinished requests.
    pub id: u64,
    /// The context, for ordering and for the table of signals.
    pub context: u32,
    /// The world rank of the peer.
    pub peer: u32,
    /// The bytes to move.
    pub transfer: Transfer,
    /// The signal to raise at the peer afterwards.
    pub signal: Option<RemoteSignal>,
    /// A message for the peer's endpoint afterwards, instead of a signal. Only for networks that
    /// [carry](Network::carries_notices) notices.
    pub notice: Option<Notice>,
    /// More requests follow soon.
    pub more: bool,
}

impl Request {
    /// Returns whether the request is a quiet: it moves nothing, raises nothing and carries no notice.
    pub fn is_quiet(&self) -> bool {
        self.transfer == Transfer::Nothing && self.signal.is_none() && self.notice.is_none()
    }

    /// Returns whether the request is ordered after all earlier puts, signals and notices of its context and peer.
    pub fn is_strong(&self) -> bool {
        self.notice.is_some() || self.signal.is_some_and(|signal| signal.strong)
    }
}

/// A message between endpoints, ordered as strong signals: see [`staged`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Notice {
    /// Bytes of a window have arrived in host memory.
    Arrived {
        /// The window.
        window: u32,
        /// Their offset in the window.
        offset: u64,
        /// Their number.
        bytes: u64,
        /// The tag of the answer.
        tag: u64,
    },
    /// The sender wants to read bytes of a window from host memory.
    Wanted {
        /// The window.
        window: u32,
        /// Their offset in the window.
        offset: u64,
        /// Their number.
        bytes: u64,
        /// The tag of the answer.
        tag: u64,
    },
    /// The answer: the bytes are in the window, or the requested bytes are in host memory, or the window has no such
    /// bytes.
    Ready {
        /// The tag of the message that it answers.
        tag: u64,
        /// False if the window has no such bytes.
        found: bool,
    },
    /// No content. Its completion tells a sender that waits for an answer that the peer's NIC is alive.
    Alive,
}

/// A notice that has arrived at the endpoint of a rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoticeArrival {
    /// The context.
    pub context: u32,
    /// The world rank of the sender.
    pub from: u32,
    /// The message.
    pub notice: Notice,
}

/// A signal that has arrived and that the receiver's proxy raises.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SignalArrival {
    /// The context.
    pub context: u32,
    /// The world rank of the sender.
    pub from: u32,
    /// The word.
    pub target: SignalTarget,
    /// The number to add.
    pub amount: u64,
}

/// An event of a network.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// A request is complete.
    Completion {
        /// The request.
        id: u64,
        /// The result.
        outcome: Result<(), NetError>,
    },
    /// A signal for this rank has arrived. Never with [`Raises::Sender`].
    Signal(SignalArrival),
    /// A notice for this endpoint has arrived. A proxy ignores it.
    Notice(NoticeArrival),
}

/// The failure of a network.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NetError {
    /// The peer is lost.
    #[error("rank {peer} is lost: {reason}")]
    PeerLost {
        /// The peer.
        peer: u32,
        /// The reason of the network.
        reason: String,
    },
    /// The window is not registered at that rank.
    #[error("window {window} is not registered on rank {rank}")]
    UnknownWindow {
        /// The window.
        window: u32,
        /// The rank.
        rank: u32,
    },
    /// The range ends past the part of the window that the rank registered.
    #[error("range ending at {end} is past the {length} bytes of window {window} on rank {rank}")]
    OutOfRange {
        /// The window.
        window: u32,
        /// The rank.
        rank: u32,
        /// The first byte past the range.
        end: u64,
        /// The length of the part in bytes.
        length: u64,
    },
    /// The rank does not have the signal.
    #[error("rank {rank} does not have {}", show(signal))]
    UnknownSignal {
        /// The rank.
        rank: u32,
        /// The signal.
        signal: SignalTarget,
    },
    /// This network cannot use the key of another rank.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// An operation of this rank's own part of the network failed.
    #[error("{what} failed: {reason}")]
    Local {
        /// The operation that failed.
        what: &'static str,
        /// The reason.
        reason: String,
    },
    /// A request failed.
    #[error("{context} with rank {peer} failed, status {status}")]
    Failed {
        /// The operation that failed.
        context: &'static str,
        /// The peer.
        peer: u32,
        /// The network's number of the error.
        status: u64,
    },
}

gin_abi::debug_as_display!(NetError, verbs::NoRdmaDevice, verbs::WrongVariable);

/// Returns a signal in words.
fn show(signal: &SignalTarget) -> String {
    match signal {
        SignalTarget::Id(id) => format!("signal {id}"),
        SignalTarget::Address { window, offset } => format!("a signal at offset {offset} of window {window}"),
    }
}

impl NetError {
    /// Returns `fault` with the kind and the values that kernels see.
    pub fn apply(&self, fault: Fault) -> Fault {
        let (kind, expected, seen) = match *self {
            Self::PeerLost { .. } => (FaultKind::PeerLost, 0, 0),
            Self::UnknownWindow { window, .. } => (FaultKind::UnknownWindow, 0, u64::from(window)),
            Self::OutOfRange { end, length, .. } => (FaultKind::OutOfRange, length, end),
            Self::UnknownSignal { .. } => (FaultKind::UnknownSignal, 0, 0),
            Self::Key(_) | Self::Local { .. } => (FaultKind::Network, 0, 0),
            Self::Failed { status, .. } => (FaultKind::Network, 0, status),
        };
        fault.with_kind(kind).with_values(fault.subject(), expected, seen)
    }

    /// Checks that `bytes` bytes at `offset` are in the `length` bytes that `rank` has in a window.
    pub(crate) fn check_range(window: u32, rank: u32, offset: u64, bytes: u64, length: u64) -> Result<(), Self> {
        let end = offset.saturating_add(bytes);
        if end > length { Err(Self::OutOfRange { window, rank, end, length }) } else { Ok(()) }
    }

    /// Returns the error of a request that follows a failed one.
    #[doc(hidden)]
    pub fn behind(peer: u32) -> Self {
        Self::Failed { context: "request behind a failed one", peer, status: 0 }
    }
}

/// A window of this rank, for registration with a network.
#[derive(Clone, Debug)]
pub struct LocalWindow {
    /// The id.
    pub id: u32,
    /// The memory.
    pub memory: MemorySlice,
    /// The words that CPU threads raise, one for each 8 bytes, in pinned memory; `None` for a window without signals.
    pub plane: Option<Arc<Memory>>,
    /// A NIC may raise signals at the window's own words.
    pub nic: bool,
}

/// The signal words of this rank that CPU threads raise, in pinned memory: `per_context` words for each context, one
/// context after the other.
#[derive(Clone, Debug)]
pub struct LocalSignals {
    /// The words.
    pub memory: Arc<Memory>,
    /// As many words in the device's memory, of which one NIC raises those of a context. Only with [`Raises::Nic`].
    pub nic: Option<Arc<Memory>>,
    /// The number of contexts.
    pub contexts: u32,
    /// The words of one context.
    pub per_context: u32,
    /// The offset in `memory` of the words of this rank's mailbox, if it has one
    /// (`gin_device::internal::mailbox`).
    pub mailbox: Option<u64>,
}

/// Fetches the data that [`Network::connect`] needs for a rank's key, on a thread that may wait: see
/// [`Network::fetch`].
///
/// # Errors
/// [`NetError::Key`].
pub type Fetch = fn(rank: u32, key: &Key, device: &Arc<dyn Device>) -> Result<Arc<dyn Any + Send + Sync>, NetError>;

/// The endpoint of one rank in a network. The [crate docs](self) list the guarantees.
///
/// No method waits for a peer. One thread at a time calls the methods.
#[auto_impl::auto_impl(Box)]
pub trait Network: Send + fmt::Debug {
    /// Returns the features, which never change.
    fn capabilities(&self) -> Capabilities;

    /// Registers the signal words of this rank. Returns the key for all ranks.
    ///
    /// # Errors
    /// An error of the network.
    fn register_signals(&mut self, signals: &LocalSignals) -> Result<Key, NetError>;

    /// Takes the keys of all ranks' signal words, by world rank.
    ///
    /// # Errors
    /// [`NetError::Key`].
    fn connect_signals(&mut self, keys: &[Key]) -> Result<(), NetError>;

    /// Registers a window of this rank. Returns the key for all ranks.
    ///
    /// # Errors
    /// An error of the network.
    fn register(&mut self, window: &LocalWindow) -> Result<Key, NetError>;

    /// Returns a function that fetches the data that [`connect`](Self::connect) needs for each rank's key, if that
    /// needs an answer of the peer, which may take seconds. The caller keeps the results until `connect` has returned.
    fn fetch(&self) -> Option<Fetch> {
        None
    }

    /// Takes the keys of all ranks for a window, by world rank.
    ///
    /// # Errors
    /// [`NetError::Key`].
    fn connect(&mut self, window: u32, keys: &[Key]) -> Result<(), NetError>;

    /// Refuses the window from now on, in both directions, also if it was never connected. Returns true once this
    /// network no longer accesses the window's memory; the caller repeats the call until then.
    fn deregister(&mut self, window: u32) -> bool;

    /// Accepts requests in order, as many as there is room for. Returns the number of accepted requests.
    fn post(&mut self, requests: &[Request]) -> usize;

    /// Makes progress, and appends the events since the last call.
    fn poll(&mut self, events: &mut Vec<Event>);

    /// Makes the data that has arrived so far visible to this rank's GPU.
    ///
    /// # Errors
    /// An error of the network.
    fn make_visible(&mut self) -> Result<(), NetError> {
        Ok(())
    }

    /// Returns a description of the path and of the engine that raises signals, for people.
    fn describe(&self) -> String {
        self.capabilities().name.to_owned()
    }

    /// Returns whether requests can carry a [`Notice`]. Networks that do not carry notices refuse such requests.
    fn carries_notices(&self) -> bool {
        false
    }

    /// Returns whether posted requests still have effects to come, at this rank or at a peer, even if they are
    /// complete.
    fn is_quiet(&self) -> bool {
        true
    }
}

/// The properties of a rank from which a [`NetworkFactory`] makes the rank's network.
///
/// ```
/// use gin_net::{Endpoint, Network, peer::PeerNetwork};
///
/// let endpoint = Endpoint { rank: 0, ranks: 2, seed: 7, gpu: None };
/// assert!(PeerNetwork::new(&endpoint).capabilities().strong_signals);
/// ```
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// The world rank.
    pub rank: u32,
    /// The number of ranks.
    pub ranks: u32,
    /// The seed for networks that make random choices.
    pub seed: u64,
    /// The address of the rank's GPU on the PCI bus, such as `0000:18:00.0`, if the GPU has one.
    pub gpu: Option<String>,
}

/// Makes the network of a rank.
pub type NetworkFactory = Arc<dyn Fn(&Endpoint) -> Box<dyn Network> + Send + Sync>;
