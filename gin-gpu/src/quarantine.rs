// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that a lost process may still write to.
//!
//! A process keeps memory mapped until it unmaps it or ends. A process that counts as lost, because it is silent, may
//! only have been stopped: its kernels and its proxy go on when it continues. Memory that a communicator allocates is
//! safe from that. Each communicator has its own, and the system does not reuse memory that another process has mapped
//! before that process has ended. Memory of the program's that was in a window of a communicator which a fault has
//! ended is not safe. It is refused as a window of another communicator until each process that has its key is a rank
//! of that one too, or is known to have ended.

use crate::lock;
use crate::share::life;
use gin_boot::board::Board;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Memory that a process which is not in the job any more may still write to.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("this memory cannot be a window yet: {reason}")]
pub struct Quarantined {
    /// Which process may, and what to do.
    pub reason: String,
}

/// Name of a process.
pub type Process = [u8; 16];

/// The processes of a communicator, which get the keys of its windows.
#[derive(Debug)]
pub struct Sharers {
    board: Arc<Board>,
    /// By rank.
    processes: Vec<Process>,
    /// Nothing of this process touches windows for it any more.
    closed: AtomicBool,
}

impl Sharers {
    pub fn new(board: Arc<Board>, processes: Vec<Process>) -> Arc<Self> {
        Arc::new(Self { board, processes, closed: AtomicBool::new(false) })
    }

    /// This rank's part of the communicator is gone.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Returns why memory with keys at these processes cannot be in a window of those in `new`; `None` if it can.
    fn objection(&self, new: &Sharers) -> Option<String> {
        if self.board.count() == 0 {
            // It goes on, or has ended in order: its ranks do with the memory what the program has them do.
            return None;
        }
        let lost = (0..).zip(&self.processes).filter(|(_, process)| !new.processes.contains(process));
        let mut lost = lost.map(|(rank, process)| (rank, life::has_ended(process))).peekable();
        lost.peek()?;
        if !self.closed.load(Ordering::Acquire) {
            return Some("a communicator that a fault has ended still has it: destroy that first".to_owned());
        }
        let (rank, (_, pid)) = lost.find(|(_, (ended, _))| !ended)?;
        let process = pid.map_or(String::new(), |pid| format!(", process {pid}"));
        Some(format!(
            "rank {rank} of an earlier communicator{process}, which was left out, has mapped it and is not known to have \
             ended: end that process, or take other memory"
        ))
    }
}

/// The communicators that memory was in windows of, and that have not let go of it in order.
#[derive(Debug, Default)]
pub struct Exposure(Mutex<Vec<Arc<Sharers>>>);

impl Exposure {
    /// Registers processes that are about to get the key of the memory.
    ///
    /// # Errors
    /// [`Quarantined`] if others may still write to it.
    pub fn add(&self, new: &Arc<Sharers>) -> Result<(), Quarantined> {
        let mut all = lock(&self.0);
        if let Some(reason) = all.iter().find_map(|sharers| sharers.objection(new)) {
            return Err(Quarantined { reason });
        }
        // Of communicators that a fault has ended, no process is left that may write and is not in `new`.
        all.retain(|sharers| sharers.board.count() == 0 || !sharers.closed.load(Ordering::Acquire));
        if !all.iter().any(|sharers| Arc::ptr_eq(sharers, new)) {
            all.push(new.clone());
        }
        Ok(())
    }

    /// All ranks of the communicator have let go of it.
    pub fn remove(&self, sharers: &Arc<Sharers>) {
        lock(&self.0).retain(|other| !Arc::ptr_eq(other, sharers));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::process;
    use gin_abi::{Fault, FaultKind, Operation};

    /// A process that there is: its socket is this one's, as it was never asked.
    fn alive() -> Process {
        let device: Arc<dyn crate::Device> = crate::virt::VirtualDevice::memory_only(0);
        crate::share::describe(&*device).unwrap();
        process()
    }

    fn sharers(processes: &[Process]) -> Arc<Sharers> {
        Sharers::new(Arc::new(Board::new(processes.len() as u32)), processes.to_vec())
    }

    fn end(sharers: &Sharers) {
        sharers.board.post(0, Fault::new(FaultKind::PeerLost, Operation::None).peer(1));
    }

    fn refused(exposure: &Exposure, new: &Arc<Sharers>) -> String {
        match exposure.add(new) {
            Err(Quarantined { reason }) => reason,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn memory_that_a_process_left_out_may_write_to_is_in_no_window_until_it_has_ended() {
        let (gone, here, other) = ([3; 16], alive(), [4; 16]);
        let exposure = Exposure::default();
        let first = sharers(&[other, here]);
        exposure.add(&first).unwrap();
        // Two communicators at a time are the program's business.
        exposure.add(&sharers(&[other])).unwrap();
        end(&first);
        assert!(refused(&exposure, &sharers(&[other])).contains("destroy"));
        first.close();
        assert!(refused(&exposure, &sharers(&[other])).contains("rank 1"));
        // It is one of them again, or all have let go of it.
        exposure.add(&sharers(&[here, other])).unwrap();
        exposure.remove(&first);
        exposure.add(&sharers(&[other])).unwrap();
        // One that has ended writes nothing.
        let exposure = Exposure::default();
        let first = sharers(&[other, gone]);
        exposure.add(&first).unwrap();
        end(&first);
        first.close();
        exposure.add(&sharers(&[other])).unwrap();
    }
}
