// SPDX-License-Identifier: MIT OR Apache-2.0
//! The word operations as PTX.
//!
//! The statements name `.global`, because a pointer loaded from memory would otherwise take a generic access with
//! fall-back code. No block here has `nomem`: each stops the compiler's own reordering.

use core::arch::asm;

macro_rules! operations {
    ($(
        $shape:ident $name:ident $ptx:literal $($fallback:literal)? $ordering:ident $($op:ident)? $doc:literal;
    )*) => { $(operation! { $shape $name $ptx $($fallback)? })* };
}

macro_rules! operation {
    (load $name:ident $ptx:literal) => {
        #[inline(always)]
        pub(crate) fn $name(address: *mut u64) -> u64 {
            let value: u64;
            // Safety: `GlobalWord::new` made its caller promise a valid, aligned word.
            unsafe {
                asm!(statement!(load $ptx), v = out(reg64) value, p = in(reg64) address, options(nostack));
            }
            value
        }
    };
    (store $name:ident $ptx:literal) => {
        #[inline(always)]
        pub(crate) fn $name(address: *mut u64, value: u64) {
            // Safety: as above.
            unsafe {
                asm!(statement!(store $ptx), v = in(reg64) value, p = in(reg64) address, options(nostack));
            }
        }
    };
    (rmw $name:ident $ptx:literal) => {
        #[inline(always)]
        pub(crate) fn $name(address: *mut u64, value: u64) -> u64 {
            let old: u64;
            // Safety: as above.
            unsafe {
                asm!(
                    statement!(rmw $ptx),
                    o = out(reg64) old, v = in(reg64) value, p = in(reg64) address, options(nostack),
                );
            }
            old
        }
    };
    (red $name:ident $ptx:literal) => {
        operation! { store $name $ptx }
    };
    (cas $name:ident $ptx:literal) => {
        #[inline(always)]
        pub(crate) fn $name(address: *mut u64, expected: u64, new: u64) -> u64 {
            let old: u64;
            // Safety: as above.
            unsafe {
                asm!(
                    statement!(cas $ptx),
                    o = out(reg64) old, c = in(reg64) expected, v = in(reg64) new, p = in(reg64) address,
                    options(nostack),
                );
            }
            old
        }
    };
    (fence $name:ident $ptx:literal) => {
        #[inline(always)]
        pub(crate) fn $name() {
            // Safety: a fence touches no memory of its own.
            unsafe { asm!(statement!(fence $ptx), options(nostack)) };
        }
    };
    (fence $name:ident $ptx:literal $fallback:literal) => {
        #[inline(always)]
        pub(crate) fn $name() {
            // Safety: a fence touches no memory of its own.
            unsafe {
                #[cfg(all(target_feature = "sm_90", target_feature = "ptx86"))]
                asm!(statement!(fence $ptx), options(nostack));
                #[cfg(not(all(target_feature = "sm_90", target_feature = "ptx86")))]
                asm!(statement!(fence $fallback), options(nostack));
            }
        }
    };
}

word_operations!(operations);

#[inline(always)]
pub(crate) fn store_pair_relaxed_sys(address: *mut u64, low: u64, high: u64) {
    // Safety: the caller of `GlobalWord::new` promised valid words; the trait requires 16-byte alignment.
    unsafe {
        asm!(
            statement!(store_pair_relaxed_sys),
            l = in(reg64) low, h = in(reg64) high, p = in(reg64) address, options(nostack),
        );
    }
}

/// Returns its argument and hides its origin from LLVM.
///
/// LLVM loads a handle's 32-bit field as half of a 64-bit word. Then it compares and shifts in 64 bits, with twice the
/// instructions. This function takes no instruction.
#[inline(always)]
pub(crate) fn narrow(value: u32) -> u32 {
    let same: u32;
    // Safety: this copies a register.
    unsafe {
        asm!(statement!(narrow), s = out(reg32) same, w = in(reg32) value, options(pure, nomem, nostack, preserves_flags))
    }
    same
}

/// Returns its argument, and keeps what depends on it behind the branch that the call is behind.
///
/// LLVM computes values that do not change in a loop before it, also values that only a rare branch needs. There they
/// would take registers all the time.
#[inline(always)]
pub fn stay(value: u32) -> u32 {
    let same: u32;
    // Safety: this copies a register. It is not `pure`, so that it stays in its place.
    unsafe {
        asm!(statement!(narrow), s = out(reg32) same, w = in(reg32) value, options(nomem, nostack, preserves_flags))
    }
    same
}

/// Does the same as [`stay`] for 64 bits.
#[inline(always)]
pub fn stay_word(value: u64) -> u64 {
    let same: u64;
    // Safety: as for `stay`.
    unsafe {
        asm!(statement!(stay_word), v = out(reg64) same, c = in(reg64) value, options(nomem, nostack, preserves_flags))
    }
    same
}

/// Returns its argument, which the assembler then takes to differ from lane to lane.
///
/// If a warp adds the same value to the same word, the assembler counts the lanes and lets one of them add for all. For
/// a thread alone that is ten instructions in vain, behind the release.
#[inline(always)]
pub(crate) fn of_lane(value: u64) -> u64 {
    let lanes: u32;
    // Safety: this reads a register that has one bit.
    unsafe { asm!(statement!(of_lane), s = out(reg32) lanes, options(nomem, nostack, preserves_flags)) }
    value.wrapping_mul(u64::from(lanes))
}

/// Keeps the assembler from unrolling a loop, at whose beginning it is called. It takes no instruction.
#[inline(always)]
pub(crate) fn rolled() {
    // Safety: this is no instruction.
    unsafe { asm!(statement!(rolled), options(nomem, nostack, preserves_flags)) }
}

