// SPDX-License-Identifier: MIT OR Apache-2.0
//! Structures, constants and functions of `infiniband/verbs.h`, as far as gin uses them.
//!
//! In C the calls that move data are inline functions: they go through a table of the context ([`ContextOperations`]),
//! whose entries belong to the device driver.

use crate::library::functions;
use std::ffi::{c_char, c_int, c_uint, c_void};

/// Name of libibverbs in every distribution.
pub const LIBRARY: &str = "libibverbs.so.1";

/// `struct ibv_device`: an entry of the device list; opaque.
#[repr(C)]
pub struct VerbsDevice(c_void);

/// `struct ibv_pd`: a protection domain; opaque.
#[repr(C)]
pub struct ProtectionDomain(c_void);

/// `struct ibv_ah`: an address handle; opaque.
#[repr(C)]
pub struct AddressHandle(c_void);

/// `struct ibv_cq`: a completion queue; opaque.
#[repr(C)]
pub struct CompletionQueue(c_void);

/// A function that gin does not call.
type Unused = *const c_void;

/// `struct ibv_context_ops`: the driver's functions.
#[repr(C)]
pub struct ContextOperations {
    _before: [Unused; 11],
    /// Takes completions from a queue; returns their number, or a negative number.
    pub poll_cq: Option<unsafe extern "C" fn(*mut CompletionQueue, c_int, *mut WorkCompletion) -> c_int>,
    _between: [Unused; 13],
    /// Posts a list of send requests; on failure stores the first one that it did not post.
    pub post_send:
        Option<unsafe extern "C" fn(*mut QueuePair, *mut SendWorkRequest, *mut *mut SendWorkRequest) -> c_int>,
    /// Posts a list of receive requests; on failure stores the first one that it did not post.
    pub post_recv:
        Option<unsafe extern "C" fn(*mut QueuePair, *mut ReceiveWorkRequest, *mut *mut ReceiveWorkRequest) -> c_int>,
    _after: [Unused; 5],
}

/// `struct ibv_context`: an open device; its beginning.
#[repr(C)]
pub struct DeviceContext {
    _device: *mut VerbsDevice,
    /// The driver's functions.
    pub ops: ContextOperations,
}

/// `struct ibv_qp`: a queue pair; its beginning.
#[repr(C)]
pub struct QueuePair {
    _before: [*mut c_void; 6],
    _handle: u32,
    /// Number of the queue pair.
    pub qp_num: u32,
}

/// `struct ibv_mr`: a memory region; its beginning.
#[repr(C)]
pub struct MemoryRegion {
    _before: [u64; 4],
    _handle: u32,
    /// Key for requests of this process.
    pub lkey: u32,
    /// Key for requests of peers.
    pub rkey: u32,
}

/// `struct ibv_device_attr`, with room for what later versions append.
#[repr(C)]
pub struct DeviceAttributes {
    _fw_ver: [u8; 64],
    _before: [u64; 4],
    _numbers: [u32; 3],
    _max_qp: c_int,
    /// Maximum number of entries of a send or receive queue.
    pub max_qp_wr: c_int,
    _flags: [u32; 3],
    _max_cq: c_int,
    /// Maximum number of entries of a completion queue.
    pub max_cqe: c_int,
    _max_mr: [c_int; 2],
    /// Maximum number of outstanding reads and atomics that a queue pair answers.
    pub max_qp_rd_atom: c_int,
    _max_ee_rd_atom: [c_int; 2],
    /// Maximum number of outstanding reads and atomics that a queue pair initiates.
    pub max_qp_init_rd_atom: c_int,
    _max_ee_init_rd_atom: c_int,
    /// `IBV_ATOMIC_*`
    pub atomic_cap: u32,
    _after: [u32; 14],
    _max_pkeys: u16,
    _local_ca_ack_delay: u8,
    /// Number of ports.
    pub phys_port_cnt: u8,
    _room: [u64; 8],
}

