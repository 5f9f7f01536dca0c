// SPDX-License-Identifier: MIT OR Apache-2.0
//! A reservation that the system refuses names the limit that it met. Each test sets its limit in a child process.

mod common;

use std::process::Command;

use common::*;
use gin_virtual::*;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};
use rustix::param::page_size;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const CHILD: &str = "GIN_VIRTUAL_TEST_CHILD";

/// Runs the named test of this binary again as a child, which must succeed. Returns false in that child.
fn passes_in_a_child(test: &str) -> bool {
    if std::env::var(CHILD).is_ok_and(|asked| asked == test) {
        return false;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command.args(["--exact", test, "--nocapture"]).env(CHILD, test).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&text));
    true
}

/// Lets this process use `more` bytes more of a resource than it uses now; `field` is its field in `statm`.
fn limit_to(resource: Resource, field: usize, more: u64) {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split(' ').nth(field).unwrap().parse().unwrap();
    let limit = Rlimit { current: Some(pages * page_size() as u64 + more), ..getrlimit(resource) };
    setrlimit(resource, limit).unwrap();
}

/// Runs a grid of 100 threads, whose stacks are refused. Returns the error.
fn refused_stacks() -> String {
    let world = World::seeded(SeededConfig::default());
    run_grid(&world, DeviceConfig::default(), &Grid::new("wide", 1, 100, || ())).unwrap_err().to_string()
}

#[test]
fn stacks_past_the_limit_of_addresses_name_it() {
    if passes_in_a_child("stacks_past_the_limit_of_addresses_name_it") {
        return;
    }
    limit_to(Resource::As, 0, 64 << 20);
    let text = refused_stacks();
    assert!(text.starts_with("no stacks for block 0 of grid `wide` (100 threads): "), "{text}");
    assert!(text.contains("bytes of addresses, of which it uses "), "{text}");
    assert!(text.contains("raise it with `ulimit -v` (RLIMIT_AS); lower `resident_blocks`"), "{text}");
}

#[test]
fn stacks_past_the_limit_of_data_name_it() {
    if passes_in_a_child("stacks_past_the_limit_of_data_name_it") {
        return;
    }
    limit_to(Resource::Data, 5, 64 << 20);
    let text = refused_stacks();
    assert!(text.contains("raise it with `ulimit -d` (RLIMIT_DATA)"), "{text}");
}

#[test]
fn a_rank_or_device_whose_thread_has_no_room_names_the_limit() {
    if passes_in_a_child("a_rank_or_device_whose_thread_has_no_room_names_the_limit") {
        return;
    }
    let config = ThreadsConfig { host_stack_bytes: 1 << 30, watchdog: None, ..ThreadsConfig::default() };
    let world = World::threads(ThreadsConfig { stall_report: None, ..config });
    limit_to(Resource::As, 0, 64 << 20);
    let text = world.run(vec![|| ()]).unwrap_err().to_string();
    assert!(text.starts_with("cannot start host of rank 0: ") && text.contains("`ulimit -v`"), "{text}");
    limit_to(Resource::As, 0, 1 << 20);
    let gpu = world.device(DeviceConfig::default());
    let text = gpu.launch(StreamId(0), Grid::new("never", 1, 1, || ())).unwrap().wait().unwrap_err().to_string();
    assert!(text.contains("the device has no thread to run it: ") && text.contains("`ulimit -v`"), "{text}");
}

#[test]
fn stacks_past_the_limit_of_mappings_name_it() {
    if passes_in_a_child("stacks_past_the_limit_of_mappings_name_it") {
        return;
    }
    let limit: usize = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse().unwrap();
    let (page, access) = (page_size(), ProtFlags::READ | ProtFlags::WRITE);
    // Safety: the kernel chooses unused addresses.
    let start = unsafe { mmap_anonymous(std::ptr::null_mut(), (limit + 2) * page, access, MapFlags::PRIVATE) }.unwrap();
    let read_only = |index: &usize| {
        // Safety: the page was just mapped, and nothing uses it.
        unsafe { mprotect(start.cast::<u8>().add(index * page).cast(), page, MprotectFlags::READ) }.is_ok()
    };
    // Every other page becomes a mapping of its own, until there are too many.
    assert!(!(0..limit).step_by(2).all(|index| read_only(&index)));
    let world = World::seeded(SeededConfig::default());
    let text = world.run(vec![|| ()]).unwrap_err().to_string();
    assert!(
        text.starts_with("cannot start host of rank 0: ") && text.contains(" mappings, and the limit is "),
        "{text}"
    );
    assert!(text.contains("sysctl vm.max_map_count"), "{text}");
}
