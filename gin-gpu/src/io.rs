// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory that a device shares with a NIC: doorbell pages that its kernels store to, and its own memory as a file.

use std::any::Any;
use std::fmt;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// Whatever pages stay mapped by.
pub type Keep = Arc<dyn Any + Send + Sync>;

/// Pages of this process that kernels of a device store to. Dropping it takes them away from the device, on a GPU when
/// no kernel runs any more; only then is what they stay mapped by let go.
pub trait MappedPages: Send + Sync + fmt::Debug {
    /// Where kernels find the first byte.
    fn address(&self) -> u64;
}

/// Pages that kernels find where the host does.
pub(super) struct SamePages {
    address: u64,
    _keep: Keep,
}

impl SamePages {
    pub(super) fn new(address: u64, keep: Keep) -> Self {
        Self { address, _keep: keep }
    }
}

impl fmt::Debug for SamePages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SamePages").field("address", &self.address).finish_non_exhaustive()
    }
}

impl MappedPages for SamePages {
    fn address(&self) -> u64 {
        self.address
    }
}

/// Memory of a device as a file that drivers share (DMA-BUF). Dropping it closes the file; a driver that has taken it
/// in keeps the memory by itself.
#[derive(Debug)]
pub struct MemoryFile {
    file: OwnedFd,
    offset: u64,
}

impl MemoryFile {
    /// A file in which the memory begins at byte `offset`.
    pub fn new(file: OwnedFd, offset: u64) -> Self {
        Self { file, offset }
    }

    /// Its number in this process.
    pub fn number(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Where in it the memory begins.
    pub fn offset(&self) -> u64 {
        self.offset
    }
}

/// The whole pages of `page` bytes that hold `bytes` bytes from `address` on: address of the first, length of all, and
/// where in them the bytes begin. `None` if they reach past the last address.
pub fn whole_pages(address: u64, bytes: u64, page: u64) -> Option<(u64, u64, u64)> {
    let offset = address % page;
    let end = address.checked_add(bytes)?.checked_next_multiple_of(page)?;
    Some((address - offset, end - (address - offset), offset))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_lie_where_it_is_said_in_the_fewest_pages() {
        assert_eq!(whole_pages(0x3000, 0x1000, 0x1000), Some((0x3000, 0x1000, 0)));
        assert_eq!(whole_pages(0x3000, 0x1001, 0x1000), Some((0x3000, 0x2000, 0)));
        assert_eq!(whole_pages(0x3100, 8, 0x1000), Some((0x3000, 0x1000, 0x100)));
        assert_eq!(whole_pages(0x3ff8, 16, 0x1000), Some((0x3000, 0x2000, 0xff8)));
        assert_eq!(whole_pages(0x3100, 8, 0x10000), Some((0, 0x10000, 0x3100)));
        assert_eq!(whole_pages(u64::MAX - 8, 16, 0x1000), None);
        assert_eq!(whole_pages(u64::MAX - 8, 4, 0x1000), None);
    }
}
