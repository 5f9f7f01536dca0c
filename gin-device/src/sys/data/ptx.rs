// SPDX-License-Identifier: MIT OR Apache-2.0
//! The accesses to bulk data as PTX. No block here has `nomem`: each stops the compiler's own reordering.

use core::arch::asm;

macro_rules! operations {
    ($(
        $shape:ident $name:ident $ty:ident ($class:ident $register:ident) $ptx:literal $operands:literal $op:ident
        $doc:literal;
    )*) => { $(operation! { $shape $name $ty $class $register $ptx $doc })* };
}

macro_rules! operation {
    (load $name:ident $ty:ident $class:ident $register:ident $ptx:literal $doc:literal) => {
        #[doc = $doc]
        ///
        /// # Safety
        /// - `address` is valid for reading, in global memory, and a multiple of the size.
        #[inline(always)]
        pub unsafe fn $name(address: *const $ty) -> $ty {
            let value: $register;
            // Safety: the caller's promise.
            unsafe {
                asm!(concat!($ptx, " {v}, [{p}];"), v = out($class) value, p = in(reg64) address, options(nostack));
            }
            value as $ty
        }
    };
    (store $name:ident $ty:ident $class:ident $register:ident $ptx:literal $doc:literal) => {
        #[doc = $doc]
        ///
        /// # Safety
        /// - `address` is valid for writing, in global memory, and a multiple of the size.
        #[inline(always)]
        pub unsafe fn $name(address: *mut $ty, value: $ty) {
            // Safety: the caller's promise.
            unsafe {
                asm!(
                    concat!($ptx, " [{p}], {v};"),
                    v = in($class) value as $register, p = in(reg64) address, options(nostack),
                );
            }
        }
    };
}

data_operations!(operations);

/// Loads 16 bytes, relaxed, at system scope; as two words of 8 bytes, each read whole.
///
/// # Safety
/// - `address` is valid for reading, in global memory, and a multiple of 16.
#[inline(always)]
pub unsafe fn load_relaxed_sys_pair(address: *const u64) -> (u64, u64) {
    let (low, high): (u64, u64);
    // Safety: the caller's promise.
    unsafe {
        asm!(
            "ld.relaxed.sys.global.v2.u64 {{{l}, {h}}}, [{p}];",
            l = out(reg64) low, h = out(reg64) high, p = in(reg64) address, options(nostack),
        );
    }
    (low, high)
}

/// Loads 16 bytes; weak: no thread may write them meanwhile, and earlier writes must have been acquired.
///
/// # Safety
/// - `address` is valid for reading, in global memory, and a multiple of 16.
#[inline(always)]
pub unsafe fn load_weak_pair(address: *const u64) -> (u64, u64) {
    let (low, high): (u64, u64);
    // Safety: the caller's promise.
    unsafe {
        asm!(
            "ld.global.v2.u64 {{{l}, {h}}}, [{p}];",
            l = out(reg64) low, h = out(reg64) high, p = in(reg64) address, options(nostack),
        );
    }
    (low, high)
}

/// Loads 4 bytes of memory that nobody writes while the grid runs: no thread, peer, NIC or CPU.
///
/// # Safety
/// - `address` is valid for reading, in global memory, and a multiple of 4.
#[inline(always)]
pub unsafe fn load_constant_u32(address: *const u32) -> u32 {
    let value;
    // Safety: the caller's promise.
    unsafe {
        asm!(
            "ld.global.nc.u32 {v}, [{p}]; // load_constant_u32",
            v = out(reg32) value, p = in(reg64) address, options(nostack),
        );
    }
    value
}

/// Loads 16 bytes of memory that nobody writes while the grid runs: no thread, peer, NIC or CPU.
///
/// # Safety
/// - `address` is valid for reading, in global memory, and a multiple of 16.
#[inline(always)]
pub unsafe fn load_constant_pair(address: *const u64) -> (u64, u64) {
    let (low, high): (u64, u64);
    // Safety: the caller's promise.
    unsafe {
        asm!(
            "ld.global.nc.v2.u64 {{{l}, {h}}}, [{p}]; // load_constant_pair",
            l = out(reg64) low, h = out(reg64) high, p = in(reg64) address, options(nostack),
        );
    }
    (low, high)
}

/// Stores 16 bytes; weak.
///
/// # Safety
/// - `address` is valid for writing, in global memory, and a multiple of 16.
#[inline(always)]
pub unsafe fn store_weak_pair(address: *mut u64, low: u64, high: u64) {
    // Safety: the caller's promise.
    unsafe {
        asm!(
            "st.global.v2.u64 [{p}], {{{l}, {h}}};",
            l = in(reg64) low, h = in(reg64) high, p = in(reg64) address, options(nostack),
        );
    }
}

/// Adds, rounding to nearest, relaxed, at system scope.
///
/// # Safety
/// - `address` is valid for writing, in global memory, and a multiple of 4.
#[inline(always)]
pub unsafe fn red_add_relaxed_sys_f32(address: *mut f32, value: f32) {
    // Safety: the caller's promise.
    unsafe {
        asm!(
            "red.relaxed.sys.global.add.f32 [{p}], {v};",
            v = in(reg32) value, p = in(reg64) address, options(nostack),
        );
    }
}
