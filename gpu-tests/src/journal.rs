// SPDX-License-Identifier: MIT OR Apache-2.0
//! Results of trials in a file, so that a later run continues where one was ended.
//!
//! Each line is `start NAME`, `pass NAME SECONDS` or `fail NAME MESSAGE`. A trial that started without a result has
//! ended the process. It counts as failed when a run continues.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Result of a trial: the message of a failure.
pub type Outcome = Result<(), String>;

/// The file, and its previous content.
#[derive(Debug)]
pub struct Journal {
    known: HashMap<String, Outcome>,
    file: Mutex<File>,
}

impl Journal {
    /// Reads the file if it exists, and appends to it.
    ///
    /// # Errors
    /// Returns the system's error.
    pub fn open(path: &Path) -> io::Result<Self> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error),
        };
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        Ok(Self { known: read(&text), file: Mutex::new(file) })
    }

    /// Returns the result of a trial in an earlier run.
    pub fn known(&self, name: &str) -> Option<&Outcome> {
        self.known.get(name)
    }

    /// Runs a trial, unless its result is known.
    ///
    /// # Errors
    /// Returns the trial's failure.
    pub fn run(&self, name: &str, trial: impl FnOnce() -> Outcome) -> Outcome {
        if let Some(outcome) = self.known(name) {
            return outcome.clone();
        }
        self.write(&format!("start {name}"));
        let start = Instant::now();
        let outcome = trial();
        match &outcome {
            Ok(()) => self.write(&format!("pass {name} {:.2}", start.elapsed().as_secs_f64())),
            Err(message) => self.write(&format!("fail {name} {}", message.replace('\n', "\\n"))),
        }
        outcome
    }

    /// Writes a line. If that fails, the only cost is that the trial runs again.
    fn write(&self, line: &str) {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = writeln!(file, "{line}").and_then(|()| file.flush());
    }
}

fn read(text: &str) -> HashMap<String, Outcome> {
    let mut known = HashMap::new();
    for line in text.lines() {
        let mut parts = line.splitn(3, ' ');
        let (Some(what), Some(name)) = (parts.next(), parts.next()) else { continue };
        let outcome = match what {
            "start" => Err("the trial ended the process; the log says how".to_owned()),
            "pass" => Ok(()),
            "fail" => Err(parts.next().unwrap_or_default().replace("\\n", "\n")),
            _ => continue,
        };
        known.insert(name.to_owned(), outcome);
    }
    known
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_an_earlier_run_are_kept_and_a_trial_that_ended_it_has_failed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let first = Journal::open(&path).unwrap();
        assert_eq!(first.run("good", || Ok(())), Ok(()));
        assert_eq!(first.run("bad", || Err("two\nlines".to_owned())), Err("two\nlines".to_owned()));
        first.write("start ended");
        drop(first);

        let second = Journal::open(&path).unwrap();
        let again = || -> Outcome { panic!("the trial ran again") };
        assert_eq!(second.run("good", again), Ok(()));
        assert_eq!(second.run("bad", again), Err("two\nlines".to_owned()));
        assert!(second.run("ended", again).unwrap_err().contains("ended the process"));
        assert_eq!(second.known("new"), None);
    }
}
