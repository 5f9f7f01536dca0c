// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks in several processes, each with virtual GPUs of its own.

use crate::common::gpus::{Engine, gpus};
use crate::common::{Comm, Pointer, Put, Registered, logged, until};
use crate::word;
use gin_gpu::Memory;
use gin_nccl::abi::{FLAG_NEVER_RESET, HANDLE_BYTES, PTR_CUDA, PTR_HOST};
use std::io::{BufRead, BufReader, Write};
use std::ops::Range;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// The number of the process, in a process that a test starts.
const VARIABLE: &str = "GIN_NCCL_TEST_PROCESS";

/// The beginning of a line by which a process gathers.
const MARK: &str = "gather ";

/// A process of a job.
struct Job {
    ranks: usize,
    first: usize,
    count: usize,
}

impl Job {
    /// Returns the part of process `number`, if each process has the given number of ranks.
    fn new(ranks: &[usize], number: usize) -> Self {
        Self { ranks: ranks.iter().sum(), first: ranks[..number].iter().sum(), count: ranks[number] }
    }

    /// Returns the words of all processes.
    fn gather(&self, own: &str) -> Vec<String> {
        println!("\n{MARK}{own}");
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "the test has ended");
        line.split_whitespace().map(str::to_owned).collect()
    }

    fn meet(&self) {
        self.gather("here");
    }

    fn connect(&self) -> Comm {
        Comm::gathered(self.first, self.count, |own| {
            let hex = |bytes: &[u8; HANDLE_BYTES]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
            let all = self.gather(&own.iter().map(hex).collect::<String>()).concat();
            let byte = |at: usize| u8::from_str_radix(&all[2 * at..2 * at + 2], 16).unwrap();
            (0..self.ranks).map(|rank| std::array::from_fn(|index| byte(rank * HANDLE_BYTES + index))).collect()
        })
    }
}

/// A rank of a job, by its index here. Its peers have ranks.
#[derive(Clone, Copy)]
struct Rank<'a> {
    comm: &'a Comm,
    index: usize,
    rank: usize,
    ranks: usize,
    window: &'a Registered,
    table: &'a Registered,
    /// The handle of a window of two allocations.
    two: usize,
    /// A word of ordinary memory of the host, and its handle.
    value: &'a AtomicU64,
    host: usize,
}

const ROUNDS: u64 = 150;
/// The bytes of a large put, which takes turns of lanes.
const LARGE: u64 = 300 << 10;
/// The parts of a window: words to send, words of each sender, words that signals raise, large puts.
const SENT: u64 = 0;
const ARRIVED: u64 = 64 << 10;
const RAISED: u64 = 128 << 10;
const LARGE_SENT: u64 = 192 << 10;
const LARGE_ARRIVED: u64 = 1 << 20;
const WINDOW: u64 = 3 << 20;
/// The word of the table that all ranks raise, after one for each sender.
const SHARED: u64 = 8;
/// The bytes of each of two allocations.
const HALF: u64 = 64 << 10;

/// Returns whether each rank puts large ones in this round; other rounds may have some.
fn has_large(round: u64) -> bool {
    round.is_multiple_of(8)
}

