// SPDX-License-Identifier: MIT OR Apache-2.0
//! The stacks of the models' threads, kept from one run to the next.
//!
//! loom maps new stacks in each run and unmaps them after it, which takes a third of the time of a search. This program
//! takes the place of the two functions of the C library, for mappings of the size of such a stack.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};

/// The bytes that loom's generators map: 32 KiB and a page that is not accessible.
const BYTES: usize = 0x9000;

thread_local! {
    /// The stacks that this thread has mapped, and whether each is in use.
    static STACKS: RefCell<Vec<(*mut c_void, bool)>> = const { RefCell::new(Vec::new()) };
}

/// # Safety
/// - As for `mmap` of POSIX.
#[unsafe(no_mangle)]
unsafe extern "C" fn mmap(
    at: *mut c_void,
    bytes: usize,
    access: c_int,
    flags: c_int,
    file: c_int,
    from: libc::off_t,
) -> *mut c_void {
    // Safety: guaranteed by the caller.
    let map = || unsafe { libc::syscall(libc::SYS_mmap, at, bytes, access, flags, file, from) as *mut c_void };
    if !at.is_null() || bytes != BYTES || flags & libc::MAP_STACK == 0 {
        return map();
    }
    STACKS.with_borrow_mut(|stacks| {
        if let Some((stack, in_use)) = stacks.iter_mut().find(|(_, in_use)| !in_use) {
            *in_use = true;
            return *stack;
        }
        let stack = map();
        if stack != libc::MAP_FAILED {
            stacks.push((stack, true));
        }
        stack
    })
}

/// # Safety
/// - As for `munmap` of POSIX.
#[unsafe(no_mangle)]
unsafe extern "C" fn munmap(at: *mut c_void, bytes: usize) -> c_int {
    // At the end of a thread its list is gone.
    let kept = STACKS.try_with(|stacks| {
        let mut stacks = stacks.borrow_mut();
        let stack = stacks.iter_mut().find(|(stack, _)| *stack == at);
        stack.map(|(_, in_use)| *in_use = false)
    });
    if matches!(kept, Ok(Some(()))) {
        return 0;
    }
    // Safety: guaranteed by the caller.
    unsafe { libc::syscall(libc::SYS_munmap, at, bytes) as c_int }
}
