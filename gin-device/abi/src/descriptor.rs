// SPDX-License-Identifier: MIT OR Apache-2.0
//! The 64-byte request that a kernel posts to the proxy.
//!
//! A descriptor has eight 8-byte words. Bit 0 of each is the *phase bit* of the queue: the code that stores the words
//! sets it, and this module leaves it 0. A reader therefore knows for each single word whether it belongs to the
//! expected round. That leaves 63 bits per word. Two fields of 64 bits have their top bit in word 0.
//!
//! | word | bits | field |
//! | --- | --- | --- |
//! | 0 | 1..5 | operation: 1 put, 2 put_value, 3 get, 4 signal, or quiet if there is no signal |
//! |   | 5 | hint: more requests follow soon |
//! |   | 6 | the signal is strong |
//! |   | 7..9 | signal: 0 none, 1 by id, 2 at a window address |
//! |   | 9 | raise the counter |
//! |   | 10..12 | log2 of the width of an immediate value |
//! |   | 12 | bit 63 of the amount that the signal is raised by |
//! |   | 13 | bit 63 of the immediate value |
//! |   | 14..38 | world rank of the peer |
//! |   | 38..62 | counter id |
//! | 1 | 1..64 | length in bytes |
//! | 2 | 1..64 | source offset in bytes, or bits 0..63 of the immediate value |
//! | 3 | 1..64 | destination offset in bytes |
//! | 4 | 1..25 | source window id |
//! |   | 25..49 | destination window id |
//! | 5 | 1..25 | signal id, or id of the signal's window |
//! | 6 | 1..64 | offset of the signal in its window, in bytes |
//! | 7 | 1..64 | bits 0..63 of the amount that the signal is raised by |
//!
//! While a trace is recorded, bits 32..64 of word 5 have the [time](with_time) of the post; the consumer takes it out.
//!
//! For a get, the source is the peer's window and the destination is the poster's window. Bits that no field uses are
//! zero.
//!
//! ```
//! use gin_abi::{Descriptor, RemoteSignal, SignalTarget, Transfer};
//!
//! let signal = RemoteSignal { target: SignalTarget::Id(3), amount: 1, strong: true };
//! let posted =
//!     Descriptor { peer: 7, transfer: Transfer::Nothing, signal: Some(signal), counter: None, more: false };
//! let words = posted.encode();
//! assert_eq!(words[0] >> 14 & 0xff_ffff, 7); // the peer
//! assert_eq!(Descriptor::decode(&words), Ok(posted));
//! assert!(Descriptor::decode(&[0; 8]).is_err());
//! ```

/// Number of 8-byte words in a descriptor.
pub const WORDS: usize = 8;

/// Largest offset or length that a descriptor can carry.
pub const MAX_OFFSET: u64 = (1 << 63) - 1;

/// Bit of word 5 where the time of the post begins: half a word, which costs a post fewer instructions than 39 bits.
const TIME_SHIFT: u32 = 32;

/// Largest time that a descriptor can carry, in nanoseconds: 4.3 seconds. Later times lose their upper bits.
pub const MAX_TIME: u64 = u64::MAX >> TIME_SHIFT;

/// Adds the time of the post to the words of [`Descriptor::encode`]: nanoseconds of the device's clock.
#[inline(always)]
pub const fn with_time(mut words: [u64; WORDS], ns: u32) -> [u64; WORDS] {
    words[5] = words[5] as u32 as u64 | (ns as u64) << TIME_SHIFT;
    words
}

/// Returns the words without the time that [`with_time`] has added, and the time modulo [`MAX_TIME`]` + 1`.
pub const fn without_time(mut words: [u64; WORDS]) -> ([u64; WORDS], u64) {
    let ns = words[5] >> TIME_SHIFT;
    words[5] &= (1 << TIME_SHIFT) - 1;
    (words, ns)
}

const ID_MASK: u64 = (1 << 24) - 1;

/// A byte offset in a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WindowOffset {
    /// Id of the window.
    pub window: u32,
    /// Offset in bytes.
    pub offset: u64,
}

