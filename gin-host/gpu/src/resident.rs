// SPDX-License-Identifier: MIT OR Apache-2.0
//! Resident kernels, such as the engine of a software NIC.

use std::fmt;

/// A resident kernel. It ends when it is asked to park, and its owner launches it again.
///
/// A device that cannot free memory or unload modules while a kernel runs asks when no other kernel runs. The owner
/// launches by a device object that launches nothing else, so the device recognises the kernel.
pub trait Resident: Send + Sync + fmt::Debug {
    /// Asks the kernel to end soon. The device may call it repeatedly, and while it holds locks.
    fn ask_to_park(&self);

    /// Returns whether its SMs stay reserved for it while it does not run.
    fn keeps_room(&self) -> bool;
}
