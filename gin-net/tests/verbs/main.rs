// SPDX-License-Identifier: MIT OR Apache-2.0
//! The way to libibverbs for the network `verbs`: structures lie where rdma-core's headers have them.
//!
//! What needs the headers or a C compiler is reported as ignored without them; `scripts/setup.sh` installs them.

#[path = "../../../gin-verbs/tests/common/c.rs"]
mod c;

use c::{compile, statements};
use gin_net::verbs::{FOREIGN_FIELDS, FOREIGN_NUMBERS, FOREIGN_SIZES};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::fs;

const HEAD: &str = "#include <infiniband/verbs.h>\n#include <stddef.h>\n";

fn main() {
    let trials = vec![Trial::ignorable_test("structures_lie_where_the_headers_have_them", structures)];
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

fn check(body: &str) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let source = folder.path().join("layouts.c");
    fs::write(&source, format!("{HEAD}{body}"))?;
    Ok(compile(&source, &folder.path().join("layouts.o"), &["-c"])?)
}

fn structures() -> Result<Completion, Failed> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) || check("").is_err() {
        let reason = "there is no infiniband/verbs.h, or no C compiler: run scripts/setup.sh";
        return Ok(Completion::ignored_with(reason));
    }
    check(&statements(FOREIGN_FIELDS, FOREIGN_SIZES.iter().copied(), FOREIGN_NUMBERS))?;
    // What is compared does differ if a number is wrong.
    match check(&statements(&[], [], &[(3, "IBV_QPT_RC")])) {
        Err(error) if error.message().is_some_and(|text| text.contains("IBV_QPT_RC")) => Ok(Completion::Completed),
        _ => Err("a wrong number was not noticed".into()),
    }
}
