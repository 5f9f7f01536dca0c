// SPDX-License-Identifier: MIT OR Apache-2.0
//! The address and the secret that a rank needs to join.

use blake2::{Blake2s256, Digest};
use std::fmt;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::str::FromStr;

/// Most addresses that an id carries.
const MAX_ADDRESSES: usize = 16;

/// The first characters of every printed id: format 1.
const PREFIX: &str = "gin1:";

/// The key of a job: a process that has it may join. It is never printed.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Key(pub(super) [u8; 32]);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

impl Key {
    fn new(what: &str, secret: &[u8]) -> Self {
        let hash = Blake2s256::new().chain_update("gin bootstrap 1, ").chain_update(what).chain_update([0]);
        Self(hash.chain_update(secret).finalize().into())
    }
}

/// The secret of a job, which only its ranks know.
///
/// It is not printed, by `Debug` neither.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Key);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Fewest bytes of a secret that a person or a script makes up.
pub const MIN_SECRET: usize = 16;

impl Secret {
    /// A secret of the program's. An attacker that hears a connection can try guesses at leisure: it should come from
    /// random numbers (`openssl rand -hex 16`).
    ///
    /// # Errors
    /// Its length in bytes, if that is less than [`MIN_SECRET`].
    pub fn new(text: &[u8]) -> Result<Self, usize> {
        if text.len() < MIN_SECRET {
            return Err(text.len());
        }
        Ok(Self(Key::new("secret", text)))
    }

    /// No secret: any process that reaches the address can join and end the job. Traffic is encrypted all the same,
    /// against attackers that only listen.
    pub fn insecure() -> Self {
        Self(Key::new("insecure", &[]))
    }

    pub(super) fn key(&self) -> &Key {
        &self.0
    }

    /// Returns the secret of the job of the remaining ranks when these ranks are lost.
    pub(super) fn without(&self, lost: &[u32]) -> Self {
        let lost = lost.iter().flat_map(|rank| rank.to_le_bytes());
        Self(Key::new("without", &self.0.0.iter().copied().chain(lost).collect::<Vec<_>>()))
    }
}

/// Where a job meets, and its secret of 128 random bits.
///
/// The rank that listens makes it ([`Rendezvous::id`](super::Rendezvous::id)), and all others get it, by any way that
/// the program has. `Display` and `FromStr` are its printed form: **a process that reads it can join.** `Debug` hides
/// the secret.
///
/// ```
/// use gin_boot::UniqueId;
/// let id: UniqueId = "gin1:000102030405060708090a0b0c0d0e0f@192.0.2.7:4000,[2001:db8::7]:4000".parse().unwrap();
/// assert_eq!(id.addresses().len(), 2);
/// assert_eq!(id.to_string().parse(), Ok(id.clone()));
/// assert!(!format!("{id:?}").contains("0a0b0c0d"));
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct UniqueId {
    secret: [u8; 16],
    addresses: Vec<SocketAddr>,
}

/// Why a text is no id. It does not repeat the text, which may hold a secret.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IdError {
    /// It does not begin as ids of this version do.
    #[error("an id of a job begins with `{PREFIX}`; this one was cut, or made by another version of gin")]
    Prefix,
    /// The secret is not 32 hexadecimal digits.
    #[error("the secret of an id is 32 hexadecimal digits, followed by `@`; this id was cut or changed")]
    Secret,
    /// An address is none, or there are none or too many.
    #[error("an id has 1 to {MAX_ADDRESSES} addresses with ports, separated by commas; this id was cut or changed")]
    Address,
}

impl UniqueId {
    /// An id with a new secret.
    pub(super) fn random(addresses: Vec<SocketAddr>) -> Result<Self, getrandom::Error> {
        Ok(Self { secret: random()?, addresses })
    }

    /// Where the rank listens that made it.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    pub(super) fn secret(&self) -> Secret {
        Secret(Key::new("id", &self.secret))
    }
}

/// Random bytes.
pub(super) fn random() -> Result<[u8; 16], getrandom::Error> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}

/// Bytes as hexadecimal digits.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

