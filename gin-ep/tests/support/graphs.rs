// SPDX-License-Identifier: MIT OR Apache-2.0
//! Graphs of a slot's calls in any order, with calls between them.

use super::layouts::expected_rows;
use super::{Input, compare_rows, experts, is_whole, reaches_all, state};
use gin_abi::Deadline;
use gin_ep::{Code, Combine, EpError, Group, GroupConfig, Layout, Permuted, Rows, Slot};
use gin_ep_oracle::{Batch, Experts, Routing, Shape, batch, per_rank, rank_major};
use gin_gpu::{Graph, LaunchConfig, MemorySlice, Stream};
use gin_host::comm::Communicator;
use gin_host::world::Rank;
use gpu_tests_kernels::experts::hardware_experts_permuted;
use std::sync::Arc;

/// The use of the received rows of a dispatch.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Way {
    /// Experts replace them, and a combine returns them from their places.
    Combine,
    /// Experts replace them in another layout, and a combine returns them from there.
    Layout,
    /// They are copied into another layout.
    Copy,
    /// The dispatch puts them into another layout.
    Arrive,
}

/// The arena, and for each source three offsets in it: of the number of received rows, of the number of the first row
/// if sources share a region, and of the rows.
type Places = (MemorySlice, Vec<(u64, Option<u64>, u64)>);

const PACKED: Layout = Layout::ExpertMajorPacked { align: 1 };

/// The calls of a graph, all with the same tokens.
struct Calls<'a> {
    rank: &'a Rank,
    shape: &'a Shape,
    max: usize,
    ways: &'a [Way],
    tokens: usize,
    input: Input,
    batches: Vec<Batch>,
    flat: Permuted,
    packed: Permuted,
}

impl<'a> Calls<'a> {
    fn new(
        rank: &'a Rank,
        group: &Group,
        shape: &'a Shape,
        max: usize,
        ways: &'a [Way],
        tokens: usize,
    ) -> Result<Self, EpError> {
        let rows = (shape.ranks * max) as u32;
        Ok(Self {
            rank,
            shape,
            max,
            ways,
            tokens,
            input: Input::new(rank, shape, max)?,
            batches: Vec::new(),
            flat: Permuted::new(group, Layout::Flat, rows)?,
            packed: Permuted::new(group, PACKED, rows * shape.topk as u32)?,
        })
    }

    /// Writes other tokens. No kernel runs.
    fn write(&mut self, key: u64) -> Result<(), EpError> {
        let of = |rank: usize| batch(self.shape, Routing::Uniform, key, rank, self.tokens);
        self.batches = (0..self.shape.ranks).map(of).collect();
        self.input.write(&self.batches[self.rank.rank() as usize], false)
    }

    /// Makes the calls. Returns where the rows of the last one are.
    fn make(&self, stream: &Arc<dyn Stream>, slot: &mut Slot) -> Result<Places, EpError> {
        let (rank, shape, tokens) = (self.rank, self.shape, self.input.tokens(self.tokens, false));
        let sums = Combine::reduced().into(&self.input.output);
        let mut places = None;
        for way in self.ways {
            let mut received = match way {
                Way::Arrive => slot.exchange_into(stream, &tokens, &self.packed)?.0,
                _ => slot.exchange(stream, &tokens)?,
            };
            let (arena, offsets) = received.offsets();
            let of = |source: u32| (offsets.got(source), offsets.offset(source), offsets.rows(source));
            places = Some((arena.clone(), (0..shape.ranks as u32).map(of).collect()));
            match way {
                Way::Combine => {
                    experts(rank, stream, shape, &received)?;
                    received.combine(stream, Rows::InPlace, &sums)?;
                }
                Way::Layout => {
                    let view = received.permute(stream, &self.flat)?;
                    let (local, hidden) = (shape.local() as u32, shape.hidden as u32);
                    let launch = LaunchConfig::new(4, 64);
                    // Safety: after the layout, before the combine, on one stream.
                    unsafe {
                        hardware_experts_permuted::launch(
                            stream,
                            launch,
                            view,
                            rank.rank(),
                            local,
                            hidden,
                            self.max as u32,
                        )?;
                    }
                    received.combine(stream, Rows::Permuted(&self.flat), &sums)?;
                }
                Way::Copy => {
                    received.permute(stream, &self.packed)?;
                    received.release();
                }
                Way::Arrive => received.release(),
            }
        }
        Ok(places.expect("there are calls"))
    }

    /// Compares what the calls have stored with the oracle.
    fn check(&self, what: std::fmt::Arguments<'_>) -> Result<(), EpError> {
        let me = self.rank.rank() as usize;
        if self.ways.iter().any(|way| matches!(way, Way::Combine | Way::Layout)) {
            self.input.compare(&per_rank(self.shape, &self.batches[me], &[], Experts), what)?;
        }
        if self.ways.iter().any(|way| matches!(way, Way::Copy | Way::Arrive)) {
            let (rows, counts) = expected_rows(PACKED, self.shape, &self.batches, me, self.max);
            assert_eq!(self.packed.fetch_counts()?, counts, "{what}");
            compare_rows(self.packed.rows().expect("it copies rows"), self.shape.hidden, &rows, what)?;
        }
        Ok(())
    }

    /// Compares the rows at the addresses that the last call had when it was captured.
    fn check_places(&self, (arena, places): &Places, pitch: u64, what: std::fmt::Arguments<'_>) -> Result<(), EpError> {
        let expected = rank_major(self.shape, &self.batches, self.rank.rank() as usize);
        for (source, (&(got, offset, rows), expected)) in places.iter().zip(expected).enumerate() {
            let (mut count, mut first) = ([0u64], [0u32]);
            arena.read(got, &mut count)?;
            assert_eq!(count[0], expected.len() as u64, "{what}: rows from {source}");
            if let Some(offset) = offset {
                arena.read(offset, &mut first)?;
            }
            for (row, expected) in (u64::from(first[0])..).zip(expected) {
                let mut found = vec![0u16; self.shape.hidden];
                arena.read(rows + row * pitch, &mut found)?;
                assert!(found == expected.row, "{what}: row {row} from {source}");
            }
        }
        Ok(())
    }
}

