// SPDX-License-Identifier: MIT OR Apache-2.0
//! The devices of a run, which `--device` chooses.

use super::gpus::{self, Gpus};
use crate::cli::{DeviceChoice, Options, Refused};

/// The kind of device that a workload runs on.
#[derive(Clone, Debug)]
pub enum RunDevice {
    /// Virtual GPUs, one for each rank.
    Virtual,
    /// NVIDIA GPUs. Ranks share them if there are fewer GPUs than ranks.
    Cuda(Gpus),
}

impl RunDevice {
    /// Returns the devices for one process of a job: `rank` is its number among the `ranks` ranks of its host.
    pub(crate) fn of_process(self, rank: u32, ranks: u32) -> Self {
        match self {
            Self::Virtual => Self::Virtual,
            Self::Cuda(gpus) => Self::Cuda(gpus.of_process(rank, ranks)),
        }
    }

    /// Returns its name as a value of `--device`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Virtual => "virtual",
            Self::Cuda(_) => "cuda",
        }
    }
}

/// The devices of a run, and a note on how they were chosen.
#[derive(Clone, Debug)]
pub(crate) struct RunDevices {
    /// The devices, in the order of the runs.
    pub all: Vec<RunDevice>,
    /// A note for people on the choice; `None` if the arguments made it.
    pub note: Option<String>,
}

/// Returns the devices that `--device` chooses. With `every`, `auto` chooses all available kinds of devices.
///
/// # Errors
/// Refuses `--device cuda` without a usable GPU; the text gives the reason and an alternative.
pub(crate) fn run_devices(options: &Options, every: bool) -> Result<RunDevices, Refused> {
    decide(options, every, gpus::find)
}

/// Returns the device of a benchmark, and a note if `auto` chose it.
///
/// # Errors
/// Refuses `--device cuda` without a usable GPU; the text gives the reason and an alternative.
pub fn choose_one(choice: &DeviceChoice) -> Result<(RunDevice, Option<String>), Refused> {
    let numbers = match choice {
        DeviceChoice::Virtual => return Ok((RunDevice::Virtual, None)),
        DeviceChoice::Cuda(numbers) => Some(numbers),
        DeviceChoice::Auto => None,
    };
    match (gpus::find()?, numbers) {
        (Ok((gpus, _)), Some(numbers)) => Ok((RunDevice::Cuda(gpus.only(numbers)?), None)),
        (Ok((gpus, text)), None) => Ok((RunDevice::Cuda(gpus), Some(format!("--device auto took {text}")))),
        (Err(reason), None) => Ok((RunDevice::Virtual, Some(format!("--device auto took the virtual GPU: {reason}")))),
        (Err(reason), Some(_)) => Err(Refused(format!("--device cuda: {reason}; use --device virtual"))),
    }
}

/// The outcome of [`gpus::find`].
type Find = Result<Result<(Gpus, String), String>, Refused>;

fn decide(options: &Options, every: bool, find: impl FnOnce() -> Find) -> Result<RunDevices, Refused> {
    let virtual_only = |note: Option<String>| Ok(RunDevices { all: vec![RunDevice::Virtual], note });
    match &options.device {
        DeviceChoice::Virtual => virtual_only(None),
        DeviceChoice::Cuda(numbers) => {
            if let Some(option) = of_virtual_gpus(options) {
                return Err(Refused(format!(
                    "{option}: only the virtual GPU has this option; leave it out, or use --device virtual"
                )));
            }
            match find()? {
                Ok((gpus, _)) => Ok(RunDevices { all: vec![RunDevice::Cuda(gpus.only(numbers)?)], note: None }),
                Err(reason) => Err(Refused(format!("--device cuda: {reason}; use --device virtual"))),
            }
        }
        DeviceChoice::Auto => {
            if let Some(option) = of_virtual_gpus(options) {
                return virtual_only(Some(format!(
                    "--device auto took the virtual GPU: only that has {option}, which was given"
                )));
            }
            match find()? {
                Ok((gpus, text)) if every => {
                    let note = format!("--device auto took both: {text}");
                    Ok(RunDevices { all: vec![RunDevice::Virtual, RunDevice::Cuda(gpus)], note: Some(note) })
                }
                Ok((gpus, text)) => {
                    let note = format!("--device auto took {text}");
                    Ok(RunDevices { all: vec![RunDevice::Cuda(gpus)], note: Some(note) })
                }
                Err(reason) => virtual_only(Some(format!("--device auto took the virtual GPU: {reason}"))),
            }
        }
    }
}

