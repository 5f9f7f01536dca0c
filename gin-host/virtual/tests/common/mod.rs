// SPDX-License-Identifier: MIT OR Apache-2.0
//! Helpers shared by the tests.
#![allow(dead_code, reason = "every test binary uses a part")]

use std::panic::Location;
use std::sync::Mutex;

use gin_device::exec::{BarrierCall, ExchangeCall, Position, Reduction};
use gin_virtual::*;

/// Returns seeded worlds of every schedule with several seeds, and one of OS threads.
pub fn worlds() -> Vec<World> {
    let mut worlds = seeded_worlds(4);
    worlds.push(World::threads(ThreadsConfig::default()));
    worlds
}

pub fn seeded_worlds(seeds: u64) -> Vec<World> {
    let each = |schedule| (0..seeds).map(move |seed| World::seeded(SeededConfig::new(seed).schedule(schedule)));
    Schedule::PLAIN.into_iter().flat_map(each).collect()
}

/// Runs one grid on one device and returns its result.
pub fn run_grid(world: &World, config: DeviceConfig, grid: &Grid) -> Result<(), LaunchError> {
    let gpu = world.device(config);
    let host = || gpu.launch(StreamId(0), grid.clone())?.wait();
    world.run(vec![host]).unwrap().remove(0)
}

/// Runs one grid in each of the worlds. It must succeed.
pub fn everywhere(grid: impl Fn() -> Grid) {
    for world in worlds() {
        run_grid(&world, DeviceConfig::default(), &grid()).unwrap();
    }
}

/// Returns the linear number of the calling thread in its block.
pub fn thread() -> u32 {
    let Position { thread, block_dim, .. } = (executor().position)();
    thread.x + block_dim.x * (thread.y + block_dim.y * thread.z)
}

/// Returns the linear number of the calling thread's block.
pub fn block() -> u32 {
    let Position { block, grid_dim, .. } = (executor().position)();
    block.x + grid_dim.x * (block.y + grid_dim.y * block.z)
}

#[track_caller]
pub fn barrier(id: u32, threads: u32, reduction: Reduction, predicate: bool) -> u32 {
    (executor().barrier)(BarrierCall { id, threads, reduction, predicate, waits: true, site: Location::caller() })
}

/// Arrives at a barrier without waiting.
#[track_caller]
pub fn arrive(id: u32, threads: u32) {
    let (reduction, site) = (Reduction::None, Location::caller());
    (executor().barrier)(BarrierCall { id, threads, reduction, predicate: false, waits: false, site });
}

#[track_caller]
pub fn sync() {
    barrier(0, 0, Reduction::None, false);
}

#[track_caller]
pub fn exchange(mask: u32, value: u64) -> [u64; 32] {
    let mut out = [u64::MAX; 32];
    (executor().exchange)(ExchangeCall { mask, value, orders: true, site: Location::caller() }, &mut out);
    out
}

pub fn pause(ns: u32) {
    (executor().pause)(ns);
}

/// A list that many threads append to.
pub struct List<T>(Mutex<Vec<T>>);

impl<T> Default for List<T> {
    fn default() -> Self {
        List(Mutex::new(Vec::new()))
    }
}

impl<T: Clone> List<T> {
    pub fn push(&self, value: T) {
        self.0.lock().unwrap().push(value);
    }

    pub fn get(&self) -> Vec<T> {
        self.0.lock().unwrap().clone()
    }
}

/// Checks that the list of traps in docs/kernels.md has this text.
#[track_caller]
pub fn assert_documented(text: &str) {
    let docs = include_str!("../../../../docs/kernels.md").split_whitespace().collect::<Vec<_>>().join(" ");
    let (_, traps) = docs.split_once("## Traps").expect("the list of traps");
    assert!(traps.contains(text), "the traps do not name: {text}");
}
