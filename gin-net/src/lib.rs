// SPDX-License-Identifier: MIT OR Apache-2.0
//! Networks: what moves bytes between windows of ranks and raises their signals, behind one trait.
//!
//! A [`Network`] is the endpoint of one rank. The proxy hands it [`Request`]s in batches and asks it for [`Event`]s;
//! what it can do it says as data ([`Capabilities`]). Nothing here knows how a kernel's request looks in memory, and
//! nothing in the proxy knows of queue pairs.
//!
//! | module | holds |
//! | --- | --- |
//! | [`peer`] | copies between windows that this process can reach |
//! | [`verbs`] | any RDMA NIC, through libibverbs |
//! | [`staged`] | the way through host memory for what another network does not reach |
//!
//! # What a network promises
//! - A request is complete once its source may be reused and, for a get, its data has landed. Completions come in any
//!   order.
//! - The signal of a request is raised after its own put has arrived. A strong one is raised also after every earlier
//!   put and signal of the same context to the same peer, where earlier is the order of [`Network::post`]. Nothing else
//!   is ordered.
//! - Where it says [`needs_make_visible`](Capabilities::needs_make_visible), "has arrived" means that
//!   [`Network::make_visible`], called afterwards at the receiver, puts it in view of the receiver's GPU.
//! - A request that fails raises no signal and is complete with an error. After it, whatever of the same context and
//!   peer brings a strong signal fails too: what did not arrive is never covered.
#![warn(unreachable_pub)]

#[doc(hidden)]
pub mod nothing;
pub mod peer;
pub mod staged;
pub mod verbs;

pub use gin_gpu::registry::Key;

use gin_abi::{Fault, FaultKind, RemoteSignal, SignalTarget, Transfer};
use gin_gpu::registry::KeyError;
use gin_gpu::{Device, Memory, MemorySlice};
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// The engine that adds to a signal's word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Raises {
    /// The sender's CPU, straight at the receiver's word in host memory.
    Sender,
    /// The receiver's proxy, when it gets a [`SignalArrival`].
    Receiver,
    /// A NIC of the receiver, at words in its device's memory ([`LocalSignals::nic`]), or its proxy as above: each rank
    /// tells the others which.
    Nic,
}

/// The features of a network.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capabilities {
    /// Its name, for people.
    pub name: &'static str,
    /// It gives strong signals.
    pub strong_signals: bool,
    /// It gives signals at window addresses.
    pub va_signals: bool,
    /// Most bytes of one request; longer ones are cut by the proxy.
    pub max_message: u64,
    /// A completed put has arrived at its peer, so that a later request finds it there.
    pub completion_is_arrival: bool,
    /// The engine that adds to a signal's word.
    pub raises: Raises,
    /// Payload is in view of the receiver's GPU only after [`Network::make_visible`].
    pub needs_make_visible: bool,
}

/// A request to move bytes, raise a signal, or both.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// The name of its completion; unique among requests under way.
    pub id: u64,
    /// Context, for ordering and for the table of signals.
    pub context: u32,
    /// World rank of the peer.
    pub peer: u32,
    /// The bytes to move.
    pub transfer: Transfer,
    /// The signal to raise at the peer afterwards.
    pub signal: Option<RemoteSignal>,
    /// A message for the peer's endpoint afterwards, in place of a signal; only where the network below
    /// [carries](Network::carries_notices) notices.
    pub notice: Option<Notice>,
    /// More requests follow soon.
    pub more: bool,
}

impl Request {
    /// Returns whether it is ordered behind every earlier put, signal and notice of its context and peer.
    pub fn is_strong(&self) -> bool {
        self.notice.is_some() || self.signal.is_some_and(|signal| signal.strong)
    }
}

/// A message between endpoints, ordered as strong signals are: see [`staged`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Notice {
    /// Bytes of a window have arrived in host memory.
    Arrived {
        /// The window.
        window: u32,
        /// Where they belong in it.
        offset: u64,
        /// How many.
        bytes: u64,
        /// The name of the answer.
        tag: u64,
    },
    /// The sender wants to read bytes of a window from host memory.
    Wanted {
        /// The window.
        window: u32,
        /// Where they are in it.
        offset: u64,
        /// How many.
        bytes: u64,
        /// The name of the answer.
        tag: u64,
    },
    /// The answer: the bytes are in the window, or the requested ones in host memory; or the window has no such bytes.
    Ready {
        /// Which.
        tag: u64,
        /// It is there.
        found: bool,
    },
    /// Nothing: a sender that waits for an answer learns from the completion whether the peer is alive.
    Alive,
}

