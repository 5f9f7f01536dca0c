// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ends the process when a trial hangs.
//!
//! A process cannot end a kernel that never ends, or a driver call that never returns, while it waits for it. The
//! system ends both together with the process.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Exit status of a process that the watchdog ended.
pub const STATUS: i32 = 86;

/// The trial that runs now.
#[derive(Clone, Debug, Default)]
pub struct Watchdog {
    now: Arc<Mutex<Option<(String, Instant)>>>,
}

impl Watchdog {
    /// Starts a watching thread. If a trial takes longer than `limit`, the thread prints the trial's name and where
    /// each thread of the process waits, and ends the process with [`STATUS`].
    pub fn start(limit: Duration) -> Self {
        let watchdog = Self::default();
        let own = watchdog.clone();
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(Duration::from_millis(100));
                if let Some(name) = own.late(limit) {
                    eprintln!("{name} has not ended after {limit:.0?}. Threads of this process:\n{}", threads());
                    std::process::exit(STATUS);
                }
            }
        });
        watchdog
    }

    /// Runs a trial under the watch.
    pub fn watch<T>(&self, name: &str, trial: impl FnOnce() -> T) -> T {
        self.set(Some((name.to_owned(), Instant::now())));
        let result = trial();
        self.set(None);
        result
    }

    fn set(&self, now: Option<(String, Instant)>) {
        *self.now.lock().unwrap_or_else(PoisonError::into_inner) = now;
    }

    fn late(&self, limit: Duration) -> Option<String> {
        let now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        now.as_ref().filter(|(_, start)| start.elapsed() > limit).map(|(name, _)| name.clone())
    }
}

/// Describes each thread: its name, its state, and the system call in which it waits.
fn threads() -> String {
    let mut lines = String::new();
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return lines };
    for task in tasks.flatten() {
        let read = |file: &str| {
            std::fs::read_to_string(task.path().join(file)).map(|text| text.trim().to_owned()).unwrap_or_default()
        };
        let state =
            read("status").lines().find_map(|line| line.strip_prefix("State:").map(str::trim).map(str::to_owned));
        let (name, state, waits) = (read("comm"), state.unwrap_or_default(), read("wchan"));
        lines.push_str(&format!("  {name}: {state} {waits}\n"));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_is_late_after_its_limit_and_only_while_it_runs() {
        let watchdog = Watchdog::default();
        watchdog.watch("slow", || {
            assert_eq!(watchdog.late(Duration::ZERO).as_deref(), Some("slow"));
            assert_eq!(watchdog.late(Duration::from_secs(3600)), None);
        });
        assert_eq!(watchdog.late(Duration::ZERO), None);
    }

    #[test]
    fn every_thread_of_the_process_is_listed_by_name() {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::Builder::new().name("listed one".into()).spawn(move || stopped.recv());
        // A thread sets its name when it starts.
        while !threads().contains("listed one") {
            std::thread::yield_now();
        }
        drop(stop);
        assert!(thread.unwrap().join().unwrap().is_err());
    }
}
