// SPDX-License-Identifier: MIT OR Apache-2.0
//! The output of `gin model`.

use super::measured::Compared;
use super::parameters::Parameters;
use super::{Needs, Row, Way, Work};
use crate::cli::{Failure, Format, ModelArgs};
use crate::plot::{Axis, Curves, plot_parts};
use serde_json::json;
use std::io::{self, Write};
use std::path::Path;

/// Returns a time in microseconds with three digits.
fn us(value: f64) -> String {
    let digits = 2_usize.saturating_sub(value.max(1.0).log10() as usize);
    format!("{value:.digits$}")
}

/// Returns bytes in the decimal unit that reads best.
fn bytes(value: f64) -> String {
    let units = [(1e9, "GB"), (1e6, "MB"), (1e3, "kB")];
    let unit = units.into_iter().find(|(unit, _)| value >= *unit);
    unit.map_or_else(|| format!("{value:.0} B"), |(unit, name)| format!("{} {name}", us(value / unit)))
}

/// Returns the busiest server of a way.
fn busiest(way: &Way) -> String {
    format!("{} {:.0} %", way.busiest.name(), way.held * 100.0)
}

/// Returns the number of bytes of a put below which the proxy takes longer for it than the NIC.
fn saturation(parameters: &Parameters) -> f64 {
    parameters.proxy_put_ns.value * parameters.nic_gb_s.value
}

/// Prints the figures by ranks.
pub(super) fn rows(
    work: &Work,
    parameters: &Parameters,
    rows: &[Row],
    arguments: &ModelArgs,
    out: &mut impl Write,
) -> io::Result<()> {
    let (node, contexts) = (arguments.node, arguments.contexts);
    if arguments.format == Format::Json {
        for row in rows {
            let all = json!({ "workload": work.name(), "node": node, "contexts": contexts, "figures": row });
            writeln!(out, "{all}")?;
        }
        return Ok(());
    }
    writeln!(out, "{}: model of nodes of {node} ranks, contexts: {contexts}; us", work.name())?;
    writeln!(
        out,
        "{:>6} {:>9} {:>6} {:>7} {:>12} {:>7} {:>12} {:>7} {:>12} {:>5} | {:>6} {:>7} {:>7} {:>7}",
        "ranks",
        "to a peer",
        "puts",
        "proxy",
        "busiest",
        "GDAKI",
        "busiest",
        "by grid",
        "busiest",
        "gain",
        "puts",
        "proxy",
        "GDAKI",
        "by grid"
    )?;
    for row in rows {
        writeln!(
            out,
            "{:>6} {:>9} {:>6} {:>7} {:>12} {:>7} {:>12} {:>7} {:>12} {:>5.2} | {:>6} {:>7} {:>7} {:>7}",
            row.ranks,
            bytes(row.bytes_to_a_peer),
            row.proxy.puts,
            us(row.proxy.us),
            busiest(&row.proxy),
            us(row.gdaki.us),
            busiest(&row.gdaki),
            us(row.gdaki_grid.us),
            busiest(&row.gdaki_grid),
            row.proxy.us / row.gdaki_grid.us,
            row.proxy_rails.puts,
            us(row.proxy_rails.us),
            us(row.gdaki_rails.us),
            us(row.gdaki_grid_rails.us),
        )?;
    }
    writeln!(out, "GDAKI: one thread of each context posts; by grid: all blocks post. gain: proxy / by grid.")?;
    writeln!(out, "Last group: the same over rails, where a rank sends the bytes of its node together.")?;
    let put = bytes(saturation(parameters));
    writeln!(out, "The proxy saturates with puts below {put}: they take more of its time than of the NIC's.")?;
    writeln!(out, "Memory of a communicator on each rank:")?;
    writeln!(
        out,
        "{:>6} {:>13} {:>13} {:>13} {:>19}",
        "ranks", "proxy pinned", "proxy device", "GDAKI device", "GDAKI on own rail"
    )?;
    for row in rows {
        let all = [row.proxy_memory.pinned, row.proxy_memory.device, row.gdaki_memory.device];
        let [pinned, device, gdaki] = all.map(|count| bytes(count as f64));
        let rails = bytes(row.gdaki_rails_memory.device as f64);
        writeln!(out, "{:>6} {pinned:>13} {device:>13} {gdaki:>13} {rails:>19}", row.ranks)?;
    }
    for (name, figure) in parameters.all() {
        if figure.source.starts_with("assumed") {
            writeln!(out, "Not measured: {name} {}, {}.", figure.value, figure.source)?;
        }
    }
    Ok(())
}

/// Prints measurements beside the model.
pub(super) fn measured(all: &[Compared], format: Format, out: &mut impl Write) -> Result<(), Failure> {
    if format == Format::Json {
        for one in all {
            writeln!(out, "{}", serde_json::to_string(one)?)?;
        }
        return Ok(());
    }
    writeln!(out, "{:<38} {:>5} {:>11} {:>9} {:>7}  source", "what", "ranks", "measured us", "model us", "error")?;
    for Compared { what, ranks, measured_us, model_us, error_percent, fitted, source } in all {
        let (measured, model) = (us(*measured_us), us(*model_us));
        let fitted = if *fitted { "; fitted to this row" } else { "" };
        writeln!(out, "{what:<38} {ranks:>5} {measured:>11} {model:>9} {error_percent:>+6.0}%  {source}{fitted}")?;
    }
    let others = || all.iter().filter(|one| !one.fitted).map(|one| one.error_percent.abs());
    let (count, max) = (others().count(), others().fold(0.0, f64::max));
    let mean = others().sum::<f64>() / count.max(1) as f64;
    writeln!(out, "Of {count} rows that no parameter was fitted to: mean error {mean:.0} %, largest {max:.0} %.")?;
    Ok(())
}

/// A figure of a row.
type Of<'a> = &'a dyn Fn(&Row) -> f64;

/// Writes a plot by ranks: times above, memory of a communicator below.
pub(super) fn plot(path: &Path, work: &Work, rows: &[Row]) -> Result<(), Failure> {
    let curves = |all: &[(&str, Of)]| -> Curves {
        let curve = |value: Of| rows.iter().map(|row| (row.ranks.into(), value(row))).collect();
        all.iter().map(|(name, value)| ((*name).to_owned(), curve(value))).collect()
    };
    let megabytes = |needs: &Needs| (needs.pinned + needs.device) as f64 / 1e6;
    let times = curves(&[
        ("proxy", &|row| row.proxy.us),
        ("GDAKI", &|row| row.gdaki.us),
        ("proxy, rails", &|row| row.proxy_rails.us),
        ("GDAKI by all blocks", &|row| row.gdaki_grid.us),
        ("GDAKI by all blocks, rails", &|row| row.gdaki_grid_rails.us),
    ]);
    let memory = curves(&[
        ("proxy", &|row| megabytes(&row.proxy_memory)),
        ("GDAKI", &|row| megabytes(&row.gdaki_memory)),
        ("GDAKI, connections along rails", &|row| megabytes(&row.gdaki_rails_memory)),
    ]);
    let axis = Axis { name: "ranks", label: &|ranks| ranks.to_string() };
    plot_parts(path, &work.name(), &axis, vec![("Time by ranks", "us", times), ("Memory by ranks", "MB", memory)])
}
