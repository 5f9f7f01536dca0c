// SPDX-License-Identifier: MIT OR Apache-2.0
//! Layouts of received rows.

use super::{Input, compare_rows, reaches_all, state};
use gin_abi::Deadline;
use gin_ep::{Code, Combine, EpError, Group, GroupConfig, Layout, Permuted, PermutedMemory, Rows};
use gin_ep_oracle::{Batch, Experts, Routing, Shape, Zone, batch, expert_major, fixed, flat, per_rank};
use gin_gpu::{LaunchConfig, Memory, MemoryKind};
use gin_host::comm::Communicator;
use gin_host::world::Rank;
use gpu_tests_kernels::experts::{hardware_experts_permuted, hardware_send_metadata};

/// Returns the rows of a layout that must be there, by their numbers, and the counts.
pub fn expected_rows(
    layout: Layout,
    shape: &Shape,
    batches: &[Batch],
    me: usize,
    max: usize,
) -> (Vec<(usize, Vec<u16>)>, Vec<u32>) {
    let zones = |align: usize| -> (Vec<Zone>, usize) {
        let zones = expert_major(shape, batches, me, align);
        let total = zones.iter().map(|zone| zone.padded).sum();
        (zones, total)
    };
    match layout {
        Layout::Flat => {
            let rows: Vec<_> = flat(shape, batches, me).into_iter().map(|row| row.row).enumerate().collect();
            let total = rows.len() as u32;
            (rows, vec![total])
        }
        Layout::RankMajorPadded => {
            let mut counts = vec![(shape.ranks * max) as u32];
            let mut rows = Vec::new();
            for source in 0..shape.ranks {
                let of_source = flat(shape, batches, me).into_iter().filter(|row| row.source == source);
                let before = rows.len();
                rows.extend(of_source.enumerate().map(|(index, row)| (source * max + index, row.row)));
                counts.push((rows.len() - before) as u32);
            }
            (rows, counts)
        }
        Layout::ExpertMajorPadded => {
            let mut counts = vec![(shape.local() * shape.ranks * max) as u32];
            let mut rows = Vec::new();
            for (expert, zone) in zones(1).0.into_iter().enumerate() {
                for source in 0..shape.ranks {
                    let of_source = zone.rows.iter().filter(|row| row.source == source);
                    let first = (expert * shape.ranks + source) * max;
                    let before = rows.len();
                    rows.extend(of_source.enumerate().map(|(index, row)| (first + index, row.row.clone())));
                    counts.push((rows.len() - before) as u32);
                }
            }
            (rows, counts)
        }
        Layout::ExpertMajorPacked { align } => {
            let (zones, total) = zones(align as usize);
            let mut counts = vec![total as u32];
            counts.extend(zones.iter().map(|zone| zone.rows.len() as u32));
            counts.extend(zones.iter().map(|zone| zone.first as u32));
            let of_zone = |zone: Zone| {
                let gaps = (zone.rows.len()..zone.padded).map(|_| vec![0; shape.hidden]);
                let rows: Vec<_> = zone.rows.into_iter().map(|row| row.row).chain(gaps).collect();
                rows.into_iter().enumerate().map(move |(index, row)| (zone.first + index, row))
            };
            (zones.into_iter().flat_map(of_zone).collect(), counts)
        }
        Layout::ExpertMajorFixed => {
            let room = shape.ranks * max;
            let zones = fixed(shape, batches, me, room);
            let mut counts = vec![(shape.local() * room) as u32];
            counts.extend(zones.iter().map(|zone| zone.rows.len() as u32));
            counts.extend(zones.iter().map(|zone| zone.first as u32));
            // A word without a meaning.
            counts.push(0);
            let ranges = zones.iter().flat_map(|zone| zone.ranges(shape.ranks));
            counts.extend(ranges.flat_map(|(first, rows)| [rows as u32, first as u32]));
            let of_zone = |zone: Zone| (zone.first..zone.first + room).zip(zone.rows.into_iter().map(|row| row.row));
            (zones.into_iter().flat_map(of_zone).collect(), counts)
        }
        Layout::ExpertMajorIndices => unreachable!("it has no rows"),
    }
}

