// SPDX-License-Identifier: MIT OR Apache-2.0
//! Programs that would hang or be undefined on a GPU are reported with every waiter and its place.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use common::*;
use gin_device::coop::{Block, Coop, Warp};
use gin_device::exec::Reduction;
use gin_virtual::*;

/// Checks the error of a grid in every world: the message must contain all of `parts`.
fn wrong(grid: impl Fn() -> Grid, parts: &[&str]) {
    for world in worlds() {
        let error = run_grid(&world, DeviceConfig::default(), &grid()).unwrap_err();
        let text = error.to_string();
        for part in parts {
            assert!(text.contains(part), "{world:?}: no {part:?} in\n{text}");
        }
    }
}

#[test]
fn a_barrier_that_waits_for_an_exited_thread_names_both() {
    wrong(
        || {
            Grid::new("leaver", 1, 64, || {
                if thread() != 9 {
                    sync();
                }
            })
        },
        &[
            "rank 0, grid `leaver` (launch 1), block 0, thread ",
            "barrier 0 needs the whole block of 64 threads, 1 of them have exited",
        ],
    );
}

#[test]
fn a_barrier_for_more_threads_than_the_block_has_is_refused_at_once() {
    wrong(
        || {
            Grid::new("many", 1, 64, || {
                barrier(1, 96, Reduction::None, false);
            })
        },
        &[
            "barrier 1 needs 96 threads, the block has 64",
            "waiting at barrier 1 for 96 threads at gin-host/virtual/tests/misuse.rs:",
        ],
    );
}

#[test]
fn a_named_barrier_that_lacks_threads_that_have_exited_is_reported() {
    wrong(
        || {
            Grid::new("half", 1, 96, || {
                if thread() < 50 {
                    barrier(2, 64, Reduction::None, false);
                }
            })
        },
        &["barrier 2 needs 64 threads, the block has 96, ", "of them have exited"],
    );
}

#[test]
fn threads_that_wait_at_different_barriers_are_stuck_and_named_with_theirs() {
    wrong(
        || {
            Grid::new("apart", 2, 64, || {
                let _ = barrier(if thread() < 32 { 3 } else { 4 }, 0, Reduction::None, false);
            })
        },
        &[
            "rank 0, grid `apart`, block ",
            "no thread can ever run again",
            "thread 0 to 31: waiting at barrier 3 for the whole block at gin-host/virtual/tests/misuse.rs:",
            "thread 32 to 63: waiting at barrier 4 for the whole block at gin-host/virtual/tests/misuse.rs:",
        ],
    );
}

#[test]
fn a_wait_in_the_device_api_is_reported_at_the_line_that_called_it() {
    let line = line!() + 5;
    wrong(
        || {
            Grid::new("lines", 1, 32, || {
                if thread() < 16 {
                    Block.sync();
                } else {
                    Warp.sync();
                }
            })
        },
        &[
            &format!("waiting at barrier 0 for the whole block at gin-host/virtual/tests/misuse.rs:{line}:"),
            &format!("waiting in an exchange of lanes 0xffffffff at gin-host/virtual/tests/misuse.rs:{}:", line + 2),
        ],
    );
}

#[test]
fn a_barrier_with_two_different_counts_is_reported() {
    wrong(
        || {
            Grid::new("counts", 1, 96, || {
                barrier(1, if thread() < 32 { 64 } else { 96 }, Reduction::None, false);
            })
        },
        &["barrier 1 for ", " threads, others wait there for "],
    );
}

#[test]
fn a_barrier_with_two_different_reductions_is_reported() {
    wrong(
        || {
            Grid::new("kinds", 1, 64, || {
                barrier(0, 0, if thread() == 5 { Reduction::And } else { Reduction::Or }, false);
            })
        },
        &["barrier 0 with reduction ", ", others wait there with "],
    );
}

#[test]
fn barrier_numbers_and_counts_are_checked() {
    let grid = |id, threads| {
        move || {
            Grid::new("numbers", 1, 64, move || {
                barrier(id, threads, Reduction::None, false);
            })
        }
    };
    wrong(grid(16, 0), &["barrier 16 does not exist; a block has 16"]);
    wrong(grid(1, 33), &["barrier 1 for 33 threads, not a multiple of 32"]);
}

