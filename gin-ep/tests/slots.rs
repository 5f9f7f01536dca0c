// SPDX-License-Identifier: MIT OR Apache-2.0
//! Slots: the memory that they keep for their calls, and the calls that they refuse.

#[path = "support/mod.rs"]
#[expect(dead_code, reason = "other tests use the rest")]
mod support;

use gin_abi::Deadline;
use gin_ep::{Combine, EpError, Group, GroupConfig, Layout, OverlappedMatmul, Permuted, Rows, Slot};
use gin_ep_oracle::{Batch, Experts, Routing, Shape, batch, per_rank};
use gin_gpu::{Memory, MemoryKind, Stream};
use gin_host::comm::{Communicator, Requirements};
use gin_host::world::{Rank, WorldConfig, launch};
use std::sync::Arc;
use support::{Input, experts};

fn on_ranks(world: WorldConfig, test: impl Fn(&Rank, &Communicator) -> Result<(), EpError> + Sync) {
    let outcome = launch(world, |rank| -> Result<(), EpError> {
        let comm = rank.communicator(&Requirements::default())?;
        test(&rank, &comm)?;
        Ok(comm.destroy()?)
    });
    outcome.unwrap();
}

fn config(shape: &Shape, tokens: u32) -> GroupConfig {
    let config = GroupConfig::new(shape.experts as u32, shape.hidden as u32, shape.topk as u32);
    config.tokens(tokens).sms(2).threads(64)
}

/// Also by a slot that is lent again.
#[test]
fn relent_slot_refuses_a_dispatch_after_one_that_was_not_received() {
    let shape = Shape { ranks: 2, experts: 4, topk: 2, hidden: 8 };
    on_ranks(WorldConfig::seeded(2, 1), |rank, comm| {
        let group = Group::new(comm, &config(&shape, 4))?;
        let stream = rank.stream()?;
        let input = Input::new(rank, &shape, 4)?;
        input.write(&batch(&shape, Routing::Uniform, 1, rank.rank() as usize, 4), false)?;
        let mut slot = group.slot(0)?;
        drop(slot.dispatch(&stream, &input.tokens(4, false))?);
        drop(slot);
        let mut slot = group.slot(0)?;
        let outcome = slot.dispatch(&stream, &input.tokens(4, false)).map(|sent| sent.receive(&stream).map(drop));
        stream.synchronize()?;
        rank.barrier()?;
        assert!(matches!(outcome, Err(EpError::NotReceived { .. })), "accepted: {outcome:?}");
        drop(slot);
        group.destroy()
    });
}

/// If it were accepted, it would overwrite rows that a rank still works on.
#[test]
fn rows_that_a_rank_still_uses_do_not_change_if_another_one_drops_a_dispatch() {
    let shape = Shape { ranks: 2, experts: 4, topk: 2, hidden: 8 };
    on_ranks(WorldConfig::seeded(2, 1), |rank, comm| {
        let me = rank.rank() as usize;
        let group = Group::new(comm, &config(&shape, 4).deadline(Deadline::after_ms(1000)))?;
        let stream = rank.stream()?;
        let input = Input::new(rank, &shape, 4)?;
        let write = |key: u64| input.write(&batch(&shape, Routing::Uniform, key, me, 4), false);
        write(1)?;
        let mut slot = group.slot(0)?;
        // Dispatch 1: both receive it, nobody combines.
        let received = slot.exchange(&stream, &input.tokens(4, false))?;
        stream.synchronize()?;
        if me == 1 {
            // This rank's experts are slow: they use the rows of dispatch 1 until the second barrier.
            let before = received.fetch()?;
            rank.barrier()?;
            rank.barrier()?;
            let after = received.fetch()?;
            assert!(before[0] == after[0], "rows of dispatch 1 from rank 0 were overwritten while in use");
        } else {
            received.release();
            rank.barrier()?;
            write(2)?;
            drop(slot.dispatch(&stream, &input.tokens(4, false))?);
            drop(slot);
            let mut slot = group.slot(0)?;
            stream.synchronize()?;
            write(3)?;
            // Dispatch 3 has the buffer of dispatch 1. Only the receive of dispatch 2 would have waited for rank 1.
            let outcome = slot.dispatch(&stream, &input.tokens(4, false)).map(drop);
            assert!(matches!(outcome, Err(EpError::NotReceived { slot: 0 })), "accepted: {outcome:?}");
            stream.synchronize()?;
            rank.barrier()?;
        }
        rank.barrier()?;
        Ok(())
    });
}

