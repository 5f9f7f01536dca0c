// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs trials on several sets of GPUs at a time, each set in its own process.
//!
//! Trials of one process share its kernels, its watchdog and the driver's locks, so this process runs one at a time, on
//! the first GPUs. It sends the names of others to workers: processes of the same program that see other GPUs only.

use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use libtest_mimic::{Completion, Failed};

/// Set in a worker.
const WORKER: &str = "GIN_GPU_WORKER";

/// Starts a line of a worker that is a result: `pass`, `fail TEXT` or `skip TEXT`. Other lines are output of trials.
const RESULT: &str = "gin-gpu-result ";

/// A worker, used by one trial at a time.
type SharedWorker = Arc<Mutex<Worker>>;

/// The GPUs on which trials run now, and the workers.
#[derive(Debug)]
pub struct Places {
    busy: Mutex<Vec<bool>>,
    freed: Condvar,
    /// By the number of GPUs, and the first of them.
    workers: Mutex<HashMap<(usize, usize), SharedWorker>>,
    command: fn() -> io::Result<Command>,
}

impl Places {
    /// For trials on `gpus` GPUs at a time.
    #[must_use]
    pub fn new(gpus: usize) -> Self {
        let command = || std::env::current_exe().map(Command::new);
        Self { busy: Mutex::new(vec![false; gpus]), freed: Condvar::new(), workers: Mutex::default(), command }
    }

    /// Waits for `count` unused GPUs. Runs a trial on them: `here` if they are the first ones, else `elsewhere` with
    /// the worker that sees only them.
    ///
    /// # Errors
    /// The trial's failure, or why there is no worker.
    pub fn run(
        &self,
        count: usize,
        here: impl FnOnce() -> Result<Completion, Failed>,
        elsewhere: impl FnOnce(&mut Worker) -> Result<Completion, Failed>,
    ) -> Result<Completion, Failed> {
        let place = self.take(count);
        if place.first == 0 {
            return here();
        }
        let worker = self.worker(count, place.first).map_err(|error| format!("cannot start a worker: {error}"))?;
        elsewhere(&mut lock(&worker))
    }

    fn take(&self, count: usize) -> Place<'_> {
        let mut busy = lock(&self.busy);
        loop {
            let free = busy.chunks_exact(count).position(|set| !set.contains(&true));
            if let Some(set) = free {
                busy[set * count..][..count].fill(true);
                return Place { places: self, first: set * count, count };
            }
            busy = self.freed.wait(busy).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn worker(&self, count: usize, first: usize) -> io::Result<SharedWorker> {
        let mut workers = lock(&self.workers);
        if let Some(worker) = workers.get(&(count, first)) {
            return Ok(worker.clone());
        }
        let shown = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        let mut command = (self.command)()?;
        command.env("CUDA_VISIBLE_DEVICES", visible(shown.as_deref(), first, count));
        let worker = Arc::new(Mutex::new(Worker::start(command)?));
        workers.insert((count, first), worker.clone());
        Ok(worker)
    }
}

/// Returns the value of `CUDA_VISIBLE_DEVICES` for `count` of the GPUs that this process sees.
fn visible(shown: Option<&str>, first: usize, count: usize) -> String {
    let range = first..first + count;
    let gpus: Vec<String> = match shown {
        Some(shown) => shown.split(',').skip(first).take(count).map(|gpu| gpu.trim().to_owned()).collect(),
        None => range.map(|gpu| gpu.to_string()).collect(),
    };
    gpus.join(",")
}

/// GPUs that a trial uses.
#[derive(Debug)]
struct Place<'p> {
    places: &'p Places,
    first: usize,
    count: usize,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        lock(&self.places.busy)[self.first..][..self.count].fill(false);
        self.places.freed.notify_all();
    }
}

/// A process that runs the trials whose names it reads.
#[derive(Debug)]
pub struct Worker {
    process: Child,
    names: ChildStdin,
    lines: BufReader<ChildStdout>,
}

impl Worker {
    fn start(mut command: Command) -> io::Result<Self> {
        command.env(WORKER, "1").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn()?;
        let names = process.stdin.take().expect("it is a pipe");
        let lines = BufReader::new(process.stdout.take().expect("it is a pipe"));
        Ok(Self { process, names, lines })
    }

