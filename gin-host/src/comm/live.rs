// SPDX-License-Identifier: MIT OR Apache-2.0
//! The parts of an active communicator.

use super::gdaki::Gdaki;
use super::print::Printer;
use super::resources::Resources;
use super::symmetric::Flat;
use super::window::Registered;
use super::{CommError, PeerStats};
use crate::proxy::progress::Running;
use crate::proxy::{Command, Counters, Waiting};
use gin_abi::{BackendKind, CommHandle};
use gin_boot::{Channel, rt};
use gin_gpu::quarantine::Sharers;
use gin_net::{Capabilities, Fetch};
use std::sync::Arc;
use std::sync::mpsc::{self, Sender, TryRecvError};
use std::time::Duration;

/// An active communicator.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) backend: BackendKind,
    pub(super) capabilities: Capabilities,
    pub(super) resources: Arc<Resources>,
    /// `Some` if kernels drive a NIC.
    pub(super) gdaki: Option<Arc<Gdaki>>,
    pub(super) handle: CommHandle,
    pub(super) stats: Vec<Arc<Counters>>,
    pub(super) windows: Vec<Option<Arc<Registered>>>,
    pub(super) flat: Flat,
    /// Fetches the data that windows of other ranks need before they are connected.
    pub(super) fetch: Option<Fetch>,
    /// The processes of the ranks.
    pub(super) sharers: Arc<Sharers>,
    pub(super) channel: Arc<dyn Channel>,
    pub(super) commands: Sender<Command>,
    /// The lines of this rank's kernels.
    pub(super) printer: Option<Arc<Printer>>,
    pub(super) progress: Option<Running>,
}

impl Live {
    /// Returns the statistics of the NIC's queue pairs that requests were posted to.
    pub(super) fn gdaki_stats(&self) -> Result<Vec<PeerStats>, CommError> {
        Ok(self.gdaki.as_ref().map_or(Ok(Vec::new()), |gdaki| gdaki.stats())?)
    }

    /// Sends a command to the proxy, and waits for its answer.
    pub(super) fn ask<T>(&self, command: impl FnOnce(mpsc::SyncSender<T>) -> Command) -> Result<T, CommError> {
        let (to, from) = mpsc::sync_channel(1);
        self.commands.send(command(to)).map_err(|_| CommError::ProxyGone)?;
        let answer = rt::wait_for("its proxy", || match from.try_recv() {
            Err(TryRecvError::Empty) => None,
            answer => Some(answer),
        });
        answer.and_then(Result::ok).ok_or(CommError::ProxyGone)
    }

    /// Waits until all requests that kernels have posted are finished. Returns the number of unfinished requests when
    /// `limit` is over or a fault has ended the communicator.
    pub(super) fn drain(&self, limit: Duration) -> Result<u64, CommError> {
        let until_ns = after(limit);
        if let Some(gdaki) = &self.gdaki {
            match gdaki.drain(&|| rt::clock_ns() >= until_ns || self.channel.board().count() != 0)? {
                Ok(0) => {}
                Ok(left) => return Ok(left),
                // The fault ends the communicator. The caller learns that when the ranks agree.
                Err(fault) => self.channel.board().post(self.handle.rank, fault),
            }
        }
        let heads = self.resources.claims()?;
        self.ask(|to| Command::Wait(Waiting::Drain { heads, until_ns, to }))
    }

    /// Stops the proxy, and waits until it is gone. The proxy never blocks, so this is soon.
    pub(super) fn stop(&mut self) {
        let _ = self.commands.send(Command::Stop);
        if let Some(running) = self.progress.take() {
            rt::wait_until_named("the end of its proxy", || running.is_finished());
            running.join();
            self.sharers.close();
        }
    }
}

/// Returns the time on the clock when `limit` is over.
fn after(limit: Duration) -> u64 {
    rt::clock_ns().saturating_add(u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX))
}

/// Returns a function that tells whether `limit` is over.
pub(super) fn until(limit: Duration) -> impl Fn() -> bool {
    let until_ns = after(limit);
    move || rt::clock_ns() >= until_ns
}
