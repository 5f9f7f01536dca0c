// SPDX-License-Identifier: MIT OR Apache-2.0
//! The functions of the tables. They check pointers, and turn errors and panics into codes and lines of NCCL's log.

use crate::abi::{
    Completion, Config, Control, DEVICE_GIN_PROXY, Data14, Data15, HANDLE_BYTES, INTERNAL_ERROR, Logger, PTR_CUDA,
    PTR_DMABUF, PTR_HOST, Properties, Rma, Rma16, SIGNAL_ADD, SIGNAL_INC, SUCCESS, Start,
};
use crate::contact::Contact;
use crate::failure::Failure;
use crate::gpus::Machine;
use crate::group::{Coll, Listen};
use crate::log;
use crate::region::Handle;
use crate::transfer::{Part, Request};
use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};

const NAME: *const c_char = c"gin".as_ptr();

/// The calls of the progress function between two checks of the GPUs' work and of the other processes.
const CHECK: u32 = 1 << 14;

/// The calls of `init` without a call of `finalize`.
static USERS: AtomicI64 = AtomicI64::new(0);

/// The object that `createContext` makes: the communicator, for the data calls.
struct Context {
    coll: Arc<Coll>,
    contexts: c_int,
    calls: AtomicU32,
}

/// Runs a function of the table. No panic crosses into NCCL.
pub(crate) fn guard(function: &str, work: impl FnOnce() -> Result<(), Failure>) -> c_int {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => SUCCESS,
        Ok(Err(Failure { code, text })) => {
            log::warn(&format!("{function}: {text}"));
            code
        }
        Err(_) => {
            log::warn(&format!("{function}: a panic in the plugin; its text is in the standard error output"));
            INTERNAL_ERROR
        }
    }
}

