// SPDX-License-Identifier: MIT OR Apache-2.0

//! Source lines of PTX instructions, from `.file` and `.loc` directives.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::ptx::has_word;

/// The source lines of a module whose directives were taken out.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    /// By the number of a line of PTX: the place in force from there on. `None` ends a function.
    places: BTreeMap<usize, Option<(u32, u32)>>,
    /// Files by their number.
    files: BTreeMap<u32, PathBuf>,
}

impl Lines {
    /// Takes the directives out of a text, and keeps the places in files below `root`. Takes out the comments that LLVM
    /// writes around inline assembly, too: a tenth of the text of a kernel.
    ///
    /// An instruction of another file, such as one of `core`, gets the place of the function that contains it: the
    /// directives do not say from where a function was inlined.
    pub(crate) fn take(text: &str, root: &Path) -> (String, Lines) {
        let files = text.lines().filter_map(parse_file).filter(|(_, path)| path.starts_with(root)).collect();
        let mut lines = Lines { places: BTreeMap::new(), files };
        let mut rest = String::with_capacity(text.len());
        let (mut number, mut of_function) = (1, None);
        for line in text.split_inclusive('\n') {
            if has_word(line, ".entry") || has_word(line, ".func") {
                of_function = None;
                lines.places.insert(number, None);
            }
            if let Some(place) = parse_loc(line) {
                // The first directive of a function is that of the function.
                let place = Some(place).filter(|(file, line)| *line > 0 && lines.files.contains_key(file));
                of_function = of_function.or(place);
                lines.places.insert(number, place.or(of_function));
            } else if !is_directive(line) && !is_mark(line) {
                number += 1;
                rest.push_str(line);
            }
        }
        (rest, lines)
    }

    /// Returns the place of a line of PTX, as `src/lib.rs:7`. Paths in the current folder are relative to it.
    pub(crate) fn place(&self, line: usize) -> Option<String> {
        let (_, place) = self.places.range(..=line).next_back()?;
        let (file, line) = (*place)?;
        let path = self.files.get(&file)?;
        let here = std::env::current_dir().unwrap_or_default();
        Some(format!("{}:{line}", path.strip_prefix(here).unwrap_or(path).display()))
    }
}

/// Returns true if a text has the lines of its sources.
pub(crate) fn are_in(text: &str) -> bool {
    text.lines().any(|line| parse_loc(line).is_some())
}

/// Returns true for lines that LLVM prints only with debug information.
fn is_directive(line: &str) -> bool {
    let line = line.trim();
    let label = ["$L__tmp", "$L__func_begin", "$L__func_end"].iter().any(|label| line.starts_with(label));
    (label && line.ends_with(':')) || line.starts_with(".section") || parse_file(line).is_some()
}

/// Returns true for the comments around inline assembly.
fn is_mark(line: &str) -> bool {
    matches!(line.trim(), "// begin inline asm" | "// end inline asm")
}

/// Reads `.loc FILE LINE COLUMN`.
fn parse_loc(line: &str) -> Option<(u32, u32)> {
    let mut words = line.trim().strip_prefix(".loc")?.split_whitespace();
    Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?))
}

/// Reads `.file NUMBER "PATH"`.
fn parse_file(line: &str) -> Option<(u32, PathBuf)> {
    let (number, path) = line.trim().strip_prefix(".file")?.trim().split_once(char::is_whitespace)?;
    Some((number.parse().ok()?, PathBuf::from(path.trim().trim_matches('"'))))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
.version 8.6
.visible .entry k()
{
$L__func_begin0:
\t.loc\t1 11 0
\tmov.u32 %r1, 0;
$L__tmp1:
\t.loc\t2 3937 24
\t// begin inline asm
\tatom.global.add.u32 %r1, [%rd2], 1;
\t// end inline asm
\t.loc\t1 14 2
\tret;
$L__func_end0:
}
.visible .entry other()
{
\tret;
}
\t.file\t1 \"/k/src/lib.rs\"
\t.file\t2 \"/rust/core/atomic.rs\"
\t.section\t.debug_macinfo\t{\t}
";

    #[test]
    fn directives_are_taken_out_and_give_the_lines_of_instructions_or_of_their_function() {
        let (text, lines) = Lines::take(TEXT, Path::new("/k"));
        assert!(are_in(TEXT) && !are_in(&text));
        assert!([".loc", "$L__", ".file", " asm"].iter().all(|gone| !text.contains(gone)), "{text}");
        let place = |part: &str| {
            let line = text.lines().position(|line| line.contains(part)).unwrap() + 1;
            lines.place(line)
        };
        assert_eq!(place("mov.u32").as_deref(), Some("/k/src/lib.rs:11"));
        assert_eq!(place("atom.global").as_deref(), Some("/k/src/lib.rs:11"), "that of the function");
        assert_eq!(place("ret;").as_deref(), Some("/k/src/lib.rs:14"));
        assert_eq!(place("other"), None);
        assert_eq!(place(".version"), None);
    }
}