/// Products that were made for a group that is gone are refused, also if a new group has its address.
#[test]
fn overlapped_products_of_a_destroyed_group_are_refused() {
    let shape = Shape { ranks: 1, experts: 2, topk: 2, hidden: 16 };
    on_ranks(WorldConfig::seeded(1, 1), |rank, comm| {
        let small = Group::new(comm, &config(&shape, 4).combine_at_source())?;
        let early = OverlappedMatmul::new(&small, Some(1))?;
        small.destroy()?;
        // More tokens and slots: their state does not fit into the memory of `early`.
        let group = Group::new(comm, &config(&shape, 64).combine_at_source().slots(8))?;
        let stream = rank.stream()?;
        let input = Input::new(rank, &shape, 64)?;
        input.write(&batch(&shape, Routing::Uniform, 1, 0, 64), false)?;
        let weights = Memory::new(rank.device(), MemoryKind::Device, 2 * 2 * 16 * 16)?.whole();
        let mut slot = group.slot(7)?;
        let sent = slot.dispatch(&stream, &input.tokens(64, false))?;
        let outcome = sent.multiply(&stream, &early, &weights).map(|received| received.release());
        stream.synchronize()?;
        assert!(matches!(outcome, Err(EpError::Unsuited { .. })), "accepted: {outcome:?}");
        drop(slot);
        group.destroy()
    });
}

/// A graph's memory stays until the slot is dropped, as that of its calls.
#[test]
fn the_memory_of_a_captured_call_stays_while_the_slot_is_there() {
    let shape = Shape { ranks: 1, experts: 1, topk: 1, hidden: 8 };
    on_ranks(WorldConfig::seeded(1, 5), |rank, comm| {
        let group = Group::new(comm, &config(&shape, 4))?;
        let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
        let batch = batch(&shape, Routing::Uniform, 0, 0, 4);
        let mut pair = |all: &mut Vec<_>| -> Result<(), EpError> {
            let input = Input::new(rank, &shape, 4)?;
            input.write(&batch, false)?;
            let received = slot.exchange(&stream, &input.tokens(4, false))?;
            received.combine(&stream, Rows::InPlace, &Combine::reduced().into(&input.output))?;
            all.extend([&input.rows, &input.ids, &input.weights, &input.output].map(|m| Arc::downgrade(m.memory())));
            Ok(())
        };
        let mut captured = Vec::new();
        let _graph = stream.capture(|| pair(&mut captured))?;
        let mut others = Vec::new();
        for _ in 0..60 {
            pair(&mut others)?;
            stream.synchronize()?;
        }
        let there = captured.iter().filter(|memory| memory.strong_count() > 0).count();
        assert_eq!(there, captured.len(), "memory of the graph was freed while the slot is there");
        drop(slot);
        group.destroy()
    });
}

/// A stream that is captured takes no mark, also if the slot has not used it before.
#[test]
fn a_capture_may_begin_on_a_stream_that_is_new_to_the_slot() {
    let shape = Shape { ranks: 1, experts: 1, topk: 1, hidden: 8 };
    on_ranks(WorldConfig::seeded(1, 5), |rank, comm| {
        let group = Group::new(comm, &config(&shape, 4))?;
        let (first, second, mut slot) = (rank.stream()?, rank.stream()?, group.slot(0)?);
        let batch = batch(&shape, Routing::Uniform, 0, 0, 4);
        let mut inputs = Vec::new();
        let mut pairs = |stream: &Arc<dyn Stream>| -> Result<(), EpError> {
            // More memory than that after which a slot marks its stream.
            for _ in 0..8 {
                let input = Input::new(rank, &shape, 4)?;
                input.write(&batch, false)?;
                let received = slot.exchange(stream, &input.tokens(4, false))?;
                received.combine(stream, Rows::InPlace, &Combine::reduced().into(&input.output))?;
                inputs.push(input);
            }
            Ok(())
        };
        pairs(&first)?;
        first.synchronize()?;
        let graph = second.capture(|| pairs(&second))?;
        // Safety: all memory is there.
        unsafe { second.replay(&*graph)? };
        second.synchronize()?;
        pairs(&second)?;
        drop(slot);
        assert_eq!(group.status()?, None);
        group.destroy()
    });
}

