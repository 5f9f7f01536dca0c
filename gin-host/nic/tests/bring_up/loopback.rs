// SPDX-License-Identifier: MIT OR Apache-2.0
//! The checks pass on a software NIC, and each defect fails one.

use gin_abi::mlx5::cqe::Syndrome;
use gin_abi::mlx5::wqe;
use gin_abi::mlx5::wqe::Flags;
use gin_nic::loopback::*;
use gin_nic::{Hca, Nic, NicConfig};
use gin_soft_nic::Mistake;
use gin_soft_nic::engine::Slow;
use gin_soft_nic_host::{Fault, FaultKind, Options, SoftConfig, SoftFabric, SoftHca};
use gin_testkit::FailingHca;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

const DEADLINE: Duration = Duration::from_secs(60);

fn open(hca: Arc<dyn Hca>) -> Arc<Nic> {
    Nic::open(hca, NicConfig::default()).unwrap()
}

/// The check that posts tens of thousands of entries, none of which leaves the NIC.
const LONG: &str = "index past 2^16";

fn run(fabric: &SoftFabric, hca: SoftHca, deadline: Duration, but: &[&str]) -> Vec<Check> {
    let _server = fabric.serve().unwrap();
    checks::check_but(&open(Arc::new(hca)), deadline, but, &mut |_| ())
}

fn wrong(checks: &[Check]) -> Vec<(&str, &Failed)> {
    checks.iter().filter_map(|check| Some((check.name, check.outcome.as_ref().err()?))).collect()
}

#[test]
fn a_software_nic_passes_on_both_networks_with_answers_at_once_and_late() {
    for config in [SoftConfig::ethernet, SoftConfig::infiniband] {
        for options in [Options::default(), Options { delay: 9, seed: 4, ..Options::default() }] {
            let fabric = SoftFabric::new(options);
            let checks = run(&fabric, fabric.add(config(0)), DEADLINE, &[]);
            assert_eq!(wrong(&checks), []);
            assert!(checks.iter().map(|check| check.name).eq(names()));
            assert_eq!(fabric.violations(), (None, 0));
            assert_eq!(fabric.objects(), 0);
        }
    }
}

#[test]
fn a_listener_hears_of_each_check_as_it_ends() {
    let fabric = SoftFabric::default();
    let _server = fabric.serve().unwrap();
    let mut heard = Vec::new();
    let nic = open(Arc::new(fabric.add(SoftConfig::ethernet(0))));
    let checks = check(&nic, DEADLINE, &mut |check| heard.push(check.clone()));
    assert_eq!(heard, checks);
}

#[test]
fn whichever_request_fails_one_check_says_so_and_with_what() {
    let mut requests = 0;
    for entry in 0.. {
        let fabric = SoftFabric::default();
        let kind = FaultKind::Fail(Syndrome::RemoteOperation);
        fabric.inject(Fault { device: None, queue: None, entry, kind }).unwrap();
        let checks = run(&fabric, fabric.add(SoftConfig::ethernet(0)), DEADLINE, &[LONG]);
        let wrong = wrong(&checks);
        assert_eq!(fabric.objects(), 0);
        let [(name, failed)] = wrong[..] else {
            assert_eq!(wrong, [], "request {entry}");
            break;
        };
        requests += 1;
        assert!(!["bring-up", "nop", "release"].contains(&name), "{name} sends no request");
        assert!(failed.seen.contains("peer could not finish the request (syndrome 0x14"), "{name}: {failed:?}");
    }
    // Writes, inline writes, reads and sums, one write for each signal and one for each entry of a full queue.
    assert!(requests > 150, "only {requests} requests");
}

#[test]
fn each_mistake_of_a_nic_fails_the_checks_that_are_there_for_it() {
    let noticed: [(Mistake, &[&str]); 4] = [
        (Mistake::IgnoreDumps, &["read and dump"]),
        (Mistake::RelaxAll, &["signal after data"]),
        (Mistake::AddTwice, &["fetch-and-add", "signal after data"]),
        (Mistake::LoseWrites, &["write", "signal after data"]),
    ];
    assert!(noticed.iter().map(|(mistake, _)| *mistake).eq(Mistake::ALL));
    for (mistake, names) in noticed {
        let fabric = SoftFabric::new(Options { mistake, ..Options::default() });
        // The check waits for bytes that never come into view.
        let checks = run(&fabric, fabric.add(SoftConfig::ethernet(0)), Duration::from_secs(3), &[LONG]);
        let wrong = wrong(&checks);
        assert!(wrong.iter().map(|(name, _)| name).eq(names), "{mistake:?}: {wrong:?}");
    }
}

