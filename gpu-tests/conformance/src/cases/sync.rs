// SPDX-License-Identifier: MIT OR Apache-2.0
//! Barriers over all teams, and the teams themselves.

use super::{List, Verdict, run_ok};
use crate::host::{Net, Setup};
use crate::op::{Code, Op};
use crate::scenario::{CoopKind, Scenario};
use gin_abi::FaultKind;
use std::vec;
use std::vec::Vec;

pub(super) fn add(list: &mut List) {
    list.per_coop("a_barrier_keeps_everybody_until_all_are_there", barrier);
    list.case("rail_and_lsa_barriers_keep_their_own_members_only", teams);
    list.per_coop("a_barrier_over_all_contexts_covers_each_of_them", all_contexts);
    list.case("ranks_of_a_team_are_the_right_ranks_of_the_world", members);
    list.case("a_barrier_in_two_steps_lets_work_go_on_between", split);
    list.case("several_barriers_do_not_disturb_each_other", several);
    list.case("ranks_outside_a_team_are_refused", outside);
    list.case("a_single_rank_passes_every_barrier", alone);
    list.case("a_barrier_that_timed_out_refuses_further_use", broken);
    list.case("memory_of_lsa_peers_is_reached_by_loads", loads);
}

/// A rank's writes before a barrier are visible after it, round after round.
fn barrier(setup: &Setup, coop: CoopKind) -> Verdict {
    let ranks = 3;
    let scenario = Scenario::new(ranks).coop(coop).all(|rank| {
        let mut program = Vec::new();
        for round in 0..4u64 {
            program.push(Op::pause(u64::from(rank) * 700));
            for peer in 0..ranks {
                let value = round * 100 + u64::from(rank);
                program.push(Op::put_value(peer, 8, value).to(1, 8 * u64::from(rank)));
            }
            program.push(Op::barrier());
            // The right neighbour's put into this rank's window; an own get copies it elsewhere.
            program.push(Op::get(rank, 8).from(1, 8 * u64::from((rank + 1) % ranks)).to(0, 8 * round));
            program.extend([Op::flush(), Op::barrier()]);
        }
        program
    });
    let outcome = run_ok(setup, &scenario)?;
    for rank in 0..ranks {
        let expected = (0..4u64).flat_map(|round| (round * 100 + u64::from((rank + 1) % ranks)).to_le_bytes());
        super::expect_bytes(&outcome, rank, 0, 0, expected)?;
    }
    Ok(())
}

/// Ranks 0 and 1, and 2 and 3, are LSA teams; ranks 0 and 2, and 1 and 3, are rail teams. Rank 3 arrives only once rank
/// 0 has passed the barrier of a team without rank 3. Members' puts before a barrier are visible after it.
fn teams(setup: &Setup) -> Verdict {
    let meet = |team| Op { team, fence: 1, ..Op::new(Code::Barrier) };
    for first in [1u32, 2] {
        let mut scenario = Scenario::new(4);
        scenario.lsa_size = Some(2);
        let scenario = scenario.all(|rank| {
            let mut program = Vec::new();
            if rank == 3 {
                program.push(Op::wait_signal(0, 1));
            }
            for team in [first, 3 - first] {
                let value = u64::from(10 * rank + team);
                let place = 8 * u64::from(rank + 4 * team);
                program.extend((0..2).map(|peer| Op::put_value(peer, 8, value).to(1, place).team(team)));
                program.push(meet(team));
                if rank == 0 && team == first {
                    program.push(Op::raise(3, 0));
                }
                // An own get of the value that the other member put.
                let place = 8 * u64::from((rank ^ team) + 4 * team);
                program.extend([Op::get(rank, 8).from(1, place).to(0, 8 * u64::from(team)), Op::flush()]);
            }
            program.push(meet(0));
            program
        });
        let outcome = run_ok(setup, &scenario)?;
        for rank in 0..4u64 {
            let expected = [0, 10 * (rank ^ 1) + 1, 10 * (rank ^ 2) + 2];
            super::expect_bytes(&outcome, rank as u32, 0, 0, expected.into_iter().flat_map(u64::to_le_bytes))?;
        }
    }
    Ok(())
}

