// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory to which a lost process may still write.
//!
//! A process keeps memory mapped until it unmaps it or ends. A process that counts as lost because it was silent may
//! only have been stopped. Its kernels and its proxy go on when it continues.
//!
//! Memory that a communicator allocates is safe from such writes, because each communicator has its own, and the system
//! does not reuse memory that another process has mapped before that process has ended. Memory of the program that was
//! in a window of a communicator with a fault is not safe. It is refused as a window of another communicator as long as
//! a process with its key is alive and is no rank of that communicator. A process that is not known to have ended
//! counts as alive.

use crate::lock;
use crate::share::life;
use gin_boot::board::Board;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// The error of memory to which a process outside of the job may still write.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("this memory cannot be a window yet: {reason}")]
pub struct Quarantined {
    /// The process that may write, and the remedy.
    pub reason: String,
}

/// The name of a process.
pub type Process = [u8; 16];

/// The processes of a communicator, which get the keys of its windows.
#[derive(Debug)]
pub struct Sharers {
    board: Arc<Board>,
    /// By rank.
    processes: Vec<Process>,
    /// This process does not use windows for the communicator any more.
    closed: AtomicBool,
}

impl Sharers {
    pub fn new(board: Arc<Board>, processes: Vec<Process>) -> Arc<Self> {
        Arc::new(Self { board, processes, closed: AtomicBool::new(false) })
    }

    /// Notes that this rank's part of the communicator is gone.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Returns the reason for which memory whose key these processes have cannot be in a window of the processes in
    /// `new`; `None` if it can.
    fn objection(&self, new: &Sharers) -> Option<String> {
        if self.board.is_whole() {
            // The communicator is alive with all its ranks, or has ended in an orderly way. Then its ranks use the
            // memory only as the program has them use it.
            return None;
        }
        let lost = (0..).zip(&self.processes).filter(|(_, process)| !new.processes.contains(process));
        let mut lost = lost.map(|(rank, process)| (rank, life::has_ended(process))).peekable();
        lost.peek()?;
        if !self.closed.load(Ordering::Acquire) {
            return Some("a communicator that has a fault or a lost rank still has it: destroy that first".to_owned());
        }
        let (rank, (_, pid)) = lost.find(|(_, (ended, _))| !ended)?;
        let process = pid.map_or(String::new(), |pid| format!(", process {pid}"));
        Some(format!(
            "rank {rank} of an earlier communicator{process}, which was left out, has mapped it and is not known to have \
             ended: end that process, or take other memory"
        ))
    }
}

/// The communicators in whose windows memory was, and that have not released it in an orderly way.
#[derive(Debug, Default)]
pub struct Exposure(Mutex<Vec<Arc<Sharers>>>);

impl Exposure {
    /// Registers processes that will receive the key of the memory.
    ///
    /// # Errors
    /// [`Quarantined`] if other processes may still write to it.
    pub fn add(&self, new: &Arc<Sharers>) -> Result<(), Quarantined> {
        let mut all = lock(&self.0);
        if let Some(reason) = all.iter().find_map(|sharers| sharers.objection(new)) {
            return Err(Quarantined { reason });
        }
        // Communicators that a fault has ended can be forgotten now: none of their processes may still write and is not
        // in `new`.
        all.retain(|sharers| sharers.board.is_whole() || !sharers.closed.load(Ordering::Acquire));
        if !all.iter().any(|sharers| Arc::ptr_eq(sharers, new)) {
            all.push(new.clone());
        }
        Ok(())
    }

    /// Notes that all ranks of the communicator have released the memory.
    pub fn remove(&self, sharers: &Arc<Sharers>) {
        lock(&self.0).retain(|other| !Arc::ptr_eq(other, sharers));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::process;
    use gin_abi::{Fault, FaultKind, Operation};

    /// Returns a process that is alive. Its socket is this process's, because it was never asked.
    fn alive() -> Process {
        let device: Arc<dyn crate::Device> = crate::virt::VirtualDevice::memory_only(0);
        crate::share::describe(&*device).unwrap();
        process()
    }

    fn sharers(processes: &[Process]) -> Arc<Sharers> {
        Sharers::new(Arc::new(Board::new(processes.len() as u32)), processes.to_vec())
    }

    fn end(sharers: &Sharers) {
        sharers.board.post(0, Fault::new(FaultKind::PeerLost, Operation::None).with_peer(1));
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
        // The program decides about two communicators at a time.
        exposure.add(&sharers(&[other])).unwrap();
        end(&first);
        assert!(refused(&exposure, &sharers(&[other])).contains("destroy"));
        first.close();
        assert!(refused(&exposure, &sharers(&[other])).contains("rank 1"));
        // The process is a rank again, or all ranks have released the memory.
        exposure.add(&sharers(&[here, other])).unwrap();
        exposure.remove(&first);
        exposure.add(&sharers(&[other])).unwrap();
        // A process that has ended writes nothing.
        let exposure = Exposure::default();
        let first = sharers(&[other, gone]);
        exposure.add(&first).unwrap();
        end(&first);
        first.close();
        exposure.add(&sharers(&[other])).unwrap();
    }
}
