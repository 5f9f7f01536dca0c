// SPDX-License-Identifier: MIT OR Apache-2.0
//! The engine's access to memory.

/// Memory, addressed as the [tables](crate::tables) address it.
///
/// The engine passes only addresses of ranges that the tables name. The code that fills the tables guarantees that they
/// are valid while the engine is stepped. Therefore the methods are safe to call, and an implementation is `unsafe`
/// inside.
///
/// All accesses are relaxed, except the two fences. Other parties may access the memory at the same time.
pub trait Memory {
    /// Loads 4 bytes at a multiple of 4.
    fn load_u32(&mut self, address: u64) -> u32;
    /// Loads 8 bytes at a multiple of 8.
    fn load_u64(&mut self, address: u64) -> u64;
    /// Stores 8 bytes at a multiple of 8.
    fn store_u64(&mut self, address: u64, value: u64);
    /// Orders later loads behind earlier ones: they return values at least as new.
    fn fence_acquire(&mut self);
    /// Orders later stores behind earlier ones: an observer of a later store sees the earlier ones.
    fn fence_release(&mut self);
    /// Copies `bytes` bytes, at any addresses.
    fn copy(&mut self, to: u64, from: u64, bytes: u64);
    /// Stores the first `bytes` bytes of `words`, at most 28, at any address.
    fn store_words(&mut self, to: u64, words: [u32; 7], bytes: u32);
    /// Adds to 8 bytes at a multiple of 8 and returns the old value. As with a NIC, it need be atomic only with respect
    /// to other calls of the same engine.
    fn fetch_add(&mut self, address: u64, amount: u64) -> u64;
}
