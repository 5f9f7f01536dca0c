// SPDX-License-Identifier: MIT OR Apache-2.0
//! The table of operations as data, for the tests that assemble each line alone.
#![cfg(not(target_arch = "nvptx64"))]

/// One operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OperationRow {
    /// The name of the function.
    pub name: &'static str,
    /// The PTX without operands, for the docs.
    pub ptx: &'static str,
    /// The statement for `asm!`, for sm_90 and PTX 8.6 or later.
    ///
    /// Its braces are those of `asm!`: `{{` and `}}` are one brace each, and single braces enclose names of registers:
    /// `p` (address), `v`, `c`, `o`, `l`, `h`, `t` of 64 bits, `i`, `n`, `w`, `s` of 32.
    pub statement: &'static str,
    /// The statement for earlier targets, if it differs.
    pub fallback: Option<&'static str>,
}

macro_rules! rows {
    (@fallback) => { None };
    (@fallback $fallback:literal) => { Some(statement!(fence $fallback)) };
    ($(
        $shape:ident $name:ident $ptx:literal $($fallback:literal)? $ordering:ident $($op:ident)? $doc:literal;
    )*) => {
        /// Every operation of [`sys`](crate::sys) that is an instruction.
        #[doc(hidden)]
        pub const OPERATIONS: &[OperationRow] = &[
            $(OperationRow {
                name: stringify!($name),
                ptx: $ptx,
                statement: statement!($shape $ptx),
                fallback: rows!(@fallback $($fallback)?),
            },)*
            row("store_pair_relaxed_sys", "st.relaxed.sys.global.v2.u64", statement!(store_pair_relaxed_sys)),
            row("read_word", "ld.global.u64", statement!(read_word)),
            row("read_pair", "ld.global.v2.u64", statement!(read_pair)),
            row("add_relaxed_gpu_if", "@gin_p atom.relaxed.gpu.global.add.u64", statement!(add_relaxed_gpu_if)),
            row("store_pair_relaxed_sys_if", "@gin_p st.relaxed.sys.global.v2.u64", statement!(store_pair_relaxed_sys_if)),
            row("spin", "ld.relaxed.sys.global.u64", statement!(spin)),
            row("narrow", "mov.u32", statement!(narrow)),
            row("pause", "nanosleep.u32", statement!(pause)),
            row("clock_ns", "mov.u64 %globaltimer", statement!(clock_ns)),
            row("cycles", "mov.u64 %clock64", statement!(cycles)),
            row("trap", "trap", statement!(trap)),
            OperationRow {
                fallback: Some(""),
                ..row("wait_for_predecessor", "griddepcontrol.wait", statement!(wait_for_predecessor))
            },
            OperationRow {
                fallback: Some(""),
                ..row("let_dependents_start", "griddepcontrol.launch_dependents", statement!(let_dependents_start))
            },
        ];
    };
}

pub(super) const fn row(name: &'static str, ptx: &'static str, statement: &'static str) -> OperationRow {
    OperationRow { name, ptx, statement, fallback: None }
}

word_operations!(rows);
