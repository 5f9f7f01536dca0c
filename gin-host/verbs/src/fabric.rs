// SPDX-License-Identifier: MIT OR Apache-2.0
//! Structures, constants and functions of libfabric's `rdma/*.h`, as far as gin uses them.
//!
//! The library exports few functions. In C the others are inline: they go through tables of an object, such as
//! [`EndpointObject`], whose entries belong to the provider. Structures that only the library allocates, such as
//! [`Info`] and its parts, are declared up to the last field that gin uses.

use crate::library::functions;
use std::ffi::{c_char, c_int, c_void};

/// Name of libfabric in every distribution.
pub const LIBRARY: &str = "libfabric.so.1";

/// Version of the interface that gin speaks: 1.11, the oldest with all that it uses.
pub const VERSION: u32 = 1 << 16 | 11;

/// Version of the interface that gin speaks with providers that reach memory of GPUs: 1.18, the oldest with
/// [`FI_OPT_CUDA_API_PERMITTED`].
pub const VERSION_FOR_GPUS: u32 = 1 << 16 | 18;

/// A function that gin does not call.
type Unused = *const c_void;

/// `struct fi_tx_attr`; its beginning.
#[repr(C)]
pub struct TransmitAttributes {
    /// Capabilities.
    pub caps: u64,
    /// `FI_CONTEXT` and others: duties of the caller.
    pub mode: u64,
    /// Default flags of operations.
    pub op_flags: u64,
    /// `FI_ORDER_*`
    pub msg_order: u64,
    /// Order of completions.
    pub comp_order: u64,
    /// Maximum number of bytes that the provider copies when an operation is posted.
    pub inject_size: usize,
    /// Maximum number of outstanding operations.
    pub size: usize,
}

/// `struct fi_rx_attr`; its beginning.
#[repr(C)]
pub struct ReceiveAttributes {
    /// Capabilities.
    pub caps: u64,
    /// Duties of the caller.
    pub mode: u64,
    /// Default flags of operations.
    pub op_flags: u64,
    /// `FI_ORDER_*`
    pub msg_order: u64,
    /// Order of completions.
    pub comp_order: u64,
    _total_buffered_recv: usize,
    /// Maximum number of posted buffers.
    pub size: usize,
}

/// `struct fi_ep_attr`; its beginning.
#[repr(C)]
pub struct EndpointAttributes {
    /// `FI_EP_*`
    pub r#type: u32,
    /// Number of the protocol; two endpoints understand each other if it is the same.
    pub protocol: u32,
    /// Version of the protocol.
    pub protocol_version: u32,
    /// Maximum length of a message in bytes.
    pub max_msg_size: usize,
}

/// `struct fi_domain_attr`; its beginning.
#[repr(C)]
pub struct DomainAttributes {
    _domain: *mut DomainObject,
    /// Name of the domain: of a network interface, or of a NIC.
    pub name: *mut c_char,
    /// `FI_THREAD_*`
    pub threading: u32,
    /// `FI_PROGRESS_*`
    pub control_progress: u32,
    /// `FI_PROGRESS_*`
    pub data_progress: u32,
    /// `FI_RM_*`
    pub resource_mgmt: u32,
    /// `FI_AV_*`
    pub av_type: u32,
    /// `FI_MR_*`
    pub mr_mode: c_int,
    /// Bytes of a key of memory.
    pub mr_key_size: usize,
}

/// `struct fi_fabric_attr`; its beginning.
#[repr(C)]
pub struct FabricAttributes {
    _fabric: *mut FabricObject,
    /// Name of the network, such as the subnet.
    pub name: *mut c_char,
    /// Name of the provider, such as `tcp;ofi_rxm`.
    pub prov_name: *mut c_char,
    /// Version of the provider.
    pub prov_version: u32,
}

