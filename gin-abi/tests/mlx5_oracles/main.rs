// SPDX-License-Identifier: MIT OR Apache-2.0
//! What `gin_abi::mlx5` encodes is what two independent sources say: rdma-core's headers, whose own builders make the same
//! entries and completions, and the kernel's `mlx5_ifc.h`, which knows where the fields of mailboxes lie.
//!
//! Both are compiled here and never part of the project. Reported as ignored where a header or the C compiler is missing;
//! `scripts/setup.sh` installs them.

mod compiler;
mod kernel;
mod rdma_core;

use libtest_mimic::{Arguments, Completion, Failed, Trial};

/// A trial that needs something which may be missing, with the reason.
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
