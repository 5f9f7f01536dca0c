// SPDX-License-Identifier: MIT OR Apache-2.0
//! The operations as PTX.

use super::{PartialSums, Sums};
use crate::coop::{LaneCoop, Warp};
use crate::sys::shared::Address;
use core::arch::asm;

/// Adds the operands of the sums, one for each number, to those of a statement.
macro_rules! with_sums {
    ($sums:ident, [$($index:literal)*], [$($template:expr),* $(,)?], $($operands:tt)*) => {
        asm!($($template,)* $(inout(reg32) $sums[$index],)* $($operands)*)
    };
}

/// The registers of the sums, and the rest of a product over 16 inner elements.
macro_rules! product {
    ($adds:literal) => {
        concat!(
            "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {{",
            "{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}, {9}, {10}, {11}, {12}, {13}, {14}, {15}, ",
            "{16}, {17}, {18}, {19}, {20}, {21}, {22}, {23}, {24}, {25}, {26}, {27}, {28}, {29}, {30}, {31}, ",
            "{32}, {33}, {34}, {35}, {36}, {37}, {38}, {39}, {40}, {41}, {42}, {43}, {44}, {45}, {46}, {47}, ",
            "{48}, {49}, {50}, {51}, {52}, {53}, {54}, {55}, {56}, {57}, {58}, {59}, {60}, {61}, {62}, {63}, ",
            "{64}, {65}, {66}, {67}, {68}, {69}, {70}, {71}, {72}, {73}, {74}, {75}, {76}, {77}, {78}, {79}, ",
            "{80}, {81}, {82}, {83}, {84}, {85}, {86}, {87}, {88}, {89}, {90}, {91}, {92}, {93}, {94}, {95}, ",
            "{96}, {97}, {98}, {99}, {100}, {101}, {102}, {103}, {104}, {105}, {106}, {107}, {108}, {109}, {110}, {111}, ",
            "{112}, {113}, {114}, {115}, {116}, {117}, {118}, {119}, {120}, {121}, {122}, {123}, {124}, {125}, {126}, {127}",
            "}}, gin_a, gin_b, ",
            $adds,
            ", 1, 1, 0, 0;"
        )
    };
}

/// The registers of partial sums, and the rest of a product over 32 inner elements.
macro_rules! product_e4m3 {
    ($adds:literal) => {
        concat!(
            "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {{",
            "{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}, {9}, {10}, {11}, {12}, {13}, {14}, {15}, ",
            "{16}, {17}, {18}, {19}, {20}, {21}, {22}, {23}, {24}, {25}, {26}, {27}, {28}, {29}, {30}, {31}, ",
            "{32}, {33}, {34}, {35}, {36}, {37}, {38}, {39}, {40}, {41}, {42}, {43}, {44}, {45}, {46}, {47}, ",
            "{48}, {49}, {50}, {51}, {52}, {53}, {54}, {55}, {56}, {57}, {58}, {59}, {60}, {61}, {62}, {63}",
            "}}, gin_a, gin_b, ",
            $adds,
            ", 1, 1;"
        )
    };
}

/// Returns the lower half of the descriptor of a factor, with its address (PTX ISA, "Matrix descriptor").
#[inline(always)]
fn descriptor(factor: Address) -> u32 {
    (factor.bits() & 0x3ffff) >> 4 | 1 << 16
}

/// The upper half of a descriptor: 1024 bytes from 8 rows to the next, swizzle of 128 bytes.
const LAYOUT: u32 = 1024 >> 4 | 1 << 30;

