// SPDX-License-Identifier: MIT OR Apache-2.0
//! Shared memory of a block.

use std::alloc::{Layout, alloc, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

use gin_device::exec::SharedKey;

use crate::grid::SHARED_LIMIT;

/// What dynamic shared memory holds at the start of a block: as on a GPU, nothing that a kernel may rely on.
const DYNAMIC_FILL: u8 = 0xcd;
const DYNAMIC_ALIGN: usize = 128;

struct Piece {
    key: usize,
    pointer: NonNull<u8>,
    layout: Layout,
}

impl Drop for Piece {
    fn drop(&mut self) {
        // Safety: `pointer` was allocated with this layout.
        unsafe { dealloc(self.pointer.as_ptr(), self.layout) }
    }
}

/// The shared memory of one block: its static pieces by key, and the dynamic one.
#[derive(Default)]
pub(crate) struct Pieces {
    pieces: Vec<Piece>,
    dynamic: Option<(Piece, usize)>,
    bytes: usize,
}

impl Pieces {
    /// A block with so many bytes of dynamic shared memory, which is within the limit.
    pub(crate) fn with_dynamic(bytes: usize) -> Self {
        let mut pieces = Pieces { bytes, ..Pieces::default() };
        if bytes > 0 {
            // Safety of `from_size_align_unchecked` is not needed: size and alignment are small and valid.
            let Ok(layout) = Layout::from_size_align(bytes, DYNAMIC_ALIGN) else { return Pieces::default() };
            // Safety: the size is not zero.
            let Some(pointer) = NonNull::new(unsafe { alloc(layout) }) else { handle_alloc_error(layout) };
            // Safety: `bytes` bytes were just allocated there.
            unsafe { pointer.write_bytes(DYNAMIC_FILL, bytes) };
            pieces.dynamic = Some((Piece { key: 0, pointer, layout }, bytes));
        }
        pieces
    }

    pub(crate) fn dynamic(&self) -> (*mut u8, usize) {
        match &self.dynamic {
            Some((piece, bytes)) => (piece.pointer.as_ptr(), *bytes),
            None => (NonNull::<u128>::dangling().as_ptr().cast(), 0),
        }
    }

    /// The piece of this key, zeroed when it is new.
    pub(crate) fn get(&mut self, SharedKey { key, bytes, align }: SharedKey) -> Result<*mut u8, String> {
        if let Some(piece) = self.pieces.iter().find(|piece| piece.key == key) {
            if piece.layout.size() != bytes.max(1) || piece.layout.align() != align {
                let (had, had_align) = (piece.layout.size(), piece.layout.align());
                return Err(format!(
                    "static shared memory of {bytes} bytes aligned to {align} was declared with {had} bytes aligned to {had_align} before"
                ));
            }
            return Ok(piece.pointer.as_ptr());
        }
        let total = self.bytes.saturating_add(bytes);
        if total > SHARED_LIMIT {
            let had = self.bytes;
            return Err(format!(
                "{total} bytes of shared memory in a block ({bytes} more than {had}), the limit is {SHARED_LIMIT}"
            ));
        }
        let Ok(layout) = Layout::from_size_align(bytes.max(1), align) else {
            return Err(format!("static shared memory of {bytes} bytes cannot be aligned to {align}"));
        };
        // Safety: the size is not zero.
        let Some(pointer) = NonNull::new(unsafe { alloc_zeroed(layout) }) else { handle_alloc_error(layout) };
        self.bytes = total;
        self.pieces.push(Piece { key, pointer, layout });
        Ok(pointer.as_ptr())
    }
}
