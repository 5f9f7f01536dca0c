// SPDX-License-Identifier: MIT OR Apache-2.0
//! Dispatch and combine against the oracle, bit for bit.

mod support;

use gin_device::prelude::*;
use gin_ep::{
    Code, Combine, Element, EpError, Group, GroupConfig, Ids, Layout, Number, Permuted, Report, Rows, Scales, Tokens,
};
use gin_ep_oracle::{Batch, Experts, Routing, Shape, batch, narrow, per_rank, quantized};
use gin_gpu::{Memory, MemoryKind};
use gin_host::comm::Communicator;
use gin_host::comm::Requirements;
use gin_host::world::{Rank, WorldConfig, WorldMode, launch};
use std::sync::{Arc, Weak};
use support::{Input, Pair, compare, experts, pairs};

/// Runs `test` on all ranks of a world.
fn on_ranks(world: WorldConfig, test: impl Fn(&Rank, &Communicator) -> Result<(), EpError> + Sync) {
    let outcome = launch(world, |rank| -> Result<(), EpError> {
        let comm = rank.communicator(&Requirements::default())?;
        test(&rank, &comm)?;
        Ok(comm.destroy()?)
    });
    outcome.unwrap();
}

/// Runs pairs on all ranks of a world.
fn run(world: WorldConfig, config: GroupConfig, shape: Shape, max: usize, list: &[Pair]) {
    on_ranks(world, |rank, comm| pairs(rank, comm, &config, &shape, max, list));
}

/// Returns the configuration for a shape.
fn config(shape: &Shape, tokens: u32) -> GroupConfig {
    let config = GroupConfig::new(shape.experts as u32, shape.hidden as u32, shape.topk as u32);
    config.tokens(tokens).sms(2).threads(64)
}

const COUNTS: &[usize] = &[37, 0, 1, 64];

fn pair(routing: Routing) -> Pair {
    Pair { routing, counts: COUNTS, alternative: false }
}

#[test]
fn all_routings_give_the_bits_of_the_oracle_with_all_numbers_of_ranks() {
    for (ranks, experts, topk, hidden) in
        [(1, 8, 2, 8), (2, 60, 8, 1000), (3, 257, 4, 16), (5, 8, 1, 24), (7, 60, 32, 8), (8, 257, 8, 8)]
    {
        let shape = Shape { ranks, experts, topk, hidden };
        let config = GroupConfig::new(experts as u32, hidden as u32, topk as u32).tokens(64).sms(2).threads(64);
        let pairs = [
            pair(Routing::Uniform),
            Pair { routing: Routing::Holes, counts: &[64], alternative: true },
            pair(Routing::Zipf),
            pair(Routing::None),
            pair(Routing::One(experts as u32 - 1)),
            Pair { routing: Routing::Local, counts: COUNTS, alternative: true },
            pair(Routing::Repeats),
        ];
        run(WorldConfig::seeded(ranks as u32, 11), config, shape, 64, &pairs);
        run(WorldConfig::seeded(ranks as u32, 12), config.combine_f32(), shape, 64, &pairs);
    }
}

#[test]
fn tokens_counted_in_several_rounds_go_to_the_same_places() {
    for (ranks, topk, threads, groups) in [(1, 8, 64, 1), (2, 5, 96, 2), (33, 12, 64, 3)] {
        let shape = Shape { ranks, experts: 80, topk, hidden: 8 };
        let config = GroupConfig::new(80, 8, topk as u32).tokens(100).sms(2).threads(threads).groups(groups);
        let pairs =
            [pair(Routing::Uniform), Pair { counts: &[100, 0, 33], ..pair(Routing::Holes) }, pair(Routing::Zipf)];
        for config in [config, config.max_rows(100 * ranks as u32)] {
            run(WorldConfig::seeded(ranks as u32, 3), config, shape, 100, &pairs);
        }
    }
}

/// The values of the property tests, each of which some case sends tokens with.
const EXPERTS: [usize; 4] = [1, 8, 60, 257];
const HIDDEN: [usize; 5] = [8, 1000, 1536, 2880, 7168];
const NUMBERS: [usize; 4] = [0, 1, 37, 128];

/// A shape and the numbers of tokens of its ranks.
struct Case {
    shape: Shape,
    max: usize,
    counts: &'static [usize],
}

const fn case(
    (ranks, experts, topk, hidden): (usize, usize, usize, usize),
    max: usize,
    counts: &'static [usize],
) -> Case {
    Case { shape: Shape { ranks, experts, topk, hidden }, max, counts }
}

/// Cases that together have each value. Virtual GPUs take long for long rows, so those have few tokens.
fn table() -> Vec<Case> {
    let mut cases = vec![
        case((1, 257, 32, 1000), 128, &[128]),
        case((2, 60, 8, 7168), 37, &[37, 0]),
        case((3, 8, 2, 2880), 20, &[20, 1, 0]),
        case((4, 257, 7, 1536), 37, &[0, 37, 1, 0]),
        case((5, 1, 1, 7168), 4, &[1, 0, 4, 0, 1]),
        case((6, 60, 22, 8), 200, &[128, 0, 37, 200, 1, 0]),
        case((7, 257, 9, 1000), 37, &[1, 37, 0, 0, 0, 0, 3]),
        case((8, 8, 3, 8), 128, &[128, 0, 1, 37, 128, 0, 5, 37]),
    ];
    cases.extend((1..=32).map(|topk| case((1 + topk % 3, 60, topk, 8), 5, &[5, 1, 3])));
    cases
}

#[test]
fn a_table_with_each_number_of_ranks_experts_ids_elements_and_tokens_gives_the_bits_of_the_oracle() {
    let cases = table();
    // All ids of these routings name an expert, so a rank with tokens sends them.
    let has = |what: &dyn Fn(&Case) -> bool| {
        cases.iter().any(|case| case.counts.iter().any(|&count| count > 0) && what(case))
    };
    assert!((1..=8).all(|ranks| has(&|case| case.shape.ranks == ranks)));
    assert!(EXPERTS.iter().all(|&experts| has(&|case| case.shape.experts == experts)));
    assert!((1..=32).all(|topk| has(&|case| case.shape.topk == topk)));
    assert!(HIDDEN.iter().all(|&hidden| has(&|case| case.shape.hidden == hidden)));
    assert!(NUMBERS.iter().all(|number| has(&|case| case.counts.contains(number))));
    // As many tokens as there is room for, which is no number of the list.
    assert!(has(&|case| !NUMBERS.contains(&case.max) && case.counts.contains(&case.max)));
    for Case { shape, max, counts } in cases {
        assert_eq!(counts.len().min(shape.ranks), shape.ranks, "{shape:?}: each rank has its number");
        let pairs = [
            Pair { routing: Routing::Uniform, counts, alternative: false },
            Pair { routing: Routing::Repeats, counts, alternative: true },
        ];
        run(WorldConfig::seeded(shape.ranks as u32, 7), config(&shape, max as u32), shape, max, &pairs);
    }
}

