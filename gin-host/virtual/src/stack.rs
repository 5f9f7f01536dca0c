// SPDX-License-Identifier: MIT OR Apache-2.0
//! Stacks of coroutines, kept for reuse by the whole process.
//!
//! A stack is a slot of one large mapping: a guard page, and above it the stack. Linux 6.13 and later mark a guard page
//! without a mapping of its own, so thousands of stacks take one mapping. On an older system each stack takes two.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::io;
use std::ops::Range;
use std::sync::Mutex;

use corosensei::stack::StackPointer;
use rustix::mm::{self, Advice, MapFlags, MprotectFlags, ProtFlags};
use rustix::param::page_size;

use crate::lock::lock;
use crate::refusal::explain_refusal;

/// Largest number of stacks of one size that are kept.
const KEEP: usize = 8192;

/// Smallest stack in bytes: the code that unwinds a panic must fit.
const LEAST: usize = 16 << 10;
/// Largest stack in bytes. No address space has room for it, so the system refuses it, and adding the guard page cannot
/// overflow.
const MAX: usize = 1 << 60;

/// `MADV_GUARD_INSTALL` of Linux 6.13 (`include/uapi/asm-generic/mman-common.h`).
const GUARD_INSTALL: i32 = 102;

/// A slot that it owns, and unmaps when it is dropped.
pub(crate) struct Stack {
    /// Address of the guard page.
    lowest: StackPointer,
    /// Size of the stack, a multiple of pages. The slot has one page more.
    bytes: usize,
}

// Safety: the slot starts with a guard page; `LEAST` exceeds the smallest size; both ends are multiples of pages.
unsafe impl corosensei::stack::Stack for Stack {
    fn base(&self) -> StackPointer {
        self.lowest.saturating_add(page_size() + self.bytes)
    }

    fn limit(&self) -> StackPointer {
        self.lowest
    }
}

impl Stack {
    /// Maps `count` stacks of `bytes` bytes each. `guard` makes one page inaccessible.
    fn map(bytes: usize, count: usize, guard: fn(*mut c_void) -> io::Result<()>) -> io::Result<Vec<Stack>> {
        if count == 0 {
            return Ok(Vec::new());
        }
        let slot = bytes + page_size();
        let total = slot.checked_mul(count).ok_or(io::ErrorKind::OutOfMemory)?;
        // The pages that no thread touches need no memory, so they need no reservation either.
        let (access, kind) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // Safety: the kernel chooses unused addresses.
        let start = unsafe { mm::mmap_anonymous(std::ptr::null_mut(), total, access, kind) }?;
        // A huge page would hold the untouched parts of stacks too. Kernels without huge pages refuse the advice.
        // Safety: these pages were just mapped.
        let _ = unsafe { mm::madvise(start, total, Advice::LinuxNoHugepage) };
        let first = StackPointer::new(start.expose_provenance()).ok_or(io::ErrorKind::OutOfMemory)?;
        let stack = |index| Stack { lowest: first.saturating_add(index * slot), bytes };
        let stacks: Vec<Stack> = (0..count).map(stack).collect();
        for stack in &stacks {
            guard(std::ptr::with_exposed_provenance_mut(stack.lowest.get()))?;
        }
        Ok(stacks)
    }

    /// Returns the addresses of the guard page.
    pub(crate) fn guard(&self) -> Range<usize> {
        self.lowest.get()..self.lowest.get() + page_size()
    }

    /// Returns the size in bytes, without the guard page.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        let start = std::ptr::with_exposed_provenance_mut(self.lowest.get());
        // It fails if the rest of the mapping would become one mapping too many. The slot then stays mapped.
        // Safety: the slot is this stack's own, and nothing runs on it any more.
        let _ = unsafe { mm::munmap(start, self.bytes + page_size()) };
    }
}

/// Makes a page inaccessible, without a mapping of its own if the system can.
fn guard(page: *mut c_void) -> io::Result<()> {
    // Safety: the page belongs to a new stack.
    if unsafe { libc::madvise(page, page_size(), GUARD_INSTALL) } == 0 {
        return Ok(());
    }
    guard_by_mapping(page)
}

