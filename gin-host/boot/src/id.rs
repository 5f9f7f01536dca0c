// SPDX-License-Identifier: MIT OR Apache-2.0
//! The address and the secret with which a rank joins.

use blake2::{Blake2s256, Digest};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

/// The maximum number of addresses of an id.
pub(super) const MAX_ADDRESSES: usize = 16;

/// The first characters of every printed id of format 1.
const PREFIX: &str = "gin1:";

/// The secret of a job: a process that has it may join. No output shows it, `Debug` included.
#[derive(Clone, PartialEq, Eq, derive_more::Debug, Serialize, Deserialize)]
#[debug("Secret(..)")]
pub(super) struct Secret(pub(super) [u8; 32]);

/// The fewest bytes of a secret that a person or a script chooses.
pub(super) const MIN_SECRET: usize = 16;

impl Secret {
    fn derived(what: &str, secret: &[u8]) -> Self {
        let hash = Blake2s256::new().chain_update("gin bootstrap 1, ").chain_update(what).chain_update([0]);
        Self(hash.chain_update(secret).finalize().into())
    }

    /// Makes a secret from random numbers.
    pub(super) fn random() -> Result<Self, getrandom::Error> {
        Ok(Self::derived("random", &[random()?, random()?].concat()))
    }

    /// Returns the name of a plan for the job that follows the job with this secret: the ranks that it leaves out, and
    /// the ranks that join. Ranks with different plans do not meet.
    pub(super) fn plan(&self, lost: &[u32], joining: &[u32]) -> [u8; 32] {
        let count = lost.len() as u32;
        let numbers = [&[count], lost, joining].concat();
        let numbers = numbers.iter().flat_map(|number| number.to_le_bytes());
        Self::derived("plan", &self.0.iter().copied().chain(numbers).collect::<Vec<_>>()).0
    }
}

/// The part of an id from which the secret of a first job comes. The jobs that follow it have other secrets, and this
/// root: processes join them with it.
#[derive(Clone, PartialEq, Eq, derive_more::Debug)]
#[debug("Root(..)")]
pub(super) struct Root([u8; 16]);

impl Root {
    /// Makes the root from a text of the program. An attacker that records a connection can try guesses without limit,
    /// so the text should come from random numbers (`openssl rand -hex 16`).
    ///
    /// # Errors
    /// The length in bytes, if that is less than [`MIN_SECRET`].
    pub(super) fn new(text: &[u8]) -> Result<Self, usize> {
        if text.len() < MIN_SECRET { Err(text.len()) } else { Ok(Self::of(&Secret::derived("secret", text))) }
    }

    /// Returns the root that stands for no secret: any process that reaches the address can join and end the job.
    /// Traffic is encrypted nevertheless, against attackers that only listen.
    pub(super) fn insecure() -> Self {
        Self::of(&Secret::derived("insecure", &[]))
    }

    fn of(secret: &Secret) -> Self {
        Self(std::array::from_fn(|index| secret.0[index]))
    }

    pub(super) fn secret(&self) -> Secret {
        Secret::derived("id", &self.0)
    }
}

/// The addresses of rank 0, and the job's secret of 128 random bits.
///
/// Rank 0 makes it ([`Rendezvous::id`](crate::Rendezvous::id)). The other ranks get it by any way that the program has.
/// `Display` and `FromStr` are its printed form: **a process that reads it can join.** `Debug` hides the secret.
///
/// ```
/// use gin_boot::UniqueId;
/// let id: UniqueId = "gin1:000102030405060708090a0b0c0d0e0f@192.0.2.7:4000,[2001:db8::7]:4000".parse().unwrap();
/// assert_eq!(id.addresses().len(), 2);
/// assert_eq!(id.to_string().parse(), Ok(id.clone()));
/// assert!(!format!("{id:?}").contains("0a0b0c0d"));
/// ```
#[derive(Clone, PartialEq, Eq, derive_more::Debug)]
pub struct UniqueId {
    #[debug(skip)]
    pub(super) root: Root,
    addresses: Vec<SocketAddr>,
}