/// Puts rows into a layout, runs the experts there, and compares rows, counts and sums with the oracle. Where loads and
/// stores reach all ranks, also as rows arrive.
pub fn layout(
    rank: &Rank,
    comm: &Communicator,
    config: &GroupConfig,
    layout: Layout,
    shape: &Shape,
    max: usize,
) -> Result<(), EpError> {
    let me = rank.rank() as usize;
    let is_rank_major = matches!(layout, Layout::Flat | Layout::RankMajorPadded);
    let config = if is_rank_major { *config } else { config.combine_at_source() };
    let group = Group::new(comm, &config)?;
    let input = Input::new(rank, shape, max)?;
    let rows = shape.ranks * max * shape.topk + 16 * shape.local();
    let permuted = Permuted::new(&group, layout, rows as u32)?;
    let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
    // A zone has no room for tokens that name its expert twice.
    let (repeats, one) = match layout {
        Layout::ExpertMajorPadded | Layout::ExpertMajorFixed => (Routing::Holes, Routing::Zipf),
        _ => (Routing::Repeats, Routing::One(0)),
    };
    let routings = [Routing::Uniform, repeats, Routing::None, one];
    let ways: &[bool] = if reaches_all(comm, shape)? { &[false, true] } else { &[false] };
    let cases = ways.iter().flat_map(|&arrives| routings.map(|routing| (arrives, routing)));
    for (number, (arrives, routing)) in cases.enumerate() {
        let batches: Vec<Batch> =
            (0..shape.ranks).map(|rank| batch(shape, routing, number as u64, rank, max - rank % 2)).collect();
        let mine = &batches[me];
        input.write(mine, false)?;
        let tokens = input.tokens(mine.tokens(shape), false);
        let (received, view) = if arrives {
            slot.exchange_into(&stream, &tokens, &permuted)?
        } else {
            let mut received = slot.exchange(&stream, &tokens)?;
            let view = received.permute(&stream, &permuted)?;
            (received, view)
        };
        stream.synchronize()?;
        let (expected, counts) = expected_rows(layout, shape, &batches, me, max);
        let mut found = permuted.fetch_counts()?;
        if layout == Layout::ExpertMajorFixed {
            found[1 + 2 * shape.local()] = 0;
        }
        assert_eq!(found, counts, "{layout:?} {routing:?} at {me}");
        let region = received.region()?;
        let memory = permuted.rows().or(region.as_ref()).expect("there are rows");
        compare_rows(memory, shape.hidden, &expected, format_args!("{layout:?} {routing:?} at {me}"))?;
        let (local, hidden) = (shape.local() as u32, shape.hidden as u32);
        // Safety: after the layout, before the combine, on one stream.
        unsafe {
            let shape = LaunchConfig::new(4, 64);
            hardware_experts_permuted::launch(&stream, shape, view, rank.rank(), local, hidden, max as u32)?;
        }
        let terms = if is_rank_major { Combine::reduced() } else { Combine::weighted(&input.weights) };
        received.combine(&stream, Rows::Permuted(&permuted), &terms.into(&input.output))?;
        stream.synchronize()?;
        let expected = match layout {
            _ if is_rank_major => per_rank(shape, mine, &[], Experts),
            _ => gin_ep_oracle::combine_at_source(shape, mine, &[], Experts),
        };
        input.compare(&expected, format_args!("{layout:?} {routing:?}"))?;
    }
    assert_eq!(group.status()?, None);
    drop(slot);
    group.destroy()
}

