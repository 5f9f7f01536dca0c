// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs the suite with ranks in processes of their own.
//!
//! A [`Group`] starts its program once for each rank. Each process calls [`serve`](crate::serve::serve): it joins the
//! others over TCP, reads names of cases from its input, and runs each case in step with the others. A scenario may
//! have fewer ranks. For each scenario the first processes form a new job, so a scenario that ends badly does not
//! affect the next one. All processes then exchange the results, and each judges them for itself.

use crate::op::Entry;
use gin_abi::Fault;
use gin_boot::Bootstrap;
use gin_boot::{Rendezvous, TcpBootstrap, TcpConfig, UniqueId};
use std::borrow::ToOwned;
use std::boxed::Box;
use std::format;
use std::io::{self, BufRead, BufReader, Write};
use std::net::Ipv4Addr;
use std::println;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::string::{String, ToString};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::vec::Vec;

/// Variable that gives a process its number in the group.
const RANK: &str = "GIN_SUITE_RANK";
/// Variable that gives the number of processes.
const RANKS: &str = "GIN_SUITE_RANKS";
/// Variable that gives all processes but the first the bootstrap id of the first.
const ID: &str = "GIN_SUITE_ID";
/// Variable that gives the address where the first process listens. Without it the group uses this host only.
const ADDRESS: &str = "GIN_SUITE_ADDRESS";
/// Prefix of an output line for the group.
const MARK: &str = "@@ ";
/// Marks the text of a case that needs a feature that processes lack.
pub(crate) const NOT_HERE: &str = "cannot run across these processes";

/// Result of a rank's part of a scenario, or the reason why there is none.
pub(crate) type Part<T> = Result<T, String>;

/// A rank's part: entries of each thread, bytes of each window, and the fault that the host knows.
pub(crate) type Collected = (Vec<Vec<Entry>>, Vec<Vec<u8>>, Option<(u32, Fault)>);

/// The processes that run the suite together, as one of them sees them.
#[derive(Clone, Debug)]
pub struct Processes {
    all: Arc<dyn Bootstrap>,
}

fn config() -> TcpConfig {
    let address = std::env::var(ADDRESS).ok().and_then(|address| address.parse().ok());
    // Other machines may have to boot first.
    let limit = Duration::from_secs(if address.is_some() { 120 } else { 30 });
    TcpConfig::default()
        .address(Some(address.unwrap_or(Ipv4Addr::LOCALHOST.into())))
        .joining(limit)
        .collective_timeout(Some(limit))
}

impl Processes {
    /// Joins the group that started this process; `None` if no group did.
    pub(crate) fn join() -> Result<Option<Self>, String> {
        let Some(rank) = number(RANK)? else { return Ok(None) };
        let ranks = number(RANKS)?.ok_or(format!("{RANKS} is missing"))?;
        let text = |error: &dyn std::fmt::Display| format!("this process cannot join the others: {error}");
        let all = if rank == 0 {
            let first = Rendezvous::new(config()).map_err(|error| text(&error))?;
            say(&first.id().to_string());
            first.join(ranks)
        } else {
            let id: UniqueId = std::env::var(ID).unwrap_or_default().parse().map_err(|error| text(&error))?;
            TcpBootstrap::join(&id, rank, ranks, config())
        };
        Ok(Some(Self { all: Arc::new(all.map_err(|error| text(&error))?) }))
    }

    /// Returns the number of this process in the group, from 0.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.all.rank()
    }

    /// Creates a job of the first `ranks` processes. Returns `None` in the other processes.
    pub(crate) fn job(&self, ranks: u32) -> Result<Option<Arc<dyn Bootstrap>>, String> {
        let (rank, there) = (self.all.rank(), self.all.ranks());
        if ranks > there {
            return Err(format!("{NOT_HERE}: a scenario needs {ranks} ranks, the group has {there}"));
        }
        let first = if rank == 0 { Some(Rendezvous::new(config()).map_err(|error| error.to_string())?) } else { None };
        let id = first.as_ref().map_or_else(String::new, |first| first.id().to_string());
        let ids = self.all.all_gather(id.as_bytes()).map_err(|error| error.to_string())?;
        if rank >= ranks {
            return Ok(None);
        }
        let job = match first {
            Some(first) => first.join(ranks),
            None => {
                let id = String::from_utf8_lossy(ids.first().map_or(&[], Vec::as_slice));
                TcpBootstrap::join(&id.parse().map_err(|error| format!("{error}"))?, rank, ranks, config())
            }
        };
        Ok(Some(Arc::new(job.map_err(|error| error.to_string())?)))
    }

    /// Sends this process's part, `None` if it had none, to all, and returns the parts of all ranks.
    ///
    /// # Errors
    /// Returns the earliest failure of any process.
    pub(crate) fn gather(&self, own: Option<Part<Collected>>) -> Result<Vec<Collected>, String> {
        let message = own.map(|part| message(&part)).unwrap_or_default();
        let all = self.all.all_gather(&message).map_err(|error| error.to_string())?;
        let parts = all.iter().filter(|message| !message.is_empty());
        let parts: Option<Vec<_>> = parts.map(|message| read(message)).collect();
        let parts = parts.ok_or("a process sent a message that cannot be decoded")?;
        let first =
            parts.iter().filter_map(|(time, part)| Some((time, part.as_ref().err()?))).min_by_key(|part| *part.0);
        if let Some((_, error)) = first {
            return Err(error.clone());
        }
        Ok(parts.into_iter().filter_map(|(_, part)| part.ok()).collect())
    }
}

