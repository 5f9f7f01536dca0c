// SPDX-License-Identifier: MIT OR Apache-2.0
//! Status codes, and the text of the last error of a thread.

use crate::types::gin_status_t;
use crate::types::gin_status_t::{
    GIN_ERROR_ABI, GIN_ERROR_ARGUMENT, GIN_ERROR_BOOTSTRAP, GIN_ERROR_BUSY, GIN_ERROR_DEVICE, GIN_ERROR_ENDED,
    GIN_ERROR_FORK, GIN_ERROR_HANDLE, GIN_ERROR_INTERNAL, GIN_ERROR_MEMORY, GIN_ERROR_NETWORK, GIN_ERROR_NOT_FOUND,
    GIN_ERROR_OTHER_RANK, GIN_ERROR_STATE, GIN_ERROR_TIMEOUT, GIN_OK,
};
use gin_boot::{BootstrapError, JobError};
use gin_gpu::GpuError;
use gin_gpu::placement::PlacementError;
use gin_host::comm::CommError;
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// The process in which the first call was made.
static PROCESS: OnceLock<u32> = OnceLock::new();

/// An error before it crosses the border: its code and text.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) status: gin_status_t,
    pub(crate) text: String,
}

impl Failure {
    pub(crate) fn new(status: gin_status_t, text: impl Into<String>) -> Self {
        Self { status, text: text.into() }
    }

    pub(crate) fn argument(text: impl Into<String>) -> Self {
        Self::new(GIN_ERROR_ARGUMENT, text)
    }

    /// Names the argument that it concerns.
    pub(crate) fn of(self, what: &str) -> Self {
        Self { text: format!("`{what}`: {}", self.text), ..self }
    }
}

impl From<BootstrapError> for Failure {
    fn from(error: BootstrapError) -> Self {
        let status = match &error {
            BootstrapError::Timeout { .. } => GIN_ERROR_TIMEOUT,
            BootstrapError::Ranks { .. } | BootstrapError::NoSuchRank { .. } => GIN_ERROR_ARGUMENT,
            _ => GIN_ERROR_BOOTSTRAP,
        };
        Self::new(status, error.to_string())
    }
}

impl From<JobError> for Failure {
    fn from(error: JobError) -> Self {
        match error {
            JobError::Bootstrap(error) => error.into(),
            other => Self::new(GIN_ERROR_BOOTSTRAP, other.to_string()),
        }
    }
}

impl From<PlacementError> for Failure {
    fn from(error: PlacementError) -> Self {
        Self::new(GIN_ERROR_ARGUMENT, error.to_string())
    }
}

impl From<GpuError> for Failure {
    fn from(error: GpuError) -> Self {
        let status = match &error {
            GpuError::UnknownKernel { .. } | GpuError::AmbiguousKernel { .. } => GIN_ERROR_NOT_FOUND,
            GpuError::ParameterCount { .. }
            | GpuError::ParameterSize { .. }
            | GpuError::ParameterType { .. }
            | GpuError::LaunchLimit { .. }
            | GpuError::UnevenClusters { .. }
            | GpuError::EmptyLaunch { .. }
            | GpuError::NotResident { .. }
            | GpuError::NotDependent { .. }
            | GpuError::Foreign { .. }
            | GpuError::ForeignHandle { .. }
            | GpuError::NoSuchDevice { .. }
            | GpuError::OutOfRange { .. } => GIN_ERROR_ARGUMENT,
            GpuError::AbiMismatch { .. } => GIN_ERROR_ABI,
            GpuError::OutOfMemory { .. } => GIN_ERROR_MEMORY,
            _ => GIN_ERROR_DEVICE,
        };
        Self::new(status, error.to_string())
    }
}

impl From<CommError> for Failure {
    fn from(error: CommError) -> Self {
        let status = match &error {
            CommError::State { .. } => GIN_ERROR_STATE,
            CommError::Busy { .. } | CommError::InFlight { .. } | CommError::KernelsRunning { .. } => GIN_ERROR_BUSY,
            CommError::Ended { .. } | CommError::ProxyGone => GIN_ERROR_ENDED,
            CommError::WindowGone { .. } => GIN_ERROR_HANDLE,
            CommError::OtherRank { .. } | CommError::OutOfStep { .. } => GIN_ERROR_OTHER_RANK,
            CommError::Bootstrap(error) => return error.clone().into(),
            CommError::Gpu(error) => return error.clone().into(),
            CommError::Net(_) | CommError::Nic(_) | CommError::Capability { .. } | CommError::Backend { .. } => {
                GIN_ERROR_NETWORK
            }
            CommError::NoPlace { .. } => GIN_ERROR_MEMORY,
            _ => GIN_ERROR_ARGUMENT,
        };
        Self::new(status, error.to_string())
    }
}