impl Rank<'_> {
    /// Returns the offset of the word of a round in a part.
    fn slot(part: u64, rank: usize, round: u64) -> u64 {
        part + (rank as u64 * ROUNDS + round - 1) * 8
    }

    /// Puts a word to each rank in each round and raises a signal behind it. Returns the number of signals in windows.
    fn send(&self, seed: u64) -> u64 {
        let Self { comm, index, rank, ranks, window, table, .. } = *self;
        let mut random = oorandom::Rand64::new(seed.into());
        let (handle, signals) = (window.handles[index], table.handles[index]);
        let (mut requests, mut raised) = (Vec::new(), 0);
        for round in 1..=ROUNDS {
            let from = Self::slot(SENT, 0, round);
            window.memory[index].write(from, &[round]).unwrap();
            for peer in 0..ranks {
                let put = Put::new((handle, from), (handle, Self::slot(ARRIVED, rank, round)), 8);
                let own = |put: Put| put.and(signals, rank as u64, None);
                match if has_large(round) { 1 } else { random.rand_range(0..6) } {
                    // The signal alone covers the put.
                    0 => {
                        comm.post(index, peer, &put);
                        requests.push(comm.post(index, peer, &own(Put::signal(signals, 0, None))));
                    }
                    1 => {
                        // Lanes take turns for large puts, and the signal covers them.
                        requests.drain(..).for_each(|request| comm.wait(index, request));
                        window.memory[index].write(LARGE_SENT + LARGE - 8, &[round]).unwrap();
                        let to = LARGE_ARRIVED + rank as u64 * (LARGE + 8);
                        requests.push(comm.post(index, peer, &Put::new((handle, LARGE_SENT), (handle, to), LARGE)));
                        requests.push(comm.post(index, peer, &own(put)));
                    }
                    2 => {
                        requests.push(comm.post(index, peer, &own(put)));
                        let word = RAISED / 8 + rank as u64;
                        requests.push(comm.post(index, peer, &Put::signal(handle, word, None)));
                        raised += u64::from(peer == (rank + 1) % ranks);
                    }
                    // A value of NCCL's memory, which changes at once; often nothing is in flight.
                    3 => {
                        if random.rand_range(0..2) == 0 {
                            requests.drain(..).for_each(|request| comm.wait(index, request));
                        }
                        self.value.store(round, Ordering::Relaxed);
                        let host = std::ptr::with_exposed_provenance_mut(self.host);
                        requests.push(comm.post(index, peer, &own(Put { from: (host, 0), ..put })));
                        self.value.store(u64::MAX, Ordering::Relaxed);
                    }
                    _ => requests.push(comm.post(index, peer, &own(put))),
                }
                requests.push(comm.post(index, peer, &Put::signal(signals, SHARED, Some(round))));
            }
            if random.rand_range(0..8) == 0 {
                requests.drain(..).for_each(|request| comm.wait(index, request));
            }
        }
        requests.drain(..).for_each(|request| comm.wait(index, request));
        raised
    }

    /// Watches the words of all senders: each signal comes behind its words, and no sum falls.
    fn watch(&self) {
        let Self { index, ranks, window, table, .. } = *self;
        let (mut seen, mut sum, total) = (vec![0; ranks], 0, ranks as u64 * ROUNDS * (ROUNDS + 1) / 2);
        until("all signals have come", || {
            for (sender, seen) in seen.iter_mut().enumerate() {
                let now = word(table, index, sender as u64).load(Ordering::Acquire);
                assert!(now >= *seen && now <= ROUNDS, "rank {sender}: {now} after {seen}");
                for round in *seen + 1..=now {
                    let found = window.word(index, Self::slot(ARRIVED, sender, round) / 8);
                    assert_eq!(found, round, "signal {now} of rank {sender} has come before its word");
                }
                if let Some(round) = (*seen + 1..=now).rfind(|&round| has_large(round)) {
                    let last = LARGE_ARRIVED + sender as u64 * (LARGE + 8) + LARGE - 8;
                    assert!(window.word(index, last / 8) >= round, "signal {now} has come before a large put");
                }
                *seen = now;
            }
            let now = word(table, index, SHARED).load(Ordering::Acquire);
            assert!(now >= sum && now <= total, "{now} after {sum}");
            sum = now;
            sum == total && seen.iter().all(|&seen| seen == ROUNDS)
        });
    }

    /// Gets from each rank, and puts and raises signals across the border of two allocations.
    fn get(&self) {
        let Self { comm, index, rank, ranks, window, .. } = *self;
        let two: Pointer = std::ptr::with_exposed_provenance_mut(self.two);
        let (handle, to) = (window.handles[index], (window.handles[index], Self::slot(SENT, 1, 1)));
        for peer in 0..ranks {
            let round = 1 + peer as u64;
            comm.wait(index, comm.get(index, peer, (handle, Self::slot(SENT, 0, round)), to, 8));
            assert_eq!(window.word(index, to.1 / 8), round);
            let border = HALF - 8 * (1 + 2 * rank as u64);
            let part = (two, border);
            comm.wait(index, comm.post(index, peer, &Put::new((handle, Self::slot(SENT, 0, 1)), part, HALF / 2)));
            comm.wait(index, comm.post(index, peer, &Put::signal(two, 2 * HALF / 8 - 1 - rank as u64, Some(5))));
        }
    }
}

