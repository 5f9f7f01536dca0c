// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tables of measured figures and the figures that they are compared with.

use serde::Serialize;
use std::io::{self, Write};

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
        match self {
            Self::AtMost(bound) => format!("at most {bound}"),
            Self::AtLeast(bound) => format!("at least {bound}"),
        }
    }
}

/// A goal and its outcome.
#[derive(Clone, PartialEq, Debug, Serialize)]
struct Judged {
    goal: String,
    /// The goal is a stretch goal.
    stretch: bool,
    /// The ratio meets the goal.
    met: bool,
}

/// A figure of the same unit to compare with.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct Beside {
    /// Its name.
    what: String,
    value: f64,
    /// The measured figure divided by this one.
    ratio: f64,
    goals: Vec<Judged>,
}

/// A measured figure and its comparisons.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct Row {
    /// The measured operation.
    what: String,
    value: f64,
    unit: &'static str,
    /// Number of wrong results; `None` if there is nothing to check.
    wrong: Option<u64>,
    beside: Vec<Beside>,
}

impl Row {
    /// Returns the row of a figure with `wrong` wrong results.
    pub(crate) fn new(what: impl Into<String>, value: f64, unit: &'static str, wrong: Option<u64>) -> Self {
        Self { what: what.into(), value, unit, wrong, beside: Vec::new() }
    }

    /// Adds a figure to compare with, its goal and its stretch goal.
    pub(crate) fn beside(
        mut self,
        what: impl Into<String>,
        value: f64,
        goal: Option<Goal>,
        stretch: Option<Goal>,
    ) -> Self {
        let ratio = self.value / value;
        let judged = |goal: Option<Goal>, stretch| {
            goal.map(|goal| Judged { goal: goal.text(), stretch, met: goal.is_met(ratio) })
        };
        let goals = judged(goal, false).into_iter().chain(judged(stretch, true)).collect();
        self.beside.push(Beside { what: what.into(), value, ratio, goals });
        self
    }

    /// Returns whether no result was wrong.
    pub(crate) fn is_right(&self) -> bool {
        self.wrong.is_none_or(|wrong| wrong == 0)
    }

    fn checked(&self) -> String {
        match self.wrong {
            None => "-".into(),
            Some(0) => "yes".into(),
            Some(wrong) => format!("NO ({wrong} wrong)"),
        }
    }
}

/// Figures of one measurement.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct Table {
    /// Subject of the figures.
    pub(crate) title: &'static str,
    /// Kind of device.
    pub(crate) device: &'static str,
    /// Name of the GPUs.
    pub(crate) gpus: Option<String>,
    /// Number of ranks.
    pub(crate) ranks: u32,
    /// Facts that a reader must know.
    pub(crate) notes: Vec<String>,
    pub(crate) rows: Vec<Row>,
}

/// Formats a number with a suitable number of digits.
fn number(value: f64) -> String {
    match value.abs() {
        large if large >= 100.0 => format!("{value:.0}"),
        middle if middle >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.3}"),
    }
}

const HEADINGS: [&str; 8] = ["what", "measured", "checked", "beside", "its figure", "ratio", "goal", "met"];

fn lines(row: &Row) -> Vec<[String; 8]> {
    let own = [row.what.clone(), format!("{} {}", number(row.value), row.unit), row.checked()];
    let mut lines: Vec<[String; 8]> = Vec::new();
    for beside in &row.beside {
        let [what, value, checked] = if lines.is_empty() { own.clone() } else { Default::default() };
        let goals: Vec<String> = beside
            .goals
            .iter()
            .map(|goal| format!("{}{}", if goal.stretch { "stretch " } else { "" }, goal.goal))
            .collect();
        let met: Vec<&str> = beside.goals.iter().map(|goal| if goal.met { "yes" } else { "no" }).collect();
        lines.push([
            what,
            value,
            checked,
            beside.what.clone(),
            format!("{} {}", number(beside.value), row.unit),
            format!("{:.3}", beside.ratio),
            goals.join(", "),
            met.join(", "),
        ]);
    }
    if lines.is_empty() {
        let [what, value, checked] = own;
        lines.push([what, value, checked, String::new(), String::new(), String::new(), String::new(), String::new()]);
    }
    lines
}

