// SPDX-License-Identifier: MIT OR Apache-2.0
//! The address of a queue pair, which ranks exchange.

use super::error::{NicError, NicPeer};
use super::hca::Link;
use gin_abi::mlx5::command::Mtu;

const VERSION: u32 = Address::VERSION;
const BYTES: usize = Address::BYTES;

/// Where a queue pair is reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Address {
    /// The network of its port.
    pub link: Link,
    /// Most bytes of payload in a packet that it takes.
    pub mtu: Mtu,
    /// Number of the queue pair.
    pub queue: u32,
    /// Number of the first packet that it sends, 24 bits.
    pub initial_psn: u32,
    /// Local identifier of the port, on InfiniBand.
    pub lid: u16,
    /// GID of the port.
    pub gid: [u8; 16],
}

impl Address {
    /// Version of the exchange.
    pub const VERSION: u32 = 2;
    /// Length of an address as it is sent.
    pub const BYTES: usize = 32;

    /// As it is sent.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; BYTES];
        bytes[..4].copy_from_slice(&VERSION.to_le_bytes());
        bytes[4] = match self.link {
            Link::InfiniBand => 1,
            Link::Ethernet => 2,
        };
        bytes[5] = self.mtu.code() as u8;
        bytes[6..8].copy_from_slice(&self.lid.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.queue.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.initial_psn.to_le_bytes());
        bytes[16..].copy_from_slice(&self.gid);
        bytes
    }

    /// Reads what `peer` sent.
    ///
    /// # Errors
    /// [`NicError::Version`], [`NicError::Address`].
    pub fn from_bytes(bytes: &[u8], peer: &NicPeer) -> Result<Self, NicError> {
        let wrong = |reason| NicError::Address { peer: peer.clone(), reason };
        let theirs = bytes.first_chunk().map(|version| u32::from_le_bytes(*version));
        let theirs = theirs.ok_or_else(|| wrong("it is too short"))?;
        if theirs != VERSION {
            return Err(NicError::Version { peer: peer.clone(), theirs, own: VERSION });
        }
        let bytes: &[u8; BYTES] = bytes.try_into().map_err(|_| wrong("it has another length"))?;
        let link = match bytes[4] {
            1 => Link::InfiniBand,
            2 => Link::Ethernet,
            _ => return Err(wrong("the kind of network is unknown")),
        };
        let mtu = Mtu::from_code(bytes[5].into()).ok_or_else(|| wrong("the MTU is unknown"))?;
        let queue = u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]);
        if queue == 0 || queue >= 1 << 24 {
            return Err(wrong("there is no such queue pair"));
        }
        let initial_psn = u32::from_le_bytes([bytes[12], bytes[13], bytes[14], bytes[15]]);
        if initial_psn >= 1 << 24 {
            return Err(wrong("there is no such packet number"));
        }
        let mut gid = [0; 16];
        gid.copy_from_slice(&bytes[16..]);
        Ok(Self { link, mtu, queue, initial_psn, lid: u16::from_le_bytes([bytes[6], bytes[7]]), gid })
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
                bytes[..4].copy_from_slice(&VERSION.to_le_bytes());
            }
            if let Ok(address) = Address::from_bytes(&bytes, &peer()) {
                prop_assert!(address.queue > 0 && address.queue < 1 << 24);
            }
        }
    }

    #[test]
    fn another_version_is_named_with_the_peer() {
        let mut bytes = [0; BYTES];
        bytes[0] = 9;
        let error = Address::from_bytes(&bytes, &peer()).unwrap_err();
        let text = "rank 3 (host far, port 2) speaks version 9 of the exchange, this rank 2";
        assert_eq!(error.to_string(), text);
    }
}