fn set_last(text: &str) {
    // Text of other libraries may contain a zero.
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // A thread that ends has no text any more.
    let _ = LAST.try_with(|last| last.replace(text));
}

fn check_process() -> Result<(), Failure> {
    let (first, this) = (*PROCESS.get_or_init(std::process::id), std::process::id());
    if first == this {
        return Ok(());
    }
    let text = format!(
        "this process ({this}) is the child of a fork of process {first}, which uses gin: gin's threads are not here; \
         start a process with exec, or fork before the first call"
    );
    Err(Failure::new(GIN_ERROR_FORK, text))
}

/// Runs the work of a function of the header. Keeps the text of its error, and catches panics.
pub(crate) fn call(name: &'static str, work: impl FnOnce() -> Result<(), Failure>) -> gin_status_t {
    let outcome = catch_unwind(AssertUnwindSafe(|| check_process().and_then(|()| work()))).unwrap_or_else(|payload| {
        let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default();
        // A payload's drop may panic too.
        std::mem::forget(payload);
        Err(Failure::new(GIN_ERROR_INTERNAL, format!("panic: {text}; this is an error in gin: please report it")))
    });
    match outcome {
        Ok(()) => GIN_OK,
        Err(Failure { status, text }) => {
            set_last(&format!("{name}: {text}"));
            status
        }
    }
}

/// Refuses a struct of another size than this library's.
pub(crate) fn check_size<T>(size: u32, what: &str, init: &str) -> Result<(), Failure> {
    let expected = size_of::<T>();
    if size as usize == expected {
        return Ok(());
    }
    Err(Failure::argument(format!("{what}.size is {size}, not {expected}: begin with {init}")))
}

/// Refuses a pointer to no value.
fn check_pointer<T>(pointer: *const T, what: &str) -> Result<(), Failure> {
    let problem = match () {
        () if pointer.is_null() => "null".to_owned(),
        () if !pointer.is_aligned() => format!("no multiple of {} bytes", align_of::<T>()),
        () => return Ok(()),
    };
    Err(Failure::argument(format!("`{what}` is {problem}: it must be a valid pointer")))
}

/// Returns the reference behind an output pointer.
pub(crate) fn output<'a, T>(pointer: *mut T, what: &str) -> Result<&'a mut MaybeUninit<T>, Failure> {
    check_pointer(pointer, what)?;
    // Safety: the caller of the function of the header promised that it is valid for writes.
    Ok(unsafe { &mut *pointer.cast() })
}

/// Returns the reference behind an input pointer.
pub(crate) fn input<'a, T>(pointer: *const T, what: &str) -> Result<&'a T, Failure> {
    check_pointer(pointer, what)?;
    // Safety: the caller of the function of the header promised that it is valid for reads.
    Ok(unsafe { &*pointer })
}

/// Returns the slice behind an input pointer; it may be null if it has no elements.
pub(crate) fn inputs<'a, T>(pointer: *const T, count: usize, what: &str) -> Result<&'a [T], Failure> {
    check_length::<T>(count, what)?;
    if count == 0 {
        return Ok(&[]);
    }
    input(pointer, what)?;
    // Safety: as in `input`, for `count` values.
    Ok(unsafe { std::slice::from_raw_parts(pointer, count) })
}

/// Returns the slice behind an output pointer, with default values; it may be null if it has no elements.
pub(crate) fn outputs<'a, T: Copy + Default>(
    pointer: *mut T,
    count: usize,
    what: &str,
) -> Result<&'a mut [T], Failure> {
    check_length::<T>(count, what)?;
    if count == 0 {
        return Ok(&mut []);
    }
    output(pointer, what)?;
    // Safety: as in `output`, for `count` values. Before a slice of them exists, they are initialised.
    unsafe {
        std::slice::from_raw_parts_mut(pointer.cast::<MaybeUninit<T>>(), count).fill(MaybeUninit::new(T::default()));
        Ok(std::slice::from_raw_parts_mut(pointer, count))
    }
}

fn check_length<T>(count: usize, what: &str) -> Result<(), Failure> {
    match count.checked_mul(size_of::<T>()) {
        Some(bytes) if isize::try_from(bytes).is_ok() => Ok(()),
        _ => Err(Failure::argument(format!("`{what}` has {count} elements, more than an address space"))),
    }
}

