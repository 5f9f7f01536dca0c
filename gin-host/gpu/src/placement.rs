// SPDX-License-Identifier: MIT OR Apache-2.0
//! Chooses the CPUs of progress threads.
//!
//! A progress thread polls queues that a GPU writes and starts that GPU's copies. So it should run on the CPUs of
//! the GPU's socket. Linux names them under `/sys/bus/pci/devices`; without these names, threads run anywhere. A
//! program chooses by `WorldConfig::placement`. With [`Placement::Automatic`] the environment variable [`VARIABLE`]
//! decides.

use std::fs;
use std::io;
use std::path::Path;

/// The environment variable that chooses the CPUs of progress threads: `auto` (near the GPU), `any`, or a list of
/// CPUs as Linux writes it, such as `0-7,64`.
pub const VARIABLE: &str = "GIN_PROXY_CPUS";

/// The CPUs of progress threads.
///
/// ```
/// use gin_gpu::placement::{Locality, Placement, allowed_cpus};
///
/// let first = allowed_cpus()[0];
/// let chosen = Placement::Cpus(vec![first, 65_000]).choose(&Locality::default())?;
/// assert_eq!(chosen.cpus, Some(vec![first]));
/// # Ok::<(), gin_gpu::placement::PlacementError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Placement {
    /// By [`VARIABLE`]. Without it, near the GPU of the rank; anywhere if the system does not name the near CPUs.
    #[default]
    Automatic,
    /// On every CPU that the process may use.
    Anywhere,
    /// On these CPUs, by Linux's numbers. CPUs that the process may not use are left out.
    Cpus(Vec<usize>),
}

/// The neighbourhood of a device.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Locality {
    /// The NUMA node of the device, if there are several.
    pub numa_node: Option<u32>,
    /// The CPUs near the device, ascending; none if the system does not name them.
    pub cpus: Vec<usize>,
}

/// The chosen CPUs, and the reason.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ChosenCpus {
    /// The CPUs, ascending and at least one; `None` for no choice.
    pub cpus: Option<Vec<usize>>,
    /// The reason, for people.
    pub reason: String,
}

/// A placement that is not possible.
///
/// ```
/// use gin_gpu::placement::{Locality, Placement, PlacementError};
///
/// let error = Placement::Cpus(vec![65_000]).choose(&Locality::default()).unwrap_err();
/// assert!(matches!(error, PlacementError::NotAllowed { .. }));
/// ```
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// The variable has an invalid value.
    #[error("{VARIABLE}={value}: it is `auto`, `any`, or a list of CPUs such as 0-7,64")]
    Variable {
        /// The value.
        value: String,
    },
    /// The process may use none of the requested CPUs.
    #[error("progress threads should run on CPUs {asked}, but this process may use only {allowed}")]
    NotAllowed {
        /// The requested CPUs.
        asked: String,
        /// The allowed CPUs.
        allowed: String,
    },
}

impl Locality {
    /// Returns the locality of the PCI device at this address, such as `0000:18:00.0`.
    pub fn of_pci(address: &str) -> Self {
        Self::of_pci_in(Path::new("/sys"), address)
    }

    /// Does the same, with another folder instead of `/sys`.
    fn of_pci_in(sys: &Path, address: &str) -> Self {
        // The driver writes addresses in capitals.
        let address = address.trim().to_ascii_lowercase();
        let is_address = |byte: u8| byte.is_ascii_hexdigit() || byte == b':' || byte == b'.';
        if !address.contains(':') || !address.bytes().all(is_address) {
            return Self::default();
        }
        let device = sys.join("bus/pci/devices").join(address);
        let read = |file: &Path| fs::read_to_string(file).ok();
        // -1 where there is one node only.
        let node = read(&device.join("numa_node")).and_then(|text| text.trim().parse::<u32>().ok());
        let list = |file: &Path| read(file).and_then(|text| parse_cpus(&text)).filter(|cpus| !cpus.is_empty());
        let of_node = || list(&sys.join(format!("devices/system/node/node{}/cpulist", node?)));
        let cpus = list(&device.join("local_cpulist")).or_else(of_node).unwrap_or_default();
        Self { numa_node: node, cpus }
    }
}