/// The data that a descriptor moves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transfer {
    /// Writes `bytes` bytes from the poster's window to the peer's.
    Put {
        /// First byte in the poster's window.
        source: WindowOffset,
        /// First byte in the peer's window.
        destination: WindowOffset,
        /// Length in bytes; may be 0.
        bytes: u64,
    },
    /// Writes the low `1 << width_log2` bytes of `value` to the peer's window.
    PutValue {
        /// The value, little-endian.
        value: u64,
        /// 0, 1, 2 or 3 for 1, 2, 4 or 8 bytes.
        width_log2: u32,
        /// First byte in the peer's window.
        destination: WindowOffset,
    },
    /// Reads `bytes` bytes from the peer's window into the poster's.
    Get {
        /// First byte in the peer's window.
        source: WindowOffset,
        /// First byte in the poster's window.
        destination: WindowOffset,
        /// Length in bytes; may be 0.
        bytes: u64,
    },
    /// Moves nothing: the descriptor only raises a signal. Without a signal it is a quiet, which is complete once all
    /// earlier puts of this context to this peer have arrived.
    Nothing,
}

impl Transfer {
    /// Returns the number of bytes moved.
    pub const fn bytes(&self) -> u64 {
        match *self {
            Self::Put { bytes, .. } | Self::Get { bytes, .. } => bytes,
            Self::PutValue { width_log2, .. } => 1 << width_log2,
            Self::Nothing => 0,
        }
    }
}

/// The word that a signal raises.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SignalTarget {
    /// The peer's signal with this id, of the context that the descriptor is posted to.
    Id(u32),
    /// An 8-byte word in the peer's window.
    Address {
        /// Id of the window.
        window: u32,
        /// Byte offset in the window, a multiple of 8.
        offset: u64,
    },
}

/// A signal raised at the peer after the transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RemoteSignal {
    /// The word to raise.
    pub target: SignalTarget,
    /// Amount added to the word, modulo 2^64.
    pub amount: u64,
    /// True if the signal also covers all earlier puts of this context to this peer.
    pub strong: bool,
}

/// A decoded request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Descriptor {
    /// World rank of the peer.
    pub peer: u32,
    /// The data to move.
    pub transfer: Transfer,
    /// The signal to raise at the peer.
    pub signal: Option<RemoteSignal>,
    /// The poster's counter to raise by one once the source may be reused.
    pub counter: Option<u32>,
    /// Hint: more requests follow soon, so the network may wait for them.
    pub more: bool,
}

/// The reason why eight words are not a descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DescriptorError {
    /// Word 0 names an unknown operation.
    Operation(u32),
    /// Word 0 names an unknown kind of signal.
    Signal(u32),
    /// A signal on a get.
    Combination,
    /// Reserved bits are set in this word.
    Reserved(usize),
}

#[cfg(not(target_arch = "nvptx64"))]
impl core::fmt::Display for DescriptorError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Operation(code) => write!(f, "descriptor names unknown operation {code}; valid are 1 to 4"),
            Self::Signal(code) => write!(f, "descriptor names unknown signal kind {code}; valid are 0 to 2"),
            Self::Combination => f.write_str("descriptor is a get with a signal"),
            Self::Reserved(word) => write!(f, "descriptor has reserved bits set in word {word}"),
        }
    }
}

#[cfg(not(target_arch = "nvptx64"))]
impl core::error::Error for DescriptorError {}

impl Descriptor {
    /// Returns the quiet of a peer.
    #[inline(always)]
    #[must_use]
    pub const fn quiet(peer: u32) -> Self {
        Self { peer, transfer: Transfer::Nothing, signal: None, counter: None, more: false }
    }

    /// Returns whether this is a [`quiet`](Self::quiet).
    #[must_use]
    pub const fn is_quiet(&self) -> bool {
        matches!(self.transfer, Transfer::Nothing) && self.signal.is_none()
    }

