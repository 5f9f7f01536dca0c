// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks that are killed during traffic, each replaced by a new process with the same number.
//!
//! All ranks put, get and signal at random through one communicator after another, one for each job. The first one
//! allocates a window, whose memory each rank registers with all others; a new process registers memory that it has
//! allocated itself. The parent kills a rank, starts a process in its place, and waits until all ranks work again.

use crate::rank::{ENOUGH, MARK, communicator, listen, say};
use crate::work::{LaunchEnd, Site, rng};
use gin_boot::{Bootstrap, Rendezvous, TcpBootstrap, TcpConfig, UniqueId};
use gin_gpu::{Memory, MemoryKind, MemorySlice};
use gin_host::comm::WindowFlags;
use gin_host::world::{self, Rank, WorldConfig};
use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::net::Ipv4Addr;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

/// Ranks of the job.
const RANKS: u32 = 4;
/// Number of ranks that are killed, one after the other.
const KILLED: u32 = 20;
/// Time limit for setting up, and for a line of a process.
const PATIENCE: Duration = Duration::from_secs(60);
/// Number of bytes of the memory that each rank keeps from job to job.
const KEPT: u64 = 4096;
/// Variables of a process: its rank, and the id by which it joins; the id of a running job if `RUNNING` is set.
const VARIABLES: [&str; 3] = ["GIN_REPLACE_RANK", "GIN_REPLACE_ID", "GIN_REPLACE_RUNNING"];

/// Works as a rank, if the environment says so.
pub fn serve() -> Option<ExitCode> {
    let number = std::env::var(VARIABLES[0]).ok()?.parse().ok()?;
    Some(match work(number) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("failed {error}"));
            ExitCode::FAILURE
        }
    })
}

fn work(number: u32) -> Result<(), Box<dyn Error>> {
    let config = TcpConfig::default().address(Some(Ipv4Addr::LOCALHOST.into())).joining(PATIENCE).silence(PATIENCE);
    let id = std::env::var(VARIABLES[1]).ok().map(|id| id.parse::<UniqueId>()).transpose()?;
    let job = match id {
        Some(id) if std::env::var_os(VARIABLES[2]).is_some() => TcpBootstrap::join_running(&id, number, RANKS, config)?,
        Some(id) => TcpBootstrap::join(&id, number, RANKS, config)?,
        None => {
            let first = Rendezvous::new(config)?;
            say(&format!("id {}", first.id()));
            first.join(RANKS)?
        }
    };
    let (job, _lines) = (Arc::new(job), listen());
    world::join(WorldConfig::threads(RANKS), job.clone(), |rank| body(&rank, &job).map_err(|error| error.to_string()))?;
    Ok(())
}

/// Works in one job after the other until the parent ends the work.
fn body(rank: &Rank, first: &Arc<TcpBootstrap>) -> Result<(), Box<dyn Error>> {
    let mark: Vec<u8> = (0..KEPT).map(|index| (index ^ u64::from(std::process::id())) as u8).collect();
    let mut memory = None;
    if std::env::var_os(VARIABLES[2]).is_some() {
        let own = Memory::shared(rank.device(), MemoryKind::Device, KEPT)?.whole();
        own.write(0, &mark)?;
        memory = Some(own);
    }
    let mut job = first.clone();
    loop {
        let all: Arc<dyn Bootstrap> = job.clone();
        let outcome = serve_job(rank, &job, &all, &mut memory, &mark)?;
        if outcome == LaunchEnd::Success {
            return Ok(());
        }
        let begun = Instant::now();
        while job.lost().is_empty() {
            if begun.elapsed() > PATIENCE {
                return Err("a launch had a fault, and no rank is lost".into());
            }
            thread::sleep(Duration::from_millis(1));
        }
        job = Arc::new(job.grow(&job.lost(), PATIENCE)?);
    }
}

