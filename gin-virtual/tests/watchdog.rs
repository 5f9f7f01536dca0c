// SPDX-License-Identifier: MIT OR Apache-2.0
//! The watchdog names a coroutine that never yields and ends the process. Observed from outside, in a child process.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use gin_virtual::*;

const CHILD: &str = "GIN_VIRTUAL_TEST_CHILD";
const LIMIT: Option<Duration> = Some(Duration::from_millis(200));

/// Never gives up the processor.
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
