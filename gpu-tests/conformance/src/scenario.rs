// SPDX-License-Identifier: MIT OR Apache-2.0
//! A scenario, which a case runs, and its outcome.

use crate::op::{Code, Entry, Op};
use gin_abi::{Fault, FaultKind};
use gin_host::comm::Requirements;
use std::format;
use std::string::String;
use std::sync::Arc;
use std::vec;
use std::vec::Vec;

/// Back end that executes network operations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SetupBackend {
    /// A CPU thread executes them.
    Proxy,
    /// The kernel posts them to a software NIC.
    Gdaki,
}

/// The threads that make up a group, which select the script kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CoopKind {
    /// Each thread is a group.
    Thread,
    /// As `Thread`, with one back end compiled in alone.
    ThreadNamed,
    /// Tiles of [`crate::script::TILE`] lanes.
    Tile,
    /// Warps.
    Warp,
    /// Even and odd lanes of a warp.
    Lanes,
    /// Spans of [`crate::script::SPAN_WARPS`] warps.
    Span,
    /// Blocks.
    Block,
    /// As `Block`, with one back end compiled in alone.
    BlockNamed,
}

impl CoopKind {
    /// All kinds.
    pub const ALL: [Self; 8] = [
        Self::Thread,
        Self::ThreadNamed,
        Self::Tile,
        Self::Warp,
        Self::Lanes,
        Self::Span,
        Self::Block,
        Self::BlockNamed,
    ];

    /// Returns the same kind of group with one back end compiled in alone, or `self` if no such kernel exists.
    #[must_use]
    pub const fn with_named_backend(self) -> Self {
        match self {
            Self::Thread => Self::ThreadNamed,
            Self::Block => Self::BlockNamed,
            other => other,
        }
    }

    /// Returns the kind's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Thread => "thread",
            Self::ThreadNamed => "thread_named",
            Self::Tile => "tile",
            Self::Warp => "warp",
            Self::Lanes => "lanes",
            Self::Span => "span",
            Self::Block => "block",
            Self::BlockNamed => "block_named",
        }
    }

    /// Returns the name of the kernel for communicators with this back end.
    #[must_use]
    pub const fn kernel(self, backend: SetupBackend) -> &'static str {
        match (self, backend) {
            (Self::Thread, _) => "script_thread",
            (Self::ThreadNamed, SetupBackend::Proxy) => "script_thread_proxy",
            (Self::ThreadNamed, SetupBackend::Gdaki) => "script_thread_gdaki",
            (Self::Tile, _) => "script_tile",
            (Self::Warp, _) => "script_warp",
            (Self::Lanes, _) => "script_lanes",
            (Self::Span, _) => "script_span",
            (Self::Block, _) => "script_block",
            (Self::BlockNamed, SetupBackend::Proxy) => "script_block_proxy",
            (Self::BlockNamed, SetupBackend::Gdaki) => "script_block_gdaki",
        }
    }

    /// Returns the number of threads in a block of one group; for lanes, of two groups.
    #[must_use]
    pub const fn threads(self) -> u32 {
        match self {
            Self::Thread | Self::ThreadNamed => 1,
            Self::Tile => crate::script::TILE,
            Self::Warp | Self::Lanes => 32,
            Self::Span => 32 * crate::script::SPAN_WARPS,
            Self::Block | Self::BlockNamed => 96,
        }
    }

    /// Returns the number of groups in a block of `threads` threads.
    #[must_use]
    pub const fn groups(self, threads: u32) -> u32 {
        match self {
            Self::Thread | Self::ThreadNamed => threads,
            Self::Tile => threads / crate::script::TILE,
            Self::Warp => threads.div_ceil(32),
            Self::Lanes => threads / 16,
            Self::Span => threads / (32 * crate::script::SPAN_WARPS),
            Self::Block | Self::BlockNamed => 1,
        }
    }

    /// Returns the group, within its block, of thread `thread` of the block.
    #[must_use]
    pub const fn group_of(self, thread: u32) -> u32 {
        match self {
            Self::Thread | Self::ThreadNamed => thread,
            Self::Tile => thread / crate::script::TILE,
            Self::Warp => thread / 32,
            Self::Lanes => 2 * (thread / 32) + thread % 2,
            Self::Span => thread / (32 * crate::script::SPAN_WARPS),
            Self::Block | Self::BlockNamed => 0,
        }
    }
}

