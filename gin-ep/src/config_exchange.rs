// SPDX-License-Identifier: MIT OR Apache-2.0
//! The first step of collective calls: all ranks agree.

use crate::EpError;
use gin_gpu::DeviceKind;
use gin_host::comm::{CommError, Communicator, DeviceComm};

/// Returns the bytes that each rank passes. Collective.
pub(crate) fn all_gather(comm: &Communicator, mine: &[u8]) -> Result<Vec<Vec<u8>>, EpError> {
    comm.bootstrap().all_gather(mine).map_err(|error| EpError::Comm(CommError::from(error)))
}

/// Returns the communicator for kernels, and the number of ranks that share this rank's GPU. Each of them takes its
/// part of the GPU's SMs, so that it always has room for a block. `values` are the configuration, each with the
/// name of the call that sets it. Collective.
///
/// # Errors
/// [`EpError::Differs`] if a rank has another configuration; an error of the communicator.
pub(crate) fn exchange_config(comm: &Communicator, values: &[(&str, String)]) -> Result<(DeviceComm, u64), EpError> {
    let (device, gpu) = (comm.device()?, comm.gpu());
    let place = format!("{}/{}", comm.bootstrap().host(comm.rank()), gpu.pci_address().unwrap_or_default());
    let mut ours = vec![place.clone()];
    ours.extend(values.iter().map(|(name, value)| format!("{name}\t{value}")));
    let all = all_gather(comm, ours.join("\n").as_bytes())?;
    let all: Vec<String> = all.iter().map(|bytes| String::from_utf8_lossy(bytes).into_owned()).collect();
    for (rank, text) in (0..).zip(&all) {
        // Some values need not agree, but one rule is simpler than two.
        let differs = text.lines().zip(&ours).skip(1).find(|(theirs, ours)| theirs != ours);
        if let Some((theirs, ours)) = differs {
            let [(what, theirs), (_, ours)] = [theirs, ours].map(|line| line.split_once('\t').unwrap_or(("", line)));
            let (what, theirs, ours) = (what.to_owned(), theirs.to_owned(), ours.to_owned());
            return Err(EpError::Differs { rank, what, theirs, ours });
        }
    }
    let sharing = match gpu.kind() {
        DeviceKind::Cuda => all.iter().filter(|text| text.starts_with(&format!("{place}\n"))).count() as u64,
        DeviceKind::Virtual => 1,
    };
    Ok((device, sharing))
}
