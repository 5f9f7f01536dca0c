// SPDX-License-Identifier: MIT OR Apache-2.0
//! The queue from every start offset, for several rounds, in the CPU's memory. One thread is both ends.

use gin_abi::Deadline;
use gin_device::gin::{Order, Sharing};
use gin_device::internal::host_word;
use gin_device::internal::queue::{Consumer, Finished, NOTHING, Producer, Queue, initial_word, phase};
use gin_device::internal::status::{Status, WaitError};
use gin_device::sys::{Global, GlobalWord, Word};

const N: usize = 2;
const NOW: Deadline = Deadline::after_ns(0);
const RANKS: usize = 2;
/// Index of the near words; they come last.
const NEAR: usize = 48;

/// Edges of an index: the usual start, the end of 32 bits, and the sign bit.
const EDGES: [u64; 3] = [0, 1 << 32, 1 << 63];

/// Calls `test` for each depth and edge, with every offset of the first index in the ring. The edge is in the second
/// round.
fn for_each_start(mut test: impl FnMut(u32, u64)) {
    for depth_log2 in 0..4 {
        let depth = 1 << depth_log2;
        for edge in EDGES {
            for offset in 0..depth {
                test(depth_log2, if edge == 0 { offset } else { edge - 2 * depth + offset });
            }
        }
    }
}

/// Calls `test` with both ends of a new queue and its status.
fn with_queue(depth_log2: u32, first: u64, test: impl FnOnce(Producer<Global, N>, Consumer<Global, N>)) {
    #[repr(align(16))]
    struct Words([u64; NEAR + (2 + RANKS) * host_word::WORDS as usize]);
    // Any old content of a queue's memory is correct.
    let mut words = Words([u64::MAX; NEAR + (2 + RANKS) * host_word::WORDS as usize]);
    // Safety: every handle is a word of the array and is not used after the array's life.
    let mut word = |index: usize| unsafe { GlobalWord::new(&raw mut words.0[index] as u64) };
    let queue: Queue<Global, N> = Queue {
        slots: word(0),
        producer_index: word(16),
        near: word(NEAR),
        consumer_index: word(18),
        completion_index: word(19),
        oldest_incomplete: word(20),
        depth_log2,
        depth_mask: (1 << depth_log2) - 1,
    };
    let status: Status<Global> = Status { host: word(24), kernel: word(32), copy: word(40) };
    for block in [status.host, status.kernel, status.copy] {
        block.store_relaxed_sys(0);
    }
    queue.initialise(first, RANKS as u64);
    // Safety: the queue was just initialised for `first`.
    let consumer = unsafe { Consumer::new(queue, first) };
    test(Producer { queue, status }, consumer);
}

/// Returns a request that names its index.
fn request(index: u64) -> [u64; N] {
    [index << 1, !index << 1]
}

/// Fills the claimed slot `index` at once.
fn fill(producer: &Producer<Global, N>, index: u64) -> Result<u64, (WaitError, Option<u64>)> {
    producer.post(request(index), |_| Some(index), NOW)
}

fn without_phase(words: [u64; N]) -> [u64; N] {
    words.map(|word| word & !1)
}

#[test]
fn a_new_queue_is_empty_whatever_index_it_starts_at() {
    for_each_start(|depth_log2, first| {
        with_queue(depth_log2, first, |_, consumer| {
            assert_eq!(consumer.peek(), None, "depth 2^{depth_log2}, first {first}")
        });
        // No slot has the phase of the first index that will use it.
        for slot in 0..1 << depth_log2 {
            let next = (first..).find(|index| index & ((1 << depth_log2) - 1) == slot).expect("one of the next few");
            assert_ne!(initial_word(slot, first, depth_log2) & 1, phase(next, depth_log2));
        }
    });
}

#[test]
fn requests_come_out_whole_and_in_order_for_many_rounds_whatever_index_the_queue_starts_at() {
    for_each_start(|depth_log2, first| {
        // Once the queue runs full, once each request is taken at once.
        for burst in [1 << depth_log2, 1] {
            with_queue(depth_log2, first, |producer, mut consumer| {
                let depth = producer.queue.depth();
                let mut index = first;
                for _ in 0..8 * depth / burst {
                    let claimed = producer.claim(true, burst, Sharing::Gpu);
                    assert_eq!(claimed, index);
                    for offset in 0..burst {
                        fill(&producer, index + offset).expect("room for the claim");
                    }
                    assert_eq!(
                        producer.claim_if_room(depth - burst, index, Sharing::Gpu),
                        None,
                        "no room behind those"
                    );
                    if burst == depth {
                        assert_eq!(producer.post([0; N], |_| None, NOW), Err((WaitError::Deadline, None)));
                    }
                    for offset in 0..burst {
                        let words = consumer.peek().expect("a request that was posted");
                        assert_eq!(without_phase(words), request(index + offset), "depth {depth}, first {first}");
                        assert_eq!(consumer.take(Some(1)), index + offset);
                    }
                    assert_eq!(consumer.peek(), None, "a request of an earlier round");
                    assert_eq!(producer.wait_all(index + burst, NOW, Order::Acquire), Err(WaitError::Deadline));
                    assert_eq!(producer.wait_peer(1, index + burst, NOW, Order::Acquire), Err(WaitError::Deadline));
                    assert_eq!(
                        producer.wait_peer(0, index + burst, NOW, Order::Acquire),
                        Ok(()),
                        "there was no request to this peer"
                    );
                    index += burst;
                    consumer.finish(Finished {
                        fault: None,
                        counter: None,
                        peer: 1,
                        oldest_incomplete: None,
                        completion_index: index,
                    });
                    assert_eq!(producer.wait_all(index, NOW, Order::Acquire), Ok(()));
                    assert_eq!(producer.wait_peer(1, index, NOW, Order::Acquire), Ok(()));
                    assert_eq!(producer.queue.oldest_incomplete.at(1).load_relaxed_sys(), NOTHING);
                    assert_eq!(
                        (consumer.head(), consumer.completion_index(), producer.position()),
                        (index, index, index)
                    );
                }
            });
        }
    });
}

#[test]
fn a_half_written_request_is_not_taken_in_any_round() {
    for_each_start(|depth_log2, first| {
        with_queue(depth_log2, first, |producer, mut consumer| {
            let depth = producer.queue.depth();
            for index in first..first + 6 * depth {
                producer.claim(true, 1, Sharing::Gpu);
                let slot = producer.queue.slots.at((index & (depth - 1)) * N as u64);
                // Writes one word alone; the other word is still that of the round before.
                for written in 0..N as u64 {
                    let before = slot.at(written).load_relaxed_sys();
                    slot.at(written).store_relaxed_sys(index << 1 | phase(index, depth_log2));
                    assert_eq!(consumer.peek(), None, "depth {depth}, request {index}, only word {written}");
                    slot.at(written).store_relaxed_sys(before);
                }
                fill(&producer, index).expect("room");
                assert!(consumer.peek().is_some());
                consumer.take(None);
            }
        });
    });
}
