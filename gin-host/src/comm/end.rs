// SPDX-License-Identifier: MIT OR Apache-2.0
//! The end of a communicator.

use super::live::Live;
use super::state::Shared;
use super::wire::agree;
use super::{CommConfig, CommError, CommState, Communicator};
use crate::proxy::Command;
use gin_boot::BootstrapError;
use gin_gpu::Device;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::sync::{Arc, Mutex};

impl Communicator {
    /// Ends the communicator and frees its resources.
    ///
    /// The call is collective if the communicator is active: it then waits for unfinished requests first. After an
    /// abort or a fault, each rank destroys its own member without the others. The first rank that destroys a
    /// communicator which [survived](CommConfig::survive_losses) a loss aborts it.
    ///
    /// # Errors
    /// The communicator keeps its state after an error.
    /// - [`CommError::State`] if it is destroyed already.
    /// - [`CommError::KernelsRunning`] if kernels run on a device of the job.
    /// - [`CommError::InFlight`] if requests do not finish in time.
    pub fn destroy(&self) -> Result<(), CommError> {
        const CALL: &str = "destroy";
        self.traced(CALL, || self.end(CALL))
    }

    fn end(&self, call: &'static str) -> Result<(), CommError> {
        let mut live = self.enter(call)?;
        let state = self.shared.state();
        match state {
            CommState::Uninitialised => {
                self.shared.set(CommState::Destroyed);
                return Ok(());
            }
            CommState::Initialising | CommState::Destroyed => return Err(CommError::State { call, state }),
            CommState::Active => match live.as_ref().map_or(Ok(()), |live| self.settle(call, live)) {
                // It has ended meanwhile: the ranks need not agree any more.
                Err(CommError::Ended { .. }) => self.no_kernels(call)?,
                // The others end it too. A lost rank may still write to its windows, so it counts as ended by a fault.
                Err(CommError::Bootstrap(BootstrapError::Lost { .. })) if self.config.survive_losses => {
                    self.no_kernels(call)?;
                    self.shared.abort("it went on without a lost rank, and was destroyed");
                }
                settled => {
                    settled?;
                    if let Some(Live { windows, sharers, .. }) = live.as_ref() {
                        windows.iter().flatten().for_each(|window| window.memory.memory().exposure().remove(sharers));
                    }
                }
            },
            CommState::Aborted => self.no_kernels(call)?,
        }
        self.shared.print_lines();
        if let Some(mut live) = live.take() {
            live.stop();
        }
        self.shared.set(CommState::Destroyed);
        Ok(())
    }

    /// Checks that no kernel runs on this rank's device.
    ///
    /// # Errors
    /// [`CommError::KernelsRunning`].
    pub(super) fn no_kernels(&self, call: &'static str) -> Result<(), CommError> {
        match self.device.running() as u64 {
            0 => Ok(()),
            streams => Err(CommError::KernelsRunning { call, rank: self.rank(), streams }),
        }
    }

    /// Exchanges outcomes with all ranks of the active communicator.
    pub(super) fn agree<T: DeserializeOwned>(
        &self,
        live: &Live,
        call: &'static str,
        own: Result<impl Serialize, &CommError>,
    ) -> Result<Vec<T>, CommError> {
        match (agree(|bytes| live.channel.all_gather(bytes), call, own), live.channel.board().first()) {
            (Err(CommError::Bootstrap(BootstrapError::Ended)), Some(notice)) => Err(self.ended(call, notice)),
            (outcome, _) => outcome,
        }
    }

    /// Checks that no kernel runs and no request is unfinished on any rank. Collective.
    pub(super) fn settle(&self, call: &'static str, live: &Live) -> Result<(), CommError> {
        // The kernels of all ranks come first: while one runs, it may post requests after they were counted.
        self.agree::<()>(live, call, self.no_kernels(call).as_ref())?;
        // In the second round, each rank handles what came from ranks that finished after it.
        for _ in 0..2 {
            let limit = self.config.drain;
            let drained = live.drain(limit).and_then(|requests| {
                let waited_ms = limit.as_millis() as u64;
                match (requests, live.channel.board().first()) {
                    (0, _) => Ok(()),
                    // The fault may be what keeps them unfinished.
                    (_, Some(notice)) => Err(self.ended(call, notice)),
                    (_, None) => Err(CommError::InFlight { call, rank: self.rank(), requests, waited_ms }),
                }
            });
            match (self.agree::<()>(live, call, drained.as_ref()), live.channel.board().first()) {
                // That rank knew the fault before it sent its part. Now this rank knows it too.
                (Err(CommError::OtherRank { .. }), Some(notice)) => return Err(self.ended(call, notice)),
                (outcome, _) => drop(outcome?),
            }
        }
        Ok(())
    }
}

/// The part of a communicator that its clones share, and that ends with the last of them.
#[derive(Debug)]
pub(super) struct Life {
    pub(super) live: Mutex<Option<Live>>,
    shared: Arc<Shared>,
    device: Arc<dyn Device>,
    config: Arc<CommConfig>,
}

impl Life {
    pub(super) fn new(shared: &Arc<Shared>, device: &Arc<dyn Device>, config: &Arc<CommConfig>) -> Self {
        let (shared, device, config) = (shared.clone(), device.clone(), config.clone());
        Self { live: Mutex::new(None), shared, device, config }
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        let Some(mut live) = self.live.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner).take() else {
            return;
        };
        let rank = self.shared.rank;
        self.shared.abort(&match std::thread::panicking() {
            true => format!("rank {rank} panicked"),
            false => format!("rank {rank} dropped it without `destroy`: its function failed or returned early"),
        });
        self.shared.set(CommState::Destroyed);
        if self.device.running() > 0 {
            // Kernels may read the tables until they have noticed the abort. Nothing tells when that is.
            std::mem::forget((live.resources.clone(), live.gdaki.clone()));
            for window in live.windows.iter().flatten() {
                std::mem::forget(window.clone());
            }
        }
        if let Some(caller) = self.config.progress.manual() {
            caller.step_in_waits();
        }
        let _ = live.commands.send(Command::Stop);
        // While a panic unwinds, this does not wait: the proxy owns what it uses, and ends by itself.
        if !std::thread::panicking() {
            live.stop();
        }
    }
}
