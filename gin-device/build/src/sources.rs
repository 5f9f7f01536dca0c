// SPDX-License-Identifier: MIT OR Apache-2.0

//! The files that a build depends on, and writing of files such that no reader sees half of one.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::BuildError;

/// Returns the files in a dep-info file of cargo, and the manifest of each package among them.
///
/// Cargo lists the sources of the crate and of its path dependencies. Sources from a registry do not change.
pub(crate) fn of_dep_info(path: &Path) -> Result<Vec<PathBuf>, BuildError> {
    let text = fs::read_to_string(path).map_err(BuildError::io("read", path))?;
    let sources = parse_dep_info(&text);
    let mut manifests: Vec<PathBuf> = sources.iter().filter_map(|source| manifest_of(source)).collect();
    manifests.sort();
    manifests.dedup();
    Ok(sources.into_iter().chain(manifests).collect())
}

fn manifest_of(source: &Path) -> Option<PathBuf> {
    source.ancestors().skip(1).map(|dir| dir.join("Cargo.toml")).find(|manifest| manifest.is_file())
}

/// Reads the first rule of a makefile, in which a space in a name is written `\ `.
fn parse_dep_info(text: &str) -> Vec<PathBuf> {
    let Some((_, names)) = text.lines().next().and_then(|rule| rule.split_once(": ")) else {
        return Vec::new();
    };
    let mut paths = Vec::new();
    let mut name = String::new();
    let mut chars = names.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\\' if chars.peek() == Some(&' ') => {
                name.push(' ');
                chars.next();
            }
            ' ' => paths.push(PathBuf::from(std::mem::take(&mut name))),
            _ => name.push(c),
        }
    }
    paths.push(PathBuf::from(name));
    paths.retain(|path| !path.as_os_str().is_empty());
    paths
}

/// Makes cargo forget the compilation that wrote the file `written`, so that the next build compiles the crate again.
/// Other packages of this name, which other projects may have in the same folder, stay compiled.
pub(crate) fn forget(release: &Path, written: &Path) -> Result<(), BuildError> {
    let (deps, fingerprints) = (release.join("deps"), release.join(".fingerprint"));
    let entries = |dir: &Path| Ok(fs::read_dir(dir).map_err(BuildError::io("read", dir))?.flatten());
    // The compiler lists each file that it writes as a rule, with a backslash before each space.
    let rule = format!("{}: ", written.display().to_string().replace(' ', "\\ "));
    for list in entries(&deps)?.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|end| end == "d"))
    {
        let text = fs::read_to_string(&list).map_err(BuildError::io("read", &list))?;
        // Cargo appends a dash and a hash of the compilation to the names of its files.
        let hash = list.file_stem().and_then(|stem| Some(stem.to_str()?.rsplit_once('-')?.1.to_owned()));
        let Some(hash) = hash.filter(|_| text.lines().any(|line| line.starts_with(&rule))) else { continue };
        for entry in entries(&fingerprints)? {
            if entry.file_name().to_str().and_then(|name| name.rsplit_once('-')).is_some_and(|(_, other)| other == hash)
            {
                fs::remove_dir_all(entry.path()).map_err(BuildError::io("remove", &entry.path()))?;
            }
        }
    }
    Ok(())
}

/// Writes a file in one step. A file that has this text already keeps its modification time.
pub(crate) fn replace(path: &Path, text: &str) -> Result<(), BuildError> {
    if fs::read_to_string(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    let mut unfinished = path.as_os_str().to_owned();
    unfinished.push(format!(".{}", std::process::id()));
    let unfinished = PathBuf::from(unfinished);
    fs::write(&unfinished, text).map_err(BuildError::io("write", &unfinished))?;
    fs::rename(&unfinished, path).map_err(BuildError::io("write", path))
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn every_source_of_a_rule_is_listed_also_one_with_a_space_in_its_name() {
        let paths = parse_dep_info("/t/libk.a: /a/src/lib.rs /b\\ c/lib.rs /d.rs\n\n/a/src/lib.rs:\n");
        assert_eq!(paths, [Path::new("/a/src/lib.rs"), Path::new("/b c/lib.rs"), Path::new("/d.rs")]);
    }

    #[test]
    fn a_file_that_is_replaced_by_its_own_text_keeps_its_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        replace(&path, "one").unwrap();
        let old = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1);
        fs::File::options().append(true).open(&path).unwrap().set_modified(old).unwrap();
        replace(&path, "one").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), old);
        replace(&path, "two").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "two");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing unfinished is left");
    }

    #[test]
    fn only_the_compilation_that_wrote_a_file_is_forgotten() {
        let release = tempfile::tempdir().unwrap();
        let path = |name: &str| release.path().join(name);
        fs::create_dir(path("deps")).unwrap();
        let spaced = path("my kernels-1.s").display().to_string().replace(' ', "\\ ");
        let other = path("kernels-2.s").display().to_string();
        for (hash, written) in [("aa", spaced), ("bb", other)] {
            fs::create_dir_all(path(&format!(".fingerprint/my-kernels-{hash}"))).unwrap();
            let rules = format!("/deps/my_kernels-{hash}.d: src/lib.rs\n\n{written}: src/lib.rs\n\nsrc/lib.rs:\n");
            fs::write(path(&format!("deps/my_kernels-{hash}.d")), rules).unwrap();
        }
        forget(release.path(), &path("my kernels-1.s")).unwrap();
        assert!(!path(".fingerprint/my-kernels-aa").exists());
        assert!(path(".fingerprint/my-kernels-bb").exists(), "a package of this name in another project");
    }
}