/// The limit of CPU numbers; larger ones are refused.
const MAX_CPUS: usize = 1 << 16;

/// Reads a list of CPUs as Linux writes it: numbers and ranges between commas. A range may have a step
/// (`0-31:2/4`: the first two of each four). Returns ascending numbers without repetitions; `None` for any other text.
///
/// ```
/// use gin_gpu::placement::{parse_cpus, show_cpus};
/// assert_eq!(parse_cpus("4,0-2"), Some(vec![0, 1, 2, 4]));
/// assert_eq!(show_cpus(&[0, 1, 2, 4]), "0-2,4");
/// ```
pub fn parse_cpus(text: &str) -> Option<Vec<usize>> {
    let number = |text: &str| text.trim().parse::<usize>().ok().filter(|number| *number < MAX_CPUS);
    let mut cpus = Vec::new();
    for part in text.trim().split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let (range, step) = match part.split_once(':') {
            Some((range, step)) => (range, Some(step.split_once('/')?)),
            None => (part, None),
        };
        let (first, last) = match range.split_once('-') {
            Some((first, last)) => (number(first)?, number(last)?),
            None => (number(range)?, number(range)?),
        };
        let (used, group) = match step {
            Some((used, group)) => (number(used)?, number(group)?),
            None => (1, 1),
        };
        if first > last || used == 0 || used > group {
            return None;
        }
        cpus.extend((first..=last).filter(|cpu| (cpu - first) % group < used));
    }
    cpus.sort_unstable();
    cpus.dedup();
    Some(cpus)
}

/// Returns ascending CPUs as a list in Linux's form.
pub fn show_cpus(cpus: &[usize]) -> String {
    let ranges = cpus.chunk_by(|cpu, next| cpu + 1 == *next);
    let show = |range: &[usize]| match range {
        [first, .., last] => format!("{first}-{last}"),
        [cpu] => cpu.to_string(),
        [] => String::new(),
    };
    ranges.map(show).collect::<Vec<_>>().join(",")
}

