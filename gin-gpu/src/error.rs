// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors of devices.

use super::MemoryKind;

/// An error of a device. Each names the requested value and its limit.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// No loaded kernel has this name.
    #[error("no kernel is named `{name}`{}", suggestions(similar))]
    UnknownKernel {
        /// The name that was asked for.
        name: String,
        /// Names of kernels there are, the most similar first.
        similar: Vec<String>,
    },
    /// Several kernels of different crates have this name.
    #[error("{} kernels are named `{name}`: {}", modules.len(), modules.join(", "))]
    AmbiguousKernel {
        /// The name that was asked for.
        name: String,
        /// Where they stand.
        modules: Vec<String>,
    },
    /// The launch passes more or fewer parameters than the kernel takes.
    #[error("kernel `{kernel}` takes {expected} parameters ({names}); {given} were given")]
    ParameterCount {
        /// The kernel.
        kernel: String,
        /// How many it takes.
        expected: usize,
        /// How many were given.
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
        /// Position of the parameter, from 0.
        position: usize,
        /// Its name.
        name: String,
        /// Its type, as written in the kernel.
        type_name: String,
        /// Its size in bytes.
        expected: usize,
        /// Size of what was given.
        given: usize,
        /// Type of what was given.
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
    /// Kernels that stay are kept from running for a moment, as something else needs that none runs.
    #[error("{device}: kernels that stay are parked for a moment: launch again")]
    Parked {
        /// The device.
        device: String,
    },
    /// A number of a launch is past what the device, or the kernel, allows.
    #[error("{what} of {asked} is past the limit of {limit} of {whose}")]
    LaunchLimit {
        /// Which number.
        what: &'static str,
        /// The requested value.
        asked: u64,
        /// The most there can be.
        limit: u64,
        /// The owner of the limit.
        whose: String,
    },
    /// A grid that is not made of whole clusters.
    #[error("a grid extent of {grid} is no multiple of the cluster's extent of {cluster}")]
    UnevenClusters {
        /// Extent of the grid.
        grid: u32,
        /// Extent of the cluster in the same direction.
        cluster: u32,
    },
    /// A grid, block or cluster with an extent of 0.
    #[error("{what} is empty: {x} x {y} x {z}")]
    EmptyLaunch {
        /// The grid or the block.
        what: &'static str,
        /// Extent.
        x: u32,
        /// Extent.
        y: u32,
        /// Extent.
        z: u32,
    },
    /// A cooperative launch whose blocks cannot all be resident at the same time.
    #[error(
        "a cooperative launch needs all its {blocks} blocks resident at once; {resident} of this shape fit on {device}"
    )]
    NotResident {
        /// Blocks of the grid.
        blocks: u64,
        /// How many fit.
        resident: u64,
        /// The device.
        device: String,
    },
    /// There is not that much memory.
    #[error("cannot allocate {bytes} bytes of {kind} memory: {reason}")]
    OutOfMemory {
        /// The requested bytes.
        bytes: u64,
        /// Which memory.
        kind: MemoryKind,
        /// The device's reason.
        reason: String,
    },
    /// Memory of the program's that a device cannot use.
    #[error("{bytes} bytes at {address:#x} cannot be used as memory of {device}: {reason}")]
    Foreign {
        /// First byte.
        address: u64,
        /// How many.
        bytes: u64,
        /// The device.
        device: String,
        /// Why not.
        reason: String,
    },
    /// A handle of the driver's, made elsewhere, that a device cannot use.
    #[error("this {what} cannot be used by {device}: {reason}")]
    ForeignHandle {
        /// The kind of value.
        what: &'static str,
        /// The device.
        device: String,
        /// Why not.
        reason: String,
    },
    /// There are no addresses for memory at fixed distances.
    #[error("cannot reserve addresses for {slots} ranks, {least} bytes or more each: {reason}")]
    Addresses {
        /// For how many ranks.
        slots: u32,
        /// Least bytes for each.
        least: u64,
        /// The device's reason.
        reason: String,
    },
    /// Addresses of a rank that are in use already.
    #[error("bytes {offset:#x} to {end:#x} of slot {slot} are taken already")]
    AddressesTaken {
        /// First byte.
        offset: u64,
        /// Byte after the last one.
        end: u64,
        /// The slot.
        slot: u32,
    },
    /// An access past the end of an allocation.
    #[error("bytes {offset} to {end} are not in an allocation of {length} bytes")]
    OutOfRange {
        /// First byte.
        offset: u64,
        /// Byte after the last one.
        end: u64,
        /// Length of the allocation.
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
    /// There is a CUDA driver, and it shows no GPU.
    #[error("the CUDA driver (of CUDA {driver}) shows no GPU{}", hidden(visible.as_deref()))]
    NoDevice {
        /// The newest CUDA version that it knows.
        driver: String,
        /// `CUDA_VISIBLE_DEVICES`, if it is set: the driver shows only GPUs that it names.
        visible: Option<String>,
    },
    /// The CUDA driver lacks calls that are needed.
    #[error("the CUDA driver is that of CUDA {found}; at least CUDA {needed} is needed")]
    DriverTooOld {
        /// The newest CUDA version that it knows.
        found: String,
        /// The oldest that is enough.
        needed: String,
    },
    /// No GPU has this number.
    #[error("there is no GPU {ordinal}; {there} are there, numbered from 0")]
    NoSuchDevice {
        /// The number.
        ordinal: usize,
        /// How many there are.
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

/// Returns a function that makes the error of a refused allocation from the reason.
pub(crate) fn out_of_memory<E: ToString>(kind: MemoryKind, bytes: u64) -> impl Fn(E) -> GpuError {
    move |reason| GpuError::OutOfMemory { bytes, kind, reason: reason.to_string() }
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
