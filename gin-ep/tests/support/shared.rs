// SPDX-License-Identifier: MIT OR Apache-2.0
//! Groups whose sources share a region of a receiver: too many rows, other layouts, silent ranks.

use super::layouts::expected_rows;
use super::{Input, compare_rows, copied, experts};
use gin_ep::{Code, Combine, Element, EpError, Group, GroupConfig, Ids, Layout, Permuted, Received, Rows, Tokens};
use gin_ep_oracle::{
    Batch, Experts, Kind, RankRow, Routing, Shape, Zone, batch, expert_major, limited, narrow, per_rank, per_rank_f32,
    per_rank_of, rank_major, reduced_f32, widen,
};
use gin_gpu::{LaunchConfig, Memory, MemoryKind, MemorySlice, Stream};
use gin_host::comm::Communicator;
use gin_host::world::Rank;
use gpu_tests_kernels::experts::{hardware_counts, hardware_experts_permuted};
use std::sync::Arc;

/// Compares the received rows and their numbers with those of the oracle, of which the first `max` have places.
fn compare(
    (rank, stream): (&Rank, &Arc<dyn Stream>),
    received: &Received<'_>,
    shape: &Shape,
    batches: &[Batch],
    max: usize,
) -> Result<(), EpError> {
    let me = rank.rank() as usize;
    let counts = Memory::new(rank.device(), MemoryKind::Device, 12 * shape.ranks as u64)?;
    let to = std::ptr::without_provenance_mut::<u32>(counts.address() as usize);
    // Safety: after the receive, before the combine, on one stream; the memory has the words.
    unsafe { hardware_counts::launch(stream, LaunchConfig::new(1, 32), received.view(), to)? };
    stream.synchronize()?;
    let mut numbers = vec![[0u32; 3]; shape.ranks];
    counts.read(0, &mut numbers)?;
    let (expected, all) = (limited(shape, batches, me, max), rank_major(shape, batches, me));
    let region = received.region()?.expect("sources share it");
    assert_eq!(region.bytes(), (max * 2 * shape.hidden) as u64);
    let mut rows = vec![0u8; region.bytes() as usize];
    region.read(0, &mut rows)?;
    let mut first = 0;
    for (source, found) in received.fetch()?.into_iter().enumerate() {
        let (expected, offered) = (&expected[source], all[source].len());
        let number = [expected.len() as u32, offered as u32, first as u32];
        assert_eq!(numbers[source], number, "{shape:?}, {max} rows: from {source} at {me}");
        for (index, (expected, found)) in expected.iter().zip(&found).enumerate() {
            let is_same = (expected.token as u32, &expected.experts, &expected.weights)
                == (found.token, &found.experts, &found.weights)
                && bytemuck::cast_slice::<u16, u8>(&expected.row) == found.row
                && found.row == rows[(first + index) * 2 * shape.hidden..][..2 * shape.hidden];
            assert!(is_same, "{shape:?}, {max} rows: row {index} from {source} at {me}");
        }
        assert_eq!(found.len(), expected.len());
        first += offered;
    }
    Ok(())
}

