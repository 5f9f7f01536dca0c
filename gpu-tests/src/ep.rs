// SPDX-License-Identifier: MIT OR Apache-2.0
//! Trials of expert parallelism, against its oracle.

use crate::testbed::{Testbed, Trial};
use gin_abi::Deadline;
use gin_ep::{Combine, Element, EpError, Fused, Group, GroupConfig, Layout, Rows, Scales};
use gin_ep_oracle::{Experts, Kind, Routing, Shape, batch, per_rank};
use gin_gpu::{LaunchConfig, ModuleSource};
use gin_host::comm::{CommError, Communicator, Requirements};
use gin_host::world::{Rank, WorldConfig, launch};
use gpu_tests_kernels::experts::{LATE, UNMET_COMBINE, UNMET_DISPATCH, hardware_late};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use support::{Input, Pair, pairs};

#[expect(unreachable_pub, reason = "the tests of gin-ep include it too")]
#[path = "../../gin-ep/tests/support/mod.rs"]
mod support;

/// The trials of this module, which run on any devices. Ranks form one LSA team.
pub const TRIALS: [Trial; 17] = [
    ("rows_go_to_their_experts_and_back_with_the_bits_of_the_oracle", small),
    ("whole_batches_go_to_their_experts_and_back_with_the_bits_of_the_oracle", large),
    ("one_block_is_enough_to_dispatch_and_combine", |testbed| {
        on(testbed, 3, |config| config.sms(1), (60, 4, 200), 64, &[pair(Routing::Uniform), pair(Routing::Repeats)])
    }),
    ("a_kernel_that_holds_all_processors_but_one_does_not_stop_progress", beside_a_kernel),
    ("one_rank_sends_rows_to_itself", alone),
    ("free_running_pairs_of_dispatch_and_combine_give_the_bits_of_the_oracle", free_running),
    ("graphs_of_dispatch_and_combine_replay_with_other_counts_ids_and_rows", replays),
    ("rows_for_each_id_come_back_and_are_added_up_with_weights", combine_at_source),
    ("all_elements_go_to_their_experts_and_back_with_their_scales", elements),
    ("a_kernel_of_the_user_contains_dispatch_experts_and_combine", |testbed| {
        with(testbed, 2, small_on(testbed), (60, 8, 256), 24, support::fused)
    }),
    ("large_batches_find_their_places", prefill),
    ("all_layouts_have_the_rows_of_the_oracle_in_its_order", layouts),
    ("flags_cover_what_late_warps_store_and_a_missing_barrier_before_a_flag_shows", late),
    ("sources_share_a_region_for_the_rows_that_arrive", shared),
    ("shared_regions_serve_free_running_pairs_graphs_and_all_elements", shared_traffic),
    ("a_silent_rank_is_reported_and_left_out_and_takes_part_again", silent),
    ("two_slots_on_two_streams_do_not_disturb_each_other", two_slots),
];

/// The trials of ranks in several LSA teams, also with software NICs that kernels drive.
pub const NETWORK_TRIALS: [Trial; 3] = [
    ("rows_reach_ranks_over_the_network_with_the_bits_of_lsa", over_network),
    ("rows_for_each_id_and_rows_of_fp8_cross_the_network", elements_over_network),
    ("free_running_pairs_and_graphs_cross_the_network", free_running_over_network),
];

fn pair(routing: Routing) -> Pair {
    Pair { routing, counts: &[37, 0, 1, 128], alternative: false }
}

/// Runs `test` on `ranks` ranks with `sizes`: experts, ids of a token, elements of a row.
fn with(
    testbed: &Testbed,
    ranks: u32,
    change: impl Fn(GroupConfig) -> GroupConfig + Sync,
    sizes: (u32, u32, u32),
    tokens: u32,
    test: impl Fn(&Rank, &Communicator, &GroupConfig, &Shape, usize) -> Result<(), EpError> + Sync,
) -> Result<(), String> {
    in_teams(testbed, (ranks, None), change, sizes, tokens, test)
}

