// SPDX-License-Identifier: MIT OR Apache-2.0
//! How the ranks of a communicator find each other, and the regions of each.

use crate::abi::{CUDA_ERROR, FLAG_NEVER_RESET, HANDLE_BYTES, INTERNAL_ERROR, PTR_CUDA, PTR_HOST};
use crate::contact::{Contact, FIXED, PATIENCE};
use crate::failure::Failure;
use crate::gpus::{Machine, Place};
use crate::inbox::Inbound;
use crate::log;
use crate::page::Gone;
use crate::pair::{MAX_RANKS, Pair, raise, use_once};
use crate::process::{Board, MAX_SENDERS, Remote, files};
use crate::region::{Handle, Region, Segment, Words};
use gin_gpu::copier::Ticket;
use gin_gpu::lane::Mark;
use gin_gpu::lock;
use gin_gpu::registry::process;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, TryLockError, Weak};
use std::time::Instant;

/// The rank that listens.
#[derive(Debug)]
pub(crate) struct Listen {
    pub(crate) contact: Contact,
    /// The reason for which there is none, if other processes cannot map memory of this one.
    board: Result<Arc<Board>, String>,
}

impl Listen {
    pub(crate) fn new(machine: &Machine) -> Result<Self, Failure> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let Some(gpu) = machine.gpus.current().map_err(Failure::cuda)? else {
            return Err(Failure::argument("the thread that sets up a communicator has chosen no GPU"));
        };
        let device = machine.gpus.device(gpu).map_err(Failure::cuda)?;
        let mut identity = device.sharing().map(|sharing| sharing.identity()).unwrap_or_default();
        identity.truncate(HANDLE_BYTES - FIXED);
        let board = Board::new(device).map(Arc::new);
        if let Err(reason) = &board {
            log::info(&format!("GPU {gpu}: ranks in other processes cannot reach this one: {reason}"));
        }
        let key = board.as_ref().ok().map(|board| board.key);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok(Self { contact: Contact { process: process(), number, gpu: gpu as u64, key, identity }, board })
    }
}

/// The ranks of a communicator.
#[derive(Debug)]
pub(crate) struct Group {
    /// The GPU of each rank of this process; `None` for a rank of another one.
    gpus: Vec<Option<usize>>,
    ranks: Vec<Rank>,
}

/// A rank as the others see it.
#[derive(Debug, Default)]
struct Rank {
    /// Its regions, by number; `None` once one is deregistered.
    regions: Mutex<Vec<Option<Arc<Region>>>>,
    coll: Mutex<Weak<Coll>>,
}

/// The process and the number of the handle of a rank.
type Name = ([u8; 16], u64);

/// The groups of the process, by the name of rank 0.
static GROUPS: Mutex<BTreeMap<Name, Weak<Group>>> = Mutex::new(BTreeMap::new());

impl Group {
    /// Returns the group of these ranks. The first rank makes it.
    fn of(ranks: &[Contact]) -> Arc<Self> {
        let mut groups = lock(&GROUPS);
        groups.retain(|_, group| group.strong_count() > 0);
        let name = ranks.first().map_or_else(Default::default, |rank| (rank.process, rank.number));
        if let Some(group) = groups.get(&name).and_then(Weak::upgrade) {
            return group;
        }
        let gpus = ranks.iter().map(Contact::gpu_here).collect();
        let group = Arc::new(Self { gpus, ranks: ranks.iter().map(|_| Rank::default()).collect() });
        groups.insert(name, Arc::downgrade(&group));
        group
    }

    /// Returns the GPUs of this process.
    fn here(&self) -> impl Iterator<Item = usize> {
        self.gpus.iter().flatten().copied()
    }

