// SPDX-License-Identifier: MIT OR Apache-2.0
//! Graphs of a slot's calls.

use crate::support::{self, Input, experts};
use crate::{config, on_ranks};
use gin_abi::Deadline;
use gin_ep::{Code, Combine, EpError, Group, GroupConfig, Report, Rows};
use gin_ep_oracle::{Experts, Routing, Shape, batch, per_rank};
use gin_host::world::WorldConfig;

#[test]
fn a_graph_replays_with_other_counts_ids_and_rows() {
    let shape = Shape { ranks: 2, experts: 5, topk: 2, hidden: 8 };
    let config = config(&shape, 5).threads(32);
    on_ranks(WorldConfig::seeded(2, 3), |rank, comm| support::replays(rank, comm, &config, &shape, 5, 1_000));
}

/// Also ones that only release what they receive, of which each run has the places of the one before.
#[test]
fn graphs_replay_in_any_order_with_calls_between_and_their_rows_have_fixed_addresses() {
    for ranks in 1..5 {
        let shape = Shape { ranks, experts: 5, topk: 2, hidden: 8 };
        for seed in 0..3 {
            let (world, config) = (WorldConfig::seeded(ranks as u32, seed), config(&shape, 5).threads(32));
            on_ranks(world, |rank, comm| support::graphs::in_any_order(rank, comm, &config, &shape, 5, 60));
        }
    }
    // With so much room a row's metadata is sent before the row.
    let shape = Shape { ranks: 2, experts: 5, topk: 2, hidden: 8 };
    let config = config(&shape, 2100).threads(32);
    on_ranks(WorldConfig::seeded(2, 1), |rank, comm| support::graphs::in_any_order(rank, comm, &config, &shape, 5, 20));
}

#[test]
fn a_rank_that_leaves_a_replay_out_keeps_its_rows_and_the_others_go_on() {
    for ranks in 2..4 {
        let shape = Shape { ranks, experts: 6, topk: 2, hidden: 8 };
        let (config, deadline) = (config(&shape, 8).threads(32), Deadline::after_ms(20));
        on_ranks(WorldConfig::seeded(ranks as u32, 5), |rank, comm| {
            support::graphs::silent(rank, comm, (&config, deadline), &shape, 8)
        });
    }
}

/// Each replay uses the places of the one before. Blocks run one after the other, and rank 0 has no tokens, so it
/// begins the next replay while others add up.
#[test]
fn captured_pairs_follow_each_other_without_a_wait() {
    let shape = Shape { ranks: 3, experts: 6, topk: 2, hidden: 600 };
    let config = GroupConfig::new(6, 600, 2).tokens(40).threads(32).grid(5);
    for seed in 0..8 {
        on_ranks(WorldConfig::seeded(3, seed).resident_blocks(1), |rank, comm| {
            let group = Group::new(comm, &config)?;
            let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
            let tokens = if rank.rank() == 0 { 0 } else { 40 };
            let mine = batch(&shape, Routing::Uniform, seed, rank.rank() as usize, tokens);
            // The dispatches of the first and the third graph have the same buffer.
            let mut graphs = Vec::new();
            for _ in 0..3 {
                let input = Input::new(rank, &shape, 40)?;
                input.write(&mine, false)?;
                let graph = stream.capture(|| -> Result<(), EpError> {
                    let received = slot.exchange(&stream, &input.tokens(tokens, false))?;
                    experts(rank, &stream, &shape, &received)?;
                    received.combine(&stream, Rows::InPlace, &Combine::reduced().into(&input.output))
                })?;
                graphs.push((graph, input));
            }
            for number in [0, 2, 2, 0, 0, 2] {
                // Safety: memory and group outlive the graphs, and all ranks replay theirs in this order.
                unsafe { stream.replay(&*graphs[number].0)? };
            }
            stream.synchronize()?;
            assert_eq!((group.status()?, group.masked(0)?), (None, 0));
            for number in [0, 2] {
                let expected = per_rank(&shape, &mine, &[], Experts);
                graphs[number].1.compare(&expected, format_args!("seed {seed}, graph {number}"))?;
            }
            drop((graphs, slot));
            group.destroy()
        });
    }
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
