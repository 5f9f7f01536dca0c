// SPDX-License-Identifier: MIT OR Apache-2.0
//! Flow control with credits: a stream of messages through a few slots.
//!
//! ```text
//!   rank r, block 0 (sends)                    rank r + 1, block 1 (receives)
//!   outbox: 4 slots                            inbox: 4 slots
//!   +---+---+---+---+     put, message m       +---+---+---+---+
//!   | 0 | 1 | 2 | 3 | -----------------------> | 0 | 1 | 2 | 3 |   slot m % 4
//!   +---+---+---+---+     signal 0: arrived    +---+---+---+---+
//!                     - - - - - - - - - - - ->
//!                         signal 1: credit       reads the slot, gives it back
//!                     <- - - - - - - - - - - -
//! ```

use gin_device::prelude::*;

/// The number of slots: messages that may be under way at a time.
pub const SLOTS: usize = 4;

/// Returns element `index` of message `message` of rank `from`.
#[must_use]
pub const fn value(from: u32, message: u64, index: usize) -> u32 {
    from * 1000 + message as u32 * 10 + index as u32 % 10
}

// ANCHOR: send
/// Sends `messages` messages of `len` elements to the right neighbour.
fn send(
    gin: &Gin,
    (outbox, inbox): (Window<u32>, Window<u32>),
    len: usize,
    messages: u64,
    deadline: Deadline,
) -> Result<(), Fault> {
    let world = gin.comm().world();
    let (arrived, credit) = (SignalId::new(0), SignalId::new(1));
    for message in 0..messages {
        let slot = message as usize % SLOTS * len;
        // Puts may read their sources in any order, so each slot has its own counter.
        let (left, puts) = (CounterId::new(message as u32 % SLOTS as u32), message / SLOTS as u64);
        gin.wait_counter(&Block, left, puts, deadline)?; // the last put has read this slot of the outbox
        for i in Block.stripe(len) {
            outbox.write(slot + i, value(world.rank(), message, i));
        }
        // Credits come in the order of the messages.
        let earlier = (message + 1).saturating_sub(SLOTS as u64);
        gin.wait_signal(&Block, credit, earlier, deadline)?; // the receiver has read this slot of the inbox
        gin.put(world.right(), inbox.range(slot, len), outbox.range(slot, len))
            .signal(arrived.inc())
            .counter(left)
            .issue(&Block)?;
    }
    Ok(())
}
// ANCHOR_END: send

// ANCHOR: receive
/// Receives the messages of the left neighbour. Returns the sum of the elements that this thread has read.
fn receive(gin: &Gin, inbox: Window<u32>, len: usize, messages: u64, deadline: Deadline) -> Result<u64, Fault> {
    let (arrived, credit) = (SignalId::new(0), SignalId::new(1));
    let mut sum = 0;
    for message in 0..messages {
        let slot = message as usize % SLOTS * len;
        gin.wait_signal(&Block, arrived, message + 1, deadline)?;
        for i in Block.stripe(len) {
            sum += u64::from(inbox.read(slot + i));
        }
        // All threads of the block have read the slot: `issue` begins with a barrier.
        gin.signal(gin.comm().world().left(), credit.inc()).issue(&Block)?;
    }
    Ok(sum)
}
// ANCHOR_END: receive

/// Streams messages round the ring: block 0 sends, block 1 receives. `sums` gets the sum of each thread of block 1.
///
/// # Safety
/// - Two resident blocks, launched once on every rank of a communicator with two signals and [`SLOTS`] counters.
#[kernel]
pub unsafe fn credits(
    comm: Comm,
    outbox: Window<u32>,
    inbox: Window<u32>,
    sums: Window<u64>,
    len: usize,
    messages: u64,
    deadline: Deadline,
) {
    let gin = Gin::new(&comm, ContextId::new(0));
    let outcome = if block_in_grid() == 0 {
        send(&gin, (outbox, inbox), len, messages, deadline)
    } else {
        receive(&gin, inbox, len, messages, deadline).map(|sum| sums.write(Block.rank() as usize, sum))
    };
    if let Err(fault) = outcome {
        comm.report(fault);
    }
}