    /// Returns the eight words, all phase bits 0.
    ///
    /// Ids and ranks must be below 2^24 and offsets below 2^63. Callers check them first: the host refuses to create
    /// more, and windows are shorter.
    #[inline(always)]
    pub const fn encode(&self) -> [u64; WORDS] {
        let mut w = [0u64; WORDS];
        let (operation, width, value_top) = match self.transfer {
            Transfer::Put { source, destination, bytes } => {
                w[1] = bytes << 1;
                w[2] = source.offset << 1;
                w[3] = destination.offset << 1;
                w[4] = (source.window << 1) as u64 | (destination.window as u64) << 25;
                (1, 0, 0)
            }
            Transfer::PutValue { value, width_log2, destination } => {
                w[1] = 1 << (width_log2 + 1);
                w[2] = value << 1;
                w[3] = destination.offset << 1;
                w[4] = (destination.window as u64) << 25;
                (2, width_log2 as u64 & 3, value >> 63)
            }
            Transfer::Get { source, destination, bytes } => {
                w[1] = bytes << 1;
                w[2] = source.offset << 1;
                w[3] = destination.offset << 1;
                w[4] = (source.window << 1) as u64 | (destination.window as u64) << 25;
                (3, 0, 0)
            }
            Transfer::Nothing => (4, 0, 0),
        };
        w[0] = operation << 1 | (self.more as u64) << 5 | width << 10 | value_top << 13 | (self.peer as u64) << 14;
        if let Some(counter) = self.counter {
            w[0] |= 1 << 9 | (counter as u64) << 38;
        }
        if let Some(signal) = self.signal {
            w[0] |= (signal.strong as u64) << 6 | (signal.amount >> 63) << 12;
            w[7] = signal.amount << 1;
            match signal.target {
                SignalTarget::Id(id) => {
                    w[0] |= 1 << 7;
                    w[5] = (id as u64) << 1;
                }
                SignalTarget::Address { window, offset } => {
                    w[0] |= 2 << 7;
                    w[5] = (window as u64) << 1;
                    w[6] = offset << 1;
                }
            }
        }
        w
    }

    /// Decodes eight words; phase bits are ignored.
    ///
    /// # Errors
    /// Fails on words that [`encode`](Self::encode) never produces, so that a stray store into the queue is noticed.
    pub const fn decode(w: &[u64; WORDS]) -> Result<Self, DescriptorError> {
        let (operation, signals) = (w[0] >> 1 & 15, w[0] >> 7 & 3);
        match signals {
            0 if w[0] >> 6 & 1 != 0 || w[0] >> 12 & 1 != 0 || (w[5] | w[6] | w[7]) >> 1 != 0 => {
                return Err(DescriptorError::Reserved(7));
            }
            1 | 2 if w[5] >> 25 != 0 => return Err(DescriptorError::Reserved(5)),
            1 if w[6] >> 1 != 0 => return Err(DescriptorError::Reserved(6)),
            0..=2 => {}
            kind => return Err(DescriptorError::Signal(kind as u32)),
        }
        if w[0] >> 62 != 0 || w[0] >> 9 & 1 == 0 && w[0] >> 38 & ID_MASK != 0 {
            return Err(DescriptorError::Reserved(0));
        }
        if w[4] >> 49 != 0 {
            return Err(DescriptorError::Reserved(4));
        }
        let width_log2 = w[0] >> 10 & 3;
        if operation != 2 && (width_log2 != 0 || w[0] >> 13 & 1 != 0) {
            return Err(DescriptorError::Reserved(0));
        }
        match operation {
            1 => {}
            2 if w[4] >> 1 & ID_MASK != 0 || w[1] >> 1 != 1 << width_log2 => return Err(DescriptorError::Reserved(1)),
            3 if signals != 0 => return Err(DescriptorError::Combination),
            4 if (w[1] | w[2] | w[3] | w[4]) >> 1 != 0 => return Err(DescriptorError::Reserved(1)),
            2..=4 => {}
            code => return Err(DescriptorError::Operation(code as u32)),
        }
        Ok(Self::read(w))
    }

