// SPDX-License-Identifier: MIT OR Apache-2.0
//! The layout with zones at fixed places: its scales, tokens and memory.

use super::{kind_of, reaches_all, sent_row, state};
use gin_abi::Deadline;
use gin_ep::{Code, Element, EpError, Group, GroupConfig, Ids, Layout, Permuted, PermutedMemory, Tokens};
use gin_ep_oracle::{Batch, Routing, Shape, Zone, batch, fixed};
use gin_gpu::{LaunchConfig, Memory, MemoryKind, MemorySlice};
use gin_host::comm::Communicator;
use gin_host::world::Rank;
use gpu_tests_kernels::experts::hardware_send_metadata;

/// The memory of a layout, of which kernels write all rows and words that have a meaning.
struct Stored {
    rows: MemorySlice,
    scales: Option<MemorySlice>,
    tokens: MemorySlice,
    counts: MemorySlice,
}

pub(super) fn filled(rank: &Rank, bytes: u64) -> Result<MemorySlice, EpError> {
    let memory = Memory::new(rank.device(), MemoryKind::Device, bytes.max(16))?.whole();
    memory.write(0, &vec![0xa5u8; bytes as usize])?;
    Ok(memory)
}

pub(super) fn bytes(memory: &MemorySlice) -> Result<Vec<u8>, EpError> {
    let mut bytes = vec![0u8; memory.bytes() as usize];
    memory.read(0, &mut bytes)?;
    Ok(bytes)
}

impl Stored {
    fn new(rank: &Rank, group: &Group, to: &Permuted) -> Result<Self, EpError> {
        let (sizes, capacity) = (group.sizes(), u64::from(to.capacity()));
        let scales = u64::from(sizes.scale_bytes) * capacity;
        Ok(Self {
            rows: filled(rank, u64::from(sizes.row_bytes) * capacity)?,
            scales: (scales != 0).then(|| filled(rank, scales)).transpose()?,
            tokens: filled(rank, 4 * capacity)?,
            counts: filled(rank, to.counts().bytes())?,
        })
    }

    fn memory(&self) -> PermutedMemory<'_> {
        let Self { rows, scales, tokens, counts } = self;
        PermutedMemory { rows: Some(rows), scales: scales.as_ref(), tokens: Some(tokens), counts: Some(counts) }
    }
}

