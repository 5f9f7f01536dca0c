// SPDX-License-Identifier: MIT OR Apache-2.0
//! NCCL's network beside gin's proxy: the same kernels, on the same GPUs, in one process of the program
//! `gin-nccl-bench`. That program is separate, because NVIDIA's bitcode is in its kernels.

use super::figure::Figure;
use super::table::{Kind, Row, Table};
use super::{Bench, Gpus};
use crate::Failure;
use serde::Deserialize;
use std::io::{BufRead, BufReader, ErrorKind};
use std::process::{Command, Stdio};

const RANKS: u32 = 2;

/// The program.
const PROGRAM: &str = "gin-nccl-bench";
/// The start of the line with the figures. Other lines are NCCL's log.
const RESULT: &str = "gin-nccl-bench: ";

/// The figures of the program.
#[derive(Deserialize)]
struct Report {
    version: String,
    backend: String,
    nccl: Side,
    gin: Side,
}

/// The repeats of each figure.
#[derive(Deserialize)]
struct Side {
    signal_us: Vec<f64>,
    put_us: Vec<f64>,
    puts_gbs: Vec<f64>,
    wrong: u64,
}

/// Returns the program next to this one, or its name, for a search in `PATH`.
fn program() -> Command {
    let here = std::env::current_exe().map(|path| path.with_file_name(PROGRAM));
    Command::new(here.ok().filter(|path| path.exists()).unwrap_or_else(|| PROGRAM.into()))
}

/// Runs the program on two GPUs, or twice the only one.
fn run(mut program: Command, gpus: &Gpus, launches: usize, limit_ms: u128) -> Result<Report, Failure> {
    let (first, last) = match gpus.ordinals[..] {
        [] => return Err("there is no GPU".into()),
        [only] => (only, only),
        [first, second, ..] => (first, second),
    };
    program.args([first.to_string(), last.to_string(), launches.to_string(), limit_ms.to_string()]);
    let mut child =
        program.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map_err(|error| match error.kind() {
            ErrorKind::NotFound => {
                "there is no program gin-nccl-bench in the folder of gin-bench or in PATH; in a clone of \
                                gin build it by `make nccl-device nccl-bench`"
                    .to_owned()
            }
            _ => format!("{PROGRAM} cannot be started: {error}"),
        })?;
    let mut result = None;
    for line in child.stdout.take().map(BufReader::new).into_iter().flat_map(BufRead::lines) {
        let line = line?;
        match line.strip_prefix(RESULT) {
            Some(text) => result = Some(text.to_owned()),
            None => eprintln!("{line}"),
        }
    }
    let status = child.wait()?;
    match result {
        Some(text) if status.success() => Ok(serde_json::from_str(&text)?),
        None if status.success() => Err(format!("{PROGRAM} has printed no figures").into()),
        _ => Err(format!("{PROGRAM} has failed ({status}); the lines above say why").into()),
    }
}

/// Returns the rows of a figure of NCCL and of gin.
fn rows(what: &str, unit: &'static str, report: &Report, of: fn(&Side) -> &[f64]) -> Result<[Row; 2], Failure> {
    let figure = |side: &Side| match of(side) {
        [] => Err(format!("{PROGRAM} has measured no {what}")),
        repeats => Ok(Figure::new(repeats, Some(side.wrong))),
    };
    let (gin, nccl) = (figure(&report.gin)?, figure(&report.nccl)?);
    let name = format!("NCCL's {}", report.backend);
    Ok([
        Row::new(format!("{what}, {name}"), nccl, unit).main(true),
        Row::new(format!("{what}, gin's proxy"), gin, unit).main(true).beside(Kind::Nccl, name, nccl, None, None),
    ])
}

