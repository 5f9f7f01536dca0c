// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bootstraps inside and beside a seeded virtual world: coroutines of the world wait in its time, other threads in real
//! time.

use gin_boot::{Bootstrap, BootstrapError, InProcess, Rendezvous, TcpBootstrap, TcpConfig, rt};
use gin_gpu::virt::VirtualDevice;
use gin_virtual::{SeededConfig, World, in_world, sleep_ns};
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Long enough for a machine that is busy with other work.
const LONG: Duration = Duration::from_secs(60);

/// A pause of a rank. In virtual time it takes a fraction of a second.
const PAUSE: Duration = Duration::from_secs(20);

/// Makes a world, and the device that installs the waits of virtual worlds.
fn world(seed: u64) -> World {
    drop(VirtualDevice::memory_only(0));
    World::seeded(SeededConfig::new(seed))
}

fn config() -> TcpConfig {
    let config = TcpConfig::default().address(Some(Ipv4Addr::LOCALHOST.into()));
    config.joining(LONG).collective_timeout(Some(LONG)).silence(LONG)
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap()
}

/// Gives the rank's number to collectives of the job and of a channel, and checks the results.
fn check_collectives(rank: &dyn Bootstrap) {
    let expected: Vec<Vec<u8>> = (0..rank.ranks()).map(|rank| vec![rank as u8]).collect();
    let channel = rank.channel(1);
    for _ in 0..20 {
        assert_eq!(rank.all_gather(&[rank.rank() as u8]), Ok(expected.clone()));
        assert_eq!(channel.all_gather(&[rank.rank() as u8]), Ok(expected.clone()));
    }
    rank.barrier().unwrap();
}

#[test]
fn local_ranks_inside_a_seeded_world_wait_in_virtual_time() {
    let begun = Instant::now();
    for seed in 0..3 {
        let hosts = InProcess::job(3).unwrap().into_iter().map(|rank| {
            move || {
                assert!(in_world());
                check_collectives(&rank);
                let start = rt::clock_ns();
                if rank.rank() == 2 {
                    sleep_ns(nanoseconds(PAUSE));
                }
                rank.barrier().unwrap();
                rt::clock_ns() - start
            }
        });
        let waited = world(seed).run(hosts.collect()).unwrap();
        assert!(waited.into_iter().all(|waited| waited >= nanoseconds(PAUSE) / 2), "seed {seed}");
    }
    assert!(begun.elapsed() < 3 * PAUSE);
}

#[test]
fn a_local_collective_inside_a_seeded_world_ends_at_its_virtual_timeout() {
    let begun = Instant::now();
    let hosts = InProcess::job(2).unwrap().into_iter().map(|rank| rank.with_timeout(PAUSE)).map(|rank| {
        move || {
            if rank.rank() == 1 {
                sleep_ns(2 * nanoseconds(PAUSE));
                return None;
            }
            Some(rank.barrier().unwrap_err())
        }
    });
    let errors = world(1).run(hosts.collect()).unwrap();
    let Some(BootstrapError::Timeout { missing, waited_ms }) = &errors[0] else { panic!("{errors:?}") };
    assert!(*missing == [1] && *waited_ms >= 20_000, "{errors:?}");
    assert!(begun.elapsed() < PAUSE);
}

#[test]
fn local_ranks_beside_a_seeded_world_wait_in_real_time() {
    let limit = Duration::from_millis(200);
    let outside_is_done = AtomicBool::new(false);
    let job = |limit| InProcess::job(2).unwrap().into_iter().map(move |rank| rank.with_timeout(limit));
    let ranks: Vec<_> = job(LONG).collect();
    // The second rank never comes.
    let lonely: Vec<_> = job(limit).collect();
    thread::scope(|scope| {
        let inside = scope.spawn(|| {
            let hosts = InProcess::job(2).unwrap().into_iter().map(|rank| {
                let outside_is_done = &outside_is_done;
                move || {
                    check_collectives(&rank);
                    // The world runs as long as the threads outside need it.
                    rt::wait_until(|| outside_is_done.load(Ordering::Acquire));
                    in_world()
                }
            });
            world(2).run(hosts.collect())
        });
        let (begun, clock) = (Instant::now(), rt::clock_ns());
        scope.spawn(|| check_collectives(&ranks[1]));
        check_collectives(&ranks[0]);
        assert!(!in_world());
        let error = lonely[0].barrier().unwrap_err();
        assert!(matches!(&error, BootstrapError::Timeout { missing, .. } if *missing == [1]), "{error}");
        assert!(begun.elapsed() >= limit);
        assert!(rt::clock_ns() - clock <= nanoseconds(begun.elapsed()), "the clock outside is the real one");
        outside_is_done.store(true, Ordering::Release);
        assert_eq!(inside.join().unwrap(), Ok(vec![true, true]));
    });
}

#[test]
fn tcp_ranks_inside_a_seeded_world_wait_without_blocking_each_other() {
    let rendezvous = Rendezvous::new(config()).unwrap();
    let id = rendezvous.id().clone();
    // All hosts of a seeded world are coroutines of one thread: a rank that blocked it would wait for ever.
    let first: Box<dyn FnOnce() + Send> = Box::new(|| check_collectives(&rendezvous.join(3).unwrap()));
    let other = |rank| -> Box<dyn FnOnce() + Send + '_> {
        let id = &id;
        Box::new(move || check_collectives(&TcpBootstrap::join(id, rank, 3, config()).unwrap()))
    };
    world(3).run(vec![first, other(1), other(2)]).unwrap();
}

#[test]
fn tcp_ranks_inside_and_beside_a_seeded_world_are_ranks_of_one_job() {
    let rendezvous = Rendezvous::new(config()).unwrap();
    let id = rendezvous.id().clone();
    thread::scope(|scope| {
        let outside = scope.spawn(|| {
            let rank = TcpBootstrap::join(&id, 1, 2, config()).unwrap();
            check_collectives(&rank);
            in_world()
        });
        let inside = move || {
            check_collectives(&rendezvous.join(2).unwrap());
            in_world()
        };
        assert_eq!(world(4).run(vec![inside]), Ok(vec![true]));
        assert!(!outside.join().unwrap());
    });
}
