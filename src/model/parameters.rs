// SPDX-License-Identifier: MIT OR Apache-2.0
//! The parameters of the model: a JSON file of figures, each with its source.

use super::engine::Ps;
use crate::cli::Refused;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;

/// A figure and its origin.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Figure {
    pub(super) value: f64,
    /// The measurement, the machine and the date; or that the value is assumed.
    pub(super) source: String,
}

macro_rules! parameters {
    ($($(#[doc = $doc:literal])* $name:ident,)*) => {
        /// The parameters: times in nanoseconds, rates in GB/s (10^9 bytes a second).
        #[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub(super) struct Parameters {
            $($(#[doc = $doc])* pub(super) $name: Figure,)*
        }

        impl Parameters {
            /// Returns all figures by name, in the order of the file.
            pub(super) fn all(&self) -> Vec<(&'static str, &Figure)> {
                vec![$((stringify!($name), &self.$name)),*]
            }

            /// Returns the figure of a name.
            fn named(&mut self, name: &str) -> Option<&mut Figure> {
                match name {
                    $(stringify!($name) => Some(&mut self.$name),)*
                    _ => None,
                }
            }
        }
    };
}

parameters! {
    /// A small put with a signal to a peer of the LSA team.
    lsa_put_ns,
    /// The rate of the links of a GPU, in each direction.
    nvlink_gb_s,
    /// The issue of a put over the proxy, by one thread.
    proxy_issue_ns,
    /// The time of the progress thread for one put.
    proxy_put_ns,
    /// The rest of the way over the proxy: queue, polls, signal.
    proxy_latency_ns,
    /// The issue of a put by GDAKI, by one thread.
    gdaki_issue_ns,
    /// The time of such a put if all blocks post.
    gdaki_grid_issue_ns,
    /// The time of the progress thread for one put over the network of copies that shares no call with others.
    copy_put_ns,
    /// The rate of a copy between two GPUs.
    copy_gb_s,
    /// The rate of a NIC, in each direction.
    nic_gb_s,
    /// The time of a NIC for a message without bytes.
    nic_message_ns,
    /// The time from NIC to NIC.
    network_latency_ns,
    /// The additional time between NICs of different rails.
    spine_latency_ns,
    /// The time of an all-to-all without its puts.
    alltoall_base_ns,
    /// The same over the network of copies.
    alltoall_copies_base_ns,
    /// The rate at which the workload all-to-all makes and checks bytes.
    alltoall_check_gb_s,
    /// The time of a dispatch without its puts and bytes.
    dispatch_base_ns,
    /// The same of a combine.
    combine_base_ns,
}

/// The parameters of gin's own measurements.
pub(super) const DEFAULTS: &str = include_str!("parameters.json");

impl Parameters {
    /// Reads a file.
    ///
    /// # Errors
    /// Refuses a file that cannot be read, with the reason; an unknown or missing field, and a value that is not a
    /// positive number, with line and field.
    pub(super) fn read(path: &Path) -> Result<Self, Refused> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|error| Refused(format!("--parameters: {name}: {error}")))?;
        Self::parse(&name, &text)
    }

    /// Reads the text of a file.
    pub(super) fn parse(name: &str, text: &str) -> Result<Self, Refused> {
        let refused = |line: usize, reason: String| Refused(format!("--parameters: {name}, line {line}: {reason}"));
        let parsed: Self = serde_json::from_str(text).map_err(|error| {
            let reason = error.to_string();
            let reason = reason.split(" at line ").next().unwrap_or_default();
            refused(error.line(), format!("{reason}; `gin model --print-parameters` prints a file to begin with"))
        })?;
        for (field, Figure { value, .. }) in parsed.all() {
            if !(value.is_finite() && *value > 0.0) {
                let quoted = format!("\"{field}\"");
                let line = text.lines().position(|line| line.contains(&quoted)).map_or(1, |index| index + 1);
                return Err(refused(line, format!("{field} is {value}; it must be more than 0")));
            }
        }
        Ok(parsed)
    }

    /// Replaces figures by measured ones: the output of `gin bench --format json`. Returns the names of the replaced
    /// ones.
    ///
    /// # Errors
    /// Refuses a file that cannot be read, a line that is no table of `gin bench`, and a file without any such figure.
    pub(super) fn take_bench(&mut self, path: &Path) -> Result<Vec<&'static str>, Refused> {
        let name = path.display();
        let text = std::fs::read_to_string(path).map_err(|error| Refused(format!("--bench: {name}: {error}")))?;
        let mut replaced = Vec::new();
        for (line, table) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
            let table: Value = serde_json::from_str(table).map_err(|error| {
                Refused(format!("--bench: {name}, line {line}: {error}; give the output of gin bench --format json"))
            })?;
            for (parameter, what, factor) in BENCH {
                let rows = table["rows"].as_array().map(Vec::as_slice).unwrap_or_default();
                let row = rows.iter().find(|row| row["what"] == *what);
                let Some(value) = row.and_then(|row| row["value"].as_f64()) else { continue };
                let refused = |reason| Refused(format!("--bench: {name}, line {line}: {reason}"));
                let Some(gpus) = table["gpus"].as_str() else {
                    return Err(refused("times of virtual GPUs mean nothing; measure on GPUs".to_owned()));
                };
                if value <= 0.0 {
                    return Err(refused(format!("`{what}` is {value}; it must be more than 0")));
                }
                let source = format!("gin bench: {what}, {gpus}, {name}");
                if let Some(figure) = self.named(parameter) {
                    *figure = Figure { value: value * factor, source };
                    replaced.push(*parameter);
                }
            }
        }
        if replaced.contains(&"proxy_latency_ns") {
            // The rest of the way.
            let own = self.proxy_issue_ns.value + self.proxy_put_ns.value;
            let rest = self.proxy_latency_ns.value - own;
            if rest <= 0.0 {
                let trip = self.proxy_latency_ns.value;
                return Err(Refused(format!(
                    "--bench: {name}: half a round trip over the proxy is {trip} ns, but proxy_issue_ns and proxy_put_ns \
                     are {own} ns; give figures of one machine, or set them by --parameters"
                )));
            }
            self.proxy_latency_ns.value = rest;
        }
        if replaced.is_empty() {
            let rows: Vec<_> = BENCH.iter().map(|(_, what, _)| format!("`{what}`")).collect();
            return Err(Refused(format!("--bench: {name} has none of the rows {}", rows.join(", "))));
        }
        Ok(replaced)
    }
}

