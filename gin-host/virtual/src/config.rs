// SPDX-License-Identifier: MIT OR Apache-2.0
//! Settings of worlds and devices.

use std::time::Duration;

/// The choice of the next coroutine, and of the length of its turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Schedule {
    /// Each coroutine in turn, for a fixed number of accesses.
    RoundRobin,
    /// Any coroutine that can run, for a random number of accesses, often one.
    Random,
    /// As `Random`, but passes one device thread over for up to 4,096 choices or 200 us of the clock at a time.
    Starve,
    /// As `Random`, but prefers the threads of one warp for up to 4,096 choices at a time.
    WarpAhead,
    /// One of the other four; the seed selects it.
    #[default]
    Mixed,
}

impl Schedule {
    /// The schedules that the seed does not select.
    pub const PLAIN: [Schedule; 4] = [Schedule::RoundRobin, Schedule::Random, Schedule::Starve, Schedule::WarpAhead];
}

/// The record that a seeded world keeps of its run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LogMode {
    /// No record.
    #[default]
    Off,
    /// A hash and the number of events.
    Hash,
    /// Every event, 24 bytes each.
    Full,
}

/// Settings of a seeded world.
///
/// ```
/// use gin_virtual::{LogMode, Schedule, SeededConfig};
///
/// let config = SeededConfig::new(7).schedule(Schedule::Starve).log(LogMode::Hash);
/// assert_eq!((config.seed, config.schedule), (7, Schedule::Starve));
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SeededConfig {
    /// Source of all decisions.
    pub seed: u64,
    /// The schedule.
    pub schedule: Schedule,
    /// Record to keep.
    pub log: LogMode,
    /// Virtual nanoseconds that an access to a shared word takes.
    pub step_ns: u64,
    /// Number of choices after which a run ends as making no progress.
    pub max_steps: u64,
    /// Number of choices without progress after which a run ends. Progress means that a thread begins or ends, a
    /// service is busy, or a host continues.
    pub stall_steps: u64,
    /// Virtual nanoseconds after which a run ends. Where all threads wait, the clock advances in steps that grow up to
    /// a second, so the default of an hour takes less than a second.
    pub max_virtual_ns: u64,
    /// Stack size of a host function or a service, in bytes.
    pub host_stack_bytes: usize,
    /// Real time that one coroutine may run without yielding before the process is ended; `None` for no limit.
    pub watchdog: Option<Duration>,
    /// Looks for data races, and ends the run at the first with [`WorldError::Race`](crate::WorldError::Race). Off by
    /// default, unless the environment has `GIN_RACES=1`.
    pub races: bool,
    /// Prints the seed and the schedule on standard error when a run fails. On by default.
    pub print_seed: bool,
}

impl SeededConfig {
    /// Returns the default settings with this seed.
    pub fn new(seed: u64) -> Self {
        SeededConfig { seed, ..Self::default() }
    }

    /// Sets the schedule.
    pub fn schedule(self, schedule: Schedule) -> Self {
        SeededConfig { schedule, ..self }
    }

    /// Sets whether the run looks for data races.
    pub fn races(self, races: bool) -> Self {
        SeededConfig { races, ..self }
    }

    /// Sets whether a run that fails prints its seed and schedule.
    pub fn print_seed(self, print_seed: bool) -> Self {
        SeededConfig { print_seed, ..self }
    }

    /// Sets the record to keep.
    pub fn log(self, log: LogMode) -> Self {
        SeededConfig { log, ..self }
    }
}

impl Default for SeededConfig {
    fn default() -> Self {
        SeededConfig {
            seed: 0,
            schedule: Schedule::Mixed,
            log: LogMode::Off,
            step_ns: 2,
            max_steps: 2_000_000_000,
            stall_steps: 50_000_000,
            max_virtual_ns: 3_600_000_000_000,
            host_stack_bytes: 1 << 20,
            watchdog: Some(Duration::from_secs(10)),
            races: std::env::var_os("GIN_RACES").is_some_and(|value| value == "1"),
            print_seed: true,
        }
    }
}

/// Settings of a world of OS threads.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ThreadsConfig {
    /// Seed of each device's choices. Runs are not repeatable.
    pub seed: u64,
    /// The schedule by which a device chooses the next of its threads.
    pub schedule: Schedule,
    /// Number of accesses to shared words after which a device thread yields; at least 1.
    pub quantum: u32,
    /// Real time after which a grid that has not ended fails as making no progress; `None` for no limit.
    pub grid_limit: Option<Duration>,
    /// Real time without progress after which all waiters are printed on standard error; `None` for never. Progress
    /// means that a thread, a barrier or an exchange of lanes ends, that a thread begins or computes, or that a wait of
    /// a host function or a service ends. A grid whose threads only post and poll, each for itself, may be printed
    /// although it goes on.
    pub stall_report: Option<Duration>,
    /// Stack size of a host function or a service, in bytes.
    pub host_stack_bytes: usize,
    /// Real time that one coroutine may run without yielding before the process is ended; `None` for no limit.
    pub watchdog: Option<Duration>,
}

impl Default for ThreadsConfig {
    fn default() -> Self {
        ThreadsConfig {
            seed: 0,
            schedule: Schedule::Random,
            quantum: 64,
            grid_limit: None,
            stall_report: Some(Duration::from_secs(5)),
            host_stack_bytes: 2 << 20,
            watchdog: Some(Duration::from_secs(10)),
        }
    }
}

/// Settings of a virtual GPU.
///
/// ```
/// use gin_virtual::DeviceConfig;
/// assert_eq!(DeviceConfig::resident(4), DeviceConfig { resident_blocks: 4, ..DeviceConfig::default() });
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceConfig {
    /// Number of blocks that can be resident at a time; block K+1 begins only when one has exited. At least 1.
    pub resident_blocks: u32,
    /// Stack size of a device thread in bytes, without its guard page; at least 16 KiB. Pages that no thread touches
    /// take addresses only, no memory.
    pub stack_bytes: usize,
}

impl DeviceConfig {
    /// Returns the default settings with this residency limit.
    pub fn resident(resident_blocks: u32) -> Self {
        DeviceConfig { resident_blocks, ..Self::default() }
    }
}

impl Default for DeviceConfig {
    /// Returns 132 resident blocks, as many as an H200 has multiprocessors, and stacks of 1 MiB.
    fn default() -> Self {
        DeviceConfig { resident_blocks: 132, stack_bytes: 1 << 20 }
    }
}
