// SPDX-License-Identifier: MIT OR Apache-2.0
//! On virtual GPUs the kernels show the same results as they must on real ones, and notice mistakes.

use bytemuck::Zeroable;
use gin_gpu::virt::VirtualDevice;
use gin_gpu::{KernelArg, LaunchConfig};
use gin_gpu::{Memory, MemoryKind, Plain};
use gin_host::comm::{CommError, Communicator, Requirements, WindowFlags};
use gin_host::world::{LaunchError, Rank, WorldConfig, launch};
use gin_testkit::Sabotage;
use gpu_tests_kernels::{Exchange, Flood, Stale, exchange_len, pass_len, value};
use std::sync::Arc;

const DEADLINE: gin_abi::Deadline = gin_abi::Deadline::after_ms(1000);

fn words(rank: &Rank, words: u64) -> Result<Arc<Memory>, CommError> {
    Ok(Memory::new(rank.device(), MemoryKind::Device, 8 * words)?)
}

fn run(rank: &Rank, kernel: &str, shape: LaunchConfig, arguments: &[&dyn KernelArg]) -> Result<(), CommError> {
    let (function, stream) = (rank.kernel(kernel)?, rank.stream()?);
    rank.barrier()?;
    // Safety: the tests pass the arguments that the kernels require.
    unsafe { stream.launch(&function, shape.cooperative(), arguments)? };
    stream.synchronize()?;
    rank.barrier()
}

/// Returns 1 if the communicator has a fault. All ranks are asked before one ends, since its end is a fault to the
/// others.
fn faults(rank: &Rank, comm: &Communicator) -> Result<u64, CommError> {
    let faults = u64::from(comm.fault().is_some());
    rank.barrier()?;
    Ok(faults)
}

fn wrong_values(ranks: u32, sabotage: Sabotage, work: Work) -> Result<u64, LaunchError<CommError>> {
    let config = sabotage.apply(WorldConfig::seeded(ranks, 3));
    Ok(launch(config, |rank| work(&rank))?.into_iter().sum())
}

type Work = fn(&Rank) -> Result<u64, CommError>;

fn exchange_with(rank: &Rank, neighbours: u32) -> Result<u64, CommError> {
    let comm = rank.communicator(&Requirements::default().signals(2 * neighbours).counters(neighbours))?;
    let len = exchange_len(neighbours, 5) as usize;
    let (inbox, outbox) = (comm.alloc_window(len, WindowFlags::NONE)?, comm.alloc_window(len, WindowFlags::NONE)?);
    let tables = words(rank, 5)?;
    let plan = Exchange {
        neighbours,
        elements: 5,
        rounds: 4,
        done: tables.address(),
        wrong: tables.address() + 8,
        ..Exchange::zeroed()
    };
    for _ in 0..2 {
        let (inbox, outbox): (&gin_host::comm::Window<u64>, &gin_host::comm::Window<u64>) = (&inbox, &outbox);
        let arguments: [&dyn KernelArg; 5] = [&comm.device()?, inbox, outbox, &Plain(plan), &DEADLINE];
        run(rank, "hardware_exchange", LaunchConfig::new(1, 32), &arguments)?;
    }
    let mut table = [0u64; 5];
    tables.read(0, &mut table)?;
    let faults = faults(rank, &comm)?;
    if faults == 0 {
        assert_eq!(table[0], 8, "rounds of rank {}", rank.rank());
    }
    Ok(table[1] + faults)
}

fn ring(rank: &Rank) -> Result<u64, CommError> {
    exchange_with(rank, 1)
}

fn all_to_all(rank: &Rank) -> Result<u64, CommError> {
    exchange_with(rank, rank.ranks() - 1)
}

fn stale_with(rank: &Rank, get: u64) -> Result<u64, CommError> {
    let comm = rank.communicator(&Requirements::default())?;
    let data: gin_host::comm::Window<u64> = comm.alloc_window(40, WindowFlags::NONE)?;
    let source: gin_host::comm::Window<u64> = comm.alloc_window(40, WindowFlags::NONE)?;
    let tables = words(rank, 5)?;
    let plan = Stale { elements: 40, rounds: 4, barrier: tables.address(), wrong: tables.address() + 8, get, lsa: 0 };
    let arguments: [&dyn KernelArg; 5] = [&comm.device()?, &data, &source, &Plain(plan), &DEADLINE];
    run(rank, "hardware_stale", LaunchConfig::new(3, 32), &arguments)?;
    let mut table = [0u64; 5];
    tables.read(0, &mut table)?;
    Ok(table[1] + faults(rank, &comm)?)
}

fn stale_after_put(rank: &Rank) -> Result<u64, CommError> {
    stale_with(rank, 0)
}

fn stale_after_get(rank: &Rank) -> Result<u64, CommError> {
    stale_with(rank, 1)
}

