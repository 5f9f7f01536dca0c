// SPDX-License-Identifier: MIT OR Apache-2.0
//! The functions of the table. They check pointers, and turn errors and panics into codes and lines of NCCL's log.

use super::abi::{DEVICE_GIN_GDAKI, DeviceHandle, GDAKI_VERSION, Gin, GinConfig, GinProperties};
use super::coll::{Coll, Registered};
use super::context::Contexts;
use super::group::Contact;
use crate::abi::{HANDLE_BYTES, Properties, Start};
use crate::failure::Failure;
use crate::log;
use crate::table::{self, give, guard, guard_current, object, raw, take};
use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

const NAME: *const c_char = c"gin-gdaki".as_ptr();

unsafe extern "C" fn get_gin_properties(properties: *mut GinProperties) -> c_int {
    let all = GinProperties { supports_strong_signals: true, supports_va_signals: true };
    // Safety: NCCL's promise. A FETCH_ADD covers all earlier entries of its queue pair, and adds to any window.
    guard("getGinProperties", || unsafe { give(properties, all) })
}

unsafe extern "C" fn get_properties(_device: c_int, properties: *mut Properties) -> c_int {
    let all = Properties {
        // NCCL takes devices of one name for one device, so no network may have it.
        name: NAME,
        guid: u64::from_le_bytes(*b"gin-gdk1"),
        net_device_type: DEVICE_GIN_GDAKI,
        net_device_version: GDAKI_VERSION,
        ..table::properties()
    };
    // Safety: NCCL's promise.
    guard("getProperties", || unsafe { give(properties, all) })
}

unsafe extern "C" fn listen(
    _context: *mut c_void,
    _device: c_int,
    handle: *mut c_void,
    listen: *mut *mut c_void,
) -> c_int {
    guard_current("listen", |machine| {
        let contact = Contact::new(machine)?;
        // Safety: NCCL's promise.
        unsafe {
            give(handle.cast::<[u8; HANDLE_BYTES]>(), contact.to_bytes())?;
            give(listen, raw(contact))
        }
    })
}

unsafe extern "C" fn connect(
    _context: *mut c_void,
    handles: *const *const c_void,
    ranks: c_int,
    rank: c_int,
    _listen: *mut c_void,
    coll: *mut *mut c_void,
) -> c_int {
    guard_current("connect", |machine| {
        let (Ok(count), Ok(rank)) = (usize::try_from(ranks), usize::try_from(rank)) else {
            return Err(Failure::argument(format!("rank {rank} of {ranks} ranks")));
        };
        // Safety: NCCL's promise, a handle for each rank.
        let all = unsafe { table::handles(handles, count, Contact::read)? };
        let new = Coll::connect(machine, &all, rank)?;
        log::info(&format!("rank {rank} of {count} on GPU {}: connected to a software NIC", new.gpu));
        // Safety: NCCL's promise.
        unsafe { give(coll, raw(new)) }
    })
}

unsafe extern "C" fn create_context(
    coll: *mut c_void,
    config: *const GinConfig,
    context: *mut *mut c_void,
    handle: *mut *mut DeviceHandle,
) -> c_int {
    guard_current("createContext", |_| {
        // Safety of all: NCCL's promise.
        let coll: &Arc<Coll> = unsafe { object(coll, "communicator")? };
        let config: &GinConfig = unsafe { object(config.cast(), "configuration")? };
        let mut new = Box::new(Contexts::new(coll, config).map_err(|failure| coll.name(failure))?);
        let described = &raw mut new.handle;
        unsafe {
            give(handle, described)?;
            give(context, Box::into_raw(new).cast())
        }
    })
}

unsafe extern "C" fn destroy_context(context: *mut c_void) -> c_int {
    guard_current("destroyContext", |machine| {
        // Safety: NCCL's promise.
        drop(unsafe { take::<Contexts>(context, "context")? });
        machine.gpus.free_dropped();
        Ok(())
    })
}

unsafe extern "C" fn reg_mr_sym(
    coll: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    flags: u64,
    handle: *mut *mut c_void,
    window: *mut *mut c_void,
) -> c_int {
    guard_current("regMrSym", |_| {
        let address = data.expose_provenance() as u64;
        // Safety of all: NCCL's promise.
        unsafe {
            let coll: &Arc<Coll> = object(coll, "communicator")?;
            let new = coll.register(address, size as u64, kind, flags).map_err(|failure| coll.name(failure))?;
            give(window, std::ptr::with_exposed_provenance_mut(new.window.address() as usize))?;
            give(handle, raw(new))
        }
    })
}

/// Registers memory by its address, which NCCL passes with the file. So the plugin needs no file.
unsafe extern "C" fn reg_mr_sym_dma_buf(
    coll: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    _offset: u64,
    _file: c_int,
    flags: u64,
    handle: *mut *mut c_void,
    window: *mut *mut c_void,
) -> c_int {
    // Safety: NCCL's promise.
    unsafe { reg_mr_sym(coll, data, size, kind, flags, handle, window) }
}

unsafe extern "C" fn dereg_mr_sym(_coll: *mut c_void, handle: *mut c_void) -> c_int {
    guard_current("deregMrSym", |machine| {
        // Safety: NCCL's promise.
        drop(unsafe { take::<Registered>(handle, "handle")? });
        machine.gpus.free_dropped();
        Ok(())
    })
}

unsafe extern "C" fn close_coll(coll: *mut c_void) -> c_int {
    guard_current("closeColl", |machine| {
        // Safety: NCCL's promise.
        drop(unsafe { take::<Arc<Coll>>(coll, "communicator")? });
        machine.gpus.free_dropped();
        Ok(())
    })
}

unsafe extern "C" fn close_listen(listen: *mut c_void) -> c_int {
    // Safety: NCCL's promise.
    guard("closeListen", || unsafe { take::<Contact>(listen, "listen object").map(drop) })
}

unsafe extern "C" fn gin_progress(context: *mut c_void) -> c_int {
    guard("ginProgress", || {
        // Safety: NCCL's promise.
        let contexts: &Contexts = unsafe { object(context, "context")? };
        let group = &contexts.coll.group;
        group.idle.progress(&group.fabric).map_err(|failure| contexts.coll.name(failure))
    })
}

unsafe extern "C" fn query_last_error(context: *mut c_void, has_error: *mut bool) -> c_int {
    guard("queryLastError", || {
        // Safety of both: NCCL's promise.
        let contexts: &Contexts = unsafe { object(context, "context")? };
        unsafe { give(has_error, contexts.has_failed()) }
    })
}

/// The GDAKI table of NCCL 2.30.7 to 2.32.
#[unsafe(no_mangle)]
pub static ncclGinPlugin_v14: Gin = Gin {
    start: Start { name: NAME, init: table::init, devices: table::devices },
    get_gin_properties,
    get_properties,
    listen,
    connect,
    create_context,
    reg_mr_sym,
    reg_mr_sym_dma_buf,
    dereg_mr_sym,
    destroy_context,
    close_coll,
    close_listen,
    gin_progress,
    query_last_error,
    finalize: table::finalize,
};
