// SPDX-License-Identifier: MIT OR Apache-2.0
//! The accesses to shared memory as PTX. No block here has `nomem`: each stops the compiler's own reordering.

use core::arch::asm;

/// An address in the block's shared memory. On a GPU it has 32 bits and counts from the start of that memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Address(u32);

impl Address {
    /// Wraps an address in the shared state space.
    #[inline(always)]
    #[must_use]
    pub const fn new(address: u32) -> Self {
        Self(address)
    }

    /// Returns the address `bytes` bytes further on.
    #[inline(always)]
    #[must_use]
    pub const fn at(self, bytes: u32) -> Self {
        Self(self.0.wrapping_add(bytes))
    }

    /// Returns the first address from there on that is a multiple of `bytes`, a power of 2.
    #[inline(always)]
    #[must_use]
    pub const fn next_multiple_of(self, bytes: u32) -> Self {
        Self((self.0 + (bytes - 1)) & !(bytes - 1))
    }

    #[inline(always)]
    pub(in crate::sys) const fn bits(self) -> u32 {
        self.0
    }
}

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
        /// - The block has shared memory there, and `address` is a multiple of the size.
        #[inline(always)]
        pub unsafe fn $name(address: Address) -> $ty {
            let value: $register;
            // Safety: the caller's promise.
            unsafe {
                asm!(concat!($ptx, " {v}, [{a}];"), v = out($class) value, a = in(reg32) address.0, options(nostack));
            }
            value as $ty
        }
    };
    (store $name:ident $ty:ident $class:ident $register:ident $ptx:literal $doc:literal) => {
        #[doc = $doc]
        ///
        /// # Safety
        /// - The block has shared memory there, and `address` is a multiple of the size.
        #[inline(always)]
        pub unsafe fn $name(address: Address, value: $ty) {
            // Safety: the caller's promise.
            unsafe {
                asm!(
                    concat!($ptx, " [{a}], {v};"),
                    v = in($class) value as $register, a = in(reg32) address.0, options(nostack),
                );
            }
        }
    };
    (rmw $name:ident $ty:ident $class:ident $register:ident $ptx:literal $doc:literal) => {
        #[doc = $doc]
        ///
        /// # Safety
        /// - The block has shared memory there, and `address` is a multiple of the size.
        #[inline(always)]
        pub unsafe fn $name(address: Address, value: $ty) -> $ty {
            let old: $register;
            // Safety: the caller's promise.
            unsafe {
                asm!(
                    concat!($ptx, " {o}, [{a}], {v};"),
                    o = out($class) old, v = in($class) value as $register, a = in(reg32) address.0, options(nostack),
                );
            }
            old as $ty
        }
    };
    (cas $name:ident $ty:ident $class:ident $register:ident $ptx:literal $doc:literal) => {
        #[doc = $doc]
        ///
        /// # Safety
        /// - The block has shared memory there, and `address` is a multiple of the size.
        #[inline(always)]
        pub unsafe fn $name(address: Address, expected: $ty, new: $ty) -> $ty {
            let old: $register;
            // Safety: the caller's promise.
            unsafe {
                asm!(
                    concat!($ptx, " {o}, [{a}], {c}, {v};"),
                    o = out($class) old, c = in($class) expected, v = in($class) new, a = in(reg32) address.0,
                    options(nostack),
                );
            }
            old
        }
    };
}

shared_operations!(operations);

/// Loads 16 bytes; weak.
///
/// # Safety
/// - The block has shared memory there, and `address` is a multiple of 16.
#[inline(always)]
pub unsafe fn load_weak_pair(address: Address) -> (u64, u64) {
    let (low, high): (u64, u64);
    // Safety: the caller's promise.
    unsafe {
        asm!(
            "ld.shared.v2.u64 {{{l}, {h}}}, [{a}];",
            l = out(reg64) low, h = out(reg64) high, a = in(reg32) address.0, options(nostack),
        );
    }
    (low, high)
}

/// Stores 16 bytes; weak.
///
/// # Safety
/// - The block has shared memory there, and `address` is a multiple of 16.
#[inline(always)]
pub unsafe fn store_weak_pair(address: Address, low: u64, high: u64) {
    // Safety: the caller's promise.
    unsafe {
        asm!(
            "st.shared.v2.u64 [{a}], {{{l}, {h}}};",
            l = in(reg64) low, h = in(reg64) high, a = in(reg32) address.0, options(nostack),
        );
    }
}
