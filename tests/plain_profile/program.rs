// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs the kernels beside it on virtual GPUs, in both modes.

use gin_host::prelude::*;
use my_kernels as _;

fn run(config: WorldConfig, overflow: bool) -> Result<(), Box<dyn std::error::Error>> {
    let values = launch(config, |rank| -> Result<[u64; 2], CommError> {
        let comm = rank.communicator(&Requirements::default().signals(1).counters(1).world_barriers(1))?;
        let at = comm.alloc_window::<u64>(64, WindowFlags::NONE)?;
        at.fill(u64::from(rank.rank()))?;
        let sums = Memory::new(rank.device(), MemoryKind::Device, 64 * 8)?;
        let (stream, handle) = (rank.stream()?, comm.device()?);
        let address = sums.address() as usize as *mut u64;
        let one_block = LaunchConfig::new(1, 64).cooperative();
        // Safety: one block of 64 threads; windows and memory live until the stream is done.
        unsafe {
            if overflow {
                stream.launch(&rank.kernel("too_deep")?, LaunchConfig::new(1, 1), &[&address])?;
            }
            stream.launch(&rank.kernel("every_coop")?, one_block, &[&handle, &at])?;
            stream.launch(&rank.kernel("large_array")?, one_block, &[&address])?;
        }
        stream.synchronize()?;
        comm.check("run")?;
        let mut found = [0; 64];
        sums.read(0, &mut found)?;
        let put = at.read_range(16..17)?[0];
        comm.destroy()?;
        Ok([found[5], put])
    })?;
    let sum = (5..100_005_u64).map(|i| i % 256).sum();
    assert_eq!(values, [[sum, 6]; 2]);
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let overflow = std::env::args().nth(1).is_some();
    run(WorldConfig::seeded(2, 1), overflow)?;
    run(WorldConfig::threads(2), overflow)?;
    println!("ok");
    Ok(())
}
