// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tables as text and as JSON.

use super::table::{Kind, Row, Table};
use std::io::{self, Write};

/// The form of printed tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// The main rows: each figure, its floor and its ratios, in at most [`COLUMNS`] columns.
    Short,
    /// All rows with everything that is known of them.
    All,
    /// One JSON object for each table, with all of it.
    Json,
}

/// Largest width of the short table.
pub const COLUMNS: usize = 100;

/// Width of the names of rows in the short table.
const NAME: usize = 46;

/// Prints tables as they are measured.
pub(crate) struct Printer<'a, W: Write> {
    form: Form,
    compares: bool,
    out: &'a mut W,
    begun: bool,
    /// Notes of the tables so far, each once.
    notes: Vec<String>,
    /// Number of printed figures that were compared, and number of figures that differ.
    compared: [u64; 2],
}

/// Formats a number with a suitable number of digits.
fn number(value: f64) -> String {
    match value.abs() {
        large if large >= 100.0 => format!("{value:.0}"),
        middle if middle >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.3}"),
    }
}

fn percent(fraction: Option<f64>) -> String {
    fraction.map_or("-".into(), |fraction| format!("{:.1}%", fraction * 100.0))
}

fn ratio(ratio: Option<f64>) -> String {
    ratio.map_or("-".into(), number)
}

fn checked(row: &Row) -> String {
    match row.figure.wrong {
        None => "-".into(),
        Some(0) => "yes".into(),
        Some(wrong) => format!("NO ({wrong} wrong)"),
    }
}

pub(crate) fn subject(table: &Table) -> String {
    let gpus = table.gpus.as_ref().map_or(String::new(), |gpus| format!(" on {gpus}"));
    let what = if table.processes { "process" } else { "rank" };
    let ranks = match (table.ranks, what) {
        (1, what) => format!("1 {what}"),
        (ranks, "rank") => format!("{ranks} ranks"),
        (ranks, _) => format!("{ranks} processes"),
    };
    format!("{}: {ranks}, {}{gpus}", table.title, table.device)
}

/// Returns what became of a row's goals: nothing, `met`, or the word for a miss. A stretch goal that is missed is none.
fn goal(row: &Row) -> &'static str {
    let mut musts = row.beside.iter().flat_map(|beside| &beside.goals).filter(|goal| !goal.stretch).peekable();
    match (musts.peek().is_some(), musts.all(|goal| goal.met)) {
        (false, _) => "",
        (true, true) => "met",
        (true, false) => "missed",
    }
}

const HEADINGS: [&str; 12] = [
    "what",
    "measured",
    "noise",
    "p50",
    "p99",
    "median thread",
    "checked",
    "beside",
    "its figure",
    "ratio",
    "goal",
    "met",
];

/// Returns the lines of a row with everything that is known of it.
fn lines(row: &Row) -> Vec<[String; 12]> {
    let with = |what: &str, detail: &Option<String>| match detail {
        Some(detail) => format!("{what}: {detail}"),
        None => what.to_owned(),
    };
    let maybe = |value: Option<f64>| value.map_or("-".into(), number);
    let figure = &row.figure;
    let own = [
        with(&row.what, &row.detail),
        format!("{} {}", number(figure.value), row.unit).trim_end().to_owned(),
        percent(figure.relative_noise()),
        maybe(figure.p50),
        maybe(figure.p99),
        maybe(figure.median_thread),
        checked(row),
    ];
    let mut lines: Vec<[String; 12]> = Vec::new();
    for beside in &row.beside {
        let goals: Vec<String> = beside
            .goals
            .iter()
            .map(|goal| format!("{}{}", if goal.stretch { "stretch " } else { "" }, goal.goal))
            .collect();
        let met: Vec<&str> = beside.goals.iter().map(|goal| if goal.met { "yes" } else { "no" }).collect();
        let [what, value, noise, p50, p99, thread, checked] =
            if lines.is_empty() { own.clone() } else { Default::default() };
        lines.push([
            what,
            value,
            noise,
            p50,
            p99,
            thread,
            checked,
            with(&beside.what, &beside.detail),
            format!("{} {}", number(beside.value), row.unit),
            format!("{:.3}", beside.ratio),
            goals.join(", "),
            met.join(", "),
        ]);
    }
    if lines.is_empty() {
        let mut line: [String; 12] = Default::default();
        line[..own.len()].clone_from_slice(&own);
        lines.push(line);
    }
    lines
}

impl<'a, W: Write> Printer<'a, W> {
    /// Prepares the output. With `compares`, text compares with the earlier run instead of with floors.
    pub(crate) fn new(form: Form, compares: bool, out: &'a mut W) -> Self {
        Self { form, compares, out, begun: false, notes: Vec::new(), compared: [0; 2] }
    }

