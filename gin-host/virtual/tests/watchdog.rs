// SPDX-License-Identifier: MIT OR Apache-2.0
//! The watchdog names a coroutine that never yields and ends the process. Observed from outside, in a child process.

mod common;

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::*;
use gin_device::exec::Reduction;
use gin_virtual::*;

const CHILD: &str = "GIN_VIRTUAL_TEST_CHILD";
const LIMIT: Option<Duration> = Some(Duration::from_millis(200));

/// Never gives up the CPU.
fn spin() -> ! {
    loop {
        std::hint::black_box(0);
    }
}

fn spinning_grid() -> Grid {
    Grid::new("spinner", 2, 64, || {
        let place = (executor().position)();
        if (place.block.x, place.thread.x) == (1, 37) {
            spin();
        }
    })
}

/// Runs the named test of this binary again as a child that does `what`. Returns its standard error.
fn child(test: &str, what: &str) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(CHILD, what).stdout(Stdio::null()).stderr(Stdio::piped());
    let output = command.spawn().unwrap().wait_with_output().unwrap();
    assert!(!output.status.success());
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn is_child(what: &str) -> bool {
    std::env::var(CHILD).is_ok_and(|asked| asked == what)
}

#[test]
fn a_device_thread_that_never_yields_in_a_seeded_world_is_named() {
    if is_child("seeded") {
        let world = World::seeded(SeededConfig { watchdog: LIMIT, ..SeededConfig::new(11) });
        let gpu = world.device(DeviceConfig::default());
        let _ = world.run(vec![|| gpu.launch(StreamId(0), spinning_grid()).unwrap().wait()]);
        return;
    }
    let text = child("a_device_thread_that_never_yields_in_a_seeded_world_is_named", "seeded");
    let expected = "rank 0 launch 1 block 1 thread 37 (`spinner`) has not yielded for 200ms (seed 11)";
    assert!(text.contains(expected), "{text}");
    let rest = ": it loops without touching shared words, pausing or waiting. Ending the process.";
    assert!(text.contains(&format!("{expected}{rest}")), "{text}");
    assert_documented(&format!("has not yielded for 10s (seed 1){rest}"));
}

#[test]
fn a_device_thread_that_never_yields_in_a_threaded_world_is_named() {
    if is_child("threads") {
        let world = World::threads(ThreadsConfig { watchdog: LIMIT, ..ThreadsConfig::default() });
        let gpu = world.device(DeviceConfig::default());
        let _ = gpu.launch(StreamId(0), spinning_grid()).unwrap().wait();
        return;
    }
    let text = child("a_device_thread_that_never_yields_in_a_threaded_world_is_named", "threads");
    assert!(text.contains("rank 0 launch 1 block 1 thread 37 (`spinner`) has not yielded"), "{text}");
}

#[test]
fn a_host_that_never_yields_is_named() {
    if is_child("host") {
        let world = World::seeded(SeededConfig { watchdog: LIMIT, ..SeededConfig::default() });
        let _ = world.run(
            (0..3)
                .map(|rank| {
                    move || {
                        if rank == 2 {
                            spin()
                        }
                    }
                })
                .collect(),
        );
        return;
    }
    let text = child("a_host_that_never_yields_is_named", "host");
    assert!(text.contains("gin-virtual: host 2 has not yielded"), "{text}");
}

#[test]
fn a_service_that_never_yields_is_named() {
    if is_child("service") {
        let world = World::seeded(SeededConfig { watchdog: LIMIT, ..SeededConfig::default() });
        world.spawn_service("stubborn", || spin());
        let _ = world.run(vec![|| sleep_ns(1_000_000)]);
        return;
    }
    let text = child("a_service_that_never_yields_is_named", "service");
    assert!(text.contains("service 0 (`stubborn`) has not yielded"), "{text}");
}

