// SPDX-License-Identifier: MIT OR Apache-2.0
//! Makes visible what the NIC has written into a GPU.
//!
//! A completion means that the data has left the NIC, not that it has reached the GPU: PCIe may still delay writes. A
//! read of the GPU's memory by the same NIC is ordered behind them, so when its response arrives they have arrived too.
//! The read uses a queue pair that is connected to itself, as in NCCL.

use super::objects::{Chain, CompletionQueue, Depths, Domain, QueuePair, local};
use super::region::Buffer;
use super::send_queue::Outcome;
use super::status;
use crate::NetError;
use gin_verbs::Access;
use gin_verbs::verbs::{IBV_WR_RDMA_READ, SendWorkRequest, WorkCompletion};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A read by the own NIC takes microseconds; after this time no response is expected any more.
const LIMIT: Duration = Duration::from_secs(1);

/// A loop-back connection.
#[derive(Debug)]
pub(super) struct Flush {
    queue_pair: QueuePair,
    completions: CompletionQueue,
    landing: Buffer,
    chain: Chain,
}

impl Flush {
    pub(super) fn new(domain: &Arc<Domain>) -> Result<Self, NetError> {
        let depths = Depths { send: 2, receive: 1 };
        let completions = CompletionQueue::new(domain, depths.send + depths.receive)?;
        let queue_pair = QueuePair::new(domain, (&completions, &completions), depths, 0)?;
        queue_pair.begin()?;
        queue_pair.connect(&domain.port(0, 0), queue_pair.end())?;
        let landing = Buffer::new(std::slice::from_ref(domain), 8, Access::LOCAL_WRITE)?;
        Ok(Self { queue_pair, completions, landing, chain: Chain::default() })
    }

    /// Starts reading a byte of memory, by its address and remote key.
    pub(super) fn begin(&mut self, (address, key): (u64, u32)) -> Result<(), NetError> {
        self.chain.clear();
        self.chain.push(SendWorkRequest::rdma(IBV_WR_RDMA_READ, address, key), self.landing.sge(0, 1, 0));
        self.chain.signal_last();
        // Safety: `landing` outlives the queue pair, as fields are dropped in order.
        unsafe { self.queue_pair.post(&mut self.chain) }.map_err(|(_, error)| error)
    }

    /// Waits until the byte has been read.
    pub(super) fn end(&mut self, rank: u32) -> Result<(), NetError> {
        let (begin, mut room) = (Instant::now(), [WorkCompletion::default()]);
        loop {
            if let [completion] = self.completions.poll(&mut room)? {
                return match status::outcome(rank, completion) {
                    Outcome::Done => Ok(()),
                    Outcome::Failed(error) | Outcome::Flushed(error) => Err(error),
                };
            }
            if begin.elapsed() > LIMIT {
                // Otherwise a late response would be taken for that of the next read.
                self.queue_pair.fail()?;
                return Err(local(
                    "reading over the loop-back connection",
                    format_args!("no response within {LIMIT:?}"),
                ));
            }
            std::hint::spin_loop();
        }
    }
}
