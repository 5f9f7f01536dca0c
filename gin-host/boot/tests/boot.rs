// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks that meet over TCP, here all in one process.

use gin_abi::{Fault, FaultKind, FaultSubject, Operation};
use gin_boot::{Bootstrap, BootstrapError, LossCause};
use gin_boot::{Rendezvous, TcpBootstrap, TcpConfig, UniqueId};
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

/// Long enough for a machine that is busy with other work.
const LONG: Duration = Duration::from_secs(60);

fn config() -> TcpConfig {
    TcpConfig::default()
        .address(Some(Ipv4Addr::LOCALHOST.into()))
        .joining(LONG)
        .collective_timeout(Some(LONG))
        .silence(LONG)
}

/// A job of threads; what each came to, by rank.
fn job<T: Send>(
    ranks: u32,
    config: &TcpConfig,
    body: impl Fn(TcpBootstrap) -> T + Sync,
) -> Vec<Result<T, BootstrapError>> {
    let rendezvous = Rendezvous::new(config.clone()).unwrap();
    let id = rendezvous.id().clone();
    let body = &body;
    thread::scope(|scope| {
        let others: Vec<_> = (1..ranks)
            .map(|rank| {
                let (id, config) = (id.clone(), config.clone());
                scope.spawn(move || TcpBootstrap::join(&id, rank, ranks, config).map(body))
            })
            .collect();
        let first = rendezvous.join(ranks).map(body);
        std::iter::once(first).chain(others.into_iter().map(|other| other.join().unwrap())).collect()
    })
}

/// The same, where all join.
fn all<T: Send>(ranks: u32, config: &TcpConfig, body: impl Fn(TcpBootstrap) -> T + Sync) -> Vec<T> {
    job(ranks, config, body).into_iter().map(|outcome| outcome.unwrap()).collect()
}

/// Waits for something that is to happen soon.
fn soon(what: &str, condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < LONG, "{what} did not happen");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the bytes of a rank: different for each.
fn bytes(rank: u32, round: u32, length: usize) -> Vec<u8> {
    let start = rank.wrapping_mul(2_654_435_761).wrapping_add(round);
    (0..length as u32).map(|index| (start.wrapping_add(index).wrapping_mul(0x9e37_79b1) >> 24) as u8).collect()
}

#[test]
fn every_rank_gets_the_bytes_of_all_by_rank_whatever_their_sizes() {
    const SIZES: [usize; 7] = [0, 1, 100, 32 << 10, (32 << 10) + 1, 70_000, 3 << 20];
    for ranks in [1, 2, 3, 4, 9, 17] {
        let length = |rank: u32, round: u32| {
            // The longest only once for many ranks.
            let sizes = &SIZES[..if ranks > 4 && round > 0 { 6 } else { 7 }];
            sizes[(rank + round) as usize % sizes.len()]
        };
        all(ranks, &config(), |rank| {
            assert_eq!(rank.ranks(), ranks);
            assert_eq!(rank.hosts().len(), ranks as usize);
            for round in 0..7 {
                let own = bytes(rank.rank(), round, length(rank.rank(), round));
                let got = rank.all_gather(&own).unwrap();
                assert_eq!(got.len(), ranks as usize);
                for (other, got) in (0..).zip(got) {
                    assert!(got == bytes(other, round, length(other, round)), "round {round}, from {other}");
                }
            }
        });
    }
}

#[test]
fn ranks_meet_over_ipv6() {
    if TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_err() {
        eprintln!("no IPv6 on this machine");
        return;
    }
    let config = config().address(Some(IpAddr::V6(Ipv6Addr::LOCALHOST)));
    let got = all(3, &config, |rank| rank.all_gather(&[rank.rank() as u8]).unwrap());
    assert_eq!(got, vec![vec![vec![0], vec![1], vec![2]]; 3]);
}

#[test]
fn many_rounds_on_many_channels_at_a_time_stay_apart() {
    all(5, &config(), |rank| {
        let rank = &rank;
        thread::scope(|scope| {
            for number in 1..=4_u64 {
                scope.spawn(move || {
                    let channel = rank.channel(number);
                    for round in 0..100_u32 {
                        let text = format!("{} {number} {round}", rank.rank());
                        let got = channel.all_gather(text.as_bytes()).unwrap();
                        for (other, got) in got.iter().enumerate() {
                            assert_eq!(*got, format!("{other} {number} {round}").into_bytes());
                        }
                    }
                });
            }
            for _ in 0..100 {
                rank.barrier().unwrap();
            }
        });
    });
}

