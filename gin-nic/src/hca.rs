// SPDX-License-Identifier: MIT OR Apache-2.0
//! The calls of a NIC that the bring-up needs.

use gin_abi::mlx5::bits::TooWide;
use gin_abi::mlx5::command::{Mtu, Status};
use gin_gpu::{Device, MemoryKind};
pub use gin_verbs::Link;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// An object of a NIC. What it stands for is the NIC's business; it is good for the NIC that gave it only.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Handle(pub u64);

/// The accesses that registered memory allows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Access {
    /// The NIC may write what it reads elsewhere.
    pub local_write: bool,
    /// Peers may write.
    pub remote_write: bool,
    /// Peers may read.
    pub remote_read: bool,
    /// Peers may add.
    pub remote_atomic: bool,
    /// Writes may come into view in any order, among themselves and against those to other memory that has this too.
    pub relaxed_ordering: bool,
}

impl Access {
    /// The accesses to windows: all of them, in any order.
    pub const PAYLOAD: Self =
        Self { local_write: true, remote_write: true, remote_read: true, remote_atomic: true, relaxed_ordering: true };
    /// The accesses to words that peers raise: all of them, ordered behind all earlier writes.
    pub const SIGNALS: Self = Self { relaxed_ordering: false, ..Self::PAYLOAD };
    /// The accesses to rings and doorbell records.
    pub const RINGS: Self = Self {
        local_write: true,
        remote_write: false,
        remote_read: false,
        remote_atomic: false,
        relaxed_ordering: false,
    };
}

/// Memory to register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Address of the first byte.
    pub address: u64,
    /// Length.
    pub bytes: u64,
    /// The memory of a device, as a file that drivers share; else the address is one of this process.
    pub dma_buf: Option<DmaBuf>,
}

/// Memory of a device, as a file that drivers share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DmaBuf {
    /// The file; it may be closed once the memory is registered.
    pub file: i32,
    /// Where in it the memory begins.
    pub offset: u64,
}

/// A protection domain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Domain {
    /// The object.
    pub handle: Handle,
    /// Its number in mailboxes.
    pub number: u32,
}

/// A memory region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Region {
    /// The object.
    pub handle: Handle,
    /// Its key for local access.
    pub local_key: u32,
    /// Its key for remote access.
    pub remote_key: u32,
}

/// Registered memory for rings and doorbell records.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Umem {
    /// The object.
    pub handle: Handle,
    /// Its number in mailboxes.
    pub number: u32,
}

/// A doorbell page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Uar {
    /// The object.
    pub handle: Handle,
    /// Its number in mailboxes.
    pub number: u32,
    /// Where doorbells are stored, in this process.
    pub doorbell: u64,
}

/// A port, as it is now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Port {
    /// It is up.
    pub active: bool,
    /// The network that it is part of.
    pub link: Link,
    /// Most bytes of payload in a packet.
    pub mtu: Mtu,
    /// Its local identifier; 0 on Ethernet.
    pub lid: u16,
    /// Number of its GIDs.
    pub gids: u32,
}

/// Why a NIC did not do what it was asked to.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HcaError {
    /// The firmware refused a command.
    #[error("the NIC answered: {} (status {status:#x}, syndrome {syndrome:#x})", status_text(*status))]
    Refused {
        /// Its status.
        status: u8,
        /// Why, for the vendor.
        syndrome: u32,
    },
    /// A call of the driver's library failed.
    #[error("{call} failed: {}", std::io::Error::from_raw_os_error(*errno))]
    System {
        /// The call.
        call: &'static str,
        /// The error of the operating system.
        errno: i32,
    },
    /// A number does not fit into the command.
    #[error("{0}")]
    TooWide(TooWide),
    /// The NIC, its driver or its library cannot do this.
    #[error("{what} is not supported: {reason}")]
    Unsupported {
        /// The operation that failed.
        what: &'static str,
        /// Why not.
        reason: String,
    },
    /// There is no such port.
    #[error("there is no port {port}; there are 1 to {ports}")]
    NoPort {
        /// The port.
        port: u8,
        /// Number of ports.
        ports: u8,
    },
    /// A software NIC has nobody to execute what it is asked to.
    #[error("the engine of the software NIC: {reason}")]
    Engine {
        /// Why.
        reason: String,
    },
    /// A handle that is none of this NIC's, or no longer.
    #[error("object {0:?} is not there")]
    NoObject(Handle),
}

impl From<TooWide> for HcaError {
    fn from(error: TooWide) -> Self {
        Self::TooWide(error)
    }
}

fn status_text(status: u8) -> &'static str {
    Status::from_code(status.into()).map_or("unknown status", Status::text)
}

/// A NIC with the command interface of mlx5.
///
/// Commands and answers are mailboxes of [`gin_abi::mlx5::mailbox`]. A call may take as long as the firmware does,
/// which nothing can cut short. Objects that were made are there until they are destroyed, even if the `Hca` is dropped
/// first; `gin_nic` wraps them so that dropping destroys them.
pub trait Hca: Send + Sync + fmt::Debug {
    /// Its name, for people.
    fn name(&self) -> String;