/// Runs `test` as [`with`], in LSA teams of this size.
fn in_teams(
    testbed: &Testbed,
    (ranks, team): (u32, Option<u32>),
    change: impl Fn(GroupConfig) -> GroupConfig + Sync,
    (experts, topk, hidden): (u32, u32, u32),
    tokens: u32,
    test: impl Fn(&Rank, &Communicator, &GroupConfig, &Shape, usize) -> Result<(), EpError> + Sync,
) -> Result<(), String> {
    let shape =
        Shape { ranks: ranks as usize, experts: experts as usize, topk: topk as usize, hidden: hidden as usize };
    // A virtual GPU on a busy machine takes long.
    let config = GroupConfig::new(experts, hidden, topk).tokens(tokens).deadline(crate::testbed::DEADLINE);
    let config = change(config);
    let mut world = testbed.config();
    (world.ranks, world.comm.lsa_size) = (ranks, team);
    let nics = testbed.nics()?;
    if let Some(nics) = &nics {
        world = world.soft_nics(nics);
    }
    let outcome = launch(world, |rank| -> Result<(), EpError> {
        let comm = rank.communicator(&Requirements::default())?;
        test(&rank, &comm, &config, &shape, tokens as usize)?;
        let fault = crate::testbed::fault(&rank, &comm);
        assert_eq!(fault, None);
        comm.destroy().map_err(|error: CommError| error.into())
    });
    outcome.map_err(|error| error.to_string())?;
    match nics.map(|nics| nics.fabric().violations()) {
        Some((Some(first), count)) => Err(format!("the NIC was used wrongly {count} times, first: {first:?}")),
        _ => Ok(()),
    }
}

/// Runs pairs.
fn on(
    testbed: &Testbed,
    ranks: u32,
    change: impl Fn(GroupConfig) -> GroupConfig + Sync,
    sizes: (u32, u32, u32),
    tokens: u32,
    list: &[Pair],
) -> Result<(), String> {
    with(testbed, ranks, change, sizes, tokens, |rank, comm, config, shape, max| {
        pairs(rank, comm, config, shape, max, list)
    })
}

/// Makes a group small enough for virtual GPUs.
fn small_on(testbed: &Testbed) -> impl Fn(GroupConfig) -> GroupConfig + Sync + use<> {
    let is_real = testbed.devices.is_some();
    move |config: GroupConfig| if is_real { config } else { config.sms(2).threads(64) }
}

/// Small trials of one rank, which compute-sanitizer can run.
fn alone(testbed: &Testbed) -> Result<(), String> {
    let (sizes, tokens) = ((6, 3, 128), 40);
    on(testbed, 1, small_on(testbed), sizes, tokens, &[pair(Routing::Uniform), pair(Routing::Repeats)])?;
    for element in [Element::E4m3(Scales::F32), Element::Opaque { row_bytes: 48, scale_bytes: 7 }] {
        with(testbed, 1, small_on(testbed), sizes, tokens, |rank, comm, config, shape, max| {
            support::element(rank, comm, config, element, shape, max)
        })?;
    }
    for layout in [Layout::Flat, Layout::ExpertMajorPacked { align: 8 }] {
        with(testbed, 1, small_on(testbed), sizes, tokens, |rank, comm, config, shape, max| {
            support::layouts::layout(rank, comm, config, layout, shape, max)
        })?;
    }
    with(testbed, 1, small_on(testbed), sizes, 12, support::shared::limits)?;
    with(testbed, 1, small_on(testbed), sizes, 12, support::shared::layouts)?;
    on(testbed, 1, small_on(testbed), (6, 3, 8), 600, &[Pair { counts: &[600], ..pair(Routing::Uniform) }])
}

/// Each rank has a GPU of its own.
fn beside_a_kernel(testbed: &Testbed) -> Result<(), String> {
    let is_real = testbed.devices.is_some();
    let ranks = if is_real { testbed.gpus.min(2) } else { 3 };
    let mut world = testbed.config();
    if !is_real {
        // A host that looks at memory again and again takes no turns with kernels.
        world = WorldConfig::threads(ranks).resident_blocks(4);
    }
    (world.ranks, world.comm.lsa_size) = (ranks, None);
    let (shape, tokens) = (Shape { ranks: ranks as usize, experts: 12, topk: 2, hidden: 600 }, 40);
    let config = GroupConfig::new(12, 600, 2).tokens(tokens).deadline(crate::testbed::DEADLINE);
    let outcome = launch(world, |rank| -> Result<(), EpError> {
        let comm = rank.communicator(&Requirements::default())?;
        let (config, sms) = if is_real {
            let kernel = rank.device().load(ModuleSource::Linked)?.function("ep_dispatch")?;
            let room = rank.device().resident_blocks(&kernel, &LaunchConfig::new(1, 512))? as u32;
            (config.grid(room).threads(512), room)
        } else {
            (config.grid(5).threads(32), 4)
        };
        support::beside_a_kernel(&rank, &comm, &config, &shape, tokens as usize, sms)?;
        comm.destroy().map_err(|error: CommError| error.into())
    });
    outcome.map(drop).map_err(|error| error.to_string())
}

