// SPDX-License-Identifier: MIT OR Apache-2.0
//! Trials of effects that only hardware shows: caches, residency, streams, modules, long runs.
//!
//! They run on any devices. On virtual devices they prove that the trials themselves are right.

use crate::printing::prints;
use crate::testbed::{DEADLINE, Testbed, Trial, fault, run};
use bytemuck::Zeroable;
use gin_gpu::{GpuError, KernelArg, LaunchConfig};
use gin_gpu::{Memory, MemoryKind, Module, ModuleSource, Plain, Stream};
use gin_host::comm::Window;
use gin_host::comm::{CommError, Communicator, Requirements, WindowFlags};
use gin_host::world::{Rank, WorldConfig, launch};
use gpu_tests_kernels::{
    CHUNK_BYTES, Chunked, Exchange, Flood, Link, Stale, WARP_SIZE, exchange_len, fill, hardware_spin, posts, value,
};
use std::sync::Arc;

/// Rounds in one launch of a long trial.
const ROUNDS_A_LAUNCH: u64 = 250;

/// The trials that kernels also pass if they drive NICs.
pub const NIC_TRIALS: &[Trial] = TRIALS.split_at(8).0;

/// The trials that run on any devices. The last five need loads and stores.
pub const TRIALS: [Trial; 21] = [
    ("lines_read_before_by_all_blocks_are_fresh_after_a_put_was_waited_for", |testbed| stale(testbed, false)),
    ("lines_read_before_by_all_blocks_are_fresh_after_a_get_was_flushed", |testbed| stale(testbed, true)),
    ("every_thread_of_every_resident_block_posts_at_once", |testbed| flood(testbed, u32::MAX, 32, 1)),
    ("lanes_that_post_get_through_a_full_queue_while_others_vote", |testbed| sparse(testbed, false)),
    ("lanes_that_call_a_post_get_through_a_full_queue_while_others_vote", |testbed| sparse(testbed, true)),
    ("one_block_posts_while_every_processor_polls", |testbed| flood(testbed, 1, 256, 4)),
    ("kernels_on_several_streams_communicate_at_the_same_time", streams),
    ("two_communicators_work_at_the_same_time", communicators),
    ("every_value_of_a_long_ring_is_right", |testbed| long(testbed, 1)),
    ("every_value_of_a_long_all_to_all_is_right", |testbed| long(testbed, testbed.ranks() - 1)),
    ("lines_that_kernels_print_are_whole_in_order_and_counted_if_dropped", prints),
    ("hundreds_of_launches_that_fill_the_gpu_follow_each_other_on_a_stream", |testbed| follow(testbed, false)),
    ("launches_that_fill_the_gpu_follow_each_other_by_events_and_in_graphs", |testbed| follow(testbed, true)),
    ("kernels_with_other_shared_memory_start_beside_a_kernel_on_every_processor", beside),
    ("dependent_kernels_start_early_in_a_stream_and_in_a_graph_and_see_what_those_before_wrote", dependents),
    ("ranges_that_blocks_put_in_turns_arrive_whole_and_nothing_beside_them", chunks),
    ("lines_read_before_are_fresh_after_a_put_by_stores_was_waited_for", |testbed| stale(&testbed.lsa(), false)),
    ("lines_read_before_are_fresh_after_a_get_by_loads_was_flushed", |testbed| stale(&testbed.lsa(), true)),
    ("ranges_that_blocks_store_in_turns_arrive_whole_and_nothing_beside_them", |testbed| chunks(&testbed.lsa())),
    ("every_value_of_a_long_ring_by_loads_and_stores_is_right", |testbed| long(&testbed.lsa(), 1)),
    ("every_value_of_a_long_all_to_all_by_loads_and_stores_is_right", |testbed| {
        long(&testbed.lsa(), testbed.ranks() - 1)
    }),
];

