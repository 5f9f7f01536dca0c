// SPDX-License-Identifier: MIT OR Apache-2.0
//! Dispatch and combine against the oracle, bit for bit.

mod support;

use gin_device::prelude::*;
use gin_ep::{Code, EpError, Group, GroupConfig, Ids, Rows, Tokens};
use gin_ep_oracle::{Batch, Experts, Routing, Shape, batch, per_rank};
use gin_host::comm::Requirements;
use gin_host::world::{WorldConfig, launch};
use support::{Input, Pair, compare, experts, pairs};

/// Runs pairs on all ranks of a world.
fn run(world: WorldConfig, config: GroupConfig, shape: Shape, most: usize, list: &[Pair]) {
    let outcome = launch(world, |rank| -> Result<(), EpError> {
        let comm = rank.communicator(&Requirements::default())?;
        pairs(&rank, &comm, &config, &shape, most, list)?;
        Ok(comm.destroy()?)
    });
    outcome.unwrap();
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
    }
}

#[test]
fn one_resident_block_of_many_is_enough() {
    let shape = Shape { ranks: 3, experts: 12, topk: 2, hidden: 600 };
    let config = GroupConfig::new(12, 600, 2).tokens(40).threads(32);
    for seed in 0..4 {
        let world = WorldConfig::seeded(3, seed).resident_blocks(1);
        // More blocks than may be resident: they run one after the other.
        run(world, config.grid(5), shape, 40, &[pair(Routing::Uniform), pair(Routing::Repeats)]);
    }
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
        let (stream, mut lane) = (rank.stream()?, group.lane(0)?);
        let mut batches: Vec<Batch> = (0..2).map(|rank| batch(&shape, Routing::Uniform, 1, rank, 4)).collect();
        batches[1].experts[2] = 4;
        input.write(&batches[me], false)?;
        let received = lane.exchange(&stream, &input.tokens(4, false))?;
        stream.synchronize()?;
        compare(&received, &shape, &batches, me)?;
        received.combine(&stream, Rows::InPlace, &input.output)?;
        stream.synchronize()?;
        let report = group.status()?;
        assert_eq!(report.map(|report| (report.code, report.expert, report.seen, report.limit)), {
            (me == 1).then_some((Code::UnknownExpert, 4, 1, 4))
        });
        assert_eq!(group.status()?, None);

        // More tokens than there is room for.
        let batches: Vec<Batch> = (0..2).map(|rank| batch(&shape, Routing::Uniform, 2, rank, 8)).collect();
        input.write(&batches[me], false)?;
        let received = lane.exchange(&stream, &input.tokens(8, false))?;
        stream.synchronize()?;
        let fewer: Vec<Batch> = (0..2).map(|rank| batch(&shape, Routing::Uniform, 2, rank, 4)).collect();
        compare(&received, &shape, &fewer, me)?;
        received.release();
        let report = group.status()?.map(|report| (report.code, report.seen, report.limit));
        assert_eq!(report, Some((Code::TooManyTokens, 8, 4)));

        // A dispatch that nobody received, memory that is too short, and a lane that is lent.
        let short = input.rows.memory().slice(0..48)?;
        let error = lane.dispatch(&stream, &Tokens::new(&short, Ids::I32(&input.ids), 4)).map(drop).unwrap_err();
        assert_eq!(error.to_string(), "the memory of rows has 48 bytes, 64 are needed");
        assert!(matches!(group.lane(0), Err(EpError::Lane { lane: 0, .. })));
        assert!(matches!(group.lane(1), Err(EpError::Lane { lane: 1, .. })));
        drop(lane.dispatch(&stream, &input.tokens(4, false))?);
        let error = lane.exchange(&stream, &input.tokens(4, false)).map(drop).unwrap_err();
        assert!(matches!(error, EpError::NotReceived { lane: 0 }));
        stream.synchronize()?;
        rank.barrier()?;
        drop(lane);
        group.destroy()?;
        Ok(comm.destroy()?)
    });
    outcome.unwrap();
}

