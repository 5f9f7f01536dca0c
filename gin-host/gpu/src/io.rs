// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory that a device shares with a NIC: doorbell pages to which its kernels store, and its own memory as a file.

use std::any::Any;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// The value that keeps pages mapped.
pub type Keep = Arc<dyn Any + Send + Sync>;

/// Pages of this process to which kernels of a device store. Dropping them removes them from the device; on a GPU this
/// happens when no kernel runs any more. Only then is the [`Keep`] dropped.
#[derive(Debug)]
pub struct MappedPages {
    address: u64,
    _owner: Box<dyn Any + Send + Sync>,
}

impl MappedPages {
    /// Makes the value of pages that kernels find at `address` as long as `owner` is alive.
    pub fn new(address: u64, owner: impl Any + Send + Sync) -> Self {
        Self { address, _owner: Box::new(owner) }
    }

    /// Returns the address of the first byte for kernels.
    pub fn address(&self) -> u64 {
        self.address
    }
}

/// Memory of a device as a file that drivers share (DMA-BUF). Dropping it closes the file. A driver that has imported
/// the file keeps the memory by itself.
#[derive(Debug)]
pub struct MemoryFile {
    file: OwnedFd,
    offset: u64,
}

impl MemoryFile {
    /// Makes the value of a file in which the memory begins at byte `offset`.
    pub fn new(file: OwnedFd, offset: u64) -> Self {
        Self { file, offset }
    }

    /// Returns the descriptor's number in this process.
    pub fn number(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Returns the offset in the file at which the memory begins.
    pub fn offset(&self) -> u64 {
        self.offset
    }
}

/// Returns the whole pages of `page` bytes that contain `bytes` bytes from `address` on: the address of the first page,
/// the length of all, and the offset of the bytes in them. `None` if the pages reach past the last address.
///
/// ```
/// assert_eq!(gin_gpu::whole_pages(0x3100, 8, 0x1000), Some((0x3000, 0x1000, 0x100)));
/// ```
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
