// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds every place in the sources whose order matters: word operations and fences stronger than relaxed, and the
//! halves of `ordered!`.

use gin_device::sys::loom::Mutation;
use std::path::Path;

/// A place that a mutation changes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Site {
    /// File, function and operation, with a number if the function has several. Changes in the lines above do not
    /// change it.
    pub key: String,
    pub mutation: Mutation,
}

/// Returns all places below `root`, the folder of a crate's sources, except in `sys`, which defines the operations.
/// `folder` is the name of `root` in the workspace.
pub fn scan(root: &Path, folder: &str) -> Vec<Site> {
    let mut files = Vec::new();
    list(root, &mut files);
    files.sort();
    let mut sites = Vec::new();
    for path in files {
        let name =
            path.strip_prefix(root).expect("listed below root").to_str().expect("an ASCII name").replace('\\', "/");
        if !name.starts_with("sys/") {
            let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            sites.extend(scan_file(folder, &name, &text));
        }
    }
    // The name of an `ordered!` alone identifies its mutation.
    for (index, site) in sites.iter().enumerate() {
        let same = sites[..index].iter().find(|other| other.mutation == site.mutation);
        assert!(same.is_none(), "two places of one name: {site:?} and {same:?}");
    }
    sites
}

fn list(folder: &Path, files: &mut Vec<std::path::PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
        let path = entry.expect("an entry of a folder").path();
        if path.is_dir() {
            list(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

/// Returns the places in one file. `name` is relative to `folder`.
pub fn scan_file(folder: &str, name: &str, text: &str) -> Vec<Site> {
    let mut function = String::new();
    let mut found: Vec<(String, Mutation)> = Vec::new();
    let mut in_ordered = false;
    for (number, line) in (1..).zip(text.lines()) {
        if line.trim() == "#[cfg(test)]" {
            break;
        }
        let code = line.split("//").next().unwrap_or_default();
        if let Some(rest) = code.split_once("fn ").map(|(_, rest)| rest) {
            function = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        }
        let operations: Vec<_> =
            code.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| strong(word)).collect();
        // The line identifies the place of a mutation.
        assert!(operations.len() <= 1, "{name}:{number}: several ordered operations on one line: {operations:?}");
        for operation in operations {
            let mutation = Mutation::Weaken { file: format!("{folder}/{name}"), line: number };
            found.push((format!("{name} {function}: {operation}"), mutation));
        }
        in_ordered |= code.contains("ordered! {");
        if let Some(order) = in_ordered.then(|| code.split('"').nth(1)).flatten() {
            found.push((format!("{name} {function}: {order:?}"), Mutation::Swap(order.to_owned())));
            in_ordered = false;
        }
    }
    let mut sites: Vec<Site> = Vec::new();
    for (index, (key, mutation)) in found.iter().enumerate() {
        let before = found[..index].iter().filter(|(other, _)| other == key).count();
        let several = found.iter().filter(|(other, _)| other == key).count() > 1;
        let key = if several { format!("{key} #{}", before + 1) } else { key.clone() };
        sites.push(Site { key, mutation: mutation.clone() });
    }
    sites
}

/// Returns whether this is the name of an operation of `sys` that is stronger than relaxed.
fn strong(word: &str) -> bool {
    ["acquire", "release", "acq_rel", "sc"].iter().any(|order| {
        ["cta", "gpu", "sys"].iter().any(|scope| {
            word.strip_suffix(scope)
                .and_then(|word| word.strip_suffix('_'))
                .is_some_and(|word| word.strip_suffix(order).is_some_and(|word| word.len() > 1 && word.ends_with('_')))
        })
    })
}
