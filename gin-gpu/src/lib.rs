// SPDX-License-Identifier: MIT OR Apache-2.0
//! Devices: memory, streams, kernels and launches, behind one family of traits.
//!
//! | trait or type | is |
//! | --- | --- |
//! | [`Device`] | one GPU: memory, copies, functions, streams |
//! | [`MemorySharing`], [`NicAccess`] | what it shares with other ranks and with a NIC |
//! | [`Memory`], [`MemorySlice`] | an allocation, and part of one |
//! | [`flat`] | memory of several devices at fixed distances |
//! | [`Function`] | a kernel that can be launched, and what it takes |
//! | [`Stream`] | work in order: launches, copies, events |
//! | [`KernelArg`] | what can be passed to a kernel |
//! | [`virt`] | the virtual GPU |
//! | `cuda` | NVIDIA GPUs, with the feature `cuda` |
//! | [`MappedPages`], [`MemoryFile`] | what it shares with a NIC |
//! | [`SharedFile`] | what it shares with other processes of the host |
//! | [`copier`] | copies that a progress thread starts |
//!
//! A launch checks the name, the number and the sizes of the parameters, and the limits of kernel and device, before
//! anything runs.

mod arg;
pub mod copier;
#[doc(hidden)]
pub mod copy;
#[cfg(feature = "cuda")]
pub mod cuda;
mod devices;
mod error;
pub mod flat;
mod io;
mod launch;
mod mapped;
mod memory;
pub mod placement;
#[doc(hidden)]
pub mod quarantine;
#[doc(hidden)]
pub mod registry;
#[doc(hidden)]
pub mod resident;
#[doc(hidden)]
pub mod share;
mod shared;
pub mod virt;

pub use arg::{Argument, KernelArg, Plain};
pub use devices::Devices;
pub use error::GpuError;
pub use io::{Keep, MappedPages, MemoryFile, whole_pages};
pub use launch::{LaunchConfig, check_launch};
pub use memory::{Memory, MemoryKind, MemorySlice, RawMemory};
pub use shared::SharedFile;

#[doc(hidden)]
pub use gin_boot::rt;
#[doc(hidden)]
pub use gin_boot::wire;

pub(crate) use gin_boot::lock;

use placement::Locality;
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// The kind of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum DeviceKind {
    /// Threads of this process that run kernels as ordinary code.
    Virtual,
    /// An NVIDIA GPU.
    Cuda,
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Virtual => "virtual",
            Self::Cuda => "cuda",
        })
    }
}

/// Limits of launches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Most threads a block.
    pub threads_per_block: u32,
    /// Most threads a block in each direction.
    pub block: [u32; 3],
    /// Most blocks a grid in each direction.
    pub grid: [u32; 3],
    /// Most bytes of dynamic shared memory a block.
    pub dynamic_shared: u32,
    /// Most blocks a cluster; 1 if there are no clusters.
    pub cluster_blocks: u32,
}

impl Limits {
    /// The limits of CUDA GPUs: those of compute capability 8.0 and later, with 227 KiB of shared memory and without
    /// clusters, which came with 9.0.
    pub const CUDA: Self = Self {
        threads_per_block: 1024,
        block: [1024, 1024, 64],
        grid: [i32::MAX as u32, 65535, 65535],
        dynamic_shared: 227 << 10,
        cluster_blocks: 1,
    };
}

/// One parameter of a kernel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Parameter {
    /// Its name; empty if the module does not say.
    pub name: String,
    /// Its type as written in the kernel; empty if the module does not say.
    pub type_name: String,
    /// Its size in bytes.
    pub size: usize,
}

/// A kernel that can be launched.
#[derive(Clone, Debug)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// Its parameters, in order.
    pub parameters: Vec<Parameter>,
    /// Most threads a block, if it was compiled with launch bounds.
    pub max_threads: Option<u32>,
    /// Version of the shared layouts that it was built with.
    pub abi: u32,
    /// The device's handle of it.
    pub handle: Arc<dyn Any + Send + Sync>,
}

