// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernels from PTX and machine code.

use super::context::Context;
use super::copy_stream::CopyStream;
use super::deferred::{Deferred, Resource};
use super::driver::{check, describe, start, version_text, written};
use super::embedded::{choose, is_machine_code, no_image, refused};
use super::launches::Fit;
use super::shape;
use crate::launch::unknown;
use crate::{EmbeddedModules, Function, GpuError, LaunchConfig, Module, Parameter, lock};
use cudarc::driver::result::DriverError;
use cudarc::driver::sys::{self, CUfunction, CUfunction_attribute as Attribute, CUjit_option, CUmodule, CUresult};
use gin_abi::{ABI_SYMBOL, ABI_VERSION};
use gin_device::kernel::KERNELS;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// The maximum number of bytes of the log of the driver's compiler.
const LOG: usize = 16 << 10;

/// The maximum number of bytes of dynamic shared memory of a launch without an attribute of the function.
const SHARED_UNASKED: u32 = 48 << 10;

/// The first architecture on which a kernel can wait for the one before it.
const DEPENDENT: u32 = 90;

/// All of an SM's memory that can be shared memory, for kernels beside those of other ranks.
const PERCENT_SHARED: i32 = 100;

/// Returns the version that a PTX text states.
fn ptx_version(image: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(image.strip_suffix(&[0]).unwrap_or(image)).ok()?;
    let line = text.lines().find_map(|line| line.trim().strip_prefix(".version"))?;
    line.split_whitespace().next().map(str::to_owned)
}

/// Returns whether a PTX text has the lines of its sources, which debuggers and profilers then show.
fn has_lines(image: &[u8]) -> bool {
    std::str::from_utf8(image).is_ok_and(|text| text.contains("\t.loc\t"))
}

/// A loaded module and its functions.
#[derive(Debug)]
pub(super) struct Image {
    context: Arc<Context>,
    /// The handle in the driver.
    pub(super) raw: CUmodule,
    /// Unloads it, if gin has loaded it.
    _owner: Option<Deferred>,
    functions: BTreeMap<String, Arc<Loaded>>,
    /// Its kernels run beside any others. Set with the lock.
    is_divided: AtomicBool,
    dividing: Mutex<()>,
}

// Safety: handles of the driver, which any thread may use.
unsafe impl Send for Image {}
// Safety: as above.
unsafe impl Sync for Image {}

#[derive(Debug)]
struct Loaded {
    raw: CUfunction,
    parameters: Vec<Parameter>,
    max_threads: u32,
    local: u32,
    /// The architecture for which its PTX was compiled, times 10.
    arch: u32,
    /// How many blocks the GPU holds, by threads and dynamic shared memory of a block, without clusters.
    fits: RwLock<BTreeMap<(u64, u32), Fit>>,
}

// Safety: handles of the driver, which any thread may use.
unsafe impl Send for Loaded {}
// Safety: as above.
unsafe impl Sync for Loaded {}

/// A module of static kernels, once its GPU has loaded it. Locked while it is loaded.
type Place = Arc<Mutex<Option<Arc<Image>>>>;

/// Returns the place of a module of static kernels, whose address identifies it.
fn place(context: &Context, embedded: EmbeddedModules) -> Place {
    static PLACES: Mutex<BTreeMap<(usize, usize), Place>> = Mutex::new(BTreeMap::new());
    lock(&PLACES).entry((context.ordinal, embedded.as_ptr().addr())).or_default().clone()
}

impl Image {
    /// Returns the module of static kernels if the GPU has loaded it.
    pub(super) fn loaded(context: &Context, embedded: EmbeddedModules) -> Option<Arc<Self>> {
        lock(&place(context, embedded)).clone()
    }

