// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bulk asynchronous copies between global and shared memory, of sm_90 and later.
//!
//! One thread starts a copy of many bytes, and an engine beside the multiprocessor carries it out, without registers
//! and without instructions for the bytes. Global memory may be this GPU's or a peer's.
//!
//! | name | PTX | SASS on sm_90 |
//! | --- | --- | --- |
//! | `init` | `mbarrier.init.shared::cta.b64` | `FENCE.VIEW.ASYNC.S`, `SYNCS.EXCH.64` |
//! | `arrive` | `mbarrier.arrive.release.cta.shared::cta.b64` | `SYNCS.ARRIVE.TRANS64.A1T0` |
//! | `arrive_expect_tx` | `mbarrier.arrive.expect_tx.release.cta.shared::cta.b64` | `SYNCS.ARRIVE.TRANS64` |
//! | `test_wait` | `mbarrier.test_wait.parity.acquire.cta.shared::cta.b64` | `SYNCS.PHASECHK.TRANS64` |
//! | `try_wait` | `mbarrier.try_wait.parity.acquire.cta.shared::cta.b64` | `SYNCS.PHASECHK.TRANS64.TRYWAIT`, `@P SYNCS.PHASECHK.TRANS64` |
//! | `invalidate` | `mbarrier.inval.shared::cta.b64` | `SYNCS.CCTL.IV` |
//! | `copy_to_shared` | `cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes` | `UBLKCP.S.G` |
//! | `copy_to_global` | `cp.async.bulk.global.shared::cta.bulk_group` | `UBLKCP.G.S` |
//! | `commit_group` | `cp.async.bulk.commit_group` | `UTMACMDFLUSH` |
//! | `wait_group` | `cp.async.bulk.wait_group` | `DEPBAR.LE` |
//! | `wait_group_read` | `cp.async.bulk.wait_group.read` | `DEPBAR.LE` |
//! | `fence_mbarrier_init` | `fence.mbarrier_init.release.cluster` | |
//! | `fence_proxy_async_shared` | `fence.proxy.async.shared::cta` | `FENCE.VIEW.ASYNC.S` |
//! | `fence_proxy_async_global` | `fence.proxy.async.global` | `FENCE.VIEW.ASYNC.G` |
//!
//! The column SASS has the output of `ptxas` 13.0 for each line alone, without the registers of operands; a test
//! compares them.
//!
//! # Limits
//! - Both addresses and the number of bytes are multiples of 16, and there is at least one such unit.
//! - The copies of one phase of an [`Mbarrier`] have less than 2^20 bytes together.
//! - GPUs before sm_90 have no such engine. A kernel that is compiled for these too asks [`SUPPORTED`] first.
//!
//! # Order
//! The engine accesses memory by the *async proxy*; loads, stores and atomics of threads use the *generic proxy*. No
//! barrier and no fence of `sys` orders accesses of different proxies. No two bulk copies are ordered either.
//!
//! | from | to | required between |
//! | --- | --- | --- |
//! | threads store to shared memory | [`copy_to_global`] reads it | each of these threads: [`fence_proxy_async_shared`]; then a barrier with the thread that starts the copy |
//! | [`copy_to_global`] reads shared memory | threads or a copy overwrite it | [`commit_group`] and [`wait_group_read`] of the thread that started the copy; then a barrier with the others |
//! | [`copy_to_shared`] writes shared memory | threads read it | each of these threads waits for the phase of the [`Mbarrier`], or meets a thread that did |
//! | [`copy_to_shared`] writes shared memory | [`copy_to_global`] reads it | the starting thread waits for the phase; no fence |
//! | threads access shared memory | [`copy_to_shared`] overwrites it | each of these threads: [`fence_proxy_async_shared`]; then a barrier, or an arrival for which the starting thread waits |
//! | [`copy_to_global`] writes global memory | a rank reads it after a flag or signal | [`commit_group`] and [`wait_group`] (not [`wait_group_read`]) with 0; then a release of the same thread, or of one that it met at a barrier; then the store of the flag. The reader acquires as usual |
//! | threads or peers store to global memory | [`copy_to_shared`] reads it | the usual release and acquire; then [`fence_proxy_async_global`] of the thread that starts the copy |
//! | a copy of a peer writes global memory | [`copy_to_shared`] reads it | the same |
//!
//! A copy that is complete needs no fence towards threads: the observed end of a copy (a phase, or [`wait_group`])
//! includes one. Memory that was written before the kernel began needs none either.
//!
//! A block must not end before [`wait_group_read`] with 0 has returned, and not while a [`copy_to_shared`] is
//! incomplete.
//!
//! [`wait_group`] has no deadline. It ends because it waits for hardware alone, as a fence does. Waits for an
//! [`Mbarrier`] depend on other threads; [`Comm::wait_mbarrier`](crate::Comm::wait_mbarrier) ends them by a deadline,
//! an abort or a fault.
//!
//! # On a CPU
//! An executor carries out copies at moments that it chooses (`gin-virtual`: drawn from the seed), the read of the
//! source apart from the write of the destination. A copy from shared memory reads the bytes that a fence has made
//! visible to the engine. So most missing waits and fences leave wrong bytes. Not found there: a missing fence after
//! threads have *read* shared memory, and a missing [`fence_proxy_async_global`].

