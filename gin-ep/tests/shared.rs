// SPDX-License-Identifier: MIT OR Apache-2.0
//! Groups with `max_rows`, whose sources share a region of a receiver, against the oracle, bit for bit.

#[expect(dead_code, reason = "other tests use the rest")]
mod support;

use gin_abi::Deadline;
use gin_ep::{Code, Element, EpError, Group, GroupConfig, GroupedMatmul, Layout, OverlappedMatmul, Rows, Scales};
use gin_ep_oracle::{Kind, Routing, Shape};
use gin_host::comm::{Communicator, Requirements};
use gin_host::world::{Rank, WorldConfig, launch};
use gin_testkit::rotation;
use support::{Pair, pairs, shared};

/// Runs `test` on all ranks of a world.
fn on_ranks(world: WorldConfig, test: impl Fn(&Rank, &Communicator) -> Result<(), EpError> + Sync) {
    let outcome = launch(world, |rank| -> Result<(), EpError> {
        let comm = rank.communicator(&Requirements::default())?;
        test(&rank, &comm)?;
        Ok(comm.destroy()?)
    });
    outcome.unwrap();
}

/// Returns the configuration for a shape. All rows have places.
fn config(shape: &Shape, tokens: u32) -> GroupConfig {
    let config = GroupConfig::new(shape.experts as u32, shape.hidden as u32, shape.topk as u32);
    config.tokens(tokens).sms(2).threads(64).max_rows(shape.ranks as u32 * tokens)
}

fn pair(routing: Routing) -> Pair {
    Pair { routing, counts: &[37, 0, 1, 64], alternative: false }
}

#[test]
fn all_routings_give_the_bits_of_the_oracle_with_all_numbers_of_ranks() {
    let sizes =
        [(1, 8, 2, 8), (2, 60, 8, 1000), (3, 257, 4, 16), (4, 8, 3, 8), (5, 8, 1, 24), (6, 7, 2, 8), (7, 60, 32, 8)];
    for (ranks, experts, topk, hidden) in rotation(0, sizes.into_iter().chain([(8, 257, 8, 8), (40, 60, 4, 8)])) {
        let shape = Shape { ranks, experts, topk, hidden };
        let list = [
            pair(Routing::Uniform),
            Pair { routing: Routing::Holes, counts: &[64], alternative: true },
            pair(Routing::Zipf),
            pair(Routing::None),
            pair(Routing::One(experts as u32 - 1)),
            Pair { alternative: true, ..pair(Routing::Local) },
            pair(Routing::Repeats),
        ];
        // Many ranks take long.
        let list = if ranks > 8 { &list[..2] } else { &list[..] };
        let world = WorldConfig::seeded(ranks as u32, 11);
        on_ranks(world, |rank, comm| pairs(rank, comm, &config(&shape, 64), &shape, 64, list));
    }
}

#[test]
fn tokens_whose_routing_does_not_fit_into_shared_memory_find_their_places() {
    const COUNTS: [usize; 48] = {
        let mut counts = [0; 48];
        (counts[0], counts[47]) = (4200, 3);
        counts
    };
    let shape = Shape { ranks: 48, experts: 60, topk: 2, hidden: 8 };
    let config = config(&shape, 4200).sms(1).threads(512).max_rows(4300);
    let list = [Pair { routing: Routing::Uniform, counts: &COUNTS, alternative: false }];
    on_ranks(WorldConfig::seeded(48, 2), |rank, comm| pairs(rank, comm, &config, &shape, 4200, &list));
}

#[test]
fn rows_without_places_are_left_out_and_reported_and_the_next_call_works() {
    for (ranks, experts, topk) in [(1, 3, 2), (2, 8, 3), (3, 7, 4), (5, 8, 2), (7, 60, 8), (8, 9, 2)] {
        let shape = Shape { ranks, experts, topk, hidden: 8 };
        on_ranks(WorldConfig::seeded(ranks as u32, 3), |rank, comm| {
            shared::limits(rank, comm, &config(&shape, 24), &shape, 24)
        });
    }
}

#[test]
fn free_running_pairs_graphs_and_epochs_that_wrap_give_the_bits_of_the_oracle() {
    let shape = Shape { ranks: 3, experts: 6, topk: 2, hidden: 8 };
    let config = config(&shape, 4).threads(32);
    for first in [0, (1 << 16) - 3, (1 << 32) - 3, (1 << 63) - 3, u64::MAX - 2] {
        let (config, number) = (config.first_epoch(first), if first == 0 { 500 } else { 8 });
        on_ranks(WorldConfig::seeded(3, 5), |rank, comm| support::free_running(rank, comm, &config, &shape, 4, number));
        on_ranks(WorldConfig::seeded(3, 6), |rank, comm| support::replays(rank, comm, &config, &shape, 4, number / 2));
        on_ranks(WorldConfig::seeded(3, 7), |rank, comm| {
            support::graphs::in_any_order(rank, comm, &config, &shape, 4, number / 10 + 2)
        });
    }
}

