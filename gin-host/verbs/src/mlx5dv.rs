// SPDX-License-Identifier: MIT OR Apache-2.0
//! Structures, constants and functions of `infiniband/mlx5dv.h`, as far as gin uses them.

use crate::library::functions;
use crate::verbs::{DeviceContext, VerbsDevice};
use std::ffi::{c_int, c_void};

/// Name of libmlx5 in every distribution.
pub const LIBRARY: &str = "libmlx5.so.1";

/// `struct mlx5dv_devx_obj`: an object that a DevX command created; opaque.
#[repr(C)]
pub struct DevxObject(c_void);

/// `struct mlx5dv_context_attr`: how to open a device.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct DvContextAttributes {
    /// `MLX5DV_CONTEXT_FLAGS_*`
    pub flags: u32,
    /// Which optional fields are valid: none here.
    pub comp_mask: u64,
}

/// `struct mlx5dv_devx_umem`: memory registered for DevX objects.
#[repr(C)]
pub struct DevxUmem {
    /// Number of the registration in commands.
    pub umem_id: u32,
}

/// `struct mlx5dv_devx_umem_in`: memory to register for DevX objects.
#[repr(C)]
pub struct DevxUmemIn {
    /// Address of the first byte, or the offset in a DMA-BUF file.
    pub addr: *mut c_void,
    /// Length in bytes.
    pub size: usize,
    /// The bits of an [`Access`](crate::Access).
    pub access: u32,
    /// Page sizes that the registration may use, as a mask.
    pub pgsz_bitmap: u64,
    /// `MLX5DV_UMEM_MASK_*`: which optional fields are valid.
    pub comp_mask: u64,
    /// The DMA-BUF file.
    pub dmabuf_fd: c_int,
}

/// `struct mlx5dv_devx_uar`: a doorbell page.
#[repr(C)]
pub struct DevxUar {
    /// Address of the doorbell in this process.
    pub reg_addr: *mut c_void,
    _base_addr: *mut c_void,
    /// Number of the page in commands.
    pub page_id: u32,
}

/// `struct mlx5dv_pd`: the protection domain behind an `ibv_pd`.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct DvProtectionDomain {
    /// Number of the protection domain in commands.
    pub pdn: u32,
    /// Which optional fields are valid: none here.
    pub comp_mask: u64,
}

/// `struct mlx5dv_ah`: the address behind an `ibv_ah`.
#[repr(C)]
pub struct DvAddressHandle {
    /// The address vector, which belongs to the address handle.
    pub av: *const WqeAddressVector,
    /// Which optional fields are valid: none here.
    pub comp_mask: u64,
}

/// `struct mlx5_wqe_av`: the address vector of a datagram's work-queue entry.
#[repr(C)]
pub struct WqeAddressVector {
    _before: [u8; 20],
    /// MAC address of the next hop.
    pub rmac: [u8; 6],
}

/// One object of `struct mlx5dv_obj`.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct DvPair {
    /// C's field `in`: the object of libibverbs.
    pub input: *mut c_void,
    /// C's field `out`: the `mlx5dv` structure that the library fills.
    pub output: *mut c_void,
}

/// `struct mlx5dv_obj`: objects that `mlx5dv_init_obj` describes.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct DvObject {
    /// A queue pair.
    pub qp: DvPair,
    /// A completion queue.
    pub cq: DvPair,
    /// A shared receive queue.
    pub srq: DvPair,
    /// A receive work queue.
    pub rwq: DvPair,
    /// Device memory.
    pub dm: DvPair,
    /// An address handle: `ibv_ah`, [`DvAddressHandle`].
    pub ah: DvPair,
    /// A protection domain: `ibv_pd`, [`DvProtectionDomain`].
    pub pd: DvPair,
}

/// `enum mlx5dv_obj_type`: [`DvObject::ah`] is valid.
pub const MLX5DV_OBJ_AH: u64 = 1 << 5;
/// `enum mlx5dv_obj_type`: [`DvObject::pd`] is valid.
pub const MLX5DV_OBJ_PD: u64 = 1 << 6;
/// `enum mlx5dv_context_attr_flags`: open the device with DevX.
pub const MLX5DV_CONTEXT_FLAGS_DEVX: u32 = 1;
/// `enum mlx5dv_devx_umem_in_mask`: [`DevxUmemIn::dmabuf_fd`] is valid.
pub const MLX5DV_UMEM_MASK_DMABUF: u64 = 1;
/// Doorbell page with write combining (BlueFlame).
pub const MLX5DV_UAR_ALLOC_TYPE_BF: u32 = 0;
/// Doorbell page that is not cached.
pub const MLX5DV_UAR_ALLOC_TYPE_NC: u32 = 1;
/// Doorbell page that is not cached and has one user. rdma-core 45 (2023) and later.
pub const MLX5DV_UAR_ALLOC_TYPE_NC_DEDICATED: u32 = 1 << 31;

functions! {
    /// Functions of libmlx5.
    pub struct Mlx5dv {
        fn mlx5dv_is_supported(*mut VerbsDevice) -> bool;
        fn mlx5dv_open_device(*mut VerbsDevice, *mut DvContextAttributes) -> *mut DeviceContext;
        fn mlx5dv_init_obj(*mut DvObject, u64) -> c_int;
        fn mlx5dv_devx_general_cmd(*mut DeviceContext, *const c_void, usize, *mut c_void, usize) -> c_int;
        fn mlx5dv_devx_obj_create(*mut DeviceContext, *const c_void, usize, *mut c_void, usize) -> *mut DevxObject;
        fn mlx5dv_devx_obj_modify(*mut DevxObject, *const c_void, usize, *mut c_void, usize) -> c_int;
        fn mlx5dv_devx_obj_query(*mut DevxObject, *const c_void, usize, *mut c_void, usize) -> c_int;
        fn mlx5dv_devx_obj_destroy(*mut DevxObject) -> c_int;
        fn mlx5dv_devx_umem_reg(*mut DeviceContext, *mut c_void, usize, u32) -> *mut DevxUmem;
        #[optional] fn mlx5dv_devx_umem_reg_ex(*mut DeviceContext, *mut DevxUmemIn) -> *mut DevxUmem;
        fn mlx5dv_devx_umem_dereg(*mut DevxUmem) -> c_int;
        fn mlx5dv_devx_alloc_uar(*mut DeviceContext, u32) -> *mut DevxUar;
        fn mlx5dv_devx_free_uar(*mut DevxUar);
        fn mlx5dv_devx_query_eqn(*mut DeviceContext, u32, *mut u32) -> c_int;
    }
}