/// All that ranks do, with ranks of the same and of other processes.
fn exchange(job: &Job) {
    Engine::start(job.first as u64 + 1);
    let comm = job.connect();
    let (window, table) = (comm.register(WINDOW, 0), comm.register(128, FLAG_NEVER_RESET));
    let halves: Vec<_> = (0..job.count).map(|index| gpus().allocate_two(comm.first_gpu + index, HALF)).collect();
    let two: Vec<_> = halves.iter().enumerate().map(|(index, halves)| register_two(&comm, index, halves)).collect();
    let values: Vec<_> = (0..job.count).map(|_| AtomicU64::new(0)).collect();
    let hosts: Vec<_> = values.iter().enumerate().map(|(index, value)| register_value(&comm, index, value)).collect();
    let is_done = AtomicBool::new(false);
    let raised = std::thread::scope(|scope| {
        // The thread of NCCL.
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                (0..job.count).for_each(|index| assert_eq!(comm.progress(index), 0));
            }
        });
        let rank = |index: usize| Rank {
            comm: &comm,
            index,
            rank: job.first + index,
            ranks: job.ranks,
            window: &window,
            table: &table,
            two: two[index],
            value: &values[index],
            host: hosts[index],
        };
        let senders: Vec<_> = (0..job.count)
            .map(|index| {
                let one = rank(index);
                scope.spawn(move || one.watch());
                scope.spawn(move || one.send(one.rank as u64))
            })
            .collect();
        let raised: Vec<String> = senders.into_iter().map(|sender| sender.join().unwrap().to_string()).collect();
        job.meet();
        (0..job.count).for_each(|index| rank(index).get());
        let raised = job.gather(&raised.join(","));
        let raised: Vec<u64> = raised.join(",").split(',').map(|count| count.parse().unwrap()).collect();
        for (index, halves) in halves.iter().enumerate() {
            let sender = (job.first + index + job.ranks - 1) % job.ranks;
            let at = RAISED / 8 + sender as u64;
            until("signals in windows", || window.word(index, at) == raised[sender]);
            for rank in 0..job.ranks as u64 {
                until("signals in the second allocation", || {
                    let mut word = [0u64];
                    halves[1].read(HALF - 8 * (1 + rank), &mut word).unwrap();
                    word[0] == 5
                });
            }
            check_border(halves, job.ranks as u64);
        }
        job.meet();
        is_done.store(true, Ordering::Relaxed);
        raised
    });
    assert!(raised.iter().all(|&count| count > 0));
    // Rank 0 deregisters its window of two allocations before the others do.
    let deregister = |index: usize| comm.deregister(index, std::ptr::with_exposed_provenance_mut(two[index]));
    if job.first == 0 {
        assert_eq!(deregister(0), 0);
    }
    job.meet();
    if job.first > 0 {
        let (own, gone) = ((window.handles[0], 0), std::ptr::with_exposed_provenance_mut(two[0]));
        for (to, bytes, reason) in [
            ((gone, 0), 8, "rank 0 has deregistered the memory of the destination"),
            ((window.handles[0], WINDOW - 8), 16, "is not in the 3145728 bytes that rank 0 has registered"),
            ((table.handles[0], 0), 8, "the destination is in memory of rank 0, in another process, that no other"),
        ] {
            assert_ne!(comm.put(0, 0, &Put::new(own, to, bytes)).0, 0, "{reason}");
            assert!(logged(&["to rank 0: ", reason]), "{reason}");
        }
    }
    job.meet();
    (0..job.count).filter(|index| job.first + index > 0).for_each(|index| assert_eq!(deregister(index), 0));
    let host = |index: usize| comm.deregister(index, std::ptr::with_exposed_provenance_mut(hosts[index]));
    (0..job.count).for_each(|index| assert_eq!(host(index), 0));
    comm.end(&[&window, &table]);
    job.meet();
}

fn register_value(comm: &Comm, index: usize, value: &AtomicU64) -> usize {
    let address = value.as_ptr().expose_provenance() as u64;
    comm.register_at(index, address, 8, PTR_HOST, 0).expose_provenance()
}