/// Returns the CPUs that this thread may use, ascending; none if the system does not name them.
pub fn allowed_cpus() -> Vec<usize> {
    use rustix::thread::{CpuSet, sched_getaffinity};
    let Ok(set) = sched_getaffinity(None) else { return Vec::new() };
    (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()
}

impl Placement {
    /// Chooses the CPUs of a device's progress thread.
    ///
    /// # Errors
    /// [`PlacementError`]: the choice of the program or of [`VARIABLE`] is not possible.
    pub fn choose(&self, near: &Locality) -> Result<ChosenCpus, PlacementError> {
        let variable = std::env::var_os(VARIABLE).map(|value| value.to_string_lossy().into_owned());
        self.choose_among(near, &allowed_cpus(), variable.as_deref())
    }

    fn choose_among(
        &self,
        near: &Locality,
        allowed: &[usize],
        variable: Option<&str>,
    ) -> Result<ChosenCpus, PlacementError> {
        let anywhere = |reason: &str| Ok(ChosenCpus { cpus: None, reason: reason.to_owned() });
        let asked = |cpus: &[usize], reason: &str| {
            let usable = among(cpus, allowed);
            if usable.is_empty() {
                let (asked, allowed) = (show_cpus(cpus), show_cpus(allowed));
                return Err(PlacementError::NotAllowed { asked, allowed });
            }
            Ok(ChosenCpus { cpus: Some(usable), reason: reason.to_owned() })
        };
        match self {
            Self::Anywhere => return anywhere("the program asks for it"),
            Self::Cpus(cpus) => {
                let (mut cpus, reason) = (cpus.clone(), "the program asks for them");
                cpus.sort_unstable();
                cpus.dedup();
                return asked(&cpus, reason);
            }
            Self::Automatic => {}
        }
        match variable.map(str::trim) {
            None | Some("" | "auto") => {}
            Some("any") => return anywhere(&format!("{VARIABLE} asks for it")),
            Some(value) => {
                let unknown = || PlacementError::Variable { value: value.to_owned() };
                let cpus = parse_cpus(value).filter(|cpus| !cpus.is_empty()).ok_or_else(unknown)?;
                return asked(&cpus, &format!("{VARIABLE} asks for them"));
            }
        }
        if near.cpus.is_empty() {
            return anywhere("the system does not say which CPUs are near");
        }
        let usable = among(&near.cpus, allowed);
        if usable.is_empty() {
            return anywhere("the process may use none of the CPUs that are near");
        }
        let reason = match near.numa_node {
            Some(node) => format!("near the GPU, NUMA node {node}"),
            None => "near the GPU".to_owned(),
        };
        Ok(ChosenCpus { cpus: Some(usable), reason })
    }
}

fn among(cpus: &[usize], allowed: &[usize]) -> Vec<usize> {
    cpus.iter().copied().filter(|cpu| allowed.contains(cpu)).collect()
}

/// Runs `start` while this thread may use only `cpus`. Threads that it starts inherit that and keep it.
///
/// # Errors
/// The system's error if it refuses that; `start` has not run then.
#[doc(hidden)]
pub fn started_on<T>(cpus: Option<&[usize]>, start: impl FnOnce() -> T) -> io::Result<T> {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let Some(cpus) = cpus else { return Ok(start()) };
    let before = sched_getaffinity(None)?;
    let mut set = CpuSet::new();
    for cpu in cpus.iter().filter(|cpu| **cpu < CpuSet::MAX_CPU) {
        set.set(*cpu);
    }
    sched_setaffinity(None, &set)?;
    let result = start();
    // The old set was permitted before. A thread that stays on few CPUs is slower, but correct.
    let _ = sched_setaffinity(None, &before);
    Ok(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_as_linux_writes_them_and_nothing_else_is() {
        let all = |range: std::ops::Range<usize>| Some(range.collect::<Vec<_>>());
        assert_eq!(parse_cpus("0-3\n"), all(0..4));
        assert_eq!(parse_cpus("7"), Some(vec![7]));
        assert_eq!(parse_cpus("0-1,8-9,4,8"), Some(vec![0, 1, 4, 8, 9]));
        assert_eq!(parse_cpus(" 3 , 1 "), Some(vec![1, 3]));
        assert_eq!(parse_cpus("0-7:2/4"), Some(vec![0, 1, 4, 5]));
        assert_eq!(parse_cpus("\n"), Some(vec![]));
        for wrong in ["x", "3-1", "-1", "1-", "0-4:3", "0-4:0/2", "0-4:3/2", "0-99999999999", "70000", "1-2-3"] {
            assert_eq!(parse_cpus(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn lists_are_shown_as_linux_writes_them() {
        for text in ["", "5", "0-3", "0-3,8,10-11"] {
            assert_eq!(show_cpus(&parse_cpus(text).unwrap()), text);
        }
    }

    /// Makes a folder like `/sys` with one PCI device.
    fn sys(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (file, text) in files {
            let path = folder.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        folder
    }

    #[test]
    fn what_is_near_a_device_is_read_from_its_folder_or_from_its_nodes() {
        const LIST: &str = "bus/pci/devices/0000:ab:00.0/local_cpulist";
        const NODE: &str = "bus/pci/devices/0000:ab:00.0/numa_node";
        let near = |files: &[(&str, &str)]| Locality::of_pci_in(sys(files).path(), "0000:AB:00.0");
        let found = |numa_node, cpus: &[usize]| Locality { numa_node, cpus: cpus.to_vec() };
        assert_eq!(near(&[(LIST, "4-6\n"), (NODE, "1\n")]), found(Some(1), &[4, 5, 6]));
        assert_eq!(near(&[(LIST, "0-1\n"), (NODE, "-1\n")]), found(None, &[0, 1]));
        let node = ("devices/system/node/node1/cpulist", "2-3\n");
        assert_eq!(near(&[(NODE, "1\n"), node]), found(Some(1), &[2, 3]));
        assert_eq!(near(&[(LIST, "\n"), (NODE, "1\n"), node]), found(Some(1), &[2, 3]));
        assert_eq!(near(&[(LIST, "garbage"), (NODE, "garbage")]), Locality::default());
        assert_eq!(near(&[]), Locality::default());
    }

    #[test]
    fn an_address_that_is_none_leads_to_no_file() {
        let folder = sys(&[("bus/pci/devices/local_cpulist", "0"), ("local_cpulist", "0")]);
        for address in ["", ".", "..", "../../..", "0000:00:00.0/../..", "gpu"] {
            assert_eq!(Locality::of_pci_in(folder.path(), address), Locality::default(), "{address}");
        }
        assert_eq!(Locality::of_pci_in(Path::new("/nowhere"), "0000:00:00.0"), Locality::default());
    }

    #[test]
    fn the_program_comes_first_then_the_variable_then_what_is_near() {
        let near = Locality { numa_node: Some(1), cpus: vec![4, 5, 6, 7] };
        let choose = |placement: Placement, variable| placement.choose_among(&near, &[0, 1, 2, 5, 6], variable);
        let cpus = |placement, variable| choose(placement, variable).unwrap().cpus;
        assert_eq!(cpus(Placement::Automatic, None), Some(vec![5, 6]));
        assert_eq!(cpus(Placement::Automatic, Some("auto")), Some(vec![5, 6]));
        assert_eq!(cpus(Placement::Automatic, Some("any")), None);
        assert_eq!(cpus(Placement::Automatic, Some("0-1,77")), Some(vec![0, 1]));
        assert_eq!(cpus(Placement::Cpus(vec![2, 1, 2]), Some("5")), Some(vec![1, 2]));
        assert_eq!(cpus(Placement::Anywhere, Some("5")), None);
        assert!(choose(Placement::Automatic, None).unwrap().reason.contains("node 1"));

        let error = choose(Placement::Automatic, Some("near")).unwrap_err().to_string();
        assert!(error.contains("GIN_PROXY_CPUS=near") && error.contains("0-7,64"), "{error}");
        let error = choose(Placement::Cpus(vec![8, 9]), None).unwrap_err().to_string();
        assert!(error.contains("8-9") && error.contains("0-2,5-6"), "{error}");
        choose(Placement::Automatic, Some("9")).unwrap_err();
    }

    #[test]
    fn without_a_word_from_the_system_or_a_right_to_what_is_near_threads_run_anywhere() {
        let choose = |cpus: &[usize]| {
            let near = Locality { numa_node: None, cpus: cpus.to_vec() };
            Placement::Automatic.choose_among(&near, &[0, 1], None).unwrap()
        };
        assert!(choose(&[]).cpus.is_none() && choose(&[]).reason.contains("does not say"));
        assert!(choose(&[5]).cpus.is_none() && choose(&[5]).reason.contains("may use none"));
    }

    #[test]
    fn a_thread_keeps_the_processors_that_it_was_started_on_and_its_starter_gets_its_own_back() {
        let before = allowed_cpus();
        let one = vec![*before.last().unwrap()];
        let thread = started_on(Some(&one), || std::thread::spawn(allowed_cpus)).unwrap();
        assert_eq!(thread.join().unwrap(), one);
        assert_eq!(allowed_cpus(), before);
        assert_eq!(started_on(None, allowed_cpus).unwrap(), before);
        // Not one that there is: the system refuses, and nothing is started.
        started_on(Some(&[]), || panic!("it was started")).unwrap_err();
    }
}
