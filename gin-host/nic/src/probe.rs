// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds the NICs of this host that can serve GPUs.

use super::error::NicError;
use super::mlx5::{Absent, Libraries, Mlx5, devices};
use super::open::{Nic, NicConfig};
use std::fmt;
use std::sync::Arc;

/// A NIC of this host.
#[derive(Debug)]
pub struct Found {
    /// The name.
    pub name: String,
    /// The open NIC, or the reason why it cannot serve GPUs.
    pub nic: Result<Arc<Nic>, Refusal>,
}

/// The reason why a NIC cannot serve GPUs.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refusal {
    /// It cannot be opened.
    #[error(transparent)]
    Absent(#[from] Absent),
    /// It lacks a capability, or a step failed.
    #[error(transparent)]
    Nic(#[from] NicError),
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.nic {
            Ok(nic) => {
                let (name, link, mtu, depth) =
                    (&self.name, nic.port.link, nic.mtu().bytes(), nic.capabilities.max_depth);
                write!(f, "{name}: {link}, MTU {mtu}, queues of up to {depth} entries")
            }
            Err(refusal) => write!(f, "{}: cannot serve GPUs: {refusal}", self.name),
        }
    }
}

/// Opens all ConnectX NICs of this host with the same configuration. Sends no packet.
///
/// # Errors
/// [`Absent`], if there are none.
pub fn probe(libraries: &Libraries, config: &NicConfig) -> Result<Vec<Found>, Absent> {
    let open = |name: &str| Ok(Nic::open(Mlx5::open(libraries, name)?, config.clone())?);
    Ok(devices(libraries)?.into_iter().map(|name| Found { nic: open(&name), name }).collect())
}
