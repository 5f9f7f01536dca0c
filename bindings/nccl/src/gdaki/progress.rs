// SPDX-License-Identifier: MIT OR Apache-2.0
//! Steps of the engine, by NCCL's progress threads.

use crate::abi::CUDA_ERROR;
use crate::failure::Failure;
use crate::log;
use gin_gpu::lock;
use gin_soft_nic_host::{Progress, SoftFabric};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The steps of one call. More would keep the thread from the other communicators of its process.
const STEPS: u32 = 256;
/// The time without work after which completed writes become visible without a cause, as with hardware.
const DELIVERY: Duration = Duration::from_millis(1);

/// The state of the progress threads of a communicator.
#[derive(Debug, Default)]
pub(super) struct Idle {
    /// The time of the first call without work; `None` after work, and once writes are delivered.
    since: Mutex<Option<Instant>>,
    has_warned: Mutex<bool>,
}

impl Idle {
    /// Steps the engine.
    pub(super) fn progress(&self, fabric: &SoftFabric) -> Result<(), Failure> {
        let mut has_moved = false;
        for _ in 0..STEPS {
            if fabric.step() == Progress::Idle {
                return self.rest(fabric, has_moved);
            }
            has_moved = true;
        }
        *lock(&self.since) = Some(Instant::now());
        Ok(())
    }

    /// Delivers writes after a while without work, and looks for failures.
    fn rest(&self, fabric: &SoftFabric, has_moved: bool) -> Result<(), Failure> {
        if let Some(reason) = fabric.failure() {
            return Err(Failure::new(CUDA_ERROR, format!("the software NIC has stopped: {reason}")));
        }
        let mut since = lock(&self.since);
        if has_moved {
            *since = Some(Instant::now());
        } else if since.is_some_and(|since| since.elapsed() > DELIVERY) {
            *since = None;
            fabric.deliver();
        }
        drop(since);
        self.warn(fabric);
        Ok(())
    }

    /// Logs the first mistake of device code. Its queue pair is broken, so `queryLastError` reports it as well.
    fn warn(&self, fabric: &SoftFabric) {
        let mut has_warned = lock(&self.has_warned);
        if let (false, (Some(first), _)) = (*has_warned, fabric.violations()) {
            *has_warned = true;
            let (kind, queue, expected, seen) = (first.kind, first.queue, first.expected, first.seen);
            log::warn(&format!(
                "queue pair {queue} is broken, because device code did what no NIC allows: {kind:?}, expected \
                 {expected}, found {seen}"
            ));
        }
    }
}
