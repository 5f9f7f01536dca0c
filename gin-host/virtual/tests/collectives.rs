// SPDX-License-Identifier: MIT OR Apache-2.0
//! Operations that threads of a block do together: barriers, exchanges, votes, the active mask, shared memory.

mod common;

use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};

use common::*;
use gin_device::coop::{Arrivals, Coop, LaneCoop, Lanes, Tile, Warp, WarpSpan};
use gin_device::exec::{Reduction, SharedKey};
use gin_virtual::*;

#[test]
fn an_exchange_gives_every_lane_of_a_full_warp_the_values_of_all() {
    everywhere(|| {
        Grid::new("full", 2, 128, || {
            for round in 0..4 {
                let base = u64::from(thread() / 32 * 1000 + block() * 100_000) + round;
                let values = exchange(u32::MAX, base + u64::from(thread() % 32) * 10);
                for (lane, value) in (0..).zip(values) {
                    assert_eq!(value, base + lane * 10);
                }
            }
        })
    });
}

#[test]
fn an_exchange_of_a_partial_warp_may_name_the_lanes_that_it_lacks_and_leaves_theirs() {
    everywhere(|| {
        Grid::new("partial", 1, 45, || {
            let values = exchange(u32::MAX, u64::from(thread()));
            let (first, lanes) = if thread() < 32 { (0, 32) } else { (32, 13) };
            for (lane, value) in (0..).zip(values) {
                assert_eq!(value, if lane < lanes { first + lane } else { u64::MAX });
            }
        })
    });
}

#[test]
fn disjoint_masks_of_one_warp_exchange_independently() {
    everywhere(|| {
        Grid::new("masked", 1, 32, || {
            let odd = thread() % 2;
            let mask = 0x5555_5555 << odd;
            for round in 0..3 + u64::from(odd) {
                let values = exchange(mask, u64::from(thread()) + round);
                for (lane, value) in (0..).zip(values) {
                    assert_eq!(value, if mask >> lane & 1 == 1 { lane + round } else { u64::MAX });
                }
            }
        })
    });
}

#[test]
fn a_single_lane_exchanges_with_itself_at_once() {
    everywhere(|| {
        Grid::new("single", 1, 32, || {
            let lane = thread();
            let values = exchange(1 << lane, 7);
            assert_eq!(values[lane as usize], 7);
            assert_eq!(values.iter().filter(|value| **value != u64::MAX).count(), 1);
        })
    });
}

#[test]
fn ballots_and_shuffles_of_the_device_api_hold_for_full_partial_and_masked_groups() {
    everywhere(|| {
        Grid::new("api", 1, 40, || {
            let (thread, lane) = (thread(), thread() % 32);
            let exist = if thread < 32 { u32::MAX } else { 0xff };
            assert_eq!(
                Warp.ballot(thread % 3 == 0),
                (0..32).filter(|l| exist >> l & 1 == 1 && (thread / 32 * 32 + l) % 3 == 0).map(|l| 1 << l).sum()
            );
            assert_eq!(Warp.shuffle(u64::from(thread), 5), u64::from(thread / 32 * 32 + 5));
            assert_eq!(Tile::<8>.shuffle_xor(u64::from(thread), 1), u64::from(thread ^ 1));
            assert!(Tile::<4>.any(thread % 4 == 2) && !Tile::<4>.all(thread % 4 == 2));
            if lane % 4 == 1 {
                let mask = 0x2222_2222 & exist;
                // Safety: exactly these lanes arrive here.
                let lanes = unsafe { Lanes::new(mask) };
                assert_eq!(lanes.ballot(true), mask);
                assert_eq!(lanes.broadcast(u64::from(thread), 1), u64::from(thread / 32 * 32 + 5));
            }
        })
    });
}

