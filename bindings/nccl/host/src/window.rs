// SPDX-License-Identifier: MIT OR Apache-2.0
//! Windows.

use crate::abi::{ALIGNMENT, WINDOW_SYMMETRIC};
use crate::library::enter;
use crate::{DeviceComm, NcclError};
use bytemuck::Pod;
use gin_gpu::Device;
use gin_nccl_device::handle::WindowHandle;
use std::ffi::c_void;

/// Memory of `ncclMemAlloc` that all ranks of a communicator have registered.
#[derive(Debug)]
pub struct Window<'a> {
    comm: &'a DeviceComm,
    memory: *mut c_void,
    window: *mut c_void,
    bytes: u64,
}

impl<'a> Window<'a> {
    /// Allocates and registers `bytes` bytes. All ranks call, with the same length.
    ///
    /// # Errors
    /// [`NcclError::Call`].
    pub fn new(comm: &'a DeviceComm, bytes: u64) -> Result<Self, NcclError> {
        enter(comm.device())?;
        let (library, functions) = (comm.library(), &comm.library().functions);
        let whole = bytes.max(1).next_multiple_of(ALIGNMENT) as usize;
        let mut memory = std::ptr::null_mut();
        // Safety: it writes one pointer.
        library.check("ncclMemAlloc", comm.comm(), unsafe { (functions.allocate)(&raw mut memory, whole) })?;
        let mut window = Self { comm, memory, window: std::ptr::null_mut(), bytes };
        // Safety: the memory was allocated above, and the communicator is alive.
        let result =
            unsafe { (functions.register)(comm.comm(), memory, whole, &raw mut window.window, WINDOW_SYMMETRIC) };
        library.check("ncclCommWindowRegister", comm.comm(), result)?;
        Ok(window)
    }

    /// Returns the kernel parameter.
    pub fn handle(&self) -> WindowHandle {
        let comm = self.comm.handle();
        WindowHandle {
            window: self.window.addr() as u64,
            base: self.memory.addr() as u64,
            bytes: self.bytes,
            lsa_first: comm.rank - comm.lsa_rank,
            lsa_size: comm.lsa_size,
        }
    }

    /// Writes values from byte `offset` on.
    ///
    /// # Errors
    /// [`NcclError::Gpu`].
    ///
    /// # Panics
    /// If the values reach past the end.
    pub fn write<T: Pod>(&self, offset: u64, values: &[T]) -> Result<(), NcclError> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let address = self.checked(offset, bytes.len());
        // Safety: in range, and the window is alive; kernels that use it are the caller's to order.
        Ok(unsafe { self.comm.device().copy_in(address, bytes) }?)
    }

    /// Reads values from byte `offset` on.
    ///
    /// # Errors
    /// [`NcclError::Gpu`].
    ///
    /// # Panics
    /// If the values reach past the end.
    pub fn read<T: Pod>(&self, offset: u64, values: &mut [T]) -> Result<(), NcclError> {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(values);
        let address = self.checked(offset, bytes.len());
        // Safety: as above.
        Ok(unsafe { self.comm.device().copy_out(bytes, address) }?)
    }

    fn checked(&self, offset: u64, bytes: usize) -> u64 {
        let end = offset.checked_add(bytes as u64);
        assert!(end.is_some_and(|end| end <= self.bytes), "{bytes} bytes at {offset} reach past {} bytes", self.bytes);
        self.memory.addr() as u64 + offset
    }
}

impl Drop for Window<'_> {
    fn drop(&mut self) {
        if enter(self.comm.device()).is_err() {
            return;
        }
        let functions = &self.comm.library().functions;
        // Safety: both were made by `new`, and kernels that use them have ended. NCCL's log has a failure.
        unsafe {
            if !self.window.is_null() {
                (functions.deregister)(self.comm.comm(), self.window);
            }
            (functions.free)(self.memory);
        }
    }
}
