// SPDX-License-Identifier: MIT OR Apache-2.0
//! Functions of NCCL's `nccl.h`, as far as gin uses them.
#![expect(non_snake_case, reason = "the functions have the names of the header")]

use crate::library::functions;
use std::ffi::{c_char, c_int, c_void};

/// Name of NCCL's library. A process that has loaded it, such as one with torch, gets that one by this name.
pub const LIBRARY: &str = "libnccl.so.2";

/// `ncclComm_t`
pub type Comm = *mut c_void;
/// `ncclWindow_t`
pub type Window = *mut c_void;

/// `ncclResult_t`: success.
pub const NCCL_SUCCESS: c_int = 0;
/// `ncclResult_t`: a communicator that does not block has not finished a call.
pub const NCCL_IN_PROGRESS: c_int = 7;
/// `ncclDataType_t`: bytes.
pub const NCCL_UINT8: c_int = 1;

functions! {
    /// Functions of NCCL.
    pub struct Nccl {
        fn ncclGetVersion(*mut c_int) -> c_int;
        fn ncclGetErrorString(c_int) -> *const c_char;
        fn ncclGetLastError(Comm) -> *const c_char;
        fn ncclCommCount(Comm, *mut c_int) -> c_int;
        fn ncclCommUserRank(Comm, *mut c_int) -> c_int;
        fn ncclCommCuDevice(Comm, *mut c_int) -> c_int;
        fn ncclCommGetAsyncError(Comm, *mut c_int) -> c_int;
        // Source, destination, elements, type, root, communicator, stream.
        fn ncclBroadcast(*const c_void, *mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> c_int;
        // Since 2.29.
        #[optional]
        fn ncclWinGetUserPtr(Comm, Window, *mut *mut c_void) -> c_int;
    }
}
