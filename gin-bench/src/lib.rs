// SPDX-License-Identifier: MIT OR Apache-2.0
//! `gin bench`: the cost of operations. Each figure is compared with its lower bound on the same machine, measured in
//! the same run. `docs/benchmarks.md` describes the method.
#![warn(unreachable_pub)]

mod bandwidth;
pub mod bootstrap;
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
pub mod size;
mod table;

#[cfg(feature = "cuda")]
#[expect(unreachable_pub, reason = "other crates include such a table in a public module")]
mod ptx {
    include!(concat!(env!("OUT_DIR"), "/ptx.rs"));
}

use gin_host::comm::{CommError, Communicator};
use gin_host::world::{Rank, WorldConfig, launch};
use lab::Rounds;
use std::error::Error;
use std::io::Write;
use std::time::Duration;
use table::{Row, Table};

/// The error of a failed measurement.
pub type Failure = Box<dyn Error>;

/// The operations to measure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Measurement {
    /// All of the others.
    All,
    /// Loads and stores between GPUs: round trip, barrier, put by size.
    Lsa,
    /// Round trips over the proxy.
    Proxy,
    /// The cost of issuing a put over the proxy.
    Post,
    /// The cost of issuing a put where the kernel drives the NIC.
    Gdaki,
}

/// GPUs to measure on.
#[derive(Clone, Debug)]
pub struct Gpus {
    /// Their names, by number in the driver; at least one.
    pub names: Vec<String>,
    /// The engine of software NICs, as PTX: architecture and text.
    pub engine: &'static [(&'static str, &'static str)],
}

impl Gpus {
    /// Returns the number of GPUs that `ranks` ranks use.
    fn used(&self, ranks: u32) -> usize {
        self.names.len().min(ranks as usize)
    }

    /// Returns the name of the GPUs that `ranks` ranks use, if all have the same one.
    fn name(&self, ranks: u32) -> Option<&str> {
        let names = &self.names[..self.used(ranks)];
        names.first().filter(|first| names.iter().all(|name| name == *first)).map(String::as_str)
    }
}

/// The devices and the parameters of the measurements.
#[derive(Debug)]
pub struct Bench {
    /// The GPUs; `None` stands for virtual GPUs, one for each rank.
    pub gpus: Option<Gpus>,
    /// Number of launches; the median is reported.
    pub launches: usize,
    /// Time limit of a wait.
    pub limit: Duration,
    /// Largest put, in bytes.
    pub most_bytes: u64,
    /// A mistake that the ranks make.
    #[cfg(test)]
    sabotage: gin_testkit::Sabotage,
}

/// A measurement that returns its tables.
type Measure = fn(&Bench) -> Result<Vec<Table>, Failure>;

impl Bench {
    fn is_real(&self) -> bool {
        self.gpus.is_some()
    }

    /// Returns the first value for real GPUs and the second for virtual GPUs, which only show that all works.
    fn pick<T>(&self, gpus: T, virtual_gpus: T) -> T {
        if self.is_real() { gpus } else { virtual_gpus }
    }

    /// Returns the number of GPUs of `ranks` ranks. Each rank has its own virtual GPU.
    fn gpus(&self, ranks: u32) -> usize {
        self.gpus.as_ref().map_or(ranks as usize, |gpus| gpus.used(ranks))
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
        let mut config = WorldConfig::threads(ranks);
        #[cfg(feature = "cuda")]
        if let Some(gpus) = &self.gpus {
            let ordinals: Vec<usize> = (0..gpus.used(ranks)).collect();
            config.devices = Some(gin_gpu::cuda::devices(&ordinals, &[ptx::PTX, gpus.engine], Some(self.limit * 2))?);
        }
        config.collective_timeout = Some(self.limit * 4);
        Ok(config)
    }

    /// Runs `body` on each rank.
    fn on_ranks<T: Send>(
        &self,
        config: WorldConfig,
        body: impl Fn(&Rank) -> Result<T, CommError> + Sync,
    ) -> Result<Vec<T>, Failure> {
        #[cfg(test)]
        let config = self.sabotage.apply(config);
        launch(config, |rank| body(&rank)).map_err(|error| error.to_string().into())
    }

    fn table(&self, title: &'static str, ranks: u32, rows: Vec<Row>) -> Table {
        let name =
            |gpus: &Gpus| format!("{} x {}", gpus.used(ranks), gpus.name(ranks).unwrap_or("GPUs of several kinds"));
        let gpus = self.gpus.as_ref().map(name);
        let mut notes = Vec::new();
        if !self.is_real() {
            notes.push("Figures of virtual GPUs say nothing about speed".to_owned());
        } else if self.gpus(ranks) < ranks as usize {
            notes.push("Ranks share a GPU".to_owned());
        }
        let device = if self.is_real() { "cuda" } else { "virtual" };
        Table { title, device, gpus, ranks, notes, rows }
    }
}

/// Destroys a communicator after all ranks have finished with it. Collective.
fn end(rank: &Rank, comm: &Communicator) -> Result<(), CommError> {
    rank.barrier()?;
    comm.destroy()
}

/// Runs the measurements and prints each table as soon as it is complete: as text, or with `json` as one object per
/// line. Returns whether all results were right and no measurement failed.
///
/// # Errors
/// Returns the error of the writer. Prints the error of a measurement and continues with the next one.
pub fn run(bench: &Bench, measurement: Measurement, json: bool, out: &mut impl Write) -> Result<bool, Failure> {
    let measures: &[(&str, Measure)] = match measurement {
        Measurement::All => &[
            ("lsa", lsa::round_trips),
            ("lsa barrier", lsa::barriers),
            ("lsa put", bandwidth::puts),
            ("proxy", proxy::round_trips),
            ("post", post::posts),
            ("gdaki", gdaki::posts),
            ("nics", nics::round_trips),
        ],
        Measurement::Lsa => &[("lsa", lsa::round_trips), ("lsa barrier", lsa::barriers), ("lsa put", bandwidth::puts)],
        Measurement::Proxy => &[("proxy", proxy::round_trips)],
        Measurement::Post => &[("post", post::posts)],
        Measurement::Gdaki => &[("gdaki", gdaki::posts), ("nics", nics::round_trips)],
    };
    let mut right = true;
    for (name, measure) in measures {
        match measure(bench) {
            Ok(tables) => {
                for table in tables {
                    right &= table.rows.iter().all(Row::is_right);
                    table::print(&table, json, out)?;
                    out.flush()?;
                }
            }
            Err(error) => {
                eprintln!("gin bench {name}: {error}");
                right = false;
            }
        }
    }
    Ok(right)
}

#[cfg(test)]
mod tests {
    use super::*;
    use gin_testkit::Sabotage;

    #[test]
    fn lost_values_make_a_measurement_wrong() {
        for measurement in [Measurement::Proxy, Measurement::Post] {
            for (sabotage, right) in [(Sabotage::None, true), (Sabotage::LosePut, false)] {
                let bench =
                    Bench { gpus: None, launches: 1, limit: Duration::from_secs(60), most_bytes: 1 << 16, sabotage };
                let mut out = Vec::new();
                assert_eq!(run(&bench, measurement, false, &mut out).unwrap(), right, "{measurement:?}, {sabotage:?}");
                let text = String::from_utf8(out).unwrap();
                assert_eq!(text.contains("NO ("), !right, "{text}");
            }
        }
    }
}