/// Prints a table as text, or as one JSON object on a line.
///
/// # Errors
/// Returns the error of the writer.
pub(crate) fn print(table: &Table, json: bool, out: &mut impl Write) -> io::Result<()> {
    if json {
        serde_json::to_writer(&mut *out, table)?;
        return writeln!(out);
    }
    let gpus = table.gpus.as_ref().map_or(String::new(), |gpus| format!(" on {gpus}"));
    let ranks = if table.ranks == 1 { "1 rank".into() } else { format!("{} ranks", table.ranks) };
    writeln!(out, "{}: {ranks}, {}{gpus}", table.title, table.device)?;
    let rows: Vec<[String; 8]> = table.rows.iter().flat_map(lines).collect();
    let width =
        |column: usize| rows.iter().map(|row| row[column].len()).chain([HEADINGS[column].len()]).max().unwrap_or(0);
    let widths: Vec<usize> = (0..HEADINGS.len()).map(width).collect();
    for row in [HEADINGS.map(String::from)].iter().chain(&rows) {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        writeln!(out, "  {}", cells.join("  ").trim_end())?;
    }
    for note in &table.notes {
        writeln!(out, "{note}.")?;
    }
    writeln!(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let met = Row::new("a put", 3.3, "us", Some(0))
            .beside("bare", 3.0, Some(Goal::AtMost(1.1)), Some(Goal::AtMost(1.0)))
            .beside("relaxed", 1.5, None, None);
        let rows = vec![met, Row::new("a loss", 120.0, "GB/s", Some(7)), Row::new("a count", 12.3, "ns", None)];
        let notes = vec!["A note".to_owned()];
        Table { title: "puts", device: "virtual", gpus: None, ranks: 2, notes, rows }
    }

    #[test]
    fn a_figure_stands_beside_its_floors_with_ratio_goal_and_whether_it_is_met() {
        let mut out = Vec::new();
        print(&table(), false, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "puts: 2 ranks, virtual");
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(
            words(lines[2]),
            "a put 3.300 us yes bare 3.000 us 1.100 at most 1.1, stretch at most 1 yes, no",
            "{text}"
        );
        assert_eq!(words(lines[3]), "relaxed 1.500 us 2.200");
        assert_eq!(words(lines[4]), "a loss 120 GB/s NO (7 wrong)");
        assert_eq!(words(lines[5]), "a count 12.3 ns -");
        assert_eq!(lines[6], "A note.");
    }

    #[test]
    fn json_is_one_object_with_all_figures() {
        let mut out = Vec::new();
        print(&table(), true, &mut out).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&out).unwrap();
        let put = &value["rows"][0];
        assert_eq!((&put["value"], &put["unit"], &put["wrong"]), (&3.3.into(), &"us".into(), &0.into()));
        assert_eq!(put["beside"][0]["goals"][1]["met"], false);
        assert_eq!(put["beside"][1]["value"], 1.5);
        assert!(put["beside"][1]["ratio"].as_f64().is_some_and(|ratio| (ratio - 2.2).abs() < 1e-9), "{put}");
        assert_eq!(value["rows"][1]["wrong"], 7);
    }

    #[test]
    fn a_goal_counts_from_the_side_that_it_names() {
        assert!(Goal::AtMost(1.1).is_met(1.1) && !Goal::AtMost(1.1).is_met(1.11));
        assert!(Goal::AtLeast(0.98).is_met(0.98) && !Goal::AtLeast(0.98).is_met(0.97));
        assert!(!Row::new("", 1.0, "us", Some(1)).is_right() && Row::new("", 1.0, "us", None).is_right());
    }
}
