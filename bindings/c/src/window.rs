// SPDX-License-Identifier: MIT OR Apache-2.0
//! Windows.

use crate::comm::Comm;
use crate::status::{Failure, call, inputs, output, outputs};
use crate::table;
use crate::types::gin_status_t::GIN_ERROR_STATE;
use crate::types::{gin_comm_t, gin_status_t, gin_window_t};
use gin_abi::WindowHandle;
use gin_gpu::virt::VirtualDevice;
use gin_gpu::{Device, Memory, MemorySlice};
use gin_host::comm::{CommState, Communicator, Window as HostWindow, WindowFlags};
use std::ffi::c_void;
use std::sync::Arc;

/// Peers may raise signals at words of the window.
pub const GIN_WINDOW_SIGNALS: u32 = 1;

/// One rank's part of a window.
pub(crate) struct Window {
    comm: Arc<Comm>,
    pub(crate) inner: HostWindow<u8>,
}

impl table::Handled for Window {
    const KIND: table::Kind = table::Kind::Window;
}

impl Window {
    /// Returns the own part, which has `bytes` bytes from `offset` on.
    fn part(&self, offset: u64, bytes: u64) -> Result<&MemorySlice, Failure> {
        let (part, end) = (self.alive()?.memory(), offset.saturating_add(bytes));
        if end > part.bytes() {
            let text = format!("bytes {offset} to {end} are not in a window of {} bytes", part.bytes());
            return Err(Failure::argument(text));
        }
        Ok(part)
    }

    /// Refuses a window whose communicator holds nothing any more.
    fn alive(&self) -> Result<&HostWindow<u8>, Failure> {
        match self.comm.inner.state() {
            CommState::Active | CommState::Aborted => Ok(&self.inner),
            state => {
                Err(Failure::new(GIN_ERROR_STATE, format!("the window's communicator is {state}: close the window")))
            }
        }
    }
}

fn flags(bits: u32) -> Result<WindowFlags, Failure> {
    match bits {
        0 => Ok(WindowFlags::NONE),
        GIN_WINDOW_SIGNALS => Ok(WindowFlags::SIGNALS),
        other => Err(Failure::argument(format!("flags are {other:#x}: there is only GIN_WINDOW_SIGNALS (1)"))),
    }
}

/// Allocates `bytes` bytes of device memory on this rank, zeroed, and registers them as its part of a window.
/// Collective; ranks may pass different lengths, including 0.
///
/// gin owns the memory. The caller owns the handle, and closes it with `gin_window_close`.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_window_alloc(
    comm: gin_comm_t,
    bytes: u64,
    flags: u32,
    window: *mut gin_window_t,
) -> gin_status_t {
    call("gin_window_alloc", || {
        let (comm, window) = (table::get::<Comm>(comm.id)?, output(window, "window")?);
        let bytes = usize::try_from(bytes).map_err(|_| Failure::argument(format!("{bytes} bytes are too many")))?;
        let inner = comm.inner.alloc_window::<u8>(bytes, self::flags(flags)?)?;
        window.write(gin_window_t { id: table::insert(Arc::new(Window { comm, inner }))? });
        Ok(())
    })
}

/// Returns the object of memory of the program.
pub(crate) fn import(device: &dyn Device, address: u64, bytes: u64) -> Result<Arc<Memory>, Failure> {
    if let Some(device) = device.downcast::<VirtualDevice>() {
        // Safety: the promise of the function of the header that takes the memory.
        return Ok(unsafe { device.import_memory(address, bytes)? });
    }
    #[cfg(feature = "cuda")]
    if let Some(device) = gin_gpu::cuda::CudaDevice::of(device) {
        // Safety: as above.
        return Ok(unsafe { device.import_memory(address, bytes)? });
    }
    Err(Failure::new(gin_status_t::GIN_ERROR_DEVICE, format!("{} takes no memory of the program", device.name())))
}

/// Returns the object of memory of the program for a window, which ranks in other processes map if they can.
fn import_for_ranks(comm: &Communicator, address: u64, bytes: u64) -> Result<MemorySlice, Failure> {
    #[cfg(feature = "cuda")]
    if let Some(device) = gin_gpu::cuda::CudaDevice::of(&**comm.gpu()) {
        let across = comm.bootstrap().is_across_processes();
        // Safety: the promise of `gin_window_register`.
        return Ok(unsafe { device.import_for_ranks(address, bytes, None, across)? });
    }
    Ok(import(&**comm.gpu(), address, bytes)?.whole())
}