/// The ids of a dispatch, which its combine reads again, are kept until the combine has ended.
#[test]
fn ids_that_a_combine_reads_are_kept_until_it_has_ended() {
    let shape = Shape { ranks: 1, experts: 4, topk: 2, hidden: 8 };
    on_ranks(WorldConfig::seeded(1, 5), |rank, comm| {
        let group = Group::new(comm, &config(&shape, 4))?;
        let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
        let to = Permuted::new(&group, Layout::ExpertMajorIndices, 8)?;
        for number in 0..40 {
            let mine = batch(&shape, Routing::Uniform, number, 0, 4);
            let input = Input::new(rank, &shape, 4)?;
            input.write(&mine, false)?;
            let Input { rows, ids, weights, output, .. } = input;
            let mut received = {
                let tokens = gin_ep::Tokens::new(&rows, gin_ep::Ids::I32(&ids), 4);
                // The first one without weights: other numbers of tensors differ in the pair that shows it.
                slot.exchange(&stream, &if number == 0 { tokens } else { tokens.weights(&weights) })?
            };
            received.permute(&stream, &to)?;
            experts(rank, &stream, &shape, &received)?;
            let (weak, bytes) = (Arc::downgrade(ids.memory()), ids.bytes());
            // The call has its memory; the program needs it no more.
            drop((rows, ids, weights));
            // As a program does that looks at the counts.
            stream.synchronize()?;
            received.combine(&stream, Rows::InPlace, &Combine::reduced().into(&output))?;
            let there = weak.strong_count() > 0;
            // Other memory, perhaps in its place.
            let other: Vec<_> = (0..64)
                .map(|_| Memory::new(rank.device(), MemoryKind::Device, bytes).map(|memory| memory.whole()))
                .collect::<Result<_, _>>()?;
            other.iter().try_for_each(|memory| memory.write(0, &vec![-1i32; bytes as usize / 4]))?;
            stream.synchronize()?;
            if number == 0 {
                continue;
            }
            let expected = per_rank(&shape, &mine, &[], Experts);
            let mut found = vec![0u16; expected.len()];
            output.read(0, &mut found)?;
            assert!(there, "pair {number}: the ids were freed before the combine has run");
            assert!(expected == found, "sums of pair {number}");
        }
        drop(slot);
        group.destroy()
    });
}

