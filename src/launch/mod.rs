// SPDX-License-Identifier: MIT OR Apache-2.0
//! `gin launch`: runs the ranks of a job as processes of this host.

mod cause;
mod output;

use crate::cli::{End, Failure, LaunchArgs, Refused};
use cause::{Tail, cause};
use gin_boot::{Rendezvous, TcpConfig};
use output::{Stream, pump};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Pid, Signal, kill_process_group, set_parent_process_death_signal};
use std::ffi::OsStr;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

/// Variables of other kinds of rendezvous, which the ranks must not inherit.
const OTHER_RENDEZVOUS: [&str; 7] =
    ["GIN_ADDR", "GIN_PORT", "GIN_SECRET", "GIN_SECRET_FILE", "GIN_INTERFACE", "GIN_LISTEN_FD", "GIN_JOIN"];

/// Time limit for remaining output after the last rank has ended: a process that a rank left behind may hold its pipe
/// open.
const LAST_OUTPUT: Duration = Duration::from_secs(1);

/// Time that the other ranks have to end by themselves after a rank has failed. A rank that ends because of another one
/// may end first. The other one then still writes its error, and ends with its own status.
const SETTLING: Duration = Duration::from_millis(500);

/// Starts the ranks and waits for their end.
///
/// # Errors
/// Returns an error if it cannot open a socket or write output.
pub(crate) fn run(arguments: &LaunchArgs) -> Result<End, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(launch(arguments))
}

/// The processes of the ranks. Each leads a process group. Therefore a forwarded signal also reaches the processes that
/// a rank starts, and a signal from the terminal reaches only this command.
struct Ranks {
    /// The process group of each rank; `None` once the rank has ended.
    groups: Vec<Option<Pid>>,
    ended: JoinSet<(usize, io::Result<ExitStatus>)>,
    /// The end of each rank's standard error.
    tails: Vec<Arc<Mutex<Tail>>>,
    output: JoinSet<io::Result<()>>,
}

impl Ranks {
    fn add(&mut self, rank: usize, mut child: Child) {
        // A process that has not been waited for has an identifier, which is positive.
        self.groups[rank] = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        if let Some(stream) = child.stdout.take() {
            self.output.spawn(pump(stream, rank, Stream::Output, |_| {}));
        }
        let tail = Arc::<Mutex<Tail>>::default();
        self.tails[rank] = tail.clone();
        if let Some(stream) = child.stderr.take() {
            let keep = move |bytes: &[u8]| tail.lock().unwrap_or_else(PoisonError::into_inner).add(bytes);
            self.output.spawn(pump(stream, rank, Stream::Error, keep));
        }
        self.ended.spawn(async move { (rank, child.wait().await) });
    }

    /// Sends a signal to all ranks that have not ended.
    fn signal(&self, signal: Signal) {
        for group in self.groups.iter().flatten() {
            // This fails if the rank has just ended.
            let _ = kill_process_group(*group, signal);
        }
    }
}

/// The processes that this command starts.
struct Start {
    arguments: LaunchArgs,
    /// The id of the job.
    id: String,
}

impl Start {
    /// Starts a process of a rank, with `more` variables. Prints an error.
    ///
    /// # Errors
    /// The exit status that shells have for it.
    fn start(&self, rank: usize, more: Option<(&str, String)>) -> Result<Child, u8> {
        let LaunchArgs { ranks, program, verbosity, .. } = &self.arguments;
        let mut command = Command::new(&program[0]);
        command.args(&program[1..]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.process_group(0).kill_on_drop(true);
        // Safety: between fork and exec the closure calls only prctl, which is safe there.
        unsafe {
            // The ranks end if this command is killed.
            command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::TERM))?));
        }
        for other in OTHER_RENDEZVOUS {
            command.env_remove(other);
        }
        command.env("GIN_RANK", rank.to_string()).env("GIN_RANKS", ranks.to_string());
        command.env("GIN_LOCAL_RANK", rank.to_string()).env("GIN_LOCAL_RANKS", ranks.to_string());
        command.env("GIN_UNIQUE_ID", &self.id).envs(more);
        let child = command.spawn().map_err(|error| {
            eprintln!("gin: cannot start {}: {error}", quoted(&program[0]));
            if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 }
        })?;
        if let (1.., Some(process)) = (verbosity.verbose, child.id()) {
            eprintln!("gin: rank {rank} is process {process}");
        }
        Ok(child)
    }
}

