// SPDX-License-Identifier: MIT OR Apache-2.0
//! One process: it joins jobs as it is told to by its input, works until it is told that it is enough or something
//! happens, and says what came of it.

use crate::waits;
use crate::work::{Came, Site, requirements, rng};
use gin_boot::Bootstrap;
use gin_boot::{Rendezvous, TcpBootstrap, TcpConfig, UniqueId};
use gin_gpu::{Memory, MemoryKind};
use gin_host::comm::{CommError, Communicator, WindowFlags};
use gin_host::world::{self, Rank, WorldConfig};
use gin_net::peer::Peer;
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

/// Starts a line for the parent.
pub const MARK: &str = "@@ ";
/// Launches until a communicator is destroyed, and another one made.
const ANEW: u64 = 20;
/// Launches of a job that goes on after a fault.
pub const AFTER: u64 = 8;
/// Most time that setting up may take.
const PATIENCE: Duration = Duration::from_secs(60);

static ENOUGH: AtomicBool = AtomicBool::new(false);
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

/// Reads the input: what is to be done at once is, the rest is for who works.
fn listen() -> Receiver<String> {
    let (to, lines) = mpsc::channel();
    std::thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            match line.as_str() {
                "enough" => ENOUGH.store(true, Ordering::Release),
                "abort" => {
                    // While a kernel runs, which waits for the lock when it has ended.
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
        // The parent is gone.
        std::process::exit(1);
    });
    lines
}

/// What the parent wants of a job.
#[derive(Clone, Debug)]
pub struct Wanted {
    rank: u32,
    ranks: u32,
    id: Option<UniqueId>,
    seed: u64,
    pub silence: Duration,
    network: String,
    network_only: bool,
    /// `plain`; `guarded`, which also tries what must not work after a rank was left out; [`waits::KERNELS`] or
    /// [`waits::CALLS`].
    task: String,
}

