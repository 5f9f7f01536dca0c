// SPDX-License-Identifier: MIT OR Apache-2.0
//! Results of trials in a file, so that a run that was ended can be taken up where it was.
//!
//! A line says `start NAME`, `pass NAME` or `fail NAME MESSAGE`. A trial that started and did not come to an end has
//! ended the process, and counts as failed when the run is taken up.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// What became of a trial: the message of a failure.
pub type Outcome = Result<(), String>;

/// The file, and what was in it.
#[derive(Debug)]
pub struct Journal {
    known: HashMap<String, Outcome>,
    file: Mutex<File>,
}

impl Journal {
    /// Reads the file if there is one, and goes on writing to it.
    ///
    /// # Errors
    /// What the system says.
    pub fn open(path: &Path) -> io::Result<Self> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error),
        };
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        Ok(Self { known: read(&text), file: Mutex::new(file) })
    }

    /// What became of a trial in an earlier run.
    pub fn known(&self, name: &str) -> Option<&Outcome> {
        self.known.get(name)
    }

    /// Runs a trial, unless it is known what becomes of it.
    ///
    /// # Errors
    /// Its failure.
    pub fn run(&self, name: &str, trial: impl FnOnce() -> Outcome) -> Outcome {
        if let Some(outcome) = self.known(name) {
            return outcome.clone();
        }
        self.write(&format!("start {name}"));
        let outcome = trial();
        match &outcome {
            Ok(()) => self.write(&format!("pass {name}")),
            Err(message) => self.write(&format!("fail {name} {}", message.replace('\n', "\\n"))),
        }
        outcome
    }

    /// A line that cannot be written costs only that the trial runs again.
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
            "start" => Err("it ended the process; the log says how".to_owned()),
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
    fn what_an_earlier_run_found_is_not_run_again_and_what_ended_it_has_failed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let first = Journal::open(&path).unwrap();
        assert_eq!(first.run("good", || Ok(())), Ok(()));
        assert_eq!(first.run("bad", || Err("two\nlines".to_owned())), Err("two\nlines".to_owned()));
        first.write("start ended");
        drop(first);

        let second = Journal::open(&path).unwrap();
        let again = || -> Outcome { panic!("it ran again") };
        assert_eq!(second.run("good", again), Ok(()));
        assert_eq!(second.run("bad", again), Err("two\nlines".to_owned()));
        assert!(second.run("ended", again).unwrap_err().contains("ended the process"));
        assert_eq!(second.known("new"), None);
    }
}
