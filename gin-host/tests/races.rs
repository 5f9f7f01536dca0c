// SPDX-License-Identifier: MIT OR Apache-2.0
//! Data races that kernels contain on purpose are found, with both places. Without the mistake the kernels are clean.

use gin_device::prelude::*;
use gin_gpu::LaunchConfig;
use gin_host::comm::{CommError, Requirements, Routes, WindowFlags};
use gin_host::world::{LaunchError, SoftNics, WorldConfig, WorldMode, launch};
use gin_net::peer::PeerNetwork;
use gin_soft_nic::Options;
use gin_testkit::{Reorder, Withhold};
use gin_virtual::{Actor, Race, RaceAccess, RaceMemory, RaceOperation, WorldError};

const CAME: SignalId = SignalId::new(0);
const DONE: SignalId = SignalId::new(1);
const LEFT: CounterId = CounterId::new(0);
const LEN: usize = 24;
const LONG: Deadline = Deadline::after_ms(5_000);

/// Rank 0 puts a vector to rank 1. The mistake: a thread of rank 1 reads it before the wait.
///
/// # Safety
/// - One block, on two ranks.
#[kernel]
pub unsafe fn race_test_read(comm: Comm, to: Window<u64>, from: Window<u64>, mistake: u32) {
    let gin = Gin::new(&comm, ContextId::new(0));
    let peer = comm.world().right();
    let exchange = || -> Result<(), Fault> {
        if comm.world().rank() == 0 {
            // A kernel that is launched late comes after all that its host has waited for, the put perhaps.
            gin.wait_signal(&Block, CAME, 1, LONG)?;
            return gin.put(peer, to.range(0, LEN), from.range(0, LEN)).signal(CAME.inc()).issue(&Block); // put
        }
        gin.signal(peer, CAME.inc()).issue(&Block)?;
        if mistake != 0 && thread_in_block() == 3 {
            let _ = to.read(5); // read too early
        }
        gin.wait_signal(&Block, CAME, 1, LONG)
    };
    match exchange() {
        Ok(()) => Block.stripe(LEN).for_each(|i| {
            let _ = to.read(i);
        }),
        Err(fault) => comm.report(fault),
    }
}

/// Rank 0 puts a vector to rank 1. The mistake: it changes the source before the put has read it.
///
/// # Safety
/// - One block, on two ranks.
#[kernel]
pub unsafe fn race_test_source(comm: Comm, to: Window<u64>, from: Window<u64>, mistake: u32) {
    let gin = Gin::new(&comm, ContextId::new(0));
    let exchange = || -> Result<(), Fault> {
        if comm.world().rank() == 1 {
            return gin.wait_signal(&Block, CAME, 1, LONG);
        }
        let put = gin.put(comm.world().right(), to.range(0, LEN), from.range(0, LEN));
        put.signal(CAME.inc()).counter(LEFT).issue(&Block)?; // put of the source
        if mistake == 0 {
            gin.wait_counter(&Block, LEFT, 1, LONG)?;
        }
        Block.stripe(LEN).for_each(|i| from.write(i, 1)); // change of the source
        gin.flush(&Block, LONG)
    };
    if let Err(fault) = exchange() {
        comm.report(fault);
    }
}

/// Ranks 1 and 2 put a vector to rank 0. The mistake: the same place.
///
/// # Safety
/// - One block, on three ranks.
#[kernel]
pub unsafe fn race_test_puts(comm: Comm, to: Window<u64>, from: Window<u64>, mistake: u32) {
    let gin = Gin::new(&comm, ContextId::new(0));
    let (world, half) = (comm.world(), LEN / 2);
    let exchange = || -> Result<(), Fault> {
        if world.rank() == 0 {
            gin.wait_signal(&Block, CAME, 2, LONG)?;
            gin.signal(world.right(), CAME.inc()).issue(&Block)?;
            return gin.signal(world.left(), CAME.inc()).issue(&Block);
        }
        let first = if mistake != 0 { half } else { half * (world.rank() as usize - 1) };
        let put = gin.put(world.after(world.size() - world.rank()), to.range(first, half), from.range(0, half));
        put.signal(CAME.inc()).issue(&Block)?; // put of both
        // A kernel that has ended comes before one that is launched later.
        gin.wait_signal(&Block, CAME, 1, LONG)
    };
    if let Err(fault) = exchange() {
        comm.report(fault);
    }
}

