// SPDX-License-Identifier: MIT OR Apache-2.0
//! The types of NCCL's headers for RMA plugins: `plugin/rma/rma_v14.h`, `plugin/net/net_v12.h`, `nccl_common.h`.

use std::ffi::{c_char, c_int, c_ulong, c_void};

/// `ncclSuccess`.
pub const SUCCESS: c_int = 0;
/// `ncclUnhandledCudaError`.
pub const CUDA_ERROR: c_int = 1;
/// `ncclSystemError`.
pub const SYSTEM_ERROR: c_int = 2;
/// `ncclInternalError`.
pub const INTERNAL_ERROR: c_int = 3;
/// `ncclInvalidArgument`.
pub const INVALID_ARGUMENT: c_int = 4;

/// `NCCL_PTR_HOST`.
pub const PTR_HOST: c_int = 1;
/// `NCCL_PTR_CUDA`.
pub const PTR_CUDA: c_int = 2;
/// `NCCL_PTR_DMABUF`.
pub const PTR_DMABUF: c_int = 4;

/// `NCCL_NET_MR_FLAG_SIGNAL_NEVER_RESET`: only the plugin writes the words of this region.
pub const FLAG_NEVER_RESET: u64 = 2;

/// `NCCL_NET_SIGNAL_OP_INC`: adds 1, whatever the value.
pub const SIGNAL_INC: u32 = 1;
/// `NCCL_NET_SIGNAL_OP_ADD`.
pub const SIGNAL_ADD: u32 = 2;

/// `NCCL_NET_HANDLE_MAXSIZE`.
pub const HANDLE_BYTES: usize = 128;

/// `NCCL_NET_DEVICE_GIN_PROXY`: kernels pass requests to a thread of NCCL.
pub const DEVICE_GIN_PROXY: c_int = 2;

/// `ncclDebugLogger_t`: level, subsystems, file, line, format.
pub type Logger = unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...);

/// `ncclNetProperties_v12_t`.
#[expect(missing_docs, reason = "the header has the same names")]
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Properties {
    pub name: *const c_char,
    pub pci_path: *const c_char,
    pub guid: u64,
    pub ptr_support: c_int,
    pub reg_is_global: c_int,
    pub force_flush: c_int,
    pub speed: c_int,
    pub port: c_int,
    pub latency: f32,
    pub max_comms: c_int,
    pub max_recvs: c_int,
    pub net_device_type: c_int,
    pub net_device_version: c_int,
    pub virtual_devices: c_int,
    pub virtual_device: [c_int; 8],
    pub max_p2p_bytes: usize,
    pub max_coll_bytes: usize,
    pub max_multi_request_size: c_int,
    pub rail_id: i16,
    pub plane_id: i16,
}

/// `ncclRmaConfig_v14_t`.
#[expect(missing_docs, reason = "the header has the same names")]
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Config {
    pub contexts: c_int,
    pub traffic_class: c_int,
    pub rank_stride: c_int,
}

type Close = unsafe extern "C" fn(*mut c_void) -> c_int;
type Register = unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, u64, *mut *mut c_void) -> c_int;
type RegisterFile =
    unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, u64, c_int, u64, *mut *mut c_void) -> c_int;

/// The functions before the data calls, the same in all versions.
#[expect(missing_docs, reason = "the header has the same names")]
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Control {
    pub get_properties: unsafe extern "C" fn(c_int, *mut Properties) -> c_int,
    pub listen: unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, *mut *mut c_void) -> c_int,
    pub connect:
        unsafe extern "C" fn(*mut c_void, *const *const c_void, c_int, c_int, *mut c_void, *mut *mut c_void) -> c_int,
    pub create_context: unsafe extern "C" fn(*mut c_void, *const Config, *mut *mut c_void) -> c_int,
    pub reg_mr_sym: Register,
    pub reg_mr_sym_dma_buf: RegisterFile,
    pub dereg_mr_sym: unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int,
    pub destroy_context: Close,
    pub close_coll: Close,
    pub close_listen: Close,
}

/// The functions after the data calls, the same in all versions.
#[expect(missing_docs, reason = "the header has the same names")]
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Completion {
    pub iflush: unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, u32, *mut *mut c_void) -> c_int,
    pub test: unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_int) -> c_int,
    pub rma_progress: Close,
    pub query_last_error: unsafe extern "C" fn(*mut c_void, *mut bool) -> c_int,
    pub finalize: Close,
}

/// The functions that begin each table.
#[expect(missing_docs, reason = "the header has the same names")]
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Start {
    pub name: *const c_char,
    pub init: unsafe extern "C" fn(*mut *mut c_void, u64, Option<Logger>) -> c_int,
    pub devices: unsafe extern "C" fn(*mut c_int) -> c_int,
}

/// The type of a data call: the arguments of all, the arguments of this one, and flags if the version has them.
macro_rules! data_call {
    ($($own:ty),*; $($flags:ty)?) => {
        unsafe extern "C" fn(
            *mut c_void,
            c_int,
            u64,
            *mut c_void,
            usize,
            u64,
            *mut c_void,
            u32,
            $($own,)*
            $($flags,)?
            *mut *mut c_void,
        ) -> c_int
    };
}

macro_rules! data {
    ($(#[$doc:meta])* $name:ident $(, $flags:ty)?) => {
        $(#[$doc])*
        #[expect(missing_docs, reason = "the header has the same names")]
        #[derive(Clone, Copy, Debug)]
        #[repr(C)]
        pub struct $name {
            pub iput: data_call!(; $($flags)?),
            pub iput_signal: data_call!(u64, *mut c_void, u64, u32, bool; $($flags)?),
            pub iget: data_call!(; $($flags)?),
        }
    };
}

data! {
    /// The data calls of version 14.
    Data14
}

data! {
    /// The data calls since version 15, with flags for options before the request.
    Data15, u32
}

/// `ncclRma_v14_t`, with [`Data14`]; `ncclRma_v15_t`, with [`Data15`].
#[expect(missing_docs, reason = "the header has the same names")]
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Rma<D> {
    pub start: Start,
    pub control: Control,
    pub data: D,
    pub completion: Completion,
}

/// `ncclRma_v16_t`.
#[expect(missing_docs, reason = "the header has the same names")]
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Rma16 {
    pub start: Start,
    pub get_rma_properties: unsafe extern "C" fn(*mut c_void, *mut bool) -> c_int,
    pub control: Control,
    pub data: Data15,
    pub completion: Completion,
}

// Safety of all: names that are never freed, and functions.
unsafe impl<D: Sync> Sync for Rma<D> {}
// Safety: as above.
unsafe impl Sync for Rma16 {}

const _: () = {
    assert!(size_of::<Properties>() == 128);
    assert!(size_of::<Config>() == 12);
    assert!(size_of::<Rma<Data14>>() == 21 * 8 && size_of::<Rma<Data15>>() == 21 * 8 && size_of::<Rma16>() == 22 * 8);
};
