// SPDX-License-Identifier: MIT OR Apache-2.0
//! Resident kernels, such as the engine of a software NIC.
//!
//! The driver waits for running kernels when it frees memory, loads a module or needs more local memory for a launch.
//! It would wait for ever for a resident kernel. So the kernel's owner registers it here, and it is asked to park
//! first. A program without such a kernel pays one branch per launch.

use super::launches::{Launch, Running, State, with};
use crate::GpuError;
use crate::resident::Resident;
use std::collections::BTreeMap;
use std::sync::Weak;
use std::time::{Duration, Instant};

/// The time that a kernel has to park.
const PARKING: Duration = Duration::from_millis(100);

/// The time for which a launch waits for a parked kernel to run again.
const COMING_BACK: Duration = Duration::from_secs(2);

/// A kernel that runs until it is asked to park.
#[derive(Debug)]
struct Stays {
    /// The device object that launches it and nothing else.
    owner: u64,
    resident: Weak<dyn Resident>,
    /// The GPU and the shape of its last launch.
    room: Option<(usize, u64, u64)>,
}

/// The resident kernels, and facts about launches beside them.
#[derive(Debug, Default)]
pub(super) struct Residents {
    stays: Vec<Stays>,
    /// By GPU: the most local memory of a thread that a launch has needed.
    local: BTreeMap<usize, u32>,
}

/// The wait of a launch for parked kernels: its begin.
#[derive(Debug, Default)]
pub(super) struct ComingBack(Option<Instant>);

impl ComingBack {
    pub(super) fn nap(&self) {
        std::thread::sleep(Duration::from_micros(20));
    }
}

impl Residents {
    /// Returns whether this device object launches a resident kernel.
    pub(super) fn launches(&self, owner: u64) -> bool {
        self.stays.iter().any(|stays| stays.owner == owner)
    }

    /// Notes the GPU and the shape of a launch, if it is of a resident kernel.
    pub(super) fn launched(&mut self, owner: u64, room: (usize, u64, u64)) {
        if let Some(stays) = self.stays.iter_mut().find(|stays| stays.owner == owner) {
            stays.room = Some(room);
        }
    }

    /// Returns the shapes of parked kernels that will run again on GPU `ordinal`, except the kernel that `asks`
    /// launches: blocks, and how many of them one processor holds.
    pub(super) fn away(
        &self,
        running: &[Running],
        ordinal: usize,
        asks: Option<u64>,
    ) -> impl Iterator<Item = (u64, u64)> {
        let away = self.stays.iter().filter(move |stays| {
            let runs = running.iter().any(|running| running.owner == stays.owner);
            Some(stays.owner) != asks && !runs && stays.resident.upgrade().is_some_and(|resident| resident.keeps_room())
        });
        let there = away.filter_map(|stays| stays.room).filter(move |(there, ..)| *there == ordinal);
        there.map(|(_, blocks, per_processor)| (blocks, per_processor))
    }

    /// Returns whether a launch must wait. A cooperative launch waits until the resident kernels of its GPU run.
    /// Otherwise its blocks would spread over all free processors and leave no whole one to a resident kernel that is
    /// launched later.
    ///
    /// # Errors
    /// [`GpuError::Driver`] after 2 s.
    pub(super) fn must_wait(
        &self,
        running: &[Running],
        launch: &Launch<'_>,
        wait: &mut ComingBack,
    ) -> Result<bool, GpuError> {
        let asks = Some(launch.owner);
        if !launch.cooperative || self.away(running, launch.context.ordinal, asks).next().is_none() {
            return Ok(false);
        }
        if wait.0.get_or_insert_with(Instant::now).elapsed() <= COMING_BACK {
            return Ok(true);
        }
        let reason = format!("a resident kernel has not come back within {COMING_BACK:?}");
        Err(GpuError::Driver { context: "launch a kernel", reason })
    }
}

impl State {
    /// Asks the resident kernels of these GPUs to park. Returns whether they have parked.
    pub(super) fn park(&mut self, of: impl Fn(usize) -> bool) -> bool {
        let start = Instant::now();
        loop {
            let Some(residents) = &mut self.residents else { return true };
            residents.stays.retain(|stays| stays.resident.strong_count() > 0);
            self.reap();
            let running = self.running.iter().filter(|running| of(running.ordinal));
            let owners: Vec<u64> = running.map(|running| running.owner).collect();
            let Some(residents) = &self.residents else { return true };
            let mut any = false;
            // Asked repeatedly, because the owner may be about to launch it.
            for stays in residents.stays.iter().filter(|stays| owners.contains(&stays.owner)) {
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
        let Some(residents) = &self.residents else { return Ok(()) };
        if self.holds > 0 && residents.launches(launch.owner) {
            return Err(GpuError::Parked { device: launch.context.full_name() });
        }
        let known = residents.local.get(&ordinal).copied().unwrap_or(0);
        if launch.local > known && !self.park(|gpu| gpu == ordinal) {
            let reason = format!(
                "it needs {} bytes of local memory a thread, more than any before it, and a resident kernel has not \
                 parked within {PARKING:?}",
                launch.local
            );
            return Err(GpuError::Driver { context: "launch a kernel", reason });
        }
        if let Some(residents) = &mut self.residents {
            residents.local.insert(ordinal, known.max(launch.local));
        }
        Ok(())
    }
}

/// Registers a resident kernel: this device object launches it from now on.
pub(super) fn keep(owner: u64, resident: Weak<dyn Resident>) {
    with(|state| {
        let stays = Stays { owner, resident, room: None };
        state.residents.get_or_insert_default().stays.push(stays);
    });
}

/// Keeps resident kernels from running, as long as this is alive.
#[derive(Debug)]
pub(super) struct Hold(());

impl Hold {
    /// Parks the resident kernels. Kernels that have not parked in time continue.
    pub(super) fn new() -> Self {
        with(|state| {
            state.holds += 1;
            state.park(|_| true);
        });
        Self(())
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        with(|state| state.holds -= 1);
    }
}