#[test]
fn the_largest_sizes_give_the_bits_of_the_oracle() {
    const COUNTS: [usize; 64] = {
        let mut counts = [0; 64];
        (counts[0], counts[62]) = (1, 1);
        counts
    };
    // The maximum number of ranks, experts, ids of a token and bytes of a row.
    let shape = Shape { ranks: 64, experts: 65_536, topk: 32, hidden: 32_768 };
    let pairs = [
        Pair { routing: Routing::Uniform, counts: &COUNTS, alternative: false },
        Pair { routing: Routing::One(65_535), counts: &COUNTS, alternative: true },
    ];
    run(WorldConfig::seeded(64, 2), config(&shape, 1).sms(1).threads(32), shape, 1, &pairs);
}

/// The environment variable with the number of random cases.
const CASES_VARIABLE: &str = "GIN_EP_CASES";

#[test]
fn random_shapes_and_routings_give_the_bits_of_the_oracle() {
    // Steele, Lea, Flood 2014.
    let mut state = 1u64;
    let mut next = move |below: usize| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let word = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((word ^ word >> 31) % below as u64) as usize
    };
    let cases = std::env::var(CASES_VARIABLE).map_or(12, |cases| cases.parse().expect("a number of cases"));
    for case in 0..cases {
        let ranks = 1 + next(8);
        let experts = EXPERTS[next(4)];
        let topk = 1 + next(32);
        let hidden = HIDDEN[next(5)];
        let shape = Shape { ranks, experts, topk, hidden };
        // Virtual GPUs take long for long rows, so there are fewer then.
        let max = [600, 128, 37][next(3)].min(2 + 160_000 / hidden / ranks);
        let counts: &[usize] = [&[128, 0, 1, 37][..], &[600], &[0], &[37, 128]][next(4)];
        let config = config(&shape, max as u32).sms(1 + next(3) as u32);
        let is_shared = next(2) == 0;
        let config = if is_shared { config.max_rows((ranks * max) as u32) } else { config };
        let combine_f32 = next(2) == 0;
        let config = if combine_f32 { config.combine_f32() } else { config };
        let routing = [
            Routing::Uniform,
            Routing::Zipf,
            Routing::Holes,
            Routing::None,
            Routing::One(next(experts) as u32),
            Routing::Local,
            Routing::Repeats,
        ];
        let list: Vec<Pair> =
            (0..2).map(|_| Pair { routing: routing[next(routing.len())], counts, alternative: next(2) == 0 }).collect();
        let routings = [list[0].routing, list[1].routing];
        println!(
            "case {case}: {shape:?}, {counts:?} of {max} tokens, {routings:?}, shared: {is_shared}, FP32 back: {combine_f32}"
        );
        run(WorldConfig::seeded(ranks as u32, next(1000) as u64), config, shape, max, &list);
    }
}

#[test]
fn free_running_pairs_give_the_bits_of_the_oracle() {
    let shape = Shape { ranks: 2, experts: 5, topk: 2, hidden: 8 };
    let config = config(&shape, 3).threads(32);
    on_ranks(WorldConfig::seeded(2, 3), |rank, comm| {
        // As many as on GPUs, where more cases are asked for, too.
        let pairs = if std::env::var_os(CASES_VARIABLE).is_some() { 10_000 } else { 2_000 };
        support::free_running(rank, comm, &config, &shape, 3, pairs)
    });
}

#[test]
fn epochs_wrap_where_numbers_do() {
    let shape = Shape { ranks: 3, experts: 6, topk: 2, hidden: 8 };
    for first in [(1 << 16) - 3, (1 << 32) - 3, (1 << 63) - 3, u64::MAX - 2] {
        let config = config(&shape, 4).threads(32).first_epoch(first);
        on_ranks(WorldConfig::seeded(3, 5), |rank, comm| support::free_running(rank, comm, &config, &shape, 4, 8));
        on_ranks(WorldConfig::seeded(3, 6), |rank, comm| support::replays(rank, comm, &config, &shape, 4, 8));
    }
}

#[test]
fn a_graph_replays_with_other_counts_ids_and_rows() {
    let shape = Shape { ranks: 2, experts: 5, topk: 2, hidden: 8 };
    let config = config(&shape, 5).threads(32);
    on_ranks(WorldConfig::seeded(2, 3), |rank, comm| support::replays(rank, comm, &config, &shape, 5, 1_000));
}

#[test]
fn a_graph_and_its_memory_are_dropped_and_later_calls_are_right() {
    let shape = Shape { ranks: 2, experts: 5, topk: 2, hidden: 8 };
    let config = config(&shape, 5).threads(32);
    on_ranks(WorldConfig::seeded(2, 3), |rank, comm| {
        let (me, group) = (rank.rank() as usize, Group::new(comm, &config)?);
        let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
        for number in 0..60 {
            let mine = batch(&shape, Routing::Uniform, number, me, 5);
            let input = Input::new(rank, &shape, 5)?;
            input.write(&mine, false)?;
            let mut layer = || -> Result<(), EpError> {
                let received = slot.exchange(&stream, &input.tokens(5, false))?;
                experts(rank, &stream, &shape, &received)?;
                received.combine(&stream, Rows::InPlace, &Combine::reduced().into(&input.output))
            };
            if number % 5 == 0 {
                let graph = stream.capture(&mut layer)?;
                // Safety: memory and group outlive the graph, and all ranks replay theirs.
                unsafe { stream.replay(&*graph)? };
                stream.synchronize()?;
            } else {
                layer()?;
                stream.synchronize()?;
            }
            let mut found = vec![0u16; mine.rows.len()];
            input.output.read(0, &mut found)?;
            assert!(per_rank(&shape, &mine, &[], Experts) == found, "call {number}: the output of rank {me} differs");
        }
        assert_eq!((group.status()?, group.masked(0)?), (None, 0));

        // A capture may look for a report, and is refused while nobody has read one.
        let input = Input::new(rank, &shape, 5)?;
        input.write(&batch(&shape, Routing::Uniform, 1, me, 5), false)?;
        input.ids.write(0, &[99i32])?;
        let mut exchange = || slot.exchange(&stream, &input.tokens(5, false)).map(drop);
        let graph = stream.capture(&mut exchange)?;
        // Safety: as above.
        unsafe { stream.replay(&*graph)? };
        stream.synchronize()?;
        let refused = stream.capture(&mut exchange).map(drop).unwrap_err();
        assert!(matches!(refused, EpError::Unread(Report { code: Code::UnknownExpert, expert: 99, .. })), "{refused}");
        assert!(group.status()?.is_some());
        stream.capture(&mut exchange)?;
        drop((graph, slot));
        group.destroy()
    });
}