/// Rank 0 puts a value to rank 1. The mistake: rank 1 stores to the same place.
///
/// # Safety
/// - One block, on two ranks.
#[kernel]
pub unsafe fn race_test_value(comm: Comm, to: Window<u64>, from: Window<u64>, mistake: u32) {
    let gin = Gin::new(&comm, ContextId::new(0));
    let (_, peer) = (from, comm.world().right());
    let exchange = || -> Result<(), Fault> {
        if comm.world().rank() == 0 {
            gin.put_value(peer, to.at(7), 0xaa55u64).signal(CAME.inc()).issue(&Thread)?; // put of a value
            return gin.wait_signal(&Thread, CAME, 1, LONG);
        }
        to.write(if mistake != 0 { 7 } else { 8 }, 3); // store beside it
        gin.wait_signal(&Thread, CAME, 1, LONG)?;
        gin.signal(peer, CAME.inc()).issue(&Thread)
    };
    if let Err(fault) = exchange() {
        comm.report(fault);
    }
}

/// Rank 0 puts a vector to rank 1, where the first warp waits. The mistake: the second reads without a barrier.
///
/// # Safety
/// - One block of two warps, on two ranks.
#[kernel]
pub unsafe fn race_test_warps(comm: Comm, to: Window<u64>, from: Window<u64>, mistake: u32) {
    let gin = Gin::new(&comm, ContextId::new(0));
    let first = thread_in_block() < WARP_SIZE;
    let peer = comm.world().right();
    let outcome = if comm.world().rank() == 0 {
        // As in `race_test_read`: both kernels run before the put.
        gin.wait_signal(&Block, CAME, 1, LONG).and_then(|()| {
            let put = gin.put(peer, to.range(0, LEN), from.range(0, LEN));
            put.signal(CAME.inc()).issue(&Block) // put for the first warp
        })
    } else {
        let told = gin.signal(peer, CAME.inc()).issue(&Block);
        told.and_then(|()| if first { gin.wait_signal(&Warp, CAME, 1, LONG) } else { Ok(()) })
    };
    if mistake == 0 {
        Block.sync();
    }
    if comm.world().rank() == 1 && !first {
        let _ = to.read(0); // read by the other warp
    }
    if let Err(fault) = outcome {
        comm.report(fault);
    }
    Block.sync();
}

/// Rank 0 gets a vector from rank 1. The mistake: it reads it before the flush.
///
/// # Safety
/// - One block, on two ranks.
#[kernel]
pub unsafe fn race_test_get(comm: Comm, to: Window<u64>, from: Window<u64>, mistake: u32) {
    let gin = Gin::new(&comm, ContextId::new(0));
    if comm.world().rank() == 1 {
        return;
    }
    let exchange = || -> Result<(), Fault> {
        gin.get(comm.world().right(), to.range(0, LEN), from.range(0, LEN)).issue(&Thread)?; // get
        if mistake != 0 {
            let _ = to.read(LEN - 1); // read before the flush
        }
        gin.flush(&Thread, LONG)?;
        let _ = to.read(0);
        Ok(())
    };
    if let Err(fault) = exchange() {
        comm.report(fault);
    }
}

/// Rank 0 puts a vector to rank 1, then raises a signal. The mistake: the signal is weak, so it does not cover the put.
///
/// # Safety
/// - One block, on two ranks.
#[kernel]
pub unsafe fn race_test_weak(comm: Comm, to: Window<u64>, from: Window<u64>, mistake: u32) {
    let gin = Gin::new(&comm, ContextId::new(0));
    let peer = comm.world().right();
    let exchange = || -> Result<(), Fault> {
        if comm.world().rank() == 1 {
            gin.signal(peer, CAME.inc()).issue(&Block)?;
            gin.wait_signal(&Block, CAME, 1, LONG)?;
            Block.stripe(LEN).for_each(|i| {
                let _ = to.read(i); // read after a weak signal
            });
            // The kernel ends after the put has arrived.
            return gin.wait_signal(&Block, DONE, 1, LONG);
        }
        // As in `race_test_read`: both kernels run before the put.
        gin.wait_signal(&Block, CAME, 1, LONG)?;
        gin.put(peer, to.range(0, LEN), from.range(0, LEN)).issue(&Block)?; // put before a weak signal
        gin.signal(peer, if mistake != 0 { CAME.inc().weak() } else { CAME.inc() }).issue(&Block)?;
        gin.signal(peer, DONE.inc()).issue(&Block)
    };
    if let Err(fault) = exchange() {
        comm.report(fault);
    }
}