fn register_two(comm: &Comm, index: usize, halves: &[Arc<Memory>; 2]) -> usize {
    comm.register_at(index, halves[0].address(), 2 * HALF, PTR_CUDA, 0).expose_provenance()
}

/// Checks that the put of each rank has written the words on both sides of the border.
fn check_border(halves: &[Arc<Memory>; 2], ranks: u64) {
    let (mut before, mut after) = (vec![0u64; 2 * ranks as usize], [0u64; 8]);
    halves[0].read(HALF - 16 * ranks, &mut before).unwrap();
    halves[1].read(0, &mut after).unwrap();
    // The last put may be of any rank; each wrote 1, 2, 3, and so on.
    let first = after[0];
    assert!(first >= 2 && first <= 2 * ranks, "{first}");
    assert!((0..8).all(|index| after[index as usize] == first + index), "{after:?}");
    let last = before[2 * ranks as usize - 1];
    assert!(last > 0 && last < 2 * ranks, "{last}");
}

/// A receiver that takes no signals for a while.
fn room(job: &Job) {
    const COUNT: u64 = 20_000;
    Engine::start(1);
    let comm = job.connect();
    // More regions than a block of the board has.
    let mut words = vec![vec![0u64; 8]];
    let hosts: Vec<_> = (0..300).flat_map(|_| comm.register_host(&mut words)).collect();
    let (window, table) = comm.register_with_table(64);
    let (part, mut requests) = ((window.handles[0], 0), Vec::new());
    if job.first == 0 {
        for round in 0..COUNT {
            let put = Put::new(part, part, [0, 8][round as usize % 2]).and(table.handles[0], round % 3, Some(round));
            requests.push(comm.post(0, 1, &put));
        }
        requests.into_iter().for_each(|request| comm.wait(0, request));
    }
    job.meet();
    until("all signals are raised", || {
        assert_eq!(comm.progress(0), 0);
        let sum: u64 = (0..3).map(|index| table.word(0, index)).sum();
        job.first == 0 || sum == COUNT * (COUNT - 1) / 2
    });
    if job.first == 0 {
        // The last messages have waited here.
        let done = std::thread::spawn({
            let job = Job { ..*job };
            move || job.meet()
        });
        until("the other rank has all", || {
            assert_eq!(comm.progress(0), 0);
            done.is_finished()
        });
    } else {
        job.meet();
    }
    hosts.into_iter().for_each(|host| assert_eq!(comm.deregister(0, host), 0));
    comm.end(&[&window, &table]);
}

/// The calls of the progress function in which the end of a process is found.
const FOUND: Range<u32> = 0..3 << 14;

/// Rank 2 ends as it should, rank 1 is killed.
fn loss(job: &Job) {
    let engine = Engine::start(1);
    let comm = job.connect();
    let (window, table) = comm.register_with_table(64);
    let signal = Put::signal(table.handles[0], 0, None);
    comm.wait(0, comm.post(0, (job.first + 1) % 3, &signal));
    until("the signal comes", || {
        assert_eq!(comm.progress(0), 0);
        table.word(0, 0) == 1
    });
    job.meet();
    if job.first == 2 {
        comm.end(&[&window, &table]);
        return;
    }
    std::io::stdin().read_line(&mut String::new()).unwrap();
    FOUND.for_each(|_| assert_eq!(comm.progress(0), 0));
    assert!(!comm.has_failed(0), "a rank that has ended its communicator is no loss");
    let part = (window.handles[0], 0);
    if job.first == 1 {
        // A signal that never becomes ready: the bytes do not arrive.
        engine.hold(true);
        comm.post(0, 0, &Put::new(part, part, 8).and(table.handles[0], 1, None));
    }
    println!("\n{MARK}ready");
    if job.first == 1 {
        // Until it is killed.
        std::thread::sleep(Duration::from_secs(60));
        return;
    }
    std::io::stdin().read_line(&mut String::new()).unwrap();
    let failed = FOUND.map(|_| comm.progress(0)).filter(|&code| code != 0).count();
    assert_eq!((failed, comm.has_failed(0)), (1, true));
    assert!(logged(&[
        "rmaProgress: rank 0: communicator: the process of rank 1, ",
        "has ended before the communicator"
    ]));
    assert_eq!(table.word(0, 1), 0);
    assert_ne!(comm.put(0, 1, &Put::new(part, part, 8)).0, 0);
    assert!(logged(&["rank 0: put of 8 bytes to rank 1: the process of rank 1 has ended"]));
    // A window that the lost rank does not register.
    let memory = gpus().allocate(comm.first_gpu, 64, true);
    assert_ne!(comm.try_register_at(0, memory.address(), 64, PTR_CUDA, 0).0, 0);
    assert!(logged(&["regMrSym: rank 0", "register: the process of rank", "has ended"]));
    comm.end(&[&window, &table]);
}