/// Registers memory of the caller as this rank's part of a window. Collective; ranks may pass different lengths.
///
/// The memory stays the caller's. On a GPU it is device memory of the rank's GPU, from any allocator of the driver, or
/// pinned host memory; on a virtual GPU it is any memory of the process. If ranks of the host are other processes, it
/// is in one allocation of `ncclMemAlloc`, or of `cuMemCreate` with file descriptors. The caller owns the handle, and
/// closes it with `gin_window_close`.
///
/// # Safety
/// - As the crate's docs say. The memory stays valid until the window is closed on all ranks and no kernel uses it;
///   meanwhile the program accesses it only as it may access memory of a window.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_window_register(
    comm: gin_comm_t,
    memory: *mut c_void,
    bytes: u64,
    flags: u32,
    window: *mut gin_window_t,
) -> gin_status_t {
    call("gin_window_register", || {
        let (comm, window) = (table::get::<Comm>(comm.id)?, output(window, "window")?);
        let memory = import_for_ranks(&comm.inner, memory.expose_provenance() as u64, bytes)?;
        let inner = comm.inner.register::<u8>(&memory, self::flags(flags)?)?;
        window.write(gin_window_t { id: table::insert(Arc::new(Window { comm, inner }))? });
        Ok(())
    })
}

/// Returns the bytes that pass the window to a kernel. They are valid until the window is closed.
///
/// A kernel takes them by value: as `gin_device_window_t` in C++, as `Window<T>` in Rust.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_window_device(window: gin_window_t, device: *mut WindowHandle) -> gin_status_t {
    call("gin_window_device", || {
        let (window, device) = (table::get::<Window>(window.id)?, output(device, "device")?);
        device.write(window.alive()?.handle());
        Ok(())
    })
}

/// Returns the device address and the length in bytes of this rank's part. Either output may be null.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_window_memory(
    window: gin_window_t,
    memory: *mut *mut c_void,
    bytes: *mut u64,
) -> gin_status_t {
    call("gin_window_memory", || {
        let window = table::get::<Window>(window.id)?;
        let part = window.alive()?.memory();
        if !memory.is_null() {
            output(memory, "memory")?.write(std::ptr::with_exposed_provenance_mut(part.address() as usize));
        }
        if !bytes.is_null() {
            output(bytes, "bytes")?.write(part.bytes());
        }
        Ok(())
    })
}

/// Copies `bytes` bytes of the program to this rank's part, from byte `offset` on. No kernel may use them meanwhile.
///
/// # Safety
/// - As the crate's docs say; `from` has `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_window_write(
    window: gin_window_t,
    offset: u64,
    from: *const c_void,
    bytes: u64,
) -> gin_status_t {
    call("gin_window_write", || {
        let window = table::get::<Window>(window.id)?;
        let part = window.part(offset, bytes)?;
        Ok(part.write(offset, inputs(from.cast::<u8>(), bytes as usize, "from")?)?)
    })
}

/// Copies `bytes` bytes of this rank's part, from byte `offset` on, to the program. No kernel may use them meanwhile.
///
/// # Safety
/// - As the crate's docs say; `to` has `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_window_read(
    window: gin_window_t,
    offset: u64,
    to: *mut c_void,
    bytes: u64,
) -> gin_status_t {
    call("gin_window_read", || {
        let window = table::get::<Window>(window.id)?;
        let part = window.part(offset, bytes)?;
        Ok(part.read(offset, outputs(to.cast::<u8>(), bytes as usize, "to")?)?)
    })
}

/// Deregisters the window, and closes the handle. Collective while the communicator is active: waits for requests that
/// use it, and refuses while a kernel runs. After an error of an active communicator the handle stays open.
#[unsafe(no_mangle)]
pub extern "C" fn gin_window_close(window: gin_window_t) -> gin_status_t {
    call("gin_window_close", || {
        let found = table::get::<Window>(window.id)?;
        if found.comm.inner.state() == CommState::Active {
            found.comm.inner.deregister(&found.inner)?;
        }
        table::remove::<Window>(window.id).map(drop)
    })
}

/// Closes the handle. If the communicator is active, aborts it first: waits end on all ranks. Not collective: a rank
/// calls it if an error keeps it from the calls that the other ranks make.
#[unsafe(no_mangle)]
pub extern "C" fn gin_window_release(window: gin_window_t) -> gin_status_t {
    call("gin_window_release", || {
        let found = table::get::<Window>(window.id)?;
        if found.comm.inner.state() == CommState::Active {
            found.comm.inner.abort()?;
        }
        table::remove::<Window>(window.id).map(drop)
    })
}
