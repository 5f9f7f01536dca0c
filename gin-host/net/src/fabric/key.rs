// SPDX-License-Identifier: MIT OR Apache-2.0
//! Keys that ranks exchange: one for endpoints, and one for each window.

use crate::{Key, KeyError, NetError};
use gin_gpu::wire::{decode, encode};
use serde::{Deserialize, Serialize};

/// First bytes of an endpoint's key. They name the version.
const HELLO: [u8; 4] = *b"gfh1";
/// First bytes of a window's key.
const WINDOW: [u8; 4] = *b"gfw2";

/// A rank's endpoint.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    /// Number of signals per context.
    pub(super) per_context: u32,
    /// Number of contexts.
    pub(super) contexts: u32,
    /// Name of the provider, for people.
    pub(super) provider: String,
    /// Number of the provider's protocol.
    pub(super) protocol: u32,
    /// Address of the endpoint, in the provider's format.
    pub(super) address: Vec<u8>,
    /// Random number that messages to this rank contain.
    pub(super) token: u64,
}

/// A rank's part of a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct PublishedPart {
    /// Place of the first byte, as operations name it: an address or 0.
    pub(super) base: u64,
    pub(super) bytes: u64,
    /// The memory is a GPU's.
    pub(super) in_gpu: bool,
    /// Key of the registered memory.
    pub(super) key: u64,
    /// It accepts signals at its addresses.
    pub(super) signals: bool,
}

fn refuse(rank: u32, reason: impl Into<String>) -> NetError {
    KeyError { rank, reason: reason.into() }.into()
}

/// Decodes the key of `rank` that begins with `kind`.
fn parse<'a, T: Deserialize<'a>>(rank: u32, kind: [u8; 4], key: &'a Key) -> Result<T, NetError> {
    if !key.0.starts_with(&kind) {
        return Err(refuse(rank, "this version of the network `fabric` did not make it"));
    }
    let sent: Option<([u8; 4], T)> = decode(&key.0);
    sent.map(|(_, sent)| sent).ok_or_else(|| refuse(rank, "it is garbled"))
}

impl Hello {
    /// Encodes the key of `rank` of `ranks`.
    pub(super) fn to_key(&self, rank: u32, ranks: u32) -> Key {
        Key(encode(&(HELLO, (rank, ranks, self))))
    }

    /// Decodes the key of `rank` of `ranks`, which must fit this rank's own.
    pub(super) fn from_key(rank: u32, ranks: u32, own: &Self, key: &Key) -> Result<Self, NetError> {
        let (of, world, hello): (u32, u32, Self) = parse(rank, HELLO, key)?;
        if (of, world) != (rank, ranks) {
            return Err(refuse(rank, "it belongs to another rank or world size"));
        }
        if hello.protocol != own.protocol {
            let reason = format!("it uses the provider {}, and this rank {}", hello.provider, own.provider);
            return Err(refuse(rank, reason));
        }
        if hello.contexts != own.contexts {
            return Err(refuse(rank, format!("it has {} contexts instead of {}", hello.contexts, own.contexts)));
        }
        Ok(hello)
    }
}

impl PublishedPart {
    /// Encodes the key.
    pub(super) fn to_key(self) -> Key {
        Key(encode(&(WINDOW, self)))
    }

    /// Decodes the key of `rank`.
    pub(super) fn from_key(rank: u32, key: &Key) -> Result<Self, NetError> {
        let part: Self = parse(rank, WINDOW, key)?;
        // Ensures that the sum of a base and an offset does not overflow.
        if part.base.checked_add(part.bytes).is_none() {
            return Err(refuse(rank, "its memory reaches past the last address"));
        }
        Ok(part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hello() -> impl Strategy<Value = Hello> {
        let numbers = (any::<u32>(), any::<u32>(), any::<u32>(), any::<u64>());
        (numbers, any::<Vec<u8>>()).prop_map(|((per_context, contexts, protocol, token), address)| Hello {
            per_context,
            contexts,
            provider: "tcp".to_owned(),
            protocol,
            address,
            token,
        })
    }

    proptest! {
        #[test]
        fn a_decoded_hello_equals_the_sent_one_and_fits_the_own(hello in hello(), rank in 0u32..9, cut in 1usize..40) {
            let mut key = hello.to_key(rank, 9);
            prop_assert_eq!(Hello::from_key(rank, 9, &hello, &key), Ok(hello.clone()));
            prop_assert!(Hello::from_key(rank + 1, 9, &hello, &key).is_err());
            let other = Hello { protocol: hello.protocol ^ 1, ..hello.clone() };
            prop_assert!(Hello::from_key(rank, 9, &other, &key).unwrap_err().to_string().contains("provider"));
            let other = Hello { contexts: hello.contexts ^ 1, ..hello.clone() };
            prop_assert!(Hello::from_key(rank, 9, &other, &key).unwrap_err().to_string().contains("contexts"));
            key.0.truncate(key.0.len().saturating_sub(cut));
            prop_assert!(Hello::from_key(rank, 9, &hello, &key).is_err());
        }

        #[test]
        fn a_decoded_part_equals_the_sent_one(base: u64, bytes: u64, key: u64, signals: bool, in_gpu: bool) {
            let part = PublishedPart { base, bytes, key, signals, in_gpu };
            let read = PublishedPart::from_key(3, &part.to_key());
            prop_assert_eq!(read.is_ok(), base.checked_add(bytes).is_some());
            prop_assert!(read.is_err() || read == Ok(part));
        }
    }
}