#[test]
fn all_elements_go_there_and_back_with_their_scales() {
    for element in [
        Element::F16,
        Element::F32,
        Element::E4m3(Scales::F32),
        Element::E4m3(Scales::F32Powers),
        Element::E4m3(Scales::Ue8m0),
        Element::Opaque { row_bytes: 80, scale_bytes: 7 },
        Element::Opaque { row_bytes: 2064, scale_bytes: 0 },
    ] {
        for (ranks, hidden) in [(2, 128), (3, 1152)] {
            let shape = Shape { ranks, experts: 8, topk: 3, hidden };
            on_ranks(WorldConfig::seeded(ranks as u32, 4), |rank, comm| {
                support::element(rank, comm, &config(&shape, 9), element, &shape, 9)
            });
        }
    }
}

#[test]
fn a_flat_layout_has_the_received_rows() {
    for (ranks, experts, topk) in [(1, 3, 2), (3, 7, 4), (4, 3, 3)] {
        let shape = Shape { ranks, experts, topk, hidden: 24 };
        let config = config(&shape, 40).threads(32);
        on_ranks(WorldConfig::seeded(ranks as u32, 8), |rank, comm| {
            support::layouts::layout(rank, comm, &config, Layout::Flat, &shape, 40)
        });
    }
}

#[test]
fn rows_of_experts_are_added_up_on_their_rank() {
    for (ranks, experts, topk) in rotation(0, [(1, 3, 2), (3, 7, 4), (4, 3, 3), (2, 8, 32)]) {
        let shape = Shape { ranks, experts, topk, hidden: 1032 };
        let shared = config(&shape, 10).threads(32);
        let by_source = GroupConfig::new(experts as u32, 1032, topk as u32).tokens(10).sms(3).threads(32);
        on_ranks(WorldConfig::seeded(ranks as u32, 8), |rank, comm| {
            shared::layouts(rank, comm, &shared, &shape, 10)?;
            shared::layouts(rank, comm, &shared.combine_f32(), &shape, 10)?;
            shared::layouts(rank, comm, &by_source, &shape, 10)
        });
    }
    let shape = Shape { ranks: 2, experts: 7, topk: 3, hidden: 1032 };
    for element in [(Element::F16, Kind::F16), (Element::F32, Kind::F32)] {
        on_ranks(WorldConfig::seeded(2, 8), |rank, comm| {
            shared::elements(rank, comm, &config(&shape, 9), element, &shape, 9)
        });
    }
}

#[test]
fn nothing_races() {
    let shape = Shape { ranks: 3, experts: 9, topk: 3, hidden: 24 };
    for seed in 0..3 {
        let world = WorldConfig::seeded(3, seed).races(true);
        on_ranks(world.clone(), |rank, comm| support::free_running(rank, comm, &config(&shape, 16), &shape, 16, 10));
        on_ranks(world.clone(), |rank, comm| {
            pairs(rank, comm, &config(&shape, 16), &shape, 16, &[pair(Routing::Uniform), pair(Routing::Zipf)])
        });
        // With so much room another kernel reserves places.
        on_ranks(world, |rank, comm| support::free_running(rank, comm, &config(&shape, 2049), &shape, 16, 3));
    }
}

