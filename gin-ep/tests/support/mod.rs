// SPDX-License-Identifier: MIT OR Apache-2.0
//! Shared by the tests of dispatch and combine, on virtual GPUs here and on real ones in `gpu-tests`.

use gin_ep::{EpError, Group, GroupConfig, Ids, Number, Received, Rows, Tokens};
use gin_ep_oracle::{Batch, Experts, Routing, Shape, batch, per_rank, rank_major};
use gin_gpu::{LaunchConfig, Memory, MemoryKind, MemorySlice, Stream};
use gin_host::comm::Communicator;
use gin_host::world::Rank;
use gpu_tests_kernels::experts::hardware_experts;
use std::sync::Arc;

/// The memory of one rank's tokens.
pub struct Input {
    pub rows: MemorySlice,
    pub ids: MemorySlice,
    pub weights: MemorySlice,
    pub output: MemorySlice,
}

impl Input {
    pub fn new(rank: &Rank, shape: &Shape, most: usize) -> Result<Self, EpError> {
        let memory = |bytes: usize| -> Result<MemorySlice, EpError> {
            Ok(Memory::new(rank.device(), MemoryKind::Device, bytes as u64)?.whole())
        };
        let (row, ids) = (2 * shape.hidden, most * shape.topk);
        Ok(Self {
            rows: memory(most * row)?,
            ids: memory(8 * ids)?,
            weights: memory(4 * ids)?,
            output: memory(most * row)?,
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

    pub fn tokens(&self, count: usize, wide: bool) -> Tokens<'_> {
        let ids = if wide { Ids::I64(&self.ids) } else { Ids::I32(&self.ids) };
        Tokens::new(&self.rows, ids, count as u32).weights(&self.weights)
    }
}

/// Compares what was received with the oracle.
pub fn compare(received: &Received<'_>, shape: &Shape, batches: &[Batch], rank: usize) -> Result<(), EpError> {
    let expected = rank_major(shape, batches, rank);
    let found = received.fetch()?;
    for (source, (expected, found)) in expected.iter().zip(&found).enumerate() {
        assert_eq!(expected.len(), found.len(), "{shape:?}: rows from {source} at {rank}");
        for (index, (expected, found)) in expected.iter().zip(found).enumerate() {
            let expected = (expected.token as u32, &expected.experts, &expected.weights, &expected.row);
            let found = (found.token, &found.experts, &found.weights, &found.row);
            assert!(expected == found, "{shape:?}: row {index} from {source} at {rank}: {expected:?}, found {found:?}");
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

/// Runs the experts of the oracle on what was received, in place.
pub fn experts(rank: &Rank, stream: &Arc<dyn Stream>, shape: &Shape, received: &Received<'_>) -> Result<(), EpError> {
    let (local, hidden) = (shape.local() as u32, shape.hidden as u32);
    let config = LaunchConfig::new(16, if hidden > 1024 { 256 } else { 32 });
    // Safety: after the receive, before the combine, on one stream.
    unsafe { hardware_experts::launch(stream, config, received.view(), rank.rank(), local, hidden)? };
    Ok(())
}

/// Runs pairs on a rank, and compares each with the oracle.
pub fn pairs(
    rank: &Rank,
    comm: &Communicator,
    config: &GroupConfig,
    shape: &Shape,
    most: usize,
    pairs: &[Pair],
) -> Result<(), EpError> {
    let me = rank.rank() as usize;
    let group = Group::new(comm, config)?;
    let input = Input::new(rank, shape, most)?;
    let count_at = Memory::new(rank.device(), MemoryKind::Device, 4)?.whole();
    let (stream, mut lane) = (rank.stream()?, group.lane(0)?);
    for (number, pair) in pairs.iter().enumerate() {
        let make = |rank: usize| {
            let tokens = pair.counts[(rank + number) % pair.counts.len()].min(most);
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
            lane.exchange(&stream, &tokens)?
        } else {
            lane.dispatch(&stream, &tokens)?.receive(&stream)?
        };
        stream.synchronize()?;
        compare(&received, shape, &batches, me)?;
        experts(rank, &stream, shape, &received)?;
        received.combine(&stream, Rows::InPlace, &input.output)?;
        stream.synchronize()?;
        assert_eq!(group.status()?, None, "{shape:?} {:?}", pair.routing);
        let expected = per_rank(shape, mine, &[], Experts);
        let mut found = vec![0u16; expected.len()];
        input.output.read(0, &mut found)?;
        assert!(expected == found, "{shape:?} {:?}, pair {number}: the output of rank {me} differs", pair.routing);
    }
    drop(lane);
    group.destroy()
}
