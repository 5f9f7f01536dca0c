// SPDX-License-Identifier: MIT OR Apache-2.0
//! Plots of figures by size, or by the number of ranks.

use crate::Failure;
use crate::size;
use plotters::element::DynElement;
use plotters::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;

/// Width of a plot and height of one of its parts, in pixels.
const PART: (u32, u32) = (900, 520);

/// The parts of a plot: their titles and the unit of their figures.
pub const PARTS: [(&str, &str); 2] = [("Latency by size", "us"), ("Bandwidth by size", "GB/s")];

/// Colours that readers with any colour vision tell apart on white (Okabe and Ito, 2008).
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(0, 0, 0),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
];

/// Maximum number of labels of sizes that fit.
const LABELS: u32 = 20;

/// The figures of one curve, by size in bytes or by the number of ranks.
pub type Curve = BTreeMap<u64, f64>;

/// Curves by name.
pub type Curves = BTreeMap<String, Curve>;

/// Writes a plot of figures by size to a file, as SVG: latency in microseconds above, bandwidth in GB/s below, both
/// axes logarithmic. Each curve has two sizes or more, and a part without curves is left out. `of` is the subject in
/// the titles.
///
/// # Errors
/// Returns the error of the file.
pub fn plot(path: &Path, of: &str, [latency, bandwidth]: [Curves; 2]) -> Result<(), Failure> {
    let parts = PARTS.iter().zip([latency, bandwidth]).map(|(&(title, unit), curves)| (title, unit, curves)).collect();
    plot_parts(path, of, &Axis { name: "bytes", label: &size::show }, parts)
}

/// The horizontal axis of a plot.
pub struct Axis<'a> {
    /// The quantity.
    pub name: &'a str,
    /// Returns the label of a value.
    pub label: &'a dyn Fn(u64) -> String,
}

/// Writes a plot to a file, as SVG, with logarithmic axes. A part has a title, the unit of its figures, and curves with
/// two points or more. A part without curves is left out. `of` is the subject in the titles.
///
/// # Errors
/// Returns the error of the file.
pub fn plot_parts(path: &Path, of: &str, axis: &Axis, mut parts: Vec<(&str, &str, Curves)>) -> Result<(), Failure> {
    parts.retain(|(.., curves)| !curves.is_empty());
    let name = path.display();
    draw(path, &parts, of, axis).map_err(|error| format!("cannot write the plot {name}: {error}").into())
}

fn draw(path: &Path, parts: &[(&str, &str, Curves)], of: &str, axis: &Axis) -> Result<(), Failure> {
    let (width, height) = PART;
    let root = SVGBackend::new(path, (width, height * parts.len() as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    for (area, (title, unit, curves)) in root.split_evenly((parts.len(), 1)).iter().zip(parts) {
        let sizes = || curves.values().flat_map(|curve| curve.keys().copied());
        let values = || curves.values().flat_map(|curve| curve.values().copied()).filter(|value| *value > 0.0);
        let (least, max) = (sizes().min().unwrap_or(1), sizes().max().unwrap_or(2));
        // The axis has labels at every power of two, or at every second one; the last one at its end.
        let powers = (max.ilog2() - least.ilog2()).max(1);
        let step = powers / (LABELS + 1) + 1;
        let end = least as f64 * f64::from(powers.next_multiple_of(step)).exp2();
        let (low, high) = (values().fold(f64::MAX, f64::min) / 1.25, values().fold(0.0, f64::max) * 1.25);
        let mut chart = ChartBuilder::on(area)
            .caption(format!("{title}: {of}"), ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(70)
            .build_cartesian_2d((least as f64..end.max(max as f64)).log_scale().base(2.0), (low..high).log_scale())?;
        chart
            .configure_mesh()
            .x_desc(axis.name)
            .x_labels(powers.min(LABELS) as usize)
            .y_desc(*unit)
            .x_label_formatter(&|value| (axis.label)(value.round() as u64))
            .y_label_formatter(&|value| format!("{value}"))
            .draw()?;
        for (index, (name, curve)) in curves.iter().enumerate() {
            let colour = COLOURS[index % COLOURS.len()];
            // A logarithmic axis has no 0.
            let points = curve.iter().filter(|(_, value)| **value > 0.0).map(|(&bytes, &value)| (bytes as f64, value));
            chart.draw_series(points.clone().map(|point| mark(index, point, colour)))?;
            chart.draw_series(LineSeries::new(points, colour.stroke_width(2)))?.label(name).legend(move |(x, y)| {
                let line = PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2));
                EmptyElement::at((0, 0)) + line + mark(index, (x + 9, y), colour)
            });
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

/// Returns the mark of a point of the curve with this index. Curves next to each other have different marks.
fn mark<'a, C: Clone + 'static>(index: usize, at: C, colour: RGBColor) -> DynElement<'static, SVGBackend<'a>, C> {
    match index % 3 {
        0 => Circle::new(at, 4, colour.filled()).into_dyn(),
        1 => TriangleMarker::new(at, 6, colour.filled()).into_dyn(),
        _ => Cross::new(at, 4, colour.stroke_width(2)).into_dyn(),
    }
}
