// SPDX-License-Identifier: MIT OR Apache-2.0
//! Streams, modules, kernels, launches.
//!
//! A CUDA program launches its kernels itself, on its own streams, and needs none of these functions. They run kernels
//! that are linked into the program on the virtual GPU, and kernels from PTX on GPUs.

use crate::comm::Comm;
use crate::ep::types::gin_memory_t;
use crate::job::Job;
use crate::status::{Failure, call, input, inputs, output, text};
use crate::table;
use crate::types::gin_status_t::{GIN_ERROR_DEVICE, GIN_ERROR_HANDLE};
use crate::types::{
    gin_arg_t, gin_job_t, gin_kernel_fn_t, gin_kernel_t, gin_module_t, gin_shape_t, gin_status_t, gin_stream_t,
};
use crate::window::{Window, import};
use gin_abi::{CommHandle, WindowHandle};
use gin_boot::lock;
use gin_device::exec::Dim3;
use gin_device::kernel::{KernelEntry, KernelParam};
use gin_gpu::{
    Argument, DeviceKind, Function, KernelArg, LaunchConfig, ModuleSource, Parameter, Stream as DeviceStream,
};
use std::any::TypeId;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_void};
use std::sync::{Arc, Mutex};

/// A stream.
pub(crate) struct Stream {
    pub(crate) inner: Arc<dyn DeviceStream>,
}

impl table::Handled for Stream {
    const KIND: table::Kind = table::Kind::Stream;
}

/// Kernels that were loaded together.
pub(crate) struct Module {
    inner: Box<dyn gin_gpu::Module>,
}

impl table::Handled for Module {
    const KIND: table::Kind = table::Kind::Module;
}

/// A kernel.
pub(crate) struct Kernel {
    function: Function,
    /// The function of a kernel in C, which its first, hidden parameter holds.
    code: Option<usize>,
}

impl table::Handled for Kernel {
    const KIND: table::Kind = table::Kind::Kernel;
}

/// Makes a stream of the rank's device. The caller closes the handle with `gin_stream_close`.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_stream_create(job: gin_job_t, stream: *mut gin_stream_t) -> gin_status_t {
    call("gin_stream_create", || {
        let (job, stream) = (table::get::<Job>(job.id)?, output(stream, "stream")?);
        let inner = job.device.stream()?;
        stream.write(gin_stream_t { id: table::insert(Arc::new(Stream { inner }))? });
        Ok(())
    })
}

/// Uses a stream of the program, a `cudaStream_t` or `CUstream` of the rank's GPU. gin does not destroy it. The caller
/// closes the handle with `gin_stream_close`.
///
/// # Safety
/// - As the crate's docs say. The stream lives until the handle is closed and the work put on it is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_stream_from_cuda(
    job: gin_job_t,
    cuda: *mut c_void,
    stream: *mut gin_stream_t,
) -> gin_status_t {
    call("gin_stream_from_cuda", || {
        let (job, stream) = (table::get::<Job>(job.id)?, output(stream, "stream")?);
        let inner = foreign_stream(&job, cuda)?;
        stream.write(gin_stream_t { id: table::insert(Arc::new(Stream { inner }))? });
        Ok(())
    })
}

fn foreign_stream(job: &Job, cuda: *mut c_void) -> Result<Arc<dyn DeviceStream>, Failure> {
    #[cfg(feature = "cuda")]
    if let Some(device) = gin_gpu::cuda::CudaDevice::of(&*job.device) {
        // Safety: the promise of `gin_stream_from_cuda`.
        return Ok(unsafe { device.stream_from_raw(cuda)? });
    }
    let _ = cuda;
    Err(Failure::new(GIN_ERROR_DEVICE, format!("{} has no streams of CUDA", job.device.name())))
}

/// Waits until all work of the stream is done. An error of a kernel is reported once.
#[unsafe(no_mangle)]
pub extern "C" fn gin_stream_synchronize(stream: gin_stream_t) -> gin_status_t {
    call("gin_stream_synchronize", || Ok(table::get::<Stream>(stream.id)?.inner.synchronize()?))
}

