// SPDX-License-Identifier: MIT OR Apache-2.0
//! A stand-in for the CUDA driver, for machines without GPUs: a `libcuda.so` of two GPUs that counts its calls.
//!
//! `driver_calls.rs` compiles it with rustc alone. A kernel does nothing; it has ended when the test calls
//! `stand_in_end` for its stream. A launch wants the context of its stream to be current.
#![allow(non_snake_case)]

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fs::File;
use std::os::fd::IntoRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

type Pointer = *mut c_void;

const OK: c_int = 0;
const INVALID_VALUE: c_int = 1;
const INVALID_CONTEXT: c_int = 201;
const INVALID_HANDLE: c_int = 400;
const NOT_READY: c_int = 600;
const CAPTURE_UNSUPPORTED: c_int = 900;

/// Memory of the program, that nothing touches: of `cuMemCreate` with file descriptors, and of `cuMemAlloc`.
const MAPPED: (u64, u64) = (1 << 40, 4 << 20);
const PLAIN: (u64, u64) = (2 << 40, 1 << 20);

/// Returns start and length of the memory with this address.
fn range(at: u64) -> Option<(u64, u64)> {
    [MAPPED, PLAIN].into_iter().find(|(start, bytes)| (*start..start + bytes).contains(&at))
}

/// Work in order: how much was put on it, and how much is done.
#[derive(Default)]
struct Stream {
    context: usize,
    put: AtomicU64,
    done: AtomicU64,
    is_captured: AtomicBool,
}

#[derive(Default)]
struct Event {
    stream: Cell<usize>,
    at: Cell<u64>,
    is_captured: Cell<bool>,
}

/// The sizes of the kernel's parameters: those of the kernel that `gin bench ep` launches.
const SIZES: [usize; 7] = [168, 56, 8, 8, 4, 4, 8];

thread_local! {
    static CURRENT: Cell<usize> = const { Cell::new(0) };
    static MODE: Cell<c_int> = const { Cell::new(0) };
}

/// The mode in which a thread makes any call while a stream is captured.
const RELAXED: c_int = 2;

/// The number of captured streams, all in the mode that refuses calls of other threads too.
static CAPTURES: AtomicU64 = AtomicU64::new(0);

/// Calls that would have broken a capture.
static BROKEN: AtomicU64 = AtomicU64::new(0);

/// Does what is refused during a capture, and breaks it then, unless the thread has said that it may.
fn beside_captures(work: impl FnOnce() -> c_int) -> c_int {
    if CAPTURES.load(SeqCst) > 0 && MODE.get() != RELAXED {
        BROKEN.fetch_add(1, SeqCst);
        return CAPTURE_UNSUPPORTED;
    }
    work()
}

fn stream<'a>(handle: Pointer) -> &'a Stream {
    unsafe { &*handle.cast() }
}

fn event<'a>(handle: Pointer) -> &'a Event {
    unsafe { &*handle.cast() }
}

impl Stream {
    fn is_idle(&self) -> bool {
        self.done.load(SeqCst) == self.put.load(SeqCst)
    }

    /// Puts work on it. It is done at once if nothing is before it and `lasts` is not set.
    fn put(&self, lasts: bool) {
        if !self.is_captured.load(SeqCst) && (lasts || !self.is_idle()) {
            self.put.fetch_add(1, SeqCst);
        }
    }
}

impl Event {
    fn is_done(&self) -> bool {
        self.stream.get() == 0 || unsafe { &*(self.stream.get() as *const Stream) }.done.load(SeqCst) >= self.at.get()
    }
}

fn boxed<T>(value: T) -> Pointer {
    Box::into_raw(Box::new(value)).cast()
}

fn put<T>(to: *mut T, value: T) -> c_int {
    unsafe { to.write(value) };
    OK
}

macro_rules! driver {
    ($($name:ident($($arg:ident: $type:ty),*) $body:block)*) => {
        $(
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $type),*) -> c_int {
                calls::$name.fetch_add(1, SeqCst);
                $body
            }
        )*

        mod calls {
            #![allow(non_upper_case_globals)]
            $(pub static $name: super::AtomicU64 = super::AtomicU64::new(0);)*
        }

        static CALLS: &[(&str, &AtomicU64)] = &[$((stringify!($name), &calls::$name)),*];
    };
}

