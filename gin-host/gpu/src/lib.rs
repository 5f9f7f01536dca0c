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
//! | [`lane`] | copies and values in order that announce themselves |
//!
//! Before anything runs, a launch checks the kernel's name, the number, sizes and types of the parameters, and the
//! limits of kernel and device. A kernel's own `launch` ([`LaunchStream`]) has the compiler check the parameters.

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
pub mod lane;
mod launch;
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
pub use devices::{Available, Devices, EmbeddedModules, available};
pub use error::GpuError;
pub use io::{Keep, MappedPages, MemoryFile, whole_pages};
pub use launch::{LaunchConfig, check_launch};
pub use memory::{Allocation, Memory, MemoryKind, MemorySlice, RawMemory};
pub use shared::SharedFile;

#[doc(hidden)]
pub use gin_boot::rt;
#[doc(hidden)]
pub use gin_boot::wire;

#[doc(hidden)]
pub use gin_boot::{config, lock};

use gin_device::kernel::{KernelEntry, LaunchStream};
use placement::Locality;
use std::any::{Any, TypeId};
use std::fmt;
use std::sync::{Arc, Weak};

/// The kind of a device.
///
/// ```
/// assert_eq!(gin_gpu::DeviceKind::Cuda.to_string(), "cuda");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, derive_more::Display)]
pub enum DeviceKind {
    /// Threads of this process that run kernels as ordinary code.
    #[display("virtual")]
    Virtual,
    /// An NVIDIA GPU.
    #[display("cuda")]
    Cuda,
}

/// Limits of launches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Limits {
    /// The maximum number of threads of a block.
    pub threads_per_block: u32,
    /// The maximum number of threads of a block in each direction.
    pub block: [u32; 3],
    /// The maximum number of blocks of a grid in each direction.
    pub grid: [u32; 3],
    /// The maximum number of bytes of dynamic shared memory of a block.
    pub dynamic_shared: u32,
    /// The maximum number of blocks of a cluster; 1 if there are no clusters.
    pub cluster_blocks: u32,
}

impl Limits {
    /// The limits of CUDA GPUs of compute capability 8.0 and later: 227 KiB of shared memory, and no clusters, which
    /// capability 9.0 introduced.
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
    /// The name; empty if the module does not contain it.
    pub name: String,
    /// The type as written in the kernel; empty if the module does not contain it.
    pub type_name: String,
    /// The type; `None` if the module does not contain it.
    pub type_id: Option<TypeId>,
    /// The size in bytes.
    pub size: usize,
}

/// A kernel that can be launched.
///
/// ```
/// use gin_device::kernel;
/// use gin_gpu::{Device, ModuleSource, virt::VirtualDevice};
///
/// # /// # Safety
/// # /// - None.
/// #[kernel]
/// unsafe fn scale(words: *mut f32, factor: f32) {}
///
/// let function = VirtualDevice::memory_only(0).load(ModuleSource::Linked)?.function("scale")?;
/// assert_eq!((function.parameters[1].name.as_str(), function.parameters[1].size), ("factor", 4));
/// # Ok::<(), gin_gpu::GpuError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// The parameters, in order.
    pub parameters: Vec<Parameter>,
    /// The maximum number of threads of a block, if the kernel was compiled with launch bounds.
    pub max_threads: Option<u32>,
    /// The version of the shared layouts with which it was built.
    pub abi: u32,
    /// The device's handle of the kernel.
    pub handle: Arc<dyn Any + Send + Sync>,
}

/// The source of kernels.
///
/// ```
/// use gin_gpu::{Device, GpuError, ModuleSource, virt::VirtualDevice};
///
/// // The virtual GPU runs linked kernels only.
/// let error = VirtualDevice::memory_only(0).load(ModuleSource::Ptx(".version 8.0")).unwrap_err();
/// assert!(matches!(error, GpuError::Unsupported { .. }));
/// ```
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
///
/// ```
/// use gin_device::kernel;
/// use gin_gpu::{Device, GpuError, ModuleSource, virt::VirtualDevice};
///
/// # /// # Safety
/// # /// - None.
/// #[kernel]
/// unsafe fn reduce() {}
///
/// let module = VirtualDevice::memory_only(0).load(ModuleSource::Linked)?;
/// assert!(module.names().contains(&"reduce".to_owned()));
/// assert!(module.function("redcue").unwrap_err().to_string().contains("`reduce`"));
/// # Ok::<(), GpuError>(())
/// ```
pub trait Module: fmt::Debug + Send + Sync {
    /// Returns the kernel with this name.
    ///
    /// # Errors
    /// [`GpuError::UnknownKernel`] with the most similar names, [`GpuError::AmbiguousKernel`].
    fn function(&self, name: &str) -> Result<Function, GpuError>;

