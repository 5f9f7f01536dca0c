// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is used of libibverbs and libmlx5: structures, and functions that are looked up when the libraries are opened.
//!
//! Only fields that are used have names. A test compares their places with rdma-core's headers.

use super::LoadError;
pub use crate::ForeignField;
pub use crate::{
    ACCESS, AddressAttributes, Device, LINK_ETHERNET, MemoryRegion, PORT_ACTIVE, PortAttributes, ProtectionDomain,
};
use crate::{Loaded, foreign, functions};
use std::ffi::{c_char, c_int, c_uint, c_void};

/// `struct ibv_context`, opaque.
#[repr(C)]
pub struct Context(c_void);
/// `struct ibv_ah`, opaque.
#[repr(C)]
pub struct AddressHandle(c_void);
/// `struct mlx5dv_devx_obj`, opaque.
#[repr(C)]
pub struct DevxObject(c_void);

/// `struct mlx5dv_context_attr`
#[repr(C)]
pub struct ContextAttributes {
    pub flags: u32,
    pub comp_mask: u64,
}

/// `struct mlx5dv_devx_umem`
#[repr(C)]
pub struct DevxUmem {
    pub umem_id: u32,
}

/// `struct mlx5dv_devx_umem_in`
#[repr(C)]
pub struct DevxUmemIn {
    pub addr: *mut c_void,
    pub size: usize,
    pub access: u32,
    pub pgsz_bitmap: u64,
    pub comp_mask: u64,
    pub dmabuf_fd: c_int,
}

/// `struct mlx5dv_devx_uar`
#[repr(C)]
pub struct DevxUar {
    pub reg_addr: *mut c_void,
    _base_addr: *mut c_void,
    pub page_id: u32,
}

/// `struct mlx5dv_pd`
#[repr(C)]
#[derive(Default)]
pub struct DvDomain {
    pub pdn: u32,
    pub comp_mask: u64,
}

/// `struct mlx5dv_ah`
#[repr(C)]
pub struct DvAddress {
    pub av: *const AddressVector,
    pub comp_mask: u64,
}

/// `struct mlx5_wqe_av`
#[repr(C)]
pub struct AddressVector {
    _before: [u8; 20],
    pub rmac: [u8; 6],
}

/// A pair of `struct mlx5dv_obj`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DvPair {
    pub input: *mut c_void,
    pub output: *mut c_void,
}

/// `struct mlx5dv_obj`: qp, cq, srq, rwq, dm, ah, pd.
#[repr(C)]
pub struct DvObject(pub [DvPair; 7]);

/// Index of the pair for address handles, and the bit that asks for it.
pub const DV_AH: (usize, u64) = (5, 1 << 5);
/// Index of the pair for protection domains, and the bit that asks for it.
pub const DV_PD: (usize, u64) = (6, 1 << 6);
/// `MLX5DV_CONTEXT_FLAGS_DEVX`
pub const CONTEXT_DEVX: u32 = 1;
/// `MLX5DV_UMEM_MASK_DMABUF`
pub const UMEM_DMABUF: u64 = 1;
/// Kinds of doorbell pages, best first: not cached and nobody else's (later than rdma-core's headers of 2023), not
/// cached, BlueFlame.
pub const UAR_TYPES: [u32; 3] = [1 << 31, 1, 0];

/// The libraries.
pub struct Libraries {
    verbs: Loaded,
    mlx5: Loaded,
}

impl Functions {
    /// Opens the libraries of these names.
    pub fn open(verbs: &str, mlx5: &str) -> Result<Self, LoadError> {
        Self::find(Libraries { verbs: Loaded::open(verbs)?, mlx5: Loaded::open(mlx5)? })
    }
}

functions! {
    verbs ibv_get_device_list(*mut c_int) -> *mut *mut Device;
    verbs ibv_free_device_list(*mut *mut Device);
    verbs ibv_get_device_name(*mut Device) -> *const c_char;
    verbs ibv_close_device(*mut Context) -> c_int;
    verbs ibv_query_port(*mut Context, u8, *mut PortAttributes) -> c_int;
    verbs ibv_query_gid(*mut Context, u8, c_int, *mut [u8; 16]) -> c_int;
    verbs ibv_alloc_pd(*mut Context) -> *mut ProtectionDomain;
    verbs ibv_dealloc_pd(*mut ProtectionDomain) -> c_int;
    verbs ibv_reg_mr_iova2(*mut ProtectionDomain, *mut c_void, usize, u64, c_uint) -> *mut MemoryRegion;
    verbs ?optional ibv_reg_dmabuf_mr(*mut ProtectionDomain, u64, usize, u64, c_int, c_int) -> *mut MemoryRegion;
    verbs ibv_dereg_mr(*mut MemoryRegion) -> c_int;
    verbs ibv_create_ah(*mut ProtectionDomain, *mut AddressAttributes) -> *mut AddressHandle;
    verbs ibv_destroy_ah(*mut AddressHandle) -> c_int;
    mlx5 mlx5dv_is_supported(*mut Device) -> bool;
    mlx5 mlx5dv_open_device(*mut Device, *mut ContextAttributes) -> *mut Context;
    mlx5 mlx5dv_init_obj(*mut DvObject, u64) -> c_int;
    mlx5 mlx5dv_devx_general_cmd(*mut Context, *const c_void, usize, *mut c_void, usize) -> c_int;
    mlx5 mlx5dv_devx_obj_create(*mut Context, *const c_void, usize, *mut c_void, usize) -> *mut DevxObject;
    mlx5 mlx5dv_devx_obj_modify(*mut DevxObject, *const c_void, usize, *mut c_void, usize) -> c_int;
    mlx5 mlx5dv_devx_obj_query(*mut DevxObject, *const c_void, usize, *mut c_void, usize) -> c_int;
    mlx5 mlx5dv_devx_obj_destroy(*mut DevxObject) -> c_int;
    mlx5 mlx5dv_devx_umem_reg(*mut Context, *mut c_void, usize, u32) -> *mut DevxUmem;
    mlx5 ?optional mlx5dv_devx_umem_reg_ex(*mut Context, *mut DevxUmemIn) -> *mut DevxUmem;
    mlx5 mlx5dv_devx_umem_dereg(*mut DevxUmem) -> c_int;
    mlx5 mlx5dv_devx_alloc_uar(*mut Context, u32) -> *mut DevxUar;
    mlx5 mlx5dv_devx_free_uar(*mut DevxUar);
    mlx5 mlx5dv_devx_query_eqn(*mut Context, u32, *mut u32) -> c_int;
}