/// Runs pairs in groups with room for less and more rows than arrive, and compares rows, numbers, sums and reports with
/// the oracle.
pub fn limits(
    rank: &Rank,
    comm: &Communicator,
    config: &GroupConfig,
    shape: &Shape,
    max: usize,
) -> Result<(), EpError> {
    let (me, stream) = (rank.rank() as usize, rank.stream()?);
    let input = Input::new(rank, shape, max)?;
    let make = |routing: Routing, number: usize| -> Vec<Batch> {
        let tokens = |rank: usize| [max, 0, 1, max / 2][(rank + number) % 4];
        (0..shape.ranks).map(|rank| batch(shape, routing, number as u64, rank, tokens(rank))).collect()
    };
    let first = make(Routing::Uniform, 0);
    let received_by =
        |batches: &[Batch], rank: usize| -> usize { rank_major(shape, batches, rank).iter().map(Vec::len).sum() };
    let exact = (0..shape.ranks).map(|rank| received_by(&first, rank)).max().unwrap_or(1).max(1);
    for max_rows in [1, (exact / 2).max(1), exact.max(2) - 1, exact, shape.ranks * max] {
        let group = Group::new(comm, &config.max_rows(max_rows as u32))?;
        let mut slot = group.slot(0)?;
        for (number, routing) in
            [Routing::Uniform, Routing::Repeats, Routing::None, Routing::One(0), Routing::Local, Routing::Holes]
                .into_iter()
                .enumerate()
        {
            let batches = make(routing, number);
            let mine = &batches[me];
            input.write(mine, false)?;
            let tokens = input.tokens(mine.tokens(shape), false);
            let received = match number % 2 {
                0 => slot.exchange(&stream, &tokens)?,
                _ => {
                    let plan = slot.plan(&stream, &tokens)?;
                    slot.dispatch(&stream, &tokens.planned(&plan))?.receive(&stream)?
                }
            };
            compare((rank, &stream), &received, shape, &batches, max_rows)?;
            experts(rank, &stream, shape, &received)?;
            // Some ranks have their rows in other memory.
            let is_stored = (number + me) % 3 == 1;
            let rows = if is_stored {
                Some(copied(rank, &stream, &received, shape, max_rows.div_ceil(shape.ranks))?)
            } else {
                None
            };
            let rows = rows.as_ref().map_or(Rows::InPlace, Rows::At);
            received.combine(&stream, rows, &Combine::reduced().into(&input.output))?;
            stream.synchronize()?;
            let kept: Vec<Vec<RankRow>> =
                (0..shape.ranks).map(|rank| limited(shape, &batches, rank, max_rows).swap_remove(me)).collect();
            let takes_part = |token: usize, rank: usize| kept[rank].iter().any(|row| row.token == token);
            let expected = per_rank_of(shape, mine, &takes_part, Experts);
            input.compare(&expected, format_args!("{routing:?}, {max_rows} rows"))?;
            let report = group.status()?;
            let (mine, limit) = (received_by(&batches, me), max_rows as u64);
            let is_full = |rank: usize| rank_major(shape, &batches, rank)[me].len() > kept[rank].len();
            if mine > max_rows {
                let expected = (Code::Full, me as u32, mine as u64, limit);
                assert_eq!(report.map(|report| (report.code, report.rank, report.seen, report.limit)), Some(expected));
            } else if (0..shape.ranks).any(is_full) {
                let report = report.expect("rows were left out");
                assert!(
                    report.code == Code::Full && is_full(report.rank as usize) && report.limit == limit,
                    "{report}"
                );
                assert!(report.seen > limit, "{report}");
            } else {
                assert_eq!(report, None, "{routing:?}, {max_rows} rows");
            }
        }
        drop(slot);
        group.destroy()?;
    }
    Ok(())
}

/// Returns the rows of a rank after a combine of one row for each rank, if experts have only the rows of a packed
/// layout that lie before `capacity`. With `combine_f32` the returned rows are not rounded.
fn sums_of(
    shape: &Shape,
    batches: &[Batch],
    me: usize,
    (align, capacity): (usize, usize),
    combine_f32: bool,
) -> Vec<u16> {
    let mine = &batches[me];
    let rows: Vec<Vec<RankRow>> =
        (0..shape.ranks).map(|rank| rank_major(shape, batches, rank).swap_remove(me)).collect();
    let zones: Vec<Vec<Zone>> = (0..shape.ranks).map(|rank| expert_major(shape, batches, rank, align)).collect();
    let has_place = |rank: usize, token: usize, k: usize, expert: usize| {
        let zone = &zones[rank][expert];
        let index = zone.rows.iter().position(|row| (row.source, row.token, row.k) == (me, token, k));
        zone.first + index.expect("each id has a row") < capacity
    };
    let mut all = Vec::new();
    for token in 0..mine.tokens(shape) {
        let (mut sums, mut ranks) = (vec![0.0f32; shape.hidden], Vec::new());
        for (_, rank, ..) in mine.places(shape, token) {
            if ranks.contains(&rank) {
                continue;
            }
            ranks.push(rank);
            let mut row = rows[rank].iter().find(|row| row.token == token).expect("it went there").clone();
            for (k, expert) in row.experts.iter_mut().enumerate() {
                if *expert >= 0 && !has_place(rank, token, k, *expert as usize) {
                    *expert = -1;
                }
            }
            let row = reduced_f32(shape, rank, &row, Experts).into_iter();
            let row = row.map(|element| if combine_f32 { element } else { widen(narrow(element)) });
            sums.iter_mut().zip(row).for_each(|(sum, element)| *sum += element);
        }
        all.extend(sums.into_iter().map(narrow));
    }
    all
}

