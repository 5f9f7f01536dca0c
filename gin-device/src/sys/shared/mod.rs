// SPDX-License-Identifier: MIT OR Apache-2.0
//! Accesses to the shared memory of a block, the base of [`SharedArray`](crate::shared::SharedArray).
//!
//! They name the shared state space. An access through a plain pointer does not: it is generic, and finds out at run
//! time which memory it is for.
//!
//! | access | property |
//! | --- | --- |
//! | load, store | weak: barriers order them |
//! | read-modify-write | relaxed, at block scope: atomic with the others; orders no other access |
//!
//! | name | PTX | SASS on sm_90 |
//! | --- | --- | --- |
//! | `load_weak_u8` | `ld.shared.u8` | `LDS.U8` |
//! | `load_weak_u16` | `ld.shared.u16` | `LDS.U16` |
//! | `load_weak_u32` | `ld.shared.u32` | `LDS` |
//! | `load_weak_u64` | `ld.shared.u64` | `LDS.64` |
//! | `load_weak_pair` | `ld.shared.v2.u64` | `LDS.128` |
//! | `store_weak_u8` | `st.shared.u8` | `STS.U8` |
//! | `store_weak_u16` | `st.shared.u16` | `STS.U16` |
//! | `store_weak_u32` | `st.shared.u32` | `STS` |
//! | `store_weak_u64` | `st.shared.u64` | `STS.64` |
//! | `store_weak_pair` | `st.shared.v2.u64` | `STS.128` |
//! | `add_relaxed_cta_u32` | `atom.relaxed.cta.shared.add.u32` | `ATOMS.ADD` |
//! | `add_relaxed_cta_u64` | `atom.relaxed.cta.shared.add.u64` | `LDS.64`, `ATOMS.CAST.SPIN.64` |
//! | `min_relaxed_cta_u32` | `atom.relaxed.cta.shared.min.u32` | `ATOMS.MIN` |
//! | `min_relaxed_cta_u64` | `atom.relaxed.cta.shared.min.u64` | `LDS.64`, `ATOMS.CAST.SPIN.64` |
//! | `min_relaxed_cta_i32` | `atom.relaxed.cta.shared.min.s32` | `ATOMS.MIN.S32` |
//! | `min_relaxed_cta_i64` | `atom.relaxed.cta.shared.min.s64` | `LDS.64`, `ATOMS.CAST.SPIN.64` |
//! | `max_relaxed_cta_u32` | `atom.relaxed.cta.shared.max.u32` | `ATOMS.MAX` |
//! | `max_relaxed_cta_u64` | `atom.relaxed.cta.shared.max.u64` | `LDS.64`, `ATOMS.CAST.SPIN.64` |
//! | `max_relaxed_cta_i32` | `atom.relaxed.cta.shared.max.s32` | `ATOMS.MAX.S32` |
//! | `max_relaxed_cta_i64` | `atom.relaxed.cta.shared.max.s64` | `LDS.64`, `ATOMS.CAST.SPIN.64` |
//! | `or_relaxed_cta_u32` | `atom.relaxed.cta.shared.or.b32` | `ATOMS.OR` |
//! | `or_relaxed_cta_u64` | `atom.relaxed.cta.shared.or.b64` | `LDS.64`, `ATOMS.CAST.SPIN.64` |
//! | `and_relaxed_cta_u32` | `atom.relaxed.cta.shared.and.b32` | `ATOMS.AND` |
//! | `and_relaxed_cta_u64` | `atom.relaxed.cta.shared.and.b64` | `LDS.64`, `ATOMS.CAST.SPIN.64` |
//! | `exchange_relaxed_cta_u32` | `atom.relaxed.cta.shared.exch.b32` | `ATOMS.EXCH` |
//! | `exchange_relaxed_cta_u64` | `atom.relaxed.cta.shared.exch.b64` | `ATOMS.EXCH.64` |
//! | `cas_relaxed_cta_u32` | `atom.relaxed.cta.shared.cas.b32` | `ATOMS.CAS` |
//! | `cas_relaxed_cta_u64` | `atom.relaxed.cta.shared.cas.b64` | `ATOMS.CAS.64` |
//!
//! The column SASS has the accesses to shared memory that `ptxas` 13.0 makes of each line alone; a test compares them.
//! A read-modify-write of 64 bits, other than an exchange or compare-exchange, is a loop: it costs a multiple of one of
//! 32 bits, and more if threads contend.
//!
//! On a CPU each access is a relaxed atomic and a switch point; a pair is two of them.