/// Rank 2 goes on without rank 1, rank 0 does not. So only rank 0's grant orders the rows that rank 2 stores next after
/// the loads of rank 1, which had its rows in the same places.
#[test]
fn a_grant_covers_the_loads_of_a_rank_that_the_source_does_not_hear() {
    const DEADLINE_NS: u64 = 500_000;
    let config = GroupConfig::new(3, 8, 1).tokens(4).sms(1).threads(32).max_rows(12);
    let config = config.deadline(Deadline::after_ns(DEADLINE_NS));
    let shape = Shape { ranks: 3, experts: 3, topk: 1, hidden: 8 };
    let silent = |rank: usize| Some((Code::Silent, rank));
    for seed in 0..4 {
        on_ranks(WorldConfig::seeded(3, seed).races(true), |rank, comm| {
            let (me, stream) = (rank.rank() as usize, rank.stream()?);
            let (group, input) = (Group::new(comm, &config)?, support::Input::new(rank, &shape, 4)?);
            // All tokens go to rank 0.
            input.ids.write(0, &[0i32; 4])?;
            let sums = gin_ep::Combine::reduced().into(&input.output);
            let mut slot = group.slot(0)?;
            let received = slot.exchange(&stream, &input.tokens([0, 4, 0][me], false))?;
            stream.synchronize()?;
            rank.barrier()?;
            let start = gin_boot::rt::clock_ns();
            let pause = |tenths: u64| {
                gin_boot::rt::wait_until(move || gin_boot::rt::clock_ns() - start > DEADLINE_NS / 10 * tenths);
            };
            // A combine waits for three deadlines: rank 2 until 30, rank 0 until 45.
            pause([15, 35, 0][me]);
            received.combine(&stream, Rows::InPlace, &sums)?;
            // The detector takes a grid that has ended as known to all that is launched later, so the others launch
            // both calls before. When rank 1 raises its next flag, rank 2 no longer looks.
            if me == 1 {
                stream.synchronize()?;
                pause(40);
            }
            slot.exchange(&stream, &input.tokens([0, 0, 4][me], false))?.release();
            stream.synchronize()?;
            assert_eq!(support::state(&group)?, [(None, 0), (silent(2), 1 << 2), (silent(1), 1 << 1)][me], "rank {me}");
            drop(slot);
            group.destroy()
        });
    }
}

#[test]
fn one_resident_block_of_many_is_enough() {
    let shape = Shape { ranks: 3, experts: 12, topk: 2, hidden: 600 };
    let config = config(&shape, 40).threads(32).grid(5);
    for seed in 0..4 {
        let world = WorldConfig::seeded(3, seed).resident_blocks(1);
        on_ranks(world, |rank, comm| {
            pairs(rank, comm, &config, &shape, 40, &[pair(Routing::Uniform), pair(Routing::Repeats)])
        });
    }
}

#[test]
fn a_kernel_that_holds_all_processors_but_one_does_not_stop_progress() {
    let shape = Shape { ranks: 3, experts: 12, topk: 2, hidden: 600 };
    let config = config(&shape, 12).threads(32).grid(5);
    on_ranks(WorldConfig::threads(3).resident_blocks(4), |rank, comm| {
        support::beside_a_kernel(rank, comm, &config, &shape, 12, 4)
    });
}

#[test]
fn the_places_of_a_late_rank_are_kept_until_it_has_its_rows_back() {
    let shape = Shape { ranks: 3, experts: 9, topk: 3, hidden: 16 };
    for seed in 0..4 {
        let config = config(&shape, 16).threads(32).deadline(Deadline::after_ms(20));
        on_ranks(WorldConfig::seeded(3, seed), |rank, comm| shared::late(rank, comm, &config, &shape, 16));
    }
}

#[test]
fn the_places_of_a_rank_that_does_not_come_back_count_as_rows() {
    let config = GroupConfig::new(3, 8, 1).tokens(5).sms(1).threads(32).deadline(Deadline::after_ms(20)).max_rows(12);
    let shape = Shape { ranks: 3, experts: 3, topk: 1, hidden: 8 };
    on_ranks(WorldConfig::seeded(3, 3), |rank, comm| {
        let (me, stream) = (rank.rank(), rank.stream()?);
        let (group, input) = (Group::new(comm, &config)?, support::Input::new(rank, &shape, 5)?);
        // All tokens go to rank 1.
        input.ids.write(0, &[1i32; 5])?;
        let sums = gin_ep::Combine::reduced().into(&input.output);
        let status = || -> Result<_, EpError> {
            Ok(group.status()?.map(|report| (report.code, report.rank, report.seen, report.limit)))
        };
        let mut slot = group.slot(0)?;
        let sent = slot.dispatch(&stream, &input.tokens(4, false))?;
        stream.synchronize()?;
        rank.barrier()?;
        if me == 0 {
            // It comes back when the others have gone on.
            rank.barrier()?;
            sent.receive(&stream)?.combine(&stream, Rows::InPlace, &sums)?;
            stream.synchronize()?;
        } else {
            sent.receive(&stream)?.combine(&stream, Rows::InPlace, &sums)?;
            stream.synchronize()?;
            assert_eq!(status()?.map(|(code, rank, ..)| (code, rank)), Some((Code::Silent, 0)));
            // Ten rows beside the four of rank 0.
            slot.exchange(&stream, &input.tokens(5, false))?.release();
            stream.synchronize()?;
            assert_eq!(status()?.map(|(code, rank, _, limit)| (code, rank, limit)), Some((Code::Full, 1, 12)));
            rank.barrier()?;
        }
        drop(slot);
        group.readmit()?;
        let mut slot = group.slot(0)?;
        slot.exchange(&stream, &input.tokens(if me == 0 { 0 } else { 5 }, false))?.release();
        stream.synchronize()?;
        assert_eq!(status()?, None);
        drop(slot);
        group.destroy()
    });
}

