// SPDX-License-Identifier: MIT OR Apache-2.0
//! Objects of this process that ranks find by a key.

use crate::lock;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

/// The key by which other ranks find memory of a rank.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Key(pub Vec<u8>);

/// The error of a key of another rank that this rank cannot use.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("key of rank {rank} cannot be used: {reason}")]
pub struct KeyError {
    /// The rank.
    pub rank: u32,
    /// The reason.
    pub reason: String,
}

/// Bytes of a key.
pub const KEY_BYTES: usize = 24;

/// Returns the name of this process: random bits that no other process has, on any host.
pub fn process() -> [u8; 16] {
    static NAME: OnceLock<[u8; 16]> = OnceLock::new();
    *NAME.get_or_init(random)
}

/// Returns random bits, which cannot be guessed.
pub fn random() -> [u8; 16] {
    gin_boot::random().expect("the kernel gives random numbers after it has started up")
}

/// Returns a random initial packet sequence number for a connection, 24 bits. It lets a NIC recognise a late packet of
/// an earlier queue pair of the same number.
pub fn initial_psn() -> u32 {
    let [a, b, c, ..] = random();
    u32::from_le_bytes([a, b, c, 0])
}

/// The reason for which a key names no object of this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Missing {
    /// The key is too short.
    #[error("it has the wrong length")]
    Garbled,
    /// The key is of another process.
    #[error(
        "its memory is in another process, and in no file that could be mapped: allocate it by alloc_window or \
         Memory::shared"
    )]
    Elsewhere,
    /// The object is gone.
    #[error("its memory is gone")]
    Gone,
}

/// A table of objects of this process. It keeps none of them alive.
#[derive(Debug)]
pub struct Registry<T> {
    entries: Mutex<BTreeMap<u64, Weak<T>>>,
    next: AtomicU64,
}

impl<T> Registry<T> {
    #[expect(clippy::new_without_default, reason = "tables are statics")]
    pub const fn new() -> Self {
        Self { entries: Mutex::new(BTreeMap::new()), next: AtomicU64::new(1) }
    }

    /// Enters an object. The key, of [`KEY_BYTES`], names it as long as it lives.
    pub fn publish(&self, entry: &Arc<T>) -> Key {
        let token = self.next.fetch_add(1, Ordering::Relaxed);
        let mut entries = lock(&self.entries);
        entries.retain(|_, entry| entry.strong_count() > 0);
        entries.insert(token, Arc::downgrade(entry));
        Key([&process()[..], &token.to_le_bytes()].concat())
    }

    /// Returns the object of the key that these bytes begin with.
    pub fn look(&self, key: &[u8]) -> Result<Arc<T>, Missing> {
        let parts = key.split_first_chunk::<16>().and_then(|(process, token)| Some((process, token.first_chunk()?)));
        let (owner, token) = parts.ok_or(Missing::Garbled)?;
        if *owner != process() {
            return Err(Missing::Elsewhere);
        }
        self.get(u64::from_le_bytes(*token)).ok_or(Missing::Gone)
    }

    /// Returns the object with this number.
    pub fn get(&self, token: u64) -> Option<Arc<T>> {
        lock(&self.entries).get(&token)?.upgrade()
    }

    /// Returns the object of `rank`'s key.
    pub fn find(&self, rank: u32, key: &Key) -> Result<Arc<T>, KeyError> {
        let whole = if key.0.len() == KEY_BYTES { Ok(&key.0[..]) } else { Err(Missing::Garbled) };
        let found = whole.and_then(|key| self.look(key));
        found.map_err(|missing| KeyError { rank, reason: missing.to_string() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_names_a_thing_while_it_lives_and_nothing_else() {
        static TABLE: Registry<u32> = Registry::new();
        let thing = Arc::new(7);
        let key = TABLE.publish(&thing);
        assert_eq!(TABLE.find(1, &key), Ok(thing.clone()));
        let reason = |key: &Key| match TABLE.find(1, key) {
            Err(KeyError { rank: 1, reason }) => reason,
            other => panic!("{other:?}"),
        };
        drop(thing);
        assert!(reason(&key).contains("gone"));
        assert!(reason(&Key(key.0[..12].to_vec())).contains("length"));
        assert!(reason(&Key(Vec::new())).contains("length"));
        let mut elsewhere = key.clone();
        elsewhere.0[3] ^= 0x80;
        assert!(reason(&elsewhere).contains("process"));
    }
}