    /// Returns the names of all kernels.
    fn names(&self) -> Vec<String>;
}

/// One GPU.
///
/// ```
/// use gin_gpu::{Device, DeviceKind, virt::VirtualDevice};
///
/// let device = VirtualDevice::memory_only(0);
/// assert_eq!((device.kind(), device.limits().threads_per_block), (DeviceKind::Virtual, 1024));
/// assert_eq!(device.pci_address(), None);
/// ```
pub trait Device: Any + fmt::Debug + Send + Sync {
    /// Returns the name, for people.
    fn name(&self) -> String;

    /// Returns the kind.
    fn kind(&self) -> DeviceKind;

    /// Returns the limits of launches.
    fn limits(&self) -> Limits;

    /// Allocates `bytes` bytes, zeroed and aligned to 256. Users call [`Memory::new`].
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`].
    fn allocate(&self, kind: MemoryKind, bytes: u64) -> Result<Allocation, GpuError>;

    /// Copies from the program to memory of the device. Returns after the copy.
    ///
    /// # Safety
    /// - All bytes are in allocations of this device that are alive, and no kernel uses them during the copy.
    ///
    /// # Errors
    /// An error of the device.
    unsafe fn copy_in(&self, destination: u64, source: &[u8]) -> Result<(), GpuError>;

    /// Copies from memory of the device to the program. Returns after the copy.
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
    /// [`GpuError::Unsupported`] for a source that the device cannot load, [`GpuError::AbiMismatch`], or an error of
    /// the driver.
    fn load(&self, source: ModuleSource<'_>) -> Result<Box<dyn Module>, GpuError>;

    /// Makes a stream.
    ///
    /// # Errors
    /// An error of the device.
    fn stream(&self) -> Result<Arc<dyn Stream>, GpuError>;

    /// Makes a stream whose waiting blocks start before those of streams with a larger number, as soon as a running
    /// block ends. Running blocks are not stopped. 0 is the priority of [`stream`](Self::stream), and lower numbers go
    /// first. As in CUDA, a number outside of the GPU's range stands for the nearest one in it:
    /// `i32::MIN` is the first priority of every GPU. On a virtual GPU priorities have no effect.
    ///
    /// ```
    /// use gin_gpu::GpuError;
    /// use gin_host::launch::{WorldConfig, launch};
    ///
    /// let idle = launch(WorldConfig::seeded(1, 0), |rank| -> Result<bool, GpuError> {
    ///     rank.device().stream_with_priority(i32::MIN)?.is_idle()
    /// });
    /// assert_eq!(idle.unwrap(), [true]);
    /// ```
    ///
    /// # Errors
    /// An error of the device.
    fn stream_with_priority(&self, priority: i32) -> Result<Arc<dyn Stream>, GpuError>;

    /// Returns whether kernels of this device can load from and store to memory of `other`, also by atomics.
    fn reaches(&self, other: &dyn Device) -> bool;

    /// Returns how many blocks of this shape can be resident at the same time.
    ///
    /// # Errors
    /// An error of the device.
    fn resident_blocks(&self, function: &Function, config: &LaunchConfig) -> Result<u64, GpuError>;

    /// Returns whether a kernel may be launched as a [`dependent`](LaunchConfig::dependent) one. The device and the
    /// architecture for which the kernel was compiled decide.
    fn allows_dependent(&self, function: &Function) -> bool;

    /// Returns the number of streams with kernels that were launched by this object and have not ended.
    fn running(&self) -> usize;

    /// Returns a copier for a progress thread, if the CPU does not reach the device's memory; otherwise the thread
    /// copies by itself.
    ///
    /// # Errors
    /// An error of the device.
    fn copier(&self) -> Result<Option<Box<dyn copier::Copier>>, GpuError> {
        Ok(None)
    }

    /// Makes a lane.
    ///
    /// # Errors
    /// [`GpuError::Unsupported`], or an error of the device.
    fn lane(&self) -> Result<Box<dyn lane::Lane>, GpuError> {
        Err(GpuError::Unsupported { device: self.name(), what: "announce copies in their order" })
    }

    /// Returns the interface to memory that ranks share, in this process or across processes; `None` if the device has
    /// ordinary memory only.
    fn sharing(&self) -> Option<&dyn MemorySharing> {
        None
    }