/// `struct ibv_port_attr`, with room for what later versions append.
#[repr(C)]
pub struct PortAttributes {
    /// `IBV_PORT_*`
    pub state: u32,
    _max_mtu: u32,
    /// Code of the largest packet's size.
    pub active_mtu: u32,
    /// Number of entries of the GID table.
    pub gid_tbl_len: c_int,
    _port_cap_flags: u32,
    /// Maximum length of a message in bytes.
    pub max_msg_sz: u32,
    _counters: [u32; 2],
    _pkey_tbl_len: u16,
    /// Local identifier, on InfiniBand.
    pub lid: u16,
    _sm_lid: u16,
    _small: [u8; 8],
    /// `IBV_LINK_LAYER_*`
    pub link_layer: u8,
    _after: [u8; 81],
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

zeros! { DeviceAttributes PortAttributes SendWorkRequest }

impl PortAttributes {
    /// Returns whether the port is up.
    pub fn is_active(&self) -> bool {
        self.state == IBV_PORT_ACTIVE
    }

    /// Returns the port's link layer.
    pub fn link(&self) -> Link {
        if self.link_layer == IBV_LINK_LAYER_ETHERNET { Link::Ethernet } else { Link::InfiniBand }
    }
}

/// Link layer of a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug, derive_more::Display, serde::Serialize, serde::Deserialize, Hash)]
pub enum Link {
    /// InfiniBand: ports have local identifiers.
    InfiniBand,
    /// Ethernet: RoCE.
    Ethernet,
}

bitflags::bitflags! {
    /// `enum ibv_access_flags`: what a NIC may do with registered memory.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct Access: u32 {
        /// The NIC may write what this process's requests fetch.
        const LOCAL_WRITE = 1;
        /// Peers may write.
        const REMOTE_WRITE = 1 << 1;
        /// Peers may read.
        const REMOTE_READ = 1 << 2;
        /// Peers may use atomics.
        const REMOTE_ATOMIC = 1 << 3;
        /// Writes may become visible in any order, also relative to writes to other memory with this access.
        const RELAXED_ORDERING = 1 << 20;
        /// The accesses to rings, to doorbell records and to other memory that peers do not reach.
        const RINGS = Self::LOCAL_WRITE.bits();
        /// The accesses to memory that peers write and read.
        const PEERS = Self::LOCAL_WRITE.bits() | Self::REMOTE_WRITE.bits() | Self::REMOTE_READ.bits();
        /// The accesses to words that peers raise: all, ordered after all earlier writes.
        const SIGNALS = Self::PEERS.bits() | Self::REMOTE_ATOMIC.bits();
        /// The accesses to windows of kernels: all, with relaxed order.
        const PAYLOAD = Self::SIGNALS.bits() | Self::RELAXED_ORDERING.bits();
    }
}

/// `struct ibv_ah_attr`: the way to a peer. C's structure begins with a union of 8-byte words.
#[repr(C, align(8))]
#[derive(Clone, Copy, Default, Debug)]
pub struct AddressHandleAttributes {
    /// `grh.dgid`: GID of the peer.
    pub dgid: [u8; 16],
    /// `grh.flow_label`
    pub flow_label: u32,
    /// `grh.sgid_index`: index of the own GID.
    pub sgid_index: u8,
    /// `grh.hop_limit`: how often a packet may be forwarded.
    pub hop_limit: u8,
    /// `grh.traffic_class`
    pub traffic_class: u8,
    /// Padding of `grh`.
    pub grh_padding: u8,
    /// Local identifier of the peer, on InfiniBand.
    pub dlid: u16,
    /// Service level.
    pub sl: u8,
    /// Low bits of the own local identifier.
    pub src_path_bits: u8,
    /// Limit of the rate.
    pub static_rate: u8,
    /// 1 if packets have a global header (`grh`).
    pub is_global: u8,
    /// Number of the own port.
    pub port_num: u8,
}

