// SPDX-License-Identifier: MIT OR Apache-2.0
//! A rank with its tokens, whose dispatches, combines and floors are timed and checked.

use crate::Bench;
use crate::driver::sms;
use gin_abi::Deadline;
use gin_bench_kernels::ep::{EXCHANGE_WORDS, Job};
use gin_ep::{Combine, EpError, Group, GroupConfig, Ids, Layout, Permuted, ReceivedRow, Rows, Tokens};
use gin_ep_oracle::{Batch, Routing, Shape, batch, expert_major, narrow, quantized, rank_major, widen};
use gin_gpu::{Function, KernelArg, LaunchConfig, Memory, MemoryKind, MemorySlice, Stream};
use gin_host::comm::{Communicator, DeviceComm, Window, WindowFlags};
use gin_host::world::Rank;
use std::sync::Arc;

/// Figures of one group.
#[derive(Default, serde::Serialize, serde::Deserialize)]
pub(super) struct Calls {
    pub(super) dispatch: Vec<f64>,
    /// With a combine of the received rows, which their sources load.
    pub(super) pair: Vec<f64>,
    /// With a combine of rows in other memory, which are stored to their sources.
    pub(super) stored: Vec<f64>,
    /// Pairs whose dispatch and combine each begin after all ranks have met.
    pub(super) apart: Vec<f64>,
    /// A dispatch into the packed expert-major layout; a dispatch, and then this layout.
    pub(super) packed: Vec<f64>,
    pub(super) packed_later: Vec<f64>,
    /// In the same repeats: the floors of a dispatch and of a combine; for fewer SMs the dispatch and the pair
    /// of all SMs.
    pub(super) beside: [Vec<f64>; 2],
    pub(super) wrong: u64,
    pub(super) blocks: u64,
}

/// The combines of a group that are measured.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Combines {
    None,
    /// None, of rows that are dispatched as they are, with scales.
    NoneOfOpaque,
    InPlace,
    /// In place, of rows with a flat layout; also the packed layout.
    Layouts,
    /// In place and of other memory; also pairs whose ranks meet.
    All,
}

/// Returns the number by which an expert multiplies its rows.
fn factor(rank: usize, local: usize) -> f32 {
    ((rank + local) % 3 + 1) as f32
}

/// Returns element `at` of the rows of `rank`: a whole number of at most 8 bits, which differs from column to column
/// and from row to row.
fn element(rank: usize, hidden: usize, at: usize) -> u16 {
    narrow(((at * 37 + at / hidden * 11 + rank) % 511) as f32 - 255.0)
}

/// Returns the time of a call in microseconds. Graphs of `calls` calls follow each other.
pub(crate) fn chain(
    rank: &Rank,
    stream: &Arc<dyn Stream>,
    (calls, replays): (usize, usize),
    mut call: impl FnMut() -> Result<(), EpError>,
) -> Result<f64, EpError> {
    let graph = stream.capture(|| (0..calls).try_for_each(|_| call()))?;
    // Safety: memory and group outlive the graph, and all ranks launch theirs as often.
    let replay = || unsafe { stream.replay(&*graph) };
    replay()?;
    stream.synchronize()?;
    rank.barrier()?;
    replay()?;
    timed(stream, calls * replays, || (0..replays).try_for_each(|_| Ok(replay()?)))
}

/// Returns the microseconds of one of `calls` calls that `work` puts onto the stream.
fn timed(stream: &Arc<dyn Stream>, calls: usize, work: impl FnOnce() -> Result<(), EpError>) -> Result<f64, EpError> {
    let start = stream.record()?;
    work()?;
    let stop = stream.record()?;
    stream.synchronize()?;
    Ok(stop.since(&*start).map_or(0.0, |ns| ns as f64 / 1e3 / calls as f64))
}

