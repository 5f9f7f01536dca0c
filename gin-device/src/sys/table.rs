// SPDX-License-Identifier: MIT OR Apache-2.0
//! The table of operations as data, for the tests that assemble each line by itself.
#![cfg(not(target_arch = "nvptx64"))]

/// How an operation's operands look.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shape {
    /// `op d, [a];`
    Load,
    /// `op [a], v;`
    Store,
    /// `op d, [a], v;`
    ReadModifyWrite,
    /// `op d, [a], c, v;`
    CompareAndSwap,
    /// `op;`
    Fence,
    /// `op [a], {v, v};`
    StorePair,
    /// `op {d, e}, [a];`
    LoadPair,
    /// A statement as it is; `{r}` stands for a 32-bit register, `{q}` for one of 64 bits.
    Plain,
}

/// One row of the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OperationRow {
    /// Name of the function.
    pub name: &'static str,
    /// How the operands look.
    pub shape: Shape,
    /// PTX without operands, for sm_90 with PTX 8.6 and later.
    pub ptx: &'static str,
    /// PTX without operands elsewhere.
    pub fallback: &'static str,
}

impl OperationRow {
    /// The statement with operands, for a target that has `fence.acquire` (`modern`) or not.
    ///
    /// Registers are named `%a` (address), `%d` and `%e` (results), `%v` and `%c` (values), `%r` (32 bits).
    #[must_use]
    pub const fn operands(&self) -> &'static str {
        match self.shape {
            Shape::Load => " %d, [%a];",
            Shape::Store => " [%a], %v;",
            Shape::ReadModifyWrite => " %d, [%a], %v;",
            Shape::CompareAndSwap => " %d, [%a], %c, %v;",
            Shape::Fence => ";",
            Shape::StorePair => " [%a], {%v, %c};",
            Shape::LoadPair => " {%d, %e}, [%a];",
            Shape::Plain => "",
        }
    }
}

macro_rules! rows {
    (@shape load) => { Shape::Load };
    (@shape store) => { Shape::Store };
    (@shape rmw) => { Shape::ReadModifyWrite };
    (@shape cas) => { Shape::CompareAndSwap };
    (@shape fence) => { Shape::Fence };
    (@fallback $ptx:literal) => { $ptx };
    (@fallback $ptx:literal $fallback:literal) => { $fallback };
    ($(
        $shape:ident $name:ident $ptx:literal $($fallback:literal)? $ordering:ident $($op:ident)? $doc:literal;
    )*) => {
        /// Every operation of [`sys`](crate::sys) that is an instruction.
        pub const OPERATIONS: &[OperationRow] = &[
            $(OperationRow {
                name: stringify!($name),
                shape: rows!(@shape $shape),
                ptx: $ptx,
                fallback: rows!(@fallback $ptx $($fallback)?),
            },)*
            OperationRow {
                name: "store_pair_relaxed_sys",
                shape: Shape::StorePair,
                ptx: "st.relaxed.sys.global.v2.u64",
                fallback: "st.relaxed.sys.global.v2.u64",
            },
            OperationRow {
                name: "read_word",
                shape: Shape::Load,
                ptx: "ld.global.u64",
                fallback: "ld.global.u64",
            },
            OperationRow {
                name: "read_pair",
                shape: Shape::LoadPair,
                ptx: "ld.global.v2.u64",
                fallback: "ld.global.v2.u64",
            },
            plain("pause", "nanosleep.u32 %r;"),
            plain("clock_ns", "mov.u64 %d, %globaltimer;"),
            plain("cycles", "mov.u64 %d, %clock64;"),
            plain("trap", "trap;"),
        ];
    };
}

const fn plain(name: &'static str, ptx: &'static str) -> OperationRow {
    OperationRow { name, shape: Shape::Plain, ptx, fallback: ptx }
}

word_operations!(rows);

#[cfg(test)]
mod tests {
    use super::*;
    use std::format;

    #[test]
    fn the_table_in_the_docs_lists_exactly_the_operations() {
        let docs = include_str!("mod.rs");
        for row in OPERATIONS {
            if row.shape == Shape::Plain {
                assert!(docs.contains(row.name), "{} is not mentioned", row.name);
                continue;
            }
            let line = format!("//! | `{}` | `{}` |", row.name, row.ptx);
            assert!(docs.contains(&line), "no line in the docs begins with {line:?}");
        }
        let listed = docs.lines().filter(|line| line.starts_with("//! | `")).count();
        let rows = OPERATIONS.iter().filter(|r| r.shape != Shape::Plain).count();
        assert_eq!(listed, rows, "the docs list operations that there are not");
    }
}
