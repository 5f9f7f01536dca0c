// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares the encodings of `gin_abi::mlx5` with two independent sources. rdma-core's headers build the same entries
//! and completions with their own functions. The kernel's `mlx5_ifc.h` defines the fields of mailboxes.
//!
//! The tests compile both; neither is part of the project. A test reports as ignored if a header or the C compiler is
//! missing. `scripts/setup.sh` installs them.

mod compiler;
mod kernel;
mod rdma_core;

use libtest_mimic::{Arguments, Completion, Failed, Trial};

/// Creates a trial that is ignored with the reason in `missing`, if there is one.
fn needing(name: &str, missing: Option<String>, run: impl FnOnce() -> Result<(), Failed> + Send + 'static) -> Trial {
    Trial::ignorable_test(name, move || match missing {
        Some(reason) => Ok(Completion::ignored_with(reason)),
        None => run().map(|()| Completion::Completed),
    })
}

fn main() {
    let mut trials = rdma_core::trials();
    trials.extend(kernel::trials());
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}
