// SPDX-License-Identifier: MIT OR Apache-2.0
//! `gin launch` with small programs as ranks, including this one.

use gin_boot::Bootstrap;
use gin_boot::{Job, TcpConfig};
use libtest_mimic::{Arguments, Trial};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Long enough for a busy machine.
const LONG: Duration = Duration::from_secs(60);

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gin"));
    command.arg("launch").args(arguments).stdin(Stdio::null());
    // If this process is a rank itself, its ranks must not join its job.
    command.env("GIN_SECRET", "not for the ranks: they get an id");
    command
}

fn launch(arguments: &[&str]) -> Output {
    command(arguments).output().unwrap()
}

/// Launches a shell script.
fn script(ranks: u32, script: &str) -> Output {
    launch(&["-n", &ranks.to_string(), "--", "sh", "-c", script])
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// Returns the lines in sorted order, since lines of different ranks arrive in any order.
fn lines(bytes: &[u8]) -> Vec<&str> {
    let mut lines: Vec<&str> = text(bytes).lines().collect();
    lines.sort_unstable();
    lines
}

fn soon(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < LONG, "{what} did not happen in time");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs this program as a rank, which joins the others.
fn rank(job: &Job) {
    let bootstrap = job.bootstrap(TcpConfig::default()).unwrap();
    let all = bootstrap.all_gather(job.rank().to_string().as_bytes()).unwrap();
    let all: Vec<&str> = all.iter().map(|bytes| text(bytes)).collect();
    println!("{} of {}: {}", bootstrap.local_rank(), bootstrap.local_ranks(), all.join(" "));
}

fn ranks_get_the_variables_of_their_bootstrap() {
    let own = std::env::current_exe().unwrap();
    let output = launch(&["-n", "4", "--", own.to_str().unwrap()]);
    assert!(output.status.success(), "{output:?}");
    let expected: Vec<String> = (0..4).map(|rank| format!("[{rank}] {rank} of 4: 0 1 2 3")).collect();
    assert_eq!(lines(&output.stdout), expected);
    assert_eq!(text(&output.stderr), "");
}

fn a_rank_behind_a_shell_joins_the_job_too() {
    let own = std::env::current_exe().unwrap();
    let output = script(3, &format!("'{}' && echo done", own.display()));
    assert!(output.status.success(), "{output:?}");
    assert_eq!(lines(&output.stdout).iter().filter(|line| line.ends_with("done")).count(), 3);
}

fn output_is_prefixed_line_by_line_and_both_streams_stay_apart() {
    let output = script(2, "echo out $GIN_RANK of $GIN_RANKS; echo error $GIN_LOCAL_RANK >&2; printf last");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(lines(&output.stdout), ["[0] last", "[0] out 0 of 2", "[1] last", "[1] out 1 of 2"]);
    assert_eq!(lines(&output.stderr), ["[0] error 0", "[1] error 1"]);
}

fn json_of_rank_0_is_not_prefixed() {
    let output = script(2, "echo '{\"rank\": '$GIN_RANK'}'");
    assert_eq!(lines(&output.stdout), ["[1] {\"rank\": 1}", "{\"rank\": 0}"]);
}

fn much_output_arrives_whole() {
    let output = script(3, "i=0; while [ $i -lt 5000 ]; do echo $i; i=$((i+1)); done");
    for rank in 0..3 {
        let prefix = format!("[{rank}] ");
        let own = text(&output.stdout).lines().filter_map(|line| line.strip_prefix(&prefix));
        assert!(own.eq((0..5000).map(|i| i.to_string())), "rank {rank}");
    }
}

fn the_first_failure_ends_all_and_its_status_is_that_of_the_command() {
    let output = script(4, "if [ $GIN_RANK = 2 ]; then exit 7; fi; sleep 600");
    assert_eq!(output.status.code(), Some(7));
    assert_eq!(text(&output.stderr), "gin: rank 2 ended with status 7; ending the other 3\n");
    // A rank that ends with success after the signal does not change that.
    let output = script(2, "trap 'exit 0' TERM; if [ $GIN_RANK = 1 ]; then exit 3; fi; sleep 600 & wait");
    assert_eq!(output.status.code(), Some(3));
}

fn the_last_line_has_the_error_of_the_rank_that_failed() {
    let output = script(3, "if [ $GIN_RANK = 1 ]; then echo 'Error: no such file: x' >&2; exit 1; fi; sleep 600");
    let errors = "[1] Error: no such file: x\ngin: rank 1 ended with status 1; ending the other 2\n\
                  gin: rank 1 ended with status 1: Error: no such file: x\n";
    assert_eq!(lines(&output.stderr), lines(errors.as_bytes()));
    assert_eq!(text(&output.stderr).lines().last(), errors.lines().last());
    // A rank that writes nothing is the last line, too, if others have written.
    let folder = tempfile::tempdir().unwrap();
    let ready = folder.path().join("ready");
    let silent = format!(
        "if [ $GIN_RANK = 1 ]; then until [ -e '{0}' ]; do sleep 0.01; done; kill -KILL $$; fi
         trap 'exit 1' TERM; echo 'rank 1 is lost' >&2; touch '{0}'; sleep 600 & wait",
        ready.display()
    );
    let output = script(2, &silent);
    assert_eq!(text(&output.stderr).lines().last(), Some("gin: rank 1 ended by signal 9"));
    // A stopped rank ends when it is asked to.
    let stopped = "if [ $GIN_RANK = 1 ]; then kill -STOP $$; fi; echo 'rank 1 is lost' >&2; exit 1";
    let output = script(2, stopped);
    let last = "gin: rank 0 ended because of rank 1, which ended by signal 15 when gin asked it to end";
    assert_eq!(text(&output.stderr).lines().last(), Some(last));
    // The rank that ends first names the cause, which ends later and with success.
    let echo = "if [ $GIN_RANK = 1 ]; then echo 'rank 0 on host a has left the job' >&2; exit 1; fi; sleep 0.1";
    let output = script(2, echo);
    assert_eq!(
        text(&output.stderr).lines().last(),
        Some("gin: rank 1 ended because of rank 0, which ended with status 0")
    );
}

fn a_signal_that_ends_a_rank_is_reported_as_by_shells() {
    let output = script(2, "if [ $GIN_RANK = 0 ]; then kill -KILL $$; fi; sleep 600");
    assert_eq!(output.status.code(), Some(128 + 9));
    assert_eq!(text(&output.stderr), "gin: rank 0 ended by signal 9; ending the other 1\n");
}

fn ranks_that_do_not_end_when_asked_are_killed() {
    let folder = tempfile::tempdir().unwrap();
    let ready = folder.path().join("ready");
    let ready = ready.display();
    // Rank 0 fails once the other rank ignores the signal.
    let stubborn = format!(
        "if [ $GIN_RANK = 0 ]; then until [ -e '{ready}' ]; do sleep 0.01; done; exit 5; fi
         trap '' TERM; touch '{ready}'; while :; do sleep 1; done"
    );
    let output = launch(&["-n", "2", "--grace-ms", "200", "--", "sh", "-c", &stubborn]);
    assert_eq!(output.status.code(), Some(5));
    assert!(text(&output.stderr).contains("killing 1 ranks"), "{}", text(&output.stderr));
}

/// Returns the process that a line names.
fn id(line: &str) -> Pid {
    Pid::from_raw(line.trim().split(' ').next_back().unwrap().parse().unwrap()).unwrap()
}

/// Starts the ranks, and waits for this many lines.
fn started(ranks: u32, script: &str) -> (Child, BufReader<std::process::ChildStdout>, Vec<String>) {
    let mut command = command(&["-n", &ranks.to_string(), "--", "sh", "-c", script]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = || {
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        line
    };
    let lines = (0..ranks).map(|_| line()).collect();
    (child, output, lines)
}

fn signals_are_passed_on_to_all_ranks() {
    for (signal, name, number) in [(Signal::INT, "INT", 2), (Signal::TERM, "TERM", 15), (Signal::HUP, "HUP", 1)] {
        let script =
            format!("trap 'echo got {name}; exit {}' {name}; echo ready; while :; do sleep 0.05; done", number);
        let (mut child, mut output, _) = started(3, &script);
        kill_process(Pid::from_child(&child), signal).unwrap();
        let mut rest = String::new();
        output.read_to_string(&mut rest).unwrap();
        assert_eq!(lines(rest.as_bytes()), [0, 1, 2].map(|rank| format!("[{rank}] got {name}")));
        assert_eq!(child.wait().unwrap().code(), Some(number));
        // Ranks without a trap end by the signal.
        let (mut child, _output, _) = started(2, "echo ready; sleep 600");
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(128 + number));
    }
}

fn no_rank_outlives_the_command_even_if_it_is_killed() {
    let (mut child, _output, lines) = started(3, "echo $$; exec sleep 600");
    child.kill().unwrap();
    child.wait().unwrap();
    for line in lines {
        let id = id(&line);
        soon("the end of a rank", || {
            // A process that has ended but was not yet waited for counts as ended.
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", id.as_raw_nonzero()));
            test_kill_process(id).is_err() || stat.is_ok_and(|stat| stat.contains(") Z "))
        });
    }
}

fn processes_that_ranks_leave_behind_delay_nothing() {
    let output = script(2, "sleep 600 & echo $!");
    assert!(output.status.success());
    // The background processes still run, so the command did not wait for them.
    for line in lines(&output.stdout) {
        kill_process(id(line), Signal::KILL).unwrap();
    }
}

fn programs_that_cannot_be_started_have_the_statuses_of_shells() {
    let output = launch(&["-n", "2", "--", "/no/such/program"]);
    assert_eq!(output.status.code(), Some(127));
    let error = text(&output.stderr);
    assert!(error.contains("cannot start `/no/such/program`") && error.contains("No such file"), "{error}");
    assert_eq!(launch(&["-n", "2", "--", "/dev/null"]).status.code(), Some(126));
}

fn arguments_that_make_no_sense_are_refused() {
    for (arguments, word) in [
        (&["--", "true"][..], "--ranks"),
        (&["-n", "2"], "PROGRAM"),
        (&["-n", "0", "--", "true"], "1..=1024"),
        (&["-n", "1025", "--", "true"], "1..=1024"),
        (&["-n", "two", "--", "true"], "two"),
    ] {
        let output = launch(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(text(&output.stderr).contains(word), "{arguments:?}: {}", text(&output.stderr));
    }
}

fn arguments_of_the_program_are_its_own() {
    let output = launch(&["-n", "1", "echo", "-n", "--ranks", "--", "x"]);
    assert_eq!(lines(&output.stdout), ["[0] --ranks -- x"]);
    let output = launch(&["-n", "1", "--", "echo", "--grace-ms", "--help"]);
    assert_eq!(lines(&output.stdout), ["[0] --grace-ms --help"]);
}

fn main() {
    if let Some(job) = Job::from_env().unwrap() {
        return rank(&job);
    }
    let trials: &[(&str, fn())] = &[
        ("ranks_get_the_variables_of_their_bootstrap", ranks_get_the_variables_of_their_bootstrap),
        ("a_rank_behind_a_shell_joins_the_job_too", a_rank_behind_a_shell_joins_the_job_too),
        (
            "output_is_prefixed_line_by_line_and_both_streams_stay_apart",
            output_is_prefixed_line_by_line_and_both_streams_stay_apart,
        ),
        ("json_of_rank_0_is_not_prefixed", json_of_rank_0_is_not_prefixed),
        ("much_output_arrives_whole", much_output_arrives_whole),
        (
            "the_first_failure_ends_all_and_its_status_is_that_of_the_command",
            the_first_failure_ends_all_and_its_status_is_that_of_the_command,
        ),
        ("the_last_line_has_the_error_of_the_rank_that_failed", the_last_line_has_the_error_of_the_rank_that_failed),
        ("a_signal_that_ends_a_rank_is_reported_as_by_shells", a_signal_that_ends_a_rank_is_reported_as_by_shells),
        ("ranks_that_do_not_end_when_asked_are_killed", ranks_that_do_not_end_when_asked_are_killed),
        ("signals_are_passed_on_to_all_ranks", signals_are_passed_on_to_all_ranks),
        ("no_rank_outlives_the_command_even_if_it_is_killed", no_rank_outlives_the_command_even_if_it_is_killed),
        ("processes_that_ranks_leave_behind_delay_nothing", processes_that_ranks_leave_behind_delay_nothing),
        (
            "programs_that_cannot_be_started_have_the_statuses_of_shells",
            programs_that_cannot_be_started_have_the_statuses_of_shells,
        ),
        ("arguments_that_make_no_sense_are_refused", arguments_that_make_no_sense_are_refused),
        ("arguments_of_the_program_are_its_own", arguments_of_the_program_are_its_own),
    ];
    let trial = |&(name, run): &(&str, fn())| {
        Trial::test(name, move || {
            run();
            Ok(())
        })
    };
    libtest_mimic::run(&Arguments::from_args(), trials.iter().map(trial).collect()).exit();
}