fn number(variable: &str) -> Result<Option<u32>, String> {
    let Some(text) = std::env::var_os(variable) else { return Ok(None) };
    let number = text.to_str().and_then(|text| text.parse().ok());
    number.map(Some).ok_or(format!("{variable} is not a number"))
}

/// Returns nanoseconds of a clock that all processes of a host share.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_nanos() as u64
}

/// Encodes a part: the time, success or failure, and the content.
fn message(part: &Part<Collected>) -> Vec<u8> {
    let mut message = now().to_le_bytes().to_vec();
    message.push(u8::from(part.is_ok()));
    let (logs, windows, fault) = match part {
        Ok(collected) => collected,
        Err(error) => {
            message.extend_from_slice(error.as_bytes());
            return message;
        }
    };
    let mut bytes = |bytes: &[u8]| {
        message.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
        message.extend_from_slice(bytes);
    };
    bytes(&(logs.len() as u64).to_le_bytes());
    logs.iter().for_each(|log| bytes(bytemuck::cast_slice(log)));
    bytes(&(windows.len() as u64).to_le_bytes());
    windows.iter().for_each(|window| bytes(window));
    if let Some((rank, fault)) = fault {
        bytes(&rank.to_le_bytes());
        bytes(bytemuck::bytes_of(&fault.to_words()));
    }
    message
}

fn read(message: &[u8]) -> Option<(u64, Part<Collected>)> {
    let (time, rest) = message.split_first_chunk()?;
    let (went_well, mut rest) = rest.split_first()?;
    let time = u64::from_le_bytes(*time);
    if *went_well == 0 {
        return Some((time, Err(String::from_utf8_lossy(rest).into_owned())));
    }
    let mut bytes = || -> Option<&[u8]> {
        let (length, after) = rest.split_first_chunk()?;
        let (bytes, after) = after.split_at_checked(u64::from_le_bytes(*length) as usize)?;
        rest = after;
        Some(bytes)
    };
    let mut list = || -> Option<Vec<&[u8]>> {
        let count = u64::from_le_bytes(bytes()?.try_into().ok()?);
        (0..count).map(|_| bytes()).collect()
    };
    let logs = list()?.into_iter().map(bytemuck::pod_collect_to_vec).collect();
    let windows = list()?.into_iter().map(<[u8]>::to_vec).collect();
    let fault = match (bytes(), bytes()) {
        (Some(rank), Some(words)) => {
            let words: Vec<u64> = bytemuck::pod_collect_to_vec(words);
            Some((u32::from_le_bytes(rank.try_into().ok()?), Fault::from_words(words.try_into().ok()?)?))
        }
        _ => None,
    };
    Some((time, Ok((logs, windows, fault))))
}

/// Sends a line to the group.
pub(crate) fn say(line: &str) {
    let mut output = io::stdout().lock();
    // If the group is gone, this process notices that at the end of its input.
    let _ = writeln!(output, "{MARK}{}", line.replace('\n', "\u{1}"));
    let _ = output.flush();
}

/// Returns the finding without the setup, which differs if each process has its own GPU.
pub(crate) fn finding(text: &str) -> &str {
    text.split("\n  on: ").next().unwrap_or(text)
}

/// A group's result for a case.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The case passed in all processes.
    Passed,
    /// The case needs a feature that is missing here.
    Skipped(String),
    /// The case failed.
    Failed(String),
}

