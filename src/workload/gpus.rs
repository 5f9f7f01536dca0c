// SPDX-License-Identifier: MIT OR Apache-2.0
//! NVIDIA GPUs as devices of workloads.

use super::Plan;
#[cfg(feature = "cuda")]
use crate::cli::Workload;
use crate::cli::{Failure, Refused};
use gin_host::launch::WorldConfig;

/// The GPUs that workloads run on: the GPUs that `--device` names, or all that the driver shows.
#[derive(Clone, Debug)]
pub struct Gpus {
    /// Name of each GPU. There is at least one GPU.
    names: Vec<String>,
    /// Number of each GPU in the driver.
    ordinals: Vec<usize>,
    /// The GPU of this process, if it is one rank of a job.
    own: Option<Own>,
}

/// The GPU of a rank that is a process.
#[derive(Clone, Copy, Debug)]
struct Own {
    ordinal: usize,
    /// Number of ranks of this host that use the GPU.
    sharing: u32,
}

impl Gpus {
    /// Returns the number of GPUs that `ranks` ranks use.
    pub(crate) fn used(&self, ranks: u32) -> usize {
        self.names.len().min(ranks as usize)
    }

    /// Returns the GPUs for one process of a job: its own GPU, chosen by its number `rank` among the `ranks` ranks of
    /// its host. Neighbouring ranks share a GPU if there are fewer GPUs than ranks.
    pub fn of_process(mut self, rank: u32, ranks: u32) -> Self {
        let (gpus, ranks) = (self.names.len() as u64, u64::from(ranks.max(1)));
        let gpu_of = |rank: u64| if ranks <= gpus { rank } else { rank * gpus / ranks };
        let place = gpu_of(u64::from(rank)).min(gpus.saturating_sub(1));
        let sharing = (0..ranks).filter(|&rank| gpu_of(rank) == place).count() as u32;
        self.own = Some(Own { ordinal: self.ordinals[place as usize], sharing });
        self
    }

    fn all(names: Vec<String>) -> Self {
        Self { ordinals: (0..names.len()).collect(), names, own: None }
    }

    /// Returns the GPUs with these numbers, in their order; all for none.
    ///
    /// # Errors
    /// Refuses a number that no GPU has.
    pub(crate) fn only(self, numbers: &[usize]) -> Result<Self, Refused> {
        if numbers.is_empty() {
            return Ok(self);
        }
        let last = self.names.len() - 1;
        if let Some(number) = numbers.iter().find(|&&number| number > last) {
            let all: Vec<String> = numbers.iter().map(usize::to_string).collect();
            let text = format!("--device cuda:{}: there is no GPU {number}; there are 0 to {last}", all.join(","));
            return Err(Refused(text));
        }
        let names = numbers.iter().map(|&number| self.names[number].clone()).collect();
        Ok(Self { names, ordinals: numbers.to_vec(), own: None })
    }

    /// Returns the GPUs that this process uses for `ranks` ranks, by number.
    #[cfg(any(feature = "cuda", test))]
    fn ordinals(&self, ranks: u32) -> Vec<usize> {
        match self.own {
            Some(own) => vec![own.ordinal],
            None => self.ordinals[..self.used(ranks)].to_vec(),
        }
    }

    /// Returns the largest number of ranks on one GPU, as [`gin_gpu::cuda::devices`] spreads `ranks` ranks.
    pub(super) fn max_on_one(&self, ranks: u32) -> u32 {
        match self.own {
            Some(own) => own.sharing,
            None => ranks.div_ceil(u32::try_from(self.names.len().max(1)).unwrap_or(u32::MAX)),
        }
    }

    /// Returns the name of the GPUs that `ranks` ranks use, if all have the same.
    pub(crate) fn name(&self, ranks: u32) -> Option<String> {
        let names = &self.names[..self.used(ranks)];
        names.first().filter(|first| names.iter().all(|name| name == *first)).cloned()
    }

    /// Returns the name of each GPU.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns the numbers of the GPUs in the driver, in the same order.
    pub fn numbers(&self) -> &[usize] {
        &self.ordinals
    }