async fn launch(arguments: &LaunchArgs) -> Result<End, Failure> {
    if arguments.program.is_empty() {
        return Err(Refused("no program given; name it after --".to_owned()).into());
    }
    if let Some(lost) = arguments.may_lose.iter().find(|&&lost| lost >= arguments.ranks) {
        return Err(Refused(format!("--may-lose {lost}: the job has ranks 0 to {}", arguments.ranks - 1)).into());
    }
    if arguments.replace && arguments.may_lose.contains(&0) {
        let text =
            "--may-lose 0 --replace: a new process finds the job at the address of rank 0; leave one of them out";
        return Err(Refused(text.to_owned()).into());
    }
    let mut signals = signals()?;
    let rendezvous = Rendezvous::new(TcpConfig::default().address(Some(Ipv4Addr::LOCALHOST.into())))?;
    let start = Start { arguments: arguments.clone(), id: rendezvous.id().to_string() };
    let count = arguments.ranks as usize;
    let (groups, tails) = (vec![None; count], vec![Arc::default(); count]);
    let mut ranks = Ranks { groups, ended: JoinSet::new(), tails, output: JoinSet::new() };
    // The exit status of the command: the status of the first rank that failed.
    let mut failed: Option<u8> = None;
    for rank in 0..count {
        // The socket stays open in rank 0 and in no other rank.
        let listens = (rank == 0).then(|| ("GIN_LISTEN_FD", rendezvous.as_fd().as_raw_fd().to_string()));
        fcntl_setfd(&rendezvous, if rank == 0 { FdFlags::empty() } else { FdFlags::CLOEXEC })?;
        match start.start(rank, listens) {
            Ok(child) => ranks.add(rank, child),
            Err(code) => {
                failed = Some(code);
                break;
            }
        }
    }
    // Closes the socket here, so that the other ranks cannot connect once rank 0 has ended.
    drop(rendezvous);
    let grace = Duration::from_millis(arguments.grace_ms);
    let (may_lose, ends) = (arguments.may_lose.clone(), vec![String::new(); count]);
    let mut all =
        Watched { ranks, start, ends, failed: None, first: None, asks: None, deadline: None, grace, may_lose };
    if let Some(code) = failed {
        all.fail(code);
        all.ask();
    }
    all.wait(&mut signals).await
}

/// The running ranks and the progress of their end.
struct Watched {
    ranks: Ranks,
    /// How each rank ended.
    ends: Vec<String>,
    failed: Option<u8>,
    /// The rank that failed first, unless it was asked to end.
    first: Option<usize>,
    /// The time at which the command asks the remaining ranks to end.
    asks: Option<Instant>,
    /// The time at which the command kills the remaining ranks.
    deadline: Option<Instant>,
    grace: Duration,
    /// The ranks whose end is no failure.
    may_lose: Vec<u32>,
    start: Start,
}

impl Watched {
    /// Sets the exit status of the command to `code`, and ends all ranks soon, unless a rank failed before.
    fn fail(&mut self, code: u8) {
        if self.failed.is_none() {
            self.failed = Some(code);
            self.asks = Some(Instant::now() + SETTLING);
        }
    }

    /// Asks all ranks to end, unless they are already ending because of a forwarded signal.
    fn ask(&mut self) {
        self.asks = None;
        if self.deadline.is_none() {
            self.ranks.signal(Signal::TERM);
            // A stopped process ends only once it continues.
            self.ranks.signal(Signal::CONT);
            self.end_soon();
        }
    }

    /// Sets the deadline, unless it is set already.
    fn end_soon(&mut self) {
        self.deadline.get_or_insert(Instant::now() + self.grace);
    }

