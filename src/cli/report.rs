// SPDX-License-Identifier: MIT OR Apache-2.0
//! The results of runs, as a table for people or as JSON for programs.

use super::Failure;
use crate::plot::{Curve, Curves};
use crate::size;
use gin_host::comm::Stats;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

/// The statistics of a rank's communicators for one context and peer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Figures {
    /// The rank.
    pub rank: u32,
    /// The context.
    pub context: u32,
    /// The rank of the peer.
    pub peer: u32,
    /// The statistics by name.
    #[serde(flatten)]
    pub figures: BTreeMap<String, u64>,
}

/// The result of one run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    /// Name of the workload.
    pub workload: &'static str,
    /// Kind of device.
    pub device: &'static str,
    /// Name of the GPUs, if they are real and all have the same.
    pub device_name: Option<String>,
    /// Number of GPUs that the ranks shared, if they are real.
    pub gpus: Option<usize>,
    /// Back end.
    pub backend: String,
    /// The network of the proxies; `None` if kernels drove NICs.
    pub network: Option<String>,
    /// The NIC that each rank's kernels drove, by rank; `None` if proxies served them.
    pub nics: Option<Vec<String>>,
    /// The engines that rang the doorbells of those NICs, without repetitions; `None` if proxies served the kernels.
    pub doorbells: Option<Vec<String>>,
    /// How operations reached their peers: `network`, `lsa` (loads and stores), or `both` if loads and stores reached
    /// some of the peers.
    pub route: &'static str,
    /// Number of ranks.
    pub ranks: u32,
    /// The value of `--bytes`.
    pub bytes: u64,
    /// Iterations, rounds or steps in one launch.
    pub iters: u64,
    /// Blocks of each grid.
    pub blocks: u32,
    /// Threads of each block.
    pub threads: u32,
    /// Contexts of the communicator.
    pub contexts: u32,
    /// The mode of the virtual GPU.
    pub mode: Option<&'static str>,
    /// The seed of the virtual GPU's schedule.
    pub seed: Option<u64>,
    /// The statistics of the communicators over all launches, if requested, sorted by rank, context and peer.
    pub stats: Option<Vec<Figures>>,
    /// Every result is right; `None` if they were not checked.
    pub verified: Option<bool>,
    /// Number of wrong results.
    pub errors: u64,
    /// The first wrong result, in words.
    pub first_difference: Option<String>,
    /// Microseconds per iteration of the slowest rank: the minimum, the median and the 99th percentile of the launches.
    pub time_us_min: f64,
    pub time_us_median: f64,
    pub time_us_p99: f64,
    /// The version of NCCL that ran the same collective in turns, if asked for.
    pub nccl: Option<String>,
    /// Microseconds of its iteration: the median of as many launches as the workload had.
    pub nccl_time_us_median: Option<f64>,
    /// Algorithm bandwidth in GB/s: bytes of a rank's data divided by the median time.
    pub algorithm_gb_s: f64,
    /// Bus bandwidth in GB/s, as nccl-tests defines it.
    pub bus_gb_s: f64,
    /// Operations per second: puts and signals posted by all ranks.
    pub operations_per_second: f64,
}

/// The output format.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Format {
    /// A table.
    Table,
    /// One JSON object per run, one per line.
    Json,
}

const HEADINGS: [&str; 13] = [
    "workload",
    "device",
    "back end",
    "route",
    "ranks",
    "bytes",
    "time/iteration",
    "min",
    "p99",
    "algbw GB/s",
    "busbw GB/s",
    "operations/s",
    "#wrong",
];

/// Formats a number with three digits or more.
fn number(value: f64) -> String {
    match value {
        large if large >= 100.0 => format!("{large:.0}"),
        middle if middle >= 10.0 => format!("{middle:.1}"),
        small if small >= 1.0 || small == 0.0 => format!("{small:.2}"),
        // As many decimals as show three digits, so that numbers of one column can be compared at a glance.
        tiny if tiny >= 1e-6 => format!("{tiny:.*}", (2.0 - tiny.log10().floor()) as usize),
        least => format!("{least:.2e}"),
    }
}

/// Formats a time in the unit that fits.
pub(crate) fn time(us: f64) -> String {
    let (value, unit) = match us {
        seconds if seconds >= 1e6 => (seconds * 1e-6, "s"),
        milliseconds if milliseconds >= 1e3 => (milliseconds * 1e-3, "ms"),
        microseconds if microseconds >= 1.0 => (microseconds, "us"),
        nanoseconds => (nanoseconds * 1e3, "ns"),
    };
    format!("{} {unit}", number(value))
}