/// Each rank writes to each member of each team by its rank in that team.
fn members(setup: &Setup) -> Verdict {
    let mut scenario = Scenario::new(6);
    scenario.lsa_size = Some(2);
    let sizes = [6u32, 2, 3];
    let scenario = scenario.all(|rank| {
        let mut program: Vec<Op> = (0..3).map(|team| Op::new(Code::ReadTeam).team(team)).collect();
        for team in 0..3 {
            let place = 8 * u64::from(rank + 6 * team);
            program.extend((0..sizes[team as usize]).map(|peer| {
                let value = u64::from(100 * rank + 10 * team + peer) + 1;
                Op::put_value(peer, 8, value).to(1, place).team(team)
            }));
        }
        program.push(Op::barrier());
        program
    });
    let outcome = run_ok(setup, &scenario)?;
    for rank in 0..6 {
        let mine = [rank, rank % 2, rank / 2];
        let mut expected = Vec::new();
        for team in 0..3 {
            let index = team as usize;
            outcome.check_value(&scenario, rank, 0, index, u64::from(sizes[index]))?;
            outcome.each(&scenario, rank, 0, index, |entry| {
                if entry.second == u64::from(mine[index]) {
                    Ok(())
                } else {
                    Err("expected another rank in the team".into())
                }
            })?;
            for from in 0..6 {
                let together = match team {
                    0 => true,
                    1 => from / 2 == rank / 2,
                    _ => from % 2 == rank % 2,
                };
                expected.push(if together { u64::from(100 * from + 10 * team + mine[index]) + 1 } else { 0 });
            }
        }
        super::expect_bytes(&outcome, rank, 1, 0, expected.into_iter().flat_map(u64::to_le_bytes))?;
    }
    Ok(())
}

/// Puts, and then gets, in each context, with one barrier for all contexts.
fn all_contexts(setup: &Setup, coop: CoopKind) -> Verdict {
    let contexts = 4;
    for net in [Net::Reorder, Net::Delay { ns: 20_000 }] {
        let setup = setup.with_network(net);
        let scenario =
            Scenario::new(2).coop(coop).require(|requirements| requirements.contexts = contexts).all(|rank| {
                let (mut program, peer) = (Vec::new(), 1 - rank);
                let all = Op::new(Code::Barrier).context(2);
                for round in 0..3u64 {
                    let seed = |rank: u32| 10 * round + u64::from(rank);
                    program.push(Op::fill(0, 0, 400, seed(rank)));
                    let puts = (0..contexts).map(|context| (context, 100 * u64::from(context)));
                    program.extend(
                        puts.map(|(context, place)| Op::put(peer, 100).from(0, place).to(1, place).context(context)),
                    );
                    program.extend([all.fence(5), Op::check(1, 0, 400, seed(peer))]);
                    let gets = (0..contexts).map(|context| (context, 100 * u64::from(context)));
                    program.extend(gets.map(|(context, place)| {
                        Op::get(peer, 100).from(0, place).to(1, 1000 + place).context(context)
                    }));
                    program.extend([all.fence(6), Op::check(1, 1000, 400, seed(peer)), all.fence(7)]);
                }
                program
            });
        run_ok(&setup, &scenario)?;
    }
    Ok(())
}

fn split(setup: &Setup) -> Verdict {
    for coop in [CoopKind::Thread, CoopKind::Warp, CoopKind::Block] {
        let scenario = Scenario::new(3).coop(coop).all(|rank| {
            (0..4)
                .flat_map(|round| {
                    [
                        Op::put_value((rank + 1) % 3, 8, round + 1).to(1, 8 * round),
                        Op { fence: 1, source_offset: 300, ..Op::new(Code::BarrierSplit) },
                    ]
                })
                .collect()
        });
        let outcome = run_ok(setup, &scenario)?;
        for rank in 0..3 {
            super::expect_bytes(&outcome, rank, 1, 0, (1..5u64).flat_map(u64::to_le_bytes))?;
        }
    }
    Ok(())
}

