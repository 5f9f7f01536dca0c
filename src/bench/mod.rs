// SPDX-License-Identifier: MIT OR Apache-2.0
//! `gin bench`: the cost of operations. Each figure is compared with its lower bound on the same machine, measured in
//! the same run. `docs/benchmarks.md` describes the method.

mod bandwidth;
pub(crate) mod bootstrap;
mod crowd;
#[cfg(feature = "cuda")]
mod driver;
#[cfg(not(feature = "cuda"))]
#[path = "no_driver.rs"]
mod driver;
mod gdaki;
mod lab;
mod lsa;
mod nics;
mod nowhere;
mod post;
mod proxy;
mod table;

use crate::cli::{BenchArgs, BenchWhat, End, Failure};
use crate::workload::{RunDevice, choose_one, world_with};
use gin_host::comm::{CommError, Communicator};
use gin_host::world::{Rank, WorldConfig, launch};
use lab::Rounds;
use std::io::Write;
use std::time::Duration;
use table::{Row, Table};

/// The device and the parameters of the measurements.
#[derive(Debug)]
struct Bench {
    run_device: RunDevice,
    /// Number of launches; the median is reported.
    launches: usize,
    /// Time limit of a wait.
    limit: Duration,
    /// Largest put, in bytes.
    most_bytes: u64,
}

/// A measurement that returns its tables.
type Measure = fn(&Bench) -> Result<Vec<Table>, Failure>;

impl Bench {
    fn is_real(&self) -> bool {
        matches!(self.run_device, RunDevice::Cuda(_))
    }

    /// Returns the first value for real GPUs and the second for virtual GPUs, which only show that all works.
    fn pick<T>(&self, gpus: T, virtual_gpus: T) -> T {
        if self.is_real() { gpus } else { virtual_gpus }
    }

    /// Returns the number of GPUs of `ranks` ranks. Each rank has its own virtual GPU.
    fn gpus(&self, ranks: u32) -> usize {
        match &self.run_device {
            RunDevice::Virtual => ranks as usize,
            RunDevice::Cuda(gpus) => gpus.used(ranks),
        }
    }

    /// Returns whether goals apply to figures of `ranks` ranks: the GPUs are real, and each rank has its own.
    fn counts(&self, ranks: u32) -> bool {
        self.is_real() && self.gpus(ranks) == ranks as usize
    }

    fn limit_ns(&self) -> u64 {
        u64::try_from(self.limit.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Returns the rounds for operations of about a microsecond.
    fn rounds(&self) -> Rounds {
        Rounds {
            launches: self.launches,
            warm: self.pick(200, 1),
            timed: self.pick(4000, 3),
            checked: self.pick(1000, 4),
            limit_ns: self.limit_ns(),
        }
    }

    /// Returns the rounds for operations of some tens of microseconds.
    fn long_rounds(&self) -> Rounds {
        Rounds {
            launches: self.launches.min(self.pick(5, 1)),
            warm: self.pick(50, 1),
            timed: self.pick(1000, 3),
            checked: self.pick(200, 3),
            ..self.rounds()
        }
    }

    fn world(&self, ranks: u32) -> Result<WorldConfig, Failure> {
        let mut config = world_with(&self.run_device, ranks, self.limit * 2)?;
        config.collective_timeout = Some(self.limit * 4);
        Ok(config)
    }

    /// Runs `body` on each rank.
    fn on_ranks<T: Send>(
        &self,
        config: WorldConfig,
        body: impl Fn(&Rank) -> Result<T, CommError> + Sync,
    ) -> Result<Vec<T>, Failure> {
        launch(config, |rank| body(&rank)).map_err(|error| error.to_string().into())
    }

    fn table(&self, title: &'static str, ranks: u32, rows: Vec<Row>) -> Table {
        let gpus = match &self.run_device {
            RunDevice::Virtual => None,
            RunDevice::Cuda(gpus) => {
                let used = self.gpus(ranks);
                Some(format!("{used} x {}", gpus.name(ranks).unwrap_or_else(|| "GPUs of several kinds".to_owned())))
            }
        };
        let mut notes = Vec::new();
        if !self.is_real() {
            notes.push("Figures of virtual GPUs say nothing about speed".to_owned());
        } else if self.gpus(ranks) < ranks as usize {
            notes.push("Ranks share a GPU".to_owned());
        }
        Table { title, device: self.run_device.name(), gpus, ranks, notes, rows }
    }
}

/// Destroys a communicator after all ranks have finished with it. Collective.
fn end(rank: &Rank, comm: &Communicator) -> Result<(), CommError> {
    rank.barrier()?;
    comm.destroy()
}

/// Runs the measurements and prints each table as soon as it is complete.
///
/// # Errors
/// Returns [`Refused`](crate::cli::Refused) for invalid arguments, and the error of the writer. Prints the error of a
/// measurement and continues with the next one.
pub(crate) fn run(arguments: &BenchArgs, out: &mut impl Write) -> Result<End, Failure> {
    let (run_device, note) = choose_one(arguments.device)?;
    let bench = Bench {
        run_device,
        launches: arguments.repeats as usize,
        limit: Duration::from_millis(arguments.deadline_ms),
        most_bytes: arguments.most_bytes,
    };
    let format = arguments.format();
    let measures: &[(&str, Measure)] = match arguments.what {
        BenchWhat::All => &[
            ("lsa", lsa::round_trips),
            ("lsa barrier", lsa::barriers),
            ("lsa put", bandwidth::puts),
            ("proxy", proxy::round_trips),
            ("post", post::posts),
            ("gdaki", gdaki::posts),
            ("nics", nics::round_trips),
        ],
        BenchWhat::Lsa => &[("lsa", lsa::round_trips), ("lsa barrier", lsa::barriers), ("lsa put", bandwidth::puts)],
        BenchWhat::Proxy => &[("proxy", proxy::round_trips)],
        BenchWhat::Post => &[("post", post::posts)],
        BenchWhat::Gdaki => &[("gdaki", gdaki::posts), ("nics", nics::round_trips)],
        BenchWhat::Bootstrap | BenchWhat::Sass => &[],
    };
    let mut right = true;
    for (name, measure) in measures {
        match measure(&bench) {
            Ok(tables) => {
                for table in tables {
                    right &= table.rows.iter().all(Row::is_right);
                    table::print(&table, format, out)?;
                    out.flush()?;
                }
            }
            Err(error) => {
                eprintln!("gin bench {name}: {error}");
                right = false;
            }
        }
    }
    if let (Some(note), crate::cli::Format::Table) = (note, format) {
        writeln!(out, "{note}.")?;
    }
    Ok(if right { End::Right } else { End::Wrong })
}
