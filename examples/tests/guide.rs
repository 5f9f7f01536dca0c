// SPDX-License-Identifier: MIT OR Apache-2.0
//! The guide shows only code that is compiled and run, and has every fault.

use gin_host::comm::FaultKind;
use std::fs;
use std::path::{Path, PathBuf};

/// Folders whose files are compiled and run: by the tests of the examples, and by `tests/documented_crate.rs`.
const COMPILED: [&str; 3] = ["examples/src", "examples/kernels/src", "src/new/template"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

/// Returns the chapters: name of the file, and text.
fn chapters() -> Vec<(String, String)> {
    let folder = root().join("docs/guide/src");
    let mut chapters: Vec<_> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read_to_string(&path).unwrap()))
        .collect();
    chapters.sort();
    assert!(chapters.len() > 8, "{} chapters", chapters.len());
    chapters
}

/// Returns language and text of each block of code.
fn blocks(text: &str) -> Vec<(&str, &str)> {
    let parts: Vec<&str> = text.split("```").collect();
    assert_eq!(parts.len() % 2, 1, "a block of code does not end");
    parts.iter().skip(1).step_by(2).map(|block| block.split_once('\n').expect("a block has lines")).collect()
}

/// Returns the text of a file, or of the part between its marks of an anchor: `path` or `path:anchor`.
fn source(chapter: &str, named: &str) -> String {
    let (path, anchor) = named.split_once(':').map_or((named, None), |(path, anchor)| (path, Some(anchor)));
    let file = root().join(path);
    let file = file.canonicalize().unwrap_or_else(|error| panic!("{chapter}: {named}: {error}"));
    assert!(COMPILED.iter().any(|folder| file.starts_with(root().join(folder))), "{chapter}: {named}: not compiled");
    let text = fs::read_to_string(&file).unwrap();
    let Some(anchor) = anchor else { return text };
    let [begin, end] = ["", "_END"].map(|end| format!("// ANCHOR{end}: {anchor}\n"));
    let part = text.split_once(&begin).and_then(|(_, rest)| rest.split_once(&end));
    part.unwrap_or_else(|| panic!("{chapter}: {named}: no such marks")).0.to_owned()
}

#[test]
fn every_listing_in_rust_is_a_file_that_is_compiled_and_run() {
    let mut listings = 0;
    for (chapter, text) in chapters() {
        // The line before a listing names its file, so that the guide can be read without a tool.
        let named: Vec<&str> = text
            .match_indices("\n```rust")
            .map(|(at, _)| {
                let line = text[..at].lines().last().unwrap_or_default();
                let name = line.strip_prefix("<!-- ").and_then(|rest| rest.strip_suffix(" -->"));
                name.unwrap_or_else(|| panic!("{chapter}: name the file of the listing behind {line:?}"))
            })
            .collect();
        let listed: Vec<_> = blocks(&text).into_iter().filter(|(language, _)| language.starts_with("rust")).collect();
        assert_eq!(named.len(), listed.len(), "{chapter}");
        for (named, (_, code)) in named.into_iter().zip(listed) {
            assert_eq!(code, source(&chapter, named), "{chapter}: copy {named}");
            listings += 1;
        }
    }
    assert!(listings >= 15, "{listings} listings");
}

#[test]
fn every_chapter_is_in_the_summary_and_every_entry_exists() {
    let chapters = chapters();
    let summary = &chapters.iter().find(|(name, _)| name == "SUMMARY.md").unwrap().1;
    let mut linked: Vec<&str> =
        summary.split("](").skip(1).map(|rest| rest.split_once(')').expect("a link ends").0).collect();
    linked.sort_unstable();
    let names: Vec<&str> =
        chapters.iter().map(|(name, _)| name.as_str()).filter(|name| *name != "SUMMARY.md").collect();
    assert_eq!(linked, names);
}

#[test]
fn every_fault_is_in_the_guide_with_its_text_and_a_cure() {
    let chapters = chapters();
    let text = &chapters.iter().find(|(name, _)| name == "faults.md").unwrap().1;
    let (_, table) = text.split_once("| fault | its text |").expect("a table of faults");
    let table = table.split_once("\n\n").map_or(table, |(table, _)| table);
    let rows: Vec<Vec<&str>> = table
        .lines()
        .filter(|line| line.starts_with("| `"))
        .map(|line| line.split('|').map(str::trim).filter(|cell| !cell.is_empty()).collect())
        .collect();
    let named: Vec<String> = rows.iter().map(|row| row[0].trim_matches('`').to_owned()).collect();
    let kinds: Vec<String> = FaultKind::ALL.iter().map(|kind| format!("{kind:?}")).collect();
    for kind in &kinds {
        assert_eq!(named.iter().filter(|name| *name == kind).count(), 1, "faults.md needs one row for `{kind}`");
    }
    for (row, name) in rows.iter().zip(&named) {
        let kind = FaultKind::ALL.iter().find(|kind| format!("{kind:?}") == *name);
        let kind = kind.unwrap_or_else(|| panic!("faults.md has a row for `{name}`, which is no fault"));
        assert_eq!(row[1].replace('`', ""), kind.to_string().replace('`', ""), "the text of `{name}` in faults.md");
        assert!(row.len() == 4 && row[2].len() > 10 && row[3].len() > 10, "faults.md: cause and cure of `{name}`");
    }
}
