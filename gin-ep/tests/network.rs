// SPDX-License-Identifier: MIT OR Apache-2.0
//! Dispatch and combine among ranks that loads and stores do not all reach, against the oracle, bit for bit.

#[expect(dead_code, reason = "other tests use the rest")]
mod support;

use gin_abi::Deadline;
use gin_ep::{
    Code, Combine, Element, EpError, Group, GroupConfig, GroupedMatmul, Ids, Layout, Matmul, MatmulConfig,
    OverlappedMatmul, Permuted, Rows, Scales, Tokens,
};
use gin_ep_oracle::{Batch, Experts, Routing, Shape, batch, per_rank};
use gin_gpu::{Memory, MemoryKind};
use gin_host::comm::{Communicator, ConnectionType, Requirements};
use gin_host::world::{Rank, SoftNics, WorldConfig, launch};
use gin_net::peer::PeerNetwork;
use gin_soft_nic::Options;
use gin_testkit::{FailOnDemand, FailSwitch, Failure, Reorder, WeakOnly, Withhold};
use support::{Input, Pair, experts, pairs};

/// The networks, each with a name.
fn networks(ranks: u32, seed: u64) -> [(&'static str, WorldConfig); 3] {
    let world = || WorldConfig::seeded(ranks, seed);
    [
        ("proxy", world()),
        (
            "a network that delays and reorders what it may",
            world().network(|endpoint| {
                Box::new(Reorder::new(Withhold::new(PeerNetwork::new(endpoint), endpoint.rank), endpoint))
            }),
        ),
        ("NICs", world().soft_nics(&SoftNics::new(Options { delay: 3, seed, ..Options::default() }))),
    ]
}

/// Runs `test` on all ranks of jobs with LSA teams of all sizes over all networks.
fn on_networks(
    ranks: u32,
    seed: u64,
    sizes: &[u32],
    test: impl Fn(&Rank, &Communicator) -> Result<(), EpError> + Sync,
) {
    for &size in sizes {
        for (name, world) in networks(ranks, seed) {
            on(name, world.lsa_size(size), &test);
        }
    }
}

fn on(name: &str, world: WorldConfig, test: impl Fn(&Rank, &Communicator) -> Result<(), EpError> + Sync) {
    let (ranks, size) = (world.ranks, world.comm.lsa_size);
    let outcome = launch(world, |rank| -> Result<(), EpError> {
        let comm = rank.communicator(&Requirements::default())?;
        test(&rank, &comm)?;
        assert_eq!(comm.fault(), None);
        Ok(comm.destroy()?)
    });
    outcome.unwrap_or_else(|error| panic!("{name}, {ranks} ranks in teams of {size:?}: {error}"));
}

/// Returns the configuration for a shape.
fn config(shape: &Shape, tokens: u32) -> GroupConfig {
    let config = GroupConfig::new(shape.experts as u32, shape.hidden as u32, shape.topk as u32);
    // A network may be slow in the world's time.
    config.tokens(tokens).sms(2).threads(64).deadline(Deadline::after_ms(10_000))
}

const COUNTS: &[usize] = &[23, 0, 1, 24];

fn pair(routing: Routing) -> Pair {
    Pair { routing, counts: COUNTS, alternative: false }
}

#[test]
fn rows_reach_ranks_over_the_network_with_the_bits_of_the_oracle() {
    for (ranks, experts, topk, hidden, sizes) in
        [(2, 8, 2, 8, &[1][..]), (4, 257, 4, 24, &[1, 2, 4]), (6, 60, 8, 8, &[1, 2, 3])]
    {
        let shape = Shape { ranks, experts, topk, hidden };
        let list = [
            pair(Routing::Uniform),
            Pair { routing: Routing::Holes, counts: &[24], alternative: true },
            pair(Routing::Zipf),
            pair(Routing::None),
            pair(Routing::One(experts as u32 - 1)),
            Pair { routing: Routing::Local, counts: COUNTS, alternative: true },
            pair(Routing::Repeats),
        ];
        on_networks(ranks as u32, 11, sizes, |rank, comm| {
            pairs(rank, comm, &config(&shape, 24), &shape, 24, &list)?;
            pairs(rank, comm, &config(&shape, 24).combine_f32(), &shape, 24, &list)
        });
    }
}

#[test]
fn rows_for_each_id_and_all_elements_and_layouts_cross_a_network() {
    let shape = Shape { ranks: 4, experts: 7, topk: 5, hidden: 48 };
    on_networks(4, 9, &[1, 2], |rank, comm| support::combine_at_source(rank, comm, &config(&shape, 12), &shape, 12));
    for layout in [Layout::Flat, Layout::ExpertMajorPacked { align: 8 }, Layout::ExpertMajorFixed] {
        on_networks(4, 8, &[2], |rank, comm| {
            support::layouts::layout(rank, comm, &config(&shape, 12), layout, &shape, 12)
        });
    }
    let shape = Shape { hidden: 128, topk: 3, ..shape };
    for element in [
        Element::F16,
        Element::F32,
        Element::E4m3(Scales::F32),
        Element::E4m3(Scales::Ue8m0),
        Element::Opaque { row_bytes: 48, scale_bytes: 7 },
    ] {
        on_networks(4, 4, &[1, 2], |rank, comm| support::element(rank, comm, &config(&shape, 9), element, &shape, 9));
    }
}

#[test]
fn free_running_pairs_graphs_and_epochs_that_wrap_cross_a_network() {
    let shape = Shape { ranks: 4, experts: 9, topk: 3, hidden: 8 };
    on_networks(4, 3, &[1, 2], |rank, comm| {
        support::free_running(rank, comm, &config(&shape, 5).threads(32), &shape, 5, 200)
    });
    let shape = Shape { ranks: 2, ..shape };
    for first in [(1 << 16) - 3, (1 << 31) - 3, (1 << 32) - 3, (1 << 63) - 3, u64::MAX - 2] {
        let config = config(&shape, 4).threads(32).first_epoch(first);
        on_networks(2, 5, &[1], |rank, comm| support::free_running(rank, comm, &config, &shape, 4, 8));
        on_networks(2, 6, &[1], |rank, comm| support::replays(rank, comm, &config, &shape, 4, 8));
        on_networks(2, 7, &[1], |rank, comm| support::graphs::in_any_order(rank, comm, &config, &shape, 4, 4));
    }
}

#[test]
fn graphs_replay_in_any_order_over_a_network() {
    let shape = Shape { ranks: 4, experts: 9, topk: 3, hidden: 8 };
    on_networks(4, 8, &[1, 2], |rank, comm| {
        support::graphs::in_any_order(rank, comm, &config(&shape, 5).threads(32), &shape, 5, 30)
    });
}

#[test]
fn a_rank_that_leaves_a_replay_out_keeps_its_rows_over_a_network() {
    let shape = Shape { ranks: 3, experts: 6, topk: 2, hidden: 8 };
    let (config, deadline) = (config(&shape, 8).threads(32), Deadline::after_ms(200));
    on_networks(3, 8, &[1], |rank, comm| support::graphs::silent(rank, comm, (&config, deadline), &shape, 8));
}

#[test]
fn nothing_races_over_a_network() {
    let shape = Shape { ranks: 4, experts: 9, topk: 3, hidden: 24 };
    for seed in 0..2 {
        for (name, world) in networks(4, seed) {
            // A host that waits would order all that follows.
            on(name, world.races(true).lsa_size(2), |rank, comm| {
                // Every eleventh dispatch has no combine, so nothing but the other buffer keeps its staged rows.
                support::free_running(rank, comm, &config(&shape, 8), &shape, 8, 14)?;
                support::graphs::in_any_order(rank, comm, &config(&shape, 8), &shape, 8, 5)?;
                support::combine_at_source(rank, comm, &config(&shape, 8), &shape, 8)
            });
        }
    }
}

#[test]
fn one_resident_block_of_many_is_enough_over_a_network() {
    let shape = Shape { ranks: 4, experts: 12, topk: 2, hidden: 264 };
    let config = config(&shape, 24).threads(32).grid(5);
    for (name, world) in networks(4, 2) {
        let list = [pair(Routing::Uniform), pair(Routing::Repeats)];
        on(name, world.lsa_size(2).resident_blocks(1), |rank, comm| pairs(rank, comm, &config, &shape, 24, &list));
    }
}

#[test]
fn two_slots_cross_a_network_in_contexts_of_their_own() {
    let shape = Shape { ranks: 2, experts: 4, topk: 2, hidden: 8 };
    for (name, world) in networks(2, 5) {
        let outcome = launch(world.lsa_size(1), |rank| -> Result<(), EpError> {
            let me = rank.rank() as usize;
            let comm = rank.communicator(&Requirements::default().contexts(2))?;
            let group = Group::new(&comm, &config(&shape, 6).threads(32).slots(3))?;
            let streams = [rank.stream()?, rank.stream()?, rank.stream()?];
            let inputs = (0..3).map(|_| Input::new(&rank, &shape, 6)).collect::<Result<Vec<_>, _>>()?;
            let mut slots = (0..3).map(|slot| group.slot(slot)).collect::<Result<Vec<_>, _>>()?;
            for number in 0..6u64 {
                let make = |slot: usize| batch(&shape, Routing::Uniform, 3 * number + slot as u64, me, 6);
                let batches: Vec<Batch> = (0..3).map(make).collect();
                let mut received = Vec::new();
                for (((slot, stream), input), mine) in slots.iter_mut().zip(&streams).zip(&inputs).zip(&batches) {
                    input.write(mine, false)?;
                    received.push(slot.exchange(stream, &input.tokens(6, false))?);
                }
                for ((received, stream), input) in received.into_iter().zip(&streams).zip(&inputs).rev() {
                    experts(&rank, stream, &shape, &received)?;
                    received.combine(stream, Rows::InPlace, &Combine::reduced().into(&input.output))?;
                }
                for ((stream, input), mine) in streams.iter().zip(&inputs).zip(&batches) {
                    stream.synchronize()?;
                    let expected = per_rank(&shape, mine, &[], Experts);
                    input.compare(&expected, format_args!("pair {number}"))?;
                }
            }
            assert_eq!(group.status()?, None);
            drop(slots);
            group.destroy()?;
            Ok(comm.destroy()?)
        });
        outcome.unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

#[test]
fn a_dispatch_makes_two_puts_for_each_remote_rank_and_a_combine_one_in_the_context_of_its_slot() {
    let shape = Shape { ranks: 4, experts: 8, topk: 3, hidden: 24 };
    let make = |rank: usize| batch(&shape, Routing::Uniform, 1, rank, 9);
    for way in ["in place", "stored", "for each id"] {
        let outcome = launch(WorldConfig::seeded(4, 5).lsa_size(2), |rank| -> Result<(), EpError> {
            let me = rank.rank() as usize;
            let comm = rank.communicator(&Requirements::default().contexts(2))?;
            let config = config(&shape, 9).slots(3);
            let group = Group::new(&comm, &if way == "for each id" { config.combine_at_source() } else { config })?;
            let (input, stream) = (Input::new(&rank, &shape, 9)?, rank.stream()?);
            input.write(&make(me), false)?;
            let all: Vec<Batch> = (0..4).map(make).collect();
            let received_by = |to: usize, from: usize| gin_ep_oracle::rank_major(&shape, &all, to).swap_remove(from);
            let (row, meta) = (48, u64::from(group.sizes().meta_bytes));
            let each = Memory::new(rank.device(), MemoryKind::Device, 4 * 9 * 3 * row)?.whole();
            // The puts of a combine to a rank, and the rows in them.
            let returned = |to: usize| -> [u64; 2] {
                let rows = received_by(me, to);
                if way != "for each id" {
                    return [1, rows.len() as u64];
                }
                // Runs of ids of this rank, among 32 ids of received rows at a time, and one more that raises the flag.
                let goes: Vec<bool> =
                    rows.iter().flat_map(|row| row.experts.iter().map(|&expert| expert >= 0)).collect();
                let begins = |at: &usize| goes[*at] && (at.is_multiple_of(32) || !goes[at - 1]);
                let runs = (0..goes.len()).filter(begins).count() as u64;
                [runs + 1, goes.iter().filter(|&&goes| goes).count() as u64]
            };
            let mut before = Vec::new();
            // Slots take contexts 0, 1, 0.
            for number in 0..3u32 {
                let mut slot = group.slot(number)?;
                let received = slot.exchange(&stream, &input.tokens(9, false))?;
                let stored = support::copied(&rank, &stream, &received, &shape, 9)?;
                let (rows, terms) = match way {
                    "in place" => (Rows::InPlace, Combine::reduced()),
                    "stored" => (Rows::At(&stored), Combine::reduced()),
                    _ => (Rows::At(&each), Combine::plain()),
                };
                received.combine(&stream, rows, &terms.into(&input.output))?;
                stream.synchronize()?;
                rank.barrier()?;
                let figures: Vec<((u32, u32), [u64; 3])> = comm
                    .peer_stats()?
                    .into_iter()
                    .map(|row| ((row.context, row.peer), [row.stats.puts, row.stats.put_bytes, row.stats.signals]))
                    .collect();
                for peer in (0..4).filter(|peer| peer / 2 != rank.rank() / 2) {
                    for context in 0..2 {
                        let of = |all: &[((u32, u32), [u64; 3])]| {
                            all.iter().find(|row| row.0 == (context, peer)).map_or([0; 3], |row| row.1)
                        };
                        let (now, old) = (of(&figures), of(&before));
                        let (sent, [puts, back]) =
                            (received_by(peer as usize, me).len() as u64, returned(peer as usize));
                        let expected = if context == number % 2 {
                            [2 + puts, sent * (row + meta) + back * row, 2]
                        } else {
                            [0; 3]
                        };
                        let more = [0, 1, 2].map(|index| now[index] - old[index]);
                        assert_eq!(more, expected, "slot {number} of rank {me}, context {context}, to {peer}");
                    }
                }
                before = figures;
            }
            assert_eq!(group.status()?, None);
            group.destroy()?;
            Ok(comm.destroy()?)
        });
        outcome.unwrap_or_else(|error| panic!("rows back {way}: {error}"));
    }
}

#[test]
fn a_group_takes_the_memory_that_was_promised_also_over_a_network() {
    let config = GroupConfig::new(256, 7168, 8).tokens(128);
    assert_eq!(config.network_footprint(4, 4).unwrap(), config.footprint(4).unwrap());
    for (near, megabytes) in [(1, 45.9), (2, 40.4)] {
        let bytes = config.network_footprint(4, near).unwrap() as f64;
        assert!((bytes / 1e6 / megabytes - 1.0).abs() < 0.02, "{bytes} in teams of {near}");
    }
    let config = GroupConfig::new(6, 128, 3).tokens(7).sms(1).threads(32);
    for (size, config) in [(1, config), (2, config.slots(3)), (2, config.combine_at_source()), (1, config.tokens(600))]
    {
        on("proxy", WorldConfig::seeded(4, 5).lsa_size(size), |rank, comm| {
            let (group, stream) = (Group::new(comm, &config)?, rank.stream()?);
            let memory = Memory::new(rank.device(), MemoryKind::Device, 16)?.whole();
            let mut slot = group.slot(0)?;
            let received = slot.exchange(&stream, &Tokens::new(&memory, Ids::I32(&memory), 0))?;
            // All slots, without signals, and without the plan of a group that counts before its dispatches.
            let (bytes, sizes) = (received.offsets().0.bytes(), group.sizes());
            let bytes = bytes + if sizes.tokens > 512 { sizes.plan_bytes() } else { 0 };
            let (promised, signals) = (config.network_footprint(4, size)?, 3 * 4 * 288);
            assert!(bytes < promised && promised <= bytes + signals, "{bytes} of {promised} bytes, {config:?}");
            received.release();
            stream.synchronize()?;
            drop(slot);
            group.destroy()
        });
    }
    let config = GroupConfig::new(256, 7168, 8).tokens(128);
    let error = config.network_footprint(4, 5).unwrap_err().to_string();
    assert_eq!(error, "the number of ranks of an LSA team is 5; the limit is from 1 to 4, the number of ranks");
}

#[test]
fn a_group_refuses_what_has_no_route_over_a_network() {
    let shape = Shape { ranks: 2, experts: 2, topk: 1, hidden: 8 };
    let outcome = launch(WorldConfig::seeded(2, 1).lsa_size(1), |rank| -> Result<(), EpError> {
        let comm = rank.communicator(&Requirements::default())?;
        let config = GroupConfig::new(2, 8, 1).tokens(4);
        let error = Group::new(&comm, &config.threads(512)).map(drop).unwrap_err().to_string();
        assert!(error.contains("at most 256 if loads and stores do not reach all ranks"), "{error}");
        let group = Group::new(&comm, &config.combine_at_source())?;
        let error = GroupedMatmul::new(&group, 8, None).map(drop).unwrap_err().to_string();
        assert!(error.contains("ranks that loads and stores do not reach"), "{error}");
        let error = OverlappedMatmul::new(&group, None).map(drop).unwrap_err().to_string();
        assert!(error.contains("ranks that loads and stores do not reach"), "{error}");
        let error = Matmul::all_gather(&comm, &MatmulConfig::new(8, 8, 8)).map(drop).unwrap_err();
        assert!(matches!(error, EpError::NotReachable { reached: 1, ranks: 2 }), "{error}");
        let (to, input) = (Permuted::new(&group, Layout::ExpertMajorPadded, 0)?, Input::new(&rank, &shape, 4)?);
        let mut slot = group.slot(0)?;
        let error =
            slot.exchange_into(&rank.stream()?, &input.tokens(4, false), &to).map(drop).unwrap_err().to_string();
        assert!(error.contains("an exchange into a layout") && error.contains("call `exchange`"), "{error}");
        let sums = Combine::plain().into(&input.output);
        let fused = slot.fuse(&rank.stream()?, &input.tokens(4, false), Rows::At(&input.rows), &sums);
        let error = fused.map(drop).unwrap_err().to_string();
        assert!(error.contains("ranks that loads and stores do not reach"), "{error}");
        drop(slot);
        group.destroy()?;
        Ok(comm.destroy()?)
    });
    outcome.unwrap();
    let weak = WorldConfig::seeded(2, 1).lsa_size(1);
    let weak = weak.network(|endpoint| Box::new(WeakOnly::new(PeerNetwork::new(endpoint), false, true)));
    let outcome = launch(weak, |rank| -> Result<(), EpError> {
        let comm = rank.communicator(&Requirements::default())?;
        let error = Group::new(&comm, &GroupConfig::new(2, 8, 1)).map(drop).unwrap_err().to_string();
        assert!(error.contains("a network without strong signals"), "{error}");
        Ok(comm.destroy()?)
    });
    outcome.unwrap();
}

#[test]
fn a_put_that_the_network_does_not_carry_out_ends_as_a_report() {
    let shape = Shape { ranks: 2, experts: 4, topk: 2, hidden: 8 };
    for failure in [Failure::Status(5), Failure::PeerLost, Failure::Silence] {
        // Puts of a dispatch and of a combine, of both ranks.
        for before in 0..6 {
            let switch = FailSwitch::new();
            let network = switch.clone();
            let world = WorldConfig::seeded(2, before)
                .lsa_size(1)
                .network(move |endpoint| Box::new(FailOnDemand::new(PeerNetwork::new(endpoint), network.clone())));
            let outcome = launch(world, |rank| -> Result<(), EpError> {
                let comm = rank.communicator(&Requirements::default())?;
                let limit = Deadline::after_ms(20);
                let group = Group::new(&comm, &config(&shape, 6).threads(32).deadline(limit))?;
                let input = Input::new(&rank, &shape, 6)?;
                input.write(&batch(&shape, Routing::Uniform, 1, rank.rank() as usize, 6), false)?;
                let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
                rank.barrier()?;
                if failure == Failure::Silence {
                    switch.fail_peer(1, failure);
                } else {
                    switch.fail_after(before, failure);
                }
                rank.barrier()?;
                let mut reports = Vec::new();
                for _ in 0..3 {
                    let received = slot.exchange(&stream, &input.tokens(6, false))?;
                    experts(&rank, &stream, &shape, &received)?;
                    received.combine(&stream, Rows::InPlace, &Combine::reduced().into(&input.output))?;
                    stream.synchronize()?;
                    reports.extend(group.status()?.map(|report| report.code));
                }
                match failure {
                    // Rank 1 hears nothing, gives the other up, and is given up.
                    Failure::Silence => {
                        assert_eq!((&*reports, group.masked(0)?), (&[Code::Silent][..], 1 << (1 - rank.rank())));
                        // A rank that leaves would end the other's wait.
                        rank.barrier()?;
                    }
                    _ => {
                        assert!(reports.contains(&Code::Stopped), "{reports:?}");
                        assert!(comm.fault().is_some());
                    }
                }
                Ok(())
            });
            outcome.unwrap_or_else(|error| panic!("{failure:?} after {before}: {error}"));
        }
    }
}

#[test]
fn rows_that_cannot_be_posted_are_reported_and_the_group_goes_on_without_their_rank() {
    let shape = Shape { ranks: 4, experts: 4, topk: 4, hidden: 8 };
    // Queue pairs reach ranks with the same place in their teams only.
    let nics = SoftNics::new(Options::default());
    let outcome = launch(WorldConfig::seeded(4, 3).lsa_size(2).soft_nics(&nics), |rank| -> Result<(), EpError> {
        let me = rank.rank();
        let comm = rank.communicator(&Requirements::default().connections(ConnectionType::Rail))?;
        let group = Group::new(&comm, &config(&shape, 4).threads(32).deadline(Deadline::after_ms(20)))?;
        let input = Input::new(&rank, &shape, 4)?;
        let mine = batch(&shape, Routing::Uniform, 1, me as usize, 4);
        input.write(&mine, false)?;
        let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
        // The rank that is neither in this rank's team nor on its rail.
        let other = 3 - me;
        for number in 0..3 {
            let received = slot.exchange(&stream, &input.tokens(4, false))?;
            experts(&rank, &stream, &shape, &received)?;
            received.combine(&stream, Rows::InPlace, &Combine::reduced().into(&input.output))?;
            stream.synchronize()?;
            let report = group.status()?.map(|report| (report.code, report.rank));
            assert_eq!(report, (number == 0).then_some((Code::Unsent, other)));
            assert_eq!(group.masked(0)?, 1 << other);
            let expected = per_rank(&shape, &mine, &[other as usize], Experts);
            input.compare(&expected, format_args!("pair {number}"))?;
        }
        drop(slot);
        group.destroy()?;
        Ok(comm.destroy()?)
    });
    outcome.unwrap();
}
