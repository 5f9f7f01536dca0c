// SPDX-License-Identifier: MIT OR Apache-2.0
//! C that is compiled while tests run, against headers that are installed.

use gin_verbs::ForeignField;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

const TARGET: &str = "x86_64-unknown-linux-gnu";

fn compiler(folder: &Path) -> Result<Command, String> {
    // What cargo tells build scripts is not there when tests run.
    let mut build = cc::Build::new();
    build.target(TARGET).host(TARGET).opt_level(1).out_dir(folder).cargo_metadata(false).warnings(false);
    build.try_get_compiler().map(|tool| tool.to_command()).map_err(|error| format!("no C compiler: {error}"))
}

pub(crate) fn compile(source: &Path, out: &Path, arguments: &[&str]) -> Result<(), String> {
    let mut command = compiler(out.parent().ok_or("no folder")?)?;
    let output = command.args(arguments).arg(source).arg("-o").arg(out).output().map_err(|error| error.to_string())?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

/// Statements that do not compile unless structures and numbers are as they are taken to be. A size that need not be the
/// same may be larger than in C.
pub(crate) fn statements(
    fields: &[ForeignField],
    sizes: impl IntoIterator<Item = (usize, &'static str, bool)>,
    numbers: &[(u64, &str)],
) -> String {
    let mut body = String::new();
    let mut holds = |condition: String, name: &str| {
        // Writing to a string does not fail.
        let _ = writeln!(body, "_Static_assert({condition}, \"{name}\");");
    };
    for ForeignField { structure, field, offset, size } in fields {
        holds(format!("offsetof({structure}, {field}) == {offset}"), &format!("{structure} {field}"));
        holds(format!("sizeof((({structure} *)0)->{field}) == {size}"), &format!("{structure} {field}"));
    }
    for (size, structure, same) in sizes {
        holds(format!("sizeof({structure}) {} {size}", if same { "==" } else { "<=" }), structure);
    }
    for (value, name) in numbers {
        holds(format!("{name} == {value}u"), name);
    }
    body
}