/// A plan that a combine reads again: freed before, its number of tokens is any number, and sums are written past the
/// end of the output.
#[test]
fn a_combine_writes_no_sums_past_the_tokens_of_its_plan() {
    let shape = Shape { ranks: 1, experts: 4, topk: 2, hidden: 8 };
    on_ranks(WorldConfig::seeded(1, 5), |rank, comm| {
        let group = Group::new(comm, &config(&shape, 64))?;
        let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
        let to = Permuted::new(&group, Layout::ExpertMajorIndices, 128)?;
        let bytes = group.sizes().plan_bytes();
        let mut past = Vec::new();
        for number in 0..40 {
            let mine = batch(&shape, Routing::Uniform, number, 0, 4);
            let input = Input::new(rank, &shape, 4)?;
            input.write(&mine, false)?;
            // Memory of the program; the first four rows are the output.
            let all = Memory::new(rank.device(), MemoryKind::Device, 64 * 16)?.whole();
            all.write(0, &[0x7fffu16; 64 * 8])?;
            let output = all.memory().slice(0..4 * 16)?;
            let ids = Memory::new(rank.device(), MemoryKind::Device, 64 * 8)?.whole();
            ids.write(0, &mine.experts)?;
            let tokens = gin_ep::Tokens::new(&input.rows, gin_ep::Ids::I32(&ids), 4);
            let plan = slot.plan(&stream, &tokens)?;
            let mut received = slot.exchange(&stream, &tokens.weights(&input.weights).planned(&plan))?;
            received.permute(&stream, &to)?;
            drop(plan);
            stream.synchronize()?;
            received.combine(&stream, Rows::InPlace, &Combine::reduced().into(&output))?;
            let others: Vec<_> = (0..64)
                .map(|_| Memory::new(rank.device(), MemoryKind::Device, bytes).map(|memory| memory.whole()))
                .collect::<Result<_, _>>()?;
            others.iter().try_for_each(|memory| memory.write(0, &vec![64u32; bytes as usize / 4]))?;
            stream.synchronize()?;
            let mut found = vec![0u16; 64 * 8];
            all.read(0, &mut found)?;
            if found[4 * 8..].iter().any(|&element| element != 0x7fff) {
                past.push(number);
            }
        }
        assert!(past.is_empty(), "sums were written past the end of the output in calls {past:?}");
        drop(slot);
        group.destroy()
    });
}

/// The rows of `exchange_into`, which one of its later kernels sends, are kept until that has ended.
#[test]
fn rows_of_an_exchange_into_a_layout_are_kept_until_they_are_sent() {
    let shape = Shape { ranks: 1, experts: 4, topk: 2, hidden: 256 };
    on_ranks(WorldConfig::seeded(1, 5), |rank, comm| {
        let group = Group::new(comm, &config(&shape, 64))?;
        let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
        let to = Permuted::new(&group, Layout::ExpertMajorPacked { align: 1 }, 128)?;
        for number in 0..6 {
            let mine = batch(&shape, Routing::Uniform, number, 0, 64);
            let input = Input::new(rank, &shape, 64)?;
            input.write(&mine, false)?;
            let Input { rows, ids, weights, .. } = input;
            let mut received = {
                let tokens = gin_ep::Tokens::new(&rows, gin_ep::Ids::I32(&ids), 64).weights(&weights);
                slot.exchange_into(&stream, &tokens, &to)?.0
            };
            let weak = Arc::downgrade(rows.memory());
            drop((rows, ids, weights));
            let ended = stream.record()?;
            // Later calls of the slot look at what has ended.
            let mut early = false;
            while !early && !ended.is_done()? {
                received.permute(&stream, &to)?;
                early |= weak.strong_count() == 0 && !ended.is_done()?;
                let start = gin_boot::rt::clock_ns();
                gin_boot::rt::wait_until(|| gin_boot::rt::clock_ns() - start > 200_000);
            }
            assert!(!early, "exchange {number}");
            stream.synchronize()?;
            received.release();
        }
        drop(slot);
        group.destroy()
    });
}

