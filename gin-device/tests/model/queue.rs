// SPDX-License-Identifier: MIT OR Apache-2.0
//! Models of the queue: producers of one GPU, and the proxy's consumer.

use super::{Reached, Setup, World, explore, fault, models};
use gin_abi::{Deadline, Fault, FaultKind, Operation};
use gin_device::gin::{Order, Scope, Sharing};
use gin_device::internal::host_word::{TURN, WANTED, WORDS};
use gin_device::internal::order::release;
use gin_device::internal::queue::{Finished, NOTHING};
use gin_device::internal::status::WaitError;
use gin_device::sys::loom::Loom;
use gin_device::sys::{Memory, Word};
use loom::thread;

/// First indices: 0, and the last ones before the end of 32 bits and of signed 64 bits.
const STARTS: [u64; 3] = [0, (1 << 32) - 1, (1 << 63) - 1];

fn queue(depth_log2: u32, first: u64, peers: u64, cells: usize) -> Setup {
    Setup { depth_log2, first, peers, cells, ..Setup::default() }
}

/// Returns the publication of a successful request to `peer`, when no other request to that peer is incomplete.
fn finished(peer: u32, completion_index: u64) -> Finished<'static, Loom> {
    Finished { fault: None, counter: None, peer, oldest_incomplete: None, completion_index }
}

