// SPDX-License-Identifier: MIT OR Apache-2.0
//! Shared by the tests of dispatch and combine, on virtual GPUs here and on real ones in `gpu-tests`.

use gin_ep::{
    Code, Combine, Element, EpError, Group, GroupConfig, Ids, Layout, Number, Permuted, Received, ReceivedRow, Rows,
    Scales, Tokens,
};
use gin_ep_oracle::{Batch, Experts, Kind, Routing, Shape, batch, per_rank, per_rank_f32, rank_major};
use gin_gpu::{DeviceKind, LaunchConfig, Memory, MemoryKind, MemorySlice, Stream};
use gin_host::comm::Communicator;
use gin_host::world::Rank;
use gpu_tests_kernels::experts::{hardware_experts, hardware_experts_each, hardware_experts_f32, hardware_fused};
use gpu_tests_kernels::hardware_spin;
use std::sync::Arc;

#[allow(dead_code, reason = "tests use different parts")]
pub mod fixed;
#[allow(dead_code, reason = "tests use different parts")]
pub mod graphs;
pub mod layouts;
#[allow(dead_code, reason = "tests use different parts")]
pub mod metadata;
#[allow(dead_code, reason = "tests use different parts")]
pub mod shared;
pub mod slots;

/// The memory of one rank's tokens.
pub struct Input {
    rank: u32,
    pub rows: MemorySlice,
    pub ids: MemorySlice,
    pub weights: MemorySlice,
    pub output: MemorySlice,
}

impl Input {
    pub fn new(rank: &Rank, shape: &Shape, max: usize) -> Result<Self, EpError> {
        let memory = |bytes: usize| -> Result<MemorySlice, EpError> {
            Ok(Memory::new(rank.device(), MemoryKind::Device, bytes as u64)?.whole())
        };
        let (row, ids) = (2 * shape.hidden, max * shape.topk);
        Ok(Self {
            rank: rank.rank(),
            rows: memory(max * row)?,
            ids: memory(8 * ids)?,
            weights: memory(4 * ids)?,
            output: memory(max * row)?,
        })
    }

    pub fn write(&self, batch: &Batch, wide: bool) -> Result<(), EpError> {
        self.rows.write(0, &batch.rows)?;
        if wide {
            self.ids.write(0, &batch.experts.iter().map(|&id| i64::from(id)).collect::<Vec<_>>())?;
        } else {
            self.ids.write(0, &batch.experts)?;
        }
        self.weights.write(0, &batch.weights)?;
        // Elements that no kernel writes show.
        self.output.write(0, &vec![0x7fffu16; self.output.bytes() as usize / 2])?;
        Ok(())
    }

    /// Compares the first elements of the output with the oracle.
    pub fn compare(&self, expected: &[u16], what: std::fmt::Arguments<'_>) -> Result<(), EpError> {
        let mut found = vec![0u16; expected.len()];
        self.output.read(0, &mut found)?;
        assert!(expected == found, "the output of rank {} differs: {what}", self.rank);
        Ok(())
    }

    pub fn tokens(&self, count: usize, wide: bool) -> Tokens<'_> {
        let ids = if wide { Ids::I64(&self.ids) } else { Ids::I32(&self.ids) };
        Tokens::new(&self.rows, ids, count as u32).weights(&self.weights)
    }
}

/// Compares rows at their places in memory. One copy brings all: while other ranks' kernels wait on the GPU, each copy
/// takes milliseconds.
pub fn compare_rows(
    memory: &MemorySlice,
    hidden: usize,
    expected: &[(usize, Vec<u16>)],
    what: std::fmt::Arguments<'_>,
) -> Result<(), EpError> {
    let rows = expected.iter().map(|(place, _)| place + 1).max().unwrap_or(0);
    let mut found = vec![0u16; rows * hidden];
    memory.read(0, &mut found)?;
    for (place, expected) in expected {
        let found = &found[place * hidden..][..hidden];
        assert!(expected == found, "{what}: row {place}: {expected:?}, found {found:?}");
    }
    Ok(())
}

