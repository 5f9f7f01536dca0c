// SPDX-License-Identifier: MIT OR Apache-2.0
//! Races, resident blocks, and ranks that come later.

use crate::support::{self, Input, experts};
use crate::{config, on_ranks, pair, run};
use gin_ep::{Combine, EpError, Group, GroupConfig, Layout, Permuted, Rows};
use gin_ep_oracle::{Experts, Routing, Shape, batch, per_rank};
use gin_host::comm::Communicator;
use gin_host::world::{Rank, WorldConfig, WorldMode};

#[test]
fn nothing_races() {
    let shape = Shape { ranks: 3, experts: 9, topk: 3, hidden: 24 };
    for seed in 0..3 {
        let mut world = WorldConfig::seeded(3, seed);
        let WorldMode::Seeded(seeded) = world.mode else { unreachable!("the mode of a seeded world") };
        world.mode = WorldMode::Seeded(seeded.races(true));
        // A host that waits would order all that follows.
        on_ranks(world.clone(), |rank, comm| support::free_running(rank, comm, &config(&shape, 16), &shape, 16, 10));
        on_ranks(world.clone(), |rank, comm| {
            support::graphs::in_any_order(rank, comm, &config(&shape, 16), &shape, 16, 8)
        });
        run(
            world.clone(),
            config(&shape, 16),
            shape,
            16,
            &[pair(Routing::Uniform), pair(Routing::Repeats), pair(Routing::Zipf)],
        );
        for layout in [Layout::ExpertMajorPadded, Layout::ExpertMajorPacked { align: 8 }, Layout::ExpertMajorFixed] {
            on_ranks(world.clone(), |rank, comm| {
                support::layouts::layout(rank, comm, &config(&shape, 5), layout, &shape, 5)
            });
        }
        // With so much room a row's metadata is sent before the row, and rows are copied as they arrive.
        on_ranks(world, |rank, comm| {
            let layout = Layout::ExpertMajorPacked { align: 8 };
            support::layouts::layout(rank, comm, &config(&shape, 2049), layout, &shape, 16)
        });
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
        on_ranks(world.clone(), |rank, comm| support::graphs::in_any_order(rank, comm, &config.grid(5), &shape, 40, 6));
        for layout in [Layout::ExpertMajorPacked { align: 8 }, Layout::ExpertMajorFixed] {
            on_ranks(world.clone(), |rank, comm| {
                support::layouts::layout(rank, comm, &config.grid(5), layout, &shape, 40)
            });
        }
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
    input.compare(&expected, format_args!("one pair"))?;
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