/// Returns the statement of an operation for `asm!`. `{p}` is a register of 64 bits; `{a}`, `{i}`, `{n}`, `{w}` and
/// `{s}` have 32.
macro_rules! bulk_statement {
    (init) => {
        "mbarrier.init.shared::cta.b64 [{a}], {n};"
    };
    (arrive) => {
        "mbarrier.arrive.release.cta.shared::cta.b64 _, [{a}];"
    };
    (arrive_expect_tx) => {
        "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [{a}], {n};"
    };
    (test_wait) => {
        "{{ .reg .pred gin_p; mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 gin_p, [{a}], {n}; selp.u32 {s}, 1, 0, gin_p; }}"
    };
    (try_wait) => {
        "{{ .reg .pred gin_p; mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 gin_p, [{a}], {n}, 1000; selp.u32 {s}, 1, 0, gin_p; }}"
    };
    (invalidate) => {
        "mbarrier.inval.shared::cta.b64 [{a}];"
    };
    (copy_to_shared) => {
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{a}], [{p}], {n}, [{w}];"
    };
    (copy_to_global) => {
        "cp.async.bulk.global.shared::cta.bulk_group [{p}], [{a}], {n};"
    };
    (commit_group) => {
        "cp.async.bulk.commit_group;"
    };
    (fence_mbarrier_init) => {
        "fence.mbarrier_init.release.cluster;"
    };
    (fence_proxy_async_shared) => {
        "fence.proxy.async.shared::cta;"
    };
    (fence_proxy_async_global) => {
        "fence.proxy.async.global;"
    };
}

#[cfg(not(target_arch = "nvptx64"))]
mod cpu;
#[cfg(target_arch = "nvptx64")]
mod ptx;

#[cfg(not(target_arch = "nvptx64"))]
use cpu as imp;
#[cfg(target_arch = "nvptx64")]
use ptx as imp;

#[cfg(not(target_arch = "nvptx64"))]
pub(in crate::sys) use cpu::start;
#[cfg(not(target_arch = "nvptx64"))]
pub use cpu::{carry_out, complete, copy};
pub use imp::{commit_group, wait_group, wait_group_read};
pub use imp::{copy_to_global, copy_to_shared, fence_proxy_async_global, fence_proxy_async_shared};

use crate::shared::SharedArray;
use crate::sys::shared::Address;

/// The kernel has bulk copies: it is compiled for sm_90 or later, or for a CPU.
///
/// `gin_build` refuses PTX for an earlier architecture that has their instructions. A branch on this constant leaves
/// them out.
pub const SUPPORTED: bool = cfg!(any(not(target_arch = "nvptx64"), target_feature = "sm_90"));

/// Largest number of arrivals, and of bytes on their way, that a phase of an [`Mbarrier`] counts (PTX ISA, "Size and
/// alignment of mbarrier object").
pub const MAX_COUNTED: u32 = (1 << 20) - 1;

/// Nanoseconds between two looks of a thread that [waits](Mbarrier::wait), on a CPU.
#[cfg(not(target_arch = "nvptx64"))]
const PAUSE_NS: u32 = 50;

/// An mbarrier: a word of shared memory that counts arrivals of threads and bytes of copies, phase by phase.
///
/// A phase is complete when all expected threads have arrived and all expected bytes have been written. Then the next
/// one begins, with the same number of arrivals. Phases have parities 0, 1, 0, and so on.
///
/// ```
/// use gin_device::prelude::*;
/// use gin_device::sys::bulk::{self, Mbarrier};
///
/// shared! { static PHASES: [u64; 1]; }
/// shared! { static ROW: [u128; 64]; }
///
/// /// Loads 1024 bytes by one bulk copy, for all threads of the block.
/// ///
/// /// # Safety
/// /// - `from` has 1024 bytes in global memory and is a multiple of 16.
/// unsafe fn load(comm: &Comm, from: u64, deadline: Deadline) -> Result<(), Fault> {
///     let arrived = Mbarrier::at(&PHASES.array(), 0);
///     if Block.elect() {
///         // Safety: no thread uses the word yet.
///         unsafe { arrived.init(1) };
///     }
///     Block.sync();
///     if Block.elect() {
///         // Safety: one arrival is expected, and the row has the bytes.
///         unsafe {
///             arrived.arrive_expect_tx(1024);
///             bulk::copy_to_shared(ROW.array().address(), from, 1024, arrived);
///         }
///     }
///     comm.wait_mbarrier(arrived, 0, deadline)
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mbarrier(Address);

