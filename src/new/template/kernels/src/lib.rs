#![no_std]

use gin_device::prelude::*;

shared! { static PARTS: [u64; 256]; }

/// Puts `mine` into the right neighbour's `theirs`, and adds up the elements from the left neighbour.
///
/// # Safety
/// - One block, on every rank; both windows have the same length everywhere; `sum` is a word of this device's memory.
#[kernel(launch_bounds(256))]
pub unsafe fn sum_of_left(comm: Comm, mine: Window<u32>, theirs: Window<u32>, sum: *mut u64, deadline: Deadline) {
    let gin = Gin::new(&comm, ContextId::new(0));
    let (len, arrived) = (mine.len(), SignalId::new(0));
    let exchange = || -> Result<(), Fault> {
        gin.put(comm.world().right(), theirs.range(0, len), mine.range(0, len)).signal(arrived.inc()).issue(&Block)?;
        gin.wait_signal(&Block, arrived, 1, deadline)
    };
    if let Err(fault) = exchange() {
        return comm.report(fault);
    }
    // Each thread adds up its share; then one thread adds up the shares.
    let parts = PARTS.array();
    parts.write(Block.rank() as usize, Block.stripe(len).map(|i| u64::from(theirs.read(i))).sum());
    Block.sync();
    if Block.elect() {
        let total = (0..Block.size() as usize).map(|i| parts.read(i)).sum();
        // Safety: the kernel's promise.
        unsafe { sum.write(total) };
    }
}