/// Works in one job. Returns [`LaunchEnd::Fault`] after a loss.
fn serve_job(
    rank: &Rank,
    job: &TcpBootstrap,
    all: &Arc<dyn Bootstrap>,
    memory: &mut Option<MemorySlice>,
    mark: &[u8],
) -> Result<LaunchEnd, Box<dyn Error>> {
    let comm = communicator(rank, all);
    let mut site = Site::new(comm, 5, false)?;
    let kept = if let Some(memory) = memory {
        site.comm.register::<u8>(memory, WindowFlags::NONE)?
    } else {
        let window = site.comm.alloc_window::<u8>(mark.len(), WindowFlags::NONE)?;
        window.write(0, mark)?;
        window
    };
    *memory = Some(kept.memory().clone());
    if kept.read_all()? != mark {
        return Err("the memory that was registered again has other bytes".into());
    }
    for launches in 0_u64.. {
        let end = site.launch(rank)?;
        if launches == 1 {
            say(&format!("works {}", job.id()));
        }
        let enough = job.rank() == 0 && ENOUGH.load(Ordering::Acquire);
        let votes = if end == LaunchEnd::Success { all.all_gather(&[enough.into()]).ok() } else { None };
        match votes {
            Some(votes) if votes[0] == [1] => break,
            Some(_) => {}
            None => {
                // The part of a communicator that a fault has ended is destroyed with that fault.
                drop(kept);
                let _ = site.comm.destroy();
                return Ok(LaunchEnd::Fault);
            }
        }
    }
    site.comm.deregister(&kept)?;
    site.comm.destroy()?;
    say("done");
    Ok(LaunchEnd::Success)
}

/// A rank, as the parent sees it. It is killed when this is dropped.
struct Process {
    child: Child,
    lines: Receiver<String>,
}

impl Process {
    fn start(rank: u32, id: Option<&str>, is_running: bool) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("the name of this program"));
        command.env(VARIABLES[0], rank.to_string()).envs(id.map(|id| (VARIABLES[1], id)));
        command.envs(is_running.then_some((VARIABLES[2], "1"))).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("a process");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        let (to, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                let Some(line) = line.strip_prefix(MARK) else { continue };
                if to.send(line.to_owned()).is_err() {
                    break;
                }
            }
        });
        Self { child, lines }
    }

    /// Returns the rest of the next line, which begins with `word`.
    fn hear(&self, word: &str) -> Result<String, String> {
        let line = self.lines.recv_timeout(PATIENCE).map_err(|error| format!("no `{word}` of a process: {error}"))?;
        let rest = line.strip_prefix(word).ok_or_else(|| format!("expected `{word}`, heard `{line}`"))?;
        Ok(rest.trim().to_owned())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn ranks_that_are_killed_during_traffic_are_replaced_and_the_others_keep_their_memory() -> Result<(), String> {
    let mut random = rng(39);
    let first = Process::start(0, None, false);
    let id = first.hear("id")?;
    let mut all = vec![first];
    all.extend((1..RANKS).map(|rank| Process::start(rank, Some(&id), false)));
    let mut times = Vec::new();
    for round in 0..=KILLED {
        let begun = Instant::now();
        let said = all.iter().map(|process| process.hear("works")).collect::<Result<Vec<_>, _>>()?;
        times.push(begun.elapsed());
        if round == KILLED {
            break;
        }
        // Each rank in turn, also the first one, at any point of its work.
        let killed = (round % RANKS) as usize;
        thread::sleep(Duration::from_millis(random.rand_range(0..60)));
        all[killed].child.kill().map_err(|error| error.to_string())?;
        // It joins as the ranks find out about the loss.
        all[killed] = Process::start(killed as u32, Some(&said[(killed + 1) % RANKS as usize]), true);
    }
    writeln!(all[0].child.stdin.as_ref().ok_or("no pipe")?, "enough").map_err(|error| error.to_string())?;
    for process in &mut all {
        process.hear("done")?;
        // A process that loses its input ends with an error, and `wait` would close it.
        let _input = process.child.stdin.take();
        let status = process.child.wait().map_err(|error| error.to_string())?;
        if !status.success() {
            return Err(format!("a rank ended with {status}"));
        }
    }
    // The first includes the start of the job.
    times.remove(0);
    times.sort_unstable();
    println!(
        "from a kill to traffic of all ranks: median {:?}, max {:?}",
        times[times.len() / 2],
        times[times.len() - 1]
    );
    Ok(())
}
