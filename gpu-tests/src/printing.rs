// SPDX-License-Identifier: MIT OR Apache-2.0
//! A trial of the lines that kernels print.

use crate::testbed::Testbed;
use gin_gpu::LaunchConfig;
use gin_host::comm::{CommError, Requirements};
use gin_host::world::launch;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

const BLOCKS: u32 = 2;
const THREADS: u32 = 64;
const LINES: u32 = 4;

/// Prints from all threads: first with room for all lines, then with room for few.
///
/// # Errors
/// Returns the first wrong line.
pub fn prints(testbed: &Testbed) -> Result<(), String> {
    let all = BLOCKS * THREADS * LINES;
    for room in [1024, 16] {
        let taken: Arc<Mutex<Vec<String>>> = Arc::default();
        let to = taken.clone();
        let mut config = testbed.config();
        config.comm = config.comm.print_to(Arc::new(move |line: &str| {
            to.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(line.to_owned());
        }));
        let ranks = config.ranks;
        launch(config, |rank| -> Result<(), CommError> {
            let comm = rank.communicator(&Requirements::default().print_lines(room))?;
            let (function, stream) = (rank.kernel("hardware_print")?, rank.stream()?);
            rank.barrier()?;
            // Safety: the kernel takes any grid.
            unsafe { stream.launch(&function, LaunchConfig::new(BLOCKS, THREADS), &[&comm.device()?, &LINES])? };
            stream.synchronize()?;
            comm.check("print")?;
            rank.barrier()?;
            comm.destroy()
        })
        .map_err(|error| error.to_string())?;
        let lines = taken.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        check(&lines, ranks * all, room >= all).map_err(|error| format!("room for {room}: {error}"))?;
    }
    Ok(())
}

/// Checks that each line is whole, that each thread's lines are in order, and that the rest was counted.
fn check(lines: &[String], all: u32, has_room: bool) -> Result<(), String> {
    let (mut printed, mut dropped, mut last) = (0, 0, BTreeMap::new());
    for line in lines {
        let wrong = || format!("{line:?} is wrong");
        let (place, text) = line.split_once(": ").ok_or_else(wrong)?;
        if let Some((number, _)) = text.split_once(" lines of kernels were dropped") {
            dropped += number.parse::<u32>().map_err(|_| wrong())?;
            continue;
        }
        let number: u32 = text.split(' ').nth(1).and_then(|number| number.parse().ok()).ok_or_else(wrong)?;
        if text != format!("line {number} {:.3} {number:#x} done", f64::from(number) / 8.0) {
            return Err(wrong());
        }
        if last.insert(place, number).is_some_and(|before| before >= number) {
            return Err(format!("{line:?} follows a later line of its thread"));
        }
        printed += 1;
    }
    if printed + dropped != all || has_room && dropped != 0 {
        return Err(format!("{printed} lines were printed and {dropped} counted, of {all}"));
    }
    Ok(())
}
