// SPDX-License-Identifier: MIT OR Apache-2.0
//! `libnccl.so.2`, opened at run time.

use crate::abi::{CommProperties, DevComm, DevCommRequirements};
use crate::{NEWEST, NcclError, check_version, version_code, version_text};
use gin_gpu::cuda::CudaDevice;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::sync::Arc;

/// The variable with the path of the library.
const PATH: &str = "GIN_NCCL_LIBRARY";
/// The variable with the newest version that is accepted, instead of the newest tested one.
const ACCEPTED: &str = "GIN_NCCL_NEWEST";

/// NCCL's `ncclComm_t`.
pub type RawComm = *mut c_void;

/// NCCL's `ncclUniqueId`, which the ranks of a communicator share.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId(pub [u8; 128]);

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId")
    }
}

type Result_ = c_int;

macro_rules! functions {
    ($($field:ident: $symbol:literal = fn($($argument:ty),*) -> $result:ty;)*) => {
        /// The functions of NCCL that gin calls.
        pub(crate) struct Functions {
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Functions {
            /// # Safety
            /// - The library is NCCL, and stays open.
            unsafe fn of(library: &libloading::Library) -> Result<Self, libloading::Error> {
                // Safety: the types are those of nccl.h and nccl_device.h.
                unsafe { Ok(Self { $($field: *library.get($symbol)?,)* }) }
            }
        }
    };
}

functions! {
    unique_id: b"ncclGetUniqueId\0" = fn(*mut UniqueId) -> Result_;
    init_rank: b"ncclCommInitRank\0" = fn(*mut RawComm, c_int, UniqueId, c_int) -> Result_;
    destroy: b"ncclCommDestroy\0" = fn(RawComm) -> Result_;
    error_text: b"ncclGetErrorString\0" = fn(Result_) -> *const c_char;
    last_error: b"ncclGetLastError\0" = fn(RawComm) -> *const c_char;
    async_error: b"ncclCommGetAsyncError\0" = fn(RawComm, *mut Result_) -> Result_;
    properties: b"ncclCommQueryProperties\0" = fn(RawComm, *mut CommProperties) -> Result_;
    dev_comm_create: b"ncclDevCommCreate\0" = fn(RawComm, *const DevCommRequirements, *mut DevComm) -> Result_;
    dev_comm_destroy: b"ncclDevCommDestroy\0" = fn(RawComm, *const DevComm) -> Result_;
    allocate: b"ncclMemAlloc\0" = fn(*mut *mut c_void, usize) -> Result_;
    free: b"ncclMemFree\0" = fn(*mut c_void) -> Result_;
    register: b"ncclCommWindowRegister\0" = fn(RawComm, *mut c_void, usize, *mut *mut c_void, c_int) -> Result_;
    deregister: b"ncclCommWindowDeregister\0" = fn(RawComm, *mut c_void) -> Result_;
}

/// NCCL's library.
pub struct Library {
    pub(crate) functions: Functions,
    version: u32,
    _library: libloading::Library,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").field("version", &self.version).finish_non_exhaustive()
    }
}

impl Library {
    /// Opens the library that `GIN_NCCL_LIBRARY` names, or `libnccl.so.2` where the loader finds it. A library that the
    /// process has loaded already is used.
    ///
    /// # Errors
    /// [`NcclError::Library`]; [`NcclError::Version`] if the library is outside of the tested range, whose end
    /// `GIN_NCCL_NEWEST` can raise; [`NcclError::BadNewest`].
    pub fn open() -> Result<Arc<Self>, NcclError> {
        let newest = match std::env::var(ACCEPTED) {
            Ok(text) => version_code(&text).ok_or(NcclError::BadNewest(text))?,
            Err(_) => NEWEST,
        };
        let name = std::env::var(PATH).unwrap_or_else(|_| "libnccl.so.2".to_owned());
        let fault = |error: libloading::Error| NcclError::Library { library: name.clone(), reason: error.to_string() };
        // Safety: NCCL's initialisers have no conditions.
        let library = unsafe { libloading::Library::new(&name) }.map_err(fault)?;
        let mut version: c_int = 0;
        // Safety: the type is that of nccl.h. It writes one integer.
        let result = unsafe {
            let get: libloading::Symbol<'_, unsafe extern "C" fn(*mut c_int) -> Result_> =
                library.get(b"ncclGetVersion\0").map_err(fault)?;
            get(&raw mut version)
        };
        if result != 0 {
            let reason = format!("ncclGetVersion returned {result}");
            return Err(NcclError::Library { library: name, reason });
        }
        // First, because an older library lacks functions.
        check_version(version as u32, newest)?;
        // Safety: it is NCCL of a tested version, and is kept open.
        let functions = unsafe { Functions::of(&library) }.map_err(fault)?;
        Ok(Arc::new(Self { functions, version: version as u32, _library: library }))
    }

