// SPDX-License-Identifier: MIT OR Apache-2.0
//! Posts by NCCL's memory operations: the same trips, atomics, fences and stores in the same order, written anew.
//!
//! They are a model of NCCL: `docs/benchmarks.md` says what they leave out and what they add. The words have 64 bits
//! where NCCL's have 32. The sources are NCCL 2.30.7's `gin_proxy.h`, `gin_gdaki.h`, and its copy of DOCA GPUNetIO.

use crate::post::{BYTES, Fresh, Times, thread, time};
use crate::{LATE, Limit, word};
use gin_abi::mlx5::be::Be32;
use gin_abi::mlx5::doorbell::{Doorbell, Record};
use gin_abi::mlx5::wqe::{self, Flags, Local, Post, QueueNumber, Remote, Segment};
use gin_device::prelude::*;
use gin_device::sys::data::store_weak_pair;
use gin_device::sys::{self, Global, GlobalWord, Memory, Word};

/// Words of a descriptor of NCCL's proxy.
pub const DESCRIPTOR: usize = 16;

/// The rings of a proxy as NCCL has them: one for each peer.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable, Debug)]
pub struct Rings {
    /// Address of the slots, [`DESCRIPTOR`] words each, peer by peer.
    pub slots: u64,
    /// Address of the producer indices, a word for each peer.
    pub producers: u64,
    /// Address of the consumer indices, a word for each peer.
    pub consumers: u64,
    /// Number of slots of a peer minus 1; the number is a power of two.
    pub mask: u64,
    /// Number that is written to each slot, less than 2^63.
    pub stamp: u64,
    /// Not 0 if a fence of both orders at system scope comes before each put.
    pub fenced: u64,
    /// Nanoseconds after which a wait for room gives up.
    pub limit_ns: u64,
}

/// Each thread posts `posts` puts with a signal to `peers` peers. A put claims a slot by an atomic at system scope,
/// reads the peer's consumer index, and stores 128 bytes, whose words have their lowest bit set.
///
/// # Safety
/// - The rings are as their docs say. `data` has [`BYTES`] bytes and `times` a word for each thread. `out` has
///   [`MARKS`](crate::MARKS) words for each block.
#[kernel]
pub unsafe fn nccl_post(rings: Rings, data: *mut u64, posts: u64, peers: u32, times: *mut u64, out: *mut u64) {
    // Safety: guaranteed by the kernel's caller.
    let (times, slots, producers, consumers) = unsafe {
        let word = |address| GlobalWord::new(address);
        (Times::new(times, out), word(rings.slots), word(rings.producers), word(rings.consumers))
    };
    let (limit, fenced) = (Limit::new(rings.limit_ns), rings.fenced != 0);
    let mut peer = thread() as u32 % peers;
    // NCCL fences these bytes.
    let fresh = if fenced { Fresh::System } else { Fresh::Nothing };
    time(posts, times, fresh, data.wrapping_add(thread() * (BYTES / 8)), |_| {
        if fenced {
            // `fence.acq_rel.sys`, in its two parts.
            Global::fence_release_sys();
            Global::fence_acquire_sys();
        }
        let index = producers.at(u64::from(peer)).add_relaxed_sys(1);
        let consumer = consumers.at(u64::from(peer));
        if !limit.wait(|| index.wrapping_sub(consumer.load_relaxed_sys()) <= rings.mask) {
            times.marks.count(LATE, 1);
            return false;
        }
        let slot = (u64::from(peer) * (rings.mask + 1) + (index & rings.mask)) * DESCRIPTOR as u64;
        let slot = slots.at(slot);
        let mut pair = 0;
        while pair < DESCRIPTOR as u64 / 2 {
            slot.at(2 * pair).store_pair_relaxed_sys(index << 1 | 1, rings.stamp << 1 | 1);
            pair += 1;
        }
        peer = if peer + 1 == peers { 0 } else { peer + 1 };
        true
    });
}

/// Words of a queue pair as NCCL has them: 296 bytes.
pub const PAIR: usize = 37;
/// Index of the word that counts reserved entries.
pub const RESERVED: usize = 0;
/// Index of the word that counts written entries.
pub const READY: usize = 1;
/// Index of the word that counts announced entries.
pub const ANNOUNCED: usize = 2;
/// Index of the queue pair's number, in the form of memory.
pub const NUMBER: usize = 3;
/// Index of the number of slots.
pub const DEPTH: usize = 6;
/// Index of the lock of the doorbell.
pub const LOCK: usize = 7;
/// Index of the address of the slots.
pub const RING: usize = 8;
/// Index of the address of the doorbell record.
pub const RECORD: usize = 9;
/// Index of the address of the doorbell.
pub const DOORBELL: usize = 10;