/// The reason why a text is no id. It does not repeat the text, which may hold a secret.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IdError {
    /// The text does not begin as ids of this version do.
    #[error("an id of a job begins with `{PREFIX}`; this one was cut, or made by another version of gin")]
    Prefix,
    /// The secret is not 32 hexadecimal digits.
    #[error("the secret of an id is 32 hexadecimal digits, followed by `@`; this id was cut or changed")]
    Secret,
    /// A text between commas is no address, or there are too many addresses.
    #[error("an id has 1 to {MAX_ADDRESSES} addresses with ports, separated by commas; this id was cut or changed")]
    Address,
}

impl UniqueId {
    /// Makes an id with a new secret.
    pub(super) fn random(addresses: Vec<SocketAddr>) -> Result<Self, getrandom::Error> {
        Ok(Self { root: Root(random()?), addresses })
    }

    /// Returns the addresses at which rank 0 listens.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Returns an id with the same secret and other addresses: where a job that runs [listens
    /// now](crate::TcpBootstrap::addresses). A rank of the job has it as [`TcpBootstrap::id`](crate::TcpBootstrap::id).
    ///
    /// # Errors
    /// [`IdError::Address`] unless there are 1 to 16 addresses with ports.
    pub fn with_addresses(&self, addresses: &[SocketAddr]) -> Result<Self, IdError> {
        let right = (1..=MAX_ADDRESSES).contains(&addresses.len()) && addresses.iter().all(|to| to.port() != 0);
        if right { Ok(Self::new(self.root.clone(), addresses.to_vec())) } else { Err(IdError::Address) }
    }

    pub(super) fn new(root: Root, addresses: Vec<SocketAddr>) -> Self {
        Self { root, addresses }
    }
}

/// Returns random bytes.
pub fn random() -> Result<[u8; 16], getrandom::Error> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}

impl fmt::Display for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{:032x}@", u128::from_be_bytes(self.root.0))?;
        for (index, address) in self.addresses.iter().enumerate() {
            write!(f, "{}{address}", if index == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

impl FromStr for UniqueId {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        let rest = text.trim().strip_prefix(PREFIX).ok_or(IdError::Prefix)?;
        let (digits, addresses) = rest.split_once('@').ok_or(IdError::Secret)?;
        let is_secret = digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
        let number = u128::from_str_radix(digits, 16).ok().filter(|_| is_secret);
        let root = Root(number.ok_or(IdError::Secret)?.to_be_bytes());
        let address = |text: &str| text.parse().ok().filter(|address: &SocketAddr| address.port() != 0);
        let addresses: Option<Vec<_>> = addresses.split(',').take(MAX_ADDRESSES + 1).map(address).collect();
        let addresses = addresses.filter(|found| found.len() <= MAX_ADDRESSES).ok_or(IdError::Address)?;
        Ok(Self { root, addresses })
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
        assert_eq!(Root::new(b"fifteen bytes.."), Err(15));
        let root = Root::new(b"sixteen bytes...").unwrap();
        assert_eq!(format!("{root:?} {:?}", root.secret()), "Root(..) Secret(..)");
        for other in [Root::insecure(), Root::new(b"sixteen bytes..!").unwrap()] {
            assert!(root != other && root.secret() != other.secret());
        }
    }

    #[test]
    fn two_ids_have_different_secrets() {
        let address = vec![SocketAddr::from(([127, 0, 0, 1], 1))];
        let id = || UniqueId::random(address.clone()).unwrap();
        assert_ne!(id().root, id().root);
    }

    proptest! {
        #[test]
        fn ids_survive_being_printed(secret: [u8; 16], v4: ([u8; 4], u16), v6: ([u16; 8], u16)) {
            let addresses = vec![(v4.0, v4.1.max(1)).into(), (v6.0, v6.1.max(1)).into()];
            let id = UniqueId { root: Root(secret), addresses };
            prop_assert_eq!(id.to_string().parse(), Ok(id));
        }

        #[test]
        fn any_text_is_an_id_or_refused(text in ".{0,80}", digits in "[0-9a-f]{30,34}") {
            let _ = text.parse::<UniqueId>();
            let _ = format!("gin1:{digits}@{text}").parse::<UniqueId>();
        }
    }
}
