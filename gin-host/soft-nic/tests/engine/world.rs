// SPDX-License-Identifier: MIT OR Apache-2.0
//! Two NICs with one queue pair each, connected to each other, over memory that is an array.

use gin_abi::mlx5::be::Be32;
use gin_abi::mlx5::command::QpState;
use gin_abi::mlx5::cqe::{self, Completion, CompletionError, Outcome};
use gin_abi::mlx5::doorbell::{Doorbell, Record};
use gin_abi::mlx5::wqe::{Flags, Local, Post, QueueNumber, Remote, Segment};
use gin_soft_nic::faults::Switch;
use gin_soft_nic::held::{Held, Item, Usage};
use gin_soft_nic::tables::{CompletionQueue, QueuePair, Region, Rights};
use gin_soft_nic::{Engine, Memory, Options, Progress, Tables};

/// Memory whose addresses are offsets. An access outside fails the test.
pub(crate) struct Flat(pub(crate) Vec<u8>);

impl Flat {
    pub(crate) fn bytes(&self, at: u64, count: u64) -> &[u8] {
        &self.0[at as usize..(at + count) as usize]
    }

    pub(crate) fn put(&mut self, at: u64, bytes: &[u8]) {
        self.0[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    }

    pub(crate) fn word(&self, at: u64) -> u64 {
        u64::from_le_bytes(self.bytes(at, 8).try_into().expect("8 bytes"))
    }
}

impl Memory for Flat {
    fn load_u32(&mut self, address: u64) -> u32 {
        assert!(address.is_multiple_of(4));
        u32::from_le_bytes(self.bytes(address, 4).try_into().expect("4 bytes"))
    }

    fn load_u64(&mut self, address: u64) -> u64 {
        assert!(address.is_multiple_of(8));
        self.word(address)
    }

    fn store_u64(&mut self, address: u64, value: u64) {
        assert!(address.is_multiple_of(8));
        self.put(address, &value.to_le_bytes());
    }

    fn fence_acquire(&mut self) {}

    fn fence_release(&mut self) {}

    fn copy(&mut self, to: u64, from: u64, bytes: u64) {
        self.0.copy_within(from as usize..(from + bytes) as usize, to as usize);
    }

    fn store_words(&mut self, to: u64, words: [u32; 7], bytes: u32) {
        self.put(to, &bytemuck::bytes_of(&words)[..bytes as usize]);
    }

    fn fetch_add(&mut self, address: u64, amount: u64) -> u64 {
        let old = self.load_u64(address);
        self.store_u64(address, old.wrapping_add(amount));
        old
    }
}

/// log2 of the slots of each ring.
pub(crate) const LOG_SIZE: u32 = 3;
pub(crate) const SIZE: u64 = 1 << LOG_SIZE;

/// Layout of a side's memory.
const RING: u64 = 0;
const RECORD: u64 = 0x400;
const COMPLETIONS: u64 = 0x800;
/// A region with relaxed ordering.
const RELAXED: u64 = 0x1000;
/// A region without relaxed ordering.
const STRICT: u64 = 0x3000;
const SIDE: u64 = 0x5000;
/// Length of each region.
pub(crate) const REGION: u64 = 0x1000;
const STAGE: u64 = 2 * SIDE;
const STAGE_BYTES: u64 = 0x4000;

pub(crate) const ALL: Rights = Rights { local_write: true, remote_read: true, remote_write: true, remote_atomic: true };

/// The queue pair of side 0; side 1 has the next.
pub(crate) const QUEUE: u32 = 3;
/// Completion queue of side 0; side 1 has the next.
pub(crate) const COMPLETION: u32 = 1;

pub(crate) struct World {
    pub(crate) memory: Flat,
    pub(crate) queues: Vec<QueuePair>,
    busy: Vec<u64>,
    pub(crate) completions: Vec<CompletionQueue>,
    pub(crate) regions: Vec<Region>,
    pub(crate) faults: Vec<Switch>,
    pub(crate) engine: Engine,
    held: (Vec<Item>, Usage),
    /// Index past the last entry written, and number of the next completion, of each side.
    pub(crate) next: [u64; 2],
    pub(crate) seen: [u64; 2],
}

impl World {
    pub(crate) fn new(options: Options) -> Self {
        let mut memory = Flat(vec![0; (STAGE + STAGE_BYTES) as usize]);
        let mut queues = vec![QueuePair::default(); 8];
        let mut completions = vec![CompletionQueue::default(); 4];
        let mut regions = vec![Region::default(); 8];
        for side in 0..2u32 {
            let base = u64::from(side) * SIDE;
            memory.0[(base + COMPLETIONS) as usize..][..(SIZE * cqe::BYTES) as usize].fill(cqe::INVALID_BYTE);
            queues[(QUEUE + side) as usize] = QueuePair {
                live: true,
                device: side,
                domain: 10 + side,
                state: QpState::ReadyToSend,
                completions: COMPLETION + side,
                ring: base + RING,
                log_size: LOG_SIZE,
                record: base + RECORD,
                rights: ALL,
                peer_device: 1 - side,
                peer: QUEUE + 1 - side,
                log_message: 30,
                ack_timeout: 14,
                reads: 4,
                ..QueuePair::default()
            };
            completions[(COMPLETION + side) as usize] = CompletionQueue {
                live: true,
                device: side,
                ring: base + COMPLETIONS,
                log_size: LOG_SIZE,
                ..CompletionQueue::default()
            };
            for (relaxed, at) in [(true, RELAXED), (false, STRICT)] {
                let key = Self::key(side, relaxed);
                regions[key as usize >> 8] = Region {
                    live: true,
                    key,
                    device: side,
                    domain: 10 + side,
                    start: Self::start(side, relaxed),
                    memory: base + at,
                    bytes: REGION,
                    rights: ALL,
                    relaxed,
                };
            }
        }
        Self {
            memory,
            queues,
            completions,
            regions,
            busy: vec![0],
            faults: Vec::new(),
            engine: Engine::new(options),
            held: (vec![Item::ROOM; 16], Usage::default()),
            next: [0; 2],
            seen: [0; 2],
        }
    }