/// Copies received rows into expert-major layouts, runs the experts there, adds up their rows, and compares all with
/// the oracle.
pub fn layouts(
    rank: &Rank,
    comm: &Communicator,
    config: &GroupConfig,
    shape: &Shape,
    max: usize,
) -> Result<(), EpError> {
    let (me, stream) = (rank.rank() as usize, rank.stream()?);
    let group = Group::new(comm, config)?;
    let input = Input::new(rank, shape, max)?;
    let mut slot = group.slot(0)?;
    let combine_f32 = group.sizes().combine_bytes as usize == 4 * shape.hidden;
    let room = shape.ranks * max * shape.topk + 8 * shape.local();
    for (number, (layout, capacity)) in [
        (Layout::ExpertMajorPadded, room),
        (Layout::ExpertMajorPacked { align: 8 }, room),
        (Layout::ExpertMajorPacked { align: 1 }, (shape.ranks * max * shape.topk / shape.ranks / 2).max(1)),
    ]
    .into_iter()
    .enumerate()
    {
        let routing = if layout == Layout::ExpertMajorPadded { Routing::Holes } else { Routing::Repeats };
        let batches: Vec<Batch> =
            (0..shape.ranks).map(|rank| batch(shape, routing, number as u64, rank, max - rank % 2)).collect();
        input.write(&batches[me], false)?;
        let to = Permuted::new(&group, layout, capacity as u32)?;
        let mut received = slot.exchange(&stream, &input.tokens(batches[me].tokens(shape), false))?;
        let view = received.permute(&stream, &to)?;
        stream.synchronize()?;
        let (expected, counts) = expected_rows(layout, shape, &batches, me, max);
        assert_eq!(to.fetch_counts()?, counts, "{layout:?} at {me}");
        let memory = to.rows().expect("it copies rows");
        let expected: Vec<_> = expected.into_iter().filter(|(place, _)| *place < to.capacity() as usize).collect();
        compare_rows(memory, shape.hidden, &expected, format_args!("{layout:?} at {me}"))?;
        let (local, hidden) = (shape.local() as u32, shape.hidden as u32);
        // Safety: after the layout, before the combine, on one stream.
        unsafe {
            let shape = LaunchConfig::new(4, 64);
            hardware_experts_permuted::launch(&stream, shape, view, rank.rank(), local, hidden, max as u32)?;
        }
        let other = Memory::new(rank.device(), MemoryKind::Device, memory.bytes())?.whole();
        if number == 1 {
            let mut rows = vec![0u8; memory.bytes() as usize];
            stream.synchronize()?;
            memory.read(0, &mut rows)?;
            other.write(0, &rows)?;
        }
        received.reduce(&stream, if number == 1 { Rows::PermutedAt(&to, &other) } else { Rows::Permuted(&to) })?;
        received.combine(&stream, Rows::InPlace, &Combine::reduced().into(&input.output))?;
        stream.synchronize()?;
        let (align, max) = match layout {
            Layout::ExpertMajorPacked { align } => (align as usize, capacity),
            _ => (1, usize::MAX),
        };
        let expected = sums_of(shape, &batches, me, (align, max), combine_f32);
        input.compare(&expected, format_args!("{layout:?}"))?;
        if max == usize::MAX || number == 1 {
            let per_rank = if combine_f32 { per_rank_f32 } else { per_rank };
            assert_eq!(expected, per_rank(shape, &batches[me], &[], Experts));
        }
        let is_over = counts[0] > to.capacity();
        assert_eq!(group.status()?.map(|report| report.code), is_over.then_some(Code::TooManyRows));
    }
    let flat = Permuted::new(&group, Layout::Flat, room as u32)?;
    let mut received = slot.exchange(&stream, &input.tokens(0, false))?;
    for rows in [Rows::InPlace, Rows::Permuted(&flat)] {
        assert!(matches!(received.reduce(&stream, rows), Err(EpError::Unsuited { .. })));
    }
    received.release();
    stream.synchronize()?;
    drop(slot);
    group.destroy()
}

