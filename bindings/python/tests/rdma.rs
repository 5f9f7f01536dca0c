// SPDX-License-Identifier: MIT OR Apache-2.0

//! The Python package as a job of two hosts, whose communicators take RDMA NICs: Python runs in two virtual machines
//! with Linux's Soft-RoCE (`scripts/soft-roce.sh`). Only if `GIN_RDMA_HOSTS` is set, because the machines take a while
//! to boot.

mod common;
#[path = "../../../gin-host/tests/common/machines.rs"]
mod machines;

use common::{HERE, environment, package, run, target};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use machines::{MARK, Machines, run_trials};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

/// Time limit of a job. A job that does not hang takes far less.
const LIMIT: Duration = Duration::from_secs(180);

/// The parts of the standard library that no rank imports.
const LEFT_OUT: [&str; 9] = [
    "site-packages",
    "dist-packages",
    "test",
    "idlelib",
    "tkinter",
    "turtledemo",
    "lib2to3",
    "ensurepip",
    "__pycache__",
];

type Body = fn(&mut Hosts) -> Result<(), Failed>;

const TRIALS: &[(&str, Body)] = &[
    ("hosts/numpy_arrays_travel_over_nics_and_an_abort_ends_a_wait", put_and_abort),
    ("hosts/a_rank_without_a_device_says_so_and_the_other_does_not_wait", no_device),
];

/// Two machines, each with one RDMA device and Python.
struct Hosts {
    machines: Machines,
    /// The command that runs a rank.
    python: String,
    jobs: u16,
}

/// Returns the entries of a folder.
fn entries(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let read = std::fs::read_dir(folder).map_err(|error| format!("cannot read {}: {error}", folder.display()))?;
    Ok(read.flatten().map(|entry| entry.path()).collect())
}

/// Adds the shared objects below a folder to `all`.
fn shared_objects(folder: &Path, all: &mut Vec<PathBuf>) -> Result<(), String> {
    for path in entries(folder)? {
        if path.is_dir() {
            shared_objects(&path, all)?;
        } else if path.extension().is_some_and(|end| end == "so") {
            all.push(path);
        }
    }
    Ok(())
}

impl Hosts {
    fn boot() -> Result<Self, Failed> {
        let target = target();
        let (venv_python, package) = (environment(&target, false)?, package(&target)?);
        let code = "import os, sys, sysconfig, numpy; print(os.path.realpath(sys.executable), sys.base_prefix, \
                    sysconfig.get_path('stdlib'), os.path.dirname(numpy.__path__[0]), sep='\\n')";
        let said = run(Command::new(venv_python).args(["-c", code]))?;
        let said = String::from_utf8(said.stdout)?;
        let [python, home, library, site] = said.lines().collect::<Vec<_>>()[..] else {
            return Err(format!("Python said {said:?}").into());
        };

        // Files keep their paths. Programs and shared objects bring the libraries that they need.
        let mut files = vec![Path::new(HERE).join("tests/rdma_rank.py")];
        let left_out = |path: &PathBuf| {
            path.file_name().is_some_and(|name| LEFT_OUT.iter().any(|left_out| *left_out == name))
                || path.to_string_lossy().contains("/config-")
        };
        files.extend(entries(Path::new(library))?.into_iter().filter(|path| !left_out(path)));
        files.extend(entries(Path::new(site))?.into_iter().filter(|path| {
            // Also the libraries that came with it.
            path.file_name().is_some_and(|name| name == "numpy" || name == "numpy.libs")
        }));
        let inner = package.join("gincomm");
        let is_python = |path: &PathBuf| path.extension().is_some_and(|end| end == "py");
        files.extend(entries(&inner)?.into_iter().filter(is_python));
        let mut programs = vec![PathBuf::from(python), inner.join("_gin.abi3.so")];
        shared_objects(&Path::new(library).join("lib-dynload"), &mut programs)?;
        shared_objects(&Path::new(site).join("numpy"), &mut programs)?;
        let named = |option: &'static str, paths: Vec<PathBuf>| {
            paths.into_iter().flat_map(move |path| [option.into(), path.into_os_string()])
        };
        let options: Vec<_> = named("--file", files).chain(named("--with", programs)).collect();