/// Makes a page inaccessible, as a mapping of its own.
fn guard_by_mapping(page: *mut c_void) -> io::Result<()> {
    // Safety: the page belongs to a new stack.
    Ok(unsafe { mm::mprotect(page, page_size(), MprotectFlags::empty()) }?)
}

static POOL: Mutex<BTreeMap<usize, Vec<Stack>>> = Mutex::new(BTreeMap::new());

/// Returns a stack of at least `bytes` bytes, plus its guard page.
pub(crate) fn take_stack(bytes: usize) -> io::Result<Stack> {
    take_stacks(bytes, 1)?.pop().ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

/// Returns `count` stacks, or none.
pub(crate) fn take_stacks(bytes: usize, count: usize) -> io::Result<Vec<Stack>> {
    let bytes = bytes.clamp(LEAST, MAX).next_multiple_of(page_size());
    let mut stacks = {
        let mut pool = lock(&POOL);
        let pooled = pool.entry(bytes).or_default();
        pooled.split_off(pooled.len().saturating_sub(count))
    };
    let missing = count - stacks.len();
    stacks.extend(Stack::map(bytes, missing, guard).map_err(|cause| {
        let total = (bytes as u64).saturating_mul(missing as u64);
        io::Error::new(cause.kind(), explain_refusal(&cause, total))
    })?);
    Ok(stacks)
}

/// Keeps a stack for reuse.
pub(crate) fn give_stack(stack: Stack) {
    let mut pool = lock(&POOL);
    let pooled = pool.entry(stack.bytes).or_default();
    if pooled.len() < KEEP {
        pooled.push(stack);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use corosensei::stack::Stack as _;

    /// Returns the number of this process's mappings that overlap the addresses.
    fn mappings(addresses: Range<usize>) -> usize {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let ends = |line: &str| {
            let (low, high) = line.split(' ').next()?.split_once('-')?;
            Some((usize::from_str_radix(low, 16).ok()?, usize::from_str_radix(high, 16).ok()?))
        };
        let ends = maps.lines().filter_map(ends);
        ends.filter(|(low, high)| *low < addresses.end && addresses.start < *high).count()
    }

    /// Returns true if the kernel can read the byte for this process.
    fn readable(address: usize) -> bool {
        let (_reader, writer) = std::io::pipe().unwrap();
        let pointer = std::ptr::with_exposed_provenance(address);
        // Safety: the kernel checks the address.
        unsafe { libc::write(std::os::fd::AsRawFd::as_raw_fd(&writer), pointer, 1) == 1 }
    }

    /// Returns the number of mappings of 100 stacks, whose guard pages and other pages are what they should be.
    fn mappings_of_a_hundred(guard: fn(*mut c_void) -> io::Result<()>) -> usize {
        let stacks = Stack::map(LEAST, 100, guard).unwrap();
        for stack in &stacks {
            assert!(!readable(stack.guard().start) && !readable(stack.guard().end - 1));
            assert!(readable(stack.guard().end) && readable(stack.base().get() - 1));
            assert_eq!(stack.base().get() - stack.guard().end, LEAST);
        }
        let ends = |stack: &Stack| stack.limit().get()..stack.base().get();
        mappings(ends(&stacks[0]).start..ends(&stacks[99]).end)
    }

    #[test]
    fn a_hundred_stacks_take_one_mapping_where_the_system_can_and_two_hundred_elsewhere() {
        assert_eq!(mappings_of_a_hundred(guard_by_mapping), 200);
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        let numbers: Vec<u32> = release.split(['.', '-']).map_while(|number| number.parse().ok()).collect();
        assert_eq!(mappings_of_a_hundred(guard), if numbers >= vec![6, 13] { 1 } else { 200 });
    }

    #[test]
    fn a_dropped_stack_leaves_its_neighbours_mapped() {
        let mut stacks = Stack::map(LEAST, 3, guard).unwrap();
        let middle = stacks.remove(1).guard();
        assert!(!readable(middle.end));
        assert!(stacks.iter().all(|stack| readable(stack.guard().end)));
    }
}
