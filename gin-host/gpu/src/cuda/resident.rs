// SPDX-License-Identifier: MIT OR Apache-2.0
//! Resident kernels, such as the engine of a software NIC.
//!
//! The driver waits for running kernels when it frees memory, loads a module or needs more local memory for a launch.
//! It would wait for ever for a resident kernel. So the kernel's owner registers it here, and it is asked to park
//! first. A program without such a kernel pays one branch per launch.

use super::launches::{Launch, State, with_each};
use crate::GpuError;
use std::time::{Duration, Instant};

/// The time that a kernel has to park.
const PARKING: Duration = Duration::from_millis(100);

/// The time for which a launch waits for a parked kernel to run again.
const COMING_BACK: Duration = Duration::from_secs(2);

impl State {
    /// Returns whether this device object launches a resident kernel.
    pub(super) fn is_resident(&self, owner: u64) -> bool {
        self.residents.iter().any(|stays| stays.owner == owner)
    }

    /// Returns the shapes of parked kernels that will run again on GPU `ordinal`, except the kernel that `asks`
    /// launches: blocks, and how many of them one SM holds.
    pub(super) fn away(&self, ordinal: usize, asks: Option<u64>) -> impl Iterator<Item = (u64, u64)> {
        let away = self.residents.iter().filter(move |stays| {
            let runs = self.running.iter().any(|running| running.owner == stays.owner);
            Some(stays.owner) != asks && !runs && stays.resident.upgrade().is_some_and(|resident| resident.keeps_room())
        });
        let there = away.filter_map(|stays| stays.room).filter(move |(there, ..)| *there == ordinal);
        there.map(|(_, blocks, per_sm)| (blocks, per_sm))
    }

    /// Returns whether a launch, which has waited since `since`, must wait. A cooperative launch waits until the
    /// resident kernels of its GPU run. Otherwise its blocks would spread over all free SMs and leave no whole
    /// one to a resident kernel that is launched later.
    ///
    /// # Errors
    /// [`GpuError::Driver`] after 2 s.
    pub(super) fn must_wait(&self, launch: &Launch<'_>, since: &mut Option<Instant>) -> Result<bool, GpuError> {
        if !launch.is_cooperative() || self.away(launch.context.ordinal, Some(launch.owner)).next().is_none() {
            return Ok(false);
        }
        if since.get_or_insert_with(Instant::now).elapsed() <= COMING_BACK {
            return Ok(true);
        }
        let reason = format!("a resident kernel has not come back within {COMING_BACK:?}");
        Err(GpuError::Driver { context: "launch a kernel", reason })
    }

    /// Asks the resident kernels of these GPUs to park. Returns whether they have parked.
    pub(super) fn park(&mut self, of: impl Fn(usize) -> bool) -> bool {
        let start = Instant::now();
        loop {
            if self.residents.is_empty() {
                return true;
            }
            self.residents.retain(|stays| stays.resident.strong_count() > 0);
            self.reap();
            let running = self.running.iter().filter(|running| of(running.ordinal));
            let owners: Vec<u64> = running.map(|running| running.owner).collect();
            let mut any = false;
            // Asked repeatedly, because the owner may be about to launch it.
            for stays in self.residents.iter().filter(|stays| owners.contains(&stays.owner)) {
                if let Some(resident) = stays.resident.upgrade() {
                    resident.ask_to_park();
                    any = true;
                }
            }
            if !any || start.elapsed() > PARKING {
                return !any;
            }
            std::thread::yield_now();
        }
    }

    /// Refuses a launch of a resident kernel while these are held. Parks them for a launch that needs more local memory
    /// than any before, because the driver then waits for all kernels.
    ///
    /// # Errors
    /// [`GpuError::Parked`]; [`GpuError::Driver`] if a kernel does not park.
    pub(super) fn make_way(&mut self, launch: &Launch<'_>) -> Result<(), GpuError> {
        let ordinal = launch.context.ordinal;
        if self.residents.is_empty() && self.local.is_empty() {
            // The program has no resident kernels.
            return Ok(());
        }
        if self.holds > 0 && self.is_resident(launch.owner) {
            return Err(GpuError::Parked { device: launch.context.full_name() });
        }
        let known = self.local.get(&ordinal).copied().unwrap_or(0);
        let local = launch.local();
        if local > known && !self.park(|gpu| gpu == ordinal) {
            let reason = format!(
                "it needs {} bytes of local memory a thread, more than any before it, and a resident kernel has not \
                 parked within {PARKING:?}",
                local
            );
            return Err(GpuError::Driver { context: "launch a kernel", reason });
        }
        self.local.insert(ordinal, known.max(local));
        Ok(())
    }
}

/// Keeps resident kernels from running, as long as this is alive.
#[derive(Debug)]
pub(super) struct Hold(());

impl Hold {
    /// Parks the resident kernels. Kernels that have not parked in time continue.
    pub(super) fn new() -> Self {
        with_each(|state| {
            state.holds += 1;
            state.park(|_| true);
        });
        Self(())
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        with_each(|state| state.holds -= 1);
    }
}