/// Launches cooperative grids that fill the GPU, one after another: on one stream, or on two that events order and as
/// graphs.
fn follow(testbed: &Testbed, by_events: bool) -> Result<(), String> {
    testbed.expect(|rank| {
        const THREADS: u32 = 64;
        let out = Memory::new(rank.device(), MemoryKind::Device, 8 * u64::from(THREADS))?;
        let address = out.address() as usize as *mut u32;
        // The other ranks of the GPU are as many.
        let blocks = testbed.share(rank, "hardware_lanes", THREADS)?;
        let (kernel, streams) = (rank.kernel("hardware_lanes")?, [rank.stream()?, rank.stream()?]);
        let shape = LaunchConfig::new(blocks, THREADS).cooperative();
        // Safety: the kernel's only parameter, which lives until all have ended.
        let launch = |stream: &Arc<dyn Stream>| unsafe { stream.launch(&kernel, shape, &[&address]) };
        let mut wrong = Vec::new();
        if by_events {
            for _ in 0..20 {
                launch(&streams[0])?;
                streams[1].wait_for(&*streams[0].record()?)?;
                launch(&streams[1])?;
                streams[0].wait_for(&*streams[1].record()?)?;
            }
            let graph = streams[0].capture(|| (0..10).try_for_each(|_| launch(&streams[0])))?;
            for _ in 0..20 {
                // Safety: as above.
                unsafe { streams[0].replay(&*graph)? };
            }
            let other = Memory::new(rank.device(), MemoryKind::Device, 8)?;
            let failing = streams[0].capture(|| Err(CommError::from(other.slice(0..9).map(drop).unwrap_err())));
            if failing.is_ok() {
                wrong.push("a capture whose work failed made a graph".to_owned());
            }
        } else {
            let launches = if testbed.devices.is_some() { 400 } else { 20 };
            (0..launches).try_for_each(|_| launch(&streams[0]))?;
        }
        for stream in &streams {
            stream.synchronize()?;
        }
        let running = rank.device().running();
        if running != 0 {
            wrong.push(format!("rank {}: {running} streams have kernels after all ended", rank.rank()));
        }
        Ok(wrong)
    })
}

/// Starts a kernel with shared memory while kernels without it wait on every SM.
fn beside(testbed: &Testbed) -> Result<(), String> {
    // Few blocks on an SM: the driver gives them little shared memory.
    const THREADS: u32 = 512;
    const LIMIT_NS: u64 = 5_000_000_000;
    let dynamic_shared = if testbed.sharing() > 1 { 96 << 10 } else { 0 };
    testbed.expect(|rank| {
        // One half of the room is left.
        let blocks = (testbed.share(rank, "hardware_spin", THREADS)? / 2).max(1);
        let words = Memory::new(rank.device(), MemoryKind::Pinned, 32)?;
        words.write(0, &[0u64, 0, 1, 0])?;
        let word = |offset: u64| std::ptr::with_exposed_provenance_mut::<u64>((words.address() + offset) as usize);
        let (waits, ends) = (rank.stream()?, rank.stream()?);
        // Safety: the words outlive the waits for the streams.
        unsafe { hardware_spin::launch(&waits, LaunchConfig::new(blocks, THREADS), word(0), word(8), LIMIT_NS)? };
        let mut started = [0u64];
        while started[0] < u64::from(blocks) {
            words.read(8, &mut started)?;
            std::thread::yield_now();
        }
        rank.barrier()?;
        let shape = LaunchConfig::new(1, 64).dynamic_shared(dynamic_shared);
        // Safety: as above.
        unsafe { hardware_spin::launch(&ends, shape, word(16), word(24), LIMIT_NS)? };
        ends.synchronize()?;
        let late = waits.is_idle()?.then(|| format!("rank {}: the kernel did not start beside others", rank.rank()));
        rank.barrier()?;
        words.write(0, &[1u64])?;
        waits.synchronize()?;
        Ok(late.into_iter().collect())
    })
}

