// SPDX-License-Identifier: MIT OR Apache-2.0
//! Resident kernels, such as the engine of a software NIC.

use crate::Device;
use std::fmt;
use std::sync::Weak;

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

/// Registers the kernel that `device` launches from now on as a resident one.
pub fn keep(device: &dyn Device, resident: Weak<dyn Resident>) {
    #[cfg(feature = "cuda")]
    if let Some(device) = device.downcast::<crate::cuda::CudaDevice>() {
        return crate::cuda::resident::keep(device, resident);
    }
    // No operation of a virtual GPU waits for its kernels.
    let _ = (device, resident);
}
