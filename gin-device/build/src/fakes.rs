// SPDX-License-Identifier: MIT OR Apache-2.0

//! Fake programs for the unit tests.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

static RUNNING: Mutex<()> = Mutex::new(());

/// Locks out other tests; held from writing a program to running it.
///
/// A process that another thread forks in between would hold the file open for writing, and Linux does not run such a
/// file.
pub(crate) fn one_at_a_time() -> MutexGuard<'static, ()> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes an executable shell script.
pub(crate) fn program(path: &Path, script: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}