/// `struct fi_info`: an offer of a provider, or what a caller asks for. Only the library allocates it.
#[repr(C)]
pub struct Info {
    /// The next offer.
    pub next: *mut Info,
    /// Capabilities.
    pub caps: u64,
    /// Duties of the caller: demanded, or accepted.
    pub mode: u64,
    /// `FI_SOCKADDR_IN` and others.
    pub addr_format: u32,
    /// Bytes of `src_addr`.
    pub src_addrlen: usize,
    _dest_addrlen: usize,
    /// Address of this side.
    pub src_addr: *mut c_void,
    _dest_addr: *mut c_void,
    _handle: *mut Object,
    /// Attributes of sends.
    pub tx_attr: *mut TransmitAttributes,
    /// Attributes of receives.
    pub rx_attr: *mut ReceiveAttributes,
    /// Attributes of endpoints.
    pub ep_attr: *mut EndpointAttributes,
    /// Attributes of the domain.
    pub domain_attr: *mut DomainAttributes,
    /// Attributes of the fabric.
    pub fabric_attr: *mut FabricAttributes,
}

/// `struct fid`: the beginning of every object.
#[repr(C)]
pub struct Object {
    _fclass: usize,
    _context: *mut c_void,
    /// Functions of every object.
    pub ops: *const ObjectOperations,
}

/// `struct fi_ops`; its beginning.
#[repr(C)]
pub struct ObjectOperations {
    _size: usize,
    /// Ends the object.
    pub close: unsafe extern "C" fn(*mut Object) -> c_int,
    /// Binds another object to it.
    pub bind: unsafe extern "C" fn(*mut Object, *mut Object, u64) -> c_int,
    /// Carries out a command, such as `FI_ENABLE`.
    pub control: unsafe extern "C" fn(*mut Object, c_int, *mut c_void) -> c_int,
}

/// `struct fid_fabric`; its beginning.
#[repr(C)]
pub struct FabricObject {
    /// The object.
    pub fid: Object,
    /// Functions.
    pub ops: *const FabricOperations,
}

/// `struct fi_ops_fabric`; its beginning.
#[repr(C)]
pub struct FabricOperations {
    _size: usize,
    /// Opens a domain.
    pub domain: unsafe extern "C" fn(*mut FabricObject, *mut Info, *mut *mut DomainObject, *mut c_void) -> c_int,
}

/// `struct fid_domain`.
#[repr(C)]
pub struct DomainObject {
    /// The object.
    pub fid: Object,
    /// Functions.
    pub ops: *const DomainOperations,
    /// Functions for memory.
    pub mr: *const MemoryOperations,
}

/// `struct fi_ops_domain`; its beginning.
#[repr(C)]
pub struct DomainOperations {
    _size: usize,
    /// Opens an address vector.
    pub av_open:
        unsafe extern "C" fn(*mut DomainObject, *mut VectorAttributes, *mut *mut VectorObject, *mut c_void) -> c_int,
    /// Opens a completion queue.
    pub cq_open:
        unsafe extern "C" fn(*mut DomainObject, *mut QueueAttributes, *mut *mut QueueObject, *mut c_void) -> c_int,
    /// Opens an endpoint.
    pub endpoint: unsafe extern "C" fn(*mut DomainObject, *mut Info, *mut *mut EndpointObject, *mut c_void) -> c_int,
}

/// `fi_mr_reg` of a domain: domain, address, bytes, access, offset, requested key, flags, result, context.
pub type Register = unsafe extern "C" fn(
    *mut Object,
    *const c_void,
    usize,
    u64,
    u64,
    u64,
    u64,
    *mut *mut MemoryObject,
    *mut c_void,
) -> c_int;

/// `struct fi_ops_mr`.
#[repr(C)]
pub struct MemoryOperations {
    _size: usize,
    /// Registers memory.
    pub reg: Register,
    _regv: Unused,
    /// Registers memory with attributes: domain, attributes, flags, result.
    pub regattr: unsafe extern "C" fn(*mut Object, *const MemoryAttributes, u64, *mut *mut MemoryObject) -> c_int,
}