    /// Returns the number of this process's GPU, if it is one rank of a job.
    pub fn own(&self) -> Option<usize> {
        self.own.map(|own| own.ordinal)
    }

    /// Returns `count` invented GPUs.
    #[cfg(test)]
    pub(crate) fn for_tests(count: usize) -> Self {
        Self::all(vec!["Some GPU".to_owned(); count])
    }
}

/// Refuses grids that cannot be resident for all ranks at once.
#[cfg(any(feature = "cuda", test))]
fn check_room(plan: &Plan, gpus: &Gpus, device: &str, resident: u64) -> Result<(), Refused> {
    let (ranks, blocks, threads) = (plan.ranks, plan.sizes.blocks, plan.sizes.threads);
    let sharing = gpus.max_on_one(ranks);
    let needed = u64::from(sharing) * u64::from(blocks);
    if needed <= resident {
        return Ok(());
    }
    let fit = resident / u64::from(sharing);
    let advice = if fit > 0 { format!("at most --blocks {fit} fit") } else { "use fewer --ranks".to_owned() };
    Err(Refused(format!(
        "--ranks {ranks} x --blocks {blocks}: blocks wait for each other, so all must be resident at once; {sharing} ranks \
         on {device} need {needed} blocks, but it holds {resident} of {threads} threads: {advice}"
    )))
}

/// Returns the GPUs of this machine and their text, or the reason why there is none.
///
/// # Errors
/// Refuses GPUs that the shipped kernels or gin do not support.
pub(crate) fn find() -> Result<Result<(Gpus, String), String>, Refused> {
    #[cfg(feature = "cuda")]
    let kernels = [crate::ptx::PTX];
    #[cfg(not(feature = "cuda"))]
    let kernels = [];
    let found = gin_gpu::available(&kernels).map_err(|error| Refused(format!("{error}, or use --device virtual")))?;
    Ok(if found.names.is_empty() { Err(found.text) } else { Ok((Gpus::all(found.names), found.text)) })
}

/// Returns the kernels of a workload.
#[cfg(feature = "cuda")]
fn kernels(workload: Workload) -> Vec<gin_gpu::EmbeddedModules> {
    match workload {
        Workload::Ring | Workload::Alltoall | Workload::Halo => vec![crate::ptx::PTX],
        Workload::Moe => vec![crate::ptx::PTX, gin_ep::PTX],
    }
}

/// Checks against the limits of the GPUs that the grids of all ranks are resident at once. Returns the number of
/// blocks, which is less than the plan's if that is a default and the GPUs hold fewer.
///
/// # Errors
/// Returns [`Refused`] with the figures if they are not; returns the error of the driver.
#[cfg(feature = "cuda")]
pub(crate) fn check(gpus: &Gpus, plan: &Plan) -> Result<u32, Failure> {
    use gin_gpu::cuda::CudaDevice;
    use gin_gpu::{Device, LaunchConfig, ModuleSource};
    if plan.workload == Workload::Moe {
        // One resident block of each rank suffices, and the group limits its grids to a rank's part of the GPU.
        return Ok(plan.sizes.blocks);
    }
    let mut fit = u64::from(plan.sizes.blocks);
    let (kernel, blocks, threads) = (plan.workload.name(), plan.sizes.blocks, plan.sizes.threads);
    for ordinal in gpus.ordinals(plan.ranks) {
        let device = CudaDevice::new(ordinal, &kernels(plan.workload))?;
        let function = device.load(ModuleSource::Linked)?.function(kernel)?;
        let max = function.max_threads.unwrap_or(u32::MAX).min(device.limits().threads_per_block);
        if threads > max {
            let device = device.name();
            return Err(Refused(format!(
                "--threads {threads}: a block of `{kernel}` has at most {max} threads on {device}"
            ))
            .into());
        }
        let shape = LaunchConfig::new(blocks, threads).cooperative();
        let resident = device.resident_blocks(&function, &shape)?;
        // A default, unlike an option, gives way.
        match plan.asked.blocks {
            None => fit = fit.min(resident / u64::from(gpus.max_on_one(plan.ranks))),
            Some(_) => check_room(plan, gpus, &device.name(), resident)?,
        }
    }
    Ok(u32::try_from(fit.max(1)).unwrap_or(blocks))
}

