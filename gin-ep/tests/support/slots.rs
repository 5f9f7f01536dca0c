// SPDX-License-Identifier: MIT OR Apache-2.0
//! Two slots at the same time, and ranks that are silent for a while.

use super::{Input, copied, experts, state};
use gin_abi::Deadline;
use gin_boot::rt::{clock_ns, wait_until};
use gin_ep::{Code, Combine, EpError, Group, GroupConfig, Rows};
use gin_ep_oracle::{Experts, Routing, Shape, batch, per_rank};
use gin_host::comm::Communicator;
use gin_host::world::Rank;

/// Runs pairs of two slots at the same time, on a stream each, and compares each with the oracle. Odd ranks launch the
/// kernels of the second slot first, so if those of a slot left no place on the GPU, ranks would wait for each other.
pub fn two_slots(
    rank: &Rank,
    comm: &Communicator,
    config: &GroupConfig,
    shape: &Shape,
    max: usize,
    rounds: u64,
) -> Result<(), EpError> {
    let me = rank.rank() as usize;
    let order = if me.is_multiple_of(2) { [0, 1] } else { [1, 0] };
    let group = Group::new(comm, &config.slots(2))?;
    let inputs = [Input::new(rank, shape, max)?, Input::new(rank, shape, max)?];
    let streams = [rank.stream()?, rank.stream()?];
    let (mut first, mut second) = (group.slot(0)?, group.slot(1)?);
    for round in 0..rounds {
        let mine = [0, 1].map(|slot| batch(shape, Routing::Uniform, 2 * round + slot, me, max));
        for (input, mine) in inputs.iter().zip(&mine) {
            input.write(mine, false)?;
        }
        let mut slots = [Some(&mut first), Some(&mut second)];
        let mut received = [None, None];
        for index in order {
            let slot = slots[index].take().expect("each slot once");
            received[index] = Some(slot.exchange(&streams[index], &inputs[index].tokens(max, false))?);
        }
        let is_stored = round % 2 == 1;
        let mut copies = [None, None];
        for (index, received) in received.iter().enumerate() {
            let received = received.as_ref().expect("each slot");
            experts(rank, &streams[index], shape, received)?;
            if is_stored {
                copies[index] = Some(copied(rank, &streams[index], received, shape, max)?);
            }
        }
        // No experts run, so the combines of both ranks begin at the same time.
        streams.iter().try_for_each(|stream| stream.synchronize())?;
        rank.barrier()?;
        for index in order {
            let rows = copies[index].as_ref().map_or(Rows::InPlace, Rows::At);
            let received = received[index].take().expect("each slot once");
            received.combine(&streams[index], rows, &Combine::reduced().into(&inputs[index].output))?;
            // Its blocks start before those of the other slot.
            let start = clock_ns();
            wait_until(|| clock_ns() - start > 100_000);
        }
        for (index, stream) in streams.iter().enumerate() {
            stream.synchronize()?;
            let expected = per_rank(shape, &mine[index], &[], Experts);
            inputs[index].compare(&expected, format_args!("slot {index}, round {round}"))?;
        }
    }
    drop((first, second));
    assert_eq!(group.status()?, None);
    group.destroy()
}

/// The last rank makes no dispatch, then, after all take part again, no combine. The others end in time, report it and
/// go on without it.
pub fn silent(
    rank: &Rank,
    comm: &Communicator,
    (config, deadline): (&GroupConfig, Deadline),
    shape: &Shape,
    max: usize,
) -> Result<(), EpError> {
    let (me, last) = (rank.rank() as usize, shape.ranks - 1);
    let group = Group::new(comm, &config.deadline(deadline))?;
    let (input, stream) = (Input::new(rank, shape, max)?, rank.stream()?);
    let mine = batch(shape, Routing::Uniform, 9, me, max);
    input.write(&mine, false)?;
    // Calls `between` after the dispatch.
    let once_with = |silent: &[usize], between: &dyn Fn() -> Result<(), EpError>| -> Result<(), EpError> {
        let mut slot = group.slot(0)?;
        let received = slot.exchange(&stream, &input.tokens(max, false))?;
        experts(rank, &stream, shape, &received)?;
        between()?;
        received.combine(&stream, Rows::InPlace, &Combine::reduced().into(&input.output))?;
        stream.synchronize()?;
        let expected = per_rank(shape, &mine, silent, Experts);
        input.compare(&expected, format_args!("without {silent:?}"))?;
        Ok(())
    };
    let once = |silent: &[usize]| once_with(silent, &|| Ok(()));
    let is_masked = 1u64 << last;
    once(&[])?;
    assert_eq!(state(&group)?, (None, 0));
    rank.barrier()?;
    if me != last {
        let start = clock_ns();
        once(&[last])?;
        assert_eq!(state(&group)?, (Some((Code::Silent, last)), is_masked));
        once(&[last])?;
        assert_eq!(state(&group)?, (None, is_masked), "a masked rank is reported once");
        // The rest is for the work.
        let (took, deadline) = (clock_ns() - start, deadline.ns());
        assert!(took < 2 * deadline, "two pairs took {took} ns, the deadline is {deadline} ns");
    }
    rank.barrier()?;
    if me == last {
        // It comes late. Its rows of the first call are there, but nobody returns its own.
        let others: Vec<usize> = (0..last).collect();
        once(&others)?;
        let (report, masked) = state(&group)?;
        assert_eq!((report.map(|(code, _)| code), masked), (Some(Code::Silent), is_masked - 1));
    } else {
        // Meanwhile the late rank's stores disturb nobody.
        once(&[last])?;
        assert_eq!(state(&group)?, (None, is_masked));
    }
    rank.barrier()?;
    group.readmit()?;
    for _ in 0..3 {
        once(&[])?;
        assert_eq!(state(&group)?, (None, 0));
    }
    // All have dispatched, and the others combine.
    let meet = || -> Result<(), EpError> {
        stream.synchronize()?;
        Ok(rank.barrier()?)
    };
    if me == last {
        let mut slot = group.slot(0)?;
        let received = slot.exchange(&stream, &input.tokens(max, false))?;
        meet()?;
        received.release();
    } else {
        once_with(&[last], &meet)?;
        assert_eq!(state(&group)?, (Some((Code::Silent, last)), is_masked));
        once(&[last])?;
        assert_eq!(state(&group)?, (None, is_masked));
    }
    rank.barrier()?;
    group.readmit()?;
    for _ in 0..2 {
        once(&[])?;
        assert_eq!(state(&group)?, (None, 0));
    }
    group.destroy()
}