/// Rows that a combine cannot post: the sums of all blocks are without that rank, or of all with it.
#[test]
fn all_blocks_agree_about_a_rank_to_which_a_combine_cannot_post() {
    use gin_net::peer::PeerNetwork;
    use gin_testkit::SlowPeer;
    use std::time::Duration;
    let shape = Shape { ranks: 4, experts: 4, topk: 4, hidden: 8 };
    let world = WorldConfig::seeded(4, 3).lsa_size(1).resident_blocks(1).network(|endpoint| {
        let network = PeerNetwork::new(endpoint);
        let late = if endpoint.rank == 0 { Duration::from_millis(30) } else { Duration::ZERO };
        Box::new(SlowPeer::new(network, 1, late))
    });
    let outcome = launch(world, |rank| -> Result<(), EpError> {
        let me = rank.rank() as usize;
        let comm = rank.communicator(&Requirements::default().queue_depth(2).max_outstanding_per_peer(2))?;
        let config = config(&shape, 16).threads(32).grid(4).deadline(Deadline::after_ms(20));
        let group = Group::new(&comm, &config)?;
        let input = Input::new(&rank, &shape, 16)?;
        let mine = batch(&shape, Routing::Uniform, 1, me, 16);
        input.write(&mine, false)?;
        let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
        let received = slot.exchange(&stream, &input.tokens(16, false))?;
        experts(&rank, &stream, &shape, &received)?;
        received.combine(&stream, Rows::InPlace, &Combine::reduced().into(&input.output))?;
        stream.synchronize()?;
        let report = group.status()?.map(|report| (report.code, report.rank));
        if me == 0 {
            assert_eq!(report, Some((gin_ep::Code::Unsent, 3)));
            // Rank 1 is late, and to rank 3 nothing could be posted.
            assert_eq!(group.masked(0)?, 0b1010);
            let mut found = vec![0u16; 16 * shape.hidden];
            input.output.read(0, &mut found)?;
            let with = per_rank(&shape, &mine, &[1], Experts);
            let without = per_rank(&shape, &mine, &[1, 3], Experts);
            let kind = |token: usize| {
                let part = token * shape.hidden..(token + 1) * shape.hidden;
                let (with, without, found) = (&with[part.clone()], &without[part.clone()], &found[part]);
                match (with == without, found == with, found == without) {
                    (true, true, _) => "-",
                    (_, true, _) => "with",
                    (_, _, true) => "without",
                    _ => "wrong",
                }
            };
            let kinds: Vec<&str> = (0..16).map(kind).collect();
            assert!(kinds.contains(&"with") || kinds.contains(&"without"), "{kinds:?}");
            assert!(!(kinds.contains(&"with") && kinds.contains(&"without")), "{kinds:?}");
        }
        rank.barrier()?;
        drop(slot);
        group.destroy()?;
        Ok(comm.destroy()?)
    });
    outcome.unwrap();
}

/// Kernels add up rows and gaps of zones in a word.
#[test]
fn zones_that_could_end_past_2_to_the_32_are_refused() {
    on_ranks(WorldConfig::seeded(1, 1), |_, comm| {
        // 65,536 rows, and a zone for each of them.
        let group = Group::new(comm, &GroupConfig::new(65_536, 8, 32).tokens(2048).sms(2).threads(64))?;
        let outcome = Permuted::new(&group, Layout::ExpertMajorPacked { align: 65_536 }, 64);
        assert!(matches!(outcome, Err(EpError::Limit { given: 0x1_0000_0000, .. })), "accepted: {outcome:?}");
        Permuted::new(&group, Layout::ExpertMajorPacked { align: 32_768 }, 64)?;
        group.destroy()
    });
}

/// Writes a batch, runs a pair, and compares its output with the oracle.
fn pair(rank: &Rank, slot: &mut Slot, shape: &Shape, key: u64) -> Result<(), EpError> {
    let (stream, input) = (rank.stream()?, Input::new(rank, shape, 4)?);
    let mine = batch(shape, Routing::Uniform, key, rank.rank() as usize, 4);
    input.write(&mine, false)?;
    let received = slot.dispatch(&stream, &input.tokens(4, false))?.receive(&stream)?;
    experts(rank, &stream, shape, &received)?;
    received.combine(&stream, Rows::InPlace, &Combine::reduced().into(&input.output))?;
    stream.synchronize()?;
    check_output(&input, shape, &mine)
}

fn check_output(input: &Input, shape: &Shape, mine: &Batch) -> Result<(), EpError> {
    let mut found = vec![0u16; mine.tokens(shape) * shape.hidden];
    input.output.read(0, &mut found)?;
    assert_eq!(found, per_rank(shape, mine, &[], Experts));
    Ok(())
}