impl Mbarrier {
    /// Returns the mbarrier at element `index`. An index out of range ends the grid.
    #[inline(always)]
    #[must_use]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn at(words: &SharedArray<u64>, index: usize) -> Self {
        Self(words.address_of(index))
    }

    #[cfg(target_arch = "nvptx64")]
    #[inline(always)]
    pub(in crate::sys) const fn bits(self) -> u32 {
        self.0.bits()
    }

    #[cfg(not(target_arch = "nvptx64"))]
    pub(in crate::sys) fn bits(self) -> u64 {
        self.0.bits()
    }

    #[cfg(not(target_arch = "nvptx64"))]
    pub(in crate::sys) const fn word_pointer(self) -> *mut u64 {
        self.0.pointer().cast()
    }

    /// Begins phase 0, lets each phase expect this many arrivals, and makes the word known to the engine. A barrier
    /// of the block then makes it known to the other threads.
    ///
    /// # Safety
    /// - `arrivals` is 1 to [`MAX_COUNTED`]. No thread and no copy uses the word, as mbarrier or otherwise.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn init(self, arrivals: u32) {
        // Safety: the caller's promise; the word is in shared memory and aligned.
        unsafe { imp::init(self.0, arrivals) }
        imp::fence_mbarrier_init();
        fence_proxy_async_shared();
    }

    /// Arrives. Release at block scope: threads that wait for the phase see the caller's earlier accesses.
    ///
    /// # Safety
    /// - The mbarrier is initialised, and its present phase has not seen all arrivals.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn arrive(self) {
        // Safety: the caller's promise.
        unsafe { imp::arrive(self.0) }
    }

    /// Lets the present phase expect `bytes` bytes more, and arrives as [`arrive`](Self::arrive) does.
    ///
    /// # Safety
    /// - As [`arrive`](Self::arrive). The phase expects at most [`MAX_COUNTED`] bytes in all.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn arrive_expect_tx(self, bytes: u32) {
        // Safety: the caller's promise.
        unsafe { imp::arrive_expect_tx(self.0, bytes) }
    }

    /// Returns whether the phase of this parity is complete: the present phase has the other one. So 1 is complete at
    /// first. Acquire at block scope if it is.
    #[inline(always)]
    #[must_use]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn test_wait(self, parity: u32) -> bool {
        imp::test_wait(self.0, parity)
    }

    /// Does the same as [`test_wait`](Self::test_wait), after a pause of about a microsecond at most, which ends when
    /// the phase is complete.
    #[inline(always)]
    #[must_use]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn try_wait(self, parity: u32) -> bool {
        imp::try_wait(self.0, parity)
    }

    /// Waits until the phase of this parity is complete, without a deadline. The phase must end because threads of this
    /// block arrive, which do not wait for other blocks, and copies end.
    ///
    /// Ordering: acquire, at block scope.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn wait(self, parity: u32) {
        #[cfg(not(target_arch = "nvptx64"))]
        let _waits = crate::exec::Waits::begin(None);
        while !self.try_wait(parity) {
            #[cfg(not(target_arch = "nvptx64"))]
            crate::sys::pause(PAUSE_NS);
        }
    }

    /// Ends the use of the word as an mbarrier.
    ///
    /// # Safety
    /// - The mbarrier is initialised, and no thread and no copy uses it any more.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn invalidate(self) {
        // Safety: the caller's promise.
        unsafe { imp::invalidate(self.0) }
    }
}

#[cfg(not(target_arch = "nvptx64"))]
use super::table::{OperationRow, row};

/// Every operation of this module.
#[cfg(not(target_arch = "nvptx64"))]
#[doc(hidden)]
pub const BULK_OPERATIONS: &[OperationRow] = &[
    row("init", "mbarrier.init.shared::cta.b64", bulk_statement!(init)),
    row("arrive", "mbarrier.arrive.release.cta.shared::cta.b64", bulk_statement!(arrive)),
    row("arrive_expect_tx", "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64", bulk_statement!(arrive_expect_tx)),
    row("test_wait", "mbarrier.test_wait.parity.acquire.cta.shared::cta.b64", bulk_statement!(test_wait)),
    row("try_wait", "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64", bulk_statement!(try_wait)),
    row("invalidate", "mbarrier.inval.shared::cta.b64", bulk_statement!(invalidate)),
    row(
        "copy_to_shared",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
        bulk_statement!(copy_to_shared),
    ),
    row("copy_to_global", "cp.async.bulk.global.shared::cta.bulk_group", bulk_statement!(copy_to_global)),
    row("commit_group", "cp.async.bulk.commit_group", bulk_statement!(commit_group)),
    row("wait_group", "cp.async.bulk.wait_group", "cp.async.bulk.wait_group 0;"),
    row("wait_group_read", "cp.async.bulk.wait_group.read", "cp.async.bulk.wait_group.read 0;"),
    row("fence_mbarrier_init", "fence.mbarrier_init.release.cluster", bulk_statement!(fence_mbarrier_init)),
    row("fence_proxy_async_shared", "fence.proxy.async.shared::cta", bulk_statement!(fence_proxy_async_shared)),
    row("fence_proxy_async_global", "fence.proxy.async.global", bulk_statement!(fence_proxy_async_global)),
];
