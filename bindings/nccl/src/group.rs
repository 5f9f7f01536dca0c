// SPDX-License-Identifier: MIT OR Apache-2.0
//! How the ranks of a communicator find each other, and the regions of each.

use crate::abi::{CUDA_ERROR, FLAG_NEVER_RESET, HANDLE_BYTES, INTERNAL_ERROR, PTR_CUDA, PTR_HOST};
use crate::gpus::{Machine, Place};
use crate::log;
use crate::region::{Handle, Region};
use crate::table::Failure;
use crate::transfer::{MAX_RANKS, Pair};
use gin_gpu::copier::Ticket;
use gin_gpu::lane::Mark;
use gin_gpu::lock;
use gin_gpu::registry::process;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// The time that ranks have for steps that all of them do at the same time, and copies to end.
const PATIENCE: Duration = Duration::from_secs(10);

/// The first bytes of a handle of this version of the plugin.
const MAGIC: [u8; 8] = *b"gin-rma1";

/// The rank that listens: the content of the handle that all ranks get.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Listen {
    process: [u8; 16],
    /// Its number, which no other has in this process.
    number: u64,
    gpu: u64,
}

impl Listen {
    pub(crate) fn new(machine: &Machine) -> Result<Self, Failure> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let Some(gpu) = machine.gpus.current().map_err(Failure::cuda)? else {
            return Err(Failure::argument("the thread that sets up a communicator has chosen no GPU"));
        };
        Ok(Self { process: process(), number: NEXT.fetch_add(1, Ordering::Relaxed), gpu: gpu as u64 })
    }

    pub(crate) fn to_bytes(self) -> [u8; HANDLE_BYTES] {
        let mut bytes = [0; HANDLE_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..24].copy_from_slice(&self.process);
        bytes[24..32].copy_from_slice(&self.number.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.gpu.to_le_bytes());
        bytes
    }

    /// Reads the handle of a rank, which must be of this process.
    pub(crate) fn read(rank: usize, bytes: &[u8; HANDLE_BYTES]) -> Result<Self, Failure> {
        let part = |first: usize| -> [u8; 8] { std::array::from_fn(|index| bytes[first + index]) };
        if part(0) != MAGIC {
            return Err(Failure::argument(format!(
                "rank {rank} has another RMA plugin, or another version of this one; set the same NCCL_RMA_PLUGIN \
                 for all ranks"
            )));
        }
        let process_of: [u8; 16] = std::array::from_fn(|index| bytes[8 + index]);
        if process_of != process() {
            return Err(Failure::new(
                INTERNAL_ERROR,
                format!(
                    "rank {rank} is in another process; this plugin serves ranks that are threads of one process: \
                     start one process for all GPUs, or set NCCL_RMA_PLUGIN=none"
                ),
            ));
        }
        let (number, gpu) = (u64::from_le_bytes(part(24)), u64::from_le_bytes(part(32)));
        Ok(Self { process: process_of, number, gpu })
    }
}

/// The ranks of a communicator.
#[derive(Debug)]
pub(crate) struct Group {
    /// The GPU of each rank.
    pub(crate) gpus: Vec<usize>,
    ranks: Vec<Rank>,
}

/// A rank as the others see it.
#[derive(Debug, Default)]
struct Rank {
    /// Its regions, by number; `None` once one is deregistered.
    regions: Mutex<Vec<Option<Arc<Region>>>>,
    coll: Mutex<Weak<Coll>>,
}

/// The groups of the process, by the number of the handle of rank 0.
static GROUPS: Mutex<BTreeMap<u64, Weak<Group>>> = Mutex::new(BTreeMap::new());

impl Group {
    /// Returns the group of these ranks. The first rank makes it.
    fn of(ranks: &[Listen]) -> Arc<Self> {
        let mut groups = lock(&GROUPS);
        groups.retain(|_, group| group.strong_count() > 0);
        let number = ranks.first().map_or(0, |rank| rank.number);
        if let Some(group) = groups.get(&number).and_then(Weak::upgrade) {
            return group;
        }
        let gpus = ranks.iter().map(|rank| rank.gpu as usize).collect();
        let group = Arc::new(Self { gpus, ranks: ranks.iter().map(|_| Rank::default()).collect() });
        groups.insert(number, Arc::downgrade(&group));
        group
    }

    /// Returns a region of a rank. If the rank is still registering, waits for it: it does so in the same collective
    /// call, on another thread, and needs nothing of this one.
    pub(crate) fn find(&self, rank: usize, number: usize) -> Result<Arc<Region>, Failure> {
        let start = Instant::now();
        loop {
            let found = lock(&self.ranks[rank].regions).get(number).cloned();
            match found {
                Some(Some(region)) => return Ok(region),
                Some(None) => {
                    return Err(Failure::argument(format!("rank {rank} has deregistered region {number}")));
                }
                None if start.elapsed() > PATIENCE => {
                    let text = format!("rank {rank} has not registered region {number} after {PATIENCE:?}");
                    return Err(Failure::new(INTERNAL_ERROR, text));
                }
                None => std::thread::yield_now(),
            }
        }
    }
}

/// A communicator of a rank.
#[derive(Debug)]
pub(crate) struct Coll {
    pub(crate) machine: &'static Machine,
    pub(crate) group: Arc<Group>,
    pub(crate) rank: usize,
    /// By peer.
    pub(crate) pairs: Vec<Mutex<Pair>>,
    /// The marks of each pair's lanes, by peer.
    pub(crate) marks: Vec<[Arc<Mark>; Pair::MARKS]>,
    has_failed: AtomicBool,
}