#[test]
fn the_memory_is_at_most_twice_that_of_the_received_rows_and_16_mib() {
    for (ranks, tokens, max_rows) in
        [(1, 128, 128), (2, 128, 256), (8, 4096, 4096), (8, 4096, 32_768), (64, 4096, 1), (8, 65_536, 65_536)]
    {
        for (element, bytes) in [(Element::Bf16, 2), (Element::F32, 4), (Element::E4m3(Scales::Ue8m0), 1)] {
            let config = GroupConfig::new(256, 7168, 8).tokens(tokens).element(element).max_rows(max_rows);
            let (found, rows) = (config.footprint(ranks).unwrap(), u64::from(max_rows) * 7168 * bytes);
            assert!(found <= 2 * rows + (16 << 20), "{element:?}, {ranks} ranks, {max_rows} rows: {found} bytes");
            assert!(found >= rows);
        }
    }
}

#[test]
fn what_a_shared_region_does_not_have_is_refused() {
    let config = GroupConfig::new(8, 8, 2).tokens(16).sms(1).threads(32);
    for (config, words) in [
        (config.max_rows(0), "`max_rows` is 0; the limit is 1 to 32, which is all that 2 ranks with 16 tokens send"),
        (config.max_rows(33), "`max_rows` is 33; the limit is 1 to 32, which is all that 2 ranks with 16 tokens send"),
        (
            config.max_rows(8).combine_at_source(),
            "a group with `max_rows` to which a row for each id comes back: leave out `combine_at_source`, or `max_rows`",
        ),
    ] {
        assert_eq!(config.footprint(2).unwrap_err().to_string(), words);
    }
    let network = "a group with `max_rows` and ranks that loads and stores do not reach: leave `max_rows` out, which \
                   takes memory for each source";
    assert_eq!(config.max_rows(8).network_footprint(2, 1).unwrap_err().to_string(), network);
    assert!(config.max_rows(8).network_footprint(2, 2).is_ok());
    on_ranks(WorldConfig::seeded(2, 1).lsa_size(1), |_, comm| {
        let error = Group::new(comm, &config.max_rows(8)).map(drop).unwrap_err();
        assert_eq!(error.to_string(), network);
        Ok(())
    });
    on_ranks(WorldConfig::seeded(2, 1), |rank, comm| {
        let shape = Shape { ranks: 2, experts: 8, topk: 2, hidden: 8 };
        let group = Group::new(comm, &config.max_rows(8))?;
        let input = support::Input::new(rank, &shape, 16)?;
        let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
        let sums = gin_ep::Combine::reduced().into(&input.output);
        let error = slot.fuse(&stream, &input.tokens(1, false), Rows::InPlace, &sums).map(drop).unwrap_err();
        let words = "a kernel with dispatch and combine in a group with `max_rows`: call `dispatch` and `combine`";
        assert_eq!(error.to_string(), words);
        assert!(GroupedMatmul::new(&group, 8, None).is_err() && OverlappedMatmul::new(&group, None).is_err());
        drop(slot);
        group.destroy()
    });
}

#[test]
fn a_dispatch_begins_when_the_slowest_rank_does() {
    let config = GroupConfig::new(2, 8, 1).tokens(4).sms(1).threads(32).deadline(Deadline::after_ms(10_000));
    for is_shared in [false, true] {
        on_ranks(WorldConfig::seeded(2, 3), |rank, comm| {
            let shape = Shape { ranks: 2, experts: 2, topk: 1, hidden: 8 };
            let group = Group::new(comm, &if is_shared { config.max_rows(8) } else { config })?;
            let (input, stream, mut slot) = (support::Input::new(rank, &shape, 4)?, rank.stream()?, group.slot(0)?);
            input.ids.write(0, &[0, 1, 0, 1])?;
            if rank.rank() == 1 {
                rank.barrier()?;
            }
            let sent = slot.dispatch(&stream, &input.tokens(4, false))?;
            if rank.rank() == 0 {
                let start = gin_boot::rt::clock_ns();
                gin_boot::rt::wait_until(move || gin_boot::rt::clock_ns() - start > 5_000_000);
                assert_eq!(stream.is_idle()?, !is_shared, "a shared region: {is_shared}");
                rank.barrier()?;
            }
            sent.receive(&stream)?.release();
            stream.synchronize()?;
            assert_eq!(group.status()?, None);
            drop(slot);
            group.destroy()
        });
    }
}
