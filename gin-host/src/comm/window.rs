// SPDX-License-Identifier: MIT OR Apache-2.0
//! A registered window on the host.

use super::CommError;
use bytemuck::Pod;
use gin_abi::WindowHandle;
use gin_abi::handle::STRIDE_SHIFT;
use gin_device::kernel::LaunchArg;
use gin_gpu::{Argument, KernelArg, Memory, MemorySlice};
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The options of a window's registration.
///
/// ```
/// use gin_host::comm::WindowFlags;
///
/// assert!(WindowFlags::SIGNALS.signals && !WindowFlags::NONE.signals);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct WindowFlags {
    /// Peers may raise signals at words of the window. These signals begin at 0, whatever the words contain. The
    /// communicator allocates 72 to 80 bytes for each 8 bytes of the window. If a NIC raises signals, it raises the
    /// words of the window, and no other code may write words that are used for signals. Otherwise signals do not
    /// change the window's memory.
    pub signals: bool,
}

impl WindowFlags {
    /// No flags.
    pub const NONE: Self = Self { signals: false };
    /// Peers may raise signals at words of the window.
    pub const SIGNALS: Self = Self { signals: true };

    pub(crate) fn bits(self) -> u32 {
        if self.signals { gin_abi::handle::WINDOW_SIGNALS } else { 0 }
    }
}

/// The names of a communicator's windows, by id.
#[derive(Debug, Default)]
pub(crate) struct Names(Mutex<BTreeMap<u32, String>>);

impl Names {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, String>> {
        // No thread panics while it holds the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get(&self, id: u32) -> Option<String> {
        self.lock().get(&id).cloned()
    }

    /// Forgets the name of an earlier window with this id.
    pub(crate) fn forget(&self, id: u32) {
        self.lock().remove(&id);
    }
}

/// The state of a window, which the communicator and every [`Window`] share.
#[derive(Debug)]
pub(crate) struct Registered {
    pub(crate) handle: WindowHandle,
    /// Unique in this process. An id is reused.
    pub(crate) serial: u64,
    pub(crate) names: Arc<Names>,
    pub(crate) memory: MemorySlice,
    /// The bytes of each part, by world rank.
    pub(crate) lengths: Vec<u64>,
    /// Keeps planes, tables, and the parts of LSA peers alive.
    pub(crate) _beside: Vec<Arc<Memory>>,
}

/// A window of elements of type `T`, which kernels get as `gin_device::Window<T>`.
///
/// Clones share the window. It exists until the communicator deregisters it or ends. `read` and `write` access this
/// rank's own part, which no kernel may use meanwhile.
///
/// ```
/// use gin_host::comm::{CommError, Requirements, WindowFlags};
/// use gin_host::world::{WorldConfig, launch};
///
/// let sums = launch(WorldConfig::seeded(2, 7), |rank| -> Result<u32, CommError> {
///     let comm = rank.communicator(&Requirements::default())?;
///     let window = comm.alloc_window::<u32>(4, WindowFlags::NONE)?;
///     window.write(1, &[5, 6])?;
///     let sum = window.read_all()?.iter().sum();
///     comm.destroy()?;
///     Ok(sum)
/// });
/// assert_eq!(sums.unwrap(), [11, 11]);
/// ```
///
/// A kernel's own `launch` takes a reference to a window of the same elements. With others it does not compile:
///
/// ```compile_fail,E0277
/// use gin_device::kernel;
/// use gin_gpu::{GpuError, LaunchConfig, Stream};
/// use gin_host::comm::Window;
///
/// #[kernel]
/// unsafe fn clear(words: gin_device::Window<u32>) {}
///
/// fn start(stream: &dyn Stream, longs: &Window<u64>) -> Result<(), GpuError> {
///     unsafe { clear::launch(stream, LaunchConfig::new(1, 32), longs) }
/// }
/// ```
#[derive(Debug)]
pub struct Window<T> {
    pub(crate) inner: Arc<Registered>,
    element: PhantomData<fn() -> T>,
}

impl<T> Clone for Window<T> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), element: PhantomData }
    }
}

impl<T: Pod> Window<T> {
    pub(crate) fn new(inner: Arc<Registered>) -> Self {
        Self { inner, element: PhantomData }
    }