    /// Prints a table.
    ///
    /// # Errors
    /// Returns the error of the writer, as all functions here do.
    pub(crate) fn table(&mut self, table: &Table) -> io::Result<()> {
        match self.form {
            Form::Json => {
                serde_json::to_writer(&mut *self.out, table)?;
                writeln!(self.out)?;
            }
            Form::Short => self.rows(table, |row| row.main || !row.is_right())?,
            Form::All if self.compares => self.rows(table, |_| true)?,
            Form::All => self.everything(table)?,
        }
        self.out.flush()
    }

    /// Adds notes to the end of text.
    pub(crate) fn notes(&mut self, notes: impl IntoIterator<Item = String>) {
        self.notes.extend(notes);
    }

    /// Prints the end of the output.
    pub(crate) fn end(&mut self) -> io::Result<()> {
        if self.form != Form::Json {
            if self.compares {
                let [all, differ] = self.compared;
                writeln!(self.out, "{differ} of {all} figures differ by more than the noise.")?;
            }
            for note in &self.notes {
                writeln!(self.out, "{note}.")?;
            }
        }
        self.out.flush()
    }

    /// Prints one line for each of the chosen rows.
    fn rows(&mut self, table: &Table, chosen: impl Fn(&Row) -> bool) -> io::Result<()> {
        let rows: Vec<&Row> = table.rows.iter().filter(|row| chosen(row)).collect();
        if rows.is_empty() {
            return Ok(());
        }
        for note in &table.notes {
            if !self.notes.contains(note) {
                self.notes.push(note.clone());
            }
        }
        if !self.begun {
            self.begun = true;
            match self.compares {
                true => self.line(["", "earlier", "now", "ratio", "noise", "differs"])?,
                false => self.line(["", "gin", "noise", "floor", "ratio", "/ NCCL", "goal"])?,
            }
        }
        let heading = subject(table);
        // Long names of GPUs are not repeated by each table.
        let short = heading.split(" on ").next().filter(|_| heading.len() > COLUMNS);
        writeln!(self.out, "{}", short.unwrap_or(&heading))?;
        for row in rows {
            let (name, unit) = (format!("  {}", row.what), row.unit);
            let value = format!("{} {unit}", number(row.figure.value)).trim_end().to_owned();
            let noise = percent(row.figure.relative_noise());
            if self.compares {
                let old = row.compared.map_or("-".into(), |compared| format!("{} {unit}", number(compared.old)));
                let differs = match row.compared.map(|compared| compared.differs) {
                    None => "not in file",
                    Some(None) => "unknown",
                    Some(Some(true)) => "yes",
                    Some(Some(false)) => "no",
                };
                self.compared[0] += u64::from(row.compared.is_some());
                self.compared[1] += u64::from(differs == "yes");
                let ratio = ratio(row.compared.map(|compared| compared.ratio));
                self.line([&name, &old, &value, &ratio, &noise, differs])?;
                continue;
            }
            let floor = row.first(Kind::Floor);
            let nccl = ratio(row.first(Kind::Nccl).map(|nccl| nccl.ratio));
            let last = if row.is_right() { goal(row) } else { "WRONG" };
            let beside = floor.map_or("-".into(), |floor| format!("{} {unit}", number(floor.value)));
            self.line([&name, &value, &noise, &beside, &ratio(floor.map(|floor| floor.ratio)), &nccl, last])?;
        }
        Ok(())
    }

    /// Prints a line of the short table.
    fn line<const CELLS: usize>(&mut self, cells: [&str; CELLS]) -> io::Result<()> {
        let widths: [usize; 7] = if self.compares { [NAME, 11, 11, 6, 6, 0, 0] } else { [NAME, 11, 6, 11, 6, 6, 0] };
        let mut line = String::new();
        for (index, (cell, width)) in cells.into_iter().zip(widths).enumerate() {
            match index {
                0 => line = format!("{cell:width$}"),
                last if last + 1 == CELLS => line = format!("{line}  {cell}"),
                _ => line = format!("{line} {cell:>width$}"),
            }
        }
        writeln!(self.out, "{}", line.trim_end())
    }