/// Where kernels come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ModuleSource<'a> {
    /// The kernels that are linked into this program.
    Linked,
    /// PTX text.
    Ptx(&'a str),
    /// A compiled image for one architecture.
    Cubin(&'a [u8]),
}

/// Kernels that were loaded together.
pub trait Module: fmt::Debug + Send + Sync {
    /// The kernel with this name.
    ///
    /// # Errors
    /// [`GpuError::UnknownKernel`] with the most similar names, [`GpuError::AmbiguousKernel`].
    fn function(&self, name: &str) -> Result<Function, GpuError>;

    /// Names of all kernels.
    fn names(&self) -> Vec<String>;
}

/// One GPU.
pub trait Device: Any + fmt::Debug + Send + Sync {
    /// Its name, for people.
    fn name(&self) -> String;

    /// Returns its kind.
    fn kind(&self) -> DeviceKind;

    /// Limits of launches.
    fn limits(&self) -> Limits;

    /// Allocates `bytes` bytes, zeroed and aligned to 256. [`Memory::new`] is the way for users.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`].
    fn allocate(&self, kind: MemoryKind, bytes: u64) -> Result<Box<dyn RawMemory>, GpuError>;

    /// Copies from the program to memory of the device; returns when it is done.
    ///
    /// # Safety
    /// - All bytes lie in allocations of this device that are alive, and no kernel uses them meanwhile.
    ///
    /// # Errors
    /// An error of the device.
    unsafe fn copy_in(&self, destination: u64, source: &[u8]) -> Result<(), GpuError>;

    /// Copies from memory of the device to the program; returns when it is done.
    ///
    /// # Safety
    /// - As [`copy_in`](Self::copy_in).
    ///
    /// # Errors
    /// An error of the device.
    unsafe fn copy_out(&self, destination: &mut [u8], source: u64) -> Result<(), GpuError>;

    /// Loads kernels.
    ///
    /// # Errors
    /// [`GpuError::Unsupported`] for a source that the device cannot take, [`GpuError::AbiMismatch`], or what its
    /// driver reports.
    fn load(&self, source: ModuleSource<'_>) -> Result<Box<dyn Module>, GpuError>;

    /// A new stream.
    ///
    /// # Errors
    /// An error of the device.
    fn stream(&self) -> Result<Arc<dyn Stream>, GpuError>;

    /// Returns whether kernels of this device can load from and store to memory of `other`, with atomics.
    fn reaches(&self, other: &dyn Device) -> bool;

    /// How many blocks of this shape can be resident at the same time.
    ///
    /// # Errors
    /// An error of the device.
    fn resident_blocks(&self, function: &Function, config: &LaunchConfig) -> Result<u64, GpuError>;

    /// Number of kernels that were launched and have not ended, on all streams of the process.
    fn running(&self) -> usize;

    /// Copies for a progress thread, if the CPU does not reach the device's memory; it copies itself otherwise.
    ///
    /// # Errors
    /// An error of the device.
    fn copier(&self) -> Result<Option<Box<dyn copier::Copier>>, GpuError> {
        Ok(None)
    }

    /// Memory of this device that ranks share, by itself or across processes; `None` if it has ordinary memory only.
    fn sharing(&self) -> Option<&dyn MemorySharing> {
        None
    }

    /// Memory and doorbell pages that this device shares with a NIC; `None` if it shares neither.
    fn nic_access(&self) -> Option<&dyn NicAccess> {
        None
    }

    /// Its address on the PCI bus, such as `0000:18:00.0`, if it is there.
    fn pci_address(&self) -> Option<String> {
        None
    }

    /// Returns its locality.
    fn locality(&self) -> Locality {
        self.pci_address().map_or_else(Locality::default, |address| Locality::of_pci(&address))
    }

    /// Returns whether another host thread or rank must run before this device goes on: true for a device that is
    /// stepped by a scheduler of this process.
    fn is_stepped(&self) -> bool {
        false
    }
}

/// Memory at addresses of the caller's choice, and in files that other processes of the host map.
pub trait MemorySharing {
    /// Reserves addresses for memory of `slots` ranks, whose devices reach each other, at a fixed distance; `None` if
    /// this GPU cannot. Users call [`FlatRange::reserve`](flat::FlatRange::reserve).
    ///
    /// # Errors
    /// [`GpuError::Addresses`].
    fn reserve_addresses(&self, slots: u32) -> Result<Option<Box<dyn flat::RawAddresses>>, GpuError>;

    /// The unit, in bytes, of length and offset of a [`FlatPlace`](flat::FlatPlace): a power of two.
    fn granularity(&self) -> u64;

    /// Maps zeroed memory at a place, within reach of all devices that reach this one. The place is kept until the
    /// memory is unmapped. Users call [`Memory::placed`].
    ///
    /// # Errors
    /// [`GpuError::Unsupported`], [`GpuError::OutOfMemory`], errors of the driver.
    fn allocate_at(&self, place: flat::FlatPlace) -> Result<Box<dyn RawMemory>, GpuError>;

    /// Allocates as [`Device::allocate`] does, in a file that other processes of the host can map. Users call
    /// [`Memory::shared`].
    ///
    /// # Errors
    /// [`GpuError::Unsupported`], [`GpuError::OutOfMemory`].
    fn allocate_shared(&self, kind: MemoryKind, bytes: u64) -> Result<Box<dyn RawMemory>, GpuError>;

    /// Allocates as [`allocate_at`](Self::allocate_at) does, in a file that other processes of the host can map.
    ///
    /// # Errors
    /// As [`allocate_at`](Self::allocate_at).
    fn allocate_shared_at(&self, place: flat::FlatPlace) -> Result<Box<dyn RawMemory>, GpuError>;

    /// Maps memory of a device of another process: at `place`, which has its length, or anywhere.
    ///
    /// # Errors
    /// [`GpuError::Unsupported`], [`GpuError::Foreign`] with the reason, [`GpuError::OutOfMemory`].
    fn import(&self, file: SharedFile, place: Option<flat::FlatPlace>) -> Result<Box<dyn RawMemory>, GpuError>;

    /// Bytes by which other processes recognise this GPU.
    fn identity(&self) -> Vec<u8>;

    /// Returns what [`Device::reaches`] would for a device of this kind and identity in another process of the host.
    fn reaches_elsewhere(&self, kind: DeviceKind, identity: &[u8]) -> bool;
}

/// Memory and doorbell pages that a device shares with a NIC.
pub trait NicAccess {
    /// Lets kernels store to `bytes` bytes of doorbell pages from address `first` on, which this process has mapped.
    ///
    /// # Safety
    /// - Both numbers are multiples of a page of the host, and the pages stay mapped while `keep` exists.
    ///
    /// # Errors
    /// [`GpuError::Unsupported`], or the reason of the driver; then `keep` is dropped.
    unsafe fn map_pages(&self, first: u64, bytes: u64, keep: Keep) -> Result<Box<dyn MappedPages>, GpuError>;

    /// Exports `bytes` bytes from `address` on as a DMA-BUF file: at least one byte, in an allocation that is alive.
    /// The file may hold more, because it consists of whole pages of the host.
    ///
    /// # Errors
    /// [`GpuError::Unsupported`], or the reason of the driver.
    fn export(&self, address: u64, bytes: u64) -> Result<MemoryFile, GpuError>;
}

impl dyn Device {
    /// Returns the device of this type, if it is one.
    #[doc(hidden)]
    pub fn downcast<T: Device>(&self) -> Option<&T> {
        (self as &dyn Any).downcast_ref()
    }

    /// Returns [`sharing`](Device::sharing), or an error that names what the caller wanted.
    pub(crate) fn shares(&self, what: &'static str) -> Result<&dyn MemorySharing, GpuError> {
        self.sharing().ok_or_else(|| GpuError::Unsupported { device: self.name(), what })
    }

    /// Returns [`nic_access`](Device::nic_access), or an error that names what the caller wanted.
    fn nic(&self, what: &'static str) -> Result<&dyn NicAccess, GpuError> {
        self.nic_access().ok_or_else(|| GpuError::Unsupported { device: self.name(), what })
    }

    /// The unit, in bytes, of memory at addresses of the caller's choice; 1 if there is none.
    #[doc(hidden)]
    pub fn granularity(&self) -> u64 {
        self.sharing().map_or(1, MemorySharing::granularity)
    }

    /// Maps doorbell pages: see [`NicAccess::map_pages`].
    ///
    /// # Safety
    /// - As there.
    ///
    /// # Errors
    /// As there.
    #[doc(hidden)]
    pub unsafe fn map_pages(&self, first: u64, bytes: u64, keep: Keep) -> Result<Box<dyn MappedPages>, GpuError> {
        let access = self.nic("store to doorbell pages")?;
        // Safety: the caller's promise.
        unsafe { access.map_pages(first, bytes, keep) }
    }

    /// Exports memory: see [`NicAccess::export`].
    ///
    /// # Errors
    /// As there.
    #[doc(hidden)]
    pub fn export(&self, address: u64, bytes: u64) -> Result<MemoryFile, GpuError> {
        self.nic("give its memory as a DMA-BUF file")?.export(address, bytes)
    }
}

/// A point in a stream.
pub trait Event: Any + fmt::Debug + Send + Sync {
    /// Returns whether everything before it is done.
    ///
    /// # Errors
    /// The error of a kernel before it.
    fn is_done(&self) -> Result<bool, GpuError>;

    /// Nanoseconds from `earlier` to this, both done; `None` if the device cannot say.
    fn since(&self, earlier: &dyn Event) -> Option<u64>;
}

/// Work of one device in order.
pub trait Stream: Any + fmt::Debug + Send + Sync {
    /// The device.
    fn device(&self) -> Arc<dyn Device>;

    /// Launches without the checks of [`launch`](#method.launch), which is the way for users.
    ///
    /// # Safety
    /// - The parameters are what the kernel takes, and what the kernel itself asks for holds.
    ///
    /// # Errors
    /// An error of the device.
    unsafe fn enqueue(
        &self,
        function: &Function,
        config: LaunchConfig,
        arguments: Vec<Argument>,
    ) -> Result<(), GpuError>;

    /// Copies `bytes` bytes of memory that the device reaches, in stream order.
    ///
    /// # Safety
    /// - All bytes lie in allocations that stay alive until it is done and that nobody else uses meanwhile.
    ///
    /// # Errors
    /// An error of the device.
    unsafe fn copy(&self, destination: u64, source: u64, bytes: u64) -> Result<(), GpuError>;

    /// Marks this point of the stream.
    ///
    /// # Errors
    /// An error of the device.
    fn record(&self) -> Result<Box<dyn Event>, GpuError>;

    /// Work enqueued later starts only when `event`, of any stream of the same kind of device, is done.
    ///
    /// # Errors
    /// An error of the device.
    fn wait_for(&self, event: &dyn Event) -> Result<(), GpuError>;

    /// Returns whether everything enqueued is done.
    ///
    /// # Errors
    /// The error of a kernel.
    fn is_idle(&self) -> Result<bool, GpuError>;

    /// Waits until everything enqueued is done.
    ///
    /// # Errors
    /// The error of a kernel, reported once.
    fn synchronize(&self) -> Result<(), GpuError>;
}

impl dyn Event {
    /// Returns the event of this type, if it is one.
    pub(crate) fn downcast<T: Event>(&self) -> Option<&T> {
        (self as &dyn Any).downcast_ref()
    }
}

impl dyn Stream {
    /// Launches a kernel.
    ///
    /// ```
    /// use gin_device::prelude::*;
    /// use gin_gpu::{GpuError, LaunchConfig, Memory, MemoryKind};
    /// use gin_host::{WorldConfig, launch};
    ///
    /// /// # Safety
    /// /// - `out` has a word for each thread of the block.
    /// #[kernel]
    /// unsafe fn squares(out: *mut u64) {
    ///     let i = Block.rank() as usize;
    ///     // Safety: the kernel's promise.
    ///     unsafe { out.add(i).write((i * i) as u64) };
    /// }
    ///
    /// let results = launch(WorldConfig::seeded(1, 0), |rank| -> Result<[u64; 8], GpuError> {
    ///     let memory = Memory::new(rank.device(), MemoryKind::Device, 64)?;
    ///     let (stream, kernel) = (rank.stream()?, rank.kernel("squares")?);
    ///     let out = memory.address() as usize as *mut u64;
    ///     // Safety: eight threads, eight words.
    ///     unsafe { stream.launch(&kernel, LaunchConfig::new(1, 8), &[&out])? };
    ///     stream.synchronize()?;
    ///     let mut squares = [0; 8];
    ///     memory.read(0, &mut squares)?;
    ///     Ok(squares)
    /// });
    /// assert_eq!(results.unwrap(), [[0, 1, 4, 9, 16, 25, 36, 49]]);
    /// ```
    ///
    /// # Safety
    /// - The conditions in the kernel's own `# Safety` section hold until it has ended; communicators and windows among
    ///   the parameters are alive until then.
    ///
    /// # Errors
    /// [`GpuError`] names the parameter, the number or the limit that does not fit; nothing runs then.
    pub unsafe fn launch(
        &self,
        function: &Function,
        config: LaunchConfig,
        arguments: &[&dyn KernelArg],
    ) -> Result<(), GpuError> {
        let arguments: Vec<Argument> = arguments.iter().map(|argument| argument.argument()).collect();
        let device = self.device();
        check_launch(function, &config, &arguments, &device.limits(), &device.name())?;
        if config.cooperative {
            let resident = device.resident_blocks(function, &config)?;
            if config.blocks() > resident {
                return Err(GpuError::NotResident { blocks: config.blocks(), resident, device: device.name() });
            }
        }
        // Safety: sizes were checked; the rest is the caller's promise.
        unsafe { self.enqueue(function, config, arguments) }
    }
}
