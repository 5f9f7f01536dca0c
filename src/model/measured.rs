// SPDX-License-Identifier: MIT OR Apache-2.0
//! Measurements of 2 and 4 GPUs, and the model's figures for the same.

use super::Work;
use super::flow::Path;
use serde::Serialize;

/// A recorded measurement.
#[derive(Clone, Copy, Debug)]
pub(super) struct Measured {
    pub(super) work: Work,
    pub(super) path: Path,
    pub(super) ranks: usize,
    pub(super) us: f64,
    /// A parameter was fitted to this row.
    pub(super) fitted: bool,
    pub(super) source: &'static str,
}

/// A measurement beside the model.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Compared {
    pub(super) what: String,
    pub(super) ranks: usize,
    pub(super) measured_us: f64,
    pub(super) model_us: f64,
    /// The model's error, in percent of the measurement.
    pub(super) error_percent: f64,
    pub(super) fitted: bool,
    pub(super) source: &'static str,
}

const LSA: &str = "2 x H200, a948924, docs/benchmarks.md";
const FOUR: &str = "4 x H200, e5923a8, docs/log/2026-11-27.md";
const EP_TWO: &str = "2 x H100, ce168d2, docs/benchmarks.md";
const EP_FOUR: &str = "4 x H100, 5393f46, docs/log/2026-11-26.md";

/// The figures of a row of measurements, and the row's first figure's use in a fit.
type Row = (Path, usize, &'static str, bool, &'static [(u64, f64)]);

const ALLTOALL: [Row; 4] = [
    (
        Path::Proxy,
        2,
        LSA,
        true,
        &[
            (8, 6.1),
            (4 << 10, 5.7),
            (32 << 10, 6.5),
            (256 << 10, 8.1),
            (2 << 20, 14.4),
            (16 << 20, 64.6),
            (128 << 20, 446.0),
        ],
    ),
    (Path::Proxy, 4, FOUR, false, &[(8, 11.8)]),
    (
        Path::Copies,
        2,
        FOUR,
        true,
        &[(32 << 10, 19.1), (256 << 10, 17.2), (2 << 20, 44.7), (16 << 20, 104.0), (128 << 20, 458.0)],
    ),
    (
        Path::Copies,
        4,
        FOUR,
        false,
        &[(32 << 10, 32.6), (256 << 10, 34.8), (2 << 20, 106.0), (16 << 20, 392.0), (128 << 20, 1850.0)],
    ),
];

const DISPATCH: [Row; 2] = [
    (Path::Proxy, 2, EP_TWO, true, &[(1, 8.1), (8, 8.4), (32, 9.2), (128, 13.2), (512, 29.0), (4096, 177.0)]),
    (Path::Proxy, 4, EP_FOUR, false, &[(1, 8.66), (8, 9.24), (32, 11.6), (128, 22.2), (512, 64.7), (4096, 457.0)]),
];

const COMBINE: [Row; 2] = [
    (Path::Proxy, 2, EP_TWO, true, &[(1, 6.8), (8, 6.9), (32, 7.9), (128, 12.9), (512, 29.8), (4096, 183.0)]),
    (Path::Proxy, 4, EP_FOUR, false, &[(1, 8.00), (8, 8.19), (32, 11.1), (128, 23.4), (512, 72.9), (4096, 527.0)]),
];

/// Returns all recorded measurements.
pub(super) fn all() -> Vec<Measured> {
    let mut all = Vec::new();
    let mut add = |rows: &[Row], work: &dyn Fn(u64) -> Work| {
        for &(path, ranks, source, fits, figures) in rows {
            for (index, &(size, us)) in figures.iter().enumerate() {
                all.push(Measured { work: work(size), path, ranks, us, fitted: fits && index == 0, source });
            }
        }
    };
    add(&ALLTOALL, &|bytes| Work::Alltoall { bytes });
    add(&DISPATCH, &|tokens| Work::Dispatch(super::Tokens::of(tokens)));
    add(&COMBINE, &|tokens| Work::Combine(super::Tokens::of(tokens)));
    all
}