fn free_running(testbed: &Testbed) -> Result<(), String> {
    let is_real = testbed.devices.is_some();
    let (sizes, tokens, number) = if is_real { ((256, 8, 1024), 256, 10_000) } else { ((5, 2, 8), 3, 40) };
    for ranks in [1, 2] {
        with(testbed, ranks, small_on(testbed), sizes, tokens, |rank, comm, config, shape, max| {
            support::free_running(rank, comm, config, shape, max, number)
        })?;
    }
    Ok(())
}

/// All warps of rank 1 but the first store late. With all barriers each output is right, without one before a flag some
/// output of the tries is wrong.
fn late(testbed: &Testbed) -> Result<(), String> {
    const WAYS: [(u32, &str); 3] = [
        (0, "all barriers"),
        (UNMET_DISPATCH, "no barrier before the flags of a dispatch"),
        (UNMET_COMBINE, "no barrier before the flags of a combine"),
    ];
    let tries = if testbed.devices.is_some() { 20 } else { 3 };
    let wrong = WAYS.map(|_| AtomicU32::new(0));
    with(
        testbed,
        2,
        |config| config.grid(1),
        (12, 4, 256),
        16,
        |rank, comm, config, shape, max| {
            let me = rank.rank();
            let input = Input::new(rank, shape, max)?;
            let stream = rank.stream()?;
            for ((unmet, _), wrong) in WAYS.into_iter().zip(&wrong) {
                let group = Group::new(comm, config)?;
                let mut slot = group.slot(0)?;
                for number in 0..tries {
                    let mine = batch(shape, Routing::Uniform, number, me as usize, max);
                    input.write(&mine, false)?;
                    let (tokens, sums) = (input.tokens(max, false), Combine::reduced().into(&input.output));
                    let fused = slot.fuse(&stream, &tokens, Rows::InPlace, &sums)?;
                    let launch = LaunchConfig::new(1, 128).dynamic_shared(fused.shared);
                    let Fused { comm, arena, slot, tokens, sums, .. } = fused;
                    let (hidden, how) = (shape.hidden as u32, if me == 1 { unmet | LATE } else { unmet });
                    // The late stores of the last try are over, and the ranks begin together.
                    rank.barrier()?;
                    // Safety: one block, with the parameters of the slot.
                    unsafe {
                        hardware_late::launch(&stream, launch, comm, arena, slot, tokens, sums, hidden, how)?;
                    }
                    stream.synchronize()?;
                    rank.barrier()?;
                    let expected = per_rank(shape, &mine, &[], Experts);
                    let mut found = vec![0u16; expected.len()];
                    input.output.read(0, &mut found)?;
                    wrong.fetch_add(u32::from(expected != found), Relaxed);
                }
                drop(slot);
                group.destroy()?;
            }
            Ok(())
        },
    )?;
    let wrong = wrong.map(AtomicU32::into_inner);
    let text: Vec<_> =
        WAYS.iter().zip(wrong).map(|((_, way), wrong)| format!("{way}: {wrong} wrong outputs")).collect();
    let text = format!("{}, of {}", text.join(", "), 2 * tries);
    println!("{text}");
    if wrong[0] == 0 && wrong[1] > 0 && wrong[2] > 0 { Ok(()) } else { Err(text) }
}

fn replays(testbed: &Testbed) -> Result<(), String> {
    let number = if testbed.devices.is_some() { 1000 } else { 10 };
    with(testbed, 2, small_on(testbed), (8, 2, 64), 16, |rank, comm, config, shape, max| {
        support::replays(rank, comm, config, shape, max, number)?;
        support::graphs::in_any_order(rank, comm, config, shape, max, number)
    })?;
    with(testbed, 2, small_on(testbed), (8, 2, 64), 16, support::planned)
}

fn combine_at_source(testbed: &Testbed) -> Result<(), String> {
    let (hidden, tokens) = if testbed.devices.is_some() { (2880, 64) } else { (48, 8) };
    for sizes in [(8, 1, hidden), (60, 8, hidden)] {
        with(testbed, 2, small_on(testbed), sizes, tokens, support::combine_at_source)?;
    }
    Ok(())
}

