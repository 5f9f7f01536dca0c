// SPDX-License-Identifier: MIT OR Apache-2.0
//! The device-driven NIC of a communicator: queue pairs to the required ranks, and the memory that the NIC may access.

use super::resources::Resources;
use super::{CommError, PeerStats, Requirements, Stats};
use crate::proxy::Turn;
use crate::proxy::progress::{Step, Work};
use gin_abi::gdaki::{MAX_DEPTH_LOG2, MIN_DEPTH_LOG2};
use gin_abi::mlx5::be::Be32;
use gin_abi::mlx5::cqe::Syndrome;
use gin_abi::mlx5::wqe::opcode;
use gin_abi::{CommHandle, Fault, FaultKind, FaultSubject, Operation};
use gin_boot::lock;
use gin_gpu::{Device, GpuError, Memory, MemoryKind, MemorySlice};
use gin_net::{Capabilities, Raises};
use gin_nic::hca::Access;
use gin_nic::{
    Address, DeviceQueueError, DeviceQueuePairs, DoorbellRelay, DoorbellRelease, Doorbells, DrainError, Nic, NicError,
    NicPeer, RegisteredSlice, Shape, Target,
};
use serde::{Deserialize, Serialize};
use std::sync::{Arc, Mutex};

/// The maximum number of bytes of one work-queue entry, also if the NIC allows more.
const MAX_BYTES: u64 = 1 << 30;

impl From<DeviceQueueError> for CommError {
    fn from(error: DeviceQueueError) -> Self {
        match error {
            DeviceQueueError::Gpu(error) => Self::Gpu(error),
            DeviceQueueError::Nic(error) => error.into(),
        }
    }
}

/// Returns the features of a device-driven NIC as those of a network.
pub(super) fn capabilities(nic: &Nic) -> Capabilities {
    Capabilities {
        name: "mlx5",
        strong_signals: true,
        va_signals: true,
        max_message: MAX_BYTES.min(1 << nic.capabilities.log_message.min(30)),
        completion_is_arrival: false,
        raises: Raises::Sender,
        needs_make_visible: false,
        mailbox: false,
    }
}

/// The message of a rank to the others.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Offer {
    host: String,
    /// The port of its NIC.
    port: u8,
    /// The key of its signal words, and the address of the first word in their region.
    signals: (u32, u64),
    /// The addresses of its queue pairs, by context and connected rank.
    addresses: Vec<Vec<u8>>,
}

impl Offer {
    /// Returns the address of its queue pair of a context to `rank`.
    fn address(&self, shape: &Shape, context: u32, rank: u32, peer: &NicPeer) -> Result<Address, CommError> {
        // Connected ranks have queue pairs to the same ranks.
        let place = shape.place(rank).map(|place| (context * shape.count() + place) as usize);
        let bytes = place.and_then(|place| self.addresses.get(place)).map_or(&[][..], Vec::as_slice);
        Ok(Address::from_bytes(bytes, peer)?)
    }
}

/// A part of a window, as work-queue entries name it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(super) struct RemotePart {
    /// The key of its region; 0 if it has no bytes.
    key: u32,
    /// The address of its first byte in the region: less than a page of the host.
    start: u32,
}

/// The objects of a communicator on a NIC. Dropping it destroys them.
#[derive(Debug)]
pub(super) struct Gdaki {
    pub(super) queues: DeviceQueuePairs,
    /// The region of the signal words; `None` if there are no signals.
    signals: Option<RegisteredSlice>,
    /// The regions of the own parts, by window; `None` for a part without bytes.
    windows: Mutex<Vec<Option<RegisteredSlice>>>,
    keys: Arc<Memory>,
    shape: Shape,
    signal_bytes: u64,
    max_bytes: u32,
    pub(super) nic: Arc<Nic>,
}

/// Returns the slots of each send queue.
///
/// # Errors
/// [`CommError::Limit`].
pub(super) fn ring_depth(requirements: &Requirements) -> Result<u32, CommError> {
    let asked = u64::from(requirements.queue_depth);
    let limit = 1u64 << MAX_DEPTH_LOG2;
    if asked > limit {
        let what = "entries of a queue that kernels fill";
        return Err(CommError::Limit { what, asked, least: 1, limit });
    }
    Ok(requirements.queue_depth.next_power_of_two().max(1 << MIN_DEPTH_LOG2))
}