models! {
    fn a_post_that_gives_up_after_its_claim_ends_every_other_wait_with_its_fault() {
        let broken = Reached::new("post that gave up after its claim");
        let mark = broken.clone();
        explore(2, move || {
            let world = World::new(queue(0, STARTS[0], 1, 2));
            let hole = Fault::new(FaultKind::QueueBroken, Operation::Put);
            // Both threads may see the one free slot. Then one of them claims a slot that is not freed in its time.
            let hurried = |cell: usize| {
                let world = world.clone();
                thread::spawn(move || {
                    match world.post_now(cell) {
                        Ok(_) | Err((WaitError::Deadline, None)) => {}
                        Err((WaitError::Deadline, Some(_))) => world.status.report(hole),
                        Err((WaitError::Fault, _)) => panic!("{}", world.status.cause()),
                        Err((WaitError::NotConnected, _)) => panic!("a proxy reaches all"),
                    }
                })
            };
            let (one, two) = (hurried(0), hurried(1));
            one.join().unwrap();
            two.join().unwrap();
            let producer = world.producer();
            if producer.position() == 2 {
                mark.mark();
                assert_eq!(world.fault_of(producer.wait_all(2, Deadline::NONE, Order::Acquire)), hole);
                assert_eq!(world.post_now(0), Err((WaitError::Fault, None)));
                assert_eq!(world.fault_of(world.fill(2, [0; 2], Deadline::NONE)), hole);
                assert_eq!(world.status.reported(), Some(hole), "what the host reads");
            } else {
                assert_eq!(world.status.fault(), None);
            }
        });
        broken.check();
    }

    fn after_a_flush_the_data_of_gets_is_visible_and_sources_may_be_reused() {
        for first in STARTS {
            explore(3, move || {
                let world = World::new(queue(1, first, 1, 3));
                let flusher = {
                    let world = world.clone();
                    thread::spawn(move || {
                        world.post(0);
                        world.post(1);
                        let producer = world.producer();
                        producer.wait_all(producer.position(), Deadline::NONE, Order::Acquire).unwrap();
                        assert_eq!(world.cells[2].read(), 7, "the data of the get");
                        world.cells[0].write(0);
                        world.cells[1].write(0);
                    })
                };
                let mut consumer = world.consumer();
                for _ in 0..2 {
                    world.next(&consumer);
                    consumer.take(None);
                }
                world.cells[2].write(7);
                consumer.finish(finished(0, first.wrapping_add(2)));
                flusher.join().unwrap();
            });
        }
    }

    fn of_two_threads_that_flush_together_each_sees_the_data_and_an_earlier_fault() {
        for (failed, preemptions) in [(false, 2), (true, 1)] {
            explore(preemptions, move || {
                let world = World::new(queue(0, 0, 1, 2));
                world.post(0);
                let flushers = [0, 1].map(|_| {
                    let world = world.clone();
                    thread::spawn(move || {
                        let outcome = world.producer().wait_all(1, Deadline::NONE, Order::Acquire);
                        if failed {
                            assert_eq!(world.fault_of(outcome), fault(1));
                        } else {
                            outcome.unwrap();
                            assert_eq!(world.cells[1].read(), 7, "the data of the get");
                        }
                    })
                });
                let mut consumer = world.consumer();
                world.next(&consumer);
                consumer.take(None);
                world.cells[1].write(7);
                let fault = failed.then(|| (&world.status, fault(1)));
                consumer.finish(Finished { fault, ..finished(0, 1) });
                for flusher in flushers {
                    flusher.join().unwrap();
                }
            });
        }
    }

    fn after_a_quiet_a_raise_by_any_means_covers_the_put() {
        explore(3, || {
            let world = World::new(queue(0, 0, 1, 2));
            let sender = {
                let world = world.clone();
                thread::spawn(move || {
                    world.post(0);
                    let producer = world.producer();
                    producer.wait_peer(0, producer.position(), Deadline::NONE, Order::Acquire).unwrap();
                    release::<Loom>(Scope::Thread, Scope::System);
                    world.status.kernel.at(1).store_relaxed_sys(1);
                })
            };
            let receiver = {
                let world = world.clone();
                thread::spawn(move || {
                    super::await_word(world.status.kernel.at(1));
                    assert_eq!(world.cells[1].read(), 7, "the data of the put");
                })
            };
            let mut consumer = world.consumer();
            world.next(&consumer);
            consumer.take(Some(0));
            // The put arrives at the peer.
            world.cells[1].write(7);
            consumer.finish(finished(0, 1));
            sender.join().unwrap();
            receiver.join().unwrap();
        });
    }

    fn a_flush_covers_earlier_posts_of_other_threads() {
        explore(3, || {
            let world = World::new(queue(0, 0, 1, 3));
            let poster = {
                let world = world.clone();
                thread::spawn(move || {
                    world.post(0);
                    // Another thread of the GPU learns of the post.
                    world.status.kernel.at(1).store_release_gpu(1);
                })
            };
            let flusher = {
                let world = world.clone();
                thread::spawn(move || {
                    super::await_word(world.status.kernel.at(1));
                    let producer = world.producer();
                    producer.wait_all(producer.position(), Deadline::NONE, Order::Acquire).unwrap();
                    assert_eq!(world.cells[2].read(), 7, "the data of the get");
                })
            };
            let mut consumer = world.consumer();
            world.next(&consumer);
            consumer.take(None);
            world.cells[2].write(7);
            consumer.finish(finished(0, 1));
            poster.join().unwrap();
            flusher.join().unwrap();
        });
    }

    fn a_counter_says_that_the_source_may_be_reused() {
        explore(3, || {
            let world = World::new(Setup { signals: vec![[None, None, Some(0), Some(0)]], ..queue(1, 0, 1, 1) });
            let owner = {
                let world = world.clone();
                thread::spawn(move || {
                    world.post(0);
                    world.signals[0].wait(&world.status, 1, gin_abi::COUNTER_BITS, Deadline::NONE, || {}).unwrap();
                    world.cells[0].write(0);
                })
            };
            let mut consumer = world.consumer();
            world.next(&consumer);
            consumer.take(Some(0));
            let counter = world.signals[0].cpu;
            consumer.finish(Finished { counter, ..finished(0, 1) });
            owner.join().unwrap();
        });
    }

    fn a_flush_of_one_peer_waits_for_that_peer_and_not_for_a_slower_one() {
        explore(3, || {
            let world = World::new(queue(1, 0, 2, 3));
            let flusher = {
                let world = world.clone();
                thread::spawn(move || {
                    world.post(0);
                    world.post(1);
                    world.producer().wait_peer(1, 2, Deadline::NONE, Order::Acquire).unwrap();
                    assert_eq!(world.cells[2].read(), 7, "the data of the get");
                    world.cells[1].write(0);
                })
            };
            let mut consumer = world.consumer();
            for peer in 0..2 {
                world.next(&consumer);
                consumer.take(Some(peer));
            }
            world.cells[2].write(7);
            // Request 0, to the other peer, never completes.
            consumer.finish(finished(1, 0));
            flusher.join().unwrap();
            assert_eq!(world.queue.oldest_incomplete.load_relaxed_sys(), 0);
        });
    }

    fn a_flush_of_one_peer_waits_for_all_its_earlier_requests() {
        explore(3, || {
            let world = World::new(queue(1, 0, 1, 4));
            let flusher = {
                let world = world.clone();
                thread::spawn(move || {
                    world.post(0);
                    world.post(1);
                    world.producer().wait_peer(0, 2, Deadline::NONE, Order::Acquire).unwrap();
                    assert_eq!(world.cells[2].read() + world.cells[3].read(), 15, "what the gets brought");
                })
            };
            let mut consumer = world.consumer();
            world.next(&consumer);
            consumer.take(Some(0));
            world.next(&consumer);
            consumer.take(None);
            world.cells[2].write(7);
            consumer.finish(Finished { oldest_incomplete: Some(1), ..finished(0, 1) });
            world.cells[3].write(8);
            consumer.finish(finished(0, 2));
            flusher.join().unwrap();
        });
    }

    fn a_flush_of_one_peer_does_not_wait_for_later_requests_and_sees_the_data_of_earlier() {
        explore(3, || {
            let world = World::new(queue(1, 0, 1, 3));
            let flusher = {
                let world = world.clone();
                thread::spawn(move || {
                    world.post(0);
                    world.post(1);
                    world.producer().wait_peer(0, 1, Deadline::NONE, Order::Acquire).unwrap();
                    assert_eq!(world.cells[2].read(), 7, "the data of the get");
                })
            };
            let mut consumer = world.consumer();
            world.next(&consumer);
            consumer.take(Some(0));
            world.cells[2].write(7);
            consumer.finish(finished(0, 1));
            world.next(&consumer);
            // This request never completes.
            consumer.take(Some(0));
            flusher.join().unwrap();
        });
    }

    fn a_flush_of_one_peer_does_not_take_what_another_thread_read_before_its_requests() {
        explore(1, || {
            let world = World::new(queue(1, 0, 1, 2));
            // Threads have wanted values of `oldest_incomplete` before, so each read is shown.
            world.queue.near.at(2 * WORDS + WANTED).store_relaxed_gpu(1);
            let earlier = {
                let world = world.clone();
                thread::spawn(move || world.producer().wait_peer(0, 0, Deadline::NONE, Order::Acquire).unwrap())
            };
            let flusher = {
                let world = world.clone();
                thread::spawn(move || {
                    world.post(0);
                    world.producer().wait_peer(0, 1, Deadline::NONE, Order::Acquire).unwrap();
                    assert_eq!(world.cells[1].read(), 7, "the data of the get");
                })
            };
            let mut consumer = world.consumer();
            world.next(&consumer);
            consumer.take(Some(0));
            world.cells[1].write(7);
            consumer.finish(finished(0, 1));
            flusher.join().unwrap();
            earlier.join().unwrap();
        });
    }

    fn a_flush_fails_when_one_of_its_requests_failed() {
        for one_peer in [false, true] {
            let spared = Reached::new("flush of the first request that went well");
            let mark = spared.clone();
            explore(3, move || {
                let world = World::new(queue(1, 0, 1, 2));
                let flusher = {
                    let (world, mark) = (world.clone(), mark.clone());
                    thread::spawn(move || {
                        world.post(0);
                        world.post(1);
                        let producer = world.producer();
                        let flush = |position| match one_peer {
                            true => producer.wait_peer(0, position, Deadline::NONE, Order::Acquire),
                            false => producer.wait_all(position, Deadline::NONE, Order::Acquire),
                        };
                        match flush(1) {
                            Ok(()) => mark.mark(),
                            outcome => assert_eq!(world.fault_of(outcome), fault(1)),
                        }
                        assert_eq!(world.fault_of(flush(2)), fault(1));
                    })
                };
                let mut consumer = world.consumer();
                world.next(&consumer);
                consumer.take(Some(0));
                world.next(&consumer);
                consumer.take(None);
                consumer.finish(Finished { oldest_incomplete: Some(1), ..finished(0, 1) });
                consumer.finish(Finished { fault: Some((&world.status, fault(1))), ..finished(0, 2) });
                assert_eq!(world.queue.oldest_incomplete.load_relaxed_sys(), NOTHING);
                flusher.join().unwrap();
            });
            spared.check();
        }
    }

    fn a_fault_ends_flushes_and_posts_that_no_consumer_will_serve() {
        explore(3, || {
            let world = World::new(queue(0, 0, 1, 1));
            world.post(0);
            let kernel = {
                let world = world.clone();
                thread::spawn(move || {
                    let producer = world.producer();
                    assert_eq!(world.fault_of(producer.wait_peer(0, 1, Deadline::NONE, Order::Acquire)), fault(3));
                    assert_eq!(world.fault_of(producer.wait_all(1, Deadline::NONE, Order::Acquire)), fault(3));
                    assert_eq!(world.fault_of(world.fill(1, [0; 2], Deadline::NONE)), fault(3));
                })
            };
            world.status.post(fault(3));
            kernel.join().unwrap();
        });
    }

    fn a_full_queue_holds_its_producer_up_and_no_slot_is_overwritten_early() {
        for (depth_log2, count, first) in [(0, 3, STARTS[0]), (0, 3, STARTS[1]), (1, 4, STARTS[2]), (2, 5, STARTS[1])] {
            let full = Reached::new("full queue");
            let mark = full.clone();
            explore(3, move || {
                let world = World::new(queue(depth_log2, first, 1, count));
                let producer = {
                    let (world, mark) = (world.clone(), mark.clone());
                    thread::spawn(move || {
                        for cell in 0..count {
                            world.write(cell);
                            let posted = world.post_now(cell).or_else(|(stop, claimed)| {
                                assert_eq!((stop, claimed), (WaitError::Deadline, None), "no other thread claims");
                                mark.mark();
                                Ok::<_, WaitError>(world.post(cell))
                            });
                            assert_eq!(posted, Ok(first.wrapping_add(cell as u64)));
                        }
                    })
                };
                let mut consumer = world.consumer();
                for cell in 0..count {
                    assert_eq!(world.next(&consumer), cell);
                    consumer.take(None);
                }
                producer.join().unwrap();
            });
            full.check();
        }
    }

    fn a_claim_of_more_slots_than_there_are_is_filled_in_rounds() {
        for (preemptions, depth_log2, count, others, first) in
            [(2, 0, 3, 0, STARTS[0]), (2, 1, 5, 0, STARTS[2]), (1, 0, 2, 1, STARTS[1])]
        {
            explore(preemptions, move || {
                let world = World::new(queue(depth_log2, first, 1, count + others));
                let group = {
                    let world = world.clone();
                    thread::spawn(move || {
                        let first = world.producer().claim(true, count as u64, Sharing::Gpu);
                        for cell in 0..count {
                            let index = first.wrapping_add(cell as u64);
                            world.write(cell);
                            world.fill(index, world.request(cell), Deadline::NONE).unwrap();
                        }
                    })
                };
                let other = (others > 0).then(|| {
                    let world = world.clone();
                    thread::spawn(move || world.post(count))
                });
                let mut consumer = world.consumer();
                let mut cells = Vec::new();
                for _ in 0..count + others {
                    cells.push(world.next(&consumer));
                    consumer.take(None);
                }
                // A claim is contiguous: the other thread's request comes before or after it.
                let group_first = (0..count + others).eq(cells.iter().copied());
                let group_last = (0..count).eq(cells[others..].iter().copied());
                assert!(group_first || group_last, "{cells:?}");
                group.join().unwrap();
                other.map(|other| other.join().unwrap());
            });
        }
    }

    fn the_guess_at_the_consumer_index_may_go_backwards_without_harm() {
        let backwards = Reached::new("guess at the consumer index older than one that was there before");
        let mark = backwards.clone();
        explore(1, move || {
            let first = STARTS[1];
            let world = World::new(queue(0, first, 1, 3));
            world.post(0);
            let poster = |cell: usize| {
                let (world, mark) = (world.clone(), mark.clone());
                thread::spawn(move || {
                    let index = world.post(cell);
                    // This thread saw a value with room for its index: `index` or more.
                    if world.queue.guess().load_relaxed_gpu() < index {
                        mark.mark();
                    }
                })
            };
            let (one, two) = (poster(1), poster(2));
            let mut consumer = world.consumer();
            for _ in 0..3 {
                world.next(&consumer);
                consumer.take(None);
            }
            one.join().unwrap();
            two.join().unwrap();
            world.post_now(0).expect("the slot is empty");
        });
        backwards.check();
    }

    fn every_request_is_read_whole_and_once_in_claim_order_with_its_payload() {
        // Two threads post: one `posts` requests, the other a single one.
        for (preemptions, depth_log2, posts, first) in
            [(2, 0, 1, STARTS[1]), (1, 0, 2, STARTS[0]), (2, 1, 2, STARTS[2])]
        {
            explore(preemptions, move || {
                let world = World::new(queue(depth_log2, first, 1, posts + 1));
                let several = {
                    let world = world.clone();
                    thread::spawn(move || {
                        for cell in 0..posts {
                            world.post(cell);
                        }
                    })
                };
                let one = {
                    let world = world.clone();
                    thread::spawn(move || world.post(posts))
                };
                let mut consumer = world.consumer();
                let mut cells = Vec::new();
                for index in 0..=posts as u64 {
                    cells.push(world.next(&consumer));
                    assert_eq!(consumer.take(None), first.wrapping_add(index));
                }
                assert!(consumer.peek().is_none(), "a request that nobody posted");
                cells.retain(|&cell| cell != posts);
                assert!((0..posts).eq(cells), "a request came twice, or one thread's changed places");
                several.join().unwrap();
                one.join().unwrap();
            });
        }
    }

    fn a_post_past_its_deadline_claims_no_slot_and_leaves_the_queue_usable() {
        for (preemptions, first) in [(2, STARTS[0]), (2, STARTS[2])] {
            let (refused, accepted) = (Reached::new("post refused"), Reached::new("post accepted"));
            let marks = (refused.clone(), accepted.clone());
            explore(preemptions, move || {
                let world = World::new(queue(0, first, 1, 3));
                world.post(0);
                let hurried = {
                    let (world, marks) = (world.clone(), marks.clone());
                    thread::spawn(move || {
                        world.write(1);
                        match world.post_now(1) {
                            Err((stop, None)) => {
                                assert_eq!(stop, WaitError::Deadline);
                                marks.0.mark();
                                0
                            }
                            // There was room when it claimed, though another thread may have claimed first.
                            Err((_, Some(index))) => {
                                world.fill(index, world.request(1), Deadline::NONE).unwrap();
                                1
                            }
                            Ok(_) => {
                                marks.1.mark();
                                1
                            }
                        }
                    })
                };
                let patient = {
                    let world = world.clone();
                    thread::spawn(move || world.post(2))
                };
                let mut consumer = world.consumer();
                for _ in 0..2 {
                    world.next(&consumer);
                    consumer.take(None);
                }
                let posted = 2 + hurried.join().unwrap();
                patient.join().unwrap();
                if posted == 3 {
                    world.next(&consumer);
                    consumer.take(None);
                }
                assert_eq!(world.producer().position(), first.wrapping_add(posted), "claims that were not posted");
                assert!(consumer.peek().is_none());
                // The queue is usable and has all its room.
                world.post_now(0).unwrap();
            });
            refused.check();
            accepted.check();
        }
    }

    fn a_thread_that_waits_for_room_claims_an_empty_slot_or_none() {
        for (preemptions, first) in [(1, STARTS[0]), (0, STARTS[2])] {
            let (refused, accepted) = (Reached::new("post refused"), Reached::new("post accepted"));
            let marks = (refused.clone(), accepted.clone());
            explore(preemptions, move || {
                let world = World::new(queue(0, first, 1, 3));
                world.post(0);
                let waits = |cell: usize, ns: u64| {
                    let world = world.clone();
                    thread::spawn(move || {
                        world.write(cell);
                        // It has looked and found no room.
                        let posted = world.producer().post(world.request(cell), |_| None, Deadline::after_ns(ns));
                        posted.map_err(|end| assert_eq!(end, (WaitError::Deadline, None), "a slot without room"))
                    })
                };
                // A deadline of 1 does not pass in a model.
                let (hurried, patient) = (waits(1, 0), waits(2, 1));
                let mut consumer = world.consumer();
                for _ in 0..2 {
                    world.next(&consumer);
                    consumer.take(None);
                }
                let posted = match hurried.join().unwrap() {
                    Ok(_) => {
                        marks.1.mark();
                        world.next(&consumer);
                        consumer.take(None);
                        3
                    }
                    Err(()) => {
                        marks.0.mark();
                        2
                    }
                };
                patient.join().unwrap().expect("room comes");
                assert_eq!(world.producer().position(), first.wrapping_add(posted), "claims that were not posted");
                assert!(consumer.peek().is_none());
                world.post_now(0).expect("the slot is empty");
            });
            refused.check();
            accepted.check();
        }
    }

    fn a_post_finds_room_while_a_flush_has_the_turn_to_read_the_consumer_index() {
        let turn = Reached::new("post that waited while the flush had the turn");
        let mark = turn.clone();
        explore(1, move || {
            let world = World::new(queue(0, 0, 1, 3));
            world.post(0);
            let index = world.producer().claim(true, 1, Sharing::Gpu);
            let flusher = {
                let world = world.clone();
                thread::spawn(move || {
                    world.producer().wait_peer(0, index + 1, Deadline::NONE, Order::Acquire).unwrap();
                    assert_eq!(world.cells[2].read(), 7, "the data of the get");
                })
            };
            let poster = {
                let (world, mark) = (world.clone(), mark.clone());
                thread::spawn(move || {
                    world.write(1);
                    // The flush begins, also without a preemption.
                    Loom::pause(0);
                    if world.queue.near.at(TURN).load_relaxed_gpu() != 0 {
                        mark.mark();
                    }
                    world.fill(index, world.request(1), Deadline::NONE).unwrap();
                })
            };
            let mut consumer = world.consumer();
            for _ in 0..2 {
                world.next(&consumer);
                consumer.take(Some(0));
            }
            world.cells[2].write(7);
            consumer.finish(finished(0, index + 1));
            flusher.join().unwrap();
            poster.join().unwrap();
        });
        turn.check();
    }
}
