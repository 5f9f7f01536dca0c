// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors.

use gin_gpu::GpuError;

/// The reason why an operation on a communicator of NCCL failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// `libnccl.so.2` cannot be opened, or lacks a function.
    #[error(
        "cannot use {library}: {reason}; install NCCL {tested} (python3 -m pip install nvidia-nccl-cu13=={tested}) and \
         name its libnccl.so.2 with GIN_NCCL_LIBRARY or LD_LIBRARY_PATH",
        tested = crate::version_text(crate::TESTED)
    )]
    Library {
        /// The name or path of the library.
        library: String,
        /// The reason.
        reason: String,
    },
    /// The library is outside of the tested range.
    #[error(
        "the library is NCCL {}, and kernels linked with the device functions of NCCL {} were tested on {} to {}; use a \
         library of that range, or raise the limit with GIN_NCCL_NEWEST={} at your own risk if the library is newer",
        crate::version_text(*.library),
        crate::version_text(crate::TESTED),
        crate::version_text(crate::TESTED),
        crate::version_text(*.newest),
        crate::version_text(*.library)
    )]
    Version {
        /// The library's version, as its `NCCL_VERSION_CODE`.
        library: u32,
        /// The newest tested version.
        newest: u32,
    },
    /// The value of `GIN_NCCL_NEWEST` is no version.
    #[error("GIN_NCCL_NEWEST={0} is no version such as 2.32.3")]
    BadNewest(String),
    /// A module was not made for these communicators.
    #[error("the module of kernel `{kernel}` cannot be used: {reason}")]
    Module {
        /// The kernel.
        kernel: String,
        /// The reason, and what to do.
        reason: String,
    },
    /// A function of NCCL failed.
    #[error("{function}: {text} ({code}){last}; NCCL_DEBUG=WARN shows more")]
    Call {
        /// The function.
        function: &'static str,
        /// Its result.
        code: i32,
        /// NCCL's text for the result.
        text: String,
        /// NCCL's last error of the communicator, after a colon; empty if there is none.
        last: String,
    },
    /// The communicator has no GPU-initiated networking.
    #[error(
        "the communicator has no GPU-initiated networking (GIN): NCCL has found no network for it; on a machine without a \
         NIC set NCCL_RMA_PLUGIN to gin's plugin (docs/nccl.md)"
    )]
    NoGin,
    /// The communicator's GIN is of a type that kernels of gin-nccl-device do not know.
    #[error("the communicator's GIN has type {0}; kernels know NCCL's proxy (2) and GDAKI (3): set NCCL_GIN_TYPE")]
    UnknownGin(i32),
    /// NCCL gave fewer objects than the program required.
    #[error("the program requires {required} {what}, and NCCL gave {given}")]
    Fewer {
        /// Contexts, signals or counters.
        what: &'static str,
        /// The required number.
        required: u32,
        /// The number given.
        given: u32,
    },
    /// The structure of the communicator does not have the tested layout.
    #[error("NCCL's ncclDevComm does not have the layout of version {}: {reason}", crate::version_text(crate::TESTED))]
    Layout {
        /// The wrong field.
        reason: String,
    },
    /// A call of the CUDA driver failed.
    #[error("cannot {action}: {error}")]
    Driver {
        /// The operation.
        action: &'static str,
        /// The driver's error.
        error: String,
    },
    /// A device failed.
    #[error(transparent)]
    Gpu(#[from] GpuError),
}