    /// Gives the window a name, which this rank's reports of faults print beside the window's id. Not collective.
    ///
    /// ```
    /// use gin_host::comm::{CommError, Requirements, WindowFlags};
    /// use gin_host::world::{WorldConfig, launch};
    ///
    /// launch(WorldConfig::seeded(2, 7), |rank| -> Result<(), CommError> {
    ///     let comm = rank.communicator(&Requirements::default())?;
    ///     let halo = comm.alloc_window::<f32>(64, WindowFlags::NONE)?.named("halo");
    ///     assert_eq!(halo.name().as_deref(), Some("halo"));
    ///     comm.destroy()
    /// })
    /// .unwrap();
    /// ```
    #[must_use]
    pub fn named(self, name: impl Into<String>) -> Self {
        let name = name.into();
        gin_virtual::name_window(self.inner.memory.address(), &name, size_of::<T>() as u64);
        self.inner.names.lock().insert(self.id(), name);
        self
    }

    /// Returns the name, if the window was given one.
    pub fn name(&self) -> Option<String> {
        self.inner.names.get(self.id())
    }

    /// Returns the window for kernels.
    pub fn handle(&self) -> WindowHandle {
        self.inner.handle
    }

    /// Returns the window's number, which is the same on all ranks.
    pub fn id(&self) -> u32 {
        self.inner.handle.id
    }

    /// Returns the number of elements of this rank's own part.
    pub fn len(&self) -> usize {
        (self.inner.memory.bytes() / size_of::<T>() as u64) as usize
    }

    /// Returns whether this rank's own part has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of elements of a rank's part; `None` if there is no such rank.
    pub fn len_on(&self, rank: u32) -> Option<usize> {
        let bytes = self.inner.lengths.get(rank as usize)?;
        Some((bytes / size_of::<T>() as u64) as usize)
    }

    /// Returns the bytes from the part of one rank of the LSA team to the part of the next, if the distance is fixed. A
    /// kernel then computes the address of a peer's part and needs no table. `None` for registered memory, and for
    /// devices that do not support fixed distances.
    pub fn stride(&self) -> Option<u64> {
        let stride = u64::from(self.inner.handle.stride) << STRIDE_SHIFT;
        (stride != 0).then_some(stride)
    }

    /// Returns the memory of this rank's own part.
    pub fn memory(&self) -> &MemorySlice {
        &self.inner.memory
    }

    fn check(&self, start: usize, count: usize) -> Result<u64, CommError> {
        let end = start.saturating_add(count);
        if end > self.len() {
            return Err(CommError::OutOfRange { start: start as u64, end: end as u64, length: self.len() as u64 });
        }
        Ok((start * size_of::<T>()) as u64)
    }

    /// Copies `values` to the elements from `start` on.
    ///
    /// # Errors
    /// [`CommError::OutOfRange`], or an error of the device.
    pub fn write(&self, start: usize, values: &[T]) -> Result<(), CommError> {
        let offset = self.check(start, values.len())?;
        Ok(self.inner.memory.write(offset, values)?)
    }

    /// Copies the elements from `start` on to `values`.
    ///
    /// # Errors
    /// [`CommError::OutOfRange`], or an error of the device.
    pub fn read(&self, start: usize, values: &mut [T]) -> Result<(), CommError> {
        let offset = self.check(start, values.len())?;
        Ok(self.inner.memory.read(offset, values)?)
    }

    /// Returns the elements of `range`.
    ///
    /// # Errors
    /// [`CommError::OutOfRange`], or an error of the device.
    pub fn read_range(&self, range: Range<usize>) -> Result<Vec<T>, CommError> {
        let count = range.end.saturating_sub(range.start);
        self.check(range.start, count)?;
        let mut values = vec![T::zeroed(); count];
        self.read(range.start, &mut values)?;
        Ok(values)
    }

    /// Returns all elements of this rank's own part.
    ///
    /// # Errors
    /// An error of the device.
    pub fn read_all(&self) -> Result<Vec<T>, CommError> {
        self.read_range(0..self.len())
    }

    /// Stores `value` to all elements of this rank's own part.
    ///
    /// # Errors
    /// An error of the device.
    pub fn fill(&self, value: T) -> Result<(), CommError> {
        self.write(0, &vec![value; self.len()])
    }
}

impl<T: Pod> KernelArg for Window<T> {
    fn argument(&self) -> Argument {
        Argument::of::<gin_device::Window<T>>(self.inner.handle)
    }
}

impl<T: Pod> LaunchArg<gin_device::Window<T>> for &Window<T> {
    unsafe fn into_param(self) -> gin_device::Window<T> {
        // Safety: the communicator made the handle for elements of this type, and the caller's promise.
        unsafe { gin_device::Window::from_handle(self.inner.handle) }
    }
}
