// SPDX-License-Identifier: MIT OR Apache-2.0
//! Waiting and time, for ranks that are threads and for ranks that are coroutines of a scheduler.

/// Waits until `condition` holds.
///
/// In a coroutine of the virtual world others run meanwhile; on a plain thread it naps. Returns before `condition` holds
/// only in a destructor, while the world is being ended.
#[track_caller]
pub fn wait_until(condition: impl FnMut() -> bool) {
    gin_virtual::block_on(condition);
}

/// Nanoseconds on the clock that deadlines are measured with: virtual in a simulated world, else real.
pub fn clock_ns() -> u64 {
    gin_virtual::clock_ns()
}
