// SPDX-License-Identifier: MIT OR Apache-2.0
//! Accesses to bulk data of this rank or a peer, the base of `lsa`.
//!
//! | access | property |
//! | --- | --- |
//! | load | strong, except `load_weak_u32`, `load_weak_u64` and `load_weak_pair`: it bypasses the L1 cache, so it reads a range afresh that was read before |
//! | constant load | through the read-only cache, which sees no write of a kernel that runs: for memory that nobody writes until the grid has ended, such as weights; `gin_build::check` allows it by these names only |
//! | store | weak: a release by the storing thread, or by a thread that it has met, makes it visible |
//! | reduction | atomic with other reductions and with atomics of system scope on memory of GPUs that have them natively, not with atomics of CPUs and NICs |
//!
//! No two accesses are ordered.
//!
//! | name | PTX | cost |
//! | --- | --- | --- |
//! | `load_relaxed_sys_u8` | `ld.relaxed.sys.global.u8` | one trip to L2, or to the peer |
//! | `load_relaxed_sys_u16` | `ld.relaxed.sys.global.u16` | the same |
//! | `load_relaxed_sys_u32` | `ld.relaxed.sys.global.u32` | the same |
//! | `load_relaxed_sys_u64` | `ld.relaxed.sys.global.u64` | the same |
//! | `load_relaxed_sys_pair` | `ld.relaxed.sys.global.v2.u64` | the same, 16 bytes |
//! | `load_weak_u32` | `ld.global.u32` | the same, or the L1 cache if the SM has read the bytes since it last acquired |
//! | `load_weak_u64` | `ld.global.u64` | the same, or the L1 cache if the SM has read the bytes since it last acquired |
//! | `load_weak_pair` | `ld.global.v2.u64` | the same, or the L1 cache if the SM has read the bytes since it last acquired |
//! | `load_constant_u32` | `ld.global.nc.u32` | the same, or the L1 cache if the SM has read the bytes |
//! | `load_constant_pair` | `ld.global.nc.v2.u64` | the same, 16 bytes |
//! | `store_weak_u8` | `st.global.u8` | posted |
//! | `store_weak_u16` | `st.global.u16` | posted |
//! | `store_weak_u32` | `st.global.u32` | posted |
//! | `store_weak_u64` | `st.global.u64` | posted |
//! | `store_weak_pair` | `st.global.v2.u64` | posted, 16 bytes |
//! | `red_add_relaxed_sys_u32` | `red.relaxed.sys.global.add.u32` | posted |
//! | `red_add_relaxed_sys_u64` | `red.relaxed.sys.global.add.u64` | posted |
//! | `red_add_relaxed_sys_f32` | `red.relaxed.sys.global.add.f32` | posted |
//! | `red_and_relaxed_sys_u32` | `red.relaxed.sys.global.and.b32` | posted |
//! | `red_and_relaxed_sys_u64` | `red.relaxed.sys.global.and.b64` | posted |
//! | `red_or_relaxed_sys_u32` | `red.relaxed.sys.global.or.b32` | posted |
//! | `red_or_relaxed_sys_u64` | `red.relaxed.sys.global.or.b64` | posted |
//! | `red_min_relaxed_sys_u32` | `red.relaxed.sys.global.min.u32` | posted |
//! | `red_min_relaxed_sys_u64` | `red.relaxed.sys.global.min.u64` | posted |
//! | `red_max_relaxed_sys_u32` | `red.relaxed.sys.global.max.u32` | posted |
//! | `red_max_relaxed_sys_u64` | `red.relaxed.sys.global.max.u64` | posted |
//!
//! On a CPU each access is a relaxed atomic and a switch point; a pair is two of them.

