// SPDX-License-Identifier: MIT OR Apache-2.0
//! A communicator of a rank, and the memory that it registers.

use super::abi::FLAG_STRICT_ORDER;
use super::group::{Contact, Group, Parts};
use super::layout::Window;
use crate::abi::{INTERNAL_ERROR, PTR_CUDA, PTR_HOST};
use crate::failure::Failure;
use crate::gpus::{Machine, Place};
use crate::pair::MAX_RANKS;
use bytemuck::Pod;
use gin_abi::mlx5::be::Be32;
use gin_gpu::{Memory, MemoryKind};
use gin_nic::hca::{Access, Extent};
use gin_nic::{Nic, NicConfig, RegisteredExtent};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A communicator of a rank.
#[derive(Debug)]
pub(super) struct Coll {
    pub(super) machine: &'static Machine,
    pub(super) rank: usize,
    pub(super) gpu: usize,
    // Dropped before the network.
    pub(super) nic: Arc<Nic>,
    pub(super) group: Arc<Group>,
    /// The number of the next collective step.
    step: AtomicU64,
}

impl Coll {
    pub(super) fn connect(machine: &'static Machine, ranks: &[Contact], rank: usize) -> Result<Arc<Self>, Failure> {
        if ranks.len() > MAX_RANKS || rank >= ranks.len() {
            let text = format!("rank {rank} of {} ranks; the limit is {MAX_RANKS} ranks", ranks.len());
            return Err(Failure::argument(text));
        }
        let group = Group::of(machine, ranks)?;
        let nic = Nic::open(Arc::new(group.nic(rank)), NicConfig::default()).map_err(internal)?;
        let gpu = group.gpus[rank];
        Ok(Arc::new(Self { machine, rank, gpu, nic, group, step: AtomicU64::new(0) }))
    }

    pub(super) fn ranks(&self) -> usize {
        self.group.gpus.len()
    }

    /// Adds the rank to the text of a failure.
    pub(super) fn name(&self, failure: Failure) -> Failure {
        Failure { text: format!("rank {}: {}", self.rank, failure.text), ..failure }
    }

    /// Passes `own` to all ranks, and returns what each has passed.
    pub(super) fn gather(&self, step: &'static str, own: Result<Parts, Failure>) -> Result<Vec<Parts>, Failure> {
        self.group.gather((self.rank, self.step.fetch_add(1, Ordering::Relaxed)), step, own)
    }

    /// Passes `part` of the result of own work to all ranks, or its failure. Returns the result, and what each has
    /// passed.
    pub(super) fn gather_with<T>(
        &self,
        step: &'static str,
        own: Result<T, Failure>,
        part: impl FnOnce(&T) -> Parts,
    ) -> Result<(T, Vec<Parts>), Failure> {
        match own {
            Ok(own) => {
                let all = self.gather(step, Ok(part(&own)))?;
                Ok((own, all))
            }
            // The step fails here, too.
            Err(failure) => Err(self.gather(step, Err(failure)).err().unwrap_or_else(|| internal("a failed step"))),
        }
    }

    /// Allocates memory of the GPU with this content.
    pub(super) fn memory<T: Pod>(&self, content: &[T]) -> Result<Arc<Memory>, Failure> {
        let bytes = size_of_val(content).max(8) as u64;
        let memory = self.machine.gpus.memory(self.gpu, MemoryKind::Device, bytes).map_err(Failure::cuda)?;
        memory.write(0, content).map_err(Failure::cuda)?;
        Ok(memory)
    }

    /// Registers memory at address 0 of its region, as NCCL's own back end does: device code has offsets.
    ///
    /// # Safety
    /// - The engine reaches the memory, which exists until the result is dropped.
    pub(super) unsafe fn region(&self, address: u64, bytes: u64, access: Access) -> Result<RegisteredExtent, Failure> {
        let extent = Extent { address, bytes, dma_buf: None };
        // Safety: the caller's promise. NCCL registers memory for accesses by NICs.
        unsafe { RegisteredExtent::new(&self.nic, &extent, 0, access) }.map_err(internal)
    }

    /// Registers memory together with all ranks.
    ///
    /// # Safety
    /// - The memory exists until it is deregistered.
    pub(super) unsafe fn register(
        self: &Arc<Self>,
        address: u64,
        bytes: u64,
        kind: i32,
        flags: u64,
    ) -> Result<Registered, Failure> {
        let access = if flags & FLAG_STRICT_ORDER == 0 { Access::PAYLOAD } else { Access::SIGNALS };
        // Safety of both: the caller's promise.
        let region = self
            .check(address, bytes, kind)
            .and_then(|()| {
                unsafe { self.machine.gpus.reach(self.group.gpus[0], address, bytes) }.map_err(Failure::cuda)
            })
            .and_then(|()| unsafe { self.region(address, bytes, access) });
        let (region, all) =
            self.gather_with("registering memory", region, |region| vec![key_part(region.remote_key)])?;
        let keys = self.memory(&keys(&all, 0)?)?;
        let window = self.memory(&[Window::new(keys.address(), region.local_key)])?;
        Ok(Registered { _region: region, window, _keys: keys, _coll: self.clone() })
    }

    fn check(&self, address: u64, bytes: u64, kind: i32) -> Result<(), Failure> {
        let refuse = |text: &str| Err(Failure::argument(format!("{bytes} bytes at {address:#x}: {text}")));
        if address == 0 || bytes == 0 || address.checked_add(bytes).is_none() {
            return refuse("no memory to register");
        }
        match (kind, self.machine.gpus.place(address).map_err(Failure::cuda)?) {
            (PTR_CUDA | PTR_HOST, Place::Cpu) => refuse("no GPU reaches it; register memory of a GPU or pinned memory"),
            (PTR_CUDA | PTR_HOST, _) => Ok(()),
            _ => refuse("a type of memory that this version does not know"),
        }
    }
}

/// Returns a key in the form of entries, as a part.
pub(super) fn key_part(key: u32) -> Vec<u8> {
    Be32::new(key).memory().to_ne_bytes().to_vec()
}

/// Returns part `index` of each rank, a key in the form of entries.
pub(super) fn keys(all: &[Parts], index: usize) -> Result<Vec<u32>, Failure> {
    let key = |parts: &Parts| Some(u32::from_ne_bytes(parts.get(index)?.as_slice().try_into().ok()?));
    let keys: Option<Vec<u32>> = all.iter().map(key).collect();
    keys.ok_or_else(|| Failure::new(INTERNAL_ERROR, "a rank has passed no key"))
}

pub(super) fn internal(error: impl fmt::Display) -> Failure {
    Failure::new(INTERNAL_ERROR, error.to_string())
}

/// The handle of a registration, which NCCL passes back.
#[derive(Debug)]
pub(super) struct Registered {
    // Deregistered before anything else.
    _region: RegisteredExtent,
    /// The structure that device code reads.
    pub(super) window: Arc<Memory>,
    _keys: Arc<Memory>,
    _coll: Arc<Coll>,
}