/// Lets rank 0 receive and combine after the others have gone on without it and sent each other more rows: its sums are
/// right, because its places are kept, and free when it has come.
pub fn late(rank: &Rank, comm: &Communicator, config: &GroupConfig, shape: &Shape, max: usize) -> Result<(), EpError> {
    let (me, stream) = (rank.rank() as usize, rank.stream()?);
    let input = Input::new(rank, shape, max)?;
    let group = Group::new(comm, &config.max_rows((2 * shape.ranks * max).min(shape.ranks * max) as u32))?;
    let make = |number: u64, tokens: usize| -> Vec<Batch> {
        (0..shape.ranks).map(|rank| batch(shape, Routing::Uniform, number, rank, tokens)).collect()
    };
    let check = |mine: &Batch, silent: &[usize]| -> Result<(), EpError> {
        stream.synchronize()?;
        let expected = per_rank(shape, mine, silent, Experts);
        input.compare(&expected, format_args!("without {silent:?}"))?;
        Ok(())
    };
    let mut slot = group.slot(0)?;
    // One token at most of each rank leaves room beside the kept places.
    let batches = make(1, max / 4);
    input.write(&batches[me], false)?;
    let sent = slot.dispatch(&stream, &input.tokens(max / 4, false))?;
    stream.synchronize()?;
    // Rank 0 has sent.
    rank.barrier()?;
    if me == 0 {
        rank.barrier()?;
    }
    let received = sent.receive(&stream)?;
    experts(rank, &stream, shape, &received)?;
    received.combine(&stream, Rows::InPlace, &Combine::reduced().into(&input.output))?;
    check(&batches[me], if me == 0 { &[] } else { &[0] })?;
    if me != 0 {
        assert_eq!(group.status()?.map(|report| (report.code, report.rank)), Some((Code::Silent, 0)));
        for number in 2..6 {
            let batches = make(number, max / 2);
            input.write(&batches[me], false)?;
            let received = slot.exchange(&stream, &input.tokens(max / 2, false))?;
            experts(rank, &stream, shape, &received)?;
            received.combine(&stream, Rows::InPlace, &Combine::reduced().into(&input.output))?;
            check(&batches[me], &[0])?;
            assert_eq!(group.status()?, None);
        }
        rank.barrier()?;
    } else {
        assert_eq!((group.status()?, group.masked(0)?), (None, 0));
    }
    drop(slot);
    group.readmit()?;
    let mut slot = group.slot(0)?;
    let batches = make(7, max);
    input.write(&batches[me], false)?;
    let received = slot.exchange(&stream, &input.tokens(max, false))?;
    compare((rank, &stream), &received, shape, &batches, shape.ranks * max)?;
    experts(rank, &stream, shape, &received)?;
    received.combine(&stream, Rows::InPlace, &Combine::reduced().into(&input.output))?;
    check(&batches[me], &[])?;
    assert_eq!(group.status()?, None);
    drop(slot);
    group.destroy()
}

/// Adds up rows of other elements than BF16 on their rank, without experts and weights: each id adds its row once.
pub fn elements(
    rank: &Rank,
    comm: &Communicator,
    config: &GroupConfig,
    (element, kind): (Element, Kind),
    shape: &Shape,
    max: usize,
) -> Result<(), EpError> {
    let (me, stream) = (rank.rank() as usize, rank.stream()?);
    let group = Group::new(comm, &config.element(element))?;
    let mine = batch(shape, Routing::Holes, 4, me, max - me % 2);
    let memory = |bytes: &[u8]| -> Result<MemorySlice, EpError> {
        let memory = Memory::new(rank.device(), MemoryKind::Device, bytes.len().max(16) as u64)?.whole();
        memory.write(0, bytes)?;
        Ok(memory)
    };
    let elements = kind.bytes(&mine.rows);
    let (rows, ids) = (memory(&elements)?, memory(bytemuck::cast_slice(&mine.experts))?);
    let output = memory(&vec![0x7f; elements.len()])?;
    let tokens = mine.tokens(shape);
    let mut slot = group.slot(0)?;
    let to =
        Permuted::new(&group, Layout::ExpertMajorPacked { align: 4 }, (shape.ranks * max * shape.topk * 2) as u32)?;
    let mut received = slot.exchange(&stream, &Tokens::new(&rows, Ids::I32(&ids), tokens as u32))?;
    received.permute(&stream, &to)?;
    received.reduce(&stream, Rows::Permuted(&to))?;
    received.combine(&stream, Rows::InPlace, &Combine::reduced().into(&output))?;
    stream.synchronize()?;
    let mut expected = Vec::new();
    for token in 0..tokens {
        let ids = mine.places(shape, token).len() as f32;
        mine.row(shape, token).iter().for_each(|&element| kind.push(ids * widen(element), &mut expected));
    }
    let mut found = vec![0u8; expected.len()];
    output.read(0, &mut found)?;
    assert!(expected == found, "{element:?}: the output of rank {me} differs");
    assert_eq!(group.status()?, None);
    drop(slot);
    group.destroy()
}
