// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernels that stay, such as the engine of a software NIC.
//!
//! The driver waits for running kernels when it frees memory, loads a module or needs more local memory for a launch. A
//! kernel that stays would make it wait for ever. So its owner registers it here, and it is asked to park first. A
//! program without such a kernel pays one branch a launch.

use super::launches::{Launch, Running, State, with};
use crate::GpuError;
use crate::resident::Resident;
use std::collections::BTreeMap;
use std::sync::Weak;
use std::time::{Duration, Instant};

/// How long a kernel may take to park.
const PARKING: Duration = Duration::from_millis(100);

/// How long a launch waits for a parked kernel to run again.
const COMING_BACK: Duration = Duration::from_secs(2);

/// A kernel that stays until it is asked to park.
#[derive(Debug)]
struct Stays {
    /// The device object that launches it, and nothing else.
    owner: u64,
    resident: Weak<dyn Resident>,
    /// GPU and shape of its last launch.
    room: Option<(usize, u64, u64)>,
}

/// The kernels that stay, and what is known of launches beside them.
#[derive(Debug, Default)]
pub(super) struct Residents {
    stays: Vec<Stays>,
    /// By GPU: most local memory of a thread that a launch has asked for.
    local: BTreeMap<usize, u32>,
}

/// How long a launch has waited for parked kernels.
#[derive(Debug, Default)]
pub(super) struct ComingBack(Option<Instant>);

impl ComingBack {
    pub(super) fn nap(&self) {
        std::thread::sleep(Duration::from_micros(20));
    }
}

impl Residents {
    /// Returns whether this device object launches a kernel that stays.
    pub(super) fn launches(&self, owner: u64) -> bool {
        self.stays.iter().any(|stays| stays.owner == owner)
    }

    /// Notes GPU and shape of a launch, if it is of a kernel that stays.
    pub(super) fn launched(&mut self, owner: u64, room: (usize, u64, u64)) {
        if let Some(stays) = self.stays.iter_mut().find(|stays| stays.owner == owner) {
            stays.room = Some(room);
        }
    }

    /// Returns the shapes of parked kernels that will run again on GPU `ordinal`, but for that which `asks` launches:
    /// blocks, and how many of them one processor holds.
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

    /// Returns whether a launch has to wait. A cooperative launch waits until the kernels that stay on its GPU run: its
    /// blocks are spread over all free processors, which would leave no whole one to a kernel that comes later.
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
        let reason = format!("a kernel that stays has not come back within {COMING_BACK:?}");
        Err(GpuError::Driver { context: "launch a kernel", reason })
    }
}

impl State {
    /// Asks kernels that stay, of those GPUs, to park. Returns whether they have.
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
            // Again and again, as its owner may be about to launch it.
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

    /// Refuses a launch while kernels that stay are held. Parks them for a launch that needs more local memory than any
    /// before, because the driver then waits for all kernels.
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
                "it needs {} bytes of local memory a thread, more than any before it, and a kernel that stays has not \
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

/// Registers a kernel: what this device object launches from now on stays until it is asked to park.
pub(super) fn keep(owner: u64, resident: Weak<dyn Resident>) {
    with(|state| {
        let stays = Stays { owner, resident, room: None };
        state.residents.get_or_insert_default().stays.push(stays);
    });
}

/// Keeps kernels that stay from running.
#[derive(Debug)]
pub(super) struct Hold(());

impl Hold {
    /// Until this is dropped. Kernels that have not parked in time run on.
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
