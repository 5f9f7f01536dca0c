// SPDX-License-Identifier: MIT OR Apache-2.0
//! A stream of messages through a few slots. The kernel's docs have a picture.

use crate::expect;
use gin_examples_kernels::credits::{SLOTS, credits, value};
use gin_host::comm::Deadline;
use gin_host::prelude::*;
use std::error::Error;

const LEN: usize = 100;
const MESSAGES: u64 = 25;
const THREADS: u32 = 64;

/// Streams on every rank: block 0 sends to the right, block 1 receives from the left.
pub fn run(config: WorldConfig) -> Result<String, Box<dyn Error>> {
    let ranks = config.ranks;
    let sums = launch(config, |rank| -> Result<u64, CommError> {
        let comm = rank.communicator(&Requirements::default().signals(2).counters(SLOTS as u32))?;
        let outbox = comm.alloc_window::<u32>(SLOTS * LEN, WindowFlags::NONE)?;
        let inbox = comm.alloc_window::<u32>(SLOTS * LEN, WindowFlags::NONE)?;
        let sums = comm.alloc_window::<u64>(THREADS as usize, WindowFlags::NONE)?;
        let (stream, handle) = (rank.stream()?, comm.device()?);
        // Both blocks wait, so both must be resident: a cooperative launch refuses what does not fit.
        let (shape, limit) = (LaunchConfig::new(2, THREADS).cooperative(), Deadline::after_ms(1000));
        // Safety: two resident blocks on every rank; the windows live until the stream is done.
        unsafe { credits::launch(&stream, shape, &handle, &outbox, &inbox, &sums, LEN, MESSAGES, limit)? };
        stream.synchronize()?;
        comm.check("stream messages")?;
        let sum = sums.read_all()?.iter().sum();
        comm.destroy()?;
        Ok(sum)
    })?;
    let sent = |from: u32| -> u64 {
        let of = |message| (0..LEN).map(move |i| u64::from(value(from, message, i)));
        (0..MESSAGES).flat_map(of).sum()
    };
    let expected: Vec<u64> = (0..ranks).map(|rank| sent((rank + ranks - 1) % ranks)).collect();
    expect("sums by rank", &sums, &expected)?;
    Ok(format!("{ranks} ranks, {MESSAGES} messages through {SLOTS} slots"))
}
