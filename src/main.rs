// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command `gin`.

use std::process::ExitCode;

fn main() -> ExitCode {
    gin_cli::main()
}