impl Wanted {
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
            let peer = Peer::new(endpoint);
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

/// Why work came to an end before it was enough.
enum Stop {
    /// A fault, in words.
    Fault(String),
    /// What must never be.
    Wrong(String),
}

impl From<CommError> for Stop {
    fn from(error: CommError) -> Self {
        Self::Fault(error.to_string())
    }
}

/// A new communicator on this rank's device.
fn communicator(rank: &Rank, job: &Arc<dyn Bootstrap>) -> Arc<Communicator> {
    Arc::new(Communicator::new(job.clone(), rank.device().clone(), rank.comm_config().clone()))
}

/// Works with one communicator after the other until all agree that it is enough: `most` launches, or the first rank
/// was told so. What it worked with last is left in `last`.
fn work(
    rank: &Rank,
    job: &Arc<dyn Bootstrap>,
    wanted: &Wanted,
    most: u64,
    last: &mut Option<Site>,
) -> Result<u64, Stop> {
    const ON: u8 = 0;
    const ENOUGH_NOW: u8 = 1;
    const FAULT: u8 = 2;
    let mut launches = 0;
    loop {
        let mut step = || -> Result<Came, Stop> {
            if launches % ANEW == 0 {
                if let Some(old) = last.take() {
                    old.comm.destroy()?;
                }
                let comm = communicator(rank, job);
                *last = Some(Site::new(comm, wanted.seed ^ launches, wanted.network_only)?);
            }
            let site = last.as_mut().ok_or_else(|| Stop::Wrong("there is no communicator".to_owned()))?;
            let current = |comm| *CURRENT.lock().unwrap_or_else(PoisonError::into_inner) = comm;
            current(Some(site.comm.clone()));
            let came = site.launch(rank).map_err(Stop::Wrong);
            current(None);
            // A fault that came after the kernel is one all the same: all are told before anybody goes on.
            if site.comm.fault().is_some() { came.map(|_| Came::Ended) } else { came }
        };
        let came = step();
        launches += 1;
        if launches == 2 && most == u64::MAX {
            say("going");
        }
        let own = match &came {
            Ok(Came::Right) if job.rank() == 0 && (ENOUGH.load(Ordering::Acquire) || launches >= most) => ENOUGH_NOW,
            Ok(Came::Right) => ON,
            _ => FAULT,
        };
        if let Err(Stop::Wrong(text)) = came {
            return Err(Stop::Wrong(text));
        }
        // A fault of one rank is known to all by this, should it not be by the communicator.
        let votes = job.all_gather(&[own]);
        let told = |site: &Option<Site>| site.as_ref().and_then(|site| site.comm.fault_report());
        match (came, votes) {
            (Err(stop), _) => return Err(stop),
            (Ok(_), Err(error)) => {
                let report = told(last).map_or(String::new(), |report| format!("; {report}"));
                return Err(Stop::Fault(format!("{error}{report}")));
            }
            (Ok(_), Ok(votes)) if votes.iter().any(|vote| vote == &[FAULT]) => {
                let text = told(last).map_or("another rank has a fault".to_owned(), |report| report.to_string());
                return Err(Stop::Fault(text));
            }
            (Ok(_), Ok(votes)) if votes[0] == [ENOUGH_NOW] => return Ok(launches),
            (Ok(_), Ok(_)) => {}
        }
    }
}

/// What the program registers itself, in the communicator of a job and again in that of another one.
struct Kept {
    memory: Arc<Memory>,
    site: Site,
}

/// Registers memory of this rank's with a communicator of its own.
fn keep(rank: &Rank, job: &Arc<dyn Bootstrap>, memory: &Arc<Memory>, seed: u64) -> Result<Site, CommError> {
    let comm = communicator(rank, job);
    let mut site = Site::new(comm, seed, false)?;
    site.windows.push(site.comm.register(&memory.whole(), WindowFlags::NONE)?);
    Ok(site)
}

/// Another job of the first so many ranks, beside that of all; all ranks call it.
pub fn beside(
    wanted: &Wanted,
    job: &Arc<dyn Bootstrap>,
    ranks: u32,
) -> Result<Option<Arc<dyn Bootstrap>>, Box<dyn Error>> {
    let first = if job.rank() == 0 { Some(Rendezvous::new(wanted.config())?) } else { None };
    let id = first.as_ref().map_or_else(String::new, |first| first.id().to_string());
    let told = job.all_gather(id.as_bytes())?;
    Ok(match (first, job.rank()) {
        (Some(first), _) => Some(Arc::new(first.join(ranks)?)),
        (None, rank) if rank < ranks => {
            let id = String::from_utf8_lossy(&told[0]).parse()?;
            Some(Arc::new(TcpBootstrap::join(&id, rank, ranks, wanted.config())?))
        }
        _ => None,
    })
}

/// What two ranks work with beside the job of all.
pub fn pair_site(rank: &Rank, pair: &Arc<dyn Bootstrap>) -> Result<Site, CommError> {
    Site::new(communicator(rank, pair), 5, false)
}

/// A job of the first two ranks, beside that of all.
fn pair(rank: &Rank, wanted: &Wanted, job: &Arc<dyn Bootstrap>) -> Result<Option<Site>, Box<dyn Error>> {
    Ok(beside(wanted, job, 2)?.map(|pair| pair_site(rank, &pair)).transpose()?)
}

/// What registering it in a new job comes to.
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

/// The life of a rank in a job, and in the one that follows without those that were lost.
fn body(
    rank: &Rank,
    wanted: &Wanted,
    bootstrap: &Arc<dyn Bootstrap>,
    lines: &Mutex<Receiver<String>>,
) -> Result<(), String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let guarded = wanted.task == "guarded";
    let mut pair = if guarded { pair(rank, wanted, bootstrap).map_err(|error| text(&error))? } else { None };
    let kept = if guarded {
        let memory = Memory::shared(rank.device(), MemoryKind::Device, 4096).map_err(|error| text(&error))?;
        let site = keep(rank, bootstrap, &memory, 1).map_err(|error| text(&error))?;
        Some(Kept { memory, site })
    } else {
        None
    };
    let mut last = None;
    let fault = match work(rank, bootstrap, wanted, u64::MAX, &mut last) {
        Ok(launches) => {
            last.map_or(Ok(()), |site| site.comm.destroy()).map_err(|error| text(&error))?;
            say(&format!("done {launches}"));
            return Ok(());
        }
        Err(Stop::Wrong(error)) => return Err(error),
        Err(Stop::Fault(text)) => text,
    };
    say(&format!("learned {fault}"));
    switch().clear();
    if let Some(pair) = &mut pair {
        // It has nothing to do with the rank that was lost.
        for _ in 0..AFTER {
            match pair.launch(rank)? {
                Came::Right => {}
                Came::Ended => return Err(format!("the other communicator has ended: {:?}", pair.comm.fault_report())),
            }
        }
        pair.comm.destroy().map_err(|error| text(&error))?;
        say("pair");
    }
    let lost = bootstrap.lost();
    if lost.contains(&bootstrap.rank()) {
        return left_out(rank, kept.as_ref(), bootstrap, &lost);
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
    let (mut site, most) = (None, if kept.is_some() { u64::MAX } else { AFTER });
    match work(rank, &job, &Wanted { seed: !wanted.seed, ..wanted.clone() }, most, &mut site) {
        Ok(launches) => say(&format!("done {launches}")),
        Err(Stop::Wrong(error)) => return Err(format!("in the job that goes on: {error}")),
        Err(Stop::Fault(error)) => return Err(format!("the job that goes on has ended: {error}")),
    }
    if let Some(kept) = &kept {
        say(&format!("scribbled {}", kept.site.is_scribbled().map_err(|error| text(&error))?));
        next(lines);
        let outcome = register(rank, &job, &kept.memory).map_err(|error| text(&error))?;
        say(&format!("later {outcome}"));
    }
    site.map_or(Ok(()), |site| site.comm.destroy()).map_err(|error| text(&error))
}

/// What a rank does that the others took for lost: it must not get into the job that goes on, and writes to what it
/// has.
fn left_out(rank: &Rank, kept: Option<&Kept>, bootstrap: &Arc<dyn Bootstrap>, lost: &[u32]) -> Result<(), String> {
    if let Some(kept) = kept {
        for _ in 0..3 {
            kept.site.scribble(rank).map_err(|error| error.to_string())?;
        }
    }
    match bootstrap.without(lost, PATIENCE) {
        Ok(_) => Err("a rank that was left out met the others".to_owned()),
        Err(error) => {
            say(&format!("out {error}"));
            Ok(())
        }
    }
}

fn job(wanted: &Wanted, lines: &Mutex<Receiver<String>>) -> Result<(), String> {
    ENOUGH.store(false, Ordering::Release);
    let bootstrap: Arc<dyn Bootstrap> = Arc::new(wanted.join().map_err(|error| error.to_string())?);
    let outcome = world::join(wanted.world(), bootstrap.clone(), |rank| match wanted.task.as_str() {
        waits::KERNELS => waits::kernels(&rank, wanted, &bootstrap, lines),
        waits::CALLS => waits::calls(&rank, wanted, &bootstrap, lines),
        _ => body(&rank, wanted, &bootstrap, lines),
    });
    *CURRENT.lock().unwrap_or_else(PoisonError::into_inner) = None;
    outcome.map_err(|error| error.to_string())
}

/// Works until the parent is gone.
pub fn serve() -> ExitCode {
    let lines = Mutex::new(listen());
    say("ready");
    loop {
        let line = next(&lines);
        let Some(wanted) = Wanted::read(&line) else {
            say(&format!("failed this is no job: {line}"));
            return ExitCode::FAILURE;
        };
        match job(&wanted, &lines) {
            Ok(()) => say("idle"),
            Err(error) => say(&format!("failed {error}")),
        }
    }
}

/// A seed that differs from others.
pub fn mixed(seed: u64, number: u64) -> u64 {
    rng(seed ^ number.wrapping_mul(0x9e37_79b9)).rand_u64() >> 1
}
