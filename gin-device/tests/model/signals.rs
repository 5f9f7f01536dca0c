// SPDX-License-Identifier: MIT OR Apache-2.0
//! Models of signal words, counters and the barriers built on them.

use super::{Reached, Setup, World, await_word, explore, fault, models};
use gin_abi::{COUNTER_BITS, Deadline, SIGNAL_BITS, mask};
use gin_device::grid::meet;
use gin_device::internal::epoch;
use gin_device::internal::host_word::{HostWord, LAST, Look, TURN, WANTED};
use gin_device::internal::order::{Scope, release};
use gin_device::internal::signal_words::{Words, raise};
use gin_device::lsa::publish;
use gin_device::sys::loom::{Loom, LoomWord};
use gin_device::sys::{Memory, Word};
use loom::thread;
use std::sync::Arc;

/// Returns the initial words of a signal with value 0 that GPUs and CPU threads raise.
fn by_both(gpu: u64, cpu: u64) -> [Option<u64>; 4] {
    [Some(gpu), None, Some(cpu), Some(gpu.wrapping_add(cpu))]
}

/// Returns the initial words of a signal that only one kind of engine raises.
fn by_one(engine: usize, value: u64) -> [Option<u64>; 4] {
    let mut words = [None; 4];
    words[engine] = Some(value);
    words[3] = Some(value);
    words
}

fn signals(signals: impl Into<Vec<[Option<u64>; 4]>>, cells: usize) -> Setup {
    Setup { signals: signals.into(), cells, ..Setup::default() }
}

/// Engines, by their index among a signal's words.
const GPU: usize = 0;
const NIC: usize = 1;
const CPU: usize = 2;

/// Returns the word of signal `signal` that an engine raises.
fn word(world: &World, signal: usize, engine: usize) -> LoomWord {
    let Words { gpu, nic, cpu, .. } = world.signals[signal];
    [gpu, nic, cpu][engine].expect("the signal has this word")
}

/// Spawns a thread that writes to a cell and then raises a word of signal 0 by 1.
fn raiser(world: &Arc<World>, cell: usize, engine: usize) -> thread::JoinHandle<()> {
    let world = world.clone();
    thread::spawn(move || {
        world.cells[cell].write(7);
        raise(word(&world, 0, engine), 1);
    })
}