#[test]
fn more_arrivals_than_a_barrier_is_for_are_reported() {
    // 40 threads of whole warps wait when the 16 of the partial last warp arrive, which count as 32.
    wrong(
        || {
            let waiting = Arc::new(AtomicU32::new(0));
            Grid::new("surplus", 1, 80, move || match thread() {
                0..40 => {
                    waiting.fetch_add(1, SeqCst);
                    barrier(1, 64, Reduction::None, false);
                }
                40..64 => loop {
                    pause(1000);
                },
                _ => {
                    while waiting.load(SeqCst) < 40 {
                        pause(1000);
                    }
                    // Longer than any schedule keeps a thread from the barrier.
                    pause(1_000_000);
                    barrier(1, 64, Reduction::None, false);
                }
            })
        },
        &["barrier 1 for 64 threads, 72 arrived, counted in warps"],
    );
}

#[test]
fn a_warp_that_arrives_twice_is_reported() {
    wrong(
        || {
            Grid::new("twice", 1, 64, || {
                if thread() < 32 {
                    arrive(1, 64);
                    arrive(1, 64);
                } else {
                    pause(1_000_000);
                    barrier(1, 64, Reduction::None, false);
                }
            })
        },
        &[
            "barrier 1 for 64 threads, where this thread has arrived already without waiting; it may come again when the \
           barrier was complete",
        ],
    );
}

#[test]
fn an_arrival_at_a_barrier_that_others_reduce_at_is_reported() {
    wrong(
        || {
            Grid::new("mixed", 1, 64, || {
                if thread() < 32 {
                    barrier(1, 64, Reduction::Or, true);
                } else {
                    pause(1_000_000);
                    arrive(1, 64);
                }
            })
        },
        &["barrier 1 with reduction None, others wait there with Or"],
    );
}

#[test]
fn arrivals_that_nobody_can_complete_are_reported_with_their_number() {
    wrong(
        || {
            Grid::new("alone", 1, 96, || {
                if thread() < 64 {
                    arrive(1, 96);
                } else {
                    // Longer than any schedule keeps a thread from the barrier.
                    pause(1_000_000);
                }
            })
        },
        &["barrier 1 needs 96 threads, 64 have come, 64 of them without waiting; of the block's 96 threads "],
    );
}

#[test]
fn an_exchange_that_waits_for_an_exited_lane_names_the_lane() {
    wrong(
        || {
            Grid::new("lost lane", 1, 32, || {
                if thread() != 3 {
                    exchange(u32::MAX, 0);
                }
            })
        },
        &["grid `lost lane`", "exchange of lanes 0xffffffff"],
    );
    let late = || {
        let has_begun = AtomicU32::new(0);
        Grid::new("late", 1, 32, move || {
            if thread() == 3 {
                // The thread ends before another one runs.
                has_begun.store(1, SeqCst);
                return;
            }
            while has_begun.load(SeqCst) == 0 {
                pause(1000);
            }
            exchange(u32::MAX, 0);
        })
    };
    wrong(late, &["an exchange of lanes 0xffffffff needs lanes 0x00000008, which have exited"]);
}

#[test]
fn a_lane_outside_of_its_own_mask_is_reported() {
    wrong(
        || {
            Grid::new("outsider", 1, 32, || {
                exchange(0xffff, 0);
            })
        },
        &["calls an exchange of lanes 0x0000ffff, which do not include it"],
    );
}

#[test]
fn lanes_that_wait_for_each_other_with_different_masks_are_reported() {
    wrong(
        || {
            Grid::new("two masks", 1, 64, || {
                if thread() < 32 {
                    exchange(if thread() == 3 { 0x0f } else { u32::MAX }, 0);
                } else {
                    // The block is not stuck: these threads continue until the grid is ended.
                    loop {
                        pause(1000);
                    }
                }
            })
        },
        &[
            "which waits for it",
            "waiting in an exchange of lanes 0x0000000f",
            "waiting in an exchange of lanes 0xffffffff",
        ],
    );
}

#[test]
fn three_exchanges_that_wait_in_a_circle_are_reported() {
    wrong(
        || {
            Grid::new("circle", 1, 64, || match thread() {
                0 => drop(exchange(0b011, 0)),
                1 => drop(exchange(0b110, 0)),
                2 => drop(exchange(0b101, 0)),
                _ => loop {
                    pause(1000);
                },
            })
        },
        &["which waits for it"],
    );
}

