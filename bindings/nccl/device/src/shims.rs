// SPDX-License-Identifier: MIT OR Apache-2.0
//! The functions that `gin_build::KernelBuilder::nccl` links: its `shims.ll`, and NCCL's C functions with scalar
//! arguments. They act for the calling thread alone.

use core::ffi::c_void;
use gin_device::backend::{Any, Gdaki, Proxy};
use gin_device::gin::{Order, Scope, Sharing};

/// Values of `ncclGinType_t`.
const PROXY: u32 = 2;
const GDAKI: u32 = 3;

/// A choice of NCCL's back ends when the kernel is compiled.
pub trait Backend: Copy {
    /// Bit `1 << ncclGinType_t` for each back end that the kernel has the code of.
    #[doc(hidden)]
    const MASK: u32;
}

impl Backend for Proxy {
    const MASK: u32 = 1 << PROXY;
}
impl Backend for Gdaki {
    const MASK: u32 = 1 << GDAKI;
}
impl Backend for Any {
    const MASK: u32 = Proxy::MASK | Gdaki::MASK;
}

/// `ncclGinOptFlagsAggregateRequests`: another request to this peer follows.
pub(crate) const AGGREGATE: u32 = 1 << 1;

/// Returns the value of `cuda::thread_scope`.
#[inline(always)]
pub(crate) const fn scope(scope: Scope) -> u32 {
    match scope {
        Scope::System => 0,
        Scope::Gpu => 1,
        Scope::Block => 2,
        Scope::Thread => 10,
    }
}

/// Returns the value of `cuda::memory_order`.
#[inline(always)]
pub(crate) const fn order(order: Order) -> u32 {
    match order {
        Order::Relaxed => 0,
        Order::Acquire => 2,
    }
}

/// Returns the value of `ncclGinResourceSharingMode`.
#[inline(always)]
pub(crate) const fn sharing(sharing: Sharing) -> u32 {
    match sharing {
        Sharing::Gpu => 0,
        Sharing::Block => 1,
        Sharing::Thread => 2,
    }
}

unsafe extern "C" {
    pub(crate) fn gin_nccl_put(
        comm: *const c_void,
        context: u32,
        mask: u32,
        sharing: u32,
        peer: u32,
        to: *const c_void,
        to_offset: u64,
        from: *const c_void,
        from_offset: u64,
        bytes: u64,
        has_signal: bool,
        signal: u32,
        amount: u64,
        has_counter: bool,
        counter: u32,
        given: u32,
        required: u32,
        options: u32,
    );
    pub(crate) fn gin_nccl_get(
        comm: *const c_void,
        context: u32,
        mask: u32,
        sharing: u32,
        peer: u32,
        there: *const c_void,
        there_offset: u64,
        here: *const c_void,
        here_offset: u64,
        bytes: u64,
        options: u32,
    );
    pub(crate) fn gin_nccl_put_value(
        comm: *const c_void,
        context: u32,
        mask: u32,
        sharing: u32,
        peer: u32,
        to: *const c_void,
        to_offset: u64,
        value: u64,
        bytes: u64,
        has_signal: bool,
        signal: u32,
        amount: u64,
        given: u32,
        required: u32,
        options: u32,
    );
    pub(crate) fn gin_nccl_signal(
        comm: *const c_void,
        context: u32,
        mask: u32,
        sharing: u32,
        peer: u32,
        signal: u32,
        amount: u64,
        given: u32,
        required: u32,
        options: u32,
    );
    pub(crate) fn gin_nccl_flush(comm: *const c_void, context: u32, mask: u32, order: u32);
    pub(crate) fn gin_nccl_read_signal(
        comm: *const c_void,
        context: u32,
        mask: u32,
        signal: u32,
        bits: u32,
        order: u32,
    ) -> u64;
    pub(crate) fn gin_nccl_read_counter(
        comm: *const c_void,
        context: u32,
        mask: u32,
        counter: u32,
        bits: u32,
        order: u32,
    ) -> u64;
    pub(crate) fn gin_nccl_reset_signal(comm: *const c_void, context: u32, mask: u32, signal: u32);
    pub(crate) fn gin_nccl_reset_counter(comm: *const c_void, context: u32, mask: u32, counter: u32);
    pub(crate) fn gin_nccl_signal_shadow(comm: *const c_void, context: u32, mask: u32, signal: u32) -> *mut u64;
    pub(crate) fn gin_nccl_world_barrier(comm: *const c_void) -> u32;
    /// Returns the address of a window's byte on a rank of the LSA team. NCCL's own function.
    #[link_name = "ncclGetLsaPointer"]
    pub(crate) fn lsa_pointer(window: *const c_void, offset: u64, lsa_rank: u32) -> *mut c_void;
}
