// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors of the bring-up of queue pairs.

use super::hca::{HcaError, Link};
use gin_gpu::GpuError;

/// The other end of a connection.
#[derive(Clone, PartialEq, Eq, Debug, derive_more::Display, Hash)]
#[display("rank {rank} (host {host}, port {port})")]
pub struct NicPeer {
    /// The world rank.
    pub rank: u32,
    /// The name of its host.
    pub host: String,
    /// The port of its NIC.
    pub port: u8,
}

macro_rules! steps {
    ($($(#[$doc:meta])* $variant:ident = $text:literal,)*) => {
        /// The step that failed.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, derive_more::Display)]
        pub enum Step { $($(#[$doc])* #[display($text)] $variant,)* }
    };
}

steps! {
    /// The query of the NIC's capabilities.
    Capabilities = "asking for capabilities",
    /// The query of the port's state.
    Port = "asking for the port",
    /// The query of GIDs.
    Gids = "asking for GIDs",
    /// The query of the event queue.
    EventQueue = "asking for an event queue",
    /// The allocation of a protection domain.
    Domain = "making a protection domain",
    /// The registration of a window or of signal words.
    Region = "registering memory",
    /// The registration of the slab with the rings.
    Rings = "registering the memory of the rings",
    /// The allocation of a doorbell page.
    DoorbellPage = "making a doorbell page",
    /// The creation of a completion queue.
    CompletionQueue = "making a completion queue",
    /// The creation of a queue pair.
    QueuePair = "making a queue pair",
    /// The change to the state init.
    Init = "moving a queue pair to init",
    /// The resolution of the path to the peer.
    NextHop = "resolving the address of the peer",
    /// The change to the state ready to receive.
    ReadyToReceive = "moving a queue pair to ready to receive",
    /// The change to the state ready to send.
    ReadyToSend = "moving a queue pair to ready to send",
    /// The query of a queue pair's state.
    State = "asking for the state of a queue pair",
}

/// An error of the bring-up of queue pairs.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NicError {
    /// The NIC or its driver failed or refused the step.
    #[error("{nic}: {step}{}: {source}", to(peer))]
    Step {
        /// The name of the NIC.
        nic: String,
        /// The step that failed.
        step: Step,
        /// The peer, if the step is for one.
        peer: Option<NicPeer>,
        /// The NIC's error.
        source: HcaError,
    },
    /// The deadline passed before this step began.
    #[error("{nic}: {step}{}: the deadline passed", to(peer))]
    Deadline {
        /// The name of the NIC.
        nic: String,
        /// The next step.
        step: Step,
        /// The peer, if the step is for one.
        peer: Option<NicPeer>,
    },
    /// The port is not up.
    #[error("{nic}: port {port} is down")]
    PortDown {
        /// The name of the NIC.
        nic: String,
        /// The port.
        port: u8,
    },
    /// The NIC lacks a required feature.
    #[error("{nic} has no {what}")]
    NotCapable {
        /// The name of the NIC.
        nic: String,
        /// The missing feature.
        what: &'static str,
    },
    /// The port has no usable GID.
    #[error("{nic}: port {port}: {reason}")]
    NoGid {
        /// The name of the NIC.
        nic: String,
        /// The port.
        port: u8,
        /// The reason.
        reason: String,
    },
    /// A requested number exceeds its limit.
    #[error("{asked} {what} were asked for; {nic} has at most {limit}")]
    Limit {
        /// The name of the NIC.
        nic: String,
        /// The name of the number.
        what: &'static str,
        /// The requested number.
        asked: u64,
        /// The limit.
        limit: u64,
    },
    /// A number must be a power of two.
    #[error("{what} must be a power of two; {asked} was asked for")]
    NotPowerOfTwo {
        /// The name of the number.
        what: &'static str,
        /// The requested number.
        asked: u64,
    },
    /// The NIC does not reach this kind of memory.
    #[error("{nic} does not reach {kind} memory of {device}")]
    Memory {
        /// The name of the NIC.
        nic: String,
        /// The kind of memory.
        kind: String,
        /// The name of its device.
        device: String,
    },
    /// The NIC can register this memory of a GPU neither as a file nor by its address.
    #[error(
        "{nic}: {step}: memory of {device} can be reached neither as a DMA-BUF file ({by_file}) nor by its address \
         ({by_address}; that needs the module nvidia-peermem)"
    )]
    Unreached {
        /// The name of the NIC.
        nic: String,
        /// The step that failed.
        step: Step,
        /// The name of the device.
        device: String,
        /// The reason why not as a file.
        by_file: Box<FileRefusal>,
        /// The reason why not by its address.
        by_address: HcaError,
    },
    /// Kernels of the device cannot ring the NIC's doorbells, but were requested to.
    #[error("kernels of {device} cannot ring the doorbells of {nic}: {reason}")]
    Doorbells {
        /// The name of the NIC.
        nic: String,
        /// The name of the device.
        device: String,
        /// The reason.
        reason: Box<GpuError>,
    },
    /// Kernels would release to the GPU only before they ring, but the NIC would read memory that such a release does
    /// not cover.
    #[error(
        "kernels that ring {nic} are to release to the GPU only, but the send queue lies in pinned host memory: keep it in \
         the GPU, or release to the system"
    )]
    Unreleased {
        /// The name of the NIC.
        nic: String,
    },
    /// The window is in memory of the host, and kernels drive the NIC. The signal words are in GPU memory, and a NIC
    /// does not order its writes to the host with its writes to the GPU.
    #[error(
        "kernels drive {nic}, which does not order data in host memory with signals in the GPU, but the window lies in \
         pinned host memory: allocate it in the GPU, or choose the proxy back end"
    )]
    HostWindow {
        /// The name of the NIC.
        nic: String,
    },
    /// The peer runs another version of this library.
    #[error("{peer} speaks version {theirs} of the exchange, this rank {own}")]
    Version {
        /// The peer.
        peer: NicPeer,
        /// The peer's version.
        theirs: u32,
        /// This rank's version.
        own: u32,
    },
    /// The peer is on another kind of network.
    #[error("{peer} is on {theirs}, this rank on {own}")]
    Link {
        /// The peer.
        peer: NicPeer,
        /// The peer's network.
        theirs: Link,
        /// This rank's network.
        own: Link,
    },
    /// The peer's message is not an address.
    #[error("the address of {peer} makes no sense: {reason}")]
    Address {
        /// The peer.
        peer: NicPeer,
        /// The reason.
        reason: &'static str,
    },
}

gin_abi::debug_as_display!(NicError);

/// An error of queue pairs in memory of a device.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DeviceQueueError {
    /// An error of the device.
    #[error("memory of the rings: {0}")]
    Gpu(#[from] GpuError),
    /// An error of the NIC, or an exceeded limit.
    #[error(transparent)]
    Nic(#[from] NicError),
}

/// The reason why a NIC cannot register memory of a GPU as a file.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FileRefusal {
    /// The device exports no file.
    #[error(transparent)]
    Device(GpuError),
    /// The NIC refuses the file.
    #[error(transparent)]
    Nic(HcaError),
}

fn to(peer: &Option<NicPeer>) -> String {
    peer.as_ref().map_or(String::new(), |peer| format!(" for {peer}"))
}