/// Passes the table of accesses to the macro `$emit`.
///
/// A row has shape, name, type, class and type of register, PTX and its operands, the operation on a CPU, and the docs.
macro_rules! shared_operations {
    ($emit:ident) => {
        $emit! {
            load load_weak_u8 u8 (reg32 u32) "ld.shared.u8" " {s}, [{a}];" load
                "Loads a byte; weak.";
            load load_weak_u16 u16 (reg32 u32) "ld.shared.u16" " {s}, [{a}];" load
                "Loads 2 bytes; weak.";
            load load_weak_u32 u32 (reg32 u32) "ld.shared.u32" " {s}, [{a}];" load
                "Loads 4 bytes; weak.";
            load load_weak_u64 u64 (reg64 u64) "ld.shared.u64" " {o}, [{a}];" load
                "Loads 8 bytes; weak.";
            store store_weak_u8 u8 (reg32 u32) "st.shared.u8" " [{a}], {w};" store
                "Stores a byte; weak.";
            store store_weak_u16 u16 (reg32 u32) "st.shared.u16" " [{a}], {w};" store
                "Stores 2 bytes; weak.";
            store store_weak_u32 u32 (reg32 u32) "st.shared.u32" " [{a}], {w};" store
                "Stores 4 bytes; weak.";
            store store_weak_u64 u64 (reg64 u64) "st.shared.u64" " [{a}], {v};" store
                "Stores 8 bytes; weak.";
            rmw add_relaxed_cta_u32 u32 (reg32 u32) "atom.relaxed.cta.shared.add.u32" " {s}, [{a}], {w};" fetch_add
                "Adds modulo 2^32 and returns what was there, relaxed, at block scope.";
            rmw add_relaxed_cta_u64 u64 (reg64 u64) "atom.relaxed.cta.shared.add.u64" " {o}, [{a}], {v};" fetch_add
                "Adds modulo 2^64 and returns what was there, relaxed, at block scope.";
            rmw min_relaxed_cta_u32 u32 (reg32 u32) "atom.relaxed.cta.shared.min.u32" " {s}, [{a}], {w};" fetch_min
                "Stores `value` if it is less; returns what was there. Relaxed, at block scope.";
            rmw min_relaxed_cta_u64 u64 (reg64 u64) "atom.relaxed.cta.shared.min.u64" " {o}, [{a}], {v};" fetch_min
                "Stores `value` if it is less; returns what was there. Relaxed, at block scope.";
            rmw min_relaxed_cta_i32 i32 (reg32 u32) "atom.relaxed.cta.shared.min.s32" " {s}, [{a}], {w};" fetch_min
                "Stores `value` if it is less; returns what was there. Relaxed, at block scope.";
            rmw min_relaxed_cta_i64 i64 (reg64 u64) "atom.relaxed.cta.shared.min.s64" " {o}, [{a}], {v};" fetch_min
                "Stores `value` if it is less; returns what was there. Relaxed, at block scope.";
            rmw max_relaxed_cta_u32 u32 (reg32 u32) "atom.relaxed.cta.shared.max.u32" " {s}, [{a}], {w};" fetch_max
                "Stores `value` if it is greater; returns what was there. Relaxed, at block scope.";
            rmw max_relaxed_cta_u64 u64 (reg64 u64) "atom.relaxed.cta.shared.max.u64" " {o}, [{a}], {v};" fetch_max
                "Stores `value` if it is greater; returns what was there. Relaxed, at block scope.";
            rmw max_relaxed_cta_i32 i32 (reg32 u32) "atom.relaxed.cta.shared.max.s32" " {s}, [{a}], {w};" fetch_max
                "Stores `value` if it is greater; returns what was there. Relaxed, at block scope.";
            rmw max_relaxed_cta_i64 i64 (reg64 u64) "atom.relaxed.cta.shared.max.s64" " {o}, [{a}], {v};" fetch_max
                "Stores `value` if it is greater; returns what was there. Relaxed, at block scope.";
            rmw or_relaxed_cta_u32 u32 (reg32 u32) "atom.relaxed.cta.shared.or.b32" " {s}, [{a}], {w};" fetch_or
                "Sets the bits that are 1 in `value`; returns what was there. Relaxed, at block scope.";
            rmw or_relaxed_cta_u64 u64 (reg64 u64) "atom.relaxed.cta.shared.or.b64" " {o}, [{a}], {v};" fetch_or
                "Sets the bits that are 1 in `value`; returns what was there. Relaxed, at block scope.";
            rmw and_relaxed_cta_u32 u32 (reg32 u32) "atom.relaxed.cta.shared.and.b32" " {s}, [{a}], {w};" fetch_and
                "Clears the bits that are 0 in `value`; returns what was there. Relaxed, at block scope.";
            rmw and_relaxed_cta_u64 u64 (reg64 u64) "atom.relaxed.cta.shared.and.b64" " {o}, [{a}], {v};" fetch_and
                "Clears the bits that are 0 in `value`; returns what was there. Relaxed, at block scope.";
            rmw exchange_relaxed_cta_u32 u32 (reg32 u32) "atom.relaxed.cta.shared.exch.b32" " {s}, [{a}], {w};" swap
                "Stores `value` and returns what was there, relaxed, at block scope.";
            rmw exchange_relaxed_cta_u64 u64 (reg64 u64) "atom.relaxed.cta.shared.exch.b64" " {o}, [{a}], {v};" swap
                "Stores `value` and returns what was there, relaxed, at block scope.";
            cas cas_relaxed_cta_u32 u32 (reg32 u32) "atom.relaxed.cta.shared.cas.b32" " {s}, [{a}], {n}, {w};"
                compare_exchange
                "Stores `new` if `expected` is there; returns what was there. Relaxed, at block scope.";
            cas cas_relaxed_cta_u64 u64 (reg64 u64) "atom.relaxed.cta.shared.cas.b64" " {o}, [{a}], {c}, {v};"
                compare_exchange
                "Stores `new` if `expected` is there; returns what was there. Relaxed, at block scope.";
        }
    };
}