fn elements(testbed: &Testbed) -> Result<(), String> {
    let (hidden, tokens) = if testbed.devices.is_some() { (7168, 128) } else { (256, 8) };
    for element in [
        Element::F16,
        Element::F32,
        Element::E4m3(Scales::F32),
        Element::E4m3(Scales::F32Powers),
        Element::E4m3(Scales::Ue8m0),
        Element::Opaque { row_bytes: 3600, scale_bytes: 224 },
        Element::Opaque { row_bytes: 48, scale_bytes: 7 },
    ] {
        with(testbed, 2, small_on(testbed), (60, 8, hidden), tokens, |rank, comm, config, shape, max| {
            support::element(rank, comm, config, element, shape, max)
        })?;
    }
    // Sums of ranks come back as FP32.
    let wide = |config| small_on(testbed)(config).combine_f32();
    with(testbed, 2, wide, (60, 8, hidden), tokens, |rank, comm, config, shape, max| {
        support::element(rank, comm, config, Element::E4m3(Scales::F32), shape, max)?;
        pairs(rank, comm, config, shape, max, &[pair(Routing::Uniform), pair(Routing::Repeats)])
    })
}

fn layouts(testbed: &Testbed) -> Result<(), String> {
    let (hidden, tokens) = if testbed.devices.is_some() { (1536, 128) } else { (16, 8) };
    for layout in [
        Layout::Flat,
        Layout::RankMajorPadded,
        Layout::ExpertMajorPadded,
        Layout::ExpertMajorPacked { align: 1 },
        Layout::ExpertMajorPacked { align: 16 },
        Layout::ExpertMajorFixed,
    ] {
        with(testbed, 2, small_on(testbed), (12, 4, hidden), tokens, |rank, comm, config, shape, max| {
            support::layouts::layout(rank, comm, config, layout, shape, max)
        })?;
    }
    for layout in
        [Layout::RankMajorPadded, Layout::Flat, Layout::ExpertMajorPacked { align: 16 }, Layout::ExpertMajorFixed]
    {
        for element in [Element::Bf16, Element::E4m3(Scales::F32)] {
            with(testbed, 2, small_on(testbed), (12, 4, hidden.max(512)), tokens, |rank, comm, config, shape, max| {
                support::metadata::metadata(rank, comm, config, (layout, element), shape, max)
            })?;
        }
    }
    for element in [Element::Bf16, Element::E4m3(Scales::F32), Element::E4m3(Scales::Ue8m0)] {
        // One kernel, and several.
        for room in [tokens, 2049] {
            with(testbed, 2, small_on(testbed), (12, 4, hidden.max(512)), tokens, |rank, comm, config, shape, max| {
                support::fixed::details(rank, comm, &config.tokens(room), element, shape, max)
            })?;
        }
    }
    with(testbed, 2, small_on(testbed), (5, 3, hidden), tokens, support::layouts::small_layouts)
}

/// Groups with room for more than 512 tokens count them in a kernel of its own.
fn prefill(testbed: &Testbed) -> Result<(), String> {
    if testbed.devices.is_none() {
        return on(
            testbed,
            2,
            small_on(testbed),
            (8, 2, 8),
            600,
            &[Pair { counts: &[600, 7], ..pair(Routing::Uniform) }],
        );
    }
    let list = [Pair { counts: &[4096, 3000], ..pair(Routing::Uniform) }, pair(Routing::Zipf)];
    on(testbed, 2, |config| config, (256, 8, 1024), 4096, &list)?;
    // Not all groups of 32 tokens fit into shared memory at once.
    let all = [Pair { counts: &[65_536], ..pair(Routing::Uniform) }];
    on(testbed, 4, |config| config, (8, 2, 8), 65_536, &all)
}

/// One rank makes no dispatch, then no combine.
fn silent(testbed: &Testbed) -> Result<(), String> {
    // Long enough for ranks that leave a barrier of the host.
    let deadline = Deadline::after_ms(200);
    let (sizes, tokens) = if testbed.devices.is_some() { ((60, 8, 1024), 64) } else { ((6, 2, 8), 8) };
    for ranks in [2, 3] {
        with(testbed, ranks, small_on(testbed), sizes, tokens, |rank, comm, config, shape, max| {
            support::slots::silent(rank, comm, (config, deadline), shape, max)?;
            support::graphs::silent(rank, comm, (config, deadline), shape, max)?;
            // With so much room a row's metadata is sent before the row. Its memory takes time on a busy machine.
            let (roomy, deadline) = (config.tokens(4096), Deadline::after_ms(1000));
            support::layouts::described_only(rank, comm, (&roomy, deadline), shape, max)?;
            if ranks == 2 { support::layouts::mixed(rank, comm, (&roomy, deadline), shape, max) } else { Ok(()) }
        })?;
    }
    Ok(())
}