/// Rows of `gin bench` that are parameters: the parameter, the row, and the factor.
const BENCH: &[(&str, &str, f64)] = &[
    ("lsa_put_ns", "put of 64B with signal and back, a thread", 1e3 / 2.0),
    ("nvlink_gb_s", "put of 256MiB, both ways at once", 0.5),
    ("proxy_put_ns", "put of 1KiB, CPU time of the progress thread", 1.0),
    ("proxy_latency_ns", "put_value with signal and back, GPU memory", 1e3 / 2.0),
];

/// Returns nanoseconds as picoseconds.
pub(super) fn ps(ns: f64) -> Ps {
    (ns * 1e3).round() as Ps
}

/// Returns the time of bytes at a rate in GB/s.
pub(super) fn transfer(bytes: f64, rate: &Figure) -> Ps {
    ps(bytes / rate.value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid_and_each_figure_has_a_source() {
        let parameters = Parameters::parse("defaults", DEFAULTS).unwrap();
        for (name, figure) in parameters.all() {
            assert!(figure.source.len() > 10, "{name}");
        }
        // The command reads the parameters that it prints.
        let printed = serde_json::to_string_pretty(&parameters).unwrap();
        assert_eq!(Parameters::parse("printed", &printed).unwrap(), parameters);
    }

    #[test]
    fn a_bad_file_is_refused_with_line_and_field() {
        let refused = |text: &str| Parameters::parse("x.json", text).unwrap_err().0;
        let text = refused(&DEFAULTS.replace("\"value\": 365", "\"value\": -1"));
        assert!(text.contains("x.json, line 3: nvlink_gb_s is -1; it must be more than 0"), "{text}");
        let text = refused(&DEFAULTS.replace("\"value\": 50,", "\"value\": 0,"));
        assert!(text.contains("line 11: nic_gb_s is 0"), "{text}");
        let text = refused(&DEFAULTS.replace("nic_message_ns", "nic_massage_ns"));
        assert!(text.contains("line 12") && text.contains("unknown field `nic_massage_ns`"), "{text}");
        let text = refused(&DEFAULTS.replace("\"value\": 533", "\"value\": \"fast\""));
        assert!(text.contains("line 4") && text.contains("expected f64"), "{text}");
        let missing: String = DEFAULTS.lines().filter(|line| !line.contains("copy_gb_s")).collect();
        assert!(refused(&missing).contains("missing field `copy_gb_s`"));
        assert!(refused("{").contains("line 1"));
        let text = Parameters::read(Path::new("/no/such/file.json")).unwrap_err().0;
        assert!(text.contains("/no/such/file.json"), "{text}");
    }

    #[test]
    fn figures_of_a_bench_replace_parameters_and_a_file_without_any_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bench.json");
        let rows = r#"[{"what":"put of 256MiB, both ways at once","value":800.0},{"what":"other","value":1.0}]"#;
        std::fs::write(&path, format!(r#"{{"title":"t","gpus":"2 x GPU","rows":{rows}}}"#)).unwrap();
        let mut parameters = Parameters::parse("defaults", DEFAULTS).unwrap();
        assert_eq!(parameters.take_bench(&path).unwrap(), ["nvlink_gb_s"]);
        assert_eq!(parameters.nvlink_gb_s.value, 400.0);
        assert!(parameters.nvlink_gb_s.source.contains("2 x GPU"));
        // Half a round trip, less the issue and the progress thread.
        let trip = r#"{"gpus":"2 x GPU","rows":[{"what":"put_value with signal and back, GPU memory","value":10.0}]}"#;
        std::fs::write(&path, trip).unwrap();
        assert_eq!(parameters.take_bench(&path).unwrap(), ["proxy_latency_ns"]);
        assert_eq!(parameters.proxy_latency_ns.value, 5000.0 - 533.0 - 942.0);
        let other = |from: &str, to: &str| trip.replace(from, to);
        for (text, reason) in [
            ("{}".to_owned(), "none of the rows"),
            ("no table".to_owned(), "line 1"),
            (other(r#""gpus":"2 x GPU""#, r#""gpus":null"#), "virtual GPUs"),
            (other("10.0", "0"), "more than 0"),
            (other("10.0", "2.5"), "1250 ns"),
        ] {
            std::fs::write(&path, text).unwrap();
            let text = parameters.take_bench(&path).unwrap_err().0;
            assert!(text.contains(reason), "{text}");
        }
    }
}
