// SPDX-License-Identifier: MIT OR Apache-2.0
//! The types of NCCL's headers for GIN plugins: `plugin/gin/gin_v14.h` and `nccl_device/net_device.h`.

use crate::abi::{Properties, Start};
use std::ffi::{c_int, c_void};

/// `NCCL_NET_DEVICE_GIN_GDAKI`: kernels drive the queue pairs of a NIC.
pub const DEVICE_GIN_GDAKI: c_int = 3;
/// `NCCL_GIN_GDAKI_VERSION`: the version of the layouts in GPU memory.
pub const GDAKI_VERSION: c_int = 200;
/// `NCCL_NET_MR_FLAG_FORCE_SO`: writes to this region take effect in their order.
pub const FLAG_STRICT_ORDER: u64 = 1;

/// `ncclGinProperties_v14_t`.
#[expect(missing_docs, reason = "the header has the same names")]
#[derive(Clone, Copy, Default, Debug)]
#[repr(C)]
pub struct GinProperties {
    pub supports_strong_signals: bool,
    pub supports_va_signals: bool,
}

/// `ncclGinConfig_v14_t`.
#[expect(missing_docs, reason = "the header has the same names")]
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct GinConfig {
    pub signals: c_int,
    pub counters: c_int,
    pub contexts: c_int,
    pub queue_depth: c_int,
    pub traffic_class: c_int,
    pub backend_version: c_int,
    pub rank_stride: c_int,
}

/// `ncclNetDeviceHandle_v11_t`.
#[expect(missing_docs, reason = "the header has the same names")]
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct DeviceHandle {
    pub net_device_type: c_int,
    pub net_device_version: c_int,
    pub handle: *mut c_void,
    pub size: usize,
    pub needs_proxy_progress: c_int,
}

type Close = unsafe extern "C" fn(*mut c_void) -> c_int;
type Register =
    unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, u64, *mut *mut c_void, *mut *mut c_void) -> c_int;
type RegisterFile = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    usize,
    c_int,
    u64,
    c_int,
    u64,
    *mut *mut c_void,
    *mut *mut c_void,
) -> c_int;

/// `ncclGin_v14_t`.
#[expect(missing_docs, reason = "the header has the same names")]
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Gin {
    pub start: Start,
    pub get_gin_properties: unsafe extern "C" fn(*mut GinProperties) -> c_int,
    pub get_properties: unsafe extern "C" fn(c_int, *mut Properties) -> c_int,
    pub listen: unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, *mut *mut c_void) -> c_int,
    pub connect:
        unsafe extern "C" fn(*mut c_void, *const *const c_void, c_int, c_int, *mut c_void, *mut *mut c_void) -> c_int,
    pub create_context:
        unsafe extern "C" fn(*mut c_void, *const GinConfig, *mut *mut c_void, *mut *mut DeviceHandle) -> c_int,
    pub reg_mr_sym: Register,
    pub reg_mr_sym_dma_buf: RegisterFile,
    pub dereg_mr_sym: unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int,
    pub destroy_context: Close,
    pub close_coll: Close,
    pub close_listen: Close,
    pub gin_progress: Close,
    pub query_last_error: unsafe extern "C" fn(*mut c_void, *mut bool) -> c_int,
    pub finalize: Close,
}

// Safety: a name that is never freed, and functions.
unsafe impl Sync for Gin {}

const _: () = {
    assert!(size_of::<GinProperties>() == 2 && size_of::<GinConfig>() == 28);
    assert!(size_of::<DeviceHandle>() == 32 && size_of::<Gin>() == 17 * 8);
};
