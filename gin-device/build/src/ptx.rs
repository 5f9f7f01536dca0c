// SPDX-License-Identifier: MIT OR Apache-2.0

//! Reads PTX text and adds launch bounds to it.
//!
//! This is not a full parser of PTX. It knows the lines that LLVM and libNVVM print at the top level of a module, one
//! directive per line, and ignores bodies.

use std::collections::BTreeMap;
use std::fmt;

/// Start of the comment line by which a kernel requests launch bounds.
///
/// `#[kernel]` emits it as `global_asm!("// gin.launch_bounds NAME MAX_THREADS MIN_BLOCKS")`.
pub const LAUNCH_BOUNDS_MARKER: &str = "// gin.launch_bounds";

/// Largest number of threads of a block (PTX ISA, `.maxntid`; the same on every architecture so far).
const MAX_THREADS_PER_BLOCK: u32 = 1024;
/// Largest number of blocks resident on one multiprocessor of any architecture so far.
const MAX_BLOCKS_PER_SM: u32 = 32;

/// Name of the variable by which every module of gin-device states its version; other modules have it too.
const SHARED_VARIABLE: &str = "gin_abi_version";

/// Returns a module that links with other modules of this crate in one program: of its symbols, only kernels and the
/// functions that the crate exports by their own names stay visible. [`SHARED_VARIABLE`] becomes weak.
pub(crate) fn for_linking(text: &str) -> String {
    let mut linked = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        let is_mangled = |line: &str| line.contains(" _R") || line.contains(" _ZN");
        match line.strip_prefix(".visible ") {
            Some(rest) if rest.starts_with(".global") && rest.contains(SHARED_VARIABLE) => {
                linked.push_str(".weak ");
                linked.push_str(rest);
            }
            Some(rest) if !rest.starts_with(".entry") && is_mangled(rest) => linked.push_str(rest),
            _ => linked.push_str(line),
        }
    }
    linked
}

/// The largest block of a kernel, and the number of blocks that must fit on one multiprocessor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchBounds {
    /// Largest number of threads per block.
    pub max_threads: u32,
    /// Number of blocks that must be resident on a multiprocessor together, or 0 for no minimum.
    pub min_blocks: u32,
}

/// A kernel in a PTX module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Name that the driver uses.
    pub name: String,
    /// Line of the `.entry`, counted from 1.
    pub line: usize,
    /// Number of parameters.
    pub params: usize,
    /// Launch bounds from `.maxntid` and `.minnctapersm`.
    pub launch_bounds: Option<LaunchBounds>,
}

/// A `.func` in a PTX module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// Name of the function.
    pub name: String,
    /// Line of the `.func`, counted from 1.
    pub line: usize,
    /// True if other modules can link to the function.
    pub visible: bool,
    /// True if the function is only declared, and another module must define it.
    pub external: bool,
}

/// A `.shared` variable at the top level of a PTX module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shared {
    /// Name of the variable.
    pub name: String,
    /// Line of the declaration, counted from 1.
    pub line: usize,
    /// Size in bytes, or `None` for dynamic shared memory, which is sized at launch.
    pub bytes: Option<u64>,
}

/// The top level of a PTX module.
///
/// ```
/// use gin_build::ptx::Module;
///
/// let module = Module::parse(".version 8.6\n.target sm_90\n.visible .entry k(.param .u64 p)\n{\n\tret;\n}\n");
/// assert_eq!((module.version, module.target.as_deref()), (Some((8, 6)), Some("sm_90")));
/// assert_eq!(module.entry("k").map(|kernel| kernel.params), Some(1));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Module {
    /// PTX version, as (major, minor).
    pub version: Option<(u32, u32)>,
    /// Architecture, such as `sm_90`.
    pub target: Option<String>,
    /// Kernels in the order of the text.
    pub entries: Vec<Entry>,
    /// Device functions, declared or defined.
    pub functions: Vec<Function>,
    /// Shared memory, static and dynamic.
    pub shared: Vec<Shared>,
}

impl Module {
    /// Reads the top level of a module.
    pub fn parse(text: &str) -> Module {
        let mut module = Module::default();
        let mut depth = 0_usize;
        let mut lines = text.lines().enumerate();
        while let Some((index, raw)) = lines.next() {
            let line = strip_comment(raw).trim();
            if depth == 0 {
                if let Some(rest) = line.strip_prefix(".version") {
                    module.version = parse_version(rest);
                } else if let Some(rest) = line.strip_prefix(".target") {
                    module.target = rest.split([',', ' ']).find(|word| !word.is_empty()).map(str::to_owned);
                } else if is_header(line) {
                    let mut header = line.to_owned();
                    let mut body = line.contains('{');
                    while !body && !header.ends_with(';') {
                        let Some((_, raw)) = lines.next() else { break };
                        let line = strip_comment(raw).trim();
                        header.push(' ');
                        header.push_str(line);
                        body = line.contains('{');
                    }
                    module.read_header(&header, index + 1);
                    depth = braces(&header, depth);
                    continue;
                } else if has_word(line, ".shared") {
                    module.shared.extend(parse_shared(line, index + 1));
                }
            }
            depth = braces(line, depth);
        }
        module
    }

