// SPDX-License-Identifier: MIT OR Apache-2.0
//! A run as one rank of a job: the job from the launcher, and the options of each rank.

use super::args::Run;
use super::{Backend, End, Failure, LaunchArgs, Mode, Network, Options, Refused};
use gin_boot::Bootstrap;
use gin_boot::{Job, TcpConfig};
use rustix::process::{Pid, Signal, getpid, kill_process};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The job that this process is a rank of.
pub(crate) struct ThisJob {
    /// The bootstrap that connects the ranks.
    pub bootstrap: Arc<dyn Bootstrap>,
    /// The rank's number among the ranks of its host.
    pub local_rank: u32,
    /// Number of ranks of its host.
    pub local_ranks: u32,
}

impl ThisJob {
    /// Returns whether this rank prints results.
    pub(crate) fn prints(&self) -> bool {
        self.bootstrap.rank() == 0
    }

    /// Returns whether all ranks are on this rank's host.
    pub(crate) fn is_on_one_host(&self) -> bool {
        self.local_ranks == self.bootstrap.ranks()
    }
}

/// Returns the options for a job of `ranks` ranks. `given`: the arguments name the number of ranks.
///
/// # Errors
/// Refuses a different number of ranks, and options that ranks in separate processes do not support.
pub(crate) fn fit(options: &Options, ranks: u32, given: bool) -> Result<Options, Refused> {
    if given && options.ranks != ranks {
        let asked = options.ranks;
        return Err(Refused(format!(
            "--ranks {asked}: the job of this process has {ranks} ranks; leave the option out"
        )));
    }
    if options.mode == Some(Mode::Seeded) {
        return Err(Refused(
            "--mode seeded: the ranks of this job are processes, which cannot run in turns; leave the option out"
                .to_owned(),
        ));
    }
    if options.backend == Backend::Gdaki {
        let text = "--backend gdaki: the ranks of this job are processes, and software NICs serve one process only; leave the option out";
        return Err(Refused(text.to_owned()));
    }
    Ok(Options { ranks, ..options.clone() })
}

/// Resolves the network once the placement of the ranks is known: copies on one host, NICs between hosts.
///
/// # Errors
/// Refuses a network that does not connect hosts if the ranks are on several.
pub(crate) fn joined(options: Options, one_host: bool) -> Result<Options, Refused> {
    let network = match (options.network, one_host) {
        (Network::Auto, true) => Network::Peer,
        (Network::Auto, false) => Network::Verbs,
        (Network::Peer, false) => {
            let text = "--network peer: the ranks of this job are on several hosts, and this network connects ranks of one \
                        host only; leave the option out, or use --network verbs";
            return Err(Refused(text.to_owned()));
        }
        (network, _) => network,
    };
    Ok(Options { network, ..options })
}

/// Returns the options with virtual GPUs on threads, the only mode for ranks that are processes.
pub(crate) fn on_threads(options: &Options) -> Options {
    Options { mode: Some(Mode::Threads), ..options.clone() }
}

/// Joins the job if a launcher started this process as one of its ranks.
///
/// # Errors
/// Returns the error of the bootstrap.
pub(crate) fn join() -> Result<Option<ThisJob>, Failure> {
    let Some(job) = Job::from_env()? else { return Ok(None) };
    let bootstrap = job.bootstrap(TcpConfig::default())?;
    let (local_rank, local_ranks) = (bootstrap.local_rank(), bootstrap.local_ranks());
    Ok(Some(ThisJob { bootstrap: Arc::new(bootstrap), local_rank, local_ranks }))
}

/// Factor by which the launch that loses a rank has more iterations.
const LONGER: u64 = 10_000;
/// Time from the end of the preceding run on the lost rank until that rank is killed or stopped.
const LOSE_AFTER: Duration = Duration::from_millis(300);
/// Time limit for the remaining ranks to join again.
const REJOINING: Duration = Duration::from_secs(30);

/// The loss of one rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Loss {
    rank: u32,
    /// The rank is stopped and continues later; otherwise it is killed.
    stopped: bool,
}

impl Loss {
    /// Returns the loss that the options ask for.
    pub(crate) fn of(run: &Run) -> Option<Self> {
        let killed = run.kill_rank.map(|rank| Self { rank, stopped: false });
        killed.or(run.stop_rank.map(|rank| Self { rank, stopped: true }))
    }

