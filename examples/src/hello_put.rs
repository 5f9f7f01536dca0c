// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every rank puts a text into its right neighbour's memory. The kernel's docs have a picture.

use crate::expect;
use gin_examples_kernels::hello_put::hello_put;
use gin_host::comm::Deadline;
use gin_host::prelude::*;
use std::error::Error;

// ANCHOR: program
/// Runs one kernel on each rank. Each rank ends with its left neighbour's text.
pub fn run(config: WorldConfig) -> Result<String, Box<dyn Error>> {
    let ranks = config.ranks;
    let texts = launch(config, |rank| -> Result<String, CommError> {
        // The kernel uses one signal, and one context, which is the default.
        let comm = rank.communicator(&Requirements::default().signals(1))?;
        // Each rank allocates its part; both calls are collective, in the same order on all ranks.
        let mine = comm.alloc_window::<u8>(32, WindowFlags::NONE)?;
        let inbox = comm.alloc_window::<u8>(32, WindowFlags::NONE)?;
        mine.write(0, format!("hello from rank {}", rank.rank()).as_bytes())?;

        let stream = rank.stream()?;
        let (shape, limit) = (LaunchConfig::new(1, 64).cooperative(), Deadline::after_ms(1000));
        // Safety: one block on every rank; the windows live until the stream is done.
        unsafe { hello_put::launch(&stream, shape, &comm.device()?, &mine, &inbox, limit)? };
        stream.synchronize()?;
        // A fault of the kernel, or of any rank, becomes an error here.
        comm.check("say hello")?;
        let text = String::from_utf8_lossy(&inbox.read_all()?).trim_end_matches('\0').to_owned();
        comm.destroy()?;
        Ok(text)
    })?;
    let expected: Vec<String> =
        (0..ranks).map(|rank| format!("hello from rank {}", (rank + ranks - 1) % ranks)).collect();
    expect("texts by rank", &texts, &expected)?;
    Ok(texts.join(", "))
}
// ANCHOR_END: program