    /// Returns a region of a rank of this process. If the rank is still registering, waits for it: it does so in the
    /// same collective call, on another thread, which waits for no other rank.
    fn find(&self, rank: usize, number: usize) -> Result<Arc<Region>, Failure> {
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
    pub(crate) gpu: usize,
    /// By peer.
    pub(crate) pairs: Vec<Mutex<Pair>>,
    /// The marks of each pair's lanes, by peer.
    pub(crate) marks: Vec<[Arc<Mark>; Pair::MARKS]>,
    /// The ranks of other processes, by peer.
    pub(crate) remotes: Vec<Option<Remote>>,
    inbound: Vec<Mutex<Inbound>>,
    /// Exists if there are ranks of other processes.
    board: Option<Arc<Board>>,
    /// Messages wait for room in an inbox.
    pub(crate) has_backlog: AtomicBool,
    has_failed: AtomicBool,
}

impl Coll {
    /// Connects a rank. Each use that a request may make of a lane is made once now, because the driver may allocate at
    /// the first one.
    pub(crate) fn connect(
        machine: &'static Machine,
        ranks: &[Contact],
        rank: usize,
        listen: Option<&Listen>,
    ) -> Result<Arc<Self>, Failure> {
        if ranks.len() > MAX_RANKS || rank >= ranks.len() {
            let text = format!("rank {rank} of {} ranks; the limit is {MAX_RANKS} ranks", ranks.len());
            return Err(Failure::argument(text));
        }
        let group = Group::of(ranks);
        let Some(own) = group.gpus[rank] else {
            return Err(Failure::argument(format!("the handle of rank {rank}, this one, is of another process")));
        };
        for (peer, gpu) in group.gpus.iter().enumerate() {
            if let Some(gpu) = *gpu
                && !machine.gpus.copies_reach(own, gpu).map_err(Failure::cuda)?
            {
                return Err(Failure::argument(format!(
                    "GPU {own} of rank {rank} has no peer access to GPU {gpu} of rank {peer}, so no copy between them \
                     is direct; use GPUs with peer access (nvidia-smi topo -p2p r), or set NCCL_RMA_PLUGIN=none"
                )));
            }
        }
        let board = if group.gpus.contains(&None) { Some(Self::board(ranks.len(), listen)?) } else { None };
        let reach = |(peer, contact): (usize, &Contact)| {
            let is_remote = group.gpus[peer].is_none();
            is_remote.then(|| Remote::new(machine, own, peer, contact)).transpose()
        };
        let remotes = ranks.iter().enumerate().map(reach).collect::<Result<Vec<_>, _>>()?;
        let (mut pairs, mut inbound, mut ends) = (Vec::new(), Vec::new(), Vec::new());
        for (peer, remote) in remotes.iter().enumerate() {
            let pair = match (remote, group.gpus[peer]) {
                (Some(remote), _) => Pair::to_process(machine, own, rank, remote),
                (None, gpu) => {
                    let others = group.here().find(|&gpu| gpu != own);
                    let next = remotes[(rank + 1) % ranks.len()].as_ref();
                    Pair::new(machine, own, gpu.unwrap_or(own), others, next)
                }
            };
            let pair = pair.map_err(Failure::cuda)?;
            ends.extend(pair.in_flight());
            pairs.push(pair);
            if let (Some(remote), Some(board)) = (remote, &board) {
                let mut new =
                    Inbound::new(remote.rank, board.ring(peer), machine.gpus.lane(own).map_err(Failure::cuda)?);
                new.end = use_once(machine, own, &mut *new.lane).map_err(Failure::cuda)?;
                ends.push((new.lane.mark().clone(), new.end));
                inbound.push(Mutex::new(new));
            }
        }
        wait_for(&ends, || Ok(()))?;
        let coll = Arc::new(Self {
            machine,
            rank,
            gpu: own,
            marks: pairs.iter().map(Pair::marks).collect(),
            pairs: pairs.into_iter().map(Mutex::new).collect(),
            remotes,
            inbound,
            board,
            has_backlog: AtomicBool::new(false),
            has_failed: AtomicBool::new(false),
            group,
        });
        *lock(&coll.group.ranks[rank].coll) = Arc::downgrade(&coll);
        Ok(coll)
    }