/// Compares what was received with the oracle.
pub fn compare(received: &Received<'_>, shape: &Shape, batches: &[Batch], rank: usize) -> Result<(), EpError> {
    let expected = rank_major(shape, batches, rank);
    let found = received.fetch()?;
    for (source, (expected, found)) in expected.iter().zip(&found).enumerate() {
        assert_eq!(expected.len(), found.len(), "{shape:?}: rows from {source} at {rank}");
        for (index, (expected, found)) in expected.iter().zip(found).enumerate() {
            let is_same = (expected.token as u32, &expected.experts, &expected.weights)
                == (found.token, &found.experts, &found.weights)
                && bytemuck::cast_slice::<u16, u8>(&expected.row) == found.row;
            assert!(is_same, "{shape:?}: row {index} from {source} at {rank}: {expected:?}, found {found:?}");
        }
    }
    Ok(())
}

/// One pair of dispatch and combine.
pub struct Pair {
    pub routing: Routing,
    /// Tokens of the ranks, round and round.
    pub counts: &'static [usize],
    /// Ids of 64 bits, the number of tokens on the device, send and receive in one kernel.
    pub alternative: bool,
}

/// Returns the shape of launches of experts.
fn experts_launch(rank: &Rank, shape: &Shape) -> LaunchConfig {
    match rank.device().kind() {
        DeviceKind::Cuda => LaunchConfig::new(128, 256),
        // A virtual GPU takes long for a thread.
        DeviceKind::Virtual => {
            LaunchConfig::new(if shape.ranks > 8 { 1 } else { 4 }, if shape.hidden > 1024 { 256 } else { 32 })
        }
    }
}

/// Runs the experts of the oracle on what was received, in place.
pub fn experts(rank: &Rank, stream: &Arc<dyn Stream>, shape: &Shape, received: &Received<'_>) -> Result<(), EpError> {
    let (local, hidden) = (shape.local() as u32, shape.hidden as u32);
    // Safety: after the receive, before the combine, on one stream.
    unsafe {
        hardware_experts::launch(stream, experts_launch(rank, shape), received.view(), rank.rank(), local, hidden)?
    };
    Ok(())
}

/// Runs them, and returns memory with their sums as FP32, in the places of the received rows.
pub fn experts_f32(
    rank: &Rank,
    stream: &Arc<dyn Stream>,
    shape: &Shape,
    received: &Received<'_>,
    max: usize,
) -> Result<MemorySlice, EpError> {
    let (local, hidden) = (shape.local() as u32, shape.hidden as u32);
    let is_shared = received.region()?.is_some();
    let rows = Memory::new(rank.device(), MemoryKind::Device, (4 * shape.ranks * max * shape.hidden) as u64)?.whole();
    let to = std::ptr::with_exposed_provenance_mut::<f32>(rows.address() as usize);
    let max = if is_shared { 0 } else { max as u32 };
    // Safety: as above, and the memory has the places.
    unsafe {
        let launch = experts_launch(rank, shape);
        hardware_experts_f32::launch(stream, launch, received.view(), rank.rank(), local, hidden, to, max)?;
    }
    Ok(rows)
}

/// Returns the numbers of the first rows from all sources, among the places of received rows.
pub fn offsets(received: &Received<'_>, ranks: usize, max: usize) -> Result<Vec<usize>, EpError> {
    let (arena, offsets) = received.offsets();
    let first = |source: usize| -> Result<usize, EpError> {
        let mut word = [0u32];
        let Some(offset) = offsets.offset(source as u32) else { return Ok(source * max) };
        // The lower half of a word.
        arena.read(offset, &mut word)?;
        Ok(word[0] as usize)
    };
    (0..ranks).map(first).collect()
}

/// Returns a copy of the received rows, in memory of their places.
pub fn copied(
    rank: &Rank,
    stream: &Arc<dyn Stream>,
    received: &Received<'_>,
    shape: &Shape,
    max: usize,
) -> Result<MemorySlice, EpError> {
    let row = 2 * shape.hidden;
    let rows = Memory::new(rank.device(), MemoryKind::Device, (shape.ranks * max * row) as u64)?.whole();
    stream.synchronize()?;
    for (first, of) in offsets(received, shape.ranks, max)?.into_iter().zip(received.fetch()?) {
        let bytes = of.into_iter().map(|row| row.row).collect::<Vec<_>>().concat();
        if !bytes.is_empty() {
            rows.write((first * row) as u64, &bytes)?;
        }
    }
    Ok(rows)
}