    /// Returns the module of static kernels. Each GPU loads it once. If the driver does not take the machine code,
    /// because it is that of a newer CUDA, it compiles the PTX.
    pub(super) fn embedded(context: &Arc<Context>, embedded: EmbeddedModules) -> Result<Arc<Self>, GpuError> {
        let place = place(context, embedded);
        let mut loaded = lock(&place);
        if let Some(image) = &*loaded {
            return Ok(image.clone());
        }
        let mut result = Err(no_image(embedded, context.full_name(), context.capability));
        for image in choose(embedded, context.capability) {
            result = if is_machine_code(image) { Self::load(context, image) } else { Self::ptx(context, image) };
            if result.is_ok() {
                break;
            }
        }
        let image = Arc::new(result?);
        *loaded = Some(image.clone());
        Ok(image)
    }

    /// Loads a PTX text.
    pub(super) fn ptx(context: &Arc<Context>, text: &[u8]) -> Result<Self, GpuError> {
        let refuse = |_| refused(context.full_name(), "its PTX has a zero byte".to_owned());
        let text = CString::new(text).map_err(refuse)?;
        Self::load(context, text.as_bytes_with_nul())
    }

    /// Loads a compiled image, or PTX that ends with a zero byte.
    pub(super) fn load(context: &Arc<Context>, image: &[u8]) -> Result<Self, GpuError> {
        context.enter()?;
        let mut log = vec![0u8; LOG];
        // The driver takes numbers in place of pointers.
        let number = std::ptr::without_provenance_mut::<core::ffi::c_void>;
        let mut options = vec![CUjit_option::CU_JIT_ERROR_LOG_BUFFER, CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        let mut values = vec![log.as_mut_ptr().cast(), number(LOG)];
        if has_lines(image) {
            options.push(CUjit_option::CU_JIT_GENERATE_LINE_INFO);
            values.push(number(1));
        }
        let mut raw = std::ptr::null_mut();
        // Safety: the image is whole, the buffer has the stated length, and there is a value for each option.
        let code = unsafe {
            sys::cuModuleLoadDataEx(
                &raw mut raw,
                image.as_ptr().cast(),
                options.len() as u32,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        if code != CUresult::CUDA_SUCCESS {
            let end = log.iter().position(|&byte| byte == 0).unwrap_or(LOG);
            let mut reason = describe(DriverError(code));
            if code == CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION
                && let (Some(ptx), Ok(driver)) = (ptx_version(image), start())
            {
                reason.push_str(&format!("; it is PTX {ptx}, and the driver is that of CUDA {}", version_text(driver)));
            }
            let log = String::from_utf8_lossy(&log[..end]).trim().to_owned();
            return Err(GpuError::Module { device: context.full_name(), reason, log });
        }
        Self::read(context, raw, Some(Deferred::new(context, Resource::Module(raw))))
    }

    /// Uses a module of the program, which keeps it loaded.
    ///
    /// # Safety
    /// - The module is loaded in this context, and stays so as long as the returned value is used.
    pub(super) unsafe fn foreign(context: &Arc<Context>, raw: CUmodule) -> Result<Self, GpuError> {
        context.enter()?;
        Self::read(context, raw, None)
    }

    fn read(context: &Arc<Context>, raw: CUmodule, owner: Option<Deferred>) -> Result<Self, GpuError> {
        let mut image = Self {
            context: context.clone(),
            raw,
            _owner: owner,
            functions: BTreeMap::new(),
            is_divided: AtomicBool::new(false),
            dividing: Mutex::default(),
        };
        image.check_abi()?;
        image.read_functions()?;
        Ok(image)
    }

    fn check_abi(&self) -> Result<(), GpuError> {
        let foreign = |reason: &str| refused(self.context.full_name(), reason.to_owned());
        let name = CString::new(ABI_SYMBOL).map_err(|_| foreign("the version's name has a zero byte"))?;
        let (mut address, mut bytes) = (0, 0);
        // Safety: writes two integers; the name ends with 0.
        let code = unsafe { sys::cuModuleGetGlobal_v2(&raw mut address, &raw mut bytes, self.raw, name.as_ptr()) };
        if code != CUresult::CUDA_SUCCESS || bytes < size_of::<u32>() {
            return Err(foreign("it has no `gin_abi_version`: it was not built with gin-device"));
        }
        let mut version = [0; size_of::<u32>()];
        // Safety: the symbol has at least these bytes.
        CopyStream::with(&self.context, |copies| unsafe { copies.read(&mut version, address) })?;
        let (kernel, kernel_abi) = (self.context.full_name(), u32::from_ne_bytes(version));
        if kernel_abi != ABI_VERSION {
            return Err(GpuError::AbiMismatch { kernel, kernel_abi, host_abi: ABI_VERSION });
        }
        Ok(())
    }

    /// Loads all functions, because a function that is loaded later would wait for the kernels that run then.
    fn read_functions(&mut self) -> Result<(), GpuError> {
        const CALL: &str = "list the kernels of a module";
        // Safety: writes one integer.
        let count = written(CALL, 0, |count| unsafe { sys::cuModuleGetFunctionCount(count, self.raw) })?;
        let mut functions = vec![std::ptr::null_mut(); count as usize];
        // Safety: the list has the stated length.
        check(CALL, unsafe { sys::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, self.raw) })?;
        for raw in functions {
            // Safety: writes a pointer to a string that lives as long as the module.
            let name = written(CALL, std::ptr::null(), |name| unsafe { sys::cuFuncGetName(name, raw) })?;
            // Safety: as above.
            let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
            // Safety: the function is of a module that is loaded.
            check("load a kernel", unsafe { sys::cuFuncLoad(raw) })?;
            let max_threads = attribute(raw, Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?;
            let (shared, max) =
                (attribute(raw, Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?, self.context.limits.dynamic_shared);
            if max.saturating_sub(shared) > SHARED_UNASKED {
                let what = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                // Safety: as above.
                let code = unsafe { sys::cuFuncSetAttribute(raw, what, (max - shared) as i32) };
                check("allow a kernel shared memory", code)?;
            }
            let local = attribute(raw, Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?;
            let arch = attribute(raw, Attribute::CU_FUNC_ATTRIBUTE_PTX_VERSION)?;
            let parameters = parameters(&name, raw)?;
            let loaded = Loaded { raw, parameters, max_threads, local, arch, fits: RwLock::default() };
            self.functions.insert(name, Arc::new(loaded));
        }
        Ok(())
    }

    /// Gives all kernels the same division of an SM's memory into L1 and shared memory, with the most shared
    /// memory, if ranks share the GPU. The driver would choose one for each kernel, and an SM changes it only
    /// when it is idle: a kernel would not start beside one that waits for it, though there is room.
    fn divide(&self) -> Result<(), GpuError> {
        if self.context.users.load(Ordering::Relaxed) < 2 || self.is_divided.load(Ordering::Acquire) {
            return Ok(());
        }
        // No rank launches before all kernels have it.
        let _dividing = lock(&self.dividing);
        for loaded in self.functions.values() {
            let what = Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
            // Safety: the module is loaded.
            let code = unsafe { sys::cuFuncSetAttribute(loaded.raw, what, PERCENT_SHARED) };
            check("set the shared memory of SMs that run a kernel", code)?;
            loaded.fits.write().unwrap_or_else(PoisonError::into_inner).clear();
        }
        self.is_divided.store(true, Ordering::Release);
        Ok(())
    }
}

fn attribute(function: CUfunction, attribute: Attribute) -> Result<u32, GpuError> {
    // Safety: writes one integer; the function's module is loaded.
    let ask = |value| unsafe { sys::cuFuncGetAttribute(value, attribute, function) };
    written("ask for a property of a kernel", 0, ask).map(|value| value as u32)
}

/// Returns the parameters of a kernel. The module contains only sizes. Names and types are those of the kernel of the
/// same name and the same sizes that is linked into the program, if there is one.
fn parameters(name: &str, function: CUfunction) -> Result<Vec<Parameter>, GpuError> {
    let mut sizes = Vec::new();
    loop {
        let (mut offset, mut size) = (0, 0);
        // Safety: writes two integers.
        match unsafe { sys::cuFuncGetParamInfo(function, sizes.len(), &raw mut offset, &raw mut size) } {
            CUresult::CUDA_SUCCESS => sizes.push(size),
            // There are no more parameters.
            CUresult::CUDA_ERROR_INVALID_VALUE => break,
            code => check("ask for a kernel's parameters", code)?,
        }
    }
    let linked = KERNELS.iter().find(|entry| {
        entry.name == name && entry.params.iter().map(|parameter| parameter.size).eq(sizes.iter().copied())
    });
    let parameter = |(index, size): (usize, usize)| {
        let linked = linked.map(|entry| entry.params[index]);
        Parameter {
            name: linked.map_or(String::new(), |linked| linked.name.to_owned()),
            type_name: linked.map_or(String::new(), |linked| linked.type_name.to_owned()),
            type_id: linked.map(|linked| linked.type_id),
            size,
        }
    };
    Ok(sizes.into_iter().enumerate().map(parameter).collect())
}

/// The driver's handle of a [`Function`] of a GPU.
#[derive(Debug)]
pub(super) struct Handle {
    pub(super) ordinal: usize,
    loaded: Arc<Loaded>,
    pub(super) image: Arc<Image>,
}

impl Handle {
    pub(super) fn raw(&self) -> CUfunction {
        self.loaded.raw
    }

    /// Returns the bytes of local memory of a thread.
    pub(super) fn local(&self) -> u32 {
        self.loaded.local
    }

    /// Checks that the kernel can wait for the one before it on the stream.
    pub(super) fn check_dependent(&self, name: &str) -> Result<(), GpuError> {
        let refuse = |reason| Err(GpuError::NotDependent { kernel: name.to_owned(), reason });
        let context = &self.image.context;
        if context.capability < DEPENDENT {
            return refuse(format!(
                "{} is sm_{}; this requires sm_{DEPENDENT}",
                context.full_name(),
                context.capability
            ));
        }
        if self.loaded.arch < DEPENDENT {
            return refuse(format!(
                "it was compiled for sm_{}; compile it for sm_{DEPENDENT} or later",
                self.loaded.arch
            ));
        }
        Ok(())
    }

    /// Returns how many blocks of a shape the GPU holds. Asks the driver once for each shape. Every launch asks first.
    pub(super) fn fit(&self, config: &LaunchConfig) -> Result<Fit, GpuError> {
        self.image.divide()?;
        if config.cluster_blocks() != 1 {
            return shape::fit(&self.image.context, self.raw(), config);
        }
        let (key, fits) = ((config.threads(), config.dynamic_shared), &self.loaded.fits);
        if let Some(fit) = fits.read().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Ok(*fit);
        }
        let fit = shape::fit(&self.image.context, self.raw(), config)?;
        fits.write().unwrap_or_else(PoisonError::into_inner).insert(key, fit);
        Ok(fit)
    }
}

/// Modules in which kernels are looked up together.
#[derive(Debug)]
pub(super) struct Images(pub(super) Vec<Arc<Image>>);

impl Module for Images {
    fn function(&self, name: &str) -> Result<Function, GpuError> {
        let mut found = self.0.iter().filter_map(|image| Some((image, image.functions.get(name)?)));
        let Some((image, loaded)) = found.next() else {
            let names = self.0.iter().flat_map(|image| image.functions.keys());
            return Err(unknown(name, names.map(|name| &**name)));
        };
        let others = found.count();
        if others > 0 {
            let modules = vec!["a PTX module".to_owned(); others + 1];
            return Err(GpuError::AmbiguousKernel { name: name.to_owned(), modules });
        }
        let ordinal = image.context.ordinal;
        let handle = Arc::new(Handle { ordinal, loaded: loaded.clone(), image: image.clone() });
        let (parameters, max_threads) = (loaded.parameters.clone(), Some(loaded.max_threads));
        Ok(Function { name: name.to_owned(), parameters, max_threads, abi: ABI_VERSION, handle })
    }

    fn names(&self) -> Vec<String> {
        self.0.iter().flat_map(|image| image.functions.keys().cloned()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_of_a_text_is_read_and_machine_code_has_none() {
        assert_eq!(ptx_version(b"//\n.version 8.6\n.target sm_90\n\0").as_deref(), Some("8.6"));
        assert_eq!(ptx_version(b"\x7fELF\xff\x00"), None);
    }
}
