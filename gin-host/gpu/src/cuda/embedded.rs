// SPDX-License-Identifier: MIT OR Apache-2.0
//! The choice among the images of kernels that are embedded in a program.

use crate::{EmbeddedModules, GpuError};

/// Returns the images for a GPU of this compute capability (times 10), the best one first. A newer
/// architecture, up to the GPU's, comes before an older one, and machine code before PTX. The list ends with the first
/// PTX.
///
/// Machine code serves the GPUs of its major version. An image with instructions of a single architecture (`sm_90a`)
/// serves only that one.
pub(super) fn choose(embedded: EmbeddedModules, capability: u32) -> Vec<&'static [u8]> {
    let fits = embedded.iter().filter_map(|&(arch, image)| {
        let number = arch.strip_prefix("sm_")?;
        let only = number.strip_suffix('a');
        let version: u32 = only.unwrap_or(number).parse().ok()?;
        let is_code = is_machine_code(image);
        let fits = match only {
            Some(_) => version == capability,
            None => version <= capability && (!is_code || version / 10 == capability / 10),
        };
        fits.then_some(((version, only.is_some(), is_code), image))
    });
    let mut fits: Vec<_> = fits.collect();
    fits.sort_by_key(|(order, _)| std::cmp::Reverse(*order));
    let last = fits.iter().position(|((.., is_code), _)| !is_code).map_or(fits.len(), |place| place + 1);
    fits.into_iter().take(last).map(|(_, image)| image).collect()
}

/// Returns whether an image is machine code, which is an ELF file, and not PTX.
pub(super) fn is_machine_code(image: &[u8]) -> bool {
    image.starts_with(b"\x7fELF")
}

/// Returns the error for a GPU for which there is no image.
pub(super) fn no_image(embedded: EmbeddedModules, device: String, capability: u32) -> GpuError {
    let mut archs: Vec<&str> = embedded.iter().map(|(arch, _)| *arch).collect();
    archs.dedup();
    refused(device, format!("there are kernels for {}, and it is sm_{capability}", archs.join(", ")))
}

/// Returns the error of a module that a device cannot load, without a log.
pub(super) fn refused(device: String, reason: String) -> GpuError {
    GpuError::Module { device, reason, log: String::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_gets_the_newest_text_that_it_is_not_older_than() {
        let all: EmbeddedModules =
            &[("sm_80", b"80"), ("sm_90", b"90"), ("sm_90a", b"90a"), ("sm_100", b"100"), ("x", b"x")];
        for (capability, expected) in [
            (75, &[][..]),
            (80, &[b"80".as_slice()]),
            (89, &[b"80".as_slice()]),
            (90, &[b"90a".as_slice()]),
            (100, &[b"100".as_slice()]),
            (103, &[b"100".as_slice()]),
            (120, &[b"100".as_slice()]),
        ] {
            assert_eq!(choose(all, capability), expected, "sm_{capability}");
        }
        assert!(choose(&[("sm_90a", b"90a")], 100).is_empty());
    }

    #[test]
    fn machine_code_comes_before_ptx_on_gpus_of_its_major_version() {
        const CODE: &[u8] = b"\x7fELF code";
        let all: EmbeddedModules = &[("sm_80", b"80"), ("sm_80", CODE), ("sm_90", b"90"), ("sm_90", CODE)];
        assert_eq!(choose(all, 80), [CODE, b"80"]);
        assert_eq!(choose(all, 89), [CODE, b"80"]);
        assert_eq!(choose(all, 90), [CODE, b"90"]);
        assert_eq!(choose(all, 100), [b"90"]);
        // Newer PTX is better than older machine code.
        assert_eq!(choose(&[("sm_86", b"86"), ("sm_80", CODE)], 89), [b"86"]);
        assert_eq!(choose(&[("sm_90", CODE)], 90), [CODE]);
    }

    #[test]
    fn a_gpu_without_an_image_is_named_with_both_architectures() {
        let error =
            no_image(&[("sm_90", b""), ("sm_90", b"\x7fELF"), ("sm_100", b"")], "Some GPU (GPU 0)".to_owned(), 75)
                .to_string();
        assert!(error.contains("kernels for sm_90, sm_100") && error.contains("it is sm_75"), "{error}");
    }
}