/// Launches a grid on each of two devices and waits for both. The first threads of all blocks poll for ever; the others
/// wait for them at the barrier.
fn two_ranks_that_wait(world: &World) {
    let hosts = (0..2).map(|_| {
        let gpu = world.device(DeviceConfig::resident(8));
        move || {
            let polling = || {
                while thread() == 0 {
                    pause(1000);
                }
                sync();
            };
            gpu.launch(StreamId(0), Grid::new("waiter", 10, 64, polling)).unwrap().wait().unwrap();
        }
    });
    let _ = world.run(hosts.collect());
}

#[test]
fn a_seeded_world_without_progress_names_its_waiters_long_before_it_ends() {
    if is_child("stall") {
        let world =
            World::seeded(SeededConfig { stall_steps: 100_000, max_virtual_ns: u64::MAX, ..SeededConfig::new(5) });
        let gpu = world.device(DeviceConfig::default());
        let polling = || {
            loop {
                pause(1000);
            }
        };
        let error = world.run(vec![|| gpu.launch(StreamId(0), Grid::new("polls", 1, 1, polling)).unwrap().wait()]);
        panic!("{}", error.unwrap_err());
    }
    let text = child("a_seeded_world_without_progress_names_its_waiters_long_before_it_ends", "stall");
    let (first, end) = text.split_once("no progress: 100000 choices passed").expect("the error of the run");
    let note = "choices passed without progress, and after 100000 the run ends (`SeededConfig::stall_steps`, seed 5)";
    assert_eq!(first.matches(note).count(), 1, "{text}");
    for part in [first, end] {
        assert!(part.contains("grid `polls` (launch 1), block 0, thread 0: pausing in a polling loop"), "{text}");
    }
}

#[track_caller]
fn assert_names_all_waiters(text: &str) {
    for rank in [0, 1] {
        let expected = [
            format!("  host of rank {rank}: waiting for a condition at gin-host/virtual/tests/watchdog.rs:"),
            format!("  rank {rank}, grid `waiter` (launch 1), blocks 0 to 7, thread 0: pausing in a polling loop"),
            format!(
                "  rank {rank}, grid `waiter` (launch 1), blocks 0 to 7, thread 1 to 63: waiting at barrier 0 for the \
                 whole block at gin-host/virtual/tests/watchdog.rs:"
            ),
            format!("  rank {rank}, grid `waiter`: blocks 8 to 9 of 10 not started: residency limit 8, 8 blocks are"),
        ];
        for expected in expected {
            assert_eq!(text.lines().filter(|line| line.starts_with(&expected)).count(), 1, "{expected}\n{text}");
        }
    }
}

/// Starts the named test of this binary again as a child that does `what`. Returns its standard error up to a line that
/// begins with `until` and the seven lines after it, then ends it by a signal.
fn child_until(test: &str, what: &str, signals: [&str; 2], until: &str) -> (String, std::process::ExitStatus) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(CHILD, what).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let id = child.id().to_string();
    let signal = |name: &str| assert!(Command::new("kill").args([name, &id]).status().unwrap().success());
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    if lines.next().is_some_and(|line| line == "runs") {
        std::thread::sleep(Duration::from_millis(500));
        signal(signals[0]);
    }
    let report: Vec<String> = lines.by_ref().skip_while(|line| !line.starts_with(until)).take(9).collect();
    signal(signals[1]);
    let again = lines.filter(|line| line.starts_with(until)).count();
    assert_eq!(again, 0);
    (report.join("\n"), child.wait().unwrap())
}

#[test]
fn a_world_of_threads_without_progress_names_all_waiters_once() {
    let test = "a_world_of_threads_without_progress_names_all_waiters_once";
    if is_child("stall") {
        eprintln!("runs");
        let stall_report = Some(Duration::from_millis(500));
        two_ranks_that_wait(&World::threads(ThreadsConfig { stall_report, ..ThreadsConfig::default() }));
    }
    let until = "gin-virtual: no progress for 500ms";
    let (text, _) = child_until(test, "stall", ["-CONT", "-KILL"], until);
    assert_names_all_waiters(&text);
}

