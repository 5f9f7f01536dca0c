// SPDX-License-Identifier: MIT OR Apache-2.0
//! `gin new`: writes a project with a kernel crate, a program, a test and a workflow.

use crate::cli::{End, Failure, NewArgs, Refused};
use std::ffi::OsStr;
use std::fs;
use std::io::{ErrorKind, Write};
use std::path::Path;

/// The files of the project `my-program`, by path, from a folder here.
macro_rules! template {
    ($folder:literal: $($path:literal),*) => { [$(($path, include_str!(concat!($folder, "/", $path)))),*] };
}

/// Cargo would leave a folder with a `Cargo.toml` out of the package, so manifests have the ending `.in` here.
const TEMPLATE: [(&str, &str); 7] = template![
    "template": "Cargo.toml.in",
    "build.rs",
    "src/main.rs",
    "kernels/Cargo.toml.in",
    "kernels/src/lib.rs",
    ".github/workflows/ci.yml",
    ".gitignore"
];

/// The project whose kernels call NCCL's device functions.
const NCCL: [(&str, &str); 6] = template![
    "nccl": "Cargo.toml.in",
    "build.rs",
    "src/main.rs",
    "kernels/Cargo.toml.in",
    "kernels/src/lib.rs",
    "../template/.gitignore"
];

/// The version of gin's crates in a project of a command from crates.io.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION_MAJOR"), ".", env!("CARGO_PKG_VERSION_MINOR"));

/// Names that cargo or rustc refuses for a program, beside Rust's keywords.
const TAKEN: [&str; 8] = ["alloc", "build", "core", "deps", "examples", "incremental", "std", "test"];

const KEYWORDS: [&str; 52] = [
    "_", "abstract", "as", "async", "await", "become", "box", "break", "const", "continue", "crate", "do", "dyn",
    "else", "enum", "extern", "false", "final", "fn", "for", "gen", "if", "impl", "in", "let", "loop", "macro",
    "match", "mod", "move", "mut", "override", "priv", "pub", "ref", "return", "self", "static", "struct", "super",
    "trait", "true", "try", "type", "typeof", "union", "unsafe", "unsized", "use", "virtual", "where", "while",
];

/// Writes a project.
///
/// # Errors
/// Returns [`Refused`] for a bad name, a folder that is not empty, and a checkout of gin that is none; or an error of
/// the file system.
pub(crate) fn run(arguments: &NewArgs, out: &mut impl Write) -> Result<End, Failure> {
    let folder = arguments.folder.as_path();
    let name = folder.file_name().and_then(OsStr::to_str).unwrap_or_default();
    check_name(name)?;
    let (source, shown) = (Source::of(arguments)?, folder.display());
    let is_empty = match fs::read_dir(folder) {
        Ok(mut entries) => entries.next().is_none(),
        Err(error) if error.kind() == ErrorKind::NotFound => true,
        Err(error) => return Err(Refused(format!("{shown} cannot be the project's folder: {error}")).into()),
    };
    if !is_empty {
        return Err(Refused(format!("the folder {shown} is not empty: choose another one")).into());
    }
    let files: &[(&str, &str)] = if arguments.nccl { &NCCL } else { &TEMPLATE };
    for (path, text) in files {
        let path = folder.join(path.trim_start_matches("../template/").trim_end_matches(".in"));
        let failed = |error| format!("cannot write {}: {error}", path.display());
        fs::create_dir_all(path.parent().unwrap_or(folder)).map_err(failed)?;
        fs::write(&path, source.rendered(text, name)).map_err(failed)?;
    }
    writeln!(out, "created {shown}, which depends on gin by {}", source.text())?;
    writeln!(out, "  cd {shown}")?;
    if arguments.nccl {
        writeln!(out, "  cargo run     # on the GPUs of the machine, over NCCL; without a NIC see docs/nccl.md")?;
        writeln!(out, "  cargo test    # on virtual GPUs, through gin")?;
    } else {
        writeln!(out, "  cargo run     # on the GPUs of the machine, or on virtual GPUs")?;
        writeln!(out, "  cargo test")?;
    }
    if let (Source::Path(_), false) = (&source, arguments.nccl) {
        writeln!(out, "On another machine that path does not exist: for the workflow, create it with --git URL.")?;
    }
    Ok(End::Right)
}

fn check_name(name: &str) -> Result<(), Refused> {
    let refuse = |reason: &str| Err(Refused(format!("`{name}` cannot be a project's name: {reason}")));
    let is_allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '_');
    if !name.starts_with(|c: char| c.is_ascii_lowercase()) || !name.chars().all(is_allowed) {
        return refuse("use a lower-case letter, then lower-case letters, digits, - and _");
    }
    if name == "gin" || name.starts_with("gin-") || name.starts_with("gin_") {
        return refuse("gin's own crates have such names");
    }
    if KEYWORDS.contains(&name) || TAKEN.contains(&name) {
        return refuse("Rust or cargo uses it");
    }
    Ok(())
}

