// SPDX-License-Identifier: MIT OR Apache-2.0
//! NCCL's log.

use crate::abi::Logger;
use std::ffi::{CString, c_int, c_ulong};
use std::sync::{Mutex, PoisonError};

/// `NCCL_INIT | NCCL_NET`.
const SUBSYSTEMS: c_ulong = 0x11;

/// The function that NCCL passed to `init`.
static LOGGER: Mutex<Option<Logger>> = Mutex::new(None);

/// Writes to this log from now on.
pub(crate) fn set(logger: Option<Logger>) {
    *LOGGER.lock().unwrap_or_else(PoisonError::into_inner) = logger;
}

/// Writes a line that NCCL prints with `NCCL_DEBUG=WARN`.
pub(crate) fn warn(text: &str) {
    write(2, text);
}

/// Writes a line that NCCL prints with `NCCL_DEBUG=INFO`.
pub(crate) fn info(text: &str) {
    write(3, text);
}

fn write(level: c_int, text: &str) {
    let logger = *LOGGER.lock().unwrap_or_else(PoisonError::into_inner);
    // A text of errors has no zero byte, unless a name of the driver has one.
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    if let Some(logger) = logger {
        // Safety: NCCL's function, which lives as long as the process; the format takes one string.
        unsafe { logger(level, SUBSYSTEMS, c"gin".as_ptr(), 0, c"gin: %s".as_ptr(), text.as_ptr()) };
    }
}
