// SPDX-License-Identifier: MIT OR Apache-2.0
//! `gin bench`: the cost of operations. Each figure is compared with its lower bound on the same machine, measured in
//! the same run. `docs/benchmarks.md` describes the method.
#![warn(unreachable_pub)]

mod bandwidth;
pub mod bootstrap;
mod bulk;
mod capi;
mod compare;
mod completions;
mod crowd;
#[cfg(feature = "cuda")]
mod driver;
#[cfg(not(feature = "cuda"))]
#[path = "no_driver.rs"]
mod driver;
mod ep;
mod figure;
mod gdaki;
mod lab;
mod launch;
mod lsa;
mod matmul;
mod nccl;
mod nics;
mod nowhere;
mod parts;
mod plot;
mod post;
mod print;
mod proxy;
mod rate;
mod table;

#[cfg(feature = "cuda")]
#[expect(unreachable_pub, reason = "other crates include such a table in a public module")]
mod ptx {
    include!(concat!(env!("OUT_DIR"), "/ptx.rs"));
}

pub use compare::Earlier;
pub use print::{COLUMNS, Form};

use gin_boot::Bootstrap;
use gin_host::comm::{CommError, Communicator};
use gin_host::world::{self, Rank, WorldConfig, join};
use lab::Rounds;
use print::Printer;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::error::Error;
use std::fmt;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use table::{Row, Table};

/// The error of a failed measurement.
pub type Failure = Box<dyn Error>;

/// The operations to measure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Measurement {
    /// All of the others, except those in C++ and beside NCCL.
    All,
    /// Loads and stores between GPUs: round trip, barrier, put by size.
    Lsa,
    /// Round trips over the proxy, and completions of puts at their senders.
    Proxy,
    /// The cost of issuing a put over the proxy.
    Post,
    /// The cost of issuing a put where the kernel drives the NIC.
    Gdaki,
    /// Dispatch and combine of expert parallelism.
    Ep,
    /// Dispatch and combine of expert-major layouts and of shared regions.
    Layouts,
    /// Products of matrices that send and receive.
    Matmul,
    /// Kernels in a row.
    Launch,
    /// Kernels in C++ beside the same in Rust.
    Capi,
    /// NCCL's network beside gin's proxy.
    Nccl,
}

/// GPUs to measure on.
#[derive(Clone, Debug)]
pub struct Gpus {
    /// Their names; at least one.
    pub names: Vec<String>,
    /// Their numbers in the driver.
    pub ordinals: Vec<usize>,
    /// The number of this process's GPU, if it is one rank of a job.
    pub own: Option<usize>,
    /// The engine of software NICs.
    pub engine: gin_gpu::EmbeddedModules,
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
    /// The job that this process is one rank of; `None` if the ranks are threads of this process.
    pub job: Option<Arc<dyn Bootstrap>>,
    /// Number of repeats of a figure; the median is reported.
    pub launches: usize,
    /// Time limit of a wait.
    pub limit: Duration,
    /// Largest put, in bytes.
    pub max_bytes: u64,
    /// The kernels of `bench/kernels/capi.cu` as a cubin.
    pub module: Option<Vec<u8>>,
    /// A mistake that the ranks make.
    #[cfg(test)]
    sabotage: gin_testkit::Sabotage,
}

/// The outcome of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// All results were right.
    Right,
    /// A result was wrong.
    Wrong,
    /// A measurement failed.
    Failed,
}

/// The error of a measurement that the job of this process does not suit.
#[derive(Debug)]
pub struct Unsuited(String);

impl fmt::Display for Unsuited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Unsuited {}

/// The output of a run.
#[derive(Debug)]
pub struct Output {
    /// Its form.
    pub form: Form,
    /// An earlier run to compare with.
    pub earlier: Option<Earlier>,
    /// A file for a plot of the figures by size, as SVG.
    pub plot: Option<PathBuf>,
}

/// A measurement that returns its tables.
type Measure = fn(&Bench) -> Result<Vec<Table>, Failure>;