/// One rank drops its group and its communicator, another one keeps both.
#[test]
fn a_slot_goes_on_when_one_rank_has_dropped_group_and_communicator() {
    let shape = Shape { ranks: 2, experts: 4, topk: 2, hidden: 8 };
    let outcome = launch(WorldConfig::seeded(2, 1), |rank| -> Result<(), EpError> {
        let comm = rank.communicator(&Requirements::default())?;
        let group = Group::new(&comm, &config(&shape, 4))?;
        let mut slot = group.slot(0)?;
        let kept = if rank.rank() == 0 { None } else { Some((group, comm)) };
        for key in 0..4 {
            pair(&rank, &mut slot, &shape, key)?;
        }
        // The rank without a handle of its communicator aborts that only now, and not before the other has its rows.
        rank.barrier()?;
        drop((slot, kept));
        Ok(())
    });
    outcome.unwrap();
}

#[test]
fn a_group_with_a_slot_that_is_lent_is_not_destroyed_and_the_slot_goes_on() {
    let shape = Shape { ranks: 2, experts: 4, topk: 2, hidden: 8 };
    on_ranks(WorldConfig::seeded(2, 1), |rank, comm| {
        let (group, other) = (Group::new(comm, &config(&shape, 4).slots(2))?, Group::new(comm, &config(&shape, 4))?);
        let mut slot = group.slot(1)?;
        let text = "slot 1 is in use: drop it first";
        assert_eq!(group.readmit().unwrap_err().to_string(), text);
        assert_eq!(group.destroy().unwrap_err().to_string(), text);
        pair(rank, &mut slot, &shape, 1)?;
        drop(slot);
        // All others were dropped.
        drop(other.slot(0)?);
        other.destroy()
    });
}

/// A kernel of such a slot would read memory that the communicator has freed.
#[test]
fn a_slot_refuses_calls_after_the_end_of_its_communicator() {
    let shape = Shape { ranks: 1, experts: 1, topk: 1, hidden: 8 };
    let outcome = launch(WorldConfig::seeded(1, 1), |rank| -> Result<(), EpError> {
        let comm = rank.communicator(&Requirements::default())?;
        let (group, stream) = (Group::new(&comm, &config(&shape, 4))?, rank.stream()?);
        let input = Input::new(&rank, &shape, 4)?;
        input.write(&batch(&shape, Routing::Uniform, 1, 0, 4), false)?;
        let mut slot = group.slot(0)?;
        let received = slot.exchange(&stream, &input.tokens(4, false))?;
        stream.synchronize()?;
        comm.destroy()?;
        let sums = Combine::reduced().into(&input.output);
        let combined = received.combine(&stream, Rows::InPlace, &sums);
        let tokens = input.tokens(4, false);
        let outcomes = [
            combined,
            slot.plan(&stream, &tokens).map(drop),
            slot.dispatch(&stream, &tokens).map(drop),
            slot.exchange(&stream, &tokens).map(drop),
            slot.fuse(&stream, &tokens, Rows::InPlace, &sums).map(drop),
        ];
        for outcome in outcomes {
            assert_eq!(outcome.unwrap_err().to_string(), "cannot use a group: the communicator is destroyed");
        }
        Ok(())
    });
    outcome.unwrap();
}

/// Makes each call that begins a dispatch, with the error of `wanted`.
fn refused(
    slot: &mut Slot,
    stream: &Arc<dyn Stream>,
    input: &Input,
    to: &Permuted,
    wanted: &EpError,
) -> Result<(), EpError> {
    let (tokens, sums) = (input.tokens(4, false), Combine::reduced().into(&input.output));
    let outcomes = [
        slot.check_idle(),
        slot.dispatch(stream, &tokens).map(drop),
        slot.exchange(stream, &tokens).map(drop),
        slot.exchange_into(stream, &tokens, to).map(drop),
        slot.plan(stream, &tokens).map(drop),
        slot.fuse(stream, &tokens, Rows::InPlace, &sums).map(drop),
    ];
    for (number, outcome) in outcomes.into_iter().enumerate() {
        assert_eq!(outcome.as_ref().err(), Some(wanted), "call {number}");
    }
    Ok(())
}