#[cfg(not(target_arch = "nvptx64"))]
mod cpu;
#[cfg(target_arch = "nvptx64")]
mod ptx;

#[cfg(not(target_arch = "nvptx64"))]
pub use cpu::*;
#[cfg(target_arch = "nvptx64")]
pub use ptx::*;

#[cfg(not(target_arch = "nvptx64"))]
use super::table::{OperationRow, row};

#[cfg(not(target_arch = "nvptx64"))]
macro_rules! rows {
    ($(
        $shape:ident $name:ident $ty:ident ($class:ident $register:ident) $ptx:literal $operands:literal $op:ident
        $doc:literal;
    )*) => {
        /// Every access of this module.
        #[doc(hidden)]
        pub const SHARED_OPERATIONS: &[OperationRow] = &[
            $(row(stringify!($name), $ptx, concat!($ptx, $operands)),)*
            row("load_weak_pair", "ld.shared.v2.u64", "ld.shared.v2.u64 {{{l}, {h}}}, [{a}];"),
            row("store_weak_pair", "st.shared.v2.u64", "st.shared.v2.u64 [{a}], {{{l}, {h}}};"),
        ];
    };
}
#[cfg(not(target_arch = "nvptx64"))]
shared_operations!(rows);

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(align(16))]
    struct Memory([u64; 2]);

    #[test]
    fn loads_and_stores_access_as_many_bytes_as_their_names_say() {
        let start = [0x0706_0504_0302_0100u64, 0x0f0e_0d0c_0b0a_0908];
        let mut memory = Memory(start);
        let first = Address::new((&raw mut memory).cast());
        let at = |offset| first.at(offset);
        // Safety: inside of `memory`, aligned.
        unsafe {
            assert_eq!(load_weak_u8(at(3)), 3);
            assert_eq!(load_weak_u16(at(2)), 0x0302);
            assert_eq!(load_weak_u32(at(4)), 0x0706_0504);
            assert_eq!(load_weak_u64(at(8)), start[1]);
            assert_eq!(load_weak_pair(at(0)), (start[0], start[1]));
            store_weak_pair(at(0), 0, 0);
            store_weak_u8(at(1), 1);
            store_weak_u16(at(2), 2);
            store_weak_u32(at(4), 3);
            store_weak_u64(at(8), 4);
        }
        assert_eq!(memory.0, [0x0000_0003_0002_0100, 4]);
    }

    /// Runs an operation on a word. Returns what the operation returns, and the word afterwards.
    fn run<T: Copy>(start: T, op: unsafe fn(Address, T) -> T, value: T) -> (T, T) {
        let mut word = start;
        // Safety: a local word.
        let before = unsafe { op(Address::new((&raw mut word).cast()), value) };
        (before, word)
    }

    #[test]
    fn read_modify_writes_do_what_their_names_say_and_return_what_was_there() {
        assert_eq!(run(u32::MAX, add_relaxed_cta_u32, 3), (u32::MAX, 2));
        assert_eq!(run(u64::MAX, add_relaxed_cta_u64, 3), (u64::MAX, 2));
        assert_eq!(run(6, min_relaxed_cta_u32, u32::MAX), (6, 6));
        assert_eq!(run(6, min_relaxed_cta_i32, -1), (6, -1));
        assert_eq!(run(6, min_relaxed_cta_u64, u64::MAX), (6, 6));
        assert_eq!(run(6, min_relaxed_cta_i64, -1), (6, -1));
        assert_eq!(run(6, max_relaxed_cta_u32, u32::MAX), (6, u32::MAX));
        assert_eq!(run(6, max_relaxed_cta_i32, -1), (6, 6));
        assert_eq!(run(6, max_relaxed_cta_u64, u64::MAX), (6, u64::MAX));
        assert_eq!(run(6, max_relaxed_cta_i64, -1), (6, 6));
        assert_eq!(run(6, or_relaxed_cta_u32, 3), (6, 7));
        assert_eq!(run(6 << 40, or_relaxed_cta_u64, 3 << 40), (6 << 40, 7 << 40));
        assert_eq!(run(6, and_relaxed_cta_u32, 3), (6, 2));
        assert_eq!(run(6 << 40, and_relaxed_cta_u64, 3 << 40), (6 << 40, 2 << 40));
        assert_eq!(run(6, exchange_relaxed_cta_u32, 3), (6, 3));
        assert_eq!(run(6, exchange_relaxed_cta_u64, 3), (6, 3));
    }

    #[test]
    fn a_compare_exchange_stores_only_if_the_expected_value_is_there() {
        let (mut narrow, mut wide) = (6u32, 6u64);
        let (at_narrow, at_wide) = (Address::new((&raw mut narrow).cast()), Address::new((&raw mut wide).cast()));
        // Safety: local words.
        unsafe {
            assert_eq!((cas_relaxed_cta_u32(at_narrow, 5, 1), cas_relaxed_cta_u64(at_wide, 5, 1)), (6, 6));
            assert_eq!((load_weak_u32(at_narrow), load_weak_u64(at_wide)), (6, 6));
            assert_eq!((cas_relaxed_cta_u32(at_narrow, 6, 1), cas_relaxed_cta_u64(at_wide, 6, 1)), (6, 6));
            assert_eq!((load_weak_u32(at_narrow), load_weak_u64(at_wide)), (1, 1));
        }
    }
}
