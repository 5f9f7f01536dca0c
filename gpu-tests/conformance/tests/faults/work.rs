// SPDX-License-Identifier: MIT OR Apache-2.0
//! Random operations of one rank, and the check that signalled data has arrived.
//!
//! The seed gives all ranks the operations of each rank in each launch: puts of all sizes with and without their own
//! signals, values, and gets, in several contexts. A rank waits for each signal and compares the bytes that it covers.
//! So the check finds a signal that came before its data, whatever else happens.

use gin_abi::WindowHandle;
use gin_conformance::host::SetupBackend;
use gin_conformance::op::{Code, Entry, Op, pattern};
use gin_conformance::scenario::CoopKind;
use gin_conformance::script::{ROUTE_NETWORK, STOP_AT_ERROR, Script};
use gin_gpu::LaunchConfig;
use gin_gpu::{Memory, MemoryKind, Plain};
use gin_host::comm::{CommError, Communicator};
use gin_host::comm::{Requirements, Window, WindowFlags};
use gin_host::world::Rank;
use oorandom::Rand64;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Windows: sources of puts, destinations of puts, sources of gets, destinations of gets.
const SOURCE: u32 = 0;
const ARRIVAL: u32 = 1;
const OFFER: u32 = 2;
const FETCHED: u32 = 3;
/// Maximum number of bytes of an operation.
const SLOT: u64 = 4096;
/// Operations of each rank in a launch.
const POSTS: u64 = 12;
const CONTEXTS: u64 = 3;

/// Returns a generator of random numbers for a seed.
pub fn rng(seed: u64) -> Rand64 {
    Rand64::new(seed.into())
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Action {
    Put,
    Value,
    Get,
}

/// One operation of a rank.
#[derive(Clone, Copy, Debug)]
struct Post {
    action: Action,
    peer: u32,
    context: u32,
    bytes: u64,
    /// Offset at which a get begins in the offered window.
    from: u64,
    /// Set if the operation raises its own signal.
    signals: bool,
    seed: u64,
}

/// Returns the operations of all ranks in a launch.
fn plan(seed: u64, launch: u64, ranks: u32) -> Vec<Vec<Post>> {
    let mut random = rng(seed ^ launch.wrapping_mul(0x2545_f491_4f6c_dd1d));
    let mut post = |rank: u32| {
        let action = [Action::Put, Action::Put, Action::Value, Action::Get][random.rand_range(0..4) as usize];
        let peer = (rank + 1 + random.rand_range(0..u64::from(ranks.max(2) - 1)) as u32) % ranks;
        let max = 1 << random.rand_range(0..13);
        let bytes = if action == Action::Value { 8 } else { 1 + random.rand_range(0..max).min(SLOT - 1) };
        let from = random.rand_range(0..SLOT - bytes + 1);
        let (context, signals) = (random.rand_range(0..CONTEXTS) as u32, random.rand_range(0..3) > 0);
        Post { action, peer, context, bytes, from, signals, seed: random.rand_u64() }
    };
    (0..ranks).map(|rank| (0..POSTS).map(|_| post(rank)).collect()).collect()
}

/// Returns the seed of the window that a rank offers to gets.
fn offered(rank: u32) -> u64 {
    700 + u64::from(rank)
}

/// The outcome of a launch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LaunchEnd {
    /// Every operation succeeded.
    Success,
    /// A fault ended the launch; everything signalled until then had arrived.
    Fault,
}

/// A communicator and its windows, on one rank.
pub struct Site {
    pub comm: Arc<Communicator>,
    pub windows: Vec<Window<u8>>,
    seed: u64,
    network_only: bool,
    launches: u64,
    /// Raises of this rank's signals so far, by sender and context.
    raised: BTreeMap<(u32, u32), u64>,
}

pub fn requirements(ranks: u32) -> Requirements {
    Requirements::default().contexts(CONTEXTS as u32).signals(ranks).world_barriers(1).queue_depth(16).max_message(1000)
}