driver! {
    cuInit(_flags: c_uint) { OK }
    cuDriverGetVersion(to: *mut c_int) { put(to, 13000) }
    cuDeviceGetCount(to: *mut c_int) { put(to, 2) }
    cuDeviceGet(to: *mut c_int, ordinal: c_int) { put(to, ordinal) }
    cuDeviceGetName(to: *mut c_char, _length: c_int, _device: c_int) { put(to.cast(), *b"Stand-in\0") }
    cuDeviceGetPCIBusId(_to: *mut c_char, _length: c_int, _device: c_int) { INVALID_VALUE }
    cuDeviceGetAttribute(to: *mut c_int, attribute: c_int, _device: c_int) {
        put(to, match attribute {
            16 => 132,     // SMs
            75 => 9,       // compute capability
            97 => 227 << 10, // dynamic shared memory
            19 | 41 | 95 | 122 => 1, // mapped host memory, unified addresses, cooperative launches, 64-bit values
            _ => 0,
        })
    }
    cuDevicePrimaryCtxSetFlags_v2(_device: c_int, _flags: c_uint) { OK }
    cuDevicePrimaryCtxRetain(to: *mut usize, device: c_int) { put(to, 0x1000 + device as usize) }
    cuCtxSetCurrent(context: usize) {
        CURRENT.set(context);
        OK
    }
    cuCtxGetCurrent(to: *mut usize) { put(to, CURRENT.get()) }
    cuDeviceCanAccessPeer(to: *mut c_int, _device: c_int, _peer: c_int) { put(to, 0) }
    cuMemHostAlloc(to: *mut Pointer, bytes: usize, _flags: c_uint) {
        beside_captures(|| put(to, boxed_bytes(bytes)))
    }
    cuMemHostGetDevicePointer_v2(to: *mut u64, at: u64, _flags: c_uint) { put(to, at) }
    cuMemFreeHost(_at: Pointer) { beside_captures(|| OK) }
    cuMemAlloc_v2(to: *mut Pointer, bytes: usize) { beside_captures(|| put(to, boxed_bytes(bytes))) }
    cuMemFree_v2(_at: u64) { beside_captures(|| OK) }
    cuMemcpyAsync(to: *mut u8, from: *const u8, bytes: usize, on: Pointer) {
        unsafe { to.copy_from(from, bytes) };
        stream(on).put(false);
        OK
    }
    // The attributes that are not 0: the kind of memory, and its range.
    cuPointerGetAttributes(count: c_uint, which: *const c_int, to: *const *mut u64, at: u64) {
        let Some((start, bytes)) = range(at) else { return INVALID_VALUE };
        for index in 0..count as usize {
            let (which, to) = unsafe { (*which.add(index), *to.add(index)) };
            put(to, match which { 2 => 2, 11 => start, 12 => bytes, _ => 0 });
        }
        OK
    }
    cuMemGetAddressRange_v2(first: *mut u64, length: *mut u64, at: u64) {
        let Some((start, bytes)) = range(at) else { return INVALID_VALUE };
        put(first, start);
        put(length, bytes)
    }
    cuMemRetainAllocationHandle(to: *mut u64, at: u64) {
        if range(at) == Some(MAPPED) { put(to, 7) } else { INVALID_VALUE }
    }
    cuMemRelease(_handle: u64) { OK }
    cuMemExportToShareableHandle(to: *mut c_int, _handle: u64, _kind: c_int, _flags: u64) {
        File::open("/dev/null").map_or(INVALID_VALUE, |file| put(to, file.into_raw_fd()))
    }
    cuMemGetAccess(to: *mut u64, _location: Pointer, _at: u64) { put(to, 3) }
    cuStreamCreateWithPriority(to: *mut Pointer, _flags: c_uint, _priority: c_int) {
        put(to, boxed(Stream { context: CURRENT.get(), ..Stream::default() }))
    }
    cuStreamDestroy_v2(_stream: Pointer) { OK }
    cuStreamGetCtx(of: Pointer, to: *mut usize) { put(to, stream(of).context) }
    cuStreamQuery(of: Pointer) {
        if stream(of).is_captured.load(SeqCst) {
            BROKEN.fetch_add(1, SeqCst);
            return CAPTURE_UNSUPPORTED;
        }
        beside_captures(|| if stream(of).is_idle() { OK } else { NOT_READY })
    }
    cuStreamIsCapturing(of: Pointer, to: *mut c_int) { put(to, stream(of).is_captured.load(SeqCst).into()) }
    cuStreamBeginCapture_v2(of: Pointer, mode: c_int) {
        stream(of).is_captured.store(true, SeqCst);
        CAPTURES.fetch_add(u64::from(mode != RELAXED), SeqCst);
        OK
    }
    cuStreamEndCapture(of: Pointer, to: *mut Pointer) {
        stream(of).is_captured.store(false, SeqCst);
        CAPTURES.store(0, SeqCst);
        put(to, std::ptr::dangling_mut())
    }
    cuGraphInstantiateWithFlags(to: *mut Pointer, _graph: Pointer, _flags: u64) { put(to, std::ptr::dangling_mut()) }
    cuGraphDestroy(_graph: Pointer) { OK }
    cuGraphExecDestroy(_graph: Pointer) { OK }
    cuGraphLaunch(_graph: Pointer, on: Pointer) {
        stream(on).put(true);
        OK
    }
    cuStreamWaitEvent(of: Pointer, on: Pointer, _flags: c_uint) {
        stream(of).is_captured.fetch_or(event(on).is_captured.get(), SeqCst);
        stream(of).put(!event(on).is_done());
        OK
    }
    cuEventCreate(to: *mut Pointer, _flags: c_uint) { put(to, boxed(Event::default())) }
    cuEventDestroy_v2(_event: Pointer) { OK }
    cuEventRecord(what: Pointer, on: Pointer) {
        event(what).stream.set(on as usize);
        event(what).at.set(stream(on).put.load(SeqCst));
        event(what).is_captured.set(stream(on).is_captured.load(SeqCst));
        OK
    }
    cuEventQuery(of: Pointer) { beside_captures(|| if event(of).is_done() { OK } else { NOT_READY }) }
    cuThreadExchangeStreamCaptureMode(mode: *mut c_int) { put(mode, MODE.replace(unsafe { *mode })) }
    cuModuleLoadDataEx(to: *mut *const c_void, image: *const c_void, _n: c_uint, _options: Pointer, _values: Pointer) {
        beside_captures(|| put(to, image))
    }
    cuModuleLoadData(to: *mut *const c_void, image: *const c_void) { beside_captures(|| put(to, image)) }
    cuModuleGetFunction(to: *mut Pointer, module: Pointer, _name: *const c_char) { put(to, module) }
    cuModuleUnload(_module: Pointer) { beside_captures(|| OK) }
    // The image begins with the version.
    cuModuleGetGlobal_v2(to: *mut Pointer, bytes: *mut usize, module: Pointer, _name: *const c_char) {
        put(bytes, 4);
        put(to, module)
    }
    cuModuleGetFunctionCount(to: *mut c_uint, _module: Pointer) { put(to, 1) }
    cuModuleEnumerateFunctions(to: *mut Pointer, _number: c_uint, module: Pointer) { put(to, module) }
    cuFuncGetName(to: *mut *const c_char, _function: Pointer) { put(to, c"step".as_ptr()) }
    cuFuncLoad(_function: Pointer) { OK }
    // The maximum number of threads of a block; the rest is 0.
    cuFuncGetAttribute(to: *mut c_int, attribute: c_int, _function: Pointer) {
        put(to, if attribute == 0 { 1024 } else { 0 })
    }
    cuFuncSetAttribute(_function: Pointer, _attribute: c_int, _value: c_int) { OK }
    cuFuncGetParamInfo(_function: Pointer, index: usize, offset: *mut usize, size: *mut usize) {
        let Some(&bytes) = SIZES.get(index) else { return INVALID_VALUE };
        put(offset, 0);
        put(size, bytes)
    }
    cuOccupancyMaxActiveBlocksPerMultiprocessor(to: *mut c_int, _function: Pointer, threads: c_int, _shared: usize) {
        put(to, 1024 / threads)
    }
    cuStreamBatchMemOp_v2(on: Pointer, count: c_uint, first: *const Operation, _flags: c_uint) {
        if stream(on).context != CURRENT.get() {
            return INVALID_CONTEXT;
        }
        let all = unsafe { std::slice::from_raw_parts(first, count as usize) };
        if all.iter().all(Operation::carry_out) { OK } else { INVALID_VALUE }
    }
    // The kernel that adds to a word.
    cuLaunchKernel(_function: Pointer, _x: c_uint, _y: c_uint, _z: c_uint, _bx: c_uint, _by: c_uint, _bz: c_uint,
        _shared: c_uint, on: Pointer, values: *const *const u64, _extra: Pointer) {
        if stream(on).context != CURRENT.get() {
            return INVALID_CONTEXT;
        }
        let (word, amount) = unsafe { (**values as *mut u64, **values.add(1)) };
        unsafe { *word += amount };
        OK
    }
    cuLaunchKernelEx(config: *const Launch, _function: Pointer, _values: *mut Pointer, _extra: Pointer) {
        let on = stream(unsafe { (*config).stream });
        match CURRENT.get() {
            0 => INVALID_CONTEXT,
            current if current != on.context => INVALID_HANDLE,
            _ => {
                on.put(true);
                OK
            }
        }
    }
}

