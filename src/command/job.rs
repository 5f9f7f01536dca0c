// SPDX-License-Identifier: MIT OR Apache-2.0
//! A run as one rank of a job, and the loss of a rank on request.

use crate::cli::{End, Failure, LaunchArgs, Refused, Run, Verbosity};
use crate::workload::{Plans, Process};
use gin_boot::{Bootstrap, Job, TcpConfig};
use rustix::process::{Pid, Signal, getpid, kill_process};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The job that this process is a rank of.
pub struct ThisJob {
    /// The bootstrap that connects the ranks.
    pub bootstrap: Arc<dyn Bootstrap>,
    /// This process among the ranks.
    pub process: Process,
    /// It has joined in the place of a lost rank.
    pub is_new: bool,
}

impl ThisJob {
    /// Returns whether this rank prints results.
    pub fn prints(&self) -> bool {
        self.bootstrap.rank() == 0
    }
}

/// Joins the job if a launcher started this process as one of its ranks.
///
/// # Errors
/// Refuses invalid variables; returns the error of the bootstrap.
pub fn join() -> Result<Option<ThisJob>, Failure> {
    let Some(job) = Job::from_env().map_err(|error| Refused(error.to_string()))? else { return Ok(None) };
    let bootstrap = job.bootstrap(TcpConfig::default())?;
    let process =
        Process { ranks: bootstrap.ranks(), local_rank: bootstrap.local_rank(), local_ranks: bootstrap.local_ranks() };
    Ok(Some(ThisJob { bootstrap: Arc::new(bootstrap), process, is_new: job.is_running() }))
}

/// Factor by which the launch that loses a rank has more iterations.
const LONGER: u64 = 10_000;
/// Time from the end of the preceding run on the lost rank until that rank is killed or stopped.
const LOSE_AFTER: Duration = Duration::from_millis(300);
/// Time limit for the remaining ranks to join again.
const REJOINING: Duration = Duration::from_secs(30);

/// The loss of one rank, and how the job goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Loss {
    rank: u32,
    /// The rank is stopped and continues later; otherwise it is killed.
    stopped: bool,
    shrink: bool,
    /// A new process takes the place of the rank.
    replace: bool,
}

impl Loss {
    /// Returns the loss that the options ask for.
    pub(crate) fn of(run: &Run) -> Option<Self> {
        let &Run { shrink, replace, .. } = run;
        let rank = run.kill_rank.or(run.stop_rank)?;
        Some(Self { rank, stopped: run.stop_rank.is_some(), shrink, replace })
    }

    /// Refuses a rank that does not exist, and a job of one rank.
    fn check(self, ranks: u32) -> Result<(), Refused> {
        let Self { rank, stopped, replace, .. } = self;
        let option = if stopped { "--stop-rank" } else { "--kill-rank" };
        if rank >= ranks {
            return Err(Refused(format!("{option} {rank}: the job has ranks 0 to {}", ranks - 1)));
        }
        if ranks < 2 {
            return Err(Refused(format!("{option} {rank}: no rank would remain; use more --ranks")));
        }
        if replace && rank == 0 {
            let text =
                "--kill-rank 0 --replace: a new process finds the job at the address of rank 0; kill another rank";
            return Err(Refused(text.to_owned()));
        }
        Ok(())
    }

    /// Starts a thread that kills or stops this process after [`LOSE_AFTER`].
    fn begin(self) {
        let signal = if self.stopped { Signal::STOP } else { Signal::KILL };
        std::thread::spawn(move || {
            std::thread::sleep(LOSE_AFTER);
            // SIGKILL does not return.
            let _ = kill_process(getpid(), signal);
        });
    }
}

