// SPDX-License-Identifier: MIT OR Apache-2.0
//! Jobs as launchers describe them in environment variables.

use gin_boot::{Bootstrap, BootstrapError};
use gin_boot::{Job, JobError, Launcher, Rendezvous, TcpBootstrap, TcpConfig};
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Variables as a line of `NAME=value` words.
fn job(words: &str) -> Result<Option<Job>, JobError> {
    let table: HashMap<&str, &str> = words.split_whitespace().map(|word| word.split_once('=').unwrap()).collect();
    Job::from_variables(&|name| table.get(name).map(|value| (*value).to_owned()))
}

fn found(words: &str) -> Job {
    job(words).unwrap().unwrap()
}

/// The error, which is to name the variable and all of these.
fn refused(words: &str, expected: &[&str]) {
    let error = job(words).unwrap_err();
    for expected in expected {
        assert!(error.to_string().contains(expected), "{words}: {expected:?} is not in `{error}`");
    }
}

fn config() -> TcpConfig {
    TcpConfig::default().joining(Duration::from_secs(60)).collective_timeout(Some(Duration::from_secs(60)))
}

/// Returns a free port, outside of the range that the system gives to others by itself.
fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    loop {
        let next = (std::process::id() * 37 + u32::from(NEXT.fetch_add(1, Ordering::Relaxed))) % 10_000;
        let port = 20_001 + next as u16;
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
}