    /// Returns the kernel of that name.
    pub fn entry(&self, name: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.name == name)
    }

    /// Returns the name of the kernel or function that contains a line, counted from 1.
    pub(crate) fn function_at(&self, line: usize) -> Option<&str> {
        let kernels = self.entries.iter().map(|entry| (entry.line, &entry.name));
        let functions = self.functions.iter().map(|function| (function.line, &function.name));
        let last = kernels.chain(functions).filter(|(start, _)| *start <= line).max();
        last.map(|(_, name)| name.as_str())
    }

    /// Returns the first lines of all kernels and functions.
    pub(crate) fn starts(&self) -> impl Iterator<Item = usize> {
        self.entries.iter().map(|entry| entry.line).chain(self.functions.iter().map(|function| function.line))
    }

    /// Returns the shared variable of that name.
    pub fn shared(&self, name: &str) -> Option<&Shared> {
        self.shared.iter().find(|shared| shared.name == name)
    }

    fn read_header(&mut self, header: &str, line: usize) {
        if let Some((_, rest)) = header.split_once(".entry") {
            let Some((name, rest)) = split_name(rest) else {
                return;
            };
            let params = rest.split('{').next().unwrap_or(rest).matches(".param").count();
            let launch_bounds = directive(header, ".maxntid").map(|max_threads| LaunchBounds {
                max_threads,
                min_blocks: directive(header, ".minnctapersm").unwrap_or(0),
            });
            self.entries.push(Entry { name, line, params, launch_bounds });
        } else if let Some((before, rest)) = header.split_once(".func") {
            // The result comes first, in parentheses: `.func (.param .b64 r) name(...)`.
            let rest = rest.trim_start();
            let rest = if rest.starts_with('(') { rest.split_once(')').map_or("", |(_, rest)| rest) } else { rest };
            let Some((name, _)) = split_name(rest) else {
                return;
            };
            let function = Function {
                name,
                line,
                visible: has_word(before, ".visible") || has_word(before, ".weak"),
                external: has_word(before, ".extern"),
            };
            self.functions.push(function);
        }
    }
}

/// Error: a marker cannot be applied.
#[derive(Clone, PartialEq, Eq)]
pub struct MarkerError {
    /// Line of the marker, counted from 1.
    pub line: usize,
    /// Text of the marker.
    pub text: String,
    /// The fault of the marker.
    pub reason: String,
}

impl fmt::Display for MarkerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: `{}`: {}", self.line, self.text, self.reason)
    }
}

impl std::error::Error for MarkerError {}

/// Applies the launch-bounds markers: adds `.maxntid` and `.minnctapersm` to the kernels that they name.
///
/// The markers stay in the text, and a second pass changes nothing.
///
/// # Errors
/// Fails on a marker that is malformed, exceeds a GPU's limits, names no kernel of this module, or contradicts another.
///
/// ```
/// let text = "// gin.launch_bounds k 128 0\n.visible .entry k()\n{\n\tret;\n}\n";
/// let bounded = gin_build::ptx::apply_launch_bounds(text)?;
/// assert!(bounded.contains(".visible .entry k()\n.maxntid 128, 1, 1\n{"));
/// # Ok::<(), gin_build::ptx::MarkerError>(())
/// ```
pub fn apply_launch_bounds(text: &str) -> Result<String, MarkerError> {
    let mut wanted: BTreeMap<&str, (LaunchBounds, MarkerError)> = BTreeMap::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        let Some(rest) = line.strip_prefix(LAUNCH_BOUNDS_MARKER) else {
            continue;
        };
        let fault = |reason: String| MarkerError { line: index + 1, text: line.to_owned(), reason };
        let (name, bounds) = parse_marker(rest).map_err(fault)?;
        if let Some((earlier, _)) = wanted.get(name).filter(|(earlier, _)| *earlier != bounds) {
            let LaunchBounds { max_threads, min_blocks } = earlier;
            return Err(fault(format!("an earlier marker asks for {max_threads} {min_blocks}")));
        }
        wanted.insert(name, (bounds, fault("the module has no kernel of that name".to_owned())));
    }
    if wanted.is_empty() {
        return Ok(text.to_owned());
    }

    let mut out = String::with_capacity(text.len() + 64 * wanted.len());
    let mut kernel: Option<&str> = None;
    let mut bounded = false;
    for line in text.split_inclusive('\n') {
        let code = strip_comment(line);
        if let Some((_, rest)) = code.split_once(".entry") {
            kernel = split_first(rest);
            bounded = false;
        }
        bounded |= kernel.is_some() && has_word(code, ".maxntid");
        if let (Some(name), true) = (kernel, code.contains('{')) {
            kernel = None;
            if let Some((bounds, _)) = wanted.remove(name).filter(|_| !bounded) {
                let (before, after) = line.split_at(line.find('{').unwrap_or(0));
                out.push_str(before);
                if !before.is_empty() {
                    out.push('\n');
                }
                out.push_str(&directives(bounds));
                out.push_str(after);
                continue;
            }
        }
        out.push_str(line);
    }
    match wanted.into_values().next() {
        Some((_, unknown)) => Err(unknown),
        None => Ok(out),
    }
}