    /// Reads the words of [`encode`](Self::encode); phase bits are ignored. Of other words, returns some descriptor.
    #[inline(always)]
    pub const fn read(w: &[u64; WORDS]) -> Self {
        let target = if w[0] >> 7 & 2 == 0 {
            SignalTarget::Id((w[5] >> 1) as u32)
        } else {
            SignalTarget::Address { window: (w[5] >> 1) as u32, offset: w[6] >> 1 }
        };
        let amount = w[7] >> 1 | (w[0] >> 12 & 1) << 63;
        let signal = RemoteSignal { target, amount, strong: w[0] >> 6 & 1 != 0 };
        let source = WindowOffset { window: (w[4] >> 1 & ID_MASK) as u32, offset: w[2] >> 1 };
        let destination = WindowOffset { window: (w[4] >> 25 & ID_MASK) as u32, offset: w[3] >> 1 };
        let bytes = w[1] >> 1;
        let transfer = match w[0] >> 1 & 15 {
            1 => Transfer::Put { source, destination, bytes },
            2 => {
                let value = source.offset | (w[0] >> 13 & 1) << 63;
                Transfer::PutValue { value, width_log2: (w[0] >> 10 & 3) as u32, destination }
            }
            3 => Transfer::Get { source, destination, bytes },
            _ => Transfer::Nothing,
        };
        Self {
            peer: (w[0] >> 14 & ID_MASK) as u32,
            transfer,
            signal: if w[0] >> 7 & 3 == 0 { None } else { Some(signal) },
            counter: if w[0] >> 9 & 1 == 0 { None } else { Some((w[0] >> 38 & ID_MASK) as u32) },
            more: w[0] >> 5 & 1 != 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn id() -> impl Strategy<Value = u32> {
        prop_oneof![Just(0), Just((1 << 24) - 1), 0..1u32 << 24]
    }

    fn offset() -> impl Strategy<Value = u64> {
        prop_oneof![Just(0), Just(MAX_OFFSET), 0..=MAX_OFFSET]
    }

    fn word() -> impl Strategy<Value = u64> {
        prop_oneof![Just(0), Just(1), Just(u64::MAX), Just(1 << 63), any::<u64>()]
    }

    fn transfer() -> impl Strategy<Value = Transfer> {
        prop_oneof![
            (id(), offset(), id(), offset(), offset()).prop_map(|(sw, so, dw, d, bytes)| Transfer::Put {
                source: WindowOffset { window: sw, offset: so },
                destination: WindowOffset { window: dw, offset: d },
                bytes
            }),
            (word(), 0..4u32, id(), offset()).prop_map(|(value, width_log2, dw, d)| Transfer::PutValue {
                value,
                width_log2,
                destination: WindowOffset { window: dw, offset: d }
            }),
            (id(), offset(), id(), offset(), offset()).prop_map(|(sw, so, dw, d, bytes)| Transfer::Get {
                source: WindowOffset { window: sw, offset: so },
                destination: WindowOffset { window: dw, offset: d },
                bytes
            }),
            Just(Transfer::Nothing),
        ]
    }

    fn signal() -> impl Strategy<Value = RemoteSignal> {
        let target = prop_oneof![
            id().prop_map(SignalTarget::Id),
            (id(), offset()).prop_map(|(window, offset)| SignalTarget::Address { window, offset }),
        ];
        (target, word(), any::<bool>()).prop_map(|(target, amount, strong)| RemoteSignal { target, amount, strong })
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(
            peer in id(), transfer in transfer(), signal in proptest::option::of(signal()),
            counter in proptest::option::of(id()), more: bool, time: u32,
        ) {
            let descriptor = Descriptor { peer, transfer, signal, counter, more };
            let words = descriptor.encode();
            prop_assert_eq!(without_time(with_time(words, time)), (words, u64::from(time)));
            prop_assert!(words.iter().all(|w| w & 1 == 0), "phase bits are left to the queue");
            match (transfer, signal) {
                (Transfer::Get { .. }, Some(_)) => {
                    prop_assert_eq!(Descriptor::decode(&words), Err(DescriptorError::Combination));
                }
                _ => prop_assert_eq!(Descriptor::decode(&words), Ok(descriptor)),
            }
            let phased = words.map(|w| w | 1);
            prop_assert_eq!(Descriptor::decode(&phased), Descriptor::decode(&words));
        }

        #[test]
        fn whatever_is_decoded_encodes_to_the_same_words(words: [u64; WORDS]) {
            if let Ok(descriptor) = Descriptor::decode(&words) {
                prop_assert_eq!(descriptor.encode(), words.map(|w| w & !1));
            }
        }
    }

    #[test]
    fn each_unused_bit_is_noticed() {
        let descriptor = Descriptor {
            peer: 1,
            transfer: Transfer::Put {
                source: WindowOffset { window: 0, offset: 0 },
                destination: WindowOffset { window: 0, offset: 0 },
                bytes: 8,
            },
            signal: None,
            counter: None,
            more: false,
        };
        let words = descriptor.encode();
        for word in 0..WORDS {
            for bit in 1..64 {
                let mut changed = words;
                changed[word] ^= 1 << bit;
                let Ok(read) = Descriptor::decode(&changed) else { continue };
                assert_eq!(read.encode(), changed, "word {word} bit {bit} was dropped in silence");
            }
        }
    }
}