    /// Runs a trial there.
    ///
    /// # Errors
    /// Its failure. `Err(None)` if the worker has ended.
    pub fn ask(&mut self, name: &str) -> Result<Completion, Option<String>> {
        writeln!(self.names, "{name}").and_then(|()| self.names.flush()).map_err(|_| None)?;
        loop {
            let mut line = String::new();
            if self.lines.read_line(&mut line).map_err(|_| None)? == 0 {
                return Err(None);
            }
            let Some((before, result)) = line.trim_end().split_once(RESULT) else {
                print!("{line}");
                continue;
            };
            // A trial's last line may lack its end.
            print!("{before}");
            let (what, text) = result.split_once(' ').unwrap_or((result, ""));
            let text = text.replace("\\n", "\n");
            return match what {
                "pass" => Ok(Completion::Completed),
                "skip" => Ok(Completion::ignored_with(text)),
                _ => Err(Some(text)),
            };
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns whether this process is a worker.
#[must_use]
pub fn is_worker() -> bool {
    std::env::var_os(WORKER).is_some()
}

/// Serves as a worker until its input ends: runs each trial that it reads the name of.
pub fn serve(mut trial: impl FnMut(&str) -> Result<Completion, Failed>) {
    for name in io::stdin().lines().map_while(Result::ok) {
        let body = std::panic::AssertUnwindSafe(|| trial(&name));
        let result = match std::panic::catch_unwind(body) {
            Ok(Ok(Completion::Completed)) => "pass".to_owned(),
            Ok(Ok(Completion::Ignored { reason })) => format!("skip {}", reason.unwrap_or_default()),
            Ok(Err(failure)) => format!("fail {}", failure.message().unwrap_or("it failed")),
            Err(_) => "fail it panicked; the text stands above".to_owned(),
        };
        println!("{RESULT}{}", result.replace('\n', "\\n"));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    const STAND_IN: &str = r#"while read name; do case $name in
        good) echo "seen $CUDA_VISIBLE_DEVICES"; printf 'no end'; echo "gin-gpu-result pass";;
        bad) printf 'gin-gpu-result fail two\\nlines\n';;
        missing) echo "gin-gpu-result skip no tool";;
        *) exit 3;; esac; done"#;

    fn places(gpus: usize) -> Places {
        let command = || {
            let mut command = Command::new("sh");
            command.args(["-c", STAND_IN]);
            Ok(command)
        };
        Places { command, ..Places::new(gpus) }
    }

    #[test]
    fn gpus_run_one_trial_at_a_time_and_trials_on_several_wait_for_all() {
        let places = places(2);
        let (first, second) = (places.take(1), places.take(1));
        assert_eq!((first.first, second.first), (0, 1));
        let (sender, receiver) = channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let both = places.take(2);
                sender.send(both.first).unwrap();
            });
            assert!(receiver.recv_timeout(Duration::from_millis(50)).is_err());
            drop(first);
            assert!(receiver.recv_timeout(Duration::from_millis(50)).is_err());
            drop(second);
            assert_eq!(receiver.recv().unwrap(), 0);
        });
    }

    #[test]
    fn results_of_a_worker_are_those_of_its_trials_and_its_end_is_noticed() {
        let places = places(2);
        let here = || Ok(Completion::Completed);
        let taken = places.take(1);
        let said = |completion| match completion {
            Completion::Completed => None,
            Completion::Ignored { reason } => reason,
        };
        let ask = |name: &str| {
            let mut answer = None;
            let _ = places.run(
                1,
                || unreachable!("the first GPU is taken"),
                |worker| {
                    answer = Some(worker.ask(name).map(said));
                    here()
                },
            );
            answer.unwrap()
        };
        assert_eq!(ask("good"), Ok(None));
        assert_eq!(ask("bad"), Err(Some("two\nlines".to_owned())));
        assert_eq!(ask("missing"), Ok(Some("no tool".to_owned())));
        assert_eq!(ask("ended"), Err(None));
        assert_eq!(ask("after"), Err(None));
        drop(taken);
        assert!(places.run(1, here, |_| unreachable!("the first GPU is free")).is_ok());
    }

    #[test]
    fn a_worker_sees_its_gpus_only() {
        assert_eq!(visible(None, 2, 2), "2,3");
        assert_eq!(visible(Some("4, GPU-a,6"), 1, 2), "GPU-a,6");
    }
}