/// A rank with its tokens.
pub(super) struct Bed<'a> {
    bench: &'a Bench,
    rank: &'a Rank,
    comm: &'a Communicator,
    shape: &'a Shape,
    tokens: usize,
    /// Tokens with rows of one element, for their routing.
    batches: Vec<Batch>,
    /// The elements of this rank's rows.
    elements: Vec<u16>,
    rows: MemorySlice,
    ids: MemorySlice,
    pub(super) output: MemorySlice,
    pub(super) stream: Arc<dyn Stream>,
    handle: DeviceComm,
    window: Window<u64>,
    kernel: Function,
}

impl<'a> Bed<'a> {
    pub(super) fn new(
        bench: &'a Bench,
        rank: &'a Rank,
        comm: &'a Communicator,
        shape: &'a Shape,
        tokens: usize,
    ) -> Result<Self, EpError> {
        let small = Shape { hidden: 1, ..*shape };
        let batches: Vec<Batch> =
            (0..shape.ranks).map(|rank| batch(&small, Routing::Uniform, 1, rank, tokens)).collect();
        let memory = |bytes: usize| -> Result<MemorySlice, EpError> {
            Ok(Memory::new(rank.device(), MemoryKind::Device, bytes as u64)?.whole())
        };
        let me = rank.rank() as usize;
        let all = tokens * shape.hidden;
        let elements: Vec<u16> = (0..all).map(|at| element(me, shape.hidden, at)).collect();
        let (rows, ids, output) = (memory(2 * all)?, memory(4 * tokens * shape.topk)?, memory(2 * all)?);
        rows.write(0, &elements)?;
        ids.write(0, &batches[me].experts)?;
        let words = EXCHANGE_WORDS + shape.ranks * all / 4;
        let window = comm.alloc_window::<u64>(words, WindowFlags::NONE)?;
        let (handle, kernel, stream) = (comm.device()?, rank.kernel("bare_exchange")?, rank.stream()?);
        let bed = Self {
            bench,
            rank,
            comm,
            shape,
            tokens,
            batches,
            elements,
            rows,
            ids,
            output,
            stream,
            handle,
            window,
            kernel,
        };
        Ok(bed)
    }

    fn memory(&self, bytes: usize) -> Result<MemorySlice, EpError> {
        Ok(Memory::new(self.rank.device(), MemoryKind::Device, bytes as u64)?.whole())
    }

    /// Returns calls and replays of a chain.
    pub(super) fn length(&self) -> (usize, usize) {
        // Nine repeats of them are more than 1,000 calls.
        let few = if self.tokens >= 512 { (20, 6) } else { (20, 10) };
        self.bench.pick(few, (1, 1))
    }