/// Rank 0 puts a vector to rank 1, then raises a signal. The mistake: the put belongs to another context.
///
/// # Safety
/// - One block, on two ranks.
#[kernel]
pub unsafe fn race_test_contexts(comm: Comm, to: Window<u64>, from: Window<u64>, mistake: u32) {
    let (first, gin) = (Gin::new(&comm, ContextId::new(0)), Gin::new(&comm, ContextId::new(1)));
    let peer = comm.world().right();
    let exchange = || -> Result<(), Fault> {
        if comm.world().rank() == 1 {
            gin.signal(peer, CAME.inc()).issue(&Block)?;
            gin.wait_signal(&Block, CAME, 1, LONG)?;
            Block.stripe(LEN).for_each(|i| {
                let _ = to.read(i); // read after a signal of a context
            });
            // The kernel ends after the put has arrived.
            return first.wait_signal(&Block, CAME, 1, LONG);
        }
        gin.wait_signal(&Block, CAME, 1, LONG)?;
        let puts = if mistake != 0 { first } else { gin };
        puts.put(peer, to.range(0, LEN), from.range(0, LEN)).issue(&Block)?; // put of another context
        gin.signal(peer, CAME.inc()).issue(&Block)?;
        first.signal(peer, CAME.inc()).issue(&Block)
    };
    if let Err(fault) = exchange() {
        comm.report(fault);
    }
}

/// Rank 0 puts two vectors to rank 1, the second one with a weak signal. The mistake: rank 1 reads the first one, too.
///
/// # Safety
/// - One block, on two ranks.
#[kernel]
pub unsafe fn race_test_own(comm: Comm, to: Window<u64>, from: Window<u64>, mistake: u32) {
    let gin = Gin::new(&comm, ContextId::new(0));
    let (peer, half) = (comm.world().right(), LEN / 2);
    let exchange = || -> Result<(), Fault> {
        if comm.world().rank() == 1 {
            gin.signal(peer, CAME.inc()).issue(&Block)?;
            gin.wait_signal(&Block, CAME, 1, LONG)?;
            let first = if mistake != 0 { 0 } else { half };
            Block.stripe(LEN - first).for_each(|i| {
                let _ = to.read(first + i); // read of both
            });
            // A later strong signal covers the first put.
            gin.wait_signal(&Block, DONE, 1, LONG)?;
            let _ = to.read(0);
            return Ok(());
        }
        gin.wait_signal(&Block, CAME, 1, LONG)?;
        gin.put(peer, to.range(0, half), from.range(0, half)).issue(&Block)?; // put of the first
        gin.put(peer, to.range(half, half), from.range(half, half)).signal(CAME.inc().weak()).issue(&Block)?;
        gin.signal(peer, DONE.inc()).issue(&Block)
    };
    if let Err(fault) = exchange() {
        comm.report(fault);
    }
}

/// Rank 0 puts a vector to rank 1, then raises a signal; rank 1 copies what it sees to `seen`. The mistake: the signal
/// is weak, or belongs to another context.
fn send_and_look(comm: &Comm, to: Window<u64>, from: Window<u64>, seen: Window<u64>, context: u32, weak: bool) {
    let (first, gin) = (Gin::new(comm, ContextId::new(0)), Gin::new(comm, ContextId::new(context)));
    let peer = comm.world().right();
    let exchange = || -> Result<(), Fault> {
        if comm.world().rank() == 1 {
            gin.wait_signal(&Block, CAME, 1, LONG)?;
            Block.stripe(LEN).for_each(|i| seen.write(i, to.read(i)));
            return Ok(());
        }
        first.put(peer, to.range(0, LEN), from.range(0, LEN)).issue(&Block)?;
        gin.signal(peer, if weak { CAME.inc().weak() } else { CAME.inc() }).issue(&Block)?;
        // The kernel, and with it the communicator, ends after the put has arrived.
        first.flush(&Block, LONG)
    };
    if let Err(fault) = exchange() {
        comm.report(fault);
    }
}

