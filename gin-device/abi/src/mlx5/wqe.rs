// SPDX-License-Identifier: MIT OR Apache-2.0
//! Work-queue entries.
//!
//! A send queue is a ring of 64-byte slots. An entry takes one slot, in up to four [`Segment`]s of 16 bytes:
//!
//! | operation | code | segments |
//! | --- | --- | --- |
//! | [`nop`] | 0x00 | control |
//! | [`write()`] | 0x08 | control, remote address, data |
//! | [`write_value`], [`write_words`] | 0x08 | control, remote address, 1 or 2 of inline data |
//! | [`wait`] | 0x0f | control, wait |
//! | [`read`] | 0x10 | control, remote address, data |
//! | [`fetch_add`] | 0x12 | control, remote address, atomic, data (destination of the old value) |
//! | [`dump`] | 0x23 | control, data |
//!
//! Bytes of a segment; all numbers are big-endian, and bytes not listed are zero:
//!
//! | segment | bytes |
//! | --- | --- |
//! | control | 0: modifier of the operation, 1..3: index of the entry, 3: operation, 4..7: queue pair, 7: number of segments, 8: signature, 11: [`Flags`], 12..16: immediate |
//! | remote address | 0..8: address, 8..12: key |
//! | data | 0..4: length (31 bits; 0 stands for 2^31), 4..8: key, 8..16: address |
//! | inline data | 0..4: 2^31 + length, then the bytes |
//! | atomic | 0..8: amount to add, 8..16: zero |
//! | wait | 8..12: index of a completion, 12..16: completion queue |
//!
//! The encoders return the segments of one entry, as words to be stored 16 bytes at a time. Stale segments behind them
//! in the slot may stay, because a device ignores them. [`Entry::read`] decodes a slot as a device does.
//!
//! ```
//! use gin_abi::mlx5::be::Be32;
//! use gin_abi::mlx5::wqe::{self, Entry, Flags, Post, QueueNumber, Remote, Slot, Work};
//!
//! let post = Post { index: 7, queue: QueueNumber::new(42), flags: Flags::COMPLETION };
//! let to = Remote { address: 0x1000, key: Be32::new(0x77) };
//! let mut slot = Slot::default();
//! slot[..3].copy_from_slice(&wqe::write_value(post, to, 0x0102, 2));
//! let entry = Entry::read(&slot, 7, 42).unwrap();
//! assert!(entry.flags.completion());
//! assert!(matches!(entry.work, Work::WriteInline { bytes: 2, words: [0x0102, ..], .. }));
//! assert!(Entry::read(&slot, 8, 42).is_err()); // another entry
//! ```

use super::be::{Be32, Be64};
use bytemuck::{Pod, Zeroable};

/// Size of a slot in bytes.
pub const SLOT_BYTES: u64 = 64;
/// Number of segments of a slot.
pub const SLOT_SEGMENTS: usize = 4;
/// Largest number of bytes that one data segment can name.
pub const MAX_DATA_BYTES: u32 = (1 << 31) - 1;
/// Largest number of bytes that [`write_words`] carries.
pub const MAX_INLINE_BYTES: u32 = 28;

/// Bit of the length that marks inline data.
const INLINE: u32 = 1 << 31;

/// 16 bytes of an entry, as two words of memory.
#[repr(C, align(16))]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
pub struct Segment {
    /// Bytes 0 to 7 and 8 to 15.
    pub words: [u64; 2],
}

const _: () = assert!(size_of::<Segment>() * SLOT_SEGMENTS == SLOT_BYTES as usize && align_of::<Segment>() == 16);

/// A slot of a send queue.
pub type Slot = [Segment; SLOT_SEGMENTS];

impl Segment {
    #[inline(always)]
    const fn of_halves(halves: [u32; 4]) -> Self {
        Self { words: [halves[0] as u64 | (halves[1] as u64) << 32, halves[2] as u64 | (halves[3] as u64) << 32] }
    }

