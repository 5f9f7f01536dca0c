// SPDX-License-Identifier: MIT OR Apache-2.0
//! How kernels are found and called on a CPU.
//!
//! `#[kernel]` makes a PTX entry on a GPU; on a CPU it leaves the function as it is and adds an entry of the same name
//! to [`KERNELS`], which the virtual GPU launches from.
//!
//! Parameters are `Copy`, at most 16-byte aligned, and neither references nor slices, as the PTX entry needs them.

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
    /// Name: that of the function and of the PTX entry.
    pub name: &'static str,
    /// Path of the Rust module that it stands in.
    pub module: &'static str,
    /// [`gin_abi::ABI_VERSION`] that it was compiled with.
    pub abi: u32,
    /// Its parameters, in order.
    pub params: &'static [KernelParam],
    /// Most threads a block and fewest blocks an SM, if it was declared with launch bounds.
    pub launch_bounds: Option<(u32, u32)>,
    /// Calls it as one thread.
    ///
    /// # Safety
    /// - `params[i]` points to a value of parameter `i`, and what the kernel itself asks for holds.
    pub call: unsafe fn(params: *const *const u8),
}

/// Every kernel of every crate linked into this program.
#[linkme::distributed_slice]
pub static KERNELS: [KernelEntry];

/// For `#[kernel]`: a parameter of this type can be passed.
#[doc(hidden)]
pub const fn check_param<T: Copy>() -> (usize, usize) {
    assert!(align_of::<T>() <= 16, "a kernel parameter may be aligned to 16 bytes at most");
    (size_of::<T>(), align_of::<T>())
}