#[test]
fn shuffles_matches_and_reductions_of_the_device_api_hold_for_full_and_partial_groups() {
    everywhere(|| {
        Grid::new("exchanges", 1, 40, || {
            let (own, lanes) = (thread() % 32, if thread() < 32 { 32 } else { 8 });
            assert_eq!(Warp.shuffle_up(own, 3), own.checked_sub(3).unwrap_or(own));
            assert_eq!(Tile::<8>.shuffle_down(f64::from(own), 3), f64::from(if own % 8 < 5 { own + 3 } else { own }));
            assert_eq!(Tile::<8>.shuffle(own, 9), own);
            assert_eq!(Warp.shuffle_xor(own as i32, 5), (own ^ 5) as i32);
            let even = 0x5555_5555 & (u32::MAX >> (32 - lanes));
            assert_eq!(Warp.match_any(u64::from(own % 2) << 40), even << (own % 2));
            assert!(Warp.match_all(5u32) && !Warp.match_all(own) && !Warp.match_all(u64::from(own) << 32));
            assert_eq!((Warp.reduce_add(own), Tile::<8>.reduce_max(own)), ((0..lanes).sum(), own | 7));
            assert_eq!((Warp.reduce_min(-(own as i32)), Warp.reduce_min(own + 1)), (1 - lanes as i32, 1));
            assert_eq!((Warp.reduce_and(own | 64), Warp.reduce_or(own), Warp.reduce_xor(own & 1)), (64, lanes - 1, 0));
        })
    });
}

#[test]
fn block_barriers_reduce_predicates_of_all_threads() {
    everywhere(|| {
        Grid::new("reduce", 2, 70, || {
            let reduce = |reduction, predicate| barrier(3, 0, reduction, predicate);
            assert_eq!(reduce(Reduction::Or, thread() == 69), 1);
            assert_eq!(reduce(Reduction::Or, false), 0);
            assert_eq!(reduce(Reduction::And, true), 1);
            assert_eq!(reduce(Reduction::And, thread() != 33), 0);
            assert_eq!(reduce(Reduction::Count, thread().is_multiple_of(7)), 10);
            assert_eq!(reduce(Reduction::None, true), 0);
        })
    });
}

#[test]
fn named_barriers_hold_only_the_warps_that_they_are_for() {
    everywhere(|| {
        let counts: Arc<[AtomicU64; 2]> = Arc::default();
        Grid::new("named", 1, 160, move || {
            // Warps 0 and 1 use barrier 1, the rest barrier 2, a different number of times.
            let (half, threads, rounds) = if thread() < 64 { (0, 64, 5) } else { (1, 96, 2) };
            for round in 1..=rounds {
                counts[half].fetch_add(1, SeqCst);
                barrier(half as u32 + 1, threads, Reduction::None, false);
                assert_eq!(counts[half].load(SeqCst), u64::from(threads) * round);
                barrier(half as u32 + 1, threads, Reduction::None, false);
            }
        })
    });
}

#[test]
fn a_partial_last_warp_counts_as_a_whole_one_at_a_barrier_with_a_count() {
    everywhere(|| {
        Grid::new("tail", 1, 72, || {
            if thread() >= 32 {
                assert_eq!(barrier(5, 64, Reduction::Count, true), 40);
            }
            // A count of all warps and no count name the same barrier.
            barrier(0, if thread() < 32 { 0 } else { 96 }, Reduction::None, false);
        })
    });
}

#[test]
fn a_thread_may_come_back_to_a_barrier_before_the_others_have_left_it() {
    everywhere(|| {
        let turn = Arc::new(AtomicU32::new(0));
        Grid::new("rounds", 1, 64, move || {
            for round in 0..64 {
                if thread() == round {
                    assert_eq!(turn.swap(round + 1, SeqCst), round);
                }
                sync();
            }
        })
    });
}

#[test]
fn the_active_mask_is_the_same_set_in_all_its_lanes_and_sets_are_disjoint() {
    everywhere(|| {
        Grid::new("mask", 1, 57, || {
            for _ in 0..5 {
                let mask = (executor().active_mask)(Location::caller());
                assert_eq!(mask >> (thread() % 32) & 1, 1);
                // A lane of the mask that came with another mask, or not at all, would be an error.
                let values = exchange(mask, u64::from(mask));
                for lane in (0..32).filter(|lane| mask >> lane & 1 == 1) {
                    assert_eq!(values[lane], u64::from(mask));
                }
            }
        })
    });
}