impl fmt::Display for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}@", hex(&self.secret))?;
        for (index, address) in self.addresses.iter().enumerate() {
            write!(f, "{}{address}", if index == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UniqueId").field("addresses", &self.addresses).finish_non_exhaustive()
    }
}

impl FromStr for UniqueId {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        let rest = text.trim().strip_prefix(PREFIX).ok_or(IdError::Prefix)?;
        let (digits, addresses) = rest.split_once('@').ok_or(IdError::Secret)?;
        let digits = digits.as_bytes();
        if digits.len() != 32 {
            return Err(IdError::Secret);
        }
        let mut secret = [0; 16];
        for (byte, pair) in secret.iter_mut().zip(digits.chunks_exact(2)) {
            let digit = |digit: u8| char::from(digit).to_digit(16).ok_or(IdError::Secret);
            // Two digits of four bits.
            *byte = (digit(pair[0])? << 4 | digit(pair[1])?) as u8;
        }
        let mut found = Vec::new();
        for address in addresses.split(',') {
            if found.len() == MAX_ADDRESSES {
                return Err(IdError::Address);
            }
            let address: SocketAddr = address.parse().map_err(|_| IdError::Address)?;
            if address.port() == 0 {
                return Err(IdError::Address);
            }
            found.push(address);
        }
        Ok(Self { secret, addresses: found })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn texts_that_are_no_ids_are_refused_without_repeating_them() {
        let digits = "000102030405060708090a0b0c0d0e0f";
        let refused = |text: &str| text.parse::<UniqueId>().unwrap_err();
        assert_eq!(refused(""), IdError::Prefix);
        assert_eq!(refused("gin2:"), IdError::Prefix);
        assert_eq!(refused("gin1:"), IdError::Secret);
        assert_eq!(refused(&format!("gin1:{}@127.0.0.1:1", &digits[1..])), IdError::Secret);
        assert_eq!(refused(&format!("gin1:{}é@127.0.0.1:1", &digits[2..])), IdError::Secret);
        assert_eq!(refused(&format!("gin1:{digits}@")), IdError::Address);
        assert_eq!(refused(&format!("gin1:{digits}@127.0.0.1")), IdError::Address);
        assert_eq!(refused(&format!("gin1:{digits}@127.0.0.1:0")), IdError::Address);
        assert_eq!(refused(&format!("gin1:{digits}@{}", ["127.0.0.1:1"; 17].join(","))), IdError::Address);
        for error in [IdError::Prefix, IdError::Secret, IdError::Address] {
            assert!(!error.to_string().contains(digits));
        }
    }

    #[test]
    fn secrets_are_not_printed_and_short_ones_not_taken() {
        assert_eq!(Secret::new(b"fifteen bytes.."), Err(15));
        let secret = Secret::new(b"sixteen bytes...").unwrap();
        assert_eq!(format!("{secret:?} {:?}", secret.key()), "Secret(..) Key(..)");
        assert_ne!(secret, Secret::insecure());
        assert_ne!(secret, Secret::new(b"sixteen bytes..!").unwrap());
    }

    #[test]
    fn two_ids_have_different_secrets() {
        let address = vec![SocketAddr::from(([127, 0, 0, 1], 1))];
        let id = || UniqueId::random(address.clone()).unwrap();
        assert_ne!(id().secret, id().secret);
    }

    proptest! {
        #[test]
        fn ids_survive_being_printed(secret: [u8; 16], v4: ([u8; 4], u16), v6: ([u16; 8], u16)) {
            let addresses = vec![(v4.0, v4.1.max(1)).into(), (v6.0, v6.1.max(1)).into()];
            let id = UniqueId { secret, addresses };
            prop_assert_eq!(id.to_string().parse(), Ok(id));
        }

        #[test]
        fn any_text_is_an_id_or_refused(text in ".{0,80}", digits in "[0-9a-f]{30,34}") {
            let _ = text.parse::<UniqueId>();
            let _ = format!("gin1:{digits}@{text}").parse::<UniqueId>();
        }
    }
}