    /// Returns the big-endian 32-bit number at byte `4 * INDEX`.
    #[inline(always)]
    const fn be32<const INDEX: usize>(self) -> u32 {
        const { assert!(INDEX < 4) };
        Be32::from_memory((self.words[INDEX / 2] >> (INDEX % 2 * 32)) as u32).get()
    }

    /// Returns the big-endian 64-bit number at byte `8 * INDEX`.
    #[inline(always)]
    const fn be64<const INDEX: usize>(self) -> u64 {
        const { assert!(INDEX < 2) };
        Be64::from_memory(self.words[INDEX]).get()
    }
}

/// Number of a queue pair, in the form used in control segments and doorbells.
///
/// ```
/// use gin_abi::mlx5::wqe::QueueNumber;
/// let queue = QueueNumber::new(0x0102_03);
/// assert_eq!(bytemuck::bytes_of(&queue), [1, 2, 3, 0]);
/// assert_eq!(QueueNumber::from_memory(queue.memory()).get(), 0x0102_03);
/// ```
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
pub struct QueueNumber(Be32);

impl QueueNumber {
    /// Converts a number of 24 bits; higher bits are dropped.
    #[inline(always)]
    pub const fn new(number: u32) -> Self {
        Self(Be32::new(number << 8))
    }

    /// Wraps the value that a native load of the memory returns.
    #[inline(always)]
    pub const fn from_memory(raw: u32) -> Self {
        Self(Be32::from_memory(raw))
    }

    /// Returns the value that a native store must write to memory.
    #[inline(always)]
    pub const fn memory(self) -> u32 {
        self.0.memory()
    }

    /// Returns the number.
    #[inline(always)]
    pub const fn get(self) -> u32 {
        self.0.get() >> 8
    }

    /// Returns the queue number's word with an entry's number of segments in its last byte.
    #[inline(always)]
    pub const fn with_segments(self, count: u32) -> Be32 {
        Be32::from_memory(self.0.memory() | count << 24)
    }
}

/// Completion and ordering requests of an entry.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Flags(pub u8);

impl Flags {
    /// No requests: the entry produces a completion only if it fails.
    pub const NONE: Self = Self(0);
    /// Produces a completion also on success.
    pub const COMPLETION: Self = Self(2 << 2);
    /// Begins only after all earlier reads and atomics of the queue pair are complete.
    pub const FENCE: Self = Self(4 << 5);
    /// Begins only after all earlier local operations of the queue pair are complete.
    pub const LOCAL_FENCE: Self = Self(1 << 5);

    /// Combines two sets of flags.
    #[inline(always)]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns true if the entry produces a completion on success.
    #[inline(always)]
    pub const fn completion(self) -> bool {
        self.0 >> 2 & 3 >= 2
    }

    /// Returns the fence mode, which orders the entry behind earlier ones; 0 for no order.
    #[inline(always)]
    pub const fn fence(self) -> u8 {
        self.0 >> 5
    }
}

/// Queue pair, index and flags of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Post {
    /// Index of the entry, counted since the queue was created. Entries hold the low 16 bits.
    pub index: u64,
    /// The queue pair.
    pub queue: QueueNumber,
    /// Completion and ordering requests.
    pub flags: Flags,
}

/// Memory at the other end of the connection.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Remote {
    /// Address in the region of the key.
    pub address: u64,
    /// The region's key for remote access.
    pub key: Be32,
}

/// Memory at this end.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Local {
    /// Address in the region of the key.
    pub address: u64,
    /// The region's key for local access.
    pub key: Be32,
    /// Length in bytes, 1 to [`MAX_DATA_BYTES`]. 0 would stand for 2^31, so a poster that moves nothing posts a
    /// [`nop`].
    pub bytes: u32,
}

/// Operation codes of entries.
pub mod opcode {
    /// [`nop`](super::nop)
    pub const NOP: u32 = 0x00;
    /// [`write()`](super::write())
    pub const WRITE: u32 = 0x08;
    /// [`wait`](super::wait)
    pub const WAIT: u32 = 0x0f;
    /// [`read`](super::read)
    pub const READ: u32 = 0x10;
    /// [`fetch_add`](super::fetch_add)
    pub const FETCH_ADD: u32 = 0x12;
    /// [`dump`](super::dump)
    pub const DUMP: u32 = 0x23;
}

