// SPDX-License-Identifier: MIT OR Apache-2.0
//! Entries that a kernel left behind are brought to their end, and the next kernel finds the queue pair in order.

use gin_abi::gdaki::{CLAIM_SHIFT, QueuePairData, RINGING};
use gin_abi::mlx5::be::Be32;
use gin_abi::mlx5::cqe::{Completion, Tail};
use gin_abi::mlx5::cqe::{Syndrome, opcode};
use gin_abi::mlx5::doorbell::Record;
use gin_abi::mlx5::wqe::{self, Flags, Post, SLOT_BYTES};
use gin_abi::mlx5::wqe::{Local, Remote};
use gin_device::internal::pair::TAG_SHIFT;
use gin_gpu::MemorySlice;
use gin_gpu::virt::VirtualDevice;
use gin_gpu::{Device, Memory, MemoryKind};
use gin_nic::drain::*;
use gin_nic::hca::Access;
use gin_nic::{
    DeviceQueuePairs, DoorbellRelease, Doorbells, Expired, Nic, NicConfig, NicPeer, RegisteredSlice, Shape, Target,
};
use gin_soft_nic_host::{SoftConfig, SoftFabric};
use std::cell::Cell;
use std::mem::offset_of;
use std::sync::Arc;

const NEVER: Expired<'static> = &|| false;
const COUNTERS: u64 = 4;

/// A rank: its queue pairs to both ranks, and memory that both reach.
struct Side {
    queues: DeviceQueuePairs,
    data: RegisteredSlice,
    counters: MemorySlice,
}

struct Bench {
    sides: Vec<Side>,
    fabric: SoftFabric,
}

impl Bench {
    fn new(depth: u32) -> Self {
        let fabric = SoftFabric::default();
        let device: Arc<dyn Device> = VirtualDevice::memory_only(0);
        let side = |rank: u32| {
            let nic = Nic::open(Arc::new(fabric.add(SoftConfig::ethernet(rank as u16))), NicConfig::default()).unwrap();
            let memory = |bytes| Memory::new(&device, MemoryKind::Device, bytes).unwrap().whole();
            let (data, counters) = (memory(64), memory(8 * COUNTERS));
            let shape = Shape { contexts: 1, ranks: 2, rank, step: 1, depth, release: DoorbellRelease::System };
            let of_contexts = vec![Some(counters.clone())];
            let queues = DeviceQueuePairs::new(&nic, &device, shape, of_contexts, Doorbells::Automatic, NEVER).unwrap();
            let data = RegisteredSlice::new(&nic, data, Access::SIGNALS).unwrap();
            Side { queues, data, counters }
        };
        let sides: Vec<Side> = (0..2).map(side).collect();
        for (own, side) in (0..).zip(&sides) {
            for (rank, other) in (0..).zip(&sides) {
                let peer = NicPeer { rank, host: "here".to_owned(), port: 1 };
                side.queues.connect(0, &peer, &other.queues.address(0, own).unwrap(), NEVER).unwrap();
            }
            let target = |_, peer: u32| {
                let data = &sides[peer as usize].data;
                Target { signal_key: data.remote_key, signals: data.start, max_bytes: 64 }
            };
            side.queues.fill(0, target).unwrap();
        }
        Self { sides, fabric }
    }

    /// Adds `count` entries, each of which adds 1 to the first word of rank `peer`, as a kernel of rank 0 would. `tag`:
    /// the counter that each raises.
    fn post(&self, peer: u32, count: u64, ring: bool, tag: Option<u64>) {
        let side = &self.sides[0];
        let mut queue = side.queues.one(0, peer);
        let first = queue.data.producer_index();
        for index in first..first + count {
            let interval = 1 << queue.data.interval_log2;
            let flags = if (index + 1) % interval == 0 { Flags::COMPLETION } else { Flags::NONE };
            let post = Post { index, queue: queue.number(), flags };
            let word = Remote { address: queue.data.signals, key: Be32::from_memory(queue.data.signal_key) };
            let old = Local { address: 0, key: Be32::from_memory(queue.data.sink_key), bytes: 8 };
            queue.ring.write(queue.slot(index) * SLOT_BYTES, &wqe::fetch_add(post, word, 1, old)).unwrap();
            if let Some(counter) = tag {
                queue.tags.write(8 * queue.slot(index), &[(index + 1) << TAG_SHIFT | counter]).unwrap();
                queue.keep(offset_of!(QueuePairData, tagged), index + 1).unwrap();
            }
        }
        queue.claim(first + count).unwrap();
        if ring {
            side.queues.one(0, peer).announce().unwrap();
        }
    }

    /// Returns the data of kernels of rank 0 about their queue pair to `peer`.
    fn data(&self, peer: u32) -> QueuePairData {
        self.sides[0].queues.one(0, peer).data
    }

    fn arrived(&self, rank: usize) -> u64 {
        let mut word = [0];
        self.sides[rank].data.slice.read(0, &mut word).unwrap();
        word[0]
    }

