// SPDX-License-Identifier: MIT OR Apache-2.0
//! The comparison with an earlier run.

use super::figure::Figure;
use super::table::{Compared, Table};
use crate::Failure;
use serde::Deserialize;
use std::fs;
use std::path::Path;

/// The figures of an earlier run, as `gin bench --format json` printed them.
#[derive(Clone, PartialEq, Debug)]
pub struct Earlier {
    /// Name of the file.
    name: String,
    tables: Vec<EarlierTable>,
}

#[derive(Clone, PartialEq, Debug, Deserialize)]
struct EarlierTable {
    title: String,
    device: String,
    gpus: Option<String>,
    ranks: u32,
    #[serde(default)]
    processes: bool,
    rows: Vec<EarlierRow>,
}

#[derive(Clone, PartialEq, Debug, Deserialize)]
struct EarlierRow {
    what: String,
    unit: String,
    #[serde(flatten)]
    figure: Figure,
}

impl Earlier {
    /// Reads a file that the output of `gin bench --format json` was written to, for a run on `device`, `cuda` or
    /// `virtual`.
    ///
    /// # Errors
    /// Returns a text that names the file, the line and the reason, and the command that writes such a file. Refuses
    /// figures of the other kind of device.
    pub fn read(path: &Path, device: &str) -> Result<Self, Failure> {
        let name = path.display().to_string();
        let text = fs::read_to_string(path).map_err(|error| format!("cannot read {name}: {error}"))?;
        let earlier = Self::parse(&name, &text)?;
        earlier.check(device)?;
        Ok(earlier)
    }

    fn parse(name: &str, text: &str) -> Result<Self, String> {
        let advice = "write such a file by `gin bench --format json >FILE`";
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let tables = lines.map(|(number, line)| {
            serde_json::from_str(line)
                .map_err(|error| format!("{name}: line {} is no table of `gin bench`: {error}; {advice}", number + 1))
        });
        let tables = tables.collect::<Result<Vec<_>, _>>()?;
        if tables.is_empty() {
            return Err(format!("{name} holds no table; {advice}"));
        }
        Ok(Self { name: name.to_owned(), tables })
    }

    /// Refuses figures of another kind of device than `device`.
    fn check(&self, device: &str) -> Result<(), String> {
        match self.tables.iter().find(|table| table.device != device) {
            Some(table) => {
                let (name, other) = (&self.name, &table.device);
                Err(format!(
                    "{name} has figures of --device {other}, and this run is on {device}: use --device {other}"
                ))
            }
            None => Ok(()),
        }
    }

    /// Adds the comparison to each row that the earlier run has too, and a note if that was on other GPUs.
    pub(crate) fn add_to(&self, table: &mut Table) {
        let same = |old: &&EarlierTable| {
            (&old.title, old.ranks, old.processes) == (&table.title, table.ranks, table.processes)
        };
        let Some(old) = self.tables.iter().find(same) else { return };
        if old.gpus != table.gpus {
            let gpus = old.gpus.as_deref().unwrap_or("unnamed GPUs");
            table.notes.push(format!("{} has figures of {gpus}", self.name));
        }
        for row in &mut table.rows {
            let old = old.rows.iter().find(|old| old.what == row.what && old.unit == row.unit);
            row.compared = old.map(|EarlierRow { figure: old, .. }| Compared {
                old: old.value,
                ratio: row.figure.value / old.value,
                differs: row.figure.differs(old),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::print::{Form, Printer};
    use crate::table::Row;

    fn table(value: f64) -> Table {
        let row = |what: &str, repeats: &[f64]| Row::new(what, Figure::new(repeats, None), "us");
        let rows = vec![row("a put", &[value * 0.98, value, value * 1.02]), row("a get", &[value])];
        let (title, gpus) = ("puts".to_owned(), Some("2 x GPU".to_owned()));
        Table { title, device: "cuda", gpus, ranks: 2, processes: false, notes: Vec::new(), rows }
    }

    fn earlier(table: &Table) -> Earlier {
        let mut out = Vec::new();
        Printer::new(Form::Json, false, &mut out).table(table).unwrap();
        Earlier::parse("old", std::str::from_utf8(&out).unwrap()).unwrap()
    }

    #[test]
    fn a_run_is_compared_with_its_own_earlier_output() {
        let differs = |factor: f64| {
            let mut now = table(10.0 * factor);
            earlier(&table(10.0)).add_to(&mut now);
            let compared = now.rows[0].compared.unwrap();
            assert!((compared.old, compared.ratio) == (10.0, factor) && now.notes.is_empty());
            // One repeat says nothing of the noise.
            assert_eq!(now.rows[1].compared.unwrap().differs, None);
            compared.differs
        };
        // The noise is 2 % of each figure.
        assert_eq!(
            (differs(1.0), differs(1.03), differs(1.05), differs(0.95)),
            (Some(false), Some(false), Some(true), Some(true))
        );
    }

    #[test]
    fn rows_of_other_names_units_and_ranks_are_not_compared() {
        let old = earlier(&table(10.0));
        let changes: [fn(&mut Table); 4] = [
            |table| table.rows[0].what.push('s'),
            |table| table.rows[0].unit = "ns",
            |table| table.ranks = 3,
            |table| table.title.push('s'),
        ];
        for change in changes {
            let mut now = table(10.0);
            change(&mut now);
            old.add_to(&mut now);
            assert_eq!(now.rows[0].compared, None);
        }
        let mut elsewhere = Table { gpus: Some("1 x GPU".to_owned()), ..table(10.0) };
        old.add_to(&mut elsewhere);
        assert_eq!(elsewhere.notes, ["old has figures of 2 x GPU"]);
    }

    #[test]
    fn files_that_are_no_output_of_the_benchmark_are_refused_with_line_and_reason() {
        let refused = |text: &str| Earlier::parse("old.json", text).unwrap_err();
        assert!(refused(" \n").contains("old.json holds no table"));
        let text = refused("{\"ranks\": 2}\n");
        assert!(
            text.contains("line 1") && text.contains("`title`") && text.contains("gin bench --format json"),
            "{text}"
        );
        let mut out = Vec::new();
        Printer::new(Form::Json, false, &mut out).table(&table(1.0)).unwrap();
        let whole = String::from_utf8(out).unwrap();
        let text = refused(&format!("{whole}\n{}", &whole[..whole.len() / 2]));
        assert!(text.contains("line 3") && text.contains("EOF"), "{text}");
        let text = Earlier::read(Path::new("/no/such/file"), "cuda").unwrap_err().to_string();
        assert!(text.contains("cannot read /no/such/file"), "{text}");
        let text = earlier(&table(1.0)).check("virtual").unwrap_err();
        assert!(text.contains("--device cuda") && text.contains("virtual"), "{text}");
        earlier(&table(1.0)).check("cuda").unwrap();
    }
}
