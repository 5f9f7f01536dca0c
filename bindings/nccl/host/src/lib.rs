// SPDX-License-Identifier: MIT OR Apache-2.0
//! Communicators and windows of NCCL, for kernels in Rust that call NCCL's own device functions.
//!
//! | type | is |
//! | --- | --- |
//! | [`Library`] | `libnccl.so.2`, opened at run time, its version checked |
//! | [`DeviceComm`] | an `ncclDevComm` of the program's `ncclComm_t`, with the status blocks of its kernels |
//! | [`Window`] | memory of `ncclMemAlloc`, registered with all ranks |
//! | [`Kernel`] | a kernel of a module that `gin_build::KernelBuilder::nccl` made, its version checked |
//!
//! The program makes the `ncclComm_t`, by NCCL itself or by [`Library::init_rank`]. Creation of a device communicator
//! and of a window is collective: all ranks call, each in its own thread or process.
//!
//! The example `nccl_ring` of this crate runs kernels on all GPUs of a machine, and exchanges with kernels in CUDA C++.
//! Ranks may share a GPU: NCCL allows it if `NCCL_MULTI_RANK_GPU_ENABLE=1` is in the environment. Then no rank may call
//! NCCL while a kernel on its GPU waits for that rank.
#![warn(unreachable_pub)]

#[doc(hidden)]
pub mod abi;
mod comm;
mod error;
mod kernel;
mod library;
mod window;

pub use gin_device::Deadline;
/// GPUs, their streams and launches.
pub use gin_gpu as gpu;

pub use comm::{DeviceComm, Requirements};
pub use error::NcclError;
pub use kernel::Kernel;
pub use library::{Library, RawComm, UniqueId};
pub use window::Window;

/// The version of NCCL whose device functions kernels are linked with, as its `NCCL_VERSION_CODE`.
pub const TESTED: u32 = 23007;

/// The newest version of the library that was tested with them.
pub const NEWEST: u32 = 23007;

/// Returns a version as NCCL prints it, such as 2.30.7.
fn version_text(code: u32) -> String {
    format!("{}.{}.{}", code / 10000, code / 100 % 100, code % 100)
}

/// Reads a version as NCCL prints it.
fn version_code(text: &str) -> Option<u32> {
    let mut parts = text.split('.').map(|part| part.parse::<u32>().ok().filter(|&number| number < 100));
    let code = parts.next()?? * 10000 + parts.next()?? * 100 + parts.next()??;
    parts.next().is_none().then_some(code)
}

/// Checks that a library is in the tested range.
///
/// # Errors
/// [`NcclError::Version`] with both versions.
fn check_version(library: u32, newest: u32) -> Result<(), NcclError> {
    if (TESTED..=newest).contains(&library) { Ok(()) } else { Err(NcclError::Version { library, newest }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_outside_of_the_tested_range_is_refused_with_both_versions() {
        assert!(check_version(TESTED, NEWEST).is_ok() && check_version(23102, 23203).is_ok());
        let old = check_version(22907, NEWEST).unwrap_err().to_string();
        assert!(old.contains("2.29.7") && old.contains("2.30.7 to 2.30.7"), "{old}");
        let new = check_version(23203, NEWEST).unwrap_err().to_string();
        assert!(new.contains("NCCL 2.32.3,") && new.contains("GIN_NCCL_NEWEST=2.32.3"), "{new}");
    }

    #[test]
    fn a_version_is_read_as_nccl_prints_it() {
        assert_eq!(version_code("2.30.7"), Some(TESTED));
        assert_eq!(version_code(&version_text(23203)), Some(23203));
        assert!(["2.30", "2.30.7.1", "2.x.7", "", "2.300.7"].iter().all(|text| version_code(text).is_none()));
    }
}