/// Index of the address of the queue pairs in the context.
pub const PAIRS: usize = 0;
/// Index of the address of the signals' keys, a word for each peer, in the context.
pub const SIGNAL_KEYS: usize = 1;
/// Index of the key of the atomics' results in the context.
pub const SINK_KEY: usize = 2;
/// Index of the address of the window in the context: the address of its remote keys, then its local key.
pub const WINDOW: usize = 3;
/// Number of words of the context.
pub const CONTEXT: usize = 4;

/// Returns the entries of a put of [`BYTES`] bytes and of its signal, each with a completion.
#[inline(always)]
fn entries(index: u64, queue: QueueNumber, keys: [u64; 4]) -> ([Segment; 3], [Segment; 4]) {
    let post = |index| Post { index, queue, flags: Flags::COMPLETION };
    let [remote, local, signal, sink] = keys.map(|key| Be32::from_memory(key as u32));
    let at = thread() as u64 * BYTES as u64;
    let from = Local { address: at, key: local, bytes: BYTES as u32 };
    let old = Local { address: 0, key: sink, bytes: 8 };
    (
        wqe::write(post(index), Remote { address: at, key: remote }, from),
        wqe::fetch_add(post(index + 1), Remote { address: 0, key: signal }, 1, old),
    )
}

/// Stores the segments of an entry to the slot of its index.
///
/// # Safety
/// - `ring` has `mask + 1` slots of 64 bytes.
#[inline(always)]
unsafe fn store<const N: usize>(ring: u64, mask: u64, index: u64, entry: [Segment; N]) {
    let slot = (ring + (index & mask) * wqe::SLOT_BYTES) as usize as *mut u64;
    let mut number = 0;
    while number < N {
        let [low, high] = entry[number].words;
        // Safety: guaranteed by the caller.
        unsafe { store_weak_pair(slot.wrapping_add(2 * number), low, high) };
        number += 1;
    }
}

/// Each thread posts `posts` puts with a signal to `peers` peers, by queue pairs that all threads of the GPU share. A
/// put reads the keys and the queue pair, reserves two entries by an atomic, writes them, waits for its turn to count
/// them as written, takes the lock, rings the doorbell, writes the doorbell record and rings again.
///
/// # Safety
/// - `context` has [`CONTEXT`] words, which point to words as the docs of their indices say; counts are 0 at first.
///   Each queue pair has slots for all entries of the launch. `data` has [`BYTES`] bytes and `times` a word for each
///   thread. `out` has [`MARKS`](crate::MARKS) words for each block.
#[kernel]
pub unsafe fn nccl_gdaki(
    context: *mut u64,
    data: *mut u64,
    posts: u64,
    peers: u32,
    limit_ns: u64,
    times: *mut u64,
    out: *mut u64,
) {
    // Safety: guaranteed by the kernel's caller.
    let (times, context) = unsafe { (Times::new(times, out), word(context)) };
    let limit = Limit::new(limit_ns);
    let mut peer = thread() as u32 % peers;
    // Safety: guaranteed by the kernel's caller.
    let at = |address: u64| unsafe { GlobalWord::new(address) };
    let read = |word: GlobalWord, index: usize| word.at(index as u64).load_relaxed_gpu();
    time(posts, times, Fresh::Nothing, data, |_| {
        // Three trips, each to what the one before returned.
        let [pairs, signals, sink, window] = [PAIRS, SIGNAL_KEYS, SINK_KEY, WINDOW].map(|index| read(context, index));
        let window = at(window);
        let (keys, local) = (read(window, 0), read(window, 1));
        let signal = read(at(signals), peer as usize);
        let remote = read(at(keys), peer as usize);

        let pair = at(pairs).at(PAIR as u64 * u64::from(peer));
        let index = pair.at(RESERVED as u64).add_relaxed_gpu(2);
        let [depth, ring, number] = [DEPTH, RING, NUMBER].map(|index| read(pair, index));
        let end = index + 2;
        if end > depth {
            times.marks.count(LATE, 1);
            return false;
        }
        let queue = QueueNumber::from_memory(number as u32);
        let (put, raise) = entries(index, queue, [remote, local, signal, sink]);
        // Safety: guaranteed by the kernel's caller.
        unsafe {
            store(ring, depth - 1, index, put);
            store(ring, depth - 1, index + 1, raise);
        }

        Global::fence_release_gpu();
        let ready = pair.at(READY as u64);
        if !limit.wait(|| ready.cas_relaxed_gpu(index, end) == index) {
            times.marks.count(LATE, 1);
            return false;
        }
        Global::fence_acquire_gpu();

        let lock = pair.at(LOCK as u64);
        // The lock is taken and given back in one round of the loop, which ends in a later round, by a value that the
        // compiler does not know. Otherwise a lane with the lock would wait behind the loop for lanes that want it.
        let mut rung = false;
        limit.wait(|| {
            if rung {
                return true;
            }
            if lock.cas_relaxed_gpu(0, 1) != 0 {
                return false;
            }
            Global::fence_acquire_gpu();
            let announced = pair.at(ANNOUNCED as u64).max_relaxed_gpu(end);
            Global::fence_acquire_gpu();
            if announced < end {
                let (record, doorbell) = (at(read(pair, RECORD)), at(read(pair, DOORBELL)));
                let bell = Doorbell::word(end, queue);
                doorbell.store_mmio(bell);
                record.store_relaxed_sys(u64::from(Record::send(end).memory()) << 32);
                Global::fence_release_gpu();
                doorbell.store_mmio(bell);
            }
            lock.store_release_gpu(0);
            rung = sys::clock_ns() != 0;
            false
        });
        times.marks.count(LATE, u64::from(!rung));
        peer = if peer + 1 == peers { 0 } else { peer + 1 };
        rung
    });
}