#[test]
fn nobody_leaves_a_barrier_before_all_are_in_it() {
    use std::sync::atomic::{AtomicU32, Ordering};
    let entered = AtomicU32::new(0);
    all(6, &config(), |rank| {
        for round in 1..=50 {
            entered.fetch_add(1, Ordering::SeqCst);
            rank.barrier().unwrap();
            assert!(entered.load(Ordering::SeqCst) >= 6 * round);
        }
    });
}

#[test]
fn a_rank_that_leaves_after_its_last_collective_takes_nothing_with_it() {
    // A rank that is done first leaves at once, also from the middle of the tree.
    for _ in 0..20 {
        let got = all(7, &config(), |rank| rank.all_gather(&bytes(rank.rank(), 0, 100_000)));
        for got in got {
            assert_eq!(got.unwrap().len(), 7);
        }
    }
}

#[test]
fn a_rank_that_left_is_named_where_it_is_missed_and_no_board_gets_a_fault() {
    for ranks in [2, 3, 8] {
        for leaver in 0..ranks {
            let outcomes = all(ranks, &config(), |rank| {
                let channel = rank.channel(1);
                rank.barrier().unwrap();
                if rank.rank() == leaver {
                    return None;
                }
                let error = rank.barrier().unwrap_err();
                assert_eq!(channel.board().first(), None);
                Some(error)
            });
            // Others leave then, too, but a rank that hears of them has heard of the first.
            for (rank, outcome) in (0..).zip(outcomes) {
                match outcome {
                    None => assert_eq!(rank, leaver),
                    Some(BootstrapError::Lost { rank, cause, .. }) => {
                        assert_eq!((rank, cause), (leaver, LossCause::Left))
                    }
                    Some(other) => panic!("{other}"),
                }
            }
        }
    }
}

#[test]
fn an_abort_ends_the_collectives_of_all_and_names_its_caller() {
    for aborter in [0, 1, 4] {
        let outcomes = all(5, &config(), |rank| {
            rank.barrier().unwrap();
            if rank.rank() == aborter {
                rank.abort();
                return None;
            }
            Some(rank.barrier().unwrap_err())
        });
        for (rank, outcome) in (0..).zip(outcomes) {
            assert_eq!(outcome, (rank != aborter).then_some(BootstrapError::Aborted { rank: aborter }));
        }
    }
}

#[test]
fn a_collective_that_takes_too_long_names_the_missing_ranks() {
    let config = config().collective_timeout(Some(Duration::from_millis(300)));
    let done = std::sync::Barrier::new(6);
    let outcomes = all(6, &config, |rank| {
        let outcome = (![2, 4].contains(&rank.rank())).then(|| rank.barrier().unwrap_err());
        done.wait();
        outcome
    });
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        let Some(error) = outcome else { continue };
        let BootstrapError::Timeout { missing, waited_ms } = &error else { panic!("{rank}: {error:?}") };
        assert_eq!(missing, &[2, 4]);
        assert!(*waited_ms >= 300);
        assert!(error.to_string().starts_with("ranks 2, 4 did not come within"), "{error}");
    }
}

#[test]
fn joining_that_takes_too_long_names_the_ranks_that_did_not_come_on_every_rank() {
    // The parent of some, a leaf, and both.
    for absent in [vec![1], vec![6], vec![1, 3]] {
        let config = config().joining(Duration::from_secs(2)).progress(Duration::from_millis(200));
        let rendezvous = Rendezvous::new(config.clone()).unwrap();
        let id = rendezvous.id().clone();
        thread::scope(|scope| {
            let others: Vec<_> = (1..7)
                .filter(|rank| !absent.contains(rank))
                .map(|rank| {
                    let (id, config) = (id.clone(), config.clone());
                    scope.spawn(move || TcpBootstrap::join(&id, rank, 7, config).map(drop))
                })
                .collect();
            let mut outcomes = vec![rendezvous.join(7).map(drop)];
            outcomes.extend(others.into_iter().map(|other| other.join().unwrap()));
            for outcome in outcomes {
                match outcome {
                    Err(BootstrapError::Timeout { missing, waited_ms }) => {
                        assert_eq!(missing, absent);
                        assert!(waited_ms > 1000);
                    }
                    other => panic!("{other:?}"),
                }
            }
        });
    }
}

#[test]
fn a_rank_without_a_rank_0_says_where_it_looked() {
    // A port that was free a moment ago, at an address where no other test listens.
    let address = TcpListener::bind("127.0.0.77:0").unwrap().local_addr().unwrap();
    let id: UniqueId = format!("gin1:{}@{address}", "ab".repeat(16)).parse().unwrap();
    let config = config().joining(Duration::from_millis(300));
    let error = TcpBootstrap::join(&id, 1, 2, config).unwrap_err();
    assert!(matches!(error, BootstrapError::Unreachable { .. }), "{error:?}");
    assert!(error.to_string().contains(&format!("rank 1 cannot reach rank 0 at {address}")), "{error}");
}

