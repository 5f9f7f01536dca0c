// SPDX-License-Identifier: MIT OR Apache-2.0
//! A project of `gin new` builds, with its kernels, from the packages that crates.io would have, and from nothing else
//! of this checkout.
#![cfg(feature = "cuda")]

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A test of the project. The machine code of `gin-ep` comes from the sources in the package `gin-ep-kernels`.
const EMBEDDED: &str = r#"
#[test]
fn the_kernels_of_a_package_are_embedded() {
    let find = |text: &[u8], part: &str| text.windows(part.len()).any(|window| window == part.as_bytes());
    assert!(gin_ep::PTX.iter().any(|(arch, text)| *arch == "sm_90" && find(text, ".entry ep_dispatch")));
}
"#;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Runs a command, which must succeed, and returns its output.
fn run(command: &mut Command) -> String {
    let output = command.env_remove("RUSTFLAGS").stdin(Stdio::null()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{command:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

fn cargo(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO"));
    command.args(arguments).arg("--offline").current_dir(folder);
    command
}

/// Returns the names of the workspace's packages: first the ones that may be published.
fn packages() -> (Vec<String>, Vec<String>) {
    let text = run(&mut cargo(root(), &["metadata", "--no-deps", "--format-version=1"]));
    let metadata: Value = serde_json::from_str(&text).unwrap();
    let all = metadata["packages"].as_array().unwrap();
    let (published, others): (Vec<_>, Vec<_>) = all.iter().partition(|package| package["publish"].is_null());
    let names = |packages: Vec<&Value>| packages.iter().map(|p| p["name"].as_str().unwrap().to_owned()).collect();
    (names(published), names(others))
}

/// Makes a folder equal to another one. Files that are equal already stay, so that a second run compiles less.
fn mirror(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for path in fs::read_dir(to).unwrap().map(|entry| entry.unwrap().path()) {
        match from.join(path.file_name().unwrap()).exists() {
            true => {}
            false if path.is_dir() => fs::remove_dir_all(path).unwrap(),
            false => fs::remove_file(path).unwrap(),
        }
    }
    for entry in fs::read_dir(from).unwrap() {
        let (from, to) = (entry.as_ref().unwrap().path(), to.join(entry.unwrap().file_name()));
        if from.is_dir() {
            mirror(&from, &to);
        } else if fs::read(&to).ok() != Some(fs::read(&from).unwrap()) {
            fs::write(&to, fs::read(&from).unwrap()).unwrap();
        }
    }
}

/// Packages the crates and unpacks them: the command in `work`, the others beside it. Cargo takes them in place of
/// crates.io where it runs in `work`. Returns their names.
fn unpack_all(folder: &Path, work: &Path) -> Vec<String> {
    let (published, others) = packages();
    // For a lock file cargo would look for these crates on crates.io, in whose place a machine without a network has a
    // folder.
    let options = ["--workspace", "--no-verify", "--allow-dirty", "--quiet", "--exclude-lockfile"];
    let mut package = cargo(root(), &["package"]);
    package.args(options);
    package.args(others.iter().map(|name| format!("--exclude={name}"))).arg("--target-dir").arg(folder.join("packed"));
    run(&mut package);
    let fresh = folder.join("fresh");
    let mut patch = "[patch.crates-io]\n".to_owned();
    for name in &published {
        let versioned = format!("{name}-{}", env!("CARGO_PKG_VERSION"));
        fs::create_dir_all(&fresh).unwrap();
        let file = folder.join(format!("packed/package/{versioned}.crate"));
        run(Command::new("tar").arg("-xzf").arg(file).arg("-C").arg(&fresh));
        let unpacked = if name == "gin-cli" { work.join(&versioned) } else { folder.join("crates").join(&versioned) };
        mirror(&fresh.join(&versioned), &unpacked);
        patch.push_str(&format!("{name} = {{ path = {unpacked:?} }}\n"));
    }
    fs::remove_dir_all(fresh).unwrap();
    fs::create_dir_all(work.join(".cargo")).unwrap();
    fs::write(work.join(".cargo/config.toml"), patch).unwrap();
    published
}

#[test]
fn a_new_project_and_its_kernels_build_from_the_packages_alone() {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("packages");
    let work = folder.join("work");
    let names = unpack_all(&folder, &work);
    assert!(names.iter().any(|name| name == "gin-host"), "{names:?}");

    // The versions with which this workspace was tested, which are downloaded already.
    let lock = |folder: &Path| fs::copy(root().join("Cargo.lock"), folder.join("Cargo.lock")).unwrap();
    // The crates of others, and the `core` of kernels, are compiled already in the target folder of this build.
    let build = |command: &mut Command| {
        run(command.env("CARGO_TARGET_DIR", work.join("target")).env("CARGO_BUILD_BUILD_DIR", target))
    };

    let version = env!("CARGO_PKG_VERSION");
    fs::write(work.join("Cargo.toml"), format!("[workspace]\nmembers = [\"gin-cli-{version}\"]\n")).unwrap();
    lock(&work);
    // With the features that the project below needs of the same crates.
    build(&mut cargo(&work, &["build", "-p", "gin-cli", "--no-default-features", "--features", "gin-host/gpu"]));

    let project: PathBuf = work.join("from-packages");
    if project.exists() {
        fs::remove_dir_all(&project).unwrap();
    }
    let said = run(Command::new(work.join("target/debug/gin")).args(["new", "from-packages"]).current_dir(&work));
    let (short, _) = version.rsplit_once('.').unwrap();
    assert!(said.contains(&format!("depends on gin by version {short}\n")), "{said}");
    lock(&project);

    let manifest = fs::read_to_string(project.join("Cargo.toml")).unwrap();
    let manifest = manifest.replace("[dependencies]\n", &format!("[dependencies]\ngin-ep = \"{short}\"\n"));
    fs::write(project.join("Cargo.toml"), manifest).unwrap();
    fs::create_dir(project.join("tests")).unwrap();
    fs::write(project.join("tests/embedded.rs"), EMBEDDED).unwrap();
    let mut test = cargo(&project, &["test"]);
    // The kernels have the versions and patches of the project, though they are compiled in a folder elsewhere.
    test.env("GIN_PROJECT", &project);
    // Other builds assemble the same kernels.
    let said = build(test.env("GIN_ARCHS", "sm_90").env("GIN_PTXAS", "none"));
    for test in ["every_seed_adds_up_the_elements_of_the_left_neighbour", "the_kernels_of_a_package_are_embedded"] {
        assert!(said.contains(&format!("{test} ... ok")), "{test}: {said}");
    }
}
