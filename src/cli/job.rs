// SPDX-License-Identifier: MIT OR Apache-2.0
//! A run as one rank of a job: what its launcher says, and what options mean then.

use super::{Backend, Failure, Mode, Options, Refused};
use gin_host::boot::{Job, TcpConfig};
use gin_host::comm::Bootstrap;
use std::sync::Arc;

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
