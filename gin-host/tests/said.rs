// SPDX-License-Identifier: MIT OR Apache-2.0
//! Mistakes of kernels, and the text that one sees of each. The documents have the same texts.

use gin_device::prelude::*;
use gin_gpu::LaunchConfig;
use gin_host::comm::{CommError, Requirements, WindowFlags};
use gin_host::world::{LaunchError, WorldConfig, launch};

/// The mistakes of the kernel. A comment with its number marks the line of each wrong call.
const SIGNAL: u32 = 0;
const COUNTER: u32 = 1;
const RANGE: u32 = 2;
const UNKNOWN_SIGNAL: u32 = 3;
const UNKNOWN_COUNTER: u32 = 4;
const UNKNOWN_CONTEXT: u32 = 5;
const UNKNOWN_BARRIER: u32 = 6;
const ADDRESS: u32 = 7;
const MEMBER: u32 = 8;
const LENGTHS: u32 = 9;
const BARRIER: u32 = 10;
const CODE: u32 = 11;
const MISALIGNED: u32 = 12;
const GRID: u32 = 13;
const ENDLESS: u32 = 14;
const INDEX: u32 = 15;
const PEER_INDEX: u32 = 16;

const PANIC: u32 = 17;
const LEAVES: u32 = 18;

const LIMIT: Deadline = Deadline::after_ms(20);

/// Makes one mistake on rank 0, by a coop, and reports its fault.
fn mistake(comm: &Comm, coop: &impl Coop, data: Window<u32>, word: *mut u64, which: u32) -> Result<(), Fault> {
    let gin = Gin::new(comm, ContextId::new(if which == UNKNOWN_CONTEXT { 3 } else { 0 }));
    let right = comm.world().right();
    let put = |to, from| gin.put(right, to, from);
    match which {
        SIGNAL => gin.wait_signal(coop, SignalId::new(3), 1, LIMIT), // said 0
        COUNTER => gin.wait_counter(coop, CounterId::new(2), 1, LIMIT), // said 1
        RANGE => put(data.range(4, 8), data.range(0, 8)).issue(coop), // said 2
        UNKNOWN_SIGNAL => gin.signal(right, SignalId::new(99).inc()).issue(coop), // said 3
        UNKNOWN_COUNTER => put(data.at(1), data.at(0)).counter(CounterId::new(16)).issue(coop), // said 4
        UNKNOWN_CONTEXT => gin.flush(coop, LIMIT),                   // said 5
        UNKNOWN_BARRIER => BarrierSession::new(&gin, BarrierTeam::World, 5).map(drop), // said 6
        ADDRESS => gin.wait_signal(coop, data.signal(8), 1, LIMIT),  // said 7
        MEMBER => comm.world().member(7).map(drop),                  // said 8
        LENGTHS => put(data.range(0, 2), data.range(2, 3)).issue(coop), // said 9
        BARRIER => BarrierSession::new(&gin, BarrierTeam::World, 0)?.sync(coop, Fence::None, LIMIT), // said 10
        MISALIGNED => data.range_as::<u64>(4, 1).map(drop),          // said 12
        ENDLESS => gin.wait_signal(coop, SignalId::new(3), 1, Deadline::NONE), // said 14
        INDEX => {
            data.write(10, 1); // said 15
            Ok(())
        }
        PEER_INDEX => {
            let _ = data.peer(right)?.read(12); // said 16
            Ok(())
        }
        PANIC => {
            let four = core::hint::black_box([1, 2, 3, 4]);
            comm.report_code(four[core::hint::black_box(4)]); // said 17
            Ok(())
        }
        LEAVES if thread_in_block() == 9 => Ok(()),
        LEAVES => {
            Block.sync(); // said 18
            Ok(())
        }
        // Safety: a word of the device that is 0; the other block does not come.
        GRID => unsafe { GridBarrier::new(comm, word) }.sync(LIMIT), // said 13
        _ => {
            comm.report_code(7); // said 11
            Ok(())
        }
    }
}

/// # Safety
/// - `word` is a word of the device that is 0.
#[kernel]
pub unsafe fn said_mistake(comm: Comm, data: Window<u32>, word: *mut u64, which: u32, coop: u32) {
    if comm.world().rank() != 0 || block_in_grid() != 0 {
        return;
    }
    let outcome = match coop {
        0 => mistake(&comm, &Thread, data, word, which),
        1 => mistake(&comm, &Warp, data, word, which),
        _ => mistake(&comm, &Block, data, word, which),
    };
    if let Err(fault) = outcome {
        comm.report(fault);
    }
}