/// `struct fi_mr_attr`, with room for what later versions append.
#[repr(C)]
pub struct MemoryAttributes {
    /// Memory.
    pub mr_iov: *const Range,
    /// Number of ranges.
    pub iov_count: usize,
    /// Access.
    pub access: u64,
    /// Offset in the memory.
    pub offset: u64,
    /// Requested key.
    pub requested_key: u64,
    _context: *mut c_void,
    _auth_key_size: usize,
    _auth_key: *mut u8,
    /// `FI_HMEM_*`: whose memory it is.
    pub iface: u32,
    // `device` is a union of 8 bytes.
    _before: u32,
    /// `CUdevice` (`device.cuda`).
    pub cuda: c_int,
    _after: u32,
    _room: [u64; 8],
}

/// `struct fid_mr`.
#[repr(C)]
pub struct MemoryObject {
    /// The object.
    pub fid: Object,
    /// Descriptor for operations of this process.
    pub mem_desc: *mut c_void,
    /// Key for operations of peers.
    pub key: u64,
}

/// `struct fi_av_attr`.
#[repr(C)]
pub struct VectorAttributes {
    /// `FI_AV_*`
    pub r#type: u32,
    /// Bits of an address that name a receive context.
    pub rx_ctx_bits: c_int,
    /// Expected number of addresses.
    pub count: usize,
    _ep_per_node: usize,
    _name: *const c_char,
    _map_addr: *mut c_void,
    _flags: u64,
}

/// `struct fid_av`.
#[repr(C)]
pub struct VectorObject {
    /// The object.
    pub fid: Object,
    /// Functions.
    pub ops: *const VectorOperations,
}

/// `struct fi_ops_av`; its beginning.
#[repr(C)]
pub struct VectorOperations {
    _size: usize,
    /// Inserts addresses; returns the number of valid ones.
    pub insert: unsafe extern "C" fn(*mut VectorObject, *const c_void, usize, *mut u64, u64, *mut c_void) -> c_int,
}

/// `struct fi_cq_attr`.
#[repr(C)]
pub struct QueueAttributes {
    /// Number of entries.
    pub size: usize,
    _flags: u64,
    /// `FI_CQ_FORMAT_*`
    pub format: u32,
    /// `FI_WAIT_*`
    pub wait_obj: u32,
    _signaling_vector: c_int,
    _wait_cond: u32,
    _wait_set: *mut c_void,
}

/// `struct fid_cq`.
#[repr(C)]
pub struct QueueObject {
    /// The object.
    pub fid: Object,
    /// Functions.
    pub ops: *const QueueOperations,
}

/// `struct fi_ops_cq`; its beginning.
#[repr(C)]
pub struct QueueOperations {
    _size: usize,
    /// Takes completions; returns their number, or a negative error.
    pub read: unsafe extern "C" fn(*mut QueueObject, *mut c_void, usize) -> isize,
    _readfrom: Unused,
    /// Takes the completion with an error that `read` announced.
    pub readerr: unsafe extern "C" fn(*mut QueueObject, *mut ErrorCompletion, u64) -> isize,
}

/// `struct fi_cq_msg_entry`: a completion.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    /// The `context` of the operation.
    pub op_context: *mut c_void,
    /// Kind of the operation.
    pub flags: u64,
    /// Received bytes.
    pub len: usize,
}

/// `struct fi_cq_err_entry`, with room for what later versions append.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ErrorCompletion {
    /// The `context` of the operation.
    pub op_context: *mut c_void,
    /// Kind of the operation.
    pub flags: u64,
    _message: [u64; 5],
    /// Error number.
    pub err: c_int,
    /// The provider's error number.
    pub prov_errno: c_int,
    _err_data: *mut c_void,
    _err_data_size: usize,
    _room: [u64; 8],
}

/// `struct fid_ep`; its beginning.
#[repr(C)]
pub struct EndpointObject {
    /// The object.
    pub fid: Object,
    /// Functions for options.
    pub ops: *const EndpointOperations,
    /// Functions for addresses.
    pub cm: *const AddressOperations,
    /// Functions for messages.
    pub msg: *const MessageOperations,
    /// Functions for remote memory.
    pub rma: *const RemoteOperations,
}

