// SPDX-License-Identifier: MIT OR Apache-2.0

//! Keeps the library loaded when NCCL closes it, because its threads and thread-local values outlive communicators, and
//! hides symbols that the linker makes.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete,-z,start-stop-visibility=hidden");
}
