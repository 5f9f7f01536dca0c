// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernels with large frames, compiled without optimisation.
#![no_std]

use gin_device::prelude::*;

/// Makes ten operations with one coop, for the `round`th time.
fn ten(comm: &Comm, at: Window<u64>, coop: &impl Coop, round: u64) -> Result<(), Fault> {
    let (gin, none) = (Gin::new(comm, ContextId::new(0)), Deadline::after_ms(60_000));
    let (right, signal, counter) = (comm.world().right(), SignalId::new(0), CounterId::new(0));
    gin.put(right, at.range(0, 8), at.range(8, 8)).signal(signal.inc()).counter(counter).deadline(none).issue(coop)?;
    gin.put_value(right, at.range(16, 1), round).signal(signal.inc()).issue(coop)?;
    gin.signal(right, signal.inc()).issue(coop)?;
    gin.wait_signal(coop, signal, 3 * round, none)?;
    gin.wait_counter(coop, counter, round, none)?;
    gin.get(right, at.range(24, 8), at.range(8, 8)).issue(coop)?;
    gin.flush(coop, none)?;
    let token = gin.flush_async(right)?;
    gin.wait(coop, token, none)?;
    BarrierSession::new(&gin, BarrierTeam::World, 0)?.sync(coop, Fence::Put, none)?;
    gin.put(right, at.range(32, 8), at.range(8, 8)).prepare()?.issue(coop)?;
    gin.flush(coop, none)
}

/// Makes ten operations with each coop in turn.
///
/// # Safety
/// One block of 64 threads on every rank; `at` has 64 elements.
#[kernel]
pub unsafe fn every_coop(comm: Comm, at: Window<u64>) {
    let (thread, mut outcome) = (thread_in_block(), Ok(()));
    if thread == 0 {
        outcome = outcome.and(ten(&comm, at, &Thread, 1));
    }
    Block.sync();
    if thread < 8 {
        outcome = outcome.and(ten(&comm, at, &Tile::<8>, 2));
    }
    Block.sync();
    if thread < 4 {
        // Safety: these four lanes call.
        outcome = outcome.and(ten(&comm, at, &unsafe { Lanes::new(0xf) }, 3));
    }
    Block.sync();
    if thread < WARP_SIZE {
        outcome = outcome.and(ten(&comm, at, &Warp, 4));
    }
    Block.sync();
    // Safety: both warps call, and barrier 1 is theirs.
    if let Some(span) = unsafe { WarpSpan::new(0, 2, 1) } {
        outcome = outcome.and(ten(&comm, at, &span, 5));
    }
    Block.sync();
    outcome = outcome.and(ten(&comm, at, &Block, 6));
    if let Err(fault) = outcome {
        comm.report(fault);
    }
}

/// Fills an array of 100,000 bytes on its stack, and adds it up into `sum`.
///
/// # Safety
/// `sum` has a word for each thread.
#[kernel]
pub unsafe fn large_array(sum: *mut u64) {
    let thread = thread_in_block();
    let mut bytes = [0_u8; 100_000];
    for (i, byte) in (thread..).zip(&mut bytes) {
        *byte = i as u8;
    }
    Block.sync();
    let total = bytes.into_iter().map(u64::from).sum();
    // Safety: the kernel's promise.
    unsafe { sum.add(thread as usize).write(total) };
}

/// Needs a stack of more than 100 MiB.
///
/// # Safety
/// None is needed.
#[kernel]
pub unsafe fn too_deep(sum: *mut u64) {
    let words = [7_u64; 14 << 20];
    // Safety: never reached.
    unsafe { sum.write(words.into_iter().sum()) };
}
