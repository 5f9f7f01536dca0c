// SPDX-License-Identifier: MIT OR Apache-2.0
//! How the engine reaches memory.

/// Memory, by the addresses that stand in the [tables](crate::tables).
///
/// The engine passes only addresses of ranges that the tables say are there. Whoever fills the tables answers for it that
/// they are, as long as the engine is stepped; that is why the methods are safe to call and an implementation is `unsafe`
/// inside.
///
/// Everything is relaxed but the two fences; accesses of others may happen at the same time.
pub trait Memory {
    /// 4 bytes, at a multiple of 4.
    fn load_u32(&mut self, address: u64) -> u32;
    /// 8 bytes, at a multiple of 8.
    fn load_u64(&mut self, address: u64) -> u64;
    /// 8 bytes, at a multiple of 8.
    fn store_u64(&mut self, address: u64, value: u64);
    /// What is loaded from now on is at least as new as what was loaded before.
    fn fence_acquire(&mut self);
    /// What was stored until now is seen by whoever sees what is stored from now on.
    fn fence_release(&mut self);
    /// Copies `bytes` bytes, at any addresses.
    fn copy(&mut self, to: u64, from: u64, bytes: u64);
    /// Stores the first `bytes` bytes of `words`, at most 28, at any address.
    fn store_words(&mut self, to: u64, words: [u32; 7], bytes: u32);
    /// Adds to 8 bytes at a multiple of 8 and returns what was there. It need be atomic only to other calls of the same
    /// engine, as with a NIC.
    fn fetch_add(&mut self, address: u64, amount: u64) -> u64;
}
