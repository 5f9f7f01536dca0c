// SPDX-License-Identifier: MIT OR Apache-2.0
//! The life of processes that have mapped memory of this one.
//!
//! A process that is lost to the job may only have been stopped. When it continues, it writes to the memory that it has
//! mapped. The kernel removes its mappings when it ends.
//!
//! A file of the process (pidfd) shows its end: it is readable once all threads of the process have ended, and each
//! thread has closed its files before. This process has no number for a process of a PID namespace that it does not
//! see, and so no such file. There the socket of the process shows its end, because the kernel closes the socket when
//! the process ends.

use super::peer::{is_ours, reach};
use crate::lock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A process of this PID namespace.
#[derive(Clone, Debug)]
pub(super) struct Known {
    pid: i32,
    file: Arc<OwnedFd>,
}

/// The processes that have answered a request, by name.
static MET: Mutex<BTreeMap<[u8; 16], Known>> = Mutex::new(BTreeMap::new());

impl Known {
    /// Opens the process of this number, if there is one and the kernel has files of processes (Linux 5.3).
    pub(super) fn open(pid: i32) -> Option<Self> {
        let file = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
        Some(Self { pid, file: Arc::new(file) })
    }

    fn has_ended(&self) -> bool {
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&*self.file, PollFlags::IN)], Some(&at_once)) == Ok(1)
    }
}

/// Notes the process to which `name` belongs.
pub(super) fn met(name: [u8; 16], process: Option<Known>) {
    let Some(known) = process else { return };
    let mut met = lock(&MET);
    if met.insert(name, known).is_none() {
        met.retain(|_, known| !known.has_ended());
    }
}

/// Returns whether the process of this name is known to have ended or to run on another host, and its number if that is
/// known.
pub fn has_ended(name: &[u8; 16]) -> (bool, Option<i32>) {
    let known = lock(&MET).get(name).cloned();
    match known {
        Some(known) => (known.has_ended(), Some(known.pid)),
        None => (is_unreached(name), None),
    }
}

/// Returns whether no socket has the name of a process any more, or another user's socket has it. A stopped process may
/// have a full queue.
fn is_unreached(name: &[u8; 16]) -> bool {
    match reach(name, Duration::from_millis(1)) {
        Ok(connection) => !is_ours(&connection),
        Err(error) => error.kind() == ErrorKind::ConnectionRefused,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_process_has_ended_when_it_is_killed_and_not_when_it_is_stopped() {
        use rustix::process::{Signal, kill_process};
        let mut child = Command::new("sleep").arg("600").stdin(Stdio::null()).spawn().unwrap();
        let pid = child.id() as i32;
        let name = [7; 16];
        met(name, Known::open(pid));
        kill_process(Pid::from_child(&child), Signal::STOP).unwrap();
        assert_eq!(has_ended(&name), (false, Some(pid)));
        child.kill().unwrap();
        // A zombie, because it was not waited for, and then nothing.
        let begun = std::time::Instant::now();
        while !has_ended(&name).0 {
            assert!(begun.elapsed().as_secs() < 60);
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(has_ended(&name).0);
    }

    #[test]
    fn of_a_process_that_was_never_met_its_socket_tells() {
        assert_eq!(has_ended(&[9; 16]), (true, None));
        super::super::server().unwrap();
        // Another test may have met this process.
        assert!(!is_unreached(&crate::registry::process()));
    }
}
