// SPDX-License-Identifier: MIT OR Apache-2.0
//! One process. It joins jobs on orders from its input, works until the parent ends the work or a fault does, and
//! reports the result.

use crate::waits;
use crate::work::{LaunchEnd, Site, requirements, rng};
use gin_boot::Bootstrap;
use gin_boot::{Rendezvous, TcpBootstrap, TcpConfig, UniqueId};
use gin_gpu::{Memory, MemoryKind};
use gin_host::comm::{CommError, Communicator, WindowFlags};
use gin_host::world::{self, Rank, WorldConfig};
use gin_net::peer::PeerNetwork;
use gin_net::{Endpoint, Network};
use gin_testkit::Sabotage;
use gin_testkit::{Delay, FailOnDemand, FailSwitch, Failure, Reorder};
use std::error::Error;
use std::io::{self, BufRead, Write};
use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// Prefix of a line for the parent.
pub const MARK: &str = "@@ ";
/// Number of launches after which a communicator is destroyed and a new one created.
const ANEW: u64 = 20;
/// Number of launches of a job that continues after a fault.
pub const AFTER: u64 = 8;
/// Time limit for setting up.
const PATIENCE: Duration = Duration::from_secs(60);

/// The parent has ended the work.
pub static ENOUGH: AtomicBool = AtomicBool::new(false);
static CURRENT: Mutex<Option<Arc<Communicator>>> = Mutex::new(None);

fn switch() -> &'static FailSwitch {
    static SWITCH: OnceLock<FailSwitch> = OnceLock::new();
    SWITCH.get_or_init(FailSwitch::new)
}

pub fn say(line: &str) {
    let mut output = io::stdout().lock();
    let _ = writeln!(output, "{MARK}{}", line.replace('\n', " "));
    let _ = output.flush();
}

/// Reads the input in a thread. It executes immediate orders at once, and passes the other lines on.
pub fn listen() -> Receiver<String> {
    let (to, lines) = mpsc::channel();
    std::thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            match line.as_str() {
                "enough" => ENOUGH.store(true, Ordering::Release),
                "abort" => {
                    // Aborts while a kernel runs. The kernel's thread waits for the lock when the kernel has ended.
                    let aborted = || {
                        let current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
                        current.as_ref().is_some_and(|comm| comm.abort().is_ok())
                    };
                    while !aborted() {
                        std::thread::yield_now();
                    }
                }
                "fail" => switch().fail_after(3, Failure::Status(12)),
                "lose" => switch().fail_after(3, Failure::PeerLost),
                other if to.send(other.to_owned()).is_err() => break,
                _ => {}
            }
        }
        // The parent has ended.
        std::process::exit(1);
    });
    lines
}

/// The parent's order for a job.
#[derive(Clone, Debug)]
pub struct JobOrder {
    rank: u32,
    ranks: u32,
    id: Option<UniqueId>,
    seed: u64,
    pub silence: Duration,
    network: String,
    network_only: bool,
    /// `plain`; `guarded`, which also tries what must not work after a rank was excluded; [`waits::KERNELS`] or
    /// [`waits::CALLS`].
    task: String,
}

impl JobOrder {
    fn read(line: &str) -> Option<Self> {
        let mut words = line.strip_prefix("job ")?.split(' ');
        let mut number = || words.next()?.parse::<u64>().ok();
        let (rank, ranks, seed, silence) = (number()? as u32, number()? as u32, number()?, number()?);
        let (network, route, task) = (words.next()?.to_owned(), words.next()?, words.next()?.to_owned());
        let id = words.next().and_then(|id| id.parse().ok());
        let silence = Duration::from_millis(silence);
        Some(Self { rank, ranks, id, seed, silence, network, network_only: route == "network", task })
    }

    fn config(&self) -> TcpConfig {
        TcpConfig::default().address(Some(Ipv4Addr::LOCALHOST.into())).joining(PATIENCE).silence(self.silence)
    }

    fn join(&self) -> Result<TcpBootstrap, Box<dyn Error>> {
        let config = self.config();
        Ok(match &self.id {
            Some(id) => TcpBootstrap::join(id, self.rank, self.ranks, config)?,
            None => {
                let first = Rendezvous::new(config)?;
                say(&format!("id {}", first.id()));
                first.join(self.ranks)?
            }
        })
    }

