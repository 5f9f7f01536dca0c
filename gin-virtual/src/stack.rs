// SPDX-License-Identifier: MIT OR Apache-2.0
//! Stacks of coroutines, kept for reuse by the whole process.

use std::collections::BTreeMap;
use std::io;
use std::sync::Mutex;

use corosensei::stack::{DefaultStack, StackPointer};

use crate::lock::lock;

/// Largest number of stacks of one size that are kept.
const KEEP: usize = 8192;

/// Smallest stack in bytes: the code that unwinds a panic must fit.
const LEAST: usize = 16 << 10;
/// Largest stack in bytes. No address space has room for it, so the system refuses it, and adding the guard page cannot
/// overflow.
const MOST: usize = 1 << 60;

/// A stack that knows its requested size.
pub(crate) struct Stack {
    inner: DefaultStack,
    bytes: usize,
}

// Safety: forwards to `DefaultStack`.
unsafe impl corosensei::stack::Stack for Stack {
    fn base(&self) -> StackPointer {
        self.inner.base()
    }

    fn limit(&self) -> StackPointer {
        self.inner.limit()
    }
}

static POOL: Mutex<BTreeMap<usize, Vec<Stack>>> = Mutex::new(BTreeMap::new());

/// Returns a stack of at least `bytes` bytes, plus its guard page.
pub(crate) fn take_stack(bytes: usize) -> io::Result<Stack> {
    let bytes = bytes.clamp(LEAST, MOST);
    let pooled = lock(&POOL).get_mut(&bytes).and_then(Vec::pop);
    match pooled {
        Some(stack) => Ok(stack),
        None => Ok(Stack { inner: DefaultStack::new(bytes)?, bytes }),
    }
}

/// Returns `count` stacks, or none.
pub(crate) fn take_stacks(bytes: usize, count: usize) -> io::Result<Vec<Stack>> {
    let bytes = bytes.clamp(LEAST, MOST);
    let mut stacks = {
        let mut pool = lock(&POOL);
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
    let mut pool = lock(&POOL);
    let pooled = pool.entry(stack.bytes).or_default();
    if pooled.len() < KEEP {
        pooled.push(stack);
    }
}