fn two_slots(testbed: &Testbed) -> Result<(), String> {
    let (sizes, tokens, rounds) =
        if testbed.devices.is_some() { ((60, 8, 2880), 64, 100) } else { ((8, 2, 16), 16, 4) };
    with(
        testbed,
        2,
        |config| small_on(testbed)(config).sms(2),
        sizes,
        tokens,
        |rank, comm, config, shape, max| support::slots::two_slots(rank, comm, config, shape, max, rounds),
    )?;
    // Grids that would fill a GPU, were there one slot.
    let tokens = if testbed.devices.is_some() { 4096 } else { 64 };
    with(testbed, 2, small_on(testbed), sizes, tokens, |rank, comm, config, shape, max| {
        support::slots::two_slots(rank, comm, config, shape, max, 4)
    })
}

/// Groups with `max_rows`: the ranks agree on places before each dispatch.
fn shared(testbed: &Testbed) -> Result<(), String> {
    let is_real = testbed.devices.is_some();
    let all = |ranks: u32, tokens: u32| move |config: GroupConfig| small_on(testbed)(config).max_rows(ranks * tokens);
    for ranks in [1, 2, 4] {
        let (sizes, tokens) = if is_real { ((60, 8, 1000), 300) } else { ((60, 8, 24), 24) };
        let list = [pair(Routing::Uniform), Pair { alternative: true, ..pair(Routing::Zipf) }, pair(Routing::None)];
        on(testbed, ranks, all(ranks, tokens), sizes, tokens, &list)?;
        with(testbed, ranks, small_on(testbed), sizes, tokens, support::shared::limits)?;
        with(testbed, ranks, all(ranks, tokens), sizes, tokens, |rank, comm, config, shape, max| {
            support::layouts::layout(rank, comm, config, Layout::Flat, shape, max)?;
            support::shared::layouts(rank, comm, config, shape, max)?;
            support::shared::layouts(rank, comm, &config.combine_f32(), shape, max)
        })?;
        with(testbed, ranks, small_on(testbed), sizes, tokens, support::shared::layouts)?;
    }
    Ok(())
}

fn shared_traffic(testbed: &Testbed) -> Result<(), String> {
    let is_real = testbed.devices.is_some();
    let all = |ranks: u32, tokens: u32| move |config: GroupConfig| small_on(testbed)(config).max_rows(ranks * tokens);
    for element in [(Element::F16, Kind::F16), (Element::F32, Kind::F32)] {
        with(testbed, 2, all(2, 24), (60, 8, 264), 24, |rank, comm, config, shape, max| {
            support::shared::elements(rank, comm, config, element, shape, max)
        })?;
    }
    let (sizes, tokens, number) = if is_real { ((256, 8, 1024), 1024, 500) } else { ((5, 2, 8), 3, 40) };
    with(testbed, 2, all(2, tokens), sizes, tokens, |rank, comm, config, shape, max| {
        support::free_running(rank, comm, config, shape, max, number)?;
        support::replays(rank, comm, config, shape, max, number / 10)?;
        support::graphs::in_any_order(rank, comm, config, shape, max, number / 10)
    })?;
    let (hidden, tokens) = if is_real { (7168, 600) } else { (256, 8) };
    for element in [Element::F32, Element::E4m3(Scales::F32), Element::Opaque { row_bytes: 3600, scale_bytes: 224 }] {
        with(testbed, 2, all(2, tokens), (60, 8, hidden), tokens, |rank, comm, config, shape, max| {
            support::element(rank, comm, config, element, shape, max)
        })?;
    }
    if !is_real {
        return Ok(());
    }
    on(testbed, 2, all(2, 4096), (256, 8, 7168), 4096, &[Pair { counts: &[4096], ..pair(Routing::Uniform) }])
}

/// Sizes of LSA teams of four ranks. One team of all shows that the trial is one.
const TEAMS: [u32; 3] = [1, 2, 4];

