// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where workloads run: what `--device` comes to.

use super::gpus::{self, Gpus};
use crate::cli::{Device, Options, Refused};

/// Where a workload runs.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    /// Virtual GPUs, one for each rank.
    Virtual,
    /// NVIDIA GPUs, which ranks share where there are fewer.
    Cuda(Gpus),
}

impl Place {
    /// The same for one process of a job, by its number among the `ranks` ranks of its host.
    pub(crate) fn of_process(self, rank: u32, ranks: u32) -> Self {
        match self {
            Self::Virtual => Self::Virtual,
            Self::Cuda(gpus) => Self::Cuda(gpus.of_process(rank, ranks)),
        }
    }

    /// As `--device` names it.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Virtual => "virtual",
            Self::Cuda(_) => "cuda",
        }
    }
}

/// Where workloads run, and why there, if that needs a word.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    /// One place after the other.
    pub all: Vec<Place>,
    /// For people.
    pub note: Option<String>,
}

/// Returns the devices that `--device` chooses. `every`: where there is a choice, all kinds of devices are wanted.
///
/// # Errors
/// `--device cuda` cannot be had, with the reason and what can be.
pub(crate) fn places(options: &Options, every: bool) -> Result<Places, Refused> {
    decide(options, every, gpus::find)
}

/// Where something runs that is no workload, and why there, if that needs a word.
///
/// # Errors
/// `--device cuda` cannot be had, with the reason and what can be.
pub(crate) fn one_place(device: Device) -> Result<(Place, Option<String>), Refused> {
    match (device, gpus::find) {
        (Device::Virtual, _) => Ok((Place::Virtual, None)),
        (Device::Cuda | Device::Auto, find) => match (find(), device) {
            (Ok(gpus), Device::Auto) => {
                let note = format!("--device auto took {}", gpus.text());
                Ok((Place::Cuda(gpus), Some(note)))
            }
            (Ok(gpus), _) => Ok((Place::Cuda(gpus), None)),
            (Err(reason), Device::Auto) => {
                Ok((Place::Virtual, Some(format!("--device auto took the virtual GPU: {reason}"))))
            }
            (Err(reason), _) => Err(Refused(format!("--device cuda: {reason}; use --device virtual"))),
        },
    }
}

fn decide(options: &Options, every: bool, find: impl FnOnce() -> Result<Gpus, String>) -> Result<Places, Refused> {
    let virtual_only = |note: Option<String>| Ok(Places { all: vec![Place::Virtual], note });
    match options.device {
        Device::Virtual => virtual_only(None),
        Device::Cuda => {
            if let Some(option) = of_virtual_gpus(options) {
                return Err(Refused(format!(
                    "{option}: only the virtual GPU has it; leave it out, or use --device virtual"
                )));
            }
            match find() {
                Ok(gpus) => Ok(Places { all: vec![Place::Cuda(gpus)], note: None }),
                Err(reason) => Err(Refused(format!("--device cuda: {reason}; use --device virtual"))),
            }
        }
        Device::Auto => {
            if let Some(option) = of_virtual_gpus(options) {
                return virtual_only(Some(format!(
                    "--device auto took the virtual GPU: only that has {option}, which was given"
                )));
            }
            match find() {
                Ok(gpus) if every => {
                    let note = format!("--device auto took both: {}", gpus.text());
                    Ok(Places { all: vec![Place::Virtual, Place::Cuda(gpus)], note: Some(note) })
                }
                Ok(gpus) => {
                    let note = format!("--device auto took {}", gpus.text());
                    Ok(Places { all: vec![Place::Cuda(gpus)], note: Some(note) })
                }
                Err(reason) => virtual_only(Some(format!("--device auto took the virtual GPU: {reason}"))),
            }
        }
    }
}

/// The first option given that real GPUs do not have.
fn of_virtual_gpus(options: &Options) -> Option<&'static str> {
    let given = [
        (options.mode.is_some(), "--mode"),
        (options.seed.is_some(), "--seed"),
        (options.resident_blocks.is_some(), "--resident-blocks"),
    ];
    given.into_iter().find_map(|(given, name)| given.then_some(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Mode, default_options};

    fn options(device: Device) -> Options {
        Options { device, ..default_options() }
    }

    fn names(options: &Options, every: bool, found: Result<Gpus, String>) -> Vec<&'static str> {
        decide(options, every, || found).unwrap().all.iter().map(Place::name).collect()
    }

    fn two() -> Result<Gpus, String> {
        Ok(Gpus::for_tests(2))
    }

    fn none() -> Result<Gpus, String> {
        Err("no CUDA driver found: there is no libcuda".to_owned())
    }

    #[test]
    fn a_choice_falls_on_gpus_where_there_are_any_and_the_demo_takes_all_kinds() {
        let auto = options(Device::Auto);
        assert_eq!(names(&auto, false, two()), ["cuda"]);
        assert_eq!(names(&auto, true, two()), ["virtual", "cuda"]);
        assert_eq!(names(&auto, true, none()), ["virtual"]);
        let note = decide(&auto, false, none).unwrap().note.unwrap();
        assert_eq!(note, "--device auto took the virtual GPU: no CUDA driver found: there is no libcuda");
        assert_eq!(names(&options(Device::Virtual), true, two()), ["virtual"]);
        assert_eq!(names(&options(Device::Cuda), true, two()), ["cuda"]);
    }

    #[test]
    fn what_is_asked_for_and_not_there_is_refused_with_the_reason_and_advice() {
        let Refused(text) = decide(&options(Device::Cuda), false, none).unwrap_err();
        assert!(text.starts_with("--device cuda: no CUDA driver found") && text.ends_with("use --device virtual"));
    }

    #[test]
    fn options_of_the_virtual_gpu_choose_it_and_are_refused_for_others() {
        type Change = (&'static str, fn(&mut Options));
        let changes: [Change; 3] = [
            ("--mode", |options| options.mode = Some(Mode::Seeded)),
            ("--seed", |options| options.seed = Some(1)),
            ("--resident-blocks", |options| options.resident_blocks = Some(4)),
        ];
        for (name, change) in changes {
            let (mut auto, mut cuda) = (options(Device::Auto), options(Device::Cuda));
            change(&mut auto);
            change(&mut cuda);
            let places = decide(&auto, true, two).unwrap();
            assert!(matches!(places.all[..], [Place::Virtual]) && places.note.unwrap().contains(name));
            let Refused(text) = decide(&cuda, false, two).unwrap_err();
            assert!(text.starts_with(name) && text.contains("--device virtual"), "{text}");
        }
    }
}