/// Returns the text behind a pointer.
pub(crate) fn text<'a>(pointer: *const c_char, what: &str) -> Result<&'a str, Failure> {
    input(pointer, what)?;
    // Safety: the caller promised a text that ends with a zero.
    let text = unsafe { std::ffi::CStr::from_ptr(pointer) };
    text.to_str().map_err(|_| Failure::argument(format!("`{what}` is not UTF-8")))
}

/// Copies a text with its final zero, cut at a character if it is too long.
pub(crate) fn fill(to: &mut [c_char], text: &str) {
    let mut end = text.len().min(to.len() - 1);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    to.fill(0);
    for (to, byte) in to.iter_mut().zip(&text.as_bytes()[..end]) {
        *to = *byte as c_char;
    }
}

/// Returns the text of the last error of the calling thread; empty if it had none. The text belongs to gin, and lives
/// until the thread's next call of gin that fails.
#[unsafe(no_mangle)]
pub extern "C" fn gin_last_error() -> *const c_char {
    LAST.try_with(|last| last.try_borrow().map_or(c"".as_ptr(), |last| last.as_ptr())).unwrap_or(c"".as_ptr())
}

/// Returns the name of a status code, such as `GIN_ERROR_HANDLE`. The text lives for ever.
#[unsafe(no_mangle)]
pub extern "C" fn gin_status_name(status: u32) -> *const c_char {
    const NAMES: [&std::ffi::CStr; 17] = [
        c"GIN_OK",
        c"GIN_ERROR_ARGUMENT",
        c"GIN_ERROR_HANDLE",
        c"GIN_ERROR_STATE",
        c"GIN_ERROR_BUSY",
        c"GIN_ERROR_ENDED",
        c"GIN_ERROR_TIMEOUT",
        c"GIN_ERROR_NO_JOB",
        c"GIN_ERROR_BOOTSTRAP",
        c"GIN_ERROR_DEVICE",
        c"GIN_ERROR_NETWORK",
        c"GIN_ERROR_MEMORY",
        c"GIN_ERROR_ABI",
        c"GIN_ERROR_NOT_FOUND",
        c"GIN_ERROR_OTHER_RANK",
        c"GIN_ERROR_FORK",
        c"GIN_ERROR_INTERNAL",
    ];
    NAMES.get(status as usize).unwrap_or(&c"unknown status").as_ptr()
}

/// Returns the version of the library, such as `0.1.0`. The text lives for ever.
#[unsafe(no_mangle)]
pub extern "C" fn gin_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Returns the library's version of the layouts that header, library and kernels share.
#[unsafe(no_mangle)]
pub extern "C" fn gin_abi() -> u32 {
    gin_abi::ABI_VERSION
}

/// Returns an error if a header, or device functions, have another version of the shared layouts than the library.
///
/// Pass `GIN_ABI_VERSION`. Functions that take a `gin_config_t` check it too.
#[unsafe(no_mangle)]
pub extern "C" fn gin_check_abi(abi: u32) -> gin_status_t {
    call("gin_check_abi", || check_abi(abi))
}

pub(crate) fn check_abi(abi: u32) -> Result<(), Failure> {
    if abi == gin_abi::ABI_VERSION {
        return Ok(());
    }
    let text = format!(
        "the program was compiled with layouts of version {abi}, the library has version {}: use gin.h of this library, \
         and compile again",
        gin_abi::ABI_VERSION
    );
    Err(Failure::new(GIN_ERROR_ABI, text))
}

#[cfg(test)]
mod tests {
    use super::{call, gin_last_error};
    use crate::types::gin_status_t::GIN_ERROR_INTERNAL;
    use std::ffi::CStr;

    #[test]
    fn a_panic_becomes_a_status_with_its_text() {
        let number = 7;
        let text = |status| {
            assert_eq!(status, GIN_ERROR_INTERNAL);
            // Safety: the text lives until this thread's next error.
            unsafe { CStr::from_ptr(gin_last_error()) }.to_str().expect("it is UTF-8").to_owned()
        };
        assert!(text(call("gin_one", || panic!("on purpose"))).starts_with("gin_one: panic: on purpose; "));
        assert!(text(call("gin_two", || panic!("number {number}"))).starts_with("gin_two: panic: number 7; "));
        let other = text(call("gin_three", || std::panic::panic_any(number)));
        assert!(other.starts_with("gin_three: panic: ; "), "{other}");
    }
}