    fn world(&self) -> WorldConfig {
        let network = self.network.clone();
        let sabotage = if network == "lose-put" { Sabotage::LosePut } else { Sabotage::None };
        let config = WorldConfig::threads(self.ranks).network(move |endpoint: &Endpoint| {
            let peer = PeerNetwork::new(endpoint);
            let below: Box<dyn Network> = match network.as_str() {
                "delay" => Box::new(Delay::new(peer, endpoint, Duration::from_micros(300))),
                "reorder" => Box::new(Reorder::new(peer, endpoint)),
                _ => Box::new(peer),
            };
            Box::new(FailOnDemand::new(below, switch().clone()))
        });
        sabotage.apply(config)
    }
}

/// Error that ends work early.
enum WorkError {
    /// A fault, as text.
    Fault(String),
    /// A violation of gin's promises.
    Wrong(String),
}

impl From<CommError> for WorkError {
    fn from(error: CommError) -> Self {
        Self::Fault(error.to_string())
    }
}

/// Creates a communicator on this rank's device.
pub fn communicator(rank: &Rank, job: &Arc<dyn Bootstrap>) -> Arc<Communicator> {
    Arc::new(Communicator::new(job.clone(), rank.device().clone(), rank.comm_config().clone()))
}

/// Works with one communicator after another until all ranks agree to end: after `max` launches, or when the parent
/// ends the first rank's work. Leaves the last communicator and its windows in `last`.
fn work(
    rank: &Rank,
    job: &Arc<dyn Bootstrap>,
    order: &JobOrder,
    max: u64,
    last: &mut Option<Site>,
) -> Result<u64, WorkError> {
    const ON: u8 = 0;
    const ENOUGH_NOW: u8 = 1;
    const FAULT: u8 = 2;
    let mut launches = 0;
    loop {
        let mut step = || -> Result<LaunchEnd, WorkError> {
            if launches % ANEW == 0 {
                if let Some(old) = last.take() {
                    old.comm.destroy()?;
                }
                let comm = communicator(rank, job);
                *last = Some(Site::new(comm, order.seed ^ launches, order.network_only)?);
            }
            let site = last.as_mut().ok_or_else(|| WorkError::Wrong("no communicator".to_owned()))?;
            let current = |comm| *CURRENT.lock().unwrap_or_else(PoisonError::into_inner) = comm;
            current(Some(site.comm.clone()));
            let end = site.launch(rank).map_err(WorkError::Wrong);
            current(None);
            // A fault after the kernel's end counts as well: all ranks learn of it before any continues.
            if site.comm.fault().is_some() { end.map(|_| LaunchEnd::Fault) } else { end }
        };
        let end = step();
        launches += 1;
        if launches == 2 && max == u64::MAX {
            say("going");
        }
        let own = match &end {
            Ok(LaunchEnd::Success) if job.rank() == 0 && (ENOUGH.load(Ordering::Acquire) || launches >= max) => {
                ENOUGH_NOW
            }
            Ok(LaunchEnd::Success) => ON,
            _ => FAULT,
        };
        if let Err(WorkError::Wrong(text)) = end {
            return Err(WorkError::Wrong(text));
        }
        // All ranks learn of one rank's fault by these votes, even if the communicator does not announce it.
        let votes = job.all_gather(&[own]);
        let report = |site: &Option<Site>| site.as_ref().and_then(|site| site.comm.fault_report());
        match (end, votes) {
            (Err(stop), _) => return Err(stop),
            (Ok(_), Err(error)) => {
                let report = report(last).map_or(String::new(), |report| format!("; {report}"));
                return Err(WorkError::Fault(format!("{error}{report}")));
            }
            (Ok(_), Ok(votes)) if votes.iter().any(|vote| vote == &[FAULT]) => {
                let text = report(last).map_or("another rank has a fault".to_owned(), |report| report.to_string());
                return Err(WorkError::Fault(text));
            }
            (Ok(_), Ok(votes)) if votes[0] == [ENOUGH_NOW] => return Ok(launches),
            (Ok(_), Ok(_)) => {}
        }
    }
}

