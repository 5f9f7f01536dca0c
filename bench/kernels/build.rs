// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tells build scripts of dependents the folder of this crate, from which they compile its kernels.

fn main() -> Result<(), std::env::VarError> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::metadata=folder={}", std::env::var("CARGO_MANIFEST_DIR")?);
    Ok(())
}