/// A process of a group.
struct Member {
    process: Child,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Member {
    fn start(starter: &Starter, rank: u32, ranks: u32, id: &str) -> io::Result<Self> {
        let variables = [(RANK, rank.to_string()), (RANKS, ranks.to_string()), (ID, id.to_owned())];
        let mut command = starter(rank, &variables)?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn()?;
        let missing = || io::Error::other("a pipe is missing");
        let input = process.stdin.take().ok_or_else(missing)?;
        let output = process.stdout.take().ok_or_else(missing)?;
        let (to, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                match line.strip_prefix(MARK) {
                    Some(line) if to.send(line.replace('\u{1}', "\n")).is_err() => break,
                    Some(_) => {}
                    None => println!("{line}"),
                }
            }
        });
        Ok(Self { process, input, lines })
    }

    /// Waits for the next line.
    fn hear(&self, until: Instant) -> Result<String, String> {
        let left = until.saturating_duration_since(Instant::now());
        self.lines.recv_timeout(left).map_err(|error| match error {
            mpsc::RecvTimeoutError::Timeout => "no answer in time".to_owned(),
            mpsc::RecvTimeoutError::Disconnected => "the process ended".to_owned(),
        })
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Makes the command that starts this program again, as this rank and with these variables.
pub type Starter = dyn Fn(u32, &[(&str, String)]) -> io::Result<Command> + Send + Sync;

/// Processes that run cases together. If one hangs or dies, all are ended; the next case gets new ones.
pub struct Group {
    ranks: u32,
    limit: Duration,
    starter: Box<Starter>,
    members: Mutex<Vec<Member>>,
}

impl Group {
    /// Creates a group of `ranks` processes of this program, which must call [`serve`](crate::serve::serve). A case may
    /// take `limit`.
    #[must_use]
    pub fn new(ranks: u32, limit: Duration) -> Self {
        Self::started_by(ranks, limit, |_, variables| {
            let mut command = Command::new(std::env::current_exe()?);
            command.envs(variables.iter().map(|(name, value)| (name, value)));
            Ok(command)
        })
    }

    /// As [`new`](Self::new), but `starter` starts the processes, for example on other machines. It must pass input and
    /// output on.
    #[must_use]
    pub fn started_by(
        ranks: u32,
        limit: Duration,
        starter: impl Fn(u32, &[(&str, String)]) -> io::Result<Command> + Send + Sync + 'static,
    ) -> Self {
        Self { ranks, limit, starter: Box::new(starter), members: Mutex::default() }
    }

    fn start(&self) -> Result<Vec<Member>, String> {
        let until = Instant::now() + self.limit;
        let text = |error: io::Error| format!("cannot start a process: {error}");
        let mut members = Vec::new();
        let mut id = String::new();
        for rank in 0..self.ranks {
            let member = Member::start(&self.starter, rank, self.ranks, &id).map_err(text)?;
            if rank == 0 {
                id = member.hear(until)?;
                if let Some(error) = id.strip_prefix("failed ") {
                    return Err(format!("process 0: {error}"));
                }
            }
            members.push(member);
        }
        for (rank, member) in members.iter().enumerate() {
            match member.hear(until) {
                Ok(line) if line == "ready" => {}
                Ok(line) | Err(line) => return Err(format!("process {rank}: {line}")),
            }
        }
        Ok(members)
    }

    /// Runs a case with the setup that the processes know by the name `way`.
    pub fn run(&self, way: &str, case: &str) -> Verdict {
        let mut members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        let verdict = self.ask(&mut members, way, case);
        match verdict {
            Ok(Verdict::Failed(_)) | Err(_) => members.clear(),
            Ok(_) => {}
        }
        verdict.unwrap_or_else(Verdict::Failed)
    }

    fn ask(&self, members: &mut Vec<Member>, way: &str, case: &str) -> Result<Verdict, String> {
        if members.is_empty() {
            *members = self.start()?;
        }
        for (rank, member) in members.iter_mut().enumerate() {
            let sent = writeln!(member.input, "{way} {case}").and_then(|()| member.input.flush());
            sent.map_err(|error| format!("cannot send the case to process {rank}: {error}"))?;
        }
        let until = Instant::now() + self.limit;
        let mut answers = Vec::new();
        for (rank, member) in members.iter().enumerate() {
            answers.push(member.hear(until).map_err(|error| format!("process {rank}: {error}"))?);
        }
        let say = |line: &str| match line.split_once(' ').unwrap_or((line, "")) {
            ("passed", _) => Verdict::Passed,
            ("skipped", reason) => Verdict::Skipped(reason.to_owned()),
            (_, text) => Verdict::Failed(text.to_owned()),
        };
        let first = say(&answers[0]);
        match (1..).zip(&answers[1..]).find(|(_, answer)| finding(answer) != finding(&answers[0])) {
            None => Ok(first),
            Some((rank, other)) => {
                let text = format!("processes disagree:\n0: {}\n{rank}: {other}", answers[0]);
                Ok(Verdict::Failed(text))
            }
        }
    }
}

/// A group, without its processes.
impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Group").field("ranks", &self.ranks).finish_non_exhaustive()
    }
}