/// Headings of what NCCL took, and of the ratio of the workload's time to that, if it ran.
const BESIDE: [&str; 2] = ["NCCL", "ratio"];

fn headings(report: &Report) -> Vec<String> {
    HEADINGS.iter().chain(BESIDE.iter().filter(|_| report.nccl.is_some())).map(|&name| name.to_owned()).collect()
}

fn cells(report: &Report) -> Vec<String> {
    let beside = report.nccl_time_us_median.into_iter();
    let beside = beside.flat_map(|nccl| [time(nccl), number(report.time_us_median / nccl)]);
    let own = [
        report.workload.to_string(),
        match report.gpus {
            None => report.device.to_owned(),
            Some(1) => format!("{}, 1 GPU", report.device),
            Some(gpus) => format!("{}, {gpus} GPUs", report.device),
        },
        report.backend.clone(),
        report.route.to_owned(),
        report.ranks.to_string(),
        size::show(report.bytes),
        time(report.time_us_median),
        time(report.time_us_min),
        time(report.time_us_p99),
        number(report.algorithm_gb_s),
        number(report.bus_gb_s),
        format!("{:.0}", report.operations_per_second),
        if report.verified.is_some() { report.errors.to_string() } else { "N/A".to_owned() },
    ];
    own.into_iter().chain(beside).collect()
}

/// Returns the rows of a table of statistics: the headings, one row for each rank, context and peer, and the sums. It
/// has a column for each statistic that is above 0 in some row.
fn figures(stats: &[Figures]) -> Vec<Vec<String>> {
    let names = Stats::default().named().into_iter().map(|(name, _)| name);
    let value = |row: &Figures, name: &str| row.figures.get(name).copied().unwrap_or(0);
    let names: Vec<&str> = names.filter(|name| stats.iter().any(|row| value(row, name) > 0)).collect();
    let headings = ["rank", "context", "peer"].iter().chain(&names).map(|name| name.replace('_', " "));
    let mut rows = vec![headings.collect::<Vec<_>>()];
    rows.extend(stats.iter().map(|row| {
        let labels = [row.rank, row.context, row.peer].map(|number| number.to_string());
        labels.into_iter().chain(names.iter().map(|name| value(row, name).to_string())).collect()
    }));
    let all = |name: &str| {
        let values = stats.iter().map(|row| value(row, name));
        // Depths do not add up: this takes the largest.
        if name == "deepest" { values.max() } else { Some(values.sum()) }
    };
    let sums = names.iter().map(|name| all(name).unwrap_or(0).to_string());
    rows.push(["all", "", ""].map(String::from).into_iter().chain(sums).collect());
    rows
}

/// Prints a row in columns of at least these widths.
fn row(cells: &[String], widths: &[usize], out: &mut impl Write) -> io::Result<()> {
    let cells: Vec<String> = cells.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
    writeln!(out, "{}", cells.join("  ").trim_end())
}

/// Prints rows in aligned columns.
fn table(rows: &[Vec<String>], out: &mut impl Write) -> io::Result<()> {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(String::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    rows.iter().try_for_each(|cells| row(cells, &widths, out))
}

/// Width of each column of results. Rows are printed before later ones are known, so a column is as wide as its longest
/// usual cell: `cuda, 8 GPUs`, `1023KiB`, `999 us`, `0.0000229`.
const WIDTHS: [usize; 15] = [8, 12, 8, 7, 5, 7, 14, 7, 7, 10, 10, 12, 6, 7, 5];

/// Prints the results of runs, each when its run has ended.
pub(crate) struct Printer<'a, W> {
    format: Format,
    /// The last words below a table.
    note: Option<&'a str>,
    out: &'a mut W,
    reports: Vec<Report>,
}

impl<'a, W: Write> Printer<'a, W> {
    /// Makes a printer that has printed nothing. A table ends with `note`, if given.
    pub(crate) fn new(format: Format, note: Option<&'a str>, out: &'a mut W) -> Self {
        Self { format, note, out, reports: Vec::new() }
    }

    /// Prints the result of a run, so that a reader has it at once.
    ///
    /// # Errors
    /// Returns the error of the writer.
    pub(crate) fn add(&mut self, report: Report) -> io::Result<()> {
        match self.format {
            Format::Json => {
                serde_json::to_writer(&mut *self.out, &report)?;
                writeln!(self.out)?;
            }
            Format::Table => {
                if self.reports.is_empty() {
                    row(&headings(&report), &WIDTHS, self.out)?;
                }
                row(&cells(&report), &WIDTHS, self.out)?;
            }
        }
        self.reports.push(report);
        self.out.flush()
    }

