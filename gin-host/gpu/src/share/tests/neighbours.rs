// SPDX-License-Identifier: MIT OR Apache-2.0
//! Processes on the same host that disturb, and processes in other namespaces.

use super::*;
use rustix::process::Uid;
use rustix::thread::set_thread_res_uid;
use std::fmt::Write as _;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::process::Command;

/// The key of the parent's memory, in a process that a test starts.
const KEY: &str = "GIN_TEST_SHARED_KEY";

/// Connects as any process can that reads `/proc/net/unix`.
fn connect() -> UnixStream {
    let hex: String = process().iter().map(|byte| format!("{byte:02x}")).collect();
    let address = SocketAddr::from_abstract_name(format!("gin-{hex}")).unwrap();
    UnixStream::connect_addr(&address).unwrap()
}

/// Runs `work` on a thread of another user; `None` where this one may not change users.
fn as_stranger<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let thread = std::thread::spawn(move || {
        let user = Some(Uid::from_raw(65533));
        set_thread_res_uid(user, user, user).map(|()| work())
    });
    match thread.join().unwrap() {
        Ok(done) => Some(done),
        Err(error) => {
            println!("skipped: no thread of another user ({error})");
            None
        }
    }
}

#[test]
fn other_users_cannot_keep_it_from_answering() {
    let memory = Memory::shared(&device(), MemoryKind::Device, 8).unwrap();
    let key = offer(&memory).0;
    // More than are answered at a time.
    let Some(connections) = as_stranger(|| (0..80).map(|_| connect()).collect::<Vec<_>>()) else { return };
    elsewhere(&key).unwrap();
    for mut connection in connections {
        assert_eq!(connection.read(&mut [0]).unwrap(), 0, "closed, and nothing was sent");
    }
}

#[test]
fn silent_connections_of_the_same_user_do_not_keep_it_from_answering() {
    let memory = Memory::shared(&device(), MemoryKind::Device, 8).unwrap();
    let key = offer(&memory).0;
    let silent: Vec<_> = (0..8).map(|_| connect()).collect();
    // Nonsense does no harm either.
    let _ = connect().write_all(&[0xff; 100]);
    elsewhere(&key).unwrap();
    drop(silent);
}

#[test]
fn a_question_that_drips_is_cut_off() {
    let memory = Memory::shared(&device(), MemoryKind::Device, 8).unwrap();
    let key = offer(&memory).0;
    let mut dripping = connect();
    let mut sent = 0;
    while sent < QUESTION - 1 && dripping.write_all(&[0]).is_ok() {
        sent += 1;
        // Shorter than the deadline of a question, and all together longer.
        std::thread::sleep(Duration::from_millis(500));
    }
    assert!(sent < QUESTION - 1, "it was read to the end");
    elsewhere(&key).unwrap();
}

#[test]
fn who_takes_the_name_of_a_process_that_has_ended_hears_no_secret() {
    let memory = Memory::shared(&device(), MemoryKind::Device, 8).unwrap();
    let mut key = offer(&memory).0;
    let name = random();
    key[..16].copy_from_slice(&name);
    let listen = move || net::UnixListener::bind_addr(&SocketAddr::from_abstract_name(socket_name(&name)).unwrap());
    let Some(listener) = as_stranger(listen) else { return };
    let listener = listener.unwrap();
    let error = elsewhere(&key).unwrap_err();
    assert!(error.contains("as user 65533"), "{error}");
    let mut heard = Vec::new();
    listener.accept().unwrap().0.read_to_end(&mut heard).unwrap();
    assert_eq!(heard, []);
    assert_eq!(life::has_ended(&name), (true, None));
}

/// Runs this test again by `unshare` with these arguments, and returns the line that it prints about the parent's
/// memory; `None` where namespaces cannot be made.
fn in_namespaces(arguments: &[&str], test: &str) -> Option<String> {
    let memory = Memory::shared(&device(), MemoryKind::Device, 8).unwrap();
    let mut hex = String::new();
    for byte in offer(&memory).0 {
        write!(hex, "{byte:02x}").unwrap();
    }
    let unshare = |program: &str| {
        let mut command = Command::new("unshare");
        command.args(arguments).arg(program);
        command
    };
    match unshare("true").output() {
        Ok(tried) if tried.status.success() => {}
        tried => {
            println!("skipped: no namespaces ({tried:?})");
            return None;
        }
    }
    let program = std::env::current_exe().unwrap();
    let mut command = unshare(program.to_str().unwrap());
    let output = command.args(["--exact", test, "--nocapture"]).env(KEY, hex).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().find_map(|line| line.split_once("parent: "));
    Some(line.unwrap_or_else(|| panic!("{output:?}")).1.to_owned())
}

/// Takes the parent's memory and prints the outcome, in a process that a test started.
fn take_the_parents() -> bool {
    let Ok(hex) = std::env::var(KEY) else { return false };
    let key: Vec<u8> = (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect();
    let outcome = elsewhere(&key).map_or_else(|error| error, |memory| format!("{} bytes", memory.bytes()));
    let ended = life::has_ended(key.first_chunk().unwrap());
    println!("parent: {outcome}, ended {ended:?}");
    true
}

#[test]
fn processes_of_other_pid_namespaces_share_memory() {
    if take_the_parents() {
        return;
    }
    let test = "share::tests::neighbours::processes_of_other_pid_namespaces_share_memory";
    let Some(line) = in_namespaces(&["--pid", "--fork"], test) else { return };
    assert_eq!(line, "8 bytes, ended (false, None)");
}

#[test]
fn a_process_whose_user_has_no_number_here_is_refused_by_that_name() {
    if take_the_parents() {
        return;
    }
    let test = "share::tests::neighbours::a_process_whose_user_has_no_number_here_is_refused_by_that_name";
    let Some(line) = in_namespaces(&["--user"], test) else { return };
    assert!(line.contains("another user namespace"), "{line}");
}
