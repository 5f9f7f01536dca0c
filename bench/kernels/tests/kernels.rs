// SPDX-License-Identifier: MIT OR Apache-2.0
//! The measurements are checked, and they end.

use gin_bench_kernels::data::value;
use gin_bench_kernels::nccl::{DESCRIPTOR, Rings};
use gin_bench_kernels::{END, LATE, MARKS, Plan, START, WRONG};
use gin_gpu::{KernelArg, LaunchConfig};
use gin_gpu::{Memory, MemoryKind, Plain};
use gin_host::comm::CommError;
use gin_host::launch::{WorldConfig, launch};
use gin_host::world::Rank;
use std::sync::Arc;

/// Launches a kernel on a separate device, and returns its marks.
fn marks(
    kernel: &str,
    blocks: u32,
    arguments: impl Fn(&Rank) -> Result<(Vec<Arc<Memory>>, Vec<Box<dyn KernelArg>>), CommError> + Sync,
) -> Vec<[u64; MARKS]> {
    let results = launch(WorldConfig::seeded(1, 1), |rank| -> Result<Vec<[u64; MARKS]>, CommError> {
        let mut marks = vec![[0; MARKS]; blocks as usize];
        let out = Memory::new(rank.device(), MemoryKind::Device, size_of_val(marks.as_slice()) as u64)?;
        // The memory lives until the kernel has ended.
        let (_memory, arguments) = arguments(&rank)?;
        let table = pointer(&out);
        let all: Vec<&dyn KernelArg> = arguments.iter().map(|argument| &**argument).chain([&table as _]).collect();
        let (stream, function) = (rank.stream()?, rank.kernel(kernel)?);
        // Safety: the memory is as the kernel's docs require.
        unsafe { stream.launch(&function, LaunchConfig::new(blocks, 32), &all)? };
        stream.synchronize()?;
        out.read(0, &mut marks)?;
        Ok(marks)
    });
    results.unwrap().remove(0)
}

fn pointer(memory: &Memory) -> *mut u64 {
    std::ptr::without_provenance_mut(memory.address() as usize)
}

fn words(rank: &Rank, words: &[u64]) -> Result<Arc<Memory>, CommError> {
    let memory = Memory::new(rank.device(), MemoryKind::Pinned, size_of_val(words) as u64)?;
    memory.write(0, words)?;
    Ok(memory)
}

#[test]
fn every_word_that_did_not_arrive_is_counted() {
    const SEED: u64 = 9;
    let sent: Vec<u64> = (0..100).map(|index| value(SEED, index)).collect();
    for lost in [&[][..], &[0], &[99], &[3, 50, 51, 64]] {
        let marks = marks("bench_check", 2, |rank| {
            let mut arrived = sent.clone();
            for &index in lost {
                arrived[index] = value(!SEED, index as u64);
            }
            let memory = words(rank, &arrived)?;
            let from = pointer(&memory).cast_const();
            Ok((vec![memory], vec![Box::new(from), Box::new(arrived.len()), Box::new(SEED)]))
        });
        assert_eq!(marks.iter().map(|marks| marks[WRONG]).sum::<u64>(), lost.len() as u64, "{lost:?}");
    }
}

#[test]
fn a_trip_that_nobody_answers_ends_at_its_limit_and_says_so() {
    let plan = Plan { before: 0, warm: 0, timed: 5, verify: 0, limit_ns: 1_000_000, stamps: 0 };
    let run = |answer: u64| {
        let marks = marks("bare_trips", 1, |rank| {
            let (ask, answer) = (words(rank, &[0])?, words(rank, &[answer])?);
            let arguments: Vec<Box<dyn KernelArg>> = vec![
                Box::new(pointer(&ask)),
                Box::new(pointer(&answer)),
                Box::new(std::ptr::null_mut::<u64>()),
                Box::new(0u32),
                Box::new(1u32),
                Box::new(Plain(plan)),
            ];
            Ok((vec![ask, answer], arguments))
        });
        marks[0]
    };
    // Every thread of the block polls, and each gives up in the round without an answer.
    let late = run(3);
    assert!(late[LATE] == 32 && late[START] != 0 && late[END] == 0, "{late:?}");
    let answered = run(5);
    assert!(answered[LATE] == 0 && answered[END] >= answered[START], "{answered:?}");
}

#[test]
fn a_post_by_nccls_operations_to_a_full_ring_ends_at_its_limit_and_says_so() {
    /// Slots of the one ring: one for each thread of the block.
    const SLOTS: u64 = 32;
    let run = |posts: u64| {
        let marks = marks("nccl_post", 1, |rank| {
            let slots = words(rank, &[0; SLOTS as usize * DESCRIPTOR])?;
            let (producer, consumer) = (words(rank, &[0])?, words(rank, &[0])?);
            let (data, times) = (words(rank, &[0; 8 * 32])?, words(rank, &[0; 32])?);
            let rings = Rings {
                slots: slots.address(),
                producers: producer.address(),
                consumers: consumer.address(),
                mask: SLOTS - 1,
                stamp: 7,
                fenced: 1,
                limit_ns: 1_000_000,
            };
            let arguments: Vec<Box<dyn KernelArg>> = vec![
                Box::new(Plain(rings)),
                Box::new(pointer(&data)),
                Box::new(posts),
                Box::new(1u32),
                Box::new(pointer(&times)),
            ];
            Ok((vec![slots, producer, consumer, data, times], arguments))
        });
        marks[0]
    };
    assert_eq!(run(1)[LATE], 0);
    // A thread that claims a slot behind the last one finds no room.
    assert!(run(2)[LATE] > 0);
}
