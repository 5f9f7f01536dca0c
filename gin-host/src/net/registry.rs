// SPDX-License-Identifier: MIT OR Apache-2.0
//! Things of this process that ranks find by a key.

use super::{Key, NetError};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A table of this process. It keeps nothing alive.
#[derive(Debug)]
pub(crate) struct Registry<T> {
    entries: Mutex<Option<HashMap<u64, Weak<T>>>>,
    next: AtomicU64,
}

impl<T> Registry<T> {
    pub(crate) const fn new() -> Self {
        Self { entries: Mutex::new(None), next: AtomicU64::new(1) }
    }

    /// Puts something into the table; the key names it as long as it lives.
    pub(crate) fn publish(&self, entry: &Arc<T>) -> Key {
        let token = self.next.fetch_add(1, Ordering::Relaxed);
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let entries = entries.get_or_insert_default();
        entries.retain(|_, entry| entry.strong_count() > 0);
        entries.insert(token, Arc::downgrade(entry));
        let mut key = u64::from(std::process::id()).to_le_bytes().to_vec();
        key.extend_from_slice(&token.to_le_bytes());
        Key(key)
    }

    /// What the key of `rank` names.
    pub(crate) fn find(&self, rank: u32, key: &Key) -> Result<Arc<T>, NetError> {
        let error = |reason: &str| NetError::Key { rank, reason: reason.to_owned() };
        let parts =
            key.0.split_first_chunk::<8>().and_then(|(process, token)| Some((process, token.first_chunk::<8>()?)));
        let Some((process, token)) = parts.filter(|_| key.0.len() == 16) else {
            return Err(error("it has the wrong length"));
        };
        if u64::from_le_bytes(*process) != u64::from(std::process::id()) {
            return Err(error("its memory is in another process"));
        }
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let entry =
            entries.as_ref().and_then(|entries| entries.get(&u64::from_le_bytes(*token))).and_then(Weak::upgrade);
        entry.ok_or_else(|| error("its memory is gone"))
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
            Err(NetError::Key { rank: 1, reason }) => reason,
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