/// Launches this command again as the ranks of a job that will lose one rank.
///
/// # Errors
/// Refuses a rank that does not exist; returns the error of the launch.
pub(crate) fn launch_with_loss(loss: Loss, ranks: u32, verbosity: Verbosity) -> Result<End, Failure> {
    loss.check(ranks)?;
    let program = std::env::current_exe()?.into_os_string();
    let program = std::iter::once(program).chain(std::env::args_os().skip(1)).collect();
    let (may_lose, replace) = (vec![loss.rank], loss.replace);
    crate::launch::run(&LaunchArgs { ranks, grace_ms: 10_000, may_lose, replace, verbosity, program })
}

/// Returns the stopped process if this process must continue it. The first other rank of its host does so; all other
/// ranks get `None`. Collective.
///
/// # Errors
/// Refuses the loss if no other rank is on the host of the stopped rank; returns the error of the bootstrap.
fn process_to_continue(loss: Loss, job: &ThisJob) -> Result<Option<Pid>, Failure> {
    let (all, own) = (&job.bootstrap, job.bootstrap.rank());
    let pids = all.all_gather(&getpid().as_raw_nonzero().get().to_le_bytes())?;
    if !loss.stopped {
        return Ok(None);
    }
    let host = all.host(loss.rank);
    let Some(first) = (0..all.ranks()).find(|&rank| rank != loss.rank && all.host(rank) == host) else {
        let rank = loss.rank;
        return Err(Refused(format!("--stop-rank {rank}: no other rank on its host could continue it")).into());
    };
    let pid =
        pids[loss.rank as usize].as_slice().try_into().ok().and_then(|pid| Pid::from_raw(i32::from_le_bytes(pid)));
    Ok(pid.filter(|_| own == first))
}

/// Runs as one rank of a job: one run with all ranks, one run that loses a rank and, if the job shrinks or the rank is
/// replaced, one run with the ranks of the next job. A stopped rank continues after the others have joined again.
///
/// # Errors
/// Returns the error of the first or the last run. If the job does not go on, returns an error that names the loss.
pub(crate) fn run_with_loss(
    loss: Loss,
    plans: &Plans,
    job: &ThisJob,
    run: impl Fn(&Plans, &ThisJob) -> Result<End, Failure>,
) -> Result<End, Failure> {
    loss.check(job.bootstrap.ranks())?;
    if job.is_new {
        return run(plans, job);
    }
    let Loss { rank: lost, stopped, shrink, replace } = loss;
    let lost_how = if stopped { "stopped" } else { "killed" };
    let stopped = process_to_continue(loss, job)?;
    let first = run(plans, job)?;
    if first != End::Right {
        return Ok(first);
    }
    if job.bootstrap.rank() == lost {
        loss.begin();
    }
    let begun = Instant::now();
    let error = match run(&plans.clone().longer(LONGER), job) {
        Err(error) => error,
        Ok(_) => {
            let text = format!("the run ended before rank {lost} was {lost_how}; use more --iters or --bytes");
            return Err(text.into());
        }
    };
    let (rank, after) = (job.bootstrap.rank(), begun.elapsed().as_secs_f64());
    eprintln!("gin: rank {rank} learned after {after:.3} s: {error}");
    let go_on = || {
        if let Some(pid) = stopped {
            // The process identifier is still valid: the process was only stopped, so nobody has reaped it.
            let _ = kill_process(pid, Signal::CONT);
        }
    };
    if replace {
        let (bootstrap, process) = (job.bootstrap.grow(&[lost], REJOINING)?, job.process);
        return run(plans, &ThisJob { bootstrap, process, is_new: false });
    }
    if !shrink {
        go_on();
        return Err(format!("rank {lost} was {lost_how}; use --shrink to continue without it").into());
    }
    let bootstrap = job.bootstrap.without(&[lost], REJOINING)?;
    go_on();
    let Process { ranks, local_rank, local_ranks } = job.process;
    let (local_rank, local_ranks) = match local_ranks == ranks {
        true => (local_rank - u32::from(lost < local_rank), local_ranks - 1),
        false => (local_rank, local_ranks),
    };
    let process = Process { ranks: ranks - 1, local_rank, local_ranks };
    run(&plans.clone().of_process(process), &ThisJob { bootstrap, process, is_new: false })
}
