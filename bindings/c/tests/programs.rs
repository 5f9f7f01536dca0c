// SPDX-License-Identifier: MIT OR Apache-2.0

//! Programs in C and C++ that use the library, on virtual GPUs.

mod common;

use common::{HERE, compiler, library, program, program_with, run, try_run};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

/// Compiles a program and runs it; it ends with `passed`.
fn passes(source: &str) {
    let folder = tempfile::tempdir().expect("make a folder");
    let said = run(&mut Command::new(program(source, folder.path())));
    assert!(said.contains("passed"), "{source}: {said}");
}

#[test]
fn two_ranks_of_a_c_program_put_and_check() {
    let folder = tempfile::tempdir().expect("make a folder");
    let said = run(&mut Command::new(program("tests/c/put.c", folder.path())));
    assert_eq!(said, format!("gin {}: passed\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn a_c_program_puts_over_libfabric_or_learns_what_to_install() {
    let folder = tempfile::tempdir().expect("make a folder");
    let program = program("tests/c/put.c", folder.path());
    let over = |library: &str| run(Command::new(&program).arg("fabric").env("GIN_FABRIC_LIBRARY", library));
    let without = over("libfabric-of-nobody.so");
    assert!(
        without.starts_with("GIN_ERROR_NETWORK: gin_job_local: libfabric-of-nobody.so cannot be opened ("),
        "{without}"
    );
    assert!(without.ends_with("the package libfabric1)\n"), "{without}");
    let library = gin_net::fabric::FabricConfig::default().library;
    let with = over(&library);
    let expected = if gin_net::fabric::probe(&library).is_ok() { "passed" } else { "cannot be opened" };
    assert!(with.contains(expected), "{with}");
}

#[test]
fn every_operation_of_the_header_does_its_work_and_refuses_wrong_arguments() {
    let folder = tempfile::tempdir().expect("make a folder");
    let program = program("tests/c/operations.cpp", folder.path());
    for route in ["automatic", "network"] {
        let said = run(Command::new(&program).arg(route));
        assert!(said.contains("passed"), "{route}: {said}");
    }
}

#[test]
fn kernels_in_cpp_run_on_the_virtual_gpu() {
    let folder = tempfile::tempdir().expect("make a folder");
    let program = program("../../examples/cuda-cpp/virtual.cpp", folder.path());
    for arguments in [&["4"][..], &["3", "network"], &["3", "manual"], &["3", "gdaki"], &["1"]] {
        let said = run(Command::new(&program).args(arguments));
        assert!(said.contains("passed"), "{arguments:?}: {said}");
    }
}

#[test]
fn a_program_chooses_the_back_end_and_learns_why_one_is_refused() {
    passes("tests/c/backends.c");
}

#[test]
fn kernels_in_cpp_and_in_rust_meet_in_one_ring() {
    let folder = tempfile::tempdir().expect("make a folder");
    let program = program_with("tests/c/mixed.cpp", &library("libgin_example_c.so"), folder.path());
    for route in ["automatic", "network"] {
        let said = run(Command::new(&program).arg(route));
        assert!(said.contains("passed"), "{route}: {said}");
    }
}

#[test]
fn the_kernels_that_the_benchmark_times_in_cpp_do_what_they_say() {
    passes("tests/c/bench.cpp");
}

#[test]
fn processes_meet_over_the_programs_own_exchange_and_children_of_forks_are_refused() {
    passes("tests/c/fork.c");
}

#[test]
fn an_object_that_cpp_drops_closes_its_handle() {
    passes("tests/c/owner.cpp");
}

#[test]
fn a_fault_of_a_kernel_in_cpp_names_true_values_or_none() {
    let folder = tempfile::tempdir().expect("make a folder");
    let program = program("tests/c/figures.cpp", folder.path());
    for (mistake, expected) in [
        (
            "signal",
            "deadline passed in wait_signal, context 0, signal 3: it is 0 and should have reached 1 within 20 ms",
        ),
        (
            "counter",
            "deadline passed in wait_counter, context 0, counter 2: it is 0 and should have reached 1 within 20 ms",
        ),
        (
            "range",
            "range reaches past the end of the window in put, context 0, rank 0, window 0 at byte 16: the window has 40 \
             bytes there, and the range is bytes 16 to 48",
        ),
        ("member", "no such rank in address: 7 was given, and the team has fewer ranks"),
        (
            "id",
            "no such signal in signal, context 0, rank 0, signal 99: `Requirements` have 16 of `signals`, with numbers \
             0 to 15",
        ),
        (
            "barrier",
            "no such barrier in barrier, context 0, barrier 5: `Requirements` have 1 of `world_barriers`, \
             `rail_barriers` or `lsa_barriers`, with number 0",
        ),
        ("outside", "no such rank in address: 9 was given, and the team has fewer ranks"),
        ("stores range", "range reaches past the end of the window in put, context 0, rank 0"),
        ("stores id", "no such signal in signal, context 0, rank 0"),
    ] {
        let said = run(Command::new(&program).arg(mistake));
        let (_, text) = said.split_once("the communicator has ended: ").unwrap_or(("", &said));
        let (text, reported) = text.split_once(" (reported by rank 0").unwrap_or((text, ""));
        let (host, _) = reported.split_once(';').unwrap_or((reported, ""));
        assert_eq!(text.replace(host, ""), expected, "{mistake}: {said}");
    }
    assert_eq!(
        run(Command::new(&program).arg("arguments")),
        "gin_launch: kernel `kernel` takes 3 arguments; 1 were given\n\
         gin_launch: argument 2 of kernel `kernel` has 8 bytes; its parameter has 4\n\
         gin::Stream::launch: argument 1 is no window of this process: it is closed, or of another process\n"
    );
}

#[test]
fn a_kernel_of_known_types_takes_no_arguments_of_others() {
    let compile = |case: u32| {
        let mut command = compiler(true);
        command.arg(format!("-DCASE={case}")).arg("-fsyntax-only").arg(format!("{HERE}/tests/c/refused.cpp"));
        try_run(&mut command)
    };
    compile(0).expect("the right types compile");
    for (case, text) in [
        (1, "an argument has another type than its parameter"),
        (2, "the kernel takes another number of arguments"),
        (3, "deleted"),
    ] {
        let said = compile(case).expect_err("it does not compile");
        assert!(said.contains(text), "{case}: {said}");
    }
}

#[test]
fn objects_with_static_lifetime_end_without_a_word() {
    let folder = tempfile::tempdir().expect("make a folder");
    let program = program("tests/c/exit.cpp", folder.path());
    for way in ["return", "exit", "thread"] {
        let output = Command::new(&program).arg(way).output().expect("run the program");
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert_eq!((output.status.code(), &*said), (Some(7), ""), "{way}");
    }
}

#[test]
fn a_program_in_cpp_says_that_it_looks_for_no_races() {
    let folder = tempfile::tempdir().expect("make a folder");
    let program = program("tests/c/put.c", folder.path());
    let said = run(Command::new(&program).env("GIN_RACES", "1"));
    assert_eq!(said.matches("gin: GIN_RACES=1 has no effect").count(), 1, "{said}");
}

#[test]
fn a_c_program_launches_a_kernel_in_rust_alone_and_as_two_processes() {
    let folder = tempfile::tempdir().expect("make a folder");
    let program = program_with("../../examples/c/main.c", &library("libgin_example_c.so"), folder.path());
    assert!(run(&mut Command::new(&program)).contains("rank 0 of 1: passed"));
    for (status, said) in processes(&program, &[], 2) {
        assert!(status.success() && said.contains("of 2: passed"), "{said}");
    }
}

/// Runs a program as each rank of a job of processes. Returns their exit statuses and what they said.
fn processes(program: &Path, arguments: &[&str], ranks: u32) -> Vec<(ExitStatus, String)> {
    let port = std::net::TcpListener::bind(("127.0.0.1", 0)).and_then(|socket| socket.local_addr());
    let (port, ranks_text) = (port.expect("a free port").port().to_string(), ranks.to_string());
    let rank = |rank: u32| {
        let mut command = Command::new(program);
        let variables =
            [("GIN_RANKS", &*ranks_text), ("GIN_ADDR", "127.0.0.1"), ("GIN_PORT", &port), ("GIN_INSECURE", "1")];
        command.args(arguments).env("GIN_RANK", rank.to_string()).envs(variables);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("start a rank")
    };
    let children: Vec<_> = (0..ranks).map(rank).collect();
    let end = |child: std::process::Child| {
        let output = child.wait_with_output().expect("wait for a rank");
        (output.status, String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
    };
    children.into_iter().map(end).collect()
}

#[test]
fn ranks_learn_of_a_killed_process_and_go_on_without_it() {
    let folder = tempfile::tempdir().expect("make a folder");
    let program = program("tests/c/loss.cpp", folder.path());
    // The job of a launcher, and one over an all-gather of the program's own, which hands out files.
    for arguments in [vec![], vec![folder.path().to_str().expect("the path is UTF-8")]] {
        let ranks = processes(&program, &arguments, 3);
        assert_eq!(ranks[1].0.signal(), Some(9), "{ranks:?}");
        for (status, said) in [&ranks[0], &ranks[2]] {
            assert!(status.success() && said.contains("passed: 2 ranks remain"), "{said}");
        }
    }
    // With `survive_losses` the communicator goes on.
    let ranks = processes(&program, &["survives"], 3);
    for (status, said) in [&ranks[0], &ranks[2]] {
        assert!(status.success() && said.contains("passed: the communicator goes on"), "{said}");
    }
}

#[test]
fn a_kernel_that_throws_ends_with_the_text_of_its_exception() {
    let folder = tempfile::tempdir().expect("make a folder");
    let program = program("tests/c/throws.cpp", folder.path());
    assert!(run(&mut Command::new(&program)).contains("passed"));
    let output = Command::new(&program).arg("other").output().expect("start the program");
    assert_eq!((output.status.signal(), &*output.stdout), (Some(6), &b"throws\n"[..]), "{output:?}");
}

#[test]
fn expert_parallelism_in_cpp_gives_sums_bit_for_bit() {
    passes("tests/c/ep.cpp");
}

#[test]
fn a_c_program_runs_a_layer_of_experts_in_cpp_alone_and_as_four_processes() {
    let folder = tempfile::tempdir().expect("make a folder");
    let object = |source: &str, cpp: bool| {
        let (from, to) = (format!("{HERE}/../../examples/c/{source}"), folder.path().join(format!("{source}.o")));
        run(compiler(cpp).args(["-c", &from, "-o"]).arg(&to));
        to
    };
    let program = folder.path().join("ep");
    let objects = [object("ep.c", false), object("experts.cpp", true)];
    run(compiler(true).args(objects).arg("-o").arg(&program).arg(library("libgin_capi.so")).arg("-pthread"));
    assert_eq!(run(&mut Command::new(&program)), "rank 0 of 1: passed\n");
    for (status, said) in processes(&program, &[], 4) {
        assert!(status.success() && said.contains("of 4: passed"), "{said}");
    }
}

#[test]
fn expert_parallelism_refuses_wrong_calls_and_reports_silent_and_stopped_ranks() {
    passes("tests/c/ep_errors.cpp");
}

#[test]
fn experts_go_on_without_a_killed_rank_in_a_new_group() {
    let folder = tempfile::tempdir().expect("make a folder");
    let ranks = processes(&program("tests/c/ep_loss.cpp", folder.path()), &[], 3);
    assert_eq!(ranks[1].0.signal(), Some(9), "{ranks:?}");
    for (status, said) in [&ranks[0], &ranks[2]] {
        assert!(status.success() && said.contains("passed: 2 ranks remain"), "{said}");
    }
}

#[test]
fn a_program_for_nccl_ep_gets_rows_and_sums_as_threads_and_as_processes() {
    let folder = tempfile::tempdir().expect("make a folder");
    let program = program("tests/c/nccl_ep.cpp", folder.path());
    for arguments in [&[][..], &["2", "4", "network"]] {
        let said = run(Command::new(&program).args(arguments));
        assert!(said.contains("passed"), "{arguments:?}: {said}");
    }
    for ranks in [2, 4] {
        let id = folder.path().join(format!("id{ranks}"));
        for (status, said) in processes(&program, &[id.to_str().expect("the path is UTF-8")], ranks) {
            assert!(status.success() && said.contains("passed"), "{said}");
        }
    }
}

#[test]
fn a_program_for_nccl_ep_uses_its_modes_and_masks_and_learns_what_is_refused() {
    let folder = tempfile::tempdir().expect("make a folder");
    let program = program("tests/c/nccl_ep_modes.cpp", folder.path());
    for arguments in [&[][..], &["2", "network"]] {
        let said = run(Command::new(&program).args(arguments));
        assert!(said.contains("passed"), "{arguments:?}: {said}");
    }
}

#[test]
fn nccl_eps_structs_have_their_sizes_in_c99_without_a_warning() {
    let folder = tempfile::tempdir().expect("make a folder");
    let program = folder.path().join("sizes");
    let mut command = compiler(false);
    command.args(["-std=c99", "-Wshadow", "-Wconversion"]).arg(format!("{HERE}/tests/c/nccl_ep_sizes.c"));
    run(command.arg("-o").arg(&program).arg(library("libgin_capi.so")));
    assert!(run(&mut Command::new(&program)).contains("passed"));
}

#[test]
fn a_rank_that_throws_waits_for_nobody_and_ends_the_waits_of_others() {
    let folder = tempfile::tempdir().expect("make a folder");
    let program = program("tests/c/unwind.cpp", folder.path());
    for place in ["kernel", "window", "barrier"] {
        let said = run(Command::new(&program).arg(place));
        assert!(said.contains("passed"), "{place}: {said}");
        for (status, said) in processes(&program, &[place], 2) {
            assert!(status.success() && said.contains("passed"), "{place}: {said}");
        }
    }
}
