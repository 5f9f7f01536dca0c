// SPDX-License-Identifier: MIT OR Apache-2.0

//! Checks PTX text for constructs that device code must not contain.

use std::fmt;

use crate::arch::MAX_PTX_VERSION;
use crate::lines::Lines;
use crate::origins::{Origins, opcode, operands};
use crate::ptx::{Module, strip_comment};

/// Limits of a module.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Largest size of the PTX text in bytes.
    pub max_bytes: usize,
    /// Device functions that may remain because other modules link to them.
    pub exported: Vec<String>,
}

impl Default for Limits {
    /// Returns 256 KiB and no exported function.
    fn default() -> Self {
        Limits { max_bytes: 256 << 10, exported: Vec::new() }
    }
}

impl Limits {
    /// Sets the largest size of the text in bytes.
    #[must_use]
    pub fn max_bytes(mut self, bytes: usize) -> Self {
        self.max_bytes = bytes;
        self
    }

    /// Allows a device function that other modules link to.
    #[must_use]
    pub fn export(mut self, name: impl Into<String>) -> Self {
        self.exported.push(name.into());
        self
    }
}

/// A rule that device code follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Rule {
    /// No formatting code of `core::fmt`.
    Formatting,
    /// No panic machinery and no panic messages.
    Panic,
    /// No call: everything is inlined into the kernels.
    Call,
    /// No device function other than the exported ones.
    Function,
    /// No load through the read-only cache, which never sees a peer's writes. The constant loads of
    /// `gin_device::sys::data` are allowed.
    NonCoherentLoad,
    /// No read-modify-write without an ordering and a scope. `core::sync::atomic` compiles to such.
    UnscopedAtomic,
    /// No access by a `.global` instruction to shared memory. It reads or writes elsewhere, or ends the kernel.
    GlobalAccessToShared,
    /// No instruction of bulk copies for an architecture before sm_90, which lacks them.
    BulkCopy,
    /// No PTX version that the drivers in use refuse.
    Version,
    /// No more text than the limit.
    Size,
}

impl Rule {
    /// Returns the advice to the author of a kernel that breaks the rule; `None` if the kernel computes the same
    /// results in spite of it.
    pub(crate) fn advice(self) -> Option<&'static str> {
        match self {
            Rule::Formatting => {
                Some("it takes much stack and code, and nothing prints its text: pass numbers to the host")
            }
            Rule::Panic => Some("nothing prints its text: report a fault, or end the grid by a panic without one"),
            Rule::NonCoherentLoad => Some(
                "a reference promises that nobody else writes: use a `Window` or a raw pointer, or, for memory that \
                     nobody writes, `gin_device::sys::data::load_constant_pair`",
            ),
            Rule::UnscopedAtomic => {
                Some("LLVM drops its ordering: use signals, barriers, or the words of gin_device::sys")
            }
            Rule::GlobalAccessToShared => {
                Some("it does not reach the block's copy: a `Window` or `GlobalWord` must be in the memory of a device")
            }
            Rule::BulkCopy => Some(
                "put it behind `if gin_device::sys::bulk::SUPPORTED`, or leave the architecture out of `GIN_ARCHS` or \
                 `KernelBuilder::archs`",
            ),
            Rule::Call | Rule::Function | Rule::Version | Rule::Size => None,
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Rule::Formatting => "formatting code (core::fmt)",
            Rule::Panic => "panic machinery",
            Rule::Call => "a call that was not inlined",
            Rule::Function => "a device function that is not exported",
            Rule::NonCoherentLoad => "a load through the read-only cache",
            Rule::UnscopedAtomic => "an atomic without ordering and scope (core::sync::atomic)",
            Rule::GlobalAccessToShared => "a .global access to shared memory",
            Rule::BulkCopy => "an instruction of bulk copies, which need sm_90",
            Rule::Version => "a PTX version that drivers may refuse",
            Rule::Size => "more text than allowed",
        })
    }
}

/// A line that breaks a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The rule.
    pub rule: Rule,
    /// Number of the line, counted from 1.
    pub line: usize,
    /// Text of the line, or the string that its bytes encode.
    pub text: String,
    /// The kernel or function that contains the line.
    pub function: Option<String>,
    /// Source file and line of the instruction, or of the function that contains it, as `src/lib.rs:7`. Known only for
    /// code of the kernel crate itself, and only in a build.
    pub place: Option<String>,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}: {}", self.line, self.rule, self.text)
    }
}

