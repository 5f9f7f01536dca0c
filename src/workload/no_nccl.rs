// SPDX-License-Identifier: MIT OR Apache-2.0
//! NCCL in a build without GPUs: there is none.

use super::{Plan, Watched};
use crate::cli::Refused;
use gin_host::comm::CommError;
use gin_host::world::Rank;
use std::convert::Infallible;
use std::time::Duration;

/// NCCL's library.
pub(super) enum Nccl {}

/// NCCL's communicator of a rank.
pub(super) struct Rival(Infallible);

impl Nccl {
    /// Fails: this build supports no GPUs.
    ///
    /// # Errors
    /// Always returns [`Refused`].
    pub(super) fn open(_plan: &Plan) -> Result<&'static Self, Refused> {
        Err(Refused("--beside nccl: this command was built without the feature `cuda`".to_owned()))
    }

    pub(super) fn version(&self) -> &str {
        match *self {}
    }
}

impl Rival {
    pub(super) fn new(nccl: &Nccl, _plan: &Plan, _rank: &Rank) -> Result<Self, CommError> {
        match *nccl {}
    }

    pub(super) fn time(&self, _rank: &Rank, _comm: &Watched<'_>) -> Result<Duration, CommError> {
        match self.0 {}
    }
}