/// The mistake: a weak signal behind a put without one.
///
/// # Safety
/// - One block, on two ranks.
#[kernel]
pub unsafe fn race_test_weak_numbers(comm: Comm, to: Window<u64>, from: Window<u64>, seen: Window<u64>, mistake: u32) {
    send_and_look(&comm, to, from, seen, 0, mistake != 0);
}

/// The mistake: a signal of another context than the put.
///
/// # Safety
/// - One block, on two ranks.
#[kernel]
pub unsafe fn race_test_contexts_numbers(
    comm: Comm,
    to: Window<u64>,
    from: Window<u64>,
    seen: Window<u64>,
    mistake: u32,
) {
    send_and_look(&comm, to, from, seen, u32::from(mistake != 0), false);
}

/// The seeds with which the worst network is tried.
const SEARCHED: u64 = 200;

/// Returns the numbers that rank 1 saw after its wait.
fn received(config: WorldConfig, kernel: &'static str, mistake: bool) -> Result<Vec<u64>, LaunchError<CommError>> {
    let all = launch(config.races(false), |rank| -> Result<Vec<u64>, CommError> {
        let comm = rank.communicator(&Requirements::default().contexts(2))?;
        let window = || comm.alloc_window::<u64>(LEN, WindowFlags::NONE);
        let (to, from, seen) = (window()?, window()?, window()?);
        from.fill(9)?;
        rank.barrier()?;
        let (stream, handle) = (rank.stream()?, comm.device()?);
        // Safety: one block, resident. Communicator and windows live until the kernel has ended.
        unsafe {
            let (kernel, mistake) = (rank.kernel(kernel)?, u32::from(mistake));
            stream.launch(&kernel, LaunchConfig::new(1, 64), &[&handle, &to, &from, &seen, &mistake])?;
        }
        stream.synchronize()?;
        comm.check("read numbers")?;
        let numbers = seen.read_all()?;
        comm.destroy()?;
        Ok(numbers)
    })?;
    Ok(all.into_iter().nth(1).unwrap_or_default())
}

/// Runs a kernel in a seeded world that looks for races.
fn run(mut config: WorldConfig, kernel: &'static str, mistake: bool) -> Result<(), LaunchError<CommError>> {
    if let WorldMode::Seeded(seeded) = &mut config.mode {
        seeded.races = true;
    }
    run_as_it_is(config, kernel, mistake)
}

fn run_as_it_is(config: WorldConfig, kernel: &'static str, mistake: bool) -> Result<(), LaunchError<CommError>> {
    let outcome = launch(config, |rank| -> Result<(), CommError> {
        let comm = rank.communicator(&Requirements::default().contexts(2))?;
        let (to, from) =
            (comm.alloc_window::<u64>(LEN, WindowFlags::NONE)?, comm.alloc_window::<u64>(LEN, WindowFlags::NONE)?);
        from.fill(9)?;
        rank.barrier()?;
        let (stream, handle) = (rank.stream()?, comm.device()?);
        let threads = if ["race_test_value", "race_test_get"].contains(&kernel) { 1 } else { 64 };
        // Safety: one block, resident. Communicator and windows live until the kernel has ended.
        unsafe {
            let kernel = rank.kernel(kernel)?;
            stream.launch(&kernel, LaunchConfig::new(1, threads), &[&handle, &to, &from, &u32::from(mistake)])?;
        }
        stream.synchronize()?;
        comm.check("go on")?;
        rank.barrier()?;
        let _ = to.read_all()?;
        comm.destroy()
    });
    outcome.map(drop)
}

/// Every way by which a put can go.
fn ways(ranks: u32, seed: u64) -> Vec<(&'static str, WorldConfig)> {
    let network = || WorldConfig::seeded(ranks, seed).routes(Routes::Network);
    vec![
        ("proxy", network()),
        (
            "withheld",
            network().network(|endpoint| {
                Box::new(Reorder::new(Withhold::new(PeerNetwork::new(endpoint), endpoint.rank), endpoint))
            }),
        ),
        ("NICs", network().soft_nics(&SoftNics::new(Options { delay: 3, seed: 5, ..Options::default() }))),
        ("loads and stores", WorldConfig::seeded(ranks, seed).routes(Routes::Automatic)),
    ]
}

