// SPDX-License-Identifier: MIT OR Apache-2.0
//! Many small kernels in a row, each of which uses what the one before it wrote: in order, and as dependents.
//!
//! Events before and after the kernels tell the time. Launches on a stream are made while the GPU pauses, so that the
//! time is the GPU's and not the host's.

use super::figure::Figure;
use super::table::{Kind, Row, Table};
use super::{Bench, Failure};
use gin_gpu::{GpuError, KernelArg, LaunchConfig, Memory, MemoryKind};
use gin_host::comm::CommError;
use gin_host::world::Rank;

/// Kernels in a row; the queue of a stream has room for them.
const STEPS: u32 = 100;

/// The pause of the GPU while the host launches, in nanoseconds.
const PAUSE_NS: u64 = 2_000_000;

/// Blocks, threads of a block, and 16-byte pairs of a thread.
const SHAPES: [(u32, u32, u32); 3] = [(1, 32, 1), (32, 512, 1), (132, 512, 4)];

/// The times of a kernel in microseconds, and the wrong words.
type Times = (Vec<f64>, u64);

/// Measures kernels in a row.
pub(super) fn steps(bench: &Bench) -> Result<Vec<Table>, Failure> {
    let shapes = bench.pick(&SHAPES[..], &[(2, 32, 1)]);
    let ways = [("graph", true), ("stream", false)];
    let all = bench.on_ranks(bench.world(1)?, |rank| {
        let each = shapes.iter().flat_map(|shape| ways.map(|(_, graph)| (*shape, graph)));
        each.map(|(shape, graph)| times(bench, rank, shape, graph)).collect::<Result<Vec<_>, CommError>>()
    })?;
    let mut rows = Vec::new();
    let each = shapes.iter().flat_map(|shape| ways.map(|(way, _)| (shape, way)));
    for (((blocks, threads, pairs), way), [ordered, dependent]) in each.zip(&all[0]) {
        let kilobytes = f64::from(blocks * threads * pairs * 16) / 1e3;
        let what = |kind| format!("{blocks} x {threads} threads, {kilobytes} kB, {way}, {kind}");
        let [ordered, dependent] = [ordered, dependent].map(|(times, wrong)| Figure::new(times, Some(*wrong)));
        rows.push(Row::new(what("in order"), ordered, "us").main(way == "stream"));
        let row = Row::new(what("dependent"), dependent, "us").main(way == "stream");
        rows.push(row.beside(Kind::Other, "in order", ordered, None, None));
    }
    let mut table = bench.table("Kernels in a row", 1, rows);
    table.notes.push(format!("time of one of {STEPS} kernels that read what the one before wrote"));
    Ok(vec![table])
}

/// Measures kernels of a shape: in order, and as dependents.
fn times(bench: &Bench, rank: &Rank, shape: (u32, u32, u32), graph: bool) -> Result<[Times; 2], CommError> {
    let (blocks, threads, each) = shape;
    let (kernel, stream) = (rank.kernel("bench_step")?, rank.stream()?);
    let pairs = blocks * threads * each;
    let words = 2 * pairs as usize;
    let sides = [(); 2].map(|()| Memory::new(rank.device(), MemoryKind::Device, 8 * words as u64));
    let [first, second] = sides;
    let sides = [first?, second?];
    let step = |config: LaunchConfig, number: u32, pause_ns: u64| -> Result<(), GpuError> {
        let [from, to] = [number % 2, (number + 1) % 2]
            .map(|side| std::ptr::with_exposed_provenance_mut::<u64>(sides[side as usize].address() as usize));
        let arguments: [&dyn KernelArg; 4] = [&from.cast_const(), &to, &pairs, &pause_ns];
        // Safety: the kernel's parameters; both sides live until the stream is done.
        unsafe { stream.launch(&kernel, config, &arguments) }
    };
    let ordered = LaunchConfig::new(blocks, threads);
    let steps = |config| (0..STEPS).try_for_each(|number| step(config, number, 0));
    let mut all = [(Vec::new(), 0), (Vec::new(), 0)];
    let graphs = match graph {
        true => Some((stream.capture(|| steps(ordered))?, stream.capture(|| steps(ordered.dependent()))?)),
        false => None,
    };
    for _ in 0..=bench.launches {
        for (dependent, (times, wrong)) in [false, true].into_iter().zip(&mut all) {
            sides[0].write(0, &vec![0u64; words])?;
            if !graph {
                // It adds to the other side, which the first step overwrites.
                step(ordered, 0, bench.pick(PAUSE_NS, 0))?;
            }
            let start = stream.record()?;
            match &graphs {
                // Safety: as above.
                Some((ordered, _)) if !dependent => unsafe { stream.replay(&**ordered)? },
                // Safety: as above.
                Some((_, dependent)) => unsafe { stream.replay(&**dependent)? },
                None => steps(if dependent { ordered.dependent() } else { ordered })?,
            }
            let stop = stream.record()?;
            stream.synchronize()?;
            times.push(stop.since(&*start).map_or(0.0, |ns| ns as f64 / 1e3 / f64::from(STEPS)));
            let mut found = vec![0u64; words];
            sides[0].read(0, &mut found)?;
            *wrong += found.iter().filter(|word| **word != u64::from(STEPS)).count() as u64;
        }
    }
    // The first times are those of cold caches, and of the first overlap of the stream.
    Ok(all.map(|(times, wrong)| (times[1..].to_vec(), wrong)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn kernels_in_a_row_add_up_in_order_and_as_dependents() {
        let (limit, sabotage) = (Duration::from_secs(60), gin_testkit::Sabotage::None);
        let bench = Bench { gpus: None, job: None, launches: 2, limit, max_bytes: 64, module: None, sabotage };
        let tables = steps(&bench).unwrap();
        let rows = &tables[0].rows;
        assert_eq!(rows.len(), 4);
        assert!(rows.iter().all(|row| row.figure.wrong == Some(0) && row.figure.repeats == 2), "{rows:?}");
    }
}