fn over_network(testbed: &Testbed) -> Result<(), String> {
    let (hidden, tokens) = if testbed.devices.is_some() { (2880, 128) } else { (24, 24) };
    let list = [
        pair(Routing::Uniform),
        Pair { alternative: true, ..pair(Routing::Holes) },
        pair(Routing::Zipf),
        pair(Routing::None),
        pair(Routing::One(59)),
        Pair { alternative: true, ..pair(Routing::Local) },
        pair(Routing::Repeats),
    ];
    for team in TEAMS {
        let small = small_on(testbed);
        in_teams(testbed, (4, Some(team)), small, (60, 8, hidden), tokens, |rank, comm, config, shape, max| {
            pairs(rank, comm, config, shape, max, &list)?;
            pairs(rank, comm, &config.combine_f32(), shape, max, &list[..2])
        })?;
    }
    Ok(())
}

fn elements_over_network(testbed: &Testbed) -> Result<(), String> {
    let (hidden, tokens) = if testbed.devices.is_some() { (1536, 64) } else { (128, 8) };
    for team in TEAMS {
        let (teams, sizes) = ((4, Some(team)), (12, 4, hidden));
        in_teams(testbed, teams, small_on(testbed), sizes, tokens, support::combine_at_source)?;
        for element in [Element::E4m3(Scales::F32), Element::Opaque { row_bytes: 48, scale_bytes: 7 }] {
            in_teams(testbed, teams, small_on(testbed), sizes, tokens, |rank, comm, config, shape, max| {
                support::element(rank, comm, config, element, shape, max)
            })?;
        }
    }
    Ok(())
}

fn free_running_over_network(testbed: &Testbed) -> Result<(), String> {
    let is_real = testbed.devices.is_some();
    let (sizes, tokens, number) = if is_real { ((256, 8, 1024), 128, 500) } else { ((5, 2, 8), 3, 40) };
    for teams in [(2, Some(1)), (4, Some(2))] {
        in_teams(testbed, teams, small_on(testbed), sizes, tokens, |rank, comm, config, shape, max| {
            support::free_running(rank, comm, config, shape, max, number)?;
            support::replays(rank, comm, config, shape, max, number / 10)?;
            support::graphs::in_any_order(rank, comm, config, shape, max, number / 10)
        })?;
    }
    Ok(())
}

fn small(testbed: &Testbed) -> Result<(), String> {
    let max = |config: GroupConfig| if testbed.devices.is_some() { config } else { config.sms(2).threads(64) };
    for (ranks, sizes) in [(1, (8, 2, 8)), (2, (60, 8, 1000)), (3, (257, 4, 16)), (4, (8, 32, 2880))] {
        let list = [
            pair(Routing::Uniform),
            Pair { alternative: true, ..pair(Routing::Holes) },
            pair(Routing::Zipf),
            pair(Routing::None),
            pair(Routing::One(sizes.0 - 1)),
            Pair { alternative: true, ..pair(Routing::Local) },
            pair(Routing::Repeats),
        ];
        let (experts, topk, hidden) = sizes;
        // Hundreds of elements take seconds on virtual GPUs.
        let hidden = if testbed.devices.is_some() { hidden } else { hidden.min(64) };
        on(testbed, ranks, max, (experts, topk, hidden), 128, &list)?;
    }
    Ok(())
}

fn large(testbed: &Testbed) -> Result<(), String> {
    if testbed.devices.is_none() {
        return on(testbed, 2, |config| config.sms(2).threads(64), (256, 8, 264), 32, &[pair(Routing::Uniform)]);
    }
    let list: Vec<Pair> =
        (0..40).map(|number| Pair { alternative: number % 2 == 0, ..pair(Routing::Uniform) }).collect();
    for ranks in [1, 2, 4] {
        on(testbed, ranks, |config| config, (256, 8, 7168), 128, &list)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use gin_soft_nic_host::SoftEngine;
    use gin_testkit::rotation;

    #[test]
    fn the_trials_pass_on_virtual_gpus() {
        for (name, trial) in rotation(0, TRIALS) {
            trial(&Testbed::simulated()).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
    }

    #[test]
    fn the_trials_over_networks_pass_on_virtual_gpus() {
        for (name, trial) in rotation(0, NETWORK_TRIALS) {
            trial(&Testbed::simulated()).unwrap_or_else(|error| panic!("{name}: {error}"));
            let nics = Testbed::simulated().driving(SoftEngine::Process);
            trial(&nics).unwrap_or_else(|error| panic!("{name}, with NICs: {error}"));
        }
    }
}
