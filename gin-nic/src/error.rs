// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors of bringing queue pairs up.

use super::hca::HcaError;
use gin_gpu::GpuError;
use std::fmt;

/// The other end of a connection.
#[derive(Clone, PartialEq, Eq, Debug, Hash)]
pub struct NicPeer {
    /// World rank.
    pub rank: u32,
    /// Name of its host.
    pub host: String,
    /// Port of its NIC.
    pub port: u8,
}

impl fmt::Display for NicPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} (host {}, port {})", self.rank, self.host, self.port)
    }
}

macro_rules! steps {
    ($($(#[$doc:meta])* $variant:ident = $text:literal,)*) => {
        /// The step that failed.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
        pub enum Step { $($(#[$doc])* $variant,)* }

        impl fmt::Display for Step {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $(Self::$variant => $text,)* })
            }
        }
    };
}

steps! {
    /// Asking what the NIC can do.
    Capabilities = "asking for capabilities",
    /// Asking for the state of the port.
    Port = "asking for the port",
    /// Asking for GIDs.
    Gids = "asking for GIDs",
    /// Asking for the event queue.
    EventQueue = "asking for an event queue",
    /// Making a protection domain.
    Domain = "making a protection domain",
    /// Registering a window or signal words.
    Region = "registering memory",
    /// Registering the slab with the rings.
    Rings = "registering the memory of the rings",
    /// Making a doorbell page.
    DoorbellPage = "making a doorbell page",
    /// Making a completion queue.
    CompletionQueue = "making a completion queue",
    /// Making a queue pair.
    QueuePair = "making a queue pair",
    /// The change to init.
    Init = "moving a queue pair to init",
    /// Finding the way to the peer.
    NextHop = "resolving the address of the peer",
    /// The change to ready to receive.
    ReadyToReceive = "moving a queue pair to ready to receive",
    /// The change to ready to send.
    ReadyToSend = "moving a queue pair to ready to send",
    /// Asking for the state of a queue pair.
    State = "asking for the state of a queue pair",
}

/// An error of bringing queue pairs up.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NicError {
    /// The NIC, or its driver, failed or refused.
    #[error("{nic}: {step}{}: {source}", to(peer))]
    Step {
        /// Name of the NIC.
        nic: String,
        /// The step that failed.
        step: Step,
        /// For whom.
        peer: Option<NicPeer>,
        /// The NIC's error.
        source: HcaError,
    },
    /// The time was over before this was begun.
    #[error("{nic}: {step}{}: the deadline passed", to(peer))]
    Deadline {
        /// Name of the NIC.
        nic: String,
        /// The step that was due.
        step: Step,
        /// For whom.
        peer: Option<NicPeer>,
    },
    /// The port is not up.
    #[error("{nic}: port {port} is down")]
    PortDown {
        /// Name of the NIC.
        nic: String,
        /// The port.
        port: u8,
    },
    /// The NIC lacks something that is needed.
    #[error("{nic} has no {what}")]
    NotCapable {
        /// Name of the NIC.
        nic: String,
        /// The missing feature.
        what: &'static str,
    },
    /// There is no GID that can be used.
    #[error("{nic}: port {port}: {reason}")]
    NoGid {
        /// Name of the NIC.
        nic: String,
        /// The port.
        port: u8,
        /// Why.
        reason: String,
    },
    /// More was asked for than there can be.
    #[error("{asked} {what} were asked for; {nic} has at most {limit}")]
    Limit {
        /// Name of the NIC.
        nic: String,
        /// Of what.
        what: &'static str,
        /// The requested number.
        asked: u64,
        /// The most there can be.
        limit: u64,
    },
    /// A number that must be a power of two.
    #[error("{what} must be a power of two; {asked} was asked for")]
    NotPowerOfTwo {
        /// Which number.
        what: &'static str,
        /// The requested number.
        asked: u64,
    },
    /// The memory for the rings is too small, or does not begin a page.
    #[error("the rings need {needed} bytes from the beginning of a page; there are {given} at {address:#x}")]
    RingMemory {
        /// Bytes that are needed.
        needed: u64,
        /// Bytes that there are.
        given: u64,
        /// Where they are.
        address: u64,
    },
    /// The NIC does not reach this kind of memory.
    #[error("{nic} does not reach {kind} memory of {device}")]
    Memory {
        /// Name of the NIC.
        nic: String,
        /// Where the memory lies.
        kind: String,
        /// Name of its device.
        device: String,
    },
    /// The NIC takes this memory of a GPU in neither way.
    #[error(
        "{nic}: {step}: memory of {device} can be reached neither as a DMA-BUF file ({by_file}) nor by its address \
         ({by_address}; that needs the module nvidia-peermem)"
    )]
    Unreached {
        /// Name of the NIC.
        nic: String,
        /// The step that failed.
        step: Step,
        /// Name of the device.
        device: String,
        /// Why not as a file.
        by_file: Box<FileRefusal>,
        /// Why not by its address.
        by_address: HcaError,
    },
    /// Kernels of the device are to ring doorbells, and cannot.
    #[error("kernels of {device} cannot ring the doorbells of {nic}: {reason}")]
    Doorbells {
        /// Name of the NIC.
        nic: String,
        /// Name of the device.
        device: String,
        /// Why.
        reason: Box<GpuError>,
    },
    /// Kernels are to release to the GPU only, before they ring, and the NIC would read memory that this does not
    /// cover.
    #[error(
        "kernels that ring {nic} are to release to the GPU only, but the send queue lies in pinned host memory: keep it in \
         the GPU, or release to the system"
    )]
    Unreleased {
        /// Name of the NIC.
        nic: String,
    },
    /// A window in memory of the host, of a communicator whose kernels drive a NIC: the signal words lie in the GPU,
    /// and a NIC does not order its writes to the host with its writes to the GPU.
    #[error(
        "kernels drive {nic}, which does not order data in host memory with signals in the GPU, but the window lies in \
         pinned host memory: allocate it in the GPU, or choose the proxy back end"
    )]
    HostWindow {
        /// Name of the NIC.
        nic: String,
    },
    /// The peer runs another version of this library.
    #[error("{peer} speaks version {theirs} of the exchange, this rank {own}")]
    Version {
        /// The peer.
        peer: NicPeer,
        /// Its version.
        theirs: u32,
        /// Ours.
        own: u32,
    },
    /// The peer is on another kind of network.
    #[error("{peer} is on {theirs}, this rank on {own}")]
    Link {
        /// The peer.
        peer: NicPeer,
        /// The peer's network.
        theirs: String,
        /// This rank's network.
        own: String,
    },
    /// The peer's message is no address.
    #[error("the address of {peer} makes no sense: {reason}")]
    Address {
        /// The peer.
        peer: NicPeer,
        /// Why.
        reason: &'static str,
    },
}

/// Why memory of a GPU could not be given to a NIC as a file.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FileRefusal {
    /// The device gives none.
    #[error(transparent)]
    Device(GpuError),
    /// The NIC does not take it.
    #[error(transparent)]
    Nic(HcaError),
}

fn to(peer: &Option<NicPeer>) -> String {
    peer.as_ref().map_or(String::new(), |peer| format!(" for {peer}"))
}
