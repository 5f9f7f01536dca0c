// SPDX-License-Identifier: MIT OR Apache-2.0
//! The pinned memory that copies need no pinned buffer for.

use crate::lock;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Mutex;

/// The pinned memory that is used here: starts, and the lengths of all that begins there. An import may begin where an
/// allocation does.
static PINNED: Mutex<BTreeMap<u64, Vec<u64>>> = Mutex::new(BTreeMap::new());

/// Returns whether all bytes are in pinned memory that is known here. Copies of other memory go through a pinned
/// buffer.
pub(super) fn is_pinned(address: u64, bytes: u64) -> bool {
    let pinned = lock(&PINNED);
    let before = pinned.range(..=address).next_back();
    let is_within =
        |start: u64, length: u64| length.checked_sub(address - start).is_some_and(|remaining| bytes <= remaining);
    before.is_some_and(|(start, lengths)| lengths.iter().any(|&length| is_within(*start, length)))
}

/// Notes that these bytes are pinned.
pub(super) fn know_pinned(address: u64, bytes: u64) {
    lock(&PINNED).entry(address).or_default().push(bytes);
}

/// Notes that these bytes may not be pinned any more.
pub(super) fn forget_pinned(address: u64, bytes: u64) {
    let mut pinned = lock(&PINNED);
    if let Entry::Occupied(mut entry) = pinned.entry(address) {
        let lengths = entry.get_mut();
        if let Some(index) = lengths.iter().position(|&length| length == bytes) {
            lengths.swap_remove(index);
        }
        if lengths.is_empty() {
            entry.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_pinned_if_one_allocation_holds_all_of_it() {
        let start = u64::MAX - (1 << 20);
        know_pinned(start, 64);
        for (address, bytes, expected) in [
            (start, 64, true),
            (start + 8, 56, true),
            (start + 64, 0, true),
            (start, 65, false),
            (start + 60, 5, false),
            (start - 1, 2, false),
            (start + 65, 0, false),
            (start + 8, u64::MAX, false),
        ] {
            assert_eq!(is_pinned(address, bytes), expected, "{bytes} bytes at {address:#x}");
        }
        forget_pinned(start, 64);
    }

    #[test]
    fn memory_stays_pinned_while_an_import_of_a_part_of_it_comes_and_goes() {
        let start = 0x7000_0000_0000;
        know_pinned(start, 4096);
        know_pinned(start, 16);
        assert!(is_pinned(start, 4096) && is_pinned(start + 8, 4088) && !is_pinned(start, 4097));
        forget_pinned(start, 16);
        assert!(is_pinned(start, 4096));
        forget_pinned(start, 4096);
        assert!(!is_pinned(start, 1));
    }
}
