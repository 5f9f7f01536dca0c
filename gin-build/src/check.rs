// SPDX-License-Identifier: MIT OR Apache-2.0

//! Checks PTX text for constructs that device code must not contain.

use std::fmt;

use crate::arch::MAX_PTX_VERSION;
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
    /// No load through the read-only cache, which never sees a peer's writes.
    NonCoherentLoad,
    /// No read-modify-write without an ordering and a scope. `core::sync::atomic` compiles to such.
    UnscopedAtomic,
    /// No PTX version that the drivers in use refuse.
    Version,
    /// No more text than the limit.
    Size,
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
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}: {}", self.line, self.rule, self.text)
    }
}

/// Parts of the names of functions that kernels may call, in the modules `outlined` of `gin_device`: their code is rare
/// or long.
const OUTLINED: [&str; 2] = ["10gin_device", "8outlined"];

/// Returns whether a function's name, or a call of it, is one that kernels may call.
fn is_outlined(text: &str) -> bool {
    OUTLINED.iter().all(|part| text.contains(part))
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
    let mut findings = Vec::new();
    let mut add = |rule, line, text: &str| findings.push(Finding { rule, line, text: text.trim().to_owned() });

    let module = Module::parse(text);
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
            if opcode == "call" || opcode.starts_with("call.") {
                if is_outlined(line) {
                    continue;
                }
                add(Rule::Call, number, line);
            } else if opcode.starts_with("ld.global") && opcode.split('.').any(|part| part == "nc") {
                add(Rule::NonCoherentLoad, number, line);
            } else if is_unscoped_atomic(opcode) {
                add(Rule::UnscopedAtomic, number, line);
            }
        }
    }
    findings.sort_by_key(|finding| (finding.line, finding.rule));
    findings
}

/// Returns the first word of a statement, after a label or a predicate.
fn opcode(statement: &str) -> Option<&str> {
    statement.split_whitespace().find(|word| !word.starts_with('@') && !word.ends_with(':'))
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
