// SPDX-License-Identifier: MIT OR Apache-2.0
//! Plots of figures by size.

use super::print::subject;
use super::table::{Kind, Table};
use crate::Failure;
use gin_cli::plot::{Curves, PARTS, plot};
use std::path::Path;

/// Returns the curves of the figures in `unit`, by name: gin's and their floors.
fn curves(tables: &[Table], unit: &str) -> Curves {
    let mut curves = Curves::new();
    for row in tables.iter().flat_map(|table| &table.rows).filter(|row| row.unit == unit) {
        let Some(point) = &row.point else { continue };
        let mut add = |curve: &str, value| {
            curves.entry(curve.to_owned()).or_default().insert(point.bytes, value);
        };
        add(&point.curve, row.figure.value);
        for beside in row.beside.iter().filter(|beside| beside.kind != Kind::Nccl) {
            add(&beside.what, beside.value);
        }
    }
    curves.retain(|_, curve| curve.len() > 1);
    curves
}

/// Writes the curves of all tables to a file.
///
/// # Errors
/// Returns an error if no measurement was by size, and the error of the file.
pub(crate) fn write(path: &Path, tables: &[Table]) -> Result<(), Failure> {
    let Some(table) = tables.iter().find(|table| table.rows.iter().any(|row| row.point.is_some())) else {
        return Err("--plot: no measurement was by size; those of `gin bench lsa` and `gin bench ep` are".into());
    };
    let of = subject(table);
    plot(path, of.split_once(": ").map_or("", |(_, of)| of), PARTS.map(|(_, unit)| curves(tables, unit)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figure::Figure;
    use crate::table::Row;
    use gin_cli::plot::Curve;

    fn table(sizes: &[u64]) -> Table {
        let figure = |value| Figure::new(&[value], None);
        let row = |&bytes: &u64| {
            Row::new(format!("put of {bytes}"), figure(bytes as f64 / 8.0), "GB/s").point("put", bytes).beside(
                Kind::Floor,
                "bare",
                figure(bytes as f64),
                None,
                None,
            )
        };
        let mut rows: Vec<Row> = sizes.iter().map(row).collect();
        rows.push(Row::new("no size", figure(1.0), "GB/s"));
        let (title, gpus) = ("puts".to_owned(), Some("2 x GPU".to_owned()));
        Table { title, device: "cuda", gpus, ranks: 2, processes: false, notes: Vec::new(), rows }
    }

    #[test]
    fn the_figures_of_all_sizes_and_their_floors_are_curves() {
        let curves = curves(&[table(&[64, 1024])], "GB/s");
        let put = Curve::from([(64, 8.0), (1024, 128.0)]);
        let bare = Curve::from([(64, 64.0), (1024, 1024.0)]);
        assert_eq!(curves, Curves::from([("bare".to_owned(), bare), ("put".to_owned(), put)]));
    }

    #[test]
    fn a_plot_is_an_svg_file_with_each_curve_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plot.svg");
        write(&path, &[table(&[64, 1024, 1 << 20])]).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("<svg") && text.trim_end().ends_with("</svg>"), "{text}");
        for words in ["Bandwidth by size: 2 ranks, cuda on 2 x GPU", "put", "bare", "GB/s", "polyline"] {
            assert!(text.contains(words), "{words}: {text}");
        }
        assert!(!text.contains("Latency"), "{text}");
        // The first and the last size have labels, also with an odd number of powers between them, and with many.
        for (sizes, labels) in
            [([64, 1 << 20], ["64B", "1MiB"]), ([8, 1 << 16], ["8B", "64KiB"]), ([8, 1 << 31], ["8B", "2GiB"])]
        {
            write(&path, &[table(&sizes)]).unwrap();
            let text = std::fs::read_to_string(&path).unwrap();
            for label in labels {
                assert!(text.contains(&format!("\n{label}\n")), "{label}: {text}");
            }
        }
        // Each curve has marks of its own.
        assert!(text.contains("<circle") && text.contains("<polygon"), "{text}");
    }

    #[test]
    fn a_plot_without_sizes_and_a_file_that_cannot_be_written_are_errors() {
        let text = write(Path::new("plot.svg"), &[table(&[])]).unwrap_err().to_string();
        assert!(text.contains("--plot") && text.contains("gin bench lsa"), "{text}");
        let text = write(Path::new("/no/such/folder/plot.svg"), &[table(&[64, 128])]).unwrap_err().to_string();
        assert!(text.contains("/no/such/folder/plot.svg"), "{text}");
    }
}
