// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whether processes that have mapped memory of this one still live.
//!
//! A process that is lost to the job may have been stopped only, and goes on to write to what it has mapped as soon as it
//! continues. What it has mapped is let go of by the kernel when it ends. That is seen in `/proc`: its entry is gone, or
//! belongs to a process that began later, or is that of a zombie without further threads, which has closed its files.

use super::address;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::collections::HashMap;
use std::fs;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};

/// A process as `/proc` has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Known {
    pid: i32,
    /// When it began, in ticks since the system did.
    began: u64,
}

/// Processes that were met, by name.
static MET: Mutex<Option<HashMap<[u8; 16], Known>>> = Mutex::new(None);

/// State and begin of a process; `None` if there is none of that number.
fn look(pid: i32) -> Option<(char, u64)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may hold anything.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    let state = fields.next()?.chars().next()?;
    Some((state, fields.nth(18)?.parse().ok()?))
}

impl Known {
    fn has_ended(self) -> bool {
        match look(self.pid) {
            None => true,
            Some((_, began)) if began != self.began => true,
            Some((state, _)) => {
                let threads = || fs::read_dir(format!("/proc/{}/task", self.pid)).map_or(0, Iterator::count);
                matches!(state, 'Z' | 'X') && threads() <= 1
            }
        }
    }
}

/// Notes which process is at the other end, to which `name` belongs.
pub(super) fn met(name: [u8; 16], connection: &UnixStream) {
    let Ok(peer) = socket_peercred(connection) else { return };
    let pid = peer.pid.as_raw_nonzero().get();
    let Some((_, began)) = look(pid) else { return };
    let mut met = MET.lock().unwrap_or_else(PoisonError::into_inner);
    let met = met.get_or_insert_default();
    if met.insert(name, Known { pid, began }).is_none() {
        met.retain(|_, known| !known.has_ended());
    }
}

/// Whether the process of this name is known to have ended, or runs on another host; and its number, if that is known.
pub(crate) fn has_ended(name: &[u8; 16]) -> (bool, Option<i32>) {
    let known = MET.lock().unwrap_or_else(PoisonError::into_inner).as_ref().and_then(|met| met.get(name).copied());
    match known {
        Some(known) => (known.has_ended(), Some(known.pid)),
        // Its socket lasts as long as it does. One that is stopped may have a full queue.
        None => (refuses(name), None),
    }
}

fn refuses(name: &[u8; 16]) -> bool {
    let attempt = || -> rustix::io::Result<()> {
        let address = address(name).map_err(|_| rustix::io::Errno::INVAL)?;
        let address = SocketAddrUnix::new_abstract_name(address.as_abstract_name().unwrap_or_default())?;
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        connect(&socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?, &address)
    };
    attempt() == Err(rustix::io::Errno::CONNREFUSED)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_process_has_ended_when_it_is_killed_and_not_when_it_is_stopped() {
        use rustix::process::{Pid, Signal, kill_process};
        let mut child = Command::new("sleep").arg("600").stdin(Stdio::null()).spawn().unwrap();
        let pid = child.id() as i32;
        let known = Known { pid, began: look(pid).unwrap().1 };
        let name = [7; 16];
        MET.lock().unwrap().get_or_insert_default().insert(name, known);
        kill_process(Pid::from_child(&child), Signal::STOP).unwrap();
        assert_eq!(has_ended(&name), (false, Some(pid)));
        // The number may belong to another process later.
        assert!(Known { began: known.began + 1, ..known }.has_ended());
        child.kill().unwrap();
        // A zombie, as nobody has waited for it, and then nothing.
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
        assert_eq!(has_ended(&crate::net::registry::process()), (false, None));
    }
}
