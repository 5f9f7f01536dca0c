// SPDX-License-Identifier: MIT OR Apache-2.0
//! Groups and their slots: sizes, memory, refusals.

use crate::support::{self, Input};
use crate::{config, on_ranks};
use gin_abi::Deadline;
use gin_ep::{Combine, Element, EpError, Group, GroupConfig, Ids, Layout, Permuted, Rows, Scales, Tokens};
use gin_ep_oracle::{Routing, Shape, batch};
use gin_gpu::{Memory, MemoryKind};
use gin_host::comm::Requirements;
use gin_host::world::{WorldConfig, launch};
use std::sync::{Arc, Weak};

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
    let no_bf16 = "FP32 in place of BF16 in returned rows, in a group whose returned rows are not BF16: leave out \
                   `combine_f32`";
    let each = "FP32 in place of BF16 in returned rows for each id: leave out `combine_at_source`, or `combine_f32`";
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
            let (bytes, sizes) = (received.offsets().0.bytes(), group.sizes());
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
            (config.combine_at_source(), &plain, "permuted", "a layout that has not the returned rows"),
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
