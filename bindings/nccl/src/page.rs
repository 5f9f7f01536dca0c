// SPDX-License-Identifier: MIT OR Apache-2.0
//! Words that several processes read and write.

use gin_gpu::{Device, GpuError, Memory, MemoryKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Words that several processes read and write.
#[derive(Clone, Debug)]
pub(crate) struct Page(pub(crate) Arc<Memory>);

impl Page {
    pub(crate) fn new(device: &Arc<dyn Device>, words: u64) -> Result<Self, GpuError> {
        Memory::shared(device, MemoryKind::Pinned, words * 8).map(Self)
    }

    /// Returns the owner of the words.
    pub(crate) fn keep(&self) -> Arc<Memory> {
        self.0.clone()
    }

    pub(crate) fn address(&self, index: u64) -> u64 {
        assert!(index < self.0.bytes() / 8, "a word of the page");
        self.0.address() + index * 8
    }

    pub(crate) fn word(&self, index: u64) -> &AtomicU64 {
        let word = std::ptr::with_exposed_provenance_mut(self.address(index) as usize);
        // Safety: the page has the word, and all accesses are atomic.
        unsafe { AtomicU64::from_ptr(word) }
    }

    pub(crate) fn load(&self, index: u64) -> u64 {
        self.word(index).load(Ordering::Acquire)
    }

    pub(crate) fn store(&self, index: u64, value: u64) {
        self.word(index).store(value, Ordering::Release);
    }
}

/// The state of an entry whose memory is deregistered.
pub(crate) const GONE: u64 = 3;

/// The mark of a region whose rank has deregistered it.
#[derive(Debug)]
pub(crate) enum Gone {
    /// A rank of this process.
    Here(AtomicBool),
    /// A rank of another process: the word of the entry's state.
    There(Page, u64),
}

impl Gone {
    pub(crate) fn here() -> Self {
        Self::Here(AtomicBool::new(false))
    }

    pub(crate) fn is_set(&self) -> bool {
        match self {
            Self::Here(gone) => gone.load(Ordering::SeqCst),
            Self::There(page, state) => page.load(*state) == GONE,
        }
    }

    /// Refuses later requests of this process.
    pub(crate) fn set(&self) {
        if let Self::Here(gone) = self {
            gone.store(true, Ordering::SeqCst);
        }
    }
}