/// `struct ibv_qp_cap`: sizes of a queue pair.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct QueuePairCapabilities {
    /// Entries of the send queue.
    pub max_send_wr: u32,
    /// Entries of the receive queue.
    pub max_recv_wr: u32,
    /// Scatter-gather entries of a send request.
    pub max_send_sge: u32,
    /// Scatter-gather entries of a receive request.
    pub max_recv_sge: u32,
    /// Bytes that a send request can hold itself.
    pub max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`: how to create a queue pair.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct QueuePairInitAttributes {
    /// A pointer of the caller's.
    pub qp_context: *mut c_void,
    /// Completion queue of the send queue.
    pub send_cq: *mut CompletionQueue,
    /// Completion queue of the receive queue.
    pub recv_cq: *mut CompletionQueue,
    /// Shared receive queue, or null.
    pub srq: *mut c_void,
    /// Wanted sizes; the library stores the actual ones.
    pub cap: QueuePairCapabilities,
    /// `IBV_QPT_*`
    pub qp_type: u32,
    /// 1 if every send request asks for a completion.
    pub sq_sig_all: c_int,
}

/// `struct ibv_qp_attr`: attributes that a change of a queue pair's state sets.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct QueuePairAttributes {
    /// `IBV_QPS_*`: the new state.
    pub qp_state: u32,
    /// `IBV_QPS_*`: the state that the caller assumes.
    pub cur_qp_state: u32,
    /// Code of the connection's largest packet.
    pub path_mtu: u32,
    /// State of path migration.
    pub path_mig_state: u32,
    /// Key of datagrams.
    pub qkey: u32,
    /// Packet sequence number at which the receive queue starts, 24 bits.
    pub rq_psn: u32,
    /// Packet sequence number at which the send queue starts, 24 bits.
    pub sq_psn: u32,
    /// Number of the peer's queue pair.
    pub dest_qp_num: u32,
    /// [`Access`]: what peers may do.
    pub qp_access_flags: c_uint,
    /// Sizes.
    pub cap: QueuePairCapabilities,
    /// The way to the peer.
    pub ah_attr: AddressHandleAttributes,
    /// The alternate way.
    pub alt_ah_attr: AddressHandleAttributes,
    /// Index of the partition key.
    pub pkey_index: u16,
    /// Index of the alternate way's partition key.
    pub alt_pkey_index: u16,
    /// 1 if an event reports that the send queue is drained.
    pub en_sqd_async_notify: u8,
    /// 1 if the send queue is draining.
    pub sq_draining: u8,
    /// Outstanding reads and atomics that this end initiates.
    pub max_rd_atomic: u8,
    /// Outstanding reads and atomics that this end answers.
    pub max_dest_rd_atomic: u8,
    /// Code of the time after which a peer without a receive buffer is tried again.
    pub min_rnr_timer: u8,
    /// Number of the port.
    pub port_num: u8,
    /// Code of the time after which an unacknowledged packet is sent again.
    pub timeout: u8,
    /// How often an unacknowledged packet is sent again.
    pub retry_cnt: u8,
    /// How often a peer without a receive buffer is tried again; 7 is for ever.
    pub rnr_retry: u8,
    /// Port of the alternate way.
    pub alt_port_num: u8,
    /// Timeout of the alternate way.
    pub alt_timeout: u8,
    /// Limit of the rate in kilobits per second.
    pub rate_limit: u32,
}

/// `struct ibv_sge`: a scatter-gather entry.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct ScatterGatherEntry {
    /// Address of the first byte.
    pub addr: u64,
    /// Length in bytes.
    pub length: u32,
    /// Local key of the memory region.
    pub lkey: u32,
}

/// `wr.rdma` of `struct ibv_send_wr`: remote memory of a write or read.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RdmaOperands {
    /// Address of the first byte.
    pub remote_addr: u64,
    /// Remote key of the memory region.
    pub rkey: u32,
}

/// `wr.atomic` of `struct ibv_send_wr`: remote word and operands of an atomic.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AtomicOperands {
    /// Address of the word.
    pub remote_addr: u64,
    /// Summand, or the value to compare with.
    pub compare_add: u64,
    /// New value of a compare-and-swap.
    pub swap: u64,
    /// Remote key of the memory region.
    pub rkey: u32,
}

/// `wr` of `struct ibv_send_wr`: operands by opcode.
#[repr(C)]
#[derive(Clone, Copy)]
pub union Operands {
    /// Of `IBV_WR_RDMA_WRITE` and `IBV_WR_RDMA_READ`.
    pub rdma: RdmaOperands,
    /// Of `IBV_WR_ATOMIC_*`.
    pub atomic: AtomicOperands,
}

/// `struct ibv_send_wr`: a send request.
#[repr(C)]
#[derive(Clone, Copy, derive_more::Debug)]
#[debug("SendWorkRequest {{ wr_id: {wr_id}, opcode: {opcode}, .. }}")]
pub struct SendWorkRequest {
    /// A number of the caller's, which the completion carries.
    pub wr_id: u64,
    /// The next request of the list, or null.
    pub next: *mut SendWorkRequest,
    /// Scatter-gather entries.
    pub sg_list: *mut ScatterGatherEntry,
    /// Number of scatter-gather entries.
    pub num_sge: c_int,
    /// `IBV_WR_*`
    pub opcode: u32,
    /// `IBV_SEND_*`
    pub send_flags: c_uint,
    _imm_data: u32,
    /// Operands by opcode.
    pub wr: Operands,
    _after: [u64; 7],
}

impl SendWorkRequest {
    /// Returns a message of no bytes.
    pub fn send() -> Self {
        Self { opcode: IBV_WR_SEND, ..Self::default() }
    }

    /// Returns an RDMA write or read (`opcode`) of no bytes.
    pub fn rdma(opcode: u32, remote_addr: u64, rkey: u32) -> Self {
        Self { opcode, wr: Operands { rdma: RdmaOperands { remote_addr, rkey } }, ..Self::default() }
    }

    /// Returns a request to add to a remote word.
    pub fn fetch_and_add(remote_addr: u64, rkey: u32, amount: u64) -> Self {
        let atomic = AtomicOperands { remote_addr, compare_add: amount, swap: 0, rkey };
        Self { opcode: IBV_WR_ATOMIC_FETCH_AND_ADD, wr: Operands { atomic }, ..Self::default() }
    }
}

/// `struct ibv_recv_wr`: a receive request.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct ReceiveWorkRequest {
    /// A number of the caller's, which the completion carries.
    pub wr_id: u64,
    /// The next request of the list, or null.
    pub next: *mut ReceiveWorkRequest,
    /// Scatter-gather entries.
    pub sg_list: *mut ScatterGatherEntry,
    /// Number of scatter-gather entries.
    pub num_sge: c_int,
}

/// `struct ibv_wc`: a completion.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct WorkCompletion {
    /// The number that the caller gave the request.
    pub wr_id: u64,
    /// `IBV_WC_*`
    pub status: u32,
    /// `enum ibv_wc_opcode`; valid only if `status` is [`IBV_WC_SUCCESS`].
    pub opcode: u32,
    /// Error number of the vendor.
    pub vendor_err: u32,
    /// Received bytes; valid only if `status` is [`IBV_WC_SUCCESS`].
    pub byte_len: u32,
    _imm_data: u32,
    _qp_num: u32,
    _src_qp: u32,
    _wc_flags: c_uint,
    _pkey_index: u16,
    _slid: u16,
    _sl: u8,
    _dlid_path_bits: u8,
}

/// `enum ibv_port_state`: the port is up.
pub const IBV_PORT_ACTIVE: u32 = 4;
/// `enum ibv_atomic_cap`: the device has no atomics.
pub const IBV_ATOMIC_NONE: u32 = 0;
/// `enum ibv_qp_type`: reliable connection.
pub const IBV_QPT_RC: u32 = 2;
/// `enum ibv_qp_state`: initialised: takes receive requests.
pub const IBV_QPS_INIT: u32 = 1;
/// `enum ibv_qp_state`: ready to receive.
pub const IBV_QPS_RTR: u32 = 2;
/// `enum ibv_qp_state`: ready to send.
pub const IBV_QPS_RTS: u32 = 3;
/// `enum ibv_qp_state`: in error: every request fails.
pub const IBV_QPS_ERR: u32 = 6;
/// `enum ibv_qp_attr_mask`: [`QueuePairAttributes::qp_state`] is valid.
pub const IBV_QP_STATE: c_int = 1;
/// `enum ibv_qp_attr_mask`: [`QueuePairAttributes::qp_access_flags`] is valid.
pub const IBV_QP_ACCESS_FLAGS: c_int = 1 << 3;
/// `enum ibv_qp_attr_mask`: [`QueuePairAttributes::pkey_index`] is valid.
pub const IBV_QP_PKEY_INDEX: c_int = 1 << 4;
/// `enum ibv_qp_attr_mask`: [`QueuePairAttributes::port_num`] is valid.
pub const IBV_QP_PORT: c_int = 1 << 5;
/// `enum ibv_qp_attr_mask`: [`QueuePairAttributes::ah_attr`] is valid.
pub const IBV_QP_AV: c_int = 1 << 7;
/// `enum ibv_qp_attr_mask`: [`QueuePairAttributes::path_mtu`] is valid.
pub const IBV_QP_PATH_MTU: c_int = 1 << 8;
/// `enum ibv_qp_attr_mask`: [`QueuePairAttributes::timeout`] is valid.
pub const IBV_QP_TIMEOUT: c_int = 1 << 9;
/// `enum ibv_qp_attr_mask`: [`QueuePairAttributes::retry_cnt`] is valid.
pub const IBV_QP_RETRY_CNT: c_int = 1 << 10;
/// `enum ibv_qp_attr_mask`: [`QueuePairAttributes::rnr_retry`] is valid.
pub const IBV_QP_RNR_RETRY: c_int = 1 << 11;
/// `enum ibv_qp_attr_mask`: [`QueuePairAttributes::rq_psn`] is valid.
pub const IBV_QP_RQ_PSN: c_int = 1 << 12;
/// `enum ibv_qp_attr_mask`: [`QueuePairAttributes::max_rd_atomic`] is valid.
pub const IBV_QP_MAX_QP_RD_ATOMIC: c_int = 1 << 13;
/// `enum ibv_qp_attr_mask`: [`QueuePairAttributes::min_rnr_timer`] is valid.
pub const IBV_QP_MIN_RNR_TIMER: c_int = 1 << 15;
/// `enum ibv_qp_attr_mask`: [`QueuePairAttributes::sq_psn`] is valid.
pub const IBV_QP_SQ_PSN: c_int = 1 << 16;
/// `enum ibv_qp_attr_mask`: [`QueuePairAttributes::max_dest_rd_atomic`] is valid.
pub const IBV_QP_MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
/// `enum ibv_qp_attr_mask`: [`QueuePairAttributes::dest_qp_num`] is valid.
pub const IBV_QP_DEST_QPN: c_int = 1 << 20;
/// `enum ibv_wr_opcode`: write to remote memory.
pub const IBV_WR_RDMA_WRITE: u32 = 0;
/// `enum ibv_wr_opcode`: send a message to a receive buffer.
pub const IBV_WR_SEND: u32 = 2;
/// `enum ibv_wr_opcode`: read remote memory.
pub const IBV_WR_RDMA_READ: u32 = 4;
/// `enum ibv_wr_opcode`: add to a remote word and fetch what it held.
pub const IBV_WR_ATOMIC_FETCH_AND_ADD: u32 = 6;
/// `enum ibv_send_flags`: start after all earlier reads and atomics of the queue pair.
pub const IBV_SEND_FENCE: c_uint = 1;
/// `enum ibv_send_flags`: ask for a completion.
pub const IBV_SEND_SIGNALED: c_uint = 1 << 1;
/// `enum ibv_send_flags`: copy the data into the request when it is posted.
pub const IBV_SEND_INLINE: c_uint = 1 << 3;
/// `enum ibv_wc_status`: the request was carried out.
pub const IBV_WC_SUCCESS: u32 = 0;
/// `enum ibv_wc_status`: the queue pair was in error before the request was carried out.
pub const IBV_WC_WR_FLUSH_ERR: u32 = 5;
/// `enum ibv_wc_status`: the peer's NIC did not acknowledge in time, however often the packet was sent.
pub const IBV_WC_RETRY_EXC_ERR: u32 = 12;
/// `enum ibv_wc_status`: the peer had no receive buffer, however often the packet was sent.
pub const IBV_WC_RNR_RETRY_EXC_ERR: u32 = 13;
/// `enum ibv_wc_status`: the peer's NIC did not answer in time.
pub const IBV_WC_RESP_TIMEOUT_ERR: u32 = 20;
/// Ethernet, in [`PortAttributes::link_layer`].
pub const IBV_LINK_LAYER_ETHERNET: u8 = 2;

functions! {
    /// Functions of libibverbs.
    pub struct Verbs {
        fn ibv_get_device_list(*mut c_int) -> *mut *mut VerbsDevice;
        fn ibv_free_device_list(*mut *mut VerbsDevice);
        fn ibv_get_device_name(*mut VerbsDevice) -> *const c_char;
        fn ibv_open_device(*mut VerbsDevice) -> *mut DeviceContext;
        fn ibv_close_device(*mut DeviceContext) -> c_int;
        fn ibv_query_device(*mut DeviceContext, *mut DeviceAttributes) -> c_int;
        fn ibv_query_port(*mut DeviceContext, u8, *mut PortAttributes) -> c_int;
        fn ibv_query_gid(*mut DeviceContext, u8, c_int, *mut [u8; 16]) -> c_int;
        fn ibv_alloc_pd(*mut DeviceContext) -> *mut ProtectionDomain;
        fn ibv_dealloc_pd(*mut ProtectionDomain) -> c_int;
        fn ibv_reg_mr(*mut ProtectionDomain, *mut c_void, usize, c_int) -> *mut MemoryRegion;
        #[optional] fn ibv_reg_mr_iova2(*mut ProtectionDomain, *mut c_void, usize, u64, c_uint) -> *mut MemoryRegion;
        #[optional] fn ibv_reg_dmabuf_mr(*mut ProtectionDomain, u64, usize, u64, c_int, c_int) -> *mut MemoryRegion;
        fn ibv_dereg_mr(*mut MemoryRegion) -> c_int;
        fn ibv_create_ah(*mut ProtectionDomain, *mut AddressHandleAttributes) -> *mut AddressHandle;
        fn ibv_destroy_ah(*mut AddressHandle) -> c_int;
        fn ibv_create_cq(*mut DeviceContext, c_int, *mut c_void, *mut c_void, c_int) -> *mut CompletionQueue;
        fn ibv_destroy_cq(*mut CompletionQueue) -> c_int;
        fn ibv_create_qp(*mut ProtectionDomain, *mut QueuePairInitAttributes) -> *mut QueuePair;
        fn ibv_modify_qp(*mut QueuePair, *mut QueuePairAttributes, c_int) -> c_int;
        fn ibv_destroy_qp(*mut QueuePair) -> c_int;
    }
}