/// Waits until all work of the stream is done, then copies `to.bytes` bytes of the program to memory of the stream's
/// device.
///
/// # Safety
/// - As the crate's docs say; `from` has `to.bytes` bytes, and no other code uses the memory of `to` during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_stream_write(
    stream: gin_stream_t,
    to: *const gin_memory_t,
    from: *const c_void,
) -> gin_status_t {
    call("gin_stream_write", || {
        let (stream, to) = (table::get::<Stream>(stream.id)?, input(to, "to")?);
        let bytes = inputs(from.cast::<u8>(), usize::try_from(to.bytes).unwrap_or(usize::MAX), "from")?;
        if bytes.is_empty() {
            return Ok(stream.inner.synchronize()?);
        }
        let address = to.data.expose_provenance() as u64;
        let memory = import(&*stream.inner.device(), address, to.bytes).map_err(|failure| failure.of("to"))?;
        stream.inner.synchronize()?;
        Ok(memory.whole().write(0, bytes)?)
    })
}

/// Closes the handle. Work of the stream goes on.
#[unsafe(no_mangle)]
pub extern "C" fn gin_stream_close(stream: gin_stream_t) -> gin_status_t {
    call("gin_stream_close", || table::remove::<Stream>(stream.id).map(drop))
}

/// Loads kernels: PTX text or a cubin of `bytes` bytes; or, if `image` is null, the Rust kernels that are linked into
/// the program, which the virtual GPU runs. The caller closes the handle with `gin_module_close`.
///
/// # Safety
/// - As the crate's docs say; `image` has `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_module_load(
    job: gin_job_t,
    image: *const c_void,
    bytes: usize,
    module: *mut gin_module_t,
) -> gin_status_t {
    call("gin_module_load", || {
        let (job, module) = (table::get::<Job>(job.id)?, output(module, "module")?);
        let image = inputs(image.cast::<u8>(), bytes, "image")?;
        let source = match image {
            [] => ModuleSource::Linked,
            [0x7f, b'E', b'L', b'F', ..] => ModuleSource::Cubin(image),
            _ => {
                let text = image.split(|&byte| byte == 0).next().unwrap_or_default();
                let text =
                    std::str::from_utf8(text).map_err(|_| Failure::argument("`image` is neither PTX nor a cubin"))?;
                ModuleSource::Ptx(text)
            }
        };
        let inner = job.device.load(source)?;
        module.write(gin_module_t { id: table::insert(Arc::new(Module { inner }))? });
        Ok(())
    })
}

/// Returns the kernel of this name. The caller closes the handle with `gin_kernel_close`.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_module_kernel(
    module: gin_module_t,
    name: *const c_char,
    kernel: *mut gin_kernel_t,
) -> gin_status_t {
    call("gin_module_kernel", || {
        let (module, kernel) = (table::get::<Module>(module.id)?, output(kernel, "kernel")?);
        let function = module.inner.function(text(name, "name")?)?;
        kernel.write(gin_kernel_t { id: table::insert(Arc::new(Kernel { function, code: None }))? });
        Ok(())
    })
}

/// Closes the handle. Kernels of the module stay usable.
#[unsafe(no_mangle)]
pub extern "C" fn gin_module_close(module: gin_module_t) -> gin_status_t {
    call("gin_module_close", || table::remove::<Module>(module.id).map(drop))
}

type Code = unsafe extern "C-unwind" fn(*const *const c_void);

/// Calls a kernel in C, whose address is the first parameter.
///
/// # Safety
/// - `params[0]` points to the address of a `Code`; the others are its parameters.
unsafe fn call_c(params: *const *const u8) {
    // Safety: the caller's promise.
    unsafe {
        let code = *(*params).cast::<usize>();
        let code = std::mem::transmute::<usize, Code>(code);
        code(params.add(1).cast());
    }
}