        let script = Path::new(HERE).join("../../scripts/soft-roce.sh");
        let mut machines = Machines::boot(&script, &options, Duration::from_secs(1500))?;
        // Leaves one device, as on a host with one NIC.
        machines.tell_both("for device in rxe0 rxe1 rxe2; do rdma link delete $device; done")?;
        machines.tell_both("umask 077; echo 0123456789abcdef0123456789abcdef > /secret")?;
        machines.tell_both(&format!("ln -s /bin/_gin.abi3.so {}/_gin.abi3.so", inner.display()))?;
        let name = Path::new(python).file_name().unwrap_or_default().to_string_lossy();
        let python = format!(
            "PYTHONHOME={home} PYTHONPATH={}:{site} OPENBLAS_NUM_THREADS=1 /bin/{name} {HERE}/tests/rdma_rank.py",
            package.display()
        );
        Ok(Self { machines, python, jobs: 0 })
    }

    /// Runs a rank on each machine, and returns the lines that each printed.
    fn run(&mut self) -> Result<[Vec<String>; 2], Failed> {
        self.jobs += 1;
        let (port, python) = (4242 + self.jobs, self.python.clone());
        let lines = [0, 1].map(|rank| self.machines.listen(rank, rank as u32));
        for rank in 0..2 {
            let variables =
                format!("GIN_RANK={rank} GIN_RANKS=2 GIN_ADDR=10.8.0.1 GIN_PORT={port} GIN_SECRET_FILE=/secret");
            let marked = format!("sed 's/^/{MARK}{rank} out /'; echo '{MARK}{rank} end'");
            self.machines.tell(rank, &format!("({variables} {python} 2>&1 | {marked}) &"))?;
        }
        let (mut said, until) = ([Vec::new(), Vec::new()], Instant::now() + LIMIT);
        for (rank, lines) in lines.iter().enumerate() {
            loop {
                let left = until.saturating_duration_since(Instant::now());
                let (_, line) = lines.recv_timeout(left).map_err(|_| format!("rank {rank} has not ended: {said:?}"))?;
                match line.strip_prefix("out ") {
                    Some(text) => said[rank].push(text.to_owned()),
                    None => break,
                }
            }
        }
        Ok(said)
    }
}

fn put_and_abort(hosts: &mut Hosts) -> Result<(), Failed> {
    let expected = ["recv True", "send True", "fault Aborted 1 back end proxy over verbs"];
    match hosts.run()? {
        ranks if ranks.iter().all(|lines| lines == &expected) => Ok(()),
        ranks => Err(format!("expected {expected:?}, found {ranks:?}").into()),
    }
}

fn no_device(hosts: &mut Hosts) -> Result<(), Failed> {
    hosts.machines.tell(1, "rdma link delete rxe3")?;
    let [first, second] = hosts.run()?;
    hosts.machines.tell(1, "rdma link add rxe3 type rxe netdev eth0")?;
    let has = |lines: &[String], words: &str| lines.iter().any(|line| line.contains(words));
    let right =
        has(&second, "gincomm.Error: network \"verbs\": ") && has(&second, "RDMA device") && has(&first, "rank 1");
    if right { Ok(()) } else { Err(format!("{first:?}\n{second:?}").into()) }
}

fn main() -> ExitCode {
    let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
    if std::env::var_os("GIN_RDMA_HOSTS").is_none() {
        let ignored = || Ok(Completion::ignored_with("GIN_RDMA_HOSTS is not set"));
        return libtest_mimic::run(&arguments, vec![Trial::ignorable_test("rdma", ignored)]).exit_code();
    }
    run_trials(&arguments, Hosts::boot, TRIALS)
}
