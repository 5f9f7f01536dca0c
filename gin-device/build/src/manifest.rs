// SPDX-License-Identifier: MIT OR Apache-2.0

//! The names in a kernel crate's `Cargo.toml`.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::BuildError;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Manifest {
    /// Absolute path of the `Cargo.toml`.
    pub(crate) path: PathBuf,
    pub(crate) dir: PathBuf,
    pub(crate) package: String,
    pub(crate) lib_name: String,
}

impl Manifest {
    pub(crate) fn read(dir: &Path) -> Result<Manifest, BuildError> {
        let expected = dir.join("Cargo.toml");
        let no_manifest = || BuildError::NoManifest { path: expected.clone() };
        let path = fs::canonicalize(&expected).map_err(|_| no_manifest())?;
        let text = fs::read_to_string(&path).map_err(|_| no_manifest())?;
        let dir = path.parent().ok_or_else(no_manifest)?.to_owned();
        let package = value(&text, "package", "name").ok_or_else(no_manifest)?;
        let lib_name = value(&text, "lib", "name").unwrap_or_else(|| package.replace('-', "_"));
        Ok(Manifest { path, dir, package, lib_name })
    }

    /// Returns the lock file of the workspace, if there is one. A build creates it if there is none yet.
    pub(crate) fn lock(&self) -> Option<PathBuf> {
        self.dir.ancestors().map(|dir| dir.join("Cargo.lock")).find(|lock| lock.is_file())
    }
}

/// Returns the string that `key` has in a section. Keys must be on separate lines, as cargo writes them.
fn value(text: &str, section: &str, key: &str) -> Option<String> {
    let mut inside = false;
    for line in text.lines().map(str::trim) {
        if let Some(header) = line.strip_prefix('[') {
            inside = header.split(']').next().map(str::trim) == Some(section);
        } else if let (true, Some((left, right))) = (inside, line.split_once('='))
            && left.trim() == key
        {
            let quoted = right.trim();
            let quote = quoted.chars().next().filter(|c| matches!(c, '"' | '\''))?;
            return quoted[1..].split(quote).next().map(str::to_owned);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
[package]
# name = \"comment\"
name = \"my-kernels\"
version.workspace = true
[lib]
path = 'code/lib.rs'
[dependencies]
name = \"a-crate-called-name\"
";

    #[test]
    fn names_are_read_from_their_own_section() {
        assert_eq!(value(TEXT, "package", "name").as_deref(), Some("my-kernels"));
        assert_eq!(value(TEXT, "lib", "name"), None);
        assert_eq!(value(TEXT, "lib", "path").as_deref(), Some("code/lib.rs"));
    }

    #[test]
    fn a_folder_without_a_manifest_is_refused_with_the_path_that_was_expected() {
        let dir = tempfile::tempdir().unwrap();
        let error = Manifest::read(dir.path()).unwrap_err();
        assert!(error.to_string().ends_with("Cargo.toml"), "{error}");
    }

    #[test]
    fn the_lock_file_of_an_enclosing_workspace_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(dir.path()).unwrap();
        fs::create_dir(root.join("inner")).unwrap();
        fs::write(root.join("Cargo.lock"), "").unwrap();
        fs::write(root.join("inner/Cargo.toml"), TEXT).unwrap();
        let manifest = Manifest::read(&root.join("inner")).unwrap();
        assert_eq!(manifest.lock(), Some(root.join("Cargo.lock")));
        assert_eq!((manifest.package.as_str(), manifest.lib_name.as_str()), ("my-kernels", "my_kernels"));
    }
}