/// The last rank sends the metadata of its rows, and no row. The others have zeros in their places, report it and go on
/// without it, until all take part again.
pub fn described_only(
    rank: &Rank,
    comm: &Communicator,
    (config, deadline): (&GroupConfig, Deadline),
    shape: &Shape,
    max: usize,
) -> Result<(), EpError> {
    let (me, last) = (rank.rank() as usize, shape.ranks - 1);
    let group = Group::new(comm, &config.deadline(deadline))?;
    let (input, stream) = (Input::new(rank, shape, max)?, rank.stream()?);
    let batches: Vec<Batch> = (0..shape.ranks).map(|rank| batch(shape, Routing::Uniform, 5, rank, max)).collect();
    input.write(&batches[me], false)?;
    let tokens = input.tokens(max, false);
    let to = Permuted::new(&group, Layout::ExpertMajorPacked { align: 1 }, (shape.ranks * max * shape.topk) as u32)?;
    let once = |is_whole: bool| -> Result<(), EpError> {
        let mut slot = group.slot(0)?;
        if me == last && !is_whole {
            let sums = Combine::reduced().into(&input.output);
            let gin_ep::Fused { comm, arena, slot, tokens, shared, .. } =
                slot.fuse(&stream, &tokens, Rows::InPlace, &sums)?;
            let launch = LaunchConfig::new(1, 128).dynamic_shared(shared);
            // Safety: one block, with the parameters of the slot.
            unsafe { hardware_send_metadata::launch(&stream, launch, comm, arena, slot, tokens)? };
            return Ok(stream.synchronize()?);
        }
        slot.exchange_into(&stream, &tokens, &to)?.0.release();
        stream.synchronize()?;
        let row = |zone: &Zone, index: usize| {
            let row = &zone.rows[index];
            let is_lost = row.source == last && !is_whole;
            (zone.first + index, if is_lost { vec![0; shape.hidden] } else { row.row.clone() })
        };
        let zones = expert_major(shape, &batches, me, 1);
        let expected: Vec<_> =
            zones.iter().flat_map(|zone| (0..zone.rows.len()).map(|index| row(zone, index))).collect();
        let rows = to.rows().expect("it copies rows");
        compare_rows(rows, shape.hidden, &expected, format_args!("zones at {me} if all came: {is_whole}"))?;
        Ok(())
    };
    once(true)?;
    assert_eq!(state(&group)?, (None, 0));
    rank.barrier()?;
    once(false)?;
    assert_eq!(state(&group)?, if me == last { (None, 0) } else { (Some((Code::Silent, last)), 1 << last) });
    rank.barrier()?;
    group.readmit()?;
    for _ in 0..2 {
        once(true)?;
        assert_eq!(state(&group)?, (None, 0));
    }
    rank.barrier()?;
    group.destroy()
}

/// One of two ranks exchanges rows, the other one exchanges them into a layout. Each reports the other as silent.
pub fn mixed(
    rank: &Rank,
    comm: &Communicator,
    (config, deadline): (&GroupConfig, Deadline),
    shape: &Shape,
    max: usize,
) -> Result<(), EpError> {
    let me = rank.rank() as usize;
    let group = Group::new(comm, &config.deadline(deadline))?;
    let (input, stream, mut slot) = (Input::new(rank, shape, max)?, rank.stream()?, group.slot(0)?);
    input.write(&batch(shape, Routing::Uniform, 5, me, max), false)?;
    let tokens = input.tokens(max, false);
    let to = Permuted::new(&group, Layout::ExpertMajorPacked { align: 1 }, (shape.ranks * max * shape.topk) as u32)?;
    if me == 0 {
        slot.exchange(&stream, &tokens)?.release();
    } else {
        slot.exchange_into(&stream, &tokens, &to)?.0.release();
    }
    stream.synchronize()?;
    assert_eq!(state(&group)?, (Some((Code::Silent, 1 - me)), 1 << (1 - me)));
    rank.barrier()?;
    drop(slot);
    group.destroy()
}

