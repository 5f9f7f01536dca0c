// SPDX-License-Identifier: MIT OR Apache-2.0
//! Probe for NICs of this host that can serve GPUs.

use super::error::NicError;
use super::mlx5::{Absent, Libraries, Mlx5, devices};
use super::open::{Nic, NicConfig};
use std::fmt;
use std::sync::Arc;

/// A NIC that was found.
#[derive(Debug)]
pub struct Found {
    /// Its name.
    pub name: String,
    /// The open NIC, or why it cannot serve GPUs.
    pub nic: Result<Arc<Nic>, Refusal>,
}

/// Why a NIC cannot serve GPUs.
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
                let (port, mtu) = (nic.port(), nic.mtu().bytes());
                write!(
                    f,
                    "{}: {}, MTU {mtu}, queues of up to {} entries",
                    self.name,
                    port.link,
                    nic.capabilities().max_depth
                )
            }
            Err(refusal) => write!(f, "{}: cannot serve GPUs: {refusal}", self.name),
        }
    }
}

/// Opens every ConnectX NIC of this host, each with the same settings. Asks only the kernel and the NICs, and sends no
/// packet.
///
/// # Errors
/// [`Absent`], if there are none.
pub fn probe(libraries: &Libraries, config: &NicConfig) -> Result<Vec<Found>, Absent> {
    let open = |name: &str| Ok(Nic::open(Mlx5::open(libraries, name)?, config.clone())?);
    Ok(devices(libraries)?.into_iter().map(|name| Found { nic: open(&name), name }).collect())
}
