// SPDX-License-Identifier: MIT OR Apache-2.0
//! The devices of the ranks of a job.

use crate::{Device, GpuError};
use std::sync::Arc;

/// Kernels for GPUs: pairs of architecture (`sm_90`) and PTX text or machine code, as `gin-build` writes them into a
/// program. A GPU loads machine code for its architecture if there is some, and otherwise the driver compiles PTX.
pub type EmbeddedModules = &'static [(&'static str, &'static [u8])];

/// Makes the device of a world rank; the arguments are the rank and the number of ranks.
type MakeDevice = Arc<dyn Fn(u32, u32) -> Result<Arc<dyn Device>, GpuError> + Send + Sync>;

/// A factory of the devices of ranks.
///
/// ```
/// use gin_gpu::{Device, Devices};
/// use gin_gpu::virt::VirtualDevice;
/// use std::sync::Arc;
///
/// let devices = Devices::new("virtual GPUs", |rank, _| {
///     let device: Arc<dyn Device> = VirtualDevice::memory_only(rank);
///     Ok(device)
/// });
/// assert_eq!(devices.device(3, 4)?.name(), "virtual GPU 3");
/// # Ok::<(), gin_gpu::GpuError>(())
/// ```
#[derive(Clone, derive_more::Debug)]
pub struct Devices {
    name: Arc<str>,
    #[debug(skip)]
    make: MakeDevice,
}

impl Devices {
    /// Makes a factory. `make` gets the world rank and the number of ranks; `name` is for people.
    pub fn new(
        name: &str,
        make: impl Fn(u32, u32) -> Result<Arc<dyn Device>, GpuError> + Send + Sync + 'static,
    ) -> Self {
        Self { name: name.into(), make: Arc::new(make) }
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Makes a new device object for the device that a world rank of `ranks` uses.
    ///
    /// # Errors
    /// An error of the device.
    pub fn device(&self, rank: u32, ranks: u32) -> Result<Arc<dyn Device>, GpuError> {
        (self.make)(rank, ranks)
    }
}

/// The GPUs that a job takes if it may choose.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Available {
    /// The name of each GPU, by number. Empty if there is none: then a job uses virtual GPUs.
    pub names: Vec<String>,
    /// The GPUs, or the reason why there is none, for people.
    pub text: String,
}

impl Available {
    /// Describes these GPUs by kind and number.
    pub fn gpus(names: Vec<String>) -> Self {
        let mut kinds: Vec<(&str, usize)> = Vec::new();
        for name in &names {
            match kinds.iter_mut().find(|(kind, _)| kind == name) {
                Some((_, count)) => *count += 1,
                None => kinds.push((name, 1)),
            }
        }
        let kinds: Vec<String> = kinds.iter().map(|(kind, count)| format!("{count} x {kind}")).collect();
        let text = kinds.join(", ");
        Self { names, text }
    }

    fn none(reason: impl ToString) -> Self {
        Self { names: Vec::new(), text: reason.to_string() }
    }
}

/// Returns the GPUs of this machine, after a check that each can run all of these kernels.
///
/// There is none without the feature `cuda`, if `CUDA_VISIBLE_DEVICES` hides all GPUs by an empty value or -1, and if
/// the system has no driver and shows this process no GPU.
///
/// # Errors
/// [`GpuError::Unusable`] if the system shows this process GPUs, but the driver does not start, is too old or shows
/// none, or there are no kernels for one of them.
pub fn available(kernels: &[EmbeddedModules]) -> Result<Available, GpuError> {
    #[cfg(feature = "cuda")]
    {
        let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        let ask = || {
            let found = crate::cuda::gpus()?;
            for gpu in &found {
                kernels.iter().try_for_each(|kernels| gpu.check(kernels))?;
            }
            Ok(found.into_iter().map(|gpu| gpu.name).collect())
        };
        // The device files of GPUs, and of all GPUs together under WSL.
        let shown = || (0..64).any(|gpu| exists(&format!("/dev/nvidia{gpu}"))) || exists("/dev/dxg");
        decide(visible.as_deref(), ask, shown)
    }
    #[cfg(not(feature = "cuda"))]
    {
        let _ = kernels;
        Ok(Available::none("gin was built without the feature `cuda` or `gpu`, so it supports no real GPUs"))
    }
}

#[cfg(feature = "cuda")]
fn exists(path: &str) -> bool {
    std::path::Path::new(path).exists()
}

/// Decides for [`available`]. `visible` is `CUDA_VISIBLE_DEVICES`; `shown` returns whether the system shows this
/// process a GPU.
#[cfg(any(feature = "cuda", test))]
fn decide(
    visible: Option<&str>,
    ask: impl FnOnce() -> Result<Vec<String>, GpuError>,
    shown: impl Fn() -> bool,
) -> Result<Available, GpuError> {
    if let Some(hides @ ("" | "-1")) = visible {
        return Ok(Available::none(format!("CUDA_VISIBLE_DEVICES is `{hides}`, which hides all GPUs")));
    }
    match ask() {
        Ok(names) => Ok(Available::gpus(names)),
        Err(error @ (GpuError::NoDriver { .. } | GpuError::DriverTooOld { .. } | GpuError::NoDevice { .. }))
            if !shown() =>
        {
            Ok(Available::none(error))
        }
        Err(error) => Err(GpuError::Unusable { reason: error.to_string() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn no_driver() -> Result<Vec<String>, GpuError> {
        Err(GpuError::NoDriver { reason: "there is no libcuda".to_owned() })
    }

    #[test]
    fn gpus_are_described_by_kind_and_number() {
        let names = ["A", "B", "A"].map(String::from).to_vec();
        let found = decide(None, || Ok(names), || true).unwrap();
        assert_eq!((found.names.len(), &*found.text), (3, "2 x A, 1 x B"));
    }

    #[test]
    fn a_machine_without_gpus_has_none_and_says_why() {
        let found = decide(None, no_driver, || false).unwrap();
        assert_eq!((found.names.len(), &*found.text), (0, "no CUDA driver found: there is no libcuda"));
    }

    #[test]
    fn gpus_that_cannot_be_used_are_an_error_with_the_cause_and_the_way_out() {
        let old = || Err(GpuError::DriverTooOld { found: "12.2".to_owned(), needed: "12.8".to_owned() });
        let unbuilt = || {
            let reason = "there are kernels for sm_90, and it is sm_80".to_owned();
            Err(GpuError::Module { device: "Some GPU (GPU 0)".to_owned(), reason, log: String::new() })
        };
        let text = |outcome: Result<Available, GpuError>| outcome.unwrap_err().to_string();
        for (text, cause) in [
            (text(decide(None, no_driver, || true)), "no libcuda"),
            (text(decide(None, old, || true)), "CUDA 12.2"),
            // A driver that shows a GPU is proof enough.
            (text(decide(Some("0"), unbuilt, || false)), "kernels for sm_90"),
        ] {
            assert!(text.contains(cause) && text.contains("set CUDA_VISIBLE_DEVICES to -1"), "{text}");
        }
    }

    #[test]
    fn hidden_gpus_are_not_asked_for() {
        for hides in ["", "-1"] {
            let found = decide(Some(hides), || panic!("asked"), || true).unwrap();
            assert!(found.names.is_empty() && found.text.contains("hides all GPUs"), "{found:?}");
        }
    }
}