#[test]
fn a_nic_that_stalls_is_reported_by_the_deadline_with_the_state_of_the_queue_pair() {
    let fabric = SoftFabric::default();
    fabric.inject(Fault { device: None, queue: None, entry: 0, kind: FaultKind::Stall }).unwrap();
    let checks = run(&fabric, fabric.add(SoftConfig::ethernet(0)), Duration::from_secs(3), &[LONG]);
    let [(name, failed)] = wrong(&checks)[..] else { panic!("{checks:?}") };
    assert_eq!(name, "write");
    assert!(failed.expected.contains("completion of entry 0"), "{failed:?}");
    let text = "nothing, after 3000 ms; 0 of 1 entries are complete, state of the queue pair: ready to send";
    assert_eq!(failed.seen, text);
}

#[test]
fn a_bring_up_that_fails_is_the_only_check_that_there_is() {
    let fabric = SoftFabric::default();
    // The calls of `Nic::open` on Ethernet succeed.
    let mut calls = 0;
    let (nic, failing) = loop {
        let failing = Arc::new(FailingHca::new(Arc::new(fabric.add(SoftConfig::ethernet(0))), calls));
        if let Ok(nic) = Nic::open(failing.clone(), NicConfig::default()) {
            break (nic, failing);
        }
        calls += 1;
    };
    let checks = check(&nic, DEADLINE, &mut |_| ());
    assert!(failing.has_failed());
    let [(name, failed)] = wrong(&checks)[..] else { panic!("{checks:?}") };
    assert_eq!((name, checks.len()), ("bring-up", 1));
    assert!(failed.seen.contains("registering memory: a call that was to fail"), "{failed:?}");
}

#[test]
fn an_object_that_does_not_end_fails_the_last_check() {
    let fabric = SoftFabric::default();
    let _server = fabric.serve().unwrap();
    let mut ends = 0;
    loop {
        let failing = Arc::new(FailingHca::at_end(Arc::new(fabric.add(SoftConfig::ethernet(0))), ends));
        let nic = open(failing.clone());
        let mut pair = Loopback::new(&nic, Deadline::new(DEADLINE)).unwrap();
        pair.post(Flags::COMPLETION, wqe::nop).unwrap();
        pair.finish().unwrap();
        drop(pair);
        let begun = failing.has_failed();
        assert_eq!(nic.failures() > 0, begun, "end {ends}");
        let checks = checks::check_but(&nic, DEADLINE, &names().collect::<Vec<_>>(), &mut |_| ());
        let [check] = &*checks else { panic!("{checks:?}") };
        assert_eq!((check.name, check.outcome.is_err()), ("release", begun));
        let Err(failed) = &check.outcome else { break };
        assert!(failed.seen.contains("a call that was to fail failed: "), "{failed:?}");
        ends += 1;
    }
    // Two regions, ring memory, a doorbell page, two completion queues, two queue pairs.
    assert_eq!(ends, 8);
}

#[test]
fn data_that_is_not_there_yet_is_noticed() {
    // A software NIC withholds what a read brings until a dump: without it the memory is as it was.
    let fabric = SoftFabric::default();
    let nic = open(Arc::new(fabric.add(SoftConfig::ethernet(0))));
    let _server = fabric.serve().unwrap();
    let mut pair = Loopback::new(&nic, Deadline::new(DEADLINE)).unwrap();
    let (from, to) = (pair.words.clone(), pair.payload.clone());
    word_at(&from.slice, 0).store(7, Ordering::Relaxed);
    pair.post(Flags::COMPLETION, |post| wqe::read(post, from.remote(0), to.local(0, 8))).unwrap();
    pair.finish().unwrap();
    assert_eq!(word_at(&to.slice, 0).load(Ordering::Acquire), 0);
    pair.post(Flags::COMPLETION.and(Flags::FENCE), |post| wqe::dump(post, from.local(64, 8))).unwrap();
    pair.finish().unwrap();
    assert_eq!(word_at(&to.slice, 0).load(Ordering::Acquire), 7);
}

#[test]
fn the_delay_of_a_slow_nic_begins_at_the_doorbell_also_before_the_first_step() {
    // The clock counts from the start of the machine: a delay that began at time 0 has passed already.
    let late = gin_gpu::rt::clock_ns() / 2;
    let fabric = SoftFabric::new(Options { slow: Some(Slow { device: 0, late }), ..Options::default() });
    let nic = open(Arc::new(fabric.add(SoftConfig::ethernet(0))));
    let mut pair = Loopback::new(&nic, Deadline::new(Duration::from_millis(100))).unwrap();
    pair.post(Flags::COMPLETION, wqe::nop).unwrap();
    pair.ring();
    fabric.settle();
    let failed = pair.finish().unwrap_err();
    assert!(failed.seen.contains("0 of 1 entries are complete"), "{failed:?}");
}