/// The crates of gin that projects depend on.
const PLACES: [&str; 5] =
    ["/gin-device", "/gin-device/build", "/gin-host", "/bindings/nccl/device", "/bindings/nccl/host"];

/// The source of gin's crates.
#[derive(Debug)]
enum Source {
    /// A checkout, by its absolute path.
    Path(String),
    /// The URL of a git repository.
    Git(String),
    /// crates.io.
    Registry,
}

impl Source {
    fn of(arguments: &NewArgs) -> Result<Self, Refused> {
        if let Some(url) = &arguments.git {
            return Ok(Self::Git(url.clone()));
        }
        let (folder, advice) = match &arguments.path {
            Some(path) => (path.as_path(), "--path takes the folder of a checkout of gin"),
            None if cfg!(packaged) && arguments.nccl => {
                return Err(Refused("the crates for NCCL are not on crates.io: give --path or --git".to_owned()));
            }
            None if cfg!(packaged) => return Ok(Self::Registry),
            None => (Path::new(env!("CARGO_MANIFEST_DIR")), "this command was built from it: give --path or --git"),
        };
        let refuse = |reason: &str| Refused(format!("{} {reason}; {advice}", folder.display()));
        if !folder.join("gin-device/Cargo.toml").is_file() {
            return Err(refuse("has no gin-device/Cargo.toml"));
        }
        let folder = fs::canonicalize(folder).map_err(|error| refuse(&format!("cannot be found: {error}")))?;
        let path =
            folder.into_os_string().into_string().map_err(|_| refuse("is not UTF-8, which Cargo.toml must be"))?;
        Ok(Self::Path(path))
    }

    fn text(&self) -> String {
        match self {
            Self::Path(path) => format!("path {path}"),
            Self::Git(url) => format!("git {url}"),
            Self::Registry => format!("version {VERSION}"),
        }
    }

    /// Returns a file of the template with the project's name and the source of gin's crates.
    fn rendered(&self, text: &str, name: &str) -> String {
        let text = text.replace("my-program", name).replace("my_program", &name.replace('-', "_"));
        PLACES.iter().fold(text, |text, place| {
            // Strings of TOML and of Rust agree on printable text.
            let source = match self {
                Self::Path(path) => format!("path = {:?}", format!("{path}{place}")),
                Self::Git(url) => format!("git = {url:?}"),
                Self::Registry => format!("version = {VERSION:?}"),
            };
            text.replace(&format!("path = \"path/to/gin{place}\""), &source)
                .replace(&format!("{{ version = {VERSION:?} }}"), &format!("{VERSION:?}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_cargo_or_rust_would_refuse_are_refused_with_the_reason() {
        for name in ["", "-a", "9a", "Two", "a b", "ä", "a.b"] {
            assert!(check_name(name).unwrap_err().0.contains("lower-case letter"), "{name}");
        }
        for (name, reason) in [("fn", "Rust"), ("test", "cargo"), ("gin", "gin's own"), ("gin-device", "gin's own")] {
            assert!(check_name(name).unwrap_err().0.contains(reason), "{name}");
        }
        for name in ["a", "my-program", "all_2_all", "ginger"] {
            check_name(name).unwrap();
        }
    }

    #[test]
    fn no_file_keeps_a_name_or_a_path_of_the_template() {
        let git = Source::Git("https://example.org/gin".to_owned());
        for source in [Source::Path("/a \"b\"/gin".to_owned()), git, Source::Registry] {
            for (path, text) in NCCL {
                let text = source.rendered(text, "first-hour");
                for left in ["my-program", "my_program", "path/to/gin"] {
                    assert!(!text.contains(left), "{left} in {path}: {text}");
                }
            }
            let files = TEMPLATE.map(|(_, text)| source.rendered(text, "first-hour")).join("\n");
            for left in ["my-program", "my_program", "path/to/gin"] {
                assert!(!files.contains(left), "{left} in {files}");
            }
            for expected in ["name = \"first-hour-kernels\"", "use first_hour_kernels", "name = \"first-hour\""] {
                assert!(files.contains(expected), "{expected} in {files}");
            }
            let dependencies: &[&str] = match &source {
                Source::Path(_) => &[r#"path = "/a \"b\"/gin/gin-device""#],
                Source::Git(_) => &[r#"gin-device = { git = "https://example.org/gin" }"#],
                Source::Registry => &[
                    concat!("gin-device = \"", env!("CARGO_PKG_VERSION_MAJOR"), "."),
                    "gin-host = { version = \"",
                    "\", features = [\"gpu\"] }",
                ],
            };
            for dependency in dependencies {
                assert!(files.contains(dependency), "{dependency} in {files}");
            }
        }
    }
}
