// SPDX-License-Identifier: MIT OR Apache-2.0
//! Processes that are ranks ([`pulse`](super::pulse)), on this machine or in two virtual machines, and their output.

use super::machines::{Lines, Listeners, Machines};
use super::pair::ensure;
use super::pulse::Plan;
use gin_abi::FaultKind;
use libtest_mimic::Failed;
use std::cell::RefCell;
use std::env;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// The output of a rank.
pub struct Words {
    lines: Lines,
    /// The end of the rank's kernel, if it was read while waiting for another line.
    end: RefCell<Option<(Instant, String)>>,
    /// Times at which the independent communicator had completed these rounds.
    beside: RefCell<Vec<(Instant, u64)>>,
}

impl Words {
    fn new(lines: Lines) -> Self {
        Self { lines, end: RefCell::default(), beside: RefCell::default() }
    }

    /// Waits for a line that begins with `begin`, and skips others. Returns its time and the rest of it. If the kernel
    /// ends before the line arrives, returns an error.
    pub fn hear(&self, begin: &str, limit: Duration) -> Result<(Instant, String), Failed> {
        let until = Instant::now() + limit;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let kept = if begin == "ended" { self.end.take() } else { None };
            let (at, line) = kept.map_or_else(|| self.lines.recv_timeout(left), Ok).map_err(|error| match error {
                mpsc::RecvTimeoutError::Timeout => format!("no line `{begin}` within {limit:?}"),
                mpsc::RecvTimeoutError::Disconnected => format!("the process ended without `{begin}`"),
            })?;
            if line.starts_with("request failed") {
                println!("{line}");
            }
            if let Some(rounds) = line.strip_prefix("beside ") {
                self.beside.borrow_mut().push((at, rounds.parse()?));
            }
            if let Some(rest) = line.strip_prefix(begin) {
                return Ok((at, rest.trim().to_owned()));
            }
            if line.starts_with("ended") && ["going", "round", "beside"].contains(&begin) {
                self.end.replace(Some((at, line.clone())));
                return Err(format!("expected `{begin}`, got: {line}").into());
            }
            ensure(!line.starts_with("failed") && !line.starts_with("others:"), || line.clone())?;
        }
    }

    /// Returns the rounds that the independent communicator made between two moments. Every line up to `end` must have
    /// been read.
    pub fn beside_between(&self, begin: Instant, end: Instant) -> u64 {
        let beside = self.beside.borrow();
        let until = |end: Instant| beside.iter().rfind(|(at, _)| *at <= end).map_or(0, |(_, rounds)| *rounds);
        until(end) - until(begin)
    }
}

/// A fault as a rank reported it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seen {
    pub kind: FaultKind,
    pub peer: u32,
    /// For a kernel, the kind that another rank found; for the host, the rank that found it.
    pub more: u32,
}

impl Seen {
    fn read(text: &str) -> Option<Option<Self>> {
        if text == "-" {
            return Some(None);
        }
        let numbers: Option<Vec<u64>> = text.split('/').map(|number| number.parse().ok()).collect();
        let [kind, peer, more] = numbers?.try_into().ok()?;
        Some(Some(Self { kind: FaultKind::from_code(kind as u32)?, peer: peer as u32, more: more as u32 }))
    }
}

/// The end of a rank's kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ended {
    pub rounds: u64,
    pub wrong: u64,
    /// The fault that ended a wait of the kernel.
    pub device: Option<Seen>,
    pub host: Option<Seen>,
}

impl Ended {
    pub fn read(text: &str) -> Result<Self, Failed> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let read = || {
            let [rounds, wrong, device, host] = words[..] else { return None };
            Some(Self {
                rounds: rounds.parse().ok()?,
                wrong: wrong.parse().ok()?,
                device: Seen::read(device)?,
                host: Seen::read(host)?,
            })
        };
        read().ok_or_else(|| format!("this is not an outcome: {text}").into())
    }

    pub fn is_well(&self) -> bool {
        self.wrong == 0 && self.device.is_none() && self.host.is_none()
    }

    /// Returns whether the kernel and the host of this rank, one of two, report a fault of one of these kinds between
    /// the two ranks, and no data was wrong.
    pub fn reports(&self, rank: u32, kinds: &[FaultKind]) -> bool {
        let other = 1 - rank;
        let device = self.device.is_some_and(|seen| match seen.kind {
            FaultKind::Elsewhere => seen.peer == other && kinds.iter().any(|kind| kind.code() == seen.more),
            kind => seen.peer == other && kinds.contains(&kind),
        });
        let host = self.host.is_some_and(|seen| kinds.contains(&seen.kind) && seen.peer == 1 - seen.more);
        self.wrong == 0 && device && host
    }
}

/// Two ranks.
pub struct Pair {
    pub words: [Words; 2],
    /// The ranks' processes, if they are on this machine.
    children: Vec<Child>,
    pub stop: PathBuf,
    pub trigger: PathBuf,
    /// The folder of the two files.
    _folder: tempfile::TempDir,
}