/// A notice, told to the endpoint of a rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoticeArrival {
    /// Context.
    pub context: u32,
    /// World rank of the sender.
    pub from: u32,
    /// The message.
    pub notice: Notice,
}

/// A signal to raise, told to the receiver's proxy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SignalArrival {
    /// Context.
    pub context: u32,
    /// World rank of the sender.
    pub from: u32,
    /// Which word.
    pub target: SignalTarget,
    /// How much is added.
    pub amount: u64,
}

/// Something that happened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// A request is complete.
    Completion {
        /// The request.
        id: u64,
        /// The result.
        outcome: Result<(), NetError>,
    },
    /// A signal for this rank has arrived; not where [`Raises::Sender`].
    Signal(SignalArrival),
    /// A notice for this endpoint has arrived: nothing for a proxy.
    Notice(NoticeArrival),
}

/// The failure of a network.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetError {
    /// The peer cannot be reached any more.
    #[error("rank {peer} is lost: {reason}")]
    PeerLost {
        /// The peer.
        peer: u32,
        /// The network's reason.
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
    /// A range past the end of what that rank registered.
    #[error("range ending at {end} is past the {length} bytes of window {window} on rank {rank}")]
    OutOfRange {
        /// The window.
        window: u32,
        /// The rank.
        rank: u32,
        /// First byte past the range.
        end: u64,
        /// Registered length.
        length: u64,
    },
    /// A signal that the rank does not have.
    #[error("rank {rank} has no such signal: {signal:?}")]
    UnknownSignal {
        /// The rank.
        rank: u32,
        /// The signal.
        signal: SignalTarget,
    },
    /// A key from another rank that this network cannot use.
    #[error("key of rank {rank} cannot be used: {reason}")]
    Key {
        /// The rank.
        rank: u32,
        /// Why.
        reason: String,
    },
    /// Something of this rank's own part of the network failed.
    #[error("{what} failed: {reason}")]
    Local {
        /// The operation that failed.
        what: &'static str,
        /// Why.
        reason: String,
    },
    /// A request failed.
    #[error("{context} with rank {peer} failed, status {status}")]
    Failed {
        /// The operation that failed.
        context: &'static str,
        /// The peer.
        peer: u32,
        /// The network's number for it.
        status: u64,
    },
}

impl From<KeyError> for NetError {
    fn from(KeyError { rank, reason }: KeyError) -> Self {
        Self::Key { rank, reason }
    }
}

impl NetError {
    /// Returns the fault that kernels see: its kind, and the expected and seen values.
    pub fn fault(&self) -> (FaultKind, u64, u64) {
        match *self {
            Self::PeerLost { .. } => (FaultKind::PeerLost, 0, 0),
            Self::UnknownWindow { window, .. } => (FaultKind::UnknownWindow, 0, u64::from(window)),
            Self::OutOfRange { end, length, .. } => (FaultKind::OutOfRange, length, end),
            Self::UnknownSignal { .. } => (FaultKind::UnknownSignal, 0, 0),
            Self::Key { .. } | Self::Local { .. } => (FaultKind::Network, 0, 0),
            Self::Failed { status, .. } => (FaultKind::Network, 0, status),
        }
    }

    /// Checks that `bytes` bytes at `offset` are in the `length` bytes that `rank` has in a window.
    pub(crate) fn check_range(window: u32, rank: u32, offset: u64, bytes: u64, length: u64) -> Result<(), Self> {
        let end = offset.saturating_add(bytes);
        if end > length { Err(Self::OutOfRange { window, rank, end, length }) } else { Ok(()) }
    }

    /// The failure of a request that comes after one that failed.
    #[doc(hidden)]
    pub fn behind(peer: u32) -> Self {
        Self::Failed { context: "request behind a failed one", peer, status: 0 }
    }

    /// The same, put into a fault.
    pub fn apply(&self, mut fault: Fault) -> Fault {
        (fault.kind, fault.expected, fault.seen) = self.fault();
        fault
    }
}

/// A window of this rank, for registration with a network.
#[derive(Clone, Debug)]
pub struct LocalWindow {
    /// Its id.
    pub id: u32,
    /// Its memory.
    pub memory: MemorySlice,
    /// Words that CPU threads raise for it, one for each 8 bytes, in pinned memory; if it takes signals.
    pub plane: Option<Arc<Memory>>,
    /// If it takes signals, a NIC may raise them at its own words.
    pub nic: bool,
}

