// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies that take a while.

use gin_gpu::copier::{Copier, Ticket};
use gin_gpu::copy::copy_shared;
use gin_gpu::{GpuError, Memory};
use gin_net::Endpoint;
use oorandom::Rand64;
use std::collections::VecDeque;

/// The maximum number of calls of `is_done` until the oldest copy is done.
const MAX_LOOKS: u64 = 8;

/// A copier for virtual devices whose copies end after some calls, as those of a GPU do.
#[derive(Debug)]
pub struct LateCopies {
    random: Rand64,
    started: Ticket,
    done: Ticket,
    pending: VecDeque<Pending>,
    /// The number of calls until the oldest copy is done.
    left: u64,
}

#[derive(Debug)]
struct Pending {
    to: u64,
    from: From,
    bytes: u64,
}

#[derive(Debug)]
enum From {
    Memory(u64),
    Value(u64),
}

impl LateCopies {
    /// Makes the copier of a rank. Its choices come from the endpoint's seed.
    #[must_use]
    pub fn new(endpoint: &Endpoint) -> Self {
        let random = Rand64::new(u128::from(endpoint.seed ^ u64::from(endpoint.rank) << 48 ^ 0xc0b1_e500));
        Self { random, started: 0, done: 0, pending: VecDeque::new(), left: 0 }
    }

    fn start(&mut self, to: u64, from: From, bytes: u64) -> Ticket {
        if self.pending.is_empty() {
            self.left = self.random.rand_range(0..MAX_LOOKS);
        }
        self.pending.push_back(Pending { to, from, bytes });
        self.started += 1;
        self.started
    }
}

impl Copier for LateCopies {
    unsafe fn copy(&mut self, to: (&Memory, u64), from: (&Memory, u64), bytes: u64) -> Result<Ticket, GpuError> {
        Ok(self.start(to.1, From::Memory(from.1), bytes))
    }

    unsafe fn store(&mut self, to: (&Memory, u64), value: u64, bytes: u64) -> Result<Ticket, GpuError> {
        Ok(self.start(to.1, From::Value(value), bytes))
    }

    fn is_done(&mut self, ticket: Ticket) -> Result<bool, GpuError> {
        while ticket > self.done && self.left == 0 {
            let Some(Pending { to, from, bytes }) = self.pending.pop_front() else { break };
            let value;
            let from = match from {
                From::Memory(address) => address,
                From::Value(number) => {
                    value = number.to_le_bytes();
                    value.as_ptr().expose_provenance() as u64
                }
            };
            // Safety: the callers of `copy` and `store` promised it.
            unsafe { copy_shared(to, from, bytes) };
            self.done += 1;
            self.left = self.random.rand_range(0..MAX_LOOKS);
        }
        self.left = self.left.saturating_sub(1);
        Ok(ticket <= self.done)
    }
}
