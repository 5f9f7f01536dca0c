// SPDX-License-Identifier: MIT OR Apache-2.0
//! Makes a job of the ranks that remain after losses.
//!
//! A job that has lost a rank can complete no collective, because its tree is broken. So each rank keeps a second
//! socket from the beginning, and all ranks know the addresses of these sockets. The first remaining rank becomes rank
//! 0 of a new job, at its second socket.

use crate::error::{CHECK, system};
use crate::io::Start;
use crate::message::CollectiveId;
use crate::tcp::{Inner, check, listen};
use crate::{BootstrapError, TcpBootstrap, rt};
use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

/// The collective by which ranks exchange the addresses of their second sockets.
pub(super) const SPARES: CollectiveId = CollectiveId { channel: u64::MAX, number: 1 };

/// The time after which a rank that was refused tries again.
const AGAIN: Duration = Duration::from_millis(20);

/// The second sockets, where ranks join a job that follows this one.
#[derive(Debug)]
pub(super) struct Spares {
    own: TcpListener,
    /// By rank.
    all: Vec<SocketAddr>,
}

impl Spares {
    /// Opens the second socket of this rank, and exchanges its address with the other ranks.
    pub(super) fn exchange(inner: &Inner) -> Result<Self, BootstrapError> {
        // A rank without neighbours may arrive here before its thread has set the address.
        rt::wait_until_named("its own address", || inner.node.ip.get().is_some() || inner.node.failed().is_some());
        let unknown = || inner.node.failed().unwrap_or_else(|| system("listen")("this rank has no address"));
        let ip = *inner.node.ip.get().ok_or_else(unknown)?;
        let own = listen((ip, 0).into())?;
        let address = own.local_addr().map_err(system("listen"))?;
        let texts = inner.gather(SPARES, address.to_string().as_bytes(), || false)?.parts();
        let read = |(rank, text): (usize, &Vec<u8>)| {
            let address = str::from_utf8(text).ok().and_then(|text| text.parse().ok());
            address.ok_or_else(|| system("exchange addresses")(format!("rank {rank} listens at no address")))
        };
        Ok(Self { own, all: texts.iter().enumerate().map(read).collect::<Result<_, _>>()? })
    }
}

impl TcpBootstrap {
    /// Makes a job of the ranks that remain without `lost`, in the same order; the new ranks count from 0. All
    /// remaining ranks call it with the same ranks, listed in any order. It waits for them, at most `joining`. After
    /// that the old job has no use, and can be dropped.
    ///
    /// A rank of `lost` that is still alive takes no part, because communicators of the new job have windows and keys
    /// of their own.
    ///
    /// ```
    /// use gin_boot::{Bootstrap, Rendezvous, TcpConfig};
    /// use std::time::Duration;
    ///
    /// let config = TcpConfig::default().address(Some([127, 0, 0, 1].into()));
    /// let alone = Rendezvous::new(config)?.join(1)?;
    /// let next = alone.without(&[], Duration::from_secs(60))?;
    /// assert_eq!((next.rank(), next.ranks()), (0, 1));
    /// # Ok::<(), gin_boot::BootstrapError>(())
    /// ```
    ///
    /// # Errors
    /// - [`BootstrapError::NoSuchRank`]: `lost` names an unknown rank.
    /// - [`BootstrapError::Lost`]: `lost` names this rank.
    /// - [`BootstrapError::Timeout`], [`BootstrapError::Unreachable`] or [`BootstrapError::Secret`]: other ranks do not
    ///   join, for example because they name other ranks or are lost too. The caller can try again with more ranks.
    pub fn without(&self, lost: &[u32], joining: Duration) -> Result<Self, BootstrapError> {
        let (own, ranks) = (self.inner.node.rank, self.inner.node.ranks);
        let mut lost = lost.to_vec();
        lost.sort_unstable();
        lost.dedup();
        lost.iter().try_for_each(|&rank| check(rank, ranks))?;
        let left: Vec<u32> = (0..ranks).filter(|rank| lost.binary_search(rank).is_err()).collect();
        let Ok(rank) = left.binary_search(&own) else { return Err(self.inner.node.left_out()) };
        // A rank that names other ranks computes another secret, so this job refuses it.
        let secret = self.inner.secret.without(&lost);
        let begun = Instant::now();
        loop {
            let config = self.inner.config.clone().joining(joining.saturating_sub(begun.elapsed()));
            let start = if rank == 0 {
                // This rank may call `without` again, so the socket stays open.
                Start::Listen(self.spares.own.try_clone().map_err(system("listen"))?)
            } else {
                let addresses = vec![self.spares.all[left[0] as usize]];
                Start::Connect { addresses, remedy: CHECK.to_owned() }
            };
            match Self::join_as(rank as u32, left.len() as u32, &secret, config, start, None) {
                // The first remaining rank may not know all losses yet.
                Err(BootstrapError::Secret) if begun.elapsed() < joining => std::thread::sleep(AGAIN),
                joined => return joined,
            }
        }
    }

    /// Returns the ranks that this rank knows to be lost, in order. Ranks that left in an orderly way are not among
    /// them.
    pub fn lost(&self) -> Vec<u32> {
        self.inner.node.lost()
    }
}
