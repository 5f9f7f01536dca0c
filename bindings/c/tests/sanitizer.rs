// SPDX-License-Identifier: MIT OR Apache-2.0

//! The programs in C and C++ under the address sanitizer, which also watches the library's memory. Without the
//! sanitizer's library the trials are reported as ignored.

mod common;

use common::{HERE, compiler, library, run, try_run};
use libtest_mimic::{Arguments, Trial};
use std::path::Path;
use std::process::{Command, ExitCode};

/// Compiles a program for the sanitizer.
fn compile(source: &Path, to: &Path) -> Result<String, String> {
    let mut command = compiler(source.extension().is_some_and(|end| end == "cpp"));
    command.arg(source).arg("-o").arg(to).args(["-fsanitize=address,undefined", "-pthread"]);
    try_run(command.arg(library("libgin_capi.so")))
}

/// Returns the number of runs of a program: of random calls, 6, or as many as `GIN_CAPI_SEEDS` says.
fn seeds(source: &Path) -> u64 {
    if !source.ends_with("fuzz.cpp") {
        return 1;
    }
    std::env::var("GIN_CAPI_SEEDS").map_or(6, |seeds| seeds.parse().expect("GIN_CAPI_SEEDS is a number"))
}

fn main() -> ExitCode {
    let folder = tempfile::tempdir().expect("make a folder");
    let empty = folder.path().join("empty.c");
    std::fs::write(&empty, "int main(void) { return 0; }\n").expect("write a source");
    let missing = compile(&empty, &folder.path().join("empty")).err();
    if let Some(reason) = &missing {
        eprintln!("ignored, because the compiler has no address sanitizer: {reason}");
    }
    let trial = |name: &str| {
        let (source, program) =
            (Path::new(HERE).join("tests/c").join(name), folder.path().join(name).with_extension(""));
        let check = move || {
            compile(&source, &program)?;
            for seed in 1..=seeds(&source) {
                let said = run(Command::new(&program).args(source.ends_with("fuzz.cpp").then(|| seed.to_string())));
                if !said.contains("passed") {
                    return Err(said.into());
                }
            }
            Ok(())
        };
        Trial::test(format!("{name}_uses_memory_as_it_may"), check).with_ignored_flag(missing.is_some())
    };
    let trials = ["put.c", "owner.cpp", "operations.cpp", "fuzz.cpp", "ep.cpp", "ep_errors.cpp", "nccl_ep_modes.cpp"]
        .map(trial)
        .into();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
