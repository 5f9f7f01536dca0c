// SPDX-License-Identifier: MIT OR Apache-2.0
//! Numbers of ranks, experts, ids, elements and tokens, and their routings.

use crate::support::{self, Pair};
use crate::{COUNTS, config, on_ranks, pair, run};
use gin_ep::GroupConfig;
use gin_ep_oracle::{Routing, Shape};
use gin_host::world::WorldConfig;
use gin_testkit::{in_rotation, rotation};

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
fn large_batches_whose_tokens_name_the_same_experts_give_the_bits_of_the_oracle() {
    const TOKENS: usize = 2304;
    let shape = Shape { ranks: 16, experts: 32, topk: 8, hidden: 8 };
    let config = GroupConfig::new(32, 8, 8).tokens(TOKENS as u32).sms(2).threads(64);
    for config in rotation(0, [config, config.max_rows((shape.ranks * TOKENS) as u32)]) {
        let pairs = [Pair { counts: &[TOKENS], ..pair(Routing::Skewed) }];
        run(WorldConfig::seeded(shape.ranks as u32, 5), config, shape, TOKENS, &pairs);
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
        let world = WorldConfig::seeded(ranks as u32, next(1000) as u64);
        if in_rotation(0, case) {
            run(world, config, shape, max, &list);
        }
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
fn a_kernel_of_the_user_contains_dispatch_experts_and_combine() {
    let shape = Shape { ranks: 3, experts: 7, topk: 3, hidden: 24 };
    on_ranks(WorldConfig::seeded(3, 8), |rank, comm| support::fused(rank, comm, &config(&shape, 12), &shape, 12));
}