impl Site {
    /// Initialises the communicator and allocates its windows.
    pub fn new(comm: Arc<Communicator>, seed: u64, network_only: bool) -> Result<Self, CommError> {
        comm.initialise(&requirements(comm.ranks()))?;
        let sizes = [POSTS * SLOT, u64::from(comm.ranks()) * POSTS * SLOT, SLOT, POSTS * SLOT];
        let window = |bytes: u64| comm.alloc_window::<u8>(bytes as usize, WindowFlags::NONE);
        let windows = sizes.into_iter().map(window).collect::<Result<Vec<_>, _>>()?;
        let offer: Vec<u8> = (0..SLOT).map(|index| pattern(offered(comm.rank()), index)).collect();
        windows[OFFER as usize].write(0, &offer)?;
        Ok(Self { comm, windows, seed, network_only, launches: 0, raised: BTreeMap::new() })
    }

    /// Returns this rank's program.
    fn program(&mut self) -> Vec<Op> {
        let (own, ranks) = (self.comm.rank(), self.comm.ranks());
        let plan = plan(self.seed, self.launches, ranks);
        self.launches += 1;
        // The barrier ends all reads and writes of other ranks' previous launch.
        let mut program = vec![Op::barrier()];
        let (mut gets, mut uncovered) = (Vec::new(), BTreeMap::new());
        for (slot, post) in (0..).zip(&plan[own as usize]) {
            let Post { peer, context, bytes, from, seed, .. } = *post;
            let there = (u64::from(own) * POSTS + slot) * SLOT;
            let op = match post.action {
                Action::Put => {
                    program.push(Op::fill(SOURCE, slot * SLOT, bytes, seed));
                    Op::put(peer, bytes).from(SOURCE, slot * SLOT).to(ARRIVAL, there)
                }
                Action::Value => {
                    let value = u64::from_le_bytes(std::array::from_fn(|index| pattern(seed, index as u64)));
                    Op::put_value(peer, 8, value).to(ARRIVAL, there)
                }
                Action::Get => {
                    gets.push(Op::check_from(FETCHED, slot * SLOT, bytes, offered(peer), from));
                    Op::get(peer, bytes).from(OFFER, from).to(FETCHED, slot * SLOT)
                }
            };
            let op = op.context(context);
            let puts = post.action != Action::Get;
            program.push(if puts && post.signals { op.signal(own) } else { op });
            if puts {
                uncovered.insert((peer, context), !post.signals);
            }
        }
        let covers = uncovered.into_iter().filter(|(_, uncovered)| *uncovered);
        program.extend(covers.map(|((peer, context), _)| Op::raise(peer, own).context(context)));
        program.extend((0..CONTEXTS as u32).map(|context| Op::flush().context(context)));
        program.append(&mut gets);
        for sender in (0..ranks).filter(|sender| *sender != own) {
            for context in 0..CONTEXTS as u32 {
                let to_this = |post: &Post| (post.peer, post.context) == (own, context) && post.action != Action::Get;
                let posts = (0..).zip(&plan[sender as usize]).filter(|(_, post)| to_this(post));
                let raised = self.raised.entry((sender, context)).or_default();
                let mut covered: Vec<Op> = Vec::new();
                let mut wait = |covered: &mut Vec<Op>| {
                    *raised += 1;
                    program.push(Op::wait_signal(sender, *raised).context(context));
                    program.append(covered);
                };
                for (slot, post) in posts {
                    let here = (u64::from(sender) * POSTS + slot) * SLOT;
                    covered.push(Op::check(ARRIVAL, here, post.bytes, post.seed));
                    if post.signals {
                        wait(&mut covered);
                    }
                }
                if !covered.is_empty() {
                    wait(&mut covered);
                }
            }
        }
        program
    }