    /// Returns the interface to memory and doorbell pages that this device shares with a NIC; `None` if it shares
    /// neither.
    fn nic_access(&self) -> Option<&dyn NicAccess> {
        None
    }

    /// Returns the address on the PCI bus, such as `0000:18:00.0`, if the device has one.
    fn pci_address(&self) -> Option<String> {
        None
    }

    /// Returns the locality of the device.
    fn locality(&self) -> Locality {
        self.pci_address().map_or_else(Locality::default, |address| Locality::of_pci(&address))
    }

    /// Returns whether another host thread or rank must run before this device makes progress. This is so for a device
    /// that a scheduler of this process steps.
    fn is_stepped(&self) -> bool {
        false
    }

    /// Registers the kernel that this device launches from now on as a [`Resident`](resident::Resident) one. Devices
    /// whose operations wait for no kernel ignore it.
    #[doc(hidden)]
    fn keep_resident(&self, _kernel: Weak<dyn resident::Resident>) {}
}

/// Memory at addresses of the caller's choice, and memory in files that other processes of the host map.
pub trait MemorySharing {
    /// Reserves addresses for memory of `slots` ranks at a fixed distance; the devices of these ranks reach each other.
    /// `None` if this GPU cannot. Users call [`FlatRange::reserve`](flat::FlatRange::reserve).
    ///
    /// # Errors
    /// [`GpuError::Addresses`].
    fn reserve_addresses(&self, slots: u32) -> Result<Option<flat::RawAddresses>, GpuError>;

    /// Returns the unit, in bytes, of length and offset of a [`FlatPlace`](flat::FlatPlace): a power of two.
    fn granularity(&self) -> u64;

    /// Maps zeroed memory at a place, so that all devices that reach this one reach it. The place stays taken until the
    /// memory is unmapped. `shared`: in a file that other processes of the host can map.
    ///
    /// # Errors
    /// [`GpuError::Unsupported`], [`GpuError::OutOfMemory`], or an error of the driver.
    fn allocate_at(&self, place: flat::FlatPlace, shared: bool) -> Result<Allocation, GpuError>;

    /// Allocates as [`Device::allocate`] does, in a file that other processes of the host can map. Users call
    /// [`Memory::shared`].
    ///
    /// # Errors
    /// [`GpuError::Unsupported`], [`GpuError::OutOfMemory`].
    fn allocate_shared(&self, kind: MemoryKind, bytes: u64) -> Result<Allocation, GpuError>;

    /// Maps memory of a device of another process: at `place`, which has its length, or at any address.
    ///
    /// # Errors
    /// [`GpuError::Unsupported`], [`GpuError::Foreign`] with the reason, [`GpuError::OutOfMemory`].
    fn import(&self, file: SharedFile, place: Option<flat::FlatPlace>) -> Result<Allocation, GpuError>;

    /// Returns the bytes by which other processes recognise this GPU.
    fn identity(&self) -> Vec<u8>;

    /// Returns the value of [`Device::reaches`] for a device of this kind and identity in another process of the host.
    fn reaches_elsewhere(&self, kind: DeviceKind, identity: &[u8]) -> bool;
}

/// Memory and doorbell pages that a device shares with a NIC.
pub trait NicAccess {
    /// Lets kernels store to `bytes` bytes of doorbell pages from address `first` on. This process has mapped them.
    ///
    /// # Safety
    /// - Both numbers are multiples of a page of the host, and the pages stay mapped while `keep` exists.
    ///
    /// # Errors
    /// [`GpuError::Unsupported`], or an error of the driver. Then `keep` is dropped.
    unsafe fn map_pages(&self, first: u64, bytes: u64, keep: Keep) -> Result<MappedPages, GpuError>;

    /// Exports `bytes` bytes from `address` on as a DMA-BUF file: at least one byte, in an allocation that is alive.
    /// The file may contain more, because it consists of whole pages of the host.
    ///
    /// # Errors
    /// [`GpuError::Unsupported`], or the reason of the driver.
    fn export(&self, address: u64, bytes: u64) -> Result<MemoryFile, GpuError>;

    /// Makes the GPU's context current in the calling thread, for a library that calls CUDA itself. Returns CUDA's
    /// number of the GPU (`CUdevice`); `None` for devices that CUDA does not know.
    ///
    /// # Errors
    /// The reason of the driver.
    fn enter_cuda(&self) -> Result<Option<i32>, GpuError> {
        Ok(None)
    }
}

