// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds the ranks that reach each other's memory by loads and stores, and takes that memory.
//!
//! A kernel may access memory of an LSA peer until the kernel has ended, even if the peer destroys its communicator
//! after a fault. So each rank keeps the memory of its peers alive whose addresses its kernels have.

use super::CommError;
use super::wire::garbled;
use gin_gpu::flat::FlatPlace;
use gin_gpu::quarantine::Process;
use gin_gpu::registry::{Missing, Registry};
use gin_gpu::share;
use gin_gpu::{Device, Memory};
use gin_net::Key;
use std::sync::Arc;

/// The devices of ranks, as other ranks of the process find them.
static DEVICES: Registry<Arc<dyn Device>> = Registry::new();

/// Publishes a device to the other ranks as long as the returned value lives; also to other processes of the host if
/// ranks are `across` processes.
pub(super) fn offer_device(device: &Arc<dyn Device>, across: bool) -> Result<(Arc<Arc<dyn Device>>, Key), CommError> {
    let published = Arc::new(device.clone());
    let mut key = DEVICES.publish(&published);
    if across {
        key.0.extend(share::describe(&**device).map_err(CommError::Share)?);
    }
    Ok((published, key))
}

/// Returns for each rank, by the key of its device, whether kernels of `device` reach that device's memory.
pub(super) fn row(device: &Arc<dyn Device>, keys: &[Vec<u8>]) -> Vec<bool> {
    let reached = keys.iter().map(|key| match DEVICES.look(key) {
        Ok(other) => device.reaches(&**other),
        Err(Missing::Elsewhere) => share::reaches(&**device, key),
        Err(Missing::Garbled | Missing::Gone) => false,
    });
    reached.collect()
}

/// Returns the processes of ranks, by the keys of their devices.
pub(super) fn processes(keys: &[Vec<u8>]) -> Result<Vec<Process>, CommError> {
    (0..).zip(keys).map(|(rank, key)| key.first_chunk().copied().ok_or_else(|| garbled(rank))).collect()
}

/// Returns the first two ranks of a team of `size` consecutive ranks of which one does not reach the other.
fn gap(rows: &[Vec<bool>], size: u32) -> Option<(u32, u32)> {
    let ranks = 0..rows.len() as u32;
    let pairs = ranks.flat_map(|rank| (rank / size * size..rank / size * size + size).map(move |other| (rank, other)));
    pairs.into_iter().find(|&(rank, other)| rows[rank as usize].get(other as usize) != Some(&true))
}

/// Returns the size of LSA teams: the requested one, or the largest in which all ranks reach each other. `rows`: the
/// ranks that each rank reaches.
///
/// # Errors
/// [`CommError::LsaSize`] for a size that does not divide the ranks, [`CommError::LsaReach`] for one in which not all
/// reach all.
pub(super) fn team_size(rows: &[Vec<bool>], asked: Option<u32>) -> Result<u32, CommError> {
    let ranks = rows.len() as u32;
    if let Some((rank, _)) = (0..).zip(rows).find(|(_, row)| row.len() != rows.len()) {
        return Err(garbled(rank));
    }
    let divides = |size: u32| size != 0 && ranks.is_multiple_of(size);
    match asked {
        None => Ok((1..=ranks).rev().find(|&size| divides(size) && gap(rows, size).is_none()).unwrap_or(1)),
        Some(lsa_size) if !divides(lsa_size) => Err(CommError::LsaSize { lsa_size, ranks }),
        // A team of one rank has no peers.
        Some(1) => Ok(1),
        Some(lsa_size) => match gap(rows, lsa_size) {
            None => Ok(lsa_size),
            Some((rank, other)) => Err(CommError::LsaReach { lsa_size, rank, other }),
        },
    }
}

/// Returns the memory that an LSA peer published ([`share::offer`]).
///
/// # Errors
/// [`CommError::OtherRank`] if it was freed, or cannot be mapped here.
pub(super) fn take_memory(rank: u32, key: &[u8], device: &Arc<dyn Device>) -> Result<Arc<Memory>, CommError> {
    take_memory_at(rank, key, device, |_| Ok(None))
}

/// Does the same. Maps memory of another process at the address that `place` returns for its length in bytes.
///
/// # Errors
/// As [`take_memory`].
pub(super) fn take_memory_at(
    rank: u32,
    key: &[u8],
    device: &Arc<dyn Device>,
    place: impl FnOnce(u64) -> Result<Option<FlatPlace>, String>,
) -> Result<Arc<Memory>, CommError> {
    let found = share::take(rank, key, device, place);
    found.map_err(|error| CommError::OtherRank { rank, reason: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ranks with the same number reach each other.
    fn rows(islands: &[u32]) -> Vec<Vec<bool>> {
        islands.iter().map(|mine| islands.iter().map(|other| mine == other).collect()).collect()
    }

    #[test]
    fn teams_are_the_largest_runs_of_neighbours_in_which_all_reach_all() {
        for (islands, size) in [
            (&[0, 0, 0, 0][..], 4),
            (&[0, 0, 1, 1], 2),
            (&[0, 1, 0, 1], 1),
            (&[0, 0, 0, 1], 1),
            (&[0, 0, 0, 0, 1, 1], 2),
            (&[0, 0, 0, 1, 1, 1], 3),
            (&[0], 1),
        ] {
            assert_eq!(team_size(&rows(islands), None), Ok(size), "{islands:?}");
        }
    }

    #[test]
    fn one_way_is_not_enough() {
        let mut rows = rows(&[0, 0, 0, 0]);
        rows[3][2] = false;
        assert_eq!(team_size(&rows, None), Ok(1));
        assert_eq!(team_size(&rows, Some(2)), Err(CommError::LsaReach { lsa_size: 2, rank: 3, other: 2 }));
    }

    #[test]
    fn a_size_that_was_asked_for_is_taken_or_refused() {
        let rows = rows(&[0, 0, 0, 0, 1, 1]);
        assert_eq!(team_size(&rows, Some(2)), Ok(2));
        assert_eq!(team_size(&rows, Some(1)), Ok(1));
        assert_eq!(team_size(&rows, Some(3)), Err(CommError::LsaReach { lsa_size: 3, rank: 3, other: 4 }));
        for size in [0, 4, 7] {
            assert_eq!(team_size(&rows, Some(size)), Err(CommError::LsaSize { lsa_size: size, ranks: 6 }));
        }
    }
}