/// Parts of the names of functions that kernels may call: in the modules `outlined` of `gin_device`, and in those of
/// other crates for a back end of `gin_device`. Their code is rare or long.
const OUTLINED: [&str; 2] = ["10gin_device", "8outlined"];

/// Returns whether a function's name, or a call of it, is one that kernels may call.
fn is_outlined(text: &str) -> bool {
    OUTLINED.iter().all(|part| text.contains(part))
}

/// The names of constant loads of `gin_device::sys::data`, which they have in a comment behind the instruction. Their
/// caller promises that nobody writes the memory.
const CONSTANT_LOADS: [&str; 2] = ["load_constant_u32", "load_constant_pair"];

/// Returns whether a line with its comment is a constant load.
fn is_constant_load(line: &str) -> bool {
    line.split_once("//").is_some_and(|(_, comment)| CONSTANT_LOADS.contains(&comment.trim()))
}

/// Words that only panic messages and their source locations contain.
const PANIC_WORDS: [&str; 8] =
    ["attempt to ", "out of bounds", "out of range", "called `", "panicked", "assertion ", "unreachable code", ".rs"];

/// Finds every line of a module that breaks a rule, in the order of the text.
///
/// ```
/// use gin_build::{Limits, Rule, check};
///
/// let text = ".version 8.6\n.target sm_90\n.visible .entry k()\n{\n\tatom.global.add.u64 %rd1, [%rd0], 1;\n}\n";
/// let findings = check(text, &Limits::default());
/// assert_eq!((findings[0].rule, findings[0].line), (Rule::UnscopedAtomic, 5));
/// ```
pub fn check(text: &str, limits: &Limits) -> Vec<Finding> {
    check_with(text, limits, &Lines::default())
}

/// Does the same as [`check`], with the places of the lines.
pub(crate) fn check_with(text: &str, limits: &Limits, lines: &Lines) -> Vec<Finding> {
    let module = Module::parse(text);
    let mut findings = Vec::new();
    let mut add = |rule, line, said: &str| {
        // A constant belongs to the code that first uses it.
        let at = if is_constant(text, line) { first_use(text, line) } else { Some(line) };
        let function = at.and_then(|at| module.function_at(at)).map(str::to_owned);
        let place = at.and_then(|at| lines.place(at));
        findings.push(Finding { rule, line, text: said.trim().to_owned(), function, place });
    };

    if module.version.is_none_or(|version| version > MAX_PTX_VERSION) {
        let line = text.lines().position(|line| line.starts_with(".version")).map_or(1, |index| index + 1);
        add(Rule::Version, line, text.lines().nth(line - 1).unwrap_or_default());
    }
    for function in &module.functions {
        if is_outlined(&function.name) && !function.external {
            continue;
        }
        if function.external || !limits.exported.contains(&function.name) {
            add(Rule::Function, function.line, &function.name);
        }
    }
    let origins = Origins::of(text, &module);
    let has_bulk_copies = module.target.as_deref().is_none_or(has_bulk_copies);
    let mut bytes = 0;
    for (index, raw) in text.split_inclusive('\n').enumerate() {
        let number = index + 1;
        let line = strip_comment(raw);
        if bytes <= limits.max_bytes && bytes + raw.len() > limits.max_bytes {
            add(Rule::Size, number, &format!("{} bytes of {} allowed", text.len(), limits.max_bytes));
        }
        bytes += raw.len();
        if line.contains("core3fmt") {
            add(Rule::Formatting, number, line);
        } else if line.contains("panicking") || line.contains("panic_fmt") {
            add(Rule::Panic, number, line);
        } else if let Some(message) = spelled_by(line).filter(|text| PANIC_WORDS.iter().any(|word| text.contains(word)))
        {
            add(Rule::Panic, number, &message);
        }
        for statement in line.split([';', '{', '}']) {
            let Some(opcode) = opcode(statement) else {
                continue;
            };
            let address = || operands(statement).find_map(|operand| operand.strip_prefix('['));
            let is_global = opcode.split('.').any(|part| part == "global");
            if opcode == "call" || opcode.starts_with("call.") {
                if is_outlined(line) {
                    continue;
                }
                add(Rule::Call, number, line);
            } else if opcode.starts_with("ld.global") && opcode.split('.').any(|part| part == "nc") {
                // Nobody writes to a constant of the module.
                let is_constant = || address().is_some_and(|address| origins.is_constant(number, address));
                if !is_constant_load(raw) && !is_constant() {
                    add(Rule::NonCoherentLoad, number, line);
                }
            } else if !has_bulk_copies && is_bulk_copy(opcode) {
                add(Rule::BulkCopy, number, line);
            } else if is_unscoped_atomic(opcode) {
                add(Rule::UnscopedAtomic, number, line);
            }
            // `cp` copies between the two kinds of memory.
            let is_copy = opcode.starts_with("cp.") || opcode.contains(".shared");
            if is_global && !is_copy && address().is_some_and(|address| origins.is_shared(number, address)) {
                add(Rule::GlobalAccessToShared, number, line);
            }
        }
    }
    findings.sort_by_key(|finding| (finding.line, finding.rule));
    findings
}

