// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernels that stay, such as the engine of a software NIC.

use crate::Device;
use std::fmt;
use std::sync::Weak;

/// A kernel that stays, and ends when it is asked to; its owner launches it again.
///
/// A device that cannot free memory or unload modules while a kernel runs asks when nothing else does. The owner
/// launches by a device object that launches nothing else, so that the device knows the kernel.
pub trait Resident: Send + Sync + fmt::Debug {
    /// Asks the kernel to end soon. It may be called with locks of the device held, and again and again.
    fn ask_to_park(&self);

    /// Returns whether its processors are kept for it while it does not run.
    fn keeps_room(&self) -> bool;
}

/// Registers the kernel that `device` launches from now on as one that stays.
pub fn keep(device: &dyn Device, resident: Weak<dyn Resident>) {
    #[cfg(feature = "cuda")]
    if let Some(device) = device.downcast::<crate::cuda::CudaDevice>() {
        return device.keep_resident(resident);
    }
    // Nothing that a virtual GPU does waits for its kernels.
    let _ = (device, resident);
}
