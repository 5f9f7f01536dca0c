// SPDX-License-Identifier: MIT OR Apache-2.0
//! The limits of a run, set by GPUs and by this machine.

use super::{Plan, RunDevice};
use crate::cli::{Mode, Refused, Sizes, Workload};
use gin_abi::BackendKind;
use gin_host::comm::{Backend, probe_backends};
use std::fs;

/// Maximum number of ranks in the seeded mode. With more ranks a run takes minutes for a few steps, because one thread
/// switches between the device threads of all ranks.
pub(crate) const MAX_RANKS_SEEDED: u32 = 256;

/// Maximum number of ranks in the threads mode and on real GPUs, where each rank has three operating system threads
/// that poll. With many more threads than CPUs, a thread may not run for seconds, and the watchdog would mistake
/// it for one that loops.
pub(crate) const MAX_RANKS_THREADS: u32 = 64;

/// Returns the number of resident blocks of a virtual GPU without `--resident-blocks`.
fn default_resident_blocks() -> u32 {
    gin_host::launch::WorldConfig::seeded(1, 0).device.resident_blocks
}

/// Bytes of a resident thread of a virtual GPU: one or two pages of its stack, and its state.
const THREAD_BYTES: u128 = 8 << 10;

/// Checks the limits that do not depend on the workload, beyond those of single options.
///
/// # Errors
/// Refuses the first option beyond its limit; the text names the limit and a remedy.
pub(super) fn check(plan: &Plan) -> Result<(), Refused> {
    let refuse = |text: String| Err(Refused(text));
    let ranks = plan.ranks;
    match plan.device {
        RunDevice::Virtual => check_virtual(plan)?,
        RunDevice::Cuda(_) if ranks > MAX_RANKS_THREADS && !plan.processes => {
            return refuse(format!(
                "--ranks {ranks}: all ranks are threads of this process, which supports at most {MAX_RANKS_THREADS} on \
                 real GPUs"
            ));
        }
        // `gpus::check` checks the limits that the GPU reports.
        RunDevice::Cuda(_) => {}
    }
    match (&plan.device, plan.backend) {
        (RunDevice::Cuda(_), Backend::Gdaki) if !plan.software_nics => match gdaki_refusal() {
            Some(reason) => refuse(format!(
                "--backend gdaki: {reason}; with --network software a thread of this process is the NICs"
            )),
            None => Ok(()),
        },
        _ => Ok(()),
    }
}

/// Returns the reason if no GPU of this machine can drive a NIC.
fn gdaki_refusal() -> Option<String> {
    let mut probes = probe_backends().into_iter();
    probes.find(|probe| probe.backend == BackendKind::Gdaki).and_then(|probe| probe.refusal)
}

/// Checks the limits that only the virtual GPU has.
fn check_virtual(plan: &Plan) -> Result<(), Refused> {
    let refuse = |text: String| Err(Refused(text));
    let (ranks, blocks) = (plan.ranks, plan.sizes.blocks);
    let (max_ranks, mode) = match plan.mode {
        Mode::Seeded => (MAX_RANKS_SEEDED, "seeded"),
        Mode::Threads => (MAX_RANKS_THREADS, "threads"),
    };
    if ranks > max_ranks && !plan.processes {
        return refuse(format!(
            "--ranks {ranks}: all ranks are virtual GPUs of this process, which supports at most {max_ranks} in the \
             {mode} mode"
        ));
    }
    let resident = plan.resident_blocks.unwrap_or_else(default_resident_blocks);
    // The blocks of the other workloads wait for each other.
    if blocks > resident && plan.workload != Workload::Moe {
        return refuse(format!(
            "--blocks {blocks}: the blocks of a workload wait for each other, so all {blocks} must be resident at once, \
             but a device holds {resident}: use fewer blocks or more --resident-blocks"
        ));
    }
    Ok(())
}

/// Checks that this machine has memory for `per_rank` bytes per rank, plus the memory of communicators and threads.
///
/// On real GPUs most of it is GPU memory, and a GPU that lacks it reports so. The function checks host memory all the
/// same, because the host holds the copies for the check of results.
///
/// # Errors
/// Refuses the run if the memory does not suffice; the text gives the needed and the available bytes.
pub(super) fn check_memory(plan: &Plan, ids: u32, per_rank: u128) -> Result<(), Refused> {
    let Sizes { bytes, contexts, blocks, threads, iters, .. } = plan.sizes;
    let [ranks, blocks, threads, contexts, ids] = [plan.ranks, blocks, threads, contexts, ids].map(u128::from);
    // Queue and tables of a context: 256 descriptors, and some words for each peer, signal and counter.
    let communicator = contexts * ((32 << 10) + 256 * ranks + 64 * ids);
    let thread_bytes = if matches!(plan.device, RunDevice::Virtual) { THREAD_BYTES } else { 0 };
    let needed = ranks * (per_rank + communicator + blocks * threads * thread_bytes);
    match available_memory() {
        Some(available) if needed > u128::from(available) => Err(Refused(format!(
            "--ranks {ranks}, --bytes {bytes}, --iters {iters}: all ranks together need about {} of memory, but this machine has \
             {} available",
            in_mib(needed),
            in_mib(u128::from(available))
        ))),
        None if needed > isize::MAX as u128 => {
            Err(Refused(format!("--ranks {ranks}, --bytes {bytes}: more than the memory of any machine")))
        }
        _ => Ok(()),
    }
}

