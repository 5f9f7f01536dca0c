// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a signal looks like on its way: it arrives behind the data that it covers, and the receiver's proxy raises it.

use gin_abi::{RemoteSignal, SignalTarget};

/// Bytes of a message.
pub(super) const BYTES: usize = 32;

const ID: u32 = 1;
const ADDRESS: u32 = 2;

/// A signal as it is sent.
pub(super) fn to_bytes(signal: &RemoteSignal) -> [u8; BYTES] {
    let (kind, number, offset) = match signal.target {
        SignalTarget::Id(id) => (ID, id, 0),
        SignalTarget::Address { window, offset } => (ADDRESS, window, offset),
    };
    let mut bytes = [0; BYTES];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[4..8].copy_from_slice(&number.to_le_bytes());
    bytes[8..16].copy_from_slice(&offset.to_le_bytes());
    bytes[16..24].copy_from_slice(&signal.amount.to_le_bytes());
    bytes
}

/// Which word is raised, and by how much; `None` if it is no signal.
pub(super) fn from_bytes(bytes: &[u8; BYTES]) -> Option<(SignalTarget, u64)> {
    let word = |at: usize| bytes[at..].first_chunk().map(|word| u64::from_le_bytes(*word));
    let (first, offset, amount, last) = (word(0)?, word(8)?, word(16)?, word(24)?);
    let number = (first >> 32) as u32;
    let target = match first as u32 {
        ID if offset == 0 => SignalTarget::Id(number),
        ADDRESS => SignalTarget::Address { window: number, offset },
        _ => return None,
    };
    (last == 0).then_some((target, amount))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_signal_survives_the_way(id: u32, offset: u64, amount: u64, by_address: bool, strong: bool) {
            let target = if by_address { SignalTarget::Address { window: id, offset } } else { SignalTarget::Id(id) };
            let bytes = to_bytes(&RemoteSignal { target, amount, strong });
            prop_assert_eq!(from_bytes(&bytes), Some((target, amount)));
        }

        #[test]
        fn other_bytes_are_no_signal_or_the_same_one(bytes: [u8; BYTES], kind in 0u32..4) {
            let mut bytes = bytes;
            bytes[..4].copy_from_slice(&kind.to_le_bytes());
            bytes[24..].fill(0);
            if let Some((target, amount)) = from_bytes(&bytes) {
                prop_assert_eq!(to_bytes(&RemoteSignal { target, amount, strong: true }), bytes);
            }
            bytes[31] = 1;
            prop_assert_eq!(from_bytes(&bytes), None);
        }
    }
}