fn directives(bounds: LaunchBounds) -> String {
    let mut lines = format!(".maxntid {}, 1, 1\n", bounds.max_threads);
    if bounds.min_blocks > 0 {
        lines.push_str(&format!(".minnctapersm {}\n", bounds.min_blocks));
    }
    lines
}

fn parse_marker(rest: &str) -> Result<(&str, LaunchBounds), String> {
    let words: Vec<&str> = rest.split_whitespace().collect();
    let [name, max_threads, min_blocks] = words[..] else {
        return Err("it needs a kernel, the threads per block, and the blocks per multiprocessor".to_owned());
    };
    let number = |word: &str| word.parse::<u32>().map_err(|_| format!("`{word}` is not a number"));
    let bounds = LaunchBounds { max_threads: number(max_threads)?, min_blocks: number(min_blocks)? };
    if !(1..=MAX_THREADS_PER_BLOCK).contains(&bounds.max_threads) {
        return Err(format!("a block has 1 to {MAX_THREADS_PER_BLOCK} threads, not {max_threads}"));
    }
    if bounds.min_blocks > MAX_BLOCKS_PER_SM {
        return Err(format!("a multiprocessor holds at most {MAX_BLOCKS_PER_SM} blocks, not {min_blocks}"));
    }
    Ok((name, bounds))
}

pub(crate) fn strip_comment(line: &str) -> &str {
    line.split_once("//").map_or(line, |(code, _)| code)
}

fn is_header(line: &str) -> bool {
    has_word(line, ".entry") || has_word(line, ".func")
}

pub(crate) fn has_word(line: &str, word: &str) -> bool {
    line.split(|c: char| c.is_whitespace() || c == '(').any(|part| part == word)
}

fn braces(line: &str, depth: usize) -> usize {
    let opened = depth + line.matches('{').count();
    opened.saturating_sub(line.matches('}').count())
}

fn split_name(rest: &str) -> Option<(String, &str)> {
    let rest = rest.trim_start();
    let end = rest.find(|c: char| c == '(' || c == '{' || c == ';' || c.is_whitespace()).unwrap_or(rest.len());
    let (name, rest) = rest.split_at(end);
    (!name.is_empty()).then(|| (name.to_owned(), rest))
}

fn split_first(rest: &str) -> Option<&str> {
    rest.trim_start().split(|c: char| c == '(' || c == '{' || c.is_whitespace()).next().filter(|name| !name.is_empty())
}

fn directive(header: &str, name: &str) -> Option<u32> {
    let (_, rest) = header.split_once(name)?;
    rest.trim_start().split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

fn parse_version(rest: &str) -> Option<(u32, u32)> {
    let (major, minor) = rest.trim().split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

fn parse_shared(line: &str, number: usize) -> Option<Shared> {
    let declaration = line.trim_end_matches(';').trim_end();
    let (before, length) = match declaration.split_once('[') {
        Some((before, rest)) => (before, Some(rest.split_once(']')?.0.trim())),
        None => (declaration, None),
    };
    let mut words = before.split_whitespace();
    let name = words.next_back()?.to_owned();
    let element = words.next_back().and_then(element_bytes)?;
    let bytes = match length {
        Some("") => None,
        Some(length) => Some(length.parse::<u64>().ok()?.checked_mul(element)?),
        None => Some(element),
    };
    Some(Shared { name, line: number, bytes })
}

/// Returns the size in bytes of a PTX type, such as `.b8` or `.u64`.
fn element_bytes(word: &str) -> Option<u64> {
    let bits: u64 = word.trim_start_matches(|c: char| !c.is_ascii_digit()).parse().ok()?;
    Some(bits / 8)
}

#[cfg(test)]
#[path = "ptx_tests.rs"]
mod tests;
