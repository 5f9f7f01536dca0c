// SPDX-License-Identifier: MIT OR Apache-2.0

use std::sync::MutexGuard;

use super::*;
use crate::fakes;

/// A folder of fake toolchains. Their `rustc` is a shell script that prints what a real one would.
struct Machine {
    dir: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

struct Fake {
    release: &'static str,
    sources: bool,
    nvptx: bool,
}

const GOOD: Fake = Fake { release: "1.96.0", sources: true, nvptx: true };

impl Machine {
    fn new() -> Self {
        Machine { dir: tempfile::tempdir().unwrap(), _alone: fakes::one_at_a_time() }
    }

    fn root(&self, name: &str) -> PathBuf {
        self.dir.path().join("toolchains").join(name)
    }

    fn with(self, name: &str, fake: Fake) -> Self {
        let root = self.root(name);
        let cpus = if fake.nvptx { "    sm_80\n    sm_90" } else { "    generic" };
        let script = format!(
            "case \"$*\" in\n-vV) printf 'rustc {release} (0 2026-01-01)\\nrelease: {release}\\n' ;;\n\
             *sysroot*) echo '{root}' ;;\n*target-cpus*) echo '{cpus}' ;;\nesac",
            release = fake.release,
            root = root.display(),
        );
        for program in ["rustc", "cargo"] {
            fakes::program(&root.join("bin").join(program), &script);
        }
        if fake.sources {
            let core = root.join("lib/rustlib/src/rust/library/core/src");
            fs::create_dir_all(&core).unwrap();
            fs::write(core.join("lib.rs"), "").unwrap();
        }
        self
    }

    fn environment(&self) -> Environment {
        let home = self.dir.path().as_os_str().to_owned();
        Environment { vars: BTreeMap::from([("RUSTUP_HOME".into(), home)]), ..Environment::default() }
    }

    fn rustc(&self, name: &str) -> PathBuf {
        self.root(name).join("bin/rustc")
    }
}

#[test]
fn the_newest_release_with_sources_is_taken_before_any_nightly() {
    let machine = Machine::new()
        .with("a", GOOD)
        .with("b", Fake { release: "1.97.1", ..GOOD })
        .with("c", Fake { release: "1.98.0", sources: false, ..GOOD })
        .with("d", Fake { release: "1.99.0-nightly", ..GOOD });
    let found = Toolchain::find_in(&machine.environment()).unwrap();
    assert_eq!(found.rustc, machine.rustc("b"));
    assert_eq!(found.cargo, machine.root("b").join("bin/cargo"));
    assert_eq!(found.target_cpus, ["sm_80", "sm_90"]);
}

#[test]
fn rustups_toolchains_come_before_the_distributions() {
    let machine = Machine::new()
        .with("nightly", Fake { release: "1.96.0-nightly", ..GOOD })
        .with("debian", Fake { release: "1.97.0", ..GOOD });
    let mut environment = machine.environment();
    let debian = machine.dir.path().join("usr");
    fs::rename(machine.root("debian"), &debian).unwrap();
    environment.distribution = Some((debian.join("bin/rustc"), debian.join("bin/cargo")));
    let found = Toolchain::find_in(&environment).unwrap();
    assert_eq!(found.rustc, machine.rustc("nightly"));
}

#[test]
fn without_a_usable_compiler_the_error_names_what_each_lacks_and_the_commands_that_install_one() {
    let machine = Machine::new()
        .with("no-source", Fake { sources: false, ..GOOD })
        .with("old", Fake { release: "1.95.0", ..GOOD })
        .with("no-nvptx", Fake { nvptx: false, ..GOOD });
    let text = Toolchain::find_in(&machine.environment()).unwrap_err().to_string();
    for command in crate::INSTALL_COMMANDS {
        assert!(text.contains(command), "{text}");
    }
    for (name, reason) in [
        ("no-source", "has no sources of `core` (rust-src)"),
        ("old", "is older than 1.96"),
        ("no-nvptx", "has no NVPTX target"),
    ] {
        let line = text.lines().find(|line| line.contains(&format!("/{name}/bin/rustc:")));
        assert!(line.is_some_and(|line| line.contains(reason)), "{name}: {text}");
    }
}

#[test]
fn a_compiler_named_by_a_variable_may_be_old_and_is_taken_before_all_others() {
    let machine = Machine::new().with("new", GOOD).with("old", Fake { release: "1.95.0", ..GOOD });
    let mut environment = machine.environment();
    environment.vars.insert("GIN_RUSTC".into(), machine.rustc("old").into());
    let found = Toolchain::find_in(&environment).unwrap();
    assert_eq!(found.rustc, machine.rustc("old"));
    assert_eq!(found.cargo, machine.root("old").join("bin/cargo"));
}

#[test]
fn a_cargo_named_by_a_variable_brings_the_compiler_beside_it() {
    let machine = Machine::new().with("one", GOOD).with("two", GOOD);
    let mut environment = machine.environment();
    let cargo = machine.root("two").join("bin/cargo");
    environment.vars.insert("GIN_CARGO".into(), cargo.into());
    assert_eq!(Toolchain::find_in(&environment).unwrap().rustc, machine.rustc("two"));
}

#[test]
fn a_variable_that_names_no_compiler_is_an_error_and_not_passed_over() {
    let machine = Machine::new().with("good", GOOD);
    let mut environment = machine.environment();
    environment.vars.insert("GIN_RUSTC".into(), "/nowhere/rustc".into());
    let text = Toolchain::find_in(&environment).unwrap_err().to_string();
    assert!(text.starts_with("GIN_RUSTC=/nowhere/rustc cannot be used: /nowhere/rustc does not exist"), "{text}");
}

#[test]
fn an_architecture_that_the_compiler_lacks_is_refused() {
    let machine = Machine::new().with("one", GOOD);
    let found = Toolchain::find_in(&machine.environment()).unwrap();
    assert!(found.require(Arch::Sm90).is_ok());
    let text = found.require(Arch::Sm120).unwrap_err().to_string();
    assert!(text.contains("does not know sm_120"), "{text}");
}

#[test]
fn versions_of_releases_nightlies_and_distributions_are_understood() {
    let version = |release: &str| {
        parse_version(&format!("rustc x\nbinary: rustc\nrelease: {release}\nLLVM version: 22.1.8\n"))
            .map(|version| (version.minor, version.patch, version.unreleased))
    };
    assert_eq!(version("1.96.2"), Some((96, 2, false)));
    assert_eq!(version("1.97.0-nightly"), Some((97, 0, true)));
    assert_eq!(version("1.98.0-beta.3"), Some((98, 0, true)));
    assert_eq!(version("2.0.0"), None);
    assert_eq!(parse_version("command not found"), None);
}