#[inline(always)]
const fn control(post: Post, operation: u32, segments: u32) -> Segment {
    let head = Be32::new((post.index as u32 & 0xffff) << 8 | operation);
    Segment::of_halves([head.memory(), post.queue.with_segments(segments).memory(), (post.flags.0 as u32) << 24, 0])
}

impl Remote {
    #[inline(always)]
    const fn segment(self) -> Segment {
        Segment { words: [Be64::new(self.address).memory(), self.key.memory() as u64] }
    }
}

impl Local {
    #[inline(always)]
    const fn segment(self) -> Segment {
        let length = Be32::new(self.bytes & MAX_DATA_BYTES);
        let first = length.memory() as u64 | (self.key.memory() as u64) << 32;
        Segment { words: [first, Be64::new(self.address).memory()] }
    }
}

/// Encodes an entry that does nothing and completes in its turn.
#[inline(always)]
pub const fn nop(post: Post) -> [Segment; 1] {
    [control(post, opcode::NOP, 1)]
}

/// Encodes an entry that copies local memory to remote memory.
#[inline(always)]
pub const fn write(post: Post, to: Remote, from: Local) -> [Segment; 3] {
    [control(post, opcode::WRITE, 3), to.segment(), from.segment()]
}

/// Encodes an entry that stores the low `bytes` bytes of `value`, 1 to 8, to remote memory, least significant first.
#[inline(always)]
pub const fn write_value(post: Post, to: Remote, value: u64, bytes: u32) -> [Segment; 3] {
    let value = value & (u64::MAX >> (64u32.wrapping_sub(bytes.wrapping_mul(8)) & 63));
    let length = Be32::new(INLINE | bytes).memory();
    let inline = Segment::of_halves([length, value as u32, (value >> 32) as u32, 0]);
    [control(post, opcode::WRITE, 3), to.segment(), inline]
}

/// Encodes an entry that stores the first `bytes` bytes of `words`, 13 to [`MAX_INLINE_BYTES`], to remote memory. Each
/// word has the byte order of a native store.
///
/// The rest of `words` goes into the entry, and the device ignores it.
#[inline(always)]
pub const fn write_words(post: Post, to: Remote, words: [u32; 7], bytes: u32) -> [Segment; 4] {
    let length = Be32::new(INLINE | bytes).memory();
    let first = Segment::of_halves([length, words[0], words[1], words[2]]);
    [control(post, opcode::WRITE, 4), to.segment(), first, Segment::of_halves([words[3], words[4], words[5], words[6]])]
}

/// Encodes an entry that copies remote memory to local memory.
#[inline(always)]
pub const fn read(post: Post, from: Remote, to: Local) -> [Segment; 3] {
    [control(post, opcode::READ, 3), from.segment(), to.segment()]
}

/// Encodes an entry that adds to 8 bytes of remote memory, at an address that is a multiple of 8. The old value goes to
/// `old`, 8 bytes long.
#[inline(always)]
pub const fn fetch_add(post: Post, word: Remote, amount: u64, old: Local) -> [Segment; 4] {
    let atomic = Segment { words: [Be64::new(amount).memory(), 0] };
    [control(post, opcode::FETCH_ADD, 4), word.segment(), atomic, old.segment()]
}

/// Encodes an entry that waits for a completion.
///
/// It begins only once the completion queue `queue` holds completion number `index`, counted from 0 since the queue was
/// created. Later entries of its queue pair begin only after it. Numbers are compared on a circle of 2^24.
///
/// NCCL's GIN and DOCA GPUNetIO use `index` as the number of a completion, not a count, and so does gin. The open
/// reference manual does not define it.
#[inline(always)]
pub const fn wait(post: Post, queue: u32, index: u32) -> [Segment; 2] {
    let wait = Segment::of_halves([0, 0, Be32::new(index).memory(), Be32::new(queue).memory()]);
    [control(post, opcode::WAIT, 2), wait]
}

