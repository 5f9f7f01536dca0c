// SPDX-License-Identifier: MIT OR Apache-2.0
//! Stacks of coroutines, kept for reuse by the whole process.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Mutex, PoisonError};

use corosensei::stack::{DefaultStack, StackPointer};

/// Stacks of one size that are kept, at most.
const KEEP: usize = 8192;

/// Smaller ones are made this large: the machinery that unwinds a panic must fit.
const LEAST: usize = 16 << 10;
/// No address space has room for more; the system refuses it, and the sum with the guard page does not overflow.
const MOST: usize = 1 << 60;

/// A stack that knows the size that was asked.
pub(crate) struct Stack {
    inner: DefaultStack,
    bytes: usize,
}

// Safety: all answers are those of `DefaultStack`.
unsafe impl corosensei::stack::Stack for Stack {
    fn base(&self) -> StackPointer {
        self.inner.base()
    }

    fn limit(&self) -> StackPointer {
        self.inner.limit()
    }
}

static POOL: Mutex<BTreeMap<usize, Vec<Stack>>> = Mutex::new(BTreeMap::new());

/// A stack of at least so many bytes, beside its guard page.
pub(crate) fn take_stack(bytes: usize) -> io::Result<Stack> {
    let bytes = bytes.clamp(LEAST, MOST);
    let pooled = POOL.lock().unwrap_or_else(PoisonError::into_inner).get_mut(&bytes).and_then(Vec::pop);
    match pooled {
        Some(stack) => Ok(stack),
        None => Ok(Stack { inner: DefaultStack::new(bytes)?, bytes }),
    }
}

/// So many stacks; all or none.
pub(crate) fn take_stacks(bytes: usize, count: usize) -> io::Result<Vec<Stack>> {
    let bytes = bytes.clamp(LEAST, MOST);
    let mut stacks = {
        let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
        let pooled = pool.entry(bytes).or_default();
        pooled.split_off(pooled.len().saturating_sub(count))
    };
    while stacks.len() < count {
        stacks.push(Stack { inner: DefaultStack::new(bytes)?, bytes });
    }
    Ok(stacks)
}

/// Keeps a stack for reuse.
pub(crate) fn give_stack(stack: Stack) {
    let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
    let pooled = pool.entry(stack.bytes).or_default();
    if pooled.len() < KEEP {
        pooled.push(stack);
    }
}
