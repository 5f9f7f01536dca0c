// SPDX-License-Identifier: MIT OR Apache-2.0
//! The registry of kernels on a CPU.
//!
//! On a GPU, `#[kernel]` makes a PTX entry. On a CPU it leaves the function as it is and adds an entry of the same name
//! to [`KERNELS`], from which the virtual GPU launches it.
//!
//! As the PTX entry requires, parameters are `Copy`, at most 16-byte aligned, and neither references nor slices.

/// One parameter of a kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KernelParam {
    /// Its name.
    pub name: &'static str,
    /// Its type, as written.
    pub type_name: &'static str,
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

/// Checks for `#[kernel]` that a parameter of this type can be passed. Returns its size and alignment.
#[doc(hidden)]
pub const fn check_param<T: Copy>() -> (usize, usize) {
    assert!(align_of::<T>() <= 16, "a kernel parameter may be aligned to 16 bytes at most");
    (size_of::<T>(), align_of::<T>())
}
