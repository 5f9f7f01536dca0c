// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tables of measured figures and the figures that they are compared with.

use super::figure::Figure;
use serde::Serialize;

/// The goal for a ratio.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Goal {
    /// At most this ratio.
    AtMost(f64),
    /// At least this ratio.
    AtLeast(f64),
}

impl Goal {
    fn is_met(self, ratio: f64) -> bool {
        match self {
            Self::AtMost(bound) => ratio <= bound,
            Self::AtLeast(bound) => ratio >= bound,
        }
    }

    fn text(self) -> String {
        let (how, bound) = match self {
            Self::AtMost(bound) => ("at most", bound),
            Self::AtLeast(bound) => ("at least", bound),
        };
        // A bound that depends on what was measured has many digits.
        format!("{how} {}", (bound * 1e3).round() / 1e3)
    }
}

/// A goal and its outcome.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct Judged {
    pub(crate) goal: String,
    /// The goal is a stretch goal.
    pub(crate) stretch: bool,
    /// The ratio meets the goal.
    pub(crate) met: bool,
}

/// The meaning of a figure to compare with.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    /// The least work for the same effect.
    Floor,
    /// NCCL's memory operations for the same effect, in the same run.
    Nccl,
    /// Another way, or a figure from elsewhere.
    Other,
}

/// A figure of the same unit to compare with.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct Beside {
    /// Its name.
    pub(crate) what: String,
    /// The shape or the way with the best figure.
    pub(crate) detail: Option<String>,
    pub(crate) kind: Kind,
    pub(crate) value: f64,
    pub(crate) noise: Option<f64>,
    /// The measured figure divided by this one.
    pub(crate) ratio: f64,
    pub(crate) goals: Vec<Judged>,
}

/// The place of a figure in a plot by size.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Point {
    /// The curve.
    pub(crate) curve: String,
    /// Size of an operation, in bytes.
    pub(crate) bytes: u64,
}

/// A figure of an earlier run, and the difference to it.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub(crate) struct Compared {
    pub(crate) old: f64,
    /// This run's figure divided by the earlier one.
    pub(crate) ratio: f64,
    /// The difference exceeds the noise of both figures together; `None` if the noise of one is unknown.
    pub(crate) differs: Option<bool>,
}

/// A measured figure and its comparisons.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct Row {
    /// The measured operation. Unique in its table.
    pub(crate) what: String,
    /// The shape with the best figure.
    pub(crate) detail: Option<String>,
    pub(crate) unit: &'static str,
    /// The short table has this row.
    pub(crate) main: bool,
    #[serde(flatten)]
    pub(crate) figure: Figure,
    #[serde(flatten)]
    pub(crate) point: Option<Point>,
    pub(crate) beside: Vec<Beside>,
    /// The comparison with an earlier run, if one was requested and has this row.
    pub(crate) compared: Option<Compared>,
}

impl Row {
    /// Returns the row of a figure that is in `unit`.
    pub(crate) fn new(what: impl Into<String>, figure: Figure, unit: &'static str) -> Self {
        let what = what.into();
        Self { what, detail: None, unit, main: false, figure, point: None, beside: Vec::new(), compared: None }
    }

    /// Adds the row to the short table.
    pub(crate) fn main(self, main: bool) -> Self {
        Self { main, ..self }
    }

    /// Adds the shape with the best figure.
    pub(crate) fn detail(self, detail: String) -> Self {
        Self { detail: Some(detail), ..self }
    }

    /// Adds the row to a plot.
    pub(crate) fn point(self, curve: &str, bytes: u64) -> Self {
        Self { point: Some(Point { curve: curve.to_owned(), bytes }), ..self }
    }

    /// Adds a figure to compare with, its goal and its stretch goal.
    pub(crate) fn beside(
        mut self,
        kind: Kind,
        what: impl Into<String>,
        figure: Figure,
        goal: Option<Goal>,
        stretch: Option<Goal>,
    ) -> Self {
        let ratio = self.figure.value / figure.value;
        let judged = |goal: Option<Goal>, stretch| {
            goal.map(|goal| Judged { goal: goal.text(), stretch, met: goal.is_met(ratio) })
        };
        let goals = judged(goal, false).into_iter().chain(judged(stretch, true)).collect();
        let Figure { value, noise, .. } = figure;
        self.beside.push(Beside { what: what.into(), detail: None, kind, value, noise, ratio, goals });
        self
    }

    /// Adds the shape or the way to the last figure to compare with.
    pub(crate) fn by(mut self, detail: impl Into<String>) -> Self {
        if let Some(last) = self.beside.last_mut() {
            last.detail = Some(detail.into());
        }
        self
    }

    /// Returns the first comparison of a kind.
    pub(crate) fn first(&self, kind: Kind) -> Option<&Beside> {
        self.beside.iter().find(|beside| beside.kind == kind)
    }

    /// Returns whether no result was wrong.
    pub(crate) fn is_right(&self) -> bool {
        self.figure.wrong.is_none_or(|wrong| wrong == 0)
    }
}

/// Figures of one measurement.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct Table {
    /// Subject of the figures. Unique among the tables with as many ranks.
    pub(crate) title: String,
    /// Kind of device.
    pub(crate) device: &'static str,
    /// Name of the GPUs.
    pub(crate) gpus: Option<String>,
    /// Number of ranks.
    pub(crate) ranks: u32,
    /// The ranks are processes.
    pub(crate) processes: bool,
    /// Facts that a reader must know.
    pub(crate) notes: Vec<String>,
    pub(crate) rows: Vec<Row>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_goal_counts_from_the_side_that_it_names() {
        assert!(Goal::AtMost(1.1).is_met(1.1) && !Goal::AtMost(1.1).is_met(1.11));
        assert!(Goal::AtLeast(0.98).is_met(0.98) && !Goal::AtLeast(0.98).is_met(0.97));
    }

    #[test]
    fn a_row_with_a_wrong_result_is_not_right() {
        let row = |wrong| Row::new("", Figure::new(&[1.0], wrong), "us");
        assert!(!row(Some(1)).is_right() && row(Some(0)).is_right() && row(None).is_right());
    }
}
