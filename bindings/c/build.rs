// SPDX-License-Identifier: MIT OR Apache-2.0

//! Hides symbols that the linker makes. Cargo passes this on to shared libraries that contain this crate.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,start-stop-visibility=hidden");
}
