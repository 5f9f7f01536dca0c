// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors of devices.

use super::MemoryKind;
use gin_virtual::{explain_refusal, memory_cgroup};
use rustix::io::Errno;

/// An error of a device. Each names the requested value and its limit.
///
/// ```
/// use gin_gpu::{Device, Memory, MemoryKind, virt::VirtualDevice};
/// use std::sync::Arc;
///
/// let device: Arc<dyn Device> = VirtualDevice::memory_only(0);
/// let memory = Memory::new(&device, MemoryKind::Device, 16)?;
/// let error = memory.write(9, &[7u64]).unwrap_err();
/// assert_eq!(error.to_string(), "bytes 9 to 17 are not in an allocation of 16 bytes");
/// # Ok::<(), gin_gpu::GpuError>(())
/// ```
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// No loaded kernel has this name.
    #[error("no kernel is named `{name}`{}", suggestions(similar))]
    UnknownKernel {
        /// The name that was asked for.
        name: String,
        /// The names of the most similar kernels, the most similar first.
        similar: Vec<String>,
    },
    /// Several kernels of different crates have this name.
    #[error("{} kernels are named `{name}`: {}", modules.len(), modules.join(", "))]
    AmbiguousKernel {
        /// The name that was asked for.
        name: String,
        /// The modules that contain them.
        modules: Vec<String>,
    },
    /// The launch passes more or fewer parameters than the kernel takes.
    #[error("kernel `{kernel}` takes {expected} parameters ({names}); {given} were given")]
    ParameterCount {
        /// The kernel.
        kernel: String,
        /// The number of parameters that it takes.
        expected: usize,
        /// The number of arguments that were passed.
        given: usize,
        /// Their names.
        names: String,
    },
    /// A parameter has another size than the kernel expects.
    #[error(
        "parameter {position} of kernel `{kernel}`, `{name}: {type_name}`, has {expected} bytes; a `{given_type}` of \
         {given} bytes was given"
    )]
    ParameterSize {
        /// The kernel.
        kernel: String,
        /// The position of the parameter, from 0.
        position: usize,
        /// Its name.
        name: String,
        /// Its type, as written in the kernel.
        type_name: String,
        /// Its size in bytes.
        expected: usize,
        /// The size of the argument in bytes.
        given: usize,
        /// The type of the argument.
        given_type: &'static str,
    },
    /// A parameter has another type than the kernel expects, of the same size.
    #[error("parameter {position} of kernel `{kernel}` is `{name}: {type_name}`; a `{given_type}` was given")]
    ParameterType {
        /// The kernel.
        kernel: String,
        /// The position of the parameter, from 0.
        position: usize,
        /// Its name.
        name: String,
        /// Its type, as written in the kernel.
        type_name: String,
        /// The type of the argument.
        given_type: &'static str,
    },
    /// A kernel was compiled with other layouts than this host.
    #[error(
        "kernel `{kernel}` was built for version {kernel_abi} of the shared layouts; this host has version {host_abi}"
    )]
    AbiMismatch {
        /// The kernel, or the module that holds it.
        kernel: String,
        /// Its version.
        kernel_abi: u32,
        /// The host's version.
        host_abi: u32,
    },
    /// Resident kernels may not run at the moment, because another operation requires that none runs.
    #[error("{device}: resident kernels are parked for a moment: launch again")]
    Parked {
        /// The device.
        device: String,
    },
    /// A number of a launch is past what the device, or the kernel, allows.
    #[error("{what} of {asked} is past the limit of {limit} of {whose}")]
    LaunchLimit {
        /// The name of the number.
        what: &'static str,
        /// The requested value.
        asked: u64,
        /// The limit.
        limit: u64,
        /// The owner of the limit.
        whose: String,
    },
    /// A grid that is not made of whole clusters.
    #[error("a grid extent of {grid} is no multiple of the cluster's extent of {cluster}")]
    UnevenClusters {
        /// The extent of the grid.
        grid: u32,
        /// The extent of the cluster in the same direction.
        cluster: u32,
    },
    /// A grid, block or cluster with an extent of 0.
    #[error("{what} is empty: {x} x {y} x {z}")]
    EmptyLaunch {
        /// The grid or the block.
        what: &'static str,
        /// The extent.
        x: u32,
        /// The extent.
        y: u32,
        /// The extent.
        z: u32,
    },
    /// A cooperative launch whose blocks cannot all be resident at the same time.
    #[error(
        "a cooperative launch needs all its {blocks} blocks resident at once; {resident} of this shape fit on {device}"
    )]
    NotResident {
        /// The blocks of the grid.
        blocks: u64,
        /// The number of blocks that fit.
        resident: u64,
        /// The device.
        device: String,
    },
    /// A kernel that cannot start before the one before it on the stream has ended.
    #[error("kernel `{kernel}` cannot be launched as a dependent one: {reason}")]
    NotDependent {
        /// The kernel.
        kernel: String,
        /// The reason.
        reason: String,
    },
    /// The memory could not be allocated.
    #[error("cannot allocate {bytes} bytes of {kind} memory: {reason}")]
    OutOfMemory {
        /// The requested bytes.
        bytes: u64,
        /// The kind of memory.
        kind: MemoryKind,
        /// The device's reason.
        reason: String,
    },
    /// Memory of the program that a device cannot use.
    #[error("{bytes} bytes at {address:#x} cannot be used as memory of {device}: {reason}")]
    Foreign {
        /// The first byte.
        address: u64,
        /// The number of bytes.
        bytes: u64,
        /// The device.
        device: String,
        /// The reason.
        reason: String,
    },
    /// A driver handle of the program that a device cannot use.
    #[error("this {what} cannot be used by {device}: {reason}")]
    ForeignHandle {
        /// The kind of value.
        what: &'static str,
        /// The device.
        device: String,
        /// The reason.
        reason: String,
    },
    /// There are no addresses for memory at fixed distances.
    #[error("cannot reserve addresses for {slots} ranks, {least} bytes or more each: {reason}")]
    Addresses {
        /// The number of ranks.
        slots: u32,
        /// The fewest bytes for each rank.
        least: u64,
        /// The device's reason.
        reason: String,
    },
    /// Addresses of a rank that are already in use.
    #[error("bytes {offset:#x} to {end:#x} of slot {slot} are taken already")]
    AddressesTaken {
        /// The first byte.
        offset: u64,
        /// The byte after the last one.
        end: u64,
        /// The slot.
        slot: u32,
    },
    /// An access past the end of an allocation.
    #[error("bytes {offset} to {end} are not in an allocation of {length} bytes")]
    OutOfRange {
        /// The first byte.
        offset: u64,
        /// The byte after the last one.
        end: u64,
        /// The length of the allocation.
        length: u64,
    },
    /// A kernel ended with an error.
    #[error("kernel `{kernel}` failed: {reason}")]
    Kernel {
        /// The kernel.
        kernel: String,
        /// The cause.
        reason: String,
    },
    /// The device cannot do this.
    #[error("{device} cannot {what}")]
    Unsupported {
        /// The device.
        device: String,
        /// The unsupported operation.
        what: &'static str,
    },
    /// There is no CUDA driver, or it does not start.
    #[error("no CUDA driver found: {reason}")]
    NoDriver {
        /// The missing part.
        reason: String,
    },
    /// There is a CUDA driver, but it shows no GPU.
    #[error("the CUDA driver (of CUDA {driver}) shows no GPU{}", hidden(visible.as_deref()))]
    NoDevice {
        /// The newest CUDA version that it supports.
        driver: String,
        /// `CUDA_VISIBLE_DEVICES`, if it is set. The driver shows only GPUs that it names.
        visible: Option<String>,
    },
    /// The CUDA driver lacks calls that gin requires.
    #[error("the CUDA driver is that of CUDA {found}; at least CUDA {needed} is needed")]
    DriverTooOld {
        /// The newest CUDA version that it supports.
        found: String,
        /// The oldest version that gin supports.
        needed: String,
    },
    /// This process may use GPUs, but gin cannot.
    #[error("there are GPUs that gin cannot use: {reason}; to use virtual GPUs, set CUDA_VISIBLE_DEVICES to -1")]
    Unusable {
        /// The error of the driver or of the kernels.
        reason: String,
    },
    /// No GPU has this number.
    #[error("there is no GPU {ordinal}; {there} are there, numbered from 0")]
    NoSuchDevice {
        /// The number.
        ordinal: usize,
        /// The number of GPUs.
        there: usize,
    },
    /// The driver cannot load a module.
    #[error("{device} cannot load a module: {reason}{}{log}", if log.is_empty() { "" } else { "\n" })]
    Module {
        /// The device.
        device: String,
        /// The error.
        reason: String,
        /// The log of the driver's compiler.
        log: String,
    },
    /// The device's driver reports an error.
    #[error("{context}: {reason}")]
    Driver {
        /// The operation that failed.
        context: &'static str,
        /// The driver's reason.
        reason: String,
    },
}

