// SPDX-License-Identifier: MIT OR Apache-2.0
//! The cases of a process that serves a group.

use crate::cases;
use crate::host::Setup;
use crate::processes::{NOT_HERE, Processes, finding, say};
use std::format;
use std::io::{self, BufRead};
use std::process::ExitCode;

/// Serves a group if one started this process: runs the cases that the group names, each with the setup that `setup`
/// returns for the name of the way. Returns only after the group is gone.
pub fn serve(setup: impl Fn(&str, Processes) -> Option<Setup>) -> Option<ExitCode> {
    let processes = match Processes::join() {
        Ok(None) => return None,
        Ok(Some(processes)) => processes,
        Err(error) => {
            say(&format!("failed {error}"));
            return Some(ExitCode::FAILURE);
        }
    };
    say("ready");
    for line in io::stdin().lock().lines().map_while(Result::ok) {
        let found = line.split_once(' ').and_then(|(way, name)| {
            let case = cases::every().into_iter().find(|case| case.name == name)?;
            Some((case, setup(way, processes.clone())?))
        });
        match found.map(|(case, setup)| case.judge(&setup)) {
            None => say(&format!("failed there is no case {line}")),
            Some(Ok(())) => say("passed"),
            Some(Err(error)) if error.contains(NOT_HERE) => say(&format!("skipped {}", finding(&error))),
            Some(Err(error)) => say(&format!("failed {error}")),
        }
    }
    Some(ExitCode::SUCCESS)
}