/// `struct fi_ops_ep`; its beginning.
#[repr(C)]
pub struct EndpointOperations {
    _size: usize,
    _cancel: Unused,
    _getopt: Unused,
    /// Sets an option: endpoint, level, option, value, bytes of the value.
    pub setopt: unsafe extern "C" fn(*mut Object, c_int, c_int, *const c_void, usize) -> c_int,
}

/// `struct fi_ops_cm`; its beginning.
#[repr(C)]
pub struct AddressOperations {
    _size: usize,
    _setname: Unused,
    /// Writes the endpoint's own address and its length.
    pub getname: unsafe extern "C" fn(*mut Object, *mut c_void, *mut usize) -> c_int,
}

/// `struct fi_ops_msg`; its beginning.
#[repr(C)]
pub struct MessageOperations {
    _size: usize,
    /// Posts a buffer.
    pub recv: unsafe extern "C" fn(*mut EndpointObject, *mut c_void, usize, *mut c_void, u64, *mut c_void) -> isize,
    _recvv: Unused,
    _recvmsg: Unused,
    /// Sends a message.
    pub send: unsafe extern "C" fn(*mut EndpointObject, *const c_void, usize, *mut c_void, u64, *mut c_void) -> isize,
}

/// `struct fi_ops_rma`; its beginning.
#[repr(C)]
pub struct RemoteOperations {
    _size: usize,
    /// Reads remote memory: buffer, bytes, descriptor, peer, remote address, key, context.
    pub read:
        unsafe extern "C" fn(*mut EndpointObject, *mut c_void, usize, *mut c_void, u64, u64, u64, *mut c_void) -> isize,
    _readv: Unused,
    _readmsg: Unused,
    _write: Unused,
    _writev: Unused,
    /// Writes remote memory.
    pub writemsg: unsafe extern "C" fn(*mut EndpointObject, *const RemoteMessage, u64) -> isize,
}

/// `struct iovec`: memory of this process.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Range {
    /// First byte.
    pub base: *mut c_void,
    /// Number of bytes.
    pub len: usize,
}

/// `struct fi_rma_iov`: memory of a peer.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RemoteRange {
    /// Address, or offset in the registered memory.
    pub addr: u64,
    /// Number of bytes.
    pub len: usize,
    /// Key.
    pub key: u64,
}

/// `struct fi_msg_rma`: a write.
#[repr(C)]
pub struct RemoteMessage {
    /// Source.
    pub msg_iov: *const Range,
    /// Descriptors of the source.
    pub desc: *mut *mut c_void,
    /// Number of ranges of the source.
    pub iov_count: usize,
    /// Peer.
    pub addr: u64,
    /// Destination.
    pub rma_iov: *const RemoteRange,
    /// Number of ranges of the destination.
    pub rma_iov_count: usize,
    /// Named by the completion.
    pub context: *mut c_void,
    /// Data of the completion at the peer.
    pub data: u64,
}

/// Implements `Default` as all zeros.
macro_rules! zeros {
    ($($name:ident)*) => {
        $(impl Default for $name {
            fn default() -> Self {
                // Safety: a structure of numbers and pointers.
                unsafe { std::mem::zeroed() }
            }
        })*
    };
}

zeros! { VectorAttributes QueueAttributes Completion ErrorCompletion MemoryAttributes }

