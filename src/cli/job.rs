// SPDX-License-Identifier: MIT OR Apache-2.0
//! A run as one rank of a job: what its launcher says, and what options mean then.

use super::{Backend, End, Failure, LaunchArgs, Mode, Options, Refused};
use gin_host::boot::{Job, TcpConfig};
use gin_host::comm::Bootstrap;
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
    /// Whether this rank prints results.
    pub(crate) fn prints(&self) -> bool {
        self.bootstrap.rank() == 0
    }
}

/// What the options come to in a job of so many ranks. `given`: whether the number of ranks was named.
///
/// # Errors
/// What ranks in processes of their own cannot do.
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

/// The same once it is known where they run: virtual GPUs run on threads.
pub(crate) fn on_threads(options: &Options) -> Options {
    Options { mode: Some(Mode::Threads), ..options.clone() }
}

/// Meets the other ranks, if a launcher has started this process as one of several.
///
/// # Errors
/// What keeps them from meeting.
pub(crate) fn join() -> Result<Option<ThisJob>, Failure> {
    let Some(job) = Job::from_env()? else { return Ok(None) };
    let bootstrap = job.bootstrap(TcpConfig::default())?;
    let (local_rank, local_ranks) = (bootstrap.local_rank(), bootstrap.local_ranks());
    Ok(Some(ThisJob { bootstrap: Arc::new(bootstrap), local_rank, local_ranks }))
}

/// How much longer the launch is that a rank is killed in.
const LONGER: u64 = 10_000;
/// When it is killed, after the launch before has ended on its own rank.
const KILL_AFTER: Duration = Duration::from_millis(300);
/// How long those that are left may take to meet.
const MEETING: Duration = Duration::from_secs(30);

/// Runs this command again as the ranks of a job, of which one is to be killed.
///
/// # Errors
/// A rank that there is not; what keeps the ranks from being launched.
pub(crate) fn launch_with_loss(options: &Options) -> Result<End, Failure> {
    let (ranks, lost) = (options.ranks, options.kill_rank.unwrap_or(0));
    check_loss(lost, ranks)?;
    let program = std::env::current_exe()?.into_os_string();
    let program = std::iter::once(program).chain(std::env::args_os().skip(1)).collect();
    crate::launch::run(&LaunchArgs { ranks, grace_ms: 10_000, may_lose: vec![lost], program })
}

fn check_loss(lost: u32, ranks: u32) -> Result<(), Refused> {
    if lost >= ranks {
        return Err(Refused(format!("--kill-rank {lost}: there are ranks 0 to {}", ranks - 1)));
    }
    if ranks < 2 {
        return Err(Refused(format!("--kill-rank {lost}: nobody would be left; ask for more --ranks")));
    }
    Ok(())
}

/// Runs as one rank of a job: once with all ranks, once in which rank `lost` is killed, and, if it is to shrink, once with
/// those that are left.
///
/// # Errors
/// What `run` says of the first or the last run; what the others learn of the loss, if the job is not to go on.
pub(crate) fn run_with_loss(
    lost: u32,
    options: &Options,
    job: &ThisJob,
    run: impl Fn(&Options, &ThisJob) -> Result<End, Failure>,
) -> Result<End, Failure> {
    check_loss(lost, job.bootstrap.ranks())?;
    let first = run(options, job)?;
    if first != End::Right {
        return Ok(first);
    }
    if job.bootstrap.rank() == lost {
        std::thread::spawn(|| {
            std::thread::sleep(KILL_AFTER);
            // It does not return.
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        });
    }
    let longer = Options { iters: options.iters.saturating_mul(LONGER), repeats: 1, ..options.clone() };
    let begun = Instant::now();
    let error = match run(&longer, job) {
        Err(error) => error,
        Ok(_) => return Err("the run ended before the rank was killed: ask for more --iters or --bytes".into()),
    };
    let (rank, after) = (job.bootstrap.rank(), begun.elapsed().as_secs_f64());
    eprintln!("gin: rank {rank} learned after {after:.3} s: {error}");
    if !options.shrink {
        return Err(format!("rank {lost} was killed; --shrink goes on without it").into());
    }
    let bootstrap = job.bootstrap.without(&[lost], MEETING)?;
    let before = |rank: u32| rank - u32::from(lost < rank);
    let same_host = job.local_ranks == job.bootstrap.ranks();
    let (local_rank, local_ranks) = match same_host {
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
}
