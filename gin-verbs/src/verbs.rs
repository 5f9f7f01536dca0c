// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is used of libibverbs beside [what others use too](crate).
//!
//! The calls that move data are inline functions in C's header: they go through a table of the context, whose entries are
//! the device driver's.

pub use crate::{
    ACCESS, AddressAttributes, Device, LINK_ETHERNET, LoadError, MemoryRegion, PORT_ACTIVE, PortAttributes,
    ProtectionDomain,
};
use crate::{Loaded, foreign, functions};
use std::ffi::{c_char, c_int, c_uint, c_void};

/// A function of another type.
type Other = *const c_void;

/// `struct ibv_context_ops`
#[repr(C)]
pub struct ContextOperations {
    _before: [Other; 11],
    pub poll_cq: Option<unsafe extern "C" fn(*mut CompletionQueue, c_int, *mut WorkCompletion) -> c_int>,
    _between: [Other; 13],
    pub post_send: Option<unsafe extern "C" fn(*mut Queue, *mut SendRequest, *mut *mut SendRequest) -> c_int>,
    pub post_recv: Option<unsafe extern "C" fn(*mut Queue, *mut ReceiveRequest, *mut *mut ReceiveRequest) -> c_int>,
    _after: [Other; 5],
}

/// `struct ibv_context`, its beginning.
#[repr(C)]
pub struct Context {
    _device: *mut Device,
    pub ops: ContextOperations,
}

/// `struct ibv_cq`, opaque.
#[repr(C)]
pub struct CompletionQueue(c_void);

/// `struct ibv_qp`, its beginning.
#[repr(C)]
pub struct Queue {
    _before: [*mut c_void; 6],
    _handle: u32,
    pub qp_num: u32,
}

/// `struct ibv_device_attr`
#[repr(C)]
pub struct DeviceAttributes {
    _fw_ver: [u8; 64],
    _before: [u64; 4],
    _numbers: [u32; 3],
    _max_qp: c_int,
    pub max_qp_wr: c_int,
    _flags: [u32; 3],
    _max_cq: c_int,
    pub max_cqe: c_int,
    _max_mr: [c_int; 2],
    pub max_qp_rd_atom: c_int,
    _max_ee_rd_atom: [c_int; 2],
    pub max_qp_init_rd_atom: c_int,
    _max_ee_init_rd_atom: c_int,
    pub atomic_cap: u32,
    _after: [u32; 14],
    _max_pkeys: u16,
    _local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
    // What later versions may add.
    _room: [u64; 8],
}