    /// Prints what belongs below a table. Returns the results.
    ///
    /// # Errors
    /// Returns the error of the writer.
    pub(crate) fn end(self) -> io::Result<Vec<Report>> {
        let Self { format, note, out, reports } = self;
        if format == Format::Json || reports.is_empty() {
            return Ok(reports);
        }
        for report in &reports {
            if let Some(difference) = &report.first_difference {
                writeln!(out, "{}: first difference: {difference}", report.workload)?;
            }
        }
        for report in &reports {
            if let Some(nics) = &report.nics {
                writeln!(out, "{}: kernels drove {}", report.workload, nics.join(", "))?;
            }
            if let Some(doorbell_sources) = &report.doorbells {
                writeln!(out, "{}: doorbells were rung by {}", report.workload, doorbell_sources.join("; by "))?;
            }
        }
        for report in &reports {
            match report.stats.as_deref() {
                None => {}
                Some([]) => writeln!(out, "\n{}: no requests to the network", report.workload)?,
                Some(stats) => {
                    writeln!(out, "\n{}: requests to the network, by rank, context and peer", report.workload)?;
                    table(&figures(stats), out)?;
                }
            }
        }
        if let Some(version) = reports.iter().find_map(|report| report.nccl.as_ref()) {
            writeln!(out, "\nNCCL {version} ran in turns; the ratio is gin's time to NCCL's.")?;
        }
        if reports.iter().any(|report| report.device == "virtual") {
            writeln!(out, "\nTimes of virtual GPUs are the times of their simulation on this machine's CPU.")?;
        }
        if let Some(note) = note {
            writeln!(out, "{note}.")?;
        }
        Ok(reports)
    }
}