/// Encodes an entry that reads local memory and drops the data. Once it completes, all earlier writes of the NIC to
/// that memory's device are in place.
#[inline(always)]
pub const fn dump(post: Post, from: Local) -> [Segment; 2] {
    [control(post, opcode::DUMP, 2), from.segment()]
}

/// The work of an entry, decoded as a device does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Work {
    /// Nothing.
    Nop,
    /// Copies local memory to remote memory. `bytes` is 64 bits wide, since a length of 0 in the entry stands for 2^31.
    Write {
        /// Destination.
        to: Remote,
        /// Source address and key; `bytes` holds its length.
        from: Local,
        /// Length in bytes.
        bytes: u64,
    },
    /// Stores bytes of the entry to remote memory.
    WriteInline {
        /// Destination.
        to: Remote,
        /// Length in bytes, at most [`MAX_INLINE_BYTES`].
        bytes: u32,
        /// The data, in the byte order of native stores; zero behind the last byte.
        words: [u32; 7],
    },
    /// Copies remote memory to local memory.
    Read {
        /// Source.
        from: Remote,
        /// Destination address and key; `bytes` holds its length.
        to: Local,
        /// Length in bytes.
        bytes: u64,
    },
    /// Adds to remote memory.
    FetchAdd {
        /// The word.
        word: Remote,
        /// Amount to add.
        amount: u64,
        /// Destination of the old value.
        old: Local,
    },
    /// Waits for a completion.
    Wait {
        /// Completion queue.
        queue: u32,
        /// Number of the completion.
        index: u32,
    },
    /// Reads local memory and drops the data.
    Dump {
        /// Source address and key; `bytes` holds its length.
        from: Local,
        /// Length in bytes.
        bytes: u64,
    },
}

/// The reason why a slot holds no entry that a device can execute.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum EntryError {
    /// The entry has another index than the slot should hold: the device is a round ahead, or the entry was never
    /// written.
    Index,
    /// The entry names another queue pair.
    Queue,
    /// The operation or its modifier is unknown.
    Operation,
    /// The operation does not have that number of segments, or they do not hold that much inline data.
    Segments,
    /// A reserved byte is not zero.
    Reserved,
}

/// A decoded entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// Completion and ordering requests.
    pub flags: Flags,
    /// The work.
    pub work: Work,
}

impl Segment {
    #[inline(always)]
    const fn remote(self) -> Result<Remote, EntryError> {
        if self.words[1] >> 32 != 0 {
            return Err(EntryError::Reserved);
        }
        Ok(Remote { address: self.be64::<0>(), key: Be32::from_memory(self.words[1] as u32) })
    }

    /// Returns the memory of a data segment, with the length that the device applies.
    #[inline(always)]
    const fn local(self) -> Result<(Local, u64), EntryError> {
        let bytes = self.be32::<0>();
        if bytes > MAX_DATA_BYTES {
            return Err(EntryError::Segments);
        }
        let key = Be32::from_memory((self.words[0] >> 32) as u32);
        let length = if bytes == 0 { 1 << 31 } else { bytes as u64 };
        Ok((Local { address: self.be64::<1>(), key, bytes }, length))
    }
}

impl Entry {
    /// Returns the number of segments in a slot's control segment. [`read`](Self::read) reports 0, and numbers above
    /// [`SLOT_SEGMENTS`], as errors.
    #[inline(always)]
    pub const fn segments(slot: &Slot) -> u32 {
        slot[0].be32::<1>() & 0x3f
    }