/// The signal words of this rank that CPU threads raise: `per_context` for each context, one context after the other,
/// in pinned memory.
#[derive(Clone, Debug)]
pub struct LocalSignals {
    /// The words.
    pub memory: Arc<Memory>,
    /// As many words in the device's memory, which one NIC raises for each context; only where [`Raises::Nic`].
    pub nic: Option<Arc<Memory>>,
    /// Number of contexts.
    pub contexts: u32,
    /// Words of one context.
    pub per_context: u32,
}

/// Gets, on a thread that may wait, what [`Network::connect`] will need of a rank that told this key: see
/// [`Network::fetch`].
///
/// # Errors
/// [`NetError::Key`].
pub type Fetch = fn(rank: u32, key: &Key, device: &Arc<dyn Device>) -> Result<Arc<dyn Any + Send + Sync>, NetError>;

/// The endpoint of one rank in a network. The promises are in the [module's documentation](self).
///
/// No method blocks on a peer. All are called by one thread at a time.
pub trait Network: Send + fmt::Debug {
    /// Returns its features. They stay the same.
    fn capabilities(&self) -> Capabilities;

    /// Registers the signal words of this rank; what it returns goes to all ranks.
    ///
    /// # Errors
    /// An error of the network.
    fn register_signals(&mut self, signals: &LocalSignals) -> Result<Key, NetError>;

    /// Takes the keys of all ranks' signal words, by world rank.
    ///
    /// # Errors
    /// [`NetError::Key`].
    fn connect_signals(&mut self, keys: &[Key]) -> Result<(), NetError>;

    /// Registers a window of this rank; what it returns goes to all ranks.
    ///
    /// # Errors
    /// An error of the network.
    fn register(&mut self, window: &LocalWindow) -> Result<Key, NetError>;

    /// Returns a function that gets what [`connect`](Self::connect) needs of each rank's key, if that needs an answer
    /// of the peer, which may take some seconds. The caller keeps the results until `connect` has returned.
    fn fetch(&self) -> Option<Fetch> {
        None
    }

    /// Takes the keys of all ranks for a window, by world rank.
    ///
    /// # Errors
    /// [`NetError::Key`].
    fn connect(&mut self, window: u32, keys: &[Key]) -> Result<(), NetError>;

    /// Refuses the window from now on, in both directions; also one that was not connected. Returns whether nothing of
    /// this network touches its memory any more; call again until then.
    fn deregister(&mut self, window: u32) -> bool;

    /// Takes requests, in order, as many as there is room for. Returns how many it took.
    fn post(&mut self, requests: &[Request]) -> usize;

    /// Makes progress and appends what happened.
    fn poll(&mut self, events: &mut Vec<Event>);

    /// Puts what has arrived until now in view of this rank's GPU.
    ///
    /// # Errors
    /// An error of the network.
    fn make_visible(&mut self) -> Result<(), NetError> {
        Ok(())
    }

    /// Returns the path that it uses and how signals are raised, for people.
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

impl Network for Box<dyn Network> {
    fn capabilities(&self) -> Capabilities {
        (**self).capabilities()
    }

    fn register_signals(&mut self, signals: &LocalSignals) -> Result<Key, NetError> {
        (**self).register_signals(signals)
    }

    fn connect_signals(&mut self, keys: &[Key]) -> Result<(), NetError> {
        (**self).connect_signals(keys)
    }

    fn register(&mut self, window: &LocalWindow) -> Result<Key, NetError> {
        (**self).register(window)
    }

    fn fetch(&self) -> Option<Fetch> {
        (**self).fetch()
    }

    fn connect(&mut self, window: u32, keys: &[Key]) -> Result<(), NetError> {
        (**self).connect(window, keys)
    }

    fn deregister(&mut self, window: u32) -> bool {
        (**self).deregister(window)
    }

    fn post(&mut self, requests: &[Request]) -> usize {
        (**self).post(requests)
    }

    fn poll(&mut self, events: &mut Vec<Event>) {
        (**self).poll(events)
    }

    fn make_visible(&mut self) -> Result<(), NetError> {
        (**self).make_visible()
    }

    fn describe(&self) -> String {
        (**self).describe()
    }

    fn carries_notices(&self) -> bool {
        (**self).carries_notices()
    }

    fn is_quiet(&self) -> bool {
        (**self).is_quiet()
    }
}

/// The properties of a rank from which its network is made.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// World rank.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// Seed for networks that choose.
    pub seed: u64,
    /// Address of the rank's GPU on the PCI bus, such as `0000:18:00.0`, if it is there.
    pub gpu: Option<String>,
}

/// Makes the network of a rank.
pub type NetworkFactory = Arc<dyn Fn(&Endpoint) -> Box<dyn Network> + Send + Sync>;