#[test]
fn a_silent_rank_is_reported_and_masked_and_readmitted() {
    let shape = Shape { ranks: 3, experts: 6, topk: 2, hidden: 8 };
    let config = GroupConfig::new(6, 8, 2).tokens(8).sms(2).threads(32).deadline(Deadline::after_ms(20));
    let outcome = launch(WorldConfig::seeded(3, 5), |rank| -> Result<(), EpError> {
        let me = rank.rank() as usize;
        let comm = rank.communicator(&Requirements::default())?;
        let group = Group::new(&comm, &config)?;
        let input = Input::new(&rank, &shape, 8)?;
        let stream = rank.stream()?;
        let batches: Vec<Batch> = (0..3).map(|rank| batch(&shape, Routing::Uniform, 9, rank, 8)).collect();
        input.write(&batches[me], false)?;
        let once = |silent: &[usize]| -> Result<(), EpError> {
            let mut lane = group.lane(0)?;
            let received = lane.exchange(&stream, &input.tokens(8, false))?;
            experts(&rank, &stream, &shape, &received)?;
            received.combine(&stream, Rows::InPlace, &input.output)?;
            stream.synchronize()?;
            let expected = per_rank(&shape, &batches[me], silent, Experts);
            let mut found = vec![0u16; expected.len()];
            input.output.read(0, &mut found)?;
            assert!(expected == found, "rank {me} without {silent:?}");
            Ok(())
        };
        once(&[])?;
        assert_eq!((group.status()?, group.masked(0)?), (None, 0));
        if me != 2 {
            // Rank 2 does not call.
            once(&[2])?;
            let report = group.status()?.map(|report| (report.code, report.rank));
            assert_eq!((report, group.masked(0)?), (Some((Code::Silent, 2)), 0b100));
            once(&[2])?;
            assert_eq!(group.status()?, None, "a masked rank is reported once");
        }
        rank.barrier()?;
        group.readmit()?;
        for _ in 0..3 {
            once(&[])?;
            assert_eq!((group.status()?, group.masked(0)?), (None, 0));
        }
        group.destroy()?;
        Ok(comm.destroy()?)
    });
    outcome.unwrap();
}

#[test]
fn two_lanes_on_two_streams_do_not_disturb_each_other() {
    let shape = Shape { ranks: 2, experts: 8, topk: 2, hidden: 16 };
    let config = GroupConfig::new(8, 16, 2).tokens(16).lanes(2).sms(1).threads(32);
    for seed in 0..4 {
        let outcome = launch(WorldConfig::seeded(2, seed), |rank| -> Result<(), EpError> {
            let me = rank.rank() as usize;
            let comm = rank.communicator(&Requirements::default())?;
            let group = Group::new(&comm, &config)?;
            let inputs = [Input::new(&rank, &shape, 16)?, Input::new(&rank, &shape, 16)?];
            let streams = [rank.stream()?, rank.stream()?];
            let (mut first, mut second) = (group.lane(0)?, group.lane(1)?);
            for round in 0..5 {
                let batches = |lane: u64| -> Vec<Batch> {
                    (0..2).map(|rank| batch(&shape, Routing::Uniform, 2 * round + lane, rank, 16)).collect()
                };
                let batches = [batches(0), batches(1)];
                for (input, batches) in inputs.iter().zip(&batches) {
                    input.write(&batches[me], false)?;
                }
                let sent = first.dispatch(&streams[0], &inputs[0].tokens(16, false))?;
                let other = second.dispatch(&streams[1], &inputs[1].tokens(16, false))?;
                let other = other.receive(&streams[1])?;
                let received = sent.receive(&streams[0])?;
                for (stream, received) in streams.iter().zip([&received, &other]) {
                    experts(&rank, stream, &shape, received)?;
                }
                received.combine(&streams[0], Rows::InPlace, &inputs[0].output)?;
                other.combine(&streams[1], Rows::InPlace, &inputs[1].output)?;
                for (index, stream) in streams.iter().enumerate() {
                    stream.synchronize()?;
                    let expected = per_rank(&shape, &batches[index][me], &[], Experts);
                    let mut found = vec![0u16; expected.len()];
                    inputs[index].output.read(0, &mut found)?;
                    assert!(expected == found, "lane {index} of rank {me}, round {round}");
                }
            }
            drop((first, second));
            assert_eq!(group.status()?, None);
            group.destroy()?;
            Ok(comm.destroy()?)
        });
        outcome.unwrap();
    }
}

#[test]
fn a_group_needs_loads_and_stores_to_all_ranks_and_one_configuration() {
    let world = WorldConfig::seeded(2, 1).lsa_size(1);
    let refused = launch(world, |rank| -> Result<(), EpError> {
        let comm = rank.communicator(&Requirements::default())?;
        let error = Group::new(&comm, &GroupConfig::new(2, 8, 1)).map(drop).unwrap_err();
        assert!(matches!(error, EpError::NotReachable { reached: 1, ranks: 2 }), "{error}");
        let config = GroupConfig::new(2 + rank.rank(), 8, 1);
        let error = Group::new(&comm, &config).map(drop).unwrap_err();
        assert!(matches!(error, EpError::Differs { .. }), "{error}");
        Ok(comm.destroy()?)
    });
    refused.unwrap();
    for (config, words) in [
        (GroupConfig::new(0, 8, 1), "the number of experts is 0; the limit is at least 1"),
        (GroupConfig::new(8, 12, 1), "the number of bytes of a row is 24; the limit is a multiple of 16"),
        (GroupConfig::new(8, 8, 33), "the number of experts of a token is 33; the limit is at most 32"),
        (GroupConfig::new(8, 40_000, 1), "the number of bytes of a row is 80000; the limit is at most 65536"),
    ] {
        assert_eq!(config.footprint(2).unwrap_err().to_string(), words);
    }
    assert!(GroupConfig::new(8, 8, 1).footprint(65).is_err());
}