/// The entries of kernels in C, by name and sizes of parameters. A launch may outlive its handle, so none is freed.
static ENTRIES: Mutex<BTreeMap<(String, Vec<usize>), &'static KernelEntry>> = Mutex::new(BTreeMap::new());

/// Returns the entry of a kernel in C.
fn entry(name: &str, sizes: &[usize]) -> &'static KernelEntry {
    let parameter = |name, size| KernelParam { name, type_name: "bytes", type_id: TypeId::of::<u8>(), size, align: 16 };
    lock(&ENTRIES).entry((name.to_owned(), sizes.to_vec())).or_insert_with(|| {
        let mut params = vec![parameter("function", size_of::<usize>())];
        params.extend(sizes.iter().map(|&size| parameter("", size)));
        Box::leak(Box::new(KernelEntry {
            name: name.to_owned().leak(),
            module: "C",
            abi: gin_abi::ABI_VERSION,
            params: params.leak(),
            launch_bounds: None,
            call: call_c,
        }))
    })
}

/// Makes a kernel of a function of the program. Only the virtual GPU runs it: it calls the function as each thread of
/// the grid. `sizes` are the sizes in bytes of its `count` parameters. The caller closes the handle with
/// `gin_kernel_close`.
///
/// The function calls the device functions of gin, which this library has for CPUs too; it must not wait in another
/// way.
///
/// # Safety
/// - As the crate's docs say. The function has these parameters, and lives as long as the handle and its launches.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_kernel_of_function(
    function: gin_kernel_fn_t,
    name: *const c_char,
    sizes: *const usize,
    count: usize,
    kernel: *mut gin_kernel_t,
) -> gin_status_t {
    call("gin_kernel_of_function", || {
        let function = function.ok_or_else(|| Failure::argument("`function` is null"))?;
        let (name, kernel) = (text(name, "name")?, output(kernel, "kernel")?);
        let sizes = inputs(sizes, count, "sizes")?;
        let code = Some(function as *const () as usize);
        let function = gin_gpu::virt::function(entry(name, sizes));
        kernel.write(gin_kernel_t { id: table::insert(Arc::new(Kernel { function, code }))? });
        Ok(())
    })
}

/// Closes the handle. Launches go on.
#[unsafe(no_mangle)]
pub extern "C" fn gin_kernel_close(kernel: gin_kernel_t) -> gin_status_t {
    call("gin_kernel_close", || table::remove::<Kernel>(kernel.id).map(drop))
}

/// Refuses bytes of a communicator or a window, by their type in Rust or their size, that this process does not have.
fn check_object(index: usize, parameter: &Parameter, bytes: &[u8]) -> Result<(), Failure> {
    let refuse = |what: &str| {
        let text = format!("argument {index} is no {what} of this process: it is closed, or of another process");
        Err(Failure::new(GIN_ERROR_HANDLE, text))
    };
    // The types of a Rust kernel; a kernel in C or in PTX has sizes alone.
    let is = |name: &str| parameter.type_name.split("::").last().is_some_and(|last| last.starts_with(name));
    if bytes.len() == size_of::<CommHandle>() && is("Comm") && !is_comm(bytes) {
        return refuse("communicator");
    }
    if bytes.len() == size_of::<WindowHandle>() && is("Window") && !is_window(bytes) {
        return refuse("window");
    }
    Ok(())
}

/// Refuses arguments of a kernel that is a C function, if their number or a size is another than that of its
/// parameters. Its first parameter is the function, which no caller passes.
fn check_of_function(function: &Function, arguments: &[gin_arg_t]) -> Result<(), Failure> {
    let (name, parameters) = (&function.name, &function.parameters[1..]);
    if parameters.len() != arguments.len() {
        let (takes, given) = (parameters.len(), arguments.len());
        return Err(Failure::argument(format!("kernel `{name}` takes {takes} arguments; {given} were given")));
    }
    for (index, (argument, parameter)) in arguments.iter().zip(parameters).enumerate() {
        if argument.bytes != parameter.size {
            let (given, takes) = (argument.bytes, parameter.size);
            return Err(Failure::argument(format!(
                "argument {index} of kernel `{name}` has {given} bytes; its parameter has {takes}"
            )));
        }
    }
    Ok(())
}