/// A started process.
struct Process {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Process {
    fn start(test: &str, number: usize) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([&format!("processes::{test}"), "--exact", "--nocapture", "--test-threads=1"]);
        command.env(VARIABLE, number.to_string());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, input, output }
    }

    /// Returns what the process gathers next; `None` at its end.
    fn hear(&mut self) -> Option<String> {
        let mut line = String::new();
        while self.output.read_line(&mut line).unwrap() > 0 {
            if let Some(own) = line.trim_end().strip_prefix(MARK) {
                return Some(own.to_owned());
            }
            line.clear();
        }
        None
    }

    fn tell(&mut self, words: &str) {
        writeln!(self.input, "{words}").unwrap();
    }

    fn end(mut self) {
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts the processes of a test, each of which runs the same test by its name. In such a process, runs its part of
/// the scene and returns `None`.
fn start(test: &str, scene: fn(&Job), ranks: &[usize]) -> Option<Vec<Process>> {
    let Ok(number) = std::env::var(VARIABLE) else {
        return Some((0..ranks.len()).map(|number| Process::start(test, number)).collect());
    };
    std::thread::spawn(|| {
        std::thread::sleep(Duration::from_secs(60));
        eprintln!("a process does not end");
        std::process::exit(1);
    });
    scene(&Job::new(ranks, number.parse().unwrap()));
    None
}

/// Gathers once for all processes. Returns whether all have taken part; none does at the end.
fn gather(processes: &mut [Process]) -> bool {
    let all: Vec<_> = processes.iter_mut().map(Process::hear).collect();
    let Some(all) = all.iter().cloned().collect::<Option<Vec<String>>>() else {
        assert!(all.iter().all(Option::is_none), "a process has ended early: {all:?}");
        return false;
    };
    processes.iter_mut().for_each(|process| process.tell(&all.join(" ")));
    true
}

fn run(test: &str, scene: fn(&Job), ranks: &[usize]) {
    let Some(mut processes) = start(test, scene, ranks) else { return };
    assert!(gather(&mut processes), "the processes have not run the test {test}");
    while gather(&mut processes) {}
    processes.into_iter().for_each(Process::end);
}

#[test]
fn ranks_of_several_processes_put_get_and_raise_signals_in_order() {
    run("ranks_of_several_processes_put_get_and_raise_signals_in_order", exchange, &[1, 1, 1]);
}

#[test]
fn processes_may_have_several_ranks() {
    run("processes_may_have_several_ranks", exchange, &[2, 1]);
}

#[test]
fn there_is_room_for_signals_that_another_process_does_not_take() {
    run("there_is_room_for_signals_that_another_process_does_not_take", room, &[1, 1]);
}

#[test]
fn a_process_that_is_killed_is_reported_by_its_rank_and_one_that_ends_is_not() {
    let test = "a_process_that_is_killed_is_reported_by_its_rank_and_one_that_ends_is_not";
    let Some(mut all) = start(test, loss, &[1, 1, 1]) else { return };
    assert!(gather(&mut all) && gather(&mut all));
    let last = all.pop().unwrap();
    last.end();
    all.iter_mut().for_each(|process| process.tell("go"));
    assert!(all.iter_mut().all(|process| process.hear().is_some()));
    drop(all.pop());
    let mut first = all.pop().unwrap();
    first.tell("go");
    assert!(first.hear().is_none());
    first.end();
}