impl dyn Device {
    /// Returns the device of this type, if it is one.
    #[doc(hidden)]
    pub fn downcast<T: Device>(&self) -> Option<&T> {
        (self as &dyn Any).downcast_ref()
    }

    /// Returns [`sharing`](Device::sharing), or an error that names the operation.
    pub(crate) fn shares(&self, what: &'static str) -> Result<&dyn MemorySharing, GpuError> {
        self.sharing().ok_or_else(|| GpuError::Unsupported { device: self.name(), what })
    }

    /// Returns [`nic_access`](Device::nic_access), or an error that names the operation.
    fn nic(&self, what: &'static str) -> Result<&dyn NicAccess, GpuError> {
        self.nic_access().ok_or_else(|| GpuError::Unsupported { device: self.name(), what })
    }

    /// Returns the unit, in bytes, of memory at addresses of the caller's choice; 1 if the device has no such memory.
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
    pub unsafe fn map_pages(&self, first: u64, bytes: u64, keep: Keep) -> Result<MappedPages, GpuError> {
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
///
/// ```
/// use gin_gpu::GpuError;
/// use gin_host::launch::{WorldConfig, launch};
///
/// let done = launch(WorldConfig::seeded(1, 0), |rank| -> Result<bool, GpuError> {
///     let (first, second) = (rank.stream()?, rank.stream()?);
///     let event = first.record()?;
///     second.wait_for(&*event)?; // later work of the second stream follows the earlier work of the first
///     second.synchronize()?;
///     event.is_done()
/// });
/// assert_eq!(done.unwrap(), [true]);
/// ```
pub trait Event: Any + fmt::Debug + Send + Sync {
    /// Returns whether all work before this point is done.
    ///
    /// # Errors
    /// The error of a kernel before it.
    fn is_done(&self) -> Result<bool, GpuError>;

    /// Returns the nanoseconds from `earlier` to this event; `None` if one of them is not done, or the device does not
    /// measure time.
    fn since(&self, earlier: &dyn Event) -> Option<u64>;
}

/// Captured work of a [`Stream`], which runs again each time it is launched.
pub trait Graph: Any + fmt::Debug + Send + Sync {}

/// The operation that a stream refuses in a capture.
pub(crate) const WAIT_IN_CAPTURE: &str =
    "wait for a stream while its work becomes part of a graph: wait before the capture, or after a launch of the graph";

/// Work of one device in order.
///
/// The example of [`launch`](#method.launch) runs a kernel and reads its result.
pub trait Stream: Any + fmt::Debug + Send + Sync {
    /// Returns the device.
    fn device(&self) -> Arc<dyn Device>;

    /// Launches without the checks of [`launch`](#method.launch), which users call.
    ///
    /// # Safety
    /// - The arguments are the kernel's parameters, and the kernel's own conditions hold.
    ///
    /// # Errors
    /// An error of the device.
    unsafe fn enqueue(
        &self,
        function: &Function,
        config: LaunchConfig,
        arguments: Vec<Argument>,
    ) -> Result<(), GpuError>;

    /// Begins a graph: until [`end_capture`](Self::end_capture), launches and copies become part of it and do not run.
    /// Users call [`capture`](#method.capture).
    ///
    /// # Errors
    /// [`GpuError::Unsupported`] if the stream is captured already, or an error of the device.
    fn begin_capture(&self) -> Result<(), GpuError>;

    /// Ends a graph.
    ///
    /// # Errors
    /// [`GpuError::Unsupported`] if the stream is not captured, or an error of the device.
    fn end_capture(&self) -> Result<Box<dyn Graph>, GpuError>;

    /// Launches a graph in the order of this stream.
    ///
    /// # Safety
    /// - The promises for each of its launches and copies hold again.
    ///
    /// # Errors
    /// As a launch of its kernels.
    unsafe fn replay(&self, graph: &dyn Graph) -> Result<(), GpuError>;

    /// Copies `bytes` bytes of memory that the device reaches, in stream order.
    ///
    /// # Safety
    /// - All bytes are in allocations that stay alive until the copy is done, and no other code uses them meanwhile.
    ///
    /// # Errors
    /// An error of the device.
    unsafe fn copy(&self, destination: u64, source: u64, bytes: u64) -> Result<(), GpuError>;

    /// Marks this point of the stream.
    ///
    /// # Errors
    /// An error of the device.
    fn record(&self) -> Result<Box<dyn Event>, GpuError>;

    /// Delays work that is enqueued later until `event` is done. The event may be of any stream of the same kind of
    /// device.
    ///
    /// # Errors
    /// An error of the device.
    fn wait_for(&self, event: &dyn Event) -> Result<(), GpuError>;

    /// Returns whether work becomes part of a graph now. Then the stream must not be asked whether it is idle.
    ///
    /// # Errors
    /// An error of the device.
    fn is_capturing(&self) -> Result<bool, GpuError>;

    /// Returns whether all enqueued work is done.
    ///
    /// # Errors
    /// The error of a kernel.
    fn is_idle(&self) -> Result<bool, GpuError>;

    /// Waits until all enqueued work is done.
    ///
    /// # Errors
    /// The error of a kernel. It is reported once. [`GpuError::Unsupported`] in a capture, which goes on.
    fn synchronize(&self) -> Result<(), GpuError>;
}

impl LaunchStream for dyn Stream + '_ {
    type Config = LaunchConfig;
    type Error = GpuError;

    unsafe fn launch_entry(
        &self,
        kernel: &'static KernelEntry,
        config: LaunchConfig,
        params: &[*const u8],
    ) -> Result<(), GpuError> {
        let function = self.device().load(ModuleSource::Linked)?.function(kernel.name)?;
        // Safety: the caller's promise.
        let argument = |(parameter, &value)| unsafe { Argument::of_param(parameter, value) };
        let arguments = kernel.params.iter().zip(params).map(argument).collect();
        // Safety: the caller's promise.
        unsafe { self.launch_checked(&function, config, arguments) }
    }
}

impl dyn Stream + '_ {
    /// Launches a kernel by name, such as one of PTX that was loaded at run time. For a kernel that is linked into the
    /// program, its own `launch` has the compiler check the arguments.
    ///
    /// ```
    /// use gin_device::prelude::*;
    /// use gin_gpu::{GpuError, LaunchConfig, Memory, MemoryKind};
    /// use gin_host::launch::{WorldConfig, launch};
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
        let arguments = arguments.iter().map(|argument| argument.argument()).collect();
        // Safety: the caller's promise.
        unsafe { self.launch_checked(function, config, arguments) }
    }

    /// Makes a graph of the launches and copies that `work` puts on this stream; they do not run. A launch of the graph
    /// takes less time than theirs, and passes the same arguments again: addresses and values of now.
    ///
    /// ```
    /// use gin_device::prelude::*;
    /// use gin_gpu::{GpuError, LaunchConfig, Memory, MemoryKind};
    /// use gin_host::launch::{WorldConfig, launch};
    ///
    /// /// # Safety
    /// /// - `word` is valid.
    /// #[kernel]
    /// unsafe fn count(word: *mut u64) {
    ///     // Safety: the kernel's promise.
    ///     unsafe { word.write(word.read() + 1) };
    /// }
    ///
    /// let counts = launch(WorldConfig::seeded(1, 0), |rank| -> Result<u64, GpuError> {
    ///     let memory = Memory::new(rank.device(), MemoryKind::Device, 8)?;
    ///     let (stream, word) = (rank.stream()?, memory.address() as usize as *mut u64);
    ///     // Safety: one thread, one word.
    ///     let graph = stream.capture(|| unsafe { count::launch(&stream, LaunchConfig::new(1, 1), word) })?;
    ///     for _ in 0..3 {
    ///         // Safety: as above.
    ///         unsafe { stream.replay(&*graph)? };
    ///     }
    ///     stream.synchronize()?;
    ///     let mut count = [0];
    ///     memory.read(0, &mut count)?;
    ///     Ok(count[0])
    /// });
    /// assert_eq!(counts.unwrap(), [3]);
    /// ```
    ///
    /// # Errors
    /// The error of `work`, or of the device. Then there is no graph, and the stream is as before.
    pub fn capture<E: From<GpuError>>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<Box<dyn Graph>, E> {
        self.begin_capture()?;
        let done = work();
        let graph = self.end_capture();
        done?;
        Ok(graph?)
    }

    /// # Safety
    /// - As [`launch`](#method.launch).
    unsafe fn launch_checked(
        &self,
        function: &Function,
        config: LaunchConfig,
        arguments: Vec<Argument>,
    ) -> Result<(), GpuError> {
        let device = self.device();
        check_launch(function, &config, &arguments, &device.limits(), || device.name())?;
        // Safety: sizes and types were checked; the rest is the caller's promise.
        unsafe { self.enqueue(function, config, arguments) }
    }
}