/// Runs a function that may make another GPU the current one, and gives the caller its GPU back.
pub(crate) fn guard_current(function: &str, work: impl FnOnce(&'static Machine) -> Result<(), Failure>) -> c_int {
    guard(function, || {
        let machine = Machine::get()?;
        let _keep = machine.gpus.keep_current().map_err(Failure::cuda)?;
        work(machine)
    })
}

/// Returns an object that the plugin has passed to NCCL.
///
/// # Safety
/// - The pointer is null, or of an object of this type that NCCL has not given back.
pub(crate) unsafe fn object<'a, T>(pointer: *const c_void, what: &str) -> Result<&'a T, Failure> {
    // Safety: the caller's promise.
    unsafe { pointer.cast::<T>().as_ref() }.ok_or_else(|| Failure::argument(format!("no {what}")))
}

/// Writes a result of a function.
///
/// # Safety
/// - The pointer is null or valid.
pub(crate) unsafe fn give<T>(to: *mut T, value: T) -> Result<(), Failure> {
    if to.is_null() {
        return Err(Failure::argument("no place for the result"));
    }
    // Safety: the caller's promise.
    unsafe { to.write(value) };
    Ok(())
}

/// Takes an object back from NCCL.
///
/// # Safety
/// - The pointer is null, or of [`Box::into_raw`], and not used any more.
pub(crate) unsafe fn take<T>(pointer: *mut c_void, what: &str) -> Result<Box<T>, Failure> {
    if pointer.is_null() {
        return Err(Failure::argument(format!("no {what}")));
    }
    // Safety: the caller's promise.
    Ok(unsafe { Box::from_raw(pointer.cast()) })
}

pub(crate) fn raw<T>(value: T) -> *mut c_void {
    Box::into_raw(Box::new(value)).cast()
}

/// Counts a user. NCCL calls it twice for a communicator, and not at all for some parts of one.
pub(crate) unsafe extern "C" fn init(context: *mut *mut c_void, _communicator: u64, logger: Option<Logger>) -> c_int {
    log::set(logger);
    guard_current("init", |_| {
        USERS.fetch_add(1, Ordering::Relaxed);
        // Safety: NCCL's promise. No function reads the context; NCCL may pass the context of another plugin.
        unsafe { give(context, (&raw const USERS).cast_mut().cast()) }
    })
}

pub(crate) unsafe extern "C" fn finalize(_context: *mut c_void) -> c_int {
    // NCCL may call it more often than `init`, so it frees nothing.
    let _ = USERS.try_update(Ordering::Relaxed, Ordering::Relaxed, |users| (users > 0).then_some(users - 1));
    SUCCESS
}

pub(crate) unsafe extern "C" fn devices(count: *mut c_int) -> c_int {
    // Safety: NCCL's promise.
    guard("devices", || unsafe { give(count, 1) })
}

unsafe extern "C" fn get_rma_properties(_coll: *mut c_void, flushes_all_puts_on_any_signal: *mut bool) -> c_int {
    // Safety: NCCL's promise. A signal covers puts between the same two ranks only.
    guard("getRmaProperties", || unsafe { give(flushes_all_puts_on_any_signal, false) })
}

/// Returns the properties of the only device.
pub(crate) fn properties() -> Properties {
    Properties {
        // NCCL takes devices of one name for one device, so no network may have it.
        name: NAME,
        pci_path: std::ptr::null(),
        guid: u64::from_le_bytes(*b"gin-rma1"),
        // NCCL then also registers windows of several allocations.
        ptr_support: PTR_HOST | PTR_CUDA | PTR_DMABUF,
        reg_is_global: 0,
        force_flush: 0,
        speed: 400_000,
        port: 1,
        latency: 0.0,
        max_comms: 1 << 16,
        // The depth of NCCL's queues is 32 times this number, and must be a power of two.
        max_recvs: 8,
        net_device_type: DEVICE_GIN_PROXY,
        net_device_version: 100,
        virtual_devices: 1,
        virtual_device: [0; 8],
        max_p2p_bytes: 1 << 40,
        max_coll_bytes: 1 << 40,
        max_multi_request_size: 1,
        rail_id: -1,
        plane_id: -1,
    }
}

unsafe extern "C" fn get_properties(_device: c_int, all: *mut Properties) -> c_int {
    // Safety: NCCL's promise.
    guard("getProperties", || unsafe { give(all, properties()) })
}

unsafe extern "C" fn listen(
    _context: *mut c_void,
    _device: c_int,
    handle: *mut c_void,
    listen: *mut *mut c_void,
) -> c_int {
    guard_current("listen", |machine| {
        let new = Listen::new(machine)?;
        // Safety: NCCL's promise.
        unsafe {
            give(handle.cast::<[u8; HANDLE_BYTES]>(), new.contact.to_bytes())?;
            give(listen, raw(new))
        }
    })
}

/// Reads the handles of all ranks.
///
/// # Safety
/// - The pointer is null, or has `count` pointers, each null or of a handle.
pub(crate) unsafe fn handles<T>(
    handles: *const *const c_void,
    count: usize,
    read: impl Fn(usize, &[u8; HANDLE_BYTES]) -> Result<T, Failure>,
) -> Result<Vec<T>, Failure> {
    let one = |rank: usize| {
        // Safety of both: the caller's promise.
        let handle = unsafe { object::<*const c_void>(handles.wrapping_add(rank).cast(), "handles")? };
        read(rank, unsafe { object(*handle, "handle")? })
    };
    if handles.is_null() {
        return Err(Failure::argument("no handles"));
    }
    (0..count).map(one).collect()
}

unsafe extern "C" fn connect(
    _context: *mut c_void,
    handles: *const *const c_void,
    ranks: c_int,
    rank: c_int,
    listen: *mut c_void,
    coll: *mut *mut c_void,
) -> c_int {
    guard_current("connect", |machine| {
        let (Ok(count), Ok(rank)) = (usize::try_from(ranks), usize::try_from(rank)) else {
            return Err(Failure::argument(format!("rank {rank} of {ranks} ranks")));
        };
        // Safety: NCCL's promise, a handle for each rank.
        let all = unsafe { self::handles(handles, count, Contact::read)? };
        // Safety: NCCL's promise.
        let listen = unsafe { listen.cast::<Listen>().as_ref() };
        let new = Coll::connect(machine, &all, rank, listen)?;
        log::info(&format!("rank {rank} of {count} on GPU {}: connected by copies between GPUs", new.gpu));
        // Safety: NCCL's promise.
        unsafe { give(coll, raw(new)) }
    })
}

unsafe extern "C" fn create_context(coll: *mut c_void, config: *const Config, context: *mut *mut c_void) -> c_int {
    guard("createContext", || {
        // Safety of all: NCCL's promise.
        let (coll, config) =
            unsafe { (object::<Arc<Coll>>(coll, "communicator")?, object::<Config>(config.cast(), "configuration")?) };
        let new = Context { coll: coll.clone(), contexts: config.contexts, calls: AtomicU32::new(0) };
        unsafe { give(context, raw(new)) }
    })
}

unsafe extern "C" fn destroy_context(context: *mut c_void) -> c_int {
    guard("destroyContext", || {
        // Safety: NCCL's promise.
        let context = unsafe { take::<Context>(context, "context")? };
        context.coll.finish()
    })
}

unsafe extern "C" fn reg_mr_sym(
    coll: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    flags: u64,
    handle: *mut *mut c_void,
) -> c_int {
    guard_current("regMrSym", |_| {
        let address = data.expose_provenance() as u64;
        // Safety of all: NCCL's promise.
        unsafe {
            let coll: &Arc<Coll> = object(coll, "communicator")?;
            let new = coll.register(address, size as u64, kind, flags);
            give(handle, raw(new.map_err(|failure| coll.name(failure, "register"))?))
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
) -> c_int {
    // Safety: NCCL's promise.
    unsafe { reg_mr_sym(coll, data, size, kind, flags, handle) }
}

unsafe extern "C" fn dereg_mr_sym(coll: *mut c_void, handle: *mut c_void) -> c_int {
    guard_current("deregMrSym", |machine| {
        // Safety of both: NCCL's promise.
        let (coll, handle) = unsafe { (object::<Arc<Coll>>(coll, "communicator")?, take::<Handle>(handle, "handle")?) };
        coll.deregister(&handle)?;
        drop(handle);
        machine.gpus.free_dropped();
        Ok(())
    })
}

unsafe extern "C" fn close_coll(coll: *mut c_void) -> c_int {
    guard_current("closeColl", |machine| {
        // Safety: NCCL's promise.
        let coll = unsafe { take::<Arc<Coll>>(coll, "communicator")? };
        let ended = coll.finish();
        coll.close();
        drop(coll);
        machine.gpus.free_dropped();
        ended
    })
}

unsafe extern "C" fn close_listen(listen: *mut c_void) -> c_int {
    // Safety: NCCL's promise.
    guard("closeListen", || unsafe { take::<Listen>(listen, "listen object").map(drop) })
}

/// Starts a put, a get or a signal, and passes its request to NCCL.
///
/// # Safety
/// - The pointers are null, or as NCCL promises.
unsafe fn start(
    Call { context, number, request }: Call,
    operation: impl Fn() -> String,
    work: impl FnOnce(&Coll) -> Result<Request, Failure>,
) -> Result<(), Failure> {
    // Safety: the caller's promise.
    let context: &Context = unsafe { object(context, "context")? };
    let started = if (0..context.contexts).contains(&number) {
        work(&context.coll)
    } else {
        Err(Failure::argument(format!("context {number} of {}", context.contexts)))
    };
    let Request(value) = started.map_err(|failure| context.coll.fail(failure, &operation()))?;
    // Safety: the caller's promise.
    unsafe { give(request, std::ptr::without_provenance_mut(value as usize)) }
}

/// Returns the registration and the offset of bytes; `None` without a handle.
///
/// # Safety
/// - As [`object`].
unsafe fn part<'a>((offset, handle): Bytes) -> Option<Part<'a>> {
    // Safety: the caller's promise.
    unsafe { handle.cast::<Handle>().as_ref() }.map(|handle| (handle, offset))
}

/// One data call: the arguments of all data calls, the arguments of this call, and flags if the version has them. The
/// plugin needs no flag.
macro_rules! data_call {
    ($name:ident($($own:ident: $type:ty),*; $($flags:ty)?) => $function:ident($($signal:expr)?)) => {
        unsafe extern "C" fn $name(
            context: *mut c_void,
            number: c_int,
            from: u64,
            from_handle: *mut c_void,
            size: usize,
            to: u64,
            to_handle: *mut c_void,
            rank: u32,
            $($own: $type,)*
            $(_: $flags,)?
            request: *mut *mut c_void,
        ) -> c_int {
            let call = Call { context, number, request };
            // Safety: NCCL's promise.
            unsafe { $function(call, (from, from_handle), size, (to, to_handle), rank $(, $signal)?) }
        }
    };
}

/// The data calls of a version, which have flags since version 15.
macro_rules! data {
    ($data:ident $(, $flags:ty)?) => {{
        data_call!(iput(; $($flags)?) => put(None));
        data_call!(iput_signal(word: u64, handle: *mut c_void, value: u64, kind: u32, _is_strong: bool; $($flags)?)
            => put(Some(((word, handle), kind, value))));
        data_call!(iget(; $($flags)?) => get());
        $data { iput, iput_signal, iget }
    }};
}

/// The context of a data call, the number of NCCL's context, and the place of the request.
#[derive(Clone, Copy)]
struct Call {
    context: *mut c_void,
    number: c_int,
    request: *mut *mut c_void,
}

/// An offset, and the handle of its registration, which may be null.
type Bytes = (u64, *mut c_void);

/// Puts. `signal`: its word, the operation, and the value of an addition. Weak signals are strong here, too.
///
/// # Safety
/// - The pointers are null, or as NCCL promises.
unsafe fn put(call: Call, from: Bytes, size: usize, to: Bytes, rank: u32, signal: Option<(Bytes, u32, u64)>) -> c_int {
    let (function, with) = if signal.is_some() { ("iputSignal", " with signal") } else { ("iput", "") };
    guard(function, || {
        let operation = || format!("put of {size} bytes{with} to rank {rank}");
        // Safety of all: the caller's promise.
        let word = |(word, kind, value): (Bytes, u32, u64)| {
            let amount = match kind {
                SIGNAL_INC => 1,
                SIGNAL_ADD => value,
                _ => return Err(Failure::argument(format!("operation {kind} of a signal is not known"))),
            };
            let word = unsafe { part(word) }.ok_or_else(|| Failure::argument("a signal without a handle"))?;
            Ok((word, amount))
        };
        let work = |coll: &Coll| {
            let (to, from) = unsafe { (part(to), part(from)) };
            coll.put(rank, size as u64, to, from, signal.map(word).transpose()?)
        };
        unsafe { start(call, operation, work) }
    })
}

/// Gets.
///
/// # Safety
/// - As [`put`].
unsafe fn get(call: Call, from: Bytes, size: usize, to: Bytes, rank: u32) -> c_int {
    guard("iget", || {
        let operation = || format!("get of {size} bytes from rank {rank}");
        // Safety of both: the caller's promise.
        let work = |coll: &Coll| match unsafe { (part(from), part(to)) } {
            (Some(from), Some(to)) => coll.get(rank, size as u64, from, to),
            _ => Err(Failure::argument("a get without a handle of both windows")),
        };
        unsafe { start(call, operation, work) }
    })
}

/// Does nothing: a get is complete only when its bytes are in memory.
unsafe extern "C" fn iflush(
    _context: *mut c_void,
    _number: c_int,
    _handle: *mut c_void,
    _rank: u32,
    request: *mut *mut c_void,
) -> c_int {
    // Safety: NCCL's promise.
    guard("iflush", || unsafe { give(request, null_mut()) })
}

unsafe extern "C" fn test(coll: *mut c_void, request: *mut c_void, done: *mut c_int) -> c_int {
    guard("test", || {
        // Safety of both: NCCL's promise.
        let coll: &Arc<Coll> = unsafe { object(coll, "communicator")? };
        let is_done = request.is_null() || Request(request.addr() as u64).is_done(coll)?;
        unsafe { give(done, c_int::from(is_done)) }
    })
}

unsafe extern "C" fn rma_progress(context: *mut c_void) -> c_int {
    guard("rmaProgress", || {
        // Safety: NCCL's promise.
        let context: &Context = unsafe { object(context, "context")? };
        let coll = &context.coll;
        coll.progress()?;
        // An error of a GPU would otherwise be found by the next request only, and the end of a process not at all.
        if context.calls.fetch_add(1, Ordering::Relaxed) % CHECK != CHECK - 1 || coll.has_failed() {
            return Ok(());
        }
        coll.check()?;
        coll.check_processes()
    })
}

unsafe extern "C" fn query_last_error(context: *mut c_void, has_error: *mut bool) -> c_int {
    guard("queryLastError", || {
        // Safety of both: NCCL's promise.
        let context: &Context = unsafe { object(context, "context")? };
        unsafe { give(has_error, context.coll.has_failed()) }
    })
}

const START: Start = Start { name: NAME, init, devices };

const CONTROL: Control = Control {
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
};

const DATA14: Data14 = data!(Data14);

const DATA15: Data15 = data!(Data15, u32);

const COMPLETION: Completion = Completion { iflush, test, rma_progress, query_last_error, finalize };

/// The table of NCCL 2.30.7.
#[unsafe(no_mangle)]
pub static ncclRmaPlugin_v14: Rma<Data14> =
    Rma { start: START, control: CONTROL, data: DATA14, completion: COMPLETION };

/// The table of NCCL 2.31.
#[unsafe(no_mangle)]
pub static ncclRmaPlugin_v15: Rma<Data15> =
    Rma { start: START, control: CONTROL, data: DATA15, completion: COMPLETION };

/// The table of NCCL 2.32.
#[unsafe(no_mangle)]
pub static ncclRmaPlugin_v16: Rma16 =
    Rma16 { start: START, get_rma_properties, control: CONTROL, data: DATA15, completion: COMPLETION };