#[test]
fn a_detached_dispatch_keeps_its_slot_from_others_until_it_has_ended() {
    let shape = Shape { ranks: 2, experts: 4, topk: 2, hidden: 8 };
    on_ranks(WorldConfig::seeded(2, 1), |rank, comm| {
        let group = Group::new(comm, &config(&shape, 4).slots(2))?;
        let (stream, input) = (rank.stream()?, Input::new(rank, &shape, 4)?);
        let to = Permuted::new(&group, Layout::ExpertMajorPacked { align: 1 }, 64)?;
        let (mut slot, mut other) = (group.slot(0)?, group.slot(1)?);
        let (not_received, not_ended) = (EpError::NotReceived { slot: 0 }, EpError::NotEnded { slot: 0 });
        let (ended, mut before) = (Some(EpError::Ended { slot: 0 }), None);
        for key in 0..3 {
            let mine = batch(&shape, Routing::Uniform, key, rank.rank() as usize, 4);
            input.write(&mine, false)?;
            let id = slot.dispatch(&stream, &input.tokens(4, false))?.detach();
            refused(&mut slot, &stream, &input, &to, &not_received)?;
            assert_eq!(slot.received(id).err(), Some(not_received.clone()));
            assert_eq!(other.sent(id).err(), Some(EpError::Ended { slot: 1 }));
            // Another slot is independent, and its dispatch has another id.
            let others = other.exchange(&stream, &input.tokens(4, false))?.detach();
            assert_ne!(id, others);
            assert_eq!(slot.sent(others).err(), ended);
            other.received(others)?.release();
            // The value may be dropped, and detached again.
            assert_eq!(slot.sent(id)?.detach(), id);
            slot.sent(id)?.receive(&stream)?;
            assert_eq!(slot.sent(id).err(), ended);
            refused(&mut slot, &stream, &input, &to, &not_ended)?;
            // An old id does not name a newer dispatch.
            if let Some(before) = before.replace(id) {
                assert_eq!((slot.sent(before).err(), slot.received(before).err()), (ended.clone(), ended.clone()));
            }
            slot.received(id)?.permute(&stream, &to)?;
            experts(rank, &stream, &shape, &slot.received(id)?)?;
            assert_eq!(slot.received(id)?.detach(), id);
            slot.received(id)?.combine(&stream, Rows::InPlace, &Combine::reduced().into(&input.output))?;
            assert_eq!(slot.received(id).err(), ended);
            stream.synchronize()?;
            check_output(&input, &shape, &mine)?;
            // Without an id the slot goes on as ever.
            pair(rank, &mut slot, &shape, key)?;
        }
        drop((slot, other));
        group.destroy()
    });
}

/// As a call that consumes the value of a borrow.
#[test]
fn a_detached_dispatch_ends_by_a_combine_that_is_refused_and_with_its_slot() {
    let shape = Shape { ranks: 1, experts: 1, topk: 1, hidden: 8 };
    on_ranks(WorldConfig::seeded(1, 1), |rank, comm| {
        let group = Group::new(comm, &config(&shape, 4))?;
        let (stream, input) = (rank.stream()?, Input::new(rank, &shape, 4)?);
        input.write(&batch(&shape, Routing::Uniform, 1, 0, 4), false)?;
        let mut slot = group.slot(0)?;
        let id = slot.exchange(&stream, &input.tokens(4, false))?.detach();
        let sums = Combine::plain().into(&input.output);
        let outcome = slot.received(id)?.combine(&stream, Rows::InPlace, &sums);
        assert!(matches!(outcome, Err(EpError::Unsuited { .. })), "accepted: {outcome:?}");
        assert_eq!(slot.received(id).err(), Some(EpError::Ended { slot: 0 }));
        let id = slot.dispatch(&stream, &input.tokens(4, false))?.detach();
        drop(slot);
        let mut slot = group.slot(0)?;
        assert_eq!(slot.sent(id).err(), Some(EpError::Ended { slot: 0 }));
        // Nobody received it.
        let outcome = slot.dispatch(&stream, &input.tokens(4, false)).map(drop);
        assert_eq!(outcome.err(), Some(EpError::NotReceived { slot: 0 }));
        drop(slot);
        group.destroy()
    });
}