#[test]
fn active_masks_of_all_sizes_are_met() {
    let sizes: Arc<List<u32>> = Arc::default();
    for world in seeded_worlds(6) {
        let list = sizes.clone();
        let grid = Grid::new("sizes", 4, 32, move || {
            for _ in 0..4 {
                list.push((executor().active_mask)(Location::caller()).count_ones());
                sync();
            }
        });
        run_grid(&world, DeviceConfig::default(), &grid).unwrap();
    }
    let sizes = sizes.get();
    for size in [1, 2, 8, 16, 24, 32] {
        assert!(sizes.contains(&size), "no active mask of {size} lanes");
    }
}

#[test]
fn a_lane_that_spins_does_not_keep_its_siblings_from_their_active_mask() {
    everywhere(|| {
        let others = Arc::new(AtomicU32::new(0));
        Grid::new("spin", 1, 32, move || {
            if thread() == 7 {
                while others.load(SeqCst) < 31 {
                    (executor().switch_point)();
                }
            } else {
                let mask = (executor().active_mask)(Location::caller());
                assert_eq!(mask >> 7 & 1, 0);
                others.fetch_add(1, SeqCst);
            }
        })
    });
}

static FIRST: u8 = 1;
static SECOND: u8 = 2;

fn shared(key: &'static u8, bytes: usize) -> *mut u8 {
    (executor().shared)(SharedKey { key: std::ptr::from_ref(key).addr(), bytes, align: 16 })
}

#[test]
fn static_shared_memory_is_one_zeroed_block_for_each_block_and_declaration() {
    everywhere(|| {
        let places: Arc<List<(u32, usize)>> = Arc::default();
        Grid::new("static", 3, 64, move || {
            let (first, second) = (shared(&FIRST, 64), shared(&SECOND, 64));
            assert_ne!(first, second);
            assert_eq!(first.addr() % 16, 0);
            // Safety: each thread uses its own byte; the segments live as long as the block.
            unsafe {
                let (mine, other) = (first.add(thread() as usize), second.add(thread() as usize));
                assert_eq!((mine.read(), other.read()), (0, 0));
                mine.write(thread() as u8);
                assert_eq!(other.read(), 0);
            }
            sync();
            // Safety: written before the barrier.
            let next = unsafe { shared(&FIRST, 64).add((thread() as usize + 1) % 64).read() };
            assert_eq!(u32::from(next), (thread() + 1) % 64);
            // All blocks are resident while one holds its memory.
            if thread() == 0 {
                places.push((block(), first.addr()));
                while places.get().len() < 3 {
                    pause(100);
                }
                let places = places.get();
                assert!(places.iter().all(|(other, place)| *other == block() || *place != first.addr()));
            }
            sync();
        })
    });
}

#[test]
fn dynamic_shared_memory_has_the_size_of_the_launch_and_holds_nothing_to_rely_on() {
    everywhere(|| {
        Grid::new("dynamic", 2, 32, || {
            let (place, bytes) = (executor().dynamic_shared)();
            assert_eq!((bytes, place.addr() % 128), (4096, 0));
            // Safety: each thread has its own 128 bytes.
            unsafe {
                let mine = place.add(thread() as usize * 128);
                assert_eq!(mine.read(), 0xcd);
                mine.write_bytes(thread() as u8, 128);
                sync();
                assert_eq!(place.add((thread() as usize + 1) % 32 * 128 + 127).read(), (thread() as u8 + 1) % 32);
            }
        })
        .dynamic_shared(4096)
    });
}