/// Memory that the program registers itself, first with a communicator of one job and then with one of another.
struct Kept {
    memory: Arc<Memory>,
    site: Site,
}

/// Registers this rank's memory with a new communicator.
fn keep(rank: &Rank, job: &Arc<dyn Bootstrap>, memory: &Arc<Memory>, seed: u64) -> Result<Site, CommError> {
    let comm = communicator(rank, job);
    let mut site = Site::new(comm, seed, false)?;
    site.windows.push(site.comm.register(&memory.whole(), WindowFlags::NONE)?);
    Ok(site)
}

/// Creates another job of the first `ranks` ranks, beside the job of all. All ranks call it.
pub fn beside(
    order: &JobOrder,
    job: &Arc<dyn Bootstrap>,
    ranks: u32,
) -> Result<Option<Arc<dyn Bootstrap>>, Box<dyn Error>> {
    let first = if job.rank() == 0 { Some(Rendezvous::new(order.config())?) } else { None };
    let id = first.as_ref().map_or_else(String::new, |first| first.id().to_string());
    let ids = job.all_gather(id.as_bytes())?;
    Ok(match (first, job.rank()) {
        (Some(first), _) => Some(Arc::new(first.join(ranks)?)),
        (None, rank) if rank < ranks => {
            let id = String::from_utf8_lossy(&ids[0]).parse()?;
            Some(Arc::new(TcpBootstrap::join(&id, rank, ranks, order.config())?))
        }
        _ => None,
    })
}

/// Creates the communicator and windows of two ranks beside the job of all.
pub fn pair_site(rank: &Rank, pair: &Arc<dyn Bootstrap>) -> Result<Site, CommError> {
    Site::new(communicator(rank, pair), 5, false)
}

/// Creates a job of the first two ranks, beside the job of all, with its communicator.
fn pair(rank: &Rank, order: &JobOrder, job: &Arc<dyn Bootstrap>) -> Result<Option<Site>, Box<dyn Error>> {
    Ok(beside(order, job, 2)?.map(|pair| pair_site(rank, &pair)).transpose()?)
}

/// Registers memory in a new communicator of the job, and returns the result as text.
fn register(rank: &Rank, job: &Arc<dyn Bootstrap>, memory: &Arc<Memory>) -> Result<String, CommError> {
    let comm = communicator(rank, job);
    comm.initialise(&requirements(job.ranks()))?;
    let outcome = comm.register::<u8>(&memory.whole(), WindowFlags::NONE);
    let text = outcome.as_ref().map_or_else(ToString::to_string, |_| "registered".to_owned());
    comm.destroy()?;
    Ok(text)
}

pub fn next(lines: &Mutex<Receiver<String>>) -> String {
    lines.lock().unwrap_or_else(PoisonError::into_inner).recv().unwrap_or_default()
}