#[test]
fn rows_for_each_id_come_back_and_are_added_up_with_weights() {
    for (ranks, experts, topk, hidden) in [(1, 4, 1, 8), (3, 7, 5, 48), (2, 8, 32, 1032)] {
        let shape = Shape { ranks, experts, topk, hidden };
        let config = config(&shape, 12);
        on_ranks(WorldConfig::seeded(ranks as u32, 9), |rank, comm| {
            support::combine_at_source(rank, comm, &config, &shape, 12)
        });
    }
}

#[test]
fn a_sum_of_fp32_rows_is_rounded_once() {
    let shape = Shape { ranks: 2, experts: 4, topk: 3, hidden: 8 };
    on_ranks(WorldConfig::seeded(2, 1), |rank, comm| {
        // Rank 0 makes 3 + 31 * 4.375 = 138.625 of 3, rank 1 0.71875. From 128 on, BF16 are integers.
        for (config, sum) in [(config(&shape, 1), 140.0), (config(&shape, 1).combine_f32(), 139.0)] {
            let rows = vec![narrow(3.0); 8];
            let mine = Batch { rows, experts: vec![0, 1, 2], weights: vec![1.0, 31.0, 0.125] };
            let group = Group::new(comm, &config)?;
            let input = Input::new(rank, &shape, 1)?;
            input.write(&mine, false)?;
            let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
            let received = slot.exchange(&stream, &input.tokens(1, false))?;
            let made = support::experts_f32(rank, &stream, &shape, &received, 1)?;
            experts(rank, &stream, &shape, &received)?;
            let is_wide = group.sizes().combine_bytes == 32;
            let rows = if is_wide { Rows::At(&made) } else { Rows::InPlace };
            received.combine(&stream, rows, &Combine::reduced().into(&input.output))?;
            stream.synchronize()?;
            let mut found = [0u16; 8];
            input.output.read(0, &mut found)?;
            assert_eq!(found, [narrow(sum); 8]);
            assert_eq!(group.status()?, None);
            drop(slot);
            group.destroy()?;
        }
        Ok(())
    });
}

#[test]
fn dispatches_with_one_plan_send_other_rows_to_the_same_places() {
    for (ranks, experts, topk, hidden) in [(1, 4, 2, 8), (3, 7, 5, 48)] {
        let shape = Shape { ranks, experts, topk, hidden };
        let config = config(&shape, 40);
        for config in [config, config.max_rows(40 * ranks as u32)] {
            on_ranks(WorldConfig::seeded(ranks as u32, 9), |rank, comm| {
                support::planned(rank, comm, &config, &shape, 40)
            });
        }
    }
}

#[test]
fn all_elements_go_there_and_back_with_their_scales() {
    for element in [
        Element::Bf16,
        Element::F16,
        Element::F32,
        Element::E4m3(Scales::F32),
        Element::E4m3(Scales::F32Powers),
        Element::E4m3(Scales::Ue8m0),
        Element::Opaque { row_bytes: 80, scale_bytes: 0 },
        Element::Opaque { row_bytes: 2064, scale_bytes: 7 },
        Element::Opaque { row_bytes: 16, scale_bytes: 300 },
    ] {
        for (ranks, hidden) in [(2, 128), (3, 1152)] {
            let shape = Shape { ranks, experts: 8, topk: 3, hidden };
            let config = config(&shape, 9);
            on_ranks(WorldConfig::seeded(ranks as u32, 4), |rank, comm| {
                support::element(rank, comm, &config, element, &shape, 9)?;
                // With bias and old sums, of BF16.
                let has_f32 = !matches!(element, Element::F16 | Element::F32);
                if has_f32 { support::element(rank, comm, &config.combine_f32(), element, &shape, 9) } else { Ok(()) }
            });
        }
    }
}

#[test]
fn zeros_and_tiny_elements_become_fp8_with_the_least_scale() {
    let shape = Shape { ranks: 1, experts: 1, topk: 1, hidden: 512 };
    // Blocks of zeros, of less than the least magnitude of a scale, of that, and of more.
    let row: Vec<u16> = (0..512).map(|at| narrow([0.0, 3e-6, 1e-4, -2.5][at / 128] * (at % 7) as f32 / 6.0)).collect();
    for scales in [Scales::F32, Scales::F32Powers, Scales::Ue8m0] {
        on_ranks(WorldConfig::seeded(1, 5), |rank, comm| {
            let group = Group::new(comm, &config(&shape, 1).element(Element::E4m3(scales)))?;
            let (input, stream, mut slot) = (Input::new(rank, &shape, 1)?, rank.stream()?, group.slot(0)?);
            input.write(&Batch { rows: row.clone(), experts: vec![0], weights: vec![1.0] }, false)?;
            let received = slot.exchange(&stream, &input.tokens(1, false))?;
            stream.synchronize()?;
            let found = received.fetch()?.remove(0).remove(0);
            let (elements, values) = quantized(&row, scales != Scales::F32);
            let bytes = |scale: f32| match scales {
                Scales::Ue8m0 => vec![(scale.to_bits() >> 23) as u8],
                _ => scale.to_le_bytes().to_vec(),
            };
            assert_eq!(
                (found.row, found.scales),
                (elements, values.into_iter().flat_map(bytes).collect()),
                "{scales:?}"
            );
            received.release();
            drop(slot);
            group.destroy()
        });
    }
}

#[test]
fn all_layouts_have_the_rows_of_the_oracle_in_its_order() {
    for layout in [
        Layout::Flat,
        Layout::ExpertMajorPadded,
        Layout::ExpertMajorPacked { align: 1 },
        Layout::ExpertMajorPacked { align: 8 },
    ] {
        // More rows than threads; more experts than a block places at a time.
        for (ranks, experts, topk) in [(1, 3, 2), (3, 7, 4), (4, 3, 3), (1, 1100, 3)] {
            let shape = Shape { ranks, experts, topk, hidden: 24 };
            let config = config(&shape, 40).threads(32);
            on_ranks(WorldConfig::seeded(ranks as u32, 8), |rank, comm| {
                support::layouts::layout(rank, comm, &config, layout, &shape, 40)
            });
        }
    }
    let shape = Shape { ranks: 2, experts: 5, topk: 3, hidden: 8 };
    on_ranks(WorldConfig::seeded(2, 8), |rank, comm| {
        support::layouts::small_layouts(rank, comm, &config(&shape, 12), &shape, 12)
    });
}

#[test]
fn a_kernel_of_the_user_contains_dispatch_experts_and_combine() {
    let shape = Shape { ranks: 3, experts: 7, topk: 3, hidden: 24 };
    on_ranks(WorldConfig::seeded(3, 8), |rank, comm| support::fused(rank, comm, &config(&shape, 12), &shape, 12));
}