    async fn wait(mut self, signals: &mut mpsc::UnboundedReceiver<Signal>) -> Result<End, Failure> {
        let mut unwritten = None;
        loop {
            let (asks, deadline) = (self.asks, self.deadline);
            tokio::select! {
                ended = self.ranks.ended.join_next() => match ended {
                    None => break,
                    Some(ended) => {
                        let (rank, status) = ended?;
                        let group = self.ranks.groups[rank].take();
                        self.note(rank, group, status?);
                    }
                },
                Some(signal) = signals.recv() => {
                    self.ranks.signal(signal);
                    if signal != Signal::USR1 && signal != Signal::USR2 {
                        self.end_soon();
                    }
                }
                () = sleep_until(asks.unwrap_or_else(Instant::now)), if asks.is_some() => self.ask(),
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    let left = self.ranks.groups.iter().flatten().count();
                    eprintln!("gin: killing {left} ranks that did not end within {:?}", self.grace);
                    self.ranks.signal(Signal::KILL);
                    // The ranks end now. A far deadline leaves only the wait for them.
                    self.deadline = Some(Instant::now() + Duration::from_secs(3600));
                }
                Some(written) = self.ranks.output.join_next() => {
                    if let Err(error) = written? {
                        unwritten.get_or_insert(error);
                        self.fail(1);
                    }
                }
            }
        }
        let rest = async {
            while let Some(written) = self.ranks.output.join_next().await {
                written??;
            }
            Ok::<_, Failure>(())
        };
        // A process that still holds a pipe open has outlived its rank.
        timeout(LAST_OUTPUT, rest).await.unwrap_or(Ok(()))?;
        self.tell_cause();
        match (unwritten, self.failed) {
            (Some(error), _) => Err(error.into()),
            (None, None) => Ok(End::Right),
            (None, Some(code)) => Ok(End::Code(code)),
        }
    }

    /// Handles the end of a rank with process group `group`.
    fn note(&mut self, rank: usize, group: Option<Pid>, status: ExitStatus) {
        let (code, how) = match (status.code(), status.signal()) {
            (Some(0), _) => (0, "with status 0".to_owned()),
            (Some(code), _) => (u8::try_from(code).unwrap_or(1), format!("with status {code}")),
            (None, Some(signal)) => {
                // The status that shells report for a signal. Signals are numbers below 128.
                (128 | (signal & 0x7f) as u8, format!("by signal {signal}"))
            }
            (None, None) => (1, "for an unknown reason".to_owned()),
        };
        let was_asked = self.deadline.is_some();
        self.ends[rank] = if was_asked { format!("{how} when gin asked it to end") } else { how.clone() };
        if status.success() {
            return;
        }
        // Ends processes that the rank started and left behind; usually it left none.
        if let Some(group) = group {
            let _ = kill_process_group(group, Signal::TERM);
        }
        if self.failed.is_none() && self.may_lose.iter().any(|&lost| lost as usize == rank) {
            let replace = self.start.arguments.replace && !was_asked;
            if !self.start.arguments.verbosity.quiet {
                let then = if replace { "a new process takes its place" } else { "the others go on" };
                eprintln!("gin: rank {rank} ended {how}; {then}");
            }
            if replace {
                // Once: a program that cannot join would be started for ever.
                self.may_lose.retain(|&lost| lost as usize != rank);
                match self.start.start(rank, Some(("GIN_JOIN", "1".to_owned()))) {
                    Ok(child) => self.ranks.add(rank, child),
                    Err(code) => self.fail(code),
                }
            }
            return;
        }
        // Reports no rank that ends after a first failure or a forwarded signal: this command asked it to end.
        if self.failed.is_none() && self.deadline.is_none() {
            let left = self.ranks.groups.iter().flatten().count();
            let others = if left == 0 { String::new() } else { format!("; ending the other {left}") };
            eprintln!("gin: rank {rank} ended {how}{others}");
            self.first = Some(rank);
        }
        self.fail(code);
    }

    /// Prints which rank caused the end, how it ended, and its error. Prints nothing if no rank wrote to standard
    /// error: the line about the first failure then says all, and is the last one.
    fn tell_cause(&self) {
        let Some(first) = self.first else { return };
        let error = |tail: &Arc<Mutex<Tail>>| tail.lock().unwrap_or_else(PoisonError::into_inner).error();
        let errors: Vec<String> = self.ranks.tails.iter().map(error).collect();
        let cause = cause(first, &errors);
        let (how, error) = (&self.ends[cause], &errors[cause]);
        let wrote = if error.is_empty() { String::new() } else { format!(": {error}") };
        if cause != first {
            eprintln!("gin: rank {first} ended because of rank {cause}, which ended {how}{wrote}");
        } else if errors.iter().any(|error| !error.is_empty()) {
            eprintln!("gin: rank {first} ended {how}{wrote}");
        }
    }
}

/// Starts listening for the signals that this command forwards and returns their channel.
fn signals() -> io::Result<mpsc::UnboundedReceiver<Signal>> {
    let (to, from) = mpsc::unbounded_channel();
    let passed = [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT, Signal::USR1, Signal::USR2];
    for passed in passed {
        let mut received = signal(SignalKind::from_raw(passed.as_raw()))?;
        let to = to.clone();
        tokio::spawn(async move { while received.recv().await.is_some() && to.send(passed).is_ok() {} });
    }
    Ok(from)
}

fn quoted(program: &OsStr) -> String {
    format!("`{}`", program.display())
}
