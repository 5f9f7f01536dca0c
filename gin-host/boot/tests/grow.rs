// SPDX-License-Identifier: MIT OR Apache-2.0
//! Processes that join a running job, here all threads of one process.

use gin_boot::{Bootstrap, BootstrapError, IdError, Job, Rendezvous, TcpBootstrap, TcpConfig, UniqueId};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Long enough for a machine that is busy with other work.
const LONG: Duration = Duration::from_secs(60);

/// The time for a call that must fail.
const SHORT: Duration = Duration::from_millis(700);

fn config() -> TcpConfig {
    let config = TcpConfig::default().address(Some(Ipv4Addr::LOCALHOST.into()));
    config.joining(LONG).collective_timeout(Some(LONG)).silence(LONG)
}

/// Starts a job of threads. Returns its id, and its ranks by number.
fn start(ranks: u32) -> (UniqueId, Vec<TcpBootstrap>) {
    let rendezvous = Rendezvous::new(config()).unwrap();
    let id = rendezvous.id().clone();
    let all = thread::scope(|scope| {
        let join = |rank| TcpBootstrap::join(&id, rank, ranks, config()).unwrap();
        let others: Vec<_> = (1..ranks).map(|rank| scope.spawn(move || join(rank))).collect();
        let first = rendezvous.join(ranks).unwrap();
        std::iter::once(first).chain(others.into_iter().map(|other| other.join().unwrap())).collect()
    });
    (id, all)
}

/// Calls `grow` on these ranks, and joins as the ranks `joining` by `id`, at the same time. Returns the outcomes of
/// both, in these orders.
type Outcomes = (Vec<Result<TcpBootstrap, BootstrapError>>, Vec<Result<TcpBootstrap, BootstrapError>>);

fn grow(old: &[&TcpBootstrap], id: &UniqueId, joining: &[u32], ranks: u32, within: Duration) -> Outcomes {
    thread::scope(|scope| {
        let join = |rank| TcpBootstrap::join_running(id, rank, ranks, config().joining(within));
        let new: Vec<_> = joining.iter().map(|&rank| scope.spawn(move || join(rank))).collect();
        let old: Vec<_> = old.iter().map(|rank| scope.spawn(|| rank.grow(joining, within))).collect();
        let wait = |all: Vec<thread::ScopedJoinHandle<'_, _>>| all.into_iter().map(|one| one.join().unwrap()).collect();
        (wait(old), wait(new))
    })
}

/// Returns all ranks of the next job, by number.
fn grown((old, new): Outcomes) -> Vec<TcpBootstrap> {
    let mut all: Vec<_> = old.into_iter().chain(new).map(Result::unwrap).collect();
    all.sort_by_key(Bootstrap::rank);
    all
}

/// Runs collectives of the job and of a channel, and checks the numbers of the ranks.
fn check(job: &[TcpBootstrap]) {
    // A rank opens each channel once.
    static CHANNELS: AtomicU64 = AtomicU64::new(1);
    let channel = CHANNELS.fetch_add(1, Ordering::Relaxed);
    let expected: Vec<Vec<u8>> = (0..job.len()).map(|rank| vec![rank as u8]).collect();
    thread::scope(|scope| {
        for (number, rank) in (0..).zip(job) {
            let expected = &expected;
            scope.spawn(move || {
                assert_eq!((rank.rank(), rank.ranks() as usize), (number, expected.len()));
                assert_eq!(rank.all_gather(&[number as u8]).unwrap(), *expected);
                assert_eq!(rank.channel(channel).all_gather(&[number as u8]).unwrap(), *expected);
                rank.barrier().unwrap();
            });
        }
    });
}

#[test]
fn new_ranks_get_the_next_numbers_and_the_others_keep_theirs() {
    for (before, more) in [(1, 1), (3, 2), (4, 5)] {
        let (id, old) = start(before);
        let joining: Vec<u32> = (before..before + more).rev().collect();
        let all = grown(grow(&old.iter().collect::<Vec<_>>(), &id, &joining, before + more, LONG));
        // The old job goes on until it is dropped.
        check(&old);
        drop(old);
        check(&all);
    }
}

#[test]
fn new_processes_take_the_numbers_of_lost_ranks() {
    // The rank that admits, the root of the tree, inner ranks and leaves, with and without new ranks.
    for joining in [vec![0], vec![1], vec![4], vec![0, 1, 3], vec![2, 5, 6], vec![0, 5]] {
        let (_, mut old) = start(5);
        let is_kept = |rank: &u32| !joining.contains(rank);
        let left: Vec<u32> = (0..5).filter(is_kept).collect();
        let id = old[left[0] as usize].id();
        old.retain(|rank| is_kept(&rank.rank()));
        let ranks = (left.len() + joining.len()) as u32;
        let all = grown(grow(&old.iter().collect::<Vec<_>>(), &id, &joining, ranks, LONG));
        drop(old);
        check(&all);
    }
}