/// Launches dependent kernels on one rank that has its GPU for itself: some begin before those before have ended, and
/// all see what these wrote. In order, none begins early.
fn dependents(testbed: &Testbed) -> Result<(), String> {
    const LINKS: u64 = 50;
    let (blocks, threads, pause) = if testbed.devices.is_some() { (16, 256, 20_000) } else { (2, 32, 2_000) };
    let mut config = WorldConfig::threads(1);
    config.devices = testbed.devices.clone();
    let results = launch(config, |rank| -> Result<Vec<String>, CommError> {
        let mut wrong = Vec::new();
        for (way, in_graph, dependent) in
            [("in order", false, false), ("in a stream", false, true), ("in a graph", true, true)]
        {
            let words = 3 + u64::from(blocks * threads);
            let memory = Memory::new(rank.device(), MemoryKind::Device, 8 * words)?;
            let link = Plain(Link { values: memory.address() + 24, words: memory.address(), pause });
            let (kernel, stream) = (rank.kernel("hardware_link")?, rank.stream()?);
            let shape = LaunchConfig::new(blocks, threads);
            let shape = if dependent { shape.dependent() } else { shape };
            // Safety: the kernel's parameters; the memory lives until all have ended.
            let links =
                || (0..LINKS).try_for_each(|number| unsafe { stream.launch(&kernel, shape, &[&link, &number]) });
            if in_graph {
                let graph = stream.capture(links)?;
                // Safety: as above.
                unsafe { stream.replay(&*graph)? };
                stream.synchronize()?;
            } else {
                links()?;
                stream.synchronize()?;
            }
            let mut found = vec![0u64; words as usize];
            memory.read(0, &mut found)?;
            let [ended, early, old, ref values @ ..] = found[..] else { continue };
            if (ended, old) != (LINKS * u64::from(blocks), 0) || values.iter().any(|value| *value != LINKS) {
                wrong.push(format!("{way}: {ended} blocks ended, {old} threads found old values, {values:?}"));
            }
            if (early > 0) != dependent {
                wrong.push(format!("{way}: {early} blocks began before the kernels before had ended"));
            }
            if rank.device().running() != 0 {
                wrong.push(format!("{way}: streams have kernels after all ended"));
            }
        }
        if testbed.devices.is_some() {
            let text = format!(
                ".version 7.8\n.target sm_80\n.address_size 64\n.visible .global .align 4 .u32 {} = {};\n\
                 .visible .entry old() {{ ret; }}\n",
                gin_abi::ABI_SYMBOL,
                gin_abi::ABI_VERSION
            );
            let old = rank.device().load(ModuleSource::Ptx(&text))?.function("old")?;
            // Safety: it has no parameters and does nothing.
            match unsafe { rank.stream()?.launch(&old, LaunchConfig::new(1, 32).dependent(), &[]) } {
                Err(GpuError::NotDependent { .. }) => {}
                other => wrong.push(format!("a kernel for sm_80 was launched as a dependent one: {other:?}")),
            }
        }
        Ok(wrong)
    });
    let wrong: Vec<String> = results.map_err(|error| error.to_string())?.into_iter().flatten().collect();
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
}

/// Four words in which kernels count wrong values, after `others` other words. All start at zero.
#[derive(Debug)]
struct Table {
    memory: Arc<Memory>,
    others: u64,
}

impl Table {
    fn new(rank: &Rank, others: u64) -> Result<Self, CommError> {
        Ok(Self { memory: Memory::new(rank.device(), MemoryKind::Device, 8 * (others + 4))?, others })
    }

    fn address(&self) -> u64 {
        self.memory.address()
    }

    fn wrong(&self) -> u64 {
        self.address() + 8 * self.others
    }

    fn report(&self, rank: &Rank) -> Result<Option<String>, CommError> {
        let mut words = [0u64; 4];
        self.memory.read(8 * self.others, &mut words)?;
        let [count, round, from, seen] = words;
        let rank = rank.rank();
        Ok((count > 0).then(|| {
            format!("rank {rank}: {count} values are wrong, the first in round {round}, from rank {from}: {seen:#018x}")
        }))
    }
}

fn stale(testbed: &Testbed, get: bool) -> Result<(), String> {
    // Larger than the first-level cache of an SM, several times.
    const ELEMENTS: u64 = 2048;
    testbed.expect(|rank| {
        let (threads, rounds) = (256, if testbed.devices.is_some() { 100 } else { 3 });
        let elements = if testbed.devices.is_some() { ELEMENTS } else { 64 };
        let threads = if testbed.devices.is_some() { threads } else { 32 };
        let blocks = testbed.share(rank, "hardware_stale", threads)?;
        let comm = rank.communicator(&Requirements::default())?;
        let data: Window<u64> = comm.alloc_window(elements as usize, WindowFlags::NONE)?;
        let source: Window<u64> = comm.alloc_window(elements as usize, WindowFlags::NONE)?;
        let table = Table::new(rank, 1)?;
        let (get, lsa) = (u64::from(get), u64::from(testbed.lsa));
        let plan = Stale { elements, rounds, barrier: table.address(), wrong: table.wrong(), get, lsa };
        let shape = LaunchConfig::new(blocks, threads);
        run(rank, "hardware_stale", shape, &[&comm.device()?, &data, &source, &Plain(plan), &DEADLINE])?;
        let wrong = fault(rank, &comm).into_iter().chain(table.report(rank)?).collect();
        comm.destroy()?;
        Ok(wrong)
    })
}