/// One window of a case.
#[derive(Clone, Debug)]
pub struct WindowSpec {
    /// Length in bytes on each rank.
    pub bytes: Vec<u64>,
    /// Set if peers may raise words of the window.
    pub signals: bool,
    /// Bytes of the allocation before the window; a multiple of 8.
    pub offset: u64,
}

/// A rank's host side while the kernel runs.
pub struct Control<'a> {
    /// The rank.
    pub rank: u32,
    /// Its communicator.
    pub comm: &'a gin_host::comm::Communicator,
}

/// Action of a rank's host while the kernel runs.
pub type During = Arc<dyn Fn(&Control<'_>) + Send + Sync>;

/// One run of a case: ranks, windows, and a program for each group of threads.
#[derive(Clone)]
pub struct Scenario {
    /// Number of ranks.
    pub ranks: u32,
    /// Size of LSA teams; `None` for all ranks.
    pub lsa_size: Option<u32>,
    /// Requirements of the communicator.
    pub requirements: Requirements,
    /// Windows. Operations name them by index.
    pub windows: Vec<WindowSpec>,
    /// Kind of thread group.
    pub coop: CoopKind,
    /// Blocks of each rank's grid.
    pub blocks: u32,
    /// Threads of each block.
    pub threads: u32,
    /// For each rank, the programs, each with the number of its group in the grid.
    pub programs: Vec<Vec<(u32, Vec<Op>)>>,
    /// Set if a group leaves its program at the first error.
    pub stop_at_error: bool,
    /// Set if the launch must be refused unless all blocks are resident. Blocks that wait for each other need that.
    pub cooperative: bool,
    /// Action of each rank's host while the kernel runs.
    pub during: Option<During>,
}

impl Scenario {
    /// Returns a scenario of `ranks` ranks of one thread, two windows of 16 KiB, 8 signals and counters, and one
    /// barrier of each kind.
    #[must_use]
    pub fn new(ranks: u32) -> Self {
        let window = WindowSpec { bytes: vec![16 << 10; ranks as usize], signals: false, offset: 0 };
        let requirements =
            Requirements::default().signals(8).counters(8).world_barriers(1).rail_barriers(1).lsa_barriers(1);
        Self {
            ranks,
            lsa_size: None,
            requirements,
            windows: vec![window.clone(), window],
            coop: CoopKind::Thread,
            blocks: 1,
            threads: 1,
            programs: vec![Vec::new(); ranks as usize],
            stop_at_error: false,
            cooperative: true,
            during: None,
        }
    }

    /// Sets the kind of groups, with one group a block (two for lanes).
    #[must_use]
    pub fn coop(mut self, coop: CoopKind) -> Self {
        self.coop = coop;
        self.threads = coop.threads();
        self
    }

    /// Sets the shape of each rank's grid.
    #[must_use]
    pub fn shape(mut self, blocks: u32, threads: u32) -> Self {
        (self.blocks, self.threads) = (blocks, threads);
        self
    }

    /// Changes the requirements of the communicator.
    #[must_use]
    pub fn require(mut self, change: impl FnOnce(&mut Requirements)) -> Self {
        change(&mut self.requirements);
        self
    }

    /// Replaces window 0 or 1, or adds the next one.
    #[must_use]
    pub fn window(mut self, index: usize, spec: WindowSpec) -> Self {
        if index < self.windows.len() {
            self.windows[index] = spec;
        } else {
            self.windows.push(spec);
        }
        self
    }

    /// Gives `program` to group 0 of rank `rank`.
    #[must_use]
    pub fn on(self, rank: u32, program: Vec<Op>) -> Self {
        self.on_group(rank, 0, program)
    }

    /// Gives `program` to group `group` of the grid of rank `rank`.
    #[must_use]
    pub fn on_group(mut self, rank: u32, group: u32, program: Vec<Op>) -> Self {
        self.programs[rank as usize].push((group, program));
        self
    }

    /// Gives group 0 of each rank the program that `program` returns for the rank.
    #[must_use]
    pub fn all(mut self, program: impl Fn(u32) -> Vec<Op>) -> Self {
        for rank in 0..self.ranks {
            self = self.on(rank, program(rank));
        }
        self
    }

    /// Makes the host of each rank call `act` while the kernel runs.
    #[must_use]
    pub fn during(mut self, act: impl Fn(&Control<'_>) + Send + Sync + 'static) -> Self {
        self.during = Some(Arc::new(act));
        self
    }

    /// Returns the number of groups in each rank's grid.
    #[must_use]
    pub fn groups(&self) -> u32 {
        self.blocks * self.coop.groups(self.threads)
    }

    /// Returns the group of the grid to which thread `thread` of the grid belongs.
    #[must_use]
    pub fn group_of(&self, thread: u32) -> u32 {
        let (block, inside) = (thread / self.threads, thread % self.threads);
        block * self.coop.groups(self.threads) + self.coop.group_of(inside)
    }

    /// Returns whether some operation names its route.
    #[must_use]
    pub fn names_routes(&self) -> bool {
        self.programs.iter().flatten().flat_map(|(_, program)| program).any(|op| op.route != 0)
    }

    /// Returns whether some operation, or a team, needs loads and stores to other ranks.
    #[must_use]
    pub fn loads_and_stores(&self) -> bool {
        const CODES: [Code; 12] = [
            Code::RaiseByGpu,
            Code::LoadPeer,
            Code::WriteTotal,
            Code::ReadTeam,
            Code::CombinedBarrier,
            Code::CopyFrom,
            Code::CopyTo,
            Code::Reduce,
            Code::FetchAdd,
            Code::CompareSwap,
            Code::Send,
            Code::Receive,
        ];
        let counts = |op: &Op| op.team != 0 || op.route == 2 || CODES.iter().any(|code| *code as u32 == op.code);
        let teams = self.lsa_size.is_some_and(|size| size > 1);
        teams || self.programs.iter().flatten().flat_map(|(_, program)| program).any(counts)
    }

    /// Returns the length of the longest program.
    #[must_use]
    pub fn longest(&self) -> usize {
        self.programs.iter().flatten().map(|(_, program)| program.len()).max().unwrap_or(0)
    }

    /// Returns the program of a group of a rank.
    #[must_use]
    pub fn program(&self, rank: u32, group: u32) -> &[Op] {
        let found = self.programs[rank as usize].iter().find(|(other, _)| *other == group);
        found.map_or(&[], |(_, program)| program)
    }
}

/// The results of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// For each rank and each thread of its grid: one entry for each operation of the thread's group.
    pub logs: Vec<Vec<Vec<Entry>>>,
    /// For each rank and window: the window's bytes at the end.
    pub windows: Vec<Vec<Vec<u8>>>,
    /// For each rank: the fault that its host knows, with the rank that found it.
    pub faults: Vec<Option<(u32, Fault)>>,
}

/// Starts the text of a failure in which bytes differ from the expected ones.
pub const WRONG_BYTES: &str = "wrong bytes";
/// Starts the text of a failure in which a signal, a counter or another value differs from the expected one.
pub const WRONG_VALUE: &str = "wrong value";
/// Starts the text of a failure in which the run made no progress.
pub const NO_END: &str = "no end";

/// Returns whether an operation gives all threads of the group the same result.
fn is_collective(code: Code) -> bool {
    !matches!(
        code,
        Code::ReadSignal
            | Code::ReadCounter
            | Code::ReadShadow
            | Code::Check
            | Code::Fault
            | Code::LoadPeer
            | Code::Read
    )
}

impl Outcome {
    /// Returns the entry of the first thread of a group for one operation.
    #[must_use]
    pub fn entry(&self, scenario: &Scenario, rank: u32, group: u32, operation: usize) -> Entry {
        let threads = scenario.blocks * scenario.threads;
        let thread = (0..threads).find(|thread| scenario.group_of(*thread) == group).unwrap_or(0);
        self.logs[rank as usize][thread as usize][operation]
    }

    /// Checks that all threads of a group have the same result wherever a call promises that.
    ///
    /// # Errors
    /// Returns the first difference.
    pub fn check_agreement(&self, scenario: &Scenario) -> Result<(), String> {
        for rank in 0..scenario.ranks {
            for thread in 0..scenario.blocks * scenario.threads {
                let group = scenario.group_of(thread);
                for (index, op) in scenario.program(rank, group).iter().enumerate() {
                    let (first, mine) =
                        (self.entry(scenario, rank, group, index), self.logs[rank as usize][thread as usize][index]);
                    let collective = Code::from_code(op.code).is_some_and(is_collective);
                    if collective && first != mine {
                        return Err(format!(
                            "rank {rank}, group {group}, operation {index} ({op:?}): thread {thread} got {mine:?}, the \
                             first thread {first:?}"
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    /// Checks that every operation of every thread succeeded, that every check found no wrong byte, and that no host
    /// knows a fault.
    ///
    /// # Errors
    /// Returns the first violation.
    pub fn check_ok(&self, scenario: &Scenario) -> Result<(), String> {
        self.check_agreement(scenario)?;
        for (rank, fault) in self.faults.iter().enumerate() {
            if let Some((by, fault)) = fault {
                return Err(format!("rank {rank} has a fault that rank {by} found: {fault}"));
            }
        }
        for rank in 0..scenario.ranks {
            for thread in 0..scenario.blocks * scenario.threads {
                let group = scenario.group_of(thread);
                for (index, op) in scenario.program(rank, group).iter().enumerate() {
                    let entry = self.logs[rank as usize][thread as usize][index];
                    let place =
                        format!("rank {rank}, thread {thread}, operation {index} ({:?})", Code::from_code(op.code));
                    match entry.outcome {
                        1 => {}
                        2 => return Err(format!("{place}: {}", show(&entry))),
                        _ => return Err(format!("{place} was not reached")),
                    }
                    if op.code == Code::Check as u32 && entry.value != 0 {
                        return Err(format!(
                            "{WRONG_BYTES}: {place}: {} of {} at offset {} of window {}, the first at {}",
                            entry.value, op.bytes, op.offset, op.window, entry.second
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    /// Checks that all threads of the group have this value for this operation.
    ///
    /// # Errors
    /// Returns the other result.
    pub fn check_value(
        &self,
        scenario: &Scenario,
        rank: u32,
        group: u32,
        operation: usize,
        value: u64,
    ) -> Result<(), String> {
        self.each(scenario, rank, group, operation, |entry| match (entry.outcome, entry.value) {
            (1, seen) if seen == value => Ok(()),
            (1, _) => Err(format!("{WRONG_VALUE}: {value} expected")),
            _ => Err(format!("value {value} expected")),
        })
    }

    /// Checks that all threads of the group have a fault of this kind for this operation.
    ///
    /// # Errors
    /// Returns the other result.
    pub fn check_fault(
        &self,
        scenario: &Scenario,
        rank: u32,
        group: u32,
        operation: usize,
        kind: FaultKind,
    ) -> Result<(), String> {
        self.each(scenario, rank, group, operation, |entry| match fault(entry) {
            Some(fault) if fault.kind() == kind => Ok(()),
            _ => Err(format!("fault {kind:?} expected")),
        })
    }

    /// Checks that all threads of the group pass `test` for this operation.
    ///
    /// # Errors
    /// Returns the first that does not.
    pub fn each(
        &self,
        scenario: &Scenario,
        rank: u32,
        group: u32,
        operation: usize,
        test: impl Fn(&Entry) -> Result<(), String>,
    ) -> Result<(), String> {
        for thread in 0..scenario.blocks * scenario.threads {
            if scenario.group_of(thread) == group {
                let entry = &self.logs[rank as usize][thread as usize][operation];
                test(entry).map_err(|reason| {
                    format!("{reason}, got {} (rank {rank}, thread {thread}, operation {operation})", show(entry))
                })?;
            }
        }
        Ok(())
    }
}

/// Returns the fault in an entry.
#[must_use]
pub fn fault(entry: &Entry) -> Option<Fault> {
    if entry.outcome == 2 { Fault::from_words(entry.fault) } else { None }
}

/// Describes an entry.
#[must_use]
pub fn show(entry: &Entry) -> String {
    match (entry.outcome, fault(entry)) {
        (1, _) => format!("Ok({}, {})", entry.value, entry.second),
        (2, Some(fault)) => format!("Err({fault})"),
        (0, _) => "nothing: it was not reached".into(),
        _ => format!("{entry:?}"),
    }
}
