// SPDX-License-Identifier: MIT OR Apache-2.0
//! Making visible what the NIC has written into a GPU.
//!
//! A completion says that the data has left the NIC, not that the GPU has it: writes may wait on their way over PCIe. A read
//! of the GPU's memory by the same NIC comes behind them, so when it is answered they are there. It goes over a queue
//! pair that is connected to itself, as NCCL's does.

use super::objects::{Chain, Completions, Depths, Domain, Queue};
use super::region::{Buffer, Reach};
use super::status;
use crate::NetError;
use crate::verbs::ledger::Outcome;
use gin_verbs::verbs::{FLAG, OPCODE, SendRequest, WorkCompletion};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A read of the own NIC takes microseconds; after so long it will not come any more.
const LIMIT: Duration = Duration::from_secs(1);

const WHAT: &str = "reading over the loop-back connection";

/// The connection.
#[derive(Debug)]
pub(super) struct Flush {
    queue: Queue,
    completions: Completions,
    landing: Buffer,
    chain: Chain,
}

impl Flush {
    pub(super) fn new(domain: &Arc<Domain>) -> Result<Self, NetError> {
        let depths = Depths { send: 2, receive: 1 };
        let completions = Completions::new(domain, depths.send + depths.receive)?;
        let queue = Queue::new(domain, (&completions, &completions), depths, 0)?;
        queue.begin()?;
        queue.connect(&domain.port(0, 0), queue.end())?;
        let landing = Buffer::new(std::slice::from_ref(domain), 8, Reach::Own)?;
        Ok(Self { queue, completions, landing, chain: Chain::default() })
    }

    /// Begins to read a byte of memory that the NIC reaches by this address and key, which its peers use.
    pub(super) fn begin(&mut self, (address, key): (u64, u32)) -> Result<(), NetError> {
        let mut request = SendRequest::new(OPCODE[2]);
        (request.remote_addr, request.rkey, request.send_flags) = (address, key, FLAG[1]);
        self.chain.clear();
        self.chain.push(request, Some(self.landing.piece(0, 1, 0)));
        // Safety: the landing place stays longer than the queue pair: fields are dropped in their order.
        unsafe { self.queue.post(&mut self.chain) }.map_err(|(_, error)| error)
    }

    /// Waits until it has been read.
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
                // Its answer would be taken for that of the next.
                self.queue.fail()?;
                return Err(NetError::Local { what: WHAT, reason: format!("no answer within {LIMIT:?}") });
            }
            std::hint::spin_loop();
        }
    }
}
