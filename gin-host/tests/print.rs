// SPDX-License-Identifier: MIT OR Apache-2.0
//! Lines that kernels print.

use gin_device::prelude::*;
use gin_gpu::LaunchConfig;
use gin_host::comm::{CommError, Requirements, WindowFlags};
use gin_host::world::{WorldConfig, launch};
use std::sync::{Arc, Mutex};

/// # Safety
/// - Any block may call.
#[kernel]
pub unsafe fn print_values(comm: Comm, floats: Window<f32>) {
    if !Block.elect() {
        return;
    }
    let (name, round) = ("halo of the left neighbour", 3_u64);
    gin_println!(comm, "{name} {round} {} {:x} {:#x} {{}}", -5_i32, -1_i16, 255_u8);
    gin_println!(comm, "{} {:.3} {:.0} {} {} {}", floats.read(0), floats.read(0), 2.5_f64, true, 'é', f64::INFINITY);
    gin_println!(comm, "{} {:x} {}", u64::MAX, 1.0_f32, core::ptr::without_provenance::<u8>(0x1000));
    gin_println!(comm, "");
    gin_println!(
        &comm,
        "a text of exactly 96 bytes, which is the most that a line has room for: 3456789012345678901234"
    );
}

/// # Safety
/// - Any grid.
#[kernel]
pub unsafe fn print_often(comm: Comm, lines: u32) {
    for line in 0..lines {
        gin_println!(comm, "line {line}");
    }
}

/// Runs on one rank with a ring of that many lines. Returns the lines.
fn lines(
    config: WorldConfig,
    room: u32,
    run: impl Fn(
        &dyn gin_gpu::Stream,
        &gin_host::comm::DeviceComm,
        &gin_host::comm::Window<f32>,
    ) -> Result<(), gin_gpu::GpuError>
    + Sync,
) -> Vec<String> {
    let taken: Arc<Mutex<Vec<String>>> = Arc::default();
    let to = taken.clone();
    let mut config = config;
    config.comm = config.comm.print_to(Arc::new(move |line: &str| to.lock().unwrap().push(line.to_owned())));
    launch(config, |rank| -> Result<(), CommError> {
        let comm = rank.communicator(&Requirements::default().print_lines(room))?;
        let floats = comm.alloc_window::<f32>(1, WindowFlags::NONE)?;
        floats.fill(0.1)?;
        let stream = rank.stream()?;
        run(&*stream, &comm.device()?, &floats)?;
        stream.synchronize()?;
        comm.check("print")?;
        comm.destroy()
    })
    .unwrap();
    let lines = taken.lock().unwrap();
    lines.clone()
}

#[test]
fn a_line_has_its_rank_block_and_thread_and_every_kind_of_value() {
    let said = lines(WorldConfig::seeded(1, 7), 16, |stream, comm, floats| {
        // Safety: the kernel asks for nothing.
        unsafe { print_values::launch(stream, LaunchConfig::new(1, 32), comm, floats) }
    });
    let start = "rank 0, block 0, thread 0: ";
    assert_eq!(
        said,
        [
            "halo of the left 3 -5 ffff 0xff {}",
            "0.1 0.100 2 true é inf",
            "18446744073709551615 3f800000 0x1000",
            "",
            "a text of exactly 96 bytes, which is the most that a line has room for: 3456789012345678901234",
        ]
        .map(|line| format!("{start}{line}"))
    );
}

#[test]
fn each_thread_prints_in_its_order_and_lines_past_the_room_are_dropped_and_counted() {
    for config in [WorldConfig::seeded(1, 7), WorldConfig::seeded(1, 8), WorldConfig::threads(1)] {
        for (room, blocks, threads, each) in [(1024, 2, 64, 8), (4, 2, 32, 20)] {
            let said = lines(config.clone(), room, |stream, comm, _| {
                // Safety: as above.
                unsafe { print_often::launch(stream, LaunchConfig::new(blocks, threads), comm, each) }
            });
            let mut dropped = 0;
            let mut last = std::collections::BTreeMap::new();
            let mut printed = 0;
            for line in &said {
                if let Some((number, _)) =
                    line.strip_prefix("rank 0: ").and_then(|rest| rest.split_once(" lines of kernels were"))
                {
                    dropped += number.parse::<u32>().unwrap();
                    continue;
                }
                let (place, text) = line.split_once(": ").unwrap();
                let number: i64 = text.strip_prefix("line ").unwrap().parse().unwrap();
                let before = last.insert(place.to_owned(), number).unwrap_or(-1);
                assert!(before < number, "{place}: {number} after {before}");
                printed += 1;
            }
            assert_eq!(printed + dropped, blocks * threads * each, "{config:?}: each line is printed or counted");
            // Some thread of each block printed.
            assert!(printed >= room.min(blocks * threads * each), "{printed} lines");
            if room == 1024 {
                assert_eq!(last.len() as u32, blocks * threads);
            }
        }
    }
}

#[test]
fn a_communicator_without_room_for_lines_prints_nothing() {
    let said = lines(WorldConfig::seeded(1, 7), 0, |stream, comm, _| {
        // Safety: as above.
        unsafe { print_often::launch(stream, LaunchConfig::new(1, 32), comm, 3) }
    });
    assert_eq!(said, [""; 0]);
}