#[test]
fn a_job_grows_and_shrinks_again_and_again_and_keeps_its_address() {
    let (id, mut all) = start(2);
    for round in 0..3 {
        let ranks = all.len() as u32;
        // By the address at which rank 0 of the first job has listened.
        all = grown(grow(&all.iter().collect::<Vec<_>>(), &id, &[ranks, ranks + 1], ranks + 2, LONG));
        check(&all);
        let lost = 1 + round;
        all.remove(lost as usize);
        let next: Vec<_> = thread::scope(|scope| {
            let calls: Vec<_> = all.iter().map(|rank| scope.spawn(move || rank.without(&[lost], LONG))).collect();
            calls.into_iter().map(|call| call.join().unwrap().unwrap()).collect()
        });
        all = next;
        check(&all);
    }
    assert_eq!(all.len(), 5);
}

#[test]
fn a_process_that_comes_early_waits_for_the_call() {
    let (id, old) = start(2);
    thread::scope(|scope| {
        let early = scope.spawn(|| TcpBootstrap::join_running(&id, 2, 3, config()).unwrap());
        thread::sleep(Duration::from_millis(300));
        assert!(!early.is_finished());
        check(&old);
        let calls: Vec<_> = old.iter().map(|rank| scope.spawn(|| rank.grow(&[2], LONG).unwrap())).collect();
        let mut all: Vec<_> = calls.into_iter().map(|call| call.join().unwrap()).collect();
        all.push(early.join().unwrap());
        check(&all);
    });
}

#[test]
fn a_process_that_is_not_called_for_gives_up_at_its_deadline() {
    let (id, old) = start(2);
    let begun = Instant::now();
    let error = TcpBootstrap::join_running(&id, 2, 3, config().joining(SHORT)).unwrap_err();
    assert!(matches!(error, BootstrapError::NotAdmitted { rank: 2, ranks: 3, .. }), "{error}");
    assert!(begun.elapsed() >= SHORT && begun.elapsed() < LONG / 2);
    check(&old);
    // Nothing listens there.
    let address = TcpListener::bind("127.0.0.78:0").unwrap().local_addr().unwrap();
    let nowhere = id.with_addresses(&[address]).unwrap();
    let error = TcpBootstrap::join_running(&nowhere, 2, 3, config().joining(SHORT)).unwrap_err();
    assert!(matches!(&error, BootstrapError::Unreachable { reason } if reason.contains(&address.to_string())));
}

#[test]
fn a_call_to_which_nobody_comes_ends_and_names_the_missing_rank_and_the_old_job_goes_on() {
    let (id, old) = start(3);
    let all: Vec<&TcpBootstrap> = old.iter().collect();
    // A rank that does not call, and one that does not join.
    for (callers, joining, missing) in [(&all[..2], &[][..], 2), (&all[1..], &[][..], 0), (&all[..], &[3][..], 3)] {
        let begun = Instant::now();
        let calls: Vec<_> = thread::scope(|scope| {
            let calls: Vec<_> = callers.iter().map(|rank| scope.spawn(|| rank.grow(joining, SHORT))).collect();
            calls.into_iter().map(|call| call.join().unwrap()).collect()
        });
        for outcome in calls {
            match outcome {
                Err(BootstrapError::Timeout { missing: named, waited_ms }) => {
                    assert_eq!(named, [missing]);
                    assert!(u128::from(waited_ms) >= SHORT.as_millis());
                }
                other => panic!("{other:?}"),
            }
        }
        assert!(begun.elapsed() < LONG / 2);
        check(&old);
    }
    // And the next call succeeds.
    check(&grown(grow(&all, &id, &[3], 4, LONG)));
}

#[test]
fn ranks_with_different_plans_do_not_meet() {
    let (_, old) = start(3);
    let plans: [&[u32]; 3] = [&[3], &[3, 4], &[2]];
    let outcomes: Vec<_> = thread::scope(|scope| {
        let calls = old.iter().zip(plans).map(|(rank, plan)| scope.spawn(move || rank.grow(plan, SHORT)));
        let calls: Vec<_> = calls.collect();
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    });
    assert!(matches!(&outcomes[0], Err(BootstrapError::Timeout { missing, .. }) if missing == &[1, 2, 3]));
    assert!(matches!(&outcomes[1], Err(BootstrapError::Timeout { missing, .. }) if missing == &[0]));
    assert!(matches!(&outcomes[2], Err(BootstrapError::Lost { rank: 2, .. })));
    check(&old);
}