/// Returns the place in this file of the line with this mark.
fn place(mark: u32) -> String {
    let end = format!("// said {mark}");
    let line = include_str!("said.rs").lines().position(|line| line.ends_with(&end)).expect("a marked line") + 1;
    format!("gin-host/tests/said.rs:{line}:")
}

/// Makes a mistake in a world. Returns the text of each rank's communicator, or the error of the world.
fn make(which: u32, coop: u32) -> Result<Vec<String>, LaunchError<CommError>> {
    launch(WorldConfig::seeded(2, 7), |rank| -> Result<String, CommError> {
        let comm = rank.communicator(&Requirements::default().world_barriers(1).counters(16))?;
        let data = comm.alloc_window::<u32>(10, WindowFlags::NONE)?.named("halo");
        let word = gin_gpu::Memory::new(rank.device(), gin_gpu::MemoryKind::Device, 8)?;
        let stream = rank.stream()?;
        let threads = [1, 32, 64][coop as usize];
        let shape = LaunchConfig::new(if which == GRID { 2 } else { 1 }, threads).cooperative();
        let address = word.address() as usize as *mut u64;
        // Safety: the word is 0; windows and memory live until the stream is done.
        unsafe { said_mistake::launch(&stream, shape, &comm.device()?, &data, address, which, coop)? };
        stream.synchronize()?;
        let text = comm.check("go on").map_or_else(|error| error.to_string(), |()| String::new());
        let text = text.replace(&gin_boot::on_host(&comm.bootstrap().host(0)), "");
        // Of the other rank, this ends by the fault.
        let _ = comm.destroy();
        Ok(text)
    })
}

/// Returns the text of the fault of a mistake, up to its place, and its place.
fn said(which: u32, coop: u32) -> (String, String) {
    let text = make(which, coop).expect("the ranks end").remove(0);
    let text = text.strip_prefix("cannot go on: the communicator has ended: ").unwrap_or(&text);
    let (text, _) = text.split_once(" (reported by rank 0").unwrap_or((text, ""));
    let (text, place) = text.split_once(", at ").unwrap_or((text, ""));
    (text.to_owned(), place.to_owned())
}

const FAULTS: [(u32, &str); 14] = [
    (SIGNAL, "deadline passed in wait_signal, context 0, signal 3: it is 0 and should have reached 1 within 20 ms"),
    (COUNTER, "deadline passed in wait_counter, context 0, counter 2: it is 0 and should have reached 1 within 20 ms"),
    (
        RANGE,
        "range reaches past the end of the window in put, context 0, rank 1, window 0 (`halo`) at byte 16: the window \
         has 40 bytes there, and the range is bytes 16 to 48",
    ),
    (
        UNKNOWN_SIGNAL,
        "no such signal in signal, context 0, rank 1, signal 99: `Requirements` have 16 of `signals`, with \
         numbers 0 to 15",
    ),
    (
        UNKNOWN_COUNTER,
        "no such counter in put, context 0, rank 1, counter 16: `Requirements` have 16 of `counters`, with \
         numbers 0 to 15",
    ),
    (UNKNOWN_CONTEXT, "no such context in flush, context 3: `Requirements` have 1 of `contexts`, with number 0"),
    (
        UNKNOWN_BARRIER,
        "no such barrier in barrier, context 0, barrier 5: `Requirements` have 1 of `world_barriers`, \
         `rail_barriers` or `lsa_barriers`, with number 0",
    ),
    (
        ADDRESS,
        "no signals at addresses of this window: register it with the flag `signals` in wait_signal, context 0, window \
         0 (`halo`) at byte 8",
    ),
    (MEMBER, "no such rank in address: 7 was given, and the team has 2 ranks"),
    (
        LENGTHS,
        "source and destination differ in length in put, context 0, rank 1, window 0 (`halo`) at byte 0: the two have 8 \
         and 12 bytes",
    ),
    (
        BARRIER,
        "deadline passed in barrier, context 0, rank 1, barrier 0: its count of arrivals is 0 and should have \
         reached 1 within 20 ms",
    ),
    (CODE, "reported by the kernel: the kernel's code is 7"),
    (MISALIGNED, "offset is not aligned in address, window 0 (`halo`) at byte 4: byte 4 is not a multiple of 8"),
    (GRID, "deadline passed in barrier: 1 of 2 blocks arrived within 20 ms"),
];

