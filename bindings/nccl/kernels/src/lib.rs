// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernels of one source for gin's back ends and for NCCL's device functions. The feature `nccl` selects NCCL.

#![no_std]

#[cfg(not(feature = "nccl"))]
use gin_device::prelude::*;
#[cfg(feature = "nccl")]
use gin_nccl_device::prelude::*;

#[cfg(all(feature = "nccl", target_arch = "nvptx64"))]
mod probe;
pub mod timed;

/// The signal that counts the blocks that have arrived.
const ARRIVED: SignalId = SignalId::new(0);
/// The signal by which a receiver gives its sender the credit for the next round.
const CREDIT: SignalId = SignalId::new(1);
/// The counter of puts that have left.
const LEFT: CounterId = CounterId::new(0);

/// Returns the value of word `index` that rank `from` sends in a round.
fn word(from: u32, round: u64, index: usize) -> u64 {
    (from as u64) << 48 | round << 24 | index as u64
}

/// Passes `len` words round the ring `rounds` times, and checks each word that arrives.
///
/// In each round a rank fills `send`, puts it into `receive` of its right neighbour with a signal, waits for the left
/// neighbour's words, compares them, and returns a credit to the left neighbour. A wrong word is reported with its
/// index as the code. When the kernel ends on a rank, no request to that rank is in flight.
///
/// # Safety
/// - One block, launched once on every rank of a communicator with two signals and a counter, all 0.
/// - `send` and `receive` have `len` words.
#[kernel]
pub unsafe fn ring(comm: Comm, receive: Window<u64>, send: Window<u64>, len: usize, rounds: u64, deadline: Deadline) {
    let gin = Gin::new(&comm, ContextId::new(0));
    let world = comm.world();
    let (left, right) = (world.left(), world.right());
    let mut round = 1;
    while round <= rounds {
        let exchange = || -> Result<(), Fault> {
            // The right neighbour has compared the words of the round before, and they have left.
            gin.wait_signal(&Block, CREDIT, round - 1, deadline)?;
            gin.wait_counter(&Block, LEFT, round - 1, deadline)?;
            for index in Block.stripe(len) {
                send.write(index, word(world.rank(), round, index));
            }
            gin.put(right, receive.range(0, len), send.range(0, len))
                .signal(ARRIVED.inc())
                .counter(LEFT)
                .issue(&Block)?;
            gin.wait_signal(&Block, ARRIVED, round, deadline)
        };
        if let Err(fault) = exchange() {
            return comm.report(fault);
        }
        for index in Block.stripe(len) {
            if receive.read(index) != word(left.world(), round, index) {
                comm.report_code(index as u64);
            }
        }
        if let Err(fault) = gin.signal(left, CREDIT.inc()).issue(&Block) {
            return comm.report(fault);
        }
        round += 1;
    }
    if let Err(fault) = gin.wait_signal(&Block, CREDIT, rounds, deadline) {
        comm.report(fault);
    }
}

/// Gets `len` words from the left neighbour `rounds` times, and checks each word.
///
/// A round has three barriers of all ranks: after the writes, after the gets, and after the comparison. So no rank
/// overwrites words that another one still reads. A wrong word is reported with its index as the code.
///
/// # Safety
/// - One block, launched once on every rank of a communicator with a barrier of all ranks.
/// - `send` and `receive` have `len` words.
#[kernel]
pub unsafe fn fetch(comm: Comm, receive: Window<u64>, send: Window<u64>, len: usize, rounds: u64, deadline: Deadline) {
    let gin = Gin::new(&comm, ContextId::new(0));
    let world = comm.world();
    let left = world.left();
    let exchange = || -> Result<(), Fault> {
        let mut barrier = BarrierSession::new(&gin, BarrierTeam::World, 0)?;
        let mut round = 1;
        while round <= rounds {
            for index in Block.stripe(len) {
                send.write(index, word(world.rank(), round, index));
            }
            barrier.sync(&Block, Fence::None, deadline)?;
            gin.get(left, receive.range(0, len), send.range(0, len)).issue(&Block)?;
            barrier.sync(&Block, Fence::Get, deadline)?;
            for index in Block.stripe(len) {
                if receive.read(index) != word(left.world(), round, index) {
                    comm.report_code(index as u64);
                }
            }
            barrier.sync(&Block, Fence::None, deadline)?;
            round += 1;
        }
        Ok(())
    };
    if let Err(fault) = exchange() {
        comm.report(fault);
    }
}

/// Puts one word to each rank, with its value in the request, and meets all ranks.
///
/// `words` has two words for each rank, one for even and one for odd rounds. A wrong word is reported with the sender's
/// rank as the code.
///
/// # Safety
/// - One block, launched once on every rank of a communicator with a barrier of all ranks.
/// - `words` has two words for each rank.
#[kernel]
pub unsafe fn all_to_all(comm: Comm, words: Window<u64>, rounds: u64, deadline: Deadline) {
    let gin = Gin::new(&comm, ContextId::new(0));
    let world = comm.world();
    let exchange = || -> Result<(), Fault> {
        let mut barrier = BarrierSession::new(&gin, BarrierTeam::World, 0)?;
        let mut round = 1;
        while round <= rounds {
            // A rank that is a round ahead writes into the other half.
            let half = (round as usize & 1) * world.size() as usize;
            let mut step = 0;
            while step < world.size() {
                let place = words.at(half + world.rank() as usize);
                gin.put_value(world.after(step), place, word(world.rank(), round, 0)).issue(&Block)?;
                step += 1;
            }
            barrier.sync(&Block, Fence::Put, deadline)?;
            for from in Block.stripe(world.size() as usize) {
                if words.read(half + from) != word(from as u32, round, 0) {
                    comm.report_code(from as u64);
                }
            }
            Block.sync();
            round += 1;
        }
        Ok(())
    };
    if let Err(fault) = exchange() {
        comm.report(fault);
    }
}