/// Returns the line of this file that ends with this comment.
fn line(comment: &str) -> u32 {
    let ends = |line: &&str| line.ends_with(&format!("// {comment}"));
    let mut found =
        (1..).zip(include_str!("races.rs").lines()).filter(|(_, line)| ends(line)).map(|(number, _)| number);
    let line = found.next().unwrap_or_else(|| panic!("no line ends with {comment:?}"));
    assert_eq!(found.next(), None, "{comment:?}");
    line
}

/// The description of an access: the operation over the network, the operation by loads and stores, and the comment
/// at the end of its line.
type Expected = (RaceOperation, RaceOperation, &'static str);

/// Demands that a kernel with its mistake ends with a race of these two accesses, and without it does not.
///
/// Puts and gets by loads and stores are complete when they return. `stores` says that the mistake is one there, too.
fn demand(kernel: &'static str, ranks: u32, stores: bool, expected: [Expected; 2]) {
    for (seed, (name, config)) in (0..6).flat_map(|seed| ways(ranks, seed).into_iter().map(move |way| (seed, way))) {
        if let Err(error) = run(config.clone(), kernel, false) {
            panic!("{kernel} without a mistake, {name}, seed {seed}: {error}");
        }
        let by_stores = name == "loads and stores";
        // Withheld bytes of two puts to one place are on their way in one place, too.
        if name == "withheld" && kernel == "race_test_puts" {
            continue;
        }
        let outcome = run(config, kernel, true);
        if by_stores && !stores {
            outcome.unwrap_or_else(|error| panic!("{kernel}, {name}, seed {seed}: {error}"));
            continue;
        }
        let Err(LaunchError::World(WorldError::Race(race))) = outcome else {
            panic!("{kernel}, {name}, seed {seed}: {outcome:?}")
        };
        let Race { memory, first, second, .. } = &*race;
        assert!(matches!(memory, RaceMemory::Window { .. }), "{race}");
        let is = |access: &RaceAccess, (network, stores, comment): Expected| {
            let operation = if by_stores { stores } else { network };
            let place = access.site.file().ends_with("races.rs") && access.site.line() == line(comment);
            access.operation == operation && place && matches!(access.actor, Actor::Thread { .. })
        };
        let [one, other] = expected;
        let either = is(first, one) && is(second, other) || is(first, other) && is(second, one);
        assert!(either, "{kernel}, {name}, seed {seed}: {race}");
    }
}

use RaceOperation::{GetWrite, PutRead, PutWrite, Read, Write};

#[test]
fn a_read_that_no_wait_covers_is_found() {
    demand("race_test_read", 2, true, [(PutWrite, PutWrite, "put"), (Read, Read, "read too early")]);
    let expected = [(PutWrite, PutWrite, "put for the first warp"), (Read, Read, "read by the other warp")];
    demand("race_test_warps", 2, true, expected);
    demand("race_test_get", 2, false, [(GetWrite, Write, "get"), (Read, Read, "read before the flush")]);
}

#[test]
fn a_put_that_no_awaited_signal_covers_is_found_in_every_seed() {
    let read = (Read, Read, "read after a weak signal");
    demand("race_test_weak", 2, true, [(PutWrite, PutWrite, "put before a weak signal"), read]);
    let read = (Read, Read, "read after a signal of a context");
    demand("race_test_contexts", 2, true, [(PutWrite, PutWrite, "put of another context"), read]);
    demand("race_test_own", 2, true, [(PutWrite, PutWrite, "put of the first"), (Read, Read, "read of both")]);
    for kernel in ["race_test_weak", "race_test_contexts"] {
        let config = WorldConfig::seeded(2, 1).routes(Routes::Network);
        let text = run(config, kernel, true).map_err(|error| error.to_string()).unwrap_err();
        let remedy = "attach the signal to the put, or post a strong signal after it in its context";
        assert!(text.contains(remedy), "{kernel}: {text}");
    }
}

#[test]
fn a_source_that_changes_before_its_counter_is_found() {
    let expected = [(PutRead, Read, "put of the source"), (Write, Write, "change of the source")];
    demand("race_test_source", 2, false, expected);
}

#[test]
fn two_writes_that_nothing_orders_are_found() {
    demand("race_test_puts", 3, true, [(PutWrite, PutWrite, "put of both"), (PutWrite, PutWrite, "put of both")]);
    demand("race_test_value", 2, true, [(PutWrite, PutWrite, "put of a value"), (Write, Write, "store beside it")]);
}

#[test]
fn the_documents_have_what_is_missing_between_two_accesses() {
    let one_line = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let docs = one_line(include_str!("../../docs/kernels.md"));
    let table = include_str!("../../gin-device/src/misuse.rs");
    for kernel in ["race_test_read", "race_test_source"] {
        let config = WorldConfig::seeded(2, 1).routes(Routes::Network);
        let text = run(config, kernel, true).map_err(|error| error.to_string()).unwrap_err();
        let (_, missing) = text.rsplit_once(": ").unwrap();
        assert!(docs.contains(missing) && table.contains(missing), "{kernel}: {missing}");
    }
}

#[test]
fn a_report_names_both_accesses_and_what_is_missing() {
    let config = WorldConfig::seeded(2, 1).routes(Routes::Network);
    let text = run(config, "race_test_read", true).map_err(|error| error.to_string()).unwrap_err();
    let (put, read) = (line("put"), line("read too early"));
    for part in [
        "data race in window 0 of rank 1, byte 40: ".to_owned(),
        format!("write of its destination by a put at gin-host/tests/races.rs:{put}:"),
        "by rank 0, grid `race_test_read` (launch 1), block 0, thread ".to_owned(),
        ", carried out by service `".to_owned(),
        format!("read at gin-host/tests/races.rs:{read}:"),
        "by rank 1, grid `race_test_read` (launch 1), block 0, thread 3".to_owned(),
        "no wait for a signal that covers the put is between them".to_owned(),
    ] {
        assert!(text.contains(&part), "{part:?} is not in {text:?}");
    }
}

#[test]
fn a_report_names_the_window_and_the_element_of_a_window_with_a_name() {
    let config = WorldConfig::seeded(2, 1).routes(Routes::Network).races(true).print_seed(false);
    let outcome = launch(config, |rank| -> Result<(), CommError> {
        let comm = rank.communicator(&Requirements::default())?;
        let outbox = comm.alloc_window::<u64>(LEN, WindowFlags::NONE)?;
        let inbox = comm.alloc_window::<u64>(LEN, WindowFlags::NONE)?.named("inbox");
        let (stream, handle) = (rank.stream()?, comm.device()?);
        // Safety: one block, resident. Communicator and windows live until the kernel has ended.
        unsafe { race_test_read::launch(&stream, LaunchConfig::new(1, 64), &handle, &inbox, &outbox, 1)? };
        stream.synchronize()?;
        comm.destroy()
    });
    let text = outcome.unwrap_err().to_string();
    assert!(text.starts_with("data race in window 1 (`inbox`) of rank 1, byte 40 (element 5): "), "{text}");
}

#[test]
fn the_worst_network_shows_wrong_numbers_after_a_signal_that_does_not_cover_the_put() {
    let wrong = |kernel: &'static str, mistake: bool| {
        let shows =
            |seed: &u64| received(WorldConfig::seeded(2, *seed).worst_network(), kernel, mistake).unwrap() != [9; LEN];
        (0..SEARCHED).filter(shows).count()
    };
    for kernel in ["race_test_weak_numbers", "race_test_contexts_numbers"] {
        assert_eq!(wrong(kernel, false), 0, "{kernel} without its mistake");
        let shown = wrong(kernel, true);
        println!("{kernel}: {shown} of {SEARCHED} seeds show the mistake");
        assert!(shown > 0, "{kernel}: no seed shows the mistake");
    }
}

#[test]
fn a_world_that_does_not_look_finds_nothing() {
    let mut config = WorldConfig::seeded(2, 1).routes(Routes::Network);
    if let WorldMode::Seeded(seeded) = &mut config.mode {
        seeded.races = false;
    }
    run_as_it_is(config, "race_test_read", true).unwrap();
}
