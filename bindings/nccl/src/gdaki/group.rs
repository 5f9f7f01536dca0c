// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ranks of a communicator: threads of one process, which share a network of software NICs.

use super::progress::Idle;
use crate::abi::{HANDLE_BYTES, INTERNAL_ERROR};
use crate::contact::PATIENCE;
use crate::failure::Failure;
use crate::gpus::Machine;
use gin_gpu::lock;
use gin_gpu::registry::process;
use gin_nic::HcaError;
use gin_soft_nic_host::{Options, SoftConfig, SoftEngine, SoftFabric, SoftHca};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Instant;

/// The first bytes of a handle of this version of the plugin.
const MAGIC: [u8; 8] = *b"gin-gda1";

/// The maximum number of the engine's steps from a request to its answer.
const DELAY: u64 = 4;

/// The content of the handle of a rank, which all ranks get.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Contact {
    process: [u8; 16],
    /// Its number, which no other has in its process.
    number: u64,
    /// The number of its GPU in its process.
    gpu: u64,
}

impl Contact {
    /// Names the rank of the calling thread.
    pub(super) fn new(machine: &Machine) -> Result<Self, Failure> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let Some(gpu) = machine.gpus.current().map_err(Failure::cuda)? else {
            return Err(Failure::argument("the thread that sets up a communicator has chosen no GPU"));
        };
        Ok(Self { process: process(), number: NEXT.fetch_add(1, Ordering::Relaxed), gpu: gpu as u64 })
    }

    pub(super) fn to_bytes(self) -> [u8; HANDLE_BYTES] {
        let mut bytes = [0; HANDLE_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..24].copy_from_slice(&self.process);
        bytes[24..32].copy_from_slice(&self.number.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.gpu.to_le_bytes());
        bytes
    }

    pub(super) fn read(rank: usize, bytes: &[u8; HANDLE_BYTES]) -> Result<Self, Failure> {
        let part = |first: usize| -> [u8; 8] { std::array::from_fn(|index| bytes[first + index]) };
        if part(0) != MAGIC {
            return Err(Failure::argument(format!(
                "rank {rank} has another GIN plugin, or another version of this one; set the same NCCL_GIN_PLUGIN for \
                 all ranks"
            )));
        }
        Ok(Self {
            process: std::array::from_fn(|index| bytes[8 + index]),
            number: u64::from_le_bytes(part(24)),
            gpu: u64::from_le_bytes(part(32)),
        })
    }
}

/// The bytes that a rank passes to all ranks, in parts.
pub(super) type Parts = Vec<Vec<u8>>;

/// A collective step.
#[derive(Debug)]
struct Round {
    /// Names the step in errors.
    step: &'static str,
    /// By rank; the reason if the rank has failed.
    parts: Vec<Option<Result<Parts, String>>>,
    /// The number of ranks that have read all parts.
    readers: usize,
}

/// The ranks of a communicator.
#[derive(Debug)]
pub(super) struct Group {
    /// By rank.
    pub(super) gpus: Vec<usize>,
    pub(super) fabric: SoftFabric,
    /// By number.
    rounds: Mutex<BTreeMap<u64, Round>>,
    has_part: Condvar,
    pub(super) idle: Idle,
}

/// The groups of the process, by the number of rank 0.
static GROUPS: Mutex<BTreeMap<u64, Weak<Group>>> = Mutex::new(BTreeMap::new());

impl Group {
    /// Returns the group of these ranks. The first rank makes it.
    pub(super) fn of(machine: &Machine, ranks: &[Contact]) -> Result<Arc<Self>, Failure> {
        let own = process();
        if let Some(rank) = ranks.iter().position(|rank| rank.process != own) {
            return Err(Failure::argument(format!(
                "rank {rank} is in another process; queue pairs of the software NIC serve one process. Run all ranks \
                 as threads of one process, or unset NCCL_GIN_PLUGIN and set NCCL_RMA_PLUGIN"
            )));
        }
        let Some(first) = ranks.first() else {
            return Err(Failure::argument("a communicator without ranks"));
        };
        let mut groups = lock(&GROUPS);
        groups.retain(|_, group| group.strong_count() > 0);
        if let Some(group) = groups.get(&first.number).and_then(Weak::upgrade) {
            return Ok(group);
        }
        let fabric = SoftFabric::new(Options {
            // NICs answer late, and each queue pair in its own time.
            delay: DELAY,
            seed: first.number,
            early_doorbells: true,
            ignore_reserved: true,
            dump_waits_for_reads: true,
            ..Options::default()
        });
        let device = machine.gpus.device(first.gpu as usize).map_err(Failure::cuda)?;
        fabric.place(SoftEngine::Thread, &device).map_err(nic)?;
        let group = Arc::new(Self {
            gpus: ranks.iter().map(|rank| rank.gpu as usize).collect(),
            fabric,
            rounds: Mutex::default(),
            has_part: Condvar::new(),
            idle: Idle::default(),
        });
        groups.insert(first.number, Arc::downgrade(&group));
        Ok(group)
    }

    /// Adds the NIC of a rank.
    pub(super) fn nic(&self, rank: usize) -> SoftHca {
        self.fabric.add(SoftConfig::infiniband(rank as u16))
    }

    /// Passes `own` to all ranks, which call this in the same order, and returns what each has passed. An error of a
    /// rank fails the step on all ranks.
    pub(super) fn gather(
        &self,
        (rank, number): (usize, u64),
        step: &'static str,
        own: Result<Parts, Failure>,
    ) -> Result<Vec<Parts>, Failure> {
        let start = Instant::now();
        let count = self.gpus.len();
        let mut rounds = lock(&self.rounds);
        let round = rounds.entry(number).or_insert_with(|| Round { step, parts: vec![None; count], readers: 0 });
        let began = round.step;
        let own = if began == step {
            own
        } else {
            let text = format!("rank {rank} is {step} while another rank is {began}");
            Err(Failure::new(INTERNAL_ERROR, text))
        };
        round.parts[rank] = Some(own.as_ref().map_err(|failure| failure.text.clone()).cloned());
        self.has_part.notify_all();
        own?;
        loop {
            // The round exists until all ranks have read it.
            let parts = rounds.get(&number).map_or(&[][..], |round| &round.parts);
            let failed = parts.iter().enumerate().find_map(|(rank, part)| match part {
                Some(Err(reason)) => Some(format!("{step}: rank {rank} has failed: {reason}")),
                _ => None,
            });
            if let Some(text) = failed {
                return Err(Failure::new(INTERNAL_ERROR, text));
            }
            let all: Option<Vec<Parts>> = parts.iter().map(|part| part.clone().and_then(Result::ok)).collect();
            if let Some(all) = all {
                if let Some(round) = rounds.get_mut(&number) {
                    round.readers += 1;
                    if round.readers == count {
                        rounds.remove(&number);
                    }
                }
                return Ok(all);
            }
            let Some(left) = PATIENCE.checked_sub(start.elapsed()) else {
                let missing = parts.iter().position(Option::is_none).unwrap_or_default();
                let text = format!("{step}: rank {missing} has not called within {PATIENCE:?}");
                return Err(Failure::new(INTERNAL_ERROR, text));
            };
            rounds = self.has_part.wait_timeout(rounds, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Returns an error of a NIC.
pub(super) fn nic(error: HcaError) -> Failure {
    Failure::new(INTERNAL_ERROR, error.to_string())
}
