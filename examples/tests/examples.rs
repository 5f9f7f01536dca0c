// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every example gives the right result: on virtual GPUs in several schedules, also over a network that delays,
//! reorders and withholds; on the GPUs of this machine; and as processes. A trial that lacks its device or program is
//! ignored, with the reason.

use gin_examples::{ALL, Example, PTX, Skipped, loaded};
use gin_host::launch::WorldConfig;
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::error::Error;
use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;
use std::process::{Command, ExitCode, Output};
use std::sync::{Mutex, PoisonError};

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let mut trials = Vec::new();
    for example in ALL {
        for &ranks in example.ranks {
            add(&mut trials, example, ranks);
        }
    }
    // Without a GPU, one trial stands for all. GPUs that cannot be used are an error.
    match WorldConfig::auto(2, &[PTX]) {
        Ok(config) if config.devices.is_none() => {
            let reason = config.choice;
            trials.push(Trial::ignorable_test("gpu/all_examples", || Ok(Completion::ignored_with(reason))));
        }
        _ => ALL.iter().for_each(|example| add_on_gpus(&mut trials, *example)),
    }
    let mut own = |name: &str, body: fn() -> Result<Completion, Failed>| {
        trials.push(Trial::ignorable_test(name, body));
    };
    own("processes_of_gin_launch_gather_the_parts_of_all", processes);
    own("an_example_that_cannot_run_is_skipped_and_has_not_passed", skipped);
    own("the_command_lists_all_examples_and_refuses_others", usage);
    own("each_example_has_a_picture_and_is_short", pictures);
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// Seeds of each trial in a seeded world.
const SEEDS: RangeInclusive<u64> = 1..=5;

/// Adds the trials of an example with this number of ranks on virtual GPUs.
fn add(trials: &mut Vec<Trial>, example: Example, ranks: u32) {
    // These two have no virtual GPUs in this process.
    if !matches!(example.name, "processes" | "own_stream") {
        let seeded = |ranks, seed| Ok(WorldConfig::seeded(ranks, seed));
        let worst = |ranks, seed| Ok(WorldConfig::seeded(ranks, seed).worst_network());
        let threads = |ranks, _| Ok(WorldConfig::threads(ranks));
        trials.push(trial("seeded", example, ranks, SEEDS, seeded));
        trials.push(trial("seeded_worst_network", example, ranks, SEEDS, worst));
        trials.push(trial("threads", example, ranks, 0..=0, threads));
    }
}

/// Locked by the trial that uses the GPUs. The driver loads kernels only when no kernel runs, and starts none before.
/// So if trials ran concurrently, kernels would wait for others that cannot start, until their deadlines.
static GPUS: Mutex<()> = Mutex::new(());

/// Adds the trials of an example on the GPUs of this machine.
fn add_on_gpus(trials: &mut Vec<Trial>, example: Example) {
    if !matches!(example.name, "processes" | "seeds") {
        let on_gpus = |ranks, _| Ok(loaded(WorldConfig::auto(ranks, &[PTX])?)?);
        trials.extend(example.ranks.iter().map(|&ranks| trial("gpu", example, ranks, 0..=0, on_gpus)));
    }
}

/// Returns a trial that runs an example once for each seed.
fn trial(
    way: &str,
    example: Example,
    ranks: u32,
    seeds: RangeInclusive<u64>,
    config: fn(u32, u64) -> Result<WorldConfig, Box<dyn Error>>,
) -> Trial {
    let on_gpus = way == "gpu";
    Trial::ignorable_test(format!("{way}/{}_{ranks}", example.name), move || {
        let _gpus = on_gpus.then(|| GPUS.lock().unwrap_or_else(PoisonError::into_inner));
        for seed in seeds {
            match config(ranks, seed).and_then(|config| (example.run)(config)) {
                Ok(_) => {}
                Err(error) if error.is::<Skipped>() => return Ok(Completion::ignored_with(error.to_string())),
                Err(error) => return Err(format!("seed {seed}: {error}").into()),
            }
        }
        Ok(Completion::Completed)
    })
}

/// Runs the command of the examples without a launcher's variables.
fn command(arguments: &[&str]) -> Output {
    let variables = std::env::vars_os().filter(|(name, _)| !name.to_string_lossy().starts_with("GIN_"));
    Command::new(env!("CARGO_BIN_EXE_gin-examples")).args(arguments).env_clear().envs(variables).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn processes() -> Result<Completion, Failed> {
    let program = env!("CARGO_BIN_EXE_gin-examples");
    // Cargo builds the command beside this program, if it builds it at all.
    let gin = Path::new(program).with_file_name("gin");
    if !gin.exists() {
        return Ok(Completion::ignored_with(format!("there is no {}: cargo build --bin gin", gin.display())));
    }
    let output = Command::new(gin).args(["launch", "-n", "2", "--", program, "processes"]).output()?;
    let out = text(&output.stdout);
    if let Some((_, reason)) = out.split_once("processes: skipped: ") {
        return Ok(Completion::ignored_with(reason.trim()));
    }
    for rank in 0..2 {
        let line = format!("[{rank}] processes: ok: rank {rank} of 2 has 97 elements");
        if !out.contains(&line) {
            return Err(format!("expected {line:?} in {out:?}; errors: {}", text(&output.stderr)).into());
        }
    }
    Ok(Completion::Completed)
}

fn skipped() -> Result<Completion, Failed> {
    let output = command(&["processes"]);
    let out = text(&output.stdout);
    assert_eq!(output.status.code(), Some(77), "{out}");
    assert!(out.starts_with("processes: skipped: ") && out.contains("gin launch -n 2"), "{out}");
    Ok(Completion::Completed)
}

fn usage() -> Result<Completion, Failed> {
    for arguments in [&[][..], &["no_such"], &["hello_put", "two"], &["hello_put", "2", "3"]] {
        let output = command(arguments);
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {errors}");
        for example in ALL {
            assert!(errors.contains(example.about), "{errors}");
        }
    }
    Ok(Completion::Completed)
}

fn pictures() -> Result<Completion, Failed> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    for example in ALL {
        let mut pictures = 0;
        for place in ["src", "kernels/src"] {
            let path = folder.join(place).join(example.name).with_extension("rs");
            // Two programs launch the kernels of others.
            let Ok(source) = fs::read_to_string(&path) else { continue };
            pictures += source.matches("//! ```text\n").count();
            let lines = source.lines().count();
            assert!(lines <= 120, "{} has {lines} lines", path.display());
        }
        assert_eq!(pictures, 1, "{} needs a picture", example.name);
    }
    Ok(Completion::Completed)
}