/// Each thread posts `posts` puts with a signal to `peers` peers by the least work that a poster does alone: it
/// reserves two entries by an atomic, or by a load and a store if bit 2 of `rings` is set, and writes them. If the
/// bits below are 0, a release fence at GPU scope follows, and another thread would announce them. Otherwise come the
/// doorbell record, a fence, at system scope if they are 2, and the doorbell.
///
/// # Safety
/// - The same as for [`nccl_gdaki`]. The slots, records and doorbells of a peer follow those of the peer before it: the
///   records and doorbells at distances of 64 bytes.
#[kernel]
pub unsafe fn bare_gdaki(
    context: *mut u64,
    data: *mut u64,
    posts: u64,
    peers: u32,
    rings: u32,
    times: *mut u64,
    out: *mut u64,
) {
    // Safety: guaranteed by the kernel's caller.
    let (times, context) = unsafe { (Times::new(times, out), word(context)) };
    // Safety: guaranteed by the kernel's caller.
    let at = |address: u64| unsafe { GlobalWord::new(address) };
    let read = |word: GlobalWord, index: usize| word.at(index as u64).load_relaxed_gpu();
    let pairs = at(read(context, PAIRS));
    let [depth, ring, record, doorbell, number] =
        [DEPTH, RING, RECORD, DOORBELL, NUMBER].map(|index| read(pairs, index));
    let queue = QueueNumber::from_memory(number as u32).get();
    let (alone, rings) = (rings & 4 != 0, rings & 3);
    let mut peer = thread() as u64 % u64::from(peers);
    time(posts, times, Fresh::Nothing, data, |_| {
        let reserved = pairs.at(PAIR as u64 * peer + RESERVED as u64);
        let index = if !alone {
            reserved.add_relaxed_gpu(2)
        } else {
            let index = reserved.load_own();
            reserved.store_relaxed_gpu(index + 2);
            index
        };
        let queue = QueueNumber::new(queue + peer as u32);
        let (put, raise) = entries(index, queue, [0; 4]);
        let ring = ring + peer * depth * wqe::SLOT_BYTES;
        // Safety: guaranteed by the kernel's caller.
        unsafe {
            store(ring, depth - 1, index, put);
            store(ring, depth - 1, index + 1, raise);
        }
        if rings == 0 {
            Global::fence_release_gpu();
        } else {
            at(record + peer * 64).store_relaxed_sys(u64::from(Record::send(index + 2).memory()) << 32);
            if rings == 2 {
                Global::fence_release_sys();
            } else {
                Global::fence_release_gpu();
            }
            at(doorbell + peer * 64).store_mmio(Doorbell::word(index + 2, queue));
        }
        peer = if peer + 1 == u64::from(peers) { 0 } else { peer + 1 };
        true
    });
}