#[test]
fn numbers_that_no_job_has_are_refused() {
    let rendezvous = || Rendezvous::new(config()).unwrap();
    let id = rendezvous().id().clone();
    assert!(matches!(rendezvous().join(0), Err(BootstrapError::Ranks { ranks: 0, .. })));
    assert!(matches!(rendezvous().join(u32::MAX), Err(BootstrapError::Ranks { .. })));
    let error = TcpBootstrap::join(&id, 2, 2, config()).unwrap_err();
    assert_eq!(error, BootstrapError::NoSuchRank { rank: 2, ranks: 2 });
}

/// The id with another secret.
fn wrong(id: &UniqueId) -> UniqueId {
    let address = id.addresses()[0];
    format!("gin1:{}@{address}", "00".repeat(16)).parse().unwrap()
}

#[test]
fn ranks_that_are_refused_learn_why_at_once_and_the_job_goes_on() {
    let rendezvous = Rendezvous::new(config()).unwrap();
    let id = rendezvous.id().clone();
    let join = |id: &UniqueId, rank, ranks| TcpBootstrap::join(id, rank, ranks, config());
    thread::scope(|scope| {
        let first = scope.spawn(|| rendezvous.join(3).map(|rank| rank.barrier()));
        assert_eq!(join(&wrong(&id), 1, 3).unwrap_err(), BootstrapError::Secret);
        assert_eq!(join(&id, 1, 4).unwrap_err(), BootstrapError::RanksDiffer { own: 4, theirs: 3 });
        assert_eq!(join(&id, 5, 6).unwrap_err(), BootstrapError::RanksDiffer { own: 6, theirs: 3 });
        assert_eq!(join(&id, 0, 3).unwrap_err(), BootstrapError::Duplicate { rank: 0 });
        let second = scope.spawn(|| join(&id, 1, 3).map(|rank| rank.barrier()));
        // Whichever of the two came first has the rank.
        let twin = scope.spawn(|| join(&id, 1, 3).map(|rank| rank.barrier()));
        soon("one of the twins was refused", || second.is_finished() || twin.is_finished());
        let third = join(&id, 2, 3).unwrap();
        third.barrier().unwrap();
        first.join().unwrap().unwrap().unwrap();
        let mut twins = [second.join().unwrap(), twin.join().unwrap()];
        twins.sort_by_key(|twin| twin.is_err());
        assert_eq!(twins, [Ok(Ok(())), Err(BootstrapError::Duplicate { rank: 1 })]);
    });
}

#[test]
fn strangers_cost_a_job_nothing() {
    let rendezvous = Rendezvous::new(config()).unwrap();
    let id = rendezvous.id().clone();
    let address = id.addresses()[0];
    let connect = || TcpStream::connect(address).unwrap();
    // More than there is room for at a time, which say nothing, or begin well and stop.
    let mut strangers: Vec<TcpStream> = (0..200).map(|_| connect()).collect();
    for (index, stranger) in strangers.iter_mut().enumerate() {
        let start: &[u8] = match index % 4 {
            0 => b"",
            1 => b"gin-b",
            2 => b"gin-boot\x01\0\x30half of a key",
            _ => b"GET / HTTP/1.1\r\n\r\n",
        };
        let _ = stranger.write_all(start);
    }
    let noise = thread::spawn(move || {
        for round in 0..200_u32 {
            let Ok(mut stranger) = TcpStream::connect(address) else { return };
            let mut garbage = b"gin-bot\x01".to_vec();
            garbage.extend(bytes(round, 7, 5000));
            if round % 2 == 0 {
                // A length of 48, and what is no key.
                garbage[8..10].copy_from_slice(&[0, 48]);
            }
            let _ = stranger.write_all(&garbage);
            let _ = stranger.shutdown(std::net::Shutdown::Write);
            let _ = stranger.read_to_end(&mut Vec::new());
        }
    });
    thread::scope(|scope| {
        let others: Vec<_> = (1..6)
            .map(|rank| {
                let id = id.clone();
                scope.spawn(move || TcpBootstrap::join(&id, rank, 6, config()).unwrap().all_gather(b"x").unwrap())
            })
            .collect();
        let got = rendezvous.join(6).unwrap().all_gather(b"x").unwrap();
        assert_eq!(got, vec![b"x"; 6]);
        for other in others {
            assert_eq!(other.join().unwrap(), got);
        }
    });
    noise.join().unwrap();
    drop(strangers);
}