    /// Decodes the slot that should hold entry `index` of the queue pair `queue`. Segments past those of the entry are
    /// ignored.
    ///
    /// # Errors
    /// Fails on every malformed entry ([`EntryError`]). Reserved bytes that are not zero are an error, so that an
    /// encoder that leaves stale bytes is noticed.
    #[inline]
    pub const fn read(slot: &Slot, index: u64, queue: u32) -> Result<Self, EntryError> {
        let head = slot[0].be32::<0>();
        if head >> 8 & 0xffff != index as u32 & 0xffff {
            return Err(EntryError::Index);
        }
        let tail = slot[0].be32::<1>();
        if tail >> 8 != queue {
            return Err(EntryError::Queue);
        }
        let segments = tail & 0xff;
        if segments == 0 || segments > SLOT_SEGMENTS as u32 {
            return Err(EntryError::Segments);
        }
        // Signature, stream and immediate.
        if slot[0].words[1] & !(0xff << 24) != 0 {
            return Err(EntryError::Reserved);
        }
        let flags = Flags((slot[0].words[1] >> 24) as u8);
        // The top byte holds the modifier. None of these operations has one.
        let operation = head & 0xff00_00ff;
        let work = match (operation, segments) {
            (opcode::NOP, 1) => Work::Nop,
            (opcode::WRITE, 3 | 4) if slot[2].be32::<0>() & INLINE != 0 => {
                let bytes = slot[2].be32::<0>() & !INLINE;
                if bytes > (segments - 2) * 16 - 4 {
                    return Err(EntryError::Segments);
                }
                let Ok(to) = slot[1].remote() else { return Err(EntryError::Reserved) };
                Work::WriteInline { to, bytes, words: inline_words(slot, bytes) }
            }
            (opcode::WRITE | opcode::READ, 3) => {
                let Ok(remote) = slot[1].remote() else { return Err(EntryError::Reserved) };
                let Ok((local, bytes)) = slot[2].local() else { return Err(EntryError::Segments) };
                if operation == opcode::WRITE {
                    Work::Write { to: remote, from: local, bytes }
                } else {
                    Work::Read { from: remote, to: local, bytes }
                }
            }
            (opcode::FETCH_ADD, 4) => {
                let Ok(word) = slot[1].remote() else { return Err(EntryError::Reserved) };
                let Ok((old, _)) = slot[3].local() else { return Err(EntryError::Segments) };
                if slot[2].words[1] != 0 {
                    return Err(EntryError::Reserved);
                }
                Work::FetchAdd { word, amount: slot[2].be64::<0>(), old }
            }
            (opcode::WAIT, 2) => {
                if slot[1].words[0] != 0 || slot[1].be32::<3>() >> 24 != 0 {
                    return Err(EntryError::Reserved);
                }
                Work::Wait { index: slot[1].be32::<2>(), queue: slot[1].be32::<3>() }
            }
            (opcode::DUMP, 2) => {
                let Ok((from, bytes)) = slot[1].local() else { return Err(EntryError::Segments) };
                Work::Dump { from, bytes }
            }
            (opcode::NOP | opcode::WRITE | opcode::READ | opcode::FETCH_ADD | opcode::WAIT | opcode::DUMP, _) => {
                return Err(EntryError::Segments);
            }
            _ => return Err(EntryError::Operation),
        };
        Ok(Self { flags, work })
    }
}