#[test]
fn numbers_that_leave_a_gap_or_do_not_fit_are_refused() {
    let (id, old) = start(2);
    let refused = |joining: &[u32]| old[0].grow(joining, LONG).unwrap_err();
    assert_eq!(refused(&[3]), BootstrapError::NoSuchRank { rank: 3, ranks: 3 });
    assert_eq!(refused(&[2, 2, 4]), BootstrapError::NoSuchRank { rank: 4, ranks: 4 });
    assert!(matches!(refused(&[0]), BootstrapError::Lost { rank: 0, .. }));
    let error = TcpBootstrap::join_running(&id, 3, 3, config()).unwrap_err();
    assert_eq!(error, BootstrapError::NoSuchRank { rank: 3, ranks: 3 });
    let none = id.with_addresses(&[]).unwrap_err();
    let zero = id.with_addresses(&[SocketAddr::from(([127, 0, 0, 1], 0))]).unwrap_err();
    assert_eq!((none, zero), (IdError::Address, IdError::Address));
}

#[test]
fn strangers_and_twins_are_refused_at_once_and_the_call_goes_on() {
    let (id, old) = start(2);
    // Both kinds of addresses: of rank 0 of the first job, and of now.
    for id in [&id, &id.with_addresses(&old[1].addresses()).unwrap()] {
        let wrong: UniqueId = format!("gin1:{}@{}", "00".repeat(16), id.addresses()[0]).parse().unwrap();
        let join = |id: &UniqueId, rank, ranks| TcpBootstrap::join_running(id, rank, ranks, config());
        thread::scope(|scope| {
            let calls: Vec<_> = old.iter().map(|rank| scope.spawn(|| rank.grow(&[2, 3], LONG).unwrap())).collect();
            assert_eq!(join(&wrong, 2, 4).unwrap_err(), BootstrapError::Secret);
            assert_eq!(join(id, 2, 5).unwrap_err(), BootstrapError::RanksDiffer { own: 5, theirs: 4 });
            let twins = [scope.spawn(|| join(id, 2, 4)), scope.spawn(|| join(id, 2, 4))];
            let begun = Instant::now();
            while !twins.iter().any(|twin| twin.is_finished()) {
                assert!(begun.elapsed() < LONG, "one of the twins is refused");
                thread::sleep(Duration::from_millis(1));
            }
            let last = join(id, 3, 4).unwrap();
            let (joined, refused): (Vec<_>, Vec<_>) =
                twins.into_iter().map(|twin| twin.join().unwrap()).partition(Result::is_ok);
            assert_eq!(refused.into_iter().next().unwrap().unwrap_err(), BootstrapError::Duplicate { rank: 2 });
            let mut all: Vec<_> = calls.into_iter().map(|call| call.join().unwrap()).collect();
            all.extend(joined.into_iter().map(Result::unwrap));
            all.push(last);
            check(&all);
        });
    }
}

#[test]
fn processes_join_by_the_variables_of_their_environment_and_by_the_id_of_any_rank() {
    let job = |rank: u32, ranks: u32, at: SocketAddr, is_running: u32| {
        let variables = |name: &str| {
            let value = match name {
                "GIN_RANK" => rank.to_string(),
                "GIN_RANKS" => ranks.to_string(),
                "GIN_ADDR" => at.ip().to_string(),
                "GIN_PORT" => at.port().to_string(),
                "GIN_SECRET" => "sixteen bytes...".to_owned(),
                "GIN_JOIN" => is_running.to_string(),
                _ => return None,
            };
            Some(value)
        };
        let job = Job::from_variables(&variables).unwrap().unwrap();
        assert_eq!(job.is_running(), is_running == 1);
        job.bootstrap(config()).unwrap()
    };
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    thread::scope(|scope| {
        let first = scope.spawn(|| job(0, 2, free, 0));
        let old = job(1, 2, free, 0);
        drop(first.join().unwrap());
        // In the place of rank 0, which listened at the address of the first job.
        // Rank 1 learns that rank 0 has left.
        let begun = Instant::now();
        while old.addresses().len() > 1 {
            assert!(begun.elapsed() < LONG);
            thread::sleep(Duration::from_millis(1));
        }
        let now = old.addresses()[0];
        let call = scope.spawn(move || old.grow(&[0], LONG).unwrap());
        let next = [job(0, 2, now, 1), call.join().unwrap()];
        check(&next);
        // The secret of the variables has an id, too.
        let (id, next) = (next[1].id(), next.iter().collect::<Vec<_>>());
        check(&grown(grow(&next, &id, &[2], 3, LONG)));
    });
}

#[test]
fn ranks_of_one_process_do_not_grow() {
    let ranks = gin_boot::InProcess::job(1).unwrap();
    assert!(matches!(ranks[0].grow(&[1], LONG), Err(BootstrapError::System { .. })));
    assert_eq!(ranks[0].id(), None);
}
