// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs examples: `gin-examples NAME [RANKS]`, or `gin-examples all`.
//!
//! The exit status is 0 if the results were right, 77 if an example could not run here, else 1.

use gin_examples::{ALL, Example, PTX, Skipped, loaded};
use gin_host::launch::WorldConfig;
use std::error::Error;
use std::process::ExitCode;

const USAGE: &str = "usage: gin-examples NAME [RANKS], or gin-examples all";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let ranks = arguments.get(1).map(|text| text.parse::<u32>());
    let chosen: Vec<Example> = match arguments.first().map(String::as_str) {
        Some("all") => ALL.to_vec(),
        Some(name) => ALL.into_iter().filter(|example| example.name == name).collect(),
        None => Vec::new(),
    };
    if chosen.is_empty() || arguments.len() > 2 || matches!(ranks, Some(Err(_))) {
        eprintln!("{USAGE}");
        ALL.iter().for_each(|example| eprintln!("  {:16} {}", example.name, example.about));
        return ExitCode::from(2);
    }
    let ranks = ranks.and_then(Result::ok);
    chosen
        .iter()
        .map(|example| report(example, ranks))
        .max_by_key(|(severity, _)| *severity)
        .map_or(ExitCode::FAILURE, |(_, code)| code)
}

/// Runs an example and prints its result. Returns how bad it is, and the exit status.
fn report(example: &Example, ranks: Option<u32>) -> (u8, ExitCode) {
    match run(example, ranks) {
        Ok(text) => {
            println!("{}: ok: {text}", example.name);
            (0, ExitCode::SUCCESS)
        }
        Err(error) if error.is::<Skipped>() => {
            println!("{}: skipped: {error}", example.name);
            (1, ExitCode::from(77))
        }
        Err(error) => {
            eprintln!("{}: failed: {error}", example.name);
            (2, ExitCode::FAILURE)
        }
    }
}

fn run(example: &Example, ranks: Option<u32>) -> Result<String, Box<dyn Error>> {
    // The GPUs of this machine, or virtual GPUs if it has none.
    let config = loaded(WorldConfig::auto(ranks.unwrap_or(example.ranks[0]), &[PTX])?)?;
    let devices = config.choice.clone();
    let text = (example.run)(config)?;
    // These two choose devices by themselves.
    Ok(if matches!(example.name, "processes" | "seeds") { text } else { format!("{text} (on {devices})") })
}
