// SPDX-License-Identifier: MIT OR Apache-2.0
//! Plots of figures by size.

use super::print::subject;
use super::size;
use super::table::{Kind, Table};
use crate::Failure;
use plotters::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;

/// Width of a plot and height of one of its parts, in pixels.
const PART: (u32, u32) = (900, 520);

/// The parts of a plot: their titles and the unit of their figures.
const PARTS: [(&str, &str); 2] = [("Latency by size", "us"), ("Bandwidth by size", "GB/s")];

/// The figures of one curve, by size in bytes.
pub type Curve = BTreeMap<u64, f64>;

/// Curves by name.
pub type Curves = BTreeMap<String, Curve>;

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

/// Writes a plot of figures by size to a file, as SVG: latency in microseconds above, bandwidth in GB/s below, both
/// axes logarithmic. Each curve has two sizes or more, and a part without curves is left out. `of` is the subject in
/// the titles.
///
/// # Errors
/// Returns the error of the file.
pub fn plot(path: &Path, of: &str, [latency, bandwidth]: [Curves; 2]) -> Result<(), Failure> {
    let parts = PARTS.iter().zip([latency, bandwidth]).map(|(&(title, unit), curves)| (title, unit, curves));
    let parts: Vec<_> = parts.filter(|(.., curves)| !curves.is_empty()).collect();
    let name = path.display();
    draw(path, &parts, of).map_err(|error| format!("cannot write the plot {name}: {error}").into())
}

fn draw(path: &Path, parts: &[(&str, &str, Curves)], of: &str) -> Result<(), Failure> {
    let (width, height) = PART;
    let root = SVGBackend::new(path, (width, height * parts.len() as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    for (area, (title, unit, curves)) in root.split_evenly((parts.len(), 1)).iter().zip(parts) {
        let sizes = || curves.values().flat_map(|curve| curve.keys().copied());
        let values = || curves.values().flat_map(|curve| curve.values().copied()).filter(|value| *value > 0.0);
        let (least, most) = (sizes().min().unwrap_or(1), sizes().max().unwrap_or(2));
        let (low, high) = (values().fold(f64::MAX, f64::min) / 2.0, values().fold(0.0, f64::max) * 2.0);
        let mut chart = ChartBuilder::on(area)
            .caption(format!("{title}: {of}"), ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(70)
            .build_cartesian_2d((least as f64..most as f64).log_scale().base(2.0), (low..high).log_scale())?;
        chart
            .configure_mesh()
            .x_desc("bytes")
            .y_desc(*unit)
            .x_label_formatter(&|bytes| size::show(bytes.round() as u64))
            .y_label_formatter(&|value| format!("{value}"))
            .draw()?;
        for (index, (name, curve)) in curves.iter().enumerate() {
            let colour = Palette99::pick(index).to_rgba();
            // A logarithmic axis has no 0.
            let points = curve.iter().filter(|(_, value)| **value > 0.0).map(|(&bytes, &value)| (bytes as f64, value));
            chart
                .draw_series(LineSeries::new(points, colour.stroke_width(2)).point_size(3))?
                .label(name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::LowerRight)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK)
            .draw()?;
    }
    root.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figure::Figure;
    use crate::table::Row;

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
    }

    #[test]
    fn a_plot_without_sizes_and_a_file_that_cannot_be_written_are_errors() {
        let text = write(Path::new("plot.svg"), &[table(&[])]).unwrap_err().to_string();
        assert!(text.contains("--plot") && text.contains("gin bench lsa"), "{text}");
        let text = write(Path::new("/no/such/folder/plot.svg"), &[table(&[64, 128])]).unwrap_err().to_string();
        assert!(text.contains("/no/such/folder/plot.svg"), "{text}");
    }
}
