// SPDX-License-Identifier: MIT OR Apache-2.0
//! A trial of operations that a resident kernel must not block.

use crate::gpus::hardware_text;
use crate::hardware::Exchanges;
use crate::journal::Outcome;
use crate::raw::{enter, ok};
use crate::testbed::Testbed;
use cudarc::driver::sys;
use gin_gpu::Devices;
use gin_gpu::{GpuError, Memory, MemoryKind, ModuleSource};
use gin_gpu::{KernelArg, LaunchConfig};
use gin_host::comm::CommError;
use gin_host::world::Rank;
use gin_soft_nic_host::{SoftEngine, SoftFabric};

/// Bytes that are allocated and freed.
const BYTES: u64 = 1 << 30;
/// Other memory that may be allocated or freed meanwhile.
const SLACK: usize = 64 << 20;
/// Exchanges of a launch.
const ROUNDS: u64 = 20;

/// Returns the free bytes of a GPU.
fn free_bytes(ordinal: usize) -> Result<usize, GpuError> {
    enter(ordinal)?;
    let (mut free, mut total) = (0, 0);
    // Safety: writes two integers.
    ok("read the free memory", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) }).map(|()| free)
}

/// Checks, while software NICs have a kernel: memory that is dropped is freed; a module is unloaded and loaded; a grid
/// that fills the GPU is refused unless the NICs stay parked; and the NICs continue after each.
///
/// # Errors
/// Returns the failures.
pub fn parks(gpus: &[usize], devices: Devices) -> Outcome {
    let testbed = Testbed::real(devices, gpus.len()).driving(SoftEngine::Kernel);
    let nics = testbed.nics()?.ok_or("no NICs")?;
    let text = hardware_text(gpus[0])?;
    let report = testbed.run_with(Some(&nics), |rank| {
        let exchanges = Exchanges::new(rank, 1, 1, 16, ROUNDS)?;
        let mut done = 0;
        let mut report = Vec::new();
        for step in [freed, reloaded, filled] {
            rank.barrier()?;
            if rank.rank() == 0 {
                report.extend(step(rank, gpus[0], nics.fabric(), text)?);
            }
            rank.barrier()?;
            exchanges.start(rank, 0, None)?.synchronize()?;
            done += ROUNDS;
        }
        rank.barrier()?;
        report.extend(exchanges.report(rank, done)?);
        exchanges.comm.destroy()?;
        Ok(report)
    })?;
    let report: Vec<String> = report.into_iter().flatten().collect();
    if report.is_empty() { Ok(()) } else { Err(report.join("\n")) }
}

type Step = Result<Option<String>, CommError>;

fn freed(rank: &Rank, ordinal: usize, _: &SoftFabric, _: &'static str) -> Step {
    let before = free_bytes(ordinal)?;
    drop(Memory::new(rank.device(), MemoryKind::Device, BYTES)?);
    // A wait for a stream frees the memory whose free was deferred.
    rank.stream()?.synchronize()?;
    let after = free_bytes(ordinal)?;
    Ok((after + SLACK < before).then(|| format!("{before} bytes were free before the drop, {after} after it")))
}

fn reloaded(rank: &Rank, _: usize, _: &SoftFabric, text: &'static str) -> Step {
    for _ in 0..3 {
        drop(rank.device().load(ModuleSource::Ptx(text))?);
        rank.stream()?.synchronize()?;
    }
    Ok(None)
}

fn filled(rank: &Rank, _: usize, fabric: &SoftFabric, _: &'static str) -> Step {
    let (device, kernel, stream) = (rank.device(), rank.kernel("hardware_spin")?, rank.stream()?);
    let words = Memory::new(device, MemoryKind::Device, 16)?;
    // The kernel ends at once.
    words.write(0, &[1u64, 0])?;
    let pointer = |offset: u64| std::ptr::with_exposed_provenance_mut::<u64>((words.address() + offset) as usize);
    let (stop, started, limit) = (pointer(0), pointer(8), 1_000_000_000u64);
    let launch = |blocks| {
        let arguments: [&dyn KernelArg; 3] = [&stop, &started, &limit];
        let shape = LaunchConfig::new(blocks, 1024).cooperative();
        // Safety: both words outlive the wait for the stream.
        unsafe { stream.launch(&kernel, shape, &arguments) }
    };
    let room = || device.resident_blocks(&kernel, &LaunchConfig::new(1, 1024).cooperative());
    let beside = room()?;
    let parked = fabric.park();
    let all = room()?;
    if all <= beside {
        return Ok(Some(format!("{all} blocks fit without the kernel, and {beside} beside it")));
    }
    launch(all as u32)?;
    stream.synchronize()?;
    let mut count = [0u64];
    words.read(8, &mut count)?;
    drop(parked);
    if count[0] != all {
        return Ok(Some(format!("only {} of {all} blocks ran", count[0])));
    }
    match launch(all as u32) {
        Err(GpuError::NotResident { .. }) => Ok(None),
        other => Ok(Some(format!("a grid that fills the GPU beside the kernel: {other:?}"))),
    }
}
