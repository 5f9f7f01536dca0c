// SPDX-License-Identifier: MIT OR Apache-2.0
//! Macros of gin's device API; use them through `gin_device`, which documents them.
#![warn(unreachable_pub)]

mod kernel;
mod println;
mod shared;

use proc_macro::TokenStream;

/// Makes a function a kernel; see `gin_device::kernel`.
///
/// `#[kernel]`, or `#[kernel(launch_bounds(MAX_THREADS))]`, or `#[kernel(launch_bounds(MAX_THREADS, MIN_BLOCKS))]`.
#[proc_macro_attribute]
pub fn kernel(arguments: TokenStream, item: TokenStream) -> TokenStream {
    kernel::expand(arguments.into(), item.into()).unwrap_or_else(syn::Error::into_compile_error).into()
}

/// Prints a line from a kernel; see `gin_device::print`.
///
/// `gin_println!(comm, "text {} {:#x}", value, other)`
#[proc_macro]
pub fn gin_println(item: TokenStream) -> TokenStream {
    println::expand(item.into()).unwrap_or_else(syn::Error::into_compile_error).into()
}

/// Declares static shared memory; see `gin_device::shared`.
///
/// `shared! { static NAME: Type; }`
#[proc_macro]
pub fn shared(item: TokenStream) -> TokenStream {
    shared::expand(item.into()).unwrap_or_else(syn::Error::into_compile_error).into()
}