/// Puts ranges of every kind of length, at aligned and at other addresses.
fn chunks(testbed: &Testbed) -> Result<(), String> {
    // Bytes before and after a range that nobody may write.
    const MARGIN: usize = 160;
    testbed.expect(|rank| {
        let is_real = testbed.devices.is_some();
        let threads = if is_real { 256 } else { 32 };
        // Few blocks, so that few bytes give them several turns.
        let blocks = testbed.share(rank, "hardware_chunks", threads)?.min(if is_real { 64 } else { 2 });
        let turn = blocks as usize * CHUNK_BYTES;
        let mut lengths =
            vec![0, 1, 15, 16, 17, 127, 128, 129, 1000, 128 * blocks as usize + 1, turn - 1, turn, turn + 1];
        lengths.push(if is_real { 3 * turn + 12345 } else { 2 * turn + 345 });
        let max = 16 + 2 * MARGIN + lengths[lengths.len() - 1];
        let comm = rank.communicator(&Requirements::default().signals(1))?;
        let data: Window<u8> = comm.alloc_window(max, WindowFlags::NONE)?;
        let source: Window<u8> = comm.alloc_window(max, WindowFlags::NONE)?;
        let handle = comm.device()?;
        let left = (rank.rank() + rank.ranks() - 1) % rank.ranks();
        let (mut wrong, mut round) = (Vec::new(), 0u64);
        for (to, from) in [(0, 0), (16, 128), (3, 19), (8, 4), (1, 2)] {
            for &len in &lengths {
                let mut sent = vec![0; max];
                fill(&mut sent, rank.rank(), round, 0);
                source.write(0, &sent)?;
                let to = MARGIN + to;
                let mut expected = vec![0xa5; to + len + MARGIN];
                data.write(0, &expected)?;
                fill(&mut expected[to..to + len], left, round, from);
                let plan =
                    Chunked { to: to as u64, from: from as u64, len: len as u64, before: round * u64::from(blocks) };
                let arguments: [&dyn KernelArg; 5] = [&handle, &data, &source, &Plain(plan), &DEADLINE];
                run(rank, "hardware_chunks", LaunchConfig::new(blocks, threads), &arguments)?;
                let mut found = vec![0; expected.len()];
                data.read(0, &mut found)?;
                if found != expected {
                    let index = (0..found.len()).find(|&index| found[index] != expected[index]).unwrap_or(0);
                    let (me, seen, right) = (rank.rank(), found[index], expected[index]);
                    wrong.push(format!(
                        "rank {me}: {len} bytes from {from} to {to}: byte {index} is {seen:#x} instead of {right:#x}"
                    ));
                }
                round += 1;
            }
        }
        wrong.extend(fault(rank, &comm));
        comm.destroy()?;
        Ok(wrong)
    })
}

fn flood(testbed: &Testbed, posters: u32, threads: u32, each: u32) -> Result<(), String> {
    testbed.expect(|rank| {
        let threads = if testbed.devices.is_some() { threads / testbed.division() } else { 32 };
        let blocks = testbed.share(rank, "hardware_flood", threads)?;
        let comm = rank.communicator(&Requirements::default().contexts(8).queue_depth(1024))?;
        let len = u64::from(posters.min(blocks)) * u64::from(threads) * u64::from(each);
        let data: Window<u64> = comm.alloc_window(len as usize, WindowFlags::NONE)?;
        let plan = Flood { posters, each };
        let shape = LaunchConfig::new(blocks, threads);
        run(rank, "hardware_flood", shape, &[&comm.device()?, &data, &Plain(plan), &DEADLINE])?;
        let (me, left) = (rank.rank(), (rank.rank() + rank.ranks() - 1) % rank.ranks());
        let values = data.read_all()?;
        let wrong = values.iter().zip(0..).filter(|(seen, index)| **seen != value(left, me, 1, *index));
        let (count, first) = wrong.fold((0, None), |(count, first), (_, index)| (count + 1, first.or(Some(index))));
        let report = first.map(|first| format!("rank {me}: {count} of {len} values are wrong, the first at {first}"));
        let all = fault(rank, &comm).into_iter().chain(report).collect();
        comm.destroy()?;
        Ok(all)
    })
}