/// Returns true if this line, counted from 1, defines a variable of the module with its value.
fn is_constant(text: &str, line: usize) -> bool {
    let line = text.lines().nth(line - 1).unwrap_or_default();
    line.starts_with('.') && line.contains("] = {")
}

/// Returns the first line of code that names the variable which this line defines.
fn first_use(text: &str, line: usize) -> Option<usize> {
    let (declaration, _) = text.lines().nth(line - 1)?.split_once('[')?;
    let name = declaration.split_whitespace().next_back()?;
    let is_use = |code: &str| {
        let is_part = |c: char| c.is_ascii_alphanumeric() || "_$".contains(c);
        code.starts_with(char::is_whitespace) && code.split(|c| !is_part(c)).any(|word| word == name)
    };
    text.lines().skip(line).position(is_use).map(|after| line + after + 1)
}

/// Returns whether an architecture, such as `sm_90a`, has bulk copies.
fn has_bulk_copies(target: &str) -> bool {
    let digits = target.trim_start_matches("sm_").trim_end_matches(|c: char| c.is_ascii_alphabetic());
    digits.parse::<u32>().is_ok_and(|number| number >= 90)
}

/// Returns true for bulk copies, their waits and fences, and the parts of an mbarrier that count bytes. sm_80 has other
/// operations of an mbarrier.
fn is_bulk_copy(opcode: &str) -> bool {
    ["cp.async.bulk", "cp.reduce.async.bulk", "fence.proxy.async", "fence.mbarrier_init", "mbarrier.try_wait"]
        .iter()
        .any(|start| opcode.starts_with(start))
        || opcode.starts_with("mbarrier.") && opcode.contains("_tx")
}

/// Returns true for an atomic without ordering or scope. Shared memory of one block needs neither: no other agent can
/// see it.
fn is_unscoped_atomic(opcode: &str) -> bool {
    let mut parts = opcode.split('.');
    let kind = parts.next();
    let parts: Vec<&str> = parts.collect();
    let any = |words: &[&str]| parts.iter().any(|part| words.contains(part));
    matches!(kind, Some("atom" | "red"))
        && !any(&["async", "shared", "shared::cta"])
        && !(any(&["relaxed", "acquire", "release", "acq_rel"]) && any(&["cta", "cluster", "gpu", "sys"]))
}

/// Returns the text of a byte array with an initialiser, as LLVM prints strings: `.b8 name[3] = {102, 109, 116};`.
fn spelled_by(line: &str) -> Option<String> {
    let (declaration, values) = line.split_once('{')?;
    if !declaration.contains(".b8") || !declaration.contains('=') {
        return None;
    }
    let text = values
        .split(|c: char| !c.is_ascii_alphanumeric())
        .filter_map(|word| word.parse::<u8>().ok())
        .map(|byte| if byte.is_ascii_graphic() || byte == b' ' { char::from(byte) } else { '.' })
        .collect();
    Some(text)
}

#[cfg(test)]
#[path = "check_tests.rs"]
mod tests;
