// SPDX-License-Identifier: MIT OR Apache-2.0

//! The kind of memory that addresses in PTX point to, as far as the text shows it.

use std::collections::{BTreeMap, BTreeSet};

use crate::ptx::{Module, strip_comment};

/// Registers that hold addresses of a known kind of memory, by function.
///
/// An address begins at `cvta.shared`, or at the name of a variable, and moves on through copies and additions. The
/// order of instructions plays no part: LLVM assigns nearly every register once. Addresses that pass through memory or
/// calls are lost, so an access that is not found may still be wrong.
#[derive(Debug, Default)]
pub(crate) struct Origins<'a> {
    /// Registers with addresses of shared memory, by the first line of the function.
    shared: BTreeMap<usize, BTreeSet<&'a str>>,
    /// Registers with addresses of the module's variables, by the first line of the function.
    constant: BTreeMap<usize, BTreeSet<&'a str>>,
}

impl<'a> Origins<'a> {
    pub(crate) fn of(text: &'a str, module: &Module) -> Self {
        let mut origins = Origins::default();
        let lines: Vec<&str> = text.lines().collect();
        let mut starts: Vec<usize> = module.starts().collect();
        starts.sort_unstable();
        for (index, &start) in starts.iter().enumerate() {
            let end = starts.get(index + 1).map_or(lines.len(), |next| next - 1);
            let statements: Vec<&str> =
                lines[start - 1..end].iter().flat_map(|line| strip_comment(line).split([';', '{', '}'])).collect();
            origins.shared.insert(start, reached(&statements, |opcode, _| opcode.starts_with("cvta.shared")));
            let is_name = |source: &str| source.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
            let names =
                |opcode: &str, sources: &[&str]| opcode.starts_with("mov.") && sources.iter().all(|s| is_name(s));
            origins.constant.insert(start, reached(&statements, names));
        }
        origins
    }

    /// Returns true if the address, as it stands in brackets on this line, is in shared memory.
    pub(crate) fn is_shared(&self, line: usize, address: &str) -> bool {
        holds(&self.shared, line, base(address))
    }

    /// Returns true if the address, as it stands in brackets on this line, is that of a variable of the module.
    pub(crate) fn is_constant(&self, line: usize, address: &str) -> bool {
        !base(address).starts_with('%') || holds(&self.constant, line, base(address))
    }
}

fn holds(registers: &BTreeMap<usize, BTreeSet<&str>>, line: usize, register: &str) -> bool {
    registers.range(..=line).next_back().is_some_and(|(_, registers)| registers.contains(register))
}

/// Returns the register or the name with which an address in brackets begins.
fn base(address: &str) -> &str {
    address.split(['+', '-', ']']).next().unwrap_or_default().trim()
}

/// Returns the registers into which an address that begins at a statement of this kind can move.
fn reached<'a>(statements: &[&'a str], begins: impl Fn(&str, &[&str]) -> bool) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    loop {
        let before = reached.len();
        for statement in statements {
            let Some(opcode) = opcode(statement) else { continue };
            let mut words = operands(statement);
            let Some(target) = words.next() else { continue };
            let sources: Vec<&str> = words.collect();
            let moves = match opcode.split('.').next() {
                Some("mov" | "add" | "mad" | "and" | "or" | "selp" | "cvta") => {
                    sources.iter().any(|source| reached.contains(source))
                }
                // The distance of two addresses is no address.
                Some("sub") => {
                    sources.first().is_some_and(|source| reached.contains(source))
                        && !sources.get(1).is_some_and(|source| reached.contains(source))
                }
                _ => false,
            };
            if moves || begins(opcode, &sources) {
                reached.insert(target);
            }
        }
        if reached.len() == before {
            return reached;
        }
    }
}

/// Returns the first word of a statement, after a label or a predicate.
pub(crate) fn opcode(statement: &str) -> Option<&str> {
    statement.split_whitespace().find(|word| !word.starts_with('@') && !word.ends_with(':'))
}

/// Returns the operands of a statement: the target, then the sources.
pub(crate) fn operands(statement: &str) -> impl Iterator<Item = &str> {
    let rest = opcode(statement).and_then(|opcode| statement.split_once(opcode)).map_or("", |(_, rest)| rest);
    rest.split(',').map(str::trim).filter(|operand| !operand.is_empty())
}