gin_abi::debug_as_display!(GpuError, crate::placement::PlacementError, crate::registry::KeyError);

/// Returns a function that makes the error of a refused allocation from the reason.
pub(crate) fn out_of_memory<E: ToString>(kind: MemoryKind, bytes: u64) -> impl Fn(E) -> GpuError {
    move |reason| GpuError::OutOfMemory { bytes, kind, reason: reason.to_string() }
}

/// The system's refusal of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct CallError {
    /// Name of the call.
    pub(crate) call: &'static str,
    /// The system's error.
    pub(crate) errno: Errno,
}

impl CallError {
    /// Returns a function that makes the error of a call.
    pub(crate) fn of(call: &'static str) -> impl Fn(Errno) -> Self {
        move |errno| Self { call, errno }
    }

    /// Returns the call, the system's error, and the limit or setting that caused it, for `bytes` bytes of memory.
    pub(crate) fn explain(self, bytes: u64) -> String {
        format!("{}: {}", self.call, explain_refusal(&self.errno.into(), bytes))
    }
}

/// Returns a function that makes the error of host memory that the system refused. It names the call, and the limit
/// that was met.
pub(crate) fn out_of_host_memory(kind: MemoryKind, bytes: u64) -> impl Fn(CallError) -> GpuError {
    let refuse = out_of_memory(kind, bytes);
    move |cause| refuse(cause.explain(bytes))
}

/// Checks that the memory cgroup of this process has `bytes` bytes at all. Past its limit the system would end the
/// process when the memory is touched.
pub(crate) fn check_memory_cgroup(kind: MemoryKind, bytes: u64) -> Result<(), GpuError> {
    // No process of this size runs in a smaller cgroup, so small allocations need no look at files.
    const SMALL: u64 = 16 << 20;
    match if bytes > SMALL { memory_cgroup() } else { None } {
        Some((limit, file)) if bytes > limit => {
            Err(out_of_memory(kind, bytes)(format!("the memory cgroup of this process allows {limit} bytes ({file})")))
        }
        _ => Ok(()),
    }
}

fn hidden(visible: Option<&str>) -> String {
    visible.map_or(String::new(), |visible| format!("; CUDA_VISIBLE_DEVICES is `{visible}`"))
}

fn suggestions(similar: &[String]) -> String {
    match similar {
        [] => "; no kernels are linked into this program".to_owned(),
        names => format!("; there is {}", names.join(", ")),
    }
}
