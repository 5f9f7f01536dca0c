// SPDX-License-Identifier: MIT OR Apache-2.0

//! Kernel crates that come from a registry.
//!
//! Such a crate is not compiled where cargo unpacked it. Cargo would write a lock file there, resolve other versions of
//! dependencies than the user's project has, and take the folder for a part of a workspace around it. So a copy is
//! compiled, in the target folder and with the lock file of the user's project.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::BuildError;
use crate::sources::replace;
use crate::toolchain::Environment;

/// Files that cargo leaves in a package: the first in one from a registry, the second in a vendored one.
const MARKS: [&str; 2] = ["Cargo.toml.orig", ".cargo-checksum.json"];

/// The variable with the folder of the user's project, for a target folder that is not below it.
pub(crate) const PROJECT: &str = "GIN_PROJECT";

/// The copy of a package.
#[derive(Debug)]
pub(crate) struct Package {
    /// The folder of the copy.
    pub(crate) dir: PathBuf,
    /// The lock file of the user's project, if it was found.
    pub(crate) lock: Option<PathBuf>,
    /// The folder in which cargo runs, so that the configuration of the user's project holds.
    pub(crate) runs_in: PathBuf,
}

/// Returns the folder of a dependency whose manifest has this `links` name.
pub(crate) fn folder_of(environment: &Environment, links: &str) -> Result<PathBuf, BuildError> {
    let variable = format!("DEP_{}_FOLDER", links.to_uppercase());
    match environment.var(&variable) {
        Some(folder) => Ok(folder.into()),
        None => Err(BuildError::NoDependency { links: links.to_owned(), variable }),
    }
}

/// Copies the crate in `folder` to the folder of nested builds if it comes from a registry.
pub(crate) fn copied(
    environment: &Environment,
    folder: &Path,
    target_dir: impl FnOnce() -> PathBuf,
) -> Result<Option<Package>, BuildError> {
    let (Some(out), Some(name)) = (environment.var("OUT_DIR").map(Path::new), folder.file_name()) else {
        return Ok(None);
    };
    if !MARKS.iter().any(|mark| folder.join(mark).is_file()) {
        return Ok(None);
    }
    // A registry's folder ends in name and version.
    let dir = target_dir().join("packages").join(name);
    copy(folder, &dir)?;
    // Cargo does not tell a build script where the project is.
    let project = match environment.var(PROJECT).map(Path::new) {
        Some(project) if !project.is_absolute() || !project.is_dir() => {
            let reason = "it must be the absolute path of a folder".to_owned();
            return Err(BuildError::BadVariable { variable: PROJECT, value: project.to_owned(), reason });
        }
        Some(project) => project,
        None => out,
    };
    let lock = project.ancestors().map(|above| above.join("Cargo.lock")).find(|lock| lock.is_file());
    if let Some(lock) = &lock {
        replace(&dir.join("Cargo.lock"), &read(lock)?)?;
    }
    Ok(Some(Package { dir, lock, runs_in: project.to_owned() }))
}

fn copy(from: &Path, to: &Path) -> Result<(), BuildError> {
    fs::create_dir_all(to).map_err(BuildError::io("create", to))?;
    for entry in fs::read_dir(from).map_err(BuildError::io("read", from))? {
        let path = entry.map_err(BuildError::io("read", from))?.path();
        let Some(name) = path.file_name().filter(|name| !name.to_string_lossy().starts_with('.')) else { continue };
        let copied = to.join(name);
        if path.is_dir() {
            copy(&path, &copied)?;
        } else if name == "Cargo.toml" {
            // Without this section cargo would look for a workspace around the copy.
            replace(&copied, &format!("{}\n[workspace]\n", read(&path)?))?;
        } else if name == "Cargo.lock" || path.extension().is_some_and(|end| end == "rs") {
            replace(&copied, &read(&path)?)?;
        } else {
            fs::copy(&path, &copied).map_err(BuildError::io("copy", &path))?;
        }
    }
    Ok(())
}

fn read(path: &Path) -> Result<String, BuildError> {
    fs::read_to_string(path).map_err(BuildError::io("read", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(vars: &[(&str, &Path)]) -> Environment {
        let vars = vars.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        Environment { vars, ..Environment::default() }
    }

    #[test]
    fn a_dependency_is_found_by_its_links_name_and_a_missing_one_is_explained() {
        let found = environment(&[("DEP_MY_KERNELS_FOLDER", Path::new("/k"))]);
        assert_eq!(folder_of(&found, "my_kernels").unwrap(), Path::new("/k"));
        let error = folder_of(&Environment::default(), "my_kernels").unwrap_err().to_string();
        for part in ["links = \"my_kernels\"", "DEP_MY_KERNELS_FOLDER", "[dependencies]"] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }

    #[test]
    fn only_a_package_of_a_registry_is_copied_with_the_lock_file_of_the_project() {
        let root = tempfile::tempdir().unwrap();
        let (package, out) = (root.path().join("src/k-0.1.0"), root.path().join("project/target/debug/build/p/out"));
        let nested = || root.path().join("project/target/gin-build");
        fs::create_dir_all(package.join("src")).unwrap();
        fs::create_dir_all(&out).unwrap();
        for (file, text) in [("Cargo.toml", "[package]\n"), ("Cargo.lock", "its own"), ("src/lib.rs", "code")] {
            fs::write(package.join(file), text).unwrap();
        }
        let environment = environment(&[("OUT_DIR", &out)]);
        assert!(copied(&environment, &package, nested).unwrap().is_none());

        fs::write(package.join("Cargo.toml.orig"), "").unwrap();
        let copy = copied(&environment, &package, nested).unwrap().unwrap();
        assert_eq!((&copy.dir, &copy.lock), (&nested().join("packages/k-0.1.0"), &None));
        assert_eq!(copy.runs_in, out);
        let text = |file: &str| fs::read_to_string(copy.dir.join(file)).unwrap();
        assert_eq!(text("Cargo.toml"), "[package]\n\n[workspace]\n");
        assert_eq!((text("Cargo.lock"), text("src/lib.rs")), ("its own".to_owned(), "code".to_owned()));

        let lock = root.path().join("project/Cargo.lock");
        fs::write(&lock, "the project's").unwrap();
        assert_eq!(copied(&environment, &package, nested).unwrap().unwrap().lock, Some(lock));
        assert_eq!(text("Cargo.lock"), "the project's");
        assert_eq!(fs::read_to_string(package.join("Cargo.lock")).unwrap(), "its own");

        // With a target folder elsewhere the project is named.
        let other = root.path().join("other");
        fs::create_dir_all(&other).unwrap();
        fs::write(other.join("Cargo.lock"), "the other's").unwrap();
        let environment = self::environment(&[("OUT_DIR", &out), (PROJECT, &other)]);
        let copy = copied(&environment, &package, nested).unwrap().unwrap();
        assert_eq!((copy.lock, copy.runs_in), (Some(other.join("Cargo.lock")), other.clone()));
        assert_eq!(text("Cargo.lock"), "the other's");
        let environment = self::environment(&[("OUT_DIR", &out), (PROJECT, Path::new("other"))]);
        let error = copied(&environment, &package, nested).unwrap_err().to_string();
        assert!(error.contains("GIN_PROJECT") && error.contains("absolute path"), "{error}");
    }
}
