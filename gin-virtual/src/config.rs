// SPDX-License-Identifier: MIT OR Apache-2.0
//! Settings of worlds and devices.

use std::time::Duration;

/// How a world chooses who runs next, and for how long.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Policy {
    /// One after the other, a fixed number of accesses each.
    RoundRobin,
    /// Anyone who can run, for a random number of accesses, often one.
    Random,
    /// As `Random`, but one device thread is passed over for up to 4,096 choices or 200 us of the clock at a time.
    Starve,
    /// As `Random`, but the threads of one warp are preferred for up to 4,096 choices at a time.
    WarpAhead,
    /// One of the other four, by the seed.
    #[default]
    Mixed,
}

impl Policy {
    /// The policies that are not derived from the seed.
    pub const PLAIN: [Policy; 4] = [Policy::RoundRobin, Policy::Random, Policy::Starve, Policy::WarpAhead];
}

/// What a seeded world remembers of its run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LogMode {
    /// Nothing.
    #[default]
    Off,
    /// A hash and the number of events.
    Hash,
    /// Every event, 24 bytes each.
    Full,
}

/// Settings of a seeded world.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SeededConfig {
    /// Where all decisions come from.
    pub seed: u64,
    /// How they are made.
    pub policy: Policy,
    /// What is remembered.
    pub log: LogMode,
    /// Virtual nanoseconds that an access to a shared word takes.
    pub step_ns: u64,
    /// Choices after which a run is ended as making no progress.
    pub max_steps: u64,
    /// Choices without a thread beginning or ending, a busy service or a host going on, after which a run is ended.
    pub stall_steps: u64,
    /// Virtual nanoseconds after which a run is ended.
    pub max_virtual_ns: u64,
    /// Stack of a host function or a service, in bytes.
    pub host_stack_bytes: usize,
    /// Real time that one coroutine may run without yielding before the process is ended; `None` for ever.
    pub watchdog: Option<Duration>,
}

impl SeededConfig {
    /// The usual settings with this seed.
    pub fn new(seed: u64) -> Self {
        SeededConfig { seed, ..Self::default() }
    }

    /// The same with this policy.
    pub fn policy(self, policy: Policy) -> Self {
        SeededConfig { policy, ..self }
    }

    /// The same with this log.
    pub fn log(self, log: LogMode) -> Self {
        SeededConfig { log, ..self }
    }
}

impl Default for SeededConfig {
    fn default() -> Self {
        SeededConfig {
            seed: 0,
            policy: Policy::Mixed,
            log: LogMode::Off,
            step_ns: 2,
            max_steps: 2_000_000_000,
            stall_steps: 50_000_000,
            max_virtual_ns: 3_600_000_000_000,
            host_stack_bytes: 1 << 20,
            watchdog: Some(Duration::from_secs(10)),
        }
    }
}

/// Settings of a world of OS threads.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ThreadsConfig {
    /// Seed of each device's choices; there is no promise of repetition.
    pub seed: u64,
    /// How a device chooses which of its threads runs next.
    pub policy: Policy,
    /// Accesses to shared words after which a device thread yields; at least 1.
    pub quantum: u32,
    /// Real time after which a grid that has not ended is reported as making no progress; `None` for ever.
    pub grid_limit: Option<Duration>,
    /// Stack of a host function or a service, in bytes.
    pub host_stack_bytes: usize,
    /// Real time that one coroutine may run without yielding before the process is ended; `None` for ever.
    pub watchdog: Option<Duration>,
}

impl Default for ThreadsConfig {
    fn default() -> Self {
        ThreadsConfig {
            seed: 0,
            policy: Policy::Random,
            quantum: 64,
            grid_limit: None,
            host_stack_bytes: 2 << 20,
            watchdog: Some(Duration::from_secs(10)),
        }
    }
}

/// Settings of a virtual GPU.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceConfig {
    /// Blocks that can be resident at a time; block K+1 begins only when one has exited. At least 1.
    pub resident_blocks: u32,
    /// Stack of a device thread, in bytes, beside its guard page; at least 16 KiB.
    pub stack_bytes: usize,
}

impl DeviceConfig {
    /// The usual settings with this residency limit.
    pub fn resident(resident_blocks: u32) -> Self {
        DeviceConfig { resident_blocks, ..Self::default() }
    }
}

impl Default for DeviceConfig {
    /// As many blocks as an H200 has multiprocessors (132), stacks of 64 KiB.
    fn default() -> Self {
        DeviceConfig { resident_blocks: 132, stack_bytes: 64 << 10 }
    }
}