/// Returns the first given option that real GPUs do not support.
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

    fn all_gpus() -> DeviceChoice {
        DeviceChoice::Cuda(Vec::new())
    }

    fn options(device: DeviceChoice) -> Options {
        Options { device, ..default_options() }
    }

    fn names(options: &Options, every: bool, found: Find) -> Vec<&'static str> {
        decide(options, every, || found).unwrap().all.iter().map(RunDevice::name).collect()
    }

    fn two() -> Find {
        Ok(Ok((Gpus::for_tests(2), "2 x Some GPU".to_owned())))
    }

    fn none() -> Find {
        Ok(Err("no CUDA driver found: there is no libcuda".to_owned()))
    }

    #[test]
    fn gpus_that_cannot_be_used_are_refused_and_not_replaced_by_virtual_ones() {
        for device in [DeviceChoice::Auto, all_gpus()] {
            let unusable = || Err(Refused("there are GPUs that gin cannot use".to_owned()));
            let Refused(text) = decide(&options(device), true, unusable).unwrap_err();
            assert_eq!(text, "there are GPUs that gin cannot use");
        }
    }

    #[test]
    fn a_choice_falls_on_gpus_where_there_are_any_and_the_demo_takes_all_kinds() {
        let auto = options(DeviceChoice::Auto);
        assert_eq!(names(&auto, false, two()), ["cuda"]);
        assert_eq!(names(&auto, true, two()), ["virtual", "cuda"]);
        assert_eq!(names(&auto, true, none()), ["virtual"]);
        let note = decide(&auto, false, none).unwrap().note.unwrap();
        assert_eq!(note, "--device auto took the virtual GPU: no CUDA driver found: there is no libcuda");
        assert_eq!(names(&options(DeviceChoice::Virtual), true, two()), ["virtual"]);
        assert_eq!(names(&options(all_gpus()), true, two()), ["cuda"]);
    }

    #[test]
    fn gpus_are_chosen_by_number_and_numbers_that_do_not_exist_are_refused_with_those_that_do() {
        let chosen = |numbers: &[usize]| {
            let found = decide(&options(DeviceChoice::Cuda(numbers.to_vec())), false, two);
            found.map(|found| format!("{:?}", found.all[0])).map_err(|Refused(text)| text)
        };
        assert!(chosen(&[1]).unwrap().contains("ordinals: [1]"), "{:?}", chosen(&[1]));
        assert!(chosen(&[1, 0]).unwrap().contains("ordinals: [1, 0]"));
        assert!(chosen(&[]).unwrap().contains("ordinals: [0, 1]"));
        assert_eq!(chosen(&[0, 2]).unwrap_err(), "--device cuda:0,2: there is no GPU 2; there are 0 to 1");
    }

    #[test]
    fn what_is_asked_for_and_not_there_is_refused_with_the_reason_and_advice() {
        let Refused(text) = decide(&options(all_gpus()), false, none).unwrap_err();
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
            let (mut auto, mut cuda) = (options(DeviceChoice::Auto), options(all_gpus()));
            change(&mut auto);
            change(&mut cuda);
            let devices = decide(&auto, true, two).unwrap();
            assert!(matches!(devices.all[..], [RunDevice::Virtual]) && devices.note.unwrap().contains(name));
            let Refused(text) = decide(&cuda, false, two).unwrap_err();
            assert!(text.starts_with(name) && text.contains("--device virtual"), "{text}");
        }
    }
}