/// Passes the table of accesses to the macro `$emit`.
///
/// A row has shape, name, type, class and type of register, PTX and its operands, and the operation on a CPU.
macro_rules! data_operations {
    ($emit:ident) => {
        $emit! {
            load load_relaxed_sys_u8 u8 (reg32 u32) "ld.relaxed.sys.global.u8" " {s}, [{p}];" load
                "Loads a byte, relaxed, at system scope.";
            load load_relaxed_sys_u16 u16 (reg32 u32) "ld.relaxed.sys.global.u16" " {s}, [{p}];" load
                "Loads 2 bytes, relaxed, at system scope.";
            load load_relaxed_sys_u32 u32 (reg32 u32) "ld.relaxed.sys.global.u32" " {s}, [{p}];" load
                "Loads 4 bytes, relaxed, at system scope.";
            load load_relaxed_sys_u64 u64 (reg64 u64) "ld.relaxed.sys.global.u64" " {o}, [{p}];" load
                "Loads 8 bytes, relaxed, at system scope.";
            load load_weak_u32 u32 (reg32 u32) "ld.global.u32" " {s}, [{p}];" load
                "Loads 4 bytes; weak: no thread may write them meanwhile, and earlier writes must have been acquired.";
            load load_weak_u64 u64 (reg64 u64) "ld.global.u64" " {o}, [{p}];" load
                "Loads 8 bytes; weak: no thread may write them meanwhile, and earlier writes must have been acquired.";
            store store_weak_u8 u8 (reg32 u32) "st.global.u8" " [{p}], {w};" store
                "Stores a byte; weak.";
            store store_weak_u16 u16 (reg32 u32) "st.global.u16" " [{p}], {w};" store
                "Stores 2 bytes; weak.";
            store store_weak_u32 u32 (reg32 u32) "st.global.u32" " [{p}], {w};" store
                "Stores 4 bytes; weak.";
            store store_weak_u64 u64 (reg64 u64) "st.global.u64" " [{p}], {v};" store
                "Stores 8 bytes; weak.";
            store red_add_relaxed_sys_u32 u32 (reg32 u32) "red.relaxed.sys.global.add.u32" " [{p}], {w};" fetch_add
                "Adds modulo 2^32, relaxed, at system scope.";
            store red_add_relaxed_sys_u64 u64 (reg64 u64) "red.relaxed.sys.global.add.u64" " [{p}], {v};" fetch_add
                "Adds modulo 2^64, relaxed, at system scope.";
            store red_and_relaxed_sys_u32 u32 (reg32 u32) "red.relaxed.sys.global.and.b32" " [{p}], {w};" fetch_and
                "Clears the bits that are 0 in `value`, relaxed, at system scope.";
            store red_and_relaxed_sys_u64 u64 (reg64 u64) "red.relaxed.sys.global.and.b64" " [{p}], {v};" fetch_and
                "Clears the bits that are 0 in `value`, relaxed, at system scope.";
            store red_or_relaxed_sys_u32 u32 (reg32 u32) "red.relaxed.sys.global.or.b32" " [{p}], {w};" fetch_or
                "Sets the bits that are 1 in `value`, relaxed, at system scope.";
            store red_or_relaxed_sys_u64 u64 (reg64 u64) "red.relaxed.sys.global.or.b64" " [{p}], {v};" fetch_or
                "Sets the bits that are 1 in `value`, relaxed, at system scope.";
            store red_min_relaxed_sys_u32 u32 (reg32 u32) "red.relaxed.sys.global.min.u32" " [{p}], {w};" fetch_min
                "Stores `value` if it is less, relaxed, at system scope.";
            store red_min_relaxed_sys_u64 u64 (reg64 u64) "red.relaxed.sys.global.min.u64" " [{p}], {v};" fetch_min
                "Stores `value` if it is less, relaxed, at system scope.";
            store red_max_relaxed_sys_u32 u32 (reg32 u32) "red.relaxed.sys.global.max.u32" " [{p}], {w};" fetch_max
                "Stores `value` if it is greater, relaxed, at system scope.";
            store red_max_relaxed_sys_u64 u64 (reg64 u64) "red.relaxed.sys.global.max.u64" " [{p}], {v};" fetch_max
                "Stores `value` if it is greater, relaxed, at system scope.";
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
        pub const DATA_OPERATIONS: &[OperationRow] = &[
            $(row(stringify!($name), $ptx, concat!($ptx, $operands)),)*
            row("load_relaxed_sys_pair", "ld.relaxed.sys.global.v2.u64", "ld.relaxed.sys.global.v2.u64 {{{l}, {h}}}, [{p}];"),
            row("load_weak_pair", "ld.global.v2.u64", "ld.global.v2.u64 {{{l}, {h}}}, [{p}];"),
            row("load_constant_u32", "ld.global.nc.u32", "ld.global.nc.u32 {s}, [{p}]; // load_constant_u32"),
            row(
                "load_constant_pair",
                "ld.global.nc.v2.u64",
                "ld.global.nc.v2.u64 {{{l}, {h}}}, [{p}]; // load_constant_pair",
            ),
            row("store_weak_pair", "st.global.v2.u64", "st.global.v2.u64 [{p}], {{{l}, {h}}};"),
            row("red_add_relaxed_sys_f32", "red.relaxed.sys.global.add.f32", "red.relaxed.sys.global.add.f32 [{p}], {w};"),
        ];
    };
}
#[cfg(not(target_arch = "nvptx64"))]
data_operations!(rows);

#[cfg(test)]
mod tests {
    use super::*;
    use std::format;
    use std::vec::Vec;

    #[test]
    fn the_table_in_the_docs_lists_exactly_the_accesses() {
        let docs = include_str!("mod.rs");
        for row in DATA_OPERATIONS {
            let line = format!("//! | `{}` | `{}` |", row.name, row.ptx);
            assert!(docs.contains(&line), "no line in the docs begins with {line:?}");
        }
        let listed = docs.lines().filter(|line| line.starts_with("//! | `")).count();
        assert_eq!(listed, DATA_OPERATIONS.len(), "the docs list accesses that there are not");
    }

    #[test]
    fn accesses_do_what_their_names_say() {
        #[repr(align(16))]
        struct Aligned([u64; 2]);
        let start = [0x0706_0504_0302_0100u64, 0x0f0e_0d0c_0b0a_0908];
        let mut words = Aligned(start);
        let first = (&raw mut words).cast::<u8>();
        let at = |offset: usize| first.wrapping_add(offset);
        // Safety: inside of `words`, aligned.
        unsafe {
            assert_eq!(load_relaxed_sys_u8(at(3)), 3);
            assert_eq!(load_relaxed_sys_u16(at(2).cast()), 0x0302);
            assert_eq!(load_relaxed_sys_u32(at(4).cast()), 0x0706_0504);
            assert_eq!(load_relaxed_sys_u64(at(8).cast()), start[1]);
            assert_eq!(load_relaxed_sys_pair(at(0).cast()), (start[0], start[1]));
            assert_eq!(load_weak_u64(at(8).cast()), start[1]);
            assert_eq!(load_weak_pair(at(0).cast()), (start[0], start[1]));
            assert_eq!(load_constant_u32(at(4).cast()), 0x0706_0504);
            assert_eq!(load_constant_pair(at(0).cast()), (start[0], start[1]));
            store_weak_pair(at(0).cast(), 0, 0);
            store_weak_u8(at(1).cast(), 1);
            store_weak_u16(at(2).cast(), 2);
            store_weak_u32(at(4).cast(), 3);
            store_weak_u64(at(8).cast(), 4);
        }
        assert_eq!(words.0, [0x0000_0003_0002_0100, 4]);
    }

    #[test]
    fn reductions_do_what_their_names_say() {
        let run32 = |start: u32, red: unsafe fn(*mut u32, u32), value| {
            let mut word = start;
            // Safety: a local word.
            unsafe { red(&raw mut word, value) };
            word
        };
        let run64 = |start: u64, red: unsafe fn(*mut u64, u64), value| {
            let mut word = start;
            // Safety: a local word.
            unsafe { red(&raw mut word, value) };
            word
        };
        let narrow: Vec<u32> = [
            run32(u32::MAX, red_add_relaxed_sys_u32, 3),
            run32(6, red_and_relaxed_sys_u32, 3),
            run32(6, red_or_relaxed_sys_u32, 3),
            run32(6, red_min_relaxed_sys_u32, u32::MAX),
            run32(6, red_max_relaxed_sys_u32, u32::MAX),
        ]
        .to_vec();
        assert_eq!(narrow, [2, 2, 7, 6, u32::MAX]);
        let wide: Vec<u64> = [
            run64(u64::MAX, red_add_relaxed_sys_u64, 3),
            run64(6 << 40, red_and_relaxed_sys_u64, 3 << 40),
            run64(6 << 40, red_or_relaxed_sys_u64, 3 << 40),
            run64(6, red_min_relaxed_sys_u64, u64::MAX),
            run64(6, red_max_relaxed_sys_u64, u64::MAX),
        ]
        .to_vec();
        assert_eq!(wide, [2, 2 << 40, 7 << 40, 6, u64::MAX]);
        let mut sum = 1.5f32;
        // Safety: a local word.
        unsafe { red_add_relaxed_sys_f32(&raw mut sum, 0.25) };
        assert_eq!(sum.to_bits(), 1.75f32.to_bits());
    }
}