/// Lists rows by expert, and gives a layout too little memory: the rest is left out, and reported.
pub fn small_layouts(
    rank: &Rank,
    comm: &Communicator,
    config: &GroupConfig,
    shape: &Shape,
    max: usize,
) -> Result<(), EpError> {
    let me = rank.rank() as usize;
    let group = Group::new(comm, config)?;
    let input = Input::new(rank, shape, max)?;
    let listed = Permuted::new(&group, Layout::ExpertMajorIndices, (shape.ranks * max * shape.topk) as u32)?;
    // The memory of the program has room for two rows, and no more.
    let rows = Memory::new(rank.device(), MemoryKind::Device, 2 * 2 * shape.hidden as u64)?.whole();
    let small = Permuted::without_rows(&group, Layout::Flat, (shape.ranks * max) as u32)?.with_capacity(2)?;
    let small = small.with_memory(&PermutedMemory { rows: Some(&rows), ..PermutedMemory::default() })?;
    let full = [Layout::ExpertMajorPadded, Layout::ExpertMajorFixed];
    let full = full.map(|layout| Permuted::new(&group, layout, 0));
    let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
    let batches: Vec<Batch> = (0..shape.ranks).map(|rank| batch(shape, Routing::Uniform, 5, rank, max)).collect();
    input.write(&batches[me], false)?;
    let zones = expert_major(shape, &batches, me, 1);
    let counts = zones.iter().map(|zone| zone.rows.len() as u32).chain(zones.iter().map(|zone| zone.first as u32));
    let counts: Vec<u32> = counts.collect();
    let tokens = input.tokens(max, false);
    let mut received = slot.exchange(&stream, &tokens)?;
    received.permute(&stream, &listed)?;
    stream.synchronize()?;
    assert_eq!(listed.fetch_counts()?[1..], counts);
    received.release();
    // Rows that are listed as they arrive are all there afterwards.
    listed.counts().write(0, &vec![u32::MAX; 1 + counts.len()])?;
    let (mut received, _) = slot.exchange_into(&stream, &tokens, &listed)?;
    received.permute(&stream, &small)?;
    stream.synchronize()?;
    assert_eq!(listed.fetch_counts()?[1..], counts);
    let expected = flat(shape, &batches, me);
    assert!(expected.len() > 2, "too few rows for the test");
    assert_eq!(small.fetch_counts()?, [expected.len() as u32]);
    let mut found = vec![0u16; 2 * shape.hidden];
    small.rows().expect("it copies rows").read(0, &mut found)?;
    assert_eq!(found, [&expected[0].row[..], &expected[1].row[..]].concat());
    let report = group.status()?.map(|report| (report.code, report.seen, report.limit));
    assert_eq!(report, Some((Code::TooManyRows, expected.len() as u64, 2)));
    // Rows that are not there come back as zeros, and nothing else happens.
    received.combine(&stream, Rows::Permuted(&small), &Combine::reduced().into(&input.output))?;
    stream.synchronize()?;
    assert_eq!(group.status()?, None);
    // All ids name one expert, so its zones have no room for all of them.
    let batches: Vec<Batch> = (0..shape.ranks).map(|rank| batch(shape, Routing::One(0), 6, rank, max)).collect();
    input.write(&batches[me], false)?;
    for to in full {
        let to = to?;
        for is_one_kernel in [false, true] {
            if is_one_kernel {
                slot.exchange_into(&stream, &input.tokens(max, false), &to)?.0.release();
            } else {
                let mut received = slot.exchange(&stream, &input.tokens(max, false))?;
                received.permute(&stream, &to)?;
                received.release();
            }
            stream.synchronize()?;
            let report = group.status()?.map(|report| (report.code, report.seen, report.limit, report.expert));
            // A zone has room for the tokens of a source, or of all sources.
            let sources = if to.tokens().is_some() { shape.ranks } else { 1 };
            let (all, limit) = (sources * max * shape.topk, sources * max);
            assert_eq!(report, (me == 0).then_some((Code::TooManyRows, all as u64, limit as u64, 0)));
        }
    }
    drop(slot);
    group.destroy()
}