fn tables(bench: &Bench, program: Command) -> Result<Vec<Table>, Failure> {
    let Some(gpus) = &bench.gpus else {
        return Err("NCCL needs NVIDIA GPUs; there are only virtual ones".into());
    };
    let report = run(program, gpus, bench.launches, bench.limit.as_millis())?;
    let rows = [
        rows("signal and back", "us", &report, |side| &side.signal_us)?,
        rows("64B put with signal and back", "us", &report, |side| &side.put_us)?,
        rows("4MiB puts with signal", "GB/s", &report, |side| &side.puts_gbs)?,
    ];
    let mut table = bench.table("gin's proxy and NCCL", RANKS, rows.into_iter().flatten().collect());
    table.notes.push(format!(
        "NCCL {} by its {}, over the network that the environment gives it; gin by its proxy and copies",
        report.version, report.backend
    ));
    Ok(vec![table])
}

/// Measures NCCL and gin.
pub(super) fn beside(bench: &Bench) -> Result<Vec<Table>, Failure> {
    tables(bench, program())
}

#[cfg(test)]
mod tests {
    use super::*;
    use gin_testkit::Sabotage;
    use std::time::Duration;

    const LINE: &str = r#"gin-nccl-bench: {"version":"2.30.7","backend":"proxy","nccl":{"signal_us":[20.0,30.0,20.0],"put_us":[40.0],"puts_gbs":[300.0],"wrong":WRONG},"gin":{"signal_us":[10.0,10.0,12.0],"put_us":[20.0],"puts_gbs":[330.0],"wrong":0}}"#;

    fn bench(ordinals: &[usize]) -> Bench {
        let names = vec!["H200".to_owned(); ordinals.len()];
        let gpus = Gpus { names, ordinals: ordinals.to_vec(), own: None, engine: &[] };
        let (limit, sabotage) = (Duration::from_millis(2500), Sabotage::None);
        Bench { gpus: Some(gpus), job: None, launches: 3, limit, max_bytes: 64, module: None, sabotage }
    }

    /// Measures with a shell script in the place of the program.
    fn with(script: &str, ordinals: &[usize]) -> Result<Vec<Table>, Failure> {
        let mut program = Command::new("sh");
        program.args(["-c", script, PROGRAM]);
        tables(&bench(ordinals), program)
    }

    #[test]
    fn figures_of_both_sides_are_in_a_row_with_their_ratio() {
        let script = format!("[ \"$*\" = '4 5 3 2500' ] && echo NCCL INFO && echo '{}'", LINE.replace("WRONG", "0"));
        let tables = with(&script, &[4, 5, 6]).unwrap();
        let row = &tables[0].rows[1];
        assert_eq!((row.figure.value, row.figure.repeats), (10.0, 3));
        assert_eq!((row.beside[0].what.as_str(), row.beside[0].ratio), ("NCCL's proxy", 0.5));
        assert_eq!(
            tables[0].rows.iter().map(|row| row.unit).collect::<Vec<_>>(),
            ["us", "us", "us", "us", "GB/s", "GB/s"]
        );
        assert!(tables[0].notes.iter().any(|note| note.contains("2.30.7")) && tables[0].rows.iter().all(Row::is_right));
    }

    #[test]
    fn ranks_share_the_only_gpu_and_a_wrong_word_makes_the_rows_of_its_side_wrong() {
        let script = format!("[ \"$*\" = '1 1 3 2500' ] && echo '{}'", LINE.replace("WRONG", "7"));
        let tables = with(&script, &[1]).unwrap();
        assert_eq!(tables[0].rows.iter().map(Row::is_right).collect::<Vec<_>>(), [false, true].repeat(3));
        assert!(tables[0].notes.iter().any(|note| note.contains("share")));
    }

    #[test]
    fn a_program_that_is_absent_fails_or_prints_no_figures_is_an_error() {
        let absent = tables(&bench(&[0]), Command::new("/nowhere/gin-nccl-bench")).unwrap_err().to_string();
        assert!(absent.contains("make nccl-device nccl-bench"), "{absent}");
        let line = LINE.replace("WRONG", "0");
        let failed = with(&format!("echo '{line}'; exit 3"), &[0]).unwrap_err().to_string();
        assert!(failed.contains("exit status: 3"), "{failed}");
        assert!(with("true", &[0]).unwrap_err().to_string().contains("no figures"));
        let empty = with(&format!("echo '{}'", line.replace("[40.0]", "[]")), &[0]).unwrap_err().to_string();
        assert!(empty.contains("64B put"), "{empty}");
    }
}
