// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reports of kernels, and ranks that are silent.

use crate::support::{self, Input, compare};
use crate::{config, on_ranks};
use gin_abi::Deadline;
use gin_ep::{Code, Combine, Element, EpError, Group, GroupConfig, Ids, Number, Report, Rows, Scales, Tokens};
use gin_ep_oracle::{Batch, Routing, Shape, batch};
use gin_gpu::{Memory, MemoryKind};
use gin_host::comm::Requirements;
use gin_host::world::{WorldConfig, launch};

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
    let shape = Shape { hidden: 512, ..shape };
    let config = GroupConfig::new(6, 512, 2).tokens(4096).sms(2).threads(32);
    for element in [Element::E4m3(Scales::F32), Element::Bf16] {
        on_ranks(WorldConfig::seeded(3, 5), |rank, comm| {
            support::fixed::described_only(rank, comm, (&config, deadline), (element, &shape), 8)
        });
    }
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
