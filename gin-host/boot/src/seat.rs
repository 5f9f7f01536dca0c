// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where a rank's heartbeats come from: a thread, and its state in `/proc`.

use rustix::process::getpid;
use rustix::thread::gettid;
use serde::{Deserialize, Serialize};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The thread that sends a rank's heartbeats. All zero if the system does not describe it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub(super) struct Seat {
    /// The inode of its PID namespace, in which the next number is valid.
    pub(super) namespace: u64,
    pub(super) thread: u32,
    /// The time when it began, in ticks since the system began.
    pub(super) began: u64,
}

/// The state of a thread of this system.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ThreadState {
    /// It runs, or waits for a CPU.
    Runnable,
    /// It waits for something else.
    Asleep,
    /// It is stopped, traced, or has ended.
    Stopped,
}

impl Seat {
    /// Returns the thread that calls this.
    pub(super) fn own() -> Self {
        let (process, thread) = (getpid().as_raw_nonzero(), gettid().as_raw_nonzero());
        let own = || {
            // The numbers in `/proc` are those of the namespace in which it was mounted.
            let named = fs::read_link("/proc/thread-self").ok()?;
            if named != Path::new(&format!("{process}/task/{thread}")) {
                return None;
            }
            let namespace = fs::metadata("/proc/self/ns/pid").ok()?.ino();
            let (_, began) = look(thread.get())?;
            Some(Self { namespace, thread: thread.get().try_into().ok()?, began })
        };
        own().unwrap_or_default()
    }

    /// Returns whether the process of `own` sees this thread; both are of one system.
    pub(super) fn is_beside(&self, own: &Self) -> bool {
        *self != Self::default() && self.namespace == own.namespace && self.state() != ThreadState::Stopped
    }

    pub(super) fn state(&self) -> ThreadState {
        match i32::try_from(self.thread).ok().and_then(look) {
            // Another thread may get its number later.
            Some((state, began)) if began == self.began => match state {
                'R' => ThreadState::Runnable,
                'T' | 't' | 'Z' | 'X' => ThreadState::Stopped,
                _ => ThreadState::Asleep,
            },
            _ => ThreadState::Stopped,
        }
    }
}

/// Returns the state and the begin of a process or a thread; `None` if none has this number.
pub(super) fn look(pid: i32) -> Option<(char, u64)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may contain any character.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    let state = fields.next()?.chars().next()?;
    Some((state, fields.nth(18)?.parse().ok()?))
}