/// Returns whether these bytes are a communicator of this process.
fn is_comm(bytes: &[u8]) -> bool {
    table::any::<Comm>(|comm| comm.handle().is_some_and(|handle| bytes_of(handle) == bytes))
}

/// Returns whether these bytes are a window of this process.
fn is_window(bytes: &[u8]) -> bool {
    table::any::<Window>(|window| bytes_of(&window.inner.handle()) == bytes)
}

/// Refuses bytes for kernels that are no communicator of this process: it is closed, or of another process. A program
/// that launches kernels itself may call this before.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_device_comm_check(device: *const CommHandle) -> gin_status_t {
    call("gin_device_comm_check", || {
        if is_comm(bytes_of(input(device, "device")?)) {
            return Ok(());
        }
        let text = "`device` is no communicator of this process: it is closed, or of another process";
        Err(Failure::new(GIN_ERROR_HANDLE, text))
    })
}

/// Refuses bytes for kernels that are no window of this process: it is closed, or of another process.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_device_window_check(device: *const WindowHandle) -> gin_status_t {
    call("gin_device_window_check", || {
        if is_window(bytes_of(input(device, "device")?)) {
            return Ok(());
        }
        let text = "`device` is no window of this process: it is closed, or of another process";
        Err(Failure::new(GIN_ERROR_HANDLE, text))
    })
}

fn bytes_of<T: Copy>(value: &T) -> &[u8] {
    // Safety: used for handles, which have no padding.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }
}

/// Launches a kernel on a stream. Does not wait. Checks the number and sizes of the arguments, communicators and
/// windows among those of a Rust kernel, and the limits of kernel and device.
///
/// # Safety
/// - As the crate's docs say; each argument is a value of its parameter's type. The kernel's own conditions hold until
///   it has ended, and communicators and windows among the arguments live until then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_launch(
    stream: gin_stream_t,
    kernel: gin_kernel_t,
    shape: *const gin_shape_t,
    arguments: *const gin_arg_t,
    count: usize,
) -> gin_status_t {
    call("gin_launch", || {
        let (stream, kernel) = (table::get::<Stream>(stream.id)?, table::get::<Kernel>(kernel.id)?);
        let shape = input(shape, "shape")?;
        if kernel.code.is_some() && stream.inner.device().kind() != DeviceKind::Virtual {
            return Err(Failure::new(GIN_ERROR_DEVICE, "a kernel that is a C function runs on virtual GPUs only"));
        }
        let arguments = inputs(arguments, count, "arguments")?;
        let mut all = Vec::new();
        if let Some(code) = kernel.code {
            all.push(Argument::of_bytes(&kernel.function.parameters[0], bytes_of(&code)));
        }
        let hidden = all.len();
        if kernel.code.is_some() {
            check_of_function(&kernel.function, arguments)?;
        }
        let none = Parameter { name: String::new(), type_name: String::new(), type_id: None, size: 0 };
        for (index, argument) in arguments.iter().enumerate() {
            let bytes = inputs(argument.data.cast::<u8>(), argument.bytes, "an argument's data")?;
            let parameter = kernel.function.parameters.get(index + hidden).unwrap_or(&none);
            check_object(index, parameter, bytes)?;
            all.push(Argument::of_bytes(parameter, bytes));
        }
        let extent = |[x, y, z]: [u32; 3]| Dim3 { x, y, z };
        let mut config = LaunchConfig::new(1, 1).dynamic_shared(shape.dynamic_shared);
        (config.grid, config.block, config.cooperative) =
            (extent(shape.grid), extent(shape.block), shape.cooperative != 0);
        let all: Vec<&dyn KernelArg> = all.iter().map(|argument| argument as &dyn KernelArg).collect();
        // Safety: the caller's promise.
        unsafe { stream.inner.launch(&kernel.function, config, &all)? };
        Ok(())
    })
}