/// Adds if `condition`, by a predicate. In the queue a branch of LLVM's would take four instructions more.
#[inline(always)]
pub(crate) fn add_relaxed_gpu_if(address: *mut u64, condition: bool, value: u64) -> u64 {
    // A register that is defined only under a condition would stay live round the loops of a kernel.
    let mut old = 0u64;
    // Safety: as for the other operations.
    unsafe {
        asm!(
            statement!(add_relaxed_gpu_if),
            o = inout(reg64) old, i = in(reg32) condition as u32, v = in(reg64) value, p = in(reg64) address,
            options(nostack),
        );
    }
    old
}

/// Loads until the value is at or past `least`, at most `polls` times, the load of `first` included. In Rust, the
/// assembler would unroll the loop.
#[inline(always)]
#[allow(named_asm_labels, reason = "the braces are a scope of their own for labels")]
pub(crate) fn spin(address: *mut u64, first: u64, least: u64, polls: u32) -> u64 {
    let past: u64;
    // Safety: as for the other operations.
    unsafe {
        asm!(
            statement!(spin),
            o = out(reg64) past, v = inout(reg64) first => _, c = in(reg64) least, n = in(reg32) polls,
            p = in(reg64) address, options(nostack),
        );
    }
    past
}

/// Stores if `condition`, by a predicate. A branch around the store would take three instructions.
#[inline(always)]
pub(crate) fn store_pair_relaxed_sys_if(address: *mut u64, condition: bool, low: u64, high: u64) {
    // Safety: as for `store_pair_relaxed_sys`.
    unsafe {
        asm!(
            statement!(store_pair_relaxed_sys_if),
            i = in(reg32) condition as u32, l = in(reg64) low, h = in(reg64) high, p = in(reg64) address,
            options(nostack),
        );
    }
}

/// Reads a word of a table that is constant while kernels may read it. It orders nothing, and the compiler may read the
/// word once for several uses.
///
/// # Safety
/// - `address` is valid, a multiple of 8, in global memory, and the word does not change while the kernel runs.
#[inline(always)]
pub unsafe fn read_word(address: *const u64) -> u64 {
    let value: u64;
    // Safety: the caller's promise.
    unsafe {
        asm!(statement!(read_word), v = out(reg64) value, p = in(reg64) address, options(pure, readonly, nostack));
    }
    value
}

/// Reads two neighbouring words of a table; see [`read_word`].
///
/// # Safety
/// - As for [`read_word`], for both words; `address` is a multiple of 16.
#[inline(always)]
pub unsafe fn read_pair(address: *const u64) -> (u64, u64) {
    let (low, high): (u64, u64);
    // Safety: the caller's promise.
    unsafe {
        asm!(
            statement!(read_pair),
            l = out(reg64) low, h = out(reg64) high, p = in(reg64) address, options(pure, readonly, nostack),
        );
    }
    (low, high)
}

/// Pauses for about `ns` nanoseconds (`nanosleep`: between 0 and twice that, at most a millisecond).
#[inline(always)]
pub fn pause(ns: u32) {
    // Safety: sleeping touches no memory.
    unsafe { asm!(statement!(pause), n = in(reg32) ns, options(nostack)) }
}

/// Returns nanoseconds on the clock of deadlines. Its zero is arbitrary, and its ticks are coarse (a microsecond or
/// less on data-centre GPUs).
#[inline(always)]
pub fn clock_ns() -> u64 {
    let now: u64;
    // Safety: reads a special register.
    unsafe { asm!(statement!(clock_ns), t = out(reg64) now, options(nostack)) }
    now
}

/// Returns the same as [`clock_ns`]. On a virtual GPU, gives no other thread a turn.
#[inline(always)]
pub fn peek_clock_ns() -> u64 {
    clock_ns()
}

/// Returns cycles on a clock for short times within one thread.
#[inline(always)]
pub fn cycles() -> u64 {
    let now: u64;
    // Safety: reads a special register.
    unsafe { asm!(statement!(cycles), t = out(reg64) now, options(nostack)) }
    now
}

/// Waits until the kernel before this one on its stream has ended and its writes are visible to this kernel.
///
/// A kernel that is launched as a dependent one (CUDA: programmatic dependent launch) may start before that. Each of
/// its threads calls this before it reads memory that the earlier kernel writes, or writes memory that it uses. A
/// thread without such accesses calls it before it ends, so that the end of this kernel implies that of the earlier
/// one. In any other kernel the call returns at once.
#[inline(always)]
pub fn wait_for_predecessor() {
    // Safety: waiting touches no memory of its own.
    #[cfg(target_feature = "sm_90")]
    unsafe {
        asm!(statement!(wait_for_predecessor), options(nostack));
    }
}

/// Lets the next kernel on the stream start before this one has ended, if that is launched as a dependent one. It may
/// start when a thread of each block has called this or the block has ended. It sees the writes of this kernel, also
/// the earlier ones, after its own [`wait_for_predecessor`].
///
/// Waits first as `wait_for_predecessor` does, so at most two kernels of a stream run at a time.
#[inline(always)]
pub fn let_dependents_start() {
    // Safety: as above.
    #[cfg(target_feature = "sm_90")]
    unsafe {
        asm!(statement!(let_dependents_start), options(nostack));
    }
}

/// Ends the grid with an error that the host sees as a launch failure.
#[inline(always)]
pub fn trap() -> ! {
    // Safety: this does not return.
    unsafe { asm!(statement!(trap), options(noreturn, nostack)) }
}