    /// Returns the board for ranks of other processes.
    fn board(ranks: usize, listen: Option<&Listen>) -> Result<Arc<Board>, Failure> {
        if ranks > MAX_SENDERS {
            let text = format!("{ranks} ranks in several processes; the limit is {MAX_SENDERS}, and one host for all");
            return Err(Failure::argument(text));
        }
        let listen = listen.ok_or_else(|| Failure::argument("no listen object"))?;
        listen.board.clone().map_err(|reason| {
            let text = format!("ranks in other processes cannot reach this one: {reason}");
            Failure::new(INTERNAL_ERROR, text)
        })
    }

    /// Returns region `number` of a rank. If the rank is still registering, waits for it.
    fn find(&self, rank: usize, number: usize) -> Result<Arc<Region>, Failure> {
        match &self.remotes[rank] {
            Some(remote) => remote.region(number),
            None => self.group.find(rank, number),
        }
    }

    /// Returns the region of a rank that belongs to a registration of this one.
    pub(crate) fn region<'a>(&self, handle: &'a Handle, rank: usize) -> Result<&'a Region, Failure> {
        handle.of(rank, || self.find(rank, handle.number))
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
            // Safety: the caller's promise.
            let mut reach = |gpu| unsafe { self.machine.gpus.reach(gpu, address, bytes) };
            match self.group.here().try_for_each(&mut reach) {
                // NCCL registers memory of the host also where no request uses it.
                Err(error) if place == Place::Host => {
                    log::info(&format!("rank {}: requests can take values from it only: {error}", self.rank));
                    place = Place::Cpu;
                }
                reached => reached.map_err(Failure::cuda)?,
            }
        }
        let mut memory = Vec::new();
        if self.board.is_some() && place != Place::Cpu {
            match files(self.machine, self.gpu, address, bytes) {
                Ok(files) => memory = files,
                // As the tables of signals of NCCL, into which no rank copies.
                Err(reason) => log::info(&format!("rank {}: no process copies to it: {reason}", self.rank)),
            }
        }
        let is_table = flags & FLAG_NEVER_RESET != 0 && place != Place::Cpu;
        let region = Arc::new(Region {
            rank: self.rank,
            bytes,
            place,
            segments: [Segment { address, bytes }].into(),
            words: is_table.then(|| Words::new((bytes / 8) as usize)),
            gone: Gone::here(),
            memory,
        });
        let mut regions = lock(&self.group.ranks[self.rank].regions);
        regions.push(Some(region.clone()));
        let number = regions.len() - 1;
        drop(regions);
        if let Some(board) = &self.board {
            board.enter(number, &region).map_err(Failure::cuda)?;
        }
        let handle = Handle::new(number, region, self.group.gpus.len());
        // A request would map the memory at its first use, while kernels run. This rank waits for the others here only
        // if the thread of no other rank of this process may have to register first.
        if place != Place::Cpu && self.group.here().count() == 1 {
            for rank in (0..self.remotes.len()).filter(|&rank| rank != self.rank) {
                self.region(&handle, rank)?;
            }
        }
        Ok(handle)
    }

    /// Deregisters memory, once no copy or write of any rank uses it.
    pub(crate) fn deregister(&self, handle: &Handle) -> Result<(), Failure> {
        handle.own.gone.set();
        if let Some(board) = &self.board {
            board.leave(handle.number);
        }
        if let Some(region) = lock(&self.group.ranks[self.rank].regions).get_mut(handle.number) {
            *region = None;
        }
        let mut ends = self.received();
        for rank in &self.group.ranks {
            let Some(coll) = lock(&rank.coll).upgrade() else { continue };
            for (peer, pair) in coll.pairs.iter().enumerate() {
                if coll.rank == self.rank || peer == self.rank {
                    // A request that has found the region open has its place in a lane when the pair is free.
                    ends.extend(lock(pair).in_flight());
                }
            }
        }
        self.wait(&ends)
    }

    /// Returns the ends of the writes for signals of other processes.
    fn received(&self) -> Vec<(Arc<Mark>, Ticket)> {
        let end = |inbound: &Mutex<Inbound>| {
            // A signal that has found its region open has its place in the lane when the inbox is free.
            let inbound = lock(inbound);
            (inbound.lane.mark().clone(), inbound.end)
        };
        self.inbound.iter().map(end).collect()
    }

    /// Waits until all work of this rank has ended.
    pub(crate) fn finish(&self) -> Result<(), Failure> {
        let mut ends = self.received();
        ends.extend(self.pairs.iter().flat_map(|pair| lock(pair).in_flight()));
        self.wait(&ends)
    }

    /// Waits until ends are reached. An end that waits for a process that has ended is reached early.
    fn wait(&self, ends: &[(Arc<Mark>, Ticket)]) -> Result<(), Failure> {
        wait_for(ends, || {
            for inbound in &self.inbound {
                let inbound = lock(inbound);
                if let Some(sender) = &self.remotes[inbound.sender] {
                    inbound.release(|| sender.has_ended());
                }
            }
            self.check()
        })
    }

    /// Tells the ranks of other processes that this one ends.
    pub(crate) fn close(&self) {
        if let Some(board) = &self.board {
            board.close();
        }
    }

    /// Raises the signals of other processes that are ready, and sends messages that have waited for room.
    pub(crate) fn progress(&self) -> Result<(), Failure> {
        for inbound in &self.inbound {
            let mut inbound = match inbound.try_lock() {
                Ok(inbound) => inbound,
                Err(TryLockError::Poisoned(broken)) => broken.into_inner(),
                // Another thread of NCCL raises them.
                Err(TryLockError::WouldBlock) => continue,
            };
            let sender = inbound.sender;
            let regions = &self.group.ranks[self.rank].regions;
            let raised = inbound.take(|lane, message| {
                // The sender has seen the region on the board, so it is gone if it is not known any more. Nobody waits
                // for signals in memory that is gone.
                let find = |number: u64| lock(regions).get(number as usize).cloned().flatten();
                let to = if message.bytes > 0 { find(message.to.0) } else { None };
                let Some(region) = find(message.region).filter(|_| message.bytes == 0 || to.is_some()) else {
                    return Ok(None);
                };
                match raise(lane, &region, to.as_deref(), message) {
                    Err(_) if region.gone.is_set() || to.is_some_and(|to| to.gone.is_set()) => Ok(None),
                    raised => raised.map(Some),
                }
            });
            raised.map_err(|failure| self.fail(failure, &format!("signal of rank {sender}")))?;
        }
        if self.has_backlog.load(Ordering::Relaxed)
            && self.has_backlog.swap(false, Ordering::Relaxed)
            && self.pairs.iter().filter(|pair| lock(pair).drain()).count() > 0
        {
            self.has_backlog.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Checks that the processes of all ranks are alive.
    pub(crate) fn check_processes(&self) -> Result<(), Failure> {
        let lost = self.remotes.iter().flatten().try_for_each(Remote::check);
        lost.map_err(|failure| self.fail(failure, "communicator"))
    }

    /// Checks that no copy or write of this rank has failed.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        self.pairs.iter().enumerate().try_for_each(|(peer, pair)| {
            lock(pair).check().map_err(|error| self.fail(Failure::cuda(error), &format!("copies to rank {peer}")))
        })?;
        self.inbound.iter().try_for_each(|inbound| {
            let inbound = lock(inbound);
            let operation = || format!("signals of rank {}", inbound.sender);
            inbound.check().map_err(|error| self.fail(Failure::cuda(error), &operation()))
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
