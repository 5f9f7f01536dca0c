// SPDX-License-Identifier: MIT OR Apache-2.0
//! Two virtual machines, joined by a virtual wire. A shell listens in each (`scripts/soft-roce.sh`).
//!
//! Numbers separate the output of the machines' programs: a line for a listener begins with [`MARK`] and the listener's
//! number.

use libtest_mimic::{Arguments, Failed, Trial};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Prefix of a line for a listener.
pub const MARK: &str = "@@ ";

/// Time limit for booting a machine.
const BOOTING: Duration = Duration::from_secs(300);

/// A line, and the time of its arrival.
type Line = (Instant, String);

/// The lines for a listener.
pub type Lines = Receiver<Line>;

/// Listeners, by number.
#[derive(Clone, Default)]
pub struct Listeners(Arc<Mutex<HashMap<u32, Sender<Line>>>>);

impl Listeners {
    /// Adds a listener, or replaces the one with this number.
    pub fn listen(&self, number: u32) -> Lines {
        let (to, from) = mpsc::channel();
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(number, to);
        from
    }

    /// Passes on lines for listeners, and prints the rest. At the end of the input all listeners end.
    pub fn follow(&self, output: impl Read + Send + 'static) {
        let listeners = self.0.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let line = line.trim_end();
                let marked = line.strip_prefix(MARK).and_then(|marked| {
                    let (number, text) = marked.split_once(' ').unwrap_or((marked, ""));
                    Some((number.parse::<u32>().ok()?, text.to_owned()))
                });
                let Some((number, text)) = marked else {
                    println!("{line}");
                    continue;
                };
                if let Some(listener) = listeners.lock().unwrap_or_else(PoisonError::into_inner).get(&number) {
                    // The listener may have been dropped.
                    let _ = listener.send((Instant::now(), text));
                }
            }
            listeners.lock().unwrap_or_else(PoisonError::into_inner).clear();
        });
    }
}

/// Sends an empty line every second, as long as another owner of the input exists. The emulated serial line may hold
/// output back until more arrives.
fn nudge(input: &Arc<Mutex<ChildStdin>>) {
    let input = Arc::downgrade(input);
    std::thread::spawn(move || {
        while let Some(input) = input.upgrade() {
            if writeln!(input.lock().unwrap_or_else(PoisonError::into_inner)).is_err() {
                break;
            }
            drop(input);
            std::thread::sleep(Duration::from_secs(1));
        }
    });
}

/// The machines `gin1` at 10.8.0.1 and `gin2` at 10.8.0.2, whose devices at the wire are named `rxe3`. They end when
/// this is dropped.
pub struct Machines {
    machines: Vec<(Child, Arc<Mutex<ChildStdin>>)>,
    listeners: Vec<Listeners>,
    // The folder of the wire's socket.
    _folder: tempfile::TempDir,
}

impl Machines {
    /// Boots the machines with further options of the script. Each may run for at most `limit`.
    ///
    /// # Errors
    /// Returns a description if a machine does not come up.
    pub fn boot<S: AsRef<OsStr>>(script: &Path, options: &[S], limit: Duration) -> Result<Self, String> {
        let text = |error: io::Error| format!("cannot start a virtual machine: {error}");
        let folder = tempfile::tempdir().map_err(text)?;
        let mut all = Self { machines: Vec::new(), listeners: Vec::new(), _folder: folder };
        for number in 1..=2 {
            let mut command = Command::new(script);
            command.args(["--input", "--no-facts", "--seconds", &limit.as_secs().to_string()]).args(options);
            command.args(["--host", &number.to_string()]).arg(all._folder.path().join("wire"));
            // Lines before a listener exists are lost, and a shell whose input is a terminal prints prompts.
            command.args(["--", "/bin/sh", "-c", &format!("echo '{MARK}0 up'; cat | /bin/sh")]);
            let mut machine = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(text)?;
            let (Some(input), Some(output)) = (machine.stdin.take(), machine.stdout.take()) else {
                return Err("a pipe is missing".to_owned());
            };
            let listeners = Listeners::default();
            let lines = listeners.listen(0);
            listeners.follow(output);
            let input = Arc::new(Mutex::new(input));
            all.machines.push((machine, input.clone()));
            all.listeners.push(listeners);
            // The second machine connects to a socket that the first creates.
            lines.recv_timeout(BOOTING).map_err(|_| format!("machine {number} did not come up"))?;
            nudge(&input);
        }
        Ok(all)
    }

    /// Runs a line in the shell of machine 0 or 1. Returns the time of the command.
    ///
    /// # Errors
    /// If the machine has ended.
    pub fn tell(&mut self, machine: usize, line: &str) -> io::Result<Instant> {
        let mut input = self.machines[machine].1.lock().unwrap_or_else(PoisonError::into_inner);
        writeln!(input, "{line}")?;
        input.flush()?;
        Ok(Instant::now())
    }

    /// Runs a line in both shells.
    ///
    /// # Errors
    /// As [`tell`](Self::tell).
    pub fn tell_both(&mut self, line: &str) -> io::Result<Instant> {
        self.tell(0, line)?;
        self.tell(1, line)
    }

    /// Returns later lines of a machine that have this number.
    pub fn listen(&self, machine: usize, number: u32) -> Lines {
        self.listeners[machine].listen(number)
    }

    /// Switches a machine off. Returns the time.
    ///
    /// # Errors
    /// Returns the system's error.
    #[allow(dead_code, reason = "not every test does")]
    pub fn power_off(&mut self, machine: usize) -> io::Result<Instant> {
        self.machines[machine].0.kill()?;
        Ok(Instant::now())
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        for (machine, _) in &mut self.machines {
            // The script ends its machine when it ends.
            let _ = machine.kill();
            let _ = machine.wait();
        }
    }
}

/// Name and body of a trial.
pub type OnHosts<T> = (&'static str, fn(&mut T) -> Result<(), Failed>);

/// Runs trials, one at a time, with the value that `boot` creates for the first trial and again after each failed one.
pub fn run_trials<T: Send + 'static>(
    arguments: &Arguments,
    boot: fn() -> Result<T, Failed>,
    trials: &[OnHosts<T>],
) -> ExitCode {
    let booted: Arc<Mutex<Option<T>>> = Arc::default();
    let trial = |&(name, body): &OnHosts<T>| {
        let booted = booted.clone();
        Trial::test(name, move || {
            let mut booted = booted.lock().unwrap_or_else(PoisonError::into_inner);
            let mut used = booted.take().map_or_else(boot, Ok)?;
            body(&mut used)?;
            *booted = Some(used);
            Ok(())
        })
    };
    libtest_mimic::run(arguments, trials.iter().map(trial).collect()).exit_code()
}