/// The ranks that a measurement needs if they are processes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Processes {
    /// Two of them.
    Two,
    /// Two or more.
    Any,
    /// None: the measurement is of one process.
    None,
}

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

    /// Refuses a job in which a measurement does not run.
    fn suits(&self, name: &str, processes: Processes) -> Result<(), String> {
        let Some(job) = &self.job else { return Ok(()) };
        match (processes, job.ranks()) {
            (Processes::Two, 2) | (Processes::Any, 2..) => Ok(()),
            (Processes::None, _) => Err(format!("{name}: measured in one process only, without a launcher")),
            (_, ranks) => {
                Err(format!("{name}: measured between 2 ranks, and the job has {ranks}; use `gin launch -n 2`"))
            }
        }
    }

    /// Returns whether the ranks are threads of this process.
    fn is_one_process(&self) -> bool {
        self.job.is_none()
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
            launches: self.launches.min(self.pick(5, 2)),
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
            let ordinals = gpus.own.map_or_else(|| gpus.ordinals[..gpus.used(ranks)].to_vec(), |own| vec![own]);
            config.devices =
                Some(gin_gpu::cuda::devices(&ordinals, &[ptx::PTX, gin_ep::PTX, gpus.engine], Some(self.limit * 2))?);
        }
        config.collective_timeout = Some(self.limit * 4);
        Ok(config)
    }

    /// Runs `body` on each rank and returns the results of all, also if the ranks are processes.
    fn on_ranks<T: Send + Serialize + DeserializeOwned>(
        &self,
        config: WorldConfig,
        body: impl Fn(&Rank) -> Result<T, CommError> + Sync,
    ) -> Result<Vec<T>, Failure> {
        #[cfg(test)]
        let config = self.sabotage.apply(config);
        let Some(job) = &self.job else {
            return world::launch(config, |rank| body(&rank)).map_err(|error| error.to_string().into());
        };
        let own = join(config, job.clone(), |rank| body(&rank)).map_err(|error| error.to_string())?;
        let all = job.all_gather(&serde_json::to_vec(&own)?)?;
        all.iter().map(|one| Ok(serde_json::from_slice(one)?)).collect()
    }

    fn device(&self) -> &'static str {
        self.pick("cuda", "virtual")
    }

    fn table(&self, title: impl Into<String>, ranks: u32, rows: Vec<Row>) -> Table {
        let name =
            |gpus: &Gpus| format!("{} x {}", gpus.used(ranks), gpus.name(ranks).unwrap_or("GPUs of several kinds"));
        let gpus = self.gpus.as_ref().map(name);
        let mut notes = Vec::new();
        if !self.is_real() {
            notes.push("Figures of virtual GPUs say nothing about speed".to_owned());
        } else if self.gpus(ranks) < ranks as usize {
            notes.push("Ranks share a GPU".to_owned());
        }
        let processes = !self.is_one_process();
        Table { title: title.into(), device: self.device(), gpus, ranks, processes, notes, rows }
    }
}

/// Destroys a communicator after all ranks have finished with it. Collective.
fn end(rank: &Rank, comm: &Communicator) -> Result<(), CommError> {
    rank.barrier()?;
    comm.destroy()
}