foreign! {
    MemoryRegion = "struct ibv_mr" { lkey = "lkey", rkey = "rkey" }
    PortAttributes = "struct ibv_port_attr" {
        state = "state", active_mtu = "active_mtu", gid_tbl_len = "gid_tbl_len", lid = "lid", link_layer = "link_layer"
    }
    AddressAttributes = "struct ibv_ah_attr" {
        dgid = "grh.dgid", flow_label = "grh.flow_label", sgid_index = "grh.sgid_index", hop_limit = "grh.hop_limit",
        traffic_class = "grh.traffic_class", dlid = "dlid", sl = "sl", is_global = "is_global", port_num = "port_num"
    }
    ContextAttributes = "struct mlx5dv_context_attr" { flags = "flags", comp_mask = "comp_mask" }
    DevxUmem = "struct mlx5dv_devx_umem" { umem_id = "umem_id" }
    DevxUmemIn = "struct mlx5dv_devx_umem_in" {
        addr = "addr", size = "size", access = "access", pgsz_bitmap = "pgsz_bitmap", comp_mask = "comp_mask",
        dmabuf_fd = "dmabuf_fd"
    }
    DevxUar = "struct mlx5dv_devx_uar" { reg_addr = "reg_addr", page_id = "page_id" }
    DvDomain = "struct mlx5dv_pd" { pdn = "pdn", comp_mask = "comp_mask" }
    DvAddress = "struct mlx5dv_ah" { av = "av", comp_mask = "comp_mask" }
    AddressVector = "struct mlx5_wqe_av" { rmac = "rmac" }
}

/// Sizes of structures that the library writes, or reads whole: ours, and the name in C. Ours may be larger where the
/// library writes.
pub const FOREIGN_SIZES: &[(usize, &str)] = &[
    (size_of::<PortAttributes>(), "struct ibv_port_attr"),
    (size_of::<AddressAttributes>(), "struct ibv_ah_attr"),
    (size_of::<ContextAttributes>(), "struct mlx5dv_context_attr"),
    (size_of::<DevxUmemIn>(), "struct mlx5dv_devx_umem_in"),
    (size_of::<DvDomain>(), "struct mlx5dv_pd"),
    (size_of::<DvAddress>(), "struct mlx5dv_ah"),
    (size_of::<DvObject>(), "struct mlx5dv_obj"),
];

/// Numbers that are used here, with their names in C.
pub const FOREIGN_NUMBERS: &[(u64, &str)] = &[
    (DV_AH.1, "MLX5DV_OBJ_AH"),
    (DV_PD.1, "MLX5DV_OBJ_PD"),
    (DV_AH.0 as u64 * size_of::<DvPair>() as u64, "offsetof(struct mlx5dv_obj, ah)"),
    (DV_PD.0 as u64 * size_of::<DvPair>() as u64, "offsetof(struct mlx5dv_obj, pd)"),
    (PORT_ACTIVE as u64, "IBV_PORT_ACTIVE"),
    (LINK_ETHERNET as u64, "IBV_LINK_LAYER_ETHERNET"),
    (CONTEXT_DEVX as u64, "MLX5DV_CONTEXT_FLAGS_DEVX"),
    (UMEM_DMABUF, "MLX5DV_UMEM_MASK_DMABUF"),
    (UAR_TYPES[1] as u64, "MLX5DV_UAR_ALLOC_TYPE_NC"),
    (UAR_TYPES[2] as u64, "MLX5DV_UAR_ALLOC_TYPE_BF"),
    (ACCESS[0] as u64, "IBV_ACCESS_LOCAL_WRITE"),
    (ACCESS[1] as u64, "IBV_ACCESS_REMOTE_WRITE"),
    (ACCESS[2] as u64, "IBV_ACCESS_REMOTE_READ"),
    (ACCESS[3] as u64, "IBV_ACCESS_REMOTE_ATOMIC"),
    (ACCESS[4] as u64, "IBV_ACCESS_RELAXED_ORDERING"),
];
