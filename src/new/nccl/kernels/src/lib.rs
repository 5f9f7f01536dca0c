#![no_std]

// One source: NCCL's device functions on GPUs, gin's own in the test on virtual GPUs.
#[cfg(not(feature = "nccl"))]
use gin_device::prelude::*;
#[cfg(feature = "nccl")]
use gin_nccl_device::prelude::*;

/// Puts `mine` into the right neighbour's `theirs`, and adds the elements from the left neighbour to `mine`.
///
/// # Safety
/// - One block, once, on every rank of a communicator with a signal and a counter; both windows have the same length.
#[kernel]
pub unsafe fn add_left(comm: Comm, mine: Window<u32>, theirs: Window<u32>, deadline: Deadline) {
    let gin = Gin::new(&comm, ContextId::new(0));
    let (len, arrived, left) = (mine.len(), SignalId::new(0), CounterId::new(0));
    let exchange = || -> Result<(), Fault> {
        gin.put(comm.world().right(), theirs.range(0, len), mine.range(0, len))
            .signal(arrived.inc())
            .counter(left)
            .issue(&Block)?;
        gin.wait_signal(&Block, arrived, 1, deadline)?;
        // The elements have left `mine`, so it may change.
        gin.wait_counter(&Block, left, 1, deadline)
    };
    if let Err(fault) = exchange() {
        return comm.report(fault);
    }
    for i in Block.stripe(len) {
        mine.add(i, theirs.read(i));
    }
}
