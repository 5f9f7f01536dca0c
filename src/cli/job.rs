// SPDX-License-Identifier: MIT OR Apache-2.0
//! A run as one rank of a job: what its launcher says, and what options mean then.

use super::args::Run;
use super::{Backend, End, Failure, LaunchArgs, Mode, Network, Options, Refused};
use gin_boot::Bootstrap;
use gin_boot::{Job, TcpConfig};
use rustix::process::{Pid, Signal, getpid, kill_process};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The job that this process is a rank of.
pub(crate) struct ThisJob {
    /// The way to the other ranks.
    pub bootstrap: Arc<dyn Bootstrap>,
    /// The rank's number among those of its host.
    pub local_rank: u32,
    /// Ranks of its host.
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

/// Returns the options in a job of `ranks` ranks. `given`: the number of ranks was named.
///
/// # Errors
/// Options that ranks in processes of their own do not have.
pub(crate) fn fit(options: &Options, ranks: u32, given: bool) -> Result<Options, Refused> {
    if given && options.ranks != ranks {
        let asked = options.ranks;
        return Err(Refused(format!(
            "--ranks {asked}: the job that this process is part of has {ranks}; leave it out"
        )));
    }
    if options.mode == Some(Mode::Seeded) {
        return Err(Refused(
            "--mode seeded: ranks are processes here, which cannot take turns; leave it out".to_owned(),
        ));
    }
    if options.backend == Backend::Gdaki {
        let text = "--backend gdaki: ranks are processes here, and software NICs serve one process only; leave it out";
        return Err(Refused(text.to_owned()));
    }
    Ok(Options { ranks, ..options.clone() })
}

/// The same once it is known whether their ranks are on one host: NICs join hosts.
///
/// # Errors
/// A network that does not reach from host to host.
pub(crate) fn joined(options: Options, one_host: bool) -> Result<Options, Refused> {
    let network = match (options.network, one_host) {
        (Network::Auto, true) => Network::Peer,
        (Network::Auto, false) => Network::Verbs,
        (Network::Peer, false) => {
            let text = "--network peer: the ranks of this job are on several hosts, and it reaches those of one only; \
                        leave it out, or take --network verbs";
            return Err(Refused(text.to_owned()));
        }
        (network, _) => network,
    };
    Ok(Options { network, ..options })
}

/// The same once it is known what they run on: virtual GPUs run on threads.
pub(crate) fn on_threads(options: &Options) -> Options {
    Options { mode: Some(Mode::Threads), ..options.clone() }
}

/// Meets the other ranks, if a launcher has started this process as one of several.
///
/// # Errors
/// The error of the bootstrap.
pub(crate) fn join() -> Result<Option<ThisJob>, Failure> {
    let Some(job) = Job::from_env()? else { return Ok(None) };
    let bootstrap = job.bootstrap(TcpConfig::default())?;
    let (local_rank, local_ranks) = (bootstrap.local_rank(), bootstrap.local_ranks());
    Ok(Some(ThisJob { bootstrap: Arc::new(bootstrap), local_rank, local_ranks }))
}

/// How much longer the launch is that a rank is lost in.
const LONGER: u64 = 10_000;
/// When it is killed or stopped, after the launch before has ended on its own rank.
const LOSE_AFTER: Duration = Duration::from_millis(300);
/// How long the remaining ranks may take to join again.
const REJOINING: Duration = Duration::from_secs(30);

/// The loss of one rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Loss {
    rank: u32,
    /// It is stopped, and continues later; else it is killed.
    stopped: bool,
}

impl Loss {
    /// Returns the loss that the options ask for.
    pub(crate) fn of(run: &Run) -> Option<Self> {
        let killed = run.kill_rank.map(|rank| Self { rank, stopped: false });
        killed.or(run.stop_rank.map(|rank| Self { rank, stopped: true }))
    }

    /// Refuses a rank that there is not.
    fn check(self, ranks: u32) -> Result<(), Refused> {
        let Self { rank, stopped } = self;
        let option = if stopped { "--stop-rank" } else { "--kill-rank" };
        if rank >= ranks {
            return Err(Refused(format!("{option} {rank}: there are ranks 0 to {}", ranks - 1)));
        }
        if ranks < 2 {
            return Err(Refused(format!("{option} {rank}: nobody would be left; ask for more --ranks")));
        }
        Ok(())
    }

    /// Has it happen to this process soon.
    fn begin(self) {
        let signal = if self.stopped { Signal::STOP } else { Signal::KILL };
        std::thread::spawn(move || {
            std::thread::sleep(LOSE_AFTER);
            // One that kills does not return.
            let _ = kill_process(getpid(), signal);
        });
    }
}

/// Runs this command again as the ranks of a job, of which one will be lost.
///
/// # Errors
/// A rank that there is not; what keeps the ranks from being launched.
pub(crate) fn launch_with_loss(loss: Loss, ranks: u32) -> Result<End, Failure> {
    loss.check(ranks)?;
    let program = std::env::current_exe()?.into_os_string();
    let program = std::iter::once(program).chain(std::env::args_os().skip(1)).collect();
    crate::launch::run(&LaunchArgs { ranks, grace_ms: 10_000, may_lose: vec![loss.rank], program })
}

/// The process that this one is to continue, once it is stopped: the first other rank of its host does that. `None` on
/// all others. Collective.
///
/// # Errors
/// No other rank is on its host; the ranks cannot meet.
fn to_continue(loss: Loss, job: &ThisJob) -> Result<Option<Pid>, Failure> {
    let (all, own) = (&job.bootstrap, job.bootstrap.rank());
    let pids = all.all_gather(&getpid().as_raw_nonzero().get().to_le_bytes())?;
    if !loss.stopped {
        return Ok(None);
    }
    let host = all.host(loss.rank);
    let Some(first) = (0..all.ranks()).find(|&rank| rank != loss.rank && all.host(rank) == host) else {
        let rank = loss.rank;
        return Err(
            Refused(format!("--stop-rank {rank}: no other rank is on its host, which would continue it")).into()
        );
    };
    let pid =
        pids[loss.rank as usize].as_slice().try_into().ok().and_then(|pid| Pid::from_raw(i32::from_le_bytes(pid)));
    Ok(pid.filter(|_| own == first))
}

/// Runs as one rank of a job: once with all ranks, once in which one is lost, and, if the job shrinks, once with the
/// remaining ranks. A stopped rank continues when the others have joined again.
///
/// # Errors
/// The result of `run` in the first or the last run; the others' news of the loss, if the job does not go on.
pub(crate) fn run_with_loss(
    (loss, shrink): (Loss, bool),
    options: &Options,
    job: &ThisJob,
    run: impl Fn(&Options, &ThisJob) -> Result<End, Failure>,
) -> Result<End, Failure> {
    loss.check(job.bootstrap.ranks())?;
    let Loss { rank: lost, stopped } = loss;
    let lost_how = if stopped { "stopped" } else { "killed" };
    let stopped = to_continue(loss, job)?;
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
            let text = format!("the run ended before the rank was {lost_how}: ask for more --iters or --bytes");
            return Err(text.into());
        }
    };
    let (rank, after) = (job.bootstrap.rank(), begun.elapsed().as_secs_f64());
    eprintln!("gin: rank {rank} learned after {after:.3} s: {error}");
    let go_on = || {
        if let Some(pid) = stopped {
            // It is there: it has not been waited for, as it was only stopped.
            let _ = kill_process(pid, Signal::CONT);
        }
    };
    if !shrink {
        go_on();
        return Err(format!("rank {lost} was {lost_how}; --shrink goes on without it").into());
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
