// SPDX-License-Identifier: MIT OR Apache-2.0
//! Boxes of matrices and products of warpgroups: a product that waits and fences as it must has the right sums in every
//! schedule, and each mistake is wrong sums for some seed.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use common::*;
use gin_device::coop::{Block, Coop};
use gin_device::shared;
use gin_device::shared::dynamic_array;
use gin_device::sys::bulk::{Mbarrier, fence_proxy_async_shared};
use gin_device::sys::shared::{Address, store_weak_u32};
use gin_device::sys::tensor::{MAP_BYTES, Matrices, ROW_BYTES, TensorMap, copy_box_to_shared};
use gin_device::sys::warpgroup::{self, PartialSums, Sums, multiply_add, multiply_e4m3};
use gin_virtual::*;

shared! { static FULL: [u64; 1]; }

/// Threads of a block: a warpgroup.
const THREADS: u32 = 128;
/// Rows of each of two matrices, and their inner elements: less than a box in both directions.
const ROWS: u32 = 60;
const COLUMNS: u32 = 250;
const INNER: u32 = 40;
/// The column and row from which the box of the left factor is taken.
const FROM: (u32, u32) = (8, 3);
/// Seeds among which one must show a mistake.
const SEEDS: u64 = 24;
/// Bytes of shared memory of the block.
const BYTES: u32 = 1024 + (warpgroup::ROWS + warpgroup::COLUMNS) * ROW_BYTES;

/// The mistakes of [`product`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mistake {
    None,
    /// No thread waits for the copies.
    NoPhaseWait,
    /// No thread fences between its stores and the product.
    NoProxyFence,
    /// Only one thread fences, before the others have stored.
    OneProxyFence,
    /// The next copy begins before the product has read the factors.
    EarlyCopy,
}

/// Returns an element of a factor: a small integer.
fn element(matrix: u32, row: u32, column: u32) -> f32 {
    ((matrix * 5 + row * 3 + column * 7) % 11) as f32 - 5.0
}

/// Returns an element of the left factor's box that threads have changed: they store column 1 of the box.
fn left(row: u32, inner: u32) -> f32 {
    if inner == 1 {
        return row as f32;
    }
    let (column, row) = (FROM.0 + inner, FROM.1 + row);
    if row < ROWS && column < INNER { element(1, row, column) } else { 0.0 }
}

fn right(column: u32, inner: u32) -> f32 {
    if column < COLUMNS && inner < INNER { element(0, column, inner) } else { 0.0 }
}

/// Returns BF16 of two numbers.
fn pair(low: f32, high: f32) -> u32 {
    high.to_bits() & 0xffff_0000 | low.to_bits() >> 16
}

/// Global memory, as addresses: maps, and two matrices for each factor.
#[derive(Clone, Copy)]
struct Places {
    maps: u64,
    left: u64,
    right: u64,
}

