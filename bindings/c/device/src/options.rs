// SPDX-License-Identifier: MIT OR Apache-2.0
//! The bits of the argument `options`.

use gin_device::gin::{Order, Route, Scope, Sharing};

/// The route, 2 bits: 0 automatic, 1 loads and stores, 2 network. The forms for a named back end ignore it.
pub const ROUTE: u32 = 0;
/// The threads that use the context at the same time, 2 bits: 0 of the GPU, 1 of a block, 2 one thread.
pub const SHARING: u32 = 2;
/// A wait, a read or a flush does not acquire.
pub const RELAXED: u32 = 1 << 4;
/// The scope to which the payload is released already, 2 bits: 0 thread, 1 block, 2 GPU, 3 system.
pub const GIVEN: u32 = 5;
/// The scope to which the payload must be released, 2 bits: 0 GPU, 1 thread, 2 block, 3 system.
pub const REQUIRED: u32 = 7;
/// Further posts to the same peer follow.
pub const MORE: u32 = 1 << 9;
/// The post raises a signal.
pub const SIGNAL: u32 = 1 << 10;
/// The signal is weak.
pub const WEAK: u32 = 1 << 11;
/// The post raises a counter.
pub const COUNTER: u32 = 1 << 12;
/// A signal or a barrier covers the puts of both routes.
pub const ALL_ROUTES: u32 = 1 << 13;
/// A barrier is over all contexts.
pub const ALL_CONTEXTS: u32 = 1 << 14;
/// A wait first looks for a fault of the communicator, and ends if there is one.
pub const LOOK: u32 = 1 << 15;

#[inline(always)]
pub(crate) fn route(options: u32) -> Route {
    match options >> ROUTE & 3 {
        1 => Route::Lsa,
        2 => Route::Network,
        _ => Route::Auto,
    }
}

#[inline(always)]
pub(crate) fn sharing(options: u32) -> Sharing {
    match options >> SHARING & 3 {
        1 => Sharing::Block,
        2 => Sharing::Thread,
        _ => Sharing::Gpu,
    }
}

#[inline(always)]
pub(crate) fn order(options: u32) -> Order {
    if options & RELAXED != 0 { Order::Relaxed } else { Order::Acquire }
}

#[inline(always)]
pub(crate) fn given(options: u32) -> Scope {
    match options >> GIVEN & 3 {
        0 => Scope::Thread,
        1 => Scope::Block,
        2 => Scope::Gpu,
        _ => Scope::System,
    }
}

#[inline(always)]
pub(crate) fn required(options: u32) -> Scope {
    match options >> REQUIRED & 3 {
        1 => Scope::Thread,
        2 => Scope::Block,
        3 => Scope::System,
        _ => Scope::Gpu,
    }
}
