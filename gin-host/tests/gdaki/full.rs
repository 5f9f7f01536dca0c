// SPDX-License-Identifier: MIT OR Apache-2.0
//! Lanes of a warp post through a full queue, each with a deadline, a hold or neither, by both forms of the back end.

use crate::{nics, requirements, run};
use gin_device::prelude::*;
use gin_gpu::LaunchConfig;
use gin_host::comm::WindowFlags;
use gin_host::world::WorldConfig;

/// Threads of the block: a warp, and one more; about twice as many as a queue has slots.
const THREADS: u32 = 33;
const ROUNDS: usize = 4;

/// Posts values with a signal and values without one, then waits for the other rank's.
#[inline(always)]
fn exchange<B: Backend>(
    gin: &Gin<B>,
    comm: &Comm,
    window: gin_device::Window<u64>,
    deadline: Deadline,
) -> Result<(), Fault> {
    let (to, mine) = (comm.world().right(), Block.rank() as usize);
    for round in 0..ROUNDS {
        let place = window.range(round * THREADS as usize + mine, 1);
        let put = gin.put_value(to, place, 1 + (round * 100 + mine) as u64);
        match mine % 4 {
            0 => put.signal(SignalId::new(0).inc()).issue(&Thread)?,
            1 => put.signal(SignalId::new(0).inc()).deadline(deadline).issue(&Thread)?,
            2 => put.more().issue(&Thread)?,
            _ => put.issue(&Thread)?,
        }
    }
    gin.flush(&Block, deadline)?;
    let signals = (0..THREADS).filter(|thread| thread % 4 < 2).count() * ROUNDS;
    gin.signal(to, SignalId::new(1).inc()).issue(&Block)?;
    gin.wait_signal(&Block, SignalId::new(1), 1, deadline)?;
    gin.wait_signal(&Block, SignalId::new(0), signals as u64, deadline)
}

/// Does [`exchange`] by the named back end or by `Any`.
///
/// # Safety
/// - One block, resident.
#[kernel]
pub unsafe fn full_test(comm: Comm, window: gin_device::Window<u64>, named: u32, deadline: Deadline) {
    let context = ContextId::new(0);
    let outcome = if named != 0 {
        exchange(&Gin::<Gdaki>::with_backend(&comm, context), &comm, window, deadline)
    } else {
        exchange(&Gin::new(&comm, context).route(Route::Network), &comm, window, deadline)
    };
    if let Err(fault) = outcome {
        comm.report(fault);
    }
}

#[test]
fn lanes_post_through_a_full_queue() {
    for named in [1u32, 0] {
        let seeded = (0..8).map(|seed| (nics(), WorldConfig::seeded(2, seed)));
        for (nics, config) in seeded.chain([(nics(), WorldConfig::threads(2))]) {
            let config = config.soft_nics(&nics);
            run(&nics, config, |rank| {
                let comm = rank.communicator(&requirements())?;
                let window = comm.alloc_window::<u64>(ROUNDS * THREADS as usize, WindowFlags::NONE)?;
                let (handle, deadline) = (comm.device()?, Deadline::after_ms(20_000));
                let (stream, kernel) = (rank.stream().unwrap(), rank.kernel("full_test").unwrap());
                // Safety: one block. Communicator and window live until the kernel has ended.
                unsafe {
                    stream
                        .launch(&kernel, LaunchConfig::new(1, THREADS), &[&handle, &window, &named, &deadline])
                        .unwrap()
                };
                stream.synchronize().unwrap();
                assert_eq!(comm.fault(), None);
                for (index, value) in window.read_all()?.into_iter().enumerate() {
                    let (round, thread) = (index / THREADS as usize, index % THREADS as usize);
                    assert_eq!(value, 1 + (round * 100 + thread) as u64, "thread {thread} in round {round}");
                }
                comm.destroy()
            });
        }
    }
}