    /// Runs one launch.
    ///
    /// # Errors
    /// Returns an error if bytes that a signal covers are wrong, or if a kernel ended without a fault that the host
    /// knows.
    pub fn launch(&mut self, rank: &Rank) -> Result<LaunchEnd, String> {
        let program = self.program();
        let log = self.run(rank, &program).map_err(|error| error.to_string())?;
        for (index, (op, entry)) in program.iter().zip(&log).enumerate() {
            if op.code == Code::Check as u32 && entry.outcome == 1 && entry.value != 0 {
                let (number, bytes, first) = (self.launches, entry.value, entry.second);
                return Err(format!(
                    "wrong bytes: launch {number}, operation {index}: {bytes} differ, the first is {first}: {op:?}"
                ));
            }
        }
        if log.iter().all(|entry| entry.outcome == 1) {
            return Ok(LaunchEnd::Success);
        }
        match self.comm.fault() {
            Some(_) => Ok(LaunchEnd::Fault),
            None => Err(format!(
                "a kernel ended early, and the host knows no fault: {:?}",
                log.iter().find(|e| e.outcome != 1)
            )),
        }
    }

    /// Runs a program on one thread, and returns its log.
    pub fn run(&self, rank: &Rank, program: &[Op]) -> Result<Vec<Entry>, CommError> {
        let handles: Vec<WindowHandle> = self.windows.iter().map(Window::handle).collect();
        let words = [0u64, program.len() as u64];
        let empty = vec![<Entry as bytemuck::Zeroable>::zeroed(); program.len()];
        let table = |bytes: &[u8]| -> Result<Arc<Memory>, CommError> {
            let memory = Memory::new(rank.device(), MemoryKind::Device, bytes.len() as u64)?;
            memory.write(0, bytes)?;
            Ok(memory)
        };
        let operations = table(bytemuck::cast_slice(program))?;
        let (windows, programs) = (table(bytemuck::cast_slice(&handles))?, table(bytemuck::cast_slice(&words))?);
        let log = table(bytemuck::cast_slice(&empty))?;
        let script = Script {
            windows: windows.address(),
            operations: operations.address(),
            programs: programs.address(),
            log: log.address(),
            stride: program.len() as u64,
            window_count: handles.len() as u32,
            flags: STOP_AT_ERROR | if self.network_only { ROUTE_NETWORK } else { 0 },
        };
        let kernel = rank.kernel(CoopKind::Thread.kernel(SetupBackend::Proxy))?;
        let stream = rank.stream()?;
        // Safety: the tables are as the kernel expects. Tables, communicator and windows outlive the kernel.
        unsafe { stream.launch(&kernel, LaunchConfig::new(1, 1), &[&self.comm.device()?, &Plain(script)])? };
        stream.synchronize()?;
        let mut entries = empty;
        log.read(0, &mut entries)?;
        Ok(entries)
    }

    /// Writes to the windows of all other ranks, by loads and stores, whatever the state of the communicator.
    pub fn scribble(&self, rank: &Rank) -> Result<(), CommError> {
        let own = self.comm.rank();
        let mut program = vec![Op::fill(SOURCE, 0, SLOT, SCRIBBLE)];
        for peer in (0..self.comm.ranks()).filter(|peer| *peer != own) {
            for slot in 0..u64::from(self.comm.ranks()) * POSTS {
                let copy = Op { peer, bytes: SLOT, ..Op::new(Code::CopyFrom) };
                program.push(copy.from(SOURCE, 0).to(ARRIVAL, slot * SLOT));
            }
        }
        let log = self.run(rank, &program)?;
        assert!(log.iter().all(|entry| entry.outcome == 1), "loads and stores work after a fault too");
        Ok(())
    }

    /// Returns whether every byte that other ranks may write has been overwritten.
    pub fn is_scribbled(&self) -> Result<bool, CommError> {
        let bytes = self.windows[ARRIVAL as usize].read_all()?;
        Ok(bytes
            .chunks(SLOT as usize)
            .all(|slot| (0..).zip(slot).all(|(index, byte)| *byte == pattern(SCRIBBLE, index))))
    }
}

/// Seed of the bytes that `scribble` writes.
const SCRIBBLE: u64 = 0x5c51_bb1e;