/// The measurements by name, with the ranks that they need if these are processes.
const MEASURES: [(&str, Processes, Measure, Measurement); 19] = [
    ("lsa, round trip", Processes::Two, lsa::round_trips, Measurement::Lsa),
    ("lsa, barrier", Processes::Any, lsa::barriers, Measurement::Lsa),
    ("lsa, sizes", Processes::Two, lsa::sizes, Measurement::Lsa),
    ("lsa, put", Processes::Two, bandwidth::puts, Measurement::Lsa),
    ("lsa, both ways", Processes::Two, bandwidth::exchanges, Measurement::Lsa),
    ("lsa, bulk", Processes::Two, bulk::copies, Measurement::Lsa),
    ("proxy", Processes::Two, proxy::round_trips, Measurement::Proxy),
    ("proxy, completions", Processes::Two, completions::completions, Measurement::Proxy),
    ("proxy, parts", Processes::None, parts::trips, Measurement::Proxy),
    ("proxy, puts", Processes::None, rate::puts, Measurement::Proxy),
    ("post", Processes::None, post::posts, Measurement::Post),
    ("gdaki", Processes::None, gdaki::posts, Measurement::Gdaki),
    ("gdaki, round trip", Processes::None, nics::round_trips, Measurement::Gdaki),
    ("ep", Processes::Any, ep::pairs, Measurement::Ep),
    ("layouts", Processes::Any, ep::layouts, Measurement::Layouts),
    ("matmul", Processes::Any, matmul::products, Measurement::Matmul),
    ("launch", Processes::None, launch::steps, Measurement::Launch),
    ("capi", Processes::Two, capi::twins, Measurement::Capi),
    ("nccl", Processes::None, nccl::beside, Measurement::Nccl),
];

/// Runs the measurements and prints each table as soon as it is complete. In a job, all ranks run it and one of them
/// should print.
///
/// # Errors
/// Returns the error of the writer. In a job, refuses a measurement that does not run there, as [`Unsuited`]. Prints
/// the error of a measurement and continues with the next one.
pub fn run(bench: &Bench, measurement: Measurement, output: &Output, out: &mut impl Write) -> Result<Outcome, Failure> {
    let Output { form, earlier, plot } = output;
    let of_all = |kind| measurement == Measurement::All && !matches!(kind, Measurement::Capi | Measurement::Nccl);
    let chosen = MEASURES.iter().filter(|(.., kind)| of_all(*kind) || measurement == *kind);
    let (suited, refused): (Vec<_>, Vec<_>) =
        chosen.map(|measure| (measure, bench.suits(measure.0, measure.1))).partition(|(_, suits)| suits.is_ok());
    if let (true, Some((_, Err(reason)))) = (suited.is_empty(), refused.first()) {
        return Err(Unsuited(reason.clone()).into());
    }
    let mut printer = Printer::new(*form, earlier.is_some(), out);
    printer.notes(refused.into_iter().filter_map(|(_, suits)| suits.err()));
    let (mut right, mut failed, mut tables) = (true, false, Vec::new());
    for ((name, _, measure, _), _) in suited {
        match measure(bench) {
            Ok(measured) => {
                for mut table in measured {
                    right &= table.rows.iter().all(Row::is_right);
                    if let Some(earlier) = earlier {
                        earlier.add_to(&mut table);
                    }
                    printer.table(&table)?;
                    tables.push(table);
                }
            }
            Err(error) => {
                eprintln!("gin bench {name}: {error}");
                failed = true;
            }
        }
    }
    printer.end()?;
    if let Some(path) = plot {
        plot::write(path, &tables)?;
    }
    Ok(match (right, failed) {
        (false, _) => Outcome::Wrong,
        (true, true) => Outcome::Failed,
        (true, false) => Outcome::Right,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use gin_testkit::Sabotage;

    #[test]
    fn lost_values_make_a_measurement_wrong() {
        for measurement in [Measurement::Proxy, Measurement::Post] {
            for (sabotage, right) in [(Sabotage::None, true), (Sabotage::LosePut, false)] {
                let limit = Duration::from_secs(60);
                let bench =
                    Bench { gpus: None, job: None, launches: 1, limit, max_bytes: 1 << 16, module: None, sabotage };
                let output = Output { form: Form::Short, earlier: None, plot: None };
                let mut out = Vec::new();
                let all_right = run(&bench, measurement, &output, &mut out).unwrap() == Outcome::Right;
                assert_eq!(all_right, right, "{measurement:?}, {sabotage:?}");
                let text = String::from_utf8(out).unwrap();
                assert_eq!(text.contains("WRONG"), !right, "{text}");
            }
        }
    }
}
