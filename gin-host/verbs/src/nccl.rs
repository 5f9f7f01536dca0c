// SPDX-License-Identifier: MIT OR Apache-2.0
//! Functions of NCCL's `nccl.h`, as far as gin uses them.
#![expect(non_snake_case, reason = "the functions have the names of the header")]

use crate::library::functions;
use std::ffi::{c_char, c_int, c_void};

/// Name of NCCL's library. A process that has loaded it, such as one with torch, gets that one by this name.
pub const LIBRARY: &str = "libnccl.so.2";
/// The variable with the path of the library.
pub const LIBRARY_VARIABLE: &str = "GIN_NCCL_LIBRARY";

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
/// `ncclDataType_t`: numbers of 4 bytes.
pub const NCCL_FLOAT32: c_int = 7;
/// `ncclRedOp_t`: sums.
pub const NCCL_SUM: c_int = 0;

/// Returns the text of a number of `ncclGetVersion`: 22907 is 2.29.7, and 2708, from before 2.9, is 2.7.8.
#[must_use]
pub fn version_text(version: c_int) -> String {
    let [major, minor] = if version < 10000 { [1000, 10] } else { [10000, 100] };
    format!("{}.{}.{}", version / major, version / 100 % minor, version % 100)
}

/// `ncclUniqueId`
#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId(pub [u8; 128]);

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

functions! {
    /// The functions of NCCL that make communicators and run collectives.
    pub struct Collectives {
        fn ncclGetVersion(*mut c_int) -> c_int;
        fn ncclGetErrorString(c_int) -> *const c_char;
        fn ncclGetUniqueId(*mut UniqueId) -> c_int;
        // Communicator, ranks, id, rank.
        fn ncclCommInitRank(*mut Comm, c_int, UniqueId, c_int) -> c_int;
        // Source, destination, elements, type, operation, communicator, stream.
        fn ncclAllReduce(*const c_void, *mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> c_int;
        // Memory, elements, type, peer, communicator, stream.
        fn ncclSend(*const c_void, usize, c_int, c_int, Comm, *mut c_void) -> c_int;
        fn ncclRecv(*mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> c_int;
        fn ncclGroupStart() -> c_int;
        fn ncclGroupEnd() -> c_int;
    }
}