/// Checks that the list of traps in docs/kernels.md has this text. The documents' place is `src/lib.rs:17:9`.
#[track_caller]
fn assert_documented(text: &str) {
    let docs = include_str!("../../docs/kernels.md").split_whitespace().collect::<Vec<_>>().join(" ");
    let (_, traps) = docs.split_once("## Traps").expect("the list of traps");
    assert!(traps.contains(text), "the traps do not name: {text}");
    let table = include_str!("../../gin-device/src/misuse.rs");
    assert!(table.contains(text.trim_matches('"')), "gin-device/src/misuse.rs does not name: {text}");
}

#[test]
fn a_fault_says_operation_object_values_deadline_and_the_line_of_the_call_for_every_coop() {
    for (which, expected) in FAULTS {
        for coop in [0, 1, 2] {
            let (text, at) = said(which, coop);
            assert_eq!(text, expected, "coop {coop}");
            if [SIGNAL, UNKNOWN_SIGNAL, RANGE].contains(&which) {
                assert_documented(expected);
            }
            assert!(at.starts_with(&place(which)), "{expected}: at {at}, not {}, coop {coop}", place(which));
        }
    }
}

/// The line of the list of waiters for a wait for a signal.
const UNMET: &str = "waiting in wait_signal, context 0, signal 3: it is 0 and should reach 1";

#[test]
fn a_wait_that_nothing_ends_is_reported_with_the_line_of_the_call_for_every_coop() {
    for coop in [0, 1, 2] {
        let text = make(ENDLESS, coop).unwrap_err().to_string();
        assert!(text.contains("no progress: "), "{text}");
        assert_documented("\"no progress: \"");
        let waits = [UNMET, "waiting in an exchange", "waiting at barrier 0"];
        assert_documented(&format!("{UNMET} (last seen at src/lib.rs:17:9)"));
        assert!(text.contains(UNMET), "coop {coop}: {text}");
        let at = |wait: &&str| text.lines().any(|line| line.contains(*wait) && line.contains(&place(ENDLESS)));
        assert!(waits.iter().any(at), "coop {coop}: no wait at {} in\n{text}", place(ENDLESS));
        // Neither kernels nor hosts are named with lines of gin's own.
        assert!(!text.contains(" at gin-device/") && !text.contains("/src/"), "coop {coop}: gin's lines in\n{text}");
        for rank in 0..2 {
            let host = format!("host of rank {rank}: waiting for the ");
            assert!(text.contains(&host), "{text}");
        }
    }
}

#[test]
fn an_index_past_the_end_says_index_length_and_line() {
    for (which, expected) in [
        (INDEX, "index 10 is past the end of window 0, which has 10 elements here, at "),
        (PEER_INDEX, "index 12 is past the end of rank 1's part of a window, which has 10 elements, at "),
    ] {
        let text = make(which, 0).unwrap_err().to_string();
        if which == INDEX {
            assert_documented(&format!("{expected}src/lib.rs:17:9"));
        }
        assert!(text.contains("grid `said_mistake` (launch 1), block 0, thread 0 panicked: "), "{text}");
        assert!(text.contains(&format!("{expected}{}", place(which))), "{text}");
    }
}

#[test]
fn a_panic_says_what_went_wrong_and_where() {
    let text = make(PANIC, 0).unwrap_err().to_string();
    let expected = "rank 0, grid `said_mistake` (launch 1), block 0, thread 0 panicked: index out of bounds: the len is 4 \
                    but the index is 4, at ";
    assert!(text.contains(&format!("{expected}{}", place(PANIC))), "{text}");
    assert_documented(&format!("{expected}src/lib.rs:17:9"));
}

#[test]
fn a_thread_that_leaves_early_is_reported_with_those_that_wait_for_it_and_their_lines() {
    let text = make(LEAVES, 2).unwrap_err().to_string();
    let expected = "barrier 0 needs the whole block of 64 threads, 1 of them have exited";
    assert!(text.contains(expected) && text.contains(&place(LEAVES)), "{text}");
    assert_documented(expected);
}

mod first {
    use gin_device::kernel;

    /// # Safety
    /// - None.
    #[kernel]
    pub unsafe fn said_twice() {}
}

mod second {
    use gin_device::kernel;

    /// # Safety
    /// - None.
    #[kernel]
    pub unsafe fn said_twice() {}
}

#[test]
fn two_kernels_of_one_name_are_refused_with_their_modules() {
    let device = gin_gpu::virt::VirtualDevice::memory_only(0);
    let linked = gin_gpu::Device::load(&*device, gin_gpu::ModuleSource::Linked).unwrap();
    let text = linked.function("said_twice").map(drop).unwrap_err().to_string();
    assert!(text.starts_with("2 kernels are named `said_twice`: "), "{text}");
    assert!(text.contains("said::first") && text.contains("said::second"), "{text}");
    assert_documented("2 kernels are named `said_twice`: ");
}