fn fault(seen: u64) -> Fault {
    Fault::new(FaultKind::Network, Operation::Put).with_context(3).with_peer(1).with_values(FaultSubject::None, 7, seen)
}

#[test]
fn a_fault_on_the_board_of_one_rank_is_soon_on_all_boards_and_ends_their_collectives() {
    let ranks = 7;
    let done = std::sync::Barrier::new(ranks as usize);
    all(ranks, &config(), |rank| {
        let (one, other) = (rank.channel(1), rank.channel(2));
        rank.barrier().unwrap();
        if rank.rank() == 5 {
            one.board().post(5, fault(9));
        } else {
            assert_eq!(one.all_gather(&[]), Err(BootstrapError::Ended));
        }
        soon("the fault", || one.board().of(5).is_some_and(|notice| notice.fault == fault(9)));
        assert_eq!(one.board().first().map(|notice| notice.rank), Some(5));
        // Other channels and the job go on.
        assert_eq!(other.all_gather(b"x").unwrap().len(), 7);
        assert_eq!(other.board().first(), None);
        rank.barrier().unwrap();
        done.wait();
    });
}

#[test]
fn a_board_begins_with_what_was_posted_before_its_rank_asked_for_the_channel() {
    all(4, &config(), |rank| {
        if rank.rank() == 3 {
            // Not even the channel lasts until the others ask.
            rank.channel(9).board().post(3, fault(1));
        }
        // Bytes that are given here arrive after the fault.
        rank.barrier().unwrap();
        if rank.rank() != 3 {
            assert_eq!(rank.channel(9).board().first().map(|notice| notice.fault), Some(fault(1)));
        }
        rank.barrier().unwrap();
    });
}

#[test]
fn every_rank_hears_of_the_faults_of_all() {
    all(6, &config(), |rank| {
        let channel = rank.channel(1);
        channel.board().post(rank.rank(), fault(u64::from(rank.rank())));
        soon("all faults", || channel.board().count() == 6);
        for other in 0..6 {
            assert_eq!(channel.board().of(other).unwrap().fault, fault(u64::from(other)));
        }
        rank.barrier().unwrap();
    });
}

#[test]
fn ranks_that_are_left_meet_again_without_those_that_are_lost() {
    for lost in [vec![2], vec![0], vec![3, 1]] {
        let told = all(5, &config(), |rank| {
            let own = rank.rank();
            if lost.contains(&own) {
                let refused = rank.without(&lost, LONG).map(drop).unwrap_err();
                assert!(matches!(refused, BootstrapError::Lost { rank, .. } if rank == own), "{refused}");
                return None;
            }
            // In any order, and named twice.
            let again: Vec<u32> = lost.iter().rev().chain(&lost).copied().collect();
            let left = rank.without(&again, LONG).unwrap();
            drop(rank);
            let all = left.all_gather(&own.to_le_bytes()).unwrap();
            let all: Vec<u32> = all.iter().map(|bytes| u32::from_le_bytes(bytes[..].try_into().unwrap())).collect();
            assert_eq!(all[left.rank() as usize], own);
            // And once more, as ranks count now.
            let last = left.without(&[0], LONG).map(|last| (last.rank(), last.ranks()));
            Some((all, last))
        });
        let expected: Vec<u32> = (0..5).filter(|rank| !lost.contains(rank)).collect();
        for (index, (all, last)) in told.into_iter().flatten().enumerate() {
            assert_eq!(all, expected);
            match index {
                0 => assert!(matches!(last, Err(BootstrapError::Lost { rank: 0, .. }))),
                _ => assert_eq!(last, Ok((index as u32 - 1, expected.len() as u32 - 1))),
            }
        }
    }
}

#[test]
fn ranks_that_mean_others_to_be_lost_do_not_meet_and_can_try_again() {
    let short = Duration::from_millis(700);
    let told = all(4, &config(), |rank| {
        let own = rank.rank();
        if own > 1 {
            // They wait until the others are done.
            return rank.barrier().is_err();
        }
        let other = if own == 0 { 3 } else { 2 };
        let refused = rank.without(&[other], short).map(drop).unwrap_err();
        let expected = match refused {
            BootstrapError::Timeout { .. } | BootstrapError::Secret | BootstrapError::Unreachable { .. } => true,
            other => panic!("{other}"),
        };
        let left = rank.without(&[2, 3], LONG).unwrap();
        left.barrier().unwrap();
        rank.barrier().unwrap();
        expected
    });
    assert_eq!(told, [true, true, false, false]);
    let refused = all(1, &config(), |rank| rank.without(&[1], LONG).map(drop).unwrap_err());
    assert_eq!(refused, [BootstrapError::NoSuchRank { rank: 1, ranks: 1 }]);
}
