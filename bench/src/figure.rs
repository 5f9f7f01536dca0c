// SPDX-License-Identifier: MIT OR Apache-2.0
//! Figures of repeated measurements.

use serde::{Deserialize, Serialize};

/// Returns the median of one or more values.
pub(crate) fn median(values: &[f64]) -> f64 {
    percentile(values, 50)
}

/// Returns the value below which `percent` percent of one or more values lie.
fn percentile(values: &[f64], percent: usize) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() * percent / 100]
}

/// Number of repeats from which the noise leaves out the lowest and the highest one.
const TRIMMED: usize = 5;

/// A measured figure: the median of its repeats, and what is known beside it. All are in the same unit.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Figure {
    /// The median of the repeats.
    pub(crate) value: f64,
    /// Half the range of the repeats, without the lowest and the highest one if there are at least five; `None` with
    /// one repeat.
    #[serde(default)]
    pub(crate) noise: Option<f64>,
    /// Number of repeats.
    #[serde(default)]
    pub(crate) repeats: usize,
    /// The median of single operations.
    #[serde(default)]
    pub(crate) p50: Option<f64>,
    /// The 99th percentile of single operations.
    #[serde(default)]
    pub(crate) p99: Option<f64>,
    /// The figure if all threads took as long as the median thread.
    #[serde(default)]
    pub(crate) median_thread: Option<f64>,
    /// Number of wrong results; `None` if there is nothing to check.
    pub(crate) wrong: Option<u64>,
}

impl Figure {
    /// Returns the figure of one or more repeats with `wrong` wrong results.
    pub(crate) fn new(repeats: &[f64], wrong: Option<u64>) -> Self {
        let mut sorted = repeats.to_vec();
        sorted.sort_by(f64::total_cmp);
        let kept = if sorted.len() < TRIMMED { &sorted[..] } else { &sorted[1..sorted.len() - 1] };
        let noise = (kept.len() > 1).then(|| (kept[kept.len() - 1] - kept[0]) / 2.0);
        let (value, repeats) = (median(repeats), repeats.len());
        Self { value, noise, repeats, p50: None, p99: None, median_thread: None, wrong }
    }

    /// Adds the percentiles of single operations.
    pub(crate) fn with_operations(self, times: &[f64]) -> Self {
        if times.is_empty() {
            return self;
        }
        Self { p50: Some(median(times)), p99: Some(percentile(times, 99)), ..self }
    }

    /// Returns the figure in another unit, which is `factor` times as many.
    pub(crate) fn times(self, factor: f64) -> Self {
        let all = |figure: Option<f64>| figure.map(|figure| figure * factor);
        Self {
            value: self.value * factor,
            noise: all(self.noise),
            p50: all(self.p50),
            p99: all(self.p99),
            median_thread: all(self.median_thread),
            ..self
        }
    }

    /// Returns the noise as a fraction of the value.
    pub(crate) fn relative_noise(&self) -> Option<f64> {
        self.noise.map(|noise| noise / self.value.abs()).filter(|noise| noise.is_finite())
    }

    /// Returns whether two figures differ by more than the noise of both together; `None` if the noise of one is
    /// unknown.
    pub(crate) fn differs(&self, other: &Self) -> Option<bool> {
        Some((self.value - other.value).abs() > self.noise? + other.noise?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_figure() {
        assert_eq!(median(&[3.0, 100.0, 1.0]), 3.0);
        assert_eq!(median(&[2.0]), 2.0);
    }

    #[test]
    fn the_noise_is_half_the_range_of_the_repeats_without_one_extreme_on_each_side() {
        let noise = |repeats: &[f64]| Figure::new(repeats, None).noise;
        assert_eq!(noise(&[4.0]), None);
        assert_eq!(noise(&[4.0, 6.0]), Some(1.0));
        assert_eq!(noise(&[10.0, 0.0, 4.0, 6.0]), Some(5.0));
        assert_eq!(noise(&[0.0, 4.0, 5.0, 6.0, 100.0]), Some(1.0));
        let halved = Figure::new(&[4.0, 6.0, 8.0], Some(3)).times(0.5);
        assert_eq!((halved.value, halved.noise, halved.wrong, halved.repeats), (3.0, Some(1.0), Some(3), 3));
        assert_eq!(halved.relative_noise(), Some(1.0 / 3.0));
    }

    #[test]
    fn figures_differ_if_they_are_further_apart_than_their_noise_together() {
        let figure = |low: f64, high: f64| Figure::new(&[low, (low + high) / 2.0, high], None);
        assert_eq!(figure(9.0, 11.0).differs(&figure(11.5, 13.5)), Some(true));
        assert_eq!(figure(9.0, 11.0).differs(&figure(10.5, 12.5)), Some(false));
        assert_eq!(figure(9.0, 11.0).differs(&Figure::new(&[100.0], None)), None);
    }

    #[test]
    fn percentiles_are_those_of_single_operations() {
        let times: Vec<f64> = (0..1000).rev().map(f64::from).collect();
        let figure = Figure::new(&[1.0], None).with_operations(&times).times(2.0);
        assert_eq!((figure.p50, figure.p99), (Some(1000.0), Some(1980.0)));
        assert_eq!(Figure::new(&[1.0], None).with_operations(&[]).p50, None);
    }
}