impl Coll {
    /// Connects a rank. Each use that a request may make of a lane is made once now, because the driver may allocate at
    /// the first one.
    pub(crate) fn connect(machine: &'static Machine, ranks: &[Listen], rank: usize) -> Result<Arc<Self>, Failure> {
        if ranks.len() > MAX_RANKS || rank >= ranks.len() {
            let text = format!("rank {rank} of {} ranks; the limit is {MAX_RANKS} ranks", ranks.len());
            return Err(Failure::argument(text));
        }
        let group = Group::of(ranks);
        let own = group.gpus[rank];
        for (peer, &gpu) in group.gpus.iter().enumerate() {
            if !machine.gpus.copies_reach(own, gpu).map_err(Failure::cuda)? {
                return Err(Failure::argument(format!(
                    "GPU {own} of rank {rank} has no peer access to GPU {gpu} of rank {peer}, so no copy between them \
                     is direct; use GPUs with peer access (nvidia-smi topo -p2p r), or set NCCL_RMA_PLUGIN=none"
                )));
            }
        }
        let pairs =
            group.gpus.iter().map(|&gpu| Pair::new(machine, &group.gpus, own, gpu)).collect::<Result<Vec<_>, _>>();
        let pairs = pairs.map_err(Failure::cuda)?;
        let marks = pairs.iter().map(Pair::marks).collect();
        let ends: Vec<_> = pairs.iter().flat_map(Pair::under_way).collect();
        wait_for(&ends, || Ok(()))?;
        let pairs = pairs.into_iter().map(Mutex::new).collect();
        let coll = Arc::new(Self { machine, group, rank, pairs, marks, has_failed: AtomicBool::new(false) });
        *lock(&coll.group.ranks[rank].coll) = Arc::downgrade(&coll);
        Ok(coll)
    }

    /// Registers memory.
    ///
    /// # Safety
    /// - The memory exists until it is deregistered.
    pub(crate) unsafe fn register(&self, address: u64, bytes: u64, kind: i32, flags: u64) -> Result<Handle, Failure> {
        let refuse = |text: &str| Failure::argument(format!("{bytes} bytes at {address:#x}: {text}"));
        if address == 0 || bytes == 0 || address.checked_add(bytes).is_none() {
            return Err(refuse("no memory to register"));
        }
        let mut place = self.machine.gpus.place(address).map_err(Failure::cuda)?;
        match (kind, place) {
            (PTR_CUDA, Place::Cpu) => return Err(refuse("not memory of a GPU")),
            (PTR_CUDA | PTR_HOST, _) => {}
            _ => return Err(refuse("a type of memory that this version does not know")),
        }
        if place != Place::Cpu {
            let mut gpus = self.group.gpus.iter();
            // Safety: the caller's promise.
            match gpus.try_for_each(|&gpu| unsafe { self.machine.gpus.reach(gpu, address, bytes) }) {
                // NCCL registers memory of the host also where no request uses it.
                Err(error) if place == Place::Host => {
                    log::info(&format!("rank {}: requests can take values from it only: {error}", self.rank));
                    place = Place::Cpu;
                }
                reached => reached.map_err(Failure::cuda)?,
            }
        }
        let is_table = flags & FLAG_NEVER_RESET != 0 && place != Place::Cpu;
        let region = Arc::new(Region::new(self.rank, address, bytes, place, is_table));
        let mut regions = lock(&self.group.ranks[self.rank].regions);
        regions.push(Some(region.clone()));
        Ok(Handle::new(regions.len() - 1, region, self.group.gpus.len()))
    }

    /// Deregisters memory, once no copy or write of any rank uses it.
    pub(crate) fn deregister(&self, handle: &Handle) -> Result<(), Failure> {
        handle.own.close();
        if let Some(region) = lock(&self.group.ranks[self.rank].regions).get_mut(handle.number) {
            *region = None;
        }
        let mut ends = Vec::new();
        for rank in &self.group.ranks {
            let Some(coll) = lock(&rank.coll).upgrade() else { continue };
            for (peer, pair) in coll.pairs.iter().enumerate() {
                if coll.rank == self.rank || peer == self.rank {
                    // A request that has found the region open has its place in a lane when the pair is free.
                    ends.extend(lock(pair).under_way());
                }
            }
        }
        wait_for(&ends, || self.check())
    }

    /// Waits until nothing of this rank is under way.
    pub(crate) fn finish(&self) -> Result<(), Failure> {
        let ends: Vec<_> = self.pairs.iter().flat_map(|pair| lock(pair).under_way()).collect();
        wait_for(&ends, || self.check())
    }

    /// Checks that no copy or write of this rank has failed.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        self.pairs.iter().enumerate().try_for_each(|(peer, pair)| {
            lock(pair).check().map_err(|error| self.fail(Failure::cuda(error), &format!("copies to rank {peer}")))
        })
    }

    /// Notes that requests have failed, and adds the rank and the operation to the text.
    pub(crate) fn fail(&self, failure: Failure, operation: &str) -> Failure {
        self.has_failed.store(true, Ordering::Relaxed);
        self.name(failure, operation)
    }

    /// Adds the rank and the operation to the text of a failure.
    pub(crate) fn name(&self, failure: Failure, operation: &str) -> Failure {
        Failure { text: format!("rank {}: {operation}: {}", self.rank, failure.text), ..failure }
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }
}

/// Waits until ends are reached.
fn wait_for(ends: &[(Arc<Mark>, Ticket)], check: impl Fn() -> Result<(), Failure>) -> Result<(), Failure> {
    let start = Instant::now();
    for (mark, ticket) in ends {
        while !mark.has_reached(*ticket) {
            check()?;
            if start.elapsed() > PATIENCE {
                let text = format!("a copy between GPUs has not ended after {PATIENCE:?}");
                return Err(Failure::new(CUDA_ERROR, text));
            }
            std::thread::yield_now();
        }
    }
    Ok(())
}