/// Works as a rank in a job, and then in the next job, which excludes the lost ranks.
fn body(
    rank: &Rank,
    order: &JobOrder,
    bootstrap: &Arc<dyn Bootstrap>,
    lines: &Mutex<Receiver<String>>,
) -> Result<(), String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let guarded = order.task == "guarded";
    let mut pair = if guarded { pair(rank, order, bootstrap).map_err(|error| text(&error))? } else { None };
    let kept = if guarded {
        let memory = Memory::shared(rank.device(), MemoryKind::Device, 4096).map_err(|error| text(&error))?;
        let site = keep(rank, bootstrap, &memory, 1).map_err(|error| text(&error))?;
        Some(Kept { memory, site })
    } else {
        None
    };
    let mut last = None;
    let fault = match work(rank, bootstrap, order, u64::MAX, &mut last) {
        Ok(launches) => {
            last.map_or(Ok(()), |site| site.comm.destroy()).map_err(|error| text(&error))?;
            say(&format!("done {launches}"));
            return Ok(());
        }
        Err(WorkError::Wrong(error)) => return Err(error),
        Err(WorkError::Fault(text)) => text,
    };
    say(&format!("learned {fault}"));
    switch().clear();
    if let Some(pair) = &mut pair {
        // The lost rank is not part of this communicator.
        for _ in 0..AFTER {
            match pair.launch(rank)? {
                LaunchEnd::Success => {}
                LaunchEnd::Fault => {
                    return Err(format!("the other communicator has ended: {:?}", pair.comm.fault_report()));
                }
            }
        }
        pair.comm.destroy().map_err(|error| text(&error))?;
        say("pair");
    }
    let lost = bootstrap.lost();
    if lost.contains(&bootstrap.rank()) {
        return excluded(rank, kept.as_ref(), bootstrap, &lost);
    }
    let job = match lost.is_empty() {
        true => bootstrap.clone(),
        false => bootstrap.without(&lost, PATIENCE).map_err(|error| text(&error))?,
    };
    if let Some(kept) = &kept {
        let outcome = register(rank, &job, &kept.memory).map_err(|error| text(&error))?;
        say(&format!("before {outcome}"));
        kept.site.comm.destroy().map_err(|error| text(&error))?;
        let outcome = register(rank, &job, &kept.memory).map_err(|error| text(&error))?;
        say(&format!("after {outcome}"));
    }
    let (mut site, max) = (None, if kept.is_some() { u64::MAX } else { AFTER });
    match work(rank, &job, &JobOrder { seed: !order.seed, ..order.clone() }, max, &mut site) {
        Ok(launches) => say(&format!("done {launches}")),
        Err(WorkError::Wrong(error)) => return Err(format!("in the job that continues: {error}")),
        Err(WorkError::Fault(error)) => return Err(format!("the job that continues has ended: {error}")),
    }
    if let Some(kept) = &kept {
        say(&format!("scribbled {}", kept.site.is_scribbled().map_err(|error| text(&error))?));
        next(lines);
        let outcome = register(rank, &job, &kept.memory).map_err(|error| text(&error))?;
        say(&format!("later {outcome}"));
    }
    site.map_or(Ok(()), |site| site.comm.destroy()).map_err(|error| text(&error))
}

/// Works as a rank that the others took for lost. It must not join the job that continues, and it writes to all windows
/// that it has mapped.
fn excluded(rank: &Rank, kept: Option<&Kept>, bootstrap: &Arc<dyn Bootstrap>, lost: &[u32]) -> Result<(), String> {
    if let Some(kept) = kept {
        for _ in 0..3 {
            kept.site.scribble(rank).map_err(|error| error.to_string())?;
        }
    }
    match bootstrap.without(lost, PATIENCE) {
        Ok(_) => Err("a rank that was excluded joined the others".to_owned()),
        Err(error) => {
            say(&format!("out {error}"));
            Ok(())
        }
    }
}

fn job(order: &JobOrder, lines: &Mutex<Receiver<String>>) -> Result<(), String> {
    ENOUGH.store(false, Ordering::Release);
    let bootstrap: Arc<dyn Bootstrap> = Arc::new(order.join().map_err(|error| error.to_string())?);
    let outcome = world::join(order.world(), bootstrap.clone(), |rank| match order.task.as_str() {
        waits::KERNELS => waits::kernels(&rank, order, &bootstrap, lines),
        waits::CALLS => waits::calls(&rank, order, &bootstrap, lines),
        _ => body(&rank, order, &bootstrap, lines),
    });
    *CURRENT.lock().unwrap_or_else(PoisonError::into_inner) = None;
    outcome.map_err(|error| error.to_string())
}

/// Works until the parent has ended.
pub fn serve() -> ExitCode {
    let lines = Mutex::new(listen());
    say("ready");
    loop {
        let line = next(&lines);
        let Some(order) = JobOrder::read(&line) else {
            say(&format!("failed not a job: {line}"));
            return ExitCode::FAILURE;
        };
        match job(&order, &lines) {
            Ok(()) => say("idle"),
            Err(error) => say(&format!("failed {error}")),
        }
    }
}

/// Returns a seed that differs for each number.
pub fn mixed(seed: u64, number: u64) -> u64 {
    rng(seed ^ number.wrapping_mul(0x9e37_79b9)).rand_u64() >> 1
}