    pub(super) fn input(&self) -> Tokens<'_> {
        Tokens::new(&self.rows, Ids::I32(&self.ids), self.tokens as u32)
    }

    pub(super) fn config(&self) -> GroupConfig {
        let shape = self.shape;
        let config = GroupConfig::new(shape.experts as u32, shape.hidden as u32, shape.topk as u32)
            .tokens(self.tokens as u32)
            .deadline(Deadline::after_ns(self.bench.limit_ns()));
        if self.bench.is_real() { config } else { config.sms(1).threads(64) }
    }

    /// Counts wrong rows after a pair. From each of its ranks a row comes back that the experts there have multiplied.
    fn wrong(&self) -> Result<u64, EpError> {
        let (hidden, me) = (self.shape.hidden, self.rank.rank() as usize);
        let mut sums = vec![0u16; self.tokens * hidden];
        self.output.read(0, &mut sums)?;
        let mut wrong = 0;
        for token in 0..self.tokens {
            let places = self.batches[me].places(&Shape { hidden: 1, ..*self.shape }, token);
            let mut factors = vec![0.0; self.shape.ranks];
            for (_, rank, local, _) in places {
                factors[rank] += factor(rank, local);
            }
            let row = &self.elements[token * hidden..][..hidden];
            let sum = |x: u16| factors.iter().map(|factor| widen(narrow(factor * widen(x)))).sum();
            let expected = row.iter().map(|&x| narrow(sum(x)));
            wrong += u64::from(!expected.eq(sums[token * hidden..][..hidden].iter().copied()));
        }
        Ok(wrong)
    }

    /// Counts wrong rows of FP8, of the first ones from each rank with elements that this rank knows: its own.
    fn wrong_fp8(&self, received: &gin_ep::Received<'_>) -> Result<u64, EpError> {
        let (hidden, me) = (self.shape.hidden, self.rank.rank() as usize);
        let mut wrong = 0;
        for row in received.fetch()?[me].iter().take(64) {
            let (expected, scales) = quantized(&self.elements[row.token as usize * hidden..][..hidden], false);
            let scales: Vec<u8> = scales.into_iter().flat_map(f32::to_le_bytes).collect();
            wrong += u64::from(expected != row.row || scales != row.scales);
        }
        Ok(wrong)
    }

    /// Counts wrong rows that were dispatched as they are, of the first ones of this rank itself.
    fn wrong_opaque(&self, received: &gin_ep::Received<'_>) -> Result<u64, EpError> {
        let bytes: Vec<u8> = self.elements.iter().flat_map(|element| element.to_le_bytes()).collect();
        let sent = |token: u32, each: usize| &bytes[token as usize * each..][..each];
        let (hidden, me) = (self.shape.hidden, self.rank.rank() as usize);
        let is_wrong =
            |row: &ReceivedRow| row.row != sent(row.token, hidden) || row.scales != sent(row.token, hidden / 32);
        Ok(received.fetch()?[me].iter().take(64).filter(|row| is_wrong(row)).count() as u64)
    }

    /// Counts wrong rows of an expert-major layout without gaps in its zones, of some of all experts and sources.
    pub(super) fn wrong_layout(&self, to: &Permuted) -> Result<u64, EpError> {
        let (hidden, me) = (self.shape.hidden, self.rank.rank() as usize);
        let small = Shape { hidden: 1, ..*self.shape };
        let (mut expected, mut zones) = (Vec::new(), vec![0; self.shape.local() * self.shape.ranks]);
        for (expert, zone) in expert_major(&small, &self.batches, me, 1).into_iter().enumerate() {
            for (index, row) in zone.rows.into_iter().enumerate() {
                let zone = expert * self.shape.ranks + row.source;
                let place = match to.layout() {
                    Layout::ExpertMajorPadded => zone * self.tokens + zones[zone],
                    Layout::ExpertMajorFixed => expert * self.shape.ranks * self.tokens + index,
                    _ => expected.len(),
                };
                zones[zone] += 1;
                expected.push((place, row));
            }
        }
        let (mut found, mut wrong) = (vec![0u16; hidden], 0);
        for (place, row) in expected.iter().step_by(expected.len() / 64 + 1) {
            if let Some(rows) = to.rows() {
                rows.read((place * 2 * hidden) as u64, &mut found)?;
            }
            let elements = (row.token * hidden..(row.token + 1) * hidden).map(|at| element(row.source, hidden, at));
            wrong += u64::from(!elements.eq(found.iter().copied()));
        }
        Ok(wrong)
    }

    /// Counts wrong sums of rows of which each id returned a copy.
    pub(super) fn wrong_sums_of_ids(&self) -> Result<u64, EpError> {
        let mut sums = vec![0u16; self.tokens * self.shape.hidden];
        self.output.read(0, &mut sums)?;
        let times = self.shape.topk as f32;
        let is_wrong = |(sum, x): (&u16, &u16)| *sum != narrow(times * widen(*x));
        Ok(sums.iter().zip(&self.elements).filter(|&(sum, x)| is_wrong((sum, x))).count() as u64)
    }

    /// Returns what this rank's experts make of the received rows, by source.
    fn products(&self, received: &gin_ep::Received<'_>) -> Result<Vec<Vec<u8>>, EpError> {
        let me = self.rank.rank() as usize;
        let of_row = |row: gin_ep::ReceivedRow| {
            let experts = row.experts.iter().filter_map(|&local| usize::try_from(local).ok());
            let factor: f32 = experts.map(|local| factor(me, local)).sum();
            let product = move |two: [u8; 2]| narrow(factor * widen(u16::from_le_bytes(two))).to_le_bytes();
            row.row.chunks_exact(2).flat_map(|two| product([two[0], two[1]])).collect::<Vec<u8>>()
        };
        Ok(received.fetch()?.into_iter().map(|rows| rows.into_iter().flat_map(of_row).collect()).collect())
    }

    /// Runs the experts on the rows of the first dispatch of a slot, in place.
    fn run_experts(&self, received: &gin_ep::Received<'_>) -> Result<(), EpError> {
        let (arena, offsets) = received.offsets();
        for (source, bytes) in (0..).zip(self.products(received)?).filter(|(_, bytes)| !bytes.is_empty()) {
            // The lower half of a word.
            let mut first = [0u32];
            if let Some(offset) = offsets.offset(source) {
                arena.read(offset, &mut first)?;
            }
            arena.write(offsets.rows(source) + u64::from(first[0]) * 2 * self.shape.hidden as u64, &bytes)?;
        }
        Ok(())
    }

    /// Returns what the experts make of the received rows, in memory of their places.
    fn in_other_memory(&self, received: &gin_ep::Received<'_>) -> Result<MemorySlice, EpError> {
        let region = self.tokens * 2 * self.shape.hidden;
        let rows = self.memory(self.shape.ranks * region)?;
        for (source, bytes) in self.products(received)?.into_iter().enumerate() {
            rows.write((source * region) as u64, &bytes)?;
        }
        Ok(rows)
    }

    /// Returns the number of ids whose experts are on this rank.
    pub(super) fn ids_here(&self) -> usize {
        let (me, small) = (self.rank.rank() as usize, Shape { hidden: 1, ..*self.shape });
        let of = |batch: &Batch| {
            let places = (0..self.tokens).flat_map(|token| batch.places(&small, token));
            places.filter(|&(_, rank, ..)| rank == me).count()
        };
        self.batches.iter().map(of).sum()
    }

    /// Measures a group. In each repeat `between` runs, too, and returns the two times beside those of the group.
    pub(super) fn calls(
        &self,
        config: &GroupConfig,
        combines: Combines,
        mut between: impl FnMut() -> Result<[f64; 2], EpError>,
    ) -> Result<Calls, EpError> {
        let group = Group::new(self.comm, config)?;
        let mut slot = group.slot(0)?;
        let is_opaque = combines == Combines::NoneOfOpaque;
        // The bytes of scales do not matter.
        let (stream, input) = (&self.stream, self.input().scales(is_opaque.then_some(&self.rows)));
        let combine = Combine::reduced().into(&self.output);
        let received = slot.exchange(stream, &input)?;
        let (mut wrong, mut rows) = (0, None);
        if is_opaque || combines == Combines::None {
            stream.synchronize()?;
            wrong += if is_opaque { self.wrong_opaque(&received)? } else { self.wrong_fp8(&received)? };
            received.release();
        } else {
            stream.synchronize()?;
            if combines == Combines::All {
                rows = Some(self.in_other_memory(&received)?);
            }
            self.run_experts(&received)?;
            received.combine(stream, Rows::InPlace, &combine)?;
            stream.synchronize()?;
            wrong += self.wrong()?;
        }
        if let Some(rows) = &rows {
            self.output.write(0, &vec![0u16; self.tokens * self.shape.hidden])?;
            slot.exchange(stream, &input)?.combine(stream, Rows::At(rows), &combine)?;
            stream.synchronize()?;
            wrong += self.wrong()?;
        }
        let layouts = if combines == Combines::Layouts {
            let rows = self.ids_here().max(1) as u32;
            let flat = Permuted::new(&group, Layout::Flat, (self.shape.ranks * self.tokens) as u32)?;
            let packed = Permuted::new(&group, Layout::ExpertMajorPacked { align: 1 }, rows)?;
            slot.exchange_into(stream, &input, &packed)?.0.release();
            stream.synchronize()?;
            wrong += self.wrong_layout(&packed)?;
            Some([flat, packed])
        } else {
            None
        };
        let permuted = |received: &mut gin_ep::Received<'_>| -> Result<(), EpError> {
            if let Some([flat, _]) = &layouts {
                received.permute(stream, flat)?;
            }
            Ok(())
        };
        let nothing = (self.memory(16)?, 0);
        let meet = || self.floor(&nothing, 0, (1, 32));
        let mut calls = Calls { wrong, blocks: group.blocks(), ..Calls::default() };
        for _ in 0..self.bench.launches.min(self.bench.pick(9, 1)) {
            calls.dispatch.push(chain(self.rank, stream, self.length(), || {
                let mut received = slot.exchange(stream, &input)?;
                permuted(&mut received)?;
                received.release();
                Ok(())
            })?);
            if !is_opaque && combines != Combines::None {
                calls.pair.push(chain(self.rank, stream, self.length(), || {
                    let mut received = slot.exchange(stream, &input)?;
                    permuted(&mut received)?;
                    received.combine(stream, Rows::InPlace, &combine)
                })?);
            }
            if let Some([_, packed]) = &layouts {
                calls.packed.push(chain(self.rank, stream, self.length(), || {
                    slot.exchange_into(stream, &input, packed)?.0.release();
                    Ok(())
                })?);
                calls.packed_later.push(chain(self.rank, stream, self.length(), || {
                    let mut received = slot.exchange(stream, &input)?;
                    received.permute(stream, packed)?;
                    received.release();
                    Ok(())
                })?);
            }
            if combines == Combines::All {
                let both = chain(self.rank, stream, self.length(), || {
                    meet()?;
                    let received = slot.exchange(stream, &input)?;
                    meet()?;
                    received.combine(stream, Rows::InPlace, &combine)
                })?;
                let met = chain(self.rank, stream, self.length(), || meet().and_then(|()| meet()))?;
                calls.apart.push(both - met);
            }
            if let Some(rows) = &rows {
                calls.stored.push(chain(self.rank, stream, self.length(), || {
                    slot.exchange(stream, &input)?.combine(stream, Rows::At(rows), &combine)
                })?);
            }
            for (times, time) in calls.beside.iter_mut().zip(between()?) {
                times.push(time);
            }
        }
        calls.wrong += u64::from(group.status()?.is_some());
        drop(slot);
        group.destroy()?;
        Ok(calls)
    }

    /// Returns the jobs that copy received rows within this rank's memory, one for each id whose expert is here.
    pub(super) fn jobs_of_ids(&self) -> Result<(MemorySlice, u32), EpError> {
        let (me, room, number) = (self.rank.rank(), self.shape.ranks * self.tokens, self.ids_here());
        let job = |id: usize| Job {
            from: (id % self.tokens) as u32,
            rank: me,
            // The window has no room for more rows.
            to: (id % room) as u32,
            reserved: 0,
        };
        let list = self.memory((16 * number).max(16))?;
        list.write(0, &(0..number).map(job).collect::<Vec<Job>>())?;
        Ok((list, number as u32))
    }

    /// Returns the rows to copy without routing: the rows that this rank sends, returns, or received. Those of the last
    /// kind are copied within its memory.
    pub(super) fn jobs(&self, back: bool, within: bool) -> Result<(MemorySlice, u32), EpError> {
        let (me, tokens) = (self.rank.rank() as usize, self.tokens);
        let small = Shape { hidden: 1, ..*self.shape };
        let mut jobs = Vec::new();
        // One row of each rank after the other, so that the links between GPUs have work from the first to the last.
        for other in 0..self.shape.ranks {
            let (receiver, source) = if back || within { (me, other) } else { (other, me) };
            for (place, row) in rank_major(&small, &self.batches, receiver)[source].iter().enumerate() {
                let there =
                    if within { other * tokens + place } else { me * tokens + if back { row.token } else { place } };
                let from = if back || within { place % tokens } else { row.token };
                let rank = if within { me } else { other };
                jobs.push((place, Job { from: from as u32, rank: rank as u32, to: there as u32, reserved: 0 }));
            }
        }
        jobs.sort_by_key(|&(place, _)| place);
        let jobs: Vec<Job> = jobs.into_iter().map(|(_, job)| job).collect();
        let list = self.memory((16 * jobs.len()).max(16))?;
        list.write(0, &jobs)?;
        Ok((list, jobs.len() as u32))
    }

    /// Puts the floor onto the stream: rows of `row_bytes`.
    pub(super) fn floor(
        &self,
        (list, number): &(MemorySlice, u32),
        row_bytes: usize,
        (blocks, threads): (u32, u32),
    ) -> Result<(), EpError> {
        let list = std::ptr::without_provenance::<Job>(list.address() as usize);
        let from = std::ptr::without_provenance::<u64>(self.rows.address() as usize);
        let (pairs, limit) = ((row_bytes / 16) as u32, Deadline::after_ns(self.bench.limit_ns()));
        let arguments: [&dyn KernelArg; 7] = [&self.handle, &self.window, &from, &list, number, &pairs, &limit];
        // Safety: the memory is valid, the window has the words and rows, and the blocks are resident.
        unsafe { self.stream.launch(&self.kernel, LaunchConfig::new(blocks, threads), &arguments)? };
        Ok(())
    }

    /// Returns the fastest shape of the floor. Its ranks may have different ones.
    pub(super) fn best(&self, jobs: &(MemorySlice, u32)) -> Result<(u32, u32), EpError> {
        if !self.bench.is_real() {
            return Ok((1, 64));
        }
        let ranks = self.shape.ranks as u32;
        let sharing = ranks.div_ceil(self.bench.gpus(ranks).max(1) as u32);
        let max = (sms(&**self.rank.device()).unwrap_or(4) / sharing).max(1);
        let counts = [4, 8, 16, 32, 64, 96].into_iter().filter(|&count| count < max).chain([max]);
        let mut best = (f64::INFINITY, (1, 512));
        for shape in counts.flat_map(|blocks| [(blocks, 512), (blocks, 1024)]) {
            let time = chain(self.rank, &self.stream, (10, 3), || self.floor(jobs, 2 * self.shape.hidden, shape))?;
            if time < best.0 {
                best = (time, shape);
            }
        }
        Ok(best.1)
    }

    /// Returns the time of copies by the driver of as many rows as this rank sends, to their ranks.
    pub(super) fn copy(&self) -> Result<Option<f64>, EpError> {
        let (Some(stride), true) = (self.window.stride(), self.bench.is_one_process()) else { return Ok(None) };
        let me = self.rank.rank() as usize;
        let (row_bytes, own) = (2 * self.shape.hidden as u64, self.window.memory().address());
        let small = Shape { hidden: 1, ..*self.shape };
        let rows: Vec<u64> = (0..self.shape.ranks)
            .map(|other| rank_major(&small, &self.batches, other)[me].len() as u64 * row_bytes)
            .collect();
        let times = 20;
        self.rank.barrier()?;
        let time = timed(&self.stream, times, || {
            for _ in 0..times {
                for (other, &bytes) in rows.iter().enumerate().filter(|(_, bytes)| **bytes > 0) {
                    let part = own
                        .wrapping_add(stride.wrapping_mul(other as u64).wrapping_sub(stride.wrapping_mul(me as u64)));
                    let to = part + 8 * EXCHANGE_WORDS as u64 + me as u64 * self.tokens as u64 * row_bytes;
                    // Safety: the rows of the window, which only copies use meanwhile, and this rank's rows.
                    unsafe { self.stream.copy(to, self.rows.address(), bytes)? };
                }
            }
            Ok(())
        })?;
        self.rank.barrier()?;
        Ok(Some(time))
    }
}
