// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors of opening the libraries and of calling them.

use std::ffi::c_int;
use std::io;
use std::ptr::NonNull;

/// Why a library cannot be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The loader cannot open the library.
    #[error("{library} cannot be opened ({reason}); it is part of rdma-core")]
    NoLibrary {
        /// Name or path of the library.
        library: String,
        /// The loader's reason.
        reason: String,
    },
    /// The library is too old: it lacks a function.
    #[error("{library} has no function {name}; it is too old")]
    NoFunction {
        /// Name or path of the library.
        library: String,
        /// Name of the function.
        name: String,
    },
}

/// A call of a library that failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CallError {
    /// Name of the function, or what the caller used it for.
    pub call: &'static str,
    /// Error number of the operating system.
    pub errno: i32,
}

impl CallError {
    fn last(call: &'static str) -> Self {
        Self { call, errno: io::Error::last_os_error().raw_os_error().unwrap_or(0) }
    }

    /// Returns the operating system's text for the error number.
    pub fn reason(&self) -> io::Error {
        io::Error::from_raw_os_error(self.errno)
    }
}

/// Returns the operating system's text for the error number of a call of an RDMA library, with the setting that usually
/// causes it.
///
/// ```
/// assert!(gin_verbs::explain(13).contains("/dev/infiniband"));
/// ```
pub fn explain(errno: i32) -> String {
    let error = io::Error::from_raw_os_error(errno);
    let setting = match error.kind() {
        io::ErrorKind::PermissionDenied => {
            ": this user, or the container, usually may not use the files in /dev/infiniband; pass them to the container"
        }
        io::ErrorKind::OutOfMemory => {
            ": usually the limit of locked memory is too small; raise it with `ulimit -l unlimited`"
        }
        _ => "",
    };
    format!("{error}{setting}")
}

/// Converts the result of a function that returns 0, or an error number of either sign, or -1 with the number in
/// `errno`.
///
/// # Errors
/// [`CallError`], if the result is not 0.
pub fn check(call: &'static str, result: c_int) -> Result<(), CallError> {
    match result {
        0 => Ok(()),
        -1 => Err(CallError::last(call)),
        errno => Err(CallError { call, errno: errno.saturating_abs() }),
    }
}

/// Converts the result of a function that returns a pointer, or null with the error number in `errno`.
///
/// # Errors
/// [`CallError`], if the pointer is null.
pub fn non_null<T>(call: &'static str, result: *mut T) -> Result<NonNull<T>, CallError> {
    NonNull::new(result).ok_or_else(|| CallError::last(call))
}