/// Capability: messages.
pub const FI_MSG: u64 = 1 << 1;
/// Capability: access to remote memory.
pub const FI_RMA: u64 = 1 << 2;
/// Capability: transfers to and from memory of devices.
pub const FI_HMEM: u64 = 1 << 47;
/// Access: this process reads remote memory into it.
pub const FI_READ: u64 = 1 << 8;
/// Access: this process writes from it.
pub const FI_WRITE: u64 = 1 << 9;
/// Kind or access: receive.
pub const FI_RECV: u64 = 1 << 10;
/// Kind or access: send. Also binds an endpoint's sends to a queue.
pub const FI_TRANSMIT: u64 = 1 << 11;
/// Access: peers read it.
pub const FI_REMOTE_READ: u64 = 1 << 12;
/// Access: peers write it.
pub const FI_REMOTE_WRITE: u64 = 1 << 13;
/// Flag: completes when the data is at its destination.
pub const FI_DELIVERY_COMPLETE: u64 = 1 << 28;
/// Mode: the `context` of an operation points to memory of the provider.
pub const FI_CONTEXT: u64 = 1 << 59;
/// Mode: the same, with twice as much memory.
pub const FI_CONTEXT2: u64 = 1 << 52;
/// Order: a message is sent after earlier writes.
pub const FI_ORDER_SAW: u64 = 1 << 7;
/// Any peer, and an invalid address.
pub const FI_ADDR_UNSPEC: u64 = u64::MAX;
/// `enum fi_ep_type`: reliable endpoints without connections.
pub const FI_EP_RDM: u32 = 3;
/// `enum fi_av_type`: addresses are pointers or numbers that the provider chooses.
pub const FI_AV_MAP: u32 = 1;
/// `enum fi_av_type`: addresses are numbers in the order of insertion.
pub const FI_AV_TABLE: u32 = 2;
/// `enum fi_threading`: one thread at a time uses a domain.
pub const FI_THREAD_DOMAIN: u32 = 3;
/// `enum fi_resource_mgmt`: the provider keeps queues from overflowing.
pub const FI_RM_ENABLED: u32 = 2;
/// `enum fi_cq_format`: [`Completion`].
pub const FI_CQ_FORMAT_MSG: u32 = 2;
/// `enum fi_wait_obj`: nothing waits.
pub const FI_WAIT_NONE: u32 = 0;
/// Registration: memory of this process's operations must be registered.
pub const FI_MR_LOCAL: c_int = 1 << 2;
/// Registration: peers use addresses, not offsets.
pub const FI_MR_VIRT_ADDR: c_int = 1 << 4;
/// Registration: the memory must be backed by pages.
pub const FI_MR_ALLOCATED: c_int = 1 << 5;
/// Registration: the provider chooses the key.
pub const FI_MR_PROV_KEY: c_int = 1 << 6;
/// Registration: memory must be bound to an endpoint.
pub const FI_MR_ENDPOINT: c_int = 1 << 9;
/// Registration: memory of devices must be registered, also for operations of this process.
pub const FI_MR_HMEM: c_int = 1 << 10;
/// `enum fi_hmem_iface`: memory of NVIDIA's GPUs.
pub const FI_HMEM_CUDA: u32 = 1;
/// Level of options: an endpoint.
pub const FI_OPT_ENDPOINT: c_int = 0;
/// Option of an endpoint, a `bool`: it may call CUDA, which is the default. Since version 1.18.
pub const FI_OPT_CUDA_API_PERMITTED: c_int = 10;
/// Command of `control`: enables an endpoint, or memory.
pub const FI_ENABLE: c_int = 6;
/// Address format: IPv4.
pub const FI_SOCKADDR_IN: u32 = 2;
/// Address format: IPv6.
pub const FI_SOCKADDR_IN6: u32 = 3;
/// Error: no completion, or no room now.
pub const FI_EAGAIN: isize = 11;
/// Error: no provider offers it.
pub const FI_ENODATA: c_int = 61;
/// Error: a completion with an error is next.
pub const FI_EAVAIL: isize = 259;

functions! {
    /// Functions of libfabric.
    pub struct Libfabric {
        fn fi_version() -> u32;
        fn fi_getinfo(u32, *const c_char, *const c_char, u64, *const Info, *mut *mut Info) -> c_int;
        fn fi_freeinfo(*mut Info);
        fn fi_dupinfo(*const Info) -> *mut Info;
        fn fi_fabric(*mut FabricAttributes, *mut *mut FabricObject, *mut c_void) -> c_int;
        fn fi_strerror(c_int) -> *const c_char;
    }
}
