// SPDX-License-Identifier: MIT OR Apache-2.0
//! Progress of long runs on standard error: a bar on a terminal, lines with `-v`.

use crate::cli::{Verbosity, time};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{self, IsTerminal};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Shorter runs show no progress.
const AFTER: Duration = Duration::from_secs(2);
/// Time between two looks at a bar, and two lines.
const LOOK: Duration = Duration::from_millis(250);
const LINE: Duration = Duration::from_secs(5);

/// Steps of a bar.
const STEPS: u64 = 1000;

/// The present part of a run.
#[derive(Debug, Default)]
struct State {
    name: String,
    ended: bool,
    /// Present from the time when it is first drawn.
    bar: Option<ProgressBar>,
}

/// The display of a run's progress, by a thread of its own. Ends when dropped.
pub(crate) struct Progress {
    shared: Arc<(Mutex<State>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Progress {
    /// Shows the progress of `total` units of work if this command should; `done` returns the number of finished ones.
    ///
    /// # Errors
    /// Returns the system's error if it refuses a thread.
    pub(crate) fn start(
        verbosity: Verbosity,
        (total, unit): (u64, &'static str),
        done: impl Fn() -> f64 + Send + 'static,
    ) -> io::Result<Self> {
        let shared = Arc::new((Mutex::default(), Condvar::new()));
        let is_bar = io::stderr().is_terminal();
        let thread = match !verbosity.quiet && (is_bar || verbosity.verbose > 0) {
            true => {
                let shared = shared.clone();
                let thread = std::thread::Builder::new().name("gin-progress".to_owned());
                Some(thread.spawn(move || show(&shared, is_bar, &|begun| text(begun, done(), total, unit)))?)
            }
            false => None,
        };
        Ok(Self { shared, thread })
    }

    /// Runs `print`, which writes lines to the terminal, while no bar is there.
    pub(crate) fn beside<T>(&self, print: impl FnOnce() -> T) -> T {
        let bar = lock(&self.shared.0).bar.clone();
        match bar {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }

    /// Names the present part of the work.
    pub(crate) fn name(&self, name: String) {
        lock(&self.shared.0).name = name;
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        lock(&self.shared.0).ended = true;
        self.shared.1.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic of that thread ends the display alone.
            let _ = thread.join();
        }
    }
}

/// Shows the progress until the run has ended.
fn show(shared: &(Mutex<State>, Condvar), is_bar: bool, text: &dyn Fn(Instant) -> (f64, String)) {
    let (begun, mut state) = (Instant::now(), lock(&shared.0));
    let mut next = AFTER;
    loop {
        while !state.ended && begun.elapsed() < next {
            let rest = next.saturating_sub(begun.elapsed());
            state = shared.1.wait_timeout(state, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
        if state.ended {
            break;
        }
        let name = state.name.clone();
        // The run may need the lock meanwhile.
        drop(state);
        let (part, text) = text(begun);
        if is_bar {
            let bar = lock(&shared.0).bar.get_or_insert_with(bar).clone();
            bar.set_message(format!("{name}: {text}"));
            bar.set_position((part * STEPS as f64) as u64);
        } else {
            eprintln!("gin: {name}: {text}");
        }
        next = begun.elapsed() + if is_bar { LOOK } else { LINE };
        state = lock(&shared.0);
    }
    if let Some(bar) = state.bar.take() {
        drop(state);
        bar.finish_and_clear();
    }
}

/// Makes a bar, in the columns that the words leave. It is of ASCII in a locale without UTF-8.
fn bar() -> ProgressBar {
    let locale = ["LC_ALL", "LC_CTYPE", "LANG"].map(|name| std::env::var(name).unwrap_or_default());
    let style = ProgressStyle::with_template("{msg} [{wide_bar}]").unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::with_draw_target(Some(STEPS), ProgressDrawTarget::stderr());
    bar.with_style(style.progress_chars(characters(&locale)))
}

/// Returns the characters of a bar in a locale, given by the values of `LC_ALL`, `LC_CTYPE` and `LANG`.
fn characters(locale: &[String; 3]) -> &'static str {
    // The first that is set counts.
    let name = locale.iter().find(|name| !name.is_empty()).map(|name| name.to_lowercase().replace('-', ""));
    if name.is_some_and(|name| name.contains("utf8")) { "█░" } else { "#>-" }
}

/// Returns the finished part of the work, and the progress in words, with an estimate of the time that is left.
fn text(begun: Instant, done: f64, total: u64, unit: &str) -> (f64, String) {
    let part = (done / total.max(1) as f64).clamp(0.0, 1.0);
    let elapsed = begun.elapsed().as_secs_f64();
    let estimate = match part > 0.0 {
        true => format!("about {} left", time(elapsed * (1.0 - part) / part * 1e6)),
        false => "time left unknown".to_owned(),
    };
    // The estimate comes before the figures behind it, because a narrow terminal cuts the end.
    let text =
        format!("{:.0}%, {estimate}, {:.0} of {total} {unit} in {}", part * 100.0, done.floor(), time(elapsed * 1e6));
    (part, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_of_ascii_in_a_locale_without_utf_8() {
        let of = |names: [&str; 3]| characters(&names.map(str::to_owned));
        assert_eq!(of(["", "", "en_US.UTF-8"]), of(["", "C.utf8", "C"]));
        assert!(!of(["", "", "en_US.UTF-8"]).is_ascii());
        for names in [["C", "", "en_US.UTF-8"], ["", "POSIX", ""], ["", "", ""]] {
            assert!(of(names).is_ascii(), "{names:?}");
        }
    }

    #[test]
    fn the_time_left_follows_from_the_part_that_is_done() {
        let begun = Instant::now() - Duration::from_secs(30);
        let (part, shown) = text(begun, 1.5, 6, "launches");
        assert_eq!(part, 0.25);
        assert!(shown.starts_with("25%, about 90.0 s left, 1 of 6 launches in 30.0 s"), "{shown}");
        assert!(text(begun, 0.0, 6, "launches").1.contains("time left unknown"));
        assert_eq!(text(begun, 7.0, 6, "launches").0, 1.0);
    }
}
