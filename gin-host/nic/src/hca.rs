// SPDX-License-Identifier: MIT OR Apache-2.0
//! The calls of a NIC that the bring-up makes.

use gin_abi::mlx5::bits::TooWide;
use gin_abi::mlx5::command::{Mtu, Status};
use gin_gpu::{Device, MemoryKind};
pub use gin_verbs::{Access, Link};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// A handle of an object of a NIC. Only the NIC that returned it knows its meaning.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Handle(pub u64);

/// Memory to register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// The address of the first byte.
    pub address: u64,
    /// The length in bytes.
    pub bytes: u64,
    /// The memory of a device, as a file that drivers share. Without it the address is one of this process.
    pub dma_buf: Option<DmaBuf>,
}

/// Memory of a device, as a file that drivers share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DmaBuf {
    /// The file. The caller may close it after the registration.
    pub file: i32,
    /// The offset of the memory in the file.
    pub offset: u64,
}

/// A protection domain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Domain {
    /// The handle.
    pub handle: Handle,
    /// Its number in mailboxes.
    pub number: u32,
}

/// A memory region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Region {
    /// The handle.
    pub handle: Handle,
    /// Its key for local access.
    pub local_key: u32,
    /// Its key for remote access.
    pub remote_key: u32,
}

/// Registered memory for rings and doorbell records.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Umem {
    /// The handle.
    pub handle: Handle,
    /// Its number in mailboxes.
    pub number: u32,
}

/// A doorbell page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Uar {
    /// The handle.
    pub handle: Handle,
    /// Its number in mailboxes.
    pub number: u32,
    /// The address of the doorbells in this process.
    pub doorbell: u64,
}

/// The state of a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Port {
    /// The port is up.
    pub active: bool,
    /// The kind of its network.
    pub link: Link,
    /// The maximum number of bytes of payload in a packet.
    pub mtu: Mtu,
    /// Its local identifier; 0 on Ethernet.
    pub lid: u16,
    /// The number of its GIDs.
    pub gids: u32,
}

/// An error of a NIC.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HcaError {
    /// The firmware refused a command.
    #[error("the NIC answered: {} (status {status:#x}, syndrome {syndrome:#x})", status_text(*status))]
    Refused {
        /// The status of the command.
        status: u8,
        /// The syndrome, for the vendor.
        syndrome: u32,
    },
    /// A call of the driver's library failed.
    #[error("{call} failed: {}", gin_verbs::explain(*errno))]
    System {
        /// The call.
        call: &'static str,
        /// The error of the operating system.
        errno: i32,
    },
    /// A number does not fit into the command.
    #[error(transparent)]
    TooWide(#[from] TooWide),
    /// The NIC, its driver or its library does not support the operation.
    #[error("{what} is not supported: {reason}")]
    Unsupported {
        /// The operation that failed.
        what: &'static str,
        /// The reason.
        reason: String,
    },
    /// The NIC has no port with this number.
    #[error("there is no port {port}; there are 1 to {ports}")]
    NoPort {
        /// The port.
        port: u8,
        /// The number of ports.
        ports: u8,
    },
    /// The engine of the software NIC does not run.
    #[error("the engine of the software NIC: {reason}")]
    Engine {
        /// The reason.
        reason: String,
    },
    /// The handle is of no object of this NIC, or of a destroyed one.
    #[error("object {} does not exist", .0.0)]
    NoObject(Handle),
}

fn status_text(status: u8) -> &'static str {
    Status::from_code(status.into()).map_or("unknown status", Status::text)
}

/// A NIC with the command interface of mlx5.
///
/// Commands and answers are mailboxes of [`gin_abi::mlx5::mailbox`]. A call takes as long as the firmware does, without
/// a time limit. An object exists until it is destroyed, even if the `Hca` is dropped first. `gin_nic` wraps objects so
/// that a drop destroys them.
pub trait Hca: Send + Sync + fmt::Debug {
    /// Returns the NIC's name, for people.
    fn name(&self) -> String;

    /// Returns whether a doorbell page serves several queue pairs. A page of the software NIC holds one doorbell at a
    /// time.
    fn shares_doorbells(&self) -> bool;

    /// Returns whether memory of this GPU may be registered, as a file or by its address. A software NIC reaches all
    /// memory that the device of its engine reaches. A real NIC refuses memory that it does not reach when it registers
    /// it.
    fn reaches(&self, gpu: &dyn Device) -> bool;

    /// Returns whether doorbells are words that devices find at this process's address, as those of a software NIC may
    /// be. Otherwise a device must map their pages before its kernels ring.
    fn doorbells_are_memory(&self) -> bool {
        false
    }