    fn counters(&self) -> [u64; COUNTERS as usize] {
        let mut words = [0; COUNTERS as usize];
        self.sides[0].counters.read(0, &mut words).unwrap();
        words
    }

    /// Drains rank 0 while the NICs work, for as long as they might need.
    fn drain(&self) -> Result<u64, DrainError> {
        let looks = Cell::new(0);
        self.sides[0].queues.drain(&|| {
            for _ in 0..1000 {
                self.fabric.step();
            }
            looks.set(looks.get() + 1);
            looks.get() > 1000
        })
    }

    /// Everything is complete, and the words are as the next kernel expects them.
    fn check_settled(&self, peer: u32) {
        let queue = self.sides[0].queues.one(0, peer);
        let (data, end) = (queue.data, queue.data.producer_index());
        assert_eq!((data.completion_index, data.rung, data.covered), (end, end, end));
        assert_eq!(data.claims, end << CLAIM_SHIFT);
        let mut record = [Record::default()];
        queue.record.read(0, &mut record).unwrap();
        assert_eq!(record[0].send.get(), end as u32 & 0xffff);
        assert_eq!(self.fabric.violations(), (None, 0));
    }
}

#[test]
fn a_fresh_queue_pair_has_nothing_to_drain() {
    let bench = Bench::new(8);
    assert_eq!(bench.drain(), Ok(0));
    let queue = bench.sides[0].queues.one(0, 1);
    assert_eq!((queue.data.claims, queue.data.completion_index, queue.data.cq_consumer_index), (0, 0, 0));
    assert_eq!((queue.data.depth_log2, queue.data.interval_log2), (3, 2));
}

#[test]
fn entries_that_nobody_waited_for_are_complete_afterwards_and_the_next_kernel_goes_on() {
    for (peer, ring) in [(1, true), (1, false), (0, true), (0, false)] {
        let bench = Bench::new(8);
        let mut sent = 0;
        for count in [1, 2, 3, 5, 7, 1] {
            bench.post(peer, count, ring, None);
            sent += count;
            assert_eq!(bench.drain(), Ok(0));
            assert_eq!(bench.arrived(peer as usize), sent);
            bench.check_settled(peer);
        }
        let data = bench.data(peer);
        assert_eq!(data.producer_index(), sent + 6, "one more entry each time");
        assert_eq!(bench.drain(), Ok(0));
        assert_eq!(bench.data(peer), data, "and none when there is nothing to bring to its end");
    }
}

#[test]
fn a_full_ring_makes_room_first() {
    for ring in [true, false] {
        let bench = Bench::new(8);
        for round in 1..=3 {
            bench.post(1, 8, ring, Some(2));
            assert_eq!(bench.drain(), Ok(0));
            assert_eq!((bench.arrived(1), bench.counters()), (8 * round, [0, 0, 8 * round, 0]));
            assert_eq!(bench.fabric.violations(), (None, 0));
        }
        // The host's entry comes only after the last one that asks for a completion, if any is behind that.
        let data = bench.data(1);
        assert_eq!((data.completion_index, data.rung), (data.producer_index(), data.producer_index()));
    }
}

#[test]
fn each_completed_entry_raises_its_counter_once() {
    let bench = Bench::new(16);
    bench.post(1, 3, true, Some(1));
    bench.post(1, 2, true, None);
    bench.post(1, 4, false, Some(3));
    assert_eq!(bench.drain(), Ok(0));
    assert_eq!(bench.counters(), [0, 3, 0, 4]);
    // Old tags lie in the slots of these.
    bench.post(1, 15, true, None);
    assert_eq!(bench.drain(), Ok(0));
    assert_eq!(bench.counters(), [0, 3, 0, 4]);
    // Of entries 26 to 32, number 31 asks for a completion, which a kernel has taken.
    bench.post(1, 7, true, Some(0));
    bench.fabric.settle();
    let queue = bench.sides[0].queues.one(0, 1);
    assert_eq!((queue.data.completion_index, queue.data.interval_log2), (26, 3));
    queue.keep(offset_of!(QueuePairData, completion_index), 32).unwrap();
    queue.keep(offset_of!(QueuePairData, cq_consumer_index), queue.data.cq_consumer_index + 1).unwrap();
    assert_eq!(bench.drain(), Ok(0));
    assert_eq!(bench.counters(), [1, 3, 0, 4]);
    bench.check_settled(1);
}

#[test]
fn a_tag_is_of_its_entry_only() {
    assert_eq!(tagged(1 << TAG_SHIFT | 7, 0), Some(7));
    assert_eq!(tagged(0, 0), None);
    assert_eq!(tagged(1 << TAG_SHIFT | 7, 8), None);
    assert_eq!(tagged(1 << TAG_SHIFT | 7, 1 << 40), Some(7), "after 2^40 entries");
    assert_eq!(tagged(5, (1 << 40) - 1), Some(5));
}