/// Multiplies a box of the second left matrix by one of the first right matrix. Returns the number of wrong sums of the
/// calling thread.
fn product(places: Places, mistake: Mistake) -> u64 {
    let full = Mbarrier::at(&FULL.array(), 0);
    let first: Address = dynamic_array::<u64>(0, BYTES as usize / 8).address().next_multiple_of(1024);
    let second = first.at(warpgroup::ROWS * ROW_BYTES);
    if Block.elect() {
        // Safety: nobody uses the word yet.
        unsafe { full.init(1) };
    }
    let matrices = |address, rows, box_rows| Matrices {
        address,
        columns: INNER,
        rows,
        number: 2,
        row_bytes: 2 * u64::from(INNER),
        matrix_bytes: u64::from(rows * 2 * INNER),
        box_rows,
    };
    if Block.rank() < 32 {
        // Safety: memory for two maps; the matrices exist.
        let maps = unsafe {
            [
                TensorMap::make(places.maps, first, &matrices(places.left, ROWS, warpgroup::ROWS)),
                TensorMap::make(places.maps + 128, first, &matrices(places.right, COLUMNS, warpgroup::COLUMNS)),
            ]
        };
        fence_proxy_async_shared();
        gin_device::coop::Warp.sync();
        if Block.elect() {
            // Safety: the phase expects the bytes of both boxes.
            unsafe {
                full.arrive_expect_tx((warpgroup::ROWS + warpgroup::COLUMNS) * ROW_BYTES);
                copy_box_to_shared(first, maps[0], (FROM.0, FROM.1, 1), full);
                copy_box_to_shared(second, maps[1], (0, 0, 0), full);
            }
        }
    }
    Block.sync();
    if mistake != Mistake::NoPhaseWait {
        full.wait(0);
    }
    if mistake == Mistake::OneProxyFence && Block.elect() {
        fence_proxy_async_shared();
    }
    Block.sync();
    if Block.rank() < warpgroup::ROWS {
        let row = Block.rank();
        let to = first.at(row * ROW_BYTES + ((row % 8) << 4));
        // Safety: the thread's row of the box.
        unsafe { store_weak_u32(to, pair(left(row, 0), left(row, 1))) };
    }
    if mistake != Mistake::NoProxyFence && mistake != Mistake::OneProxyFence {
        fence_proxy_async_shared();
    }
    Block.sync();
    let mut sums: Sums = [0.5; 128];
    if mistake == Mistake::EarlyCopy && Block.elect() {
        let wrong = u64::from(ROW_BYTES * warpgroup::COLUMNS);
        // Safety: the bytes exist; the copy is too early on purpose.
        unsafe {
            full.arrive_expect_tx(wrong as u32);
            gin_device::sys::bulk::copy_to_shared(second, places.left, wrong as u32, full);
        }
    }
    for step in 0..2 {
        // Safety: the factors are in shared memory, unless there is a mistake on purpose.
        unsafe { multiply_add(&mut sums, first, second, step > 0) };
    }
    if mistake == Mistake::EarlyCopy {
        full.wait(1);
    }
    let (warp, lane) = (Block.rank() / 32, Block.rank() % 32);
    (0..128)
        .filter(|index| {
            let row = 16 * warp + lane / 4 + index / 2 % 2 * 8;
            let column = 8 * (index / 4) + lane % 4 * 2 + index % 2;
            let expected: f32 = (0..64).map(|inner| left(row, inner) * right(column, inner)).sum();
            sums[*index as usize] != 2.0 * expected
        })
        .count() as u64
}

/// Runs a product. Returns the number of wrong sums, or the error of the grid.
fn wrong_sums(world: &World, mistake: Mistake) -> Result<Result<u64, LaunchError>, WorldError> {
    let factor = |rows: u32| -> Vec<u128> {
        let mut words = vec![0u32; (2 * rows * INNER / 2) as usize];
        for (at, word) in (0..).zip(&mut words) {
            let (matrix, row, column) = (at / (rows * INNER / 2), at / (INNER / 2) % rows, at % (INNER / 2) * 2);
            *word = pair(element(matrix, row, column), element(matrix, row, column + 1));
        }
        // The copy that is too early has more bytes than the matrices.
        words.resize((ROW_BYTES * warpgroup::COLUMNS / 4) as usize, 0x3f80_3f80);
        words.chunks_exact(4).map(|four| (0..4).fold(0, |all, at| all | u128::from(four[at]) << (32 * at))).collect()
    };
    let (lefts, rights) = (factor(ROWS), factor(COLUMNS));
    let mut maps = vec![0u128; 2 * MAP_BYTES as usize / 16 + 8];
    let address = |bytes: &[u128]| bytes.as_ptr().expose_provenance() as u64;
    let places = Places {
        maps: (maps.as_mut_ptr().expose_provenance() as u64).next_multiple_of(MAP_BYTES.into()),
        left: address(&lefts),
        right: address(&rights),
    };
    let wrong = Arc::new(AtomicU64::new(0));
    let sum = wrong.clone();
    let grid = Grid::new("product", 1, THREADS, move || {
        sum.fetch_add(product(places, mistake), SeqCst);
    });
    let grid = grid.dynamic_shared(BYTES as usize);
    let gpu = world.device(DeviceConfig::default());
    let result = world.run(vec![|| gpu.launch(StreamId(0), grid.clone())?.wait()])?.remove(0);
    drop((lefts, rights, maps));
    Ok(result.map(|()| wrong.load(SeqCst)))
}

#[test]
fn a_product_of_boxes_has_the_right_sums_in_every_schedule() {
    for world in worlds() {
        assert_eq!(wrong_sums(&world, Mistake::None).unwrap(), Ok(0), "{world:?}");
    }
    for seed in 0..SEEDS {
        let world = World::seeded(SeededConfig::new(seed).races(seed % 2 == 0));
        assert_eq!(wrong_sums(&world, Mistake::None).unwrap(), Ok(0), "seed {seed}");
    }
}