    /// Refuses a rank that does not exist, and a job of one rank.
    fn check(self, ranks: u32) -> Result<(), Refused> {
        let Self { rank, stopped } = self;
        let option = if stopped { "--stop-rank" } else { "--kill-rank" };
        if rank >= ranks {
            return Err(Refused(format!("{option} {rank}: the job has ranks 0 to {}", ranks - 1)));
        }
        if ranks < 2 {
            return Err(Refused(format!("{option} {rank}: no rank would remain; use more --ranks")));
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
pub(crate) fn launch_with_loss(loss: Loss, ranks: u32) -> Result<End, Failure> {
    loss.check(ranks)?;
    let program = std::env::current_exe()?.into_os_string();
    let program = std::iter::once(program).chain(std::env::args_os().skip(1)).collect();
    crate::launch::run(&LaunchArgs { ranks, grace_ms: 10_000, may_lose: vec![loss.rank], program })
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

/// Runs as one rank of a job: one run with all ranks, one run that loses a rank and, if the job shrinks, one run with
/// the remaining ranks. A stopped rank continues after the others have joined again.
///
/// # Errors
/// Returns the error of the first or the last run. If the job does not shrink, returns an error that names the loss.
pub(crate) fn run_with_loss(
    (loss, shrink): (Loss, bool),
    options: &Options,
    job: &ThisJob,
    run: impl Fn(&Options, &ThisJob) -> Result<End, Failure>,
) -> Result<End, Failure> {
    loss.check(job.bootstrap.ranks())?;
    let Loss { rank: lost, stopped } = loss;
    let lost_how = if stopped { "stopped" } else { "killed" };
    let stopped = process_to_continue(loss, job)?;
    let first = run(options, job)?;
    if first != End::Right {
        return Ok(first);
    }
    if job.bootstrap.rank() == lost {
        loss.begin();
    }
    let longer = Options { iters: options.iters.saturating_mul(LONGER), repeats: 1, ..options.clone() };
    let begun = Instant::now();
    let error = match run(&longer, job) {
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
    if !shrink {
        go_on();
        return Err(format!("rank {lost} was {lost_how}; use --shrink to continue without it").into());
    }
    let bootstrap = job.bootstrap.without(&[lost], REJOINING)?;
    go_on();
    let before = |rank: u32| rank - u32::from(lost < rank);
    let (local_rank, local_ranks) = match job.is_on_one_host() {
        true => (before(job.local_rank), job.local_ranks - 1),
        false => (job.local_rank, job.local_ranks),
    };
    let left = ThisJob { bootstrap, local_rank, local_ranks };
    run(&Options { ranks: options.ranks - 1, ..options.clone() }, &left)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::default_options;

    #[test]
    fn the_job_says_how_many_ranks_there_are() {
        let options = default_options();
        assert_eq!(fit(&options, 7, false).unwrap().ranks, 7);
        assert_eq!(fit(&Options { ranks: 7, ..options.clone() }, 7, true).unwrap().ranks, 7);
        let Refused(text) = fit(&options, 7, true).unwrap_err();
        assert!(text.contains("--ranks 4") && text.contains("has 7"), "{text}");
    }

    #[test]
    fn what_processes_cannot_do_is_refused() {
        let seeded = Options { mode: Some(Mode::Seeded), ..default_options() };
        let gdaki = Options { backend: Backend::Gdaki, ..default_options() };
        for (options, word) in [(seeded, "--mode"), (gdaki, "--backend")] {
            let Refused(text) = fit(&options, 2, false).unwrap_err();
            assert!(text.starts_with(word) && text.contains("processes"), "{text}");
        }
        assert_eq!(on_threads(&fit(&default_options(), 2, false).unwrap()).mode, Some(Mode::Threads));
    }

    #[test]
    fn ranks_of_one_host_copy_and_those_of_several_take_their_nics() {
        let network = |network, one_host| {
            joined(Options { network, ..default_options() }, one_host).map(|options| options.network)
        };
        for (asked, one_host, taken) in [
            (Network::Auto, true, Network::Peer),
            (Network::Auto, false, Network::Verbs),
            (Network::Peer, true, Network::Peer),
            (Network::Verbs, true, Network::Verbs),
            (Network::Verbs, false, Network::Verbs),
        ] {
            assert_eq!(network(asked, one_host).unwrap(), taken, "{asked:?}, one host: {one_host}");
        }
        let Refused(text) = network(Network::Peer, false).unwrap_err();
        assert!(text.starts_with("--network peer") && text.contains("--network verbs"), "{text}");
    }
}