/// Runs pairs on a rank, and compares each with the oracle.
pub fn pairs(
    rank: &Rank,
    comm: &Communicator,
    config: &GroupConfig,
    shape: &Shape,
    max: usize,
    pairs: &[Pair],
) -> Result<(), EpError> {
    let me = rank.rank() as usize;
    let group = Group::new(comm, config)?;
    let input = Input::new(rank, shape, max)?;
    let combine_f32 = group.sizes().combine_bytes as usize == 4 * shape.hidden;
    let count_at = Memory::new(rank.device(), MemoryKind::Device, 4)?.whole();
    let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
    for (number, pair) in pairs.iter().enumerate() {
        let make = |rank: usize| {
            let tokens = pair.counts[(rank + number) % pair.counts.len()].min(max);
            batch(shape, pair.routing, number as u64, rank, tokens)
        };
        let batches: Vec<Batch> = (0..shape.ranks).map(make).collect();
        let (mine, wide) = (&batches[me], pair.alternative);
        input.write(mine, wide)?;
        let mut tokens = input.tokens(mine.tokens(shape), wide);
        if wide {
            count_at.write(0, &[mine.tokens(shape) as u32])?;
            tokens = tokens.count(Number::At(&count_at));
        }
        let received = if pair.alternative {
            slot.exchange(&stream, &tokens)?
        } else {
            slot.dispatch(&stream, &tokens)?.receive(&stream)?
        };
        stream.synchronize()?;
        compare(&received, shape, &batches, me)?;
        let rows = if combine_f32 {
            Some(experts_f32(rank, &stream, shape, &received, max)?)
        } else {
            experts(rank, &stream, shape, &received)?;
            // Others load the rows of some ranks, and other ranks store theirs, in the same combine.
            if (number + me) % 3 == 1 { Some(copied(rank, &stream, &received, shape, max)?) } else { None }
        };
        let rows = rows.as_ref().map_or(Rows::InPlace, Rows::At);
        received.combine(&stream, rows, &Combine::reduced().into(&input.output))?;
        stream.synchronize()?;
        assert_eq!(group.status()?, None, "{shape:?} {:?}", pair.routing);
        let expected = if combine_f32 { per_rank_f32 } else { per_rank }(shape, mine, &[], Experts);
        input.compare(&expected, format_args!("{shape:?} {:?}, pair {number}", pair.routing))?;
    }
    drop(slot);
    group.destroy()
}

/// Runs pairs that nothing separates, with counts from a hash. Compares every 97th and the last one with the oracle.
pub fn free_running(
    rank: &Rank,
    comm: &Communicator,
    config: &GroupConfig,
    shape: &Shape,
    max: usize,
    pairs: u64,
) -> Result<(), EpError> {
    let group = Group::new(comm, config)?;
    free_running_in(rank, &group, shape, max, pairs)?;
    group.destroy()
}

