// SPDX-License-Identifier: MIT OR Apache-2.0
//! The registry of kernels on a CPU, and their launchers.
//!
//! On a GPU, `#[kernel]` makes a PTX entry. On a CPU it leaves the function as it is and adds an entry of the same name
//! to [`KERNELS`], from which the virtual GPU launches it. It also makes a type of the kernel's name, whose function
//! `launch` takes a stream, the shape of the launch, and the kernel's parameters. So a wrong number, order or type of
//! arguments does not compile:
//!
//! ```
//! use gin_device::kernel::LaunchStream;
//! use gin_device::prelude::*;
//!
//! /// # Safety
//! /// - `words` are `len` words of the device.
//! #[kernel]
//! pub unsafe fn scale(words: *mut f32, len: usize, factor: f32) {
//!     for i in Block.stripe(len) {
//!         // Safety: the kernel's promise.
//!         unsafe { words.add(i).write(factor * words.add(i).read()) };
//!     }
//! }
//!
//! /// # Safety
//! /// - As [`scale`].
//! unsafe fn double<S: LaunchStream>(stream: &S, shape: S::Config, words: *mut f32) -> Result<(), S::Error> {
//!     // Safety: the caller's promise.
//!     unsafe { scale::launch(stream, shape, words, 4, 2.0) }
//! }
//! ```
//!
//! The streams of `gin` are such streams. A program passes communicators and windows by reference.
//!
//! As the PTX entry requires, parameters are `Copy`, at most 16-byte aligned, and neither references nor slices.

use core::any::TypeId;
use core::ops::Deref;

/// One parameter of a kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KernelParam {
    /// Its name.
    pub name: &'static str,
    /// Its type, as written.
    pub type_name: &'static str,
    /// Its type.
    pub type_id: TypeId,
    /// Size in bytes.
    pub size: usize,
    /// Alignment in bytes.
    pub align: usize,
}

/// One kernel.
#[derive(Clone, Copy, Debug)]
pub struct KernelEntry {
    /// The name of the function and of the PTX entry.
    pub name: &'static str,
    /// The path of its Rust module.
    pub module: &'static str,
    /// The [`gin_abi::ABI_VERSION`] that it was compiled with.
    pub abi: u32,
    /// Its parameters, in order.
    pub params: &'static [KernelParam],
    /// The largest number of threads per block and the smallest number of blocks per SM, if it has launch bounds.
    pub launch_bounds: Option<(u32, u32)>,
    /// Calls it as one thread.
    ///
    /// # Safety
    /// - `params[i]` points to a value of parameter `i`.
    /// - The kernel's own conditions hold.
    pub call: unsafe fn(params: *const *const u8),
}

/// Every kernel of every crate linked into this program.
#[linkme::distributed_slice]
pub static KERNELS: [KernelEntry];

impl KernelParam {
    /// Describes a parameter for `#[kernel]`, after a check that it can be passed.
    #[doc(hidden)]
    pub const fn new<T: Copy + 'static>(name: &'static str, type_name: &'static str) -> Self {
        assert!(align_of::<T>() <= 16, "a kernel parameter may be aligned to 16 bytes at most");
        Self { name, type_name, type_id: TypeId::of::<T>(), size: size_of::<T>(), align: align_of::<T>() }
    }
}

/// A stream that runs the kernels of this program.
pub trait LaunchStream {
    /// The shape of a launch.
    type Config;
    /// The error of a refused launch.
    type Error;

    /// Launches a kernel. Programs call the kernel's own `launch`.
    ///
    /// # Safety
    /// - `params[i]` points to a value of parameter `i` of `kernel`.
    /// - The kernel's own conditions hold until it has ended.
    ///
    /// # Errors
    /// An error of the device; nothing runs then.
    unsafe fn launch_entry(
        &self,
        kernel: &'static KernelEntry,
        config: Self::Config,
        params: &[*const u8],
    ) -> Result<(), Self::Error>;
}

impl<S: Deref<Target: LaunchStream> + ?Sized> LaunchStream for S {
    type Config = <S::Target as LaunchStream>::Config;
    type Error = <S::Target as LaunchStream>::Error;

    unsafe fn launch_entry(
        &self,
        kernel: &'static KernelEntry,
        config: Self::Config,
        params: &[*const u8],
    ) -> Result<(), Self::Error> {
        // Safety: the caller's promise.
        unsafe { (**self).launch_entry(kernel, config, params) }
    }
}

/// A value of the host that a launch passes as a parameter of type `P`: the value itself, or a reference to the host's
/// communicator or window.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be passed to a kernel as `{P}`",
    note = "pass plain values by value, communicators (`comm.device()?`) and windows by reference"
)]
pub trait LaunchArg<P> {
    /// Returns the parameter.
    ///
    /// # Safety
    /// - It is used as a parameter of a kernel only, while its communicator or window lives.
    unsafe fn into_param(self) -> P;
}

impl<P> LaunchArg<P> for P {
    unsafe fn into_param(self) -> P {
        self
    }
}