models! {
    fn raises_by_a_gpu_and_by_a_cpu_add_up_and_each_shows_earlier_writes() {
        // From 0; across the end of one word; across the end of the sum; with few bits.
        let (half, max) = (1 << 63, u64::MAX);
        for (gpu, cpu, bits) in [(0, 0, 64), (max, 5, 64), (half, half - 1, 64), (2, max, 3)] {
            explore(3, move || {
                let world = World::new(signals([by_both(gpu, cpu)], 2));
                let raisers = [raiser(&world, 0, GPU), raiser(&world, 1, CPU)];
                let words = &world.signals[0];
                assert_eq!(words.wait(&world.status, 2, bits, Deadline::NONE, || {}), Ok(2));
                assert_eq!(world.cells[0].read() + world.cells[1].read(), 14);
                assert_eq!(words.value(bits), 2);
                for raiser in raisers {
                    raiser.join().unwrap();
                }
            });
        }
    }

    fn two_raises_of_one_word_each_show_earlier_writes() {
        for engine in [GPU, NIC, CPU] {
            explore(3, move || {
                let world = World::new(signals([by_one(engine, u64::MAX)], 2));
                let raisers = [raiser(&world, 0, engine), raiser(&world, 1, engine)];
                world.signals[0].wait(&world.status, 2, SIGNAL_BITS, Deadline::NONE, || {}).unwrap();
                assert_eq!(world.cells[0].read() + world.cells[1].read(), 14);
                for raiser in raisers {
                    raiser.join().unwrap();
                }
            });
        }
    }

    fn a_short_wait_for_the_only_word_of_a_signal_shows_writes_before_its_raises() {
        let met = Reached::new("wait that met both raises");
        let mark = met.clone();
        explore(3, move || {
            let world = World::new(signals([by_one(GPU, u64::MAX)], 2));
            let raisers = [raiser(&world, 0, GPU), raiser(&world, 1, GPU)];
            if world.signals[0].meets_soon(word(&world, 0, GPU), 2) {
                assert_eq!(world.cells[0].read() + world.cells[1].read(), 14);
                mark.mark();
            }
            for raiser in raisers {
                raiser.join().unwrap();
            }
        });
        met.check();
    }

    fn a_short_wait_counts_no_raise_of_a_cpu_and_shows_writes_before_those_of_gpus() {
        let [met, left] = [Reached::new("wait that met the raise"), Reached::new("wait left to others")];
        let marks = [met.clone(), left.clone()];
        explore(3, move || {
            let world = World::new(signals([by_both(0, 0)], 2));
            let raisers = [raiser(&world, 0, GPU), raiser(&world, 1, CPU)];
            let other = {
                let world = world.clone();
                thread::spawn(move || {
                    world.signals[0].wait(&world.status, 2, SIGNAL_BITS, Deadline::NONE, || {}).unwrap();
                })
            };
            let (words, gpu) = (&world.signals[0], word(&world, 0, GPU));
            if words.meets_soon(gpu, 1) {
                assert_eq!(world.cells[0].read(), 7);
                marks[0].mark();
            }
            assert!(!words.meets_soon(gpu, 2), "a GPU has raised it once");
            if words.near.at(LAST).load_relaxed_gpu() != 0 {
                assert!(!words.meets_soon(gpu, 1), "a CPU thread has raised it");
                marks[1].mark();
            }
            for raiser in raisers {
                raiser.join().unwrap();
            }
            other.join().unwrap();
        });
        met.check();
        left.check();
    }

    fn two_threads_that_wait_for_a_host_word_see_writes_before_its_raises() {
        let [looked, told] =
            [Reached::new("thread that looked at the word"), Reached::new("thread that had the value from the other")];
        let marks = [looked.clone(), told.clone()];
        explore(2, move || {
            let world = World::new(signals([by_one(CPU, u64::MAX - 1)], 2));
            let waiters = [1, 2].map(|least| {
                let (world, marks) = (world.clone(), marks.clone());
                thread::spawn(move || {
                    let words = &world.signals[0];
                    words.wait(&world.status, least, SIGNAL_BITS, Deadline::NONE, || {}).unwrap();
                    for cell in 0..least as usize {
                        assert_eq!(world.cells[cell].read(), 7);
                    }
                    // No thread asked: this thread had the turn first, and the other came after it.
                    marks[words.near.at(WANTED).load_relaxed_gpu() as usize].mark();
                })
            });
            for cell in 0..2 {
                world.cells[cell].write(7);
                raise(word(&world, 0, CPU), 1);
            }
            for waiter in waiters {
                waiter.join().unwrap();
            }
            assert_eq!(world.signals[0].near.at(TURN).load_relaxed_gpu(), 0, "the turn was given back");
        });
        looked.check();
        told.check();
    }

    fn a_turn_is_ordered_after_earlier_turns_that_showed_values() {
        let behind = Reached::new("turn behind another one");
        let mark = behind.clone();
        explore(2, move || {
            let world = World::new(signals([by_one(CPU, 0)], 1));
            let words = &world.signals[0];
            let host = HostWord::<Loom> { word: word(&world, 0, CPU), near: words.near };
            // Takes the turn if it is free, and gives it back. The cell stands for the shown value: loom fails a run
            // in which two turns that showed a value are not ordered.
            let turn = {
                let world = world.clone();
                move || {
                    let mut look = Look::new(host);
                    look.now(u64::MAX >> 1);
                    // The cell has this thread's own store if it has shown a value.
                    let shows = look.is_mine() && host.near.at(TURN).load_relaxed_gpu() == 2;
                    if shows {
                        world.cells[0].write(7);
                    }
                    look.end();
                    shows
                }
            };
            let others = [(); 2].map(|()| thread::spawn(turn.clone()));
            host.near.at(WANTED).store_relaxed_gpu(1);
            let own = turn();
            let shown = others.map(|other| other.join().unwrap());
            if own && shown.contains(&true) {
                mark.mark();
            }
        });
        behind.check();
    }

    fn a_thread_whose_wait_has_ended_keeps_no_turn() {
        // A wait for a signal, a flush, and a flush whose first read meets the deadline.
        for (flush, first, ends) in [(false, 1, false), (true, 1, false), (true, 9, true)] {
            explore(2, move || {
                let world = World::new(signals([by_one(CPU, 0), by_one(GPU, 0)], 1));
                let behind = word(&world, 1, GPU);
                // Like lanes of a warp, each stays behind its loop until both have left it.
                let waiters = [(first, ends), (2, false)].map(|(least, ends)| {
                    let world = world.clone();
                    thread::spawn(move || {
                        let host = HostWord::<Loom> { word: word(&world, 0, CPU), near: world.signals[0].near };
                        let mut look = Look::new(host);
                        while !match flush {
                            true => look.is_past(&world.status, least, ends) | ends,
                            false => look.now(least).is_some_and(|over| over as i64 >= 0),
                        } {
                            Loom::pause(0);
                        }
                        behind.red_add_relaxed_gpu(1);
                        while behind.load_relaxed_gpu() != 2 {
                            Loom::pause(0);
                        }
                    })
                });
                raise(word(&world, 0, CPU), 1);
                raise(word(&world, 0, CPU), 1);
                for waiter in waiters {
                    waiter.join().unwrap();
                }
                assert_eq!(world.signals[0].near.at(TURN).load_relaxed_gpu(), 0, "the turn was given back");
            });
        }
    }

    fn a_wait_that_ends_by_a_host_value_of_another_wait_shows_the_covered_writes() {
        let remembered = Reached::new("wait that ended without a look of its own");
        let mark = remembered.clone();
        explore(2, move || {
            // The word in host memory does not begin at 0, and the sum wraps around.
            let world = World::new(signals([by_both(5, u64::MAX - 2)], 1));
            let looker = {
                let world = world.clone();
                thread::spawn(move || {
                    world.signals[0].wait(&world.status, 1, SIGNAL_BITS, Deadline::NONE, || {}).unwrap();
                    assert_eq!(world.cells[0].read(), 7);
                })
            };
            let other = {
                let (world, mark) = (world.clone(), mark.clone());
                thread::spawn(move || {
                    let words = &world.signals[0];
                    let last = words.near.at(LAST).load_relaxed_gpu();
                    words.wait(&world.status, 1, SIGNAL_BITS, Deadline::NONE, || {}).unwrap();
                    if last != u64::MAX - 2 {
                        mark.mark();
                    }
                    assert_eq!(world.cells[0].read(), 7);
                })
            };
            world.cells[0].write(7);
            raise(word(&world, 0, CPU), 1);
            looker.join().unwrap();
            other.join().unwrap();
        });
        remembered.check();
    }

    fn a_value_never_goes_back_and_a_reached_value_stays_reached() {
        explore(3, || {
            let world = World::new(signals([by_both(u64::MAX, 0)], 2));
            let raisers = [raiser(&world, 0, GPU), raiser(&world, 1, CPU)];
            let words = &world.signals[0];
            let reached = words.wait(&world.status, 1, SIGNAL_BITS, Deadline::NONE, || {}).unwrap();
            assert!((1..=2).contains(&reached));
            let later = words.value(SIGNAL_BITS);
            assert!(later >= reached, "{later} after {reached}");
            assert!(words.read(SIGNAL_BITS) >= later);
            assert!(words.wait(&world.status, reached, SIGNAL_BITS, Deadline::after_ns(0), || {}).is_ok());
            for raiser in raisers {
                raiser.join().unwrap();
            }
        });
    }

    fn reading_a_signal_shows_writes_before_its_raises() {
        explore(3, || {
            let world = World::new(signals([by_both(0, 0)], 2));
            let raisers = [raiser(&world, 0, GPU), raiser(&world, 1, CPU)];
            while world.signals[0].read(SIGNAL_BITS) < 2 {
                Loom::pause(0);
            }
            assert_eq!(world.cells[0].read() + world.cells[1].read(), 14);
            for raiser in raisers {
                raiser.join().unwrap();
            }
        });
    }

    fn a_counter_wraps_at_its_width_and_can_be_waited_for_across_the_wrap() {
        for start in [0, mask(COUNTER_BITS), u64::MAX] {
            explore(3, move || {
                // Never reset, so its value starts at the word's initial value.
                let world = World::new(signals([[None, None, Some(start), Some(0)]], 2));
                let proxy = {
                    let world = world.clone();
                    thread::spawn(move || {
                        for cell in 0..2 {
                            world.cells[cell].write(7);
                            raise(word(&world, 0, CPU), 1);
                        }
                    })
                };
                for cell in 0..2 {
                    let least = start.wrapping_add(cell + 1) & mask(COUNTER_BITS);
                    world.signals[0].wait(&world.status, least, COUNTER_BITS, Deadline::NONE, || {}).unwrap();
                    assert_eq!(world.cells[cell as usize].read(), 7);
                }
                proxy.join().unwrap();
            });
        }
    }

    fn an_abort_ends_a_wait_for_a_signal_and_reports_the_value_seen() {
        explore(3, || {
            let world = World::new(signals([by_both(0, 0)], 1));
            let waiter = {
                let world = world.clone();
                thread::spawn(move || world.signals[0].wait(&world.status, 2, SIGNAL_BITS, Deadline::NONE, || {}))
            };
            let raiser = raiser(&world, 0, GPU);
            world.status.post(fault(0));
            let (stop, seen) = waiter.join().unwrap().expect_err("one raise of two");
            assert_eq!(world.fault_of(Err::<(), _>(stop)), fault(0));
            assert!(seen < 2);
            raiser.join().unwrap();
        });
    }

    fn a_raise_covers_stores_of_threads_that_its_thread_has_met() {
        explore(3, || {
            // Word 1 of the other signal is the barrier at which the two threads meet.
            let world = World::new(signals([by_one(GPU, u64::MAX), by_one(GPU, 0)], 2));
            let storing = {
                let world = world.clone();
                thread::spawn(move || {
                    world.cells[0].write(7);
                    word(&world, 1, GPU).store_release_gpu(1);
                })
            };
            let raising = {
                let world = world.clone();
                thread::spawn(move || {
                    world.cells[1].write(7);
                    await_word(word(&world, 1, GPU));
                    publish::<Loom>(Scope::Thread, Some((word(&world, 0, GPU), 3)), None);
                })
            };
            world.signals[0].wait(&world.status, 3, SIGNAL_BITS, Deadline::NONE, || {}).unwrap();
            assert_eq!(world.cells[0].read() + world.cells[1].read(), 14);
            storing.join().unwrap();
            raising.join().unwrap();
        });
    }

    fn a_counter_of_loads_and_stores_shows_the_data_and_adds_up_with_the_network() {
        explore(3, || {
            let world = World::new(signals([by_both(u64::MAX, 0)], 2));
            let getting = {
                let world = world.clone();
                thread::spawn(move || {
                    world.cells[0].write(7);
                    publish::<Loom>(Scope::Thread, None, Some(word(&world, 0, GPU)));
                })
            };
            let proxy = raiser(&world, 1, CPU);
            world.signals[0].wait(&world.status, 2, COUNTER_BITS, Deadline::NONE, || {}).unwrap();
            assert_eq!(world.cells[0].read() + world.cells[1].read(), 14);
            getting.join().unwrap();
            proxy.join().unwrap();
        });
    }

    fn a_barrier_of_a_grid_orders_accesses_before_and_after_it() {
        explore(2, || {
            let world = World::new(signals([by_one(GPU, 0)], 3));
            let blocks = [0, 1, 2].map(|block| {
                let world = world.clone();
                move || {
                    let arrivals = word(&world, 0, GPU);
                    world.cells[block].write(block as u64);
                    meet::<Loom>(arrivals, &world.status, 3, Deadline::NONE).unwrap();
                    let next = (block + 1) % 3;
                    assert_eq!(world.cells[next].read(), next as u64);
                }
            });
            let [zero, one, two] = blocks;
            let (one, two) = (thread::spawn(one), thread::spawn(two));
            zero();
            one.join().unwrap();
            two.join().unwrap();
        });
    }

    fn a_release_at_gpu_scope_covers_reads_by_the_gpu() {
        explore(3, || {
            let world = World::new(signals([by_one(GPU, 0)], 1));
            let writer = {
                let world = world.clone();
                thread::spawn(move || {
                    world.cells[0].write(7);
                    release::<Loom>(Scope::Thread, Scope::Gpu);
                    word(&world, 0, GPU).store_relaxed_gpu(1);
                })
            };
            await_word(word(&world, 0, GPU));
            assert_eq!(world.cells[0].read(), 7);
            writer.join().unwrap();
        });
    }

    fn a_signal_that_two_kinds_of_engine_raise_can_be_reset_between_phases() {
        explore(1, || {
            // Both kinds raise signal 0. Signals 1 and 2 start the next phase, one for each raiser.
            let world = World::new(signals([by_both(u64::MAX, u64::MAX - 1), by_one(GPU, 0), by_one(CPU, 0)], 2));
            let raisers = [0, 1].map(|number| {
                let world = world.clone();
                thread::spawn(move || {
                    let word = word(&world, 0, [GPU, CPU][number]);
                    for phase in 1..=2 {
                        world.cells[number].write(phase);
                        raise(word, 1);
                        if phase == 1 {
                            let next = &world.signals[1 + number];
                            next.wait(&world.status, phase, SIGNAL_BITS, Deadline::NONE, || {}).unwrap();
                        }
                    }
                })
            });
            let words = &world.signals[0];
            for phase in 1..=2 {
                assert_eq!(words.wait(&world.status, 2, SIGNAL_BITS, Deadline::NONE, || {}), Ok(2));
                assert_eq!([0, 1].map(|number| world.cells[number].read()), [phase; 2]);
                words.reset();
                assert_eq!(words.value(SIGNAL_BITS), 0);
                if phase == 1 {
                    raise(word(&world, 1, GPU), 1);
                    raise(word(&world, 2, CPU), 1);
                }
            }
            for raiser in raisers {
                raiser.join().unwrap();
            }
            assert_eq!(words.value(SIGNAL_BITS), 0);
        });
    }

    fn a_barrier_of_epochs_orders_accesses_before_and_after_it() {
        explore(1, || {
            // Rank r writes word r of the other rank, which begins at the end of the circle.
            let start = u64::MAX;
            let world = World::new(signals([by_one(GPU, start); 2], 2));
            let ranks = [0, 1].map(|rank| {
                let world = world.clone();
                move || {
                    let mut met = start;
                    let mut barrier = || {
                        met = met.wrapping_add(1);
                        release::<Loom>(Scope::Thread, Scope::System);
                        epoch::arrive(word(&world, rank, GPU), met);
                        let here = word(&world, 1 - rank, GPU);
                        epoch::wait::<Loom>(here, met, &world.status, Deadline::NONE, || true).unwrap();
                        epoch::acquire::<Loom>();
                    };
                    for round in 1..=2 {
                        world.cells[rank].write(round);
                        barrier();
                        assert_eq!(world.cells[1 - rank].read(), round);
                        barrier();
                    }
                }
            });
            let [zero, one] = ranks;
            let one = thread::spawn(one);
            zero();
            one.join().unwrap();
        });
    }

    fn a_wait_for_an_epoch_ends_with_the_fault_that_is_posted_meanwhile() {
        explore(3, || {
            let world = World::new(signals([by_one(GPU, 0)], 0));
            let host = {
                let world = world.clone();
                thread::spawn(move || world.status.post(fault(3)))
            };
            let waited = epoch::wait::<Loom>(word(&world, 0, GPU), 1, &world.status, Deadline::NONE, || true);
            assert_eq!(world.fault_of(waited.map_err(|(stop, _)| stop)), fault(3));
            host.join().unwrap();
        });
    }

    fn a_barrier_of_signals_orders_accesses_before_and_after_it() {
        explore(2, || {
            // Rank r raises signal r of each rank; the words of rank 0 come first.
            let start = u64::MAX;
            let world = World::new(signals([by_one(GPU, start); 4], 2));
            let ranks = [0, 1].map(|rank| {
                let world = world.clone();
                move || {
                    let mut epoch = 0;
                    let mut barrier = || {
                        epoch += 1;
                        release::<Loom>(Scope::Thread, Scope::System);
                        for member in 0..2 {
                            raise(word(&world, 2 * member + rank, GPU), 1);
                        }
                        for member in 0..2 {
                            let signal = &world.signals[2 * rank + member];
                            signal.wait(&world.status, epoch, SIGNAL_BITS, Deadline::NONE, || {}).unwrap();
                        }
                    };
                    for round in 1..=2 {
                        world.cells[rank].write(round);
                        barrier();
                        assert_eq!(world.cells[1 - rank].read(), round);
                        barrier();
                    }
                }
            });
            let [zero, one] = ranks;
            let one = thread::spawn(one);
            zero();
            one.join().unwrap();
        });
    }
}