/// Runs a thread that uses `first` and `second` bytes of static shared memory. Returns the text of its trap, if any.
fn trap_of_shared(first: usize, second: usize, dynamic: usize) -> Option<String> {
    let world = World::seeded(SeededConfig::default());
    let grid = Grid::new("greedy", 1, 1, move || {
        shared(&FIRST, first);
        shared(&SECOND, second);
    });
    match run_grid(&world, DeviceConfig::default(), &grid.dynamic_shared(dynamic)) {
        Ok(()) => None,
        Err(LaunchError::Trapped { message, .. }) => Some(message),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn shared_memory_beyond_a_limit_of_gpus_traps_with_the_figures() {
    assert_eq!(trap_of_shared(40 << 10, 8 << 10, 179 << 10), None);
    let text = "49153 bytes of static shared memory in a block (1 more than 49152), the limit is 49152; the launch may \
                ask for dynamic shared memory up to 232448 bytes";
    assert_eq!(trap_of_shared(48 << 10, 1, 0).unwrap(), text);
    let text = "49168 bytes of static shared memory in a block (49152 more than 1), ";
    assert!(trap_of_shared(1, 48 << 10, 0).unwrap().starts_with(text));
    let text = "1040 bytes of static and 231424 bytes of dynamic shared memory in a block, the limit of both together is \
                232448";
    assert_eq!(trap_of_shared(1 << 10, 16, 226 << 10).unwrap(), text);
}

#[test]
fn outside_of_a_coroutine_there_is_one_thread_in_one_block() {
    install();
    assert_eq!((executor().position)(), gin_device::exec::Position::ALONE);
    assert_eq!(barrier(0, 0, Reduction::Count, true), 1);
    assert_eq!(exchange(1, 9)[0], 9);
    assert_eq!((executor().active_mask)(Location::caller()), 1);
    assert_eq!((executor().dynamic_shared)().1, 0);
    let place = shared(&FIRST, 8);
    assert_eq!(place, shared(&FIRST, 8));
    // Safety: eight zeroed bytes of this thread.
    assert_eq!(unsafe { place.cast::<u64>().read() }, 0);
    let before = clock_ns();
    pause(1000);
    assert!(clock_ns() >= before);
}

#[test]
fn spans_at_all_15_barriers_of_a_block_keep_their_broadcasts_apart_and_there_is_no_16th() {
    everywhere(|| {
        Grid::new("spans", 1, 16 * 32, || {
            let warp = thread() / 32;
            // Safety: each warp is its own span with its own barrier.
            let (span, none) = unsafe { (WarpSpan::new(warp, 1, 1 + warp), WarpSpan::new(0, 1, 0)) };
            assert!(none.is_none());
            let Some(span) = span else {
                assert_eq!(warp, 15, "barrier {}", 1 + warp);
                return;
            };
            for round in 0..6 {
                let root = round % 32;
                let value = u64::from(warp * 1000 + thread() % 32);
                assert_eq!(span.broadcast(value, root), u64::from(warp * 1000 + root));
            }
        })
    });
}

#[test]
fn warps_that_arrive_do_not_wait_and_those_that_wait_see_what_they_stored() {
    everywhere(|| {
        let slots: Arc<[AtomicU32; 3]> = Arc::default();
        let gone_on = Arc::new(AtomicU32::new(0));
        Grid::new("pipeline", 1, 4 * 32, move || {
            let warp = thread() / 32;
            // Safety: three warps fill slots, and one takes what is in them: each round all of them come once to each.
            let (full, empty) = unsafe { (Arrivals::new(1, 4).unwrap(), Arrivals::new(15, 4).unwrap()) };
            for round in 0..5 {
                if warp < 3 {
                    if round > 0 {
                        empty.wait();
                    }
                    slots[warp as usize].fetch_add(1, Relaxed);
                    full.arrive();
                    gone_on.fetch_add(1, Relaxed);
                } else {
                    if round == 0 {
                        // They go on before this warp has come.
                        while gone_on.load(Relaxed) < 3 * 32 {
                            pause(100);
                        }
                    }
                    full.wait();
                    assert!(slots.iter().all(|slot| slot.load(Relaxed) == 32 * (round + 1)));
                    // All lanes have looked.
                    Warp.sync();
                    if round < 4 {
                        empty.arrive();
                    }
                }
            }
        })
    });
    everywhere(|| {
        Grid::new("limits", 1, 64, || {
            // Safety: not used.
            let all = unsafe { [Arrivals::new(0, 1), Arrivals::new(16, 1), Arrivals::new(1, 0), Arrivals::new(1, 3)] };
            assert_eq!(all, [None; 4]);
        })
    });
}

#[test]
fn a_warp_that_has_arrived_may_end() {
    everywhere(|| {
        // The last warp has 8 lanes; the hardware counts it as a whole.
        Grid::new("early", 1, 72, || match thread() / 32 {
            1 => {
                pause(10_000);
                barrier(1, 96, Reduction::None, false);
            }
            _ => arrive(1, 96),
        })
    });
}