/// `struct ibv_qp_cap`
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct Limits {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`
#[repr(C)]
pub struct QueueInit {
    pub qp_context: *mut c_void,
    pub send_cq: *mut CompletionQueue,
    pub recv_cq: *mut CompletionQueue,
    pub srq: *mut c_void,
    pub cap: Limits,
    pub qp_type: u32,
    pub sq_sig_all: c_int,
}

/// `struct ibv_qp_attr`
#[repr(C)]
#[derive(Default)]
pub struct QueueAttributes {
    pub qp_state: u32,
    pub _cur_qp_state: u32,
    pub path_mtu: u32,
    pub _path_mig_state: u32,
    pub _qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: c_uint,
    pub _cap: Limits,
    pub ah_attr: AddressAttributes,
    pub _alt_ah_attr: AddressAttributes,
    pub pkey_index: u16,
    pub _alt_pkey_index: u16,
    pub _en_sqd_async_notify: u8,
    pub _sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub _alt_port_num: u8,
    pub _alt_timeout: u8,
    pub _rate_limit: u32,
}

/// `struct ibv_sge`
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct Piece {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

/// `struct ibv_send_wr`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SendRequest {
    pub wr_id: u64,
    pub next: *mut SendRequest,
    pub sg_list: *mut Piece,
    pub num_sge: c_int,
    pub opcode: u32,
    pub send_flags: c_uint,
    _imm_data: u32,
    pub remote_addr: u64,
    /// Of an atomic, the first half of what is added.
    pub rkey: u32,
    rest_of_add: u32,
    _swap: u64,
    pub atomic_rkey: u32,
    _rest_of_wr: u32,
    _after: [u64; 7],
}

impl SendRequest {
    /// A request of this kind without pieces.
    pub fn new(opcode: u32) -> Self {
        Self {
            wr_id: 0,
            next: std::ptr::null_mut(),
            sg_list: std::ptr::null_mut(),
            num_sge: 0,
            opcode,
            send_flags: 0,
            _imm_data: 0,
            remote_addr: 0,
            rkey: 0,
            rest_of_add: 0,
            _swap: 0,
            atomic_rkey: 0,
            _rest_of_wr: 0,
            _after: [0; 7],
        }
    }

    /// A request to add to the word at an address of a peer's.
    pub fn add(address: u64, key: u32, amount: u64) -> Self {
        let [first, .., last] = if cfg!(target_endian = "little") {
            [amount as u32, (amount >> 32) as u32]
        } else {
            [(amount >> 32) as u32, amount as u32]
        };
        Self { remote_addr: address, rkey: first, rest_of_add: last, atomic_rkey: key, ..Self::new(OPCODE[3]) }
    }
}

/// `struct ibv_recv_wr`
#[repr(C)]
pub struct ReceiveRequest {
    pub wr_id: u64,
    pub next: *mut ReceiveRequest,
    pub sg_list: *mut Piece,
    pub num_sge: c_int,
}

/// `struct ibv_wc`
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct WorkCompletion {
    pub wr_id: u64,
    pub status: u32,
    /// Means something only where `status` is 0.
    pub opcode: u32,
    pub vendor_err: u32,
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

/// `IBV_QPT_RC`
pub const RELIABLE: u32 = 2;
/// `enum ibv_qp_state`: init, ready to receive, ready to send, error.
pub const STATE: [u32; 4] = [1, 2, 3, 6];
/// `enum ibv_wr_opcode`: RDMA write, send, RDMA read, fetch and add.
pub const OPCODE: [u32; 4] = [0, 2, 4, 6];
/// `enum ibv_atomic_cap`: none, atomic among those of this NIC, atomic also to what others do.
pub const ATOMICS: [u32; 3] = [0, 1, 2];
/// `enum ibv_send_flags`: fence, signalled, inline.
pub const FLAG: [c_uint; 3] = [1, 1 << 1, 1 << 3];
/// `enum ibv_qp_attr_mask`: what is given with the step to init, to ready to receive, and to ready to send.
pub const GIVEN: [c_int; 3] = [
    1 | 1 << 4 | 1 << 5 | 1 << 3,
    1 | 1 << 7 | 1 << 8 | 1 << 20 | 1 << 12 | 1 << 17 | 1 << 15,
    1 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 16 | 1 << 13,
];
/// `IBV_QP_STATE`
pub const GIVEN_STATE: c_int = 1;
/// `enum ibv_wc_status`: success, flushed, retries exceeded, retries after "not ready" exceeded, no answer in time.
pub const COMPLETED: [u32; 5] = [0, 5, 12, 13, 20];

/// The library.
pub struct Libraries {
    verbs: Loaded,
}

impl Functions {
    /// Opens the library of this name.
    pub fn open(verbs: &str) -> Result<Self, LoadError> {
        Self::find(Libraries { verbs: Loaded::open(verbs)? })
    }
}

functions! {
    verbs ibv_get_device_list(*mut c_int) -> *mut *mut Device;
    verbs ibv_free_device_list(*mut *mut Device);
    verbs ibv_get_device_name(*mut Device) -> *const c_char;
    verbs ibv_open_device(*mut Device) -> *mut Context;
    verbs ibv_close_device(*mut Context) -> c_int;
    verbs ibv_query_device(*mut Context, *mut DeviceAttributes) -> c_int;
    verbs ibv_query_port(*mut Context, u8, *mut PortAttributes) -> c_int;
    verbs ibv_query_gid(*mut Context, u8, c_int, *mut [u8; 16]) -> c_int;
    verbs ibv_alloc_pd(*mut Context) -> *mut ProtectionDomain;
    verbs ibv_dealloc_pd(*mut ProtectionDomain) -> c_int;
    verbs ibv_reg_mr(*mut ProtectionDomain, *mut c_void, usize, c_int) -> *mut MemoryRegion;
    verbs ?optional ibv_reg_dmabuf_mr(*mut ProtectionDomain, u64, usize, u64, c_int, c_int) -> *mut MemoryRegion;
    verbs ibv_dereg_mr(*mut MemoryRegion) -> c_int;
    verbs ibv_create_cq(*mut Context, c_int, *mut c_void, *mut c_void, c_int) -> *mut CompletionQueue;
    verbs ibv_destroy_cq(*mut CompletionQueue) -> c_int;
    verbs ibv_create_qp(*mut ProtectionDomain, *mut QueueInit) -> *mut Queue;
    verbs ibv_modify_qp(*mut Queue, *mut QueueAttributes, c_int) -> c_int;
    verbs ibv_destroy_qp(*mut Queue) -> c_int;
}

foreign! {
    Context = "struct ibv_context" { ops = "ops" }
    ContextOperations = "struct ibv_context_ops" { poll_cq = "poll_cq", post_send = "post_send", post_recv = "post_recv" }
    Queue = "struct ibv_qp" { qp_num = "qp_num" }
    DeviceAttributes = "struct ibv_device_attr" {
        max_qp_wr = "max_qp_wr", max_cqe = "max_cqe", max_qp_rd_atom = "max_qp_rd_atom",
        max_qp_init_rd_atom = "max_qp_init_rd_atom", atomic_cap = "atomic_cap", phys_port_cnt = "phys_port_cnt"
    }
    Limits = "struct ibv_qp_cap" {
        max_send_wr = "max_send_wr", max_recv_wr = "max_recv_wr", max_send_sge = "max_send_sge",
        max_recv_sge = "max_recv_sge", max_inline_data = "max_inline_data"
    }
    QueueInit = "struct ibv_qp_init_attr" {
        qp_context = "qp_context", send_cq = "send_cq", recv_cq = "recv_cq", srq = "srq", cap = "cap", qp_type = "qp_type",
        sq_sig_all = "sq_sig_all"
    }
    QueueAttributes = "struct ibv_qp_attr" {
        qp_state = "qp_state", path_mtu = "path_mtu", rq_psn = "rq_psn", sq_psn = "sq_psn", dest_qp_num = "dest_qp_num",
        qp_access_flags = "qp_access_flags", ah_attr = "ah_attr", pkey_index = "pkey_index",
        max_rd_atomic = "max_rd_atomic", max_dest_rd_atomic = "max_dest_rd_atomic", min_rnr_timer = "min_rnr_timer",
        port_num = "port_num", timeout = "timeout", retry_cnt = "retry_cnt", rnr_retry = "rnr_retry"
    }
    Piece = "struct ibv_sge" { addr = "addr", length = "length", lkey = "lkey" }
    SendRequest = "struct ibv_send_wr" {
        wr_id = "wr_id", next = "next", sg_list = "sg_list", num_sge = "num_sge", opcode = "opcode",
        send_flags = "send_flags", remote_addr = "wr.rdma.remote_addr", rkey = "wr.rdma.rkey",
        atomic_rkey = "wr.atomic.rkey"
    }
    ReceiveRequest = "struct ibv_recv_wr" { wr_id = "wr_id", next = "next", sg_list = "sg_list", num_sge = "num_sge" }
    WorkCompletion = "struct ibv_wc" {
        wr_id = "wr_id", status = "status", opcode = "opcode", vendor_err = "vendor_err", byte_len = "byte_len"
    }
    MemoryRegion = "struct ibv_mr" { lkey = "lkey", rkey = "rkey" }
    PortAttributes = "struct ibv_port_attr" {
        state = "state", active_mtu = "active_mtu", gid_tbl_len = "gid_tbl_len", max_msg_sz = "max_msg_sz", lid = "lid",
        link_layer = "link_layer"
    }
    AddressAttributes = "struct ibv_ah_attr" {
        dgid = "grh.dgid", flow_label = "grh.flow_label", sgid_index = "grh.sgid_index", hop_limit = "grh.hop_limit",
        traffic_class = "grh.traffic_class", dlid = "dlid", sl = "sl", is_global = "is_global", port_num = "port_num"
    }
}

/// Sizes of structures that the library reads or writes whole: ours, the name in C, and whether ours must be just as long;
/// it may be longer where only the library writes.
pub const FOREIGN_SIZES: &[(usize, &str, bool)] = &[
    (size_of::<DeviceAttributes>(), "struct ibv_device_attr", false),
    (size_of::<PortAttributes>(), "struct ibv_port_attr", false),
    (size_of::<AddressAttributes>(), "struct ibv_ah_attr", true),
    (size_of::<Limits>(), "struct ibv_qp_cap", true),
    (size_of::<QueueInit>(), "struct ibv_qp_init_attr", true),
    (size_of::<QueueAttributes>(), "struct ibv_qp_attr", true),
    (size_of::<Piece>(), "struct ibv_sge", true),
    (size_of::<SendRequest>(), "struct ibv_send_wr", true),
    (size_of::<ReceiveRequest>(), "struct ibv_recv_wr", true),
    (size_of::<WorkCompletion>(), "struct ibv_wc", true),
];

/// Numbers that are used here, with their names in C.
pub const FOREIGN_NUMBERS: &[(u64, &str)] = &[
    (RELIABLE as u64, "IBV_QPT_RC"),
    (STATE[0] as u64, "IBV_QPS_INIT"),
    (STATE[1] as u64, "IBV_QPS_RTR"),
    (STATE[2] as u64, "IBV_QPS_RTS"),
    (STATE[3] as u64, "IBV_QPS_ERR"),
    (OPCODE[0] as u64, "IBV_WR_RDMA_WRITE"),
    (OPCODE[1] as u64, "IBV_WR_SEND"),
    (OPCODE[2] as u64, "IBV_WR_RDMA_READ"),
    (OPCODE[3] as u64, "IBV_WR_ATOMIC_FETCH_AND_ADD"),
    (std::mem::offset_of!(SendRequest, remote_addr) as u64, "offsetof(struct ibv_send_wr, wr.atomic.remote_addr)"),
    (std::mem::offset_of!(SendRequest, rkey) as u64, "offsetof(struct ibv_send_wr, wr.atomic.compare_add)"),
    (ATOMICS[0] as u64, "IBV_ATOMIC_NONE"),
    (ATOMICS[1] as u64, "IBV_ATOMIC_HCA"),
    (ATOMICS[2] as u64, "IBV_ATOMIC_GLOB"),
    (FLAG[0] as u64, "IBV_SEND_FENCE"),
    (FLAG[1] as u64, "IBV_SEND_SIGNALED"),
    (FLAG[2] as u64, "IBV_SEND_INLINE"),
    (GIVEN[0] as u64, "(IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)"),
    (
        GIVEN[1] as u64,
        "(IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | \
         IBV_QP_MIN_RNR_TIMER)",
    ),
    (
        GIVEN[2] as u64,
        "(IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC)",
    ),
    (GIVEN_STATE as u64, "IBV_QP_STATE"),
    (COMPLETED[0] as u64, "IBV_WC_SUCCESS"),
    (COMPLETED[1] as u64, "IBV_WC_WR_FLUSH_ERR"),
    (COMPLETED[2] as u64, "IBV_WC_RETRY_EXC_ERR"),
    (COMPLETED[3] as u64, "IBV_WC_RNR_RETRY_EXC_ERR"),
    (COMPLETED[4] as u64, "IBV_WC_RESP_TIMEOUT_ERR"),
    (PORT_ACTIVE as u64, "IBV_PORT_ACTIVE"),
    (LINK_ETHERNET as u64, "IBV_LINK_LAYER_ETHERNET"),
    (ACCESS[0] as u64, "IBV_ACCESS_LOCAL_WRITE"),
    (ACCESS[1] as u64, "IBV_ACCESS_REMOTE_WRITE"),
    (ACCESS[2] as u64, "IBV_ACCESS_REMOTE_READ"),
    (ACCESS[3] as u64, "IBV_ACCESS_REMOTE_ATOMIC"),
];