    /// Returns the version, as `NCCL_VERSION_CODE`: 23007 for 2.30.7.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Returns the version as NCCL prints it, such as 2.30.7.
    pub fn version_text(&self) -> String {
        version_text(self.version)
    }

    /// Makes an id for the ranks of a communicator.
    ///
    /// # Errors
    /// [`NcclError::Call`].
    pub fn unique_id(&self) -> Result<UniqueId, NcclError> {
        let mut id = UniqueId([0; 128]);
        // Safety: it writes an id.
        self.check("ncclGetUniqueId", std::ptr::null_mut(), unsafe { (self.functions.unique_id)(&raw mut id) })?;
        Ok(id)
    }

    /// Makes a communicator on this GPU. All ranks call, each in its own thread or process.
    ///
    /// # Errors
    /// [`NcclError::Call`], [`NcclError::Driver`].
    pub fn init_rank(&self, device: &CudaDevice, id: UniqueId, rank: u32, ranks: u32) -> Result<RawComm, NcclError> {
        enter(device)?;
        let mut comm = std::ptr::null_mut();
        // Safety: it writes one pointer.
        let result = unsafe { (self.functions.init_rank)(&raw mut comm, ranks as c_int, id, rank as c_int) };
        self.check("ncclCommInitRank", std::ptr::null_mut(), result)?;
        Ok(comm)
    }

    /// Ends a communicator.
    ///
    /// # Safety
    /// - The communicator is alive, and its device communicators and windows are gone.
    ///
    /// # Errors
    /// [`NcclError::Call`].
    pub unsafe fn destroy(&self, comm: RawComm) -> Result<(), NcclError> {
        // Safety: the caller's promise.
        self.check("ncclCommDestroy", std::ptr::null_mut(), unsafe { (self.functions.destroy)(comm) })
    }

    /// Checks that NCCL has found no error of a communicator, such as one of its network.
    ///
    /// # Safety
    /// - The communicator is alive.
    ///
    /// # Errors
    /// [`NcclError::Call`] with the error.
    pub unsafe fn check_async(&self, comm: RawComm) -> Result<(), NcclError> {
        let mut error = 0;
        // Safety: the caller's promise; it writes one integer.
        let result = unsafe { (self.functions.async_error)(comm, &raw mut error) };
        self.check("ncclCommGetAsyncError", comm, result)?;
        self.check("ncclCommGetAsyncError", comm, error)
    }

    /// Turns a result of NCCL into an error with its texts.
    pub(crate) fn check(&self, function: &'static str, comm: RawComm, code: c_int) -> Result<(), NcclError> {
        if code == 0 {
            return Ok(());
        }
        // Safety: NCCL returns a static text, and one of the communicator, or null.
        let text = |text: *const c_char| {
            if text.is_null() { String::new() } else { unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned() }
        };
        // Safety: both calls take any value; the communicator is null or alive.
        let (error, last) = unsafe { ((self.functions.error_text)(code), (self.functions.last_error)(comm)) };
        let last = text(last);
        let last = if last.is_empty() { last } else { format!(": {last}") };
        Err(NcclError::Call { function, code, text: text(error), last })
    }
}

/// Makes the GPU's primary context current, which NCCL's calls act on.
pub(crate) fn enter(device: &CudaDevice) -> Result<(), NcclError> {
    // Safety: gin's context lives until the process ends.
    let result = unsafe { cudarc::driver::sys::cuCtxSetCurrent(device.raw_context().cast()) };
    result
        .result()
        .map_err(|error| NcclError::Driver { action: "make the GPU's context current", error: error.to_string() })
}