#[test]
fn lanes_in_an_exchange_and_threads_at_a_barrier_that_wait_for_each_other_are_stuck() {
    wrong(
        || {
            Grid::new("mixed", 1, 32, || {
                if thread() == 0 {
                    sync();
                } else {
                    exchange(u32::MAX, 0);
                }
            })
        },
        &["no thread can ever run again", "thread 0: waiting at barrier 0", "thread 1 to 31: waiting in an exchange"],
    );
}

#[test]
fn a_thread_that_panics_ends_its_grid_with_its_message_and_place_and_leaves_other_grids_alone() {
    /// Counts the values created and those alive.
    struct Counted(Arc<[AtomicU32; 2]>);
    impl Counted {
        fn new(counts: &Arc<[AtomicU32; 2]>) -> Self {
            for count in counts.iter() {
                count.fetch_add(1, SeqCst);
            }
            Counted(counts.clone())
        }
    }
    impl Drop for Counted {
        fn drop(&mut self) {
            self.0[1].fetch_sub(1, SeqCst);
        }
    }
    for world in worlds() {
        let gpu = world.device(DeviceConfig::default());
        let counts: Arc<[AtomicU32; 2]> = Arc::default();
        let host = || {
            let counted = counts.clone();
            let bad = Grid::new("bad", 2, 64, move || {
                let _counted = Counted::new(&counted);
                sync();
                assert!(thread() != 40 || block() != 1, "thread {} fails", thread());
                loop {
                    pause(100);
                }
            });
            let good = Grid::new("good", 1, 32, || (0..20).for_each(|_| sync()));
            let (bad, good) = (gpu.launch(StreamId(0), bad).unwrap(), gpu.launch(StreamId(1), good).unwrap());
            let after = gpu.launch(StreamId(0), Grid::new("after", 1, 32, sync)).unwrap();
            let error = bad.wait().unwrap_err();
            let LaunchError::Panicked { actor, message } = &error else { panic!("{error}") };
            assert_eq!(actor.to_string(), "rank 0, grid `bad` (launch 1), block 1, thread 40");
            assert!(message.starts_with("thread 40 fails, at gin-host/virtual/tests/misuse.rs:"), "{message}");
            good.wait().unwrap();
            after.wait().unwrap();
        };
        world.run(vec![host]).unwrap();
        let [made, living] = [&counts[0], &counts[1]].map(|count| count.load(SeqCst));
        assert!((64..=128).contains(&made), "{made}");
        assert_eq!(living, 0);
    }
}

#[test]
fn a_trap_ends_its_grid_with_its_text() {
    wrong(
        || {
            Grid::new("trap", 3, 33, || {
                if thread() == 32 && block() == 2 {
                    (executor().trap)("out of cheese");
                }
                loop {
                    pause(10);
                }
            })
        },
        &["rank 0, grid `trap` (launch 1), block 2, thread 32 trapped: out of cheese"],
    );
}

#[test]
fn a_thread_that_swallows_its_unwinding_is_unwound_again() {
    wrong(
        || {
            Grid::new("stubborn", 1, 2, || {
                if thread() == 0 {
                    for _ in 0..3 {
                        let wait = std::panic::AssertUnwindSafe(|| {
                            loop {
                                pause(10);
                            }
                        });
                        let _: Result<(), _> = std::panic::catch_unwind(wait);
                    }
                } else {
                    pause(1000);
                    (executor().trap)("enough");
                }
            })
        },
        &["enough"],
    );
}

#[test]
fn a_destructor_that_waits_while_its_thread_is_unwound_does_not_wait() {
    struct Waits;
    impl Drop for Waits {
        fn drop(&mut self) {
            sync();
            exchange(u32::MAX, 0);
            pause(1_000_000);
            assert!(!block_on(|| false));
        }
    }
    wrong(
        || {
            Grid::new("waits", 1, 32, || {
                let _waits = Waits;
                if thread() == 31 {
                    pause(10_000);
                    std::mem::forget(_waits);
                    (executor().trap)("over");
                }
                loop {
                    pause(100);
                }
            })
        },
        &["over"],
    );
}

#[test]
fn a_failure_that_nobody_asks_about_fails_the_run() {
    for world in worlds() {
        let gpu = world.device(DeviceConfig::default());
        let host = || drop(gpu.launch(StreamId(0), Grid::new("unseen", 1, 1, || panic!("alone"))).unwrap());
        let error = world.run(vec![host]).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, WorldError::UnseenFailure(LaunchError::Panicked { .. })), "{text}");
        assert!(text.contains("alone"), "{text}");
    }
}
