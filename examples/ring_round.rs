// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel of the README as a whole program: ranks in a ring, several rounds, on the virtual GPU.
//!
//! `cargo run --example ring_round`

use gin::prelude::*;
use gin_device::prelude::*;
use std::error::Error;

/// One round of a ring: pass mine on, add what the left neighbour sent.
///
/// `round` counts from 1; a neighbour may overwrite `recv` again only after its credit (signal 1) has come back.
///
/// # Safety
/// - One block, on every rank, in the same rounds; the communicator has two signals and a counter.
#[kernel]
pub unsafe fn ring_round(comm: Comm, recv: Window<f32>, send: Window<f32>, len: usize, round: u64, deadline: Deadline) {
    let gin = Gin::new(&comm, ContextId::new(0));
    let world = comm.world();

    let exchange = || -> Result<(), Fault> {
        gin.wait_signal(&Block, SignalId::new(1), round - 1, deadline)?; // right neighbour has used its last block
        gin.put(world.right(), recv.range(0, len), send.range(0, len))
            .signal(SignalId::new(0).inc())
            .counter(CounterId::new(0))
            .issue(&Block)?;
        gin.wait_signal(&Block, SignalId::new(0), round, deadline)?; // left neighbour's block is here
        gin.wait_counter(&Block, CounterId::new(0), round, deadline) // mine has left, `send` may change
    };
    if let Err(fault) = exchange() {
        return comm.report(fault);
    }
    for i in Block.stripe(len) {
        send.add(i, recv.read(i));
    }
    if let Err(fault) = gin.signal(world.left(), SignalId::new(1).inc()).issue(&Block) {
        comm.report(fault);
    }
}

const RANKS: u32 = 4;
const ROUNDS: u64 = 5;
const LEN: usize = 1000;

/// Returns a rank's initial value.
fn input(rank: u32, index: usize) -> f32 {
    (rank as usize * 100 + index % 100) as f32
}

/// Returns the values of all ranks after the rounds, computed without gin.
fn expected() -> Vec<Vec<f32>> {
    let mut now: Vec<Vec<f32>> = (0..RANKS).map(|rank| (0..LEN).map(|index| input(rank, index)).collect()).collect();
    for _ in 0..ROUNDS {
        let before = now.clone();
        for (rank, values) in now.iter_mut().enumerate() {
            let left = &before[(rank + RANKS as usize - 1) % RANKS as usize];
            values.iter_mut().zip(left).for_each(|(value, sent)| *value += sent);
        }
    }
    now
}

/// Runs the ring and checks the result.
pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let results = launch(WorldConfig::seeded(RANKS, 1), |rank| -> Result<Vec<f32>, CommError> {
        let comm = rank.communicator(&Requirements::default().signals(2).counters(1))?;
        let recv = comm.alloc_window::<f32>(LEN, WindowFlags::NONE)?;
        let send = comm.alloc_window::<f32>(LEN, WindowFlags::NONE)?;
        let values: Vec<f32> = (0..LEN).map(|index| input(rank.rank(), index)).collect();
        send.write(0, &values)?;

        let (stream, handle) = (rank.stream()?, comm.device()?);
        let (shape, limit) = (LaunchConfig::new(1, 128).cooperative(), Deadline::after_ms(10_000));
        for round in 1..=ROUNDS {
            // Safety: one block on every rank, all rounds in order. The windows live until the stream is done.
            unsafe { ring_round::launch(&stream, shape, &handle, &recv, &send, LEN, round, limit)? };
        }
        stream.synchronize()?;
        comm.check("run the ring")?;
        let values = send.read_all()?;
        comm.destroy()?;
        Ok(values)
    })?;
    if results != expected() {
        return Err("the ranks' values differ from the expected ones".into());
    }
    println!("ok: {RANKS} ranks, {ROUNDS} rounds of {LEN} elements");
    Ok(())
}
