// SPDX-License-Identifier: MIT OR Apache-2.0
//! The suite with ranks that are processes of their own.
//!
//! A [`Group`] starts its program so many times; each process [`serve`]s: it joins the others over TCP, reads the names
//! of cases from its input and runs them in step with the others. For each scenario, which may have fewer ranks, the
//! first of them form a job of their own, so that a scenario that ends badly costs the next one nothing. What came of
//! it is told to all, and each judges for itself.

use crate::cases;
use crate::host::{Setup, judge};
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
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::string::{String, ToString};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::vec::Vec;

/// Tells a process which of the group it is.
const RANK: &str = "GIN_SUITE_RANK";
/// Tells it how many there are.
const RANKS: &str = "GIN_SUITE_RANKS";
/// Tells all but the first how to find it.
const ID: &str = "GIN_SUITE_ID";
/// Tells each where the first one listens; this host only, unless it is there.
const ADDRESS: &str = "GIN_SUITE_ADDRESS";
/// Starts a line of output that is for the group.
const MARK: &str = "@@ ";
/// In the text of a case that needs what processes do not have.
pub(crate) const NOT_HERE: &str = "cannot be across these processes";

/// What came of a rank's part of a scenario, or why nothing did.
pub(crate) type Part<T> = Result<T, String>;

/// What a rank brings home: entries of each thread, bytes of each window, and the fault that the host knows of.
pub(crate) type Collected = (Vec<Vec<Entry>>, Vec<Vec<u8>>, Option<(u32, Fault)>);

/// The processes that run the suite together, seen from one of them.
#[derive(Clone, Debug)]
pub struct Processes {
    all: Arc<dyn Bootstrap>,
}

fn config() -> TcpConfig {
    let address = std::env::var(ADDRESS).ok().and_then(|address| address.parse().ok());
    // Other machines may have to be booted first.
    let limit = Duration::from_secs(if address.is_some() { 120 } else { 30 });
    TcpConfig::default()
        .address(Some(address.unwrap_or(Ipv4Addr::LOCALHOST.into())))
        .joining(limit)
        .collective_timeout(Some(limit))
}

impl Processes {
    /// The group that this process was started for.
    fn join() -> Result<Option<Self>, String> {
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

    /// Which of them this is, from 0.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.all.rank()
    }

    /// A job of the first `ranks` of them; `None` in those that are not among them.
    pub(crate) fn job(&self, ranks: u32) -> Result<Option<Arc<dyn Bootstrap>>, String> {
        let (rank, there) = (self.all.rank(), self.all.ranks());
        if ranks > there {
            return Err(format!("{NOT_HERE}: {ranks} are needed, there are {there}"));
        }
        let first = if rank == 0 { Some(Rendezvous::new(config()).map_err(|error| error.to_string())?) } else { None };
        let id = first.as_ref().map_or_else(String::new, |first| first.id().to_string());
        let told = self.all.all_gather(id.as_bytes()).map_err(|error| error.to_string())?;
        if rank >= ranks {
            return Ok(None);
        }
        let job = match first {
            Some(first) => first.join(ranks),
            None => {
                let id = String::from_utf8_lossy(told.first().map_or(&[], Vec::as_slice));
                TcpBootstrap::join(&id.parse().map_err(|error| format!("{error}"))?, rank, ranks, config())
            }
        };
        Ok(Some(Arc::new(job.map_err(|error| error.to_string())?)))
    }

    /// Tells all what came of this one's part, which is `None` if it had none.
    ///
    /// # Errors
    /// What went wrong first on any of them.
    pub(crate) fn gather(&self, own: Option<Part<Collected>>) -> Result<Vec<Collected>, String> {
        let message = own.map(|part| message(&part)).unwrap_or_default();
        let all = self.all.all_gather(&message).map_err(|error| error.to_string())?;
        let parts = all.iter().filter(|message| !message.is_empty());
        let parts: Option<Vec<_>> = parts.map(|message| read(message)).collect();
        let parts = parts.ok_or("a process sent garbage")?;
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
    number.map(Some).ok_or(format!("{variable} is no number"))
}

/// Nanoseconds on a clock that all processes of a host share.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_nanos() as u64
}

/// When it was made, whether it went well, and the rest.
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

/// Says a line to the group.
fn say(line: &str) {
    let mut output = io::stdout().lock();
    // A group that is gone is noticed when there is no more input.
    let _ = writeln!(output, "{MARK}{}", line.replace('\n', "\u{1}"));
    let _ = output.flush();
}

/// Serves a group, if this process was started for one: runs the cases that it names, each in the way that `setup` has
/// for its name. Does not return then before the group is gone.
pub fn serve(setup: impl Fn(&str, Processes) -> Option<Setup>) -> Option<ExitCode> {
    let processes = match Processes::join() {
        Ok(None) => return None,
        Ok(Some(processes)) => processes,
        Err(error) => {
            say(&format!("failed {error}"));
            return Some(ExitCode::FAILURE);
        }
    };
    say("ready");
    for line in io::stdin().lock().lines().map_while(Result::ok) {
        let found = line.split_once(' ').and_then(|(way, name)| {
            let case = cases::every().into_iter().find(|case| case.name == name)?;
            Some((case, setup(way, processes.clone())?))
        });
        match found.map(|(case, setup)| judge(&case, &setup)) {
            None => say(&format!("failed there is no case {line}")),
            Some(Ok(())) => say("passed"),
            Some(Err(error)) if error.contains(NOT_HERE) => say(&format!("skipped {}", finding(&error))),
            Some(Err(error)) => say(&format!("failed {error}")),
        }
    }
    Some(ExitCode::SUCCESS)
}

/// What was found, without the setup, which differs where each process has a GPU of its own.
fn finding(text: &str) -> &str {
    text.split("\n  on: ").next().unwrap_or(text)
}

/// What a group says of a case.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// It passed on all.
    Passed,
    /// It needs something that is not there.
    Skipped(String),
    /// It failed.
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

    /// Its next line.
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
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Makes the command that starts this program once more: as this rank, with these variables.
pub type Starter = dyn Fn(u32, &[(&str, String)]) -> io::Result<Command> + Send + Sync;

/// Processes that run cases together. One that hangs or dies ends them all; the next case gets new ones.
pub struct Group {
    ranks: u32,
    limit: Duration,
    starter: Box<Starter>,
    members: Mutex<Vec<Member>>,
}

impl Group {
    /// So many processes of this program, which must [`serve`]. A case may take `limit`.
    #[must_use]
    pub fn new(ranks: u32, limit: Duration) -> Self {
        Self::started_by(ranks, limit, |_, variables| {
            let mut command = Command::new(std::env::current_exe()?);
            command.envs(variables.iter().map(|(name, value)| (name, value)));
            Ok(command)
        })
    }

    /// The same, started otherwise: on other machines, say, to which input and output are passed on.
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
        let text = |error: io::Error| format!("a process cannot be started: {error}");
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

    /// Runs a case, in the way that the processes know by this name.
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
            let told = writeln!(member.input, "{way} {case}").and_then(|()| member.input.flush());
            told.map_err(|error| format!("process {rank} cannot be told: {error}"))?;
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

/// A group that says nothing of its processes.
impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Group").field("ranks", &self.ranks).finish_non_exhaustive()
    }
}