/// Returns the first `bytes` bytes of inline data, followed by zeros.
#[inline(always)]
const fn inline_words(slot: &Slot, bytes: u32) -> [u32; 7] {
    let [_, _, first, second] = slot;
    let mut words = [
        (first.words[0] >> 32) as u32,
        first.words[1] as u32,
        (first.words[1] >> 32) as u32,
        second.words[0] as u32,
        (second.words[0] >> 32) as u32,
        second.words[1] as u32,
        (second.words[1] >> 32) as u32,
    ];
    let mut at = 0;
    while at < words.len() {
        let kept = bytes.saturating_sub(4 * at as u32);
        if kept < 4 {
            words[at] &= (1 << (8 * kept)) - 1;
        }
        at += 1;
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const QUEUE: u32 = 0x00ab_cdef;

    fn post() -> impl Strategy<Value = Post> {
        let flags = prop_oneof![Just(0), Just(8), Just(8 | 0x80), Just(0x20)];
        (any::<u64>(), flags).prop_map(|(index, flags)| Post {
            index,
            queue: QueueNumber::new(QUEUE),
            flags: Flags(flags),
        })
    }

    fn remote() -> impl Strategy<Value = Remote> {
        (any::<u64>(), any::<u32>()).prop_map(|(address, key)| Remote { address, key: Be32::new(key) })
    }

    fn local() -> impl Strategy<Value = Local> {
        let bytes = prop_oneof![Just(1), Just(MAX_DATA_BYTES), 1..=MAX_DATA_BYTES];
        (any::<u64>(), any::<u32>(), bytes).prop_map(|(address, key, bytes)| Local {
            address,
            key: Be32::new(key),
            bytes,
        })
    }

    /// Returns a slot with these segments in front of stale ones.
    fn slot(segments: &[Segment], stale: Slot) -> Slot {
        let mut slot = stale;
        slot[..segments.len()].copy_from_slice(segments);
        slot
    }

    fn slots() -> impl Strategy<Value = Slot> {
        any::<[[u64; 2]; 4]>().prop_map(|words| words.map(|words| Segment { words }))
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_read_whatever_the_slot_held(
            post in post(), remote in remote(), local in local(), amount: u64, words: [u32; 7], count in 13u32..=28,
            number: u32, queue in 0..1u32 << 24, stale in slots(),
        ) {
            let read = |segments: &[Segment]| Entry::read(&slot(segments, stale), post.index, QUEUE);
            let entry = |work| Ok(Entry { flags: post.flags, work });
            let bytes = u64::from(local.bytes);
            prop_assert_eq!(read(&nop(post)), entry(Work::Nop));
            prop_assert_eq!(read(&write(post, remote, local)), entry(Work::Write { to: remote, from: local, bytes }));
            prop_assert_eq!(super::read(post, remote, local).len(), 3);
            prop_assert_eq!(
                read(&super::read(post, remote, local)), entry(Work::Read { from: remote, to: local, bytes })
            );
            prop_assert_eq!(
                read(&fetch_add(post, remote, amount, local)),
                entry(Work::FetchAdd { word: remote, amount, old: local })
            );
            prop_assert_eq!(read(&wait(post, queue, number)), entry(Work::Wait { queue, index: number }));
            prop_assert_eq!(read(&dump(post, local)), entry(Work::Dump { from: local, bytes }));

            let Ok(Entry { work: Work::WriteInline { to, bytes, words: seen }, .. }) =
                read(&write_words(post, remote, words, count))
            else { panic!("no inline write") };
            prop_assert_eq!((to, bytes), (remote, count));
            let count = count as usize;
            let (sent, seen): (&[u8], &[u8]) = (bytemuck::cast_slice(&words), bytemuck::cast_slice(&seen));
            prop_assert_eq!(&sent[..count], &seen[..count]);
            prop_assert!(seen[count..].iter().all(|&byte| byte == 0));
        }

        #[test]
        fn values_of_every_width_are_read(post in post(), remote in remote(), value: u64, stale in slots()) {
            for bytes in 1..=8u32 {
                let segments = write_value(post, remote, value, bytes);
                prop_assert_eq!(segments[2].words[1] >> 32, 0, "the last bytes are zero");
                let Ok(Entry { work: Work::WriteInline { bytes: seen, words, .. }, .. }) =
                    Entry::read(&slot(&segments, stale), post.index, QUEUE)
                else { panic!("no inline write of {bytes} bytes") };
                prop_assert_eq!(seen, bytes);
                let whole = u64::from(words[0]) | u64::from(words[1]) << 32;
                prop_assert_eq!(whole, value & (u64::MAX >> (64 - 8 * bytes)));
                prop_assert_eq!(segments[2].words[0] >> 32 | segments[2].words[1] << 32, whole);
            }
        }

        #[test]
        fn no_bytes_make_the_reader_panic(stale in slots(), index: u64, queue: u32) {
            let _ = Entry::read(&stale, index, queue);
            // Repeats the check with a valid head, so that the decoder reaches the rest.
            for operation in [opcode::NOP, opcode::WRITE, opcode::WAIT, opcode::READ, opcode::FETCH_ADD, opcode::DUMP] {
                for segments in 0..=5 {
                    let mut slot = stale;
                    let post = Post { index, queue: QueueNumber::new(queue), flags: Flags::NONE };
                    slot[0] = control(post, operation, segments);
                    if let Ok(entry) = Entry::read(&slot, index, queue & 0xff_ffff) {
                        prop_assert_eq!(entry.flags, Flags::NONE);
                    }
                }
            }
        }

        #[test]
        fn one_changed_bit_is_an_error_or_another_entry(
            post in post(), remote in remote(), local in local(), amount: u64, at in 0usize..512,
        ) {
            for segments in [
                &nop(post)[..], &write(post, remote, local), &write_value(post, remote, amount, 8),
                &fetch_add(post, remote, amount, local), &wait(post, 5, 9), &dump(post, local),
            ] {
                let (segment, word, bit) = (at / 128, at / 64 % 2, at % 64);
                if segment >= segments.len() { continue }
                let good = slot(segments, Slot::default());
                let mut bad = good;
                bad[segment].words[word] ^= 1 << bit;
                let (good, bad) = (Entry::read(&good, post.index, QUEUE), Entry::read(&bad, post.index, QUEUE));
                let in_value = segments.len() == 3 && segments[2].be32::<0>() & INLINE != 0 && at >= 256 + 96;
                prop_assert!(good.is_ok());
                prop_assert!(good != bad || in_value, "a reader that does not see bit {} of {:?}", at, segments);
            }
        }
    }

    #[test]
    fn each_error_has_its_name() {
        let post = Post { index: 7, queue: QueueNumber::new(QUEUE), flags: Flags::COMPLETION };
        let good = slot(&nop(post), Slot::default());
        let change = |byte: usize, value: u8| {
            let mut slot = good;
            bytemuck::bytes_of_mut(&mut slot)[byte] = value;
            Entry::read(&slot, 7, QUEUE)
        };
        assert_eq!(Entry::read(&good, 7 + (1 << 16), QUEUE), Entry::read(&good, 7, QUEUE), "16 bits of index");
        assert_eq!(Entry::read(&good, 8, QUEUE), Err(EntryError::Index));
        assert_eq!(Entry::read(&good, 7, QUEUE + 1), Err(EntryError::Queue));
        assert_eq!(change(0, 1), Err(EntryError::Operation), "a modifier");
        assert_eq!(change(3, 0x0a), Err(EntryError::Operation), "a send");
        for segments in [0, 2, 5, 0x41] {
            assert_eq!(change(7, segments), Err(EntryError::Segments));
        }
        for byte in [8, 9, 10, 12, 15] {
            assert_eq!(change(byte, 1), Err(EntryError::Reserved));
        }
        let remote = Remote { address: 0, key: Be32::new(1) };
        let long = write_value(post, remote, 0, 13);
        assert_eq!(Entry::read(&slot(&long, Slot::default()), 7, QUEUE), Err(EntryError::Segments));
    }

    #[test]
    fn a_length_of_zero_is_two_gibibytes() {
        let post = Post { index: 0, queue: QueueNumber::new(QUEUE), flags: Flags::NONE };
        let nothing = Local { address: 0, key: Be32::new(1), bytes: 0 };
        let read = Entry::read(&slot(&dump(post, nothing), Slot::default()), 0, QUEUE);
        assert_eq!(read.map(|entry| entry.work), Ok(Work::Dump { from: nothing, bytes: 1 << 31 }));
    }

    #[test]
    fn flags_say_what_they_are_made_of() {
        assert!(!Flags::NONE.completion() && !Flags::FENCE.completion() && Flags::COMPLETION.completion());
        let both = Flags::COMPLETION.and(Flags::FENCE);
        assert!(both.completion());
        assert_eq!((both.fence(), Flags::LOCAL_FENCE.fence(), Flags::COMPLETION.fence()), (4, 1, 0));
    }
}
