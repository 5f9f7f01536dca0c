// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernels of a module that was linked with NCCL's device functions.

use crate::library::enter;
use crate::{DeviceComm, NcclError, TESTED, Window, version_text};
use cudarc::driver::sys;
use gin_gpu::cuda::CudaDevice;
use gin_gpu::cuda::raw::raw_module;
use gin_gpu::{Argument, Device, Function, GpuError, KernelArg, LaunchConfig, Module, Stream};
use gin_nccl_device::handle::{CommHandle, LAYOUT_VERSION, WindowHandle};
use std::ffi::CStr;

/// A kernel whose module was linked with the tested version of NCCL's device functions.
#[derive(Debug)]
pub struct Kernel {
    function: Function,
}

impl Kernel {
    /// Finds a kernel, and checks the versions that its module has.
    ///
    /// # Errors
    /// [`NcclError::Gpu`] if the module has no such kernel; [`NcclError::Module`] if it was not linked with the
    /// functions of NCCL 2.30.7.
    pub fn of(device: &CudaDevice, module: &dyn Module, name: &str) -> Result<Self, NcclError> {
        enter(device)?;
        let function = module.function(name)?;
        let raw = raw_module(&function).map_or(std::ptr::null_mut(), |raw| raw.cast());
        let refuse = |reason: String| NcclError::Module { kernel: name.to_owned(), reason };
        let layout = variable(device, raw, c"gin_nccl_layout");
        let layout = layout.ok_or_else(|| refuse("it is not a kernel of gin-nccl-device".to_owned()))?;
        if layout != LAYOUT_VERSION {
            return Err(refuse(format!(
                "its gin-nccl-device has layout version {layout}, and this library has {LAYOUT_VERSION}; use one version of \
                 both crates"
            )));
        }
        let version = variable(device, raw, c"gin_nccl_version");
        let version = version.ok_or_else(|| {
            refuse("it was not linked with NCCL's functions; call `KernelBuilder::nccl(true)`".to_owned())
        })?;
        if version != TESTED {
            return Err(refuse(format!(
                "it was linked with the device functions of NCCL {}; link it with NCCL {}",
                version_text(version),
                version_text(TESTED)
            )));
        }
        Ok(Self { function })
    }

    /// Returns the function.
    pub fn function(&self) -> &Function {
        &self.function
    }

    /// Launches the kernel. Sizes of arguments are checked; their types are not, because machine code has none.
    ///
    /// # Safety
    /// - The arguments are the kernel's parameters: [`DeviceComm`] for `Comm`, [`Window`] for `Window<T>`. They live
    ///   until the kernel has ended, and the kernel's own conditions hold.
    ///
    /// # Errors
    /// [`GpuError`] names the parameter or the limit that does not fit; nothing runs then.
    pub unsafe fn launch(
        &self,
        stream: &dyn Stream,
        config: LaunchConfig,
        arguments: &[&dyn KernelArg],
    ) -> Result<(), GpuError> {
        let of_bytes = |(index, argument): (usize, &&dyn KernelArg)| {
            let argument = argument.argument();
            let Some(parameter) = self.function.parameters.get(index) else { return argument };
            // Safety: the bytes of a value, all of which are initialised.
            let bytes = unsafe { std::slice::from_raw_parts(argument.as_ptr(), argument.bytes()) };
            Argument::of_bytes(parameter, bytes)
        };
        let arguments: Vec<Argument> = arguments.iter().enumerate().map(of_bytes).collect();
        let arguments: Vec<&dyn KernelArg> = arguments.iter().map(|argument| argument as &dyn KernelArg).collect();
        // Safety: the caller's promise.
        unsafe { stream.launch(&self.function, config, &arguments) }
    }
}

impl KernelArg for DeviceComm {
    fn argument(&self) -> Argument {
        Argument::value::<CommHandle>(*self.handle())
    }
}

impl KernelArg for Window<'_> {
    fn argument(&self) -> Argument {
        Argument::value::<WindowHandle>(self.handle())
    }
}

/// Returns the first word of a variable of a module, if it has one of this name.
fn variable(device: &CudaDevice, module: sys::CUmodule, name: &CStr) -> Option<u32> {
    let (mut address, mut bytes) = (0, 0);
    // Safety: the module is loaded; writes two integers.
    let found = unsafe { sys::cuModuleGetGlobal_v2(&raw mut address, &raw mut bytes, module, name.as_ptr()) };
    if found.result().is_err() || bytes < 4 {
        return None;
    }
    let mut word = [0; 4];
    // Safety: a variable of a loaded module, which nobody writes.
    unsafe { device.copy_out(&mut word, address) }.ok()?;
    Some(u32::from_le_bytes(word))
}
