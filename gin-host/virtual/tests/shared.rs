// SPDX-License-Identifier: MIT OR Apache-2.0
//! Typed accesses to shared memory: atomics lose nothing in any schedule, and every access is a point where another
//! thread may run.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use common::*;
use gin_device::coop::{Block, Coop};
use gin_device::shared;
use gin_device::shared::{SharedArray, SharedInteger, dynamic_array};
use gin_virtual::*;

shared! { static NARROW: [u32; 7]; }
shared! { static SIGNED: [i32; 7]; }
shared! { static WIDE: [u64; 7]; }
shared! { static WIDE_SIGNED: [i64; 7]; }
shared! { static QUADS: [u128; 64]; }

/// Does each read-modify-write by all threads of a block, and checks what is left.
fn all_atomics<T>(array: SharedArray<T>, least: T, max: T, of: impl Fn(u32) -> T)
where
    T: SharedInteger + PartialEq + std::fmt::Debug + std::ops::Add<Output = T> + std::ops::Not<Output = T>,
{
    let (own, zero) = (of(thread()), of(0));
    if Block.elect() {
        for (index, start) in [zero, max, least, zero, !zero, zero, zero].into_iter().enumerate() {
            array.write(index, start);
        }
    }
    sync();
    array.min(1, own);
    array.max(2, own);
    let bit = of(1 << (thread() % 20));
    array.or(3, bit);
    array.and(4, !bit);
    array.add(0, array.exchange(5, own));
    loop {
        let seen = array.read(6);
        if array.compare_exchange(6, seen, seen + of(1)) == seen {
            break;
        }
    }
    sync();
    let left: [T; 7] = std::array::from_fn(|index| array.read(index));
    let threads = Block.size();
    assert_eq!(left[0] + left[5], of((0..threads).sum()), "exchange");
    let bits = of((1 << 20) - 1);
    assert_eq!(left[1..5], [zero, of(threads - 1), bits, !bits]);
    assert_eq!(left[6], of(threads));
}

#[test]
fn atomics_of_all_types_lose_nothing() {
    everywhere(|| {
        Grid::new("atomics", 2, 40, || {
            all_atomics(NARROW.array(), 0, u32::MAX, |value| value);
            all_atomics(SIGNED.array(), i32::MIN, i32::MAX, |value| value as i32);
            all_atomics(WIDE.array(), 0, u64::MAX, u64::from);
            all_atomics(WIDE_SIGNED.array(), i64::MIN, i64::MAX, i64::from);
        })
    });
}

#[test]
fn signed_minimum_and_maximum_order_negative_numbers_below_positive_ones() {
    everywhere(|| {
        Grid::new("signed", 1, 1, || {
            let (narrow, wide) = (SIGNED.array(), WIDE_SIGNED.array());
            assert_eq!((narrow.min(0, -5), narrow.min(0, 3), narrow.read(0)), (0, -5, -5));
            assert_eq!((wide.max(1, 5), wide.max(1, -3), wide.read(1)), (0, 5, 5));
            assert_eq!((wide.min(2, -5), wide.min(2, 3), wide.read(2)), (0, -5, -5));
        })
    });
}

#[test]
fn elements_of_16_bytes_and_arrays_in_dynamic_memory_keep_each_threads_value() {
    everywhere(|| {
        Grid::new("elements", 2, 64, || {
            let (own, next) = (thread() as usize, (thread() as usize + 1) % 64);
            let (quads, words) = (QUADS.array(), dynamic_array::<f32>(64, 64));
            let bytes = dynamic_array::<u8>(0, 64);
            quads.write(own, (own as u128) << 77 | 1);
            words.write(own, own as f32);
            bytes.write(own, own as u8);
            sync();
            assert_eq!(quads.read(next), (next as u128) << 77 | 1);
            assert_eq!((words.read(next), bytes.read(next)), (next as f32, next as u8));
        })
        .dynamic_shared(64 + 4 * 64)
    });
}

/// Returns the least count that any schedule leaves if each of two warps adds 1 to an element by `add`.
fn least_count(add: fn(SharedArray<u32>)) -> u64 {
    let least = Arc::new(AtomicU64::new(u64::MAX));
    for world in seeded_worlds(8) {
        let least = least.clone();
        let grid = Grid::new("count", 1, 64, move || {
            let array = NARROW.array();
            sync();
            add(array);
            sync();
            least.fetch_min(u64::from(array.read(0)), SeqCst);
        });
        run_grid(&world, DeviceConfig::default(), &grid).unwrap();
    }
    least.load(SeqCst)
}

#[test]
fn another_thread_may_run_before_every_access() {
    assert_eq!(
        least_count(|array| {
            array.add(0, 1);
        }),
        64
    );
    // A load and a store are two accesses, so a schedule loses counts.
    assert!(least_count(|array| array.write(0, array.read(0) + 1)) < 64);
}

#[test]
fn an_index_past_the_end_and_an_array_past_dynamic_memory_end_the_grid_and_say_the_figures_and_the_line() {
    let said = |kernel: fn()| {
        let grid = Grid::new("past", 1, 1, kernel).dynamic_shared(64);
        match run_grid(&World::seeded(SeededConfig::default()), DeviceConfig::default(), &grid) {
            Ok(()) => String::new(),
            Err(error @ LaunchError::Panicked { .. }) => error.to_string(),
            Err(error) => panic!("{error}"),
        }
    };
    assert_eq!(said(|| NARROW.array().write(6, dynamic_array::<u32>(0, 16).read(15))), "");
    let index = |index: usize, len: usize| {
        format!("panicked: index {index} is past the end of shared memory, which has {len} elements here, at ")
    };
    let array = |len: usize, offset: usize| {
        format!(
            "panicked: {len} elements of 4 bytes do not fit at byte {offset} of dynamic shared memory of 64 bytes, at "
        )
    };
    let cases: [(fn(), u32, String); 7] = [
        (|| NARROW.array().write(7, 0), line!(), index(7, 7)),
        (|| _ = NARROW.array().add(usize::MAX, 0), line!(), index(usize::MAX, 7)),
        (|| _ = dynamic_array::<u32>(0, 16).exchange(16, 0), line!(), index(16, 16)),
        (|| _ = dynamic_array::<u32>(0, 17), line!(), array(17, 0)),
        (|| _ = dynamic_array::<u32>(2, 1), line!(), array(1, 2)),
        (|| _ = dynamic_array::<u32>(68, 0), line!(), array(0, 68)),
        (|| _ = dynamic_array::<u32>(0, usize::MAX / 4 + 2), line!(), array(usize::MAX / 4 + 2, 0)),
    ];
    for (kernel, line, expected) in cases {
        let text = said(kernel);
        assert!(text.contains(&format!("{expected}gin-host/virtual/tests/shared.rs:{line}:")), "{text}");
    }
}