fn flood(rank: &Rank) -> Result<u64, CommError> {
    let comm = rank.communicator(&Requirements::default().contexts(2))?;
    let data: gin_host::comm::Window<u64> = comm.alloc_window(3 * 32 * 2, WindowFlags::NONE)?;
    let plan = Flood { posters: 3, each: 2 };
    run(rank, "hardware_flood", LaunchConfig::new(5, 32), &[&comm.device()?, &data, &Plain(plan), &DEADLINE])?;
    let (me, ranks) = (rank.rank(), rank.ranks());
    let wrong = data
        .read_all()?
        .into_iter()
        .zip(0..)
        .filter(|(seen, index)| *seen != value((me + ranks - 1) % ranks, me, 1, *index));
    Ok(wrong.count() as u64 + faults(rank, &comm)?)
}

/// Passes values on through the test's own memory, by loads and stores and by the network.
fn pass(rank: &Rank) -> Result<u64, CommError> {
    const ELEMENTS: u64 = 21;
    let comm = rank.communicator(&Requirements::default().signals(1))?;
    let device = rank.device().downcast::<VirtualDevice>().expect("a virtual GPU");
    let mut own: [Vec<u64>; 2] = [pass_len(ELEMENTS), ELEMENTS].map(|len| vec![0; len as usize]);
    let windows = own.each_mut().map(|words| -> Result<gin_host::comm::Window<u64>, CommError> {
        let (address, bytes) = (words.as_mut_ptr().expose_provenance() as u64, size_of_val(words.as_slice()) as u64);
        // Safety: the words live until the communicator has ended on all ranks, and only windows use them.
        let memory = unsafe { device.import_memory(address, bytes)? };
        comm.register(&memory.whole(), WindowFlags::NONE)
    });
    let [data, source] = windows;
    let (data, source) = (data?, source?);
    assert_eq!(data.stride(), None);
    let (me, ranks, mut wrong) = (rank.rank(), rank.ranks(), 0);
    for round in 1..=2u64 {
        let arguments: [&dyn KernelArg; 6] = [&comm.device()?, &data, &source, &ELEMENTS, &round, &DEADLINE];
        run(rank, "hardware_pass", LaunchConfig::new(1, 32), &arguments)?;
        let expected =
            (0..2).flat_map(|_| (0..ELEMENTS).map(|index| value((me + ranks - 1) % ranks, me, round, index)));
        wrong += data.read_all()?.into_iter().zip(expected).filter(|(seen, expected)| seen != expected).count() as u64;
        rank.barrier()?;
    }
    wrong += faults(rank, &comm)?;
    comm.destroy()?;
    rank.barrier()?;
    Ok(wrong)
}

const ALL: [(&str, Work); 6] = [
    ("ring", ring),
    ("all to all", all_to_all),
    ("stale lines, put", stale_after_put),
    ("stale lines, get", stale_after_get),
    ("flood", flood),
    ("pass", pass),
];

#[test]
fn without_a_mistake_nothing_is_wrong_with_any_number_of_ranks() {
    for (name, work) in ALL {
        for ranks in [2, 3, 5] {
            assert_eq!(wrong_values(ranks, Sabotage::None, work).unwrap(), 0, "{name}, {ranks} ranks");
        }
    }
    for (name, work) in [ALL[0], ALL[2], ALL[3], ALL[4], ALL[5]] {
        assert_eq!(wrong_values(1, Sabotage::None, work).unwrap(), 0, "{name}, by itself");
    }
}

#[test]
fn puts_that_are_lost_are_noticed() {
    for (name, work) in [ALL[0], ALL[1], ALL[2], ALL[4]] {
        assert_ne!(wrong_values(3, Sabotage::LosePut, work).unwrap(), 0, "{name}");
    }
}

#[test]
fn a_spinner_runs_until_the_host_says_so_or_its_time_is_over() {
    let started = launch(WorldConfig::threads(1), |rank| -> Result<u64, CommError> {
        let (function, stream) = (rank.kernel("hardware_spin")?, rank.stream()?);
        let table = Memory::new(rank.device(), MemoryKind::Pinned, 16)?;
        let words = (table.address() as usize as *mut u64, (table.address() + 8) as usize as *mut u64);
        let spin = |limit_ns: u64| -> Result<(), CommError> {
            // Safety: both words are alive.
            unsafe { stream.launch(&function, LaunchConfig::new(2, 32), &[&words.0, &words.1, &limit_ns])? };
            Ok(())
        };
        spin(1_000_000)?;
        stream.synchronize()?;
        spin(u64::MAX)?;
        let mut now = [0u64; 2];
        while now[1] < 4 {
            table.read(0, &mut now)?;
        }
        assert_eq!(rank.device().running(), 1);
        table.write(0, &[1u64])?;
        stream.synchronize()?;
        Ok(now[1])
    });
    assert_eq!(started.unwrap(), [4]);
}