    /// Returns the kind of memory for rings and doorbell records that a device fills.
    fn ring_memory(&self) -> MemoryKind {
        MemoryKind::Device
    }

    /// Stores a word to a doorbell, after all earlier stores of the caller.
    ///
    /// # Safety
    /// - The doorbell is one of this NIC's, and its page is not freed yet.
    ///
    /// # Errors
    /// [`HcaError::Engine`], of software NICs.
    unsafe fn ring(&self, doorbell: u64, word: u64) -> Result<(), HcaError> {
        let doorbell = std::ptr::with_exposed_provenance_mut(doorbell as usize);
        // Safety: the caller's promise. Doorbells are aligned words.
        unsafe { AtomicU64::from_ptr(doorbell) }.store(word, Ordering::Release);
        Ok(())
    }

    /// Sends a command that creates and changes no object: capabilities, addresses.
    ///
    /// # Errors
    /// [`HcaError`].
    fn command(&self, input: &[u8], output: &mut [u8]) -> Result<(), HcaError>;

    /// Sends a command that creates a queue pair or a completion queue.
    ///
    /// # Errors
    /// [`HcaError`].
    fn create(&self, input: &[u8], output: &mut [u8]) -> Result<Handle, HcaError>;

    /// Sends a command that changes an object.
    ///
    /// # Errors
    /// [`HcaError`].
    fn modify(&self, object: Handle, input: &[u8], output: &mut [u8]) -> Result<(), HcaError>;

    /// Sends a command that queries the state of an object.
    ///
    /// # Errors
    /// [`HcaError`].
    fn query(&self, object: Handle, input: &[u8], output: &mut [u8]) -> Result<(), HcaError>;

    /// Destroys a queue pair or a completion queue.
    ///
    /// # Errors
    /// [`HcaError`]. The object still exists.
    fn destroy(&self, object: Handle) -> Result<(), HcaError>;

    /// Allocates a protection domain.
    ///
    /// # Errors
    /// [`HcaError`].
    fn allocate_domain(&self) -> Result<Domain, HcaError>;

    /// Frees a protection domain.
    ///
    /// # Errors
    /// [`HcaError`]. The object still exists.
    fn free_domain(&self, domain: Handle) -> Result<(), HcaError>;

    /// Registers memory for work-queue entries, in which its first byte has the address `start`.
    ///
    /// # Errors
    /// [`HcaError`].
    ///
    /// # Safety
    /// - The memory is valid until the region is deregistered, and other code that uses it expects the NIC's accesses.
    unsafe fn register_region(
        &self,
        domain: &Domain,
        memory: &Extent,
        start: u64,
        access: Access,
    ) -> Result<Region, HcaError>;

    /// Deregisters a region.
    ///
    /// # Errors
    /// [`HcaError`]. The object still exists.
    fn deregister_region(&self, region: Handle) -> Result<(), HcaError>;

    /// Registers memory for rings and doorbell records.
    ///
    /// # Errors
    /// [`HcaError`].
    ///
    /// # Safety
    /// - As [`register_region`](Self::register_region).
    unsafe fn register_umem(&self, memory: &Extent, access: Access) -> Result<Umem, HcaError>;

    /// Deregisters memory of rings.
    ///
    /// # Errors
    /// [`HcaError`]. The object still exists.
    fn deregister_umem(&self, umem: Handle) -> Result<(), HcaError>;

    /// Allocates a doorbell page.
    ///
    /// # Errors
    /// [`HcaError`].
    fn allocate_uar(&self) -> Result<Uar, HcaError>;

    /// Frees a doorbell page.
    ///
    /// # Errors
    /// [`HcaError`]. The object still exists.
    fn free_uar(&self, uar: Handle) -> Result<(), HcaError>;

    /// Returns the number of the event queue that completion queues name.
    ///
    /// # Errors
    /// [`HcaError`].
    fn event_queue(&self) -> Result<u32, HcaError>;

    /// Returns the state of a port, counted from 1.
    ///
    /// # Errors
    /// [`HcaError`].
    fn port(&self, port: u8) -> Result<Port, HcaError>;

    /// Returns a GID of a port.
    ///
    /// # Errors
    /// [`HcaError`].
    fn gid(&self, port: u8, index: u32) -> Result<[u8; 16], HcaError>;

    /// Returns the hardware address of the next hop to a GID, on Ethernet.
    ///
    /// # Errors
    /// [`HcaError`].
    fn next_hop(&self, domain: &Domain, port: u8, gid_index: u32, gid: [u8; 16]) -> Result<[u8; 6], HcaError>;
}