#[test]
fn indices_past_16_bits_differ() {
    let bench = Bench::new(1 << 12);
    let mut sent = 0;
    while bench.data(1).producer_index() < (1 << 16) + 5000 {
        bench.post(1, 4095, true, None);
        sent += 4095;
        assert_eq!(bench.drain(), Ok(0));
        assert_eq!(bench.arrived(1), sent);
        bench.check_settled(1);
    }
}

#[test]
fn an_entry_that_failed_is_named_and_nothing_is_waited_for() {
    let bench = Bench::new(8);
    // The peer's words are gone.
    let queue = bench.sides[0].queues.one(0, 1);
    let key = Be32::from_memory(queue.data.signal_key).get() ^ 1;
    let data = QueuePairData { signal_key: Be32::new(key).memory(), ..queue.data };
    queue.home.write(0, &[data]).unwrap();
    bench.post(1, 3, true, Some(0));
    bench.post(0, 3, true, None);
    let error = bench.drain().unwrap_err();
    let DrainError::Failed { context: 0, peer: 1, index: 0, operation: wqe::opcode::FETCH_ADD, failure } = &error
    else {
        panic!("{error:?}")
    };
    assert_eq!(failure.syndrome, Syndrome::RemoteAccess.code());
    assert!(error.to_string().contains("context 0 to rank 1 failed: invalid remote key or range"), "{error}");
    assert_eq!(bench.counters(), [0; 4], "what failed is not counted");
}

#[test]
fn an_entry_that_was_never_written_is_named_and_not_announced() {
    let bench = Bench::new(8);
    bench.post(1, 2, false, None);
    bench.sides[0].queues.one(0, 1).claim(4).unwrap();
    assert_eq!(bench.drain(), Err(DrainError::Hole { context: 0, peer: 1, index: 2 }));
    bench.fabric.settle();
    assert_eq!((bench.arrived(1), bench.data(1).rung), (0, 0));
    // The round before left an entry in its slot.
    let bench = Bench::new(4);
    bench.post(1, 3, true, None);
    assert_eq!(bench.drain(), Ok(0));
    bench.sides[0].queues.one(0, 1).claim(5).unwrap();
    assert_eq!(bench.drain(), Err(DrainError::Hole { context: 0, peer: 1, index: 4 }));
}

#[test]
fn a_kernel_that_was_stopped_while_it_rang_or_published_leaves_no_mark() {
    for mark in [2, RINGING, RINGING | 1] {
        let bench = Bench::new(8);
        bench.post(1, 3, false, None);
        bench.sides[0].queues.one(0, 1).keep(offset_of!(QueuePairData, claims), 3 << CLAIM_SHIFT | mark).unwrap();
        assert_eq!(bench.drain(), Ok(0));
        assert_eq!(bench.arrived(1), 3);
        bench.check_settled(1);
    }
}

#[test]
fn when_the_time_is_over_what_is_left_is_counted_and_another_try_finishes_it() {
    let bench = Bench::new(8);
    bench.post(1, 3, true, None);
    bench.post(0, 2, false, None);
    // Nobody steps the NICs.
    assert_eq!(bench.sides[0].queues.drain(&|| true), Ok(3 + 1 + 2 + 1));
    assert_eq!(bench.sides[0].queues.drain(&|| true), Ok(3 + 2 + 2 + 2));
    assert_eq!(bench.drain(), Ok(0));
    assert_eq!((bench.arrived(0), bench.arrived(1)), (2, 3));
    bench.check_settled(0);
    bench.check_settled(1);
}

#[test]
fn completions_of_entries_that_were_never_posted_make_no_sense() {
    let bench = Bench::new(8);
    bench.post(1, 1, false, None);
    let queue = bench.sides[0].queues.one(0, 1);
    let tail = Tail::new(opcode::REQUEST, wqe::opcode::NOP, queue.number().get(), 5, 0, 3);
    queue.completions.write(0, &[Completion::good(tail, 0)]).unwrap();
    assert_eq!(bench.drain(), Err(DrainError::Senseless { context: 0, peer: 1 }));
}

#[test]
fn nothing_is_left_behind() {
    let bench = Bench::new(4);
    bench.post(1, 2, true, None);
    let fabric = bench.fabric.clone();
    drop(bench);
    fabric.settle();
    assert_eq!(fabric.objects(), 0);
}

#[test]
fn queue_pairs_take_the_bytes_that_their_shape_says() {
    let fabric = SoftFabric::default();
    let device: Arc<dyn Device> = VirtualDevice::memory_only(0);
    let nic = Nic::open(Arc::new(fabric.add(SoftConfig::ethernet(0))), NicConfig::default()).unwrap();
    for (contexts, ranks, step, depth) in [(1, 1, 1, 16), (1, 8, 1, 64), (3, 8, 4, 256)] {
        let shape = Shape { contexts, ranks, rank: 1 % ranks, step, depth, release: DoorbellRelease::System };
        let counters = vec![None; contexts as usize];
        let queues = DeviceQueuePairs::new(&nic, &device, shape, counters, Doorbells::Automatic, NEVER).unwrap();
        assert_eq!(queues.allocated_bytes(), shape.bytes().unwrap(), "{shape:?}");
    }
}
