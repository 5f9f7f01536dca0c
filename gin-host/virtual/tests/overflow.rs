// SPDX-License-Identifier: MIT OR Apache-2.0
//! A coroutine that overflows its stack is named. Observed from outside, in a child process.

mod common;

use std::hint::black_box;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use common::*;
use gin_virtual::*;

const CHILD: &str = "GIN_VIRTUAL_TEST_CHILD";
const SIGABRT: i32 = 6;
const SIGSEGV: i32 = 11;

/// Uses a quarter of a KiB of stack at each level, for ever.
#[expect(unconditional_recursion, reason = "it overflows the stack")]
fn deep(level: u64) -> u64 {
    let room = black_box([level; 32]);
    deep(level + 1) + room[level as usize % 32]
}

/// Runs the named test of this binary again, as a child.
fn child(test: &str) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(CHILD, test).stdout(Stdio::null()).stderr(Stdio::piped());
    command.spawn().unwrap().wait_with_output().unwrap()
}

fn is_child(test: &str) -> bool {
    std::env::var(CHILD).is_ok_and(|asked| asked == test)
}

#[track_caller]
fn assert_ends_with_text(test: &str, expected: &str) {
    let Output { status, stderr, .. } = child(test);
    let text = String::from_utf8_lossy(&stderr);
    assert!(text.lines().any(|line| line == expected), "{text}");
    assert_eq!(status.signal(), Some(SIGABRT), "{text}");
}

fn overflowing_grid() -> Grid {
    Grid::new("deep", 2, 64, || {
        if (block(), thread()) == (1, 37) {
            black_box(deep(0));
        }
    })
}

/// Lets thread 37 of block 1 overflow its stack, which has `bytes` bytes, in a child.
#[track_caller]
fn assert_device_thread_is_named(test: &str, world: fn() -> World, config: DeviceConfig, (bytes, seed): (usize, u64)) {
    if is_child(test) {
        let _ = run_grid(&world(), config, &overflowing_grid());
    }
    let rest = "Set `DeviceConfig::stack_bytes` (`device` of a `WorldConfig`) to more, or keep less on the stack. Ending the \
                process.";
    assert_ends_with_text(
        test,
        &format!(
            "gin-virtual: rank 0, grid `deep` (launch 1), block 1, thread 37 overflowed its stack of {bytes} bytes (seed \
             {seed}). {rest}"
        ),
    );
    assert_documented(&format!("overflowed its stack of 1048576 bytes (seed 1). {rest}"));
}

#[test]
fn a_device_thread_that_overflows_its_stack_in_a_seeded_world_is_named() {
    let test = "a_device_thread_that_overflows_its_stack_in_a_seeded_world_is_named";
    assert_device_thread_is_named(
        test,
        || World::seeded(SeededConfig::new(3)),
        DeviceConfig::default(),
        (1_048_576, 3),
    );
}

#[test]
fn a_device_thread_that_overflows_its_stack_in_a_threaded_world_is_named() {
    let test = "a_device_thread_that_overflows_its_stack_in_a_threaded_world_is_named";
    // Rounded up to pages.
    let config = DeviceConfig { stack_bytes: 100_000, ..DeviceConfig::default() };
    assert_device_thread_is_named(test, || World::threads(ThreadsConfig::default()), config, (102_400, 0));
}

#[test]
fn a_host_function_that_overflows_its_stack_in_a_seeded_world_is_named() {
    let test = "a_host_function_that_overflows_its_stack_in_a_seeded_world_is_named";
    if is_child(test) {
        let _ = World::seeded(SeededConfig::new(4)).run(vec![|| 0, || deep(0)]);
    }
    assert_ends_with_text(
        test,
        "gin-virtual: host of rank 1 overflowed its stack of 1048576 bytes (seed 4). Set \
         `SeededConfig::host_stack_bytes` to more, or keep less on the stack. Ending the process.",
    );
}

#[test]
fn a_thread_of_the_program_that_overflows_its_stack_is_left_to_the_handler_before() {
    let test = "a_thread_of_the_program_that_overflows_its_stack_is_left_to_the_handler_before";
    if is_child(test) {
        run_grid(&World::seeded(SeededConfig::new(3)), DeviceConfig::default(), &Grid::new("no", 1, 1, || ())).unwrap();
        black_box(deep(0));
    }
    let Output { status, stderr, .. } = child(test);
    let text = String::from_utf8_lossy(&stderr);
    // The words of the standard library's handler.
    assert!(text.contains("has overflowed its stack") && !text.contains("gin-virtual"), "{text}");
    assert_eq!(status.signal(), Some(SIGABRT), "{text}");
}

#[test]
fn another_fault_in_a_device_thread_ends_the_process_as_before() {
    let test = "another_fault_in_a_device_thread_ends_the_process_as_before";
    if is_child(test) {
        let grid = Grid::new("wild", 1, 1, || {
            // Safety: none. The fault is the point of the test.
            let word = unsafe { black_box(std::ptr::without_provenance::<u64>(4096)).read_volatile() };
            black_box(word);
        });
        let _ = run_grid(&World::seeded(SeededConfig::new(3)), DeviceConfig::default(), &grid);
    }
    let Output { status, stderr, .. } = child(test);
    let text = String::from_utf8_lossy(&stderr);
    assert!(!text.contains("gin-virtual"), "{text}");
    assert_eq!(status.signal(), Some(SIGSEGV), "{text}");
}

#[test]
fn a_device_thread_that_uses_a_null_pointer_is_named_and_the_process_ends_as_before() {
    let test = "a_device_thread_that_uses_a_null_pointer_is_named_and_the_process_ends_as_before";
    if is_child(test) {
        let grid = Grid::new("null", 1, 2, || {
            if thread() == 1 {
                // Safety: none. The fault is the point of the test.
                unsafe { black_box(std::ptr::without_provenance_mut::<u64>(8)).write_volatile(1) };
            }
        });
        let _ = run_grid(&World::seeded(SeededConfig::new(3)), DeviceConfig::default(), &grid);
    }
    let Output { status, stderr, .. } = child(test);
    let text = String::from_utf8_lossy(&stderr);
    let expected =
        "gin-virtual: rank 0, grid `null` (launch 1), block 0, thread 1 used a null pointer, at address 8 (seed 3). ";
    assert!(text.lines().any(|line| line.starts_with(expected)), "{text}");
    assert_eq!(status.signal(), Some(SIGSEGV), "{text}");
}

#[test]
fn a_signal_that_a_process_sends_ends_the_process_as_before() {
    let test = "a_signal_that_a_process_sends_ends_the_process_as_before";
    if is_child(test) {
        // In an interpreter nobody handles the signal; in this process the standard library does.
        // Safety: it sets the default action, and no other thread changes it.
        unsafe { libc::signal(SIGSEGV, libc::SIG_DFL) };
        run_grid(&World::seeded(SeededConfig::new(3)), DeviceConfig::default(), &Grid::new("no", 1, 1, || ())).unwrap();
        // Safety: it has no precondition.
        unsafe { libc::kill(libc::getpid(), SIGSEGV) };
        // Another thread may be the one that handles the signal, after `kill` has returned here.
        std::thread::sleep(Duration::from_secs(10));
        std::process::exit(0);
    }
    let Output { status, stderr, .. } = child(test);
    assert_eq!(status.signal(), Some(SIGSEGV), "{status}: {}", String::from_utf8_lossy(&stderr));
}