fn in_mib(bytes: u128) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}

fn number_in(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Returns the memory available without swapping, in bytes, if the system reports it.
fn available_memory() -> Option<u64> {
    let machine = available_in(&fs::read_to_string("/proc/meminfo").ok()?)?;
    // A container may have less memory than its machine. Most memory in use by it is cached files, which can be
    // dropped.
    let container = number_in("/sys/fs/cgroup/memory.max").unwrap_or(u64::MAX);
    Some(machine.min(container))
}

fn available_in(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::gpus::Gpus;
    use crate::workload::plan::default_plan;

    fn refusal(change: impl FnOnce(&mut Plan)) -> String {
        let mut plan = default_plan();
        change(&mut plan);
        match check(&plan) {
            Ok(()) => panic!("accepted: {} ranks, {:?}", plan.ranks, plan.sizes),
            Err(Refused(text)) => text,
        }
    }

    #[test]
    fn the_defaults_are_within_all_limits() {
        check(&default_plan()).unwrap();
        check(&Plan { device: RunDevice::Cuda(Gpus::for_tests(1)), ..default_plan() }).unwrap();
    }

    #[test]
    fn what_is_past_a_limit_is_refused_with_what_was_asked_and_the_limit() {
        let both = |text: String, asked: &str, limit: &str| {
            assert!(text.contains(asked) && text.contains(limit), "{text}");
        };
        both(refusal(|plan| plan.ranks = 257), "--ranks 257", "256");
        both(refusal(|plan| (plan.ranks, plan.mode) = (65, Mode::Threads)), "--ranks 65", "64");
        both(refusal(|plan| plan.sizes.blocks = 133), "--blocks 133", "132");
        both(refusal(|plan| plan.resident_blocks = Some(1)), "--blocks 2", "holds 1:");
        // The ranks of a job of processes do not share this one.
        let job = Plan { ranks: 1000, mode: Mode::Threads, processes: true, ..default_plan() };
        check(&job).unwrap();
        check(&Plan { device: RunDevice::Cuda(Gpus::for_tests(1)), ..job }).unwrap();
    }

    #[test]
    fn real_gpus_have_other_limits_than_virtual_ones() {
        let check = |change: fn(&mut Plan)| {
            let mut plan = Plan { device: RunDevice::Cuda(Gpus::for_tests(1)), ..default_plan() };
            change(&mut plan);
            check(&plan)
        };
        // `gpus::check` checks the number of resident blocks.
        check(|plan| plan.sizes.blocks = 1000).unwrap();
        check(|plan| plan.ranks = 64).unwrap();
        let Err(Refused(text)) = check(|plan| plan.ranks = 65) else { panic!("accepted") };
        assert!(text.contains("--ranks 65") && text.contains("at most 64"), "{text}");
        match (check(|plan| plan.backend = Backend::Gdaki), gdaki_refusal()) {
            (Err(Refused(text)), Some(reason)) => {
                assert!(text.starts_with(&format!("--backend gdaki: {reason}; with --network software")), "{text}");
            }
            (outcome, refusal) => assert!(outcome.is_ok() && refusal.is_none(), "{refusal:?}"),
        }
        check(|plan| (plan.backend, plan.software_nics) = (Backend::Gdaki, true)).unwrap();
    }

    #[test]
    fn more_memory_than_there_is_is_refused_with_both_figures_and_no_product_overflows() {
        let mut plan = default_plan();
        check_memory(&plan, 4, 1 << 20).unwrap();
        let Err(Refused(text)) = check_memory(&plan, 4, 1 << 60) else { panic!("accepted") };
        assert!(text.contains("need about 4398046511") && text.contains("--iters 10"), "{text}");
        (plan.ranks, plan.sizes.blocks, plan.sizes.threads) = (u32::MAX, u32::MAX, u32::MAX);
        plan.sizes.contexts = u32::MAX;
        check_memory(&plan, u32::MAX, 1 << 80).unwrap_err();
    }

    #[test]
    fn available_memory_is_read_from_the_systems_table() {
        assert_eq!(available_in("MemTotal:  5 kB\nMemAvailable:     123 kB\n"), Some(123 << 10));
        assert_eq!(available_in("MemTotal:  5 kB\n"), None);
        assert_eq!(available_in("MemAvailable: lots\n"), None);
    }
}
