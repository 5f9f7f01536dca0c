// SPDX-License-Identifier: MIT OR Apache-2.0

//! Names the shared library by the version of its interface, and hides symbols that the linker makes.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libgin.so.0");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,start-stop-visibility=hidden");
}