    /// Prints all rows with everything that is known of them.
    fn everything(&mut self, table: &Table) -> io::Result<()> {
        writeln!(self.out, "{}", subject(table))?;
        let rows: Vec<[String; 12]> = table.rows.iter().flat_map(lines).collect();
        let width =
            |column: usize| rows.iter().map(|row| row[column].len()).chain([HEADINGS[column].len()]).max().unwrap_or(0);
        let widths: Vec<usize> = (0..HEADINGS.len()).map(width).collect();
        for row in [HEADINGS.map(String::from)].iter().chain(&rows) {
            let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
            writeln!(self.out, "  {}", cells.join("  ").trim_end())?;
        }
        for note in &table.notes {
            writeln!(self.out, "{note}.")?;
        }
        writeln!(self.out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figure::Figure;
    use crate::table::{Compared, Goal};

    fn table() -> Table {
        let figure = |value: f64, wrong| Figure::new(&[value * 0.99, value, value * 1.01], wrong);
        let met = Row::new("a put", figure(3.3, Some(0)).with_operations(&[3.0, 4.0]), "us")
            .main(true)
            .beside(Kind::Floor, "bare", figure(3.0, None), Some(Goal::AtMost(1.1)), Some(Goal::AtMost(1.0)))
            .by("4 threads")
            .beside(Kind::Nccl, "NCCL", figure(6.6, None), None, None)
            .beside(Kind::Other, "relaxed", figure(1.5, None), None, None);
        let loss = Row::new("a loss", figure(120.0, Some(7)), "GB/s");
        let count = Row::new("a count", Figure::new(&[12.3], None), "ns").detail("8 threads".to_owned());
        let notes = vec!["A note".to_owned()];
        let rows = vec![met, loss, count];
        Table { title: "puts".to_owned(), device: "virtual", gpus: None, ranks: 2, processes: false, notes, rows }
    }

    fn printed(table: &Table, form: Form, compares: bool) -> String {
        let mut out = Vec::new();
        let mut printer = Printer::new(form, compares, &mut out);
        printer.table(table).unwrap();
        printer.end().unwrap();
        String::from_utf8(out).unwrap()
    }

    /// Returns the lines with one space between words.
    fn words(text: &str) -> Vec<String> {
        text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
    }

    #[test]
    fn all_of_a_figure_stands_beside_its_floors_with_ratio_goal_and_whether_it_is_met() {
        let lines = words(&printed(&table(), Form::All, false));
        assert_eq!(lines[0], "puts: 2 ranks, virtual");
        let put = "a put 3.300 us 1.0% 4.000 4.000 - yes bare: 4 threads 3.000 us 1.100 at most 1.1, stretch at most 1 yes, no";
        assert_eq!(lines[2], put);
        assert_eq!(lines[4], "relaxed 1.500 us 2.200");
        assert_eq!(lines[5], "a loss 120 GB/s 1.0% - - - NO (7 wrong)");
        assert_eq!(lines[6], "a count: 8 threads 12.3 ns - - - - -");
        assert_eq!(lines[7], "A note.");
    }

    #[test]
    fn the_short_table_has_main_rows_and_wrong_ones_in_a_hundred_columns() {
        let text = printed(&table(), Form::Short, false);
        let lines = words(&text);
        assert_eq!(lines[2], "a put 3.300 us 1.0% 3.000 us 1.100 0.500 met");
        assert_eq!(lines[3], "a loss 120 GB/s 1.0% - - - WRONG");
        assert_eq!(lines[4..], ["A note."]);
        assert!(text.lines().all(|line| line.len() <= COLUMNS), "{text}");
        let long = Table { gpus: Some("2 x GPU with a long name ".repeat(5)), ..table() };
        assert!(printed(&long, Form::Short, false).lines().all(|line| line.len() <= COLUMNS));
    }

    #[test]
    fn a_comparison_says_for_each_row_whether_it_differs() {
        let mut table = table();
        table.rows[0].compared = Some(Compared { old: 3.0, ratio: 1.1, differs: Some(true) });
        table.rows[1].compared = Some(Compared { old: 121.0, ratio: 0.99, differs: Some(false) });
        table.rows.push(table.rows[0].clone());
        table.rows[3].compared = Some(Compared { old: 3.0, ratio: 1.1, differs: None });
        let text = printed(&table, Form::All, true);
        let lines = words(&text);
        assert_eq!(lines[2], "a put 3.000 us 3.300 us 1.100 1.0% yes");
        assert_eq!(lines[3], "a loss 121 GB/s 120 GB/s 0.990 1.0% no");
        assert_eq!(lines[4], "a count - 12.3 ns - - not in file");
        assert_eq!(lines[5], "a put 3.000 us 3.300 us 1.100 1.0% unknown");
        assert_eq!(lines[6..], ["1 of 3 figures differ by more than the noise.", "A note."]);
        assert!(text.lines().all(|line| line.len() <= COLUMNS), "{text}");
    }

    #[test]
    fn json_is_one_object_with_all_figures() {
        let value: serde_json::Value = serde_json::from_str(&printed(&table(), Form::Json, false)).unwrap();
        let put = &value["rows"][0];
        assert_eq!((&put["value"], &put["unit"], &put["wrong"]), (&3.3.into(), &"us".into(), &0.into()));
        assert!(put["noise"].as_f64().is_some_and(|noise| (noise - 0.033).abs() < 1e-9), "{put}");
        assert_eq!((&put["repeats"], &put["p99"]), (&3.into(), &4.0.into()));
        assert_eq!(put["beside"][0]["goals"][1]["met"], false);
        assert_eq!((&put["beside"][1]["kind"], &put["beside"][2]["value"]), (&"nccl".into(), &1.5.into()));
        assert!(put["beside"][2]["ratio"].as_f64().is_some_and(|ratio| (ratio - 2.2).abs() < 1e-9), "{put}");
        assert_eq!(value["rows"][1]["wrong"], 7);
    }
}