/// Captures graphs of different numbers of tokens in two slots, and runs them in any order, with the same calls outside
/// of graphs between them. Some graphs only release what they receive. Runs follow each other without a wait, a few at
/// a time; then ids and rows change.
pub fn in_any_order(
    rank: &Rank,
    comm: &Communicator,
    config: &GroupConfig,
    shape: &Shape,
    max: usize,
    rounds: u64,
) -> Result<(), EpError> {
    let group = Group::new(comm, &config.slots(2))?;
    let stream = rank.stream()?;
    let mut slots = [group.slot(0)?, group.slot(1)?];
    let arrive = if reaches_all(comm, shape)? { Way::Arrive } else { Way::Copy };
    // Dispatches of a slot have two buffers in turn, so those of the first slot that only copy have the same one.
    let lists: [(usize, &[Way]); 7] = [
        (0, &[Way::Combine]),
        (0, &[Way::Copy]),
        (0, &[Way::Layout]),
        (0, &[arrive]),
        (1, &[Way::Combine]),
        (1, &[arrive]),
        (0, &[Way::Copy, Way::Combine, Way::Copy]),
    ];
    let mut all = Vec::new();
    for (number, (_, ways)) in lists.iter().enumerate() {
        all.push(Calls::new(rank, &group, shape, max, ways, max - number % max)?);
    }
    let mut graphs: Vec<(Box<dyn Graph>, Places)> = Vec::new();
    for ((slot, _), calls) in lists.iter().zip(&all) {
        let mut places = None;
        let graph = stream.capture(|| -> Result<(), EpError> {
            places = Some(calls.make(&stream, &mut slots[*slot])?);
            Ok(())
        })?;
        graphs.push((graph, places.expect("the capture succeeded")));
    }
    for round in 0..rounds {
        for (number, calls) in (0..).zip(&mut all) {
            calls.write(8 * round + number)?;
        }
        rank.barrier()?;
        // Steele, Lea, Flood 2014.
        let mut word = (round + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        let steps: Vec<_> = (0..=word % 4).map(|step| (word >> (8 + 8 * step)) as usize % 16).collect();
        for &step in &steps {
            let number = step % all.len();
            if step < 2 * all.len() - 4 {
                // Safety: memory and group outlive the graph, and all ranks replay theirs as often.
                unsafe { stream.replay(&*graphs[number].0)? };
            } else {
                all[number].make(&stream, &mut slots[lists[number].0])?;
            }
        }
        stream.synchronize()?;
        is_whole(&group, &format_args!("round {round}"))?;
        for &step in &steps {
            all[step % all.len()].check(format_args!("round {round}, {steps:?}, calls {}", step % all.len()))?;
        }
        let last = steps[steps.len() - 1];
        if last < all.len() && !lists[last].1.contains(&Way::Combine) && lists[last].1 != [Way::Layout] {
            let what = format_args!("round {round}, {steps:?}, places");
            all[last].check_places(&graphs[last].1, group.sizes().pitch.into(), what)?;
        }
        rank.barrier()?;
    }
    drop((graphs, slots));
    group.destroy()
}

/// Replays a graph that releases its rows, in one buffer again and again. The last rank leaves a replay out: the others
/// go on without it, and its rows stay as they are, until all take part again.
pub fn silent(
    rank: &Rank,
    comm: &Communicator,
    (config, deadline): (&GroupConfig, Deadline),
    shape: &Shape,
    max: usize,
) -> Result<(), EpError> {
    let (me, last) = (rank.rank() as usize, shape.ranks - 1);
    let group = Group::new(comm, &config.deadline(deadline))?;
    let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
    let mut calls = Calls::new(rank, &group, shape, max, &[Way::Copy], max)?;
    let mut places = None;
    let graph = stream.capture(|| -> Result<(), EpError> {
        places = Some(calls.make(&stream, &mut slot)?);
        Ok(())
    })?;
    let (places, pitch) = (places.expect("the capture succeeded"), group.sizes().pitch.into());
    drop(slot);
    let replay = || -> Result<(), EpError> {
        // Safety: memory and group outlive the graph, and all ranks replay theirs as often, or are silent.
        unsafe { stream.replay(&*graph)? };
        Ok(stream.synchronize()?)
    };
    calls.write(1)?;
    rank.barrier()?;
    replay()?;
    assert_eq!(state(&group)?, (None, 0));
    calls.check(format_args!("with all ranks"))?;
    rank.barrier()?;
    if me != last {
        calls.write(2)?;
        calls.batches[last] = batch(shape, Routing::Uniform, 2, last, 0);
        replay()?;
        assert_eq!(state(&group)?, (Some((Code::Silent, last)), 1 << last));
        calls.check(format_args!("without rank {last}"))?;
    }
    rank.barrier()?;
    if me == last {
        calls.check_places(&places, pitch, format_args!("a silent rank"))?;
    }
    group.readmit()?;
    for key in 3..6 {
        calls.write(key)?;
        rank.barrier()?;
        replay()?;
        assert_eq!(state(&group)?, (None, 0));
        calls.check(format_args!("with all ranks again, {key}"))?;
        calls.check_places(&places, pitch, format_args!("with all ranks again, {key}"))?;
        rank.barrier()?;
    }
    group.destroy()
}
