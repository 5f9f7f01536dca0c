// SPDX-License-Identifier: MIT OR Apache-2.0
//! The bulk copies of a block that are not complete.

use gin_device::sys::bulk;
use gin_device::sys::tensor::TensorBox;

/// The source of a copy.
#[derive(Clone, Copy)]
pub(super) enum Source {
    /// The address of the bytes, which follow each other.
    Bytes(u64),
    Box(TensorBox),
}

/// A copy that is not complete.
pub(super) struct Copy {
    pub(super) serial: u64,
    /// Number of the thread in its block.
    pub(super) thread: u32,
    /// Number of its group, counted for each thread; none for a copy to shared memory.
    pub(super) group: Option<u64>,
    pub(super) to: u64,
    pub(super) from: Source,
    pub(super) bytes: u32,
    /// Address of the mbarrier of a copy to shared memory; 0 for others.
    pub(super) barrier: u64,
    /// The bytes, once they are read.
    pub(super) data: Option<Vec<u128>>,
}

/// The bulk copies of a block.
#[derive(Default)]
pub(super) struct Copies {
    pub(super) pending: Vec<Copy>,
    /// The number of ended groups of each thread that has any.
    groups: Vec<(u32, u64)>,
}

impl Copies {
    pub(super) fn ended_groups(&mut self, thread: u32) -> &mut u64 {
        let at = self.groups.iter().position(|(of, _)| *of == thread).unwrap_or_else(|| {
            self.groups.push((thread, 0));
            self.groups.len() - 1
        });
        &mut self.groups[at].1
    }

    /// Returns whether at most the last `left` ended groups of a thread are incomplete, or have not read all sources.
    pub(super) fn are_complete(&mut self, thread: u32, left: u32, sources: bool) -> bool {
        let first_left = self.ended_groups(thread).saturating_sub(left.into());
        !self.pending.iter().any(|copy| {
            let counts = copy.thread == thread && copy.group.is_some_and(|group| group < first_left);
            counts && !(sources && copy.data.is_some())
        })
    }

    /// Carries out what is left when the block ends. Its shared memory may belong to another block by then: sources
    /// that were not read give other bytes, and copies to it go nowhere.
    pub(super) fn end(&mut self) {
        for copy in self.pending.drain(..).filter(|copy| copy.group.is_some()) {
            let data = copy.data.unwrap_or_else(|| vec![u128::MAX / 5 * 4; copy.bytes as usize / 16]);
            // Safety: guaranteed by the kernel that started the copy.
            unsafe { bulk::copy(copy.to, data.as_ptr().expose_provenance() as u64, copy.bytes) };
        }
    }
}