fn sparse(testbed: &Testbed, calls: bool) -> Result<(), String> {
    let rounds: u32 = if testbed.devices.is_some() { 4096 / testbed.division() } else { 64 };
    testbed.expect(|rank| {
        let comm = rank.communicator(&Requirements::default().queue_depth(64))?;
        let data: Window<u64> = comm.alloc_window((rounds * WARP_SIZE) as usize, WindowFlags::NONE)?;
        let handle = comm.device()?;
        let words = [data.handle()];
        let copy = Memory::new(rank.device(), MemoryKind::Device, size_of_val(&words) as u64)?;
        copy.write(0, &words)?;
        let copies = if calls { [handle.handle().copy, copy.address()] } else { [0, 0] };
        let arguments: [&dyn KernelArg; 5] = [&handle, &data, &rounds, &Plain(copies), &DEADLINE];
        run(rank, "hardware_sparse", LaunchConfig::new(1, WARP_SIZE), &arguments)?;
        let left = (rank.rank() + rank.ranks() - 1) % rank.ranks();
        let sent = |index: u64| posts(index as u32 % WARP_SIZE, index as u32 / WARP_SIZE);
        let wrong = data
            .read_all()?
            .into_iter()
            .zip(0..)
            .find(|&(seen, index)| seen != if sent(index) { value(left, rank.rank(), 1, index) } else { 0 });
        let wrong = wrong.map(|(seen, index)| format!("rank {}: value {index} is {seen:#x}", rank.rank()));
        let all = fault(rank, &comm).into_iter().chain(wrong).collect();
        comm.destroy()?;
        Ok(all)
    })
}

/// The communicator, windows and tables of one or several exchanges.
pub(crate) struct Exchanges {
    pub(crate) comm: Communicator,
    pub(crate) inbox: Window<u64>,
    pub(crate) outbox: Window<u64>,
    neighbours: u32,
    rounds: u64,
    elements: u64,
    tables: Vec<Table>,
    lsa: bool,
}

impl Exchanges {
    /// Prepares `contexts` exchanges of `rounds` rounds a launch, each on its own context.
    pub(crate) fn new(
        rank: &Rank,
        contexts: u32,
        neighbours: u32,
        elements: u64,
        rounds: u64,
    ) -> Result<Self, CommError> {
        let requirements = Requirements::default().contexts(contexts).signals(2 * neighbours).counters(neighbours);
        let comm = rank.communicator(&requirements)?;
        let len = u64::from(contexts) * exchange_len(neighbours, elements);
        let (inbox, outbox) =
            (comm.alloc_window(len as usize, WindowFlags::NONE)?, comm.alloc_window(len as usize, WindowFlags::NONE)?);
        let tables = (0..contexts).map(|_| Table::new(rank, 1)).collect::<Result<_, _>>()?;
        Ok(Self { comm, inbox, outbox, neighbours, rounds, elements, tables, lsa: false })
    }

    /// Returns the argument of a context's kernel.
    pub(crate) fn plan(&self, context: u32) -> Exchange {
        let table = &self.tables[context as usize];
        Exchange {
            context,
            neighbours: self.neighbours,
            elements: self.elements,
            start: u64::from(context) * exchange_len(self.neighbours, self.elements),
            rounds: self.rounds,
            done: table.address(),
            wrong: table.wrong(),
            lsa: u64::from(self.lsa),
            ..Exchange::zeroed()
        }
    }

    /// Starts the kernel of a context, from `module`, or from the rank's own module if it is `None`.
    pub(crate) fn start(
        &self,
        rank: &Rank,
        context: u32,
        module: Option<&dyn Module>,
    ) -> Result<Arc<dyn Stream>, CommError> {
        const NAME: &str = "hardware_exchange";
        let function = match module {
            Some(module) => module.function(NAME)?,
            None => rank.kernel(NAME)?,
        };
        let stream = rank.stream()?;
        let arguments: [&dyn KernelArg; 5] =
            [&self.comm.device()?, &self.inbox, &self.outbox, &Plain(self.plan(context)), &DEADLINE];
        // Safety: tables and windows are as the kernel requires, and outlive it.
        unsafe { stream.launch(&function, LaunchConfig::new(1, 128).cooperative(), &arguments)? };
        Ok(stream)
    }