/// Each block uses its own barrier, in its own order.
fn several(setup: &Setup) -> Verdict {
    let blocks = 3;
    let mut scenario = Scenario::new(2)
        .coop(CoopKind::Warp)
        .require(|requirements| requirements.world_barriers = blocks)
        .shape(blocks, 32);
    for rank in 0..2 {
        for block in 0..blocks {
            let one = Op { value: u64::from(block), ..Op::barrier() };
            let program = (0..5).flat_map(|round| [Op::pause(u64::from(block * 90 + rank * 40) + round), one]);
            scenario = scenario.on_group(rank, block, program.collect());
        }
    }
    run_ok(setup, &scenario).map(|_| ())
}

fn outside(setup: &Setup) -> Verdict {
    let mut scenario = Scenario::new(4);
    scenario.lsa_size = Some(2);
    let scenario = scenario.on(
        1,
        vec![
            Op::raise(4, 0),
            Op::raise(2, 0).team(1),
            Op::raise(2, 0).team(2),
            Op::put(u32::MAX, 8),
            Op::get(9, 8).team(1),
            Op::raise(1, 0).team(2),
        ],
    );
    let outcome = setup.run(&scenario)?;
    for index in 0..5 {
        outcome.check_fault(&scenario, 1, 0, index, FaultKind::UnknownRank)?;
    }
    outcome.check_value(&scenario, 1, 0, 5, 0)
}

fn alone(setup: &Setup) -> Verdict {
    let scenario = Scenario::new(1).all(|_| {
        let mut program = Vec::new();
        for team in 0..3 {
            for fence in 0..8 {
                program.push(Op { team, fence, ..Op::new(Code::Barrier) });
            }
        }
        program
    });
    run_ok(setup, &scenario).map(|_| ())
}

fn broken(setup: &Setup) -> Verdict {
    for coop in [CoopKind::Thread, CoopKind::Lanes, CoopKind::Span, CoopKind::Block] {
        let barrier = Op::barrier();
        let scenario = Scenario::new(2)
            .coop(coop)
            .on(0, vec![barrier.deadline_us(20), barrier, barrier.deadline_us(20), Op::raise(1, 0)])
            .on(1, vec![Op::wait_signal(0, 1)]);
        let outcome = setup.run(&scenario)?;
        outcome.check_agreement(&scenario)?;
        outcome.check_fault(&scenario, 0, 0, 0, FaultKind::Timeout)?;
        outcome.check_fault(&scenario, 0, 0, 1, FaultKind::BarrierBroken)?;
        outcome.check_fault(&scenario, 0, 0, 2, FaultKind::BarrierBroken)?;
        // The communicator stays usable.
        outcome.check_value(&scenario, 0, 0, 3, 0)?;
        outcome.check_value(&scenario, 1, 0, 0, 0)?;
    }
    Ok(())
}

fn loads(setup: &Setup) -> Verdict {
    let mut scenario = Scenario::new(4);
    scenario.lsa_size = Some(2);
    let load = |peer, team| Op { peer, team, window: 0, offset: 16, ..Op::new(Code::LoadPeer) };
    let scenario = scenario.all(|rank| {
        vec![
            Op::fill(0, 0, 64, u64::from(rank)),
            Op::barrier(),
            load(0, 1),
            load(1, 1),
            load((rank + 2) % 4, 0),
            Op::barrier(),
        ]
    });
    let outcome = setup.run(&scenario)?;
    for rank in 0..4 {
        for (index, peer) in [(2, rank & 2), (3, rank & 2 | 1)] {
            let bytes: Vec<u8> = super::pattern(u64::from(peer), 24).skip(16).collect();
            let mut word = [0; 8];
            word.copy_from_slice(&bytes);
            outcome.check_value(&scenario, rank, 0, index, u64::from_le_bytes(word))?;
        }
        outcome.check_fault(&scenario, rank, 0, 4, FaultKind::NotReachable)?;
    }
    Ok(())
}