/// An operation on a word: wait for a value of 64 bits (4), write 32 bits (2) or 64 bits (5).
#[repr(C)]
pub struct Operation {
    kind: c_uint,
    address: u64,
    value: u64,
    flags: c_uint,
    _alias: u64,
    _pad: u64,
}

impl Operation {
    /// Does the operation. As the driver, refuses a write without a barrier; here, also a wait that would not end.
    fn carry_out(&self) -> bool {
        let word = self.address as *mut u64;
        match self.kind {
            2 if self.flags == 0 => unsafe { word.cast::<u32>().write(self.value as u32) },
            4 => return unsafe { word.read() } >= self.value,
            5 if self.flags == 0 => unsafe { word.write(self.value) },
            _ => return false,
        }
        true
    }
}

#[repr(C)]
pub struct Launch {
    _shape: [u32; 7],
    stream: Pointer,
}

fn boxed_bytes(bytes: usize) -> Pointer {
    vec![0u64; bytes.div_ceil(8)].leak().as_mut_ptr().cast()
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorName(_code: c_int, to: *mut *const c_char) -> c_int {
    put(to, c"an error of the stand-in".as_ptr())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorString(_code: c_int, to: *mut *const c_char) -> c_int {
    put(to, c"see the code".as_ptr())
}

/// Ends all work of a stream.
#[unsafe(no_mangle)]
pub extern "C" fn stand_in_end(of: Pointer) {
    stream(of).done.store(stream(of).put.load(SeqCst), SeqCst);
}

/// Ends the first `number` pieces of work of a stream that have not ended.
#[unsafe(no_mangle)]
pub extern "C" fn stand_in_end_one(of: Pointer, number: u64) {
    stream(of).done.fetch_add(number, SeqCst);
}

/// Returns the number of calls of a function.
///
/// # Safety
/// - The name ends with 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stand_in_calls(name: *const c_char) -> u64 {
    let name = unsafe { CStr::from_ptr(name) }.to_str();
    CALLS.iter().find(|(known, _)| Ok(*known) == name).map_or(0, |(_, calls)| calls.load(SeqCst))
}

/// Returns the number of all calls. Stores the number of calls that would have broken a capture.
#[unsafe(no_mangle)]
pub extern "C" fn stand_in_all_calls(broken: *mut u64) -> u64 {
    put(broken, BROKEN.load(SeqCst));
    CALLS.iter().map(|(_, calls)| calls.load(SeqCst)).sum()
}
