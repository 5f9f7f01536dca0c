// SPDX-License-Identifier: MIT OR Apache-2.0
//! The list of RDMA devices, and an open device.

use crate::verbs::{DeviceContext, PortAttributes, Verbs, VerbsDevice};
use crate::{CallError, check, non_null};
use std::ffi::{CStr, c_int};
use std::ptr::NonNull;
use std::sync::Arc;

/// The kernel's list of RDMA devices.
pub struct DeviceList<'a> {
    verbs: &'a Verbs,
    first: NonNull<*mut VerbsDevice>,
    devices: Vec<(String, *mut VerbsDevice)>,
}

impl<'a> DeviceList<'a> {
    /// Asks the kernel for its RDMA devices.
    ///
    /// # Errors
    /// [`CallError`]: the kernel has no RDMA support, or its `ib_uverbs` module is not loaded.
    pub fn new(verbs: &'a Verbs) -> Result<Self, CallError> {
        let mut count: c_int = 0;
        // Safety: the library may write `count`.
        let first = non_null("ibv_get_device_list", unsafe { (verbs.ibv_get_device_list)(&raw mut count) })?;
        // Safety: the list has `count` devices.
        let all = unsafe { std::slice::from_raw_parts(first.as_ptr(), usize::try_from(count).unwrap_or(0)) };
        let devices = all.iter().map(|&device| {
            // Safety: a device of the list; its name is a string that lives as long.
            let name = unsafe { CStr::from_ptr((verbs.ibv_get_device_name)(device)) };
            (name.to_string_lossy().into_owned(), device)
        });
        Ok(Self { verbs, first, devices: devices.collect() })
    }

    /// Returns each device with its name. The pointers are valid until the list is dropped.
    pub fn devices(&self) -> &[(String, *mut VerbsDevice)] {
        &self.devices
    }
}

impl Drop for DeviceList<'_> {
    fn drop(&mut self) {
        // Safety: the list came from the library and is not used any more.
        unsafe { (self.verbs.ibv_free_device_list)(self.first.as_ptr()) };
    }
}

/// An open RDMA device. Dropping it closes it, so objects that belong to the device keep it alive.
#[derive(derive_more::Debug)]
pub struct OpenDevice {
    /// Functions of libibverbs.
    #[debug(skip)]
    pub verbs: Arc<Verbs>,
    /// The device's name.
    pub name: String,
    #[debug(skip)]
    context: NonNull<DeviceContext>,
}

// Safety: libibverbs locks what threads share.
unsafe impl Send for OpenDevice {}
// Safety: as above.
unsafe impl Sync for OpenDevice {}

impl OpenDevice {
    /// Takes over the context that the function `call` returned for the device of this name.
    ///
    /// # Safety
    /// - The context is null, or one that this library opened and that nothing else closes.
    /// - `errno` is as the function left it.
    ///
    /// # Errors
    /// [`CallError`], if the context is null.
    pub unsafe fn new(
        verbs: &Arc<Verbs>,
        name: &str,
        call: &'static str,
        context: *mut DeviceContext,
    ) -> Result<Self, CallError> {
        Ok(Self { context: non_null(call, context)?, verbs: verbs.clone(), name: name.to_owned() })
    }

    /// Returns the device's context, which stays open as long as this.
    pub fn context(&self) -> NonNull<DeviceContext> {
        self.context
    }

    /// Reads the attributes of a port; ports count from 1.
    ///
    /// # Errors
    /// [`CallError`]: the device has no such port, or does not answer.
    pub fn port(&self, port: u8) -> Result<PortAttributes, CallError> {
        let mut attributes = PortAttributes::default();
        // Safety: the context is open, and `attributes` has at least the room that the library writes.
        let result = unsafe { (self.verbs.ibv_query_port)(self.context.as_ptr(), port, &raw mut attributes) };
        check("ibv_query_port", result).map(|()| attributes)
    }

    /// Reads an entry of a port's GID table.
    ///
    /// # Errors
    /// [`CallError`]: the table has no such entry, or the device does not answer.
    pub fn gid(&self, port: u8, index: u32) -> Result<[u8; 16], CallError> {
        let mut gid = [0; 16];
        // Safety: the context is open, and the library may write `gid`.
        let result = unsafe { (self.verbs.ibv_query_gid)(self.context.as_ptr(), port, index as c_int, &raw mut gid) };
        check("ibv_query_gid", result).map(|()| gid)
    }
}

impl Drop for OpenDevice {
    fn drop(&mut self) {
        // Safety: every object of the device kept it alive, so none is left.
        unsafe { (self.verbs.ibv_close_device)(self.context.as_ptr()) };
    }
}