impl Drop for Pair {
    fn drop(&mut self) {
        for child in &mut self.children {
            // The process may have ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Time limit for a process to start.
const COMING: Duration = Duration::from_secs(120);

impl Pair {
    /// Starts two processes on this machine. `plan` completes the plan of each.
    pub fn start(devices: &[String; 2], plan: impl Fn(Plan) -> Plan) -> Result<Self, Failed> {
        let folder = tempfile::tempdir()?;
        let (stop, trigger) = (folder.path().join("stop"), folder.path().join("trigger"));
        let (mut children, mut words, mut id) = (Vec::new(), Vec::new(), String::new());
        for (rank, device) in (0..).zip(devices) {
            let common = Plan {
                rank,
                device: device.clone(),
                id: id.clone(),
                stop: stop.clone(),
                trigger: trigger.clone(),
                ..Plan::new()
            };
            let mut command = Command::new(env::current_exe()?);
            command.envs(plan(common).variables()).stdin(Stdio::null()).stdout(Stdio::piped());
            let mut child = command.spawn()?;
            let output = child.stdout.take().ok_or("a pipe is missing")?;
            children.push(child);
            let listeners = Listeners::default();
            words.push(Words::new(listeners.listen(rank)));
            listeners.follow(output);
            if rank == 0 {
                id = words[0].hear("id", COMING)?.1;
            }
        }
        let words = words.try_into().map_err(|_| "expected two ranks")?;
        Ok(Self { words, children, stop, trigger, _folder: folder })
    }

    /// Returns the process of a rank on this machine.
    pub fn process(&self, rank: u32) -> Result<rustix::process::Pid, Failed> {
        let child = self.children.get(rank as usize).ok_or("the rank is on another machine")?;
        Ok(rustix::process::Pid::from_child(child))
    }

    pub fn signal(&self, rank: u32, signal: rustix::process::Signal) -> Result<(), Failed> {
        Ok(rustix::process::kill_process(self.process(rank)?, signal)?)
    }

    /// Waits until pulses are under way.
    pub fn going(&self) -> Result<(), Failed> {
        self.words.iter().try_for_each(|words| words.hear("going", COMING).map(drop))
    }

    /// Makes a rank break the part that its plan names.
    pub fn pull(&self) -> Result<Instant, Failed> {
        File::create(&self.trigger)?;
        Ok(Instant::now())
    }

    /// Makes both ranks stop at the same round.
    pub fn tell_to_stop(&self) -> Result<(), Failed> {
        File::create(&self.stop)?;
        Ok(())
    }

    pub fn ended(&self, limit: Duration) -> Result<[Ended; 2], Failed> {
        Ok(self.ended_since(Instant::now(), limit)?.map(|(_, ended)| ended))
    }

    /// Returns how each rank ended, and how long after `since`.
    pub fn ended_since(&self, since: Instant, limit: Duration) -> Result<[(Duration, Ended); 2], Failed> {
        ended_since(&self.words, since, limit)
    }
}

pub fn ended_since(words: &[Words; 2], since: Instant, limit: Duration) -> Result<[(Duration, Ended); 2], Failed> {
    let one = |rank: usize| -> Result<_, Failed> {
        let (at, text) = words[rank].hear("ended", limit).map_err(|error| at_rank(rank, error))?;
        let (took, ended) = (at.saturating_duration_since(since), Ended::read(&text)?);
        println!("rank {rank} after {took:?}: {ended:?}");
        Ok((took, ended))
    };
    Ok([one(0)?, one(1)?])
}

fn at_rank(rank: usize, error: Failed) -> Failed {
    format!("rank {rank}: {}", error.message().unwrap_or("no message")).into()
}

/// Two machines, on which jobs run one after another.
pub struct Hosts {
    pub machines: Machines,
    jobs: u32,
}

impl Hosts {
    pub fn boot() -> Result<Self, Failed> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/soft-roce.sh");
        let options = ["--with".into(), env::current_exe()?.into_os_string()];
        let machines = Machines::boot(&script, &options, Duration::from_secs(1500))?;
        Ok(Self { machines, jobs: 0 })
    }

    /// Starts a rank on each machine, and waits until pulses are under way. Returns their output, and the file on the
    /// first machine that stops them.
    pub fn start(&mut self, plan: impl Fn(Plan) -> Plan) -> Result<([Words; 2], PathBuf), Failed> {
        self.jobs += 1;
        let stop: PathBuf = format!("/tmp/stop{}", self.jobs).into();
        let program = env::current_exe()?;
        let name = program.file_name().ok_or("this program has no name")?.to_string_lossy().into_owned();
        let (mut words, mut id) = (Vec::new(), String::new());
        for rank in 0..2u32 {
            let machine = rank as usize;
            let plan = plan(Plan {
                rank,
                device: "rxe3".to_owned(),
                address: format!("10.8.0.{}", rank + 1),
                id: id.clone(),
                stop: stop.clone(),
                trigger: "/tmp/trigger".into(),
                ..Plan::new()
            });
            words.push(Words::new(self.machines.listen(machine, rank)));
            let variables: Vec<String> =
                plan.variables().iter().map(|(variable, value)| format!("{variable}='{value}'")).collect();
            // If the previous job failed, its processes remain.
            self.machines.tell(machine, "[ -z \"$rank\" ] || kill -9 $rank 2>/dev/null")?;
            self.machines.tell(machine, &format!("{} /bin/{name} & rank=$!", variables.join(" ")))?;
            if rank == 0 {
                id = words[0].hear("id", COMING)?.1;
            }
        }
        let words: [Words; 2] = words.try_into().map_err(|_| "expected two ranks")?;
        words.iter().try_for_each(|words| words.hear("going", COMING).map(drop))?;
        Ok((words, stop))
    }
}