/// Writes a plot of the results of one workload by size to a file, as SVG.
///
/// # Errors
/// Returns the error of the file.
pub(crate) fn plot(reports: &[Report], path: &Path) -> Result<(), Failure> {
    let Some(first) = reports.first() else { return Ok(()) };
    let curve = |name: &str, value: fn(&Report) -> f64| {
        (name.to_owned(), reports.iter().map(|report| (report.bytes, value(report))).collect::<Curve>())
    };
    let latency = [
        curve("minimum", |report| report.time_us_min),
        curve("median", |report| report.time_us_median),
        curve("99th percentile", |report| report.time_us_p99),
    ];
    let bandwidth = [curve("algorithm", |report| report.algorithm_gb_s), curve("bus", |report| report.bus_gb_s)];
    let Report { workload, ranks, device, route, .. } = first;
    let of = format!("{workload}, {ranks} ranks, {device}, {route}");
    crate::plot::plot(path, &of, [Curves::from(latency), Curves::from(bandwidth)])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the output of these results.
    fn printed(reports: &[Report], format: Format, note: Option<&str>) -> String {
        let mut out = Vec::new();
        let mut printer = Printer::new(format, note, &mut out);
        reports.iter().for_each(|report| printer.add(report.clone()).unwrap());
        printer.end().unwrap();
        String::from_utf8(out).unwrap()
    }

    fn report() -> Report {
        Report {
            workload: "ring",
            device: "virtual",
            device_name: None,
            gpus: None,
            backend: "proxy".into(),
            network: Some("peer".into()),
            nics: None,
            doorbells: None,
            route: "network",
            ranks: 4,
            bytes: 65536,
            iters: 3,
            blocks: 1,
            threads: 32,
            contexts: 1,
            mode: Some("seeded"),
            seed: Some(1),
            stats: None,
            verified: Some(false),
            errors: 2,
            first_difference: Some("rank 1, element 7: expected 3, got 4".into()),
            time_us_min: 9.0,
            time_us_median: 12.34,
            time_us_p99: 15.0,
            nccl: None,
            nccl_time_us_median: None,
            algorithm_gb_s: 0.5,
            bus_gb_s: 0.75,
            operations_per_second: 1e6,
        }
    }

    #[test]
    fn times_are_in_the_unit_that_fits_and_small_numbers_keep_their_digits() {
        let shown = [0.5, 1.0, 12.34, 999.0, 1234.5, 56_789.0, 4_500_000.0].map(time);
        assert_eq!(shown, ["500 ns", "1.00 us", "12.3 us", "999 us", "1.23 ms", "56.8 ms", "4.50 s"]);
        let shown = [0.0, 0.123, 0.012345, 0.00145, 0.000_022_9, 1e-6, 1.2e-9].map(number);
        assert_eq!(shown, ["0.00", "0.123", "0.0123", "0.00145", "0.0000229", "0.00000100", "1.20e-9"]);
    }

    #[test]
    fn json_is_one_object_a_line_with_the_promised_keys() {
        let text = printed(&[report(), report()], Format::Json, Some("a note"));
        assert_eq!(text.lines().count(), 2);
        for line in text.lines() {
            let value: serde_json::Value = serde_json::from_str(line).unwrap();
            let keys = [
                "workload",
                "device",
                "backend",
                "route",
                "ranks",
                "bytes",
                "iters",
                "verified",
                "errors",
                "time_us_min",
                "time_us_median",
                "time_us_p99",
                "algorithm_gb_s",
                "bus_gb_s",
            ];
            for key in keys {
                assert!(value.get(key).is_some(), "{key} is missing");
            }
        }
    }

    #[test]
    fn rows_of_real_gpus_say_how_many_and_the_note_on_virtual_times_stands_only_with_virtual_ones() {
        let real = Report { device: "cuda", gpus: Some(2), mode: None, seed: None, ..report() };
        let text = |reports: &[Report]| printed(reports, Format::Table, None);
        let alone = text(&[Report { gpus: Some(1), ..real.clone() }]);
        assert!(alone.contains("cuda, 1 GPU ") && !alone.contains("simulation"), "{alone}");
        let both = text(&[report(), real]);
        assert!(both.contains("cuda, 2 GPUs ") && both.contains("simulation"), "{both}");
    }

    #[test]
    fn the_nics_that_kernels_drove_are_named_and_the_engines_that_rang_their_doorbells() {
        let nics = Some(vec!["soft_0".to_owned(), "soft_1".to_owned()]);
        let doorbells = Some(vec!["kernels".to_owned(), "the host: refused".to_owned()]);
        let text = printed(&[Report { nics, doorbells, ..report() }], Format::Table, None);
        assert!(text.contains("ring: kernels drove soft_0, soft_1"), "{text}");
        assert!(text.contains("ring: doorbells were rung by kernels; by the host: refused"), "{text}");
    }

    #[test]
    fn figures_stand_in_a_table_with_their_sum_and_none_are_said_to_be_none() {
        let text = |stats| printed(&[Report { stats: Some(stats), ..report() }], Format::Table, None);
        let row = |peer, accepted, deepest| {
            let figures = [("accepted", accepted), ("deepest", deepest), ("failed", 0)];
            let figures = figures.map(|(name, value)| (name.to_owned(), value)).into();
            Figures { rank: 0, context: 1, peer, figures }
        };
        let shown = text(vec![row(2, 3, 7), row(3, 4, 5)]);
        let lines: Vec<Vec<&str>> = shown.lines().map(|line| line.split_whitespace().collect()).collect();
        assert!(lines.contains(&vec!["rank", "context", "peer", "accepted", "deepest"]), "{shown}");
        assert!(lines.contains(&vec!["0", "1", "3", "4", "5"]) && lines.contains(&vec!["all", "7", "7"]), "{shown}");
        assert!(text(Vec::new()).contains("ring: no requests to the network"));
    }

    #[test]
    fn rows_that_are_printed_one_by_one_stand_in_columns() {
        let small =
            Report { bytes: 8, time_us_median: 0.5, algorithm_gb_s: 0.000_022_9, verified: Some(true), ..report() };
        let large = Report { bytes: 1023 << 10, time_us_median: 999e3, algorithm_gb_s: 123.4, ..small.clone() };
        let real = Report { device: "cuda", gpus: Some(8), operations_per_second: 123_456_789_012.0, ..large.clone() };
        let text = printed(&[small, large, real], Format::Table, None);
        let lines: Vec<&str> = text.lines().take(4).collect();
        for (column, heading) in HEADINGS.iter().enumerate() {
            let at = WIDTHS[..column].iter().map(|width| width + 2).sum::<usize>();
            assert!(lines[0][at..].starts_with(heading), "{text}");
            for line in &lines {
                assert!(at == 0 || line[..at].ends_with("  ") && !line[at..].starts_with(' '), "{heading}: {text}");
            }
        }
    }

    #[test]
    fn a_wrong_result_shows_in_the_table_with_its_first_difference() {
        let text = printed(&[report()], Format::Table, Some("a note"));
        let row: Vec<_> = text.lines().nth(1).unwrap_or_default().split_whitespace().collect();
        assert!(row.last() == Some(&"2") && text.contains("element 7"), "{text}");
        assert!(text.contains("64KiB"));
        assert!(text.ends_with("a note.\n"));
    }
}
