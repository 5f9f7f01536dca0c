// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies of memory that other threads may use at the same time.

use gin_device::exec::switch_point;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// The number of chunks of a copy. Another thread may be scheduled between two chunks. So a thread that looks without
/// waiting for a signal can see half of a copy.
const CHUNKS: u64 = 4;

/// Copies `bytes` bytes by relaxed atomic accesses, 8 bytes at a time where both addresses allow that. The ranges may
/// overlap.
///
/// Nothing orders the accesses. The code that announces the copy releases.
///
/// # Safety
/// - Both ranges are valid.
/// - Other threads access the destination meanwhile only by atomics.
pub unsafe fn copy_shared(destination: u64, source: u64, bytes: u64) {
    let chunk = bytes.div_ceil(CHUNKS).next_multiple_of(8).max(8);
    // Backwards if the destination begins within the source, so that overlapping bytes are read before they are
    // written.
    let backwards = destination > source && destination - source < bytes;
    let chunks = bytes.div_ceil(chunk);
    for number in 0..chunks {
        let offset = chunk * if backwards { chunks - 1 - number } else { number };
        if number > 0 {
            switch_point();
        }
        let length = chunk.min(bytes - offset);
        // Safety: part of the caller's ranges.
        unsafe { copy_quietly(destination + offset, source + offset, length) };
    }
}

/// Does the same as [`copy_shared`], without a point where another thread may be scheduled: for callers that hold a
/// lock.
///
/// # Safety
/// - As [`copy_shared`].
pub unsafe fn copy_quietly(destination: u64, source: u64, bytes: u64) {
    let backwards = destination > source && destination - source < bytes;
    // With an overlap of less than a word, one word would be read and written at once.
    let by_words = (destination ^ source).is_multiple_of(8) && destination.abs_diff(source) >= 8;
    let head = if by_words { (destination.wrapping_neg() & 7).min(bytes) } else { bytes };
    let words = (bytes - head) / 8;
    let tail = head + words * 8;
    let ends = |from, to| {
        for index in order(from, to, backwards) {
            // Safety: the caller's promise.
            unsafe { copy_byte(destination + index, source + index) };
        }
    };
    if backwards {
        ends(tail, bytes)
    } else {
        ends(0, head)
    }
    for index in order(0, words, backwards) {
        let at = head + index * 8;
        // Safety: the caller's promise; both are multiples of 8.
        unsafe {
            let value = AtomicU64::from_ptr((source + at) as usize as *mut u64).load(Ordering::Relaxed);
            AtomicU64::from_ptr((destination + at) as usize as *mut u64).store(value, Ordering::Relaxed);
        }
    }
    if backwards { ends(0, head) } else { ends(tail, bytes) }
}

fn order(from: u64, to: u64, backwards: bool) -> impl Iterator<Item = u64> {
    (from..to).map(move |index| if backwards { to - 1 - (index - from) } else { index })
}

unsafe fn copy_byte(destination: u64, source: u64) {
    // Safety: the caller's promise.
    unsafe {
        let value = AtomicU8::from_ptr(source as usize as *mut u8).load(Ordering::Relaxed);
        AtomicU8::from_ptr(destination as usize as *mut u8).store(value, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_shared_copy_moves_what_memmove_moves(
            source in 0usize..64, destination in 0usize..64, bytes in 0usize..200,
        ) {
            let mut words = [0u64; 40];
            let memory: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
            for (index, byte) in memory.iter_mut().enumerate() {
                *byte = index as u8 ^ 0x5a;
            }
            let mut expected = memory.to_vec();
            expected.copy_within(source..source + bytes, destination);
            let base = memory.as_mut_ptr() as u64;
            // Safety: 64 + 200 bytes are less than the array has.
            unsafe { copy_shared(base + destination as u64, base + source as u64, bytes as u64) };
            prop_assert_eq!(&memory[..], &expected[..]);
        }
    }
}
