// SPDX-License-Identifier: MIT OR Apache-2.0
//! How a job goes on without ranks that it has lost.
//!
//! A job that has lost a rank cannot meet again: its tree is broken. So each rank keeps a second socket from the
//! beginning, and all know each other's; the first rank that is left becomes rank 0 of a new job at its own.

use super::io::Start;
use super::{Inner, Round, TcpBootstrap, TcpConfig, check, listen, system};
use crate::BootstrapError;
use crate::rt;
use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

/// The collective operation by which ranks exchange the addresses of their second sockets.
const SPARES: Round = Round { channel: u64::MAX, number: 1 };

/// How long until one that was refused tries again.
const AGAIN: Duration = Duration::from_millis(20);

/// Where the jobs meet that may follow.
#[derive(Debug)]
pub(super) struct Spares {
    own: TcpListener,
    /// By rank.
    all: Vec<SocketAddr>,
}

impl Spares {
    /// Makes this rank's and hears of the others'.
    pub(super) fn exchange(inner: &Inner) -> Result<Self, BootstrapError> {
        // A rank that is alone may be here before its thread is.
        rt::wait_until(|| inner.node.ip.get().is_some() || inner.node.failed().is_some());
        let unknown = || inner.node.failed().unwrap_or_else(|| system("listen", "this rank has no address"));
        let ip = *inner.node.ip.get().ok_or_else(unknown)?;
        let own = listen((ip, 0).into())?;
        let address = own.local_addr().map_err(|error| system("listen", error))?;
        let told = inner.gather(SPARES, address.to_string().as_bytes(), || false)?;
        let read = |(rank, text): (usize, &Vec<u8>)| {
            let address = str::from_utf8(text).ok().and_then(|text| text.parse().ok());
            address.ok_or_else(|| system("meet", format!("rank {rank} listens at no address")))
        };
        Ok(Self { own, all: told.iter().enumerate().map(read).collect::<Result<_, _>>()? })
    }
}

impl TcpBootstrap {
    /// A job of the ranks that are left when `lost` are not there any more, in the same order: ranks count anew, from
    /// 0. All that are left call it with the same ranks, in any order; it waits for them, at most `joining`. This job
    /// is of no more use, and can be dropped.
    ///
    /// One of `lost` that lives all the same takes no part: communicators of the new job have windows and keys of their
    /// own.
    ///
    /// # Errors
    /// [`BootstrapError::NoSuchRank`] for an unknown rank; [`BootstrapError::Lost`] if this rank is among them;
    /// [`BootstrapError::Timeout`], [`BootstrapError::Unreachable`] or [`BootstrapError::Secret`] if others do not
    /// come, for example because they name other ranks, or are lost too. The caller can try again with more ranks.
    pub fn without(&self, lost: &[u32], joining: Duration) -> Result<Self, BootstrapError> {
        let (own, ranks) = (self.inner.node.rank, self.inner.node.ranks);
        let mut lost = lost.to_vec();
        lost.sort_unstable();
        lost.dedup();
        for &rank in &lost {
            check(rank, ranks)?;
        }
        let left: Vec<u32> = (0..ranks).filter(|rank| lost.binary_search(rank).is_err()).collect();
        let Ok(rank) = left.binary_search(&own) else { return Err(self.inner.node.left_out()) };
        // A rank that names other ranks has another secret, and does not get in.
        let secret = self.inner.secret.without(&lost);
        let begun = Instant::now();
        loop {
            let config = TcpConfig { joining: joining.saturating_sub(begun.elapsed()), ..self.inner.config.clone() };
            let start = if rank == 0 {
                // It can be called again.
                Start::Listen(self.spares.own.try_clone().map_err(|error| system("listen", error))?)
            } else {
                Start::Connect(vec![self.spares.all[left[0] as usize]])
            };
            match Self::begin(rank as u32, left.len() as u32, &secret, config, start)?.wait() {
                // The first rank that is left may not know of all losses yet.
                Err(BootstrapError::Secret) if begun.elapsed() < joining => std::thread::sleep(AGAIN),
                joined => return joined,
            }
        }
    }

    /// Returns the ranks that this one knows to be lost, in order, without ranks that left in an orderly way.
    pub fn lost(&self) -> Vec<u32> {
        self.inner.node.lost()
    }
}