/// Fails: this build supports no GPUs.
///
/// # Errors
/// Always returns [`Refused`].
#[cfg(not(feature = "cuda"))]
pub(crate) fn check(_gpus: &Gpus, _plan: &Plan) -> Result<u32, Failure> {
    Err(no_support().into())
}

#[cfg(not(feature = "cuda"))]
fn no_support() -> Refused {
    Refused("this command was built without the feature `cuda`: it has no kernels for GPUs".to_owned())
}

/// Returns a world on the first of these GPUs, at most one GPU per rank.
///
/// # Errors
/// Returns the error of the driver.
#[cfg(feature = "cuda")]
pub(crate) fn world(gpus: &Gpus, plan: &Plan) -> Result<WorldConfig, Failure> {
    let ordinals = gpus.ordinals(plan.ranks);
    Ok(WorldConfig::cuda(&ordinals, plan.ranks, &kernels(plan.workload))?)
}

/// Fails: this build supports no GPUs.
///
/// # Errors
/// Always returns [`Refused`].
#[cfg(not(feature = "cuda"))]
pub(crate) fn world(_gpus: &Gpus, _plan: &Plan) -> Result<WorldConfig, Failure> {
    Err(no_support().into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::plan::default_plan;

    #[test]
    fn ranks_use_at_most_one_gpu_each_and_only_gpus_of_one_kind_have_a_name() {
        let names = ["A", "B", "A"].map(String::from).to_vec();
        let gpus = Gpus::all(names);
        assert_eq!((gpus.used(2), gpus.used(8)), (2, 3));
        assert_eq!((gpus.name(1).as_deref(), gpus.name(3)), (Some("A"), None));
    }

    #[test]
    fn grids_that_are_not_resident_together_are_refused_with_all_figures() {
        let mut plan = default_plan();
        (plan.ranks, plan.sizes.blocks, plan.sizes.threads) = (8, 33, 1024);
        check_room(&plan, &Gpus::for_tests(4), "GPU 0", 66).unwrap();
        let Refused(text) = check_room(&plan, &Gpus::for_tests(3), "GPU 0", 66).unwrap_err();
        for figure in ["--ranks 8", "--blocks 33", "3 ranks", "99 blocks", "holds 66 of 1024", "--blocks 22 fit"] {
            assert!(text.contains(figure), "{figure}: {text}");
        }
        let Refused(text) = check_room(&plan, &Gpus::for_tests(1), "GPU 0", 7).unwrap_err();
        assert!(text.contains("fewer --ranks"), "{text}");
    }

    #[test]
    fn a_process_has_one_gpu_which_neighbours_share_where_there_are_fewer() {
        let own = |gpus, rank, ranks| {
            let gpus = Gpus::for_tests(gpus).of_process(rank, ranks);
            (gpus.ordinals(ranks), gpus.max_on_one(ranks))
        };
        assert_eq!(own(4, 3, 4), (vec![3], 1));
        assert_eq!(own(8, 1, 2), (vec![1], 1));
        assert_eq!((own(2, 0, 4), own(2, 1, 4), own(2, 3, 4)), ((vec![0], 2), (vec![0], 2), (vec![1], 2)));
        assert_eq!((own(2, 1, 3), own(2, 2, 3)), ((vec![0], 2), (vec![1], 1)));
        assert_eq!(own(1, 7, 8), (vec![0], 8));
        let chosen = Gpus::for_tests(4).only(&[3, 1]).unwrap();
        assert_eq!((chosen.ordinals(1), chosen.ordinals(5), chosen.max_on_one(5)), (vec![3], vec![3, 1], 3));
        assert_eq!(chosen.of_process(1, 2).ordinals(2), [1]);
    }
}