    /// Returns whether a doorbell page serves several queue pairs. A page of the software NIC holds one doorbell at a
    /// time.
    fn shares_doorbells(&self) -> bool;

    /// Returns whether memory of this GPU may be registered at all, as a file or by its address. A software NIC reaches
    /// all memory that the device of its engine reaches; a real one refuses by itself memory that it does not reach.
    fn reaches(&self, gpu: &dyn Device) -> bool;

    /// Returns whether its doorbells are words of memory that devices find at this process's address, as those of a
    /// software NIC may be. Otherwise they are on pages that must be mapped into a device before its kernels ring.
    fn doorbells_are_memory(&self) -> bool {
        false
    }

    /// Where rings and doorbell records have to lie that a device fills.
    fn ring_memory(&self) -> MemoryKind {
        MemoryKind::Device
    }

    /// Stores a word to a doorbell, behind everything that the caller stored.
    ///
    /// # Safety
    /// - The doorbell is one of this NIC's, and its page is still there.
    ///
    /// # Errors
    /// [`HcaError::Engine`], of software NICs.
    unsafe fn ring(&self, doorbell: u64, word: u64) -> Result<(), HcaError> {
        let doorbell = std::ptr::with_exposed_provenance_mut(doorbell as usize);
        // Safety: the caller's promise; doorbells are aligned words.
        unsafe { AtomicU64::from_ptr(doorbell) }.store(word, Ordering::Release);
        Ok(())
    }

    /// A command that makes nothing and belongs to no object: capabilities, addresses.
    ///
    /// # Errors
    /// [`HcaError`].
    fn command(&self, input: &[u8], output: &mut [u8]) -> Result<(), HcaError>;

    /// A command that makes a queue pair or a completion queue.
    ///
    /// # Errors
    /// [`HcaError`].
    fn create(&self, input: &[u8], output: &mut [u8]) -> Result<Handle, HcaError>;

    /// A command that changes an object.
    ///
    /// # Errors
    /// [`HcaError`].
    fn modify(&self, object: Handle, input: &[u8], output: &mut [u8]) -> Result<(), HcaError>;

    /// A command that asks for the state of an object.
    ///
    /// # Errors
    /// [`HcaError`].
    fn query(&self, object: Handle, input: &[u8], output: &mut [u8]) -> Result<(), HcaError>;

    /// Ends a queue pair or a completion queue.
    ///
    /// # Errors
    /// [`HcaError`]; the object is there still.
    fn destroy(&self, object: Handle) -> Result<(), HcaError>;

    /// New protection domain.
    ///
    /// # Errors
    /// [`HcaError`].
    fn allocate_domain(&self) -> Result<Domain, HcaError>;

    /// Its end.
    ///
    /// # Errors
    /// [`HcaError`]; the object is there still.
    fn free_domain(&self, domain: Handle) -> Result<(), HcaError>;

    /// Registers memory for entries to name; its first byte has the address `start` there.
    ///
    /// # Errors
    /// [`HcaError`].
    ///
    /// # Safety
    /// - The memory is there until the region is deregistered, and other users of it expect the NIC's accesses.
    unsafe fn register_region(
        &self,
        domain: &Domain,
        memory: &Extent,
        start: u64,
        access: Access,
    ) -> Result<Region, HcaError>;

    /// Its end.
    ///
    /// # Errors
    /// [`HcaError`]; the object is there still.
    fn deregister_region(&self, region: Handle) -> Result<(), HcaError>;

    /// Registers memory for rings and doorbell records.
    ///
    /// # Errors
    /// [`HcaError`].
    ///
    /// # Safety
    /// - As [`register_region`](Self::register_region).
    unsafe fn register_umem(&self, memory: &Extent, access: Access) -> Result<Umem, HcaError>;

    /// Its end.
    ///
    /// # Errors
    /// [`HcaError`]; the object is there still.
    fn deregister_umem(&self, umem: Handle) -> Result<(), HcaError>;

    /// New doorbell page.
    ///
    /// # Errors
    /// [`HcaError`].
    fn allocate_uar(&self) -> Result<Uar, HcaError>;

    /// Its end.
    ///
    /// # Errors
    /// [`HcaError`]; the object is there still.
    fn free_uar(&self, uar: Handle) -> Result<(), HcaError>;

    /// Number of the event queue that completion queues name.
    ///
    /// # Errors
    /// [`HcaError`].
    fn event_queue(&self) -> Result<u32, HcaError>;

    /// A port, counted from 1.
    ///
    /// # Errors
    /// [`HcaError`].
    fn port(&self, port: u8) -> Result<Port, HcaError>;

    /// A GID of a port.
    ///
    /// # Errors
    /// [`HcaError`].
    fn gid(&self, port: u8, index: u32) -> Result<[u8; 16], HcaError>;

    /// Hardware address of the next hop on the way to a GID, on Ethernet.
    ///
    /// # Errors
    /// [`HcaError`].
    fn next_hop(&self, domain: &Domain, port: u8, gid_index: u32, gid: [u8; 16]) -> Result<[u8; 6], HcaError>;
}