fn free_running_in(rank: &Rank, group: &Group, shape: &Shape, max: usize, pairs: u64) -> Result<(), EpError> {
    const CHECKED: u64 = 97;
    let me = rank.rank() as usize;
    // Batches of several sizes, used round and round.
    let count = |number: u64, rank: usize| {
        // Steele, Lea, Flood 2014.
        let word = (number << 32 | rank as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (word ^ word >> 31) as usize % (max + 1)
    };
    let make = |number: u64| -> Vec<Batch> {
        let routing = [Routing::Uniform, Routing::Holes, Routing::Repeats][number as usize % 3];
        (0..shape.ranks).map(|rank| batch(shape, routing, number, rank, count(number, rank))).collect()
    };
    let all: Vec<Vec<Batch>> = (0..8).map(make).collect();
    let inputs = (0..8).map(|_| Input::new(rank, shape, max)).collect::<Result<Vec<_>, _>>()?;
    for (input, batches) in inputs.iter().zip(&all) {
        input.write(&batches[me], false)?;
    }
    let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
    for number in 0..pairs {
        let index = (number * 5 % 8) as usize;
        let (input, mine) = (&inputs[index], &all[index][me]);
        let received = slot.exchange(&stream, &input.tokens(mine.tokens(shape), false))?;
        let is_checked = number % CHECKED == 0 || number + 1 == pairs;
        if number % 11 == 10 && !is_checked {
            // A dispatch without a combine.
            received.release();
            continue;
        }
        experts(rank, &stream, shape, &received)?;
        received.combine(&stream, Rows::InPlace, &Combine::reduced().into(&input.output))?;
        if is_checked {
            stream.synchronize()?;
            let expected = per_rank(shape, mine, &[], Experts);
            input.compare(&expected, format_args!("pair {number}"))?;
            input.output.write(0, &vec![0x7fffu16; expected.len()])?;
        }
    }
    stream.synchronize()?;
    assert_eq!((group.status()?, group.masked(0)?), (None, 0));
    Ok(())
}

/// Runs free-running pairs while another kernel holds all SMs of the rank's GPU but one, which has room for one
/// block of a dispatch or a combine. `sms` is their number.
pub fn beside_a_kernel(
    rank: &Rank,
    comm: &Communicator,
    config: &GroupConfig,
    shape: &Shape,
    max: usize,
    sms: u32,
) -> Result<(), EpError> {
    const LIMIT_NS: u64 = 20_000_000_000;
    let group = Group::new(comm, config)?;
    let words = Memory::new(rank.device(), MemoryKind::Pinned, 16)?;
    words.write(0, &[0u64; 2])?;
    let word = |offset: u64| std::ptr::with_exposed_provenance_mut::<u64>((words.address() + offset) as usize);
    let stream = rank.stream()?;
    // Safety: the words outlive the wait for the stream.
    unsafe { hardware_spin::launch(&stream, LaunchConfig::new(sms - 1, 32), word(0), word(8), LIMIT_NS)? };
    let mut started = [0u64];
    while started[0] < u64::from(sms - 1) {
        words.read(8, &mut started)?;
        std::thread::yield_now();
    }
    let outcome = free_running_in(rank, &group, shape, max, 40);
    assert!(!stream.is_idle()?, "the other kernel has ended");
    words.write(0, &[1u64])?;
    stream.synchronize()?;
    outcome?;
    group.destroy()
}

/// Replays a graph of one pair with other counts, ids and rows each time, and compares each with the oracle.
pub fn replays(
    rank: &Rank,
    comm: &Communicator,
    config: &GroupConfig,
    shape: &Shape,
    max: usize,
    replays: u64,
) -> Result<(), EpError> {
    let me = rank.rank() as usize;
    let group = Group::new(comm, config)?;
    let input = Input::new(rank, shape, max)?;
    let count_at = Memory::new(rank.device(), MemoryKind::Device, 4)?.whole();
    let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
    let tokens = input.tokens(0, true).count(Number::At(&count_at));
    let graph = stream.capture(|| -> Result<(), EpError> {
        let received = slot.exchange(&stream, &tokens)?;
        experts(rank, &stream, shape, &received)?;
        received.combine(&stream, Rows::InPlace, &Combine::reduced().into(&input.output))
    })?;
    for number in 0..replays {
        let mine = batch(shape, Routing::Uniform, number, me, (number as usize * 3 + me) % (max + 1));
        input.write(&mine, true)?;
        count_at.write(0, &[mine.tokens(shape) as u32])?;
        // Safety: memory and group outlive the graph, and all ranks replay theirs as often.
        unsafe { stream.replay(&*graph)? };
        stream.synchronize()?;
        is_whole(&group, &format_args!("replay {number} of {me}"))?;
        let expected = per_rank(shape, &mine, &[], Experts);
        input.compare(&expected, format_args!("replay {number}"))?;
    }
    assert_eq!((group.status()?, group.masked(0)?), (None, 0));
    drop((graph, slot));
    group.destroy()
}

/// Requires that no rank was silent and nothing was dropped: that would be the cause of other bytes.
fn is_whole(group: &Group, what: &dyn std::fmt::Display) -> Result<(), EpError> {
    assert_eq!((group.status()?, group.masked(0)?), (None, 0), "{what}");
    Ok(())
}

/// Returns a row for each id, and compares their weighted sums with the oracle.
pub fn combine_at_source(
    rank: &Rank,
    comm: &Communicator,
    config: &GroupConfig,
    shape: &Shape,
    max: usize,
) -> Result<(), EpError> {
    let me = rank.rank() as usize;
    let group = Group::new(comm, &config.combine_at_source())?;
    let input = Input::new(rank, shape, max)?;
    let memory = |bytes: usize| -> Result<MemorySlice, EpError> {
        Ok(Memory::new(rank.device(), MemoryKind::Device, bytes as u64)?.whole())
    };
    let rows = memory(shape.ranks * max * shape.topk * 2 * shape.hidden)?;
    let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
    let bias = memory(input.output.bytes() as usize)?;
    // Numbers that a sum starts from: the bias has odd ones, the output even ones.
    let start = |token: usize, column: usize| ((2 * token + 1) % 64 + column % 2 * 64) as f32;
    let old = |token: usize, column: usize| ((2 * column + 2 * token) % 128) as f32;
    let made = |value: &dyn Fn(usize, usize) -> f32| Kind::Bf16.rows(max, shape.hidden, value);
    for (number, (routing, is_plain, adds)) in [
        (Routing::Uniform, false, false),
        (Routing::Holes, true, false),
        (Routing::Repeats, false, true),
        (Routing::None, false, false),
        (Routing::Holes, true, true),
    ]
    .into_iter()
    .enumerate()
    {
        let batches: Vec<Batch> =
            (0..shape.ranks).map(|rank| batch(shape, routing, number as u64, rank, max - rank % 2)).collect();
        let mine = &batches[me];
        input.write(mine, false)?;
        let received = slot.exchange(&stream, &input.tokens(mine.tokens(shape), false))?;
        let (local, hidden) = (shape.local() as u32, shape.hidden as u32);
        let to = std::ptr::without_provenance_mut::<u16>(rows.address() as usize);
        // Safety: after the receive, before the combine, on one stream; the memory has a row for each id.
        unsafe {
            let (view, shape) = (received.view(), LaunchConfig::new(4, 64));
            hardware_experts_each::launch(&stream, shape, view, rank.rank(), local, hidden, to, max as u32)?;
        }
        let terms = if is_plain { Combine::plain() } else { Combine::weighted(&input.weights) };
        let mut combine = terms.into(&input.output);
        if adds {
            bias.write(0, &made(&start))?;
            input.output.write(0, &made(&old))?;
            combine = combine.bias(&bias).accumulate();
        }
        received.combine(&stream, Rows::At(&rows), &combine)?;
        stream.synchronize()?;
        is_whole(&group, &format_args!("{routing:?} at {me}"))?;
        let ones = Batch { weights: vec![1.0; mine.weights.len()], ..mine.clone() };
        let expected = gin_ep_oracle::combine_at_source_from(
            shape,
            if is_plain { &ones } else { mine },
            &[],
            Experts,
            &|token, column| {
                if adds { start(token, column) + old(token, column) } else { 0.0 }
            },
        );
        input.compare(&expected, format_args!("{routing:?}"))?;
    }
    assert_eq!(group.status()?, None);
    drop(slot);
    group.destroy()
}

/// Counts the routing once, for dispatches of the same ids with other rows and weights, and compares each with the
/// oracle. A dispatch of other ids comes between them.
pub fn planned(
    rank: &Rank,
    comm: &Communicator,
    config: &GroupConfig,
    shape: &Shape,
    max: usize,
) -> Result<(), EpError> {
    let me = rank.rank() as usize;
    let group = Group::new(comm, config)?;
    let input = Input::new(rank, shape, max)?;
    let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
    let make = |routing: Routing, key: u64| -> Vec<Batch> {
        (0..shape.ranks).map(|rank| batch(shape, routing, key, rank, max - rank)).collect()
    };
    let first = make(Routing::Holes, 0);
    input.write(&first[me], false)?;
    let plan = slot.plan(&stream, &input.tokens(first[me].tokens(shape), false))?;
    for number in 0..4 {
        let mut batches = make(Routing::Repeats, number);
        if number != 2 {
            batches.iter_mut().zip(&first).for_each(|(batch, first)| batch.experts.clone_from(&first.experts));
        }
        let mine = &batches[me];
        input.write(mine, false)?;
        let tokens = input.tokens(mine.tokens(shape), false);
        let tokens = if number == 2 { tokens } else { tokens.planned(&plan) };
        let received = slot.dispatch(&stream, &tokens)?.receive(&stream)?;
        stream.synchronize()?;
        compare(&received, shape, &batches, me)?;
        experts(rank, &stream, shape, &received)?;
        received.combine(&stream, Rows::InPlace, &Combine::reduced().into(&input.output))?;
        stream.synchronize()?;
        is_whole(&group, &format_args!("dispatch {number} of {me}"))?;
        let expected = per_rank(shape, mine, &[], Experts);
        input.compare(&expected, format_args!("dispatch {number}"))?;
    }
    drop(slot);
    group.destroy()
}

/// Returns code and rank of the first report since the last call, and the ranks that slot 0 goes on without.
pub fn state(group: &Group) -> Result<(Option<(Code, usize)>, u64), EpError> {
    Ok((group.status()?.map(|report| (report.code, report.rank as usize)), group.masked(0)?))
}

/// Returns whether loads and stores reach all ranks.
fn reaches_all(comm: &Communicator, shape: &Shape) -> Result<bool, EpError> {
    Ok(comm.device()?.handle().lsa_size as usize == shape.ranks)
}

/// Returns the type of returned elements.
fn kind_of(element: Element) -> Kind {
    match element {
        Element::F16 => Kind::F16,
        Element::F32 => Kind::F32,
        _ => Kind::Bf16,
    }
}

/// Returns the bytes of a token's row and of its scales, as receivers have them.
pub fn sent_row(element: Element, row: &[u16], source: usize, token: usize) -> (Vec<u8>, Vec<u8>) {
    let opaque = |bytes: u32, salt: usize| (0..bytes as usize).map(|at| (at * 31 + salt * 7 + token) as u8).collect();
    match element {
        Element::Opaque { row_bytes, scale_bytes } => {
            (opaque(row_bytes, 2 * source), opaque(scale_bytes, 2 * source + 1))
        }
        Element::E4m3(scales) => {
            let (row, values) = gin_ep_oracle::quantized(row, scales != Scales::F32);
            let of = |scale: f32| match scales {
                Scales::F32 | Scales::F32Powers => scale.to_le_bytes().to_vec(),
                Scales::Ue8m0 => vec![(scale.to_bits() >> 23) as u8],
            };
            (row, values.into_iter().flat_map(of).collect())
        }
        _ => (kind_of(element).bytes(row), Vec::new()),
    }
}

/// Sends rows of an element's type without experts, and compares rows, scales and sums with the oracle.
pub fn element(
    rank: &Rank,
    comm: &Communicator,
    config: &GroupConfig,
    element: Element,
    shape: &Shape,
    max: usize,
) -> Result<(), EpError> {
    let me = rank.rank() as usize;
    let kind = kind_of(element);
    let memory = |bytes: &[u8]| -> Result<MemorySlice, EpError> {
        let memory = Memory::new(rank.device(), MemoryKind::Device, bytes.len().max(16) as u64)?.whole();
        memory.write(0, bytes)?;
        Ok(memory)
    };
    let batches: Vec<Batch> =
        (0..shape.ranks).map(|rank| batch(shape, Routing::Holes, 3, rank, max - rank % 2)).collect();
    let mine = &batches[me];
    let sent = |row: &[u16], source: usize, token: usize| sent_row(element, row, source, token);
    let tokens = mine.tokens(shape);
    let each = |of: &dyn Fn(usize) -> Vec<u8>| (0..tokens).map(of).collect::<Vec<_>>().concat();
    let rows = match element {
        Element::Opaque { .. } => each(&|token| sent(mine.row(shape, token), me, token).0),
        _ => kind.bytes(&mine.rows),
    };
    let (rows, scales) = (memory(&rows)?, memory(&each(&|token| sent(mine.row(shape, token), me, token).1))?);
    let ids = memory(bytemuck::cast_slice(&mine.experts))?;
    let weights = memory(bytemuck::cast_slice(&mine.weights))?;
    // The bias has odd numbers, the output even ones.
    let start = |token: usize, column: usize| ((2 * token + 1) % 64 + column % 2 * 64) as f32;
    let old = |token: usize, column: usize| ((2 * column + 2 * token) % 128) as f32;
    let made = |value: &dyn Fn(usize, usize) -> f32| kind.rows(tokens, shape.hidden, value);
    let (bias, output) = (memory(&made(&start))?, memory(&made(&old))?);
    let group = Group::new(comm, &config.element(element))?;
    let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
    let input = Tokens::new(&rows, Ids::I32(&ids), tokens as u32).weights(&weights);
    let has_scales = matches!(element, Element::Opaque { scale_bytes: 1.., .. });
    let plan = slot.plan(&stream, &if has_scales { input.scales(&scales) } else { input })?;
    let input = if has_scales { input.scales(&scales).planned(&plan) } else { input.planned(&plan) };
    let padded = Permuted::new(&group, Layout::ExpertMajorPadded, 0)?;
    let ways: &[bool] = if reaches_all(comm, shape)? { &[false, true] } else { &[false] };
    for &arrives in ways {
        output.write(0, &made(&old))?;
        let received = if arrives {
            slot.exchange_into(&stream, &input, &padded)?.0
        } else {
            slot.dispatch(&stream, &input)?.receive(&stream)?
        };
        stream.synchronize()?;
        is_whole(&group, &format_args!("{element:?}: dispatch of {me}"))?;
        // The returned rows: what was sent, as numbers.
        let row_bytes = group.sizes().combine_bytes as usize;
        let mut back = vec![0u8; shape.ranks * max * row_bytes];
        let back_kind = if row_bytes == 4 * shape.hidden { Kind::F32 } else { kind };
        let offsets = offsets(&received, shape.ranks, max)?;
        for (source, found) in received.fetch()?.into_iter().enumerate() {
            if arrives {
                has_copies(&padded, shape, max, source, &found)?;
            }
            let expected = &rank_major(shape, &batches, me)[source];
            assert_eq!(expected.len(), found.len(), "{element:?}: rows from {source} at {me}");
            for (index, (expected, found)) in expected.iter().zip(found).enumerate() {
                let (row, scales) = sent(&expected.row, source, expected.token);
                assert_eq!((expected.token as u32, &expected.experts), (found.token, &found.experts));
                assert!(
                    row == found.row,
                    "{element:?}: row {index} from {source} at {me}: {row:?}, found {:?}",
                    found.row
                );
                assert_eq!(scales, found.scales, "{element:?}: scales of row {index} from {source} at {me}");
                back[(offsets[source] + index) * row_bytes..][..row_bytes]
                    .copy_from_slice(&back_kind.bytes(&expected.row));
            }
        }
        let rows = memory(&back)?;
        let combine = Combine::reduced().into(&output).bias(&bias).accumulate();
        received.combine(&stream, Rows::At(&rows), &combine)?;
        stream.synchronize()?;
        is_whole(&group, &format_args!("{element:?}: combine of {me}"))?;
        let expected = gin_ep_oracle::identity(shape, mine, kind, false, &|token, column| {
            start(token, column) + old(token, column)
        });
        let mut found = vec![0u8; expected.len()];
        output.read(0, &mut found)?;
        assert!(expected == found, "{element:?}: the output of rank {me} differs");
    }
    assert_eq!(group.status()?, None);
    drop(slot);
    group.destroy()
}

/// Compares the rows of a padded layout with those received from a source.
fn has_copies(
    padded: &Permuted,
    shape: &Shape,
    max: usize,
    source: usize,
    rows: &[ReceivedRow],
) -> Result<(), EpError> {
    let memory = padded.rows().expect("there are rows");
    for expert in 0..shape.local() {
        let of_expert = rows.iter().filter(|row| row.experts.contains(&(expert as i32)));
        let expected = of_expert.map(|row| &row.row[..]).collect::<Vec<_>>().concat();
        let (first, row_bytes) = ((expert * shape.ranks + source) * max, rows.first().map_or(0, |row| row.row.len()));
        let mut found = vec![0u8; expected.len()];
        memory.read((first * row_bytes) as u64, &mut found)?;
        assert!(expected == found, "rows from {source} in the zone of expert {expert}");
    }
    Ok(())
}

/// Runs pairs in one kernel with the experts, and compares each with the oracle.
pub fn fused(rank: &Rank, comm: &Communicator, config: &GroupConfig, shape: &Shape, max: usize) -> Result<(), EpError> {
    let me = rank.rank() as usize;
    let group = Group::new(comm, &config.grid(1))?;
    let input = Input::new(rank, shape, max)?;
    let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
    for number in 0..4 {
        let mine = batch(shape, Routing::Uniform, number, me, max - me % 2);
        input.write(&mine, false)?;
        let tokens = input.tokens(mine.tokens(shape), false);
        let sums = Combine::reduced().into(&input.output);
        let fused = slot.fuse(&stream, &tokens, Rows::InPlace, &sums)?;
        let (local, hidden) = (shape.local() as u32, shape.hidden as u32);
        let launch = LaunchConfig::new(1, 128).dynamic_shared(fused.shared);
        // Safety: one block, with the parameters of the slot.
        unsafe {
            let gin_ep::Fused { comm, arena, slot, tokens, sums, .. } = fused;
            hardware_fused::launch(&stream, launch, comm, arena, slot, tokens, sums, local, hidden)?;
        }
        stream.synchronize()?;
        let expected = per_rank(shape, &mine, &[], Experts);
        input.compare(&expected, format_args!("pair {number}"))?;
    }
    assert_eq!(group.status()?, None);
    drop(slot);
    group.destroy()
}