/// Multiplies factors of E4M3 that the threads store, after sums of something else. Returns the number of wrong sums of
/// the calling thread.
fn product_of_e4m3(fences: bool) -> u64 {
    // 0, 1, 2, 3, 4, -1, -2.
    let bits = |matrix: u32, row: u32, inner: u32| -> (u32, f32) {
        let index = (matrix * 5 + row * 3 + inner * (row % 4 + 2)) % 7;
        [(0x00, 0.0), (0x38, 1.0), (0x40, 2.0), (0x44, 3.0), (0x48, 4.0), (0xb8, -1.0), (0xc0, -2.0)][index as usize]
    };
    let first: Address = dynamic_array::<u64>(0, BYTES as usize / 8).address().next_multiple_of(1024);
    let second = first.at(warpgroup::ROWS * ROW_BYTES);
    for (matrix, to, rows) in [(0, first, warpgroup::ROWS), (1, second, warpgroup::E4M3_COLUMNS)] {
        for index in (Block.rank()..rows * ROW_BYTES / 4).step_by(THREADS as usize) {
            let (row, word) = (index / 32, index % 32);
            let value = (0..4).fold(0, |all, at| all | bits(matrix, row, 4 * word + at).0 << (8 * at));
            let place = row * ROW_BYTES + (((word / 4) ^ (row % 8)) << 4) + word % 4 * 4;
            // Safety: a word of the factor.
            unsafe { store_weak_u32(to.at(place), value) };
        }
    }
    if fences {
        fence_proxy_async_shared();
    }
    Block.sync();
    let mut sums: PartialSums = [0.5; 64];
    // Safety: the factors are in shared memory.
    unsafe { multiply_e4m3(&mut sums, first, second) };
    let (warp, lane) = (Block.rank() / 32, Block.rank() % 32);
    let wrong = (0..64).filter(|index| {
        let row = 16 * warp + lane / 4 + index / 2 % 2 * 8;
        let column = 8 * (index / 4) + lane % 4 * 2 + index % 2;
        let expected: f32 = (0..128).map(|inner| bits(0, row, inner).1 * bits(1, column, inner).1).sum();
        sums[*index as usize] != expected
    });
    wrong.count() as u64
}

/// Runs [`product_of_e4m3`]. Returns the number of wrong sums.
fn wrong_sums_of_e4m3(world: &World, fences: bool) -> u64 {
    let wrong = Arc::new(AtomicU64::new(0));
    let sum = wrong.clone();
    let grid = Grid::new("product", 1, THREADS, move || {
        sum.fetch_add(product_of_e4m3(fences), SeqCst);
    });
    run_grid(world, DeviceConfig::default(), &grid.dynamic_shared(BYTES as usize)).unwrap();
    wrong.load(SeqCst)
}

#[test]
fn a_product_of_e4m3_has_the_right_sums_and_needs_the_fence() {
    for seed in 0..4 {
        let world = World::seeded(SeededConfig::new(seed).races(seed % 2 == 0));
        assert_eq!(wrong_sums_of_e4m3(&world, true), 0, "seed {seed}");
    }
    let shows = |seed: u64| wrong_sums_of_e4m3(&World::seeded(SeededConfig::new(seed)), false) != 0;
    assert!((0..SEEDS).any(shows), "a missing fence shows for none of {SEEDS} seeds");
}

#[test]
fn each_mistake_in_a_product_is_wrong_sums_for_some_seed() {
    for mistake in [Mistake::NoPhaseWait, Mistake::NoProxyFence, Mistake::OneProxyFence, Mistake::EarlyCopy] {
        let shows =
            |seed: &u64| wrong_sums(&World::seeded(SeededConfig::new(*seed).races(false)), mistake).unwrap() != Ok(0);
        assert!((0..SEEDS).any(|seed| shows(&seed)), "{mistake:?} shows for none of {SEEDS} seeds");
    }
}

#[test]
fn a_copy_that_overwrites_a_factor_too_early_is_a_race() {
    let world = World::seeded(SeededConfig::new(1).races(true));
    let Err(WorldError::Race(race)) = wrong_sums(&world, Mistake::EarlyCopy) else { panic!("no race") };
    assert!(matches!(race.memory, RaceMemory::Shared { dynamic: true, .. }), "{race}");
}

#[test]
fn a_factor_that_is_not_at_a_multiple_of_1024_ends_the_grid() {
    let world = World::seeded(SeededConfig::new(1));
    let grid = Grid::new("misaligned", 1, THREADS, || {
        let first = dynamic_array::<u64>(0, BYTES as usize / 8).address().next_multiple_of(1024);
        // Safety: refused.
        unsafe { multiply_add(&mut [0.0; 128], first.at(128), first, false) };
    });
    let error = run_grid(&world, DeviceConfig::default(), &grid.dynamic_shared(BYTES as usize)).unwrap_err();
    assert!(error.to_string().contains("it must be a multiple of 1024"), "{error}");
}