/// Adds the product of 64 inner elements to the sums, or replaces the sums by it if not `adds`. The whole warpgroup
/// calls.
///
/// # Safety
/// - The block has 8 KB of shared memory at `left` and 32 KB at `right`, multiples of 1024, for which the
///   [module](super#order) states the order.
#[inline(always)]
pub unsafe fn multiply_add(sums: &mut Sums, left: Address, right: Address, adds: bool) {
    // Safety: the caller's promise. 16 inner elements are 32 bytes, 2 units of a descriptor.
    unsafe {
        with_sums!(
            sums,
            [
                0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
                32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63
                64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95
                96 97 98 99 100 101 102 103 104 105 106 107 108 109 110 111 112 113 114 115 116 117 118 119 120 121 122 123 124 125 126 127
            ],
            [
                "{{ .reg .pred gin_p, gin_q; .reg .b64 gin_a, gin_b; .reg .b32 gin_i, gin_j, gin_h;",
                "setp.ne.u32 gin_p, {n}, 0; mov.pred gin_q, 1; mov.b32 gin_h, {w};",
                "mov.b64 gin_a, {{{a}, gin_h}}; mov.b64 gin_b, {{{b}, gin_h}};",
                "wgmma.fence.sync.aligned;",
                product!("gin_p"),
                "add.u32 gin_i, {a}, 2; mov.b64 gin_a, {{gin_i, gin_h}}; add.u32 gin_j, {b}, 2; mov.b64 gin_b, {{gin_j, gin_h}};",
                product!("gin_q"),
                "add.u32 gin_i, {a}, 4; mov.b64 gin_a, {{gin_i, gin_h}}; add.u32 gin_j, {b}, 4; mov.b64 gin_b, {{gin_j, gin_h}};",
                product!("gin_q"),
                "add.u32 gin_i, {a}, 6; mov.b64 gin_a, {{gin_i, gin_h}}; add.u32 gin_j, {b}, 6; mov.b64 gin_b, {{gin_j, gin_h}};",
                product!("gin_q"),
                "wgmma.commit_group.sync.aligned;",
                "wgmma.wait_group.sync.aligned 0; }}",
            ],
            a = in(reg32) descriptor(left), b = in(reg32) descriptor(right), n = in(reg32) u32::from(adds),
            w = const LAYOUT,
            options(nostack),
        );
    }
}

/// Replaces the sums by the product of 128 inner elements of E4M3. The whole warpgroup calls.
///
/// # Safety
/// - The block has 8 KB of shared memory at `left` and 16 KB at `right`, multiples of 1024, for which the
///   [module](super#order) states the order.
#[inline(always)]
pub unsafe fn multiply_e4m3(sums: &mut PartialSums, left: Address, right: Address) {
    // All lanes have the same descriptors. The assembler does not see that, so it does not keep them for the next call.
    let [left, right] = [left, right].map(|factor| Warp.shuffle(descriptor(factor), 0));
    // Safety: the caller's promise. 32 inner elements are 32 bytes, 2 units of a descriptor.
    unsafe {
        with_sums!(
            sums,
            [
                0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
                32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63
            ],
            [
                "{{ .reg .pred gin_p, gin_q; .reg .b64 gin_a, gin_b; .reg .b32 gin_i, gin_j, gin_h;",
                "mov.pred gin_p, 0; mov.pred gin_q, 1; mov.b32 gin_h, {w};",
                "mov.b64 gin_a, {{{a}, gin_h}}; mov.b64 gin_b, {{{b}, gin_h}};",
                "wgmma.fence.sync.aligned;",
                product_e4m3!("gin_p"),
                "add.u32 gin_i, {a}, 2; mov.b64 gin_a, {{gin_i, gin_h}}; add.u32 gin_j, {b}, 2; mov.b64 gin_b, {{gin_j, gin_h}};",
                product_e4m3!("gin_q"),
                "add.u32 gin_i, {a}, 4; mov.b64 gin_a, {{gin_i, gin_h}}; add.u32 gin_j, {b}, 4; mov.b64 gin_b, {{gin_j, gin_h}};",
                product_e4m3!("gin_q"),
                "add.u32 gin_i, {a}, 6; mov.b64 gin_a, {{gin_i, gin_h}}; add.u32 gin_j, {b}, 6; mov.b64 gin_b, {{gin_j, gin_h}};",
                product_e4m3!("gin_q"),
                "wgmma.commit_group.sync.aligned;",
                "wgmma.wait_group.sync.aligned 0; }}",
            ],
            a = in(reg32) left, b = in(reg32) right, w = const LAYOUT, options(nostack),
        );
    }
}

/// Raises the number of registers of each thread to `REGISTERS`. The whole warpgroup calls.
///
/// # Safety
/// - `REGISTERS` is a multiple of 8, 24 to 256, and not less than the threads have. Other warpgroups of the block
///   [release](decrease_registers) as many, or have done so.
#[inline(always)]
pub unsafe fn increase_registers<const REGISTERS: u32>() {
    // Safety: the caller's promise.
    unsafe { asm!("setmaxnreg.inc.sync.aligned.u32 {n};", n = const REGISTERS, options(nostack)) };
}

/// Lowers the number of registers of each thread to `REGISTERS`. The whole warpgroup calls.
///
/// # Safety
/// - `REGISTERS` is a multiple of 8, 24 to 256, and not more than the threads have.
#[inline(always)]
pub unsafe fn decrease_registers<const REGISTERS: u32>() {
    // Safety: the caller's promise.
    unsafe { asm!("setmaxnreg.dec.sync.aligned.u32 {n};", n = const REGISTERS, options(nostack)) };
}