/// Returns the bytes of the table of the keys of all windows.
pub(super) fn keys_bytes(requirements: &Requirements, ranks: u32) -> u64 {
    u64::from(requirements.windows) * (u64::from(ranks) + 1) * 8
}

impl Gdaki {
    /// Creates the objects that do not depend on other ranks. `doorbells`: the requested engine that rings doorbells,
    /// and the scope of the fence before them.
    ///
    /// # Errors
    /// [`CommError::Limit`] for queues that are too long; an error of the NIC or the device. Then no object remains.
    pub(super) fn new(
        nic: Arc<Nic>,
        device: &Arc<dyn Device>,
        requirements: &Requirements,
        (rank, ranks, lsa_size): (u32, u32, u32),
        resources: &Resources,
        (doorbells, release): (Doorbells, DoorbellRelease),
        expired: &dyn Fn() -> bool,
    ) -> Result<Self, CommError> {
        let depth = ring_depth(requirements)?;
        let step = requirements.connections.step(lsa_size);
        let shape = Shape { contexts: requirements.contexts, ranks, rank, step, depth, release };
        let queues = DeviceQueuePairs::new(&nic, device, shape, resources.counters_gpu()?, doorbells, expired)?;
        let signals = resources.signals_nic.as_ref().filter(|memory| memory.bytes() > 0);
        let register = |memory: &Arc<Memory>| RegisteredSlice::new(&nic, memory.whole(), Access::SIGNALS);
        let signals = signals.map(register).transpose()?;
        // The limit is 2^30, so it fits.
        let max_bytes = requirements.max_message.min(capabilities(&nic).max_message) as u32;
        Ok(Self {
            queues,
            signals,
            windows: Mutex::new((0..requirements.windows).map(|_| None).collect()),
            keys: Memory::new(device, MemoryKind::Device, keys_bytes(requirements, ranks))?,
            shape,
            signal_bytes: resources.signal_bytes(),
            max_bytes,
            nic,
        })
    }

    /// Returns the message for the other ranks.
    pub(super) fn offer(&self) -> Offer {
        let pairs = (0..self.shape.contexts).flat_map(|context| self.shape.peers().map(move |peer| (context, peer)));
        let addresses = pairs.filter_map(|(context, peer)| self.queues.address(context, peer));
        let addresses = addresses.map(|address| address.to_bytes()).collect();
        let signals = self.signals.as_ref().map_or((0, 0), |signals| (signals.remote_key, signals.start));
        Offer { host: gin_boot::host_name(), port: self.nic.config.port, signals, addresses }
    }

    /// Connects the queue pairs by the messages of the other ranks, and fills the tables that kernels read. `comm`: the
    /// address of the copy of the handle.
    ///
    /// # Errors
    /// [`CommError::Nic`] with the peer; an error of the device.
    pub(super) fn connect(&self, offers: &[Offer], comm: u64, expired: &dyn Fn() -> bool) -> Result<(), CommError> {
        for context in 0..self.shape.contexts {
            for rank in self.shape.peers() {
                let offer = &offers[rank as usize];
                let peer = NicPeer { rank, host: offer.host.clone(), port: offer.port };
                let address = offer.address(&self.shape, context, self.shape.rank, &peer)?;
                self.queues.connect(context, &peer, &address, expired)?;
            }
        }
        let target = |context: u32, peer: u32| {
            let (signal_key, start) = offers[peer as usize].signals;
            let signals = start + u64::from(context) * self.signal_bytes;
            Target { signal_key, signals, max_bytes: self.max_bytes }
        };
        Ok(self.queues.fill(comm, target)?)
    }

    /// Returns the handle with the addresses by which kernels find their queue pairs.
    pub(super) fn handle(&self, handle: CommHandle) -> CommHandle {
        CommHandle {
            queue_pairs: self.queues.table(),
            window_keys: self.keys.address(),
            gdaki_contexts: self.shape.contexts,
            ..handle
        }
    }

    /// Returns the relay that rings doorbells for kernels; `None` if kernels ring them.
    pub(super) fn relay(&self) -> Option<Work> {
        self.queues.relay().map(|relay| Box::new(Relay(relay)) as Work)
    }

    fn keys_of(&self, window: u32) -> u64 {
        u64::from(window) * (u64::from(self.shape.ranks) + 1) * 8
    }