#[test]
fn rows_lie_in_an_arena_of_32_gib() {
    // The regions of rank 1 and of buffer 1 lie past 4 GiB. Few pages are touched.
    let shape = Shape { ranks: 2, experts: 2, topk: 2, hidden: 32_768 };
    let config = config(&shape, 65_536);
    assert!(config.footprint(2).unwrap() > 32 << 30);
    on_ranks(WorldConfig::seeded(2, 2), |rank, comm| {
        let me = rank.rank() as usize;
        let group = Group::new(comm, &config)?;
        let (input, stream, mut slot) = (Input::new(rank, &shape, 3)?, rank.stream()?, group.slot(0)?);
        for number in 0..4 {
            let batches: Vec<Batch> =
                (0..2).map(|rank| batch(&shape, Routing::Uniform, number, rank, 3 - rank)).collect();
            input.write(&batches[me], false)?;
            let received = slot.exchange(&stream, &input.tokens(3 - me, false))?;
            stream.synchronize()?;
            compare(&received, &shape, &batches, me)?;
            experts(rank, &stream, &shape, &received)?;
            received.combine(&stream, Rows::InPlace, &Combine::reduced().into(&input.output))?;
            stream.synchronize()?;
            let expected = per_rank(&shape, &batches[me], &[], Experts);
            let mut found = vec![0u16; expected.len()];
            input.output.read(0, &mut found)?;
            assert!(expected == found, "pair {number}: the output of rank {me} differs");
        }
        assert_eq!(group.status()?, None);
        drop(slot);
        group.destroy()
    });
}

#[test]
fn a_padded_layout_past_4_gib_has_each_row_in_its_zone() {
    // Each rank has 8 GiB of zones, of which few pages are touched: also free threads make them well within a deadline.
    let shape = Shape { ranks: 2, experts: 128, topk: 2, hidden: 8192 };
    for world in [WorldConfig::seeded(2, 2), WorldConfig::threads(2)] {
        on_ranks(world, |rank, comm| {
            let me = rank.rank() as usize;
            let group = Group::new(comm, &config(&shape, 4096))?;
            let to = Permuted::new(&group, Layout::ExpertMajorPadded, 0)?;
            let all = to.rows().expect("a padded layout has rows");
            assert_eq!(all.bytes(), 8 << 30);
            let (input, stream, mut slot) = (Input::new(rank, &shape, 3)?, rank.stream()?, group.slot(0)?);
            let mut mine = batch(&shape, Routing::Uniform, 1, me, 3);
            // The last expert of each rank.
            mine.experts = [63, 127].repeat(3);
            input.write(&mine, false)?;
            let mut received = slot.exchange(&stream, &input.tokens(3, false))?;
            received.permute(&stream, &to)?;
            stream.synchronize()?;
            for (source, rows) in received.fetch()?.iter().enumerate() {
                assert_eq!(rows.len(), 3);
                let zone = (63 * 2 + source) as u64 * 4096;
                for (row, expected) in (zone..).zip(rows) {
                    let mut found = vec![0u8; expected.row.len()];
                    all.read(row * found.len() as u64, &mut found)?;
                    assert!(found == expected.row, "row {row} of rank {me}");
                }
            }
            received.release();
            assert_eq!(group.status()?, None);
            drop(slot);
            group.destroy()
        });
    }
}

#[test]
fn all_tokens_that_a_rank_may_have_find_their_places() {
    // Groups of tokens fit into shared memory several times over with 1 rank, and not at once with 16.
    let all = Shape { ranks: 1, experts: 3, topk: 1, hidden: 8 };
    let pairs = |tokens| [Pair { routing: Routing::Uniform, counts: tokens, alternative: false }];
    run(WorldConfig::seeded(1, 2), config(&all, 65_536).threads(512), all, 65_536, &pairs(&[65_536]));
    let many = Shape { ranks: 16, experts: 40, topk: 2, hidden: 8 };
    let counts = &[13_000, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3];
    run(WorldConfig::seeded(16, 2), config(&many, 13_000).sms(1).threads(512), many, 13_000, &pairs(counts));
}

#[test]
fn nothing_races() {
    let shape = Shape { ranks: 3, experts: 9, topk: 3, hidden: 24 };
    for seed in 0..3 {
        let mut world = WorldConfig::seeded(3, seed);
        let WorldMode::Seeded(seeded) = world.mode else { unreachable!("the mode of a seeded world") };
        world.mode = WorldMode::Seeded(seeded.races(true));
        // A host that waits would order all that follows.
        on_ranks(world.clone(), |rank, comm| support::free_running(rank, comm, &config(&shape, 16), &shape, 16, 10));
        run(
            world.clone(),
            config(&shape, 16),
            shape,
            16,
            &[pair(Routing::Uniform), pair(Routing::Repeats), pair(Routing::Zipf)],
        );
        for layout in [Layout::ExpertMajorPadded, Layout::ExpertMajorPacked { align: 8 }] {
            on_ranks(world.clone(), |rank, comm| {
                support::layouts::layout(rank, comm, &config(&shape, 5), layout, &shape, 5)
            });
        }
    }
}