/// Has the ranks that these words describe meet, and gives what each told.
fn meet(ranks: &[String]) -> Vec<Result<Vec<Vec<u8>>, JobError>> {
    let one = |words: &String| {
        let job = found(words);
        let bootstrap: TcpBootstrap = job.bootstrap(config())?;
        assert_eq!((bootstrap.rank(), bootstrap.ranks()), (job.rank(), job.ranks()));
        // All are on this host.
        assert_eq!((bootstrap.local_rank(), bootstrap.local_ranks()), (job.rank(), job.ranks()));
        assert_eq!(bootstrap.hosts()[0], gin_boot::host_name());
        Ok(bootstrap.all_gather(&[job.rank() as u8])?)
    };
    thread::scope(|scope| {
        let ranks: Vec<_> = ranks.iter().map(|words| scope.spawn(move || one(words))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn all_meet(ranks: &[String]) {
    let everything: Vec<Vec<u8>> = (0..ranks.len()).map(|rank| vec![rank as u8]).collect();
    for outcome in meet(ranks) {
        assert_eq!(outcome.as_ref(), Ok(&everything));
    }
}

const SECRET: &str = "GIN_SECRET=0123456789abcdef";

#[test]
fn a_process_that_nobody_launched_is_no_job() {
    assert!(job("HOME=/root").unwrap().is_none());
    // These are set for batch scripts and by other programs too.
    assert!(job("SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_JOB_ID=7").unwrap().is_none());
    assert!(job("RANK=3").unwrap().is_none());
    assert!(job("GIN_RANK=").unwrap().is_none());
}

#[test]
fn each_launcher_names_the_rank() {
    let told = |words: &str| {
        let job = found(words);
        (job.launcher(), job.rank(), job.ranks(), job.local_rank(), job.local_ranks())
    };
    let gin = format!("GIN_RANK=2 GIN_RANKS=8 GIN_ADDR=n1 GIN_PORT=4000 {SECRET}");
    assert_eq!(told(&gin), (Launcher::Gin, 2, 8, None, None));
    let local = format!("{gin} GIN_LOCAL_RANK=0 GIN_LOCAL_RANKS=2");
    assert_eq!(told(&local), (Launcher::Gin, 2, 8, Some(0), Some(2)));
    let torch = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=n1 MASTER_PORT=29500";
    assert_eq!(told(&format!("{torch} {SECRET}")), (Launcher::Torchrun, 5, 8, Some(1), Some(4)));
    let slurm = "SLURM_PROCID=4 SLURM_STEP_NUM_TASKS=7 SLURM_NTASKS=9 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_JOB_ID=99 \
                 SLURM_STEP_NODELIST=n[03-05] SLURM_STEP_TASKS_PER_NODE=4,3(x2)";
    assert_eq!(told(&format!("{slurm} {SECRET}")), (Launcher::Slurm, 4, 7, Some(0), Some(3)));
    let mpi = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2";
    assert_eq!(told(&format!("{mpi} GIN_PORT=4000")), (Launcher::OpenMpi, 1, 2, Some(1), Some(2)));
    // One started by another: the inner one counts.
    assert_eq!(told(&format!("{slurm} {torch} {SECRET}")).0, Launcher::Torchrun);
    assert_eq!(told(&format!("{slurm} {mpi} GIN_PORT=4000")).0, Launcher::OpenMpi);
    assert_eq!(told(&format!("{slurm} {torch} {mpi} {gin}")).0, Launcher::Gin);
}

#[test]
fn what_is_missing_or_wrong_is_named_with_what_to_do() {
    refused("GIN_RANK=0", &["GIN_RANKS is not set", "number of ranks"]);
    refused("GIN_RANK=one", &["GIN_RANK", "`one` is not a number"]);
    refused("GIN_RANK=-1 GIN_RANKS=2", &["GIN_RANK", "`-1`"]);
    refused("GIN_RANK=2 GIN_RANKS=2", &["GIN_RANK", "no rank 2 in a job of 2"]);
    refused("GIN_RANK=0 GIN_RANKS=0", &["GIN_RANK", "1 to"]);
    refused("GIN_RANK=0 GIN_RANKS=2", &["GIN_ADDR is not set", "rank 0's host", "GIN_UNIQUE_ID"]);
    refused("GIN_RANK=0 GIN_RANKS=2 GIN_ADDR=n1", &["GIN_PORT is not set", "free"]);
    refused("GIN_RANK=0 GIN_RANKS=2 GIN_ADDR=n1 GIN_PORT=0", &["GIN_PORT", "`0` is not a port"]);
    refused("GIN_RANK=0 GIN_RANKS=2 GIN_ADDR=n1 GIN_PORT=65536", &["GIN_PORT", "65535"]);
    refused("GIN_RANK=0 GIN_RANKS=2 GIN_UNIQUE_ID=gin1:xyz", &["GIN_UNIQUE_ID", "cut or changed"]);
    refused("RANK=0 WORLD_SIZE=2 MASTER_PORT=1", &["MASTER_ADDR is not set", "torchrun"]);
    refused("RANK=0 WORLD_SIZE=2 MASTER_ADDR=n1", &["GIN_PORT is not set"]);
    refused("RANK=0 WORLD_SIZE=2 MASTER_ADDR=n1 MASTER_PORT=65535", &["MASTER_PORT", "set GIN_PORT"]);
    refused("RANK=x WORLD_SIZE=2", &["RANK", "`x`"]);
    refused("OMPI_COMM_WORLD_RANK=0", &["OMPI_COMM_WORLD_SIZE is not set", "Open MPI"]);
    refused("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2", &["GIN_ADDR is not set", "Open MPI"]);
    refused("SLURM_PROCID=0 SLURM_STEP_NODELIST=n[1-2 SLURM_NTASKS=2", &["SLURM_STEP_NODELIST", "GIN_ADDR"]);
    let gin = "GIN_RANK=0 GIN_RANKS=2 GIN_ADDR=n1 GIN_PORT=4000";
    refused(&format!("{gin} GIN_SECRET=short"), &["GIN_SECRET", "at least 16 bytes", "has 5", "openssl"]);
    refused(&format!("{gin} {SECRET} GIN_SECRET_FILE=/tmp/x"), &["GIN_SECRET_FILE is set too"]);
    refused(&format!("{gin} GIN_INSECURE=yes"), &["GIN_INSECURE", "1"]);
    refused(&format!("{gin} GIN_INSECURE=1 GIN_JOIN=yes"), &["GIN_JOIN", "1, for a process that joins a running job"]);
    refused(&format!("{gin} {SECRET} GIN_SILENCE_MS=99"), &["GIN_SILENCE_MS", "at least 100"]);
    let error = job(&format!("{gin} {SECRET} GIN_INTERFACE=nosuch0")).unwrap_err().to_string();
    assert!(error.contains("`nosuch0` is no interface") && error.contains("lo"), "{error}");
}

#[test]
fn errors_repeat_no_secret() {
    let gin = "GIN_RANK=0 GIN_RANKS=2 GIN_ADDR=n1 GIN_PORT=4000";
    for words in ["GIN_SECRET=hunter2", "GIN_UNIQUE_ID=gin1:hunter2@127.0.0.1:1"] {
        let error = job(&format!("{gin} {words}")).unwrap_err();
        assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
    }
    assert!(!format!("{:?}", found(&format!("{gin} {SECRET}"))).contains("0123456789abcdef"));
}

#[test]
fn a_job_of_several_hosts_needs_a_secret_or_the_wish_to_do_without() {
    let gin = "GIN_RANK=0 GIN_RANKS=2 GIN_ADDR=n1 GIN_PORT=4000";
    refused(gin, &["no secret", "GIN_SECRET_FILE", "chmod 600", "GIN_INSECURE=1"]);
    refused(&format!("{gin} GIN_LOCAL_RANKS=1 GIN_INSECURE=0"), &["no secret"]);
    found(&format!("{gin} GIN_INSECURE=1"));
    found(&format!("{gin} {SECRET}"));
}

#[test]
fn a_job_on_one_host_without_a_secret_meets_at_the_loopback_only() {
    let port = free_port();
    let gin = |rank| format!("GIN_RANK={rank} GIN_RANKS=2 GIN_LOCAL_RANK={rank} GIN_LOCAL_RANKS=2 GIN_PORT={port}");
    all_meet(&[gin(0), gin(1)]);
    for words in ["GIN_ADDR=192.0.2.1", "GIN_INTERFACE=192.0.2.1"] {
        let error = found(&format!("{} {words}", gin(0))).bootstrap(config()).unwrap_err();
        assert_eq!(error, JobError::NotLoopback { address: Ipv4Addr::new(192, 0, 2, 1).into() });
    }
}

#[test]
fn jobs_of_every_launcher_meet() {
    let two = |words: &dyn Fn(u32, u16) -> String| {
        let port = free_port();
        all_meet(&[words(0, port), words(1, port)]);
    };
    two(&|rank, port| format!("GIN_RANK={rank} GIN_RANKS=2 GIN_ADDR=localhost GIN_PORT={port} {SECRET}"));
    two(&|rank, port| format!("GIN_RANK={rank} GIN_RANKS=2 GIN_ADDR=127.0.0.1 GIN_PORT={port} {SECRET}"));
    two(&|rank, port| format!("GIN_RANK={rank} GIN_RANKS=2 GIN_ADDR=127.0.0.1 GIN_PORT={port} GIN_INSECURE=1"));
    two(&|rank, port| {
        let gin = format!("GIN_RANK={rank} GIN_RANKS=2 GIN_ADDR=127.0.0.1 GIN_PORT={port} {SECRET}");
        format!("{gin} GIN_INTERFACE=lo")
    });
    two(&|rank, port| format!("RANK={rank} WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT={} {SECRET}", port - 1));
    two(&|rank, port| {
        let own = format!("OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE=2");
        format!("{own} GIN_ADDR=localhost GIN_PORT={port} {SECRET}")
    });
    two(&|rank, port| {
        let own = format!("SLURM_PROCID={rank} SLURM_NTASKS=2 SLURM_JOB_ID=12 SLURM_STEP_NODELIST=localhost");
        format!("{own} GIN_PORT={port} {SECRET}")
    });
}

#[test]
fn ranks_with_different_secrets_do_not_meet() {
    let port = free_port();
    let gin = |rank: u32, secret: &str| {
        format!("GIN_RANK={rank} GIN_RANKS=2 GIN_ADDR=127.0.0.1 GIN_PORT={port} GIN_SECRET={secret}")
    };
    let first = found(&gin(0, "0123456789abcdef"));
    let second = found(&gin(1, "0123456789abcdeF"));
    let brief = config().joining(Duration::from_secs(3));
    let rank_0 = thread::spawn(move || first.bootstrap(brief));
    assert_eq!(second.bootstrap(config()).unwrap_err(), JobError::Bootstrap(BootstrapError::Secret));
    let error = rank_0.join().unwrap().unwrap_err();
    assert!(matches!(&error, JobError::Bootstrap(BootstrapError::Timeout { missing, .. }) if *missing == [1]));
}

#[test]
fn a_name_without_an_address_and_an_address_in_use_are_errors() {
    let gin = |words: &str| format!("GIN_RANK=0 GIN_RANKS=2 GIN_PORT=4000 {SECRET} {words}");
    let error = found(&gin("GIN_ADDR=no-such-host.invalid")).bootstrap(config()).unwrap_err();
    assert!(error.to_string().contains("`no-such-host.invalid`"), "{error}");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let words = gin(&format!("GIN_ADDR=127.0.0.1 GIN_PORT={port}"));
    let error = found(&words).bootstrap(config()).unwrap_err().to_string();
    assert!(error.contains(&format!("127.0.0.1:{port}")) && error.contains("in use"), "{error}");
}

/// Lets another program listen at a free port and treat each connection in this way.
fn stranger(treat: fn(TcpStream, &mut Vec<TcpStream>)) -> u16 {
    let port = free_port();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
    thread::spawn(move || {
        let mut held = Vec::new();
        for stream in listener.incoming() {
            treat(stream.unwrap(), &mut held);
        }
    });
    port
}

/// Returns the variables that torchrun sets for a rank, if gin is to use this port.
fn torchrun(rank: u32, port: u16) -> String {
    let words = format!("RANK={rank} WORLD_SIZE=2 LOCAL_RANK={rank} LOCAL_WORLD_SIZE=2");
    format!("{words} MASTER_ADDR=127.0.0.1 MASTER_PORT={}", port - 1)
}

#[test]
fn a_port_that_another_program_has_is_named_with_its_origin_and_the_variable_for_another_one() {
    let port = stranger(|mut stream, _| drop(stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")));
    let origin = format!("port {port} is MASTER_PORT + 1, since GIN_PORT is not set");
    // For each rank a time to join that no test waits for.
    let year = config().joining(Duration::from_secs(365 * 24 * 3600));
    for (rank, what) in [(0, "in use"), (1, "what listens there is not gin: it sends `HTTP/1.1`")] {
        let (config, (to, from)) = (year.clone(), mpsc::channel());
        let job = found(&torchrun(rank, port));
        thread::spawn(move || to.send(job.bootstrap(config).unwrap_err().to_string()));
        let error = from.recv_timeout(Duration::from_secs(60)).expect("the rank ends soon");
        for part in [what, &format!("127.0.0.1:{port}"), &origin, "set GIN_PORT to a port that is free"] {
            assert!(error.contains(part), "{part:?} is not in `{error}`");
        }
    }
    let slurm = format!("SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_ID=7 SLURM_STEP_NODELIST=127.0.0.1 {SECRET}");
    let error = found(&slurm).bootstrap(config().joining(Duration::ZERO)).unwrap_err().to_string();
    assert!(error.contains("port 20217 is computed from SLURM_JOB_ID and SLURM_STEP_ID"), "{error}");
}

#[test]
fn a_listener_that_is_silent_or_closes_is_named_and_so_is_what_the_rank_waits_for() {
    let silent = stranger(|stream, held| held.push(stream));
    let closing = stranger(|stream, _| drop(stream));
    let half = stranger(|mut stream, held| {
        let _ = stream.write_all(b"gin-b");
        held.push(stream);
    });
    let cases = [(silent, "sends nothing within 5 s"), (closing, "closed"), (half, "sends nothing within 5 s")];
    thread::scope(|scope| {
        for (port, what) in cases {
            scope.spawn(move || {
                let brief = config().joining(Duration::from_secs(1));
                let error = found(&torchrun(1, port)).bootstrap(brief).unwrap_err().to_string();
                let at = format!("rank 1 cannot reach rank 0 at 127.0.0.1:{port}: ");
                for part in [&at, what, "MASTER_PORT + 1", "set GIN_PORT"] {
                    assert!(error.contains(part), "{part:?} is not in `{error}`");
                }
            });
        }
    });
}

/// Joins as a rank with the variables in `JOB`, and prints the error, in a process that a test started.
fn join_by_variable() -> bool {
    let Ok(words) = std::env::var("JOB") else { return false };
    let progress = config().joining(Duration::from_secs(3600)).progress(Duration::from_millis(200));
    println!("error: {}", found(&words).bootstrap(progress).unwrap_err());
    true
}

/// Runs a test of this program again, by this command and its arguments, as a rank with these variables.
fn again(command: &[&str], test: &str, words: &str) -> Command {
    let program = std::env::current_exe().unwrap();
    let mut all = command.to_vec();
    all.push(program.to_str().unwrap());
    let mut command = Command::new(all[0]);
    command.args(&all[1..]).args(["--exact", test, "--nocapture"]).env("JOB", words);
    command
}

#[test]
fn a_rank_that_waits_says_for_what_while_it_waits() {
    if join_by_variable() {
        return;
    }
    let port = stranger(|stream, _| drop(stream));
    let test = "a_rank_that_waits_says_for_what_while_it_waits";
    let mut rank = again(&[], test, &torchrun(1, port)).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    // The test is this wait for the line.
    let mut lines = BufReader::new(rank.stderr.take().unwrap()).lines().map(Result::unwrap);
    let line = lines.find(|line| line.starts_with("gin: rank 1 cannot reach rank 0 at 127.0.0.1"));
    rank.kill().unwrap();
    rank.wait().unwrap();
    let line = line.expect("a warning");
    assert!(line.contains("closed") && line.contains("set GIN_PORT") && line.contains("tries on"), "{line}");
}

#[test]
fn a_rank_whose_loopback_interface_is_down_ends_and_says_so() {
    if join_by_variable() {
        return;
    }
    let namespace = ["unshare", "--net", "--user", "--map-root-user"];
    match Command::new(namespace[0]).args(&namespace[1..]).arg("true").output() {
        Ok(tried) if tried.status.success() => {}
        tried => return println!("skipped: no namespaces ({tried:?})"),
    }
    let port = free_port();
    let test = "a_rank_whose_loopback_interface_is_down_ends_and_says_so";
    let output = again(&namespace, test, &torchrun(1, port)).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let error = text.lines().find_map(|line| line.split_once("error: ")).unwrap_or_else(|| panic!("{output:?}")).1;
    assert!(error.contains(&format!("rank 0 at 127.0.0.1:{port}: Network is unreachable")), "{error}");
    assert!(error.contains("ip link set lo up"), "{error}");
}

#[test]
fn two_ranks_with_one_local_rank_are_refused() {
    refused("RANK=0 WORLD_SIZE=4 LOCAL_RANK=3 LOCAL_WORLD_SIZE=2", &["LOCAL_RANK: 3", "2 ranks by LOCAL_WORLD_SIZE"]);
    let port = free_port();
    let twins = |rank| {
        let local = "GIN_LOCAL_RANK=1 GIN_LOCAL_RANKS=3";
        format!("GIN_RANK={rank} GIN_RANKS=3 {} GIN_PORT={port}", if rank == 0 { "GIN_LOCAL_RANKS=3" } else { local })
    };
    for outcome in meet(&[twins(0), twins(1), twins(2)]) {
        let error = outcome.unwrap_err().to_string();
        assert!(error.starts_with("GIN_LOCAL_RANK: ranks 1 and 2 both have 1, and by GIN_LOCAL_RANKS"), "{error}");
    }
    // Two launchers on one host, of one rank each.
    let port = free_port();
    let agent = |rank| {
        let words = format!("RANK={rank} WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1");
        format!("{words} MASTER_ADDR=127.0.0.1 MASTER_PORT={} {SECRET}", port - 1)
    };
    all_meet(&[agent(0), agent(1)]);
}

#[test]
fn addresses_may_have_brackets_and_those_of_one_link_are_refused() {
    let gin = |rank: u32, words: &str| format!("GIN_RANK={rank} GIN_RANKS=2 {SECRET} {words}");
    let port = free_port();
    if TcpListener::bind((Ipv6Addr::LOCALHOST, port)).is_ok() {
        all_meet(&[0, 1].map(|rank| gin(rank, &format!("GIN_ADDR=[::1] GIN_PORT={port}"))));
    }
    for (address, part) in [
        ("fe80::1%eth0", "valid on one link only"),
        ("[fe80::1]", "valid on one link only"),
        ("[::1]:4000", "a port belongs in GIN_PORT"),
        ("host:4000", "a port belongs in GIN_PORT"),
    ] {
        refused(&gin(0, &format!("GIN_ADDR={address} GIN_PORT=4000")), &["GIN_ADDR", address, part]);
    }
    let torch = format!("RANK=0 WORLD_SIZE=2 MASTER_ADDR=host:4000 MASTER_PORT=4000 {SECRET}");
    refused(&torch, &["MASTER_ADDR: `host:4000`"]);
}

#[test]
fn secrets_from_files_count_only_if_nobody_else_can_read_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("secret");
    let gin = |rank: u32, port: u16| {
        let file = path.display();
        format!("GIN_RANK={rank} GIN_RANKS=2 GIN_ADDR=127.0.0.1 GIN_PORT={port} GIN_SECRET_FILE={file}")
    };
    refused(&gin(0, 1), &["GIN_SECRET_FILE", "No such file"]);
    std::fs::write(&path, "0123456789abcdef\n").unwrap();
    for mode in [0o644, 0o640, 0o602] {
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        refused(&gin(0, 1), &["GIN_SECRET_FILE", &format!("mode {mode:03o}"), "chmod 600"]);
    }
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
    let port = free_port();
    // The end of the line is no part of it.
    let variable = format!("GIN_RANK=1 GIN_RANKS=2 GIN_ADDR=127.0.0.1 GIN_PORT={port} {SECRET}");
    all_meet(&[gin(0, port), variable]);
    std::fs::write(&path, "short\n").unwrap();
    refused(&gin(0, 1), &["GIN_SECRET_FILE", "at least 16 bytes"]);
    std::fs::write(&path, "x".repeat(5000)).unwrap();
    refused(&gin(0, 1), &["GIN_SECRET_FILE", "5000 bytes"]);
    let folder = folder.path().display();
    refused(&format!("GIN_RANK=0 GIN_RANKS=2 GIN_ADDR=n1 GIN_PORT=1 GIN_SECRET_FILE={folder}"), &["not a file"]);
}

#[test]
fn a_socket_that_the_launcher_left_open_serves_rank_0() {
    let rendezvous = Rendezvous::new(config().address(Some(Ipv4Addr::LOCALHOST.into()))).unwrap();
    let (id, fd) = (rendezvous.id().to_string(), rendezvous.as_fd().as_raw_fd());
    // As if it had come from another process.
    std::mem::forget(rendezvous);
    let gin = |rank: u32| format!("GIN_RANK={rank} GIN_RANKS=3 GIN_UNIQUE_ID={id} GIN_LISTEN_FD={fd}");
    all_meet(&[gin(0), gin(1), gin(2)]);
}

#[test]
fn the_launchers_socket_is_found_where_proc_is_hidden() {
    const HIDDEN: &str = "PROC_IS_HIDDEN";
    if std::env::var_os(HIDDEN).is_some() {
        assert!(!std::path::Path::new("/proc/self").exists());
        a_socket_that_the_launcher_left_open_serves_rank_0();
        return println!("served");
    }
    let hide = "mount -t tmpfs none /proc && exec \"$0\" \"$@\"";
    let namespace = |program: &str| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--user", "--map-root-user", "sh", "-c", hide, program]).env(HIDDEN, "1");
        command
    };
    match namespace("true").output() {
        Ok(tried) if tried.status.success() => {}
        tried => return println!("skipped: no namespaces ({tried:?})"),
    }
    let program = std::env::current_exe().unwrap();
    let test = ["--exact", "the_launchers_socket_is_found_where_proc_is_hidden", "--nocapture"];
    let output = namespace(program.to_str().unwrap()).args(test).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).contains("served"), "{output:?}");
}

#[test]
fn descriptors_that_are_not_the_launchers_are_left_alone() {
    let rendezvous = Rendezvous::new(config().address(Some(Ipv4Addr::LOCALHOST.into()))).unwrap();
    let id = rendezvous.id().to_string();
    let file = tempfile::tempfile().unwrap();
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    for fd in [0, file.as_raw_fd(), other.as_raw_fd(), 1_000_000] {
        let job = found(&format!("GIN_RANK=0 GIN_RANKS=2 GIN_UNIQUE_ID={id} GIN_LISTEN_FD={fd}"));
        let error = job.bootstrap(config()).unwrap_err();
        assert!(matches!(error, JobError::Value { variable: "GIN_LISTEN_FD", .. }), "{error:?}");
    }
    // They are open as before.
    file.metadata().unwrap();
    other.local_addr().unwrap();
}
