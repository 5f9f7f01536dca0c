// SPDX-License-Identifier: MIT OR Apache-2.0
//! Trials of what kernels compute with: warp operations, shared memory, bulk copies, conversions, and a histogram.
//!
//! A conversion is compared for all inputs. Kernel and CPU add up a hash for each chunk of 2^16 inputs; where the
//! hashes differ, the kernel converts the chunk again and stores each result.

use crate::testbed::{DEADLINE, Testbed, Trial, fault, run};
use gin_gpu::{KernelArg, LaunchConfig, Memory, MemoryKind, Plain};
use gin_host::comm::Window;
use gin_host::comm::{CommError, Requirements, WindowFlags};
use gin_host::world::{Rank, launch};
use gin_kernels::histogram::{BINS, input};
use gpu_tests_kernels::bulk::{Bulk, LATE_WAIT, NO_PROXY_FENCE, change, sent};
use gpu_tests_kernels::primitives::{
    CHUNK, CONVERSIONS, Convert, FIRST_TO_F32, LANE_CHECKS, SHARED_RESULTS, chunk_hash, converted_here,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The trials of this module, which run on any devices.
pub const TRIALS: [Trial; 11] = [
    ("warp_operations_give_what_plain_code_gives", lanes),
    ("atomics_loads_and_stores_of_shared_memory_lose_nothing", shared),
    ("every_rank_has_the_histogram_of_every_rank", histogram),
    ("a_stream_of_bulk_copies_reaches_all_ranks_bit_for_bit", |testbed| streams(testbed, false)),
    ("one_rank_streams_bulk_copies_to_itself", |testbed| streams(testbed, true)),
    ("mistakes_in_a_stream_of_bulk_copies_are_wrong_words_or_luck", mistakes),
    ("all_inputs_convert_to_f16_as_on_the_cpu", |testbed| conversions(testbed, &[0, 5])),
    ("all_inputs_convert_to_bf16_as_on_the_cpu", |testbed| conversions(testbed, &[1, 6])),
    ("all_inputs_convert_to_e4m3_as_on_the_cpu", |testbed| conversions(testbed, &[2, 7])),
    ("all_inputs_convert_to_e5m2_as_on_the_cpu", |testbed| conversions(testbed, &[3, 8])),
    ("all_inputs_convert_to_ue8m0_as_on_the_cpu", |testbed| conversions(testbed, &[4, 9])),
];

fn zeroed(rank: &Rank, words: usize) -> Result<Arc<Memory>, CommError> {
    let memory = Memory::new(rank.device(), MemoryKind::Device, 8 * words as u64)?;
    memory.write(0, &vec![0u64; words])?;
    Ok(memory)
}

fn lanes(testbed: &Testbed) -> Result<(), String> {
    testbed.expect(|rank| {
        let mut wrong = Vec::new();
        // Whole warps, and a last warp with 8 threads.
        for threads in [64u32, 40] {
            let out = zeroed(rank, threads as usize)?;
            let address = out.address() as usize as *mut u32;
            run(rank, "hardware_lanes", LaunchConfig::new(1, threads), &[&address])?;
            let mut failed = vec![0u32; threads as usize];
            out.read(0, &mut failed)?;
            for (thread, failed) in failed.into_iter().enumerate().filter(|(_, failed)| *failed != 0) {
                let names = LANE_CHECKS.iter().enumerate().filter(|(index, _)| failed >> index & 1 != 0);
                let names: Vec<_> = names.map(|(_, name)| *name).collect();
                wrong.push(format!("thread {thread} of {threads}: {}", names.join(", ")));
            }
        }
        Ok(wrong)
    })
}

/// Returns the words that `hardware_shared` leaves for a type with this least and greatest value, except the sum and
/// the last value of the exchanges.
fn shared_words(threads: i64, least: i64, all_bits: u64) -> [u64; 5] {
    let bits = (0..threads).fold(0, |bits, thread| bits | 1u64 << (thread % 20));
    // An unsigned -3 is the greatest.
    let (min, max) = if least == 0 { (0, (-1i64) as u64 & all_bits) } else { (-3i64 as u64, (threads - 4) as u64) };
    [min, max, bits, !bits & if least == 0 { all_bits } else { u64::MAX }, threads as u64]
}

fn shared(testbed: &Testbed) -> Result<(), String> {
    const THREADS: u32 = 128;
    testbed.expect(|rank| {
        let out = zeroed(rank, SHARED_RESULTS)?;
        let address = out.address() as usize as *mut u64;
        let shape = LaunchConfig::new(1, THREADS).dynamic_shared(31 * THREADS);
        run(rank, "hardware_shared", shape, &[&address])?;
        let mut words = [0u64; SHARED_RESULTS];
        out.read(0, &mut words)?;
        let threads = i64::from(THREADS);
        let types = [("u32", 0, u64::from(u32::MAX)), ("i32", -1, 0), ("u64", 0, u64::MAX), ("i64", -1, 0)];
        let mut wrong = Vec::new();
        for ((name, least, all_bits), found) in types.into_iter().zip(words.chunks_exact(7)) {
            let [min, max, or, and, count] = shared_words(threads, least, all_bits);
            let expected = [min, max, or, and, (threads * (threads + 1) / 2) as u64, count];
            // Each value that was exchanged has been taken out, except the last.
            let found = [found[1], found[2], found[3], found[4], found[0].wrapping_add(found[5]), found[6]];
            if found != expected {
                wrong.push(format!(
                    "{name}: min, max, or, and, exchange, compare_exchange left {found:x?} instead of {expected:x?}"
                ));
            }
        }
        if words[28] != 0 {
            wrong.push(format!("{} threads read other elements than their neighbours wrote", words[28]));
        }
        Ok(wrong)
    })
}

fn histogram(testbed: &Testbed) -> Result<(), String> {
    testbed.expect(|rank| {
        let (words, threads) = if testbed.devices.is_some() { (1 << 22, 256) } else { (3000, 64) };
        let blocks = testbed.share(rank, "histogram", threads)?;
        let comm = rank.communicator(&Requirements::default().signals(1))?;
        let data: Window<u32> = comm.alloc_window(words, WindowFlags::NONE)?;
        let table: Window<u64> = comm.alloc_window(BINS * rank.ranks() as usize, WindowFlags::NONE)?;
        let bytes = |of: u32| (0..4 * words).map(move |index| input(of, index));
        let own: Vec<u8> = bytes(rank.rank()).collect();
        let own: Vec<u32> = own.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        data.write(0, &own)?;
        let barrier = zeroed(rank, 1)?;
        let word = barrier.address() as usize as *mut u64;
        let arguments: [&dyn KernelArg; 5] = [&comm.device()?, &data, &table, &word, &DEADLINE];
        run(rank, "histogram", LaunchConfig::new(blocks, threads), &arguments)?;
        let mut wrong: Vec<String> = fault(rank, &comm).into_iter().collect();
        let found = table.read_all()?;
        for of in 0..rank.ranks() {
            let mut expected = [0u64; BINS];
            bytes(of).for_each(|byte| expected[usize::from(byte)] += 1);
            let row = &found[BINS * of as usize..][..BINS];
            if let Some(bin) = (0..BINS).find(|bin| row[*bin] != expected[*bin]) {
                let (me, found, expected) = (rank.rank(), row[bin], expected[bin]);
                wrong.push(format!("rank {me}: {found} bytes {bin} of rank {of} instead of {expected}"));
            }
        }
        comm.destroy()?;
        Ok(wrong)
    })
}

/// Streams data through shared memory to all ranks by bulk copies, or to itself if there is one. Returns the number of
/// words that kernels found wrong, and all other errors; nothing if a GPU is older than sm_90, which has bulk copies
/// first.
fn stream(testbed: &Testbed, alone: bool, mistake: u32) -> Result<Option<(u64, Vec<String>)>, String> {
    const THREADS: u32 = 128;
    let is_real = testbed.devices.is_some();
    let is_large = is_real && !alone;
    let (units, chunks, rounds) = if is_large { (512, 64, 40) } else { (64, 3, 3) };
    let mut world = testbed.lsa().config();
    if alone {
        world.ranks = 1;
    }
    let body = |rank: Rank| -> Result<(u64, bool, Vec<String>), CommError> {
        let blocks = testbed.share(&rank, "hardware_bulk", THREADS)?.min(if is_large { 64 } else { 3 });
        let comm = rank.communicator(&Requirements::default().lsa_barriers(blocks))?;
        let out = zeroed(&rank, 2)?;
        let plan = Bulk { units, chunks, rounds, mistake, out: out.address() };
        let words = (plan.words() * u64::from(blocks)) as usize;
        let ranks = rank.ranks() as usize;
        let from: Window<u64> = comm.alloc_window(words, WindowFlags::NONE)?;
        let to: Window<u64> = comm.alloc_window(words * ranks, WindowFlags::NONE)?;
        let flags: Window<u64> = comm.alloc_window(ranks * blocks as usize, WindowFlags::NONE)?;
        let own: Vec<u64> = (0..words as u64).map(|index| sent(rank.rank(), index)).collect();
        from.write(0, &own)?;
        let plan = Plain(plan);
        let arguments: [&dyn KernelArg; 6] = [&comm.device()?, &to, &from, &flags, &plan, &DEADLINE];
        let shape = LaunchConfig::new(blocks, THREADS).dynamic_shared(32 * units);
        run(&rank, "hardware_bulk", shape, &arguments)?;
        let mut errors: Vec<String> = fault(&rank, &comm).into_iter().collect();
        let mut found = [0u64; 2];
        out.read(0, &mut found)?;
        let [wrong, has_run] = found;
        if has_run != 0 && mistake == 0 {
            // The last round, read by the host.
            let arrived = to.read_all()?;
            let sources = (0..rank.ranks()).flat_map(|of| (0..words as u64).map(move |index| sent(of, index)));
            let differs = sources.zip(&arrived).position(|(sent, found)| sent ^ change(rounds.into()) != *found);
            errors.extend(differs.map(|index| format!("rank {}: word {index} is wrong", rank.rank())));
        }
        comm.destroy()?;
        Ok((wrong, has_run != 0, errors))
    };
    let ranks = launch(world, body).map_err(|error| error.to_string())?;
    if is_real && ranks.iter().any(|(_, has_run, _)| !has_run) {
        println!("skipped: a GPU is older than sm_90, which has bulk copies first");
        return Ok(None);
    }
    let mut errors: Vec<String> = Vec::new();
    for (number, (_, has_run, of)) in ranks.iter().enumerate() {
        errors.extend(of.iter().cloned());
        errors.extend((!has_run).then(|| format!("rank {number}: the kernel has no bulk copies")));
    }
    Ok(Some((ranks.iter().map(|(wrong, ..)| wrong).sum(), errors)))
}

/// Streams without a mistake.
fn streams(testbed: &Testbed, alone: bool) -> Result<(), String> {
    match stream(testbed, alone, 0)? {
        Some((wrong, errors)) if wrong != 0 || !errors.is_empty() => {
            Err(format!("kernels found {wrong} wrong words; {}", errors.join("; ")))
        }
        _ => Ok(()),
    }
}

/// Streams with each mistake, and prints the number of wrong words. On a virtual GPU each must show. A GPU may be
/// lucky: `docs/testing.md` says why.
fn mistakes(testbed: &Testbed) -> Result<(), String> {
    let mut unnoticed = Vec::new();
    for (mistake, name) in [
        (NO_PROXY_FENCE, "no fence.proxy.async before a copy of stored data"),
        (LATE_WAIT, "data changed before the mbarrier was waited for"),
    ] {
        let mut max = 0;
        for _ in 0..3 {
            let Some((wrong, errors)) = stream(testbed, false, mistake)? else { return Ok(()) };
            if !errors.is_empty() {
                return Err(format!("{name}: {}", errors.join("; ")));
            }
            max = max.max(wrong);
        }
        println!("{name}: at most {max} wrong words in 3 runs");
        if max == 0 && testbed.devices.is_none() {
            unnoticed.push(name);
        }
    }
    if unnoticed.is_empty() { Ok(()) } else { Err(format!("no wrong words: {}", unnoticed.join("; "))) }
}

/// The launch of a kernel that converts.
fn convert(rank: &Rank, plan: Convert, blocks: u32) -> Result<(), CommError> {
    let (function, stream) = (rank.kernel("hardware_convert")?, rank.stream()?);
    // Safety: the callers allocate what the plan describes.
    unsafe { stream.launch(&function, LaunchConfig::new(blocks, 256), &[&Plain(plan)])? };
    stream.synchronize()?;
    Ok(())
}

/// Compares conversions of all inputs on the device with those on the CPU. The ranks share the chunks.
fn conversions(testbed: &Testbed, which: &[u32]) -> Result<(), String> {
    testbed.expect(|rank| {
        let mut wrong = Vec::new();
        for &conversion in which {
            let all = if conversion < FIRST_TO_F32 { u32::MAX / CHUNK + 1 } else { 1 };
            // A virtual GPU converts some chunks, which have numbers of every kind.
            let step = if testbed.devices.is_some() || all == 1 { 1 } else { 0x1fff };
            let share = (all / step).div_ceil(rank.ranks()).max(1);
            let first = rank.rank() * share * step;
            if first < all {
                let cpu = |bits| converted_here(conversion, bits);
                wrong.extend(compare(rank, conversion, first, share.min(all - first), step, cpu)?);
            }
        }
        Ok(wrong)
    })
}

/// Compares `chunks` chunks, each `step` after the last, with `cpu`. Returns the first difference.
fn compare(
    rank: &Rank,
    conversion: u32,
    first: u32,
    chunks: u32,
    step: u32,
    cpu: impl Fn(u32) -> u64 + Sync,
) -> Result<Option<String>, CommError> {
    let hashes = zeroed(rank, chunks as usize)?;
    let plan = Convert { conversion, first, chunks, each: 0, out: hashes.address() };
    if step == 1 {
        convert(rank, plan, chunks.min(1024))?;
    } else {
        for index in 0..chunks {
            let out = plan.out + 8 * u64::from(index);
            convert(rank, Convert { first: first + index * step, chunks: 1, out, ..plan }, 1)?;
        }
    }
    let mut device = vec![0u64; chunks as usize];
    hashes.read(0, &mut device)?;
    let (next, differs) = (AtomicUsize::new(0), AtomicUsize::new(usize::MAX));
    let scan = || {
        loop {
            let index = next.fetch_add(1, Relaxed);
            // All chunks before the first that differs have been taken.
            let Some(hash) = device.get(index).filter(|_| index < differs.load(Relaxed)) else { break };
            if chunk_hash(first + index as u32 * step, &cpu) != *hash {
                differs.fetch_min(index, Relaxed);
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).div_ceil(rank.ranks() as usize);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(scan);
        }
    });
    let differs = differs.into_inner();
    if differs == usize::MAX {
        return Ok(None);
    }
    let chunk = first + differs as u32 * step;
    let each = zeroed(rank, CHUNK as usize)?;
    convert(rank, Convert { first: chunk, chunks: 1, each: 1, out: each.address(), ..plan }, 1)?;
    let mut results = vec![0u64; CHUNK as usize];
    each.read(0, &mut results)?;
    let inputs = (chunk * CHUNK..=chunk * CHUNK + (CHUNK - 1)).zip(results);
    let mut different = inputs.map(|(bits, found)| (bits, found, cpu(bits))).filter(|(_, found, cpu)| found != cpu);
    let name = CONVERSIONS[conversion as usize];
    Ok(Some(match different.next() {
        Some((bits, found, cpu)) => format!(
            "{name}: chunk {chunk} is the first that differs, from input {bits:#010x}: the device gives {found:#x}, \
             the CPU {cpu:#x}; {} inputs of the chunk differ",
            1 + different.count()
        ),
        None => format!("{name}: the hash of chunk {chunk} differs, but each result of a second conversion is right"),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_trials_pass_on_virtual_gpus() {
        for (name, trial) in TRIALS {
            trial(&Testbed::simulated()).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
    }

    #[test]
    fn a_result_that_differs_is_found_with_its_chunk_and_input() {
        let wrong = [0x3f83_1234u32, 0x3f84_0001, 0x3f84_0002];
        let found = Testbed::simulated().run(|rank| {
            compare(rank, 0, 0x3f80, 8, 1, |bits| converted_here(0, bits) ^ u64::from(wrong.contains(&bits)))
        });
        let text = found.unwrap().remove(0).unwrap();
        let value = converted_here(0, wrong[0]);
        let expected = format!(
            "f32 to F16: chunk 16259 is the first that differs, from input 0x3f831234: the device gives {value:#x}, the \
             CPU {:#x}; 1 inputs of the chunk differ",
            value ^ 1
        );
        assert_eq!(text, expected);
    }
}