#[test]
fn one_resident_block_of_many_is_enough() {
    let shape = Shape { ranks: 3, experts: 12, topk: 2, hidden: 600 };
    let config = GroupConfig::new(12, 600, 2).tokens(40).threads(32);
    for seed in 0..4 {
        let world = WorldConfig::seeded(3, seed).resident_blocks(1);
        // More blocks than may be resident: they run one after the other.
        run(world.clone(), config.grid(5), shape, 40, &[pair(Routing::Uniform), pair(Routing::Repeats)]);
        on_ranks(world, |rank, comm| {
            support::layouts::layout(rank, comm, &config.grid(5), Layout::ExpertMajorPacked { align: 8 }, &shape, 40)
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
fn a_kernel_reports_bad_tokens_and_the_next_call_works() {
    let shape = Shape { ranks: 2, experts: 4, topk: 2, hidden: 8 };
    let config = GroupConfig::new(4, 8, 2).tokens(4).sms(1).threads(32);
    let outcome = launch(WorldConfig::seeded(2, 3), |rank| -> Result<(), EpError> {
        let me = rank.rank() as usize;
        let comm = rank.communicator(&Requirements::default())?;
        let group = Group::new(&comm, &config)?;
        let input = Input::new(&rank, &shape, 8)?;
        let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
        let mut batches: Vec<Batch> = (0..2).map(|rank| batch(&shape, Routing::Uniform, 1, rank, 4)).collect();
        // The lower halves of some ids of 64 bits name an expert.
        let narrow = [4, i32::MAX.into()].map(|id| (false, id));
        let wide = [4, 1 << 31, 1 << 32, (1 << 32) + 1, i64::MAX, i64::MIN + 1].map(|id| (true, id));
        for (wide, id) in narrow.into_iter().chain(wide) {
            // The id as the kernel has it.
            let seen = if id < 0 { -1 } else { i32::try_from(id).unwrap_or(i32::MAX) };
            batches[1].experts[2] = seen;
            input.write(&batches[me], wide)?;
            if wide && me == 1 {
                input.ids.write(2 * 8, &[id])?;
            }
            let received = slot.exchange(&stream, &input.tokens(4, wide))?;
            stream.synchronize()?;
            compare(&received, &shape, &batches, me)?;
            received.combine(&stream, Rows::InPlace, &Combine::reduced().into(&input.output))?;
            stream.synchronize()?;
            let report = group.status()?;
            assert_eq!(report.map(|report| (report.code, report.expert, report.seen, report.limit)), {
                (me == 1 && seen >= 0).then_some((Code::UnknownExpert, id as u64, 1, 4))
            });
            assert_eq!(group.status()?, None);
        }

        // More tokens than there is room for, and fewer than none, by a number of the device.
        let batches: Vec<Batch> = (0..2).map(|rank| batch(&shape, Routing::Uniform, 2, rank, 8)).collect();
        let count_at = Memory::new(rank.device(), MemoryKind::Device, 4)?.whole();
        for (given, part, text) in [
            (8, 4, "slot 0: a batch has 8 tokens, the group has room for 4; the others were dropped"),
            (
                i32::MAX as u32,
                4,
                "slot 0: a batch has 2147483647 tokens, the group has room for 4; the others were dropped",
            ),
            (-1i32 as u32, 0, "slot 0: the number of tokens of a batch is -1 on the device; it has none"),
            (i32::MIN as u32, 0, "slot 0: the number of tokens of a batch is -2147483648 on the device; it has none"),
        ] {
            for planned in [false, true] {
                let fewer: Vec<Batch> = (0..2).map(|rank| batch(&shape, Routing::Uniform, 2, rank, part)).collect();
                input.write(&batches[me], true)?;
                count_at.write(0, &[given])?;
                let tokens = input.tokens(8, true).count(Number::At(&count_at));
                let plan = if planned { Some(slot.plan(&stream, &tokens)?) } else { None };
                let tokens = plan.as_ref().map_or(tokens, |plan| tokens.planned(plan));
                if planned {
                    stream.synchronize()?;
                    assert_eq!(group.status()?.map(|report| report.to_string()), Some(text.to_owned()));
                }
                let received = slot.exchange(&stream, &tokens)?;
                stream.synchronize()?;
                compare(&received, &shape, &fewer, me)?;
                received.release();
                let report = group.status()?.map(|report| (report.code, report.seen, report.limit, report.to_string()));
                let expected = (Code::TooManyTokens, given.into(), 4, text.to_owned());
                assert_eq!(report, (!planned).then_some(expected));
            }
        }

        // A number that the host knows is refused, and nothing is sent.
        let error = slot.exchange(&stream, &input.tokens(5, false)).map(drop).unwrap_err();
        let limit = "at most 4, for which the group has room; configure more by `tokens`";
        assert_eq!(error.to_string(), format!("the number of tokens of a batch is 5; the limit is {limit}"));
        assert!(slot.plan(&stream, &input.tokens(u32::MAX as usize, false)).is_err());

        // A report that nobody has read ends the next call that begins a dispatch, and the group; no other call.
        count_at.write(0, &[9u32])?;
        let many = input.tokens(8, false).count(Number::At(&count_at));
        let received = slot.exchange(&stream, &many)?;
        stream.synchronize()?;
        received.combine(&stream, Rows::InPlace, &Combine::reduced().into(&input.output))?;
        stream.synchronize()?;
        let text = "an earlier call has left a report that nobody has read by `Group::status`: slot 0: a batch has 9 \
                    tokens, the group has room for 4; the others were dropped";
        let few = input.tokens(4, false);
        for error in [
            slot.exchange(&stream, &few).map(drop).unwrap_err(),
            slot.dispatch(&stream, &few).map(drop).unwrap_err(),
            slot.plan(&stream, &few).map(drop).unwrap_err(),
            slot.fuse(&stream, &few, Rows::InPlace, &Combine::reduced().into(&input.output)).map(drop).unwrap_err(),
        ] {
            assert!(matches!(error, EpError::Unread(_)) && error.to_string() == text, "{error}");
        }
        assert!(group.status()?.is_some());
        slot.exchange(&stream, &few)?.release();

        // A dispatch that nobody received, memory that is too short, and a slot that is lent.
        let short = input.rows.memory().slice(0..48)?;
        let error = slot.dispatch(&stream, &Tokens::new(&short, Ids::I32(&input.ids), 4)).map(drop).unwrap_err();
        assert_eq!(error.to_string(), "the memory of rows has 48 bytes, 64 are needed");
        assert!(matches!(group.slot(0), Err(EpError::Slot { slot: 0, .. })));
        assert!(matches!(group.slot(1), Err(EpError::Slot { slot: 1, .. })));
        drop(slot.dispatch(&stream, &input.tokens(4, false))?);
        let error = slot.exchange(&stream, &input.tokens(4, false)).map(drop).unwrap_err();
        assert!(matches!(error, EpError::NotReceived { slot: 0 }));
        stream.synchronize()?;
        rank.barrier()?;
        drop(slot);
        group.destroy()?;

        // A group that ends with such a report, also after all ranks were admitted again.
        for admits in [false, true] {
            let group = Group::new(&comm, &config)?;
            let mut slot = group.slot(0)?;
            slot.exchange(&stream, &many)?.release();
            stream.synchronize()?;
            drop(slot);
            rank.barrier()?;
            if admits {
                group.readmit()?;
            }
            let error = group.destroy().unwrap_err();
            assert!(matches!(error, EpError::Unread(Report { code: Code::TooManyTokens, seen: 9, .. })), "{error}");
        }
        Ok(comm.destroy()?)
    });
    outcome.unwrap();
}

#[test]
fn a_silent_rank_is_reported_and_masked_and_readmitted_and_finds_out_if_it_comes_late() {
    let shape = Shape { ranks: 3, experts: 6, topk: 2, hidden: 8 };
    let (config, deadline) = (config(&shape, 8).threads(32), Deadline::after_ms(20));
    on_ranks(WorldConfig::seeded(3, 5), |rank, comm| {
        support::slots::silent(rank, comm, (&config, deadline), &shape, 8)
    });
}

#[test]
fn a_rank_that_describes_its_rows_and_sends_none_is_reported_and_left_out() {
    let shape = Shape { ranks: 3, experts: 6, topk: 2, hidden: 8 };
    // With so much room a row's metadata is sent before the row.
    let (config, deadline) = (config(&shape, 4096).threads(32), Deadline::after_ms(20));
    on_ranks(WorldConfig::seeded(3, 5), |rank, comm| {
        support::layouts::described_only(rank, comm, (&config, deadline), &shape, 8)
    });
}

#[test]
fn ranks_that_expect_metadata_and_rows_do_not_take_each_other_for_present() {
    let shape = Shape { ranks: 2, experts: 6, topk: 2, hidden: 8 };
    // With so much room a row's metadata is sent before the row.
    let (config, deadline) = (config(&shape, 4096).threads(32), Deadline::after_ms(20));
    on_ranks(WorldConfig::seeded(2, 5), |rank, comm| {
        support::layouts::mixed(rank, comm, (&config, deadline), &shape, 8)
    });
}

#[test]
fn two_slots_on_two_streams_do_not_disturb_each_other() {
    let shape = Shape { ranks: 2, experts: 8, topk: 2, hidden: 16 };
    let config = config(&shape, 16).sms(1).threads(32);
    for seed in 0..4 {
        on_ranks(WorldConfig::seeded(2, seed), |rank, comm| {
            support::slots::two_slots(rank, comm, &config, &shape, 16, 4)
        });
    }
}

#[test]
fn two_slots_share_a_gpu_that_one_could_fill() {
    let shape = Shape { ranks: 2, experts: 8, topk: 2, hidden: 16 };
    // Of 64 tokens a combine has use for all four places.
    let config = GroupConfig::new(8, 16, 2).tokens(64).threads(32).deadline(Deadline::after_ms(100));
    on_ranks(WorldConfig::seeded(2, 3).resident_blocks(4), |rank, comm| {
        support::slots::two_slots(rank, comm, &config, &shape, 64, 2)
    });
}

#[test]
fn a_slot_keeps_the_memory_of_a_call_until_its_kernels_have_ended() {
    let shape = Shape { ranks: 1, experts: 1, topk: 1, hidden: 8 };
    for captured in [false, true] {
        on_ranks(WorldConfig::seeded(1, 5), |rank, comm| {
            let group = Group::new(comm, &config(&shape, 4))?;
            let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
            let batch = batch(&shape, Routing::Uniform, 0, 0, 4);
            let mut all = Vec::new();
            let mut pair = |all: &mut Vec<_>| -> Result<(), EpError> {
                let input = Input::new(rank, &shape, 4)?;
                input.write(&batch, false)?;
                let received = slot.exchange(&stream, &input.tokens(4, false))?;
                received.combine(&stream, Rows::InPlace, &Combine::reduced().into(&input.output))?;
                let kept = [&input.rows, &input.ids, &input.weights, &input.output];
                all.extend(kept.map(|memory| Arc::downgrade(memory.memory())));
                Ok(())
            };
            let is_there = |memory: &Weak<Memory>| memory.strong_count() > 0;
            // A slot looks at its calls which kernels have ended.
            if captured {
                let graph = stream.capture(|| (0..60).try_for_each(|_| pair(&mut all)))?;
                // It has not run yet.
                assert!(all.iter().all(is_there));
                // Safety: all memory is there.
                unsafe { stream.replay(&*graph)? };
                stream.synchronize()?;
            } else {
                for _ in 0..60 {
                    pair(&mut all)?;
                    assert!(all.iter().rev().take(4).all(is_there));
                    stream.synchronize()?;
                }
                assert!(!all.iter().all(is_there));
            }
            drop(slot);
            assert!(!all.iter().any(is_there));
            group.destroy()
        });
    }
}

#[test]
fn a_group_needs_sizes_within_the_limits_and_one_configuration() {
    let refused = launch(WorldConfig::seeded(2, 1), |rank| -> Result<(), EpError> {
        let comm = rank.communicator(&Requirements::default())?;
        let all = GroupConfig::new(2, 128, 1);
        for (other, what, theirs, ours) in [
            (GroupConfig::new(3, 128, 1), "experts", "2", "3"),
            (GroupConfig::new(2, 256, 1), "hidden", "128", "256"),
            (GroupConfig::new(2, 128, 2), "topk", "1", "2"),
            (all.tokens(16), "tokens", "128", "16"),
            (all.slots(2), "slots", "1", "2"),
            (all.element(Element::E4m3(Scales::Ue8m0)), "element", "Bf16", "E4m3(Ue8m0)"),
            (all.element(Element::Opaque { row_bytes: 32, scale_bytes: 6 }), "element", "Bf16", "Opaque(32, 6)"),
            (all.combine_at_source(), "combine_at_source", "false", "true"),
            (all.combine_f32(), "combine_f32", "false", "true"),
            (all.max_rows(3), "max_rows", "not set", "3"),
            (all.sms(3), "sms", "not set", "3"),
            (all.grid(3), "grid", "not set", "3"),
            (all.threads(64), "threads", "not set", "64"),
            (all.deadline(Deadline::after_ms(3)), "deadline", "1 s", "3 ms"),
        ] {
            let (config, rank, [theirs, ours]) =
                if rank.rank() == 0 { (all, 1, [ours, theirs]) } else { (other, 0, [theirs, ours]) };
            let error = Group::new(&comm, &config).map(drop).unwrap_err().to_string();
            let differs = format!("rank {rank} has another configuration than this rank: `{what}` is {theirs} there");
            assert_eq!(error, format!("{differs} and {ours} here; all ranks pass the same"));
        }
        Ok(comm.destroy()?)
    });
    refused.unwrap();
    for (config, words) in [
        (GroupConfig::new(0, 8, 1), "the number of experts is 0; the limit is at least 1"),
        (
            GroupConfig::new(8, 12, 1),
            "`hidden`, the number of elements of a row, is 12; the limit is a multiple of 8, at most 32768: pad rows with \
             zeros to 16 elements",
        ),
        (GroupConfig::new(8, 8, 33), "the number of experts of a token is 33; the limit is at most 32"),
        (
            GroupConfig::new(8, 40_000, 1),
            "`hidden`, the number of elements of a row, is 40000; the limit is a multiple of 8, at most 32768",
        ),
        (GroupConfig::new(8, 8, 1).tokens(65_537), "the number of tokens is 65537; the limit is at most 65536"),
        (GroupConfig::new(65_537, 8, 1), "the number of experts is 65537; the limit is at most 65536"),
        (GroupConfig::new(8, 8, 0), "the number of experts of a token is 0; the limit is at least 1"),
        (GroupConfig::new(8, 8, 1).tokens(0), "the number of tokens is 0; the limit is at least 1"),
        (GroupConfig::new(8, 8, 1).slots(0), "the number of slots is 0; the limit is at least 1"),
        (GroupConfig::new(8, 8, 1).slots(65), "the number of slots is 65; the limit is at most 64"),
        (GroupConfig::new(8, 8, 1).threads(31), "the number of threads of a block is 31; the limit is at least 32"),
        (
            GroupConfig::new(8, 8, 1).threads(48),
            "the number of threads of a block is 48; the limit is a multiple of 32",
        ),
        (GroupConfig::new(8, 8, 1).threads(544), "the number of threads of a block is 544; the limit is at most 512"),
        (
            GroupConfig::new(8, 8, 1).element(Element::Opaque { row_bytes: 16, scale_bytes: 65_537 }),
            "the number of bytes of the scales of a row is 65537; the limit is at most 65536",
        ),
        (
            GroupConfig::new(8, 64, 1).element(Element::E4m3(Scales::F32)),
            "`hidden`, the number of elements of a row, is 64; the limit is a multiple of 128, at most 32768: pad rows with \
             zeros to 128 elements",
        ),
        (
            GroupConfig::new(8, 64, 1).element(Element::Opaque { row_bytes: 24, scale_bytes: 1 }),
            "the number of bytes of a row is 24; the limit is a multiple of 16",
        ),
    ] {
        assert_eq!(config.footprint(2).unwrap_err().to_string(), words);
    }
    let wide = GroupConfig::new(8, 16_392, 1).combine_f32();
    let words = "`hidden`, the number of elements of a row, is 16392; the limit is a multiple of 8, at most 16384";
    assert_eq!(wide.footprint(2).unwrap_err().to_string(), words);
    let no_bf16 = "FP32 in place of BF16 in rows that come back, in a group to which no BF16 come back: leave out \
                   `combine_f32`";
    let each =
        "FP32 in place of BF16 in rows that come back for each id: leave out `combine_at_source`, or `combine_f32`";
    for (config, words) in [
        (GroupConfig::new(8, 8, 1).element(Element::F16), no_bf16),
        (GroupConfig::new(8, 8, 1).element(Element::F32), no_bf16),
        (GroupConfig::new(8, 8, 1).combine_at_source(), each),
    ] {
        assert_eq!(config.combine_f32().footprint(2).unwrap_err().to_string(), words);
    }
    assert!(GroupConfig::new(8, 8, 1).footprint(65).is_err() && GroupConfig::new(8, 8, 1).footprint(0).is_err());
    // The largest of all is within the limits.
    let largest = GroupConfig::new(65_536, 32_768, 32).tokens(65_536);
    assert!(largest.footprint(64).is_ok_and(|bytes| bytes > 1 << 40));
}

#[test]
fn a_group_takes_the_memory_that_was_promised() {
    let config = GroupConfig::new(256, 7168, 8);
    let large = config.tokens(4096);
    for (config, ranks, megabytes) in [
        (config.tokens(128), 2, 14.7),
        (config.tokens(128), 4, 29.4),
        (config.tokens(128), 8, 58.9),
        (large, 2, 471.0),
        (large, 4, 942.0),
        (large, 8, 1880.0),
        (large.max_rows(4096), 8, 59.2),
        (large.max_rows(32_768), 8, 473.0),
    ] {
        let bytes = config.footprint(ranks).unwrap() as f64;
        assert!((bytes / 1e6 / megabytes - 1.0).abs() < 0.02, "{bytes} with {ranks} ranks");
    }
    let config = GroupConfig::new(6, 128, 3).tokens(7).sms(1).threads(32);
    let plain = [config, config.combine_at_source(), config.combine_f32(), config.slots(3)];
    let others = [config.element(Element::E4m3(Scales::F32)), config.tokens(600), config.max_rows(9).slots(2)];
    for config in plain.into_iter().chain(others) {
        on_ranks(WorldConfig::seeded(2, 5), |rank, comm| {
            let (group, stream) = (Group::new(comm, &config)?, rank.stream()?);
            let memory = Memory::new(rank.device(), MemoryKind::Device, 16)?.whole();
            let mut slot = group.slot(0)?;
            let received = slot.exchange(&stream, &Tokens::new(&memory, Ids::I32(&memory), 0))?;
            // All slots, without the plan of a group that counts before its dispatches.
            let (bytes, sizes) = (received.offsets(0).0.bytes(), group.sizes());
            let has_plan = sizes.tokens > 512 || sizes.is_shared();
            let slots = if sizes.is_shared() { 2 } else { 1 };
            let plans = if has_plan { slots * sizes.plan_bytes() } else { 0 };
            assert_eq!(bytes + plans, config.footprint(2)?, "{config:?}");
            received.release();
            stream.synchronize()?;
            drop(slot);
            group.destroy()
        });
    }
}

/// Rank 0 makes all calls of a pair before rank 1 makes its own.
fn in_turn(rank: &Rank, comm: &Communicator, config: &GroupConfig, shape: &Shape, way: u32) -> Result<(), EpError> {
    let (me, max) = (rank.rank() as usize, 5);
    let group = Group::new(comm, config)?;
    let (input, stream, mut slot) = (Input::new(rank, shape, max)?, rank.stream()?, group.slot(0)?);
    let mine = batch(shape, Routing::Uniform, 4, me, max);
    input.write(&mine, false)?;
    let to = Permuted::new(&group, Layout::Flat, (shape.ranks * max) as u32)?;
    rank.barrier()?;
    if me == 1 {
        rank.barrier()?;
    }
    let tokens = input.tokens(max, false);
    let plan = slot.plan(&stream, &tokens)?;
    let tokens = tokens.planned(&plan);
    let mut received = match way {
        0 => slot.dispatch(&stream, &tokens)?.receive(&stream)?,
        1 => slot.exchange(&stream, &tokens)?,
        _ => slot.exchange_into(&stream, &tokens, &to)?.0,
    };
    if way < 2 {
        received.permute(&stream, &to)?;
    }
    experts(rank, &stream, shape, &received)?;
    received.combine(&stream, Rows::InPlace, &Combine::reduced().into(&input.output))?;
    if me == 0 {
        rank.barrier()?;
    }
    stream.synchronize()?;
    assert_eq!((group.status()?, group.masked(0)?), (None, 0));
    let expected = per_rank(shape, &mine, &[], Experts);
    let mut found = vec![0u16; expected.len()];
    input.output.read(0, &mut found)?;
    assert!(expected == found, "the output of rank {me} differs");
    drop(slot);
    group.destroy()
}

#[test]
fn calls_return_before_other_ranks_make_theirs() {
    let shape = Shape { ranks: 2, experts: 4, topk: 2, hidden: 8 };
    for config in [config(&shape, 5), config(&shape, 5).max_rows(10)] {
        for way in 0..3 {
            on_ranks(WorldConfig::seeded(2, 3), |rank, comm| in_turn(rank, comm, &config, &shape, way));
        }
    }
}

/// Terms whose sum is 0 in this order, since the first one swallows the second, and 1 if the second comes last.
const TERMS: [f32; 3] = [16_777_216.0, 1.0, -16_777_216.0];
/// Terms, their weights, and their sum, which has its last bit only if product and sum are rounded once.
const CLOSE: [f32; 3] = [-1.0, 1.0 + 1.0 / 4096.0, 0.0];
const FACTORS: [f32; 3] = [1.0, 1.0 + 1.0 / 4096.0, 1.0];
const REMAINS: f32 = 1.0 / 2048.0 + 1.0 / 16_777_216.0;

#[test]
fn sums_have_the_order_of_the_ids_and_round_each_product_once() {
    let memory = |rank: &Rank, values: &[f32]| -> Result<_, EpError> {
        let memory = Memory::new(rank.device(), MemoryKind::Device, 32 * values.len() as u64)?.whole();
        memory.write(0, &values.iter().flat_map(|&value| [value; 8]).collect::<Vec<_>>())?;
        Ok(memory)
    };
    // The order in which the ids name the ranks, which each have a row.
    on_ranks(WorldConfig::seeded(3, 5), |rank, comm| {
        let config = GroupConfig::new(3, 8, 3).tokens(1).element(Element::F32).sms(1).threads(32);
        let (group, stream) = (Group::new(comm, &config)?, rank.stream()?);
        let (row, output) = (memory(rank, &[1.0])?, memory(rank, &[9.0])?);
        let ids = Memory::new(rank.device(), MemoryKind::Device, 12)?.whole();
        let mut slot = group.slot(0)?;
        for order in [[0, 1, 2], [2, 0, 1], [1, 2, 0]] {
            ids.write(0, &order.map(|id: i32| id))?;
            let position = order.iter().position(|&id| id == rank.rank() as i32).expect("each rank has an id");
            let rows = memory(rank, &[TERMS[position]; 3])?;
            let received = slot.exchange(&stream, &Tokens::new(&row, Ids::I32(&ids), 1))?;
            received.combine(&stream, Rows::At(&rows), &Combine::reduced().into(&output))?;
            stream.synchronize()?;
            let mut found = [9f32; 8];
            output.read(0, &mut found)?;
            assert_eq!(found, [0.0; 8], "{order:?}");
        }
        drop(slot);
        group.destroy()
    });
    // The order of the ids, at the source and on the rank of the experts.
    on_ranks(WorldConfig::seeded(1, 5), |rank, comm| {
        let config = GroupConfig::new(3, 8, 3).tokens(1).element(Element::F32).sms(1).threads(32);
        let (row, output, stream) = (memory(rank, &[1.0])?, memory(rank, &[9.0])?, rank.stream()?);
        let new = || -> Result<_, EpError> { Ok(Memory::new(rank.device(), MemoryKind::Device, 12)?.whole()) };
        let (ids, weights) = (new()?, new()?);
        for order in [[0usize, 1, 2], [2, 0, 1], [1, 2, 0]] {
            ids.write(0, &order.map(|id| id as i32))?;
            for (factors, terms, expected) in [([1.0f32; 3], TERMS, 0.0), (FACTORS, CLOSE, REMAINS)] {
                weights.write(0, &factors)?;
                let tokens = Tokens::new(&row, Ids::I32(&ids), 1).weights(&weights);
                let check = |what: &str| -> Result<(), EpError> {
                    stream.synchronize()?;
                    let mut found = [9f32; 8];
                    output.read(0, &mut found)?;
                    assert_eq!(found, [expected; 8], "{what} {order:?}");
                    Ok(())
                };
                let group = Group::new(comm, &config.combine_at_source())?;
                let mut slot = group.slot(0)?;
                let received = slot.exchange(&stream, &tokens)?;
                let rows = memory(rank, &terms)?;
                received.combine(&stream, Rows::At(&rows), &Combine::weighted(&weights).into(&output))?;
                check("at the source")?;
                drop(slot);
                group.destroy()?;

                let group = Group::new(comm, &config)?;
                let (to, mut slot) =
                    (Permuted::new(&group, Layout::ExpertMajorPacked { align: 1 }, 3)?, group.slot(0)?);
                let mut received = slot.exchange(&stream, &tokens)?;
                received.permute(&stream, &to)?;
                // One row for each expert, by its number.
                let mut by_expert = [0f32; 3];
                order.iter().zip(terms).for_each(|(&id, term)| by_expert[id] = term);
                let rows = memory(rank, &by_expert)?;
                received.reduce(&stream, Rows::PermutedAt(&to, &rows))?;
                received.combine(&stream, Rows::InPlace, &Combine::reduced().into(&output))?;
                check("on the rank of the experts")?;
                drop(slot);
                group.destroy()?;
            }
        }
        Ok(())
    });
}

#[test]
fn the_status_has_the_first_error_since_the_last_call() {
    let shape = Shape { ranks: 1, experts: 2, topk: 1, hidden: 8 };
    on_ranks(WorldConfig::seeded(1, 3), |rank, comm| {
        let group = Group::new(comm, &config(&shape, 4).slots(2))?;
        let (input, stream) = (Input::new(rank, &shape, 8)?, rank.stream()?);
        let mut slots = [group.slot(0)?, group.slot(1)?];
        // Slot 1 has two errors, of which the first one is reported, then slot 0 one.
        for (slot, ids) in [(1, [7, 8, 0, 0]), (0, [0, 0, 0, 9])] {
            input.ids.write(0, &ids)?;
            slots[slot].exchange(&stream, &input.tokens(4, false))?.release();
            stream.synchronize()?;
        }
        let status = || -> Result<_, EpError> { Ok(group.status()?.map(|report| (report.slot, report.code))) };
        assert_eq!(status()?, Some((0, Code::UnknownExpert)));
        assert_eq!(status()?, Some((1, Code::UnknownExpert)));
        assert_eq!(status()?, None);
        input.ids.write(0, &[0; 8])?;
        let count = Memory::new(rank.device(), MemoryKind::Device, 4)?.whole();
        count.write(0, &[6u32])?;
        slots[1].exchange(&stream, &input.tokens(4, false).count(Number::At(&count)))?.release();
        stream.synchronize()?;
        assert_eq!(status()?, Some((1, Code::TooManyTokens)));
        drop(slots);
        group.destroy()
    });
}

#[test]
fn rows_and_terms_that_do_not_fit_a_group_are_refused() {
    let shape = Shape { ranks: 1, experts: 2, topk: 2, hidden: 8 };
    on_ranks(WorldConfig::seeded(1, 3), |rank, comm| {
        let (input, stream) = (Input::new(rank, &shape, 4)?, rank.stream()?);
        input.write(&batch(&shape, Routing::Uniform, 4, 0, 4), false)?;
        let (reduced, plain) = (Combine::reduced().into(&input.output), Combine::plain().into(&input.output));
        let config = config(&shape, 4);
        for (config, sums, rows, words) in [
            (config.combine_f32(), &reduced, "received", "a combine of the received rows"),
            (config.combine_f32(), &reduced, "permuted", "a combine of the permuted rows"),
            (config.combine_at_source(), &plain, "received", "a combine of the received rows"),
            (config.combine_at_source(), &plain, "permuted", "a layout that has not the rows"),
            (config.combine_at_source(), &reduced, "received", "a combine of one row for each rank"),
            (config, &plain, "received", "a combine of one row for each id"),
        ] {
            let group = Group::new(comm, &config)?;
            let (to, mut slot) = (Permuted::new(&group, Layout::Flat, 8)?, group.slot(0)?);
            let mut received = slot.exchange(&stream, &input.tokens(4, false))?;
            received.permute(&stream, &to)?;
            let rows = if rows == "permuted" { Rows::Permuted(&to) } else { Rows::InPlace };
            let error = received.combine(&stream, rows, sums).unwrap_err().to_string();
            assert!(error.starts_with(words) || error.contains(words), "{error}");
            stream.synchronize()?;
            drop(slot);
            group.destroy()?;
        }
        Ok(())
    });
}