    /// Returns the failures after `rounds` rounds on each context.
    pub(crate) fn report(&self, rank: &Rank, rounds: u64) -> Result<Vec<String>, CommError> {
        let mut report: Vec<String> = fault(rank, &self.comm).into_iter().collect();
        for (context, table) in self.tables.iter().enumerate() {
            report.extend(table.report(rank)?);
            let mut done = [0u64];
            table.memory.read(0, &mut done)?;
            if done[0] != rounds {
                let rank = rank.rank();
                report.push(format!("rank {rank}, context {context}: expected {rounds} rounds, got {}", done[0]));
            }
        }
        Ok(report)
    }
}

fn streams(testbed: &Testbed) -> Result<(), String> {
    const STREAMS: u32 = 4;
    testbed.expect(|rank| {
        let exchanges = Exchanges::new(rank, STREAMS, 1, 16, if testbed.devices.is_some() { 200 } else { 5 })?;
        rank.barrier()?;
        // All of them run at once: none waits for the stream of another.
        let started = (0..STREAMS).map(|context| exchanges.start(rank, context, None));
        let streams = started.collect::<Result<Vec<_>, _>>()?;
        for stream in streams {
            stream.synchronize()?;
        }
        rank.barrier()?;
        let report = exchanges.report(rank, exchanges.rounds)?;
        exchanges.comm.destroy()?;
        Ok(report)
    })
}

fn communicators(testbed: &Testbed) -> Result<(), String> {
    testbed.expect(|rank| {
        let rounds = if testbed.devices.is_some() { 200 } else { 5 };
        let (one, other) = (Exchanges::new(rank, 1, 1, 16, rounds)?, Exchanges::new(rank, 1, 1, 300, rounds)?);
        rank.barrier()?;
        let streams = [one.start(rank, 0, None)?, other.start(rank, 0, None)?];
        for stream in streams {
            stream.synchronize()?;
        }
        rank.barrier()?;
        let mut report = one.report(rank, rounds)?;
        report.extend(other.report(rank, rounds)?);
        // One communicator continues when the other is destroyed.
        one.comm.destroy()?;
        let stream = other.start(rank, 0, None)?;
        stream.synchronize()?;
        rank.barrier()?;
        report.extend(other.report(rank, 2 * rounds)?);
        other.comm.destroy()?;
        Ok(report)
    })
}

fn long(testbed: &Testbed, neighbours: u32) -> Result<(), String> {
    testbed.expect(|rank| {
        let rounds = ROUNDS_A_LAUNCH.min(testbed.iterations.max(1));
        let exchanges = Exchanges { lsa: testbed.lsa, ..Exchanges::new(rank, 1, neighbours, 64, rounds)? };
        let mut done = 0;
        while done < testbed.iterations {
            rank.barrier()?;
            exchanges.start(rank, 0, None)?.synchronize()?;
            rank.barrier()?;
            done += rounds;
            let report = exchanges.report(rank, done)?;
            // If one rank has failed, all stop.
            let failed = rank.bootstrap().all_gather(&[u8::from(!report.is_empty())])?;
            if failed.iter().any(|flag| flag.as_slice() != [0]) {
                return Ok(report);
            }
        }
        exchanges.comm.destroy()?;
        Ok(Vec::new())
    })
}

/// Loads a module again and again, communicates with a kernel of it, and drops it. `text` is the PTX for a GPU.
///
/// # Errors
/// Returns the failures.
pub fn reload(testbed: &Testbed, text: &'static str) -> Result<(), String> {
    const TIMES: u64 = 5;
    testbed.expect(|rank| {
        let exchanges = Exchanges::new(rank, 1, 1, 16, 20)?;
        for _ in 0..TIMES {
            let module = rank.device().load(ModuleSource::Ptx(text))?;
            rank.barrier()?;
            let stream = exchanges.start(rank, 0, Some(&*module))?;
            // The module is unloaded once nothing runs, not while its kernel does.
            drop(module);
            stream.synchronize()?;
            rank.barrier()?;
        }
        let report = exchanges.report(rank, TIMES * exchanges.rounds)?;
        exchanges.comm.destroy()?;
        Ok(report)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use gin_soft_nic_host::SoftEngine;
    use gin_testkit::rotation;

    #[test]
    fn the_trials_pass_on_virtual_gpus() {
        for (name, trial) in rotation(0, TRIALS) {
            trial(&Testbed::simulated()).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
    }

    #[test]
    fn the_trials_pass_with_kernels_that_drive_nics() {
        for (name, trial) in NIC_TRIALS {
            trial(&Testbed::simulated().driving(SoftEngine::Process)).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
    }
}