/// Compares rows, scales, tokens, source infos and counts of a layout with the oracle. Scales of rows from the `lost`
/// rank are zeros, and its rows too. Memory past the rows of a zone is unchanged, if it was filled before.
fn compare(
    (group, to): (&Group, &Permuted),
    zones: &[Zone],
    element: Element,
    (ranks, lost): (usize, Option<usize>),
    is_filled: bool,
) -> Result<(), EpError> {
    let (sizes, room) = (group.sizes(), to.capacity() as usize / zones.len());
    let (row_bytes, words) = (sizes.row_bytes as usize, sizes.scale_bytes as usize / 4);
    let rows = bytes(to.rows().expect("it copies rows"))?;
    let scales = to.scales().map(bytes).transpose()?.unwrap_or_default();
    let tokens = bytes(to.tokens().expect("it has tokens"))?;
    let word = |bytes: &[u8], index: usize| u32::from_le_bytes(bytes[4 * index..][..4].try_into().expect("4 bytes"));
    let info = bytes(to.source_info())?;
    let counts = to.fetch_counts()?;
    assert_eq!((scales.is_empty(), counts[0]), (words == 0, to.capacity()), "{element:?}");
    for (expert, zone) in zones.iter().enumerate() {
        let pair = |source: usize| 2 + 2 * zones.len() + 2 * (expert * ranks + source);
        let ranges: Vec<_> = (0..ranks).map(pair).map(|at| (counts[at + 1] as usize, counts[at] as usize)).collect();
        assert_eq!(ranges, zone.ranges(ranks), "ranges of expert {expert}");
        assert_eq!(counts[1 + expert] as usize, zone.rows.len(), "rows of expert {expert}");
        assert_eq!(counts[1 + zones.len() + expert] as usize, zone.first, "the first row of expert {expert}");
        for (index, row) in zone.rows.iter().enumerate().take(room) {
            let (place, what) = (zone.first + index, format!("{element:?}: row {index} of expert {expert}"));
            let (mut bytes, mut of_row) = sent_row(element, &row.row, row.source, row.token);
            if lost == Some(row.source) {
                (bytes, of_row) = (vec![0; bytes.len()], vec![0; of_row.len()]);
            }
            assert!(rows[place * row_bytes..][..row_bytes] == bytes, "{what}");
            assert_eq!(word(&tokens, place), row.token as u32, "{what}");
            let info = word(&info, place);
            assert_eq!((info >> 21, info & 31), (row.source as u32, row.k as u32), "{what}");
            let found: Vec<_> =
                (0..words).flat_map(|at| word(&scales, (expert * words + at) * room + index).to_le_bytes()).collect();
            assert_eq!(found, of_row, "scales of {what}");
        }
        for place in zone.first + zone.rows.len()..zone.first + room {
            let is_kept = rows[place * row_bytes..][..row_bytes].iter().all(|&byte| byte == 0xa5)
                && word(&tokens, place) == 0xa5a5_a5a5
                && (0..words).all(|at| word(&scales, (expert * words + at) * room + place - zone.first) == 0xa5a5_a5a5);
            assert!(is_kept || !is_filled, "{element:?}: something was written past the rows of expert {expert}");
        }
    }
    Ok(())
}

