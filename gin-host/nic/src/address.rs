// SPDX-License-Identifier: MIT OR Apache-2.0
//! The address of a queue pair, which ranks exchange.

use super::error::{NicError, NicPeer};
use super::hca::Link;
use gin_abi::mlx5::command::Mtu;
use gin_gpu::wire::{decode, encode};

/// The message that carries an address, after its version: true for Ethernet, the code of the MTU, and the other fields
/// in order.
type Sent = (bool, u64, u32, u32, u16, [u8; 16]);

/// The address of a queue pair, by which a peer connects to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Address {
    /// The kind of network of its port.
    pub link: Link,
    /// The maximum number of bytes of payload in a packet that it accepts.
    pub mtu: Mtu,
    /// The number of the queue pair.
    pub queue: u32,
    /// The packet sequence number of the first packet that it sends; 24 bits.
    pub initial_psn: u32,
    /// The local identifier of the port, on InfiniBand.
    pub lid: u16,
    /// The GID of the port.
    pub gid: [u8; 16],
}

impl Address {
    /// The version of the message.
    pub const VERSION: u32 = 3;

    /// Returns the message that carries the address.
    pub fn to_bytes(&self) -> Vec<u8> {
        let Self { link, mtu, queue, initial_psn, lid, gid } = *self;
        let sent: Sent = (link == Link::Ethernet, mtu.code(), queue, initial_psn, lid, gid);
        [&Self::VERSION.to_le_bytes()[..], &encode(&sent)].concat()
    }

    /// Reads the message of `peer`.
    ///
    /// # Errors
    /// [`NicError::Version`], [`NicError::Address`].
    pub fn from_bytes(bytes: &[u8], peer: &NicPeer) -> Result<Self, NicError> {
        let wrong = |reason| NicError::Address { peer: peer.clone(), reason };
        let (version, rest) = bytes.split_first_chunk().ok_or_else(|| wrong("it is too short"))?;
        let theirs = u32::from_le_bytes(*version);
        if theirs != Self::VERSION {
            return Err(NicError::Version { peer: peer.clone(), theirs, own: Self::VERSION });
        }
        let sent: Sent = decode(rest).ok_or_else(|| wrong("it is garbled"))?;
        let (is_ethernet, mtu, queue, initial_psn, lid, gid) = sent;
        let mtu = Mtu::from_code(mtu).ok_or_else(|| wrong("the MTU is unknown"))?;
        if queue == 0 || queue >= 1 << 24 {
            return Err(wrong("there is no such queue pair"));
        }
        if initial_psn >= 1 << 24 {
            return Err(wrong("there is no such packet number"));
        }
        let link = if is_ethernet { Link::Ethernet } else { Link::InfiniBand };
        Ok(Self { link, mtu, queue, initial_psn, lid, gid })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn peer() -> NicPeer {
        NicPeer { rank: 3, host: "far".to_owned(), port: 2 }
    }

    proptest! {
        #[test]
        fn an_address_survives_the_exchange(ethernet: bool, mtu in 0..Mtu::ALL.len(), queue in 1..1u32 << 24, initial_psn in 0..1u32 << 24, lid: u16, gid: [u8; 16]) {
            let link = if ethernet { Link::Ethernet } else { Link::InfiniBand };
            let address = Address { link, mtu: Mtu::ALL[mtu], queue, initial_psn, lid, gid };
            prop_assert_eq!(Address::from_bytes(&address.to_bytes(), &peer()), Ok(address));
        }

        #[test]
        fn no_bytes_make_the_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..40), version: bool) {
            let mut bytes = bytes;
            if version && bytes.len() >= 4 {
                bytes[..4].copy_from_slice(&Address::VERSION.to_le_bytes());
            }
            if let Ok(address) = Address::from_bytes(&bytes, &peer()) {
                prop_assert!(address.queue > 0 && address.queue < 1 << 24);
            }
        }
    }

    #[test]
    fn another_version_is_named_with_the_peer() {
        let error = Address::from_bytes(&[9, 0, 0, 0], &peer()).unwrap_err();
        let text = "rank 3 (host far, port 2) speaks version 9 of the exchange, this rank 3";
        assert_eq!(error.to_string(), text);
    }
}
