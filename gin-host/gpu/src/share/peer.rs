// SPDX-License-Identifier: MIT OR Apache-2.0
//! The sockets by which processes request memory, and the user and process at the other end of a socket.
//!
//! A process listens on a socket with an abstract name. Every user of the network namespace can read that name in
//! `/proc/net/unix`, and connect. Two processes share memory only if both run as the same user, so each side checks the
//! other before it sends or reads a byte.

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Returns the abstract name of the socket of a process.
pub(super) fn socket_name(process: &[u8; 16]) -> String {
    let hex: String = process.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("gin-{hex}")
}

/// Connects to a process. `patience` bounds the wait for a place in its queue, and each read and write afterwards.
pub(super) fn reach(process: &[u8; 16], patience: Duration) -> io::Result<UnixStream> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    for which in [Timeout::Send, Timeout::Recv] {
        set_socket_timeout(&socket, which, Some(patience))?;
    }
    let address = SocketAddrUnix::new_abstract_name(socket_name(process).as_bytes())?;
    uninterrupted(patience, || connect(&socket, &address))?;
    Ok(socket.into())
}

/// Repeats a call on a socket while signals interrupt it, for at most about twice `patience`.
///
/// The kernel never restarts a call on a socket with a time limit. It also interrupts it, without any handler, if the
/// process is stopped and continues.
pub(super) fn uninterrupted<T>(patience: Duration, mut call: impl FnMut() -> rustix::io::Result<T>) -> io::Result<T> {
    let end = Instant::now() + patience;
    loop {
        match call() {
            Err(Errno::INTR) if Instant::now() < end => {}
            result => return result.map_err(io::Error::from),
        }
    }
}

/// The process at the other end of a socket, as the kernel of this one's namespaces shows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Peer {
    user: u32,
    /// Its number; 0 if the PID namespace of this process does not contain it.
    pub(super) pid: i32,
}

impl Peer {
    /// Asks the kernel. (Not by rustix 1.1: its `UCred` has no value for the 0 that stands for a process of another PID
    /// namespace.)
    ///
    /// # Errors
    /// The kernel's error.
    pub(super) fn of(socket: impl AsFd) -> io::Result<Self> {
        let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut bytes = size_of_val(&found) as libc::socklen_t;
        // Safety: the kernel writes at most `bytes` bytes to `found`, every value of which is one of its type.
        let result = unsafe {
            libc::getsockopt(
                socket.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut found).cast(),
                &raw mut bytes,
            )
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { user: found.uid, pid: found.pid })
    }

    /// Checks that it runs as the same user.
    ///
    /// # Errors
    /// The users as which both run.
    pub(super) fn check(self) -> Result<(), String> {
        let own = rustix::process::geteuid().as_raw();
        // The number that stands for every user without a number here. It may also be this process's number.
        let unmapped = fs::read_to_string("/proc/sys/kernel/overflowuid").unwrap_or_default();
        let unmapped = unmapped.trim().parse().unwrap_or(65534);
        let all_mapped = || {
            let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
            map.split_whitespace().eq(["0", "0", "4294967295"])
        };
        if self.user == unmapped && !all_mapped() {
            return Err(format!(
                "its process runs as a user of another user namespace, which has no number in this one (shown as {unmapped}): \
                 run both in one user namespace, or map the user in both"
            ));
        }
        if self.user != own {
            return Err(format!(
                "its process runs as user {}, this one as user {own}: run both as one user",
                self.user
            ));
        }
        Ok(())
    }
}

/// Returns whether a process of the same user is at the other end.
pub(super) fn is_ours(socket: impl AsFd) -> bool {
    Peer::of(socket).is_ok_and(|peer| peer.check().is_ok())
}