/// Makes the memory of a rank's tokens, and calls with them.
pub(super) fn with_tokens<T>(
    rank: &Rank,
    shape: &Shape,
    element: Element,
    mine: &Batch,
    visit: impl FnOnce(&Tokens<'_>) -> Result<T, EpError>,
) -> Result<T, EpError> {
    let memory = |bytes: &[u8]| -> Result<MemorySlice, EpError> {
        let memory = Memory::new(rank.device(), MemoryKind::Device, bytes.len().max(16) as u64)?.whole();
        memory.write(0, bytes)?;
        Ok(memory)
    };
    let (me, count) = (rank.rank() as usize, mine.tokens(shape));
    let sent = |token: usize| sent_row(element, mine.row(shape, token), me, token);
    let rows = match element {
        Element::Opaque { .. } => (0..count).flat_map(|token| sent(token).0).collect(),
        _ => kind_of(element).bytes(&mine.rows),
    };
    let (rows, ids) = (memory(&rows)?, memory(bytemuck::cast_slice(&mine.experts))?);
    let scales = memory(&(0..count).flat_map(|token| sent(token).1).collect::<Vec<_>>())?;
    let weights = memory(bytemuck::cast_slice(&mine.weights))?;
    let tokens = Tokens::new(&rows, Ids::I32(&ids), count as u32).weights(&weights);
    let is_given = matches!(element, Element::Opaque { scale_bytes: 1.., .. });
    visit(&if is_given { tokens.scales(&scales) } else { tokens })
}

/// Puts rows of an element into the layout: in memory that it allocated, and in memory of the program.
pub fn details(
    rank: &Rank,
    comm: &Communicator,
    config: &GroupConfig,
    element: Element,
    shape: &Shape,
    max: usize,
) -> Result<(), EpError> {
    let me = rank.rank() as usize;
    let group = Group::new(comm, &config.element(element))?;
    let own = Permuted::new(&group, Layout::ExpertMajorFixed, 0)?;
    let places = Permuted::without_rows(&group, Layout::ExpertMajorFixed, 0)?;
    let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
    let room = own.capacity() as usize / shape.local();
    let ways: &[bool] = if reaches_all(comm, shape)? { &[false, true] } else { &[false] };
    for (number, &arrives) in ways.iter().cycle().take(4 * ways.len()).enumerate() {
        let round = number / ways.len();
        let routing = [Routing::Holes, Routing::Repeats, Routing::None, Routing::Zipf][round];
        let count = |rank: usize| (max - rank % 2) * ((rank + round + 1) % 3) / 2;
        let make = |rank: usize| batch(shape, routing, number as u64, rank, count(rank));
        let batches: Vec<Batch> = (0..shape.ranks).map(make).collect();
        let zones = fixed(shape, &batches, me, room);
        let stored = Stored::new(rank, &group, &places)?;
        let foreign = places.with_memory(&stored.memory())?;
        for (to, is_filled) in [(&own, false), (&foreign, true)] {
            with_tokens(rank, shape, element, &batches[me], |tokens| {
                if arrives {
                    slot.exchange_into(&stream, tokens, to)?.0.release();
                } else {
                    let mut received = slot.exchange(&stream, tokens)?;
                    received.permute(&stream, to)?;
                    received.release();
                }
                Ok(stream.synchronize()?)
            })?;
            // Tokens that name an expert twice may fill more than its zone.
            let is_over = zones.iter().any(|zone| zone.rows.len() > room);
            let report = group.status()?.map(|report| report.code);
            assert_eq!(report, is_over.then_some(Code::TooManyRows), "{element:?} {routing:?}");
            compare((&group, to), &zones, element, (shape.ranks, None), is_filled)?;
        }
    }
    drop(slot);
    group.destroy()
}

/// The last rank sends the metadata of its rows, and no row. The others have zeros in place of its rows and scales.
pub fn described_only(
    rank: &Rank,
    comm: &Communicator,
    (config, deadline): (&GroupConfig, Deadline),
    (element, shape): (Element, &Shape),
    max: usize,
) -> Result<(), EpError> {
    let (me, last) = (rank.rank() as usize, shape.ranks - 1);
    let group = Group::new(comm, &config.deadline(deadline).element(element))?;
    let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
    let to = Permuted::new(&group, Layout::ExpertMajorFixed, 0)?;
    let room = to.capacity() as usize / shape.local();
    for is_whole in [true, true, false] {
        let batches: Vec<Batch> = (0..shape.ranks).map(|rank| batch(shape, Routing::Uniform, 5, rank, max)).collect();
        let zones = fixed(shape, &batches, me, room);
        with_tokens(rank, shape, element, &batches[me], |tokens| {
            if me == last && !is_whole {
                let rows = Memory::new(rank.device(), MemoryKind::Device, (2 * max * shape.hidden) as u64)?.whole();
                let sums = gin_ep::Combine::reduced().into(&rows);
                let gin_ep::Fused { comm, arena, slot, tokens, shared, .. } =
                    slot.fuse(&stream, tokens, gin_ep::Rows::At(&returned_rows(rank, &group)?), &sums)?;
                let launch = LaunchConfig::new(1, 128).dynamic_shared(shared);
                // Safety: one block, with the parameters of the slot.
                unsafe { hardware_send_metadata::launch(&stream, launch, comm, arena, slot, tokens)? };
                return Ok(stream.synchronize()?);
            }
            slot.exchange_into(&stream, tokens, &to)?.0.release();
            stream.synchronize()?;
            compare((&group, &to), &zones, element, (shape.ranks, (!is_whole).then_some(last)), false)
        })?;
        let is_lost = !is_whole && me != last;
        assert_eq!(state(&group)?, if is_lost { (Some((Code::Silent, last)), 1 << last) } else { (None, 0) });
        rank.barrier()?;
    }
    drop(slot);
    group.destroy()
}

/// Returns memory in the places of received rows.
fn returned_rows(rank: &Rank, group: &Group) -> Result<MemorySlice, EpError> {
    let sizes = group.sizes();
    filled(rank, sizes.combine_room() * u64::from(sizes.combine_bytes))
}