#[test]
fn sigquit_names_all_waiters_and_ends_the_process_in_both_modes() {
    let test = "sigquit_names_all_waiters_and_ends_the_process_in_both_modes";
    if is_child("quit threads") || is_child("quit seeded") {
        // A shell lets programs in the background ignore it.
        // Safety: this process has no handler of the signal.
        unsafe { libc::signal(libc::SIGQUIT, libc::SIG_DFL) };
    }
    if is_child("quit threads") {
        eprintln!("runs");
        two_ranks_that_wait(&World::threads(ThreadsConfig::default()));
    }
    if is_child("quit seeded") {
        eprintln!("runs");
        let (stall_steps, max_virtual_ns) = (u64::MAX, u64::MAX);
        two_ranks_that_wait(&World::seeded(SeededConfig { stall_steps, max_virtual_ns, ..SeededConfig::default() }));
    }
    for what in ["quit threads", "quit seeded"] {
        let (text, status) = child_until(test, what, ["-QUIT", "-CONT"], "gin-virtual: SIGQUIT");
        assert_names_all_waiters(&text);
        assert_eq!(status.signal(), Some(3), "{text}");
    }
}

#[test]
fn a_long_run_with_progress_is_not_reported() {
    if is_child("progress") {
        let stall_report = Some(Duration::from_millis(100));
        let world = World::threads(ThreadsConfig { stall_report, ..ThreadsConfig::default() });
        let started = Instant::now();
        let grid = Grid::new("busy", 1, 64, move || {
            while barrier(0, 0, Reduction::Or, started.elapsed() < Duration::from_millis(1500)) != 0 {
                pause(1000);
            }
        });
        run_grid(&world, DeviceConfig::default(), &grid).unwrap();
        // Fails, as `child` expects.
        panic!("went on");
    }
    let text = child("a_long_run_with_progress_is_not_reported", "progress");
    assert!(text.contains("went on") && !text.contains("no progress"), "{text}");
}

#[test]
fn a_world_that_yields_outlives_its_watchdog() {
    let world = World::seeded(SeededConfig { watchdog: Some(Duration::from_millis(500)), ..SeededConfig::default() });
    let started = std::time::Instant::now();
    world.run(vec![|| block_on(|| started.elapsed() > Duration::from_millis(1200))]).unwrap();
}

#[test]
fn a_process_that_is_stopped_for_longer_than_that_goes_on() {
    if is_child("stopped") {
        let world = World::seeded(SeededConfig { watchdog: Some(Duration::from_secs(1)), ..SeededConfig::default() });
        let busy = || {
            eprintln!("busy");
            // Until it has run for this long itself: the time for which it was stopped does not count.
            let (mut run, mut last) = (Duration::ZERO, Instant::now());
            while run < Duration::from_millis(200) {
                let now = Instant::now();
                run += (now - last).min(Duration::from_millis(1));
                last = now;
            }
            eprintln!("went on");
        };
        world.run(vec![busy]).unwrap();
        return;
    }
    let name = "a_process_that_is_stopped_for_longer_than_that_goes_on";
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture"]).env(CHILD, "stopped").stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut words = BufReader::new(child.stderr.take().unwrap()).lines();
    assert_eq!(words.next().unwrap().unwrap(), "busy");
    let signal =
        |name: &str| assert!(Command::new("kill").args([name, &child.id().to_string()]).status().unwrap().success());
    signal("-STOP");
    std::thread::sleep(Duration::from_millis(2500));
    signal("-CONT");
    let rest: Vec<String> = words.map(Result::unwrap).collect();
    assert!(child.wait().unwrap().success(), "{rest:?}");
    assert!(rest.iter().any(|line| line == "went on"), "{rest:?}");
}