    pub(crate) fn key(side: u32, relaxed: bool) -> u32 {
        (1 + side * 2 + u32::from(relaxed)) << 8 | 0x5a
    }

    /// Address that entries use for the first byte of a region.
    pub(crate) fn start(side: u32, relaxed: bool) -> u64 {
        0x7000_0000 * u64::from(side + 1) + 0x10_0000 * u64::from(relaxed)
    }

    /// Place of that byte in memory.
    pub(crate) fn place(side: u32, relaxed: bool) -> u64 {
        u64::from(side) * SIDE + if relaxed { RELAXED } else { STRICT }
    }

    pub(crate) fn remote(side: u32, relaxed: bool, offset: u64) -> Remote {
        Remote { address: Self::start(side, relaxed).wrapping_add(offset), key: Be32::new(Self::key(side, relaxed)) }
    }

    pub(crate) fn local(side: u32, relaxed: bool, offset: u64, bytes: u32) -> Local {
        let Remote { address, key } = Self::remote(side, relaxed, offset);
        Local { address, key, bytes }
    }

    pub(crate) fn post(&self, side: u32, flags: Flags) -> Post {
        Post { index: self.next[side as usize], queue: QueueNumber::new(QUEUE + side), flags }
    }

    /// Writes an entry into the next slot, over its old contents.
    pub(crate) fn write<const N: usize>(&mut self, side: u32, entry: [Segment; N]) {
        let slot = self.next[side as usize] % SIZE;
        let at = u64::from(side) * SIDE + RING + slot * 64;
        self.memory.put(at, bytemuck::cast_slice(&entry));
        self.next[side as usize] += 1;
    }

    pub(crate) fn record(&mut self, side: u32, end: u64) {
        self.memory.put(u64::from(side) * SIDE + RECORD, bytemuck::bytes_of(&Record::send(end)));
    }

    pub(crate) fn ring_with(&mut self, side: u32, end: u64) {
        let mut tables = Tables {
            queues: &mut self.queues,
            busy: &mut self.busy,
            completions: &mut self.completions,
            regions: &mut self.regions,
            faults: &mut self.faults,
        };
        let word = Doorbell::word(end, QueueNumber::new(QUEUE + side));
        self.engine.ring(&mut tables, &mut self.memory, side, word);
    }

    /// Announces all entries written.
    pub(crate) fn ring(&mut self, side: u32) {
        let end = self.next[side as usize];
        self.record(side, end);
        self.ring_with(side, end);
    }

    pub(crate) fn step(&mut self) -> Progress {
        let mut tables = Tables {
            queues: &mut self.queues,
            busy: &mut self.busy,
            completions: &mut self.completions,
            regions: &mut self.regions,
            faults: &mut self.faults,
        };
        let mut held = Held::new(&mut self.held.0, &mut self.held.1, STAGE, STAGE_BYTES);
        self.engine.step(&mut tables, &mut held, &mut self.memory)
    }

    /// Steps until there is nothing to do.
    pub(crate) fn settle(&mut self) {
        for _ in 0..100_000 {
            if self.step() == Progress::Idle {
                return;
            }
        }
        panic!("the engine never comes to rest");
    }

    /// Returns the next completion of a side, if there is one.
    pub(crate) fn completion(&mut self, side: u32) -> Option<Outcome> {
        let number = self.seen[side as usize];
        let at = u64::from(side) * SIDE + COMPLETIONS + number % SIZE * cqe::BYTES;
        let mut completion = Completion { words: [0; 8] };
        bytemuck::bytes_of_mut(&mut completion).copy_from_slice(self.memory.bytes(at, cqe::BYTES));
        match completion.read(number, LOG_SIZE) {
            Ok(outcome) => {
                self.seen[side as usize] += 1;
                Some(outcome)
            }
            Err(CompletionError::NotYet) => None,
            Err(error) => panic!("{error:?}"),
        }
    }

    /// Returns the syndromes of a side's new completions, `None` for successful ones.
    pub(crate) fn syndromes(&mut self, side: u32) -> Vec<Option<u8>> {
        std::iter::from_fn(|| self.completion(side))
            .map(|outcome| outcome.result.err().map(|bad| bad.syndrome))
            .collect()
    }

    pub(crate) fn queue(&mut self, side: u32) -> &mut QueuePair {
        &mut self.queues[(QUEUE + side) as usize]
    }

    pub(crate) fn region(&mut self, side: u32, relaxed: bool) -> &mut Region {
        &mut self.regions[Self::key(side, relaxed) as usize >> 8]
    }
}