    /// Registers the own part of a window. Returns it as other ranks' entries name it.
    ///
    /// # Errors
    /// [`CommError::Nic`], also for pinned memory.
    pub(super) fn register(&self, window: u32, memory: &MemorySlice, signals: bool) -> Result<RemotePart, CommError> {
        if memory.bytes() == 0 {
            return Ok(RemotePart::default());
        }
        if memory.memory().kind() == MemoryKind::Pinned {
            return Err(NicError::HostWindow { nic: self.nic.name.clone() }.into());
        }
        // Words that the NIC raises in the window become visible after the data that was put before.
        let access = if signals { Access::SIGNALS } else { Access::PAYLOAD };
        let region = RegisteredSlice::new(&self.nic, memory.clone(), access)?;
        let part = RemotePart { key: region.remote_key, start: region.start as u32 };
        lock(&self.windows)[window as usize] = Some(region);
        Ok(part)
    }

    /// Fills in the keys of a window that all ranks have registered. `remote`: by rank.
    ///
    /// # Errors
    /// An error of the device.
    pub(super) fn open_window(&self, window: u32, remote: impl Iterator<Item = RemotePart>) -> Result<(), GpuError> {
        let local = lock(&self.windows)[window as usize]
            .as_ref()
            .map_or(RemotePart::default(), |region| RemotePart { key: region.local_key, start: region.start as u32 });
        let parts = remote.chain([local]);
        let words = parts.map(|part| u64::from(part.start) << 32 | u64::from(Be32::new(part.key).memory()));
        self.keys.write(self.keys_of(window), &words.collect::<Vec<_>>())
    }

    /// Deregisters the own part of a window. No peer reaches it from now on.
    ///
    /// # Errors
    /// An error of the device.
    pub(super) fn close_window(&self, window: u32) -> Result<(), GpuError> {
        lock(&self.windows)[window as usize] = None;
        self.keys.write(self.keys_of(window), &vec![0u64; self.shape.ranks as usize + 1])
    }

    /// Returns the statistics of the queue pairs that requests were posted to.
    ///
    /// # Errors
    /// An error of the device.
    pub(super) fn stats(&self) -> Result<Vec<PeerStats>, GpuError> {
        let entries = self.queues.progress()?;
        let stats = |(context, peer, posted, completed): (u32, u32, u64, u64)| PeerStats {
            context,
            peer,
            stats: Stats { accepted: posted, finished: completed, posted, completions: completed, ..Stats::default() },
        };
        Ok(entries.into_iter().map(stats).collect())
    }

    /// Waits until all entries that kernels have posted are complete; no kernel may run. Returns the number of
    /// incomplete entries once `expired` returns true, or the fault that ends the communicator.
    ///
    /// # Errors
    /// An error of the device.
    pub(super) fn drain(&self, expired: &dyn Fn() -> bool) -> Result<Result<u64, Fault>, CommError> {
        match self.queues.drain(expired) {
            Ok(left) => Ok(Ok(left)),
            Err(DrainError::Gpu(error)) => Err(error.into()),
            Err(error) => Ok(Err(fault(&error))),
        }
    }
}

/// A relay as work that a progress thread steps beside the proxy.
struct Relay(DoorbellRelay);

impl Step for Relay {
    fn step(&mut self) -> Turn {
        if self.0.step() { Turn::Worked } else { Turn::Idle }
    }

    fn broke(&mut self) {}
}

/// Returns the fault for kernels and other ranks, the same as if a kernel had found it.
fn fault(error: &DrainError) -> Fault {
    let at = |kind, operation, context, peer| Fault::new(kind, operation).with_context(context).with_peer(peer);
    match *error {
        DrainError::Failed { context, peer, index, operation, failure } => {
            let gone = failure.syndrome == Syndrome::RetryExceeded.code();
            let kind = if gone { FaultKind::PeerLost } else { FaultKind::Network };
            let (index, syndrome) = (u64::from(index as u16), u64::from(failure.syndrome));
            at(kind, operation_of(operation), context, peer).with_values(FaultSubject::None, index, syndrome)
        }
        DrainError::Hole { context, peer, index } => {
            at(FaultKind::QueueBroken, Operation::None, context, peer).with_values(FaultSubject::None, index, 0)
        }
        DrainError::Senseless { context, peer } => at(FaultKind::Network, Operation::None, context, peer),
        // The device or the NIC failed.
        _ => Fault::new(FaultKind::Network, Operation::None),
    }
}

fn operation_of(code: u32) -> Operation {
    match code {
        opcode::WRITE => Operation::Put,
        opcode::READ => Operation::Get,
        opcode::FETCH_ADD => Operation::Signal,
        _ => Operation::Flush,
    }
}
